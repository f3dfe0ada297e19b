//! The names of the keys on one server, in parts, as `SCAN` answers them.

use redis::Cmd;

use super::node::Node;
use crate::store::{Reason, StoreError};

/// How often a scan begins anew before it fails.
const ATTEMPTS: u32 = 3;

/// A scan of one server. A cursor means something to the process alone that gave it: if the server was replaced
/// meanwhile, the scan begins anew, and names come twice.
pub(super) struct Scan<'a> {
    node: &'a Node,
    pattern: &'a str,
    of_type: &'a str,
    /// `None` when all was answered.
    cursor: Option<u64>,
    /// How many processes the node had known when the scan began.
    processes: u64,
    attempts: u32,
}

impl<'a> Scan<'a> {
    pub(super) fn new(node: &'a Node, pattern: &'a str, of_type: &'a str) -> Scan<'a> {
        Scan {
            node,
            pattern,
            of_type,
            cursor: Some(0),
            processes: node.processes(),
            attempts: 1,
        }
    }

    /// The next names, perhaps none; `None` after the last. Without those that are not UTF-8: they belong neither to
    /// dlock nor to Redisson.
    pub(super) async fn next(&mut self) -> Result<Option<Vec<String>>, StoreError> {
        let Some(cursor) = self.cursor else {
            return Ok(None);
        };
        let reply = self.node.plain(self.command(cursor)).await?;
        let (next, names): (u64, Vec<Vec<u8>>) =
            redis::from_redis_value(reply).map_err(|error| StoreError::unknown(error.to_string()))?;
        self.cursor = (next != 0).then_some(next);
        let processes = self.node.processes();
        if processes != self.processes {
            if self.attempts == ATTEMPTS {
                let message = "the server was replaced by another process while its keys were listed";
                return Err(StoreError::not_done(Reason::Unreachable, message));
            }
            self.attempts += 1;
            (self.cursor, self.processes) = (Some(0), processes);
        }
        let names = names.into_iter().filter_map(|name| String::from_utf8(name).ok());
        Ok(Some(names.collect()))
    }

    fn command(&self, cursor: u64) -> Cmd {
        let mut cmd = redis::cmd("SCAN");
        cmd.arg(cursor).arg("MATCH").arg(self.pattern);
        cmd.arg("COUNT").arg(1000).arg("TYPE").arg(self.of_type);
        cmd
    }
}
