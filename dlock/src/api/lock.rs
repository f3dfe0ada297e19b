//! A lock by name: its options, and how to acquire it.

use std::fmt;
use std::future::Future;
use std::panic::Location;
use std::sync::Arc;

use crate::api::guard::LockGuard;
use crate::api::options::option_methods;
use crate::api::run::Run;
use crate::runtime::client::Handle;
use futures_util::TryFutureExt;

use crate::LockKind;
use crate::base::report::shortened;
use crate::runtime::acquire::AcquireCall;
use crate::runtime::options::{LockOptions, Options};
use crate::{Error, Held, LockKey};

/// A lock by name, with options: cheap to create, clone and keep.
///
/// Created by [`LockClient::lock`](crate::LockClient::lock). Options are set by methods that consume and return the
/// lock; they belong to this value and its clones, not to other acquisitions of the same name. The acquire (or
/// [`check`](Self::check)) reports an invalid name or option before anything is sent.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use std::time::Duration;
///
/// let client = dlock::LockClient::memory();
/// let lock = client.lock("report:2026").wait(Duration::from_secs(3));
///
/// let guard = lock.acquire().await?;
/// println!("token {}", guard.fencing_token());
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "a lock does nothing until it is acquired"]
pub struct Lock {
    handle: Arc<Handle>,
    key: LockKey,
    options: Options,
}

impl Lock {
    pub(crate) fn new(handle: Arc<Handle>, key: LockKey) -> Lock {
        Lock {
            handle,
            key,
            options: Options::default(),
        }
    }

    /// Sets the kind of lock, [`LockKind::Mutex`] by default. Read-write locks have a
    /// [shorthand](crate::LockClient::rw_lock).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// use dlock::LockKind;
    ///
    /// # let client = dlock::LockClient::memory();
    /// let guard = client.lock("prices").kind(LockKind::Read).acquire().await?;
    /// # drop(guard);
    /// # Ok(()) }
    /// ```
    pub fn kind(mut self, kind: LockKind) -> Lock {
        self.options.kind = kind.into();
        self
    }

    option_methods! {
        options,
        lease,
        fixed_lease,
        wait,
        max_hold,
        /// A waiting [`acquire`](Self::acquire) gets the lock when that time is over: see
        /// [`LockOptions::min_hold`] for jobs that must run once.
        min_hold,
        max_waiters,
        /// A lock that came from the store is handed off for one time slice at most: four round trips of the store, at
        /// least 5 ms and at most 100 ms. After that waiters of other processes go first.
        ///
        /// A handoff goes without a round trip to the next waiter, in arrival order, each time with a fencing token of
        /// its own: only while the lock is renewed, confirmed, past its `min_hold` and has a third of its lease left,
        /// and only to waiters that ask for the same lease and no `min_hold`. A fair lock goes only to waiters that are
        /// next in the order of arrival over all processes.
        local_handoffs,
        group,
    }

    pub(crate) fn with(mut self, change: impl FnOnce(LockOptions) -> LockOptions) -> Lock {
        self.options.lock = change(self.options.lock);
        self
    }

    /// Makes new readers yield while a writer waits for this read-write lock; see
    /// [`RwLock::prefer_writers`](crate::RwLock::prefer_writers). Off by default.
    pub fn prefer_writers(mut self) -> Lock {
        self.options.prefer_writers = true;
        self
    }

    /// Says what this acquisition is for, for the person on call: [`LockClient::inspect`](crate::LockClient::inspect)
    /// and the command `dlock show` show it for holds and waiters. At most 200 characters; none by default. It is
    /// written to the store as it is: leave secrets out.
    pub fn note(mut self, note: impl AsRef<str>) -> Lock {
        self.options.note = Some(shortened(note.as_ref()).into());
        self
    }

