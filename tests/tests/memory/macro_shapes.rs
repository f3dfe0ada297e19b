//! `#[distributed_lock]` on functions of every shape: the signature stays what it was.

use std::fmt::Display;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use dlock::{Error, LockClient, LockKey, distributed_lock};
use parking_lot::Mutex;

/// Which lock the body runs under.
fn key() -> String {
    dlock::current()
        .expect("the body runs under the lock")
        .key()
        .as_str()
        .to_owned()
}

mod keys {
    use super::*;

    struct Order {
        id: u64,
        customer: Customer,
        pair: (u8, (u8, char)),
    }

    struct Customer {
        name: String,
    }

    impl Order {
        fn lock_key(&self) -> String {
            format!("order:{}", self.id)
        }
    }

    fn order() -> Order {
        Order {
            id: 7,
            customer: Customer { name: "ann".into() },
            pair: (1, (2, 'c')),
        }
    }

    #[distributed_lock(key = "jobs", lock = client)]
    async fn constant(client: LockClient) -> Result<String, Error> {
        Ok(key())
    }

    #[distributed_lock(key = "order:{id}", lock = client)]
    async fn capture(client: LockClient, id: u64) -> Result<String, Error> {
        Ok(key())
    }

    #[distributed_lock(key = "{id:>width$}:{text:?}:{ratio:.2}", lock = client)]
    async fn specs(
        client: LockClient,
        id: u64,
        width: usize,
        text: &str,
        ratio: f64,
    ) -> Result<String, Error> {
        Ok(key())
    }

    #[distributed_lock(key = "order:{order.id}:{order.customer.name}:{order.pair.1.1}", lock = client)]
    async fn fields(client: LockClient, order: Order) -> Result<String, Error> {
        Ok(format!("{} {}", key(), order.id))
    }

    #[distributed_lock(key = "{order.id:0>width$}:{order.customer.name:?}:{width}", lock = client)]
    async fn fields_with_specs(client: LockClient, order: &Order, width: usize) -> Result<String, Error> {
        Ok(key())
    }

    #[distributed_lock(key = r"raw\{order.id}", lock = client)]
    async fn raw_literal(client: LockClient, order: &Order) -> Result<String, Error> {
        Ok(key())
    }

    #[distributed_lock(key("order:{}:{}", order.id, order.customer.name.len() + 1), lock = client)]
    async fn arguments(client: LockClient, order: Order) -> Result<String, Error> {
        Ok(format!("{} {}", key(), order.id))
    }

    #[distributed_lock(key("order:{0}:{n}:{0}", order.id, n = order.customer.name), lock = client)]
    async fn named_arguments(client: LockClient, order: Order) -> Result<String, Error> {
        Ok(key())
    }

    #[distributed_lock(key = order.lock_key(), lock = client)]
    async fn expression(client: LockClient, order: Order) -> Result<String, Error> {
        Ok(format!("{} {}", key(), order.id))
    }

    #[distributed_lock(key = name, lock = client)]
    async fn place(client: LockClient, name: String) -> Result<String, Error> {
        Ok(format!("{} {name}", key()))
    }

    #[distributed_lock(key = names[index], lock = client)]
    async fn element_place(client: LockClient, names: Vec<String>, index: usize) -> Result<String, Error> {
        Ok(format!("{} {}", key(), names[index]))
    }

    #[distributed_lock(key = order.customer.name, lock = client)]
    async fn field_place(client: LockClient, order: Order) -> Result<String, Error> {
        Ok(format!("{} {}", key(), order.customer.name))
    }

    #[distributed_lock(key = LockKey::raw(format!("{{tag}}:{id}")), lock = client)]
    async fn lock_key(client: LockClient, id: u64) -> Result<String, Error> {
        Ok(key())
    }

    #[distributed_lock(key = format!("n:{}", text.parse::<u64>()?), lock = client)]
    async fn fallible(client: LockClient, text: &str) -> Result<String, anyhow::Error> {
        Ok(key())
    }

