//! For the tests of code that uses locks: an in-memory store on which rare failures happen on demand.
//!
//! ```
//! use dlock::testing::{Fault, Step, TestStore};
//! use dlock::{Error, Loss};
//! use std::time::Duration;
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
//! let store = TestStore::new();
//! let client = store.client();
//!
//! // Another client has the lock.
//! let busy = store.busy("report");
//! assert!(client.lock("report").try_acquire().await.is_err_and(|error| error.is_busy()));
//! drop(busy);
//!
//! // The lock is lost while it is held.
//! let guard = client.lock("report").acquire().await?;
//! store.lose("report");
//! assert!(!guard.is_held());
//! assert_eq!(guard.lost().await, Loss::Gone);
//!
//! // A reply is lost: the lock was taken, but the client does not know.
//! store.fail_next(Step::Acquire, Fault::AnswerLost);
//! let answer = client.lock("bill").try_acquire().await;
//! assert!(matches!(answer, Err(Error::OutcomeUnknown { .. })));
//! # Ok(()) }
//! ```
//!
//! A client of it has the locks of all kinds, semaphores, latches, and work that is done once. It publishes nothing about
//! itself ([`LockClientBuilder::presence`](crate::LockClientBuilder::presence) fails); [`LockClient::memory`] has that.
//!
//! Everything uses tokio's clock. Under `#[tokio::test(start_paused = true)]`, which needs tokio's feature `test-util`
//! (`cargo add --dev tokio --features test-util`), leases, waits and renewals of an hour take no time: move the clock
//! with `tokio::time::sleep`, not with `advance`, which jumps over the renewals in between.

mod scripted;

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::Mutex;
use uuid::Uuid;

use crate::base::moment::{LONGEST_LEASE, Moment};
use crate::runtime::client::Shared;
use crate::runtime::grants::Grant;
use crate::store::{AcquireReply, AcquireRequest, GrantId, Kind, Reason, ReleaseRequest, Store, StoreError};
use crate::stores::memory::MemoryStore;
use crate::{LockClient, LockClientBuilder, LockKey, LockKind, Loss};

use self::scripted::Scripted;

/// How often [`TestStore::busy`] takes the lock from a waiter that was faster.
const TRIES: u32 = 1000;

/// An in-memory store that can be made to fail. Clones share the store.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let store = dlock::testing::TestStore::new();
/// let (one, other) = (store.client(), store.client()); // two processes
///
/// let guard = one.lock("report").acquire().await?;
/// assert!(other.lock("report").try_acquire().await.is_err_and(|error| error.is_busy()));
/// store.lose("report");
/// assert!(!guard.is_held());
/// # Ok(()) }
/// ```
#[derive(Clone, Default)]
pub struct TestStore {
    memory: MemoryStore,
    script: Arc<Mutex<Script>>,
    clients: Arc<Mutex<Vec<Weak<Shared>>>>,
}

#[derive(Debug, Default)]
struct Script {
    next: Vec<(Step, VecDeque<Fault>)>,
    down: bool,
    /// The topics of waiters to be notified once the store is no longer down.
    untold: Vec<Arc<str>>,
}

/// The operation that a fault applies to.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::testing::{Fault, Step, TestStore};
///
/// let store = TestStore::new();
/// store.fail_next(Step::Acquire, Fault::Refused);
/// let error = store.client().lock("report").acquire().await.unwrap_err();
/// assert!(matches!(error, dlock::Error::Refused { .. }));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// An acquire, of one lock or several.
    Acquire,
    /// A release.
    Release,
    /// A renewal.
    Renew,
    /// An operation on the permits of a semaphore, or on a latch.
    Count,
    /// A claim of work that is done once: by `client.once`, `#[once]`, or an idempotency key.
    Claim,
    /// The renewal of a claim.
    Extend,
    /// The end of a claim: its result is stored, or it is given up.
    Settle,
}

/// How an operation fails.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::testing::{Fault, Step, TestStore};
///
/// let store = TestStore::new();
/// // The store carries the acquire out, and the client does not learn.
/// store.fail_next(Step::Acquire, Fault::AnswerLost);
/// let error = store.client().lock("report").try_acquire().await.unwrap_err();
/// assert!(matches!(error, dlock::Error::OutcomeUnknown { .. }));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The store was not reached: the operation was not carried out.
    Unreachable,
    /// The request was lost: not carried out, but the client cannot know that.
    RequestLost,
    /// The reply was lost: carried out, but the client cannot know that.
    AnswerLost,
    /// The store refuses the operation.
    Refused,
}

impl TestStore {
    /// Creates an empty store without faults.
    #[must_use]
    pub fn new() -> TestStore {
        TestStore::default()
    }

