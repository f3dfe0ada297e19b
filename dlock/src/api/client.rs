//! The client: opens a store, creates locks, shuts down.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime;

use crate::LockKind;
use crate::api::builder::{DEFAULT_LEASE, DEFAULT_RETRY_FOR, program_name};
use crate::base::moment::Moment;
use crate::runtime::calls::{called, reply_of};
use crate::runtime::client::{Handle, Handles, Settings, Shared};
use crate::runtime::grants::Leaving;
use crate::runtime::outside::is_outside;
use crate::runtime::presence::Publicity;
use crate::store::Capabilities;
use crate::store::options::DEFAULT_TIMEOUT;
use crate::store::records::Records;
use crate::store::{GrantId, Holder, Outcome, Store, StoreError};
use crate::stores::memory::MemoryStore;
use crate::{Error, Latch, Lock, LockClientBuilder, LockKey, Loss, MultiLock, Semaphore, UnownedSemaphore};

/// A client of one store, which creates its locks.
///
/// One client serves a whole process: it is cheap to clone, and all its locks share a connection, a
/// subscription and a watchdog. Its background work runs on the runtime that built it.
///
/// Call [`shutdown`](Self::shutdown) before `main` returns. Otherwise locks whose guards are alive when the runtime
/// ends stay held until their leases expire.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::LockClient;
/// use std::time::Duration;
///
/// let client = LockClient::connect("memory://").await?; // or redis://localhost
/// let guard = client.lock("order:42").acquire().await?;
/// guard.release().await?;
/// client.shutdown(Duration::from_secs(5)).await;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct LockClient {
    handles: Arc<Handles>,
}

impl LockClient {
    /// Connects to the store of a URL.
    ///
    /// | URL | store |
    /// |---|---|
    /// | `memory://` | this process, a new store each time; `memory://NAME` is one store by that name |
    /// | `redis://[user:password@]host[:port][/db]` | one Redis server; `valkey://` is the same |
    /// | `rediss://…`, `valkeys://…` | the same over TLS (feature `tls`) |
    /// | `redis+unix:///path/to/socket[?db=1]`, `valkey+unix://` | the same by a Unix socket |
    /// | `redis+sentinel://[user:password@]host[:port],…/service[/db]` | the master that these sentinels (port 26379) name by that name, whichever it is just now; `rediss+sentinel://` and the `valkey` spellings too |
    /// | `redis+cluster://[user:password@]host[:port],…` | a Cluster, by some of its servers; `rediss+cluster://` and the `valkey` spellings too |
    /// | `quorum+redis://[user:password@]host[:port],…[/db]` | a majority of at least three independent servers (Redlock), see [`Quorum`](crate::stores::quorum::Quorum); `quorum+rediss://` and the `valkey` spellings too |
    ///
    /// PostgreSQL, MySQL, etcd and ZooKeeper have crates of their own, whose URLs need
    /// [`LockClientBuilder::scheme`].
    ///
    /// Options go into the query, as in `redis://localhost?lease=10s&prefix=shop:`: `lease`, `timeout`,
    /// `retry_for`, `prefix`, `name`, `presence` and `control` (`on` or `off`), as in [`LockClientBuilder`]; for
    /// servers with replicas `min_replicas` and `min_replicas_within`; for sockets also `db`, `user` and `password`;
    /// for sentinels `db`, and `sentinel_user` and `sentinel_password`, since they never get the password of the
    /// servers; for a quorum `max_lease` and `trust_fresh_servers`.
    ///
    /// With Sentinel or in a Cluster a replica takes over when a master dies. Acquires and releases retry through that
    /// for [`retry_for`](LockClientBuilder::retry_for): set it longer than a fail-over takes there. Holds on the old
    /// master are suspect ([`HoldState::Suspect`](crate::HoldState::Suspect)) until the new master has confirmed them;
    /// holds that the new master never received are lost, and their holders are told at once. In a Cluster,
    /// `cluster-require-full-coverage no` lets the other shards serve while one is down.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidUrl`] or [`Error::InvalidOption`] when the URL is wrong, [`Error::Unsupported`] for `rediss://`
    /// without the feature `tls`, [`Error::Unreachable`] or [`Error::Refused`] when the servers do not answer within
    /// the timeout or refuse the login.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime, and in one without timers (`enable_time`) or, for servers, without I/O (`enable_io`).
    pub async fn connect(url: &str) -> Result<LockClient, Error> {
        LockClient::builder().url(url).build().await
    }

