//! Read-write locks and frames, on memory and on a server: nested calls enter, a writer may read and stay a reader,
//! and a reader that asks to write is told at once that it would wait for itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use dlock::{Error, HoldState, Lock, LockClient, LockKind, Loss, scope};
use dlock_tests::faults::{PATIENCE, SLACK, SOON, is_confirmed, within};
use dlock_tests::{on_every_store, on_quorums, settle};
use futures_util::future::join_all;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn read(client: &LockClient) -> Lock {
    client.rw_lock("k").read()
}

fn write(client: &LockClient) -> Lock {
    client.rw_lock("k").write()
}

async fn inside(client: &LockClient) -> Vec<String> {
    let holders = client.holders("k").await.unwrap();
    let mut kinds: Vec<_> = holders.iter().map(|holder| holder.kind.to_string()).collect();
    kinds.sort();
    kinds
}

fn would_deadlock<T>(outcome: Result<T, Error>) -> bool {
    matches!(outcome, Err(Error::WouldDeadlock { .. }))
}

/// The holders at a time: readers, writers.
#[derive(Default)]
struct Room {
    readers: AtomicUsize,
    writers: AtomicUsize,
    most_readers: AtomicUsize,
}

/// Takes one away again, however a visit ends.
struct Leaves<'a>(&'a AtomicUsize);

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Room {
    async fn reads(&self) {
        let readers = self.readers.fetch_add(1, Ordering::SeqCst) + 1;
        let _leaves = Leaves(&self.readers);
        self.most_readers.fetch_max(readers, Ordering::SeqCst);
        assert_eq!(self.writers.load(Ordering::SeqCst), 0, "a reader beside a writer");
        tokio::time::sleep(5 * MS).await;
    }

    async fn writes(&self) {
        let writers = self.writers.fetch_add(1, Ordering::SeqCst);
        let _leaves = Leaves(&self.writers);
        assert_eq!(writers, 0, "two writers");
        assert_eq!(self.readers.load(Ordering::SeqCst), 0, "a writer beside a reader");
        tokio::time::sleep(5 * MS).await;
    }
}

