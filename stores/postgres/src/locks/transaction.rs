//! Locks in the user's own transactions: effect and lock commit together.

use std::time::Duration;

use dlock::store::{Bind, BoundGrant, Reason, StoreError};
use dlock::{Error, LockKey};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;
use tokio_postgres::{Row, Transaction};

use super::PostgresLocks;
use super::job::{Step, is_permit, sendable};
use crate::failure;

/// How often a row is tried that another statement locks briefly, and the first pause between attempts.
const LOOKS: (u32, Duration) = (7, Duration::from_millis(2));

/// Why a transaction does not hold a lock. The transaction must be rolled back, which dropping it does.
///
/// ```no_run
/// use dlock::LockGuard;
/// use dlock_postgres::{HoldError, PostgresLocks};
/// use tokio_postgres::Transaction;
///
/// /// Whether this attempt did the work. When another process took the lock over, that is no failure.
/// async fn commit(
///     tx: Transaction<'_>,
///     locks: &PostgresLocks,
///     guard: &LockGuard,
/// ) -> Result<bool, Box<dyn std::error::Error>> {
///     match locks.hold_in(&tx, guard).await {
///         Ok(()) => tx.commit().await?,
///         Err(HoldError::Lost { .. }) => return Ok(false), // dropping the transaction rolls it back
///         Err(error) => return Err(error.into()),
///     }
///     Ok(true)
/// }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HoldError {
    /// The caller no longer holds the lock.
    #[error("lock \"{key}\" was lost: roll the transaction back")]
    #[non_exhaustive]
    Lost {
        /// The lock.
        key: LockKey,
    },
    /// The transaction does not see that the caller holds the lock: its snapshot is older than the acquire, or it is in
    /// another database. The store reports the lock as held, or did not reply. Begin a transaction after the acquire:
    /// under `REPEATABLE READ` and `SERIALIZABLE` its first statement fixes what it sees.
    #[error(
        "the transaction does not see that lock \"{key}\" is held: roll it back, and begin one after the acquire"
    )]
    #[non_exhaustive]
    NotVisible {
        /// The lock.
        key: LockKey,
    },
    /// Another transaction has locked the row of the lock, though the caller holds it, as a `SELECT … FOR UPDATE` by hand
    /// does. Try again in a new transaction.
    #[error(
        "another transaction has the row of lock \"{key}\" locked: roll the transaction back, and try again"
    )]
    #[non_exhaustive]
    RowLocked {
        /// The lock.
        key: LockKey,
    },
    /// The statement failed; the transaction cannot be committed.
    #[error("lock \"{key}\" could not be held in the transaction: roll it back")]
    #[non_exhaustive]
    Failed {
        /// The lock.
        key: LockKey,
        /// The cause.
        source: tokio_postgres::Error,
    },
}

/// Why a transaction did not get a lock.
///
/// ```no_run
/// use dlock_postgres::{LockInError, PostgresLocks};
/// use tokio_postgres::Transaction;
///
/// async fn lock(tx: &Transaction<'_>, locks: &PostgresLocks) -> Result<bool, LockInError> {
///     match locks.lock_in(tx, "report").await {
///         Ok(_token) => Ok(true),
///         Err(LockInError::Busy { .. }) => Ok(false), // the transaction can go on, with other work
///         Err(error) => Err(error),
///     }
/// }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockInError {
    /// A lease or another transaction holds the lock. The transaction is unchanged.
    #[error("lock \"{key}\" is held by another client or transaction")]
    #[non_exhaustive]
    Busy {
        /// The lock.
        key: LockKey,
        /// The remaining lease of the holder; `None` if a transaction holds the lock.
        remaining: Option<Duration>,
    },
    /// The lock was used for the first time after the snapshot of the transaction, which cannot lock its row; or another
    /// transaction is creating the row, and did not end in time. The transaction is unchanged. Try again in a new
    /// transaction.
    #[error(
        "the transaction does not see the row of lock \"{key}\", which is newer: begin a new transaction"
    )]
    #[non_exhaustive]
    NotVisible {
        /// The lock.
        key: LockKey,
    },
    /// The row of the lock could not be created.
    #[error("the row of lock \"{key}\" could not be made")]
    #[non_exhaustive]
    NoRow {
        /// The lock.
        key: LockKey,
        /// The cause.
        source: StoreError,
    },
    /// A statement failed; the transaction cannot be committed.
    #[error("lock \"{key}\" could not be taken in the transaction: roll it back")]
    #[non_exhaustive]
    Failed {
        /// The lock.
        key: LockKey,
        /// The cause.
        source: tokio_postgres::Error,
    },
}

