//! The live grants, by their numbers.
//!
//! A service may hold hundreds of thousands, so an entry is two words, and those that are renewed together are found
//! close to each other.

use std::borrow::Borrow;
use std::cell::Cell;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::base::chance::HashSet;
use crate::base::moment::Moment;
use crate::base::numbers::ByNumber;
use crate::runtime::grants::Grant;

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

    #[cfg(dlock_sim)]
    pub(super) fn has(&self, number: u64) -> bool {
        self.0.contains(&number)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_two_words() {
        assert_eq!(size_of::<Entry>(), 16);
    }
}
