//! Keys from the parameters of axum's routes.

use std::future::{Future, ready};

use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{FromRequestParts, MatchedPath, OriginalUri, RawPathParams};
use futures_util::FutureExt;
use http::request::{Parts, Request};

use super::change::Key;
use super::found::{ExtractKey, Found, Unrouted};
use super::parts::in_parts;
use crate::Rejection;

/// Uses a parameter of the route that axum has matched, decoded: `path_param("id")` of `/accounts/{id}`.
///
/// If the handler reads it as a number or a UUID, give the key that [type](Key::parsed):
/// `path_param("id").parsed::<u64>()`.
///
/// It is available to layers on a `Router` (`layer`, `route_layer`) or on a method router, also inside `nest`, where
/// the outer parameters are available too. It is not available to a layer around the whole router, which runs before
/// any route is matched.
///
/// - No route matched (the fallback answers): the request passes. When anything but a 404 or 405 is answered, the layer logs
///   an error, once; unless [`optional`](Key::optional) or [`or`](Key::or) say what to do.
/// - The route has no such parameter: 500 and an error in the log, because the handler would run unlocked;
///   unless [`optional`](Key::optional) or [`or`](Key::or) say what to do.
/// - The layer stands around the router: the same, without exception.
/// - The layer stands on a router that has the handlers behind `nest_service` or `fallback_service`: **they run without a
///   lock**, because axum tells the layer no more than for a fallback; see above for the log. Put the layer on the router
///   inside, use `nest`, or give such requests a key by [`or`](Key::or).
/// - Not UTF-8: 400.
pub fn path_param(name: impl Into<String>) -> Key<PathParam> {
    Key::new(PathParam { name: name.into() })
}

/// See [`path_param`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use axum::{Router, routing::get};
/// use dlock_tower::{LockLayer, key};
/// # use tower::ServiceExt;
///
/// let client = dlock::LockClient::memory();
/// let app = Router::new()
///     .route("/accounts/{id}", get(async || "hello"))
///     .layer(LockLayer::new(client, key::path_param("id").prefix("account:")));
/// # let request = http::Request::get("/accounts/7").body(axum::body::Body::empty())?;
/// # assert_eq!(app.oneshot(request).await?.status(), 200);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct PathParam {
    name: String,
}

impl PathParam {
    fn find(&self, parts: &mut Parts) -> Result<Found, Rejection> {
        let name = &self.name;
        // Never waits: it only reads the router's extensions.
        let params = RawPathParams::from_request_parts(parts, &()).now_or_never();
        if let Some(Err(RawPathParamsRejection::InvalidUtf8InPathParam(_))) = &params {
            return Err(Rejection::invalid_key("a path parameter is not UTF-8"));
        }
        if let Some(Ok(params)) = &params {
            // The innermost parameter of that name.
            if let Some((_, value)) = params.iter().filter(|(found, _)| found == name).last() {
                return Ok(Found::Key(value.into()));
            }
        }
        match parts.extensions.get::<MatchedPath>() {
            Some(route) => Ok(Found::Missing(Rejection::internal(format!(
                "the route {} has no parameter \"{name}\" to take a lock's key from",
                route.as_str()
            )))),
            None if parts.extensions.get::<OriginalUri>().is_some() => {
                parts.extensions.insert(Unrouted);
                Ok(Found::PassThrough)
            }
            None => Err(Rejection::internal(format!(
                "path parameter \"{name}\" is not known here: put the lock layer on the axum router by \
                 `Router::layer` or `route_layer`, not around it"
            ))),
        }
    }
}

impl<B: Send> ExtractKey<B> for PathParam {
    fn extract(
        &self,
        request: Request<B>,
    ) -> impl Future<Output = Result<(Request<B>, Found), Rejection>> + Send {
        ready(in_parts(request, |parts| self.find(parts)))
    }
}
