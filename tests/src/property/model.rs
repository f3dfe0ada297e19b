//! What the store and the clients should know: plain data, and what the rules say to each question.

use std::time::Duration;

use dlock::Loss;
use dlock::store::Kind;
use tokio::time::Instant;

use super::ops::{Counter, KEYS, Step};
use crate::margin;

/// A moment that is known as exactly as the clocks of two processes allow: not before, and not after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) min: Instant,
    pub(super) max: Instant,
}

impl Span {
    pub(super) fn new(min: Instant, max: Instant) -> Span {
        Span { min, max }
    }

    pub(super) fn plus(self, by: Duration) -> Span {
        Span::new(self.min + by, self.max + by)
    }

    fn or_later(self, other: Span) -> Span {
        Span::new(self.min.max(other.min), self.max.max(other.max))
    }

    fn or_earlier(self, other: Span) -> Span {
        Span::new(self.min.min(other.min), self.max.min(other.max))
    }
}

/// What is asked for, or was granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) owner: usize,
    pub(super) key: usize,
    pub(super) kind: Kind,
    pub(super) amount: u32,
    /// Not renewed.
    pub(super) fixed: bool,
}

/// What one acquire brought, and its holds.
#[derive(Debug, Clone)]
pub(super) struct Grant {
    pub(super) wanted: Wanted,
    /// When the store forgets it, unless it is renewed.
    pub(super) ends: Span,
    /// When its holder takes it for lost.
    pub(super) deadline: Span,
    /// The store knows it.
    pub(super) stored: bool,
    /// What its holder knows of its end.
    pub(super) known: Option<Loss>,
    /// The holders of this process.
    pub(super) holds: Vec<u64>,
    /// The write grant that it reads under, and the holds of that from which it was asked.
    pub(super) under: Option<(usize, Vec<u64>)>,
}

impl Grant {
    /// The lease runs anew since then.
    pub(super) fn renewed(&mut self, at: Span, lease: Duration) {
        self.ends = at.plus(lease);
        self.deadline = at.plus(lease - margin(lease));
    }
}

/// An answer, as the rules have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// There it is, under a token that is looked at apart.
    Granted,
    /// A client has it until then.
    Busy {
        key: usize,
        until: Option<Span>,
    },
    /// Something else has the name.
    Taken {
        key: usize,
    },
    Deadlock,
    Lost(Loss),
    /// One of several was lost, in whichever way.
    LostOne,
    /// Several of several.
    LostSeveral,
    Invalid,
    TooFew(u64),
    NoPermits,
    Open,
    Nothing,
    Done(bool),
    Number(u64),
    Available(i64),
    Status(Option<(i64, i64)>),
}

/// All that there is by one name.
#[derive(Debug, Default)]
struct Key {
    /// How many permits are free.
    free: Option<i64>,
    latch: Option<u64>,
    /// The last fencing token: Redisson's own counter is another one.
    token: u64,
    fenced_token: u64,
}

#[derive(Debug, Default)]
pub(super) struct Model {
    keys: [Key; KEYS],
    pub(super) grants: Vec<Grant>,
    holds: u64,
}

impl Model {
    /// Time goes on.
    pub(super) fn pass(&mut self, now: Instant) {
        for at in 0..self.grants.len() {
            let grant = &mut self.grants[at];
            if !grant.wanted.fixed {
                continue;
            }
            if grant.known.is_none() && now >= grant.deadline.max {
                grant.known = Some(Loss::Expired);
            }
            if now >= grant.ends.max {
                self.forget(at);
            }
        }
    }

    /// The store does not know it any more; its permits are free.
    fn forget(&mut self, at: usize) {
        let Grant { stored, wanted, .. } = &mut self.grants[at];
        if std::mem::take(stored)
            && wanted.kind == Kind::Permit
            && let Some(free) = &mut self.keys[wanted.key].free
        {
            *free += i64::from(wanted.amount);
        }
    }

