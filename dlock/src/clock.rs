//! The clock by which leases end.
//!
//! Everything is counted by [`tokio::time::Instant`], so that a paused clock turns every timing rule into
//! a fast and exact test. On Linux that clock stands still while the machine is suspended, and a lease
//! does not: the time spent asleep is added, taken from the difference between the boot-time clock and
//! the monotonic one.

#[cfg(target_os = "linux")]
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// The present, as leases count it: the monotonic clock plus all the time this process slept through.
pub(crate) fn now() -> Instant {
    Instant::now() + suspended()
}

/// Sleeps until [`now`] has reached `deadline`, as well as a timer can: one that was set before a suspend
/// fires late, and whoever asks the clock in between is told the truth.
pub(crate) async fn sleep_until(deadline: Instant) {
    // A deadline nobody can reach (years away) is still a valid one for the timer wheel.
    let target = deadline.checked_sub(suspended()).unwrap_or(deadline);
    tokio::time::sleep_until(target).await;
}

/// How long the machine was suspended since this process first asked.
#[cfg(target_os = "linux")]
fn suspended() -> Duration {
    use rustix::time::ClockId;

    static SUSPENDED: Suspended = Suspended::new();

    let wall = ahead(ClockId::RealtimeCoarse, ClockId::MonotonicCoarse);
    SUSPENDED.total(wall, slept_ms)
}

/// What is known of the time that the machine was suspended.
///
/// The two clocks that tell it cost as much as the present itself, which is asked for all the time. So they are read
/// only when the wall clock has moved against the monotonic one: as it does by a suspend, and when it is set. To see
/// that costs a fifth, by the coarse readings of both, which are of the same tick and so differ exactly.
#[cfg(target_os = "linux")]
struct Suspended {
    /// By how much the wall clock was ahead when it was looked up.
    wall: AtomicI64,
    slept_ms: AtomicU64,
}

#[cfg(target_os = "linux")]
impl Suspended {
    const fn new() -> Suspended {
        Suspended {
            wall: AtomicI64::new(i64::MIN),
            slept_ms: AtomicU64::new(0),
        }
    }

    fn total(&self, wall: i64, look_up: impl FnOnce() -> u64) -> Duration {
        if self.wall.load(Ordering::Acquire) != wall {
            // It only grows, and stands there before what says that it is known: who sees that sees this.
            self.slept_ms.fetch_max(look_up(), Ordering::Relaxed);
            self.wall.store(wall, Ordering::Release);
        }
        Duration::from_millis(self.slept_ms.load(Ordering::Relaxed))
    }
}

/// The same by the two clocks; whole milliseconds, so that the two readings not being taken at the same instant never
/// shows.
#[cfg(target_os = "linux")]
fn slept_ms() -> u64 {
    use std::sync::OnceLock;

    use rustix::time::ClockId;

    static AT_START: OnceLock<i64> = OnceLock::new();

    let ahead = ahead(ClockId::Boottime, ClockId::Monotonic);
    let slept = ahead - *AT_START.get_or_init(|| ahead);
    u64::try_from(slept / 1_000_000).unwrap_or(0)
}

/// By how many nanoseconds a clock is ahead of another one. Good for 292 years.
#[cfg(target_os = "linux")]
fn ahead(clock: rustix::time::ClockId, of: rustix::time::ClockId) -> i64 {
    // The nanoseconds are shorter on some machines.
    #[allow(clippy::useless_conversion)]
    let nanos = |id| {
        let t = rustix::time::clock_gettime(id);
        i64::from(t.tv_sec) * 1_000_000_000 + i64::from(t.tv_nsec)
    };
    nanos(clock) - nanos(of)
}

#[cfg(not(target_os = "linux"))]
fn suspended() -> Duration {
    Duration::ZERO
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

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
