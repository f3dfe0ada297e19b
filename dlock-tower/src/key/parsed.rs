//! Keys that are values of a type, each with one spelling.

use std::fmt::{self, Display};
use std::marker::PhantomData;
use std::str::FromStr;

use http::Request;

use super::change::Key;
use super::found::{ExtractKey, Found};
use crate::Rejection;

impl<E> Key<E> {
    /// Parses the key as a `T` and locks the name that `T` prints, so that all spellings of a value are one lock: with
    /// `u64`, `/accounts/7`, `/accounts/007` and `/accounts/+7` lock `7`. A key that is not a `T` is answered with 400,
    /// before anything is locked. If there are several keys, each is parsed.
    ///
    /// Use the type that the handler reads. Call it before [`prefix`](Self::prefix). The page
    /// [docs/keys.md](https://github.com/dlock-rs/dlock/blob/main/docs/keys.md) lists the spellings that a handler may
    /// treat as equal.
    ///
    /// ```
    /// use dlock_tower::key;
    ///
    /// let account = key::header("x-account").parsed::<u64>().prefix("account:");
    /// # let _ = account;
    /// ```
    pub fn parsed<T>(self) -> Key<Parsed<E, T>>
    where
        T: FromStr<Err: Display> + Display + 'static,
    {
        Key::new(Parsed {
            of: self.extractor,
            as_a: PhantomData,
        })
    }
}

/// See [`Key::parsed`].
///
/// ```
/// use dlock_tower::key::{self, ExtractKey, Found};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_tower::Rejection> {
/// let request = http::Request::get("/?id=007").body(()).unwrap();
/// let (_, found) = key::query("id").parsed::<u64>().extract(request).await?;
/// assert!(matches!(found, Found::Key(key) if key.as_str() == "7"));
/// # Ok(()) }
/// ```
pub struct Parsed<E, T> {
    of: E,
    as_a: PhantomData<fn() -> T>,
}

impl<B, E, T> ExtractKey<B> for Parsed<E, T>
where
    B: Send,
    E: ExtractKey<B>,
    T: FromStr<Err: Display> + Display + 'static,
{
    async fn extract(&self, request: Request<B>) -> Result<(Request<B>, Found), Rejection> {
        let (request, found) = self.of.extract(request).await?;
        let found = found.try_map(|key| match key.as_str().parse::<T>() {
            Ok(value) => Ok(value.to_string().into()),
            Err(error) => Err(Rejection::invalid_key(format!(
                "the value that names the lock is not valid: {error}"
            ))),
        });
        Ok((request, found?))
    }
}

impl<E: Clone, T> Clone for Parsed<E, T> {
    fn clone(&self) -> Self {
        Parsed {
            of: self.of.clone(),
            as_a: PhantomData,
        }
    }
}

impl<E: fmt::Debug, T> fmt::Debug for Parsed<E, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parsed")
            .field("of", &self.of)
            .field("as_a", &std::any::type_name::<T>())
            .finish()
    }
}
