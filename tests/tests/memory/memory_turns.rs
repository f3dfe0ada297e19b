//! How the turn passes to the next waiter after a release to the store, under a paused clock.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use dlock::stores::memory::MemoryStore;
use dlock::{Error, Lock, LockClient, LockGuard};
use dlock_tests::Watched;
use futures_util::poll;
use tokio::task::yield_now;
use tokio::time::Instant;

const MS: Duration = Duration::from_millis(1);

type Acquire = Pin<Box<dyn Future<Output = Result<LockGuard, Error>> + Send>>;

/// Two processes with callers of the same lock.
struct Turns {
    watched: Watched,
    here: LockClient,
    elsewhere: LockClient,
}

impl Turns {
    async fn new() -> Turns {
        let store = MemoryStore::new();
        let watched = Watched::new(store.clone());
        let here = LockClient::builder().store(watched.clone()).build();
        let elsewhere = LockClient::builder().store(store).build();
        Turns {
            here: here.await.unwrap(),
            elsewhere: elsewhere.await.unwrap(),
            watched,
        }
    }

    /// For so many milliseconds the answers to `here` are on their way.
    fn answers_after(&self, ms: usize) {
        self.watched.seen().slow_answers.store(ms, SeqCst);
    }

    /// Each release goes to the store.
    fn lock(client: &LockClient) -> Lock {
        client.lock("k").local_handoffs(0)
    }
}

/// Lets all tasks of the clients do what they can without waiting.
async fn settle() {
    for _ in 0..20 {
        yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn waiter_that_leaves_passes_on_that_another_process_goes_first() {
    let turns = Turns::new().await;
    let guard = Turns::lock(&turns.here).acquire().await.unwrap();
    let mut head: Acquire = Box::pin(Turns::lock(&turns.here).acquire());
    let mut next: Acquire = Box::pin(Turns::lock(&turns.here).acquire());
    let mut other: Acquire = Box::pin(Turns::lock(&turns.elsewhere).acquire());
    for waiter in [&mut head, &mut next, &mut other] {
        assert!(poll!(waiter).is_pending());
    }
    drop(guard);
    settle().await;
    drop(head);
    assert!(poll!(&mut next).is_pending(), "the other process has its turn");
    assert!(poll!(&mut other).is_ready());
}

/// It was woken, and has the turn of this process while others go first.
#[tokio::test(start_paused = true)]
async fn waiter_that_leaves_while_another_process_goes_first_passes_that_on() {
    let turns = Turns::new().await;
    let guard = Turns::lock(&turns.here).acquire().await.unwrap();
    let mut head: Acquire = Box::pin(Turns::lock(&turns.here).acquire());
    let mut next: Acquire = Box::pin(Turns::lock(&turns.here).acquire());
    let mut other: Acquire = Box::pin(Turns::lock(&turns.elsewhere).acquire());
    for waiter in [&mut head, &mut next, &mut other] {
        assert!(poll!(waiter).is_pending());
    }
    drop(guard);
    settle().await;
    assert!(poll!(&mut head).is_pending());
    drop(head);
    assert!(poll!(&mut next).is_pending(), "the other process has its turn");
    assert!(poll!(&mut other).is_ready());
}

/// Its next waiter learns from the reply whether another process goes first.
#[tokio::test(start_paused = true)]
async fn release_that_is_not_polled_does_not_delay_the_next_waiter() {
    let turns = Turns::new().await;
    let guard = Turns::lock(&turns.here).acquire().await.unwrap();
    let lock = Turns::lock(&turns.here);
    let next = tokio::spawn(async move { lock.acquire().await });
    settle().await;
    turns.answers_after(5);
    let mut release = Box::pin(guard.release());
    assert!(poll!(&mut release).is_pending());
    let started = Instant::now();
    drop(next.await.unwrap().unwrap());
    assert!(started.elapsed() < 100 * MS, "{:?}", started.elapsed());
    release.await.unwrap();
}
