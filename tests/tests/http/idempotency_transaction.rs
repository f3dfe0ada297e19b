//! The idempotency layer around handlers that store their result in a transaction of their own. What a
//! transaction is stands for itself here; on Postgres see the suites of that store.

use std::convert::Infallible;
use std::sync::atomic::Ordering;

use crate::idempotency_support::*;
use bytes::Bytes;
use dlock_tower::idempotency::Outcome;
use dlock_tower::{Idempotency, IdempotencyLayer};
use futures_util::stream::{self, StreamExt};
use http::{Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use tokio::time::sleep;
use tower::Service;

/// How a handler ends after its transaction.
#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    Answers(u16),
    Panics,
    StoreAway,
    StoreAwayAndFails,
    /// The same, and the handler has said that its end is final.
    StoreAwayKept,
    StoreAwayFinal,
}

impl End {
    fn leaves_the_store_away(self) -> bool {
        !matches!(self, End::Answers(_) | End::Panics)
    }
}

/// A handler that commits or rolls back, and then ends somehow.
fn handler(
    store: &Faulty,
    run: &Counting,
    commits: bool,
    end: End,
) -> impl Service<Req, Response = Res, Error = Infallible, Future: Send> + Clone + Send + 'static {
    let (store, run) = (store.clone(), run.clone());
    tower::service_fn(move |request: Req| {
        let (store, n) = (store.clone(), run.next());
        let claim = request.extensions().get::<Idempotency>().unwrap().clone();
        async move {
            let mut response = Response::new(Bytes::from(format!("committed {n}")));
            response.headers_mut().insert("x-first", "1".parse().unwrap());
            let bytes = claim.in_transaction(response);
            if end == End::StoreAwayKept {
                claim.keep();
            }
            if commits {
                let (record, token) = (claim.record_key(), claim.claim_token());
                let kept = claim.retention();
                store.inner().complete(record, token, bytes, kept).await.unwrap();
            }
            match end {
                End::Panics => panic!("as told"),
                End::Answers(_) => {}
                _ => store.faults.set_down(true),
            }
            let mut response = Response::new(Full::from(format!("answered {n}")));
            if let End::Answers(status) = end {
                *response.status_mut() = StatusCode::from_u16(status).unwrap();
            }
            if end == End::StoreAwayAndFails {
                *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            }
            if end == End::StoreAwayFinal {
                response.extensions_mut().insert(Outcome::Final);
            }
            Ok(response)
        }
    })
}

async fn two(
    store: &Faulty,
    layer: &IdempotencyLayer<impl dlock_tower::idempotency::caller::FindCaller>,
    commits: bool,
    end: End,
) -> (Option<Answer>, Answer, usize) {
    let run = Counting::default();
    let service = around(layer, handler(store, &run, commits, end));
    let first = tokio::spawn({
        let service = service.clone();
        async move { send(&service, post("k")).await }
    });
    let first = first.await.ok();
    if end.leaves_the_store_away() {
        sleep(SECOND * 20).await;
        assert_eq!(layer.handle().tasks(), 1);
        store.faults.set_down(false);
    }
    assert_eq!(layer.handle().shutdown(SECOND * 20).await, 0);
    assert_eq!(layer.handle().claims(), 0);
    let retry = around(layer, run.service());
    let second = send(&retry, post("k")).await;
    (first, second, run.count())
}

