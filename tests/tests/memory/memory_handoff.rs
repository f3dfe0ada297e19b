//! Handoff under a paused clock: a released lock goes to the next waiter of this process without
//! the store, in arrival order, and every other rule holds in the middle of such a chain.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use dlock::store::Kind;
use dlock::store::{GrantId, Store};
use dlock::stores::memory::MemoryStore;
use dlock::{Error, HoldState, Lock, LockClient, LockGuard, LockKey};
use dlock_tests::Watched;
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

/// A client that only listens.
const NOBODY: GrantId = GrantId::from_parts(0, 0);
const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);

struct Setting {
    store: MemoryStore,
    watched: Watched,
    client: LockClient,
}

async fn setting() -> Setting {
    let store = MemoryStore::new();
    let watched = Watched::new(store.clone());
    let client = LockClient::builder().store(watched.clone()).build().await;
    Setting {
        store,
        watched,
        client: client.unwrap(),
    }
}

impl Setting {
    fn acquires(&self) -> usize {
        self.watched.seen().acquires.load(SeqCst)
    }

    fn releases(&self) -> usize {
        self.watched.seen().releases.load(SeqCst)
    }

    /// A client of another process.
    async fn other(&self) -> LockClient {
        let builder = LockClient::builder().store(self.store.clone());
        builder.build().await.unwrap()
    }

    async fn assert_clean(&self) {
        sleep(MS).await;
        assert!(self.store.is_empty(), "something is held");
        assert_eq!(self.store.watched(), 0, "something is listened for");
        assert_eq!((self.client.held(), self.client.waited_for()), (0, 0));
    }
}

type Waiting = JoinHandle<Result<LockGuard, Error>>;

fn waiting(lock: &Lock) -> Waiting {
    tokio::spawn(lock.acquire())
}

async fn got(waiting: Waiting) -> LockGuard {
    waiting.await.unwrap().unwrap()
}

/// Held for this long, while so many wait behind.
async fn held(lock: &Lock, behind: usize, time: Duration) -> (LockGuard, Vec<Waiting>) {
    let guard = lock.acquire().await.unwrap();
    let waiters = (0..behind).map(|_| waiting(lock)).collect();
    sleep(time).await;
    (guard, waiters)
}

/// Held, with two waiters behind.
async fn held_before_two(lock: &Lock) -> (LockGuard, [Waiting; 2]) {
    let (guard, waiters) = held(lock, 2, MS).await;
    (guard, waiters.try_into().expect("two"))
}

