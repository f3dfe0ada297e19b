//! Fair locks on etcd: the order of waiters over processes, and what happens to their positions while they wait.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use dlock::store::{AcquireReply, AcquireRequest, Kind, Outcome, ReleaseReply, ReleaseRequest, Store};
use dlock::{Error, LockClient, LockGuard, LockKey, LockKind, distributed_lock};
use dlock_tests::etcd::{Call, Etcd, EtcdCluster, builder_at, fresh_namespace};
use dlock_tests::faults::{PATIENCE, answered, is_confirmed, within};
use dlock_tests::{Direction, eventually};
use dlock_tower::task::TaskLockLayer;
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, ServiceExt, service_fn};

use crate::etcd_support::{
    LEASE, MS, SEC, Setting, acquires, ask, client, connected, granted, setting, setting_on,
};
use crate::losses::LOSSES;

/// How long the position of a process that is gone stays, and what a server takes to end a lease.
const ENDS_WITHIN: Duration = Duration::from_secs(15);

type Matches = fn(&Call) -> bool;

fn joins(call: &Call) -> bool {
    call.is("Txn") && call.has(" waits")
}

/// The look of a waiter that has a position.
fn looks(call: &Call) -> bool {
    acquires(call) && !joins(call)
}

fn leaves(call: &Call) -> bool {
    call.is("Txn") && !acquires(call)
}

fn waiter(number: u64) -> AcquireRequest {
    let mut request = AcquireRequest::new(Kind::Fair, "k".into(), ask("k", number, LEASE).grant, LEASE);
    request.queue = true;
    request
}

fn gives_up(number: u64) -> ReleaseRequest {
    ReleaseRequest::new(Kind::Fair, "k".into(), waiter(number).grant)
}

impl Setting {
    /// The positions of waiters: whether each is of a returned one.
    async fn positions(&self) -> Vec<bool> {
        let keys = self.held().await;
        let positions = keys.iter().filter_map(|(key, _)| key.split_once('\0'));
        positions
            .filter(|(_, position)| position.starts_with(['v', 'w']))
            .map(|(_, position)| position.starts_with('v'))
            .collect()
    }

    async fn has_waiters(&self, count: usize) {
        let what = format!("{count} positions");
        eventually(&what, async || self.positions().await.len() == count).await;
    }

    async fn process(&self) -> LockClient {
        let builder = builder_at(self.proxy.addr(), &self.namespace).timeout(PATIENCE);
        client(&connected(builder).await).await
    }

    /// Starts a waiter, and waits until there are so many.
    async fn waits(&self, client: &LockClient, count: usize) -> JoinHandle<LockGuard> {
        let lock = client.fair_lock("k").lease(LEASE);
        let waiting = tokio::spawn(async move { lock.acquire().await.expect("it is served") });
        self.has_waiters(count).await;
        waiting
    }
}

async fn served(waiting: JoinHandle<LockGuard>) -> LockGuard {
    within(PATIENCE, "the waiter", waiting)
        .await
        .expect("it is served")
}

/// The next one has the lock, with a greater token, and the others wait.
async fn is_next(
    guard: LockGuard,
    waiting: JoinHandle<LockGuard>,
    others: &[JoinHandle<LockGuard>],
) -> LockGuard {
    let token = guard.fencing_token();
    guard.release().await.unwrap();
    let next = served(waiting).await;
    assert!(next.fencing_token() > token);
    is_confirmed(&next).await;
    assert!(others.iter().all(|other| !other.is_finished()));
    next
}

