//! Locks on ZooKeeper where a server, the network or a process fails: what is promised, and what went wrong elsewhere.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::store::{
    AcquireReply, AcquireRequest, GrantId, Kind, Outcome, ReleaseReply, RenewRequest, Renewal, Store,
};
use dlock::{Error, HoldState, LockClient, LockKey, Loss};
use dlock_tests::faults::{PATIENCE, SOON, answered, are_few, some_at_a_time, within};
use dlock_tests::zookeeper::{Ensemble, ZkProxy, ZkRequest, Zookeeper};
use dlock_tests::{Direction, Swallow, eventually};
use dlock_zookeeper::{WriteError, Writes, ZookeeperLocks};
use futures_util::future::join_all;

use crate::zookeeper_support::{
    LEASE, LONG, TIMEOUT, client, fresh_root, patient, release, request, setting, store,
};

/// A server that is cut off from its leader answers pings for seconds, while the leader ends the session and gives the lock
/// to another client. It takes as long as the session, and three servers have to start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_is_told_before_the_lock_is_given_away_when_its_server_is_cut_off_from_the_leader() {
    let servers = Ensemble::start().await;
    let leader = servers.leader().await;
    let follower = (leader + 1) % 3;
    let (root, session) = (fresh_root(), Duration::from_secs(6));
    let beside = patient(servers.servers()[leader].addr(), &root, LONG).await;
    let behind = store(servers.servers()[follower].addr(), &root, session, TIMEOUT).await;
    let (holder, waiter) = (client(&behind).await, client(&beside).await);
    let guard = loop {
        let guard = holder.lock("k").wait(PATIENCE).acquire().await.unwrap();
        // Long enough that its lease comes from renewals, and not from the begin of the session.
        tokio::time::sleep(session / 2).await;
        if guard.is_held() {
            break guard;
        }
    };
    servers.freeze(follower, leader, true);
    let taken = waiter.lock("k").wait(PATIENCE).acquire().await.unwrap();
    assert!(!guard.is_held(), "two clients hold the lock");
    // A client that goes by its connection would think that it holds it still.
    let said = servers.servers()[follower].said("srvr").await;
    assert!(said.is_some_and(|said| said.contains("Mode: follower")));
    assert!(taken.is_held() && taken.fencing_token() > guard.fencing_token());
    servers.freeze(follower, leader, false);
}

/// An attempt that meets a holder which comes and goes between two looks of the watch: were its end not told, the waiter
/// would sleep beside a lock that is free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_is_told_of_the_end_of_a_holder_that_only_its_attempt_has_seen() {
    let (server, proxy, root) = setting().await;
    let beside = Arc::new(patient(server.addr(), &root, LONG).await);
    let behind = Arc::new(patient(proxy.addr(), &root, LONG).await);
    // Most rounds come in the order that matters.
    let mut judged = 0;
    for round in 0..20 {
        let mut watch = behind
            .clone()
            .watch(Kind::Mutex, &"k".into(), GrantId::from_parts(7, round));
        watch.changed().await;
        proxy.block(Direction::ToClient);
        beside.clone().acquire(request("k", 1000 + round)).await.unwrap();
        let asked = |request: &ZkRequest| !request.is_ping();
        let before = proxy.count(asked);
        // It makes a node, or looks first where the lock was busy before.
        let attempt = tokio::spawn(behind.clone().acquire(request("k", round)));
        eventually("the attempt is sent", || async { proxy.count(asked) > before }).await;
        tokio::time::sleep(Duration::from_millis(30)).await;
        beside.clone().release(release("k", 1000 + round)).await.unwrap();
        proxy.unblock(Direction::ToClient);
        if let AcquireReply::Acquired(_) = attempt.await.unwrap().unwrap() {
            // It was slower than the holder.
            behind.clone().release(release("k", round)).await.unwrap();
            continue;
        }
        let told = tokio::time::timeout(SOON, watch.changed()).await;
        assert!(
            told.is_ok(),
            "round {round}: the lock is free, and the waiter is not told"
        );
        judged += 1;
    }
    assert!(judged > 0, "the holder was over before each attempt");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquire_that_comes_late_takes_nothing() {
    let (server, proxy, root) = setting().await;
    let beside = Arc::new(patient(server.addr(), &root, LONG).await);
    let behind = Arc::new(store(proxy.addr(), &root, LONG, TIMEOUT).await);
    let late = proxy.hold(1, |request| request.creates());
    let acquire = behind.clone().acquire(request("k", 1)).await;
    let error = acquire.expect_err("the request was held");
    assert_eq!(error.outcome, Outcome::Unknown, "{error:?}");
    late.caught().await;
    // It is answered when the acquire can do nothing any more.
    let released = answered(|| behind.clone().release(release("k", 1))).await;
    assert!(
        matches!(released, Ok(ReleaseReply::NotHeld { .. })),
        "{released:?}"
    );
    late.release();
    late.delivered().await;
    let reply = beside.clone().acquire(request("k", 2)).await.unwrap();
    assert!(matches!(reply, AcquireReply::Acquired(_)), "{reply:?}");
    assert_eq!(beside.clone().inspect("k".into()).await.unwrap().len(), 1);
}

