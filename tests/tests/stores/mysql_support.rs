//! What the suites on MariaDB have in common: a table, a hasty store behind a network, and a patient one beside it.

use std::sync::Arc;
use std::time::Duration;

use dlock::LockClient;
use dlock::store::{
    AcquireReply, AcquireRequest, GrantId, Kind, ReleaseReply, ReleaseRequest, RenewRequest, Renewal, Store,
    StoreError,
};
use dlock_mysql::{MysqlLocks, OptsBuilder};
use dlock_tests::Request;
use dlock_tests::faults::{PATIENCE, answered};
use dlock_tests::mysql::{Mysql, MysqlProxy};
use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use tokio::time::sleep;

pub(super) const MS: Duration = Duration::from_millis(1);
pub(super) const SEC: Duration = Duration::from_secs(1);
/// No test waits for its end.
pub(super) const LEASE: Duration = Duration::from_secs(300);
/// What one step of a hasty store may take.
const TIMEOUT: Duration = Duration::from_millis(600);

pub(super) fn acquires(request: &Request) -> bool {
    request.runs("LAST_INSERT_ID")
}

pub(super) fn releases(request: &Request) -> bool {
    request.runs("SET holder = ''")
}

pub(super) fn renews(request: &Request) -> bool {
    request.runs("FORCE INDEX (PRIMARY) SET until_us")
}

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
    pub(super) hasty: Arc<MysqlLocks>,
    pub(super) patient: Arc<MysqlLocks>,
}

pub(super) async fn setting() -> Setting {
    setting_on(Mysql::shared().await).await
}

pub(super) async fn setting_on(server: Arc<Mysql>) -> Setting {
    let table = server.table().await;
    let patient = connected(server.opts(), &table, PATIENCE).await;
    let proxy = MysqlProxy::start(server.addr());
    let hasty = connected(server.opts_at(proxy.addr()), &table, TIMEOUT).await;
    Setting {
        server,
        table,
        proxy,
        hasty,
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

    /// No lock gets a holder in 200 ms.
    pub(super) async fn stays_free(&self) {
        for _ in 0..20 {
            sleep(10 * MS).await;
            let held = self.number("SELECT COUNT(*) FROM {t} WHERE holder <> ''").await;
            assert_eq!(held, 0);
        }
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

pub(super) fn ask(key: &str, number: u64, lease: Duration) -> AcquireRequest {
    AcquireRequest::new(Kind::Mutex, key.into(), GrantId::from_parts(7, number), lease)
}

pub(super) fn end(key: &str, number: u64) -> ReleaseRequest {
    ReleaseRequest::new(Kind::Mutex, key.into(), GrantId::from_parts(7, number))
}

pub(super) fn renewal(key: &str, number: u64, lease: Duration) -> RenewRequest {
    RenewRequest::new(Kind::Mutex, key.into(), GrantId::from_parts(7, number), lease)
}

pub(super) fn token(reply: Result<AcquireReply, StoreError>) -> u64 {
    match reply {
        Ok(AcquireReply::Acquired(granted)) => granted.first_token,
        other => panic!("not granted: {other:?}"),
    }
}

pub(super) fn is_released(reply: &Result<ReleaseReply, StoreError>) -> bool {
    matches!(reply, Ok(ReleaseReply::Released { .. }))
}

/// Makes the row of a key, which is free then.
pub(super) async fn row(store: &Arc<MysqlLocks>, key: &str) {
    token(store.clone().acquire(ask(key, 999_999, LEASE)).await);
    assert!(is_released(&store.clone().release(end(key, 999_999)).await));
}

pub(super) async fn renewed(
    store: &Arc<MysqlLocks>,
    key: &str,
    number: u64,
    lease: Duration,
) -> Result<Renewal, StoreError> {
    let replies = store.clone().renew(vec![renewal(key, number, lease)]).await;
    replies.expect("each has a reply of its own").remove(0)
}
