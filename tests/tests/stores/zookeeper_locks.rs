//! Locks on ZooKeeper as clients see them: kinds that it has not, an end without a word, a server without space.

use dlock::{Error, LockClient};
use dlock_tests::eventually;
use dlock_tests::faults::{PATIENCE, is_confirmed, within};
use dlock_tests::zookeeper::{ZkProxy, Zookeeper};
use futures_util::future::join_all;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::scenes::{MS, SEC, in_scenes};
use crate::zookeeper_conformance::Root;
use crate::zookeeper_support::{LONG, TIMEOUT, client, fresh_root, patient, setting, store};

in_scenes! { Root:
    fn tokens_never_go_back() = tokens_never_go_back(Zookeeper::shared());
    fn holds_survive_a_restart_and_waiters_go_on() = holds_survive_a_restart_and_waiters_go_on(Zookeeper::start());
    fn broken_connections_cost_nothing_that_is_held() = broken_connections_cost_nothing_that_is_held(Zookeeper::shared());
    /// The lease is shorter than the session, and a client that knows nothing of its end ends it.
    fn holder_is_lost_before_the_lease_ends() = holder_is_lost_before_the_lease_ends(Zookeeper::start());
}

#[tokio::test]
async fn what_zookeeper_has_not_is_refused_before_anything_is_sent() {
    let (_server, proxy, root) = setting().await;
    let client = client(&patient(proxy.addr(), &root, LONG).await).await;
    let sent = proxy.count(|request| !request.is_ping());
    let refused = [
        (
            "unowned",
            client.unowned_semaphore("k").try_acquire().await.map(drop),
        ),
        ("unowned", client.unowned_semaphore("k").drain().await.map(drop)),
        ("unowned", client.unowned_semaphore("k").delete().await.map(drop)),
        (
            "min_hold",
            client.lock("k").min_hold(SEC).acquire().await.map(drop),
        ),
        (
            "fixed",
            client.lock("k").fixed_lease(SEC).acquire().await.map(drop),
        ),
    ];
    for (what, refused) in refused {
        let error = refused.expect_err(what);
        assert!(matches!(error, Error::Unsupported { .. }), "{what}: {error:?}");
        let said = error.to_string();
        assert!(
            said.contains("not supported") && said.contains(what),
            "{what}: {said}"
        );
    }
    assert_eq!(proxy.count(|request| !request.is_ping()), sent);
    drop(client.lock("k").try_acquire().await.unwrap());
}

/// The node of a writer whose try fails is in the queue for a moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_are_not_kept_out_by_writers_whose_tries_fail() {
    let (server, root) = (Zookeeper::shared().await, fresh_root());
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(client(&patient(server.addr(), &root, LONG).await).await);
    }
    let [reads, writes, reads_too] = <[LockClient; 3]>::try_from(clients).unwrap();
    let _reading = reads.rw_lock("k").read().acquire().await.unwrap();
    let write = async || writes.rw_lock("k").write().try_acquire().await.unwrap_err();
    assert!(write().await.is_busy());
    let trying = async {
        loop {
            assert!(write().await.is_busy());
        }
    };
    let reading = async {
        for _ in 0..300 {
            let read = reads_too.rw_lock("k").read().try_acquire().await;
            read.expect("only readers have it").release().await.unwrap();
        }
    };
    tokio::select! {
        () = trying => {}
        () = reading => {}
    }
}

