//! What holding permits gives.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::HoldState;
use crate::api::guard::LockGuard;
use crate::{Error, Held, LockKey, Loss};

/// Permits of a [`Semaphore`](super::Semaphore) that are held, until the guard is released or dropped.
///
/// It is to them what a [`LockGuard`] is to a lock: while it lives the watchdog renews the lease (unless it was
/// fixed), and [`lost`](Self::lost) tells when that failed. **When the lease runs out, a guard that is asked
/// answers so before the store gives the permits to somebody else.** That holds among dlock's clients; a Java
/// service takes permits back by its own clock.
///
/// Dropping the guard gives the permits back in the background: from any thread, inside or outside a runtime,
/// in a panic, without blocking. [`release`](Self::release) waits for it and tells the outcome.
#[must_use = "the permits are given back when the guard is dropped"]
pub struct Permit {
    guard: LockGuard,
    amount: u32,
}

impl Permit {
    pub(super) fn new(guard: LockGuard, amount: u32) -> Permit {
        Permit { guard, amount }
    }

    /// How many permits it is.
    #[must_use]
    pub fn permits(&self) -> u32 {
        self.amount
    }

    /// The fencing token of this acquisition: greater than that of every earlier one of this semaphore. See
    /// [`LockGuard::fencing_token`].
    #[must_use]
    pub fn fencing_token(&self) -> u64 {
        self.guard.fencing_token()
    }

    /// The name of the semaphore.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        self.guard.key()
    }

    /// Whether the permits are still held, by the clock as of this call.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.guard.is_held()
    }

    /// The same with the doubts: held, suspect or lost.
    #[must_use]
    pub fn state(&self) -> HoldState {
        self.guard.state()
    }

    /// How long the permits are held for sure, by the clock as of this call; zero when they are lost. Renewed
    /// ones start anew at each renewal, every third of their lease.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.guard.remaining()
    }

    /// Whether the watchdog renews the lease; not so for one fixed by
    /// [`Semaphore::lease`](super::Semaphore::lease).
    #[must_use]
    pub fn is_renewed(&self) -> bool {
        self.guard.is_renewed()
    }

    /// Waits until the permits are lost and tells why; immediately when they are. After they were released it
    /// ends with [`Loss::Released`]. Cancel safe.
    pub fn lost(&self) -> impl Future<Output = Loss> + Send + use<> {
        self.guard.lost()
    }

    /// A token that is cancelled when the permits are lost or released, to hand on to code that knows nothing
    /// of semaphores.
    #[must_use]
    pub fn cancellation_token(&self) -> CancellationToken {
        self.guard.cancellation_token()
    }

    /// Makes sure that the permits are held for `at_least` this long from now on; see [`LockGuard::ensure`].
    ///
    /// # Errors
    ///
    /// As for [`LockGuard::ensure`]. Cancel safe.
    pub async fn ensure(&self, at_least: Duration) -> Result<(), Error> {
        self.guard.ensure(at_least).await
    }

    /// A view of this hold: cloneable, and keeping nothing alive.
    #[must_use]
    pub fn held(&self) -> Held {
        self.guard.held()
    }

    /// Runs a future, and drops it when the permits are lost.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when they were lost before the future was done.
    pub fn run<F: Future>(&self, future: F) -> impl Future<Output = Result<F::Output, Error>> + use<F> {
        self.guard.run(future)
    }

    /// Gives all the permits back and waits for the outcome.
    ///
    /// # Errors
    ///
    /// - [`Error::Lost`] when they were lost before. The release is sent all the same; it never touches the
    ///   permits of somebody else.
    /// - [`Error::OutcomeUnknown`] or another failure of the store: the release is repeated in the background,
    ///   and the lease is the last resort.
    ///
    /// Cancel safe: once polled, the release goes on when the future is dropped.
    pub fn release(self) -> impl Future<Output = Result<(), Error>> + Send + 'static {
        self.guard.release()
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit")
            .field("key", self.key())
            .field("permits", &self.amount)
            .field("fencing_token", &self.fencing_token())
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}
