//! The main job on Redis: several copies of the service share locks and stock, and some of them die.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use dlock_tests::bins::{Answer, Checkout, run};
use dlock_tests::faults::{SLACK, in_rounds, within};
use dlock_tests::{Command, Flavor, Proxy, Server, Swallow, eventually};
use futures_util::StreamExt;
use nix::sys::signal::Signal;
use parking_lot::Mutex;
use serde_json::{Value, json};

const RECORD: &str = "checkout:item:sneaker";

async fn server() -> Server {
    Server::start(Flavor::from_env()).await
}

fn copy(server: &Server, args: &[&str]) -> Checkout {
    let url = server.url();
    let mut all = vec!["--locks", &url, "--store", &url];
    all.extend(args);
    Checkout::start(&all)
}

fn count(answers: &[Answer], status: u16) -> usize {
    answers.iter().filter(|answer| answer.status == status).count()
}

fn distinct_tokens(answers: &[Answer]) -> usize {
    answers
        .iter()
        .filter_map(Answer::token)
        .collect::<HashSet<_>>()
        .len()
}

/// 200 buyers, 32 at a time, at the copies in turn.
async fn crowd(copies: &[&Checkout]) -> Vec<Answer> {
    let buys =
        (0..200).map(|n| async move { copies[n % copies.len()].buy("sneaker").await.expect("an answer") });
    futures_util::stream::iter(buys)
        .buffer_unordered(32)
        .collect()
        .await
}

/// The token on the record.
async fn token(server: &Server) -> u64 {
    let record: Option<String> = server.query(&["GET", RECORD]).await;
    let record: Value = serde_json::from_str(&record.unwrap_or_default()).unwrap_or_default();
    record["token"].as_u64().unwrap_or_default()
}

/// Waits until a sale is between its read and its write: its claim stands.
async fn newer_token(server: &Server, than: u64) -> u64 {
    eventually("a sale has claimed its record", async || {
        token(server).await > than
    })
    .await;
    token(server).await
}

#[tokio::test]
async fn two_copies_sell_every_piece_once() {
    let server = server().await;
    let (a, b) = (copy(&server, &[]), copy(&server, &[]));
    a.put("sneaker", 100).await;
    let answers = crowd(&[&a, &b]).await;
    assert_eq!((count(&answers, 201), count(&answers, 409)), (100, 100));
    assert_eq!(distinct_tokens(&answers), 100, "no token twice");
    assert_eq!(b.item("sneaker").await, (0, 100));
    for copy in [&a, &b] {
        assert!(copy.log().contains(" sold "), "both copies sell");
        copy.signal(Signal::SIGINT);
        assert_eq!(copy.ended(Duration::from_secs(5) + SLACK).code(), Some(0));
        assert!(copy.log().contains("nothing held"));
    }
    assert_eq!(
        server.keys().await,
        [RECORD, "checkout:promised:sneaker", "dlock:fence"],
        "nothing but the stock, what was promised of it, and the one fence counter"
    );
}

#[tokio::test]
async fn when_a_copy_is_killed_the_other_goes_on_selling_within_the_lease() {
    let lease = Duration::from_secs(2);
    let server = server().await;
    let (a, b) = (
        copy(&server, &["--lease", "2s"]),
        copy(&server, &["--lease", "2s"]),
    );
    a.put("sneaker", 100).await;
    let sold = Mutex::new(Vec::new());
    let killed: Mutex<Option<Instant>> = Mutex::new(None);
    let broken = Mutex::new(0);
    let buys = (0..200).map(|n| {
        let (a, b, sold, killed, broken) = (&a, &b, &sold, &killed, &broken);
        async move {
            let first = [a, b][n % 2];
            let answer = match first.buy("sneaker").await {
                Ok(answer) => answer,
                Err(_) => {
                    // It may have bought something or not; a buyer without a response comes again.
                    *broken.lock() += 1;
                    b.buy("sneaker").await.expect("the other copy answers")
                }
            };
            if answer.status == 201 {
                let mut sold = sold.lock();
                sold.push(Instant::now());
                if sold.len() == 50 {
                    a.signal(Signal::SIGKILL);
                    *killed.lock() = Some(Instant::now());
                }
            }
            answer
        }
    });
    let answers: Vec<Answer> = futures_util::stream::iter(buys)
        .buffer_unordered(32)
        .collect()
        .await;
    let (sales, sold_out) = (count(&answers, 201), count(&answers, 409));
    let broken = broken.into_inner();
    assert_eq!(sales + sold_out, 200, "every buyer is told the one or the other");
    assert_eq!(b.item("sneaker").await, (0, 100));
    assert!(
        sales <= 100 && sales + broken >= 100,
        "{sales} sold, {broken} told nothing"
    );
    assert_eq!(distinct_tokens(&answers), sales, "no token twice");
    assert!(broken > 0, "the kill came too late to tell anything");
    let killed = killed.into_inner().expect("half of the pieces were sold");
    let sold = sold.into_inner();
    let next = sold
        .iter()
        .find(|at| **at > killed + Duration::from_millis(100))
        .or(sold.last());
    let gap = next.expect("sales go on").saturating_duration_since(killed);
    assert!(gap < lease + SLACK, "the next sale came {gap:?} after the kill");
}

#[tokio::test]
async fn a_retry_at_another_copy_gets_the_answer_of_the_first() {
    let server = server().await;
    let (a, b) = (copy(&server, &[]), copy(&server, &[]));
    a.put("sneaker", 5).await;
    let buy = |shop| Checkout::post_once(shop, "cart-1", "/items/sneaker/buy", json!({ "quantity": 1 }));
    let (first, again) = (buy(&a).await.unwrap(), buy(&b).await.unwrap());
    assert_eq!((first.status, &first.body), (201, &again.body));
    assert!(!first.replayed && again.replayed && b.log().contains("replayed"));
    assert_eq!(b.item("sneaker").await, (4, 1));

    let args = ["--url", a.url(), "--url", b.url(), "--retry-each", "2"];
    let output = run("buyers", &args, Duration::from_secs(60));
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(
        said.contains("told once more      200") && said.contains("not one oversold"),
        "{said}"
    );
    assert_eq!(b.item("sneaker").await, (0, 100));
}

