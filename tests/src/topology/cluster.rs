//! A Cluster of real servers: masters with a replica each, slots that move, and fail-overs.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use redis::Value;

use super::{configured, login};
use crate::port::{BUS, Port};
use crate::{Certificates, Clock, Flavor, Proxy, Server, child, eventually};

/// How many slots there are.
const SLOTS: u16 = 16_384;
/// How long a cluster may take for what it does by itself.
const PATIENCE: Duration = Duration::from_secs(60);

/// How a cluster is to be started; made by [`Cluster::builder`].
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until it is started"]
pub struct ClusterBuilder {
    flavor: Flavor,
    masters: usize,
    replicas: usize,
    persistence: bool,
    clock: Option<Arc<Clock>>,
    proxies: bool,
    tls: Option<Certificates>,
    password: Option<String>,
    config: Vec<(String, String)>,
}

impl ClusterBuilder {
    /// How many masters there are; 3 by default.
    pub fn masters(mut self, masters: usize) -> Self {
        self.masters = masters;
        self
    }

    /// How many replicas each master has; 1 by default.
    pub fn replicas(mut self, replicas: usize) -> Self {
        self.replicas = replicas;
        self
    }

    /// Whether every write survives a kill. Off by default.
    pub fn persistence(mut self, on: bool) -> Self {
        self.persistence = on;
        self
    }

    /// Has the servers go by this clock. By the machine's by default.
    pub fn clock(mut self, clock: Option<Arc<Clock>>) -> Self {
        self.clock = clock;
        self
    }

    /// Whether clients, and replicas, reach each server by a proxy, whose address it announces. Off by default.
    pub fn behind_proxies(mut self, on: bool) -> Self {
        self.proxies = on;
        self
    }

    /// Has all servers speak TLS, to each other too. Off by default.
    pub fn tls(mut self, certificates: &Certificates) -> Self {
        self.tls = Some(certificates.clone());
        self
    }

    /// What the servers ask for, each other too. Nothing by default.
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self
    }

    /// Adds a line to the configuration of each server.
    pub fn config(mut self, name: &str, value: &str) -> Self {
        self.config.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts the servers and waits until they serve.
    ///
    /// # Panics
    /// When that fails.
    pub async fn start(self) -> Cluster {
        let mut failures = 0;
        loop {
            match self.clone().try_start().await {
                Ok(cluster) => return cluster,
                // Another process bound a port between our look and the server's.
                Err(error) if failures < 5 && format!("{error:#}").contains("in use") => failures += 1,
                Err(error) => panic!("no test cluster: {error:#}"),
            }
        }
    }

    async fn try_start(self) -> anyhow::Result<Cluster> {
        let count = self.masters * (1 + self.replicas);
        let mut nodes: Vec<Node> = Vec::with_capacity(count);
        for _ in 0..count {
            // Redis 6.2 cannot be told which port to take.
            let bus = (self.flavor != Flavor::Redis62).then(Port::reserve);
            let builder = Server::builder(self.flavor)
                .persistence(self.persistence)
                .clock(self.clock.as_deref())
                .config("cluster-enabled", "yes")
                .config("cluster-config-file", "nodes.conf")
                .config("cluster-announce-ip", "127.0.0.1")
                // What takes ten times as long on the CI machine must not look like a death.
                .config("cluster-node-timeout", "1500")
                .config("cluster-replica-validity-factor", "0")
                .config("cluster-require-full-coverage", "no")
                .config("cluster-allow-replica-migration", "no")
                .config("repl-ping-replica-period", "1")
                .config("repl-timeout", "5");
            let mut builder = configured(builder, self.tls.as_ref(), self.password.as_deref(), &self.config);
            builder = match &bus {
                Some(bus) => builder.config("cluster-port", &bus.number().to_string()),
                None => builder.with_bus(),
            };
            // The server's own address is known only when its configuration is.
            let proxy = self
                .proxies
                .then(|| Proxy::start((Ipv4Addr::LOCALHOST, 1).into()));
            if let Some(proxy) = &proxy {
                builder = builder.config("cluster-announce-port", &proxy.port().to_string());
            }
            let id = random_id();
            let server = Server::prepare(builder)?;
            if let Some(proxy) = &proxy {
                proxy.retarget(server.addr());
            }
            // Without one, as a Redis before 7.2 leaves it, a master of Valkey 9.1 that has no replica dies of its first
            // SPUBLISH; and Redis 7.0 reads none.
            let shard = match (self.flavor, nodes.get(nodes.len() % self.masters)) {
                (Flavor::Redis | Flavor::Redis62, _) => None,
                (Flavor::Valkey, Some(master)) if nodes.len() >= self.masters => master.shard.clone(),
                (Flavor::Valkey, _) => Some(random_id()),
            };
            nodes.push(Node {
                id,
                shard,
                bus,
                server,
                proxy,
            });
        }
        let cluster = Cluster {
            masters: self.masters,
            nodes,
            password: self.password,
        };
        // They know each other from the first moment: an introduction takes seconds.
        for node in &cluster.nodes {
            fs::write(
                node.server.data_dir().join("nodes.conf"),
                cluster.introduction(node),
            )?;
        }
        let starts = cluster.nodes.iter().map(|node| node.server.launch());
        for started in futures_util::future::join_all(starts).await {
            started.context("a server of a cluster")?;
        }
        cluster.is_settled().await;
        Ok(cluster)
    }
}

