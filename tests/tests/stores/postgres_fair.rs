//! Fair locks on PostgreSQL: waiters are served in order of arrival, over processes, whatever happens to other waiters, the
//! network, the server, or transactions that hold the lock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::store::{AcquireReply, AcquireRequest, GrantId, Kind, Outcome, ReleaseRequest, Store};
use dlock::{Error, HoldState, Lock, LockClient, LockKind, Loss, distributed_lock};
use dlock_postgres::PostgresLocks;
use dlock_tests::faults::{PATIENCE, SOON, answered, in_rounds, within};
use dlock_tests::postgres::{Pooler, Postgres};
use dlock_tests::{Direction, Inside, Request, eventually};
use dlock_tower::LockLayer;
use dlock_tower::key::header;
use futures_util::FutureExt;
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::losses::{self, LOSSES};
use crate::postgres_network_support::{Setting, client, setting, setting_on};
use crate::scenes::{LEASE, MS, SEC};

/// How long the position of a waiter is kept that does not ask.
const KEPT: Duration = Duration::from_secs(5);

/// The waiters in the order in which they were served.
type Order = Arc<Mutex<Vec<usize>>>;

impl Setting {
    /// So many processes.
    async fn clients(&self, count: usize) -> Vec<LockClient> {
        join_all((0..count).map(async |_| client(&self.store().await).await)).await
    }

    async fn queued(&self) -> i64 {
        self.number("SELECT count(*) FROM {t}_waiters").await
    }

    async fn in_queue(&self, count: i64) {
        eventually(&format!("{count} are in the queue"), async || {
            self.queued().await == count
        })
        .await;
    }

    /// A waiter that is in the queue when this returns, and releases the lock when it is served.
    async fn waiter(&self, lock: Lock, name: usize, order: &Order) -> JoinHandle<()> {
        let before = self.queued().await;
        let waiter = waits(lock, name, order);
        self.in_queue(before + 1).await;
        waiter
    }

    async fn nothing_is_left(&self) {
        eventually("no lock and no waiter is left", async || {
            let held = "SELECT count(*) FROM {t} WHERE holder <> ''";
            self.number(held).await == 0 && self.queued().await == 0
        })
        .await;
    }
}

/// Whether waiters that waited so long, from before their first request on, were told: untold, one asks after 1.5 s.
fn told_in(waited: Duration) -> Result<(), Duration> {
    match waited < 1200 * MS {
        true => Ok(()),
        false => Err(waited),
    }
}

/// A waiter that releases the lock when it is served.
fn waits(lock: Lock, name: usize, order: &Order) -> JoinHandle<()> {
    let order = order.clone();
    tokio::spawn(async move {
        let guard = lock.acquire().await.unwrap();
        order.lock().push(name);
        guard.release().await.unwrap();
    })
}

fn fair(client: &LockClient) -> Lock {
    client.fair_lock("k").wait(2 * PATIENCE)
}

async fn all(waiters: Vec<JoinHandle<()>>) {
    for waiter in waiters {
        within(PATIENCE, "each is served", waiter).await.unwrap();
    }
}

fn request(client: u128, number: u64) -> AcquireRequest {
    let mut request = AcquireRequest::new(Kind::Fair, "k".into(), GrantId::from_parts(client, number), LEASE);
    request.queue = true;
    request
}

fn release(client: u128, number: u64) -> ReleaseRequest {
    ReleaseRequest::new(Kind::Fair, "k".into(), GrantId::from_parts(client, number))
}

async fn is_busy(store: &Arc<PostgresLocks>, request: AcquireRequest) {
    let reply = store.clone().acquire(request).await;
    assert!(matches!(reply, Ok(AcquireReply::Busy(_))), "{reply:?}");
}

async fn is_granted(store: &Arc<PostgresLocks>, request: AcquireRequest) -> u64 {
    match store.clone().acquire(request).await {
        Ok(AcquireReply::Acquired(granted)) => granted.first_token,
        other => panic!("not granted: {other:?}"),
    }
}

