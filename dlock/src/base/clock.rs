//! The clock by which leases end.
//!
//! All times are [`tokio::time::Instant`]s, so that a paused clock turns every timing rule into a fast and exact test.
//! On Linux that clock stops while the machine is suspended, but a lease does not: the suspended time is added,
//! computed from the difference between the boot-time clock and the monotonic one.

use std::cell::Cell;
#[cfg(not(dlock_sim))]
use std::sync::OnceLock;
#[cfg(all(target_os = "linux", not(dlock_sim)))]
use std::sync::atomic::AtomicI64;
#[cfg(all(any(target_os = "linux", target_vendor = "apple"), not(dlock_sim)))]
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::base::moment::{Moment, nanos};

/// The current time as leases count it: the monotonic clock plus all the time for which the machine was suspended.
pub fn now() -> Instant {
    reading().0
}

/// The current time, and its moment if that is known already.
fn reading() -> (Instant, Option<Moment>) {
    #[cfg(dlock_sim)]
    if let Some(of_store) = crate::base::sim::store_clock() {
        return (of_store.now, None);
    }
    match READING.get() {
        Reading::Each => (read(), None),
        Reading::Next => {
            let now = read();
            let is = moment(now);
            READING.set(Reading::Taken(now, is));
            (now, Some(is))
        }
        Reading::Taken(now, is) => (now, Some(is)),
    }
}

fn read() -> Instant {
    Instant::now() + suspended()
}

/// What [`now`] does on this thread.
#[derive(Clone, Copy)]
enum Reading {
    /// Reads the clock each time.
    Each,
    /// Reads the clock the next time, and keeps the reading.
    Next,
    /// Returns the kept reading.
    Taken(Instant, Moment),
}

thread_local! {
    static READING: Cell<Reading> = const { Cell::new(Reading::Each) };
}

/// Uses one reading of the clock for everything on this thread until this is dropped. For a few steps that neither wait
/// nor run user code: a reading costs as much as all else that they do.
pub(crate) struct OneReading {
    /// A nested one changes nothing.
    is_outermost: bool,
}

/// Reads the clock only once from now on, when the time is first asked for.
pub(crate) fn one_reading() -> OneReading {
    let is_outermost = matches!(READING.get(), Reading::Each);
    if is_outermost {
        READING.set(Reading::Next);
    }
    OneReading { is_outermost }
}

impl Drop for OneReading {
    fn drop(&mut self) {
        if self.is_outermost {
            READING.set(Reading::Each);
        }
    }
}