    /// The grants that the store knows by this name.
    pub(super) fn stored(&self, key: usize) -> impl Iterator<Item = (usize, &Grant)> {
        let all = self.grants.iter().enumerate();
        all.filter(move |(_, grant)| grant.stored && grant.wanted.key == key)
    }

    fn stored_as(&self, key: usize, kinds: &'static [Kind]) -> impl Iterator<Item = (usize, &Grant)> {
        self.stored(key)
            .filter(move |(_, grant)| kinds.contains(&grant.wanted.kind))
    }

    fn held_permits(&self, key: usize) -> i64 {
        let permits = self.stored_as(key, &[Kind::Permit]);
        permits.map(|(_, grant)| i64::from(grant.wanted.amount)).sum()
    }

    /// Whether the number of permits was set.
    pub(super) fn has_permits(&self, key: usize) -> bool {
        self.keys[key].free.is_some()
    }

    /// Whether something else has the name.
    pub(super) fn is_taken(&self, kind: Kind, key: usize) -> bool {
        const PLAIN: &[Kind] = &[Kind::Mutex, Kind::Fair, Kind::Fenced];
        const BOTH: &[Kind] = &[Kind::Read, Kind::Write];
        let plain = self.stored_as(key, PLAIN).next().is_some();
        let read_write = self.stored_as(key, BOTH).next().is_some();
        let counter = self.keys[key].free.is_some() || self.keys[key].latch.is_some();
        if PLAIN.contains(&kind) {
            read_write || counter
        } else if BOTH.contains(&kind) {
            plain || counter
        } else {
            plain || read_write
        }
    }

    /// What is in the way of this, as an answer. The first caller sets the number of permits.
    pub(super) fn in_the_way(&self, wanted: &Wanted, total: Option<u32>) -> Option<Answer> {
        let Wanted {
            key, kind, amount, ..
        } = *wanted;
        if self.is_taken(kind, key) {
            return Some(Answer::Taken { key });
        }
        let busy = |until| Some(Answer::Busy { key, until });
        match kind {
            Kind::Read => {
                let (_, writer) = self.stored_as(key, &[Kind::Write]).next()?;
                busy(Some(writer.ends))
            }
            Kind::Permit => {
                let free = self.free(key, total);
                let first = self.stored(key).map(|(_, grant)| grant.ends);
                match free {
                    Some(free) if free >= i64::from(amount) => None,
                    // However many come back, there are too few.
                    Some(free) if free + self.held_permits(key) < i64::from(amount) => busy(None),
                    Some(_) => busy(first.reduce(Span::or_earlier)),
                    None => busy(None),
                }
            }
            Kind::Unowned => match self.free(key, total) {
                Some(free) if free >= i64::from(amount) => None,
                _ => busy(None),
            },
            Kind::Latch => self.keys[key].latch.and_then(|_| busy(None)),
            _ => {
                let inside = self.stored(key).map(|(_, grant)| grant.ends);
                inside.reduce(Span::or_later).and_then(|until| busy(Some(until)))
            }
        }
    }

    fn free(&self, key: usize, total: Option<u32>) -> Option<i64> {
        let held = self.held_permits(key);
        self.keys[key].free.or(total.map(|total| i64::from(total) - held))
    }

    /// An acquire sets the number of permits, if there is none.
    pub(super) fn begin(&mut self, key: usize, total: Option<u32>) {
        self.keys[key].free = self.free(key, total);
    }

    /// Some permits are gone without a known holder.
    pub(super) fn take_unowned(&mut self, key: usize, amount: u32) {
        if let Some(free) = &mut self.keys[key].free {
            *free -= i64::from(amount);
        }
    }

