//! Which key a request gives, and which requests give none.

use std::convert::Infallible;

use bytes::Bytes;
use dlock::{Held, LockClient};
use dlock_tower::key::{
    ExtractKey, Found, Key, all_of, each_of, extension, fixed, from_fn, header, json_field, method_and_path,
    path, query,
};
use dlock_tower::{LockLayer, NotStarted, Rejection};
use http::{HeaderMap, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Body, Frame};
use proptest::prelude::*;
use tower::{Layer, ServiceExt, service_fn};

/// The key that a handler sees, or the status and detail of the refusal.
async fn key_of<B: Body + Send + 'static>(
    key: impl ExtractKey<B>,
    request: Request<B>,
) -> Result<Option<String>, (u16, String)> {
    let service = LockLayer::new(LockClient::memory(), key)
        .streaming()
        .layer(service_fn(|request: Request<B>| async move {
            let key = request
                .extensions()
                .get::<Held>()
                .map(|held| held.key().as_str().to_owned());
            let mut response = Response::new(Full::<Bytes>::default());
            response.extensions_mut().insert(key);
            Ok::<_, Infallible>(response)
        }));
    let response = service.oneshot(request).await.unwrap();
    match response.extensions().get::<Option<String>>() {
        Some(key) => Ok(key.clone()),
        None => {
            assert!(response.extensions().get::<NotStarted>().is_some());
            let status = response.status().as_u16();
            let body = response.into_body().collect().await.unwrap().to_bytes();
            let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
            Err((status, problem["detail"].as_str().unwrap().to_owned()))
        }
    }
}

fn get(uri: &str) -> Request<Full<Bytes>> {
    Request::get(uri).body(Full::default()).unwrap()
}

fn with(headers: &[(&str, &str)]) -> Request<Full<Bytes>> {
    let request = headers.iter().fold(Request::get("/"), |request, (name, value)| {
        request.header(*name, http::HeaderValue::from_bytes(value.as_bytes()).unwrap())
    });
    request.body(Full::default()).unwrap()
}

fn post(body: &str) -> Request<Full<Bytes>> {
    Request::post("/").body(Full::from(body.to_owned())).unwrap()
}

fn some(key: &str) -> Result<Option<String>, (u16, String)> {
    Ok(Some(key.to_owned()))
}

#[track_caller]
fn refused(outcome: Result<Option<String>, (u16, String)>, status: u16, says: &str) {
    let (found, detail) = outcome.expect_err("refused");
    assert!(found == status && detail.contains(says), "{found} {detail}");
}

#[tokio::test]
async fn headers() {
    assert_eq!(
        key_of(header("X-Account"), with(&[("x-account", "a b")])).await,
        some("a b")
    );
    assert_eq!(
        key_of(header("x-account"), with(&[("x-account", "größe")])).await,
        some("größe")
    );
    refused(
        key_of(header("x-account"), with(&[])).await,
        400,
        "header x-account is missing",
    );
    let twice = with(&[("x-account", "1"), ("x-account", "2")]);
    refused(key_of(header("x-account"), twice).await, 400, "more than once");
    refused(
        key_of(header("x-account"), with(&[("x-account", "")])).await,
        400,
        "empty",
    );
    refused(
        key_of(header("x-account"), with(&[("x-account", "{tag}")])).await,
        400,
        "brace",
    );
    let mut latin = with(&[]);
    latin
        .headers_mut()
        .insert("x-account", http::HeaderValue::from_bytes(b"\xff").unwrap());
    refused(key_of(header("x-account"), latin).await, 400, "not UTF-8");
}

/// It is in no request: no such request may run without a lock.
#[tokio::test]
async fn header_that_no_request_can_have_is_a_mistake_of_the_service() {
    for name in ["x account", "", ":path", "größe"] {
        let set_up = "made a mistake in its set-up";
        refused(key_of(header(name), with(&[])).await, 500, set_up);
        refused(
            key_of(header(name).optional().prefix("a:"), with(&[])).await,
            500,
            set_up,
        );
        let or = header(name).or(query("id"));
        refused(key_of(or, get("/?id=1")).await, 500, set_up);
    }
}

