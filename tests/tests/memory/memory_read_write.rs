//! Leases, renewal, loss and the preference of writers on a read-write lock, by a paused clock.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use dlock::store::Kind;
use dlock::store::{AcquireReply, AcquireRequest, GrantId, Store};
use dlock::stores::memory::MemoryStore;
use dlock::{Error, HoldState, LockClient, LockKind, Loss};
use dlock_tests::{Watched, paused, paused_for};
use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout};

const SEC: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);
const HOUR: Duration = Duration::from_secs(3600);
/// For how long readers stand back for a writer that is not heard of.
const PLACE: Duration = Duration::from_secs(5);

/// A store, a client whose renewals can be stopped, and another one beside it.
async fn setting() -> (MemoryStore, Watched, LockClient, LockClient) {
    let store = MemoryStore::new();
    let watched = Watched::new(store.clone());
    let a = LockClient::builder()
        .store(watched.clone())
        .build()
        .await
        .unwrap();
    let b = LockClient::builder().store(store.clone()).build().await.unwrap();
    (store, watched, a, b)
}

/// A writer asks for "k" as a process does that dies right after that: its place is all that is left of it.
async fn asks_and_dies(store: &MemoryStore) {
    let mut request = AcquireRequest::new(Kind::Write, "k".into(), GrantId::from_parts(7, 2), 30 * SEC);
    request.waiter = Some(GrantId::from_parts(7, 1));
    let reply = Store::acquire(Arc::new(store.clone()), request).await.unwrap();
    assert!(matches!(reply, AcquireReply::Busy(_)), "{reply:?}");
}

#[test]
fn readers_are_held_for_an_hour_each_renewed_at_its_time() {
    paused_for(3 * HOUR, async {
        let (_, watched, a, b) = setting().await;
        let one = a.rw_lock("k").read().lease(6 * SEC).acquire().await.unwrap();
        sleep(HOUR).await;
        let of_one = watched.seen().renewals.swap(0, SeqCst);
        assert!((1798..=1801).contains(&of_one), "{of_one}");
        let other = a.rw_lock("k").read().lease(60 * SEC).acquire().await.unwrap();
        sleep(HOUR).await;
        let of_both = watched.seen().renewals.load(SeqCst);
        // A reader is heard of every 10 s at the least: Redisson's renewals cut what all readers have.
        assert!((1798 + 358..=1801 + 361).contains(&of_both), "{of_both}");
        assert_eq!((one.state(), other.state()), (HoldState::Held, HoldState::Held));
        assert!(b.rw_lock("k").write().try_acquire().await.unwrap_err().is_busy());
        drop(one);
        sleep(600 * SEC).await;
        assert!(other.is_held());
        let writer = tokio::spawn(b.rw_lock("k").write().acquire());
        sleep(SEC).await;
        other.release().await.unwrap();
        let released = Instant::now();
        drop(writer.await.unwrap().unwrap());
        assert!(released.elapsed() <= MS);
    });
}

#[test]
fn fixed_lease_of_a_reader_ends_by_itself_and_others_stay() {
    paused(async {
        let (store, _, a, b) = setting().await;
        let begun = Instant::now();
        let fixed = a
            .rw_lock("k")
            .read()
            .fixed_lease(10 * SEC)
            .acquire()
            .await
            .unwrap();
        let longer = b
            .rw_lock("k")
            .read()
            .fixed_lease(20 * SEC)
            .acquire()
            .await
            .unwrap();
        let writer = tokio::spawn(b.rw_lock("k").write().acquire());
        assert_eq!(fixed.lost().await, Loss::Expired);
        let at = begun.elapsed();
        assert!(at >= 9 * SEC && at <= 10 * SEC, "{at:?}");
        assert!(longer.is_held() && !writer.is_finished());
        let writer = writer.await.unwrap().unwrap();
        let at = begun.elapsed();
        assert!(at >= 20 * SEC && at <= 20 * SEC + 10 * MS, "{at:?}");
        assert_eq!(longer.state(), HoldState::Lost(Loss::Expired));
        assert!(matches!(fixed.release().await, Err(Error::Lost { .. })));
        assert!(writer.is_held(), "a release that came late touched it");
        drop((writer, longer));
        sleep(MS).await;
        assert!(store.is_empty());
    });
}

