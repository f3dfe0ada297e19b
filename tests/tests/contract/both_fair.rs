//! Fair locks, on memory and on a server: waiters are served in order of arrival, across processes, whatever happens to
//! other waiters.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use dlock::{Error, HoldState, Lock, LockClient, Loss};
use dlock_tests::faults::{PATIENCE, SLACK, SOON, in_rounds, is_confirmed, within};
use dlock_tests::{Store, eventually, on_every_store, settle};
use futures_util::poll;
use parking_lot::Mutex;
use tokio::task::JoinHandle;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// The waiters in the order in which they were served.
type Order = Arc<Mutex<Vec<usize>>>;

fn fair(client: &LockClient) -> Lock {
    client.fair_lock("k").wait(PATIENCE)
}

/// How many stand in the queue of the lock.
async fn queued(store: &Store) -> usize {
    match store {
        Store::Memory(store) => store.queued(),
        _ => {
            let (server, key) = store.place_of("k").await;
            server
                .query(&["LLEN", &format!("redisson_lock_queue:{{{key}}}")])
                .await
        }
    }
}

/// Waits until so many stand in the queue.
async fn in_queue(store: &Store, count: usize) {
    eventually(&format!("{count} stand in the queue"), || async {
        queued(store).await == count
    })
    .await;
}

/// A waiter that is in the queue by the time this returns, and releases the lock when it is served.
async fn waiter(store: &Store, client: &LockClient, name: usize, order: &Order) -> JoinHandle<()> {
    let before = queued(store).await;
    let (lock, order) = (fair(client), order.clone());
    let waiter = tokio::spawn(async move {
        let guard = lock.acquire().await.unwrap();
        order.lock().push(name);
        guard.release().await.unwrap();
    });
    in_queue(store, before + 1).await;
    waiter
}

async fn all(waiters: Vec<JoinHandle<()>>) {
    for waiter in waiters {
        within(PATIENCE, "everybody is served", waiter).await.unwrap();
    }
}

/// A lease that no test waits out.
async fn long(store: &Store) -> LockClient {
    store.client_with(|builder| builder.lease(90 * SECOND)).await
}

