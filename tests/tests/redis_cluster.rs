//! Locks in a Cluster: steps find the server that has them, waiters are woken wherever they listen.

use dlock_tests::faults::{PATIENCE, SOON, within};
use dlock_tests::{Store, settle};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_of_all_shards_are_held_and_their_waiters_woken() {
    let store = Store::cluster().await;
    let (a, b) = (store.client().await, store.client().await);
    for i in 0..60 {
        let key = format!("k{i}");
        let guard = a.lock(&*key).acquire().await.unwrap();
        let waiter = tokio::spawn(b.lock(&*key).wait(PATIENCE).acquire());
        if i % 10 == 0 {
            settle().await;
        }
        guard.release().await.unwrap();
        let next = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
        next.release().await.unwrap();
    }
    store.assert_clean(&[&a, &b]).await;
}
