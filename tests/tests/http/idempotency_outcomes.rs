//! The idempotency layer: what is kept and what is released, and what a retry gets.

use std::convert::Infallible;

use crate::idempotency_support::*;
use dlock_tower::idempotency::{Class, Ending, Outcome, Policy, Verdict};
use dlock_tower::{Idempotency, NotStarted};
use http::{HeaderValue, Response, StatusCode};
use http_body_util::Full;
use tokio::time::sleep;

/// Answers with this status and the number of the run.
fn with_status(status: u16, n: usize) -> Res {
    let mut response = Response::new(Full::from(format!("run {n}")));
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response
}

/// How often two equal requests run whose handler answers so.
async fn runs_of_two(
    layer: impl Fn() -> dlock_tower::IdempotencyLayer<dlock_tower::idempotency::caller::Public>,
    answer: impl Fn(usize) -> Res + Clone + Send + Sync + 'static,
) -> usize {
    let run = Counting::default();
    let service = around(
        &layer(),
        run.answering(move |n| {
            let answer = answer.clone();
            async move { answer(n) }
        }),
    );
    let first = send(&service, post("k")).await;
    let second = send(&service, post("k")).await;
    assert_eq!(first.status(), second.status());
    assert_eq!(second.is_replay(), run.count() == 1);
    assert_eq!(first.text(), "run 1");
    assert_eq!(second.text(), format!("run {}", run.count()));
    run.count()
}

/// A status alone never releases the key: an inner timeout answers 408 after work began, and a handler may
/// refuse after its effect.
#[tokio::test]
async fn no_status_releases_the_key() {
    for status in [
        200, 201, 202, 301, 303, 400, 401, 403, 404, 405, 408, 409, 410, 412, 413, 415, 422, 423, 425, 429,
        451, 500, 501, 502, 503, 504, 507,
    ] {
        assert_eq!(
            runs_of_two(layer, move |n| with_status(status, n)).await,
            1,
            "{status}"
        );
    }
}

#[tokio::test]
async fn what_is_ambiguous_is_released_by_policy() {
    for (status, runs) in [(200, 1), (404, 1), (500, 2), (503, 2), (429, 2)] {
        let counted = runs_of_two(|| layer().retry_ambiguous(), move |n| with_status(status, n)).await;
        assert_eq!(counted, runs, "{status}");
    }
}

/// What was not begun releases the key, if that is said of this very request.
#[tokio::test]
async fn not_started_releases_the_key_of_its_own_request_only() {
    for status in [200, 409, 423, 503] {
        for own in [true, false] {
            let run = Counting::default();
            let counting = run.clone();
            let handler = tower::service_fn(move |request: Req| {
                let mut response = with_status(status, counting.next());
                let other = request_of_another_layer();
                let of = if own { &request } else { &other };
                response.extensions_mut().insert(NotStarted::of(of.extensions()));
                async { Ok::<_, Infallible>(response) }
            });
            let layer = layer();
            let service = around(&layer, handler);
            let first = send(&service, post("k")).await;
            let second = send(&service, post("k")).await;
            assert_eq!(run.count(), if own { 2 } else { 1 }, "{status}");
            assert_eq!(layer.stats().not_started, if own { 2 } else { 0 }, "{status}");
            assert_eq!((first.not_started(), second.is_replay()), (own, !own), "{status}");
        }
    }
}

/// A request as another layer has handed it in.
fn request_of_another_layer() -> Req {
    let (sender, receiver) = std::sync::mpsc::channel();
    let service = around(
        &layer(),
        tower::service_fn(move |request: Req| {
            sender.send(request).unwrap();
            async { Ok::<_, Infallible>(Res::default()) }
        }),
    );
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    std::thread::spawn(move || runtime().block_on(send(&service, post("k"))));
    receiver.recv().unwrap()
}

