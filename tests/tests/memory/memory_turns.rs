//! Which waiter asks next after a release to the store, under a paused clock.

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
struct Clients {
    watched: Watched,
    here: LockClient,
    elsewhere: LockClient,
}

impl Clients {
    async fn new() -> Clients {
        let store = MemoryStore::new();
        let watched = Watched::new(store.clone());
        let here = LockClient::builder().store(watched.clone()).build();
        let elsewhere = LockClient::builder().store(store).build();
        Clients {
            here: here.await.unwrap(),
            elsewhere: elsewhere.await.unwrap(),
            watched,
        }
    }

    /// For so many milliseconds the answers to `here` are on their way.
    fn answers_after(&self, ms: usize) {
        self.watched.seen().slow_answers.store(ms, SeqCst);
    }

    /// The queue head and the next waiter of `here`, and one of `elsewhere`, just after `here` has released the lock.
    async fn wait_for_a_release(&self) -> [Acquire; 3] {
        let guard = Clients::lock(&self.here).acquire().await.unwrap();
        let mut waiters = [&self.here, &self.here, &self.elsewhere]
            .map(|client| -> Acquire { Box::pin(Clients::lock(client).acquire()) });
        for waiter in &mut waiters {
            assert!(poll!(waiter).is_pending());
        }
        drop(guard);
        settle().await;
        waiters
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
    let clients = Clients::new().await;
    let [head, mut next, mut other] = clients.wait_for_a_release().await;
    drop(head);
    assert!(poll!(&mut next).is_pending(), "the other process goes first");
    assert!(poll!(&mut other).is_ready());
}

/// It was woken, and lets others go first.
#[tokio::test(start_paused = true)]
async fn waiter_that_leaves_while_another_process_goes_first_passes_that_on() {
    let clients = Clients::new().await;
    let [mut head, mut next, mut other] = clients.wait_for_a_release().await;
    assert!(poll!(&mut head).is_pending());
    drop(head);
    assert!(poll!(&mut next).is_pending(), "the other process goes first");
    assert!(poll!(&mut other).is_ready());
}

/// Its next waiter learns from the reply whether another process goes first.
#[tokio::test(start_paused = true)]
async fn release_that_is_not_polled_does_not_delay_the_next_waiter() {
    let clients = Clients::new().await;
    let guard = Clients::lock(&clients.here).acquire().await.unwrap();
    let lock = Clients::lock(&clients.here);
    let next = tokio::spawn(async move { lock.acquire().await });
    settle().await;
    clients.answers_after(5);
    let mut release = Box::pin(guard.release());
    assert!(poll!(&mut release).is_pending());
    let started = Instant::now();
    drop(next.await.unwrap().unwrap());
    assert!(started.elapsed() < 100 * MS, "{:?}", started.elapsed());
    release.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn next_waiter_asks_right_behind_a_release_while_no_other_process_waits() {
    let clients = Clients::new().await;
    let mut guard = Clients::lock(&clients.here).acquire().await.unwrap();
    // The first reply says that no other process waits; the second release and the request behind it share a round trip.
    for (answers_after, most) in [(0, 2 * MS), (5, 8 * MS)] {
        let lock = Clients::lock(&clients.here);
        let next = tokio::spawn(async move { lock.acquire().await });
        settle().await;
        clients.answers_after(answers_after);
        let started = Instant::now();
        let (released, next) = tokio::join!(guard.release(), next);
        released.unwrap();
        guard = next.unwrap().unwrap();
        assert!(
            started.elapsed() < most,
            "{answers_after}: {:?}",
            started.elapsed()
        );
    }
}

/// Its own subscription ends with its turn, and still received the notification of the last release.
#[tokio::test(start_paused = true)]
async fn process_whose_waiters_were_all_served_does_not_yield_to_itself() {
    let client = LockClient::memory();
    let lock = client.lock("k");
    for round in 0..100 {
        let guard = lock.acquire().await.unwrap();
        let mut waiter = Box::pin(async { lock.acquire().await });
        assert!(poll!(&mut waiter).is_pending());
        guard.release().await.unwrap();
        waiter.await.unwrap().release().await.unwrap();
        let asked = Instant::now();
        lock.acquire().await.unwrap().release().await.unwrap();
        assert_eq!(asked.elapsed(), Duration::ZERO, "round {round}");
    }
}

/// The last release of one side goes to the other one; an acquire soon after does not wait.
#[tokio::test(start_paused = true)]
async fn readers_and_writers_of_one_process_do_not_yield_to_those_that_are_gone() {
    let client = LockClient::memory();
    let lock = client.rw_lock("k");
    for round in 0..100 {
        let reader = lock.read().acquire().await.unwrap();
        let mut writer = Box::pin(async { lock.write().acquire().await });
        assert!(poll!(&mut writer).is_pending());
        reader.release().await.unwrap();
        writer.await.unwrap().release().await.unwrap();
        let asked = Instant::now();
        lock.read().acquire().await.unwrap().release().await.unwrap();
        lock.write().acquire().await.unwrap().release().await.unwrap();
        assert_eq!(asked.elapsed(), Duration::ZERO, "round {round}");
    }
}

/// A reader that comes while a writer of its process has been notified lets it go first.
#[tokio::test(start_paused = true)]
async fn reader_lets_a_notified_writer_of_its_process_go_first() {
    let client = LockClient::memory();
    let lock = client.rw_lock("k");
    let reader = lock.read().acquire().await.unwrap();
    let mut writer = Box::pin(async { lock.write().acquire().await });
    assert!(poll!(&mut writer).is_pending());
    reader.release().await.unwrap();
    let mut next = Box::pin(async { lock.read().acquire().await });
    assert!(poll!(&mut next).is_pending(), "the writer goes first");
    writer.await.unwrap().release().await.unwrap();
    next.await.unwrap().release().await.unwrap();
}

/// Its own writer had asked and did not listen yet when the reader released.
#[tokio::test(start_paused = true)]
async fn writer_that_does_not_listen_is_not_taken_for_the_process_that_does() {
    let clients = Clients::new().await;
    let (here, elsewhere) = (clients.here.rw_lock("k"), clients.elsewhere.rw_lock("k"));
    let reader = here.read().acquire().await.unwrap();
    let mut other = Box::pin(async { elsewhere.write().acquire().await });
    assert!(poll!(&mut other).is_pending());
    clients.answers_after(5);
    let mut writer = Box::pin(async { here.write().acquire().await });
    assert!(poll!(&mut writer).is_pending());
    reader.release().await.unwrap();
    drop(writer);
    settle().await;
    clients.answers_after(0);
    let mut next = Box::pin(async { here.read().acquire().await });
    assert!(poll!(&mut next).is_pending(), "the other process goes first");
    assert!(poll!(&mut other).is_ready());
}

/// The last holder still has the subscription of the waiters of its process.
#[tokio::test(start_paused = true)]
async fn process_yields_to_another_one_that_listens_beside_it() {
    let clients = Clients::new().await;
    let (lock, elsewhere) = (clients.here.lock("k"), clients.elsewhere.lock("k"));
    let guard = lock.acquire().await.unwrap();
    let mut waiter = Box::pin(async { lock.acquire().await });
    assert!(poll!(&mut waiter).is_pending());
    guard.release().await.unwrap();
    let guard = waiter.await.unwrap();
    assert_eq!(clients.watched.memory().watched(), 1);
    let mut other = Box::pin(async { elsewhere.acquire().await });
    assert!(poll!(&mut other).is_pending());
    guard.release().await.unwrap();
    let mut next = Box::pin(async { lock.acquire().await });
    assert!(poll!(&mut next).is_pending(), "the other process goes first");
    assert!(poll!(&mut other).is_ready());
}
