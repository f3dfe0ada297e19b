//! dlock and Redisson 4.7.0 share the fair lock: they exclude each other, stand in one queue and are served in its
//! order, wake each other, and see each other's holds and losses as their own.
//!
//! Needs java 17 and Maven; `tests/run` leaves this suite out where they are missing, and says so.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use dlock::{HoldState, LockClient, LockKey};
use dlock_tests::faults::{SLACK, in_rounds};
use dlock_tests::redisson::{Kind, Redisson};
use dlock_tests::{Server, Store, eventually, settle};
use parking_lot::Mutex;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// Far more than anything here takes.
const LONG: Duration = Duration::from_secs(90);

/// Names as most services use them, and with the tag that places them in a Cluster.
const NAMES: [&str; 2] = ["order:42", "{shop}:order:42"];

fn raw(name: &str) -> LockKey {
    LockKey::raw(name)
}

fn beside(prefix: &str, name: &str) -> String {
    match name.contains('{') {
        true => format!("{prefix}:{name}"),
        false => format!("{prefix}:{{{name}}}"),
    }
}

async fn queue(server: &Server, name: &str) -> Vec<String> {
    let key = beside("redisson_lock_queue", name);
    server.query(&["LRANGE", &key, "0", "-1"]).await
}

/// Waits until so many stand in the queue.
async fn in_queue(server: &Server, name: &str, count: usize) {
    eventually(&format!("{count} stand in the queue"), || async {
        queue(server, name).await.len() == count
    })
    .await;
}

/// Waits until the one at this place listens.
async fn listens(server: &Server, name: &str, place: usize) {
    eventually("it listens", || async {
        let queue = queue(server, name).await;
        let Some(id) = queue.get(place) else { return false };
        let channel = format!("{}:{id}", beside("redisson_lock__channel", name));
        let (_, count): (String, u64) = server.query(&["PUBSUB", "NUMSUB", &channel]).await;
        count == 1
    })
    .await;
    settle().await;
}

/// The waiters in the order in which they were served.
type Order = Arc<Mutex<Vec<usize>>>;

