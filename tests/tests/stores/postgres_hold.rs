//! Locks in transactions of users: the effect and the lock commit together, whatever becomes of the lease, the process or
//! the clocks.

use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::record::Records;
use dlock::store::{Bind, Holder};
use dlock::{HoldState, Loss, OnceError};
use dlock_postgres::{HoldError, LockInError, PostgresLocks, PostgresRecords};
use dlock_tests::faults::{PATIENCE, in_rounds, within};
use dlock_tests::postgres::{PgProxy, Postgres, connect};
use dlock_tests::{Clock, Direction, child, eventually};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use tokio::time::sleep;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Config, NoTls, Transaction};

use crate::postgres_support::{Bank, bank, bank_on, client, connected};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);
/// No test waits for its end.
const LEASE: Duration = Duration::from_secs(300);

#[tokio::test]
async fn effect_and_lock_commit_together() {
    let bank = bank().await;
    let guard = bank.one.lock("account").acquire().await.unwrap();
    let term = bank.one.leader("accountant").campaign().await.unwrap();
    let mut db = bank.db().await;
    let tx = db.transaction().await.unwrap();
    bank.locks.hold_in(&tx, &guard).await.unwrap();
    bank.locks.hold_in(&tx, &term).await.unwrap();
    term.release().await.unwrap();
    assert!(bank.is_pinned("accountant").await);
    tx.batch_execute(&bank.payment("5")).await.unwrap();
    tx.commit().await.unwrap();
    guard.release().await.unwrap();
    assert_eq!(bank.payments().await, ["5"]);
    assert!(bank.is_free("account").await);
}

async fn backend_pid(tx: &Transaction<'_>) -> i32 {
    tx.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0)
}

/// The promise that no clock is needed for.
#[tokio::test]
async fn open_transaction_keeps_the_lock_when_the_lease_is_over() {
    let bank = bank().await;
    let mut db = bank.db().await;
    let tx = db.transaction().await.unwrap();
    let guard = bank.held_for(300 * MS).await;
    bank.locks.hold_in(&tx, &guard).await.unwrap();
    sleep(500 * MS).await;
    assert!(matches!(guard.state(), HoldState::Lost(_)), "the lease is over");
    assert!(bank.is_pinned("account").await);
    // Neither is it forced open nor removed, and the error names who holds it.
    let pid = backend_pid(&tx).await;
    let error = bank.other.force_release("account").await.unwrap_err().to_string();
    assert!(error.contains(&format!("process {pid} holds")), "{error}");
    assert!(error.contains(&format!("pg_terminate_backend({pid})")), "{error}");
    tx.batch_execute(&bank.payment("5")).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(bank.payments().await, ["5"]);
    assert!(bank.is_free("account").await);
}

#[tokio::test]
async fn waiter_gets_the_lock_after_the_transaction() {
    let bank = bank().await;
    let mut db = bank.db().await;
    let tx = db.transaction().await.unwrap();
    let guard = bank.held_for(200 * MS).await;
    bank.locks.hold_in(&tx, &guard).await.unwrap();
    let waiter = tokio::spawn(bank.other.lock("account").acquire());
    sleep(800 * MS).await;
    assert!(!waiter.is_finished());
    tx.commit().await.unwrap();
    drop(
        within(5 * SEC, "the waiter looks again", waiter)
            .await
            .unwrap()
            .unwrap(),
    );
}

/// Its end is not notified, but a waiter looks soon, and the longer it takes the less often. One that has waited for long looks
/// after 250 ms, so it could not have the lock so soon after its first look.
#[tokio::test]
async fn waiter_looks_soon_after_a_short_transaction() {
    let bank = bank().await;
    in_rounds("the median of five is short", async || {
        let mut db = bank.db().await;
        let mut waited = Vec::new();
        for _ in 0..5 {
            let tx = db.transaction().await.unwrap();
            bank.locks.lock_in(&tx, "account").await.unwrap();
            let begun = Instant::now();
            let waiter = tokio::spawn(bank.other.lock("account").acquire());
            sleep(60 * MS).await;
            tx.commit().await.unwrap();
            let next = within(5 * SEC, "the waiter looks again", waiter).await;
            waited.push(begun.elapsed());
            next.unwrap().unwrap().release().await.unwrap();
        }
        waited.sort();
        match waited[2] < 160 * MS {
            true => Ok(()),
            false => Err(waited),
        }
    })
    .await;
}

