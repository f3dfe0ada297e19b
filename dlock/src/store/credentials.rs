//! How a client proves its identity to a server.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use crate::base::cause::Cause;

/// User and password for a connection, and how long they are valid; created by the function that
/// [`LockClientBuilder::credentials`](crate::LockClientBuilder::credentials) takes.
///
/// [`Debug`](fmt::Debug) does not show the password.
///
/// ```
/// use dlock::Credentials;
/// use std::time::Duration;
///
/// // A token that its issuer has signed for 15 minutes.
/// let credentials = Credentials::new("shop", "token").valid_for(Duration::from_secs(15 * 60));
/// # let _ = credentials;
/// ```
#[derive(Clone)]
#[cfg_attr(
    not(feature = "redis"),
    allow(dead_code, reason = "only servers ask for them")
)]
pub struct Credentials {
    user: Option<String>,
    password: String,
    valid_for: Option<Duration>,
}

impl Credentials {
    /// Creates credentials of a user with a password or token, without an expiry.
    pub fn new(user: impl Into<String>, password: impl Into<String>) -> Credentials {
        Credentials {
            user: Some(user.into()),
            password: password.into(),
            valid_for: None,
        }
    }

    /// Creates credentials with the password of the user in the URL, or else of the default user.
    pub fn password(password: impl Into<String>) -> Credentials {
        Credentials {
            user: None,
            password: password.into(),
            valid_for: None,
        }
    }

    /// Sets how long these credentials are valid from now on. Before that time is over each open connection logs in
    /// again with new credentials.
    #[must_use]
    pub fn valid_for(mut self, time: Duration) -> Credentials {
        self.valid_for = Some(time);
        self
    }

    #[cfg(feature = "redis")]
    pub(crate) fn into_parts(self) -> (Option<String>, String, Option<Duration>) {
        (self.user, self.password, self.valid_for)
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("user", &self.user)
            .field("password", &"…")
            .field("valid_for", &self.valid_for)
            .finish()
    }
}

type Asking = BoxFuture<'static, Result<Credentials, Cause>>;

/// The user's function that returns credentials.
#[derive(Clone)]
#[cfg_attr(
    not(feature = "redis"),
    allow(dead_code, reason = "only servers ask for them")
)]
pub(crate) struct Provider(Arc<dyn Fn() -> Asking + Send + Sync>);

impl Provider {
    pub(crate) fn new<P, F, E>(provider: P) -> Provider
    where
        P: Fn() -> F + Send + Sync + 'static,
        F: Future<Output = Result<Credentials, E>> + Send + 'static,
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        Provider(Arc::new(move || {
            let asking = provider();
            async move { asking.await.map_err(|error| Cause::from(error.into())) }.boxed()
        }))
    }

    #[cfg(feature = "redis")]
    pub(crate) fn ask(&self) -> Asking {
        (self.0)()
    }
}

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Provider")
    }
}
