//! Semaphores: a limited number of permits.
//!
//! Every permit of a [`Semaphore`] has an owner, and is released when its owner is gone. An [`UnownedSemaphore`] is a
//! plain number of permits, for sharing with services that use it so.

mod number;
mod permit;
mod unowned;

use std::fmt;
use std::future::Future;
use std::panic::Location;
use std::sync::Arc;

use self::number::Number;
pub use self::permit::Permit;
pub use self::unowned::UnownedSemaphore;
use crate::api::lock::guarded;
use crate::api::options::option_methods;
use crate::api::run::Run;
use crate::base::report::shortened;
use crate::runtime::acquire::AcquireCall;
use crate::runtime::client::Handle;
use crate::runtime::options::{Options, Permits};
use crate::store::Kind;
use crate::{Error, Held, LockKey, LockOptions};

/// The permits of a semaphore.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// let uploads = client.semaphore("uploads").permits(5);
/// assert_eq!(uploads.status().await?, None); // no process has acquired a permit, or set the number, so far
///
/// let permit = uploads.acquire().await?;
/// let status = uploads.status().await?.expect("the acquire has set the number");
/// assert_eq!((status.total, status.held, status.available), (5, 1, 4));
/// # drop(permit);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SemaphoreStatus {
    /// In all, available or held. For an [`UnownedSemaphore`], which does not count held permits, the available ones,
    /// unless a [`Semaphore`] of that name has holders.
    pub total: i64,
    /// Held, in any process. For an [`UnownedSemaphore`], which does not know its holders, 0 unless a [`Semaphore`] of that
    /// name has holders.
    pub held: u64,
    /// Available: below zero while more are held than the total, which was reduced.
    pub available: i64,
}

/// A semaphore across all processes, by name, with options: limits how many permits are held at a time. Compatible with
/// Redisson's `RPermitExpirableSemaphore`.
///
/// Created by [`LockClient::semaphore`](crate::LockClient::semaphore). Like the guard of a [`Lock`](crate::Lock), a
/// [`Permit`] is renewed while its guard lives, is released after a crash of its holder when its lease expires, reports
/// a loss in time, and carries a fencing token. There is no re-entry: code that holds permits and asks for more can
/// wait for itself.
///
/// **The total** is kept by the store. [`permits`](Self::permits) sets it for a semaphore that has none yet; after that
/// [`set_permits`](Self::set_permits), [`add_permits`](Self::add_permits) and [`remove_permits`](Self::remove_permits)
/// change it at run time. Until it is set there are no permits. On Redis and Valkey the count of a [`Latch`](crate::Latch) of
/// the same name is the same key, as in Redisson: use no name for both. A step of the one is not refused there, and changes
/// or deletes the number of the other.
///
/// **Which waiter is served first.** The waiters of one process are served in order of arrival, whatever they ask for.
/// As long as all waiters ask for one permit, the processes compete for available permits. A waiter for several takes a
/// position at the store, and while one waits for several, so does every waiter that asks the store: the first of its
/// process. They are served in the order of their positions. A waiter for one permit that has asked before has none
/// until it asks again, and may be served after them. So waiters for few permits do not pass a waiter for many for
/// ever; a process that stays silent for 5 s loses its position. [`try_acquire`](Self::try_acquire) takes only permits
/// that are not reserved for waiters. Java does not know this order and takes what is available. On ZooKeeper, the
/// first waiters of all processes, Java's too, are always served in order of arrival; only those with a
/// [`limit`](Self::limit) have no position.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use std::time::Duration;
///
/// let client = dlock::LockClient::memory();
/// let reports = client.semaphore("reports").permits(2).wait(Duration::from_secs(3));
///
/// let first = reports.acquire().await?;
/// let second = reports.acquire().await?;
/// assert!(reports.try_acquire().await.is_err_and(|error| error.is_busy()));
/// first.release().await?;
/// drop(second);
/// let both = reports.acquire_many(2).await?;
/// assert_eq!(both.permits(), 2);
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "a semaphore does nothing until permits are acquired"]
pub struct Semaphore {
    handle: Arc<Handle>,
    key: LockKey,
    options: LockOptions,
    total: Option<u32>,
    limit: Option<u32>,
    note: Option<Arc<str>>,
}

impl Semaphore {
    pub(crate) fn new(handle: Arc<Handle>, key: LockKey) -> Semaphore {
        Semaphore {
            handle,
            key,
            options: LockOptions::new(),
            total: None,
            limit: None,
            note: None,
        }
    }

