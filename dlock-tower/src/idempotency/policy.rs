//! Decides what happens to the key when the handler is done: whether its outcome is a result.

use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use http::header::RETRY_AFTER;
use http::{HeaderMap, StatusCode};

/// How a request with a claimed key ended.
///
/// ```
/// use dlock_tower::idempotency::{Class, Ending};
///
/// // A panic leaves open how far the work got.
/// assert_eq!(Ending::Panic.class(), Class::Ambiguous);
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum Ending<'a> {
    /// The handler returned a response.
    #[non_exhaustive]
    Response {
        /// Its status.
        status: StatusCode,
        /// Its headers.
        headers: &'a HeaderMap,
        /// Whether it carries [`NotStarted`](crate::NotStarted) for this very request.
        not_started: bool,
    },
    /// A gRPC call ended with this status; 2 (unknown) if it sent none.
    #[non_exhaustive]
    Grpc {
        /// The code.
        code: u16,
        /// Whether the response carries [`NotStarted`](crate::NotStarted) for this very call.
        not_started: bool,
    },
    /// The inner service failed with its own error instead of a response.
    ServiceError,
    /// The handler panicked.
    Panic,
    /// The handler was dropped unfinished, because the client went away (only with
    /// [`cancel_on_disconnect`](super::IdempotencyLayer::cancel_on_disconnect)), or because the lock of an outer layer
    /// was lost.
    Cancelled,
}

/// The class of an [`Ending`] by the usual rules.
///
/// ```
/// use dlock_tower::idempotency::{Class, Ending};
///
/// assert_eq!(Ending::ServiceError.class(), Class::Ambiguous);
/// assert_eq!(Ending::Cancelled.class(), Class::Ambiguous);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// The work has not begun: [`NotStarted`](crate::NotStarted) for this very request. No status says that: a handler
    /// may refuse after its effect, and an inner timeout answers 408 after the handler began.
    NothingDone,
    /// The result: 2xx, 3xx and the other 4xx. In gRPC `OK` and the codes that concern the request.
    Result,
    /// The progress of the work is unknown, or the answer concerns the moment only: every 5xx, 408, 425, 429, a 4xx
    /// with `Retry-After`, a failure of the service, a panic, a dropped handler. In gRPC `CANCELLED`, `UNKNOWN`,
    /// `DEADLINE_EXCEEDED`, `RESOURCE_EXHAUSTED`, `ABORTED`, `UNIMPLEMENTED`, `INTERNAL`, `UNAVAILABLE`, `DATA_LOSS`.
    Ambiguous,
}

/// What happens to the key.
///
/// ```
/// use dlock_tower::idempotency::{Ending, KeepAmbiguous, Policy, RetryAmbiguous, Verdict};
///
/// assert_eq!(KeepAmbiguous.judge(&Ending::Panic), Verdict::Keep);
/// assert_eq!(RetryAmbiguous.judge(&Ending::Panic), Verdict::Release);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The outcome of the request is kept, and a retry gets it.
    Keep,
    /// The outcome is kept for this long from its end on, whatever the layer's
    /// [`retention`](super::IdempotencyLayer::retention) is: a refusal for a minute, a payment for a year. At least as
    /// long as the lease, at most a year. An answer that the service has put into its own transaction is kept as the
    /// layer says.
    KeepFor(Duration),
    /// A retry runs. After an [ambiguous](Class::Ambiguous) end the record stays: the retry is the next attempt, and a
    /// different request under the same key is refused. Otherwise the key is as if it had never been used.
    Release,
}

/// What to do with the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RecordAction {
    Keep,
    /// Left for the next attempt.
    Abandon,
    Forget,
}

impl Ending<'_> {
    /// Returns the class of this ending by the usual rules.
    #[must_use]
    pub fn class(&self) -> Class {
        match self {
            Ending::Response {
                not_started: true, ..
            }
            | Ending::Grpc {
                not_started: true, ..
            } => Class::NothingDone,
            Ending::Response { status, headers, .. } => match status.as_u16() {
                408 | 425 | 429 | 500.. => Class::Ambiguous,
                400.. if headers.contains_key(RETRY_AFTER) => Class::Ambiguous,
                _ => Class::Result,
            },
            Ending::Grpc { code, .. } => match code {
                1 | 2 | 4 | 8 | 10 | 12..=15 => Class::Ambiguous,
                0..=16 => Class::Result,
                _ => Class::Ambiguous,
            },
            Ending::ServiceError | Ending::Panic | Ending::Cancelled => Class::Ambiguous,
        }
    }
}

