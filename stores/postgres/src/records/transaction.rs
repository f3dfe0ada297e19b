//! Completion in the owner's own transaction: effect and record commit together.

use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::Transaction;
use tokio_postgres::types::Type;

use super::lane::Setup;
use crate::micros::micros;
use dlock::record::{ClaimToken, RecordKey};

/// A claim for a transaction of its owner; see [`PostgresRecords::owned`](super::PostgresRecords::owned).
///
/// The transaction's writes and the result of the claim are committed together, or not at all: whatever fails in
/// between, the work is done once. The table must be in the database of the transaction.
///
/// ```no_run
/// use dlock_postgres::{CompleteError, PostgresClaim};
///
/// async fn charge(
///     client: &mut tokio_postgres::Client,
///     claim: &PostgresClaim,
/// ) -> Result<(), Box<dyn std::error::Error>> {
///     let tx = client.transaction().await?;
///     tx.execute("UPDATE accounts SET balance = balance - 5 WHERE id = 1", &[]).await?;
///     claim.complete_in(&tx, b"charged").await?; // an error here drops, and so rolls back, the transaction
///     tx.commit().await?;
///     Ok(())
/// }
/// ```
#[derive(Debug, Clone)]
#[must_use = "it completes nothing until complete_in is called"]
pub struct PostgresClaim {
    pub(super) setup: Arc<Setup>,
    pub(super) key: RecordKey,
    pub(super) token: ClaimToken,
    pub(super) retention: Duration,
}

/// Why a claim could not be completed in a transaction. The transaction must be rolled back, which dropping it does.
///
/// ```no_run
/// use dlock_postgres::{CompleteError, PostgresClaim};
/// use tokio_postgres::Transaction;
///
/// /// Whether this attempt did the work. When another one took over, that is no failure.
/// async fn commit(tx: Transaction<'_>, claim: &PostgresClaim) -> Result<bool, Box<dyn std::error::Error>> {
///     match claim.complete_in(&tx, b"charged").await {
///         Ok(()) => tx.commit().await?,
///         Err(CompleteError::ClaimLost { .. }) => {
///             tx.rollback().await?;
///             return Ok(false);
///         }
///         Err(error) => return Err(error.into()), // dropping the transaction rolls it back
///     }
///     Ok(true)
/// }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompleteError {
    /// The caller no longer owns the claim: it was released, taken over, or completed with another result.
    #[error(
        "the claim of record \"{}\" was lost, or has another result: roll the transaction back",
        key.as_str()
    )]
    #[non_exhaustive]
    ClaimLost {
        /// The record.
        key: RecordKey,
    },
    /// The result of work that is done once cannot be kept: it is larger than 1 MiB, or cannot be serialized as JSON.
    /// Nothing was changed.
    #[error("the result of record \"{}\" cannot be kept, {why}: roll the transaction back", key.as_str())]
    #[non_exhaustive]
    NotKept {
        /// The record.
        key: RecordKey,
        /// The reason.
        why: String,
    },
    /// The statement failed; the transaction cannot be committed.
    #[error("the result of record \"{}\" could not be stored: roll the transaction back", key.as_str())]
    #[non_exhaustive]
    Failed {
        /// The record.
        key: RecordKey,
        /// The cause.
        source: tokio_postgres::Error,
    },
}

impl CompleteError {
    /// Whether the claim was lost.
    #[must_use]
    pub fn is_claim_lost(&self) -> bool {
        matches!(self, CompleteError::ClaimLost { .. })
    }
}

