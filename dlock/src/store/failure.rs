//! Failed operations of a store.

use std::sync::Arc;
use std::time::Duration;

use crate::base::cause::Cause;

/// Whether a failed operation was carried out.
///
/// ```
/// use dlock::store::{Outcome, StoreError};
///
/// let error = StoreError::unknown("the connection broke before the reply");
/// assert_eq!(error.outcome, Outcome::Unknown); // so the client undoes the step
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It was not, and will not be.
    NotDone,
    /// It may or may not have been carried out.
    Unknown,
}

/// Why an operation failed.
///
/// ```
/// use dlock::store::{Reason, StoreError};
///
/// let error = StoreError::not_done(Reason::Refused, "the user may not write");
/// assert!(matches!(error.reason, Reason::Refused));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The store could not be reached or did not reply.
    Unreachable,
    /// The store refused the request.
    Refused,
    /// The store refused the request for a transient reason: no memory left, it cannot save, it lacks replicas, or it
    /// is read-only. An acquire ends with this; a release is repeated until the store accepts it.
    RefusedForNow,
    /// The key holds other data, named here.
    KeyTaken(String),
    /// The store, or this version of the library, does not support it.
    Unsupported,
    /// The server has done it, but too few of its replicas acknowledged it in time.
    TooFewReplicas {
        /// How many did.
        acknowledged: u32,
        /// How many were required.
        wanted: u32,
        /// The time within which they had to acknowledge it.
        within: Duration,
    },
    /// The client's URL names another kind of store than the server at that address.
    WrongUrl,
    /// The store has ended.
    Closed,
}

/// A failed operation.
///
/// ```
/// use dlock::store::{Outcome, Reason, StoreError};
///
/// /// A connection that cannot be made has carried nothing out.
/// fn not_connected(error: std::io::Error) -> StoreError {
///     StoreError::not_done(Reason::Unreachable, "no connection to the store").caused_by(error)
/// }
/// # let error = not_connected(std::io::ErrorKind::ConnectionRefused.into());
/// # assert!(error.outcome == Outcome::NotDone && error.source.is_some());
/// ```
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
#[non_exhaustive]
pub struct StoreError {
    /// Whether it was carried out.
    pub outcome: Outcome,
    /// Why it failed.
    pub reason: Reason,
    /// The failure in words, without passwords.
    pub message: String,
    /// The cause.
    #[source]
    pub source: Option<Cause>,
}

impl StoreError {
    /// Creates a failure after which the operation certainly was not and will not be carried out.
    #[must_use]
    pub fn not_done(reason: Reason, message: impl Into<String>) -> StoreError {
        StoreError {
            outcome: Outcome::NotDone,
            reason,
            message: message.into(),
            source: None,
        }
    }

    /// Creates a failure after which the operation may or may not have been carried out.
    #[must_use]
    pub fn unknown(message: impl Into<String>) -> StoreError {
        StoreError {
            outcome: Outcome::Unknown,
            reason: Reason::Unreachable,
            message: message.into(),
            source: None,
        }
    }

    /// Creates the failure of a URL with this mistake.
    #[doc(hidden)]
    #[must_use]
    pub fn wrong_url(mistake: impl Into<String>) -> StoreError {
        StoreError::not_done(Reason::WrongUrl, mistake)
    }

    /// Creates the failure of a URL with an option that the builder of its store refuses, with the reason.
    #[doc(hidden)]
    #[must_use]
    pub fn wrong_option((option, reason): (&'static str, String)) -> StoreError {
        StoreError::wrong_url(format!("its option {option} is invalid: {reason}"))
    }

    /// Sets the cause.
    #[must_use]
    pub fn caused_by(mut self, source: impl std::error::Error + Send + Sync + 'static) -> StoreError {
        self.source = Some(Arc::new(source));
        self
    }

    /// Whether the same operation may well succeed a moment later.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self.reason, Reason::Unreachable)
    }

    /// Whether the store refused the request, for now or permanently.
    pub(crate) fn is_refused(&self) -> bool {
        matches!(self.reason, Reason::Refused | Reason::RefusedForNow)
    }

    /// Whether an operation that releases something is repeated: no other client can do it, so it is repeated through
    /// every transient failure.
    pub(crate) fn is_outlasted(&self) -> bool {
        self.is_passing() || self.reason == Reason::RefusedForNow
    }
}
