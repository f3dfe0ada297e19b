//! How a store reports that grants must be confirmed.

use tokio::sync::broadcast;

use super::Lane;

/// Many doubts at once are one about all lanes.
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
    /// Those of one lane.
    Lane(Lane),
    /// Those of all lanes.
    All,
}

/// What a store tells its clients of lanes whose grants became suspect, see [`Store::doubts`](super::Store::doubts).
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
    /// A sender without listeners.
    #[must_use]
    pub fn new() -> DoubtSender {
        DoubtSender(broadcast::channel(KEPT).0)
    }

    /// Grants of this lane became suspect.
    pub fn tell(&self, lane: Lane) {
        // Without an open client there are no listeners.
        let _ = self.0.send(lane);
    }

    /// Receives doubts from now on.
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
    /// Doubts of a store that never has any.
    #[must_use]
    pub fn never() -> Doubts {
        Doubts(None)
    }

    /// Waits for the next doubt; for ever when the store has ended.
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

    /// The same, until the store has ended.
    pub(crate) async fn next_or_end(&mut self) -> Option<Doubt> {
        match self.0.as_mut()?.recv().await {
            Ok(lane) => Some(Doubt::Lane(lane)),
            Err(broadcast::error::RecvError::Lagged(_)) => Some(Doubt::All),
            Err(broadcast::error::RecvError::Closed) => None,
        }
    }
}