/// An acquire of a fair lock, or what keeps the position of a waiter.
fn asks(request: &Request) -> bool {
    request.runs("-- Acquires fair locks")
}

fn releases(request: &Request) -> bool {
    request.runs("-- Ends grants of fair locks")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_of_many_processes_are_served_in_arrival_order() {
    let setting = setting().await;
    let clients = setting.clients(3).await;
    let order = Order::default();
    let guard = fair(&clients[0]).acquire().await.unwrap();
    let mut waiters = Vec::new();
    for i in 0..12 {
        // Not in turns, so that an order within the processes is none across them.
        let client = &clients[[0, 1, 1, 2, 0, 2][i % 6]];
        waiters.push(setting.waiter(fair(client), i, &order).await);
    }
    guard.release().await.unwrap();
    all(waiters).await;
    assert_eq!(*order.lock(), (0..12).collect::<Vec<_>>());
    setting.nothing_is_left().await;
}

/// Those that time out, and those whose future is dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_that_gives_up_leaves_nothing_and_moves_no_other_back() {
    let setting = setting().await;
    let clients = setting.clients(2).await;
    let order = Order::default();
    let guard = fair(&clients[0]).acquire().await.unwrap();
    let mut waiters = Vec::new();
    for i in 0..8 {
        waiters.push(setting.waiter(fair(&clients[i / 2 % 2]), i, &order).await);
    }
    // The first, two in the middle, and the last.
    for (left, i) in (0..).zip([7, 4, 3, 0]) {
        let gone = waiters.remove(i);
        gone.abort();
        assert!(gone.await.unwrap_err().is_cancelled());
        setting.in_queue(7 - left).await;
    }
    let hasty = clients[1].fair_lock("k").wait(300 * MS).acquire().await;
    assert!(hasty.unwrap_err().is_busy());
    setting.in_queue(4).await;
    guard.release().await.unwrap();
    all(waiters).await;
    assert_eq!(*order.lock(), [1, 2, 5, 6]);
    setting.nothing_is_left().await;
}

/// In the moment of its release, the waiter in front gives up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_that_gives_up_when_it_was_woken_wakes_the_next() {
    let setting = setting().await;
    let clients = setting.clients(3).await;
    in_rounds("each of five is told", async || {
        let mut waited = Duration::ZERO;
        for _ in 0..5 {
            let order = Order::default();
            let guard = fair(&clients[0]).acquire().await.unwrap();
            let first = tokio::spawn(fair(&clients[1]).acquire());
            setting.in_queue(1).await;
            let begun = Instant::now();
            let second = setting.waiter(fair(&clients[2]), 2, &order).await;
            let released = tokio::spawn(guard.release());
            first.abort();
            within(SOON, "the next is woken", second).await.unwrap();
            waited += begun.elapsed();
            released.await.unwrap().unwrap();
            // It may have had the lock already.
            drop(first.await);
            told_in(waited)?;
        }
        Ok::<(), Duration>(())
    })
    .await;
    setting.nothing_is_left().await;
}

/// Each release wakes one process; the others are not told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_wakes_the_first_waiter_and_no_other() {
    let setting = setting().await;
    let (here, there) = (setting.store().await, setting.store().await);
    is_granted(&here, request(1, 1)).await;
    let mut watches = Vec::new();
    for number in 2..5 {
        is_busy(&there, request(2, number)).await;
        let grant = GrantId::from_parts(2, number);
        let mut watch = there.clone().watch(Kind::Fair, &"k".into(), grant);
        within(PATIENCE, "it listens", watch.changed()).await;
        watches.push(watch);
    }
    // What came before the subscription of the last.
    sleep(100 * MS).await;
    for watch in &mut watches {
        while watch.changed().now_or_never().is_some() {}
    }
    for (at, number) in (2..5).enumerate() {
        let ended = release(1 + u128::from(at > 0), number - 1);
        let store = if at > 0 { &there } else { &here };
        assert!(store.clone().release(ended).await.is_ok());
        within(PATIENCE, "the first is told", watches[at].changed()).await;
        // All listen by one connection, in the order of the notifications.
        for (other, watch) in watches.iter_mut().enumerate().skip(at + 1) {
            assert!(watch.changed().now_or_never().is_none(), "{other}");
        }
        is_granted(&there, request(2, number)).await;
    }
}

