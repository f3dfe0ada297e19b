//! Read-write locks in memory: many readers, or one writer and those readers that it let in itself.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use tokio::time::Instant;

use super::Busy;
use super::writers::{HEARD_WITHIN, Writers};
use crate::LockKey;
use crate::backend::{AcquireRequest, GrantId, Holder, Kind, ReleaseRequest, RenewRequest};

/// The read-write locks of a store.
#[derive(Debug, Default)]
pub(super) struct ReadWriteLocks {
    locks: HashMap<LockKey, Inside>,
    /// When the next holder of each lock is over its time.
    ends: BTreeSet<(Instant, LockKey)>,
    /// The writers whom readers stand back for.
    writers: Writers,
}

/// Who is inside.
#[derive(Debug, Default)]
struct Inside {
    writer: Option<(GrantId, Hold)>,
    readers: HashMap<GrantId, Hold>,
}

#[derive(Debug, Clone, Copy)]
struct Hold {
    until: Instant,
    /// It was released, and its `min_hold` keeps the lock for a while yet.
    kept: bool,
}

/// Who is to hear that somebody has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    /// There was no such holder.
    NotHeld,
    /// Nobody: others are inside still.
    Quietly,
    /// Those who wait.
    Loudly,
}

impl Inside {
    fn all(&self) -> impl Iterator<Item = &Hold> {
        let writer = self.writer.iter().map(|(_, hold)| hold);
        writer.chain(self.readers.values())
    }

    fn next_end(&self) -> Option<Instant> {
        self.all().map(|hold| hold.until).min()
    }

    fn last_end(&self) -> Option<Instant> {
        self.all().map(|hold| hold.until).max()
    }

    fn purge(&mut self, now: Instant) {
        self.writer.take_if(|(_, hold)| hold.until <= now);
        self.readers.retain(|_, hold| hold.until > now);
    }

    fn hold(&mut self, kind: Kind, grant: &GrantId) -> Option<&mut Hold> {
        match kind {
            Kind::Write => {
                let writer = self.writer.as_mut().filter(|(id, _)| id == grant);
                writer.map(|(_, hold)| hold)
            }
            _ => self.readers.get_mut(grant),
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
        self.locks.get(key).is_some_and(|inside| match kind {
            Kind::Write => inside.writer.as_ref().is_some_and(|(id, _)| id == grant),
            _ => inside.readers.contains_key(grant),
        })
    }

    pub(super) fn clear(&mut self) {
        self.locks.clear();
        self.ends.clear();
        self.writers.clear();
    }

    /// Drops what has expired, and tells nobody.
    pub(super) fn purge(&mut self, now: Instant) {
        while self.ends.first().is_some_and(|(until, _)| *until <= now) {
            let Some((_, key)) = self.ends.pop_first() else {
                return;
            };
            self.change(&key, |inside| inside.purge(now));
        }
    }

    /// Changes who is inside, and keeps the books.
    fn change<T>(&mut self, key: &LockKey, change: impl FnOnce(&mut Inside) -> T) -> T {
        let inside = self.locks.entry(key.clone()).or_default();
        let before = inside.next_end();
        let done = change(inside);
        let after = inside.next_end();
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

    /// Lets the holder in, or tells who stands in the way.
    pub(super) fn acquire(&mut self, request: &AcquireRequest, now: Instant) -> Result<(), Busy> {
        let AcquireRequest {
            kind, key, waiter, ..
        } = request;
        // Who reads under its own write lock is not kept out by those who wait for it.
        let is_newcomer = *kind == Kind::Read && request.under.is_none();
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

    /// Lets the holder in, or tells until when others stand in the way.
    fn enter(
        &mut self,
        request: &AcquireRequest,
        kept_out: Option<Instant>,
        now: Instant,
    ) -> Result<(), Instant> {
        let hold = Hold {
            until: now + request.lease,
            kept: false,
        };
        self.change(&request.key, |inside| {
            let blocked_until = match (request.kind, request.under, &inside.writer) {
                (Kind::Write, ..) => inside.last_end(),
                (_, Some(under), Some((writer, hold))) if *writer == under && !hold.kept => None,
                // The writer who is said to ask is not there.
                (_, Some(_), _) => inside.last_end().or(Some(now)),
                (_, None, Some((_, writer))) => Some(writer.until),
                (_, None, None) => kept_out.map(|until| inside.last_end().unwrap_or(until)),
            };
            match blocked_until {
                Some(until) => Err(until),
                None if request.kind == Kind::Write => {
                    inside.writer = Some((request.grant, hold));
                    Ok(())
                }
                None => {
                    inside.readers.insert(request.grant, hold);
                    Ok(())
                }
            }
        })
    }

    pub(super) fn release(&mut self, request: &ReleaseRequest, now: Instant) -> Left {
        self.change(&request.key, |inside| {
            let Some(hold) = inside.hold(request.kind, &request.grant) else {
                return Left::NotHeld;
            };
            if request.keep_for > Duration::ZERO {
                hold.until = hold.until.min(now + request.keep_for);
                hold.kept = true;
                return Left::Loudly;
            }
            if request.kind == Kind::Write {
                inside.writer = None;
                return Left::Loudly;
            }
            let before = inside.last_end();
            inside.readers.remove(&request.grant);
            match (before, inside.last_end()) {
                // Who waits believes that it takes much longer than it does, and a lease that ends tells nobody.
                (Some(before), Some(left)) if (left - now) < (before - now) / 2 => Left::Loudly,
                (_, Some(_)) => Left::Quietly,
                (_, None) => Left::Loudly,
            }
        })
    }

    /// A writer waits no more; whether those who read go on.
    pub(super) fn give_way(&mut self, request: &ReleaseRequest, now: Instant) -> bool {
        request.kind == Kind::Write && self.writers.leave(&request.key, request.grant, now)
    }

    /// How many writers wait whom readers stand back for, those included who were not missed yet.
    pub(super) fn waiting(&self) -> usize {
        self.writers.len()
    }

    /// Whether the holder is there.
    pub(super) fn renew(&mut self, request: &RenewRequest, now: Instant) -> bool {
        self.change(&request.key, |inside| {
            let hold = inside.hold(request.kind, &request.grant);
            let Some(hold) = hold.filter(|hold| !hold.kept) else {
                return false;
            };
            hold.until = now + request.lease;
            true
        })
    }

    /// Ends all who are inside; whether there were any.
    pub(super) fn take(&mut self, key: &LockKey) -> bool {
        self.change(key, |inside| {
            let any = inside.next_end().is_some();
            *inside = Inside::default();
            any
        })
    }

    pub(super) fn holders(&self, key: &LockKey, now: Instant) -> Vec<Holder> {
        let Some(Inside { writer, readers }) = self.locks.get(key) else {
            return Vec::new();
        };
        let writer = writer.iter().map(|(id, hold)| (Kind::Write, id, hold));
        let readers = readers.iter().map(|(id, hold)| (Kind::Read, id, hold));
        let holder = |(kind, id, hold): (Kind, &GrantId, &Hold)| {
            let left = hold.until.saturating_duration_since(now);
            Holder::new(kind, id.to_string(), u64::from(!hold.kept), Some(left))
        };
        writer.chain(readers).map(holder).collect()
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &LockKey> {
        self.locks.keys()
    }
}