/// A waiter asks when it joins, when it is listened to, when the one before it is gone, and when the lock is free; and every
/// ten seconds. The engine asks every 1.5 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_of_many_processes_are_served_in_order_and_each_release_wakes_the_next_one() {
    const WAITERS: usize = 32;
    let setting = setting().await;
    let holder = client(&setting.patient).await;
    let guard = holder.fair_lock("k").lease(LEASE).acquire().await.unwrap();
    let mut processes = Vec::new();
    for _ in 0..8 {
        processes.push(setting.process().await);
    }
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for number in 0..WAITERS {
        let (lock, order) = (processes[number % 8].fair_lock("k").lease(LEASE), order.clone());
        tasks.push(tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            order.lock().push((number, guard.fencing_token()));
            guard.release().await.unwrap();
        }));
        setting.has_waiters(number + 1).await;
    }
    // All are listened to.
    sleep(SEC).await;
    setting.proxy.forget();
    let begun = Instant::now();
    sleep(4 * SEC).await;
    let asked = setting.proxy.count(acquires);
    // In four seconds: at most once each.
    let most = WAITERS * (1 + begun.elapsed().as_secs() as usize / 10);
    assert!(asked <= most, "{asked} requests while nothing happens");
    setting.proxy.forget();
    let begun = Instant::now();
    guard.release().await.unwrap();
    for task in tasks {
        within(PATIENCE, "the waiter", task).await.unwrap();
    }
    let order = order.lock().clone();
    let numbers: Vec<_> = order.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, (0..WAITERS).collect::<Vec<_>>());
    assert!(order.is_sorted_by(|(_, one), (_, next)| one < next), "{order:?}");
    let asked = setting.proxy.count(acquires);
    // All would ask at each release: 8 times as often.
    let most = WAITERS * (3 + begun.elapsed().as_secs() as usize / 10);
    assert!(asked <= most, "{asked} requests for {WAITERS} waiters");
    assert_eq!(setting.held().await, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_that_gives_up_at_any_moment_leaves_no_position_and_delays_no_other() {
    let setting = setting().await;
    let (holder, a, b) = (
        client(&setting.patient).await,
        setting.process().await,
        setting.process().await,
    );
    let guard = holder.fair_lock("k").lease(LEASE).acquire().await.unwrap();
    for _ in 0..60 {
        let limit = Duration::from_micros(fastrand::u64(0..6000));
        let waiting = timeout(limit, a.fair_lock("k").lease(LEASE).acquire());
        assert!(waiting.await.is_err());
    }
    setting.has_waiters(0).await;
    assert!(a.fair_lock("k").try_acquire().await.unwrap_err().is_busy());
    let error = a.fair_lock("k").wait(50 * MS).acquire().await.unwrap_err();
    assert!(error.is_busy(), "{error}");
    setting.has_waiters(0).await;
    // In front, in the middle, and just when it is its turn.
    let gone = [
        setting.waits(&a, 1).await,
        setting.waits(&b, 2).await,
        setting.waits(&a, 3).await,
    ];
    let next = setting.waits(&b, 4).await;
    gone[1].abort();
    gone[0].abort();
    setting.has_waiters(2).await;
    guard.release().await.unwrap();
    gone[2].abort();
    let next = served(next).await;
    next.release().await.unwrap();
    eventually("nothing is left", async || setting.held().await.is_empty()).await;
}

/// As when its process is killed or stopped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_whose_process_is_cut_off_loses_its_position_and_is_served_later() {
    let setting = setting().await;
    let (holder, away, near) = (
        client(&setting.patient).await,
        setting.process().await,
        client(&setting.patient_beside().await).await,
    );
    let guard = holder.fair_lock("k").lease(LEASE).acquire().await.unwrap();
    let first = setting.waits(&away, 1).await;
    let second = setting.waits(&near, 2).await;
    setting.proxy.block(Direction::Both);
    guard.release().await.unwrap();
    let second = within(ENDS_WITHIN, "the next waiter", second).await.unwrap();
    assert!(!first.is_finished());
    setting.proxy.unblock(Direction::Both);
    sleep(SEC).await;
    assert!(!first.is_finished());
    is_confirmed(&second).await;
    let first = is_next(second, first, &[]).await;
    first.release().await.unwrap();
    eventually("nothing is left", async || setting.held().await.is_empty()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_whose_leases_are_ended_get_their_positions_back() {
    let setting = setting().await;
    let (holder, a, b) = (
        client(&setting.patient).await,
        setting.process().await,
        setting.process().await,
    );
    let guard = holder.fair_lock("k").lease(LEASE).acquire().await.unwrap();
    let sessions = setting.sessions().await;
    let mut waiting = Vec::new();
    for (client, count) in [(&a, 1), (&b, 2), (&a, 3)] {
        waiting.push(setting.waits(client, count).await);
    }
    for session in setting.sessions().await {
        if !sessions.contains(&session) {
            assert!(setting.server.revoke(session).await);
        }
    }
    eventually("they are back", async || setting.positions().await == [true; 3]).await;
    waiting.push(setting.waits(&b, 4).await);
    let mut guard = guard;
    while !waiting.is_empty() {
        let next = waiting.remove(0);
        guard = is_next(guard, next, &waiting).await;
    }
    guard.release().await.unwrap();
    assert_eq!(setting.held().await, []);
}

#[tokio::test]
async fn lost_requests_and_replies_of_waiters_leave_nothing_wrong() {
    let setting = setting().await;
    let (here, there) = (client(&setting.hasty).await, client(&setting.patient).await);
    let requests: [(&str, bool, Matches); 2] = [("a join", true, joins), ("a grant", false, looks)];
    for (request, is_join, is) in requests {
        for loss in LOSSES {
            let what = format!("{request}, {loss:?}");
            let guard = there.fair_lock("k").acquire().await.unwrap();
            let join = is_join.then(|| loss.of(&setting.proxy, is));
            let waiting = setting.waits(&here, 1).await;
            let fault = match join {
                Some(fault) => fault,
                None => {
                    // It is listened to, and looks no more.
                    sleep(SEC / 2).await;
                    loss.of(&setting.proxy, is)
                }
            };
            let guard = is_next(guard, waiting, &[]).await;
            assert!(fault.fired(), "{what}: no such request");
            guard.release().await.unwrap();
            eventually(&what, async || setting.held().await.is_empty()).await;
        }
    }
    for loss in LOSSES {
        let what = format!("a waiter that gives up, {loss:?}");
        let guard = there.fair_lock("k").acquire().await.unwrap();
        let waiting = setting.waits(&here, 1).await;
        let fault = loss.of(&setting.proxy, leaves);
        waiting.abort();
        setting.has_waiters(0).await;
        assert!(fault.fired(), "{what}: no such request");
        guard.release().await.unwrap();
        assert_eq!(setting.held().await, [], "{what}");
    }
}

#[tokio::test]
async fn late_copy_of_a_join_that_was_undone_takes_no_position() {
    let setting = setting().await;
    granted(setting.patient.clone().acquire(ask("k", 1, LEASE)).await);
    // With its sessions made before.
    let warm = answered(|| setting.hasty.clone().acquire(waiter(2))).await;
    assert!(matches!(warm, Ok(AcquireReply::Busy(_))), "{warm:?}");
    let late = setting.proxy.hold(1, joins);
    let error = setting.hasty.clone().acquire(waiter(3)).await.unwrap_err();
    assert_eq!(error.outcome, Outcome::Unknown, "{error}");
    late.caught().await;
    for number in [3, 2] {
        let undone = answered(|| setting.hasty.clone().release(gives_up(number))).await;
        assert_eq!(undone.unwrap(), ReleaseReply::NotHeld { repeated: false });
    }
    late.release();
    late.swallowed().await;
    assert_eq!(setting.positions().await, [false; 0]);
}

/// An order is kept for a waiter that was silent, not for one that gave up: nothing would remove it.
#[tokio::test]
async fn waiter_that_gives_up_while_no_server_answers_is_forgotten() {
    let setting = setting().await;
    granted(setting.patient.clone().acquire(ask("k", 1, LEASE)).await);
    let joined = answered(|| setting.hasty.clone().acquire(waiter(2))).await;
    assert!(matches!(joined, Ok(AcquireReply::Busy(_))), "{joined:?}");
    setting.proxy.block(Direction::Both);
    setting.hasty.clone().release(gives_up(2)).await.unwrap_err();
    setting.proxy.unblock(Direction::Both);
    setting.has_waiters(0).await;
    let joined = answered(|| setting.hasty.clone().acquire(waiter(2))).await;
    assert!(matches!(joined, Ok(AcquireReply::Busy(_))), "{joined:?}");
    let has_returned = setting.positions().await;
    assert_eq!(has_returned, [false], "it is a new waiter");
}

/// Positions may be lost, and their order with them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_go_on_when_the_server_restarts() {
    let setting = setting_on(Arc::new(Etcd::start().await)).await;
    let (holder, a, b) = (
        client(&setting.patient).await,
        setting.process().await,
        client(&setting.patient_beside().await).await,
    );
    let guard = holder.fair_lock("k").lease(LEASE).acquire().await.unwrap();
    let waiting = [setting.waits(&a, 1).await, setting.waits(&b, 2).await];
    setting.server.restart().await;
    setting.proxy.cut();
    answered(|| guard.ensure(SEC)).await.unwrap();
    assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
    let token = guard.fencing_token();
    guard.release().await.unwrap();
    let serve = waiting.map(async |waiting| {
        let guard = served(waiting).await;
        is_confirmed(&guard).await;
        let token = guard.fencing_token();
        guard.release().await.unwrap();
        token
    });
    let mut tokens = join_all(serve).await;
    tokens.sort_unstable();
    assert!(token < tokens[0] && tokens[0] < tokens[1]);
    eventually("nothing is left", async || setting.held().await.is_empty()).await;
}

/// As when the server restarts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_go_on_when_the_leader_is_lost() {
    let cluster = EtcdCluster::start().await;
    let namespace = fresh_namespace();
    let holder = client(&connected(cluster.builder(&namespace)).await).await;
    let guard = holder.fair_lock("k").lease(LEASE).acquire().await.unwrap();
    let (leader, prefix) = (cluster.leader().await, format!("{namespace}q/"));
    let near = &cluster.members[(leader + 1) % 3];
    let mut waiting = Vec::new();
    for count in 1..=4 {
        let process = client(&connected(cluster.builder(&namespace)).await).await;
        let lock = process.fair_lock("k").lease(LEASE);
        waiting.push(tokio::spawn(async move { lock.acquire().await.unwrap() }));
        eventually("it waits", async || near.keys(&prefix).await.len() == 1 + count).await;
    }
    cluster.members[leader].kill();
    is_confirmed(&guard).await;
    assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
    let mut tokens = vec![guard.fencing_token()];
    guard.release().await.unwrap();
    let serve = waiting.into_iter().map(async |waiting| {
        let guard = served(waiting).await;
        is_confirmed(&guard).await;
        let token = guard.fencing_token();
        guard.release().await.unwrap();
        token
    });
    tokens.extend(join_all(serve).await);
    let first = tokens[0];
    tokens.sort_unstable();
    tokens.dedup();
    assert!(tokens.len() == 5 && tokens[0] == first, "{tokens:?}");
    eventually("nothing is left", async || near.keys(&prefix).await.is_empty()).await;
}

