//! A semaphore in memory: its permits, their holders, and the waiters for several permits.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::Instant;

use super::Busy;
use crate::base::broken;
use crate::base::chance::HashMap;
use crate::store::counter::{CounterReply, CounterStep};
use crate::store::{AcquireRequest, GrantId, Holder, Kind, ReleaseRequest, RenewRequest};

/// How long a silent waiter is kept in the queue, and within which time a waiter asks again.
const KEPT: Duration = Duration::from_secs(5);
const HEARD_WITHIN: Duration = Duration::from_secs(2);
/// The maximum total, and the minimum of available permits.
const MOST: i64 = i32::MAX as i64;

#[derive(Debug, Clone, Default)]
pub(super) struct Semaphore {
    /// `None` while the total is not set.
    free: Option<i64>,
    held: Holds,
    /// The waiters in order of arrival, while one of them waits for several permits.
    queue: Vec<Waiting>,
    /// Permits without a known holder, for as long as taking them may be undone.
    taken: Holds,
}

/// Grants with their permits, until their leases end.
#[derive(Debug, Clone, Default)]
struct Holds {
    grants: HashMap<GrantId, Hold>,
    /// By their end, so that expired ones are removed without a search.
    ends: BTreeSet<(Instant, GrantId)>,
    /// Of all grants.
    permits: u64,
}

#[derive(Debug, Clone, Copy)]
struct Hold {
    amount: u32,
    until: Instant,
    /// They were released, but their `min_hold` still keeps them.
    kept: bool,
}

impl Hold {
    fn held(amount: u32, until: Instant) -> Hold {
        Hold {
            amount,
            until,
            kept: false,
        }
    }
}

impl Holds {
    fn put(&mut self, grant: GrantId, hold: Hold) {
        self.take(grant);
        self.permits += u64::from(hold.amount);
        self.ends.insert((hold.until, grant));
        self.grants.insert(grant, hold);
    }

    /// Takes permits that are held, not those that were released but kept.
    fn take_held(&mut self, grant: GrantId) -> Option<Hold> {
        self.grants.get(&grant).filter(|hold| !hold.kept)?;
        self.take(grant)
    }

    fn take(&mut self, grant: GrantId) -> Option<Hold> {
        let hold = self.grants.remove(&grant)?;
        self.permits -= u64::from(hold.amount);
        self.ends.remove(&(hold.until, grant));
        Some(hold)
    }

    /// Removes expired grants; returns how many permits that were.
    fn expire(&mut self, now: Instant) -> u64 {
        let before = self.permits;
        while let Some((until, grant)) = self.ends.first().copied()
            && until <= now
        {
            self.take(grant);
        }
        before - self.permits
    }

    /// Time until the first of them ends.
    fn first_end(&self, now: Instant) -> Option<Duration> {
        let (first, _) = self.ends.first()?;
        Some(first.saturating_duration_since(now))
    }

    fn alive(&self, now: Instant) -> impl Iterator<Item = (GrantId, Hold)> {
        let all = self.grants.iter().map(|(grant, hold)| (*grant, *hold));
        all.filter(move |(_, hold)| hold.until > now)
    }
}

#[derive(Debug, Clone)]
struct Waiting {
    waiter: GrantId,
    amount: u32,
    alive_until: Instant,
}

/// The outcome of an operation.
pub(super) struct Step<T> {
    pub(super) brought: T,
    /// Whether the waiters must check again.
    pub(super) tell: bool,
}

impl<T> Step<T> {
    fn quiet(brought: T) -> Step<T> {
        Step { brought, tell: false }
    }
}

impl Semaphore {
    /// Creates a semaphore with this many available permits, and without holders and waiters.
    pub(super) fn idle(free: i64) -> Semaphore {
        Semaphore {
            free: Some(free),
            ..Semaphore::default()
        }
    }

    /// Returns the number of available permits, if that is its whole state.
    pub(super) fn idle_with(&self) -> Option<i64> {
        let is_idle = self.held.grants.is_empty() && self.taken.grants.is_empty() && self.queue.is_empty();
        self.free.filter(|_| is_idle)
    }

    /// Returns how many grants hold permits.
    pub(super) fn len(&self, now: Instant) -> usize {
        self.held.alive(now).count()
    }

    pub(super) fn knows(&self, kind: Kind, grant: GrantId) -> bool {
        let holds = match kind {
            Kind::Permit => &self.held,
            _ => &self.taken,
        };
        holds.grants.contains_key(&grant)
    }

    /// Whether it has neither a total nor holders whose leases last.
    pub(super) fn has_nothing(&self, now: Instant) -> bool {
        self.free.is_none() && self.held.ends.last().is_none_or(|(until, _)| *until <= now)
    }

    /// The same, and no waiter that is alive.
    pub(super) fn is_unknown(&self, now: Instant) -> bool {
        self.has_nothing(now) && self.queue.iter().all(|waiter| waiter.alive_until <= now)
    }

    /// Takes all permits from their holders; returns whether there were any.
    pub(super) fn take_all(&mut self) -> bool {
        let held = std::mem::take(&mut self.held).permits;
        self.change(signed(held));
        held > 0
    }

    /// Reclaims permits whose lease has expired; returns whether there were any.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
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

