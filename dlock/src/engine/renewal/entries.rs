//! The live grants, by their numbers.
//!
//! A service may hold hundreds of thousands, so an entry is two words, and grants that are renewed together are stored
//! close to each other.

use std::borrow::Borrow;
use std::cell::Cell;
use std::collections::HashSet;
use std::hash::{Hash, Hasher};

use super::Renewable;
use crate::base::int_hash::BuildIntHasher;
use crate::base::moment::Moment;

/// A live grant.
#[derive(Debug)]
pub(super) struct Entry<G> {
    pub(super) grant: G,
    /// When it needs attention.
    pub(super) due: Cell<Moment>,
}

// Compared only by the number, which never changes.
impl<G: Renewable> Borrow<u64> for Entry<G> {
    fn borrow(&self) -> &u64 {
        self.grant.number()
    }
}

impl<G: Renewable> Hash for Entry<G> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.grant.number().hash(state);
    }
}

impl<G: Renewable> PartialEq for Entry<G> {
    fn eq(&self, other: &Entry<G>) -> bool {
        self.grant.number() == other.grant.number()
    }
}

impl<G: Renewable> Eq for Entry<G> {}

#[derive(Debug)]
pub(super) struct Entries<G>(HashSet<Entry<G>, BuildIntHasher>);

impl<G> Default for Entries<G> {
    fn default() -> Entries<G> {
        Entries(HashSet::default())
    }
}

impl<G: Renewable> Entries<G> {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn insert(&mut self, grant: G, due: Moment) {
        let due = Cell::new(due);
        self.0.replace(Entry { grant, due });
    }

    pub(super) fn get(&self, number: u64) -> Option<&Entry<G>> {
        self.0.get(&number)
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<Entry<G>> {
        self.0.take(&number)
    }

    pub(super) fn grants(&self) -> impl Iterator<Item = &G> {
        self.0.iter().map(|entry| &entry.grant)
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = G> {
        self.0.drain().map(|entry| entry.grant)
    }
}
