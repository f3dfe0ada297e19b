//! One store, several processes' worth of clients: what the suites that run on every store are given.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dlock::stores::memory::MemoryStore;
use dlock::stores::quorum::Quorum;
use dlock::{LockClient, LockClientBuilder};
use tokio::sync::OnceCell;

use crate::faults::PATIENCE;
use crate::{Cluster, Flavor, Independent, Replicas, Server, eventually};

/// A store that locks can be on.
#[derive(Debug)]
pub enum Store {
    /// In this process.
    Memory(MemoryStore),
    /// A majority of several such.
    Quorum(Vec<MemoryStore>),
    /// On a real server of the flavour that `DLOCK_TEST_SERVER` names.
    Server(Box<Server>),
    /// On several of them, which all tests of the process share.
    Shared(Shared),
}

/// A part of a store that is for one test, by a prefix of its own.
#[derive(Debug)]
pub struct Shared {
    servers: Several,
    prefix: String,
}

#[derive(Debug, Clone, Copy)]
enum Several {
    Cluster(&'static Cluster),
    Replicas(&'static Replicas),
    Quorum(&'static Independent),
}

impl Shared {
    fn of(servers: Several) -> Store {
        static TESTS: AtomicUsize = AtomicUsize::new(0);
        let number = TESTS.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("test-{number}:");
        Store::Shared(Shared { servers, prefix })
    }

    fn url(&self) -> String {
        match self.servers {
            Several::Cluster(cluster) => cluster.url(),
            Several::Replicas(replicas) => replicas.url(),
            Several::Quorum(quorum) => quorum.url(),
        }
    }

    async fn keys(&self) -> Vec<String> {
        match self.servers {
            Several::Cluster(cluster) => cluster.keys(&self.prefix).await,
            Several::Quorum(quorum) => quorum.keys(&self.prefix).await,
            Several::Replicas(replicas) => {
                let mut keys = replicas.master().await.keys().await;
                keys.retain(|key| key.contains(&self.prefix));
                keys
            }
        }
    }

    async fn pubsub_channels(&self) -> Vec<String> {
        match self.servers {
            Several::Cluster(cluster) => cluster.pubsub_channels(&self.prefix).await,
            Several::Quorum(quorum) => quorum.pubsub_channels(&self.prefix).await,
            Several::Replicas(replicas) => {
                let mut channels = replicas.master().await.pubsub_channels().await;
                channels.retain(|channel| channel.contains(&self.prefix));
                channels
            }
        }
    }

    /// Whether there is nothing but what may stay.
    async fn only_traces(&self) -> bool {
        for key in self.keys().await.iter().filter(|key| !is_fence(key)) {
            let server = match self.servers {
                Several::Cluster(cluster) => cluster.owner_of(key).await,
                Several::Replicas(replicas) => replicas.master().await,
                // It has no kind of which anything stays.
                Several::Quorum(_) => return false,
            };
            if !may_stay(server, key).await {
                return false;
            }
        }
        true
    }

    /// Removes the keys of this test, its fences among them.
    async fn flush(&self) {
        match self.servers {
            Several::Cluster(cluster) => {
                for key in cluster.keys(&self.prefix).await {
                    cluster.owner_of(&key).await.command(&["DEL", &key]).await;
                }
            }
            Several::Quorum(quorum) => {
                for server in quorum.servers() {
                    for key in server.keys().await {
                        if key.contains(&self.prefix) {
                            server.command(&["DEL", &key]).await;
                        }
                    }
                }
            }
            Several::Replicas(replicas) => {
                let master = replicas.master().await;
                for key in self.keys().await {
                    master.command(&["DEL", &key]).await;
                }
            }
        }
    }
}

impl Store {
    /// A store in memory.
    pub fn memory() -> Store {
        Store::Memory(MemoryStore::new())
    }

    /// A server of its own.
    pub async fn server() -> Store {
        Store::Server(Box::new(Server::start(Flavor::from_env()).await))
    }

    /// A Cluster, the same for all tests of a process: it takes seconds to start.
    pub async fn cluster() -> Store {
        static CLUSTER: OnceCell<Cluster> = OnceCell::const_new();
        let started = async {
            let cluster = Cluster::start(Flavor::from_env()).await;
            cluster.stays();
            cluster
        };
        Shared::of(Several::Cluster(CLUSTER.get_or_init(|| started).await))
    }

    /// A replica set with sentinels, the same for all tests of a process.
    pub async fn sentinel() -> Store {
        static REPLICAS: OnceCell<Replicas> = OnceCell::const_new();
        let started = async {
            let replicas = Replicas::builder(Flavor::from_env()).keeps_its_master();
            let replicas = replicas.start().await;
            replicas.stays();
            replicas
        };
        Shared::of(Several::Replicas(REPLICAS.get_or_init(|| started).await))
    }

    /// A quorum of three servers, the same for all tests of a process.
    pub async fn quorum() -> Store {
        static QUORUM: OnceCell<Independent> = OnceCell::const_new();
        let started = async {
            let quorum = Independent::start(Flavor::from_env(), 3).await;
            quorum.stays();
            quorum
        };
        Shared::of(Several::Quorum(QUORUM.get_or_init(|| started).await))
    }

    /// A quorum of three stores in memory.
    pub fn memory_quorum() -> Store {
        Store::Quorum((0..3).map(|_| MemoryStore::new()).collect())
    }

    /// A client: to the others what another process is.
    pub async fn client(&self) -> LockClient {
        self.client_with(|builder| builder).await
    }

    /// The same with options.
    ///
    /// # Panics
    /// When the client cannot be built.
    pub async fn client_with(
        &self,
        options: impl FnOnce(LockClientBuilder) -> LockClientBuilder,
    ) -> LockClient {
        options(self.builder()).build().await.expect("the store is there")
    }

    /// The store as clients ask it, for steps that none of them takes by itself.
    ///
    /// # Panics
    /// When it is not there.
    pub async fn store(&self) -> Arc<dyn dlock::store::Store> {
        self.builder().build_store().await.expect("the store is there")
    }

    fn builder(&self) -> LockClientBuilder {
        match self {
            Store::Memory(store) => LockClient::builder().store(store.clone()),
            Store::Quorum(members) => {
                let members = members.iter().enumerate();
                let named = members.map(|(at, member)| {
                    let member: Arc<dyn dlock::store::member::QuorumMember> = Arc::new(member.clone());
                    (format!("member {at}"), member)
                });
                let quorum = Quorum::new(named).trust_fresh_servers(true);
                LockClient::builder().store(quorum.max_lease(Duration::from_secs(3600)))
            }
            // A machine that stands still for a while is no trouble that these tests are about.
            Store::Server(server) => LockClient::builder()
                .url(server.url())
                .timeout(PATIENCE)
                .retry_for(PATIENCE),
            Store::Shared(shared) => LockClient::builder()
                .url(shared.url())
                .prefix(&shared.prefix)
                .timeout(PATIENCE)
                .retry_for(PATIENCE),
        }
    }

    /// The server.
    ///
    /// # Panics
    /// On anything but one server.
    pub fn as_server(&self) -> &Server {
        match self {
            Store::Server(server) => server,
            Store::Memory(_) | Store::Quorum(_) | Store::Shared(_) => panic!("this test is for one server"),
        }
    }

    /// The server that has a lock of this name now, and what it is called there.
    ///
    /// # Panics
    /// On memory, and on a quorum, of which each server has it.
    pub async fn place_of(&self, name: &str) -> (&Server, String) {
        match self {
            Store::Memory(_) | Store::Quorum(_) => panic!("this test is for servers"),
            Store::Server(server) => (server, name.to_owned()),
            Store::Shared(Shared { servers, prefix }) => {
                let name = format!("{prefix}{name}");
                let server = match servers {
                    Several::Cluster(cluster) => cluster.owner_of(&name).await,
                    Several::Replicas(replicas) => replicas.master().await,
                    Several::Quorum(_) => panic!("this test is for locks that are on one server"),
                };
                (server, name)
            }
        }
    }

    /// Loses all data without a notification.
    pub async fn flush(&self) {
        match self {
            Store::Memory(store) => store.clear(),
            Store::Quorum(members) => members.iter().for_each(MemoryStore::clear),
            Store::Server(server) => server.flush().await,
            Store::Shared(shared) => shared.flush().await,
        }
    }

    /// Waits until nothing is left of any lock: no hold, no waiter, no subscription, no key but the fence and the
    /// counters of fenced locks. That a step on a counter was carried out is remembered for a while.
    ///
    /// # Panics
    /// When something is left after a good while.
    pub async fn assert_clean(&self, clients: &[&LockClient]) {
        eventually("no hold and no waiter is left in the clients", || async {
            clients
                .iter()
                .all(|client| client.held() == 0 && client.waited_for() == 0)
        })
        .await;
        match self {
            Store::Memory(store) => {
                assert!(store.is_empty(), "a lock is left in memory");
                // A release keeps the subscription of its waiter until it has been answered.
                eventually("no watch is left in memory", || async { store.watched() == 0 }).await;
                assert_eq!(store.queued(), 0, "a place in a queue is left in memory");
            }
            // A majority has answered when a caller goes on, and the others do a moment later.
            Store::Quorum(members) => {
                let is_clean = |store: &MemoryStore| store.is_empty() && store.watched() == 0;
                eventually("no lock and no watch is left in a member", || async {
                    members.iter().all(is_clean)
                })
                .await;
            }
            Store::Server(server) => {
                eventually(
                    "no key but the fence and no subscription is left on the server",
                    || async { server.pubsub_channels().await.is_empty() && only_traces(server).await },
                )
                .await;
            }
            Store::Shared(shared) => {
                eventually(
                    "no key but counters and no subscription is left on the servers",
                    || async { shared.pubsub_channels().await.is_empty() && shared.only_traces().await },
                )
                .await;
            }
        }
    }
}

/// Whether there is nothing but what may stay: the fence, the counters of fenced locks, and what ends by itself of steps on counters.
async fn only_traces(server: &Server) -> bool {
    for key in server.keys().await {
        if !may_stay(server, &key).await {
            return false;
        }
    }
    true
}

async fn may_stay(server: &Server, key: &str) -> bool {
    let stays = is_fence(key) || key.starts_with("redisson_lock_token:");
    // Of a client that was dropped without a shutdown.
    let is_presence = key.contains("dlock:client:") && server.ttl(key).await.is_some();
    stays || is_presence || is_of_a_step(key) && server.ttl(key).await.is_some()
}

/// Whether a key has the last fencing token of a prefix, or of a slot of it.
fn is_fence(key: &str) -> bool {
    key.ends_with("dlock:fence") || key.contains("dlock:fence:{")
}

/// Whether a key remembers that a step was carried out, `{name}:dlock:uuid:number`, or that a semaphore was deleted,
/// `{name}:dlock:deleted`.
pub fn is_of_a_step(key: &str) -> bool {
    let id = key.rsplit_once(":dlock:").map(|(_, id)| id);
    let is_step = id
        .and_then(|id| id.split_once(':'))
        .is_some_and(|(uuid, number)| uuid.len() == 36 && number.bytes().all(|byte| byte.is_ascii_digit()));
    is_step || id == Some("deleted")
}

/// Long enough for a waiter to have come as far as it gets.
pub async fn settle() {
    tokio::time::sleep(Duration::from_millis(60)).await;
}

/// Makes each test four times: on memory, on a server, in a Cluster, and on a master with sentinels.
#[macro_export]
macro_rules! on_every_store {
    ($($(#[$attr:meta])* async fn $name:ident($store:ident: &Store) $body:block)*) => {
        $(async fn $name($store: &$crate::Store) $body)*
        mod memory {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] $(#[$attr])*
            async fn $name() { super::$name(&$crate::Store::memory()).await; })*
        }
        mod server {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] $(#[$attr])*
            async fn $name() { super::$name(&$crate::Store::server().await).await; })*
        }
        mod cluster {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] $(#[$attr])*
            async fn $name() { super::$name(&$crate::Store::cluster().await).await; })*
        }
        mod sentinel {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] $(#[$attr])*
            async fn $name() { super::$name(&$crate::Store::sentinel().await).await; })*
        }
    };
}

/// Makes each of these tests two more: on a quorum of servers, and on one of stores in memory. For those whose kinds of
/// locks a quorum has.
#[macro_export]
macro_rules! on_quorums {
    ($($(#[$attr:meta])* $name:ident),* $(,)?) => {
        mod quorum {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] $(#[$attr])*
            async fn $name() { super::$name(&$crate::Store::quorum().await).await; })*
        }
        mod memory_quorum {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] $(#[$attr])*
            async fn $name() { super::$name(&$crate::Store::memory_quorum()).await; })*
        }
    };
}

/// What a store says that it can do, in words: a check of the contract that needs more is left out without a failure.
pub fn features(store: &dyn dlock::store::Store) -> String {
    let can = store.capabilities();
    let mut words: Vec<String> = can.kinds.iter().map(ToString::to_string).collect();
    for (is_there, word) in [
        (can.token_blocks, "token_blocks"),
        (can.fixed_lease, "fixed_lease"),
        (can.min_hold, "min_hold"),
        (can.prefer_writers, "prefer_writers"),
        (can.restores_positions, "restores_positions"),
        (can.limits, "limits"),
        (can.inspection, "inspection"),
        (can.largest_set > 1, "sets"),
    ] {
        if is_there {
            words.push(word.to_owned());
        }
    }
    words.push(format!("{:?}", can.notifications));
    words.join(" ")
}
