//! Counts how many requests do something at the same time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counted places, each occupied until its [`Taken`] is dropped.
#[derive(Debug, Clone, Default)]
pub(super) struct Places(Arc<AtomicUsize>);

/// An occupied place.
#[derive(Debug)]
pub(super) struct Taken(Places);

impl Places {
    /// Takes a place without a limit.
    pub(super) fn take(&self) -> Taken {
        self.0.fetch_add(1, Ordering::Relaxed);
        Taken(self.clone())
    }

    /// Takes a place, unless `most` are occupied.
    pub(super) fn try_take(&self, most: usize) -> Option<Taken> {
        let more = |taken: usize| (taken < most).then(|| taken + 1);
        let taken = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.is_ok().then(|| Taken(self.clone()))
    }

    pub(super) fn taken(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}