impl PostgresLocks {
    /// Holds a lock in a transaction of its holder, so that the transaction's writes and the lock commit together.
    ///
    /// While the transaction is open, no other client can acquire the lock, even if the lease expires, this process is
    /// paused, or a clock jumps. If another client has already acquired the lock, the call fails. So a transaction that
    /// makes this call as its first or its last statement, and commits, was exclusive from the call to its commit,
    /// independent of time. Renewals and the release are not blocked; the next holder acquires the lock after the end
    /// of the transaction. One round trip. For a [`MultiGuard`](dlock::MultiGuard) it holds all locks. For the guard of
    /// a read lock it blocks writers; other readers are not blocked.
    ///
    /// The table must be in the database of the transaction. After this call the lock is not handed off inside the
    /// process. A transaction that never ends keeps the lock forever: set `idle_in_transaction_session_timeout`; the
    /// view `dlock_locks_pins` shows the server processes that hold locks. After a rollback to a savepoint before this
    /// call, the transaction no longer holds the lock.
    ///
    /// # Errors
    ///
    /// [`HoldError::Lost`] when the caller no longer holds the lock; its guard then reports the loss.
    /// [`HoldError::NotVisible`] when the snapshot of the transaction is older than the acquire. [`HoldError::RowLocked`]
    /// when another transaction keeps the row of the lock locked. Otherwise [`HoldError::Failed`], for example with a
    /// serialization failure. The transaction must be rolled back.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe only in the sense that a dropped transaction is rolled back.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use dlock::LockClient;
    /// use dlock_postgres::PostgresLocks;
    ///
    /// async fn pay(
    ///     client: &LockClient, // made of `locks`
    ///     locks: &PostgresLocks,
    ///     db: &mut tokio_postgres::Client,
    /// ) -> Result<(), Box<dyn std::error::Error>> {
    ///     let guard = client.lock("account:1").acquire().await?;
    ///     let tx = db.transaction().await?;
    ///     locks.hold_in(&tx, &guard).await?; // an error here drops, and so rolls back, the transaction
    ///     tx.execute("UPDATE accounts SET balance = balance - 5 WHERE id = 1", &[]).await?;
    ///     tx.commit().await?;
    ///     guard.release().await?; // after the commit: the waiters are woken when they can go on
    ///     Ok(())
    /// }
    /// ```
    pub async fn hold_in(&self, tx: &Transaction<'_>, guard: &impl Bind) -> Result<(), HoldError> {
        let bound = guard.bind().map_err(|error| HoldError::Lost {
            key: match error {
                Error::Lost { key, .. } => key,
                _ => LockKey::from("unknown"),
            },
        })?;
        for grant in &bound {
            self.hold_one(tx, grant).await?;
        }
        Ok(())
    }

    async fn hold_one(&self, tx: &Transaction<'_>, bound: &BoundGrant) -> Result<(), HoldError> {
        let key = bound.key.clone();
        let refused = match self.hold_row(tx, bound).await {
            Ok(HeldRow::Held) => return Ok(()),
            Ok(HeldRow::Locked) => HoldError::RowLocked { key },
            Ok(HeldRow::OfAnother) => HoldError::NotVisible { key },
            Err(source) => {
                // Otherwise the row has changed since the snapshot.
                let is_conflict = source.code() == Some(&SqlState::T_R_SERIALIZATION_FAILURE);
                let failed = HoldError::Failed { key, source };
                if !is_conflict {
                    return Err(failed);
                }
                failed
            }
        };
        // The transaction may be older than the acquire, so the store is asked, which also tells the guard of a loss.
        match bound.confirm().await {
            Err(Error::Lost { key, .. }) => Err(HoldError::Lost { key }),
            _ => Err(refused),
        }
    }

    /// Holds the row in the transaction, trying for a while.
    async fn hold_row(
        &self,
        tx: &Transaction<'_>,
        bound: &BoundGrant,
    ) -> Result<HeldRow, tokio_postgres::Error> {
        let (name, holder) = (self.name(&bound.key), bound.grant.to_string());
        let table = &self.0.setup.table;
        let hold_in = match is_permit(bound.kind) {
            true => &table.hold_permit,
            false => &table.hold_in,
        };
        let mut pause = LOOKS.1;
        for _ in 0..LOOKS.0 {
            let values: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 2] =
                [(&&*name, Type::TEXT), (&holder, Type::TEXT)];
            let row = tx.query_typed_one(hold_in, &values).await?;
            if flag(&row, "held")? {
                return Ok(HeldRow::Held);
            }
            if !flag(&row, "there")? {
                return Ok(HeldRow::OfAnother);
            }
            // Another statement has locked the row briefly, but does not hold the lock.
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
        Ok(HeldRow::Locked)
    }

