//! Locks in this process, for one process or for tests: everything a server does, without one.
//!
//! Leases expire, waiters are woken and fencing tokens grow just as on a server, by tokio's clock, so
//! that a paused clock makes every timing rule a fast and exact test.

use std::collections::{BTreeSet, HashMap};
use std::future::{Future, ready};
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use tokio::time::Instant;

use super::hub::Hub;
use super::{
    AcquireReply, AcquireRequest, Backend, BackendError, GrantId, Holder, Kind, ReleaseReply, ReleaseRequest,
    RenewRequest, Renewal, Watch, only_plain,
};
use crate::LockKey;
use crate::record::Records;
use crate::record::memory::{MemoryRecords, Shelf};

/// A store of locks, and of [records](crate::record), in this process's memory.
///
/// Clients that are built on clones of one `MemoryBackend` exclude each other, as processes on one server
/// do; so do clients of `memory://NAME` with the same name. `memory://` is a store of its own each time.
#[derive(Debug, Clone, Default)]
pub struct MemoryBackend {
    store: Arc<Store>,
}

#[derive(Debug, Default)]
struct Store {
    held: Mutex<Held>,
    hub: Arc<Hub>,
    shelf: Shelf,
}

#[derive(Debug, Default)]
struct Held {
    entries: HashMap<LockKey, Entry>,
    /// The entries by their end, so that expired ones go without a search.
    ends: BTreeSet<(Instant, LockKey)>,
    last_token: u64,
    /// Since when these data are here, where somebody asked.
    since: Option<Instant>,
}

#[derive(Debug, Clone)]
struct Entry {
    grant: GrantId,
    until: Instant,
}

impl Held {
    /// Drops what has expired. Nobody is told: like on a server, waiters know the end of the lease.
    fn purge(&mut self, now: Instant) {
        while self.ends.first().is_some_and(|(until, _)| *until <= now) {
            if let Some((_, key)) = self.ends.pop_first() {
                self.entries.remove(&key);
            }
        }
    }

    fn put(&mut self, key: &LockKey, grant: &GrantId, until: Instant) {
        self.take(key);
        self.ends.insert((until, key.clone()));
        self.entries.insert(key.clone(), Entry { grant: *grant, until });
    }

    fn take(&mut self, key: &LockKey) -> Option<Entry> {
        let entry = self.entries.remove(key)?;
        self.ends.remove(&(entry.until, key.clone()));
        Some(entry)
    }

    fn has(&self, key: &LockKey, grant: &GrantId) -> bool {
        self.entries.get(key).is_some_and(|entry| entry.grant == *grant)
    }

    /// How long a member of a quorum abstains yet, which it does for `after` from when it was first asked.
    fn abstains(&mut self, now: Instant, after: Duration) -> Option<Duration> {
        let votes_at = *self.since.get_or_insert(now) + after;
        (votes_at > now).then(|| votes_at - now)
    }

    /// Reserves tokens without outrunning the clock: reservations reach back.
    fn tokens(&mut self, count: u32) -> (u64, u64) {
        let micros = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_micros();
        let now = u64::try_from(micros).unwrap_or(u64::MAX);
        let least = self.last_token + 1;
        let last = now.max(least);
        let first = least.max((last + 1).saturating_sub(u64::from(count.max(1))));
        self.last_token = last;
        (first, last)
    }
}

/// The stores of `memory://NAME`, each for as long as somebody uses it.
static NAMED: LazyLock<Mutex<HashMap<String, Weak<Store>>>> = LazyLock::new(Mutex::default);

impl MemoryBackend {
    /// An empty store.
    #[must_use]
    pub fn new() -> MemoryBackend {
        MemoryBackend::default()
    }

    /// The store that everybody in this process gets by this name.
    #[must_use]
    pub fn named(name: &str) -> MemoryBackend {
        let mut named = NAMED.lock();
        named.retain(|_, store| store.strong_count() > 0);
        if let Some(store) = named.get(name).and_then(Weak::upgrade) {
            return MemoryBackend { store };
        }
        let backend = MemoryBackend::new();
        named.insert(name.to_owned(), Arc::downgrade(&backend.store));
        backend
    }

    /// How many locks are held, by anybody.
    #[must_use]
    pub fn len(&self) -> usize {
        self.with(|held, _| held.entries.len())
    }

    /// Whether no lock is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many records are kept.
    #[must_use]
    pub fn kept_records(&self) -> usize {
        self.store.shelf.len()
    }

    /// How many keys are listened for, of locks and of records.
    #[must_use]
    pub fn watched(&self) -> usize {
        self.store.hub.len() + self.store.shelf.watched()
    }

    /// Forgets every lock and every record and tells nobody, as a server does that lost its data.
    pub fn clear(&self) {
        self.store.shelf.clear();
        self.with(|held, _| {
            held.entries.clear();
            held.ends.clear();
            held.since = None;
        });
    }

