//! Independent servers, for clients that ask a majority of them.

use std::fmt;

use dlock::LockGuard;
use futures_util::future::join_all;

use super::login;
use crate::faults::is_confirmed;
use crate::{Flavor, Server, ServerBuilder, child, eventually};

/// Some independent servers on 127.0.0.1. They are killed when this is dropped.
pub struct Independent {
    servers: Vec<Server>,
    password: Option<String>,
}

impl fmt::Debug for Independent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.servers).finish()
    }
}

impl Independent {
    /// So many of them.
    ///
    /// # Panics
    /// When they cannot be started.
    pub async fn start(flavor: Flavor, count: usize) -> Independent {
        Independent::start_as(Server::builder(flavor), count).await
    }

    /// So many that are all like this.
    ///
    /// # Panics
    /// When they cannot be started.
    pub async fn start_as(builder: ServerBuilder, count: usize) -> Independent {
        let password = builder.password_of_default().map(str::to_owned);
        let servers = join_all((0..count).map(|_| builder.clone().start())).await;
        Independent { servers, password }
    }

    /// The servers.
    pub fn servers(&self) -> &[Server] {
        &self.servers
    }

    /// Waits until each of them has what is held. One that was too late for the acquire is asked again at a renewal,
    /// and until then the lock is lost with one of the others.
    pub async fn all_have(&self, key: &str, guard: &LockGuard) {
        eventually("all members have it", || async {
            is_confirmed(guard).await;
            let all = join_all(self.servers.iter().map(Server::keys)).await;
            all.iter().all(|keys| keys.iter().any(|have| have == key))
        })
        .await;
    }

    /// The URL of their quorum. They vote from the beginning, and leases may be long.
    pub fn url(&self) -> String {
        let addresses: Vec<_> = self
            .servers
            .iter()
            .map(|server| server.announced().to_string())
            .collect();
        let options = "trust_fresh_servers=true&max_lease=1h";
        let (scheme, login) = (self.servers[0].scheme(), login(self.password.as_deref()));
        format!("quorum+{scheme}://{login}{}?{options}", addresses.join(","))
    }

    /// Leaves its files to be removed when the process ends, for one that is never dropped.
    pub(crate) fn stays(&self) {
        let dirs = self.servers.iter().map(|server| server.dir().to_owned());
        child::remove_at_the_end(dirs).expect("a shell can be started");
    }

    /// All keys with `part` in their names on whichever server, sorted.
    pub async fn keys(&self, part: &str) -> Vec<String> {
        let all = join_all(self.servers.iter().map(Server::keys)).await;
        let mut keys: Vec<_> = all
            .into_iter()
            .flatten()
            .filter(|key| key.contains(part))
            .collect();
        keys.sort();
        keys
    }

    /// The channels with `part` in their names that have subscribers, on any server.
    pub async fn pubsub_channels(&self, part: &str) -> Vec<String> {
        let all = join_all(self.servers.iter().map(Server::pubsub_channels)).await;
        all.into_iter()
            .flatten()
            .filter(|channel| channel.contains(part))
            .collect()
    }
}
