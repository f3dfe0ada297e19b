//! The failures that are worth another try.

use std::fmt;
use std::marker::PhantomData;

/// Says which failures of a client are worth another try.
///
/// ```
/// use dlock_tower::retry::{AnyError, RetryError};
///
/// assert!(AnyError.is_worth_it(&std::io::Error::other("connection reset")));
/// ```
pub trait RetryError<E>: Clone + Send + Sync + 'static {
    /// Whether this is one of them.
    fn is_worth_it(&self, error: &E) -> bool;
}

/// Every failure is worth another try: under the same key that does no harm.
///
/// ```
/// use dlock_tower::retry::{AnyError, RetryLayer};
///
/// let layer: RetryLayer<AnyError> = RetryLayer::new(); // the default
/// # let _ = layer;
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct AnyError;

impl<E> RetryError<E> for AnyError {
    fn is_worth_it(&self, _: &E) -> bool {
        true
    }
}

/// The failures that a closure says are worth another try; see [`RetryLayer::retry_error`](super::RetryLayer::retry_error).
///
/// ```
/// use dlock_tower::retry::RetryLayer;
/// use std::io::{Error, ErrorKind};
///
/// let layer = RetryLayer::new().retry_error(|error: &Error| error.kind() != ErrorKind::InvalidInput);
/// # let _ = layer;
/// ```
pub struct SomeErrors<E, F>(F, PhantomData<fn(&E)>);

impl<E, F> SomeErrors<E, F> {
    pub(super) fn new(is_worth_it: F) -> SomeErrors<E, F> {
        SomeErrors(is_worth_it, PhantomData)
    }
}

impl<E, F: Clone> Clone for SomeErrors<E, F> {
    fn clone(&self) -> Self {
        SomeErrors(self.0.clone(), PhantomData)
    }
}

impl<E, F> fmt::Debug for SomeErrors<E, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SomeErrors").finish_non_exhaustive()
    }
}

impl<E, F> RetryError<E> for SomeErrors<E, F>
where
    E: 'static,
    F: Fn(&E) -> bool + Clone + Send + Sync + 'static,
{
    fn is_worth_it(&self, error: &E) -> bool {
        (self.0)(error)
    }
}
