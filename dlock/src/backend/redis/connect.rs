//! How a connection to a server that holds locks is made, and what is looked at when it stands.

use std::sync::{Arc, Once};
use std::task::{Context, Poll};

use redis::aio::MultiplexedConnection;
use redis::{ConnectionInfo, ErrorKind, PushKind, RedisError, ServerErrorKind, Value};
use tokio::time::Instant;

use super::access::{Access, Driver, Open, Pushes, ask, driven};
use super::node::classify;
use super::place::Place;
use super::script;
use crate::backend::{BackendError, Outcome, Reason};
use crate::builder::MinReplicas;
use crate::clock;
use crate::url::Address;

/// Makes connections to one server, or to whichever has its part.
#[derive(Clone)]
pub(super) struct Connector {
    pub(super) access: Arc<Access>,
    pub(super) place: Place,
    warned: Arc<Once>,
}

/// A connection that stands.
pub(super) struct Link {
    pub(super) connection: MultiplexedConnection,
    /// `None` where it runs by itself.
    pub(super) driver: Option<Driver>,
    pub(super) disconnected: Disconnected,
}

/// A server that is connected.
pub(super) struct Connected {
    pub(super) link: Link,
    /// For what replicas have to acknowledge, where they have to.
    pub(super) acknowledged: Option<Link>,
    pub(super) address: Address,
    /// The server's clock in µs, read after `asked_at`.
    pub(super) server_time: u64,
    pub(super) asked_at: Instant,
    /// What tells the server process from one that was started anew; empty where it may not be asked.
    pub(super) run_id: String,
}

/// Tells when the connection is gone, also while nothing is sent.
pub(super) struct Disconnected(Pushes);

impl Disconnected {
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            match std::task::ready!(self.0.poll_recv(cx)) {
                Some(push) if push.kind != PushKind::Disconnection => {}
                _ => return Poll::Ready(()),
            }
        }
    }
}

impl Connector {
    pub(super) fn new(access: Arc<Access>, place: Place) -> Connector {
        Connector {
            access,
            place,
            warned: Arc::new(Once::new()),
        }
    }

    /// A connection for news, which runs by itself, and where it goes to.
    pub(super) async fn open(&self) -> Result<(Open, Address), BackendError> {
        self.bounded(async |address, info| {
            let open = self.access.open(info).await?;
            Ok((open, address))
        })
        .await
    }

    /// Connects and looks at the server.
    pub(super) async fn connect(&self) -> Result<Connected, BackendError> {
        self.bounded(async |address, info| self.try_connect(address, info).await)
            .await
    }

    /// Does it at the present address, within the timeout.
    async fn bounded<T>(
        &self,
        work: impl AsyncFnOnce(Address, &ConnectionInfo) -> Result<T, RedisError>,
    ) -> Result<T, BackendError> {
        let timeout = self.access.timeout;
        let end = tokio::time::Instant::now() + timeout;
        let found = tokio::time::timeout_at(end, self.place.find()).await;
        let address = found.map_err(|_| self.place.missing())??;
        let info = self.access.info(&address)?;
        let outcome = match tokio::time::timeout_at(end, work(address.clone(), &info)).await {
            Ok(outcome) => outcome.map_err(|error| explain(&address, error)),
            Err(_) => Err(BackendError::not_done(
                Reason::Unreachable,
                format!("{address} did not answer within {timeout:?}"),
            )),
        };
        if outcome.is_err() {
            self.place.doubt();
        }
        outcome
    }

    async fn try_connect(&self, address: Address, info: &ConnectionInfo) -> Result<Connected, RedisError> {
        let Open {
            mut connection,
            mut driver,
            pushes,
        } = self.access.open_driven(info).await?;
        let asked_at = clock::now();
        let look = async {
            let time: (u64, u64) = redis::cmd("TIME").query_async(&mut connection).await?;
            // Only to save the first call a round trip.
            ask(&mut connection, &script::load()).await?;
            let run_id = self.look_at_server(&address, &mut connection).await?;
            Ok::<_, RedisError>((time, run_id))
        };
        let (time, run_id) = driven(&mut driver, look).await?;
        let acknowledged = match self.access.replicas {
            Some(wanted) => Some(self.acknowledged(wanted, &address, info).await?),
            None => None,
        };
        Ok(Connected {
            link: Link {
                connection,
                driver,
                disconnected: Disconnected(pushes),
            },
            acknowledged,
            address,
            server_time: time.0 * 1_000_000 + time.1,
            asked_at,
            run_id,
        })
    }

