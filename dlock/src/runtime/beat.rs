//! Wakes the presence task when the client begins to hold or to wait for something.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// Costs one check of a flag while the task is awake.
#[derive(Debug, Default)]
pub(crate) struct Beat {
    awake: AtomicBool,
    roused: Notify,
}

impl Beat {
    /// Wakes the task. Called after the hold or wait was entered in a table, under a lock.
    pub(crate) fn rouse(&self) {
        if !self.awake.load(Ordering::Relaxed) && !self.awake.swap(true, Ordering::Relaxed) {
            self.roused.notify_one();
        }
    }

    /// Marks the task as asleep. The task checks the tables after this, and sleeps only if they are empty.
    pub(crate) fn sleeps(&self) {
        self.awake.store(false, Ordering::Relaxed);
    }

    pub(crate) async fn roused(&self) {
        self.roused.notified().await;
    }
}
