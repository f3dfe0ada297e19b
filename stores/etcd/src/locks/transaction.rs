//! Fencing tokens in the user's own transactions: the server compares them.

use std::collections::BTreeSet;

use dlock::store::{Bind, BoundGrant, Outcome, StoreError};
use dlock::{Error, LockKey};
use tokio::time::Instant;

use super::EtcdLocks;
use super::acquire::TOKEN_BITS;
use crate::client::proto::{Compare, Request, RequestOp, TxnRequest};
use crate::client::{Failure, Refusal};

/// The condition that a lock is held: this revision created the key of the grant.
///
/// It can be used in a transaction of any etcd client, in any language. [`FencedTransaction`] sends the same condition.
///
/// ```no_run
/// # async fn example(locks: dlock_etcd::EtcdLocks, guard: dlock::LockGuard) -> Result<(), Box<dyn std::error::Error>> {
/// for proof in locks.proofs(&guard)? {
///     // With the crate etcd-client: Compare::create_revision(proof.key, CompareOp::Equal, proof.create_revision)
///     println!("create_revision({}) = {}", proof.key.escape_ascii(), proof.create_revision);
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Proof {
    /// The key of the grant in etcd.
    pub key: Vec<u8>,
    /// The revision that created the key: the fencing token without its last 16 bits.
    pub create_revision: i64,
}

/// A transaction on etcd that does nothing unless its locks are held; see [`EtcdLocks::transaction`].
///
/// ```no_run
/// use dlock::LockGuard;
/// use dlock_etcd::{EtcdLocks, TransactionError};
///
/// /// Whether this attempt did the work. When another process took the lock over, that is no failure.
/// async fn publish(locks: &EtcdLocks, guard: &LockGuard) -> Result<bool, TransactionError> {
///     match locks.transaction(guard)?.put("config/version", "7").commit().await {
///         Ok(_committed) => Ok(true),
///         Err(TransactionError::Lost { .. }) => Ok(false),
///         Err(error) => Err(error),
///     }
/// }
/// ```
#[must_use = "a transaction does nothing until it is committed"]
#[derive(Debug)]
pub struct FencedTransaction {
    locks: EtcdLocks,
    bound: Vec<BoundGrant>,
    conditions: Vec<Compare>,
    steps: Vec<RequestOp>,
}

/// The result of a committed [`FencedTransaction`].
///
/// ```no_run
/// # async fn example(locks: dlock_etcd::EtcdLocks, guard: dlock::LockGuard) -> Result<(), dlock_etcd::TransactionError> {
/// let committed = locks.transaction(&guard)?.put("config/version", "7").commit().await?;
/// println!("written at revision {}", committed.revision);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Committed {
    /// The revision at which the transaction took effect.
    pub revision: i64,
}

