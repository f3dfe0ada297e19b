//! The contract of stores on etcd.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::Store;
use dlock_conformance::conform;
use dlock_tests::etcd::{Call, Etcd, EtcdProxy, Grpc, builder_at, fresh_namespace};
use dlock_tests::faults::answered;

use crate::backend::{Backend, Plain, keeps_contract_behind_a_network, keeps_contract_over_restarts};
use crate::etcd_support::keys_of_permits;
use crate::scenes::Forces;

pub(super) struct Namespace {
    server: Arc<Etcd>,
    name: String,
}

impl Namespace {
    pub(super) async fn keys(&self, letter: char) -> usize {
        keys_of_permits(&self.server, &self.name, letter).await
    }
}

impl Backend for Namespace {
    type Server = Etcd;
    type Wire = Grpc;
    const TICK: Duration = Duration::from_secs(1);

    async fn on(server: Arc<Etcd>) -> Namespace {
        Namespace {
            server,
            name: fresh_namespace(),
        }
    }

    fn server(&self) -> &Arc<Etcd> {
        &self.server
    }

    async fn store(&self, proxy: Option<&EtcdProxy>, timeout: Duration) -> Arc<dyn Store> {
        let addr = proxy.map_or(self.server.addr(), |proxy| proxy.addr());
        let store = answered(|| builder_at(addr, &self.name).timeout(timeout).connect()).await;
        Arc::new(store.expect("the server is there"))
    }

    async fn forget(&self, _own: bool) -> bool {
        self.server.delete(&self.name).await;
        true
    }

    fn acquires(call: &Call) -> bool {
        call.is("Txn") && call.has("held ")
    }
}

impl Forces for Namespace {
    fn forces(call: &Call) -> bool {
        call.is("DeleteRange")
    }
}

async fn plain() -> Plain<Namespace> {
    Plain(Namespace::on(Etcd::shared().await).await)
}

conform!(plain);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contract_is_kept_behind_a_network_that_fails() {
    keeps_contract_behind_a_network::<Namespace>(Etcd::shared().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contract_is_kept_by_a_server_that_stops_and_starts_again() {
    keeps_contract_over_restarts::<Namespace>(Etcd::start().await).await;
}
