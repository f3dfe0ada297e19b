//! The clock of leases, for stores that measure how long their server keeps a grant.

use std::ops::Add;
use std::time::Duration;

use crate::base::moment;

/// A moment on the clock by which leases end. Like a server's, it continues while the machine is suspended.
///
/// ```
/// use dlock::store::queue::Moment;
/// use std::time::Duration;
///
/// let sent = Moment::now();
/// let ends = sent + Duration::from_secs(30);
/// assert_eq!(ends.since(sent), Duration::from_secs(30));
/// assert_eq!(sent.since(ends), Duration::ZERO);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(moment::Moment);

impl Moment {
    /// The current time.
    #[must_use]
    pub fn now() -> Moment {
        Moment(moment::Moment::now())
    }

    /// The time since an earlier moment; zero if that is later.
    #[must_use]
    pub fn since(self, earlier: Moment) -> Duration {
        self.0.since(earlier.0)
    }

    /// The moment this long before.
    #[must_use]
    pub fn earlier_by(self, time: Duration) -> Moment {
        Moment(self.0.earlier_by(time))
    }
}

impl Add<Duration> for Moment {
    type Output = Moment;

    fn add(self, time: Duration) -> Moment {
        Moment(self.0 + time)
    }
}
