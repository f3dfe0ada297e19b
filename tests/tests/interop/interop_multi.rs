//! Several locks at once beside Redisson 4.7.0: its `RedissonMultiLock` over the same keys excludes and is excluded,
//! whole or in part, and is woken as others are.
//!
//! Needs java 17 and Maven; `tests/run` leaves this suite out where they are missing, and says so.

use std::time::Duration;

use dlock::LockClient;
use dlock_tests::faults::{PATIENCE, SOON, within};
use dlock_tests::redisson::{Kind, Redisson, add_one};
use dlock_tests::{Server, Store, eventually, settle};
use futures_util::future::join_all;

const MS: Duration = Duration::from_millis(1);
/// As Java names them, and in an order that is not ours.
const JAVAS: &str = "c,a,b";
const OURS: [&str; 3] = ["a", "b", "c"];

/// Waits until a client is subscribed to the releases of the key, and a little longer.
async fn waited_for(server: &Server, name: &str) {
    let channel = format!("redisson_lock__channel:{{{name}}}");
    eventually("the waiter is subscribed", || async {
        let (_, count): (String, u64) = server.query(&["PUBSUB", "NUMSUB", &channel]).await;
        count > 0
    })
    .await;
    settle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_multi_lock_of_java_keeps_ours_out_and_wakes_them() {
    let store = Store::server().await;
    let (java, client) = (Redisson::on(&store).await, store.client().await);
    for _ in 0..3 {
        java.lock(1, Kind::Multi, JAVAS, None).await.unwrap();
        for key in OURS {
            let error = client.lock(key).try_acquire().await.unwrap_err();
            assert!(error.is_busy(), "{key}: {error}");
        }
        // All of it, or one of it and something else.
        for set in [&OURS[..], &["c", "d"], &["0", "b"]] {
            assert!(
                client.multi(set).try_acquire().await.unwrap_err().is_busy(),
                "{set:?}"
            );
        }
        assert_eq!(client.held(), 0);
        let waiter = tokio::spawn(client.multi(["d", "b", "c"]).acquire());
        waited_for(store.as_server(), "b").await;
        assert!(!waiter.is_finished());
        java.unlock(1, Kind::Multi, JAVAS).await.unwrap();
        let guard = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
        guard.release().await.unwrap();
    }
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ours_keep_a_multi_lock_of_java_out_and_wake_it() {
    let store = Store::server().await;
    let (java, client) = (Redisson::on(&store).await, store.client().await);
    for _ in 0..3 {
        let guard = client.multi(["b", "x"]).acquire().await.unwrap();
        // Java sees each of them as a lock like any other.
        assert!(java.is_locked(Kind::Plain, "b").await.unwrap());
        let tried = java
            .try_lock(1, Kind::Multi, JAVAS, 200 * MS, None)
            .await
            .unwrap();
        assert!(!tried.acquired(), "{tried:?}");
        for key in ["a", "c"] {
            assert!(!java.is_locked(Kind::Plain, key).await.unwrap(), "{key} is left");
        }
        let waiting = java.lock(2, Kind::Multi, JAVAS, None);
        let releasing = async {
            waited_for(store.as_server(), "b").await;
            guard.release().await.unwrap();
        };
        let (locked, ()) = within(PATIENCE, "the lock of Java", async {
            tokio::join!(waiting, releasing)
        })
        .await;
        assert!(locked.unwrap().acquired());
        assert!(client.multi(OURS).try_acquire().await.unwrap_err().is_busy());
        java.unlock(2, Kind::Multi, JAVAS).await.unwrap();
        client
            .multi(OURS)
            .wait(PATIENCE)
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    }
    store.assert_clean(&[&client]).await;
}

/// Adds one to a number on the server, `times` times, in two steps with time between them.
async fn count(store: &Store, client: &LockClient, keys: &[&str], times: u32) {
    let mut conn = store.as_server().conn().await;
    for _ in 0..times {
        let guard = client.multi(keys).wait(2 * PATIENCE).acquire().await.unwrap();
        add_one(&mut conn, "sum").await;
        guard.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sets_of_both_that_overlap_keep_a_sum_right() {
    const TIMES: u32 = 8;
    let store = Store::server().await;
    let (java, c, d) = (
        Redisson::on(&store).await,
        store.client().await,
        store.client().await,
    );
    // All of them have "b" in common.
    let names = [(Kind::Multi, "b,a"), (Kind::Multi, "c,b"), (Kind::Plain, "b")];
    let threads = join_all((1..).zip(names).map(|(thread, (kind, name))| {
        let java = &java;
        async move { java.counter(thread, kind, name, "sum", TIMES, MS / 2).await }
    }));
    let sets: [(&LockClient, &[&str]); 4] = [(&c, &["a", "b"]), (&c, &["b", "c"]), (&d, &OURS), (&d, &["b"])];
    let tasks = join_all(sets.map(|(client, keys)| count(&store, client, keys, TIMES)));
    let both = async { tokio::join!(threads, tasks) };
    let (threads, _) = within(3 * PATIENCE, "the sums of both", both).await;
    for failures in threads {
        assert_eq!(failures.unwrap(), 0, "rounds of Java that threw");
    }
    let sum: u32 = store.as_server().query(&["GET", "sum"]).await;
    assert_eq!(sum, 7 * TIMES, "an addition was lost: two were inside at a time");
    store.as_server().command(&["DEL", "sum"]).await;
    store.assert_clean(&[&c, &d]).await;
}