    /// Something was granted in this time, for a lease in these bounds; its place, and its first hold.
    pub(super) fn grant(&mut self, wanted: Wanted, at: Span, lease: (Duration, Duration)) -> (usize, u64) {
        if wanted.kind == Kind::Permit {
            self.take_unowned(wanted.key, wanted.amount);
        }
        let ends = Span::new(at.min + lease.0, at.max + lease.1);
        let deadline = Span::new(ends.min - margin(lease.1), ends.max - margin(lease.0));
        let hold = self.next_hold();
        self.grants.push(Grant {
            wanted,
            ends,
            deadline,
            stored: true,
            known: None,
            holds: vec![hold],
            under: None,
        });
        (self.grants.len() - 1, hold)
    }

    /// One hold more.
    pub(super) fn enter(&mut self, at: usize) -> u64 {
        let hold = self.next_hold();
        self.grants[at].holds.push(hold);
        hold
    }

    fn next_hold(&mut self) -> u64 {
        self.holds += 1;
        self.holds
    }

    /// The token of an acquisition: whether it is greater than every one before.
    pub(super) fn token_grows(&mut self, kind: Kind, key: usize, token: u64) -> bool {
        let last = match kind {
            Kind::Fenced => &mut self.keys[key].fenced_token,
            _ => &mut self.keys[key].token,
        };
        let grows = token > *last;
        *last = token;
        grows
    }

    /// One hold less.
    pub(super) fn leave(&mut self, at: usize, hold: u64) -> Option<Loss> {
        let grant = &mut self.grants[at];
        grant.holds.retain(|other| *other != hold);
        if !grant.holds.is_empty() {
            return grant.known;
        }
        let loss = grant.known.or((!grant.stored).then_some(Loss::Gone));
        self.forget(at);
        loss
    }

    /// What has ended the grant, if who holds it asks the store.
    pub(super) fn asked(&mut self, at: usize) -> Option<Loss> {
        let grant = &mut self.grants[at];
        if !grant.stored {
            grant.known.get_or_insert(Loss::Gone);
        }
        grant.known
    }

    /// What the store says to who holds this write lock and wants to read, if it is not there any more.
    pub(super) fn asked_to_read(&mut self, at: usize) -> Option<Answer> {
        let Grant {
            stored,
            known,
            wanted,
            ..
        } = &self.grants[at];
        let (key, gone) = (wanted.key, known.is_none() && !stored);
        // What has the name now is told before what has become of the write lock.
        if gone && self.is_taken(Kind::Read, key) {
            return Some(Answer::Taken { key });
        }
        self.asked(at).map(Answer::Lost)
    }

    /// Who holds that one asks for this one from inside, and `None` where the frame has no say in it.
    pub(super) fn within(&mut self, at: usize, hold: u64, kind: Kind, key: usize) -> Option<Within> {
        let grant = &self.grants[at];
        let outer = grant.wanted.kind;
        if grant.wanted.key != key {
            return None;
        }
        let busy = |until| {
            Some(Within::Answer(Answer::Busy {
                key,
                until: Some(until),
            }))
        };
        let lost = |loss| Some(Within::Answer(Answer::Lost(loss)));
        match (outer, kind) {
            (Kind::Write, Kind::Read) => {
                if let Some(loss) = grant.known {
                    return lost(loss);
                }
                if grant.holds.iter().any(|other| *other != hold) {
                    return busy(grant.deadline);
                }
                let refused = self.asked_to_read(at);
                Some(refused.map_or(Within::Under, Within::Answer))
            }
            (Kind::Read, Kind::Write) => match grant.known {
                Some(loss) => lost(loss),
                None => Some(Within::Answer(Answer::Deadlock)),
            },
            _ if outer == kind => {
                if let Some(loss) = grant.known {
                    return lost(loss);
                }
                if let Some((write, from)) = &grant.under {
                    let write = &self.grants[*write];
                    if write.known.is_none() && write.holds.iter().any(|other| !from.contains(other)) {
                        return busy(write.deadline);
                    }
                }
                let siblings = grant.holds.iter().any(|other| *other != hold) || self.is_read_under(at);
                match kind != Kind::Read && siblings {
                    true => busy(grant.deadline),
                    false => Some(Within::Enter),
                }
            }
            _ => None,
        }
    }

