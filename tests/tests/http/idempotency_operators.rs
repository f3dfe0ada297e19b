//! What those who operate the layer set and see: for how long what is kept, what is compared, and replays.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use dlock_tower::idempotency::{Class, Ending, Policy, Verdict};
use http::Response;
use http_body_util::Full;
use tokio::time::sleep;

use crate::idempotency_support::*;

const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test(start_paused = true)]
async fn retention_is_by_the_request() {
    let layer = layer().retention_of(|parts| match parts.uri.path() {
        "/payments" => 72 * HOUR,
        "/searches" => Duration::ZERO, // that is, a lease
        _ => HOUR,
    });
    let run = Counting::default();
    let service = around(&layer, run.service());
    let paths = ["/payments", "/orders", "/searches"];
    let mut replayed = Vec::new();
    for after in [Duration::ZERO, 5 * SECOND, HOUR / 2, HOUR, 70 * HOUR, 3 * HOUR] {
        sleep(after).await;
        let mut all = Vec::new();
        for path in paths {
            all.push(send(&service, request("POST", path, "k", "")).await.is_replay());
        }
        replayed.push(all);
    }
    assert_eq!(
        replayed,
        [
            [false, false, false],
            [true, true, true],
            [true, true, false],
            [true, false, false],
            [true, false, false],
            [false, false, false]
        ],
        "of {paths:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn retention_is_by_the_outcome() {
    struct RefusalsForAMinute;
    impl Policy for RefusalsForAMinute {
        fn judge(&self, ending: &Ending<'_>) -> Verdict {
            match ending {
                Ending::Response { status, .. } if status.is_client_error() => Verdict::KeepFor(60 * SECOND),
                Ending::Panic => Verdict::KeepFor(48 * HOUR),
                ending if ending.class() == Class::NothingDone => Verdict::Release,
                _ => Verdict::Keep,
            }
        }
    }
    let run = Counting::default();
    let handler = run.answering(|n| async move {
        let status = if n == 1 { 404 } else { 200 };
        Response::builder()
            .status(status)
            .body(Full::<Bytes>::default())
            .unwrap()
    });
    let service = around(&layer().policy(RefusalsForAMinute), handler);
    assert_eq!(send(&service, post("k")).await.status(), 404);
    sleep(59 * SECOND).await;
    let again = send(&service, post("k")).await;
    assert!(again.status() == 404 && again.is_replay());
    sleep(2 * SECOND).await;
    assert_eq!(send(&service, post("k")).await.status(), 200);
    sleep(23 * HOUR).await;
    assert!(send(&service, post("k")).await.is_replay());
    sleep(2 * HOUR).await;
    assert!(!send(&service, post("k")).await.is_replay());
    // Of what it keeps longer, too.
    let panics = tower::service_fn(|_: Req| async { panic!("it fails") as Result<Res, Infallible> });
    let service = around(&layer().policy(RefusalsForAMinute), panics);
    let panicked = tokio::spawn({
        let service = service.clone();
        async move { send(&service, post("p")).await.status() }
    });
    assert!(panicked.await.is_err());
    sleep(47 * HOUR).await;
    assert_eq!(send(&service, post("p")).await.problem().1, "failed");
}

#[tokio::test]
async fn chosen_fingerprint_compares_what_it_has_and_no_more() {
    let layer = layer().fingerprint(|parts, body| {
        let order: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
        format!("{} {}", order["item"], parts.uri.query().unwrap_or_default())
    });
    let run = Counting::default();
    let service = around(&layer, run.service());
    let order = async |uri, body| send(&service, request("POST", uri, "k", body)).await;
    let first = order("/orders?shop=1", r#"{"item":"hat","sent_at":1}"#).await;
    assert_eq!(first.both(), (200, "run 1"));
    let other_time = order("/orders?shop=1", r#"{"sent_at":2,"item":"hat"}"#).await;
    assert!(other_time.is_replay() && other_time.text() == "run 1");
    for (uri, body) in [
        ("/orders?shop=1", r#"{"item":"cap","sent_at":1}"#),
        ("/orders?shop=2", r#"{"item":"hat","sent_at":1}"#),
    ] {
        assert_eq!(order(uri, body).await.problem(), (422, "mismatch".to_owned()));
    }
    // Path and method are told apart in any case.
    assert!(!order("/returns?shop=1", r#"{"item":"hat"}"#).await.is_replay());
    assert_eq!(run.count(), 2);
}

/// Takes two seconds, since the age is one of the machine's clock.
#[tokio::test]
async fn replays_say_how_old_they_are_and_are_told_of() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let layer = layer().retention(60 * SECOND).on_replay({
        let told = told.clone();
        move |replay| {
            let path = replay.request.uri.path().to_owned();
            let times = (replay.age.unwrap(), replay.expires_in.unwrap());
            told.lock()
                .unwrap()
                .push((path, replay.key.to_owned(), replay.status, times));
        }
    });
    let run = Counting::default();
    let handler = run.answering(|n| async move {
        let forged = ("dlock-idempotency-stamp", "0 0");
        let response = Response::builder().status(201).header(forged.0, forged.1);
        response.body(Full::<Bytes>::from(format!("run {n}"))).unwrap()
    });
    let service = around(&layer, handler);
    let first = send(&service, post("k")).await;
    assert!(first.header("idempotent-replayed-age").is_none() && told.lock().unwrap().is_empty());
    let number = |answer: &Answer, name| answer.header(name).unwrap().parse::<u64>().unwrap();
    let soon = send(&service, post("k")).await;
    sleep(Duration::from_millis(2100)).await;
    let later = send(&service, post("k")).await;
    assert_eq!(soon.both(), later.both());
    let ages = [&soon, &later].map(|answer| number(answer, "idempotent-replayed-age"));
    assert!(ages[1] >= ages[0] + 2, "{ages:?}");
    for answer in [&soon, &later] {
        let [age, left] =
            ["idempotent-replayed-age", "idempotent-replayed-expires-in"].map(|name| number(answer, name));
        assert!((59..=60).contains(&(age + left)), "{age} and {left}");
        assert!(answer.header("dlock-idempotency-stamp").is_none());
    }
    let told = told.lock().unwrap().clone();
    assert_eq!(told.len(), 2);
    for (path, key, status, (age, left)) in told {
        assert_eq!((path.as_str(), key.as_str(), status.as_u16()), ("/pay", "k", 201));
        assert_eq!(age + left, 60 * SECOND);
    }
}