    /// Sets the total, unless the store has one already, which is kept. Without this option an unset semaphore has no
    /// permits, and an acquire waits until the total is set.
    ///
    /// **A different number in a later version of the program changes nothing**: the store keeps the first, without an
    /// error. For a number from the code or the configuration use [`limit`](Self::limit), which is compared in each acquire,
    /// under a name that has no total (or after [`delete`](Self::delete)); or call [`set_permits`](Self::set_permits) when
    /// the program starts.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// let client = dlock::LockClient::memory();
    /// drop(client.semaphore("uploads").permits(5).acquire().await?);
    ///
    /// let uploads = client.semaphore("uploads").permits(10); // deployed a week later
    /// drop(uploads.acquire().await?);
    /// assert_eq!(uploads.status().await?.map(|status| status.total), Some(5));
    /// # Ok(()) }
    /// ```
    pub fn permits(mut self, total: u32) -> Semaphore {
        self.total = Some(total);
        self
    }

    /// Limits how many permits may be held, in all processes, when an acquire of this semaphore is granted. The store
    /// compares it inside the acquire with the number of permits held at that moment, and **stores no total**: a
    /// changed limit applies from the next acquire on, nothing stored can contradict it, and nothing remains of a name
    /// whose permits were all released. Use it instead of [`permits`](Self::permits); both together are an invalid
    /// option. More permits at once than the limit are an invalid option, too. A limit of 0 admits nothing: such a call waits
    /// for as long as its [`wait`](Self::wait) lasts, or for ever, and so do those that come after it in its process.
    ///
    /// Each acquire uses its own limit. While processes use different limits, as during a roll-out, the number of held
    /// permits stays within the largest, and a process with a smaller limit acquires none while its limit is reached. A
    /// smaller limit takes no permit from its holder. A waiting call keeps its limit until it has acquired or given up;
    /// in one process the callers of a name wait in order of arrival, also behind one with a smaller limit. If a total
    /// is set for the name as well, both apply.
    ///
    /// Supported in memory, on etcd, PostgreSQL, ZooKeeper, Redis and Valkey, but not by a quorum; others refuse it with
    /// [`Error::Unsupported`]. Do not use the name as Redisson's `RPermitExpirableSemaphore` as well: Redisson does not
    /// see the limit, and when it finds expired permits it stores a number of permits, which limits dlock from then on. On
    /// Redis and Valkey a lock of the same name is granted beside the permits of a limit, and no permit while it is held:
    /// give locks other names.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// let client = dlock::LockClient::memory();
    /// let tenant = |limit| client.semaphore("tenant:7").limit(limit);
    /// let _one = tenant(1).acquire().await?;
    /// assert!(tenant(1).try_acquire().await.is_err_and(|error| error.is_busy()));
    /// let _two = tenant(2).try_acquire().await?; // configured anew: nothing to change at the store
    /// # Ok(()) }
    /// ```
    pub fn limit(mut self, most: u32) -> Semaphore {
        self.limit = Some(most);
        self
    }

    option_methods! {
        options,
        lease,
        fixed_lease,
        wait,
        max_hold,
        /// So the permits limit how much work starts in that time.
        min_hold,
        max_waiters,
        group,
    }

    /// Says what these acquisitions are for, for the person on call, as [`Lock::note`](crate::Lock::note) does. At most
    /// 200 characters; none by default. It is written to the store as it is: leave secrets out.
    pub fn note(mut self, note: impl AsRef<str>) -> Semaphore {
        self.note = Some(shortened(note.as_ref()).into());
        self
    }

    fn with(mut self, change: impl FnOnce(LockOptions) -> LockOptions) -> Semaphore {
        self.options = change(self.options);
        self
    }

