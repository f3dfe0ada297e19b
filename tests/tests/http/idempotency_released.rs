//! The idempotency layer: a key is released only where it is certain that nothing has happened.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use crate::idempotency_support::*;
use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::IntoResponse;
use axum::routing::post as route;
use bytes::Bytes;
use dlock::record::OnOrphan;
use dlock::{Error, LockClient, distributed_lock};
use dlock_tower::body::{Buffered, FromBuffered};
use dlock_tower::idempotency::caller;
use dlock_tower::{IdempotencyLayer, LockLayer, key};
use http::{Request, Response};
use http_body::Frame;
use http_body_util::Full;
use tower::{Layer, ServiceExt};

#[derive(Clone)]
struct App {
    locks: LockClient,
    run: Counting,
}

impl App {
    fn new() -> App {
        App {
            locks: LockClient::memory(),
            run: Counting::default(),
        }
    }

    fn layer(&self) -> IdempotencyLayer<caller::Public> {
        IdempotencyLayer::new(self.locks.records().unwrap(), caller::public())
    }

    async fn hold(&self, name: &str) -> dlock::LockGuard {
        self.locks.lock(name).acquire().await.unwrap()
    }
}

fn ask(uri: &str) -> Request<Body> {
    Request::post(uri)
        .header("idempotency-key", "k")
        .body(Body::empty())
        .unwrap()
}

async fn call(app: &Router, uri: &str) -> Answer {
    answer(app.clone().oneshot(ask(uri)).await.unwrap()).await
}

#[distributed_lock(key = "account:{id}", lock = app.locks, wait = try)]
async fn charge(State(app): State<App>, Path(id): Path<u64>) -> Result<String, Error> {
    Ok(format!("run {}", app.run.next()))
}

/// A helper that a handler calls, maybe after it has had effects.
#[distributed_lock(key = "account:{id}", lock = app.locks, wait = try)]
async fn book(app: &App, id: u64) -> Result<String, Error> {
    Ok(format!("booked {}", app.run.count()))
}

#[distributed_lock(key = "till", lock = app.locks, wait = try)]
async fn locked_and_then_another(State(app): State<App>, id: Path<u64>) -> Result<String, Error> {
    app.run.next();
    charge(State(app), id).await
}

#[distributed_lock(key = "account:{id}", lock = app.locks, wait = try, max_hold = "100ms")]
async fn too_slow(State(app): State<App>, Path(id): Path<u64>) -> Result<String, Error> {
    app.run.next();
    tokio::time::sleep(SECOND * 10).await;
    Ok(String::new())
}

/// A busy lock of the attribute spends no key: the retry runs once the lock is free.
#[tokio::test]
async fn busy_attribute_of_a_handler_releases_the_key() {
    let app = App::new();
    let router = Router::new()
        .route("/charge/{id}", route(charge))
        .layer(app.layer())
        .with_state(app.clone());
    let guard = app.hold("account:7").await;
    for _ in 0..2 {
        let refused = call(&router, "/charge/7").await;
        assert_eq!((refused.status(), refused.is_replay()), (423, false));
        assert!(refused.not_started(), "for layers further out");
    }
    guard.release().await.unwrap();
    assert_eq!(call(&router, "/charge/7").await.both(), (200, "run 1"));
    assert!(call(&router, "/charge/7").await.is_replay());
}

/// Once the body of a locked handler has begun, an error of another lock does not release the key.
#[tokio::test]
async fn busy_lock_after_the_body_began_keeps_the_key() {
    let app = App::new();
    let router = Router::new()
        .route("/pay/{id}", route(locked_and_then_another))
        .layer(app.layer())
        .with_state(app.clone());
    let _guard = app.hold("account:7").await;
    for _ in 0..2 {
        let refused = call(&router, "/pay/7").await;
        assert_eq!((refused.status(), app.run.count()), (423, 1));
        assert!(!refused.not_started());
    }
}

