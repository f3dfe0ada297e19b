//! What a plain lock does, on memory and on a server: the rules of ownership, re-entry, release, waiting
//! and fencing, seen through the public API.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use dlock::{Error, HoldState, Loss};
use dlock_tests::faults::{PATIENCE, SLACK, in_rounds, is_confirmed, within};
use dlock_tests::{eventually, on_every_store, on_quorums};

const MS: Duration = Duration::from_millis(1);

/// Counts the holders at the same time.
#[derive(Default, Clone)]
struct Room(Arc<(AtomicUsize, AtomicUsize)>);

/// Leaves the room however the visit ends.
struct Leaves<'a>(&'a Room);

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.0.0.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Room {
    async fn visit(&self) {
        let inside = self.0.0.fetch_add(1, Ordering::SeqCst) + 1;
        self.0.1.fetch_max(inside, Ordering::SeqCst);
        let _leaves = Leaves(self);
        tokio::time::sleep(3 * MS).await;
    }

    fn most(&self) -> usize {
        self.0.1.load(Ordering::SeqCst)
    }
}

on_every_store! {
    async fn one_holder_at_a_time_in_one_process_and_across(store: &Store) {
        let clients = [store.client().await, store.client().await];
        let room = Room::default();
        let tasks: Vec<_> = (0..24)
            .map(|i| {
                let (lock, room) = (clients[i % 2].lock("k").wait(PATIENCE), room.clone());
                tokio::spawn(async move {
                    let guard = lock.acquire().await.unwrap();
                    room.visit().await;
                    guard.release().await.unwrap();
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(room.most(), 1);
        store.assert_clean(&[&clients[0], &clients[1]]).await;
    }

    async fn try_acquire_asks_once_and_says_what_is_left_of_the_lease(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let guard = a.lock("k").fixed_lease(Duration::from_secs(60)).acquire().await.unwrap();
        let asking = b.lock("k").try_acquire();
        let Err(Error::NotAcquired { key, waited, remaining, .. }) = within(MS, "asking once", asking).await else {
            panic!("the lock is held")
        };
        assert_eq!((key.as_str(), waited), ("k", Duration::ZERO));
        let left = remaining.unwrap();
        assert!(left > Duration::from_secs(60) - SLACK && left <= Duration::from_secs(60), "{left:?}");
        guard.release().await.unwrap();
        b.lock("k").try_acquire().await.unwrap().release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    async fn a_wait_ends_when_it_is_over_and_leaves_nothing(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let guard = a.lock("k").acquire().await.unwrap();
        let before = Instant::now();
        let error = b.lock("k").wait(100 * MS).acquire().await.unwrap_err();
        let Error::NotAcquired { waited, .. } = error else { panic!("{error}") };
        assert!(waited >= 100 * MS && before.elapsed() < SLACK, "{waited:?}");
        assert_eq!(b.waited_for(), 0);
        guard.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    async fn guards_are_released_outside_a_runtime_and_in_a_panic(store: &Store) {
        let client = store.client().await;
        let guard = client.lock("k").acquire().await.unwrap();
        std::thread::spawn(move || drop(guard)).join().unwrap();
        let guard = client.lock("k").try_acquire().await.unwrap();
        let panicking = tokio::spawn(async move {
            let _guard = guard;
            panic!("on purpose");
        });
        assert!(panicking.await.unwrap_err().is_panic());
        let lock = client.lock("k");
        let task = tokio::spawn(async move { lock.run(|_| std::future::pending::<()>()).await });
        eventually("the closure runs", || async { client.held() == 1 }).await;
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
        drop(client.lock("k").try_acquire().await.unwrap());
        store.assert_clean(&[&client]).await;
    }

    async fn nested_calls_re_enter(store: &Store) {
        let (client, other) = (store.client().await, store.client().await);
        let lock = client.lock("k");
        let inner = lock.clone();
        let tokens = lock
            .run(move |held| async move {
                let second = inner.acquire().await.unwrap();
                let third = second.run(async { inner.try_acquire().await.unwrap() }).await.unwrap();
                assert_eq!(dlock::current().unwrap().fencing_token(), held.fencing_token());
                let tokens = [held.fencing_token(), second.fencing_token(), third.fencing_token()];
                third.release().await.unwrap();
                second.release().await.unwrap();
                assert!(held.is_held());
                assert!(other.lock("k").try_acquire().await.unwrap_err().is_busy());
                tokens
            })
            .await
            .unwrap();
        assert_eq!(tokens[0], tokens[1]);
        assert_eq!(tokens[1], tokens[2]);
        assert!(dlock::current().is_none());
        store.assert_clean(&[&client]).await;
    }

    async fn forced_release_is_noticed_at_the_next_check(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let guard = a.lock("k").acquire().await.unwrap();
        assert!(b.force_release("k").await.unwrap());
        assert!(!b.force_release("k").await.unwrap());
        let next = b.lock("k").try_acquire().await.unwrap();
        assert!(matches!(guard.ensure(Duration::from_secs(30)).await, Err(Error::Lost { loss: Loss::Gone, .. })));
        assert!(!guard.is_held());
        // Its release touches no other lock.
        assert!(guard.release().await.unwrap_err().is_lost());
        is_confirmed(&next).await;
        next.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    async fn shutdown_ends_everything_in_good_order(store: &Store) {
        in_rounds("a lock is released before the deadline", async || {
            let (a, b) = (store.client().await, store.client().await);
            let stays = a.lock("stays").acquire().await.unwrap();
            let goes = a.lock("goes").acquire().await.unwrap();
            let waits = tokio::spawn(a.lock("stays").acquire());
            eventually("a caller waits", || async { a.waited_for() == 1 }).await;
            let closing = tokio::spawn({
                let a = a.clone();
                async move { a.shutdown(300 * MS).await }
            });
            assert!(matches!(waits.await.unwrap(), Err(Error::ClientClosed)));
            assert!(matches!(a.lock("x").acquire().await, Err(Error::ClientClosed)));
            let given = goes.release().await;
            let report = closing.await.unwrap();
            assert_eq!(stays.state(), HoldState::Lost(Loss::Shutdown));
            b.lock("stays").try_acquire().await.unwrap().release().await.unwrap();
            drop(stays);
            store.assert_clean(&[&b]).await;
            if given.is_err() {
                return Err(given);
            }
            assert_eq!((report.lost, report.unconfirmed), (1, 0));
            Ok(())
        })
        .await;
    }

    async fn futures_are_send_static_and_borrow_nothing(store: &Store) {
        fn movable<T: Send + 'static>(value: T) -> T { value }
        let client = store.client().await;
        let work = movable(client.lock("k").run(|held| async move { held.fencing_token() }));
        assert!(tokio::spawn(work).await.unwrap().unwrap() > 0);
        let guard = movable(movable(client.lock("k").acquire()).await.unwrap());
        let lost = movable(guard.lost());
        movable(guard.release()).await.unwrap();
        assert_eq!(lost.await, Loss::Released);
        store.assert_clean(&[&client]).await;
    }
}

on_quorums! {
    one_holder_at_a_time_in_one_process_and_across,
    try_acquire_asks_once_and_says_what_is_left_of_the_lease,
    a_wait_ends_when_it_is_over_and_leaves_nothing,
    guards_are_released_outside_a_runtime_and_in_a_panic,
    nested_calls_re_enter,
    forced_release_is_noticed_at_the_next_check,
    shutdown_ends_everything_in_good_order,
    futures_are_send_static_and_borrow_nothing,
}
