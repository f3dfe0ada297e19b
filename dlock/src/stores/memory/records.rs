//! Records in this process's memory: leases and retention end by tokio's clock, as on a server.

use std::collections::{BTreeMap, BTreeSet};
use std::future::{Future, ready};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::base::broken;
use crate::base::clock;
use crate::store::Hub;
use crate::store::records::{
    ClaimReply, ClaimRequest, ClaimToken, Fingerprint, ForgetReply, OnOrphan, OwnerReply, RecordKey,
    RecordLook, RecordState, RecordStore, RecordView, SlotOutcome, SlotReply, SlotRequest,
};
use crate::store::slots::{micros_of_print, slot_print, time_of};
use crate::store::{StoreError, Watch};
use crate::stores::memory::MemoryStore;

/// How many records past their retention an operation removes: more than it can create, and few enough to stay short.
const REMOVED: usize = 256;

/// The records of one store, and their waiters.
#[derive(Debug, Default)]
pub(crate) struct Shelf {
    table: Mutex<Table>,
    hub: Arc<Hub>,
    /// The keys that were notified since the last call.
    #[cfg(dlock_sim)]
    told: Mutex<Vec<Arc<str>>>,
}

impl Shelf {
    /// How many records are kept.
    pub(crate) fn len(&self) -> usize {
        let now = clock::now();
        let mut table = self.table.lock();
        table.purge(now, usize::MAX);
        table.records.len()
    }

    /// Returns how many keys have listeners.
    pub(crate) fn watched(&self) -> usize {
        self.hub.len()
    }

    /// Forgets everything and notifies no waiter.
    pub(crate) fn clear(&self) {
        *self.table.lock() = Table::default();
    }

    fn with<T>(&self, step: impl FnOnce(&mut Table, Instant) -> T) -> T {
        let now = clock::now();
        let mut table = self.table.lock();
        table.purge(now, REMOVED);
        step(&mut table, now)
    }

    /// A copy without listeners.
    #[cfg(dlock_sim)]
    pub(crate) fn fork(&self) -> Shelf {
        Shelf {
            table: Mutex::new(self.table.lock().clone()),
            ..Shelf::default()
        }
    }

    #[cfg(dlock_sim)]
    pub(crate) fn take_told(&self) -> Vec<Arc<str>> {
        std::mem::take(&mut self.told.lock())
    }

    #[cfg(dlock_sim)]
    pub(crate) fn listen(&self, key: Arc<str>) -> Watch {
        self.hub.listen(key, |_| true, |_| ())
    }

    fn tell(&self, key: &RecordKey) {
        #[cfg(dlock_sim)]
        self.told.lock().push(record_topic(key));
        self.hub.tell(key.as_str());
    }

    /// Runs an operation after which the waiters check again, if it changed the record.
    fn end(&self, key: &RecordKey, step: impl FnOnce(&mut Table, Instant) -> Change) -> OwnerReply {
        match self.with(step) {
            Change::Made => {
                self.tell(key);
                OwnerReply::Done
            }
            Change::MadeBefore => OwnerReply::Done,
            Change::Refused => OwnerReply::NotOwner,
        }
    }
}

#[derive(Debug, Clone, Default)]
struct Table {
    /// A tree: a million records are added and removed without a long pause, unlike in a hash table that grows.
    records: BTreeMap<RecordKey, Box<Record>>,
    /// The records by the end of their retention, so that they are removed without a search.
    ends: BTreeSet<(Instant, RecordKey)>,
}

#[derive(Debug, Clone)]
struct Record {
    token: ClaimToken,
    fingerprint: Fingerprint,
    attempt: u32,
    fence: u64,
    /// The end of the retention.
    until: Instant,
    state: State,
}

#[derive(Debug, Clone)]
enum State {
    Claimed {
        lease_until: Instant,
    },
    /// A claim was given up, or one that was taken over was released: its effects are unknown.
    Orphaned,
    /// Nothing was done in the slot: the record stays, so that no earlier slot is done again.
    Released,
    Completed {
        response: Box<[u8]>,
    },
}

impl Record {
    fn response(&self) -> Option<&[u8]> {
        match &self.state {
            State::Completed { response } => Some(response),
            _ => None,
        }
    }
}

/// The outcome of an operation that only the owner may run.
enum Change {
    Made,
    /// By the same token.
    MadeBefore,
    Refused,
}

