//! Values of which each thread writes its own, so that threads do not fetch a cache line from each other for each lock.

use crate::base::own_line::OwnLine;

/// How many values there are; threads beyond that share them. A power of two.
pub(crate) const PLACES: usize = source::PLACES;

/// A value for each thread, in cache lines of its own.
#[derive(Debug)]
pub(crate) struct PerThread<T>([OwnLine<T>; PLACES]);

impl<T> PerThread<T> {
    pub(crate) fn new(mut value: impl FnMut(usize) -> T) -> PerThread<T> {
        PerThread(std::array::from_fn(|place| OwnLine::new(value(place))))
    }

    /// Returns the value of this thread.
    pub(crate) fn here(&self) -> &T {
        self.at(place())
    }

    /// Returns the value at this place.
    pub(crate) fn at(&self, place: usize) -> &T {
        &self.0[place % PLACES]
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

/// Returns the place of this thread, below [`PLACES`]. Threads that begin one after the other, as the workers of a runtime,
/// have different ones.
pub(crate) fn place() -> usize {
    source::place()
}

#[cfg(not(dlock_sim))]
mod source {
    use std::sync::atomic::{AtomicUsize, Ordering};

    pub(super) const PLACES: usize = 16;

    pub(super) fn place() -> usize {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static PLACE: usize = NEXT.fetch_add(1, Ordering::Relaxed) % PLACES;
        }
        // While the thread ends, as from destructors of its other values.
        PLACE.try_with(|place| *place).unwrap_or(0)
    }
}

/// A simulated process has one thread.
#[cfg(dlock_sim)]
mod source {
    pub(super) const PLACES: usize = 1;

    pub(super) fn place() -> usize {
        0
    }
}
