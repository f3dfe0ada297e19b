//! The console of dlock-tower as HTTP: what it tells, to whom, and under which path.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use dlock::LockClient;
use dlock::testing::TestStore;
use dlock_tests::{Flavor, Server, eventually, paused};
use dlock_tower::console::Console;
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use serde_json::Value;
use tower::ServiceExt;

const SECOND: Duration = Duration::from_secs(1);

/// A client of a store in memory that all clients of a test share.
async fn client(store: &str, service: &str, presence: bool) -> LockClient {
    let client = LockClient::builder()
        .url(format!("memory://{store}"))
        .service_name(service)
        .presence(presence)
        .build();
    client.await.unwrap()
}

fn app(client: &LockClient) -> Router {
    let console = Console::new(client.clone()).refresh(Duration::ZERO);
    Router::new().nest_service("/ops/locks", console.router())
}

async fn get(app: &Router, path: &str) -> Response {
    let request = Request::get(path).body(Body::empty()).unwrap();
    app.clone().oneshot(request).await.unwrap()
}

async fn json(response: Response) -> Value {
    let body = response.into_body().collect().await.unwrap().to_bytes();
    serde_json::from_slice(&body).unwrap()
}

async fn state(app: &Router) -> Value {
    // Longer than a look is good for.
    tokio::time::sleep(SECOND / 5).await;
    let answer = get(app, "/ops/locks/api/state").await;
    assert_eq!(answer.status(), StatusCode::OK);
    json(answer).await
}

#[test]
fn state_has_holders_and_waiters_of_other_processes_in_their_order() {
    paused(async {
        let (a, b, seen) = (
            client("console-order", "checkout", true).await,
            client("console-order", "billing", true).await,
            client("console-order", "ops", false).await,
        );
        let guard = a.lock("order:42").note("invoice 42").acquire().await.unwrap();
        let line = line!() - 1;
        let waiters = [1, 2].map(|n| {
            let b = b.clone();
            tokio::spawn(async move {
                tokio::time::sleep(SECOND * n).await;
                let note = format!("waiter {n}");
                b.lock("order:42").note(note).acquire().await.map(drop)
            })
        });
        tokio::time::sleep(SECOND * 8).await;
        let state = state(&app(&seen)).await;
        let lock = &state["locks"][0];
        assert_eq!(
            (&lock["key"], &lock["kind"]),
            (&"order:42".into(), &"lock".into())
        );
        let holder = &lock["holders"][0];
        assert_eq!(holder["service"], "checkout");
        assert_eq!(holder["note"], "invoice 42");
        assert_eq!(holder["state"], "alive");
        assert_eq!(holder["unknown"], Value::Null);
        assert_eq!(holder["token"], guard.fencing_token().to_string());
        assert!(holder["held_ms"].as_u64() >= Some(8000), "{holder}");
        let location = holder["location"].as_str().unwrap();
        assert!(
            location.contains(&format!("console_http.rs:{line}:")),
            "{location}"
        );
        let notes: Vec<_> = lock["waiters"]
            .as_array()
            .unwrap()
            .iter()
            .map(|wait| &wait["note"])
            .collect();
        assert_eq!(notes, ["waiter 1", "waiter 2"], "{lock}");
        assert_eq!(lock["waiters"][0]["service"], "billing");
        let services: Vec<_> = state["clients"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| &one["service"])
            .collect();
        assert_eq!(services, ["ops", "billing", "checkout"], "its own first");
        assert_eq!(state["unknown"], Value::Array(Vec::new()), "nothing is missing");

        // One lock by itself.
        let one = json(get(&app(&seen), "/ops/locks/api/lock?key=order%3A42").await).await;
        assert_eq!(one["holders"][0]["note"], "invoice 42");
        assert_eq!(one["waiters_in_all"], 2);
        guard.release().await.unwrap();
        for waiter in waiters {
            waiter.await.unwrap().unwrap();
        }
    });
}

#[test]
fn own_holds_and_waits_are_known_at_once_and_without_presence() {
    paused(async {
        let own = client("console-own", "shop", false).await;
        let app = app(&own);
        assert_eq!(state(&app).await["locks"], Value::Array(Vec::new()));
        let guard = own.lock("k").acquire().await.unwrap();
        let waiter = tokio::spawn({
            let lock = own.lock("k");
            async move { lock.acquire().await.map(drop) }
        });
        eventually("it waits", || async { own.active().waiting == 1 }).await;
        let state = state(&app).await;
        let lock = &state["locks"][0];
        assert_eq!(lock["holders"][0]["is_own"], true);
        assert_eq!(lock["waiters"][0]["is_own"], true);
        assert_eq!(state["process"]["held"], 1);
        guard.release().await.unwrap();
        waiter.await.unwrap().unwrap();
    });
}

#[test]
fn holder_without_presence_is_shown_with_the_reason_and_the_remedy() {
    paused(async {
        let (hidden, seen) = (
            client("console-hidden", "hidden", false).await,
            client("console-hidden", "ops", true).await,
        );
        let guard = hidden.lock("k").acquire().await.unwrap();
        let state = state(&app(&seen)).await;
        let holder = &state["locks"][0]["holders"][0];
        assert!(holder["id"].as_str().unwrap().starts_with(&hidden.id()));
        assert_eq!(
            (&holder["service"], &holder["held_ms"], &holder["state"]),
            (&Value::Null, &Value::Null, &"unknown".into())
        );
        assert!(holder["unknown"].as_str().unwrap().contains("presence is off"));
        let gap = &state["unknown"][0];
        assert!(gap["why"].as_str().unwrap().contains("1 holder"), "{gap}");
        assert!(
            gap["remedy"].as_str().unwrap().contains("presence(true)"),
            "{gap}"
        );
        guard.release().await.unwrap();
    });
}

