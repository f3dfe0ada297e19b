//! The main job on memory: the service a newcomer starts first.

use std::net::TcpListener;
use std::process::Command;
use std::time::{Duration, Instant};
use std::{env, path::Path};

use dlock_tests::bins::{Answer, Checkout, example, run};
use dlock_tests::faults::{SLACK, in_rounds};
use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::{Value, json};

const BAD: &str = "urn:checkout:problem:bad-request";

/// Lets `buyers` buy, `at_once` at a time.
async fn crowd(shop: &Checkout, buyers: usize, at_once: usize) -> Vec<Answer> {
    use futures_util::StreamExt;
    let buys = (0..buyers).map(|_| async { shop.buy("sneaker").await.expect("an answer") });
    futures_util::stream::iter(buys)
        .buffer_unordered(at_once)
        .collect()
        .await
}

fn count(answers: &[Answer], status: u16) -> usize {
    answers.iter().filter(|answer| answer.status == status).count()
}

/// The text of a failed start: one line, told by the program and not by a panic.
fn refusal(args: &[&str]) -> String {
    let output = run("checkout", args, Duration::from_secs(60));
    let error = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(
        matches!(output.status.code(), Some(1 | 2)),
        "{args:?}: {:?}: {error}",
        output.status
    );
    assert!(
        !error.contains("panicked") && !error.contains("hunter2"),
        "{args:?}: {error}"
    );
    error
}

#[tokio::test]
async fn an_article_is_set_looked_at_and_sold_out() {
    let shop = Checkout::start(&[]);
    let set = shop
        .ask(Method::PUT, "/items/sneaker", Some(json!({ "stock": 3 })))
        .await
        .unwrap();
    assert_eq!(
        (set.status, set.body),
        (200, json!({ "sku": "sneaker", "stock": 3, "sold": 0 }))
    );

    let two = shop.post("/items/sneaker/buy", json!({ "quantity": 2 })).await;
    assert_eq!(two.status, 201);
    let order = two.body["order"].as_str().expect("an order").to_owned();
    assert!(
        !order.is_empty() && two.token().is_some_and(|token| token > 0),
        "{two:?}"
    );
    assert_eq!(two.body.as_object().map(serde_json::Map::len), Some(2));
    assert_eq!(shop.item("sneaker").await, (1, 2));

    let too_many = shop.post("/items/sneaker/buy", json!({ "quantity": 2 })).await;
    assert!(
        too_many.is_problem(409, "urn:checkout:problem:sold-out"),
        "{too_many:?}"
    );
    let last = shop.buy("sneaker").await.unwrap();
    assert_eq!(last.status, 201);
    assert!(last.token() > two.token() && last.body["order"] != order);
    assert!(
        shop.buy("sneaker")
            .await
            .unwrap()
            .is_problem(409, "urn:checkout:problem:sold-out")
    );
    assert_eq!(shop.item("sneaker").await, (0, 3));

    shop.put("sneaker", 5).await;
    assert_eq!(shop.item("sneaker").await, (5, 0));
    let said = shop.log();
    assert_eq!(said.matches(" sold ").count(), 2, "one line per sale:\n{said}");
    assert!(said.contains(&order) && said.contains("waited="), "{said}");
}

