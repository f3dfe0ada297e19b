//! The contract of stores (crate `dlock-conformance`) on etcd: as it is, behind a network with faults, and on a server that is
//! stopped and started again.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::Store;
use dlock_conformance::{Fixture, Report, Verdict, conform, run_only};
use dlock_etcd::EtcdLocksBuilder;
use dlock_tests::etcd::{Etcd, EtcdProxy, builder_at, fresh_namespace};
use dlock_tests::faults::{PATIENCE, answered};
use dlock_tests::{Direction, Swallow};

/// The unit of leases.
const TICK: Duration = Duration::from_secs(1);

/// A store as another process has it.
async fn connected(builder: impl Fn() -> EtcdLocksBuilder) -> Arc<dyn Store> {
    let store = answered(|| builder().connect())
        .await
        .expect("the server is there");
    Arc::new(store)
}

/// A store without faults but that it can lose its data.
struct Plain {
    server: Arc<Etcd>,
    namespace: String,
}

impl Fixture for Plain {
    async fn store(&self) -> Arc<dyn Store> {
        connected(|| self.server.builder(&self.namespace).timeout(PATIENCE)).await
    }

    fn tick(&self) -> Duration {
        TICK
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    async fn forget(&self) -> bool {
        self.server.delete(&self.namespace).await;
        true
    }
}

async fn plain() -> Plain {
    Plain {
        server: Etcd::shared().await,
        namespace: fresh_namespace(),
    }
}

conform!(plain);

/// A server behind a network that fails, and perhaps a process that does.
struct Faulty {
    server: Arc<Etcd>,
    proxy: EtcdProxy,
    namespace: String,
    own: bool,
}

impl Faulty {
    fn new(server: Arc<Etcd>, own: bool) -> Faulty {
        Faulty {
            proxy: EtcdProxy::start(server.addr()),
            server,
            namespace: fresh_namespace(),
            own,
        }
    }
}

impl Fixture for Faulty {
    async fn store(&self) -> Arc<dyn Store> {
        let addr = self.proxy.addr();
        connected(|| builder_at(addr, &self.namespace).timeout(Duration::from_secs(2))).await
    }

    fn tick(&self) -> Duration {
        TICK
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    async fn forget(&self) -> bool {
        self.server.delete(&self.namespace).await;
        true
    }

    async fn restart(&self) -> bool {
        if self.own {
            self.server.restart().await;
        }
        self.own
    }

    async fn cut(&self) -> bool {
        self.proxy.refuse();
        self.proxy.cut();
        true
    }

    async fn freeze(&self) -> bool {
        match self.own {
            true => self.server.stop(),
            false => self.proxy.block(Direction::Both),
        }
        true
    }

    async fn heal(&self) {
        if self.own {
            self.server.cont();
        }
        self.proxy.unblock(Direction::Both);
        self.proxy.accept();
    }

    async fn lose_next_reply(&self) -> bool {
        (self.proxy).swallow(1, Swallow::Cut, |call| call.is("Txn") && call.has("held "));
        true
    }
}

/// Runs these checks, of which none may be left out.
async fn keeps(fixture: Faulty, checks: &[&str]) {
    let report: Report = run_only(fixture, |name| checks.contains(&name)).await;
    assert_eq!(report.checks.len(), checks.len(), "{report}");
    let kept = report.checks.iter().all(|check| check.verdict == Verdict::Kept);
    assert!(kept, "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contract_is_kept_behind_a_network_that_fails() {
    let checks = [
        "exclusion::storm_of_clients_never_shares_a_lock",
        "tokens::tokens_grow_after_data_loss",
        "order::steps_take_effect_in_the_order_of_calls",
        "release::release_undoes_acquire_dropped_at_any_poll",
        "faults::acquire_with_lost_reply_is_undone_by_release",
        "faults::unreachable_store_fails_in_bounded_time",
        "faults::frozen_store_fails_in_bounded_time",
    ];
    keeps(Faulty::new(Etcd::shared().await, false), &checks).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contract_is_kept_by_a_server_that_stops_and_starts_again() {
    let checks = [
        "tokens::tokens_grow_over_restart",
        "client::holder_learns_of_lost_data",
        "faults::frozen_store_fails_in_bounded_time",
        "faults::restarted_store_serves_again",
    ];
    keeps(Faulty::new(Arc::new(Etcd::start().await), true), &checks).await;
}
