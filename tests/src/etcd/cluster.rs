//! Three members that elect their leader.

use std::time::{Duration, Instant};

use dlock_etcd::{EtcdLocks, EtcdLocksBuilder};
use futures_util::future::join_all;
use serde_json::json;

use super::{Etcd, PATIENCE};

/// A cluster of three servers.
#[derive(Debug)]
pub struct EtcdCluster {
    /// Its members.
    pub members: Vec<Etcd>,
}

impl EtcdCluster {
    /// Starts it and waits until all members serve.
    ///
    /// # Panics
    /// When they do not.
    pub async fn start() -> EtcdCluster {
        // An election is soon over, and a machine that stands still for a moment causes none.
        let options = ["--heartbeat-interval", "100", "--election-timeout", "1000"];
        let members: Vec<Etcd> = ["a", "b", "c"].map(|name| Etcd::new(name, &options)).into();
        let all: Vec<String> = members.iter().map(Etcd::member).collect();
        for member in &members {
            *member.members.lock() = all.join(",");
            member.begin();
        }
        join_all(members.iter().map(Etcd::serves)).await;
        EtcdCluster { members }
    }

    /// Options of a store on all of them.
    pub fn builder(&self, namespace: &str) -> EtcdLocksBuilder {
        EtcdLocks::builder(self.members.iter().map(|member| member.addr().to_string()))
            .namespace(namespace)
            .allow_old_server(true)
    }

    /// The number of the leader among the members that answer.
    ///
    /// # Panics
    /// When there is none for a long time.
    pub async fn leader(&self) -> usize {
        let deadline = Instant::now() + PATIENCE;
        loop {
            for (at, member) in self.members.iter().enumerate() {
                let status = member.ask("maintenance/status", &json!({})).await;
                if status.is_some_and(|status| status["leader"] == status["header"]["member_id"]) {
                    return at;
                }
            }
            assert!(Instant::now() < deadline, "the cluster has no leader");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}