#[tokio::test]
async fn caller_is_told_which_transaction_has_its_lock() {
    let bank = bank().await;
    let mut db = bank.db().await;
    bank.one
        .multi(["a", "b", "c"])
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let tx = db.transaction().await.unwrap();
    bank.locks.lock_in(&tx, "b").await.unwrap();
    let pid = backend_pid(&tx).await;
    let says = format!("process {pid} holds it");
    for once in [true, false] {
        let lock = bank.other.lock("b").wait(300 * MS);
        let error = match once {
            true => lock.try_acquire().await.unwrap_err(),
            false => lock.acquire().await.unwrap_err(),
        };
        assert!(error.is_busy() && error.to_string().contains(&says), "{error}");
    }
    // Of several locks it is the second that is taken.
    let error = bank.other.multi(["a", "b", "c"]).try_acquire().await.unwrap_err();
    assert!(
        matches!(&error, dlock::Error::NotAcquired { key, .. } if key.as_str() == "b"),
        "{error}"
    );
    assert!(error.to_string().contains(&says), "{error}");
    tx.commit().await.unwrap();
    // It is said no longer than it is true.
    let guard = bank.one.lock("b").acquire().await.unwrap();
    let error = bank.other.lock("b").try_acquire().await.unwrap_err().to_string();
    assert!(!error.contains("process"), "{error}");
    guard.release().await.unwrap();
}

#[tokio::test]
async fn key_that_is_no_key_leaves_the_transaction_as_it_is() {
    let bank = bank().await;
    let mut db = bank.db().await;
    let tx = db.transaction().await.unwrap();
    for key in ["".to_owned(), "a\0b".to_owned(), "k".repeat(10_000)] {
        let refused = bank.locks.lock_in(&tx, key.as_str()).await;
        assert!(matches!(refused, Err(LockInError::NoRow { .. })), "{refused:?}");
    }
    for key in ["'; DROP TABLE x; --", "\"\\$1%_", "\u{1f512} schl\u{fc}ssel"] {
        bank.locks.lock_in(&tx, key).await.unwrap();
        assert!(bank.is_pinned(key).await, "{key}");
    }
    tx.commit().await.unwrap();
}

/// Until it is committed or rolled back, from wherever.
#[tokio::test]
async fn prepared_transaction_keeps_the_lock() {
    let server = Arc::new(Postgres::start().await);
    let set = "ALTER SYSTEM SET max_prepared_transactions = 5";
    server.client().await.batch_execute(set).await.unwrap();
    server.restart().await;
    let bank = bank_on(server).await;
    let mut db = bank.db().await;
    let tx = db.transaction().await.unwrap();
    let guard = bank.held_for(SEC).await;
    bank.locks.hold_in(&tx, &guard).await.unwrap();
    tx.batch_execute(&bank.payment("5")).await.unwrap();
    tx.batch_execute("PREPARE TRANSACTION 'pay'").await.unwrap();
    drop(tx);
    bank.server.kill();
    bank.server.restart().await;
    sleep(SEC).await;
    eventually("it is seen again", async || bank.is_pinned("account").await).await;
    bank.db()
        .await
        .batch_execute("COMMIT PREPARED 'pay'")
        .await
        .unwrap();
    assert_eq!(bank.payments().await, ["5"]);
    assert!(bank.is_free("account").await);
}

