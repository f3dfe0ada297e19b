//! URL schemes of stores outside of dlock.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

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
///     Ok(Arc::new(MemoryStore::named(&format!("{}/{table}", request.address))))
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
    /// The timeout of one operation.
    pub timeout: Duration,
    /// The prefix of every key.
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
