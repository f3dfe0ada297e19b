//! Work that goes on when its client is gone keeps the lock of its request: the idempotency layer's handlers
//! and bodies, in either order of the layers, and what a handler spawns.

use std::convert::Infallible;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use dlock::stores::memory::MemoryStore;
use dlock::{LockClient, LockKind, Loss};
use dlock_tower::idempotency::caller::{Public, public};
use dlock_tower::key::{Fixed, Key, each_of, fixed};
use dlock_tower::lock::RequestLocks;
use dlock_tower::{IdempotencyLayer, LockLayer, OnLost};
use futures_util::FutureExt;
use futures_util::stream::{self, StreamExt};
use http::{Request, Response};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Body, Frame};
use tokio::time::{sleep, timeout};
use tower::{Layer, Service, ServiceExt, service_fn};

type Req = Request<Full<Bytes>>;
type Res = Response<Full<Bytes>>;

const SECOND: Duration = Duration::from_secs(1);

/// Two clients of one store, as two processes have them, and an idempotency layer.
async fn setup() -> (LockClient, LockClient, IdempotencyLayer<Public>) {
    let store = MemoryStore::new();
    let client = async || {
        let builder = LockClient::builder().store(store.clone());
        builder.build().await.unwrap()
    };
    let (a, b) = (client().await, client().await);
    let once = IdempotencyLayer::new(a.records().unwrap(), public());
    (a, b, once)
}

fn post(key: &str) -> Req {
    Request::post("/pay")
        .header("idempotency-key", key)
        .body(Full::default())
        .unwrap()
}

async fn status<S, B>(service: &S, request: Req) -> u16
where
    S: Service<Req, Response = Response<B>, Error = Infallible> + Clone,
{
    let Ok(response) = service.clone().oneshot(request).await;
    response.status().as_u16()
}

/// How many handlers run, how many ever ran at once, how many came to their end, and how many were dropped
/// before that.
#[derive(Default)]
struct Seen {
    inside: AtomicUsize,
    most: AtomicUsize,
    done: AtomicUsize,
    stopped: AtomicUsize,
}

struct Inside(Arc<Seen>, bool);

impl Inside {
    fn enter(seen: &Arc<Seen>) -> Inside {
        let now = seen.inside.fetch_add(1, Ordering::SeqCst) + 1;
        seen.most.fetch_max(now, Ordering::SeqCst);
        Inside(seen.clone(), false)
    }

    fn done(mut self) {
        self.1 = true;
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::SeqCst);
        let counter = if self.1 { &self.0.done } else { &self.0.stopped };
        counter.fetch_add(1, Ordering::SeqCst);
    }
}

impl Seen {
    /// The most at once, those that came to their end, those that were stopped.
    fn counts(&self) -> (usize, usize, usize) {
        let get = |counter: &AtomicUsize| counter.load(Ordering::SeqCst);
        (get(&self.most), get(&self.done), get(&self.stopped))
    }
}

/// A handler that takes a minute.
fn minute(
    seen: &Arc<Seen>,
) -> impl Service<
    Req,
    Response = Res,
    Error = Infallible,
    Future = std::pin::Pin<Box<dyn Future<Output = Result<Res, Infallible>> + Send>>,
> + Clone
+ Send
+ 'static {
    let seen = seen.clone();
    service_fn(move |_: Req| {
        let seen = seen.clone();
        Box::pin(async move {
            let inside = Inside::enter(&seen);
            sleep(60 * SECOND).await;
            inside.done();
            Ok(Response::new(Full::from("done")))
        }) as std::pin::Pin<Box<dyn Future<Output = _> + Send>>
    })
}

async fn is_free(other: &LockClient, key: &str) -> bool {
    match other.lock(key).try_acquire().await {
        Ok(guard) => {
            guard.release().await.unwrap();
            true
        }
        Err(error) if error.is_busy() => false,
        Err(error) => panic!("{error}"),
    }
}

