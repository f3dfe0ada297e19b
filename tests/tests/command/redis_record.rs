//! `dlock record`: what is kept of work that is done once, or of a request, is found by its name and forgotten.

use std::convert::Infallible;
use std::process::Output;

use bytes::Bytes;
use dlock_tests::faults::{PATIENCE, patient};
use dlock_tests::{Flavor, Running, Server, bins, child};
use dlock_tower::IdempotencyLayer;
use dlock_tower::idempotency::Caller;
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use tower::{Layer, ServiceExt, service_fn};

async fn dlock(url: &str, args: &[&str]) -> Output {
    let mut command = child::command(bins::dlock());
    command.args(["--url", url, "record"]).args(args);
    let output = tokio::task::spawn_blocking(move || bins::output(command, PATIENCE));
    output.await.unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("{output:?}"))
}

fn text(output: &Output) -> String {
    String::from_utf8([&output.stdout[..], &output.stderr].concat()).unwrap()
}

async fn object(url: &str, args: &[&str]) -> (i32, Value) {
    let output = dlock(url, &[args, &["--json"]].concat()).await;
    let object = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    (code(&output), object)
}

#[tokio::test]
async fn result_of_work_is_shown_and_forgotten_by_its_name() {
    let server = Server::start(Flavor::from_env()).await;
    let url = server.url();
    let client = patient(&url).await;
    let report = async |rows: u64| {
        let reply = client
            .once("report:7")
            .run(async |_| Ok::<_, Infallible>(rows))
            .await;
        reply.unwrap().into_result()
    };
    let (status, none) = object(&url, &["show", "report:7"]).await;
    assert_eq!((status, &none["state"]), (1, &Value::Null), "{none}");
    assert_eq!(
        code(&dlock(&url, &["forget", "report:7", "--reason", "x"]).await),
        1
    );

    assert_eq!(report(42).await, Some(42));
    let (status, shown) = object(&url, &["show", "report:7", "--result"]).await;
    assert_eq!(
        (status, &shown["state"], &shown["attempt"], &shown["result"]),
        (0, &"completed".into(), &1.into(), &42.into()),
        "{shown}"
    );
    assert!(shown["expires_in_ms"].as_u64().unwrap() > 80_000_000, "{shown}");
    let record = shown["record"].as_str().unwrap();
    let (_, raw) = object(&url, &["show", "--raw", record]).await;
    assert_eq!(
        (&raw["token"], &raw["result"]),
        (&shown["token"], &Value::Null),
        "{raw}"
    );
    let line = text(&dlock(&url, &["show", "report:7"]).await);
    assert!(
        line.starts_with("report:7  ended, ") && !line.contains("result: 42"),
        "{line}"
    );

    // Without a reason nothing happens.
    let no_reason = dlock(&url, &["forget", "report:7"]).await;
    assert!(
        code(&no_reason) == 2 && text(&no_reason).contains("--reason"),
        "{no_reason:?}"
    );
    let empty = dlock(&url, &["forget", "report:7", "--reason", " "]).await;
    assert!(code(&empty) == 2 && text(&empty).contains("E0016"), "{empty:?}");
    assert_eq!(report(43).await, Some(42));
    let forget = ["forget", "report:7", "--reason", "wrong month", "--by", "anna"];
    let (status, done) = object(&url, &forget).await;
    assert_eq!((status, &done["outcome"]), (0, &"forgotten".into()), "{done}");
    assert_eq!(report(44).await, Some(44));
    let audit: Vec<redis::Value> = server.query(&["XRANGE", "dlock:audit", "-", "+"]).await;
    let audit = format!("{:?}", audit.last());
    for field in ["forget", record, "anna", "wrong month"] {
        assert!(audit.contains(field), "{field} is missing in {audit}");
    }
    server.command(&["DEL", "dlock:audit"]).await;
    server.command(&["SET", "dlock:audit", "no stream"]).await;
    let refused = dlock(&url, &forget).await;
    assert!(
        code(&refused) == 2 && text(&refused).contains("audit log"),
        "{refused:?}"
    );
    assert_eq!(report(45).await, Some(44), "what is not written down is not done");
    let unaudited = dlock(&url, &[&forget[..], &["--no-audit"]].concat()).await;
    assert_eq!(code(&unaudited), 0, "{unaudited:?}");
}

