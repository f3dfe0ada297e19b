//! A real etcd as child processes, and a network before it that loses exactly one reply.
//!
//! [`Etcd`] is a server with nothing in it, [`EtcdCluster`] three members that elect their leader, and [`EtcdProxy`] stands
//! between a server and its clients.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use std::{env, fmt};

use dlock_etcd::{EtcdLocks, EtcdLocksBuilder};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::Certificates;
use crate::child;
use crate::network::Gateway;
use crate::port::Port;

mod base64;
mod cluster;
mod wire;

pub use cluster::EtcdCluster;
pub use wire::{Call, Grpc};

/// A proxy before a server.
pub type EtcdProxy = Gateway<Grpc>;

/// How long a server may take to start, to stop, or to answer the harness.
const PATIENCE: Duration = Duration::from_secs(60);
/// Where the program is, if not on the `PATH`.
const VARIABLE: &str = "DLOCK_ETCD_SERVER";

/// A running etcd server of its own, on a free port of 127.0.0.1, with its data in memory where that can be. It is killed
/// when this is dropped, and when the test process ends in any other way.
///
/// What was committed survives [`kill`](Self::kill).
pub struct Etcd {
    program: PathBuf,
    clients: Port,
    peers: Port,
    name: String,
    /// The members of its cluster, in etcd's notation; empty where it is alone.
    members: Mutex<String>,
    options: Vec<String>,
    child: Mutex<Option<Child>>,
    // after the child, which writes into it
    dir: TempDir,
}

impl Etcd {
    /// Starts a server and waits until it answers.
    ///
    /// # Panics
    /// When it does not.
    pub async fn start() -> Etcd {
        Etcd::start_with(&[]).await
    }

