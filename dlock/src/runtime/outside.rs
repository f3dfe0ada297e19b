//! Calls from outside a tokio runtime: they use the timers of the client's runtime.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;
use tokio::runtime;

use crate::base::clock;
use crate::runtime::client::Handle;

pin_project! {
    /// A future that any executor may poll; created by [`Handle::with_timers`].
    pub(crate) struct WithTimers<F> {
        #[pin]
        future: F,
        handle: Arc<Handle>,
    }
}

impl Handle {
    /// Makes a future use the timers of the client's runtime when it is polled outside tokio.
    pub(crate) fn with_timers<F: Future>(self: &Arc<Self>, future: F) -> WithTimers<F> {
        WithTimers::new(self.clone(), future)
    }

    /// Polls a future, which may use the timers of the client's runtime outside tokio.
    pub(crate) fn poll_with_timers<T>(&self, poll: impl FnOnce() -> T) -> T {
        let _reading = clock::one_reading();
        let _entered = is_outside().then(|| self.shared().runtime.enter());
        poll()
    }
}

impl<F: Future> WithTimers<F> {
    pub(crate) fn new(handle: Arc<Handle>, future: F) -> WithTimers<F> {
        WithTimers { future, handle }
    }
}

impl<F: Future> Future for WithTimers<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        this.handle.poll_with_timers(|| this.future.poll(cx))
    }
}

#[cfg(feature = "once")]
pin_project! {
    /// A future that any executor may poll; created by [`with_timers_of`].
    pub(crate) struct WithTimersOf<F> {
        #[pin]
        future: F,
        runtime: runtime::Handle,
    }
}

/// Makes a future use the timers of this runtime when it is polled outside tokio.
#[cfg(feature = "once")]
pub(crate) fn with_timers_of<F: Future>(runtime: &runtime::Handle, future: F) -> WithTimersOf<F> {
    WithTimersOf {
        future,
        runtime: runtime.clone(),
    }
}

#[cfg(feature = "once")]
impl<F: Future> Future for WithTimersOf<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let _entered = is_outside().then(|| this.runtime.enter());
        this.future.poll(cx)
    }
}

/// Whether the calling code has no tokio runtime.
pub(crate) fn is_outside() -> bool {
    // The task check is cheaper, and nearly always positive.
    tokio::task::try_id().is_none() && runtime::Handle::try_current().is_err()
}
