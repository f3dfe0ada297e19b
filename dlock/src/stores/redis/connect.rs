//! Connecting to a server that holds locks, and the checks of a new connection.

use std::io;
use std::sync::{Arc, Once};
use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::endpoint::Endpoint;
use super::hint::PERMISSIONS;
use super::lent::{BoxStream, Lent};
use super::login::{Logins, Session};
use super::node::{Aside, classify, closing_trial, may_close};
use super::script;
use super::settings::{ConnectSettings, Driven, Open, driven};
use crate::base::clock;
use crate::base::observed::log;
use crate::store::options::MinReplicas;
use crate::store::url::Address;
use crate::store::{Outcome, Reason, StoreError};

/// Makes connections to one server, or to whichever server has its role.
#[derive(Clone)]
pub(super) struct Connector {
    pub(super) access: Arc<ConnectSettings>,
    pub(super) endpoint: Endpoint,
    /// The server is one of a Cluster.
    in_cluster: bool,
    warned: Arc<Once>,
}

/// An established, idle connection.
pub(super) struct Link {
    pub(super) stream: BoxStream,
    /// Commands that keep the login valid.
    pub(super) asides: Option<mpsc::UnboundedReceiver<Aside>>,
    _login: Option<AbortOnDropHandle<()>>,
}

#[cfg(test)]
impl Link {
    /// Without commands that keep a login valid.
    pub(super) fn plain(stream: BoxStream) -> Link {
        Link {
            stream,
            asides: None,
            _login: None,
        }
    }
}

/// A server that is connected.
pub(super) struct Connected {
    pub(super) link: Link,
    /// For operations that replicas must acknowledge, if configured.
    pub(super) acknowledged: Option<Link>,
    pub(super) address: Address,
    /// The server's clock in µs, read after `asked_at`.
    pub(super) server_time: u64,
    pub(super) asked_at: Instant,
    /// Distinguishes the server process from a restarted one; empty if not permitted to ask.
    pub(super) run_id: String,
    /// The id of the connection on the server; `None` where acquires do not go by commands, or the user may not close
    /// connections.
    pub(super) id: Option<i64>,
    /// Whether it is a read-only replica.
    pub(super) is_replica: bool,
    /// Whether it refuses everything until it has its data in memory.
    pub(super) is_loading: bool,
}

/// A server's facts about itself.
struct Looked {
    run_id: String,
    /// Whether `RESTORE` writes the end of a lease into the append-only file; before version 7 the lease began anew with a restart.
    keeps_leases: bool,
    is_replica: bool,
    is_loading: bool,
}

/// A connection for notifications.
pub(super) struct Listening {
    pub(super) open: Open,
    pub(super) address: Address,
    /// The [changes](Endpoint::changes) before it was opened.
    pub(super) changes: u64,
}

impl Connector {
    pub(super) fn new(access: Arc<ConnectSettings>, endpoint: Endpoint) -> Connector {
        Connector {
            access,
            endpoint,
            in_cluster: false,
            warned: Arc::new(Once::new()),
        }
    }

    /// To a server of a Cluster.
    pub(super) fn to_node(access: Arc<ConnectSettings>, address: Address) -> Connector {
        Connector {
            in_cluster: true,
            ..Connector::new(access, Endpoint::fixed(address))
        }
    }

    /// Whether plain locks may be released by commands: not in a Cluster, and not where replicas acknowledge.
    pub(super) fn releases_by_commands(&self) -> bool {
        !self.in_cluster && self.access.replicas.is_none()
    }

    /// Whether plain locks may be acquired by commands, too: not where sentinels name the master. A former master that still
    /// grants would draw tokens that are behind its clock, and so behind those of the new one.
    fn acquires_by_commands(&self) -> bool {
        self.releases_by_commands() && self.endpoint.is_fixed()
    }

    /// A connection for notifications, which runs by itself.
    pub(super) async fn open(&self) -> Result<Listening, StoreError> {
        self.at_its_place(async |address| {
            let changes = self.endpoint.changes();
            let open = self.access.open(&address).await;
            let open = open.map_err(|error| explain(&address, error))?;
            Ok(Listening {
                open,
                address,
                changes,
            })
        })
        .await
    }