/// A lock that was lost half way does not release the key: the work has begun.
#[tokio::test(start_paused = true)]
async fn loss_of_the_lock_of_a_handler_keeps_the_key() {
    let app = App::new();
    let router = Router::new()
        .route("/slow/{id}", route(too_slow))
        .layer(app.layer())
        .with_state(app.clone());
    for _ in 0..2 {
        let lost = call(&router, "/slow/7").await;
        assert_eq!((lost.status(), app.run.count()), (503, 1));
        assert!(!lost.not_started());
    }
}

/// A helper that no router can call says nothing of the handler around it, which may have had effects.
#[tokio::test]
async fn busy_helper_of_a_handler_keeps_the_key() {
    async fn handler(State(app): State<App>, Path(id): Path<u64>) -> Result<String, Error> {
        app.run.next();
        book(&app, id).await
    }
    async fn by_hand(State(app): State<App>, Path(id): Path<u64>) -> Result<String, Error> {
        app.run.next();
        let _guard = app.locks.lock(format!("account:{id}")).try_acquire().await?;
        Ok("held".to_owned())
    }
    let app = App::new();
    let router = Router::new()
        .route("/pay/{id}", route(handler))
        .route("/hand/{id}", route(by_hand))
        .layer(app.layer())
        .with_state(app.clone());
    let _guard = app.hold("account:7").await;
    for (n, uri) in ["/pay/7", "/hand/7"].into_iter().enumerate() {
        for _ in 0..2 {
            let refused = call(&router, uri).await;
            assert_eq!((refused.status(), app.run.count()), (423, n + 1));
        }
    }
}

/// The answer of another router, which its lock refused, says nothing of the request that was sent there.
#[tokio::test]
async fn busy_answer_of_another_router_keeps_the_key() {
    let app = App::new();
    let lock = LockLayer::new(app.locks.clone(), key::fixed("account")).try_once();
    let done = || route(|| async { "done" });
    let other = Router::new()
        .route("/pay", done())
        .route("/forward", done())
        .layer(lock);
    let charging = |own: bool| {
        let (app, other) = (app.clone(), other.clone());
        move |request: Request<Body>| async move {
            app.run.next();
            let request = if own { request } else { ask("/pay") };
            other.oneshot(request).await.into_response()
        }
    };
    let router = Router::new()
        .route("/pay", route(charging(false)))
        .route("/forward", route(charging(true)))
        .layer(app.layer());
    let _guard = app.hold("account").await;
    for (n, uri) in ["/pay", "/forward"].into_iter().enumerate() {
        for _ in 0..2 {
            let refused = call(&router, uri).await;
            assert_eq!((refused.status(), app.run.count()), (423, n + 1), "{uri}");
            assert!(!refused.not_started(), "the charge was made");
        }
    }
}

/// A handler that charges and forwards its own request to a router that nests another keeps the key.
#[tokio::test]
async fn busy_answer_of_a_nesting_router_that_a_handler_forwards_to_keeps_the_key() {
    let app = App::new();
    let lock = LockLayer::new(app.locks.clone(), key::fixed("account")).try_once();
    let locked = Router::new()
        .route("/forward", route(|| async { "done" }))
        .layer(lock);
    let other = Router::new().nest("/pay", locked);
    let charging = {
        let app = app.clone();
        move |request: Request<Body>| async move {
            app.run.next();
            other.oneshot(request).await.into_response()
        }
    };
    let router = Router::new()
        .route("/pay/forward", route(charging))
        .layer(app.layer());
    let _guard = app.hold("account").await;
    for _ in 0..2 {
        let refused = call(&router, "/pay/forward").await;
        assert_eq!((refused.status(), app.run.count()), (423, 1));
        assert!(!refused.not_started(), "the charge was made");
    }
}

