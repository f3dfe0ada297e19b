//! Bodies of every shape, on one line and on several: neither the compiler nor clippy, with all of its groups on,
//! has anything to say about what the attribute makes of them. To be run by `cargo test` and by `cargo clippy`.
#![deny(
    warnings,
    unused,
    rust_2018_idioms,
    unreachable_pub,
    unused_qualifications,
    let_underscore_drop
)]
#![deny(clippy::all, clippy::pedantic, clippy::nursery)]
// What these functions do is nobody's example.
#![allow(
    clippy::unused_async,
    clippy::redundant_pub_crate,
    clippy::unnecessary_wraps,
    clippy::identity_op
)]

use dlock::{Error, LockClient, NotRun, distributed_lock, once};

type Outcome = Result<u32, Error>;

fn told(_: Error) -> u32 {
    0
}

#[rustfmt::skip]
mod on_one_line {
    use super::{Error, LockClient, Outcome, distributed_lock, over_several, told};

    #[distributed_lock(key = "m", lock = client)]
    pub(crate) async fn call(client: LockClient) -> Outcome { Ok(3) }

    #[distributed_lock(key = "m", lock = client)]
    pub(crate) async fn by_reference(client: &LockClient) -> Outcome { Ok(3) }

    #[distributed_lock(key = "m", lock = client, on_error = told)]
    pub(crate) async fn literal(client: LockClient) -> u32 { 3 }

    #[distributed_lock(key = "m", lock = client, on_error = told)]
    pub(crate) async fn path(client: LockClient, n: u32) -> u32 { n }

    #[distributed_lock(key = "m", lock = client, on_error = told)]
    pub(crate) async fn block(client: LockClient, n: u32) -> u32 { { n }.max(2) }

    #[distributed_lock(key = "m", lock = client, on_error = drop)]
    pub(crate) async fn nothing(client: LockClient) {}

    #[distributed_lock(key = "m", lock = client, on_error = drop)]
    pub(crate) async fn statement(client: LockClient) { drop(String::new()); }

    #[distributed_lock(key = "m", lock = client, on_error = drop)]
    pub(crate) async fn unit_call(client: LockClient, text: String) { drop(text) }

    #[distributed_lock(key = "m", lock = client)]
    pub(crate) async fn branches(client: LockClient, n: u32) -> Outcome { if n > 1 { Ok(n) } else { Ok(1) } }

    #[distributed_lock(key = "m", lock = client)]
    pub(crate) async fn arms(client: LockClient, n: Option<u32>) -> Outcome { match n { Some(0) => Ok(1), Some(n) => Ok(n), None => Ok(0) } }

    #[distributed_lock(key = "m", lock = client, on_error = drop)]
    pub(crate) async fn macro_call(client: LockClient, n: u32) { assert!(n > 1) }

    #[distributed_lock(key = "m", lock = client, on_error = text)]
    pub(crate) async fn macro_value(client: LockClient, n: u32) -> String { format!("{n}") }

    #[distributed_lock(key = "m", lock = client)]
    pub(crate) async fn awaits(client: LockClient, n: u32) -> Outcome { over_several(client, n).await }

    #[distributed_lock(key = "m", lock = client)]
    pub(crate) async fn question(client: LockClient, n: u32) -> Outcome { Ok(over_several(client.clone(), n).await? + 0) }

    #[distributed_lock(key = "m", lock = client, on_lost = ignore)]
    pub(crate) async fn runs_on(client: LockClient) -> Outcome { Ok(3) }

    #[distributed_lock(keys = ["m", "n"], lock = client, wait = try, on_busy = skipped)]
    pub(crate) async fn several(client: LockClient) -> Outcome { Ok(3) }

    #[distributed_lock(key = "m", lock = client)]
    pub(crate) async fn closure(client: LockClient) -> Result<impl Fn() -> u32, Error> { Ok(|| 3) }

    #[distributed_lock(key = "m", lock = client)]
    pub(crate) async fn future(client: LockClient) -> Result<impl Future<Output = u32>, Error> { Ok(async { 3 }) }

    #[distributed_lock(key = "m", lock = client)]
    pub(crate) async fn large(client: LockClient) -> Outcome { let all = [0_u8; 512]; tokio::task::yield_now().await; Ok(all.iter().map(|&n| u32::from(n)).sum()) }

    #[distributed_lock(key = "m")]
    pub(crate) async fn default() -> Outcome { Ok(3) }

    #[distributed_lock(key = "m", lock = client, on_error = ended)]
    pub(crate) async fn never(client: LockClient) -> ! { std::future::pending().await }

    #[distributed_lock(key = "m", lock = client, on_error = ended)]
    pub(crate) async fn panics(client: LockClient) -> ! { panic!("on purpose") }