    /// Connects and checks the server.
    pub(super) async fn connect(&self) -> Result<Connected, StoreError> {
        self.at_its_place(async |address| self.try_connect(address).await)
            .await
    }

    /// Connects to the current address.
    async fn at_its_place<T>(
        &self,
        work: impl AsyncFnOnce(Address) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        // A sentinel must be connected to and asked.
        let found = tokio::time::timeout(self.access.timeout * 4, self.endpoint.find()).await;
        let address = found.map_err(|_| self.endpoint.missing())??;
        let outcome = work(address).await;
        if outcome.is_err() {
            self.endpoint.doubt();
        }
        outcome
    }

    async fn try_connect(&self, address: Address) -> Result<Connected, StoreError> {
        let explained = |error| explain(&address, error);
        let (looked, acknowledged) = futures_util::future::try_join(self.look(&address), async {
            match self.access.replicas {
                Some(wanted) => self
                    .acknowledged(wanted, &address)
                    .await
                    .map(Some)
                    .map_err(explained),
                None => Ok(None),
            }
        })
        .await?;
        Ok(Connected {
            acknowledged,
            ..looked
        })
    }

    /// Connects, and asks the server for all facts in one round trip.
    async fn look(&self, address: &Address) -> Result<Connected, StoreError> {
        let explained = |error| explain(address, error);
        let Driven {
            mut connection,
            mut driver,
            stream,
            mut trial,
            login,
        } = self.access.open_driven(address).await.map_err(explained)?;
        let asked_at = clock::now();
        let mut commands = redis::pipe();
        commands.cmd("TIME");
        // Only to save the first call a round trip.
        commands.add_command(script::load());
        commands.cmd("INFO").arg("default");
        if self.acquires_by_commands() {
            commands.cmd("CLIENT").arg("ID");
            commands.add_command(closing_trial());
        }
        let asking = connection.send_packed_commands(&commands, 0, commands.len());
        let answers = self.access.in_time(driven(&mut driver, asking)).await;
        let mut answers = answers.map_err(explained)?.into_iter();
        let mut answer = || answers.next().unwrap_or(Value::Nil);
        let (time, _, info) = (answer(), answer(), answer());
        let (id, closing) = (answer(), answer());
        let role = match needs_role(&info, &self.endpoint) {
            true => {
                let role = redis::cmd("ROLE");
                let asking = driven(&mut driver, connection.send_packed_command(&role));
                Some(self.access.in_time(asking).await.map_err(explained)?)
            }
            false => None,
        };
        let Looked {
            run_id,
            keeps_leases,
            is_replica,
            is_loading,
        } = self.look_at_server(address, &info, role)?;
        let time: (u64, u64) = Value::extract_error(time)
            .and_then(|time| Ok(redis::from_redis_value(time)?))
            .map_err(explained)?;
        if !is_replica {
            trial.passed();
        }
        Ok(Connected {
            link: self.link(&stream, login).map_err(explained)?,
            acknowledged: None,
            address: address.clone(),
            server_time: time.0.saturating_mul(1_000_000).saturating_add(time.1),
            asked_at,
            id: match (id, closing) {
                (Value::Int(id), closing) if may_close(&closing) && !run_id.is_empty() && keeps_leases => {
                    Some(id)
                }
                _ => None,
            },
            run_id,
            is_replica,
            is_loading,
        })
    }

    /// A second connection, on which replicas are waited for.
    async fn acknowledged(&self, wanted: MinReplicas, address: &Address) -> Result<Link, RedisError> {
        let Driven {
            mut connection,
            mut driver,
            stream,
            mut trial,
            login,
        } = self.access.open_driven(address).await?;
        // Returns at once how many there are.
        let mut wait = redis::cmd("WAIT");
        wait.arg(0).arg(1);
        let there = wait.query_async::<u32>(&mut connection);
        let there = self.access.in_time(driven(&mut driver, there));
        let there = there.await.map_err(|error| match error.kind() {
            ErrorKind::Server(kind) => RedisError::from((
                ErrorKind::Server(kind),
                "min_replicas needs WAIT",
                error.detail().unwrap_or_default().to_owned(),
            )),
            _ => error,
        })?;
        trial.passed();
        if there < wanted.count {
            let wanted = wanted.count;
            log!(warn, %address, there, wanted, "this server has too few replicas for min_replicas just now: nothing can be locked");
        }
        self.link(&stream, login)
    }

