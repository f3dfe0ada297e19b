//! The idempotency layer: what bounds handlers without clients, requests that wait, bodies without an end, and what is
//! stored where the store is full.

use std::future::IntoFuture;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::idempotency_support::*;
use bytes::Bytes;
use dlock_tower::idempotency::Problem;
use futures_util::future::join_all;
use futures_util::stream::{self, StreamExt};
use http::Response;
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use tokio::io::AsyncWriteExt;
use tokio::time::{Instant, sleep, timeout};
use tower::ServiceExt;

type Error = Box<dyn std::error::Error + Send + Sync>;
type Streamed = UnsyncBoxBody<Bytes, Error>;

/// Clients that leave at once cannot have more handlers running than the limit of detached ones: at the limit requests are
/// refused with their keys free, results are still replayed, and a handler that runs is never dropped.
#[tokio::test(start_paused = true)]
async fn detached_handlers_are_bounded_and_none_is_dropped() {
    let store = Faulty::new();
    let run = Counting::default();
    let layer = store.layer().max_detached(2);
    let service = around(&layer, run.taking(SECOND * 60));
    let gone = async |key: &str| timeout(SECOND, send(&service, post(key))).await.is_err();
    assert!(gone("a").await && gone("b").await);
    for key in ["c", "d"] {
        let refused = send(&service, post(key)).await;
        assert_eq!(refused.problem(), problem(503, "overloaded"));
        assert_eq!(refused.header("retry-after"), Some("1"));
        assert!(refused.not_started() && Problem::Overloaded.is_retryable());
    }
    assert_eq!((run.count(), layer.stats().overloaded), (2, 2));
    // A request for work in progress is told so, as ever.
    assert_eq!(
        send(&service, post("a")).await.problem(),
        problem(409, "in-progress")
    );
    sleep(SECOND * 58 + SECOND / 2).await;
    // The first is done; the second is not, by half a second.
    assert!(send(&service, post("a")).await.is_replay());
    assert_eq!(layer.handle().shutdown(SECOND * 60).await, 0);
    assert!(send(&service, post("b")).await.is_replay());
    assert_eq!(send(&service, post("c")).await.text(), "run 3");
    assert_eq!(layer.handle().claims(), 0);
}

/// At the limit of detached handlers a result is still replayed.
#[tokio::test(start_paused = true)]
async fn results_are_replayed_at_the_limit_of_detached_handlers() {
    let run = Counting::default();
    let layer = layer().max_detached(1);
    let service = around(
        &layer,
        run.answering(|n| async move {
            sleep(if n == 1 { Duration::ZERO } else { SECOND * 60 }).await;
            Response::new(Full::from(format!("run {n}")))
        }),
    );
    assert_eq!(send(&service, post("done")).await.text(), "run 1");
    assert!(timeout(SECOND, send(&service, post("slow"))).await.is_err());
    assert_eq!(send(&service, post("new")).await.status(), 503);
    assert!(send(&service, post("done")).await.is_replay());
    layer.handle().shutdown(SECOND * 100).await;
    assert_eq!(send(&service, post("new")).await.text(), "run 3");
}

/// With `cancel_on_disconnect` no handler runs on, so a limit of 0 refuses nothing, also while a result that no client
/// waits for is on its way to the store.
#[tokio::test(start_paused = true)]
async fn requests_run_where_no_handler_may_be_detached() {
    let store = Faulty::new();
    let run = Counting::default();
    let layer = store.layer().cancel_on_disconnect().max_detached(0);
    layer.check().unwrap();
    let service = around(&layer, run.service());
    assert_eq!(send(&service, post("a")).await.text(), "run 1");
    store.faults.complete_held.store(true, Ordering::SeqCst);
    assert!(timeout(SECOND, send(&service, post("b"))).await.is_err());
    assert_eq!((run.count(), layer.handle().tasks()), (2, 1));
    store.faults.complete_held.store(false, Ordering::SeqCst);
    assert_eq!(send(&service, post("c")).await.text(), "run 3");
    assert_eq!(layer.stats().overloaded, 0);
}