    /// The same with further options of the program.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn start_with(options: &[&str]) -> Etcd {
        let server = Etcd::new("alone", options);
        server.restart().await;
        server
    }

    /// A server that only speaks TLS, and only to clients that the authority vouches for. It cannot be [asked](Self::ask).
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn start_encrypted(certificates: &Certificates) -> Etcd {
        let file = |name: &str| certificates.file(name).display().to_string();
        let (root, certificate, key) = (file("root.pem"), file("server.pem"), file("server.key"));
        let options = [
            "--cert-file",
            &certificate,
            "--key-file",
            &key,
            "--trusted-ca-file",
            &root,
            "--client-cert-auth",
        ];
        let server = Etcd::new("alone", &options);
        server.launch();
        let deadline = Instant::now() + PATIENCE;
        while tokio::net::TcpStream::connect(server.addr()).await.is_err() {
            assert!(
                Instant::now() < deadline,
                "etcd does not listen; it said:\n{}",
                server.log()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        server
    }

    /// A server that all tests of this process share which hold it at the same time: for those that break nothing, each in
    /// a namespace of its own.
    ///
    /// # Panics
    /// When it does not start.
    pub async fn shared() -> Arc<Etcd> {
        static SHARED: tokio::sync::Mutex<Weak<Etcd>> = tokio::sync::Mutex::const_new(Weak::new());
        let mut shared = SHARED.lock().await;
        if let Some(server) = shared.upgrade() {
            return server;
        }
        let server = Arc::new(Etcd::start().await);
        *shared = Arc::downgrade(&server);
        server
    }

    /// A server that does not run yet.
    fn new(name: &str, options: &[&str]) -> Etcd {
        let memory = Path::new("/dev/shm");
        let mut builder = tempfile::Builder::new();
        builder.prefix("dlock-etcd-");
        let dir = match memory.is_dir() {
            true => builder.tempdir_in(memory).or_else(|_| builder.tempdir()),
            false => builder.tempdir(),
        };
        Etcd {
            program: env::var_os(VARIABLE).map_or_else(|| PathBuf::from("etcd"), PathBuf::from),
            clients: Port::reserve(),
            peers: Port::reserve(),
            name: name.to_owned(),
            members: Mutex::default(),
            options: options.iter().map(|option| (*option).to_owned()).collect(),
            child: Mutex::new(None),
            dir: dir.expect("a directory can be made"),
        }
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.clients.number()
    }

    /// Its address.
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port()).into()
    }

    /// The URL to connect to, with this namespace. Servers that tests run against may be old.
    pub fn url(&self, namespace: &str) -> String {
        url_at(self.addr(), namespace)
    }

    /// Options of a store in this namespace.
    pub fn builder(&self, namespace: &str) -> EtcdLocksBuilder {
        builder_at(self.addr(), namespace)
    }

    /// Its process id while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.child.lock().as_ref().map(Child::id)
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = self.pid() {
            let pid = Pid::from_raw(pid.try_into().expect("process ids are small"));
            // it may have ended
            let _ = signal::kill(pid, signal);
        }
    }

    /// Freezes it (`SIGSTOP`). The kernel goes on to accept connections and bytes for it.
    ///
    /// # Panics
    /// When it does not run.
    pub fn stop(&self) {
        assert!(self.pid().is_some(), "the server runs");
        self.signal(Signal::SIGSTOP);
    }

    /// Lets a frozen server go on (`SIGCONT`).
    pub fn cont(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Kills it (`SIGKILL`), frozen or not. Does nothing when it does not run.
    pub fn kill(&self) {
        if let Some(mut child) = self.child.lock().take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts it again on the same port with its data, killing it first if it runs, and waits until it serves.
    ///
    /// # Panics
    /// When it does not answer in time.
    pub async fn restart(&self) {
        self.launch();
        self.serves().await;
    }

    /// Starts it, and waits for nothing.
    fn launch(&self) {
        self.kill();
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.log_file())
            .expect("a log can be written");
        let (clients, peers) = (
            format!("{}://127.0.0.1:{}", self.scheme(), self.port()),
            format!("http://127.0.0.1:{}", self.peers.number()),
        );
        let mut members = self.members.lock().clone();
        if members.is_empty() {
            members = self.member();
        }
        let mut command = child::command(&self.program);
        command.args(["--name", &self.name, "--log-level", "error", "--logger", "zap"]);
        command.arg("--data-dir").arg(self.dir.path().join("data"));
        command.args([
            "--listen-client-urls",
            &clients,
            "--advertise-client-urls",
            &clients,
        ]);
        command.args([
            "--listen-peer-urls",
            &peers,
            "--initial-advertise-peer-urls",
            &peers,
        ]);
        command.args(["--initial-cluster", &members]);
        command.args(&self.options).stdin(Stdio::null());
        command
            .stdout(log.try_clone().expect("a file can be shared"))
            .stderr(log);
        let child = child::spawn(command).expect("setpriv (package util-linux) can be started");
        self.child.lock().replace(child);
    }

    fn scheme(&self) -> &'static str {
        match self.options.iter().any(|option| option == "--cert-file") {
            true => "https",
            false => "http",
        }
    }

    /// As others of its cluster know it.
    fn member(&self) -> String {
        format!("{}=http://127.0.0.1:{}", self.name, self.peers.number())
    }

    async fn serves(&self) {
        let deadline = Instant::now() + PATIENCE;
        // With a leader, and nothing of before to be read yet.
        while self
            .ask("kv/range", &json!({"key": base64::encode(b"x")}))
            .await
            .is_none()
        {
            let ended = matches!(self.child.lock().as_mut().map(Child::try_wait), Some(Ok(Some(_))));
            assert!(
                !ended && Instant::now() < deadline,
                "etcd does not answer: set {VARIABLE} to the path of the program, or run scripts/servers.sh; it said:\n{}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Asks it by its gateway of JSON. `None` where there is no answer, or it refuses.
    pub async fn ask(&self, path: &str, body: &Value) -> Option<Value> {
        let client = reqwest::Client::builder()
            .no_proxy()
            .timeout(Duration::from_secs(10))
            .build()
            .ok()?;
        let url = format!("http://{}/v3/{path}", self.addr());
        let reply = client.post(url).json(body).send().await.ok()?;
        match reply.status().is_success() {
            true => reply.json().await.ok(),
            false => None,
        }
    }

    /// How many messages clients have sent it, by its own count.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn requests(&self) -> u64 {
        let client = reqwest::Client::builder().no_proxy().build().expect("a client");
        let url = format!("http://{}/metrics", self.addr());
        let reply = client.get(url).send().await.expect("the server answers");
        let text = reply.text().await.expect("it is text");
        let counters = text
            .lines()
            .filter(|line| line.starts_with("grpc_server_msg_received_total{"))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        counters.sum::<f64>() as u64
    }

    /// Deletes all keys that begin so, and says how many.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn delete(&self, prefix: &str) -> u64 {
        let reply = self.ask("kv/deleterange", &range(prefix)).await;
        let reply = reply.expect("the server answers");
        count(&reply["deleted"])
    }

    /// The keys that begin so, and their values.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn keys(&self, prefix: &str) -> Vec<(String, String)> {
        let reply = self.ask("kv/range", &range(prefix)).await;
        let reply = reply.expect("the server answers");
        let kvs = reply["kvs"].as_array().cloned().unwrap_or_default();
        let text = |value: &Value| {
            let bytes = base64::decode(value.as_str().unwrap_or_default());
            String::from_utf8_lossy(&bytes).into_owned()
        };
        kvs.iter()
            .map(|kv| (text(&kv["key"]), text(&kv["value"])))
            .collect()
    }

    /// Writes a key.
    pub async fn put(&self, key: &str, value: &[u8]) -> bool {
        let body = json!({"key": base64::encode(key.as_bytes()), "value": base64::encode(value)});
        self.ask("kv/put", &body).await.is_some()
    }

    /// All leases that there are.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn leases(&self) -> Vec<i64> {
        let reply = self
            .ask("lease/leases", &json!({}))
            .await
            .expect("the server answers");
        let leases = reply["leases"].as_array().cloned().unwrap_or_default();
        let id = |lease: &Value| lease["ID"].as_str().and_then(|id| id.parse().ok());
        leases.iter().filter_map(id).collect()
    }

    /// Ends a lease.
    pub async fn revoke(&self, lease: i64) -> bool {
        self.ask("lease/revoke", &json!({"ID": lease.to_string()}))
            .await
            .is_some()
    }

    fn log_file(&self) -> PathBuf {
        self.dir.path().join("server.log")
    }

    /// All that it printed so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.log_file()).unwrap_or_default()).into_owned()
    }
}

impl fmt::Debug for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Etcd")
            .field("port", &self.port())
            .field("pid", &self.pid())
            .finish_non_exhaustive()
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A namespace that is unused.
pub fn fresh_namespace() -> String {
    format!("test-{:016x}/", fastrand::u64(..))
}

/// The URL of a server at this address, a proxy's perhaps.
pub fn url_at(addr: SocketAddr, namespace: &str) -> String {
    format!("etcd://{addr}/?namespace={namespace}&allow_old_server=true")
}

/// Options of a store on the server at this address.
pub fn builder_at(addr: SocketAddr, namespace: &str) -> EtcdLocksBuilder {
    EtcdLocks::builder([addr.to_string()])
        .namespace(namespace)
        .allow_old_server(true)
}

/// All keys that begin so.
fn range(prefix: &str) -> Value {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    json!({"key": base64::encode(prefix.as_bytes()), "range_end": base64::encode(&end)})
}

/// A number, as the gateway writes it.
fn count(value: &Value) -> u64 {
    value.as_str().and_then(|text| text.parse().ok()).unwrap_or(0)
}