    #[distributed_lock(key = "m", lock = client, on_error = ended)]
    pub(crate) async fn turns(client: LockClient) -> ! { loop { tokio::task::yield_now().await; } }

    #[distributed_lock(key = "m", lock = client, on_error = ended)]
    pub(crate) async fn returns_or_panics(client: LockClient) -> u32 { 3 }

    fn ended(_: Error) -> ! { panic!("on purpose") }

    fn skipped(_: Error) -> Outcome { Ok(0) }

    fn text(_: Error) -> String { String::new() }

    macro_rules! locked {
        ($name:ident, $body:expr) => {
            #[distributed_lock(key = "m", lock = client)]
            pub(crate) async fn $name(client: LockClient) -> Outcome { $body }
        };
    }

    locked!(of_a_macro, Ok(3));

    macro_rules! locked_body {
        ($name:ident, $body:block) => {
            #[distributed_lock(key = "m", lock = LockClient::memory())]
            pub(crate) async fn $name() -> Outcome $body
        };
    }

    locked_body!(body_of_a_macro, { Ok(3) });
}

#[distributed_lock(key = "m:{n}", lock = client)]
async fn over_several(client: LockClient, n: u32) -> Outcome {
    let more = n + 1;
    Ok(more)
}

#[distributed_lock(key = "m:{n}", lock = client)]
async fn returns(client: LockClient, n: u32) -> Outcome {
    if n > 3 {
        return Ok(3);
    }
    Ok(n)
}

/// Its value can be awaited, and clippy takes that for an `.await` that was forgotten in an async block.
#[distributed_lock(key = "m:{n}", lock = client, on_error = not_started)]
async fn starts(client: LockClient, n: u32) -> tokio::task::JoinHandle<u32> {
    let more = n + 1;
    tokio::spawn(async move { more })
}

fn not_started(_: Error) -> tokio::task::JoinHandle<u32> {
    tokio::spawn(async { 0 })
}

/// Bodies of `#[once]`.
#[rustfmt::skip]
mod once_only {
    use super::{LockClient, NotRun, once};

    type Outcome = Result<u32, NotRun>;

    #[once(key = "o", client = client)]
    pub(crate) async fn call(client: LockClient) -> Outcome { Ok(3) }

    #[once(key = "o", client = client)]
    pub(crate) async fn by_reference(client: &LockClient) -> Outcome { Ok(3) }

    #[once(key = "o:{n}", client = client)]
    pub(crate) async fn branches(client: LockClient, n: u32) -> Outcome { if n > 1 { Ok(n) } else { Ok(1) } }

    #[once(key = "o:{n}", client = client)]
    pub(crate) async fn awaits(client: LockClient, n: u32) -> Outcome { over_several(client, n).await }

    #[once(key = "o:{n}", client = client)]
    pub(crate) async fn question(client: LockClient, n: u32) -> Outcome { Ok(over_several(client.clone(), n).await? + 0) }

    #[once(key = "o")]
    pub(crate) async fn default() -> Outcome { Ok(3) }

    #[once(key = "n:{n}", client = client, lease = "1m", keep = "1h", wait = "1s", attempts = 3)]
    pub(crate) async fn over_several(client: LockClient, n: u32) -> Outcome {
        let more = n + 1;
        if more > 3 {
            return Ok(3);
        }
        Ok(more)
    }

    /// Its items have the names of its return type.
    #[once(key = "o", client = client)]
    pub(crate) async fn with_items(client: LockClient) -> Result<u32, NotRun> {
        use std::io::Result;
        struct NotRun;
        fn rows(_: &NotRun) -> Result<u32> {
            "3".parse().map_err(std::io::Error::other)
        }
        let rows = rows(&NotRun);
        Ok(rows.unwrap_or(0))
    }
}

struct Shop {
    client: LockClient,
    sold: u32,
}

#[rustfmt::skip]
impl Shop {
    #[distributed_lock(key = "m:{self.sold}", lock = self.client)]
    async fn by_reference(&self) -> Outcome { Ok(self.sold) }

    #[distributed_lock(key = "m", lock = self.client)]
    async fn changes(&mut self) -> Outcome { self.sold += 1; Ok(self.sold) }

    #[distributed_lock(key = "m", lock = self.client)]
    async fn by_value(self) -> Outcome { Ok(self.sold) }
}

#[async_trait::async_trait]
trait Sells {
    async fn sell(&self, n: u32) -> Outcome;
    async fn ends(&self);
    async fn allows(&self, n: u32) -> Outcome;
}

#[rustfmt::skip]
#[async_trait::async_trait]
impl Sells for Shop {
    #[distributed_lock(key = "m:{n}", lock = self.client)]
    async fn sell(&self, n: u32) -> Outcome { Ok(n) }

    #[distributed_lock(key = "m", lock = self.client, on_error = drop)]
    async fn ends(&self) {}