#[tokio::test]
async fn query_parameters() {
    assert_eq!(key_of(query("id"), get("/x?a=1&id=4+2%2F&b")).await, some("4 2/"));
    assert_eq!(key_of(query("a b"), get("/x?a%20b=1")).await, some("1"));
    refused(
        key_of(query("id"), get("/x?xid=1")).await,
        400,
        "query parameter id is missing",
    );
    refused(key_of(query("id"), get("/x")).await, 400, "missing");
    refused(
        key_of(query("id"), get("/x?id=1&id=2")).await,
        400,
        "more than once",
    );
    // The other spelling of the same name counts as well.
    refused(
        key_of(query("id"), get("/x?id=1&%69d=2")).await,
        400,
        "more than once",
    );
    refused(key_of(query("id"), get("/x?id=%ff")).await, 400, "not UTF-8");
    refused(key_of(query("id"), get("/x?id=")).await, 400, "empty");
    refused(
        key_of(query("id"), get("/x?id=%00")).await,
        400,
        "control character",
    );
    assert_eq!(key_of(query("id"), get("/x?%ff=1&id=1")).await, some("1"));
}

/// The name may have parentheses, as the advice for programmers has, which clients do not get.
#[tokio::test]
async fn a_refusal_says_the_whole_name_and_why() {
    let request = with(&[("account", "Acme (UK) {1}")]);
    let (status, detail) = key_of(header("account"), request).await.unwrap_err();
    assert_eq!(status, 400);
    assert_eq!(
        detail,
        "\"Acme (UK) {1}\" cannot be the name of a lock: it has a brace at byte 10"
    );
}

/// On a server they are keys of other things: of records, the audit log, what clients publish.
#[tokio::test]
async fn request_does_not_name_a_key_of_the_library() {
    let own = with(&[("x-account", "dlock:record:once-report")]);
    let (status, detail) = key_of(header("x-account"), own).await.unwrap_err();
    assert_eq!(status, 400);
    assert_eq!(
        detail,
        "\"dlock:record:once-report\" cannot be the name of a lock: it begins with `dlock:`, as dlock's own keys do"
    );
    let parts = all_of((query("kind"), query("id")));
    refused(
        key_of(parts, get("/?kind=dlock&id=audit")).await,
        400,
        "begins with",
    );
    let own = with(&[("x-account", "dlock:audit")]);
    let prefixed = header("x-account").prefix("account:");
    assert_eq!(key_of(prefixed, own).await, some("account:dlock:audit"));
}

#[tokio::test]
async fn longest_time_to_try_again_is_written_as_it_is() {
    let longest = std::time::Duration::MAX;
    let rejection = Rejection::new(http::StatusCode::SERVICE_UNAVAILABLE, "closed");
    let rejection = rejection.with_retry_after(longest);
    assert_eq!(rejection.retry_after_secs(), Some(u64::MAX));
    let client = LockClient::memory();
    let _guard = client.lock("k").acquire().await.unwrap();
    let mut problem = client.lock("k").try_acquire().await.unwrap_err().problem();
    problem.retry_after = Some(longest);
    assert_eq!(problem.retry_after_secs(), Some(u64::MAX));
}

#[tokio::test]
async fn paths() {
    assert_eq!(key_of(path(), get("/a/%62?x=1")).await, some("/a/b"));
    assert_eq!(key_of(method_and_path(), get("/a/b")).await, some("GET /a/b"));
    refused(key_of(path(), get("/%ff")).await, 400, "not UTF-8");
    refused(key_of(path(), get("/%7B")).await, 400, "brace");
}

