//! `#[distributed_lock]` and `#[tracing::instrument]` on one function, in both orders.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use dlock::{Error, LockClient, distributed_lock};
use tracing::field::{Field, Visit};
use tracing::instrument;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;

/// Not `Debug`: `#[instrument]` must not be made to record it.
struct Opaque;

struct Order {
    id: u64,
    _rest: Opaque,
}

#[distributed_lock(key = "order:{id}", lock = client)]
#[instrument(skip(client), err)]
async fn lock_first(client: &LockClient, id: u64, _: Opaque) -> Result<String, Error> {
    tokio::task::yield_now().await;
    Ok(key())
}

#[instrument(skip(client), err, ret)]
#[distributed_lock(key = "order:{id}", lock = client)]
async fn lock_second(client: &LockClient, id: u64, _: Opaque) -> Result<String, Error> {
    tokio::task::yield_now().await;
    Ok(key())
}

#[distributed_lock(key = "order:{id}", lock = client)]
#[cfg_attr(all(), instrument(skip_all, fields(order = id)))]
async fn lock_first_with_patterns(client: &LockClient, Order { id, .. }: Order) -> Result<String, Error> {
    Ok(key())
}

#[instrument(skip_all, fields(order = id))]
#[distributed_lock(key = "order:{id}", lock = client)]
async fn lock_second_with_patterns(client: &LockClient, Order { id, .. }: Order) -> Result<String, Error> {
    Ok(key())
}

use tracing::instrument as traced;

#[distributed_lock(key = "order:{id}", lock = client)]
#[traced(skip_all, fields(order = id))]
async fn of_another_name(client: &LockClient, Order { id, .. }: Order) -> Result<String, Error> {
    Ok(key())
}

#[async_trait]
trait Orders {
    async fn lock_first(&self, pair: (u64, u64)) -> Result<String, Error>;
    async fn lock_second(&self, pair: (u64, u64)) -> Result<String, Error>;
}

struct Store {
    locks: LockClient,
    name: String,
}

#[async_trait]
impl Orders for Store {
    #[distributed_lock(key = "{self.name}:{a}", lock = self.locks)]
    #[instrument(skip(self))]
    async fn lock_first(&self, (a, _b): (u64, u64)) -> Result<String, Error> {
        Ok(format!("{} {}", key(), self.name))
    }

    #[instrument(skip(self), err)]
    #[distributed_lock(key = "{self.name}:{a}", lock = self.locks)]
    async fn lock_second(&self, (a, _b): (u64, u64)) -> Result<String, Error> {
        Ok(format!("{} {}", key(), self.name))
    }
}

fn key() -> String {
    dlock::current()
        .expect("the body runs under the lock")
        .key()
        .as_str()
        .to_owned()
}

/// The spans that were made, as `name field=value …`.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Vec<String>>>);

impl Spans {
    fn watch(&self) -> DefaultGuard {
        tracing::subscriber::set_default(self.clone())
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.push_str(&format!(" {}={value:?}", field.name()));
    }
}

impl tracing::Subscriber for Spans {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.is_span() && metadata.module_path() == Some(module_path!())
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut text = Text(span.metadata().name().to_owned());
        span.record(&mut text);
        self.0.lock().unwrap().push(text.0);
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &tracing::Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

fn order() -> Order {
    Order { id: 7, _rest: Opaque }
}

#[tokio::test]
async fn both_attributes_work_in_either_order() {
    let (spans, client) = (Spans::default(), LockClient::memory());
    let _watch = spans.watch();
    assert_eq!(lock_first(&client, 7, Opaque).await.unwrap(), "order:7");
    assert_eq!(lock_second(&client, 7, Opaque).await.unwrap(), "order:7");
    assert_eq!(spans.take(), ["lock_first id=7", "lock_second id=7"]);
}

#[tokio::test]
async fn arguments_keep_the_names_that_spans_record() {
    let (spans, client) = (Spans::default(), LockClient::memory());
    let _watch = spans.watch();
    assert_eq!(
        lock_first_with_patterns(&client, order()).await.unwrap(),
        "order:7"
    );
    assert_eq!(
        lock_second_with_patterns(&client, order()).await.unwrap(),
        "order:7"
    );
    assert_eq!(of_another_name(&client, order()).await.unwrap(), "order:7");
    assert_eq!(
        spans.take(),
        [
            "lock_first_with_patterns order=7",
            "lock_second_with_patterns order=7",
            "of_another_name order=7"
        ]
    );
}

#[tokio::test]
async fn both_attributes_work_under_async_trait() {
    let spans = Spans::default();
    let _watch = spans.watch();
    let store = Store {
        locks: LockClient::memory(),
        name: "store".into(),
    };
    assert_eq!(store.lock_first((7, 8)).await.unwrap(), "store:7 store");
    assert_eq!(store.lock_second((7, 8)).await.unwrap(), "store:7 store");
    let names: Vec<String> = spans
        .take()
        .iter()
        .filter_map(|span| span.split(' ').next().map(str::to_owned))
        .collect();
    assert_eq!(names, ["lock_first", "lock_second"]);
}
