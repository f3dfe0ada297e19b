//! Counts events. Everything that a run claims to have tried must have happened sometimes: see [`Counts::sometimes`].

use std::collections::BTreeMap;

use crate::batch::Mode;

/// Events of every run that is long enough. Events that are not listed here are counted, too.
const EXPECTED: &[&str] = &[
    "a claim that asked for something else",
    "a claim that found an equal one at work",
    "a claim that found an orphan which is left",
    "a claim that took over",
    "a claim that was asked for again",
    "a claim that was dropped",
    "a client that was shut down",
    "a client that was shut down with a set that was not complete",
    "a client that went away",
    "a completion under a claim that was taken over",
    "a fair lock that went by arrival",
    "a frame that was carried into a task",
    "a guard that another task dropped",
    "a guard that said it is lost",
    "a handoff while another process waited",
    "a hold with a max_hold",
    "a hold with a min_hold",
    "a latch that was opened",
    "a late reply",
    "a lease that ended while its holder was inside",
    "a lock that was lost before its user could work",
    "a lock that was released twice",
    "a reader that asked to write",
    "a reader that was let in",
    "a record that was claimed",
    "a record that was used anew",
    "a record whose result was told",
    "a release of a claim that was lost",
    "a reply that nobody waits for",
    "a request that asked for something else",
    "a request that found an equal one at work",
    "a request that found its lock held",
    "a request that found no store",
    "a request that waited at its store",
    "a request that was not begun",
    "a response of a request's own handler",
    "a result that was told again",
    "a second guard in another task",
    "a semaphore whose permits were changed",
    "a service that failed without a response",
    "a set that was granted by one step",
    "a slot that was begun",
    "a slot that was missed",
    "a stale write that was refused",
    "a store's clock that stepped",
    "a wait for a latch",
    "an acquire of a closed client",
    "an acquire that came after its release",
    "an acquire that came too late",
    "an acquire that ended with Lost",
    "an acquire that found no store",
    "an acquire that found the lock held to its end",
    "an acquire that was dropped",
    "an acquire that was kept unpolled",
    "an acquire that was refused",
    "an acquire with an unknown outcome",
    "an acquire with another error",
    "an acquire with too many before it",
    "an extension of a claim that was lost",
    "an owner that heard of its loss",
    "two acquires of which the first was taken",
    "unowned permits that were taken",
    "work that is done once, begun",
    "work that was dropped with its claim",
    "work that was dropped with its lock",
    "work that was taken over while it went on",
];

/// The same for worlds whose processes have their own clocks.
const EXPECTED_OF_EACH: &[&str] = &["a process that stood still"];

/// A run with this number of acquisitions is long enough.
const LONG: u64 = 300_000;

#[derive(Debug, Clone, Default)]
pub(crate) struct Counts {
    pub(crate) acquisitions: u64,
    pub(crate) faults: u64,
    pub(crate) requests: u64,
    /// Pieces of work under the claim of a record.
    pub(crate) effects: u64,
    sometimes: BTreeMap<&'static str, u64>,
}

impl Counts {
    /// Something that worlds exist for has happened.
    pub(crate) fn sometimes(&mut self, what: &'static str) {
        *self.sometimes.entry(what).or_default() += 1;
    }

    pub(crate) fn add(&mut self, other: &Counts) {
        self.acquisitions += other.acquisitions;
        self.faults += other.faults;
        self.requests += other.requests;
        self.effects += other.effects;
        for (what, times) in &other.sometimes {
            *self.sometimes.entry(what).or_default() += times;
        }
    }

    pub(crate) fn each(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.sometimes.iter().map(|(what, times)| (*what, *times))
    }
    /// Events that should have happened by now but have not; empty while a run is short.
    pub(crate) fn missing(&self, mode: Mode) -> Vec<&'static str> {
        if self.acquisitions < LONG {
            return Vec::new();
        }
        let of_each = if mode == Mode::One { &[] } else { EXPECTED_OF_EACH };
        let expected = EXPECTED.iter().chain(of_each).copied();
        expected
            .filter(|what| !self.sometimes.contains_key(what))
            .collect()
    }
}
