//! Wakes tasks. A waker may be of any executor: if it panics, the others are woken all the same, and the caller goes on.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tokio_util::sync::CancellationToken;

use crate::runtime::emit::Event;

/// Runs what wakes tasks.
pub(crate) fn waking(wake: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(wake)).is_err() {
        Event::WakerPanicked.emit();
    }
}

/// Cancels a token, which wakes the tasks that wait for it.
pub(crate) fn cancel(token: &CancellationToken) {
    waking(|| token.cancel());
}