#[tokio::test]
async fn a_copy_stopped_past_its_lease_cannot_write_afterwards() {
    in_rounds("the copy is stopped before it writes", async || {
        let server = server().await;
        let slow = copy(&server, &["--lease", "1s", "--think", "300ms"]);
        let other = copy(&server, &["--lease", "1s"]);
        slow.put("sneaker", 10).await;
        let before = token(&server).await;
        let (late, ()) = tokio::join!(slow.buy("sneaker"), async {
            newer_token(&server, before).await;
            slow.signal(Signal::SIGSTOP);
            let sale = within(Duration::from_millis(2_500), "the sale", other.buy("sneaker")).await;
            assert_eq!(sale.expect("an answer").status, 201);
            slow.signal(Signal::SIGCONT);
        });
        let late = late.expect("an answer");
        if late.status == 201 {
            return Err("it was too late to stop it");
        }
        if late.is_problem(503, "urn:dlock:problem:unavailable") {
            return Err("it was stopped before it had the reply with its lock");
        }
        assert!(late.is_problem(503, "urn:dlock:problem:fenced"), "{late:?}");
        assert!(late.retry_after.is_some());
        assert_eq!(
            slow.item("sneaker").await,
            (9, 1),
            "the late write changed nothing"
        );
        // and the copy is as good as before
        assert_eq!(slow.buy("sneaker").await.unwrap().status, 201);
        assert_eq!(other.buy("sneaker").await.unwrap().status, 201);
        assert_eq!(slow.item("sneaker").await, (7, 3));
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn a_server_that_hangs_or_restarts_is_a_503_for_as_long_as_it_does() {
    let server = server().await;
    let shop = copy(&server, &["--lease", "2s"]);
    shop.put("sneaker", 10).await;
    assert_eq!(shop.buy("sneaker").await.unwrap().status, 201);

    server.stop();
    let started = Instant::now();
    let (buy, look) = tokio::join!(shop.buy("sneaker"), shop.get("/items/sneaker"));
    for answer in [buy.unwrap(), look] {
        assert!(
            answer.is_problem(503, "urn:dlock:problem:unavailable"),
            "{answer:?}"
        );
        assert!(answer.retry_after.is_some());
    }
    assert!(started.elapsed() < SLACK, "{:?}", started.elapsed());
    server.cont();
    eventually("it sells again after the hang", async || {
        shop.buy("sneaker").await.unwrap().status == 201
    })
    .await;

    server.restart().await;
    eventually("it sets stock again after the restart", async || {
        let body = Some(json!({ "stock": 1 }));
        shop.ask(reqwest::Method::PUT, "/items/sneaker", body)
            .await
            .unwrap()
            .status
            == 200
    })
    .await;
    eventually("it sells again after the restart", async || {
        shop.buy("sneaker").await.unwrap().status == 201
    })
    .await;
    assert_eq!(shop.item("sneaker").await, (0, 1));
    assert!(!shop.log().contains("panicked"), "{}", shop.log());
}

#[tokio::test]
async fn a_write_that_is_not_confirmed_is_never_told_as_a_sale() {
    let server = server().await;
    for then in [Swallow::Hang, Swallow::Cut] {
        let proxy = Proxy::start(server.addr());
        let (locks, store) = (server.url(), proxy.url());
        let shop = Checkout::start(&["--locks", &locks, "--store", &store]);
        shop.put("sneaker", 10).await;
        // the first sale makes both scripts known to the server
        assert_eq!(shop.buy("sneaker").await.unwrap().status, 201);
        let write = |command: &Command| command.is_script() && command.mentions("\"sold\":2");
        let fault = proxy.swallow(1, then, write);
        let answer = shop.buy("sneaker").await.unwrap();
        assert!(fault.fired());
        assert!(
            answer.is_problem(503, "urn:checkout:problem:outcome-unknown"),
            "{then:?}: {answer:?}"
        );
        // Sent again at once, it might be a second sale.
        assert_eq!(answer.retry_after, None);
        assert!(
            answer.body["detail"]
                .as_str()
                .is_some_and(|detail| detail.contains("may or may not"))
        );
        // it was written all the same, and the next sale goes on from there, over a new connection
        assert_eq!(shop.item("sneaker").await, (8, 2));
        assert_eq!(shop.buy("sneaker").await.unwrap().status, 201);
        assert_eq!(shop.item("sneaker").await, (7, 3));
    }
}

#[tokio::test]
async fn it_ends_in_bounded_time_while_the_server_hangs() {
    in_rounds("the server hangs before the sale is written", async || {
        let server = server().await;
        let shop = copy(&server, &["--lease", "2s", "--think", "1s"]);
        shop.put("sneaker", 10).await;
        let before = token(&server).await;
        let (answer, ()) = tokio::join!(shop.buy("sneaker"), async {
            newer_token(&server, before).await;
            server.stop();
            shop.signal(Signal::SIGTERM);
            assert_eq!(shop.ended(Duration::from_secs(15) + SLACK).code(), Some(0));
        });
        match answer {
            Ok(answer) if answer.status == 201 => Err("it was too late to hang"),
            Ok(answer) => {
                assert_eq!(answer.status, 503);
                Ok(())
            }
            Err(_) => Ok(()),
        }
    })
    .await;
}
