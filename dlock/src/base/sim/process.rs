//! Which simulated process the code runs in: where its chance and its clock come from.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Where a [`Moment`](crate::clock::Moment) is counted from: so long before the start of the process.
const BEFORE: Duration = Duration::from_secs(24 * 60 * 60);
/// The first number of what runs in no process, beyond those of any process.
const OUTSIDE: u64 = 1 << 62;

/// A simulated process. Clones are the same one.
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
    /// For what runs in no process.
    static OUTER: RefCell<Process> = RefCell::new(outer());
}

impl Process {
    /// A process that draws all its chance from `seed`, and whose clock shows `epoch` at its start.
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

    /// Until the returned value is dropped, this thread runs in this process.
    #[must_use = "it leaves the process when it is dropped"]
    pub fn enter(&self) -> Entered {
        Entered(CURRENT.with(|current| current.replace(Some(self.clone()))))
    }

    /// How long the machine was suspended since the start of the process: what the clock of leases is ahead of
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

/// Inside of a process, until this is dropped; made by [`Process::enter`].
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

/// Before a world begins: has the chance of this thread outside of all processes begin anew, and forgets which grants
/// were lost.
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

/// Where moments are counted from.
pub(crate) fn origin() -> Instant {
    with(|process| process.origin)
}

/// How long the machine was suspended.
pub(crate) fn suspended() -> Duration {
    with(|process| process.suspended.get())
}