#[tokio::test]
async fn bad_input_is_a_problem_and_never_more_than_that() {
    let shop = Checkout::start(&[]);
    shop.put("sneaker", 10).await;
    for quantity in [
        json!(0),
        json!(-1),
        json!(1_000_001),
        json!(u64::MAX),
        json!(1e300),
        json!(1.5),
        json!("one"),
        json!(null),
        json!([1]),
    ] {
        let answer = shop
            .post("/items/sneaker/buy", json!({ "quantity": quantity }))
            .await;
        assert!(answer.is_problem(400, BAD), "{quantity}: {answer:?}");
    }
    let long = "x".repeat(10_000);
    let paths = [
        "a%7Bb",
        "a%7D",
        "%00",
        "a%0Ab",
        "%FF",
        "%F0%9F%A6%80%7F",
        &long, //
    ];
    for name in paths {
        for (path, body) in [
            (format!("/items/{name}/buy"), json!({ "quantity": 1 })),
            (format!("/accounts/{name}/charge"), json!({ "amount": 1 })),
        ] {
            let answer = shop.post(&path, body).await;
            let told = [BAD, "urn:dlock:problem:invalid-key"];
            assert!(
                told.iter().any(|kind| answer.is_problem(400, kind)),
                "{path:.40}: {answer:?}"
            );
        }
        assert!(
            shop.get(&format!("/items/{name}")).await.is_problem(400, BAD),
            "{name:.40}"
        );
    }
    for (path, body) in [
        ("/items/sneaker/buy", json!({})),
        ("/items/sneaker/buy", json!([])),
        ("/accounts/ada/charge", json!({ "amount": 0 })),
        ("/accounts/ada/charge", json!({ "amount": -5 })),
    ] {
        assert!(
            shop.post(path, body.clone()).await.is_problem(400, BAD),
            "{path} {body}"
        );
    }
    for stock in [json!(-1), json!(u64::MAX), json!("many")] {
        let answer = shop
            .ask(Method::PUT, "/items/sneaker", Some(json!({ "stock": stock })))
            .await
            .unwrap();
        assert!(answer.is_problem(400, BAD), "{stock}: {answer:?}");
    }
    for hold in ["x", "-1", "60001", "99999999999999999999", ""] {
        let answer = shop.get(&format!("/lock?hold_ms={hold}")).await;
        assert!(answer.is_problem(400, BAD), "{hold}: {answer:?}");
    }
    let answer = shop.buy("nothing").await.unwrap();
    assert!(
        answer.is_problem(404, "urn:checkout:problem:unknown-sku"),
        "{answer:?}"
    );
    assert!(
        shop.get("/items/nothing")
            .await
            .is_problem(404, "urn:checkout:problem:unknown-sku")
    );
    assert!(shop.get("/nowhere").await.is_problem(404, "about:blank"));
    assert!(
        shop.get("/items/sneaker/buy")
            .await
            .is_problem(405, "about:blank")
    );

    let client = reqwest::Client::new();
    let broken = client.post(format!("{}/items/sneaker/buy", shop.url()));
    let broken = broken
        .header("content-type", "application/json")
        .body("{\"quantity\": 1")
        .send()
        .await
        .unwrap();
    assert_eq!(broken.status(), 400);
    assert_eq!(broken.headers()["content-type"], "application/problem+json");
    let untyped = client
        .post(format!("{}/items/sneaker/buy", shop.url()))
        .body("{}")
        .send()
        .await
        .unwrap();
    assert_eq!(untyped.status(), 415);
    assert_eq!(untyped.headers()["content-type"], "application/problem+json");

    assert_eq!(shop.item("sneaker").await, (10, 0), "nothing was done");
    assert!(!shop.log().contains("panicked"), "{}", shop.log());
}

/// Sees two run at a time that take a second each.
async fn at_a_time(two: impl AsyncFn()) {
    in_rounds("both at a time", async || {
        let started = Instant::now();
        two().await;
        let took = started.elapsed();
        if took < Duration::from_millis(1_900) {
            Ok(())
        } else {
            Err(took)
        }
    })
    .await;
}

#[tokio::test]
async fn without_locks_a_crowd_buys_more_than_there_is() {
    for think in ["5ms", "0"] {
        let shop = Checkout::start(&["--without-locks", "--think", think]);
        let round = async || {
            shop.put("sneaker", 100).await;
            let answers = crowd(&shop, 200, 32).await;
            match count(&answers, 201) {
                101.. => Ok(answers),
                sold => Err(sold),
            }
        };
        let answers = in_rounds("more are sold than there are", round).await;
        assert!(
            answers
                .iter()
                .all(|answer| answer.body.get("fencing_token").is_none_or(Value::is_null))
        );
        assert!(shop.log().contains("WITHOUT LOCKS"));
    }
    let shop = Checkout::start(&["--without-locks"]);
    at_a_time(async || {
        let (a, b) = tokio::join!(shop.get("/lock?hold_ms=1000"), shop.get("/lock?hold_ms=1000"));
        assert_eq!((a.status, b.status), (200, 200));
    })
    .await;
}

