//! The idempotency layer on a server, with two processes' worth of clients, and a network that fails.

use std::sync::Arc;
use std::time::Duration;

use crate::idempotency_support::{Counting, SECOND, around, post, problem, send};
use dlock::LockClient;
use dlock_tests::faults::{PATIENCE, in_rounds, setting, step};
use dlock_tests::records::fresh_key;
use dlock_tests::{Flavor, Server, Swallow, eventually, on_every_store};
use dlock_tower::IdempotencyLayer;
use dlock_tower::idempotency::caller::{Public, public};
use http::Response;
use http_body_util::Full;
use tokio::time::timeout;
use tower::ServiceExt;

fn on(client: &LockClient) -> IdempotencyLayer<Public> {
    IdempotencyLayer::new(client.records().unwrap(), public())
}

on_every_store! {
    async fn a_thousand_equal_requests_on_two_processes_run_once(store: &Store) {
        let run = Counting::default();
        let mut all = tokio::task::JoinSet::new();
        for _ in 0..2 {
            let layer = on(&store.client().await).wait(SECOND * 60).max_waiters(500);
            let service = around(&layer, run.taking(Duration::from_millis(100)));
            for _ in 0..500 {
                let service = service.clone();
                all.spawn(async move { send(&service, post("k")).await.is_replay() });
            }
        }
        let replays = all.join_all().await.into_iter().filter(|replay| *replay).count();
        assert_eq!((run.count(), replays), (1, 999));
    }

    async fn what_one_process_did_another_one_knows(store: &Store) {
        in_rounds("the second asks while the first is at it", async || {
            let run = Counting::default();
            let (k, k2) = (fresh_key(), fresh_key());
            let (a, b) = (on(&store.client().await), on(&store.client().await));
            let slow = around(&a, run.taking(SECOND / 2));
            let (a, b) = (around(&a, run.service()), around(&b, run.service()));
            assert_eq!(send(&a, post(k.as_str())).await.text(), "run 1");
            let again = send(&b, post(k.as_str())).await;
            assert!(again.is_replay() && again.text() == "run 1");
            // A client that goes away here finds its result there.
            let gone = timeout(SECOND / 5, send(&slow, post(k2.as_str()))).await;
            let there = send(&b, post(k2.as_str())).await;
            if gone.is_ok() || there.problem() != problem(409, "in-progress") {
                return Err(there.text().to_owned());
            }
            eventually("it is done", || async {
                let there = send(&b, post(k2.as_str())).await;
                there.is_replay() && there.text() == "run 2"
            })
            .await;
            Ok(())
        })
        .await;
    }

    async fn a_waiter_takes_over_from_a_process_that_is_gone(store: &Store) {
        in_rounds("the first has claimed before it is gone", async || {
            let (run, key) = (Counting::default(), fresh_key());
            let layer = on(&store.client().await).lease(SECOND / 2);
            // Its claim stands, and is not renewed.
            let gone = std::thread::spawn({
                let (service, key) = (around(&layer, run.taking(SECOND * 60)), key.clone());
                move || {
                    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                    runtime.block_on(async {
                        assert!(timeout(SECOND / 5, service.oneshot(post(key.as_str()))).await.is_err());
                    });
                }
            });
            gone.join().unwrap();
            if run.count() == 0 {
                return Err("it is gone before");
            }
            let layer = on(&store.client().await).wait(SECOND * 60);
            assert_eq!(send(&around(&layer, run.service()), post(key.as_str())).await.text(), "run 2");
            assert_eq!(layer.stats().taken_over, 1);
            Ok(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_that_is_lost_changes_nothing() {
    for what in ["claim", "complete", "forget"] {
        for swallow in [Swallow::Cut, Swallow::Hang] {
            let (_store, proxy, behind, beside) = setting().await;
            let run = Counting::default();
            let layer = on(&behind).retry_for(SECOND * 60);
            let released = what == "forget";
            let handler = run.answering(move |n| async move {
                let mut response = Response::new(Full::from(format!("run {n}")));
                if released && n == 1 {
                    *response.status_mut() = http::StatusCode::TOO_MANY_REQUESTS;
                    response
                        .extensions_mut()
                        .insert(dlock_tower::idempotency::Outcome::Retry);
                }
                response
            });
            let fault = proxy.swallow(1, swallow, step(what));
            let first = send(&around(&layer, handler.clone()), post("k")).await;
            assert_eq!(first.text(), "run 1", "{what}");
            assert!(fault.fired(), "{what}");
            assert_eq!(layer.handle().shutdown(SECOND * 60).await, 0);
            let second = send(&around(&on(&beside), handler), post("k")).await;
            let wanted = if released { "run 2" } else { "run 1" };
            assert_eq!((second.text(), second.is_replay()), (wanted, !released), "{what}");
            assert_eq!((layer.stats().lost, layer.handle().claims()), (0, 0), "{what}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_network_that_is_away_at_the_claim_and_at_the_completion() {
    let (_store, proxy, behind, beside) = setting().await;
    let run = Counting::default();
    let layer = on(&behind).lease(SECOND * 3);
    let away = || {
        proxy.refuse();
        proxy.cut();
    };
    let cutting = {
        let handle = layer.handle();
        async move {
            eventually("the handler runs", || async { handle.claims() == 1 }).await;
            away();
        }
    };
    let service = around(&layer, run.taking(SECOND / 2));
    let (first, ()) = tokio::join!(send(&service, post("k")), cutting);
    assert_eq!(first.text(), "run 1");
    assert_eq!(
        send(&service, post("other")).await.problem(),
        problem(503, "unavailable")
    );
    assert_eq!((run.count(), layer.handle().tasks()), (1, 1));
    proxy.accept();
    assert_eq!(layer.handle().shutdown(SECOND * 60).await, 0);
    let again = send(&around(&on(&beside), run.service()), post("k")).await;
    assert!(again.is_replay() && again.text() == "run 1");
}

/// A server that became full takes no large response: that the work was done it takes, and nothing runs again.
#[tokio::test]
async fn full_server_keeps_that_the_work_was_done() {
    let builder = Server::builder(Flavor::from_env()).maxmemory_policy("noeviction");
    let server = Arc::new(builder.start().await);
    let client = LockClient::builder().url(server.url());
    let client = client.timeout(PATIENCE).build().await.unwrap();
    let (layer, run) = (on(&client).lease(PATIENCE), Counting::default());
    let filled = server.clone();
    let service = around(
        &layer,
        run.answering(move |_| {
            let server = filled.clone();
            async move {
                server.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
                Response::new(Full::from(vec![b'x'; 512 * 1024]))
            }
        }),
    );
    assert_eq!(send(&service, post("k")).await.body.len(), 512 * 1024);
    let again = send(&service, post("k")).await;
    assert_eq!(again.problem(), problem(409, "result-unavailable"));
    assert_eq!((run.count(), layer.stats().tombstones), (1, 1));
}
