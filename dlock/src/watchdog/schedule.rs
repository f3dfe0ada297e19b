//! When each of many needs attention.
//!
//! Those that are due at the same moment stand in one bucket, so that a renewal of many moves them for little: a
//! number in a bucket whose grant is due at another moment by now is left there, and means nothing.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

use smallvec::SmallVec;
use tokio::time::Instant;

/// A bucket may have so many numbers that mean nothing, beside as many as those that do.
const SPARE: usize = 64;

/// A map by numbers of our own that count up: nobody can choose them, and they spread well.
pub(super) type ByNumber<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;

#[derive(Debug, Default)]
pub(super) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        // By the golden ratio, as Knuth has it: the map takes the upper bits, and the lower ones.
        self.0 = (self.0 ^ number)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .rotate_left(32);
    }
}

/// An instant in half the room: microseconds, rounded up so that what is due at a deadline is due when that
/// has passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Moment(pub(super) u64);

impl Moment {
    pub(super) fn of(origin: Instant, at: Instant) -> Moment {
        let since = at.saturating_duration_since(origin);
        let micros = u64::from(since.subsec_nanos().div_ceil(1000));
        Moment(since.as_secs().saturating_mul(1_000_000).saturating_add(micros))
    }
}

#[derive(Debug, Default)]
struct Bucket {
    numbers: SmallVec<[u64; 2]>,
    /// How many of them mean something.
    valid: usize,
}

/// Which numbers are due when. Who uses it knows when each of them is.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    buckets: ByNumber<Moment, Bucket>,
    order: BTreeSet<Moment>,
}

impl Schedule {
    pub(super) fn first(&self) -> Option<Moment> {
        self.order.first().copied()
    }

    pub(super) fn add(&mut self, due: Moment, number: u64) {
        let bucket = self.buckets.entry(due).or_insert_with(|| {
            self.order.insert(due);
            Bucket::default()
        });
        bucket.numbers.push(number);
        bucket.valid += 1;
    }

    /// One that was due then is not any more. `is_due` says of a number whether it is due then.
    pub(super) fn forget(&mut self, due: Moment, is_due: impl Fn(u64) -> bool) {
        let Some(bucket) = self.buckets.get_mut(&due) else {
            return;
        };
        bucket.valid -= 1;
        if bucket.valid == 0 {
            self.buckets.remove(&due);
            self.order.remove(&due);
        } else if bucket.numbers.len() > bucket.valid * 2 + SPARE {
            bucket.numbers.retain(|number| is_due(*number));
            bucket.numbers.shrink_to_fit();
        }
    }

    /// Takes out the first bucket, if it is due until then: what is in it, and what may have been.
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

    fn drain(schedule: &mut Schedule, until: u64) -> Vec<(u64, Vec<u64>)> {
        let mut taken = Vec::new();
        while let Some((Moment(due), numbers)) = schedule.take(Moment(until)) {
            taken.push((due, numbers.collect()));
        }
        taken
    }

    #[test]
    fn buckets_come_in_order_and_not_before_their_time() {
        let mut schedule = Schedule::default();
        for (due, number) in [(30, 1), (10, 2), (20, 3), (10, 4)] {
            schedule.add(Moment(due), number);
        }
        assert_eq!(schedule.first(), Some(Moment(10)));
        assert_eq!(drain(&mut schedule, 20), [(10, vec![2, 4]), (20, vec![3])]);
        assert_eq!(schedule.first(), Some(Moment(30)));
    }

    #[test]
    fn a_bucket_goes_with_the_last_that_is_due_then() {
        let mut schedule = Schedule::default();
        schedule.add(Moment(10), 1);
        schedule.add(Moment(10), 2);
        schedule.forget(Moment(10), |number| number == 2);
        assert_eq!(schedule.first(), Some(Moment(10)));
        schedule.forget(Moment(10), |_| false);
        assert_eq!(schedule.first(), None);
        assert!(schedule.buckets.is_empty());
    }

    #[test]
    fn what_means_nothing_does_not_pile_up() {
        let mut schedule = Schedule::default();
        schedule.add(Moment(10), 0);
        for number in 1..10_000 {
            schedule.add(Moment(10), number);
            schedule.forget(Moment(10), |number| number == 0);
            assert!(schedule.buckets[&Moment(10)].numbers.len() <= SPARE + 4);
        }
        assert_eq!(schedule.buckets[&Moment(10)].valid, 1);
        assert!(drain(&mut schedule, 10)[0].1.contains(&0));
    }

    #[test]
    fn moments_are_rounded_up() {
        let origin = Instant::now();
        for (nanos, micros) in [(0, 0), (1, 1), (1000, 1), (1001, 2), (1_000_000_001, 1_000_001)] {
            let at = origin + std::time::Duration::from_nanos(nanos);
            assert_eq!(Moment::of(origin, at), Moment(micros));
        }
        assert_eq!(
            Moment::of(origin + std::time::Duration::from_secs(1), origin),
            Moment(0)
        );
    }
}
