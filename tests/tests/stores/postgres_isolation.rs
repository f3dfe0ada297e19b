//! Locks in transactions with an old snapshot: at every isolation level, no effect of a former holder commits after an effect
//! of the next holder.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use dlock::store::{Bind, Kind, RenewRequest, Renewal, Store};
use dlock::{HoldState, Lock, LockGuard, Loss};
use dlock_postgres::{HoldError, LockInError};
use dlock_tests::postgres::{Pooler, Postgres, connect};
use futures_util::future::join_all;
use tokio::time::sleep;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, IsolationLevel, Transaction};

use crate::postgres_support::{Bank, bank, bank_on, client, connected};

const MS: Duration = Duration::from_millis(1);
/// No test waits for its end.
const LEASE: Duration = Duration::from_secs(300);

const LEVELS: [IsolationLevel; 3] = [
    IsolationLevel::ReadCommitted,
    IsolationLevel::RepeatableRead,
    IsolationLevel::Serializable,
];

/// What happens to the lock after the first holder's transaction took its snapshot.
#[derive(Debug, Clone, Copy)]
enum Since {
    Nothing,
    TakenOver,
    TakenOverAndReleased,
    LockedByATransaction,
    ForcedOpen,
    RemovedAndMadeAnew,
}

impl Bank {
    async fn renews(&self, guard: &LockGuard, reads: bool) {
        let bound = guard.bind().unwrap().remove(0);
        let kind = if reads { Kind::Read } else { Kind::Mutex };
        let request = RenewRequest::new(kind, bound.key, bound.grant, LEASE);
        let renewed = Arc::new(self.locks.clone()).renew(vec![request]).await;
        assert!(matches!(renewed.unwrap()[..], [Ok(Renewal::Renewed)]));
    }

    /// Begins a transaction and reads, which fixes the snapshot of the stricter levels.
    async fn begun<'a>(&self, db: &'a mut Client, level: IsolationLevel) -> Transaction<'a> {
        let tx = db.build_transaction().isolation_level(level);
        let tx = tx.start().await.unwrap();
        let look = format!("SELECT count(*) FROM {}_payments", self.table);
        tx.query_one(&look, &[]).await.unwrap();
        tx
    }

    async fn pays(&self, tx: Transaction<'_>, what: &str) {
        tx.batch_execute(&self.payment(what)).await.unwrap();
        tx.commit().await.unwrap();
    }

    /// Holds the lock in the transaction, writes a payment, and commits.
    async fn holds_and_pays(
        &self,
        tx: Transaction<'_>,
        guard: &impl Bind,
        what: &str,
    ) -> Result<(), HoldError> {
        self.locks.hold_in(&tx, guard).await?;
        self.pays(tx, what).await;
        Ok(())
    }

    /// The same by the SQL function, as another language does it.
    async fn calls_and_pays(
        &self,
        tx: Transaction<'_>,
        guard: &LockGuard,
        what: &str,
    ) -> Result<(), tokio_postgres::Error> {
        let hold = format!("SELECT \"{}_hold_in\"($1, {})", self.table, guard.fencing_token());
        tx.query(&hold, &[&guard.key().as_str()]).await?;
        self.pays(tx, what).await;
        Ok(())
    }

    /// Lets the other process have the lock, and pay, as `since` says.
    async fn passes(&self, since: Since, key: &str) -> Option<LockGuard> {
        let mut db = self.db().await;
        match since {
            Since::Nothing => None,
            Since::ForcedOpen => {
                self.other.force_release(key).await.unwrap();
                None
            }
            Since::LockedByATransaction => {
                self.expires().await;
                let tx = db.transaction().await.unwrap();
                self.locks.lock_in(&tx, key).await.unwrap();
                self.pays(tx, &format!("theirs {key}")).await;
                None
            }
            _ => {
                self.expires().await;
                if let Since::RemovedAndMadeAnew = since {
                    assert!(self.locks.remove_free().await.unwrap() > 0);
                }
                let next = self.other.lock(key).acquire().await.unwrap();
                let tx = db.transaction().await.unwrap();
                self.holds_and_pays(tx, &next, &format!("theirs {key}"))
                    .await
                    .unwrap();
                match since {
                    Since::TakenOver => Some(next),
                    _ => {
                        next.release().await.unwrap();
                        None
                    }
                }
            }
        }
    }
}

const SINCE: [Since; 6] = [
    Since::Nothing,
    Since::TakenOver,
    Since::TakenOverAndReleased,
    Since::LockedByATransaction,
    Since::ForcedOpen,
    Since::RemovedAndMadeAnew,
];

fn is_conflict(error: &tokio_postgres::Error) -> bool {
    error.code() == Some(&SqlState::T_R_SERIALIZATION_FAILURE)
}

fn code(error: tokio_postgres::Error) -> String {
    error
        .code()
        .map_or_else(|| error.to_string(), |code| code.code().to_owned())
}

