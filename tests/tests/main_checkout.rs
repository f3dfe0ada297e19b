//! The main job on memory: the service a newcomer starts first.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};
use std::{env, path::Path};

use dlock_tests::bins::{Answer, Checkout, example, run};
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
    let output = run("checkout", args, Duration::from_secs(8));
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

#[tokio::test]
async fn charges_of_an_account_come_one_after_another() {
    let shop = Checkout::start(&["--think", "10ms"]);
    let charges = (0..20).map(|_| shop.post("/accounts/ada/charge", json!({ "amount": 5 })));
    let answers = futures_util::future::join_all(charges).await;
    let mut tokens: Vec<u64> = answers
        .iter()
        .map(|answer| answer.token().expect("a token"))
        .collect();
    let mut charged: Vec<u64> = answers
        .iter()
        .map(|answer| answer.body["charged"].as_u64().expect("an amount"))
        .collect();
    tokens.sort_unstable();
    tokens.dedup();
    charged.sort_unstable();
    assert!(
        answers
            .iter()
            .all(|answer| answer.status == 201 && answer.body["account"] == "ada")
    );
    assert_eq!(tokens.len(), 20);
    assert_eq!(charged, (1..=20).map(|n| n * 5).collect::<Vec<u64>>());
}

#[tokio::test]
async fn two_accounts_do_not_wait_for_each_other() {
    let shop = Checkout::start(&["--think", "1s"]);
    let started = Instant::now();
    let amount = json!({ "amount": 5 });
    let (ada, bob) = tokio::join!(
        shop.post("/accounts/ada/charge", amount.clone()),
        shop.post("/accounts/bob/charge", amount)
    );
    assert_eq!((ada.status, bob.status), (201, 201));
    assert!(
        started.elapsed() < Duration::from_millis(1_900),
        "{:?}",
        started.elapsed()
    );
}

#[tokio::test]
async fn holding_the_lock_twice_at_once_takes_twice_as_long() {
    let shop = Checkout::start(&[]);
    let started = Instant::now();
    let (a, b) = tokio::join!(shop.get("/lock?hold_ms=400"), shop.get("/lock?hold_ms=400"));
    assert_eq!((a.status, b.status), (200, 200));
    assert_ne!(a.token(), b.token());
    let took = started.elapsed();
    assert!(
        (Duration::from_millis(800)..Duration::from_secs(2)).contains(&took),
        "{took:?}"
    );

    // longer than the time after which a lock layer would answer that somebody else has it
    let started = Instant::now();
    let queue = futures_util::future::join_all((0..7).map(|_| shop.get("/lock?hold_ms=1000"))).await;
    assert!(queue.iter().all(|answer| answer.status == 200), "{queue:?}");
    assert!(started.elapsed() >= Duration::from_secs(7));
}

#[tokio::test]
async fn a_crowd_buys_every_piece_once() {
    let shop = Checkout::start(&[]);
    shop.put("sneaker", 100).await;
    let answers = crowd(&shop, 200, 32).await;
    let mut tokens: Vec<u64> = answers.iter().filter_map(Answer::token).collect();
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(
        (count(&answers, 201), count(&answers, 409), tokens.len()),
        (100, 100, 100)
    );
    assert_eq!(shop.item("sneaker").await, (0, 100));
}

#[tokio::test]
async fn without_locks_a_crowd_buys_more_than_there_is() {
    for think in ["5ms", "0"] {
        let shop = Checkout::start(&["--without-locks", "--think", think]);
        shop.put("sneaker", 100).await;
        let answers = crowd(&shop, 200, 32).await;
        assert!(
            count(&answers, 201) > 100,
            "thinking for {think}: the demonstration proves nothing"
        );
        assert!(
            answers
                .iter()
                .all(|answer| answer.body.get("fencing_token").is_none_or(Value::is_null))
        );
        assert!(shop.log().contains("WITHOUT LOCKS"));
    }
    let shop = Checkout::start(&["--without-locks"]);
    let started = Instant::now();
    let (a, b) = tokio::join!(shop.get("/lock?hold_ms=1000"), shop.get("/lock?hold_ms=1000"));
    assert_eq!((a.status, b.status), (200, 200));
    assert!(started.elapsed() < Duration::from_millis(1_900));
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
async fn it_ends_cleanly_on_ctrl_c_and_on_sigterm() {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let shop = Checkout::start(&["--think", "300ms"]);
        shop.put("sneaker", 1).await;
        let (sale, ()) = tokio::join!(shop.buy("sneaker"), async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            shop.signal(signal);
        });
        assert_eq!(
            sale.expect("an answer").status,
            201,
            "a sale under way is finished"
        );
        assert_eq!(shop.ended(Duration::from_secs(2)).code(), Some(0));
        assert!(shop.log().contains("nothing held"), "{}", shop.log());
    }
}

#[tokio::test]
async fn neither_an_open_connection_nor_a_long_request_keeps_it_from_ending() {
    let shop = Checkout::start(&[]);
    let address = shop.url().trim_start_matches("http://");
    let mut half = TcpStream::connect(address).unwrap();
    half.write_all(b"POST /items/sneaker/buy HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n")
        .unwrap();
    let (holder, waiter, ()) = tokio::join!(
        shop.ask(Method::GET, "/lock?hold_ms=60000", None),
        shop.ask(Method::GET, "/lock?hold_ms=60000", None),
        async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            shop.signal(Signal::SIGINT);
            let wait = shop.ended(Duration::from_secs(10));
            assert_eq!(wait.code(), Some(0));
        }
    );
    assert!(holder.is_err() || holder.is_ok_and(|answer| answer.status == 503));
    assert!(waiter.is_err() || waiter.is_ok_and(|answer| answer.status == 503));
    assert!(shop.log().contains("nothing held"), "{}", shop.log());
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
fn the_help_explains_itself() {
    let output = run("checkout", &["--help"], Duration::from_secs(10));
    let help = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0));
    for part in [
        "--listen",
        "--locks",
        "--store",
        "--lease",
        "--think",
        "--without-locks",
        "127.0.0.1:3000",
        "5ms",
        "Examples:",
        "curl",
        "RUST_LOG",
        "Ctrl-C",
    ] {
        assert!(help.contains(part), "{part} is missing:\n{help}");
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
