//! The presence entries of clients on Redis or Valkey: plain keys with a TTL, and a stream for the audit log. They use
//! the same calls as the locks, to the servers that have their slots.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use super::command::Command;
use super::scan::Scan;
use super::script::millis;
use super::{Answer, RedisStore, Verb, glob_escaped, strange};
use crate::LockKey;
use crate::store::counter::CounterReply;
use crate::store::operations::{AUDITED, Connection, Entry, EntryName, MAILBOX, Operations};
use crate::store::url::Address;
use crate::store::{Reason, StoreError, StoreFuture, Watch};

/// A step of `lua/operations.lua`.
#[derive(Debug, Clone)]
pub(crate) enum OperationStep {
    Put {
        value: Vec<u8>,
        ttl: Duration,
        /// The channel to notify.
        tell: Option<String>,
    },
    Get,
    Remove,
    Post {
        id: String,
        message: Vec<u8>,
        ttl: Duration,
        channel: String,
    },
    Take,
    Audit(Vec<(String, String)>),
}

impl OperationStep {
    /// How many bytes it adds to a call.
    pub(super) fn weight(&self) -> usize {
        match self {
            OperationStep::Put { value, .. } => value.len(),
            OperationStep::Post { message, .. } => message.len(),
            OperationStep::Audit(fields) => fields.iter().map(|(name, value)| name.len() + value.len()).sum(),
            OperationStep::Get | OperationStep::Remove | OperationStep::Take => 0,
        }
    }

    /// Whether sending it twice has the same effect as sending it once. Where the reply to [`OperationStep::Take`] is lost, so are
    /// the messages, and a second reply would say that there are none.
    pub(super) fn is_repeatable(&self) -> bool {
        !matches!(self, OperationStep::Audit(_) | OperationStep::Take)
    }

    pub(super) fn write(&self, cmd: &mut Command) {
        match self {
            OperationStep::Put { value, ttl, tell } => {
                cmd.arg("put").arg(3).arg(value).arg(millis(*ttl));
                cmd.arg(tell.as_deref().unwrap_or_default());
            }
            OperationStep::Get => {
                cmd.arg("entry").arg(0);
            }
            OperationStep::Remove => {
                cmd.arg("drop").arg(0);
            }
            OperationStep::Post {
                id,
                message,
                ttl,
                channel,
            } => {
                cmd.arg("post").arg(5).arg(MAILBOX).arg(id).arg(message);
                cmd.arg(millis(*ttl)).arg(channel);
            }
            OperationStep::Take => {
                cmd.arg("mail").arg(0);
            }
            OperationStep::Audit(fields) => {
                cmd.arg("audit").arg(1 + 2 * fields.len()).arg(AUDITED);
                for (name, value) in fields {
                    cmd.arg(name).arg(value);
                }
            }
        }
    }
}

impl RedisStore {
    /// Runs a step on an entry and parses its answer.
    fn entry_step<T: Send + 'static>(
        &self,
        key: String,
        step: OperationStep,
        read: impl FnOnce(Answer) -> Result<T, StoreError> + Send + 'static,
    ) -> StoreFuture<T> {
        let step = self.step_on(key.into(), Verb::Entry(Box::new(step)));
        Box::pin(async move { read(step.await?.answer) })
    }
}

fn done(answer: Answer) -> Result<(), StoreError> {
    match answer {
        Answer::Done { .. } | Answer::Counted(CounterReply::Number(_)) => Ok(()),
        other => Err(strange(&other)),
    }
}

impl Operations for RedisStore {
    fn put(self: Arc<Self>, name: EntryName, value: Vec<u8>, ttl: Duration, tell: bool) -> StoreFuture<()> {
        let key = name.with_prefix(&self.prefix);
        let tell = tell.then(|| key.clone());
        self.entry_step(key, OperationStep::Put { value, ttl, tell }, done)
    }

    fn get(self: Arc<Self>, name: EntryName) -> StoreFuture<Option<Entry>> {
        let key = name.with_prefix(&self.prefix);
        self.entry_step(key, OperationStep::Get, |answer| match answer {
            Answer::Entry(value, remaining) => Ok(Some(Entry::new(value, remaining))),
            Answer::Free => Ok(None),
            other => Err(strange(&other)),
        })
    }