    #[tokio::test]
    async fn keys_are_literals_captures_field_chains_and_expressions() {
        let client = LockClient::memory;
        assert_eq!(constant(client()).await.unwrap(), "jobs");
        assert_eq!(capture(client(), 7).await.unwrap(), "order:7");
        assert_eq!(specs(client(), 7, 3, "a", 0.5).await.unwrap(), "  7:\"a\":0.50");
        assert_eq!(fields(client(), order()).await.unwrap(), "order:7:ann:c 7");
        assert_eq!(
            fields_with_specs(client(), &order(), 3).await.unwrap(),
            "007:\"ann\":3"
        );
        assert_eq!(raw_literal(client(), &order()).await.unwrap(), "raw\\7");
        assert_eq!(arguments(client(), order()).await.unwrap(), "order:7:4 7");
        assert_eq!(named_arguments(client(), order()).await.unwrap(), "order:7:ann:7");
        assert_eq!(expression(client(), order()).await.unwrap(), "order:7 7");
        assert_eq!(place(client(), "n".into()).await.unwrap(), "n n");
        let names = || vec!["a".into(), "b".into()];
        assert_eq!(element_place(client(), names(), 1).await.unwrap(), "b b");
        assert_eq!(field_place(client(), order()).await.unwrap(), "ann ann");
        assert_eq!(lock_key(client(), 7).await.unwrap(), "{tag}:7");
    }

    #[tokio::test]
    async fn an_error_of_the_key_is_an_error_of_the_function() {
        assert_eq!(fallible(LockClient::memory(), "7").await.unwrap(), "n:7");
        let error = fallible(LockClient::memory(), "x").await.unwrap_err();
        assert!(error.is::<std::num::ParseIntError>(), "{error}");
    }

    #[tokio::test]
    async fn the_key_is_computed_once_and_before_everything_else() {
        fn told(log: &Mutex<Vec<&'static str>>, what: &'static str) -> String {
            log.lock().push(what);
            "k".into()
        }
        fn client<'a>(log: &Mutex<Vec<&'static str>>, client: &'a LockClient) -> &'a LockClient {
            log.lock().push("client");
            client
        }
        fn lease(log: &Mutex<Vec<&'static str>>) -> Duration {
            log.lock().push("option");
            Duration::from_secs(30)
        }
        #[distributed_lock(fixed_lease = lease(log), lock = client(log, locks), key = told(log, "key"))]
        async fn run(locks: &LockClient, log: &Mutex<Vec<&'static str>>) -> Result<(), Error> {
            log.lock().push("body");
            Ok(())
        }
        let log = Mutex::default();
        run(&LockClient::memory(), &log).await.unwrap();
        assert_eq!(*log.lock(), ["key", "client", "option", "body"]);
    }
}

mod receivers {
    use super::*;

    struct Service {
        locks: LockClient,
        name: String,
        count: u32,
    }

    impl Service {
        fn new() -> Service {
            Service {
                locks: LockClient::memory(),
                name: "svc".into(),
                count: 0,
            }
        }

        #[distributed_lock(key = "{self.name}", lock = self.locks)]
        async fn by_ref(&self) -> Result<String, Error> {
            Ok(key())
        }

        #[distributed_lock(key = "{self.name}:{n}", lock = self.locks)]
        async fn by_mut(&mut self, n: u32) -> Result<String, Error> {
            self.count += n;
            Ok(key())
        }

        #[distributed_lock(key = self.name, lock = self.locks)]
        async fn by_value(self) -> Result<String, Error> {
            let Service { name, .. } = self;
            Ok(key() + &name)
        }

        #[distributed_lock(key = "{self.name}", lock = self.locks)]
        async fn by_mut_value(mut self) -> Result<u32, Error> {
            self.count += 1;
            Ok(self.count)
        }

        #[distributed_lock(key = "{self.name}", lock = self.locks)]
        async fn by_arc(self: Arc<Self>) -> Result<String, Error> {
            Ok(key())
        }

        #[distributed_lock(key = "{self.name}", lock = self.locks)]
        async fn by_arc_ref(self: &Arc<Self>) -> Result<String, Error> {
            Ok(key())
        }

        #[distributed_lock(key = "{self.name}", lock = self.locks)]
        async fn by_box(self: Box<Self>) -> Result<String, Error> {
            Ok(key())
        }

        #[distributed_lock(key = "{self.name}", lock = self.locks)]
        async fn by_pin(self: Pin<&Self>) -> Result<String, Error> {
            Ok(key())
        }

        #[distributed_lock(key = "{self.name}", lock = self.locks)]
        async fn by_pin_mut(mut self: Pin<&mut Self>) -> Result<u32, Error> {
            self.count += 1;
            Ok(self.as_mut().count)
        }

        #[distributed_lock(key = "static", lock = locks)]
        async fn none(locks: LockClient) -> Result<Self, Error> {
            Ok(Self {
                locks,
                name: key(),
                count: 0,
            })
        }
    }

