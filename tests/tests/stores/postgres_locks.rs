//! Locks on PostgreSQL where the server, the network or the table fails: what is promised, and what went wrong elsewhere.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::store::{AcquireReply, Kind, Outcome, Reason, Renewal, Store};
use dlock::{Error, HoldState, LockClient, Loss};
use dlock_postgres::PostgresLocks;
use dlock_tests::faults::{PATIENCE, SOON, answered, within};
use dlock_tests::postgres::{PgProxy, Pooler, Postgres, connect, fresh_table};
use dlock_tests::{Direction, eventually};
use futures_util::future::join_all;
use tokio::time::sleep;
use tokio_postgres::{Config, NoTls};

use crate::postgres_conformance::Table;
use crate::scenes::{
    LEASE, MS, Rows, SEC, acquires_until_it_fails, ask,
    clock_that_jumps_lets_tokens_grow_and_the_holder_know, end, in_scenes, is_released, renewal, row, token,
};

async fn connected(config: Config, table: &str, timeout: Duration) -> Arc<PostgresLocks> {
    let builder = || {
        PostgresLocks::builder(config.clone(), NoTls)
            .table(table)
            .timeout(timeout)
    };
    Arc::new(
        answered(|| builder().connect())
            .await
            .expect("the server is there"),
    )
}

async fn client(store: &Arc<PostgresLocks>) -> LockClient {
    let built = LockClient::builder()
        .store((**store).clone())
        .retry_for(PATIENCE)
        .build()
        .await;
    built.expect("the server is there")
}

/// A table, a network, and a store that is never late.
struct Setting {
    server: Arc<Postgres>,
    table: String,
    proxy: PgProxy,
    patient: Arc<PostgresLocks>,
}

async fn setting() -> Setting {
    setting_on(Postgres::shared().await).await
}

async fn setting_on(server: Arc<Postgres>) -> Setting {
    let table = fresh_table();
    let patient = connected(server.config(), &table, PATIENCE).await;
    patient.create_table().await.expect("the table can be made");
    let proxy = PgProxy::start(server.addr());
    Setting {
        server,
        table,
        proxy,
        patient,
    }
}

impl Setting {
    async fn sql(&self, text: &str) {
        let text = text.replace("{t}", &format!("\"{}\"", self.table));
        self.server.client().await.batch_execute(&text).await.unwrap();
    }

    /// How many locks have a holder.
    async fn held(&self) -> i64 {
        self.number("SELECT count(*) FROM {t} WHERE holder <> ''").await
    }

    async fn number(&self, text: &str) -> i64 {
        let text = text.replace("{t}", &format!("\"{}\"", self.table));
        self.server
            .client()
            .await
            .query_one(&text, &[])
            .await
            .unwrap()
            .get(0)
    }
}

in_scenes! { Table:
    /// Check, then write, makes two first holders; so does an insert that finds the row of another.
    fn of_many_processes_at_an_absent_or_expired_row_one_wins() = one_of_many_processes_wins(Postgres::shared());
    /// Tokens drawn in `VALUES`, or before the row is locked, go back now and then.
    fn tokens_of_many_processes_never_go_back() = tokens_never_go_back(Postgres::shared());
    /// Renewing by name, or by an upsert, makes two holders.
    fn renewal_after_a_take_over_or_a_loss_of_all_rows_changes_nothing() = renewal_revives_no_lock(Postgres::shared());
    fn acquire_that_comes_late_takes_nothing() = late_acquire_takes_nothing(Postgres::shared());
    fn release_waits_until_a_late_acquire_can_do_nothing_any_more() = release_waits_for_a_late_acquire(Postgres::shared());
    /// Each verb, with its request or its reply lost: it tells truly what is known, and what follows is right.
    fn lost_requests_and_replies_leave_nothing_wrong() = lost_requests_and_replies_leave_nothing_wrong(Postgres::shared());
    fn lost_request_or_reply_of_a_forced_release_ends_the_lock_or_is_told() = lost_request_or_reply_of_a_forced_release_ends_the_lock_or_is_told(Postgres::shared());
    fn lost_renewals_cost_no_lock() = lost_renewals_cost_no_lock(Postgres::shared());
    fn what_waits_to_be_sent_goes_into_one_statement() = what_waits_goes_together(Postgres::shared());
    fn key_that_the_server_refuses_costs_no_other_key() = refused_key_costs_no_other_key(Postgres::shared());
    fn holds_survive_a_restart_and_waiters_go_on() = holds_survive_a_restart_and_waiters_go_on(Postgres::start());
    fn holder_is_lost_before_the_lease_ends_when_the_server_stands_still() = holder_is_lost_before_the_lease_ends(Postgres::start());
    fn holder_that_is_cut_off_is_lost_before_another_one_has_its_lock() = holder_that_is_cut_off_is_lost_before_another_one_has_its_lock(Postgres::shared());
    fn broken_connections_cost_nothing_that_is_held() = broken_connections_cost_nothing_that_is_held(Postgres::shared());
    fn dropped_client_leaves_no_connection_and_no_lock() = dropped_client_leaves_no_connection_and_no_lock(Postgres::start());
    fn many_locks_of_a_client_are_renewed_by_few_statements() = many_locks_of_a_client_are_renewed_by_few_statements(Postgres::shared());
    fn conflicts_at_any_step_cost_no_lock_and_grant_none_twice() = conflicts_at_any_step_cost_no_lock_and_grant_none_twice(Postgres::shared());
}

