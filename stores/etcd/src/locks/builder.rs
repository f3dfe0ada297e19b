//! Options of the store, and its background tasks.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::queue::check_timeout;
use dlock::store::{DoubtSender, Reason, StoreError};
use dlock::{DEFAULT_TIMEOUT, Error};
use tokio::runtime;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::EtcdLocks;
use super::answers::Answers;
use super::background::{doubt, end_silent, sweep};
use super::batches::Batches;
use super::grants::Grants;
use super::inner::Inner;
use super::names::Names;
use super::pool::Pool;
use super::positions::Positions;
use super::queues::LockQueues;
use super::waiters::Waiters;
use crate::client::{Config, Links, Login, Tls};

/// The default namespace.
const NAMESPACE: &str = "dlock/";

/// Options of [`EtcdLocks`].
///
/// ```no_run
/// use dlock_etcd::EtcdLocks;
/// use std::time::Duration;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let store = EtcdLocks::builder(["a.internal:2379", "b.internal:2379"])
///     .user("shop", std::env::var("ETCD_PASSWORD")?)
///     .namespace("shop/locks/")
///     .timeout(Duration::from_secs(2))
///     .connect()
///     .await?;
/// # let _ = store; Ok(()) }
/// ```
#[must_use = "a builder does nothing until it connects"]
#[derive(Debug)]
pub struct EtcdLocksBuilder {
    config: Config,
    names: Names,
    service: String,
}

impl EtcdLocksBuilder {
    pub(super) fn new(servers: Vec<String>) -> EtcdLocksBuilder {
        EtcdLocksBuilder {
            config: Config {
                servers,
                login: None,
                tls: None,
                timeout: DEFAULT_TIMEOUT,
                allow_old_server: false,
            },
            names: Names {
                namespace: NAMESPACE.to_owned(),
                prefix: String::new(),
            },
            service: String::new(),
        }
    }

    /// Sets the user and password of the login; none by default.
    pub fn user(mut self, user: impl Into<String>, password: impl Into<String>) -> Self {
        self.config.login = Some(Login {
            user: user.into(),
            password: password.into(),
        });
        self
    }

    /// Encrypts connections and trusts the system's certificate authorities; `false` by default. Needs the feature
    /// `tls`.
    pub fn tls(mut self, encrypt: bool) -> Self {
        self.config.tls = encrypt.then(|| self.config.tls.unwrap_or_default());
        self
    }

    /// Encrypts connections and trusts this certificate authority, in PEM, instead of the system's.
    pub fn ca_certificate(mut self, pem: impl Into<Vec<u8>>) -> Self {
        let mut tls = self.config.tls.unwrap_or_default();
        tls.authority = Some(pem.into());
        self.config.tls = Some(tls);
        self
    }

    /// Encrypts connections and presents this certificate, in PEM, with its private key, to the servers.
    pub fn client_certificate(mut self, pem: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        let mut tls = self.config.tls.unwrap_or_default();
        tls.own = Some((pem.into(), key.into()));
        self.config.tls = Some(tls);
        self
    }

