//! Semaphores and latches in memory.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use tokio::time::Instant;

use super::Busy;
use super::read_write::Left;
use crate::LockKey;
use crate::backend::counter::{CounterReply, CounterRequest, CounterStep};
use crate::backend::{AcquireRequest, GrantId, Holder, Kind, ReleaseRequest, RenewRequest};

/// For how long one who waits is kept in the queue without being heard of, and within which time it says so.
const KEPT: Duration = Duration::from_secs(5);
const HEARD_WITHIN: Duration = Duration::from_secs(2);
/// The most permits that there may be, and the fewest that may be free.
const MOST: i64 = i32::MAX as i64;

/// All counters of a store, and the answers to steps that may come again.
#[derive(Debug, Default)]
pub(super) struct Counters {
    kept: HashMap<LockKey, Counter>,
    answers: HashMap<GrantId, (CounterReply, Instant)>,
    /// How many answers there may be before it is looked which of them can be forgotten.
    room: usize,
    /// Names of which those who wait shall look.
    news: Vec<LockKey>,
}

#[derive(Debug)]
enum Counter {
    Semaphore(Semaphore),
    Latch(u64),
}

#[derive(Debug, Default)]
struct Semaphore {
    /// `None` where nobody has said how many permits there are.
    free: Option<i64>,
    held: Holds,
    /// Who waits, in order of arrival, while somebody waits for several permits.
    queue: Vec<Waiting>,
    /// Permits that nobody is known to hold, for as long as taking them may be undone.
    taken: Holds,
}

/// Grants with their permits, until their leases end.
#[derive(Debug, Default)]
struct Holds {
    grants: HashMap<GrantId, Hold>,
    /// By their end, so that expired ones go without a search.
    ends: BTreeSet<(Instant, GrantId)>,
    /// Of all grants.
    permits: u64,
}

#[derive(Debug, Clone, Copy)]
struct Hold {
    amount: u32,
    until: Instant,
}

impl Holds {
    fn put(&mut self, grant: GrantId, hold: Hold) {
        self.take(grant);
        self.permits += u64::from(hold.amount);
        self.ends.insert((hold.until, grant));
        self.grants.insert(grant, hold);
    }

    fn take(&mut self, grant: GrantId) -> Option<Hold> {
        let hold = self.grants.remove(&grant)?;
        self.permits -= u64::from(hold.amount);
        self.ends.remove(&(hold.until, grant));
        Some(hold)
    }

    /// Drops what has expired; how many permits that were.
    fn expire(&mut self, now: Instant) -> u64 {
        let before = self.permits;
        while let Some((until, grant)) = self.ends.first().copied()
            && until <= now
        {
            self.take(grant);
        }
        before - self.permits
    }

    /// How long it is until the first of them ends.
    fn first_end(&self, now: Instant) -> Option<Duration> {
        let (first, _) = self.ends.first()?;
        Some(first.saturating_duration_since(now))
    }

    fn alive(&self, now: Instant) -> impl Iterator<Item = (GrantId, Hold)> {
        let all = self.grants.iter().map(|(grant, hold)| (*grant, *hold));
        all.filter(move |(_, hold)| hold.until > now)
    }
}

#[derive(Debug)]
struct Waiting {
    waiter: GrantId,
    amount: u32,
    alive_until: Instant,
}

/// What a step brought.
struct Step<T> {
    brought: T,
    /// Those who wait shall look.
    tell: bool,
}

impl<T> Step<T> {
    fn quiet(brought: T) -> Step<T> {
        Step { brought, tell: false }
    }
}

impl Counters {
    pub(super) fn clear(&mut self) {
        *self = Counters::default();
    }

    /// Names of which those who wait shall look.
    pub(super) fn news(&mut self) -> Vec<LockKey> {
        std::mem::take(&mut self.news)
    }

