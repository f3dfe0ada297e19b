//! Memory that threads use again. What each acquire allocates and frees, often on another thread, goes to the allocator in
//! crowds: threads then wait for each other there, which took a fifth of a pair with 256 tasks on two threads (glibc).

use std::cell::RefCell;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::thread::LocalKey;

/// How much memory for values of one type a thread keeps.
const MOST: usize = 512;

/// The memory that a thread keeps. What is in it owns nothing.
pub(crate) struct Spares<M>(RefCell<Vec<M>>);

impl<M> Spares<M> {
    pub(crate) const fn new() -> Spares<M> {
        Spares(RefCell::new(Vec::new()))
    }
}

/// Takes memory that this thread keeps.
pub(crate) fn take<M>(spares: &'static LocalKey<Spares<M>>) -> Option<M> {
    // None while the thread ends.
    spares.try_with(|spares| spares.0.borrow_mut().pop()).ok()?
}

/// Gives memory to this thread.
pub(crate) fn give<M>(spares: &'static LocalKey<Spares<M>>, memory: M) {
    let mut memory = Some(memory);
    let _ = spares.try_with(|spares| {
        let mut kept = spares.0.borrow_mut();
        if kept.len() < MOST {
            kept.extend(memory.take());
        }
    });
}

/// A box; its memory is used again where it is [spared](Self::spare).
pub(crate) struct Reused<T>(Box<Option<T>>);

/// The memory of boxes.
pub(crate) type Boxes<T> = Spares<Box<Option<T>>>;

impl<T> Reused<T> {
    pub(crate) fn new(spares: &'static LocalKey<Boxes<T>>, value: T) -> Reused<T> {
        let mut memory = take(spares).unwrap_or_default();
        *memory = Some(value);
        Reused(memory)
    }

    /// Drops the value, and keeps the memory.
    pub(crate) fn spare(mut self, spares: &'static LocalKey<Boxes<T>>) {
        // First the value: its drop may need memory.
        *self.0 = None;
        give(spares, self.0);
    }
}

const THERE: &str = "the value is there until it is spared";

impl<T> Deref for Reused<T> {
    type Target = T;

    fn deref(&self) -> &T {
        (*self.0).as_ref().expect(THERE)
    }
}

impl<T> DerefMut for Reused<T> {
    fn deref_mut(&mut self) -> &mut T {
        (*self.0).as_mut().expect(THERE)
    }
}

impl<T: fmt::Debug> fmt::Debug for Reused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    thread_local! {
        static SPARES: Boxes<Value> = const { Spares::new() };
    }

    struct Value(Rc<()>);

    fn kept() -> usize {
        SPARES.with(|spares| spares.0.borrow().len())
    }

    #[test]
    fn memory_is_used_again_and_what_was_in_it_is_dropped_at_once() {
        let held = Rc::new(());
        let first = Reused::new(&SPARES, Value(held.clone()));
        let at = std::ptr::from_ref(&*first);
        first.spare(&SPARES);
        assert_eq!((Rc::strong_count(&held), kept()), (1, 1));
        let second = Reused::new(&SPARES, Value(held.clone()));
        assert_eq!((std::ptr::from_ref(&*second), kept()), (at, 0));
        assert!(Rc::ptr_eq(&(*second).0, &held));
        drop(second);
        assert_eq!((Rc::strong_count(&held), kept()), (1, 0));
    }

    #[test]
    fn thread_keeps_only_some_memory() {
        let held = Rc::new(());
        let many = || {
            let value = |_| Reused::new(&SPARES, Value(held.clone()));
            (0..2 * MOST).map(value).collect::<Vec<_>>()
        };
        for _ in 0..2 {
            many().into_iter().for_each(|value| value.spare(&SPARES));
            assert_eq!((Rc::strong_count(&held), kept()), (1, MOST));
        }
    }
}
