//! Diagnoses the servers: reads the state of each one, and tries operations on a scratch key.

mod checks;

use std::sync::Arc;

use dlock::store::doctor::{
    Diagnose, Durability, Examination, LeaseEnd, ServerFacts, StoreReport, not_tried, request_times,
    scratch_key,
};
use dlock::store::{Reason, Store, StoreError, StoreFuture};
use futures_util::future::join_all;
use tokio::time::timeout;

use self::checks::{Facts, Seen};
use super::EtcdLocks;
use crate::client::proto::{AlarmRequest, MemberListRequest, StatusRequest, StatusResponse};
use crate::client::{Call, Rpc, Trouble};

impl Diagnose for EtcdLocks {
    fn examine(self: Arc<Self>, examination: Examination) -> StoreFuture<StoreReport> {
        Box::pin(self.examined(examination))
    }
}

impl EtcdLocks {
    async fn examined(self: Arc<Self>, examination: Examination) -> Result<StoreReport, StoreError> {
        let servers = &self.0.links.config.servers;
        let asked = join_all(servers.iter().map(|server| self.look(server))).await;
        let mut statuses = Vec::new();
        let mut one = None;
        for (server, answer) in servers.iter().zip(asked) {
            match answer {
                Ok((rpc, status)) => {
                    one.get_or_insert(rpc);
                    statuses.push((server.clone(), Ok(status)));
                }
                Err(why) => statuses.push((server.clone(), Err(why))),
            }
        }
        let Some(rpc) = one else {
            let whys: Vec<String> = statuses
                .into_iter()
                .filter_map(|(_, status)| status.err())
                .collect();
            return Err(StoreError::not_done(Reason::Unreachable, whys.join("; ")));
        };
        let facts = Facts {
            statuses,
            members: self
                .see(&rpc, MemberListRequest {})
                .await
                .map(|reply| reply.members),
            alarms: self.see(&rpc, AlarmRequest {}).await.map(|reply| reply.alarms),
        };
        let mut report = StoreReport::new();
        (report.findings, report.failover) = checks::all(&facts);
        // Each member writes an entry to its disk before it replies, unless configured otherwise.
        report.durability = Durability::All;
        report.by_majority = facts.voters() > 1;
        report.lease_end = LeaseEnd::SteadyClock;
        report.servers = servers.iter().map(ServerFacts::new).collect();
        if examination.probes {
            let times = request_times(self.clone() as Arc<dyn Store>, &scratch_key(), &examination).await;
            report.findings.push(times);
        } else {
            report.findings.extend(not_tried(&["request-times"]));
        }
        Ok(report)
    }

    /// Connects to one server and reads its state.
    async fn look(&self, server: &String) -> Seen<(Rpc, StatusResponse)> {
        let limit = self.0.links.config.timeout;
        let looking = async {
            let rpc = self
                .0
                .links
                .config
                .connect(server)
                .await
                .map_err(|error| error.message)?;
            let status = self.see(&rpc, StatusRequest {}).await?;
            Ok((rpc, status))
        };
        let looked = timeout(limit, looking).await;
        looked.unwrap_or_else(|_| Err(format!("{server} did not answer within {limit:?}")))
    }

    async fn see<C: Call>(&self, rpc: &Rpc, message: C) -> Seen<C::Reply> {
        let limit = self.0.links.config.timeout;
        match timeout(limit, rpc.call(message)).await {
            Ok(reply) => reply.map_err(|trouble| match trouble {
                Trouble::NotSent(why) => why,
                Trouble::Status(status) => status.message().to_owned(),
            }),
            Err(_) => Err(format!("no answer within {limit:?}")),
        }
    }
}
