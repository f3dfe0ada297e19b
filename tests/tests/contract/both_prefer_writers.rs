//! A writer that readers stand back for, on memory and on servers: which side waits, and which goes on afterwards.

use std::time::{Duration, Instant};

use dlock::{Error, LockClient, RwLock};
use dlock_tests::faults::{PATIENCE, SOON, in_rounds, is_confirmed, within};
use dlock_tests::{Store, eventually, on_every_store, settle};

const SECOND: Duration = Duration::from_secs(1);
/// Shows that a waiter was notified, and did not find out by asking again after 5 s.
const AT_ONCE: Duration = Duration::from_secs(2);

/// The lock of clients that prefer writers.
fn preferring(client: &LockClient) -> RwLock {
    client.rw_lock("k").prefer_writers()
}

/// Leases so long that only a notification wakes a waiter in time.
async fn long(store: &Store) -> LockClient {
    store.client_with(|builder| builder.lease(90 * SECOND)).await
}

/// Whether readers stand back now.
async fn stand_back(client: &LockClient) -> bool {
    match client.rw_lock("k").read().try_acquire().await {
        Ok(guard) => {
            guard.release().await.unwrap();
            false
        }
        Err(error) => {
            assert!(error.is_busy(), "{error}");
            true
        }
    }
}

/// A writer waits, and readers stand back for it.
async fn waits(
    client: &LockClient,
    others: &LockClient,
) -> tokio::task::JoinHandle<Result<dlock::LockGuard, Error>> {
    let writer = tokio::spawn(preferring(client).write().wait(PATIENCE).acquire());
    eventually("readers stand back", || stand_back(others)).await;
    writer
}