    #[distributed_lock(key = "m", lock = self.client)]
    async fn allows(&self, n: u32) -> Outcome {
        #![allow(unused_variables)]
        let n = 3;
        Ok(n)
    }
}

#[rustfmt::skip]
mod traced {
    use super::{LockClient, Outcome, distributed_lock};
    use tracing::instrument;

    #[instrument(skip(client))]
    #[distributed_lock(key = "m:{n}", lock = client)]
    pub(crate) async fn above(client: LockClient, n: u32) -> Outcome { Ok(n) }

    #[distributed_lock(key = "m:{n}", lock = client)]
    #[instrument(skip(client))]
    pub(crate) async fn below(client: LockClient, n: u32) -> Outcome { Ok(n) }

    use tracing::instrument as traced;

    #[distributed_lock(key = "m:{n}", lock = client)]
    #[traced(skip_all, fields(number = n))]
    pub(crate) async fn of_another_name(client: LockClient, (n, _): (u32, String)) -> Outcome { Ok(n) }
}

/// Arguments of every shape.
mod arguments {
    use super::{LockClient, Outcome, distributed_lock};

    pub(crate) struct Order {
        pub(crate) id: u32,
        pub(crate) name: String,
    }

    #[distributed_lock(key = "m:{id}", lock = client)]
    pub(crate) async fn of_a_struct(client: LockClient, Order { id, .. }: Order) -> Outcome {
        Ok(id)
    }

    #[distributed_lock(key = "m:{id}:{name}", lock = client)]
    pub(crate) async fn of_a_tuple(client: &LockClient, (id, ref name): (u32, String)) -> Outcome {
        assert_eq!(name, "n");
        Ok(id)
    }

    #[distributed_lock(key = "m:{type}:{in.0}:{gen.0}", lock = client)]
    pub(crate) async fn with_raw_names(
        client: LockClient,
        r#type: u32,
        r#in: (u32,),
        r#gen: (u32,),
    ) -> Outcome {
        Ok(r#in.0)
    }

    #[distributed_lock(key = "m:{a:?}:{id}", lock = client)]
    pub(crate) async fn by_reference(
        client: LockClient,
        ref mut a: Vec<u32>,
        (ref mut b, c): (Vec<u32>, u32),
        Order { ref mut id, ref name }: Order,
    ) -> Outcome {
        a.push(c);
        b.push(c);
        *id += u32::from(a == b && name == "n");
        Ok(*id)
    }

    #[distributed_lock(key = "m", lock = client)]
    pub(crate) async fn changed(client: LockClient, mut id: u32, _name: String, _: Vec<u8>) -> Outcome {
        id += 1;
        Ok(id)
    }

    #[distributed_lock(key = "m", lock = client)]
    pub(crate) async fn unused_on_purpose(
        client: LockClient,
        #[allow(unused_variables)] allowed: u32,
        #[expect(unused_variables)] expected: u32,
        #[cfg_attr(all(), allow(unused_variables))] allowed_here: u32,
        #[cfg_attr(all(), expect(unused_variables))] expected_here: u32,
        #[expect(unused_variables)] reference: &str,
    ) -> Outcome {
        Ok(3)
    }

    #[distributed_lock(key = "m", lock = client)]
    pub(crate) async fn unused_in_part(
        client: LockClient,
        #[expect(unused_mut)] mut a: u32,
        #[expect(unused_variables)] Order { id, .. }: Order,
        #[expect(unused_mut)] (mut b, _): (u32, String),
        #[allow(unused_mut, unused_variables)] (mut c, _): (u32, String),
    ) -> Outcome {
        Ok(a + b)
    }

    #[distributed_lock(key = "m", lock = client)]
    #[tracing::instrument(skip_all)]
    pub(crate) async fn unused_under_a_trace(
        client: LockClient,
        #[expect(unused_variables)] a: u32,
        #[expect(unused_variables)] Order { id, .. }: Order,
        #[expect(unused_mut)] (mut b, _): (u32, String),
    ) -> Outcome {
        Ok(b)
    }

    #[distributed_lock(key = "m", lock = client)]
    #[tracing::instrument(skip(client))]
    pub(crate) async fn recorded(client: LockClient, n: u32) -> Outcome {
        Ok(3)
    }

    #[distributed_lock(key = "m", lock = client)]
    #[cfg_attr(all(), tracing::instrument(skip(client)))]
    pub(crate) async fn recorded_on_a_condition(client: LockClient, n: u32) -> Outcome {
        Ok(3)
    }

    #[distributed_lock(key = "m", lock = client)]
    #[tracing::instrument(skip_all, fields(n = n))]
    pub(crate) async fn recorded_as_a_field(client: LockClient, n: u32) -> Outcome {
        Ok(3)
    }

    #[distributed_lock(key = "m:{}", key = id)]
    #[cfg(any())]
    pub(crate) async fn not_there(id: u32) -> Outcome {
        Ok(id)
    }

    #[distributed_lock(key("m:{}", order.name), lock = client)]
    pub(crate) async fn borrowed<'a, T: Into<u32> + Send>(
        client: &'a LockClient,
        order: &'a Order,
        id: T,
    ) -> Outcome {
        assert_eq!(order.id, 3);
        Ok(id.into())
    }
}

