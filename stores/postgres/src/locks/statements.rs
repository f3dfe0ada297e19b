//! The statements on one connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::{try_join_all, try_join3};
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{FromSql, ToSql};
use tokio_postgres::{Client, Error, Row, Statement};

use dlock::store::queue::ServerClock;
use dlock::store::{Reason, StoreError};

use super::table::{Sql, Table};
use crate::failure::{self, Failure};

/// A connection on which operations can be sent.
pub(crate) struct Statements {
    client: Client,
    table: Arc<Table>,
    /// In the order of [`Sql`]; `None` behind a transaction pooler. Those of sweeps are not prepared.
    prepared: Option<Vec<Statement>>,
    clock: Mutex<ServerClock>,
    /// Whether a transaction pooler is in between.
    pooled: Arc<AtomicBool>,
}

impl Statements {
    /// Prepares the statements, unless a transaction pooler would lose them, and reads the server's clock.
    pub(crate) async fn new(
        client: Client,
        table: Arc<Table>,
        pooled: &Arc<AtomicBool>,
    ) -> Result<Statements, Failure> {
        const CLOCK: &str = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8 AS now";
        let sent = Instant::now();
        let rows = client.query_typed(CLOCK, &[]).await.map_err(failure::of_step)?;
        let now: i64 = column(one(&rows)?, "now")?;
        let clock = Mutex::new(ServerClock::new(now, sent, Instant::now()));
        let prepared = match pooled.load(Ordering::Relaxed) {
            true => None,
            false => {
                let prepare = Sql::SERVING.iter().map(|sql| client.prepare(table.sql(*sql)));
                let prepared = try_join_all(prepare).await;
                Some(prepared.map_err(|error| failed(error, pooled))?)
            }
        };
        Ok(Statements {
            client,
            table,
            prepared,
            clock,
            pooled: pooled.clone(),
        })
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    /// Sends a statement when first polled.
    pub(crate) async fn ask(&self, sql: Sql, values: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, Failure> {
        let prepared = self.prepared.as_ref().and_then(|all| all.get(sql as usize));
        let rows = match prepared {
            Some(prepared) => self.client.query(prepared, values).await,
            None => {
                let typed = values.iter().copied().zip(sql.types());
                let typed: Vec<_> = typed.collect();
                self.client.query_typed(self.table.sql(sql), &typed).await
            }
        };
        rows.map_err(|error| failed(error, &self.pooled))
    }

    /// Sends a statement that may read a whole table. The server would compile it if it expects many rows, which takes longer
    /// than to read them. Behind a transaction pooler this can only be set for a transaction.
    ///
    /// The transaction is sent as a whole, and the server ends it if its end does not arrive: a process that stands still must
    /// not keep rows locked.
    pub(crate) async fn scan(&self, sql: Sql, values: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, Failure> {
        const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL jit = off; \
                             SET LOCAL idle_in_transaction_session_timeout = '1s'";
        let run = async |sql| {
            let ran = self.client.batch_execute(sql).await;
            ran.map_err(|error| failed(error, &self.pooled))
        };
        let ((), rows, ()) = try_join3(run(BEGIN), self.ask(sql, values), run("COMMIT")).await?;
        Ok(rows)
    }

    /// The server's time, in µs, that corresponds to `deadline`: later the request must have no effect.
    pub(crate) fn refuse_after(&self, deadline: Instant) -> i64 {
        self.clock.lock().at(deadline)
    }

    /// Records that the server's clock showed this in the reply to a request that was sent at `sent`.
    pub(crate) fn saw(&self, server: i64, sent: Instant) {
        self.clock.lock().saw(server, sent, Instant::now());
    }
}

/// Classifies the failure of a statement. If an undetected pooler gave the connection another backend, nothing is prepared
/// from now on.
fn failed(error: Error, pooled: &AtomicBool) -> Failure {
    let message = match error.code() {
        Some(code) if *code == SqlState::INVALID_SQL_STATEMENT_NAME => {
            "the server forgot what was prepared: is a transaction pooler in between?"
        }
        // Another client of the pooler has prepared its own there.
        Some(code) if *code == SqlState::DUPLICATE_PSTATEMENT => {
            "others prepare on the same connection: is a transaction pooler in between?"
        }
        _ => return failure::of_step(error),
    };
    pooled.store(true, Ordering::Relaxed);
    Failure::Broken(StoreError::not_done(Reason::Unreachable, message).caused_by(error))
}

/// Returns the first row of a reply, which must exist.
pub(crate) fn one(rows: &[Row]) -> Result<&Row, Failure> {
    rows.first().ok_or_else(|| unreadable("no row"))
}

pub(crate) fn column<'a, T: FromSql<'a>>(row: &'a Row, name: &str) -> Result<T, Failure> {
    row.try_get(name)
        .map_err(|error| unreadable(&format!("a row that cannot be read ({error})")))
}

/// The positions in a column, from 0 on.
pub(crate) fn positions(row: &Row, name: &str) -> Result<Vec<usize>, Failure> {
    let positions = list::<i64>(row, name)?.into_iter();
    Ok(positions
        .map(|n| usize::try_from(n - 1).unwrap_or(usize::MAX))
        .collect())
}

/// The values by their positions, of which each must have one.
pub(crate) fn in_order<T>(mut values: Vec<(usize, T)>, number: usize) -> Result<Vec<T>, Failure> {
    values.sort_unstable_by_key(|(at, _)| *at);
    match values.iter().map(|(at, _)| *at).eq(0..number) {
        true => Ok(values.into_iter().map(|(_, value)| value).collect()),
        false => Err(unreadable("rows for other requests")),
    }
}

/// The array in a column, which is empty if it is NULL.
pub(crate) fn list<'a, T: FromSql<'a>>(row: &'a Row, name: &str) -> Result<Vec<T>, Failure> {
    Ok(column::<Option<Vec<T>>>(row, name)?.unwrap_or_default())
}

fn unreadable(found: &str) -> Failure {
    let mut error = StoreError::unknown(format!("the server answered with {found}"));
    error.reason = Reason::KeyTaken(found.to_owned());
    Failure::Broken(error)
}
