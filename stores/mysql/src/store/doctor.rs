//! Diagnoses the server: reads its settings, and tries operations on a scratch key.

mod checks;

use std::collections::HashMap;
use std::sync::Arc;

use dlock::store::doctor::{
    ClockReading, Diagnose, Examination, Finding, SCRATCH_PREFIX, ServerFacts, StoreReport, not_tried,
    request_times, scratch_key,
};
use dlock::store::{Store, StoreError, StoreFuture, describe};
use mysql_async::prelude::{FromRow, Queryable};
use mysql_async::{Conn, Error};
use tokio::time::timeout;

use self::checks::{Facts, Seen};
use super::MysqlLocks;
use crate::connect::{Session, close};
use crate::table;

/// The settings that are read, of MySQL and of MariaDB.
const SETTINGS: &str = "SHOW VARIABLES WHERE Variable_name IN ('binlog_format', 'group_replication_group_name', \
     'innodb_doublewrite', 'innodb_flush_log_at_trx_commit', 'log_bin', 'max_connections', 'max_statement_time', \
     'read_only', 'rpl_semi_sync_master_enabled', 'rpl_semi_sync_source_enabled', 'sync_binlog', 'version', \
     'wsrep_on')";
/// The status variables that are read.
const STATUS: &str = "SHOW GLOBAL STATUS WHERE Variable_name IN ('Rpl_semi_sync_master_clients', \
     'Rpl_semi_sync_master_status', 'Rpl_semi_sync_source_clients', 'Rpl_semi_sync_source_status', \
     'Slaves_connected', 'Threads_connected')";
/// Lists the connected replicas, on MySQL since 8.0.22 and on older versions. MariaDB reports their number in its
/// status.
const REPLICAS: [&str; 2] = ["SHOW REPLICAS", "SHOW SLAVE HOSTS"];
/// The age of the oldest transaction; needs the privilege PROCESS. InnoDB tells the start in the zone of the server's system,
/// whatever the zone of the session.
const OLDEST: &str = "SELECT COALESCE(MAX(TIMESTAMPDIFF(SECOND, CONVERT_TZ(trx_started, 'SYSTEM', '+00:00'), \
                      UTC_TIMESTAMP())), 0) FROM information_schema.innodb_trx";

impl Diagnose for MysqlLocks {
    fn examine(self: Arc<Self>, examination: Examination) -> StoreFuture<StoreReport> {
        Box::pin(self.examined(examination))
    }
}

/// The server that is examined, with a time limit for each query.
struct Patient<'a> {
    store: &'a MysqlLocks,
    /// `None` after a query without a reply: the next query connects again.
    session: Option<Session>,
}

impl MysqlLocks {
    async fn examined(self: Arc<Self>, examination: Examination) -> Result<StoreReport, StoreError> {
        let session = self.0.setup.connector.connect().await?;
        let mut patient = Patient {
            store: &self,
            session: Some(session),
        };
        let first = patient.clock().await;
        let status = patient.pairs(STATUS).await;
        let facts = Facts {
            settings: patient.pairs(SETTINGS).await.map_err(StoreError::unknown)?,
            linked: patient.linked(&status).await,
            status,
            oldest: patient
                .rows(OLDEST)
                .await
                .map(|rows| rows.first().copied().unwrap_or(0)),
            engines: patient.engines().await,
            missing: patient.missing().await,
        };
        let mut report = StoreReport::new();
        (report.findings, report.failover, report.durability) = checks::all(&facts);
        if examination.probes {
            let key = scratch_key();
            let times = request_times(self.clone() as Arc<dyn Store>, &key, &examination).await;
            report.findings.push(times);
            let scratch = self.name(&SCRATCH_PREFIX.into());
            let forget = self.0.setup.table.forget(&self.name(&key), &scratch);
            if let Err(why) = patient.rows::<u64>(&forget).await {
                let why = format!("the row of the lock {key} that was tried may stay: {why}");
                report
                    .findings
                    .push(Finding::bad("scratch", why, "GRANT DELETE, and remove_free"));
            }
            if let Ok(first) = &first {
                first.long_enough().await;
            }
        } else {
            report.findings.extend(not_tried(&["request-times"]));
        }
        let second = patient.clock().await;
        report.findings.push(match (&first, &second) {
            (Ok(first), Ok(second)) => first.judged(second),
            (Err(why), _) | (_, Err(why)) => checks::hidden("clock", why, "SELECT"),
        });
        if let Some(session) = patient.session {
            close(session.conn);
        }
        let mut server = ServerFacts::new(self.0.setup.connector.address.clone());
        server.clock_ahead_ms = first.ok().map(|reading| reading.ahead_ms());
        report.servers.push(server);
        Ok(report)
    }
}

