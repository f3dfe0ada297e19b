//! What a shutdown waits for: the operations in flight whose callers may be gone, and the work under claims.

use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(feature = "once")]
use tokio::{runtime, task::JoinHandle};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::base::per_thread::PerThread;
use crate::base::waking::woken_by_others;

#[derive(Debug, Default)]
pub(crate) struct Pending(PerThread<ThreadTracker>);

#[derive(Debug, Default)]
struct ThreadTracker {
    tracker: TaskTracker,
    /// How many operations have begun here.
    begun: AtomicU64,
}

impl ThreadTracker {
    /// Counts an operation. First in the tracker: a shutdown that sees that it has begun sees it in flight. Ordered with the signal
    /// that ends the client, too: a caller that counts an operation and then looks at the signal either finds it given, or its
    /// operation is seen by the shutdown.
    fn begin(&self) -> TaskTrackerToken {
        let token = self.tracker.token();
        self.begun.fetch_add(1, Ordering::SeqCst);
        token
    }
}

impl Pending {
    /// Creates one whose [`wait`](Self::wait) completes from the beginning.
    pub(crate) fn closed() -> Pending {
        let pending = Pending::default();
        pending.close();
        pending
    }

    /// Counts an operation for as long as the token is there.
    pub(crate) fn token(&self) -> TaskTrackerToken {
        self.0.here().begin()
    }

    #[cfg(feature = "once")]
    pub(crate) fn spawn_on<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
        runtime: &runtime::Handle,
    ) -> JoinHandle<T> {
        let of_thread = self.0.here();
        let _counted = of_thread.begin();
        of_thread.tracker.spawn_on(work, runtime)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(|of_thread| of_thread.tracker.len()).sum()
    }

    /// Whether none is in flight. An operation begins what follows it before it ends itself, perhaps in a tracker that was looked at
    /// before: then more have begun.
    pub(crate) fn is_empty(&self) -> bool {
        let begun = || -> u64 {
            let each = self
                .0
                .iter()
                .map(|of_thread| of_thread.begun.load(Ordering::SeqCst));
            each.sum()
        };
        let before = begun();
        self.0.iter().all(|of_thread| of_thread.tracker.is_empty()) && begun() == before
    }

    /// Lets [`wait`](Self::wait) complete. Operations may begin all the same.
    pub(crate) fn close(&self) {
        for ThreadTracker { tracker, .. } in self.0.iter() {
            tracker.close();
        }
    }

    /// Waits until none of the operations that are in flight now is. Others may have begun since.
    pub(crate) async fn wait(&self) {
        for ThreadTracker { tracker, .. } in self.0.iter() {
            // Ended by a release or an acquire, at whose cost a waker is not caught there.
            woken_by_others(tracker.wait()).await;
        }
    }
}