#[tokio::test]
async fn lock_that_was_taken_over_is_not_held() {
    let bank = bank().await;
    let guard = bank.one.lock("account").acquire().await.unwrap();
    assert!(bank.other.force_release("account").await.unwrap());
    let mut db = bank.db().await;
    for taken in [false, true] {
        let next = match taken {
            true => Some(bank.other.lock("account").acquire().await.unwrap()),
            false => None,
        };
        let tx = db.transaction().await.unwrap();
        let held = bank.locks.hold_in(&tx, &guard).await;
        assert!(
            matches!(held, Err(HoldError::Lost { ref key, .. }) if key.as_str() == "account"),
            "{held:?}"
        );
        // The guard did not wait for its next renewal.
        assert_eq!(guard.state(), HoldState::Lost(Loss::Gone));
        drop(next);
    }
    // A view of a hold that was released.
    let guard = bank.one.lock("other").acquire().await.unwrap();
    let held = guard.held();
    guard.release().await.unwrap();
    let tx = db.transaction().await.unwrap();
    assert!(matches!(
        bank.locks.hold_in(&tx, &held).await,
        Err(HoldError::Lost { .. })
    ));
}

#[tokio::test]
async fn renewals_and_the_release_go_on_beside_it() {
    let bank = bank().await;
    let guard = bank.one.lock("account").lease(600 * MS).acquire().await.unwrap();
    let mut db = bank.db().await;
    let tx = db.transaction().await.unwrap();
    bank.locks.hold_in(&tx, &guard).await.unwrap();
    sleep(1500 * MS).await;
    guard.check().expect("it is renewed");
    within(5 * SEC, "the release", guard.release()).await.unwrap();
    assert!(bank.is_pinned("account").await);
    tx.rollback().await.unwrap();
    assert!(bank.is_free("account").await);
}

/// Looking changes nothing: the transaction has the lock as before.
#[tokio::test]
async fn lock_that_only_a_transaction_holds_is_shown() {
    let bank = bank().await;
    let mut db = bank.db().await;
    let ended = bank.one.lock("held").fixed_lease(LEASE).acquire().await.unwrap();
    let leased = bank
        .one
        .lock("leased")
        .fixed_lease(LEASE)
        .acquire()
        .await
        .unwrap();
    let tx = db.transaction().await.unwrap();
    let pid = backend_pid(&tx).await;
    bank.locks.lock_in(&tx, "locked").await.unwrap();
    bank.locks.hold_in(&tx, &ended).await.unwrap();
    bank.locks.hold_in(&tx, &leased).await.unwrap();
    ended.release().await.unwrap();
    let by = format!("transaction of process {pid}");
    for _ in 0..2 {
        for key in ["held", "locked"] {
            let holder = bank.other.inspect(key).await.unwrap().expect("it is held");
            assert_eq!(
                (
                    holder.id.as_str(),
                    holder.holds,
                    holder.remaining,
                    holder.ends_with
                ),
                (by.as_str(), 1, None, Some("its transaction"))
            );
        }
        let listed = bank.other.list("").await.unwrap();
        let mut listed: Vec<_> = listed
            .iter()
            .map(|(key, holder)| (key.as_str(), holder.id == by))
            .collect();
        listed.sort();
        assert_eq!(listed, [("held", true), ("leased", false), ("locked", true)]);
        assert!(bank.is_pinned("locked").await);
    }
    tx.commit().await.unwrap();
    leased.release().await.unwrap();
    for key in ["held", "locked"] {
        assert_eq!(bank.other.inspect(key).await.unwrap(), None);
    }
}

