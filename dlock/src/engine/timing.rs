//! The intervals of waiting and retrying: when a waiter asks the store again, and how long it may stay unpolled.

use std::time::Duration;

use crate::base::broken;
use crate::base::moment::{LONGEST_LEASE, Moment};
use crate::engine::grant::safety_margin;
use crate::store::StoreError;

/// How long a waiter sleeps at most if the holder's lease has no end or is very long.
pub(crate) const LONGEST_SLEEP: Duration = Duration::from_secs(30);
/// How often a waiter asks for the number of permits when the semaphore has too few in all.
pub(crate) const ASK_FOR_PERMITS_EVERY: Duration = Duration::from_millis(100);
/// The longest time between two requests of a waiter for a fair lock. Stores keep its queue position several times as
/// long.
pub(crate) const ASK_EVERY: Duration = Duration::from_millis(1500);
/// The longest time between two requests for a set of locks whose waiters have queue positions at the store, such as
/// preferred writers.
pub(crate) const ASK_IN_SET_EVERY: Duration = Duration::from_secs(2);
/// How long the client tries to give up a queue position when the store does not answer: by then the store has
/// forgotten it.
pub(crate) const POSITION_ENDS_WITHIN: Duration = Duration::from_secs(5);
/// How long a waiter for a fair lock does not listen while other waiters of its process are ahead of it.
pub(crate) const QUIET: Duration = Duration::from_millis(100);

/// How long a woken waiter may take to be polled; it loses what it has between once and twice this time later.
pub(crate) const POLL_DEADLINE: Duration = Duration::from_secs(1);
/// The poll deadline of the next waiter of a queue whose last one was not polled: there may be many of them.
pub(crate) const HURRIED_POLL_DEADLINE: Duration = Duration::from_millis(50);

/// How long a task that is called into a frame may take to be polled, before the next one is called.
pub(crate) const FRAME_POLL_DEADLINE: Duration = Duration::from_millis(100);
/// How often a task that waits for a frame checks it without being called: the frame may be over, or another task was
/// called and is not polled.
pub(crate) const LOOK_AT_FRAME_EVERY: Duration = Duration::from_secs(1);
/// The first pause after a failed request, before jitter.
pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// A lease that is about to end is over a moment after its whole milliseconds.
const ROUNDED_OFF: Duration = Duration::from_millis(1);

/// A process keeps a lock, or waits for another process to take it, for four round trips of the store, within these
/// bounds: no longer than [`LONGEST_SLICE`], however slow the store is.
const LONGEST_SLICE: Duration = Duration::from_millis(100);
/// The shortest time slice in which a process hands a lock off.
const SHORTEST_SLICE: Duration = Duration::from_millis(5);
/// The shortest yield: enough for a process that is slow to wake up. It ends when that process has come, so it costs
/// time only if none does.
const SHORTEST_YIELD: Duration = Duration::from_millis(10);
/// The shortest yield for each further process that goes first: a late one competes with this process, as before.
const SHORTEST_YIELD_TO_NEXT: Duration = Duration::from_millis(2);
/// The shortest slot in which a few of many waiting processes ask: enough for a request and the notification that the
/// lock is taken.
const SHORTEST_CROWD_SLOT: Duration = Duration::from_millis(2);

/// How long a process hands off a lock that it was granted in a round trip of this length.
pub(crate) fn time_slice(round_trip: Duration) -> Duration {
    four_of(round_trip, SHORTEST_SLICE)
}

/// How long to wait for the first of the other processes, after a release that took this long.
pub(crate) fn yield_to_first(round_trip: Duration) -> Duration {
    four_of(round_trip, SHORTEST_YIELD)
}

/// How long to wait for each of the others then.
pub(crate) fn yield_to_next(round_trip: Duration) -> Duration {
    four_of(round_trip, SHORTEST_YIELD_TO_NEXT)
}

/// The length of a slot in which a few of many waiting processes ask, if a request takes this long.
pub(crate) fn crowd_slot(round_trip: Duration) -> Duration {
    four_of(round_trip, SHORTEST_CROWD_SLOT)
}

fn four_of(round_trip: Duration, least: Duration) -> Duration {
    round_trip.saturating_mul(4).clamp(least, LONGEST_SLICE)
}