mod a_handler_without_its_client {
    use super::*;

    /// "One holder at a time": in either order of the layers, a handler that runs on keeps its lock.
    #[tokio::test(start_paused = true)]
    async fn keeps_the_lock_in_either_order_of_the_layers() {
        for lock_outside in [true, false] {
            let (client, other, once) = setup().await;
            let lock = LockLayer::new(client.clone(), fixed("a")).try_once();
            let seen = Arc::<Seen>::default();
            let handle = once.handle();
            let run = async |key: &str, wait: Duration| {
                let sent = async {
                    if lock_outside {
                        status(&lock.layer(once.layer(minute(&seen))), post(key)).await
                    } else {
                        status(&once.layer(lock.layer(minute(&seen))), post(key)).await
                    }
                };
                timeout(wait, sent).await.ok()
            };
            assert_eq!(run("1", SECOND).await, None, "the client leaves");
            assert_eq!((handle.tasks(), client.held()), (1, 1), "{lock_outside}");
            assert_eq!(run("2", SECOND).await, Some(423), "{lock_outside}");
            assert!(!is_free(&other, "a").await);
            sleep(60 * SECOND).await;
            assert_eq!((handle.tasks(), client.held()), (0, 0), "{lock_outside}");
            assert!(is_free(&other, "a").await);
            assert_eq!(run("1", SECOND).await, Some(200), "the result was stored");
            assert_eq!(run("2", 100 * SECOND).await, Some(200));
            assert_eq!(seen.counts(), (1, 2, 0), "{lock_outside}");
        }
    }