#[cfg(feature = "once")]
impl super::PostgresRecords {
    /// Stores the result of work that is [done once](dlock::Once) in the transaction that contains its effects, as the
    /// last statement before the commit. So the effects exist once, whenever a process crashes. One round trip.
    ///
    /// The work returns the same result after the commit. If the commit fails or its reply is lost, the work returns an
    /// error: the next call finds the outcome of the transaction, and either returns the result or does the work again.
    ///
    /// ```no_run
    /// use dlock::{OnceError, OnceReply, record::Records};
    /// use dlock_postgres::PostgresRecords;
    /// use std::error::Error;
    ///
    /// async fn pay(
    ///     store: &PostgresRecords,
    ///     db: &mut tokio_postgres::Client,
    ///     order: u64,
    /// ) -> Result<OnceReply<u64>, OnceError<Box<dyn Error>>> {
    ///     let work = Records::new(store.clone()).once(format!("pay:{order}"));
    ///     work.run(async |claim| {
    ///         let tx = db.transaction().await?;
    ///         tx.execute("UPDATE accounts SET balance = balance - 5 WHERE id = 1", &[]).await?;
    ///         store.complete_once_in(&tx, &claim, &order).await?; // an error here drops, and so rolls back, the transaction
    ///         tx.commit().await?;
    ///         Ok(order)
    ///     })
    ///     .await
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`PostgresClaim::complete_in`], and [`CompleteError::NotKept`]. Under `REPEATABLE READ` and
    /// `SERIALIZABLE`, make [`hold_in`](PostgresClaim::hold_in) the first statement, on the claim that
    /// [`owned`](Self::owned) returns for [`OnceClaim::record_key`](dlock::OnceClaim::record_key) and
    /// [`token`](dlock::OnceClaim::token).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe only in the sense that a dropped transaction is rolled back.
    pub async fn complete_once_in<T: serde::Serialize>(
        &self,
        tx: &Transaction<'_>,
        claim: &dlock::OnceClaim,
        result: &T,
    ) -> Result<(), CompleteError> {
        let key = claim.record_key();
        let stored = dlock::OnceClaim::stored_form(result).map_err(|why| CompleteError::NotKept {
            key: key.clone(),
            why,
        })?;
        let owned = self.owned(key, claim.token(), claim.keep());
        owned.complete_in(tx, &stored).await
    }
}

impl PostgresClaim {
    /// Stores the result in the transaction, as the last statement before its commit. One round trip.
    ///
    /// From this call to the end of the transaction the claim cannot be taken over.
    /// Storing the same result twice is allowed.
    ///
    /// # Errors
    ///
    /// [`CompleteError::ClaimLost`] when no row was changed: another attempt may be doing the work, so the transaction
    /// must be rolled back. Otherwise [`CompleteError::Failed`], for example with a serialization failure; see
    /// [`hold_in`](Self::hold_in).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe only in the sense that a dropped transaction is rolled back.
    pub async fn complete_in(&self, tx: &Transaction<'_>, response: &[u8]) -> Result<(), CompleteError> {
        let (key, token, retention) = (self.key.as_str(), self.token.as_str(), micros(self.retention));
        let changed = tx
            .execute_typed(
                &self.setup.table.complete_in,
                &[
                    (&key, Type::TEXT),
                    (&token, Type::TEXT),
                    (&response, Type::BYTEA),
                    (&retention, Type::INT8),
                ],
            )
            .await;
        self.one_row(changed)
    }

    /// Locks the record for this transaction, as its first statement, so that the claim cannot be lost during the work.
    /// Optional, except under `REPEATABLE READ` and `SERIALIZABLE`: there [`complete_in`](Self::complete_in) fails with
    /// a serialization failure if the claim was extended after the transaction's first statement; this call prevents
    /// extensions from changing the row.
    ///
    /// # Errors
    ///
    /// Those of [`complete_in`](Self::complete_in).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe only in the sense that a dropped transaction is rolled back.
    pub async fn hold_in(&self, tx: &Transaction<'_>) -> Result<(), CompleteError> {
        let (key, token) = (self.key.as_str(), self.token.as_str());
        let locked = tx
            .execute_typed(
                &self.setup.table.hold_in,
                &[(&key, Type::TEXT), (&token, Type::TEXT)],
            )
            .await;
        self.one_row(locked)
    }

    fn one_row(&self, rows: Result<u64, tokio_postgres::Error>) -> Result<(), CompleteError> {
        let key = self.key.clone();
        match rows {
            Ok(0) => Err(CompleteError::ClaimLost { key }),
            Ok(_) => Ok(()),
            Err(source) => Err(CompleteError::Failed { key, source }),
        }
    }

    /// Returns the key of the record.
    #[must_use]
    pub fn key(&self) -> &RecordKey {
        &self.key
    }

    /// Returns the token of the claim.
    #[must_use]
    pub fn token(&self) -> &ClaimToken {
        &self.token
    }
}