#[tokio::test]
async fn json_fields() {
    let key = || json_field("account.id");
    assert_eq!(
        key_of(key(), post(r#"{"account":{"id":"a1"}}"#)).await,
        some("a1")
    );
    assert_eq!(
        key_of(key(), post(r#"{"account":{"id":18446744073709551615}}"#)).await,
        some("18446744073709551615")
    );
    assert_eq!(key_of(key(), post(r#"{"account":{"id":-1}}"#)).await, some("-1"));
    assert_eq!(
        key_of(key(), post(r#"{"account":{"id":true}}"#)).await,
        some("true")
    );
    assert_eq!(
        key_of(json_field("/items/0/id"), post(r#"{"items":[{"id":"x"}]}"#)).await,
        some("x")
    );
    assert_eq!(
        key_of(json_field("a/b.c"), post(r#"{"a/b":{"c":"x"}}"#)).await,
        some("x")
    );
    for missing in ["{}", r#"{"account":{"id":null}}"#, "[]"] {
        refused(key_of(key(), post(missing)).await, 400, "is missing");
    }
    for odd in ["1.5", "1e3", "{}", "[]"] {
        let body = format!(r#"{{"account":{{"id":{odd}}}}}"#);
        refused(
            key_of(key(), post(&body)).await,
            400,
            "neither a string nor an integer",
        );
    }
    refused(key_of(key(), post("")).await, 400, "not JSON");
    refused(key_of(key(), post("{\"a")).await, 400, "not JSON");
}

#[tokio::test]
async fn a_json_body_is_bounded() {
    let body = format!(
        r#"{{"id":"1","pad":"{}"}}"#,
        "x".repeat(dlock_tower::key::DEFAULT_JSON_LIMIT)
    );
    refused(key_of(json_field("id"), post(&body)).await, 413, "1048576 bytes");
    let key = json_field("id").limit(2 * dlock_tower::key::DEFAULT_JSON_LIMIT);
    assert_eq!(key_of(key, post(&body)).await, some("1"));
    let exact = r#"{"id":"1"}"#;
    assert_eq!(
        key_of(json_field("id").limit(exact.len()), post(exact)).await,
        some("1")
    );
    refused(
        key_of(json_field("id").limit(exact.len() - 1), post(exact)).await,
        413,
        "9 bytes",
    );

    // One that does not say how long it is, and would never end.
    let endless =
        futures_util::stream::repeat_with(|| Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"[[[["))));
    let request = Request::post("/")
        .body(StreamBody::new(endless).boxed_unsync())
        .unwrap();
    refused(
        key_of(json_field("id").limit(1000), request).await,
        413,
        "1000 bytes",
    );
}

#[tokio::test]
async fn a_body_that_was_read_reaches_the_handler_byte_for_byte_with_its_trailers() {
    let mut trailers = HeaderMap::new();
    trailers.append("x-sum", "1".parse().unwrap());
    trailers.append("x-sum", "2".parse().unwrap());
    let frames = [
        Frame::data(Bytes::new()),
        Frame::data(Bytes::from("{ \"id\" :")),
        Frame::data(Bytes::from("\"7\",\n \"x\": 1.50")),
        Frame::data(Bytes::from("}\n")),
        Frame::trailers(trailers.clone()),
    ];
    let stream = futures_util::stream::iter(frames.map(Ok::<_, Infallible>));
    let body: UnsyncBoxBody<Bytes, Infallible> = StreamBody::new(stream).boxed_unsync();
    let service = LockLayer::new(LockClient::memory(), json_field("id")).layer(service_fn(
        |request: Request<UnsyncBoxBody<Bytes, Infallible>>| async move {
            assert_eq!(request.extensions().get::<Held>().unwrap().key().as_str(), "7");
            let body = request.into_body().collect().await?;
            let trailers = body.trailers().cloned();
            let mut response = Response::new(Full::new(body.to_bytes()));
            *response.headers_mut() = trailers.unwrap_or_default();
            Ok::<_, Infallible>(response)
        },
    ));
    let response = service.oneshot(Request::new(body)).await.unwrap();
    assert_eq!(response.headers(), &trailers);
    assert_eq!(
        response.into_body().collect().await.unwrap().to_bytes(),
        "{ \"id\" :\"7\",\n \"x\": 1.50}\n"
    );
}

#[tokio::test]
async fn a_body_that_breaks_off_is_refused() {
    let frames = [
        Ok(Frame::data(Bytes::from("{"))),
        Err(std::io::Error::other("reset")),
    ];
    let body = StreamBody::new(futures_util::stream::iter(frames)).boxed_unsync();
    refused(
        key_of(json_field("id"), Request::new(body)).await,
        400,
        "could not be read",
    );
    // A limit further out has the same name here as ours.
    let limited = http_body_util::Limited::new(Full::<Bytes>::from("{\"id\":\"1\"}"), 3);
    refused(
        key_of(json_field("id"), Request::new(limited.boxed_unsync())).await,
        413,
        "",
    );
}

#[tokio::test]
async fn fixed_keys() {
    assert_eq!(key_of(fixed("report"), get("/")).await, some("report"));
    // Only this service can have made this mistake.
    refused(key_of(fixed("order:{id}"), get("/")).await, 500, "mistake");
}

#[tokio::test]
async fn closures() {
    assert_eq!(key_of(|_: &http::request::Parts| "a", get("/")).await, some("a"));
    assert_eq!(
        key_of(|_: &http::request::Parts| None::<String>, get("/")).await,
        Ok(None)
    );
    assert_eq!(
        key_of(
            from_fn(|parts| parts.uri.path().to_owned()).prefix("p:"),
            get("/x")
        )
        .await,
        some("p:/x")
    );
    assert_eq!(
        key_of(from_fn(|_| dlock::LockKey::raw("{a}:b")), get("/")).await,
        some("{a}:b")
    );
    let key = from_fn(|_| dlock::LockKey::new("{"));
    refused(key_of(key, get("/")).await, 400, "brace");
    let key = from_fn(|_| Err::<String, _>(Rejection::new(http::StatusCode::FORBIDDEN, "not you")));
    refused(key_of(key, get("/")).await, 403, "not you");
}

/// Keys from what a layer outside has added to the request.
mod extensions {
    use super::*;
    use std::sync::Arc;

    #[derive(Debug, Clone)]
    struct User(&'static str);

    fn from<T: Clone + Send + Sync + 'static>(value: T) -> Request<Full<Bytes>> {
        let mut request = get("/?id=7");
        request.extensions_mut().insert(value);
        request
    }

    #[tokio::test]
    async fn closure_returns_what_other_key_closures_return() {
        let name = || extension(|user: &User| user.0.to_owned());
        assert_eq!(key_of(name(), from(User("ann"))).await, some("ann"));
        assert_eq!(
            key_of(name().prefix("user:"), from(User("ann"))).await,
            some("user:ann")
        );
        assert_eq!(key_of(name().parsed::<u64>(), from(User("007"))).await, some("7"));
        let both = all_of((name(), query("id")));
        assert_eq!(key_of(both, from(User("ann"))).await, some("ann:7"));
        refused(key_of(name(), from(User(""))).await, 400, "empty");
        refused(key_of(name(), from(User("{"))).await, 400, "brace");

        let admin = extension(|user: &User| (user.0 != "root").then_some(user.0));
        assert_eq!(key_of(admin.clone(), from(User("ann"))).await, some("ann"));
        assert_eq!(key_of(admin, from(User("root"))).await, Ok(None));
        let several = extension(|user: &User| vec!["all", user.0]);
        let (_, found) = several.extract(from(User("ann"))).await.unwrap();
        assert!(matches!(found, Found::Keys(keys) if keys.len() == 2));
        let forbidden =
            || extension(|_: &User| Err::<String, _>(Rejection::new(http::StatusCode::FORBIDDEN, "not you")));
        refused(key_of(forbidden(), from(User("ann"))).await, 403, "not you");
        refused(
            key_of(forbidden().optional(), from(User("ann"))).await,
            403,
            "not you",
        );
    }

    /// A layer of the service has not added it: clients cannot correct that, and the handler does not run unlocked.
    #[tokio::test]
    async fn absent_extension_is_a_mistake_of_the_service() {
        let name = || extension(|user: &User| user.0);
        let set_up = "made a mistake in its set-up";
        refused(key_of(name(), get("/")).await, 500, set_up);
        refused(key_of(name().prefix("user:"), get("/")).await, 500, set_up);
        refused(key_of(name(), from(Arc::new(User("ann")))).await, 500, set_up);
        refused(
            key_of(all_of((query("id"), name())), get("/?id=7")).await,
            500,
            set_up,
        );
        refused(
            key_of(each_of((query("id"), name())), get("/?id=7")).await,
            500,
            set_up,
        );
        assert_eq!(key_of(name().optional(), get("/")).await, Ok(None));
        assert_eq!(key_of(name().or(query("id")), get("/?id=7")).await, some("7"));
        assert!(format!("{:?}", name()).contains("User"));
    }
}

#[tokio::test]
async fn an_extractor_of_ones_own_may_wait() {
    struct Lookup;
    impl<B: Send> ExtractKey<B> for Lookup {
        async fn extract(&self, request: Request<B>) -> Result<(Request<B>, Found), Rejection> {
            tokio::task::yield_now().await;
            Ok((request, Found::Key("found".into())))
        }
    }
    assert_eq!(key_of(Lookup, get("/")).await, some("found"));
    assert_eq!(
        key_of(Key::new(Lookup).prefix("p:"), get("/")).await,
        some("p:found")
    );
}

/// As `Found::Keys` promises, for each way to return one.
#[tokio::test]
async fn empty_list_of_keys_counts_as_missing() {
    struct Nothing;
    impl<B: Send> ExtractKey<B> for Nothing {
        async fn extract(&self, request: Request<B>) -> Result<(Request<B>, Found), Rejection> {
            Ok((request, Found::Keys(Vec::new())))
        }
    }
    let closure = || from_fn(|_| Found::Keys(Vec::new()));
    refused(key_of(Nothing, get("/")).await, 400, "is missing");
    refused(key_of(closure(), get("/")).await, 400, "is missing");
    refused(key_of(closure().prefix("p:"), get("/")).await, 400, "is missing");
    refused(
        key_of(all_of((fixed("a"), Nothing)), get("/")).await,
        400,
        "is missing",
    );
    refused(
        key_of(each_of((fixed("a"), Nothing)), get("/")).await,
        400,
        "is missing",
    );
    refused(
        key_of(header("x").or(Nothing), get("/")).await,
        400,
        "header x is missing, the name of something to lock is missing",
    );
    assert_eq!(
        key_of(Key::new(Nothing).or(fixed("a")), get("/")).await,
        some("a")
    );
    assert_eq!(key_of(closure().or(fixed("a")), get("/")).await, some("a"));
    assert_eq!(key_of(Key::new(Nothing).optional(), get("/")).await, Ok(None));
    assert_eq!(key_of(closure().optional(), get("/")).await, Ok(None));
}

/// Equal ones count once.
#[tokio::test]
async fn more_keys_than_one_step_can_lock_are_the_clients_mistake() {
    let first = |n: usize| from_fn(move |_| (0..n).map(|i| format!("{i:04}")).collect::<Vec<_>>());
    assert_eq!(key_of(first(1000), get("/")).await, some("0000"));
    refused(key_of(first(1001), get("/")).await, 400, "1001 locks");
    let equal = from_fn(|_| vec!["a"; 1001]);
    assert_eq!(key_of(equal, get("/")).await, some("a"));
}

#[tokio::test]
async fn combinations() {
    let account = || header("x-account").prefix("account:");
    assert_eq!(
        key_of(account(), with(&[("x-account", "7")])).await,
        some("account:7")
    );
    // Nothing does not become something by its prefix.
    refused(key_of(account(), with(&[("x-account", "")])).await, 400, "empty");

    let either = || account().or(query("account").map(|id| format!("query:{}", id.to_lowercase())));
    assert_eq!(key_of(either(), get("/?account=ABC")).await, some("query:abc"));
    let mut both = get("/?account=1");
    both.headers_mut().insert("x-account", "2".parse().unwrap());
    assert_eq!(key_of(either(), both).await, some("account:2"));
    refused(
        key_of(either(), get("/")).await,
        400,
        "header x-account is missing, query parameter account is missing",
    );
    // One that is wrong is not the same as none.
    let twice = with(&[("x-account", "1"), ("x-account", "2")]);
    refused(key_of(either(), twice).await, 400, "more than once");

    assert_eq!(key_of(either().optional(), get("/")).await, Ok(None));
    refused(
        key_of(account().optional(), with(&[("x-account", "{")])).await,
        400,
        "brace",
    );
    assert_eq!(
        key_of(account().optional().or(fixed("rest")), get("/")).await,
        some("rest")
    );
}

#[tokio::test]
async fn parts_join_into_one_key() {
    let key = || all_of((header("a"), header("b"), query("c"))).prefix("order:");
    let request = |a: &str, b: &str| {
        let mut request = with(&[("a", a), ("b", b)]);
        *request.uri_mut() = "/?c=3".parse().unwrap();
        request
    };
    assert_eq!(key_of(key(), request("1", "2")).await, some("order:1:2:3"));
    assert_eq!(
        key_of(key(), request("1:2", "50%")).await,
        some("order:1%3A2:50%25:3")
    );
    refused(key_of(key(), request("", "2")).await, 400, "empty");
    refused(
        key_of(key(), with(&[("a", "1")])).await,
        400,
        "header b is missing",
    );
    let passing = all_of((header("a"), header("b").optional()));
    assert_eq!(key_of(passing, with(&[("a", "1")])).await, Ok(None));
    // Read once, by both of them.
    let both = all_of((json_field("a"), json_field("b")));
    assert_eq!(key_of(both, post(r#"{"a":1,"b":2}"#)).await, some("1:2"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn different_parts_never_give_the_same_key(
        a in "[a:%3A25]{1,6}", b in "[a:%3A25]{1,6}", c in "[a:%3A25]{1,6}", d in "[a:%3A25]{1,6}",
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let key = |x: &str, y: &str| {
            runtime.block_on(key_of(all_of((header("x"), header("y"))), with(&[("x", x), ("y", y)])))
        };
        prop_assert_eq!((&a, &b) == (&c, &d), key(&a, &b).unwrap() == key(&c, &d).unwrap());
    }
}

/// Keys of a type: each value has one spelling.
mod parsed {
    use super::*;
    use dlock_tower::key::each_of;
    use uuid::Uuid;

    /// All spellings of a value are one lock, wherever the value stands.
    #[tokio::test]
    async fn spellings_of_a_value_are_one_key() {
        for text in ["7", "07", "007", "+7"] {
            let key = header("k").parsed::<u64>().prefix("account:");
            assert_eq!(
                key_of(key, with(&[("k", text)])).await,
                Ok(Some("account:7".into()))
            );
        }
        for uri in ["/?id=7", "/?id=007", "/?id=%37", "/?id=%2B7", "/?other=1&id=7"] {
            assert_eq!(
                key_of(query("id").parsed::<u64>(), get(uri)).await,
                Ok(Some("7".into())),
                "{uri}"
            );
        }
        for body in [
            r#"{"id":7}"#,
            r#"{"id":"7"}"#,
            r#"{"id":"007"}"#,
            r#"{ "id" : 7 }"#,
        ] {
            assert_eq!(
                key_of(json_field("id").parsed::<u64>(), post(body)).await,
                Ok(Some("7".into())),
                "{body}"
            );
        }
        let canonical = "67e55044-10b1-426f-9247-bb680e5fe0c8";
        for text in [
            canonical,
            "67E55044-10B1-426F-9247-BB680E5FE0C8",
            "67e5504410b1426f9247bb680e5fe0c8",
            "urn:uuid:67e55044-10b1-426f-9247-bb680e5fe0c8",
        ] {
            let key = header("k").parsed::<Uuid>();
            assert_eq!(
                key_of(key, with(&[("k", text)])).await,
                Ok(Some(canonical.into()))
            );
        }
        for (text, is) in [("true", "true"), ("-0", "0"), ("-07", "-7")] {
            let key = header("k").parsed::<bool>();
            let number = header("k").parsed::<i64>();
            let got = match text {
                "true" => key_of(key, with(&[("k", text)])).await,
                _ => key_of(number, with(&[("k", text)])).await,
            };
            assert_eq!(got, Ok(Some(is.into())));
        }
    }

    /// What is no value of the type is the client's mistake, told before anything is locked.
    #[tokio::test]
    async fn what_is_no_value_is_answered_with_400() {
        for text in [
            "",
            " 7",
            "7 ",
            "seven",
            "-1",
            "7.0",
            "18446744073709551616",
            "७",
            "0x7",
        ] {
            let request = Request::get("/")
                .header("k", text)
                .body(Full::<Bytes>::default())
                .unwrap();
            let Err((status, detail)) = key_of(header("k").parsed::<u64>(), request).await else {
                panic!("{text:?} passed");
            };
            assert_eq!(status, 400, "{text:?}");
            assert!(detail.contains("not valid"), "{detail}");
        }
        for body in [r#"{"id":7.0}"#, r#"{"id":-7}"#, r#"{"id":[7]}"#] {
            let told = key_of(json_field("id").parsed::<u64>(), post(body)).await;
            assert_eq!(told.map_err(|(status, _)| status), Err(400), "{body}");
        }
    }

    /// They go together with all that makes a key of keys.
    #[tokio::test]
    async fn keys_can_be_put_together_of_them() {
        let id = || header("k").parsed::<u32>();
        let missing = key_of(id().optional(), with(&[])).await;
        assert_eq!(missing, Ok(None));
        let missing = key_of(id(), with(&[])).await;
        assert_eq!(missing, Err((400, "header k is missing".into())));
        let other = key_of(id().or(query("id").parsed::<u32>()), get("/?id=08")).await;
        assert_eq!(other, Ok(Some("8".into())));
        let wrong = key_of(id().or(fixed("x")), with(&[("k", "x")])).await;
        assert_eq!(wrong.map_err(|(status, _)| status), Err(400));
        let both = key_of(all_of((id(), fixed("a"))), with(&[("k", "007")])).await;
        assert_eq!(both, Ok(Some("7:a".into())));
        let each = each_of((query("from"), query("to")))
            .parsed::<u64>()
            .prefix("account:");
        assert_eq!(
            key_of(each, get("/?from=07&to=7")).await,
            Ok(Some("account:7".into())),
            "they are one account"
        );
        assert!(format!("{:?}", id()).contains("u32"));
    }
}
