//! Helpers of the suites of locks in transactions: a table, and two processes that use it.

use std::sync::Arc;
use std::time::Duration;

use dlock::{LockClient, LockGuard};
use dlock_postgres::PostgresLocks;
use dlock_tests::faults::PATIENCE;
use dlock_tests::postgres::{Postgres, fresh_table};
use tokio_postgres::{Client, Config, NoTls};

pub(super) struct Setting {
    pub(super) server: Arc<Postgres>,
    pub(super) table: String,
    pub(super) here: PostgresLocks,
    pub(super) one: LockClient,
    pub(super) other: LockClient,
}

pub(super) async fn connected(config: Config, table: &str) -> PostgresLocks {
    let builder = PostgresLocks::builder(config, NoTls)
        .table(table)
        .timeout(PATIENCE);
    builder.connect().await.expect("the server is there")
}

pub(super) async fn client(locks: &PostgresLocks) -> LockClient {
    let built = LockClient::builder().store(locks.clone()).build().await;
    built.expect("the server is there")
}

pub(super) async fn setting_on(server: Arc<Postgres>) -> Setting {
    let table = fresh_table();
    let here = connected(server.config(), &table).await;
    here.create_table().await.expect("the table can be made");
    Setting {
        one: client(&here).await,
        other: client(&connected(server.config(), &table).await).await,
        here,
        server,
        table,
    }
}

/// A table of locks, a table of payments, and two processes that pay.
pub(super) struct Bank {
    pub(super) server: Arc<Postgres>,
    pub(super) table: String,
    pub(super) locks: PostgresLocks,
    pub(super) one: LockClient,
    pub(super) other: LockClient,
}

pub(super) async fn bank() -> Bank {
    bank_on(Postgres::shared().await).await
}

pub(super) async fn bank_on(server: Arc<Postgres>) -> Bank {
    let setting = setting_on(server).await;
    let sql = format!("CREATE TABLE {}_payments (what text)", setting.table);
    setting.server.client().await.batch_execute(&sql).await.unwrap();
    Bank {
        server: setting.server,
        table: setting.table,
        locks: setting.here,
        one: setting.one,
        other: setting.other,
    }
}

impl Bank {
    pub(super) async fn db(&self) -> Client {
        self.server.client().await
    }

    pub(super) fn payment(&self, what: &str) -> String {
        format!("INSERT INTO {}_payments VALUES ('{what}')", self.table)
    }

    pub(super) async fn payments(&self) -> Vec<String> {
        let sql = format!("SELECT what FROM {}_payments ORDER BY what", self.table);
        let rows = self.db().await.query(&sql, &[]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    /// Whether the other process is told that the lock is held without an end, which is what a transaction does.
    pub(super) async fn is_pinned(&self, key: &str) -> bool {
        match self.other.lock(key).try_acquire().await {
            Err(dlock::Error::NotAcquired { remaining: None, .. }) => true,
            Err(error) if error.is_busy() => false,
            Err(error) => panic!("{error}"),
            Ok(guard) => panic!("it has {guard:?}"),
        }
    }

    /// Acquires the lock of the account, without renewals.
    pub(super) async fn held_for(&self, lease: Duration) -> LockGuard {
        let lock = self.one.lock("account").fixed_lease(lease);
        lock.acquire().await.unwrap()
    }

    pub(super) async fn is_free(&self, key: &str) -> bool {
        match self.other.lock(key).try_acquire().await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(error) if error.is_busy() => false,
            Err(error) => panic!("{error}"),
        }
    }

    /// Ends all leases on the server; their holders do not know.
    pub(super) async fn expires(&self) {
        let table = &self.table;
        let sql = format!(
            "UPDATE {table} SET until = clock_timestamp() - interval '1 hour', read_until = \
             least(read_until, clock_timestamp() - interval '1 hour'); \
             UPDATE {table}_readers SET until = clock_timestamp() - interval '1 hour'"
        );
        self.db().await.batch_execute(&sql).await.unwrap();
    }
}
