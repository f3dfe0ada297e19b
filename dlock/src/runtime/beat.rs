//! Wakes the task that writes down what a client does: when it begins to hold or to wait for something.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// Costs a look at a flag while the task is awake.
#[derive(Debug, Default)]
pub(crate) struct Beat {
    awake: AtomicBool,
    roused: Notify,
}

impl Beat {
    /// Something is held or waited for. Called after that was entered in a table under a lock.
    pub(crate) fn rouse(&self) {
        if !self.awake.load(Ordering::Relaxed) && !self.awake.swap(true, Ordering::Relaxed) {
            self.roused.notify_one();
        }
    }

    /// The task sleeps from now on, unless it finds something in the tables, which it looks at after this.
    pub(crate) fn sleeps(&self) {
        self.awake.store(false, Ordering::Relaxed);
    }

    pub(crate) async fn roused(&self) {
        self.roused.notified().await;
    }
}
