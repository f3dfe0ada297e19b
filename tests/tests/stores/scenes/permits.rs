//! What is promised of semaphores and latches on the stores that count permits themselves: over processes, while requests are
//! lost, waiters give up, processes end and servers restart.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use dlock::store::counter::{CounterReply, CounterRequest, CounterStep};
use dlock::store::{GrantId, Holder, Kind, Store};
use dlock::{Error, LockClient, Permit, Semaphore};
use dlock_tests::faults::{PATIENCE, answered, within};
use dlock_tests::{Direction, Node, eventually};
use futures_util::future::join_all;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::{LEASE, MS, SEC, Setting, client};
use crate::backend::{Asked, Backend};
use crate::losses::LOSSES;

/// A store that counts permits.
pub(crate) trait Permits: Backend {
    /// Whether this is a step on a number: of permits, or of a latch.
    fn counts(request: &Asked<Self>) -> bool;

    /// Whether this acquires permits without an owner.
    fn takes_unowned(request: &Asked<Self>) -> bool;

    /// How many waiters have a position in the queue of a semaphore.
    fn positions(&self) -> impl Future<Output = usize> + Send;

    /// How many permits an owner has.
    fn owned(&self) -> impl Future<Output = usize> + Send;
}

impl<B: Permits> Setting<B> {
    async fn client(&self) -> LockClient {
        client(&self.backend.store(None, PATIENCE).await).await
    }

    async fn has_positions(&self, count: usize) {
        eventually(&format!("{count} positions"), async || {
            self.backend.positions().await == count
        })
        .await;
    }

    async fn no_permit_is_left(&self) {
        eventually("no permit and no position is left", async || {
            self.backend.owned().await == 0 && self.backend.positions().await == 0
        })
        .await;
    }
}

fn semaphore(client: &LockClient) -> Semaphore {
    client.semaphore("k").lease(LEASE)
}

pub(crate) fn waits(client: &LockClient, amount: u32) -> JoinHandle<Permit> {
    waits_for(semaphore(client), amount)
}

pub(crate) fn waits_for(semaphore: Semaphore, amount: u32) -> JoinHandle<Permit> {
    let semaphore = semaphore.wait(2 * PATIENCE);
    tokio::spawn(async move { semaphore.acquire_many(amount).await.expect("it is served") })
}

pub(crate) async fn served(waiting: JoinHandle<Permit>) -> Permit {
    let permit = within(PATIENCE, "the waiter", waiting).await;
    permit.expect("it is served")
}

/// A step on the number of `k`.
pub(crate) async fn count(store: &Arc<impl Store + ?Sized>, step: CounterStep) -> CounterReply {
    let id = GrantId::from_parts(fastrand::u128(..), 1);
    let request = CounterRequest::new("k".into(), id, step);
    let counters = || store.clone().counters().expect("it counts permits");
    let counted = answered(|| counters().count(request.clone())).await;
    counted.expect("it is counted")
}

/// Callers of several processes that give up at any moment.
pub(crate) async fn permits_are_shared(clients: &[LockClient], with_limit: bool) {
    const TOTAL: i64 = 5;
    let (held, turns) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicI64::new(0)));
    let tasks = (0..12_u32).map(|task| {
        let semaphore = semaphore(&clients[task as usize % clients.len()]).wait(2 * PATIENCE);
        let semaphore = match with_limit {
            true => semaphore.limit(TOTAL as u32),
            false => semaphore.permits(TOTAL as u32),
        };
        let (held, turns) = (held.clone(), turns.clone());
        tokio::spawn(async move {
            for round in 0..12 {
                let amount = 1 + (task + round) % 3;
                let patience = match fastrand::u32(0..3) {
                    0 => fastrand::u32(0..20) * MS,
                    _ => 2 * PATIENCE,
                };
                let Ok(permit) = timeout(patience, semaphore.acquire_many(amount)).await else {
                    continue;
                };
                let permit = permit.unwrap();
                let now = held.fetch_add(amount.into(), Ordering::SeqCst) + i64::from(amount);
                assert!(now <= TOTAL, "{now} permits are held");
                sleep(fastrand::u32(0..4) * MS).await;
                held.fetch_sub(amount.into(), Ordering::SeqCst);
                turns.fetch_add(1, Ordering::SeqCst);
                match fastrand::bool() {
                    true => permit.release().await.unwrap(),
                    false => drop(permit),
                }
            }
        })
    });
    for done in join_all(tasks).await {
        done.unwrap();
    }
    assert!(turns.load(Ordering::SeqCst) > 50, "{turns:?}");
}