    /// Ends whatever grant the key has and tells the waiters.
    pub(crate) fn take(&self, key: &LockKey) -> bool {
        let taken = self.with(|held, _| held.take(key).is_some());
        if taken {
            self.tell(key);
        }
        taken
    }

    /// The records of this store.
    pub(crate) fn shelf(&self) -> &Shelf {
        &self.store.shelf
    }

    /// The next fencing token, for a claim of a record.
    pub(crate) fn token(&self) -> u64 {
        self.with(|held, _| held.tokens(1).1)
    }

    fn with<T>(&self, step: impl FnOnce(&mut Held, Instant) -> T) -> T {
        let now = crate::clock::now();
        let mut held = self.store.held.lock();
        held.purge(now);
        step(&mut held, now)
    }

    /// How many heard of it.
    fn tell(&self, key: &LockKey) -> u64 {
        self.store.hub.tell(key.as_str()) as u64
    }
}

impl Backend for MemoryBackend {
    fn acquire(
        self: Arc<Self>,
        request: AcquireRequest,
    ) -> impl Future<Output = Result<AcquireReply, BackendError>> + Send + 'static {
        ready(only_plain(request.kind).map(|()| {
            self.with(|held, now| {
                if let Some(votes_in) = request.vote_after.and_then(|after| held.abstains(now, after)) {
                    return AcquireReply::Abstained { votes_in };
                }
                if let Some(entry) = held.entries.get(&request.key) {
                    return AcquireReply::Busy {
                        remaining: Some(entry.until.saturating_duration_since(now)),
                    };
                }
                held.put(&request.key, &request.grant, now + request.lease);
                let (first_token, last_token) = held.tokens(request.tokens);
                AcquireReply::Acquired {
                    first_token,
                    last_token,
                }
            })
        }))
    }

    fn release(
        self: Arc<Self>,
        request: ReleaseRequest,
    ) -> impl Future<Output = Result<ReleaseReply, BackendError>> + Send + 'static {
        let ended = self.with(|held, now| {
            if !held.has(&request.key, &request.grant) {
                return false;
            }
            if request.keep_for > Duration::ZERO {
                held.put(&request.key, &request.grant, now + request.keep_for);
            } else {
                held.take(&request.key);
            }
            true
        });
        ready(Ok(if ended {
            ReleaseReply::Released {
                heard: Some(self.tell(&request.key)),
            }
        } else {
            ReleaseReply::NotHeld { repeated: false }
        }))
    }

    fn renew(
        self: Arc<Self>,
        requests: Vec<RenewRequest>,
    ) -> impl Future<Output = Result<Vec<Result<Renewal, BackendError>>, BackendError>> + Send + 'static {
        ready(Ok(self.with(|held, now| {
            requests
                .iter()
                .map(|request| {
                    let known = held.has(&request.key, &request.grant);
                    if known {
                        held.put(&request.key, &request.grant, now + request.lease);
                    }
                    Ok(if known { Renewal::Renewed } else { Renewal::Gone })
                })
                .collect()
        })))
    }

    fn inspect(
        self: Arc<Self>,
        key: LockKey,
    ) -> impl Future<Output = Result<Vec<Holder>, BackendError>> + Send + 'static {
        ready(Ok(self.with(|held, now| {
            let entry = held.entries.get(&key);
            entry.map(|entry| entry.holder(now)).into_iter().collect()
        })))
    }

    fn list(
        self: Arc<Self>,
        prefix: String,
    ) -> impl Future<Output = Result<Vec<(LockKey, Holder)>, BackendError>> + Send + 'static {
        ready(Ok(self.with(|held, now| {
            held.entries
                .iter()
                .filter(|(key, _)| key.as_str().starts_with(&prefix))
                .map(|(key, entry)| (key.clone(), entry.holder(now)))
                .collect()
        })))
    }

    fn force_release(
        self: Arc<Self>,
        key: LockKey,
    ) -> impl Future<Output = Result<bool, BackendError>> + Send + 'static {
        ready(Ok(self.take(&key)))
    }

    fn watch(self: Arc<Self>, _kind: Kind, key: &LockKey, _grant: GrantId) -> Watch {
        self.store.hub.listen(key.as_str().into(), |_| true, |_| ())
    }

    fn raise_fence(
        self: Arc<Self>,
        _kind: Kind,
        key: LockKey,
        grant: GrantId,
        at_least: u64,
    ) -> impl Future<Output = Result<bool, BackendError>> + Send + 'static {
        ready(Ok(self.with(|held, _| {
            let known = held.has(&key, &grant);
            if known {
                held.last_token = held.last_token.max(at_least);
            }
            known
        })))
    }

    fn records(self: Arc<Self>) -> Option<Records> {
        Some(Records::new(MemoryRecords(MemoryBackend::clone(&self))))
    }
}

impl Entry {
    fn holder(&self, now: Instant) -> Holder {
        Holder::new(
            Kind::Lock,
            self.grant.to_string(),
            1,
            Some(self.until.saturating_duration_since(now)),
        )
    }
}
