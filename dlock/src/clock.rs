//! The clock by which leases end.
//!
//! Everything is counted by [`tokio::time::Instant`], so that a paused clock turns every timing rule into
//! a fast and exact test. On Linux that clock stands still while the machine is suspended, and a lease
//! does not: the time spent asleep is added, taken from the difference between the boot-time clock and
//! the monotonic one.

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

/// How long the machine was suspended since this process first asked; whole milliseconds, so that the two
/// readings not being taken at the same instant never shows.
#[cfg(target_os = "linux")]
fn suspended() -> Duration {
    use rustix::time::{ClockId, clock_gettime};
    use std::sync::OnceLock;

    static AT_START: OnceLock<i64> = OnceLock::new();

    // Good for 292 years. The nanoseconds are shorter on some machines.
    #[allow(clippy::useless_conversion)]
    let nanos = |id| {
        let t = clock_gettime(id);
        i64::from(t.tv_sec) * 1_000_000_000 + i64::from(t.tv_nsec)
    };
    let ahead = nanos(ClockId::Boottime) - nanos(ClockId::Monotonic);
    let slept = ahead - *AT_START.get_or_init(|| ahead);
    if slept < 1_000_000 {
        return Duration::ZERO;
    }
    Duration::from_millis(slept.unsigned_abs() / 1_000_000)
}

#[cfg(not(target_os = "linux"))]
fn suspended() -> Duration {
    Duration::ZERO
}