/// Why a transaction was not committed.
///
/// ```
/// use dlock_etcd::TransactionError;
///
/// /// Whether to try again under a new lock.
/// fn is_lost(error: &TransactionError) -> bool {
///     matches!(error, TransactionError::Lost { .. })
/// }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransactionError {
    /// The caller no longer holds a lock: nothing was done.
    #[error("lock \"{key}\" was lost, and the transaction did nothing")]
    #[non_exhaustive]
    Lost {
        /// The lock.
        key: LockKey,
    },
    /// A [condition](FencedTransaction::when_unchanged) of the caller does not hold: nothing was done.
    #[error("a condition of the transaction does not hold, and it did nothing")]
    Condition,
    /// The server refused the transaction, or could not be reached: nothing was done.
    #[error("the transaction was not carried out")]
    Failed(#[source] StoreError),
    /// The reply was lost: the transaction was carried out completely, not at all, or may still be carried out.
    #[error("the outcome of the transaction is unknown")]
    Unknown(#[source] StoreError),
}

impl EtcdLocks {
    /// Returns the conditions that the locks of this guard are held, for a transaction of any etcd client. The guard
    /// must belong to a client of this store. After this call these locks are not handed off inside the process.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when one of the locks is lost or released.
    pub fn proofs(&self, guard: &impl Bind) -> Result<Vec<Proof>, Error> {
        guard.bind()?.iter().map(|bound| self.proof(bound)).collect()
    }

    fn proof(&self, bound: &BoundGrant) -> Result<Proof, Error> {
        let name = self
            .0
            .names
            .lock(&bound.key)
            .map_err(StoreError::into_connect_error)?;
        // The key of a removed reader is unknown; the key without its session never exists.
        let key = match self.0.grants.get(bound.grant) {
            Some(grant) => grant.key,
            None => self.0.names.exclusive(&name, bound.kind),
        };
        Ok(Proof {
            key,
            create_revision: i64::try_from(bound.token >> TOKEN_BITS).unwrap_or(i64::MAX),
        })
    }

    /// Starts a transaction that the server carries out only if the locks of this guard are held at that moment,
    /// independent of clocks and paused processes: it compares their tokens. After this call these locks are not handed
    /// off inside the process.
    ///
    /// # Errors
    ///
    /// [`TransactionError::Lost`] when one of the locks is lost or released.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: dlock::LockClient, locks: dlock_etcd::EtcdLocks) -> Result<(), Box<dyn std::error::Error>> {
    /// let guard = client.lock("config").acquire().await?; // a client of `locks`
    /// locks.transaction(&guard)?.put("config/version", "7").delete("config/draft").commit().await?;
    /// guard.release().await?;
    /// # Ok(()) }
    /// ```
    pub fn transaction(&self, guard: &impl Bind) -> Result<FencedTransaction, TransactionError> {
        let lost = |error| match error {
            Error::Lost { key, .. } => TransactionError::Lost { key },
            other => TransactionError::Failed(StoreError::not_done(
                dlock::store::Reason::Refused,
                other.to_string(),
            )),
        };
        let bound = guard.bind().map_err(lost)?;
        let conditions = bound.iter().map(|grant| {
            let Proof { key, create_revision } = self.proof(grant).map_err(lost)?;
            Ok(Compare::created(&key, create_revision))
        });
        Ok(FencedTransaction {
            locks: self.clone(),
            conditions: conditions.collect::<Result<_, TransactionError>>()?,
            bound,
            steps: Vec::new(),
        })
    }
}

impl FencedTransaction {
    /// Writes a key.
    pub fn put(mut self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Self {
        self.steps.push(RequestOp::put(key.into(), value.into(), 0));
        self
    }

    /// Deletes a key, if it exists.
    pub fn delete(mut self, key: impl Into<Vec<u8>>) -> Self {
        self.steps.push(RequestOp::delete(key.into()));
        self
    }

    /// Adds a condition: this revision changed the key last; 0 means that the key does not exist.
    pub fn when_unchanged(mut self, key: impl AsRef<[u8]>, mod_revision: i64) -> Self {
        self.conditions.push(Compare::changed(key.as_ref(), mod_revision));
        self
    }

    /// Returns the caller's keys, for messages.
    fn keys(&self) -> String {
        let conditions = self.conditions[self.bound.len()..].iter().map(|one| &one.key);
        let steps = self.steps.iter().filter_map(|step| match &step.request {
            Some(Request::Put(put)) => Some(&put.key),
            Some(Request::Delete(delete)) => Some(&delete.key),
            _ => None,
        });
        let keys: BTreeSet<_> = conditions.chain(steps).collect();
        let quoted: Vec<_> = keys
            .iter()
            .map(|key| format!("\"{}\"", key.escape_ascii()))
            .collect();
        quoted.join(", ")
    }

    /// Commits the transaction atomically. It may have up to 128 conditions and operations.
    ///
    /// # Errors
    ///
    /// [`TransactionError::Lost`] and [`TransactionError::Condition`] when nothing was done, the guard of a lost lock
    /// reports the loss; otherwise a failure of the store.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: if the future is dropped, the transaction may or may not be carried out, unless the locks are
    /// lost.
    pub async fn commit(self) -> Result<Committed, TransactionError> {
        let links = &self.locks.0.links;
        let keys = self.keys();
        let range = |compare: &Compare| RequestOp::range(compare.key.clone(), Vec::new(), 1);
        let txn = TxnRequest {
            failure: self.conditions[..self.bound.len()].iter().map(range).collect(),
            compare: self.conditions.clone(),
            success: self.steps,
        };
        let deadline = Instant::now() + links.config.timeout;
        let reply = links.call(txn, deadline).await.map_err(|failure: Failure| {
            let is_denied = failure.is(Refusal::Denied);
            let mut error = failure.error();
            if is_denied && !keys.is_empty() {
                error.message += &format!(", and rights on the keys of this transaction: {keys}");
            }
            match error.outcome {
                Outcome::NotDone => TransactionError::Failed(error),
                Outcome::Unknown => TransactionError::Unknown(error),
            }
        })?;
        if reply.succeeded {
            let revision = reply.revision();
            return Ok(Committed { revision });
        }
        for (at, bound) in self.bound.iter().enumerate() {
            let created = reply
                .found(at)
                .first()
                .map(|found| found.create_revision.unsigned_abs());
            if created != Some(bound.token >> TOKEN_BITS) {
                self.locks.0.grants.needs_look(bound.grant);
                // Tells the guard.
                let _ = bound.confirm().await;
                return Err(TransactionError::Lost {
                    key: bound.key.clone(),
                });
            }
        }
        Err(TransactionError::Condition)
    }
}
