//! The doctor on MariaDB, on servers that are set up wrongly on purpose: one for each row of docs/doctor.md.

use std::future::pending;
use std::time::Duration;

use dlock::LockClient;
use dlock::store::doctor::Verdict::{Bad, Good, Unknown};
use dlock_mysql::{MysqlLocks, OptsBuilder};
use dlock_tests::faults::answered;
use dlock_tests::mysql::{Mysql, MysqlProxy};
use dlock_tests::{Clock, eventually};
use futures_util::future::join_all;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts};

use crate::doctor_support::{are_good, found, is, read, tried};

const PATIENCE: Duration = Duration::from_secs(30);
const SAFE: &str = "--innodb-flush-log-at-trx-commit=1";

async fn store(opts: OptsBuilder) -> MysqlLocks {
    let builder = MysqlLocks::builder(opts).timeout(PATIENCE);
    builder.connect().await.expect("the server is there")
}

async fn client(opts: OptsBuilder) -> LockClient {
    let client = LockClient::builder().store(store(opts).await).timeout(PATIENCE);
    client.build().await.expect("a client")
}

/// A server with these options and a table, and a client.
async fn server_with(options: &[&str]) -> (Mysql, LockClient) {
    let server = Mysql::start_with(options, None).await;
    store(server.opts()).await.create_table().await.unwrap();
    let client = client(server.opts()).await;
    (server, client)
}

async fn sql(server: &Mysql, statements: &[&str]) {
    let mut conn = server.client().await;
    for statement in statements {
        conn.query_drop(*statement).await.unwrap();
    }
}

#[tokio::test]
async fn healthy_server_is_good_and_keeps_nothing_of_the_doctor() {
    let (server, client) = server_with(&[SAFE]).await;
    let diagnosis = tried(&client).await;
    are_good(
        &diagnosis,
        &[
            "lease-budget",
            "persistence",
            "writes",
            "replicas",
            "binlog",
            "versions",
            "timeouts",
            "engine",
            "purge",
            "connections",
            "permissions",
            "clock",
            "request-times",
        ],
    );
    assert!(diagnosis.what_if[1].lost.starts_with("none"), "{diagnosis}");
    let mut conn = server.client().await;
    let rows: Option<u64> = conn
        .query_first("SELECT COUNT(*) FROM dlock_locks")
        .await
        .unwrap();
    assert_eq!(rows, Some(0), "no row stays");
    is(&read(&client).await, "request-times", Unknown, "only reads");
}

#[tokio::test]
async fn settings_that_lose_locks_or_break_steps_are_told() {
    let (server, client) = server_with(&[SAFE, "--log-bin=bin", "--server-id=1", "--sync-binlog=1"]).await;
    is(&read(&client).await, "persistence", Good, "on disk");
    for (setting, wrong, right, check, why) in [
        ("innodb_flush_log_at_trx_commit", "2", "1", "persistence", "is 2"),
        ("sync_binlog", "0", "1", "persistence", "sync_binlog is not 1"),
        ("read_only", "ON", "OFF", "writes", "read_only is on"),
        (
            "binlog_format",
            "'STATEMENT'",
            "'MIXED'",
            "binlog",
            "is STATEMENT",
        ),
        (
            "max_statement_time",
            "0.5",
            "0",
            "timeouts",
            "max_statement_time is 0.5 s",
        ),
    ] {
        sql(&server, &[&format!("SET GLOBAL {setting} = {wrong}")]).await;
        is(&read(&client).await, check, Bad, why);
        sql(&server, &[&format!("SET GLOBAL {setting} = {right}")]).await;
        is(&read(&client).await, check, Good, "");
    }
    sql(&server, &["ALTER TABLE dlock_locks_floor ENGINE = MyISAM"]).await;
    is(&read(&client).await, "engine", Bad, "kept by MyISAM");
    sql(&server, &["DROP TABLE dlock_locks_floor"]).await;
    is(&read(&client).await, "engine", Bad, "not there");
    let (_server, torn) = server_with(&[SAFE, "--skip-innodb-doublewrite"]).await;
    is(&read(&torn).await, "persistence", Bad, "may corrupt pages");
}