/// Whatever ends the grant wakes the queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_of_a_plain_lock_and_force_serve_the_first_waiter() {
    let setting = setting().await;
    let clients = setting.clients(3).await;
    let [a, b, c] = &clients[..] else { unreachable!() };
    in_rounds("they are told of a release", async || {
        let order = Order::default();
        let guard = a.lock("k").acquire().await.unwrap();
        let plain = tokio::spawn(c.lock("k").acquire());
        let begun = Instant::now();
        let first = setting.waiter(fair(b), 1, &order).await;
        guard.release().await.unwrap();
        // One after the other, in either order.
        let plain = within(SOON, "the plain waiter is served", plain).await;
        plain.unwrap().unwrap().release().await.unwrap();
        within(SOON, "the first waiter is served", first).await.unwrap();
        told_in(begun.elapsed())
    })
    .await;
    in_rounds("they are told of force", async || {
        serves_the_first_when_forced(&setting, [a, b, c]).await
    })
    .await;
    setting.nothing_is_left().await;
}

/// Fails with how long it took where a waiter may not have been told.
async fn serves_the_first_when_forced(
    setting: &Setting,
    [a, b, c]: [&LockClient; 3],
) -> Result<(), Duration> {
    let order = Order::default();
    let guard = fair(a).acquire().await.unwrap();
    let begun = Instant::now();
    let waiters = vec![
        setting.waiter(fair(b), 1, &order).await,
        setting.waiter(fair(a), 2, &order).await,
    ];
    let shown = c.list("").await.unwrap();
    assert!(
        matches!(&shown[..], [(key, holder)] if key.as_str() == "k" && holder.kind == Kind::Fair),
        "{shown:?}"
    );
    let error = c.fair_lock("k").try_acquire().await.unwrap_err();
    assert!(error.is_busy(), "{error}");
    assert!(c.force_release("k").await.unwrap());
    within(SOON, "the waiters are served", all(waiters)).await;
    let waited = begun.elapsed();
    assert_eq!(*order.lock(), [1, 2]);
    let ensured = guard.ensure(10 * LEASE).await;
    assert!(
        matches!(ensured, Err(Error::Lost { loss: Loss::Gone, .. })),
        "{ensured:?}"
    );
    told_in(waited)
}

/// Its process is cut off, as by its death: the next waiter goes on after 5 s. When it is back, it comes before all later
/// waiters, and nobody has the lock beside another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_waiter_delays_the_next_by_seconds_and_comes_back_before_later_ones() {
    let setting = setting().await;
    let cut_off = client(&setting.behind(SEC).await).await;
    let clients = setting.clients(2).await;
    let (order, inside) = (Order::default(), Arc::new(Inside::default()));
    let waits = |client: &LockClient, name: usize| {
        let (lock, order, inside) = (fair(client), order.clone(), inside.clone());
        tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            inside.write(guard.fencing_token());
            order.lock().push(name);
            // Longer than the one that was cut off needs to be back.
            sleep(if name == 2 { 4 * SEC } else { 20 * MS }).await;
            inside.written();
            guard.release().await.unwrap();
        })
    };
    let guard = fair(&clients[0]).acquire().await.unwrap();
    let first = waits(&cut_off, 1);
    setting.in_queue(1).await;
    setting.proxy.block(Direction::Both);
    let second = waits(&clients[0], 2);
    setting.in_queue(2).await;
    let third = waits(&clients[1], 3);
    setting.in_queue(3).await;
    guard.release().await.unwrap();
    let begun = Instant::now();
    eventually("the second is served", async || !order.lock().is_empty()).await;
    assert!(
        begun.elapsed() < KEPT + SOON + PATIENCE / 2,
        "{:?}",
        begun.elapsed()
    );
    setting.proxy.unblock(Direction::Both);
    setting.proxy.cut();
    all(vec![first, second, third]).await;
    // On a slow machine it is back only when the third was served.
    let order = order.lock().clone();
    assert!(order == [2, 1, 3] || order == [2, 3, 1], "{order:?}");
    setting.nothing_is_left().await;
}