/// Locks of transactions are never waited for, so only the rows of users can be in a deadlock. PostgreSQL ends one of the
/// transactions, whose connection and whose locks are usable after that.
#[tokio::test]
async fn deadlock_of_two_transactions_is_reported_and_leaves_locks_and_connections_usable() {
    let bank = bank().await;
    let (mut here, mut there) = (bank.db().await, bank.db().await);
    let rows = format!("{}_payments", bank.table);
    here.batch_execute(&format!("INSERT INTO {rows} VALUES ('a'), ('b')"))
        .await
        .unwrap();
    let touch = |row: &str| format!("UPDATE {rows} SET what = what WHERE what = '{row}'");
    let (first, second) = (
        here.transaction().await.unwrap(),
        there.transaction().await.unwrap(),
    );
    bank.locks.lock_in(&first, "a").await.unwrap();
    bank.locks.lock_in(&second, "b").await.unwrap();
    for (tx, other) in [(&first, "b"), (&second, "a")] {
        let locked = bank.locks.lock_in(tx, other).await;
        assert!(matches!(locked, Err(LockInError::Busy { .. })), "{locked:?}");
    }
    first.batch_execute(&touch("a")).await.unwrap();
    second.batch_execute(&touch("b")).await.unwrap();
    let (of_a, of_b) = (touch("a"), touch("b"));
    let waits = tokio::join!(first.batch_execute(&of_b), second.batch_execute(&of_a));
    let ended = match waits {
        (Err(error), Ok(())) => [(Some(error), first), (None, second)],
        (Ok(()), Err(error)) => [(None, first), (Some(error), second)],
        other => panic!("{other:?}"),
    };
    for (error, tx) in ended {
        let Some(error) = error else {
            tx.commit().await.unwrap();
            continue;
        };
        assert_eq!(error.code(), Some(&SqlState::T_R_DEADLOCK_DETECTED), "{error}");
        // The transaction is over: it says so of each further lock.
        let locked = bank.locks.lock_in(&tx, "c").await;
        assert!(matches!(locked, Err(LockInError::Failed { .. })), "{locked:?}");
        tx.rollback().await.unwrap();
    }
    for db in [&mut here, &mut there] {
        let tx = db.transaction().await.unwrap();
        bank.locks.lock_in(&tx, "a").await.unwrap();
        bank.locks.lock_in(&tx, "b").await.unwrap();
        tx.commit().await.unwrap();
    }
}

/// A waiter of the same process would have the same grant at the store, beside the open transaction.
#[tokio::test]
async fn lock_is_not_handed_off_inside_the_process() {
    let bank = bank().await;
    let guard = bank.one.lock("account").acquire().await.unwrap();
    let before = guard.bind().unwrap();
    let mut db = bank.db().await;
    let tx = db.transaction().await.unwrap();
    bank.locks.hold_in(&tx, &guard).await.unwrap();
    let waiter = tokio::spawn(bank.one.lock("account").acquire());
    sleep(100 * MS).await;
    guard.release().await.unwrap();
    sleep(400 * MS).await;
    assert!(!waiter.is_finished());
    tx.commit().await.unwrap();
    let next = within(5 * SEC, "the waiter looks again", waiter)
        .await
        .unwrap()
        .unwrap();
    let after = next.bind().unwrap();
    assert!(after[0].grant != before[0].grant && after[0].token > before[0].token);
}

/// Whether only a transaction holds the lock, and no client.
fn is_transaction(holder: &Holder) -> bool {
    holder.id.starts_with("transaction of process ")
}

#[tokio::test]
async fn several_locks_are_held_together() {
    let bank = bank().await;
    let guard = bank.one.multi(["a", "b", "c"]).acquire().await.unwrap();
    let mut db = bank.db().await;
    let tx = db.transaction().await.unwrap();
    bank.locks.hold_in(&tx, &guard).await.unwrap();
    drop(guard);
    for key in ["a", "b", "c"] {
        eventually("the locks are released", async || {
            let holder = bank.one.inspect(key).await.unwrap();
            is_transaction(&holder.expect("the transaction holds it"))
        })
        .await;
        assert!(bank.is_pinned(key).await, "{key}");
    }
    tx.commit().await.unwrap();
    for key in ["a", "b", "c"] {
        assert!(bank.is_free(key).await, "{key}");
    }
}