/// The time since the Unix epoch, from which fencing tokens are derived.
#[cfg(not(dlock_sim))]
pub(crate) fn wall() -> Duration {
    use std::time::{SystemTime, UNIX_EPOCH};

    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The time since the Unix epoch at this instant, by a clock that behaves like leases: it stops while the clock is
/// paused, and cannot be set.
#[cfg(not(dlock_sim))]
pub(crate) fn wall_at(now: Instant) -> Duration {
    static BEGUN: OnceLock<(std::time::Instant, Duration)> = OnceLock::new();
    let now = now.into_std();
    let (begun, wall) = *BEGUN.get_or_init(|| (now, wall()));
    match now.checked_duration_since(begun) {
        Some(since) => wall + since,
        None => wall.saturating_sub(begun - now),
    }
}

#[cfg(dlock_sim)]
pub(crate) fn wall_at(_now: Instant) -> Duration {
    wall()
}

#[cfg(dlock_sim)]
pub(crate) use crate::base::sim::{origin, suspended, wall};

/// Sleeps until [`now`] has reached `deadline`, as precisely as a timer can: a timer set before a suspend fires late,
/// but the clock is right in between.
pub(crate) async fn sleep_until(deadline: Instant) {
    // An unreachable deadline (years away) is still a valid one for the timer wheel.
    let target = deadline.checked_sub(suspended()).unwrap_or(deadline);
    tokio::time::sleep_until(target).await;
}

/// An earlier origin: a paused clock may have started before, and no instant may be before the origin.
#[cfg(not(dlock_sim))]
fn origin() -> std::time::Instant {
    static ORIGIN: OnceLock<std::time::Instant> = OnceLock::new();
    *ORIGIN.get_or_init(|| {
        let now = std::time::Instant::now();
        // Some systems count from boot.
        let earlier = |hours: u64| now.checked_sub(Duration::from_secs(hours * 60 * 60));
        earlier(24).or_else(|| earlier(1)).unwrap_or(now)
    })
}

/// How long the machine was suspended since this process first asked.
#[cfg(all(target_os = "linux", not(dlock_sim)))]
fn suspended() -> Duration {
    use rustix::time::ClockId;

    static SUSPENDED: Suspended = Suspended::new();

    let wall = ahead(ClockId::RealtimeCoarse, ClockId::MonotonicCoarse);
    SUSPENDED.total(wall, slept_ms)
}

/// The known suspended time.
///
/// The two clocks that tell it are as expensive as the current time itself, which is read all the time. So they are
/// read only when the wall clock has moved against the monotonic one, as after a suspend or when it is set. That check
/// costs a fifth: the coarse readings of both are of the same tick and so differ exactly.
#[cfg(all(target_os = "linux", not(dlock_sim)))]
struct Suspended {
    /// How far the wall clock was ahead at the last lookup.
    wall: AtomicI64,
    slept_ms: AtomicU64,
}

#[cfg(all(target_os = "linux", not(dlock_sim)))]
impl Suspended {
    const fn new() -> Suspended {
        Suspended {
            wall: AtomicI64::new(i64::MIN),
            slept_ms: AtomicU64::new(0),
        }
    }

    fn total(&self, wall: i64, look_up: impl FnOnce() -> u64) -> Duration {
        if self.wall.load(Ordering::Acquire) != wall {
            // It only grows, and is written before the flag that marks it as known: a reader of that flag sees it.
            self.slept_ms.fetch_max(look_up(), Ordering::Relaxed);
            self.wall.store(wall, Ordering::Release);
        }
        Duration::from_millis(self.slept_ms.load(Ordering::Relaxed))
    }
}

/// The suspended time by the two clocks; in whole milliseconds, so that it never shows that the readings are not
/// simultaneous.
#[cfg(all(target_os = "linux", not(dlock_sim)))]
fn slept_ms() -> u64 {
    use rustix::time::ClockId;

    static AT_START: OnceLock<i64> = OnceLock::new();

    let ahead = ahead(ClockId::Boottime, ClockId::Monotonic);
    let slept = ahead - *AT_START.get_or_init(|| ahead);
    u64::try_from(slept / 1_000_000).unwrap_or(0)
}

/// How many nanoseconds a clock is ahead of another one. Good for 292 years.
#[cfg(all(target_os = "linux", not(dlock_sim)))]
fn ahead(clock: rustix::time::ClockId, of: rustix::time::ClockId) -> i64 {
    // The nanoseconds are shorter on some machines.
    #[allow(clippy::useless_conversion)]
    let nanos = |id| {
        let t = rustix::time::clock_gettime(id);
        i64::from(t.tv_sec) * 1_000_000_000 + i64::from(t.tv_nsec)
    };
    nanos(clock) - nanos(of)
}

/// How long the machine was suspended since this process first asked: the clock of `Instant` stands still meanwhile
/// (`CLOCK_UPTIME_RAW`), the clock that is read first runs on. So a pause between the two readings never looks like a suspend.
#[cfg(all(target_vendor = "apple", not(dlock_sim)))]
fn suspended() -> Duration {
    static AT_START: OnceLock<i128> = OnceLock::new();
    static SLEPT_MS: AtomicU64 = AtomicU64::new(0);

    let runs_on = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let stands_still = std::time::Instant::now().saturating_duration_since(origin());
    let runs_on = i128::from(runs_on.tv_sec) * 1_000_000_000 + i128::from(runs_on.tv_nsec);
    let ahead = runs_on - stands_still.as_nanos() as i128;
    let slept = ahead - *AT_START.get_or_init(|| ahead);
    let slept = u64::try_from(slept / 1_000_000).unwrap_or(0);
    Duration::from_millis(SLEPT_MS.fetch_max(slept, Ordering::Relaxed).max(slept))
}

/// The clock of `Instant` goes on while Windows is suspended.
#[cfg(all(not(target_os = "linux"), not(target_vendor = "apple"), not(dlock_sim)))]
fn suspended() -> Duration {
    Duration::ZERO
}

fn moment(instant: Instant) -> Moment {
    let since = instant.into_std().saturating_duration_since(origin());
    Moment::from_nanos(nanos(since))
}

impl Moment {
    /// The current time as leases count it.
    pub(crate) fn now() -> Moment {
        let (now, is) = reading();
        is.unwrap_or_else(|| moment(now))
    }

    pub(crate) fn of(instant: Instant) -> Moment {
        match READING.get() {
            Reading::Taken(now, is) if now == instant => is,
            _ => moment(instant),
        }
    }

    pub(crate) fn instant(self) -> Instant {
        Instant::from_std(origin() + Duration::from_nanos(self.as_nanos()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_instants() {
        let now = now();
        let hour = Duration::from_secs(3600);
        for instant in [now, now + hour, now - hour, now + Duration::from_nanos(1)] {
            assert_eq!(Moment::of(instant).instant(), instant);
        }
    }

    #[cfg(all(target_os = "linux", not(dlock_sim)))]
    #[test]
    fn what_was_slept_is_looked_up_when_the_wall_clock_has_moved_and_never_shrinks() {
        let suspended = Suspended::new();
        let ms = Duration::from_millis;
        assert_eq!(suspended.total(100, || 0), ms(0));
        let known = || -> u64 { panic!("it was looked up for nothing") };
        assert_eq!(suspended.total(100, known), ms(0));
        assert_eq!(suspended.total(8000, || 7900), ms(7900));
        assert_eq!(suspended.total(8000, known), ms(7900));
        // Set back, by hand.
        assert_eq!(suspended.total(100, || 7900), ms(7900));
        assert_eq!(suspended.total(200, || 0), ms(7900));
    }
}