/// Positions that were lost, as in a crash or by a clock that jumped, are taken again ahead of later waiters, in their order.
#[tokio::test]
async fn waiters_whose_positions_were_lost_are_back_in_their_order() {
    let setting = setting().await;
    let store = setting.store().await;
    is_granted(&store, request(1, 1)).await;
    let again = |client, number| {
        let mut request = request(client, number);
        request.last_asked = Some(SEC);
        request
    };
    for number in 1..6 {
        is_busy(&store, request(2, number)).await;
    }
    let sql = format!("DELETE FROM {}_waiters", setting.table);
    setting.server.client().await.batch_execute(&sql).await.unwrap();
    is_busy(&store, request(3, 1)).await;
    for number in [4, 2, 5, 1, 3] {
        is_busy(&store, again(2, number)).await;
    }
    is_busy(&store, again(3, 1)).await;
    assert!(store.clone().release(release(1, 1)).await.is_ok());
    for number in 1..6 {
        for later in number + 1..6 {
            is_busy(&store, again(2, later)).await;
        }
        is_busy(&store, again(3, 1)).await;
        is_granted(&store, again(2, number)).await;
        assert!(store.clone().release(release(2, number)).await.is_ok());
    }
    is_granted(&store, again(3, 1)).await;
}

/// Waiters for permits of the name by a limit have no place in its queue.
#[tokio::test]
async fn waiters_for_permits_of_the_name_come_neither_before_nor_between_those_for_the_lock() {
    let setting = setting().await;
    let store = setting.store().await;
    is_granted(&store, request(1, 1)).await;
    is_busy(&store, request(3, 1)).await;
    // One is first, and one is the last of the client that comes back.
    let sql = format!(
        "INSERT INTO {t}_waiters (key, holder, number, until, amount, place)
         SELECT w.key, h.holder, 1, clock_timestamp() + interval '5 s', 1, h.place
           FROM {t}_waiters w, (VALUES ('{}', -1000), ('{}', 1000)) h (holder, place)",
        GrantId::from_parts(9, 1),
        GrantId::from_parts(2, 1),
        t = setting.table,
    );
    setting.server.client().await.batch_execute(&sql).await.unwrap();
    let mut again = request(2, 2);
    again.last_asked = Some(SEC);
    is_busy(&store, again.clone()).await;
    is_busy(&store, request(3, 2)).await;
    assert!(store.clone().release(release(1, 1)).await.is_ok());
    let mut next = request(3, 1);
    next.tokens = 4;
    is_busy(&store, next.clone()).await;
    is_granted(&store, again).await;
    assert!(store.clone().release(release(2, 2)).await.is_ok());
    match store.clone().acquire(next).await {
        Ok(AcquireReply::Acquired(granted)) => assert_eq!(granted.behind, [GrantId::from_parts(3, 2)]),
        other => panic!("not granted: {other:?}"),
    }
}

/// The waiters of a killed process leave no row for ever.
#[tokio::test]
async fn rows_of_dead_waiters_are_removed() {
    let setting = setting().await;
    let store = setting.store().await;
    is_granted(&store, request(1, 1)).await;
    for number in 1..4 {
        is_busy(&store, request(2, number)).await;
    }
    is_busy(&store, request(3, 1)).await;
    let silent = |by: &str, client: u128| {
        let id = GrantId::from_parts(client, 0).to_string();
        let id = id.trim_end_matches('0').to_owned();
        format!(
            "UPDATE {}_waiters SET until = clock_timestamp() - interval '{by}' WHERE holder LIKE '{id}%'",
            setting.table
        )
    };
    let db = setting.server.client().await;
    db.batch_execute(&silent("20 s", 2)).await.unwrap();
    assert!(store.clone().release(release(1, 1)).await.is_ok());
    // It passes them over.
    is_granted(&store, request(3, 1)).await;
    assert_eq!(setting.queued().await, 0);
    is_busy(&store, request(4, 1)).await;
    db.batch_execute(&silent("2 minutes", 4)).await.unwrap();
    store.remove_free().await.unwrap();
    assert_eq!(setting.queued().await, 0);
}

