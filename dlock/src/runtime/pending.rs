//! The operations in flight whose callers may be gone: a shutdown waits for them.

#[cfg(feature = "once")]
use tokio::{runtime, task::JoinHandle};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::base::per_thread::PerThread;

#[derive(Debug, Default)]
pub(crate) struct Pending(PerThread<TaskTracker>);

impl Pending {
    /// Counts an operation for as long as the token is there.
    pub(crate) fn token(&self) -> TaskTrackerToken {
        self.0.here().token()
    }

    #[cfg(feature = "once")]
    pub(crate) fn spawn_on<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
        runtime: &runtime::Handle,
    ) -> JoinHandle<T> {
        self.0.here().spawn_on(work, runtime)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(TaskTracker::len).sum()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(TaskTracker::is_empty)
    }

    /// Lets [`wait`](Self::wait) complete. Operations may begin all the same.
    pub(crate) fn close(&self) {
        for tracker in self.0.iter() {
            tracker.close();
        }
    }

    /// Waits until none of the operations that are in flight now is. Others may have begun since.
    pub(crate) async fn wait(&self) {
        for tracker in self.0.iter() {
            tracker.wait().await;
        }
    }
}