/// Servers refuse a request from a connection that the session has left for another server; not so when it has just come
/// back. Rounds in which it is refused are as good.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquire_that_comes_as_late_as_its_session_comes_back_takes_nothing() {
    let servers = Ensemble::start().await;
    let ways = servers.servers()[..2].iter();
    let ways: Vec<ZkProxy> = ways.map(|server| ZkProxy::start(server.addr())).collect();
    let root = fresh_root();
    let beside = client(&patient(servers.servers()[2].addr(), &root, LONG).await).await;
    let both = format!("{},{}", ways[0].addr(), ways[1].addr());
    let behind = Arc::new(store(both, &root, LONG, TIMEOUT).await);
    for round in 0..20 {
        let key = format!("k{round}");
        let asked = ways[0].count(|request| !request.is_ping());
        answered(|| behind.clone().inspect(key.as_str().into()))
            .await
            .unwrap();
        let (first, second) = match ways[0].count(|request| !request.is_ping()) > asked {
            true => (&ways[0], &ways[1]),
            false => (&ways[1], &ways[0]),
        };
        let late = first.hold(1, ZkRequest::creates);
        let error = behind.clone().acquire(request(&key, round)).await.unwrap_err();
        assert_eq!(error.outcome, Outcome::Unknown, "{error:?}");
        late.caught().await;
        let released = answered(|| behind.clone().release(release(&key, round))).await;
        assert!(
            matches!(released, Ok(ReleaseReply::NotHeld { .. })),
            "{released:?}"
        );
        second.refuse();
        second.cut();
        tokio::time::sleep(Duration::from_micros(fastrand::u64(..3000))).await;
        late.release();
        late.delivered().await;
        answered(|| behind.clone().inspect(key.as_str().into()))
            .await
            .unwrap();
        second.accept();
        drop(beside.lock(&key).wait(PATIENCE).acquire().await.unwrap());
    }
}

