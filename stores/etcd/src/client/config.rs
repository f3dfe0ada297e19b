//! The servers, and how the client talks to them.

use std::fmt;
use std::time::Duration;

use dlock::store::{Reason, StoreError};
use tonic::transport::Endpoint;

use super::pem::Pem;

/// How often an idle connection with a watch is pinged. Servers end a connection that sends more than one ping in 5 s.
const PING: Duration = Duration::from_secs(10);

/// How long a server may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(3);
/// How long an attempt to connect to one server may take at most, with TLS and the login, which busy servers take long for.
const LONGEST_ATTEMPT: Duration = Duration::from_secs(10);

/// How long the reply to a ping may take.
const PONG: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));

/// Configures the servers and how the client talks to them.
#[derive(Clone)]
pub(crate) struct Config {
    /// The `host:port` of each server.
    pub(crate) servers: Vec<String>,
    pub(crate) login: Option<Login>,
    pub(crate) tls: Option<Tls>,
    /// How long one operation may take.
    pub(crate) timeout: Duration,
    /// Whether to accept servers that can end a renewed lease.
    pub(crate) allow_old_server: bool,
}

/// A user and its password.
#[derive(Clone)]
pub(crate) struct Login {
    pub(crate) user: String,
    pub(crate) password: String,
}

/// Certificates, in PEM.
#[derive(Clone, Default)]
pub(crate) struct Tls {
    /// The authority to trust, instead of the system's.
    pub(crate) authority: Option<Vec<u8>>,
    /// The client's certificate and its private key.
    pub(crate) own: Option<(Vec<u8>, Vec<u8>)>,
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the servers: a login among them is refused only when the builder connects.
        f.debug_struct("Config")
            .field("login", &self.login)
            .field("tls", &self.tls)
            .field("timeout", &self.timeout)
            .field("allow_old_server", &self.allow_old_server)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login")
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Contains a private key.
        f.debug_struct("Tls").finish_non_exhaustive()
    }
}

impl Tls {
    /// Checks what the builder was given; otherwise returns its method and the reason.
    pub(crate) fn check(&self) -> Result<(), (&'static str, &'static str)> {
        if let Some(authority) = &self.authority {
            Pem::Authority
                .check(authority)
                .map_err(|reason| ("ca_certificate", reason))?;
        }
        if let Some((certificate, key)) = &self.own {
            Pem::Certificate
                .check(certificate)
                .and_then(|()| Pem::PrivateKey.check(key))
                .map_err(|reason| ("client_certificate", reason))?;
        }
        Ok(())
    }
}

impl Config {
    /// Returns the servers as one text, for messages.
    pub(crate) fn address(&self) -> String {
        self.servers.join(", ")
    }

    /// How long an attempt to connect to one server may take: with several servers, one that hangs must leave time for
    /// the others.
    pub(crate) fn connect_timeout(&self) -> Duration {
        let servers = u32::try_from(self.servers.len()).unwrap_or(u32::MAX).max(1);
        (self.timeout / servers)
            .max(self.timeout / 4)
            .min(LONGEST_ATTEMPT)
    }

    /// Returns the endpoint of one server.
    pub(crate) fn endpoint(&self, server: &str) -> Result<Endpoint, StoreError> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let wrong = |error: &dyn fmt::Display| {
            StoreError::not_done(Reason::WrongUrl, format!("\"{server}\" is no server: {error}"))
        };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{server}"))
            .map_err(|error| wrong(&error))?
            .user_agent("dlock")
            .map_err(|error| wrong(&error))?
            .connect_timeout(self.connect_timeout().min(CONNECT))
            .tcp_nodelay(true)
            .http2_keep_alive_interval(PING)
            .keep_alive_timeout(self.timeout.clamp(PONG.0, PONG.1));
        match &self.tls {
            None => Ok(endpoint),
            Some(tls) => encrypted(endpoint, tls),
        }
    }
}

#[cfg(feature = "tls")]
fn encrypted(endpoint: Endpoint, tls: &Tls) -> Result<Endpoint, StoreError> {
    use tonic::transport::{Certificate, ClientTlsConfig, Identity};

    let mut config = match &tls.authority {
        Some(pem) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)),
        None => ClientTlsConfig::new().with_native_roots(),
    };
    if let Some((certificate, key)) = &tls.own {
        config = config.identity(Identity::from_pem(certificate, key));
    }
    endpoint.tls_config(config).map_err(|error| {
        let message = format!(
            "the certificates cannot be used: {}",
            super::failure::describe(&error)
        );
        StoreError::not_done(Reason::WrongUrl, message)
    })
}

#[cfg(not(feature = "tls"))]
fn encrypted(_endpoint: Endpoint, _tls: &Tls) -> Result<Endpoint, StoreError> {
    Err(StoreError::not_done(
        Reason::WrongUrl,
        "encryption needs the feature \"tls\" of dlock-etcd",
    ))
}
