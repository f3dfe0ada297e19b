//! The releases that ended without a confirmation of the store: those locks end with their leases.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use parking_lot::Mutex;

use crate::base::moment::Moment;

/// Until when the store may have the locks of those of one client.
#[derive(Debug, Default)]
pub(crate) struct GivenUp(Mutex<BinaryHeap<Reverse<Moment>>>);

impl GivenUp {
    /// Adds a release whose lock the store may have for as long.
    pub(crate) fn add(&self, held_until: Moment, now: Moment) {
        let mut releases = self.0.lock();
        forget_those_over(&mut releases, now);
        releases.push(Reverse(held_until));
    }

    /// How many of their locks the store may still have.
    pub(crate) fn still_held(&self, now: Moment) -> usize {
        let mut releases = self.0.lock();
        forget_those_over(&mut releases, now);
        releases.len()
    }
}

fn forget_those_over(releases: &mut BinaryHeap<Reverse<Moment>>, now: Moment) {
    while releases.peek().is_some_and(|&Reverse(until)| until <= now) {
        releases.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_that_was_given_up_counts_until_the_lease_is_over() {
        let s = |s: u64| Moment::from_nanos(s * 1_000_000_000);
        let given_up = GivenUp::default();
        assert_eq!(given_up.still_held(s(1)), 0);
        given_up.add(s(5), s(1));
        given_up.add(s(3), s(2));
        assert_eq!(given_up.still_held(s(2)), 2);
        assert_eq!(given_up.still_held(s(3)), 1);
        given_up.add(s(9), s(6));
        assert_eq!(given_up.still_held(s(6)), 1);
    }
}
