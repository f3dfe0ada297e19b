//! Why a layer answered itself, and what clients learn.

use std::time::Duration;

use dlock::{LockKey, Loss};
use http::{HeaderValue, StatusCode};

use crate::Reason;
use crate::problem::Problem;

/// An answer that a layer gives instead of the handler's.
///
/// By default [`response`](Self::response) renders it; your own renderer
/// ([`LockLayer::render`](crate::LockLayer::render)) finds all facts here. Key closures return one to refuse a request.
///
/// ```
/// use dlock_tower::Rejection;
/// use http::StatusCode;
/// use std::time::Duration;
///
/// let rejection = Rejection::new(StatusCode::SERVICE_UNAVAILABLE, "the shop is closed")
///     .with_retry_after(Duration::from_secs(60));
/// assert_eq!(rejection.retry_after_secs(), Some(60));
/// ```
#[derive(Debug, Clone)]
pub struct Rejection {
    // Boxed because it is passed in `Result`s.
    inner: Box<Inner>,
}

#[derive(Debug, Clone)]
struct Inner {
    reason: Reason,
    status: StatusCode,
    kind: &'static str,
    title: &'static str,
    detail: String,
    retry_after: Option<Duration>,
    /// The detail for the log only.
    log: Option<String>,
    started: bool,
    grpc: Option<HeaderValue>,
}

impl Rejection {
    pub(crate) fn with(
        reason: Reason,
        status: StatusCode,
        kind: &'static str,
        title: &'static str,
        detail: impl Into<String>,
    ) -> Rejection {
        let (detail, retry_after, log, started, grpc) = (detail.into(), None, None, false, None);
        let inner = Inner {
            reason,
            status,
            kind,
            title,
            detail,
            retry_after,
            log,
            started,
            grpc,
        };
        Rejection {
            inner: Box::new(inner),
        }
    }

    /// Creates a refusal with your own status, such as 401 from a key closure. `detail` is shown to the client.
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Rejection {
        let title = status.canonical_reason().unwrap_or("Refused");
        Rejection::with(Reason::Other, status, "about:blank", title, detail)
    }

    /// Creates a 400: the request has no valid key. `detail` is shown to the client.
    pub fn invalid_key(detail: impl Into<String>) -> Rejection {
        Rejection::with(
            Reason::InvalidKey,
            StatusCode::BAD_REQUEST,
            "urn:dlock:problem:invalid-key",
            "The request gives no valid name for a lock",
            detail,
        )
    }

    /// Creates a 500: the service is set up wrongly. `log` goes to the log only.
    pub fn internal(log: impl Into<String>) -> Rejection {
        let mut rejection = Rejection::with(
            Reason::Internal,
            StatusCode::INTERNAL_SERVER_ERROR,
            "urn:dlock:problem:internal",
            "The service is not set up properly",
            "the service made a mistake in its set-up",
        );
        rejection.inner.log = Some(log.into());
        rejection
    }

    /// Creates a 413: the body has more bytes than the limit, if that is known.
    pub(crate) fn too_large(limit: Option<usize>) -> Rejection {
        let detail = match limit {
            Some(limit) => format!("at most {limit} bytes are read"),
            None => "it is over the limit of this service".to_owned(),
        };
        Rejection::with(
            Reason::ContentTooLarge,
            StatusCode::PAYLOAD_TOO_LARGE,
            "urn:dlock:problem:content-too-large",
            "The request's body is too large",
            detail,
        )
    }

    /// Creates a 408: the body has not arrived within `time`.
    pub(crate) fn body_timeout(time: Duration) -> Rejection {
        Rejection::with(
            Reason::BodyTimeout,
            StatusCode::REQUEST_TIMEOUT,
            "urn:dlock:problem:body-timeout",
            "The request's body did not arrive in time",
            format!("the whole body has to arrive within {time:?}"),
        )
    }

    /// Creates a 400: the body has not arrived whole.
    pub(crate) fn body_incomplete() -> Rejection {
        Rejection::with(
            Reason::BodyIncomplete,
            StatusCode::BAD_REQUEST,
            "urn:dlock:problem:body-incomplete",
            "The request's body did not arrive whole",
            "the body could not be read to its end",
        )
    }

    /// Creates a 503: the lock was lost while the handler ran, which was stopped. No `Retry-After`: the progress of the
    /// handler is unknown.
    pub(crate) fn lost(key: &LockKey, loss: Loss) -> Rejection {
        let mut rejection = Rejection::with(
            Reason::Lost,
            StatusCode::SERVICE_UNAVAILABLE,
            "urn:dlock:problem:lost",
            "The lock was lost during the work",
            "the request was stopped half way; it may have had effects",
        );
        rejection.inner.started = true;
        rejection.inner.log = Some(format!("lock \"{key}\" was lost while the handler ran: {loss}"));
        rejection
    }

