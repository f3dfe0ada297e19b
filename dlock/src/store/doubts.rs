//! How a store reports that grants must be confirmed.

use tokio::sync::broadcast;

use super::Lane;
use crate::base::waking::waking;

/// How many doubts are kept; more at once become one doubt about all lanes.
const KEPT: usize = 16;

/// The grants that must be confirmed.
///
/// ```
/// use dlock::store::{Doubt, Lane};
///
/// fn is_meant(doubt: Doubt, lane: Lane) -> bool {
///     match doubt {
///         Doubt::Lane(of) => of == lane,
///         Doubt::All => true,
///     }
/// }
/// # assert!(is_meant(Doubt::All, Lane(1)) && !is_meant(Doubt::Lane(Lane(2)), Lane(1)));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doubt {
    /// The grants of one lane.
    Lane(Lane),
    /// The grants of all lanes.
    All,
}

/// Tells clients about lanes whose grants became suspect, see [`Store::doubts`](super::Store::doubts).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use dlock::store::{Doubt, DoubtSender, Lane};
///
/// let sender = DoubtSender::new(); // the store keeps it
/// let mut doubts = sender.subscribe(); // what `Store::doubts` returns
/// sender.tell(Lane(3)); // its third server came back after a broken connection
/// assert_eq!(doubts.next().await, Doubt::Lane(Lane(3)));
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct DoubtSender(broadcast::Sender<Lane>);

impl DoubtSender {
    /// Creates a sender without listeners.
    #[must_use]
    pub fn new() -> DoubtSender {
        DoubtSender(broadcast::channel(KEPT).0)
    }

    /// Reports that grants of this lane became suspect.
    pub fn tell(&self, lane: Lane) {
        // Without an open client there are no listeners.
        waking(|| drop(self.0.send(lane)));
    }

    /// Returns a receiver of doubts from now on.
    #[must_use]
    pub fn subscribe(&self) -> Doubts {
        Doubts(Some(self.0.subscribe()))
    }
}

impl Default for DoubtSender {
    fn default() -> DoubtSender {
        DoubtSender::new()
    }
}

/// The doubts of a store.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use dlock::store::{Doubt, DoubtSender, Lane};
///
/// let sender = DoubtSender::new();
/// let mut doubts = sender.subscribe();
/// sender.tell(Lane(1));
/// assert_eq!(doubts.next().await, Doubt::Lane(Lane(1)));
/// # }
/// ```
#[derive(Debug)]
pub struct Doubts(Option<broadcast::Receiver<Lane>>);

impl Doubts {
    /// Returns doubts of a store that never has any.
    #[must_use]
    pub fn never() -> Doubts {
        Doubts(None)
    }

    /// Waits for the next doubt; never completes once the store has ended.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: the next call returns doubts that came in between.
    pub async fn next(&mut self) -> Doubt {
        match self.next_or_end().await {
            Some(doubt) => doubt,
            None => std::future::pending().await,
        }
    }

    /// Waits for the next doubt; `None` once the store has ended.
    pub(crate) async fn next_or_end(&mut self) -> Option<Doubt> {
        match self.0.as_mut()?.recv().await {
            Ok(lane) => Some(Doubt::Lane(lane)),
            Err(broadcast::error::RecvError::Lagged(_)) => Some(Doubt::All),
            Err(broadcast::error::RecvError::Closed) => None,
        }
    }
}
