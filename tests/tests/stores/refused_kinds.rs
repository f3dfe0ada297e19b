//! Kinds that a store does not have are refused where the program chooses them, so that it does not start.

use std::sync::Arc;

use dlock::store::Kind;
use dlock::{Error, LockClient, LockKey, LockKind};
use dlock_tests::etcd::Etcd;
use dlock_tests::faults::PATIENCE;
use dlock_tests::features;
use dlock_tests::mysql::Mysql;
use dlock_tests::postgres::Postgres;
use dlock_tests::zookeeper::Zookeeper;
use dlock_tower::LockLayer;
use dlock_tower::key::header;
use dlock_tower::task::{LimitLayer, TaskLockLayer, TaskOnceLayer};

use crate::backend::Backend;
use crate::{etcd_conformance, mysql_conformance, postgres_conformance, zookeeper_conformance};

fn is_refusal(refused: Result<(), Error>, store: &str) -> String {
    let error = refused.expect_err("the store does not have it");
    let text = error.to_string();
    assert!(
        matches!(error, Error::Unsupported { .. }) && text.contains(store),
        "{text}"
    );
    text
}

/// What a service does when it starts, with each kind.
async fn kinds_are_refused_at_the_start<B: Backend>(server: Arc<B::Server>, name: &str) {
    let backend = B::on(server).await;
    let store = backend.store(None, PATIENCE).await;
    let build = |kinds: &[Kind]| {
        let builder = LockClient::builder().shared_store(store.clone());
        builder.require(kinds.iter().copied()).build()
    };
    let capabilities = store.capabilities();
    let client = build(&capabilities.kinds).await.expect("it has these");
    let key = |(): &()| LockKey::from("k");
    let lacking = Kind::ALL.iter().copied().filter(|kind| !capabilities.has(*kind));
    let lacking: Vec<Kind> = lacking.collect();
    assert!(!lacking.is_empty(), "{name} has all kinds");
    for kind in lacking {
        let text = is_refusal(build(&[Kind::Mutex, kind]).await.map(drop), name);
        assert!(
            text.contains(&format!("kind {kind} is")) && text.contains("; use "),
            "{text}"
        );
        let Some(kind) = kind.lock_kind() else { continue };
        let layer = LockLayer::new(client.clone(), header("k"));
        assert_eq!(is_refusal(layer.kind(kind).map(drop), name), text);
        let layer = TaskLockLayer::new(client.clone(), key);
        assert_eq!(is_refusal(layer.kind(kind).map(drop), name), text);
        assert_eq!(is_refusal(client.lock("k").kind(kind).check(), name), text);
        assert_eq!(is_refusal(client.multi(["k"]).kind(kind).check(), name), text);
    }
    let has_readers = capabilities.has(Kind::Read);
    let by_method = LockLayer::new(client.clone(), header("k")).read_write();
    assert_eq!(by_method.is_ok(), has_readers);
    if let Err(error) = by_method {
        is_refusal(Err(error), name);
    }
    let is_checked = |kind: Kind, checked: Result<(), Error>| match capabilities.has(kind) {
        true => checked.expect("it has it"),
        false => drop(is_refusal(checked, name)),
    };
    let limits = LimitLayer::new(client.clone(), key, |()| 1).map(drop);
    is_checked(Kind::Permit, limits);
    is_checked(Kind::Permit, client.semaphore("k").check());
    is_checked(Kind::Unowned, client.unowned_semaphore("k").check());
    is_checked(Kind::Latch, client.latch("k").check());
    is_checked(Kind::Latch, client.latch("k").count().await.map(drop));
    let keeps_records = client.records().is_ok();
    let once = TaskOnceLayer::new(client.clone(), key);
    assert_eq!(once.is_ok(), keeps_records);

    let layer = LockLayer::new(client, header("k")).kind(LockKind::Mutex);
    layer
        .expect("it has plain locks")
        .check()
        .expect("its options are valid");
}

#[tokio::test]
async fn kinds_that_mysql_lacks_are_refused_at_the_start() {
    kinds_are_refused_at_the_start::<mysql_conformance::Table>(Mysql::shared().await, "MySQL").await;
}

#[tokio::test]
async fn kinds_that_zookeeper_lacks_are_refused_at_the_start() {
    kinds_are_refused_at_the_start::<zookeeper_conformance::Root>(Zookeeper::shared().await, "ZooKeeper")
        .await;
}

async fn features_of<B: Backend>(server: Arc<B::Server>) -> String {
    features(&*B::on(server).await.store(None, PATIENCE).await)
}

/// The tests of the contract that need what a store does not say to have are left out, and nothing fails.
#[tokio::test]
async fn each_store_has_what_its_tests_rely_on() {
    let told = [
        features_of::<postgres_conformance::Table>(Postgres::shared().await).await,
        features_of::<etcd_conformance::Namespace>(Etcd::shared().await).await,
        features_of::<mysql_conformance::Table>(Mysql::shared().await).await,
        features_of::<zookeeper_conformance::Root>(Zookeeper::shared().await).await,
    ];
    let expected = [
        "lock fair read write fenced permit unowned latch token_blocks fixed_lease min_hold restores_positions limits \
         inspection sets Lossy",
        "lock fair fenced read write permit unowned latch token_blocks fixed_lease min_hold restores_positions limits \
         inspection sets Certain",
        "lock fenced token_blocks fixed_lease min_hold inspection None",
        "lock fair fenced read write permit latch limits inspection Certain",
    ];
    assert_eq!(told, expected);
}
