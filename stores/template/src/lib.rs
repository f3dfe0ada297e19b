//! The smallest honest store: plain locks on a toy database, to copy and to change.
//!
//! It keeps every rule of [`dlock::store`] for the one kind that it has, and refuses all others. The page
//! [docs/stores.md](https://github.com/dlock-rs/dlock/blob/main/docs/stores.md) says what changes where the database is
//! behind a network. `contract.rs` is all that it takes to test it.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
//! use dlock::LockClient;
//! use dlock_store_template::{Database, ToyStore};
//!
//! let database = Database::default();
//! let client = LockClient::builder().store(ToyStore::new(&database)).build().await?;
//! let guard = client.lock("report").acquire().await?;
//! guard.release().await?;
//! # Ok(()) }
//! ```

#[cfg(test)]
mod contract;

use std::collections::HashMap;
use std::future::ready;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dlock::LockKey;
use dlock::store::{
    AcquireReply, AcquireRequest, GrantId, Holder, Kind, Reason, ReleaseReply, ReleaseRequest, RenewRequest,
    Renewal, Store, StoreError, StoreFuture, Watch,
};
use tokio::sync::watch;

/// The toy database: what you have already. Clones are the same database.
#[derive(Debug, Clone, Default)]
pub struct Database {
    tables: Arc<Mutex<Tables>>,
    /// Counts the transactions that may have made a lock free.
    changes: Arc<watch::Sender<u64>>,
}

#[derive(Debug, Default)]
struct Tables {
    /// One row for each lock that is held, or was until its lease ran out.
    locks: HashMap<LockKey, Row>,
    /// Not in the rows, which are deleted: a token must be greater than all before it, also those of locks that nobody
    /// holds any more. One number for all keys is the simplest that is.
    last_token: u64,
}

#[derive(Debug, Clone, Copy)]
struct Row {
    /// Never only the client: the same client may ask twice, and each of its grants ends by itself.
    grant: GrantId,
    /// By the database's clock, never by the clients': theirs differ.
    until: Instant,
    /// It was given back, and its `min_hold` keeps the key for a while.
    released: bool,
}

impl Database {
    /// One atomic step, with the time at which it happens.
    fn transaction<T>(&self, step: impl FnOnce(&mut Tables, Instant) -> T) -> T {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        step(&mut tables, Instant::now())
    }

    /// A lock may be free: everybody looks. A store with more than a few waiters tells those of the key only.
    fn notify(&self) {
        self.changes.send_modify(|count| *count += 1);
    }
}

impl Tables {
    /// The row of a lock whose lease runs. One that is over counts as deleted from that moment on, whether or not
    /// anybody has come to delete it.
    fn live(&mut self, key: &LockKey, now: Instant) -> Option<&mut Row> {
        self.locks.get_mut(key).filter(|row| row.until > now)
    }

    /// The same if it is this grant's: whatever a client does to a lock, it does to its own grant only.
    fn own(&mut self, key: &LockKey, grant: GrantId, now: Instant) -> Option<&mut Row> {
        self.live(key, now).filter(|row| row.grant == grant)
    }
}

/// Locks on a [`Database`].
#[derive(Debug, Clone)]
pub struct ToyStore {
    database: Database,
}

impl ToyStore {
    /// A connection to the database, as each process has one.
    #[must_use]
    pub fn new(database: &Database) -> ToyStore {
        ToyStore {
            database: database.clone(),
        }
    }
}

/// Each verb takes its step in the call and returns a future that is ready. A store behind a network queues the step in
/// the call (into a channel to the task that owns the connection) and returns a future of the reply: what a caller drops
/// before the first poll must still be in line before what it calls next.
impl Store for ToyStore {
    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        // Said at once, and nothing is done.
        if request.kind != Kind::Lock {
            let message = format!("this store has no locks of kind {}", request.kind);
            return Box::pin(ready(Err(StoreError::not_done(Reason::Unsupported, message))));
        }
        let reply = self.database.transaction(|tables, now| {
            if let Some(row) = tables.live(&request.key, now) {
                // A waiter sleeps that long at most, since a lease that runs out notifies nobody.
                return AcquireReply::Busy {
                    remaining: Some(row.until - now),
                    again: None,
                    listeners: None,
                };
            }
            let row = Row {
                grant: request.grant,
                until: now + request.lease,
                released: false,
            };
            tables.locks.insert(request.key.clone(), row);
            // A client that serves several of its own waiters asks for as many tokens in one step.
            let first_token = tables.last_token + 1;
            tables.last_token += u64::from(request.tokens.max(1));
            AcquireReply::Acquired {
                first_token,
                last_token: tables.last_token,
            }
        });
        Box::pin(ready(Ok(reply)))
    }

    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        let released = self.database.transaction(|tables, now| {
            let Some(row) = tables.own(&request.key, request.grant, now) else {
                return false;
            };
            if request.keep_for.is_zero() {
                tables.locks.remove(&request.key);
            } else {
                row.until = row.until.min(now + request.keep_for);
                row.released = true;
            }
            true
        });
        if !released {
            // Not an error: the lease was over, or an acquire that nobody knows the outcome of was not carried out. It
            // never will be, since each step was taken when it was called.
            return Box::pin(ready(Ok(ReleaseReply::NotHeld { repeated: false })));
        }
        self.database.notify();
        Box::pin(ready(Ok(ReleaseReply::Released { heard: None })))
    }

    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        let replies = self.database.transaction(|tables, now| {
            let renew = |request: &RenewRequest| match tables.own(&request.key, request.grant, now) {
                // What was given back is not held: its time is not to be prolonged.
                Some(row) if !row.released => {
                    row.until = now + request.lease;
                    Ok(Renewal::Renewed)
                }
                _ => Ok(Renewal::Gone),
            };
            requests.iter().map(renew).collect()
        });
        Box::pin(ready(Ok(replies)))
    }

    fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
        let holder =
            (self.database).transaction(|tables, now| tables.live(&key, now).map(|row| row.holder(now)));
        Box::pin(ready(Ok(holder.into_iter().collect())))
    }

    fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
        let held = self.database.transaction(|tables, now| {
            let live = tables.locks.iter().filter(|(_, row)| row.until > now);
            let named = live.filter(|(key, _)| key.as_str().starts_with(&prefix));
            named.map(|(key, row)| (key.clone(), row.holder(now))).collect()
        });
        Box::pin(ready(Ok(held)))
    }

    fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool> {
        let was_held = self.database.transaction(|tables, now| {
            let was_held = tables.live(&key, now).is_some();
            tables.locks.remove(&key);
            was_held
        });
        self.database.notify();
        Box::pin(ready(Ok(was_held)))
    }

    fn watch(self: Arc<Self>, _kind: Kind, _key: &LockKey, _grant: GrantId) -> Watch {
        let mut changes = self.database.changes.subscribe();
        // "You are subscribed, look now": said when a later release is certain to be heard, and not before. Between the
        // two a waiter would sleep on a lock that is free.
        changes.mark_changed();
        Watch::new(changes, || ())
    }
}

impl Row {
    fn holder(&self, now: Instant) -> Holder {
        let remaining: Duration = self.until.saturating_duration_since(now);
        Holder::new(
            Kind::Lock,
            self.grant.to_string(),
            u64::from(!self.released),
            Some(remaining),
        )
    }
}
