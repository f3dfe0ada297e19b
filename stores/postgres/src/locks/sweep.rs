//! Removes rows that no lock needs any more.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use dlock::store::StoreError;
use tokio::time::timeout;
use tokio_postgres::Row;

use super::link::Setup;
use super::statements::{Statements, column, one};
use super::table::Sql;
use crate::connect::{Driver, answered};
use crate::failure::Failure;

/// How many rows of available locks are found by one scan of the table.
const FOUND: i64 = 10_000;
/// How many of them one statement removes. Until it ends, the rows are locked, and acquires of these keys look again: that must
/// be over after milliseconds.
const REMOVED: usize = 1000;
/// How many rows of each other table one statement removes.
const LEFTOVERS: i64 = 10_000;
/// How many semaphores one statement ends, whose rows it locks.
const UNUSED: i64 = 1000;

/// A connection for one removal. Reading a large table takes longer than an operation.
pub(super) struct Sweep {
    on: Statements,
    _driver: Driver,
    limit: Duration,
}

impl Sweep {
    pub(super) async fn connect(setup: &Setup) -> Result<Sweep, StoreError> {
        let Setup { connector, table, .. } = setup;
        let session = connector.connect_plain().await?;
        answered(connector.timeout, session.find_server())
            .await
            .map_err(StoreError::unknown)?;
        let unprepared = Arc::new(AtomicBool::new(true));
        Ok(Sweep {
            on: Statements::new(session.client, table.clone(), &unprepared).await?,
            _driver: session.driver,
            limit: 30 * connector.timeout,
        })
    }

    /// Removes all of them, and returns how many rows of locks were removed.
    pub(super) async fn run(&self) -> Result<u64, StoreError> {
        self.repeat(Sql::Leftovers, LEFTOVERS).await?;
        self.repeat(Sql::Unused, UNUSED).await?;
        let mut removed = 0;
        loop {
            let (found, gone) = self.free().await?;
            removed += gone;
            // Without the second condition, rows that transactions keep locked would be found for ever.
            if found < FOUND.unsigned_abs() || gone == 0 {
                return Ok(removed);
            }
        }
    }

    /// Removes the rows of some available locks. Returns how many were found, and how many removed.
    async fn free(&self) -> Result<(u64, u64), StoreError> {
        let rows = self.within(self.on.scan(Sql::Free, &[&FOUND])).await?;
        let keys = rows.iter().map(|row| column::<String>(row, "key"));
        let keys = keys.collect::<Result<Vec<String>, Failure>>()?;
        let mut gone = 0;
        for keys in keys.chunks(REMOVED) {
            let rows = self.within(self.on.scan(Sql::Sweep, &[&keys])).await?;
            gone += count(&rows)?;
        }
        Ok((keys.len() as u64, gone))
    }

    /// Repeats a statement that removes `most` rows at a time until it finds fewer.
    async fn repeat(&self, sql: Sql, most: i64) -> Result<(), StoreError> {
        while count(&self.within(self.on.scan(sql, &[&most])).await?)? >= most.unsigned_abs() {}
        Ok(())
    }

    async fn within(
        &self,
        step: impl Future<Output = Result<Vec<Row>, Failure>>,
    ) -> Result<Vec<Row>, StoreError> {
        match timeout(self.limit, step).await {
            Ok(rows) => Ok(rows?),
            Err(_) => Err(StoreError::unknown("free rows were not removed in time")),
        }
    }
}

fn count(rows: &[Row]) -> Result<u64, Failure> {
    Ok(column::<i64>(one(rows)?, "gone")?.unsigned_abs())
}
