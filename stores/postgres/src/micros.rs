//! Time in the server's unit.

use std::time::Duration;

/// Converts to whole microseconds, up to a hundred years.
pub(crate) fn micros(duration: Duration) -> i64 {
    const MOST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    i64::try_from(duration.min(MOST).as_micros()).unwrap_or(i64::MAX)
}