/// Nobody holds it, so nobody has anything to publish about it.
#[test]
fn lock_that_is_only_kept_for_its_min_hold_is_released_and_not_unknown() {
    paused(async {
        let (job, hidden, seen) = (
            client("console-kept", "job", true).await,
            client("console-kept", "hidden", false).await,
            client("console-kept", "ops", true).await,
        );
        for (client, key) in [(&job, "kept"), (&hidden, "kept too")] {
            let lock = client.lock(key).min_hold(SECOND * 60);
            lock.acquire().await.unwrap().release().await.unwrap();
        }
        let _held = job.lock("held").acquire().await.unwrap();
        tokio::time::sleep(SECOND * 10).await;
        let state = state(&app(&seen)).await;
        assert_eq!(state["counts"]["held"], 3, "{state}");
        assert_eq!(state["counts"]["unknown"], 0, "{state}");
        assert_eq!(state["unknown"], Value::Array(Vec::new()));
        let locks = state["locks"].as_array().unwrap();
        for lock in locks.iter().filter(|lock| lock["key"] != "held") {
            let holder = &lock["holders"][0];
            let told = (&holder["state"], &holder["released"]);
            assert_eq!(told, (&"released".into(), &true.into()), "{holder}");
            assert!(
                holder["unknown"].as_str().unwrap().contains("min_hold"),
                "{holder}"
            );
        }
    });
}

#[test]
fn deadlock_of_two_processes_is_named_once() {
    paused(async {
        let (a, b, seen) = (
            client("console-circle", "a", true).await,
            client("console-circle", "b", true).await,
            client("console-circle", "ops", false).await,
        );
        let circle = [(a, "A", "B"), (b, "B", "A")].map(|(client, first, second)| {
            tokio::spawn(async move {
                let _outer = client.lock(first).acquire().await.unwrap();
                tokio::time::sleep(SECOND).await;
                client.lock(second).wait(SECOND * 20).acquire().await.map(drop)
            })
        });
        tokio::time::sleep(SECOND * 8).await;
        let state = state(&app(&seen)).await;
        assert_eq!(state["deadlocks"], serde_json::json!([["A", "B"]]));
        let a = state["locks"]
            .as_array()
            .unwrap()
            .iter()
            .find(|lock| lock["key"] == "A")
            .unwrap();
        assert_eq!(a["holders"][0]["waits_for"]["key"], "B");
        for one in circle {
            let _ = one.await.unwrap();
        }
    });
}

/// Each of the readers keeps the lock from its writers.
#[test]
fn deadlocks_through_each_of_several_readers_are_named() {
    paused(async {
        let name = "console-readers";
        let seen = client(name, "ops", false).await;
        let mut tasks = Vec::new();
        for (reader, other) in [("one", "B"), ("two", "C")] {
            let (reader, writer) = (client(name, reader, true).await, client(name, other, true).await);
            tasks.push(tokio::spawn(async move {
                let _outer = reader.rw_lock("A").read().acquire().await.unwrap();
                tokio::time::sleep(SECOND).await;
                reader.lock(other).wait(SECOND * 20).acquire().await.map(drop)
            }));
            tasks.push(tokio::spawn(async move {
                let _outer = writer.lock(other).acquire().await.unwrap();
                tokio::time::sleep(SECOND).await;
                let lock = writer.rw_lock("A").write();
                lock.wait(SECOND * 20).acquire().await.map(drop)
            }));
        }
        tokio::time::sleep(SECOND * 8).await;
        let state = state(&app(&seen)).await;
        assert_eq!(state["deadlocks"], serde_json::json!([["A", "B"], ["A", "C"]]));
        for task in tasks {
            let _ = task.await.unwrap();
        }
    });
}

/// A reader that waits for nothing ends its read, but not for those that wait for the other reader.
#[test]
fn readers_that_want_to_write_are_a_deadlock() {
    paused(async {
        let name = "console-upgrade";
        let seen = client(name, "ops", false).await;
        let mut tasks = Vec::new();
        for service in ["one", "two"] {
            let client = client(name, service, true).await;
            tasks.push(tokio::spawn(async move {
                let _outer = client.rw_lock("A").read().acquire().await.unwrap();
                tokio::time::sleep(SECOND).await;
                let lock = client.rw_lock("A").write();
                lock.wait(SECOND * 20).acquire().await.map(drop)
            }));
        }
        tokio::time::sleep(SECOND * 8).await;
        assert_eq!(state(&app(&seen)).await["deadlocks"], serde_json::json!([["A"]]));
        for task in tasks {
            let _ = task.await.unwrap();
        }
    });
}

#[test]
fn survey_for_ever_is_kept() {
    paused(async {
        let client = LockClient::memory();
        let console = Console::new(client.clone()).refresh(Duration::MAX);
        let app = Router::new().nest_service("/ops/locks", console.router());
        for _ in 0..2 {
            assert_eq!(state(&app).await["locks"], Value::Array(Vec::new()));
            let _guard = client.lock("k").acquire().await.unwrap();
            tokio::time::sleep(SECOND * 60).await;
        }
    });
}

#[tokio::test]
async fn store_that_does_not_answer_leaves_what_this_process_knows() {
    let server = Server::start(Flavor::Redis).await;
    let client = LockClient::builder().url(server.url()).lease(SECOND * 600);
    let client = client.build().await.unwrap();
    let guard = client.lock("mine").acquire().await.unwrap();
    let app = app(&client);
    assert_eq!(state(&app).await["unknown"], Value::Array(Vec::new()));
    server.kill();
    // A look that took long is good for longer.
    let app = self::app(&client);
    let state = state(&app).await;
    assert_eq!(state["locks"][0]["key"], "mine");
    assert_eq!(state["locks"][0]["holders"][0]["is_own"], true);
    let gaps = state["unknown"].as_array().unwrap();
    assert_eq!(gaps[0]["what"], "the locks of other processes");
    assert_eq!(gaps.len(), 2, "{gaps:?}");
    let mine = json(get(&app, "/ops/locks/api/lock?key=mine").await).await;
    assert_eq!(mine["holders"][0]["is_own"], true, "{mine}");
    assert!(mine["unknown"].is_string(), "{mine}");
    let answer = get(&app, "/ops/locks/api/lock?key=other").await;
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(json(answer).await["type"], "urn:dlock:problem:unavailable");
    drop(guard);
}

