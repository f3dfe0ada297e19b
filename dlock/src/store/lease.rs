//! Leases that differ from the requested ones.

use std::time::Duration;

/// The lease that a store gave, if it differs from the requested one.
///
/// A store with leases in whole seconds, or with one lease for a whole session, reports them with this. The client
/// counts the deadline of the grant from the given lease; one that lasts longer than requested counts as the requested
/// one.
///
/// ```
/// use dlock::store::GivenLease;
/// use std::time::Duration;
///
/// // Leases in whole seconds: 1.5 s were asked for, and 2 s were given.
/// let lease = GivenLease::new(Duration::from_secs(2));
/// assert_eq!(lease.left(), Duration::from_secs(2));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GivenLease {
    lasts: Duration,
    elapsed: Duration,
}

impl GivenLease {
    /// Creates a lease of this length, counted from the moment at which the operation was called.
    #[must_use]
    pub const fn new(lasts: Duration) -> GivenLease {
        GivenLease {
            lasts,
            elapsed: Duration::ZERO,
        }
    }

    /// Sets how much of the lease was over when the operation was called, by this process's clock. Count from before
    /// the store sent the request that last extended the lease.
    #[must_use]
    pub const fn elapsed(mut self, elapsed: Duration) -> GivenLease {
        self.elapsed = elapsed;
        self
    }

    /// Returns the remaining lease when the operation was called.
    #[must_use]
    pub const fn left(self) -> Duration {
        self.lasts.saturating_sub(self.elapsed)
    }

    /// Returns its whole length, no longer than `asked`.
    pub(crate) fn at_most(self, asked: Duration) -> Duration {
        self.lasts.min(asked)
    }

    /// Returns how much of it was over when the operation was called.
    pub(crate) fn begun_before(self) -> Duration {
        self.elapsed
    }
}