/// A server and what the others know it by.
struct Node {
    id: String,
    /// What a master has in common with its replicas, where that stands in the configuration.
    shard: Option<String>,
    /// Where it speaks to the others; `None` where that follows from its port.
    bus: Option<Port>,
    server: Server,
    proxy: Option<Proxy>,
}

impl Node {
    fn bus(&self) -> u16 {
        let default = || self.server.port() + BUS;
        self.bus.as_ref().map_or_else(default, Port::number)
    }

    /// Where clients find it.
    fn announced(&self) -> SocketAddr {
        let proxy = self.proxy.as_ref();
        proxy.map_or_else(|| self.server.announced(), |proxy| proxy.addr())
    }
}

/// Some masters, each with its replicas, on 127.0.0.1. They are killed when this is dropped.
///
/// A server is taken for dead after 1.5 s; then one of its replicas takes over, and the others serve meanwhile.
pub struct Cluster {
    masters: usize,
    nodes: Vec<Node>,
    password: Option<String>,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.servers()).finish()
    }
}

impl Cluster {
    /// Three masters with a replica each.
    ///
    /// # Panics
    /// When they cannot be started.
    pub async fn start(flavor: Flavor) -> Cluster {
        Cluster::builder(flavor).start().await
    }

    /// The same with other settings.
    pub fn builder(flavor: Flavor) -> ClusterBuilder {
        ClusterBuilder {
            flavor,
            masters: 3,
            replicas: 1,
            persistence: false,
            clock: None,
            proxies: false,
            tls: None,
            password: None,
            config: Vec::new(),
        }
    }

    /// What a server knows of the others when it starts.
    fn introduction(&self, myself: &Node) -> String {
        let mut file = String::new();
        for (at, node) in self.nodes.iter().enumerate() {
            let shard = at % self.masters;
            let (bus, port) = (node.bus(), node.announced().port());
            let of_shard = node
                .shard
                .as_ref()
                .map(|id| format!(",,tls-port=0,shard-id={id}"))
                .unwrap_or_default();
            let flags = match std::ptr::eq(node, myself) {
                true => "myself,",
                false => "",
            };
            let (role, master, slots) = match at == shard {
                true => {
                    let share = |shard: usize| usize::from(SLOTS) * shard / self.masters;
                    (
                        "master",
                        "-",
                        format!(" {}-{}", share(shard), share(shard + 1) - 1),
                    )
                }
                false => ("slave", self.nodes[shard].id.as_str(), String::new()),
            };
            file += &format!(
                "{} 127.0.0.1:{port}@{bus}{of_shard} {flags}{role} {master} 0 0 {} connected{slots}\n",
                node.id,
                shard + 1,
            );
        }
        file + &format!("vars currentEpoch {} lastVoteEpoch 0\n", self.masters)
    }

