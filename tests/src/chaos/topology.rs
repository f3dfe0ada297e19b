//! The servers of a run, and the network between them and the workers.

use std::net::SocketAddr;

use super::faults::Kind;
use super::store::{LONGEST_LEASE, Store};
use crate::{Flavor, Proxy, Server};

/// What the locks are on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Topology {
    /// One server
    Standalone,
    /// A majority of five independent servers
    Quorum,
}

/// How many members a quorum has.
const MEMBERS: usize = 5;

impl Topology {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Topology::Standalone => "standalone",
            Topology::Quorum => "quorum",
        }
    }

    /// The kinds of faults that can be made here.
    pub(crate) fn knows(self) -> Vec<Kind> {
        use clap::ValueEnum;
        let all = Kind::value_variants().iter().copied();
        match self {
            Topology::Standalone => all.filter(|kind| *kind != Kind::Partition).collect(),
            Topology::Quorum => all.collect(),
        }
    }

    fn servers(self) -> usize {
        match self {
            Topology::Standalone => 1,
            Topology::Quorum => MEMBERS,
        }
    }

    /// How many servers may be away at a time without that nothing goes on.
    pub(crate) fn may_be_away(self) -> usize {
        match self {
            Topology::Standalone => 1,
            Topology::Quorum => MEMBERS / 2,
        }
    }

    /// Whether a server that lost its data is a store that did.
    pub(crate) fn forgets(self) -> bool {
        self == Topology::Standalone
    }

    /// How long after everything is healed a lock may be had late beyond its lease.
    pub(crate) fn slowness(self) -> std::time::Duration {
        match self {
            Topology::Standalone => std::time::Duration::ZERO,
            // A member that was started anew does not vote for so long.
            Topology::Quorum => LONGEST_LEASE,
        }
    }
}

/// The way of one worker to one server.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) server: usize,
    pub(crate) slot: usize,
    pub(crate) proxy: Proxy,
}

/// All servers, and all ways to them.
#[derive(Debug)]
pub(crate) struct Deployment {
    pub(crate) topology: Topology,
    pub(crate) servers: Vec<Server>,
    pub(crate) links: Vec<Link>,
}

impl Deployment {
    /// Starts everything.
    ///
    /// # Errors
    /// When a server cannot be started.
    pub(crate) async fn start(topology: Topology, slots: usize) -> anyhow::Result<Deployment> {
        let mut servers = Vec::new();
        for _ in 0..topology.servers() {
            // What is written is safe from the death of the process, if not from that of the machine: it is in the
            // kernel's hands before the client is answered.
            let builder = Server::builder(Flavor::from_env()).persistence(true);
            servers.push(builder.config("appendfsync", "no").try_start().await?);
        }
        let mut links = Vec::new();
        for slot in 0..slots {
            for (server, at) in servers.iter().enumerate() {
                let proxy = Proxy::start(at.addr());
                links.push(Link { server, slot, proxy });
            }
        }
        Ok(Deployment {
            topology,
            servers,
            links,
        })
    }

    fn store(&self, addresses: impl Iterator<Item = SocketAddr>) -> Store {
        let mut urls: Vec<_> = addresses.map(|address| format!("redis://{address}")).collect();
        match self.topology {
            Topology::Standalone => Store::Url(urls.remove(0)),
            Topology::Quorum => Store::Quorum(urls),
        }
    }

    /// What the worker of a slot opens.
    pub(crate) fn store_of(&self, slot: usize) -> Store {
        let links = self.links.iter().filter(|link| link.slot == slot);
        self.store(links.map(|link| link.proxy.addr()))
    }

    /// The same without the network in between.
    pub(crate) fn direct(&self) -> Store {
        self.store(self.servers.iter().map(Server::addr))
    }

    /// Ends what is wrong with the network, and forgets what went over it.
    pub(crate) fn heal(&self) {
        for link in &self.links {
            link.proxy.heal();
        }
    }

    /// What is on the servers though nobody holds or waits: keys and subscriptions.
    ///
    /// # Errors
    /// When a server does not answer.
    pub(crate) async fn leftovers(&self) -> anyhow::Result<Vec<String>> {
        let mut left = Vec::new();
        for (at, server) in self.servers.iter().enumerate() {
            let keys: Vec<String> = server.try_query(&["KEYS", "*"]).await?;
            let ours = |key: &String| !key.starts_with("dlock:fence") && key != "dlock:voter";
            left.extend(
                keys.iter()
                    .filter(|key| ours(key))
                    .map(|key| format!("server {at}: key {key}")),
            );
            for channel in server.pubsub_channels().await {
                left.push(format!("server {at}: subscription to {channel}"));
            }
        }
        Ok(left)
    }

    /// The connections of clients that are still open.
    pub(crate) async fn connections(&self) -> Vec<String> {
        let mut left = Vec::new();
        for (at, server) in self.servers.iter().enumerate() {
            for client in server.client_list().await {
                let field = |name: &str| client.get(name).map_or("-", String::as_str);
                left.push(format!(
                    "server {at}: connection of {} after {}",
                    field("name"),
                    field("cmd")
                ));
            }
        }
        left
    }
}