impl Table {
    /// Removes at most this many records that are past their retention.
    fn purge(&mut self, now: Instant, most: usize) {
        for _ in 0..most {
            if self.ends.first().is_none_or(|(until, _)| *until > now) {
                break;
            }
            if let Some((_, key)) = self.ends.pop_first() {
                self.records.remove(&key);
            }
        }
    }

    fn get(&self, key: &RecordKey, now: Instant) -> Option<&Record> {
        self.records
            .get(key)
            .map(|record| &**record)
            .filter(|record| record.until > now)
    }

    /// Returns the record, if this token owns it.
    fn own(&mut self, key: &RecordKey, token: &ClaimToken, now: Instant) -> Option<&mut Record> {
        self.records
            .get_mut(key)
            .map(|record| &mut **record)
            .filter(|record| record.until > now && record.token == *token)
    }

    fn put(&mut self, key: RecordKey, record: Record) {
        self.ends.insert((record.until, key.clone()));
        if let Some(old) = self.records.insert(key.clone(), Box::new(record)) {
            self.forget_end(key, old.until);
        }
    }

    fn forget_end(&mut self, key: RecordKey, until: Instant) {
        // If the end is the same, it now belongs to the new record.
        if self.records.get(&key).is_none_or(|record| record.until != until) {
            self.ends.remove(&(until, key));
        }
    }

    /// Keeps the record until then.
    fn keep(&mut self, key: &RecordKey, until: Instant) {
        if let Some(record) = self.records.get_mut(key) {
            let before = std::mem::replace(&mut record.until, until);
            if before != until {
                self.ends.remove(&(before, key.clone()));
                self.ends.insert((until, key.clone()));
            }
        }
    }

    fn claim(&mut self, request: ClaimRequest, now: Instant, fence: impl FnOnce() -> u64) -> ClaimReply {
        let ClaimRequest {
            key,
            token,
            fingerprint,
            lease,
            retention,
            on_orphan,
        } = request;
        let lease_until = end(now, lease);
        let mut until = end(now, retention.max(lease));
        let mut attempt = 1;
        if let Some(record) = self.get(&key, now) {
            if record.fingerprint != fingerprint {
                return ClaimReply::Mismatch;
            }
            until = until.max(record.until);
            attempt = record.attempt;
            match &record.state {
                State::Completed { response } => {
                    let mut response: &[u8] = response;
                    if broken!(RecordReplaysOtherResult) {
                        let first = self.records.values().find_map(|record| record.response());
                        response = first.unwrap_or(response);
                    }
                    return ClaimReply::Completed {
                        response: response.to_vec(),
                    };
                }
                State::Claimed { lease_until: before } if record.token == token => {
                    let (fence, lease_until) = (record.fence, lease_until.max(*before));
                    self.set_lease(&key, lease_until);
                    self.keep(&key, until);
                    return ClaimReply::Claimed { attempt, fence };
                }
                State::Claimed { lease_until } if *lease_until > now => {
                    return ClaimReply::InProgress {
                        remaining: *lease_until - now,
                        attempt,
                    };
                }
                State::Claimed { .. } | State::Orphaned => match on_orphan {
                    OnOrphan::TakeOver => attempt = attempt.saturating_add(1),
                    OnOrphan::Leave => return ClaimReply::Orphan { attempt },
                },
                State::Released => attempt = 1,
            }
        }
        let fence = fence();
        let record = Record {
            token,
            fingerprint,
            attempt,
            fence,
            until,
            state: State::Claimed { lease_until },
        };
        self.put(key, record);
        ClaimReply::Claimed { attempt, fence }
    }

