//! No process starves: one that waits for a lock is not passed by again and again by the same other process, since that
//! lets those go first that wait elsewhere. Inside of a process, order is first come, first served.

use std::collections::{BTreeMap, BTreeSet};

use dlock::LockKey;
use dlock::store::{AcquireRequest, Kind};

use super::{Checks, ORDER, lock_number};
use crate::plan::{self, Call, End, Lock, Millis, Plan};
use crate::world::World;

/// So many times in a row the store may give a lock to one process while another one waits for it. That process lets others
/// go first each time, but does not wait for them for long: more than ten times are rare.
const MOST: u32 = 20;

pub(super) struct Starving {
    /// How often each process was passed by, by each of the others, since it had the lock itself.
    passed_by: BTreeMap<LockKey, BTreeMap<(usize, usize), u32>>,
    /// Keys that some user takes in a way that no yield is promised for: by asking once, in a frame, together with others,
    /// or without waiting for what becomes of an acquire or a release.
    of_others: BTreeSet<u32>,
}

impl Starving {
    pub(super) fn of(plan: &Plan) -> Starving {
        let mut of_others = BTreeSet::new();
        plan.each_lock(&mut |lock: &Lock| {
            let waits = !lock.once && lock.habit.is_none() && lock.also.is_empty();
            let is_plain = lock.kind == plan::Kind::Plain && lock.call == Call::Acquire;
            if !(waits && is_plain && lock.end == End::Release) {
                of_others.extend(lock.also.iter().chain([&lock.key]));
            }
        });
        Starving {
            passed_by: BTreeMap::new(),
            of_others,
        }
    }

    fn judges(&self, key: &LockKey) -> bool {
        lock_number(key).is_some_and(|number| !self.of_others.contains(&number))
    }
}

impl Checks {
    /// Since when each process waits for a key, where its first waiter is polled and takes a place in the queue.
    fn patient(&self, key: &LockKey) -> BTreeMap<usize, Millis> {
        let mut since = BTreeMap::new();
        for waiter in self.waiters.values().filter(|waiter| waiter.key == *key) {
            let is_judged = waiter.attentive
                && !waiter.once
                && !waiter.nested
                && !waiter.is_set()
                && !waiter.is_leader
                && waiter.kind == Kind::Mutex;
            if is_judged {
                since.entry(waiter.process).or_insert(waiter.since);
            }
        }
        since
    }
}

impl World {
    /// The store has granted a lock.
    pub(super) fn passes_by(&mut self, request: &AcquireRequest) {
        let AcquireRequest { key, kind, grant, .. } = request;
        if *kind != Kind::Mutex || !self.judges_order() || !self.checks.starving.judges(key) {
            return;
        }
        let Some(process) = self.process_of(*grant) else {
            return;
        };
        let now = self.now;
        let patient = self.checks.patient(key);
        let settled: Vec<_> = patient
            .iter()
            .filter(|(of, since)| **of != process && **since < now && self.is_settled_for(0, **since))
            .map(|(of, since)| (*of, *since))
            .collect();
        let passed_by = self.checks.starving.passed_by.entry(key.clone()).or_default();
        passed_by.retain(|(of, _), _| *of != process && patient.contains_key(of));
        let mut starves = None;
        for (of, since) in settled {
            let times = passed_by.entry((of, process)).or_default();
            *times += 1;
            if *times > MOST {
                starves = Some((of, since, *times));
            }
        }
        if let Some((of, since, times)) = starves {
            let story = format!(
                "p{process} has been granted {key} {times} times while p{of} waits for it, since {since} ms, without getting \
                 it once"
            );
            self.violated(ORDER, story);
        }
    }
}
