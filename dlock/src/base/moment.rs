//! Points in time as the engine counts them: plain numbers that need no clock.

use std::num::NonZeroU64;
use std::ops::Add;
use std::time::Duration;

/// The longest duration that an option accepts: a year, also a leap year or one of 365.25 days.
pub(crate) const LONGEST_LEASE: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// An instant in half the space: nanoseconds since a day before this process first asked. Saturates there, and at five
/// centuries later. None is zero, so that an optional one takes no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Moment(NonZeroU64);

impl Moment {
    pub(crate) const fn from_nanos(nanos: u64) -> Moment {
        Moment(NonZeroU64::MIN.saturating_add(nanos))
    }

    pub(crate) const fn as_nanos(self) -> u64 {
        self.0.get() - 1
    }

    /// The time since an earlier moment; zero if that is later.
    pub(crate) fn since(self, earlier: Moment) -> Duration {
        Duration::from_nanos(self.0.get().saturating_sub(earlier.0.get()))
    }

    pub(crate) fn earlier_by(self, time: Duration) -> Moment {
        Moment::from_nanos(self.as_nanos().saturating_sub(nanos(time)))
    }

    /// Rounds down to a multiple of `grain`.
    pub(crate) fn floor(self, grain: Duration) -> Moment {
        let nanos_since = self.as_nanos();
        Moment::from_nanos(nanos_since - nanos_since % nanos(grain).max(1))
    }

    /// Rounds up to a multiple of `grain`.
    pub(crate) fn ceil(self, grain: Duration) -> Moment {
        let floor = self.floor(grain);
        if floor == self { self } else { floor + grain }
    }
}

impl Add<Duration> for Moment {
    type Output = Moment;

    fn add(self, time: Duration) -> Moment {
        Moment(self.0.saturating_add(nanos(time)))
    }
}

/// Converts a time to nanoseconds, at most five centuries.
pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_add_up_and_never_overflow() {
        let (second, hour) = (Duration::from_secs(1), Duration::from_secs(3600));
        let moment = Moment::from_nanos(7_300_000_000);
        assert_eq!((moment + second).since(moment), second);
        assert_eq!(moment.since(moment + second), Duration::ZERO);
        assert_eq!(moment.earlier_by(second) + second, moment);
        assert_eq!((moment + second).floor(second), moment.floor(second) + second);
        assert_eq!(moment.floor(Duration::ZERO), moment);
        let floor = moment.floor(second);
        assert_eq!(floor.ceil(second), floor);
        assert_eq!((floor + Duration::from_nanos(1)).ceil(second), floor + second);
        // Exceeds the life of any process.
        assert_eq!(moment + Duration::MAX, moment + Duration::MAX + hour);
    }
}
