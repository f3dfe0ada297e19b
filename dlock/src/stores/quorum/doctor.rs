//! The checks of a quorum: those of its members, and whether they are independent of each other.

use std::sync::Arc;

use futures_util::future::join_all;

use super::Quorum;
use crate::store::doctor::{
    Diagnose, Durability, Examination, Failover, Finding, ServerFacts, StoreReport, Verdict,
};
use crate::store::{StoreError, StoreFuture};

const CHECK: &str = "quorum";

impl Diagnose for Quorum {
    fn examine(self: Arc<Self>, examination: Examination) -> StoreFuture<StoreReport> {
        Box::pin(async move {
            let examined = join_all(self.members.iter().map(|member| {
                let (store, examination) = (member.store.clone().diagnose(), examination.clone());
                async move {
                    match store {
                        Some(store) => store.examine(examination).await.map(Some),
                        None => Ok(None),
                    }
                }
            }))
            .await;
            let mut report = StoreReport::new();
            report.failover = Failover::None;
            report.durability = match self.trust_fresh {
                true => Durability::Unknown,
                false => Durability::All,
            };
            report.by_majority = true;
            let (mut of_members, mut away, mut depends) = (Vec::new(), Vec::new(), Vec::new());
            for (member, examined) in self.members.iter().zip(examined) {
                match examined {
                    Ok(Some(examined)) => {
                        // A server that tells its id tells its replicas, too.
                        let is_visible = examined.servers.iter().all(|server| server.id.is_some());
                        if is_visible && matches!(examined.failover, Failover::Unknown(_)) {
                            depends.push(format!(
                                "{} has replicas, or may have: no fail-over may happen there",
                                member.name
                            ));
                        }
                        let mut findings = examined.findings;
                        findings.iter_mut().for_each(|finding| self.suits(finding));
                        of_members.push((member.name.to_string(), findings));
                        let named = |server| ServerFacts {
                            name: member.name.to_string(),
                            ..server
                        };
                        report.servers.extend(examined.servers.into_iter().map(named));
                    }
                    Ok(None) => report.servers.push(ServerFacts::new(&*member.name)),
                    Err(error) => away.push((member.name.to_string(), error)),
                }
            }
            report.findings = Finding::combined(of_members);
            report
                .findings
                .push(self.independence(&report.servers, depends, &away));
            report.findings.push(self.clocks(&report.servers));
            report.findings.push(self.restarts());
            match away.into_iter().next() {
                Some((_, error)) if report.servers.is_empty() => Err(error),
                _ => Ok(report),
            }
        })
    }
}

impl Quorum {
    /// Checks that are bad on a single server but not on a member.
    fn suits(&self, finding: &mut Finding) {
        if finding.check == "persistence" && finding.verdict == Verdict::Bad && !self.trust_fresh {
            *finding = Finding::good(
                finding.check,
                format!(
                    "{}: but then it does not vote for {:?}, so nothing is granted twice",
                    finding.why, self.max_lease
                ),
            );
        }
    }

    fn independence(
        &self,
        servers: &[ServerFacts],
        mut depends: Vec<String>,
        away: &[(String, StoreError)],
    ) -> Finding {
        for (at, server) in servers.iter().enumerate() {
            let others = || servers[..at].iter();
            let host = |server: &ServerFacts| server.name.rsplit_once(':').map(|(host, _)| host.to_owned());
            if let Some(same) = others().find(|other| other.id.is_some() && other.id == server.id) {
                depends.push(format!("{} and {} are one server", same.name, server.name));
            } else if let Some(same) =
                others().find(|other| host(other).is_some() && host(other) == host(server))
            {
                depends.push(format!(
                    "{} and {} share a host: they fail together",
                    same.name, server.name
                ));
            }
            if let Some(of) = &server.replica_of {
                depends.push(format!(
                    "{} is a replica of {of}: it has no vote of its own",
                    server.name
                ));
            }
        }
        let majority = self.majority();
        depends.extend(
            away.iter()
                .map(|(name, error)| format!("{name} does not answer: {error}")),
        );
        if !depends.is_empty() {
            let remedy = "independent servers on hosts of their own, an odd number of them, without replicas";
            return Finding::bad(CHECK, depends.join("; "), remedy);
        }
        if servers.iter().any(|server| server.id.is_none()) {
            let why = "not visible: not every member tells what makes it another one than the rest (run_id), and whether \
                       it has replicas";
            return Finding::unknown(CHECK, why, Some("let the user of the doctor: +info".to_owned()));
        }
        let all = self.members.len();
        Finding::good(
            CHECK,
            format!("{all} independent servers, {majority} of which grant a lock"),
        )
    }

    fn restarts(&self) -> Finding {
        const CHECK: &str = "quorum-restarts";
        match self.trust_fresh {
            true => Finding::bad(
                CHECK,
                "servers vote at once after a restart, although they may have lost their data: a lock may be granted \
                 twice",
                "remove trust_fresh_servers once the servers are installed",
            ),
            false => Finding::good(
                CHECK,
                format!(
                    "a server that may have lost its data does not vote for {:?}",
                    self.max_lease
                ),
            ),
        }
    }

    /// Members that lost their data derive tokens from their clocks.
    fn clocks(&self, servers: &[ServerFacts]) -> Finding {
        const CHECK: &str = "quorum-clocks";
        let ahead: Vec<i64> = servers
            .iter()
            .filter_map(|server| server.clock_ahead_ms)
            .collect();
        let (Some(least), Some(most)) = (ahead.iter().min(), ahead.iter().max()) else {
            return Finding::unknown(CHECK, "not visible: no member tells its time", None);
        };
        let apart = most.abs_diff(*least);
        let (max_lease, apart_text) = (
            self.max_lease,
            format!("the clocks of the members are {apart} ms apart"),
        );
        match u128::from(apart) * 2 > max_lease.as_millis() {
            true => Finding::bad(
                CHECK,
                format!(
                    "{apart_text}, and fencing tokens may go back where that is more than max_lease ({max_lease:?})"
                ),
                "let a time service keep the clocks of all members",
            ),
            false => Finding::good(CHECK, apart_text),
        }
    }
}