    fn remove(self: Arc<Self>, name: EntryName) -> StoreFuture<()> {
        self.entry_step(name.with_prefix(&self.prefix), OperationStep::Remove, done)
    }

    fn post(
        self: Arc<Self>,
        name: EntryName,
        id: String,
        message: Vec<u8>,
        ttl: Duration,
    ) -> StoreFuture<u64> {
        let key = name.with_prefix(&self.prefix);
        let channel = key.clone();
        let step = OperationStep::Post {
            id,
            message,
            ttl,
            channel,
        };
        self.entry_step(key, step, |answer| match answer {
            Answer::Counted(CounterReply::Number(heard)) => Ok(heard),
            Answer::TooFew => Err(StoreError::not_done(Reason::Refused, "the mailbox is full")),
            other => Err(strange(&other)),
        })
    }

    fn mail(self: Arc<Self>, name: EntryName) -> StoreFuture<Vec<Vec<u8>>> {
        let key = name.with_prefix(&self.prefix);
        self.entry_step(key, OperationStep::Take, |answer| match answer {
            Answer::Mail(messages) => Ok(messages),
            other => Err(strange(&other)),
        })
    }

    fn clients(self: Arc<Self>) -> StoreFuture<Vec<Uuid>> {
        Box::pin(async move {
            let begin = format!("{}dlock:client:", self.prefix);
            let pattern = format!("{}*", glob_escaped(&begin));
            let mut clients = Vec::new();
            for node in self.servers.nodes() {
                let mut scan = Scan::new(&node, &pattern, "string");
                while let Some(names) = scan.next().await? {
                    let ids = names.iter().filter_map(|name| name.strip_prefix(&begin));
                    clients.extend(ids.filter_map(|id| Uuid::try_parse(id).ok()));
                }
            }
            clients.sort_unstable();
            clients.dedup();
            Ok(clients)
        })
    }

    fn watch(self: Arc<Self>, name: &EntryName) -> Watch {
        let key = name.with_prefix(&self.prefix);
        self.servers.watch(&key.clone(), key)
    }

    fn audit(self: Arc<Self>, fields: Vec<(String, String)>) -> StoreFuture<()> {
        let key = format!("{}dlock:audit", self.prefix);
        self.entry_step(key, OperationStep::Audit(fields), done)
    }

    fn end(self: Arc<Self>, key: LockKey, holder: String) -> StoreFuture<bool> {
        let step = self.step(&key, Verb::Force(Some(holder)));
        Box::pin(async move {
            match step.await?.answer {
                Answer::Released { .. } => Ok(true),
                Answer::Gone => Ok(false),
                other => Err(strange(&other)),
            }
        })
    }

    fn connections(self: Arc<Self>, client: Uuid) -> StoreFuture<Option<Vec<Connection>>> {
        Box::pin(async move {
            let end = format!(":{client}");
            let mut connections = Vec::new();
            let mut may_be_unnamed = false;
            for node in self.servers.nodes() {
                let mut cmd = redis::cmd("CLIENT");
                cmd.arg("LIST");
                let list: String = match node.plain(cmd).await {
                    Ok(list) => redis::from_redis_value(list)
                        .map_err(|error| StoreError::unknown(error.to_string()))?,
                    Err(mut error) => {
                        if error.is_refused() {
                            error.message += " (to see connections its user needs +client|list)";
                        }
                        return Err(error);
                    }
                };
                connections.extend(list.lines().filter_map(|line| connection(line, &end)));
                may_be_unnamed |= list.lines().any(is_unnamed);
            }
            if connections.is_empty() && may_be_unnamed {
                // A client that publishes what it does has more rights than that to name its connections.
                let published = self.get(EntryName::of_client("client", client)).await;
                return Ok(matches!(published, Ok(Some(_))).then(Vec::new));
            }
            Ok(Some(connections))
        })
    }

