//! The one clock of all logs: the host's monotonic clock, which every process reads alike.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A moment, in nanoseconds of the host's monotonic clock.
pub(crate) type Nanos = u64;

/// The present.
pub(crate) fn now() -> Nanos {
    let now = clock_gettime(ClockId::Monotonic);
    // The clock begins when the machine does: it is not negative.
    #[allow(clippy::useless_conversion, reason = "shorter on some machines")]
    let (seconds, nanos) = (i64::from(now.tv_sec), i64::from(now.tv_nsec));
    seconds.unsigned_abs() * 1_000_000_000 + nanos.unsigned_abs()
}

/// A span in the units of the logs.
pub(crate) fn nanos(span: Duration) -> Nanos {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// A moment of a run as people read it: seconds since `origin`.
pub(crate) fn since(origin: Nanos, at: Nanos) -> String {
    let micros = at.saturating_sub(origin) / 1000;
    format!("{}.{:06}", micros / 1_000_000, micros % 1_000_000)
}