    /// A second connection, on which replicas can be asked.
    async fn acknowledged(
        &self,
        wanted: MinReplicas,
        address: &Address,
        info: &ConnectionInfo,
    ) -> Result<Link, RedisError> {
        let Open {
            mut connection,
            mut driver,
            pushes,
        } = self.access.open_driven(info).await?;
        // Answers at once how many there are.
        let mut wait = redis::cmd("WAIT");
        wait.arg(0).arg(1);
        let there = wait.query_async::<u32>(&mut connection);
        let there = driven(&mut driver, there)
            .await
            .map_err(|error| match error.kind() {
                ErrorKind::Server(kind) => RedisError::from((
                    ErrorKind::Server(kind),
                    "min_replicas needs WAIT",
                    error.detail().unwrap_or_default().to_owned(),
                )),
                _ => error,
            })?;
        if there < wanted.count {
            let wanted = wanted.count;
            tracing::warn!(%address, there, wanted, "this server has too few replicas for min_replicas just now: nothing can be locked");
        }
        Ok(Link {
            connection,
            driver,
            disconnected: Disconnected(pushes),
        })
    }

    /// Warns once of what would hurt later, and sees that a master is one. The server's run id.
    async fn look_at_server(
        &self,
        address: &Address,
        connection: &mut MultiplexedConnection,
    ) -> Result<String, RedisError> {
        let info = ask(connection, redis::cmd("INFO").arg("default")).await?;
        let info = match &info {
            Some(Value::BulkString(bytes)) => String::from_utf8_lossy(bytes).into_owned(),
            Some(Value::VerbatimString { text, .. }) => text.clone(),
            Some(Value::SimpleString(text)) => text.clone(),
            _ => String::new(),
        };
        let field = |name: &str| {
            info.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .map(str::trim)
        };
        let mut is_replica = matches!(field("role"), Some("slave" | "replica"));
        self.warned.call_once(|| {
            match field("maxmemory_policy") {
                Some("noeviction") => {}
                Some(policy) if field("maxmemory") == Some("0") => {
                    tracing::debug!(%address, policy, "eviction is set up, but memory has no limit");
                }
                Some(policy) => tracing::warn!(
                    %address, policy,
                    "this server may evict locks when its memory is full: set maxmemory-policy noeviction"
                ),
                None => tracing::warn!(
                    %address,
                    "this server cannot be asked whether it may evict locks: see that maxmemory-policy is noeviction"
                ),
            }
            if is_replica && self.place.is_fixed() {
                tracing::warn!(%address, "this server is a replica: locks need its master");
            }
        });
        if !self.place.is_fixed() && field("role").is_none() {
            let role = ask(connection, &redis::cmd("ROLE")).await?;
            is_replica = matches!(role, Some(Value::Array(parts)) if matches!(
                parts.first(),
                Some(Value::BulkString(name)) if &name[..] == b"slave"
            ));
        }
        if is_replica && !self.place.is_fixed() {
            return Err(RedisError::from((
                ErrorKind::Server(ServerErrorKind::MasterDown),
                "the sentinels name it as the master",
                "and it says that it is a replica".to_owned(),
            )));
        }
        Ok(field("run_id").unwrap_or_default().to_owned())
    }
}

/// What a user is told of a connection that did not come to stand.
pub(super) fn explain(address: &Address, error: RedisError) -> BackendError {
    explain_with(address, error, "as in redis://:password@host")
}

/// The same where the password, if it is that, is to be given like this.
pub(super) fn explain_with(address: &Address, error: RedisError, password: &str) -> BackendError {
    let mut explained = classify(&error);
    // Nothing of ours was sent on it.
    explained.outcome = Outcome::NotDone;
    // What is no Redis makes the parser speak in several lines.
    let message: Vec<_> = explained.message.split_whitespace().collect();
    explained.message = format!("{}: {}", address, message.join(" "));
    if error.kind() == ErrorKind::AuthenticationFailed || error.code() == Some("NOAUTH") {
        explained.reason = Reason::Refused;
    }
    match error.kind() {
        // No such database, say.
        ErrorKind::Server(ServerErrorKind::ResponseError) => explained.reason = Reason::Refused,
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
