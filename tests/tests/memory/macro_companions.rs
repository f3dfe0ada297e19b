//! `#[distributed_lock]` together with axum's handlers, `#[debug_handler]` and `#[async_trait]`.

use std::sync::Arc;

use async_trait::async_trait;
use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::routing::get;
use axum::{Json, Router, debug_handler};
use dlock::{Error, LockClient, distributed_lock};
use http::{Request, StatusCode};
use tower::ServiceExt;

fn key() -> String {
    dlock::current()
        .expect("the body runs under the lock")
        .key()
        .as_str()
        .to_owned()
}

mod handlers {
    use super::*;

    #[derive(Clone)]
    struct App {
        locks: LockClient,
    }

    fn conflict(_: Error) -> StatusCode {
        StatusCode::CONFLICT
    }

    fn unavailable(_: Error) -> Result<String, StatusCode> {
        Err(StatusCode::SERVICE_UNAVAILABLE)
    }

    #[distributed_lock(key = "order:{id}", lock = app.locks, wait = try)]
    async fn bare(State(app): State<App>, Path(id): Path<u64>) -> Result<String, Error> {
        Ok(key())
    }

    #[distributed_lock(key = "order:{id}", lock = app.locks, wait = try, on_error = unavailable)]
    #[debug_handler]
    async fn lock_first(
        State(app): State<App>,
        Path((id, _)): Path<(u64, String)>,
    ) -> Result<String, StatusCode> {
        Ok(key())
    }

    #[debug_handler]
    #[distributed_lock(key = "order:{id}", lock = app.locks, wait = try, on_error = unavailable)]
    async fn lock_second(State(app): State<App>, Path(id): Path<u64>) -> Result<String, StatusCode> {
        Ok(key())
    }

    #[debug_handler(state = App)]
    #[distributed_lock(key = "order:{order.id}", lock = app.locks, wait = try, on_error = conflict)]
    async fn status(State(app): State<App>, Query(order): Query<Order>, _: Option<Json<u8>>) -> StatusCode {
        StatusCode::ACCEPTED
    }

    #[derive(serde::Deserialize)]
    struct Order {
        id: u64,
    }

    async fn ask(app: &App, uri: &str) -> (StatusCode, String) {
        let router = Router::new()
            .route("/bare/{id}", get(bare))
            .route("/first/{id}/{rest}", get(lock_first))
            .route("/second/{id}", get(lock_second))
            .route("/status", get(status))
            .with_state(app.clone());
        let answer = router
            .oneshot(Request::get(uri).body(Body::empty()).unwrap())
            .await
            .unwrap();
        let status = answer.status();
        let body = axum::body::to_bytes(answer.into_body(), usize::MAX)
            .await
            .unwrap();
        (status, String::from_utf8_lossy(&body).into_owned())
    }

    #[tokio::test]
    async fn handlers_stay_handlers_with_the_attributes_in_either_order() {
        let app = App {
            locks: LockClient::memory(),
        };
        for uri in ["/bare/7", "/first/7/x", "/second/7"] {
            assert_eq!(ask(&app, uri).await, (StatusCode::OK, "order:7".into()), "{uri}");
        }
        assert_eq!(ask(&app, "/status?id=7").await.0, StatusCode::ACCEPTED);
    }

