//! One store, several processes' worth of clients: what the suites that run on every backend are given.

use std::time::Duration;

use dlock::backend::memory::MemoryBackend;
use dlock::{LockClient, LockClientBuilder};

use crate::faults::PATIENCE;
use crate::{Flavor, Server, eventually};

/// A store that locks can be on.
#[derive(Debug)]
pub enum Store {
    /// In this process.
    Memory(MemoryBackend),
    /// On a real server of the flavour that `DLOCK_TEST_SERVER` names.
    Server(Box<Server>),
}

impl Store {
    /// A store in memory.
    pub fn memory() -> Store {
        Store::Memory(MemoryBackend::new())
    }

    /// A server of its own.
    pub async fn server() -> Store {
        Store::Server(Box::new(Server::start(Flavor::from_env()).await))
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
        let builder = match self {
            Store::Memory(backend) => LockClient::builder().backend(backend.clone()),
            // A machine that stands still for a while is no trouble that these tests are about.
            Store::Server(server) => LockClient::builder()
                .url(server.url())
                .timeout(PATIENCE)
                .retry_for(PATIENCE),
        };
        options(builder).build().await.expect("the store is there")
    }

    /// The server.
    ///
    /// # Panics
    /// On memory.
    pub fn as_server(&self) -> &Server {
        match self {
            Store::Server(server) => server,
            Store::Memory(_) => panic!("this test is for servers"),
        }
    }

    /// Loses all data and tells nobody.
    pub async fn flush(&self) {
        match self {
            Store::Memory(backend) => backend.clear(),
            Store::Server(server) => server.flush().await,
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
            Store::Memory(backend) => {
                assert!(backend.is_empty(), "a lock is left in memory");
                assert_eq!(backend.watched(), 0, "a watch is left in memory");
                assert_eq!(backend.queued(), 0, "a place in a queue is left in memory");
            }
            Store::Server(server) => {
                eventually(
                    "no key but the fence and no subscription is left on the server",
                    || async { server.pubsub_channels().await.is_empty() && only_traces(server).await },
                )
                .await;
            }
        }
    }
}

/// Whether there is nothing but what may stay: the fence, the counters of fenced locks, and what ends by itself of steps on counters.
async fn only_traces(server: &Server) -> bool {
    for key in server.keys().await {
        let stays = key == "dlock:fence" || key.starts_with("redisson_lock_token:");
        let ends = is_of_a_step(&key) && server.ttl(&key).await.is_some();
        if !stays && !ends {
            return false;
        }
    }
    true
}

/// Whether a key remembers that a step was carried out: `{name}:dlock:uuid:number`.
pub fn is_of_a_step(key: &str) -> bool {
    let id = key.rsplit_once(":dlock:").map(|(_, id)| id);
    id.and_then(|id| id.split_once(':'))
        .is_some_and(|(uuid, number)| uuid.len() == 36 && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Long enough for a waiter to have come as far as it gets.
pub async fn settle() {
    tokio::time::sleep(Duration::from_millis(60)).await;
}

/// Makes each test twice: on memory and on a server.
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
    };
}