/// A lock layer inside may stand anywhere on the way to the handler.
#[tokio::test]
async fn busy_lock_layer_inside_releases_the_key_wherever_the_layers_are() {
    let app = App::new();
    let lock = LockLayer::new(app.locks.clone(), key::fixed("account")).try_once();
    let counting = {
        let run = app.run.clone();
        route(move || async move { format!("run {}", run.next()) })
    };
    let locked = |path| Router::new().route(path, counting.clone()).layer(lock.clone());
    let once = || app.layer();
    let apps = [
        locked("/a/pay").layer(once()),
        Router::new().nest("/a", locked("/pay")).layer(once()),
        Router::new().nest("/a", locked("/pay").layer(once())),
        Router::new().nest_service("/a", locked("/pay")).layer(once()),
        Router::new().nest_service("/a", locked("/pay").layer(once())),
        Router::new().merge(locked("/a/pay")).layer(once()),
        Router::new().fallback_service(locked("/a/pay")).layer(once()),
        Router::new().fallback_service(once().layer(locked("/a/pay"))),
    ];
    for (n, router) in apps.into_iter().enumerate() {
        let uri = format!("/a/pay?{n}");
        let ask = || {
            let mut request = ask(&uri);
            let key = n.to_string().parse().unwrap();
            request.headers_mut().insert("idempotency-key", key);
            router.clone().oneshot(request)
        };
        let guard = app.hold("account").await;
        let refused = answer(ask().await.unwrap()).await;
        assert_eq!((refused.status(), refused.not_started()), (423, true), "{n}");
        guard.release().await.unwrap();
        assert_eq!(
            answer(ask().await.unwrap()).await.text(),
            format!("run {}", n + 1)
        );
    }
}

/// Handlers, and what turns the errors of services inside into answers, may say that a request was not begun.
#[tokio::test]
async fn not_started_of_a_handler_and_of_an_error_handler_releases_the_key() {
    use axum::error_handling::HandleErrorLayer;
    use dlock_tower::NotStarted;
    use http::StatusCode;
    use tower::load_shed::error::Overloaded;

    /// `load_shed` also passes on the errors of the services inside, which may have begun.
    async fn overloaded(word: NotStarted, error: tower::BoxError) -> impl IntoResponse {
        let word = error.is::<Overloaded>().then_some(word);
        (StatusCode::SERVICE_UNAVAILABLE, word, "overloaded")
    }
    let app = App::new();
    let closed = {
        let run = app.run.clone();
        move |word: NotStarted| async move { (StatusCode::SERVICE_UNAVAILABLE, word, run.next().to_string()) }
    };
    let shed = || {
        tower::ServiceBuilder::new()
            .layer(HandleErrorLayer::new(overloaded))
            .layer(tower::load_shed::LoadShedLayer::new())
    };
    let full = shed().layer(tower::limit::GlobalConcurrencyLimitLayer::new(0));
    let breaks = {
        let run = app.run.clone();
        tower::service_fn(move |_: Request<Body>| {
            run.next();
            async { Err::<axum::response::Response, tower::BoxError>("it took too long".into()) }
        })
    };
    let router = Router::new()
        .route("/closed", route(closed))
        .route("/shed", route(|| async { "never" }).layer(full))
        .route_service("/breaks", shed().service(breaks))
        .layer(app.layer());
    for uri in ["/closed", "/shed"] {
        for _ in 0..2 {
            let refused = call(&router, uri).await;
            assert_eq!((refused.status(), refused.is_replay()), (503, false), "{uri}");
        }
    }
    assert_eq!(app.run.count(), 2);
    for replayed in [false, true] {
        let failed = call(&router, "/breaks").await;
        assert_eq!((failed.status(), failed.is_replay()), (503, replayed));
    }
    assert_eq!(app.run.count(), 3);
}

/// An equal request that a layer further in works on is no result: once it is done, a retry gets that.
#[tokio::test(start_paused = true)]
async fn in_progress_answer_of_a_layer_inside_releases_the_key() {
    let app = App::new();
    let inner = app.layer().namespace("inner");
    let slow = inner.layer(app.run.taking(SECOND));
    let both = app.layer().namespace("outer").layer(slow.clone());
    let first = tokio::spawn({
        let slow = slow.clone();
        async move { send(&slow, post("k")).await }
    });
    tokio::time::sleep(SECOND / 10).await;
    let meanwhile = send(&both, post("k")).await;
    assert_eq!(meanwhile.problem(), problem(409, "in-progress"));
    assert_eq!(first.await.unwrap().text(), "run 1");
    let again = send(&both, post("k")).await;
    assert_eq!((again.status(), again.text()), (200, "run 1"));
}

