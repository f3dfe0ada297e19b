//! What happened how often. What a run claims to have tried has to have happened sometimes: see [`Counts::sometimes`].

use std::collections::BTreeMap;

#[derive(Debug, Clone, Default)]
pub(crate) struct Counts {
    pub(crate) acquisitions: u64,
    pub(crate) faults: u64,
    pub(crate) requests: u64,
    /// Pieces of work under the claim of a record.
    pub(crate) effects: u64,
    sometimes: BTreeMap<&'static str, u64>,
}

impl Counts {
    /// Something that worlds exist for has happened.
    pub(crate) fn sometimes(&mut self, what: &'static str) {
        *self.sometimes.entry(what).or_default() += 1;
    }

    pub(crate) fn add(&mut self, other: &Counts) {
        self.acquisitions += other.acquisitions;
        self.faults += other.faults;
        self.requests += other.requests;
        self.effects += other.effects;
        for (what, times) in &other.sometimes {
            *self.sometimes.entry(what).or_default() += times;
        }
    }

    pub(crate) fn each(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.sometimes.iter().map(|(what, times)| (*what, *times))
    }
}
