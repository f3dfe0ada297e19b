//! Answers, and the headers that all of them share.

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use dlock::Error;
use http::StatusCode;
use http::header::{self, HeaderName, HeaderValue};
use http::request::Parts;
use serde_json::json;

use crate::key::host;

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

/// Who sent a request, as far as browsers tell. Programs do not tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sender {
    /// The console's own page, or a program.
    Own,
    /// A person, by the address bar or a bookmark.
    Person,
    /// A page of another site.
    Foreign,
}

impl Sender {
    pub(super) fn of(head: &Parts) -> Sender {
        let value = |name: &str| head.headers.get(name).map(HeaderValue::as_bytes);
        match (value("sec-fetch-site"), value("origin")) {
            (Some(b"same-origin"), _) | (None, None) => Sender::Own,
            (Some(b"none"), _) => Sender::Person,
            // Browsers leave the other header out on plain HTTP, and old ones do everywhere.
            (None, Some(origin)) if is_origin_of(head, origin) => Sender::Own,
            _ => Sender::Foreign,
        }
    }
}

/// Whether the origin is the host that the request was sent to.
fn is_origin_of(head: &Parts, origin: &[u8]) -> bool {
    let origin = str::from_utf8(origin)
        .ok()
        .and_then(|origin| origin.split_once("://"));
    match (origin, host(head)) {
        (Some((_, origin)), Some(host)) => origin.eq_ignore_ascii_case(host),
        // An origin that is kept secret (`null`) is another one.
        _ => false,
    }
}

/// The answer to a page of another site.
pub(super) fn foreign(detail: &str) -> Response {
    problem(
        StatusCode::FORBIDDEN,
        "urn:dlock:problem:foreign",
        "The request comes from another site",
        detail,
    )
}
