//! Work that is done once in each slot of time.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::run::{self, Admitted, Carried};
use super::slots::Slots;
use super::{DEFAULT_KEEP, Once, OnceClaim, OnceError, stored};
use crate::base::moment::LONGEST_LEASE;
use crate::runtime::options::check_duration;
use crate::store::records::{RecordKey, SlotOutcome, SlotRequest};
use crate::{Error, LockKey};

/// The shortest period.
const SHORTEST: Duration = Duration::from_millis(10);

/// Work that is done once in each slot of time, however many processes ask for it and whatever their clocks show;
/// created by [`Once::every`].
///
/// The slots begin at the multiples of the period since the Unix epoch, **by the store's clock**. The work has one
/// record, which stores its last slot. So no slot is done twice, and no two slots are done at the same time. A slot
/// that begins while the work of an earlier one still runs is skipped ([`SlotReply::Elsewhere`]), as is one that no
/// process asks for.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock::{LockClient, SlotReply};
/// use std::time::Duration;
///
/// let client = LockClient::memory();
/// let poll = client.once("poll").every(Duration::from_secs(300));
/// // In the tick of a scheduler, of each process:
/// match poll.run(async |_claim| Ok::<_, String>("polled".to_owned())).await? {
///     SlotReply::Ran(what) => println!("{what}"),
///     SlotReply::Earlier(_) | SlotReply::Elsewhere { .. } | SlotReply::Missed { .. } => {} // another process does it
///     _ => {}
/// }
/// # assert!(matches!(poll.run(async |_| Ok::<_, String>(String::new())).await?, SlotReply::Earlier(what) if what == "polled"));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[must_use = "nothing is done until it runs"]
pub struct OnceEvery {
    once: Once,
    period: Duration,
}

/// Work for one slot that the caller names, such as the nominal time of a scheduler; created by [`Once::slot`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock::{LockClient, SlotReply};
/// use std::time::{Duration, SystemTime};
///
/// let client = LockClient::memory();
/// let fired_at = SystemTime::now() - Duration::from_secs(1); // as the scheduler says
/// let report = client.once("report").slot(fired_at);
/// assert!(matches!(report.run(async |_| Ok::<_, String>(42)).await?, SlotReply::Ran(42)));
///
/// let before = client.once("report").slot(fired_at - Duration::from_secs(60));
/// assert!(matches!(before.run(async |_| Ok::<_, String>(42)).await?, SlotReply::Missed { .. }));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[must_use = "nothing is done until it runs"]
pub struct OnceSlot {
    once: Once,
    slot: SlotRequest,
    period: Option<Duration>,
}

/// The outcome of a call for a slot.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock::{LockClient, SlotReply};
/// use std::time::Duration;
///
/// let poll = LockClient::memory().once("poll").every(Duration::from_secs(300));
/// let reply = poll.run(async |_| Ok::<_, String>(3)).await?;
/// assert!(matches!(reply, SlotReply::Ran(3)));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum SlotReply<T> {
    /// The work of the slot ran here, and its result is kept until a later slot is claimed.
    Ran(T),
    /// The work of the slot was done before: this is its result.
    Earlier(T),
    /// The work runs elsewhere: for this slot, or for an earlier one that takes longer than the period. In the latter
    /// case this slot is skipped, unless a process asks for it again before the next one.
    #[non_exhaustive]
    Elsewhere {
        /// The slot that was asked for.
        slot: SystemTime,
        /// The slot whose work runs.
        running: SystemTime,
        /// The number of that attempt.
        attempt: u32,
        /// The rest of its lease, unless it is renewed.
        remaining: Duration,
    },
    /// A later slot was claimed before, or this one is older than [`Once::keep`]: it is not done any more.
    #[non_exhaustive]
    Missed {
        /// The slot that was asked for.
        slot: SystemTime,
        /// The last slot that was claimed, if known.
        last: Option<SystemTime>,
    },
    /// The work of the slot ran here, but the store did not confirm its result in time; see
    /// [`OnceReply::Unrecorded`](super::OnceReply::Unrecorded).
    Unrecorded(T, Error),
}

impl<T> SlotReply<T> {
    /// Returns the result, if there is one.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let poll = dlock::LockClient::memory().once("poll").every(std::time::Duration::from_secs(300));
    /// assert_eq!(poll.run(async |_| Ok::<_, String>(3)).await?.into_result(), Some(3));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn into_result(self) -> Option<T> {
        match self {
            SlotReply::Ran(value) | SlotReply::Earlier(value) | SlotReply::Unrecorded(value, _) => {
                Some(value)
            }
            SlotReply::Elsewhere { .. } | SlotReply::Missed { .. } => None,
        }
    }

    /// Returns whether the work ran here.
    #[must_use]
    pub fn ran_here(&self) -> bool {
        matches!(self, SlotReply::Ran(_) | SlotReply::Unrecorded(..))
    }
}

