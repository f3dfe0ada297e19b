//! Cancelled acquires on memory: an acquire that is dropped at any poll leaves nothing and takes no other waiter's wake-up.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Poll, Waker};
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
        assert_eq!(store.queued(), 0, "{case}: readers stand back for nobody");
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

#[tokio::test(start_paused = true)]
async fn dropped_waiter_passes_its_wake_up_to_the_next() {
    for (pair, n) in Pair::ALL
        .into_iter()
        .flat_map(|pair| (0..6).map(move |n| (pair, n)))
    {
        let (store, a, b) = two_clients(0).await;
        let guard = pair.held(&a, "k").acquire().await.unwrap();
        let lock = pair.asked(&b, "k");
        let mut first = Box::pin(lock.acquire());
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..3 {
            assert!(first.as_mut().poll(&mut cx).is_pending());
        }
        let second = tokio::spawn(lock.acquire());
        tokio::task::yield_now().await;
        guard.release().await.unwrap();
        for _ in 0..n {
            if first.as_mut().poll(&mut cx).is_ready() {
                break;
            }
        }
        drop(first);
        let before = tokio::time::Instant::now();
        second.await.unwrap().unwrap().release().await.unwrap();
        assert!(
            before.elapsed() < Duration::from_millis(50),
            "{pair} {n}: {:?}",
            before.elapsed()
        );
        assert_eq!((store.watched(), store.queued(), b.waited_for()), (0, 0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_release_goes_on() {
    let client = LockClient::memory();
    for n in 0..3 {
        let guard = client.lock("k").acquire().await.unwrap();
        let mut release = Box::pin(guard.release());
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..n {
            if release.as_mut().poll(&mut cx).is_ready() {
                break;
            }
        }
        drop(release);
        drop(client.lock("k").try_acquire().await.unwrap());
    }
    assert_eq!(client.held(), 0);
}

#[tokio::test(start_paused = true)]
async fn waiter_inside_its_own_frame_ends_when_a_sibling_leaves_or_the_wait_is_over() {
    let client = LockClient::memory();
    let lock = client.lock("k");
    let (inner, again) = (lock.clone(), lock.clone().wait(Duration::from_secs(5)));
    lock.run(|_| async move {
        let bare = inner.acquire().await.unwrap();
        // The bare guard encloses no code, so this waits for it: for as long as it may.
        assert!(again.acquire().await.unwrap_err().is_busy());
        let (_, reentered) = tokio::join!(
            async {
                tokio::time::sleep(Duration::from_secs(2)).await;
                drop(bare);
            },
            again.acquire()
        );
        drop(reentered.unwrap());
    })
    .await
    .unwrap();
    assert_eq!(client.held(), 0);
}
