//! Three members that elect their leader.

use std::time::{Duration, Instant};

use dlock_etcd::{EtcdLocks, EtcdLocksBuilder};
use futures_util::future::join_all;
use serde_json::json;

use super::peers::Peers;
use super::{Etcd, PATIENCE};

/// A cluster of three servers.
#[derive(Debug)]
pub struct EtcdCluster {
    /// Its members.
    pub members: Vec<Etcd>,
    /// The network between them, if they have one of their own.
    peers: Option<Peers>,
}

impl EtcdCluster {
    /// Starts it and waits until all members serve.
    ///
    /// # Panics
    /// When they do not.
    pub async fn start() -> EtcdCluster {
        EtcdCluster::start_in(None, EtcdCluster::members()).await
    }

    /// The same with a network between them from which a member can be [cut off](Self::cut_off).
    ///
    /// # Panics
    /// When they do not serve.
    pub async fn start_in_a_network() -> EtcdCluster {
        let mut members = EtcdCluster::members();
        let listen: Vec<_> = members.iter().map(Etcd::peer_addr).collect();
        let peers = Peers::start(&listen);
        for (at, member) in members.iter_mut().enumerate() {
            member.way = Some([Peers::url(at), peers.proxy(at)]);
        }
        EtcdCluster::start_in(Some(peers), members).await
    }

    fn members() -> Vec<Etcd> {
        // An election is soon over, and a machine that stands still for a moment causes none.
        let options = ["--heartbeat-interval", "100", "--election-timeout", "1000"];
        ["a", "b", "c"].map(|name| Etcd::new(name, &options)).into()
    }

    async fn start_in(peers: Option<Peers>, members: Vec<Etcd>) -> EtcdCluster {
        let all: Vec<String> = members.iter().map(Etcd::member).collect();
        for member in &members {
            *member.members.lock() = all.join(",");
            member.begin();
        }
        join_all(members.iter().map(Etcd::serves)).await;
        EtcdCluster { members, peers }
    }

    /// Cuts a member off from the other members, but not from its clients. With `None`, reconnects all members.
    ///
    /// # Panics
    /// Without a network between them.
    pub fn cut_off(&self, member: Option<usize>) {
        let peers = self.peers.as_ref().expect("it was started in a network");
        peers.cut_off(member);
    }

    /// Options of a store on all but one of them.
    pub fn builder_without(&self, member: usize, namespace: &str) -> EtcdLocksBuilder {
        let others = (0..self.members.len()).filter(|at| *at != member);
        EtcdLocks::builder(others.map(|at| self.members[at].addr().to_string()))
            .namespace(namespace)
            .allow_old_server(true)
    }

    /// Whether a member knows of a leader.
    pub async fn has_leader(&self, member: usize) -> bool {
        let status = self.members[member].ask("maintenance/status", &json!({})).await;
        // It leaves numbers out that are zero.
        status.is_some_and(|status| status["leader"].as_str().is_some_and(|leader| leader != "0"))
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