    /// The same whichever poll the client leaves after.
    #[tokio::test(start_paused = true)]
    async fn keeps_the_lock_whenever_the_client_leaves() {
        for millis in 0..30 {
            let (client, other, once) = setup().await;
            let lock = LockLayer::new(client.clone(), fixed("a"));
            let in_handler = Arc::new(AtomicBool::new(false));
            let (flag, probe) = (in_handler.clone(), other.clone());
            let handler = service_fn(move |_: Req| {
                let (flag, probe) = (flag.clone(), probe.clone());
                async move {
                    flag.store(true, Ordering::SeqCst);
                    for _ in 0..10 {
                        sleep(Duration::from_millis(2)).await;
                        assert!(!is_free(&probe, "a").await);
                    }
                    flag.store(false, Ordering::SeqCst);
                    Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("done")))
                }
            });
            let service = lock.layer(once.layer(handler));
            let _ = timeout(Duration::from_millis(millis), status(&service, post("1"))).await;
            assert_eq!(once.handle().shutdown(SECOND).await, 0);
            assert!(!in_handler.load(Ordering::SeqCst), "it came to its end");
            sleep(SECOND).await;
            assert!(is_free(&other, "a").await);
        }
    }

    /// As everywhere: what it owns goes before the lock.
    #[test]
    fn ends_before_its_lock_where_its_runtime_ends_before_its_task_was_polled() {
        /// Looks at the lock when it is dropped.
        struct Looks(LockClient, Arc<Mutex<Vec<bool>>>);

        impl Drop for Looks {
            fn drop(&mut self) {
                let acquire = self.0.lock("a").try_acquire();
                let outcome = acquire.now_or_never().expect("memory answers at once");
                self.1
                    .lock()
                    .unwrap()
                    .push(outcome.is_err_and(|error| error.is_busy()));
            }
        }

        let of_clients = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let of_server = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let (client, other, once) = of_clients.block_on(setup());
        let was_held = Arc::<Mutex<Vec<bool>>>::default();
        let (probe, seen) = (other.clone(), was_held.clone());
        let handler = service_fn(move |_: Req| {
            let looks = Looks(probe.clone(), seen.clone());
            async move {
                let _looks = looks;
                std::future::pending::<Result<Res, Infallible>>().await
            }
        });
        let service = LockLayer::new(client, fixed("a")).layer(once.layer(handler));
        let mut request = Box::pin(service.oneshot(post("1")));
        of_server.block_on(async {
            while once.handle().claims() == 0 {
                let _ = timeout(Duration::from_millis(10), &mut request).await;
            }
            // Into the handler.
            let _ = timeout(Duration::from_millis(10), &mut request).await;
        });
        let entered = of_server.enter();
        drop(request);
        drop(entered);
        assert_eq!(once.handle().tasks(), 1);
        drop(of_server);
        assert_eq!(*was_held.lock().unwrap(), [true]);
    }

    /// Its frame is there: what it calls re-enters, also long after the client left.
    #[tokio::test(start_paused = true)]
    async fn re_enters() {
        let (client, _other, once) = setup().await;
        let lock = LockLayer::new(client.clone(), fixed("a"));
        let re_entered = Arc::new(AtomicBool::new(false));
        let (inner, flag) = (client.clone(), re_entered.clone());
        let handler = service_fn(move |request: Req| {
            let (client, flag) = (inner.clone(), flag.clone());
            async move {
                sleep(60 * SECOND).await;
                let held = request.extensions().get::<dlock::Held>().unwrap();
                assert!(held.is_held());
                assert_eq!(
                    dlock::current().map(|held| held.fencing_token()),
                    Some(held.fencing_token())
                );
                let again = client.lock("a").try_acquire().await.expect("re-entered");
                flag.store(again.fencing_token() == held.fencing_token(), Ordering::SeqCst);
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
            }
        });
        let service = lock.layer(once.layer(handler));
        let left = timeout(SECOND, status(&service, post("1"))).await;
        assert!(left.is_err());
        assert_eq!(once.handle().shutdown(100 * SECOND).await, 0);
        assert!(re_entered.load(Ordering::SeqCst));
        assert_eq!(client.held(), 0);
    }

    /// Keys that are taken together, layers one inside the other, readers.
    #[tokio::test(start_paused = true)]
    async fn keeps_several_locks_and_every_kind() {
        let (client, other, once) = setup().await;
        let seen = Arc::<Seen>::default();
        let both = LockLayer::new(client.clone(), each_of((fixed("a"), fixed("b"))));
        let third = LockLayer::new(client.clone(), fixed("c"));
        let again = LockLayer::new(client.clone(), fixed("a"));
        let service = both.layer(third.layer(again.layer(once.layer(minute(&seen)))));
        assert!(timeout(SECOND, status(&service, post("1"))).await.is_err());
        for key in ["a", "b", "c"] {
            assert!(!is_free(&other, key).await, "{key}");
        }
        sleep(60 * SECOND).await;
        for key in ["a", "b", "c"] {
            assert!(is_free(&other, key).await, "{key}");
        }
        let read = LockLayer::new(client.clone(), fixed("d"))
            .kind(LockKind::Read)
            .unwrap();
        let service = read.layer(once.layer(minute(&seen)));
        assert!(timeout(SECOND, status(&service, post("2"))).await.is_err());
        let rw = other.rw_lock("d");
        drop(rw.read().try_acquire().await.expect("readers share"));
        assert!(rw.write().try_acquire().await.unwrap_err().is_busy());
        sleep(60 * SECOND).await;
        drop(rw.write().try_acquire().await.expect("the reader is gone"));
        assert_eq!((client.held(), seen.counts()), (0, (1, 2, 0)));
    }

    /// A handler that panics without its client releases the lock.
    #[tokio::test(start_paused = true)]
    async fn gives_the_lock_back_when_it_panics() {
        let (client, other, once) = setup().await;
        let handler = service_fn(|_: Req| async {
            sleep(10 * SECOND).await;
            if true {
                panic!("as told");
            }
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        });
        let service = LockLayer::new(client.clone(), fixed("a")).layer(once.layer(handler));
        assert!(timeout(SECOND, status(&service, post("1"))).await.is_err());
        assert!(!is_free(&other, "a").await);
        sleep(10 * SECOND).await;
        assert!(is_free(&other, "a").await);
        assert_eq!((client.held(), once.handle().claims()), (0, 0));
    }

    /// The client's shutdown waits for it as for every holder, and tells that it is there.
    #[tokio::test(start_paused = true)]
    async fn is_counted_by_the_shutdown() {
        let (client, _other, once) = setup().await;
        let seen = Arc::<Seen>::default();
        let service = LockLayer::new(client.clone(), fixed("a")).layer(once.layer(minute(&seen)));
        assert!(timeout(SECOND, status(&service, post("1"))).await.is_err());
        assert_eq!(once.handle().shutdown(SECOND).await, 1);
        assert_eq!(client.held(), 1);
        assert_eq!(once.handle().shutdown(100 * SECOND).await, 0);
        // The release has arrived before the task counts as done.
        assert_eq!(client.held(), 0);
        let left = client.shutdown(SECOND).await;
        assert_eq!((left.lost, left.unconfirmed), (0, 0));
    }
}