/// The end of the lease comes while its renewal is on the way: after that it is due once more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_whose_renewal_came_after_its_end_ends_with_that() {
    let (server, proxy, root) = setting().await;
    let beside = client(&patient(server.addr(), &root, LONG).await).await;
    let behind = Arc::new(patient(proxy.addr(), &root, LONG).await);
    let lease = Duration::from_millis(300);
    let (key, grant) = (LockKey::from("k"), GrantId::from_parts(7, 1));
    let acquire = AcquireRequest::new(Kind::Mutex, key.clone(), grant, lease);
    behind.clone().acquire(acquire).await.unwrap();
    let late = proxy.hold(1, ZkRequest::is_multi);
    let renewal = RenewRequest::new(Kind::Mutex, key, grant, 10 * lease);
    let renewal = tokio::spawn(behind.clone().renew(vec![renewal]));
    late.caught().await;
    tokio::time::sleep(2 * lease).await;
    late.release();
    let renewed = renewal.await.unwrap().unwrap();
    assert!(renewed[0].is_ok(), "{renewed:?}");
    // Only its own client has ended it: the session goes on.
    drop(beside.lock("k").wait(PATIENCE).acquire().await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_replies_cost_no_lock_and_leave_none() {
    let (server, proxy, root) = setting().await;
    let beside = client(&patient(server.addr(), &root, LONG).await).await;
    let behind = client(&store(proxy.addr(), &root, LONG, Duration::from_secs(5)).await).await;
    for round in 0..3 {
        let lost = match round {
            0 => Some(proxy.swallow(1, Swallow::Cut, |request| request.creates())),
            _ => None,
        };
        let guard = behind.lock("k").wait(PATIENCE).acquire().await.unwrap();
        if let Some(lost) = lost {
            lost.swallowed().await;
        }
        if round == 1 {
            let renewal = proxy.swallow(1, Swallow::Cut, |request| request.is_multi());
            renewal.swallowed().await;
            assert!(guard.is_held(), "{:?}", guard.state());
        }
        let busy = beside.lock("k").try_acquire().await;
        assert!(matches!(busy, Err(Error::NotAcquired { .. })), "{busy:?}");
        let lost = (round == 2).then(|| proxy.swallow(1, Swallow::Cut, |request| request.deletes()));
        guard.release().await.unwrap();
        if let Some(lost) = lost {
            lost.swallowed().await;
        }
        let next = beside.lock("k").wait(PATIENCE).acquire().await.unwrap();
        next.release().await.unwrap();
    }
}

/// At peers the node of the session before was taken for the caller's own, and the holder was not told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_that_expires_ends_its_locks_and_the_next_one_begins_without_them() {
    let (server, proxy, root) = setting().await;
    let beside = patient(server.addr(), &root, LONG).await;
    let behind = store(proxy.addr(), &root, Duration::from_secs(2), TIMEOUT).await;
    let (holder, waiter) = (client(&behind).await, client(&beside).await);
    let guard = holder.lock("k").wait(PATIENCE).acquire().await.unwrap();
    let waiting = tokio::spawn(async move { waiter.lock("k").wait(PATIENCE).acquire().await });
    proxy.block(Direction::Both);
    let taken = waiting.await.unwrap().unwrap();
    assert!(!guard.is_held(), "two clients hold the lock");
    proxy.unblock(Direction::Both);
    let lost = tokio::time::timeout(PATIENCE, guard.lost()).await;
    assert!(lost.is_ok(), "the holder is not told");
    let busy = answered(|| holder.lock("k").try_acquire()).await;
    assert!(matches!(busy, Err(Error::NotAcquired { .. })), "{busy:?}");
    assert!(taken.is_held());
    taken.release().await.unwrap();
    let again = holder.lock("k").wait(PATIENCE).acquire().await.unwrap();
    assert!(again.fencing_token() > guard.fencing_token());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_of_a_process_that_died_is_free_when_its_session_is_over() {
    let server = Zookeeper::shared().await;
    let root = fresh_root();
    let beside = client(&patient(server.addr(), &root, LONG).await).await;
    let (addr, other) = (server.addr(), root.clone());
    // Its runtime ends without a goodbye.
    let died = std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let token = runtime.block_on(async {
            let client = client(&patient(addr, &other, Duration::from_secs(2)).await).await;
            let guard = client.lock("k").acquire().await.unwrap();
            let token = guard.fencing_token();
            std::mem::forget((client, guard));
            token
        });
        runtime.shutdown_background();
        token
    });
    let token = tokio::task::spawn_blocking(|| died.join())
        .await
        .unwrap()
        .unwrap();
    let next = beside.lock("k").wait(PATIENCE).acquire().await.unwrap();
    assert!(next.fencing_token() > token);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_that_outlives_its_runtime_refuses_all_requests() {
    let server = Zookeeper::shared().await;
    let (addr, root) = (server.addr(), fresh_root());
    let opened = std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let opened = runtime.block_on(async {
            let store = patient(addr, &root, Duration::from_secs(2)).await;
            let client = client(&store).await;
            let guard = client.lock("held").acquire().await.unwrap();
            (store, client, guard)
        });
        runtime.shutdown_background();
        opened
    });
    let opened = tokio::task::spawn_blocking(|| opened.join()).await.unwrap();
    let (locks, _client, guard) = opened.unwrap();
    let store = Arc::new(locks.clone());
    let acquired = within(SOON, "an acquire", store.clone().acquire(request("k", 1))).await;
    assert!(acquired.is_err(), "{acquired:?}");
    let renewal = RenewRequest::new(Kind::Mutex, "k".into(), GrantId::from_parts(7, 1), LEASE);
    let renewed = within(SOON, "a renewal", store.renew(vec![renewal])).await;
    assert!(matches!(renewed.as_deref(), Ok([Err(_)])), "{renewed:?}");
    let writes = Writes::new().create("/effect", "1");
    let written = within(SOON, "a write", locks.write_as(&guard, writes)).await;
    assert!(written.is_err(), "{written:?}");
    // Its client has no runtime to release it in.
    std::mem::forget(guard);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_shuts_down_leaves_no_session() {
    let server = Zookeeper::shared().await;
    let root = fresh_root();
    let beside = client(&patient(server.addr(), &root, LONG).await).await;
    let store = patient(server.addr(), &root, Duration::from_secs(40)).await;
    let reply = Arc::new(store.clone()).acquire(request("k", 1)).await.unwrap();
    assert!(matches!(reply, AcquireReply::Acquired(_)));
    drop(store);
    let begun = Instant::now();
    let next = beside.lock("k").wait(PATIENCE).acquire().await.unwrap();
    drop(next);
    assert!(
        begun.elapsed() < Duration::from_secs(40),
        "the session had to expire"
    );
}

