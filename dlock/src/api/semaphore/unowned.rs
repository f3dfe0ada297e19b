//! The semaphore whose permits have no owner.

use std::fmt;
use std::future::Future;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use super::SemaphoreStatus;
use super::number::Number;
use crate::api::options::option_methods;
use crate::runtime::acquire::AcquireCall;
use crate::runtime::client::Handle;
use crate::runtime::options::{Options, Permits};
use crate::store::Kind;
use crate::{Error, LockKey, LockOptions};

/// How long the store remembers that permits were taken, so that taking them can be undone.
const UNDONE_WITHIN: Duration = Duration::from_secs(60);

/// A semaphore across all processes that only stores a number of permits, by name; Redisson's `RSemaphore`.
///
/// Created by [`LockClient::unowned_semaphore`](crate::LockClient::unowned_semaphore). **Permits have no owner and no
/// lease: if a process takes a permit and crashes before it releases it, the permit is gone** until a permit is added;
/// and any process may release permits that no process took. Use a [`Semaphore`](super::Semaphore), unless you share
/// this one with services that use Redisson's, or pass permits from one process to another. As for a
/// [`Semaphore`](super::Semaphore), use no name for both this and a [`Latch`](crate::Latch).
///
/// Every operation is carried out once, however often it is sent. An acquire that is dropped, or whose outcome cannot
/// be learned in time, is undone in the background, if the store is available again within a minute.
///
/// The waiters of one process are served in order of arrival. There is no order between processes, as in Redisson:
/// waiters for few permits may pass a waiter for many.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// let places = client.unowned_semaphore("places").permits(3);
/// places.acquire_many(2).await?;
/// assert_eq!(places.available().await?, 1);
/// places.release_many(2).await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "a semaphore does nothing until permits are acquired"]
pub struct UnownedSemaphore {
    handle: Arc<Handle>,
    key: LockKey,
    options: LockOptions,
    total: Option<u32>,
}

impl UnownedSemaphore {
    pub(crate) fn new(handle: Arc<Handle>, key: LockKey) -> UnownedSemaphore {
        UnownedSemaphore {
            handle,
            key,
            options: LockOptions::new().fixed_lease(UNDONE_WITHIN),
            total: None,
        }
    }

    /// Sets the initial number of permits, unless it is set already. Without this option an unset semaphore has no
    /// permits, and an acquire waits until the number is set.
    pub fn permits(mut self, total: u32) -> UnownedSemaphore {
        self.total = Some(total);
        self
    }

    option_methods! {
        wait,
        max_waiters,
        group,
    }

    fn with(mut self, change: impl FnOnce(LockOptions) -> LockOptions) -> UnownedSemaphore {
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
        self.key.check()?;
        self.asks(1).check()?;
        self.handle.shared().capabilities.require(Kind::Unowned)
    }