    /// Returns every grant: its end, whether it was released but keeps its permits, and how many these are.
    #[cfg(dlock_sim)]
    pub(super) fn held(&self, now: Instant) -> Vec<(Kind, GrantId, Instant, bool, u32)> {
        let all = self.held.alive(now);
        all.map(|(grant, hold)| (Kind::Permit, grant, hold.until, hold.kept, hold.amount))
            .collect()
    }

    pub(super) fn holders(&self, now: Instant) -> Vec<Holder> {
        let holders = self.held.alive(now).flat_map(|(grant, hold)| {
            let left = hold.until.saturating_duration_since(now);
            let ids = grant.permits(hold.amount);
            let ids: Vec<_> = ids.chunks(16).map(hex).collect();
            let holds = u64::from(!hold.kept);
            ids.into_iter()
                .map(move |id| Holder::new(Kind::Permit, id, holds, Some(left)))
        });
        holders.collect()
    }

    /// Changes the number of available permits.
    fn change(&mut self, by: i64) {
        if let Some(free) = &mut self.free {
            *free += by;
        }
    }

    pub(super) fn acquire(&mut self, now: Instant, request: &AcquireRequest) -> Step<Result<(), Busy>> {
        let total = request.permits.filter(|_| self.free.is_none());
        if let Some(total) = total {
            self.free = Some(i64::from(total) - signed(self.held.permits));
        }
        let mut step = self.grant(now, request);
        // Callers that name no total wait for one.
        step.tell |= total.is_some();
        step
    }

    fn grant(&mut self, now: Instant, request: &AcquireRequest) -> Step<Result<(), Busy>> {
        let held = signed(self.held.permits);
        let busy = |remaining, again| {
            let too_few = false;
            Step::quiet(Err(Busy {
                remaining,
                again,
                too_few,
            }))
        };
        let left = request.limit.map(|limit| i64::from(limit) - held);
        let Some(free) = self.free.into_iter().chain(left).min() else {
            return busy(None, None);
        };
        let amount = i64::from(request.amount.max(1));
        if request.kind == Kind::Unowned {
            if free < amount {
                return busy(self.held.first_end(now), None);
            }
        } else {
            let total = free + held;
            self.prune_queue(now);
            let mine = self
                .queue
                .iter()
                .position(|other| Some(other.waiter) == request.waiter);
            // A waiter for more permits than the total blocks no other one.
            let before = self.queue[..mine.unwrap_or(self.queue.len())]
                .iter()
                .filter(|other| i64::from(other.amount) <= total);
            let kept = before.clone().map(|other| i64::from(other.amount)).sum::<i64>();
            if free - kept < amount {
                let first_gone = before.map(|other| other.alive_until).min();
                let look_in = first_gone.map(|until| until - now);
                let again = self.stand_in_line(now, request, mine, amount <= total, look_in);
                if amount > total && request.limit.is_none() {
                    let too_few = true;
                    return Step::quiet(Err(Busy {
                        remaining: None,
                        again,
                        too_few,
                    }));
                }
                // A limit may admit nothing: there is no total that could be raised.
                let ends = self.held.first_end(now);
                let again = again.or(request.limit.filter(|_| ends.is_none()).map(|_| HEARD_WITHIN));
                return busy(ends, again);
            }
            if let Some(mine) = mine {
                self.queue.remove(mine);
            }
        }
        let until = now + request.lease;
        let amount = if broken!(PermitsCountedOnce) {
            1
        } else {
            request.amount.max(1)
        };
        self.holds(request.kind)
            .put(request.grant, Hold::held(amount, until));
        self.change(-i64::from(amount));
        Step {
            brought: Ok(()),
            // Waiters behind it may continue, too.
            tell: !self.queue.is_empty(),
        }
    }

    /// Removes waiters that were silent for too long; if all wait for one permit there is no order.
    fn prune_queue(&mut self, now: Instant) {
        self.queue.retain(|other| other.alive_until > now);
        if self.queue.iter().all(|other| other.amount == 1) {
            self.queue.clear();
        }
    }

    /// Takes or keeps a position, if one of the waiters asks for several permits; returns when to ask again. After
    /// `look_in` an earlier waiter may have lost its position.
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

    /// Returns whether the grant existed; extends it.
    pub(super) fn renew(&mut self, now: Instant, request: &RenewRequest) -> Step<bool> {
        let holds = self.holds(request.kind);
        let hold = if broken!(RenewalStretchesMinHold) {
            holds.take(request.grant)
        } else {
            holds.take_held(request.grant)
        };
        if let Some(Hold { amount, .. }) = hold {
            holds.put(request.grant, Hold::held(amount, now + request.lease));
        }
        Step::quiet(hold.is_some())
    }

    /// Returns whether the grant existed.
    pub(super) fn release(&mut self, now: Instant, request: &ReleaseRequest) -> Step<bool> {
        let holds = self.holds(request.kind);
        let Some(Hold { amount, until, .. }) = holds.take_held(request.grant) else {
            let before = self.queue.len();
            self.queue.retain(|other| other.waiter != request.grant);
            return Step {
                brought: false,
                tell: self.queue.len() < before,
            };
        };
        if !request.keep_for.is_zero() {
            let until = until.min(now + request.keep_for);
            let kept = true;
            holds.put(request.grant, Hold { amount, until, kept });
            // The waiter learns the time.
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

    pub(super) fn count(&mut self, step: CounterStep) -> Step<CounterReply> {
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
