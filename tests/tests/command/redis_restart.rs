//! A rolling restart of the shop under load, as docs/kubernetes.md has it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use dlock::DEFAULT_RETRY_FOR;
use dlock_tests::bins::Checkout;
use dlock_tests::faults::SLACK;
use dlock_tests::{Flavor, Server};
use nix::sys::signal::Signal;
use parking_lot::RwLock;
use reqwest::Method;
use serde_json::json;

const PAGE: &str = include_str!("../../../docs/kubernetes.md");
/// Longer than anything here may take by itself.
const LEASE: Duration = Duration::from_secs(120);
const BUYERS: usize = 9;

/// The copies that requests are sent to.
type Routes = Arc<RwLock<Vec<Arc<Checkout>>>>;

fn copy(server: &Server, more: &[&str]) -> Arc<Checkout> {
    let (url, lease) = (server.url(), format!("{}s", LEASE.as_secs()));
    let mut args = vec!["--locks", &url, "--store", &url, "--lease", &lease];
    args.extend(["--think", "10ms", "--leave-after", "300ms"]);
    args.extend(more);
    Arc::new(Checkout::start(&args))
}

/// One request as a client behind a load balancer has it: refused by a copy that leaves, it goes to the next one.
async fn buy(routes: &Routes, turn: usize) -> u16 {
    let mut at = turn;
    loop {
        let copy = {
            let routes = routes.read();
            routes[at % routes.len()].clone()
        };
        let answer = copy
            .ask(Method::POST, "/items/sneaker/buy", Some(json!({ "quantity": 1 })))
            .await;
        match answer {
            Ok(answer) if answer.status != 503 => return answer.status,
            // It leaves; what its answer lost may have been sold.
            _ => at += 1,
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_waits_for_a_lease_when_three_processes_are_restarted_in_turn() {
    let server = Server::start(Flavor::from_env()).await;
    let routes: Routes = Routes::default();
    for _ in 0..3 {
        routes.write().push(copy(&server, &[]));
    }
    let first = routes.read()[0].clone();
    first.put("sneaker", 1_000_000).await;
    let (stop, served) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let buyers: Vec<_> = (0..BUYERS)
        .map(|buyer| {
            let (routes, stop, served) = (routes.clone(), stop.clone(), served.clone());
            tokio::spawn(async move {
                let (mut longest, mut turn) = (Duration::ZERO, buyer);
                while !stop.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    assert_eq!(buy(&routes, turn).await, 201);
                    longest = longest.max(begun.elapsed());
                    served.fetch_add(1, Ordering::Relaxed);
                    turn += 1;
                }
                longest
            })
        })
        .collect();
    for at in 0..3 {
        // Under load before each of them leaves.
        let before = served.load(Ordering::Relaxed);
        dlock_tests::eventually("requests are served", async || {
            served.load(Ordering::Relaxed) > before + 20
        })
        .await;
        let leaving = routes.read()[at].clone();
        leaving.signal(Signal::SIGTERM);
        dlock_tests::eventually("it is not ready any more", async || {
            let ready = leaving.ask(Method::GET, "/ready", None).await;
            ready.is_err() || ready.is_ok_and(|answer| answer.status == 503)
        })
        .await;
        let comes = copy(&server, &[]);
        routes.write()[at] = comes.clone();
        let status = tokio::task::spawn_blocking(move || {
            let ended = leaving.ended(Duration::from_secs(10) + SLACK);
            assert!(leaving.log().contains("nothing held"), "{}", leaving.log());
            ended
        });
        assert_eq!(status.await.expect("it ended").code(), Some(0));
        let ready = comes.ask(Method::GET, "/ready", None).await.expect("an answer");
        assert_eq!(ready.status, 200);
    }
    stop.store(true, Ordering::Relaxed);
    for buyer in buyers {
        let longest = buyer.await.expect("a buyer");
        assert!(
            longest < LEASE / 4,
            "a request waited {longest:?}: for the lease of a process that left"
        );
    }
}

#[tokio::test]
async fn live_and_ready_answer_while_a_lock_is_waited_for_and_while_the_store_is_away() {
    let server = Server::start(Flavor::from_env()).await;
    let copy = copy(&server, &[]);
    let holds = copy.ask(Method::GET, "/lock?hold_ms=60000", None);
    let waits = async {
        dlock_tests::eventually("the lock is held", async || {
            let live = copy.ask(Method::GET, "/live", None).await.expect("an answer");
            live.body["held"] == 1
        })
        .await;
        server.kill();
        let ready = copy.ask(Method::GET, "/ready", None).await.expect("an answer");
        let live = copy.ask(Method::GET, "/live", None).await.expect("an answer");
        assert_eq!((ready.status, live.status), (200, 200));
        assert!(
            live.body["least_lease_left_ms"].as_u64().is_some(),
            "{}",
            live.body
        );
        assert!(live.body["last_reply_ms"].as_u64().is_some(), "{}", live.body);
    };
    tokio::select! {
        _ = holds => panic!("the lock is held for a minute"),
        () = waits => {}
    }
}

/// The value after a name in the manifest, as in `  periodSeconds: 5`.
fn of_manifest(name: &str) -> Option<u64> {
    let line = PAGE
        .lines()
        .find(|line| line.trim_start().starts_with(&format!("{name}:")))?;
    line.rsplit(' ').next()?.parse().ok()
}

#[test]
fn manifest_gives_a_process_more_time_than_its_end_takes() {
    let seconds = |name: &str| of_manifest(name).unwrap_or_else(|| panic!("{name} is in docs/kubernetes.md"));
    let after = PAGE.split_once("--leave-after\", \"").expect("the option").1;
    let leave_after: u64 = after
        .split('s')
        .next()
        .and_then(|n| n.parse().ok())
        .expect("seconds");
    let routed = seconds("periodSeconds") * seconds("failureThreshold");
    assert!(leave_after > routed, "it serves until the probe has failed");
    // What checkout has for requests under way, for what was cut off, twice, and for the last releases.
    let ends = leave_after + 5 + 1 + 1 + DEFAULT_RETRY_FOR.as_secs();
    assert!(
        seconds("terminationGracePeriodSeconds") > ends,
        "it is not killed before"
    );
    for path in ["/live", "/ready"] {
        assert!(PAGE.contains(&format!("path: {path}")), "{path} is probed");
    }
    assert!(!PAGE.contains("initialDelaySeconds"), "nothing waits for a lock");
}
