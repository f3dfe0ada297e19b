//! A minimal but complete store: plain locks on a toy database, to copy and adapt.
//!
//! It follows every rule of [`dlock::store`] for the one kind that it supports, and refuses all others. The page
//! [docs/stores.md](https://github.com/dlock-rs/dlock/blob/main/docs/stores.md) says what changes for a database behind
//! a network. `contract.rs` is all that is needed to test the store.
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
    AcquireReply, AcquireRequest, Capabilities, GrantId, Granted, Holder, Hub, Kind, Notifications,
    OpenRequest, Reason, ReleaseReply, ReleaseRequest, RenewRequest, Renewal, Scheme, Store, StoreError,
    StoreFuture, Watch,
};

/// The toy database, which stands for your own. Clones are the same database.
///
/// ```
/// use dlock_store_template::{Database, ToyStore};
///
/// let database = Database::default();
/// let (a, b) = (ToyStore::new(&database), ToyStore::new(&database)); // of two processes
/// # let _ = (a, b);
/// ```
#[derive(Debug, Clone, Default)]
pub struct Database {
    tables: Arc<Mutex<Tables>>,
    /// The waiters of this process, by lock. A remote server would notify them over a connection.
    waiters: Arc<Hub>,
}

#[derive(Debug, Default)]
struct Tables {
    /// One row for each lock that is held, or was held until its lease expired; by its name, which begins with the prefix.
    locks: HashMap<String, Row>,
    /// Not in the rows, which are deleted: a token must be greater than all earlier ones, including those of released
    /// locks. One counter for all keys is the simplest way.
    last_token: u64,
}

#[derive(Debug, Clone, Copy)]
struct Row {
    /// Not the client: a client may ask twice, and each of its grants ends on its own.
    grant: GrantId,
    /// By the database's clock: the clocks of clients differ.
    until: Instant,
    /// The lock was released, but its `min_hold` keeps it unavailable for a while.
    released: bool,
}

impl Database {
    /// Runs an atomic operation, with the time at which it happens.
    fn transaction<T>(&self, step: impl FnOnce(&mut Tables, Instant) -> T) -> T {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        step(&mut tables, Instant::now())
    }

    /// Wakes the waiters for a lock that may be available.
    fn notify(&self, name: &str) {
        self.waiters.tell(name);
    }
}

impl Tables {
    /// Returns the row of a lock with a running lease. A row whose lease has expired counts as deleted from that moment
    /// on, even before its deletion.
    fn live(&mut self, name: &str, now: Instant) -> Option<&mut Row> {
        self.locks.get_mut(name).filter(|row| row.until > now)
    }

    /// Returns the row if it belongs to this grant: a client changes only its own grants.
    fn own(&mut self, name: &str, grant: GrantId, now: Instant) -> Option<&mut Row> {
        self.live(name, now).filter(|row| row.grant == grant)
    }
}

/// Locks on a [`Database`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::LockClient;
/// use dlock_store_template::{Database, ToyStore};
///
/// let database = Database::default();
/// let a = LockClient::builder().store(ToyStore::new(&database)).build().await?;
/// let b = LockClient::builder().store(ToyStore::new(&database)).build().await?;
/// let guard = a.lock("report").acquire().await?;
/// assert!(b.lock("report").try_acquire().await.unwrap_err().is_busy());
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct ToyStore {
    database: Database,
    /// What all names of this client's locks begin with. Services with different prefixes do not share locks.
    prefix: String,
}

impl ToyStore {
    /// Connects to the database; each process has one connection.
    #[must_use]
    pub fn new(database: &Database) -> ToyStore {
        ToyStore {
            database: database.clone(),
            prefix: String::new(),
        }
    }

    /// Sets the prefix of every key; none by default.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> ToyStore {
        self.prefix = prefix.into();
        self
    }

    /// The name of a lock on the database: no request has the prefix in its key.
    fn name(&self, key: &LockKey) -> String {
        format!("{}{key}", self.prefix)
    }
}

/// Returns the scheme of `toy://` URLs, for [`LockClientBuilder::scheme`](dlock::LockClientBuilder::scheme). A store
/// behind a network connects here, reads its options with [`OpenRequest::take`], and limits its operations to
/// [`OpenRequest::timeout`].
#[must_use]
pub fn scheme(database: &Database) -> Scheme {
    let database = database.clone();
    Scheme::new(["toy"], move |request: OpenRequest| {
        // An unknown parameter is an error of the user.
        let opened = request.finish();
        let opened = opened.map(|()| ToyStore::new(&database).prefix(request.prefix));
        ready(opened.map(|store| Arc::new(store) as Arc<dyn Store>))
    })
}