pub(crate) async fn waiter_for_several_permits_is_not_passed_over<B: Permits>(server: Arc<B::Server>) {
    let setting = Setting::<B>::on(server).await;
    let (a, b, c) = (
        setting.client().await,
        setting.client().await,
        setting.client().await,
    );
    let semaphore = semaphore(&a).permits(3);
    let (one, two) = (
        semaphore.acquire().await.unwrap(),
        semaphore.acquire_many(2).await.unwrap(),
    );
    let impossible = waits(&c, 4);
    let several = waits(&b, 3);
    setting.has_positions(1).await;
    two.release().await.unwrap();
    // Two are available, which the waiter for three keeps.
    assert!(semaphore.try_acquire().await.unwrap_err().is_busy());
    one.release().await.unwrap();
    let several = served(several).await;
    assert!(semaphore.try_acquire().await.unwrap_err().is_busy());
    several.release().await.unwrap();
    let one = semaphore.try_acquire().await.unwrap();
    assert!(!impossible.is_finished());
    assert_eq!(semaphore.add_permits(2).await.unwrap().total, 5);
    served(impossible).await.release().await.unwrap();
    one.release().await.unwrap();
    setting.no_permit_is_left().await;
}

pub(crate) async fn greater_total_is_told_and_a_smaller_one_takes_nothing<B: Permits>(
    server: Arc<B::Server>,
) {
    let setting = Setting::<B>::on(server).await;
    let here = client(&setting.patient).await;
    let semaphore = semaphore(&here);
    let beside = setting.backend.store(None, PATIENCE).await;
    let watched = GrantId::from_parts(1, 1);
    let mut watch = beside.clone().watch(Kind::Permit, &"k".into(), watched);
    within(PATIENCE, "it is listened to", watch.changed()).await;
    let only_unset = CounterStep::SetPermits {
        total: 1,
        only_unset: true,
    };
    let add = CounterStep::AddPermits {
        by: 1,
        unowned: false,
    };
    for change in [only_unset, add] {
        while timeout(SEC, watch.changed()).await.is_ok() {}
        count(&setting.patient, change).await;
        within(PATIENCE, "it is told", watch.changed()).await;
    }
    let two = semaphore.acquire_many(2).await.unwrap();
    assert!(semaphore.set_permits(0).await.unwrap());
    two.ensure(SEC).await.unwrap();
    assert_eq!(semaphore.available().await.unwrap(), -2);
    let error = semaphore.clone().wait(SEC).acquire().await.unwrap_err();
    assert!(error.is_busy(), "{error}");
    two.release().await.unwrap();
    assert_eq!(semaphore.available().await.unwrap(), 0);
    assert_eq!(semaphore.add_permits(3).await.unwrap().available, 3);
    let one = semaphore.acquire().await.unwrap();
    assert_eq!(
        count(&setting.patient, CounterStep::Drain).await,
        CounterReply::Number(2)
    );
    assert!(semaphore.try_acquire().await.unwrap_err().is_busy());
    assert!(semaphore.delete().await.unwrap());
    assert!(one.release().await.unwrap_err().is_lost());
    // The name is available again.
    let guard = here.lock("k").try_acquire().await.unwrap();
    guard.release().await.unwrap();
    setting.no_permit_is_left().await;
}

