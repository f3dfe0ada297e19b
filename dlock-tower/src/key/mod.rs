//! What a request locks: keys, taken from the request.
//!
//! A key is made by one of the functions here, or by a closure over the request's
//! [`Parts`]:
//!
//! | function | the key is |
//! |---|---|
#![cfg_attr(feature = "axum", doc = "| [`path_param`] | a parameter of axum's route |")]
#![cfg_attr(
    not(feature = "axum"),
    doc = "| `path_param` | a parameter of axum's route (feature `axum`) |"
)]
//! | [`header`] | the value of a header |
//! | [`query`] | the value of a query parameter |
//! | [`json_field`] | a field of the JSON body, which is read ahead and given back |
//! | [`method_and_path`], [`path`] | which resource is asked for |
//! | [`fixed`] | always the same |
//! | [`from_fn`], any closure | what the closure says |
//! | [`all_of`] | several of them joined into one |
//! | [`each_of`], a closure that gives several | several at once, each a lock of its own |
//!
//! [`Key`] has what changes a key: [`parsed`](Key::parsed), [`prefix`](Key::prefix), [`map`](Key::map), [`or`](Key::or),
//! [`optional`](Key::optional). **Prefix what comes from the request** with what it names: other services
//! use the same store, and `42` is an account here and an order there.
//!
//! **Give a key the type that the handler reads**: a handler that takes `Path<u64>` reads `7`, `007` and `+7` as
//! one account, and as texts they are three keys. `key::path_param("id").parsed::<u64>()` makes one key of them.
//! The page [docs/keys.md](https://github.com/dlock-rs/dlock/blob/main/docs/keys.md) has the spellings that
//! handlers take for one: of numbers, UUIDs, Unicode, paths and queries.
//!
//! Keys are made of user input, so what a lock cannot be called (nothing at all, more than 512 bytes,
//! control characters, braces) is the client's mistake: 400. The same goes for a header or parameter that
//! is given twice, where the handler might read the other one.
//!
//! ```
//! use dlock_tower::key;
//! use http::request::Parts;
//!
//! let account = key::header("x-account").parsed::<u64>().prefix("account:");
//! let both = key::all_of((key::header("x-tenant"), key::query("order"))).prefix("order:");
//! let transfer = key::each_of((key::query("from"), key::query("to"))).prefix("account:");
//! let own = key::from_fn(|parts: &Parts| {
//!     // No key: the request passes without a lock.
//!     (parts.uri.path() != "/health").then(|| "service".to_owned())
//! });
//! # let _ = (account, both, transfer, own);
//! ```

mod all_of;
mod closure;
mod each_of;
mod fixed;
mod header;
mod json;
mod parsed;
mod path;
#[cfg(feature = "axum")]
mod path_param;
mod query;

use std::fmt;
use std::future::Future;

use dlock::LockKey;
use http::request::{Parts, Request};

use crate::{Reason, Rejection};

pub use all_of::{AllOf, all_of};
pub use closure::{FromFn, IntoFound, from_fn};
pub use each_of::{EachOf, each_of};
pub use fixed::{Fixed, fixed};
pub use header::{Header, header};
pub use json::{DEFAULT_JSON_LIMIT, JsonField, json_field};
pub use parsed::Parsed;
pub use path::{Path, method_and_path, path};
#[cfg(feature = "axum")]
pub use path_param::{PathParam, path_param};
pub use query::{Query, query};

/// What was found in a request.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Found {
    /// The key to lock.
    Key(LockKey),
    /// The keys to lock, all of them or none; see [`MultiLock`](dlock::MultiLock). Names that are the same count
    /// once; where there is none at all, it is as if it were missing.
    Keys(Vec<LockKey>),
    /// The request should name a key and does not. Answered with this, unless [`Key::or`] finds another key
    /// or [`Key::optional`] lets the request pass.
    Missing(Rejection),
    /// The request needs no lock: the handler runs without one.
    PassThrough,
}

impl Found {
    /// Changes each key that was found.
    fn try_map(self, change: impl Fn(LockKey) -> Result<LockKey, Rejection>) -> Result<Found, Rejection> {
        Ok(match self {
            Found::Key(key) => Found::Key(change(key)?),
            Found::Keys(keys) => Found::Keys(keys.into_iter().map(change).collect::<Result<_, _>>()?),
            nothing => nothing,
        })
    }

    /// Several keys, of which there may be none.
    fn all(keys: Vec<LockKey>) -> Found {
        match keys.is_empty() {
            true => missing("the name of something to lock".to_owned()),
            false => Found::Keys(keys),
        }
    }
}

/// Takes the key of a lock from a request.
///
/// Implemented by what the functions of [this module](self) make, and by closures over
/// `&http::request::Parts`. Implement it yourself for what has to wait for something, or has to see the
/// body. The request goes through: it is given, and given back.
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
    /// Looks for the key and gives the request back.
    ///
    /// Dropped when the client goes away.
    fn extract(
        &self,
        request: Request<B>,
    ) -> impl Future<Output = Result<(Request<B>, Found), Rejection>> + Send;
}

/// A key, to be changed by the methods here.
#[derive(Clone, Copy)]
#[must_use = "a key does nothing until it is given to a layer"]
pub struct Key<E> {
    extractor: E,
}

impl<E> Key<E> {
    /// An extractor of your own, with the methods of this type.
    pub fn new(extractor: E) -> Key<E> {
        Key { extractor }
    }

