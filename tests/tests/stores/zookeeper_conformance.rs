//! The contract of stores on ZooKeeper.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::Store;
use dlock_conformance::conform;
use dlock_tests::faults::answered;
use dlock_tests::zookeeper::{ZkProxy, ZkRequest, ZkWire, Zookeeper};
use dlock_zookeeper::ZookeeperLocks;

use crate::backend::{Backend, Plain, keeps_contract_behind_a_network, keeps_contract_over_restarts};

pub(super) struct Root {
    server: Arc<Zookeeper>,
    name: String,
}

impl Backend for Root {
    type Server = Zookeeper;
    type Wire = ZkWire;

    async fn on(server: Arc<Zookeeper>) -> Root {
        Root {
            server,
            name: format!("/locks-{:016x}", fastrand::u64(..)),
        }
    }

    fn server(&self) -> &Arc<Zookeeper> {
        &self.server
    }

    async fn store(&self, proxy: Option<&ZkProxy>, timeout: Duration) -> Arc<dyn Store> {
        let addr = proxy.map_or(self.server.addr(), |proxy| proxy.addr()).to_string();
        let builder = || ZookeeperLocks::builder(&addr).root(&self.name).timeout(timeout);
        let store = answered(|| builder().connect()).await;
        Arc::new(store.expect("the server is there"))
    }

    async fn forget(&self, own: bool) -> bool {
        if own {
            self.server.lose();
            self.server.restart().await;
        }
        own
    }

    fn acquires(request: &ZkRequest) -> bool {
        request.creates()
    }
}

async fn plain() -> Plain<Root> {
    Plain(Root::on(Zookeeper::shared().await).await)
}

conform!(plain);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contract_is_kept_behind_a_network_that_fails() {
    keeps_contract_behind_a_network::<Root>(Zookeeper::shared().await).await;
}

/// The servers' sessions last as long as a restart takes, and longer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contract_is_kept_by_a_server_that_stops_and_starts_again() {
    keeps_contract_over_restarts::<Root>(Zookeeper::start().await).await;
}
