//! Locks in this process, for one process or for tests: everything that a server does, without a server.
//!
//! Leases expire, waiters are woken and fencing tokens grow just as on a server, by tokio's clock, so that a paused
//! clock makes every timing rule a fast and exact test.

mod counters;
mod deadlines;
mod fair;
mod operations;
mod permits;
mod read_write;
pub(crate) mod records;
#[cfg(dlock_sim)]
pub(crate) mod sim;
mod writers;

use std::collections::BTreeSet;
use std::future::ready;
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use self::counters::CounterTable;
use self::fair::Queues;
use self::operations::Bulletin;
use self::read_write::{Left, ReadWriteLocks};
use self::records::{MemoryRecords, Shelf};
use crate::LockKey;
use crate::base::broken;
use crate::base::chance::HashMap;
use crate::base::clock;
use crate::base::kind::Family;
use crate::store::Hub;
use crate::store::counter::{CounterReply, CounterRequest, Counters};
use crate::store::member::{QuorumMember, Vote};
use crate::store::operations::Operations;
use crate::store::records::Records;
use crate::store::{
    self, AcquireAllReply, AcquireReply, AcquireRequest, Announce, Capabilities, GrantId, Granted, Holder,
    Kind, Notifications, Reason, ReleaseReply, ReleaseRequest, RenewRequest, Renewal, Store, StoreError,
    StoreFuture, Watch,
};

/// A store of locks, and of [records](crate::record), in this process's memory.
///
/// Clients that are built on clones of one `MemoryStore` exclude each other, like processes on one server; so do
/// clients of `memory://NAME` with the same name. `memory://` is a separate store each time.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::{LockClient, stores::memory::MemoryStore};
///
/// let store = MemoryStore::new();
/// let one = LockClient::builder().store(store.clone()).build().await?;
/// let other = LockClient::builder().store(store.clone()).build().await?;
///
/// let guard = one.lock("order:42").acquire().await?;
/// assert!(other.lock("order:42").try_acquire().await.is_err());
/// # drop(guard);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Default)]
pub struct MemoryStore {
    store: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    held: Mutex<Held>,
    hub: Arc<Hub>,
    shelf: Shelf,
    bulletin: Bulletin,
    #[cfg(dlock_sim)]
    said: sim::Said,
}

#[derive(Debug, Clone, Default)]
struct Held {
    entries: HashMap<LockKey, Entry>,
    /// The entries by their end, so that expired ones are removed without a search.
    ends: BTreeSet<(Instant, LockKey)>,
    queues: Queues,
    read_write: ReadWriteLocks,
    /// The semaphores and latches.
    counters: CounterTable,
    last_token: u64,
    /// The time since which this data exists, once a vote has asked.
    since: Option<Instant>,
}

/// Why a lock, or permits, were not granted.
#[derive(Debug)]
struct Busy {
    /// The remaining lease of the holder.
    remaining: Option<Duration>,
    /// The time within which a waiter asks again.
    again: Option<Duration>,
    /// The total is smaller than the requested permits.
    too_few: bool,
}

impl Busy {
    /// It is held until then.
    fn until(until: Instant, now: Instant) -> Busy {
        Busy {
            remaining: Some(until.saturating_duration_since(now)),
            again: None,
            too_few: false,
        }
    }
}

#[derive(Debug, Clone)]
struct Entry {
    grant: GrantId,
    until: Instant,
    /// It was released, but its `min_hold` still keeps the key.
    kept: bool,
}

impl Held {
    /// Removes expired entries. No waiter is notified: as on a server, waiters know the end of the lease.
    fn purge(&mut self, now: Instant) {
        while self.ends.first().is_some_and(|(until, _)| *until <= now) {
            if let Some((_, key)) = self.ends.pop_first() {
                self.entries.remove(&key);
            }
        }
        self.read_write.purge(now);
    }

    fn acquire(&mut self, request: &AcquireRequest, now: Instant) -> Result<AcquireReply, StoreError> {
        self.is_free_for(request.kind, &request.key, now)?;
        let busy = match request.kind.family() {
            Family::Plain => match self.taken_until(request, now) {
                Some(until) => {
                    if request.queue {
                        self.queues.wait(request, now);
                    }
                    Some(Busy::until(until, now))
                }
                None => {
                    self.put(&request.key, Entry::held(request.grant, now + request.lease));
                    None
                }
            },
            Family::ReadWrite => self.read_write.acquire(request, now).err(),
            Family::Permits => self.counters.acquire(now, request).err(),
            Family::Latch => return Err(unsupported(request.kind)),
        };
        Ok(match busy {
            Some(Busy { too_few: true, .. }) => AcquireReply::TooFewPermits,
            Some(Busy { remaining, again, .. }) => {
                let mut busy = store::Busy::new(remaining);
                busy.again = again;
                AcquireReply::Busy(busy)
            }
            None => {
                let (first_token, last_token) = self.tokens(request.tokens);
                let mut granted = Granted::with_tokens(first_token, last_token);
                if request.kind == Kind::Fair && request.tokens > 1 {
                    let most = request.tokens as usize - 1;
                    granted.behind = self.queues.own_front(&request.key, request.grant, most);
                }
                AcquireReply::Acquired(granted)
            }
        })
    }

