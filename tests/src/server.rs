//! Real Redis and Valkey servers as child processes.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, fmt, io};

use anyhow::{Context, bail};
use nix::sys::signal::Signal;
use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, FromRedisValue, Value};
use tokio::runtime;

use crate::certificates::Certificates;
use crate::child;
use crate::faketime::{self, Clock};
use crate::monitor::Monitor;
use crate::port::Port;
use crate::process::{PATIENCE, Process};

/// The user under which the harness looks into servers that ask for a password.
const ADMIN: &str = "dlock-harness";
/// The name of the harness's own connections in `CLIENT LIST`.
const CLIENT_NAME: &str = "dlock-harness";

/// Which server program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Flavor {
    /// `redis-server`.
    Redis,
    /// The oldest `redis-server` that is supported, 6.2: without sharded channels, functions, and much else.
    Redis62,
    /// `valkey-server`.
    Valkey,
}

impl Flavor {
    /// The flavour that `DLOCK_TEST_SERVER` chooses (`redis`, `redis6.2` or `valkey`), Redis when it is not set.
    ///
    /// # Panics
    /// When the variable holds anything else: a misspelt flavour must not pass as the other one.
    pub fn from_env() -> Self {
        match env::var("DLOCK_TEST_SERVER").as_deref() {
            Err(env::VarError::NotPresent) | Ok("" | "redis") => Self::Redis,
            Ok("redis6.2") => Self::Redis62,
            Ok("valkey") => Self::Valkey,
            other => panic!("DLOCK_TEST_SERVER must be `redis`, `redis6.2` or `valkey`, it is {other:?}"),
        }
    }

    /// The name of the program.
    pub fn program(self) -> &'static str {
        match self {
            Self::Redis | Self::Redis62 => "redis-server",
            Self::Valkey => "valkey-server",
        }
    }

    /// The environment variable that says where the program is.
    pub fn variable(self) -> &'static str {
        match self {
            Self::Redis => "DLOCK_REDIS_SERVER",
            Self::Redis62 => "DLOCK_REDIS62_SERVER",
            Self::Valkey => "DLOCK_VALKEY_SERVER",
        }
    }

    /// Where the program is: as its [`variable`](Self::variable) says, else on the `PATH` (where an old Redis is not looked
    /// for), else where `scripts/servers.sh` puts it.
    ///
    /// # Errors
    /// When it is at none of them. The message says what to do.
    pub fn binary(self) -> anyhow::Result<PathBuf> {
        let installed = Path::new(env!("CARGO_MANIFEST_DIR")).join(".servers");
        let named = env::var_os(self.variable());
        if self == Self::Redis62 {
            return self.find(named, [installed.join("redis-6.2")].into_iter());
        }
        let on_path = env::var_os("PATH").unwrap_or_default();
        self.find(named, env::split_paths(&on_path).chain([installed]))
    }

    fn find(self, named: Option<OsString>, dirs: impl Iterator<Item = PathBuf>) -> anyhow::Result<PathBuf> {
        let (program, variable) = (self.program(), self.variable());
        if let Some(path) = named.filter(|path| !path.is_empty()).map(PathBuf::from) {
            if !path.is_file() {
                bail!("{variable} names {}, which is not a file", path.display());
            }
            return Ok(path);
        }
        dirs.map(|dir| dir.join(program))
            .find(|path| path.is_file())
            .with_context(|| {
                format!(
                    "no {program} to test against: set {variable} to its path, or run scripts/servers.sh, \
                 which installs it"
                )
            })
    }
}

impl fmt::Display for Flavor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Redis => "redis",
            Self::Redis62 => "redis6.2",
            Self::Valkey => "valkey",
        })
    }
}

/// How a server is to be started; made by [`Server::builder`].
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until it is started"]
pub struct ServerBuilder {
    flavor: Flavor,
    binary: Option<PathBuf>,
    config: Vec<(String, String)>,
    acl: Vec<String>,
    password: Option<String>,
    unix_socket: bool,
    persistence: bool,
    replica_of: Option<SocketAddr>,
    sentinel: bool,
    clock: Option<PathBuf>,
    tls: Option<Certificates>,
    has_bus: bool,
}

impl ServerBuilder {
    /// Runs this program, for example an older release, instead of [`Flavor::binary`].
    pub fn binary(mut self, path: impl Into<PathBuf>) -> Self {
        self.binary = Some(path.into());
        self
    }

