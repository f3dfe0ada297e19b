//! Servers whose disks are full.

use std::sync::Arc;

use dlock_tests::etcd::Etcd;
use dlock_tests::eventually;
use dlock_tests::faults::answered;
use dlock_tests::mysql::Mysql;
use dlock_tests::postgres::{Postgres, connect};
use dlock_tests::zookeeper::Zookeeper;
use tokio_postgres::error::SqlState;

use crate::postgres_support::bank_on;
use crate::scenes::{Full, LEASE, full_disk_is_told_and_grants_no_lock_twice};
use crate::{etcd_conformance, mysql_conformance, postgres_conformance, zookeeper_conformance};

const MB: u64 = 1 << 20;

/// Uses up the log of a server without space, whose process then ends.
async fn write_log(server: &Postgres) {
    let Ok(client) = connect(&server.config()).await else {
        return;
    };
    let write =
        "SELECT pg_logical_emit_message(false, 'x', repeat('x', 1000000)) FROM generate_series(1, 20)";
    let _ = client.batch_execute(write).await;
}

/// An acquire that needs more room is refused. When the log has no room, the server ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_tells_and_ends_and_grants_no_lock_twice() {
    let server = Postgres::start_on_a_disk(80 * MB).await;
    let full = Full::RefusesAndEnds("No space left on device");
    full_disk_is_told_and_grants_no_lock_twice::<postgres_conformance::Table>(server, full, write_log).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mariadb_tells_and_keeps_what_is_held() {
    let server = Mysql::start_on_a_disk(120 * MB, &[]).await;
    let full = Full::Refuses("is full");
    full_disk_is_told_and_grants_no_lock_twice::<mysql_conformance::Table>(server, full, async |_| ()).await;
}

/// It waits until it can write its log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mariadb_with_a_binary_log_hangs_and_grants_no_lock_twice() {
    let server = Mysql::start_on_a_disk(120 * MB, &["--log-bin=bin"]).await;
    full_disk_is_told_and_grants_no_lock_twice::<mysql_conformance::Table>(server, Full::Hangs, async |_| ())
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_ends_and_grants_no_lock_twice() {
    let server = Etcd::start_on_a_disk(160 * MB).await;
    full_disk_is_told_and_grants_no_lock_twice::<etcd_conformance::Namespace>(
        server,
        Full::Ends,
        async |_| (),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn zookeeper_ends_and_grants_no_lock_twice() {
    let server = Zookeeper::start_on_a_disk(8 * MB).await;
    full_disk_is_told_and_grants_no_lock_twice::<zookeeper_conformance::Root>(
        server,
        Full::Ends,
        async |_| (),
    )
    .await;
}

/// A transaction that the server refuses to write, and one whose commit it does not survive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_commits_nothing_of_a_transaction_that_holds_a_lock() {
    let bank = bank_on(Arc::new(Postgres::start_on_a_disk(80 * MB).await)).await;
    let mut db = bank.db().await;
    db.batch_execute(&bank.payment("before")).await.unwrap();
    let guard = bank.one.lock("account").lease(LEASE).acquire().await.unwrap();
    bank.one
        .lock("other")
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    bank.server.fill_disk();

    let tx = db.transaction().await.unwrap();
    bank.locks.hold_in(&tx, &guard).await.unwrap();
    tx.batch_execute(&bank.payment("refused")).await.unwrap();
    let many = format!(
        "INSERT INTO {}_payments SELECT n FROM generate_series(1, 100000) n",
        bank.table
    );
    let error = tx.batch_execute(&many).await.unwrap_err();
    assert_eq!(error.code(), Some(&SqlState::DISK_FULL), "{error:?}");
    tx.rollback().await.unwrap();
    assert_eq!(bank.payments().await, ["before"]);
    assert!(guard.is_held());

    let tx = db.transaction().await.unwrap();
    bank.locks.lock_in(&tx, "other").await.unwrap();
    tx.batch_execute(&bank.payment("not committed")).await.unwrap();
    write_log(&bank.server).await;
    tx.commit().await.expect_err("the server is gone");
    eventually("it has ended", async || !bank.server.is_awake()).await;
    bank.server.free_disk();
    bank.server.restart().await;
    assert_eq!(bank.payments().await, ["before"]);
    eventually("the lock is free", async || bank.is_free("other").await).await;
    let token = guard.fencing_token();
    guard.release().await.unwrap();
    let next = answered(|| bank.other.lock("account").acquire()).await.unwrap();
    assert!(next.fencing_token() > token);
}
