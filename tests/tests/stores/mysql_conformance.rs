//! The contract of stores (crate `dlock-conformance`) on MariaDB: as it is, behind a network with faults, and on a server that
//! is stopped and started again.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::Store;
use dlock_conformance::{Fixture, Report, Verdict, conform, run_only};
use dlock_mysql::{MysqlLocks, OptsBuilder};
use dlock_tests::faults::{PATIENCE, answered};
use dlock_tests::mysql::{Mysql, MysqlProxy};
use dlock_tests::{Clock, Direction, Swallow};
use mysql_async::prelude::Queryable;

/// A store as another process has it.
async fn connected(server: OptsBuilder, table: &str, timeout: Duration) -> Arc<dyn Store> {
    let builder = || MysqlLocks::builder(server.clone()).table(table).timeout(timeout);
    let store = answered(|| builder().connect())
        .await
        .expect("the server is there");
    Arc::new(store)
}

async fn forgotten(server: &Mysql, table: &str) -> bool {
    let sql = format!("TRUNCATE `{table}`; TRUNCATE `{table}_floor`");
    server.client().await.query_drop(sql).await.is_ok()
}

/// A store without faults but that it can lose its data.
struct Plain {
    server: Arc<Mysql>,
    table: String,
}

impl Fixture for Plain {
    async fn store(&self) -> Arc<dyn Store> {
        connected(self.server.opts(), &self.table, PATIENCE).await
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    async fn forget(&self) -> bool {
        forgotten(&self.server, &self.table).await
    }
}

async fn plain() -> Plain {
    let server = Mysql::shared().await;
    let table = server.table().await;
    Plain { server, table }
}

conform!(plain);

/// A server behind a network that fails, and perhaps a process that does.
struct Faulty {
    server: Arc<Mysql>,
    proxy: MysqlProxy,
    table: String,
    own: bool,
}

impl Faulty {
    async fn new(server: Arc<Mysql>, own: bool) -> Faulty {
        Faulty {
            table: server.table().await,
            proxy: MysqlProxy::start(server.addr()),
            server,
            own,
        }
    }
}

impl Fixture for Faulty {
    async fn store(&self) -> Arc<dyn Store> {
        let server = self.server.opts_at(self.proxy.addr());
        connected(server, &self.table, Duration::from_secs(2)).await
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    async fn forget(&self) -> bool {
        forgotten(&self.server, &self.table).await
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
        self.proxy
            .swallow(1, Swallow::Cut, |request| request.runs("LAST_INSERT_ID"));
        true
    }
}

/// Runs these checks, of which none may be left out.
async fn keeps(fixture: impl Fixture, checks: &[&str]) {
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
    keeps(Faulty::new(Mysql::shared().await, false).await, &checks).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contract_is_kept_by_a_server_that_stops_and_starts_again() {
    let checks = [
        "tokens::tokens_grow_over_restart",
        "client::holder_learns_of_lost_data",
        "faults::frozen_store_fails_in_bounded_time",
        "faults::restarted_store_serves_again",
    ];
    keeps(Faulty::new(Arc::new(Mysql::start().await), true).await, &checks).await;
}

/// A server whose clock is an hour ahead, and can be set back.
struct Stepped {
    server: Mysql,
    clock: Clock,
    table: String,
}

const HOUR: Duration = Duration::from_secs(3600);

impl Fixture for Stepped {
    async fn store(&self) -> Arc<dyn Store> {
        connected(self.server.opts(), &self.table, Duration::from_secs(20)).await
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    async fn set_clock_back(&self, by: Duration) -> bool {
        self.clock.set(HOUR.saturating_sub(by)).is_ok()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_grow_though_the_clock_of_the_server_goes_back() {
    let clock = Clock::new().expect("libfaketime");
    clock.set(HOUR).expect("its file can be written");
    let server = Mysql::start_with(&[], Some(&clock)).await;
    let table = server.table().await;
    let fixture = Stepped { server, clock, table };
    keeps(fixture, &["faults::tokens_grow_though_clock_goes_back"]).await;
}