/// The pause after a failed renewal of a claim whose lease has `left`: the sooner, the less is left. After its end the
/// claim may not have been taken over, so it is requested then, too.
pub fn pause_after_failed_renewal(left: Duration, lease: Duration) -> Duration {
    const SHORTEST: Duration = Duration::from_millis(20);
    match left {
        Duration::ZERO => lease / 6,
        left => (left / 4).max(SHORTEST).min(lease / 6),
    }
}

/// The shortest pause between two extensions of a claim that a transaction of its owner has.
const SHORTEST_WHILE_HELD: Duration = Duration::from_millis(50);

/// The pause before a claim is extended again that a transaction of its owner has: after a rollback, others take it over as
/// soon as its lease is over.
pub fn pause_while_held(left: Duration, lease: Duration) -> Duration {
    (left / 4).min(lease / 6).max(SHORTEST_WHILE_HELD)
}

/// Whether a transaction of its owner, which keeps others from taking a claim over, may outlast the lease: that ends before
/// the reply to the next extension, if the one to the last extension `took` so long.
pub fn may_outlast_lease(left: Duration, lease: Duration, took: Duration) -> bool {
    let next_reply = pause_while_held(left, lease) + 2 * took + safety_margin(lease);
    left <= (lease / 8).max(3 * SHORTEST_WHILE_HELD).max(next_reply)
}

/// Returns the remaining lease of a holder, or `None` if it does not expire. A time longer than an option accepts
/// counts as such: it may be more than a clock can represent.
pub(crate) fn finite(left: Option<Duration>) -> Option<Duration> {
    left.filter(|left| *left <= LONGEST_LEASE)
}

/// How long a waiter sleeps without a notification, if the holder's lease has `left` now and had at most `longest` so
/// far; `None` if it has no end. `again` is the store's own interval.
///
/// A notification may be lost, so a waiter does not sleep until the lease ends: a holder that renews its lease always
/// has two thirds of it left, so half of that is never less than a third of the lease.
pub(crate) fn until_next_request(
    left: Option<Duration>,
    longest: Duration,
    again: Option<Duration>,
) -> Duration {
    let late = match broken!(SleepsPastTheLease) {
        true => Duration::from_millis(200),
        false => ROUNDED_OFF,
    };
    // Half of a nanosecond is none, and a waiter that does not sleep at all keeps a paused clock from advancing.
    let shortest = Duration::from_nanos(1);
    let by_lease = left.map_or(LONGEST_SLEEP, |left| {
        (left / 2).max(longest / 3).max(shortest).min(left + late)
    });
    by_lease.min(LONGEST_SLEEP).min(again.unwrap_or(LONGEST_SLEEP))
}

/// How long a waiter for a fair lock sleeps without a notification. `again` is the store's own interval.
pub(crate) fn until_next_fair_request(left: Option<Duration>, again: Option<Duration>) -> Duration {
    let by_lease = left.map_or(ASK_EVERY, |left| left + ROUNDED_OFF);
    by_lease.min(again.unwrap_or(ASK_EVERY)).min(ASK_EVERY)
}

/// A pause of half to one and a half times this length, by a number from 0 up to 1.
pub(crate) fn jittered(pause: Duration, fraction: f64) -> Duration {
    pause.mul_f64(0.5 + fraction)
}

/// The pauses between copies of a request that must not be given up.
#[derive(Debug)]
pub(crate) struct Backoff {
    pause: Duration,
}

impl Default for Backoff {
    fn default() -> Backoff {
        Backoff {
            pause: Backoff::SHORTEST,
        }
    }
}

impl Backoff {
    const SHORTEST: Duration = FIRST_PAUSE;
    const LONGEST: Duration = Duration::from_secs(1);

