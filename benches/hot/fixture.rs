//! The measured operations, for both kinds of measurement.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use dlock::{Lock, LockClient};
use dlock_tower::idempotency::caller;
use dlock_tower::{IdempotencyLayer, LockLayer, key};
use http::{Request, Response};
use http_body_util::Full;
use tokio::runtime::{Builder, Runtime};
use tower::{Layer, Service, ServiceExt, service_fn};

/// One thread, so that no other one is measured.
pub(crate) fn runtime() -> Runtime {
    Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
}

/// Acquires a free lock and releases it.
pub(crate) async fn pair(lock: &Lock) {
    let guard = lock.acquire().await.expect("it is free");
    guard.release().await.expect("it is held");
}

/// Runs `work` inside `depth` locks, of which `lock` is the outermost.
pub(crate) async fn inside<T>(
    client: &LockClient,
    lock: &Lock,
    depth: usize,
    work: impl AsyncFnOnce() -> T,
) -> T {
    let outermost = lock.acquire().await.expect("it is free");
    let mut guards = vec![outermost];
    for number in 1..depth {
        let next = client.lock(format!("inner:{number}"));
        guards.push(next.acquire().await.expect("it is free"));
    }
    let mut scope = dlock::scope::current();
    for guard in &guards {
        // Each in the frame of the previous one.
        scope = scope
            .wrap(async { guard.scope(async { dlock::scope::current() }).await })
            .await;
    }
    let output = scope.wrap(work()).await;
    for guard in guards {
        guard.release().await.expect("it is held");
    }
    output
}

/// Has `tasks` take the same lock `each` times, so that it goes from one to the next: the holder lets the others run,
/// which then wait for it.
pub(crate) async fn handed_on(lock: &Lock, tasks: usize, each: usize) {
    let tasks: Vec<_> = (0..tasks)
        .map(|_| {
            let lock = lock.clone();
            tokio::spawn(async move {
                for _ in 0..each {
                    let guard = lock.acquire().await.expect("it becomes available");
                    tokio::task::yield_now().await;
                    guard.release().await.expect("it is held");
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("it does not panic");
    }
}

pub(crate) type Body = Full<Bytes>;

/// A service that answers at once.
pub(crate) fn bare()
-> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
+ Clone
+ Send
+ 'static {
    service_fn(async |_: Request<Body>| Ok(Response::new(Body::from("done"))))
}

/// The same under a lock.
pub(crate) fn locked(
    client: &LockClient,
) -> impl Service<Request<Body>, Error = Infallible, Response = Response<impl Sized + use<>>> + Clone + use<>
{
    LockLayer::new(client.clone(), key::header("x-order")).layer(bare())
}

/// The same, once for each key.
pub(crate) fn once(
    client: &LockClient,
) -> impl Service<Request<Body>, Error = Infallible, Response = Response<impl Sized + use<>>> + Clone + use<>
{
    let records = client.records().expect("memory keeps records");
    IdempotencyLayer::new(records, caller::public())
        .lease(Duration::from_secs(1))
        .retention(Duration::from_secs(1))
        .layer(bare())
}

/// An order of this number.
pub(crate) fn request(number: u64) -> Request<Body> {
    Request::post("/orders")
        .header("x-order", "42")
        .header("idempotency-key", format!("\"order-{number}\""))
        .body(Body::from("one"))
        .expect("a request")
}

/// Sends it.
pub(crate) async fn call<S, R>(service: &S, request: Request<Body>) -> Response<R>
where
    S: Service<Request<Body>, Response = Response<R>, Error = Infallible> + Clone,
{
    let Ok(response) = service.clone().oneshot(request).await;
    assert!(response.status().is_success());
    response
}
