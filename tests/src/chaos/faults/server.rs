//! Faults of the servers.

use std::time::Duration;

use anyhow::Context;
use fastrand::Rng;
use tokio::time::sleep;

use super::{Fiend, Kind, Made};
use crate::Server;
use crate::chaos::clock;

/// What the server may take to answer the harness.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the servers of a group may take to be master and replicas again.
const TO_BE_WHOLE: Duration = Duration::from_secs(20);
/// How far clocks step, in milliseconds: less and more than a lease.
const STEPS: std::ops::Range<u64> = 300..3000;

impl Fiend {
    /// Strikes, and waits until the servers with the same data agree on their master again.
    pub(super) async fn strike_servers(
        &self,
        kind: Kind,
        servers: &[usize],
        lasts: Duration,
        rng: &mut Rng,
    ) -> anyhow::Result<Made> {
        let made = self.strike(kind, servers, lasts, rng).await?;
        self.group_is_whole(servers[0]).await;
        Ok(made)
    }

    /// After a short time without master or replica nothing is wrong yet; the next fault may be one too many.
    async fn group_is_whole(&self, server: usize) {
        let groups = self.deployment.groups();
        if let Some(group) = groups.iter().position(|group| group.contains(&server)) {
            self.lineage.is_whole(group, TO_BE_WHOLE).await;
        }
    }

    pub(super) async fn strike(
        &self,
        kind: Kind,
        numbers: &[usize],
        lasts: Duration,
        rng: &mut Rng,
    ) -> anyhow::Result<Made> {
        let servers = || numbers.iter().map(|at| self.deployment.server(*at));
        let nodes = || numbers.iter().map(|at| self.deployment.nodes()[*at]);
        match kind {
            Kind::ServerKill => {
                nodes().for_each(|node| node.kill());
                sleep(lasts).await;
                for (at, node) in numbers.iter().zip(nodes()) {
                    node.restart().await;
                    if self.deployment.sentinels().contains(at) {
                        self.deployment.hurry(*at).await;
                    }
                }
            }
            Kind::ServerStop => {
                let mut stopped: Vec<_> = numbers.to_vec();
                if let Some(stores) = self.deployment.stores() {
                    for server in &mut stopped {
                        *server = stores.may_stop(*server).await;
                    }
                }
                let nodes = || stopped.iter().map(|at| self.deployment.nodes()[*at]);
                nodes().for_each(|node| node.stop());
                sleep(lasts).await;
                nodes().for_each(|node| node.cont());
            }
            Kind::FollowerCut => {
                let stores = self.deployment.stores().context("only ZooKeeper has followers")?;
                let cut = stores.cut_follower(numbers[0]).await?;
                sleep(lasts).await;
                stores.thaw(cut)?;
            }
            Kind::Wipe => {
                let from = clock::now();
                let disk = rng.u32(..3) == 0;
                let mut made = Made::Yes;
                for server in servers() {
                    match disk {
                        true => server.restart_empty().await,
                        false => made = self.say(server, &["FLUSHALL"]).await?,
                    }
                }
                if self.deployment.topology.forgets() {
                    self.forgot(from, None);
                }
                return Ok(made);
            }
            Kind::ClientPause => {
                let mode = if rng.bool() { "ALL" } else { "WRITE" };
                let millis = lasts.as_millis().max(1).to_string();
                for server in servers() {
                    if self.say(server, &["CLIENT", "PAUSE", &millis, mode]).await? == Made::No {
                        return Ok(Made::No);
                    }
                }
                sleep(lasts).await;
            }
            Kind::ClientKill => {
                if let Some(stores) = self.deployment.stores() {
                    stores.disconnect().await?;
                    return Ok(Made::Yes);
                }
                let which = match rng.u32(..3) {
                    0 => "pubsub",
                    _ => "normal",
                };
                return self.say_all(servers(), &["CLIENT", "KILL", "TYPE", which]).await;
            }
            _ => return self.say_all(servers(), &["SCRIPT", "FLUSH"]).await,
        }
        Ok(Made::Yes)
    }

    /// All clocks at a time: a server that takes over has the time of the former one.
    pub(super) fn step_clocks(&self, rng: &mut Rng) -> anyhow::Result<Made> {
        let from = clock::now();
        let by = Duration::from_millis(rng.u64(STEPS));
        let made = self.deployment.step_clocks(by)?;
        self.forgot(from, None);
        Ok(made.map_or(Made::No, |()| Made::Yes))
    }

    /// Says it to each of them; it was made where one took it.
    async fn say_all<'a>(
        &self,
        servers: impl Iterator<Item = &'a Server>,
        command: &[&str],
    ) -> anyhow::Result<Made> {
        let mut made = Made::No;
        for server in servers {
            if self.say(server, command).await? == Made::Yes {
                made = Made::Yes;
            }
        }
        Ok(made)
    }

    /// A server that may be replaced at any time need not be there, or need not be a master, when it is told something.
    async fn say(&self, server: &Server, command: &[&str]) -> anyhow::Result<Made> {
        let fails_over = self.deployment.topology.fails_over();
        let patience = if fails_over {
            Duration::from_secs(2)
        } else {
            PATIENCE
        };
        let answer = tokio::time::timeout(patience, server.try_query::<redis::Value>(command)).await;
        if fails_over && !matches!(answer, Ok(Ok(_))) {
            return Ok(Made::No);
        }
        answer
            .with_context(|| format!("{server:?} does not answer {command:?}"))?
            .with_context(|| format!("{server:?} does not take {command:?}"))?;
        Ok(Made::Yes)
    }
}