    /// Creates a client on a new store in this process's memory.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime, and in one without timers (`enable_time`).
    #[must_use]
    pub fn memory() -> LockClient {
        LockClient::on_memory(MemoryStore::new())
    }

    /// Creates a client with default settings on a store that needs no connecting.
    pub(crate) fn on_memory(store: impl Store) -> LockClient {
        let settings = Settings {
            lease: DEFAULT_LEASE,
            retry_for: DEFAULT_RETRY_FOR,
            timeout: DEFAULT_TIMEOUT,
            publicity: Publicity {
                service: program_name(),
                presence: false,
                answers: false,
            },
        };
        Handle::start(
            Arc::new(store),
            settings,
            GrantId::new_client(),
            &runtime::Handle::current(),
        )
        .into()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        self.handle().shared()
    }

    /// Returns the handle for this thread.
    pub(crate) fn handle(&self) -> &Arc<Handle> {
        self.handles.here()
    }

    /// Returns a builder, to set up a client with options.
    pub fn builder() -> LockClientBuilder {
        LockClientBuilder::default()
    }

    /// Returns the lock of this name. Nothing is sent until it is acquired.
    ///
    /// A kind or an option that the store does not have is refused with [`Error::Unsupported`] by each acquire, before
    /// anything is sent, and by [`Lock::check`]; the same holds for semaphores, latches and leaders. To refuse it when the
    /// program starts, use `check` or [`LockClientBuilder::require`].
    pub fn lock(&self, key: impl Into<LockKey>) -> Lock {
        Lock::new(self.handle().clone(), key.into())
    }

    /// Returns several locks that are acquired all together or not at all; see [`MultiLock`]. Nothing is sent until
    /// they are acquired.
    pub fn multi<K: Into<LockKey>>(&self, keys: impl IntoIterator<Item = K>) -> MultiLock {
        MultiLock::new(self.handle().clone(), keys.into_iter().map(Into::into))
    }

    /// Returns the fair lock of this name, which serves its waiters in order of arrival across all processes:
    /// [`lock`](Self::lock) of [`LockKind::Fair`], where that is explained.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// # let client = dlock::LockClient::memory();
    /// let guard = client.fair_lock("report").acquire().await?;
    /// # guard.release().await
    /// # }
    /// ```
    pub fn fair_lock(&self, key: impl Into<LockKey>) -> Lock {
        self.lock(key).kind(LockKind::Fair)
    }

    /// Returns the lock of this name with the fencing tokens of Redisson's fenced lock: [`lock`](Self::lock) of
    /// [`LockKind::Fenced`], where that is explained.
    pub fn fenced_lock(&self, key: impl Into<LockKey>) -> Lock {
        self.lock(key).kind(LockKind::Fenced)
    }

    /// Returns the semaphore of this name, with a limited number of permits, each with an owner. Nothing is sent until
    /// a permit is acquired.
    pub fn semaphore(&self, key: impl Into<LockKey>) -> Semaphore {
        Semaphore::new(self.handle().clone(), key.into())
    }

    /// Returns the semaphore of this name whose permits have no owner, as in Redisson's `RSemaphore`. The permits of a
    /// process that crashed never come back: prefer [`semaphore`](Self::semaphore) unless you share the semaphore with
    /// Redisson.
    pub fn unowned_semaphore(&self, key: impl Into<LockKey>) -> UnownedSemaphore {
        UnownedSemaphore::new(self.handle().clone(), key.into())
    }

    /// Returns the count-down latch of this name. Nothing is sent until it is used.
    pub fn latch(&self, key: impl Into<LockKey>) -> Latch {
        Latch::new(self.handle().clone(), key.into())
    }

    /// Whether the client acquires nothing any more: it was shut down, or its runtime ended.
    pub(crate) fn is_closed(&self) -> bool {
        self.shared().closing.is_given()
    }

    /// Returns the lease with which this client renews its locks.
    #[must_use]
    pub fn lease(&self) -> Duration {
        self.shared().settings.lease
    }

    /// Returns the random id of this client. The ids of its holds on the store begin with it and a colon, so that a
    /// [`Holder`] can be recognised as this process, or as another one whose id is known. The ids of permits are hexadecimal on
    /// Redis and Valkey and in memory, and tell no client.
    #[must_use]
    pub fn id(&self) -> String {
        self.shared().issuer().uuid.to_string()
    }