mod a_loss {
    use super::*;

    fn fixed_lease(client: &LockClient) -> LockLayer<Key<Fixed>> {
        LockLayer::new(client.clone(), fixed("a")).fixed_lease(10 * SECOND)
    }

    /// A handler whose lock is lost is stopped, with its client and without; its key counts as ambiguous.
    #[tokio::test(start_paused = true)]
    async fn stops_the_handler_with_its_client_and_without() {
        for stays in [true, false] {
            let (client, other, once) = setup().await;
            let seen = Arc::<Seen>::default();
            let service = fixed_lease(&client).layer(once.layer(minute(&seen)));
            if stays {
                assert_eq!(status(&service, post("1")).await, 503);
            } else {
                assert!(timeout(SECOND, status(&service, post("1"))).await.is_err());
                sleep(10 * SECOND).await;
            }
            assert_eq!(seen.counts(), (1, 0, 1), "stays: {stays}");
            sleep(SECOND).await;
            assert!(is_free(&other, "a").await);
            assert_eq!((once.handle().tasks(), once.handle().claims()), (0, 0));
            assert_eq!(
                status(&service, post("1")).await,
                500,
                "it is unknown how far it got"
            );
            assert_eq!(seen.counts(), (1, 0, 1));
        }
    }

    /// With `OnLost::RunOn` it comes to its end all the same.
    #[tokio::test(start_paused = true)]
    async fn lets_the_handler_run_on_where_the_layer_says_so() {
        let (client, _other, once) = setup().await;
        let seen = Arc::<Seen>::default();
        let lock = fixed_lease(&client).on_lost(OnLost::RunOn);
        let service = lock.layer(once.layer(minute(&seen)));
        assert!(timeout(SECOND, status(&service, post("1"))).await.is_err());
        assert_eq!(once.handle().shutdown(100 * SECOND).await, 0);
        assert_eq!(seen.counts(), (1, 1, 0));
        assert_eq!(status(&service, post("1")).await, 200);
    }

    /// A client that leaves after the loss does not make a handler run on without the lock.
    #[tokio::test(start_paused = true)]
    async fn is_not_outlived_by_a_handler_whose_client_leaves_at_that_moment() {
        let (client, _other, once) = setup().await;
        let seen = Arc::<Seen>::default();
        let service = fixed_lease(&client).layer(once.layer(minute(&seen)));
        let mut sent = Box::pin(status(&service, post("1")));
        assert!(timeout(SECOND, &mut sent).await.is_err());
        // Not polled while the lease runs out.
        sleep(20 * SECOND).await;
        drop(sent);
        assert_eq!(seen.counts(), (1, 0, 1));
        sleep(SECOND).await;
        assert_eq!(once.handle().tasks(), 0);
    }
}

mod a_body {
    use super::*;

