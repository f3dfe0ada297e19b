//! When each of many entries needs attention.
//!
//! Entries that are due at the same moment share a bucket, so that renewing many moves little memory: when a grant is
//! due at another moment by now, its old number stays in the bucket as a stale number.

use std::collections::{BTreeSet, HashMap};

use smallvec::SmallVec;

use crate::base::int_hash::BuildIntHasher;
use crate::base::moment::Moment;

/// How many stale numbers a bucket may have, in addition to as many as valid ones.
const SPARE: usize = 64;

#[derive(Debug, Default)]
struct Bucket {
    numbers: SmallVec<[u64; 2]>,
    /// How many of them are valid.
    valid: usize,
}

/// Which numbers are due when. Its user knows the time of each.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    buckets: HashMap<Moment, Bucket, BuildIntHasher>,
    order: BTreeSet<Moment>,
}

impl Schedule {
    pub(super) fn first(&self) -> Option<Moment> {
        self.order.first().copied()
    }

    pub(super) fn add(&mut self, due: Moment, number: u64) {
        self.add_all(due, std::iter::once(number));
    }

    /// At least one.
    pub(super) fn add_all(&mut self, due: Moment, numbers: impl ExactSizeIterator<Item = u64>) {
        let bucket = self.buckets.entry(due).or_insert_with(|| {
            self.order.insert(due);
            Bucket::default()
        });
        bucket.valid += numbers.len();
        bucket.numbers.extend(numbers);
    }

    /// Counts the entries that are no longer due then. `is_due` says whether a number is due then.
    pub(super) fn forget(&mut self, due: Moment, count: usize, is_due: impl Fn(u64) -> bool) {
        let Some(bucket) = self.buckets.get_mut(&due) else {
            return;
        };
        bucket.valid -= count;
        if bucket.valid == 0 {
            self.buckets.remove(&due);
            self.order.remove(&due);
        } else if bucket.numbers.len() > bucket.valid * 2 + SPARE {
            bucket.numbers.retain(|number| is_due(*number));
            bucket.numbers.shrink_to_fit();
        }
    }

    /// Takes the first bucket, if it is due by then: its numbers, valid and stale.
    pub(super) fn take(&mut self, until: Moment) -> Option<(Moment, impl Iterator<Item = u64> + use<>)> {
        let due = self.first().filter(|due| *due <= until)?;
        self.order.remove(&due);
        let bucket = self.buckets.remove(&due).unwrap_or_default();
        Some((due, bucket.numbers.into_iter()))
    }

    pub(super) fn clear(&mut self) {
        *self = Schedule::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(nanos: u64) -> Moment {
        Moment::from_nanos(nanos)
    }

    fn drain(schedule: &mut Schedule, until: u64) -> Vec<(Moment, Vec<u64>)> {
        let mut taken = Vec::new();
        while let Some((due, numbers)) = schedule.take(at(until)) {
            taken.push((due, numbers.collect()));
        }
        taken
    }

    #[test]
    fn buckets_come_in_order_and_not_before_their_time() {
        let mut schedule = Schedule::default();
        for (due, number) in [(30, 1), (10, 2), (20, 3), (10, 4)] {
            schedule.add(at(due), number);
        }
        schedule.add_all(at(20), [5, 6].into_iter());
        assert_eq!(schedule.first(), Some(at(10)));
        let taken = drain(&mut schedule, 20);
        assert_eq!(taken, [(at(10), vec![2, 4]), (at(20), vec![3, 5, 6])]);
        assert_eq!(schedule.first(), Some(at(30)));
    }

    #[test]
    fn a_bucket_goes_with_the_last_that_is_due_then() {
        let mut schedule = Schedule::default();
        schedule.add_all(at(10), [1, 2, 3].into_iter());
        schedule.forget(at(10), 2, |number| number == 2);
        assert_eq!(schedule.first(), Some(at(10)));
        schedule.forget(at(10), 1, |_| false);
        assert_eq!(schedule.first(), None);
        assert!(schedule.buckets.is_empty());
    }

    #[test]
    fn what_means_nothing_does_not_pile_up() {
        let mut schedule = Schedule::default();
        schedule.add(at(10), 0);
        for number in 1..10_000 {
            schedule.add(at(10), number);
            schedule.forget(at(10), 1, |number| number == 0);
            assert!(schedule.buckets[&at(10)].numbers.len() <= SPARE + 4);
        }
        assert_eq!(schedule.buckets[&at(10)].valid, 1);
        assert!(drain(&mut schedule, 10)[0].1.contains(&0));
    }
}