/// Requests that wait keep their bodies in memory, so their number is bounded; the others are told at once.
#[tokio::test(start_paused = true)]
async fn requests_that_wait_are_bounded() {
    for (most, layer) in [
        (256, layer()),
        (3, layer().max_waiters(3)),
        (0, layer().max_waiters(0)),
    ] {
        let run = Counting::default();
        let layer = layer.wait(SECOND * 60);
        let service = around(&layer, run.taking(SECOND * 10));
        for _ in 0..2 {
            let begun = Instant::now();
            let key = format!("k{}", run.count());
            let all = join_all((0..most + 6).map(|_| async {
                let answer = send(&service, post(&key)).await;
                (answer, begun.elapsed())
            }))
            .await;
            let (told, served): (Vec<_>, Vec<_>) =
                all.into_iter().partition(|(answer, _)| answer.status() == 409);
            assert_eq!((told.len(), served.len()), (5, most + 1));
            for (answer, after) in told {
                assert_eq!(answer.problem(), problem(409, "in-progress"));
                assert_eq!(answer.header("retry-after"), Some("1"));
                assert!(after < SECOND);
            }
        }
        assert_eq!(run.count(), 2);
    }
}

/// Counts those of its kind that live.
struct Running(Arc<AtomicUsize>);

impl Running {
    fn new(count: &Arc<AtomicUsize>) -> Running {
        count.fetch_add(1, Ordering::SeqCst);
        Running(count.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A body that counts those of its kind that live, and never ends.
fn endless(living: &Arc<AtomicUsize>, pause: Duration) -> Streamed {
    let stream = stream::repeat(Arc::new(Running::new(living))).then(move |_lives| async move {
        sleep(pause).await;
        Ok(Frame::data(Bytes::from_static(b"{}\n")))
    });
    StreamBody::new(stream).boxed_unsync()
}

/// An endless body that is no event stream goes on for as long as its client reads, and ends soon after; a retry is told
/// that there is no result, and nothing runs again.
#[tokio::test(start_paused = true)]
async fn endless_body_ends_with_its_client() {
    for clients_stay in [Duration::ZERO, SECOND * 600] {
        let (living, run) = (Arc::new(AtomicUsize::new(0)), Counting::default());
        let layer = layer();
        let made = living.clone();
        let service = around(
            &layer,
            run.answering(move |_| {
                let body = endless(&made, SECOND);
                async move { Response::new(body) }
            }),
        );
        for n in 0..50 {
            let response = service.clone().oneshot(post(&format!("k{n}"))).await.unwrap();
            let reading = async {
                let mut body = response.into_body();
                while let Some(frame) = body.frame().await {
                    frame.unwrap();
                }
            };
            if n == 0 {
                assert!(timeout(clients_stay, reading).await.is_err());
            }
        }
        sleep(SECOND * 11).await;
        assert_eq!((living.load(Ordering::SeqCst), layer.handle().tasks()), (0, 0));
        let again = send_streamed(&service, "k0").await;
        assert_eq!(again.problem(), problem(409, "result-unavailable"));
        assert_eq!((run.count(), layer.handle().claims()), (50, 0));
    }
}

/// The end of the service does not wait for bodies without an end.
#[tokio::test(start_paused = true)]
async fn shutdown_ends_bodies_that_are_not_read() {
    let (living, run) = (Arc::new(AtomicUsize::new(0)), Counting::default());
    let layer = layer().read_on(SECOND * 3600);
    let made = living.clone();
    let service = around(
        &layer,
        run.answering(move |_| {
            let body = endless(&made, SECOND);
            async move { Response::new(body) }
        }),
    );
    for n in 0..50 {
        drop(service.clone().oneshot(post(&format!("k{n}"))).await.unwrap());
    }
    sleep(SECOND).await;
    assert_eq!(living.load(Ordering::SeqCst), 50);
    assert_eq!(layer.handle().shutdown(SECOND * 4).await, 0);
    assert_eq!(living.load(Ordering::SeqCst), 0);
    let again = send_streamed(&service, "k0").await;
    assert_eq!(again.problem(), problem(409, "result-unavailable"));
    // A layer that goes on reads on again, however long it was given for its end.
    layer.handle().shutdown(Duration::MAX).await;
    drop(service.clone().oneshot(post("later")).await.unwrap());
    sleep(SECOND * 60).await;
    assert_eq!(living.load(Ordering::SeqCst), 1);
}

/// The first to end leaves the layer closed for the other one, which ends with the work.
#[tokio::test(start_paused = true)]
async fn shutdown_beside_another_one_ends_with_the_work() {
    let layer = layer();
    let service = around(&layer, Counting::default().taking(SECOND * 3));
    assert!(timeout(SECOND, send(&service, post("k"))).await.is_err());
    let begun = Instant::now();
    let (handle, other) = (layer.handle(), layer.handle());
    let left = tokio::join!(handle.shutdown(SECOND), other.shutdown(SECOND * 60));
    assert_eq!(left, (1, 0));
    assert!(begun.elapsed() < SECOND * 3, "{:?}", begun.elapsed());
}

async fn send_streamed<S>(service: &S, key: &str) -> Answer
where
    S: tower::Service<
            Req,
            Response = Response<dlock_tower::idempotency::ResponseBody<Streamed>>,
            Error = std::convert::Infallible,
        > + Clone,
{
    send(service, post(key)).await
}

/// A store that is full takes the little that says that the work was done: a retry is told that there is no result, and
/// nothing runs again. What fits is stored as ever.
#[tokio::test(start_paused = true)]
async fn full_store_keeps_that_the_work_was_done() {
    let store = Faulty::new();
    store.faults.room.store(1000, Ordering::SeqCst);
    let (layer, run) = (store.layer(), Counting::default());
    let service = around(
        &layer,
        run.answering(|n| async move { Response::new(Full::from(vec![b'x'; n * 900])) }),
    );
    assert_eq!(send(&service, post("small")).await.status(), 200);
    assert!(send(&service, post("small")).await.is_replay());
    assert_eq!(send(&service, post("large")).await.body.len(), 1800);
    let again = send(&service, post("large")).await;
    assert_eq!(again.problem(), problem(409, "result-unavailable"));
    assert_eq!(run.count(), 2);
    assert_eq!((layer.stats().tombstones, layer.handle().claims()), (1, 0));
    // A store that takes nothing at all gets the whole result as soon as it takes one.
    store.faults.room.store(1, Ordering::SeqCst);
    assert_eq!(send(&service, post("none")).await.body.len(), 2700);
    assert_eq!(
        send(&service, post("none")).await.problem(),
        problem(409, "in-progress")
    );
    store.faults.room.store(0, Ordering::SeqCst);
    layer.handle().shutdown(SECOND * 20).await;
    assert_eq!(send(&service, post("none")).await.body.len(), 2700);
    assert_eq!(run.count(), 3);
}

/// A client that hangs up is noticed though its handler reads no body: each layer has read it, so that the server sees the
/// end of the connection behind it.
#[tokio::test]
async fn client_that_hangs_up_is_noticed_behind_a_body_that_the_handler_leaves() {
    let client = dlock::LockClient::memory();
    let layer = layer().cancel_on_disconnect();
    let lock = dlock_tower::LockLayer::new(client.clone(), dlock_tower::key::fixed("k"));
    for locked in [false, true] {
        let running = Arc::new(AtomicUsize::new(0));
        let counted = running.clone();
        let handler = axum::routing::post(move || {
            let running = Running::new(&counted);
            async move {
                std::future::pending::<()>().await;
                drop(running);
            }
        });
        let app = axum::Router::new().route("/pay", handler);
        let app = match locked {
            false => app.layer(layer.clone()),
            true => app.layer(lock.clone()),
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(axum::serve(listener, app).into_future());
        let mut caller = tokio::net::TcpStream::connect(address).await.unwrap();
        let request =
            b"POST /pay HTTP/1.1\r\nhost: shop\r\nidempotency-key: k\r\ncontent-length: 5\r\n\r\n12345";
        caller.write_all(request).await.unwrap();
        let runs = async |n: usize| {
            dlock_tests::eventually("the handler comes and goes", || {
                std::future::ready(running.load(Ordering::SeqCst) == n)
            })
            .await;
        };
        runs(1).await;
        assert_eq!(client.held(), usize::from(locked));
        drop(caller);
        runs(0).await;
    }
    assert_eq!(layer.handle().shutdown(SECOND * 10).await, 0);
    assert_eq!(layer.handle().claims(), 0);
    drop(client.lock("k").acquire().await.unwrap());
}
