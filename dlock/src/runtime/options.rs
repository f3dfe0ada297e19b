//! The options of an acquisition, and which of them make sense.

use std::time::Duration;

use crate::Error;
use crate::base::kind::Kind;
use crate::engine::grant::safety_margin;

/// The longest of all durations that an option takes: a year.
pub(crate) const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The options of one acquisition.
#[derive(Debug, Clone, Default)]
pub(crate) struct Options {
    pub(crate) kind: Kind,
    pub(crate) lease: Option<Duration>,
    pub(crate) renewed_lease: Option<Duration>,
    pub(crate) wait: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) min_hold: Option<Duration>,
    pub(crate) max_waiters: Option<usize>,
    pub(crate) local_handovers: Option<u32>,
    pub(crate) permits: Option<Permits>,
    /// Of a read-write lock: readers stand back for a writer who waits.
    pub(crate) prefer_writers: bool,
}

/// What is asked of a semaphore.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Permits {
    /// How many at once.
    pub(crate) amount: u32,
    /// How many there are in all, where nobody has said so.
    pub(crate) total: Option<u32>,
}

/// A duration that a timer can take and a store can keep.
pub(crate) fn check_duration(option: &'static str, duration: Option<Duration>) -> Result<(), Error> {
    let reason = match duration {
        Some(Duration::ZERO) => "it is zero".to_owned(),
        Some(d) if d > LONGEST => format!("{d:?} is more than a year"),
        _ => return Ok(()),
    };
    Err(Error::InvalidOption { option, reason })
}

/// How many locks one set may have, and how many permits one acquisition may take: 1,000.
///
/// A store grants them in one step, all or none, which nobody else comes between: with more it would keep everybody else
/// waiting for too long, at each renewal again.
pub const MAX_AT_ONCE: usize = 1000;

/// What is asked of a store in one step is not more than it should do at once.
pub(crate) fn check_at_once(option: &'static str, amount: usize, remedy: &str) -> Result<(), Error> {
    match amount {
        ..=MAX_AT_ONCE => Ok(()),
        _ => Err(Error::InvalidOption {
            option,
            reason: format!(
                "{amount} at once are more than {MAX_AT_ONCE}, which the store would have to do in one step: {remedy}"
            ),
        }),
    }
}

/// The most permits that there may be: what Redisson can count.
const MOST_PERMITS: u32 = i32::MAX as u32;

/// A number of permits that can be asked for.
pub(crate) fn check_permits(option: &'static str, amount: u32) -> Result<(), Error> {
    if amount == 0 {
        return Err(Error::InvalidOption {
            option,
            reason: "it is zero".to_owned(),
        });
    }
    check_total(Some(amount))
}

/// A number of permits that there may be.
pub(crate) fn check_total(total: Option<u32>) -> Result<(), Error> {
    match total {
        Some(total) if total > MOST_PERMITS => Err(too_many_permits(&format!("{total} are more than"))),
        _ => Ok(()),
    }
}

pub(crate) fn too_many_permits(which: &str) -> Error {
    Error::InvalidOption {
        option: "permits",
        reason: format!("{which} {MOST_PERMITS}"),
    }
}

/// A lease that is worth having: longer than what is taken off it for the clocks.
pub(crate) fn check_lease(option: &'static str, lease: Option<Duration>) -> Result<(), Error> {
    check_duration(option, lease)?;
    match lease {
        Some(lease) if lease <= safety_margin(lease) => Err(Error::InvalidOption {
            option,
            reason: format!(
                "a lease of {lease:?} leaves nothing after the safety margin of {:?}",
                safety_margin(lease)
            ),
        }),
        _ => Ok(()),
    }
}

impl Options {
    pub(crate) fn check(&self) -> Result<(), Error> {
        match self.permits {
            Some(permits) => {
                check_permits("acquire_many", permits.amount)?;
                check_total(permits.total)?;
                // Those that have no owner are one number.
                if self.kind == Kind::Permit {
                    let remedy = "let one permit stand for more";
                    check_at_once("acquire_many", permits.amount as usize, remedy)?;
                }
            }
            None if self.kind.is_permits() || self.kind == Kind::Latch => {
                return Err(Error::InvalidOption {
                    option: "kind",
                    reason: format!(
                        "a {} is no lock: LockClient has a method of that name",
                        self.kind.noun()
                    ),
                });
            }
            None => {}
        }
        if self.prefer_writers && !self.kind.is_read_write() {
            return Err(Error::InvalidOption {
                option: "prefer_writers",
                reason: format!("a lock of kind {} has no readers and writers", self.kind),
            });
        }
        check_lease("lease", self.lease)?;
        check_lease("renewed_lease", self.renewed_lease)?;
        check_lease("max_hold", self.max_hold)?;
        check_duration("min_hold", self.min_hold)?;
        check_duration("wait", self.wait).map_err(|error| match self.wait {
            Some(Duration::ZERO) => Error::InvalidOption {
                option: "wait",
                reason: "it is zero: try_acquire asks once without waiting".to_owned(),
            },
            _ => error,
        })?;
        let ends = [("max_hold", self.max_hold), ("lease", self.lease)];
        for (option, end) in ends {
            if let (Some(min), Some(end)) = (self.min_hold, end)
                && min > end
            {
                return Err(Error::InvalidOption {
                    option: "min_hold",
                    reason: format!("{min:?} is longer than {option}, which is {end:?}"),
                });
            }
        }
        Ok(())
    }
}
