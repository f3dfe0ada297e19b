//! The contract of stores on MariaDB.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::Store;
use dlock_conformance::conform;
use dlock_tests::Request;
use dlock_tests::mysql::{Mysql, MysqlProxy, MysqlWire};
use mysql_async::prelude::Queryable;

use crate::backend::{
    Backend, Plain, keeps_contract_behind_a_network, keeps_contract_over_restarts,
    keeps_tokens_though_the_clock_goes_back,
};
use crate::mysql_support::connected;
use crate::scenes::{Forces, Rows};

pub(super) struct Table {
    server: Arc<Mysql>,
    name: String,
}

impl Backend for Table {
    type Server = Mysql;
    type Wire = MysqlWire;

    async fn on(server: Arc<Mysql>) -> Table {
        let name = server.table().await;
        Table { server, name }
    }

    fn server(&self) -> &Arc<Mysql> {
        &self.server
    }

    async fn store(&self, proxy: Option<&MysqlProxy>, timeout: Duration) -> Arc<dyn Store> {
        let addr = proxy.map_or(self.server.addr(), |proxy| proxy.addr());
        connected(self.server.opts_at(addr), &self.name, timeout).await
    }

    async fn forget(&self, _own: bool) -> bool {
        let sql = format!("TRUNCATE `{0}`; TRUNCATE `{0}_floor`", self.name);
        self.server.client().await.query_drop(sql).await.is_ok()
    }

    fn acquires(request: &Request) -> bool {
        request.runs("LAST_INSERT_ID")
    }
}

impl Forces for Table {
    fn forces(request: &Request) -> bool {
        request.runs("SET holder = ''") && request.runs("holder <> ''")
    }
}

impl Rows for Table {
    fn releases(request: &Request) -> bool {
        request.runs("SET holder = ''")
    }

    fn renewals(request: &Request) -> usize {
        request.sql.matches("FORCE INDEX (PRIMARY) SET until_us").count()
    }

    async fn connections(&self) -> i64 {
        let sql = "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE USER = 'dlock' AND ID <> CONNECTION_ID()";
        let count = self.server.client().await.query_first(sql).await.unwrap();
        count.expect("a row")
    }

    async fn count(&self, condition: &str) -> i64 {
        let sql = format!("SELECT COUNT(*) FROM `{}` WHERE {condition}", self.name);
        let count = self.server.client().await.query_first(sql).await.unwrap();
        count.expect("a row")
    }

    async fn conflicts(&self) {
        let mut db = self.server.client().await;
        for change in ["INSERT", "UPDATE"] {
            let sql = format!(
                "CREATE TRIGGER {t}_{change} BEFORE {change} ON `{t}` FOR EACH ROW BEGIN \
                 IF RAND() < 0.17 THEN SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'a dead-lock'; END IF; \
                 IF RAND() < 0.17 THEN SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1205, MESSAGE_TEXT = 'a wait'; END IF; END",
                t = self.name
            );
            db.query_drop(sql).await.unwrap();
        }
    }

    async fn refuses(&self, key: Option<&str>) {
        let mut db = self.server.client().await;
        for change in ["INSERT", "UPDATE"] {
            let name = format!("{}_refuses_{change}", self.name);
            let drop = format!("DROP TRIGGER IF EXISTS {name}");
            db.query_drop(drop).await.unwrap();
            let Some(key) = key else { continue };
            let sql = format!(
                "CREATE TRIGGER {name} BEFORE {change} ON `{}` FOR EACH ROW IF NEW.k = '{key}' THEN \
                 SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'for a test'; END IF",
                self.name
            );
            db.query_drop(sql).await.unwrap();
        }
    }

    async fn expire(&self) {
        let sql = format!("UPDATE `{}` SET until_us = until_us - 1000000000000", self.name);
        self.server.client().await.query_drop(sql).await.unwrap();
    }
}

async fn plain() -> Plain<Table> {
    Plain(Table::on(Mysql::shared().await).await)
}

conform!(plain);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contract_is_kept_behind_a_network_that_fails() {
    keeps_contract_behind_a_network::<Table>(Mysql::shared().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contract_is_kept_by_a_server_that_stops_and_starts_again() {
    keeps_contract_over_restarts::<Table>(Mysql::start().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_grow_though_the_clock_of_the_server_goes_back() {
    keeps_tokens_though_the_clock_goes_back::<Table>(async |clock| Mysql::start_with(&[], Some(clock)).await)
        .await;
}
