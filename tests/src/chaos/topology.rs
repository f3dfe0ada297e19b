//! The servers of a run, and the network between them and the workers.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use parking_lot::Mutex;

use super::clock::{self, Nanos};
use super::faults::Kind;
use super::store::{KEYS, LONGEST_LEASE, StoreSpec, key_name};
use crate::topology::SERVICE;
use crate::{Clock, Cluster, Flavor, Proxy, Replicas, Server, slot_of};

/// What the locks are on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Topology {
    /// One server
    Standalone,
    /// A master with two replicas, and three sentinels
    Sentinel,
    /// Three masters with a replica each
    Cluster,
    /// A majority of five independent servers
    Quorum,
}

/// How many members a quorum has.
const MEMBERS: usize = 5;
/// How many shards a cluster has.
const SHARDS: usize = 3;

impl Topology {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Topology::Standalone => "standalone",
            Topology::Sentinel => "sentinel",
            Topology::Cluster => "cluster",
            Topology::Quorum => "quorum",
        }
    }

    /// The kinds of faults that can be made here.
    pub(crate) fn knows(self) -> Vec<Kind> {
        use clap::ValueEnum;
        let is_made = |kind: &Kind| match kind {
            Kind::Partition => self == Topology::Quorum,
            Kind::FailOver | Kind::MasterKill | Kind::MasterStop => self.fails_over(),
            Kind::SlotMove => self == Topology::Cluster,
            _ => true,
        };
        Kind::value_variants().iter().copied().filter(is_made).collect()
    }

    /// Whether a server has replicas, one of which takes its place.
    pub(crate) fn fails_over(self) -> bool {
        matches!(self, Topology::Sentinel | Topology::Cluster)
    }

    /// How many independent servers may be away at a time without that nothing goes on.
    pub(crate) fn may_be_away(self) -> usize {
        match self {
            Topology::Quorum => MEMBERS / 2,
            _ => 1,
        }
    }

    /// Whether a server that lost its data is a store that did.
    pub(crate) fn forgets(self) -> bool {
        self != Topology::Quorum
    }

    /// How many faults there are at a time: what strikes a replica set takes long, and only one of them can.
    pub(crate) fn at_once(self) -> usize {
        if self.fails_over() { 3 } else { 2 }
    }

    /// How long after everything is healed a lock may be acquired late beyond its lease.
    pub(crate) fn slowness(self) -> Duration {
        match self {
            Topology::Standalone => Duration::ZERO,
            // A member that was started anew does not vote for so long.
            Topology::Quorum => LONGEST_LEASE,
            // Clients ask for the masters anew, about once a second after a failure.
            Topology::Sentinel | Topology::Cluster => Duration::from_secs(2),
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

#[derive(Debug)]
enum Servers {
    Alone(Vec<Server>),
    Replicas(Replicas),
    Cluster(Cluster),
}

/// All servers, and all ways to them.
#[derive(Debug)]
pub(crate) struct Deployment {
    pub(crate) topology: Topology,
    servers: Servers,
    pub(crate) links: Vec<Link>,
    /// From when a key was in which group.
    homes: Mutex<Vec<(Nanos, usize, usize)>>,
    /// The clock of all servers, where it is to step, and how far it is ahead.
    clock: Option<Arc<Clock>>,
    ahead: Mutex<Duration>,
}

impl Deployment {
    /// Starts everything. What is written is safe from the death of a server's process, if not from that of the machine:
    /// it is in the kernel's hands before the client is answered.
    ///
    /// # Errors
    /// When a server cannot be started.
    pub(crate) async fn start(topology: Topology, slots: usize, clocks: bool) -> anyhow::Result<Deployment> {
        let flavor = Flavor::from_env();
        let clock = clocks.then(Clock::new).transpose()?.map(Arc::new);
        let servers = match topology {
            Topology::Standalone | Topology::Quorum => {
                let mut servers = Vec::new();
                let count = if topology == Topology::Quorum { MEMBERS } else { 1 };
                for _ in 0..count {
                    let builder = Server::builder(flavor).persistence(true).clock(clock.as_deref());
                    servers.push(builder.config("appendfsync", "no").try_start().await?);
                }
                Servers::Alone(servers)
            }
            Topology::Sentinel => {
                let builder = Replicas::builder(flavor).persistence(true).clock(clock.clone());
                Servers::Replicas(builder.config("appendfsync", "no").start().await)
            }
            Topology::Cluster => {
                let builder = Cluster::builder(flavor)
                    .masters(SHARDS)
                    .persistence(true)
                    .clock(clock.clone());
                Servers::Cluster(builder.config("appendfsync", "no").start().await)
            }
        };
        let mut deployment = Deployment {
            topology,
            servers,
            links: Vec::new(),
            homes: Mutex::default(),
            clock,
            ahead: Mutex::default(),
        };
        for sentinel in deployment.sentinels() {
            deployment.hurry(sentinel).await;
        }
        for key in 0..KEYS {
            let home = (clock::now(), key, deployment.first_home(key));
            deployment.homes.lock().push(home);
        }
        deployment.link(slots);
        Ok(deployment)
    }

    /// Puts a network of its own before each worker.
    fn link(&mut self, slots: usize) {
        let addresses: Vec<_> = self.all().iter().map(|server| server.addr()).collect();
        for slot in 0..slots {
            let mut ports = HashMap::new();
            let first = self.links.len();
            for (server, &at) in addresses.iter().enumerate() {
                let proxy = Proxy::start(at);
                ports.insert(at.port(), proxy.port());
                self.links.push(Link { server, slot, proxy });
            }
            if self.topology.fails_over() {
                for link in &self.links[first..] {
                    link.proxy.tell_ports(ports.clone());
                }
            }
        }
    }

    /// The servers that have data.
    pub(crate) fn servers(&self) -> Vec<&Server> {
        match &self.servers {
            Servers::Alone(servers) => servers.iter().collect(),
            Servers::Replicas(replicas) => replicas.servers().iter().collect(),
            Servers::Cluster(cluster) => cluster.servers().collect(),
        }
    }

    fn replicas(&self) -> &[Server] {
        match &self.servers {
            Servers::Replicas(replicas) => replicas.sentinels(),
            _ => &[],
        }
    }

    /// Those that watch over them, by their numbers among all.
    pub(crate) fn sentinels(&self) -> std::ops::Range<usize> {
        let data = self.servers().len();
        data..data + self.replicas().len()
    }

    /// All servers: those that have data first.
    pub(crate) fn all(&self) -> Vec<&Server> {
        let mut all = self.servers();
        all.extend(self.replicas());
        all
    }

    /// The server of this number.
    pub(crate) fn server(&self, at: usize) -> &Server {
        self.all()[at]
    }

    pub(crate) fn cluster(&self) -> Option<&Cluster> {
        match &self.servers {
            Servers::Cluster(cluster) => Some(cluster),
            _ => None,
        }
    }

    /// The servers that have the same data, one of which is the master; alone where there are no replicas.
    pub(crate) fn groups(&self) -> Vec<Vec<usize>> {
        let count = self.servers().len();
        match self.topology {
            Topology::Sentinel => vec![(0..count).collect()],
            Topology::Cluster => (0..SHARDS)
                .map(|shard| (shard..count).step_by(SHARDS).collect())
                .collect(),
            Topology::Standalone | Topology::Quorum => (0..count).map(|server| vec![server]).collect(),
        }
    }

    fn first_home(&self, key: usize) -> usize {
        match self.topology {
            Topology::Cluster => {
                let slot = usize::from(slot_of(&key_name(key)));
                let end = |shard: &usize| slot < 16_384 * (shard + 1) / SHARDS;
                (0..SHARDS).find(end).unwrap_or(0)
            }
            _ => 0,
        }
    }

    /// The group that has a key now.
    pub(crate) fn home(&self, key: usize) -> usize {
        let homes = self.homes.lock();
        let last = homes.iter().rev().find(|(_, other, _)| *other == key);
        last.map_or(0, |(_, _, group)| *group)
    }

    /// From now on a key is in another group.
    pub(crate) fn moves(&self, key: usize, group: usize) {
        self.homes.lock().push((clock::now(), key, group));
    }

    /// The keys that were in a group at some time between `from` and now.
    pub(crate) fn keys_since(&self, group: usize, from: Nanos) -> Vec<usize> {
        let homes = self.homes.lock();
        let was_there = |key: &usize| {
            let mut of_key = homes.iter().filter(|(_, other, _)| other == key).peekable();
            while let Some((_, _, home)) = of_key.next() {
                let until = of_key.peek().map_or(Nanos::MAX, |(at, _, _)| *at);
                if *home == group && until >= from {
                    return true;
                }
            }
            false
        };
        (0..KEYS).filter(was_there).collect()
    }

    /// Has a sentinel look more often than it does by default: a run is short. Older ones do not know how, and are slow.
    pub(crate) async fn hurry(&self, sentinel: usize) {
        let sentinel = self.server(sentinel);
        for (period, millis) in [
            ("info-period", "200"),
            ("publish-period", "250"),
            ("ask-period", "200"),
        ] {
            let _: redis::RedisResult<redis::Value> =
                sentinel.try_query(&["SENTINEL", "DEBUG", period, millis]).await;
        }
        let set = ["SENTINEL", "SET", SERVICE, "failover-timeout", "1000"];
        let _: redis::RedisResult<redis::Value> = sentinel.try_query(&set).await;
    }

    /// Has the clocks of all servers step at the same moment. `None` where they cannot.
    ///
    /// # Errors
    /// When that fails.
    pub(crate) fn step_clocks(&self, by: Duration) -> anyhow::Result<Option<()>> {
        let Some(clock) = &self.clock else { return Ok(None) };
        let mut ahead = self.ahead.lock();
        *ahead += by;
        clock.set(*ahead)?;
        Ok(Some(()))
    }

    fn store(&self, addresses: &[SocketAddr]) -> StoreSpec {
        let all: Vec<_> = addresses.iter().map(SocketAddr::to_string).collect();
        let urls = all.iter().map(|address| format!("redis://{address}"));
        match self.topology {
            Topology::Standalone => StoreSpec::Url(urls.collect()),
            Topology::Quorum => StoreSpec::Quorum(urls.collect()),
            Topology::Cluster => StoreSpec::Url(format!("redis+cluster://{}", all.join(","))),
            Topology::Sentinel => {
                let sentinels = all[self.sentinels()].join(",");
                StoreSpec::Url(format!("redis+sentinel://{sentinels}/{SERVICE}"))
            }
        }
    }

    /// What the worker of a slot opens.
    pub(crate) fn store_of(&self, slot: usize) -> StoreSpec {
        let links = self.links.iter().filter(|link| link.slot == slot);
        self.store(&links.map(|link| link.proxy.addr()).collect::<Vec<_>>())
    }

    /// The same without the network in between.
    pub(crate) fn direct(&self) -> StoreSpec {
        self.store(&self.all().iter().map(|server| server.addr()).collect::<Vec<_>>())
    }

    /// Copies what the servers printed into the directory of the logs.
    ///
    /// # Errors
    /// When that cannot be written.
    pub(crate) fn keep_logs(&self, dir: &Path) -> io::Result<()> {
        for (at, server) in self.all().into_iter().enumerate() {
            fs::write(dir.join(format!("server{at}.log")), server.log())?;
        }
        Ok(())
    }

    /// Ends what is wrong with the network, and forgets what went over it.
    pub(crate) fn heal(&self) {
        for link in &self.links {
            link.proxy.heal();
        }
    }

    /// What is on the servers without holders and waiters: keys and subscriptions.
    ///
    /// # Errors
    /// When a server does not answer.
    pub(crate) async fn leftovers(&self) -> anyhow::Result<Vec<String>> {
        let mut left = Vec::new();
        for (at, server) in self.servers().into_iter().enumerate() {
            let keys: Vec<String> = server.try_query(&["KEYS", "*"]).await?;
            let ours = |key: &String| !key.starts_with("dlock:fence") && key != "dlock:voter";
            left.extend(
                keys.iter()
                    .filter(|key| ours(key))
                    .map(|key| format!("server {at}: key {key}")),
            );
            // Sentinels talk to each other over the servers.
            let channels = server.pubsub_channels().await;
            for channel in channels
                .iter()
                .filter(|channel| !channel.starts_with("__sentinel__"))
            {
                let clients = server.client_list().await;
                let field = |client: &BTreeMap<String, String>, name: &str| {
                    client.get(name).cloned().unwrap_or_default()
                };
                let by: Vec<_> = clients
                    .iter()
                    .filter(|client| field(client, "sub") != "0")
                    .map(|client| format!("{} for {} s", field(client, "name"), field(client, "age")))
                    .collect();
                left.push(format!(
                    "server {at}: subscription to {channel}, subscribed are {}",
                    by.join(", ")
                ));
            }
        }
        Ok(left)
    }

    /// The connections of clients that are still open.
    pub(crate) async fn connections(&self) -> Vec<String> {
        let mut left = Vec::new();
        for (at, server) in self.all().into_iter().enumerate() {
            for client in server.client_list().await {
                let field = |name: &str| client.get(name).map_or("-", String::as_str);
                // Servers and sentinels have some among themselves.
                if self.topology.fails_over() && !field("name").starts_with("dlock:") {
                    continue;
                }
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
