//! The loss of a lock: what it stops, and how it is reported.

use std::fmt;

use dlock::{Error, Held, LockKey, Loss};

/// What happens to a handler whose lock is lost while it runs.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock_tower::lock::OnLost;
/// use dlock_tower::{LockLayer, key};
///
/// let client = dlock::LockClient::memory();
/// // The handler checks the fencing token of its writes, and may run to its end.
/// let layer = LockLayer::new(client, key::header("x-account")).on_lost(OnLost::RunOn);
/// # let _ = layer;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum OnLost {
    /// It is dropped, and the answer is 503. Its effects are unknown, so the answer does not carry
    /// [`NotStarted`](crate::NotStarted). The default.
    #[default]
    Stop,
    /// It continues, and its answer is sent. It can detect the loss by the [`Held`](dlock::Held) in the request's
    /// extensions, and the resource that it writes to by the fencing token.
    RunOn,
}

/// A lock was lost before the work under it was done: a response's body that is sent
/// [under the lock](crate::LockLayer::until_body) and is not complete, or work that [keeps](super::KeptLocks) it.
///
/// ```
/// use dlock_tower::lock::{KeptLocks, LockLost};
///
/// /// Work that goes on after the response, and stops when the lock is lost.
/// async fn sends_mail(locks: KeptLocks) {
///     match locks.run(async { /* ... */ }).await {
///         Ok(()) => println!("sent"),
///         Err(LockLost { key, loss, .. }) => eprintln!("stopped, for {key} was lost: {loss}"),
///     }
/// }
/// # let _ = sends_mail;
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockLost {
    /// The lock.
    pub key: LockKey,
    /// Why it was lost.
    pub loss: Loss,
}

impl LockLost {
    /// Waits until one of these is lost; returns which, and why.
    pub(crate) async fn of(held: Held) -> LockLost {
        let loss = held.lost().await;
        LockLost::found(held.check()).unwrap_or_else(|| LockLost {
            key: held.key().clone(),
            loss,
        })
    }

    /// The loss that a check found.
    pub(crate) fn found(checked: Result<(), Error>) -> Option<LockLost> {
        match checked {
            Err(Error::Lost { key, loss, .. }) => Some(LockLost { key, loss }),
            _ => None,
        }
    }
}

impl fmt::Display for LockLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "lock \"{}\" was lost while work went on under it: {}",
            self.key, self.loss
        )
    }
}

impl std::error::Error for LockLost {}
