//! What a read-write lock does, on memory and on a server: many readers or one writer, each with its own lease.

use std::time::Duration;

use dlock::store::Kind;
use dlock::{Error, HoldState, Lock, LockClient, LockKind, Loss};
use dlock_tests::faults::{SLACK, SOON, in_rounds, is_confirmed, within};
use dlock_tests::{on_every_store, on_quorums, settle};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn read(client: &LockClient) -> Lock {
    client.rw_lock("k").read()
}

fn write(client: &LockClient) -> Lock {
    client.rw_lock("k").write()
}

/// Leases so long that only a notification wakes a waiter in time.
async fn long(store: &dlock_tests::Store) -> LockClient {
    store.client_with(|builder| builder.lease(90 * SECOND)).await
}

/// The kinds of the holders of "k", sorted.
async fn inside(client: &LockClient) -> Vec<String> {
    let holders = client.holders("k").await.unwrap();
    let mut kinds: Vec<_> = holders.iter().map(|holder| holder.kind.to_string()).collect();
    kinds.sort();
    kinds
}

on_every_store! {
    async fn the_last_reader_wakes_a_writer_and_a_writer_wakes_all_readers(store: &Store) {
        let (a, b) = (long(store).await, long(store).await);
        for _ in 0..3 {
            let readers = [read(&a).acquire().await.unwrap(), read(&b).acquire().await.unwrap()];
            let writer = tokio::spawn(write(&b).acquire());
            settle().await;
            for guard in readers {
                assert!(!writer.is_finished());
                guard.release().await.unwrap();
            }
            let writer = within(SOON, "the writer's wake-up", writer).await.unwrap().unwrap();
            let readers: Vec<_> = (0..8)
                .map(|i| tokio::spawn(read(if i % 2 == 0 { &a } else { &b }).acquire()))
                .collect();
            settle().await;
            assert!(readers.iter().all(|reader| !reader.is_finished()));
            writer.release().await.unwrap();
            let mut guards = Vec::new();
            for reader in readers {
                guards.push(within(SOON, "a reader's wake-up", reader).await.unwrap().unwrap());
            }
            // All at once, and none waited for another.
            assert_eq!(inside(&a).await.len(), 8);
            drop(guards);
        }
        store.assert_clean(&[&a, &b]).await;
    }

    async fn each_reader_is_renewed_for_itself(store: &Store) {
        in_rounds("both are renewed in time", async || {
            let (a, b) = (store.client().await, store.client().await);
            let readers = [
                read(&a).lease(600 * MS).acquire().await.unwrap(),
                read(&b).lease(900 * MS).acquire().await.unwrap(),
            ];
            let waiter = tokio::spawn(write(&b).acquire());
            tokio::time::sleep(2 * SECOND).await;
            let states = [readers[0].state(), readers[1].state()];
            let waited = !waiter.is_finished();
            drop(readers);
            let writer = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
            writer.release().await.unwrap();
            store.assert_clean(&[&a, &b]).await;
            if waited && states == [HoldState::Held; 2] { Ok(()) } else { Err(states) }
        })
        .await;
    }

    async fn forced_release_ends_all_holders_and_wakes_all_waiters(store: &Store) {
        let (a, b) = (long(store).await, long(store).await);
        let readers = [read(&a).acquire().await.unwrap(), read(&b).acquire().await.unwrap()];
        let writer = tokio::spawn(write(&b).acquire());
        settle().await;
        assert!(a.force_release("k").await.unwrap());
        let writer = within(SOON, "the writer's wake-up", writer).await.unwrap().unwrap();
        for guard in readers {
            let told = guard.ensure(90 * SECOND).await;
            assert!(matches!(told, Err(Error::Lost { loss: Loss::Gone, .. })), "{told:?}");
            assert!(guard.release().await.unwrap_err().is_lost());
        }
        is_confirmed(&writer).await;
        let readers = [tokio::spawn(read(&a).acquire()), tokio::spawn(read(&a).acquire())];
        settle().await;
        assert!(b.force_release("k").await.unwrap());
        for reader in readers {
            let guard = within(SOON, "a reader's wake-up", reader).await.unwrap().unwrap();
            is_confirmed(&guard).await;
            guard.release().await.unwrap();
        }
        assert!(writer.release().await.unwrap_err().is_lost());
        assert!(!b.force_release("k").await.unwrap());
        store.assert_clean(&[&a, &b]).await;
    }

    async fn all_holders_can_be_inspected(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let readers = [
            a.lock("shop:1").kind(LockKind::Read).acquire().await.unwrap(),
            b.lock("shop:1").kind(LockKind::Read).fixed_lease(600 * SECOND).acquire().await.unwrap(),
        ];
        let writer = a.lock("shop:2").kind(LockKind::Write).acquire().await.unwrap();
        let holders = a.holders("shop:1").await.unwrap();
        assert_eq!(holders.len(), 2);
        assert!(holders.iter().all(|holder| holder.kind == LockKind::Read && holder.holds == 1), "{holders:?}");
        let mut left: Vec<_> = holders.iter().map(|holder| holder.remaining.unwrap()).collect();
        left.sort();
        assert!(left[0] <= 30 * SECOND && left[1] > 600 * SECOND - SLACK, "{left:?}");
        assert_ne!(holders[0].id, holders[1].id);
        let listed = a.list("shop:").await.unwrap();
        let listed: Vec<_> = listed.iter().map(|(key, holder)| (key.as_str(), holder.kind)).collect();
        assert_eq!(listed, [("shop:1", Kind::Read), ("shop:1", Kind::Read), ("shop:2", Kind::Write)]);
        drop((readers, writer));
        store.assert_clean(&[&a, &b]).await;
    }
}

on_quorums! {
    the_last_reader_wakes_a_writer_and_a_writer_wakes_all_readers,
    each_reader_is_renewed_for_itself,
    forced_release_ends_all_holders_and_wakes_all_waiters,
    all_holders_can_be_inspected,
}