#[test]
fn timeline_has_what_went_wrong_or_took_long_in_this_process() {
    paused(async {
        let store = TestStore::new();
        let client = store.client();
        let guard = client.lock("k").acquire().await.unwrap();
        let app = app(&client);
        let what = async || {
            let state = state(&app).await;
            let entries = state["events"]["entries"].as_array().unwrap().clone();
            entries
                .iter()
                .map(|entry| format!("{} {}", entry["what"], entry["key"]))
                .collect::<Vec<_>>()
        };
        assert_eq!(what().await, Vec::<String>::new());
        store.set_down(true);
        eventually("it is suspect", async || what().await.len() == 1).await;
        store.set_down(false);
        eventually("it is confirmed", async || what().await.len() == 2).await;
        for _ in ["once", "and again"] {
            let lock = client.lock("k").wait(SECOND);
            assert!(
                tokio::spawn(async move { lock.acquire().await })
                    .await
                    .unwrap()
                    .is_err()
            );
        }
        store.set_down(true);
        eventually("it is lost", async || !guard.is_held()).await;
        tokio::time::sleep(SECOND * 2).await;
        let (suspect, lost) = ("\"not confirmed\" \"k\"", "\"lost\" \"k\"");
        let all = [suspect, "\"confirmed\" \"k\"", "\"gave up\" \"k\"", suspect, lost];
        assert_eq!(what().await, all);
        let events = state(&app).await["events"].clone();
        assert_eq!(events["entries"][2]["times"], 2, "{events}");
        let why = events["entries"][4]["text"].as_str().unwrap().to_owned();
        assert!(why.contains("did not answer renewals"), "{why}");
        assert_eq!(events["missed"], 0);
        client.drain();
        assert_eq!(what().await.last().unwrap(), "\"drains\" null");
        store.set_down(false);
        drop(guard);
    });
}

#[tokio::test]
async fn timeline_begins_with_the_console() {
    let server = Server::start(Flavor::Redis).await;
    let client = LockClient::builder().url(server.url()).build().await.unwrap();
    let reconnect = async || {
        let before = client.health().reconnects;
        let kill = ["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"];
        server.command(&kill).await;
        let again = async || {
            if let Ok(guard) = client.lock("k").acquire().await {
                let _ = guard.release().await;
            }
            client.health().reconnects > before
        };
        eventually("it is connected again", again).await;
    };
    // A hold that becomes suspect or a long wait is told, too.
    let told = async |app: &Router| {
        let mut entries = state(app).await["events"]["entries"].take();
        let entries = entries.as_array_mut().unwrap();
        entries.retain(|entry| entry["key"].is_null());
        let what = entries.iter_mut().map(|entry| entry["what"].take());
        what.collect::<Vec<_>>()
    };
    reconnect().await;
    let before = app(&client);
    assert_eq!(told(&before).await, Vec::<Value>::new());
    reconnect().await;
    let is_told = async || told(&before).await == ["reconnected"];
    eventually("it is told", is_told).await;
    client.drain();
    let is_told = async || told(&before).await == ["reconnected", "drains"];
    eventually("it is told", is_told).await;
    assert_eq!(told(&app(&client)).await, Vec::<Value>::new());
}

#[tokio::test]
async fn bad_requests_are_told_what_is_wrong() {
    let app = app(&LockClient::memory());
    let long = "k".repeat(513);
    for (path, status, word) in [
        ("api/lock".to_owned(), 400, "name it"),
        ("api/lock?key=".to_owned(), 400, "empty"),
        (format!("api/lock?key={long}"), 400, "513 bytes"),
        ("api/lock?key=a%00b".to_owned(), 400, "control character"),
        ("api/none".to_owned(), 404, "api/state"),
    ] {
        let answer = get(&app, &format!("/ops/locks/{path}")).await;
        assert_eq!(answer.status(), status, "{path}");
        assert_eq!(answer.headers()["content-type"], "application/problem+json");
        let detail = json(answer).await["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains(word), "{path}: {detail}");
    }
    let request = Request::post("/ops/locks/api/state").body(Body::empty()).unwrap();
    let answer = app.clone().oneshot(request).await.unwrap();
    assert_eq!(answer.status(), StatusCode::METHOD_NOT_ALLOWED);
    // A free lock is no error.
    let free = json(get(&app, "/ops/locks/api/lock?key=free").await).await;
    assert_eq!(
        (&free["holders"], &free["kind"]),
        (&Value::Array(Vec::new()), &Value::Null)
    );
}

#[tokio::test]
async fn page_of_another_site_gets_nothing_and_every_answer_is_locked_down() {
    let app = app(&LockClient::memory());
    for (site, status) in [
        ("cross-site", 403),
        ("same-site", 403),
        ("same-origin", 200),
        ("none", 200),
    ] {
        let request = Request::get("/ops/locks/api/state")
            .header("sec-fetch-site", site)
            .body(Body::empty())
            .unwrap();
        let answer = app.clone().oneshot(request).await.unwrap();
        assert_eq!(answer.status(), status, "{site}");
        let headers = answer.headers();
        assert_eq!(headers["cache-control"], "no-store");
        assert_eq!(headers["x-content-type-options"], "nosniff");
        assert_eq!(headers["cross-origin-resource-policy"], "same-origin");
        assert!(
            headers["content-security-policy"]
                .to_str()
                .unwrap()
                .contains("default-src 'none'")
        );
        assert!(headers.get("access-control-allow-origin").is_none());
    }
}

/// The status of the answer to a request for the data of the console, with this URI and these headers.
async fn status_of(app: &Router, uri: &str, headers: &[(&str, &str)]) -> u16 {
    let mut request = Request::get(uri);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Body::empty()).unwrap();
    app.clone().oneshot(request).await.unwrap().status().as_u16()
}

