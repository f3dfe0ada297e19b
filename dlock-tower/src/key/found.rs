//! The result of looking for a key in a request.

use std::future::Future;

use dlock::LockKey;
use http::Request;

use crate::Rejection;

/// The result of looking for a key in a request.
///
/// ```
/// use dlock_tower::key::{self, ExtractKey, Found};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_tower::Rejection> {
/// // No header: the request is refused, unless `or` or `optional` say otherwise.
/// let request = http::Request::get("/").body(()).unwrap();
/// let (_, found) = key::header("x-account").extract(request).await?;
/// assert!(matches!(found, Found::Missing(rejection) if rejection.status() == 400));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Found {
    /// The key to lock.
    Key(LockKey),
    /// The keys to lock, all of them or none; see [`MultiLock`](dlock::MultiLock). Equal names count once; an empty
    /// list counts as missing; more than [`MAX_AT_ONCE`](dlock::MAX_AT_ONCE) are answered with 400.
    Keys(Vec<LockKey>),
    /// The request should name a key and does not. Answered with this rejection, unless [`Key::or`](super::Key::or)
    /// finds another key or [`Key::optional`](super::Key::optional) lets the request pass.
    Missing(Rejection),
    /// The request needs no lock: the handler runs without one.
    PassThrough,
}

impl Found {
    /// Converts each key that was found.
    pub(super) fn try_map(
        self,
        change: impl Fn(LockKey) -> Result<LockKey, Rejection>,
    ) -> Result<Found, Rejection> {
        Ok(match self {
            Found::Key(key) => Found::Key(change(key)?),
            Found::Keys(keys) => Found::Keys(keys.into_iter().map(change).collect::<Result<_, _>>()?),
            nothing => nothing,
        })
    }

    /// Creates the result for a request that should name `what` and does not.
    pub(super) fn missing(what: String) -> Found {
        Found::Missing(Rejection::invalid_key(what + " is missing"))
    }

    /// Converts an empty list to a missing key.
    pub(crate) fn normalized(self) -> Found {
        match self {
            Found::Keys(keys) => Found::all(keys),
            found => found,
        }
    }

    /// Creates the result for several keys, possibly none.
    pub(super) fn all(keys: Vec<LockKey>) -> Found {
        match keys.is_empty() {
            true => Found::missing("the name of something to lock".to_owned()),
            false => Found::Keys(keys),
        }
    }
}

/// In the extensions of a request that passes because no route was matched for it.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "axum"), allow(dead_code, reason = "only axum has routes"))]
pub(crate) struct Unrouted;

/// Takes the key of a lock from a request.
///
/// Implemented by the results of the functions of [this module](super), and by closures over `&http::request::Parts`.
/// Implement it yourself for a key that has to wait for something, or needs the body. The request is passed in and
/// returned.
///
/// ```
/// use dlock_tower::{Rejection, key::{ExtractKey, Found}};
/// use http::Request;
///
/// struct Tenant;
///
/// impl<B: Send> ExtractKey<B> for Tenant {
///     async fn extract(&self, request: Request<B>) -> Result<(Request<B>, Found), Rejection> {
///         // ... look it up ...
///         Ok((request, Found::Key("tenant:1".into())))
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not take the key of a lock from a `Request<{B}>`",
    label = "not a key for these requests",
    note = "a key is made by the functions of `dlock_tower::key`, such as `key::header(\"x-account\")`, or is a closure `|parts: &http::request::Parts| ...` that returns a `String`, a `LockKey`, a `Vec` of those, an `Option` or a `Result`",
    note = "for one name for all requests, write `key::fixed(\"name\")`",
    note = "a key from the body, such as `key::json_field`, needs a body that is `FromBuffered`: `axum::body::Body` (feature `axum` of dlock-tower), `Full<Bytes>`, `BoxBody` or `UnsyncBoxBody`"
)]
pub trait ExtractKey<B>: Send + Sync + 'static {
    /// Looks for the key and returns the request.
    ///
    /// Dropped when the client goes away.
    fn extract(
        &self,
        request: Request<B>,
    ) -> impl Future<Output = Result<(Request<B>, Found), Rejection>> + Send;
}
