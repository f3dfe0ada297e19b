use std::fmt;

use dlock::{LockKey, Loss};

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
