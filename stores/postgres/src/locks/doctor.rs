//! Diagnoses the server: reads its settings, and tries operations on a scratch key.

mod checks;

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dlock::store::doctor::{
    ClockReading, Diagnose, Examination, Finding, SCRATCH_PREFIX, ServerFacts, StoreReport, not_tried,
    request_times, scratch_key,
};
use dlock::store::{Store, StoreError, StoreFuture};
use tokio::time::timeout;
use tokio_postgres::types::Type;
use tokio_postgres::{Error, Row};

use self::checks::{Facts, Seen, Standby};
use super::PostgresLocks;
use crate::connect::Session;
use crate::failure;

/// The settings that are read, with the values that the sessions of the store have.
const SETTINGS: &str = "SELECT name, setting FROM pg_settings WHERE name IN ('autovacuum', \
     'fsync', 'full_page_writes', 'idle_session_timeout', 'lock_timeout', 'max_connections', 'server_version', \
     'server_version_num', 'superuser_reserved_connections', 'synchronous_commit', 'synchronous_standby_names')";
/// Without `pg_read_all_stats`, a user does not see the transactions of other users. The oldest transactions are those that
/// keep dead rows of this database from being removed: with an id, or with a snapshot of this database, and no vacuum, which lets
/// others remove them.
const ACTIVITY: &str = "SELECT (SELECT sum(numbackends) FROM pg_stat_database)::int8 AS connections, \
     (SELECT extract(epoch FROM max(clock_timestamp() - xact_start)) FROM pg_stat_activity \
     WHERE (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL AND datname = current_database()) \
     AND (backend_type = 'autovacuum worker' AND query LIKE 'autovacuum: VACUUM%') IS NOT TRUE \
     AND (query ~* '^\\s*vacuum\\y' AND query !~* '\\yfull\\y') IS NOT TRUE)::float8 AS oldest, \
     (SELECT count(*) FROM pg_stat_activity WHERE query = '<insufficient privilege>')::int8 AS hidden, \
     (SELECT extract(epoch FROM max(clock_timestamp() - prepared)) FROM pg_prepared_xacts)::float8 AS prepared";
/// Excludes logical replication and backups, which cannot take over. A user who may not see `state` reads NULL there.
const STANDBYS: &str = "SELECT application_name, sync_state, \
     pg_wal_lsn_diff(pg_current_wal_lsn(), replay_lsn)::int8 AS bytes, \
     extract(epoch FROM replay_lag)::float8 AS seconds FROM pg_stat_replication r \
     WHERE state IS DISTINCT FROM 'backup' AND application_name <> 'pg_receivewal' AND NOT EXISTS \
     (SELECT FROM pg_replication_slots s WHERE s.active_pid = r.pid AND s.slot_type = 'logical')";
const CLOCK: &str = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8";

impl Diagnose for PostgresLocks {
    fn examine(self: Arc<Self>, examination: Examination) -> StoreFuture<StoreReport> {
        Box::pin(self.examined(examination))
    }
}

impl PostgresLocks {
    async fn examined(self: Arc<Self>, examination: Examination) -> Result<StoreReport, StoreError> {
        let setup = &self.0.setup;
        let pooled = setup.pooled.load(Ordering::Relaxed);
        // Like the sessions of operations.
        let session = match pooled {
            true => setup.connector.connect_plain().await?,
            false => setup.connector.connect().await?,
        };
        let first = self.clock(&session).await;
        let facts = Facts {
            pooled,
            settings: self.settings(&session).await?,
            activity: self.see(session.client.query_typed(ACTIVITY, &[])).await,
            standbys: self
                .see(session.client.query_typed(STANDBYS, &[]))
                .await
                .and_then(standbys),
            missing: self.missing(&session).await,
        };
        let mut report = StoreReport::new();
        (report.findings, report.failover, report.durability) = checks::all(&facts);
        if examination.probes {
            let key = scratch_key();
            let times = request_times(self.clone() as Arc<dyn Store>, &key, &examination).await;
            report.findings.push(times);
            report
                .findings
                .extend(self.forgets(&session, self.name(&key)).await);
            if let Ok(first) = &first {
                first.long_enough().await;
            }
        } else {
            report.findings.extend(not_tried(&["request-times"]));
        }
        let second = self.clock(&session).await;
        report.findings.push(match (&first, &second) {
            (Ok(first), Ok(second)) => first.judged(second),
            (Err(why), _) | (_, Err(why)) => checks::hidden("clock", why),
        });
        let mut server = ServerFacts::new(setup.connector.address.clone());
        server.clock_ahead_ms = first.ok().map(|reading| reading.ahead_ms());
        report.servers.push(server);
        Ok(report)
    }

    async fn see<T>(&self, asking: impl Future<Output = Result<T, Error>>) -> Seen<T> {
        let limit = self.0.setup.connector.timeout;
        match timeout(limit, asking).await {
            Ok(answer) => answer.map_err(|error| StoreError::from(failure::of_step(error)).message),
            Err(_) => Err(format!("no answer within {limit:?}")),
        }
    }

    async fn clock(&self, session: &Session) -> Seen<ClockReading> {
        ClockReading::of(async {
            let rows = self.see(session.client.query_typed(CLOCK, &[])).await?;
            let row = rows.first().ok_or("the server does not tell the time")?;
            row.try_get(0).map_err(|error| error.to_string())
        })
        .await
    }

    async fn settings(&self, session: &Session) -> Result<HashMap<String, String>, StoreError> {
        let rows = self.see(session.client.query_typed(SETTINGS, &[])).await;
        let rows = rows.map_err(StoreError::unknown)?;
        let pair = |row: &Row| Some((row.try_get(0).ok()?, row.try_get(1).ok()?));
        Ok(rows.iter().filter_map(pair).collect())
    }

    /// Returns the privileges that the user lacks, as in `UPDATE ON dlock_locks`.
    async fn missing(&self, session: &Session) -> Seen<Vec<String>> {
        let sql = self.0.setup.table.privileges();
        let rows = self.see(session.client.query_typed(&sql, &[])).await?;
        let lacks = |row: &Row| row.try_get(0).map_err(|error| error.to_string());
        rows.iter().map(lacks).collect()
    }

    /// Removes the row of the scratch key; returns a finding if that fails.
    async fn forgets(&self, session: &Session, key: Arc<str>) -> Option<Finding> {
        let sql = self.0.setup.table.forget();
        let removing = async {
            let scratch = self.name(&SCRATCH_PREFIX.into());
            session
                .client
                .query_typed(&sql, &[(&&*key, Type::TEXT), (&&*scratch, Type::TEXT)])
                .await
        };
        let why = self.see(removing).await.err()?;
        let why = format!("the row of the lock {key} that was tried may stay: {why}");
        Some(Finding::bad("scratch", why, "GRANT DELETE, and remove_free"))
    }
}

fn standbys(rows: Vec<Row>) -> Seen<Vec<Standby>> {
    let of = |row: &Row| -> Result<Standby, Error> {
        Ok(Standby {
            name: row.try_get(0)?,
            sync: row.try_get(1)?,
            bytes: row.try_get(2)?,
            seconds: row.try_get(3)?,
        })
    };
    rows.iter()
        .map(|row| of(row).map_err(|error| error.to_string()))
        .collect()
}
