//! Fail-overs: planned ones, and those of masters that are killed or stopped until a replica takes their place.

use std::time::{Duration, Instant};

use fastrand::Rng;
use redis::{RedisResult, Value};
use tokio::time::{sleep, timeout};

use super::{Fiend, Kind, Made};
use crate::topology::SERVICE;

/// How long another server may take to become master.
const TO_CHANGE: Duration = Duration::from_secs(20);
/// How long a planned fail-over may take before it is requested again: it may be refused, or lose its election.
const TO_TRY: Duration = Duration::from_secs(2);
/// How long a server may take to answer the harness.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long the servers of a group may take to be master and replicas again.
const TO_BE_WHOLE: Duration = Duration::from_secs(20);

impl Fiend {
    pub(super) async fn strike_master(
        &self,
        kind: Kind,
        group: usize,
        rng: &mut Rng,
    ) -> anyhow::Result<Made> {
        if !self.lineage.is_whole(group, TO_BE_WHOLE).await {
            return Ok(Made::No);
        }
        let Some(master) = self.lineage.master(group) else {
            return Ok(Made::No);
        };
        let server = self.deployment.server(master);
        let made = match kind {
            Kind::FailOver => self.fail_over(group, master, rng).await,
            Kind::MasterKill => {
                if rng.bool() {
                    self.hold_back(group, master, rng).await;
                } else {
                    server.kill();
                }
                let made = self.is_replaced(group, master, TO_CHANGE).await;
                server.restart().await;
                made
            }
            _ => {
                server.stop();
                let made = self.is_replaced(group, master, TO_CHANGE).await;
                server.cont();
                made
            }
        };
        self.lineage.is_whole(group, TO_BE_WHOLE).await;
        Ok(made)
    }

    /// Kills a master while its replicas stand still, so that they lack its last writes.
    async fn hold_back(&self, group: usize, master: usize, rng: &mut Rng) {
        let members = self.deployment.groups().swap_remove(group);
        let replicas = || {
            let others = members.iter().filter(|at| **at != master);
            others.map(|at| self.deployment.server(*at))
        };
        replicas().for_each(|replica| replica.stop());
        sleep(Duration::from_millis(rng.u64(20..300))).await;
        self.deployment.server(master).kill();
        replicas().for_each(|replica| replica.cont());
    }

    async fn fail_over(&self, group: usize, master: usize, rng: &mut Rng) -> Made {
        let until = Instant::now() + TO_CHANGE;
        while Instant::now() < until {
            let members = self.deployment.groups().swap_remove(group);
            let (asked, command): (usize, &[&str]) = match self.deployment.cluster() {
                Some(_) => {
                    let replicas: Vec<_> = members.into_iter().filter(|at| *at != master).collect();
                    (replicas[rng.usize(..replicas.len())], &["CLUSTER", "FAILOVER"])
                }
                None => {
                    let sentinel = rng.usize(self.deployment.sentinels());
                    (sentinel, &["SENTINEL", "FAILOVER", SERVICE])
                }
            };
            let asked = self.deployment.server(asked);
            let _: Result<RedisResult<Value>, _> = timeout(PATIENCE, asked.try_query(command)).await;
            if self.is_replaced(group, master, TO_TRY).await == Made::Yes {
                return Made::Yes;
            }
        }
        Made::No
    }

    async fn is_replaced(&self, group: usize, master: usize, within: Duration) -> Made {
        let until = Instant::now() + within;
        while Instant::now() < until {
            if self.lineage.has_other_master(group, master) {
                return Made::Yes;
            }
            sleep(Duration::from_millis(10)).await;
        }
        Made::No
    }
}
