//! Fair locks on ZooKeeper: the waiters' nodes are the queue, whatever happens to servers, connections and waiters.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::store::{
    AcquireReply, AcquireRequest, GrantId, Kind, Outcome, ReleaseReply, ReleaseRequest, Store,
};
use dlock::{Error, HoldState, LockClient, LockKind, distributed_lock};
use dlock_tests::faults::{PATIENCE, answered, is_confirmed, within};
use dlock_tests::zookeeper::{Ensemble, ZkProxy, ZkRequest, Zookeeper};
use dlock_tests::{Direction, Inside, eventually};
use dlock_tower::task::TaskLockLayer;
use dlock_zookeeper::{WriteError, Writes, ZookeeperLocks};
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tower::{Layer, ServiceExt, service_fn};

use crate::scenes::{MS, SEC};
use crate::zookeeper_support::{LEASE, LONG, TIMEOUT, client, fresh_root, patient, store};

/// The waiters in the order in which they were served, with their tokens.
type Order = Arc<Mutex<Vec<(usize, u64)>>>;

/// A server whose only nodes without a future are those of one lock.
struct Setting {
    server: Zookeeper,
    root: String,
}

impl Setting {
    async fn new() -> Setting {
        Setting {
            server: Zookeeper::start().await,
            root: fresh_root(),
        }
    }

    async fn store(&self) -> ZookeeperLocks {
        patient(self.server.addr(), &self.root, LONG).await
    }

    /// A process of its own.
    async fn client(&self) -> LockClient {
        client(&self.store().await).await
    }

    /// Waits until so many nodes are in the queue, the holder's included.
    async fn in_queue(&self, count: u64) {
        eventually(&format!("{count} nodes are in the queue"), async || {
            self.server.counted("zk_ephemerals_count").await == count
        })
        .await;
    }

    /// A waiter that has joined the queue by the time this returns, and releases the lock when it is served.
    async fn waiter(&self, client: &LockClient, name: usize, order: &Order) -> JoinHandle<()> {
        let waiter = self.joining(client, name, order).await;
        // Its process sends requests on one lock in order, so this is answered after those that join.
        answered(|| client.inspect("k"))
            .await
            .expect("the server answers");
        waiter
    }

    /// A waiter whose node is in the queue by the time this returns; its process may not have the answer yet.
    async fn joining(&self, client: &LockClient, name: usize, order: &Order) -> JoinHandle<()> {
        let before = self.server.counted("zk_ephemerals_count").await;
        let (lock, order) = (client.fair_lock("k").wait(PATIENCE), order.clone());
        let waiter = tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            order.lock().push((name, guard.fencing_token()));
            guard.release().await.unwrap();
        });
        self.in_queue(before + 1).await;
        waiter
    }

    /// All waiters were served in this order, with tokens that grow.
    async fn served(&self, waiters: Vec<JoinHandle<()>>, order: &Order, names: &[usize]) {
        for waiter in waiters {
            within(PATIENCE, "each waiter is served", waiter).await.unwrap();
        }
        let served = std::mem::take(&mut *order.lock());
        let found: Vec<usize> = served.iter().map(|(name, _)| *name).collect();
        assert_eq!(found, names);
        assert!(served.windows(2).all(|pair| pair[0].1 < pair[1].1), "{served:?}");
        self.in_queue(0).await;
    }
}

/// A store whose locks outlive a server that is slow to start, and that soon tries another connection.
async fn lasting(servers: impl ToString, root: &str) -> ZookeeperLocks {
    let servers = servers.to_string();
    let builder = || ZookeeperLocks::builder(&servers).root(root).session(40 * SEC);
    let connected = answered(|| builder().tick(SEC).timeout(5 * SEC).connect()).await;
    connected.expect("the server is there")
}

fn request(number: u64) -> AcquireRequest {
    let grant = GrantId::from_parts(7, number);
    let mut request = AcquireRequest::new(Kind::Fair, "k".into(), grant, LEASE);
    request.queue = true;
    request
}

