//! Semaphores and latches on ZooKeeper, whatever happens to servers, connections, waiters and holders.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use dlock::store::counter::{CounterReply, CounterRequest, CounterStep, Counters};
use dlock::store::{
    AcquireReply, AcquireRequest, GrantId, Kind, Outcome, ReleaseReply, ReleaseRequest, RenewRequest,
    Renewal, Store,
};
use dlock::{Error, LockClient, Semaphore};
use dlock_tests::faults::{PATIENCE, answered, are_few, some_at_a_time, within};
use dlock_tests::zookeeper::{Ensemble, ZkProxy, ZkRequest, Zookeeper};
use dlock_tests::{Direction, eventually};
use dlock_tower::task::LimitLayer;
use dlock_zookeeper::{WriteError, Writes, ZookeeperLocks};
use futures_util::future::join_all;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tower::{Layer, ServiceExt, service_fn};

use crate::losses::LOSSES;
use crate::scenes::{MS, SEC};
use crate::zookeeper_support::{LEASE, LONG, TIMEOUT, client, fresh_root, patient, setting, store};

/// A server whose only nodes without a future are those of one semaphore.
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

    async fn store(&self) -> Arc<ZookeeperLocks> {
        Arc::new(patient(self.server.addr(), &self.root, LONG).await)
    }

    /// A process of its own.
    async fn client(&self) -> LockClient {
        client(&*self.store().await).await
    }

    /// Waits until so many nodes are there: one for each permit that is held, one for each process that waits, and for a
    /// minute one for each step on the number.
    async fn has_nodes(&self, count: u64) {
        eventually(&format!("{count} nodes are there"), async || {
            self.server.counted("zk_ephemerals_count").await == count
        })
        .await;
    }
}

/// How many permits are out at the same time.
#[derive(Default)]
struct Room {
    inside: AtomicUsize,
    most: AtomicUsize,
    visits: AtomicUsize,
}

impl Room {
    async fn visit(&self, permits: u32) {
        let permits = permits as usize;
        let inside = self.inside.fetch_add(permits, Ordering::SeqCst) + permits;
        self.most.fetch_max(inside, Ordering::SeqCst);
        self.visits.fetch_add(1, Ordering::SeqCst);
        sleep(fastrand::u32(0..4) * MS).await;
        self.inside.fetch_sub(permits, Ordering::SeqCst);
    }
}

fn request(number: u64, amount: u32) -> AcquireRequest {
    let mut request = AcquireRequest::new(Kind::Permit, "k".into(), GrantId::from_parts(7, number), LEASE);
    (request.permits, request.amount) = (Some(3), amount);
    request
}

/// As a waiter with a position.
fn waits(number: u64, amount: u32) -> AcquireRequest {
    let mut request = request(number, amount);
    request.waiter = Some(GrantId::from_parts(8, number));
    request
}

fn release(number: u64) -> ReleaseRequest {
    ReleaseRequest::new(Kind::Permit, "k".into(), GrantId::from_parts(7, number))
}

fn gives_up(number: u64) -> ReleaseRequest {
    ReleaseRequest::new(Kind::Permit, "k".into(), GrantId::from_parts(8, number))
}

async fn asks(store: &Arc<ZookeeperLocks>, request: AcquireRequest) -> AcquireReply {
    store.clone().acquire(request).await.unwrap()
}

fn is_granted(reply: &AcquireReply) -> bool {
    matches!(reply, AcquireReply::Acquired(_))
}

/// Asks until it is served, as a waiter does that is told of the end of the one before it.
async fn is_served(store: &Arc<ZookeeperLocks>, request: AcquireRequest) {
    eventually("it is served", async || {
        is_granted(&asks(store, request.clone()).await)
    })
    .await;
}

/// A store whose permits outlive a server that is slow to start, and that soon tries another connection.
async fn lasting(servers: impl ToString, root: &str) -> ZookeeperLocks {
    let servers = servers.to_string();
    let builder = || ZookeeperLocks::builder(&servers).root(root).session(40 * SEC);
    let connected = answered(|| builder().tick(SEC).timeout(5 * SEC).connect()).await;
    connected.expect("the server is there")
}