    /// Sets the prefix of all keys, `dlock/` by default. The user needs the right to read and write this prefix, and no
    /// other.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.names.namespace = namespace.into();
        self
    }

    /// Sets a prefix of the names of locks, for services that share a namespace; none by default.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.names.prefix = prefix.into();
        self
    }

    /// Sets the name of the service, which is stored as the value of the epoch of each session; none by default.
    pub fn service_name(mut self, name: impl Into<String>) -> Self {
        self.service = name.into();
        self
    }

    /// Sets how long one operation may take, including connecting; 1 s by default, at most a year.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.config.timeout = timeout;
        self
    }

    /// Accepts servers older than 3.4.31 and 3.5.13; `false` by default. A leader of these versions that was stuck can
    /// end leases that its successor has renewed, and then two clients hold one lock.
    pub fn allow_old_server(mut self, allow: bool) -> Self {
        self.config.allow_old_server = allow;
        self
    }

    /// Connects; see [`EtcdLocks::connect`].
    ///
    /// # Errors
    ///
    /// When no server can be reached, a server refuses, or an option is invalid.
    pub async fn connect(self) -> Result<EtcdLocks, Error> {
        if let Err((option, reason)) = self.check() {
            return Err(Error::invalid_option(option, reason));
        }
        self.open().await.map_err(StoreError::into_connect_error)
    }

    /// Connects with options from a URL.
    pub(super) async fn open_by_url(self) -> Result<EtcdLocks, StoreError> {
        if let Err((option, reason)) = self.check() {
            let message = format!("its option {option} is invalid: {reason}");
            return Err(StoreError::not_done(Reason::WrongUrl, message));
        }
        self.open().await
    }

    fn check(&self) -> Result<(), (&'static str, &'static str)> {
        if self.config.servers.is_empty() {
            return Err(("servers", "it names no server, as in localhost:2379"));
        }
        // The messages do not quote the text, which may have a password.
        let servers = &self.config.servers;
        if servers.iter().any(|server| server.contains('@')) {
            let reason = "one of them has a login, which belongs into user(…); a server is as localhost:2379";
            return Err(("servers", reason));
        }
        if servers.iter().any(|server| server.contains('/')) {
            return Err((
                "servers",
                "one of them is not a host and port, as in localhost:2379",
            ));
        }
        check_timeout(self.config.timeout).map_err(|reason| ("timeout", reason))?;
        if self.names.namespace.is_empty() || self.names.namespace.contains('\0') {
            return Err((
                "namespace",
                "it must not be empty or have a zero byte, as in dlock/",
            ));
        }
        if self.names.prefix.contains('\0') {
            return Err(("prefix", "it must not have a zero byte"));
        }
        if !cfg!(feature = "tls") && self.config.tls.is_some() {
            return Err(("tls", "encryption needs the feature \"tls\" of dlock-etcd"));
        }
        self.config.tls.as_ref().map_or(Ok(()), Tls::check)
    }

    async fn open(self) -> Result<EtcdLocks, StoreError> {
        let runtime = runtime::Handle::current();
        let links = Links::new(self.config, self.names.namespace.clone());
        links.get(Instant::now() + links.config.timeout).await?;
        let (doubts, ended, grants) = (
            DoubtSender::new(),
            CancellationToken::new(),
            Arc::new(Grants::default()),
        );
        let pool = Pool::new(
            links.clone(),
            self.names.clone(),
            self.service,
            doubts.clone(),
            ended.clone(),
        );
        let positions = Arc::new(Positions::default());
        let waiters = Waiters::start(
            links.clone(),
            self.names.clone(),
            positions.clone(),
            ended.clone(),
            &runtime,
        );
        let inner = Arc::new(Inner {
            links: links.clone(),
            names: self.names,
            pool: Arc::new(pool),
            grants: grants.clone(),
            queues: LockQueues::default(),
            acquires: Batches::new(links.clone(), runtime.clone()),
            releases: Batches::new(links.clone(), runtime.clone()),
            answers: Answers::new(links.clone()),
            waiters,
            positions: positions.clone(),
            doubts: doubts.clone(),
            runtime: runtime.clone(),
            _ended: ended.clone().drop_guard(),
        });
        let sweeping = sweep(Arc::downgrade(&inner), grants);
        let ending = end_silent(Arc::downgrade(&inner), positions);
        runtime.spawn(async move {
            tokio::select! {
                () = ended.cancelled() => {}
                () = sweeping => {}
                () = ending => {}
                () = doubt(links, doubts) => {}
            }
        });
        Ok(EtcdLocks(inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn login_or_url_among_the_servers_is_refused_and_not_shown() {
        for (server, says) in [
            ("shop:secret@etcd1:2379", "user(…)"),
            ("etcd://shop:secret@etcd1:2379", "user(…)"),
            ("http://secret:2379", "host and port"),
            ("secret:2379/shop", "host and port"),
        ] {
            let builder = EtcdLocks::builder(["etcd2:2379", server]);
            assert!(!format!("{builder:?}").contains("secret"));
            let (option, reason) = builder.check().unwrap_err();
            assert_eq!(option, "servers");
            assert!(reason.contains(says) && !reason.contains("secret"), "{reason}");
        }
        for server in ["localhost:2379", "[::1]:2379"] {
            assert!(EtcdLocks::builder([server]).check().is_ok());
        }
    }
}
