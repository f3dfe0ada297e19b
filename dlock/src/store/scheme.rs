//! URL schemes of stores outside of dlock.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::{Reason, Store, StoreError};

/// URL schemes, and the function that opens the store of such a URL; registered by
/// [`LockClientBuilder::scheme`](crate::LockClientBuilder::scheme).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::LockClient;
/// use dlock::store::{OpenRequest, Scheme, Store, StoreError};
/// use dlock::stores::memory::MemoryStore;
/// use std::sync::Arc;
///
/// /// What a crate with a store exports.
/// fn scheme() -> Scheme {
///     Scheme::new(["toy"], |mut request: OpenRequest| async move {
///         let name = request.take("database").unwrap_or_else(|| request.address.clone());
///         request.finish()?; // refuses parameters that it did not ask for
///         // The store applies the prefix: for this one, each prefix is a store of its own.
///         let name = format!("{name}/{}", request.prefix);
///         Ok(Arc::new(MemoryStore::named(&name)) as Arc<dyn Store>)
///     })
/// }
///
/// let client = LockClient::builder().scheme(scheme()).url("toy://shop?lease=10s").build().await?;
/// # client.lock("k").acquire().await?.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Scheme {
    names: Vec<String>,
    open: Arc<Open>,
}

type Opened = Result<Arc<dyn Store>, StoreError>;
type Open = dyn Fn(OpenRequest) -> Pin<Box<dyn Future<Output = Opened> + Send>> + Send + Sync;

impl Scheme {
    /// Creates schemes, in lower case and without `://`, with the function that opens a store.
    ///
    /// A failure with [`Reason::WrongUrl`] becomes [`Error::InvalidUrl`](crate::Error::InvalidUrl), and must not repeat
    /// a password; every other failure keeps its meaning.
    pub fn new<N, O, F>(names: impl IntoIterator<Item = N>, open: O) -> Scheme
    where
        N: Into<String>,
        O: Fn(OpenRequest) -> F + Send + Sync + 'static,
        F: Future<Output = Opened> + Send + 'static,
    {
        Scheme {
            names: names.into_iter().map(Into::into).collect(),
            open: Arc::new(move |request| Box::pin(open(request))),
        }
    }

    /// Returns the schemes.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.names.iter().any(|one| one == name)
    }

    pub(crate) async fn open(&self, request: OpenRequest) -> Opened {
        (self.open)(request).await
    }
}

impl fmt::Debug for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scheme")
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

/// The URL of a store to open, and the options of the client for it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::LockClient;
/// use dlock::store::{OpenRequest, Reason, Scheme, Store, StoreError};
/// use dlock::stores::memory::MemoryStore;
/// use std::sync::Arc;
///
/// async fn open(mut request: OpenRequest) -> Result<Arc<dyn Store>, StoreError> {
///     let table = request.take("table").unwrap_or_else(|| "locks".to_owned());
///     request.finish()?; // an unknown option is a mistake of the user
///     if request.address.is_empty() {
///         return Err(StoreError::not_done(Reason::WrongUrl, "it names no database"));
///     }
///     let name = format!("{}/{table}/{}", request.address, request.prefix);
///     Ok(Arc::new(MemoryStore::named(&name)))
/// }
///
/// let builder = || LockClient::builder().scheme(Scheme::new(["toy"], open));
/// builder().url("toy://shop?table=locks_2").build().await?;
/// let error = builder().url("toy://shop?tabel=locks_2").build().await.unwrap_err();
/// assert!(error.to_string().contains("it has table"), "{error}");
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct OpenRequest {
    /// The scheme of the URL, in lower case.
    pub scheme: String,
    /// The part between `://` and the query, as it is in the URL: it may contain a password.
    pub address: String,
    /// The timeout of one operation. The store applies it: the client itself does not limit an acquire.
    pub timeout: Duration,
    /// The prefix of every key; empty for none. The store applies it: requests have keys without it, and so have the replies
    /// to [`Store::list`]. A store without prefixes refuses one with [`Reason::WrongUrl`].
    pub prefix: String,
    /// The name of the service, as the database may show it in its list of connections.
    pub service_name: String,
    /// The id of the client, which is the first part of the ids of its grants: the bits of a UUID.
    pub client: u128,
    pub(crate) parameters: Vec<(String, String)>,
    /// The names that were asked for.
    pub(crate) known: Vec<String>,
}

