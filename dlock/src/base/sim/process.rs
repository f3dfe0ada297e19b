//! The simulated process that the code runs in: the source of its randomness and its clock.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// The origin of a [`Moment`](crate::clock::Moment) is this long before the start of the process.
const BEFORE: Duration = Duration::from_secs(24 * 60 * 60);
/// The first number for code outside all processes, beyond those of any process.
const OUTSIDE: u64 = 1 << 62;

/// A simulated process. Clones share it.
#[derive(Clone)]
pub struct Process(Rc<Inner>);

struct Inner {
    origin: Instant,
    suspended: Cell<Duration>,
    random: RefCell<fastrand::Rng>,
    next: Cell<u64>,
}

thread_local! {
    static CURRENT: RefCell<Option<Process>> = const { RefCell::new(None) };
    /// For code outside all processes.
    static OUTER: RefCell<Process> = RefCell::new(outer());
}

impl Process {
    /// Creates a process that draws all randomness from `seed`, and whose clock shows `epoch` at its start.
    #[must_use]
    pub fn new(seed: u64, epoch: Instant) -> Process {
        Process::counting_from(1, seed, epoch)
    }

    fn counting_from(first: u64, seed: u64, epoch: Instant) -> Process {
        Process(Rc::new(Inner {
            origin: epoch.checked_sub(BEFORE).unwrap_or(epoch),
            suspended: Cell::new(Duration::ZERO),
            random: RefCell::new(fastrand::Rng::with_seed(seed)),
            next: Cell::new(first),
        }))
    }

    /// Makes this thread run in this process until the returned value is dropped.
    #[must_use = "it leaves the process when it is dropped"]
    pub fn enter(&self) -> Entered {
        Entered(CURRENT.with(|current| current.replace(Some(self.clone()))))
    }

    /// Sets how long the machine was suspended since the start of the process: how far the clock of leases is ahead of
    /// tokio's.
    pub fn set_suspended(&self, suspended: Duration) {
        self.0.suspended.set(suspended);
    }
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Process").finish_non_exhaustive()
    }
}

/// Inside a process, until this is dropped; created by [`Process::enter`].
pub struct Entered(Option<Process>);

impl Drop for Entered {
    fn drop(&mut self) {
        let outer = self.0.take();
        let left = CURRENT.with(|current| current.replace(outer));
        drop(left);
    }
}

impl fmt::Debug for Entered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entered").finish_non_exhaustive()
    }
}

fn outer() -> Process {
    Process::counting_from(OUTSIDE, 0, Instant::now())
}

/// Called before a world begins: restarts the randomness of this thread outside of all processes, and forgets lost
/// grants.
pub fn reset() {
    super::lost::forget();
    OUTER.with(|process| *process.borrow_mut() = outer());
}

fn with<T>(look: impl FnOnce(&Inner) -> T) -> T {
    CURRENT.with(|current| match &*current.borrow() {
        Some(process) => look(&process.0),
        None => OUTER.with(|process| look(&process.borrow().0)),
    })
}

pub(super) fn with_random<T>(draw: impl FnOnce(&mut fastrand::Rng) -> T) -> T {
    with(|process| draw(&mut process.random.borrow_mut()))
}

pub(super) fn next_number() -> u64 {
    with(|process| process.next.replace(process.next.get() + 1))
}

/// The origin of moments.
pub(crate) fn origin() -> Instant {
    with(|process| process.origin)
}

/// How long the machine was suspended.
pub(crate) fn suspended() -> Duration {
    with(|process| process.suspended.get())
}