/// Those of both sides wait in turns behind a holder of either side, and are served in order of arrival.
async fn served_in_order(name: &'static str, java_holds: bool) {
    let store = Store::server().await;
    let server = store.as_server();
    let (first, second) = tokio::join!(Redisson::on(&store), Redisson::on(&store));
    let java = [Arc::new(first), Arc::new(second)];
    let rust = [store.client().await, store.client().await];
    let guard = if java_holds {
        java[0].lock(99, Kind::Fair, name, None).await.unwrap();
        None
    } else {
        Some(rust[0].fair_lock(raw(name)).acquire().await.unwrap())
    };
    let order = Order::default();
    let mut waiters = Vec::new();
    for i in 0..12_usize {
        let order = order.clone();
        // Two of Java's in a row, two of ours, and one by one.
        let waiter = match [true, false, true, true, false, false][i % 6] {
            true => {
                let (java, thread) = (java[i % 2].clone(), u32::try_from(i).unwrap() + 1);
                tokio::spawn(async move {
                    java.lock(thread, Kind::Fair, name, None).await.unwrap();
                    order.lock().push(i);
                    java.unlock(thread, Kind::Fair, name).await.unwrap();
                })
            }
            false => {
                let lock = rust[i % 2].fair_lock(raw(name)).wait(LONG);
                tokio::spawn(async move {
                    let guard = lock.acquire().await.unwrap();
                    order.lock().push(i);
                    guard.release().await.unwrap();
                })
            }
        };
        waiters.push(waiter);
        in_queue(server, name, i + 1).await;
    }
    // Long enough for ours to have asked again, and again.
    tokio::time::sleep(3500 * MS).await;
    match guard {
        Some(guard) => guard.release().await.unwrap(),
        None => drop(java[0].unlock(99, Kind::Fair, name).await.unwrap()),
    }
    for waiter in waiters {
        waiter.await.unwrap();
    }
    assert_eq!(*order.lock(), (0..12).collect::<Vec<_>>());
    store.assert_clean(&[&rust[0], &rust[1]]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_of_both_sides_are_served_in_arrival_order() {
    served_in_order(NAMES[0], false).await;
    served_in_order(NAMES[1], true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn they_wake_each_other_in_milliseconds() {
    const ROUNDS: usize = 7;
    let store = Store::server().await;
    let server = store.as_server();
    let (java, client) = (Redisson::on(&store).await, store.client().await);
    for name in NAMES {
        // The next question of ours is 0.7 s away in the mean, and the next of Java's some seconds.
        in_rounds("all are woken at once", async || {
            let (mut to_rust, mut to_java) = (Vec::new(), Vec::new());
            for _ in 0..ROUNDS {
                // Java lets go, Rust waits.
                java.lock(1, Kind::Fair, name, None).await.unwrap();
                let lock = client.fair_lock(raw(name));
                let waiter = tokio::spawn(async move {
                    let guard = lock.acquire().await.unwrap();
                    (SystemTime::now(), guard)
                });
                in_queue(server, name, 1).await;
                listens(server, name, 0).await;
                let unlocked = java.unlock(1, Kind::Fair, name).await.unwrap();
                let (woken, guard) = waiter.await.unwrap();
                let before = unlocked.done_at - unlocked.took;
                to_rust.push(woken.duration_since(before).unwrap_or_default());

                // Rust lets go, Java waits.
                let waiting = java.lock(2, Kind::Fair, name, None);
                let releasing = async {
                    in_queue(server, name, 1).await;
                    listens(server, name, 0).await;
                    let before = SystemTime::now();
                    guard.release().await.unwrap();
                    before
                };
                let (woken, released) = tokio::join!(waiting, releasing);
                to_java.push(woken.unwrap().since(released));
                java.unlock(2, Kind::Fair, name).await.unwrap();
                eventually("no client waits", || async {
                    server.pubsub_channels().await.is_empty()
                })
                .await;
            }
            to_rust.sort();
            to_java.sort();
            let slowest = to_rust[ROUNDS - 1].max(to_java[ROUNDS - 1]);
            println!(
                "wake-up of {name}, median of {ROUNDS}: Java to Rust {:?}, Rust to Java {:?}; slowest {slowest:?}",
                to_rust[ROUNDS / 2],
                to_java[ROUNDS / 2]
            );
            if slowest < 400 * MS { Ok(()) } else { Err(slowest) }
        })
        .await;
    }
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn our_waiter_keeps_its_position_while_java_waits_and_holds_before_it() {
    in_rounds("the moments are hit", async || {
        let store = Store::server().await;
        let server = store.as_server();
        let (java, client) = (Arc::new(Redisson::on(&store).await), store.client().await);
        // The lease is so short that the time of Java's waiter is all patience when it gets the lock.
        let guard = client.fair_lock("k").lease(2 * SECOND).acquire().await.unwrap();
        let order = Order::default();
        let mut threads = Vec::new();
        for (place, thread) in [(1, 1), (3, 2)] {
            if place == 3 {
                let (lock, order) = (client.fair_lock("k").wait(LONG), order.clone());
                threads.push(tokio::spawn(async move {
                    let guard = lock.acquire().await.unwrap();
                    order.lock().push(2);
                    guard.release().await.unwrap();
                }));
                in_queue(server, "k", 2).await;
            }
            let (java, order) = (java.clone(), order.clone());
            threads.push(tokio::spawn(async move {
                java.lock(thread, Kind::Fair, "k", None).await.unwrap();
                order.lock().push(place);
                // At once, before ours could ask again.
                java.unlock(thread, Kind::Fair, "k").await.unwrap();
            }));
            in_queue(server, "k", place).await;
        }
        // More than the lease and the place of ours together.
        tokio::time::sleep(9 * SECOND).await;
        if guard.state() != HoldState::Held {
            return Err(format!("the holder lost it: {:?}", guard.state()));
        }
        guard.release().await.map_err(|error| error.to_string())?;
        for thread in threads {
            thread.await.unwrap();
        }
        assert_eq!(*order.lock(), [1, 2, 3]);
        store.assert_clean(&[&client]).await;
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_waiter_of_ours_delays_java_by_seconds() {
    let store = Store::server().await;
    let server = store.as_server();
    let (java, client) = (Redisson::on(&store).await, store.client().await);
    let guard = client.fair_lock("k").acquire().await.unwrap();
    // What is left of processes that were killed: nothing runs any more, nothing is sent any more.
    for _ in 0..2 {
        let url = server.url();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            let waiting = runtime.block_on(async {
                let client = LockClient::builder().url(url).build().await.unwrap();
                let mut acquire = Box::pin(client.fair_lock("k").acquire());
                let asking = tokio::time::timeout(300 * MS, &mut acquire).await;
                assert!(asking.is_err(), "it waits");
                (client, acquire)
            });
            std::mem::forget(waiting);
            runtime.shutdown_background();
        })
        .join()
        .unwrap();
    }
    in_queue(server, "k", 2).await;
    let waiting = java.lock(1, Kind::Fair, "k", None);
    let releasing = async {
        in_queue(server, "k", 3).await;
        // By now it knows the lease of 30 s, and sleeps until it is told.
        listens(server, "k", 2).await;
        let before = SystemTime::now();
        guard.release().await.unwrap();
        before
    };
    let (locked, released) = tokio::join!(waiting, releasing);
    let waited = locked.unwrap().since(released);
    println!("two dead waiters of ours cost Java {waited:?}");
    // And not 300 s, as those of Redisson's would, nor a lease of 30 s for each.
    assert!(waited < 6 * SECOND + SLACK, "{waited:?}");
    java.unlock(1, Kind::Fair, "k").await.unwrap();
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_that_gives_up_on_either_side_leaves_the_queue_to_the_others() {
    let store = Store::server().await;
    let server = store.as_server();
    let (java, client) = (Redisson::on(&store).await, store.client().await);
    let guard = client.fair_lock("k").acquire().await.unwrap();
    let gives_up = client.fair_lock("k").wait(2 * SECOND).acquire();
    let gives_up = tokio::spawn(gives_up);
    in_queue(server, "k", 1).await;
    let (java_gives_up, last, ()) = tokio::join!(
        java.try_lock(1, Kind::Fair, "k", 3 * SECOND, None),
        async {
            in_queue(server, "k", 2).await;
            java.lock(2, Kind::Fair, "k", None).await.unwrap()
        },
        async {
            in_queue(server, "k", 3).await;
            assert!(gives_up.await.unwrap().unwrap_err().is_busy());
            in_queue(server, "k", 1).await;
            guard.release().await.unwrap();
        },
    );
    assert!(!java_gives_up.unwrap().acquired());
    assert!(last.acquired());
    java.unlock(2, Kind::Fair, "k").await.unwrap();
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn neither_side_overtakes_waiters_by_trying() {
    let store = Store::server().await;
    let server = store.as_server();
    let (java, client) = (Redisson::on(&store).await, store.client().await);
    let guard = client.fair_lock("k").acquire().await.unwrap();
    let mut first = Box::pin(client.fair_lock("k").acquire());
    assert!(futures_util::poll!(&mut first).is_pending());
    in_queue(server, "k", 1).await;
    guard.release().await.unwrap();
    // It is free, and another one's turn.
    let tried = java.call(1, &["tryLock", "fair", "k"]).await.unwrap();
    assert!(!tried.acquired());
    assert!(client.fair_lock("k").try_acquire().await.unwrap_err().is_busy());
    first.await.unwrap().release().await.unwrap();
    let tried = java.call(1, &["tryLock", "fair", "k"]).await.unwrap();
    assert!(tried.acquired());
    java.unlock(1, Kind::Fair, "k").await.unwrap();
    store.assert_clean(&[&client]).await;
}
