//! Invariants of counters without holders: unowned permits and latches.

use std::collections::BTreeMap;
use std::sync::Arc;

use dlock::store::counter::{CounterReply, CounterRequest, CounterStep, Counters};
use dlock::store::{GrantId, Kind, StoreError};
use dlock::{Error, LockKey};
use futures_util::FutureExt;

use super::{CLEANUP, Due, EXCLUSION, WAITING};
use crate::plan::Millis;
use crate::store::{Reply, Request, inside};
use crate::world::{Event, World, with};

#[derive(Default)]
pub(super) struct CounterChecks {
    unowned: BTreeMap<LockKey, Unowned>,
    latches: BTreeMap<LockKey, Latch>,
    waiters: BTreeMap<u64, LatchWaiter>,
    /// A process is gone, and what it had taken is unknown.
    is_inexact: bool,
}

/// How many permits users have taken and not released, as far as they know: at least and at most.
#[derive(Default)]
struct Unowned {
    least: i64,
    most: i64,
    /// The id of some step, to look by.
    id: Option<GrantId>,
}

#[derive(Default)]
struct Latch {
    count: u64,
    /// Since when it is open, if it is.
    open_since: Millis,
    /// When the store last had it at zero, if it is not now.
    open_until: Millis,
}

struct LatchWaiter {
    who: (usize, usize),
    key: LockKey,
    since: Millis,
}

/// Looks at a counter of a store after a step on it.
pub(super) fn look(store: usize, request: &Request, result: &Result<Reply, StoreError>) {
    match (request, result) {
        (Request::Count(request), Ok(_)) if request.step.kind() == Kind::Latch => {
            let looks = CounterRequest::new(request.key.clone(), request.id, CounterStep::Count);
            if let Some(CounterReply::Number(count)) = ask(store, looks) {
                with(|world| world.latch_is_at(&request.key, count));
            }
        }
        (Request::Acquire(request, _), Ok(_)) if request.kind == Kind::Unowned => with(|world| {
            let unowned = world.checks.counters.unowned.entry(request.key.clone());
            unowned.or_default().id = Some(request.grant);
        }),
        _ => {}
    }
}

fn ask(store: usize, request: CounterRequest) -> Option<CounterReply> {
    let reply = inside(store, |memory| {
        Arc::new(memory.clone()).count(request).now_or_never()
    });
    reply?.ok()
}

/// Checks that the available and the taken permits add up to all permits.
pub(crate) fn balance() {
    let all: Vec<_> = with(|world| {
        let checks = &world.checks;
        let assumed = checks.assumes.exclusion && checks.assumes.cleanup;
        if checks.counters.is_inexact || !assumed || !checks.single_store {
            return Vec::new();
        }
        let known = |(key, unowned): (&LockKey, &Unowned)| Some((key.clone(), unowned.id?));
        checks.counters.unowned.iter().filter_map(known).collect()
    });
    for (key, id) in all {
        let looks = CounterRequest::new(key.clone(), id, CounterStep::Permits);
        let Some(CounterReply::Permits { free: Some(free), .. }) = ask(0, looks) else {
            continue;
        };
        with(|world| {
            let total = i64::from(world.unowned_total(&key));
            let Unowned { least, most, .. } = world.checks.counters.unowned[&key];
            if !(total - most..=total - least).contains(&free) {
                let story = format!(
                    "{key} has {free} free permits of {total} in the end, and users have between {least} and {most} of them"
                );
                world.violated(CLEANUP, story);
            }
        });
    }
}

impl World {
    /// How many permits there are of this name.
    fn unowned_total(&self, key: &LockKey) -> u32 {
        let number = key
            .as_str()
            .get(1..)
            .and_then(|number| number.parse::<usize>().ok());
        let total = number.and_then(|number| self.plan.unowned.get(number));
        total.copied().unwrap_or(1)
    }

    pub(super) fn counters_are_inexact(&mut self) {
        self.checks.counters.is_inexact = true;
    }

