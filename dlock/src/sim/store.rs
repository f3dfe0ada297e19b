//! The memory store as the server of a simulation.

use std::sync::Arc;

use crate::LockKey;
use crate::store::{GrantId, Kind, Watch};
use crate::stores::memory::MemoryStore;
use crate::stores::memory::sim::Entry;

/// All grants that the store knows, sorted. Unowned permits have no grants and are not among them. Call it inside of
/// [`at_store`](super::at_store).
#[must_use]
pub fn entries(store: &MemoryStore) -> Vec<Entry> {
    let mut entries = store.grants();
    entries.sort();
    entries
}

/// How many queue positions the store keeps for waiters that asked again in time.
#[must_use]
pub fn positions(store: &MemoryStore) -> usize {
    store.positions_kept()
}

/// All grants of one name.
#[must_use]
pub fn holders_of(store: &MemoryStore, key: &LockKey) -> Vec<Entry> {
    let mut entries = store.grants_of(key);
    entries.sort();
    entries
}

/// What it knows of this grant.
#[must_use]
pub fn holder(store: &MemoryStore, key: &LockKey, grant: GrantId) -> Option<Entry> {
    store.grant_of(key, grant)
}

/// A copy of all data, last fencing token included, without listeners: a replica that lags behind from now on.
#[must_use]
pub fn fork(store: &MemoryStore) -> MemoryStore {
    store.fork()
}

/// Where the store tells a waiter of a release.
#[must_use]
pub fn topic(kind: Kind, key: &LockKey, grant: GrantId) -> Arc<str> {
    crate::stores::memory::topic(kind, key, grant)
}

/// The releases, and changes of records, that the store announced since the last call, whether or not there were
/// listeners.
#[must_use]
pub fn told(store: &MemoryStore) -> Vec<Arc<str>> {
    store.take_told()
}

/// The locks that the store announced as taken again since the last call.
#[must_use]
pub fn taken(store: &MemoryStore) -> Vec<Arc<str>> {
    store.take_taken()
}

/// Listens at the store for a topic of locks, on behalf of a connection, so that it is counted.
#[must_use]
pub fn listen(store: &MemoryStore, topic: Arc<str>) -> Watch {
    store.listen(topic)
}

/// The same for the topic of a record.
#[must_use]
pub fn listen_record(store: &MemoryStore, topic: Arc<str>) -> Watch {
    let key = topic.strip_prefix('\n').unwrap_or(&topic);
    store.shelf().listen(key.into())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::*;
    use crate::sim::at_store;
    use crate::store::{AcquireReply, AcquireRequest, ReleaseRequest, Store};
    use futures_util::FutureExt;

    /// Outside of a runtime, by the clocks of the store alone.
    #[test]
    fn store_needs_no_runtime_and_is_copied_with_its_last_token() {
        let store = Arc::new(MemoryStore::new());
        let (now, wall) = (Instant::now(), Duration::from_micros(7));
        let (key, grant) = (LockKey::from("k"), GrantId::from_parts(3, 4));
        let second = Duration::from_secs(1);
        let acquire = |store: &Arc<MemoryStore>, grant| {
            let request = AcquireRequest::new(Kind::Mutex, key.clone(), grant, second);
            store.clone().acquire(request).now_or_never().unwrap().unwrap()
        };
        let granted = AcquireReply::acquired;
        at_store(now, wall, || assert_eq!(acquire(&store, grant), granted(7)));
        let copy = Arc::new(fork(&store));
        at_store(now, wall, || {
            let held = holders_of(&store, &key);
            assert_eq!(held, entries(&copy));
            assert_eq!((held[0].grant, held[0].until), (grant, now + second));
            let _watch = listen(&store, topic(Kind::Mutex, &key, grant));
            let release = ReleaseRequest::new(Kind::Mutex, key.clone(), grant);
            drop(store.clone().release(release));
            assert_eq!(told(&store), [topic(Kind::Mutex, &key, grant)]);
            assert_eq!((told(&store), told(&copy)), (Vec::new(), Vec::new()));
            assert!(entries(&store).is_empty());
        });
        let other = GrantId::from_parts(3, 5);
        at_store(now + second, wall, || {
            assert_eq!(acquire(&copy, other), granted(8))
        });
    }
}
