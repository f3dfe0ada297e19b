//! Cancelled acquires on memory: an acquire that is dropped at any poll leaves nothing and takes no other waiter's wake-up.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::Ordering::SeqCst;
use std::task::Poll;
use std::time::Duration;

use dlock::stores::memory::MemoryStore;
use dlock::{Lock, LockClient};
use dlock_tests::Watched;
use dlock_tests::faults::Pair;

/// Polls an acquire up to `n` times with room for everybody else in between, then drops it. Whether it
/// was done before.
async fn polled(lock: &Lock, n: usize) -> bool {
    let mut acquire = pin!(lock.acquire());
    for _ in 0..n {
        let mut done = false;
        std::future::poll_fn(|cx| {
            done = acquire.as_mut().poll(cx).is_ready();
            Poll::Ready(())
        })
        .await;
        if done {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    false
}

/// A store, and two clients of it to whom its answers come after so many milliseconds.
async fn two_clients(slow: usize) -> (MemoryStore, LockClient, LockClient) {
    let store = MemoryStore::new();
    let watched = Watched::new(store.clone());
    watched.seen().slow_answers.store(slow, SeqCst);
    let client = async || {
        LockClient::builder()
            .store(watched.clone())
            .build()
            .await
            .unwrap()
    };
    (store, client().await, client().await)
}

/// One acquire dropped after `n` polls: nothing is left.
async fn dropped_after(n: usize, pair: Pair, slow: usize, busy: bool, second_in_line: bool) {
    let case = format!("{pair}, {slow} ms, busy {busy}, second {second_in_line}, {n} polls");
    let (store, a, b) = two_clients(slow).await;
    let guard = if busy {
        Some(pair.held(&a, "k").acquire().await.unwrap())
    } else {
        None
    };
    let first = second_in_line.then(|| tokio::spawn(pair.asked(&b, "k").acquire()));
    tokio::task::yield_now().await;
    polled(&pair.asked(&b, "k"), n).await;
    if pair.prefers_writers && !second_in_line {
        // What it took is given up, though its answer may still be on its way.
        tokio::time::sleep(Duration::from_millis(1 + 2 * slow as u64)).await;
        assert_eq!(store.queued(), 0, "{case}: readers stand back for no writer");
    }
    drop(guard);
    if let Some(first) = first {
        drop(first.await.unwrap().unwrap());
    }
    tokio::time::sleep(Duration::from_millis(1 + 2 * slow as u64)).await;
    assert!(store.is_empty(), "{case}: a lock is left");
    assert_eq!((store.watched(), store.queued()), (0, 0), "{case}");
    assert_eq!((b.held(), b.waited_for()), (0, 0), "{case}");
}

#[tokio::test(start_paused = true)]
async fn dropped_acquire_leaves_nothing_at_any_poll() {
    for pair in Pair::ALL {
        // Answers that are there at once, and such as come while others poll.
        for slow in [0, 2, 5] {
            for busy in [false, true] {
                for second_in_line in [false, true] {
                    for n in 0..12 {
                        dropped_after(n, pair, slow, busy, second_in_line).await;
                    }
                }
            }
        }
    }
}
