//! Read-write locks in memory: many readers, or one writer and those readers that it let in itself.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::Instant;

use super::Busy;
use super::deadlines::Deadlines;
use super::writers::{HEARD_WITHIN, Writers};
use crate::LockKey;
use crate::base::broken;
use crate::base::chance::{HashMap, HashSet};
use crate::store::{AcquireRequest, GrantId, Holder, Kind, ReleaseRequest, RenewRequest};

/// The read-write locks of a store.
#[derive(Debug, Clone, Default)]
pub(super) struct ReadWriteLocks {
    locks: HashMap<LockKey, Inside>,
    /// When the next holder of each lock expires.
    ends: BTreeSet<(Instant, LockKey)>,
    /// The writers to which readers yield.
    writers: Writers,
}

/// The holders inside.
#[derive(Debug, Clone, Default)]
struct Inside {
    writer: Option<GrantId>,
    /// The leases of the writer and of all readers.
    leases: Deadlines,
    /// Released holders whose `min_hold` still keeps the lock.
    kept: HashSet<GrantId>,
}

/// The waiters to notify when a holder has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    /// There was no such holder.
    NotHeld,
    /// None: other holders are still inside.
    Quietly,
    /// The waiters.
    Loudly,
}

impl Inside {
    fn purge(&mut self, now: Instant) {
        while let Some(grant) = self.leases.pop_ended(now) {
            self.forget(grant);
        }
    }

    fn remove(&mut self, grant: GrantId) {
        self.leases.remove(grant);
        self.forget(grant);
    }

    /// Whether its lease is over.
    fn forget(&mut self, grant: GrantId) {
        self.kept.remove(&grant);
        self.writer.take_if(|writer| *writer == grant);
    }

    fn is_inside(&self, kind: Kind, grant: GrantId) -> bool {
        self.leases.get(grant).is_some() && self.kind_of(grant) == kind
    }

    fn kind_of(&self, grant: GrantId) -> Kind {
        match self.writer == Some(grant) {
            true => Kind::Write,
            false => Kind::Read,
        }
    }
}

impl ReadWriteLocks {
    pub(super) fn len(&self) -> usize {
        self.locks.len()
    }

    pub(super) fn has(&self, key: &LockKey) -> bool {
        self.locks.contains_key(key)
    }

    /// Whether this holder is inside.
    pub(super) fn knows(&self, kind: Kind, key: &LockKey, grant: &GrantId) -> bool {
        let inside = self.locks.get(key);
        inside.is_some_and(|inside| inside.is_inside(kind, *grant))
    }

    pub(super) fn clear(&mut self) {
        self.locks.clear();
        self.ends.clear();
        self.writers.clear();
    }

    /// Removes expired holders, and notifies no waiter.
    pub(super) fn purge(&mut self, now: Instant) {
        while self.ends.first().is_some_and(|(until, _)| *until <= now) {
            let Some((_, key)) = self.ends.pop_first() else {
                return;
            };
            self.change(&key, |inside| inside.purge(now));
        }
    }

    /// Changes the holders inside, and updates the deadlines.
    fn change<T>(&mut self, key: &LockKey, change: impl FnOnce(&mut Inside) -> T) -> T {
        let inside = self.locks.entry(key.clone()).or_default();
        let before = inside.leases.first();
        let done = change(inside);
        let after = inside.leases.first();
        if after.is_none() {
            self.locks.remove(key);
        }
        if before != after {
            if let Some(before) = before {
                self.ends.remove(&(before, key.clone()));
            }
            if let Some(after) = after {
                self.ends.insert((after, key.clone()));
            }
        }
        done
    }

    /// Lets the holder in, or reports the holder that blocks it.
    pub(super) fn acquire(&mut self, request: &AcquireRequest, now: Instant) -> Result<(), Busy> {
        let AcquireRequest {
            kind, key, waiter, ..
        } = request;
        // A read under its own write lock does not yield to the waiters of that lock.
        let is_newcomer =
            *kind == Kind::Read && request.nested_in.is_none() && !broken!(ReaderOvertakesPreferredWriter);
        let kept_out = is_newcomer.then(|| self.writers.until(key, now)).flatten();
        let entered = self.enter(request, kept_out, now);
        match (waiter.filter(|_| *kind == Kind::Write), &entered) {
            (Some(waiter), Ok(())) => {
                self.writers.leave(key, waiter, now);
            }
            (Some(waiter), Err(_)) => self.writers.wait(key, waiter, now),
            (None, _) => {}
        }
        entered.map_err(|until| Busy {
            again: match waiter {
                Some(_) => Some(HEARD_WITHIN),
                None => kept_out.map(|until| until.saturating_duration_since(now)),
            },
            ..Busy::until(until, now)
        })
    }