on_every_store! {
    /// The next in the queue is told when the one in front gives up while a `min_hold` keeps the lock.
    async fn next_waiter_is_told_when_the_head_gives_up_during_a_min_hold(store: &Store) {
        in_rounds("the head gives up in time", async || {
            let (a, b, c) = (long(store).await, long(store).await, long(store).await);
            let begun = Instant::now();
            let min_hold = 400 * MS;
            let held = fair(&a).min_hold(min_hold).acquire().await.unwrap();
            let head = tokio::spawn(fair(&b).wait(200 * MS).acquire());
            // On a slow machine it gives up before it is seen.
            let first = tokio::time::timeout(2000 * MS, in_queue(store, 1)).await;
            let next = tokio::spawn(fair(&c).acquire());
            let both = tokio::time::timeout(2000 * MS, in_queue(store, 2)).await;
            held.release().await.unwrap();
            let head = head.await.unwrap();
            let next = next.await.unwrap().unwrap();
            // Untold, it asks after 1.5 s.
            let took = begun.elapsed();
            next.release().await.unwrap();
            if first.and(both).is_err() || head.is_ok() || took > 1200 * MS {
                return Err("it was not told, or the machine was slow");
            }
            assert!(took >= min_hold - 20 * MS, "{took:?}");
            Ok(())
        })
        .await;
    }

    async fn waiters_are_served_in_arrival_order_across_processes(store: &Store) {
        let clients = [long(store).await, long(store).await, long(store).await];
        let order = Order::default();
        let guard = fair(&clients[0]).acquire().await.unwrap();
        let mut waiters = Vec::new();
        for i in 0..12 {
            // Not in turns, so that an order within the processes is none across them.
            waiters.push(waiter(store, &clients[[0, 1, 1, 2, 0, 2][i % 6]], i, &order).await);
        }
        guard.release().await.unwrap();
        all(waiters).await;
        assert_eq!(*order.lock(), (0..12).collect::<Vec<_>>());
        store.assert_clean(&[&clients[0], &clients[1], &clients[2]]).await;
    }

    async fn waiters_of_a_process_are_served_in_the_order_of_their_first_poll(store: &Store) {
        let client = long(store).await;
        let guard = fair(&client).acquire().await.unwrap();
        let order = Order::default();
        let mut waiters = Vec::new();
        for i in 0..16 {
            let (lock, order) = (fair(&client), order.clone());
            let mut waiter = Box::pin(async move {
                let guard = lock.acquire().await.unwrap();
                order.lock().push(i);
                guard.release().await.unwrap();
            });
            assert!(poll!(&mut waiter).is_pending());
            waiters.push(tokio::spawn(waiter));
        }
        guard.release().await.unwrap();
        all(waiters).await;
        assert_eq!(*order.lock(), (0..16).collect::<Vec<_>>());
        store.assert_clean(&[&client]).await;
    }

    async fn one_holder_at_a_time_with_tokens_that_grow(store: &Store) {
        let clients = [long(store).await, long(store).await];
        let inside = Arc::new(AtomicUsize::new(0));
        let tokens = Arc::new(Mutex::new(Vec::new()));
        let tasks: Vec<_> = (0..24)
            .map(|i| {
                let (lock, inside, tokens) = (fair(&clients[i % 2]), inside.clone(), tokens.clone());
                tokio::spawn(async move {
                    for _ in 0..5 {
                        let guard = lock.acquire().await.unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two are inside");
                        tokens.lock().push(guard.fencing_token());
                        tokio::task::yield_now().await;
                        inside.fetch_sub(1, Ordering::SeqCst);
                        guard.release().await.unwrap();
                    }
                })
            })
            .collect();
        all(tasks).await;
        let tokens = tokens.lock().clone();
        assert_eq!(tokens.len(), 120);
        assert!(tokens.windows(2).all(|pair| pair[0] < pair[1]), "{tokens:?}");
        store.assert_clean(&[&clients[0], &clients[1]]).await;
    }

    async fn try_acquire_asks_once_and_takes_no_position(store: &Store) {
        let (a, b) = (long(store).await, long(store).await);
        let guard = a.fair_lock("k").try_acquire().await.unwrap();
        let error = b.fair_lock("k").try_acquire().await.unwrap_err();
        let Error::NotAcquired { waited, remaining, .. } = error else { panic!("{error}") };
        assert_eq!(waited, Duration::ZERO);
        assert!(remaining.unwrap() > 30 * SECOND, "{remaining:?}");
        assert_eq!(queued(store).await, 0);
        guard.release().await.unwrap();
        b.fair_lock("k").try_acquire().await.unwrap().release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    async fn try_acquire_overtakes_no_waiter(store: &Store) {
        let (a, b, c) = (long(store).await, long(store).await, long(store).await);
        let guard = fair(&a).acquire().await.unwrap();
        let mut first = Box::pin(fair(&b).acquire());
        // It stands in the queue, and is not polled when it is its turn.
        assert!(poll!(&mut first).is_pending());
        in_queue(store, 1).await;
        guard.release().await.unwrap();
        for client in [&a, &b, &c] {
            let error = client.fair_lock("k").try_acquire().await.unwrap_err();
            let Error::NotAcquired { remaining, .. } = error else { panic!("{error}") };
            assert!(remaining.unwrap() <= 5 * SECOND, "{remaining:?}");
        }
        first.await.unwrap().release().await.unwrap();
        c.fair_lock("k").try_acquire().await.unwrap().release().await.unwrap();
        store.assert_clean(&[&a, &b, &c]).await;
    }

    async fn waiter_that_gives_up_moves_no_other_back(store: &Store) {
        let clients = [long(store).await, long(store).await];
        let order = Order::default();
        let guard = fair(&clients[0]).acquire().await.unwrap();
        let mut waiters = Vec::new();
        for i in 0..8 {
            waiters.push(waiter(store, &clients[i / 2 % 2], i, &order).await);
        }
        // The first, two in the middle, and the last.
        for (left, i) in [7, 4, 3, 0].into_iter().enumerate() {
            let gone = waiters.remove(i);
            gone.abort();
            assert!(gone.await.unwrap_err().is_cancelled());
            in_queue(store, 7 - left).await;
        }
        guard.release().await.unwrap();
        all(waiters).await;
        assert_eq!(*order.lock(), [1, 2, 5, 6]);
        store.assert_clean(&[&clients[0], &clients[1]]).await;
    }

    async fn who_gives_up_when_it_was_woken_wakes_the_next(store: &Store) {
        let (a, b, c) = (long(store).await, long(store).await, long(store).await);
        for _ in 0..5 {
            let order = Order::default();
            let guard = fair(&a).acquire().await.unwrap();
            let mut first = Box::pin(fair(&b).acquire());
            assert!(poll!(&mut first).is_pending());
            in_queue(store, 1).await;
            let second = waiter(store, &c, 2, &order).await;
            guard.release().await.unwrap();
            drop(first);
            within(SOON, "the next is woken", second).await.unwrap();
        }
        store.assert_clean(&[&a, &b, &c]).await;
    }

    async fn a_wait_that_is_over_leaves_no_place(store: &Store) {
        let (a, b) = (long(store).await, long(store).await);
        let guard = fair(&a).acquire().await.unwrap();
        let before = Instant::now();
        let error = b.fair_lock("k").wait(200 * MS).acquire().await.unwrap_err();
        let Error::NotAcquired { waited, remaining, .. } = error else { panic!("{error}") };
        assert!(waited >= 200 * MS && before.elapsed() < SLACK, "{waited:?}");
        assert!(remaining.unwrap() > 30 * SECOND, "{remaining:?}");
        assert_eq!(b.waited_for(), 0);
        in_queue(store, 0).await;
        guard.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    async fn a_release_wakes_who_is_first_in_milliseconds(store: &Store) {
        // By the message: the next look is 0.7 s away in the mean, so that five in a row are no chance.
        in_rounds("five are woken at once", async || {
            let (a, b) = (long(store).await, long(store).await);
            for _ in 0..5 {
                let guard = fair(&a).acquire().await.unwrap();
                let lock = fair(&b);
                let waiter = tokio::spawn(async move {
                    let guard = lock.acquire().await.unwrap();
                    (Instant::now(), guard)
                });
                in_queue(store, 1).await;
                settle().await;
                let released = Instant::now();
                guard.release().await.unwrap();
                let (woken, guard) = waiter.await.unwrap();
                guard.release().await.unwrap();
                if woken - released > 300 * MS {
                    return Err(woken - released);
                }
            }
            store.assert_clean(&[&a, &b]).await;
            Ok(())
        })
        .await;
    }

    async fn a_lease_that_ends_is_taken_over_without_a_message(store: &Store) {
        in_rounds("it is held before its lease is over", async || {
            let (a, b) = (long(store).await, long(store).await);
            let guard = a.fair_lock("k").fixed_lease(400 * MS).acquire().await.unwrap();
            let held = guard.is_held();
            let begun = Instant::now();
            let next = fair(&b).acquire().await.unwrap();
            assert_eq!(guard.state(), HoldState::Lost(Loss::Expired));
            assert!(begun.elapsed() < SLACK, "{:?}", begun.elapsed());
            assert!(next.fencing_token() > guard.fencing_token());
            // What has expired is not released, and that is said.
            assert!(guard.release().await.unwrap_err().is_lost());
            is_confirmed(&next).await;
            next.release().await.unwrap();
            store.assert_clean(&[&a, &b]).await;
            if held { Ok(()) } else { Err("it was over at once") }
        })
        .await;
    }

    async fn nested_calls_re_enter_and_branches_exclude_each_other(store: &Store) {
        let client = long(store).await;
        let lock = fair(&client);
        let inner = lock.clone();
        let inside = AtomicUsize::new(0);
        lock.run(async |held| {
            let again = inner.try_acquire().await.unwrap();
            assert_eq!(again.fencing_token(), held.fencing_token());
            drop(again);
            let branch = || async {
                inner
                    .run(async |_| {
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        settle().await;
                        inside.fetch_sub(1, Ordering::SeqCst);
                    })
                    .await
                    .unwrap();
            };
            tokio::join!(branch(), branch());
        })
        .await
        .unwrap();
        store.assert_clean(&[&client]).await;
    }

    async fn excess_waiter_is_refused_at_once(store: &Store) {
        let client = long(store).await;
        let guard = fair(&client).acquire().await.unwrap();
        let lock = fair(&client).max_waiters(2);
        let (mut first, mut second) = (Box::pin(lock.acquire()), Box::pin(lock.acquire()));
        assert!(poll!(&mut first).is_pending() && poll!(&mut second).is_pending());
        let waiters = [tokio::spawn(first), tokio::spawn(second)];
        assert_eq!(client.waited_for(), 1);
        let refused = lock.acquire().await.unwrap_err();
        assert!(matches!(refused, Error::TooManyWaiters { limit: 2, .. }), "{refused}");
        let refused = fair(&client).max_waiters(0).acquire().await;
        assert!(matches!(refused, Err(Error::TooManyWaiters { .. })), "{refused:?}");
        in_queue(store, 2).await;
        drop(guard);
        for waiter in waiters {
            waiter.await.unwrap().unwrap().release().await.unwrap();
        }
        // With five callers at once and no waiter yet, two wait and two are refused.
        let won = AtomicUsize::new(0);
        let one = || async {
            if let Ok(guard) = lock.acquire().await {
                won.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(30 * MS).await;
                guard.release().await.unwrap();
            }
        };
        tokio::join!(one(), one(), one(), one(), one());
        assert_eq!(won.load(Ordering::SeqCst), 3);
        // No caller may wait while another client has it.
        let guard = fair(&store.client().await).acquire().await.unwrap();
        let refused = fair(&client).max_waiters(0).acquire().await;
        assert!(matches!(refused, Err(Error::TooManyWaiters { limit: 0, .. })), "{refused:?}");
        guard.release().await.unwrap();
        store.assert_clean(&[&client]).await;
    }

    async fn held_fair_lock_is_renewed(store: &Store) {
        in_rounds("it is renewed in time", async || {
            let (a, b) = (store.client().await, long(store).await);
            let guard = fair(&a).lease(900 * MS).acquire().await.unwrap();
            let waiting = tokio::spawn(fair(&b).acquire());
            tokio::time::sleep(2 * SECOND).await;
            if guard.state() != HoldState::Held {
                return Err(guard.state());
            }
            assert!(!waiting.is_finished());
            guard.release().await.unwrap();
            waiting.await.unwrap().unwrap().release().await.unwrap();
            store.assert_clean(&[&a, &b]).await;
            Ok(())
        })
        .await;
    }

    async fn min_hold_keeps_the_lock_and_the_order(store: &Store) {
        let (a, b) = (long(store).await, long(store).await);
        let order = Order::default();
        let started = Instant::now();
        let guard = fair(&a).min_hold(SECOND).acquire().await.unwrap();
        let waiters = vec![waiter(store, &b, 1, &order).await, waiter(store, &a, 2, &order).await];
        guard.release().await.unwrap();
        all(waiters).await;
        assert!(started.elapsed() >= 999 * MS, "{:?}", started.elapsed());
        assert!(started.elapsed() < SLACK, "{:?}", started.elapsed());
        assert_eq!(*order.lock(), [1, 2]);
        store.assert_clean(&[&a, &b]).await;
    }

    async fn forced_release_of_a_fair_lock_serves_the_first_waiter(store: &Store) {
        let (a, b, c) = (long(store).await, long(store).await, long(store).await);
        let order = Order::default();
        let guard = fair(&a).acquire().await.unwrap();
        let waiters = vec![waiter(store, &b, 1, &order).await, waiter(store, &a, 2, &order).await];
        settle().await;
        assert!(c.force_release("k").await.unwrap());
        within(SOON, "those who wait are served", all(waiters)).await;
        assert_eq!(*order.lock(), [1, 2]);
        assert!(matches!(guard.ensure(90 * SECOND).await, Err(Error::Lost { loss: Loss::Gone, .. })));
        assert!(guard.release().await.unwrap_err().is_lost());
        store.assert_clean(&[&a, &b, &c]).await;
    }

    async fn shutdown_leaves_no_position_in_the_queue(store: &Store) {
        let (a, b) = (long(store).await, long(store).await);
        let order = Order::default();
        let guard = fair(&a).acquire().await.unwrap();
        let mut gone = Vec::new();
        for _ in 0..3 {
            let lock = fair(&b);
            gone.push(tokio::spawn(async move { lock.acquire().await.map(drop) }));
        }
        in_queue(store, 3).await;
        let stays = waiter(store, &a, 1, &order).await;
        b.shutdown(SECOND).await;
        for one in gone {
            assert!(matches!(one.await.unwrap(), Err(Error::ClientClosed)));
        }
        in_queue(store, 1).await;
        guard.release().await.unwrap();
        within(SOON, "the wake-up", stays).await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    async fn after_a_flush_everybody_is_served(store: &Store) {
        let (a, b) = (long(store).await, long(store).await);
        let order = Order::default();
        let guard = fair(&a).acquire().await.unwrap();
        let mut waiters = Vec::new();
        for i in 0..4 {
            waiters.push(waiter(store, &b, i, &order).await);
        }
        store.flush().await;
        // The next of them to ask finds the lock free, and no waiter in front.
        all(waiters).await;
        assert_eq!(order.lock().len(), 4);
        assert!(guard.release().await.unwrap_err().is_lost());
        store.assert_clean(&[&a, &b]).await;
    }
}
