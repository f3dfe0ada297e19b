//! The problems of requests with idempotency keys, one by one.

use std::time::Duration;

use http::StatusCode;

/// Why a request was not answered by its handler, nor by a stored response.
///
/// Each has its stable [`kind`](Self::kind), the `type` of the problem document, by which clients distinguish them. The
/// [module's documentation](crate::idempotency#what-clients-are-told) says what a client should do.
///
/// ```
/// use dlock_tower::idempotency::Problem;
///
/// assert_eq!(Problem::InProgress.status(), 409);
/// assert_eq!(Problem::InProgress.kind(), "urn:dlock:problem:idempotency-in-progress");
/// assert!(Problem::InProgress.is_retryable());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Problem {
    /// The endpoint requires an idempotency key.
    KeyMissing,
    /// The key is empty, too long, malformed, or given more than once.
    KeyInvalid,
    /// The request has no known caller.
    NoCaller,
    /// The key was used for another request.
    Mismatch,
    /// A request with this key is in progress.
    InProgress,
    /// A request with this key was begun, and its progress is unknown.
    OutcomeUnknown,
    /// The request was done, but its response is not kept: it was too large, a stream, or broke off, or the store had
    /// no space for it.
    ResultUnavailable,
    /// The request failed without a response; it may have had effects.
    Failed,
    /// The store that remembers requests does not answer.
    Unavailable,
    /// Too many handlers continue after their clients went away.
    Overloaded,
    /// The record under this key cannot be read by this version of the service.
    Unreadable,
}

impl Problem {
    /// Returns the stable type of the problem, a URN.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self {
            Problem::KeyMissing => "urn:dlock:problem:idempotency-key-missing",
            Problem::KeyInvalid => "urn:dlock:problem:idempotency-key-invalid",
            Problem::NoCaller => "urn:dlock:problem:idempotency-no-caller",
            Problem::Mismatch => "urn:dlock:problem:idempotency-mismatch",
            Problem::InProgress => "urn:dlock:problem:idempotency-in-progress",
            Problem::OutcomeUnknown => "urn:dlock:problem:idempotency-outcome-unknown",
            Problem::ResultUnavailable => "urn:dlock:problem:idempotency-result-unavailable",
            Problem::Failed => "urn:dlock:problem:idempotency-failed",
            Problem::Unavailable => "urn:dlock:problem:idempotency-unavailable",
            Problem::Overloaded => "urn:dlock:problem:idempotency-overloaded",
            Problem::Unreadable => "urn:dlock:problem:idempotency-unreadable",
        }
    }

    /// Returns the HTTP status.
    #[must_use]
    pub fn status(self) -> StatusCode {
        match self {
            Problem::KeyMissing | Problem::KeyInvalid => StatusCode::BAD_REQUEST,
            Problem::NoCaller => StatusCode::UNAUTHORIZED,
            Problem::Mismatch => StatusCode::UNPROCESSABLE_ENTITY,
            Problem::InProgress | Problem::OutcomeUnknown | Problem::ResultUnavailable => {
                StatusCode::CONFLICT
            }
            Problem::Failed => StatusCode::INTERNAL_SERVER_ERROR,
            Problem::Unavailable | Problem::Overloaded | Problem::Unreadable => {
                StatusCode::SERVICE_UNAVAILABLE
            }
        }
    }

    /// Returns whether the same request with the same key may succeed later. Such answers have a `Retry-After`.
    #[must_use]
    pub fn is_retryable(self) -> bool {
        self.retry_after().is_some()
    }

    pub(crate) fn retry_after(self) -> Option<Duration> {
        match self {
            Problem::InProgress | Problem::Unavailable | Problem::Overloaded => Some(Duration::from_secs(1)),
            // As long as an update of the service may need to reach all processes.
            Problem::Unreadable => Some(Duration::from_secs(10)),
            _ => None,
        }
    }

    pub(crate) fn title(self) -> &'static str {
        match self {
            Problem::KeyMissing => "The request has no idempotency key",
            Problem::KeyInvalid => "The idempotency key is not valid",
            Problem::NoCaller => "The caller of the request is not known",
            Problem::Mismatch => "The idempotency key was used for another request",
            Problem::InProgress => "A request with this idempotency key is in progress",
            Problem::OutcomeUnknown => "The outcome of the request is unknown",
            Problem::ResultUnavailable => "The result of the request is not available any more",
            Problem::Failed => "The request failed",
            Problem::Unavailable => "Idempotency keys cannot be checked at present",
            Problem::Overloaded => "The service is busy with requests whose clients went away",
            Problem::Unreadable => "The record of the idempotency key cannot be read",
        }
    }

    pub(crate) fn detail(self) -> &'static str {
        match self {
            Problem::KeyMissing => "send a key that is new for each operation, and the same for its retries",
            Problem::KeyInvalid => "the key must be one string of 1 to 255 bytes",
            Problem::NoCaller => "idempotency keys belong to a caller: authenticate",
            Problem::Mismatch => {
                "use a new key for a new request, and send a retry exactly as the first time"
            }
            Problem::InProgress => "try again with the same key; the result will be sent then",
            Problem::OutcomeUnknown => {
                "a request with this key was begun and did not come to an end that is known; find out what \
                 happened before sending it under another key"
            }
            Problem::ResultUnavailable => {
                "the request was carried out, and its response is not kept: it was too large, a stream, or broke \
                 off, or the store had no room for it; the request is not carried out again"
            }
            Problem::Failed => {
                "the request was begun and failed without a response; it may have had effects, and is not \
                 carried out again under this key"
            }
            Problem::Unavailable | Problem::Overloaded => {
                "nothing was done for this request; try again with the same key"
            }
            Problem::Unreadable => "nothing was done for this request; try again later with the same key",
        }
    }

    /// Whether the requested work may have been begun, by this request or another one.
    pub(crate) fn may_have_begun(self) -> bool {
        matches!(
            self,
            Problem::InProgress | Problem::OutcomeUnknown | Problem::ResultUnavailable | Problem::Failed
        )
    }

    /// Returns the code for gRPC clients.
    pub(crate) fn grpc_code(self) -> u16 {
        const UNKNOWN: u16 = 2;
        const INVALID_ARGUMENT: u16 = 3;
        const FAILED_PRECONDITION: u16 = 9;
        const ABORTED: u16 = 10;
        const UNAVAILABLE: u16 = 14;
        const UNAUTHENTICATED: u16 = 16;
        match self {
            Problem::KeyMissing | Problem::KeyInvalid | Problem::Mismatch => INVALID_ARGUMENT,
            Problem::NoCaller => UNAUTHENTICATED,
            Problem::InProgress => ABORTED,
            Problem::OutcomeUnknown | Problem::ResultUnavailable => FAILED_PRECONDITION,
            Problem::Failed => UNKNOWN,
            Problem::Unavailable | Problem::Overloaded | Problem::Unreadable => UNAVAILABLE,
        }
    }
}