    #[tokio::test]
    async fn every_receiver_stays_what_it_was() {
        let mut service = Service::new();
        assert_eq!(service.by_ref().await.unwrap(), "svc");
        assert_eq!(service.by_mut(2).await.unwrap(), "svc:2");
        assert_eq!(service.count, 2);
        assert_eq!(service.by_value().await.unwrap(), "svcsvc");
        assert_eq!(Service::new().by_mut_value().await.unwrap(), 1);
        assert_eq!(Arc::new(Service::new()).by_arc().await.unwrap(), "svc");
        assert_eq!(Arc::new(Service::new()).by_arc_ref().await.unwrap(), "svc");
        assert_eq!(Box::new(Service::new()).by_box().await.unwrap(), "svc");
        assert_eq!(Pin::new(&Service::new()).by_pin().await.unwrap(), "svc");
        assert_eq!(Pin::new(&mut Service::new()).by_pin_mut().await.unwrap(), 1);
        assert_eq!(Service::none(LockClient::memory()).await.unwrap().name, "static");
    }

    trait Repository {
        async fn save(&self, id: u64) -> Result<String, Error>;
        async fn load(&self, id: u64) -> Result<String, Error>
        where
            Self: Sync;
    }

    impl Repository for Service {
        #[distributed_lock(key = "save:{id}", lock = self.locks)]
        async fn save(&self, id: u64) -> Result<String, Error> {
            Ok(key())
        }

        #[distributed_lock(key = "load:{id}", lock = self.locks)]
        async fn load(&self, id: u64) -> Result<String, Error>
        where
            Self: Sync,
        {
            Ok(key())
        }
    }

    #[tokio::test]
    async fn methods_of_traits_are_functions_like_others() {
        assert_eq!(Service::new().save(1).await.unwrap(), "save:1");
        assert_eq!(Service::new().load(1).await.unwrap(), "load:1");
    }

    #[distributed_lock(key = "k", lock = client)]
    async fn client_in_an_arc(client: &Arc<LockClient>) -> Result<String, Error> {
        Ok(key())
    }

    #[distributed_lock(key = "k", lock = LockClient::memory())]
    async fn client_made_here() -> Result<String, Error> {
        Ok(key())
    }

    #[tokio::test]
    async fn the_client_is_any_expression_that_leads_to_one() {
        assert_eq!(
            client_in_an_arc(&Arc::new(LockClient::memory())).await.unwrap(),
            "k"
        );
        assert_eq!(client_made_here().await.unwrap(), "k");
    }
}

mod signatures {
    use super::*;

    #[distributed_lock(key = "{id}", lock = client)]
    async fn generic<T, const N: usize>(
        client: &LockClient,
        id: T,
        all: [T; N],
    ) -> Result<(String, usize), Error>
    where
        T: Display + Clone,
    {
        Ok((key(), all.len()))
    }

    #[distributed_lock(key = "{text}", lock = client)]
    async fn lifetimes<'a, 'b: 'a>(client: &'b LockClient, text: &'a str) -> Result<&'a str, Error> {
        Ok(&text[1..])
    }

    #[distributed_lock(key = "{text}", lock = client)]
    async fn elided(text: &str, client: LockClient) -> Result<String, Error> {
        Ok(text.to_owned())
    }

    #[distributed_lock(key = "{id}", lock = client)]
    async fn impl_argument(client: LockClient, id: impl Display) -> Result<String, Error> {
        Ok(id.to_string())
    }

    #[distributed_lock(key = "{n}", lock = client)]
    async fn impl_return(client: LockClient, n: u32) -> Result<impl Iterator<Item = u32>, Error> {
        if n == 0 {
            return Ok((0..1).map(twice as fn(u32) -> u32));
        }
        Ok((0..n).map(twice as fn(u32) -> u32))
    }

    fn twice(n: u32) -> u32 {
        n * 2
    }

    fn shown(error: Error) -> String {
        error.to_string()
    }

