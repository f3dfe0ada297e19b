//! The live grants, by their numbers.
//!
//! A service may hold hundreds of thousands, so an entry is two words, and those that are renewed together are found
//! close to each other.

use std::borrow::Borrow;
use std::cell::Cell;
use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::Arc;

use crate::clock::Moment;
use crate::grants::Grant;

/// So many numbers that follow each other have places that do.
const ROW: u64 = 16;

/// A live grant.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) grant: Arc<Grant>,
    /// When it needs attention.
    pub(super) due: Cell<Moment>,
}

// All that is looked at is the number, which never changes.
impl Borrow<u64> for Entry {
    fn borrow(&self) -> &u64 {
        &self.grant.number
    }
}

impl Hash for Entry {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.grant.number.hash(state);
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Entry) -> bool {
        self.grant.number == other.grant.number
    }
}

impl Eq for Entry {}

#[derive(Debug, Default)]
pub(super) struct Entries(HashSet<Entry, ByNumber>);

impl Entries {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn insert(&mut self, grant: Arc<Grant>, due: Moment) {
        let due = Cell::new(due);
        self.0.replace(Entry { grant, due });
    }

    pub(super) fn get(&self, number: u64) -> Option<&Entry> {
        self.0.get(&number)
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<Entry> {
        self.0.take(&number)
    }

    pub(super) fn grants(&self) -> impl Iterator<Item = &Arc<Grant>> {
        self.0.iter().map(|entry| &entry.grant)
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = Arc<Grant>> {
        self.0.drain().map(|entry| entry.grant)
    }
}

/// For numbers of our own that count up: nobody can choose them.
pub(super) type ByNumber = BuildHasherDefault<NumberHasher>;

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

    /// A table takes the lower bits for the place, and the upper seven to compare. Numbers that follow each other get
    /// places that do; each such row begins anywhere.
    fn write_u64(&mut self, number: u64) {
        const LOWER: u64 = u64::MAX >> 7;
        // By the golden ratio, as Knuth has it.
        let spread = |number: u64| number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let number = self.0 ^ number;
        let place = (spread(number / ROW) >> 32) + number % ROW;
        self.0 = (place & LOWER) | (spread(number) & !LOWER);
    }
}

#[cfg(test)]
mod tests {
    use std::hash::BuildHasher;

    use super::*;

    #[test]
    fn whichever_numbers_are_left_they_spread() {
        for every in [1, 2, 16, 64, 1024, 4096, 1 << 20] {
            let mut places = vec![0; 1024];
            for number in (0..10_000_u64).map(|number| number * every) {
                places[ByNumber::default().hash_one(number) as usize % 1024] += 1;
            }
            let fullest = places.iter().max();
            // Ten each, and by chance four times as many.
            assert!(fullest < Some(&40), "{every}: {fullest:?}");
        }
    }

    #[test]
    fn an_entry_is_two_words() {
        assert_eq!(size_of::<Entry>(), 16);
    }
}
