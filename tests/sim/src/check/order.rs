//! Invariants about order between processes, on one store: a time slice ends, fair locks are granted in order of
//! arrival, and new readers wait while a preferred writer waits. Judged only in settled calms, for waiters that are
//! polled.

use std::collections::BTreeMap;
use std::time::Duration;

use dlock::store::{AcquireRequest, GrantId, Kind, ReleaseRequest};
use dlock::{LockKey, sim};

use super::{ORDER, Section, Waiter};
use crate::plan::Millis;
use crate::world::World;

/// How long a process hands off a lock, or lets other processes go first, if a round trip takes this long.
pub(super) fn time_slice(round_trip: Millis) -> Millis {
    let slice = sim::time_slice(Duration::from_millis(round_trip));
    slice.as_millis() as Millis
}

/// How long a process lets another one go first after a release that took this long.
pub(super) fn yields(round_trip: Millis) -> Millis {
    sim::yield_to_first(Duration::from_millis(round_trip)).as_millis() as Millis
}

/// What is rounded to whole milliseconds, at both ends.
const ROUNDED: Millis = 3;

/// What these checks remember.
#[derive(Default)]
pub(super) struct Orders {
    /// The grants that a store gave for locks that are handed off.
    slices: BTreeMap<LockKey, Slice>,
    /// When the store first heard of those that it keeps a position for: of fair locks, and of preferred writers.
    fair: Positions,
    writers: Positions,
}

impl Orders {
    /// The positions that a store keeps, as far as it was not told otherwise.
    pub(super) fn positions(&self) -> impl Iterator<Item = (Kind, &LockKey, GrantId)> {
        let all = [(Kind::Fair, &self.fair), (Kind::Write, &self.writers)];
        all.into_iter().flat_map(|(kind, positions)| {
            positions
                .iter()
                .flat_map(move |(key, of_key)| of_key.keys().map(move |grant| (kind, key, *grant)))
        })
    }
}

type Positions = BTreeMap<LockKey, BTreeMap<GrantId, Millis>>;

/// A grant that a process hands off.
struct Slice {
    grant: GrantId,
    since: Millis,
    /// When the slice is over at the latest, once the first user has the lock.
    until: Option<Millis>,
}

/// A position that others have to respect.
struct Position {
    process: usize,
    since: Millis,
}

fn forget(positions: &mut Positions, key: &LockKey, grant: GrantId) {
    if let Some(of_key) = positions.get_mut(key) {
        of_key.remove(&grant);
        if of_key.is_empty() {
            positions.remove(key);
        }
    }
}

impl World {
    /// The store has answered an acquire.
    pub(super) fn takes_position(&mut self, request: &AcquireRequest, is_granted: bool) {
        let AcquireRequest { ref key, grant, .. } = *request;
        match (request.kind, request.waiter) {
            (Kind::Read, _) if is_granted && request.nested_in.is_none() => self.reader_enters(key, grant),
            (Kind::Write, Some(waiter)) if is_granted => {
                forget(&mut self.checks.orders.writers, key, waiter);
            }
            (Kind::Write, Some(waiter)) => {
                let of_key = self.checks.orders.writers.entry(key.clone()).or_default();
                of_key.entry(waiter).or_insert(self.now);
            }
            (Kind::Fair, _) if request.queue && !is_granted => {
                let of_key = self.checks.orders.fair.entry(key.clone()).or_default();
                of_key.entry(grant).or_insert(self.now);
            }
            _ => {}
        }
        if is_granted {
            forget(&mut self.checks.orders.fair, key, grant);
            let is_handed_on = matches!(request.kind, Kind::Mutex | Kind::Write | Kind::Fair);
            match is_handed_on {
                true => {
                    let slice = Slice {
                        grant,
                        since: self.now,
                        until: None,
                    };
                    self.checks.orders.slices.insert(key.clone(), slice)
                }
                false => self.checks.orders.slices.remove(key),
            };
        }
    }

    /// The store has carried out a release.
    pub(super) fn leaves_position(&mut self, request: &ReleaseRequest) {
        let orders = &mut self.checks.orders;
        forget(&mut orders.fair, &request.key, request.grant);
        forget(&mut orders.writers, &request.key, request.grant);
    }