/// The first caller and a retry get what a server can send of such a response.
#[tokio::test]
async fn committed_response_has_no_more_bytes_than_its_head_allows() {
    for (status, announced, body) in [(200, "3", "com"), (200, "9", "committed"), (204, "9", "")] {
        let (store, run) = (Faulty::new(), Counting::default());
        let handler = {
            let store = store.clone();
            tower::service_fn(move |request: Req| {
                let (store, claim) = (
                    store.clone(),
                    request.extensions().get::<Idempotency>().unwrap().clone(),
                );
                async move {
                    let response = Response::builder()
                        .status(status)
                        .header("content-length", announced);
                    let bytes = claim.in_transaction(response.body(Bytes::from("committed")).unwrap());
                    let (record, token) = (claim.record_key(), claim.claim_token());
                    let kept = claim.retention();
                    store.inner().complete(record, token, bytes, kept).await.unwrap();
                    Ok::<_, Infallible>(Response::new(Full::from("answered")))
                }
            })
        };
        let layer = store.layer();
        let first = send(&around(&layer, handler), post("k")).await;
        assert_eq!(first.both(), (status, body));
        assert_eq!(first.header("content-length"), Some(announced));
        let again = send(&around(&layer, run.service()), post("k")).await;
        assert_eq!((again.both(), again.is_replay()), ((status, body), true));
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_committed_is_sent_however_the_handler_ends() {
    for end in [
        End::Answers(200),
        End::Answers(500),
        End::Answers(429),
        End::Panics,
        End::StoreAway,
    ] {
        let store = Faulty::new();
        let (first, second, runs) = two(&store, &store.layer().retry_ambiguous(), true, end).await;
        assert_eq!(
            (second.text(), second.is_replay(), runs),
            ("committed 1", true, 1),
            "{end:?}"
        );
        match (end, first) {
            (End::Panics, first) => assert!(first.is_none()),
            (End::StoreAway, first) => assert_eq!(first.unwrap().text(), "answered 1"),
            (_, first) => {
                let first = first.unwrap();
                assert_eq!(
                    (first.both(), first.is_replay()),
                    ((200, "committed 1"), false),
                    "{end:?}"
                );
                assert_eq!(first.header("x-first"), Some("1"));
                assert_eq!(
                    (store.faults.seen(), store.faults.reads.load(Ordering::SeqCst)),
                    ((2, 0, 0, 0), 1)
                );
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_rolled_back_was_not_done_and_the_handlers_answer_counts() {
    let cases = [
        (End::Answers(409), (409, "answered 1", 1)),
        (End::Answers(429), (200, "run 2", 2)),
        (End::Answers(500), (200, "run 2", 2)),
        (End::Panics, (200, "run 2", 2)),
    ];
    for (end, wanted) in cases {
        let store = Faulty::new();
        let (_, second, runs) = two(&store, &store.layer().retry_ambiguous(), false, end).await;
        assert_eq!((second.status(), second.text(), runs), wanted, "{end:?}");
    }
}

/// A transaction that was rolled back has had no effect: a conflict with another transaction does not spend
/// the key, by any policy. A refusal that the handler meant stays one.
#[tokio::test(start_paused = true)]
async fn rolled_back_transaction_releases_the_key_unless_the_handler_refused() {
    let cases = [
        (End::Answers(409), (409, "answered 1", 1)),
        (End::Answers(500), (200, "run 2", 2)),
        (End::Answers(503), (200, "run 2", 2)),
        (End::Panics, (200, "run 2", 2)),
        (End::StoreAwayAndFails, (200, "run 2", 2)),
        // Its answer is gone when the record tells.
        (End::StoreAway, (200, "run 2", 2)),
    ];
    for (end, wanted) in cases {
        let store = Faulty::new();
        let (_, second, runs) = two(&store, &store.layer(), false, end).await;
        assert_eq!((second.status(), second.text(), runs), wanted, "{end:?}");
    }
    // A handler that has had an effect outside of the transaction says so.
    for end in [End::StoreAwayKept, End::StoreAwayFinal] {
        let store = Faulty::new();
        let (_, second, runs) = two(&store, &store.layer(), false, end).await;
        let unavailable = problem(409, "result-unavailable");
        assert_eq!((second.problem(), runs), (unavailable, 1), "{end:?}");
    }
}

/// A handler whose effects are all in a transaction says so before it begins: a conflict in its first statement
/// has spent nothing.
#[tokio::test(start_paused = true)]
async fn transactional_handler_that_fails_before_its_record_releases_the_key() {
    for (status, runs) in [(500, 2), (0, 2), (409, 1), (200, 1)] {
        let (store, run) = (Faulty::new(), Counting::default());
        let (layer, counting) = (store.layer(), run.clone());
        let handler = tower::service_fn(move |request: Req| {
            let n = counting.next();
            let claim = request.extensions().get::<Idempotency>().unwrap().clone();
            async move {
                claim.transactional();
                assert_ne!(status, 0, "a panic in run {n}");
                let mut response = Response::new(Full::<Bytes>::from(format!("run {n}")));
                *response.status_mut() = StatusCode::from_u16(status).unwrap();
                Ok::<_, Infallible>(response)
            }
        });
        let service = around(&layer, handler);
        for _ in 0..2 {
            let service = service.clone();
            let _ = tokio::spawn(async move { send(&service, post("k")).await }).await;
            assert_eq!(layer.handle().shutdown(SECOND * 20).await, 0);
        }
        assert_eq!(run.count(), runs, "{status}");
    }
}

/// The claim is renewed again, as that of a handler without a transaction.
#[tokio::test(start_paused = true)]
async fn body_after_a_transaction_that_was_rolled_back_may_outlast_the_lease() {
    let store = Faulty::new();
    for layer in [store.layer(), layer()] {
        let run = Counting::default();
        let counting = run.clone();
        let handler = tower::service_fn(move |request: Req| {
            let claim = request.extensions().get::<Idempotency>().unwrap().clone();
            let _ = claim.in_transaction(Response::default());
            counting.next();
            let pieces = stream::iter(0..10).then(|n| async move {
                sleep(SECOND * 5).await;
                Ok::<_, Infallible>(Frame::data(Bytes::from(n.to_string())))
            });
            async { Ok::<_, Infallible>(Response::new(StreamBody::new(pieces).boxed_unsync())) }
        });
        let service = around(&layer, handler);
        let first = tokio::spawn({
            let service = service.clone();
            async move { send(&service, post("k")).await }
        });
        for _ in 0..4 {
            sleep(SECOND * 11).await;
            assert_eq!(
                send(&service, post("k")).await.problem(),
                problem(409, "in-progress")
            );
        }
        assert_eq!(first.await.unwrap().text(), "0123456789");
        let again = send(&service, post("k")).await;
        assert_eq!(
            (again.text(), again.is_replay(), run.count()),
            ("0123456789", true, 1)
        );
    }
}

#[tokio::test]
async fn a_store_that_cannot_tell_leaves_the_word_to_the_handler() {
    // Memory completes by its own step only.
    let layer = layer();
    let handler = tower::service_fn(|request: Req| {
        let claim = request.extensions().get::<Idempotency>().unwrap().clone();
        let _ = claim.in_transaction(Response::default());
        async { Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("answered"))) }
    });
    let service = around(&layer, handler);
    assert_eq!(send(&service, post("k")).await.text(), "answered");
    let again = send(&service, post("k")).await;
    assert!(again.is_replay() && again.text() == "answered");
}

/// A handler that was not told of its COMMIT, and tries again with another response, has the one sent that is stored.
#[tokio::test(start_paused = true)]
async fn committed_response_is_sent_when_a_second_transaction_put_another_one() {
    for (first_body, second_body, sent) in [
        ("A", "B", (201, "A")),
        ("much too long", "B", (409, "result-unavailable")),
        ("much too long", "also too long", (409, "result-unavailable")),
    ] {
        let store = Faulty::new();
        let records = store.clone();
        let handler = tower::service_fn(move |request: Req| {
            let store = records.clone();
            let claim = request.extensions().get::<Idempotency>().unwrap().clone();
            async move {
                let mut response = Response::new(Bytes::from(first_body));
                *response.status_mut() = StatusCode::CREATED;
                let bytes = claim.in_transaction(response);
                let (record, token) = (claim.record_key(), claim.claim_token());
                let kept = claim.retention();
                store.inner().complete(record, token, bytes, kept).await.unwrap();
                // The reply to the COMMIT is lost; the second transaction changes no row.
                let _ = claim.in_transaction(Response::new(Bytes::from(second_body)));
                let mut response = Response::new(Full::from("failed"));
                *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
                Ok::<_, Infallible>(response)
            }
        });
        let layer = store.layer().response_limit(4);
        let service = around(&layer, handler);
        for is_replay in [false, true] {
            let answer = send(&service, post("k")).await;
            if sent.0 == 409 {
                assert_eq!(answer.problem(), problem(sent.0, sent.1));
            } else {
                assert_eq!((answer.both(), answer.is_replay()), (sent, is_replay));
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn response_that_is_too_large_for_its_transaction_counts_as_one_that_is_not_kept() {
    for end in [End::Answers(200), End::Panics, End::StoreAway] {
        let store = Faulty::new();
        let layer = store.layer().response_limit(3);
        let (_, second, runs) = two(&store, &layer, true, end).await;
        assert_eq!(second.problem(), problem(409, "result-unavailable"), "{end:?}");
        assert_eq!((layer.stats().tombstones, runs), (1, 1), "{end:?}");
    }
}
