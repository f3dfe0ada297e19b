//! Semaphores: a limited number of permits.
//!
//! Every permit of a [`Semaphore`] has an owner, and comes back when its owner is gone. An [`UnownedSemaphore`] is a
//! number that is taken from and added to, for sharing with services that use it so.

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
use crate::runtime::acquire::AcquireCall;
use crate::runtime::client::Handle;
use crate::runtime::options::{Options, Permits};
use crate::store::Kind;
use crate::{Error, Held, LockKey, LockOptions};

/// How many permits a semaphore has.
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
    /// In all, free or held. For an [`UnownedSemaphore`], which does not count taken permits, the free ones.
    pub total: i64,
    /// Held, in any process. Always 0 for an [`UnownedSemaphore`], which does not know its holders.
    pub held: u64,
    /// Free: below zero while more are held than the total, which was reduced.
    pub available: i64,
}

/// A semaphore across all processes, by name, with options: at most so many permits are held at a time. With
/// the data of Redisson's `RPermitExpirableSemaphore`.
///
/// Made by [`LockClient::semaphore`](crate::LockClient::semaphore). A [`Permit`] is renewed while its guard lives and
/// comes back after a crash of its holder, when its lease has expired; its holder is told in time when it is lost, and
/// it carries a fencing token, just as the guard of a [`Lock`](crate::Lock). Two permits are two, also of one task:
/// there is no re-entry, so code that holds permits and asks for more can wait for itself.
///
/// **The total** is kept by the store. [`permits`](Self::permits) sets it for a semaphore that has none yet; after that
/// it is changed at run time by [`set_permits`](Self::set_permits), [`add_permits`](Self::add_permits) and
/// [`remove_permits`](Self::remove_permits). Until it is set there are no permits.
///
/// **Which waiter is served first.** The waiters of one process are served in the order in which they came, whatever
/// they ask for. As long as all waiters ask for one permit, the processes compete for free permits. When a waiter asks
/// for several, the processes too are served in order: by the time at which the first waiter of each came to the store.
/// So a waiter for many permits is not passed over for ever by waiters for few; a process that stays silent for 5 s
/// loses its position. [`try_acquire`](Self::try_acquire) takes only permits that are not kept for waiters. Java does
/// not know this order and takes what is free.
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
}

impl Semaphore {
    pub(crate) fn new(handle: Arc<Handle>, key: LockKey) -> Semaphore {
        Semaphore {
            handle,
            key,
            options: LockOptions::new(),
            total: None,
            limit: None,
        }
    }

    /// The total, unless the store has one already, which stays. Without this option an unset semaphore has no permits,
    /// and an acquire waits until the total is set.
    pub fn permits(mut self, total: u32) -> Semaphore {
        self.total = Some(total);
        self
    }

