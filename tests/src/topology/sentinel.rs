//! A master, its replicas, and three sentinels that watch over them.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::Value;

use super::{configured, login};
use crate::{Certificates, Clock, Flavor, Proxy, Server, ServerBuilder, child, eventually};

/// The name of the master among the sentinels.
pub(crate) const SERVICE: &str = "main";
/// How long the sentinels may take for what they do by themselves.
const PATIENCE: Duration = Duration::from_secs(60);

/// How a replica set is to be started; made by [`Replicas::builder`].
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until it is started"]
pub struct ReplicasBuilder {
    flavor: Flavor,
    password: Option<String>,
    server_password: Option<String>,
    tls: Option<Certificates>,
    persistence: bool,
    clock: Option<Arc<Clock>>,
    config: Vec<(String, String)>,
    /// After how many milliseconds each of the sentinels takes a master for dead.
    down_after: [u32; 3],
}

impl ReplicasBuilder {
    /// What the sentinels ask for, see [`server_password`](Self::server_password) for the others. Nothing by default.
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self
    }

    /// What the servers that have data ask for, each other and the sentinels too. Nothing by default.
    pub fn server_password(mut self, password: &str) -> Self {
        self.server_password = Some(password.to_owned());
        self
    }

    /// Has all of them speak TLS, to each other too. Off by default.
    pub fn tls(mut self, certificates: &Certificates) -> Self {
        self.tls = Some(certificates.clone());
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

    /// Has the sentinels wait for a master that does not answer for a minute, as one on a busy machine does: for tests in which
    /// none dies.
    pub fn keeps_its_master(mut self) -> Self {
        self.down_after = [60_000; 3];
        self
    }

    /// Adds a line to the configuration of each server that has data.
    pub fn config(mut self, name: &str, value: &str) -> Self {
        self.config.push((name.to_owned(), value.to_owned()));
        self
    }

    fn server(&self, master: Option<SocketAddr>) -> ServerBuilder {
        let builder = Server::builder(self.flavor)
            .persistence(self.persistence)
            .clock(self.clock.as_deref())
            .config("repl-ping-replica-period", "1")
            .config("repl-timeout", "5");
        let builder = configured(
            builder,
            self.tls.as_ref(),
            self.server_password.as_deref(),
            &self.config,
        );
        match master {
            Some(master) => builder.replica_of(master),
            None => builder,
        }
    }

    /// For the master there, which counts as dead after so many milliseconds. One of them alone may find that; all vote.
    fn sentinel(&self, master: SocketAddr, down_after: u32) -> ServerBuilder {
        let at = format!("{SERVICE} {} {} 1", master.ip(), master.port());
        let mut builder = Server::builder(self.flavor)
            .sentinel()
            .config("sentinel", &format!("monitor {at}"))
            .config(
                "sentinel",
                &format!("down-after-milliseconds {SERVICE} {down_after}"),
            )
            .config("sentinel", &format!("failover-timeout {SERVICE} 3000"))
            .config("sentinel", &format!("parallel-syncs {SERVICE} 2"));
        if let Some(certificates) = &self.tls {
            builder = builder.tls(certificates);
        }
        if let Some(password) = &self.server_password {
            builder = builder.config("sentinel", &format!("auth-pass {SERVICE} {password}"));
        }
        match &self.password {
            Some(password) => builder
                .password(password)
                .config("sentinel", &format!("sentinel-pass {password}")),
            None => builder,
        }
    }

    /// Starts the servers and the sentinels, and waits until these know them.
    ///
    /// # Panics
    /// When they cannot be started.
    pub async fn start(self) -> Replicas {
        let master = self.server(None).start().await;
        let at = master.announced();
        let replica = || self.server(Some(at)).start();
        let (first, second) = tokio::join!(replica(), replica());
        let sentinel = |down_after| self.sentinel(at, down_after).start();
        let [first_after, second_after, third_after] = self.down_after;
        let sentinels = tokio::join!(
            sentinel(first_after),
            sentinel(second_after),
            sentinel(third_after)
        );
        let replicas = Replicas {
            servers: vec![master, first, second],
            sentinels: vec![sentinels.0, sentinels.1, sentinels.2],
            proxy: None,
            password: self.password,
            server_password: self.server_password,
        };
        replicas.is_settled().await;
        replicas
    }
}

/// A replica set with three sentinels, on 127.0.0.1. They are killed when this is dropped.
///
/// A master is taken for dead after half a second, and after three where the first sentinel does not run.
pub struct Replicas {
    servers: Vec<Server>,
    sentinels: Vec<Server>,
    /// Before the first master, by which the sentinels know it.
    proxy: Option<Proxy>,
    password: Option<String>,
    server_password: Option<String>,
}

impl fmt::Debug for Replicas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replicas")
            .field("servers", &self.servers)
            .field("sentinels", &self.sentinels)
            .finish_non_exhaustive()
    }
}

impl Replicas {
    /// A master, two replicas, and three sentinels.
    ///
    /// # Panics
    /// When they cannot be started.
    pub async fn start(flavor: Flavor) -> Replicas {
        Replicas::builder(flavor).start().await
    }