/// On plain HTTP browsers leave `Sec-Fetch-Site` out, but not the origin of a page of another site.
#[tokio::test]
async fn page_of_another_site_gets_nothing_on_plain_http() {
    let app = app(&LockClient::memory());
    // The second is that of HTTP/2, without `Host`.
    let (path, whole) = (
        "/ops/locks/api/state",
        "http://ops.example:8080/ops/locks/api/state",
    );
    for (origin, status) in [
        ("http://ops.example:8080", 200),
        ("http://OPS.example:8080", 200),
        ("http://ops.example", 403),
        ("http://evil.example", 403),
        ("http://evil.example:8080", 403),
        ("null", 403),
        ("", 403),
    ] {
        let with_host = [("host", "ops.example:8080"), ("origin", origin)];
        assert_eq!(status_of(&app, path, &with_host).await, status, "{origin}");
        let without = [("origin", origin)];
        assert_eq!(status_of(&app, whole, &without).await, status, "{origin}");
        assert_eq!(
            status_of(&app, path, &without).await,
            403,
            "{origin}, and no host"
        );
    }
    assert_eq!(status_of(&app, path, &[("host", "ops.example:8080")]).await, 200);
    assert_eq!(status_of(&app, path, &[]).await, 200, "a program");
    // The browser's own word counts for more: a proxy may have changed the host.
    let proxied = [
        ("sec-fetch-site", "same-origin"),
        ("origin", "https://ops.example"),
        ("host", "10.0.0.7:3000"),
    ];
    assert_eq!(status_of(&app, path, &proxied).await, 200);
}

/// A site whose name was rebound to the address of the console has its own name as host.
#[tokio::test]
async fn only_hosts_that_are_named_are_served() {
    let console = Console::new(LockClient::memory()).hosts(["ops.example", "LOCALHOST:3000", "[::1]"]);
    let app = Router::new().nest_service("/ops/locks", console.router());
    for (host, status) in [
        ("ops.example", 200),
        ("Ops.example:8080", 200),
        ("localhost", 200),
        ("localhost:3000", 200),
        ("[::1]:3000", 200),
        ("evil.example", 421),
        ("evil.ops.example", 421),
        ("ops.example.evil.example", 421),
        ("127.0.0.1:3000", 421),
        ("", 421),
    ] {
        for path in ["/ops/locks", "/ops/locks/api/state", "/ops/locks/api/none"] {
            let status = if path.ends_with("none") && status == 200 {
                404
            } else {
                status
            };
            assert_eq!(
                status_of(&app, path, &[("host", host)]).await,
                status,
                "{host} {path}"
            );
            if !host.is_empty() {
                let whole = format!("http://{host}{path}");
                assert_eq!(status_of(&app, &whole, &[]).await, status, "{whole}");
            }
        }
    }
    assert_eq!(status_of(&app, "/ops/locks", &[]).await, 421, "no host");
}

#[tokio::test]
async fn page_is_served_under_any_path_and_allows_only_its_own_script() {
    let client = LockClient::memory();
    let console = || Console::new(client.clone()).router();
    let apps = [
        (Router::new().nest_service("/a/b", console()), ["/a/b", "/a/b/"]),
        (
            Router::new().nest("/a", Router::new().nest("/b", console())),
            ["/a/b", "/a/b?x=1"],
        ),
        (console(), ["/", "/?x=1"]),
        (
            Router::new()
                .merge(console())
                .route("/other", axum::routing::get(async || "")),
            ["/", "/"],
        ),
    ];
    for (app, paths) in apps {
        let mut nonces = Vec::new();
        for path in paths {
            let answer = get(&app, path).await;
            assert_eq!(answer.status(), StatusCode::OK, "{path}");
            assert_eq!(answer.headers()["content-type"], "text/html; charset=utf-8");
            let policy = answer.headers()["content-security-policy"]
                .to_str()
                .unwrap()
                .to_owned();
            assert!(!policy.contains("unsafe"), "{policy}");
            let (_, nonce) = policy.split_once("script-src 'nonce-").unwrap();
            let nonce = nonce.split('\'').next().unwrap().to_owned();
            let html = answer.into_body().collect().await.unwrap().to_bytes();
            let html = String::from_utf8(html.to_vec()).unwrap();
            assert_eq!(html.matches(&format!("nonce=\"{nonce}\"")).count(), 2, "{path}");
            nonces.push(nonce);
        }
        assert_ne!(nonces[0], nonces[1], "each answer has its own");
    }
}

#[test]
fn many_pages_look_at_the_store_once() {
    paused(async {
        let store = TestStore::new();
        let client = store.client();
        let app =
            Router::new().nest_service("/c", Console::new(client.clone()).refresh(SECOND * 10).router());
        let guard = client.lock("k").acquire().await.unwrap();
        let first = json(get(&app, "/c/api/state").await).await;
        guard.release().await.unwrap();
        tokio::time::sleep(SECOND * 4).await;
        let second = get(&app, "/c/api/state").await;
        let age: u64 = second.headers()["x-dlock-age-ms"]
            .to_str()
            .unwrap()
            .parse()
            .unwrap();
        assert!((4000..5000).contains(&age), "{age}");
        assert_eq!(json(second).await, first, "the same look");
        tokio::time::sleep(SECOND * 6).await;
        assert_eq!(
            json(get(&app, "/c/api/state").await).await["locks"],
            Value::Array(Vec::new())
        );
    });
}