impl Once {
    /// Does the work once in each slot of time. Slots begin at the multiples of the period since the Unix epoch, by the
    /// store's clock. For one name, use either slots with one period or no slots.
    ///
    /// `keep` is at least two periods; by default a day, or three periods where that is longer, and at most a year. So
    /// the period is at most half a year; it has whole microseconds and at least 10 ms.
    pub fn every(self, period: Duration) -> OnceEvery {
        let three = period.saturating_mul(3).min(LONGEST_LEASE);
        let keep = self.keep.unwrap_or_else(|| DEFAULT_KEEP.max(three));
        OnceEvery {
            once: self.keep(keep),
            period,
        }
    }

    /// Does the work once in the slot that begins at `time`: the nominal time at which a scheduler meant to fire, the
    /// same in every process. **Not the present**, which differs between processes: for that there is
    /// [`every`](Self::every).
    ///
    /// `keep` must be longer than the time between two slots, and longer than a firing may be late: an older slot is
    /// [missed](SlotReply::Missed).
    pub fn slot(self, time: SystemTime) -> OnceSlot {
        OnceSlot {
            once: self,
            slot: SlotRequest::at(time),
            period: None,
        }
    }
}

impl OnceEvery {
    /// Returns the name of the work.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        self.once.key()
    }

    /// Returns the time between two slots.
    #[must_use]
    pub fn period(&self) -> Duration {
        self.period
    }

    /// Returns the name of its record, see [`Once::record_key`].
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`].
    pub fn record_key(&self) -> Result<RecordKey, Error> {
        self.once.record_key()
    }

    /// Checks name, options and store, as each call does.
    ///
    /// # Errors
    ///
    /// Those of [`Once::check`].
    pub fn check(&self) -> Result<(), Error> {
        self.nearest().check()
    }

    /// Does the work of the slot whose beginning is **nearest** to the store's present time, unless it was done: for an
    /// external scheduler, whose ticks come a little before or after the beginning of a slot. The result is kept as
    /// JSON, as by [`Once::run`].
    ///
    /// # Errors
    ///
    /// See [`OnceError`].
    ///
    /// # Cancel safety
    ///
    /// As [`Once::run`].
    pub fn run<T, E, W, Fut>(
        &self,
        work: W,
    ) -> impl Future<Output = Result<SlotReply<T>, OnceError<E>>> + use<T, E, W, Fut>
    where
        T: Serialize + DeserializeOwned,
        W: FnOnce(OnceClaim) -> Fut,
        Fut: Future<Output = Result<T, E>>,
    {
        self.nearest().run(work)
    }

    /// Returns the slots to come, one after the other: dlock's own loop, which sleeps until the store's next slot
    /// begins.
    pub fn slots(&self) -> Slots {
        Slots::new(self.clone())
    }

    fn nearest(&self) -> OnceSlot {
        self.of(SlotRequest::nearest(self.period))
    }

    fn of(&self, slot: SlotRequest) -> OnceSlot {
        OnceSlot {
            once: self.once.clone(),
            slot,
            period: Some(self.period),
        }
    }

    /// Returns the work of the slot that begins at `time`, for a scheduler that knows both the period and the time for
    /// which it fires: like [`Once::slot`], but the slot may be one period ahead of the slot nearest to the store's clock,
    /// and slots that were left out are counted.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use dlock::{LockClient, SlotReply};
    /// use std::time::{Duration, SystemTime};
    ///
    /// let poll = LockClient::memory().once("poll").every(Duration::from_secs(300));
    /// let fired_for = SystemTime::now();
    /// assert!(matches!(poll.slot(fired_for).run(async |_| Ok::<_, String>(3)).await?, SlotReply::Ran(3)));
    /// # Ok(()) }
    /// ```
    pub fn slot(&self, time: SystemTime) -> OnceSlot {
        self.of(SlotRequest::at(time).with_period(self.period))
    }

    pub(super) fn once(&self) -> &Once {
        &self.once
    }
}

