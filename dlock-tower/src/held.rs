//! The lock of a request, as an axum extractor.

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::response::{IntoResponse, Response};
use dlock::Held;
use http::request::Parts;

use crate::Rejection;

/// The lock that the request holds, as an extractor: `HeldLock(held): HeldLock`.
///
/// Without a lock layer around the handler the answer is 500, with an error in the log. Take an `Option<HeldLock>` if
/// the lock may be missing: behind [`fail_open`](crate::LockLayer::fail_open), for skipped methods and for requests
/// that pass through. Behind several lock layers it is the lock of the innermost, or none if that lets the request pass.
///
/// `Extension<dlock::Held>` does the same.
///
/// ```
/// use dlock_tower::HeldLock;
///
/// async fn withdraw(HeldLock(held): HeldLock) -> String {
///     format!("done under fencing token {}", held.fencing_token())
/// }
///
/// async fn show(held: Option<HeldLock>) -> &'static str {
///     if held.is_some() { "under a lock" } else { "without a lock" }
/// }
/// # let _ = axum::Router::<()>::new()
/// #     .route("/withdraw", axum::routing::post(withdraw))
/// #     .route("/", axum::routing::get(show));
/// ```
#[derive(Debug, Clone)]
pub struct HeldLock(pub Held);

impl<S: Send + Sync> FromRequestParts<S> for HeldLock {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<HeldLock, Response> {
        parts.extensions.get::<Held>().cloned().map(HeldLock).ok_or_else(|| {
            let rejection = Rejection::internal(
                "a handler takes `HeldLock`, and its request holds no lock: put a LockLayer around it, or \
                 take `Option<HeldLock>`",
            );
            rejection.log();
            rejection.response().map(axum::body::Body::new).into_response()
        })
    }
}

impl<S: Send + Sync> OptionalFromRequestParts<S> for HeldLock {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<HeldLock>, Self::Rejection> {
        Ok(parts.extensions.get::<Held>().cloned().map(HeldLock))
    }
}
