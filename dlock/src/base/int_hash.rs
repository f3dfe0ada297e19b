//! Maps by numbers that users cannot choose: our own, which count up, and hashes with a secret.

use std::hash::{BuildHasherDefault, Hasher};

/// How many consecutive numbers get consecutive buckets.
pub(crate) const ROW: u64 = 16;

pub(crate) type BuildIntHasher = BuildHasherDefault<IntHasher>;

#[derive(Debug, Default)]
pub(crate) struct IntHasher(u64);

impl Hasher for IntHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    /// A table takes the lower bits for the bucket, and the upper seven to compare. Consecutive numbers get consecutive
    /// buckets; each such row begins anywhere.
    fn write_u64(&mut self, number: u64) {
        const LOWER: u64 = u64::MAX >> 7;
        let number = self.0 ^ number;
        let place = (scatter(number / ROW) >> 32) + number % ROW;
        self.0 = (place & LOWER) | (scatter(number) & !LOWER);
    }
}

/// Scatters numbers by the golden ratio (Knuth): the upper bits are best.
pub(crate) fn scatter(number: u64) -> u64 {
    number.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

#[cfg(test)]
mod tests {
    use std::hash::BuildHasher;

    use super::*;

    #[test]
    fn whichever_numbers_are_left_they_scatter() {
        for every in [1, 2, 16, 64, 1024, 4096, 1 << 20] {
            let mut places = vec![0; 1024];
            for number in (0..10_000_u64).map(|number| number * every) {
                places[BuildIntHasher::default().hash_one(number) as usize % 1024] += 1;
            }
            let fullest = places.iter().max();
            // Ten each, and by chance four times as many.
            assert!(fullest < Some(&40), "{every}: {fullest:?}");
        }
    }
}
