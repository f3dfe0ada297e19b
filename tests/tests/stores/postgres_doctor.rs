//! The doctor on PostgreSQL, on servers that are set up wrongly on purpose: one for each row of docs/doctor.md.

use std::time::Duration;

use dlock::LockClient;
use dlock::store::doctor::Verdict::{Bad, Good, Unknown};
use dlock_postgres::PostgresLocks;
use dlock_tests::postgres::{Pooler, Postgres, connect};
use dlock_tests::{Clock, eventually};
use tokio_postgres::{Config, NoTls};

use crate::doctor_support::{are_good, found, is, read, tried};

const PATIENCE: Duration = Duration::from_secs(30);

/// A client, and the table of its locks.
async fn client(config: Config) -> LockClient {
    let builder = PostgresLocks::builder(config, NoTls).timeout(PATIENCE);
    let store = builder.connect().await.expect("the server is there");
    let client = LockClient::builder().store(store).timeout(PATIENCE).build();
    client.await.expect("a client")
}

async fn sql(server: &Postgres, text: &str) {
    let client = server.client().await;
    for statement in text.split(';') {
        client.batch_execute(statement).await.unwrap();
    }
}

/// A server whose settings are safe, with a table, and a client.
async fn safe() -> (Postgres, LockClient) {
    let server = Postgres::start().await;
    sql(
        &server,
        "ALTER SYSTEM SET fsync = on; ALTER SYSTEM SET full_page_writes = on; SELECT pg_reload_conf()",
    )
    .await;
    let store = PostgresLocks::connect(server.config(), NoTls).await.unwrap();
    store.create_table().await.unwrap();
    let client = client(server.config()).await;
    (server, client)
}

/// Waits until a check of a doctor that only reads comes out so.
async fn becomes(client: &LockClient, check: &str, verdict: dlock::store::doctor::Verdict, why: &str) {
    eventually(check, async || {
        let diagnosis = read(client).await;
        let finding = found(&diagnosis, check);
        finding.verdict == verdict && finding.why.contains(why)
    })
    .await;
    is(&read(client).await, check, verdict, why);
}

#[tokio::test]
async fn healthy_server_is_good_and_keeps_nothing_of_the_doctor() {
    let (server, client) = safe().await;
    let diagnosis = tried(&client).await;
    are_good(
        &diagnosis,
        &[
            "lease-budget",
            "persistence",
            "replicas",
            "versions",
            "pooler",
            "timeouts",
            "vacuum",
            "connections",
            "permissions",
            "clock",
            "request-times",
        ],
    );
    assert!(diagnosis.what_if[1].lost.starts_with("none"), "{diagnosis}");
    let db = server.client().await;
    let rows = db.query_one("SELECT count(*) FROM dlock_locks", &[]);
    assert_eq!(rows.await.unwrap().get::<_, i64>(0), 0, "no row stays");
    is(&read(&client).await, "request-times", Unknown, "only reads");
}

#[tokio::test]
async fn settings_that_lose_locks_or_break_connections_are_told() {
    let (server, client) = safe().await;
    becomes(&client, "persistence", Good, "on disk").await;
    for (setting, value, check, why) in [
        ("fsync", "off", "persistence", "fsync is off"),
        (
            "full_page_writes",
            "off",
            "persistence",
            "full_page_writes is off",
        ),
        (
            "synchronous_commit",
            "off",
            "persistence",
            "a crash forgets the newest locks",
        ),
        ("autovacuum", "off", "vacuum", "autovacuum is off"),
        ("lock_timeout", "50", "timeouts", "lock_timeout is 50 ms"),
        (
            "synchronous_standby_names",
            "'absent'",
            "replicas",
            "none is linked",
        ),
    ] {
        let reload = "SELECT pg_reload_conf()";
        sql(
            &server,
            &format!("ALTER SYSTEM SET {setting} = {value}; {reload}"),
        )
        .await;
        becomes(&client, check, Bad, why).await;
        sql(&server, &format!("ALTER SYSTEM RESET {setting}; {reload}")).await;
        if setting == "fsync" || setting == "full_page_writes" {
            sql(&server, &format!("ALTER SYSTEM SET {setting} = on; {reload}")).await;
        }
        becomes(&client, check, Good, "").await;
    }
}

