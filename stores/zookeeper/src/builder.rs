//! Options of the store.

use std::time::Duration;

use dlock::store::queue::check_timeout;
use dlock::store::{Reason, StoreError};
use dlock::{DEFAULT_TIMEOUT, Error};

use crate::session::Config;
use crate::store::ZookeeperLocks;
use crate::wire::Acl;

/// The default port of a server.
const PORT: u16 = 2181;
/// The default root.
const ROOT: &str = "/dlock";
/// The default of `jute.maxbuffer`, in bytes.
const LARGEST_REQUEST: usize = 0xf_ffff;
/// No servers have a shorter `tickTime`: with less, a lease would be longer than they keep the session.
const SHORTEST_TICK: Duration = Duration::from_millis(10);
/// The default session timeout.
const SESSION: Duration = Duration::from_secs(30);

/// Options of [`ZookeeperLocks`].
///
/// ```no_run
/// use dlock_zookeeper::ZookeeperLocks;
/// use std::time::Duration;
///
/// # async fn example() -> Result<(), dlock::Error> {
/// let store = ZookeeperLocks::builder("zk1:2181,zk2:2181,zk3:2181")
///     .root("/shop/locks")
///     .session(Duration::from_secs(15))
///     .tick(Duration::from_secs(2))
///     .connect()
///     .await?;
/// # let _ = store; Ok(()) }
/// ```
#[must_use = "a builder does nothing until it connects"]
pub struct ZookeeperLocksBuilder {
    servers: String,
    root: String,
    prefix: String,
    session: Duration,
    tick: Option<Duration>,
    timeout: Duration,
    credentials: Option<(String, String)>,
    acl: Option<Acl>,
    largest_request: usize,
}

/// An invalid option and the reason.
type Invalid = (&'static str, String);

impl ZookeeperLocks {
    /// Connects to one of these servers (`host:port`, separated by commas), with all options at their defaults. The
    /// locks are under the node `root`, which is created if it is missing.
    ///
    /// The runtime in which this is called serves the connection from then on.
    ///
    /// # Errors
    ///
    /// When no server can be reached, or a server refuses.
    pub async fn connect(servers: &str, root: &str) -> Result<ZookeeperLocks, Error> {
        ZookeeperLocks::builder(servers).root(root).connect().await
    }

    /// Returns options for these servers: `host:port`, separated by commas.
    pub fn builder(servers: &str) -> ZookeeperLocksBuilder {
        ZookeeperLocksBuilder::new(servers)
    }
}

impl ZookeeperLocksBuilder {
    fn new(servers: &str) -> ZookeeperLocksBuilder {
        ZookeeperLocksBuilder {
            servers: servers.to_owned(),
            root: ROOT.to_owned(),
            prefix: String::new(),
            session: SESSION,
            tick: None,
            timeout: DEFAULT_TIMEOUT,
            credentials: None,
            acl: None,
            largest_request: LARGEST_REQUEST,
        }
    }

    /// Sets the node under which the locks are: `"/shop/locks"`; `/dlock` by default. If it is missing, it is created,
    /// with its parents.
    pub fn root(mut self, path: impl Into<String>) -> Self {
        self.root = path.into();
        self
    }

    /// Sets a prefix of all keys, for services that share a root; none by default.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Sets how long the servers keep the locks of a silent client; 30 s by default. The servers limit this to between
    /// 2 and 20 of their ticks: 4 s to 40 s by default.
    pub fn session(mut self, session: Duration) -> Self {
        self.session = session;
        self
    }

    /// Sets an upper bound for the `tickTime` of the servers: within this time a server reports to its leader that a
    /// client is alive. By default half of the session, which is always enough; at least 10 ms, and at most three quarters
    /// of the session that the servers grant. A holder must renew within the session less this time.
    pub fn tick(mut self, tick: Duration) -> Self {
        self.tick = Some(tick);
        self
    }

    /// Sets how long one operation may take, including connecting; 1 s by default, at most a year.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets a user and a password, for the scheme `digest`. Only clients with the same credentials have access to the
    /// nodes that are created, unless [`open`](Self::open) is set.
    pub fn credentials(mut self, user: impl Into<String>, password: impl Into<String>) -> Self {
        self.credentials = Some((user.into(), password.into()));
        self
    }

    /// Gives all clients access to the nodes that are created, even if the client has
    /// [`credentials`](Self::credentials). The default without credentials.
    pub fn open(mut self) -> Self {
        self.acl = Some(Acl::Open);
        self
    }

    /// Sets the `jute.maxbuffer` of the servers, in bytes: [`write_as`](ZookeeperLocks::write_as) refuses larger writes,
    /// for which the servers would close the connection. 1,048,575 by default, as on the servers. Renewals need up to
    /// 400,000 bytes, whatever this says.
    pub fn largest_request(mut self, bytes: usize) -> Self {
        self.largest_request = bytes;
        self
    }

    /// Connects; see [`ZookeeperLocks::connect`].
    ///
    /// # Errors
    ///
    /// When no server can be reached, a server refuses, or an option is invalid.
    pub async fn connect(self) -> Result<ZookeeperLocks, Error> {
        let (config, root, prefix) = self
            .check()
            .map_err(|(option, reason)| Error::invalid_option(option, &reason))?;
        let opened = ZookeeperLocks::open(config, root, prefix).await;
        opened.map_err(StoreError::into_connect_error)
    }

    /// Connects with options from a URL.
    pub(crate) async fn open_by_url(self) -> Result<ZookeeperLocks, StoreError> {
        let (config, root, prefix) = self.check().map_err(|(option, reason)| {
            StoreError::not_done(
                Reason::WrongUrl,
                format!("its option {option} is invalid: {reason}"),
            )
        })?;
        ZookeeperLocks::open(config, root, prefix).await
    }

    fn check(self) -> Result<(Config, String, String), Invalid> {
        check_timeout(self.timeout).map_err(|reason| ("timeout", reason.to_owned()))?;
        if self.session < Duration::from_millis(100) {
            return Err(("session", "it must be at least 100ms".to_owned()));
        }
        if self.tick.is_some_and(|tick| tick >= self.session) {
            return Err(("tick", "it must be shorter than the session".to_owned()));
        }
        if self.tick.is_some_and(|tick| tick < SHORTEST_TICK) {
            let why = format!("it must be the tickTime of the servers, or more: at least {SHORTEST_TICK:?}");
            return Err(("tick", why));
        }
        let (acl, credentials) = match self.credentials {
            None => (Acl::Open, None),
            Some((user, _)) if user.is_empty() || user.contains(':') => {
                return Err(("user", "it must not be empty, and have no colon".to_owned()));
            }
            Some((_, password)) if password.is_empty() => {
                return Err(("password", "it must not be empty".to_owned()));
            }
            Some((user, password)) => (
                self.acl.unwrap_or(Acl::Creator),
                Some(format!("{user}:{password}")),
            ),
        };
        let config = Config {
            hosts: servers(&self.servers)?,
            session: self.session,
            timeout: self.timeout,
            tick: self.tick,
            credentials,
            acl,
            largest_request: self.largest_request,
        };
        Ok((config, root(&self.root)?, self.prefix))
    }
}

impl std::fmt::Debug for ZookeeperLocksBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The password is left out, and the servers: a login among them is refused only when it connects.
        f.debug_struct("ZookeeperLocksBuilder")
            .field("root", &self.root)
            .field("session", &self.session)
            .field("tick", &self.tick)
            .finish_non_exhaustive()
    }
}