    /// Whether no other kind uses the name.
    fn is_free_for(&self, kind: Kind, key: &LockKey, now: Instant) -> Result<(), StoreError> {
        if kind.family() != Family::Plain && self.entries.contains_key(key) {
            return Err(taken("a plain lock"));
        }
        if !kind.is_read_write() && self.read_write.has(key) {
            return Err(taken("a read-write lock"));
        }
        match self.counters.kind_at(key, now) {
            Some(Kind::Latch) if kind != Kind::Latch => Err(taken("a latch")),
            Some(Kind::Permit) if !kind.is_permits() => Err(taken("a semaphore")),
            _ => Ok(()),
        }
    }

    /// Grants all of these or none. No client sees the grants before a busy one is found; only the position of a writer
    /// ahead of the readers is given up by that, and the caller notifies them.
    fn acquire_all(&mut self, requests: &[AcquireRequest], now: Instant) -> AcquireAllReply {
        let mut grants = Vec::with_capacity(requests.len());
        for (at, request) in requests.iter().enumerate() {
            let stopped = match self.acquire(request, now) {
                Ok(AcquireReply::Acquired(granted)) => {
                    grants.push(granted);
                    continue;
                }
                Ok(in_the_way) => AcquireAllReply::Busy {
                    at,
                    remaining: in_the_way.busy_for(),
                },
                Err(error) => AcquireAllReply::Failed { at, error },
            };
            for request in &requests[..at] {
                self.release(&request.undone(), now);
            }
            return stopped;
        }
        AcquireAllReply::Acquired { grants }
    }

    /// Returns until when the key is held, or another waiter is ahead of the caller; a caller that may have it leaves
    /// the queue.
    fn taken_until(&mut self, request: &AcquireRequest, now: Instant) -> Option<Instant> {
        let AcquireRequest { key, grant, .. } = request;
        let held_until = self.entries.get(key).map(|entry| entry.until);
        if request.kind != Kind::Fair {
            return held_until;
        }
        let front = self.queues.front(key, now, Some(*grant));
        let others = front.filter(|(front, _)| front != grant);
        let taken_until = held_until.or(others.map(|(_, kept_until)| kept_until));
        if taken_until.is_none() {
            self.queues.leave(key, *grant);
        }
        taken_until
    }

    /// Removes a waiter from the queue. Returns whether it was in front of a released lock that is available or kept by
    /// its `min_hold`: it was notified, and now the next waiter must be.
    fn give_up(&mut self, key: &LockKey, grant: GrantId) -> bool {
        self.queues.leave(key, grant) && self.entries.get(key).is_none_or(|entry| entry.kept)
    }

    /// The topic on which the front of the queue is notified of a release.
    fn front_topic(&mut self, key: &LockKey, now: Instant) -> Option<Arc<str>> {
        let (front, _) = self.queues.front(key, now, None)?;
        Some(topic(Kind::Fair, key, front))
    }

    fn release(&mut self, request: &ReleaseRequest, now: Instant) -> Left {
        match request.kind.family() {
            Family::ReadWrite => return self.read_write.release(request, now),
            Family::Permits => return self.counters.release(now, request),
            Family::Plain | Family::Latch => {}
        }
        let entry = if broken!(ReleaseEndsForeignGrant) {
            self.entries.get(&request.key)
        } else {
            self.entry(&request.key, request.grant)
        };
        let Some(entry) = entry else {
            return Left::NotHeld;
        };
        if request.keep_for > Duration::ZERO {
            let kept = Entry {
                until: entry.until.min(now + request.keep_for),
                kept: true,
                ..*entry
            };
            self.put(&request.key, kept);
        } else {
            self.take(&request.key);
        }
        Left::Loudly
    }