#[test]
fn readers_and_writers_are_lost_before_the_store_admits_the_other_side() {
    paused(async {
        for (holds, asks) in [
            (LockKind::Read, LockKind::Write),
            (LockKind::Write, LockKind::Read),
            (LockKind::Write, LockKind::Write),
        ] {
            for lease in [100 * MS, SEC, 30 * SEC, 600 * SEC] {
                let (_, watched, a, b) = setting().await;
                let guard = a.lock("k").kind(holds).lease(lease).acquire().await.unwrap();
                let taken = Instant::now();
                watched.seen().hang_renewals.store(true, SeqCst);
                let told = async {
                    guard.lost().await;
                    Instant::now()
                };
                let passed = async {
                    let next = b.lock("k").kind(asks).acquire().await.unwrap();
                    assert!(matches!(guard.state(), HoldState::Lost(_)), "{holds} {lease:?}");
                    drop(next);
                    Instant::now()
                };
                let (told, passed) = tokio::join!(told, passed);
                let margin = (lease / 100).max(10 * MS);
                assert!(told < passed, "{holds}, {lease:?}: told {:?} late", told - passed);
                assert!(
                    told >= taken + lease - margin - 2 * MS,
                    "{holds}, {lease:?}: told too early"
                );
                assert!(
                    passed <= taken + lease + 10 * MS,
                    "{holds}, {lease:?}: it passed late"
                );
            }
        }
    });
}

#[test]
fn reader_that_is_cut_off_is_lost_alone() {
    paused(async {
        let (_, watched, a, b) = setting().await;
        let cut_off = a.rw_lock("k").read().acquire().await.unwrap();
        let beside = b.rw_lock("k").read().acquire().await.unwrap();
        watched.seen().hang_renewals.store(true, SeqCst);
        assert_eq!(cut_off.lost().await, Loss::Expired);
        sleep(60 * SEC).await;
        assert_eq!(beside.state(), HoldState::Held);
        assert_eq!(b.holders("k").await.unwrap().len(), 1);
        // Once lost it stays so, and a new one is another.
        watched.seen().hang_renewals.store(false, SeqCst);
        sleep(60 * SEC).await;
        assert_eq!(cut_off.state(), HoldState::Lost(Loss::Expired));
        assert!(a.rw_lock("k").read().try_acquire().await.unwrap().is_held());
    });
}

#[test]
fn a_dead_writer_keeps_readers_out_for_as_long_as_its_place_is_kept() {
    paused(async {
        let (store, _, a, b) = setting().await;
        let inside = a.rw_lock("k").read().acquire().await.unwrap();
        asks_and_dies(&store).await;
        let died = Instant::now();
        let busy = b.rw_lock("k").read().try_acquire().await.unwrap_err();
        assert!(busy.is_busy());
        let reader = b.rw_lock("k").read().acquire().await.unwrap();
        assert!(
            died.elapsed() >= PLACE && died.elapsed() <= PLACE + 10 * MS,
            "{:?}",
            died.elapsed()
        );
        drop((inside, reader));
        sleep(MS).await;
        // Also where the lock is free, and then it is told for how long.
        let inside = a.rw_lock("k").read().acquire().await.unwrap();
        asks_and_dies(&store).await;
        let died = Instant::now();
        inside.release().await.unwrap();
        sleep(SEC).await;
        let Error::NotAcquired { remaining, .. } = b.rw_lock("k").read().try_acquire().await.unwrap_err()
        else {
            panic!("readers stand back")
        };
        assert_eq!(remaining, Some(PLACE - SEC));
        // A writer has no one to stand back for.
        drop(b.rw_lock("k").write().try_acquire().await.unwrap());
        drop(b.rw_lock("k").read().acquire().await.unwrap());
        assert!(
            died.elapsed() >= PLACE && died.elapsed() <= PLACE + 10 * MS,
            "{:?}",
            died.elapsed()
        );
    });
}

#[test]
fn the_places_of_dead_writers_leave_nothing_behind() {
    paused(async {
        let (store, _, a, b) = setting().await;
        let inside = a.rw_lock("k").read().acquire().await.unwrap();
        asks_and_dies(&store).await;
        inside.release().await.unwrap();
        assert_eq!(store.queued(), 1);
        sleep(PLACE).await;
        // Of an unused key, when a client waits for another one.
        let held = a.rw_lock("j").read().acquire().await.unwrap();
        let writer = tokio::spawn(b.rw_lock("j").prefer_writers().write().acquire());
        sleep(MS).await;
        assert_eq!(store.queued(), 1);
        held.release().await.unwrap();
        drop(writer.await.unwrap().unwrap());
        assert_eq!(store.queued(), 0);
    });
}