/// In other libraries: each wait leaves a watch behind, and the server keeps them all. At most two here for each lock that
/// is waited for, on its nodes and on its creation.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_that_come_and_go_leave_no_watches() {
    let server = Zookeeper::start().await;
    let root = fresh_root();
    let process = async || client(&patient(server.addr(), &root, LONG).await).await;
    let (holder, waiter) = (process().await, process().await);
    let watches = async || server.counted("zk_watch_count").await;
    for round in 0..200 {
        let guard = holder.lock("k").acquire().await.unwrap();
        let impatient = timeout(fastrand::u32(1..10) * MS, waiter.lock("k").acquire()).await;
        assert!(impatient.is_err(), "another one has it");
        let waiting = tokio::spawn(waiter.lock("k").acquire());
        sleep(fastrand::u32(0..5) * MS).await;
        guard.release().await.unwrap();
        let next = within(PATIENCE, "the waiter goes on", waiting).await;
        next.unwrap().unwrap().release().await.unwrap();
        let left = watches().await;
        assert!(left <= 4, "{left} watches of two clients after round {round}");
    }
    // Those of waiters that have given up end with the locks.
    let held = join_all((0..100).map(|n| holder.lock(format!("k{n}")).acquire())).await;
    let waiting = (0..100).map(|n| tokio::spawn(waiter.lock(format!("k{n}")).acquire()));
    let waiting: Vec<_> = waiting.collect();
    eventually("each has a watch", async || watches().await >= 100).await;
    waiting.iter().for_each(JoinHandle::abort);
    for guard in held {
        guard.unwrap().release().await.unwrap();
    }
    eventually("the watches are gone", async || watches().await <= 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_client_leaves_no_session_no_connection_and_no_node() {
    let server = Zookeeper::start().await;
    for what in ["is idle", "holds", "waits", "asks", "has lost its server"] {
        let proxy = ZkProxy::start(server.addr());
        let root = fresh_root();
        let beside = client(&patient(server.addr(), &root, LONG).await).await;
        let here = client(&store(proxy.addr(), &root, 2 * SEC, SEC).await).await;
        let _guard = match what {
            "holds" => Some(here.lock("k").acquire().await.unwrap()),
            "waits" => Some(beside.lock("k").acquire().await.unwrap()),
            _ => None,
        };
        let acquiring = matches!(what, "waits" | "asks").then(|| tokio::spawn(here.lock("k").acquire()));
        match (what, &acquiring) {
            ("waits", _) => sleep(100 * MS).await,
            // Dropped on the way.
            ("asks", _) => tokio::task::yield_now().await,
            ("has lost its server", _) => {
                proxy.refuse();
                proxy.cut();
            }
            _ => {}
        }
        if let Some(acquiring) = acquiring {
            acquiring.abort();
            let _ = acquiring.await;
        }
        drop((_guard, here, beside));
        eventually(&format!("all is gone of a client that {what}"), async || {
            // One connection asks.
            server.sessions().await == 0
                && server.counted("zk_ephemerals_count").await == 0
                && server.counted("zk_num_alive_connections").await <= 1
                && proxy.connections_open() == 0
        })
        .await;
    }
}

/// A server ends itself when it cannot write its log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_without_space_grants_nothing_and_keeps_what_it_granted() {
    let server = Zookeeper::start_on_a_disk(8 << 20).await;
    let root = fresh_root();
    let hasty = store(server.addr(), &root, LONG, TIMEOUT).await;
    let (holder, waiter) = (client(&hasty).await, client(&hasty).await);
    let impatient = LockClient::builder().store(hasty.clone()).retry_for(SEC);
    let impatient = impatient.build().await.unwrap();
    let guard = within(PATIENCE, "the lock", holder.lock("k").acquire())
        .await
        .unwrap();
    let waiting = tokio::spawn(waiter.lock("k").acquire());
    sleep(100 * MS).await;
    server.fill_disk();
    eventually("it has ended", async || {
        let acquired = impatient.lock("new").acquire().await;
        assert!(
            matches!(
                acquired,
                Ok(_) | Err(Error::Unreachable { .. } | Error::OutcomeUnknown { .. })
            ),
            "{acquired:?}"
        );
        !server.is_awake()
    })
    .await;
    let error = impatient.lock("new").acquire().await.unwrap_err();
    assert!(
        matches!(error, Error::Unreachable { .. } | Error::OutcomeUnknown { .. }),
        "{error:?}"
    );
    assert!(guard.is_held() && !waiting.is_finished());
    server.free_disk();
    server.restart().await;
    is_confirmed(&guard).await;
    assert!(!waiting.is_finished());
    let new = within(PATIENCE, "there is space", holder.lock("new").acquire()).await;
    new.unwrap().release().await.unwrap();
    let token = guard.fencing_token();
    guard.release().await.unwrap();
    let next = within(PATIENCE, "the waiter goes on", waiting).await;
    let next = next.unwrap().unwrap();
    assert!(next.fencing_token() > token);
    next.release().await.unwrap();
    let free = async || waiter.list("").await.is_ok_and(|held| held.is_empty());
    eventually("nothing is left", free).await;
}
