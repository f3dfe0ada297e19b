//! The contract of stores (crate `dlock-conformance`) on PostgreSQL: as it is, behind a network with faults, and on a server
//! that is stopped and started again.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::Notifications;
use dlock::store::Store;
use dlock_conformance::{Fixture, Report, Verdict, conform, run_only};
use dlock_postgres::PostgresLocks;
use dlock_tests::faults::{PATIENCE, answered};
use dlock_tests::postgres::{PgProxy, Pooler, Postgres, connect, fresh_table};
use dlock_tests::{Clock, Direction, Swallow};
use futures_util::future::join_all;
use tokio_postgres::{Config, NoTls};

/// A store as another process has it.
async fn connected(config: Config, table: &str, timeout: Duration) -> Arc<dyn Store> {
    let builder = || {
        PostgresLocks::builder(config.clone(), NoTls)
            .table(table)
            .timeout(timeout)
    };
    let store = answered(|| builder().connect())
        .await
        .expect("the server is there");
    Arc::new(store)
}

async fn made(server: &Postgres) -> String {
    let table = fresh_table();
    let builder = PostgresLocks::builder(server.config(), NoTls)
        .table(&table)
        .timeout(PATIENCE);
    let store = builder.connect().await.expect("the server is there");
    store.create_table().await.expect("the table can be made");
    table
}

async fn forgotten(server: &Postgres, table: &str) -> bool {
    let sql = format!("TRUNCATE \"{table}\", \"{table}_readers\"; UPDATE \"{table}_floor\" SET fence = 0");
    server.client().await.batch_execute(&sql).await.is_ok()
}

/// A store without faults but that it can lose its data.
struct Plain {
    server: Arc<Postgres>,
    table: String,
}

impl Fixture for Plain {
    async fn store(&self) -> Arc<dyn Store> {
        connected(self.server.config(), &self.table, PATIENCE).await
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    async fn forget(&self) -> bool {
        forgotten(&self.server, &self.table).await
    }
}

async fn plain() -> Plain {
    let server = Postgres::shared().await;
    let table = made(&server).await;
    Plain { server, table }
}

conform!(plain);

/// A server behind a network that fails, and perhaps a process that does.
struct Faulty {
    server: Arc<Postgres>,
    proxy: PgProxy,
    table: String,
    own: bool,
}

impl Faulty {
    async fn new(server: Arc<Postgres>, own: bool) -> Faulty {
        Faulty {
            table: made(&server).await,
            proxy: PgProxy::start(server.addr()),
            server,
            own,
        }
    }
}

impl Fixture for Faulty {
    async fn store(&self) -> Arc<dyn Store> {
        let config = self.server.config_at(self.proxy.addr());
        connected(config, &self.table, Duration::from_secs(2)).await
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
            .swallow(1, Swallow::Cut, |request| request.runs("-- Acquires locks"));
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
    keeps(Faulty::new(Postgres::shared().await, false).await, &checks).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contract_is_kept_by_a_server_that_stops_and_starts_again() {
    let checks = [
        "tokens::tokens_grow_over_restart",
        "client::holder_learns_of_lost_data",
        "faults::frozen_store_fails_in_bounded_time",
        "faults::restarted_store_serves_again",
    ];
    keeps(
        Faulty::new(Arc::new(Postgres::start().await), true).await,
        &checks,
    )
    .await;
}

/// A store behind PgBouncer.
struct Pooled {
    server: Arc<Postgres>,
    pooler: Pooler,
    table: String,
}

impl Fixture for Pooled {
    async fn store(&self) -> Arc<dyn Store> {
        connected(self.server.config_at(self.pooler.addr()), &self.table, PATIENCE).await
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }
}

async fn pooled(mode: &str) -> Pooled {
    let server = Arc::new(Postgres::start().await);
    Pooled {
        table: made(&server).await,
        pooler: Pooler::start(&server, mode).await,
        server,
    }
}

/// There is no session to prepare, to listen or to change a setting in, and that is seen by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contract_is_kept_behind_a_transaction_pooler() {
    let fixture = pooled("transaction").await;
    let store = fixture.store().await;
    assert_eq!(store.capabilities().notifications, Notifications::None);
    let report = run_only(fixture, |name| !name.starts_with("names::")).await;
    assert!(report.is_kept(), "{report}");
    let kept = report
        .checks
        .iter()
        .filter(|check| check.verdict == Verdict::Kept);
    assert!(kept.count() > 30, "{report}");
}

/// A store that does not see it changes settings of connections that others have next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_pooler_is_seen_while_others_use_it() {
    let fixture = pooled("transaction").await;
    let stores = join_all((0..24).map(|_| fixture.store())).await;
    for store in stores {
        assert_eq!(store.capabilities().notifications, Notifications::None);
    }
    let config = fixture.server.config_at(fixture.pooler.addr());
    for client in join_all((0..24).map(|_| connect(&config))).await {
        let set = "SELECT current_setting('statement_timeout')";
        let rows = client.unwrap().query_typed(set, &[]).await.unwrap();
        assert_eq!(rows[0].get::<_, &str>(0), "0");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contract_is_kept_behind_a_session_pooler() {
    let fixture = pooled("session").await;
    let store = fixture.store().await;
    assert_eq!(store.capabilities().notifications, Notifications::Lossy);
    drop(store);
    let report = run_only(fixture, |name| {
        name.starts_with("notifications::") || name.starts_with("order::")
    })
    .await;
    assert!(report.is_kept(), "{report}");
}

/// A server whose clock is an hour ahead, and can be set back.
struct Stepped {
    server: Postgres,
    clock: Clock,
    table: String,
}

const HOUR: Duration = Duration::from_secs(3600);

impl Fixture for Stepped {
    async fn store(&self) -> Arc<dyn Store> {
        connected(self.server.config(), &self.table, Duration::from_secs(20)).await
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
    let server = Postgres::start_by(Some(&clock)).await;
    let table = made(&server).await;
    let fixture = Stepped { server, clock, table };
    let report = run_only(fixture, |name| {
        name == "faults::tokens_grow_though_clock_goes_back"
    })
    .await;
    assert!(
        report.checks.iter().all(|check| check.verdict == Verdict::Kept),
        "{report}"
    );
    assert_eq!(report.checks.len(), 1);
}