async fn available(semaphore: &Semaphore, count: i64) {
    eventually(&format!("{count} permits are available"), async || {
        semaphore
            .available()
            .await
            .is_ok_and(|available| available == count)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_permits_are_held_than_exist_whoever_gives_up() {
    const TOTAL: u32 = 4;
    let setting = Setting::new().await;
    let clients = join_all((0..3).map(|_| setting.client())).await;
    let room = Room::default();
    let tasks = (0..18_usize).map(|task| {
        let (client, room) = (&clients[task % 3], &room);
        async move {
            for _ in 0..6 {
                let amount = fastrand::u32(1..4);
                let semaphore = client.semaphore("k").permits(TOTAL).wait(PATIENCE);
                let patience = match fastrand::u32(0..3) {
                    0 => fastrand::u32(1..30) * MS,
                    _ => PATIENCE,
                };
                // Dropped wherever it is by then.
                if let Ok(permit) = timeout(patience, semaphore.acquire_many(amount)).await {
                    let permit = permit.unwrap();
                    room.visit(amount).await;
                    permit.release().await.unwrap();
                }
            }
        }
    });
    join_all(tasks).await;
    let (most, visits) = (room.most.into_inner(), room.visits.into_inner());
    assert!(
        (2..=TOTAL as usize).contains(&most) && visits > 40,
        "{most} in {visits}"
    );
    available(&clients[0].semaphore("k"), i64::from(TOTAL)).await;
    setting.has_nodes(0).await;
}

/// It is a queue of processes, as in Curator.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_for_several_permits_is_not_passed_over() {
    let setting = Setting::new().await;
    let (here, there) = (setting.store().await, setting.store().await);
    assert!(is_granted(&asks(&here, request(1, 2)).await));
    assert!(!is_granted(&asks(&there, waits(2, 2)).await));
    assert!(!is_granted(&asks(&here, request(3, 1)).await));
    assert!(!is_granted(&asks(&here, waits(4, 1)).await));
    setting.has_nodes(4).await;
    here.clone().release(release(1)).await.unwrap();
    is_served(&there, waits(2, 2)).await;
    is_served(&here, waits(4, 1)).await;
    setting.has_nodes(3).await;
    // The one that gives up is in nobody's way.
    assert!(!is_granted(&asks(&there, waits(5, 3)).await));
    assert!(!is_granted(&asks(&here, waits(6, 1)).await));
    here.clone().release(release(4)).await.unwrap();
    assert!(!is_granted(&asks(&here, waits(6, 1)).await));
    there.clone().release(gives_up(5)).await.unwrap();
    is_served(&here, waits(6, 1)).await;
    setting.has_nodes(3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_for_more_permits_than_exist_blocks_nobody_and_is_served_when_they_do() {
    let setting = Setting::new().await;
    let (a, b) = (setting.client().await, setting.client().await);
    let semaphore = a.semaphore("k").permits(2).wait(PATIENCE);
    let held = semaphore.acquire_many(2).await.unwrap();
    // One that could be served until the total was changed.
    let waiter = tokio::spawn(b.semaphore("k").wait(PATIENCE).acquire_many(2));
    setting.has_nodes(3).await;
    assert!(a.semaphore("k").set_permits(1).await.unwrap());
    // Two leases and the step: the waiter has left.
    setting.has_nodes(3).await;
    held.release().await.unwrap();
    let one = within(PATIENCE, "one", semaphore.acquire()).await.unwrap();
    assert_eq!(semaphore.available().await.unwrap(), 0);
    assert_eq!(semaphore.add_permits(2).await.unwrap().total, 3);
    let two = within(PATIENCE, "the two", waiter).await.unwrap().unwrap();
    assert_eq!(semaphore.available().await.unwrap(), 0);
    drop((one, two));
    available(&semaphore, 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn number_is_changed_below_what_is_held_drained_deleted_and_kept_over_a_restart() {
    let setting = Setting::new().await;
    let process = async || client(&lasting(setting.server.addr(), &setting.root).await).await;
    let (a, b) = (process().await, process().await);
    let semaphore = a.semaphore("k").wait(PATIENCE);
    assert!(semaphore.try_set_permits(5).await.unwrap());
    let held = semaphore.acquire_many(4).await.unwrap();
    assert!(b.semaphore("k").set_permits(2).await.unwrap());
    let status = semaphore.status().await.unwrap().unwrap();
    assert_eq!((status.total, status.held, status.available), (2, 4, -2));
    setting.server.restart().await;
    eventually("the numbers are as before", async || {
        let status = semaphore.status().await.ok().flatten();
        status.is_some_and(|status| (status.total, status.held) == (2, 4))
    })
    .await;
    let few = b.semaphore("k").remove_permits(3).await;
    assert!(few.is_err(), "{few:?}");
    held.release().await.unwrap();
    available(&semaphore, 2).await;
    let store = setting.store().await;
    let drain = || {
        CounterRequest::new(
            "k".into(),
            GrantId::from_parts(9, fastrand::u64(..)),
            CounterStep::Drain,
        )
    };
    assert!(is_granted(&asks(&store, request(1, 1)).await));
    assert_eq!(
        store.clone().count(drain()).await.unwrap(),
        CounterReply::Number(1)
    );
    assert_eq!(
        store.clone().count(drain()).await.unwrap(),
        CounterReply::Number(0)
    );
    assert_eq!(semaphore.status().await.unwrap().unwrap().total, 1);
    assert!(semaphore.delete().await.unwrap() && !b.semaphore("k").delete().await.unwrap());
    assert_eq!(b.semaphore("k").status().await.unwrap(), None);
    // Its holders have lost it, and the key is free.
    let renewal = RenewRequest::new(Kind::Permit, "k".into(), GrantId::from_parts(7, 1), LEASE);
    let renewed = store.clone().renew(vec![renewal]).await.unwrap().remove(0);
    assert!(matches!(renewed, Ok(Renewal::Gone)), "{renewed:?}");
    a.lock("k").try_acquire().await.unwrap().release().await.unwrap();
}

/// Acquires come between the steps of a drain.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drain_takes_no_permit_that_is_held() {
    let setting = Setting::new().await;
    let (here, there) = (setting.store().await, setting.store().await);
    let mut drained_all = 0;
    for round in 0..60 {
        let step = |step| CounterRequest::new("k".into(), GrantId::from_parts(9, fastrand::u64(..)), step);
        let set = CounterStep::SetPermits {
            total: 2,
            only_unset: false,
        };
        here.clone().count(step(set)).await.unwrap();
        let (reply, drained) = tokio::join!(
            asks(&here, request(round, 1)),
            there.clone().count(step(CounterStep::Drain))
        );
        let taken = i64::from(is_granted(&reply));
        let CounterReply::Number(drained) = drained.unwrap() else {
            panic!("not a number")
        };
        let left = here.clone().count(step(CounterStep::Permits)).await.unwrap();
        let free = Some(2 - taken - i64::try_from(drained).unwrap());
        assert_eq!(
            left,
            CounterReply::Permits {
                free,
                held: taken as u64
            }
        );
        drained_all += usize::from(drained == 2);
        here.clone().release(release(round)).await.unwrap();
    }
    assert!(drained_all < 60);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_of_a_dead_process_return_with_its_session_and_a_holder_is_told_before() {
    let setting = Setting::new().await;
    let proxy = ZkProxy::start(setting.server.addr());
    let dead = client(&store(proxy.addr(), &setting.root, 4 * SEC, TIMEOUT).await).await;
    let beside = setting.client().await;
    let permit = dead.semaphore("k").permits(2).acquire_many(2).await.unwrap();
    let first = tokio::spawn(beside.semaphore("k").wait(PATIENCE).acquire());
    setting.has_nodes(3).await;
    proxy.refuse();
    proxy.block(Direction::Both);
    let lost = async {
        permit.lost().await;
        Instant::now()
    };
    let served = async {
        let permit = first.await.unwrap().unwrap();
        (permit, Instant::now())
    };
    let (lost, (_next, served)) = within(PATIENCE, "the permits", async { tokio::join!(lost, served) }).await;
    assert!(lost < served, "told {:?} later", lost.duration_since(served));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_that_give_up_leave_nothing_and_the_next_goes_on() {
    let setting = Setting::new().await;
    let clients = [setting.client().await, setting.client().await];
    let semaphore = |client: &LockClient| client.semaphore("k").permits(2).wait(PATIENCE);
    let held = semaphore(&clients[0]).acquire_many(2).await.unwrap();
    for _ in 0..100 {
        let pause = Duration::from_micros(fastrand::u64(0..8000));
        let waits = semaphore(&clients[fastrand::usize(0..2)]).acquire_many(fastrand::u32(1..3));
        assert!(timeout(pause, waits).await.is_err());
    }
    setting.has_nodes(2).await;
    let late = semaphore(&clients[1]).wait(20 * MS).acquire().await;
    assert!(late.is_err(), "{late:?}");
    let first = tokio::spawn(semaphore(&clients[1]).acquire());
    setting.has_nodes(3).await;
    let second = tokio::spawn(semaphore(&clients[0]).acquire());
    setting.has_nodes(4).await;
    first.abort();
    setting.has_nodes(3).await;
    held.release().await.unwrap();
    let next = within(PATIENCE, "the next waiter", second)
        .await
        .unwrap()
        .unwrap();
    setting.has_nodes(1).await;
    next.release().await.unwrap();
    let left = setting.server.counted("zk_watch_count").await;
    assert!(left <= 8, "{left} watches of two clients");
}

/// With a limit there is no total, and with a total none of its changes follows: neither ends a watch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_that_come_and_go_leave_no_watches_of_permits() {
    let setting = Setting::new().await;
    let (holder, waiter) = (setting.client().await, setting.client().await);
    let watches = async || setting.server.counted("zk_watch_count").await;
    let semaphore = |client: &LockClient, n: u32| {
        let semaphore = client.semaphore(format!("k{n}"));
        match n % 2 {
            0 => semaphore.limit(1),
            _ => semaphore.permits(1),
        }
    };
    let held = join_all((0..100).map(|n| semaphore(&holder, n).acquire())).await;
    let waiting = (0..100).map(|n| tokio::spawn(semaphore(&waiter, n).wait(PATIENCE).acquire()));
    let waiting: Vec<_> = waiting.collect();
    eventually("each has its watches", async || watches().await >= 200).await;
    // Those of a waiter that gives up end before the permits that it waited for are released.
    waiting[..20].iter().for_each(JoinHandle::abort);
    eventually("some have none any more", async || watches().await <= 160).await;
    for permit in held {
        permit.unwrap().release().await.unwrap();
    }
    for next in waiting.into_iter().skip(20) {
        let next = within(PATIENCE, "a waiter goes on", next).await;
        next.unwrap().unwrap().release().await.unwrap();
    }
    eventually("the watches are gone", async || watches().await == 0).await;
    // Waiters of a former topic are told all the same.
    for n in 0..2 {
        let held = semaphore(&holder, n).acquire().await.unwrap();
        let next = tokio::spawn(semaphore(&waiter, n).wait(PATIENCE).acquire());
        sleep(200 * MS).await;
        let begun = Instant::now();
        held.release().await.unwrap();
        let next = within(PATIENCE, "the waiter is told", next).await;
        next.unwrap().unwrap().release().await.unwrap();
        assert!(begun.elapsed() < 20 * SEC, "{:?}", begun.elapsed());
    }
}

/// Neither a release nor a greater total is found by asking.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_asks_nothing_until_it_is_told() {
    let setting = Setting::new().await;
    let proxy = ZkProxy::start(setting.server.addr());
    let behind = client(&patient(proxy.addr(), &setting.root, LONG).await).await;
    let holder = setting.client().await;
    let semaphore = holder.semaphore("k").permits(1);
    let sent = || proxy.count(|request| !request.is_ping());
    let mut held = semaphore.acquire().await.unwrap();
    for by_release in [true, false] {
        let waiter = tokio::spawn(behind.semaphore("k").wait(PATIENCE).acquire());
        setting.has_nodes(2).await;
        sleep(500 * MS).await;
        let before = sent();
        sleep(3 * SEC).await;
        assert_eq!(sent(), before, "it asks while it waits");
        let begun = Instant::now();
        match by_release {
            true => held.release().await.unwrap(),
            false => drop(semaphore.add_permits(1).await.unwrap()),
        }
        held = within(PATIENCE, "it is told", waiter).await.unwrap().unwrap();
        assert!(begun.elapsed() < 20 * SEC, "{:?}", begun.elapsed());
    }
}

/// While nothing changes, it is in nobody's way that it could be served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_waiter_loses_its_position_when_it_could_go_on() {
    let setting = Setting::new().await;
    let (here, there) = (setting.store().await, setting.store().await);
    let _heard = here
        .clone()
        .watch(Kind::Permit, &"k".into(), GrantId::from_parts(8, 2));
    assert!(is_granted(&asks(&here, request(1, 3)).await));
    assert!(!is_granted(&asks(&here, waits(2, 1)).await));
    assert!(!is_granted(&asks(&there, waits(3, 1)).await));
    sleep(7 * SEC).await;
    setting.has_nodes(5).await;
    here.clone().release(release(1)).await.unwrap();
    // That of the first waiter ends.
    setting.has_nodes(1).await;
    is_served(&there, waits(3, 1)).await;
    is_served(&here, waits(2, 1)).await;
    setting.has_nodes(2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_requests_take_no_permits() {
    let setting = Setting::new().await;
    let proxy = ZkProxy::start(setting.server.addr());
    let behind = Arc::new(store(proxy.addr(), &setting.root, LONG, TIMEOUT).await);
    let beside = setting.store().await;
    assert!(is_granted(&asks(&beside, request(1, 2)).await));
    let requests: [fn(&ZkRequest) -> bool; 2] = [ZkRequest::creates, ZkRequest::is_multi];
    for (is, number) in requests.into_iter().zip(2..) {
        let late = proxy.hold(1, is);
        let error = behind.clone().acquire(request(number, 1)).await.unwrap_err();
        assert_eq!(error.outcome, Outcome::Unknown, "{error:?}");
        late.caught().await;
        let left = answered(|| behind.clone().release(release(number))).await;
        assert!(matches!(left, Ok(ReleaseReply::NotHeld { .. })), "{left:?}");
        late.release();
        late.delivered().await;
        setting.has_nodes(2).await;
    }
    assert!(is_granted(&asks(&beside, request(9, 1)).await));
}

/// Waits for permits, has them confirmed and releases them, while one of the requests is lost.
async fn permits_are_held_once(hasty: &LockClient, there: &LockClient, key: &str) {
    let (waiting, semaphore) = (hasty.semaphore(key).permits(3), there.semaphore(key).permits(3));
    // Nobody has used it yet.
    let first = within(PATIENCE, key, waiting.acquire()).await.unwrap();
    within(PATIENCE, key, first.release()).await.unwrap();
    let before = within(PATIENCE, key, semaphore.acquire_many(2)).await.unwrap();
    let waiting = tokio::spawn(waiting.acquire_many(2));
    sleep(50 * MS).await;
    before.release().await.unwrap();
    let permit = within(PATIENCE, key, waiting).await.unwrap().unwrap();
    let busy = semaphore.try_acquire_many(2).await.unwrap_err();
    assert!(busy.is_busy(), "{key}: {busy}");
    eventually(key, async || permit.ensure(SEC).await.is_ok()).await;
    within(PATIENCE, key, permit.release()).await.unwrap();
    available(&semaphore, 3).await;
    within(PATIENCE, key, semaphore.acquire_many(3))
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_requests_and_replies_cost_no_permit_and_leave_none() {
    let (server, _, root) = setting().await;
    let there = client(&patient(server.addr(), &root, LONG).await).await;
    type Matches = fn(&ZkRequest) -> bool;
    let requests: [(&str, Matches, usize); 12] = [
        ("container", |request| request.operation == 19, 0),
        ("join", ZkRequest::creates, 0),
        ("join again", ZkRequest::creates, 1),
        (
            "list",
            |request| request.lists() && request.path.ends_with("/locks"),
            0,
        ),
        (
            "watch",
            |request| request.lists() && request.path.ends_with("/leases"),
            0,
        ),
        ("look", |request| request.operation == 4, 0),
        ("mark", |request| request.operation == 5, 0),
        ("take", ZkRequest::is_multi, 0),
        ("take after a wait", ZkRequest::is_multi, 1),
        ("renewal", ZkRequest::is_multi, 2),
        ("release", ZkRequest::deletes, 0),
        ("release of two", ZkRequest::is_multi, 3),
    ];
    let losing = requests.map(async |(name, is, skipped)| {
        let proxy = ZkProxy::start(server.addr());
        let hasty = client(&store(proxy.addr(), &root, LONG, TIMEOUT).await).await;
        for loss in LOSSES {
            let seen = AtomicUsize::new(0);
            let fault = loss.of(&proxy, move |request: &ZkRequest| {
                is(request) && seen.fetch_add(1, Ordering::Relaxed) >= skipped
            });
            for round in 0..10 {
                permits_are_held_once(&hasty, &there, &format!("{name}, {loss:?}, {round}")).await;
                if fault.fired() {
                    break;
                }
            }
            eventually(&format!("{name}, {loss:?} is lost"), async || fault.fired()).await;
        }
    });
    join_all(losing).await;
    assert_eq!(there.list("").await.unwrap().len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_of_counters_are_carried_out_once_whatever_is_lost() {
    let (server, _, root) = setting().await;
    let there = client(&patient(server.addr(), &root, LONG).await).await;
    let losing = LOSSES.into_iter().map(async |loss| {
        let proxy = ZkProxy::start(server.addr());
        let hasty = client(&store(proxy.addr(), &root, LONG, TIMEOUT).await).await;
        let (semaphore, latch) = (format!("semaphore {loss:?}"), format!("latch {loss:?}"));
        let (semaphore, latch) = (hasty.semaphore(semaphore), hasty.latch(latch));
        let (mut total, mut fired) = (0, 0);
        for _ in 0..4 {
            let faults = [ZkRequest::is_multi, |request: &ZkRequest| request.operation == 9]
                .map(|is| loss.of(&proxy, is));
            let status = within(PATIENCE, "more permits", semaphore.add_permits(2))
                .await
                .unwrap();
            total += 2;
            assert_eq!(status.total, total, "{loss:?}");
            fired += faults.iter().filter(|fault| fault.fired()).count();
        }
        assert!(fired > 0, "{loss:?}");
        assert!(within(PATIENCE, "a latch", latch.try_set_count(4)).await.unwrap());
        for left in (0..4).rev() {
            let _fault = loss.of(&proxy, ZkRequest::is_multi);
            let counted = within(PATIENCE, "one less", latch.count_down()).await.unwrap();
            assert_eq!(counted, left, "{loss:?}");
        }
        let _fault = loss.of(&proxy, ZkRequest::is_multi);
        assert!(within(PATIENCE, "no permits", semaphore.delete()).await.unwrap());
        let there = there.semaphore(semaphore.key().clone());
        assert_eq!(there.status().await.unwrap(), None);
    });
    join_all(losing).await;
}

/// A step without a reply belongs to its session: what it did is unknown once that has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn step_whose_session_ended_before_its_reply_is_not_repeated() {
    let setting = Setting::new().await;
    let proxy = ZkProxy::start(setting.server.addr());
    let short = Arc::new(store(proxy.addr(), &setting.root, 2 * SEC, TIMEOUT).await);
    let beside = setting.client().await;
    assert!(beside.latch("k").try_set_count(3).await.unwrap());
    let mut number = 0;
    // Where the machine stood still for so long that the session was over, it is not carried out.
    let request = loop {
        number += 1;
        let request = CounterRequest::new("k".into(), GrantId::from_parts(9, number), CounterStep::CountDown);
        let late = proxy.hold(1, ZkRequest::is_multi);
        let error = short.clone().count(request.clone()).await.unwrap_err();
        assert_eq!(error.outcome, Outcome::Unknown, "{error:?}");
        late.release();
        late.delivered().await;
        let counted = async { while beside.latch("k").count().await.ok() != Some(2) {} };
        if timeout(3 * SEC, counted).await.is_ok() {
            break request;
        }
        assert!(number < 10, "it is never carried out");
    };
    proxy.block(Direction::Both);
    setting.has_nodes(1).await;
    eventually("its session ends", async || {
        setting.server.counted("zk_ephemerals_count").await <= 1
    })
    .await;
    sleep(4 * SEC).await;
    proxy.unblock(Direction::Both);
    eventually("it connects, and cannot tell", async || {
        let repeated = short.clone().count(request.clone()).await;
        let is_unknown = |error: dlock::store::StoreError| error.outcome == Outcome::Unknown;
        repeated.is_err_and(|error| error.to_string().contains("expired") && is_unknown(error))
    })
    .await;
    assert_eq!(beside.latch("k").count().await.unwrap(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn latch_opens_for_waiters_of_all_processes_and_counts_race_free() {
    let setting = Setting::new().await;
    let clients = join_all((0..3).map(|_| setting.client())).await;
    assert!(clients[0].latch("k").try_set_count(30).await.unwrap());
    let waiters: Vec<_> = (0..6)
        .map(|n| {
            let latch = clients[n % 3].latch("k");
            tokio::spawn(async move { latch.wait().await })
        })
        .collect();
    let seen = AtomicI64::new(0);
    let counts = (0..30).map(|n| {
        let (latch, seen) = (clients[n % 3].latch("k"), &seen);
        async move {
            let left = latch.count_down().await.unwrap();
            seen.fetch_add(i64::try_from(left).unwrap(), Ordering::Relaxed);
        }
    });
    join_all(counts).await;
    // Each number once.
    assert_eq!(seen.into_inner(), (0..30).sum::<i64>());
    for waiter in waiters {
        within(PATIENCE, "it is open", waiter).await.unwrap().unwrap();
    }
    let too_low = clients[1].latch("k").count_down().await;
    assert!(matches!(too_low, Err(Error::LatchOpen { .. })), "{too_low:?}");
    // Its key is free for anything else.
    drop(clients[2].lock("k").try_acquire().await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_permits_are_renewed_by_few_requests() {
    let setting = Setting::new().await;
    let store = setting.store().await;
    let key = |semaphore: u64| format!("k{semaphore}");
    let ids = || (0..100).flat_map(|semaphore| (0..100).map(move |n| (semaphore, semaphore * 100 + n)));
    let acquires = ids().map(|(semaphore, n)| {
        let grant = GrantId::from_parts(7, n);
        let mut request = AcquireRequest::new(Kind::Permit, key(semaphore).into(), grant, LEASE);
        request.permits = Some(1000);
        store.clone().acquire(request)
    });
    for reply in some_at_a_time(acquires).await {
        assert!(is_granted(&reply.unwrap()));
    }
    // The thousand of one caller are as one.
    let grant = GrantId::from_parts(7, 10_000);
    let mut many = AcquireRequest::new(Kind::Permit, "many".into(), grant, LEASE);
    (many.permits, many.amount) = (Some(1000), 1000);
    assert!(is_granted(&asks(&store, many).await));
    let (before, begun) = (setting.server.requests().await, Instant::now());
    let renewals: Vec<_> = ids()
        .map(|(semaphore, n)| (key(semaphore), n))
        .chain([("many".to_owned(), 10_000)])
        .map(|(key, n)| RenewRequest::new(Kind::Permit, key.into(), GrantId::from_parts(7, n), LEASE))
        .collect();
    let renewed = join_all(
        renewals
            .chunks(200)
            .map(|some| store.clone().renew(some.to_vec())),
    )
    .await;
    for renewed in renewed.into_iter().flat_map(Result::unwrap) {
        assert!(
            matches!(renewed, Ok(Renewal::Renewed | Renewal::RenewedFor(_))),
            "{renewed:?}"
        );
    }
    let sent = setting.server.requests().await - before;
    are_few(sent, begun);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holders_are_shown_and_forced_open_and_told() {
    let setting = Setting::new().await;
    let store = setting.store().await;
    let builder = LockClient::builder().store((*store).clone()).lease(3 * SEC);
    let (holder, beside) = (builder.build().await.unwrap(), setting.client().await);
    let permit = holder.semaphore("k").permits(3).acquire_many(2).await.unwrap();
    let waiter = tokio::spawn(beside.semaphore("k").wait(PATIENCE).acquire_many(3));
    setting.has_nodes(3).await;
    let listed = beside.list("").await.unwrap();
    assert_eq!(listed.len(), 2, "{listed:?}");
    let shown = beside.inspect("k").await.unwrap().expect("it is held");
    assert_eq!(shown.kind, Kind::Permit, "{shown:?}");
    let effect = format!("{}-effect", setting.root);
    let held = store.nodes(&permit).unwrap();
    assert_eq!(held.len(), 2);
    store
        .write_as(&permit, Writes::new().create(&effect, "1"))
        .await
        .unwrap();
    assert!(beside.force_release("k").await.unwrap());
    let lost = store
        .write_as(&permit, Writes::new().set(&effect, "2", None))
        .await;
    assert!(matches!(lost, Err(WriteError::Lost { .. })), "{lost:?}");
    within(PATIENCE, "the holder is told", permit.lost()).await;
    let all = within(PATIENCE, "the next", waiter).await.unwrap().unwrap();
    all.release().await.unwrap();
    assert!(!beside.force_release("k").await.unwrap());
    setting.has_nodes(0).await;
}

/// A node that is deleted by hand is the loss of all permits of its holder.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loss_of_one_permit_gives_the_others_of_its_holder_back() {
    let setting = Setting::new().await;
    let store = setting.store().await;
    assert!(is_granted(&asks(&store, request(1, 3)).await));
    let leases = format!("{}/k/leases", setting.root);
    let listed = setting.server.told(&[format!("ls {leases}")]).await;
    let lease = listed
        .split(['[', ',', ']', ' ', '\n'])
        .find(|word| word.contains("-lease-"));
    let delete = [format!("delete {leases}/{}", lease.expect("there are three"))];
    setting.server.told(&delete).await;
    let renewal = RenewRequest::new(Kind::Permit, "k".into(), GrantId::from_parts(7, 1), LEASE);
    let renewed = store.clone().renew(vec![renewal]).await.unwrap().remove(0);
    assert!(matches!(renewed, Ok(Renewal::Gone)), "{renewed:?}");
    setting.has_nodes(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn key_of_a_semaphore_or_latch_is_no_lock_and_the_other_way_round() {
    let setting = Setting::new().await;
    let client = setting.client().await;
    let taken = |what: &str, error: Error| assert!(error.to_string().contains(what), "{what}: {error}");
    let guard = client.lock("lock").acquire().await.unwrap();
    let semaphore = client.semaphore("lock").permits(1);
    taken("a plain lock", semaphore.try_acquire().await.unwrap_err());
    taken("a plain lock", semaphore.set_permits(1).await.unwrap_err());
    taken(
        "a plain lock",
        client.latch("lock").try_set_count(1).await.unwrap_err(),
    );
    guard.release().await.unwrap();
    // What was refused left nothing that is in the way.
    let guard = client.lock("lock").try_acquire().await.unwrap();
    guard.release().await.unwrap();
    client.semaphore("permits").set_permits(1).await.unwrap();
    client.latch("latch").try_set_count(1).await.unwrap();
    taken(
        "a semaphore",
        client.lock("permits").try_acquire().await.unwrap_err(),
    );
    taken(
        "a semaphore",
        client.latch("permits").try_set_count(1).await.unwrap_err(),
    );
    taken(
        "a latch",
        client.rw_lock("latch").read().try_acquire().await.unwrap_err(),
    );
    taken(
        "a latch",
        client
            .semaphore("latch")
            .permits(1)
            .try_acquire()
            .await
            .unwrap_err(),
    );
    assert!(client.latch("latch").delete().await.unwrap());
    drop(client.lock("latch").try_acquire().await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_survive_leaders_that_are_killed_and_waiters_go_on() {
    let servers = Ensemble::start().await;
    let root = fresh_root();
    let process = async || client(&lasting(servers.addrs(), &root).await).await;
    let (holder, waiting) = (process().await, process().await);
    let permit = holder.semaphore("k").permits(2).acquire_many(2).await.unwrap();
    let waiter = tokio::spawn(waiting.semaphore("k").wait(PATIENCE).acquire_many(2));
    sleep(500 * MS).await;
    let leader = &servers.servers()[servers.leader().await];
    leader.kill();
    servers.leader().await;
    leader.restart().await;
    eventually("they are confirmed", async || permit.ensure(SEC).await.is_ok()).await;
    assert!(!waiter.is_finished());
    permit.release().await.unwrap();
    let permit = within(PATIENCE, "the waiter", waiter).await.unwrap().unwrap();
    permit.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_hold_over_processes_and_leave_no_number() {
    const LIMIT: u32 = 3;
    let setting = Setting::new().await;
    let clients = [setting.client().await, setting.client().await];
    let room = Arc::new(Room::default());
    let calls = (0..20).map(|call| {
        let (client, room) = (clients[call % 2].clone(), room.clone());
        async move {
            let layer = LimitLayer::new(client, |(): &()| "k".into(), |()| LIMIT).unwrap();
            let works = service_fn(move |(): ()| {
                let room = room.clone();
                async move {
                    room.visit(1).await;
                    Ok::<_, std::convert::Infallible>(())
                }
            });
            layer.wait(PATIENCE).layer(works).oneshot(()).await.unwrap();
        }
    });
    join_all(calls).await;
    let (most, visits) = (
        room.most.load(Ordering::SeqCst),
        room.visits.load(Ordering::SeqCst),
    );
    assert!(most <= LIMIT as usize && visits == 20, "{most} in {visits}");
    assert_eq!(clients[0].semaphore("k").status().await.unwrap(), None);
    setting.has_nodes(0).await;
}
