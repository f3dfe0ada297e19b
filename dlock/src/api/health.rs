//! A client at the end of its process, and for those who watch over it: draining, and how it is.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::base::clock;
use crate::base::moment::Moment;
use crate::{HoldState, LockClient};

impl LockClient {
    /// Begins nothing new from now on, so that the process can be stopped without making other clients wait.
    ///
    /// - An outermost acquire is refused with [`Error::Draining`](crate::Error::Draining), also one that waits already.
    /// - A nested one passes: an acquire inside the frame of a hold of this client, so that work under way comes to its
    ///   end.
    /// - Holds go on, are renewed, and end when they are released.
    /// - A released lock goes back to the store at once, and is not handed off in this process: the next waiter is in
    ///   another one.
    ///
    /// Nothing is sent. A leader leads on until [`shutdown`](Self::shutdown), which comes next, with the time that the work
    /// under way may take. All clones of the client drain, and none ever stops to.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// use std::time::Duration;
    ///
    /// let client = dlock::LockClient::memory();
    /// // On SIGTERM, once the process gets no new requests:
    /// client.drain();
    /// let refused = client.lock("report").acquire().await.unwrap_err();
    /// assert!(matches!(refused, dlock::Error::Draining));
    /// client.shutdown(Duration::from_secs(20)).await;
    /// # Ok(()) }
    /// ```
    pub fn drain(&self) {
        self.shared().draining.cancel();
    }

    /// Waits until this client holds nothing. Mostly after [`drain`](Self::drain), and with a limit.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn drained(&self) {
        let shared = self.shared();
        shared.watchdog.empty().await;
    }

    /// How this client is, from its own memory: nothing is sent. For pages that tell whether a process is alive.
    ///
    /// Judge liveness by it if you like, but never readiness: a process that is not ready while it waits for a lock, or
    /// while the store is away, gets no requests, and a rollout that waits for it never ends.
    ///
    /// It looks at every hold: asked every few seconds it costs nothing that can be seen, also with 100,000 of them.
    #[must_use]
    pub fn health(&self) -> Health {
        let shared = self.shared();
        let now = Moment::of(clock::now());
        let (mut suspect, mut least) = (0, None::<Duration>);
        for grant in shared.watchdog.grants(usize::MAX) {
            let (state, deadline) = grant.peek_at(now);
            let left = match state {
                HoldState::Held => deadline.since(now),
                HoldState::Suspect => {
                    suspect += 1;
                    deadline.since(now)
                }
                HoldState::Lost(_) => Duration::ZERO,
            };
            least = Some(least.map_or(left, |least| least.min(left)));
        }
        Health {
            is_draining: shared.draining.is_cancelled(),
            last_reply: shared.calls.since_reply(),
            held: self.held(),
            suspect,
            least_lease_left: least,
            reconnects: shared.reconnects.load(Ordering::Relaxed),
        }
    }
}

/// How a client is, see [`LockClient::health`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// let guard = client.lock("report").acquire().await?;
///
/// let health = client.health();
/// assert_eq!((health.held, health.suspect, health.reconnects), (1, 0, 0));
/// println!("the holder with the shortest lease is safe for {:?}", health.least_lease_left);
/// # guard.release().await
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    /// Whether it begins nothing new: it drains, or was shut down.
    pub is_draining: bool,
    /// How long ago the store last replied, also with a refusal; `None` before the first reply. A client that holds and
    /// wants nothing asks nothing.
    pub last_reply: Option<Duration>,
    /// How many locks it holds.
    pub held: usize,
    /// How many of these are suspect, see [`HoldState::Suspect`].
    pub suspect: usize,
    /// The least time that one of them is certain to hold, unless it is renewed; `None` without any. A renewed lease is
    /// renewed when two thirds of it are left, so a third of it is a near miss.
    pub least_lease_left: Option<Duration>,
    /// How many times connections to the store broke and came back, or another server took over.
    pub reconnects: u64,
}