    /// All servers: the first masters first, then their replicas in the same order.
    pub fn servers(&self) -> impl Iterator<Item = &Server> {
        self.nodes.iter().map(|node| &node.server)
    }

    /// The server of this number.
    pub fn server(&self, at: usize) -> &Server {
        &self.nodes[at].server
    }

    /// Its URL, with all servers in it.
    pub fn url(&self) -> String {
        let addresses: Vec<_> = self
            .nodes
            .iter()
            .map(|node| node.announced().to_string())
            .collect();
        let login = login(self.password.as_deref());
        let scheme = self.server(0).scheme();
        format!("{scheme}+cluster://{login}{}", addresses.join(","))
    }

    /// The proxies before its servers, in their order; none unless it was started with them.
    pub fn proxies(&self) -> Vec<&Proxy> {
        self.nodes.iter().filter_map(|node| node.proxy.as_ref()).collect()
    }

    /// Leaves its files to be removed when the process ends, for one that is never dropped.
    pub(crate) fn stays(&self) {
        let dirs = self.servers().map(|server| server.dir().to_owned());
        child::remove_at_the_end(dirs).expect("a shell can be started");
    }

    /// The masters as a running server has them, with their slots.
    async fn view(&self, by: &Server) -> BTreeMap<SocketAddr, Vec<(u16, u16)>> {
        let answer: Vec<(u16, u16, Value)> = match by.try_query::<Vec<Value>>(&["CLUSTER", "SLOTS"]).await {
            Ok(ranges) => ranges
                .into_iter()
                .filter_map(|range| {
                    let Value::Array(parts) = range else { return None };
                    let number = |at: usize| redis::from_redis_value(parts.get(at)?.clone()).ok();
                    Some((number(0)?, number(1)?, parts.get(2)?.clone()))
                })
                .collect(),
            Err(_) => Vec::new(),
        };
        let mut view = BTreeMap::<_, Vec<_>>::new();
        for (first, last, master) in answer {
            let Value::Array(parts) = master else { continue };
            let port = parts
                .get(1)
                .and_then(|port| redis::from_redis_value(port.clone()).ok());
            let port: u16 = port.expect("a server has a port");
            let announced = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            let node = self.nodes.iter().find(|node| node.announced() == announced);
            view.entry(node.map_or(announced, |node| node.server.addr()))
                .or_default()
                .push((first, last));
        }
        view
    }

    /// Those that run and are not frozen, as far as the harness was told.
    fn alive(&self) -> Vec<&Server> {
        self.servers().filter(|server| server.is_awake()).collect()
    }