    /// Returns what the store of this client can do: its kinds of locks, its shortest lease, how it notifies waiters, …
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        &self.shared().capabilities
    }

    /// Returns how many locks this client holds now, including those that an unfinished call for several locks has
    /// acquired so far. Claims of `once` are no locks: [`Health::claims`](crate::Health::claims) counts those.
    #[must_use]
    pub fn held(&self) -> usize {
        self.shared().watchdog.len() + self.shared().unfinished.held()
    }

    /// Returns how many keys have waiters in this client now.
    #[must_use]
    pub fn waited_for(&self) -> usize {
        self.shared().waiters.len()
    }

    /// Returns the holder of a lock, as the store sees it, with what its client published; `None` when the lock is
    /// free. If several readers hold the lock, it is one of them, see [`holders`](Self::holders).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// # let client = dlock::LockClient::memory();
    /// # let _guard = client.lock("order:42").note("invoice 42").acquire().await?;
    /// if let Some(holder) = client.inspect("order:42").await?
    ///     && let (Some(client), Some(hold)) = (&holder.client, &holder.hold)
    /// {
    ///     println!("{} on {} holds it since {:?}", client.service, client.host, hold.held);
    ///     println!("it was acquired at {}: {:?}", hold.location, hold.note);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::KeyTaken`] or a failure of the store. Cancel safe.
    pub async fn inspect(&self, key: impl Into<LockKey>) -> Result<Option<Holder>, Error> {
        Ok(self.holders(key).await?.into_iter().next())
    }

    /// Returns all holders of a lock, as the store sees them, with what their clients published: none, one, or several
    /// readers.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::KeyTaken`] or a failure of the store. Cancel safe.
    pub async fn holders(&self, key: impl Into<LockKey>) -> Result<Vec<Holder>, Error> {
        let key = LockKey::new(key)?;
        let holders = self.handle().with_timers(self.shared().holders(key.clone()));
        let holders = read(holders).await;
        holders.map_err(|error| error.into_error("the inspection of lock", &key))
    }

    /// Returns the locks whose names begin with `prefix`, with their holders, sorted by name. The store scans all of
    /// its keys for this: meant for people and tools. In a Redis Cluster a lock whose slot moves during the scan may be missing.
    ///
    /// # Errors
    ///
    /// A failure of the store; also if the server was replaced by another process during each of three scans. Cancel safe.
    pub async fn list(&self, prefix: &str) -> Result<Vec<(LockKey, Holder)>, Error> {
        let key = LockKey::raw(format!("{prefix}*"));
        let store = self.shared().store.clone();
        let list = reply_of(called(&key, || store.list(prefix.to_owned())), &key);
        let list = read(self.shared().noting(list));
        let found = self.handle().with_timers(list).await;
        let mut found = found.map_err(|error| error.into_error("the list of locks", &key))?;
        found.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(found)
    }

    /// Ends the hold of a lock, whichever client has it, and wakes the waiters; returns whether the lock was held. The
    /// former holder learns of it at its next renewal or check. Until then both it and the next holder may believe that
    /// they hold the lock: only the fencing token protects what they write.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::KeyTaken`] or a failure of the store. Cancel safe.
    pub async fn force_release(&self, key: impl Into<LockKey>) -> Result<bool, Error> {
        let key = LockKey::new(key)?;
        let store = self.shared().store.clone();
        let release = reply_of(called(&key, || store.force_release(key.clone())), &key);
        let released = self.handle().with_timers(self.shared().noting(release)).await;
        released.map_err(|error| error.into_error("the forced release of lock", &key))
    }

    /// Returns the records of this client's store, for work that is requested more than once; see
    /// [`record`](crate::record).
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] when the store keeps none.
    pub fn records(&self) -> Result<Records, Error> {
        self.shared().records()
    }

    /// Shuts the client down: refuses new acquires, ends waiting ones, and gives guards until the deadline to be
    /// released, and work under a claim of `once` to end. Then it signals [`Loss::Shutdown`] to the remaining guards,
    /// releases them, and waits until every release, and every result of work, has arrived (at most
    /// [`retry_for`](LockClientBuilder::retry_for) longer). With [presence](LockClientBuilder::presence) it also removes
    /// its entry, for at most [`timeout`](LockClientBuilder::timeout) more. All clones of the client are shut down.
    ///
    /// Work under a claim that has not ended by the deadline ([`ShutdownReport::unfinished`]) is not told: it goes on under
    /// its renewed claim for as long as the runtime does, and its result is kept. If the process ends first, the next attempt
    /// waits for the lease. Called inside a hold or such work, this waits until the deadline.
    ///
    /// Work on [records](Self::records) without a client, and the handlers of an idempotency layer, are not waited for, and
    /// records that the client has given out still take new claims. So end the server before.
    ///
    /// An acquire that is in flight is waited for, too. One that its owner keeps and does not poll, as beside the shutdown in a
    /// `select!`, may keep the shutdown until the deadline, and what the store granted it ends with its lease: drop it before.
    ///
    /// Cancel safe: dropped half way, the client stays closed to new acquires.
    pub async fn shutdown(&self, deadline: Duration) -> ShutdownReport {
        let shared = self.shared();
        if shared.has_lost_its_runtime() && is_outside() {
            // The holders were told when the runtime ended, and there is no timer to wait by.
            return ShutdownReport {
                lost: 0,
                unconfirmed: shared.given_up.still_held(Moment::now()) + shared.pending.len(),
                unfinished: shared.claims.len(),
            };
        }
        self.handle().with_timers(self.end(deadline)).await
    }

    async fn end(&self, deadline: Duration) -> ShutdownReport {
        let shared = self.shared();
        shared.close();
        self.release_unfinished();
        let _ = tokio::time::timeout(deadline, shared.idle()).await;
        let unfinished = shared.claims.len();
        let left = shared.watchdog.close(Loss::Shutdown);
        for grant in &left {
            let leaving = Leaving {
                deadline: Moment::of(grant.deadline()),
                counted: shared.pending.token(),
            };
            drop((self.handle()).release(grant.clone(), None, Moment::now(), leaving, None));
        }
        shared.pending.close();
        let all_given_back = async {
            // Grants of requests in flight are recorded before those requests end.
            loop {
                self.release_unfinished();
                shared.pending.wait().await;
                // The wait also ends when nothing was pending for a moment only: a request may have brought a grant
                // since, whose release is pending.
                if shared.pending.is_empty() && shared.unfinished.is_empty() {
                    break;
                }
            }
        };
        let drained = tokio::time::timeout(shared.settings.retry_for, all_given_back)
            .await
            .is_ok();
        if drained {
            shared.leave_presence().await;
            shared.finished.cancel();
        }
        let given_up = shared.given_up.still_held(Moment::now());
        // What began after that belongs to guards that were told.
        let pending = if drained { 0 } else { shared.pending.len() };
        ShutdownReport {
            lost: left.len(),
            unconfirmed: given_up + pending,
            unfinished,
        }
    }

    /// Releases what unfinished calls have acquired so far. Those calls end without it, even if they are not polled any
    /// more.
    fn release_unfinished(&self) {
        for part in self.shared().unfinished.take() {
            drop(self.handle().undo(part.request, part.lease));
        }
    }
}

