//! The nodes of semaphores and latches below that of their key, and the topics of their waiters.

use std::sync::Arc;

use dlock::store::GrantId;

/// The names of the nodes of a semaphore.
pub(crate) const QUEUE: &str = "locks";
pub(crate) const LEASES: &str = "leases";
/// Curator's `SharedCount`.
const TOTAL: &str = "permits";

/// The names of a latch, and of the parent of the steps that were carried out.
const LATCH: &str = "latch";
pub(crate) const DONE: &str = "done";

/// What comes before the name of a semaphore in the topic of its waiters.
pub(crate) const PERMITS: &str = "permits ";

/// The paths of the nodes of a counter.
#[derive(Debug)]
pub(crate) struct CounterPaths {
    pub(crate) leases: String,
    pub(crate) total: String,
    pub(crate) latch: String,
}

impl CounterPaths {
    /// Of the key whose node has this path.
    pub(crate) fn of(key: &str) -> CounterPaths {
        CounterPaths {
            leases: leases_of(key),
            total: total_of(key),
            latch: latch_of(key),
        }
    }

    pub(crate) fn lease(&self, name: &str) -> String {
        format!("{}/{name}", self.leases)
    }
}

/// The directory of the queue for the permits of a semaphore.
pub(crate) fn queue_of(semaphore: &str) -> Arc<str> {
    format!("{semaphore}/{QUEUE}").into()
}

/// The semaphore with this queue, if it is one.
pub(crate) fn semaphore_of(queue: &str) -> Option<&str> {
    queue.strip_suffix(QUEUE)?.strip_suffix('/')
}

pub(crate) fn leases_of(semaphore: &str) -> String {
    format!("{semaphore}/{LEASES}")
}

pub(crate) fn total_of(semaphore: &str) -> String {
    format!("{semaphore}/{TOTAL}")
}

pub(crate) fn latch_of(key: &str) -> String {
    format!("{key}/{LATCH}")
}

/// The node of a step that was carried out.
pub(crate) fn done_of(key: &str, id: GrantId) -> String {
    format!("{key}/{DONE}/{id}")
}

/// The topic on which the waiters for permits are notified.
pub(crate) fn permits_topic(semaphore: &str) -> String {
    format!("{PERMITS}{semaphore}")
}

/// The semaphore of a topic.
pub(crate) fn semaphore_with(topic: &str) -> Option<&str> {
    topic.strip_prefix(PERMITS)
}