/// Decides what happens to the key. A handler's own decision ([`Outcome`], or
/// [`Idempotency::keep`](super::Idempotency::keep) and [`forget`](super::Idempotency::forget)) overrides it.
///
/// ```
/// use dlock_tower::idempotency::{Class, Ending, Policy, Verdict};
///
/// /// A 404 may be one no more in a minute; all else as usual.
/// struct NotFoundIsTemporary;
///
/// impl Policy for NotFoundIsTemporary {
///     fn judge(&self, ending: &Ending<'_>) -> Verdict {
///         match (ending, ending.class()) {
///             (Ending::Response { status, .. }, _) if status.as_u16() == 404 => Verdict::Release,
///             (_, Class::NothingDone) => Verdict::Release,
///             _ => Verdict::Keep,
///         }
///     }
/// }
/// ```
pub trait Policy: Send + Sync + 'static {
    /// Decides the key of a request with this ending. If this panics, [`KeepAmbiguous`] decides.
    fn judge(&self, ending: &Ending<'_>) -> Verdict;
}

/// Keeps ambiguous endings, which a retry then gets. The default.
///
/// ```
/// use dlock_tower::idempotency::{Ending, KeepAmbiguous, Policy, Verdict};
///
/// // A retry is told that the work may have been done, and does not run.
/// assert_eq!(KeepAmbiguous.judge(&Ending::Panic), Verdict::Keep);
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct KeepAmbiguous;

impl Policy for KeepAmbiguous {
    fn judge(&self, ending: &Ending<'_>) -> Verdict {
        match ending.class() {
            Class::NothingDone => Verdict::Release,
            Class::Result | Class::Ambiguous => Verdict::Keep,
        }
    }
}

/// Releases ambiguous endings, so that a retry runs again, as the next attempt and only with the same request. For
/// handlers whose work does no harm when it is done twice, or that detect earlier work by the attempt and the fence.
///
/// ```
/// use dlock_tower::idempotency::{Ending, Policy, RetryAmbiguous, Verdict};
///
/// // A retry runs, as the next attempt.
/// assert_eq!(RetryAmbiguous.judge(&Ending::Panic), Verdict::Release);
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct RetryAmbiguous;

impl Policy for RetryAmbiguous {
    fn judge(&self, ending: &Ending<'_>) -> Verdict {
        match ending.class() {
            Class::Result => Verdict::Keep,
            Class::NothingDone | Class::Ambiguous => Verdict::Release,
        }
    }
}

/// A handler's decision about its own response, put into the response's extensions. It overrides the [`Policy`].
///
/// Unlike [`NotStarted`](crate::NotStarted) it does not know its request. A handler that passes on the answer of another
/// router or service in its process has to remove the other's `Outcome` from the extensions: it says nothing of what the
/// handler itself has done.
///
#[cfg_attr(feature = "axum", doc = "```")]
#[cfg_attr(not(feature = "axum"), doc = "```ignore")]
/// use axum::response::IntoResponse;
/// use dlock_tower::idempotency::Outcome;
/// use http::StatusCode;
///
/// async fn charge() -> impl IntoResponse {
///     // The bank did not reply whether the card is good: nothing was charged yet.
///     (StatusCode::BAD_GATEWAY, Outcome::Retry, "the bank does not answer")
/// }
/// # let _ = charge;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The response is final, even an error: it is kept, and a retry gets it.
    Final,
    /// A retry would do nothing twice: the key is released, as if it had never been used.
    Retry,
}

impl From<Outcome> for RecordAction {
    fn from(outcome: Outcome) -> RecordAction {
        match outcome {
            Outcome::Final => RecordAction::Keep,
            Outcome::Retry => RecordAction::Forget,
        }
    }
}

#[cfg(feature = "axum")]
impl axum::response::IntoResponseParts for Outcome {
    type Error = std::convert::Infallible;

    fn into_response_parts(
        self,
        mut parts: axum::response::ResponseParts,
    ) -> Result<axum::response::ResponseParts, Self::Error> {
        parts.extensions_mut().insert(self);
        Ok(parts)
    }
}

/// The decision of a handler while it ran.
#[derive(Debug, Default)]
pub(super) struct StatedOutcome(AtomicU8);

impl StatedOutcome {
    pub(super) fn say(&self, outcome: Outcome) {
        let code = match outcome {
            Outcome::Final => 1,
            Outcome::Retry => 2,
        };
        self.0.store(code, Ordering::Relaxed);
    }

    pub(super) fn said(&self) -> Option<Outcome> {
        match self.0.load(Ordering::Relaxed) {
            1 => Some(Outcome::Final),
            2 => Some(Outcome::Retry),
            _ => None,
        }
    }
}
