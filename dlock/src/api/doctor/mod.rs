//! The doctor: what endangers the locks of a client, what that costs, and what to do about it.

mod what_if;

use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::time::Duration;

pub use self::what_if::Consequence;
use crate::base::text::is_wild;
use crate::store::doctor::{Examination, Failover, Finding, LeaseEnd, StoreReport, Verdict};
use crate::{Error, LockClient, LockKey};

impl LockClient {
    /// Examines the store of this client, and whether the client's settings fit it. By default it only reads, which
    /// suits a check at start-up.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// # let client = dlock::LockClient::memory();
    /// use std::time::Duration;
    ///
    /// let diagnosis = client.doctor().callers_wait(Duration::from_secs(60)).await?;
    /// for finding in diagnosis.bad() {
    ///     eprintln!("{}: {}", finding.check, finding.why);
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use = "a doctor does nothing until it is awaited"]
    pub fn doctor(&self) -> Doctor {
        Doctor {
            client: self.clone(),
            callers_wait: None,
            probes: false,
        }
    }
}

/// An examination that has not begun yet, see [`LockClient::doctor`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// # let client = dlock::LockClient::memory();
/// let diagnosis = client.doctor().probe(true).await?;
/// assert!(diagnosis.bad().next().is_none());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[must_use = "a doctor does nothing until it is awaited"]
pub struct Doctor {
    client: LockClient,
    callers_wait: Option<Duration>,
    probes: bool,
}

impl Doctor {
    /// Sets how long the callers of the service wait before they give up. Not known by default.
    pub fn callers_wait(mut self, wait: Duration) -> Doctor {
        self.callers_wait = Some(wait);
        self
    }

    /// Sets whether promises are tested on scratch keys: for some seconds, with at most a hundred operations a second;
    /// no key is left behind, unless the finding `scratch` says so. Off by default: then it only reads.
    pub fn probe(mut self, probe: bool) -> Doctor {
        self.probes = probe;
        self
    }

    async fn run(self) -> Result<Diagnosis, Error> {
        let shared = self.client.shared();
        let settings = &shared.settings;
        let examination = Examination {
            lease: settings.lease,
            timeout: settings.timeout,
            probes: self.probes,
        };
        let report = match shared.store.clone().diagnose() {
            Some(store) => (self.client.handle().with_timers(store.examine(examination)).await)
                .map_err(|error| error.into_error("the diagnosis with key", &LockKey::raw("dlock:doctor")))?,
            None => brings_none(),
        };
        let lease = match report.lease_end {
            LeaseEnd::Session { longest_lease, .. } => settings.lease.min(longest_lease),
            LeaseEnd::WallClock | LeaseEnd::SteadyClock => settings.lease,
        };
        let what_if = what_if::table(&report, lease, settings.retry_for);
        let mut findings = vec![
            lease_budget(&report.failover, lease),
            takeover(report.lease_end, lease, self.callers_wait),
        ];
        findings.extend(report.findings);
        Ok(Diagnosis { findings, what_if })
    }
}