    /// Unowned permits were taken.
    pub(crate) fn took(&mut self, (process, user): (usize, usize), key: &LockKey, amount: u32) {
        let total = i64::from(self.unowned_total(key));
        let unowned = self.checks.counters.unowned.entry(key.clone()).or_default();
        unowned.least += i64::from(amount);
        unowned.most += i64::from(amount);
        let least = unowned.least;
        if least > total && self.checks.assumes.exclusion && !self.checks.counters.is_inexact {
            let story = format!(
                "p{process}/u{user} took {amount} permits of {key}: that makes {least} at a time, of {total}"
            );
            self.violated(EXCLUSION, story);
        }
    }

    /// Unowned permits are being released: from now on others may have them.
    pub(crate) fn gives(&mut self, key: &LockKey, amount: u32) {
        let unowned = self.checks.counters.unowned.entry(key.clone()).or_default();
        unowned.least -= i64::from(amount);
    }

    /// And this came of it.
    pub(crate) fn gave(&mut self, key: &LockKey, amount: u32, outcome: &Result<(), Error>) {
        let unowned = self.checks.counters.unowned.entry(key.clone()).or_default();
        match outcome {
            Ok(()) => unowned.most -= i64::from(amount),
            // Released once, or not at all.
            Err(Error::OutcomeUnknown { .. }) => {}
            Err(_) => unowned.least += i64::from(amount),
        }
    }

    fn latch_is_at(&mut self, key: &LockKey, count: u64) {
        let now = self.now;
        let latch = self.checks.counters.latches.entry(key.clone()).or_default();
        let was_open = latch.count == 0;
        if was_open {
            latch.open_until = now;
        }
        latch.count = count;
        if !was_open && count == 0 {
            latch.open_since = now;
            latch.open_until = now;
            self.counts.sometimes("a latch that was opened");
            let due = Due::Opened {
                key: key.clone(),
                at: now,
            };
            self.schedule(now + self.patience(), Event::Check(due));
        }
    }

    pub(crate) fn waits_for_latch(&mut self, who: (usize, usize), key: LockKey) -> u64 {
        let id = self.checks.next();
        let since = self.now;
        let waiter = LatchWaiter { who, key, since };
        self.checks.counters.waiters.insert(id, waiter);
        id
    }

    /// A waiter goes on, because the latch is open or for another reason.
    pub(crate) fn latch_waited(&mut self, id: u64, is_open: bool) {
        let Some(waiter) = self.checks.counters.waiters.remove(&id) else {
            return;
        };
        let LatchWaiter {
            who: (process, user),
            key,
            since,
        } = waiter;
        if !is_open || !self.checks.assumes.exclusion || !self.checks.single_store {
            return;
        }
        let closed = self.checks.counters.latches.get(&key);
        if let Some(Latch {
            count, open_until, ..
        }) = closed.filter(|latch| latch.count > 0)
            && *open_until < since
        {
            let story = format!(
                "p{process}/u{user} waits for latch {key} since {since} ms and goes on, though its count is {count} since \
                 {open_until} ms"
            );
            self.violated(WAITING, story);
        }
    }

    /// A latch was opened then: those that waited have gone on.
    pub(super) fn latch_was_opened(&mut self, key: &LockKey, at: Millis) {
        let settling = 2 * self.plan.settings.lease + 2 * self.plan.settings.timeout + 1_000;
        let calm_since = self.weather.calm_since();
        if calm_since.is_none_or(|since| since + settling > at) {
            return;
        }
        // Closed again meanwhile, it may not have been seen open. A later opening has its own check.
        let latch = self.checks.counters.latches.get(key);
        if latch.is_some_and(|latch| latch.count > 0 || latch.open_since > at) {
            return;
        }
        let mut waiters = self.checks.counters.waiters.values();
        let late = waiters.find(|waiter| waiter.key == *key && waiter.since < at);
        if let Some(LatchWaiter {
            who: (process, user),
            since,
            ..
        }) = late
        {
            let story = format!(
                "latch {key} was opened at {at} ms, and p{process}/u{user}, which waits for it since {since} ms, does not \
                 go on"
            );
            self.violated(WAITING, story);
        }
    }
}
