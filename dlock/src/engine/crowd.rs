//! Limits how many of many processes that wait for one plain lock ask when it becomes available: so the requests of a
//! handoff do not grow with the number of processes.
//!
//! The store replies how many processes listen for the release. Each of them draws a rank among them at each release.
//! Those with the lowest ranks ask at once; the others wait, in slots of a few processes, and ask only if no
//! notification says that the lock was taken. So a process that is stopped or cut off while it ranks first costs one
//! slot.

use std::time::Duration;

use crate::base::moment::Moment;
use crate::engine::timing;
use crate::store::Announce;

/// How many processes ask in one slot, the first of which begins with the release.
const FEW: u64 = 4;
/// The longest time for which a process leaves the lock to others without a notification.
const LONGEST: Duration = Duration::from_secs(1);
/// More listeners than this are an error: Valkey 9.1.2 sometimes answers `PUBSUB NUMSUB` inside a script with garbage.
const MOST: u64 = 100_000;

/// The processes that wait for the same lock, as far as this one knows.
#[derive(Debug, Default)]
pub(crate) struct Crowd {
    listeners: u64,
    slot: Duration,
    /// Whether this process has just begun to listen: its next request covers what it missed before.
    is_new: bool,
    announce: Announce,
}

impl Crowd {
    /// What the next request tells the other processes.
    pub(crate) fn announce(&self) -> Announce {
        self.announce
    }

    /// Records the store's reply, to a request sent at `sent`, that the lock is taken.
    pub(crate) fn is_busy(&mut self, listeners: Option<u64>, sent: Moment, now: Moment) {
        self.listeners = listeners.filter(|listeners| *listeners <= MOST).unwrap_or(0);
        self.slot = timing::crowd_slot(now.since(sent));
    }

    /// Records that this process has begun to listen.
    pub(crate) fn listens(&mut self) {
        self.is_new = true;
    }

    /// Records that this process begins to wait for the lock.
    pub(crate) fn waits(&mut self) {
        self.announce = Announce::Nothing;
    }

    /// Handles an available lock: returns the number of processes among which this one draws its rank, or `None` if it
    /// asks at once.
    pub(crate) fn came_free(&mut self) -> Option<u64> {
        let is_crowd = self.listeners > FEW && !std::mem::take(&mut self.is_new);
        is_crowd.then_some(self.listeners)
    }

    /// Handles the drawn rank: returns how long this process leaves the lock to others, or `None` if it asks at once.
    pub(crate) fn ranks(&mut self, rank: u64) -> Option<Duration> {
        let slots = u32::try_from(rank / FEW).unwrap_or(u32::MAX);
        if slots == 0 {
            self.announce = Announce::Grant;
            return None;
        }
        Some(self.slot.saturating_mul(slots).min(LONGEST))
    }

    /// Records that no process took the lock in that time, so this one asks.
    pub(crate) fn was_left(&mut self) {
        self.announce = Announce::Taken;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Moment = Moment::from_nanos(1_000_000_000);

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn crowd(listeners: Option<u64>, round_trip: Duration) -> Crowd {
        let mut crowd = Crowd::default();
        crowd.is_busy(listeners, START, START + round_trip);
        crowd
    }

    #[test]
    fn rank_is_drawn_among_more_than_a_few_listeners() {
        for (listeners, drawn) in [
            (None, None),
            (Some(4), None),
            (Some(5), Some(5)),
            (Some(100_000), Some(100_000)),
            (Some(100_001), None),
        ] {
            assert_eq!(crowd(listeners, ms(1)).came_free(), drawn, "{listeners:?}");
        }
    }

    #[test]
    fn process_that_has_just_begun_to_listen_asks_once_at_once() {
        let mut crowd = crowd(Some(9), ms(1));
        crowd.listens();
        assert_eq!([crowd.came_free(), crowd.came_free()], [None, Some(9)]);
    }

    #[test]
    fn four_processes_ask_in_each_slot_of_four_round_trips() {
        // round trip, rank: the wait, and what the request announces if the lock is still free
        for (round_trip, rank, wait, announce) in [
            (0, 0, None, Announce::Grant),
            (0, 3, None, Announce::Grant),
            (0, 4, Some(2), Announce::Taken),
            (0, 11, Some(4), Announce::Taken),
            (5, 8, Some(40), Announce::Taken),
            (5, 99_999, Some(1000), Announce::Taken),
        ] {
            let mut crowd = crowd(Some(100_000), ms(round_trip));
            let left = crowd.ranks(rank);
            assert_eq!(left, wait.map(ms), "{round_trip} {rank}");
            if left.is_some() {
                assert_eq!(crowd.announce(), Announce::Nothing);
                crowd.was_left();
            }
            assert_eq!(crowd.announce(), announce, "{round_trip} {rank}");
            crowd.waits();
            assert_eq!(crowd.announce(), Announce::Nothing);
        }
    }
}