#[test]
fn a_writer_that_gives_up_is_told_of_once_and_only_where_no_other_waits() {
    paused(async {
        let (store, _, a, b) = setting().await;
        let inside = a.rw_lock("k").read().acquire().await.unwrap();
        let waits = || tokio::spawn(a.rw_lock("k").prefer_writers().write().acquire());
        let mut notifications = Store::watch(
            Arc::new(store.clone()),
            Kind::Read,
            &"k".into(),
            GrantId::from_parts(7, 7),
        );
        for dies in [false, true] {
            let writer = waits();
            sleep(MS).await;
            if dies {
                asks_and_dies(&store).await;
            }
            let reader = tokio::spawn(b.rw_lock("k").read().acquire());
            sleep(SEC).await;
            // What there was before.
            let _ = timeout(MS, notifications.changed()).await;
            writer.abort();
            let gone = Instant::now();
            drop(reader.await.unwrap().unwrap());
            let waited = gone.elapsed();
            let told = timeout(MS, notifications.changed()).await.is_ok();
            match dies {
                false => assert!(waited <= MS && told, "{waited:?}"),
                true => assert!(waited > PLACE - 2 * SEC && waited < PLACE, "{waited:?}"),
            }
            sleep(MS).await;
            assert!(
                timeout(SEC, notifications.changed()).await.is_err(),
                "it was told twice"
            );
        }
        drop(inside);
    });
}

#[test]
fn a_writer_that_waits_for_an_hour_keeps_readers_out_and_asks_every_two_seconds() {
    paused(async {
        let (_, watched, a, b) = setting().await;
        let inside = b.rw_lock("k").read().acquire().await.unwrap();
        let writer = tokio::spawn(a.rw_lock("k").prefer_writers().write().acquire());
        let reader = tokio::spawn(b.rw_lock("k").read().acquire());
        sleep(MS).await;
        for _ in 0..3600 {
            sleep(SEC).await;
            assert!(b.rw_lock("k").read().try_acquire().await.unwrap_err().is_busy());
        }
        let asked = watched.seen().acquires.load(SeqCst);
        assert!((1795..=1810).contains(&asked), "{asked}");
        assert!(!writer.is_finished() && !reader.is_finished());
        inside.release().await.unwrap();
        let released = Instant::now();
        let writer = writer.await.unwrap().unwrap();
        assert!(released.elapsed() <= MS, "{:?}", released.elapsed());
        sleep(600 * SEC).await;
        assert!(writer.is_held() && !reader.is_finished());
        writer.release().await.unwrap();
        drop(reader.await.unwrap().unwrap());
        assert!(b.rw_lock("k").read().try_acquire().await.is_ok());
    });
}

#[test]
fn each_of_several_writers_of_a_process_waits_for_those_readers_at_most_who_came_before_its_turn() {
    paused(async {
        let (_, _, a, b) = setting().await;
        let inside = b.rw_lock("k").read().acquire().await.unwrap();
        let lock = a.rw_lock("k").prefer_writers().write().local_handoffs(0);
        let writers: Vec<_> = (0..3).map(|_| tokio::spawn(lock.acquire())).collect();
        sleep(MS).await;
        let readers: Vec<_> = (0..3)
            .map(|_| tokio::spawn(b.rw_lock("k").read().acquire()))
            .collect();
        sleep(MS).await;
        inside.release().await.unwrap();
        let mut writers = writers.into_iter();
        let first = writers.next().unwrap().await.unwrap().unwrap();
        sleep(SEC).await;
        assert!(readers.iter().all(|reader| !reader.is_finished()));
        first.release().await.unwrap();
        let released = Instant::now();
        // The order is open, and every client is served.
        let done = readers.into_iter().chain(writers).map(async |task| {
            let guard = task.await.unwrap().unwrap();
            sleep(10 * MS).await;
            guard.release().await.unwrap();
        });
        join_all(done).await;
        assert!(released.elapsed() < SEC, "{:?}", released.elapsed());
    });
}

#[test]
fn a_second_read_outside_the_frame_of_the_first_waits_for_the_writer_until_its_wait_is_over() {
    paused(async {
        let (_, _, a, b) = setting().await;
        let first = b.rw_lock("k").read().acquire().await.unwrap();
        let writer = tokio::spawn(a.rw_lock("k").prefer_writers().write().acquire());
        sleep(MS).await;
        let second = b.rw_lock("k").read().wait(60 * SEC).acquire().await.unwrap_err();
        assert!(second.is_busy(), "{second}");
        let nested = first.scope(b.rw_lock("k").read().acquire()).await.unwrap();
        drop((first, nested));
        drop(writer.await.unwrap().unwrap());
    });
}
