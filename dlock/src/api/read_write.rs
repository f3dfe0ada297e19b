//! Read-write locks: many readers, or one writer.

use std::future::Future;
use std::panic::Location;

use crate::LockKind;
use crate::api::guard::{LockGuard, finish};
use crate::api::options::option_methods;
use crate::runtime::acquire::{self, AcquireCall, Begun};
use crate::runtime::options::{Lease, LockOptions, Options};
use crate::runtime::scope::Scope;
use crate::store::Kind;
use crate::{Error, Lock, LockClient, LockKey};

/// A read-write lock by name: its two sides are [`Lock`]s. Options that are set here apply to both; each side takes more.
///
/// Created by [`LockClient::rw_lock`]. Any number of readers hold it at the same time, each with its own lease, renewal
/// and fencing token, or one writer does. It is the same lock as Redisson's `RReadWriteLock` of that name.
///
/// - **Nested calls.** Inside a reader's frame ([`Lock::run`], [`LockGuard::scope`]) a read re-enters, and asking to
///   write fails at once with [`Error::WouldDeadlock`]: the reader would wait for itself. Inside a writer's frame a
///   write re-enters, and so does a read. Such a read is a separate lock, which the writer may keep when it releases
///   the write lock ([`LockGuard::downgrade`]); other readers are admitted then.
/// - **Which waiter goes first.** New readers are admitted as long as there are readers, so writers may starve where
///   reads overlap without end. With [`prefer_writers`](Self::prefer_writers) readers yield to waiting writers.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// let prices = client.rw_lock("prices");
///
/// let (one, other) = (prices.read().acquire().await?, prices.read().acquire().await?);
/// assert!(prices.write().try_acquire().await.is_err_and(|error| error.is_busy()));
/// drop((one, other));
///
/// let writing = prices.write().acquire().await?;
/// let reading = writing.downgrade().await?;
/// assert!(prices.read().try_acquire().await.is_ok());
/// # drop(reading);
/// # Ok(()) }
/// ```
///
/// Options for both sides are set once:
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// # use std::time::Duration;
/// # let client = dlock::LockClient::memory();
/// let prices = client.rw_lock("prices").wait(Duration::from_secs(3)).note("the price list");
/// prices.check()?;
/// let impatient = prices.read().wait(Duration::from_millis(100)); // this side alone
/// # drop(impatient.acquire().await?);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[must_use = "a lock does nothing until it is acquired"]
pub struct RwLock {
    lock: Lock,
}

impl LockClient {
    /// Returns the read-write lock of this name. Nothing is sent until one of its sides is acquired.
    pub fn rw_lock(&self, key: impl Into<LockKey>) -> RwLock {
        RwLock { lock: self.lock(key) }
    }
}

impl RwLock {
    /// Returns the side of the readers: [`LockKind::Read`].
    pub fn read(&self) -> Lock {
        self.lock.clone().kind(LockKind::Read)
    }

    /// Returns the side of the writer: [`LockKind::Write`].
    pub fn write(&self) -> Lock {
        self.lock.clone().kind(LockKind::Write)
    }

    option_methods! {
        /// Of both sides.
        options,
        lease,
        fixed_lease,
        wait,
        max_hold,
        min_hold,
        max_waiters,
        local_handoffs,
        group,
    }

    fn with(self, change: impl FnOnce(LockOptions) -> LockOptions) -> RwLock {
        RwLock {
            lock: self.lock.with(change),
        }
    }

    /// Says what acquisitions of both sides are for, for the person on call, as [`Lock::note`] does. At most 200
    /// characters; none by default. It is written to the store as it is: leave secrets out.
    pub fn note(self, note: impl AsRef<str>) -> RwLock {
        RwLock {
            lock: self.lock.note(note),
        }
    }

    /// Checks name and options of both sides, as each acquire does, without asking the store.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::InvalidOption`], or [`Error::Unsupported`] if the store has no read-write locks.
    pub fn check(&self) -> Result<(), Error> {
        self.read().check()?;
        self.write().check()
    }

