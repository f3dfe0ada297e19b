//! What a count-down latch does, on memory and on a server.

use std::time::Duration;

use dlock::{Error, Latch};
use dlock_tests::faults::{SLACK, SOON, within};
use dlock_tests::{on_every_store, settle};
use futures_util::future::join_all;

const MS: Duration = Duration::from_millis(1);

fn is_open<T: std::fmt::Debug>(outcome: &Result<T, Error>) -> bool {
    matches!(outcome, Err(Error::LatchOpen { .. }))
}

async fn spawned(latch: &Latch) -> tokio::task::JoinHandle<Result<(), Error>> {
    let latch = latch.clone();
    tokio::spawn(async move { latch.wait().await })
}

on_every_store! {
    async fn all_waiters_go_on_at_zero_and_none_before(store: &Store) {
        let clients = [store.client().await, store.client().await, store.client().await];
        let latch = clients[0].latch("k");
        assert!(latch.try_set_count(3).await.unwrap());
        assert!(!latch.try_set_count(5).await.unwrap());
        let mut waiters = Vec::new();
        for i in 0..9 {
            waiters.push(spawned(&clients[i % 3].latch("k")).await);
        }
        settle().await;
        for left in [2, 1] {
            assert_eq!(clients[left % 3].latch("k").count_down().await.unwrap(), left as u64);
            assert_eq!(latch.count().await.unwrap(), left as u64);
            settle().await;
            assert!(waiters.iter().all(|waiter| !waiter.is_finished()), "at {left}");
        }
        assert_eq!(clients[1].latch("k").count_down().await.unwrap(), 0);
        for waiter in within(SOON, "the wake-ups", join_all(waiters)).await {
            waiter.unwrap().unwrap();
        }
        assert_eq!(latch.count().await.unwrap(), 0);
        store.assert_clean(&[&clients[0], &clients[1], &clients[2]]).await;
    }

    async fn a_wait_with_a_limit_ends_and_leaves_nothing(store: &Store) {
        let client = store.client().await;
        let latch = client.latch("k");
        latch.try_set_count(1).await.unwrap();
        let begun = std::time::Instant::now();
        assert!(!latch.wait_for(100 * MS).await.unwrap());
        assert!(begun.elapsed() >= 100 * MS && begun.elapsed() < SLACK);
        let dropped = spawned(&latch).await;
        settle().await;
        dropped.abort();
        drop(dropped.await);
        let waiter = tokio::spawn({
            let latch = latch.clone();
            async move { latch.wait_for(SLACK).await }
        });
        settle().await;
        latch.count_down().await.unwrap();
        assert!(within(SOON, "the wake-up", waiter).await.unwrap().unwrap());
        store.assert_clean(&[&client]).await;
    }

    async fn a_latch_that_is_deleted_is_open(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        assert!(!a.latch("k").delete().await.unwrap());
        a.latch("k").try_set_count(7).await.unwrap();
        let waiter = spawned(&b.latch("k")).await;
        settle().await;
        assert!(a.latch("k").delete().await.unwrap());
        within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
        assert_eq!(a.latch("k").count().await.unwrap(), 0);
        store.assert_clean(&[&a, &b]).await;
    }

    async fn bad_use_of_a_latch_is_told_and_changes_nothing(store: &Store) {
        let client = store.client().await;
        let latch = client.latch("k");
        let below = latch.count_down().await;
        assert!(is_open(&below), "{below:?}");
        assert_eq!(latch.count().await.unwrap(), 0);
        for count in [0, u64::MAX, (1 << 53) + 1] {
            let invalid = latch.try_set_count(count).await;
            assert!(matches!(invalid, Err(Error::InvalidOption { .. })), "{invalid:?}");
        }
        assert!(latch.try_set_count(1 << 53).await.unwrap());
        assert_eq!(latch.count_down().await.unwrap(), (1 << 53) - 1);
        latch.delete().await.unwrap();
        latch.try_set_count(1).await.unwrap();
        assert_eq!(latch.count_down().await.unwrap(), 0);
        assert!(is_open(&latch.count_down().await));
        assert!(is_open(&latch.count_down().await));
        assert!(matches!(latch.wait_for(Duration::ZERO).await, Err(Error::InvalidOption { .. })));
        assert!(matches!(client.latch("").wait().await, Err(Error::InvalidKey { .. })));
        store.assert_clean(&[&client]).await;
    }
}