    /// The most permits that may be held, in all processes, when an acquire of this semaphore is granted. The store judges
    /// it inside the acquire, against the permits that are held at that moment, and **keeps no number**: a limit that is
    /// configured anew is in force with the next acquire, there is nothing stored that could differ from it, and nothing is
    /// left of a name whose permits were all released. Use it instead of [`permits`](Self::permits), which together with it
    /// is an invalid option. A limit of 0 admits nothing.
    ///
    /// Each acquire goes by its own limit. While processes use different ones, as during a roll-out, at most as many permits
    /// are held as the largest says, and a process with a smaller limit acquires none while as many are held as its own says.
    /// A smaller limit takes no permit from its holder. A call that waits keeps its limit until it has acquired or given up;
    /// in one process the callers of a name wait in the order of their arrival, also behind one with a smaller limit. Where a
    /// total is set for the name nevertheless, both bind.
    ///
    /// Memory, and Redis and Valkey in each topology but a quorum, have it; other stores refuse it with
    /// [`Error::Unsupported`]. A Redisson client that takes permits under this name does not see the limit.
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
        /// So the permits bound how much is begun in that time.
        min_hold,
        max_waiters,
        group,
    }

    fn with(mut self, change: impl FnOnce(LockOptions) -> LockOptions) -> Semaphore {
        self.options = change(self.options);
        self
    }

    /// The name of the semaphore.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.key
    }

    /// Whether name and options make sense, as each acquire checks it.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`] or [`Error::InvalidOption`].
    pub fn check(&self) -> Result<(), Error> {
        self.call(1, true, Location::caller()).check()
    }

    /// Acquires one permit if one is free, without waiting: asks the store once.
    ///
    /// # Errors
    ///
    /// [`Error::NotAcquired`] when no permit is free, or the free ones are kept for waiters; and every error of
    /// [`acquire`](Self::acquire).
    ///
    /// Cancel safe.
    #[track_caller]
    pub fn try_acquire(&self) -> impl Future<Output = Result<Permit, Error>> + Send + use<> {
        self.take(1, true, Location::caller())
    }

    /// Acquires so many permits if they are free, all or none, without waiting.
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
    /// - [`Error::TooManyWaiters`], [`Error::InvalidKey`], [`Error::InvalidOption`], [`Error::KeyTaken`],
    ///   [`Error::ClientClosed`]: see each.
    /// - [`Error::Unreachable`], [`Error::OutcomeUnknown`] or [`Error::Refused`] when the store is at fault, or did not
    ///   reply within the wait time. Failures that may pass are retried within the wait time, at most for
    ///   [`retry_for`](crate::LockClientBuilder::retry_for).
    ///
    /// Cancel safe: dropped at any point it leaves no permit, no queue position and no subscription, and a wake-up that
    /// it consumed goes to the next waiter. Whatever is under way is undone in the background.
    #[track_caller]
    pub fn acquire(&self) -> impl Future<Output = Result<Permit, Error>> + Send + use<> {
        self.take(1, false, Location::caller())
    }

    /// Acquires so many permits, all or none, waiting as long as [`wait`](Self::wait) allows. A caller that asks for
    /// more than there are lets all others pass, and goes to the end of the queue when enough have been added.
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
    /// A release that fails after the work was done does not discard the result; it is logged, and the lease ends the
    /// permit.
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
    /// Cancel safe as far as the permit goes; what becomes of the work is up to the closure's future.
    #[track_caller]
    pub fn run<F, Fut>(&self, work: F) -> impl Future<Output = Result<Fut::Output, Error>> + use<F, Fut>
    where
        F: FnOnce(Held) -> Fut,
        Fut: Future,
    {
        Run::new(guarded(self.call(1, false, Location::caller())), work)
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
        AcquireCall {
            handle: self.handle.clone(),
            key: self.key.clone(),
            options: self.asks(amount),
            once,
            nested: false,
            by,
        }
    }

    /// The total, and the number of free permits; `None` while the total is not set. With a [`limit`](Self::limit) the
    /// total is that, unless a smaller one is set.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::KeyTaken`], or a failure of the store that lasts for
    /// [`retry_for`](crate::LockClientBuilder::retry_for). Cancel safe.
    pub async fn status(&self) -> Result<Option<SemaphoreStatus>, Error> {
        self.number().status(self.limit).await
    }

    /// How many permits are free; below zero while more are held than the total, which was reduced; zero while the
    /// total is not set.
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
    /// new total, the next acquire succeeds once enough were released.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOption`] for more than 2,147,483,647, [`Error::InvalidKey`], [`Error::KeyTaken`], or a
    /// failure of the store that lasts for [`retry_for`](crate::LockClientBuilder::retry_for). After
    /// [`Error::OutcomeUnknown`] the number may or may not have been set.
    ///
    /// Cancel safe: once polled, the step is carried out once, also when its answer is lost or this is dropped.
    pub async fn set_permits(&self, total: u32) -> Result<bool, Error> {
        self.number().set(total, false).await
    }

    /// Adds permits to the total; an unset total counts as zero.
    ///
    /// # Errors
    ///
    /// As for [`set_permits`](Self::set_permits). Cancel safe, likewise.
    pub async fn add_permits(&self, permits: u32) -> Result<SemaphoreStatus, Error> {
        self.number().add(i64::from(permits), permits).await
    }

    /// Reduces the total. Held permits stay held: if more are removed than are free, the next acquire succeeds once
    /// enough were released.
    ///
    /// # Errors
    ///
    /// [`Error::TooFewPermits`] when there are not so many, free or held, which changes nothing; and as for
    /// [`set_permits`](Self::set_permits). Cancel safe, likewise.
    pub async fn remove_permits(&self, permits: u32) -> Result<SemaphoreStatus, Error> {
        self.number().add(-i64::from(permits), permits).await
    }

    /// Deletes the semaphore and its permits; returns whether there was one. Holders of permits are told at the next
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
