//! Cancelled acquires on a real server behind a slow network: an acquire that is dropped at any poll leaves no lock, no
//! position in the queue and no subscription, and takes no other waiter's wake-up.

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use dlock::Lock;
use dlock_tests::faults::{Pair, SOON, TIMEOUT, acquiring, is_free_soon_as, patient, setting, step, within};
use dlock_tests::{Direction, Proxy, Store, Swallow, eventually, settle};
use futures_util::future::join_all;

const MS: Duration = Duration::from_millis(1);
/// One way through the network.
const DELAY: Duration = Duration::from_millis(5);

/// Polls an acquire up to `n` times, each time when it is woken or after a while, then drops it. Whether it
/// was done before.
async fn polled(lock: &Lock, n: usize) -> bool {
    let mut acquire = pin!(lock.acquire());
    for _ in 0..n {
        let mut first = true;
        let poll = std::future::poll_fn(|cx| {
            if std::mem::take(&mut first) {
                Poll::Ready(acquire.as_mut().poll(cx).is_ready())
            } else {
                Poll::Pending
            }
        });
        if poll.await {
            return true;
        }
        // Long enough for the next answer to arrive, and not a multiple of the way.
        tokio::time::sleep(DELAY + 3 * MS).await;
    }
    false
}

/// One acquire dropped after `n` polls; whether it was done by then.
async fn case(store: &Store, pair: Pair, n: usize, busy: bool, second_in_line: bool) -> bool {
    let key = format!("k:{pair}:{n}:{busy}:{second_in_line}");
    let proxy = Proxy::start(store.as_server().addr());
    let (a, b) = (patient(&proxy.url()).await, patient(&proxy.url()).await);
    proxy.delay(Direction::Both, DELAY, 2 * MS);
    let guard = if busy {
        Some(pair.held(&a, &key).acquire().await.unwrap())
    } else {
        None
    };
    let first = second_in_line.then(|| tokio::spawn(pair.asked(&b, &key).acquire()));
    if second_in_line {
        eventually("the first stands in line", || async {
            b.waited_for() + b.held() == 1
        })
        .await;
    }
    let done = polled(&pair.asked(&b, &key), n).await;
    if busy {
        assert!(!done, "{key}: two holders");
    }
    drop(guard);
    if let Some(first) = first {
        let guard = first.await.unwrap().unwrap();
        guard.release().await.unwrap();
    }
    // The next caller finds nothing in the way for long: whatever was under way is undone.
    is_free_soon_as(&a, &key, pair.asks).await;
    eventually("no hold and no waiter is left", || async {
        [&a, &b]
            .iter()
            .all(|client| client.held() == 0 && client.waited_for() == 0)
    })
    .await;
    done
}

