//! The idempotency layer: a store that goes away at the claim, while the handler runs, and at the
//! completion; claims that are lost.

use std::convert::Infallible;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::idempotency_support::*;
use axum::{Router, routing};
use dlock::LockClient;
use dlock::record::OnOrphan;
use dlock_tests::Log;
use dlock_tower::idempotency::Outcome;
use dlock_tower::{Idempotency, LockLayer, key};
use http::{Request, Response};
use http_body_util::Full;
use metrics::{Counter, Gauge, Histogram, KeyName, Metadata, Recorder, SharedString, Unit};
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt};

#[tokio::test(start_paused = true)]
async fn a_store_that_is_down_at_the_claim_refuses_and_nothing_runs() {
    let store = Faulty::new();
    let run = Counting::default();
    let layer = store.layer();
    let service = around(&layer, run.service());
    store.faults.set_down(true);
    let begun = Instant::now();
    let answer = send(&service, post("k")).await;
    assert_eq!(answer.problem(), problem(503, "unavailable"));
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert!(answer.not_started());
    assert_eq!(answer.json()["retryable"], true);
    assert!(!answer.text().contains("10.0.0.7"), "not told to strangers");
    assert!(begun.elapsed() < SECOND, "{:?}", begun.elapsed());
    assert_eq!((run.count(), layer.handle().tasks()), (0, 0));
    store.faults.set_down(false);
    assert_eq!(send(&service, post("k")).await.text(), "run 1");
    assert_eq!(layer.stats().unavailable, 1);
}

#[tokio::test(start_paused = true)]
async fn it_is_asked_again_first() {
    let store = Faulty::new();
    let run = Counting::default();
    let service = around(&store.layer().retry_for(SECOND), run.service());
    store.faults.set_down(true);
    let back = async {
        sleep(SECOND / 2).await;
        store.faults.set_down(false);
    };
    let (answer, ()) = tokio::join!(send(&service, post("k")), back);
    assert_eq!(answer.both(), (200, "run 1"));
}

#[tokio::test(start_paused = true)]
async fn it_lets_requests_run_open_only_where_that_was_asked_for() {
    let store = Faulty::new();
    let run = Counting::default();
    let service = around(&store.layer().fail_open(), run.service());
    store.faults.set_down(true);
    assert_eq!(send(&service, post("k")).await.text(), "run 1");
    assert_eq!(send(&service, post("k")).await.text(), "run 2");
}

/// What is known to be at work is not done beside that, also where requests run unprotected.
#[tokio::test(start_paused = true)]
async fn a_request_that_waits_for_its_equal_does_not_run_open() {
    let (store, run) = (Faulty::new(), Counting::default());
    let service = around(
        &store.layer().fail_open().wait(SECOND * 60),
        run.taking(SECOND * 20),
    );
    let first = tokio::spawn({
        let service = service.clone();
        async move { send(&service, post("k")).await }
    });
    sleep(SECOND).await;
    let down = async {
        sleep(SECOND).await;
        store.faults.set_down(true);
    };
    let (second, ()) = tokio::join!(send(&service, post("k")), down);
    assert_eq!((second.problem(), run.count()), (problem(409, "in-progress"), 1));
    store.faults.set_down(false);
    assert_eq!(first.await.unwrap().text(), "run 1");
}

