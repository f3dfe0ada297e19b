//! Locks on ZooKeeper where a single request or reply is lost: each request that dlock sends, in each way in which it can be.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dlock::LockKind;
use dlock::store::{GrantId, Store};
use dlock_tests::faults::{PATIENCE, answered, is_confirmed, within};
use dlock_tests::zookeeper::{ZkProxy, ZkRequest, Zookeeper};
use dlock_tests::{NetFault, eventually};
use dlock_zookeeper::ZookeeperLocks;
use futures_util::future::join_all;
use tokio::time::sleep;

use crate::losses::LOSSES;
use crate::scenes::MS;
use crate::zookeeper_support::{LONG, TIMEOUT, client, fresh_root, patient, store};

/// Whether it is the request that is lost.
type Matches = fn(&ZkRequest) -> bool;

/// Waits for a lock, has it confirmed and releases it, while one of the requests is lost.
async fn is_held_once(hasty: &ZookeeperLocks, patient: &ZookeeperLocks, kind: LockKind, key: &str) {
    let (here, there) = (client(hasty).await, client(patient).await);
    // Before there is such a node.
    let grant = GrantId::from_parts(9, 1);
    let mut watch = Arc::new(hasty.clone()).watch(kind.into(), &key.into(), grant);
    within(PATIENCE, key, watch.changed()).await;
    let before = there.lock(key).acquire().await.unwrap();
    let waiting = tokio::spawn(here.lock(key).kind(kind).acquire());
    // It is as good when it has not asked yet.
    sleep(100 * MS).await;
    let token = before.fencing_token();
    before.release().await.unwrap();
    let guard = within(PATIENCE, key, waiting).await.unwrap().unwrap();
    assert!(guard.fencing_token() > token, "{key}");
    let busy = there.lock(key).try_acquire().await.unwrap_err();
    assert!(busy.is_busy(), "{key}: {busy}");
    is_confirmed(&guard).await;
    let holder = answered(|| here.inspect(key)).await.unwrap();
    assert!(holder.is_some(), "{key}");
    let token = guard.fencing_token();
    within(PATIENCE, key, guard.release()).await.unwrap();
    let next = within(PATIENCE, key, there.lock(key).acquire()).await.unwrap();
    assert!(next.fencing_token() > token, "{key}");
    next.release().await.unwrap();
    let free = async || there.inspect(key).await.is_ok_and(|holder| holder.is_none());
    eventually("no node is left", free).await;
}

/// The same again if the request was not sent: a waiter may come when the lock is free.
async fn is_held_though_it_is_lost(
    hasty: &ZookeeperLocks,
    patient: &ZookeeperLocks,
    kind: LockKind,
    key: &str,
    fault: NetFault,
) {
    for _ in 0..10 {
        is_held_once(hasty, patient, kind, key).await;
        if fault.fired() {
            return;
        }
    }
    eventually(&format!("{key} is lost"), async || fault.fired()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_requests_and_replies_leave_nothing_wrong() {
    let server = Zookeeper::shared().await;
    let root = fresh_root();
    let there = patient(server.addr(), &root, LONG).await;
    let requests: [(&str, Matches); 9] = [
        ("container", |request| request.operation == 19),
        ("create", ZkRequest::creates),
        ("list", ZkRequest::lists),
        ("delete", ZkRequest::deletes),
        ("renewal", ZkRequest::is_multi),
        ("watch", |request| request.operation == 3),
        ("sync", |request| request.operation == 9),
        ("look", |request| request.operation == 4),
        ("ping", ZkRequest::is_ping),
    ];
    let losing = requests.map(async |(name, is)| {
        let proxy = ZkProxy::start(server.addr());
        let hasty = store(proxy.addr(), &root, LONG, TIMEOUT).await;
        for loss in LOSSES {
            let fault = loss.of(&proxy, is);
            let key = format!("{name}, {loss:?}");
            is_held_though_it_is_lost(&hasty, &there, LockKind::Mutex, &key, fault).await;
        }
    });
    join_all(losing).await;
    assert_eq!(client(&there).await.list("").await.unwrap().len(), 0);
}

/// How many such requests are not lost before.
type Skipped = usize;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_requests_and_replies_of_fair_waiters_leave_nothing_wrong() {
    let server = Zookeeper::shared().await;
    let root = fresh_root();
    let there = patient(server.addr(), &root, LONG).await;
    let requests: [(&str, Matches, Skipped); 7] = [
        ("join", ZkRequest::creates, 0),
        (
            "list",
            |request| request.lists() && !request.path.contains("lock-"),
            0,
        ),
        ("mark", |request| request.operation == 5, 0),
        (
            "look",
            |request| request.lists() && request.path.contains("lock-"),
            0,
        ),
        (
            "second look",
            |request| request.lists() && request.path.contains("lock-"),
            1,
        ),
        ("take", |request| request.operation == 5, 1),
        ("delete", ZkRequest::deletes, 0),
    ];
    let losing = requests.map(async |(name, is, skipped)| {
        let proxy = ZkProxy::start(server.addr());
        let hasty = store(proxy.addr(), &root, LONG, TIMEOUT).await;
        for loss in LOSSES {
            let seen = AtomicUsize::new(0);
            let is =
                move |request: &ZkRequest| is(request) && seen.fetch_add(1, Ordering::Relaxed) >= skipped;
            let fault = loss.of(&proxy, is);
            let key = format!("{name}, {loss:?}");
            is_held_though_it_is_lost(&hasty, &there, LockKind::Fair, &key, fault).await;
        }
    });
    join_all(losing).await;
    assert_eq!(client(&there).await.list("").await.unwrap().len(), 0);
}