    /// Returns the name of the lock.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.key
    }

    /// Checks name and options as each acquire does, without asking the store.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::InvalidOption`], or [`Error::Unsupported`] for a kind that the store does not have.
    pub fn check(&self) -> Result<(), Error> {
        self.call(true, Location::caller()).check()
    }

    /// Acquires the lock if it is free, without waiting for its holder: asks the store once.
    ///
    /// Keep the guard while the work runs. `if lock.try_acquire().await.is_ok() { … }` releases the lock before the block
    /// begins, and `let _ = lock.try_acquire().await?;` releases it at once: both drop the guard.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// # let client = dlock::LockClient::memory();
    /// match client.lock("report").try_acquire().await {
    ///     Ok(guard) => {
    ///         // The report is written here, by one process at a time.
    ///         guard.release().await?;
    ///     }
    ///     Err(error) if error.is_busy() => println!("another process writes the report"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::NotAcquired`] when another caller holds it, and every error of [`acquire`](Self::acquire).
    ///
    /// Cancel safe.
    #[track_caller]
    pub fn try_acquire(&self) -> impl Future<Output = Result<LockGuard, Error>> + Send + use<> {
        guarded(self.call(true, Location::caller()))
    }

    /// Acquires the lock, waiting as long as [`wait`](Self::wait) allows.
    ///
    /// Inside a frame that holds the same lock, taken through this client or a clone, it re-enters, without waiting for
    /// others and without a request to the store (a reader inside a writer: [`RwLock`](crate::RwLock)). A guard
    /// alone is no frame: beside a guard of the same lock this waits for that guard. [`LockGuard::reenter`] gives a second
    /// guard, and [`LockGuard::scope`] makes a frame.
    ///
    /// # Errors
    ///
    /// - [`Error::NotAcquired`] when other holders had the lock until the wait time was over.
    /// - [`Error::Lost`] when the enclosing frame has lost it.
    /// - [`Error::WouldDeadlock`] when the enclosing frame has it as another kind of lock that excludes this one, such as a
    ///   reader that wants to write.
    /// - [`Error::Draining`] when the client [drains](crate::LockClient::drain), unless this is inside a hold of it.
    /// - [`Error::Unsupported`] for a kind or an option that the store does not have.
    /// - [`Error::TooManyWaiters`], [`Error::InvalidKey`], [`Error::InvalidOption`], [`Error::KeyTaken`],
    ///   [`Error::ClientClosed`]: see each.
    /// - [`Error::Unreachable`], [`Error::OutcomeUnknown`] or [`Error::Refused`] when the store fails, or did not reply
    ///   within the wait time. Transient failures are retried within the wait time, at most for
    ///   [`retry_for`](crate::LockClientBuilder::retry_for).
    /// - [`Error::NotReplicated`] when too few replicas acknowledged it in time, where
    ///   [`min_replicas`](crate::LockClientBuilder::min_replicas) is set.
    ///
    /// # Panics
    ///
    /// When it has to wait in a tokio runtime without timers (`enable_time`). Outside of any runtime it uses the timers of
    /// the client's.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropped at any point it leaves no lock, no queue position and no subscription, and a wake-up that
    /// it consumed goes to the next waiter. A request in flight is undone in the background.
    ///
    /// Keep polling it: if a woken future is not polled for one to two seconds, or 100 ms where it enters an enclosing
    /// frame, or 50 ms where the waiter before it was not polled either, it loses its turn, and a lock that was handed off to it
    /// goes to the next waiter. When it is polled again, it continues to wait ahead of later waiters.
    #[track_caller]
    pub fn acquire(&self) -> impl Future<Output = Result<LockGuard, Error>> + Send + use<> {
        guarded(self.call(false, Location::caller()))
    }

    pub(crate) fn call(&self, once: bool, by: &'static Location<'static>) -> AcquireCall {
        AcquireCall::new(&self.handle, &self.key, self.options.clone(), once, by)
    }

    /// Acquires the lock as [`acquire`](Self::acquire) does, runs the closure's future inside, and releases the lock:
    /// when the future is done, and also when it panics or is dropped. A nested acquire of the same lock re-enters.
    /// When the lock is lost the future is dropped.
    ///
    /// If the release fails after the work was done, the result is kept; the failure is logged, and the lock ends with
    /// its lease.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// # let client = dlock::LockClient::memory();
    /// let token = client.lock("report").run(|held| async move { held.fencing_token() }).await?;
    /// # assert!(token > 0);
    /// # Ok(()) }
    /// ```
    ///
    /// # Blocking work
    ///
    /// A closure in another thread is not dropped with the future: that of `spawn_blocking`, or of `interact` of deadpool,
    /// runs on after a loss and after the caller was cancelled, when the lock is released already. Move a guard into it
    /// instead; dropping the guard there releases the lock. A lost lock does not stop the closure: it asks
    /// [`is_held`](LockGuard::is_held), or the resource checks the fencing token. [`dlock::current`](crate::current) is
    /// `None` in the closure.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// # let client = dlock::LockClient::memory();
    /// # fn write(_: u64) {}
    /// let guard = client.lock("report").acquire().await?;
    /// let written = tokio::task::spawn_blocking(move || {
    ///     write(guard.fencing_token());
    ///     guard
    /// });
    /// written.await.expect("the closure does not panic").release().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`acquire`](Self::acquire), and [`Error::Lost`] when the lock was lost before the future
    /// was done.
    ///
    /// Cancel safe for the lock; what happens to the work is up to the closure's future.
    #[track_caller]
    pub fn run<F, Fut>(&self, work: F) -> impl Future<Output = Result<Fut::Output, Error>> + use<F, Fut>
    where
        F: FnOnce(Held) -> Fut,
        Fut: Future,
    {
        Run::new(self.acquire(), work)
    }

    /// Runs the closure's future under the lock if it is free, otherwise not at all: as [`run`](Self::run), but it asks
    /// the store once, as [`try_acquire`](Self::try_acquire) does, and waits for no holder.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// # let client = dlock::LockClient::memory();
    /// match client.lock("cleanup").try_run(async |_| println!("cleaning up")).await {
    ///     Ok(()) => {}
    ///     Err(error) if error.is_busy() => println!("another process cleans up"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::NotAcquired`] when another caller holds the lock: then the closure was not called. And those of
    /// [`run`](Self::run).
    ///
    /// Cancel safe for the lock; what happens to the work is up to the closure's future.
    #[track_caller]
    pub fn try_run<F, Fut>(&self, work: F) -> impl Future<Output = Result<Fut::Output, Error>> + use<F, Fut>
    where
        F: FnOnce(Held) -> Fut,
        Fut: Future,
    {
        Run::new(self.try_acquire(), work)
    }
}

/// A running acquire of a guard.
pub(crate) fn guarded(call: AcquireCall) -> impl Future<Output = Result<LockGuard, Error>> + Send + use<> {
    call.run().map_ok(LockGuard::from)
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock")
            .field("key", &self.key)
            .field("options", &self.options)
            .finish()
    }
}
