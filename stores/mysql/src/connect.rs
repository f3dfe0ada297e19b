//! How a connection to the server is made, and what is set on it.

use std::fmt;
use std::time::Duration;

use dlock::store::queue::ServerClock;
use dlock::store::{Reason, StoreError};
use futures_util::FutureExt;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Opts, OptsBuilder};
use tokio::time::{Instant, timeout};

use crate::{failure, table};

/// How long a statement waits for a row that another transaction has locked; the least that MySQL has.
pub(crate) const LOCK_WAIT: Duration = Duration::from_secs(1);

/// Makes connections to the server.
pub(crate) struct Connector {
    opts: Opts,
    /// Where, for messages; without credentials.
    pub(crate) address: String,
    /// For one step, and for connecting.
    pub(crate) timeout: Duration,
}

/// A connection on which steps can be sent. Dropping it closes it.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) conn: Conn,
    pub(crate) clock: ServerClock,
    /// When that was read last.
    pub(crate) read: Instant,
    /// When the last reply came.
    pub(crate) used: Instant,
}

/// What the session is to be like, whatever the server has by default.
///
/// - Each statement is a transaction, and locks nothing but the row that it changes.
/// - What does not fit fails, and is not cut off; nor are the rows that are read.
/// - The server does not end a connection without work.
const SET_UP: &str = "SET SESSION autocommit = 1, sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', \
                      innodb_lock_wait_timeout = 1, wait_timeout = 2147483, time_zone = '+00:00', \
                      sql_select_limit = 18446744073709551615";
const ISOLATION: &str = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED";
/// Whether `SYSDATE` is the time at which it is evaluated: with `--sysdate-is-now` it is the statement's start.
const SYSDATE: &str = "SELECT SLEEP(0.002) + (SYSDATE(6) > NOW(6))";

impl Connector {
    pub(crate) fn new(opts: OptsBuilder, timeout: Duration) -> Connector {
        // Another server might listen at the socket that the first one names.
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

    /// A connection that is set up.
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
        let sent = Instant::now();
        let now: Option<i64> = conn.query_first(table::clock()).await.map_err(failed)?;
        let read = Instant::now();
        let now =
            now.ok_or_else(|| StoreError::unknown(format!("{} does not tell the time", self.address)))?;
        Ok(Session {
            clock: ServerClock::new(now, sent, read),
            read,
            used: read,
            conn,
        })
    }

    /// Carries out a script such as the schema.
    pub(crate) async fn execute(&self, sql: &str) -> Result<(), StoreError> {
        let mut session = self.connect().await?;
        // Tables take longer than a step.
        let made = timeout(30 * self.timeout, session.conn.query_drop(sql)).await;
        match made {
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
    /// Whether the server still answers on this connection, or why not.
    pub(crate) async fn check(&mut self, limit: Duration) -> Result<(), String> {
        match timeout(limit, self.conn.ping()).await {
            Ok(Ok(())) => {
                self.used = Instant::now();
                Ok(())
            }
            Ok(Err(error)) => Err(failure::describe(&error)),
            Err(_) => Err(format!("no answer within {limit:?}")),
        }
    }
}

/// Closes a connection at once, whatever is under way on it; the driver would wait for the answer first.
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