    /// What there is by this name: permits or a latch.
    pub(super) fn kind_at(&self, key: &LockKey) -> Option<Kind> {
        if self.kept.is_empty() {
            return None;
        }
        Some(match self.kept.get(key)? {
            Counter::Semaphore(_) => Kind::Permit,
            Counter::Latch(_) => Kind::Latch,
        })
    }

    fn semaphore(&self, key: &LockKey) -> Option<&Semaphore> {
        self.kept.get(key).and_then(Counter::as_semaphore)
    }

    /// How many grants hold permits.
    pub(super) fn len(&self, now: Instant) -> usize {
        let semaphores = self.kept.values().filter_map(Counter::as_semaphore);
        semaphores
            .map(|semaphore| semaphore.held.alive(now).count())
            .sum()
    }

    /// The names of all semaphores.
    pub(super) fn keys(&self) -> impl Iterator<Item = &LockKey> {
        let semaphores = self
            .kept
            .iter()
            .filter(|(_, counter)| counter.as_semaphore().is_some());
        semaphores.map(|(key, _)| key)
    }

    /// Who holds permits of a semaphore.
    pub(super) fn holders(&self, key: &LockKey, now: Instant) -> Vec<Holder> {
        self.semaphore(key)
            .map_or_else(Vec::new, |semaphore| semaphore.holders(now))
    }

    pub(super) fn knows(&self, kind: Kind, key: &LockKey, grant: GrantId) -> bool {
        self.semaphore(key).is_some_and(|semaphore| {
            let holds = match kind {
                Kind::Permit => &semaphore.held,
                _ => &semaphore.taken,
            };
            holds.grants.contains_key(&grant)
        })
    }

    /// Takes all permits from whoever holds them; whether anybody did.
    pub(super) fn take(&mut self, key: &LockKey) -> bool {
        let Some(Counter::Semaphore(semaphore)) = self.kept.get_mut(key) else {
            return false;
        };
        let held = std::mem::take(&mut semaphore.held).permits;
        semaphore.change(signed(held));
        held > 0
    }

    /// Has a step done on a semaphore, as it is now; nothing is left of one that nobody knows anything of.
    fn on<T>(
        &mut self,
        key: &LockKey,
        now: Instant,
        step: impl FnOnce(&mut Semaphore) -> Step<T>,
    ) -> Step<T> {
        let new = || Counter::Semaphore(Semaphore::default());
        let counter = self.kept.entry(key.clone()).or_insert_with(new);
        let mut nothing = Semaphore::default();
        let semaphore = match counter {
            Counter::Semaphore(semaphore) => semaphore,
            // Of one that became something else everybody has lost what he had.
            Counter::Latch(_) => &mut nothing,
        };
        let came_back = semaphore.expire(now);
        let mut step = step(semaphore);
        step.tell |= came_back;
        let is_over = semaphore.free.is_none() && semaphore.held.permits == 0;
        if is_over && matches!(counter, Counter::Semaphore(_)) {
            self.kept.remove(key);
        }
        step
    }

    /// The same, and those who wait are told.
    fn told<T>(&mut self, key: &LockKey, now: Instant, step: impl FnOnce(&mut Semaphore) -> Step<T>) -> T {
        let Step { brought, tell } = self.on(key, now, step);
        if tell {
            self.news.push(key.clone());
        }
        brought
    }

    pub(super) fn acquire(&mut self, now: Instant, request: &AcquireRequest) -> Result<(), Busy> {
        self.told(&request.key, now, |semaphore| semaphore.acquire(now, request))
    }

    pub(super) fn release(&mut self, now: Instant, request: &ReleaseRequest) -> Left {
        let step = self.on(&request.key, now, |semaphore| semaphore.release(now, request));
        if !step.brought && step.tell {
            self.news.push(request.key.clone());
        }
        match (step.brought, step.tell) {
            (false, _) => Left::NotHeld,
            (true, false) => Left::Quietly,
            (true, true) => Left::Loudly,
        }
    }

