//! Locks on etcd whose server stands still, dies, is full, forgets its past, or is one of three.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::LockClient;
use dlock::store::Store;
use dlock_etcd::{EtcdLocks, EtcdLocksBuilder};
use dlock_tests::etcd::{Etcd, EtcdCluster, EtcdProxy, builder_at, fresh_namespace};
use dlock_tests::faults::{PATIENCE, SOON, answered, in_rounds, is_confirmed, within};
use dlock_tests::{Direction, eventually};
use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::etcd_support::{LEASE, TIMEOUT, acquires, ask, release, setting};
use crate::scenes::is_lost_before;

const SEC: Duration = Duration::from_secs(1);

async fn client(builder: EtcdLocksBuilder) -> LockClient {
    let store: EtcdLocks = builder.connect().await.expect("the server is there");
    let built = LockClient::builder()
        .store(store)
        .retry_for(PATIENCE)
        .build()
        .await;
    built.expect("the server is there")
}

/// The whole lease of four seconds is waited for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_is_lost_before_the_lease_ends_when_the_server_stands_still() {
    let lease = 4 * SEC;
    let (server, _a, _b, guard, waiting, over) =
        in_rounds("the server stands still before a renewal", async || {
            let server = Etcd::start().await;
            let namespace = fresh_namespace();
            let (a, b) = (
                client(server.builder(&namespace)).await,
                client(server.builder(&namespace)).await,
            );
            let asked = Instant::now();
            let guard = a.lock("k").lease(lease).acquire().await.unwrap();
            // The server counts from before.
            let over = Instant::now() + lease;
            let waiting = tokio::spawn(b.lock("k").acquire());
            sleep(SEC / 5).await;
            server.stop();
            match asked.elapsed() < lease / 4 {
                true => Ok((server, a, b, guard, waiting, over)),
                false => Err("a renewal may have been on its way"),
            }
        })
        .await;
    is_lost_before(over, &guard).await;
    server.cont();
    let next = within(PATIENCE, "the waiter goes on", waiting).await;
    let next = next.unwrap().unwrap();
    assert!(next.fencing_token() > guard.fencing_token());
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holds_survive_a_restart_and_waiters_go_on() {
    let server = Etcd::start().await;
    let namespace = fresh_namespace();
    let (a, b) = (
        client(server.builder(&namespace)).await,
        client(server.builder(&namespace)).await,
    );
    let guard = a.lock("k").lease(90 * SEC).acquire().await.unwrap();
    let waiting = tokio::spawn(async move { b.lock("k").acquire().await.map(|guard| (b, guard)) });
    sleep(SEC / 10).await;
    server.restart().await;
    is_confirmed(&guard).await;
    assert!(!waiting.is_finished());
    guard.release().await.unwrap();
    let (_b, next) = waiting.await.unwrap().unwrap();
    next.release().await.unwrap();
}

/// Compacts the history up to now. Returns the server's status before that.
async fn compact(server: &Etcd) -> Value {
    let status = server.ask("maintenance/status", &json!({})).await;
    let status = status.expect("a status");
    let compact = json!({"revision": status["header"]["revision"], "physical": true});
    assert!(server.ask("kv/compaction", &compact).await.is_some());
    status
}