    fn ticking() -> impl Body<Data = Bytes, Error = Infallible> + Send + 'static {
        let ticks = stream::iter(0..10).then(|n| async move {
            sleep(SECOND).await;
            Ok(Frame::data(Bytes::from(n.to_string())))
        });
        StreamBody::new(Box::pin(ticks))
    }

    async fn streaming(
        _: Req,
    ) -> Result<Response<impl Body<Data = Bytes, Error = Infallible> + Send>, Infallible> {
        Ok(Response::new(ticking()))
    }

    /// With `until_body` the lock is held until the body without a waiting client has been read to its end.
    #[tokio::test(start_paused = true)]
    async fn that_is_read_on_without_its_client_keeps_the_lock() {
        let (client, other, once) = setup().await;
        let lock = LockLayer::new(client.clone(), fixed("a")).until_body(60 * SECOND);
        let service = lock.layer(once.layer(service_fn(streaming)));
        let Ok(response) = service.clone().oneshot(post("1")).await;
        let mut body = response.into_body();
        assert!(body.frame().await.is_some());
        drop(body);
        assert_eq!((once.handle().tasks(), client.held()), (1, 1));
        assert!(!is_free(&other, "a").await);
        sleep(10 * SECOND).await;
        assert!(is_free(&other, "a").await);
        let Ok(response) = service.oneshot(post("1")).await;
        assert_eq!(
            response.into_body().collect().await.unwrap().to_bytes(),
            "0123456789"
        );
    }

    /// A body that is read without its client ends with the lock.
    #[tokio::test(start_paused = true)]
    async fn whose_lock_is_lost_is_not_read_on() {
        let (client, other, once) = setup().await;
        let lock = LockLayer::new(client.clone(), fixed("a")).until_body(5 * SECOND);
        let service = lock.layer(once.layer(service_fn(streaming)));
        let Ok(response) = service.clone().oneshot(post("1")).await;
        let mut body = response.into_body();
        assert!(body.frame().await.is_some());
        drop(body);
        sleep(5 * SECOND).await;
        assert_eq!((once.handle().tasks(), once.handle().claims()), (0, 0));
        assert!(is_free(&other, "a").await);
        assert_eq!(
            status(&service, post("1")).await,
            409,
            "the result is not complete"
        );
    }

    /// Without `until_body` the lock ends with the head, however the body is read.
    #[tokio::test(start_paused = true)]
    async fn keeps_no_lock_that_ends_with_the_head() {
        let (client, other, once) = setup().await;
        let service = LockLayer::new(client, fixed("a")).layer(once.layer(service_fn(streaming)));
        let Ok(response) = service.oneshot(post("1")).await;
        assert!(is_free(&other, "a").await);
        drop(response);
        assert_eq!(once.handle().tasks(), 1);
        assert!(is_free(&other, "a").await);
    }
}

mod work_of_the_users_own {
    use super::*;

    /// A spawned task that keeps the lock runs in its frame, and the answer does not wait for it.
    #[tokio::test(start_paused = true)]
    async fn keeps_the_lock_for_as_long_as_it_runs() {
        let (client, other, _) = setup().await;
        let inner = client.clone();
        let handler = service_fn(move |request: Req| {
            let client = inner.clone();
            async move {
                let locks = request.extensions().get::<RequestLocks>().unwrap();
                let kept = locks.keep().expect("the handler holds it");
                tokio::spawn(kept.run(async move {
                    sleep(60 * SECOND).await;
                    drop(client.lock("a").try_acquire().await.expect("re-entered"));
                    sleep(SECOND).await;
                }));
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
            }
        });
        let service = LockLayer::new(client.clone(), fixed("a")).layer(handler);
        let sent = timeout(SECOND, status(&service, post("1"))).await;
        assert_eq!(sent, Ok(200), "the answer does not wait");
        assert!(!is_free(&other, "a").await);
        sleep(60 * SECOND + SECOND / 2).await;
        assert!(!is_free(&other, "a").await, "it re-entered, and goes on");
        sleep(SECOND).await;
        assert!(is_free(&other, "a").await);
        assert_eq!(client.held(), 0);
    }

