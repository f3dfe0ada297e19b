//! The options of an acquisition, and their checks.

use std::sync::Arc;
use std::time::Duration;

use crate::Error;
use crate::base::kind::Kind;
use crate::base::moment::LONGEST_LEASE;
use crate::engine::grant::safety_margin;
use crate::runtime::group::Group;

/// How long a lock outlives a crashed holder, and what keeps it alive until then.
///
/// ```
/// use dlock::Lease;
/// use std::time::Duration;
///
/// let renewed = Lease::Renewed(Duration::from_secs(30)); // held for as long as the guard lives
/// let fixed = Lease::Fixed(Duration::from_secs(30)); // lost after 30 s
/// assert_eq!(renewed.duration(), fixed.duration());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Lease {
    /// The watchdog renews the lease every third of it, for as long as the guard lives. After its holder crashes, the
    /// lock becomes available when the lease expires.
    Renewed(Duration),
    /// The lease is never renewed: the lock is lost when it expires.
    Fixed(Duration),
}

impl Lease {
    /// Returns the length of the lease.
    #[must_use]
    pub fn duration(self) -> Duration {
        match self {
            Lease::Renewed(duration) | Lease::Fixed(duration) => duration,
        }
    }

    fn check(self) -> Result<(), Error> {
        check_lease(self.option(), Some(self.duration()))
    }

    /// The name of the option that sets it.
    fn option(self) -> &'static str {
        match self {
            Lease::Renewed(_) => "lease",
            Lease::Fixed(_) => "fixed_lease",
        }
    }
}

/// The options of an acquisition, for locks, sets of locks, semaphores and the layers of `dlock-tower`.
///
/// These types have methods of the same names, and a method `options` that replaces all options at once: for options
/// that several locks share, or that come from a configuration.
///
/// | type | methods of the same names |
/// |---|---|
/// | [`Lock`](crate::Lock), [`MultiLock`](crate::MultiLock), [`RwLock`](crate::RwLock) for both of its sides | all |
/// | [`Semaphore`](crate::Semaphore) | all but `local_handoffs`: permits are never handed off |
/// | `LockLayer`, `TaskLockLayer` and `LimitLayer` of `dlock-tower` | all but `local_handoffs`, which their method `options` sets |
/// | [`UnownedSemaphore`](crate::UnownedSemaphore) | `wait`, `max_waiters` and `group`; it has no method `options` |
/// | [`Leader`](crate::Leader) | `lease` and `group`, and `max_hold` as `max_term`; it has no method `options`: candidates wait without a limit |
/// | `dlock run` | `--wait`, `--lease`, `--fixed-lease`, `--min-hold` |
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::LockOptions;
/// use std::time::Duration;
///
/// let patient = LockOptions::new().wait(Duration::from_secs(30)).max_waiters(100);
///
/// let client = dlock::LockClient::memory();
/// let report = client.lock("report").options(patient.clone());
/// let transfer = client.multi(["account:3", "account:7"]).options(patient);
/// # report.check()?;
/// # transfer.check()?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
#[must_use = "options do nothing until a lock is given them"]
pub struct LockOptions {
    /// See [`lease`](Self::lease) and [`fixed_lease`](Self::fixed_lease); `None` is the client's lease, renewed.
    pub lease: Option<Lease>,
    /// See [`wait`](Self::wait).
    pub wait: Option<Duration>,
    /// See [`max_hold`](Self::max_hold).
    pub max_hold: Option<Duration>,
    /// See [`min_hold`](Self::min_hold).
    pub min_hold: Option<Duration>,
    /// See [`max_waiters`](Self::max_waiters).
    pub max_waiters: Option<usize>,
    /// See [`local_handoffs`](Self::local_handoffs).
    pub local_handoffs: Option<u32>,
    /// See [`group`](Self::group).
    pub(crate) group: Group,
}

impl LockOptions {
    /// Creates the default options: the client's lease, renewed, and no limit.
    pub fn new() -> LockOptions {
        LockOptions::default()
    }

    /// Sets the lease that the watchdog renews, every third of it, for as long as the guard lives; the client's
    /// ([`LockClientBuilder::lease`](crate::LockClientBuilder::lease), 30 s) by default. After its holder crashes, the
    /// lock becomes available when the lease expires. Replaces a [fixed](Self::fixed_lease) lease.
    pub fn lease(self, lease: Duration) -> LockOptions {
        self.set_lease(Lease::Renewed(lease))
    }

    /// Sets a lease that is not renewed: the lock is lost when it expires. Replaces a [renewed](Self::lease) lease.
    pub fn fixed_lease(self, lease: Duration) -> LockOptions {
        self.set_lease(Lease::Fixed(lease))
    }

    fn set_lease(mut self, lease: Lease) -> LockOptions {
        self.lease = Some(lease);
        self
    }

    /// Sets how long an acquire waits; without limit by default. The store's reply must arrive within that time, too.
    pub fn wait(mut self, wait: Duration) -> LockOptions {
        self.wait = Some(wait);
        self
    }

    /// Limits how long the lock is held: then renewal stops and the lock is lost, even if the holder is alive. No limit
    /// by default.
    pub fn max_hold(mut self, max_hold: Duration) -> LockOptions {
        self.max_hold = Some(max_hold);
        self
    }

    /// Keeps the lock held for at least this long from its acquisition on, even if it is released before. No minimum by
    /// default.
    ///
    /// An acquire that waits gets the lock when that time is over. So this does not make a job run once: only calls of
    /// `try_acquire` within that time are refused. For a job that several machines start at the same time, use
    /// `LockClient::once(key).every(period)` (feature `once`).
    pub fn min_hold(mut self, min_hold: Duration) -> LockOptions {
        self.min_hold = Some(min_hold);
        self
    }