/// Compacted while it is watched, and then with the connection cut. In other libraries: a watch that goes on from the last
/// revision that it has seen, which is compacted by then.
#[tokio::test]
async fn compaction_ends_no_watch() {
    let server = Etcd::start().await;
    let (namespace, proxy) = (fresh_namespace(), EtcdProxy::start(server.addr()));
    let a = client(server.builder(&namespace).timeout(PATIENCE)).await;
    let b = client(builder_at(proxy.addr(), &namespace).timeout(PATIENCE)).await;
    // A waiter without notifications asks four times a second.
    let is_quiet = async || {
        let before = proxy.count(acquires);
        sleep(SEC).await;
        proxy.count(acquires) == before
    };
    for is_cut in [false, true] {
        // With such a lease a waiter that is not told asks after 30 s.
        let guard = a.lock("k").lease(90 * SEC).acquire().await.unwrap();
        let waiting = tokio::spawn(b.lock("k").acquire());
        eventually("its waiter has notifications", &is_quiet).await;
        assert!(server.put("another key", b"changes").await);
        compact(&server).await;
        if is_cut {
            let asked = proxy.count(acquires);
            proxy.cut();
            eventually("its waiter asks again", async || proxy.count(acquires) > asked).await;
            eventually("its waiter has notifications again", &is_quiet).await;
        }
        guard.release().await.unwrap();
        let next = within(SOON, "its waiter is told", waiting).await;
        next.unwrap().unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn server_without_space_ends_locks_and_grants_none() {
    let server = Etcd::start_with(&["--quota-backend-bytes", "6291456"]).await;
    let namespace = fresh_namespace();
    let store = server
        .builder(&namespace)
        .timeout(PATIENCE)
        .connect()
        .await
        .unwrap();
    let builder = LockClient::builder().store(store).retry_for(PATIENCE);
    let client = builder.build().await.unwrap();
    let guard = client.lock("held").acquire().await.unwrap();
    let kept = client.lock("kept").min_hold(2 * SEC);
    let kept = kept.acquire().await.unwrap();
    let filling = vec![7; 1 << 20];
    let mut filled = 0;
    while server.put(&format!("fill/{filled}"), &filling).await {
        filled += 1;
        assert!(filled < 100, "the quota is not kept");
    }
    let error = client.lock("new").try_acquire().await.unwrap_err();
    assert!(error.to_string().contains("space"), "{error}");
    // These share requests.
    let acquires = (0..64).map(async |n| client.lock(format!("new-{n}")).try_acquire().await);
    for refused in join_all(acquires).await {
        let error = refused.unwrap_err();
        assert!(error.to_string().contains("space"), "{error}");
    }
    let held = server.keys(&format!("{namespace}q/")).await;
    assert_eq!(held.len(), 2, "{held:?}");
    // Renewed, and ended: neither takes space.
    is_confirmed(&guard).await;
    guard.release().await.unwrap();
    kept.release().await.unwrap();
    eventually("no lock is left", async || {
        server.keys(&format!("{namespace}q/")).await.is_empty()
    })
    .await;
    // As an operator makes room.
    assert!(server.delete("fill/").await > 0);
    let status = compact(&server).await;
    assert!(server.ask("maintenance/defragment", &json!({})).await.is_some());
    let disarm =
        json!({"action": "DEACTIVATE", "alarm": "NOSPACE", "memberID": status["header"]["member_id"]});
    assert!(server.ask("maintenance/alarm", &disarm).await.is_some());
    let again = answered(|| async { client.lock("new").acquire().await })
        .await
        .unwrap();
    again.release().await.unwrap();
}

/// Its callers come one after another, and each has less time left than a connection takes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn busy_client_is_connected_again_after_an_outage() {
    let server = Etcd::shared().await;
    let proxy = EtcdProxy::start(server.addr());
    let namespace = fresh_namespace();
    let store = answered(|| builder_at(proxy.addr(), &namespace).timeout(TIMEOUT).connect()).await;
    let store = Arc::new(store.expect("the server is there"));
    let inspects = async |key: &str| store.clone().inspect(key.into()).await.is_ok();
    proxy.mute_new();
    proxy.cut();
    let calls = (0..20_u32).map(async |n| {
        sleep(n * TIMEOUT / 20).await;
        loop {
            inspects(&format!("k{n}")).await;
        }
    });
    let reconnects = async {
        sleep(3 * TIMEOUT).await;
        proxy.delay(Direction::Both, TIMEOUT / 8, Duration::ZERO);
        proxy.accept();
        eventually("it is connected", async || inspects("other").await).await;
    };
    tokio::select! {
        _ = join_all(calls) => {}
        () = reconnects => {}
    }
}

/// The first acquire has no reply, and leaves the second one no time.
#[tokio::test]
async fn request_without_time_ends_no_good_connection() {
    let setting = setting().await;
    let connects = || setting.proxy.count(|call| call.is("Status"));
    let acquire = |number| tokio::spawn(setting.hasty.clone().acquire(ask("k", number, LEASE)));
    in_rounds("the connection goes on", async || {
        let before = connects();
        let held = setting.proxy.hold(1, acquires);
        let first = acquire(1);
        held.caught().await;
        let second = acquire(2);
        sleep(SEC / 100).await;
        let inspected = setting.hasty.clone().inspect("other".into()).await;
        setting.proxy.delay(Direction::ToServer, TIMEOUT, Duration::ZERO);
        let replies = [first.await.unwrap(), second.await.unwrap()];
        setting
            .proxy
            .delay(Direction::ToServer, Duration::ZERO, Duration::ZERO);
        held.release();
        held.swallowed().await;
        for number in [1, 2] {
            let released = answered(|| setting.hasty.clone().release(release("k", number))).await;
            assert!(released.is_ok(), "{released:?}");
        }
        let is_late = inspected.is_ok() && replies.iter().all(Result::is_err);
        match (is_late, connects() - before) {
            (true, 0) => Ok(()),
            instead => Err(instead),
        }
    })
    .await;
}

/// Other clients refuse replies of more than four megabytes.
#[tokio::test]
async fn reply_of_many_megabytes_is_read() {
    let server = Etcd::shared().await;
    let namespace = fresh_namespace();
    let store = server.builder(&namespace).timeout(PATIENCE).connect().await;
    let store = Arc::new(store.expect("the server is there"));
    for number in 0..5 {
        let key = format!("{namespace}q/{number}");
        assert!(server.put(&key, &vec![7; 1 << 20]).await);
    }
    let listed = store.list(String::new()).await;
    assert!(listed.is_ok(), "{listed:?}");
    assert_eq!(server.delete(&namespace).await, 5);
}

/// An election takes a second or two.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_that_loses_its_leader_keeps_every_lock() {
    let cluster = EtcdCluster::start().await;
    let namespace = fresh_namespace();
    let (a, b) = (
        client(cluster.builder(&namespace)).await,
        client(cluster.builder(&namespace)).await,
    );
    let guard = a.lock("k").lease(20 * SEC).acquire().await.unwrap();
    let waiting = tokio::spawn(async move { b.lock("k").acquire().await.map(|guard| (b, guard)) });
    sleep(SEC / 10).await;
    let leader = cluster.leader().await;
    cluster.members[leader].kill();
    let other = a.lock("other").acquire().await.unwrap();
    is_confirmed(&guard).await;
    assert!(!waiting.is_finished());
    guard.release().await.unwrap();
    let (_b, next) = waiting.await.unwrap().unwrap();
    assert!(next.fencing_token() > other.fencing_token());
    next.release().await.unwrap();
    other.release().await.unwrap();
}