    fn claim_slot(
        &mut self,
        mut request: ClaimRequest,
        asked: SlotRequest,
        now: Instant,
        fence: impl FnOnce() -> u64,
    ) -> SlotReply {
        let wall = micros(clock::wall_at(now));
        let (slot, latest) = asked.judged(wall);
        let found = self.get(&request.key, now);
        let last = found.and_then(|record| micros_of_print(&record.fingerprint));
        let reply = |slot, outcome| SlotReply::of_micros(wall, slot, last, outcome);
        let mut is_new = false;
        if let Some(record) = found {
            let Some(last) = last else {
                return reply(slot, SlotOutcome::Claim(ClaimReply::Mismatch));
            };
            if record.token == request.token {
                // As for any repeated claim; the record already has this slot.
                if !matches!(record.state, State::Claimed { .. }) {
                    return reply(last, SlotOutcome::Missed);
                }
                request.fingerprint = record.fingerprint;
                return reply(last, SlotOutcome::Claim(self.claim(request, now, fence)));
            }
            is_new = last < slot;
            if slot <= latest && last > latest {
                return reply(slot, SlotOutcome::ClockWentBack);
            }
            if slot <= latest && last > slot && !broken!(EarlierSlotDone) {
                return reply(slot, SlotOutcome::Missed);
            }
        }
        if slot > latest {
            return reply(slot, SlotOutcome::TooFarAhead);
        }
        if wall.saturating_sub(slot) > micros(request.retention) {
            return reply(slot, SlotOutcome::Missed);
        }
        // From the beginning of the slot on, which may be still to come.
        let ahead = Duration::from_micros(slot.saturating_sub(wall));
        request.retention = request.retention.saturating_add(ahead);
        if is_new && let Some(record) = self.records.get_mut(&request.key) {
            match &mut record.state {
                State::Claimed { lease_until } if *lease_until > now => {
                    let (remaining, attempt) = (*lease_until - now, record.attempt);
                    let running = ClaimReply::InProgress { remaining, attempt };
                    return reply(slot, SlotOutcome::Claim(running));
                }
                // What the earlier slot has left does not matter any more.
                state => *state = State::Released,
            }
            record.fingerprint = slot_print(slot);
        }
        request.fingerprint = slot_print(slot);
        reply(slot, SlotOutcome::Claim(self.claim(request, now, fence)))
    }

    fn look(&self, key: &RecordKey, response: bool, now: Instant) -> RecordLook {
        let record = self.get(key, now).map(|record| {
            let state = match &record.state {
                State::Claimed { lease_until } => {
                    RecordState::claimed(lease_until.saturating_duration_since(now))
                }
                State::Orphaned => RecordState::Orphaned,
                State::Released => RecordState::Released,
                State::Completed { response: bytes } => {
                    RecordState::completed(bytes.len() as u64, response.then(|| bytes.to_vec()))
                }
            };
            let expires_in = record.until - now;
            RecordView::new(
                state,
                record.attempt,
                record.fence,
                expires_in,
                record.fingerprint,
            )
        });
        RecordLook::new(time_of(micros(clock::wall_at(now))), record)
    }

    fn forget(&mut self, key: &RecordKey, now: Instant) -> ForgetReply {
        let Some(record) = self.get(key, now) else {
            return ForgetReply::Missing;
        };
        if let State::Claimed { lease_until } = record.state
            && lease_until > now
        {
            return ForgetReply::Claimed {
                remaining: lease_until - now,
                attempt: record.attempt,
                fence: record.fence,
            };
        }
        let until = record.until;
        self.records.remove(key);
        self.forget_end(key.clone(), until);
        ForgetReply::Forgotten
    }

    fn set_lease(&mut self, key: &RecordKey, lease_until: Instant) {
        if let Some(record) = self.records.get_mut(key) {
            record.state = State::Claimed { lease_until };
        }
    }

    fn extend(
        &mut self,
        key: &RecordKey,
        token: &ClaimToken,
        (lease, retention): (Duration, Duration),
        now: Instant,
    ) -> Change {
        let Some(record) = self.own(key, token, now) else {
            return Change::Refused;
        };
        match &mut record.state {
            State::Claimed { lease_until } => *lease_until = end(now, lease),
            State::Completed { .. } => return Change::MadeBefore,
            State::Orphaned | State::Released => return Change::Refused,
        }
        let until = record.until.max(end(now, retention.max(lease)));
        self.keep(key, until);
        Change::Made
    }

    fn complete(
        &mut self,
        key: &RecordKey,
        token: &ClaimToken,
        response: Vec<u8>,
        retention: Duration,
        now: Instant,
    ) -> Change {
        let owner = if broken!(RecordCompletedUnderForeignClaim) {
            self.get(key, now).map(|record| record.token.clone())
        } else {
            None
        };
        let Some(record) = self.own(key, owner.as_ref().unwrap_or(token), now) else {
            return Change::Refused;
        };
        match record.state {
            State::Claimed { .. } => {}
            State::Completed { .. } => return Change::MadeBefore,
            State::Orphaned | State::Released => return Change::Refused,
        }
        record.state = State::Completed {
            response: response.into(),
        };
        self.keep(key, end(now, retention));
        Change::Made
    }

