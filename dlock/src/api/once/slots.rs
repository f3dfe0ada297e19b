//! The slots of a process, one after the other.

use std::future::Future;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::claim::{self, retried};
use super::slot::{OnceEvery, SlotReply};
use super::{OnceClaim, OnceError};
use crate::Error;
use crate::base::clock;
use crate::runtime::outside::{is_outside, with_timers_of};

/// How long a reading of the store's clock is used: in that time the clocks of two machines drift a millisecond apart.
const BELIEVED: Duration = Duration::from_secs(60);
/// After a longer sleep, the store's clock is read once more this long before a slot begins.
const BEFORE: Duration = Duration::from_secs(20);
/// The longest pause after a failure to read the store's clock.
const PAUSE: Duration = Duration::from_secs(1);
/// The shortest.
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);

/// The slots to come; created by [`OnceEvery::slots`].
///
/// The first one is the first slot that begins after the first call of [`next`](Self::next). Slots that pass while the
/// work of the last one runs are left out.
///
/// ```no_run
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::{LockClient, OnceError, SlotReply};
/// use std::time::Duration;
///
/// # async fn poll() -> Result<u64, std::io::Error> { Ok(0) }
/// let client = LockClient::connect("redis://localhost").await?;
/// let mut slots = client.once("poll").every(Duration::from_secs(300)).slots();
/// loop {
///     match slots.next(async |_claim| poll().await).await {
///         Ok(SlotReply::Ran(rows)) => println!("{rows} rows"),
///         Ok(SlotReply::Unrecorded(rows, error)) => eprintln!("{rows} rows, may run again: {error}"),
///         Ok(_) => {} // another process did it, or does it
///         Err(OnceError::Store(error @ (dlock::Error::Draining | dlock::Error::ClientClosed))) => return Err(error),
///         Err(error) => eprintln!("{error}"), // the next call waits for the next slot
///     }
/// }
/// # }
/// ```
#[derive(Debug)]
#[must_use = "nothing is done until the next slot is waited for"]
pub struct Slots {
    every: OnceEvery,
    clock: Option<Reading>,
    /// The last slot that was asked for, since the epoch.
    last: Option<Duration>,
    /// The slot that a call waits for, or waited for when it was dropped.
    aimed: Option<Duration>,
    /// After a failure: until when the next call waits.
    paused_until: Option<Instant>,
}

/// A reading of the store's clock.
#[derive(Debug, Clone, Copy)]
struct Reading {
    /// The time of arrival here; the store's clock showed its value earlier.
    at: Instant,
    store: Duration,
}

impl Reading {
    fn new(store: SystemTime) -> Reading {
        Reading {
            at: clock::now(),
            store: store.duration_since(UNIX_EPOCH).unwrap_or_default(),
        }
    }

    /// A lower bound of what the store's clock shows now, so that a slot does not begin before its time.
    fn now(&self) -> Duration {
        self.store + clock::now().saturating_duration_since(self.at)
    }

    fn is_fresh(&self) -> bool {
        clock::now().saturating_duration_since(self.at) < BELIEVED
    }
}

impl Slots {
    pub(super) fn new(every: OnceEvery) -> Slots {
        Slots {
            every,
            clock: None,
            last: None,
            aimed: None,
            paused_until: None,
        }
    }

