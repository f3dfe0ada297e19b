//! Rejections as HTTP responses: `application/problem+json` (RFC 9457).

use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response};
use http_body_util::Full;

use crate::{Reason, Rejection, grpc};

impl Rejection {
    /// The default answer of the layer: `application/problem+json` with type, title, status and detail, and
    /// `Retry-After` if trying again makes sense. For a gRPC request a trailers-only response with `grpc-status` and
    /// `grpc-message`.
    #[must_use]
    pub fn response(&self) -> Response<Full<Bytes>> {
        let mut response = match self.grpc() {
            Some(content_type) => grpc::response(self, content_type.clone()),
            None => document(self),
        };
        if let Some(secs) = self.retry_after_secs() {
            response.headers_mut().insert(RETRY_AFTER, secs.into());
        }
        response
    }
}

fn document(rejection: &Rejection) -> Response<Full<Bytes>> {
    let mut text = serde_json::json!({
        "type": rejection.kind(),
        "title": rejection.title(),
        "status": rejection.status().as_u16(),
        "detail": rejection.detail(),
    });
    let retryable = match rejection.reason() {
        Reason::Idempotency(problem) => Some(problem.is_retryable()),
        Reason::BodyTimeout | Reason::BodyIncomplete => Some(true),
        Reason::ContentTooLarge | Reason::Internal => Some(false),
        _ => None,
    };
    if let Some(retryable) = retryable {
        text["retryable"] = retryable.into();
    }
    let mut response = Response::new(Full::from(text.to_string()));
    *response.status_mut() = rejection.status();
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    response
}