    /// Limits how many callers may wait in this process at the same time; further callers are refused at once with
    /// [`Error::TooManyWaiters`]. No limit by default; an unbounded queue turns overload into an outage, so set a limit
    /// where requests come from outside. Waiting readers of a read-write lock are counted apart from its waiting writers.
    pub fn max_waiters(mut self, max_waiters: usize) -> LockOptions {
        self.max_waiters = Some(max_waiters);
        self
    }

    /// Limits how many times this process hands a lock off among its own callers before it releases it to the store;
    /// 4096 by default, and 0 sends every release to the store. See
    /// [`Lock::local_handoffs`](crate::Lock::local_handoffs); permits are never handed off.
    pub fn local_handoffs(mut self, local_handoffs: u32) -> LockOptions {
        self.local_handoffs = Some(local_handoffs);
        self
    }

    /// Sets the group by which metrics distinguish locks, as in `order:{order_id}`: the kind of work, never a name with
    /// a number in it. Locks without a group are in `none`; after 200 names in a process all further ones are `other`.
    /// The attribute `#[distributed_lock]` sets the text of its key, and `LockLayer` of `dlock-tower`, with its feature
    /// `axum`, the matched path. The layers for tasks set no group by themselves.
    pub fn group(mut self, group: &'static str) -> LockOptions {
        self.group = Group::of(group);
        self
    }

    /// Sets the group for the layers, unless a group is set.
    #[doc(hidden)]
    pub fn __group_if_none(mut self, group: &str) -> LockOptions {
        if self.group == Group::NONE {
            self.group = Group::of(group);
        }
        self
    }

    /// Returns the lease if it is not renewed.
    pub(crate) fn fixed(&self) -> Option<Duration> {
        match self.lease {
            Some(Lease::Fixed(lease)) => Some(lease),
            _ => None,
        }
    }

    fn check(&self) -> Result<(), Error> {
        self.lease.map_or(Ok(()), Lease::check)?;
        check_lease("max_hold", self.max_hold)?;
        check_duration("min_hold", self.min_hold)?;
        check_duration("wait", self.wait).map_err(|error| match self.wait {
            Some(Duration::ZERO) => Error::invalid_option(
                "wait",
                "it is zero: try_acquire and try_run ask once without waiting",
            ),
            _ => error,
        })?;
        let ends = [("max_hold", self.max_hold), ("fixed_lease", self.fixed())];
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

/// What one acquisition asks for, and its options.
#[derive(Debug, Clone, Default)]
pub(crate) struct Options {
    pub(crate) kind: Kind,
    pub(crate) permits: Option<Permits>,
    /// For a read-write lock: whether readers yield to a waiting writer.
    pub(crate) prefer_writers: bool,
    pub(crate) lock: LockOptions,
    /// The caller's note.
    pub(crate) note: Option<Arc<str>>,
}

/// A request for permits of a semaphore.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Permits {
    /// How many at once.
    pub(crate) amount: u32,
    /// The total, if the store has none.
    pub(crate) total: Option<u32>,
    /// The maximum number of held permits for this call.
    pub(crate) limit: Option<u32>,
}

/// Checks that a timer can take the duration and a store can keep it.
pub(crate) fn check_duration(option: &'static str, duration: Option<Duration>) -> Result<(), Error> {
    let reason = match duration {
        Some(Duration::ZERO) => "it is zero".to_owned(),
        Some(d) if d > LONGEST_LEASE => format!("{d:?} is more than a year"),
        _ => return Ok(()),
    };
    Err(Error::InvalidOption { option, reason })
}

/// The maximum number of locks in a set, and of permits in one acquisition: 1,000.
///
/// A store grants them in one uninterrupted operation, all or none: with more keys it would block its other clients for
/// too long, again at each renewal.
pub const MAX_AT_ONCE: usize = 1000;

/// Checks that one operation does not ask too much of a store.
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

/// The maximum number of permits: what Redisson can count.
const MOST_PERMITS: u32 = i32::MAX as u32;

/// Checks a number of permits to acquire.
pub(crate) fn check_permits(option: &'static str, amount: u32) -> Result<(), Error> {
    if amount == 0 {
        return Err(Error::invalid_option(option, "it is zero"));
    }
    check_total(Some(amount))
}

/// Checks a total of permits.
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

/// Checks that a lease is longer than its safety margin.
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
                if permits.total.is_some() && permits.limit.is_some() {
                    return Err(Error::invalid_option(
                        "limit",
                        "with permits: use either the store's total, or a limit for each acquire",
                    ));
                }
                if let Some(limit) = permits.limit.filter(|limit| (1..permits.amount).contains(limit)) {
                    return Err(Error::InvalidOption {
                        option: "acquire_many",
                        reason: format!(
                            "{} permits of a semaphore with a limit of {limit}: they can never be acquired at once",
                            permits.amount
                        ),
                    });
                }
                // Unowned permits are one number.
                if self.kind == Kind::Permit {
                    let remedy = "let one permit stand for more";
                    check_at_once("acquire_many", permits.amount as usize, remedy)?;
                }
            }
            None => debug_assert!(!self.kind.is_permits() && self.kind != Kind::Latch),
        }
        if self.prefer_writers && !self.kind.is_read_write() {
            return Err(Error::InvalidOption {
                option: "prefer_writers",
                reason: format!("a lock of kind {} has no readers and writers", self.kind),
            });
        }
        self.lock.check()
    }
}
