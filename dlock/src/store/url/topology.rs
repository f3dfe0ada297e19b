//! The servers that a URL names.
#![cfg_attr(not(feature = "redis"), allow(dead_code, reason = "parsed all the same"))]

use std::fmt;
use std::time::Duration;

use crate::store::Scheme;

/// The servers with the locks.
#[derive(Debug)]
pub(crate) enum Topology {
    Memory { name: Option<String> },
    Server(ServerUrl),
    Sentinel(SentinelUrl),
    Cluster(ClusterUrl),
    Quorum(QuorumUrl),
    Registered(RegisteredUrl),
}

impl Topology {
    /// The login for the servers that have locks.
    pub(crate) fn login(&self) -> Option<&Login> {
        match self {
            Topology::Memory { .. } | Topology::Registered(_) => None,
            Topology::Server(url) => Some(&url.login),
            Topology::Sentinel(url) => Some(&url.login),
            Topology::Cluster(url) => Some(&url.login),
            Topology::Quorum(url) => Some(&url.login),
        }
    }
}

/// One server.
#[derive(Debug)]
pub(crate) struct ServerUrl {
    pub(crate) address: Address,
    pub(crate) login: Login,
}

/// The master that the sentinels name.
#[derive(Debug)]
pub(crate) struct SentinelUrl {
    pub(crate) sentinels: Vec<Address>,
    /// The sentinels' name for the master.
    pub(crate) service: String,
    pub(crate) login: Login,
    pub(crate) sentinel_login: Login,
}

/// The servers of a cluster; some of them suffice.
#[derive(Debug)]
pub(crate) struct ClusterUrl {
    pub(crate) seeds: Vec<Address>,
    pub(crate) login: Login,
}

/// Independent servers, of which a majority decides.
#[derive(Debug)]
pub(crate) struct QuorumUrl {
    pub(crate) members: Vec<Address>,
    pub(crate) login: Login,
    pub(crate) max_lease: Option<Duration>,
    pub(crate) trust_fresh: Option<bool>,
}

/// A store of a registered scheme.
#[derive(Debug)]
pub(crate) struct RegisteredUrl {
    pub(crate) scheme: Scheme,
    pub(crate) name: String,
    pub(crate) address: Hidden<String>,
    /// The query without the options that every URL may have.
    pub(crate) parameters: Hidden<Vec<(String, String)>>,
}

/// A part of a URL that may contain a password.
pub(crate) struct Hidden<T>(pub(crate) T);

/// A login.
#[derive(Clone, Default)]
pub(crate) struct Login {
    pub(crate) tls: bool,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) database: i64,
}

/// How to reach a server.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Address {
    Tcp { host: String, port: u16 },
    Unix(String),
}

impl Address {
    /// All names of one server that are known to be equal without a look-up.
    pub(super) fn as_one(&self) -> Address {
        match self {
            Address::Tcp { host, port } => {
                let name = host.trim_end_matches('.').to_ascii_lowercase();
                let host = match name.as_str() {
                    "127.0.0.1" | "::1" => "localhost".to_owned(),
                    _ => name,
                };
                Address::Tcp { host, port: *port }
            }
            unix @ Address::Unix(_) => unix.clone(),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Address::Tcp { host, port } => write!(f, "{host}:{port}"),
            Address::Unix(path) => f.write_str(path),
        }
    }
}

impl<T> fmt::Debug for Hidden<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login")
            .field("tls", &self.tls)
            .field("user", &self.user)
            .field("password", &self.password.as_ref().map(|_| "…"))
            .field("database", &self.database)
            .finish()
    }
}