    fn renew(&mut self, request: &RenewRequest, now: Instant) -> bool {
        match request.kind.family() {
            Family::ReadWrite => return self.read_write.renew(request, now),
            Family::Permits => return self.counters.renew(now, request),
            Family::Plain | Family::Latch => {}
        }
        let held = self.entry(&request.key, request.grant);
        let is_held = held.is_some_and(|entry| !entry.kept || broken!(RenewalStretchesMinHold));
        if is_held {
            self.put(&request.key, Entry::held(request.grant, now + request.lease));
        }
        is_held
    }

    /// Returns all holders of the key.
    fn holders(&self, key: &LockKey, now: Instant) -> Vec<Holder> {
        match self.entries.get(key) {
            Some(entry) => vec![entry.holder(now)],
            None if self.read_write.has(key) => self.read_write.holders(key, now),
            None => self.counters.holders(key, now),
        }
    }

    fn put(&mut self, key: &LockKey, entry: Entry) {
        let until = entry.until;
        let before = self.entries.insert(key.clone(), entry);
        if let Some(before) = before.filter(|before| before.until != until) {
            self.ends.remove(&(before.until, key.clone()));
        }
        self.ends.insert((until, key.clone()));
    }

    fn take(&mut self, key: &LockKey) -> Option<Entry> {
        let (key, entry) = self.entries.remove_entry(key)?;
        self.ends.remove(&(entry.until, key));
        Some(entry)
    }

    /// Returns the entry of a grant, also of a released one that keeps its key.
    fn entry(&self, key: &LockKey, grant: GrantId) -> Option<&Entry> {
        self.entries.get(key).filter(|entry| entry.grant == grant)
    }

    /// How long a member of a quorum still abstains, for `after` from when it was first asked.
    fn abstains(&mut self, now: Instant, after: Duration) -> Option<Duration> {
        let votes_at = *self.since.get_or_insert(now) + after;
        (votes_at > now).then(|| votes_at - now)
    }

    /// Reserves tokens without outrunning the clock: reservations reach back.
    fn tokens(&mut self, count: u32) -> (u64, u64) {
        let micros = clock::wall().as_micros();
        let now = u64::try_from(micros).unwrap_or(u64::MAX);
        let least = self.last_token + 1;
        let last = now.max(least);
        let first = least.max((last + 1).saturating_sub(u64::from(count.max(1))));
        self.last_token = last;
        (first, last)
    }
}

/// The stores of `memory://NAME`, each for as long as it has users.
static NAMED: LazyLock<Mutex<HashMap<String, Weak<Shared>>>> = LazyLock::new(Mutex::default);

impl MemoryStore {
    /// Creates an empty store.
    #[must_use]
    pub fn new() -> MemoryStore {
        MemoryStore::default()
    }

    /// Returns the store of this name, which all callers in this process share.
    #[must_use]
    pub fn named(name: &str) -> MemoryStore {
        let mut named = NAMED.lock();
        named.retain(|_, store| store.strong_count() > 0);
        if let Some(store) = named.get(name).and_then(Weak::upgrade) {
            return MemoryStore { store };
        }
        let store = MemoryStore::new();
        named.insert(name.to_owned(), Arc::downgrade(&store.store));
        store
    }

    /// Returns how many locks are held, by all clients, and how many grants of permits.
    #[must_use]
    pub fn len(&self) -> usize {
        self.with(|held, now| held.entries.len() + held.read_write.len() + held.counters.len(now))
    }