/// A replica of this server, with these options.
async fn replica_of(server: &Mysql, options: &[&str]) -> Mysql {
    let replica = Mysql::start_with(&[&["--server-id=2"], options].concat(), None).await;
    let opts = Opts::from(server.opts());
    let follow = format!(
        "CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = {}, MASTER_USER = 'dlock', MASTER_PASSWORD = '{}'",
        server.port(),
        opts.pass().expect("a password")
    );
    sql(&replica, &[&follow, "START SLAVE"]).await;
    replica
}

#[tokio::test]
async fn asynchronous_replica_is_told() {
    let (server, client) = server_with(&[SAFE, "--log-bin=bin", "--server-id=1"]).await;
    is(&read(&client).await, "replicas", Good, "none");
    let _replica = replica_of(&server, &[]).await;
    eventually("the replica is linked", async || {
        found(&read(&client).await, "replicas").verdict == Bad
    })
    .await;
    let diagnosis = read(&client).await;
    is(&diagnosis, "replicas", Bad, "asynchronous");
    is(&diagnosis, "lease-budget", Unknown, "when a replica takes over");
}

#[tokio::test]
async fn semi_synchronous_replication_that_does_not_wait_is_told() {
    let options = [
        SAFE,
        "--log-bin=bin",
        "--server-id=1",
        "--rpl-semi-sync-master-enabled=1",
        "--rpl-semi-sync-master-timeout=500",
    ];
    let (server, client) = server_with(&options).await;
    is(&read(&client).await, "replicas", Bad, "no such replica is linked");
    let replica = replica_of(&server, &["--rpl-semi-sync-slave-enabled=1"]).await;
    // Whether it is waited for is decided anew at each commit.
    let becomes = async |verdict, why| {
        eventually(why, async || {
            sql(&server, &["CREATE OR REPLACE TABLE dlock.beside (a INT)"]).await;
            let diagnosis = read(&client).await;
            let finding = found(&diagnosis, "replicas");
            finding.verdict == verdict && finding.why.contains(why)
        })
        .await;
    };
    becomes(Good, "before it is answered").await;
    replica.stop();
    becomes(Bad, "fell back to asynchronous").await;
    replica.cont();
    becomes(Good, "before it is answered").await;
}

#[tokio::test]
async fn missing_privileges_are_told_and_what_is_hidden_is_unknown() {
    let (server, _) = server_with(&[SAFE]).await;
    sql(
        &server,
        &[
            "CREATE USER svc@'127.0.0.1' IDENTIFIED BY 'secret'",
            "GRANT SELECT, INSERT ON dlock.dlock_locks TO svc@'127.0.0.1'",
            "GRANT SELECT ON dlock.dlock_locks_floor TO svc@'127.0.0.1'",
        ],
    )
    .await;
    let limited = client(server.opts().user(Some("svc")).pass(Some("secret"))).await;
    let diagnosis = read(&limited).await;
    is(&diagnosis, "permissions", Bad, "UPDATE command denied");
    is(&diagnosis, "permissions", Bad, "DELETE command denied");
    is(&diagnosis, "purge", Unknown, "PROCESS");
}

#[tokio::test]
async fn scratch_rows_go_also_where_a_step_fails_or_a_doctor_was_interrupted() {
    let (server, client) = server_with(&[SAFE]).await;
    sql(
        &server,
        &[
            "INSERT INTO dlock_locks (k, holder) VALUES ('dlock:doctor:interrupted', 'h'), ('other', 'h')",
            "CREATE TRIGGER once BEFORE UPDATE ON dlock_locks FOR EACH ROW \
             IF OLD.holder <> '' THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'on purpose'; END IF",
        ],
    )
    .await;
    is(&tried(&client).await, "request-times", Bad, "on purpose");
    let mut conn = server.client().await;
    let rows: Vec<String> = conn.query("SELECT k FROM dlock_locks").await.unwrap();
    assert_eq!(rows, ["other"]);
}