    #[tokio::test]
    async fn a_busy_lock_becomes_the_answer_that_the_handler_chose() {
        let app = App {
            locks: LockClient::memory(),
        };
        let _held = app.locks.lock("order:7").acquire().await.unwrap();
        assert_eq!(ask(&app, "/first/7/x").await.0, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(ask(&app, "/second/7").await.0, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(ask(&app, "/status?id=7").await.0, StatusCode::CONFLICT);
        let (status, problem) = ask(&app, "/bare/7").await;
        assert!(status.is_client_error(), "{status}");
        assert!(problem.contains("urn:dlock:problem:"), "{problem}");
    }
}

mod with_async_trait {
    use super::*;

    #[async_trait]
    trait Orders: Send + Sync {
        fn locks(&self) -> &LockClient;

        async fn by_ref(&self, id: u64) -> Result<String, Error>;
        async fn by_mut(&mut self, id: u64) -> Result<String, Error>;
        async fn by_box(self: Box<Self>, id: u64) -> Result<String, Error>;
        async fn by_arc(self: Arc<Self>, id: u64) -> Result<String, Error>;
        async fn patterns(&self, pair: (u64, String), unused: String) -> Result<String, Error>;
        async fn generic<'a, T: std::fmt::Display + Send + Sync>(
            &self,
            id: T,
            text: &'a str,
        ) -> Result<&'a str, Error>
        where
            Self: Sized;
        async fn fails(&self, text: &str) -> Result<u64, anyhow::Error>;
        async fn nothing(&self, id: u64);
        async fn shown(&self, id: u64) -> String;
        async fn by_module(&self, id: u64) -> Result<String, Error>;
        async fn allows(&self, id: u64, unused: u64) -> Result<String, Error>;

        #[distributed_lock(key = "default:{id}", lock = self.locks())]
        async fn provided(&self, id: u64) -> Result<String, Error> {
            Ok(key())
        }
    }

    struct Store {
        locks: LockClient,
        name: String,
    }

    impl Store {
        fn new() -> Store {
            Store {
                locks: LockClient::memory(),
                name: "store".into(),
            }
        }
    }

    fn shown(error: Error) -> String {
        error.to_string()
    }

    mod keys {
        pub(super) fn order(id: u64) -> String {
            format!("order:{id}")
        }
    }

    fn locks_of(store: &Store) -> &LockClient {
        &store.locks
    }

    #[async_trait]
    impl Orders for Store {
        fn locks(&self) -> &LockClient {
            &self.locks
        }

        #[distributed_lock(key = "{self.name}:{id}", lock = self.locks)]
        async fn by_ref(&self, id: u64) -> Result<String, Error> {
            let name = &self.name;
            Ok(format!("{} {name}", key()))
        }

        #[distributed_lock(key("{}:{id}", self.name), lock = &self.locks)]
        async fn by_mut(&mut self, id: u64) -> Result<String, Error> {
            self.name.push('!');
            Ok(key())
        }

        #[distributed_lock(key = format!("{}:{id}", self.name), lock = self.locks)]
        async fn by_box(self: Box<Self>, id: u64) -> Result<String, Error> {
            Ok(key())
        }

        #[distributed_lock(key = self.name, lock = self.locks())]
        async fn by_arc(self: Arc<Self>, _id: u64) -> Result<String, Error> {
            Ok(key())
        }

        #[distributed_lock(key = "{id}:{text}", lock = self.locks)]
        async fn patterns(&self, (id, mut text): (u64, String), _: String) -> Result<String, Error> {
            text.push('.');
            Ok(format!("{} {text}", key()))
        }

        #[distributed_lock(key = "{id}", lock = self.locks)]
        async fn generic<'a, T: std::fmt::Display + Send + Sync>(
            &self,
            id: T,
            text: &'a str,
        ) -> Result<&'a str, Error>
        where
            Self: Sized,
        {
            if text.is_empty() {
                return Ok("none");
            }
            Ok(&text[1..])
        }

        #[distributed_lock(key = "{text}", lock = self.locks)]
        async fn fails(&self, text: &str) -> Result<u64, anyhow::Error> {
            let n: u64 = text.parse()?;
            Ok(n)
        }

        #[distributed_lock(key = "{id}", lock = self.locks, on_error = drop)]
        async fn nothing(&self, id: u64) {
            assert_eq!(key(), id.to_string());
        }

        #[distributed_lock(key = "{id}", lock = self.locks, on_error = shown)]
        async fn shown(&self, id: u64) -> String {
            key()
        }

        #[distributed_lock(key = self::keys::order(id), lock = self::locks_of(self))]
        async fn by_module(&self, id: u64) -> Result<String, Error> {
            Ok(key())
        }

        #[distributed_lock(key = "{id}", lock = self.locks)]
        async fn allows(&self, id: u64, unused: u64) -> Result<String, Error> {
            #![allow(unused_variables)]
            Ok(key())
        }
    }

    #[tokio::test]
    async fn methods_of_async_traits_run_under_their_lock() {
        let mut store = Store::new();
        assert_eq!(store.by_ref(1).await.unwrap(), "store:1 store");
        assert_eq!(
            store.patterns((1, "a".into()), String::new()).await.unwrap(),
            "1:a a."
        );
        assert_eq!(store.generic(1, "abc").await.unwrap(), "bc");
        assert_eq!(store.fails("1").await.unwrap(), 1);
        assert!(
            store
                .fails("x")
                .await
                .unwrap_err()
                .is::<std::num::ParseIntError>()
        );
        assert!(store.fails("").await.unwrap_err().is::<Error>());
        store.nothing(1).await;
        assert_eq!(store.shown(1).await, "1");
        assert_eq!(store.by_module(1).await.unwrap(), "order:1");
        assert_eq!(store.allows(1, 2).await.unwrap(), "1");
        assert_eq!(store.provided(1).await.unwrap(), "default:1");
        assert_eq!(store.by_mut(1).await.unwrap(), "store:1");
        assert_eq!(Box::new(Store::new()).by_box(1).await.unwrap(), "store:1");
        assert_eq!(Arc::new(Store::new()).by_arc(1).await.unwrap(), "store");
        let object: Box<dyn Orders> = Box::new(Store::new());
        assert_eq!(object.provided(1).await.unwrap(), "default:1");
    }