on_every_store! {
    async fn new_readers_stand_back_until_the_writer_was_served(store: &Store) {
        let (a, b, c) = (long(store).await, long(store).await, long(store).await);
        let inside = c.rw_lock("k").read().acquire().await.unwrap();
        let writer = waits(&a, &b).await;
        // Of all processes, whatever their options, and also where they read already elsewhere.
        for client in [&a, &b, &c] {
            for lock in [client.rw_lock("k"), preferring(client)] {
                assert!(lock.read().try_acquire().await.unwrap_err().is_busy());
            }
        }
        let reader = tokio::spawn(b.rw_lock("k").read().acquire());
        settle().await;
        assert!(!reader.is_finished() && !writer.is_finished());
        inside.release().await.unwrap();
        let writer = within(SOON, "the writer's turn", writer).await.unwrap().unwrap();
        assert!(!reader.is_finished());
        is_confirmed(&writer).await;
        writer.release().await.unwrap();
        let reader = within(SOON, "the reader's turn", reader).await.unwrap().unwrap();
        // No reader stands back any more.
        assert!(!stand_back(&c).await);
        reader.release().await.unwrap();
        store.assert_clean(&[&a, &b, &c]).await;
    }

    async fn a_writer_is_served_though_reads_overlap_without_end(store: &Store) {
        let (a, b) = (long(store).await, long(store).await);
        let reads = async |client: LockClient| {
            let lock = client.rw_lock("k").read();
            let mut inside = lock.acquire().await.unwrap();
            // Each comes before the previous one has left.
            loop {
                let next = tokio::time::timeout(Duration::from_millis(20), lock.acquire()).await;
                inside.release().await.unwrap();
                inside = match next {
                    Ok(next) => next.unwrap(),
                    Err(_) => lock.acquire().await.unwrap(),
                };
            }
        };
        let readers = [tokio::spawn(reads(a.clone())), tokio::spawn(reads(b.clone()))];
        for _ in 0..5 {
            settle().await;
            let writer = preferring(&b).write().wait(PATIENCE).acquire().await.unwrap();
            assert_eq!(b.holders("k").await.unwrap().len(), 1);
            writer.release().await.unwrap();
        }
        for reader in readers {
            reader.abort();
            let _ = reader.await;
        }
        // What was under way is undone in the background.
        eventually("no reader is inside", async || a.holders("k").await.unwrap().is_empty()).await;
        store.assert_clean(&[&a, &b]).await;
    }

    async fn present_reader_reads_on_and_enters_again(store: &Store) {
        let (a, b) = (long(store).await, long(store).await);
        let inside = b.rw_lock("k").read().acquire().await.unwrap();
        let writer = waits(&a, &b).await;
        let nested = inside.scope(b.rw_lock("k").read().acquire());
        let nested = within(SOON, "a nested read", nested).await.unwrap();
        let again = inside.reenter().unwrap();
        is_confirmed(&inside).await;
        drop((nested, again));
        assert!(!writer.is_finished());
        inside.release().await.unwrap();
        drop(within(SOON, "the writer's turn", writer).await.unwrap().unwrap());
        store.assert_clean(&[&a, &b]).await;
    }

    async fn a_writer_that_gives_up_or_is_dropped_lets_readers_go_on_at_once(store: &Store) {
        in_rounds("the readers come in at once", async || {
            let (a, b) = (long(store).await, long(store).await);
            let inside = b.rw_lock("k").read().acquire().await.unwrap();
            let mut took = Vec::new();
            for is_dropped in [false, true] {
                let wait = if is_dropped { PATIENCE } else { SECOND / 2 };
                let writer = tokio::spawn(preferring(&a).write().wait(wait).acquire());
                eventually("readers stand back, or it has given up", async || {
                    stand_back(&b).await || writer.is_finished()
                })
                .await;
                let reader = tokio::spawn(b.rw_lock("k").read().acquire());
                if is_dropped {
                    settle().await;
                    writer.abort();
                }
                let gone = writer.await;
                let since = Instant::now();
                assert!(gone.is_err() || gone.unwrap().unwrap_err().is_busy());
                within(SOON, "the reader", reader).await.unwrap().unwrap().release().await.unwrap();
                took.push(since.elapsed());
                assert!(!stand_back(&b).await);
            }
            inside.release().await.unwrap();
            store.assert_clean(&[&a, &b]).await;
            if took.iter().all(|took| *took < AT_ONCE) { Ok(()) } else { Err(took) }
        })
        .await;
    }

    async fn dropped_at_any_moment_it_keeps_no_reader_out(store: &Store) {
        in_rounds("the readers come in at once", async || {
            let (a, b) = (long(store).await, long(store).await);
            let inside = b.rw_lock("k").read().acquire().await.unwrap();
            let mut took = Vec::new();
            for micros in [0, 50, 100, 200, 300, 400, 600, 800, 1200, 2000, 4000, 8000] {
                let writer = tokio::spawn(preferring(&a).write().acquire());
                tokio::time::sleep(Duration::from_micros(micros)).await;
                writer.abort();
                drop(writer.await);
                let since = Instant::now();
                // Sent behind what was under way at most a moment later.
                eventually("no reader stands back", async || !stand_back(&b).await).await;
                took.push(since.elapsed());
            }
            inside.release().await.unwrap();
            store.assert_clean(&[&a, &b]).await;
            if took.iter().all(|took| *took < AT_ONCE) { Ok(()) } else { Err(took) }
        })
        .await;
    }

    async fn readers_stand_back_for_the_last_of_several_writers(store: &Store) {
        let (a, b, c) = (long(store).await, long(store).await, long(store).await);
        let inside = c.rw_lock("k").read().acquire().await.unwrap();
        let first = waits(&a, &c).await;
        let second = tokio::spawn(preferring(&b).write().wait(PATIENCE).acquire());
        settle().await;
        first.abort();
        drop(first.await);
        settle().await;
        assert!(stand_back(&c).await, "the second still waits");
        let third = tokio::spawn(preferring(&a).write().wait(PATIENCE).acquire());
        settle().await;
        inside.release().await.unwrap();
        // Which of them is first is open.
        let (mut second, mut third) = (second, third);
        let (one, other) = tokio::select! {
            one = &mut second => (one, third),
            one = &mut third => (one, second),
        };
        let one = one.unwrap().unwrap();
        assert!(stand_back(&c).await);
        one.release().await.unwrap();
        assert!(stand_back(&c).await, "the other waits, or has the lock");
        let other = within(SOON, "the other's turn", other).await.unwrap().unwrap();
        other.release().await.unwrap();
        assert!(!stand_back(&c).await);
        store.assert_clean(&[&a, &b, &c]).await;
    }
}