pub(crate) async fn permits_of_a_process_that_is_cut_off_come_back<B: Permits>(server: Arc<B::Server>) {
    let setting = Setting::<B>::on(server).await;
    let (away, near) = (client(&setting.hasty).await, setting.client().await);
    let semaphore = away.semaphore("k").permits(2).lease(3 * SEC);
    let two = semaphore.acquire_many(2).await.unwrap();
    let next = waits(&near, 2);
    setting.has_positions(1).await;
    setting.proxy.block(Direction::Both);
    let next = served(next).await;
    assert!(!two.is_held(), "two clients have them");
    next.release().await.unwrap();
    setting.proxy.unblock(Direction::Both);
    assert!(two.release().await.unwrap_err().is_lost());
    setting.no_permit_is_left().await;
}

pub(crate) async fn steps_of_a_number_whose_request_or_reply_is_lost_are_carried_out_once<B: Permits>(
    server: Arc<B::Server>,
) {
    for loss in LOSSES {
        let setting = Setting::<B>::on(server.clone()).await;
        let (here, there) = (client(&setting.hasty).await, client(&setting.patient).await);
        let (semaphore, latch) = (here.semaphore("k"), here.latch("l"));
        let lost = || loss.of(&setting.proxy, B::counts);
        let mut faults = vec![lost()];
        assert!(semaphore.try_set_permits(4).await.unwrap(), "{loss:?}");
        faults.push(lost());
        assert_eq!(semaphore.add_permits(3).await.unwrap().total, 7, "{loss:?}");
        faults.push(lost());
        assert_eq!(semaphore.remove_permits(2).await.unwrap().total, 5, "{loss:?}");
        faults.push(lost());
        assert!(latch.try_set_count(2).await.unwrap(), "{loss:?}");
        for left in [1, 0] {
            faults.push(lost());
            assert_eq!(latch.count_down().await.unwrap(), left, "{loss:?}");
        }
        let few = latch.count_down().await.unwrap_err();
        assert!(matches!(few, Error::LatchOpen { .. }), "{few}");
        let unowned = here.unowned_semaphore("k");
        faults.push(loss.of(&setting.proxy, B::takes_unowned));
        unowned.acquire_many(2).await.unwrap();
        faults.push(lost());
        unowned.release().await.unwrap();
        assert!(faults.iter().all(|fault| fault.fired()), "{loss:?}: {faults:?}");
        assert_eq!(there.semaphore("k").available().await.unwrap(), 4, "{loss:?}");
        assert_eq!(there.latch("l").count().await.unwrap(), 0);
    }
}

pub(crate) async fn waiter_for_permits_gives_up_at_any_moment<B: Permits>(server: Arc<B::Server>) {
    let setting = Setting::<B>::on(server).await;
    let (holder, a, b) = (
        setting.client().await,
        setting.client().await,
        setting.client().await,
    );
    let one = semaphore(&holder).permits(2).acquire().await.unwrap();
    for _ in 0..60 {
        let limit = Duration::from_micros(fastrand::u64(0..8000));
        assert!(timeout(limit, semaphore(&a).acquire_many(2)).await.is_err());
    }
    setting.has_positions(0).await;
    let error = answered(|| semaphore(&a).wait(2 * SEC).acquire_many(2)).await;
    let error = error.unwrap_err();
    assert!(error.is_busy(), "{error}");
    setting.has_positions(0).await;
    let gone = waits(&a, 2);
    setting.has_positions(1).await;
    let next = waits(&b, 1);
    setting.has_positions(2).await;
    gone.abort();
    served(next).await.release().await.unwrap();
    one.release().await.unwrap();
    setting.no_permit_is_left().await;
}