#[tokio::test]
async fn transaction_is_a_lock_of_its_own() {
    let bank = bank().await;
    let (mut db, mut db2) = (bank.db().await, bank.db().await);
    let mut last = 0;
    for round in 0..3 {
        let tx = db.transaction().await.unwrap();
        // The first time there is no row.
        let token = bank.locks.lock_in(&tx, "report").await.unwrap();
        assert!(token > last, "{round}: {token} after {last}");
        assert!(bank.is_pinned("report").await);
        let tx2 = db2.transaction().await.unwrap();
        let second = bank.locks.lock_in(&tx2, "report").await;
        assert!(
            matches!(second, Err(LockInError::Busy { remaining: None, .. })),
            "{second:?}"
        );
        // It goes on with other work.
        tx2.batch_execute(&bank.payment(&round.to_string()))
            .await
            .unwrap();
        tx2.commit().await.unwrap();
        tx.commit().await.unwrap();
        let guard = bank.other.lock("report").acquire().await.unwrap();
        assert!(guard.fencing_token() > token);
        last = guard.fencing_token();
        guard.release().await.unwrap();
    }
    assert_eq!(bank.payments().await, ["0", "1", "2"]);
}

#[tokio::test]
async fn transaction_leaves_a_lease_alone() {
    let bank = bank().await;
    let guard = bank.one.lock("report").lease(2 * SEC).acquire().await.unwrap();
    let mut db = bank.db().await;
    let tx = db.transaction().await.unwrap();
    for _ in 0..20 {
        match bank.locks.lock_in(&tx, "report").await {
            Err(LockInError::Busy {
                remaining: Some(left),
                ..
            }) => assert!(left <= 2 * SEC),
            other => panic!("{other:?}"),
        }
    }
    // Nothing of its looks is left that would hold up a renewal or the release.
    sleep(SEC).await;
    guard.check().unwrap();
    assert_eq!(guard.state(), HoldState::Held);
    within(SEC, "the release", guard.release()).await.unwrap();
    assert!(bank.is_free("report").await);
}

#[tokio::test]
async fn rollback_to_a_savepoint_gives_the_lock_up() {
    let bank = bank().await;
    let mut db = bank.db().await;
    let mut tx = db.transaction().await.unwrap();
    let inner = tx.savepoint("work").await.unwrap();
    bank.locks.lock_in(&inner, "report").await.unwrap();
    assert!(bank.is_pinned("report").await);
    inner.rollback().await.unwrap();
    assert!(bank.is_free("report").await);
}

#[tokio::test]
async fn other_languages_hold_and_lock_by_functions() {
    let bank = bank().await;
    let table = &bank.table;
    let mut db = bank.db().await;
    let guard = bank
        .one
        .lock("account")
        .fixed_lease(300 * MS)
        .local_handoffs(0)
        .acquire()
        .await
        .unwrap();
    let hold = format!("SELECT \"{table}_hold_in\"('account', {})", guard.fencing_token());
    let tx = db.transaction().await.unwrap();
    tx.batch_execute(&hold).await.unwrap();
    sleep(400 * MS).await;
    assert!(bank.is_pinned("account").await);
    let pins = format!("SELECT key FROM \"{table}_pins\" WHERE pid = pg_backend_pid()");
    let key: String = tx.query_one(&pins, &[]).await.unwrap().get(0);
    assert_eq!(key, "account");
    tx.commit().await.unwrap();
    assert!(bank.is_free("account").await);
    // The token is that of a former holder.
    let error = db.batch_execute(&hold).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "DLK01", "{error}");

    let lock = format!("SELECT \"{table}_lock_in\"('new')");
    let error = db.query_one(&lock, &[]).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "DLK03", "{error}");
    let make = format!("SELECT \"{table}_make\"('new')");
    db.batch_execute(&make).await.unwrap();
    let tx = db.transaction().await.unwrap();
    let token: Option<i64> = tx.query_one(&lock, &[]).await.unwrap().get(0);
    assert!(token.unwrap() > 0);
    assert!(bank.is_pinned("new").await);
    let second: Option<i64> = bank.db().await.query_one(&lock, &[]).await.unwrap().get(0);
    assert_eq!(second, None);
    tx.commit().await.unwrap();
    assert!(bank.is_free("new").await);
}

