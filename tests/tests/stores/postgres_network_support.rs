//! A table for processes that share it, some behind a network that loses and delays what they send.

use std::sync::Arc;
use std::time::Duration;

use dlock::LockClient;
use dlock_postgres::PostgresLocks;
use dlock_tests::faults::{PATIENCE, answered};
use dlock_tests::postgres::{PgProxy, Postgres, fresh_table};
use tokio_postgres::{Config, NoTls};

use crate::scenes::LEASE;

/// A table, and a network in front of the server.
pub(super) struct Setting {
    pub(super) server: Arc<Postgres>,
    pub(super) table: String,
    pub(super) proxy: PgProxy,
}

pub(super) async fn setting() -> Setting {
    setting_on(Postgres::shared().await).await
}

pub(super) async fn setting_on(server: Arc<Postgres>) -> Setting {
    let setting = Setting {
        proxy: PgProxy::start(server.addr()),
        table: fresh_table(),
        server,
    };
    let made = setting.store().await.create_table().await;
    made.expect("the table can be made");
    setting
}

impl Setting {
    pub(super) async fn connected(&self, config: Config, limit: Duration) -> Arc<PostgresLocks> {
        let builder = || PostgresLocks::builder(config.clone(), NoTls).table(&self.table);
        let store = answered(|| builder().timeout(limit).connect()).await;
        Arc::new(store.expect("the server is there"))
    }

    /// The store of another process.
    pub(super) async fn store(&self) -> Arc<PostgresLocks> {
        self.connected(self.server.config(), PATIENCE).await
    }

    /// The same, behind the network.
    pub(super) async fn behind(&self, limit: Duration) -> Arc<PostgresLocks> {
        self.connected(self.server.config_at(self.proxy.addr()), limit)
            .await
    }

    pub(super) async fn number(&self, sql: &str) -> i64 {
        let sql = sql.replace("{t}", &self.table);
        let row = self.server.client().await.query_one(&sql, &[]).await;
        row.expect("a row").get(0)
    }
}

pub(super) async fn client(store: &Arc<PostgresLocks>) -> LockClient {
    let builder = LockClient::builder().store((**store).clone()).lease(LEASE);
    let built = builder.retry_for(PATIENCE).build().await;
    built.expect("the server is there")
}