    /// Returns a client of this store. Each client acts as a separate process.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    #[must_use]
    pub fn client(&self) -> LockClient {
        let client = LockClient::on_memory(Scripted(self.clone()));
        self.clients.lock().push(Arc::downgrade(client.shared()));
        client
    }

    /// Returns a client of this store with options.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOption`](crate::Error::InvalidOption) when an option is invalid.
    pub async fn client_with(
        &self,
        options: impl FnOnce(LockClientBuilder) -> LockClientBuilder,
    ) -> Result<LockClient, crate::Error> {
        let builder = LockClient::builder().store(Scripted(self.clone()));
        let client = options(builder).build().await?;
        self.clients.lock().push(Arc::downgrade(client.shared()));
        Ok(client)
    }

    /// Gives the lock to another client, whoever holds it, and keeps it held until the returned value is dropped. The
    /// holder has [lost](Self::lose) it when this returns.
    ///
    /// # Panics
    ///
    /// Where the name is that of a read-write lock that is held, or of a semaphore with a number of permits; its holders
    /// keep it. [`busy_as`](Self::busy_as) is for a read-write lock; of a semaphore, acquire the permits with another
    /// [`client`](Self::client).
    #[track_caller]
    pub fn busy(&self, key: impl Into<LockKey>) -> Busy {
        self.busy_for(key, LONGEST_LEASE)
    }

    /// As [`busy`](Self::busy), with a fixed lease of at most a year; dropping the returned value ends the lease early.
    ///
    /// # Panics
    ///
    /// As [`busy`](Self::busy).
    #[track_caller]
    pub fn busy_for(&self, key: impl Into<LockKey>, lease: Duration) -> Busy {
        self.give_away(LockKind::Mutex, key.into(), lease)
    }

    /// As [`busy`](Self::busy), for a lock of this kind: another client is the writer of a read-write lock, or one of its
    /// readers, beside those that it has. Only a writer that has the lock loses it to a reader.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// use dlock::LockKind;
    ///
    /// let store = dlock::testing::TestStore::new();
    /// let catalog = store.client().rw_lock("catalog");
    ///
    /// let _reader = store.busy_as(LockKind::Read, "catalog");
    /// assert!(catalog.read().try_acquire().await.is_ok());
    /// assert!(catalog.write().try_acquire().await.is_err_and(|error| error.is_busy()));
    /// # Ok(()) }
    /// ```
    ///
    /// # Panics
    ///
    /// Where the name is that of a lock of another sort, or of a semaphore; or as a reader, where a writer waits to which
    /// [readers yield](crate::RwLock::prefer_writers).
    #[track_caller]
    pub fn busy_as(&self, kind: LockKind, key: impl Into<LockKey>) -> Busy {
        self.give_away(kind, key.into(), LONGEST_LEASE)
    }

    #[track_caller]
    fn give_away(&self, kind: LockKind, key: LockKey, lease: Duration) -> Busy {
        // The place of a fair lock, ahead of its queue.
        let kind = match kind {
            LockKind::Fair => LockKind::Mutex,
            other => other,
        };
        let grant = GrantId::new(crate::base::chance::uuid(), 1);
        let ask = || {
            let request = AcquireRequest::new(kind.into(), key.clone(), grant, lease.min(LONGEST_LEASE));
            Store::acquire(Arc::new(self.memory.clone()), request).now_or_never()
        };
        let mut reply = ask();
        // Waiters of other threads may be faster.
        for _ in 0..TRIES {
            if !matches!(reply, Some(Ok(AcquireReply::Busy(_)))) {
                break;
            }
            // Readers do not lose it to a reader, whoever keeps that out.
            if kind != LockKind::Read || self.is_written(&key) {
                self.lose(key.clone());
            }
            reply = ask();
        }
        if !matches!(reply, Some(Ok(AcquireReply::Acquired(_)))) {
            panic!("\"{key}\" cannot be made busy as a lock of this kind ({kind:?}): {reply:?}");
        }
        Busy {
            store: self.clone(),
            kind,
            key,
            grant,
        }
    }

    /// Whether a writer has the lock, and does not only wait for it.
    fn is_written(&self, key: &LockKey) -> bool {
        let holders = Store::inspect(Arc::new(self.memory.clone()), key.clone()).now_or_never();
        let holders = holders.and_then(Result::ok).unwrap_or_default();
        holders.iter().any(|holder| holder.kind == Kind::Write)
    }

