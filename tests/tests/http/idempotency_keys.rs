//! The idempotency layer: which requests it applies to, and which of them are one.

use std::sync::Arc;

use crate::idempotency_support::*;
use bytes::Bytes;
use dlock_tower::idempotency::{IdempotencyLayer, caller};
use dlock_tower::{NotStarted, Rejection};
use http::{HeaderName, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use tower::ServiceExt;

#[tokio::test]
async fn a_request_with_a_key_runs_once_and_is_answered_the_same() {
    let run = Counting::default();
    let service = around(&layer(), run.service());
    let first = send(&service, post("a")).await;
    assert_eq!(first.both(), (200, "run 1"));
    assert!(!first.is_replay());
    assert_eq!(first.header("cache-control"), None);
    for _ in 0..3 {
        let again = send(&service, post("a")).await;
        assert_eq!(again.both(), (200, "run 1"));
        assert!(again.is_replay());
        assert_eq!(again.header("cache-control"), Some("no-store"));
    }
    assert_eq!(send(&service, post("b")).await.both(), (200, "run 2"));
}

#[tokio::test]
async fn one_step_before_the_handler_one_after_and_one_for_a_replay() {
    let store = Faulty::new();
    let service = around(&store.layer(), Counting::default().service());
    send(&service, post("a")).await;
    assert_eq!(store.faults.seen(), (1, 0, 1, 0));
    send(&service, post("a")).await;
    assert_eq!(store.faults.seen(), (2, 0, 1, 0));
}

#[tokio::test]
async fn requests_without_a_key_pass_untouched() {
    let store = Faulty::new();
    let run = Counting::default();
    let service = around(&store.layer(), run.service());
    for n in 1..=2 {
        let request = Request::post("/pay").body(Full::default()).unwrap();
        let answer = send(&service, request).await;
        assert_eq!(answer.both(), (200, format!("run {n}").as_str()));
    }
    assert_eq!(store.faults.seen(), (0, 0, 0, 0));
}

#[tokio::test]
async fn a_missing_key_is_refused_where_one_is_required() {
    let run = Counting::default();
    let service = around(&layer().required(), run.service());
    let request = Request::post("/pay").body(Full::default()).unwrap();
    let answer = send(&service, request).await;
    assert_eq!(answer.problem(), problem(400, "key-missing"));
    assert!(answer.not_started());
    assert_eq!(answer.json()["retryable"], false);
    assert_eq!(run.count(), 0);
}

#[tokio::test]
async fn only_post_and_patch_by_default() {
    let run = Counting::default();
    let service = around(&layer(), run.service());
    for (method, runs) in [("POST", 1), ("PATCH", 1), ("GET", 2), ("PUT", 2), ("DELETE", 2)] {
        let before = run.count();
        for _ in 0..2 {
            send(&service, request(method, "/pay", "k", "")).await;
        }
        assert_eq!(run.count() - before, runs, "{method}");
    }
    // Not even a malformed key matters there.
    assert_eq!(send(&service, request("GET", "/pay", "", "")).await.status(), 200);
    let service = around(&layer().methods([Method::PUT]), run.service());
    for (method, runs) in [("PUT", 1), ("POST", 2)] {
        let before = run.count();
        for _ in 0..2 {
            send(&service, request(method, "/pay", "k", "")).await;
        }
        assert_eq!(run.count() - before, runs, "{method}");
    }
}

#[tokio::test]
async fn quoted_and_bare_keys_are_one_key() {
    let run = Counting::default();
    let service = around(&layer(), run.service());
    for key in ["k-1", "\"k-1\"", " k-1", "\"k-1\" "] {
        assert_eq!(send(&service, post(key)).await.text(), "run 1", "{key}");
    }
}

#[tokio::test]
async fn a_malformed_key_is_refused_before_anything_is_touched() {
    let store = Faulty::new();
    let run = Counting::default();
    let service = around(&store.layer(), run.service());
    let long = "k".repeat(256);
    for key in [
        "",
        "\"\"",
        "\"a",
        "a b",
        "a,b",
        "\"a\", \"b\"",
        "\u{e9}",
        long.as_str(),
    ] {
        let mut request = post("x");
        request.headers_mut().insert(
            "idempotency-key",
            http::HeaderValue::from_bytes(key.as_bytes()).unwrap(),
        );
        let answer = send(&service, request).await;
        assert_eq!(answer.problem(), problem(400, "key-invalid"), "{key}");
        assert!(answer.not_started());
    }
    let mut twice = post("a");
    twice
        .headers_mut()
        .append("idempotency-key", "a".parse().unwrap());
    assert_eq!(send(&service, twice).await.problem(), problem(400, "key-invalid"));
    assert_eq!((run.count(), store.faults.seen()), (0, (0, 0, 0, 0)));
    assert_eq!(send(&service, post(&"k".repeat(255))).await.status(), 200);
}

#[tokio::test]
async fn another_header_may_have_the_key() {
    let run = Counting::default();
    let layer = layer().header(HeaderName::from_static("x-request-key"));
    let service = around(&layer, run.service());
    for _ in 0..2 {
        let mut request = Request::post("/pay").body(Full::default()).unwrap();
        request
            .headers_mut()
            .insert("x-request-key", "k".parse().unwrap());
        assert_eq!(send(&service, request).await.text(), "run 1");
    }
}

#[tokio::test]
async fn keys_of_two_callers_two_methods_two_paths_and_two_namespaces_are_different_keys() {
    let run = Counting::default();
    let records = records();
    let by_user = caller::from_fn(|parts| parts.headers["x-user"].to_str().unwrap().to_owned());
    let layer = IdempotencyLayer::new(records.clone(), by_user);
    let service = around(&layer, run.service());
    let asked = |method, uri, user: &str| {
        let mut request = request(method, uri, "k", "");
        request.headers_mut().insert("x-user", user.parse().unwrap());
        request
    };
    let different = [
        ("POST", "/pay", "ann"),
        ("POST", "/pay", "bob"),
        ("POST", "/pay", ""),
        ("PATCH", "/pay", "ann"),
        ("POST", "/refund", "ann"),
        // What would run together without lengths.
        ("POST", "/payk", "an"),
    ];
    for round in 0..2 {
        for (n, (method, uri, user)) in different.into_iter().enumerate() {
            let answer = send(&service, asked(method, uri, user)).await;
            assert_eq!(answer.text(), format!("run {}", n + 1), "{method} {uri} {user}");
            assert_eq!(answer.is_replay(), round == 1);
        }
    }
    let everybody = IdempotencyLayer::new(records.clone(), caller::public());
    let answer = send(&around(&everybody, run.service()), asked("POST", "/pay", "")).await;
    assert!(
        !answer.is_replay(),
        "the public caller is not the caller without a name"
    );
    let per_host = layer.clone().per_host();
    let hosts = [
        ("/pay", "a.example"),
        ("/pay", "b.example"),
        ("/pay", "a.example:8080"),
        ("/pay", ""),
        ("http://c.example/pay", ""),
    ];
    for round in 0..2 {
        for (uri, host) in hosts {
            let mut request = asked("POST", uri, "ann");
            if !host.is_empty() {
                let host = if round == 0 {
                    host.to_owned()
                } else {
                    host.to_uppercase()
                };
                request.headers_mut().insert("host", host.parse().unwrap());
            }
            let answer = send(&around(&per_host, run.service()), request).await;
            assert_eq!(answer.is_replay(), round == 1, "{uri} {host}");
        }
    }
    let other = layer.namespace("other service");
    let answer = send(&around(&other, run.service()), asked("POST", "/pay", "ann")).await;
    assert!(!answer.is_replay());
}

#[tokio::test]
async fn another_request_under_the_same_key_is_refused_without_naming_what_differs() {
    let store = Faulty::new();
    let run = Counting::default();
    // One route for all of it.
    let service = around(&store.layer().route(|_| "pay".to_owned()), run.service());
    let mut first = request("POST", "/pay/1?x=1", "k", "one");
    first
        .headers_mut()
        .insert("content-type", "text/plain".parse().unwrap());
    let mut others = Vec::new();
    for (uri, content_type, body) in [
        ("/pay/2?x=1", Some("text/plain"), "one"),
        ("/pay/1?x=2", Some("text/plain"), "one"),
        ("/pay/1", Some("text/plain"), "one"),
        ("/pay/1?x=1", Some("text/html"), "one"),
        ("/pay/1?x=1", None, "one"),
        ("/pay/1?x=1", Some("text/plain"), "two"),
        ("/pay/1?x=1", Some("text/plain"), ""),
    ] {
        let mut other = request("POST", uri, "k", body);
        if let Some(content_type) = content_type {
            other
                .headers_mut()
                .insert("content-type", content_type.parse().unwrap());
        }
        others.push(other);
    }
    assert_eq!(send(&service, first.clone()).await.text(), "run 1");
    let mut told = Vec::new();
    for other in others {
        let what = format!("{other:?}");
        let answer = send(&service, other).await;
        assert_eq!(answer.problem(), problem(422, "mismatch"), "{what}");
        assert_eq!(answer.header("retry-after"), None);
        told.push(answer.body);
    }
    told.dedup();
    assert_eq!(told.len(), 1, "all are told the same");
    // Headers that the fingerprint leaves out make no difference.
    first.headers_mut().insert("user-agent", "other".parse().unwrap());
    assert!(send(&service, first).await.is_replay());
    assert_eq!(run.count(), 1);
}

/// Headers that say on which state of the resource, or to which part of it, the request applies make it another request.
#[tokio::test]
async fn preconditions_belong_to_the_fingerprint() {
    for name in [
        "if-match",
        "if-none-match",
        "if-modified-since",
        "if-unmodified-since",
        "if-range",
        "range",
        "content-range",
        "content-encoding",
    ] {
        let run = Counting::default();
        let service = around(&layer(), run.service());
        let with = |values: &[&'static str]| {
            let mut request = post("k");
            for value in values {
                request.headers_mut().append(name, value.parse().unwrap());
            }
            request
        };
        assert_eq!(send(&service, with(&["\"1\""])).await.text(), "run 1");
        assert!(send(&service, with(&["\"1\""])).await.is_replay());
        for other in [&["\"2\""][..], &[], &["\"1\"", "\"2\""]] {
            let answer = send(&service, with(other)).await;
            assert_eq!(answer.problem(), problem(422, "mismatch"), "{name} {other:?}");
        }
        assert_eq!(run.count(), 1);
    }
}

#[tokio::test]
async fn unknown_caller_is_refused() {
    #[derive(Clone)]
    struct User(u64);
    let run = Counting::default();
    let layer = IdempotencyLayer::new(records(), caller::extension(|user: &User| user.0));
    let service = around(&layer, run.service());
    let answer = send(&service, post("k")).await;
    assert_eq!(answer.problem(), problem(401, "no-caller"));
    assert!(answer.not_started());
    assert_eq!(run.count(), 0);
    for (user, text) in [(1, "run 1"), (2, "run 2"), (1, "run 1")] {
        let mut request = post("k");
        request.extensions_mut().insert(User(user));
        assert_eq!(send(&service, request).await.text(), text);
    }
    // Without a key the store is not asked.
    let request = Request::post("/pay").body(Full::default()).unwrap();
    assert_eq!(send(&service, request).await.status(), 200);
    let refusing = IdempotencyLayer::new(
        records(),
        caller::from_fn(|_| Err::<String, _>(Rejection::new(StatusCode::FORBIDDEN, "not you"))),
    );
    assert_eq!(
        send(&around(&refusing, run.service()), post("k")).await.status(),
        403
    );
}

#[tokio::test]
async fn answers_of_the_layer_can_be_rendered_differently() {
    let layer = layer().required().render(|rejection| {
        let mut response = rejection.response();
        *response.status_mut() = StatusCode::IM_A_TEAPOT;
        response
    });
    let request = Request::post("/pay").body(Full::default()).unwrap();
    let service = around(&layer, Counting::default().service());
    let response = service.oneshot(request).await.unwrap();
    assert_eq!(response.status(), 418);
    assert!(response.extensions().get::<NotStarted>().is_some());
}

#[tokio::test]
async fn options_that_make_no_sense_are_told() {
    use std::time::Duration;
    let wrong = [
        layer().lease(Duration::ZERO),
        layer().retention(Duration::from_secs(1)),
        layer().retention(Duration::MAX),
        layer().wait(Duration::MAX),
        layer().keep_header(http::header::SET_COOKIE),
        layer().keep_header(HeaderName::from_static("access-control-allow-origin")),
        layer().keep_header(http::header::CACHE_CONTROL),
        layer().keep_header(dlock_tower::idempotency::REPLAYED),
        layer().keep_header(dlock_tower::idempotency::REPLAYED_AGE),
        layer().keep_header(dlock_tower::idempotency::REPLAYED_EXPIRES_IN),
    ];
    for (n, layer) in wrong.into_iter().enumerate() {
        assert!(layer.check().is_err(), "{n}");
        let service = around(&layer, Counting::default().service());
        assert_eq!(send(&service, post("k")).await.status(), 500, "{n}");
    }
    assert!(layer().check().is_ok());
}

#[tokio::test]
async fn the_handler_gets_the_body_and_its_claim() {
    use dlock_tower::Idempotency;
    let seen = Arc::new(std::sync::Mutex::new(None));
    let service = {
        let seen = seen.clone();
        tower::service_fn(move |request: Req| {
            let seen = seen.clone();
            async move {
                let idempotency = request.extensions().get::<Idempotency>().unwrap().clone();
                *seen.lock().unwrap() = Some(idempotency);
                let body = request.into_body().collect().await.unwrap().to_bytes();
                Ok::<_, std::convert::Infallible>(http::Response::new(Full::<Bytes>::from(body)))
            }
        })
    };
    let service = around(&layer(), service);
    let answer = send(&service, request("POST", "/pay", "\"k 1\"", "the body")).await;
    assert_eq!(answer.text(), "the body");
    let seen = seen.lock().unwrap().take().unwrap();
    assert_eq!((seen.key(), seen.attempt()), ("k 1", 1));
    assert!(seen.fence() > 0 && !seen.is_lost());
    assert_eq!(seen.record_key().as_str().len(), 64);
}

/// What principals are known by in services: all of it identifies a caller, and is the same in every spelling of the
/// type.
#[tokio::test(start_paused = true)]
async fn a_caller_may_be_a_uuid_a_shared_text_or_any_integer() {
    async fn caller_is<R: caller::IntoCaller>(
        user: impl Fn() -> R + Clone + Send + Sync + 'static,
        same: &'static str,
    ) {
        let records = records();
        let run = Counting::default();
        let once = IdempotencyLayer::new(records.clone(), caller::from_fn(move |_| user()));
        let as_text = IdempotencyLayer::new(records, caller::from_fn(move |_| same));
        assert_eq!(
            send(&around(&once, run.service()), post("k")).await.text(),
            "run 1"
        );
        let again = send(&around(&as_text, run.service()), post("k")).await;
        assert!(again.is_replay(), "{same} is the same caller");
    }
    caller_is(uuid::Uuid::nil, "00000000-0000-0000-0000-000000000000").await;
    caller_is(|| std::sync::Arc::<str>::from("ann"), "ann").await;
    caller_is(|| Box::<str>::from("ann"), "ann").await;
    caller_is(|| 7_usize, "7").await;
    caller_is(|| -7_isize, "-7").await;
    caller_is(|| Some(7_u8), "7").await;
}
