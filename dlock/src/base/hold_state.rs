//! What a holder is told when it asks.

use crate::Loss;

/// Whether a lock is still held, as the clock says at the moment of asking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HoldState {
    /// Held, and confirmed by the store when it was due.
    Held,
    /// The lease still runs, but the store has not confirmed it when it should have, or came back after a
    /// broken connection and was not asked yet. Nobody else has the lock unless the store lost its data.
    Suspect,
    /// Over, for good. Somebody else may have the lock.
    Lost(Loss),
}
