//! A real ZooKeeper as child processes, alone or three of them, and a network before it that fails on command.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use std::{env, fmt};

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use parking_lot::Mutex;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::child;
use crate::network::{Direction, Gateway, Stream};
use crate::port::Port;

mod wire;

pub use wire::{Zk, ZkRequest};

/// A proxy before a server.
pub type ZkProxy = Gateway<Stream<Zk>>;
/// The same for connections that are none of clients.
type RawProxy = Gateway<Stream<wire::Bytes>>;

/// How long a server may take to start, to stop, or to answer the harness.
const PATIENCE: Duration = Duration::from_secs(90);
/// The server's jar, if it is not where Debian's package puts it.
const VARIABLE: &str = "DLOCK_ZOOKEEPER_JAR";
const INSTALLED: &str = "/usr/share/java/zookeeper.jar";
/// By which the servers count: sessions last from 2 to 200 of it.
pub const TICK: Duration = Duration::from_millis(200);

/// A ZooKeeper server of its own, on a free port of 127.0.0.1. It is killed when this is dropped, and when the test process
/// ends in any other way.
pub struct Zookeeper {
    jar: PathBuf,
    port: Port,
    config: String,
    child: Mutex<Option<Child>>,
    // after the child, which writes into it
    dir: TempDir,
}

impl Zookeeper {
    /// Starts a server and waits until it answers.
    ///
    /// # Panics
    /// When it does not.
    pub async fn start() -> Zookeeper {
        let server = Zookeeper::create();
        server.restart().await;
        server
    }

    /// The same with further lines of its configuration, which count more than those that all have.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn start_with(lines: &str) -> Zookeeper {
        let mut server = Zookeeper::create();
        server.config.push_str(lines);
        server.restart().await;
        server
    }

    /// A server that all tests of this process share which hold it at the same time: for those that break nothing,
    /// each under a root of its own.
    ///
    /// # Panics
    /// When it does not start.
    pub async fn shared() -> Arc<Zookeeper> {
        static SHARED: tokio::sync::Mutex<Weak<Zookeeper>> = tokio::sync::Mutex::const_new(Weak::new());
        let mut shared = SHARED.lock().await;
        if let Some(server) = shared.upgrade() {
            return server;
        }
        let server = Arc::new(Zookeeper::start().await);
        *shared = Arc::downgrade(&server);
        server
    }

    fn create() -> Zookeeper {
        let jar = env::var_os(VARIABLE).filter(|jar| !jar.is_empty());
        let jar = jar.map_or_else(|| PathBuf::from(INSTALLED), PathBuf::from);
        assert!(
            jar.is_file(),
            "no ZooKeeper to test against: set {VARIABLE} to the path of zookeeper.jar, or run scripts/servers.sh, which \
             installs it"
        );
        let memory = Path::new("/dev/shm");
        let mut builder = tempfile::Builder::new();
        builder.prefix("dlock-zk-");
        let dir = match memory.is_dir() {
            true => builder.tempdir_in(memory).or_else(|_| builder.tempdir()),
            false => builder.tempdir(),
        };
        let dir = dir.expect("a directory can be created");
        let port = Port::reserve();
        let config = format!(
            "tickTime={}\ndataDir={}\nclientPort={}\nclientPortAddress=127.0.0.1\nmaxClientCnxns=0\n\
             maxSessionTimeout={}\nadmin.enableServer=false\n4lw.commands.whitelist=srvr,cons,conf,mntr\nextendedTypesEnabled=true\n\
             preAllocSize=1024\nsnapCount=100000\n",
            TICK.as_millis(),
            dir.path().display(),
            port.number(),
            200 * TICK.as_millis(),
        );
        Zookeeper {
            jar,
            port,
            config,
            child: Mutex::new(None),
            dir,
        }
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port.number()).into()
    }

    /// The process of the server.
    fn pid(&self) -> Option<Pid> {
        let child = self.child.lock();
        let id = child.as_ref()?.id();
        Some(Pid::from_raw(i32::try_from(id).expect("a process id")))
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = self.pid() {
            signal::kill(pid, signal).expect("the server runs");
        }
    }

    /// Stops its process, until [`cont`](Self::cont).
    pub fn stop(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Lets it go on.
    pub fn cont(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Kills it.
    pub fn kill(&self) {
        if let Some(mut child) = self.child.lock().take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Kills it and removes its data: a server that it is started as knows nothing.
    pub fn lose(&self) {
        self.kill();
        let _ = fs::remove_dir_all(self.dir.path().join("version-2"));
    }

    /// Starts it again on the same port with its data, killing it first if it runs, and waits until it serves.
    ///
    /// # Panics
    /// When it does not answer in time.
    pub async fn restart(&self) {
        self.spawn();
        self.serves().await;
    }

    fn spawn(&self) {
        self.kill();
        let config = self.dir.path().join("zoo.cfg");
        fs::write(&config, &self.config).expect("a configuration can be written");
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.dir.path().join("server.log"))
            .expect("a log can be written");
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
        command.stdin(Stdio::null());
        command
            .stdout(log.try_clone().expect("a file can be shared"))
            .stderr(log);
        let child = child::spawn(command).expect("setpriv (package util-linux) can be started");
        self.child.lock().replace(child);
    }

    /// Waits until it serves.
    async fn serves(&self) {
        let deadline = Instant::now() + PATIENCE;
        while !self.said("srvr").await.is_some_and(|said| said.contains("Mode:")) {
            let ended = matches!(self.child.lock().as_mut().map(Child::try_wait), Some(Ok(Some(_))));
            assert!(
                !ended && Instant::now() < deadline,
                "the server does not answer; it said:\n{}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(30)).await;
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

    /// All that it printed so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.dir.path().join("server.log")).unwrap_or_default())
            .into_owned()
    }
}

impl fmt::Debug for Zookeeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Zookeeper")
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}

impl Drop for Zookeeper {
    fn drop(&mut self) {
        self.kill();
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
        let mut servers: Vec<Zookeeper> = (0..3).map(|_| Zookeeper::create()).collect();
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
            ways.push(own_ways);
            fs::write(server.dir.path().join("myid"), (own + 1).to_string()).expect("a file can be written");
        }
        for server in &servers {
            server.spawn();
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

    /// The number of the leader.
    ///
    /// # Panics
    /// When there is none in time.
    pub async fn leader(&self) -> usize {
        let deadline = Instant::now() + PATIENCE;
        loop {
            for (number, server) in self.servers.iter().enumerate() {
                if server
                    .said("srvr")
                    .await
                    .is_some_and(|said| said.contains("Mode: leader"))
                {
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
