//! The idempotency layer: clients that go away at every point, handlers that panic, services that fail and
//! runtimes that end.

use std::convert::Infallible;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use crate::idempotency_support::*;
use bytes::Bytes;
use dlock::LockClient;
use dlock_tower::idempotency::caller::public;
use dlock_tower::{IdempotencyLayer, LockLayer, key};
use http::Response;
use http_body::Frame;
use http_body_util::Full;
use tokio::time::{sleep, timeout};
use tower::{Layer, Service, ServiceExt};

/// Polls a future so often, with time to do in between what it waits for, and drops it.
async fn poll_times<F: Future>(future: F, times: usize) -> bool {
    let mut future = pin!(future);
    for _ in 0..times {
        let done = std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_ready())).await;
        if done {
            return true;
        }
        sleep(Duration::from_millis(3)).await;
    }
    false
}

#[tokio::test(start_paused = true)]
async fn dropped_at_any_poll_a_request_runs_once_and_its_retry_is_served() {
    for times in 0..40 {
        let store = Faulty::new();
        let run = Counting::default();
        let layer = store.layer();
        let service = around(
            &layer,
            run.answering(|n| async move {
                for _ in 0..10 {
                    sleep(Duration::from_millis(3)).await;
                }
                Response::new(Full::from(format!("run {n}")))
            }),
        );
        let done = poll_times(service.clone().oneshot(post("k")), times).await;
        assert_eq!(layer.handle().shutdown(SECOND * 10).await, 0, "{times}");
        let answer = send(&service, post("k")).await;
        assert_eq!(answer.both(), (200, "run 1"), "{times}");
        assert_eq!((run.count(), layer.handle().claims()), (1, 0), "{times}");
        if done {
            assert!(times > 5);
            return;
        }
    }
    panic!("it was never done");
}