#[tokio::test]
async fn the_buyers_program_gives_the_verdict() {
    for (args, verdict, code) in [
        (vec![], "not one oversold", 0),
        (vec!["--without-locks"], "OVERSOLD by", 1),
    ] {
        let shop = Checkout::start(&args);
        let output = run("buyers", &["--url", shop.url()], Duration::from_secs(60));
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains(verdict) && said.contains("200 buyers"), "{said}");
        assert_eq!(output.status.code(), Some(code), "{said}");
    }
    let nobody = run(
        "buyers",
        &["--url", "http://127.0.0.1:9"],
        Duration::from_secs(20),
    );
    assert_eq!(nobody.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&nobody.stderr).contains("no checkout answers"));
}

#[tokio::test]
async fn the_page_is_one_document_and_what_is_unsafe_is_there_in_demo_mode_only() {
    for args in [&[][..], &["--demo"]] {
        let shop = Checkout::start(args);
        let demo = !args.is_empty();
        let page = reqwest::get(shop.url()).await.unwrap();
        assert_eq!(page.status(), 200);
        assert_eq!(page.headers()["content-type"], "text/html; charset=utf-8");
        let policy = page.headers()["content-security-policy"].to_str().unwrap();
        assert!(
            policy.contains("default-src 'none'") && policy.contains("connect-src 'self'"),
            "{policy}"
        );
        let html = page.text().await.unwrap();
        assert!(html.starts_with("<!doctype html>") && html.contains("Buy 50 at once"));
        assert!(!html.contains("http://") && !html.contains("https://") && !html.contains(" src="));
        assert_eq!(html.contains("without locks") || html.contains("/demo/"), demo);
        assert_eq!(shop.log().contains("DEMO"), demo);

        let one = json!({ "quantity": 1 });
        let set = shop
            .ask(Method::PUT, "/demo/stock", Some(json!({ "stock": 20 })))
            .await
            .unwrap();
        let answers = [
            shop.post("/demo/crowd", json!({ "buyers": 50 })).await,
            shop.post("/demo/buy", one.clone()).await,
            shop.post("/demo/buy-without-key", one.clone()).await,
        ];
        if demo {
            assert_eq!(
                (set.status, set.body["sku"].as_str()),
                (200, Some("sneaker-unsafe"))
            );
            assert_eq!(answers.each_ref().map(|answer| answer.status), [200, 201, 201]);
            assert_eq!(answers[0].body["sold"], 50, "it oversells");
            assert!(answers[1].token().is_none() && answers[2].token().is_some());
            // the key is not looked at, and the article that is sold rightly is another one
            for _ in 0..2 {
                let twice = shop
                    .post_once("cart-1", "/demo/buy-without-key", one.clone())
                    .await
                    .unwrap();
                assert!(twice.status == 201 && !twice.replayed);
            }
            assert_eq!(shop.get("/items/sneaker").await.status, 404);
        } else {
            assert!(
                [&set]
                    .into_iter()
                    .chain(&answers)
                    .all(|answer| answer.is_problem(404, "about:blank"))
            );
        }
    }
}