    /// Returns whether neither a lock nor a permit is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns how many waiters are in the queues of fair locks, plus how many waiting writers readers yield to,
    /// including those that are gone but not detected yet.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.with(|held, _| held.queues.len() + held.read_write.waiting())
    }

    /// Returns how many records are kept.
    #[must_use]
    pub fn kept_records(&self) -> usize {
        self.store.shelf.len()
    }

    /// Returns how many keys of locks and records have listeners.
    #[must_use]
    pub fn watched(&self) -> usize {
        self.store.hub.len() + self.store.shelf.watched()
    }

    /// Forgets every lock, counter and record and notifies no waiter, like a server that lost its data.
    pub fn clear(&self) {
        self.store.shelf.clear();
        self.with(|held, _| {
            held.entries.clear();
            held.ends.clear();
            held.queues.clear();
            held.since = None;
            held.read_write.clear();
            held.counters.clear();
        });
    }

    /// Ends all grants of the key and notifies the waiters.
    fn take(&self, key: &LockKey) -> bool {
        self.take_if(key, |_| Ok(true)).unwrap_or(false)
    }

    /// Ends all grants of the key, if these holders are to end, and notifies the waiters.
    fn take_if(
        &self,
        key: &LockKey,
        is_to_end: impl FnOnce(Vec<Holder>) -> Result<bool, StoreError>,
    ) -> Result<bool, StoreError> {
        let (taken, topics) = self.take_quietly(key, is_to_end)?;
        for topic in topics {
            self.tell(&topic);
        }
        Ok(taken)
    }

    /// Ends all grants of the key, if these holders are to end. Returns whether there were any, and the topics of the
    /// waiters, which the caller [notifies](Self::tell).
    pub(crate) fn take_quietly(
        &self,
        key: &LockKey,
        is_to_end: impl FnOnce(Vec<Holder>) -> Result<bool, StoreError>,
    ) -> Result<(bool, Vec<Arc<str>>), StoreError> {
        self.with(|held, now| {
            let taken = is_to_end(held.holders(key, now))?
                && (held.take(key).is_some() || held.read_write.take(key) || held.counters.take(key, now));
            let topics = match taken {
                true => [Some(key.as_str().into()), held.front_topic(key, now)],
                false => [None, None],
            };
            Ok((taken, topics.into_iter().flatten().collect()))
        })
    }

    /// Ends a grant of a key without a queue. Returns the topic of the waiters, which the caller [notifies](Self::tell).
    pub(crate) fn release_quietly(&self, request: &ReleaseRequest) -> Option<Arc<str>> {
        let left = self.with(|held, now| held.release(request, now));
        (left == Left::Loudly).then(|| request.key.as_str().into())
    }

    /// Returns the records of this store.
    pub(crate) fn shelf(&self) -> &Shelf {
        &self.store.shelf
    }

    /// The next fencing token, for a claim of a record.
    pub(crate) fn token(&self) -> u64 {
        self.with(|held, _| held.tokens(1).1)
    }

    fn with<T>(&self, step: impl FnOnce(&mut Held, Instant) -> T) -> T {
        let now = clock::now();
        let mut held = self.store.held.lock();
        held.purge(now);
        let brought = step(&mut held, now);
        let notifications = held.counters.notifications();
        drop(held);
        for key in notifications {
            self.tell(key.as_str());
        }
        brought
    }

    /// Returns how many listeners were notified.
    pub(crate) fn tell(&self, topic: &str) -> u64 {
        #[cfg(dlock_sim)]
        self.store.said.told.lock().push(topic.into());
        self.store.hub.tell(topic) as u64
    }

    /// Tells the waiters of a plain lock that it is taken.
    fn tell_taken(&self, key: &LockKey) {
        #[cfg(dlock_sim)]
        self.store.said.taken.lock().push(key.as_str().into());
        self.store.hub.taken(key.as_str());
    }
}

impl Store for MemoryStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Kind::ALL.iter().copied())
            .token_blocks(true)
            .limits(true)
            .min_hold(true)
            .prefer_writers(true)
            .restores_positions(true)
            .notifications(Notifications::Certain)
            .largest_set(usize::MAX)
            .inspection(true)
    }

    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        let mut reply = self.with(|held, now| held.acquire(&request, now));
        let is_busy = match &mut reply {
            Ok(AcquireReply::Busy(store::Busy { listeners, .. })) if request.kind == Kind::Mutex => {
                *listeners = Some(self.store.hub.listeners(request.key.as_str()) as u64);
                true
            }
            _ => false,
        };
        match request.announce {
            Announce::Grant if !is_busy => self.tell_taken(&request.key),
            Announce::Taken => self.tell_taken(&request.key),
            _ => {}
        }
        Box::pin(ready(reply))
    }

    fn together(&self, kind: Kind, _key: &LockKey) -> Option<u32> {
        // Its waiters have positions, which a request for several locks would have to take all at once.
        (!kind.waits_in_store()).then_some(0)
    }

    fn acquire_all(self: Arc<Self>, requests: Vec<AcquireRequest>) -> StoreFuture<AcquireAllReply> {
        let reply = self.with(|held, now| held.acquire_all(&requests, now));
        if let AcquireAllReply::Busy { at, .. } | AcquireAllReply::Failed { at, .. } = &reply {
            // A writer that had the lock for this moment has given up its position ahead of the readers.
            let placed = |request: &&AcquireRequest| request.kind == Kind::Write && request.waiter.is_some();
            for request in requests[..*at].iter().filter(placed) {
                self.tell(request.key.as_str());
            }
        }
        Box::pin(ready(Ok(reply)))
    }

    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        let ReleaseRequest { kind, key, grant, .. } = &request;
        let (left, tells, front) = self.with(|held, now| {
            let gave_up = match kind {
                Kind::Fair => held.give_up(key, *grant),
                _ => held.read_write.give_way(&request, now),
            };
            let left = held.release(&request, now);
            let front = match kind {
                Kind::Fair => held.front_topic(key, now),
                _ => None,
            };
            (left, gave_up || left == Left::Loudly, front)
        });
        let receivers = match tells {
            true => self.tell(front.as_deref().unwrap_or(key.as_str())),
            false => 0,
        };
        Box::pin(ready(Ok(match left {
            Left::NotHeld => ReleaseReply::NotHeld { repeated: false },
            Left::Quietly | Left::Loudly => ReleaseReply::Released {
                receivers: Some(receivers),
            },
        })))
    }

    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        Box::pin(ready(Ok(self.with(|held, now| {
            let renew = |request: &RenewRequest| match held.renew(request, now) {
                true => Ok(Renewal::Renewed),
                false => Ok(Renewal::Gone),
            };
            requests.iter().map(renew).collect()
        }))))
    }

    fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
        Box::pin(ready(Ok(self.with(|held, now| held.holders(&key, now)))))
    }

    fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
        Box::pin(ready(Ok(self.with(|held, now| {
            let locks = held.entries.keys().chain(held.read_write.keys());
            let all = locks.chain(held.counters.keys(now));
            let holders = |key: &LockKey| {
                let key = key.clone();
                let holders = held.holders(&key, now);
                holders.into_iter().map(move |holder| (key.clone(), holder))
            };
            let named = |key: &&LockKey| key.as_str().starts_with(&prefix);
            all.filter(named).flat_map(holders).collect()
        }))))
    }

    fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool> {
        Box::pin(ready(Ok(self.take(&key))))
    }

    fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        let watch = self.store.hub.listen(topic(kind, key, grant), |_| true, |_| ());
        watch.of_store_in_process()
    }

    fn counters(self: Arc<Self>) -> Option<Arc<dyn Counters>> {
        Some(self)
    }

    fn quorum_member(self: Arc<Self>) -> Option<Arc<dyn QuorumMember>> {
        Some(self)
    }

    fn records(self: Arc<Self>) -> Option<Records> {
        Some(Records::new(MemoryRecords(MemoryStore::clone(&self))))
    }

    fn operations(self: Arc<Self>) -> Option<Arc<dyn Operations>> {
        Some(self)
    }
}

