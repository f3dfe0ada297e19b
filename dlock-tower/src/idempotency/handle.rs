//! The end of a layer.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::shared::Shared;
use super::stats::IdempotencyStats;

/// The work of a layer that is left when its server has ended: handlers whose clients went away, and results that the
/// store has not accepted yet. See [`IdempotencyLayer::handle`](super::IdempotencyLayer::handle).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock_tower::IdempotencyLayer;
/// use dlock_tower::idempotency::caller;
/// use std::time::Duration;
///
/// let client = dlock::LockClient::memory();
/// let layer = IdempotencyLayer::new(client.records()?, caller::public());
/// let handle = layer.handle();
/// // ... serve, until the server has ended ...
/// handle.shutdown(Duration::from_secs(5)).await;
/// client.shutdown(Duration::from_secs(5)).await;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct IdempotencyHandle {
    shared: Arc<Shared>,
}

impl IdempotencyHandle {
    pub(super) fn new(shared: Arc<Shared>) -> IdempotencyHandle {
        IdempotencyHandle { shared }
    }

    /// Waits until all of that is done, at most this long, and returns how many pieces of work are left; those continue
    /// for as long as the runtime does. Call it after the server has ended and before the lock client is shut down: it
    /// refuses no request, and neither does the layer after the shutdown of the client that gave it its records.
    /// Bodies of responses are [read on](super::IdempotencyLayer::read_on) for at most half of the time, the shortest if
    /// several handles shut the layer down at once.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn shutdown(&self, deadline: Duration) -> usize {
        let tasks = &self.shared.tasks;
        let closes = Instant::now().checked_add(deadline / 2);
        let _under_way = Shutdown::begin(&self.shared, closes);
        let _ = tokio::time::timeout(deadline, tasks.wait()).await;
        tasks.len()
    }

    /// Returns how many pieces of work continue without a waiting client.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.shared.tasks.len()
    }

    /// Returns how many claims are renewed at present.
    #[must_use]
    pub fn claims(&self) -> usize {
        self.shared.renewals.len()
    }

    /// Returns the counters of this layer.
    #[must_use]
    pub fn stats(&self) -> IdempotencyStats {
        self.shared.counters.snapshot()
    }
}

/// A shutdown under way. The end of the last one lets bodies be read on again.
struct Shutdown<'a>(&'a Shared);

impl Shutdown<'_> {
    fn begin(shared: &Shared, closes: Option<Instant>) -> Shutdown<'_> {
        shared.closing.send_modify(|closing| {
            closing.shutdowns += 1;
            closing.until = closing.until.into_iter().chain(closes).min();
        });
        shared.tasks.close();
        Shutdown(shared)
    }
}

impl Drop for Shutdown<'_> {
    fn drop(&mut self) {
        self.0.closing.send_modify(|closing| {
            closing.shutdowns -= 1;
            if closing.shutdowns == 0 {
                closing.until = None;
                // Here, so that it comes before the next shutdown closes them.
                self.0.tasks.reopen();
            }
        });
    }
}

impl fmt::Debug for IdempotencyHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyHandle")
            .field("tasks", &self.tasks())
            .field("claims", &self.claims())
            .finish_non_exhaustive()
    }
}