    /// Acquires one permit if one is available, without waiting: asks the store once.
    ///
    /// # Errors
    ///
    /// [`Error::NotAcquired`] when no permit is available, and every error of [`acquire`](Self::acquire).
    ///
    /// Cancel safe: dropped at any point it leaves no permit taken.
    #[track_caller]
    pub fn try_acquire(&self) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        self.take(1, true, Location::caller())
    }

    /// Acquires `permits` permits if they are available, all or none, without waiting.
    ///
    /// # Errors
    ///
    /// As for [`try_acquire`](Self::try_acquire), and [`Error::InvalidOption`] for zero permits or more than
    /// 2,147,483,647. Cancel safe, likewise.
    #[track_caller]
    pub fn try_acquire_many(&self, permits: u32) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        self.take(permits, true, Location::caller())
    }

    /// Acquires one permit, waiting as long as [`wait`](Self::wait) allows.
    ///
    /// # Errors
    ///
    /// As for [`Semaphore::acquire`](super::Semaphore::acquire). When it fails, no permit was taken, or the taken
    /// permits are released in the background.
    ///
    /// Cancel safe: dropped at any point it leaves no permit taken and no subscription, and a wake-up that it
    /// consumed goes to the next waiter.
    #[track_caller]
    pub fn acquire(&self) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        self.take(1, false, Location::caller())
    }

    /// Acquires `permits` permits, all or none, waiting as long as [`wait`](Self::wait) allows.
    ///
    /// # Errors
    ///
    /// As for [`acquire`](Self::acquire), and [`Error::InvalidOption`] for zero permits or more than 2,147,483,647. Cancel
    /// safe, likewise.
    #[track_caller]
    pub fn acquire_many(&self, permits: u32) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        self.take(permits, false, Location::caller())
    }

    fn asks(&self, amount: u32) -> Options {
        Options {
            kind: Kind::Unowned,
            permits: Some(Permits {
                amount,
                total: self.total,
                limit: None,
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
    ) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        let call = AcquireCall::new(&self.handle, &self.key, self.asks(amount), once, by);
        async move { call.run().await?.leave_taken() }
    }

    /// Releases one permit, whichever process took it.
    ///
    /// # Errors
    ///
    /// As for [`release_many`](Self::release_many). Cancel safe, likewise.
    pub async fn release(&self) -> Result<(), Error> {
        self.release_many(1).await
    }

    /// Releases `permits` permits, whichever process took them: the number of available permits grows.
    ///
    /// # Errors
    ///
    /// [`Error::NoPermitsSet`] while the number of permits is not set, so that none can have been taken: nothing
    /// changes; [`Error::InvalidOption`] for zero permits or for more than the maximum; [`Error::InvalidKey`],
    /// [`Error::KeyTaken`], or a failure of the store that lasts for
    /// [`retry_for`](crate::LockClientBuilder::retry_for). After [`Error::OutcomeUnknown`] they were released once or
    /// not at all.
    ///
    /// Cancel safe: once polled, the operation is carried out once, even if its reply is lost or this future is
    /// dropped.
    pub async fn release_many(&self, permits: u32) -> Result<(), Error> {
        self.number().give(permits).await.map(drop)
    }

    /// Takes all available permits; returns how many.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::KeyTaken`], or a failure of the store that lasts. After
    /// [`Error::OutcomeUnknown`] they were taken once or not at all.
    ///
    /// Cancel safe only in that it is carried out once: if this future is dropped half way, the permits are taken.
    pub async fn drain(&self) -> Result<u64, Error> {
        self.number().drain().await
    }

    /// Returns how many permits are available: below zero if more were removed than were available, and zero while the
    /// number is not set.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::KeyTaken`], or a failure of the store that lasts. Cancel safe.
    pub async fn available(&self) -> Result<i64, Error> {
        self.number().available().await
    }

    /// Sets the number of permits if it is not set; returns `false` if it was.
    ///
    /// # Errors
    ///
    /// As for [`add_permits`](Self::add_permits). Cancel safe, likewise.
    pub async fn try_set_permits(&self, total: u32) -> Result<bool, Error> {
        self.number().set(total, true).await
    }

    /// Adds permits; an unset number counts as zero.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOption`] for zero permits or for more than the maximum, [`Error::InvalidKey`],
    /// [`Error::KeyTaken`], or a failure of the store that lasts. After [`Error::OutcomeUnknown`] they were added once
    /// or not at all.
    ///
    /// Cancel safe: once polled, the operation is carried out once, even if its reply is lost or this future is
    /// dropped.
    pub async fn add_permits(&self, permits: u32) -> Result<SemaphoreStatus, Error> {
        self.number().add(i64::from(permits), permits).await
    }

    /// Removes permits. The number of taken permits is unknown, so the number of available ones may fall below zero:
    /// then the next acquire succeeds once enough are released.
    ///
    /// # Errors
    ///
    /// [`Error::TooFewPermits`] while the number of permits is not set; and as for [`add_permits`](Self::add_permits).
    /// Cancel safe, likewise.
    pub async fn remove_permits(&self, permits: u32) -> Result<SemaphoreStatus, Error> {
        self.number().add(-i64::from(permits), permits).await
    }

    /// Deletes the semaphore; returns whether there was one.
    ///
    /// # Errors
    ///
    /// As for [`add_permits`](Self::add_permits). Cancel safe, likewise.
    pub async fn delete(&self) -> Result<bool, Error> {
        self.number().delete().await
    }

    fn number(&self) -> Number<'_> {
        Number {
            handle: &self.handle,
            key: &self.key,
            unowned: true,
        }
    }
}

impl fmt::Debug for UnownedSemaphore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnownedSemaphore")
            .field("key", &self.key)
            .field("permits", &self.total)
            .field("options", &self.options)
            .finish()
    }
}