/// `FOR KEY SHARE` alone would lock the row as an old snapshot has it, with the former holder in it.
#[tokio::test]
async fn former_holder_never_pays_after_the_next_at_any_level_of_isolation() {
    let bank = bank().await;
    let mut db = bank.db().await;
    for level in LEVELS {
        for since in SINCE {
            for n in 0..4 {
                let (reads, renewed, calls) = (n == 1, n > 0, n == 2);
                let what = format!("{level:?} {since:?} {n}");
                let key = &*what;
                let lock = match reads {
                    true => bank.one.rw_lock(key).read(),
                    false => bank.one.lock(key),
                };
                let guard = lock.lease(LEASE).acquire().await.unwrap();
                let tx = bank.begun(&mut db, level).await;
                if renewed {
                    // The snapshot has an older version of the row than the one that is taken over.
                    bank.renews(&guard, reads).await;
                }
                let next = bank.passes(since, key).await;
                let ours = format!("ours {key}");
                let paid = match calls {
                    true => bank.calls_and_pays(tx, &guard, &ours).await.map_err(code),
                    false => match bank.holds_and_pays(tx, &guard, &ours).await {
                        Err(HoldError::Failed { source, .. }) => Err(code(source)),
                        Err(HoldError::Lost { key, .. }) if key.as_str() == what => Err("DLK01".to_owned()),
                        paid => paid.map_err(|error| error.to_string()),
                    },
                };
                let committed = bank.payments().await.contains(&ours);
                match (since, paid) {
                    (Since::Nothing, paid) => assert_eq!((paid, committed), (Ok(()), true), "{what}"),
                    (_, paid) => {
                        let refused = paid.expect_err(&what);
                        assert!(["DLK01", "40001"].contains(&&*refused), "{what}: {refused}");
                        assert!(!committed, "{what}");
                        if !calls {
                            assert_eq!(guard.state(), HoldState::Lost(Loss::Gone), "{what}");
                        }
                    }
                }
                if let Some(next) = next {
                    next.check().unwrap();
                    next.release().await.unwrap();
                }
            }
        }
    }
}

/// A row that the snapshot does not have may be newer than it: the lock is lost only if the store says so.
#[tokio::test]
async fn lock_acquired_after_the_snapshot_is_not_told_lost_at_any_level_of_isolation() {
    let bank = bank().await;
    let mut db = bank.db().await;
    for level in LEVELS {
        let is_fixed = !matches!(level, IsolationLevel::ReadCommitted);
        for (used, calls) in [(false, false), (true, false), (false, true), (true, true)] {
            let what = format!("{level:?} {used} {calls}");
            if used {
                let before = bank.one.lock(&*what).acquire().await.unwrap();
                before.release().await.unwrap();
            }
            let old = bank.begun(&mut db, level).await;
            let guard = bank.one.lock(&*what).lease(LEASE).acquire().await.unwrap();
            match calls {
                true => match bank.calls_and_pays(old, &guard, &what).await {
                    Ok(()) => assert!(!is_fixed, "{what}"),
                    Err(error) => assert!(is_fixed && is_conflict(&error), "{what}: {error}"),
                },
                false => match bank.holds_and_pays(old, &guard, &what).await {
                    Ok(()) => assert!(!is_fixed, "{what}"),
                    Err(HoldError::NotVisible { key, .. }) => {
                        assert!(is_fixed && key.as_str() == what, "{what}")
                    }
                    Err(error) => panic!("{what}: {error}"),
                },
            }
            assert_eq!(guard.state(), HoldState::Held, "{what}");
            let new = bank.begun(&mut db, level).await;
            bank.holds_and_pays(new, &guard, &what).await.unwrap();
            guard.release().await.unwrap();
        }
    }
}

/// What other languages are told lets them try again at most once.
#[tokio::test]
async fn function_tells_a_lost_token_in_the_next_transaction_at_any_level_of_isolation() {
    let bank = bank().await;
    let mut db = bank.db().await;
    for level in LEVELS {
        let what = format!("{level:?}");
        let old = bank.begun(&mut db, level).await;
        let guard = bank.one.lock(&*what).lease(LEASE).acquire().await.unwrap();
        bank.other.force_release(&*what).await.unwrap();
        let first = bank.calls_and_pays(old, &guard, &what).await.map_err(code);
        let expected = match level {
            IsolationLevel::ReadCommitted => "DLK01",
            _ => "40001",
        };
        assert_eq!(first, Err(expected.to_owned()), "{what}");
        let new = bank.begun(&mut db, level).await;
        let second = bank.calls_and_pays(new, &guard, &what).await.map_err(code);
        assert_eq!(second, Err("DLK01".to_owned()), "{what}");
    }
}