#[tokio::test]
async fn locked_bodies_of_every_shape_run_and_are_warned_of_nowhere() {
    let client = LockClient::memory;
    let order = || arguments::Order {
        id: 3,
        name: "n".to_owned(),
    };
    let mut sum = 0;
    for outcome in [
        on_one_line::call(client()).await,
        on_one_line::by_reference(&client()).await,
        Ok(on_one_line::literal(client()).await),
        Ok(on_one_line::returns_or_panics(client()).await),
        Ok(on_one_line::path(client(), 3).await),
        Ok(on_one_line::block(client(), 3).await),
        on_one_line::branches(client(), 3).await,
        on_one_line::arms(client(), Some(3)).await,
        on_one_line::awaits(client(), 2).await,
        on_one_line::question(client(), 2).await,
        on_one_line::runs_on(client()).await,
        on_one_line::several(client()).await,
        on_one_line::of_a_macro(client()).await,
        on_one_line::body_of_a_macro().await,
        over_several(client(), 2).await,
        returns(client(), 4).await,
        traced::above(client(), 3).await,
        traced::below(client(), 3).await,
        traced::of_another_name(client(), (3, String::new())).await,
        arguments::of_a_struct(client(), order()).await,
        arguments::of_a_tuple(&client(), (3, "n".to_owned())).await,
        arguments::with_raw_names(client(), 1, (3,), (1,)).await,
        arguments::by_reference(
            client(),
            vec![],
            (vec![], 2),
            arguments::Order { id: 2, ..order() },
        )
        .await,
        arguments::changed(client(), 2, String::new(), Vec::new()).await,
        arguments::borrowed(&client(), &order(), 3_u16).await,
        arguments::unused_on_purpose(client(), 1, 1, 1, 1, "n").await,
        arguments::unused_in_part(client(), 1, order(), (2, String::new()), (1, String::new())).await,
        arguments::unused_under_a_trace(client(), 1, order(), (3, String::new())).await,
        arguments::recorded(client(), 1).await,
        arguments::recorded_as_a_field(client(), 1).await,
        arguments::recorded_on_a_condition(client(), 1).await,
        on_one_line::closure(client()).await.map(|make| make()),
    ] {
        sum += outcome.expect("the lock is free");
    }
    assert_eq!(sum, 32 * 3);
    assert_eq!(
        starts(client(), 2).await.await.expect("the task does not panic"),
        3
    );
    on_one_line::nothing(client()).await;
    on_one_line::statement(client()).await;
    on_one_line::unit_call(client(), String::new()).await;
    on_one_line::macro_call(client(), 2).await;
    assert_eq!(on_one_line::macro_value(client(), 3).await, "3");
    assert_eq!(on_one_line::future(client()).await.expect("free").await, 3);
    assert_eq!(on_one_line::large(client()).await.expect("free"), 0);
    let soon = std::time::Duration::from_millis(5);
    for never in [
        tokio::time::timeout(soon, on_one_line::never(client())).await,
        tokio::time::timeout(soon, on_one_line::turns(client())).await,
    ] {
        never.expect_err("never is longer");
    }
    tokio::spawn(async { on_one_line::panics(LockClient::memory()).await })
        .await
        .expect_err("it panics");
    assert!(
        on_one_line::default().await.is_err(),
        "there is no default client"
    );
    let mut shop = Shop {
        client: client(),
        sold: 2,
    };
    assert_eq!(shop.changes().await.expect("free"), 3);
    assert_eq!(shop.by_reference().await.expect("free"), 3);
    assert_eq!(shop.sell(3).await.expect("free"), 3);
    assert_eq!(shop.allows(1).await.expect("free"), 3);
    shop.ends().await;
    assert_eq!(shop.by_value().await.expect("free"), 3);
}

#[tokio::test]
async fn bodies_that_run_once_are_warned_of_nowhere() {
    let client = LockClient::memory;
    for outcome in [
        once_only::call(client()).await,
        once_only::by_reference(&client()).await,
        once_only::branches(client(), 3).await,
        once_only::awaits(client(), 2).await,
        once_only::question(client(), 2).await,
        once_only::over_several(client(), 4).await,
        once_only::with_items(client()).await,
    ] {
        assert!(matches!(outcome, Ok(3)), "{outcome:?}");
    }
    assert!(once_only::default().await.is_err(), "there is no default client");
}
