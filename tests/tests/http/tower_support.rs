//! What the suites of the layers have in common.

use dlock::LockClient;
use dlock::stores::memory::MemoryStore;

/// Two clients of one store, as two processes have them.
pub(crate) async fn pair() -> (LockClient, LockClient) {
    let store = MemoryStore::new();
    let a = LockClient::builder().store(store.clone()).build().await.unwrap();
    let b = LockClient::builder().store(store).build().await.unwrap();
    (a, b)
}