    /// Makes new readers yield while a writer waits, so that a writer does not starve where reads overlap without end;
    /// by default readers are admitted as long as there are readers.
    ///
    /// It is the writer's option: while a writer with this option waits ([`try_acquire`](Lock::try_acquire) does not),
    /// readers of every dlock process are refused or wait, whatever their own options. The writer then waits only
    ///
    /// - for readers that hold the lock already, and for reads nested in theirs, which enter as ever;
    /// - for other writers: waiting writers have no order between processes, and readers yield until the last writer
    ///   that prefers it was served, so a constant stream of writers keeps readers out;
    /// - for earlier writers of its own process. Only the first of them counts at the store: where the lock is not
    ///   handed off between them, waiting readers may be admitted before the next;
    /// - for Java: Redisson's readers do not know this option and are admitted.
    ///
    /// When a writer gives up or is dropped, the readers continue at once; when its process died, after 5 s. A reader
    /// that waits, outside its own frame, for a second read of a lock that it holds waits for the writer, and the
    /// writer for it: nest such reads ([`Lock::run`], [`LockGuard::scope`]), or set a [`wait`](Lock::wait).
    ///
    /// In memory and on Redis and Valkey, but not on a quorum: other stores refuse such a wait with [`Error::Unsupported`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// # let client = dlock::LockClient::memory();
    /// let prices = client.rw_lock("prices").prefer_writers();
    /// let writing = prices.write().acquire().await?;
    /// # drop(writing);
    /// # Ok(()) }
    /// ```
    pub fn prefer_writers(self) -> RwLock {
        RwLock {
            lock: self.lock.prefer_writers(),
        }
    }

    /// Returns the name of the lock.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        self.lock.key()
    }
}

impl LockGuard {
    /// Turns a write lock into a read lock without a gap: no other write comes in between, and waiting readers are
    /// admitted.
    ///
    /// The read lock has its own fencing token, and the remaining lease if that is fixed. If the write lock was entered
    /// several times, the other guards keep it; a read nested in this one waits for those of them that are not around
    /// this call.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOption`] when this is not a write lock, [`Error::Lost`] when it is lost, and the failure of the
    /// store when it does not answer. In each case the write lock is released.
    ///
    /// Cancel safe: dropped half way, it leaves no lock.
    #[track_caller]
    pub fn downgrade(self) -> impl Future<Output = Result<LockGuard, Error>> + Send + 'static {
        let by = Location::caller();
        async move {
            let shared = self.hold().handle().shared();
            let series = shared.meter.series(self.grant().group, Kind::Read);
            let begun = Begun::of(shared, series, Kind::Read, std::slice::from_ref(self.key()));
            let scope = acquire::begin().await;
            let reading = self.reads_on(by, &scope).await;
            let reading = begun.told(reading, self.key())?;
            finish(self).await;
            Ok(reading)
        }
    }

    /// Acquires the read lock that replaces this write lock.
    async fn reads_on(&self, by: &'static Location<'static>, scope: &Scope) -> Result<LockGuard, Error> {
        let write = self.grant();
        if write.kind != Kind::Write {
            return Err(Error::InvalidOption {
                option: "downgrade",
                reason: format!("lock \"{}\" is held to {}, not to write", write.key, write.kind),
            });
        }
        let (renewed, lease, note) = (write.renewed, write.lease(), write.note());
        let options = Options {
            kind: Kind::Read,
            lock: LockOptions {
                lease: Some(match renewed {
                    true => Lease::Renewed(lease),
                    false => Lease::Fixed(write.remaining()),
                }),
                max_hold: write.max_hold_left(),
                group: write.group,
                ..LockOptions::new()
            },
            ..Options::default()
        };
        let handle = self.hold().handle();
        let mut call = AcquireCall::new(handle, &write.key, options, false, by);
        call.nested = true;
        handle
            .with_timers(call.read_instead(self.hold().hold_ref(), scope))
            .await
            .map(|read| {
                read.grant().note_of_acquisition(&note);
                LockGuard::from(read)
            })
    }
}
