//! What the suites of locks in transactions have in common: a table, and what two processes have of it.

use std::sync::Arc;

use dlock::LockClient;
use dlock_postgres::PostgresLocks;
use dlock_tests::faults::PATIENCE;
use dlock_tests::postgres::{Postgres, fresh_table};
use tokio_postgres::{Config, NoTls};

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
