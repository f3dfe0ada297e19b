//! The behaviours of Redisson's own tests of its read-write locks, semaphores and latches, on every store: see
//! `tests/interop/PORTED.md`.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use dlock::{Error, Lock, LockClient};
use dlock_tests::faults::{PATIENCE, SLACK, SOON, in_rounds, within};
use dlock_tests::{Store, eventually, on_every_store, settle};
use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn read(client: &LockClient) -> Lock {
    client.rw_lock("k").read()
}

fn write(client: &LockClient) -> Lock {
    client.rw_lock("k").write()
}

async fn clients(store: &Store, number: usize) -> Vec<LockClient> {
    join_all((0..number).map(|_| store.client())).await
}

async fn assert_clean(store: &Store, clients: &[LockClient]) {
    store.assert_clean(&clients.iter().collect::<Vec<_>>()).await;
}

/// A client whose locks end soon when they are not renewed.
async fn hasty(store: &Store) -> LockClient {
    store.client_with(|builder| builder.lease(900 * MS)).await
}

/// A client that hears of a release by a message, and not by a look at a lease.
async fn long(store: &Store) -> LockClient {
    store.client_with(|builder| builder.lease(90 * SECOND)).await
}

/// Counts in two halves, so that a task that is not alone counts wrong.
async fn count(counter: &AtomicU64) {
    let before = counter.load(Ordering::SeqCst);
    tokio::task::yield_now().await;
    counter.store(before + 1, Ordering::SeqCst);
}

