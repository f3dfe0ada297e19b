//! What holding a lock gives.

use std::fmt;
use std::future::Future;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::api::run::{Framed, Guarding};
use crate::runtime::grants::Grant;
use crate::runtime::hold::Hold;
use crate::runtime::scope::{Frames, InScope, Scope};
use crate::{Error, Held, HoldState, LockKey, Loss};

/// A lock that is held, until the guard is released or dropped.
///
/// While the guard lives the watchdog renews the lease (unless it was fixed), and [`lost`](Self::lost)
/// tells when that failed. **When the lease runs out, a guard that is asked answers so before the store
/// gives the lock to somebody else**: also when the store hangs, the network is cut or this process was
/// stopped, because the deadline is counted by this process's own clock from before the last successful
/// renewal was sent. A holder that does not ask, or a store that lost its data, is what the
/// [fencing token](Self::fencing_token) is for.
///
/// Dropping the guard gives the lock back in the background: from any thread, inside or outside a runtime,
/// in a panic, without blocking. [`release`](Self::release) waits for it and tells the outcome.
///
/// A bare guard is to others what the guard of a `tokio::sync::Mutex` is: a second `acquire` of the same
/// lock in the same function waits for it. Code that shall re-enter runs in the guard's frame, by
/// [`run`](Self::run), [`scope`](Self::scope) or [`Lock::run`](crate::Lock::run), or takes a second guard
/// by [`reenter`](Self::reenter).
#[must_use = "the lock is given back when the guard is dropped"]
pub struct LockGuard(Hold);

impl LockGuard {
    pub(crate) fn grant(&self) -> &Arc<Grant> {
        self.0.grant()
    }

    pub(crate) fn hold(&self) -> &Hold {
        &self.0
    }

    pub(crate) fn hold_mut(&mut self) -> &mut Hold {
        &mut self.0
    }

    /// The fencing token of this acquisition: greater than the token of every earlier acquisition of this
    /// lock. Send it along with each write, and have the resource refuse a write whose token is smaller
    /// than one that it has seen. A token that nobody checks protects nothing.
    ///
    /// Re-entered guards share the token of the outermost one.
    #[must_use]
    pub fn fencing_token(&self) -> u64 {
        self.grant().token
    }

    /// The name of the lock.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.grant().key
    }

    /// Whether the lock is still held, by the clock as of this call.
    #[must_use]
    pub fn is_held(&self) -> bool {
        !matches!(self.state(), HoldState::Lost(_))
    }

    /// The same with the doubts: held, suspect or lost.
    #[must_use]
    pub fn state(&self) -> HoldState {
        self.grant().status()
    }

    /// How long the lock is held for sure, by the clock as of this call; zero when it is lost. A renewed
    /// lock starts anew at each renewal, every third of its lease.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.grant().remaining()
    }

    /// Whether the watchdog renews the lease; not so for one fixed by [`Lock::lease`](crate::Lock::lease).
    #[must_use]
    pub fn is_renewed(&self) -> bool {
        self.grant().renewed
    }

    /// Waits until the lock is lost and tells why; immediately when it is. The future keeps nothing alive:
    /// after the guard was released it ends with [`Loss::Released`].
    ///
    /// Cancel safe.
    pub fn lost(&self) -> impl Future<Output = Loss> + Send + use<> {
        self.held().lost()
    }

    /// A token that is cancelled when the lock is lost or released, to hand on to code that knows nothing
    /// of locks.
    #[must_use]
    pub fn cancellation_token(&self) -> CancellationToken {
        self.held().cancellation_token()
    }

    /// Makes sure that the lock is held for `at_least` this long from now on: renews it if less is left.
    /// Call it before a step that must not be cut short.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when it is lost, [`Error::InvalidOption`] when a fixed or shorter lease or
    /// `max_hold` cannot give that much, and the store's failure when it does not answer; the lock is then
    /// still held for [`remaining`](Self::remaining).
    ///
    /// Cancel safe.
    pub async fn ensure(&self, at_least: Duration) -> Result<(), Error> {
        self.held().ensure(at_least).await
    }

    /// A view of this hold: cloneable, and keeping nothing alive.
    #[must_use]
    pub fn held(&self) -> Held {
        Held::new(self.grant().clone())
    }

    /// A second guard of the same lock, without asking the store. The lock is given back when the last of
    /// them is gone.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when the lock is lost.
    #[track_caller]
    pub fn reenter(&self) -> Result<LockGuard, Error> {
        self.0.reenter(Location::caller()).map(LockGuard)
    }

    /// Runs a future in the frame of this guard: an acquire of the same lock inside re-enters. Branches of
    /// a `join!` inside still exclude each other.
    ///
    /// The frame of this guard, and no other, is added to those in which the future is polled. So a future that
    /// another task runs is in the frame of this guard alone, wherever this was called.
    ///
    /// The future borrows nothing from the guard. When the guard is given back while it runs, the frame is
    /// void and an acquire inside is an ordinary one.
    pub fn scope<F: Future>(&self, future: F) -> InScope<F> {
        InScope::new(future, self.frames())
    }

    /// The frame of this guard alone, as a handle: for what is polled and is no future, such as a body or a stream.
    #[must_use]
    pub fn frame(&self) -> Scope {
        self.frames().handle()
    }

    /// Runs a future in the frame of this guard, as [`scope`](Self::scope) does, and drops it when the lock is lost.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when the lock was lost before the future was done.
    pub fn run<F: Future>(&self, future: F) -> impl Future<Output = Result<F::Output, Error>> + use<F> {
        Guarding::new(self.scope(future), self.held())
    }

    /// Gives the lock back and waits for the outcome. When other guards of a re-entered lock are left, only
    /// this one is given back.
    ///
    /// # Errors
    ///
    /// - [`Error::Lost`] when the lock was lost before. The release is sent all the same; it never touches
    ///   the lock of somebody else.
    /// - [`Error::OutcomeUnknown`] or another failure of the store: the release is repeated in the
    ///   background, and the lease is the last resort.
    ///
    /// Cancel safe: once polled, the release goes on when the future is dropped.
    pub fn release(self) -> impl Future<Output = Result<(), Error>> + Send + 'static {
        self.0.release()
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("key", self.key())
            .field("fencing_token", &self.fencing_token())
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

/// What gives back one lock, or several at once.
pub(crate) trait Holding: Sized {
    /// A view of all of it.
    fn view(&self) -> Held;

    /// Gives all of it back.
    fn give_back(self) -> impl Future<Output = Result<(), Error>> + Send;
}

impl From<Hold> for LockGuard {
    fn from(hold: Hold) -> LockGuard {
        LockGuard(hold)
    }
}

impl Framed for LockGuard {
    fn frames(&self) -> Frames {
        self.0.frames()
    }
}

impl Holding for LockGuard {
    fn view(&self) -> Held {
        self.held()
    }

    fn give_back(self) -> impl Future<Output = Result<(), Error>> + Send {
        self.release()
    }
}

/// Releases after the work is done: a release that fails then is logged and counted by the release queue,
/// and does not take the work's result away.
pub(crate) async fn finish(guard: impl Holding) {
    let key = guard.view().key().clone();
    match guard.give_back().await {
        // The loss was told already, to the work or to its caller.
        Ok(()) | Err(Error::Lost { .. }) => {}
        Err(Error::NotReleased { failures }) if failures.iter().all(Error::is_lost) => {}
        Err(error) => tracing::warn!(%key, %error, "the release of a lock failed, its lease ends it"),
    }
}