/// Each method runs its operation in the call, and returns a future that is ready. A store behind a network queues the
/// operation in the call (into a channel to the task that owns the connection), and returns a future for the reply: an
/// operation whose future is dropped before the first poll must still precede the caller's next operation.
impl Store for ToyStore {
    /// The client refuses all other requests without asking the store.
    fn capabilities(&self) -> Capabilities {
        Capabilities::new([Kind::Mutex])
            .name("the toy store")
            .token_blocks(true)
            .min_hold(true)
            .notifications(Notifications::Certain)
            .inspection(true)
    }

    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        // For direct calls of the store; a client checks the capabilities first.
        if request.kind != Kind::Mutex {
            let message = format!("this store has no locks of kind {}", request.kind);
            return Box::pin(ready(Err(StoreError::not_done(Reason::Unsupported, message))));
        }
        let name = self.name(&request.key);
        let reply = self.database.transaction(|tables, now| {
            if let Some(row) = tables.live(&name, now) {
                // A waiter sleeps at most this long, because an expired lease sends no notification.
                return AcquireReply::busy(Some(row.until - now));
            }
            let row = Row {
                grant: request.grant,
                until: now + request.lease,
                released: false,
            };
            tables.locks.insert(name, row);
            // A client that hands the lock off to its own waiters requests several tokens at once.
            let first_token = tables.last_token + 1;
            tables.last_token += u64::from(request.tokens.max(1));
            AcquireReply::Acquired(Granted::with_tokens(first_token, tables.last_token))
        });
        Box::pin(ready(Ok(reply)))
    }

    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        let name = self.name(&request.key);
        let released = self.database.transaction(|tables, now| {
            let Some(row) = tables.own(&name, request.grant, now) else {
                return false;
            };
            if request.keep_for.is_zero() {
                tables.locks.remove(&name);
            } else {
                row.until = row.until.min(now + request.keep_for);
                row.released = true;
            }
            true
        });
        if !released {
            // Not an error: the lease had expired, or an acquire of unknown outcome was not carried out. It never will
            // be, because each operation runs in its call.
            return Box::pin(ready(Ok(ReleaseReply::NotHeld { repeated: false })));
        }
        self.database.notify(&name);
        Box::pin(ready(Ok(ReleaseReply::Released { receivers: None })))
    }

    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        let replies = self.database.transaction(|tables, now| {
            let renew =
                |request: &RenewRequest| match tables.own(&self.name(&request.key), request.grant, now) {
                    // A released lock is not held: its time must not be extended.
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
        let name = self.name(&key);
        let holder =
            (self.database).transaction(|tables, now| tables.live(&name, now).map(|row| row.holder(now)));
        Box::pin(ready(Ok(holder.into_iter().collect())))
    }

    fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
        let held = self.database.transaction(|tables, now| {
            let live = tables.locks.iter().filter(|(_, row)| row.until > now);
            // The prefix of the caller is one of keys, behind that of the client.
            let keys = live.filter_map(|(name, row)| Some((name.strip_prefix(&self.prefix)?, row)));
            let named = keys.filter(|(key, _)| key.starts_with(&prefix));
            named
                .map(|(key, row)| (LockKey::raw(key), row.holder(now)))
                .collect()
        });
        Box::pin(ready(Ok(held)))
    }

    fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool> {
        let name = self.name(&key);
        let was_held = self.database.transaction(|tables, now| {
            let was_held = tables.live(&name, now).is_some();
            tables.locks.remove(&name);
            was_held
        });
        self.database.notify(&name);
        Box::pin(ready(Ok(was_held)))
    }

    fn watch(self: Arc<Self>, _kind: Kind, key: &LockKey, _grant: GrantId) -> Watch {
        // `true` means "subscribed, ask now": later releases are certain to notify the waiter. A store that still waits
        // for its server returns `false`, and calls `Hub::confirm` when the server has replied. Otherwise a waiter
        // could sleep although the lock is available.
        let subscribe = |_name: &Arc<str>| true;
        let unsubscribe = |_name| {};
        (self.database.waiters).listen(self.name(key).into(), subscribe, unsubscribe)
    }
}

impl Row {
    fn holder(&self, now: Instant) -> Holder {
        let remaining: Duration = self.until.saturating_duration_since(now);
        Holder::new(
            Kind::Mutex,
            self.grant.to_string(),
            u64::from(!self.released),
            Some(remaining),
        )
    }
}