/// The member that a client uses hangs: another one serves it. The client does not know the leader, which has to go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_that_hangs_is_left_for_another_one() {
    let cluster = EtcdCluster::start().await;
    let leader = cluster.leader().await;
    let a = client(cluster.builder_without(leader, &fresh_namespace())).await;
    let guard = a.lock("k").lease(30 * SEC).acquire().await.unwrap();
    for member in (0..3).filter(|member| *member != leader) {
        cluster.members[member].stop();
        let other = a.lock(format!("other-{member}")).acquire().await.unwrap();
        other.release().await.unwrap();
        cluster.members[member].cont();
    }
    is_confirmed(&guard).await;
    guard.release().await.unwrap();
}

/// The holder is in a minority that no other member hears.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_beside_a_stuck_leader_is_lost_before_the_others_grant_its_lock() {
    let cluster = Arc::new(EtcdCluster::start().await);
    let namespace = fresh_namespace();
    let leader = cluster.leader().await;
    // It knows no other member.
    let a = client(cluster.members[leader].builder(&namespace)).await;
    let b = client(cluster.builder(&namespace)).await;
    let guard = a.lock("k").lease(6 * SEC).acquire().await.unwrap();
    cluster.members[leader].stop();
    let next = b.lock("k").acquire().await.unwrap();
    assert!(!guard.is_held());
    assert!(next.fencing_token() > guard.fencing_token());
    cluster.members[leader].cont();
    next.release().await.unwrap();
}

