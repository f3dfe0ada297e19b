//! Values of which each thread writes its own, so that threads do not fetch a cache line from each other for each lock.

use crate::base::own_line::OwnLine;

/// How many values there are; threads beyond that share them. A power of two.
pub(crate) const SLOTS: usize = source::SLOTS;

/// A value for each thread, in cache lines of its own.
#[derive(Debug)]
pub(crate) struct PerThread<T>([OwnLine<T>; SLOTS]);

impl<T> PerThread<T> {
    pub(crate) fn new(mut value: impl FnMut(usize) -> T) -> PerThread<T> {
        PerThread(std::array::from_fn(|slot| OwnLine::new(value(slot))))
    }

    /// Returns the value of this thread.
    pub(crate) fn here(&self) -> &T {
        self.at(slot())
    }

    /// Returns the value in this slot.
    pub(crate) fn at(&self, slot: usize) -> &T {
        &self.0[slot % SLOTS]
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|line| &**line)
    }
}

impl<T: Default> Default for PerThread<T> {
    fn default() -> PerThread<T> {
        PerThread::new(|_| T::default())
    }
}

/// Returns the slot of this thread, below [`SLOTS`]. Threads that begin one after the other, as the workers of a runtime,
/// have different ones.
pub(crate) fn slot() -> usize {
    source::slot()
}

#[cfg(not(dlock_sim))]
mod source {
    use std::sync::atomic::{AtomicUsize, Ordering};

    pub(super) const SLOTS: usize = 16;

    pub(super) fn slot() -> usize {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static SLOT: usize = NEXT.fetch_add(1, Ordering::Relaxed) % SLOTS;
        }
        // While the thread ends, as from destructors of its other values.
        SLOT.try_with(|slot| *slot).unwrap_or(0)
    }
}

/// A simulated process has one thread.
#[cfg(dlock_sim)]
mod source {
    pub(super) const SLOTS: usize = 1;

    pub(super) fn slot() -> usize {
        0
    }
}
