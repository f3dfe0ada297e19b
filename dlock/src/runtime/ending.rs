//! Signals that end a client's calls.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};

use crate::base::waking::cancel;

/// A signal that is given once. Asking for it, which each acquire does several times, takes no mutex that all callers share.
#[derive(Debug, Default)]
pub(crate) struct Ending {
    is_given: AtomicBool,
    token: CancellationToken,
}

impl Ending {
    pub(crate) fn give(&self) {
        self.is_given.store(true, Ordering::SeqCst);
        cancel(&self.token);
    }

    pub(crate) fn is_given(&self) -> bool {
        self.is_given.load(Ordering::SeqCst)
    }

    /// Completes when it is given. Cancel safe.
    pub(crate) fn given(&self) -> WaitForCancellationFuture<'_> {
        self.token.cancelled()
    }
}