    /// Acquires a lock for a transaction until its end, and returns a fencing token: the transaction is the lock,
    /// without a lease or a clock. Meanwhile the lock is busy for clients with leases; if one of them holds it, this
    /// call fails. It never waits. Two round trips, and one more when the key is locked for the first time.
    ///
    /// The row of a new key is created on a connection of the store, not in the transaction, where it would block other
    /// clients until the end of the transaction. While a transaction holds the lock, other clients see a `remaining` of
    /// `None`, and try again, soon at first and later four times a second. After a rollback to a savepoint before this
    /// call, the transaction no longer holds the lock.
    ///
    /// # Errors
    ///
    /// [`LockInError::Busy`] when the lock is held, and [`LockInError::NotVisible`] when the transaction cannot see the
    /// row of a new key: the transaction is unchanged and can continue. After other errors it must be rolled back.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe only in the sense that a dropped transaction is rolled back.
    pub async fn lock_in(&self, tx: &Transaction<'_>, key: impl Into<LockKey>) -> Result<u64, LockInError> {
        let key = key.into();
        let usable = key.check().map_err(|error| {
            let refused = StoreError::not_done(Reason::Refused, error.to_string());
            refused.caused_by(error)
        });
        let name = match usable.and_then(|()| sendable(self.name(&key))) {
            Ok(name) => name,
            Err(source) => return Err(LockInError::NoRow { key, source }),
        };
        let failed = |source| LockInError::Failed {
            key: key.clone(),
            source,
        };
        for made in [false, true] {
            tx.batch_execute("SAVEPOINT dlock_lock_in")
                .await
                .map_err(failed)?;
            let rows = tx
                .query_typed(&self.0.setup.table.lock_in, &[(&&*name, Type::TEXT)])
                .await
                .map_err(failed)?;
            let found = rows.first().map(Found::of).transpose().map_err(failed)?;
            if let Some(Found {
                fence: Some(token), ..
            }) = found
            {
                tx.batch_execute("RELEASE SAVEPOINT dlock_lock_in")
                    .await
                    .map_err(failed)?;
                return Ok(token);
            }
            let undone = "ROLLBACK TO SAVEPOINT dlock_lock_in; RELEASE SAVEPOINT dlock_lock_in";
            tx.batch_execute(undone).await.map_err(failed)?;
            match found {
                Some(Found { there: false, .. }) if !made => self.make_row(&key).await?,
                Some(Found { there: false, .. }) => return Err(LockInError::NotVisible { key }),
                found => {
                    let remaining = found.and_then(|found| found.remaining);
                    return Err(LockInError::Busy { key, remaining });
                }
            }
        }
        Err(LockInError::Busy { key, remaining: None })
    }

    async fn make_row(&self, key: &LockKey) -> Result<(), LockInError> {
        let made = self.step(Ok(Step::Make(self.name(key)))).await;
        made.map(drop).map_err(|source| {
            let key = key.clone();
            match failure::waited_too_long(&source) {
                // Another transaction is creating the row.
                true => LockInError::NotVisible { key },
                false => LockInError::NoRow { key, source },
            }
        })
    }
}

/// What a transaction sees of the row of its holder's lock.
enum HeldRow {
    Held,
    /// Another transaction has it locked.
    Locked,
    /// It has another holder, or none, or is not there.
    OfAnother,
}

/// The result of `lock_in.sql`.
struct Found {
    fence: Option<u64>,
    there: bool,
    /// The remaining lease of the holder.
    remaining: Option<Duration>,
}

impl Found {
    fn of(row: &Row) -> Result<Found, tokio_postgres::Error> {
        let fence: Option<i64> = row.try_get("fence")?;
        let there = flag(row, "there")?;
        let remaining = match flag(row, "held")? {
            true => row.try_get::<_, Option<i64>>("remaining")?,
            false => None,
        };
        Ok(Found {
            fence: fence.map(i64::unsigned_abs),
            there,
            remaining: remaining.map(|micros| Duration::from_micros(micros.unsigned_abs())),
        })
    }
}

fn flag(row: &Row, name: &str) -> Result<bool, tokio_postgres::Error> {
    row.try_get(name)
}

/// Describes the transaction that has locked a row, as the start of a sentence.
pub(super) fn holder(pids: Option<&str>) -> String {
    match pids {
        Some(pids) => format!("an open transaction of the server's process {pids} holds"),
        None => "an open transaction holds".to_owned(),
    }
}

/// Says how to end the transaction.
fn remedy(pids: Option<&str>) -> String {
    match pids {
        Some(pids) => {
            let each = pids
                .split(", ")
                .map(|pid| format!("SELECT pg_terminate_backend({pid})"));
            format!("end it by {}", each.collect::<Vec<_>>().join(" and "))
        }
        None => "find it in pg_stat_activity or pg_prepared_xacts, and end it".to_owned(),
    }
}

/// The error for a lock that a transaction holds; names the server process if it is known.
pub(super) fn pinned(key: &str, pids: Option<&str>) -> StoreError {
    let (by, remedy) = (holder(pids), remedy(pids));
    let message = format!("{by} lock \"{key}\": wait for its end, or {remedy}");
    StoreError::not_done(Reason::RefusedForNow, message)
}
