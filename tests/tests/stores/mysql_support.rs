//! What the suites on MariaDB have in common: a table, a network, and a store that is never late.

use std::sync::Arc;
use std::time::Duration;

use dlock::LockClient;
use dlock_mysql::{MysqlLocks, OptsBuilder};
use dlock_tests::faults::{PATIENCE, answered};
use dlock_tests::mysql::{Mysql, MysqlProxy};
use mysql_async::Conn;
use mysql_async::prelude::Queryable;

pub(super) async fn connected(server: OptsBuilder, table: &str, timeout: Duration) -> Arc<MysqlLocks> {
    let builder = || MysqlLocks::builder(server.clone()).table(table).timeout(timeout);
    let connected = answered(|| builder().connect()).await;
    Arc::new(connected.expect("the server is there"))
}

pub(super) async fn client(store: &Arc<MysqlLocks>) -> LockClient {
    let builder = LockClient::builder().store((**store).clone()).retry_for(PATIENCE);
    builder.build().await.expect("the server is there")
}

pub(super) struct Setting {
    pub(super) server: Arc<Mysql>,
    pub(super) table: String,
    pub(super) proxy: MysqlProxy,
    pub(super) patient: Arc<MysqlLocks>,
}

pub(super) async fn setting() -> Setting {
    setting_on(Mysql::shared().await).await
}

pub(super) async fn setting_on(server: Arc<Mysql>) -> Setting {
    let table = server.table().await;
    let patient = connected(server.opts(), &table, PATIENCE).await;
    let proxy = MysqlProxy::start(server.addr());
    Setting {
        server,
        table,
        proxy,
        patient,
    }
}

impl Setting {
    /// Statements with the table as `{t}`.
    pub(super) async fn sql(&self, text: &str) {
        let text = text.replace("{t}", &format!("`{}`", self.table));
        self.server.client().await.query_drop(text).await.unwrap();
    }

    pub(super) async fn number(&self, text: &str) -> i64 {
        let text = text.replace("{t}", &format!("`{}`", self.table));
        let number = self.server.client().await.query_first(text).await.unwrap();
        number.expect("a row")
    }

    /// Ends the leases of all locks.
    pub(super) async fn expire(&self) {
        self.sql("UPDATE {t} SET until_us = until_us - 1000000000000")
            .await;
    }

    /// A transaction that has the row of this key locked, until the connection is dropped or committed.
    pub(super) async fn locked(&self, key: &str) -> Conn {
        let mut conn = self.server.client().await;
        let lock = format!("SELECT k FROM `{}` WHERE k = '{key}' FOR UPDATE", self.table);
        conn.query_drop("BEGIN").await.unwrap();
        let rows: Vec<Vec<u8>> = conn.query(lock).await.unwrap();
        assert_eq!(rows.len(), 1, "the row is there");
        conn
    }
}
