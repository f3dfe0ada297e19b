//! Opens and configures connections to the server.

use std::fmt;
use std::time::Duration;

use dlock::store::queue::ServerClock;
use dlock::store::{Reason, StoreError, describe};
use futures_util::FutureExt;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Opts, OptsBuilder};
use tokio::time::{Instant, timeout};

use crate::{failure, table};

/// How long a statement may wait for a row or a table that another transaction has locked. The server is told to wait for one
/// second, the shortest time that it supports; InnoDB in MySQL looks once a second for waits that are over, and may wait for two.
pub(crate) const LOCK_WAIT: Duration = Duration::from_secs(2);

/// Opens connections to the server.
pub(crate) struct Connector {
    opts: Opts,
    /// The server's address, for messages, without credentials.
    pub(crate) address: String,
    /// The time limit of an operation, and of connecting.
    pub(crate) timeout: Duration,
}

/// A connection on which operations can be sent. Dropping it closes it.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) conn: Conn,
    pub(crate) clock: ServerClock,
    /// When the server's clock was last read.
    pub(crate) read: Instant,
    /// When the last reply arrived.
    pub(crate) used: Instant,
    /// The most bytes that the server accepts in one round trip (`max_allowed_packet`).
    pub(crate) packet: usize,
}

/// Sets session variables, independent of the server's defaults:
///
/// - Each statement is a transaction, and locks only the row that it changes.
/// - A statement waits only briefly for a row, and for a table that is being altered or that is locked as a whole: MySQL does
///   not end a statement whose client is gone while it waits for a table.
/// - A value that does not fit is an error and not truncated, and results are not limited.
/// - The server does not close an idle connection.
const SET_UP: &str = "SET SESSION autocommit = 1, sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', \
                      innodb_lock_wait_timeout = 1, lock_wait_timeout = 1, wait_timeout = 2147483, \
                      time_zone = '+00:00', \
                      sql_select_limit = 18446744073709551615";
const ISOLATION: &str = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED";
/// Lets a statement that creates or changes tables wait for transactions that use them.
const PATIENT: &str = "SET SESSION lock_wait_timeout = 30";
/// Checks that `SYSDATE` is the time of its evaluation: with `--sysdate-is-now` it is the start of the statement.
const SYSDATE: &str = "SELECT SLEEP(0.002) + (SYSDATE(6) > NOW(6))";
const PACKET: &str = "SELECT @@max_allowed_packet";
/// The least `max_allowed_packet`: any operation fits into it, and so does the schema.
pub(crate) const LEAST_PACKET: usize = 8192;

impl Connector {
    pub(crate) fn new(opts: OptsBuilder, timeout: Duration) -> Connector {
        // A socket that the server names may belong to another server.
        let opts = opts.prefer_socket(false).client_found_rows(true);
        let opts = Opts::from(opts.stmt_cache_size(0).setup::<String>(Vec::new()));
        let address = match opts.socket() {
            Some(path) => path.to_owned(),
            None => format!("{}:{}", opts.ip_or_hostname(), opts.tcp_port()),
        };
        Connector {
            opts,
            address,
            timeout,
        }
    }

    /// Opens and configures a connection.
    pub(crate) async fn connect(&self) -> Result<Session, StoreError> {
        let limit = self.timeout;
        timeout(limit, self.open()).await.unwrap_or_else(|_| {
            let message = format!("{} did not answer within {limit:?}", self.address);
            Err(StoreError::not_done(Reason::Unreachable, message))
        })
    }

    async fn open(&self) -> Result<Session, StoreError> {
        let failed = |error: Error| failure::of_connecting(error, &self.address);
        let mut conn = Conn::new(self.opts.clone()).await.map_err(failed)?;
        for statement in [SET_UP, ISOLATION] {
            conn.query_drop(statement).await.map_err(failed)?;
        }
        let sysdate: Option<i64> = conn.query_first(SYSDATE).await.map_err(failed)?;
        if sysdate != Some(1) {
            let message = format!(
                "{} runs with sysdate-is-now, so that a statement does not know the time after it waited: start it without",
                self.address
            );
            return Err(StoreError::not_done(Reason::Refused, message));
        }
        let packet: Option<usize> = conn.query_first(PACKET).await.map_err(failed)?;
        let packet = packet.unwrap_or(LEAST_PACKET);
        if packet < LEAST_PACKET {
            let message = format!(
                "{} accepts packets of {packet} bytes: raise max_allowed_packet to at least {LEAST_PACKET}",
                self.address
            );
            return Err(StoreError::not_done(Reason::Refused, message));
        }
        let sent = Instant::now();
        let now: Option<i64> = conn.query_first(table::clock()).await.map_err(failed)?;
        let read = Instant::now();
        let now =
            now.ok_or_else(|| StoreError::unknown(format!("{} does not tell the time", self.address)))?;
        Ok(Session {
            clock: ServerClock::new(now, sent, read),
            read,
            used: read,
            packet,
            conn,
        })
    }

    /// Executes a script such as the schema.
    pub(crate) async fn execute(&self, sql: &str) -> Result<(), StoreError> {
        let mut session = self.connect().await?;
        // Creating tables takes longer than an operation.
        let making = async {
            session.conn.query_drop(PATIENT).await?;
            session.conn.query_drop(sql).await
        };
        match timeout(30 * self.timeout, making).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(failure::of_step(error).error),
            Err(_) => {
                close(session.conn);
                Err(StoreError::unknown(format!("{} did not answer", self.address)))
            }
        }
    }
}

impl Session {
    /// Checks that the server still replies on this connection; if not, returns the reason.
    pub(crate) async fn check(&mut self, limit: Duration) -> Result<(), String> {
        match timeout(limit, self.conn.ping()).await {
            Ok(Ok(())) => {
                self.used = Instant::now();
                Ok(())
            }
            Ok(Err(error)) => Err(describe(&error)),
            Err(_) => Err(format!("no answer within {limit:?}")),
        }
    }
}

/// Closes a connection at once; the driver would wait for outstanding replies first.
pub(crate) fn close(conn: Conn) {
    let _ = conn.disconnect().now_or_never();
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector")
            .field("address", &self.address)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}