    /// Makes the lock lost: the store forgets it, and its holders have learned of it when this returns; a task of another
    /// thread whose acquire is about to return learns of it at once. Returns whether it was held.
    pub fn lose(&self, key: impl Into<LockKey>) -> bool {
        let key = key.into();
        let mut clients = self.clients.lock();
        clients.retain(|client| client.strong_count() > 0);
        let all: Vec<_> = clients.iter().filter_map(Weak::upgrade).collect();
        drop(clients);
        // Before a waiter can be granted the lock.
        for client in &all {
            client.watchdog.lose(&key, Loss::Gone);
        }
        let mut ids = Vec::new();
        let taken = self.memory.take_quietly(&key, |holders| {
            ids.extend(holders.into_iter().map(|holder| holder.id));
            Ok(true)
        });
        let (was_held, topics) = taken.unwrap_or_default();
        // A holder on another thread may have released it meanwhile, and then the next holder lost it.
        if was_held {
            let now = Moment::now();
            for client in &all {
                client
                    .watchdog
                    .lose_taken(|grant| ids.contains(&id_at_store(grant)), now);
            }
        }
        self.tell(topics);
        was_held
    }

    /// Notifies waiters, once the store is not down.
    fn tell(&self, topics: impl IntoIterator<Item = Arc<str>>) {
        let mut script = self.script.lock();
        if script.down {
            script.untold.extend(topics);
            return;
        }
        drop(script);
        for topic in topics {
            self.memory.tell(&topic);
        }
    }

    /// Makes the next operation of this sort fail with `fault`; called twice, the next two fail.
    pub fn fail_next(&self, step: Step, fault: Fault) {
        let mut script = self.script.lock();
        match script.next.iter_mut().find(|(other, _)| *other == step) {
            Some((_, faults)) => faults.push_back(fault),
            None => script.next.push((step, VecDeque::from([fault]))),
        }
    }

    /// With `true` the store is unreachable: every operation fails, until it is set to `false` again. Waiters keep their
    /// subscriptions, and learn nothing of a lock that becomes available meanwhile: the store notifies them afterwards.
    pub fn set_down(&self, down: bool) {
        let mut script = self.script.lock();
        script.down = down;
        if !down {
            let untold = std::mem::take(&mut script.untold);
            drop(script);
            self.tell(untold);
        }
    }

    /// Returns how many locks are held on the store, by all clients.
    #[must_use]
    pub fn held(&self) -> usize {
        self.memory.len()
    }

    /// Returns how many keys have listeners.
    #[must_use]
    pub fn watched(&self) -> usize {
        self.memory.watched()
    }

    /// Runs an operation for which the script has no [`Step`].
    fn reach<T>(&self, work: impl FnOnce() -> T) -> Result<T, StoreError> {
        match self.script.lock().down {
            false => Ok(work()),
            true => Err(unreachable()),
        }
    }

    fn fault(&self, step: Step) -> Option<Fault> {
        let mut script = self.script.lock();
        if script.down {
            return Some(Fault::Unreachable);
        }
        script
            .next
            .iter_mut()
            .find(|(other, _)| *other == step)?
            .1
            .pop_front()
    }

    /// Runs an operation, or makes it fail, as the script says.
    fn play<T>(&self, step: Step, work: impl FnOnce() -> T) -> Result<T, StoreError> {
        match self.fault(step) {
            None => Ok(work()),
            Some(Fault::Unreachable) => Err(unreachable()),
            Some(Fault::Refused) => Err(StoreError::not_done(
                Reason::Refused,
                "the test says that the store refuses",
            )),
            Some(Fault::RequestLost) => Err(StoreError::unknown("the test says that the request was lost")),
            Some(Fault::AnswerLost) => {
                drop(work());
                Err(StoreError::unknown("the test says that the answer was lost"))
            }
        }
    }
}

/// The id of a holder, as the memory store shows it.
fn id_at_store(grant: &Grant) -> String {
    match grant.kind {
        Kind::Permit => Uuid::from_slice(&grant.id().permits(1))
            .unwrap_or_default()
            .simple()
            .to_string(),
        _ => grant.id().to_string(),
    }
}

fn unreachable() -> StoreError {
    StoreError::not_done(Reason::Unreachable, "the test says that the store is unreachable")
}

impl fmt::Debug for TestStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestStore")
            .field("held", &self.held())
            .finish_non_exhaustive()
    }
}

/// Another client that holds a lock; created by [`TestStore::busy`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let store = dlock::testing::TestStore::new();
/// let report = store.client().lock("report");
///
/// let busy = store.busy("report");
/// assert!(report.try_acquire().await.is_err());
/// drop(busy);
/// assert!(report.try_acquire().await.is_ok());
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "the lock is released when this is dropped"]
pub struct Busy {
    store: TestStore,
    kind: LockKind,
    key: LockKey,
    grant: GrantId,
}

impl Drop for Busy {
    fn drop(&mut self) {
        let request = ReleaseRequest::new(self.kind.into(), self.key.clone(), self.grant);
        let topic = self.store.memory.release_quietly(&request);
        self.store.tell(topic);
    }
}
