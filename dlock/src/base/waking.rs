//! Wakes tasks. A waker may be of any executor: if it panics, the caller goes on, and wakes those behind its other signals.
//! Of several tasks that wait for one signal, tokio wakes none behind the one whose waker panics.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};

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

/// Waits for what others end in the middle of their own work, without [`waking`]: if the waker of this caller panics, they go on.
pub(crate) async fn woken_by_others<T>(waits: impl Future<Output = T>) -> T {
    let mut waits = pin!(waits);
    poll_fn(|cx| {
        let waker = Arc::new(Caught(cx.waker().clone())).into();
        waits.as_mut().poll(&mut Context::from_waker(&waker))
    })
    .await
}

/// A waker whose panic ends here.
struct Caught(Waker);

impl Wake for Caught {
    fn wake(self: Arc<Self>) {
        waking(|| self.0.wake_by_ref());
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
