//! Rejections for gRPC: HTTP 200 without a body, and the status in the headers ("trailers-only").

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body_util::Full;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use crate::{Reason, Rejection};

/// Characters that `grpc-message` must encode; bytes above ASCII are always encoded.
const ENCODED: &AsciiSet = &CONTROLS.add(b'%');

/// The content type of gRPC, and those of gRPC-Web, without the format of the messages.
const GRPC: &str = "application/grpc";
const GRPC_WEB: [&str; 2] = ["application/grpc-web", "application/grpc-web-text"];

/// Returns the content type of a gRPC or gRPC-Web request.
pub(crate) fn content_type(headers: &HeaderMap) -> Option<HeaderValue> {
    let value = headers.get(CONTENT_TYPE)?;
    let is_web = || GRPC_WEB.iter().any(|kind| is(value, kind));
    (is(value, GRPC) || is_web()).then(|| value.clone())
}

/// Whether a response has its status in the trailers; one of gRPC-Web has it in the body.
pub(crate) fn has_trailers(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|value| is(value, GRPC))
}

/// Whether this is the content type, perhaps with a format or parameters.
fn is(value: &HeaderValue, kind: &str) -> bool {
    let Some((start, rest)) = value.as_bytes().split_at_checked(kind.len()) else {
        return false;
    };
    start.eq_ignore_ascii_case(kind.as_bytes()) && matches!(rest.first(), None | Some(b'+' | b';' | b' '))
}

/// Builds a trailers-only response.
pub(crate) fn response(rejection: &Rejection, content_type: HeaderValue) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::default());
    *response.headers_mut() = status(rejection);
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}

/// Returns the trailers of a call: `grpc-status` and `grpc-message`.
pub(crate) fn status(rejection: &Rejection) -> HeaderMap {
    let mut status = HeaderMap::new();
    status.insert("grpc-status", HeaderValue::from(code(rejection)));
    let message = utf8_percent_encode(rejection.detail(), ENCODED).to_string();
    // Only printable ASCII is left.
    if let Ok(message) = HeaderValue::try_from(message) {
        status.insert("grpc-message", message);
    }
    status
}

fn code(rejection: &Rejection) -> u16 {
    const UNKNOWN: u16 = 2;
    const INVALID_ARGUMENT: u16 = 3;
    const DEADLINE_EXCEEDED: u16 = 4;
    const NOT_FOUND: u16 = 5;
    const PERMISSION_DENIED: u16 = 7;
    const RESOURCE_EXHAUSTED: u16 = 8;
    const ABORTED: u16 = 10;
    const INTERNAL: u16 = 13;
    const UNAVAILABLE: u16 = 14;
    const UNAUTHENTICATED: u16 = 16;
    match rejection.reason() {
        Reason::Busy => ABORTED,
        Reason::TooManyWaiters | Reason::Unavailable => UNAVAILABLE,
        // Not a code that clients retry by themselves, once the handler has begun.
        Reason::Lost if rejection.has_started() => UNKNOWN,
        Reason::Lost => UNAVAILABLE,
        Reason::InvalidKey | Reason::BodyIncomplete => INVALID_ARGUMENT,
        Reason::ContentTooLarge => RESOURCE_EXHAUSTED,
        Reason::BodyTimeout => DEADLINE_EXCEEDED,
        Reason::Internal => INTERNAL,
        Reason::Idempotency(problem) => problem.grpc_code(),
        Reason::Other => match rejection.status() {
            StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY => INVALID_ARGUMENT,
            StatusCode::UNAUTHORIZED => UNAUTHENTICATED,
            StatusCode::FORBIDDEN => PERMISSION_DENIED,
            StatusCode::NOT_FOUND => NOT_FOUND,
            StatusCode::CONFLICT | StatusCode::LOCKED => ABORTED,
            StatusCode::TOO_MANY_REQUESTS => RESOURCE_EXHAUSTED,
            StatusCode::SERVICE_UNAVAILABLE => UNAVAILABLE,
            StatusCode::INTERNAL_SERVER_ERROR => INTERNAL,
            _ => UNKNOWN,
        },
    }
}
