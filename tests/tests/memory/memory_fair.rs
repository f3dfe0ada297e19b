//! The times of fair locks under a paused clock: the cost of dead waiters, which waiters keep or regain a position, and
//! how often a waiter asks.
//!
//! The clock moves by `sleep`, never by `advance`; every test runs inside a few virtual hours, because a dead-lock
//! never idles once there is a watchdog.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use dlock::stores::memory::MemoryStore;
use dlock::testing::TestStore;
use dlock::{Error, Lock, LockClient, LockGuard};
use dlock_tests::paused;
use futures_util::poll;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

const SEC: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);
/// For how long a position is kept for a waiter that does not ask.
const PLACE: Duration = Duration::from_secs(5);
/// How often a waiter asks.
const ASKS: Duration = Duration::from_millis(1500);

async fn client(store: &MemoryStore) -> LockClient {
    LockClient::builder().store(store.clone()).build().await.unwrap()
}

type Acquire = Pin<Box<dyn Future<Output = Result<LockGuard, Error>> + Send>>;

/// A waiter in the queue that is not polled any more.
async fn silent(client: &LockClient) -> Acquire {
    let mut acquire: Acquire = Box::pin(client.fair_lock("k").acquire());
    assert!(poll!(&mut acquire).is_pending());
    acquire
}

/// The served waiters, and when.
type Served = Arc<Mutex<Vec<(usize, Duration)>>>;

fn waiter(client: &LockClient, name: usize, begun: Instant, served: &Served) -> JoinHandle<()> {
    waiter_for(client.fair_lock("k"), name, begun, served)
}

fn waiter_for(lock: Lock, name: usize, begun: Instant, served: &Served) -> JoinHandle<()> {
    let served = served.clone();
    tokio::spawn(async move {
        let guard = lock.acquire().await.unwrap();
        served.lock().push((name, begun.elapsed()));
        guard.release().await.unwrap();
    })
}

#[test]
fn dead_head_waiter_delays_the_queue_by_five_seconds() {
    paused(async {
        let store = MemoryStore::new();
        let (a, b, c) = (client(&store).await, client(&store).await, client(&store).await);
        let guard = a.fair_lock("k").acquire().await.unwrap();
        let dead = silent(&b).await;
        let begun = Instant::now();
        let served = Served::default();
        let next = waiter(&c, 1, begun, &served);
        sleep(MS).await;
        guard.release().await.unwrap();
        next.await.unwrap();
        let waited = served.lock()[0].1;
        assert!(waited >= PLACE - MS && waited <= PLACE + 2 * MS, "{waited:?}");
        drop(dead);
        sleep(MS).await;
        assert!(store.is_empty() && store.queued() == 0);
    });
}

#[test]
fn dead_process_delays_the_queue_no_longer_with_many_waiters() {
    paused(async {
        let store = MemoryStore::new();
        let (a, b, c) = (client(&store).await, client(&store).await, client(&store).await);
        let guard = a.fair_lock("k").acquire().await.unwrap();
        let begun = Instant::now();
        let served = Served::default();
        let first = waiter(&c, 1, begun, &served);
        sleep(MS).await;
        let mut dead = Vec::new();
        for _ in 0..50 {
            dead.push(silent(&b).await);
        }
        let last = waiter(&c, 2, begun, &served);
        sleep(MS).await;
        guard.release().await.unwrap();
        first.await.unwrap();
        last.await.unwrap();
        let waited = served.lock()[1].1;
        assert!(waited >= PLACE - MS && waited <= PLACE + 5 * MS, "{waited:?}");
        drop(dead);
    });
}

#[test]
fn dead_waiters_delay_no_waiter_while_the_lock_is_held() {
    paused(async {
        let store = MemoryStore::new();
        let (a, b, c) = (client(&store).await, client(&store).await, client(&store).await);
        let guard = a.fair_lock("k").acquire().await.unwrap();
        let dead = [silent(&b).await, silent(&b).await];
        let served = Served::default();
        let next = waiter(&c, 1, Instant::now(), &served);
        sleep(10 * SEC).await;
        let released = Instant::now();
        guard.release().await.unwrap();
        next.await.unwrap();
        assert!(released.elapsed() <= MS, "{:?}", released.elapsed());
        drop(dead);
    });
}

#[test]
fn store_that_stays_away_is_reported_in_time_and_leaves_the_queue_empty() {
    paused(async {
        let store = TestStore::new();
        let (a, b) = (store.client(), store.client());
        let guard = a.fair_lock("k").acquire().await.unwrap();
        let asking = tokio::spawn(b.fair_lock("k").acquire());
        sleep(SEC).await;
        store.set_down(true);
        let begun = Instant::now();
        let error = asking.await.unwrap().unwrap_err();
        assert!(error.is_unavailable(), "{error}");
        // The time to the next question, and the patience with the store.
        assert!(begun.elapsed() <= ASKS + 3500 * MS, "{:?}", begun.elapsed());
        store.set_down(false);
        sleep(40 * SEC).await;
        drop(guard);
        drop(b.fair_lock("k").wait(10 * SEC).acquire().await.unwrap());
    });
}
