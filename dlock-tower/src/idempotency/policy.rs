//! What becomes of the key when the handler is done: is what came of it a result?

use std::sync::atomic::{AtomicU8, Ordering};

use http::{Extensions, HeaderMap, StatusCode};

use crate::NotStarted;

/// How a request ended that had claimed its key.
#[derive(Debug)]
#[non_exhaustive]
pub enum Ending<'a> {
    /// The handler gave a response.
    #[non_exhaustive]
    Response {
        /// Its status.
        status: StatusCode,
        /// Its headers.
        headers: &'a HeaderMap,
        /// Its extensions, where [`NotStarted`] stands if no work was begun.
        extensions: &'a Extensions,
    },
    /// A gRPC call came to its end, and told this status; 2 (unknown) if it told none.
    #[non_exhaustive]
    Grpc {
        /// The code.
        code: u16,
        /// The extensions of the response.
        extensions: &'a Extensions,
    },
    /// The inner service failed with an error of its own instead of a response.
    ServiceError,
    /// The handler panicked.
    Panic,
    /// The handler was dropped unfinished, because the client went away (only with
    /// [`cancel_on_disconnect`](super::IdempotencyLayer::cancel_on_disconnect)), or because the lock of a
    /// layer further out was lost.
    Cancelled,
}

/// What an [`Ending`] is by the usual rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// No work was done: [`NotStarted`], or a status that refuses the request before its work: 401, 403,
    /// 408, 413, 425, 429; in gRPC `PERMISSION_DENIED`, `RESOURCE_EXHAUSTED`, `UNAUTHENTICATED`.
    NothingDone,
    /// It is a result: 2xx, 3xx and the other 4xx. In gRPC `OK` and the codes that tell of the request.
    Result,
    /// Nobody knows how far the work got: every 5xx, a failure of the service, a panic, a handler that was
    /// dropped. In gRPC `CANCELLED`, `UNKNOWN`, `DEADLINE_EXCEEDED`, `UNIMPLEMENTED`, `INTERNAL`,
    /// `UNAVAILABLE`, `DATA_LOSS`.
    Ambiguous,
}

/// What becomes of the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// What came of the request is kept, and a retry gets it.
    Keep,
    /// The key is released, and a retry runs.
    Release,
}

impl Ending<'_> {
    /// What this is by the usual rules.
    #[must_use]
    pub fn class(&self) -> Class {
        match self {
            Ending::Response { extensions, .. } | Ending::Grpc { extensions, .. }
                if extensions.get::<NotStarted>().is_some() =>
            {
                Class::NothingDone
            }
            Ending::Response { status, .. } => match status.as_u16() {
                401 | 403 | 408 | 413 | 425 | 429 => Class::NothingDone,
                500.. => Class::Ambiguous,
                _ => Class::Result,
            },
            Ending::Grpc { code, .. } => match code {
                7 | 8 | 16 => Class::NothingDone,
                1 | 2 | 4 | 12..=15 => Class::Ambiguous,
                0..=16 => Class::Result,
                _ => Class::Ambiguous,
            },
            Ending::ServiceError | Ending::Panic | Ending::Cancelled => Class::Ambiguous,
        }
    }
}

/// Decides what becomes of the key. A handler's own word ([`Outcome`], or
/// [`Idempotency::keep`](super::Idempotency::keep) and [`forget`](super::Idempotency::forget)) goes before it.
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
    /// What becomes of the key of a request that ended so.
    fn judge(&self, ending: &Ending<'_>) -> Verdict;
}

/// A request runs at most once: what is ambiguous is kept. The default.
#[derive(Debug, Clone, Copy, Default)]
pub struct AtMostOnce;

impl Policy for AtMostOnce {
    fn judge(&self, ending: &Ending<'_>) -> Verdict {
        match ending.class() {
            Class::NothingDone => Verdict::Release,
            Class::Result | Class::Ambiguous => Verdict::Keep,
        }
    }
}

/// What is ambiguous is released, so that a retry runs again. For handlers whose work does no harm when it
/// is done twice, or that see from the attempt and the fence what was done before.
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

/// A handler's word on its own response, put into the response's extensions. It goes before the
/// [`Policy`].
///
#[cfg_attr(feature = "axum", doc = "```")]
#[cfg_attr(not(feature = "axum"), doc = "```ignore")]
/// use axum::response::IntoResponse;
/// use dlock_tower::idempotency::Outcome;
/// use http::StatusCode;
///
/// async fn charge() -> impl IntoResponse {
///     // The bank did not answer our question whether the card is good: nothing was charged yet.
///     (StatusCode::BAD_GATEWAY, Outcome::Retry, "the bank does not answer")
/// }
/// # let _ = charge;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// This is final, an error too: it is kept, and a retry gets it.
    Final,
    /// It is worth a retry: the key is released.
    Retry,
}

impl From<Outcome> for Verdict {
    fn from(outcome: Outcome) -> Verdict {
        match outcome {
            Outcome::Final => Verdict::Keep,
            Outcome::Retry => Verdict::Release,
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

/// The word that a handler said while it ran.
#[derive(Debug, Default)]
pub(super) struct Word(AtomicU8);

impl Word {
    pub(super) fn say(&self, outcome: Outcome) {
        let word = match outcome {
            Outcome::Final => 1,
            Outcome::Retry => 2,
        };
        self.0.store(word, Ordering::Relaxed);
    }

    pub(super) fn said(&self) -> Option<Outcome> {
        match self.0.load(Ordering::Relaxed) {
            1 => Some(Outcome::Final),
            2 => Some(Outcome::Retry),
            _ => None,
        }
    }
}
