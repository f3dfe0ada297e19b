//! A real etcd as child processes, and a network before it that loses exactly one reply.
//!
//! [`Etcd`] is a server with nothing in it, [`EtcdCluster`] three members that elect their leader, and [`EtcdProxy`] stands
//! between a server and its clients.

use std::env;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock_etcd::{EtcdLocks, EtcdLocksBuilder};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::Certificates;
use crate::child;
use crate::network::Gateway;
use crate::port::Port;
use crate::process::{PATIENCE, Process, SharedServer};

mod base64;
mod cluster;
mod peers;
mod scripted;
mod users;
mod wire;

pub use cluster::EtcdCluster;
pub use scripted::{Reply, ScriptedEtcd};
pub use wire::{Call, Grpc};

/// A proxy before a server.
pub type EtcdProxy = Gateway<Grpc>;

/// Where the program is, if not on the `PATH`.
const VARIABLE: &str = "DLOCK_ETCD_SERVER";

/// A running etcd server of its own. What was committed survives [`kill`](Process::kill).
#[derive(Debug)]
pub struct Etcd {
    program: PathBuf,
    process: Process,
    peers: Port,
    name: String,
    /// The members of its cluster, in etcd's notation; empty where it is alone.
    members: Mutex<String>,
    /// The URL by which the others of its cluster know it, and the proxy by which it reaches them, if they do not speak
    /// directly.
    way: Option<[String; 2]>,
    options: Vec<String>,
    /// The password of `root`, where authentication is enabled.
    root: Mutex<Option<String>>,
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

    /// A server on a disk of this many bytes.
    ///
    /// # Panics
    /// When it does not answer, or a disk cannot be made.
    pub async fn start_on_a_disk(bytes: u64) -> Etcd {
        let mut server = Etcd::new("alone", &[]);
        server.process = server.process.on_a_disk(bytes);
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
        server.begin();
        let launched = Instant::now();
        while let Err(error) = tokio::net::TcpStream::connect(server.addr()).await {
            server.is_starting(launched, error).await;
        }
        server
    }

    /// A server that all tests of this process share which hold it at the same time: for those that break nothing, each in
    /// a namespace of its own.
    ///
    /// # Panics
    /// When it does not start.
    pub async fn shared() -> Arc<Etcd> {
        static SHARED: SharedServer<Etcd> = SharedServer::new();
        SHARED.or(Etcd::start()).await
    }

    /// A server that does not run yet.
    fn new(name: &str, options: &[&str]) -> Etcd {
        Etcd {
            program: env::var_os(VARIABLE).map_or_else(|| PathBuf::from("etcd"), PathBuf::from),
            process: Process::new("dlock-etcd-"),
            peers: Port::reserve(),
            name: name.to_owned(),
            members: Mutex::default(),
            way: None,
            options: options.iter().map(|option| (*option).to_owned()).collect(),
            root: Mutex::default(),
        }
    }

    /// The URL to connect to, with this namespace. Servers that tests run against may be old.
    pub fn url(&self, namespace: &str) -> String {
        url_at(self.addr(), namespace)
    }

    /// Options of a store in this namespace.
    pub fn builder(&self, namespace: &str) -> EtcdLocksBuilder {
        builder_at(self.addr(), namespace)
    }

    /// Starts it again on the same port with its data, killing it first if it runs, and waits until it serves.
    ///
    /// # Panics
    /// When it does not answer in time.
    pub async fn restart(&self) {
        self.begin();
        self.serves().await;
    }

    /// Starts it, and waits for nothing.
    fn begin(&self) {
        let (clients, peers) = (
            format!("{}://127.0.0.1:{}", self.scheme(), self.port()),
            format!("http://{}", self.peer_addr()),
        );
        let mut members = self.members.lock().clone();
        if members.is_empty() {
            members = self.member();
        }
        let mut command = child::command(&self.program);
        command.args(["--name", &self.name, "--log-level", "error", "--logger", "zap"]);
        command.arg("--data-dir").arg(self.data().join("data"));
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
            &self.peer_url(),
        ]);
        if let Some([_, proxy]) = &self.way {
            command.env("HTTP_PROXY", proxy).env("NO_PROXY", "");
        }
        command.args(["--initial-cluster", &members]);
        command.args(&self.options);
        self.launch(command);
    }

    fn scheme(&self) -> &'static str {
        match self.options.iter().any(|option| option == "--cert-file") {
            true => "https",
            false => "http",
        }
    }

    /// As others of its cluster know it.
    fn member(&self) -> String {
        format!("{}={}", self.name, self.peer_url())
    }

    fn peer_url(&self) -> String {
        match &self.way {
            Some([url, _]) => url.clone(),
            None => format!("http://{}", self.peer_addr()),
        }
    }

    fn peer_addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.peers.number()).into()
    }

    async fn serves(&self) {
        let launched = Instant::now();
        let body = json!({"key": base64::encode(b"x")});
        // With a leader, and nothing of before to be read yet.
        while self.ask("kv/range", &body).await.is_none() {
            let remedy = format!("{VARIABLE} is the path of the program, or scripts/servers.sh installs it");
            self.is_starting(launched, remedy).await;
        }
    }

    /// Starts a learner beside it, which is alone, and waits until the learner answers.
    ///
    /// # Panics
    /// When it does not.
    pub async fn start_learner(&self) -> Etcd {
        let learner = Etcd::new("learner", &["--initial-cluster-state", "existing"]);
        let body = json!({"peerURLs": [learner.peer_url()], "isLearner": true});
        assert!(self.ask("cluster/member/add", &body).await.is_some());
        *learner.members.lock() = format!("{},{}", self.member(), learner.member());
        learner.begin();
        let launched = Instant::now();
        while learner.ask("maintenance/status", &json!({})).await.is_none() {
            learner.is_starting(launched, "it has no status").await;
        }
        learner
    }

    /// Asks it by its gateway of JSON, as `root` where authentication is enabled. `None` where there is no answer, or it
    /// refuses.
    pub async fn ask(&self, path: &str, body: &Value) -> Option<Value> {
        let root = self.root.lock().clone();
        match root {
            None => self.ask_as(None, path, body).await,
            Some(password) => {
                let login = json!({"name": "root", "password": password});
                let reply = self.ask_as(None, "auth/authenticate", &login).await?;
                self.ask_as(reply["token"].as_str(), path, body).await
            }
        }
    }

    async fn ask_as(&self, token: Option<&str>, path: &str, body: &Value) -> Option<Value> {
        let client = reqwest::Client::builder()
            .no_proxy()
            .timeout(Duration::from_secs(10))
            .build()
            .ok()?;
        let url = format!("http://{}/v3/{path}", self.addr());
        let mut request = client.post(url).json(body);
        if let Some(token) = token {
            request = request.header("Authorization", token);
        }
        let reply = request.send().await.ok()?;
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

    /// How many keys a lease has.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn keys_on(&self, lease: i64) -> u64 {
        let reply = self
            .ask(
                "lease/timetolive",
                &json!({"ID": lease.to_string(), "keys": true}),
            )
            .await;
        let reply = reply.expect("the server answers");
        reply["keys"].as_array().map_or(0, |keys| keys.len() as u64)
    }

    /// Ends a lease.
    pub async fn revoke(&self, lease: i64) -> bool {
        self.ask("lease/revoke", &json!({"ID": lease.to_string()}))
            .await
            .is_some()
    }
}

impl Deref for Etcd {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
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