/// A position that was taken before the server's clock was set back by hours blocks nobody for hours.
#[tokio::test]
async fn position_of_a_dead_waiter_ends_though_the_clock_goes_back() {
    let setting = setting().await;
    let store = setting.store().await;
    is_granted(&store, request(1, 1)).await;
    is_busy(&store, request(2, 1)).await;
    let sql = format!(
        "UPDATE {}_waiters SET until = until + interval '1 hour'",
        setting.table
    );
    setting.server.client().await.batch_execute(&sql).await.unwrap();
    assert!(store.clone().release(release(1, 1)).await.is_ok());
    is_granted(&store, request(3, 1)).await;
}

/// Each step, with its request or its reply lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_requests_and_replies_of_waiters_leave_nothing_wrong() {
    let setting = setting().await;
    let hasty = client(&setting.behind(600 * MS).await).await;
    let others = setting.clients(2).await;
    for loss in LOSSES {
        for step in ["join", "poll", "grant", "release", "give up"] {
            let what = format!("{step}: {loss:?}");
            let round = async || one_is_lost(&setting, &hasty, &others, loss, step, &what).await;
            in_rounds(&what, round).await;
        }
    }
}

/// A waiter one of whose steps is lost, and the next one behind it. Fails if the step was over before it could be lost.
async fn one_is_lost(
    setting: &Setting,
    hasty: &LockClient,
    others: &[LockClient],
    loss: losses::Loss,
    step: &str,
    what: &str,
) -> Result<(), &'static str> {
    let held = fair(&others[0]).acquire().await.unwrap();
    let joins = (step == "join").then(|| loss.of(&setting.proxy, asks));
    let waiting = tokio::spawn(fair(hasty).acquire());
    eventually(what, async || match &joins {
        Some(joins) => joins.fired(),
        None => setting.queued().await == 1,
    })
    .await;
    let fault = match step {
        "poll" | "grant" => loss.of(&setting.proxy, asks),
        "release" | "give up" => loss.of(&setting.proxy, releases),
        _ => joins.expect("the request is lost"),
    };
    match step {
        "poll" => eventually(what, async || fault.fired()).await,
        "give up" => waiting.abort(),
        _ => {}
    }
    let order = Order::default();
    let next = waits(fair(&others[1]), 2, &order);
    held.release().await.unwrap();
    match within(PATIENCE, what, waiting).await {
        Ok(guard) => {
            let guard = guard.unwrap();
            let busy = others[0].lock("k").try_acquire().await.unwrap_err();
            assert!(busy.is_busy() && guard.is_held(), "{what}");
            within(PATIENCE, what, guard.release()).await.unwrap();
        }
        Err(error) => assert!(step == "give up" && error.is_cancelled(), "{what}: {error}"),
    }
    within(PATIENCE, what, next).await.unwrap();
    setting.nothing_is_left().await;
    match fault.fired() {
        true => Ok(()),
        false => Err("it was over before"),
    }
}