    /// Takes the connection over from the library: all its commands were answered.
    fn link(&self, stream: &Lent, login: Option<(Logins, Duration)>) -> Result<Link, RedisError> {
        let stream = stream.take_back();
        let stream = stream.ok_or_else(|| RedisError::from(io::Error::from(io::ErrorKind::NotConnected)))?;
        let (sender, receiver) = mpsc::unbounded_channel();
        let login =
            login.map(|(logins, valid_for)| logins.keep(Session::By(sender), valid_for, self.access.timeout));
        Ok(Link {
            stream,
            asides: login.is_some().then_some(receiver),
            _login: login,
        })
    }

    /// Reads the server's facts. Warns once of future problems, and refuses a server that does not fit this kind of
    /// connection.
    fn look_at_server(
        &self,
        address: &Address,
        info: &Value,
        role: Option<Value>,
    ) -> Result<Looked, StoreError> {
        let info = text(info);
        let field = |name: &str| {
            info.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .map(str::trim)
        };
        if field("redis_mode") == Some("sentinel") {
            return Err(is_a_sentinel(address));
        }
        let is_node = field("cluster_enabled") == Some("1") || field("redis_mode") == Some("cluster");
        if is_node && !self.in_cluster {
            return Err(is_of_a_cluster(&self.access, address));
        }
        let is_replica = match field("role") {
            Some(role) => matches!(role, "slave" | "replica"),
            None => matches!(role, Some(Value::Array(parts)) if matches!(
                parts.first(),
                Some(Value::BulkString(name)) if &name[..] == b"slave"
            )),
        };
        self.warned.call_once(|| {
            match field("maxmemory_policy") {
                Some("noeviction") => {}
                Some(policy) if field("maxmemory") == Some("0") => {
                    log!(debug, %address, policy, "eviction is set up, but memory has no limit");
                }
                Some(policy) => log!(
                    warn, %address, policy,
                    "this server may evict locks when its memory is full: set maxmemory-policy noeviction"
                ),
                None => log!(
                    warn, %address,
                    "this server cannot be asked whether it may evict locks: see that maxmemory-policy is noeviction"
                ),
            }
            if is_replica && self.endpoint.is_fixed() {
                log!(warn, %address, "this server is a replica: locks need its master");
            }
        });
        if is_replica && !self.endpoint.is_fixed() {
            return Err(StoreError::not_done(
                Reason::Unreachable,
                format!("{address}: the sentinels name it as the master, and it says that it is a replica"),
            ));
        }
        // In a Cluster it refers writes to its master.
        if let Some(what) = second_master(field).filter(|_| !self.in_cluster) {
            return Err(is_beside_others(address, what));
        }
        let version =
            field("redis_version").and_then(|version| version.split('.').next()?.parse::<u32>().ok());
        Ok(Looked {
            keeps_leases: version.is_some_and(|major| major >= 7),
            run_id: field("run_id").unwrap_or_default().to_owned(),
            is_replica,
            is_loading: field("loading") == Some("1"),
        })
    }
}

fn text(info: &Value) -> String {
    match info {
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::VerbatimString { text, .. } | Value::SimpleString(text) => text.clone(),
        _ => String::new(),
    }
}

/// Whether `INFO` does not tell the server's role, although it must be a master.
fn needs_role(info: &Value, endpoint: &Endpoint) -> bool {
    !endpoint.is_fixed() && !text(info).contains("role:")
}

/// A sentinel where a server that holds data was expected.
fn is_a_sentinel(address: &Address) -> StoreError {
    StoreError::not_done(
        Reason::WrongUrl,
        format!(
            "{address} is a sentinel, which holds no locks: use redis+sentinel://{address}/ and the name of its master"
        ),
    )
}