/// An operation that only reads has no unknown outcome.
async fn read<T>(step: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    step.await.map_err(|error| StoreError {
        outcome: Outcome::NotDone,
        ..error
    })
}

impl From<Arc<Handles>> for LockClient {
    fn from(handles: Arc<Handles>) -> LockClient {
        LockClient { handles }
    }
}

impl fmt::Debug for LockClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockClient")
            .field("uuid", &self.shared().issuer().uuid)
            .field("held", &self.held())
            .field("settings", &self.shared().settings)
            .finish_non_exhaustive()
    }
}

/// How a [`shutdown`](LockClient::shutdown) went.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use std::time::Duration;
///
/// let client = dlock::LockClient::memory();
/// let guard = client.lock("report").acquire().await?;
///
/// let report = client.shutdown(Duration::ZERO).await;
/// assert_eq!(report.lost, 1); // the guard was still alive, and knows
/// assert_eq!(report.unconfirmed, 0); // the store has released the lock
/// assert!(!guard.is_held());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// Guards that were still alive at the deadline; their holders were told, and the locks released.
    pub lost: usize,
    /// Releases that the store had not confirmed at the end, and whose leases may not have ended, those that failed before the
    /// shutdown included; those locks end with their leases. Results of work that the store had not confirmed count too:
    /// other processes may do that work again.
    pub unconfirmed: usize,
    /// Work under claims of `once` that was still running at the deadline. It goes on for as long as the runtime does; if the
    /// process ends first, the work is cut off, and its claim ends with its lease.
    pub unfinished: usize,
}
