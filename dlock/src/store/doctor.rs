//! What a store finds out about its servers: the part of a diagnosis that depends on the store.

mod tried;

use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "redis")]
pub(crate) use self::tried::judged_times;
pub use self::tried::{ClockReading, SCRATCH_PREFIX, not_tried, request_times, scratch_key};
use super::StoreFuture;

/// The ability to examine the servers of a store, see [`Store::diagnose`](super::Store::diagnose) and
/// [`LockClient::doctor`](crate::LockClient::doctor).
///
/// It sends at most a hundred requests a second, changes nothing that other clients see, and leaves no key behind. What
/// it cannot see it reports as [`Verdict::Unknown`], with the reason; never as good.
///
/// ```
/// use dlock::store::doctor::{Diagnose, Examination, Failover, Finding, StoreReport};
/// use dlock::store::StoreFuture;
/// use std::sync::Arc;
///
/// struct MyStore;
///
/// impl Diagnose for MyStore {
///     fn examine(self: Arc<Self>, examination: Examination) -> StoreFuture<StoreReport> {
///         Box::pin(async move {
///             let mut report = StoreReport::new();
///             report.failover = Failover::None;
///             report.findings.push(Finding::good("writes", "the table can be written to"));
///             if !examination.probes {
///                 report.findings.push(Finding::unknown("request-times", "nothing was measured", None));
///             }
///             Ok(report)
///         })
///     }
/// }
/// ```
pub trait Diagnose: Send + Sync {
    /// Examines the servers. Fails if none of them could be asked anything.
    fn examine(self: Arc<Self>, examination: Examination) -> StoreFuture<StoreReport>;
}

/// What to examine.
///
/// ```
/// use dlock::store::doctor::Examination;
/// use std::time::Duration;
///
/// let examination = Examination::new(Duration::from_secs(30), Duration::from_secs(1));
/// assert!(!examination.probes);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Examination {
    /// The lease of the client's locks.
    pub lease: Duration,
    /// How long the client waits for the reply to an operation.
    pub timeout: Duration,
    /// Whether promises are tested on scratch keys, for some seconds. Otherwise it only reads.
    pub probes: bool,
}

impl Examination {
    /// Creates an examination that only reads.
    #[must_use]
    pub fn new(lease: Duration, timeout: Duration) -> Examination {
        Examination {
            lease,
            timeout,
            probes: false,
        }
    }
}

/// The verdict of a check.
///
/// ```
/// use dlock::store::doctor::Verdict;
///
/// // The worst of several is the greatest.
/// assert!(Verdict::Bad > Verdict::Unknown && Verdict::Unknown > Verdict::Good);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Verdict {
    /// It is as it should be, as far as tested.
    Good,
    /// It cannot be seen from here.
    Unknown,
    /// It endangers the promises of the locks, or their speed.
    Bad,
}

impl Verdict {
    /// Returns the verdict as a word: `good`, `unknown` or `bad`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Verdict::Good => "good",
            Verdict::Unknown => "unknown",
            Verdict::Bad => "bad",
        }
    }
}

/// The outcome of one check.
///
/// ```
/// use dlock::store::doctor::{Finding, Verdict};
///
/// let finding = Finding::bad("eviction", "the policy is volatile-lru", "set maxmemory-policy noeviction");
/// assert_eq!(finding.verdict, Verdict::Bad);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// The name of the check, as in `eviction`.
    pub check: &'static str,
    /// Its verdict.
    pub verdict: Verdict,
    /// What was seen, and what follows from it.
    pub why: String,
    /// What to do.
    pub remedy: Option<String>,
}

impl Finding {
    /// Creates a finding that all is well.
    #[must_use]
    pub fn good(check: &'static str, why: impl Into<String>) -> Finding {
        Finding {
            check,
            verdict: Verdict::Good,
            why: why.into(),
            remedy: None,
        }
    }

    /// Creates a finding that needs action.
    #[must_use]
    pub fn bad(check: &'static str, why: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding {
            check,
            verdict: Verdict::Bad,
            why: why.into(),
            remedy: Some(remedy.into()),
        }
    }

    /// Creates a finding of something that cannot be seen, with what would make it visible.
    #[must_use]
    pub fn unknown(check: &'static str, why: impl Into<String>, remedy: Option<String>) -> Finding {
        Finding {
            check,
            verdict: Verdict::Unknown,
            why: why.into(),
            remedy,
        }
    }

    /// Combines the findings of several servers to one per check: the worst, with its servers.
    #[must_use]
    pub fn combined(servers: Vec<(String, Vec<Finding>)>) -> Vec<Finding> {
        let several = servers.len() > 1;
        let mut all: Vec<Finding> = Vec::new();
        for (server, findings) in servers {
            for mut finding in findings {
                if several {
                    finding.why = format!("{server}: {}", finding.why);
                }
                match all.iter_mut().find(|other| other.check == finding.check) {
                    None => all.push(finding),
                    Some(other) if finding.verdict > other.verdict => *other = finding,
                    Some(other) if finding.verdict == other.verdict => {
                        other.why = format!("{}; {}", other.why, finding.why);
                        other.remedy = other.remedy.take().or(finding.remedy);
                    }
                    Some(_) => {}
                }
            }
        }
        all
    }
}