    fn is_read_under(&self, write: usize) -> bool {
        let readers = self.grants.iter().filter(|grant| !grant.holds.is_empty());
        readers
            .filter_map(|grant| grant.under.as_ref())
            .any(|(of, _)| *of == write)
    }

    /// Whether a client held it.
    pub(super) fn force(&mut self, key: usize) -> bool {
        let held: Vec<_> = self.stored(key).map(|(at, _)| at).collect();
        for at in &held {
            self.forget(*at);
        }
        !held.is_empty()
    }

    /// A step on the counter that the name is.
    pub(super) fn count(&mut self, key: usize, step: Step) -> Answer {
        let counter = Counter::of(key);
        if let Step::Add(0) | Step::Remove(0) | Step::Give(0) | Step::SetCount(0) = step {
            return Answer::Invalid;
        }
        if self.is_taken(counter.kind(), key) {
            return Answer::Taken { key };
        }
        match counter {
            Counter::Latch => self.on_latch(key, step),
            _ => self.on_permits(key, step, counter == Counter::Unowned),
        }
    }

    fn on_latch(&mut self, key: usize, step: Step) -> Answer {
        let latch = &mut self.keys[key].latch;
        match (step, *latch) {
            (Step::SetCount(count), None) => {
                *latch = Some(count);
                Answer::Done(true)
            }
            (Step::SetCount(_), Some(_)) => Answer::Done(false),
            (Step::CountDown, None) => Answer::Open,
            (Step::CountDown, Some(count)) => {
                *latch = (count > 1).then(|| count - 1);
                Answer::Number(count - 1)
            }
            (Step::Delete, was) => {
                *latch = None;
                Answer::Done(was.is_some())
            }
            (_, count) => Answer::Number(count.unwrap_or(0)),
        }
    }

    fn on_permits(&mut self, key: usize, step: Step, unowned: bool) -> Answer {
        let held = self.held_permits(key);
        let free = &mut self.keys[key].free;
        let before = *free;
        let total = before.map_or(0, |free| free + held);
        match step {
            Step::TrySet(total) => {
                free.get_or_insert(i64::from(total) - held);
                Answer::Done(before.is_none())
            }
            Step::Set(total) => {
                *free = Some(i64::from(total) - held);
                Answer::Done(*free != before)
            }
            Step::Add(more) => {
                *free = Some(total - held + i64::from(more));
                self.status(key)
            }
            Step::Remove(fewer) if before.is_none() || (!unowned && i64::from(fewer) > total) => {
                Answer::TooFew(u64::try_from(total).unwrap_or(0))
            }
            Step::Remove(fewer) => {
                *free = Some(total - held - i64::from(fewer));
                self.status(key)
            }
            Step::Give(more) => match free {
                Some(free) => {
                    *free += i64::from(more);
                    Answer::Nothing
                }
                None => Answer::NoPermits,
            },
            Step::Drain => {
                let taken = before.unwrap_or(0).max(0);
                *free = before.map(|free| free - taken);
                Answer::Number(u64::try_from(taken).unwrap_or(0))
            }
            Step::Delete => {
                *free = None;
                self.force(key);
                self.keys[key].free = None;
                Answer::Done(before.is_some() || held > 0)
            }
            _ if unowned => Answer::Available(before.unwrap_or(0)),
            _ => self.status(key),
        }
    }

    fn status(&self, key: usize) -> Answer {
        let held = self.held_permits(key);
        Answer::Status(self.keys[key].free.map(|free| (free + held, free)))
    }
}

/// What a frame replies to a question about its holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Within {
    /// One hold more.
    Enter,
    /// A read of its own, under the write lock.
    Under,
    Answer(Answer),
}
