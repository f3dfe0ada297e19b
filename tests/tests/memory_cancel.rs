//! Rule 19 on memory: an acquire that is dropped at any poll leaves nothing and takes nobody's wake-up.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use dlock::backend::memory::MemoryBackend;
use dlock::{Kind, Lock, LockClient};

/// The kinds whose holders exclude each other.
const KINDS: [Kind; 3] = [Kind::Lock, Kind::Fair, Kind::Fenced];

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

/// One acquire dropped after `n` polls: nothing is left.
async fn dropped_after(n: usize, kind: Kind, busy: bool, second_in_line: bool) {
    let case = format!("{kind}, busy {busy}, second {second_in_line}, {n} polls");
    let store = MemoryBackend::new();
    let a = LockClient::builder()
        .backend(store.clone())
        .build()
        .await
        .unwrap();
    let b = LockClient::builder()
        .backend(store.clone())
        .build()
        .await
        .unwrap();
    let guard = if busy {
        Some(a.lock("k").kind(kind).acquire().await.unwrap())
    } else {
        None
    };
    let first = second_in_line.then(|| tokio::spawn(b.lock("k").kind(kind).acquire()));
    tokio::task::yield_now().await;
    polled(&b.lock("k").kind(kind), n).await;
    drop(guard);
    if let Some(first) = first {
        drop(first.await.unwrap().unwrap());
    }
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert!(store.is_empty(), "{case}: a lock is left");
    assert_eq!((store.watched(), store.queued()), (0, 0), "{case}");
    assert_eq!((b.held(), b.waited_for()), (0, 0), "{case}");
}

#[tokio::test(start_paused = true)]
async fn rule_19_dropped_at_any_poll_of_a_free_or_busy_lock() {
    for kind in KINDS {
        for busy in [false, true] {
            for second_in_line in [false, true] {
                for n in 0..12 {
                    dropped_after(n, kind, busy, second_in_line).await;
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn rule_19_a_wake_up_that_was_consumed_goes_to_the_next() {
    for (kind, n) in KINDS.into_iter().flat_map(|kind| (0..6).map(move |n| (kind, n))) {
        let store = MemoryBackend::new();
        let a = LockClient::builder()
            .backend(store.clone())
            .build()
            .await
            .unwrap();
        let b = LockClient::builder()
            .backend(store.clone())
            .build()
            .await
            .unwrap();
        let guard = a.lock("k").kind(kind).acquire().await.unwrap();
        let lock = b.lock("k").kind(kind);
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
            "{kind} {n}: {:?}",
            before.elapsed()
        );
        assert_eq!((store.watched(), store.queued(), b.waited_for()), (0, 0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn rule_18_a_release_that_is_dropped_half_way_goes_on() {
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
async fn rule_6_a_wait_inside_the_own_frame_ends_when_a_sibling_leaves_or_the_wait_is_over() {
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