    /// Returns the name of the semaphore.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.key
    }

    /// Checks name and options, as each acquire does.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`] or [`Error::InvalidOption`]; [`Error::Unsupported`] for what the store does not have.
    pub fn check(&self) -> Result<(), Error> {
        self.call(1, true, Location::caller()).check()
    }

    /// Acquires one permit if one is available, without waiting: asks the store once.
    ///
    /// # Errors
    ///
    /// [`Error::NotAcquired`] when no permit is available, or the available ones are reserved for waiters; and every
    /// error of [`acquire`](Self::acquire).
    ///
    /// Cancel safe.
    #[track_caller]
    pub fn try_acquire(&self) -> impl Future<Output = Result<Permit, Error>> + Send + use<> {
        self.take(1, true, Location::caller())
    }

    /// Acquires `permits` permits if they are available, all or none, without waiting.
    ///
    /// # Errors
    ///
    /// As for [`try_acquire`](Self::try_acquire), and [`Error::InvalidOption`] for zero permits or more than
    /// [`MAX_AT_ONCE`](crate::MAX_AT_ONCE).
    ///
    /// Cancel safe.
    #[track_caller]
    pub fn try_acquire_many(
        &self,
        permits: u32,
    ) -> impl Future<Output = Result<Permit, Error>> + Send + use<> {
        self.take(permits, true, Location::caller())
    }

    /// Acquires one permit, waiting as long as [`wait`](Self::wait) allows.
    ///
    /// # Errors
    ///
    /// - [`Error::NotAcquired`] when no permit became available within the wait time.
    /// - [`Error::Draining`] when the client [drains](crate::LockClient::drain), unless this is inside a hold of it.
    /// - [`Error::Unsupported`] for permits or an option that the store does not have.
    /// - [`Error::TooManyWaiters`], [`Error::InvalidKey`], [`Error::InvalidOption`], [`Error::KeyTaken`],
    ///   [`Error::ClientClosed`]: see each.
    /// - [`Error::Unreachable`], [`Error::OutcomeUnknown`] or [`Error::Refused`] when the store fails, or did not reply
    ///   within the wait time. Transient failures are retried within the wait time, at most for
    ///   [`retry_for`](crate::LockClientBuilder::retry_for).
    /// - [`Error::NotReplicated`] when too few replicas acknowledged it in time, where
    ///   [`min_replicas`](crate::LockClientBuilder::min_replicas) is set.
    ///
    /// Cancel safe: dropped at any point it leaves no permit, no queue position and no subscription, and a wake-up that
    /// it consumed goes to the next waiter. A request in flight is undone in the background.
    #[track_caller]
    pub fn acquire(&self) -> impl Future<Output = Result<Permit, Error>> + Send + use<> {
        self.take(1, false, Location::caller())
    }

    /// For the layers: an acquire, or a try, as if it was called there.
    #[doc(hidden)]
    pub fn __acquire_at(
        &self,
        once: bool,
        by: &'static Location<'static>,
    ) -> impl Future<Output = Result<Permit, Error>> + Send + use<> {
        self.take(1, once, by)
    }

    /// Acquires `permits` permits, all or none, waiting as long as [`wait`](Self::wait) allows. A caller that asks for
    /// more than the total lets all others pass, and joins the end of the queue when enough permits have been added.
    ///
    /// # Errors
    ///
    /// As for [`acquire`](Self::acquire), and [`Error::InvalidOption`] for zero permits or more than
    /// [`MAX_AT_ONCE`](crate::MAX_AT_ONCE).
    ///
    /// Cancel safe, as [`acquire`](Self::acquire).
    #[track_caller]
    pub fn acquire_many(&self, permits: u32) -> impl Future<Output = Result<Permit, Error>> + Send + use<> {
        self.take(permits, false, Location::caller())
    }

    /// Acquires a permit as [`acquire`](Self::acquire) does, runs the closure's future, and releases the permit: when
    /// the future is done, and also when it panics or is dropped. When the permit is lost the future is dropped.
    ///
    /// If the release fails after the work was done, the result is kept; the failure is logged, and the permit ends
    /// with its lease.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// # let client = dlock::LockClient::memory();
    /// let sum = client.semaphore("sums").permits(4).run(|_| async { 1 + 1 }).await?;
    /// # assert_eq!(sum, 2);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`acquire`](Self::acquire), and [`Error::Lost`] when the permit was lost before the future was
    /// done.
    ///
    /// Cancel safe for the permit; what happens to the work is up to the closure's future.
    #[track_caller]
    pub fn run<F, Fut>(&self, work: F) -> impl Future<Output = Result<Fut::Output, Error>> + use<F, Fut>
    where
        F: FnOnce(Held) -> Fut,
        Fut: Future,
    {
        Run::new(guarded(self.call(1, false, Location::caller())), work)
    }

    /// Runs the closure's future under a permit if one is available, otherwise not at all: as [`run`](Self::run), but it
    /// asks the store once, as [`try_acquire`](Self::try_acquire) does.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// # let client = dlock::LockClient::memory();
    /// let previews = client.semaphore("previews").limit(4);
    /// match previews.try_run(async |_| println!("drawing")).await {
    ///     Ok(()) => {}
    ///     Err(error) if error.is_busy() => println!("four are drawn already: skipped"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::NotAcquired`] when no permit is available: then the closure was not called. And those of
    /// [`run`](Self::run).
    ///
    /// Cancel safe for the permit; what happens to the work is up to the closure's future.
    #[track_caller]
    pub fn try_run<F, Fut>(&self, work: F) -> impl Future<Output = Result<Fut::Output, Error>> + use<F, Fut>
    where
        F: FnOnce(Held) -> Fut,
        Fut: Future,
    {
        Run::new(guarded(self.call(1, true, Location::caller())), work)
    }

    fn asks(&self, amount: u32) -> Options {
        Options {
            kind: Kind::Permit,
            permits: Some(Permits {
                amount,
                total: self.total,
                limit: self.limit,
            }),
            lock: self.options.clone(),
            note: self.note.clone(),
            ..Options::default()
        }
    }

    fn take(
        &self,
        amount: u32,
        once: bool,
        by: &'static Location<'static>,
    ) -> impl Future<Output = Result<Permit, Error>> + Send + use<> {
        let call = self.call(amount, once, by);
        async move { Ok(Permit::new(guarded(call).await?, amount)) }
    }

    fn call(&self, amount: u32, once: bool, by: &'static Location<'static>) -> AcquireCall {
        AcquireCall::new(&self.handle, &self.key, self.asks(amount), once, by)
    }

    /// Returns the total, and the numbers of held and available permits; `None` while the total is not set. With a
    /// [`limit`](Self::limit) that is the total, unless a smaller one is set.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::KeyTaken`], or a failure of the store that lasts for
    /// [`retry_for`](crate::LockClientBuilder::retry_for). Cancel safe.
    pub async fn status(&self) -> Result<Option<SemaphoreStatus>, Error> {
        self.number().status(self.limit).await
    }

    /// Returns how many permits are available; below zero while more are held than the total, which was reduced; zero
    /// while the total is not set.
    ///
    /// # Errors
    ///
    /// As for [`status`](Self::status). Cancel safe.
    pub async fn available(&self) -> Result<i64, Error> {
        Ok(self.status().await?.map_or(0, |status| status.available))
    }

    /// Sets the total if it is not set; returns `false` if it was.
    ///
    /// # Errors
    ///
    /// As for [`set_permits`](Self::set_permits). Cancel safe, likewise.
    pub async fn try_set_permits(&self, total: u32) -> Result<bool, Error> {
        self.number().set(total, true).await
    }

    /// Sets the total from now on; returns whether that changes it. Held permits stay held: if more are held than the
    /// new total, the next acquire succeeds once enough are released.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOption`] for more than 2,147,483,647, [`Error::InvalidKey`], [`Error::KeyTaken`], or a
    /// failure of the store that lasts for [`retry_for`](crate::LockClientBuilder::retry_for). After
    /// [`Error::OutcomeUnknown`] the number may or may not have been set.
    ///
    /// Cancel safe: once polled, the operation is carried out once, even if its reply is lost or this future is
    /// dropped.
    pub async fn set_permits(&self, total: u32) -> Result<bool, Error> {
        self.number().set(total, false).await
    }

    /// Adds permits to the total; an unset total counts as zero.
    ///
    /// # Errors
    ///
    /// As for [`set_permits`](Self::set_permits), and [`Error::InvalidOption`] for zero permits. Cancel safe, likewise.
    pub async fn add_permits(&self, permits: u32) -> Result<SemaphoreStatus, Error> {
        self.number().add(i64::from(permits), permits).await
    }

    /// Reduces the total. Held permits stay held: if more are removed than are available, the next acquire succeeds
    /// once enough are released.
    ///
    /// # Errors
    ///
    /// [`Error::TooFewPermits`] when the total is smaller, which changes nothing; and as for
    /// [`add_permits`](Self::add_permits). Cancel safe, likewise.
    pub async fn remove_permits(&self, permits: u32) -> Result<SemaphoreStatus, Error> {
        self.number().add(-i64::from(permits), permits).await
    }

    /// Deletes the semaphore and its permits; returns whether there was one. Holders of permits learn of it at the next
    /// renewal or check.
    ///
    /// # Errors
    ///
    /// As for [`set_permits`](Self::set_permits). Cancel safe, likewise.
    pub async fn delete(&self) -> Result<bool, Error> {
        self.number().delete().await
    }

    fn number(&self) -> Number<'_> {
        Number {
            handle: &self.handle,
            key: &self.key,
            unowned: false,
        }
    }
}

impl fmt::Debug for Semaphore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Semaphore")
            .field("key", &self.key)
            .field("permits", &self.total)
            .field("limit", &self.limit)
            .field("options", &self.options)
            .finish()
    }
}
