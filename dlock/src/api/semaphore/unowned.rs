//! The semaphore that keeps no account of who has its permits.

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

/// For how long the store remembers that permits were taken, so that taking them can be undone.
const UNDONE_WITHIN: Duration = Duration::from_secs(60);

/// A number of permits across all processes that is taken from and added to, by name; Redisson's `RSemaphore`.
///
/// Made by [`LockClient::unowned_semaphore`](crate::LockClient::unowned_semaphore). **Permits have no owner and
/// no lease: what a process took and did not give back before it crashed is gone**, until somebody adds as many;
/// and anybody may give back what nobody took. Use a [`Semaphore`](super::Semaphore), unless you share this one
/// with services that use Redisson's, or hand permits from one process to another.
///
/// Every step is carried out once, however often it had to be sent. An acquire that is dropped, or of which
/// nobody can tell in time whether the store took the permits, is undone in the background, as long as the
/// store comes back within a minute.
///
/// Those who wait in one process are served in the order in which they came; there is no order between
/// processes, as in Redisson: who asks for many may be passed over by those who ask for few.
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

    /// How many permits there are in the beginning, where nobody has said so yet. The number is not said by
    /// default, and such a semaphore is waited for until somebody says it.
    pub fn permits(mut self, total: u32) -> UnownedSemaphore {
        self.total = Some(total);
        self
    }

    option_methods! {
        wait,
        max_waiters,
    }

    fn with(mut self, change: impl FnOnce(LockOptions) -> LockOptions) -> UnownedSemaphore {
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
        self.key.check()?;
        self.asks(1).check()
    }

    /// Takes one permit if one is free, without waiting for anybody: asks the store once.
    ///
    /// # Errors
    ///
    /// [`Error::NotAcquired`] when none is free, and everything that [`acquire`](Self::acquire) may answer.
    ///
    /// Cancel safe: dropped at any point it leaves no permit taken.
    #[track_caller]
    pub fn try_acquire(&self) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        self.take(1, true, Location::caller())
    }

    /// Takes so many permits if they are free, all or none, without waiting for anybody.
    ///
    /// # Errors
    ///
    /// As for [`try_acquire`](Self::try_acquire), and [`Error::InvalidOption`] for none at all. Cancel safe,
    /// likewise.
    #[track_caller]
    pub fn try_acquire_many(&self, permits: u32) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        self.take(permits, true, Location::caller())
    }

    /// Takes one permit, and waits for it as long as [`wait`](Self::wait) allows.
    ///
    /// # Errors
    ///
    /// As for [`Semaphore::acquire`](super::Semaphore::acquire). Whenever it fails no permit was taken, or what
    /// was taken is given back in the background.
    ///
    /// Cancel safe: dropped at any point it leaves no permit taken and no subscription, and a wake-up that it
    /// consumed goes to the next waiter.
    #[track_caller]
    pub fn acquire(&self) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        self.take(1, false, Location::caller())
    }

    /// Takes so many permits, all or none, and waits for them as long as [`wait`](Self::wait) allows.
    ///
    /// # Errors
    ///
    /// As for [`acquire`](Self::acquire), and [`Error::InvalidOption`] for none at all. Cancel safe, likewise.
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
        let call = AcquireCall {
            handle: self.handle.clone(),
            key: self.key.clone(),
            options: self.asks(amount),
            once,
            by,
        };
        async move {
            call.run().await?.leave_taken();
            Ok(())
        }
    }

    /// Gives one permit back, whoever took it.
    ///
    /// # Errors
    ///
    /// As for [`release_many`](Self::release_many). Cancel safe, likewise.
    pub async fn release(&self) -> Result<(), Error> {
        self.release_many(1).await
    }

    /// Gives so many permits back, whoever took them: the number of free ones grows.
    ///
    /// # Errors
    ///
    /// [`Error::NoPermitsSet`] where nobody has said how many permits there are, so that none can have been
    /// taken, which changes nothing; [`Error::InvalidOption`] for none at all or for more than can be;
    /// [`Error::InvalidKey`], [`Error::KeyTaken`], or a failure of the store that lasts for
    /// [`retry_for`](crate::LockClientBuilder::retry_for). After [`Error::OutcomeUnknown`] they were given back
    /// once or not at all.
    ///
    /// Cancel safe: once polled, the step is carried out once, also when its answer is lost or this is dropped.
    pub async fn release_many(&self, permits: u32) -> Result<(), Error> {
        self.number().give(permits).await.map(drop)
    }

    /// Takes all permits that are free, and answers how many they were.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::KeyTaken`], or a failure of the store that lasts. After
    /// [`Error::OutcomeUnknown`] they were taken once or not at all.
    ///
    /// Cancel safe only in that it is carried out once: dropped half way, the permits are taken.
    pub async fn drain(&self) -> Result<u64, Error> {
        self.number().drain().await
    }

    /// How many permits are free: below zero where more were taken away than were free, and zero where nobody
    /// has said how many there are.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::KeyTaken`], or a failure of the store that lasts. Cancel safe.
    pub async fn available(&self) -> Result<i64, Error> {
        self.number().available().await
    }

    /// Says how many permits there are, where nobody has; `false` where somebody had.
    ///
    /// # Errors
    ///
    /// As for [`add_permits`](Self::add_permits). Cancel safe, likewise.
    pub async fn try_set_permits(&self, total: u32) -> Result<bool, Error> {
        self.number().set(total, true).await
    }

    /// Adds permits; where nobody has said how many there are, there are so many from now on.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOption`] for none at all or for more than can be, [`Error::InvalidKey`],
    /// [`Error::KeyTaken`], or a failure of the store that lasts. After [`Error::OutcomeUnknown`] they were
    /// added once or not at all.
    ///
    /// Cancel safe: once polled, the step is carried out once, also when its answer is lost or this is dropped.
    pub async fn add_permits(&self, permits: u32) -> Result<SemaphoreStatus, Error> {
        self.number().add(i64::from(permits), permits).await
    }

    /// Takes permits away. Nobody knows how many were taken by others, so the number may fall below zero: then
    /// the next are given out when enough have come back.
    ///
    /// # Errors
    ///
    /// [`Error::TooFewPermits`] where nobody has said how many there are; and as for
    /// [`add_permits`](Self::add_permits). Cancel safe, likewise.
    pub async fn remove_permits(&self, permits: u32) -> Result<SemaphoreStatus, Error> {
        self.number().add(-i64::from(permits), permits).await
    }

    /// Forgets the semaphore; whether there was one.
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
