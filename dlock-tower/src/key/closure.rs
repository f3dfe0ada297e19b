//! Keys that a closure computes from the request's head.

use std::borrow::Cow;
use std::fmt;
use std::future::{Future, ready};

use dlock::LockKey;
use http::request::{Parts, Request};

use super::change::Key;
use super::found::{ExtractKey, Found};
use super::parts::in_parts;
use crate::Rejection;

#[diagnostic::do_not_recommend]
impl<B, F, R> ExtractKey<B> for F
where
    B: Send,
    F: Fn(&Parts) -> R + Send + Sync + 'static,
    R: IntoFound,
{
    fn extract(
        &self,
        request: Request<B>,
    ) -> impl Future<Output = Result<(Request<B>, Found), Rejection>> + Send {
        ready(in_parts(request, |parts| self(parts).into_found()))
    }
}

/// Computes the key from the request's head with a closure. Equivalent to the closure itself, but with the methods of
/// [`Key`], and the type of its argument need not be named.
///
/// `None` lets the request pass without a lock, so for a value that must be there return an error:
/// `value.ok_or_else(|| Rejection::invalid_key("…"))` answers 400, and [`Rejection::internal`] answers 500 and logs an error,
/// as [`extension`](super::extension) does.
pub fn from_fn<F, R>(find: F) -> Key<FromFn<F>>
where
    F: Fn(&Parts) -> R + Send + Sync + 'static,
    R: IntoFound,
{
    Key::new(FromFn { find })
}

/// See [`from_fn`].
///
/// ```
/// use dlock_tower::key::{self, ExtractKey, Found};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_tower::Rejection> {
/// let first = key::from_fn(|parts| parts.uri.path().split('/').nth(1).map(str::to_owned));
/// let request = http::Request::get("/jobs/nightly").body(()).unwrap();
/// let (_, found) = first.extract(request).await?;
/// assert!(matches!(found, Found::Key(key) if key.as_str() == "jobs"));
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct FromFn<F> {
    find: F,
}

impl<F> fmt::Debug for FromFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FromFn").finish_non_exhaustive()
    }
}

impl<B, F, R> ExtractKey<B> for FromFn<F>
where
    B: Send,
    F: Fn(&Parts) -> R + Send + Sync + 'static,
    R: IntoFound,
{
    fn extract(
        &self,
        request: Request<B>,
    ) -> impl Future<Output = Result<(Request<B>, Found), Rejection>> + Send {
        self.find.extract(request)
    }
}

/// What a key closure may return: a key (`LockKey`, `String`, `&'static str`), several of them in a `Vec` or an
/// array, `None` to let the request pass without a lock, an error to refuse it.
///
/// ```
/// use dlock_tower::Rejection;
/// use dlock_tower::key;
/// use http::request::Parts;
///
/// // Some: this key. None: no lock. Err: the request is refused.
/// let tenant = key::from_fn(|parts: &Parts| match parts.uri.host() {
///     Some(host) => Ok(host.split('.').next().map(str::to_owned)),
///     None => Err(Rejection::invalid_key("the URI names no host")),
/// });
/// # let _ = tenant;
/// ```
#[diagnostic::on_unimplemented(
    message = "a key closure cannot return `{Self}`",
    label = "does not say what to lock",
    note = "return a `String`, a `&'static str` or a `LockKey`",
    note = "or a `Vec` or an array of those, which are locked all at once",
    note = "or an `Option` of those, where `None` lets the request pass without a lock",
    note = "or a `Result` of either, whose error is a `dlock_tower::Rejection` or a `dlock::Error`"
)]
pub trait IntoFound {
    /// Converts it to a key.
    ///
    /// # Errors
    ///
    /// The answer that refuses the request.
    fn into_found(self) -> Result<Found, Rejection>;
}

impl IntoFound for Found {
    fn into_found(self) -> Result<Found, Rejection> {
        Ok(self)
    }
}

macro_rules! names {
    ($($name:ty),+) => {$(
        impl IntoFound for $name {
            fn into_found(self) -> Result<Found, Rejection> {
                Ok(Found::Key(self.into()))
            }
        }
    )+};
}

names!(LockKey, String, &'static str, Cow<'static, str>);

impl<T: Into<LockKey>> IntoFound for Vec<T> {
    fn into_found(self) -> Result<Found, Rejection> {
        Ok(Found::all(self.into_iter().map(Into::into).collect()))
    }
}

impl<T: Into<LockKey>, const N: usize> IntoFound for [T; N] {
    fn into_found(self) -> Result<Found, Rejection> {
        Ok(Found::all(self.into_iter().map(Into::into).collect()))
    }
}

impl<T: IntoFound> IntoFound for Option<T> {
    fn into_found(self) -> Result<Found, Rejection> {
        self.map_or(Ok(Found::PassThrough), T::into_found)
    }
}

impl<T: IntoFound, E: Into<Rejection>> IntoFound for Result<T, E> {
    fn into_found(self) -> Result<Found, Rejection> {
        self.map_err(E::into)?.into_found()
    }
}