/// What a server is, by its `INFO`, that takes writes beside another one.
fn second_master<'a>(field: impl Fn(&str) -> Option<&'a str>) -> Option<&'static str> {
    let takes_writes = || field("slave_read_only").or_else(|| field("replica_read_only")) == Some("0");
    match field("role")? {
        "slave" | "replica" if takes_writes() => Some("a replica that takes writes (replica-read-only no)"),
        "active-replica" => Some("an active replica, which takes writes"),
        _ => None,
    }
}

/// A server that grants locks beside another one, which learns of them too late.
fn is_beside_others(address: &Address, what: &str) -> StoreError {
    StoreError::not_done(
        Reason::Refused,
        format!(
            "{address} is {what}: two clients could hold a lock; give the address of the one server that is to take writes"
        ),
    )
}

/// Shards behind one address, which are no Cluster to their clients: keys of one request may be on several of them.
pub(super) fn has_shards(address: &Address) -> StoreError {
    StoreError::not_done(
        Reason::WrongUrl,
        format!(
            "{address} has its keys on several shards behind this address: use a prefix with a tag, which has all keys \
             on one of them, as in ?prefix={{shop}}:, or the Cluster API of the server and its URL"
        ),
    )
}

/// A server of a Cluster where a single server was expected.
pub(super) fn is_of_a_cluster(access: &ConnectSettings, address: &Address) -> StoreError {
    let url = match address {
        Address::Tcp { .. } => format!("{}://{address}", access.scheme_of_cluster()),
        Address::Unix(_) => format!("{}:// and its TCP address", access.scheme_of_cluster()),
    };
    StoreError::not_done(
        Reason::WrongUrl,
        format!("{address} is a node of a Cluster, whose keys are on several servers: use {url}"),
    )
}

/// The error for a user when a connection failed.
pub(super) fn explain(address: &Address, error: RedisError) -> StoreError {
    explain_with(address, error, "as in redis://:password@host")
}

/// The error when the connection failed, with a hint on how to give the password if that is the reason.
pub(super) fn explain_with(address: &Address, error: RedisError, password: &str) -> StoreError {
    let mut explained = classify(&error);
    // Nothing of ours was sent on it.
    explained.outcome = Outcome::NotDone;
    // A peer that is not Redis makes the parser fail with several lines.
    let message: Vec<_> = explained.message.split_whitespace().collect();
    explained.message = format!("{}: {}", address, message.join(" "));
    if error.kind() == ErrorKind::AuthenticationFailed || error.code() == Some("NOAUTH") {
        explained.reason = Reason::Refused;
    }
    match error.kind() {
        // For example, no such database.
        ErrorKind::Server(ServerErrorKind::ResponseError) => {
            explained.reason = Reason::Refused;
            if explained.message.contains("'select' command") {
                explained.message.push_str(&format!(
                    " (a user needs +select for a database by its number, see {PERMISSIONS})"
                ));
            }
        }
        ErrorKind::Parse | ErrorKind::UnexpectedReturnType => {
            explained
                .message
                .push_str(" (this does not answer like a Redis or Valkey server)");
        }
        _ if error.code() == Some("NOAUTH") => {
            let hint = format!(" (give the password, {password})");
            explained.message.push_str(&hint);
        }
        _ => {}
    }
    explained
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_that_takes_writes_beside_another_one_is_told_from_its_role() {
        for (info, refused) in [
            ("role:master\nslave_read_only:0", false),
            ("role:slave\nslave_read_only:1", false),
            ("role:slave\nslave_read_only:0", true),
            ("role:replica\nreplica_read_only:0", true),
            ("role:slave", false),
            ("role:active-replica\nslave_read_only:1", true),
            ("", false),
        ] {
            let fields = || info.lines().filter_map(|line| line.split_once(':'));
            let field = |name: &str| fields().find(|(key, _)| *key == name).map(|(_, value)| value);
            assert_eq!(second_master(field).is_some(), refused, "{info}");
        }
    }
}