#[test]
fn filter_searches_all_locks_and_not_only_those_that_are_shown() {
    paused(async {
        let own = client("console-many", "shop", false).await;
        let mut held = Vec::new();
        for number in 0..600 {
            held.push(
                own.lock(format!("order:{number}"))
                    .note("Invoice")
                    .acquire()
                    .await
                    .unwrap(),
            );
        }
        let app = app(&own);
        let asked = async |query: &str| {
            let state = json(get(&app, &format!("/ops/locks/api/state?{query}")).await).await;
            (
                state["locks"].as_array().unwrap().len(),
                state["locks_left_out"].clone(),
                state["counts"].clone(),
            )
        };
        let counts = serde_json::json!({ "all": 600, "held": 600, "waited": 0, "near": 0, "unknown": 0 });
        for (query, shown, left_out) in [
            ("", 500, 100),
            ("only=held&find=", 500, 100),
            ("find=ORDER:599", 1, 0),
            ("find=invoice&only=all", 500, 100),
            ("find=console_http.rs", 500, 100),
            ("find=nothing", 0, 0),
            ("only=waited", 0, 0),
            ("only=strange", 500, 100),
        ] {
            assert_eq!(
                asked(query).await,
                (shown, left_out.into(), counts.clone()),
                "{query}"
            );
        }
    });
}

#[test]
fn few_of_many_holders_and_waiters_stand_in_the_list_of_locks() {
    paused(async {
        let own = client("console-crowd", "shop", false).await;
        let permits = own.semaphore("s").permits(7);
        let held = permits.acquire().await.unwrap();
        let mut others = Vec::new();
        for _ in 0..6 {
            others.push(permits.acquire().await.unwrap());
        }
        let waiters: Vec<_> = (0..8)
            .map(|_| tokio::spawn(own.semaphore("s").permits(7).acquire()))
            .collect();
        eventually("they wait", || async { own.active().waiting == 8 }).await;
        let app = app(&own);
        let lengths = |lock: &Value| {
            let [holders, waiters] = ["holders", "waiters"].map(|of| lock[of].as_array().unwrap().len());
            (
                holders,
                waiters,
                lock["holders_in_all"].clone(),
                lock["waiters_in_all"].clone(),
            )
        };
        let state = state(&app).await;
        assert_eq!(lengths(&state["locks"][0]), (5, 5, 7.into(), 8.into()));
        let one = json(get(&app, "/ops/locks/api/lock?key=s").await).await;
        assert_eq!(lengths(&one), (7, 8, 7.into(), 8.into()));
        waiters.iter().for_each(tokio::task::JoinHandle::abort);
        drop((held, others));
    });
}

mod actions {
    use dlock::operations::Intervention;
    use dlock::record::{ClaimRequest, ClaimToken, RecordKey};
    use dlock_tests::Log;
    use serde_json::json;

    use super::*;

    fn acting(client: &LockClient) -> Router {
        let console = Console::new(client.clone())
            .refresh(Duration::ZERO)
            .allow_actions(true);
        let console = console.operator(|head| head.headers.get("x-user")?.to_str().ok().map(str::to_owned));
        Router::new().nest_service("/ops/locks", console.router())
    }

    async fn token(app: &Router) -> String {
        let state = json(get(app, "/ops/locks/api/state").await).await;
        state["actions"]["token"].as_str().unwrap().to_owned()
    }

    /// Sends it as the page does, with these headers in place of its own.
    async fn post(app: &Router, what: &str, body: Value, headers: &[(&str, &str)]) -> (u16, Value) {
        send(app, what, &token(app).await, body, headers).await
    }

    /// The same with a token that is known.
    pub(super) async fn send(
        app: &Router,
        what: &str,
        token: &str,
        body: Value,
        headers: &[(&str, &str)],
    ) -> (u16, Value) {
        let is_http_2 = headers.contains(&(":authority", "shop.example"));
        let server = if is_http_2 { "http://shop.example" } else { "" };
        let mut request = Request::post(format!("{server}/ops/locks/api/{what}"));
        let own = [
            ("x-dlock-console", token),
            ("content-type", "application/json"),
            ("host", "shop.example"),
            ("sec-fetch-site", "same-origin"),
            ("x-user", "ada"),
        ];
        let is_given = |name: &str| headers.iter().any(|(given, _)| *given == name);
        for (name, value) in own.iter().filter(|(name, _)| !is_given(name)).chain(headers) {
            if !value.is_empty() && !name.starts_with(':') {
                request = request.header(*name, *value);
            }
        }
        let request = request.body(Body::from(body.to_string())).unwrap();
        let answer = app.clone().oneshot(request).await.unwrap();
        (answer.status().as_u16(), json(answer).await)
    }

    #[tokio::test]
    async fn are_refused_unless_they_are_allowed() {
        let client = LockClient::memory();
        let guard = client.lock("k").acquire().await.unwrap();
        let app = app(&client);
        assert_eq!(
            json(get(&app, "/ops/locks/api/state").await).await["actions"],
            Value::Null
        );
        for what in ["break", "revoke", "forget"] {
            let request = Request::post(format!("/ops/locks/api/{what}"))
                .body(Body::from("{}"))
                .unwrap();
            let answer = app.clone().oneshot(request).await.unwrap();
            assert_eq!(answer.status(), StatusCode::FORBIDDEN);
            assert_eq!(json(answer).await["type"], "urn:dlock:problem:read-only");
        }
        assert!(guard.is_held());
    }

