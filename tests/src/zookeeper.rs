//! A real ZooKeeper as child processes, alone or three of them, and a network before it that fails on command.

use std::io::{self, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Deref;
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, fs};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::child;
use crate::network::{Direction, Gateway, Stream};
use crate::port::Port;
use crate::process::{PATIENCE, Process, SharedServer};

mod sessions;
mod wire;

pub use wire::{Zk, ZkRequest};

/// What a server and its clients speak.
pub type ZkWire = Stream<Zk>;
/// A proxy before a server.
pub type ZkProxy = Gateway<ZkWire>;
/// The same for connections that are none of clients.
type RawProxy = Gateway<Stream<wire::Bytes>>;

/// The server's jar, if it is not where Debian's package puts it.
const VARIABLE: &str = "DLOCK_ZOOKEEPER_JAR";
const INSTALLED: &str = "/usr/share/java/zookeeper.jar";
/// By which the servers count: sessions last from 2 to 200 of it.
pub const TICK: Duration = Duration::from_millis(200);

/// A ZooKeeper server of its own.
#[derive(Debug)]
pub struct Zookeeper {
    jar: PathBuf,
    process: Process,
    config: String,
}

impl Zookeeper {
    /// Starts a server and waits until it answers.
    ///
    /// # Panics
    /// When it does not.
    pub async fn start() -> Zookeeper {
        Zookeeper::start_with("").await
    }

    /// The same with further lines of its configuration, which count more than those that all have.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn start_with(lines: &str) -> Zookeeper {
        Zookeeper::create(Zookeeper::process()).begun(lines).await
    }

    /// The same on a disk of this many bytes.
    ///
    /// # Panics
    /// When it does not answer, or a disk cannot be made.
    pub async fn start_on_a_disk(bytes: u64) -> Zookeeper {
        Zookeeper::create(Zookeeper::process().on_a_disk(bytes))
            .begun("")
            .await
    }

    async fn begun(mut self, lines: &str) -> Zookeeper {
        self.config.push_str(lines);
        self.restart().await;
        self
    }

    /// A server that all tests of this process share which hold it at the same time: for those that break nothing,
    /// each under a root of its own.
    ///
    /// # Panics
    /// When it does not start.
    pub async fn shared() -> Arc<Zookeeper> {
        static SHARED: SharedServer<Zookeeper> = SharedServer::new();
        SHARED.or(Zookeeper::start()).await
    }

    fn process() -> Process {
        Process::new("dlock-zk-")
    }

    fn create(process: Process) -> Zookeeper {
        let jar = env::var_os(VARIABLE).filter(|jar| !jar.is_empty());
        let jar = jar.map_or_else(|| PathBuf::from(INSTALLED), PathBuf::from);
        assert!(
            jar.is_file(),
            "no ZooKeeper to test against: set {VARIABLE} to the path of zookeeper.jar, or run scripts/servers.sh, which \
             installs it"
        );
        let config = format!(
            "tickTime={}\ndataDir={}\nclientPort={}\nclientPortAddress=127.0.0.1\nmaxClientCnxns=0\n\
             maxSessionTimeout={}\nadmin.enableServer=false\n4lw.commands.whitelist=srvr,cons,conf,mntr\nextendedTypesEnabled=true\n\
             preAllocSize=1024\nsnapCount=100000\n",
            TICK.as_millis(),
            process.data().display(),
            process.port(),
            200 * TICK.as_millis(),
        );
        Zookeeper { jar, process, config }
    }

    /// Kills it and removes its data: a server that it is started as knows nothing.
    pub fn lose(&self) {
        self.kill();
        let _ = fs::remove_dir_all(self.data().join("version-2"));
    }

    /// Starts it again on the same port with its data, killing it first if it runs, and waits until it serves.
    ///
    /// # Panics
    /// When it does not answer in time.
    pub async fn restart(&self) {
        self.begin();
        self.serves().await;
    }

    fn begin(&self) {
        let config = self.dir().join("zoo.cfg");
        fs::write(&config, &self.config).expect("a configuration can be written");
        let mut command = child::command("java");
        // A small one that starts fast.
        command.args([
            "-Xmx96m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-Xshare:auto",
        ]);
        command.args(["-Dzookeeper.admin.enableServer=false", "-Dzookeeper.forceSync=no"]);
        command.arg("-cp").arg(&self.jar);
        command
            .arg("org.apache.zookeeper.server.quorum.QuorumPeerMain")
            .arg(config);
        self.launch(command);
    }

    /// Waits until it serves.
    async fn serves(&self) {
        let launched = Instant::now();
        while !self.said("srvr").await.is_some_and(|said| said.contains("Mode:")) {
            self.is_starting(launched, "no mode").await;
        }
    }

    /// What it answers to one of its four-letter words.
    pub async fn said(&self, word: &str) -> Option<String> {
        let ask = async {
            let mut stream = TcpStream::connect(self.addr()).await.ok()?;
            stream.write_all(word.as_bytes()).await.ok()?;
            let mut said = String::new();
            stream.read_to_string(&mut said).await.ok()?;
            Some(said)
        };
        tokio::time::timeout(Duration::from_secs(5), ask).await.ok()?
    }

    /// How many requests it has received.
    ///
    /// # Panics
    /// When it does not count them.
    pub async fn requests(&self) -> u64 {
        let said = self.said("srvr").await.unwrap_or_default();
        let line = said.lines().find_map(|line| line.strip_prefix("Received: "));
        line.expect("it counts").parse().expect("a number")
    }

    /// What its own command line answers to these lines.
    ///
    /// # Panics
    /// When it cannot be run.
    pub async fn told(&self, lines: &[String]) -> String {
        let mut command = child::command("java");
        command.args(["-Xmx96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp"]);
        command.arg(&self.jar).arg("org.apache.zookeeper.ZooKeeperMain");
        command.args(["-waitforconnection", "-server", &self.addr().to_string()]);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let lines = format!("{}\nquit\n", lines.join("\n"));
        let run = move || -> io::Result<Output> {
            let mut child = child::spawn(command)?;
            let input = child.stdin.take();
            input.map_or(Ok(()), |mut input| input.write_all(lines.as_bytes()))?;
            child.wait_with_output()
        };
        let run = tokio::task::spawn_blocking(run).await.expect("it does not panic");
        let said = run.expect("java can be run");
        String::from_utf8_lossy(&[said.stdout, said.stderr].concat()).into_owned()
    }
}

