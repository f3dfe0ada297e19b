//! Errors as HTTP answers.

use std::time::Duration;

use crate::Error;

/// An error as a problem document (RFC 9457): the content of an HTTP response, without any HTTP types. `dlock-tower`
/// responds with it; with the feature `axum`, so does [`Error`] itself.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// let _guard = client.lock("order:42").acquire().await?;
/// let error = client.lock("order:42").try_acquire().await.unwrap_err();
///
/// let problem = error.problem();
/// assert_eq!(problem.status, 423);
/// assert_eq!(problem.kind, "urn:dlock:problem:busy");
/// println!("Retry-After: {:?}", problem.retry_after_secs());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Problem {
    /// The HTTP status code.
    pub status: u16,
    /// The stable type of the problem, a URN, by which clients distinguish problems.
    pub kind: &'static str,
    /// The title of the type.
    pub title: &'static str,
    /// What happened in this case.
    pub detail: String,
    /// When to try again, if that makes sense.
    pub retry_after: Option<Duration>,
}

impl Problem {
    /// Returns whole seconds for a `Retry-After` header: rounded up, at least 1.
    #[must_use]
    pub fn retry_after_secs(&self) -> Option<u64> {
        self.retry_after
            .map(|d| d.as_secs().saturating_add(u64::from(d.subsec_nanos() > 0)))
            .map(|secs| secs.max(1))
    }
}

impl From<&Error> for Problem {
    fn from(error: &Error) -> Problem {
        let (status, kind, title) = match error {
            Error::NotAcquired { .. } => (423, "urn:dlock:problem:busy", "Held by another caller"),
            Error::TooManyWaiters { .. } => (
                503,
                "urn:dlock:problem:too-many-waiters",
                "Too many requests wait for the same thing",
            ),
            error if error.is_lost() => (503, "urn:dlock:problem:lost", "The lock was lost during the work"),
            Error::Draining => (
                503,
                "urn:dlock:problem:draining",
                "This process begins nothing new",
            ),
            error if error.is_unavailable() => (
                503,
                "urn:dlock:problem:unavailable",
                "The lock store is not available",
            ),
            Error::InvalidKey { .. } => (
                400,
                "urn:dlock:problem:invalid-key",
                "The request gives no valid name for a lock",
            ),
            Error::WouldDeadlock { .. } => (
                500,
                "urn:dlock:problem:would-deadlock",
                "The request would wait for itself",
            ),
            _ => (
                500,
                "urn:dlock:problem:internal",
                "The service is not set up properly",
            ),
        };
        // Clients learn only that there is an internal fault; the details go to the log.
        let detail = match (status, error) {
            (500, _) => "the service made a mistake in its set-up".to_owned(),
            // Without the advice for programmers, which stands in parentheses; so may a part of the name.
            (_, Error::InvalidKey { key, reason }) => {
                let key = key.clone();
                let reason = reason.split(" (").next().unwrap_or_default().to_owned();
                Error::InvalidKey { key, reason }.to_string()
            }
            // Without what the store says of itself, which may name servers.
            (_, Error::NotAcquired { .. }) => without_votes(error.clone()).to_string(),
            // Not of a store that is well.
            (503, Error::Draining | Error::ClientClosed) => error.to_string(),
            (503, _) if error.is_unavailable() => "the lock store does not answer; try again".to_owned(),
            _ => error.to_string(),
        };
        Problem {
            status,
            kind,
            title,
            detail,
            retry_after: error.retry_after(),
        }
    }
}

fn without_votes(mut error: Error) -> Error {
    if let Error::NotAcquired { votes, .. } = &mut error {
        *votes = None;
    }
    error
}

/// Logs an error that is answered with this status, as loudly as dlock-tower does: a mistake of the service as an error,
/// a loss and a store that fails as a warning, and what is expected for debugging only.
#[cfg(feature = "axum")]
fn log(error: &Error, status: u16) {
    if status == 500 {
        tracing::error!(%error, status, "a request could not be locked");
    } else if error.is_lost() || error.is_unavailable() {
        tracing::warn!(%error, status, "a request was refused");
    } else {
        tracing::debug!(%error, status, "a request was refused");
    }
}

#[cfg(feature = "axum")]
impl axum_core::response::IntoResponse for Error {
    fn into_response(self) -> axum_core::response::Response {
        let problem = self.problem();
        log(&self, problem.status);
        let body = serde_json::json!({
            "type": problem.kind, "title": problem.title, "status": problem.status, "detail": problem.detail,
        });
        let mut response = axum_core::response::Response::new(axum_core::body::Body::from(body.to_string()));
        *response.status_mut() =
            http::StatusCode::from_u16(problem.status).unwrap_or(http::StatusCode::INTERNAL_SERVER_ERROR);
        if let Some(refused) = crate::base::request::refused_by(&self) {
            response.extensions_mut().insert(refused);
        }
        let headers = response.headers_mut();
        headers.insert(
            http::header::CONTENT_TYPE,
            http::HeaderValue::from_static("application/problem+json"),
        );
        if let Some(secs) = problem.retry_after_secs() {
            headers.insert(http::header::RETRY_AFTER, secs.into());
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_is_blamed_only_for_its_own_failures() {
        for (error, is_of_the_store) in [
            (Error::ClientClosed, false),
            (Error::Draining, false),
            (
                Error::Unreachable {
                    what: "the acquire of lock \"k\"".to_owned(),
                    message: "connection to 10.0.0.1 refused".to_owned(),
                    source: None,
                },
                true,
            ),
        ] {
            let problem = error.problem();
            let says = match is_of_the_store {
                true => "the lock store does not answer; try again".to_owned(),
                false => error.to_string(),
            };
            assert_eq!((problem.status, problem.detail), (503, says));
        }
    }
}