    /// `forget`: nothing was done under this claim, so a first one leaves no record.
    fn release_claim(&mut self, key: &RecordKey, token: &ClaimToken, forget: bool, now: Instant) -> Change {
        if self.get(key, now).is_none() {
            return Change::MadeBefore;
        }
        let Some(record) = self.own(key, token, now) else {
            return Change::Refused;
        };
        match record.state {
            State::Claimed { .. }
                if forget
                    && record.attempt == 1
                    && micros_of_print(&record.fingerprint).is_some()
                    && !broken!(SlotForgottenByRelease) =>
            {
                record.state = State::Released;
                Change::Made
            }
            State::Claimed { .. } if forget && record.attempt == 1 => {
                let until = record.until;
                self.records.remove(key);
                self.forget_end(key.clone(), until);
                Change::Made
            }
            State::Claimed { .. } => {
                record.state = State::Orphaned;
                // The attempt was none.
                record.attempt -= u32::from(forget);
                Change::Made
            }
            State::Orphaned | State::Released => Change::MadeBefore,
            State::Completed { .. } => Change::Refused,
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// An unreachable moment is as good as any other.
fn end(now: Instant, after: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    now + after.min(CENTURY)
}

/// The records beside the locks of a [`MemoryStore`].
pub(crate) struct MemoryRecords(pub(crate) MemoryStore);

impl RecordStore for MemoryRecords {
    fn claim(
        self: Arc<Self>,
        request: ClaimRequest,
    ) -> impl Future<Output = Result<ClaimReply, StoreError>> + Send + 'static {
        let store = &self.0;
        ready(Ok(store
            .shelf()
            .with(|table, now| table.claim(request, now, || store.token()))))
    }

    fn extend(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
        lease: Duration,
        retention: Duration,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
        let change = self
            .0
            .shelf()
            .with(|table, now| table.extend(&key, &token, (lease, retention), now));
        ready(Ok(match change {
            Change::Made | Change::MadeBefore => OwnerReply::Done,
            Change::Refused => OwnerReply::NotOwner,
        }))
    }

    fn complete(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
        response: Vec<u8>,
        retention: Duration,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
        ready(Ok(self.0.shelf().end(&key, |table, now| {
            table.complete(&key, &token, response, retention, now)
        })))
    }

    fn release(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
        ready(Ok(self.0.shelf().end(&key, |table, now| {
            table.release_claim(&key, &token, true, now)
        })))
    }

    fn abandon(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
        ready(Ok(self.0.shelf().end(&key, |table, now| {
            table.release_claim(&key, &token, false, now)
        })))
    }

    fn claim_slot(
        self: Arc<Self>,
        request: ClaimRequest,
        slot: SlotRequest,
    ) -> impl Future<Output = Result<SlotReply, StoreError>> + Send + 'static {
        let store = &self.0;
        ready(Ok(store.shelf().with(|table, now| {
            table.claim_slot(request, slot, now, || store.token())
        })))
    }

    fn inspect(
        self: Arc<Self>,
        key: RecordKey,
        response: bool,
    ) -> impl Future<Output = Result<RecordLook, StoreError>> + Send + 'static {
        ready(Ok(self
            .0
            .shelf()
            .with(|table, now| table.look(&key, response, now))))
    }

    fn forget(
        self: Arc<Self>,
        key: RecordKey,
    ) -> impl Future<Output = Result<ForgetReply, StoreError>> + Send + 'static {
        let shelf = self.0.shelf();
        let reply = shelf.with(|table, now| table.forget(&key, now));
        if reply == ForgetReply::Forgotten {
            shelf.tell(&key);
        }
        ready(Ok(reply))
    }

    fn watch(self: Arc<Self>, key: &RecordKey) -> Watch {
        self.0.shelf().hub.listen(key.shared(), |_| true, |_| ())
    }
}

#[cfg(dlock_sim)]
/// The topic of a record's notifications; it differs from those of locks.
#[must_use]
pub fn record_topic(key: &RecordKey) -> Arc<str> {
    // No lock begins with a line break.
    format!("\n{}", key.as_str()).into()
}