on_every_store! {
    async fn read_enters_a_read_frame_and_write_a_write_frame(store: &Store) {
        let (client, other) = (store.client().await, store.client().await);
        for lock in [read(&client), write(&client)] {
            let inner = lock.clone();
            let tokens = lock
                .run(|held| async move {
                    let second = inner.acquire().await.unwrap();
                    let third = second.run(async { inner.try_acquire().await.unwrap() }).await.unwrap();
                    [held.fencing_token(), second.fencing_token(), third.fencing_token()]
                })
                .await
                .unwrap();
            assert!(tokens[0] == tokens[1] && tokens[1] == tokens[2], "{tokens:?}");
            assert!(write(&other).try_acquire().await.is_ok());
        }
        store.assert_clean(&[&client, &other]).await;
    }

    async fn reading_siblings_do_not_exclude_each_other(store: &Store) {
        let client = store.client().await;
        let room = Arc::new(Room::default());
        let (lock, visits, looking) = (read(&client), room.clone(), client.clone());
        let inner = lock.clone();
        lock.run(|_| async move {
            join_all((0..5).map(|_| async {
                let guard = inner.try_acquire().await.unwrap();
                guard.run(visits.reads()).await.unwrap();
                // One grant for all of them.
                assert_eq!(inside(&looking).await, ["read"]);
                guard.release().await.unwrap();
            }))
            .await;
        })
        .await
        .unwrap();
        assert_eq!(room.most_readers.load(Ordering::SeqCst), 5);
        let (a, b) = (read(&client).acquire().await.unwrap(), read(&client).acquire().await.unwrap());
        drop((a, b));
        store.assert_clean(&[&client]).await;
    }

    async fn a_writer_may_read_and_keeps_others_out(store: &Store) {
        let (client, other) = (store.client().await, store.client().await);
        let guard = write(&client).acquire().await.unwrap();
        let reading = guard.scope(read(&client).try_acquire()).await.unwrap();
        assert!(reading.fencing_token() > guard.fencing_token());
        assert_eq!(inside(&client).await, ["read", "write"]);
        for lock in [read(&other), write(&other), read(&client), write(&client)] {
            assert!(lock.try_acquire().await.unwrap_err().is_busy());
        }
        // A read inside is the same one again.
        let again = reading.scope(read(&client).try_acquire()).await.unwrap();
        assert_eq!(again.fencing_token(), reading.fencing_token());
        drop(again);
        reading.release().await.unwrap();
        assert_eq!(inside(&client).await, ["write"]);
        is_confirmed(&guard).await;
        guard.release().await.unwrap();
        assert!(write(&other).try_acquire().await.is_ok());
        store.assert_clean(&[&client, &other]).await;
    }

    async fn next_writer_has_a_greater_token_than_readers_under_the_last(store: &Store) {
        let client = store.client().await;
        for _ in 0..20 {
            let guard = write(&client).acquire().await.unwrap();
            let waiter = tokio::spawn(write(&client).acquire());
            let reading = guard.scope(read(&client).try_acquire()).await.unwrap();
            let token = reading.fencing_token();
            assert!(token > guard.fencing_token());
            tokio::task::yield_now().await;
            drop(reading);
            // Also where it goes to a waiter of the same process.
            guard.release().await.unwrap();
            let next = waiter.await.unwrap().unwrap();
            assert!(next.fencing_token() > token, "{} after {token}", next.fencing_token());
            next.release().await.unwrap();
        }
        store.assert_clean(&[&client]).await;
    }

    async fn a_writer_that_leaves_its_read_behind_lets_readers_in_and_no_writer(store: &Store) {
        let long = async || store.client_with(|builder| builder.lease(90 * SECOND)).await;
        let (client, other) = (long().await, long().await);
        let guard = write(&client).acquire().await.unwrap();
        let reading = guard.scope(read(&client).acquire()).await.unwrap();
        let readers = [tokio::spawn(read(&other).acquire()), tokio::spawn(read(&client).acquire())];
        settle().await;
        let writer = tokio::spawn(write(&other).acquire());
        settle().await;
        guard.release().await.unwrap();
        let mut guards = vec![reading];
        for reader in readers {
            guards.push(within(SOON, "the reader's wake-up", reader).await.unwrap().unwrap());
        }
        assert_eq!(inside(&client).await, ["read", "read", "read"]);
        for guard in &guards {
            is_confirmed(guard).await;
            assert!(!writer.is_finished());
        }
        for guard in guards {
            guard.release().await.unwrap();
        }
        let writer = within(SOON, "the writer's wake-up", writer).await.unwrap().unwrap();
        writer.release().await.unwrap();
        store.assert_clean(&[&client, &other]).await;
    }

    async fn a_downgrade_has_no_gap_for_a_writer_and_lets_readers_in(store: &Store) {
        let long = async || store.client_with(|builder| builder.lease(90 * SECOND)).await;
        let (client, other) = (long().await, long().await);
        for _ in 0..10 {
            let guard = write(&client).acquire().await.unwrap();
            let token = guard.fencing_token();
            let writers = [write(&other), write(&client)].map(|lock| {
                tokio::spawn(async move {
                    let guard = lock.acquire().await.unwrap();
                    let token = guard.fencing_token();
                    guard.release().await.unwrap();
                    token
                })
            });
            let reader = tokio::spawn(read(&other).acquire());
            settle().await;
            let reading = guard.downgrade().await.unwrap();
            assert!(reading.fencing_token() > token && reading.is_renewed());
            let reader = within(SOON, "the reader's wake-up", reader).await.unwrap().unwrap();
            assert!(writers.iter().all(|writer| !writer.is_finished()));
            is_confirmed(&reading).await;
            drop((reader, reading));
            for writer in writers {
                assert!(within(SOON, "the writer's wake-up", writer).await.unwrap() > token);
            }
        }
        store.assert_clean(&[&client, &other]).await;
    }

    async fn a_downgrade_keeps_what_was_left_of_a_fixed_lease_and_refuses_what_is_no_write_lock(store: &Store) {
        let client = store.client().await;
        let guard = write(&client).fixed_lease(60 * SECOND).acquire().await.unwrap();
        let reading = guard.downgrade().await.unwrap();
        assert!(!reading.is_renewed());
        assert!(reading.remaining() <= 60 * SECOND && reading.remaining() > 60 * SECOND - SLACK);
        let error = reading.downgrade().await.unwrap_err();
        assert!(matches!(error, Error::InvalidOption { option: "downgrade", .. }), "{error}");
        let plain = client.lock("plain").acquire().await.unwrap();
        assert!(matches!(plain.downgrade().await, Err(Error::InvalidOption { .. })));
        // Of two guards one goes on writing.
        let guard = write(&client).acquire().await.unwrap();
        let again = guard.reenter().unwrap();
        let reading = guard.downgrade().await.unwrap();
        assert_eq!(inside(&client).await, ["read", "write"]);
        drop(again);
        assert!(read(&client).wait(PATIENCE).acquire().await.is_ok());
        drop(reading);
        store.assert_clean(&[&client]).await;
    }

    async fn read_nested_in_a_downgraded_lock_waits_for_a_nested_writer(store: &Store) {
        let client = store.client().await;
        let guard = write(&client).acquire().await.unwrap();
        let writing = guard.scope(write(&client).acquire()).await.unwrap();
        let reading = guard.downgrade().await.unwrap();
        // The writer goes on, and no reader enters beside it.
        assert!(reading.scope(read(&client).try_acquire()).await.unwrap_err().is_busy());
        let mut nested = Box::pin(reading.scope(read(&client).wait(PATIENCE).acquire()));
        assert!(tokio::time::timeout(20 * MS, &mut nested).await.is_err());
        assert!(writing.scope(write(&client).try_acquire()).await.unwrap_err().is_busy());
        writing.release().await.unwrap();
        let nested = nested.await.unwrap();
        assert_eq!(nested.fencing_token(), reading.fencing_token());
        drop((nested, reading));
        // A writer that encloses the downgrade excludes no reader.
        let guard = write(&client).acquire().await.unwrap();
        let inner = guard.scope(write(&client).acquire()).await.unwrap();
        let reading = guard.scope(inner.downgrade()).await.unwrap();
        assert!(reading.scope(read(&client).try_acquire()).await.is_ok());
        drop((reading, guard));
        store.assert_clean(&[&client]).await;
    }

    async fn reader_that_asks_to_write_is_refused_at_once_as_a_deadlock(store: &Store) {
        let client = store.client().await;
        let (lock, asking) = (read(&client), write(&client));
        let inner = lock.clone();
        lock.run(|_| async move {
            let started = Instant::now();
            assert!(would_deadlock(asking.acquire().await));
            assert!(would_deadlock(asking.try_acquire().await));
            let error = inner.run(|_| asking.acquire()).await.unwrap().unwrap_err();
            assert!(error.to_string().contains("lock \"k\"") && error.to_string().contains("read lock"), "{error}");
            let problem = error.problem();
            assert_eq!((problem.status, problem.kind), (500, "urn:dlock:problem:would-deadlock"));
            assert!(started.elapsed() < SLACK);
            // Not so for another lock, nor in a task that does not inherit the frame.
            let other = asking.clone().wait(50 * MS);
            assert!(tokio::spawn(async move { other.acquire().await }).await.unwrap().unwrap_err().is_busy());
        })
        .await
        .unwrap();
        let other = client.rw_lock("other");
        read(&client).run(|_| async move { other.write().try_acquire().await.map(drop) }).await.unwrap().unwrap();
        // A hold that was released inside excludes no one.
        let guard = read(&client).acquire().await.unwrap();
        let frame = guard.scope(async { scope::current() }).await;
        drop(guard);
        frame.wrap(write(&client).acquire()).await.unwrap().release().await.unwrap();
        store.assert_clean(&[&client]).await;
    }

    async fn a_writer_that_reads_may_write_inside_and_a_reader_that_is_left_may_not(store: &Store) {
        let client = store.client().await;
        let guard = write(&client).acquire().await.unwrap();
        let reading = guard.scope(read(&client).acquire()).await.unwrap();
        let both = guard.scope(async { reading.scope(async { scope::current() }).await }).await;
        let again = both.wrap(write(&client).try_acquire()).await.unwrap();
        assert_eq!(again.fencing_token(), guard.fencing_token());
        again.release().await.unwrap();
        guard.release().await.unwrap();
        assert!(would_deadlock(both.wrap(write(&client).acquire()).await));
        drop(reading);
        store.assert_clean(&[&client]).await;
    }

    async fn siblings_in_a_write_frame_exclude_each_other_unless_both_read(store: &Store) {
        let client = store.client().await;
        let room = Arc::new(Room::default());
        let (lock, visits) = (write(&client).wait(PATIENCE), room.clone());
        let (writing, reading) = (lock.clone(), read(&client).wait(PATIENCE));
        lock.run(|_| async move {
            let write = || async { writing.acquire().await.unwrap().run(visits.writes()).await.unwrap() };
            let read = || async {
                let guard = reading.acquire().await.unwrap();
                guard.run(visits.reads()).await.unwrap();
                // And nested once more.
                guard.run(async { reading.run(|_| visits.reads()).await.unwrap() }).await.unwrap();
            };
            tokio::join!(read(), write(), read(), write(), read(), read());
            for _ in 0..3 {
                tokio::select! { () = read() => {}, () = write() => {}, () = tokio::time::sleep(MS) => {} }
            }
            tokio::join!(write(), read());
        })
        .await
        .unwrap();
        assert!(room.most_readers.load(Ordering::SeqCst) > 1);
        store.assert_clean(&[&client]).await;
    }

    async fn sets_of_locks_keep_the_same_rules(store: &Store) {
        let (client, other) = (store.client().await, store.client().await);
        let set = |kind| client.multi(["a", "b", "c"]).kind(kind).wait(PATIENCE);
        let guard = client.rw_lock("b").write().acquire().await.unwrap();
        // One of them is held by the frame to write: that one is read under it, and the others as usual.
        let reading = guard.scope(set(LockKind::Read).acquire()).await.unwrap();
        assert_eq!(client.holders("b").await.unwrap().len(), 2);
        assert!(client.multi(["b"]).kind(LockKind::Write).try_acquire().await.unwrap_err().is_busy());
        drop(reading);
        guard.release().await.unwrap();
        let guard = client.rw_lock("c").read().acquire().await.unwrap();
        assert!(would_deadlock(guard.scope(set(LockKind::Write).acquire()).await));
        assert!(would_deadlock(guard.scope(set(LockKind::Write).try_acquire()).await));
        let more = guard.scope(set(LockKind::Read).acquire()).await.unwrap();
        assert_eq!(other.holders("c").await.unwrap().len(), 1);
        drop((more, guard));
        store.assert_clean(&[&client, &other]).await;
    }

    async fn lost_write_frame_gives_no_read_lock(store: &Store) {
        let (client, other) = (store.client().await, store.client().await);
        let guard = write(&client).fixed_lease(150 * MS).acquire().await.unwrap();
        let error = guard
            .scope(async {
                tokio::time::sleep(200 * MS).await;
                read(&client).acquire().await.unwrap_err()
            })
            .await;
        assert!(matches!(error, Error::Lost { loss: Loss::Expired, .. }), "{error}");
        drop(guard);
        // Forced open: the store says so, and the holder is told by that.
        for once in [false, true] {
            let guard = write(&client).acquire().await.unwrap();
            assert!(other.force_release("k").await.unwrap());
            let others = read(&other).acquire().await.unwrap();
            let asking = read(&client);
            let asked = guard.scope(async { if once { asking.try_acquire().await } else { asking.acquire().await } });
            let error = asked.await.unwrap_err();
            assert!(matches!(error, Error::Lost { loss: Loss::Gone, .. }), "{error}");
            assert_eq!(guard.state(), HoldState::Lost(Loss::Gone));
            drop((guard, others));
        }
        store.assert_clean(&[&client, &other]).await;
    }

    async fn a_read_outlives_the_lease_of_the_writer_it_came_in_under(store: &Store) {
        let (client, other) = (store.client().await, store.client().await);
        let guard = write(&client).fixed_lease(600 * MS).acquire().await.unwrap();
        let reading = guard.scope(read(&client).acquire()).await.unwrap();
        let waiting = Instant::now();
        // They learn of the end of the writer's lease without a notification.
        let reader = within(SOON, "the wait", read(&other).wait(PATIENCE).acquire()).await.unwrap();
        assert!(waiting.elapsed() >= 300 * MS || !guard.is_held(), "{:?}", waiting.elapsed());
        assert_eq!(guard.state(), HoldState::Lost(Loss::Expired));
        is_confirmed(&reading).await;
        assert_eq!(inside(&client).await, ["read", "read"]);
        assert!(guard.release().await.unwrap_err().is_lost());
        is_confirmed(&reader).await;
        assert!(write(&other).try_acquire().await.unwrap_err().is_busy());
        drop((reader, reading));
        store.assert_clean(&[&client, &other]).await;
    }
}

on_quorums! {
    read_enters_a_read_frame_and_write_a_write_frame,
    reading_siblings_do_not_exclude_each_other,
    a_writer_may_read_and_keeps_others_out,
    a_writer_that_leaves_its_read_behind_lets_readers_in_and_no_writer,
    a_downgrade_has_no_gap_for_a_writer_and_lets_readers_in,
    a_downgrade_keeps_what_was_left_of_a_fixed_lease_and_refuses_what_is_no_write_lock,
    read_nested_in_a_downgraded_lock_waits_for_a_nested_writer,
    reader_that_asks_to_write_is_refused_at_once_as_a_deadlock,
    a_writer_that_reads_may_write_inside_and_a_reader_that_is_left_may_not,
    siblings_in_a_write_frame_exclude_each_other_unless_both_read,
    sets_of_locks_keep_the_same_rules,
    lost_write_frame_gives_no_read_lock,
    a_read_outlives_the_lease_of_the_writer_it_came_in_under,
}
