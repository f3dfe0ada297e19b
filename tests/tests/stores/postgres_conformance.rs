//! The contract of stores on PostgreSQL, and behind poolers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use dlock::store::{Notifications, Store};
use dlock_conformance::{Fixture, Verdict, conform, run_only};
use dlock_postgres::{PostgresLocks, PostgresRecords};
use dlock_tests::Request;
use dlock_tests::faults::{PATIENCE, answered};
use dlock_tests::postgres::{PgProxy, PgWire, Pooler, Postgres, connect, fresh_table};
use futures_util::future::join_all;
use tokio_postgres::NoTls;

use crate::backend::{
    Backend, Plain, keeps_contract_behind_a_network, keeps_contract_over_restarts,
    keeps_tokens_though_the_clock_goes_back,
};
use crate::scenes::{Forces, Rows};

pub(super) struct Table {
    server: Arc<Postgres>,
    name: String,
}

impl Table {
    async fn at(&self, addr: SocketAddr, timeout: Duration) -> Arc<dyn Store> {
        let builder = || PostgresLocks::builder(self.server.config_at(addr), NoTls).table(&self.name);
        let store = answered(|| builder().timeout(timeout).connect()).await;
        Arc::new(store.expect("the server is there"))
    }

    /// What the statement counts, with `{t}` for the table.
    pub(super) async fn number(&self, sql: &str) -> usize {
        let sql = sql.replace("{t}", &self.name);
        let row = self.server.client().await.query_one(&sql, &[]).await;
        usize::try_from(row.expect("a row").get::<_, i64>(0)).expect("a count")
    }
}

impl Backend for Table {
    type Server = Postgres;
    type Wire = PgWire;

    async fn on(server: Arc<Postgres>) -> Table {
        let name = fresh_table();
        let builder = PostgresLocks::builder(server.config(), NoTls).table(&name);
        let store = builder.timeout(PATIENCE).connect().await;
        let made = store.expect("the server is there").create_table().await;
        made.expect("the table can be made");
        Table { server, name }
    }

    fn server(&self) -> &Arc<Postgres> {
        &self.server
    }

    async fn store(&self, proxy: Option<&PgProxy>, timeout: Duration) -> Arc<dyn Store> {
        let addr = proxy.map_or(self.server.addr(), |proxy| proxy.addr());
        self.at(addr, timeout).await
    }

    async fn forget(&self, _own: bool) -> bool {
        let sql = format!(
            "TRUNCATE \"{0}\", \"{0}_readers\", \"{0}_waiters\", \"{0}_permits\", \"{0}_replies\"; \
             UPDATE \"{0}_floor\" SET fence = 0",
            self.name
        );
        self.server.client().await.batch_execute(&sql).await.is_ok()
    }

    fn acquires(request: &Request) -> bool {
        request.runs("-- Acquires locks")
    }
}

impl Forces for Table {
    fn forces(request: &Request) -> bool {
        request.runs("-- Ends all grants")
    }
}

impl Rows for Table {
    fn releases(request: &Request) -> bool {
        request.runs("-- Ends grants")
    }

    fn renewals(request: &Request) -> usize {
        usize::from(request.runs("-- Lets grants last"))
    }

    async fn connections(&self) -> i64 {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
        self.server
            .client()
            .await
            .query_one(sql, &[])
            .await
            .unwrap()
            .get(0)
    }

    async fn count(&self, condition: &str) -> i64 {
        let sql = format!("SELECT count(*) FROM \"{}\" WHERE {condition}", self.name);
        let row = self.server.client().await.query_one(&sql, &[]).await;
        row.unwrap().get(0)
    }

    async fn conflicts(&self) {
        let sql = format!(
            "CREATE FUNCTION {t}_fails() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             IF random() < 0.33 THEN \
             RAISE EXCEPTION 'for a test' USING ERRCODE = (ARRAY['40001', '40P01', '55P03'])[1 + floor(random() * 3)]; \
             END IF; RETURN NEW; END $$; \
             CREATE TRIGGER fails BEFORE INSERT OR UPDATE ON {t} FOR EACH ROW EXECUTE FUNCTION {t}_fails()",
            t = self.name
        );
        self.server.client().await.batch_execute(&sql).await.unwrap();
    }

    async fn refuses(&self, key: Option<&str>) {
        let drop = format!("DROP TRIGGER IF EXISTS refuses ON {}", self.name);
        let db = self.server.client().await;
        db.batch_execute(&drop).await.unwrap();
        let Some(key) = key else { return };
        // As a trigger of MySQL does; and as row-level security does.
        let code = ["45000", "42501"][fastrand::usize(..2)];
        let sql = format!(
            "CREATE OR REPLACE FUNCTION {t}_refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             IF NEW.key = '{key}' THEN RAISE EXCEPTION 'for a test' USING ERRCODE = '{code}'; END IF; RETURN NEW; END $$; \
             CREATE TRIGGER refuses BEFORE INSERT OR UPDATE ON {t} FOR EACH ROW EXECUTE FUNCTION {t}_refuses()",
            t = self.name
        );
        db.batch_execute(&sql).await.unwrap();
    }

    async fn expire(&self) {
        let sql = format!(
            "UPDATE \"{}\" SET until = clock_timestamp() - interval '1 second'",
            self.name
        );
        self.server.client().await.batch_execute(&sql).await.unwrap();
    }
}

async fn plain() -> Plain<Table> {
    Plain(Table::on(Postgres::shared().await).await)
}

conform!(plain);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contract_is_kept_behind_a_network_that_fails() {
    keeps_contract_behind_a_network::<Table>(Postgres::shared().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contract_is_kept_by_a_server_that_stops_and_starts_again() {
    keeps_contract_over_restarts::<Table>(Postgres::start().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_grow_though_the_clock_of_the_server_goes_back() {
    keeps_tokens_though_the_clock_goes_back::<Table>(async |clock| Postgres::start_by(Some(clock)).await)
        .await;
}

/// A store behind PgBouncer.
struct Pooled {
    table: Table,
    pooler: Pooler,
}

impl Fixture for Pooled {
    async fn store(&self) -> Arc<dyn Store> {
        self.table.at(self.pooler.addr(), PATIENCE).await
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }
}

async fn pooled(mode: &str) -> Pooled {
    let server = Arc::new(Postgres::start().await);
    Pooled {
        pooler: Pooler::start(&server, mode).await,
        table: Table::on(server).await,
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
    let config = fixture.table.server.config_at(fixture.pooler.addr());
    for client in join_all((0..24).map(|_| connect(&config))).await {
        let set = "SELECT current_setting('statement_timeout')";
        let rows = client.unwrap().query_typed(set, &[]).await.unwrap();
        assert_eq!(rows[0].get::<_, &str>(0), "0");
    }
}

/// They prepare, and change settings that the next client of the connection would have.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_are_refused_behind_a_transaction_pooler() {
    let fixture = pooled("transaction").await;
    let config = fixture.table.server.config_at(fixture.pooler.addr());
    let refused = PostgresRecords::connect(config.clone(), NoTls).await.unwrap_err();
    assert!(matches!(refused, dlock::Error::Unsupported { .. }), "{refused:?}");
    assert!(refused.to_string().contains("session mode"), "{refused}");
    for client in join_all((0..8).map(|_| connect(&config))).await {
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