/// The check for a conflict waits for a transaction that has changed the row. So nothing is inserted where a row is.
#[tokio::test]
async fn row_that_a_transaction_has_changed_is_not_waited_for_to_make_it() {
    let bank = bank().await;
    let table = &bank.table;
    let mut db = bank.db().await;
    let tx = db.transaction().await.unwrap();
    bank.locks.lock_in(&tx, "report").await.unwrap();
    let other = bank.db().await;
    let make = format!("SELECT \"{table}_make\"('report')");
    within(5 * SEC, "the row is made", other.batch_execute(&make))
        .await
        .unwrap();
    let lock = format!("SELECT \"{table}_lock_in\"('report')");
    let token: Option<i64> = other.query_one(&lock, &[]).await.unwrap().get(0);
    assert_eq!(token, None, "it is busy");
    // The rows of both are made before they are acquired.
    let both = bank.other.multi(["new", "report"]);
    let busy = within(5 * SEC, "it is told", both.try_acquire())
        .await
        .unwrap_err();
    assert!(busy.is_busy(), "{busy}");
    tx.commit().await.unwrap();
    assert!(bank.is_free("report").await);
}

/// The transaction that makes a row should have ended long ago. The one that must wait for it can go on with other work.
#[tokio::test]
async fn row_that_another_transaction_is_making_is_not_visible() {
    let bank = bank().await;
    let hasty = PostgresLocks::builder(bank.server.config(), NoTls).table(&bank.table);
    let hasty = hasty.timeout(2 * SEC).connect().await.unwrap();
    let (mut db, mut maker) = (bank.db().await, bank.db().await);
    let makes = maker.transaction().await.unwrap();
    let make = format!("SELECT \"{}_make\"('new')", bank.table);
    makes.batch_execute(&make).await.unwrap();
    let tx = db.transaction().await.unwrap();
    let refused = hasty.lock_in(&tx, "new").await;
    assert!(
        matches!(refused, Err(LockInError::NotVisible { .. })),
        "{refused:?}"
    );
    makes.commit().await.unwrap();
    hasty.lock_in(&tx, "new").await.unwrap();
    tx.commit().await.unwrap();
}

/// An hour forward, and back again; what clients know of the server's clock follows.
#[tokio::test]
async fn clock_that_jumps_takes_no_lock_from_a_transaction() {
    let clock = Clock::new().expect("libfaketime");
    let bank = bank_on(Arc::new(Postgres::start_by(Some(&clock)).await)).await;
    let mut db = bank.db().await;
    for ahead in [3600 * SEC, Duration::ZERO, 7200 * SEC] {
        let guard = bank.held_for(60 * SEC).await;
        let tx = db.transaction().await.unwrap();
        bank.locks.hold_in(&tx, &guard).await.unwrap();
        clock.set(ahead).expect("its file can be written");
        let forward = !ahead.is_zero();
        eventually("the server has the time", async || {
            let holder = bank.other.inspect("account").await.unwrap();
            let holder = holder.expect("the transaction holds it in any case");
            is_transaction(&holder) || holder.remaining.is_some_and(|left| left > 3000 * SEC) || !forward
        })
        .await;
        if forward {
            assert!(
                bank.is_pinned("account").await,
                "its lease is over, by the server's clock"
            );
        } else {
            assert!(
                !bank.is_free("account").await,
                "its lease goes on, by the server's clock"
            );
        }
        tx.batch_execute(&bank.payment(&ahead.as_secs().to_string()))
            .await
            .unwrap();
        tx.commit().await.unwrap();
        let _ = guard.release().await;
        bank.other.force_release("account").await.unwrap();
        assert!(bank.is_free("account").await);
    }
    assert_eq!(bank.payments().await.len(), 3);
}

