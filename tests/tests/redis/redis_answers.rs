//! Answers that arrive together: each caller gets its own, whatever the others do with theirs.

use std::sync::Arc;
use std::time::Duration;

use dlock_tests::Store;
use dlock_tests::faults::hasty_builder;
use futures_util::future::join_all;
use tokio::sync::Barrier;
use tokio::time::timeout;

/// That many callers ask a server that stands still, and are answered together. Each runs `work` on its thread, and keeps its
/// lock until all have theirs.
async fn crowd(callers: usize, work: fn()) {
    let store = Store::server().await;
    let server = store.as_server();
    let builder = hasty_builder(&server.url()).timeout(Duration::from_secs(20));
    let client = builder.build().await.unwrap();
    // Now it is known to be near.
    for _ in 0..10 {
        client
            .lock("near")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    }
    server.stop();
    let all_have_theirs = Arc::new(Barrier::new(callers));
    let calls = (0..callers).map(|n| {
        let (lock, all_have_theirs) = (client.lock(format!("k{n}")), all_have_theirs.clone());
        tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            work();
            all_have_theirs.wait().await;
            guard.release().await.unwrap();
        })
    });
    let calls: Vec<_> = calls.collect();
    tokio::time::sleep(Duration::from_millis(100)).await;
    server.cont();
    // A connection that is idle is tested after 10 s, which would deliver what was forgotten.
    let calls = timeout(Duration::from_secs(8), join_all(calls)).await;
    for call in calls.expect("all are answered") {
        call.unwrap();
    }
    store.assert_clean(&[&client]).await;
}

fn nothing() {}

fn much() {
    std::thread::sleep(Duration::from_millis(2));
}

#[tokio::test]
async fn all_of_a_crowd_are_answered_though_none_asks_again() {
    crowd(64, nothing).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_of_a_crowd_are_answered_though_none_asks_again_on_several_threads() {
    crowd(64, nothing).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_of_a_few_are_answered_though_none_asks_again() {
    crowd(5, nothing).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_of_a_crowd_are_answered_though_each_runs_for_long() {
    crowd(64, much).await;
}