fn release(number: u64) -> ReleaseRequest {
    ReleaseRequest::new(Kind::Fair, "k".into(), GrantId::from_parts(7, number))
}

/// Asks again, as a waiter does that has a position.
async fn asks(store: &Arc<ZookeeperLocks>, number: u64) -> AcquireReply {
    let mut request = request(number);
    request.last_asked = Some(SEC);
    store.clone().acquire(request).await.unwrap()
}

/// Waits until the client has carried out what dropped calls had begun: the steps on a lock have an order.
async fn is_idle(client: &LockClient) {
    client.inspect("k").await.unwrap();
}

fn is_granted(reply: &AcquireReply) -> bool {
    matches!(reply, AcquireReply::Acquired(_))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_of_all_processes_are_served_in_order_of_arrival() {
    let setting = Setting::new().await;
    let clients = join_all((0..3).map(|_| setting.client())).await;
    let order = Order::default();
    let guard = clients[0].fair_lock("k").acquire().await.unwrap();
    let mut waiters = Vec::new();
    for i in 0..12 {
        waiters.push(
            setting
                .waiter(&clients[[0, 1, 1, 2, 0, 2][i % 6]], i, &order)
                .await,
        );
    }
    // Neither a plain lock nor a try overtakes them.
    for busy in [
        clients[1].lock("k").try_acquire().await.map(drop),
        clients[2].fair_lock("k").try_acquire().await.map(drop),
    ] {
        assert!(matches!(busy, Err(Error::NotAcquired { .. })), "{busy:?}");
    }
    guard.release().await.unwrap();
    setting
        .served(waiters, &order, &(0..12).collect::<Vec<_>>())
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_that_gives_up_or_is_dropped_leaves_no_node_and_delays_no_other() {
    let setting = Setting::new().await;
    let clients = join_all((0..2).map(|_| setting.client())).await;
    let order = Order::default();
    let guard = clients[0].fair_lock("k").acquire().await.unwrap();
    for _ in 0..100 {
        let client = &clients[fastrand::usize(0..2)];
        // Dropped wherever it is by then.
        let pause = Duration::from_micros(fastrand::u64(0..6000));
        assert!(timeout(pause, client.fair_lock("k").acquire()).await.is_err());
    }
    let late = clients[1].fair_lock("k").wait(20 * MS).acquire().await;
    assert!(late.is_err(), "{late:?}");
    for client in &clients {
        is_idle(client).await;
    }
    setting.in_queue(1).await;

    let mut waiters = Vec::new();
    for i in 0..8 {
        waiters.push(setting.waiter(&clients[i / 2 % 2], i, &order).await);
    }
    // The first, two in the middle, and the last.
    for name in [7, 4, 3, 0] {
        waiters.remove(name).abort();
    }
    setting.in_queue(5).await;
    guard.release().await.unwrap();
    setting.served(waiters, &order, &[1, 2, 5, 6]).await;
}

/// One release wakes the next waiter: the others go on sending what they send anyway.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_wakes_no_waiter_but_the_next() {
    const WAITERS: usize = 6;
    let setting = Setting::new().await;
    let holder = setting.client().await;
    let guard = holder.fair_lock("k").acquire().await.unwrap();
    let order = Order::default();
    let (mut proxies, mut waiters) = (Vec::new(), Vec::new());
    for name in 0..WAITERS {
        let proxy = ZkProxy::start(setting.server.addr());
        let client = client(&patient(proxy.addr(), &setting.root, LONG).await).await;
        waiters.push(setting.waiter(&client, name, &order).await);
        proxies.push((proxy, client));
    }
    // By now each listens, and has looked after that.
    sleep(500 * MS).await;
    let (begun, last) = (Instant::now(), &proxies[WAITERS - 1].0);
    let counted = || last.count(|request| !request.is_ping());
    let before = counted();
    guard.release().await.unwrap();
    setting
        .served(waiters, &order, &(0..WAITERS).collect::<Vec<_>>())
        .await;
    // A look each 10 s; that of the node before it, the list, the write that takes the lock, and the release.
    let looks = begun.elapsed().as_secs() as usize / 10 + 1;
    let sent = counted() - before;
    assert!(sent <= looks + 5, "{sent} requests in {:?}", begun.elapsed());
}

/// Steps on a lock have an order, and each join takes several round trips.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_renews_while_many_callers_of_its_process_join_on_a_slow_network() {
    const CALLERS: usize = 300;
    let setting = Setting::new().await;
    let proxy = ZkProxy::start(setting.server.addr());
    let client = client(&patient(proxy.addr(), &setting.root, LONG).await).await;
    proxy.delay(Direction::ToServer, 20 * MS, Duration::ZERO);
    let lease = 5 * SEC;
    let guard = client.fair_lock("k").lease(lease).acquire().await.unwrap();
    let callers: Vec<_> = (0..CALLERS)
        .map(|_| tokio::spawn(client.fair_lock("k").wait(PATIENCE).acquire().into_future()))
        .collect();
    let begun = Instant::now();
    while begun.elapsed() < 2 * lease {
        let state = guard.state();
        assert!(
            !matches!(state, HoldState::Lost(_)),
            "{state:?} after {:?}",
            begun.elapsed()
        );
        sleep(50 * MS).await;
    }
    proxy.delay(Direction::ToServer, Duration::ZERO, Duration::ZERO);
    callers.iter().for_each(JoinHandle::abort);
    guard.release().await.unwrap();
    setting.in_queue(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_for_a_fair_lock_leave_no_watches() {
    let setting = Setting::new().await;
    let (holder, waiter) = (setting.client().await, setting.client().await);
    for round in 0..100 {
        let guard = holder.fair_lock("k").acquire().await.unwrap();
        for _ in 0..2 {
            let pause = fastrand::u32(1..10) * MS;
            assert!(timeout(pause, waiter.fair_lock("k").acquire()).await.is_err());
        }
        guard.release().await.unwrap();
        is_idle(&waiter).await;
        setting.in_queue(0).await;
        let left = setting.server.counted("zk_watch_count").await;
        assert!(left <= 1, "{left} watches after round {round}");
    }
}

/// Fair and plain locks of one name are the same lock, and the tokens of both grow together.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fair_and_plain_holders_never_overlap_and_their_tokens_grow() {
    let setting = Setting::new().await;
    let clients = join_all((0..3).map(|_| setting.client())).await;
    let inside = Inside::default();
    let tasks = (0..12_usize).map(|task| {
        let (lock, inside) = (clients[task % 3].lock("k"), &inside);
        let lock = match task % 4 {
            0 => lock,
            _ => lock.kind(LockKind::Fair),
        };
        async move {
            for _ in 0..15 {
                let patience = match fastrand::u32(0..3) {
                    0 => fastrand::u32(1..20) * MS,
                    _ => PATIENCE,
                };
                let Ok(guard) = timeout(patience, lock.acquire()).await else {
                    continue;
                };
                let guard = guard.unwrap();
                inside.write(guard.fencing_token());
                sleep(fastrand::u32(0..2) * MS).await;
                inside.written();
                guard.release().await.unwrap();
                // A plain lock passes no fair waiter.
                sleep(fastrand::u32(0..5) * MS).await;
            }
        }
    });
    join_all(tasks).await;
    assert!(inside.turns() > 60, "{inside:?}");
    setting.in_queue(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_whose_session_ends_joins_again_behind_the_others() {
    let setting = Setting::new().await;
    let proxy = ZkProxy::start(setting.server.addr());
    let short = client(&store(proxy.addr(), &setting.root, 2 * SEC, TIMEOUT).await).await;
    let (holder, beside) = (setting.client().await, setting.client().await);
    let order = Order::default();
    let guard = holder.fair_lock("k").acquire().await.unwrap();
    let early = setting.waiter(&short, 0, &order).await;
    let late = setting.waiter(&beside, 1, &order).await;
    // For the servers it is as if its process were gone.
    proxy.block(Direction::Both);
    setting.in_queue(2).await;
    proxy.unblock(Direction::Both);
    setting.in_queue(3).await;
    guard.release().await.unwrap();
    setting.served(vec![early, late], &order, &[1, 0]).await;
}

/// A dead waiter holds the others up for as long as its session lasts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn position_of_a_dead_process_ends_with_its_session() {
    let setting = Setting::new().await;
    let proxy = ZkProxy::start(setting.server.addr());
    let dead = client(&store(proxy.addr(), &setting.root, 2 * SEC, TIMEOUT).await).await;
    let (holder, beside) = (setting.client().await, setting.client().await);
    let order = Order::default();
    let guard = holder.fair_lock("k").acquire().await.unwrap();
    let early = setting.waiter(&dead, 0, &order).await;
    let late = setting.waiter(&beside, 1, &order).await;
    proxy.refuse();
    proxy.block(Direction::Both);
    guard.release().await.unwrap();
    within(PATIENCE, "the next waiter is served", late).await.unwrap();
    assert_eq!(
        order.lock().iter().map(|(name, _)| *name).collect::<Vec<_>>(),
        [1]
    );
    early.abort();
    setting.in_queue(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn positions_survive_broken_connections_and_a_restart() {
    let setting = Setting::new().await;
    let proxy = ZkProxy::start(setting.server.addr());
    let lasting = async |addr: SocketAddr| client(&lasting(addr, &setting.root).await).await;
    let (server, behind) = (setting.server.addr(), lasting(proxy.addr()).await);
    let (holder, beside) = (lasting(server).await, lasting(server).await);
    let order = Order::default();
    let guard = holder.fair_lock("k").acquire().await.unwrap();
    let mut waiters = Vec::new();
    for (name, client) in [&behind, &beside, &behind, &beside].into_iter().enumerate() {
        waiters.push(setting.waiter(client, name, &order).await);
    }
    for _ in 0..5 {
        proxy.cut();
        sleep(fastrand::u32(0..100) * MS).await;
    }
    setting.server.restart().await;
    setting.in_queue(5).await;
    is_confirmed(&guard).await;
    guard.release().await.unwrap();
    setting.served(waiters, &order, &[0, 1, 2, 3]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_whose_request_to_join_is_not_answered_joins_again_at_the_end() {
    let setting = Setting::new().await;
    let proxy = ZkProxy::start(setting.server.addr());
    let lasting = async |addr: SocketAddr| client(&lasting(addr, &setting.root).await).await;
    let (behind, beside) = (lasting(proxy.addr()).await, lasting(setting.server.addr()).await);
    let order = Order::default();
    let guard = beside.fair_lock("k").acquire().await.unwrap();
    let mut waiters = vec![setting.waiter(&behind, 0, &order).await];
    let marks = proxy.hold(1, ZkRequest::sets_data);
    waiters.push(setting.joining(&behind, 1, &order).await);
    marks.caught().await;
    waiters.push(setting.waiter(&beside, 2, &order).await);
    proxy.cut();
    is_idle(&behind).await;
    setting.in_queue(4).await;
    guard.release().await.unwrap();
    setting.served(waiters, &order, &[0, 2, 1]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn positions_survive_leaders_that_are_killed() {
    let servers = Ensemble::start().await;
    let root = fresh_root();
    let process = async || client(&lasting(servers.addrs(), &root).await).await;
    let (holder, waiting) = (process().await, process().await);
    let guard = holder.fair_lock("k").acquire().await.unwrap();
    let order = Order::default();
    let mut waiters = Vec::new();
    for name in 0..3 {
        let leader = &servers.servers()[servers.leader().await];
        let before = leader.counted("zk_ephemerals_count").await;
        let (lock, order) = (waiting.fair_lock("k").wait(PATIENCE), order.clone());
        waiters.push(tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            order.lock().push((name, guard.fencing_token()));
            guard.release().await.unwrap();
        }));
        eventually("it is in the queue", async || {
            leader.counted("zk_ephemerals_count").await == before + 1
        })
        .await;
    }
    let leader = &servers.servers()[servers.leader().await];
    leader.kill();
    servers.leader().await;
    leader.restart().await;
    is_confirmed(&guard).await;
    guard.release().await.unwrap();
    for waiter in waiters {
        within(PATIENCE, "each waiter is served", waiter).await.unwrap();
    }
    let served = order.lock().clone();
    assert_eq!(
        served.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
        [0, 1, 2]
    );
    assert!(served.windows(2).all(|pair| pair[0].1 < pair[1].1), "{served:?}");
}

/// While it is not first, it is in nobody's way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_waiter_keeps_its_position_until_it_is_first() {
    let setting = Setting::new().await;
    let (here, there) = (Arc::new(setting.store().await), Arc::new(setting.store().await));
    assert!(is_granted(&here.clone().acquire(request(1)).await.unwrap()));
    assert!(!is_granted(&here.clone().acquire(request(2)).await.unwrap()));
    assert!(!is_granted(&there.clone().acquire(request(3)).await.unwrap()));
    // Longer than a silent waiter that is first keeps its position.
    sleep(7 * SEC).await;
    setting.in_queue(3).await;
    assert!(!is_granted(&asks(&there, 3).await));
    here.clone().release(release(1)).await.unwrap();
    setting.in_queue(1).await;
    eventually("it is told", async || is_granted(&asks(&there, 3).await)).await;
    // It asks again, and joins at the end.
    assert!(!is_granted(&asks(&here, 2).await));
    there.clone().release(release(3)).await.unwrap();
    eventually("it is told", async || is_granted(&asks(&here, 2).await)).await;
    here.clone().release(release(2)).await.unwrap();
    setting.in_queue(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_to_join_that_comes_late_takes_no_position() {
    let setting = Setting::new().await;
    let proxy = ZkProxy::start(setting.server.addr());
    let behind = Arc::new(store(proxy.addr(), &setting.root, LONG, TIMEOUT).await);
    let beside = Arc::new(setting.store().await);
    assert!(is_granted(&beside.clone().acquire(request(1)).await.unwrap()));
    let late = proxy.hold(1, ZkRequest::creates);
    let error = behind.clone().acquire(request(2)).await.unwrap_err();
    assert_eq!(error.outcome, Outcome::Unknown, "{error:?}");
    late.caught().await;
    let left = answered(|| behind.clone().release(release(2))).await;
    assert!(matches!(left, Ok(ReleaseReply::NotHeld { .. })), "{left:?}");
    late.release();
    late.delivered().await;
    setting.in_queue(1).await;
    beside.clone().release(release(1)).await.unwrap();
    assert!(is_granted(&beside.clone().acquire(request(3)).await.unwrap()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_that_asks_again_after_a_lost_release_leaves_no_second_node() {
    let setting = Setting::new().await;
    let proxy = ZkProxy::start(setting.server.addr());
    let behind = Arc::new(store(proxy.addr(), &setting.root, LONG, TIMEOUT).await);
    let beside = Arc::new(setting.store().await);
    assert!(is_granted(&beside.clone().acquire(request(1)).await.unwrap()));
    let waits = answered(|| behind.clone().acquire(request(2))).await;
    assert!(!is_granted(&waits.unwrap()));
    setting.in_queue(2).await;
    let lost = proxy.lose(1, ZkRequest::deletes);
    let left = behind.clone().release(release(2)).await;
    assert!(left.is_err() && lost.fired(), "{left:?}");
    let again = answered(|| behind.clone().acquire(request(2))).await;
    assert!(!is_granted(&again.unwrap()));
    setting.in_queue(2).await;
    beside.clone().release(release(1)).await.unwrap();
    eventually("it is served", async || {
        let asked = answered(|| behind.clone().acquire(request(2))).await;
        asked.is_ok_and(|reply| is_granted(&reply))
    })
    .await;
    answered(|| behind.clone().release(release(2))).await.unwrap();
    setting.in_queue(0).await;
}

/// A waiter that is first has not taken the lock yet: it is no holder, and no forced release costs it its position.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_that_is_first_is_no_holder_until_it_takes_the_lock() {
    let setting = Setting::new().await;
    let (here, there) = (Arc::new(setting.store().await), Arc::new(setting.store().await));
    let first = here.clone().acquire(request(1)).await.unwrap();
    assert!(is_granted(&first));
    assert!(!is_granted(&there.clone().acquire(request(2)).await.unwrap()));
    assert!(!is_granted(&there.clone().acquire(request(3)).await.unwrap()));
    let held = here.clone().inspect("k".into()).await.unwrap();
    assert_eq!(held.len(), 1, "{held:?}");
    assert_eq!(held[0].id, GrantId::from_parts(7, 1).to_string());
    // The next waiter is served.
    assert!(here.clone().force_release("k".into()).await.unwrap());
    for empty in [
        here.clone().inspect("k".into()).await.unwrap().len(),
        here.clone().list(String::new()).await.unwrap().len(),
    ] {
        assert_eq!(empty, 0);
    }
    assert!(!here.clone().force_release("k".into()).await.unwrap());
    assert!(!is_granted(&asks(&there, 3).await));
    assert!(is_granted(&asks(&there, 2).await));
    let held = here.clone().inspect("k".into()).await.unwrap();
    assert_eq!(held[0].id, GrantId::from_parts(7, 2).to_string());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forced_release_moves_on_to_the_next_waiter_and_its_holder_is_told() {
    let setting = Setting::new().await;
    let builder = LockClient::builder().store(setting.store().await).lease(3 * SEC);
    let holder = builder.build().await.unwrap();
    let beside = setting.client().await;
    let order = Order::default();
    let guard = holder.fair_lock("k").acquire().await.unwrap();
    let mut waiters = Vec::new();
    for name in 0..3 {
        waiters.push(setting.waiter(&beside, name, &order).await);
    }
    assert!(beside.force_release("k").await.unwrap());
    setting.served(waiters, &order, &[0, 1, 2]).await;
    within(PATIENCE, "the holder is told", guard.lost()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_of_a_holder_that_waited_are_made_while_it_holds_and_never_after() {
    let setting = Setting::new().await;
    let (before, locks) = (setting.client().await, setting.store().await);
    let holder = client(&locks).await;
    let effect = format!("{}-effect", setting.root);
    let guard = before.fair_lock("k").acquire().await.unwrap();
    let waiting = tokio::spawn(holder.fair_lock("k").wait(PATIENCE).acquire());
    setting.in_queue(2).await;
    guard.release().await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    let write = |value: &str| Writes::new().set(&effect, value, None);
    locks
        .write_as(&guard, Writes::new().create(&effect, "1"))
        .await
        .unwrap();
    locks.write_as(&guard, write("2")).await.unwrap();
    assert!(before.force_release("k").await.unwrap());
    let lost = locks.write_as(&guard, write("3")).await;
    assert!(matches!(lost, Err(WriteError::Lost { .. })), "{lost:?}");
}

#[distributed_lock(key = "k", kind = fair, lock = client)]
async fn attribute<F: Future<Output = ()>>(client: &LockClient, work: F) -> Result<(), Error> {
    work.await;
    Ok(())
}

/// Works as the holder of the current lock.
async fn work(inside: &Inside) {
    inside.write(dlock::current().expect("the lock").fencing_token());
    sleep(2 * MS).await;
    inside.written();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attribute_and_layer_of_kind_fair_exclude_each_other() {
    let setting = Setting::new().await;
    let clients = [setting.client().await, setting.client().await];
    let inside = Arc::new(Inside::default());
    let calls = (0..12).map(|call| {
        let (client, inside) = (&clients[call % 2], inside.clone());
        async move {
            if call % 3 == 0 {
                return attribute(client, work(&inside)).await.unwrap();
            }
            let layer = TaskLockLayer::new(client.clone(), |(): &()| "k".into());
            let layer = layer.kind(LockKind::Fair).unwrap().wait(PATIENCE);
            let works = service_fn(move |(): ()| {
                let inside = inside.clone();
                async move {
                    work(&inside).await;
                    Ok::<_, Infallible>(())
                }
            });
            layer.layer(works).oneshot(()).await.unwrap();
        }
    });
    join_all(calls).await;
    assert_eq!(inside.turns(), 12);
    setting.in_queue(0).await;
}