/// Parses a list of servers, each with its port.
fn servers(list: &str) -> Result<Vec<String>, Invalid> {
    let named = list.split(',').map(str::trim);
    named
        .map(|server| {
            let (host, port) = match server.rsplit_once(':') {
                // Colons inside brackets belong to the address.
                Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
                _ => (server, None),
            };
            // The message does not quote the text: a login without a host looks like a host and a port.
            let invalid = |why: &str| ("servers", format!("one of them {why}, as in zk1:2181,zk2:2181"));
            if server.contains('@') {
                return Err(invalid("has a login, which belongs into credentials(…)"));
            }
            if host.is_empty() || host.contains('/') {
                return Err(invalid("names no host"));
            }
            let port = port.map_or(Ok(PORT), str::parse);
            let port = port.map_err(|_| invalid("has no valid port"))?;
            Ok(format!("{host}:{port}"))
        })
        .collect()
}

/// Returns the path of the root, without a trailing slash.
fn root(path: &str) -> Result<String, Invalid> {
    let invalid = |why: &str| Err(("root", format!("{why}, as in /shop/locks")));
    let path = path.strip_suffix('/').unwrap_or(path);
    let Some(names) = path.strip_prefix('/') else {
        return invalid("it must be a path that begins with a slash and names a node");
    };
    let is_name = |name: &str| !matches!(name, "" | "." | "..") && !name.chars().any(char::is_control);
    if !names.split('/').all(is_name) {
        return invalid("each of its parts must be the name of a node");
    }
    if names == "zookeeper" || names.starts_with("zookeeper/") {
        return invalid("/zookeeper is the servers' own: choose another node");
    }
    Ok(path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_have_ports() {
        let wanted = ["a:2181", "b:2182", "[::1]:2181", "[::1]:99"]
            .map(str::to_owned)
            .to_vec();
        assert_eq!(servers("a, b:2182,[::1],[::1]:99"), Ok(wanted));
        for list in ["", "a,,b", ":2181", "a:x", "a:70000", "a/b"] {
            assert!(servers(list).is_err(), "{list}");
        }
    }

    #[test]
    fn root_is_the_path_of_a_node() {
        assert_eq!(root("/shop/locks/"), Ok("/shop/locks".to_owned()));
        for path in [
            "",
            "/",
            "shop",
            "/a//b",
            "/a/../b",
            "/./a",
            "/zookeeper/locks",
            "/a\n",
        ] {
            assert!(root(path).is_err(), "{path}");
        }
    }

    #[test]
    fn options_that_cannot_be_are_refused() {
        let builder = || ZookeeperLocks::builder("a");
        assert!(builder().check().is_ok());
        let refused = |builder: ZookeeperLocksBuilder| builder.check().err().map(|(option, _)| option);
        let s = Duration::from_secs;
        assert_eq!(refused(builder().timeout(Duration::ZERO)), Some("timeout"));
        assert_eq!(refused(builder().timeout(Duration::MAX)), Some("timeout"));
        assert_eq!(refused(builder().session(s(0))), Some("session"));
        assert_eq!(refused(builder().tick(s(30))), Some("tick"));
        assert_eq!(refused(builder().credentials("a:b", "c")), Some("user"));
        assert!(!format!("{:?}", builder().credentials("a", "secret")).contains("secret"));
    }

    #[test]
    fn login_among_the_servers_is_refused_and_not_shown() {
        for servers in ["svc:secret@zk1:2181", "zk1,svc:secret@zk2", "svc:secret@"] {
            let builder = || ZookeeperLocks::builder(servers);
            assert!(!format!("{:?}", builder()).contains("secret"));
            let (option, reason) = builder().check().err().expect("a refusal");
            assert_eq!(option, "servers");
            assert!(
                reason.contains("credentials") && !reason.contains("secret"),
                "{reason}"
            );
        }
    }
}
