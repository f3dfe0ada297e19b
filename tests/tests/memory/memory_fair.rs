//! The times of fair locks under a paused clock: the cost of dead waiters, which waiters keep or regain a position, and
//! how often a waiter asks.
//!
//! The clock moves by `sleep`, never by `advance`; every test runs inside a few virtual hours, because a dead-lock
//! never idles once there is a watchdog.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use dlock::stores::memory::MemoryStore;
use dlock::testing::{Fault, Step, TestStore};
use dlock::{Error, Lock, LockClient, LockGuard, LockKind};
use dlock_tests::{Watched, paused};
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

fn order(served: &Served) -> Vec<usize> {
    served.lock().iter().map(|(name, _)| *name).collect()
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
fn dead_waiters_delay_nobody_while_the_lock_is_held() {
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
fn silent_waiter_returns_before_later_ones() {
    paused(async {
        let store = MemoryStore::new();
        let (a, b, c) = (client(&store).await, client(&store).await, client(&store).await);
        let guard = a.fair_lock("k").acquire().await.unwrap();
        let mut stood_still = vec![silent(&b).await, silent(&b).await];
        let served = Served::default();
        let later = [
            waiter(&c, 3, Instant::now(), &served),
            waiter(&c, 4, Instant::now(), &served),
        ];
        sleep(20 * SEC).await;
        assert_eq!(store.queued(), 2, "those who are silent count as gone");
        // The second is polled first, so that it does not come back before the first by chance.
        let second = stood_still.pop().unwrap();
        let first = stood_still.pop().unwrap();
        let mut back = Vec::new();
        for (name, acquire) in [(2, second), (1, first)] {
            let served = served.clone();
            back.push(tokio::spawn(async move {
                let guard = acquire.await.unwrap();
                served.lock().push((name, Duration::ZERO));
                guard.release().await.unwrap();
            }));
            sleep(MS).await;
        }
        assert_eq!(store.queued(), 4);
        guard.release().await.unwrap();
        for task in back.into_iter().chain(later) {
            task.await.unwrap();
        }
        assert_eq!(order(&served), [1, 2, 3, 4]);
    });
}

#[test]
fn who_waits_for_an_hour_keeps_the_place_and_asks_every_second_and_a_half() {
    paused(async {
        let watched = Watched::new(MemoryStore::new());
        let a = client(watched.memory()).await;
        let b = LockClient::builder()
            .store(watched.clone())
            .build()
            .await
            .unwrap();
        let guard = a.fair_lock("k").acquire().await.unwrap();
        let served = Served::default();
        let first = waiter(&b, 1, Instant::now(), &served);
        sleep(MS).await;
        let second = waiter(&a, 2, Instant::now(), &served);
        sleep(3600 * SEC).await;
        let asked = watched.seen().acquires.load(SeqCst);
        let expected = 3600 * 1000 / ASKS.as_millis() as usize;
        // One more when it has begun to listen.
        assert!((expected..=expected + 3).contains(&asked), "{asked}");
        guard.release().await.unwrap();
        first.await.unwrap();
        second.await.unwrap();
        assert_eq!(order(&served), [1, 2]);
        assert_eq!((watched.memory().watched(), b.waited_for()), (0, 0));
    });
}

#[test]
fn in_one_process_each_turn_takes_one_question_at_the_most_and_no_subscription() {
    // The second time each has one, the first time only whom it is not handed off to.
    for (handoffs, questions) in [(100, 1), (0, 16), (7, 2)] {
        in_one_process_turns_take_so_many_questions(handoffs, questions);
    }
}

fn in_one_process_turns_take_so_many_questions(handoffs: u32, questions: usize) {
    paused(async move {
        let watched = Watched::new(MemoryStore::new());
        let client = LockClient::builder()
            .store(watched.clone())
            .build()
            .await
            .unwrap();
        let guard = client.fair_lock("k").acquire().await.unwrap();
        let served = Served::default();
        let waiters: Vec<_> = (0..16)
            .map(|i| {
                let lock = client.fair_lock("k").local_handoffs(handoffs);
                waiter_for(lock, i, Instant::now(), &served)
            })
            .collect();
        sleep(MS).await;
        assert_eq!(watched.seen().acquires.load(SeqCst), 17);
        assert_eq!(watched.memory().watched(), 0);
        guard.release().await.unwrap();
        for waiter in waiters {
            waiter.await.unwrap();
        }
        assert_eq!(order(&served), (0..16).collect::<Vec<_>>());
        assert_eq!(watched.seen().acquires.load(SeqCst), 17 + questions);
        assert_eq!(watched.seen().releases.load(SeqCst), 17);
        assert_eq!(watched.memory().queued(), 0);
    });
}

#[test]
fn who_waits_long_behind_its_own_process_listens_in_case_others_open_the_lock() {
    paused(async {
        let store = MemoryStore::new();
        let (a, b) = (client(&store).await, client(&store).await);
        let _guard = a.fair_lock("k").acquire().await.unwrap();
        let served = Served::default();
        let next = waiter(&a, 1, Instant::now(), &served);
        sleep(200 * MS).await;
        let forced = Instant::now();
        assert!(b.force_release("k").await.unwrap());
        next.await.unwrap();
        assert!(forced.elapsed() <= MS, "{:?}", forced.elapsed());
    });
}

#[test]
fn nothing_is_asked_for_who_is_not_polled_when_it_should_be() {
    paused(async {
        let store = MemoryStore::new();
        let (a, b) = (client(&store).await, client(&store).await);
        let guard = a.fair_lock("k").acquire().await.unwrap();
        // Behind the holder in its own process, so that it would be asked for when that releases the lock.
        let silent = silent(&a).await;
        let served = Served::default();
        let others = [
            waiter(&b, 2, Instant::now(), &served),
            waiter(&a, 3, Instant::now(), &served),
        ];
        sleep(4 * SEC).await;
        let released = Instant::now();
        guard.release().await.unwrap();
        for other in others {
            other.await.unwrap();
        }
        // Its position, and not a lease that is not renewed.
        assert!(released.elapsed() <= SEC + 2 * MS, "{:?}", released.elapsed());
        assert_eq!(order(&served), [2, 3]);
        silent.await.unwrap().release().await.unwrap();
        assert!(store.is_empty() && store.queued() == 0);
    });
}

#[test]
fn a_lease_that_ends_is_taken_over_at_that_moment() {
    paused(async {
        let store = MemoryStore::new();
        let (a, b) = (client(&store).await, client(&store).await);
        let begun = Instant::now();
        let guard = a.fair_lock("k").fixed_lease(7 * SEC).acquire().await.unwrap();
        let served = Served::default();
        let others = [waiter(&b, 1, begun, &served), waiter(&a, 2, begun, &served)];
        for other in others {
            other.await.unwrap();
        }
        let (name, at) = served.lock()[0];
        assert!(
            name == 1 && at >= 7 * SEC && at <= 7 * SEC + 2 * MS,
            "{name} after {at:?}"
        );
        assert!(!guard.is_held());
        drop(guard);
        sleep(MS).await;
        assert!(store.is_empty());
    });
}

#[test]
fn a_question_that_was_not_put_costs_no_place_and_one_without_an_answer_does() {
    for (fault, expected) in [
        (Fault::Unreachable, [1, 2]),
        (Fault::RequestLost, [2, 1]),
        (Fault::AnswerLost, [2, 1]),
    ] {
        paused(async {
            let store = TestStore::new();
            let (a, b, c) = (store.client(), store.client(), store.client());
            let guard = a.fair_lock("k").acquire().await.unwrap();
            let served = Served::default();
            let first = waiter(&b, 1, Instant::now(), &served);
            sleep(500 * MS).await;
            let second = waiter(&c, 2, Instant::now(), &served);
            sleep(SEC / 2).await;
            // The next to ask is the first.
            store.fail_next(Step::Acquire, fault);
            sleep(SEC).await;
            guard.release().await.unwrap();
            first.await.unwrap();
            second.await.unwrap();
            assert_eq!(order(&served), expected, "{fault:?}");
            sleep(SEC).await;
            assert_eq!((store.held(), store.watched()), (0, 0), "{fault:?}");
        });
    }
}

#[test]
fn a_store_that_stays_away_is_told_of_in_time_and_nobody_is_left_in_the_queue() {
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

#[test]
fn a_lock_that_is_lost_here_is_asked_for_at_once_by_who_waits_here() {
    paused(async {
        let store = TestStore::new();
        let client = store.client();
        let guard = client.fair_lock("k").acquire().await.unwrap();
        let served = Served::default();
        let next = waiter(&client, 1, Instant::now(), &served);
        sleep(10 * MS).await;
        let lost = Instant::now();
        store.lose("k");
        next.await.unwrap();
        assert!(lost.elapsed() <= 2 * MS, "{:?}", lost.elapsed());
        assert!(guard.release().await.unwrap_err().is_lost());
    });
}

#[test]
fn a_plain_lock_of_the_same_name_jumps_the_queue_and_delays_it_by_one_question() {
    paused(async {
        let store = MemoryStore::new();
        let (a, b) = (client(&store).await, client(&store).await);
        let plain = a.lock("k").kind(LockKind::Mutex).acquire().await.unwrap();
        let served = Served::default();
        let next = waiter(&b, 1, Instant::now(), &served);
        sleep(100 * MS).await;
        let released = Instant::now();
        plain.release().await.unwrap();
        next.await.unwrap();
        assert!(released.elapsed() <= ASKS, "{:?}", released.elapsed());
    });
}

#[test]
fn a_lock_is_not_handed_on_to_who_is_not_polled_when_it_should_be() {
    paused(async {
        let store = MemoryStore::new();
        let (a, b, c) = (client(&store).await, client(&store).await, client(&store).await);
        let guard = c.fair_lock("k").acquire().await.unwrap();
        let served = Served::default();
        let first = waiter(&a, 1, Instant::now(), &served);
        sleep(MS).await;
        // Right behind it, so that it would be handed the lock.
        let silent = silent(&a).await;
        let others = [
            waiter(&b, 2, Instant::now(), &served),
            waiter(&a, 3, Instant::now(), &served),
        ];
        sleep(20 * SEC).await;
        let released = Instant::now();
        guard.release().await.unwrap();
        first.await.unwrap();
        for other in others {
            let over = tokio::time::timeout(60 * SEC, other).await;
            over.expect("somebody has the lock who does not look").unwrap();
        }
        assert!(released.elapsed() <= SEC, "{:?}", released.elapsed());
        assert_eq!(order(&served), [1, 2, 3]);
        silent.await.unwrap().release().await.unwrap();
        sleep(MS).await;
        assert!(store.is_empty() && store.queued() == 0);
    });
}

#[test]
fn who_was_handed_the_lock_and_looked_too_late_keeps_its_place() {
    paused(async {
        let store = MemoryStore::new();
        let (a, b) = (client(&store).await, client(&store).await);
        let lock = b.fair_lock("k").lease(SEC);
        let guard = a.fair_lock("k").acquire().await.unwrap();
        let mut waiting: [Acquire; 2] = [Box::pin(lock.acquire()), Box::pin(lock.acquire())];
        assert!(poll!(&mut waiting[0]).is_pending() && poll!(&mut waiting[1]).is_pending());
        let [first, second] = waiting;
        let served = Served::default();
        let last = waiter(&a, 3, Instant::now(), &served);
        sleep(MS).await;
        guard.release().await.unwrap();
        first.await.unwrap().release().await.unwrap();
        // It was handed the lock, and loses it before it looks.
        assert!(a.force_release("k").await.unwrap());
        sleep(SEC).await;
        let guard = second.await.unwrap();
        assert!(guard.is_held() && order(&served).is_empty());
        guard.release().await.unwrap();
        last.await.unwrap();
        sleep(MS).await;
        assert!(store.is_empty() && store.queued() == 0);
    });
}

#[test]
fn a_release_between_a_question_and_the_look_at_its_answer_is_not_missed() {
    paused(async {
        let store = MemoryStore::new();
        let (a, b) = (client(&store).await, client(&store).await);
        let guard = a.fair_lock("k").acquire().await.unwrap();
        let served = Served::default();
        let first = waiter(&b, 1, Instant::now(), &served);
        sleep(MS).await;
        let second = waiter(&a, 2, Instant::now(), &served);
        // By then it listens.
        sleep(SEC).await;
        let released = Instant::now();
        // The second is asked for behind the release; the first has the lock and releases it before it is polled.
        guard.release().await.unwrap();
        first.await.unwrap();
        second.await.unwrap();
        assert!(released.elapsed() < 100 * MS, "{:?}", released.elapsed());
        assert!(store.is_empty() && store.queued() == 0);
    });
}

/// A waiter whose first question never reached the store has no place yet: it comes after those that wait already.
#[tokio::test(start_paused = true)]
async fn waiter_whose_first_question_was_not_done_overtakes_nobody() {
    let store = TestStore::new();
    let (a, b, c) = (store.client(), store.client(), store.client());
    let holder = a.fair_lock("k").acquire().await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let waits = |client: &LockClient, name: &'static str| {
        let (lock, order) = (client.fair_lock("k"), order.clone());
        tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            order.lock().push(name);
            guard.release().await.unwrap();
        })
    };
    let first = waits(&b, "first");
    tokio::time::sleep(Duration::from_millis(10)).await;
    store.fail_next(Step::Acquire, Fault::Unreachable);
    let second = waits(&c, "second");
    tokio::time::sleep(Duration::from_millis(500)).await;
    holder.release().await.unwrap();
    first.await.unwrap();
    second.await.unwrap();
    assert_eq!(*order.lock(), ["first", "second"]);
}

/// A lock that a shutdown releases while its grant is on its way to the waiter is not the waiter's.
#[tokio::test(start_paused = true)]
async fn grant_that_a_shutdown_has_given_back_is_no_guard() {
    let memory = MemoryStore::new();
    let watched = Watched::new(memory.clone());
    watched.seen().slow_answers.store(50, SeqCst);
    let ending = LockClient::builder().store(watched).build().await.unwrap();
    let other = client(&memory).await;
    let mut waiting = std::pin::pin!(ending.fair_lock("k").acquire());
    assert!(poll!(&mut waiting).is_pending());
    sleep(60 * MS).await;
    let shutdown = tokio::spawn({
        let ending = ending.clone();
        async move { ending.shutdown(30 * SEC).await }
    });
    sleep(60 * MS).await;
    let held = other.fair_lock("k").try_acquire().await.unwrap();
    let outcome = waiting.await;
    assert!(matches!(outcome, Err(Error::ClientClosed)), "{outcome:?}");
    assert!(held.is_held());
    drop(held);
    shutdown.await.unwrap();
}