/// The leader hears no other member, and none hears it. It takes a lease, and an election.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_that_is_cut_off_grants_nothing_and_its_holder_is_lost_before_the_others_grant_its_lock() {
    let cluster = EtcdCluster::start_in_a_network().await;
    in_rounds("no lease is renewed until it leads no more", async || {
        cut_off_from_the_others(&cluster).await
    })
    .await;
}

/// Fails with the number of renewals that a leader has granted which only believed to lead: what servers may do that are
/// refused unless they are allowed.
async fn cut_off_from_the_others(cluster: &EtcdCluster) -> Result<(), usize> {
    let (namespace, leader) = (fresh_namespace(), cluster.leader().await);
    let alone = &cluster.members[leader];
    let proxy = EtcdProxy::start(alone.addr());
    let a = client(builder_at(proxy.addr(), &namespace)).await;
    let b = client(cluster.builder_without(leader, &namespace)).await;
    let hasty = alone.builder(&namespace).connect().await.unwrap();
    let hasty = LockClient::builder()
        .store(hasty)
        .retry_for(SEC)
        .build()
        .await
        .unwrap();
    // A third of it is longer than a leader takes to see that it is alone.
    let lease = 7 * SEC;
    let theirs = b.lock("theirs").lease(lease).acquire().await.unwrap();
    let guard = a.lock("k").lease(lease).acquire().await.unwrap();
    let waiting = tokio::spawn(b.lock("k").acquire());
    let stranded = tokio::spawn(hasty.lock("theirs").acquire());
    sleep(SEC / 10).await;
    is_confirmed(&guard).await;
    proxy.forget();
    cluster.cut_off(Some(leader));
    eventually("it leads no more", async || !cluster.has_leader(leader).await).await;
    let renewals = proxy.count(|call| call.is("LeaseKeepAlive"));
    // A client of the cut-off member acquires no lock, and does not wait for ever.
    for lock in ["free", "k"] {
        let refused = within(PATIENCE, lock, hasty.lock(lock).try_acquire())
            .await
            .unwrap_err();
        assert!(!refused.is_busy(), "{lock}: {refused}");
    }
    let refused = within(PATIENCE, "the waiter", stranded)
        .await
        .unwrap()
        .unwrap_err();
    assert!(!refused.is_busy(), "{refused}");
    // The others go on.
    let free = b.lock("free").acquire().await.unwrap();
    free.release().await.unwrap();
    is_confirmed(&theirs).await;
    let next = waiting.await.unwrap().unwrap();
    let is_held = guard.is_held();
    cluster.cut_off(None);
    if renewals > 0 && is_held {
        return Err(renewals);
    }
    assert!(!is_held, "two clients hold it");
    assert!(next.fencing_token() > guard.fencing_token());
    // There is one holder, also where it was cut off, and the release of the former one ends nothing.
    let busy = answered(|| a.lock("k").try_acquire()).await.unwrap_err();
    assert!(busy.is_busy(), "{busy}");
    let _ = guard.release().await;
    is_confirmed(&next).await;
    is_confirmed(&theirs).await;
    let token = next.fencing_token();
    next.release().await.unwrap();
    let last = a.lock("k").acquire().await.unwrap();
    assert!(last.fencing_token() > token);
    last.release().await.unwrap();
    Ok(())
}
