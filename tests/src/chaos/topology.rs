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
use super::stores::{SESSION_MS, Stores};
use super::wanted::TOTAL;
use super::way::Way;
use crate::Node;
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
    /// One PostgreSQL
    Postgres,
    /// One MariaDB
    Mysql,
    /// A cluster of three
    Etcd,
    /// Three servers, of which one leads
    Zookeeper,
}

/// How long etcd and ZooKeeper may take to elect a leader.
const ELECTION: Duration = Duration::from_secs(3);
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
            Topology::Postgres => "postgres",
            Topology::Mysql => "mysql",
            Topology::Etcd => "etcd",
            Topology::Zookeeper => "zookeeper",
        }
    }

    /// The kinds of faults that can be made here.
    pub(crate) fn knows(self) -> Vec<Kind> {
        use clap::ValueEnum;
        let is_made = |kind: &Kind| match kind {
            Kind::Partition => self == Topology::Quorum,
            Kind::FailOver | Kind::MasterKill | Kind::MasterStop => self.fails_over(),
            Kind::SlotMove => self == Topology::Cluster,
            Kind::FollowerCut => self == Topology::Zookeeper,
            Kind::Wipe | Kind::ClientPause | Kind::ScriptFlush | Kind::MessagesLost => self.is_redis(),
            Kind::ClientKill | Kind::ClockStep => {
                self.is_redis() || matches!(self, Topology::Postgres | Topology::Mysql)
            }
            _ => true,
        };
        Kind::value_variants().iter().copied().filter(is_made).collect()
    }

    fn is_redis(self) -> bool {
        match self {
            Topology::Standalone | Topology::Sentinel | Topology::Cluster | Topology::Quorum => true,
            Topology::Postgres | Topology::Mysql | Topology::Etcd | Topology::Zookeeper => false,
        }
    }

    /// Whether a server has replicas, one of which takes its place and may lack its last writes.
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

    /// How many faults there are at a time: a fault of a replica set takes long, and there is at most one.
    pub(crate) fn at_once(self) -> usize {
        if self.fails_over() { 3 } else { 2 }
    }

    /// How long after everything is healed a lock may be acquired late beyond its lease.
    pub(crate) fn slowness(self) -> Duration {
        match self {
            Topology::Standalone | Topology::Postgres | Topology::Mysql => Duration::ZERO,
            // A lease of etcd's is shared, so that it may have begun before it was asked for and last twice as long, and a new
            // leader begins all of them anew.
            Topology::Etcd => 2 * LONGEST_LEASE + ELECTION,
            // A session is not over before a new leader waited for it once more.
            Topology::Zookeeper => Duration::from_millis(SESSION_MS) + ELECTION,
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
    pub(crate) way: Box<dyn Way>,
}

#[derive(Debug)]
enum Servers {
    Alone(Vec<Server>),
    Replicas(Replicas),
    Cluster(Cluster),
    Stores(Stores),
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
            Topology::Postgres | Topology::Mysql | Topology::Etcd | Topology::Zookeeper => {
                Servers::Stores(Stores::start(topology, clock.as_deref()).await?)
            }
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
        let addresses: Vec<_> = self.nodes().iter().map(|server| server.addr()).collect();
        for slot in 0..slots {
            let mut ports = HashMap::new();
            let first = self.links.len();
            for (server, &at) in addresses.iter().enumerate() {
                let way: Box<dyn Way> = match self.stores() {
                    Some(stores) => stores.way(at),
                    None => Box::new(Proxy::start(at)),
                };
                ports.insert(at.port(), way.port());
                self.links.push(Link { server, slot, way });
            }
            if self.topology.fails_over() {
                for link in &self.links[first..] {
                    link.way.tell_ports(&ports);
                }
            }
        }
    }

    /// The servers of a store that is not Redis.
    pub(crate) fn stores(&self) -> Option<&Stores> {
        match &self.servers {
            Servers::Stores(stores) => Some(stores),
            _ => None,
        }
    }

    /// All servers as processes: those that have data first.
    pub(crate) fn nodes(&self) -> Vec<&dyn Node> {
        match self.stores() {
            Some(stores) => stores.nodes(),
            None => self.all().into_iter().map(|server| server as &dyn Node).collect(),
        }
    }

    /// How many of them have data.
    pub(crate) fn count(&self) -> usize {
        self.stores()
            .map_or_else(|| self.servers().len(), |stores| stores.nodes().len())
    }

    /// The servers of Redis that have data.
    pub(crate) fn servers(&self) -> Vec<&Server> {
        match &self.servers {
            Servers::Alone(servers) => servers.iter().collect(),
            Servers::Replicas(replicas) => replicas.servers().iter().collect(),
            Servers::Cluster(cluster) => cluster.servers().collect(),
            Servers::Stores(_) => Vec::new(),
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
        let data = self.count();
        data..data + self.replicas().len()
    }

    /// All servers of Redis: those that have data first.
    pub(crate) fn all(&self) -> Vec<&Server> {
        let mut all = self.servers();
        all.extend(self.replicas());
        all
    }

    /// The server of Redis of this number.
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
        let count = self.count();
        match self.topology {
            Topology::Sentinel => vec![(0..count).collect()],
            Topology::Cluster => (0..SHARDS)
                .map(|shard| (shard..count).step_by(SHARDS).collect())
                .collect(),
            _ => (0..count).map(|server| vec![server]).collect(),
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
        if let Some(stores) = self.stores() {
            return StoreSpec::Url(stores.url(addresses));
        }
        let all: Vec<_> = addresses.iter().map(SocketAddr::to_string).collect();
        let urls = all.iter().map(|address| format!("redis://{address}"));
        match self.topology {
            Topology::Quorum => StoreSpec::Quorum(urls.collect()),
            Topology::Cluster => StoreSpec::Url(format!("redis+cluster://{}", all.join(","))),
            Topology::Sentinel => {
                let sentinels = all[self.sentinels()].join(",");
                StoreSpec::Url(format!("redis+sentinel://{sentinels}/{SERVICE}"))
            }
            _ => StoreSpec::Url(urls.collect()),
        }
    }

    /// What the worker of a slot opens.
    pub(crate) fn store_of(&self, slot: usize) -> StoreSpec {
        let links = self.links.iter().filter(|link| link.slot == slot);
        self.store(&links.map(|link| link.way.addr()).collect::<Vec<_>>())
    }

    /// The same without the network in between.
    pub(crate) fn direct(&self) -> StoreSpec {
        self.store(
            &self
                .nodes()
                .iter()
                .map(|server| server.addr())
                .collect::<Vec<_>>(),
        )
    }

    /// Copies what the servers printed into the directory of the logs.
    ///
    /// # Errors
    /// When that cannot be written.
    pub(crate) fn keep_logs(&self, dir: &Path) -> io::Result<()> {
        for (at, server) in self.nodes().into_iter().enumerate() {
            fs::write(dir.join(format!("server{at}.log")), server.log())?;
        }
        Ok(())
    }

    /// Ends what is wrong with the network, and forgets what went over it.
    pub(crate) fn heal(&self) {
        for link in &self.links {
            link.way.heal();
        }
    }

    /// What is on the servers without holders and waiters: keys and subscriptions. Tokens stay, and the total of a
    /// semaphore, which a quorum does not have.
    ///
    /// # Errors
    /// When a server does not answer.
    pub(crate) async fn leftovers(&self) -> anyhow::Result<Vec<String>> {
        let mut left = Vec::new();
        if self.stores().is_some() {
            let client = self.direct().open(None).await?;
            let held = client.list("").await?;
            left.extend(
                held.into_iter()
                    .map(|(key, holder)| format!("lock {key} of {holder:?}")),
            );
            client.shutdown(Duration::ZERO).await;
            return Ok(left);
        }
        for (at, server) in self.servers().into_iter().enumerate() {
            let keys: Vec<String> = server.try_query(&["KEYS", "*"]).await?;
            let ours = |key: &String| {
                let is_total = self.topology != Topology::Quorum && *key == key_name(TOTAL);
                let is_token = key.starts_with("dlock:fence") || key.starts_with("redisson_lock_token:");
                !is_total && !is_token && key != "dlock:voter"
            };
            for key in keys.iter().filter(|key| ours(key)) {
                // The replica of a shard only sends to its master.
                let content = server.content(key).await;
                let content = content.unwrap_or_else(|error| format!("what it does not show: {error}"));
                left.push(format!("server {at}: key {key} with {content}"));
            }
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
        if self.stores().is_some() {
            for link in self.links.iter().filter(|link| link.way.connections() > 0) {
                let (open, slot, server) = (link.way.connections(), link.slot, link.server);
                left.push(format!("server {server}: {open} connections of p{slot}"));
            }
            return left;
        }
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
