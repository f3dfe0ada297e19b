//! A key, and the methods that change it.

use std::fmt;
use std::future::Future;

use dlock::LockKey;
use http::Request;

use super::found::{ExtractKey, Found, Unrouted};
use super::parts::empty;
use crate::{Reason, Rejection};

/// A key that the methods here change.
///
/// ```
/// use dlock_tower::key::{self, ExtractKey, Found};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_tower::Rejection> {
/// let account = key::header("x-account")
///     .or(key::query("account"))
///     .parsed::<u64>()
///     .prefix("account:");
/// let request = http::Request::get("/?account=007").body(()).unwrap();
/// let (_, found) = account.extract(request).await?;
/// assert!(matches!(found, Found::Key(key) if key.as_str() == "account:7"));
/// # Ok(()) }
/// ```
#[derive(Clone, Copy)]
#[must_use = "a key does nothing until it is given to a layer"]
pub struct Key<E> {
    pub(super) extractor: E,
}

impl<E> Key<E> {
    /// Wraps your own extractor, to give it the methods of this type.
    pub fn new(extractor: E) -> Key<E> {
        Key { extractor }
    }

    /// Puts a text before the key, so that `42` becomes `account:42`; before each if there are several.
    pub fn prefix(self, prefix: impl Into<String>) -> Key<Prefix<E>> {
        Key::new(Prefix {
            of: self.extractor,
            prefix: prefix.into(),
        })
    }

    /// Converts the key to another one, such as its lower case; each if there are several.
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

    /// Uses another key if this one is missing or lets the request pass. An invalid key is refused all the same. A request
    /// that has both is locked by this one: the handler must look for them in the same order.
    pub fn or<O>(self, other: O) -> Key<Or<E, O>> {
        Key::new(Or {
            first: self.extractor,
            other,
        })
    }

    /// Lets a request pass without a lock if the key is missing, instead of refusing it. An invalid key is refused all
    /// the same.
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
///
/// ```
/// use dlock_tower::key::{self, ExtractKey, Found};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_tower::Rejection> {
/// let request = http::Request::get("/?id=7").body(()).unwrap();
/// let (_, found) = key::query("id").prefix("account:").extract(request).await?;
/// assert!(matches!(found, Found::Key(key) if key.as_str() == "account:7"));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Prefix<E> {
    of: E,
    prefix: String,
}

impl<B: Send, E: ExtractKey<B>> ExtractKey<B> for Prefix<E> {
    async fn extract(&self, request: Request<B>) -> Result<(Request<B>, Found), Rejection> {
        let (request, found) = self.of.extract(request).await?;
        let found = found.try_map(|key| match key.as_str() {
            // A prefix would turn an empty key into a name.
            "" => Err(empty()),
            name => Ok([&*self.prefix, name].concat().into()),
        });
        Ok((request, found?))
    }
}

/// See [`Key::map`].
///
/// ```
/// use dlock_tower::key::{self, ExtractKey, Found};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_tower::Rejection> {
/// let request = http::Request::get("/?name=Ann").body(()).unwrap();
/// let (_, found) = key::query("name").map(str::to_lowercase).extract(request).await?;
/// assert!(matches!(found, Found::Key(key) if key.as_str() == "ann"));
/// # Ok(()) }
/// ```
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
///
/// ```
/// use dlock_tower::key::{self, ExtractKey, Found};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_tower::Rejection> {
/// let request = http::Request::get("/?account=7").body(()).unwrap();
/// let (_, found) = key::header("x-account").or(key::query("account")).extract(request).await?;
/// assert!(matches!(found, Found::Key(key) if key.as_str() == "7"));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Or<E, O> {
    first: E,
    other: O,
}

impl<B: Send, E: ExtractKey<B>, O: ExtractKey<B>> ExtractKey<B> for Or<E, O> {
    async fn extract(&self, request: Request<B>) -> Result<(Request<B>, Found), Rejection> {
        let was_unrouted = is_unrouted(&request);
        let (request, first) = self.first.extract(request).await?;
        let first = first.normalized();
        if let Found::Key(_) | Found::Keys(_) = first {
            return Ok((request, first));
        }
        let (request, other) = self
            .other
            .extract(passes_on_purpose(request, was_unrouted))
            .await?;
        let found = match (first, other.normalized()) {
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

fn is_unrouted<B>(request: &Request<B>) -> bool {
    request.extensions().get::<Unrouted>().is_some()
}

/// What lets a request pass without a route on purpose leaves it as unrouted as it was before.
fn passes_on_purpose<B>(mut request: Request<B>, was_unrouted: bool) -> Request<B> {
    if !was_unrouted {
        request.extensions_mut().remove::<Unrouted>();
    }
    request
}

/// See [`Key::optional`].
///
/// ```
/// use dlock_tower::key::{self, ExtractKey, Found};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_tower::Rejection> {
/// let request = http::Request::get("/health").body(()).unwrap();
/// let (_, found) = key::header("x-account").optional().extract(request).await?;
/// assert!(matches!(found, Found::PassThrough)); // the handler runs without a lock
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Optional<E> {
    of: E,
}

impl<B: Send, E: ExtractKey<B>> ExtractKey<B> for Optional<E> {
    async fn extract(&self, request: Request<B>) -> Result<(Request<B>, Found), Rejection> {
        let was_unrouted = is_unrouted(&request);
        let (request, found) = self.of.extract(request).await?;
        let request = passes_on_purpose(request, was_unrouted);
        let found = match found.normalized() {
            Found::Missing(_) => Found::PassThrough,
            found => found,
        };
        Ok((request, found))
    }
}