/// How long it takes until another server serves the locks.
///
/// ```
/// use dlock::store::doctor::Failover;
/// use std::time::Duration;
///
/// let sentinels_default = Failover::Takes(Duration::from_secs(32));
/// assert_ne!(sentinels_default, Failover::None);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Failover {
    /// No server takes over from another one, or none needs to.
    None,
    /// About this long.
    Takes(Duration),
    /// It cannot be seen, for this reason.
    Unknown(String),
}

/// What is left of a server's data after a restart.
///
/// ```
/// use dlock::store::doctor::Durability;
///
/// assert!(Durability::All < Durability::Nothing);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Durability {
    /// Everything, or enough of the servers lose nothing.
    All,
    /// All but the last second or so.
    LastSecond,
    /// The contents of the last snapshot.
    Snapshot,
    /// Nothing.
    Nothing,
    /// It cannot be seen.
    Unknown,
}

/// How leases end in a store.
///
/// ```
/// use dlock::store::doctor::LeaseEnd;
///
/// assert_eq!(LeaseEnd::default(), LeaseEnd::WallClock);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LeaseEnd {
    /// By the servers' wall clocks: one that is set ahead ends them early. The default.
    #[default]
    WallClock,
    /// By clocks of the servers that do not step.
    SteadyClock,
    /// With the session of the client, by a clock that does not step.
    #[non_exhaustive]
    Session {
        /// After how long the store frees the locks of a client that is gone.
        timeout: Duration,
        /// The longest lease that a holder gets.
        longest_lease: Duration,
    },
}

impl LeaseEnd {
    /// Creates the end with a session.
    #[must_use]
    pub fn session(timeout: Duration, longest_lease: Duration) -> LeaseEnd {
        LeaseEnd::Session {
            timeout,
            longest_lease,
        }
    }
}

/// The identity of a server among others.
///
/// ```
/// use dlock::store::doctor::ServerFacts;
///
/// let server = ServerFacts::new("10.0.0.7:6379");
/// assert_eq!(server.id, None);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerFacts {
    /// Its address.
    pub name: String,
    /// An id that no other server has, such as its run id.
    pub id: Option<String>,
    /// The server that it replicates, if it is a replica.
    pub replica_of: Option<String>,
    /// How far its clock is ahead of this process's, in milliseconds.
    pub clock_ahead_ms: Option<i64>,
}

impl ServerFacts {
    /// Creates the facts of a server of which only the address is known.
    #[must_use]
    pub fn new(name: impl Into<String>) -> ServerFacts {
        ServerFacts {
            name: name.into(),
            id: None,
            replica_of: None,
            clock_ahead_ms: None,
        }
    }
}

/// The results of an examination.
///
/// ```
/// use dlock::store::doctor::{Durability, StoreReport};
///
/// let report = StoreReport::new();
/// assert!(report.findings.is_empty() && report.durability == Durability::Unknown);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreReport {
    /// One for each check.
    pub findings: Vec<Finding>,
    /// How long a fail-over takes.
    pub failover: Failover,
    /// What is left after a restart.
    pub durability: Durability,
    /// Whether a majority of independent servers grants each lock.
    pub by_majority: bool,
    /// How leases end.
    pub lease_end: LeaseEnd,
    /// The servers.
    pub servers: Vec<ServerFacts>,
}

impl StoreReport {
    /// Creates a report in which nothing is known.
    #[must_use]
    pub fn new() -> StoreReport {
        StoreReport {
            findings: Vec::new(),
            failover: Failover::Unknown("the store does not say".to_owned()),
            durability: Durability::Unknown,
            by_majority: false,
            lease_end: LeaseEnd::default(),
            servers: Vec::new(),
        }
    }
}

impl Default for StoreReport {
    fn default() -> StoreReport {
        StoreReport::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_of_several_servers_are_one_for_each_check_and_the_worst_of_them() {
        let all = Finding::combined(vec![
            (
                "a".to_owned(),
                vec![Finding::good("x", "fine"), Finding::good("y", "fine")],
            ),
            (
                "b".to_owned(),
                vec![Finding::bad("x", "broken", "mend it"), Finding::good("y", "well")],
            ),
            ("c".to_owned(), vec![Finding::unknown("x", "hidden", None)]),
        ]);
        let texts: Vec<_> = all.iter().map(|f| (f.check, f.verdict, f.why.as_str())).collect();
        assert_eq!(
            texts,
            [
                ("x", Verdict::Bad, "b: broken"),
                ("y", Verdict::Good, "a: fine; b: well")
            ]
        );
        assert_eq!(all[0].remedy.as_deref(), Some("mend it"));
        let one = Finding::combined(vec![("a".to_owned(), vec![Finding::good("x", "fine")])]);
        assert_eq!(one[0].why, "fine");
    }
}
