//! Connections that ended while acquires by commands may have been under way on them. Nothing refuses such an acquire when it
//! arrives late, so the server has to close its side of the connection first: then it never arrives.

use std::sync::Arc;

use redis::{Cmd, Value};
use tokio::sync::oneshot;

use super::PlainReply;
use crate::store::StoreError;

/// How many are remembered: only servers that were not reached again have any for long.
const MOST: usize = 64;
/// The id of no connection.
const NONE: i64 = i64::MAX;

type Reply = oneshot::Receiver<Result<Value, StoreError>>;

struct Former {
    /// Identifies the server process, which counts its connections.
    run_id: Arc<str>,
    id: i64,
    /// The outcome of closing it, once that was requested.
    closed: Option<Reply>,
}

impl Former {
    /// Whether the server has said that it is closed.
    fn is_closed(&mut self) -> bool {
        let outcome = self.closed.as_mut().map(oneshot::Receiver::try_recv);
        matches!(outcome, Some(Ok(Ok(_))))
    }
}

#[derive(Default)]
pub(super) struct FormerConnections(Vec<Former>);

impl FormerConnections {
    pub(super) fn add(&mut self, run_id: &str, id: i64) {
        if self.0.len() >= MOST {
            self.0.remove(0);
        }
        self.0.push(Former {
            run_id: run_id.into(),
            id,
            closed: None,
        });
    }

    /// Returns the commands that close those of this server process, and where their replies go: to be sent before anything
    /// else on a new connection.
    pub(super) fn close(&mut self, run_id: &str) -> Vec<(Cmd, PlainReply)> {
        self.0.retain_mut(|former| !former.is_closed());
        let here = self.0.iter_mut().filter(|former| *former.run_id == *run_id);
        let close = |former: &mut Former| {
            let (reply, closed) = oneshot::channel();
            former.closed = Some(closed);
            (kill(former.id), reply)
        };
        here.map(close).collect()
    }
}

fn kill(id: i64) -> Cmd {
    let mut cmd = redis::cmd("CLIENT");
    cmd.arg("KILL").arg("ID").arg(id);
    cmd
}

/// Closes no connection: its reply says whether the user may close any.
pub(in super::super) fn trial() -> Cmd {
    kill(NONE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(former: &mut FormerConnections, run_id: &str) -> Vec<String> {
        let commands = former.close(run_id);
        let packed = commands.iter().map(|(cmd, _)| cmd.get_packed_command());
        packed.map(|bytes| String::from_utf8(bytes).unwrap()).collect()
    }

    #[test]
    fn connection_is_closed_only_by_the_process_that_counted_it_and_until_that_is_done() {
        let mut former = FormerConnections::default();
        former.add("a", 7);
        former.add("b", 8);
        // The reply is lost.
        assert_eq!(ids(&mut former, "c"), [""; 0]);
        let seven = "*4\r\n$6\r\nCLIENT\r\n$4\r\nKILL\r\n$2\r\nID\r\n$1\r\n7\r\n";
        assert_eq!(ids(&mut former, "a"), [seven]);
        assert_eq!(ids(&mut former, "a"), [seven]);
        for (_, reply) in former.close("a") {
            reply.send(Ok(Value::Int(0))).unwrap();
        }
        assert_eq!(ids(&mut former, "a"), [""; 0]);
        assert_eq!(ids(&mut former, "b").len(), 1);
    }

    #[test]
    fn those_of_lost_servers_are_forgotten_some_time() {
        let mut former = FormerConnections::default();
        (0..1000).for_each(|id| former.add("a", id));
        assert_eq!(former.close("a").len(), MOST);
    }
}