/// The lease of that process: it loses none on a busy machine, unless it stands still.
const SHORT: Duration = Duration::from_secs(2);

/// Where the process stands still, or dies, that does the work of [`as_another_process`].
const STEPS: [&str; 8] = [
    "acquired",
    "claimed",
    "begun",
    "held",
    "paid",
    "recorded",
    "committed",
    "released",
];

/// Another process of the bank, told by its environment what to do: lock, payment and the record of the payment are one
/// transaction. It ends with 0 where it paid, or had paid before, and with 3 where the lock was lost.
#[tokio::test]
#[ignore = "it is what the tests start as another process"]
async fn as_another_process() {
    let var = |name: &str| std::env::var(name).unwrap();
    let (table, step, how) = (var("BANK_TABLE"), var("BANK_STEP"), var("BANK_HOW"));
    let config: Config = var("BANK_URL").parse().unwrap();
    let locks = connected(config.clone(), &table).await;
    let records = PostgresRecords::builder(config.clone(), NoTls).table(format!("{table}_records"));
    let records = records.timeout(PATIENCE).connect().await.unwrap();
    let client = client(&locks).await;
    let mut db = connect(&config).await.unwrap();
    let at = |now: &str| match (now == step, &*how) {
        (true, "dies") => std::process::abort(),
        (true, _) => signal::raise(Signal::SIGSTOP).unwrap(),
        _ => {}
    };
    let guard = client.lock("account").lease(SHORT).acquire().await.unwrap();
    at("acquired");
    // Work that stands still for longer than its claim lasts is given up.
    let claimed_for = if how == "dies" { SHORT } else { PATIENCE };
    let once = Records::new(records.clone()).once("theirs").lease(claimed_for);
    let done = once
        .wait(PATIENCE)
        .run(async |claim| {
            at("claimed");
            let tx = db.transaction().await.unwrap();
            tx.batch_execute("SELECT 1").await.unwrap();
            at("begun");
            locks.hold_in(&tx, &guard).await?;
            at("held");
            let sql = format!("INSERT INTO {table}_payments VALUES ('theirs')");
            tx.batch_execute(&sql).await.unwrap();
            at("paid");
            records.complete_once_in(&tx, &claim, &()).await.unwrap();
            at("recorded");
            tx.commit().await.unwrap();
            at("committed");
            Ok::<_, HoldError>(())
        })
        .await;
    match done {
        Ok(_) => {}
        Err(OnceError::Work(HoldError::Lost { .. })) => std::process::exit(3),
        Err(error) => panic!("{error}"),
    }
    let _ = guard.release().await;
    at("released");
    std::process::exit(0);
}

async fn start(bank: &Bank, step: &str, how: &str) -> Child {
    bank.server.records(&format!("{}_records", bank.table)).await;
    let mut command = child::command(std::env::current_exe().unwrap());
    let test = [
        "--exact",
        "postgres_hold::as_another_process",
        "--ignored",
        "--nocapture",
    ];
    command
        .args(test)
        .env("BANK_URL", bank.server.url_at(bank.server.addr()));
    command
        .env("BANK_TABLE", &bank.table)
        .env("BANK_STEP", step)
        .env("BANK_HOW", how);
    let quiet = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let _ = quiet;
    child::spawn(command).unwrap()
}

async fn ends(process: &mut Child) -> Option<i32> {
    let mut outcome = None;
    eventually("the process ends", || {
        outcome = process.try_wait().unwrap();
        std::future::ready(outcome.is_some())
    })
    .await;
    outcome.unwrap().code()
}

fn is_stopped(process: &Child) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.id())).unwrap_or_default();
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| rest.starts_with('T'))
}

