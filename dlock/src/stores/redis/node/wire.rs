//! A connection without a task of its own: it moves when its user is polled.
//!
//! The user's task sends into the connection and hears from it, so both would wake the task that is running
//! already. Each such wake-up costs another poll, on another thread as a rule, and a call has two of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;
use redis::aio::MultiplexedConnection;

use crate::stores::redis::connect::Link;

pub(super) struct Wire {
    link: Link,
    bell: Arc<Bell>,
    waker: Waker,
}

/// Wakes the user, unless it is about to look anyway.
#[derive(Default)]
struct Bell {
    user: AtomicWaker,
    muffled: AtomicBool,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.muffled.load(Ordering::SeqCst) {
            self.user.wake();
        }
    }
}

impl Wire {
    pub(super) fn new(link: Link) -> Wire {
        let bell: Arc<Bell> = Arc::default();
        Wire {
            link,
            waker: bell.clone().into(),
            bell,
        }
    }

    pub(super) fn connection(&self) -> &MultiplexedConnection {
        &self.link.connection
    }

    /// Moves what is to be moved, and has `look` look whether answers came. `None` when the connection is gone
    /// and no answer is left. Once it has returned something, it has to be called again before the task sleeps.
    pub(super) fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        mut look: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<Option<T>> {
        self.bell.user.register(cx.waker());
        // New calls reach the driver by being looked at. It need not say so: it is polled right after.
        let nobody = &mut Context::from_waker(Waker::noop());
        self.bell.muffled.store(true, Ordering::SeqCst);
        let found = look(nobody);
        self.bell.muffled.store(false, Ordering::SeqCst);
        if let Poll::Ready(found) = found {
            return Poll::Ready(Some(found));
        }
        let over = self
            .link
            .driver
            .as_mut()
            .poll(&mut Context::from_waker(&self.waker))
            .is_ready();
        match look(nobody) {
            // Whether it is over is seen again at the next look.
            Poll::Ready(found) => Poll::Ready(Some(found)),
            Poll::Pending if over => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    }
}