    #[tokio::test]
    async fn of_another_site_or_without_the_token_change_nothing() {
        let client = LockClient::memory();
        let guard = client.lock("k").acquire().await.unwrap();
        let app = acting(&client);
        let holder = client.inspect("k").await.unwrap().unwrap().id;
        let body = json!({ "key": "k", "holder": holder, "reason": "attack" });
        let old = [("sec-fetch-site", ""), ("origin", "https://evil.example")];
        let nowhere = [("sec-fetch-site", ""), ("host", ""), ("origin", "null")];
        for (headers, status) in [
            (&[("sec-fetch-site", "cross-site")][..], 403),
            (&[("sec-fetch-site", "same-site")], 403),
            (&[("sec-fetch-site", "none")], 403),
            (&old, 403),
            (&nowhere, 403),
            (&[("x-dlock-console", "")], 403),
            (&[("x-dlock-console", "00000000000000000000000000000000")], 403),
            (&[("content-type", "text/plain")], 415),
            (&[("content-type", "application/json-seq")], 415),
        ] {
            for what in ["break", "revoke", "forget"] {
                let (found, answer) = post(&app, what, body.clone(), headers).await;
                assert_eq!(found, status, "{what} {headers:?}: {answer}");
            }
        }
        assert!(
            guard.ensure(Duration::ZERO).await.is_ok(),
            "it is held, by the store as well"
        );
        assert!(client.inspect("k").await.unwrap().is_some());
        // A browser that says its origin only, and a program that says neither, are let in. The origin is the host's, which
        // HTTP/2 has in the URI.
        for (headers, holder) in [
            (
                &[("sec-fetch-site", ""), ("origin", "https://shop.example")][..],
                "nobody",
            ),
            (
                &[
                    ("sec-fetch-site", ""),
                    ("origin", "http://shop.example"),
                    ("host", ""),
                    (":authority", "shop.example"),
                ],
                "nobody",
            ),
            (&[("sec-fetch-site", "")], "nobody"),
            (&[("content-type", "application/json; charset=utf-8")], "nobody"),
            (&[("content-type", "Application/JSON ;charset=utf-8")], "nobody"),
        ] {
            let body = json!({ "key": "k", "holder": holder, "reason": "r" });
            assert_eq!(
                post(&app, "break", body, headers).await,
                (200, json!({ "done": false }))
            );
        }
    }

    #[tokio::test]
    async fn end_a_hold_or_ask_its_holder_in_the_name_of_the_operator() {
        let store = "console-acts";
        let (holder, ops) = (
            client(store, "checkout", true).await,
            client(store, "ops", true).await,
        );
        let app = acting(&ops);
        let guard = holder.lock("k").acquire().await.unwrap();
        let id = ops.inspect("k").await.unwrap().unwrap().id;
        for (reason, word) in [(json!(""), "reason"), (Value::Null, "`reason`")] {
            let (status, answer) = post(
                &app,
                "revoke",
                json!({ "key": "k", "holder": id, "reason": reason }),
                &[],
            )
            .await;
            assert_eq!(status, 400, "{answer}");
            assert!(answer["detail"].as_str().unwrap().contains(word), "{answer}");
        }
        let body = json!({ "key": "k", "holder": id, "reason": "its machine burns" });
        assert_eq!(
            post(&app, "revoke", body.clone(), &[]).await,
            (200, json!({ "done": true }))
        );
        let said: Option<Intervention> = guard.revoked().await;
        let said = said.expect("an intervention");
        assert_eq!(
            (said.by.as_str(), said.reason.as_str()),
            ("ada", "its machine burns")
        );
        assert_eq!(
            post(&app, "break", body.clone(), &[]).await,
            (200, json!({ "done": true }))
        );
        assert!(ops.inspect("k").await.unwrap().is_none());
        assert_eq!(
            post(&app, "break", body, &[]).await,
            (200, json!({ "done": false }))
        );
        assert_eq!(state(&app).await["locks"], Value::Array(Vec::new()));
    }

    #[tokio::test]
    async fn forget_a_record_unless_its_work_is_in_progress() {
        let client = LockClient::memory();
        let app = acting(&client);
        let records = client.records().unwrap();
        let (key, claim) = (RecordKey::new("payment-7").unwrap(), ClaimToken::new());
        let request = ClaimRequest::new(key.clone(), claim.clone(), [0; 32], SECOND * 600, SECOND * 900);
        records.claim(request).await.unwrap();
        let body = json!({ "record": "payment-7", "reason": "the answer was wrong" });
        let (status, answer) = post(&app, "forget", body.clone(), &[]).await;
        assert_eq!(
            (status, &answer["type"]),
            (409, &"urn:dlock:problem:record-claimed".into()),
            "{answer}"
        );
        records.abandon(&key, &claim).await.unwrap();
        for reason in [json!(" "), Value::Null] {
            let body = json!({ "record": "payment-7", "reason": reason });
            let (status, answer) = post(&app, "forget", body, &[]).await;
            assert_eq!(status, 400, "{answer}");
            assert!(answer["detail"].as_str().unwrap().contains("reason"), "{answer}");
        }
        let forgotten = post(&app, "forget", body.clone(), &[]).await;
        assert_eq!(forgotten, (200, json!({ "done": true })));
        assert_eq!(
            post(&app, "forget", body, &[]).await,
            (200, json!({ "done": false }))
        );
        let wrong = json!({ "record": "a b", "reason": "r" });
        assert_eq!(post(&app, "forget", wrong, &[]).await.0, 400);
    }

    #[tokio::test]
    async fn stand_in_the_log_of_the_process_also_with_an_unknown_outcome() {
        const TOLD: &str = "the console was told to act";
        let log = Log::default();
        let _listening = log.listen();
        let server = Server::start(Flavor::Redis).await;
        let client = LockClient::builder()
            .url(server.url())
            .timeout(SECOND / 2)
            .retry_for(SECOND / 2);
        let client = client.build().await.unwrap();
        let app = acting(&client);
        let acts = [
            (
                "break",
                json!({ "key": "k", "holder": "nobody", "reason": "it burns" }),
            ),
            (
                "revoke",
                json!({ "key": "k", "holder": "nobody", "reason": "it burns" }),
            ),
            ("forget", json!({ "record": "payment-7", "reason": "it burns" })),
        ];
        for (act, body) in &acts {
            assert_eq!(post(&app, act, body.clone(), &[]).await.0, 200);
        }
        for action in ["Break", "Revoke", "Forget"] {
            assert_eq!(log.count(&format!("{TOLD} action={action}")), 1, "{action}");
        }
        assert_eq!(log.count("by=\"ada\" reason=\"it burns\" done=false"), 3);
        // Misuse is none.
        let nothing = json!({ "record": "payment-7", "reason": "" });
        assert_eq!(post(&app, "forget", nothing, &[]).await.0, 400);
        assert_eq!(log.count(TOLD), 3);
        server.kill();
        for (act, body) in &acts {
            assert_eq!(post(&app, act, body.clone(), &[]).await.0, 503);
        }
        assert_eq!(log.count(TOLD), 6);
        assert_eq!(log.count(" error="), 3);
    }
}

