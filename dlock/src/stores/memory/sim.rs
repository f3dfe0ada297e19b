//! Access of a simulation to the memory store.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::{Held, MemoryStore, Shared};
use crate::LockKey;
use crate::store::{GrantId, Kind, Watch};

/// The store's data about one grant.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// The name.
    pub key: LockKey,
    /// The kind as which it is held; to the store a fair or a fenced lock is a plain one.
    pub kind: Kind,
    /// The grant.
    pub grant: GrantId,
    /// When it ends unless it is renewed.
    pub until: Instant,
    /// Whether it was released, but its `min_hold` still keeps it.
    pub kept: bool,
    /// How many permits it is; 1 for all other kinds.
    pub amount: u32,
}

/// The store's notifications since the last call.
#[derive(Debug, Default)]
pub(super) struct Said {
    pub(super) told: Mutex<Vec<Arc<str>>>,
    pub(super) taken: Mutex<Vec<Arc<str>>>,
}

impl Held {
    fn grants_of<'a>(&'a self, key: &'a LockKey, now: Instant) -> impl Iterator<Item = Entry> + 'a {
        let entry = move |(kind, grant, until, kept, amount)| Entry {
            key: key.clone(),
            kind,
            grant,
            until,
            kept,
            amount,
        };
        let plain = self.entries.get(key).into_iter();
        let plain = plain.map(|entry| (Kind::Mutex, entry.grant, entry.until, entry.kept, 1));
        let read_write = self.read_write.inside(key).into_iter();
        let permits = self.counters.held(key, now).into_iter();
        plain.chain(read_write).chain(permits).map(entry)
    }
}

impl MemoryStore {
    pub(crate) fn grants(&self) -> Vec<Entry> {
        self.with(|held, now| {
            let locks = held.entries.keys().chain(held.read_write.keys());
            let all = locks.chain(held.counters.keys(now));
            all.flat_map(|key| held.grants_of(key, now)).collect()
        })
    }

    pub(crate) fn grants_of(&self, key: &LockKey) -> Vec<Entry> {
        self.with(|held, now| held.grants_of(key, now).collect())
    }

    pub(crate) fn grant_of(&self, key: &LockKey, grant: GrantId) -> Option<Entry> {
        self.with(|held, now| held.grants_of(key, now).find(|entry| entry.grant == grant))
    }

    pub(crate) fn positions_kept(&self) -> usize {
        self.with(|held, now| held.queues.kept(now) + held.read_write.writers_kept(now))
    }

    pub(crate) fn fork(&self) -> MemoryStore {
        let store = Shared {
            held: Mutex::new(self.store.held.lock().clone()),
            shelf: self.store.shelf.fork(),
            ..Shared::default()
        };
        MemoryStore {
            store: Arc::new(store),
        }
    }

    pub(crate) fn take_told(&self) -> Vec<Arc<str>> {
        let mut told = std::mem::take(&mut *self.store.said.told.lock());
        told.append(&mut self.store.shelf.take_told());
        told
    }

    pub(crate) fn take_taken(&self) -> Vec<Arc<str>> {
        std::mem::take(&mut *self.store.said.taken.lock())
    }

    pub(crate) fn listen(&self, topic: Arc<str>) -> Watch {
        self.store.hub.listen(topic, |_| true, |_| ())
    }
}
