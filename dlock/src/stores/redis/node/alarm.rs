//! The timer of the connection's task.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;
use tokio::time::Instant;

use crate::base::clock;

pub(super) type Timer = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A timer that is reset only to ring earlier: it may ring for nothing, which is cheaper than resetting it for each
/// call. It is not polled again before it has rung, since each poll takes locks.
#[derive(Default)]
pub(super) struct Alarm {
    timer: Option<(Instant, Timer)>,
    bell: Arc<Bell>,
}

/// Wakes the task of the connection when its timer rings.
#[derive(Default)]
struct Bell {
    /// Whether the timer has to be polled.
    rings: AtomicBool,
    task: AtomicWaker,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rings.store(true, Ordering::Release);
        self.task.wake();
    }
}

impl Alarm {
    pub(super) fn set(&mut self, due: Option<Instant>) {
        let Some(due) = due else { return };
        if self.timer.as_ref().is_none_or(|(at, _)| due < *at) {
            self.timer = Some((due, Box::pin(clock::sleep_until(due))));
            self.bell.rings.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some((_, timer)) = &mut self.timer else {
            return Poll::Pending;
        };
        if !self.bell.rings.load(Ordering::Acquire) {
            return Poll::Pending;
        }
        self.bell.rings.store(false, Ordering::Relaxed);
        self.bell.task.register(cx.waker());
        let bell = Waker::from(self.bell.clone());
        let poll = timer.as_mut().poll(&mut Context::from_waker(&bell));
        if poll.is_ready() {
            self.timer = None;
        }
        poll
    }
}

pub(super) async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => clock::sleep_until(due).await,
        None => std::future::pending().await,
    }
}
