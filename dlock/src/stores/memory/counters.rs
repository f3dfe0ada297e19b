//! The semaphores and latches of the memory store.

use tokio::time::Instant;

use super::Busy;
use super::permits::{Semaphore, Step};
use super::read_write::Left;
use crate::LockKey;
use crate::base::chance::HashMap;
use crate::store::counter::{CounterReply, CounterRequest, CounterStep};
use crate::store::{AcquireRequest, GrantId, Holder, Kind, ReleaseRequest, RenewRequest};

/// All counters of a store, and the replies to operations that may arrive again.
#[derive(Debug, Clone, Default)]
pub(super) struct CounterTable {
    kept: HashMap<LockKey, Counter>,
    answers: HashMap<GrantId, (CounterReply, Instant)>,
    /// The number of replies at which old ones are removed.
    room: usize,
    /// Names whose waiters must check again.
    notifications: Vec<LockKey>,
}

#[derive(Debug, Clone)]
enum Counter {
    Semaphore(Box<Semaphore>),
    /// A semaphore without holders and waiters: the number of available permits. Many such names may stay.
    Idle(i64),
    Latch(u64),
}

impl CounterTable {
    pub(super) fn clear(&mut self) {
        *self = CounterTable::default();
    }

    /// Names whose waiters must check again.
    pub(super) fn notifications(&mut self) -> Vec<LockKey> {
        std::mem::take(&mut self.notifications)
    }

    /// The counter of this name: permits or a latch.
    pub(super) fn kind_at(&self, key: &LockKey, now: Instant) -> Option<Kind> {
        if self.kept.is_empty() {
            return None;
        }
        Some(match self.kept.get(key)? {
            // Only waiters and ended leases, as on a server.
            Counter::Semaphore(semaphore) if semaphore.has_nothing(now) => return None,
            Counter::Semaphore(_) | Counter::Idle(_) => Kind::Permit,
            Counter::Latch(_) => Kind::Latch,
        })
    }

    fn semaphore(&self, key: &LockKey) -> Option<&Semaphore> {
        self.kept.get(key).and_then(Counter::as_semaphore)
    }

    /// Returns how many grants hold permits.
    pub(super) fn len(&self, now: Instant) -> usize {
        let semaphores = self.kept.values().filter_map(Counter::as_semaphore);
        semaphores.map(|semaphore| semaphore.len(now)).sum()
    }

    /// Returns the names of all semaphores that may have holders.
    pub(super) fn keys(&self, now: Instant) -> impl Iterator<Item = &LockKey> {
        let is_in_use = move |semaphore: &Semaphore| !semaphore.has_nothing(now);
        let semaphores =
            (self.kept.iter()).filter(move |(_, counter)| counter.as_semaphore().is_some_and(is_in_use));
        semaphores.map(|(key, _)| key)
    }

    /// Returns the holders of permits of a semaphore.
    pub(super) fn holders(&self, key: &LockKey, now: Instant) -> Vec<Holder> {
        self.semaphore(key)
            .map_or_else(Vec::new, |semaphore| semaphore.holders(now))
    }

    /// Returns every grant of permits of a semaphore.
    #[cfg(dlock_sim)]
    pub(super) fn held(&self, key: &LockKey, now: Instant) -> Vec<(Kind, GrantId, Instant, bool, u32)> {
        self.semaphore(key)
            .map_or_else(Vec::new, |semaphore| semaphore.held(now))
    }

    pub(super) fn knows(&self, kind: Kind, key: &LockKey, grant: GrantId) -> bool {
        self.semaphore(key)
            .is_some_and(|semaphore| semaphore.knows(kind, grant))
    }

    /// Takes all permits from their holders; returns whether there were any.
    pub(super) fn take(&mut self, key: &LockKey, now: Instant) -> bool {
        let Some(Counter::Semaphore(semaphore)) = self.kept.get_mut(key) else {
            return false;
        };
        // Holders whose leases have ended hold nothing.
        if semaphore.expire(now) {
            self.notifications.push(key.clone());
        }
        semaphore.take_all()
    }

    /// Applies an operation to a semaphore, as it is now; a semaphore without state is removed.
    fn on<T>(
        &mut self,
        key: &LockKey,
        now: Instant,
        step: impl FnOnce(&mut Semaphore) -> Step<T>,
    ) -> Step<T> {
        let new = || Counter::Semaphore(Box::default());
        let counter = self.kept.entry(key.clone()).or_insert_with(new);
        if let Counter::Idle(free) = *counter {
            *counter = Counter::Semaphore(Box::new(Semaphore::idle(free)));
        }
        let mut nothing = Semaphore::default();
        let semaphore = match counter {
            Counter::Semaphore(semaphore) => semaphore.as_mut(),
            // When a counter became another kind, all its holders have lost what they had.
            Counter::Latch(_) | Counter::Idle(_) => &mut nothing,
        };
        let came_back = semaphore.expire(now);
        let mut step = step(semaphore);
        step.tell |= came_back;
        let (is_unknown, free) = (semaphore.is_unknown(now), semaphore.idle_with());
        if matches!(counter, Counter::Semaphore(_)) {
            if is_unknown {
                self.kept.remove(key);
            } else if let Some(free) = free {
                *counter = Counter::Idle(free);
            }
        }
        step
    }