    /// Creates a 503: the lock was lost before the handler began, as while the service inside was busy.
    pub(crate) fn lost_before(key: &LockKey, loss: Loss) -> Rejection {
        let mut rejection = Rejection::with(
            Reason::Lost,
            StatusCode::SERVICE_UNAVAILABLE,
            "urn:dlock:problem:lost",
            "The lock was lost before the work",
            "the request was not begun; try again",
        );
        rejection.inner.retry_after = Some(Duration::from_secs(1));
        rejection.inner.log = Some(format!(
            "lock \"{key}\" was lost before the handler began: {loss}"
        ));
        rejection
    }

    /// Sets when to try again; not set by default.
    #[must_use]
    pub fn with_retry_after(mut self, retry_after: Duration) -> Rejection {
        self.inner.retry_after = Some(retry_after);
        self
    }

    /// Sets what is logged instead of the detail.
    pub(crate) fn with_log(mut self, log: impl Into<String>) -> Rejection {
        self.inner.log = Some(log.into());
        self
    }

    /// Marks that the requested work may have been begun.
    pub(crate) fn with_started(mut self) -> Rejection {
        self.inner.started = true;
        self
    }

    pub(crate) fn with_status(mut self, status: StatusCode) -> Rejection {
        self.inner.status = status;
        self
    }

    pub(crate) fn with_grpc(mut self, content_type: Option<HeaderValue>) -> Rejection {
        self.inner.grpc = content_type;
        self
    }

    /// Returns the kind of the rejection.
    #[must_use]
    pub fn reason(&self) -> Reason {
        self.inner.reason
    }

    /// Returns the HTTP status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.inner.status
    }

    /// Returns the stable type of the problem, a URN (or `about:blank`).
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.inner.kind
    }

    /// Returns the title of the type.
    #[must_use]
    pub fn title(&self) -> &'static str {
        self.inner.title
    }

    /// Returns what happened, in words that clients may see.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.inner.detail
    }

    /// Returns whole seconds for `Retry-After`: rounded up, at least 1; `None` if trying again is useless or may do
    /// harm.
    #[must_use]
    pub fn retry_after_secs(&self) -> Option<u64> {
        let up = |d: Duration| d.as_secs().saturating_add(u64::from(d.subsec_nanos() > 0));
        self.inner.retry_after.map(|d| up(d).max(1))
    }

    /// Returns whether the handler has run, at least in part. Then its effects are unknown.
    #[must_use]
    pub fn has_started(&self) -> bool {
        self.inner.started
    }

    /// Whether an equal request is in progress, so that this one was not begun.
    pub(crate) fn is_in_progress(&self) -> bool {
        self.inner.reason == Reason::Idempotency(Problem::InProgress)
    }

    /// The content type of the request, if that was gRPC: gRPC clients understand only a `grpc-status`.
    #[must_use]
    pub fn grpc(&self) -> Option<&HeaderValue> {
        self.inner.grpc.as_ref()
    }

    pub(crate) fn log(&self) {
        let Inner {
            reason,
            status,
            detail,
            log,
            ..
        } = &*self.inner;
        let (status, detail) = (status.as_u16(), log.as_ref().unwrap_or(detail));
        match reason {
            Reason::Internal | Reason::Idempotency(Problem::Unreadable) => {
                tracing::error!(status, detail, "a request was refused");
            }
            Reason::Unavailable | Reason::Lost | Reason::Idempotency(Problem::Unavailable) => {
                tracing::warn!(status, detail, "a request was refused");
            }
            _ => tracing::debug!(status, detail, "a request was refused"),
        }
    }
}

impl Problem {
    /// Returns the answer to the client.
    #[must_use]
    pub fn rejection(self) -> Rejection {
        self.with_detail(self.detail())
    }

    /// Sets the detail.
    pub(crate) fn with_detail(self, detail: impl Into<String>) -> Rejection {
        let mut rejection = Rejection::with(
            Reason::Idempotency(self),
            self.status(),
            self.kind(),
            self.title(),
            detail,
        );
        if let Some(retry_after) = self.retry_after() {
            rejection = rejection.with_retry_after(retry_after);
        }
        if self.may_have_begun() {
            rejection = rejection.with_started();
        }
        rejection
    }
}

impl From<dlock::Error> for Rejection {
    fn from(error: dlock::Error) -> Rejection {
        let reason = match &error {
            dlock::Error::NotAcquired { .. } => Reason::Busy,
            dlock::Error::TooManyWaiters { .. } => Reason::TooManyWaiters,
            dlock::Error::InvalidKey { .. } => Reason::InvalidKey,
            dlock::Error::Lost { .. } => Reason::Lost,
            error if error.is_unavailable() => Reason::Unavailable,
            _ => Reason::Internal,
        };
        let dlock::Problem {
            status,
            kind,
            title,
            detail,
            retry_after,
            ..
        } = error.problem();
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut rejection = Rejection::with(reason, status, kind, title, detail);
        rejection.inner.retry_after = retry_after;
        rejection.inner.log = Some(error.to_string());
        rejection
    }
}
