//! When a grant needs attention: the arithmetic of the renewal table.

use std::time::Duration;

use crate::base::broken;
use crate::base::int_hash::scatter;
use crate::base::kind::Kind;
use crate::base::moment::Moment;
use crate::engine::grant::{Terms, safety_margin};

/// How often at least the grants of readers are renewed, even with fixed leases: Redisson's renewals (every 10 s for a
/// lease of 30 s, by default) leave the lock no more time than that, whatever other readers have left.
const READERS: Duration = Duration::from_secs(10);
/// How early a renewal may be sent, at most, to be sent together with others.
pub(super) const EARLIEST: Duration = Duration::from_millis(500);
/// How late a loss is signalled at most, with many holds; and no more than half the safety margin, so that it is
/// signalled before another client has the lock.
const LATEST: Duration = Duration::from_millis(10);
/// The shortest time between two attempts to renew a grant, and the shortest wait for a reply.
const SHORTEST: Duration = Duration::from_millis(20);

/// When a grant that was confirmed by a request sent at `sent`, until `deadline`, needs attention next.
pub(super) fn next_due(kind: Kind, terms: &Terms, sent: Moment, deadline: Moment) -> Moment {
    let due = match kind.is_shared() {
        true => deadline.min(sent + READERS),
        false => deadline,
    };
    match terms.renewed {
        true if broken!(RenewsAtTheLastMoment) => due,
        true => due.min(sent + terms.lease / if broken!(RenewsTooOften) { 15 } else { 3 }),
        false => due,
    }
}

/// With many grants, those that were acquired together are spread: a renewal comes earlier by this share of the time until
/// it is due, but never at once.
pub(super) fn spread(terms: &Terms, due: Moment, now: Moment, share: f64) -> Moment {
    if !terms.renewed {
        return due;
    }
    let earlier = due.since(now).mul_f64(share);
    // All that are due within a grain are renewed together with the first.
    match due.earlier_by(earlier).floor(grain(terms)) {
        moment if moment > now => moment,
        _ => due,
    }
}

/// A share from 0 to 1 that is the same for consecutive acquisitions: they are close in memory, and scattered memory
/// accesses are most of the cost of a renewal.
pub(super) fn share_of_row(number: u64) -> f64 {
    const ROW: u64 = 64;
    (scatter(number / ROW) >> 32) as f64 / 2_f64.powi(32)
}

/// How early the renewal of a grant may be sent, to be sent together with others: a sixtieth to a thirtieth of the
/// lease. Each grain is half of another one, so that grants with different leases share moments: the leases that a
/// session provides all differ.
pub(super) fn grain(terms: &Terms) -> Duration {
    if !terms.renewed {
        return Duration::ZERO;
    }
    let least = (terms.lease / 60).as_nanos().max(1);
    let halvings = (EARLIEST.as_nanos() / least).max(1).ilog2();
    EARLIEST / 2_u32.pow(halvings)
}

/// When many grants that end about `deadline` are checked together.
pub(super) fn joint_look(terms: &Terms, deadline: Moment) -> Moment {
    deadline.ceil((safety_margin(terms.lease) / 2).min(LATEST))
}

/// When to try again after a failed renewal: the sooner, the less is left.
pub(super) fn next_try(deadline: Moment, now: Moment) -> Moment {
    let left = deadline.since(now);
    deadline.min(now + (left / 8).max(SHORTEST))
}

/// How long to wait for the reply to a request whose first grant has this much left: a hanging request leaves time for
/// others before the lease is over.
pub(super) fn patience(left: Duration) -> Duration {
    (left / 6).max(SHORTEST)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const START: Moment = Moment::from_nanos(1_000_000_000_000);

    fn s(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn terms(lease: Duration, renewed: bool) -> Terms {
        Terms {
            lease,
            renewed,
            max_end: None,
            min_until: None,
        }
    }

    #[test]
    fn next_look_is_a_third_of_a_renewed_lease_and_the_deadline_of_a_fixed_one() {
        for (kind, lease, renewed, due) in [
            (Kind::Mutex, s(30), true, s(10)),
            (Kind::Mutex, s(3), true, s(1)),
            (Kind::Mutex, s(30), false, ms(29_700)),
            // a fixed lease of a reader is confirmed all the same
            (Kind::Read, s(30), false, s(10)),
            (Kind::Read, s(60), true, s(10)),
            (Kind::Read, s(3), false, ms(2_970)),
        ] {
            let terms = terms(lease, renewed);
            let deadline = START + (lease - safety_margin(lease));
            let next = next_due(kind, &terms, START, deadline);
            assert_eq!(next.since(START), due, "{kind} {lease:?} {renewed}");
        }
        let close_to_max_hold = next_due(Kind::Mutex, &terms(s(30), true), START, START + s(5));
        assert_eq!(close_to_max_hold, START + s(5));
    }

    #[test]
    fn spread_renewals_are_earlier_and_share_their_grains() {
        for (lease, renewed, share, due) in [
            (s(30), true, 0.0, s(10)),
            (s(30), true, 0.5, s(5)),
            (s(30), true, 0.26, s(7)),
            (s(3), true, 0.01, Duration::from_micros(937_500)),
            (s(30), false, 0.5, s(10)),
        ] {
            let terms = terms(lease, renewed);
            let spread = spread(&terms, START + s(10).min(lease / 3), START, share);
            assert_eq!(spread, START + due, "{lease:?} {renewed} {share}");
        }
        // Near the end of max_hold, and for a reader with a long lease.
        for (lease, left) in [(s(30), ms(400)), (s(30), s(1)), (s(1800), s(10))] {
            for share in [0.0, 0.1, 0.2, 0.5] {
                let moment = spread(&terms(lease, true), START + left, START, share);
                assert!(
                    moment > START && moment <= START + left,
                    "{lease:?} {left:?} {share}"
                );
            }
        }
    }

    #[test]
    fn renewals_of_different_leases_share_their_moments() {
        let due = (0..1_000_u32).map(|n| {
            let lease = s(13) + n * ms(2);
            spread(
                &terms(lease, true),
                START + lease / 3,
                START,
                f64::from(n % 100) / 500.0,
            )
        });
        let moments: BTreeSet<Moment> = due.collect();
        // From 80% of the shortest period, 3.5 s, to the longest, 5 s, by quarters of a second.
        assert!(moments.len() <= 8, "{moments:?}");
    }

    #[test]
    fn share_is_that_of_the_row_and_rows_differ() {
        assert_eq!(share_of_row(0).to_bits(), share_of_row(63).to_bits());
        let rows = (0..1_000).map(|row| share_of_row(row * 64));
        let lower_half = rows.filter(|share| *share < 0.5).count();
        assert!((450..=550).contains(&lower_half), "{lower_half}");
    }

    #[test]
    fn losses_are_looked_at_together_within_half_the_safety_margin() {
        for (lease, latest) in [(s(30), ms(10)), (ms(1_000), ms(5)), (ms(50), ms(5))] {
            let look = |deadline| joint_look(&terms(lease, false), deadline);
            assert_eq!(look(START), START);
            assert_eq!(look(START + ms(1)), START + latest);
        }
    }

    #[test]
    fn attempts_come_sooner_the_less_is_left() {
        for (left, after) in [
            (s(16), s(2)),
            (ms(240), ms(30)),
            (ms(100), ms(20)),
            // the deadline itself
            (ms(10), ms(10)),
        ] {
            assert_eq!(next_try(START + left, START), START + after, "{left:?}");
        }
        assert_eq!(patience(s(18)), s(3));
        assert_eq!(patience(ms(60)), ms(20));
    }
}