    pub(super) fn renew(&mut self, now: Instant, request: &RenewRequest) -> bool {
        self.told(&request.key, now, |semaphore| {
            let holds = semaphore.holds(request.kind);
            let hold = holds.take(request.grant);
            if let Some(Hold { amount, .. }) = hold {
                let until = now + request.lease;
                holds.put(request.grant, Hold { amount, until });
            }
            Step::quiet(hold.is_some())
        })
    }

    /// Takes a step of a counter of this kind.
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
            self.news.push(key.clone());
        }
        reply
    }
}

impl Counter {
    fn as_semaphore(&self) -> Option<&Semaphore> {
        match self {
            Counter::Semaphore(semaphore) => Some(semaphore),
            Counter::Latch(_) => None,
        }
    }
}

impl Semaphore {
    /// Permits that were not given back in time come back; whether there were any.
    fn expire(&mut self, now: Instant) -> bool {
        self.taken.expire(now);
        let came_back = self.held.expire(now);
        self.change(signed(came_back));
        came_back > 0
    }

    fn holds(&mut self, kind: Kind) -> &mut Holds {
        match kind {
            Kind::Permit => &mut self.held,
            _ => &mut self.taken,
        }
    }

    fn holders(&self, now: Instant) -> Vec<Holder> {
        let holders = self.held.alive(now).flat_map(|(grant, hold)| {
            let left = hold.until.saturating_duration_since(now);
            let ids = grant.permits(hold.amount);
            let ids: Vec<_> = ids.chunks(16).map(hex).collect();
            ids.into_iter()
                .map(move |id| Holder::new(Kind::Permit, id, 1, Some(left)))
        });
        holders.collect()
    }

    /// More permits are free, or fewer.
    fn change(&mut self, by: i64) {
        if let Some(free) = &mut self.free {
            *free += by;
        }
    }

    fn acquire(&mut self, now: Instant, request: &AcquireRequest) -> Step<Result<(), Busy>> {
        let held = signed(self.held.permits);
        if self.free.is_none() {
            self.free = request.permits.map(|total| i64::from(total) - held);
        }
        let busy = |remaining, again| Step::quiet(Err(Busy { remaining, again }));
        let Some(free) = self.free else {
            return busy(None, None);
        };
        let amount = i64::from(request.amount.max(1));
        if request.kind == Kind::Unowned {
            if free < amount {
                return busy(None, None);
            }
        } else {
            let total = free + held;
            self.prune_queue(now);
            let mine = self
                .queue
                .iter()
                .position(|other| Some(other.waiter) == request.waiter);
            // Nobody is kept waiting for one who wants more than there are.
            let before = self.queue[..mine.unwrap_or(self.queue.len())]
                .iter()
                .filter(|other| i64::from(other.amount) <= total);
            let kept = before.clone().map(|other| i64::from(other.amount)).sum::<i64>();
            if free - kept < amount {
                let first_gone = before.map(|other| other.alive_until).min();
                let look_in = first_gone.map(|until| until - now);
                let again = self.stand_in_line(now, request, mine, amount <= total, look_in);
                return busy(self.held.first_end(now), again);
            }
            if let Some(mine) = mine {
                self.queue.remove(mine);
            }
        }
        let until = now + request.lease;
        let amount = request.amount.max(1);
        self.holds(request.kind)
            .put(request.grant, Hold { amount, until });
        self.change(-i64::from(amount));
        Step {
            brought: Ok(()),
            // Those behind it may go on, too.
            tell: !self.queue.is_empty(),
        }
    }

    /// Without those who were not heard of for too long; and where all wait for one permit there is no order.
    fn prune_queue(&mut self, now: Instant) {
        self.queue.retain(|other| other.alive_until > now);
        if self.queue.iter().all(|other| other.amount == 1) {
            self.queue.clear();
        }
    }

