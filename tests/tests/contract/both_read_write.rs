//! What a read-write lock does, on memory and on a server: many readers or one writer, each with its own lease.

use std::time::{Duration, Instant};

use dlock::store::Kind;
use dlock::{Error, HoldState, Lock, LockClient, LockKind, Loss};
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
    async fn readers_share_and_a_writer_is_alone(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let readers = [
            read(&a).try_acquire().await.unwrap(),
            read(&a).try_acquire().await.unwrap(),
            read(&b).try_acquire().await.unwrap(),
        ];
        assert_eq!(inside(&a).await, ["read", "read", "read"]);
        for client in [&a, &b] {
            assert!(write(client).try_acquire().await.unwrap_err().is_busy());
        }
        for guard in readers {
            assert!(write(&b).try_acquire().await.unwrap_err().is_busy());
            guard.release().await.unwrap();
        }
        let writer = write(&b).try_acquire().await.unwrap();
        assert_eq!(inside(&a).await, ["write"]);
        for client in [&a, &b] {
            assert!(read(client).try_acquire().await.unwrap_err().is_busy());
            assert!(write(client).try_acquire().await.unwrap_err().is_busy());
        }
        writer.release().await.unwrap();
        assert_eq!(inside(&a).await, Vec::<String>::new());
        store.assert_clean(&[&a, &b]).await;
    }

    async fn who_is_refused_learns_what_is_left_of_the_longest_lease(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let left = async |lock: Lock| {
            let Err(Error::NotAcquired { remaining, .. }) = lock.try_acquire().await else {
                panic!("the lock is held")
            };
            remaining.unwrap()
        };
        let short = read(&a).fixed_lease(60 * SECOND).acquire().await.unwrap();
        let long = read(&b).fixed_lease(600 * SECOND).acquire().await.unwrap();
        let third = read(&b).fixed_lease(120 * SECOND).acquire().await.unwrap();
        let seen = left(write(&a)).await;
        assert!(seen > 600 * SECOND - SLACK && seen <= 600 * SECOND, "{seen:?}");
        // The longest has gone: the others' leases are what counts.
        long.release().await.unwrap();
        let seen = left(write(&a)).await;
        assert!(seen > 120 * SECOND - SLACK && seen <= 120 * SECOND, "{seen:?}");
        third.release().await.unwrap();
        let seen = left(write(&a)).await;
        assert!(seen > 60 * SECOND - SLACK && seen <= 60 * SECOND, "{seen:?}");
        short.release().await.unwrap();
        let writer = write(&a).fixed_lease(60 * SECOND).acquire().await.unwrap();
        let seen = left(read(&b)).await;
        assert!(seen > 60 * SECOND - SLACK && seen <= 60 * SECOND, "{seen:?}");
        writer.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

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

    async fn dropped_lock_is_free_on_the_next_line(store: &Store) {
        let client = store.client().await;
        for _ in 0..50 {
            drop((read(&client).try_acquire().await.unwrap(), read(&client).try_acquire().await.unwrap()));
            drop(write(&client).try_acquire().await.unwrap());
        }
        store.assert_clean(&[&client]).await;
    }

    async fn each_reader_has_a_lease_of_its_own(store: &Store) {
        in_rounds("the long one is held when the short one ends", async || {
            let (a, b) = (store.client().await, store.client().await);
            let short = read(&a).fixed_lease(300 * MS).acquire().await.unwrap();
            let long = read(&b).fixed_lease(900 * MS).acquire().await.unwrap();
            let started = Instant::now();
            assert!(write(&b).try_acquire().await.unwrap_err().is_busy());
            assert_eq!(short.lost().await, Loss::Expired);
            // The store forgets it a little later than its holder.
            tokio::time::sleep(100 * MS).await;
            let seen = (long.is_held(), inside(&a).await);
            let writer = write(&a).wait(PATIENCE).acquire().await.unwrap();
            // Not before both are over, and the holders know.
            assert!(started.elapsed() >= 880 * MS, "{:?}", started.elapsed());
            assert_eq!(long.state(), HoldState::Lost(Loss::Expired));
            assert!(matches!(long.release().await, Err(Error::Lost { loss: Loss::Expired, .. })));
            drop(short);
            is_confirmed(&writer).await;
            writer.release().await.unwrap();
            store.assert_clean(&[&a, &b]).await;
            match seen {
                (true, kinds) if kinds == ["read"] => Ok(()),
                other => Err(other),
            }
        })
        .await;
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

    async fn min_hold_keeps_others_out_on_either_side(store: &Store) {
        in_rounds("it is asked for before the minimum is over", async || {
            let (a, b) = (store.client().await, store.client().await);
            for (held, wanted) in [(read(&a), write(&b)), (write(&a), read(&b))] {
                let started = Instant::now();
                held.min_hold(400 * MS).acquire().await.unwrap().release().await.unwrap();
                assert_eq!(a.held(), 0);
                let holders = a.holders("k").await.unwrap();
                let asked = wanted.try_acquire().await;
                let at = started.elapsed();
                match asked {
                    Err(error) => assert!(error.is_busy(), "{error}"),
                    Ok(_) if at >= 399 * MS => return Err(at),
                    Ok(_) => panic!("it was free after {at:?}"),
                }
                assert!(holders.len() == 1 && holders[0].holds == 0, "{holders:?}");
                wanted.wait(PATIENCE).acquire().await.unwrap().release().await.unwrap();
                assert!(started.elapsed() >= 399 * MS && started.elapsed() < SLACK, "{:?}", started.elapsed());
            }
            store.assert_clean(&[&a, &b]).await;
            Ok(())
        })
        .await;
    }

    async fn max_hold_ends_a_stuck_reader(store: &Store) {
        in_rounds("it is renewed until then", async || {
            let (a, b) = (store.client().await, store.client().await);
            let stuck = read(&a).lease(600 * MS).max_hold(1000 * MS).acquire().await.unwrap();
            let started = Instant::now();
            let writer = write(&b).wait(PATIENCE).acquire().await.unwrap();
            let (state, waited) = (stuck.state(), started.elapsed());
            drop((writer, stuck));
            store.assert_clean(&[&a, &b]).await;
            assert!(waited < SLACK && matches!(state, HoldState::Lost(_)), "{state:?}");
            if state == HoldState::Lost(Loss::MaxHold) { Ok(()) } else { Err(state) }
        })
        .await;
    }

    async fn a_forced_release_ends_all_holders_and_wakes_everybody(store: &Store) {
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

    async fn another_kind_of_lock_by_the_same_name_is_a_clear_error(store: &Store) {
        let client = store.client().await;
        let plain = client.lock("k").acquire().await.unwrap();
        for lock in [read(&client), write(&client)] {
            for error in [lock.try_acquire().await.unwrap_err(), lock.acquire().await.unwrap_err()] {
                assert!(matches!(&error, Error::KeyTaken { found, .. } if found == "a plain lock"), "{error}");
            }
        }
        is_confirmed(&plain).await;
        plain.release().await.unwrap();
        for lock in [read(&client), write(&client)] {
            let guard = lock.acquire().await.unwrap();
            for error in [
                client.lock("k").try_acquire().await.unwrap_err(),
                client.lock("k").acquire().await.unwrap_err(),
            ] {
                assert!(matches!(&error, Error::KeyTaken { found, .. } if found == "a read-write lock"), "{error}");
            }
            is_confirmed(&guard).await;
            guard.release().await.unwrap();
        }
        store.assert_clean(&[&client]).await;
    }

    async fn people_can_look_at_all_who_are_inside(store: &Store) {
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
    readers_share_and_a_writer_is_alone,
    who_is_refused_learns_what_is_left_of_the_longest_lease,
    the_last_reader_wakes_a_writer_and_a_writer_wakes_all_readers,
    dropped_lock_is_free_on_the_next_line,
    each_reader_has_a_lease_of_its_own,
    each_reader_is_renewed_for_itself,
    min_hold_keeps_others_out_on_either_side,
    max_hold_ends_a_stuck_reader,
    a_forced_release_ends_all_holders_and_wakes_everybody,
    another_kind_of_lock_by_the_same_name_is_a_clear_error,
    people_can_look_at_all_who_are_inside,
}
