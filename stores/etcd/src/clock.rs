//! The clock that measures leases. Like the server's, it continues while the machine is suspended.

use std::ops::Add;
use std::time::Duration;

/// A moment on this process's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(Duration);

impl Moment {
    #[cfg(target_os = "linux")]
    pub(crate) fn now() -> Moment {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let (seconds, nanos) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
        // The field has fewer bits on some platforms.
        #[allow(clippy::useless_conversion)]
        Moment(Duration::from_secs(seconds.into()) + Duration::from_nanos(nanos.into()))
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn now() -> Moment {
        use std::sync::OnceLock;
        use std::time::Instant;

        static ORIGIN: OnceLock<Instant> = OnceLock::new();
        Moment(ORIGIN.get_or_init(Instant::now).elapsed())
    }

    /// The time from this moment to `later`; zero if `later` is earlier.
    pub(crate) fn until(self, later: Moment) -> Duration {
        later.0.saturating_sub(self.0)
    }

    pub(crate) fn elapsed(self) -> Duration {
        self.until(Moment::now())
    }
}

impl Add<Duration> for Moment {
    type Output = Moment;

    fn add(self, time: Duration) -> Moment {
        Moment(self.0.saturating_add(time))
    }
}