#[tokio::test]
async fn attempt_in_progress_is_shown_and_not_forgotten() {
    let server = Server::start(Flavor::from_env()).await;
    let url = format!("{}?lease=300s&timeout=20s&retry_for=60s", server.url());
    let script = "echo \"$DLOCK_SLOT\"; read line";
    let running = Running::script(&url, &["--every", "1h", "poll"], script);
    running.says("\n").await;
    let (status, shown) = object(&url, &["show", "poll"]).await;
    assert_eq!((status, &shown["state"]), (0, &"claimed".into()), "{shown}");
    assert_eq!(shown["slot"], running.said().trim());
    assert!(shown["lease_left_ms"].as_u64().unwrap() > 0, "{shown}");
    let forget = dlock(&url, &["forget", "poll", "--reason", "x"]).await;
    assert!(
        code(&forget) == 3 && text(&forget).contains("in progress"),
        "{forget:?}"
    );
    assert_eq!(object(&url, &["show", "poll"]).await.1["token"], shown["token"]);
    running.write(b"\n");
    assert_eq!(running.all_ended().await.status.code(), Some(0));
    let (_, shown) = object(&url, &["show", "poll", "--result"]).await;
    assert!(shown["result"]["host"].is_string(), "who did it: {shown}");
}

/// A wrong answer that is kept: the retries of a customer get it until it is forgotten.
#[tokio::test]
async fn wrong_answer_to_a_request_is_found_by_its_key_and_forgotten() {
    let server = Server::start(Flavor::from_env()).await;
    let url = server.url();
    let client = patient(&url).await;
    let caller = |parts: &Parts| {
        parts
            .headers
            .get("x-user")
            .map(|user| Caller::new(user.as_bytes()))
    };
    let price = std::sync::atomic::AtomicU32::new(0);
    let price = std::sync::Arc::new(price);
    let orders = service_fn(move |_: Request<Full<Bytes>>| {
        let price = price.fetch_add(10, std::sync::atomic::Ordering::Relaxed);
        let response = Response::builder()
            .status(StatusCode::CREATED)
            .header("location", "/orders/1")
            .body(Full::<Bytes>::from(format!("{price} EUR")));
        async move { Ok::<_, Infallible>(response.unwrap()) }
    });
    let layer = IdempotencyLayer::new(
        client.records().unwrap(),
        dlock_tower::idempotency::caller::from_fn(caller),
    )
    .namespace("shop")
    .per_host();
    let service = layer.layer(orders);
    let buy = async || {
        let request = Request::post("/orders?coupon=x")
            .header("host", "Shop.Example")
            .header("x-user", "user-7")
            .header("idempotency-key", "\"cart 42\"")
            .body(Full::default());
        let response = service.clone().oneshot(request.unwrap()).await.unwrap();
        let replayed = response.headers().contains_key("idempotent-replayed");
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (String::from_utf8(body.to_vec()).unwrap(), replayed)
    };
    assert_eq!(buy().await, ("0 EUR".to_owned(), false));
    assert_eq!(buy().await, ("0 EUR".to_owned(), true));

    let name = [
        "cart 42",
        "--path",
        "/orders",
        "--caller",
        "user-7",
        "--namespace",
        "shop",
        "--host",
        "shop.example",
    ];
    let (status, shown) = object(&url, &[&["show", "--result"], &name[..]].concat()).await;
    assert_eq!(status, 0, "{shown}");
    let answer = json!({ "status": 201, "headers": [["location", "/orders/1"]], "body": "0 EUR" });
    assert_eq!(shown["result"], answer);
    // Of another caller, path or method there is none.
    for other in [
        ["--caller", "user-8", "--path", "/orders"],
        ["--caller", "user-7", "--path", "/order"],
        ["--caller", "user-7", "--route", "/orders"],
    ] {
        let rest = ["--namespace", "shop", "--host", "shop.example"];
        let (status, none) = object(&url, &[&["show", "cart 42"], &other[..], &rest].concat()).await;
        assert_eq!(status, 1, "{other:?}: {none}");
    }
    let forgotten = dlock(
        &url,
        &[&["forget", "--reason", "price was 0"], &name[..]].concat(),
    )
    .await;
    assert_eq!(code(&forgotten), 0, "{forgotten:?}");
    assert_eq!(buy().await, ("10 EUR".to_owned(), false));
}
