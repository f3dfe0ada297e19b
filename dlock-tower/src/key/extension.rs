//! Keys from the extensions of a request.

use std::any::type_name;
use std::fmt;
use std::future::{Future, ready};
use std::marker::PhantomData;

use http::request::{Parts, Request};

use super::change::Key;
use super::closure::IntoFound;
use super::found::{ExtractKey, Found};
use super::parts::in_parts;
use crate::Rejection;

/// Computes the key with a closure from an extension of the request, such as the user that the authentication has found.
///
/// The closure returns what that of [`from_fn`](super::from_fn) returns: a key, several keys, `None` to let the request
/// pass without a lock, an error to refuse it.
///
/// The layer that adds the extension stands outside of the lock layer. In axum a layer stands outside of those that were
/// added before it:
///
#[cfg_attr(feature = "axum", doc = "```")]
#[cfg_attr(not(feature = "axum"), doc = "```ignore")]
/// use axum::{Router, extract::Request, middleware::{self, Next}, response::Response, routing::post};
/// use dlock_tower::{LockLayer, key};
///
/// #[derive(Clone)]
/// struct User { tenant: String }
///
/// async fn authenticate(mut request: Request, next: Next) -> Response {
///     request.extensions_mut().insert(User { tenant: "acme".to_owned() });
///     next.run(request).await
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use tower::ServiceExt;
/// let client = dlock::LockClient::memory();
/// let by_tenant = key::extension(|user: &User| user.tenant.clone()).prefix("tenant:");
/// let app = Router::new()
///     .route("/import", post(async || "imported"))
///     .layer(LockLayer::new(client, by_tenant))
///     .layer(middleware::from_fn(authenticate)); // later, so it stands outside
/// # let request = http::Request::post("/import").body(axum::body::Body::empty())?;
/// # assert_eq!(app.oneshot(request).await?.status(), 200);
/// # Ok(()) }
/// ```
///
/// - The request has no such extension: 500 and an error in the log, because the handler would run unlocked; unless
///   [`optional`](Key::optional) or [`or`](Key::or) say what to do. If they do, layers in the wrong order are not
///   noticed: `optional` lets every request pass without a lock then.
/// - The extension has another type: the same. A `User` is not found in an `Arc<User>`.
pub fn extension<T, F, R>(find: F) -> Key<Extension<T, F>>
where
    T: Send + Sync + 'static,
    F: Fn(&T) -> R + Send + Sync + 'static,
    R: IntoFound,
{
    Key::new(Extension {
        find,
        of: PhantomData,
    })
}

/// See [`extension`].
///
/// ```
/// use dlock_tower::key::{self, ExtractKey, Found};
///
/// #[derive(Clone)]
/// struct User { id: u64 }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_tower::Rejection> {
/// let by_user = key::extension(|user: &User| user.id.to_string()).prefix("user:");
/// let request = http::Request::get("/").extension(User { id: 7 }).body(()).unwrap();
/// let (_, found) = by_user.extract(request).await?;
/// assert!(matches!(found, Found::Key(key) if key.as_str() == "user:7"));
/// # Ok(()) }
/// ```
pub struct Extension<T, F> {
    find: F,
    of: PhantomData<fn(&T)>,
}

impl<T, F, R> Extension<T, F>
where
    T: Send + Sync + 'static,
    F: Fn(&T) -> R,
    R: IntoFound,
{
    fn find(&self, parts: &Parts) -> Result<Found, Rejection> {
        match parts.extensions.get::<T>() {
            Some(extension) => (self.find)(extension).into_found(),
            None => Ok(Found::Missing(Rejection::internal(format!(
                "the request has no extension `{}` to take a lock's key from: put the lock layer inside of the \
                 layer that adds it (in axum, add the lock layer before that layer)",
                type_name::<T>()
            )))),
        }
    }
}

impl<T, F: Clone> Clone for Extension<T, F> {
    fn clone(&self) -> Self {
        Extension {
            find: self.find.clone(),
            of: PhantomData,
        }
    }
}

impl<T, F> fmt::Debug for Extension<T, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Extension")
            .field("of", &type_name::<T>())
            .finish_non_exhaustive()
    }
}

impl<B, T, F, R> ExtractKey<B> for Extension<T, F>
where
    B: Send,
    T: Send + Sync + 'static,
    F: Fn(&T) -> R + Send + Sync + 'static,
    R: IntoFound,
{
    fn extract(
        &self,
        request: Request<B>,
    ) -> impl Future<Output = Result<(Request<B>, Found), Rejection>> + Send {
        ready(in_parts(request, |parts| self.find(parts)))
    }
}