impl IntoFuture for Doctor {
    type Output = Result<Diagnosis, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Result<Diagnosis, Error>> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

/// What the doctor found.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// let diagnosis = client.doctor().await?;
/// println!("{diagnosis}"); // for people: the findings, the worst first, and "what happens here if …"
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Diagnosis {
    /// One for each check.
    pub findings: Vec<Finding>,
    /// What happens here if something fails.
    pub what_if: Vec<Consequence>,
}

impl Diagnosis {
    /// The findings that are bad.
    pub fn bad(&self) -> impl Iterator<Item = &Finding> {
        self.findings
            .iter()
            .filter(|finding| finding.verdict == Verdict::Bad)
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for verdict in [Verdict::Bad, Verdict::Unknown, Verdict::Good] {
            for finding in self.findings.iter().filter(|finding| finding.verdict == verdict) {
                let why = printable(&finding.why);
                writeln!(f, "{:<8} {:<14} {why}", verdict.as_str(), finding.check)?;
                if let Some(remedy) = &finding.remedy {
                    writeln!(f, "{:<23} -> {}", "", printable(remedy))?;
                }
            }
        }
        writeln!(f, "\nWhat happens here if …")?;
        for consequence in &self.what_if {
            writeln!(f, "  {}", consequence.event)?;
            writeln!(f, "    locks:   {}", printable(&consequence.lost))?;
            writeln!(f, "    callers: {}", printable(&consequence.waits))?;
        }
        Ok(())
    }
}

/// Text of a server for a terminal: nothing in it moves the cursor, or disguises the text.
fn printable(text: &str) -> String {
    let shown = |c: char| match is_wild(c) {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    text.chars().map(shown).collect()
}

/// A renewal is due every third of a lease, so in the worst case two thirds are left when a fail-over begins.
fn lease_budget(failover: &Failover, lease: Duration) -> Finding {
    const CHECK: &str = "lease-budget";
    let budget = lease * 2 / 3;
    match failover {
        Failover::None => Finding::good(CHECK, "no fail-over takes time from a lease here"),
        Failover::Unknown(why) => Finding::unknown(
            CHECK,
            format!("how long a fail-over takes is not visible: {why}"),
            Some(format!(
                "make sure that it takes less than {budget:.1?}, two thirds of the lease"
            )),
        ),
        Failover::Takes(takes) if *takes > budget => {
            let needed = Duration::from_secs((takes.as_secs_f64() * 1.5).ceil() as u64);
            Finding::bad(
                CHECK,
                format!(
                    "a fail-over here takes about {takes:.1?}, and a hold has {budget:.1?} of its lease of {lease:?} left \
                     when it begins at the wrong moment: locks are lost by time alone, whatever the replica received"
                ),
                format!(
                    "a lease of at least {needed:?} (?lease={}s), or a shorter down-after-milliseconds or \
                     cluster-node-timeout",
                    needed.as_secs()
                ),
            )
        }
        Failover::Takes(takes) => Finding::good(
            CHECK,
            format!("a fail-over takes about {takes:.1?}, less than two thirds of the lease of {lease:?}"),
        ),
    }
}

fn takeover(end: LeaseEnd, lease: Duration, callers_wait: Option<Duration>) -> Finding {
    const CHECK: &str = "takeover";
    let (after, what) = match end {
        LeaseEnd::Session { timeout, .. } => (timeout, "session"),
        LeaseEnd::WallClock | LeaseEnd::SteadyClock => (lease, "lease"),
    };
    let costs = format!("after a crash of a holder others wait up to {after:?}, the {what}");
    match callers_wait {
        None => Finding::unknown(
            CHECK,
            format!("{costs}; how long callers wait is not visible from here"),
            Some("say it: --callers-wait 15s, or `doctor().callers_wait(…)`".to_owned()),
        ),
        Some(wait) if after > wait => Finding::bad(
            CHECK,
            format!("{costs}, and callers give up after {wait:?}: each crash is an outage for them"),
            format!("a {what} of {wait:?} or less (?{what}=…), or callers that wait longer"),
        ),
        Some(wait) => Finding::good(CHECK, format!("{costs}, and callers wait {wait:?}")),
    }
}

/// The report on a store that has no checks of its own.
fn brings_none() -> StoreReport {
    let mut report = StoreReport::new();
    report.failover = Failover::Unknown("this store brings no checks of its own".to_owned());
    report.findings.push(Finding::unknown(
        "store",
        "this store brings no checks of its own, so nothing of its servers is visible",
        None,
    ));
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    #[test]
    fn lease_budget_is_two_thirds_of_the_lease() {
        let verdict = |takes, lease| lease_budget(&Failover::Takes(takes), lease).verdict;
        assert_eq!(verdict(secs(20), secs(30)), Verdict::Good);
        assert_eq!(verdict(secs(21), secs(30)), Verdict::Bad);
        let sentinels_default = lease_budget(&Failover::Takes(secs(32)), secs(30));
        assert!(
            sentinels_default
                .remedy
                .expect("what to do")
                .contains("?lease=48s")
        );
        assert_eq!(verdict(secs(32), secs(48)), Verdict::Good);
        let hidden = lease_budget(&Failover::Unknown("no".to_owned()), secs(30));
        assert_eq!(hidden.verdict, Verdict::Unknown);
    }

    #[test]
    fn text_of_a_server_moves_no_cursor() {
        assert_eq!(printable("a\u{1b}[2Jb\n"), "a\\u{1b}[2Jb\\n");
        assert_eq!(printable("a\u{202e}b\u{61c}"), "a\\u{202e}b\\u{61c}");
        assert_eq!(printable("Übergröße …"), "Übergröße …");
        let mut report = StoreReport::new();
        report.failover = Failover::Unknown("\u{1b}[2J".to_owned());
        let diagnosis = Diagnosis {
            findings: vec![lease_budget(&report.failover, secs(30))],
            what_if: what_if::table(&report, secs(30), secs(10)),
        };
        let text = diagnosis.to_string();
        assert!(
            text.matches("[2J").count() > 1 && !text.contains('\u{1b}'),
            "{text}"
        );
    }

    #[test]
    fn takeover_compares_the_lease_with_the_patience_of_callers() {
        let verdict = |wait| takeover(LeaseEnd::WallClock, secs(30), wait).verdict;
        assert_eq!(verdict(None), Verdict::Unknown);
        assert_eq!(verdict(Some(secs(29))), Verdict::Bad);
        assert_eq!(verdict(Some(secs(30))), Verdict::Good);
    }
}
