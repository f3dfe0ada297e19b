//! Handoff under a paused clock: a released lock goes to the next waiter of this process without
//! the store, in arrival order, and every other rule holds in the middle of such a chain.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use dlock::stores::memory::MemoryStore;
use dlock::{Error, HoldState, Lock, LockClient, LockGuard};
use dlock_tests::Watched;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::sleep;
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