    /// The first position of another process that is an attentive waiter's, and was there before this time.
    fn position_before(&self, kind: Kind, key: &LockKey, process: usize, before: Millis) -> Option<Position> {
        let positions = match kind {
            Kind::Fair => &self.checks.orders.fair,
            _ => &self.checks.orders.writers,
        };
        let of_key = positions.get(key)?;
        let of_others = of_key.iter().filter_map(|(grant, since)| {
            let of = self.process_of(*grant)?;
            (of != process && *since < before && self.is_settled_for(5_000, *since)).then_some(Position {
                process: of,
                since: *since,
            })
        });
        let has_waiter = |position: &Position| {
            let its = |grant: &GrantId| self.process_of(*grant) == Some(position.process);
            let count = of_key.keys().filter(|grant| its(grant)).count();
            // Some of its positions may be left by ended calls: then it is unknown which.
            let waiters = || {
                let all = self.checks.waiters.values();
                all.filter(|waiter| {
                    waiter.process == position.process && waiter.key == *key && waiter.kind == kind
                })
            };
            let waits =
                |waiter: &&Waiter| waiter.since <= position.since && (kind == Kind::Fair || waiter.preferred);
            waiters().all(|waiter| waiter.attentive && !waiter.once && !waiter.is_set() && !waiter.nested)
                && waiters().filter(waits).count() >= count
        };
        of_others.filter(has_waiter).min_by_key(|position| position.since)
    }

    fn reader_enters(&mut self, key: &LockKey, grant: GrantId) {
        let Some(process) = self.process_of(grant).filter(|_| self.judges_order()) else {
            return;
        };
        if self.checks.has_guard(grant) {
            return;
        }
        self.counts.sometimes("a reader that was let in");
        if let Some(writer) = self.position_before(Kind::Write, key, process, self.now) {
            let story = format!(
                "p{process} is let into {key} to read, where a preferred writer of p{} waits in the store since {} ms",
                writer.process, writer.since
            );
            self.violated(ORDER, story);
        }
    }

    /// Whether a reliable store is available and all users are polled.
    pub(super) fn judges_order(&self) -> bool {
        let checks = &self.checks;
        checks.single_store && checks.assumes.exclusion && checks.assumes.cleanup && !checks.some_unpolled
    }

    /// A waiter has a lock that it does not have by a frame around it.
    pub(super) fn has_its_turn(&mut self, waiter: &Waiter) {
        if waiter.kind != Kind::Fair || waiter.nested || waiter.is_set() || !self.judges_order() {
            return;
        }
        let Waiter {
            process,
            user,
            ref key,
            since,
            ..
        } = *waiter;
        if let Some(passed_by) = self.position_before(Kind::Fair, key, process, since) {
            let story = format!(
                "p{process}/u{user} has {key}, for which it waits since {since} ms, before a waiter of p{} that is in the \
                 store's queue since {} ms",
                passed_by.process, passed_by.since
            );
            self.violated(ORDER, story);
        } else if self.checks.orders.fair.contains_key(key) {
            self.counts.sometimes("a fair lock that went by arrival");
        }
    }

    /// A section begins: if its lock was handed off, that is within a time slice, where others wait elsewhere.
    pub(super) fn is_within_slice(&mut self, section: &Section) {
        if section.kind == Kind::Read || section.is_second {
            return;
        }
        let network = self.plan.network;
        let lasts = match sim::grants(&section.held).count() {
            1 => time_slice(network.round_trip() + 2 * self.hears_late()),
            _ => time_slice(Millis::MAX),
        };
        let now = self.now;
        let Some(slice) = self.checks.orders.slices.get_mut(&section.key) else {
            return;
        };
        if !sim::grants(&section.held).any(|(_, _, id)| id == slice.grant) {
            return;
        }
        let (since, until) = (slice.since, *slice.until.get_or_insert(now + lasts + ROUNDED));
        if !section.inside.is_empty() || !self.judges_order() || !self.is_settled_for(0, since) {
            return;
        }
        let waits = |waiter: &&Waiter| {
            waiter.process != section.process
                && waiter.key == section.key
                && waiter.since < since
                && waiter.attentive
                && !waiter.nested
                && !waiter.once
        };
        let Some(waiter) = self.checks.waiters.values().find(waits) else {
            return;
        };
        if now <= until {
            self.counts.sometimes("a handoff while another process waited");
            return;
        }
        let story = format!(
            "p{}/u{} has {} out of a grant of {since} ms, {} ms ago, while p{}/u{} waits for it since {} ms: its time \
             slice ended at {until} ms",
            section.process,
            section.user,
            section.key,
            now - since,
            waiter.process,
            waiter.user,
            waiter.since
        );
        self.violated(ORDER, story);
    }

    /// Whether there is no fault now, and no earlier fault can still have an effect.
    pub(super) fn is_settled_for(&self, kept: Millis, at: Millis) -> bool {
        let settings = &self.plan.settings;
        let settling = kept + 2 * settings.lease + 2 * settings.timeout + 1_000;
        match self.weather.calm_since() {
            Some(_) if !self.weather.has_been() => true,
            Some(since) => since + settling <= at,
            None => false,
        }
    }
}