impl OpenRequest {
    /// Removes a parameter from the query and returns it, decoded. The common parameters (`lease`, `timeout`,
    /// `retry_for`, `prefix`, `name`, `presence`, `control`, `min_replicas`, `min_replicas_within`) are not among them.
    pub fn take(&mut self, name: &str) -> Option<String> {
        self.known.push(name.to_owned());
        let at = self.parameters.iter().position(|(other, _)| other == name)?;
        Some(self.parameters.swap_remove(at).1)
    }

    /// [Takes](Self::take) a parameter and parses it. The failure says which `values` it has, as in "true or false".
    #[doc(hidden)]
    pub fn take_parsed<V: FromStr>(&mut self, name: &str, values: &str) -> Result<Option<V>, StoreError> {
        let parsed = self.take(name).map(|value| value.parse());
        let wrong = |_| StoreError::wrong_url(format!("its option {name} must be {values}"));
        parsed.transpose().map_err(wrong)
    }

    /// [Takes](Self::take) these parameters; returns a URL of this scheme, with the address and them, for a driver that parses
    /// them itself.
    #[doc(hidden)]
    pub fn take_for_driver(&mut self, scheme: &str, names: &[&str]) -> String {
        let mut url = format!("{scheme}://{}", self.address);
        let mut sign = '?';
        for name in names {
            if let Some(value) = self.take(name) {
                let value = utf8_percent_encode(&value, NON_ALPHANUMERIC);
                url.push_str(&format!("{sign}{name}={value}"));
                sign = '&';
            }
        }
        url
    }

    /// Checks that all parameters were taken.
    ///
    /// # Errors
    ///
    /// [`Reason::WrongUrl`] if a parameter was not [taken](Self::take).
    pub fn finish(&self) -> Result<(), StoreError> {
        match self.parameters.first() {
            None => Ok(()),
            Some((name, _)) => {
                let (name, scheme): (String, _) = (name.chars().take(24).collect(), &self.scheme);
                let mut known = self.known.clone();
                known.push("those of every store".to_owned());
                let message = format!(
                    "its query has an option \"{name}\", which {scheme}:// does not have: it has {}",
                    known.join(", ")
                );
                Err(StoreError::not_done(Reason::WrongUrl, message))
            }
        }
    }
}

impl fmt::Debug for OpenRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The address and the parameters may contain passwords.
        f.debug_struct("OpenRequest")
            .field("scheme", &self.scheme)
            .field("timeout", &self.timeout)
            .field("prefix", &self.prefix)
            .field("service_name", &self.service_name)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(parameters: &[(&str, &str)]) -> OpenRequest {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        OpenRequest {
            scheme: "toy".to_owned(),
            address: "user:p%40ss@host/db".to_owned(),
            timeout: Duration::from_secs(1),
            prefix: String::new(),
            service_name: String::new(),
            client: 1,
            parameters: parameters.iter().map(owned).collect(),
            known: Vec::new(),
        }
    }

    #[test]
    fn value_that_an_option_cannot_have_is_told_with_those_that_it_can() {
        let mut request = request(&[("listen", "secret"), ("connections", "4")]);
        assert!(matches!(
            request.take_parsed("connections", "a number"),
            Ok(Some(4))
        ));
        assert!(matches!(
            request.take_parsed::<bool>("other", "true or false"),
            Ok(None)
        ));
        let error = request
            .take_parsed::<bool>("listen", "true or false")
            .unwrap_err();
        assert_eq!(error.reason, Reason::WrongUrl);
        assert_eq!(error.message, "its option listen must be true or false");
    }

    #[test]
    fn options_of_a_driver_are_passed_on_as_they_were() {
        let mut request = request(&[("a", "x&y=z"), ("b", "ä"), ("c", "")]);
        let url = request.take_for_driver("driver", &["a", "c", "d"]);
        assert_eq!(url, "driver://user:p%40ss@host/db?a=x%26y%3Dz&c=");
        assert!(request.finish().unwrap_err().message.contains("\"b\""));
    }
}
