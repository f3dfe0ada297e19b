//! Evaluates the facts that the doctor collected, without I/O.

use dlock::store::doctor::{Failover, Finding};

use crate::client::proto::{Alarm, Member, StatusResponse};
use crate::client::version;

/// A fact, or why it is not visible.
pub(super) type Seen<T> = Result<T, String>;

/// The facts that the doctor collected.
pub(super) struct Facts {
    /// The state of each server in the URL.
    pub(super) statuses: Vec<(String, Seen<StatusResponse>)>,
    pub(super) members: Seen<Vec<Member>>,
    pub(super) alarms: Seen<Vec<Alarm>>,
}

/// The number of entries from which a member counts as behind; at 5,000 etcd refuses requests.
const BEHIND: u64 = 1000;
/// The default quota of etcd 3.6 and older.
const DEFAULT_QUOTA: i64 = 2 << 30;

impl Facts {
    /// The servers that replied, with their states.
    fn states(&self) -> impl Iterator<Item = (&str, &StatusResponse)> {
        self.statuses
            .iter()
            .filter_map(|(server, status)| Some((server.as_str(), status.as_ref().ok()?)))
    }

    /// The number of voting members.
    pub(super) fn voters(&self) -> usize {
        match &self.members {
            Ok(members) => members.iter().filter(|member| !member.is_learner).count(),
            Err(_) => self.statuses.len(),
        }
    }
}

fn hidden(check: &'static str, why: &str) -> Finding {
    let remedy = "let the user of the doctor have the role root, for the time of the diagnosis".to_owned();
    Finding::unknown(check, format!("not visible: {why}"), Some(remedy))
}

/// Runs all checks; also estimates the time of a failover.
pub(super) fn all(facts: &Facts) -> (Vec<Finding>, Failover) {
    let failover = match facts.voters() {
        1 => Failover::None,
        _ => Failover::Unknown(
            "a new leader is elected after the election timeout, 1 s by default, which no server tells"
                .to_owned(),
        ),
    };
    let findings = vec![
        members(facts),
        leader(facts),
        versions(facts),
        alarms(&facts.alarms),
        space(facts),
        lag(facts),
    ];
    (findings, failover)
}

fn members(facts: &Facts) -> Finding {
    const CHECK: &str = "members";
    if let Some((server, Err(why))) = facts.statuses.iter().find(|(_, status)| status.is_err()) {
        return Finding::bad(
            CHECK,
            format!("{server} does not serve: {why}"),
            "start it again, or take it out of the URL and out of the cluster",
        );
    }
    let voters = match &facts.members {
        Ok(_) => facts.voters(),
        Err(why) => return hidden(CHECK, why),
    };
    if voters > facts.statuses.len() {
        return Finding::bad(
            CHECK,
            format!(
                "the URL names {} of {voters} members: where these fail, no lock can be acquired though the others serve",
                facts.statuses.len()
            ),
            "all members in the URL",
        );
    }
    match voters {
        1 => Finding::good(
            CHECK,
            "one: while it is down no lock can be acquired, and none is forgotten",
        ),
        voters if voters % 2 == 0 => Finding::bad(
            CHECK,
            format!(
                "{voters} members: no more of them may fail than of {}",
                voters - 1
            ),
            "an odd number of members",
        ),
        voters => Finding::good(
            CHECK,
            format!("{voters} members serve, {} may fail", (voters - 1) / 2),
        ),
    }
}

fn leader(facts: &Facts) -> Finding {
    const CHECK: &str = "leader";
    let mut leaders: Vec<u64> = facts.states().map(|(_, status)| status.leader).collect();
    leaders.sort_unstable();
    leaders.dedup();
    match leaders.as_slice() {
        [leader] if *leader != 0 => Finding::good(CHECK, "the members agree on a leader"),
        _ => Finding::bad(
            CHECK,
            "a member knows no leader, or another one than the others: it serves no lock until that is over",
            "the network between the members; most of them have to be up",
        ),
    }
}

fn versions(facts: &Facts) -> Finding {
    const CHECK: &str = "versions";
    let mut all: Vec<&str> = facts
        .states()
        .map(|(_, status)| status.version.as_str())
        .collect();
    if let Some(why) = all.iter().find_map(|version| version::check(version).err()) {
        return Finding::bad(CHECK, why, "etcd 3.5.13, 3.6 or newer");
    }
    all.sort_unstable();
    all.dedup();
    match all.as_slice() {
        [one] => Finding::good(CHECK, format!("etcd {one}")),
        several => Finding::bad(
            CHECK,
            format!("members of several versions: {}", several.join(", ")),
            "bring the upgrade to its end",
        ),
    }
}

fn alarms(alarms: &Seen<Vec<Alarm>>) -> Finding {
    const CHECK: &str = "alarms";
    let named = |alarm: &Alarm| match alarm.kind {
        1 => format!(
            "member {:x} has no space left: no lock can be acquired (what is held is renewed and released)",
            alarm.member
        ),
        2 => format!("the data of member {:x} are corrupt", alarm.member),
        kind => format!("member {:x} has the alarm {kind}", alarm.member),
    };
    match alarms {
        Ok(alarms) if alarms.is_empty() => Finding::good(CHECK, "none"),
        Ok(alarms) => Finding::bad(
            CHECK,
            alarms.iter().map(named).collect::<Vec<_>>().join("; "),
            "no space: compact, `etcdctl defrag`, and `etcdctl alarm disarm`; corrupt: replace the member",
        ),
        Err(why) => hidden(CHECK, why),
    }
}

