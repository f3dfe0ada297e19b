//! The kinds of rejections.

use crate::problem::Problem;

/// The kind of a [`Rejection`](crate::Rejection).
///
/// ```
/// use dlock_tower::{Reason, Rejection};
///
/// let rejection = Rejection::invalid_key("the order has no number");
/// assert_eq!(rejection.reason(), Reason::InvalidKey);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// Another client holds the lock.
    Busy,
    /// As many requests wait for the lock as `max_waiters` allows.
    TooManyWaiters,
    /// The store could not be reached, or the client is shutting down.
    Unavailable,
    /// The lock was lost while the handler ran, or before it began: see [`has_started`](crate::Rejection::has_started).
    Lost,
    /// The request gives no valid key.
    InvalidKey,
    /// The body is larger than what is read before the handler.
    ContentTooLarge,
    /// The client took too long to send the body.
    BodyTimeout,
    /// The body ended early, or could not be read.
    BodyIncomplete,
    /// The layer is not set up properly.
    Internal,
    /// A problem of idempotency keys; the value says which.
    Idempotency(Problem),
    /// A refusal of a key closure, created by [`Rejection::new`](crate::Rejection::new).
    Other,
}
