//! A held lock.

use std::fmt;
use std::future::Future;
use std::panic::Location;
use std::sync::Arc;

use crate::api::held::View;
use crate::api::methods::hold_methods;
use crate::api::run::Framed;
use crate::runtime::emit::Event;
use crate::runtime::emit::trace::Acquired;
use crate::runtime::grants::Grant;
use crate::runtime::hold::Hold;
use crate::runtime::scope::Frames;
use crate::{Error, Held};

/// A held lock, until the guard is released or dropped.
///
/// While the guard lives, the watchdog renews the lease (unless it was fixed), and [`lost`](Self::lost) completes when
/// that fails. **When the lease expires, the guard reports the loss before the store grants the lock to another
/// client**: also when the store hangs, the network is cut or this process was stopped, because this process counts the
/// deadline by its own clock, from before the last successful renewal was sent. The [fencing
/// token](Self::fencing_token) protects against a holder that does not check its guard, and a store that lost its data.
///
/// Dropping the guard releases the lock in the background: from any thread, inside or outside a runtime, in a panic,
/// without blocking. [`release`](Self::release) waits for the release and returns its outcome.
///
/// To other code a bare guard is like the guard of a `tokio::sync::Mutex`: a second `acquire` of the same lock in the
/// same function waits for it. Code that needs to re-enter runs in the guard's frame, by [`run`](Self::run),
/// [`scope`](Self::scope) or [`Lock::run`](crate::Lock::run), or takes a second guard with [`reenter`](Self::reenter).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// let guard = client.lock("order:42").acquire().await?;
///
/// // The database refuses a write whose token is smaller than one it has seen.
/// let token = guard.fencing_token();
/// # let write = async |_token: u64| {};
/// write(token).await;
/// guard.check()?; // still held, so no other holder wrote meanwhile
/// guard.release().await?; // or drop it
/// # Ok(()) }
/// ```
#[must_use = "the lock is released when the guard is dropped"]
pub struct LockGuard(Hold);

impl Acquired for LockGuard {
    fn each_grant(&self, with: &mut dyn FnMut(&Grant)) {
        with(self.grant());
    }
}

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

    hold_methods! {
        key,
        /// Re-entered guards share the id of the outermost one.
        ///
        /// ```
        /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
        /// let client = dlock::LockClient::memory();
        /// let guard = client.lock("order:42").acquire().await?;
        /// println!("charging as holder {}", guard.id()); // `dlock show order:42` prints the same
        ///
        /// let holder = client.inspect("order:42").await?.expect("the lock is held");
        /// assert_eq!(holder.id, guard.id());
        /// # Ok(()) }
        /// ```
        id,
        /// Re-entered guards share the token of the outermost one.
        fencing_token,
        is_held,
        state,
        remaining,
        is_renewed,
        check,
        lost,
        ensure,
        note,
        revoked,
        why_lost,
        held,
        scope,
        frame,
        run,
        /// If other guards of a re-entered lock exist, only this guard is released.
        release,
    }

    /// Returns a second guard of the same lock, without a request to the store. The lock is released with the last of
    /// its guards.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when the lock is lost.
    #[track_caller]
    pub fn reenter(&self) -> Result<LockGuard, Error> {
        self.0.reenter(Location::caller()).map(LockGuard)
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

/// Releases one lock, or several at once.
pub(crate) trait Holding: View + Sized {
    /// Releases all of it.
    fn release_hold(self) -> impl Future<Output = Result<(), Error>> + Send + 'static;
}

/// A wrapper around one guard, which holds what the guard holds.
pub(crate) trait Wraps: Sized {
    fn guard(&self) -> &LockGuard;

    fn into_guard(self) -> LockGuard;
}

impl<W: Wraps> View for W {
    fn grants(&self) -> &[Arc<Grant>] {
        self.guard().grants()
    }

    fn first(&self) -> &Arc<Grant> {
        self.guard().first()
    }

    fn view(&self) -> Held {
        self.guard().view()
    }
}

impl<W: Wraps> Holding for W {
    fn release_hold(self) -> impl Future<Output = Result<(), Error>> + Send + 'static {
        self.into_guard().release_hold()
    }
}

impl<W: Wraps> Framed for W {
    fn frames(&self) -> Frames {
        self.guard().frames()
    }
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

impl View for LockGuard {
    fn grants(&self) -> &[Arc<Grant>] {
        std::slice::from_ref(self.grant())
    }

    fn first(&self) -> &Arc<Grant> {
        self.grant()
    }

    fn view(&self) -> Held {
        Held::new(self.grant().clone())
    }
}

impl Holding for LockGuard {
    fn release_hold(self) -> impl Future<Output = Result<(), Error>> + Send + 'static {
        self.0.release()
    }
}

/// Releases after the work is done, and keeps the work's result. A release that is not confirmed in time goes on; the release
/// queue logs and counts it if it fails for good.
pub(crate) async fn finish(guard: impl Holding) {
    let key = guard.view().key().clone();
    match guard.release_hold().await {
        // The loss was reported before, to the work or to its caller.
        Ok(()) | Err(Error::Lost { .. }) => {}
        Err(Error::NotReleased { failures }) if failures.iter().all(Error::is_lost) => {}
        Err(error) => Event::NotReleasedAfterWork {
            key: &key,
            error: &error,
        }
        .emit(),
    }
}