    /// Lets the holder in, or returns until when other holders block it.
    fn enter(
        &mut self,
        request: &AcquireRequest,
        kept_out: Option<Instant>,
        now: Instant,
    ) -> Result<(), Instant> {
        self.change(&request.key, |inside| {
            let last_end = inside.leases.last();
            let writer = inside.writer;
            let blocked_until = match (request.kind, request.nested_in) {
                (Kind::Write, _) if broken!(WriterEntersBesideReaders) => {
                    writer.and_then(|writer| inside.leases.get(writer))
                }
                (Kind::Write, _) => last_end,
                (_, Some(under)) if writer == Some(under) && !inside.kept.contains(&under) => None,
                // The named writer is not a holder.
                (_, Some(_)) => last_end.or(Some(now)),
                (_, None) => match writer {
                    Some(_) if broken!(ReaderEntersBesideWriter) => None,
                    Some(writer) => inside.leases.get(writer),
                    None => kept_out.map(|until| last_end.unwrap_or(until)),
                },
            };
            if let Some(until) = blocked_until {
                return Err(until);
            }
            if request.kind == Kind::Write {
                inside.writer = Some(request.grant);
            }
            inside.leases.set(request.grant, now + request.lease);
            Ok(())
        })
    }

    pub(super) fn release(&mut self, request: &ReleaseRequest, now: Instant) -> Left {
        let ReleaseRequest { kind, grant, .. } = *request;
        self.change(&request.key, |inside| {
            let Some(until) = inside.leases.get(grant).filter(|_| inside.is_inside(kind, grant)) else {
                return Left::NotHeld;
            };
            if request.keep_for > Duration::ZERO {
                inside.leases.set(grant, until.min(now + request.keep_for));
                inside.kept.insert(grant);
                return Left::Loudly;
            }
            let before = inside.leases.last();
            inside.remove(grant);
            if kind == Kind::Write {
                return Left::Loudly;
            }
            match (before, inside.leases.last()) {
                // The waiters expect a longer lease than that, and an expiring lease notifies no waiter.
                (Some(before), Some(left)) if (left - now) < (before - now) / 2 => Left::Loudly,
                (_, Some(_)) => Left::Quietly,
                (_, None) => Left::Loudly,
            }
        })
    }

    /// Removes a waiting writer; returns whether readers may continue.
    pub(super) fn give_way(&mut self, request: &ReleaseRequest, now: Instant) -> bool {
        request.kind == Kind::Write && self.writers.leave(&request.key, request.grant, now)
    }

    /// Returns how many waiting writers readers yield to, including those not yet detected as gone.
    pub(super) fn waiting(&self) -> usize {
        self.writers.len()
    }

    /// Returns how many waiting writers readers yield to, without those detected as gone.
    #[cfg(dlock_sim)]
    pub(super) fn writers_kept(&self, now: Instant) -> usize {
        self.writers.kept(now)
    }

    /// Whether the holder exists.
    pub(super) fn renew(&mut self, request: &RenewRequest, now: Instant) -> bool {
        self.change(&request.key, |inside| {
            let kept = inside.kept.contains(&request.grant) && !broken!(RenewalStretchesMinHold);
            let is_held = inside.is_inside(request.kind, request.grant) && !kept;
            if is_held {
                inside.leases.set(request.grant, now + request.lease);
            }
            is_held
        })
    }

    /// Ends all holders inside; returns whether there were any.
    pub(super) fn take(&mut self, key: &LockKey) -> bool {
        self.change(key, |inside| {
            let any = !inside.leases.is_empty();
            *inside = Inside::default();
            any
        })
    }

    pub(super) fn holders(&self, key: &LockKey, now: Instant) -> Vec<Holder> {
        let Some(inside) = self.locks.get(key) else {
            return Vec::new();
        };
        let holder = |(grant, until): (GrantId, Instant)| {
            let left = until.saturating_duration_since(now);
            let holds = u64::from(!inside.kept.contains(&grant));
            Holder::new(inside.kind_of(grant), grant.to_string(), holds, Some(left))
        };
        let mut holders: Vec<_> = inside.leases.iter().map(holder).collect();
        // The writer first.
        holders.sort_by_key(|holder| holder.kind != Kind::Write);
        holders
    }

    /// Returns every holder of a lock: its kind, its end, and whether it was released but still keeps the lock.
    #[cfg(dlock_sim)]
    pub(super) fn inside(&self, key: &LockKey) -> Vec<(Kind, GrantId, Instant, bool, u32)> {
        let Some(inside) = self.locks.get(key) else {
            return Vec::new();
        };
        let all = inside.leases.iter();
        all.map(|(grant, until)| {
            (
                inside.kind_of(grant),
                grant,
                until,
                inside.kept.contains(&grant),
                1,
            )
        })
        .collect()
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &LockKey> {
        self.locks.keys()
    }
}
