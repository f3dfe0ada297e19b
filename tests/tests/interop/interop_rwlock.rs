//! dlock and Redisson 4.7.0 share the read-write lock: readers of both sides are inside together, a writer keeps all out,
//! they wake each other, and each respects what the other renews.
//!
//! Needs java 17 and Maven; `tests/run` leaves this suite out where they are missing, and says so.

use std::time::{Duration, Instant};

use dlock::{LockClient, LockKey, LockKind as As, RwLock};
use dlock_tests::faults::SLACK;
use dlock_tests::redisson::{Kind, Redisson, add_one};
use dlock_tests::{Store, eventually};
use futures_util::future::join_all;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// Far more than anything here takes, and less than any lease has to run out in.
const LONG: Duration = Duration::from_secs(90);

/// Names as most services use them, and with the tag that places them in a Cluster.
const NAMES: [&str; 2] = ["prices", "{shop}:prices"];

fn rw_lock(client: &LockClient, name: &str) -> RwLock {
    client.rw_lock(LockKey::raw(name))
}

/// Waits until so many listen for news of the lock: Redisson one for each process, and we one for each client.
async fn listen(store: &Store, name: &str, count: u64) {
    let channel = match name.contains('{') {
        true => format!("redisson_rwlock:{name}"),
        false => format!("redisson_rwlock:{{{name}}}"),
    };
    eventually(&format!("{count} listen"), || async {
        let (_, heard): (String, u64) = store.as_server().query(&["PUBSUB", "NUMSUB", &channel]).await;
        heard >= count
    })
    .await;
    dlock_tests::settle().await;
}

/// Adds one to a number on the server, `times` times, in two steps with time between them.
async fn count(store: &Store, client: LockClient, name: &str, key: &str, times: u32) {
    let mut conn = store.as_server().conn().await;
    for _ in 0..times {
        let guard = rw_lock(&client, name).write().wait(LONG).acquire().await.unwrap();
        add_one(&mut conn, key).await;
        guard.release().await.unwrap();
    }
}

