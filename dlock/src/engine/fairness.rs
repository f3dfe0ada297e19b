//! How long a process stands back for others.

use std::time::Duration;

/// The longest, however slow the store is.
const LONGEST: Duration = Duration::from_millis(100);

/// Four round trips of the store, but no less than `least`.
pub(crate) fn some_round_trips(round_trip: Duration, least: Duration) -> Duration {
    round_trip.saturating_mul(4).clamp(least, LONGEST)
}
