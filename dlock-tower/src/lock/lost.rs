//! The loss of a lock: what it stops, and how it is told.

use std::fmt;

use dlock::{Error, Held, LockKey, Loss};

/// What becomes of a handler whose lock is lost while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum OnLost {
    /// It is dropped, and the answer is 503. Nobody knows what effects it had, so the answer does not
    /// carry [`NotStarted`](crate::NotStarted). The default.
    #[default]
    Stop,
    /// It runs on, and its answer goes out. It sees the loss by the [`Held`](dlock::Held) in the request's
    /// extensions, and the resource it writes to sees it by the fencing token.
    RunOn,
}

/// A lock was lost before the work under it was done: a response's body that is sent
/// [under the lock](crate::LockLayer::until_body) and is not complete, or work that [keeps](super::KeptLocks) it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockLost {
    /// The lock.
    pub key: LockKey,
    /// What ended it.
    pub loss: Loss,
}

impl LockLost {
    /// Waits until one of these is lost: which, and why.
    pub(crate) async fn of(held: Held) -> LockLost {
        let loss = held.lost().await;
        match held.check() {
            Err(Error::Lost { key, loss, .. }) => LockLost { key, loss },
            _ => LockLost {
                key: held.key().clone(),
                loss,
            },
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