#[tokio::test]
async fn clock_of_the_server_that_jumps_lets_tokens_grow_and_the_holder_know() {
    clock_that_jumps_lets_tokens_grow_and_the_holder_know::<Table>(async |clock| {
        Postgres::start_by(Some(clock)).await
    })
    .await;
}

#[tokio::test]
async fn tokens_grow_though_rows_are_removed_and_the_clock_is_behind() {
    let setting = setting().await;
    let store = &setting.patient;
    // Far ahead of the clock.
    setting
        .sql("INSERT INTO {t} (key, fence, tokens) VALUES ('k', 5000000000000000, 9)")
        .await;
    let before = token(store.clone().acquire(ask("k", 1, LEASE)).await);
    assert_eq!(before, 5_000_000_000_000_009);
    assert_eq!(store.remove_free().await.unwrap(), 0, "it is held");
    assert!(is_released(&store.clone().release(end("k", 1)).await));
    assert_eq!(
        store.remove_free().await.unwrap(),
        0,
        "it is free for a moment only"
    );
    setting
        .sql("UPDATE {t} SET until = clock_timestamp() - interval '2 minutes'")
        .await;
    assert_eq!(store.remove_free().await.unwrap(), 1);
    assert_eq!(setting.number("SELECT count(*) FROM {t}").await, 0);
    assert!(token(store.clone().acquire(ask("k", 2, LEASE)).await) > before);
}

/// `now()` is the time at which a transaction began: a lease that is counted from it is over after a long wait for the table,
/// as for `VACUUM FULL`.
#[tokio::test]
async fn lease_after_a_locked_table_is_whole() {
    let setting = setting().await;
    let store = &setting.patient;
    row(store, "k").await;
    let mut db = setting.server.client().await;
    let tx = db.transaction().await.unwrap();
    let lock = format!("LOCK TABLE \"{}\" IN ACCESS EXCLUSIVE MODE", setting.table);
    tx.batch_execute(&lock).await.unwrap();
    let asked = tokio::spawn(store.clone().acquire(ask("k", 1, SEC)));
    let waiting = "SELECT count(*) FROM pg_locks JOIN pg_class c ON c.oid = relation WHERE NOT granted AND relname = '{name}'";
    let waiting = waiting.replace("{name}", &setting.table);
    eventually("it waits", async || setting.number(&waiting).await > 0).await;
    sleep(1200 * MS).await;
    let freed = Instant::now();
    tx.commit().await.unwrap();
    token(asked.await.unwrap());
    let left = "SELECT (extract(epoch FROM until - clock_timestamp()) * 1000000)::int8 FROM {t}";
    let left = setting.number(left).await;
    let passed = i64::try_from(freed.elapsed().as_micros()).unwrap();
    assert!(left + passed > 950_000, "{left} {passed}");
}

/// Its caller is told when to ask again, and does not wait for the other transaction.
#[tokio::test]
async fn row_that_another_transaction_has_locked_is_busy() {
    let setting = setting().await;
    let store = &setting.patient;
    row(store, "k").await;
    let mut db = setting.server.client().await;
    let tx = db.transaction().await.unwrap();
    let lock = format!("SELECT FROM \"{}\" WHERE key = 'k' FOR UPDATE", setting.table);
    tx.batch_execute(&lock).await.unwrap();
    let busy = store.clone().acquire(ask("k", 1, LEASE)).await.unwrap();
    assert!(
        matches!(busy, AcquireReply::Busy(busy) if busy.remaining.is_none() && busy.again.is_some()),
        "{busy:?}"
    );
    tx.commit().await.unwrap();
    token(store.clone().acquire(ask("k", 2, LEASE)).await);
}

/// An acquire that was in flight may take effect between the last look and a later time: the release would answer that it
/// cannot take effect any more. Here each look takes 300 ms.
#[tokio::test]
async fn release_reads_the_time_before_its_last_look() {
    let setting = setting().await;
    row(&setting.patient, "k").await;
    let role = format!("{}_slow", setting.table);
    setting
        .sql(&format!(
            "CREATE ROLE {role}; GRANT SELECT, UPDATE ON {{t}} TO {role}; \
             ALTER TABLE {{t}} ENABLE ROW LEVEL SECURITY; \
             CREATE POLICY slow ON {{t}} USING (pg_sleep(0.3) IS NOT NULL)"
        ))
        .await;
    let mut db = setting.server.client().await;
    let tx = db.transaction().await.unwrap();
    let lock = format!("SELECT FROM \"{}\" WHERE key = 'k' FOR UPDATE", setting.table);
    tx.batch_execute(&lock).await.unwrap();
    let slow = setting.server.client().await;
    slow.batch_execute(&format!("SET ROLE {role}")).await.unwrap();
    let release = format!(
        "SELECT f.locked, (extract(epoch FROM clock_timestamp()) * 1000000)::int8 - f.now \
         FROM \"{}_release\"('k', 'x', 0, 1, false) f",
        setting.table
    );
    let released = slow.query_one(&release, &[]).await.unwrap();
    assert!(released.get::<_, bool>(0));
    let passed: i64 = released.get(1);
    assert!(passed >= 250_000, "{passed} µs before its end");
}

