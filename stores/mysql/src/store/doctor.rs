//! Diagnoses the server: reads its settings, and tries operations on a scratch key.

mod checks;

use std::collections::HashMap;
use std::sync::Arc;

use dlock::store::doctor::{
    ClockReading, Diagnose, Examination, Finding, SCRATCH_PREFIX, ServerFacts, StoreReport, not_tried,
    request_times, scratch_key,
};
use dlock::store::{Store, StoreError, StoreFuture};
use mysql_async::prelude::{FromRow, Queryable};
use tokio::time::timeout;

use self::checks::{Facts, Seen};
use super::MysqlLocks;
use crate::connect::{Session, close};
use crate::failure;
use crate::table;

/// The settings that are read, of MySQL and of MariaDB.
const SETTINGS: &str = "SHOW VARIABLES WHERE Variable_name IN ('binlog_format', 'innodb_doublewrite', \
     'innodb_flush_log_at_trx_commit', 'log_bin', 'max_connections', 'max_statement_time', \
     'read_only', 'rpl_semi_sync_master_enabled', 'rpl_semi_sync_source_enabled', 'sync_binlog', 'version')";
/// The status variables that are read.
const STATUS: &str = "SHOW GLOBAL STATUS WHERE Variable_name IN ('Rpl_semi_sync_master_clients', \
     'Rpl_semi_sync_master_status', 'Rpl_semi_sync_source_clients', 'Rpl_semi_sync_source_status', \
     'Slaves_connected', 'Threads_connected')";
/// Lists the connected replicas, on MySQL since 8.0.22 and on older versions. MariaDB reports their number in its
/// status.
const REPLICAS: [&str; 2] = ["SHOW REPLICAS", "SHOW SLAVE HOSTS"];
/// The age of the oldest transaction; needs the privilege PROCESS.
const OLDEST: &str =
    "SELECT COALESCE(MAX(TIMESTAMPDIFF(SECOND, trx_started, NOW())), 0) FROM information_schema.innodb_trx";

impl Diagnose for MysqlLocks {
    fn examine(self: Arc<Self>, examination: Examination) -> StoreFuture<StoreReport> {
        Box::pin(self.examined(examination))
    }
}

/// The session that is examined, with a time limit for each query.
struct Patient<'a> {
    store: &'a MysqlLocks,
    session: Session,
}

impl MysqlLocks {
    async fn examined(self: Arc<Self>, examination: Examination) -> Result<StoreReport, StoreError> {
        let session = self.0.setup.connector.connect().await?;
        let mut patient = Patient {
            store: &self,
            session,
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
        close(patient.session.conn);
        let mut server = ServerFacts::new(self.0.setup.connector.address.clone());
        server.clock_ahead_ms = first.ok().map(|reading| reading.ahead_ms());
        report.servers.push(server);
        Ok(report)
    }
}

impl Patient<'_> {
    async fn rows<T: FromRow + Send + 'static>(&mut self, sql: &str) -> Seen<Vec<T>> {
        let limit = self.store.0.setup.connector.timeout;
        match timeout(limit, self.session.conn.query(sql)).await {
            Ok(rows) => rows.map_err(|error| failure::describe(&error)),
            Err(_) => Err(format!("no answer within {limit:?}")),
        }
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
                missing.push(why);
            }
        }
        Ok(missing)
    }
}
