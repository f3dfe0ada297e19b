//! Records on PostgreSQL: the rules that hold on every store, and what this one has besides.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use dlock::Error;
use dlock::record::{ClaimReply, ClaimState, ClaimToken, OwnerReply, Records, SlotOutcome, SlotRequest};
use dlock::store::{Outcome, Reason};
use dlock_postgres::PostgresRecords;
use dlock_tests::faults::{PATIENCE, in_rounds};
use dlock_tests::postgres::{PgProxy, Postgres, fresh_table};
use dlock_tests::records::{
    a_record_that_cannot_be_read, a_store_that_lost_its_data, ask, ask_for, by, claimed, fresh_key, leaving,
};
use dlock_tests::{Log, eventually};
use futures_util::future::join_all;
use tokio::time::{sleep, timeout};
use tokio_postgres::NoTls;

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// Two processes on one table of their own.
async fn on_postgres() -> (Arc<Postgres>, Records, Records) {
    let (server, table) = (Postgres::shared().await, fresh_table());
    let (_, a) = server.records(&table).await;
    let (_, b) = server.records(&table).await;
    (server, a, b)
}

dlock_tests::record_suite!(on_postgres);

/// A server, a table, a store on it with its records, and a connection that looks into the table.
async fn beside() -> (
    Arc<Postgres>,
    String,
    PostgresRecords,
    Records,
    tokio_postgres::Client,
) {
    let (server, table) = (Postgres::shared().await, fresh_table());
    let (store, records) = server.records(&table).await;
    let client = server.client().await;
    (server, table, store, records, client)
}