/// Serialization failures, dead-locks and time limits are neither a loss nor a release.
#[tokio::test]
async fn failures_that_pass_are_neither_a_loss_nor_a_release() {
    for code in ["40001", "40P01", "55P03"] {
        let setting = setting().await;
        setting
            .sql(&format!(
                "CREATE FUNCTION {t}_fails() RETURNS trigger LANGUAGE plpgsql AS \
                 $$ BEGIN RAISE EXCEPTION 'it fails' USING ERRCODE = '{code}'; END $$;
                 CREATE TRIGGER fails BEFORE UPDATE ON {t} FOR EACH ROW EXECUTE FUNCTION {t}_fails();
                 ALTER TABLE {t} DISABLE TRIGGER fails",
                t = setting.table
            ))
            .await;
        let here = client(&setting.patient).await;
        let switch = async |on: &str| {
            setting
                .sql(&format!("ALTER TABLE {{t}} {on} TRIGGER fails"))
                .await
        };
        here.lock("k").acquire().await.unwrap().release().await.unwrap();
        switch("ENABLE").await;
        let error = setting
            .patient
            .clone()
            .acquire(ask("k", 1, LEASE))
            .await
            .unwrap_err();
        assert_eq!(
            (error.outcome, &error.reason),
            (Outcome::NotDone, &Reason::Unreachable),
            "{error}"
        );
        let waits = tokio::spawn(here.lock("k").lease(3 * SEC).acquire());
        sleep(200 * MS).await;
        switch("DISABLE").await;
        let guard = within(PATIENCE, "the acquire goes on", waits)
            .await
            .unwrap()
            .unwrap();
        switch("ENABLE").await;
        sleep(1300 * MS).await;
        assert_ne!(guard.state(), HoldState::Lost(Loss::Released));
        assert!(guard.is_held(), "a renewal failed, and the lease goes on");
        switch("DISABLE").await;
        eventually("it is renewed", async || guard.state() == HoldState::Held).await;
        switch("ENABLE").await;
        let release = tokio::spawn(guard.release());
        sleep(200 * MS).await;
        switch("DISABLE").await;
        within(PATIENCE, "the release is repeated", release)
            .await
            .unwrap()
            .unwrap();
    }
}

/// A disk that is full refuses what it will take later.
#[tokio::test]
async fn release_is_repeated_until_the_disk_has_room() {
    let setting = setting().await;
    setting
        .sql(&format!(
            "CREATE FUNCTION {t}_fails() RETURNS trigger LANGUAGE plpgsql AS \
             $$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$",
            t = setting.table
        ))
        .await;
    let here = client(&setting.patient).await;
    let guard = here.lock("k").acquire().await.unwrap();
    let full = format!(
        "CREATE TRIGGER fails BEFORE UPDATE ON {{t}} FOR EACH ROW EXECUTE FUNCTION {}_fails()",
        setting.table
    );
    setting.sql(&full).await;
    let mut release = tokio::spawn(guard.release());
    assert!(tokio::time::timeout(400 * MS, &mut release).await.is_err());
    setting.sql("DROP TRIGGER fails ON {t}").await;
    within(PATIENCE, "the release is repeated", release)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(setting.held().await, 0);
}

/// What needs no more room goes on.
#[tokio::test]
async fn table_that_cannot_grow_fails_acquires_of_new_keys_and_no_other_step() {
    let setting = setting_on(Arc::new(Postgres::start_on_a_disk(80 << 20).await)).await;
    let store = &setting.patient;
    let first = token(store.clone().acquire(ask("k", 1, LEASE)).await);
    setting
        .sql("ALTER TABLE {t} SET (autovacuum_enabled = off)")
        .await;
    setting.server.fill_disk();
    let error = acquires_until_it_fails(store).await;
    assert_eq!(error.outcome, Outcome::NotDone, "{error}");
    assert!(error.message.contains("No space left on device"), "{error}");
    let renewals = store.clone().renew(vec![renewal("k", 1, LEASE)]).await.unwrap();
    assert!(matches!(renewals[..], [Ok(Renewal::Renewed)]), "{renewals:?}");
    assert!(is_released(&store.clone().release(end("k", 1)).await));
    assert!(token(store.clone().acquire(ask("k", 7, LEASE)).await) > first);
    setting.server.free_disk();
    token(store.clone().acquire(ask("new", 8, LEASE)).await);
}