    /// Such as the client of its tenant.
    #[tokio::test(start_paused = true)]
    async fn has_the_default_client_of_its_request() {
        let (client, other, _) = setup().await;
        let _default = dlock::set_runtime_default(other);
        let handler = service_fn(|request: Req| async move {
            let kept = request.extensions().get::<RequestLocks>().unwrap().keep();
            tokio::spawn(kept.expect("the handler holds it").run(async {
                sleep(SECOND).await;
                let lock = dlock::default_client().expect("there is one").lock("a");
                drop(lock.try_acquire().await.expect("re-entered"));
                sleep(SECOND).await;
            }));
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        });
        let service = LockLayer::new(client.clone(), fixed("a")).layer(handler);
        let sent = dlock::with_default(client.clone(), status(&service, post("1")));
        assert_eq!(sent.await, 200);
        sleep(SECOND + SECOND / 2).await;
        assert_eq!(client.held(), 1);
        sleep(SECOND).await;
        assert_eq!(client.held(), 0);
    }

    /// The handle alone prolongs nothing, and after the release it gives nothing.
    #[tokio::test(start_paused = true)]
    async fn that_forgets_the_handle_prolongs_nothing() {
        let (client, other, _) = setup().await;
        let kept = Arc::new(parking_lot::Mutex::new(None));
        let slot = kept.clone();
        let handler = service_fn(move |request: Req| {
            *slot.lock() = request.extensions().get::<RequestLocks>().cloned();
            async { Ok::<_, Infallible>(Response::new(Full::<Bytes>::default())) }
        });
        let service = LockLayer::new(client, fixed("a")).layer(handler);
        assert_eq!(status(&service, post("1")).await, 200);
        assert!(is_free(&other, "a").await);
        assert!(kept.lock().take().unwrap().keep().is_none());
    }

    /// It is dropped when the lock is lost, and told.
    #[tokio::test(start_paused = true)]
    async fn is_stopped_by_a_loss() {
        let (client, _other, _) = setup().await;
        let (send, told) = tokio::sync::oneshot::channel();
        let send = Arc::new(parking_lot::Mutex::new(Some(send)));
        let handler = service_fn(move |request: Req| {
            let kept = request
                .extensions()
                .get::<RequestLocks>()
                .unwrap()
                .keep()
                .unwrap();
            let send = send.lock().take().unwrap();
            tokio::spawn(async move { send.send(kept.run(std::future::pending::<()>()).await) });
            async { Ok::<_, Infallible>(Response::new(Full::<Bytes>::default())) }
        });
        let layer = LockLayer::new(client.clone(), fixed("a")).max_hold(10 * SECOND);
        assert_eq!(status(&layer.layer(handler), post("1")).await, 200);
        assert_eq!(client.held(), 1);
        let lost = told.await.unwrap().unwrap_err();
        assert_eq!((lost.key.as_str(), lost.loss), ("a", Loss::MaxHold));
        sleep(SECOND).await;
        assert_eq!(client.held(), 0);
    }

    /// A layer that spawns what is inside of it does not take the lock away from a handler that runs on.
    #[tokio::test(start_paused = true)]
    async fn between_the_layers_does_not_cost_the_handler_its_lock() {
        let (client, other, once) = setup().await;
        let seen = Arc::<Seen>::default();
        let inner = once.layer(minute(&seen));
        let spawning = service_fn(move |request: Req| {
            let sent = tokio::spawn(inner.clone().oneshot(request));
            async move { sent.await.unwrap() }
        });
        let service = LockLayer::new(client, fixed("a")).layer(spawning);
        assert!(timeout(SECOND, status(&service, post("1"))).await.is_err());
        assert!(!is_free(&other, "a").await);
        sleep(60 * SECOND).await;
        assert!(is_free(&other, "a").await);
        assert_eq!(seen.counts(), (1, 1, 0));
    }
}