    fn local_address(&self) -> Option<String> {
        let Address::Tcp { host, port } = self.peer.as_ref()? else {
            return None;
        };
        // Nothing is sent: the system tells its source address.
        let peers = (host.as_str(), *port).to_socket_addrs().ok()?;
        peers.into_iter().find_map(|peer| {
            let any: IpAddr = match peer {
                SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            let socket = UdpSocket::bind((any, 0)).ok()?;
            socket.connect(peer).ok()?;
            Some(socket.local_addr().ok()?.ip().to_string())
        })
    }
}

/// A field of a line of `CLIENT LIST`.
fn field<'l>(line: &'l str, name: &str) -> Option<&'l str> {
    let mut fields = line.split(' ').filter_map(|field| field.split_once('='));
    fields.find(|(field, _)| *field == name).map(|(_, value)| value)
}

/// What a client of dlock sends whose user may not name its connections, by the words of all versions of the server.
const SENT: [&str; 14] = [
    "evalsha",
    "eval",
    "script",
    "script|load",
    "exec",
    "hdel",
    "publish",
    "restore",
    "wait",
    "info",
    "role",
    "ping",
    "client",
    "client|setname",
];

/// Whether this line may be of such a client.
fn is_unnamed(line: &str) -> bool {
    let last = field(line, "cmd").unwrap_or_default();
    let library = field(line, "lib-name").unwrap_or_default();
    field(line, "name") == Some("") && ["", "redis-rs"].contains(&library) && SENT.contains(&last)
}

/// Parses the connection from a line of `CLIENT LIST`, if its name has this suffix.
fn connection(line: &str, end: &str) -> Option<Connection> {
    let service = field(line, "name")?.strip_prefix("dlock:")?.strip_suffix(end)?;
    let seconds = |name| Some(Duration::from_secs(field(line, name)?.parse().ok()?));
    Some(Connection::new(
        service,
        field(line, "addr")?,
        seconds("age")?,
        seconds("idle")?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stores::redis::script::Call;

    #[test]
    fn entry_of_the_audit_log_and_the_look_into_a_mailbox_are_not_sent_again() {
        let call = |step| Call {
            key: "k".into(),
            slot: None,
            verb: Verb::Entry(Box::new(step)),
            vote_after: None,
        };
        assert!(!call(OperationStep::Audit(Vec::new())).is_repeatable());
        assert!(!call(OperationStep::Take).is_repeatable());
        assert!(call(OperationStep::Get).is_repeatable());
    }

    #[test]
    fn connection_of_a_client_is_found_by_its_uuid() {
        let line = "id=7 addr=10.0.3.7:41234 laddr=10.0.0.1:6379 fd=9 \
                    name=dlock:check:out:0192f3a4-0000-7000-8000-000000000001 age=60 idle=3 flags=N";
        let end = ":0192f3a4-0000-7000-8000-000000000001";
        let (age, idle) = (Duration::from_secs(60), Duration::from_secs(3));
        let found = Connection::new("check:out", "10.0.3.7:41234", age, idle);
        assert_eq!(connection(line, end), Some(found));
        assert_eq!(connection(line, ":0192f3a4-0000-7000-8000-000000000002"), None);
        assert_eq!(connection("", end), None);
    }

    #[test]
    fn connection_without_a_name_may_be_of_dlock_if_it_sends_scripts() {
        for (line, is_it) in [
            (
                "id=7 addr=10.0.3.7:41234 name= age=60 idle=3 flags=N cmd=evalsha user=svc",
                true,
            ),
            (
                "id=7 addr=10.0.3.7:41234 name= age=60 idle=3 flags=N cmd=client|setname user=svc",
                true,
            ),
            (
                "id=7 addr=10.0.3.7:41234 name= age=60 idle=3 flags=N cmd=publish user=svc lib-name=redis-rs lib-ver=",
                true,
            ),
            (
                "id=7 addr=10.0.3.7:41234 name= age=60 idle=3 flags=N cmd=ping user=svc lib-name= lib-ver=",
                true,
            ),
            (
                "id=7 addr=10.0.3.7:41234 name= age=60 idle=3 flags=N cmd=ping user=web lib-name=jedis lib-ver=5",
                false,
            ),
            (
                "id=7 addr=10.0.3.7:41234 name= age=60 idle=3 flags=N cmd=get user=web",
                false,
            ),
            (
                "id=7 addr=10.0.3.7:41234 name=web age=60 idle=3 flags=N cmd=evalsha user=web",
                false,
            ),
            ("", false),
        ] {
            assert_eq!(is_unnamed(line), is_it, "{line}");
        }
    }
}