    #[tokio::test]
    async fn a_busy_lock_keeps_the_body_out() {
        let store = Store::new();
        let guard = store.locks.lock("1").acquire().await.unwrap();
        let soon = std::time::Duration::from_millis(20);
        assert!(tokio::time::timeout(soon, store.shown(1)).await.is_err());
        guard.release().await.unwrap();
        assert_eq!(store.shown(1).await, "1");
    }

    #[async_trait]
    trait Conditional {
        async fn conditional(
            &self,
            #[cfg(any())] gone: Missing,
            #[cfg(any())] pair: (Missing, Missing),
            #[cfg(not(any()))] there: u32,
        ) -> Result<u32, Error>;
    }

    #[async_trait]
    impl Conditional for Store {
        #[distributed_lock(key = "k", lock = self.locks)]
        async fn conditional(
            &self,
            #[cfg(any())] gone: Missing,
            #[cfg(any())] (left, right): (Missing, Missing),
            #[cfg(not(any()))] there: u32,
        ) -> Result<u32, Error> {
            Ok(there)
        }
    }

    #[tokio::test]
    async fn arguments_may_have_conditions() {
        assert_eq!(Store::new().conditional(3).await.unwrap(), 3);
    }

    #[async_trait(?Send)]
    trait Local {
        async fn local(&self, shared: std::rc::Rc<u32>) -> Result<u32, Error>;
    }

    #[async_trait(?Send)]
    impl Local for Store {
        #[distributed_lock(key = "{shared}", lock = self.locks)]
        async fn local(&self, shared: std::rc::Rc<u32>) -> Result<u32, Error> {
            tokio::task::yield_now().await;
            Ok(*shared)
        }
    }

    #[tokio::test]
    async fn a_trait_that_is_not_send_works_as_well() {
        assert_eq!(Store::new().local(std::rc::Rc::new(3)).await.unwrap(), 3);
    }
}

mod boxed_by_hand {
    use super::*;
    use std::pin::Pin;

    #[distributed_lock(key = "{id}", lock = client)]
    fn boxed(client: LockClient, id: u64) -> Pin<Box<dyn Future<Output = Result<String, Error>> + Send>> {
        Box::pin(async move {
            let text = key();
            if id == 0 {
                return Ok(String::new());
            }
            Ok(text)
        })
    }

    #[distributed_lock(key = "{id}", lock = client)]
    fn allows(client: LockClient, id: u64) -> Pin<Box<dyn Future<Output = Result<String, Error>> + Send>> {
        #![allow(unused_variables)]
        Box::pin(async move {
            let unused = 3;
            Ok(key())
        })
    }

    #[tokio::test]
    async fn a_boxed_future_runs_under_its_lock() {
        assert_eq!(boxed(LockClient::memory(), 1).await.unwrap(), "1");
        assert_eq!(allows(LockClient::memory(), 1).await.unwrap(), "1");
    }

    type Seen = Arc<parking_lot::Mutex<Vec<(&'static str, bool)>>>;

    /// Writes down which statement ran, and whether it did under the lock.
    fn see(seen: &Seen, name: &'static str) {
        seen.lock().push((name, dlock::current().is_some()));
    }

    #[distributed_lock(key = "k", lock = client, on_error = drop)]
    fn with_a_block(client: LockClient, seen: Seen) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            let seen = seen;
            see(&seen, "before");
            let _: () = { see(&seen, "block") };
            see(&seen, "after");
        })
    }

    #[distributed_lock(key = "k", lock = client, on_error = drop)]
    fn with_a_future(client: LockClient, seen: Seen) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            see(&seen, "before");
            let also_seen = seen.clone();
            let inner = async move {
                let _: () = { see(&also_seen, "block") };
            };
            inner.await;
            see(&seen, "after");
        })
    }

    #[tokio::test]
    async fn a_block_of_no_value_is_a_statement_like_others() {
        for boxed in [with_a_block, with_a_future] {
            let seen = Seen::default();
            boxed(LockClient::memory(), seen.clone()).await;
            assert_eq!(*seen.lock(), [("before", true), ("block", true), ("after", true)]);
        }
    }
}