/// A renewal that only keeps the session alive does not see it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_that_was_forced_open_is_lost_at_the_next_renewal() {
    let server = Zookeeper::shared().await;
    let root = fresh_root();
    let store = patient(server.addr(), &root, LONG).await;
    let holder = LockClient::builder().store(store).lease(Duration::from_secs(3));
    let holder = holder.build().await.unwrap();
    let beside = client(&patient(server.addr(), &root, LONG).await).await;
    let guard = holder.lock("k").acquire().await.unwrap();
    let other = holder.lock("other").acquire().await.unwrap();
    assert!(beside.force_release("k").await.unwrap());
    let lost = tokio::time::timeout(PATIENCE, guard.lost()).await;
    assert!(lost.is_ok() && !guard.is_held());
    drop(other);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_are_made_while_the_lock_is_held_and_never_after() {
    let server = Zookeeper::shared().await;
    let root = fresh_root();
    let locks = patient(server.addr(), &root, LONG).await;
    let holder = client(&locks).await;
    let beside = client(&patient(server.addr(), &root, LONG).await).await;
    let effect = format!("{root}-effect");
    let guard = holder.lock("k").acquire().await.unwrap();
    locks
        .write_as(&guard, Writes::new().create(&effect, "1"))
        .await
        .unwrap();
    locks
        .write_as(&guard, Writes::new().set(&effect, "2", Some(0)))
        .await
        .unwrap();
    let refused = locks
        .write_as(
            &guard,
            Writes::new().check(&effect, None).set(&effect, "3", Some(0)),
        )
        .await;
    assert!(
        matches!(&refused, Err(WriteError::Refused { at: 1, reason, .. }) if reason == "BadVersion"),
        "{refused:?}"
    );
    let nodes = locks.nodes(&guard).unwrap();
    assert_eq!(nodes.len(), 1);
    assert!(nodes[0].path.starts_with(&format!("{root}/k/_c_")), "{nodes:?}");

    // The holder does not know of it yet: only the check in the write does.
    assert!(beside.force_release("k").await.unwrap());
    let taken = beside.lock("k").acquire().await.unwrap();
    let lost = locks
        .write_as(&guard, Writes::new().set(&effect, "4", None))
        .await;
    assert!(matches!(lost, Err(WriteError::Lost { .. })), "{lost:?}");
    assert_eq!(guard.state(), HoldState::Lost(Loss::Gone), "and the guard");
    // Nothing was written meanwhile: the version is the second one.
    taken.release().await.unwrap();
    let next = holder.lock("k").wait(PATIENCE).acquire().await.unwrap();
    locks
        .write_as(&next, Writes::new().delete(&effect, Some(1)))
        .await
        .unwrap();
}