#[tokio::test]
async fn server_without_room_for_connections_is_told() {
    let (server, client) = server_with(&[SAFE, "--max-connections=12"]).await;
    let mut others = Vec::new();
    for _ in 0..8 {
        others.push(Conn::new(server.opts()).await.unwrap());
    }
    is(&read(&client).await, "connections", Bad, "of 12 connections");
}

#[tokio::test]
async fn clock_that_steps_is_told() {
    let clock = Clock::new().expect("libfaketime is there");
    let server = Mysql::start_with(&[], Some(&clock)).await;
    store(server.opts()).await.create_table().await.unwrap();
    let client = client(server.opts()).await;
    let steps = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        clock.set(Duration::from_secs(60)).expect("the clock is set");
    };
    let (diagnosis, ()) = tokio::join!(tried(&client), steps);
    is(&diagnosis, "clock", Bad, "drifts or steps");
}

/// How long a query of a doctor may take, and by how much one of them is late.
const HASTY: Duration = Duration::from_secs(1);

/// Examines a server whose reply to the `k`-th statement of the doctor is late; returns whether there was such a statement.
async fn is_examined_with_a_late_reply(server: &Mysql, k: u64) -> bool {
    let proxy = MysqlProxy::start(server.addr());
    let builder = || MysqlLocks::builder(server.opts_at(proxy.addr())).timeout(HASTY);
    let store = answered(|| builder().connect())
        .await
        .expect("the server is there");
    let client = LockClient::builder().store(store).timeout(PATIENCE);
    let client = client.build().await.expect("a client");
    let fault = proxy.hold(k, |request| request.executes);
    let late = async {
        fault.caught().await;
        tokio::time::sleep(HASTY * 3 / 2).await;
        fault.release();
        pending().await
    };
    let examined = tokio::select! {
        examined = async { client.doctor().await } => examined,
        () = late => unreachable!("it goes on until the doctor is ready"),
    };
    // Connecting has its time limit, too, and without the settings there is no diagnosis.
    if let Ok(diagnosis) = examined {
        let bad = diagnosis.findings.iter().find(|finding| finding.verdict == Bad);
        assert!(bad.is_none(), "{k}: {bad:?}");
    }
    fault.fired()
}

/// A reply that comes after its time limit is not taken for the one to the next query. All at once, since each waits for that.
#[tokio::test]
async fn late_reply_is_not_that_to_another_query() {
    let (server, _) = server_with(&[SAFE]).await;
    let examined = join_all((1..=24).map(|k| is_examined_with_a_late_reply(&server, k))).await;
    assert!(examined[12] && !examined[23], "{examined:?}");
}

#[tokio::test]
async fn age_of_transactions_does_not_depend_on_the_time_zone_of_the_server() {
    // Five hours west of Greenwich, and two east of it.
    let each = ["WEST5", "EAST-2"].map(async |zone| {
        let clock = Clock::new().expect("libfaketime is there");
        let server = Mysql::start_in_zone(zone, &[SAFE], &clock).await;
        store(server.opts()).await.create_table().await.unwrap();
        let client = client(server.opts()).await;
        let mut conn = server.client().await;
        for statement in ["BEGIN", "INSERT INTO dlock_locks (k) VALUES ('open')"] {
            conn.query_drop(statement).await.unwrap();
        }
        is(&read(&client).await, "purge", Good, "no transaction is old");
        clock.set(Duration::from_secs(20 * 60)).expect("the clock is set");
        is(&read(&client).await, "purge", Bad, "is open for 12");
    });
    join_all(each).await;
}