    #[distributed_lock(key = "k", lock = client, on_error = shown)]
    async fn only_impl_return(client: LockClient) -> impl Display + Send + 'static {
        key()
    }

    #[distributed_lock(key = "k", lock = client, on_error = drop)]
    async fn no_return_type(client: LockClient, count: &mut u32) {
        *count += 1;
    }

    struct Pair {
        left: u32,
        right: u32,
    }

    #[distributed_lock(key = "{a}:{left}:{c}", lock = client)]
    async fn patterns(
        client: LockClient,
        (a, mut b): (u32, u32),
        Pair { left, right: _ }: Pair,
        [c, ..]: [u32; 3],
        &d: &u32,
        _: String,
        mut count: u32,
    ) -> Result<u32, Error> {
        b += 1;
        count += 1;
        Ok(a + b + left + c + d + count)
    }

    #[distributed_lock(key = "{whole:?}", lock = client)]
    async fn bound_twice(
        client: LockClient,
        whole @ (a, _): (u32, u32),
        ref r: String,
    ) -> Result<String, Error> {
        Ok(format!("{a} {whole:?} {r}"))
    }

    #[distributed_lock(key = "k", lock = client)]
    async fn conditional(
        client: LockClient,
        #[cfg(any())] gone: Missing,
        #[cfg(not(any()))] there: u32,
    ) -> Result<u32, Error> {
        Ok(there)
    }

    struct Job {
        id: u32,
        span: Arc<u32>,
        part: Part,
        extra: u32,
    }

    struct Part {
        left: u32,
        right: u32,
    }

    #[distributed_lock(key = "{id}", lock = client)]
    async fn conditional_fields(
        client: LockClient,
        Job {
            id,
            #[cfg(any())]
            gone,
            #[cfg(not(any()))]
            span,
            #[cfg(any())]
                part: Part { left, .. },
            #[cfg_attr(all(), cfg(not(any())))]
                part:
                Part {
                    #[cfg(any())]
                    left,
                    #[cfg_attr(all(), cfg(any()))]
                        right: ref mut other,
                    right,
                    ..
                },
            #[allow(unused_variables)]
            extra,
        }: Job,
    ) -> Result<u32, Error> {
        Ok(id + *span + right)
    }

    /// Nothing of the argument is left out, so its pattern stays in the signature.
    #[distributed_lock(key = "{left}", lock = client)]
    async fn conditional_fields_of_all(
        client: LockClient,
        Part {
            left,
            #[cfg(any())]
            gone,
            #[expect(unused_variables)]
            right,
        }: Part,
    ) -> Result<u32, Error> {
        Ok(left)
    }

    /// Documented.
    #[must_use = "of course"]
    #[distributed_lock(key = "k", lock = client)]
    #[allow(clippy::needless_return, clippy::mixed_attributes_style)]
    pub(crate) async fn attributes(client: LockClient) -> Result<u32, Error> {
        #![allow(unused_variables)]
        let unused = 1;
        return Ok(1);
    }

    mod renamed {
        pub(super) use ::dlock as other;
    }

    #[distributed_lock(key = "k", lock = client, crate = renamed::other)]
    async fn renamed_crate(client: LockClient) -> Result<String, Error> {
        Ok(key())
    }

    #[distributed_lock(
        key = "k",
        lock = client,
        lease = "1m",
        wait = WAIT,
        max_hold = Duration::from_secs(n * 60),
        min_hold = "5ms",
        max_waiters = usize::try_from(n).unwrap_or(1),
    )]
    async fn options(client: LockClient, n: u64) -> Result<String, Error> {
        Ok(key())
    }

    const WAIT: Duration = Duration::from_secs(1);

    #[distributed_lock(key = "depth:{depth}", lock = client)]
    async fn recursive(client: &LockClient, depth: u32) -> Result<u32, Error> {
        if depth == 0 {
            return Ok(0);
        }
        let deeper = Box::pin(recursive(client, depth - 1)).await?;
        Ok(deeper + 1)
    }

    macro_rules! locked {
        ($name:ident, $key:literal, $wait:literal, $client:expr) => {
            #[distributed_lock(key = $key, wait = $wait, lock = $client)]
            async fn $name() -> Result<String, Error> {
                Ok(key())
            }
        };
    }

    locked!(made_by_a_macro, "made", "1s", LockClient::memory());

    macro_rules! locked_body {
        ($name:ident, $output:ty, $body:block) => {
            #[distributed_lock(key = "made", lock = LockClient::memory())]
            async fn $name() -> $output $body
        };
    }

    locked_body!(body_of_a_macro, Result<String, Error>, { Ok(key()) });

    macro_rules! locked_again {
        ($name:ident, $body:block) => {
            locked_body!($name, Result<String, Error>, $body);
        };
    }

    locked_again!(body_of_two_macros, {
        let text = key();
        Ok(text)
    });

    fn stopped(error: Error) -> ! {
        panic!("{error}");
    }

    #[distributed_lock(key = "k", lock = client, on_error = stopped)]
    async fn never_returns(client: LockClient, calls: &Mutex<u32>) -> ! {
        loop {
            *calls.lock() += u32::from(key() == "k");
            tokio::task::yield_now().await;
        }
    }

    #[distributed_lock(key = "k", lock = client, wait = try, on_error = stopped)]
    async fn panics(client: &LockClient) -> ! {
        panic!("in the body of {}", key());
    }

    #[tokio::test]
    async fn generics_lifetimes_and_impl_trait_stay() {
        let client = LockClient::memory();
        assert_eq!(
            generic(&client, 'x', ['a', 'b']).await.unwrap(),
            ("x".to_owned(), 2)
        );
        assert_eq!(lifetimes(&client, "abc").await.unwrap(), "bc");
        assert_eq!(elided("abc", client.clone()).await.unwrap(), "abc");
        assert_eq!(impl_argument(client.clone(), 7).await.unwrap(), "7");
        assert_eq!(
            impl_return(client.clone(), 3).await.unwrap().collect::<Vec<_>>(),
            [0, 2, 4]
        );
        assert_eq!(only_impl_return(client.clone()).await.to_string(), "k");
        let mut count = 0;
        no_return_type(client.clone(), &mut count).await;
        assert_eq!(count, 1);
    }

    #[tokio::test]
    async fn patterns_attributes_and_options_stay() {
        let client = LockClient::memory();
        let pair = Pair { left: 10, right: 0 };
        assert_eq!(pair.right, 0);
        let sum = patterns(client.clone(), (1, 2), pair, [100, 0, 0], &1000, String::new(), 0)
            .await
            .unwrap();
        assert_eq!(sum, 1 + 3 + 10 + 100 + 1000 + 1);
        assert_eq!(
            bound_twice(client.clone(), (1, 2), "r".into()).await.unwrap(),
            "1 (1, 2) r"
        );
        assert_eq!(conditional(client.clone(), 3).await.unwrap(), 3);
        let (span, part) = (Arc::new(20), Part { left: 0, right: 300 });
        let job = Job {
            id: 1,
            span: span.clone(),
            part,
            extra: 0,
        };
        assert_eq!(conditional_fields(client.clone(), job).await.unwrap(), 321);
        assert_eq!(Arc::strong_count(&span), 1);
        let part = Part { left: 1, right: 0 };
        assert_eq!(conditional_fields_of_all(client.clone(), part).await.unwrap(), 1);
        assert_eq!(attributes(client.clone()).await.unwrap(), 1);
        assert_eq!(renamed_crate(client.clone()).await.unwrap(), "k");
        assert_eq!(options(client.clone(), 1).await.unwrap(), "k");
        assert_eq!(recursive(&client, 3).await.unwrap(), 3);
        assert_eq!(made_by_a_macro().await.unwrap(), "made");
        assert_eq!(body_of_a_macro().await.unwrap(), "made");
        assert_eq!(body_of_two_macros().await.unwrap(), "made");
    }

    #[tokio::test]
    async fn a_function_may_never_return() {
        let (client, calls) = (LockClient::memory(), Mutex::new(0));
        let soon = Duration::from_millis(20);
        let call = tokio::time::timeout(soon, never_returns(client.clone(), &calls));
        assert!(call.await.is_err());
        assert!(*calls.lock() > 0);
        let call = tokio::spawn(async move { panics(&client).await });
        let why = call.await.unwrap_err().into_panic();
        assert_eq!(why.downcast_ref::<String>().unwrap(), "in the body of k");
    }
}