impl Deref for Zookeeper {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

/// Three servers that elect a leader. Each of them follows another one through a proxy of its own, so that it can be cut off
/// from its leader while its clients reach it.
#[derive(Debug)]
pub struct Ensemble {
    servers: Vec<Zookeeper>,
    /// `ways[follower][leader]`; none to itself.
    ways: Vec<Vec<Option<RawProxy>>>,
    _ports: Vec<[Port; 2]>,
}

impl Ensemble {
    /// Starts three servers and waits until they serve.
    ///
    /// # Panics
    /// When they do not.
    pub async fn start() -> Ensemble {
        Ensemble::start_with("").await
    }

    /// The same with further lines of their configuration, which count more than those that all have.
    ///
    /// # Panics
    /// When they do not serve.
    pub async fn start_with(lines: &str) -> Ensemble {
        let mut servers: Vec<Zookeeper> = (0..3).map(|_| Zookeeper::create(Zookeeper::process())).collect();
        // To follow, and to elect.
        let ports: Vec<[Port; 2]> = (0..3).map(|_| [Port::reserve(), Port::reserve()]).collect();
        let mut ways = Vec::new();
        for (own, server) in servers.iter_mut().enumerate() {
            // It is to think that its leader is there for seconds after the last that it heard.
            server.config.push_str("initLimit=100\nsyncLimit=60\n");
            let mut own_ways = Vec::new();
            for (other, [follow, elect]) in ports.iter().enumerate() {
                let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, follow.number()));
                let way = (other != own).then(|| RawProxy::start(addr));
                let follow = way.as_ref().map_or(addr.port(), |way| way.port());
                let line = format!("server.{}=127.0.0.1:{follow}:{}\n", other + 1, elect.number());
                server.config.push_str(&line);
                own_ways.push(way);
            }
            server.config.push_str(lines);
            ways.push(own_ways);
            fs::write(server.data().join("myid"), (own + 1).to_string()).expect("a file can be written");
        }
        for server in &servers {
            server.begin();
        }
        for server in &servers {
            server.serves().await;
        }
        Ensemble {
            servers,
            ways,
            _ports: ports,
        }
    }

    /// The servers.
    pub fn servers(&self) -> &[Zookeeper] {
        &self.servers
    }

    /// Their addresses, as a client has them.
    pub fn addrs(&self) -> String {
        let addrs: Vec<String> = self
            .servers
            .iter()
            .map(|server| server.addr().to_string())
            .collect();
        addrs.join(",")
    }

    /// The number of the leader, among those that run and are not frozen.
    ///
    /// # Panics
    /// When there is none in time.
    pub async fn leader(&self) -> usize {
        let deadline = Instant::now() + PATIENCE;
        loop {
            for (number, server) in self.servers.iter().enumerate() {
                let said = match server.is_awake() {
                    true => server.said("srvr").await,
                    false => None,
                };
                if said.is_some_and(|said| said.contains("Mode: leader")) {
                    return number;
                }
            }
            assert!(Instant::now() < deadline, "no server leads");
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }

    /// Freezes what a follower and its leader say to each other, or lets it go on: no connection is broken.
    ///
    /// # Panics
    /// When both are the same.
    pub fn freeze(&self, follower: usize, leader: usize, frozen: bool) {
        let way = self.ways[follower][leader].as_ref();
        let way = way.expect("a server does not follow itself");
        match frozen {
            true => way.block(Direction::Both),
            false => way.unblock(Direction::Both),
        }
    }
}