/// A copy of a request that arrives after its waiter has left, or after the lock was released.
#[tokio::test]
async fn late_request_takes_no_position_and_no_lock() {
    let setting = setting().await;
    let (hasty, patient) = (setting.behind(600 * MS).await, setting.store().await);
    for (holds, client) in [(true, 10), (false, 20)] {
        is_granted(&patient, request(client, 1)).await;
        if !holds {
            assert!(patient.clone().release(release(client, 1)).await.is_ok());
        }
        let late = setting.proxy.hold(1, asks);
        let number = Mutex::new(1);
        eventually("it is sent", async || {
            let number = {
                let mut number = number.lock();
                *number += 1;
                *number
            };
            let reply = hasty.clone().acquire(request(client, number)).await;
            let sent = reply.is_err_and(|error| error.outcome == Outcome::Unknown);
            let ended = answered(|| hasty.clone().release(release(client, number))).await;
            assert!(ended.is_ok(), "{ended:?}");
            sent
        })
        .await;
        late.caught().await;
        late.release();
        late.delivered().await;
        for _ in 0..20 {
            sleep(10 * MS).await;
            assert_eq!(setting.queued().await, 0);
        }
        if holds {
            assert!(patient.clone().release(release(client, 1)).await.is_ok());
        }
        setting.nothing_is_left().await;
    }
}

/// The server is killed while waiters wait: positions may be lost, but not the lock, and each waiter is served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_go_on_after_a_restart_of_the_server() {
    let setting = setting_on(Arc::new(Postgres::start().await)).await;
    let stores =
        join_all((0..3).map(async |_| setting.connected(setting.server.config(), 5 * SEC).await)).await;
    let clients = join_all(stores.iter().map(client)).await;
    let guard = fair(&clients[0]).acquire().await.unwrap();
    let inside = Arc::new(Inside::default());
    let waiters = (0..6).map(|n| {
        let (lock, inside) = (fair(&clients[n % 3]), inside.clone());
        tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            inside.write(guard.fencing_token());
            sleep(20 * MS).await;
            inside.written();
            guard.release().await.unwrap();
        })
    });
    let waiters: Vec<_> = waiters.collect();
    setting.in_queue(6).await;
    setting.server.restart().await;
    eventually("it is confirmed", async || guard.state() == HoldState::Held).await;
    assert_eq!(inside.turns(), 0);
    guard.release().await.unwrap();
    all(waiters).await;
    assert_eq!(inside.turns(), 6);
    setting.nothing_is_left().await;
}

/// `hold_in` keeps the first waiter out beyond the lease and the release, and `lock_in` does. The queue keeps its order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_that_holds_the_lock_keeps_the_queue_waiting_in_its_order() {
    let setting = setting().await;
    let store = setting.store().await;
    let (here, clients) = (client(&store).await, setting.clients(2).await);
    for way in ["hold_in", "lock_in"] {
        let mut db = setting.server.client().await;
        let tx = db.transaction().await.unwrap();
        let order = Order::default();
        let guard = match way {
            "hold_in" => Some(fair(&here).acquire().await.unwrap()),
            _ => None,
        };
        match &guard {
            Some(guard) => store.hold_in(&tx, guard).await.unwrap(),
            None => assert!(store.lock_in(&tx, "k").await.is_ok()),
        }
        let mut waiters = Vec::new();
        for i in 0..4 {
            waiters.push(setting.waiter(fair(&clients[i % 2]), i, &order).await);
        }
        if let Some(guard) = guard {
            guard.release().await.unwrap();
        }
        let busy = here.fair_lock("k").try_acquire().await.unwrap_err();
        assert!(busy.is_busy(), "{way}: {busy}");
        sleep(3 * SEC / 2).await;
        assert!(order.lock().is_empty(), "{way}");
        tx.commit().await.unwrap();
        all(waiters).await;
        assert_eq!(*order.lock(), [0, 1, 2, 3], "{way}");
        setting.nothing_is_left().await;
    }
    // A transaction finds the holder of a fair lock.
    let held = fair(&clients[0]).acquire().await.unwrap();
    let mut db = setting.server.client().await;
    let tx = db.transaction().await.unwrap();
    assert!(store.lock_in(&tx, "k").await.is_err());
    drop(tx);
    held.release().await.unwrap();
}

