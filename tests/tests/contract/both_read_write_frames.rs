//! Read-write locks and frames, on memory and on a server: nested calls enter, a writer may read and stay a reader,
//! and a reader that asks to write is told at once that it would wait for itself.

use std::time::{Duration, Instant};

use dlock::{Error, HoldState, Lock, LockClient, Loss, scope};
use dlock_tests::faults::{PATIENCE, SLACK, SOON, in_rounds, is_confirmed, within};
use dlock_tests::{on_every_store, on_quorums, settle};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn read(client: &LockClient) -> Lock {
    client.rw_lock("k").read()
}

fn write(client: &LockClient) -> Lock {
    client.rw_lock("k").write()
}

/// A client whose locks end soon when they are not renewed.
async fn short(store: &dlock_tests::Store) -> LockClient {
    store.client_with(|builder| builder.lease(900 * MS)).await
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

on_every_store! {
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

    async fn a_writer_that_reads_is_renewed_for_both_and_the_read_for_itself_after_it(store: &Store) {
        in_rounds("both are renewed in time", async || {
            let (a, b) = (short(store).await, short(store).await);
            let writer = write(&a).acquire().await.unwrap();
            let reader = writer.scope(read(&a).acquire()).await.unwrap();
            tokio::time::sleep(1200 * MS).await;
            let both = writer.is_held() && reader.is_held();
            assert!(!both || read(&b).try_acquire().await.is_err_and(|error| error.is_busy()));
            drop(writer);
            tokio::time::sleep(1200 * MS).await;
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
}

on_quorums! {
    a_writer_may_read_and_keeps_others_out,
    a_downgrade_has_no_gap_for_a_writer_and_lets_readers_in,
    a_downgrade_keeps_what_was_left_of_a_fixed_lease_and_refuses_what_is_no_write_lock,
    read_nested_in_a_downgraded_lock_waits_for_a_nested_writer,
    reader_that_asks_to_write_is_refused_at_once_as_a_deadlock,
    a_read_outlives_the_lease_of_the_writer_it_came_in_under,
}
