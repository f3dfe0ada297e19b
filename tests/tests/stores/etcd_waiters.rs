//! Waiters for locks on etcd: what happens to their session, their member, their watch and their client while they wait.

use std::sync::Arc;
use std::time::Duration;

use dlock::{HoldState, Loss};
use dlock_tests::etcd::{Etcd, EtcdCluster, EtcdProxy, builder_at, fresh_namespace};
use dlock_tests::eventually;
use dlock_tests::faults::{PATIENCE, SOON, answered, is_confirmed, within};
use futures_util::future::join_all;
use tokio::time::{sleep, timeout};

use crate::etcd_support::{LEASE, MS, SEC, acquires, client, connected, setting, setting_on};

/// In other libraries: a waiter whose session has ended waits for ever.
#[tokio::test]
async fn waiter_whose_session_is_ended_waits_on_and_leaves_nothing() {
    let setting = setting().await;
    let (a, b) = (client(&setting.patient).await, client(&setting.hasty).await);
    let guard = a.lock("k").acquire().await.unwrap();
    let first = setting.sessions().await;
    let waiting = tokio::spawn(b.lock("k").lease(LEASE).acquire());
    for _ in 0..3 {
        let others = async || {
            let all = setting.sessions().await;
            all.into_iter()
                .filter(|session| !first.contains(session))
                .collect::<Vec<_>>()
        };
        eventually("it has a session", async || !others().await.is_empty()).await;
        for session in others().await {
            assert!(setting.server.revoke(session).await);
        }
        // It asks once more, and needs a session for that.
        setting.proxy.cut();
    }
    assert!(!waiting.is_finished());
    let token = guard.fencing_token();
    guard.release().await.unwrap();
    let next = within(PATIENCE, "the waiter", waiting).await.unwrap().unwrap();
    assert!(next.fencing_token() > token);
    is_confirmed(&next).await;
    next.release().await.unwrap();
    assert_eq!(setting.held().await, []);
}

/// In other libraries: an acquire that is granted on a session that is gone. No keep-alive is due for a minute and a half.
#[tokio::test]
async fn acquire_whose_session_ends_on_its_way_is_granted_on_another_one_and_the_holders_are_told() {
    let setting = setting().await;
    let here = client(&setting.hasty).await;
    let before = here.lock("before").lease(LEASE).acquire().await.unwrap();
    let sessions = setting.sessions().await;
    let late = setting.proxy.hold(1, acquires);
    let asked = tokio::spawn(here.lock("k").lease(LEASE).acquire());
    late.caught().await;
    for session in &sessions {
        assert!(setting.server.revoke(*session).await);
    }
    late.release();
    let guard = within(PATIENCE, "it is granted", asked).await.unwrap().unwrap();
    is_confirmed(&guard).await;
    assert_eq!(setting.held().await.len(), 1);
    within(PATIENCE, "it is told", before.lost()).await;
    assert!(
        setting
            .sessions()
            .await
            .iter()
            .all(|session| !sessions.contains(session))
    );
    guard.release().await.unwrap();
}

/// A keep-alive of a lease that is gone is no error: its reply says that zero seconds are left. It is sent after a third of
/// the lease, which the test waits for.
#[tokio::test]
async fn keep_alive_with_no_time_left_ends_all_holds_of_the_session_at_once() {
    let setting = setting().await;
    let (here, there) = (client(&setting.patient).await, client(&setting.hasty).await);
    let lease = 12 * SEC;
    let guard = here.lock("k").lease(lease).acquire().await.unwrap();
    sleep(SEC).await;
    // Renewed by itself a second after the other one, but for the news.
    let beside = here.lock("beside").lease(lease).acquire().await.unwrap();
    for session in setting.sessions().await {
        assert!(setting.server.revoke(session).await);
    }
    let next = within(PATIENCE, "it is free", there.lock("k").acquire())
        .await
        .unwrap();
    assert!(next.fencing_token() > guard.fencing_token());
    for guard in [guard, beside] {
        // Before its lease is over by this process's own clock.
        let loss = within(PATIENCE, "it is told", guard.lost()).await;
        assert_eq!(loss, Loss::Gone);
    }
    assert_eq!(next.state(), HoldState::Held);
    next.release().await.unwrap();
}

