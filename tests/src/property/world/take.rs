//! What is asked for: locks, sets of them, permits; and the counters.

use std::time::Duration;

use dlock::store::Kind;
use dlock::{Error, Latch, LockGuard, Semaphore, UnownedSemaphore};
use tokio::time::Instant;

use super::{Done, Guard, Halt, RENEWED, Real, World, lock_kind, wrong};
use crate::property::model::{Answer, Span, Wanted};
use crate::property::ops::{Counter, Lease, Step};

impl World<'_> {
    /// Something was granted that should be: the model has it from now on.
    pub(super) fn granted(
        &mut self,
        wanted: Wanted,
        token: u64,
        at: Span,
        lease: (Duration, Duration),
    ) -> Result<(usize, u64), Halt> {
        if !self.model.token_grows(wanted.kind, wanted.key, token) {
            return wrong("a token greater than all before", token);
        }
        Ok(self.model.grant(wanted, at, lease))
    }

    pub(super) fn hold(&mut self, owner: usize, real: Real, of: Vec<(usize, u64)>) {
        self.guards.push(Guard { owner, real, of });
    }

    pub(super) async fn take(
        &mut self,
        owner: usize,
        key: usize,
        kind: Kind,
        lease: Lease,
        began: Instant,
    ) -> Done {
        let fixed = Self::lease(lease);
        let mut lock = self.clients[owner].lock(self.name(key)).kind(lock_kind(kind));
        if let Some(lease) = fixed {
            lock = lock.fixed_lease(lease);
        }
        let wanted = Wanted {
            owner,
            key,
            kind,
            amount: 1,
            fixed: fixed.is_some(),
        };
        let outcome = lock.try_acquire().await;
        self.took(wanted, fixed.unwrap_or(RENEWED), outcome, began)
    }

    pub(super) fn took(
        &mut self,
        wanted: Wanted,
        lease: Duration,
        outcome: Result<LockGuard, Error>,
        began: Instant,
    ) -> Done {
        match (self.model.in_the_way(&wanted, None), outcome) {
            (None, Ok(guard)) => {
                let at = Span::new(began, Instant::now());
                let of = self.granted(wanted, guard.fencing_token(), at, (lease, lease))?;
                self.hold(wanted.owner, Real::Lock(guard), vec![of]);
                Ok(())
            }
            (expected, outcome) => {
                let expected = expected.unwrap_or(Answer::Granted);
                self.answered(expected, outcome, |_| Answer::Granted, began)
            }
        }
    }

    pub(super) async fn take_all(
        &mut self,
        owner: usize,
        keys: &mut Vec<usize>,
        kind: Kind,
        lease: Lease,
        began: Instant,
    ) -> Done {
        let fixed = Self::lease(lease);
        let mut all = self.clients[owner]
            .multi(keys.iter().map(|key| self.name(*key)))
            .kind(lock_kind(kind));
        if let Some(lease) = fixed {
            all = all.fixed_lease(lease);
        }
        keys.sort_unstable();
        keys.dedup();
        let wanted = |key| Wanted {
            owner,
            key,
            kind,
            amount: 1,
            fixed: fixed.is_some(),
        };
        let outcome = all.try_acquire().await;
        let expected = if keys.is_empty() || (kind == Kind::Fair && keys.len() > 1) {
            Some(Answer::Invalid)
        } else {
            let each = keys.iter().map(|key| self.model.in_the_way(&wanted(*key), None));
            each.flatten().next()
        };
        match (expected, outcome) {
            (None, Ok(guard)) => {
                let at = Span::new(began, Instant::now());
                let lease = fixed.unwrap_or(RENEWED);
                let mut of = Vec::new();
                for key in keys.iter() {
                    let Some(token) = guard.fencing_token_of(self.name(*key)) else {
                        return wrong("a token for each", guard);
                    };
                    of.push(self.granted(wanted(*key), token, at, (lease, lease))?);
                }
                self.hold(owner, Real::Several(guard), of);
                Ok(())
            }
            (expected, outcome) => {
                let expected = expected.unwrap_or(Answer::Granted);
                self.answered(expected, outcome, |_| Answer::Granted, began)
            }
        }
    }

    pub(super) async fn take_permits(
        &mut self,
        owner: usize,
        key: usize,
        amount: u32,
        total: Option<u32>,
        lease: Lease,
        began: Instant,
    ) -> Done {
        let kind = Counter::of(key).kind();
        let fixed = Self::lease(lease);
        let wanted = Wanted {
            owner,
            key,
            kind,
            amount,
            fixed: fixed.is_some(),
        };
        let expected = match amount {
            0 => Some(Answer::Invalid),
            _ => self.model.in_the_way(&wanted, total),
        };
        if !matches!(expected, Some(Answer::Invalid | Answer::Taken { .. })) {
            self.model.begin(key, total);
        }
        if kind == Kind::Unowned {
            let mut semaphore = self.unowned(owner, key);
            if let Some(total) = total {
                semaphore = semaphore.permits(total);
            }
            if expected.is_none() {
                self.model.take_unowned(key, amount);
            }
            let outcome = semaphore.try_acquire_many(amount).await;
            let expected = expected.unwrap_or(Answer::Nothing);
            return self.answered(expected, outcome, |()| Answer::Nothing, began);
        }
        let mut semaphore = self.semaphore(owner, key);
        if let Some(total) = total {
            semaphore = semaphore.permits(total);
        }
        if let Some(lease) = fixed {
            semaphore = semaphore.fixed_lease(lease);
        }
        match (expected, semaphore.try_acquire_many(amount).await) {
            (None, Ok(permit)) => {
                let (at, lease) = (Span::new(began, Instant::now()), fixed.unwrap_or(RENEWED));
                let of = self.granted(wanted, permit.fencing_token(), at, (lease, lease))?;
                self.hold(owner, Real::Permit(permit), vec![of]);
                Ok(())
            }
            (expected, outcome) => {
                let expected = expected.unwrap_or(Answer::Granted);
                self.answered(expected, outcome, |_| Answer::Granted, began)
            }
        }
    }

    pub(super) fn semaphore(&self, owner: usize, key: usize) -> Semaphore {
        self.clients[owner].semaphore(self.name(key))
    }

    pub(super) fn unowned(&self, owner: usize, key: usize) -> UnownedSemaphore {
        self.clients[owner].unowned_semaphore(self.name(key))
    }

    pub(super) fn latch(&self, owner: usize, key: usize) -> Latch {
        self.clients[owner].latch(self.name(key))
    }

    /// Steps that a counter of this sort does not have are left out.
    pub(super) async fn count(&mut self, owner: usize, key: usize, step: Step, began: Instant) -> Done {
        let status = |status: dlock::SemaphoreStatus| Answer::Status(Some((status.total, status.available)));
        match Counter::of(key) {
            Counter::Permits => {
                let permits = self.semaphore(owner, key);
                let (outcome, step) = match step {
                    Step::TrySet(total) => (permits.try_set_permits(total).await.map(Answer::Done), step),
                    Step::Set(total) => (permits.set_permits(total).await.map(Answer::Done), step),
                    Step::Add(more) => (permits.add_permits(more).await.map(status), step),
                    Step::Remove(fewer) => (permits.remove_permits(fewer).await.map(status), step),
                    Step::Delete => (permits.delete().await.map(Answer::Done), step),
                    _ => (
                        permits
                            .status()
                            .await
                            .map(|seen| Answer::Status(seen.map(|seen| (seen.total, seen.available)))),
                        Step::Look,
                    ),
                };
                let expected = self.model.count(key, step);
                self.answered(expected, outcome, |answer| answer, began)
            }
            Counter::Unowned => {
                let permits = self.unowned(owner, key);
                let (outcome, step) = match step {
                    Step::TrySet(total) => (permits.try_set_permits(total).await.map(Answer::Done), step),
                    Step::Add(more) => (permits.add_permits(more).await.map(status), step),
                    Step::Remove(fewer) => (permits.remove_permits(fewer).await.map(status), step),
                    Step::Give(more) => (permits.release_many(more).await.map(|()| Answer::Nothing), step),
                    Step::Drain => (permits.drain().await.map(Answer::Number), step),
                    Step::Delete => (permits.delete().await.map(Answer::Done), step),
                    _ => (permits.available().await.map(Answer::Available), Step::Look),
                };
                let expected = self.model.count(key, step);
                self.answered(expected, outcome, |answer| answer, began)
            }
            Counter::Latch => {
                let latch = self.latch(owner, key);
                let (outcome, step) = match step {
                    Step::SetCount(count) => (latch.try_set_count(count).await.map(Answer::Done), step),
                    Step::CountDown => (latch.count_down().await.map(Answer::Number), step),
                    Step::Delete => (latch.delete().await.map(Answer::Done), step),
                    _ => (latch.count().await.map(Answer::Number), Step::Look),
                };
                let expected = self.model.count(key, step);
                self.answered(expected, outcome, |answer| answer, began)
            }
        }
    }
}