/// A name that this database cannot write, among many that it can: only its own acquire fails.
#[tokio::test]
async fn step_that_fails_for_its_values_fails_alone() {
    let server = Postgres::shared().await;
    let database = format!("latin_{:08x}", fastrand::u32(..));
    let create = format!(
        "CREATE DATABASE {database} ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    );
    server.client().await.batch_execute(&create).await.unwrap();
    let mut config = server.config();
    config.dbname(&database);
    let proxy = PgProxy::start(server.addr());
    let mut behind = server.config_at(proxy.addr());
    behind.dbname(&database);
    let store = connected(config, "locks", PATIENCE).await;
    store.create_table().await.unwrap();
    let store = connected(behind, "locks", PATIENCE).await;
    token(store.clone().acquire(ask("first", 1, LEASE)).await);
    // All go into one statement.
    proxy.delay(Direction::ToServer, 100 * MS, Duration::ZERO);
    let busy: Vec<_> = (2..8)
        .map(|n| tokio::spawn(store.clone().acquire(ask(&format!("a{n}"), n, LEASE))))
        .collect();
    sleep(20 * MS).await;
    let keys = ["b", "\u{20ac}", "c", "\u{e9}"];
    let replies = join_all(
        keys.iter()
            .zip(20..)
            .map(|(key, n)| store.clone().acquire(ask(key, n, LEASE))),
    )
    .await;
    for (key, reply) in keys.iter().zip(replies) {
        match *key {
            "\u{20ac}" => assert_eq!(reply.unwrap_err().outcome, Outcome::NotDone),
            _ => assert!(matches!(reply, Ok(AcquireReply::Acquired(_))), "{key}: {reply:?}"),
        }
    }
    for reply in join_all(busy).await {
        token(reply.unwrap());
    }
}

/// As an operator may enter it.
#[tokio::test]
async fn lease_without_an_end_is_shown_and_hides_no_other_lock() {
    let setting = setting().await;
    let store = &setting.patient;
    for (key, n) in [("a", 1), ("endless", 2), ("z", 3)] {
        token(store.clone().acquire(ask(key, n, LEASE)).await);
    }
    setting
        .sql("UPDATE {t} SET until = 'infinity' WHERE key = 'endless'")
        .await;
    let listed = client(store).await.list("").await.unwrap();
    let keys: Vec<&str> = listed.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(keys, ["a", "endless", "z"]);
    assert!(listed[1].1.remaining > Some(1000 * LEASE), "{listed:?}");
}

/// As the defaults of a role or a database may have it; behind a transaction pooler they cannot be changed.
#[tokio::test]
async fn stricter_isolation_by_default_makes_nothing_fail() {
    let server = Arc::new(Postgres::start().await);
    let strict = "ALTER DATABASE dlock SET default_transaction_isolation = 'serializable'";
    let database = server.config().get_dbname().unwrap().to_owned();
    server
        .client()
        .await
        .batch_execute(&strict.replace("dlock", &database))
        .await
        .unwrap();
    let table = fresh_table();
    let stores = join_all((0..6).map(|_| connected(server.config(), &table, PATIENCE))).await;
    for made in join_all(stores.iter().map(|store| store.create_table())).await {
        made.expect("many make the table at once");
    }
    let pooler = Pooler::start(&server, "transaction").await;
    for stores in [
        stores,
        join_all((0..6).map(|_| connected(server.config_at(pooler.addr()), &table, PATIENCE))).await,
    ] {
        let work = stores.into_iter().zip(1..).map(|(store, process)| {
            tokio::spawn(async move {
                for n in 0..100 {
                    let number = process * 1000 + n;
                    match store.clone().acquire(ask("k", number, LEASE)).await {
                        Ok(AcquireReply::Acquired(_)) => {
                            let renewed = store.clone().renew(vec![renewal("k", number, LEASE)]).await;
                            assert!(renewed.unwrap().remove(0).is_ok());
                            assert!(is_released(&store.clone().release(end("k", number)).await));
                        }
                        Ok(_) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            })
        });
        for done in join_all(work).await {
            done.unwrap();
        }
    }
}

/// Looking for a pooler again and again would delay each start.
#[tokio::test]
async fn server_itself_is_recognized_at_once() {
    let setting = setting().await;
    connected(
        setting.server.config_at(setting.proxy.addr()),
        &setting.table,
        PATIENCE,
    )
    .await;
    let looks = setting
        .proxy
        .count(|request| request.runs("SELECT pg_backend_pid()"));
    assert_eq!(looks, 3);
}

/// Other processes have left their prepared statements on the connections of a pooler that resets none.
#[tokio::test]
async fn names_of_statements_that_others_have_prepared_behind_a_pooler_cost_nothing() {
    let setting = setting().await;
    // The number of the next statement of this process.
    let counter = setting.server.client().await;
    counter.prepare("SELECT 1").await.unwrap();
    let prepared = "SELECT max(substr(name, 2)::int) FROM pg_prepared_statements";
    let next: i32 = counter.query_one(prepared, &[]).await.unwrap().get(0);
    let pooler = Pooler::start(&setting.server, "session\nserver_reset_query =").await;
    let others = format!(
        "DO $$ BEGIN FOR n IN {next}..{} LOOP EXECUTE format('PREPARE s%s AS SELECT 1', n); END LOOP; END $$",
        next + 2000
    );
    let behind = || async { connect(&setting.server.config_at(pooler.addr())).await.unwrap() };
    let backends = join_all((0..8).map(|_| behind())).await;
    for backend in &backends {
        backend.batch_execute(&others).await.unwrap();
    }
    drop(backends);
    // The pooler has noticed that they are gone.
    sleep(300 * MS).await;
    let store = connected(setting.server.config_at(pooler.addr()), &setting.table, PATIENCE).await;
    let client = client(&store).await;
    for _ in 0..3 {
        let guard = client.lock("k").acquire().await.unwrap();
        guard.release().await.unwrap();
    }
}

/// A limit that a role has for sessions without work would break connections again and again, and make all that is held
/// suspect.
#[tokio::test]
async fn connections_without_work_are_kept() {
    let setting = setting().await;
    let mut config = setting.server.config();
    let name = setting.table.clone();
    config
        .options("-c idle_session_timeout=200")
        .application_name(&name);
    let store = connected(config, &setting.table, PATIENCE).await;
    token(store.clone().acquire(ask("k", 1, LEASE)).await);
    let pids = format!(
        "SELECT coalesce(sum(pid), 0)::int8 FROM pg_stat_activity WHERE application_name = '{name}' AND query LIKE '%{name}%'"
    );
    eventually("its statement is the last of a connection", async || {
        setting.number(&pids).await > 0
    })
    .await;
    let before = setting.number(&pids).await;
    sleep(SEC).await;
    assert_eq!(setting.number(&pids).await, before);
}

/// A write for each lock and renewal makes renewals the largest user of a database.
#[tokio::test]
async fn ten_thousand_locks_are_renewed_by_few_statements() {
    let setting = setting().await;
    let store = connected(
        setting.server.config_at(setting.proxy.addr()),
        &setting.table,
        PATIENCE,
    )
    .await;
    setting
        .sql(
            "INSERT INTO {t} (key, holder, kind, fence, tokens, until) \
             SELECT 'k' || n, '00000000-0000-0000-0000-000000000007:' || n, 'lock', n, 1, \
                    clock_timestamp() + interval '1 hour' FROM generate_series(1, 10000) n",
        )
        .await;
    let all = (1..=10_000)
        .map(|n| renewal(&format!("k{n}"), n, LEASE))
        .collect();
    let replies = store.clone().renew(all).await.unwrap();
    assert!(
        replies.iter().all(|reply| matches!(reply, Ok(Renewal::Renewed))),
        "{:?}",
        replies[0]
    );
    let sent = setting.proxy.count(|request| Table::renewals(request) > 0);
    assert!(sent <= 60, "{sent} statements");
}

/// A planner that knows how small the table is would read all of its rows for each key.
#[tokio::test]
async fn keys_are_looked_up_in_the_index_also_in_a_small_table() {
    const ROUNDS: i64 = 16;
    let setting = setting().await;
    for n in 0..16 {
        row(&setting.patient, &n.to_string()).await;
    }
    setting.sql("VACUUM ANALYZE {t}").await;
    let there = client(&connected(setting.server.config(), &setting.table, PATIENCE).await).await;
    for _ in 0..ROUNDS {
        let acquires = (0..16).map(|n| there.lock(n.to_string()).acquire());
        let guards = join_all(acquires.map(IntoFuture::into_future)).await;
        join_all(guards.into_iter().map(|guard| guard.unwrap().release())).await;
        there.lock("0").acquire().await.unwrap().release().await.unwrap();
    }
    // Each connection reports what it did before it ends.
    there.shutdown(SEC).await;
    let looks = format!(
        "SELECT coalesce(sum(idx_scan), 0)::int8 FROM pg_stat_user_indexes WHERE relname = '{}'",
        setting.table
    );
    eventually("the statistics have arrived", async || {
        setting.number(&looks).await >= ROUNDS * 16 * 2
    })
    .await;
    let scans = format!(
        "SELECT seq_scan FROM pg_stat_user_tables WHERE relname = '{}'",
        setting.table
    );
    let scans = setting.number(&scans).await;
    assert!(
        scans < ROUNDS + 16,
        "{scans}, of which 16 made the rows, and a few the table"
    );
}

/// A transaction of a user has the row of one lock: its release waits for that, the others do not.
#[tokio::test]
async fn release_that_another_transaction_delays_delays_no_other() {
    let setting = setting().await;
    let here = client(&setting.patient).await;
    let acquires = (0..4).map(|n| here.lock(n.to_string()).acquire());
    let mut guards: Vec<_> = join_all(acquires.map(IntoFuture::into_future))
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    let mut db = setting.server.client().await;
    let tx = db.transaction().await.unwrap();
    let lock = format!("SELECT FROM \"{}\" WHERE key = '0' FOR UPDATE", setting.table);
    tx.batch_execute(&lock).await.unwrap();
    let delayed = tokio::spawn(guards.remove(0).release());
    for released in within(
        SOON,
        "the others are released",
        join_all(guards.into_iter().map(|guard| guard.release())),
    )
    .await
    {
        released.unwrap();
    }
    assert_eq!(setting.held().await, 1);
    assert!(!delayed.is_finished());
    tx.commit().await.unwrap();
    within(SOON, "it is released", delayed).await.unwrap().unwrap();
    assert_eq!(setting.held().await, 0);
}

/// The time to keep it counts from the call.
#[tokio::test]
async fn release_that_another_transaction_delays_keeps_the_lock_no_longer() {
    let setting = setting().await;
    let store = &setting.patient;
    for kind in [Kind::Mutex, Kind::Fair, Kind::Permit] {
        let key = kind.to_string();
        let asked = |number| {
            let mut request = ask(&key, number, LEASE);
            request.kind = kind;
            request.permits = (kind == Kind::Permit).then_some(1);
            request
        };
        token(store.clone().acquire(asked(1)).await);
        let mut db = setting.server.client().await;
        let tx = db.transaction().await.unwrap();
        let lock = format!("SELECT FROM \"{}\" WHERE key = '{key}' FOR UPDATE", setting.table);
        tx.batch_execute(&lock).await.unwrap();
        let mut release = end(&key, 1);
        (release.kind, release.keep_for) = (kind, SEC);
        let delayed = tokio::spawn(store.clone().release(release));
        sleep(SEC + 200 * MS).await;
        assert!(!delayed.is_finished());
        tx.commit().await.unwrap();
        assert!(is_released(&delayed.await.unwrap()), "{kind}");
        token(store.clone().acquire(asked(2)).await);
    }
}

/// A statement for each lock would delay renewals on the same connection.
#[tokio::test]
async fn transactions_that_hold_many_locks_are_looked_up_by_few_statements() {
    let setting = setting().await;
    let here = setting.server.config_at(setting.proxy.addr());
    let store = connected(here, &setting.table, PATIENCE).await;
    setting
        .sql("INSERT INTO {t} (key) SELECT 'k' || n FROM generate_series(1, 100) n")
        .await;
    let mut db = setting.server.client().await;
    let tx = db.transaction().await.unwrap();
    let lock = format!("SELECT \"{t}_lock_in\"(key) FROM \"{t}\"", t = setting.table);
    tx.batch_execute(&lock).await.unwrap();
    let acquires = (1..=100).map(|n| store.clone().acquire(ask(&format!("k{n}"), n, LEASE)));
    for reply in join_all(acquires).await {
        assert!(matches!(reply, Ok(AcquireReply::Busy(_))), "{reply:?}");
    }
    let sent = (setting.proxy).count(|request| request.runs("-- The server processes with"));
    assert!((1..50).contains(&sent), "{sent} statements");
    tx.rollback().await.unwrap();
}

#[tokio::test]
async fn releases_of_many_locks_wake_the_waiter_for_one() {
    let setting = setting_on(Arc::new(Postgres::start().await)).await;
    let (here, there) = (client(&setting.patient).await, client(&setting.patient).await);
    let shown = async || {
        setting
            .number("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'")
            .await
    };
    for _ in 0..2 {
        let acquires = (0..40).map(|n| here.lock(format!("k{n}")).lease(LEASE).acquire());
        let guards = join_all(acquires.map(IntoFuture::into_future)).await;
        let waiter = tokio::spawn(there.lock("k7").acquire());
        eventually("its waiter is known", async || shown().await == 1).await;
        sleep(300 * MS).await;
        for released in join_all(guards.into_iter().map(|guard| guard.unwrap().release())).await {
            released.unwrap();
        }
        let next = within(SOON, "the waiter is woken", waiter).await.unwrap();
        next.unwrap().release().await.unwrap();
        eventually("no waiter is known", async || shown().await == 0).await;
    }
}

#[tokio::test]
async fn nobody_is_notified_where_nobody_waits() {
    let setting = setting().await;
    let config = setting.server.config();
    let (listening, mut connection) = config.connect(NoTls).await.unwrap();
    let heard = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let hears = heard.clone();
    tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|cx| connection.poll_message(cx)).await {
            if let tokio_postgres::AsyncMessage::Notification(told) = message {
                hears.lock().push(told.payload().to_owned());
            }
        }
    });
    listening
        .batch_execute(&format!("LISTEN \"{}\"", setting.table))
        .await
        .unwrap();
    let (here, there) = (client(&setting.patient).await, client(&setting.patient).await);
    for _ in 0..5 {
        here.lock("alone")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    }
    let guard = here.lock("waited for").lease(LEASE).acquire().await.unwrap();
    let waiter = tokio::spawn(there.lock("waited for").acquire());
    eventually("its waiter is known", async || {
        setting
            .number("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'")
            .await
            > 0
    })
    .await;
    sleep(300 * MS).await;
    guard.release().await.unwrap();
    within(SOON, "the waiter is woken", waiter)
        .await
        .unwrap()
        .unwrap()
        .release()
        .await
        .unwrap();
    eventually("the notification is heard", async || {
        heard.lock().iter().any(|key| key == "waited for")
    })
    .await;
    assert!(
        !heard.lock().iter().any(|key| key == "alone"),
        "{:?}",
        heard.lock()
    );
}

