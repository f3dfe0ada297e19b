//! Connections on which acquires by commands may be under way. Nothing refuses such an acquire when it arrives late: on the same
//! connection the undo follows it, and before anything else is sent on another one, the server has to close the former one.

use std::sync::Arc;

use redis::{Cmd, ServerErrorKind, ToRedisArgs, Value};
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

use super::PlainReply;
use crate::store::StoreError;

/// At most this many are remembered, and the oldest are dropped. Only those of servers that never came back stay for long.
const MOST: usize = 64;
type Reply = oneshot::Receiver<Result<Value, StoreError>>;

struct Connection {
    /// Identifies the server process, which counts its connections.
    run_id: Arc<str>,
    id: i64,
}

struct Former {
    connection: Connection,
    /// The outcome of closing it, once that was requested.
    closed: Option<Reply>,
}

#[derive(PartialEq, Eq)]
enum State {
    Open,
    Closing,
    Closed,
}

impl Former {
    fn state(&mut self) -> State {
        match self.closed.as_mut().map(oneshot::Receiver::try_recv) {
            None => State::Open,
            Some(Err(TryRecvError::Empty)) => State::Closing,
            Some(Ok(Ok(_))) => State::Closed,
            // The user may not close it any more.
            Some(Ok(Err(error))) if error.is_refused() => State::Closed,
            Some(Ok(Err(_)) | Err(TryRecvError::Closed)) => State::Open,
        }
    }
}

#[derive(Default)]
pub(super) struct FormerConnections {
    /// `None` where the server could not close it.
    present: Option<Connection>,
    /// Whether acquires by commands were sent on it.
    has_acquires: bool,
    former: Vec<Former>,
}

impl FormerConnections {
    /// Begins another connection, to this server process. Returns the commands that close the former ones there, and where
    /// their replies go: to be sent before anything else.
    pub(super) fn replace(&mut self, run_id: &str, id: Option<i64>) -> Vec<(Cmd, PlainReply)> {
        let run_id: Arc<str> = run_id.into();
        let present = id.map(|id| Connection {
            run_id: run_id.clone(),
            id,
        });
        let before = std::mem::replace(&mut self.present, present);
        if let Some(connection) = before.filter(|_| std::mem::take(&mut self.has_acquires)) {
            if self.former.len() >= MOST {
                self.former.remove(0);
            }
            self.former.push(Former {
                connection,
                closed: None,
            });
        }
        self.forget_closed();
        let mut commands = Vec::new();
        for former in &mut self.former {
            former.closed = None;
            if former.connection.run_id == run_id {
                let (reply, closed) = oneshot::channel();
                former.closed = Some(closed);
                commands.push((kill(former.connection.id), reply));
            }
        }
        commands
    }

    fn forget_closed(&mut self) {
        self.former.retain_mut(|former| former.state() != State::Closed);
    }

    /// Whether the server has failed to close one of them: then nothing else may be sent to it on this connection.
    pub(super) fn stay_open(&mut self) -> bool {
        if self.former.is_empty() {
            return false;
        }
        self.forget_closed();
        let is_here = |former: &Former| former.closed.is_some();
        let mut requested = self.former.iter_mut().filter(|former| is_here(former));
        requested.any(|former| former.state() == State::Open)
    }

    /// Whether acquires by commands may be sent on the present one.
    pub(super) fn may_have_acquires(&self) -> bool {
        self.present.is_some()
    }

    /// Records that they are.
    pub(super) fn has_acquires(&mut self) {
        self.has_acquires = true;
    }
}

fn kill(id: impl ToRedisArgs) -> Cmd {
    let mut cmd = redis::cmd("CLIENT");
    cmd.arg("KILL").arg("ID").arg(id);
    cmd
}

/// Closes no connection, since that is no id, and is refused for it if the user may close others. (An id that no connection has
/// makes a server look at all of them.)
pub(in super::super) fn closing_trial() -> Cmd {
    kill("none")
}

/// Whether this reply to the trial says that the user may close connections.
pub(in super::super) fn may_close(reply: &Value) -> bool {
    match reply {
        Value::ServerError(error) => {
            let is_known = |details: &str| !details.to_ascii_lowercase().contains("unknown");
            error.kind() == Some(ServerErrorKind::ResponseError) && error.details().is_some_and(is_known)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trial_is_refused_for_its_id_where_the_user_may_close_connections() {
        for (reply, may) in [
            ("-ERR value is not an integer or out of range", true),
            ("-ERR client-id should be greater than 0", true),
            ("-NOPERM this user has no permissions", false),
            ("-ERR unknown command 'CLIENT'", false),
            ("-ERR Unknown subcommand or wrong number of arguments", false),
            (":0", false),
        ] {
            let value = redis::parse_redis_value(format!("{reply}\r\n").as_bytes()).unwrap();
            assert_eq!(may_close(&value), may, "{reply}");
        }
    }

    fn replaced(connections: &mut FormerConnections, run_id: &str, id: i64) -> Vec<String> {
        let commands = connections.replace(run_id, Some(id));
        connections.has_acquires();
        let packed = commands.iter().map(|(cmd, _)| cmd.get_packed_command());
        packed.map(|bytes| String::from_utf8(bytes).unwrap()).collect()
    }

    fn closing(ids: &[i64]) -> Vec<String> {
        let of_one = |id: &i64| String::from_utf8(kill(*id).get_packed_command()).unwrap();
        ids.iter().map(of_one).collect()
    }

    #[test]
    fn connection_is_closed_only_by_the_process_that_counted_it_and_until_that_is_done() {
        let mut connections = FormerConnections::default();
        assert_eq!(replaced(&mut connections, "a", 7), closing(&[]));
        assert_eq!(replaced(&mut connections, "b", 7), closing(&[]));
        // The replies are lost.
        assert_eq!(replaced(&mut connections, "a", 8), closing(&[7]));
        assert_eq!(replaced(&mut connections, "a", 9), closing(&[7, 8]));
        for (_, reply) in connections.replace("a", Some(10)) {
            reply.send(Ok(Value::Int(0))).unwrap();
        }
        assert_eq!(replaced(&mut connections, "a", 11), closing(&[]));
        assert_eq!(replaced(&mut connections, "b", 12), closing(&[7]));
    }

    #[test]
    fn connection_without_acquires_needs_no_closing() {
        let mut connections = FormerConnections::default();
        assert!(!connections.may_have_acquires());
        connections.replace("a", Some(7));
        assert!(connections.may_have_acquires());
        assert_eq!(replaced(&mut connections, "a", 8), closing(&[]));
        assert_eq!(connections.replace("a", None).len(), 1);
        assert!(!connections.may_have_acquires());
    }

    #[test]
    fn those_of_lost_servers_are_forgotten_some_time() {
        let mut connections = FormerConnections::default();
        for id in 0..1000 {
            connections.replace("a", Some(id));
            connections.has_acquires();
        }
        assert_eq!(connections.former.len(), MOST);
    }
}
