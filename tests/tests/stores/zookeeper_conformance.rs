//! The contract of stores (crate `dlock-conformance`) on ZooKeeper: as it is, behind a network with faults, and on a server
//! that is stopped and started again.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::Store;
use dlock_conformance::{Fixture, Report, Verdict, conform, run_only};
use dlock_tests::faults::{PATIENCE, answered};
use dlock_tests::zookeeper::{ZkProxy, Zookeeper};
use dlock_tests::{Direction, Swallow};
use dlock_zookeeper::ZookeeperLocks;

/// A root that is unused.
fn fresh_root() -> String {
    format!("/locks-{:016x}", fastrand::u64(..))
}

/// A store as another process has it.
async fn connected(servers: &str, root: &str, timeout: Duration) -> Arc<dyn Store> {
    let builder = || ZookeeperLocks::builder(servers).root(root).timeout(timeout);
    let store = answered(|| builder().connect())
        .await
        .expect("the server is there");
    Arc::new(store)
}

/// A store without faults.
struct Plain {
    server: Arc<Zookeeper>,
    root: String,
}

impl Fixture for Plain {
    async fn store(&self) -> Arc<dyn Store> {
        connected(&self.server.addr().to_string(), &self.root, PATIENCE).await
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }
}

async fn plain() -> Plain {
    let server = Zookeeper::shared().await;
    let root = fresh_root();
    Plain { server, root }
}

conform!(plain);

/// A server behind a network that fails, and perhaps a process that does.
struct Faulty {
    server: Arc<Zookeeper>,
    proxy: ZkProxy,
    root: String,
    own: bool,
}

impl Faulty {
    fn new(server: Arc<Zookeeper>, own: bool) -> Faulty {
        Faulty {
            root: fresh_root(),
            proxy: ZkProxy::start(server.addr()),
            server,
            own,
        }
    }
}

impl Fixture for Faulty {
    async fn store(&self) -> Arc<dyn Store> {
        let servers = self.proxy.addr().to_string();
        connected(&servers, &self.root, Duration::from_secs(2)).await
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    async fn forget(&self) -> bool {
        if self.own {
            self.server.lose();
            self.server.restart().await;
        }
        self.own
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
        self.proxy.swallow(1, Swallow::Cut, |request| request.creates());
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
        "order::steps_take_effect_in_the_order_of_calls",
        "release::release_undoes_acquire_dropped_at_any_poll",
        "faults::acquire_with_lost_reply_is_undone_by_release",
        "faults::unreachable_store_fails_in_bounded_time",
        "faults::frozen_store_fails_in_bounded_time",
    ];
    keeps(Faulty::new(Zookeeper::shared().await, false), &checks).await;
}

/// The servers' sessions last as long as a restart takes, and longer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contract_is_kept_by_a_server_that_stops_and_starts_again() {
    let checks = [
        "tokens::tokens_grow_over_restart",
        "client::holder_learns_of_lost_data",
        "faults::frozen_store_fails_in_bounded_time",
        "faults::restarted_store_serves_again",
    ];
    keeps(Faulty::new(Arc::new(Zookeeper::start().await), true), &checks).await;
}