#[tokio::test]
async fn urls_open_it_and_mistakes_are_told() {
    let server = Postgres::shared().await;
    let table = fresh_table();
    let open = async |url: String| {
        LockClient::builder()
            .scheme(dlock_postgres::scheme())
            .url(url)
            .build()
            .await
    };
    let base = server.url_at(server.addr());
    let told = async |url: String| open(url).await.map(|_| ()).unwrap_err();
    let missing = told(format!("{base}?table={table}")).await;
    let said = missing.to_string();
    assert!(
        matches!(missing, Error::Refused { .. }) && said.contains("create_table=true"),
        "{said}"
    );
    let url = format!("{base}?table={table}&create_table=true&prefix=shop:&lease=20s&timeout=20s");
    let (a, b) = (open(url.clone()).await.unwrap(), open(url).await.unwrap());
    let guard = a.lock("k").acquire().await.unwrap();
    assert!(b.lock("k").try_acquire().await.unwrap_err().is_busy());
    let listed = b.list("").await.unwrap();
    assert_eq!((listed.len(), listed[0].0.as_str()), (1, "k"));
    guard.release().await.unwrap();
    // Names that are the same for longer than a message shows of them.
    let (one, other) = (format!("{}1", "n".repeat(200)), format!("{}2", "n".repeat(200)));
    let first = a.lock(&one).acquire().await.unwrap();
    let second = b.lock(&other).try_acquire().await.unwrap();
    let mut listed: Vec<_> = b
        .list("")
        .await
        .unwrap()
        .into_iter()
        .map(|(key, _)| key)
        .collect();
    listed.sort_by(|one, other| one.as_str().cmp(other.as_str()));
    assert_eq!([listed[0].as_str(), listed[1].as_str()], [&one, &other]);
    first.release().await.unwrap();
    second.release().await.unwrap();
    for (url, says) in [
        (format!("{base}?tabel=x"), "\"tabel\""),
        (format!("{base}?table=a%20b"), "table"),
        (format!("{base}?connections=0"), "connections"),
        (format!("{base}?connections=1001"), "more than 1000"),
        (
            format!("{base}?connections=many"),
            "connections must be a number such as 4",
        ),
        (format!("{base}?sslcert=a.pem"), "sslkey"),
        (format!("{base}?sslmode=often"), "sslmode"),
        ("postgres:///shop".to_owned(), "no server"),
    ] {
        let error = told(url).await;
        assert!(matches!(error, Error::InvalidUrl { .. }), "{error:?}");
        assert!(error.to_string().contains(says), "{says}: {error}");
    }
    // Longer than the server takes as the limit of a statement.
    let patient = open(format!("{base}?table={table}&timeout=1000h")).await.unwrap();
    let guard = patient.lock("k").acquire().await.unwrap();
    guard.release().await.unwrap();
    let endless = PostgresLocks::builder(server.config(), NoTls).timeout(Duration::MAX);
    let error = endless.connect().await.unwrap_err().to_string();
    assert!(error.contains("more than a year"), "{error}");
    let control = PostgresLocks::builder(server.config(), NoTls).prefix("shop\u{1}");
    let error = control.connect().await.unwrap_err().to_string();
    assert!(error.contains("control character at byte 4"), "{error}");
    let wrong = base.replace("dlock:", "dlock:not");
    let error = told(wrong).await;
    assert!(
        matches!(error, Error::Refused { .. }) && error.to_string().contains("28P01"),
        "{error}"
    );
    let read_only = "options=-c%20default_transaction_read_only%3Don";
    let error = told(format!("{base}?{read_only}&timeout=5s")).await.to_string();
    assert!(error.contains("default_transaction_read_only"), "{error}");
    let error = LockClient::connect("postgres://h/d")
        .await
        .map(|_| ())
        .unwrap_err()
        .to_string();
    assert!(error.contains("dlock-postgres"), "{error}");
}

