//! The count-down latch: callers wait until a number of steps is done.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::api::counter::{count, strange};
use crate::base::clock;
use crate::base::moment::Moment;
use crate::engine::evidence::{Evidence, Verdict};
use crate::engine::timing::LONGEST_SLEEP;
use crate::runtime::client::Handle;
use crate::runtime::options::check_duration;
use crate::store::Kind;
use crate::store::counter::{CounterReply, CounterStep};
use crate::{Error, LockKey};

/// The highest count: up to here every store counts exactly.
const HIGHEST: u64 = 1 << 53;
/// The look at the count, in error messages.
const COUNT: &str = "the count of latch";

/// A latch that opens when it is counted down to zero, across all processes; compatible with Redisson's
/// `RCountDownLatch`.
///
/// Created by [`LockClient::latch`](crate::LockClient::latch). One process sets a count, the workers count down, and
/// the waiters continue at zero. A latch that was never set, or was counted down to the end, is *open*: its count is 0,
/// it has no waiters, and a new count may be set. So the process that starts first must set the count before it waits.
///
/// The count has no owner: what a process did not count down before it crashed stays missing. Limit the wait with
/// [`wait_for`](Self::wait_for) where that can happen; it returns `false` when the time is over.
///
/// On Redis and Valkey the number of a semaphore and the count of a latch are the same key, as in Redisson: use no name for both. A
/// step of the one is not refused there, and changes or deletes the number of the other.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// let latch = client.latch("import:2026");
/// latch.try_set_count(2).await?;
///
/// for part in ["a", "b"] {
///     let latch = client.latch("import:2026");
///     tokio::spawn(async move {
///         println!("part {part} is done, {} to go", latch.count_down().await?);
///         Ok::<_, dlock::Error>(())
///     });
/// }
/// latch.wait().await?;
/// assert_eq!(latch.count().await?, 0);
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "a latch does nothing until it is asked to"]
pub struct Latch {
    handle: Arc<Handle>,
    key: LockKey,
}

impl Latch {
    pub(crate) fn new(handle: Arc<Handle>, key: LockKey) -> Latch {
        Latch { handle, key }
    }