/// The server closes the connection for a longer request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_larger_than_a_request_are_refused_and_leave_the_connection_usable() {
    let (_server, proxy, root) = setting().await;
    let locks = patient(proxy.addr(), &root, LONG).await;
    let client = client(&locks).await;
    let guard = client.lock("k").acquire().await.unwrap();
    let effect = format!("{root}-effect");
    let write = |bytes: usize| locks.write_as(&guard, Writes::new().create(&effect, vec![b'x'; bytes]));
    let data = 1 << 20;
    let Err(WriteError::TooLarge { bytes, limit, .. }) = write(data).await else {
        panic!("it is longer than any server takes by default");
    };
    assert_eq!(limit, 1_048_575);
    let most = limit - (bytes - data);
    let refused = write(most + 1).await.unwrap_err().to_string();
    assert!(refused.contains("1048576 bytes"), "{refused}");
    let reconnects = client.health().reconnects;
    write(most).await.unwrap();
    assert_eq!(
        (guard.state(), client.health().reconnects),
        (HoldState::Held, reconnects)
    );
    guard.release().await.unwrap();
}

/// Ten thousand locks have to be taken first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_locks_are_renewed_by_few_requests() {
    let server = Zookeeper::start().await;
    let store = Arc::new(patient(server.addr(), "/many", LONG).await);
    let acquires = (0..10_000).map(|n| store.clone().acquire(request(&format!("k{n}"), n)));
    for reply in some_at_a_time(acquires).await {
        assert!(matches!(reply, Ok(AcquireReply::Acquired(_))), "{reply:?}");
    }
    let (before, begun) = (server.requests().await, Instant::now());
    // As a client does it: some hundreds at a time.
    let renewals = (0..50).map(|chunk| {
        let requests = (0..200).map(|n| {
            let n = chunk * 200 + n;
            RenewRequest::new(
                Kind::Mutex,
                format!("k{n}").into(),
                GrantId::from_parts(7, n),
                LEASE,
            )
        });
        store.clone().renew(requests.collect())
    });
    for replies in join_all(renewals).await {
        for reply in replies.unwrap() {
            assert!(
                matches!(reply, Ok(Renewal::Renewed | Renewal::RenewedFor(_))),
                "{reply:?}"
            );
        }
    }
    let sent = server.requests().await - before;
    are_few(sent, begun);
}

/// It counts over a third of a lease, after each lock was renewed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_locks_of_a_client_are_renewed_by_few_requests() {
    const THIRD: Duration = Duration::from_secs(10);
    let server = Zookeeper::start().await;
    let holder = client(&patient(server.addr(), "/many", LONG).await).await;
    let mut guards = Vec::new();
    for some in 0..20 {
        let keys = (0..500).map(|n| format!("k{some} {n}"));
        let acquires = keys.map(|key| holder.lock(key).lease(3 * THIRD).acquire());
        guards.extend(join_all(acquires).await.into_iter().map(Result::unwrap));
    }
    tokio::time::sleep(THIRD).await;
    let (before, began) = (server.requests().await, Instant::now());
    tokio::time::sleep(THIRD).await;
    let sent = server.requests().await - before;
    let thirds = began.elapsed().div_duration_f64(THIRD);
    assert!(
        sent as f64 <= 60.0 * thirds,
        "{sent} requests in {thirds} thirds of a lease"
    );
    eventually("each is renewed", async || server.requests().await - before >= 10).await;
}

