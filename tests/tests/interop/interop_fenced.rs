//! dlock and Redisson 4.7.0 share the fenced lock: they exclude and wake each other, and count their acquisitions
//! together.
//!
//! Needs java 17 and Maven; `tests/run` leaves this suite out where they are missing, and says so.

use std::time::Duration;

use dlock::{LockClient, LockKey};
use dlock_tests::Store;
use dlock_tests::redisson::{Kind, Options, Redisson};
use futures_util::future::join_all;
/// Far more than anything here takes.
const LONG: Duration = Duration::from_secs(90);

/// Names as most services use them, and with the tag that places them in a Cluster.
const NAMES: [&str; 2] = ["order:42", "{shop}:order:42"];

async fn java(store: &Store) -> Redisson {
    // Without a notification a waiter waits for 90 s.
    Redisson::on_with(store, &Options::new().watchdog(LONG)).await
}

async fn client(store: &Store) -> LockClient {
    store.client_with(|builder| builder.lease(LONG)).await
}

fn raw(name: &str) -> LockKey {
    LockKey::raw(name)
}

fn beside(prefix: &str, name: &str) -> String {
    match name.contains('{') {
        true => format!("{prefix}:{name}"),
        false => format!("{prefix}:{{{name}}}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_sides_draw_tokens_from_one_counter() {
    let store = Store::server().await;
    let server = store.as_server();
    let (java, client) = (java(&store).await, client(&store).await);
    for name in NAMES {
        let mut tokens = Vec::new();
        for _ in 0..5 {
            let guard = client.fenced_lock(raw(name)).acquire().await.unwrap();
            tokens.push(i64::try_from(guard.fencing_token()).unwrap());
            let last = java.call(1, &["getToken", "fenced", name]).await.unwrap();
            assert_eq!(last.number(), tokens[tokens.len() - 1]);
            guard.release().await.unwrap();
            tokens.push(java.lock(1, Kind::Fenced, name, None).await.unwrap().number());
            java.unlock(1, Kind::Fenced, name).await.unwrap();
        }
        assert!(tokens.windows(2).all(|pair| pair[0] < pair[1]), "{tokens:?}");
        let counter = beside("redisson_lock_token", name);
        assert_eq!(server.query::<i64>(&["GET", &counter]).await, tokens[9]);
        assert_eq!(server.ttl(&counter).await, None);
    }
    // Where Java begins, it is gone on with.
    let first = java.lock(1, Kind::Fenced, "new", None).await.unwrap().number();
    java.unlock(1, Kind::Fenced, "new").await.unwrap();
    let guard = client.fenced_lock("new").acquire().await.unwrap();
    assert_eq!((first, guard.fencing_token()), (1, 2));
    guard.release().await.unwrap();
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_token_is_given_once_under_contention() {
    const TIMES: usize = 15;
    let store = Store::server().await;
    let (java, client) = (java(&store).await, client(&store).await);
    let threads = (1..4).map(|thread| {
        let java = &java;
        async move {
            let mut tokens = Vec::new();
            for _ in 0..TIMES {
                let locked = java.lock(thread, Kind::Fenced, "k", None).await.unwrap();
                tokens.push(u64::try_from(locked.number()).unwrap());
                java.unlock(thread, Kind::Fenced, "k").await.unwrap();
            }
            tokens
        }
    });
    let tasks = (0..3).map(|_| async {
        let mut tokens = Vec::new();
        for _ in 0..TIMES {
            let guard = client.fenced_lock("k").wait(LONG).acquire().await.unwrap();
            tokens.push(guard.fencing_token());
            guard.release().await.unwrap();
        }
        tokens
    });
    let (threads, tasks) = tokio::join!(join_all(threads), join_all(tasks));
    let each: Vec<_> = threads.into_iter().chain(tasks).collect();
    for tokens in &each {
        assert!(tokens.windows(2).all(|pair| pair[0] < pair[1]), "{tokens:?}");
    }
    let mut all: Vec<_> = each.concat();
    all.sort_unstable();
    assert_eq!(all.len(), 6 * TIMES);
    assert!(all.windows(2).all(|pair| pair[0] < pair[1]), "{all:?}");
    store.assert_clean(&[&client]).await;
}
