//! The kinds of rejections.

use crate::problem::Problem;

/// What kind of trouble a [`Rejection`](crate::Rejection) tells.
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
    /// Somebody else holds the lock.
    Busy,
    /// As many requests wait for the lock as `max_waiters` allows.
    TooManyWaiters,
    /// The store could not be asked, or the client is shutting down.
    Unavailable,
    /// The lock was lost while the handler ran.
    Lost,
    /// The request gives no valid key.
    InvalidKey,
    /// The body is larger than what is read before the handler.
    ContentTooLarge,
    /// The client took too long to send the body.
    BodyTimeout,
    /// The layer is not set up properly.
    Internal,
    /// A question of idempotency keys: which one, this says.
    Idempotency(Problem),
    /// What a key closure said by [`Rejection::new`](crate::Rejection::new).
    Other,
}