#[tokio::test]
async fn server_that_only_reads_is_refused_with_its_reason() {
    let (server, client) = safe().await;
    server.demote().await;
    let refused = client.doctor().await.unwrap_err().to_string();
    assert!(refused.contains("only reads"), "{refused}");
}

/// Has commits wait for these standbys.
async fn waits_for(server: &Postgres, standbys: &str) {
    let set = format!("ALTER SYSTEM SET synchronous_standby_names = '{standbys}'; SELECT pg_reload_conf()");
    sql(server, &set).await;
}

#[tokio::test]
async fn standby_that_is_not_waited_for_is_told() {
    let (server, _) = safe().await;
    let _standby = Postgres::standby_of(&server).await;
    let client = client(server.config()).await;
    becomes(&client, "replicas", Bad, "asynchronous").await;
    is(
        &read(&client).await,
        "lease-budget",
        Unknown,
        "when a standby takes over",
    );
    waits_for(&server, "*").await;
    becomes(&client, "replicas", Good, "synchronous standby").await;
    waits_for(&server, "ANY 2 (*)").await;
    becomes(&client, "replicas", Bad, "no more than 1 can acknowledge").await;
}

#[tokio::test]
async fn standby_whose_state_is_hidden_is_neither_good_nor_bad() {
    let (server, _) = safe().await;
    sql(&server, "CREATE ROLE svc LOGIN PASSWORD 'secret'").await;
    let _standby = Postgres::standby_of(&server).await;
    let mut config = server.config();
    config.user("svc").password("secret");
    let limited = client(config).await;
    becomes(&limited, "replicas", Unknown, "whether standbys are synchronous").await;
    is(
        &read(&limited).await,
        "lease-budget",
        Unknown,
        "when a standby takes over",
    );
    waits_for(&server, "*").await;
    becomes(&client_of(&server).await, "replicas", Good, "synchronous standby").await;
    is(
        &read(&limited).await,
        "replicas",
        Unknown,
        "whether standbys are synchronous",
    );
}

#[tokio::test]
async fn transaction_pooler_and_the_time_outs_behind_it_are_told() {
    let (server, direct) = safe().await;
    is(&read(&direct).await, "pooler", Good, "no transaction pooler");
    sql(&server, "ALTER ROLE dlock SET idle_session_timeout = '5min'").await;
    is(
        &read(&direct).await,
        "timeouts",
        Good,
        "no connection of locks is ended",
    );
    let pooler = Pooler::start(&server, "transaction").await;
    let client = client(server.config_at(pooler.addr())).await;
    let diagnosis = read(&client).await;
    is(&diagnosis, "pooler", Bad, "waiters ask four times a second");
    is(&diagnosis, "timeouts", Bad, "idle_session_timeout");
}

#[tokio::test]
async fn missing_tables_and_privileges_are_told_and_what_is_hidden_is_unknown() {
    let (server, _) = safe().await;
    sql(
        &server,
        "CREATE ROLE svc LOGIN PASSWORD 'secret'; GRANT SELECT, INSERT ON dlock_locks TO svc",
    )
    .await;
    let mut config = server.config();
    config.user("svc").password("secret");
    // A session of another user, which this one may not look at.
    let _other = connect(&server.config()).await.unwrap();
    let limited = client(config).await;
    let diagnosis = read(&limited).await;
    is(&diagnosis, "permissions", Bad, "UPDATE ON \"dlock_locks\"");
    is(&diagnosis, "permissions", Bad, "SELECT ON \"dlock_locks_pins\"");
    is(&diagnosis, "vacuum", Unknown, "transactions of other users");
    let diagnosis = tried(&limited).await;
    is(&diagnosis, "request-times", Bad, "could not be acquired");
    is(&diagnosis, "scratch", Bad, "permission denied");
    let revoke = "REVOKE EXECUTE ON FUNCTION dlock_locks_first FROM PUBLIC";
    sql(&server, revoke).await;
    is(
        &read(&limited).await,
        "permissions",
        Bad,
        "EXECUTE ON dlock_locks_first(",
    );
    sql(
        &server,
        "DROP VIEW dlock_locks_pins; DROP TABLE dlock_locks_floor",
    )
    .await;
    let direct = client_of(&server).await;
    is(
        &read(&direct).await,
        "permissions",
        Bad,
        "the table ON \"dlock_locks_floor\"",
    );
}