/// The statuses that a service never answers after an effect, by its own word.
#[tokio::test]
async fn release_on_releases_the_key_for_the_named_statuses_only() {
    for (status, runs) in [(401, 2), (429, 2), (403, 1), (200, 1), (503, 1)] {
        let named = [StatusCode::UNAUTHORIZED, StatusCode::TOO_MANY_REQUESTS];
        let counted = runs_of_two(|| layer().release_on(named), move |n| with_status(status, n)).await;
        assert_eq!(counted, runs, "{status}");
    }
}

/// A retry after an ambiguous end is the next attempt, and another request under the same key stays another one.
#[tokio::test]
async fn retry_after_an_ambiguous_end_counts_on_and_knows_the_request() {
    let run = Counting::default();
    let counting = run.clone();
    let handler = tower::service_fn(move |request: Req| {
        let n = counting.next();
        let attempt = request.extensions().get::<Idempotency>().unwrap().attempt();
        async move {
            assert_ne!(n, 2, "a panic in the second attempt");
            let mut response = with_status(if n < 4 { 502 } else { 200 }, n);
            *response.body_mut() = Full::from(format!("attempt {attempt}"));
            Ok::<_, Infallible>(response)
        }
    });
    let layer = layer().retry_ambiguous();
    let service = around(&layer, handler);
    let pay = |amount| request("POST", "/pay", "k", amount);
    for (n, wanted) in ["attempt 1", "a panic", "attempt 3", "attempt 4"]
        .into_iter()
        .enumerate()
    {
        if n > 0 {
            let other = send(&service, pay("9000")).await;
            assert_eq!(other.problem(), problem(422, "mismatch"), "before {wanted}");
        }
        let service = service.clone();
        match tokio::spawn(async move { send(&service, pay("5")).await }).await {
            Ok(answer) => assert_eq!((answer.text(), answer.is_replay()), (wanted, false)),
            Err(_) => assert_eq!(wanted, "a panic"),
        }
        layer.handle().shutdown(SECOND * 10).await;
    }
    assert_eq!(run.count(), 4);
    assert!(send(&service, pay("5")).await.is_replay());
}

#[tokio::test]
async fn the_handler_has_the_last_word() {
    for (status, outcome, runs) in [
        (200, Outcome::Retry, 2),
        (503, Outcome::Retry, 2),
        (403, Outcome::Final, 1),
        (429, Outcome::Final, 1),
    ] {
        let counted = runs_of_two(layer, move |n| {
            let mut response = with_status(status, n);
            response.extensions_mut().insert(outcome);
            response
        });
        assert_eq!(counted.await, runs, "{status} {outcome:?}");
    }
    for (status, keep, runs) in [(200, false, 2), (429, true, 1)] {
        let run = Counting::default();
        let counting = run.clone();
        let handler = tower::service_fn(move |request: Req| {
            let n = counting.next();
            let idempotency = request.extensions().get::<Idempotency>().unwrap();
            if keep {
                idempotency.keep()
            } else {
                idempotency.forget()
            }
            async move { Ok::<_, Infallible>(with_status(status, n)) }
        });
        let service = around(&layer(), handler);
        send(&service, post("k")).await;
        send(&service, post("k")).await;
        assert_eq!(run.count(), runs);
    }
}

#[tokio::test]
async fn the_policy_can_be_replaced() {
    struct Mine;
    impl Policy for Mine {
        fn judge(&self, ending: &Ending<'_>) -> Verdict {
            match ending {
                Ending::Response { status, headers, .. }
                    if status.as_u16() == 404 && headers.contains_key("x-soon") =>
                {
                    Verdict::Release
                }
                _ if ending.class() == Class::NothingDone => Verdict::Keep,
                _ => Verdict::Keep,
            }
        }
    }
    let soon = |n| {
        let mut response = with_status(404, n);
        response
            .headers_mut()
            .insert("x-soon", HeaderValue::from_static("1"));
        response
    };
    assert_eq!(runs_of_two(|| layer().policy(Mine), soon).await, 2);
    assert_eq!(
        runs_of_two(|| layer().policy(Mine), |n| with_status(404, n)).await,
        1
    );
    assert_eq!(
        runs_of_two(|| layer().policy(Mine), |n| with_status(429, n)).await,
        1
    );
}