/// The holder's lease is over, but its transaction is open.
#[tokio::test]
async fn first_waiter_does_not_take_over_from_an_open_transaction() {
    let setting = setting().await;
    let store = setting.store().await;
    let here = client(&store).await;
    let guard = here.fair_lock("k").fixed_lease(SEC).acquire().await.unwrap();
    let mut db = setting.server.client().await;
    let tx = db.transaction().await.unwrap();
    store.hold_in(&tx, &guard).await.unwrap();
    let waiting = tokio::spawn(fair(&setting.clients(1).await[0]).acquire());
    within(PATIENCE, "the lease ends", guard.lost()).await;
    sleep(SEC).await;
    assert!(!waiting.is_finished());
    tx.commit().await.unwrap();
    let next = within(PATIENCE, "the next is served", waiting).await;
    next.unwrap().unwrap().release().await.unwrap();
}

/// Behind it there are no notifications: waiters poll, in their order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_keeps_its_order_behind_a_transaction_pooler() {
    let setting = setting_on(Arc::new(Postgres::start().await)).await;
    let pooler = Pooler::start(&setting.server, "transaction").await;
    let config = setting.server.config_at(pooler.addr());
    let stores = join_all((0..2).map(async |_| setting.connected(config.clone(), PATIENCE).await)).await;
    let clients = join_all(stores.iter().map(client)).await;
    let order = Order::default();
    let guard = fair(&clients[0]).acquire().await.unwrap();
    let mut waiters = Vec::new();
    for i in 0..6 {
        waiters.push(setting.waiter(fair(&clients[i / 2 % 2]), i, &order).await);
    }
    guard.release().await.unwrap();
    all(waiters).await;
    assert_eq!(*order.lock(), (0..6).collect::<Vec<_>>());
    setting.nothing_is_left().await;
}

/// Callers that give up at any moment, in several processes, in each level of isolation that a database may have by default.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_that_race_and_give_up_never_overlap_and_leave_nothing() {
    for level in ["read committed", "serializable"] {
        let setting = setting().await;
        let mut config = setting.server.config();
        config.options(format!(
            "-c default_transaction_isolation={}",
            level.replace(' ', "\\ ")
        ));
        let stores = join_all((0..4).map(async |_| setting.connected(config.clone(), PATIENCE).await)).await;
        let clients = join_all(stores.iter().map(client)).await;
        let inside = Arc::new(Inside::default());
        let tasks = (0..16_usize).map(|task| {
            let (client, inside) = (clients[task % 4].clone(), inside.clone());
            tokio::spawn(async move {
                for _ in 0..15 {
                    let patience = match fastrand::u32(0..3) {
                        0 => fastrand::u32(0..15) * MS,
                        _ => 2 * PATIENCE,
                    };
                    let lock = fair(&client).local_handoffs(fastrand::u32(0..3));
                    let Ok(guard) = timeout(patience, lock.acquire()).await else {
                        continue;
                    };
                    let guard = guard.unwrap();
                    inside.write(guard.fencing_token());
                    sleep(fastrand::u32(0..3) * MS).await;
                    inside.written();
                    match fastrand::bool() {
                        true => guard.release().await.unwrap(),
                        false => drop(guard),
                    }
                }
            })
        });
        for done in join_all(tasks).await {
            done.unwrap();
        }
        assert!(inside.turns() > 100, "{inside:?}");
        setting.nothing_is_left().await;
    }
}

#[distributed_lock(key = "k", lock = client, kind = fair)]
async fn kinds_under_the_attribute(client: &LockClient, beside: &LockClient) -> Result<Vec<Kind>, Error> {
    let held = beside.list("").await?;
    Ok(held.into_iter().map(|(_, holder)| holder.kind).collect())
}

#[tokio::test]
async fn attribute_layers_and_requirements_have_fair_locks() {
    let setting = setting().await;
    let store = setting.store().await;
    let builder = LockClient::builder()
        .store((*store).clone())
        .require([Kind::Fair]);
    let client = builder.build().await.unwrap();
    let beside = &setting.clients(1).await[0];
    let kinds = kinds_under_the_attribute(&client, beside).await.unwrap();
    assert_eq!(kinds, [Kind::Fair]);
    let layer = LockLayer::new(client, header("k")).kind(LockKind::Fair);
    layer.unwrap().check().unwrap();
    setting.nothing_is_left().await;
}
