//! Locks on PostgreSQL whose server is replaced by its standby, or only reads for a while.

use std::sync::Arc;

use dlock::store::{Outcome, Reason, Store};
use dlock::{Error, HoldState, LockClient};
use dlock_postgres::{HoldError, PostgresLocks};
use dlock_tests::eventually;
use dlock_tests::faults::{PATIENCE, answered, built, within};
use dlock_tests::postgres::{Postgres, connect};
use tokio_postgres::NoTls;

use crate::postgres_support::{client, connected};
use crate::scenes::{LEASE, SEC, ask};

const TABLE: &str = "dlock_locks";

/// A process whose URL names both.
async fn client_of(first: &Postgres, second: &Postgres) -> LockClient {
    let both = format!("@{},{}/", first.addr(), second.addr());
    let url = first.url_at(first.addr());
    let url = url.replace(&format!("@{}/", first.addr()), &both);
    built(|| {
        let builder = LockClient::builder().scheme(dlock_postgres::scheme()).url(&url);
        builder.timeout(5 * SEC).retry_for(PATIENCE).lease(LEASE)
    })
    .await
}

async fn counts(server: &Postgres, sql: &str) -> i64 {
    let row = server.client().await.query_one(sql, &[]).await;
    row.map_or(-1, |row| row.get(0))
}

/// The locks of the last moments are not replicated, and with them nothing that was committed under them.
#[tokio::test]
async fn fail_over_keeps_what_was_replicated_and_the_holders_of_the_rest_are_told() {
    let first = Postgres::start().await;
    let made = connected(first.config(), TABLE).await;
    made.create_table().await.unwrap();
    drop(made);
    let second = Postgres::standby_of(&first).await;
    let (here, there) = (client_of(&first, &second).await, client_of(&first, &second).await);
    let kept = here.lock("kept").acquire().await.unwrap();
    let has_it = format!("SELECT count(*) FROM {TABLE} WHERE key = 'kept' AND holder <> ''");
    eventually("it is replicated", async || counts(&second, &has_it).await == 1).await;
    let alone = "ALTER SYSTEM SET primary_conninfo = ''";
    let standby = second.client().await;
    standby.batch_execute(alone).await.unwrap();
    standby.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    let follows = "SELECT count(*) FROM pg_stat_wal_receiver";
    eventually("it follows no more", async || counts(&second, follows).await == 0).await;
    let lost = here.lock("lost").acquire().await.unwrap();
    let mut last = 0;
    for _ in 0..5 {
        // Tokens that the standby does not know of.
        let guard = there.fenced_lock("tokens").acquire().await.unwrap();
        last = guard.fencing_token();
        guard.release().await.unwrap();
    }
    let waiter = tokio::spawn(there.lock("kept").acquire());

    first.kill();
    let none = here.lock("other").wait(2 * SEC).acquire().await.unwrap_err();
    assert!(!none.is_busy(), "{none}");
    let store = PostgresLocks::builder(first.config_with(second.addr()), NoTls);
    let told = store.timeout(5 * SEC).connect().await.unwrap_err();
    assert!(matches!(told, Error::Unreachable { .. }), "{told:?}");
    assert!(told.to_string().contains("dlock needs the primary"), "{told}");
    assert!(kept.is_held() && lost.is_held(), "their leases go on");

    second.promote().await;
    within(PATIENCE, "the loss is told", lost.lost()).await;
    eventually("the other is confirmed", async || kept.state() == HoldState::Held).await;
    assert!(!waiter.is_finished());
    let next = there.lock("lost").acquire().await.unwrap();
    assert!(next.fencing_token() > lost.fencing_token());
    let fenced = there.fenced_lock("tokens").acquire().await.unwrap();
    assert!(fenced.fencing_token() > last);

    // The database of the transaction is the new one.
    let locks = connected(second.config(), TABLE).await;
    let mut db = connect(&second.config()).await.unwrap();
    let tx = db.transaction().await.unwrap();
    locks.hold_in(&tx, &kept).await.unwrap();
    let refused = locks.hold_in(&tx, &lost).await;
    assert!(matches!(refused, Err(HoldError::Lost { .. })), "{refused:?}");
    tx.commit().await.unwrap();
    let token = kept.fencing_token();
    kept.release().await.unwrap();
    let served = within(PATIENCE, "the waiter goes on", waiter).await.unwrap();
    assert!(served.unwrap().fencing_token() > token);
}

/// As a standby, and by a setting that leaves its connections.
#[tokio::test]
async fn server_that_only_reads_is_told_and_used_again_when_it_writes() {
    let server = Postgres::start().await;
    let locks = connected(server.config(), TABLE).await;
    locks.create_table().await.unwrap();
    let builder = PostgresLocks::builder(server.config(), NoTls).table(TABLE);
    let store = builder.timeout(5 * SEC).connect().await.unwrap();
    let store = Arc::new(store);
    let patient = client(&locks).await;
    for demoted in [false, true] {
        let guard = patient.lock("held").lease(LEASE).acquire().await.unwrap();
        match demoted {
            true => server.demote().await,
            false => server.only_reads(true).await,
        }
        eventually("it is told", async || {
            let asked = store.clone().acquire(ask("early", 1, LEASE)).await;
            asked.is_err_and(|error| error.message.contains("dlock needs the primary"))
        })
        .await;
        let error = store.clone().acquire(ask("k", 2, LEASE)).await.unwrap_err();
        assert_eq!(
            (error.outcome, &error.reason),
            (Outcome::NotDone, &Reason::Unreachable)
        );
        assert!(error.message.contains("dlock needs the primary"), "{error}");
        let waiter = tokio::spawn(patient.lock("other").wait(PATIENCE).acquire());
        match demoted {
            true => server.promote().await,
            false => server.only_reads(false).await,
        }
        let other = within(PATIENCE, "it writes again", waiter).await.unwrap();
        other.unwrap().release().await.unwrap();
        eventually("the hold is confirmed", async || guard.state() == HoldState::Held).await;
        guard.release().await.unwrap();
        let free = answered(|| store.clone().inspect("k".into())).await.unwrap();
        assert!(free.is_empty(), "{free:?}");
    }
}