    /// Takes a place, or keeps it, where somebody waits for several permits; when to ask again. In `look_in` one
    /// of those before may have lost its place.
    fn stand_in_line(
        &mut self,
        now: Instant,
        request: &AcquireRequest,
        mine: Option<usize>,
        possible: bool,
        look_in: Option<Duration>,
    ) -> Option<Duration> {
        let (Some(waiter), true) = (request.waiter, possible) else {
            if let Some(mine) = mine {
                self.queue.remove(mine);
            }
            return look_in;
        };
        if request.amount <= 1 && self.queue.is_empty() {
            return None;
        }
        let alive_until = now + KEPT;
        match mine {
            Some(mine) => self.queue[mine].alive_until = alive_until,
            None => self.queue.push(Waiting {
                waiter,
                amount: request.amount.max(1),
                alive_until,
            }),
        }
        Some(look_in.map_or(HEARD_WITHIN, |look_in| look_in.min(HEARD_WITHIN)))
    }

    fn release(&mut self, now: Instant, request: &ReleaseRequest) -> Step<bool> {
        let holds = self.holds(request.kind);
        let Some(Hold { amount, until }) = holds.take(request.grant) else {
            let before = self.queue.len();
            self.queue.retain(|other| other.waiter != request.grant);
            return Step {
                brought: false,
                tell: self.queue.len() < before,
            };
        };
        if !request.keep_for.is_zero() {
            let until = until.min(now + request.keep_for);
            holds.put(request.grant, Hold { amount, until });
            // Who waits learns the time.
            return Step {
                brought: true,
                tell: true,
            };
        }
        self.change(i64::from(amount));
        Step {
            brought: true,
            tell: true,
        }
    }

    fn count(&mut self, step: CounterStep) -> Step<CounterReply> {
        let held = self.held.permits;
        let all_held = signed(held);
        let permits = |free| CounterReply::Permits { free, held };
        match step {
            CounterStep::SetPermits { total, only_unset } => {
                let free = i64::from(total) - all_held;
                let before = self.free;
                if before == Some(free) || (only_unset && before.is_some()) {
                    return Step::quiet(CounterReply::Done(false));
                }
                self.free = Some(free);
                Step {
                    brought: CounterReply::Done(true),
                    tell: before.is_none_or(|before| before < free),
                }
            }
            CounterStep::AddPermits { by, unowned } => {
                let free = self.free.unwrap_or(-all_held) + by;
                if by < 0 && (self.free.is_none() || (!unowned && free + all_held < 0)) {
                    let is = u64::try_from(free - by + all_held).unwrap_or(0);
                    return Step::quiet(CounterReply::TooFew { is });
                }
                if free + all_held > MOST || free < -MOST {
                    return Step::quiet(CounterReply::TooMany);
                }
                self.free = Some(free);
                Step {
                    brought: permits(Some(free)),
                    tell: by > 0,
                }
            }
            CounterStep::Give { amount } => {
                let Some(before) = self.free else {
                    return Step::quiet(CounterReply::TooFew { is: 0 });
                };
                let free = before + i64::from(amount);
                if free + all_held > MOST {
                    return Step::quiet(CounterReply::TooMany);
                }
                self.free = Some(free);
                Step {
                    brought: permits(Some(free)),
                    tell: true,
                }
            }
            CounterStep::Drain => {
                let free = self.free.unwrap_or(0).max(0);
                self.change(-free);
                Step::quiet(CounterReply::Number(u64::try_from(free).unwrap_or(0)))
            }
            CounterStep::DeletePermits => {
                let was = self.free.is_some() || held > 0;
                *self = Semaphore::default();
                Step {
                    brought: CounterReply::Done(was),
                    tell: was,
                }
            }
            _ => Step::quiet(permits(self.free)),
        }
    }
}

fn signed(permits: u64) -> i64 {
    i64::try_from(permits).unwrap_or(i64::MAX)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