impl Patient<'_> {
    async fn rows<T: FromRow + Send + 'static>(&mut self, sql: &str) -> Seen<Vec<T>> {
        let connector = &self.store.0.setup.connector;
        let mut session = match self.session.take() {
            Some(session) => session,
            None => connector.connect().await.map_err(|error| error.message)?,
        };
        let limit = connector.timeout;
        let Ok(asked) = timeout(limit, ask(&mut session.conn, sql)).await else {
            // The driver would take the late reply for that to the next query.
            close(session.conn);
            return Err(format!("no answer within {limit:?}"));
        };
        if matches!(asked, Ok(_) | Err(Error::Server(_))) {
            self.session = Some(session);
        }
        let rows = asked.map_err(|error| describe(&error))?;
        let rows: Option<Vec<T>> = rows.into_iter().collect();
        rows.ok_or_else(|| "the server answered with a row that cannot be read".to_owned())
    }

    async fn pairs(&mut self, sql: &str) -> Seen<HashMap<String, String>> {
        Ok(self.rows(sql).await?.into_iter().collect())
    }

    /// Returns how many replicas are connected.
    async fn linked(&mut self, status: &Seen<HashMap<String, String>>) -> Seen<u64> {
        let told = status
            .as_ref()
            .ok()
            .and_then(|status| status.get("Slaves_connected"));
        if let Some(linked) = told.and_then(|linked| linked.parse().ok()) {
            return Ok(linked);
        }
        let mut seen = Err(String::new());
        for sql in REPLICAS {
            seen = self.rows::<mysql_async::Row>(sql).await;
            if seen.is_ok() {
                break;
            }
        }
        seen.map(|rows| rows.len() as u64)
    }

    async fn clock(&mut self) -> Seen<ClockReading> {
        ClockReading::of(async {
            let rows = self.rows(&table::clock()).await?;
            rows.first()
                .copied()
                .ok_or_else(|| "the server does not tell the time".to_owned())
        })
        .await
    }

    /// Returns the engine of each table that exists.
    async fn engines(&mut self) -> Seen<Vec<(String, Option<String>)>> {
        self.rows(&self.store.0.setup.table.engines()).await
    }

    /// Returns the errors of the server for rights that the user lacks.
    async fn missing(&mut self) -> Seen<Vec<String>> {
        let mut missing = Vec::new();
        for sql in self.store.0.setup.table.needed() {
            if let Err(why) = self.rows::<mysql_async::Row>(&format!("EXPLAIN {sql}")).await {
                // Anything but a refusal by the server says nothing about rights.
                if self.session.is_none() {
                    return Err(why);
                }
                missing.push(why);
            }
        }
        Ok(missing)
    }
}

/// Returns the rows, `None` for one that cannot be read.
async fn ask<T: FromRow + Send + 'static>(conn: &mut Conn, sql: &str) -> Result<Vec<Option<T>>, Error> {
    let rows = conn.query_iter(sql).await?.try_collect_and_drop().await?;
    Ok(rows.into_iter().map(Result::ok).collect())
}
