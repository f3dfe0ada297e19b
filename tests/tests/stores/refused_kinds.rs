//! Kinds that a store does not have are refused where the program chooses them, so that it does not start.

use std::sync::Arc;

use dlock::store::Kind;
use dlock::{Error, LockClient, LockKey, LockKind};
use dlock_tests::faults::PATIENCE;
use dlock_tests::mysql::Mysql;
use dlock_tests::postgres::Postgres;
use dlock_tests::zookeeper::Zookeeper;
use dlock_tower::LockLayer;
use dlock_tower::key::header;
use dlock_tower::task::{LimitLayer, TaskLockLayer, TaskOnceLayer};

use crate::backend::Backend;
use crate::{mysql_conformance, postgres_conformance, zookeeper_conformance};

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
    for &kind in Kind::ALL.iter().filter(|kind| !capabilities.has(**kind)) {
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
async fn kinds_that_postgres_lacks_are_refused_at_the_start() {
    kinds_are_refused_at_the_start::<postgres_conformance::Table>(Postgres::shared().await, "PostgreSQL")
        .await;
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