fn space(facts: &Facts) -> Finding {
    const CHECK: &str = "space";
    let fullest = facts.states().map(|(server, status)| {
        let quota = match status.db_size_quota {
            0 => None,
            quota => Some(quota),
        };
        let share = status.db_size.saturating_mul(100) / quota.unwrap_or(DEFAULT_QUOTA).max(1);
        (share, server, quota.is_some())
    });
    let Some((share, server, is_told)) = fullest.max() else {
        return hidden(CHECK, "no member told its size");
    };
    let why = format!("{share} % of the quota of {server} are used");
    match (share > 80, is_told) {
        (true, true) => Finding::bad(
            CHECK,
            format!("{why}: when it is full no lock can be acquired"),
            "auto-compaction-retention, `etcdctl defrag`, or a greater quota-backend-bytes",
        ),
        (true, false) => Finding::bad(
            CHECK,
            format!("{why}, if it has the default of 2 GiB, which it does not tell"),
            "auto-compaction-retention, `etcdctl defrag`; etcd 3.6 tells its quota",
        ),
        (false, true) => Finding::good(CHECK, why),
        (false, false) => Finding::unknown(
            CHECK,
            format!("not visible: {why}, if it has the default of 2 GiB, which it does not tell"),
            Some("etcd 3.6 tells its quota".to_owned()),
        ),
    }
}

fn lag(facts: &Facts) -> Finding {
    const CHECK: &str = "lag";
    let newest = facts
        .states()
        .map(|(_, status)| status.raft_index)
        .max()
        .unwrap_or(0);
    let behind = facts
        .states()
        .map(|(server, status)| (newest.saturating_sub(status.raft_applied), server))
        .max();
    match behind {
        Some((entries, server)) if entries > BEHIND => Finding::bad(
            CHECK,
            format!(
                "{server} is {entries} entries behind: its clients hear late of releases, and at 5,000 it refuses requests"
            ),
            "the disk of the member, which has to write each entry; the network to it",
        ),
        Some((entries, _)) => {
            Finding::good(CHECK, format!("every member is at most {entries} entries behind"))
        }
        None => hidden(CHECK, "no member told"),
    }
}

#[cfg(test)]
mod tests {
    use dlock::store::doctor::Verdict;

    use super::*;

    fn status(version: &str) -> StatusResponse {
        StatusResponse {
            version: version.to_owned(),
            db_size: 1 << 20,
            leader: 7,
            raft_index: 100,
            raft_applied: 100,
            is_learner: false,
            db_size_quota: 2 << 30,
        }
    }

    fn facts(statuses: Vec<StatusResponse>) -> Facts {
        let member = |_: &StatusResponse| Member::default();
        Facts {
            members: Ok(statuses.iter().map(member).collect()),
            statuses: statuses
                .into_iter()
                .map(|status| ("s:2379".to_owned(), Ok(status)))
                .collect(),
            alarms: Ok(Vec::new()),
        }
    }

    fn with(change: impl FnOnce(&mut StatusResponse)) -> Facts {
        let mut changed = status("3.6.4");
        change(&mut changed);
        facts(vec![status("3.6.4"), changed, status("3.6.4")])
    }

    #[test]
    fn member_that_is_behind_full_or_without_a_leader_is_bad() {
        assert_eq!(lag(&with(|s| s.raft_index = 1100)).verdict, Verdict::Good);
        assert_eq!(lag(&with(|s| s.raft_index = 1101)).verdict, Verdict::Bad);
        assert_eq!(leader(&with(|_| {})).verdict, Verdict::Good);
        assert_eq!(leader(&with(|s| s.leader = 0)).verdict, Verdict::Bad);
        assert_eq!(leader(&with(|s| s.leader = 8)).verdict, Verdict::Bad);
        assert_eq!(
            space(&with(|s| s.db_size = (2 << 30) / 10 * 8)).verdict,
            Verdict::Good
        );
        assert_eq!(
            space(&with(|s| s.db_size = (2 << 30) / 10 * 9)).verdict,
            Verdict::Bad
        );
        let untold = |size| {
            let change = |s: &mut StatusResponse| (s.db_size, s.db_size_quota) = (size, 0);
            space(&with(change)).verdict
        };
        assert_eq!(untold(2 << 30), Verdict::Bad);
        let mut hidden = status("3.5.21");
        hidden.db_size_quota = 0;
        assert_eq!(space(&facts(vec![hidden])).verdict, Verdict::Unknown);
    }

    #[test]
    fn members_are_odd_and_of_one_version_without_the_defect() {
        let verdict = |count| members(&facts(vec![status("3.6.4"); count])).verdict;
        assert_eq!(
            (verdict(1), verdict(2), verdict(3)),
            (Verdict::Good, Verdict::Bad, Verdict::Good)
        );
        assert_eq!(versions(&with(|_| {})).verdict, Verdict::Good);
        assert_eq!(
            versions(&with(|s| s.version = "3.5.21".to_owned())).verdict,
            Verdict::Bad
        );
        assert_eq!(versions(&facts(vec![status("3.5.12")])).verdict, Verdict::Bad);
    }
}