impl Counters for MemoryStore {
    fn count(self: Arc<Self>, request: CounterRequest) -> StoreFuture<CounterReply> {
        Box::pin(ready(self.with(|held, now| {
            held.is_free_for(request.step.kind(), &request.key, now)?;
            Ok(held.counters.count(now, &request))
        })))
    }
}

impl QuorumMember for MemoryStore {
    fn vote(self: Arc<Self>, request: AcquireRequest, vote_after: Option<Duration>) -> StoreFuture<Vote> {
        let abstains = |after| self.with(|held, now| held.abstains(now, after));
        match vote_after.and_then(abstains) {
            Some(votes_in) => Box::pin(ready(Ok(Vote::Abstained { votes_in }))),
            None => {
                let reply = self.acquire(request);
                Box::pin(async move { reply.await.map(Vote::Cast) })
            }
        }
    }

    fn raise_fence(
        self: Arc<Self>,
        kind: Kind,
        key: LockKey,
        grant: GrantId,
        at_least: u64,
    ) -> StoreFuture<bool> {
        Box::pin(ready(Ok(self.with(|held, _| {
            let known = match kind.family() {
                Family::ReadWrite => held.read_write.knows(kind, &key, &grant),
                Family::Permits => held.counters.knows(kind, &key, grant),
                Family::Plain | Family::Latch => held.entry(&key, grant).is_some(),
            };
            if known {
                held.last_token = held.last_token.max(at_least);
            }
            known
        }))))
    }
}

/// The topic of a key's notifications: for all of its waiters, or for one.
pub(crate) fn topic(kind: Kind, key: &LockKey, grant: GrantId) -> Arc<str> {
    match kind.waits_in_store() {
        // No key has a line break.
        true => format!("{key}\n{grant}").into(),
        false => key.as_str().into(),
    }
}

impl Entry {
    fn held(grant: GrantId, until: Instant) -> Entry {
        Entry {
            grant,
            until,
            kept: false,
        }
    }

    fn holder(&self, now: Instant) -> Holder {
        Holder::new(
            Kind::Mutex,
            self.grant.to_string(),
            u64::from(!self.kept),
            Some(self.until.saturating_duration_since(now)),
        )
    }
}

fn taken(by: &str) -> StoreError {
    StoreError::not_done(Reason::KeyTaken(by.to_owned()), format!("the key holds {by}"))
}

fn unsupported(kind: Kind) -> StoreError {
    StoreError::not_done(Reason::Unsupported, format!("a {kind} is not acquired"))
}