#[tokio::test]
async fn it_ends_cleanly_on_ctrl_c_and_on_sigterm() {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        in_rounds("a sale under way is finished", async || {
            let shop = Checkout::start(&["--think", "300ms"]);
            shop.put("sneaker", 1).await;
            let (sale, ()) = tokio::join!(shop.buy("sneaker"), async {
                tokio::time::sleep(Duration::from_millis(100)).await;
                shop.signal(signal);
            });
            assert_eq!(shop.ended(SLACK).code(), Some(0));
            let said = shop.log();
            assert!(
                said.contains("nothing held") && !said.contains("will be cut off"),
                "{said}"
            );
            // Or it had not even arrived.
            let sale = sale.map_err(|error| error.to_string())?;
            assert_eq!(sale.status, 201);
            Ok::<_, String>(())
        })
        .await;
    }
}

#[tokio::test]
async fn sale_whose_client_has_gone_has_the_same_time_to_end() {
    in_rounds("the sale is under way when the service ends", async || {
        let shop = Checkout::start(&["--think", "2s"]);
        shop.put("sneaker", 1).await;
        let sale = shop.post_once("k", "/items/sneaker/buy", json!({ "quantity": 1 }));
        let gone = tokio::time::timeout(Duration::from_millis(300), sale).await;
        assert!(gone.is_err(), "{gone:?}");
        shop.signal(Signal::SIGTERM);
        assert_eq!(shop.ended(SLACK).code(), Some(0));
        let said = shop.log();
        assert!(!said.contains("cut off"), "{said}");
        // Or the service was too slow to begin it.
        said.contains("sold").then_some(()).ok_or(said)
    })
    .await;
}

#[test]
fn a_port_that_is_taken_is_said_in_one_line() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let error = refusal(&["--listen", &address]);
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(
        error.contains(&address) && error.contains("another program") && error.contains("--listen"),
        "{error}"
    );
}

#[test]
fn bad_arguments_are_said_clearly_and_without_the_password() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let nobody = format!("redis://:hunter2@{closed}");
    for (args, says) in [
        (["--locks", "reids://:hunter2@localhost"], "did you mean"),
        (["--locks", "hunter2"], "scheme"),
        (["--locks", &nobody], "--locks"),
        (["--store", "reids://:hunter2@localhost"], "--store"),
        (["--store", "hunter2"], "scheme"),
        (["--store", "redis://:hunter2@"], "--store"),
        (["--store", &nobody], "--store"),
        (["--lease", "0s"], "lease"),
        (["--lease", "1ms"], "lease"),
        (["--lease", "10"], "unit"),
        (["--lease", "9000years"], "lease"),
        (["--think", "2min"], "1min"),
        (["--listen", "nonsense"], "--listen"),
    ] {
        let all = ["--listen", "127.0.0.1:0"].iter().chain(&args).copied();
        let args: Vec<&str> = if args[0] == "--listen" {
            args.to_vec()
        } else {
            all.collect()
        };
        let error = refusal(&args);
        assert!(error.contains(says), "{args:?}: {error}");
        // clap shows the usage below its own errors
        let clap = error.starts_with("error: ");
        assert!(clap || error.lines().count() == 1, "{args:?}: {error}");
    }
}

#[test]
fn its_default_features_build_no_database_tls_or_browser_code() {
    // builds it, and so tells whether it builds at all
    example("checkout");
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let tree = Command::new(cargo)
        .current_dir(workspace)
        .args([
            "tree",
            "-p",
            "dlock-examples",
            "-e",
            "normal,build",
            "--prefix",
            "none",
            "--no-dedupe",
        ])
        .output()
        .expect("cargo can be started");
    let tree = String::from_utf8(tree.stdout).unwrap();
    assert!(tree.lines().any(|line| line.starts_with("axum ")), "{tree}");
    let unwanted = [
        "sqlx",
        "tokio-postgres",
        "diesel",
        "rusqlite",
        "rustls",
        "native-tls",
        "openssl",
        "ring ",
        "aws-lc",
        "schannel",
        "wasm-bindgen",
        "web-sys",
        "js-sys",
        "h2 ",
    ];
    let found: Vec<&str> = tree
        .lines()
        .filter(|line| unwanted.iter().any(|name| line.starts_with(name)))
        .collect();
    assert!(found.is_empty(), "{found:?}");
}
