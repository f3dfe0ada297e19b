//! Fair locks, on memory and on a server: waiters are served in order of arrival, across processes, whatever happens to
//! other waiters.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::{Error, Lock, LockClient, Loss};
use dlock_tests::faults::{PATIENCE, SOON, in_rounds, within};
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

/// Whether waiters that waited so long, from before their first request on, were told: untold, one asks after 1.5 s.
fn told_in(waited: Duration) -> Result<(), Duration> {
    match waited < 1200 * MS {
        true => Ok(()),
        false => Err(waited),
    }
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

    async fn waiter_that_gives_up_when_it_was_woken_wakes_the_next(store: &Store) {
        let (a, b, c) = (long(store).await, long(store).await, long(store).await);
        in_rounds("each of five is told", async || {
            let mut waited = Duration::ZERO;
            for _ in 0..5 {
                let order = Order::default();
                let guard = fair(&a).acquire().await.unwrap();
                let mut first = Box::pin(fair(&b).acquire());
                assert!(poll!(&mut first).is_pending());
                in_queue(store, 1).await;
                let begun = Instant::now();
                let second = waiter(store, &c, 2, &order).await;
                guard.release().await.unwrap();
                drop(first);
                within(SOON, "the next is woken", second).await.unwrap();
                waited += begun.elapsed();
                told_in(waited)?;
            }
            Ok::<(), Duration>(())
        })
        .await;
        store.assert_clean(&[&a, &b, &c]).await;
    }

    async fn forced_release_of_a_fair_lock_serves_the_first_waiter(store: &Store) {
        let (a, b, c) = (long(store).await, long(store).await, long(store).await);
        in_rounds("both are told", async || {
            let order = Order::default();
            let guard = fair(&a).acquire().await.unwrap();
            let begun = Instant::now();
            let waiters = vec![waiter(store, &b, 1, &order).await, waiter(store, &a, 2, &order).await];
            settle().await;
            assert!(c.force_release("k").await.unwrap());
            within(SOON, "the waiters are served", all(waiters)).await;
            let waited = begun.elapsed();
            assert_eq!(*order.lock(), [1, 2]);
            assert!(matches!(guard.ensure(90 * SECOND).await, Err(Error::Lost { loss: Loss::Gone, .. })));
            assert!(guard.release().await.unwrap_err().is_lost());
            told_in(waited)
        })
        .await;
        store.assert_clean(&[&a, &b, &c]).await;
    }
}