#[tokio::test]
async fn lock_that_was_forced_open_costs_no_request_for_each_other_lock() {
    let server = Zookeeper::start().await;
    let store = Arc::new(patient(server.addr(), "/many", LONG).await);
    let acquires = (0..100).map(|n| store.clone().acquire(request(&format!("k{n}"), n)));
    for reply in join_all(acquires).await {
        assert!(matches!(reply, Ok(AcquireReply::Acquired(_))), "{reply:?}");
    }
    let renewed = async || {
        let renewals = (0..100).map(|n| {
            let grant = GrantId::from_parts(7, n);
            RenewRequest::new(Kind::Mutex, format!("k{n}").into(), grant, LEASE)
        });
        let replies = store.clone().renew(renewals.collect()).await.unwrap();
        let is_renewed = |reply: &_| matches!(reply, Ok(Renewal::Renewed | Renewal::RenewedFor(_)));
        replies.iter().filter(|reply| is_renewed(reply)).count()
    };
    for key in ["k7", "k41"] {
        assert!(store.clone().force_release(key.into()).await.unwrap());
    }
    let before = server.requests().await;
    assert_eq!(renewed().await, 98);
    let sent = server.requests().await - before;
    assert!(sent <= 10, "{sent} requests");

    for n in 50..75 {
        let forced = store.clone().force_release(format!("k{n}").as_str().into()).await;
        assert!(forced.unwrap());
    }
    assert_eq!(renewed().await, 73);
}