#[tokio::test]
async fn retry_has_its_answer_where_the_listener_to_replays_panics() {
    let layer = || layer().on_replay(|_| panic!("a fault of its own"));
    assert_eq!(runs_of_two(layer, |n| with_status(200, n)).await, 1);
}

#[tokio::test]
async fn what_was_done_is_kept_where_the_policy_panics() {
    struct Broken;
    impl Policy for Broken {
        fn judge(&self, _: &Ending<'_>) -> Verdict {
            panic!("a fault of its own");
        }
    }
    for status in [200, 500] {
        let runs = runs_of_two(|| layer().policy(Broken), move |n| with_status(status, n)).await;
        assert_eq!(runs, 1, "{status}");
    }
}

#[tokio::test]
async fn a_replay_has_the_allowed_headers_whole_and_no_others() {
    const GIVEN: [(&str, &str); 26] = [
        ("content-type", "text/plain; charset=utf-8"),
        ("content-language", "en"),
        ("content-encoding", "identity"),
        ("location", "/payments/1"),
        ("etag", "\"1\""),
        ("link", "</a>; rel=next"),
        ("link", "</b>; rel=prev"),
        ("www-authenticate", "Bearer"),
        ("content-range", "bytes 0-4/10"),
        ("x-price", "5"),
        ("x-price", "6"),
        ("set-cookie", "session=1"),
        ("set-cookie", "other=2"),
        ("date", "Thu, 01 Jan 1970 00:00:00 GMT"),
        ("connection", "x-hop, Link-Not, location-not"),
        ("keep-alive", "timeout=5"),
        ("transfer-encoding", "identity"),
        ("content-length", "5"),
        ("access-control-allow-origin", "*"),
        ("x-request-id", "1"),
        ("traceparent", "00-1"),
        ("vary", "origin"),
        ("x-unknown", "1"),
        ("x-hop", "1"),
        ("cache-control", "max-age=60"),
        ("server-timing", "a"),
    ];
    let handler = Counting::default().answering(|n| async move {
        let mut response = with_status(201, n);
        for (name, value) in GIVEN {
            response
                .headers_mut()
                .append(name, HeaderValue::from_static(value));
        }
        response
    });
    let layer = layer()
        .keep_header("x-price".parse().unwrap())
        .keep_header("x-hop".parse().unwrap());
    let service = around(&layer, handler);
    let first = send(&service, post("k")).await;
    assert_eq!(
        first.parts.headers.len(),
        GIVEN.len(),
        "the first answer is the handler's"
    );
    let second = send(&service, post("k")).await;
    assert_eq!(second.both(), (201, "run 1"));
    let mut got: Vec<(&str, &str)> = second
        .parts
        .headers
        .iter()
        .map(|(name, value)| (name.as_str(), value.to_str().unwrap()))
        .collect();
    // How old it is, and for how long it is kept: another suite's.
    got.retain(|(name, _)| !name.starts_with("idempotent-replayed-"));
    got.sort_unstable();
    let mut wanted = GIVEN[..11].to_vec();
    wanted.extend([("cache-control", "no-store"), ("idempotent-replayed", "true")]);
    wanted.sort_unstable();
    assert_eq!(got, wanted);
}

/// A handler that answers with these headers.
fn with_headers(
    status: u16,
    headers: &'static [(&'static str, &'static str)],
) -> impl tower::Service<Req, Response = Res, Error = std::convert::Infallible, Future: Send>
+ Clone
+ Send
+ 'static {
    tower::service_fn(move |_: Req| async move {
        let mut response = with_status(status, 1);
        for (name, value) in headers {
            response
                .headers_mut()
                .append(*name, HeaderValue::from_static(value));
        }
        Ok(response)
    })
}