    /// A master that everybody reaches by a proxy, without replicas, and three sentinels.
    ///
    /// # Panics
    /// When they cannot be started.
    pub async fn start_behind_proxy(flavor: Flavor) -> Replicas {
        let master = Server::start(flavor).await;
        let proxy = Proxy::start(master.addr());
        // No server could take its place.
        let builder = Replicas::builder(flavor);
        let sentinel = || builder.sentinel(proxy.addr(), 60_000).start();
        let sentinels = tokio::join!(sentinel(), sentinel(), sentinel());
        let replicas = Replicas {
            servers: vec![master],
            sentinels: vec![sentinels.0, sentinels.1, sentinels.2],
            proxy: Some(proxy),
            password: None,
            server_password: None,
        };
        replicas.is_settled().await;
        replicas
    }

    /// The same with other settings.
    pub fn builder(flavor: Flavor) -> ReplicasBuilder {
        ReplicasBuilder {
            flavor,
            password: None,
            server_password: None,
            tls: None,
            persistence: false,
            clock: None,
            config: Vec::new(),
            // Two that begin a fail-over in the same second make two masters now and then: the others leave it to the first
            // unless that is gone.
            down_after: [500, 3000, 3000],
        }
    }

    /// Its URL, with all sentinels in it.
    pub fn url(&self) -> String {
        let addresses: Vec<_> = self
            .sentinels
            .iter()
            .map(|sentinel| sentinel.announced().to_string())
            .collect();
        let query = self
            .password
            .as_ref()
            .map(|password| format!("?sentinel_password={password}"));
        format!(
            "{}+sentinel://{}{}/{SERVICE}{}",
            self.servers[0].scheme(),
            login(self.server_password.as_deref()),
            addresses.join(","),
            query.unwrap_or_default()
        )
    }

    /// The proxy before the master, where there is one.
    pub fn proxy(&self) -> Option<&Proxy> {
        self.proxy.as_ref()
    }

    /// The servers that have data: the first master first.
    pub fn servers(&self) -> &[Server] {
        &self.servers
    }

    /// The sentinels.
    pub fn sentinels(&self) -> &[Server] {
        &self.sentinels
    }

    /// Leaves its files to be removed when the process ends, for one that is never dropped.
    pub(crate) fn stays(&self) {
        let all = self.servers.iter().chain(&self.sentinels);
        child::remove_at_the_end(all.map(|server| server.dir().to_owned())).expect("a shell can be started");
    }

    /// The master that a sentinel names.
    async fn named_by(&self, sentinel: &Server) -> Option<&Server> {
        let answer = sentinel
            .try_query::<(String, u16)>(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE])
            .await;
        let (_, port) = answer.ok()?;
        if self.proxy.as_ref().is_some_and(|proxy| proxy.port() == port) {
            return self.servers.first();
        }
        self.servers
            .iter()
            .find(|server| server.announced().port() == port)
    }

    /// The master that all sentinels name that run, once it is one.
    ///
    /// # Panics
    /// When they do not come to agree.
    pub async fn master(&self) -> &Server {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut named = Vec::new();
            for sentinel in self.sentinels.iter().filter(|sentinel| sentinel.is_awake()) {
                named.push(self.named_by(sentinel).await);
            }
            if let Some(Some(master)) = named.first()
                && named
                    .iter()
                    .all(|other| other.is_some_and(|other| std::ptr::eq(*master, other)))
                && master.is_awake()
                && is_master(master).await
            {
                return master;
            }
            assert!(
                Instant::now() < deadline,
                "the sentinels do not agree on a master: {named:?}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until all sentinels know each other and the replicas, and these are in step.
    pub async fn is_settled(&self) {
        eventually("the sentinels know everybody", || async {
            for sentinel in self.sentinels.iter().filter(|sentinel| sentinel.is_awake()) {
                let others: Vec<Value> = sentinel.query(&["SENTINEL", "SENTINELS", SERVICE]).await;
                let replicas: Vec<Value> = sentinel.query(&["SENTINEL", "REPLICAS", SERVICE]).await;
                if others.len() + 1 < self.sentinels.len() || replicas.len() + 1 < self.servers.len() {
                    return false;
                }
            }
            let running = self.servers.iter().filter(|server| server.is_awake()).count();
            let master = self.master().await;
            let replication: String = master.query(&["INFO", "replication"]).await;
            replication.matches("state=online").count() + 1 == running
        })
        .await;
    }

    /// Has a replica take over in good order, and waits until all sentinels and the old master know.
    ///
    /// # Panics
    /// When they do not.
    pub async fn fail_over(&self) -> &Server {
        let before = self.master().await;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let asked: redis::RedisResult<Value> = self.sentinels[0]
                .try_query(&["SENTINEL", "FAILOVER", SERVICE])
                .await;
            for _ in 0..100 {
                tokio::time::sleep(Duration::from_millis(20)).await;
                let now = self.master().await;
                if !std::ptr::eq(now, before) {
                    // Until then it takes what clients send that have not heard of it, and all of that is lost.
                    eventually("the old master follows", || async {
                        !before.is_awake() || !is_master(before).await
                    })
                    .await;
                    return now;
                }
            }
            assert!(
                Instant::now() < deadline,
                "the sentinels do not fail over: {asked:?}"
            );
        }
    }
}

async fn is_master(server: &Server) -> bool {
    let role: redis::RedisResult<Vec<Value>> = server.try_query(&["ROLE"]).await;
    matches!(
        role.unwrap_or_default().first(),
        Some(Value::BulkString(role)) if &role[..] == b"master"
    )
}