/// A handler that insists on its claim cannot run open, and the log says what to do.
#[tokio::test(start_paused = true)]
async fn handler_that_insists_on_its_claim_does_not_run_open() {
    async fn insists(_: Idempotency) -> &'static str {
        "claimed"
    }
    async fn asks(claim: Option<Idempotency>) -> &'static str {
        claim.map_or("open", |_| "claimed")
    }
    let log = Log::default();
    let _listening = log.listen();
    let store = Faulty::new();
    store.faults.set_down(true);
    let app = Router::new()
        .route("/insists", routing::post(insists))
        .route("/asks", routing::post(asks))
        .layer(store.layer().fail_open());
    let status = async |path| {
        let request = Request::post(path).header("idempotency-key", "k");
        let request = request.body(axum::body::Body::empty()).unwrap();
        app.clone().oneshot(request).await.unwrap().status().as_u16()
    };
    assert_eq!(status("/asks").await, 200);
    assert_eq!((log.count("fail_open"), status("/insists").await), (0, 500));
    assert_eq!((log.count("fail_open"), log.count("Option<Idempotency>")), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_answer_was_lost_is_asked_for_again_and_is_the_first_attempt() {
    let store = Faulty::new();
    let handler = tower::service_fn(|request: Req| {
        let attempt = request.extensions().get::<Idempotency>().unwrap().attempt();
        async move { Ok::<_, Infallible>(Response::new(Full::from(format!("attempt {attempt}")))) }
    });
    let service = around(&store.layer(), handler);
    store.faults.claim_answers_lost.store(1, Ordering::SeqCst);
    assert_eq!(send(&service, post("k")).await.text(), "attempt 1");
}

#[tokio::test(start_paused = true)]
async fn a_claim_in_doubt_is_taken_back() {
    let store = Faulty::new();
    let run = Counting::default();
    let layer = store.layer();
    let service = around(&layer, run.service());
    store.faults.claim_answers_lost.store(100, Ordering::SeqCst);
    assert_eq!(
        send(&service, post("k")).await.problem(),
        problem(503, "unavailable")
    );
    store.faults.claim_answers_lost.store(0, Ordering::SeqCst);
    layer.handle().shutdown(SECOND).await;
    assert_eq!(send(&service, post("k")).await.text(), "run 1");
}

/// Its orphan would block the key until the retention is over, although no handler was called.
#[tokio::test(start_paused = true)]
async fn a_claim_in_doubt_that_nobody_takes_over_is_taken_back_after_an_outage_longer_than_its_lease() {
    // More than there are places for releases under way.
    const DOUBTS: usize = 1030;
    let store = Faulty::new();
    let run = Counting::default();
    let layer = store.layer().on_orphan(OnOrphan::Leave);
    let service = around(&layer, run.service());
    store
        .faults
        .claim_answers_lost
        .store(usize::MAX, Ordering::SeqCst);
    store.faults.release_down.store(true, Ordering::SeqCst);
    let in_doubt = |n: usize| {
        let (service, key) = (service.clone(), format!("k{n}"));
        async move { send(&service, post(&key)).await.problem() }
    };
    let refused = futures_util::future::join_all((0..DOUBTS).map(in_doubt)).await;
    assert!(
        refused
            .iter()
            .all(|answer| *answer == problem(503, "unavailable"))
    );
    sleep(SECOND * 30).await;
    store.faults.claim_answers_lost.store(0, Ordering::SeqCst);
    store.faults.release_down.store(false, Ordering::SeqCst);
    assert_eq!(layer.handle().shutdown(SECOND * 10).await, 0);
    for n in [0, DOUBTS - 1] {
        let answer = send(&service, post(&format!("k{n}"))).await;
        assert_eq!(answer.status(), 200, "{n}: {}", answer.text());
    }
    assert_eq!((run.count(), layer.stats().abandoned), (2, 0));
}

/// Where the next request takes over, the end of the lease is enough.
#[tokio::test(start_paused = true)]
async fn a_claim_in_doubt_that_is_taken_over_is_left_to_its_lease() {
    let store = Faulty::new();
    let layer = store.layer();
    let service = around(&layer, Counting::default().service());
    store
        .faults
        .claim_answers_lost
        .store(usize::MAX, Ordering::SeqCst);
    store.faults.release_down.store(true, Ordering::SeqCst);
    send(&service, post("k")).await;
    assert_eq!(layer.handle().shutdown(SECOND * 30).await, 0);
    assert_eq!(layer.stats().abandoned, 1);
    store.faults.claim_answers_lost.store(0, Ordering::SeqCst);
    assert_eq!(send(&service, post("k")).await.text(), "run 1");
}

/// Two executions side by side would be the end of one panic.
#[tokio::test(start_paused = true)]
async fn a_claim_is_renewed_when_the_store_panics() {
    let store = Faulty::new();
    let (layer, run) = (store.layer(), Counting::default());
    let service = around(&layer, run.taking(SECOND * 30));
    let first = tokio::spawn({
        let service = service.clone();
        async move { send(&service, post("k")).await.text().to_owned() }
    });
    sleep(SECOND).await;
    store.faults.panics.store(1, Ordering::SeqCst);
    sleep(SECOND * 19).await;
    assert_eq!(store.faults.panics.load(Ordering::SeqCst), 0);
    assert_eq!(
        send(&service, post("k")).await.problem(),
        problem(409, "in-progress")
    );
    assert_eq!(first.await.unwrap(), "run 1");
    assert_eq!((run.count(), layer.stats().renewal_failures), (1, 1));
}

/// Panics when a layer counts something.
struct PanickingRecorder;

impl Recorder for PanickingRecorder {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &metrics::Key, _: &Metadata<'_>) -> Counter {
        let of_a_layer = ["dlock_idempotency", "dlock_http"]
            .iter()
            .any(|begin| key.name().starts_with(begin));
        assert!(!of_a_layer, "the recorder's own");
        Counter::noop()
    }

    fn register_gauge(&self, _: &metrics::Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &metrics::Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_is_renewed_and_settled_where_the_recorder_of_metrics_panics() {
    let _counting = metrics::set_default_local_recorder(&PanickingRecorder);
    let store = Faulty::new();
    let (layer, run) = (store.layer(), Counting::default());
    let lock = LockLayer::new(LockClient::memory(), key::fixed("a"));
    let service = around(&layer, lock.layer(run.taking(SECOND * 60)));
    let first = tokio::spawn({
        let service = service.clone();
        async move { send(&service, post("k")).await.text().to_owned() }
    });
    sleep(SECOND).await;
    store.faults.extend_down.store(true, Ordering::SeqCst);
    sleep(SECOND * 14).await;
    store.faults.extend_down.store(false, Ordering::SeqCst);
    sleep(SECOND * 40).await;
    assert_eq!(
        send(&service, post("k")).await.problem(),
        problem(409, "in-progress")
    );
    store.faults.set_down(true);
    assert_eq!(first.await.unwrap(), "run 1");
    store.faults.set_down(false);
    layer.handle().shutdown(SECOND * 20).await;
    assert!(send(&service, post("k")).await.is_replay());
    let stats = layer.stats();
    assert!(
        stats.renewal_failures > 0 && stats.settle_failures > 0,
        "{stats:?}"
    );
}

/// A panic in the release of a request that unwinds would end the process.
#[tokio::test(start_paused = true)]
async fn a_store_that_panics_at_the_claim_is_unavailable_and_the_claim_is_taken_back() {
    let store = Faulty::new();
    let (layer, run) = (store.layer(), Counting::default());
    let service = around(&layer, run.service());
    store.faults.panics.store(usize::MAX, Ordering::SeqCst);
    assert_eq!(
        send(&service, post("k")).await.problem(),
        problem(503, "unavailable")
    );
    store.faults.panics.store(0, Ordering::SeqCst);
    assert_eq!(layer.handle().shutdown(SECOND * 5).await, 0);
    assert_eq!(send(&service, post("k")).await.text(), "run 1");
}

#[tokio::test(start_paused = true)]
async fn down_at_the_completion_the_caller_gets_the_response_and_it_is_stored_later() {
    let store = Faulty::new();
    let run = Counting::default();
    let layer = store.layer();
    let service = around(&layer, run.taking(SECOND));
    let faults = store.faults.clone();
    let outage = async {
        sleep(SECOND / 2).await;
        faults.set_down(true);
    };
    let (first, ()) = tokio::join!(send(&service, post("k")), outage);
    assert_eq!(first.both(), (200, "run 1"));
    // Longer than the lease, which cannot be renewed now.
    sleep(SECOND * 60).await;
    assert_eq!(layer.handle().tasks(), 1);
    assert!(layer.stats().settle_failures > 5);
    store.faults.set_down(false);
    assert_eq!(layer.handle().shutdown(SECOND * 20).await, 0);
    let again = send(&service, post("k")).await;
    assert!(again.is_replay() && again.text() == "run 1");
    assert_eq!(
        (run.count(), layer.handle().claims(), layer.stats().lost),
        (1, 0, 0)
    );
}

#[tokio::test(start_paused = true)]
async fn while_the_completion_is_repeated_the_claim_is_kept() {
    let store = Faulty::new();
    let run = Counting::default();
    let layer = store.layer();
    let service = around(&layer, run.service());
    // Only completions do not get through.
    store.faults.complete_held.store(true, Ordering::SeqCst);
    let begun = Instant::now();
    assert_eq!(send(&service, post("k")).await.text(), "run 1");
    assert_eq!(begun.elapsed(), SECOND * 3, "the caller does not wait for ever");
    for _ in 0..10 {
        sleep(SECOND * 6).await;
        assert_eq!(
            send(&service, post("k")).await.problem(),
            problem(409, "in-progress")
        );
    }
    store.faults.complete_held.store(false, Ordering::SeqCst);
    assert_eq!(layer.handle().shutdown(SECOND * 20).await, 0);
    assert!(send(&service, post("k")).await.is_replay());
}

#[tokio::test(start_paused = true)]
async fn a_completion_whose_answer_was_lost_is_stored_once() {
    let store = Faulty::new();
    let run = Counting::default();
    let layer = store.layer();
    let service = around(&layer, run.service());
    store.faults.complete_answers_lost.store(1, Ordering::SeqCst);
    assert_eq!(send(&service, post("k")).await.text(), "run 1");
    assert!(send(&service, post("k")).await.is_replay());
    layer.handle().shutdown(SECOND).await;
    assert!(send(&service, post("k")).await.is_replay());
    assert_eq!((run.count(), layer.stats().lost), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_release_that_did_not_reach_the_store_is_repeated() {
    let store = Faulty::new();
    let layer = store.layer();
    let run = Counting::default();
    let faults = store.faults.clone();
    let service = around(
        &layer,
        run.answering(move |n| {
            faults.set_down(n == 1);
            async move {
                let mut response = Response::new(Full::from(format!("run {n}")));
                *response.status_mut() = http::StatusCode::TOO_MANY_REQUESTS;
                response
                    .extensions_mut()
                    .insert(dlock_tower::idempotency::Outcome::Retry);
                response
            }
        }),
    );
    assert_eq!(send(&service, post("k")).await.text(), "run 1");
    store.faults.set_down(false);
    layer.handle().shutdown(SECOND * 20).await;
    assert_eq!(send(&service, post("k")).await.text(), "run 2");
}

/// A release whose answer was lost is repeated, and finds the claim of the next request: nothing was lost, and nothing ran
/// twice at a time. An owner that outlived its lease before it released did lose its claim.
#[tokio::test(start_paused = true)]
async fn repeated_release_that_finds_the_next_claim_is_no_loss() {
    for outlived in [false, true] {
        let store = Faulty::new();
        let layer = store.layer().lease(SECOND * 3);
        let run = Counting::default();
        let faults = store.faults.clone();
        let service = around(
            &layer,
            run.answering(move |n| {
                if n == 1 {
                    faults.release_answers_lost.store(1, Ordering::SeqCst);
                }
                faults.extend_down.store(n == 1 && outlived, Ordering::SeqCst);
                async move {
                    if n == 1 && outlived {
                        sleep(SECOND * 4).await;
                    } else if n == 2 {
                        sleep(SECOND * 30).await;
                    }
                    let mut response = Response::new(Full::from(format!("run {n}")));
                    response.extensions_mut().insert(Outcome::Retry);
                    response
                }
            }),
        );
        let second = async {
            // The first has just released, or is about to.
            sleep(SECOND / 100 + if outlived { SECOND * 3 } else { Duration::ZERO }).await;
            send(&service, post("k")).await
        };
        let (first, second) = tokio::join!(send(&service, post("k")), second);
        assert_eq!((first.text(), second.text()), ("run 1", "run 2"));
        layer.handle().shutdown(SECOND * 60).await;
        assert_eq!(layer.stats().lost, u64::from(outlived));
    }
}

#[tokio::test(start_paused = true)]
async fn many_results_are_not_sent_again_all_at_once() {
    let store = Faulty::new();
    let layer = store.layer();
    let service = around(&layer, Counting::default().taking(SECOND));
    let faults = store.faults.clone();
    let requests = (0..200).map(|n| {
        let service = service.clone();
        async move { send(&service, post(&n.to_string())).await }
    });
    let outage = async {
        sleep(SECOND / 2).await;
        faults.set_down(true);
    };
    let (answers, ()) = tokio::join!(futures_util::future::join_all(requests), outage);
    assert!(answers.iter().all(|answer| answer.status() == 200));
    store.faults.most_completing.store(0, Ordering::SeqCst);
    sleep(SECOND * 30).await;
    store.faults.set_down(false);
    assert_eq!(layer.handle().shutdown(SECOND * 60).await, 0);
    let most = store.faults.most_completing.load(Ordering::SeqCst);
    assert!((1..=16).contains(&most), "{most}");
    assert!(send(&service, post("7")).await.is_replay());
}

#[tokio::test(start_paused = true)]
async fn a_claim_is_renewed_at_a_third_of_its_lease_and_no_longer_than_it_is_needed() {
    let store = Faulty::new();
    let layer = store.layer().lease(SECOND * 9);
    let service = around(&layer, Counting::default().taking(SECOND * 100));
    send(&service, post("k")).await;
    assert_eq!(store.faults.seen(), (1, 33, 1, 0));
    sleep(SECOND * 100).await;
    assert_eq!((store.faults.seen(), layer.handle().claims()), ((1, 33, 1, 0), 0));
    // Quick ones are not renewed at all, however many there are.
    let service = around(&layer, Counting::default().taking(SECOND * 2));
    for n in 0..50 {
        send(&service, post(&n.to_string())).await;
    }
    sleep(SECOND * 100).await;
    assert_eq!(store.faults.seen(), (51, 33, 51, 0));
}

#[tokio::test(start_paused = true)]
async fn each_of_many_claims_is_renewed() {
    let store = Faulty::new();
    let layer = store.layer().lease(SECOND * 9);
    let service = around(&layer, Counting::default().taking(SECOND * 20));
    let requests = (0..100).map(|n: u64| {
        let service = service.clone();
        async move {
            sleep(Duration::from_millis(n * 37)).await;
            send(&service, post(&n.to_string())).await
        }
    });
    futures_util::future::join_all(requests).await;
    assert_eq!(store.faults.seen(), (100, 600, 100, 0));
    assert_eq!(layer.stats().lost, 0);
}

#[tokio::test(start_paused = true)]
async fn renewals_that_fail_are_repeated_with_urgency_and_the_claim_survives_a_short_outage() {
    let store = Faulty::new();
    let layer = store.layer().lease(SECOND * 9);
    let run = Counting::default();
    let service = around(&layer, run.taking(SECOND * 30));
    let faults = store.faults.clone();
    let outage = async {
        faults.extend_down.store(true, Ordering::SeqCst);
        sleep(SECOND * 8).await;
        assert!(faults.seen().1 > 4, "{}", faults.seen().1);
        faults.extend_down.store(false, Ordering::SeqCst);
        sleep(SECOND * 10).await;
        assert_eq!(
            send(&service, post("k")).await.problem(),
            problem(409, "in-progress")
        );
    };
    tokio::join!(send(&service, post("k")), outage);
    assert!(send(&service, post("k")).await.is_replay());
    assert_eq!((run.count(), layer.stats().lost), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn an_owner_that_lost_its_claim_stores_nothing_and_its_caller_gets_the_true_response() {
    for releases in [false, true] {
        let store = Faulty::new();
        let layer = store.layer().lease(SECOND);
        let run = Counting::default();
        // The first is cut off from the store, and outlives its lease.
        let service = around(
            &layer,
            run.answering(move |n| async move {
                sleep(SECOND * if n == 1 { 10 } else { 1 }).await;
                let mut response = Response::new(Full::from(format!("run {n}")));
                if n == 1 && releases {
                    *response.status_mut() = http::StatusCode::TOO_MANY_REQUESTS;
                    response
                        .extensions_mut()
                        .insert(dlock_tower::idempotency::Outcome::Retry);
                }
                response
            }),
        );
        store.faults.extend_down.store(true, Ordering::SeqCst);
        let second = async {
            sleep(SECOND * 5).await;
            send(&service, post("k")).await
        };
        let (first, second) = tokio::join!(send(&service, post("k")), second);
        assert_eq!(first.text(), "run 1");
        assert_eq!(second.text(), "run 2");
        let third = send(&service, post("k")).await;
        assert!(third.is_replay());
        assert_eq!(third.text(), "run 2", "the first owner did not overwrite it");
        let stats = layer.stats();
        assert_eq!((stats.lost, stats.taken_over, layer.handle().claims()), (1, 1, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_renewal_tells_the_handler_that_its_claim_is_lost() {
    let store = Faulty::new();
    let layer = store.layer().lease(SECOND);
    let inner = store.inner().clone();
    let handler = tower::service_fn(move |request: Req| {
        let idempotency = request.extensions().get::<Idempotency>().unwrap().clone();
        let inner = inner.clone();
        async move {
            let (record, token) = (idempotency.record_key(), idempotency.claim_token());
            inner.release(record, token).await.unwrap();
            sleep(SECOND).await;
            Ok::<_, Infallible>(Response::new(Full::from(format!(
                "lost: {}",
                idempotency.is_lost()
            ))))
        }
    });
    let answer = send(&around(&layer, handler), post("k")).await;
    assert_eq!(answer.text(), "lost: true");
    assert_eq!((layer.stats().lost, store.faults.seen().2), (1, 0));
}

/// A claim that another copy of the request may have taken over begins no handler.
mod claim_that_ran_out {
    use std::task::{Context, Poll};

    use dlock::LockClient;
    use dlock_tower::{LockLayer, key};
    use tower::{Layer, Service};

    use super::*;

    const LEASE: Duration = Duration::from_secs(3);

    /// Sends the same request to another process.
    async fn elsewhere(store: &Faulty, run: &Counting) -> Answer {
        let other = Faulty::of(store.inner()).layer().lease(LEASE);
        send(&around(&other, run.service()), post("k")).await
    }

    #[tokio::test(start_paused = true)]
    async fn by_a_late_reply_begins_no_handler() {
        for taken_over in [true, false] {
            let (store, run) = (Faulty::new(), Counting::default());
            let layer = store.layer().lease(LEASE);
            let service = around(&layer, run.service());
            store.faults.claim_answers_held.store(true, Ordering::SeqCst);
            let other = async {
                sleep(LEASE + SECOND).await;
                if taken_over {
                    assert_eq!(elsewhere(&store, &run).await.text(), "run 1");
                }
                store.faults.claim_answers_held.store(false, Ordering::SeqCst);
            };
            let (late, ()) = tokio::join!(send(&service, post("k")), other);
            if taken_over {
                assert_eq!(late.problem(), problem(409, "in-progress"));
                assert_eq!(late.header("retry-after"), Some("1"));
                assert_eq!((layer.stats().lost, layer.stats().not_started), (1, 1));
            } else {
                assert_eq!(late.both(), (200, "run 1"));
            }
            let again = send(&service, post("k")).await;
            assert_eq!((again.both(), run.count()), ((200, "run 1"), 1));
            assert!(again.is_replay());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn and_cannot_be_confirmed_begins_no_handler() {
        let (store, run) = (Faulty::new(), Counting::default());
        let layer = store.layer().lease(LEASE);
        let service = around(&layer, run.service());
        store.faults.claim_answers_held.store(true, Ordering::SeqCst);
        store.faults.extend_down.store(true, Ordering::SeqCst);
        let later = async {
            sleep(LEASE + SECOND).await;
            store.faults.claim_answers_held.store(false, Ordering::SeqCst);
        };
        let (late, ()) = tokio::join!(send(&service, post("k")), later);
        assert_eq!(
            (late.problem(), late.header("retry-after"), late.not_started()),
            (problem(503, "unavailable"), Some("1"), true)
        );
        assert_eq!(send(&service, post("k")).await.both(), (200, "run 1"));
    }

    /// A service that is ready after some time.
    struct ReadyAfter<S>(Duration, S, Option<std::pin::Pin<Box<tokio::time::Sleep>>>);

    impl<S: Clone> Clone for ReadyAfter<S> {
        fn clone(&self) -> Self {
            ReadyAfter(self.0, self.1.clone(), None)
        }
    }

    impl<S: Service<Req, Response = Res, Error = Infallible>> Service<Req> for ReadyAfter<S> {
        type Response = Res;
        type Error = Infallible;
        type Future = S::Future;

        fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            let time = self.0;
            let ready = self.2.get_or_insert_with(|| Box::pin(sleep(time)));
            std::task::ready!(ready.as_mut().poll(cx));
            self.1.poll_ready(cx)
        }

        fn call(&mut self, request: Req) -> S::Future {
            self.1.call(request)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn while_the_service_was_busy_begins_no_handler() {
        for locked in [false, true] {
            let (store, run) = (Faulty::new(), Counting::default());
            let layer = store.layer().lease(LEASE);
            let slow = ReadyAfter(LEASE * 3, run.service(), None);
            let lock = LockLayer::new(LockClient::memory(), key::fixed("account"));
            store.faults.extend_down.store(true, Ordering::SeqCst);
            let other = async {
                sleep(LEASE * 2).await;
                assert_eq!(elsewhere(&store, &run).await.text(), "run 1");
                store.faults.extend_down.store(false, Ordering::SeqCst);
            };
            let late = async {
                match locked {
                    true => answer(layer.layer(lock.layer(slow)).oneshot(post("k")).await.unwrap()).await,
                    false => send(&layer.layer(slow), post("k")).await,
                }
            };
            let (late, ()) = tokio::join!(late, other);
            let in_progress = problem(409, "in-progress");
            assert_eq!((late.problem(), run.count()), (in_progress, 1), "{locked}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn of_the_outer_one_of_two_layers_begins_no_handler() {
        for locked in [false, true] {
            let (store, run) = (Faulty::new(), Counting::default());
            let outer = store.layer().lease(LEASE);
            let inner = store.layer().namespace("inner").lease(LEASE * 20);
            let lock = LockLayer::new(LockClient::memory(), key::fixed("account"));
            let slow = ReadyAfter(LEASE * 3, run.service(), None);
            store.faults.extend_down.store(true, Ordering::SeqCst);
            let other = async {
                sleep(LEASE * 2).await;
                assert_eq!(elsewhere(&store, &run).await.text(), "run 1");
                store.faults.extend_down.store(false, Ordering::SeqCst);
            };
            let late = async {
                match locked {
                    true => {
                        let service = outer.layer(inner.layer(lock.layer(slow)));
                        answer(service.oneshot(post("k")).await.unwrap()).await
                    }
                    false => send(&outer.layer(inner.layer(slow)), post("k")).await,
                }
            };
            let (late, ()) = tokio::join!(late, other);
            let in_progress = problem(409, "in-progress");
            assert_eq!((late.problem(), run.count()), (in_progress, 1), "{locked}");
        }
    }

    /// The process stood still, or was cut off, while the request waited for its lock.
    #[tokio::test(start_paused = true)]
    async fn while_the_request_waited_for_its_lock_begins_no_handler() {
        for taken_over in [true, false] {
            let (store, run) = (Faulty::new(), Counting::default());
            let layer = store.layer().lease(LEASE);
            let locks = LockClient::memory();
            let guard = locks.lock("account").acquire().await.unwrap();
            let lock = LockLayer::new(locks.clone(), key::fixed("account")).wait(SECOND * 60);
            let service = layer.layer(lock.layer(run.service()));
            let ask = async || answer(service.clone().oneshot(post("k")).await.unwrap()).await;
            store.faults.extend_down.store(true, Ordering::SeqCst);
            let other = async {
                sleep(LEASE * 2).await;
                if taken_over {
                    assert_eq!(elsewhere(&store, &run).await.text(), "run 1");
                }
                let extends = taken_over;
                store.faults.extend_down.store(!extends, Ordering::SeqCst);
                guard.release().await.unwrap();
            };
            let (late, ()) = tokio::join!(ask(), other);
            let refused = match taken_over {
                true => problem(409, "in-progress"),
                false => problem(503, "unavailable"),
            };
            assert_eq!(late.problem(), refused);
            assert_eq!(late.header("retry-after"), Some("1"));
            assert_eq!(locks.held(), 0);
            store.faults.extend_down.store(false, Ordering::SeqCst);
            layer.handle().shutdown(SECOND * 20).await;
            assert_eq!((ask().await.both(), run.count()), ((200, "run 1"), 1));
        }
    }
}

/// A handler asks before an effect whether its claim may have gone to another attempt.
#[tokio::test(start_paused = true)]
async fn handler_sees_that_its_claim_may_have_run_out() {
    let store = Faulty::new();
    let layer = store.layer().lease(SECOND);
    let faults = store.faults.clone();
    let handler = tower::service_fn(move |request: Req| {
        let idempotency = request.extensions().get::<Idempotency>().unwrap().clone();
        let faults = faults.clone();
        async move {
            sleep(SECOND * 3).await;
            let renewed = idempotency.is_held();
            faults.extend_down.store(true, Ordering::SeqCst);
            sleep(SECOND).await;
            let seen = (renewed, idempotency.is_held(), idempotency.is_lost());
            Ok::<_, Infallible>(Response::new(Full::from(format!("{seen:?}"))))
        }
    });
    let answer = send(&around(&layer, handler), post("k")).await;
    assert_eq!(answer.text(), "(true, false, false)");
}
