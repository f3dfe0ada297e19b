//! Faults of the servers.

use std::time::Duration;

use anyhow::Context;
use fastrand::Rng;
use futures_util::future::try_join_all;
use tokio::time::sleep;

use super::{Fiend, Kind};
use crate::Server;
use crate::chaos::clock;

/// What the server may take to answer the harness.
const PATIENCE: Duration = Duration::from_secs(30);

impl Fiend {
    pub(super) async fn strike_servers(
        &self,
        kind: Kind,
        servers: &[usize],
        lasts: Duration,
        rng: &mut Rng,
    ) -> anyhow::Result<()> {
        let servers = || servers.iter().map(|at| &self.deployment.servers[*at]);
        match kind {
            Kind::ServerKill => {
                servers().for_each(Server::kill);
                sleep(lasts).await;
                for server in servers() {
                    server.restart().await;
                }
            }
            Kind::ServerStop => {
                servers().for_each(Server::stop);
                sleep(lasts).await;
                servers().for_each(Server::cont);
            }
            Kind::Wipe => {
                let from = clock::now();
                let disk = rng.u32(..3) == 0;
                for server in servers() {
                    match disk {
                        true => server.restart_empty().await,
                        false => say(server, &["FLUSHALL"]).await?,
                    }
                }
                if self.deployment.topology.forgets() {
                    self.forgot(from, None);
                }
            }
            Kind::ClientPause => {
                let mode = if rng.bool() { "ALL" } else { "WRITE" };
                let millis = lasts.as_millis().max(1).to_string();
                let pause = ["CLIENT", "PAUSE", &millis, mode];
                try_join_all(servers().map(|server| say(server, &pause))).await?;
                sleep(lasts).await;
            }
            Kind::ClientKill => {
                let which = match rng.u32(..3) {
                    0 => "pubsub",
                    _ => "normal",
                };
                for server in servers() {
                    say(server, &["CLIENT", "KILL", "TYPE", which]).await?;
                }
            }
            _ => {
                for server in servers() {
                    say(server, &["SCRIPT", "FLUSH"]).await?;
                }
            }
        }
        Ok(())
    }
}

async fn say(server: &Server, command: &[&str]) -> anyhow::Result<()> {
    let answer = tokio::time::timeout(PATIENCE, server.try_query::<redis::Value>(command)).await;
    answer
        .with_context(|| format!("{server:?} does not answer {command:?}"))?
        .with_context(|| format!("{server:?} does not take {command:?}"))?;
    Ok(())
}
