//! Draining a client at the end of its process, and its health.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::base::clock;
use crate::base::moment::Moment;
use crate::{HoldState, LockClient};

impl LockClient {
    /// Starts nothing new from now on, so that the process can be stopped without making other clients wait.
    ///
    /// - An outermost acquire is refused with [`Error::Draining`](crate::Error::Draining), also one that already waits.
    /// - A nested acquire passes (one inside the frame of a hold of this client), so that work in progress can finish. Work
    ///   under a claim of `once` is in no such frame: its acquires are refused, so drain once
    ///   [no claim](crate::Health::claims) is left if that work acquires locks.
    /// - Holds go on, are renewed, and end when they are released.
    /// - A released lock goes back to the store at once, and is not handed off in this process: the next waiter is in
    ///   another process.
    ///
    /// Nothing is sent. A leader keeps leading until [`shutdown`](Self::shutdown), which comes next, with the time that
    /// the work in progress may take; a candidate is refused. All clones of the client drain. Draining cannot be undone.
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
        self.shared().drain();
    }

    /// Waits until this client holds nothing, and no work runs under a claim of `once`. Usually called after
    /// [`drain`](Self::drain), with a timeout: inside a hold or such work it waits for ever.
    ///
    /// It does not wait for requests that are under way: an acquire may still be granted, and a release or the result of
    /// finished work may not have arrived. [`shutdown`](Self::shutdown) deals with all of them. Neither knows work on
    /// [records](Self::records) without a client, nor the handlers of an idempotency layer.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn drained(&self) {
        self.shared().idle().await;
    }

    /// Returns the health of this client from its own memory: nothing is sent. For endpoints that report liveness.
    ///
    /// Use it for liveness if you like, but never for readiness: a process that is not ready while it waits for a lock,
    /// or while the store is unavailable, gets no requests, and a rollout that waits for it never ends.
    ///
    /// It visits every hold: called every few seconds its cost is negligible, even with 100,000 holds.
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
            is_draining: shared.draining.is_given(),
            last_reply: shared.calls.since_reply(),
            held: self.held(),
            claims: shared.claims.len(),
            suspect,
            least_lease_left: least,
            reconnects: shared.reconnects.load(Ordering::Relaxed),
        }
    }
}

/// The health of a client, see [`LockClient::health`].
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
    /// Whether it starts nothing new: it drains, or was shut down.
    pub is_draining: bool,
    /// Time since the store last replied to this client, whatever was asked, also with a refusal; `None` before the first
    /// reply. An idle client sends nothing, so the time grows.
    pub last_reply: Option<Duration>,
    /// How many locks it holds. Work under claims is not among them.
    pub held: usize,
    /// How many pieces of work run under a claim of `once` now.
    pub claims: usize,
    /// How many of the locks are suspect, see [`HoldState::Suspect`].
    pub suspect: usize,
    /// The shortest time for which any of them is still certain to be held, unless it is renewed; `None` without holds.
    /// A renewed lease is renewed when two thirds of it are left, so less than a third is a near miss, unless the hold ends with
    /// its [`max_hold`](crate::Lock::max_hold).
    pub least_lease_left: Option<Duration>,
    /// How often connections to the store broke and were restored, or another server took over.
    pub reconnects: u64,
}