    /// Records that the copy sent at `sent` failed: returns the pause before the next one. A copy that was long in the
    /// store's queue is queued again at once, so that it is ahead of every acquire when the store can be reached again. A store
    /// that has refused a copy can be reached, and gets no other one at once.
    pub(crate) fn next(&mut self, sent: Moment, failure: &StoreError, now: Moment) -> Option<Duration> {
        let failed_at_once = now.since(sent) < Backoff::SHORTEST;
        (failed_at_once || failure.is_refused()).then(|| {
            let pause = self.pause;
            self.pause = (pause * 2).min(Backoff::LONGEST);
            pause
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Reason;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn failed_renewal_is_repeated_the_sooner_the_less_is_left() {
        // left, lease: pause
        for (left, lease, pause) in [
            (1000, 3000, 250),
            (3000, 3000, 500),
            (40, 3000, 20),
            (1, 3000, 20),
            (0, 3000, 500),
            (30, 60, 10),
        ] {
            let paused = pause_after_failed_renewal(ms(left), ms(lease));
            assert_eq!(paused, ms(pause), "{left} of {lease}");
        }
    }

    #[test]
    fn transaction_is_waited_for_where_the_next_reply_may_come_after_the_lease() {
        // left, lease, took: whether it may
        for (left, lease, took, may) in [
            (3751, 30_000, 0, false),
            (3750, 30_000, 0, true),
            (288, 2000, 0, false),
            (288, 2000, 200, true),
            (5000, 30_000, 1000, false),
            (5000, 30_000, 2000, true),
            (151, 1000, 0, false),
            (567, 1000, 100, false),
            (567, 1000, 300, true),
        ] {
            let outlasts = may_outlast_lease(ms(left), ms(lease), ms(took));
            assert_eq!(outlasts, may, "{left} of {lease}, {took}");
        }
    }

    #[test]
    fn slices_and_yields_are_four_round_trips_within_bounds() {
        let ms = Duration::from_millis;
        let all = [time_slice, yield_to_first, yield_to_next, crowd_slot];
        for (round_trip, times) in [
            (0, [5, 10, 2, 2]),
            (2, [8, 10, 8, 8]),
            (24, [96; 4]),
            (26, [100; 4]),
            (9000, [100; 4]),
        ] {
            assert_eq!(
                all.map(|time| time(ms(round_trip))),
                times.map(ms),
                "{round_trip}"
            );
        }
    }

    #[test]
    fn waiter_asks_again_before_a_lease_that_was_renewed_can_end() {
        // left, the most that was left, the store's own word: the sleep
        for (left, longest, again, sleep) in [
            (None, 0, None, ms(30_000)),
            (None, 0, Some(500), ms(500)),
            (Some(3000), 3000, None, ms(1500)),
            (Some(3000), 3000, Some(500), ms(500)),
            // A third of the lease, until that ends.
            (Some(1800), 3000, None, ms(1000)),
            (Some(500), 3000, None, ms(501)),
            (Some(0), 3000, None, ms(1)),
            (Some(100_000), 100_000, None, ms(30_000)),
        ] {
            let next = until_next_request(left.map(ms), ms(longest), again.map(ms));
            assert_eq!(next, sleep, "{left:?} {longest} {again:?}");
        }
        // It sleeps, however little is left.
        let nanosecond = Duration::from_nanos(1);
        assert_eq!(until_next_request(Some(nanosecond), nanosecond, None), nanosecond);
    }

    #[test]
    fn waiter_of_a_fair_lock_asks_while_its_position_is_kept() {
        for (left, again, sleep) in [
            (None, None, 1500),
            (Some(9000), None, 1500),
            (Some(200), None, 201),
            (None, Some(50), 50),
            (Some(9000), Some(2000), 1500),
        ] {
            let next = until_next_fair_request(left.map(ms), again.map(ms));
            assert_eq!(next, ms(sleep), "{left:?} {again:?}");
        }
    }

    #[test]
    fn jitter_is_half_a_pause_each_way() {
        for (fraction, pause) in [(0.0, 50), (0.5, 100), (0.75, 125)] {
            assert_eq!(jittered(ms(100), fraction), ms(pause));
        }
    }

    #[test]
    fn pauses_double_unless_the_copy_was_long_on_its_way() {
        let start = Moment::from_nanos(0);
        let mut backoff = Backoff::default();
        // failed after, by an answer: the pause
        for (took, answered, pause) in [
            (0, false, Some(50)),
            (49, false, Some(100)),
            (50, false, None),
            (60, true, Some(200)),
            (0, true, Some(400)),
            (2000, true, Some(800)),
            (2000, false, None),
            (0, false, Some(1000)),
            (0, false, Some(1000)),
        ] {
            let failure = match answered {
                true => StoreError::not_done(Reason::RefusedForNow, "read-only"),
                false => StoreError::unknown("connection lost"),
            };
            let next = backoff.next(start, &failure, start + ms(took));
            assert_eq!(next, pause.map(ms), "{took}, {answered}");
        }
    }
}
