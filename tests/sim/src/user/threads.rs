//! Another thread of a process, which holds guards and drops them at any moment.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use dlock::{LockGuard, sim};
use fastrand::Rng;

use super::work::Inside;
use crate::chance::{Draws, stream};
use crate::world::streams;

thread_local! {
    static GIVEN: RefCell<Given> = RefCell::new(Given::new(0));
}

/// The guards of the thread: a lock is held until its guard is dropped.
type Guard = (Inside, LockGuard);

struct Given {
    rng: Rng,
    next: u64,
    guards: BTreeMap<u64, Guard>,
}

impl Given {
    fn new(seed: u64) -> Given {
        Given {
            rng: stream(seed, &[streams::THREADS]),
            next: 0,
            guards: BTreeMap::new(),
        }
    }

    fn take(&mut self) -> Option<Guard> {
        let first = *self.guards.first_key_value()?.0;
        self.rng
            .permille(500)
            .then(|| self.guards.remove(&first))
            .flatten()
    }
}

/// A guard that was given away, until this is dropped.
pub(super) struct Gift(u64);

/// Gives a guard away.
pub(super) fn give(inside: Inside, guard: LockGuard) -> Gift {
    GIVEN.with_borrow_mut(|given| {
        given.next += 1;
        given.guards.insert(given.next, (inside, guard));
        Gift(given.next)
    })
}

impl Drop for Gift {
    fn drop(&mut self) {
        let guard = GIVEN.with_borrow_mut(|given| given.guards.remove(&self.0));
        drop(guard);
    }
}

/// Begins a world of this seed.
pub(crate) fn begin(seed: u64) {
    let before = GIVEN.replace(Given::new(seed));
    drop(before);
    sim::on_preempt(Some(Rc::new(|| {
        // Dropped when nothing is borrowed any more: it sends.
        let guard = GIVEN.with_borrow_mut(Given::take);
        drop(guard);
    })));
}
