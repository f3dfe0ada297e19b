//! Values that many threads write, apart from those that they read.

use std::ops::{Deref, DerefMut};

/// A value in cache lines of its own. Each write of a thread makes the others fetch the line again, and what they only read
/// beside it as well. 128 bytes, as x86-64 fetches lines in pairs, and some processors have lines of that size.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct OwnLine<T>(T);

impl<T> OwnLine<T> {
    pub(crate) const fn new(value: T) -> OwnLine<T> {
        OwnLine(value)
    }
}

impl<T> Deref for OwnLine<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for OwnLine<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}
