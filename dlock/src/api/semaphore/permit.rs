//! Held permits.

use std::fmt;
use std::future::Future;

use crate::api::guard::{LockGuard, Wraps};
use crate::api::methods::hold_methods;

/// Held permits of a [`Semaphore`](super::Semaphore), until the guard is released or dropped.
///
/// While it lives, the watchdog renews the lease (unless it was fixed), and [`lost`](Self::lost) completes when that
/// fails. **When the lease expires, the guard reports the loss before the store grants the permits to another client.**
/// That holds among dlock's clients; a Java service reclaims permits by its own clock.
///
/// Dropping the guard releases the permits in the background: from any thread, inside or outside a runtime, in a panic,
/// without blocking. [`release`](Self::release) waits for the release and returns its outcome.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// let uploads = client.semaphore("uploads").permits(5);
///
/// let permit = uploads.acquire_many(2).await?;
/// assert_eq!(permit.permits(), 2);
/// assert_eq!(uploads.available().await?, 3);
/// permit.release().await?; // or drop it
/// # Ok(()) }
/// ```
#[must_use = "the permits are released when the guard is dropped"]
pub struct Permit {
    guard: LockGuard,
    amount: u32,
}

impl Permit {
    pub(super) fn new(guard: LockGuard, amount: u32) -> Permit {
        Permit { guard, amount }
    }

    /// Returns the number of permits.
    #[must_use]
    pub fn permits(&self) -> u32 {
        self.amount
    }

    hold_methods! {
        key,
        /// In memory, on Redis and on Valkey [`Holder::id`](crate::store::Holder::id) is another one: there each permit has an id
        /// in Redisson's form, and a guard may have several permits.
        id,
        fencing_token,
        is_held,
        state,
        remaining,
        is_renewed,
        check,
        lost,
        ensure,
        note,
        why_lost,
        held,
        run,
        /// All permits of this guard are released.
        release,
    }
}

impl Wraps for Permit {
    fn guard(&self) -> &LockGuard {
        &self.guard
    }

    fn into_guard(self) -> LockGuard {
        self.guard
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