    /// Puts a text before the key, so that `42` becomes `account:42`; before each where there are several.
    pub fn prefix(self, prefix: impl Into<String>) -> Key<Prefix<E>> {
        Key::new(Prefix {
            of: self.extractor,
            prefix: prefix.into(),
        })
    }

    /// Makes another key of the key, such as its lower case; of each where there are several.
    pub fn map<F, R>(self, change: F) -> Key<Map<E, F>>
    where
        F: Fn(&str) -> R + Send + Sync + 'static,
        R: Into<LockKey>,
    {
        Key::new(Map {
            of: self.extractor,
            change,
        })
    }

    /// Looks for another key where this one is missing or lets the request pass. One that is there and
    /// wrong is refused all the same.
    pub fn or<O>(self, other: O) -> Key<Or<E, O>> {
        Key::new(Or {
            first: self.extractor,
            other,
        })
    }

    /// Lets a request pass without a lock where the key is missing, which otherwise is refused. One that is
    /// there and wrong is refused all the same.
    pub fn optional(self) -> Key<Optional<E>> {
        Key::new(Optional { of: self.extractor })
    }
}

impl<E: fmt::Debug> fmt::Debug for Key<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.extractor.fmt(f)
    }
}

impl<B, E: ExtractKey<B>> ExtractKey<B> for Key<E> {
    fn extract(
        &self,
        request: Request<B>,
    ) -> impl Future<Output = Result<(Request<B>, Found), Rejection>> + Send {
        self.extractor.extract(request)
    }
}

/// See [`Key::prefix`].
#[derive(Debug, Clone)]
pub struct Prefix<E> {
    of: E,
    prefix: String,
}

impl<B: Send, E: ExtractKey<B>> ExtractKey<B> for Prefix<E> {
    async fn extract(&self, request: Request<B>) -> Result<(Request<B>, Found), Rejection> {
        let (request, found) = self.of.extract(request).await?;
        let found = found.try_map(|key| match key.as_str() {
            // A prefix would make a name of nothing.
            "" => Err(empty()),
            name => Ok(format!("{}{name}", self.prefix).into()),
        });
        Ok((request, found?))
    }
}

/// See [`Key::map`].
#[derive(Clone)]
pub struct Map<E, F> {
    of: E,
    change: F,
}

impl<B, E, F, R> ExtractKey<B> for Map<E, F>
where
    B: Send,
    E: ExtractKey<B>,
    F: Fn(&str) -> R + Send + Sync + 'static,
    R: Into<LockKey>,
{
    async fn extract(&self, request: Request<B>) -> Result<(Request<B>, Found), Rejection> {
        let (request, found) = self.of.extract(request).await?;
        let found = found.try_map(|key| Ok((self.change)(key.as_str()).into()));
        Ok((request, found?))
    }
}

impl<E: fmt::Debug, F> fmt::Debug for Map<E, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Map")
            .field("of", &self.of)
            .finish_non_exhaustive()
    }
}

/// See [`Key::or`].
#[derive(Debug, Clone)]
pub struct Or<E, O> {
    first: E,
    other: O,
}

impl<B: Send, E: ExtractKey<B>, O: ExtractKey<B>> ExtractKey<B> for Or<E, O> {
    async fn extract(&self, request: Request<B>) -> Result<(Request<B>, Found), Rejection> {
        let (request, first) = self.first.extract(request).await?;
        if let Found::Key(_) | Found::Keys(_) = first {
            return Ok((request, first));
        }
        let (request, other) = self.other.extract(request).await?;
        let found = match (first, other) {
            (Found::Missing(first), Found::Missing(other))
                if [first.reason(), other.reason()] == [Reason::InvalidKey; 2] =>
            {
                let detail = format!("{}, {}", first.detail(), other.detail());
                Found::Missing(Rejection::invalid_key(detail))
            }
            (_, other) => other,
        };
        Ok((request, found))
    }
}

/// See [`Key::optional`].
#[derive(Debug, Clone)]
pub struct Optional<E> {
    of: E,
}

impl<B: Send, E: ExtractKey<B>> ExtractKey<B> for Optional<E> {
    async fn extract(&self, request: Request<B>) -> Result<(Request<B>, Found), Rejection> {
        let (request, found) = self.of.extract(request).await?;
        let found = match found {
            Found::Missing(_) => Found::PassThrough,
            found => found,
        };
        Ok((request, found))
    }
}

/// Looks for a key in everything but the body.
fn in_parts<B>(
    request: Request<B>,
    find: impl FnOnce(&mut Parts) -> Result<Found, Rejection>,
) -> Result<(Request<B>, Found), Rejection> {
    let (mut parts, body) = request.into_parts();
    let found = find(&mut parts)?;
    Ok((Request::from_parts(parts, body), found))
}

/// The URI as the client sent it: axum strips what a router is nested at.
pub(crate) fn original_uri(parts: &Parts) -> &http::Uri {
    #[cfg(feature = "axum")]
    if let Some(original) = parts.extensions.get::<axum::extract::OriginalUri>() {
        return &original.0;
    }
    &parts.uri
}

fn decoded(text: &str, what: impl FnOnce() -> String) -> Result<String, Rejection> {
    percent_encoding::percent_decode_str(text)
        .decode_utf8()
        .map(std::borrow::Cow::into_owned)
        .map_err(|_| Rejection::invalid_key(format!("{} is not UTF-8", what())))
}

fn missing(what: String) -> Found {
    Found::Missing(Rejection::invalid_key(what + " is missing"))
}

fn twice(what: String) -> Rejection {
    Rejection::invalid_key(what + " is given more than once")
}

fn empty() -> Rejection {
    Rejection::invalid_key("what names the lock is empty")
}
