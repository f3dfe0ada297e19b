//! Wakes tasks. A waker may be of any executor: if it panics, the caller goes on, and wakes those behind its other signals.
//! Of several tasks that wait for one signal, tokio wakes none behind the one whose waker panics.

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