async fn rows(client: &tokio_postgres::Client, table: &str) -> i64 {
    let sql = format!("SELECT count(*) FROM {table}");
    client.query_one(&sql, &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn a_table_that_was_emptied_or_made_anew_has_no_records_and_greater_fences() {
    let (server, table, store, a, client) = beside().await;
    let (_, b) = server.records(&table).await;
    let run = async |sql: String| client.batch_execute(&sql).await.unwrap();
    a_store_that_lost_its_data(&a, &b, async || run(format!("TRUNCATE {table}")).await).await;
    a_store_that_lost_its_data(&a, &b, async || {
        run(format!("DROP TABLE {table}; DROP SEQUENCE {table}_fence")).await;
        store.create_table().await.unwrap();
    })
    .await;
}

/// As on a standby that took over without the last claims, or after a backup was restored.
#[tokio::test]
async fn tokens_grow_where_the_sequence_went_back() {
    let (_server, table, _, records, client) = beside().await;
    let (_, last) = claimed(&records, ask(&fresh_key()), 1).await;
    let back = format!("ALTER SEQUENCE {table}_fence RESTART WITH 1");
    client.batch_execute(&back).await.unwrap();
    let (_, next) = claimed(&records, ask(&fresh_key()), 1).await;
    assert!(next > last, "{next} {last}");
    let slot = records.claim_slot(ask(&fresh_key()), SlotRequest::nearest(DAY));
    let SlotOutcome::Claim(ClaimReply::Claimed { fence, .. }) = slot.await.unwrap().outcome else {
        panic!("the slot is free")
    };
    assert!(fence > last, "{fence} {last}");
}

#[tokio::test]
async fn what_cannot_be_read_is_an_error_of_every_step() {
    let (_server, table, _, records, client) = beside().await;
    for spoil in [
        "version = 2",
        "state = 'newer'",
        "version = 2, state = 'newer', token = 'x'",
    ] {
        let key = fresh_key();
        let (token, _) = claimed(&records, ask(&key), 1).await;
        let sql = format!("UPDATE {table} SET {spoil} WHERE key = '{}'", key.as_str());
        client.batch_execute(&sql).await.unwrap();
        a_record_that_cannot_be_read(&records, &key, &token).await;
    }
}

#[tokio::test]
async fn what_became_of_a_claim_can_be_read() {
    let (server, table, _, a, _client) = beside().await;
    let (_, b) = server.records(&table).await;
    let (key, stranger) = (fresh_key(), dlock::record::ClaimToken::new());
    assert_eq!(a.read(&key, &stranger).await.unwrap(), ClaimState::Lost);
    let (token, _) = claimed(&a, ask_for(&key, MS, DAY), 1).await;
    sleep(20 * MS).await;
    assert_eq!(b.read(&key, &token).await.unwrap(), ClaimState::Open);
    assert_eq!(b.read(&key, &stranger).await.unwrap(), ClaimState::Lost);
    let (next, _) = claimed(&b, ask(&key), 2).await;
    assert_eq!(a.read(&key, &token).await.unwrap(), ClaimState::Lost);
    b.complete(&key, &next, b"x".to_vec(), DAY).await.unwrap();
    let completed = ClaimState::Completed {
        response: b"x".to_vec(),
    };
    assert_eq!(a.read(&key, &next).await.unwrap(), completed);
    assert_eq!(a.read(&key, &token).await.unwrap(), ClaimState::Lost);
    let key = fresh_key();
    let (token, _) = claimed(&a, ask(&key), 1).await;
    a.release(&key, &token).await.unwrap();
    assert_eq!(a.read(&key, &token).await.unwrap(), ClaimState::Lost);
}

#[tokio::test]
async fn each_step_is_one_round_trip() {
    let server = Postgres::shared().await;
    let (proxy, table) = (PgProxy::start(server.addr()), fresh_table());
    let builder = PostgresRecords::builder(server.config_at(proxy.addr()), NoTls).timeout(PATIENCE);
    let store = builder
        .table(&table)
        .connections(1)
        .listen(false)
        .connect()
        .await
        .unwrap();
    store.create_table().await.unwrap();
    let records = Records::new(store);
    claimed(&records, ask(&fresh_key()), 1).await;
    let count = |from: usize| {
        proxy.requests()[from..]
            .iter()
            .filter(|request| request.executes)
            .count()
    };
    let (key, other) = (fresh_key(), fresh_key());
    let before = proxy.requests().len();
    let (token, _) = claimed(&records, ask_for(&key, MS, DAY), 1).await;
    sleep(20 * MS).await;
    records.claim(leaving(ask(&key))).await.unwrap();
    let (next, _) = claimed(&records, ask(&key), 2).await;
    records.claim(ask(&key)).await.unwrap();
    records.extend(&key, &token, SEC, DAY).await.unwrap();
    records.extend(&key, &next, SEC, DAY).await.unwrap();
    records.read(&key, &next).await.unwrap();
    records.complete(&key, &next, b"x".to_vec(), DAY).await.unwrap();
    records.claim(ask(&key)).await.unwrap();
    records.release(&other, &next).await.unwrap();
    assert_eq!(count(before), 10, "{:?}", proxy.requests());
}

#[tokio::test]
async fn a_claim_that_its_release_overtook_does_not_stand() {
    let (_server, _, _, records, _client) = beside().await;
    let key = fresh_key();
    let late = ask(&key);
    assert_eq!(
        records.release(&key, &late.token).await.unwrap(),
        OwnerReply::Done
    );
    let refused = records.claim(late.clone()).await.unwrap_err();
    assert_eq!(
        (refused.outcome, refused.reason),
        (Outcome::NotDone, Reason::Refused)
    );
    let (token, _) = claimed(&records, ask(&key), 1).await;
    assert!(matches!(
        records.claim(late).await.unwrap(),
        ClaimReply::InProgress { .. }
    ));
    assert_eq!(records.release(&key, &token).await.unwrap(), OwnerReply::Done);
    assert!(records.claim(by(&token, ask(&key))).await.is_err());
}

/// An expired record, or the trace of another claim, would let it stand.
#[tokio::test]
async fn a_claim_that_its_release_overtook_does_not_stand_over_an_older_row() {
    let (_server, _, _, records, _client) = beside().await;
    for expired in [true, false] {
        let key = fresh_key();
        let lease = if expired { MS } else { SEC };
        let (first, fence) = claimed(&records, ask_for(&key, lease, lease), 1).await;
        match expired {
            true => sleep(20 * MS).await,
            false => assert_eq!(records.release(&key, &first).await.unwrap(), OwnerReply::Done),
        }
        let late = ask(&key);
        let released = records.release(&key, &late.token).await.unwrap();
        assert_eq!(released, OwnerReply::Done);
        let refused = records.claim(late).await.unwrap_err();
        assert_eq!(
            (refused.outcome, refused.reason),
            (Outcome::NotDone, Reason::Refused)
        );
        let (_, next) = claimed(&records, ask(&key), 1).await;
        assert!(next > fence);
    }
}

/// A release that does not see it would answer before it takes effect.
#[tokio::test]
async fn a_claim_that_is_being_committed_is_released_after_that() {
    let (server, table, _, records, _client) = beside().await;
    let mut db = server.client().await;
    // Of a new key.
    let (key, token) = (fresh_key(), ClaimToken::new());
    let tx = db.transaction().await.unwrap();
    let claim = format!(
        "INSERT INTO {table} VALUES ($1, 1, 'claimed', $2, '', 1, 1, now() + interval '1 h', now() + interval '1 h')"
    );
    tx.execute(&claim, &[&key.as_str(), &token.as_str()])
        .await
        .unwrap();
    let (released, committed) = tokio::join!(records.release(&key, &token), async {
        sleep(300 * MS).await;
        tx.commit().await
    });
    committed.unwrap();
    assert_eq!(released.unwrap(), OwnerReply::Done);
    assert_eq!(records.read(&key, &token).await.unwrap(), ClaimState::Lost);
    claimed(&records, ask(&key), 1).await;
    // Over an expired claim of another.
    let (key, token) = (fresh_key(), ClaimToken::new());
    claimed(&records, ask_for(&key, MS, DAY), 1).await;
    sleep(20 * MS).await;
    let tx = db.transaction().await.unwrap();
    let claim = format!(
        "UPDATE {table} SET token = $2, attempt = 2, lease_until = now() + interval '1 h' WHERE key = $1"
    );
    tx.execute(&claim, &[&key.as_str(), &token.as_str()])
        .await
        .unwrap();
    let (released, committed) = tokio::join!(records.release(&key, &token), async {
        sleep(300 * MS).await;
        tx.commit().await
    });
    committed.unwrap();
    assert_eq!(released.unwrap(), OwnerReply::Done);
    let orphan = ClaimReply::Orphan { attempt: 1 };
    assert_eq!(records.claim(leaving(ask(&key))).await.unwrap(), orphan);
}

#[tokio::test]
async fn what_is_forgotten_is_removed_in_small_steps_and_by_itself() {
    let (server, table) = (Postgres::shared().await, fresh_table());
    let builder = || {
        PostgresRecords::builder(server.config(), NoTls)
            .timeout(PATIENCE)
            .table(&table)
    };
    let by_hand = builder().sweep_every(None).connect().await.unwrap();
    by_hand.create_table().await.unwrap();
    let (records, client) = (Records::new(by_hand.clone()), server.client().await);
    let many = format!(
        "INSERT INTO {table} SELECT 'k' || i, 1, 'completed', 't', '', 1, i, clock_timestamp(), clock_timestamp(), 'x'
           FROM generate_series(1, 2500) i"
    );
    client.batch_execute(&many).await.unwrap();
    let (stays, goes) = (fresh_key(), fresh_key());
    claimed(&records, ask(&stays), 1).await;
    claimed(&records, ask_for(&goes, MS, MS), 1).await;
    sleep(20 * MS).await;
    assert_eq!(by_hand.remove_expired().await.unwrap(), 2501);
    assert_eq!(rows(&client, &table).await, 1);
    client.batch_execute(&many).await.unwrap();
    let _sweeping = builder().sweep_every(50 * MS).connect().await.unwrap();
    eventually("the rows are removed", || async {
        rows(&client, &table).await == 1
    })
    .await;
    // A claimed one is left alone, and delays no caller.
    let mut other = server.client().await;
    let (token, _) = claimed(&records, ask_for(&goes, 500 * MS, 500 * MS), 1).await;
    let tx = other.transaction().await.unwrap();
    by_hand
        .owned(&goes, &token, DAY)
        .complete_in(&tx, b"x")
        .await
        .unwrap();
    sleep(700 * MS).await;
    assert_eq!(by_hand.remove_expired().await.unwrap(), 0);
    tx.commit().await.unwrap();
    assert!(matches!(
        records.claim(ask(&goes)).await.unwrap(),
        ClaimReply::Completed { .. }
    ));
}

#[tokio::test]
async fn the_table_is_made_once_by_many_at_a_time_and_in_a_schema() {
    let server = Postgres::shared().await;
    let table = fresh_table();
    let stores = join_all((0..8).map(|_| {
        let builder = PostgresRecords::builder(server.config(), NoTls).timeout(PATIENCE);
        builder.table(&table).connections(1).connect()
    }))
    .await;
    let stores: Vec<_> = stores.into_iter().map(Result::unwrap).collect();
    for made in join_all(stores.iter().map(PostgresRecords::create_table)).await {
        made.unwrap();
    }
    assert!(stores[0].schema().contains(&table));
    // A transaction that completes a claim holds up nobody who makes it once more.
    let mut db = server.client().await;
    let tx = db.transaction().await.unwrap();
    let changes = format!("LOCK TABLE {table} IN ROW EXCLUSIVE MODE");
    tx.batch_execute(&changes).await.unwrap();
    stores[0].create_table().await.unwrap();
    drop(tx);
    let schema = fresh_table();
    let client = server.client().await;
    client
        .batch_execute(&format!("CREATE SCHEMA {schema}"))
        .await
        .unwrap();
    let (_, records) = server.records(&format!("{schema}.Mixed_Case")).await;
    let (_, others) = server.records(&table).await;
    let key = fresh_key();
    claimed(&records, ask(&key), 1).await;
    claimed(&others, ask(&key), 1).await;
    assert!(matches!(
        records.claim(ask(&key)).await.unwrap(),
        ClaimReply::InProgress { .. }
    ));
}

#[tokio::test]
async fn work_is_done_once_on_records_of_postgres() {
    let server = Postgres::shared().await;
    let table = fresh_table();
    let connect = async || {
        PostgresRecords::builder(server.config(), NoTls)
            .timeout(PATIENCE)
            .table(&table)
            .connect()
            .await
            .unwrap()
    };
    let stores = [connect().await, connect().await];
    stores[0].create_table().await.unwrap();
    let runs = AtomicU32::new(0);
    let calls = (0..8).map(|n| {
        let once = Records::new(stores[n % 2].clone()).once("w").wait(PATIENCE);
        let runs = &runs;
        async move {
            let reply = once.run(async |_| {
                sleep(Duration::from_millis(20)).await;
                Ok::<_, String>(runs.fetch_add(1, Ordering::SeqCst))
            });
            reply.await.unwrap().into_result()
        }
    });
    assert_eq!(join_all(calls).await, [Some(0); 8]);
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn without_a_table_every_step_says_what_to_do_and_works_once_it_is_there() {
    let server = Postgres::shared().await;
    let builder = PostgresRecords::builder(server.config(), NoTls)
        .timeout(PATIENCE)
        .table(fresh_table());
    let store = builder.connect().await.unwrap();
    let records = Records::new(store.clone());
    for _ in 0..2 {
        let error = records.claim(ask(&fresh_key())).await.unwrap_err();
        assert_eq!((error.outcome, error.reason), (Outcome::NotDone, Reason::Refused));
        assert!(error.message.contains("create_table"), "{}", error.message);
    }
    store.create_table().await.unwrap();
    claimed(&records, ask(&fresh_key()), 1).await;
}

/// Once until a removal succeeds.
#[tokio::test]
async fn expired_records_that_cannot_be_removed_are_a_warning() {
    let (server, table, _, _, client) = beside().await;
    let run = async |sql: &str| {
        let sql = sql
            .replace("{t}", &table)
            .replace("{u}", &format!("{table}_user"));
        client.batch_execute(&sql).await.unwrap();
    };
    run("CREATE USER {u} PASSWORD 'p'; GRANT SELECT, INSERT, UPDATE ON {t} TO {u}").await;
    let expired = "INSERT INTO {t} VALUES ('k', 1, 'completed', 't', '', 1, 1, clock_timestamp(), clock_timestamp(), 'x')";
    let mut config = server.config();
    config.user(format!("{table}_user")).password("p");
    let log = Log::default();
    let _listening = log.listen();
    let sweeping = PostgresRecords::builder(config, NoTls)
        .table(&table)
        .timeout(PATIENCE);
    let _sweeping = sweeping.sweep_every(20 * MS).connect().await.unwrap();
    for told in 1..=2 {
        let is_told = || log.count("expired records were not removed") == told;
        eventually("the failure is told", async || is_told()).await;
        sleep(200 * MS).await;
        assert!(is_told(), "it is told once");
        run(expired).await;
        run("GRANT DELETE ON {t} TO {u}").await;
        eventually("the row is removed", async || rows(&client, &table).await == 0).await;
        run("REVOKE DELETE ON {t} FROM {u}").await;
    }
}

#[tokio::test]
async fn missing_right_or_invalid_option_is_told_at_once() {
    let server = Postgres::shared().await;
    let mut wrong = server.config();
    wrong.password("wrong-secret");
    let error = PostgresRecords::connect(wrong, NoTls).await.unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error:?}");
    assert!(
        !format!("{error:?} {error}").contains("wrong-secret"),
        "{error:?}"
    );
    let mut nobody = server.config();
    nobody.dbname("nowhere");
    let error = PostgresRecords::connect(nobody, NoTls).await.unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error:?}");

    let builder = || PostgresRecords::builder(server.config(), NoTls).timeout(PATIENCE);
    for bad in [
        builder().table("a; DROP TABLE b"),
        builder().connections(0),
        builder().connections(1001),
        builder().timeout(Duration::ZERO),
        builder().timeout(Duration::MAX),
        builder().sweep_every(Duration::ZERO),
        builder().sweep_every(Duration::MAX),
    ] {
        let error = bad.connect().await.unwrap_err();
        assert!(matches!(error, Error::InvalidOption { .. }), "{error:?}");
    }

    // A user that may only read.
    let (table, client) = (fresh_table(), server.client().await);
    let (_, records) = server.records(&table).await;
    let user = fresh_table();
    let sql = format!("CREATE USER {user} PASSWORD 'p'; GRANT SELECT ON {table} TO {user}");
    client.batch_execute(&sql).await.unwrap();
    let mut config = server.config();
    config.user(&user).password("p");
    let reader = PostgresRecords::builder(config, NoTls)
        .timeout(PATIENCE)
        .table(&table)
        .connect()
        .await
        .unwrap();
    let error = Records::new(reader).claim(ask(&fresh_key())).await.unwrap_err();
    assert_eq!((error.outcome, error.reason), (Outcome::NotDone, Reason::Refused));
    claimed(&records, ask(&fresh_key()), 1).await;
}

#[tokio::test]
async fn waiter_is_told_within_a_moment_and_polls_without_notifications() {
    let (server, table) = (Postgres::shared().await, fresh_table());
    for listen in [true, false] {
        let builder = || {
            PostgresRecords::builder(server.config(), NoTls)
                .timeout(PATIENCE)
                .table(&table)
                .listen(listen)
        };
        let (a, b) = (
            builder().connect().await.unwrap(),
            builder().connect().await.unwrap(),
        );
        a.create_table().await.unwrap();
        let (a, b) = (Records::new(a), Records::new(b));
        let key = fresh_key();
        claimed(&a, ask(&key), 1).await;
        let mut there = b.watch(&key);
        there.changed().await;
        if listen {
            // Nothing happens, so no waiter is woken.
            assert!(timeout(600 * MS, there.changed()).await.is_err());
        }
        // Each time a bit late is possible, always is not.
        in_rounds("within a moment", async || {
            let key = fresh_key();
            let (token, _) = claimed(&a, ask(&key), 1).await;
            let (mut here, mut there) = (a.watch(&key), b.watch(&key));
            here.changed().await;
            there.changed().await;
            let at = Instant::now();
            a.complete(&key, &token, b"x".to_vec(), DAY).await.unwrap();
            here.changed().await;
            let local = at.elapsed();
            there.changed().await;
            let remote = at.elapsed();
            let most = if listen { 100 * MS } else { 600 * MS };
            if local < 100 * MS && remote < most {
                Ok(())
            } else {
                Err(format!("listen {listen}: {local:?}, {remote:?}"))
            }
        })
        .await;
    }
}

/// The server, which all tests share, logs the ends of all their connections.
mod alone {
    use super::*;

    #[tokio::test]
    async fn the_connections_end_with_the_last_handle() {
        let (server, table) = (Postgres::shared().await, fresh_table());
        let client = server.client().await;
        let mut config = server.config();
        config.application_name(&table);
        let count = async || {
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1";
            client.query_one(sql, &[&table]).await.unwrap().get::<_, i64>(0)
        };
        let builder = PostgresRecords::builder(config, NoTls)
            .timeout(PATIENCE)
            .table(&table)
            .connections(3);
        let store = builder.connect().await.unwrap();
        store.create_table().await.unwrap();
        let records = Records::new(store.clone());
        let key = fresh_key();
        let mut watch = records.watch(&key);
        watch.changed().await;
        eventually("all connect", || async { count().await == 4 }).await;
        claimed(&records, ask(&key), 1).await;
        drop((store, watch));
        // Called, and never awaited.
        drop(records.release(&key, &dlock::record::ClaimToken::new()));
        drop(records);
        eventually("all are gone", || async { count().await == 0 }).await;
        assert!(!server.log().contains("unexpected EOF"), "{}", server.log());
    }
}