mod surveys {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use dlock::LockKey;
    use dlock::store::operations::Operations;
    use dlock::store::{
        AcquireReply, AcquireRequest, Capabilities, Holder, Kind, ReleaseReply, ReleaseRequest, RenewRequest,
        Renewal, Store, StoreError, StoreFuture,
    };
    use dlock::stores::memory::MemoryStore;
    use dlock_tests::Log;
    use serde_json::json;
    use tokio::sync::Mutex;
    use tokio::time::{sleep, timeout};

    use super::actions::send;
    use super::*;

    const STATE: &str = "/ops/locks/api/state";
    /// How long the page waits for an answer.
    const PATIENCE: Duration = Duration::from_secs(15);

    /// A store in memory on which a survey takes a while.
    #[derive(Clone, Default)]
    struct Slow {
        memory: MemoryStore,
        takes: Duration,
        /// How long a look at one lock takes.
        inspects: Duration,
        surveys: Arc<AtomicUsize>,
        alone: Arc<Mutex<()>>,
        panics: Arc<AtomicBool>,
    }

    impl Slow {
        fn new(takes: Duration) -> Slow {
            let store = Slow::default();
            Slow { takes, ..store }
        }

        async fn client(&self) -> LockClient {
            LockClient::builder().store(self.clone()).build().await.unwrap()
        }

        /// How many surveys have begun.
        fn surveys(&self) -> usize {
            self.surveys.load(Ordering::SeqCst)
        }

        fn inner(&self) -> Arc<MemoryStore> {
            Arc::new(self.memory.clone())
        }
    }

    impl Store for Slow {
        fn capabilities(&self) -> Capabilities {
            Capabilities::new([Kind::Mutex])
        }

        fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
            Store::acquire(self.inner(), request)
        }

        fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
            Store::release(self.inner(), request)
        }

        fn renew(
            self: Arc<Self>,
            requests: Vec<RenewRequest>,
        ) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
            Store::renew(self.inner(), requests)
        }

        fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
            Box::pin(async move {
                sleep(self.inspects).await;
                Store::inspect(self.inner(), key).await
            })
        }

        fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
            self.surveys.fetch_add(1, Ordering::SeqCst);
            Box::pin(async move {
                let _alone = self.alone.try_lock().expect("one survey at a time");
                assert!(!self.panics.load(Ordering::SeqCst), "the test says so");
                let found = Store::list(self.inner(), prefix).await;
                sleep(self.takes).await;
                found
            })
        }

        fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool> {
            Store::force_release(self.inner(), key)
        }

        fn operations(self: Arc<Self>) -> Option<Arc<dyn Operations>> {
            Store::operations(self.inner())
        }
    }

    fn acting(client: &LockClient, every: Duration) -> Router {
        let console = Console::new(client.clone()).refresh(every).allow_actions(true);
        Router::new().nest_service("/ops/locks", console.router())
    }

    #[test]
    fn action_whose_client_goes_away_is_in_the_log_and_seen_by_the_next_survey() {
        paused(async {
            let log = Log::default();
            let _listening = log.listen();
            let store = Slow {
                inspects: SECOND * 20,
                ..Slow::default()
            };
            let client = store.client().await;
            let app = acting(&client, SECOND * 600);
            let guard = client.lock("k").acquire().await.unwrap();
            let state = json(get(&app, STATE).await).await;
            let token = state["actions"]["token"].as_str().unwrap();
            let holder = &state["locks"][0]["holders"][0]["id"];
            let body = json!({ "key": "k", "holder": holder, "reason": "it burns" });
            let acts = timeout(PATIENCE, send(&app, "break", token, body, &[]));
            assert!(acts.await.is_err(), "the page gives up");
            sleep(SECOND * 60).await;
            assert!(client.inspect("k").await.unwrap().is_none());
            assert_eq!(log.count("the console was told to act action=Break"), 1);
            assert_eq!(json(get(&app, STATE).await).await["locks"], json!([]));
            drop(guard);
        });
    }

    #[test]
    fn survey_is_completed_and_kept_when_its_request_is_dropped() {
        paused(async {
            let store = Slow::new(SECOND * 20);
            let client = store.client().await;
            let app = app(&client);
            let _guard = client.lock("k").acquire().await.unwrap();
            let answer = || timeout(PATIENCE, get(&app, STATE));
            assert!(answer().await.is_err(), "the page gives up");
            let state = json(answer().await.expect("an answer of the same survey")).await;
            assert_eq!(state["locks"][0]["key"], "k");
            sleep(SECOND * 79).await;
            assert_eq!(json(answer().await.unwrap()).await, state, "kept for 80 s");
            assert_eq!(store.surveys(), 1);
            sleep(SECOND * 2).await;
            assert!(answer().await.is_err());
            sleep(SECOND * 30).await;
            timeout(SECOND, get(&app, STATE))
                .await
                .expect("it was completed without a request");
            assert_eq!(store.surveys(), 2);
        });
    }

    #[test]
    fn dropped_console_ends_its_survey_and_lets_the_client_go() {
        paused(async {
            let client = Slow::new(SECOND * 3600).client().await;
            let mut events = client.events();
            let app = app(&client);
            assert!(timeout(PATIENCE, get(&app, STATE)).await.is_err());
            drop((app, client));
            let end = timeout(SECOND * 5, events.next()).await;
            assert!(end.expect("the client is dropped").is_none());
        });
    }

    #[test]
    fn store_that_panics_leaves_the_console_usable() {
        paused(async {
            let store = Slow::new(SECOND);
            let client = store.client().await;
            let app = app(&client);
            let _guard = client.lock("k").acquire().await.unwrap();
            store.panics.store(true, Ordering::SeqCst);
            let survey = state(&app).await;
            assert_eq!(
                survey["unknown"][0]["what"], "the locks of other processes",
                "{survey}"
            );
            assert_eq!(survey["locks"][0]["holders"][0]["is_own"], true, "{survey}");
            let one = json(get(&app, "/ops/locks/api/lock?key=k").await).await;
            assert_eq!(one["holders"][0]["is_own"], true);
            store.panics.store(false, Ordering::SeqCst);
            assert_eq!(state(&app).await["locks"][0]["key"], "k");
        });
    }

    #[tokio::test]
    async fn details_of_a_lock_scan_the_store_no_more_often_than_the_page() {
        let server = Server::start(Flavor::Redis).await;
        let client = LockClient::builder().url(server.url()).build().await.unwrap();
        let app = acting(&client, SECOND * 600);
        let _guard = client.lock("k").acquire().await.unwrap();
        server.forget_commands().await;
        let _ = state(&app).await;
        let scans = async || server.commands().await.get("scan").copied();
        let of_page = scans().await;
        assert!(of_page.is_some());
        for _ in 0..5 {
            let one = json(get(&app, "/ops/locks/api/lock?key=k").await).await;
            assert_eq!(one["holders"][0]["is_own"], true);
        }
        assert_eq!(scans().await, of_page);
    }

    /// Its mailbox would fill.
    #[tokio::test]
    async fn details_of_a_lock_ask_no_client_whose_report_is_overdue() {
        let server = Server::start(Flavor::Redis).await;
        let holder = LockClient::builder()
            .url(server.url())
            .presence(true)
            .control(true);
        let holder = holder.build().await.unwrap();
        let ops = LockClient::builder().url(server.url()).build().await.unwrap();
        let app = app(&ops);
        let _guard = holder.lock("k").acquire().await.unwrap();
        let report = format!("dlock:client:{}", holder.id());
        let state = async || {
            let one = json(get(&app, "/ops/locks/api/lock?key=k").await).await;
            one["holders"][0]["state"].clone()
        };
        eventually("its report is there", async || state().await == "alive").await;
        let is_silent = async || {
            // Its remaining time tells its age.
            server.command(&["PEXPIRE", &report, "3000"]).await;
            state().await == "silent"
        };
        eventually("it is not asked", is_silent).await;
    }

    #[test]
    fn details_of_a_lock_prefer_what_its_holder_says_to_an_older_survey() {
        paused(async {
            let [a, b, ops] = ["a", "b", "ops"].map(|name| client("console-details", name, true));
            let (a, b, ops) = (a.await, b.await, ops.await);
            let app = acting(&ops, SECOND * 600);
            let one = async || json(get(&app, "/ops/locks/api/lock?key=k").await).await;
            let guard = a.lock("k").acquire().await.unwrap();
            let waiter = tokio::spawn(b.lock("k").acquire());
            sleep(SECOND * 8).await;
            let before = one().await;
            assert_eq!(before["holders"][0]["service"], "a");
            assert_eq!(before["waiters"][0]["service"], "b");
            guard.release().await.unwrap();
            let _guard = waiter.await.unwrap().unwrap();
            sleep(SECOND * 8).await;
            let after = one().await;
            assert_eq!(after["holders"][0]["service"], "b");
            assert_eq!(after["waiters"], json!([]));
        });
    }

    #[test]
    fn action_is_answered_during_a_survey_and_seen_by_the_next() {
        paused(async {
            let store = Slow::new(SECOND * 20);
            let client = store.client().await;
            let app = acting(&client, SECOND);
            let _guard = client.lock("k").acquire().await.unwrap();
            let token = json(get(&app, STATE).await).await["actions"]["token"].clone();
            let token = token.as_str().unwrap();
            let holder = client.inspect("k").await.unwrap().unwrap().id;
            sleep(SECOND * 81).await;
            let page = tokio::spawn({
                let app = app.clone();
                async move { json(get(&app, STATE).await).await }
            });
            sleep(SECOND).await;
            let body = json!({ "key": "k", "holder": holder, "reason": "r" });
            let answer = timeout(SECOND, send(&app, "break", token, body, &[])).await;
            assert_eq!(
                answer.expect("it waits for no survey"),
                (200, json!({ "done": true }))
            );
            let after = json(get(&app, STATE).await).await;
            assert_eq!(after["locks"], json!([]));
            assert_eq!(page.await.unwrap()["locks"][0]["key"], "k", "it asked before");
            assert_eq!(store.surveys(), 3);
        });
    }

    #[test]
    fn only_an_action_that_is_carried_out_makes_the_survey_stale() {
        paused(async {
            let store = Slow::new(Duration::ZERO);
            let client = store.client().await;
            let app = acting(&client, SECOND * 600);
            let _guard = client.lock("k").acquire().await.unwrap();
            let token = state(&app).await["actions"]["token"].clone();
            let token = token.as_str().unwrap();
            let holder = client.inspect("k").await.unwrap().unwrap().id;
            let body = json!({ "key": "k", "holder": holder, "reason": "r" });
            for (token, body, status) in [("wrong", body.clone(), 403), (token, json!({}), 400)] {
                assert_eq!(send(&app, "break", token, body, &[]).await.0, status);
                assert_eq!(state(&app).await["locks"][0]["key"], "k");
            }
            assert_eq!(store.surveys(), 1);
            assert_eq!(send(&app, "break", token, body, &[]).await.0, 200);
            assert_eq!(state(&app).await["locks"], json!([]));
            assert_eq!(store.surveys(), 2);
        });
    }
}