    /// Returns the name of the latch.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.key
    }

    /// Checks the name, and that the store has latches, as each operation does.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`] or [`Error::Unsupported`].
    pub fn check(&self) -> Result<(), Error> {
        self.key.check()?;
        self.handle.shared().capabilities.require(Kind::Latch)
    }

    /// Sets the count of an open latch, which closes it; returns `false` if it already has a count, which is kept.
    ///
    /// Use another name for each round: a waiter of the last one that has not seen the latch open yet waits for the new
    /// count.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOption`] for a count of zero or above 2^53, [`Error::InvalidKey`], [`Error::KeyTaken`],
    /// or a failure of the store that lasts for [`retry_for`](crate::LockClientBuilder::retry_for). After
    /// [`Error::OutcomeUnknown`] the count may or may not be set.
    ///
    /// Cancel safe: once polled, the operation is carried out once, even if its reply is lost or this future is
    /// dropped.
    pub async fn try_set_count(&self, count: u64) -> Result<bool, Error> {
        let reason = match count {
            0 => "it is zero: a latch that is not set is open already".to_owned(),
            1..=HIGHEST => {
                return self
                    .changed(CounterStep::SetCount { count }, "setting latch")
                    .await;
            }
            _ => format!("{count} is more than {HIGHEST}"),
        };
        Err(Error::InvalidOption {
            option: "count",
            reason,
        })
    }

    /// Counts down by one and returns the remaining count; at zero all waiters continue.
    ///
    /// # Errors
    ///
    /// [`Error::LatchOpen`] when the count is already zero, which changes nothing; and as for
    /// [`try_set_count`](Self::try_set_count). After [`Error::OutcomeUnknown`] it was counted once or not at all.
    ///
    /// Cancel safe: once polled, the operation is carried out once, even if its reply is lost or this future is
    /// dropped.
    pub async fn count_down(&self) -> Result<u64, Error> {
        match self.step(CounterStep::CountDown, "counting down latch").await? {
            CounterReply::TooFew { .. } => Err(Error::LatchOpen {
                key: self.key.clone(),
            }),
            reply => self.number(reply),
        }
    }

    /// Returns the count; 0 when the latch is open.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::KeyTaken`], or a failure of the store that lasts. Cancel safe.
    pub async fn count(&self) -> Result<u64, Error> {
        let reply = self.step(CounterStep::Count, COUNT).await?;
        self.number(reply)
    }

    /// Opens the latch whatever its count is, so that all waiters continue; returns whether it had a count.
    ///
    /// # Errors
    ///
    /// As for [`try_set_count`](Self::try_set_count).
    ///
    /// Cancel safe: once polled, the operation is carried out once, even if its reply is lost or this future is
    /// dropped.
    pub async fn delete(&self) -> Result<bool, Error> {
        self.changed(CounterStep::DeleteLatch, "the deletion of latch")
            .await
    }

    /// Waits until the latch is open; returns at once if it is. A waiter is notified by a message. It checks again
    /// after a broken connection and every 30 s.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::KeyTaken`], [`Error::ClientClosed`], or a failure of the store that lasts for
    /// [`retry_for`](crate::LockClientBuilder::retry_for).
    ///
    /// Cancel safe: a dropped wait leaves nothing behind.
    pub async fn wait(&self) -> Result<(), Error> {
        self.handle.with_timers(self.wait_until(None)).await.map(drop)
    }

    /// Waits until the latch is open, at most this long. **Returns `false` if it is still closed by then: that is no
    /// error, so `wait_for(…).await?;` alone goes on before the work is done.** Look at the value.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// # use std::time::Duration;
    /// # let client = dlock::LockClient::memory();
    /// # client.latch("import:2026").try_set_count(1).await?;
    /// # const AN_HOUR: Duration = Duration::from_millis(10);
    /// let import = client.latch("import:2026");
    /// if !import.wait_for(AN_HOUR).await? {
    ///     println!("{} parts are missing: nothing is published", import.count().await?);
    ///     return Ok(());
    /// }
    /// println!("publishing");
    /// # unreachable!("it was closed");
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`wait`](Self::wait), and [`Error::InvalidOption`] for a time of zero or more than a year.
    /// [`Error::Unreachable`] when the store did not answer in that time, or at its end, where it is asked once more if the wait
    /// is long enough: the latch may be open.
    ///
    /// Cancel safe: a dropped wait leaves nothing behind.
    pub async fn wait_for(&self, most: Duration) -> Result<bool, Error> {
        check_duration("wait", Some(most))?;
        let opened = self.wait_until(Some(clock::now() + most));
        self.handle.with_timers(opened).await
    }

    async fn wait_until(&self, until: Option<Instant>) -> Result<bool, Error> {
        let over = async {
            match until {
                Some(until) => clock::sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        let shared = self.handle.shared();
        let started = Moment::now();
        let looks = Mutex::new(Evidence::default());
        tokio::select! {
            biased;
            () = shared.closing.given() => Err(Error::ClientClosed),
            opened = self.opened(&looks, until) => opened.map(|()| true),
            () = over => match looks.into_inner().verdict(started, Moment::now(), false) {
                Verdict::NotAcquired { .. } => Ok(false),
                Verdict::Failed(error) => Err(error.into_error(COUNT, &self.key)),
            },
        }
    }

    /// Waits for the latch to open, and looks once more shortly before `until`, in case a notification was lost. `looks` has
    /// when the store was asked, and that it was closed.
    async fn opened(&self, looks: &Mutex<Evidence>, until: Option<Instant>) -> Result<(), Error> {
        let shared = self.handle.shared();
        let mut watch = None;
        loop {
            looks.lock().asks(Moment::now());
            if self.count().await? == 0 {
                return Ok(());
            }
            let last_look = {
                let mut looks = looks.lock();
                looks.is_busy(None, Moment::now());
                until.map(|until| looks.last_look(Moment::of(until)))
            };
            // The first notification means "you are subscribed, check now", so nothing is missed in between. A
            // notification during a check leads to another one.
            let watch =
                watch.get_or_insert_with(|| shared.call_watch(Kind::Latch, &self.key, shared.next_grant()));
            let till_then = last_look.map(|look| look.since(Moment::now()));
            let sleep = till_then.filter(|left| !left.is_zero()).unwrap_or(LONGEST_SLEEP);
            let _ = tokio::time::timeout(sleep.min(LONGEST_SLEEP), watch.changed()).await;
        }
    }

    async fn step(&self, step: CounterStep, what: &str) -> Result<CounterReply, Error> {
        count(&self.handle, &self.key, step, what).await
    }

    async fn changed(&self, step: CounterStep, what: &str) -> Result<bool, Error> {
        match self.step(step, what).await? {
            CounterReply::Done(done) => Ok(done),
            reply => Err(strange(what, &self.key, reply)),
        }
    }

    fn number(&self, reply: CounterReply) -> Result<u64, Error> {
        match reply {
            CounterReply::Number(number) => Ok(number),
            reply => Err(strange(COUNT, &self.key, reply)),
        }
    }
}

impl fmt::Debug for Latch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Latch")
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}
