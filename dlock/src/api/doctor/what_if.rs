//! "What happens here if …": which locks are lost, and how long callers wait.

use std::time::Duration;

use crate::engine::grant::safety_margin;
use crate::store::doctor::{Durability, Failover, LeaseEnd, StoreReport};

const CUT: Duration = Duration::from_secs(10);
const STEP: Duration = Duration::from_secs(5);

/// What a failure would cost here.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// for consequence in client.doctor().await?.what_if {
///     println!("{}: {}; callers: {}", consequence.event, consequence.lost, consequence.waits);
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Consequence {
    /// What fails.
    pub event: &'static str,
    /// Which locks are lost.
    pub lost: String,
    /// For how long callers wait.
    pub waits: String,
}

/// The table for a store, with these settings of the client.
pub(super) fn table(report: &StoreReport, lease: Duration, retry_for: Duration) -> Vec<Consequence> {
    let consequence = |event, (lost, waits)| Consequence { event, lost, waits };
    vec![
        consequence(
            "a process that holds locks is killed",
            killed(report.lease_end, lease),
        ),
        consequence("the server is restarted", restarted(report, lease, retry_for)),
        consequence("a server fails over", fails_over(report, lease, retry_for)),
        consequence("the network is cut for 10 s", cut(lease, retry_for)),
        consequence("the server's clock steps ahead by 5 s", stepped(report, lease)),
    ]
}

fn killed(end: LeaseEnd, lease: Duration) -> (String, String) {
    let (ends, after) = match end {
        LeaseEnd::Session { timeout, .. } => ("its session ends", timeout),
        LeaseEnd::WallClock | LeaseEnd::SteadyClock => ("their leases end", lease),
    };
    (
        format!("those that it held, when {ends}"),
        format!("up to {after:?} for a lock that it held; 0s for all others"),
    )
}

fn gives_up(retry_for: Duration) -> String {
    format!("until it is back; those that have waited {retry_for:?} (retry_for) get an error")
}

fn restarted(report: &StoreReport, lease: Duration, retry_for: Duration) -> (String, String) {
    if report.by_majority {
        let lost = match report.durability {
            Durability::All => "none, while a majority of the servers stays up",
            _ => {
                "those that it granted, if it lost its data: it votes at once, and others may acquire them before \
                 their holders are told; until then only fencing tokens protect"
            }
        };
        return (lost.to_owned(), "not longer than before".to_owned());
    }
    let in_time = lease * 2 / 3;
    let lost = match report.durability {
        Durability::All => format!("none, where it is back within {in_time:.1?}"),
        Durability::LastSecond => {
            format!(
                "those of about the last second; and more where it is back later than after {in_time:.1?}"
            )
        }
        Durability::Snapshot => {
            "all that were acquired or renewed since the last snapshot; their holders are told when \
                                 they are connected again, and others may acquire them before"
                .to_owned()
        }
        Durability::Nothing => {
            "all; their holders are told when they are connected again, and others may acquire them \
                                before: only fencing tokens protect"
                .to_owned()
        }
        Durability::Unknown => "not visible: whether it keeps its data is not known".to_owned(),
    };
    (lost, gives_up(retry_for))
}

fn fails_over(report: &StoreReport, lease: Duration, retry_for: Duration) -> (String, String) {
    match &report.failover {
        _ if report.by_majority => (
            "none: no server takes over from another one".to_owned(),
            "not longer than before".to_owned(),
        ),
        Failover::None => (
            "no server takes over here: as long as it is down, leases end".to_owned(),
            gives_up(retry_for),
        ),
        Failover::Takes(takes) if *takes > lease * 2 / 3 => (
            format!(
                "those whose leases end within {takes:.1?}: all, at the wrong moment; and the newest, which the replica did \
                 not receive"
            ),
            format!("about {takes:.1?}{}", after(retry_for, *takes)),
        ),
        Failover::Takes(takes) => (
            "the newest, which the replica did not receive; their holders are told".to_owned(),
            format!("about {takes:.1?}{}", after(retry_for, *takes)),
        ),
        Failover::Unknown(why) => (format!("not visible: {why}"), "not visible".to_owned()),
    }
}

fn after(retry_for: Duration, takes: Duration) -> String {
    match retry_for < takes {
        true => format!("; most get an error after {retry_for:?} (retry_for)"),
        false => String::new(),
    }
}

fn cut(lease: Duration, retry_for: Duration) -> (String, String) {
    let margin = safety_margin(lease);
    let lost = match CUT + margin {
        cut if cut > lease => format!("all behind the cut: 10 s are longer than the lease of {lease:?}"),
        cut if cut > lease * 2 / 3 => format!(
            "those behind the cut that were not renewed just before: 10 s are longer than two thirds of the lease of \
             {lease:?}"
        ),
        _ => "none".to_owned(),
    };
    let waits = match retry_for < CUT {
        true => format!("those behind the cut get an error after {retry_for:?} (retry_for)"),
        false => "10 s behind the cut".to_owned(),
    };
    (lost, waits)
}

fn stepped(report: &StoreReport, lease: Duration) -> (String, String) {
    if report.lease_end != LeaseEnd::WallClock {
        return (
            "none: the servers count leases by a clock that does not step".to_owned(),
            "not longer than before".to_owned(),
        );
    }
    if report.by_majority {
        return (
            "none, while the clocks of a majority stay right".to_owned(),
            "not longer than before".to_owned(),
        );
    }
    let lost = match STEP > lease * 2 / 3 {
        true => "those with less than 5 s left, all at the wrong moment: others may acquire them up to 5 s before their \
                 holders are told; until then only fencing tokens protect"
            .to_owned(),
        false => "fixed leases with less than 5 s left; renewed ones have more, and are renewed before".to_owned(),
    };
    (lost, "not longer than before".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consequences_follow_from_lease_fail_over_and_durability() {
        let secs = Duration::from_secs;
        let mut report = StoreReport::new();
        report.failover = Failover::Takes(secs(32));
        report.durability = Durability::Nothing;
        let all = table(&report, secs(30), secs(10));
        assert_eq!(all.len(), 5);
        assert!(all[0].waits.contains("30s"));
        assert!(all[1].lost.starts_with("all"));
        assert!(all[2].lost.contains("all, at the wrong moment"));
        assert!(all[2].waits.contains("retry_for"));
        assert_eq!(all[3].lost, "none");
        assert!(
            table(&report, secs(9), secs(10))[3]
                .lost
                .starts_with("all behind")
        );
        report.by_majority = true;
        let all = table(&report, secs(30), secs(10));
        assert!(all[1].lost.starts_with("those that it granted"));
        report.durability = Durability::All;
        let all = table(&report, secs(30), secs(10));
        assert!(all[1..3].iter().all(|row| row.lost.starts_with("none")));
        report.by_majority = false;
        assert!(!table(&report, secs(6), secs(10))[4].lost.starts_with("none"));
        report.lease_end = LeaseEnd::session(secs(40), secs(20));
        let all = table(&report, secs(6), secs(10));
        assert!(all[0].lost.contains("its session ends") && all[0].waits.contains("40s"));
        assert!(all[3].lost.starts_with("all behind") && all[4].lost.starts_with("none"));
    }
}
