//! The client of an attribute: whatever gives one, or a reference to one.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use dlock::{Error, LockClient, NotRun, distributed_lock, once};

static EVERYWHERE: LazyLock<LockClient> = LazyLock::new(LockClient::memory);

enum Failure {
    Lock,
    NotRun,
}

impl From<Error> for Failure {
    fn from(_: Error) -> Failure {
        Failure::Lock
    }
}

impl From<NotRun> for Failure {
    fn from(_: NotRun) -> Failure {
        Failure::NotRun
    }
}

type Outcome = Result<u32, Failure>;

struct Tenants {
    first: LockClient,
    boxed: Box<LockClient>,
    shared: Arc<LockClient>,
    all: HashMap<u32, LockClient>,
}

struct Handle(LockClient);

impl From<&Handle> for LockClient {
    fn from(handle: &Handle) -> LockClient {
        handle.0.clone()
    }
}

impl Tenants {
    fn of(&self, n: u32) -> Result<&LockClient, Error> {
        self.all.get(&n).ok_or(Error::NoDefaultClient)
    }

    fn new_one(&self) -> LockClient {
        self.first.clone()
    }

    #[distributed_lock(key = "report", lock = self.of(n)?)]
    async fn by_question_mark(&self, n: u32) -> Outcome {
        Ok(1)
    }

    #[distributed_lock(key = "report", lock = if n > 1 { &self.first } else { &self.boxed })]
    async fn by_if(&self, n: u32) -> Outcome {
        Ok(1)
    }

    #[distributed_lock(key = "report", lock = match n { 1 => self.of(n)?, _ => &self.first })]
    async fn by_match(&self, n: u32) -> Outcome {
        Ok(1)
    }

    #[distributed_lock(key = "report", lock = { self.of(n)? })]
    async fn by_block(&self, n: u32) -> Outcome {
        Ok(1)
    }

    #[distributed_lock(key = "report", lock = self.new_one())]
    async fn by_value(&self) -> Outcome {
        Ok(1)
    }

    #[distributed_lock(key = "report", lock = handle.into())]
    async fn by_conversion(&self, handle: &Handle) -> Outcome {
        Ok(1)
    }

    #[distributed_lock(key = "report", lock = EVERYWHERE)]
    async fn of_a_static(&self) -> Outcome {
        Ok(1)
    }

    #[distributed_lock(key = "report", lock = *EVERYWHERE)]
    async fn of_a_dereferenced_static(&self) -> Outcome {
        Ok(1)
    }

    #[distributed_lock(key = "report", lock = self.shared)]
    async fn of_an_arc(&self) -> Outcome {
        Ok(1)
    }

    #[distributed_lock(key = "report", lock = self.boxed)]
    async fn of_a_box(&self) -> Outcome {
        Ok(1)
    }

    #[distributed_lock(key = "report", lock = self.all[&n])]
    async fn of_a_map(&self, n: u32) -> Outcome {
        Ok(1)
    }

    #[distributed_lock(keys = ["a", "b"], lock = async { self.of(n) }.await?)]
    async fn of_a_future(&self, n: u32) -> Outcome {
        Ok(1)
    }

    #[once(key = "by_question_mark", client = self.of(n)?)]
    async fn once_by_question_mark(&self, n: u32) -> Outcome {
        Ok(1)
    }

    #[once(key = "by_if", client = if n > 1 { &self.first } else { &self.boxed })]
    async fn once_by_if(&self, n: u32) -> Outcome {
        Ok(1)
    }

    #[once(key = "of_an_arc", client = self.shared)]
    async fn once_of_an_arc(&self) -> Outcome {
        Ok(1)
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let first = LockClient::memory();
    let handle = Handle(first.clone());
    let tenants = Tenants {
        boxed: Box::new(first.clone()),
        shared: Arc::new(first.clone()),
        all: HashMap::from([(1, first.clone())]),
        first,
    };
    for outcome in [
        tenants.of_a_static().await,
        tenants.of_a_dereferenced_static().await,
        tenants.by_question_mark(1).await,
        tenants.by_if(1).await,
        tenants.by_match(1).await,
        tenants.by_block(1).await,
        tenants.by_value().await,
        tenants.by_conversion(&handle).await,
        tenants.of_an_arc().await,
        tenants.of_a_box().await,
        tenants.of_a_map(1).await,
        tenants.of_a_future(1).await,
        tenants.once_by_question_mark(1).await,
        tenants.once_by_if(1).await,
        tenants.once_of_an_arc().await,
    ] {
        assert!(matches!(outcome, Ok(1)));
    }
    assert!(matches!(tenants.by_question_mark(2).await, Err(Failure::Lock)));
}