    /// Adds a line to the configuration file: `.config("save", "900 1")`. Later lines win.
    pub fn config(mut self, name: &str, value: &str) -> Self {
        let value = if value.is_empty() { "\"\"" } else { value };
        self.config.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The password of the default user. None by default.
    pub fn password(mut self, password: &str) -> Self {
        self.password = Some(password.to_owned());
        self
    }

    pub(crate) fn password_of_default(&self) -> Option<&str> {
        self.password.as_deref()
    }

    /// Adds a user, as `ACL SETUSER` takes it: `.acl("svc on >secret ~dlock:* &* +eval +evalsha")`.
    pub fn acl(mut self, rule: &str) -> Self {
        self.acl.push(rule.to_owned());
        self
    }

    /// Whether it also listens on a unix socket, see [`Server::unix_url`]. Off by default.
    pub fn unix_socket(mut self, on: bool) -> Self {
        self.unix_socket = on;
        self
    }

    /// Whether every write survives a [`kill`](Process::kill) (append-only file, synced always). Off by default: then
    /// a restarted server is empty.
    pub fn persistence(mut self, on: bool) -> Self {
        self.persistence = on;
        self
    }

    /// Makes it a replica of the server at `master`.
    pub fn replica_of(mut self, master: SocketAddr) -> Self {
        self.replica_of = Some(master);
        self
    }

    /// Makes it a sentinel, which holds no data; what it watches is for [`config`](Self::config) to say.
    pub fn sentinel(mut self) -> Self {
        self.sentinel = true;
        self
    }

    /// Has it speak TLS on a port of its own, to other servers as well. Only the harness uses the other one. Redis alone
    /// can: the pinned Valkey is built without.
    pub fn tls(mut self, certificates: &Certificates) -> Self {
        self.tls = Some(certificates.clone());
        self
    }

    /// Keeps the port free on which it speaks to other servers of a Cluster, where its configuration cannot name one.
    pub(crate) fn with_bus(mut self) -> Self {
        self.has_bus = true;
        self
    }

    /// Has it go by this clock. By the machine's by default.
    pub fn clock(mut self, clock: Option<&Clock>) -> Self {
        self.clock = clock.map(Clock::file);
        self
    }

    /// What the server throws away when its memory is full. `noeviction` by default.
    pub fn maxmemory_policy(self, policy: &str) -> Self {
        self.config("maxmemory-policy", policy)
    }

    /// Starts the server and waits until it answers.
    ///
    /// # Panics
    /// When that fails, see [`try_start`](Self::try_start).
    pub async fn start(self) -> Server {
        self.try_start()
            .await
            .unwrap_or_else(|error| panic!("no test server: {error:#}"))
    }

    /// Starts the server and waits until it answers.
    ///
    /// # Errors
    /// When the program is not there, is of the other flavour, refuses its configuration, or does not answer in time.
    pub async fn try_start(self) -> anyhow::Result<Server> {
        let binary = self.binary.clone().map_or_else(|| self.flavor.binary(), Ok)?;
        let mut failures = 0;
        loop {
            let server = Server::create(self.clone(), binary.clone())?;
            match server.launch().await {
                Ok(()) => return Ok(server),
                // another process bound the port between our look and the server's
                Err(error) if server.log().contains("Address already in use") && failures < 10 => {
                    failures += 1;
                    drop((server, error));
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// A running Redis or Valkey server of its own, on a free port of 127.0.0.1. It is killed when this is dropped, and
/// when the test process ends in any other way.
///
/// Methods that talk to the server panic when it does not answer: a test has no use for such an error. They go through
/// connections of the harness, which [`client_list`](Self::client_list) and [`monitor`](Self::monitor) leave out.
pub struct Server {
    builder: ServerBuilder,
    binary: PathBuf,
    process: Process,
    tls_port: Option<Port>,
    /// Of the servers of a Cluster among themselves.
    _bus: Option<Port>,
    admin_password: Option<String>,
    /// The connection that the methods share, with the runtime that drives it.
    shared: Mutex<Option<(runtime::Id, MultiplexedConnection)>>,
    own_sources: Arc<Mutex<HashSet<String>>>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("flavor", &self.builder.flavor)
            .field("process", &self.process)
            .finish_non_exhaustive()
    }
}

impl Deref for Server {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

impl Server {
    /// Starts a server with default settings: no password, nothing on disk.
    ///
    /// # Panics
    /// When that fails, see [`ServerBuilder::try_start`].
    pub async fn start(flavor: Flavor) -> Self {
        Self::builder(flavor).start().await
    }

    /// Starts a server that goes by a clock of its own.
    ///
    /// # Panics
    /// When that fails, or without libfaketime.
    pub async fn with_clock(flavor: Flavor) -> (Server, Clock) {
        let clock = Clock::new().expect("libfaketime is there");
        let server = Self::builder(flavor).clock(Some(&clock)).start().await;
        (server, clock)
    }

    /// Starts a server with other settings than the default ones.
    pub fn builder(flavor: Flavor) -> ServerBuilder {
        ServerBuilder {
            flavor,
            binary: None,
            config: Vec::new(),
            acl: Vec::new(),
            password: None,
            unix_socket: false,
            persistence: false,
            replica_of: None,
            sentinel: false,
            clock: None,
            tls: None,
            has_bus: false,
        }
    }

    /// What [`ServerBuilder::try_start`] does before it starts the program: the port and the directories are there.
    pub(crate) fn prepare(builder: ServerBuilder) -> anyhow::Result<Self> {
        let binary = builder
            .binary
            .clone()
            .map_or_else(|| builder.flavor.binary(), Ok)?;
        Self::create(builder, binary)
    }

    fn create(builder: ServerBuilder, binary: PathBuf) -> anyhow::Result<Self> {
        let guarded = builder.password.is_some() || !builder.acl.is_empty();
        let tls_port = builder.tls.as_ref().map(|_| Port::reserve());
        let (port, bus) = match builder.has_bus {
            true => Port::reserve_with_bus(),
            false => (Port::reserve(), None),
        };
        let server = Self {
            builder,
            binary,
            process: Process::on(port, "dlock-"),
            tls_port,
            _bus: bus,
            admin_password: guarded.then(|| format!("{:032x}", fastrand::u128(..))),
            shared: Mutex::new(None),
            own_sources: Arc::default(),
        };
        fs::create_dir(server.data_dir())?;
        fs::write(server.dir().join("server.conf"), server.config_file())?;
        Ok(server)
    }

    fn config_file(&self) -> String {
        let builder = &self.builder;
        let mut file = String::new();
        let mut line =
            |text: fmt::Arguments<'_>| writeln!(file, "{text}").expect("a string takes everything");
        line(format_args!("bind 127.0.0.1"));
        line(format_args!("port {}", self.port()));
        line(format_args!("dir {}", self.data_dir().display()));
        if let (Some(certificates), Some(port)) = (&builder.tls, &self.tls_port) {
            line(format_args!("tls-port {}", port.number()));
            for (name, path) in certificates.config() {
                line(format_args!("{name} {}", path.display()));
            }
            line(format_args!("tls-replication yes"));
            line(format_args!("tls-cluster yes"));
        }
        if !builder.sentinel {
            line(format_args!("save \"\""));
            // by default a master waits five seconds for more replicas before it sends its data
            line(format_args!("repl-diskless-sync-delay 0"));
            // a full disk or a slow one is not what these tests are about
            line(format_args!("stop-writes-on-bgsave-error no"));
        }
        if builder.persistence {
            line(format_args!("appendonly yes"));
            line(format_args!("appendfsync always"));
        }
        if builder.unix_socket {
            line(format_args!("unixsocket {}", self.socket().display()));
        }
        if let Some(master) = builder.replica_of {
            line(format_args!("replicaof {} {}", master.ip(), master.port()));
        }
        for (name, value) in &builder.config {
            line(format_args!("{name} {value}"));
        }
        if let Some(password) = &builder.password {
            line(format_args!("requirepass {password}"));
        }
        for rule in &builder.acl {
            line(format_args!("user {rule}"));
        }
        if let Some(password) = &self.admin_password {
            line(format_args!("user {ADMIN} on >{password} ~* &* +@all"));
        }
        file
    }

    pub(crate) async fn launch(&self) -> anyhow::Result<()> {
        self.shared.lock().take();
        let mut command = child::command(&self.binary);
        command.arg(self.dir().join("server.conf"));
        if self.builder.sentinel {
            command.arg("--sentinel");
        }
        if let Some(clock) = &self.builder.clock {
            faketime::preload(&mut command, clock)?;
        }
        self.process.launch(command);
        let pid = self.pid().map(|pid| pid.to_string());
        let program = self.builder.flavor.program();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let last = match self.identity().await {
                // another process's server may have been quicker to take the port
                Ok(info) if info.get("process_id") == pid.as_ref() => {
                    return self.check_flavor(&info);
                }
                Ok(_) => "another server answers on its port".to_owned(),
                Err(error) => format!("{error:#}"),
            };
            if let Some(status) = self.ended() {
                bail!(
                    "{program} ended at once ({status}); it said:\n{}",
                    self.last_words()
                );
            }
            if Instant::now() > deadline {
                self.kill();
                bail!(
                    "{program} does not answer: {last}; it said:\n{}",
                    self.last_words()
                );
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn identity(&self) -> anyhow::Result<BTreeMap<String, String>> {
        let mut conn = self.open_connection(Duration::from_secs(2)).await?;
        let _: Value = redis::cmd("PING").query_async(&mut conn).await?;
        let info: String = redis::cmd("INFO").arg("server").query_async(&mut conn).await?;
        Ok(fields(info.lines(), ':'))
    }

    fn check_flavor(&self, info: &BTreeMap<String, String>) -> anyhow::Result<()> {
        let valkey = info.contains_key("valkey_version");
        let is_old = info
            .get("redis_version")
            .is_some_and(|version| version.starts_with("6.2."));
        let right = match self.builder.flavor {
            Flavor::Redis => !valkey,
            Flavor::Redis62 => !valkey && is_old,
            Flavor::Valkey => valkey,
        };
        if !right {
            bail!(
                "{} is {} {}, not {}: set {}",
                self.binary.display(),
                if valkey { "Valkey" } else { "Redis" },
                info.get("redis_version").map_or("", String::as_str),
                self.builder.flavor,
                self.builder.flavor.variable(),
            );
        }
        Ok(())
    }

    /// Which program runs.
    pub fn flavor(&self) -> Flavor {
        self.builder.flavor
    }

    /// Where clients and other servers find it: its port for TLS, where it has one.
    pub fn announced(&self) -> SocketAddr {
        let port = self.tls_port.as_ref().map_or(self.port(), Port::number);
        (Ipv4Addr::LOCALHOST, port).into()
    }

    /// How URLs of it begin.
    pub(crate) fn scheme(&self) -> &'static str {
        match self.tls_port {
            Some(_) => "rediss",
            None => "redis",
        }
    }

    /// Its URL, as the default user, with the password if there is one.
    pub fn url(&self) -> String {
        match &self.builder.password {
            Some(password) => format!("redis://:{password}@{}", self.addr()),
            None => format!("redis://{}", self.addr()),
        }
    }

    /// Its URL as `user`.
    pub fn url_as(&self, user: &str, password: &str) -> String {
        format!("redis://{user}:{password}@{}", self.addr())
    }

    /// The path of its unix socket.
    ///
    /// # Panics
    /// When it has none.
    pub fn socket(&self) -> PathBuf {
        assert!(
            self.builder.unix_socket,
            "the server was built without a unix socket"
        );
        self.dir().join("socket")
    }

    /// Its URL through the unix socket, as the default user, with the password if there is one.
    ///
    /// # Panics
    /// When it has no unix socket.
    pub fn unix_url(&self) -> String {
        let query = self
            .builder
            .password
            .as_ref()
            .map(|password| format!("?pass={password}"));
        format!(
            "redis+unix://{}{}",
            self.socket().display(),
            query.unwrap_or_default()
        )
    }

    /// The directory of its data, as long as this lives.
    pub fn data_dir(&self) -> PathBuf {
        self.dir().join("data")
    }

    /// Asks it to end (`SIGTERM`), so that it says good-bye to its clients and replicas, and waits until it has.
    ///
    /// # Panics
    /// When it does not run, or does not end in time.
    pub async fn shutdown(&self) {
        assert!(self.pid().is_some(), "the server runs");
        self.signal(Signal::SIGTERM);
        let deadline = Instant::now() + PATIENCE;
        while self.ended().is_none() {
            assert!(
                Instant::now() < deadline,
                "the server does not end: {}",
                self.last_words()
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Starts it again on the same port, killing it first if it runs. It has its data back if it was built with
    /// [`persistence`](ServerBuilder::persistence), and is empty otherwise.
    ///
    /// # Panics
    /// When it does not answer in time.
    pub async fn restart(&self) {
        self.kill();
        let deadline = Instant::now() + PATIENCE;
        while let Err(error) = self.launch().await {
            let taken = error.to_string().contains("Address already in use");
            assert!(
                taken && Instant::now() < deadline,
                "the server does not come back: {error:#}"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// [`restart`](Self::restart) after its data directory was emptied, like a server that lost its disk. In a Cluster
    /// it still knows its identity.
    ///
    /// # Panics
    /// As [`restart`](Self::restart).
    pub async fn restart_empty(&self) {
        self.kill();
        self.remove_data().expect("the data directory can be emptied");
        self.restart().await;
    }

    pub(crate) fn remove_data(&self) -> io::Result<()> {
        for file in fs::read_dir(self.data_dir())? {
            let file = file?;
            match file.file_type()?.is_dir() {
                true => fs::remove_dir_all(file.path())?,
                false if file.file_name() == "nodes.conf" => {}
                false => fs::remove_file(file.path())?,
            }
        }
        Ok(())
    }

    /// A client of the `redis` crate with all rights, for what the methods here do not cover.
    ///
    /// # Errors
    /// When the `redis` crate refuses the address.
    pub fn client(&self) -> anyhow::Result<redis::Client> {
        let url = match &self.admin_password {
            Some(password) => self.url_as(ADMIN, password),
            None => format!("redis://{}", self.addr()),
        };
        Ok(redis::Client::open(url)?)
    }

    pub(crate) async fn open_connection(&self, within: Duration) -> anyhow::Result<MultiplexedConnection> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(within))
            .set_response_timeout(Some(within));
        let mut conn = self
            .client()?
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        let _: Value = redis::cmd("CLIENT")
            .arg("SETNAME")
            .arg(CLIENT_NAME)
            .query_async(&mut conn)
            .await?;
        let info: String = redis::cmd("CLIENT").arg("INFO").query_async(&mut conn).await?;
        if let Some(addr) = fields(info.split_whitespace(), '=').remove("addr") {
            self.own_sources.lock().insert(addr);
        }
        Ok(conn)
    }

    /// A new connection with all rights, for asserts.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn conn(&self) -> MultiplexedConnection {
        let opened = self.open_connection(PATIENCE).await;
        opened.unwrap_or_else(|error| panic!("{self:?} takes no connection: {error:#}"))
    }

    /// The connection that the methods below share: a new one for each of many looks would use up the ports.
    async fn shared_conn(&self) -> redis::RedisResult<MultiplexedConnection> {
        // a connection answers only as long as the runtime runs in which it was opened
        let here = runtime::Handle::current().id();
        if let Some((home, conn)) = &*self.shared.lock()
            && *home == here
        {
            return Ok(conn.clone());
        }
        let opened = self.open_connection(PATIENCE).await;
        let conn =
            opened.map_err(|error| io::Error::other(format!("{self:?} takes no connection: {error:#}")))?;
        *self.shared.lock() = Some((here, conn.clone()));
        Ok(conn)
    }

    /// Sends one command and gives its reply as it is.
    ///
    /// # Panics
    /// When the server answers with an error, or not at all.
    pub async fn command(&self, args: &[&str]) -> Value {
        self.query(args).await
    }

    /// Sends one command and gives its reply as a `T`: `let left: i64 = server.query(&["PTTL", "key"]).await`.
    ///
    /// # Panics
    /// When the server answers with an error or with something else, or not at all.
    pub async fn query<T: FromRedisValue>(&self, args: &[&str]) -> T {
        self.try_query(args)
            .await
            .unwrap_or_else(|error| panic!("`{}` failed: {error}", args.join(" ")))
    }

    /// Sends one command and gives its reply as a `T`.
    ///
    /// # Errors
    /// When the server answers with an error or with something else, or takes no connection.
    pub async fn try_query<T: FromRedisValue>(&self, args: &[&str]) -> redis::RedisResult<T> {
        let (name, rest) = args.split_first().expect("a command has a name");
        let mut command = redis::cmd(name);
        command.arg(rest);
        match command.query_async(&mut self.shared_conn().await?).await {
            // the server was restarted since, or told to drop its clients
            Err(error) if error.is_connection_dropped() => {
                self.shared.lock().take();
                command.query_async(&mut self.shared_conn().await?).await
            }
            reply => reply,
        }
    }

    /// What is stored at a key, and the server's time (ms), for messages.
    ///
    /// # Errors
    /// As [`try_query`](Server::try_query).
    pub async fn content(&self, key: &str) -> redis::RedisResult<String> {
        let kind: String = self.try_query(&["TYPE", key]).await?;
        // Permits of Redisson's format are packed numbers.
        let content: Vec<Vec<u8>> = match kind.as_str() {
            "hash" => self.try_query(&["HGETALL", key]).await?,
            "list" => self.try_query(&["LRANGE", key, "0", "-1"]).await?,
            "set" => self.try_query(&["SMEMBERS", key]).await?,
            "zset" => self.try_query(&["ZRANGE", key, "0", "-1", "WITHSCORES"]).await?,
            "string" => Vec::from_iter(self.try_query::<Option<Vec<u8>>>(&["GET", key]).await?),
            _ => Vec::new(),
        };
        let content: Vec<_> = content
            .iter()
            .map(|part| part.escape_ascii().to_string())
            .collect();
        let (seconds, micros): (u64, u64) = self.try_query(&["TIME"]).await?;
        Ok(format!(
            "{kind} {content:?} at {}",
            seconds * 1000 + micros / 1000
        ))
    }

    /// All keys, sorted.
    pub async fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = self.query(&["KEYS", "*"]).await;
        keys.sort();
        keys
    }

    /// The remaining life of `key`; `None` when it is not there or never expires.
    pub async fn ttl(&self, key: &str) -> Option<Duration> {
        let millis: i64 = self.query(&["PTTL", key]).await;
        u64::try_from(millis).ok().map(Duration::from_millis)
    }

    /// Counts the commands that the server runs from now on, see [`Server::commands`].
    pub async fn forget_commands(&self) {
        self.command(&["CONFIG", "RESETSTAT"]).await;
    }

    /// How often the server ran each command since they were forgotten, those inside of scripts included. What connections
    /// do beside the steps of locks is left out.
    ///
    /// # Panics
    /// When the server's answer makes no sense.
    pub async fn commands(&self) -> BTreeMap<String, u64> {
        const BESIDE: [&str; 6] = ["info", "ping", "subscribe", "unsubscribe", "config", "client"];
        let stats: String = self.query(&["INFO", "commandstats"]).await;
        let all = stats.lines().filter_map(|line| {
            let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            let calls = rest.split(',').next()?.parse().expect("a number of calls");
            let counts = !BESIDE.iter().any(|beside| name.starts_with(beside));
            counts.then(|| (name.to_owned(), calls))
        });
        all.collect()
    }

    /// The server's clock, in microseconds since 1970.
    pub async fn time_us(&self) -> u64 {
        let (seconds, micros): (u64, u64) = self.query(&["TIME"]).await;
        seconds * 1_000_000 + micros
    }

    /// Collects the commands that the server executes from now on.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn monitor(&self) -> Monitor<'_> {
        let started = Monitor::start(self, self.own_sources.clone()).await;
        started.unwrap_or_else(|error| panic!("{self:?} cannot be monitored: {error:#}"))
    }

    /// The fields of `CLIENT LIST` (`id`, `name`, `addr`, `sub`, `cmd`, …) for every connection except the harness's own.
    pub async fn client_list(&self) -> Vec<BTreeMap<String, String>> {
        let list: String = self.query(&["CLIENT", "LIST"]).await;
        list.lines()
            .map(|line| fields(line.split(' '), '='))
            .filter(|client| client.get("name").is_none_or(|name| name != CLIENT_NAME))
            .collect()
    }

    /// The channels with subscribers, sorted; sharded channels included, patterns not.
    pub async fn pubsub_channels(&self) -> Vec<String> {
        let mut channels: Vec<String> = self.query(&["PUBSUB", "CHANNELS"]).await;
        // Redis 6 has none
        let sharded: Result<Vec<String>, _> = self.try_query(&["PUBSUB", "SHARDCHANNELS"]).await;
        channels.extend(sharded.unwrap_or_default());
        channels.sort();
        channels
    }

    /// Removes all keys.
    pub async fn flush(&self) {
        self.command(&["FLUSHALL"]).await;
    }

    /// Forgets all scripts, so that the next `EVALSHA` of each is answered by `NOSCRIPT`.
    pub async fn script_flush(&self) {
        self.command(&["SCRIPT", "FLUSH"]).await;
    }
}

fn fields<'a>(parts: impl Iterator<Item = &'a str>, separator: char) -> BTreeMap<String, String> {
    parts
        .filter_map(|part| part.trim().split_once(separator))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_server_is_an_error_that_says_what_to_do() {
        let error = Flavor::Valkey
            .find(None, [PathBuf::from("/nowhere")].into_iter())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("DLOCK_VALKEY_SERVER") && error.contains("scripts/servers.sh"),
            "{error}"
        );

        let error = Flavor::Redis
            .find(Some("/nowhere/x".into()), std::iter::empty())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("DLOCK_REDIS_SERVER") && error.contains("/nowhere/x"),
            "{error}"
        );
    }
}