on_every_store! {
    async fn readers_come_in_when_the_lease_of_a_writer_ends(store: &Store) {
        let clients = clients(store, 2).await;
        let begun = Instant::now();
        let writer = write(&clients[0]).fixed_lease(300 * MS).acquire().await.unwrap();
        let readers = clients.iter().map(|client| tokio::spawn(read(client).acquire()));
        for reader in join_all(readers).await {
            let reader = reader.unwrap().unwrap();
            assert!(begun.elapsed() >= 299 * MS && begun.elapsed() < SLACK, "{:?}", begun.elapsed());
            assert!(!writer.is_held() && reader.fencing_token() > writer.fencing_token());
            drop(reader);
        }
        assert!(writer.release().await.unwrap_err().is_lost());
        assert_clean(store, &clients).await;
    }

    async fn a_reader_that_comes_and_goes_prolongs_nobodys_lease(store: &Store) {
        let clients = clients(store, 3).await;
        let begun = Instant::now();
        let short = read(&clients[0]).fixed_lease(600 * MS).acquire().await.unwrap();
        let guest = read(&clients[1]).fixed_lease(600 * SECOND).acquire().await.unwrap();
        let writer = tokio::spawn(write(&clients[2]).acquire());
        settle().await;
        guest.release().await.unwrap();
        let writer = within(SOON, "the end of the short lease", writer).await.unwrap().unwrap();
        assert!(begun.elapsed() >= 599 * MS && begun.elapsed() < SLACK, "{:?}", begun.elapsed());
        assert!(!short.is_held());
        writer.release().await.unwrap();
        drop(short);
        assert_clean(store, &clients).await;
    }

    async fn many_readers_are_renewed_past_their_first_lease(store: &Store) {
        in_rounds("all are renewed in time", async || {
            let (a, b) = (hasty(store).await, hasty(store).await);
            let readers = join_all((0..20).map(|i| read(if i % 2 == 0 { &a } else { &b }).acquire())).await;
            let readers: Vec<_> = readers.into_iter().map(Result::unwrap).collect();
            sleep(1800 * MS).await;
            let busy = write(&a).try_acquire().await.is_err_and(|error| error.is_busy());
            let held = readers.iter().filter(|reader| reader.is_held()).count();
            assert!(busy || held < 20);
            let outcomes = join_all(readers.into_iter().map(|reader| reader.release())).await;
            store.assert_clean(&[&a, &b]).await;
            if held == 20 && outcomes.iter().all(Result::is_ok) { Ok(()) } else { Err(held) }
        })
        .await;
    }

    async fn a_writer_that_reads_is_renewed_for_both_and_the_read_for_itself_after_it(store: &Store) {
        in_rounds("both are renewed in time", async || {
            let (a, b) = (hasty(store).await, hasty(store).await);
            let writer = write(&a).acquire().await.unwrap();
            let reader = writer.scope(read(&a).acquire()).await.unwrap();
            sleep(1200 * MS).await;
            let both = writer.is_held() && reader.is_held();
            assert!(!both || read(&b).try_acquire().await.is_err_and(|error| error.is_busy()));
            drop(writer);
            sleep(1200 * MS).await;
            // Others read with it, and no task writes.
            let other = read(&b).wait(SOON).acquire().await.unwrap();
            let alone = write(&b).try_acquire().await.is_err_and(|error| error.is_busy());
            let one = reader.is_held();
            drop((reader, other));
            store.assert_clean(&[&a, &b]).await;
            assert!(alone);
            if both && one { Ok(()) } else { Err((both, one)) }
        })
        .await;
    }

    async fn a_writer_that_read_may_not_write_again_before_its_read_is_gone(store: &Store) {
        let clients = clients(store, 2).await;
        let writer = write(&clients[0]).acquire().await.unwrap();
        let reader = writer.scope(read(&clients[0]).try_acquire()).await.unwrap();
        assert!(read(&clients[1]).try_acquire().await.unwrap_err().is_busy());
        writer.release().await.unwrap();
        for client in &clients {
            assert!(write(client).try_acquire().await.unwrap_err().is_busy());
        }
        reader.release().await.unwrap();
        for client in &clients {
            write(client).try_acquire().await.unwrap().release().await.unwrap();
        }
        assert_clean(store, &clients).await;
    }

    async fn readers_and_writers_at_random_are_together_and_alone(store: &Store) {
        let clients = clients(store, 4).await;
        let (written, inside) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicI64::new(0)));
        let writes = Arc::new(AtomicU64::new(0));
        let tasks = (0..8_usize).map(|task| {
            let client = clients[task % 4].clone();
            let (written, inside, writes) = (written.clone(), inside.clone(), writes.clone());
            tokio::spawn(async move {
                for _ in 0..6 {
                    if fastrand::bool() {
                        let guard = write(&client).wait(PATIENCE).acquire().await.unwrap();
                        assert_eq!(inside.fetch_sub(1000, Ordering::SeqCst), 0);
                        count(&written).await;
                        writes.fetch_add(1, Ordering::SeqCst);
                        assert_eq!(inside.fetch_add(1000, Ordering::SeqCst), -1000);
                        guard.release().await.unwrap();
                    } else {
                        let guard = read(&client).wait(PATIENCE).acquire().await.unwrap();
                        assert!(inside.fetch_add(1, Ordering::SeqCst) >= 0);
                        tokio::task::yield_now().await;
                        inside.fetch_sub(1, Ordering::SeqCst);
                        guard.release().await.unwrap();
                    }
                }
            })
        });
        for task in join_all(tasks).await {
            task.unwrap();
        }
        assert_eq!(written.load(Ordering::SeqCst), writes.load(Ordering::SeqCst));
        assert_clean(store, &clients).await;
    }

    async fn who_wants_more_permits_than_there_are_goes_on_when_some_are_added(store: &Store) {
        let (a, b) = (long(store).await, long(store).await);
        let unowned = a.unowned_semaphore("unowned");
        unowned.add_permits(1).await.unwrap();
        let waiter = tokio::spawn(b.unowned_semaphore("unowned").acquire_many(2));
        settle().await;
        unowned.acquire().await.unwrap();
        unowned.release().await.unwrap();
        settle().await;
        assert!(!waiter.is_finished());
        unowned.add_permits(1).await.unwrap();
        within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
        assert_eq!(unowned.available().await.unwrap(), 0);
        assert!(unowned.delete().await.unwrap());

        let owned = a.semaphore("owned");
        owned.add_permits(1).await.unwrap();
        let waiter = tokio::spawn(b.semaphore("owned").acquire_many(2));
        settle().await;
        owned.acquire().await.unwrap().release().await.unwrap();
        settle().await;
        assert!(!waiter.is_finished());
        owned.add_permits(1).await.unwrap();
        let two = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
        assert_eq!((two.permits(), owned.available().await.unwrap()), (2, 0));
        two.release().await.unwrap();
        assert!(owned.delete().await.unwrap());
        store.assert_clean(&[&a, &b]).await;
    }

    async fn permits_are_added_and_taken_away_while_all_are_out(store: &Store) {
        let client = store.client().await;
        let permits = client.unowned_semaphore("more");
        assert!(permits.try_set_permits(10).await.unwrap());
        permits.acquire_many(10).await.unwrap();
        permits.add_permits(4).await.unwrap();
        assert_eq!(permits.available().await.unwrap(), 4);
        permits.release_many(10).await.unwrap();
        assert_eq!(permits.available().await.unwrap(), 14);
        permits.acquire_many(5).await.unwrap();
        assert_eq!(permits.available().await.unwrap(), 9);
        assert!(permits.delete().await.unwrap());

        let permits = client.unowned_semaphore("fewer");
        assert!(permits.try_set_permits(10).await.unwrap());
        permits.acquire_many(10).await.unwrap();
        permits.remove_permits(5).await.unwrap();
        assert_eq!(permits.available().await.unwrap(), -5);
        permits.release_many(10).await.unwrap();
        assert_eq!(permits.available().await.unwrap(), 5);
        permits.acquire_many(5).await.unwrap();
        assert_eq!(permits.available().await.unwrap(), 0);
        assert!(permits.delete().await.unwrap());
        store.assert_clean(&[&client]).await;
    }

    async fn who_wants_four_waits_until_enough_have_come_back_one_by_one(store: &Store) {
        let (a, b) = (long(store).await, long(store).await);
        let permits = a.semaphore("k").permits(5);
        let mut out = Vec::new();
        for _ in 0..3 {
            out.push(permits.acquire().await.unwrap());
        }
        assert_eq!(permits.available().await.unwrap(), 2);
        assert!(b.semaphore("k").try_acquire_many(4).await.unwrap_err().is_busy());
        let waiter = tokio::spawn(b.semaphore("k").acquire_many(4));
        for permit in out.drain(1..) {
            settle().await;
            assert!(!waiter.is_finished());
            permit.release().await.unwrap();
        }
        let four = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
        assert_eq!(permits.available().await.unwrap(), 0);
        drop((out, four));
        eventually("all have come back", || async { permits.available().await.unwrap() == 5 }).await;
        assert!(permits.delete().await.unwrap());
        store.assert_clean(&[&a, &b]).await;
    }

    async fn a_semaphore_of_one_permit_excludes_like_a_lock(store: &Store) {
        let clients = clients(store, 4).await;
        let counter = Arc::new(AtomicU64::new(0));
        assert!(clients[0].unowned_semaphore("unowned").try_set_permits(1).await.unwrap());
        let tasks = (0..8).map(|task| {
            let owned = clients[task % 4].semaphore("owned").permits(1).wait(PATIENCE);
            let unowned = clients[task % 4].unowned_semaphore("unowned").wait(PATIENCE);
            let counter = counter.clone();
            tokio::spawn(async move {
                for _ in 0..5 {
                    // Each excludes callers that use the same.
                    if task % 2 == 0 {
                        unowned.acquire().await.unwrap();
                        unowned.release().await.unwrap();
                    }
                    let permit = owned.acquire().await.unwrap();
                    count(&counter).await;
                    permit.release().await.unwrap();
                }
            })
        });
        for task in join_all(tasks).await {
            task.unwrap();
        }
        assert_eq!(counter.load(Ordering::SeqCst), 40);
        assert!(clients[0].unowned_semaphore("unowned").delete().await.unwrap());
        assert!(clients[0].semaphore("owned").delete().await.unwrap());
        assert_clean(store, &clients).await;
    }

    async fn all_permits_that_there_can_be_or_one(store: &Store) {
        const MOST: u32 = i32::MAX as u32;
        let clients = clients(store, 4).await;
        let permits = clients[0].unowned_semaphore("k");
        assert!(permits.try_set_permits(MOST).await.unwrap());
        let all = Arc::new(AtomicI64::new(0));
        let tasks = (0..4_usize).map(|task| {
            let permits = clients[task].unowned_semaphore("k").wait(PATIENCE);
            let all = all.clone();
            tokio::spawn(async move {
                for _ in 0..6 {
                    let amount = if fastrand::bool() { 1 } else { MOST };
                    permits.acquire_many(amount).await.unwrap();
                    let out = all.fetch_add(i64::from(amount), Ordering::SeqCst);
                    assert!(out + i64::from(amount) <= i64::from(MOST), "{out} and {amount}");
                    tokio::task::yield_now().await;
                    all.fetch_sub(i64::from(amount), Ordering::SeqCst);
                    permits.release_many(amount).await.unwrap();
                }
            })
        });
        for task in join_all(tasks).await {
            task.unwrap();
        }
        assert_eq!(permits.available().await.unwrap(), i64::from(MOST));
        assert!(permits.delete().await.unwrap());
        assert_clean(store, &clients).await;
    }

    async fn locks_around_semaphores_by_many_names(store: &Store) {
        let clients = clients(store, 2).await;
        let tasks = (0..4).map(|task| {
            let client = clients[task % 2].clone();
            tokio::spawn(async move {
                for name in 0..8 {
                    let lock = client.lock(format!("lock-{name}")).wait(PATIENCE).acquire().await.unwrap();
                    let permits = client.unowned_semaphore(format!("semaphore-{name}"));
                    permits.add_permits(1).await.unwrap();
                    permits.try_acquire().await.unwrap();
                    lock.release().await.unwrap();
                }
            })
        });
        for task in join_all(tasks).await {
            task.unwrap();
        }
        for name in 0..8 {
            let permits = clients[0].unowned_semaphore(format!("semaphore-{name}"));
            assert_eq!(permits.available().await.unwrap(), 0);
            assert!(permits.delete().await.unwrap());
        }
        assert_clean(store, &clients).await;
    }

    async fn latches_of_different_names_are_strangers_and_open_ones_keep_nobody(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let closed = a.latch("closed");
        assert!(closed.try_set_count(5).await.unwrap());
        let waiters: Vec<_> = (0..5)
            .map(|i| {
                let latch = if i % 2 == 0 { &a } else { &b }.latch("closed");
                tokio::spawn(async move { latch.wait_for(PATIENCE).await })
            })
            .collect();
        for name in ["never-set", "set-and-open"] {
            let latch = b.latch(name);
            if name == "set-and-open" {
                assert!(latch.try_set_count(1).await.unwrap());
                assert_eq!(latch.count_down().await.unwrap(), 0);
            }
            assert_eq!(latch.count().await.unwrap(), 0);
            within(SOON, "an open latch", latch.wait()).await.unwrap();
            assert!(matches!(latch.count_down().await, Err(Error::LatchOpen { .. })));
        }
        settle().await;
        assert!(waiters.iter().all(|waiter| !waiter.is_finished()));
        let left = join_all((0..5).map(|i| {
            let latch = if i % 2 == 0 { &a } else { &b }.latch("closed");
            async move { latch.count_down().await.unwrap() }
        }));
        assert!(left.await.contains(&0));
        for waiter in within(SOON, "the wake-ups", join_all(waiters)).await {
            assert!(waiter.unwrap().unwrap());
        }
        assert_eq!(closed.count().await.unwrap(), 0);
        store.assert_clean(&[&a, &b]).await;
    }
}