/// Sees that a number stays what it is for as long as one reads.
async fn read(store: &Store, client: LockClient, name: &str, key: &str, times: u32) {
    let mut conn = store.as_server().conn().await;
    for _ in 0..times {
        let guard = rw_lock(&client, name).read().wait(LONG).acquire().await.unwrap();
        let look = async |conn: &mut _| -> Option<u64> {
            redis::cmd("GET").arg(key).query_async(conn).await.unwrap()
        };
        let before = look(&mut conn).await;
        tokio::time::sleep(MS).await;
        assert_eq!(
            before,
            look(&mut conn).await,
            "a writer wrote while a reader was inside"
        );
        guard.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_of_both_sides_exclude_each_other_and_all_readers() {
    let store = Store::server().await;
    let (a, b) = tokio::join!(Redisson::on(&store), Redisson::on(&store));
    let (c, d) = (store.client().await, store.client().await);
    for name in NAMES {
        const TIMES: u32 = 10;
        let key = format!("sum of {name}");
        let java = |java, thread| Redisson::counter(java, thread, Kind::Write, name, &key, TIMES, MS / 2);
        let (threads, _, _) = tokio::join!(
            join_all([(&a, 1), (&b, 1), (&b, 2)].map(|(j, t)| java(j, t))),
            join_all([&c, &d, &d].map(|client| count(&store, client.clone(), name, &key, TIMES))),
            join_all([&c, &d].map(|client| read(&store, client.clone(), name, &key, TIMES))),
        );
        for failures in threads {
            assert_eq!(failures.unwrap(), 0, "rounds of Java that threw");
        }
        let sum: u32 = store.as_server().query(&["GET", &key]).await;
        assert_eq!(sum, 6 * TIMES, "an addition was lost: two were inside at a time");
        store.as_server().command(&["DEL", &key]).await;
    }
    store.assert_clean(&[&c, &d]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_of_both_sides_are_inside_together_and_keep_writers_out() {
    let store = Store::server().await;
    let java = Redisson::on(&store).await;
    let client = store.client().await;
    for name in NAMES {
        let lock = rw_lock(&client, name);
        java.lock(1, Kind::Read, name, None).await.unwrap();
        let reader = lock.read().try_acquire().await.unwrap();
        java.lock(2, Kind::Read, name, None).await.unwrap();
        assert_eq!(client.holders(LockKey::raw(name)).await.unwrap().len(), 3);
        assert!(
            client
                .holders(LockKey::raw(name))
                .await
                .unwrap()
                .iter()
                .all(|holder| holder.kind == As::Read)
        );
        assert!(lock.write().try_acquire().await.unwrap_err().is_busy());
        let tried = java.try_lock(3, Kind::Write, name, Duration::ZERO, None).await;
        assert!(!tried.unwrap().acquired());
        java.unlock(1, Kind::Read, name).await.unwrap();
        java.unlock(2, Kind::Read, name).await.unwrap();
        let tried = java.try_lock(3, Kind::Write, name, Duration::ZERO, None).await;
        assert!(!tried.unwrap().acquired(), "our reader is inside");
        reader.release().await.unwrap();
        java.lock(3, Kind::Write, name, None).await.unwrap();
        assert!(lock.read().try_acquire().await.unwrap_err().is_busy());
        let seen = client.inspect(LockKey::raw(name)).await.unwrap().unwrap();
        assert_eq!(seen.kind, As::Write);
        java.unlock(3, Kind::Write, name).await.unwrap();
        let writer = lock.write().try_acquire().await.unwrap();
        for kind in [Kind::Read, Kind::Write] {
            let tried = java.try_lock(1, kind, name, Duration::ZERO, None).await;
            assert!(!tried.unwrap().acquired());
        }
        assert!(java.is_locked(Kind::Write, name).await.unwrap());
        let left = java.remaining(Kind::Write, name).await.unwrap();
        assert!(left > 0 && left <= 30_000, "{left}");
        writer.release().await.unwrap();
        assert!(!java.is_locked(Kind::Write, name).await.unwrap());
    }
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn they_wake_each_other_long_before_a_lease_ends() {
    let store = Store::server().await;
    let java = Redisson::on(&store).await;
    let client = store.client().await;
    for name in NAMES {
        let lock = rw_lock(&client, name);
        for (theirs, ours) in [
            (Kind::Write, lock.read()),
            (Kind::Write, lock.write()),
            (Kind::Read, lock.write()),
        ] {
            java.lock(1, theirs, name, None).await.unwrap();
            let waiter = tokio::spawn(ours.clone().wait(LONG).acquire());
            listen(&store, name, 1).await;
            let begun = Instant::now();
            java.unlock(1, theirs, name).await.unwrap();
            waiter.await.unwrap().unwrap().release().await.unwrap();
            let took = begun.elapsed();
            println!("{name}: {theirs:?} of Java gone, ours woken after {took:?}");
            // The next look without a message would have come after a third of a lease.
            assert!(took < 8 * SECOND, "{took:?}");

            let guard = ours.acquire().await.unwrap();
            let other = if theirs == Kind::Write {
                Kind::Write
            } else {
                Kind::Read
            };
            let waiting = java.lock(1, other, name, None);
            let releasing = async {
                listen(&store, name, 1).await;
                // The message of a read-write lock wakes those threads of Redisson that wait at their latch: one that has asked,
                // and is about to wait, misses it and looks again when the lease would be over (`LockPubSub`).
                tokio::time::sleep(SECOND / 2).await;
                let begun = Instant::now();
                guard.release().await.unwrap();
                begun
            };
            let (woken, begun) = tokio::join!(waiting, releasing);
            woken.unwrap();
            println!(
                "{name}: ours gone, {other:?} of Java woken after {:?}",
                begun.elapsed()
            );
            assert!(begun.elapsed() < 8 * SECOND + SLACK / 2);
            java.unlock(1, other, name).await.unwrap();
        }
    }
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_that_stays_as_a_reader_lets_the_readers_of_the_other_side_in() {
    let store = Store::server().await;
    let java = Redisson::on(&store).await;
    let client = store.client().await;
    for name in NAMES {
        let lock = rw_lock(&client, name);
        let writer = lock.write().acquire().await.unwrap();
        let waiting = java.lock(1, Kind::Read, name, None);
        let staying = async {
            listen(&store, name, 1).await;
            writer.downgrade().await.unwrap()
        };
        let (woken, reader) = tokio::join!(waiting, staying);
        woken.unwrap();
        assert!(reader.is_held());
        let tried = java.try_lock(2, Kind::Write, name, Duration::ZERO, None).await;
        assert!(!tried.unwrap().acquired());
        reader.release().await.unwrap();
        java.unlock(1, Kind::Read, name).await.unwrap();

        // Of Redisson's own no message comes.
        java.lock(1, Kind::Write, name, None).await.unwrap();
        java.lock(1, Kind::Read, name, None).await.unwrap();
        let waiter = tokio::spawn(lock.read().wait(LONG).acquire());
        listen(&store, name, 1).await;
        java.unlock(1, Kind::Write, name).await.unwrap();
        let reader = waiter.await.unwrap().unwrap();
        assert!(lock.write().try_acquire().await.unwrap_err().is_busy());
        java.unlock(1, Kind::Read, name).await.unwrap();
        reader.release().await.unwrap();
    }
    store.assert_clean(&[&client]).await;
}

/// The reactive API of Redisson draws the number of a holder at random, and half of them are below zero.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_java_reader_with_a_negative_number_keeps_writers_out_when_ours_leaves() {
    let store = Store::server().await;
    let java = Redisson::on(&store).await;
    let client = store.client().await;
    for name in NAMES {
        let lock = rw_lock(&client, name);
        let reader = lock.read().acquire().await.unwrap();
        java.lock_as(-5, Kind::Read, name, 60 * SECOND).await.unwrap();
        java.lock_as(i64::MIN, Kind::Read, name, 60 * SECOND)
            .await
            .unwrap();
        reader.release().await.unwrap();
        java.unlock_as(i64::MIN, Kind::Read, name).await.unwrap();
        assert!(lock.write().try_acquire().await.unwrap_err().is_busy());
        let holder = client.inspect(LockKey::raw(name)).await.unwrap().unwrap();
        assert_eq!(holder.id, format!("{}:-5", java.uuid()));
        let writer = tokio::spawn(lock.write().wait(LONG).acquire());
        listen(&store, name, 1).await;
        java.unlock_as(-5, Kind::Read, name).await.unwrap();
        writer.await.unwrap().unwrap().release().await.unwrap();

        java.lock_as(-5, Kind::Write, name, 60 * SECOND).await.unwrap();
        assert!(lock.read().try_acquire().await.unwrap_err().is_busy());
        java.unlock_as(-5, Kind::Write, name).await.unwrap();
        lock.read().try_acquire().await.unwrap().release().await.unwrap();
    }
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_that_are_preferred_here_disturb_neither_readers_nor_writers_there() {
    let store = Store::server().await;
    let java = Redisson::on(&store).await;
    let (client, other) = (store.client().await, store.client().await);
    for name in NAMES {
        let lock = rw_lock(&client, name).prefer_writers();
        java.lock(1, Kind::Read, name, None).await.unwrap();
        let writer = tokio::spawn(lock.write().wait(LONG).acquire());
        eventually("readers of ours stand back", || async {
            let tried = rw_lock(&other, name).read().try_acquire().await;
            tried.is_err_and(|error| error.is_busy())
        })
        .await;
        // Theirs come in, and see nothing but each other.
        java.lock(2, Kind::Read, name, None).await.unwrap();
        assert_eq!(other.holders(LockKey::raw(name)).await.unwrap().len(), 2);
        let tried = java.try_lock(3, Kind::Write, name, Duration::ZERO, None).await;
        assert!(!tried.unwrap().acquired());
        java.unlock(1, Kind::Read, name).await.unwrap();
        assert!(!writer.is_finished());
        let unlocked = Instant::now();
        java.unlock(2, Kind::Read, name).await.unwrap();
        let writer = writer.await.unwrap().unwrap();
        assert!(unlocked.elapsed() < SLACK, "{:?}", unlocked.elapsed());
        writer.release().await.unwrap();
        java.lock(3, Kind::Write, name, None).await.unwrap();
        java.unlock(3, Kind::Write, name).await.unwrap();
        // All of both sides at once, and not an addition is lost.
        const TIMES: u32 = 10;
        let key = format!("sum of {name}");
        let prefers = async |client: &LockClient| {
            let mut conn = store.as_server().conn().await;
            for _ in 0..TIMES {
                let guard = rw_lock(client, name)
                    .prefer_writers()
                    .write()
                    .wait(LONG)
                    .acquire()
                    .await
                    .unwrap();
                add_one(&mut conn, &key).await;
                guard.release().await.unwrap();
            }
        };
        let (theirs, ..) = tokio::join!(
            java.counter(1, Kind::Write, name, &key, TIMES, MS / 2),
            prefers(&client),
            prefers(&other),
            read(&store, client.clone(), name, &key, TIMES),
            read(&store, other.clone(), name, &key, TIMES),
        );
        assert_eq!(theirs.unwrap(), 0, "rounds of Java that threw");
        let sum: u32 = store.as_server().query(&["GET", &key]).await;
        assert_eq!(sum, 3 * TIMES, "an addition was lost: two were inside at a time");
        store.as_server().command(&["DEL", &key]).await;
    }
    store.assert_clean(&[&client, &other]).await;
}