/// It lasts some leases for each step.
#[tokio::test]
async fn process_that_stands_still_for_longer_than_its_lease_never_pays_beside_another() {
    for step in ["acquired", "held", "paid", "committed", "released"] {
        let bank = bank().await;
        let mut process = start(&bank, step, "stops").await;
        eventually("it stands still", async || is_stopped(&process)).await;
        sleep(SHORT + SEC).await;
        let pinned = matches!(step, "held" | "paid");
        let ours = match bank.other.lock("account").try_acquire().await {
            Ok(guard) => {
                let mut db = bank.db().await;
                let tx = db.transaction().await.unwrap();
                bank.locks.hold_in(&tx, &guard).await.unwrap();
                tx.batch_execute(&bank.payment("ours")).await.unwrap();
                tx.commit().await.unwrap();
                guard.release().await.unwrap();
                true
            }
            Err(error) if error.is_busy() => false,
            Err(error) => panic!("{error}"),
        };
        assert_eq!(ours, !pinned, "{step}");
        signal::kill(Pid::from_raw(process.id().try_into().unwrap()), Signal::SIGCONT).unwrap();
        let code = ends(&mut process).await;
        let expected: (_, &[&str]) = match step {
            "acquired" => (3, &["ours"]),
            "held" | "paid" => (0, &["theirs"]),
            _ => (0, &["ours", "theirs"]),
        };
        assert_eq!(
            (code, &bank.payments().await[..]),
            (
                Some(expected.0),
                &expected.1.iter().map(ToString::to_string).collect::<Vec<_>>()[..]
            ),
            "{step}"
        );
        eventually("it is free", async || bank.is_free("account").await).await;
    }
}

/// Lock, payment and record: the next process finishes what is not done, and repeats nothing.
#[tokio::test]
async fn process_that_dies_at_any_step_leaves_its_effect_or_nothing_and_a_free_lock() {
    for step in STEPS {
        let bank = bank().await;
        let mut process = start(&bank, step, "dies").await;
        assert_ne!(ends(&mut process).await, Some(0), "{step}");
        eventually("the lock is free", async || bank.is_free("account").await).await;
        let expected = matches!(step, "committed" | "released");
        assert_eq!(bank.payments().await.len(), usize::from(expected), "{step}");
        for _ in 0..2 {
            let mut next = start(&bank, "never", "dies").await;
            assert_eq!(ends(&mut next).await, Some(0), "{step}");
            assert_eq!(bank.payments().await, ["theirs"], "{step}");
        }
    }
}

/// Whether its end is seen or not, until the limit of the server for transactions without a word.
#[tokio::test]
async fn transaction_whose_client_is_cut_off_gives_the_lock_up() {
    for silent in [false, true] {
        let bank = bank().await;
        let proxy = PgProxy::start(bank.server.addr());
        let guard = bank.held_for(5 * PATIENCE).await;
        let mut db = bank.server.client_at(proxy.addr()).await;
        let tx = db.transaction().await.unwrap();
        bank.locks.hold_in(&tx, &guard).await.unwrap();
        tx.batch_execute(&bank.payment("ours")).await.unwrap();
        bank.expires().await;
        if silent {
            let limit = "SET LOCAL idle_in_transaction_session_timeout = '1s'";
            tx.batch_execute(limit).await.unwrap();
            proxy.block(Direction::Both);
        } else {
            proxy.cut();
        }
        let next = within(PATIENCE, "others go on", bank.other.lock("account").acquire());
        let next = next.await.unwrap();
        let mut theirs = bank.db().await;
        let other = theirs.transaction().await.unwrap();
        bank.locks.hold_in(&other, &next).await.unwrap();
        other.batch_execute(&bank.payment("theirs")).await.unwrap();
        other.commit().await.unwrap();
        proxy.unblock(Direction::Both);
        let late = within(PATIENCE, "the commit fails", tx.commit()).await;
        assert!(late.is_err(), "its transaction is over");
        assert_eq!(bank.payments().await, ["theirs"]);
    }
}