mod send {
    use super::*;

    #[distributed_lock(key = "{id}", lock = client)]
    async fn sends(client: LockClient, id: u64, text: String) -> Result<String, Error> {
        tokio::task::yield_now().await;
        Ok(text)
    }

    #[distributed_lock(key = "k", lock = client)]
    async fn stays(client: LockClient, shared: Rc<u32>) -> Result<u32, Error> {
        let also = shared.clone();
        tokio::task::yield_now().await;
        Ok(*also + *shared)
    }

    #[distributed_lock(key = format!("{shared}"), lock = client)]
    async fn stays_for_its_key(client: LockClient, shared: Rc<u32>) -> Result<u32, Error> {
        Ok(*shared)
    }

    trait MaybeSend {
        fn is_send(&self) -> bool {
            false
        }
    }

    struct Ask<T>(T);

    impl<T: Send> Ask<T> {
        fn is_send(&self) -> bool {
            true
        }
    }

    impl<T> MaybeSend for Ask<T> {}

    #[tokio::test]
    async fn the_future_is_send_when_the_body_is() {
        let client = LockClient::memory();
        assert!(Ask(sends(client.clone(), 1, String::new())).is_send());
        assert!(!Ask(stays(client.clone(), Rc::new(1))).is_send());
        assert!(!Ask(stays_for_its_key(client.clone(), Rc::new(1))).is_send());
        let spawned = tokio::spawn(sends(client.clone(), 1, "x".into()));
        assert_eq!(spawned.await.unwrap().unwrap(), "x");
        assert_eq!(stays(client.clone(), Rc::new(2)).await.unwrap(), 4);
        assert_eq!(stays_for_its_key(client, Rc::new(2)).await.unwrap(), 2);
    }
}