/// In other libraries: a watch on a server that stands still waits for ever. An idle connection is asked every ten seconds
/// whether it lives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_whose_member_hangs_goes_on_by_another_one() {
    let cluster = EtcdCluster::start().await;
    let (namespace, leader) = (fresh_namespace(), cluster.leader().await);
    let on_leader = cluster.members[leader].builder(&namespace).timeout(PATIENCE);
    let a = client(&connected(on_leader).await).await;
    let b = client(&connected(cluster.builder_without(leader, &namespace)).await).await;
    // It uses one of them.
    for member in (0..3).filter(|member| *member != leader) {
        let guard = a.lock("k").lease(LEASE).acquire().await.unwrap();
        let waiting = tokio::spawn(b.lock("k").lease(LEASE).acquire());
        sleep(SEC / 5).await;
        assert!(!waiting.is_finished());
        cluster.members[member].stop();
        guard.release().await.unwrap();
        // Sooner than it would look by itself.
        let next = timeout(28 * SEC, waiting)
            .await
            .expect("it goes on")
            .unwrap()
            .unwrap();
        cluster.members[member].cont();
        within(PATIENCE, "the release", next.release()).await.unwrap();
    }
    let left = cluster.members[leader].keys(&format!("{namespace}q/")).await;
    assert_eq!(left, []);
}

/// A waiter that misses a notification looks again after half a minute, and one that is not listened to four times a second.
/// Each comes at another moment of the release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousand_handovers_between_two_clients_miss_no_notification() {
    let setting = setting().await;
    let process = async || {
        let builder = builder_at(setting.proxy.addr(), &setting.namespace).timeout(PATIENCE);
        client(&connected(builder).await).await
    };
    let clients = [process().await, process().await];
    let hands_over = async |key: usize| {
        let lock = |at: usize| clients[at % 2].lock(format!("k{key}")).lease(LEASE);
        let mut guard = lock(0).acquire().await.unwrap();
        for handover in 1..=250 {
            let waiting = tokio::spawn(lock(handover).acquire());
            sleep(Duration::from_micros(fastrand::u64(0..4000))).await;
            let token = guard.fencing_token();
            guard.release().await.unwrap();
            let what = format!("handover {handover} of {key}");
            guard = within(SOON, what, waiting).await.unwrap().unwrap();
            assert!(guard.fencing_token() > token);
        }
        guard.release().await.unwrap();
    };
    join_all((0..4).map(hands_over)).await;
    // Each has listened all the time.
    assert_eq!(setting.proxy.count(|call| call.is("Watch")), 2);
    let asked = setting.proxy.count(acquires);
    assert!(asked <= 4000, "{asked} requests");
}

/// The shortest lease is waited for.
#[tokio::test]
async fn dropped_client_leaves_no_lock_no_lease_and_no_connection() {
    let setting = setting_on(Arc::new(Etcd::start().await)).await;
    let holder = setting.patient.clone();
    let holder = client(&holder).await;
    let held = holder.lock("held").lease(LEASE).acquire().await.unwrap();
    let proxy = EtcdProxy::start(setting.server.addr());
    let builder = || builder_at(proxy.addr(), &setting.namespace).timeout(PATIENCE);
    for _ in 0..3 {
        let gone = client(&connected(builder()).await).await;
        let lock = |key: &str| gone.lock(key.to_owned()).lease(2 * SEC);
        let guard = lock("k").acquire().await.unwrap();
        let reading = gone.rw_lock("rw").read().lease(2 * SEC).acquire().await.unwrap();
        // A waiter, and two locks whose guards are dropped after their client.
        assert!(timeout(50 * MS, lock("held").acquire()).await.is_err());
        drop(gone);
        drop((guard, reading));
    }
    eventually("no connection is left", async || proxy.connections_open() == 0).await;
    eventually("no lock is left", async || setting.held().await.len() == 1).await;
    eventually("no session is left", async || setting.sessions().await.len() == 1).await;
    eventually("no lease is left", async || {
        setting.server.leases().await.len() == 1
    })
    .await;
    answered(|| held.ensure(SEC)).await.unwrap();
    held.release().await.unwrap();
}