    /// The server that has a slot now, as all say that are there.
    ///
    /// # Panics
    /// When they do not come to agree on one.
    pub async fn owner(&self, slot: u16) -> &Server {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut owners = Vec::new();
            for server in self.alive() {
                let view = self.view(server).await;
                let has = |ranges: &Vec<(u16, u16)>| ranges.iter().any(|(a, b)| (*a..=*b).contains(&slot));
                owners.push(view.iter().find(|(_, ranges)| has(ranges)).map(|(at, _)| *at));
            }
            owners.dedup();
            if let [Some(owner)] = owners[..]
                && let Some(server) = self.servers().find(|server| server.addr() == owner)
                && server.is_awake()
            {
                return server;
            }
            assert!(Instant::now() < deadline, "no node has slot {slot}: {owners:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The server that has a key now.
    pub async fn owner_of(&self, key: &str) -> &Server {
        self.owner(slot_of(key)).await
    }

    /// A key that is on this server now, beginning with `prefix`.
    pub async fn key_on(&self, server: &Server, prefix: &str) -> String {
        let view = self.view(server).await;
        let ranges = view.get(&server.addr()).cloned().unwrap_or_default();
        let is_there = |key: &String| {
            let slot = slot_of(key);
            ranges
                .iter()
                .any(|(first, last)| (*first..=*last).contains(&slot))
        };
        (0..)
            .map(|n| format!("{prefix}{n}"))
            .find(is_there)
            .expect("there are keys for every slot")
    }

    /// The replica of a master that runs.
    ///
    /// # Panics
    /// When there is none.
    pub async fn replica_of(&self, master: &Server) -> &Server {
        for server in self.alive() {
            let role: Vec<Value> = server.query(&["ROLE"]).await;
            let text = |value: &Value| redis::from_redis_value::<String>(value.clone()).ok();
            let follows = role.get(2).and_then(text);
            if role.first().and_then(text).as_deref() == Some("slave")
                && follows == Some(self.announced(master).port().to_string())
            {
                return server;
            }
        }
        panic!("{master:?} has no replica")
    }

    /// Waits until all servers that run agree on the slots, serve them, and have their replicas in step.
    pub async fn is_settled(&self) {
        eventually("the cluster has settled", || async {
            let mut views = Vec::new();
            for server in self.alive() {
                let Ok(info) = server.try_query::<String>(&["CLUSTER", "INFO"]).await else {
                    return false;
                };
                if !info.contains("cluster_state:ok") {
                    return false;
                }
                let role: Vec<Value> = server.query(&["ROLE"]).await;
                let is_in_step = |role: &[Value]| match role.get(3) {
                    Some(Value::BulkString(state)) => &state[..] == b"connected",
                    Some(Value::SimpleString(state)) => state == "connected",
                    _ => true,
                };
                if !is_in_step(&role) {
                    return false;
                }
                views.push(self.view(server).await);
            }
            views.dedup();
            let covered = |view: &BTreeMap<_, Vec<(u16, u16)>>| -> usize {
                let ranges = view.values().flatten();
                ranges.map(|(first, last)| usize::from(last - first) + 1).sum()
            };
            views.len() == 1 && covered(&views[0]) == usize::from(SLOTS)
        })
        .await;
    }

    /// Ends all servers, and sets up a Cluster anew on those that were replicas, as its masters: it knows nothing of the
    /// other one, and counts its epochs from the beginning.
    ///
    /// # Panics
    /// When there are not as many replicas as masters, or they cannot be started.
    pub async fn set_up_anew(&mut self) {
        assert_eq!(self.nodes.len(), 2 * self.masters, "each master has one replica");
        for server in self.servers() {
            server.kill();
        }
        self.nodes.drain(..self.masters);
        for node in &mut self.nodes {
            node.id = random_id();
            node.shard = node.shard.is_some().then(random_id);
        }
        for node in &self.nodes {
            node.server
                .remove_data()
                .expect("the data directory can be emptied");
            let introduction = self.introduction(node);
            fs::write(node.server.data_dir().join("nodes.conf"), introduction).expect("it can be written");
        }
        let starts = self.nodes.iter().map(|node| node.server.launch());
        for started in futures_util::future::join_all(starts).await {
            started.expect("the server comes back");
        }
        self.is_settled().await;
    }

    /// Has the replica of a master take over in good order, and waits until all know.
    ///
    /// # Panics
    /// When it does not.
    pub async fn fail_over(&self, master: &Server) {
        let deadline = Instant::now() + PATIENCE;
        let replica = self.replica_of(master).await;
        loop {
            // It may not know yet that its master is well, or its turn may be lost on a busy machine.
            let _: redis::RedisResult<Value> = replica.try_query(&["CLUSTER", "FAILOVER"]).await;
            for _ in 0..50 {
                let role: Vec<Value> = replica.query(&["ROLE"]).await;
                let is_master = |role: &Value| redis::from_redis_value::<String>(role.clone()).ok();
                if role.first().and_then(is_master).as_deref() == Some("master") {
                    self.is_settled().await;
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            assert!(Instant::now() < deadline, "{replica:?} does not take over");
        }
    }

    /// Where clients and replicas find a server.
    fn announced(&self, server: &Server) -> SocketAddr {
        let node = self.nodes.iter().find(|node| std::ptr::eq(&node.server, server));
        node.expect("a server of this cluster").announced()
    }

    /// What the others know a server by.
    pub(crate) fn id(&self, server: &Server) -> &str {
        let node = self.nodes.iter().find(|node| std::ptr::eq(&node.server, server));
        &node.expect("a server of this cluster").id
    }

    /// Begins to move a slot: from now on it is on two servers.
    pub async fn begin_move(&self, slot: u16, from: &Server, to: &Server) {
        let number = slot.to_string();
        to.command(&["CLUSTER", "SETSLOT", &number, "IMPORTING", self.id(from)])
            .await;
        from.command(&["CLUSTER", "SETSLOT", &number, "MIGRATING", self.id(to)])
            .await;
    }

    /// Moves a key of a slot that is being moved; nothing when it is not there.
    pub async fn move_key(&self, key: &str, from: &Server, to: &Server) {
        let port = to.port().to_string();
        from.command(&["MIGRATE", "127.0.0.1", &port, key, "0", "10000"])
            .await;
    }

    /// The keys of a slot that a server has.
    pub async fn keys_in(&self, slot: u16, server: &Server) -> Vec<String> {
        server
            .query(&["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), "1000"])
            .await
    }

    /// Moves the keys that are left, and ends the move of a slot.
    pub async fn end_move(&self, slot: u16, from: &Server, to: &Server) {
        loop {
            let keys = self.keys_in(slot, from).await;
            if keys.is_empty() {
                break;
            }
            for key in keys {
                self.move_key(&key, from, to).await;
            }
        }
        let number = slot.to_string();
        // Its new owner first, so that there is one at any time; then all others, which would learn of it in time.
        for server in [to, from] {
            server
                .command(&["CLUSTER", "SETSLOT", &number, "NODE", self.id(to)])
                .await;
        }
    }

    /// Moves a slot with its keys.
    pub async fn move_slot(&self, slot: u16, from: &Server, to: &Server) {
        self.begin_move(slot, from, to).await;
        self.end_move(slot, from, to).await;
    }

    /// All keys with `part` in their names, wherever they are, sorted.
    pub async fn keys(&self, part: &str) -> Vec<String> {
        let mut keys = Vec::new();
        for server in self.alive() {
            let role: Vec<Value> = server.query(&["ROLE"]).await;
            if matches!(role.first(), Some(Value::BulkString(role)) if &role[..] == b"master") {
                let found: Vec<String> = server.query(&["KEYS", &format!("*{part}*")]).await;
                keys.extend(found);
            }
        }
        keys.sort();
        keys
    }

    /// The channels with `part` in their names that have subscribers, on any server.
    pub async fn pubsub_channels(&self, part: &str) -> Vec<String> {
        let mut channels = Vec::new();
        for server in self.alive() {
            let found = server.pubsub_channels().await;
            channels.extend(found.into_iter().filter(|channel| channel.contains(part)));
        }
        channels
    }
}

/// What servers and shards are called.
fn random_id() -> String {
    format!("{:032x}{:08x}", fastrand::u128(..), fastrand::u32(..))
}

/// The slot of a key.
pub fn slot_of(key: &str) -> u16 {
    let bytes = key.as_bytes();
    let tag = key.find('{').and_then(|open| {
        let length = key[open + 1..].find('}').filter(|length| *length > 0)?;
        Some(&bytes[open + 1..open + 1 + length])
    });
    let mut crc: u16 = 0;
    for byte in tag.unwrap_or(bytes) {
        crc ^= u16::from(*byte) << 8;
        for _ in 0..8 {
            crc = match crc & 0x8000 {
                0 => crc << 1,
                _ => (crc << 1) ^ 0x1021,
            };
        }
    }
    crc % SLOTS
}