#[tokio::test(start_paused = true)]
async fn the_handler_runs_on_when_the_client_goes_away() {
    let store = Faulty::new();
    let run = Counting::default();
    let layer = store.layer();
    let service = around(&layer, run.taking(SECOND * 60));
    assert!(timeout(SECOND, send(&service, post("k"))).await.is_err());
    assert_eq!((layer.handle().tasks(), layer.stats().detached), (1, 1));
    // Longer than the lease: it is renewed.
    sleep(SECOND * 50).await;
    assert_eq!(
        send(&service, post("k")).await.problem(),
        problem(409, "in-progress")
    );
    assert_eq!(layer.handle().shutdown(SECOND * 60).await, 0);
    let answer = send(&service, post("k")).await;
    assert!(answer.is_replay() && answer.text() == "run 1");
    assert_eq!(layer.handle().claims(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_shutdown_is_bounded_and_counts_what_is_left() {
    let layer = layer();
    let service = around(&layer, Counting::default().taking(SECOND * 60));
    assert!(timeout(SECOND, send(&service, post("k"))).await.is_err());
    assert_eq!(layer.handle().shutdown(SECOND).await, 1);
    assert_eq!(layer.handle().shutdown(SECOND * 100).await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_answer_was_not_awaited_is_taken_back() {
    let store = Faulty::new();
    let run = Counting::default();
    let layer = store.layer();
    let service = around(&layer, run.service());
    store.faults.claim_answers_held.store(true, Ordering::SeqCst);
    assert!(timeout(SECOND, send(&service, post("k"))).await.is_err());
    store.faults.claim_answers_held.store(false, Ordering::SeqCst);
    layer.handle().shutdown(SECOND).await;
    assert_eq!(run.count(), 0);
    assert_eq!(send(&service, post("k")).await.text(), "run 1");
}

#[tokio::test(start_paused = true)]
async fn a_result_on_its_way_to_the_store_gets_there_without_the_client() {
    let store = Faulty::new();
    let layer = store.layer();
    let service = around(&layer, Counting::default().service());
    store.faults.complete_held.store(true, Ordering::SeqCst);
    assert!(timeout(SECOND, send(&service, post("k"))).await.is_err());
    store.faults.complete_held.store(false, Ordering::SeqCst);
    layer.handle().shutdown(SECOND).await;
    assert!(send(&service, post("k")).await.is_replay());
}

/// A handler that was not begun, since a lock layer inside still waited, spends no key when its client goes away.
#[tokio::test(start_paused = true)]
async fn dropped_request_releases_the_key_when_lock_layers_inside_still_wait() {
    let locks = LockClient::memory();
    let lock = |name: &'static str| LockLayer::new(locks.clone(), key::fixed(name)).wait(SECOND * 60);
    let layer = layer().cancel_on_disconnect();
    let run = Counting::default();
    // One of them has its lock, the other waits.
    let service = layer.layer(lock("free").layer(lock("busy").layer(run.service())));
    let guard = locks.lock("busy").acquire().await.unwrap();
    assert!(timeout(SECOND, send(&service, post("k"))).await.is_err());
    layer.handle().shutdown(SECOND).await;
    guard.release().await.unwrap();
    let answer = send(&service, post("k")).await;
    assert_eq!((answer.both(), answer.is_replay()), ((200, "run 1"), false));
}

/// It is settled as any handler that was cancelled.
#[tokio::test(start_paused = true)]
async fn dropped_handler_whose_destructor_panics_keeps_the_key() {
    struct Panics;
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("as told");
        }
    }
    let (layer, run) = (layer().cancel_on_disconnect(), Counting::default());
    let service = around(
        &layer,
        run.answering(|_| async move {
            let _panics = Panics;
            sleep(SECOND * 60).await;
            Response::new(Full::<Bytes>::default())
        }),
    );
    assert!(timeout(SECOND, send(&service, post("k"))).await.is_err());
    sleep(SECOND * 60).await;
    let answer = send(&service, post("k")).await;
    assert_eq!((answer.problem(), run.count()), (problem(500, "failed"), 1));
}

/// A lock layer that still waits says nothing of a handler that a layer in between has begun another time.
#[tokio::test(start_paused = true)]
async fn dropped_request_keeps_the_key_when_it_was_let_in_another_time() {
    let locks = LockClient::memory();
    let lock = LockLayer::new(locks.clone(), key::fixed("account")).wait(SECOND * 60);
    let layer = layer().cancel_on_disconnect();
    let run = Counting::default();
    let locked = lock.layer(run.taking(SECOND * 60));
    let hedged = tower::service_fn(move |request: Req| {
        let (first, second) = (locked.clone(), locked.clone());
        async move {
            let again = request.clone();
            tokio::select! {
                answer = first.oneshot(request) => answer,
                answer = second.oneshot(again) => answer,
            }
        }
    });
    let service = layer.layer(hedged);
    assert!(timeout(SECOND, send(&service, post("k"))).await.is_err());
    layer.handle().shutdown(SECOND).await;
    let answer = send(&service, post("k")).await;
    assert_eq!((answer.problem(), run.count()), (problem(500, "failed"), 1));
}

/// The same when the lock of a layer outside is lost meanwhile.
#[tokio::test(start_paused = true)]
async fn request_that_loses_its_outer_lock_releases_the_key_when_an_inner_one_still_waits() {
    let locks = LockClient::memory();
    let outer = LockLayer::new(locks.clone(), key::fixed("outer")).max_hold(SECOND);
    let inner = LockLayer::new(locks.clone(), key::fixed("inner")).wait(SECOND * 60);
    let layer = layer();
    let run = Counting::default();
    let service = outer.layer(layer.layer(inner.layer(run.service())));
    let ask = || async {
        let Ok(response) = service.clone().oneshot(post("k")).await;
        answer(response).await
    };
    let guard = locks.lock("inner").acquire().await.unwrap();
    assert_eq!(ask().await.status(), 503);
    layer.handle().shutdown(SECOND).await;
    guard.release().await.unwrap();
    assert_eq!(ask().await.both(), (200, "run 1"));
}

#[tokio::test(start_paused = true)]
async fn with_cancel_on_disconnect_the_handler_is_dropped_and_the_policy_decides() {
    struct Dropped(Arc<AtomicBool>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    for (layer, second) in [
        (layer().cancel_on_disconnect(), (500, "failed")),
        (layer().cancel_on_disconnect().retry_ambiguous(), (200, "run 2")),
    ] {
        let (run, dropped) = (Counting::default(), Arc::new(AtomicBool::new(false)));
        let seen = dropped.clone();
        let service = around(
            &layer,
            run.answering(move |n| {
                let dropped = Dropped(seen.clone());
                async move {
                    if n == 1 {
                        sleep(SECOND * 60).await;
                        drop(dropped);
                    }
                    Response::new(Full::from(format!("run {n}")))
                }
            }),
        );
        assert!(timeout(SECOND, send(&service, post("k"))).await.is_err());
        assert!(dropped.load(Ordering::SeqCst));
        layer.handle().shutdown(SECOND).await;
        let answer = send(&service, post("k")).await;
        assert_eq!(answer.status(), second.0);
        if second.0 == 500 {
            assert_eq!(answer.problem(), problem(500, second.1));
            assert!(!answer.not_started());
        } else {
            assert_eq!(answer.text(), second.1);
        }
        assert_eq!(layer.handle().claims(), 0);
    }
}

/// Panics at its n-th poll, and again if it is ever polled after that.
struct Panics(usize, Arc<AtomicUsize>);

impl Future for Panics {
    type Output = Result<Res, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.1.fetch_add(1, Ordering::SeqCst);
        self.0 -= 1;
        assert!(self.0 > 0, "as told");
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_panics_is_never_polled_again_and_the_policy_decides() {
    for (layer, runs) in [(layer(), 1), (layer().retry_ambiguous(), 2)] {
        for detached in [false, true] {
            let polls = Arc::new(AtomicUsize::new(0));
            let run = Counting::default();
            let handler = {
                let (polls, run) = (polls.clone(), run.clone());
                tower::service_fn(move |_: Req| {
                    run.next();
                    Panics(3, polls.clone())
                })
            };
            let service = around(&layer, handler);
            let key = format!("k{detached}");
            let (shared, request) = (service.clone(), post(&key));
            let first = tokio::spawn(async move {
                let mut first = Box::pin(shared.oneshot(request));
                if detached {
                    let _ = futures_util::poll!(&mut first);
                } else {
                    let _ = first.await;
                }
            });
            assert_eq!(first.await.is_err(), !detached);
            layer.handle().shutdown(SECOND).await;
            assert_eq!(polls.load(Ordering::SeqCst), 3);
            assert_eq!(layer.handle().claims(), 0);
            let second = tokio::spawn(service.oneshot(post(&key))).await;
            match second {
                Ok(response) => {
                    assert_eq!(answer(response.unwrap()).await.problem(), problem(500, "failed"))
                }
                Err(panicked) => assert!(panicked.is_panic()),
            }
            assert_eq!(run.count(), runs);
            layer.handle().shutdown(SECOND).await;
        }
    }
}

#[tokio::test]
async fn an_error_of_the_service_stays_its_own_and_the_policy_decides() {
    for (layer, runs) in [(layer(), 1), (layer().retry_ambiguous(), 2)] {
        let run = Counting::default();
        let counting = run.clone();
        let failing = tower::service_fn(move |_: Req| {
            counting.next();
            async { Err::<Res, &'static str>("broken") }
        });
        let service = around(&layer, failing);
        assert_eq!(service.clone().oneshot(post("k")).await.unwrap_err(), "broken");
        let second = service.oneshot(post("k")).await;
        assert_eq!((run.count(), second.is_ok()), (runs, runs == 1));
        if let Ok(response) = second {
            assert_eq!(answer(response).await.problem(), problem(500, "failed"));
        }
    }
}

/// A body of one piece that panics as it is told.
struct Breaks {
    pieces: usize,
    in_drop: bool,
}

impl http_body::Body for Breaks {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.pieces += 1;
        match self.pieces {
            1 => Poll::Ready(Some(Ok(Frame::data(Bytes::from("piece"))))),
            // The head is sent, and nothing more is asked for.
            2 => Poll::Pending,
            _ => {
                assert!(self.in_drop, "as told");
                Poll::Ready(None)
            }
        }
    }
}

impl Drop for Breaks {
    fn drop(&mut self) {
        assert!(!self.in_drop || self.pieces == 0, "as told");
    }
}

/// The handler has answered, so that nothing runs again, also after the lease.
#[tokio::test(start_paused = true)]
async fn a_body_that_panics_while_it_is_read_without_the_client_leaves_no_claim() {
    for (layer, in_drop, status) in [
        (layer(), false, 409),
        (layer(), true, 200),
        (layer().cancel_on_disconnect(), true, 409),
    ] {
        let run = Counting::default();
        let service = around(
            &layer,
            run.answering(move |_| async move { Response::new(Breaks { pieces: 0, in_drop }) }),
        );
        let Ok(response) = service.clone().oneshot(post("k")).await;
        assert_eq!(response.status(), 200);
        drop(response);
        layer.handle().shutdown(SECOND).await;
        sleep(SECOND * 120).await;
        // With its own service, whose body does not panic.
        let answer = send(&around(&layer, run.service()), post("k")).await;
        assert_eq!((run.count(), answer.status()), (1, status), "{in_drop}");
        assert_eq!(layer.handle().claims(), 0);
    }
}

/// A service that is never ready, and says so when it is asked.
#[derive(Clone)]
struct NotReady(Arc<AtomicUsize>, bool);

impl Service<Req> for NotReady {
    type Response = Res;
    type Error = &'static str;
    type Future = std::future::Ready<Result<Res, &'static str>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), &'static str>> {
        self.0.fetch_add(1, Ordering::SeqCst);
        if self.1 {
            Poll::Ready(Err("shut"))
        } else {
            Poll::Pending
        }
    }

    fn call(&mut self, _: Req) -> Self::Future {
        panic!("it was never ready")
    }
}

#[tokio::test(start_paused = true)]
async fn a_service_that_does_not_become_ready_releases_the_key() {
    let layer = layer();
    let asked = Arc::new(AtomicUsize::new(0));
    let service = layer.layer(NotReady(asked.clone(), true));
    for _ in 0..2 {
        assert_eq!(service.clone().oneshot(post("k")).await.unwrap_err(), "shut");
    }
    let service = layer.layer(NotReady(asked.clone(), false));
    let mut idle = service.clone();
    assert!(
        futures_util::future::poll_fn(|cx| idle.poll_ready(cx))
            .await
            .is_ok(),
        "always ready"
    );
    assert_eq!(
        asked.load(Ordering::SeqCst),
        2,
        "the inner service was not asked for that"
    );
    assert!(timeout(SECOND, service.oneshot(post("k"))).await.is_err());
    layer.handle().shutdown(SECOND).await;
    let run = Counting::default();
    assert_eq!(
        send(&around(&layer, run.service()), post("k")).await.text(),
        "run 1"
    );
}

#[tokio::test(start_paused = true)]
async fn a_service_that_fails_before_it_is_ready_releases_the_key_without_the_client() {
    let store = Faulty::new();
    let layer = store.layer();
    let service = layer.layer(NotReady(Arc::default(), true));
    store.faults.release_held.store(true, Ordering::SeqCst);
    assert!(timeout(SECOND, service.oneshot(post("k"))).await.is_err());
    store.faults.release_held.store(false, Ordering::SeqCst);
    layer.handle().shutdown(SECOND).await;
    let run = Counting::default();
    let answer = send(&around(&layer, run.service()), post("k")).await;
    assert_eq!(answer.both(), (200, "run 1"));
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_runs_on_keeps_its_lock_frame() {
    // Around both: a frame of its own, that the request is polled in.
    let client = LockClient::memory();
    let layer = IdempotencyLayer::new(client.records().unwrap(), public());
    let inner = client.clone();
    let handler = tower::service_fn(move |_: Req| {
        let client = inner.clone();
        async move {
            sleep(SECOND * 5).await;
            let lock = client.lock("account").wait(SECOND);
            let text = match lock.acquire().await {
                Ok(_) => "entered",
                Err(_) => "outside of the frame",
            };
            Ok::<_, Infallible>(Response::new(Full::from(text)))
        }
    });
    let lock = LockLayer::new(client.clone(), key::fixed("account"));
    // The lock layer inside: it lives on with the handler.
    let service = layer.layer(lock.layer(handler.clone()));
    assert!(timeout(SECOND, service.clone().oneshot(post("k"))).await.is_err());
    assert_eq!(client.held(), 1);
    layer.handle().shutdown(SECOND * 10).await;
    assert_eq!(client.held(), 0);
    let response = service.oneshot(post("k")).await.unwrap();
    assert_eq!(answer(response).await.text(), "entered");
    // A frame further out.
    let guard = client.lock("account").acquire().await.unwrap();
    let service = around(&layer, handler);
    let request = guard.scope(timeout(SECOND, service.clone().oneshot(post("k2"))));
    assert!(request.await.is_err());
    layer.handle().shutdown(SECOND * 10).await;
    assert_eq!(send(&service, post("k2")).await.text(), "entered");
}

#[test]
fn a_runtime_that_ends_takes_the_work_with_it_and_nothing_panics() {
    let runtime = || {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap()
    };
    let store = Faulty::new();
    let layer = store.layer().lease(Duration::from_millis(300));
    let run = Counting::default();
    let service = around(&layer, run.taking(SECOND / 5));
    let first = runtime();
    first.block_on(async {
        let request = service.clone().oneshot(post("k"));
        assert!(timeout(Duration::from_millis(50), request).await.is_err());
        assert_eq!(layer.handle().tasks(), 1);
    });
    first.shutdown_background();
    // The next runtime finds an orphan, and a layer that works.
    runtime().block_on(async {
        sleep(SECOND).await;
        assert_eq!(layer.handle().claims(), 0);
        assert_eq!(send(&service, post("k")).await.text(), "run 2");
        assert!(send(&service, post("k")).await.is_replay());
    });
}

/// A server may drop its requests when its runtime has returned, or on a thread of another one.
#[test]
fn a_claim_under_way_that_is_dropped_outside_of_a_runtime_is_taken_back() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    let store = Faulty::new();
    let layer = store.layer();
    let run = Counting::default();
    let service = around(&layer, run.service());
    store.faults.claim_answers_held.store(true, Ordering::SeqCst);
    let mut request = Box::pin(service.clone().oneshot(post("k")));
    runtime.block_on(async { assert!(timeout(SECOND, &mut request).await.is_err()) });
    drop(request);
    store.faults.claim_answers_held.store(false, Ordering::SeqCst);
    runtime.block_on(async {
        layer.handle().shutdown(SECOND).await;
        assert_eq!(run.count(), 0);
        assert_eq!(send(&service, post("k")).await.text(), "run 1");
    });
}

/// A runtime that blocks or ends takes no claim of another one along: each renews its own.
#[test]
fn claims_are_renewed_on_each_runtime_when_another_one_blocks_or_ends() {
    const LEASE: Duration = Duration::from_secs(2);
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    for ends in [false, true] {
        let store = Faulty::new();
        let layer = store.layer().lease(LEASE);
        let run = Counting::default();
        let service = around(&layer, run.taking(LEASE * 3));
        let start = |runtime: &tokio::runtime::Runtime, key: &'static str| {
            let (service, claims) = (service.clone(), layer.handle().claims());
            let request = runtime.spawn(async move { send(&service, post(key)).await });
            runtime.block_on(async {
                while layer.handle().claims() == claims {
                    sleep(Duration::from_millis(1)).await;
                }
            });
            request
        };
        let first = runtime();
        let _request = start(&first, "a");
        // From here on nothing runs on the first one: it is not driven.
        let second = runtime();
        let request = start(&second, "b");
        let first = (!ends).then_some(first);
        second.block_on(async {
            sleep(LEASE * 3 / 2).await;
            let again = send(&service, post("b")).await;
            assert_eq!(again.problem(), problem(409, "in-progress"), "{ends}");
            assert_eq!(request.await.unwrap().text(), "run 2");
        });
        assert_eq!(run.count(), 2);
        drop(first);
    }
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_runs_on_keeps_its_span() {
    use tracing::Instrument;
    let _logs = tracing::subscriber::set_default(tracing_subscriber::registry());
    let layer = layer();
    let handler = tower::service_fn(|_: Req| async {
        sleep(SECOND * 2).await;
        let name = tracing::Span::current().metadata().map(|span| span.name());
        Ok::<_, Infallible>(Response::new(Full::from(name.unwrap_or("no span"))))
    });
    let service = around(&layer, handler);
    let request = timeout(SECOND, service.clone().oneshot(post("k")));
    assert!(request.instrument(tracing::info_span!("request")).await.is_err());
    layer.handle().shutdown(SECOND * 10).await;
    assert_eq!(send(&service, post("k")).await.text(), "request");
}

/// Such as the client of its tenant: on another one its locks would exclude nobody.
#[tokio::test(start_paused = true)]
async fn a_handler_that_runs_on_keeps_its_default_client() {
    let (own, other) = (LockClient::memory(), LockClient::memory());
    let _default = dlock::set_runtime_default(other.clone());
    let layer = layer();
    let handler = tower::service_fn(|_: Req| async {
        sleep(SECOND * 2).await;
        let client = dlock::default_client().unwrap();
        let _guard = client.lock("account").acquire().await.unwrap();
        sleep(SECOND * 2).await;
        Ok::<_, Infallible>(Response::new(Full::default()))
    });
    let service = around(&layer, handler);
    let request = timeout(SECOND, service.clone().oneshot(post("k")));
    assert!(dlock::with_default(own.clone(), request).await.is_err());
    sleep(SECOND * 2).await;
    assert_eq!((own.held(), other.held()), (1, 0));
    layer.handle().shutdown(SECOND * 10).await;
    assert!(send(&service, post("k")).await.is_replay());
}

/// A service that panics when it is first asked whether it is ready.
#[derive(Clone)]
struct PanicsUnready<S>(S, Arc<AtomicBool>);

impl<S: Service<Req>> Service<Req> for PanicsUnready<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        assert!(self.1.swap(true, Ordering::SeqCst), "on purpose");
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Req) -> S::Future {
        self.0.call(request)
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_before_the_handler_is_asked_releases_the_key() {
    let (layer, run) = (layer(), Counting::default());
    let service = layer.layer(PanicsUnready(run.service(), Arc::default()));
    let first = tokio::spawn(service.clone().oneshot(post("k")));
    assert!(first.await.unwrap_err().is_panic());
    layer.handle().shutdown(SECOND).await;
    assert_eq!(send(&service, post("k")).await.both(), (200, "run 1"));
}
