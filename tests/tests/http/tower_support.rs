//! What the suites of the layers have in common.

use std::future::Future;
use std::time::Duration;

use dlock::LockClient;
use dlock::stores::memory::MemoryStore;
use tokio::time::timeout;

/// Runs a test under a bound that a dead-lock reaches at once on a paused clock.
pub(crate) async fn bounded<T>(test: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(3600), test)
        .await
        .expect("it never ended")
}

/// Two clients of one store, as two processes have them.
pub(crate) async fn pair() -> (LockClient, LockClient) {
    let store = MemoryStore::new();
    let a = LockClient::builder().store(store.clone()).build().await.unwrap();
    let b = LockClient::builder().store(store).build().await.unwrap();
    (a, b)
}
