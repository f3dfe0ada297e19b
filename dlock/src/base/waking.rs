//! Wakes tasks. A waker may be of any executor: if it panics, the caller goes on, and wakes those behind its other signals.
//! Of several tasks that wait for one signal, tokio wakes none behind the one whose waker panics.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::base::observed::log;

/// Runs what wakes tasks: signals, notifications, replies, and the end of what a caller waits for. Not under a mutex that a task
/// may want: a waker may drop a future that asks the store for something.
pub(crate) fn waking(wake: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(wake)).is_err() {
        log!(error, "a waker panicked: its task may wait for ever");
    }
}

/// Cancels a token, which wakes the tasks that wait for it.
pub(crate) fn cancel(token: &CancellationToken) {
    waking(|| token.cancel());
}

/// Replies to a caller, if it is still there.
pub(crate) fn reply_to<T>(caller: oneshot::Sender<T>, reply: T) {
    waking(|| drop(caller.send(reply)));
}