/// A layer in between may send a request twice. That one of the two finds the lock busy says nothing of the other, which
/// had its effect before or after.
#[tokio::test]
async fn busy_lock_of_a_request_that_is_sent_twice_keeps_the_key() {
    for busy_first in [false, true] {
        let app = App::new();
        let lock = LockLayer::new(app.locks.clone(), key::fixed("account")).try_once();
        let locked = lock.layer(app.run.service());
        let sender = app.clone();
        let twice = tower::service_fn(move |request: Req| {
            let (app, locked) = (sender.clone(), locked.clone());
            async move {
                let runs = locked.clone().oneshot(request.clone());
                let is_busy = async {
                    let guard = app.hold("account").await;
                    let answer = locked.oneshot(request).await;
                    guard.release().await.unwrap();
                    answer
                };
                if busy_first {
                    let answer = is_busy.await;
                    drop(runs.await);
                    answer
                } else {
                    drop(runs.await);
                    is_busy.await
                }
            }
        });
        let service = app.layer().layer(twice);
        for _ in 0..2 {
            let refused = send(&service, post("k")).await;
            assert_eq!((refused.status(), app.run.count()), (423, 1), "{busy_first}");
            assert!(!refused.not_started(), "{busy_first}");
        }
    }
}

/// Nor does a copy that finds the lock busy with the request itself, which is still at work.
#[tokio::test(start_paused = true)]
async fn busy_lock_of_a_copy_keeps_the_key_of_a_request_at_work() {
    let app = App::new();
    let lock = LockLayer::new(app.locks.clone(), key::fixed("account")).try_once();
    let locked = lock.layer(app.run.taking(SECOND * 60));
    let hedged = tower::service_fn(move |request: Req| {
        let (first, second) = (locked.clone(), locked.clone());
        async move {
            let copy = request.clone();
            let later = async {
                tokio::time::sleep(SECOND).await;
                second.oneshot(copy).await
            };
            tokio::select! {
                answer = first.oneshot(request) => answer,
                answer = later => answer,
            }
        }
    });
    let service = app.layer().layer(hedged);
    for _ in 0..2 {
        let refused = send(&service, post("k")).await;
        assert_eq!((refused.status(), app.run.count()), (423, 1));
        assert!(!refused.not_started());
    }
}

/// A lock layer that let the request in does not count as another way: one further in refuses before any effect.
#[tokio::test]
async fn busy_lock_inside_another_lock_releases_the_key() {
    let app = App::new();
    let lock = |name: &'static str| LockLayer::new(app.locks.clone(), key::fixed(name)).try_once();
    let locked = lock("outer").layer(lock("inner").layer(app.run.service()));
    let service = app.layer().layer(locked);
    let guard = app.hold("inner").await;
    let refused = send(&service, post("k")).await;
    assert_eq!((refused.status(), refused.not_started()), (423, true));
    guard.release().await.unwrap();
    assert_eq!(send(&service, post("k")).await.text(), "run 1");
}

/// A body that panics when it is built again for the handler, once.
struct PanicsOnce(Full<Bytes>);

static HAS_PANICKED: AtomicBool = AtomicBool::new(false);

impl FromBuffered for PanicsOnce {
    fn from_buffered(buffered: Buffered) -> PanicsOnce {
        assert!(HAS_PANICKED.swap(true, Ordering::SeqCst), "the body's own");
        PanicsOnce(Full::from_buffered(buffered))
    }
}

impl http_body::Body for PanicsOnce {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Pin::new(&mut self.0).poll_frame(cx)
    }
}

