//! The errors of a request, and their problem documents (RFC 9457).
//!
//! Where nothing was changed and the next try may go better, the answer says so to the idempotency layer
//! (`Outcome::Retry`), which otherwise keeps what it is given. What may have happened is kept, so that it does
//! not happen twice.

use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use dlock_tower::idempotency::{Outcome, Problem};
use serde_json::json;

use crate::store::StoreError;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The lock was not acquired.
    #[error(transparent)]
    Lock(#[from] dlock::Error),
    /// Another attempt may have the claim of the request.
    #[error("another attempt of this request may be in progress")]
    ClaimLost,
    /// The record could not be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is not enough left.
    #[error("{left} of \"{sku}\" are left, {wanted} were asked for")]
    SoldOut { sku: String, left: u64, wanted: u64 },
    /// There is no such article.
    #[error("there is no article \"{0}\": set its stock first, by PUT /items/{0}")]
    UnknownSku(String),
    /// The request is invalid.
    #[error("{0}")]
    BadRequest(String),
    /// The request is not one that axum can read, or there is no such route.
    #[error("{1}")]
    Http(StatusCode, String),
}

/// How long to wait before a retry is useful.
const SOON: u64 = 1;

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let detail = self.to_string();
        match self {
            Error::Lock(error) => {
                let problem = error.problem();
                if problem.status >= 500 {
                    tracing::warn!(%error, "nothing was done without its lock");
                }
                let status =
                    StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                let answer = answer(
                    status,
                    problem.kind,
                    problem.title,
                    &problem.detail,
                    problem.retry_after_secs(),
                );
                match error {
                    dlock::Error::Lost { .. } => answer,
                    _ => worth_a_retry(answer),
                }
            }
            Error::ClaimLost => {
                let problem = Problem::InProgress.rejection();
                let retry_after = problem.retry_after_secs();
                let (status, kind, title) = (problem.status(), problem.kind(), problem.title());
                worth_a_retry(answer(status, kind, title, &detail, retry_after))
            }
            Error::Store(error) => store(&error),
            Error::SoldOut { .. } => {
                tracing::debug!("sold out: {detail}");
                let kind = "urn:checkout:problem:sold-out";
                answer(StatusCode::CONFLICT, kind, "Sold out", &detail, None)
            }
            Error::UnknownSku(_) => {
                let kind = "urn:checkout:problem:unknown-sku";
                answer(
                    StatusCode::NOT_FOUND,
                    kind,
                    "There is no such article",
                    &detail,
                    None,
                )
            }
            Error::BadRequest(_) => bad_request(&detail),
            Error::Http(StatusCode::BAD_REQUEST, _) => bad_request(&detail),
            Error::Http(status, _) => {
                // There is nothing to say beyond the status, and this is how RFC 9457 says so.
                let title = status.canonical_reason().unwrap_or("The request failed");
                answer(status, "about:blank", title, &detail, None)
            }
        }
    }
}

fn bad_request(detail: &str) -> Response {
    let kind = "urn:checkout:problem:bad-request";
    answer(
        StatusCode::BAD_REQUEST,
        kind,
        "The request makes no sense",
        detail,
        None,
    )
}

fn store(error: &StoreError) -> Response {
    tracing::warn!("nothing was confirmed: {error}");
    let unavailable = StatusCode::SERVICE_UNAVAILABLE;
    match error {
        StoreError::Fenced { .. } => worth_a_retry(answer(
            unavailable,
            "urn:dlock:problem:fenced",
            "Another copy has taken over",
            "the lock was lost during the work, and the write refused for its fencing token; nothing was changed",
            Some(SOON),
        )),
        StoreError::Unavailable(_) => worth_a_retry(answer(
            unavailable,
            "urn:dlock:problem:unavailable",
            "The store is not available",
            "the store does not answer, and nothing was changed; try again",
            Some(SOON),
        )),
        StoreError::Unknown(_) => answer(
            unavailable,
            "urn:checkout:problem:outcome-unknown",
            "The outcome is not known",
            "the store did not confirm the write, which may or may not have happened: look before you send it again",
            // A client that sends it again at once may buy twice.
            None,
        ),
        StoreError::Foreign(_) => worth_a_retry(answer(
            StatusCode::INTERNAL_SERVER_ERROR,
            "urn:checkout:problem:internal",
            "The store holds something else",
            "under the name of this record the store holds data that this service did not write",
            None,
        )),
    }
}

/// The idempotency key of the request is released, and the same request runs again.
fn worth_a_retry(mut answer: Response) -> Response {
    answer.extensions_mut().insert(Outcome::Retry);
    answer
}

fn answer(status: StatusCode, kind: &str, title: &str, detail: &str, retry_after: Option<u64>) -> Response {
    let body = json!({ "type": kind, "title": title, "status": status.as_u16(), "detail": detail });
    let mut response = (status, body.to_string()).into_response();
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/problem+json"),
    );
    if let Some(seconds) = retry_after {
        headers.insert(header::RETRY_AFTER, seconds.into());
    }
    response
}

// A body that is JSON but not what was asked for is the same mistake as one with a bad number in it.
impl From<JsonRejection> for Error {
    fn from(rejection: JsonRejection) -> Error {
        match rejection {
            JsonRejection::JsonDataError(_) => Error::BadRequest(rejection.body_text()),
            other => Error::Http(other.status(), other.body_text()),
        }
    }
}

impl From<PathRejection> for Error {
    fn from(rejection: PathRejection) -> Error {
        Error::Http(rejection.status(), rejection.body_text())
    }
}

impl From<QueryRejection> for Error {
    fn from(rejection: QueryRejection) -> Error {
        Error::Http(rejection.status(), rejection.body_text())
    }
}