/// A replay of a result says as much of its body, and protects the browser as well, as the first answer. A failure that is
/// kept is not worth another try.
#[tokio::test]
async fn replay_has_digests_protections_and_when_to_ask_again_for_a_result() {
    const GIVEN: [(&str, &str); 6] = [
        ("content-digest", "sha-256=:AA==:"),
        ("repr-digest", "sha-256=:AA==:"),
        ("accept-patch", "text/plain"),
        ("content-security-policy", "default-src 'none'"),
        ("x-content-type-options", "nosniff"),
        ("retry-after", "5"),
    ];
    for (status, kept) in [(202, 6), (303, 6), (503, 5), (409, 5)] {
        let service = around(&layer(), with_headers(status, &GIVEN));
        send(&service, post("k")).await;
        let replay = send(&service, post("k")).await;
        assert!(replay.is_replay(), "{status}");
        for (name, value) in &GIVEN[..kept] {
            assert_eq!(replay.header(name), Some(*value), "{status}");
        }
        assert_eq!(replay.header("retry-after").is_some(), kept == 6, "{status}");
    }
}

#[tokio::test]
async fn replay_has_all_headers_but_those_of_one_exchange_where_that_was_asked_for() {
    const GIVEN: [(&str, &str); 9] = [
        ("x-price", "5"),
        ("x-price", "6"),
        ("vary", "accept"),
        ("x-hop", "1"),
        ("connection", "x-hop"),
        ("set-cookie", "session=1"),
        ("x-request-id", "1"),
        ("access-control-allow-origin", "*"),
        ("cache-control", "max-age=60"),
    ];
    let service = around(&layer().keep_all_headers(), with_headers(200, &GIVEN));
    send(&service, post("k")).await;
    let replay = send(&service, post("k")).await;
    let mut names: Vec<&str> = replay
        .parts
        .headers
        .keys()
        .map(http::HeaderName::as_str)
        .collect();
    names.retain(|name| !name.starts_with("idempotent-replayed"));
    names.sort_unstable();
    assert_eq!(names, ["cache-control", "vary", "x-price"]);
    let prices = replay.parts.headers.get_all("x-price").iter();
    assert!(prices.eq(["5", "6"]));
    assert_eq!(replay.header("cache-control"), Some("no-store"));
}

#[tokio::test(start_paused = true)]
async fn results_are_kept_for_their_own_time() {
    let run = Counting::default();
    let service = around(
        &layer().retention(SECOND * 600).lease(SECOND),
        run.taking(SECOND * 100),
    );
    send(&service, post("k")).await;
    sleep(SECOND * 590).await;
    assert!(send(&service, post("k")).await.is_replay());
    sleep(SECOND * 20).await;
    assert_eq!(send(&service, post("k")).await.text(), "run 2");
}

#[tokio::test]
async fn records_that_cannot_be_read_are_an_error_and_never_a_miss() {
    for bytes in [vec![], vec![9, 1, 0], vec![1, 1, 0], vec![1, 77], vec![0]] {
        let store = Faulty::new();
        let run = Counting::default();
        let layer = store.layer();
        let inner = store.inner().clone();
        let what = format!("{bytes:?}");
        let handler = tower::service_fn(move |request: Req| {
            let idempotency = request.extensions().get::<Idempotency>().unwrap().clone();
            let (inner, bytes) = (inner.clone(), bytes.clone());
            async move {
                // What another version stored under this key.
                inner
                    .complete(
                        idempotency.record_key(),
                        idempotency.claim_token(),
                        bytes,
                        SECOND * 60,
                    )
                    .await
                    .unwrap();
                Ok::<_, Infallible>(Res::default())
            }
        });
        send(&around(&layer, handler), post("k")).await;
        let answer = send(&around(&layer, run.service()), post("k")).await;
        assert_eq!(answer.problem(), problem(503, "unreadable"), "{what}");
        assert!(answer.header("retry-after").is_some());
        assert_eq!(answer.json()["retryable"], true);
        assert_eq!((run.count(), layer.stats().unreadable), (0, 1));
    }
}