#[tokio::test]
async fn table_that_is_missing_or_forbidden_is_told_at_each_step() {
    let setting = setting().await;
    let missing = connected(setting.server.config(), &fresh_table(), PATIENCE).await;
    for _ in 0..2 {
        let error = missing.clone().acquire(ask("k", 1, LEASE)).await.unwrap_err();
        assert_eq!(
            (error.outcome, &error.reason),
            (Outcome::NotDone, &Reason::Refused),
            "{error}"
        );
        assert!(error.message.contains("create_table"), "{error}");
    }
    missing.create_table().await.unwrap();
    token(missing.clone().acquire(ask("k", 1, LEASE)).await);
}

/// The rights that docs/postgres.md names are enough, and the least.
#[tokio::test]
async fn user_needs_no_more_rights_than_the_page_names() {
    let setting = setting().await;
    let user = format!("user_{:08x}", fastrand::u32(..));
    setting
        .sql(&format!("CREATE ROLE {user} LOGIN PASSWORD 'secret'"))
        .await;
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/postgres.md")).unwrap();
    // What concerns a whole schema is for databases that have revoked the defaults.
    let is_grant = |line: &&str| line.starts_with("GRANT ") && line.contains("dlock_locks");
    let grants: Vec<&str> = page.lines().filter(is_grant).collect();
    assert!(grants.len() > 1, "{grants:?}");
    let rights: Vec<String> = grants
        .iter()
        .map(|grant| grant.replace("dlock_locks", &setting.table).replace("svc", &user))
        .collect();
    let mut config = setting.server.config();
    config.user(&user).password("secret");
    setting.sql(&rights.join("")).await;
    let store = connected(config.clone(), &setting.table, PATIENCE).await;
    let (here, there) = (client(&store).await, client(&store).await);
    let guard = here.lock("k").acquire().await.unwrap();
    let mut db = dlock_tests::postgres::connect(&config).await.unwrap();
    let tx = db.transaction().await.unwrap();
    store.hold_in(&tx, &guard).await.unwrap();
    tx.commit().await.unwrap();
    let waiter = tokio::spawn(there.lock("k").acquire());
    sleep(100 * MS).await;
    guard.release().await.unwrap();
    drop(
        within(PATIENCE, "the waiter is served", waiter)
            .await
            .unwrap()
            .unwrap(),
    );
    let guard = here.fair_lock("k").acquire().await.unwrap();
    let waiter = tokio::spawn(there.fair_lock("k").acquire());
    eventually("it is in the queue", async || {
        setting
            .number(&format!("SELECT count(*) FROM {}_waiters", setting.table))
            .await
            == 1
    })
    .await;
    guard.release().await.unwrap();
    let next = within(PATIENCE, "the fair waiter is served", waiter).await;
    next.unwrap().unwrap().release().await.unwrap();
    assert!(there.force_release("k").await.is_ok());
    assert!(there.list("").await.unwrap().is_empty());
    store.remove_free().await.unwrap();
    setting.sql(&format!("DROP OWNED BY {user}")).await;
}