impl OnceSlot {
    /// Returns the name of the work.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        self.once.key()
    }

    /// Returns the name of its record, which all slots of the work share; see [`Once::record_key`].
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`].
    ///
    /// ```
    /// # fn main() -> Result<(), dlock::Error> {
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let report = dlock::LockClient::memory().once("report");
    /// let slot = report.clone().slot(std::time::SystemTime::now());
    /// assert_eq!(slot.record_key()?, report.record_key()?);
    /// # Ok(()) })
    /// # }
    /// ```
    pub fn record_key(&self) -> Result<RecordKey, Error> {
        self.once.record_key()
    }

    /// Does the work of the slot, unless it was done or a later one was begun. The result is kept as JSON, as by
    /// [`Once::run`].
    ///
    /// # Errors
    ///
    /// See [`OnceError`].
    ///
    /// # Cancel safety
    ///
    /// As [`Once::run`].
    pub fn run<T, E, W, Fut>(
        &self,
        work: W,
    ) -> impl Future<Output = Result<SlotReply<T>, OnceError<E>>> + use<T, E, W, Fut>
    where
        T: Serialize + DeserializeOwned,
        W: FnOnce(OnceClaim) -> Fut,
        Fut: Future<Output = Result<T, E>>,
    {
        let run = self.clone().run_with_time(work);
        async move { run.await.map(|(reply, _)| reply).map_err(|(error, _)| error) }
    }

    /// Checks name, options and store, as each call does. Not the time: only the store's clock knows how far ahead a slot is.
    ///
    /// # Errors
    ///
    /// Those of [`Once::check`], and [`Error::InvalidOption`] for a wrong period.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// use dlock::LockClient;
    /// use std::time::{Duration, SystemTime};
    ///
    /// // When the program starts, not at the first firing:
    /// let report = LockClient::memory().once("report").keep(Duration::ZERO);
    /// assert!(report.slot(SystemTime::now()).check().is_err());
    /// # }
    /// ```
    pub fn check(&self) -> Result<(), Error> {
        let keep = self.once.keep_or_default();
        if let Some(period) = self.period {
            check_duration("every", Some(period))?;
            if period < SHORTEST || period.subsec_nanos() % 1000 != 0 {
                let reason = format!("{period:?} is not at least {SHORTEST:?}, in whole microseconds");
                return Err(Error::invalid_option("every", &reason));
            }
            if period > LONGEST_LEASE / 2 {
                let reason = format!(
                    "{period:?} is more than half a year: a slot is kept for two periods, and for a year at most"
                );
                return Err(Error::invalid_option("every", &reason));
            }
            if keep < 2 * period {
                let reason = format!("{keep:?} is less than two periods of {period:?}");
                return Err(Error::invalid_option("keep", &reason));
            }
        }
        self.once.check()
    }

    /// Runs the work; also returns the store's present time, if it was learnt.
    pub(super) async fn run_with_time<T, E, W, Fut>(self, work: W) -> Timed<T, E>
    where
        T: Serialize + DeserializeOwned,
        W: FnOnce(OnceClaim) -> Fut,
        Fut: Future<Output = Result<T, E>>,
    {
        let once = &self.once;
        let admitted = async {
            self.check()?;
            let mut target = once.target()?;
            // Counted from the beginning of the slot, which may be in the future.
            target.keep += self.slot.longest_ahead();
            let target = Arc::new(target);
            let admitted = once.admitted(&target, Some(self.slot)).await?;
            Ok::<_, Error>((target, admitted))
        };
        let (target, (admitted, reply)) = admitted.await.map_err(|error| (error.into(), None))?;
        let Some(seen) = reply else {
            return Err((once.told(run::strange()).into(), None));
        };
        let (slot, last, now) = (seen.slot, seen.last, seen.now);
        let reply = match admitted {
            Admitted::Claimed(claim) => match once.carried_out(&target, claim, work).await {
                Ok(Carried::Ran(value)) => Ok(SlotReply::Ran(value)),
                Ok(Carried::Unrecorded(value, error)) => Ok(SlotReply::Unrecorded(value, error)),
                // The work took an unknown time, so the present time is no longer known.
                Err(error) => return Err((error, None)),
            },
            Admitted::Done(bytes) => stored::earlier(&bytes).map(SlotReply::Earlier),
            Admitted::Elsewhere { attempt, remaining } => Ok(SlotReply::Elsewhere {
                slot,
                running: last.unwrap_or(slot),
                attempt,
                remaining,
            }),
            Admitted::Orphaned { attempt } => Err(OnceError::Orphaned { attempt }),
            Admitted::NotNow => match seen.outcome {
                SlotOutcome::Missed => Ok(SlotReply::Missed { slot, last }),
                SlotOutcome::ClockWentBack => Err(OnceError::ClockWentBack {
                    stored: last.unwrap_or(slot),
                    now,
                }),
                SlotOutcome::TooFarAhead => Err(OnceError::SlotTooFarAhead { slot, now }),
                SlotOutcome::Claim(_) => Err(once.told(run::strange()).into()),
            },
        };
        match reply {
            Ok(reply) if reply.ran_here() => Ok((reply, None)),
            Ok(reply) => Ok((reply, Some(now))),
            Err(error) => Err((error, Some(now))),
        }
    }
}

/// A reply, and the store's present time if known.
type Timed<T, E> = Result<(SlotReply<T>, Option<SystemTime>), (OnceError<E>, Option<SystemTime>)>;