/// The first use of a key makes its row, which an old snapshot does not have.
#[tokio::test]
async fn transaction_that_cannot_see_a_new_key_is_not_told_busy() {
    let bank = bank().await;
    let mut db = bank.db().await;
    for level in LEVELS {
        let what = format!("{level:?}");
        let tx = bank.begun(&mut db, level).await;
        let locked = bank.locks.lock_in(&tx, &*what).await;
        match level {
            IsolationLevel::ReadCommitted => assert!(locked.is_ok(), "{locked:?}"),
            _ => assert!(
                matches!(locked, Err(LockInError::NotVisible { .. })),
                "{locked:?}"
            ),
        }
        // It can go on.
        bank.pays(tx, &what).await;
        let tx = bank.begun(&mut db, level).await;
        bank.locks.lock_in(&tx, &*what).await.unwrap();
    }
}

/// Its snapshot is older than the payments of the holders before it.
#[tokio::test]
async fn transaction_with_an_old_snapshot_does_not_become_the_lock() {
    let bank = bank().await;
    let mut db = bank.db().await;
    for level in LEVELS {
        for since in SINCE {
            let what = format!("{level:?} {since:?}");
            let guard = bank.one.lock(&*what).lease(LEASE).acquire().await.unwrap();
            bank.expires().await;
            let tx = bank.begun(&mut db, level).await;
            if bank.passes(since, &what).await.is_some() {
                bank.expires().await;
            }
            let fresh = matches!(level, IsolationLevel::ReadCommitted) || matches!(since, Since::Nothing);
            match bank.locks.lock_in(&tx, &*what).await {
                Ok(_) => assert!(fresh, "{what}"),
                Err(LockInError::Failed { source, .. }) => {
                    assert!(!fresh && is_conflict(&source), "{what}: {source}");
                }
                Err(error) => panic!("{what}: {error}"),
            }
            drop((tx, guard));
        }
    }
}

/// Leases that are ended by hand wake no waiter.
async fn acquired(lock: &Lock) -> LockGuard {
    loop {
        match lock.try_acquire().await {
            Ok(guard) => return guard,
            Err(error) if error.is_busy() => sleep(MS).await,
            Err(error) => panic!("{error}"),
        }
    }
}

/// All leases are ended again and again, so that only the transactions exclude each other; at each level, and also behind a
/// pooler that shares its connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_that_race_for_a_lock_are_alone_at_any_level_and_behind_a_pooler() {
    let bank = Arc::new(bank_on(Arc::new(Postgres::start().await)).await);
    let pooler = Pooler::start(&bank.server, "transaction").await;
    let direct = bank.server.config();
    let pooled = bank.server.config_at(pooler.addr());
    let (inside, commits) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let workers = (0..12).map(|n| {
        let (bank, inside, commits) = (bank.clone(), inside.clone(), commits.clone());
        let config = [&direct, &pooled][n % 2].clone();
        tokio::spawn(async move {
            let locks = connected(config.clone(), &bank.table).await;
            let client = client(&locks).await;
            let mut db = connect(&config).await.unwrap();
            let mut done = 0;
            while done < 8 {
                let lock = client.lock("account").fixed_lease(LEASE);
                let guard = match n % 3 {
                    0 => None,
                    _ => Some(acquired(&lock).await),
                };
                let tx = db.build_transaction().isolation_level(LEVELS[n / 4]);
                let tx = tx.start().await.unwrap();
                let held = match &guard {
                    Some(guard) => match locks.hold_in(&tx, guard).await {
                        Ok(()) => true,
                        Err(HoldError::Lost { .. }) => false,
                        Err(HoldError::Failed { source, .. }) if is_conflict(&source) => false,
                        Err(error) => panic!("{error}"),
                    },
                    None => match locks.lock_in(&tx, "account").await {
                        Ok(_) => true,
                        // Its first use makes the row.
                        Err(LockInError::Busy { .. } | LockInError::NotVisible { .. }) => false,
                        Err(LockInError::Failed { source, .. }) if is_conflict(&source) => false,
                        Err(error) => panic!("{error}"),
                    },
                };
                if held {
                    assert!(!inside.swap(true, Ordering::SeqCst), "two transactions at once");
                    tx.batch_execute(&bank.payment(&format!("{n}"))).await.unwrap();
                    sleep(fastrand::u32(0..4) * MS).await;
                    inside.store(false, Ordering::SeqCst);
                    // A stricter level may refuse the commit because of what the transaction has read.
                    match tx.commit().await {
                        Ok(()) => {
                            done += 1;
                            commits.fetch_add(1, Ordering::SeqCst);
                        }
                        Err(error) => assert!(is_conflict(&error), "{error}"),
                    }
                } else {
                    drop(tx);
                    sleep(fastrand::u32(0..4) * MS).await;
                }
                drop(guard);
            }
        })
    });
    let over = tokio::spawn({
        let bank = bank.clone();
        async move {
            loop {
                bank.expires().await;
                sleep(3 * MS).await;
            }
        }
    });
    for done in join_all(workers).await {
        done.unwrap();
    }
    over.abort();
    assert_eq!(bank.payments().await.len(), commits.load(Ordering::SeqCst));
}