/// No other request would take the claim over.
#[tokio::test(start_paused = true)]
async fn key_is_free_again_where_the_body_of_the_request_cannot_be_built() {
    let layer = layer().on_orphan(OnOrphan::Leave);
    let run = Counting::default();
    let answers = run.clone();
    let service = layer.layer(tower::service_fn(move |_: Request<PanicsOnce>| {
        let text = format!("run {}", answers.next());
        async move { Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(text))) }
    }));
    let request = service.clone().oneshot(post("k").map(PanicsOnce));
    assert!(tokio::spawn(request).await.unwrap_err().is_panic());
    assert_eq!(layer.handle().shutdown(SECOND * 5).await, 0);
    let Ok(response) = service.oneshot(post("k").map(PanicsOnce)).await;
    assert_eq!(answer(response).await.both(), (200, "run 1"));
}

/// A request that has its lock, and waits for the service inside, has not begun.
mod before_the_service_is_ready {
    use std::task::{Context, Poll};

    use dlock_tower::LockService;
    use tower::limit::GlobalConcurrencyLimitLayer;
    use tower::{Layer, Service};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn loss_of_the_lock_releases_the_key() {
        let app = App::new();
        let lock = || LockLayer::new(app.locks.clone(), key::fixed("account"));
        for lock in [lock().max_hold(SECOND), lock().fixed_lease(SECOND)] {
            let full = GlobalConcurrencyLimitLayer::new(0).layer(app.run.service());
            let service = app.layer().layer(lock.clone().layer(full));
            let lost = send(&service, post("k")).await;
            assert_eq!(lost.problem(), problem(503, "lost"));
            assert_eq!(
                (lost.header("retry-after"), lost.not_started()),
                (Some("1"), true)
            );
        }
        let service = app.layer().layer(lock().layer(app.run.service()));
        let again = send(&service, post("k")).await;
        assert_eq!((again.both(), again.is_replay()), ((200, "run 1"), false));
    }

    /// A service that fails before it is ready.
    #[derive(Clone)]
    struct Shut;

    impl Service<Req> for Shut {
        type Response = Res;
        type Error = &'static str;
        type Future = std::future::Ready<Result<Res, &'static str>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), &'static str>> {
            Poll::Ready(Err("shut"))
        }

        fn call(&mut self, _: Req) -> Self::Future {
            panic!("it was never ready")
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failure_of_the_service_releases_the_key() {
        let app = App::new();
        let layer = app.layer();
        let lock = LockLayer::new(app.locks.clone(), key::header("account").optional());
        let service = layer.layer(lock.layer(Shut));
        for account in ["7", ""] {
            let mut request = post("k");
            if !account.is_empty() {
                request.headers_mut().insert("account", account.parse().unwrap());
            }
            let failed = service.clone().oneshot(request).await;
            assert_eq!((failed.unwrap_err(), app.locks.held()), ("shut", 0));
        }
        assert_eq!(layer.stats().not_started, 2);
        let service = layer.layer(app.run.service());
        assert_eq!(send(&service, post("k")).await.both(), (200, "run 1"));
    }

    /// Another way, on which the request was let in, may have had the effect: before, or after.
    #[tokio::test(start_paused = true)]
    async fn failure_of_a_copy_keeps_the_key() {
        for fails_first in [false, true] {
            let app = App::new();
            let lock = LockLayer::new(app.locks.clone(), key::fixed("account"));
            let shut: LockService<_, _> = lock.layer(Shut);
            let runs = app.run.clone();
            let works = lock.layer(tower::service_fn(move |_: Req| {
                runs.next();
                async { Err::<Res, _>("broken") }
            }));
            let twice = tower::service_fn(move |request: Req| {
                let (shut, works) = (shut.clone(), works.clone());
                async move {
                    if fails_first {
                        drop(shut.oneshot(request.clone()).await);
                        works.oneshot(request).await.map(|_| Res::default())
                    } else {
                        drop(works.oneshot(request.clone()).await);
                        shut.oneshot(request).await.map(|_| Res::default())
                    }
                }
            });
            let layer = app.layer();
            let failed = layer.layer(twice).oneshot(post("k")).await;
            assert!(failed.is_err());
            let again = send(&layer.layer(app.run.service()), post("k")).await;
            assert_eq!((again.problem(), app.run.count()), (problem(500, "failed"), 1));
        }
    }
}