/// The server has to be the test's own.
pub(crate) async fn permits_their_total_and_a_latch_outlive_a_restart<B: Permits>(server: B::Server) {
    let setting = Setting::<B>::on(Arc::new(server)).await;
    let stores = join_all((0..2).map(|_| setting.backend.store(None, 5 * SEC))).await;
    let (a, b) = (client(&stores[0]).await, client(&stores[1]).await);
    let semaphore = semaphore(&a).permits(3);
    let two = semaphore.acquire_many(2).await.unwrap();
    let all = waits(&b, 3);
    setting.has_positions(1).await;
    let latch = a.latch("l");
    assert!(latch.try_set_count(7).await.unwrap());
    setting.backend.server().restart().await;
    answered(|| two.ensure(SEC)).await.unwrap();
    assert!(!all.is_finished());
    assert_eq!(answered(|| latch.count()).await.unwrap(), 7);
    assert_eq!(semaphore.available().await.unwrap(), 1);
    two.release().await.unwrap();
    served(all).await.release().await.unwrap();
    assert_eq!(semaphore.available().await.unwrap(), 3);
    setting.no_permit_is_left().await;
}

pub(crate) async fn holders_of_permits_are_shown_and_forced_out<B: Permits>(server: Arc<B::Server>) {
    let setting = Setting::<B>::on(server).await;
    let (a, b) = (setting.client().await, setting.client().await);
    let semaphore = semaphore(&a).permits(2);
    let two = semaphore.acquire_many(2).await.unwrap();
    let holders = b.holders("k").await.unwrap();
    assert_eq!(holders.len(), 2);
    let is_own = |holder: &Holder| holder.kind == Kind::Permit && holder.id.starts_with(&a.id());
    assert!(holders.iter().all(is_own), "{holders:?}");
    assert_eq!(b.list("").await.unwrap().len(), 2);
    let next = waits(&b, 2);
    setting.has_positions(1).await;
    assert!(a.force_release("k").await.unwrap());
    let next = served(next).await;
    assert!(two.release().await.unwrap_err().is_lost());
    next.release().await.unwrap();
    assert!(!a.force_release("k").await.unwrap());
    assert_eq!(semaphore.available().await.unwrap(), 2, "the total stays");
    // Nothing else may use the name, and a waiter for it would wait for ever.
    for error in [
        a.lock("k").acquire().await.unwrap_err(),
        a.fair_lock("k").acquire().await.unwrap_err(),
        a.rw_lock("k").read().acquire().await.unwrap_err(),
        a.latch("k").try_set_count(1).await.unwrap_err(),
    ] {
        let is_taken = matches!(error, Error::KeyTaken { .. }) && error.to_string().contains("a semaphore");
        assert!(is_taken, "{error}");
    }
    let guard = a.lock("l").acquire().await.unwrap();
    for error in [
        a.semaphore("l").permits(1).acquire().await.unwrap_err(),
        a.unowned_semaphore("l").permits(1).acquire().await.unwrap_err(),
        a.latch("l").count().await.unwrap_err(),
    ] {
        assert!(error.to_string().contains("a plain lock"), "{error}");
    }
    guard.release().await.unwrap();
    setting.no_permit_is_left().await;
}

pub(crate) async fn waiters_of_all_processes_go_on_when_a_latch_is_counted_down<B: Permits>(
    server: Arc<B::Server>,
) {
    const COUNT: u64 = 12;
    let setting = Setting::<B>::on(server).await;
    let clients = join_all((0..4).map(async |_| setting.client().await)).await;
    assert!(clients[0].latch("l").try_set_count(COUNT).await.unwrap());
    let wait = |client: &LockClient| {
        let latch = client.latch("l");
        tokio::spawn(async move { latch.wait().await.unwrap() })
    };
    let waiting: Vec<_> = clients.iter().map(wait).collect();
    let down = async |number: u64| {
        let left = clients[number as usize % 4].latch("l").count_down().await;
        left.unwrap()
    };
    let mut left = join_all((0..COUNT - 1).map(&down)).await;
    assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
    left.push(down(0).await);
    left.sort_unstable();
    assert_eq!(left, (0..COUNT).collect::<Vec<_>>());
    for waiting in waiting {
        within(PATIENCE, "the waiter", waiting).await.unwrap();
    }
    // Nothing of it is left: the name is free for anything else.
    let guard = clients[0].lock("l").try_acquire().await.unwrap();
    guard.release().await.unwrap();
}