/// A server whose queue of notifications is full refuses the commit of each transaction that notifies: a release would be rolled
/// back, and a lock that others wait for stay taken until its lease ends. To fill the queue takes gigabytes, so functions that are
/// found before those of the server fail as they would.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_and_waiters_need_no_notifications() {
    let server = Arc::new(Postgres::start().await);
    let db = server.client().await;
    db.batch_execute(
        "CREATE SCHEMA short;
         CREATE TABLE short.of_room ();
         CREATE FUNCTION short.pg_notify(text, text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN
           IF EXISTS (SELECT FROM short.of_room) THEN
             RAISE EXCEPTION 'too many notifications in the NOTIFY queue' USING ERRCODE = '54000';
           END IF;
           PERFORM pg_catalog.pg_notify($1, $2);
         END $$;
         CREATE FUNCTION short.pg_notification_queue_usage() RETURNS float8 LANGUAGE sql AS
           'SELECT count(*)::float8 FROM short.of_room';
         ALTER ROLE dlock SET search_path = short, public, pg_catalog",
    )
    .await
    .unwrap();
    let setting = setting_on(server).await;
    let there = connected(setting.server.config(), &setting.table, PATIENCE).await;
    let (here, there) = (client(&setting.patient).await, client(&there).await);
    let names = ["a", "b", "c"];
    let locks = join_all(names.map(|key| here.lock(key).lease(LEASE).acquire().into_future())).await;
    let fair = here.fair_lock("fair").lease(LEASE).acquire().await.unwrap();
    let read = here.rw_lock("read").read().lease(LEASE).acquire().await.unwrap();
    let permits = here.semaphore("permits").permits(1).lease(LEASE);
    let permit = permits.acquire().await.unwrap();
    here.latch("latch").try_set_count(1).await.unwrap();
    let waiters = async || {
        let latch = there.latch("latch");
        let plain = names.map(|key| there.lock(key).acquire().into_future());
        let (plain, fair, write, permit, latch) = tokio::join!(
            join_all(plain),
            there.fair_lock("fair").acquire().into_future(),
            there.rw_lock("read").write().acquire().into_future(),
            there.semaphore("permits").permits(1).acquire().into_future(),
            latch.wait(),
        );
        for lock in plain {
            lock.unwrap().release().await.unwrap();
        }
        fair.unwrap().release().await.unwrap();
        write.unwrap().release().await.unwrap();
        permit.unwrap().release().await.unwrap();
        latch.unwrap();
    };
    let done = async {
        eventually("its waiters are known", async || {
            let shown =
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted";
            setting.number(shown).await >= 6
        })
        .await;
        sleep(300 * MS).await;
        db.batch_execute("INSERT INTO short.of_room DEFAULT VALUES")
            .await
            .unwrap();
        // The first one alone, the others in one statement.
        let mut locks = locks.into_iter().map(Result::unwrap);
        locks.next().unwrap().release().await.unwrap();
        for released in join_all(locks.map(|lock| lock.release())).await {
            released.unwrap();
        }
        fair.release().await.unwrap();
        read.release().await.unwrap();
        permit.release().await.unwrap();
        here.latch("latch").count_down().await.unwrap();
    };
    // Waiters that believe in their notifications look after half a minute.
    within(SOON, "they are released and acquired", async {
        tokio::join!(waiters(), done)
    })
    .await;
    let held = "SELECT count(*) FROM {t} WHERE holder NOT IN ('', '#')";
    assert_eq!(setting.number(held).await, 0);
}