    /// Applies an operation, and notifies the waiters.
    fn told<T>(&mut self, key: &LockKey, now: Instant, step: impl FnOnce(&mut Semaphore) -> Step<T>) -> T {
        let Step { brought, tell } = self.on(key, now, step);
        if tell {
            self.notifications.push(key.clone());
        }
        brought
    }

    pub(super) fn acquire(&mut self, now: Instant, request: &AcquireRequest) -> Result<(), Busy> {
        self.told(&request.key, now, |semaphore| semaphore.acquire(now, request))
    }

    pub(super) fn release(&mut self, now: Instant, request: &ReleaseRequest) -> Left {
        let step = self.on(&request.key, now, |semaphore| semaphore.release(now, request));
        if !step.brought && step.tell {
            self.notifications.push(request.key.clone());
        }
        match (step.brought, step.tell) {
            (false, _) => Left::NotHeld,
            (true, false) => Left::Quietly,
            (true, true) => Left::Loudly,
        }
    }

    pub(super) fn renew(&mut self, now: Instant, request: &RenewRequest) -> bool {
        self.told(&request.key, now, |semaphore| semaphore.renew(now, request))
    }

    /// Runs an operation on a counter of this kind.
    pub(super) fn count(&mut self, now: Instant, request: &CounterRequest) -> CounterReply {
        if let Some((reply, until)) = self.answers.get(&request.id)
            && *until > now
        {
            return *reply;
        }
        let reply = match request.step.kind() {
            Kind::Latch => self.on_latch(&request.key, request.step),
            _ => self.told(&request.key, now, |semaphore| semaphore.count(request.step)),
        };
        if !request.step.is_look() {
            self.remember(now, request, reply);
        }
        reply
    }

    fn remember(&mut self, now: Instant, request: &CounterRequest, reply: CounterReply) {
        if self.answers.len() >= self.room {
            self.answers.retain(|_, (_, until)| *until > now);
            self.room = (2 * self.answers.len()).max(64);
        }
        let until = now + request.repeated_for;
        self.answers.insert(request.id, (reply, until));
    }

    fn on_latch(&mut self, key: &LockKey, step: CounterStep) -> CounterReply {
        let count = match self.kept.get_mut(key) {
            Some(Counter::Latch(count)) => Some(count),
            _ => None,
        };
        let (reply, tell) = match (step, count) {
            (CounterStep::SetCount { count }, None) => {
                self.kept.insert(key.clone(), Counter::Latch(count));
                (CounterReply::Done(true), true)
            }
            (CounterStep::SetCount { .. }, Some(_)) | (CounterStep::DeleteLatch, None) => {
                (CounterReply::Done(false), false)
            }
            (CounterStep::CountDown, None) => (CounterReply::TooFew { is: 0 }, false),
            (CounterStep::CountDown, Some(count)) if *count > 1 => {
                *count -= 1;
                (CounterReply::Number(*count), false)
            }
            (CounterStep::CountDown, Some(_)) => {
                self.kept.remove(key);
                (CounterReply::Number(0), true)
            }
            (CounterStep::DeleteLatch, Some(_)) => {
                self.kept.remove(key);
                (CounterReply::Done(true), true)
            }
            (_, count) => (CounterReply::Number(count.map_or(0, |count| *count)), false),
        };
        if tell {
            self.notifications.push(key.clone());
        }
        reply
    }
}

impl Counter {
    fn as_semaphore(&self) -> Option<&Semaphore> {
        match self {
            Counter::Semaphore(semaphore) => Some(semaphore.as_ref()),
            Counter::Idle(_) | Counter::Latch(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A used name keeps only its number, which is the data of its users.
    #[test]
    fn only_the_number_stays_of_an_unused_semaphore() {
        let (mut counters, now) = (CounterTable::default(), crate::base::clock::now());
        let (key, grant) = (LockKey::from("k"), GrantId::from_parts(1, 1));
        let lease = Duration::from_secs(60);
        let mut request = AcquireRequest::new(Kind::Permit, key.clone(), grant, lease);
        request.permits = Some(3);
        assert!(counters.acquire(now, &request).is_ok());
        assert_eq!(counters.len(now), 1);
        counters.release(now, &request.undone());
        assert!(matches!(counters.kept[&key], Counter::Idle(3)));
        assert_eq!(
            (counters.len(now), counters.kind_at(&key, now)),
            (0, Some(Kind::Permit))
        );
        request.permits = Some(7);
        request.amount = 3;
        assert!(counters.acquire(now, &request).is_ok());
        request.grant = GrantId::from_parts(1, 2);
        assert!(counters.acquire(now, &request).is_err(), "there are three");
        assert!(std::mem::size_of::<Counter>() <= 16);
    }

    #[test]
    fn ended_permits_without_a_total_leave_their_name() {
        let (mut counters, now) = (CounterTable::default(), crate::base::clock::now());
        let key = LockKey::from("k");
        let seconds = Duration::from_secs;
        for (number, lease) in [(1, 10), (2, 60)] {
            let grant = GrantId::from_parts(1, number);
            let mut request = AcquireRequest::new(Kind::Permit, key.clone(), grant, seconds(lease));
            request.limit = Some(2);
            assert!(counters.acquire(now, &request).is_ok());
        }
        for (after, wanted) in [(0, Some(Kind::Permit)), (59, Some(Kind::Permit)), (60, None)] {
            let then = now + seconds(after);
            assert_eq!(counters.kind_at(&key, then), wanted, "{after} s");
            assert_eq!(counters.keys(then).next(), wanted.map(|_| &key), "{after} s");
        }
    }
}