#[tokio::test]
async fn releases_of_many_locks_share_requests_and_one_without_its_node_costs_no_other() {
    let server = Zookeeper::start().await;
    let store = Arc::new(patient(server.addr(), "/many", LONG).await);
    let acquire_all = async || {
        let acquires = (0..64).map(|n| store.clone().acquire(request(&format!("k{n}"), n)));
        for reply in join_all(acquires).await {
            assert!(matches!(reply, Ok(AcquireReply::Acquired(_))), "{reply:?}");
        }
    };
    let release_all = async || {
        let releases = (0..64).map(|n| store.clone().release(release(&format!("k{n}"), n)));
        let replies = join_all(releases).await;
        let is_released = |reply: &_| matches!(reply, Ok(ReleaseReply::Released { .. }));
        replies.iter().filter(|reply| is_released(reply)).count()
    };
    acquire_all().await;
    let before = server.requests().await;
    assert_eq!(release_all().await, 64);
    let sent = server.requests().await - before;
    assert!(sent <= 24, "{sent} requests for 64 locks");

    acquire_all().await;
    let other = Arc::new(patient(server.addr(), "/many", LONG).await);
    assert!(other.force_release("k40".into()).await.unwrap());
    assert_eq!(release_all().await, 63);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_of_a_user_are_closed_to_others() {
    let server = Zookeeper::shared().await;
    let root = fresh_root();
    let url = |user: &str| format!("zookeeper://{user}{}{root}", server.addr());
    let built = |url: String| async move {
        let builder = LockClient::builder().scheme(dlock_zookeeper::scheme()).url(url);
        builder.timeout(PATIENCE).build().await
    };
    let (owner, same, other) = (
        built(url("svc:s%40cret@")).await.unwrap(),
        built(url("svc:s%40cret@")).await.unwrap(),
        built(url("svc:other@")).await.unwrap(),
    );
    let guard = owner.lock("k").acquire().await.unwrap();
    assert!(matches!(
        same.lock("k").try_acquire().await,
        Err(Error::NotAcquired { .. })
    ));
    let refused = other.lock("k").try_acquire().await;
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
    guard.release().await.unwrap();
}

#[tokio::test]
async fn url_that_makes_no_sense_is_refused() {
    for (url, said) in [
        ("zookeeper://h/a//b", "root"),
        ("zookeeper://h:port/a", "port"),
        ("zookeeper://", "host"),
        ("zookeeper://svc:s3cret/a", "port"),
        ("zookeeper://h/a?session=soon", "session"),
        ("zookeeper://h/a?tick=60s", "tick"),
        ("zookeeper://h/a?tick=0s", "at least 10ms"),
        ("zookeeper://svc@h/a", "user:password"),
        ("zookeeper://svc:@h/a", "password"),
        ("zookeeper://h/a?acl=creator", "user"),
        ("zookeeper://h/a?acl=all", "acl"),
        ("zookeeper://h/a?sesion=15s", "sesion"),
        ("zookeeper://h/zookeeper", "servers' own"),
    ] {
        let builder = LockClient::builder().scheme(dlock_zookeeper::scheme()).url(url);
        let error = builder.build().await.expect_err(url).to_string();
        assert!(error.contains(said), "{url}: {error}");
        assert!(!error.contains("s3cret"), "{error}");
    }
}

/// With shorter sessions than were asked for, every lease would be over when it is granted.
#[tokio::test]
async fn tick_that_leaves_nothing_of_the_session_is_refused() {
    let server = Zookeeper::start_with("maxSessionTimeout=2000\n").await;
    for (session, tick) in [("30s", "5s"), ("2s", "1800ms")] {
        let url = format!("zookeeper://{}/a?session={session}&tick={tick}", server.addr());
        let builder = || LockClient::builder().scheme(dlock_zookeeper::scheme()).url(&url);
        let refused = answered(|| builder().timeout(PATIENCE).build()).await;
        let error = refused.map(drop).expect_err("no lease is left");
        assert!(matches!(error, Error::Refused { .. }), "{error:?}");
        assert!(
            error.to_string().contains(tick.trim_end_matches("800ms")),
            "{error}"
        );
    }
    let usual = store(server.addr(), &fresh_root(), LONG, PATIENCE).await;
    drop(client(&usual).await.lock("k").acquire().await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn path_of_a_lock_is_what_curator_takes() {
    let server = Zookeeper::shared().await;
    let root = fresh_root();
    let builder = ZookeeperLocks::builder(&server.addr().to_string())
        .root(&root)
        .prefix("shop:");
    let locks = builder.timeout(PATIENCE).connect().await.unwrap();
    for (key, name) in [
        ("k", "shop:k"),
        ("a/b%", "shop:a%2Fb%25"),
        ("größe", "shop:größe"),
    ] {
        assert_eq!(locks.path(&LockKey::from(key)), format!("{root}/{name}"));
    }
    let client = client(&locks).await;
    let guard = client.lock("a/b%").acquire().await.unwrap();
    eventually("the lock is listed by its key", || async {
        let listed = client.list("a/").await.unwrap();
        let mut fits = listed.iter().filter(|(key, _)| key.as_str() == "a/b%");
        fits.any(|(_, holder)| holder.ends_with.is_some_and(|what| what.contains("session")))
    })
    .await;
    drop(guard);
}

/// Each waits for those before it, and all of them for the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquires_of_one_key_end_in_bounded_time_while_no_server_answers() {
    let (_server, proxy, root) = setting().await;
    let store = Arc::new(store(proxy.addr(), &root, LONG, TIMEOUT).await);
    proxy.block(Direction::Both);
    let asked = (1..=400).map(|number| store.clone().acquire(request("k", number)));
    let replies = within(PATIENCE, "all are answered", join_all(asked)).await;
    assert!(replies.iter().all(Result::is_err));
    proxy.unblock(Direction::Both);
}
