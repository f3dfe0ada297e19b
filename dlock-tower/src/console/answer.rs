//! Answers, and the headers that all of them share.

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use dlock::Error;
use http::header::{self, HeaderName, HeaderValue};
use http::{HeaderMap, StatusCode};
use serde_json::json;

const HEADERS: [(HeaderName, &str); 6] = [
    (header::CACHE_CONTROL, "no-store"),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("cross-origin-opener-policy"),
        "same-origin",
    ),
];

/// The permissions of a page of data: none.
const NOTHING: &str = "default-src 'none'; frame-ancestors 'none'";

pub(super) async fn with_headers(mut response: Response) -> Response {
    let headers = response.headers_mut();
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers
        .entry(header::CONTENT_SECURITY_POLICY)
        .or_insert(HeaderValue::from_static(NOTHING));
    response
}

pub(super) fn data(json: impl Into<Bytes>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], json.into()).into_response()
}

/// A problem document (RFC 9457).
pub(super) fn problem(status: StatusCode, kind: &str, title: &str, detail: &str) -> Response {
    let text = json!({ "type": kind, "title": title, "status": status.as_u16(), "detail": detail });
    let kind = [(header::CONTENT_TYPE, "application/problem+json")];
    (status, kind, text.to_string()).into_response()
}

/// A problem document of an error.
pub(super) fn failed(error: &Error) -> Response {
    let of = error.problem();
    let status = match error {
        Error::Unsupported { .. } => StatusCode::NOT_IMPLEMENTED,
        Error::InvalidOption { .. } => StatusCode::BAD_REQUEST,
        _ => StatusCode::from_u16(of.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
    };
    // With all details, unlike the problem of a handler: an operator has to fix it.
    problem(status, of.kind, of.title, &error.to_string())
}

/// Whether a browser says that a page of another site sent the request. Programs do not say.
pub(super) fn is_foreign(headers: &HeaderMap) -> bool {
    let site = headers.get("sec-fetch-site").map(HeaderValue::as_bytes);
    !matches!(site, None | Some(b"same-origin" | b"none"))
}
