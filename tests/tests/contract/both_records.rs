//! Records on memory, on a server, with sentinels and in a Cluster: the rules that hold on every store, and what these
//! have besides.

use std::collections::BTreeSet;

use dlock_tests::Store;
use dlock_tests::records::{a_store_that_lost_its_data, ask, claimed, fresh_key};
use futures_util::future::join_all;

/// Two processes on one store.
async fn two(store: Store) -> (Store, dlock::record::Records, dlock::record::Records) {
    let (a, b) = (
        store.client().await.records().unwrap(),
        store.client().await.records().unwrap(),
    );
    (store, a, b)
}

/// Fences are fencing tokens like those of locks: of both together no two are equal, and they grow.
async fn fences_and_fencing_tokens_are_one_row(store: Store) {
    let client = store.client().await;
    let records = client.records().unwrap();
    let mut last = 0;
    for _ in 0..20 {
        let (_, fence) = claimed(&records, ask(&fresh_key()), 1).await;
        let guard = client.lock("k").acquire().await.unwrap();
        assert!(last < fence && fence < guard.fencing_token());
        last = guard.fencing_token();
        guard.release().await.unwrap();
    }
    // Also of those that were claimed in the same microsecond.
    let keys: Vec<_> = (0..500).map(|_| fresh_key()).collect();
    let claims = join_all(keys.iter().map(|key| claimed(&records, ask(key), 1))).await;
    let fences: BTreeSet<_> = claims.into_iter().map(|(_, fence)| fence).collect();
    assert_eq!(fences.len(), keys.len());
    assert!(fences.first() > Some(&last));
}

async fn data_loss(store: Store) {
    let (store, a, b) = two(store).await;
    a_store_that_lost_its_data(&a, &b, async || store.flush().await).await;
}

/// Released records and dropped watches leave nothing, and a client that ended has no effect on the others.
async fn nothing_is_left(store: Store) {
    let (store, a, b) = two(store).await;
    for _ in 0..10 {
        let key = fresh_key();
        let watches = [a.watch(&key), b.watch(&key)];
        let (token, _) = claimed(&a, ask(&key), 1).await;
        a.extend(
            &key,
            &token,
            std::time::Duration::from_secs(5),
            std::time::Duration::from_secs(5),
        )
        .await
        .unwrap();
        a.release(&key, &token).await.unwrap();
        drop(watches);
    }
    store.assert_clean(&[]).await;
}

macro_rules! on_this_store {
    ($store:expr) => {
        use super::*;

        async fn on_this() -> (Store, dlock::record::Records, dlock::record::Records) {
            two($store).await
        }
        dlock_tests::record_suite!(on_this);

        #[tokio::test]
        async fn a_store_that_lost_its_data_has_no_records() {
            data_loss($store).await;
        }
        #[tokio::test]
        async fn nothing_is_left() {
            super::nothing_is_left($store).await;
        }
    };
}

/// In a Cluster each slot has a row of its own.
macro_rules! in_one_row {
    ($store:expr) => {
        #[tokio::test]
        async fn fences_and_fencing_tokens_are_one_row() {
            super::fences_and_fencing_tokens_are_one_row($store).await;
        }
    };
}

mod memory {
    on_this_store!(Store::memory());
    in_one_row!(Store::memory());
}

mod server {
    on_this_store!(Store::server().await);
    in_one_row!(Store::server().await);
}

mod sentinel {
    on_this_store!(Store::sentinel().await);
    in_one_row!(Store::sentinel().await);
}

mod cluster {
    on_this_store!(Store::cluster().await);
}