#[tokio::test]
async fn scratch_rows_go_also_where_a_step_fails_or_a_doctor_was_interrupted() {
    let (server, client) = safe().await;
    let db = server.client().await;
    db.batch_execute(
        "INSERT INTO dlock_locks (key, holder) VALUES ('dlock:doctor:interrupted', 'h'), ('other', 'h'); \
         CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'on purpose'; END $$; \
         CREATE TRIGGER once BEFORE UPDATE ON dlock_locks FOR EACH ROW WHEN (OLD.holder <> '') \
         EXECUTE FUNCTION fail()",
    )
    .await
    .unwrap();
    is(&tried(&client).await, "request-times", Bad, "on purpose");
    let rows = db.query("SELECT key FROM dlock_locks", &[]).await.unwrap();
    let keys: Vec<&str> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(keys, ["other"]);
}

async fn client_of(server: &Postgres) -> LockClient {
    client(server.config()).await
}

#[tokio::test]
async fn server_without_room_for_connections_is_told() {
    let (server, _) = safe().await;
    sql(&server, "ALTER SYSTEM SET max_connections = 12").await;
    server.restart().await;
    let client = client(server.config()).await;
    let mut others = Vec::new();
    for _ in 0..6 {
        others.push(connect(&server.config()).await.unwrap());
    }
    becomes(&client, "connections", Bad, "of 9 connections").await;
}

#[tokio::test]
async fn clock_that_steps_is_told() {
    let clock = Clock::new().expect("libfaketime is there");
    let server = Postgres::start_by(Some(&clock)).await;
    let store = PostgresLocks::connect(server.config(), NoTls).await.unwrap();
    store.create_table().await.unwrap();
    let client = client(server.config()).await;
    let steps = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        clock.set(Duration::from_secs(60)).expect("the clock is set");
    };
    let (diagnosis, ()) = tokio::join!(tried(&client), steps);
    is(&diagnosis, "clock", Bad, "drifts or steps");
}

/// A transaction that keeps dead rows of the locks from being removed, and others that do not.
#[tokio::test]
async fn only_transactions_that_hold_back_dead_rows_are_too_old() {
    let clock = Clock::new().expect("libfaketime is there");
    let server = Postgres::start_by(Some(&clock)).await;
    let store = PostgresLocks::connect(server.config(), NoTls).await.unwrap();
    store.create_table().await.unwrap();
    let client = client(server.config()).await;
    let snapshot = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1";
    let vacuums =
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'VACUUM%' AND wait_event_type = 'Lock'";
    sql(&server, "CREATE DATABASE other; CREATE TABLE beside ()").await;
    let mut config = server.config();
    let other = connect(config.dbname("other")).await.unwrap();
    other.batch_execute(snapshot).await.unwrap();
    // Has no snapshot between its statements, and keeps a vacuum waiting, which has one of its own.
    let idle = server.client().await;
    idle.batch_execute("BEGIN; LOCK TABLE beside IN SHARE UPDATE EXCLUSIVE MODE")
        .await
        .unwrap();
    let vacuum = server.client().await;
    let vacuum = tokio::spawn(async move { vacuum.batch_execute("VACUUM beside").await });
    eventually("the vacuum waits", async || {
        let waiting = server.client().await.query_one(vacuums, &[]).await.unwrap();
        waiting.get::<_, i64>(0) == 1
    })
    .await;
    let minutes = |minutes: u64| clock.set(Duration::from_secs(60 * minutes)).unwrap();
    minutes(20);
    is(&read(&client).await, "vacuum", Good, "no transaction is old");
    let here = server.client().await;
    // One with an id keeps the rows of all databases.
    let of_other = connect(config.dbname("other")).await.unwrap();
    for (session, begin, now) in [
        (&of_other, "BEGIN; SELECT txid_current()", 40),
        (&here, snapshot, 60),
    ] {
        session.batch_execute(begin).await.unwrap();
        is(&read(&client).await, "vacuum", Good, "no transaction is old");
        minutes(now);
        is(&read(&client).await, "vacuum", Bad, "no dead row is removed");
        session.batch_execute("ROLLBACK").await.unwrap();
    }
    idle.batch_execute("ROLLBACK").await.unwrap();
    vacuum.await.unwrap().unwrap();
}
