//! Letting other processes go first.
//!
//! A process that gives a lock back and asks for it again always has an advantage over one that waits elsewhere: its next
//! acquire is on its way when the other only hears of the release. So where the store replies that other clients heard
//! of it, the process yields: it asks again when another holder was seen, or after a short time in which another one
//! could have come. Where several have heard, all of them go first, one after the other: the one that waits longest may
//! be the last to hear, and would otherwise never be served. For processes that never come (stopped, slow, gone without
//! a word) the process yields ever more rarely.

mod history;

use std::time::Duration;

pub(crate) use self::history::YieldHistory;
use crate::base::moment::Moment;

/// The longest time for which a process yields, and the longest time slice of one that hands a lock off, however slow the
/// store is.
const LONGEST: Duration = Duration::from_millis(100);
/// The shortest time for which it yields: enough for a process that is slow to wake up. It ends when that has come, so it costs only where none
/// does.
const SHORTEST: Duration = Duration::from_millis(10);
/// The same for each of the processes that go first besides: one that is late competes with this process, as before.
const SHORTEST_FOR_NEXT: Duration = Duration::from_millis(2);
/// How long the reply to a release is waited for: the caller that released may not be polled for a while.
pub(crate) const REPLY_DEADLINE: Duration = Duration::from_secs(1);

/// Four round trips of the store, but no less than `least` and no more than [`LONGEST`].
pub(crate) fn some_round_trips(round_trip: Duration, least: Duration) -> Duration {
    round_trip.saturating_mul(4).clamp(least, LONGEST)
}

/// How many of the clients that heard of a release are other ones. This one may be among them where `counts_own`.
pub(crate) fn other_listeners(receivers: u64, counts_own: bool) -> u64 {
    receivers - u64::from(counts_own && receivers > 1)
}

/// A release that went to the store while others of this process wait for the key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReleaseInLine {
    pub(crate) sent: Moment,
    /// How many notifications there had been, where this process had a subscription.
    pub(crate) notifications: Option<u64>,
    /// Other waiters of this process have the same subscription.
    pub(crate) others_here: bool,
}

/// Other processes are to go first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PendingYield {
    until: Moment,
    /// How many notifications there will have been when another holder has come and gone.
    notifications: Option<u64>,
    /// How many other processes have heard of the release.
    others: u64,
    /// How long each of them is waited for, except the first.
    patience: Duration,
    /// That it is not skipped is known.
    is_due: bool,
}

impl PendingYield {
    /// What follows from a release that so many clients heard of, `None` where the store does not know.
    pub(crate) fn after(release: ReleaseInLine, receivers: Option<u64>, now: Moment) -> Option<PendingYield> {
        let ReleaseInLine {
            sent,
            notifications,
            others_here,
        } = release;
        let own = u64::from(notifications.is_some() && !others_here);
        if receivers.is_some_and(|receivers| receivers <= own) {
            return None;
        }
        let round_trip = now.since(sent);
        Some(PendingYield {
            until: now + some_round_trips(round_trip, SHORTEST),
            // The first is our own release, the second that of another process.
            notifications: notifications.map(|count| count + 2),
            others: match others_here {
                true => 1,
                false => receivers.map_or(1, |receivers| receivers - own),
            },
            patience: some_round_trips(round_trip, SHORTEST_FOR_NEXT),
            is_due: false,
        })
    }

    /// For how long the first of the others is waited for.
    pub(crate) fn left(&self, now: Moment) -> Duration {
        self.until.since(now)
    }

    /// How many notifications there will have been when the first of the others has come and gone; `None` where this
    /// process had no subscription.
    pub(crate) fn notifications(&self) -> Option<u64> {
        self.notifications
    }
}

/// The processes that waited when this process gave the lock back, and that have not all had it since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct YieldRound {
    /// How many notifications there will have been when all of them have come and gone.
    all: u64,
    patience: Duration,
    /// Whether one came when the last one was let go first.
    came: Option<bool>,
}

impl YieldRound {
    /// How long the next process is waited for; `None` where all have come, by so many notifications.
    pub(crate) fn waits(&self, notifications: u64) -> Option<Duration> {
        (notifications < self.all).then_some(self.patience)
    }

    /// A process was let go first, and came or did not.
    pub(crate) fn enter(&mut self, came: bool) {
        self.came = Some(came);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Moment = Moment::from_nanos(1_000_000_000_000);

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn round_trips_are_counted_within_bounds() {
        for (round_trip, least, time) in [(0, 5, 5), (2, 5, 8), (24, 5, 96), (26, 5, 100), (9000, 2, 100)] {
            assert_eq!(
                some_round_trips(ms(round_trip), ms(least)),
                ms(time),
                "{round_trip}"
            );
        }
    }

    #[test]
    fn this_process_is_no_other_listener() {
        for (receivers, counts_own, others) in [(1, false, 1), (1, true, 1), (3, true, 2), (3, false, 3)] {
            assert_eq!(
                other_listeners(receivers, counts_own),
                others,
                "{receivers} {counts_own}"
            );
        }
    }

    #[test]
    fn process_yields_where_other_ones_heard_of_its_release() {
        // notifications so far, others here, heard: how many others there are
        for (notifications, others_here, receivers, others) in [
            (None, false, Some(0), None),
            (None, false, Some(2), Some(2)),
            (None, false, None, Some(1)),
            // Its own subscription is one of them, ...
            (Some(7), false, Some(1), None),
            (Some(7), false, Some(3), Some(2)),
            (Some(7), false, None, Some(1)),
            // ... unless other waiters here have it too, who count as one.
            (Some(7), true, Some(1), Some(1)),
            (Some(7), true, Some(3), Some(1)),
            (Some(7), true, Some(0), None),
        ] {
            let release = ReleaseInLine {
                sent: START,
                notifications,
                others_here,
            };
            let pending = PendingYield::after(release, receivers, START + ms(4));
            let row = (notifications, others_here, receivers);
            assert_eq!(pending.map(|pending| pending.others), others, "{row:?}");
            let Some(pending) = pending else { continue };
            assert_eq!(pending.notifications(), notifications.map(|count| count + 2));
            // Four round trips of 4 ms.
            assert_eq!((pending.left(START + ms(4)), pending.patience), (ms(16), ms(16)));
            assert_eq!(pending.left(START + ms(20)), Duration::ZERO);
        }
    }

    #[test]
    fn shortest_yield_is_longer_for_the_first_process() {
        let release = ReleaseInLine {
            sent: START,
            notifications: None,
            others_here: false,
        };
        let pending = PendingYield::after(release, Some(3), START).unwrap();
        assert_eq!((pending.left(START), pending.patience), (ms(10), ms(2)));
    }

    #[test]
    fn round_ends_when_all_have_come_and_gone() {
        let round = YieldRound {
            all: 9,
            patience: ms(2),
            came: None,
        };
        for (notifications, waits) in [(7, Some(ms(2))), (8, Some(ms(2))), (9, None), (12, None)] {
            assert_eq!(round.waits(notifications), waits, "{notifications}");
        }
    }
}