#[tokio::test]
async fn forced_release_serves_the_next_waiter_and_waiters_are_no_holders() {
    let setting = setting().await;
    let (a, b) = (client(&setting.patient).await, client(&setting.hasty).await);
    let guard = a.fair_lock("k").lease(LEASE).acquire().await.unwrap();
    let waiting = setting.waits(&b, 1).await;
    assert_eq!(a.holders("k").await.unwrap().len(), 1);
    assert!(a.force_release("k").await.unwrap());
    let next = served(waiting).await;
    assert!(next.fencing_token() > guard.fencing_token());
    is_confirmed(&next).await;
    // A plain lock of the name is the same lock.
    assert!(a.lock("k").try_acquire().await.unwrap_err().is_busy());
    next.release().await.unwrap();
    assert!(!a.force_release("k").await.unwrap());
}

#[distributed_lock(key = "k", lock = client, kind = fair, wait = PATIENCE)]
async fn locked(client: &LockClient, tokens: &Mutex<Vec<usize>>, number: usize) -> Result<(), Error> {
    tokens.lock().push(number);
    // The function has the lock already.
    client.fair_lock("k").run(|_| async {}).await
}

/// The attribute, a layer, a fixed lease and two waiters of one process, of which the first hands the lock to the second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_way_to_a_fair_lock_keeps_its_order() {
    let setting = setting().await;
    let (holder, a, b) = (
        client(&setting.patient).await,
        setting.process().await,
        setting.process().await,
    );
    let guard = holder.fair_lock("k").fixed_lease(LEASE).acquire().await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for (number, client) in [&a, &a, &b, &a].into_iter().enumerate() {
        let (client, order) = (client.clone(), order.clone());
        tasks.push(tokio::spawn(async move {
            match number {
                3 => {
                    let layer = TaskLockLayer::new(client, |()| LockKey::from("k")).kind(LockKind::Fair);
                    let layer = layer.expect("it has fair locks").wait(PATIENCE);
                    let work = service_fn(move |(): ()| {
                        order.lock().push(3);
                        async { Ok::<_, Infallible>(()) }
                    });
                    layer.layer(work).oneshot(()).await.unwrap();
                }
                _ => locked(&client, &order, number).await.unwrap(),
            }
        }));
        setting.has_waiters(number + 1).await;
    }
    sleep(SEC / 2).await;
    setting.proxy.forget();
    guard.release().await.unwrap();
    for task in tasks {
        within(PATIENCE, "the waiter", task).await.unwrap();
    }
    assert_eq!(*order.lock(), [0, 1, 2, 3]);
    eventually("nothing is left", async || setting.held().await.is_empty()).await;
    // It ends by itself.
    let begun = Instant::now();
    let guard = a.fair_lock("k").fixed_lease(2 * SEC).acquire().await.unwrap();
    let next = setting.waits(&b, 1).await;
    let next = served(next).await;
    assert!(begun.elapsed() >= 2 * SEC && !guard.is_held());
    next.release().await.unwrap();
}
