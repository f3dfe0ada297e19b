//! Leader election on the stores that are crates of their own, on Redis and on a quorum: a leader that resigns is followed at
//! once, with a greater token, and one whose lock is forced open is told.

use std::time::Duration;

use dlock::{Error, LockClient, LockClientBuilder};
use dlock_tests::etcd::{Etcd, fresh_namespace};
use dlock_tests::faults::{PATIENCE, built};
use dlock_tests::mysql::Mysql;
use dlock_tests::postgres::{Postgres, fresh_table};
use dlock_tests::zookeeper::Zookeeper;
use dlock_tests::{Flavor, Independent, Server, eventually, settle};

/// No test waits for its end.
const LEASE: Duration = Duration::from_secs(300);
/// What a slow machine takes to elect the next one that is told.
const FOLLOWED: Duration = Duration::from_secs(20);

async fn leads_and_is_followed(open: impl Fn() -> LockClientBuilder) {
    let client = || built(|| open().timeout(PATIENCE).retry_for(PATIENCE).lease(LEASE));
    let (first, second): (LockClient, LockClient) = (client().await, client().await);
    let name = format!("scheduler-{:x}", fastrand::u64(..));
    let term = first.leader(&*name).campaign().await.unwrap();
    let refused = second.leader(&*name).try_campaign().await;
    assert!(matches!(refused, Err(Error::NotAcquired { .. })), "{refused:?}");
    assert!(second.leader(&*name).current().await.unwrap().is_some());
    let next = tokio::spawn(second.leader(&*name).campaign());
    eventually("it waits", async || second.waited_for() == 1).await;
    settle().await;
    let token = term.fencing_token();
    term.release().await.unwrap();
    // It asks by itself after 30 s.
    let followed = tokio::time::timeout(FOLLOWED, next).await;
    let next = followed.expect("it is elected at once").unwrap().unwrap();
    assert!(next.fencing_token() > token);
    // A leader that is deposed is told, and its successor has a greater token.
    assert!(first.force_release(&*name).await.unwrap());
    let ensured = next.ensure(1000 * LEASE).await;
    let last = first.leader(&*name).campaign().await.unwrap();
    assert!(last.fencing_token() > next.fencing_token());
    tokio::time::timeout(PATIENCE, next.lost())
        .await
        .unwrap_or_else(|_| panic!("the former leader is not told: {ensured:?}"));
    last.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_on_postgres_is_followed_and_told() {
    let (server, table) = (Postgres::shared().await, fresh_table());
    let url = format!("{}?create_table=true&table={table}", server.url_at(server.addr()));
    leads_and_is_followed(|| LockClient::builder().scheme(dlock_postgres::scheme()).url(&url)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_on_mysql_is_followed_and_told() {
    let server = Mysql::shared().await;
    let url = format!("{}?table={}", server.url_at(server.addr()), server.table().await);
    leads_and_is_followed(|| LockClient::builder().scheme(dlock_mysql::scheme()).url(&url)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_on_etcd_is_followed_and_told() {
    let server = Etcd::shared().await;
    let url = server.url(&fresh_namespace());
    leads_and_is_followed(|| LockClient::builder().scheme(dlock_etcd::scheme()).url(&url)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_on_zookeeper_is_followed_and_told() {
    let server = Zookeeper::shared().await;
    let url = format!("zookeeper://{}/leaders-{:x}", server.addr(), fastrand::u64(..));
    leads_and_is_followed(|| LockClient::builder().scheme(dlock_zookeeper::scheme()).url(&url)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_on_redis_is_followed_and_told() {
    let server = Server::start(Flavor::Redis).await;
    leads_and_is_followed(|| LockClient::builder().url(server.url())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_on_a_quorum_is_followed_and_told() {
    let quorum = Independent::start(Flavor::Redis, 3).await;
    leads_and_is_followed(|| LockClient::builder().url(quorum.url())).await;
}