/// How many server processes serve others, and wait. The server's own processes have no user.
async fn waiting(setting: &Setting) -> i64 {
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'dlock' AND state = 'active' \
               AND (wait_event_type = 'Lock' OR wait_event = 'SyncRep')";
    setting.number(sql).await
}

/// Asks for a while for locks that the server does not grant in time; the most processes that waited for that.
async fn most_that_wait(setting: &Setting, store: &Arc<PostgresLocks>) -> i64 {
    let (begun, mut most) = (Instant::now(), 0);
    while begun.elapsed() < 8 * SEC {
        // Of new keys: one that was carried out without a reply has its key.
        let numbers: [u64; 4] = std::array::from_fn(|_| fastrand::u64(..));
        let asked = numbers.map(|number| store.clone().acquire(ask(&number.to_string(), number, LEASE)));
        for reply in join_all(asked).await {
            assert!(reply.is_err(), "{reply:?}");
        }
        most = most.max(waiting(setting).await);
    }
    most
}

/// A server does not notice that a client is gone while it waits for its standby. A client that opens a new connection after each
/// time-out uses up all that the server accepts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn standby_that_is_missing_leaves_no_connections_behind() {
    let setting = setting_on(Arc::new(Postgres::start().await)).await;
    let store = connected(setting.server.config(), &setting.table, SEC).await;
    let db = setting.server.client().await;
    let standby = async |name: &str| {
        let set = format!("ALTER SYSTEM SET synchronous_standby_names = '{name}'");
        for sql in [&*set, "SELECT pg_reload_conf()"] {
            db.batch_execute(sql).await.unwrap();
        }
        eventually("it is set", async || {
            let row = db.query_one("SHOW synchronous_standby_names", &[]).await;
            row.unwrap().get::<_, &str>(0) == name
        })
        .await;
    };
    standby("nobody").await;
    // It takes effect once the checkpointer has read it.
    sleep(SEC).await;
    let most = most_that_wait(&setting, &store).await;
    assert!((1..=4).contains(&most), "{most} wait");
    eventually("no process is left", async || waiting(&setting).await == 0).await;
    standby("").await;
    let guard = client(&store).await.lock("after").acquire().await.unwrap();
    guard.release().await.unwrap();
}

/// PgBouncer of some versions ends itself when a statement that waits is cancelled, and with it the connections of all services.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pooler_survives_steps_that_get_no_reply() {
    let setting = setting_on(Arc::new(Postgres::start().await)).await;
    let pooler = Pooler::start(&setting.server, "transaction").await;
    let store = connected(setting.server.config_at(pooler.addr()), &setting.table, SEC).await;
    let mut db = setting.server.client().await;
    let tx = db.transaction().await.unwrap();
    tx.batch_execute(&format!("LOCK TABLE \"{}\"", setting.table))
        .await
        .unwrap();
    assert!(most_that_wait(&setting, &store).await > 0);
    tx.rollback().await.unwrap();
    let guard = client(&store).await.lock("after").acquire().await.unwrap();
    guard.release().await.unwrap();
}