#[tokio::test(start_paused = true)]
async fn a_crowd_is_served_in_order_almost_without_the_store() {
    let s = setting().await;
    let lock = s.client.lock("k");
    let first = lock.acquire().await.unwrap();
    let served = Arc::new(Mutex::new(vec![(0, first.fencing_token())]));
    let mut tasks = Vec::new();
    for i in 1..=200 {
        let (lock, served) = (lock.clone(), served.clone());
        tasks.push(tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            served.lock().push((i, guard.fencing_token()));
            tokio::task::yield_now().await;
            assert_eq!(guard.state(), HoldState::Held);
            guard.release().await.unwrap();
        }));
        tokio::task::yield_now().await;
    }
    first.release().await.unwrap();
    for task in tasks {
        task.await.unwrap();
    }
    let served = served.lock().clone();
    assert!(
        served.is_sorted(),
        "in arrival order, with growing tokens: {served:?}"
    );
    assert!(
        served.windows(2).all(|two| two[0].1 < two[1].1),
        "a token was used twice"
    );
    assert!(
        s.acquires() <= 12 && s.releases() <= 12,
        "{} {}",
        s.acquires(),
        s.releases()
    );
    s.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn a_number_of_handoffs_is_kept() {
    let s = setting().await;
    let lock = s.client.lock("k").local_handoffs(3);
    let (first, waiters) = held(&lock, 8, MS).await;
    first.release().await.unwrap();
    for (i, waiter) in waiters.into_iter().enumerate() {
        // After the first three, one from the store and three more, and again.
        let guard = got(waiter).await;
        assert_eq!(s.releases(), (i + 1) / 4);
        guard.release().await.unwrap();
    }
    s.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn waiter_of_another_process_waits_for_a_slice_and_not_for_the_crowd() {
    let s = setting().await;
    let other = s.other().await;
    let until = Instant::now() + 2 * SEC;
    let crowd: Vec<_> = (0..8)
        .map(|_| {
            let lock = s.client.lock("k");
            tokio::spawn(async move {
                let mut served = 0;
                while Instant::now() < until {
                    let guard = lock.acquire().await.unwrap();
                    sleep(MS).await;
                    guard.release().await.unwrap();
                    served += 1;
                }
                served
            })
        })
        .collect();
    let lock = other.lock("k");
    let (mut served, mut longest) = (0, Duration::ZERO);
    while Instant::now() < until {
        let asked = Instant::now();
        let guard = lock.acquire().await.unwrap();
        longest = longest.max(asked.elapsed());
        sleep(5 * MS).await;
        guard.release().await.unwrap();
        served += 1;
    }
    let mut here: Vec<u32> = Vec::new();
    for task in crowd {
        here.push(task.await.unwrap());
    }
    assert!(longest <= 15 * MS, "{longest:?}");
    assert!(served > 100, "{served}");
    let (least, most) = (here.iter().min().unwrap(), here.iter().max().unwrap());
    // How much a slice takes in depends on the tokens that could be reserved, and those on the real clock.
    assert!(*least > 3 && most - least <= 2, "{here:?}");
    s.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn listener_that_never_comes_costs_little() {
    let s = setting().await;
    // A process that was stopped while it waited: subscribed, and silent.
    let key = LockKey::new("k").unwrap();
    let silent = Arc::new(s.store.clone()).watch(Kind::Mutex, &key, NOBODY);
    let lock = s.client.lock("k");
    let begin = Instant::now();
    for _ in 0..1000 {
        lock.acquire().await.unwrap().release().await.unwrap();
    }
    let took = begin.elapsed();
    assert!(took > Duration::ZERO && took < 400 * MS, "{took:?}");
    drop(silent);
    s.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn only_equal_renewed_leases_are_handed_off() {
    let s = setting().await;
    let plain = s.client.lock("k");
    let others = [
        plain.clone().fixed_lease(10 * SEC),
        plain.clone().lease(10 * SEC),
        plain.clone().min_hold(20 * MS),
        plain.clone().max_hold(10 * SEC),
        plain.clone().local_handoffs(0),
    ];
    for (i, other) in others.iter().enumerate() {
        for (from, to) in [(&plain, other), (other, &plain)] {
            let before = s.releases();
            let guard = from.acquire().await.unwrap();
            let next = waiting(to);
            sleep(MS).await;
            guard.release().await.unwrap();
            let next = got(next).await;
            assert_eq!(s.releases(), before + 1, "case {i}");
            assert_eq!(next.state(), HoldState::Held);
            next.release().await.unwrap();
            sleep(30 * MS).await;
        }
    }
    s.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn suspect_hold_is_not_handed_off() {
    let s = setting().await;
    let lock = s.client.lock("k");
    let guard = lock.acquire().await.unwrap();
    s.watched.seen().hang_renewals.store(true, SeqCst);
    let next = waiting(&lock);
    sleep(MS).await;
    s.watched.seen().doubts.tell(Default::default());
    sleep(MS).await;
    assert_eq!(guard.state(), HoldState::Suspect);
    guard.release().await.unwrap();
    let next = got(next).await;
    assert_eq!(s.releases(), 1);
    s.watched.seen().hang_renewals.store(false, SeqCst);
    drop(next);
    s.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn max_waiters_counts_waiters_behind_a_lock_that_is_held_here() {
    let s = setting().await;
    let lock = s.client.lock("k").max_waiters(2);
    let (guard, [next, after]) = held_before_two(&lock).await;
    assert!(matches!(lock.acquire().await, Err(Error::TooManyWaiters { .. })));
    guard.release().await.unwrap();
    let next = got(next).await;
    let last = waiting(&lock);
    sleep(MS).await;
    assert!(matches!(lock.acquire().await, Err(Error::TooManyWaiters { .. })));
    assert!(matches!(
        s.client.lock("k").max_waiters(0).acquire().await,
        Err(Error::TooManyWaiters { limit: 0, .. })
    ));
    drop(next);
    drop(got(after).await);
    drop(got(last).await);
    s.assert_clean().await;
}

#[tokio::test(start_paused = true)]
async fn re_entry_and_second_guards_hold_the_handoff_back() {
    let s = setting().await;
    let lock = s.client.lock("k");
    let guard = lock.acquire().await.unwrap();
    let next = waiting(&lock);
    sleep(MS).await;
    let second = guard.reenter().unwrap();
    guard.release().await.unwrap();
    sleep(MS).await;
    assert!(!next.is_finished());
    second.release().await.unwrap();
    let next = got(next).await;
    assert_eq!(s.releases(), 0);
    // In its own frame the heir re-enters.
    let inner = lock.clone();
    next.run(async move { inner.acquire().await.unwrap().release().await.unwrap() })
        .await
        .unwrap();
    assert_eq!(next.state(), HoldState::Held);
    next.release().await.unwrap();
    s.assert_clean().await;
}

/// Processes that take turns at one lock for a while: how many requests each handoff took, and how often each of them had
/// the lock.
async fn requests_per_handoff(processes: usize, hold: Duration) -> (f64, Vec<usize>) {
    let memory = MemoryStore::new();
    let stores: Vec<_> = (0..processes).map(|_| Watched::new(memory.clone())).collect();
    let mut tasks = Vec::new();
    for watched in &stores {
        watched.seen().slow_answers.store(1, SeqCst);
        let client = LockClient::builder()
            .store(watched.clone())
            .build()
            .await
            .unwrap();
        tasks.push(tokio::spawn(async move {
            let mut had = 0;
            let begun = Instant::now();
            while begun.elapsed() < 200 * (hold + 3 * MS) {
                let guard = client.lock("k").acquire().await.unwrap();
                had += 1;
                sleep(hold).await;
                guard.release().await.unwrap();
            }
            had
        }));
    }
    let had = join_all(tasks)
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect::<Vec<_>>();
    let asked: usize = (stores.iter())
        .map(|watched| watched.seen().acquires.load(SeqCst))
        .sum();
    (asked as f64 / had.iter().sum::<usize>() as f64, had)
}

/// However many processes wait for a lock, a few of them ask for it when it becomes available.
#[tokio::test(start_paused = true)]
async fn crowd_of_processes_asks_a_few_times_for_each_handoff() {
    for (processes, hold) in [(10, MS), (10, 500 * MS), (100, 50 * MS)] {
        let (requests, had) = requests_per_handoff(processes, hold).await;
        // Each first asks once, and once more when it listens.
        let begin = 2.0 * processes as f64 / had.iter().sum::<usize>() as f64;
        assert!(
            requests - begin < 12.0,
            "{processes} processes, {hold:?}: {requests:.1}, had {had:?} times"
        );
    }
}

/// Processes that hear of a release and do not ask, since they are stopped, keep the others waiting for a moment only.
#[tokio::test(start_paused = true)]
async fn crowd_whose_first_ranks_are_stopped_costs_a_moment() {
    let memory = MemoryStore::new();
    let key = LockKey::new("k").unwrap();
    let stopped: Vec<_> = (0..100)
        .map(|_| {
            let watched = Arc::new(memory.clone());
            Store::watch(watched, Kind::Mutex, &key, NOBODY)
        })
        .collect();
    let client = || async { LockClient::builder().store(memory.clone()).build().await.unwrap() };
    let (holder, waiter) = (client().await, client().await);
    for _ in 0..50 {
        let guard = holder.lock("k").acquire().await.unwrap();
        let waiting = tokio::spawn(waiter.lock("k").acquire());
        sleep(20 * MS).await;
        guard.release().await.unwrap();
        let released = Instant::now();
        drop(waiting.await.unwrap().unwrap());
        assert!(released.elapsed() < 60 * MS, "{:?}", released.elapsed());
        sleep(20 * MS).await;
    }
    drop(stopped);
}
