//! The releases that ended without a confirmation of the store: those locks end with their leases.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use parking_lot::Mutex;

use crate::base::moment::Moment;

/// Those of one client.
#[derive(Debug, Default)]
pub(crate) struct GivenUp(Mutex<Releases>);

#[derive(Debug, Default)]
struct Releases {
    count: usize,
    /// Until when the store may have the locks of those that are not over.
    held_until: BinaryHeap<Reverse<Moment>>,
}

impl GivenUp {
    /// Counts a release whose lock the store may have for as long.
    pub(crate) fn count(&self, held_until: Moment, now: Moment) {
        let mut releases = self.0.lock();
        releases.count += 1;
        releases.forget_those_over(now);
        releases.held_until.push(Reverse(held_until));
    }

    /// How many were given up since an earlier count.
    pub(crate) fn since(&self, count: usize) -> usize {
        self.0.lock().count - count
    }

    /// Returns the count so far, and how many of these locks the store may still have.
    pub(crate) fn so_far(&self, now: Moment) -> (usize, usize) {
        let mut releases = self.0.lock();
        releases.forget_those_over(now);
        (releases.count, releases.held_until.len())
    }
}

impl Releases {
    fn forget_those_over(&mut self, now: Moment) {
        while self.held_until.peek().is_some_and(|&Reverse(until)| until <= now) {
            self.held_until.pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_given_up_counts_until_the_lease_is_over_and_in_the_sum_for_ever() {
        let s = |s: u64| Moment::from_nanos(s * 1_000_000_000);
        let given_up = GivenUp::default();
        assert_eq!(given_up.so_far(s(1)), (0, 0));
        given_up.count(s(5), s(1));
        given_up.count(s(3), s(2));
        assert_eq!(given_up.so_far(s(2)), (2, 2));
        assert_eq!(given_up.so_far(s(3)), (2, 1));
        given_up.count(s(9), s(6));
        assert_eq!(given_up.so_far(s(6)), (3, 1));
        assert_eq!(given_up.since(2), 1);
    }
}
