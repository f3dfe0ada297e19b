//! The checks of Redis and Valkey: one server, the master of sentinels, and a Cluster.

mod checks;
mod facts;
mod probes;

use std::sync::Arc;
use std::time::Duration;

use self::checks::Context;
use self::facts::{Facts, Patient, read_clock};
use self::probes::Probe;
use super::RedisStore;
use super::endpoint::Endpoint;
use super::node::Node;
use crate::base::clock;
use crate::store::doctor::{
    ClockReading, Diagnose, Durability, Examination, Failover, Finding, ServerFacts, StoreReport,
};
use crate::store::{StoreError, StoreFuture};

/// The time for electing a replica, and until clients have learned of it.
const ELECTION: Duration = Duration::from_secs(2);
/// The time between two readings of a clock.
const CLOCK: Duration = Duration::from_secs(3);

/// One server, examined.
struct Examined {
    name: String,
    findings: Vec<Finding>,
    facts: Facts,
    durability: Durability,
    server: ServerFacts,
}

impl Diagnose for RedisStore {
    fn examine(self: Arc<Self>, examination: Examination) -> StoreFuture<StoreReport> {
        Box::pin(async move {
            let nodes = self.servers.nodes();
            let examined = nodes.iter().map(|node| self.examine_node(node, &examination));
            let all: Vec<Examined> = futures_util::future::try_join_all(examined).await?;
            let mut report = StoreReport::new();
            report.failover = failover(&nodes, &all, self.servers.has_slots());
            report.durability = all
                .iter()
                .map(|one| one.durability)
                .max()
                .unwrap_or(Durability::Unknown);
            report.servers = all.iter().map(|one| one.server.clone()).collect();
            let findings = all.into_iter().map(|one| (one.name, one.findings));
            report.findings = Finding::combined(findings.collect());
            Ok(report)
        })
    }
}

impl RedisStore {
    async fn examine_node(&self, node: &Node, examination: &Examination) -> Result<Examined, StoreError> {
        let in_cluster = self.servers.has_slots();
        let mut patient = Patient::new(node);
        // Whether it answers at all.
        let mut hello = redis::cmd("EVAL");
        hello.arg("return 1").arg(0);
        if let Err(error) = patient.ask(hello).await
            && !error.is_refused()
        {
            return Err(error);
        }
        let begun = clock::now();
        let facts = Facts::of(&mut patient, in_cluster).await;
        let context = Context {
            timeout: examination.timeout,
            min_replicas: node.min_replicas,
            fails_over: in_cluster || matches!(node.endpoint, Endpoint::Master(_)),
            in_cluster,
        };
        let (mut findings, durability) = checks::all(&facts, &context);
        if examination.probes {
            findings.extend(match Probe::new(self, &mut patient, examination.timeout) {
                Some(probe) => probe.all().await,
                None => not_tried("no key of this server was found"),
            });
            clock::sleep_until(begun + CLOCK).await;
        } else {
            findings.extend(not_tried("nothing was tried, this only reads"));
        }
        let second = read_clock(&mut patient).await;
        findings.push(checks::clock(&facts.clock, &second));
        let mut server = ServerFacts::new(node.endpoint.to_string());
        if let Ok(info) = &facts.info {
            server.id = info.text("run_id").map(str::to_owned);
            server.replica_of = (info.text("master_host").zip(info.text("master_port")))
                .map(|(host, port)| format!("{host}:{port}"));
        }
        server.clock_ahead_ms = facts.clock.as_ref().ok().map(ClockReading::ahead_ms);
        Ok(Examined {
            name: node.endpoint.to_string(),
            findings,
            facts,
            durability,
            server,
        })
    }
}

/// The checks that a read-only diagnosis cannot make.
fn not_tried(why: &str) -> Vec<Finding> {
    let checks = ["request-times", "wake-up", "expiry", "pubsub", "permissions"];
    let unknown = |check| {
        let remedy = "let the doctor try: `dlock doctor`, or `doctor().probe(true)`".to_owned();
        Finding::unknown(check, format!("not visible: {why}"), Some(remedy))
    };
    checks.map(unknown).to_vec()
}

/// How long it takes until another server takes over.
fn failover(nodes: &[Node], all: &[Examined], in_cluster: bool) -> Failover {
    if in_cluster {
        let timeouts = all.iter().map(|one| one.facts.setting("cluster-node-timeout"));
        let longest = timeouts
            .map(|timeout| timeout.ok()?.parse().ok())
            .collect::<Option<Vec<u64>>>();
        return match longest.and_then(|all| all.into_iter().max()) {
            Some(timeout) => Failover::Takes(Duration::from_millis(timeout) + ELECTION),
            None => Failover::Unknown(
                "the server does not tell cluster-node-timeout (+config|get, for administrators)".to_owned(),
            ),
        };
    }
    let Some((node, one)) = nodes.first().zip(all.first()) else {
        return Failover::Unknown("there is no server".to_owned());
    };
    if let Endpoint::Master(master) = &node.endpoint {
        return match master.down_after() {
            Some(down_after) => Failover::Takes(down_after + ELECTION),
            None => Failover::Unknown("no sentinel tells its down-after-milliseconds".to_owned()),
        };
    }
    match &one.facts.info {
        Ok(info) if info.replicas().is_empty() => Failover::None,
        Ok(_) => Failover::Unknown(
            "the server has replicas, and when one of them takes its place is up to others (a managed service?)".to_owned(),
        ),
        Err(why) => Failover::Unknown(format!("whether there are replicas is not visible: {why}")),
    }
}