    /// Sleeps until the next slot begins by the store's clock, and does its work unless another process has done or
    /// begun it. If that process crashes, the slot has no result, unless a [`wait`](super::Once::wait) makes this
    /// process take over. The result is kept as JSON, as by [`Once::run`](super::Once::run).
    ///
    /// # Errors
    ///
    /// See [`OnceError`]. After any error the next call waits for the next slot; if no slot had begun, as where an option is
    /// invalid or the store's clock could not be read, a second or a period after the error, and 100 ms at least. Outside of tokio it cannot sleep once the client has ended: end the
    /// loop at [`Error::ClientClosed`](crate::Error::ClientClosed) and [`Error::Draining`](crate::Error::Draining).
    ///
    /// # Cancel safety
    ///
    /// Dropped while it sleeps or asks for the slot, it has done nothing, and the next call is for the same slot, or for a
    /// later one that has begun by then. A claim that was granted meanwhile is released; until the release has arrived, which
    /// takes longer after a connection has broken, callers are told that the slot is done elsewhere. After that, as
    /// [`Once::run`](super::Once::run).
    pub async fn next<T, E, W, Fut>(&mut self, work: W) -> Result<SlotReply<T>, OnceError<E>>
    where
        T: Serialize + DeserializeOwned,
        W: FnOnce(OnceClaim) -> Fut,
        Fut: Future<Output = Result<T, E>>,
    {
        let runtime = self.every.once().runtime();
        let outside = is_outside();
        let slot = match with_timers_of(&runtime, self.begin(outside)).await {
            Ok(slot) => slot,
            Err(error) => {
                let pause = self.every.period().clamp(SHORTEST_PAUSE, PAUSE);
                self.paused_until = Some(clock::now() + pause);
                return Err(error.into());
            }
        };
        self.aimed = Some(slot);
        let run = self.every.slot(UNIX_EPOCH + slot).run_with_time(|claim| {
            // Dropped before, the next call asks for this slot again.
            (self.last, self.aimed) = (Some(slot), None);
            work(claim)
        });
        let result = run.await;
        (self.last, self.aimed) = (Some(slot), None);
        let now = match &result {
            Ok((_, now)) | Err((_, now)) => *now,
        };
        if let Some(now) = now {
            self.clock = Some(Reading::new(now));
        }
        result.map(|(reply, _)| reply).map_err(|(error, _)| error)
    }

    /// Sleeps until the next slot begins, and returns its beginning.
    async fn begin(&mut self, outside: bool) -> Result<Duration, Error> {
        let period = self.every.period();
        if let Some(until) = self.paused_until {
            self.pause(until, outside).await;
            self.paused_until = None;
        }
        self.every.check()?;
        let mut reading = match self.clock {
            Some(reading) if reading.is_fresh() => reading,
            // Without an answer the old reading is still usable.
            old => match self.read().await {
                Ok(reading) => reading,
                Err(error) => old.ok_or(error)?,
            },
        };
        let begun = floor(reading.now(), period);
        if self.aimed.is_some_and(|aimed| aimed <= begun) {
            // It began while nobody waited.
            return Ok(begun);
        }
        let mut slot = begun + period;
        if let Some(last) = self.last {
            // Not the same slot twice, and not for ever behind a clock that was set back.
            slot = slot.max((last + period).min(begun + 2 * period));
        }
        self.aimed = Some(slot);
        let far = slot.saturating_sub(reading.now());
        if far > BELIEVED {
            self.sleep(far - BEFORE).await?;
            reading = self.read().await.unwrap_or(reading);
        }
        loop {
            let left = slot.saturating_sub(reading.now());
            if left.is_zero() {
                // If this was asleep for longer, the slots in between are skipped.
                return Ok(slot.max(floor(reading.now(), period)));
            }
            self.sleep(left).await?;
        }
    }

    /// Pauses after an error, also where the client refuses everything; not `outside` of all runtimes once that of the client may
    /// have ended: there are no timers.
    async fn pause(&self, until: Instant, outside: bool) {
        let has_no_timers = || outside && self.every.once().may_have_no_runtime();
        claim::sleep_unless(has_no_timers, until).await;
    }

    async fn sleep(&self, time: Duration) -> Result<(), Error> {
        let target = self.every.once().target()?;
        tokio::select! {
            biased;
            refusal = target.refused() => Err(refusal),
            () = claim::sleep(time) => Ok(()),
        }
    }

    async fn read(&mut self) -> Result<Reading, Error> {
        let once = self.every.once();
        let target = once.target()?;
        let look = tokio::select! {
            biased;
            refusal = target.refused() => return Err(refusal),
            look = retried(&target, || target.records.inspect(&target.record, false)) => look,
        };
        match look {
            Ok(look) => {
                let reading = Reading::new(look.now);
                self.clock = Some(reading);
                Ok(reading)
            }
            Err(error) => Err(once.told(error)),
        }
    }
}

/// The beginning of the slot that contains this time.
fn floor(time: Duration, period: Duration) -> Duration {
    let (time, period) = (micros(time), micros(period).max(1));
    Duration::from_micros(time - time % period)
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