async fn dropped_at_any_poll(busy: bool, second_in_line: bool) {
    const MOST: usize = 16;
    let store = Store::server().await;
    // A free lock is acquired at some poll, however slow the machine is.
    let polls = |n| if n == MOST - 1 && !busy { usize::MAX } else { n };
    for pair in Pair::ALL {
        let done = (0..MOST).map(|n| case(&store, pair, polls(n), busy, second_in_line));
        let done = join_all(done).await;
        assert!(!done[0] && !done[1]);
        assert_eq!(done[MOST - 1], !busy, "{pair}: {done:?}");
    }
    store.assert_clean(&[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_acquire_of_a_free_lock_leaves_nothing_at_any_poll() {
    dropped_at_any_poll(false, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_acquire_of_a_busy_lock_leaves_nothing_at_any_poll() {
    dropped_at_any_poll(true, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_acquire_behind_another_leaves_nothing_at_any_poll() {
    dropped_at_any_poll(true, true).await;
}

async fn a_consumed_wake_up_goes_to_the_next(pair: Pair) {
    let (store, proxy, _a, b) = setting().await;
    let a = patient(&proxy.url()).await;
    let (a_lock, b_lock) = (pair.asked(&a, "k"), pair.held(&b, "k"));
    proxy.delay(Direction::Both, DELAY, Duration::ZERO);
    for pause in [0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 35, 40] {
        let guard = b_lock.acquire().await.unwrap();
        let first = tokio::spawn(a_lock.acquire());
        eventually("the first waits at the store", || async {
            store.as_server().pubsub_channels().await.len() == 1
        })
        .await;
        let second = tokio::spawn(a_lock.acquire());
        settle().await;
        guard.release().await.unwrap();
        // The message is on its way, or has arrived, or the request after it is in flight, or the lock is acquired.
        tokio::time::sleep(pause * MS).await;
        first.abort();
        drop(first.await);
        let next = within(SOON, format!("{pair}, {pause} ms: the wake-up"), second).await;
        let next = next.unwrap().unwrap();
        next.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_waiter_passes_its_wake_up_to_the_next() {
    join_all(Pair::ALL.map(a_consumed_wake_up_goes_to_the_next)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_acquire_is_undone_while_its_outcome_is_unknown() {
    let (store, proxy, a, b) = setting().await;
    for pair in Pair::ALL {
        let lock = pair.asked(&a, "k");
        for then in [Swallow::Hang, Swallow::Cut] {
            let fault = proxy.swallow(1, then, step(acquiring(pair.asks)));
            let dropped = tokio::spawn(lock.acquire());
            fault.swallowed().await;
            dropped.abort();
            drop(dropped.await);
            is_free_soon_as(&b, "k", pair.asks).await;
            store.assert_clean(&[&a, &b]).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_acquire_never_takes_the_lock_while_the_server_is_away() {
    let (store, proxy, a, b) = setting().await;
    for pair in Pair::ALL {
        let lock = pair.asked(&a, "k");
        for in_line in [TIMEOUT / 3, TIMEOUT * 2] {
            proxy.refuse();
            proxy.cut();
            let dropped = tokio::spawn(lock.acquire());
            tokio::time::sleep(in_line).await;
            dropped.abort();
            drop(dropped.await);
            proxy.accept();
            is_free_soon_as(&b, "k", pair.asks).await;
            store.assert_clean(&[&a, &b]).await;
            is_free_soon_as(&b, "k", pair.asks).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_gives_up_takes_its_subscription_and_its_place_along() {
    let (store, proxy, _a, b) = setting().await;
    let a = patient(&proxy.url()).await;
    proxy.delay(Direction::Both, DELAY, Duration::ZERO);
    for pair in Pair::ALL {
        let guard = pair.held(&b, "k").acquire().await.unwrap();
        for wait in [1, 10, 20, 30, 40, 60, 100] {
            let lock = pair.asked(&a, "k").wait(wait * MS);
            let error = lock.acquire().await.unwrap_err();
            // The shortest waits end before the server's reply is there.
            assert!(error.is_busy() || error.is_unavailable(), "{error}");
            assert_eq!(a.waited_for(), 0);
            eventually("nobody listens any more, and nobody is in the queue", || async {
                let server = store.as_server();
                server.pubsub_channels().await.is_empty()
                    && server.query::<usize>(&["LLEN", "redisson_lock_queue:{k}"]).await == 0
                    && server.query::<usize>(&["ZCARD", "{k}:dlock:writers"]).await == 0
            })
            .await;
        }
        guard.release().await.unwrap();
    }
    store.assert_clean(&[&a, &b]).await;
}

/// A dropped acquire stands before the next attempt of its process, as a dropped guard does: the attempt never finds the
/// lock busy because of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_acquire_is_undone_before_the_next_attempt() {
    let store = Store::server().await;
    let client = patient(&store.as_server().url()).await;
    for round in 0..50 {
        for pair in Pair::ALL {
            let lock = pair.asked(&client, "k");
            let mut acquire = Box::pin(lock.acquire());
            if futures_util::poll!(&mut acquire).is_ready() {
                continue;
            }
            drop(acquire);
            let next = lock.try_acquire().await;
            let guard = next.unwrap_or_else(|error| panic!("{pair}, {round}: {error}"));
            guard.release().await.unwrap();
        }
        let multi = client.multi(["k", "l", "m"]);
        let mut acquire = Box::pin(multi.acquire());
        // On a fast machine it is there already, and released.
        let _ = futures_util::poll!(&mut acquire);
        drop(acquire);
        let guards = multi.try_acquire().await;
        let guards = guards.unwrap_or_else(|error| panic!("several, {round}: {error}"));
        guards.release().await.unwrap();
    }
    settle().await;
    store.assert_clean(&[&client]).await;
}
