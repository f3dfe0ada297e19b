//! Leases, renewal, loss and the preference of writers on a read-write lock, by a paused clock.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use dlock::store::Kind;
use dlock::store::{AcquireReply, AcquireRequest, GrantId, Store};
use dlock::stores::memory::MemoryStore;
use dlock::{Error, HoldState, LockClient, LockKind, LockOptions, Loss};
use dlock_tests::{Watched, paused, watched};
use tokio::time::{Instant, sleep};

const SEC: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);
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
fn dead_writer_keeps_readers_out_as_long_as_its_position_is_kept() {
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

#[test]
fn options_of_both_sides_are_set_once_and_checked_for_both() {
    paused(async {
        let client = LockClient::memory();
        let prices = client.rw_lock("k").wait(SEC).note("prices").fixed_lease(20 * SEC);
        prices.check().unwrap();
        let reading = prices.read().acquire().await.unwrap();
        assert!(!reading.is_renewed());
        assert_eq!(client.active().holds[0].note.as_deref(), Some("prices"));
        let begun = Instant::now();
        assert!(prices.write().acquire().await.unwrap_err().is_busy());
        assert_eq!(begun.elapsed(), SEC);
        reading.release().await.unwrap();

        let replaced = prices.options(LockOptions::new().max_hold(5 * SEC));
        let writing = replaced.write().acquire().await.unwrap();
        assert!(writing.is_renewed());
        writing.lost().await;
        assert_eq!(begun.elapsed().as_secs(), 5);
        for wrong in [
            client.rw_lock("k").wait(Duration::ZERO),
            client.rw_lock("").prefer_writers(),
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
    });
}

/// What one reader was granted goes for those that came before it, once: refused, they wait like others.
#[tokio::test(start_paused = true)]
async fn readers_that_a_writer_was_faster_than_wait_for_it_and_ask_nobody_meanwhile() {
    let ((watched, client), lock) = (watched().await, "k");
    let writing = client.rw_lock(lock).write().acquire().await.unwrap();
    // The first reader goes on as a writer, before the others are polled.
    let (read, write) = (client.rw_lock(lock).read(), client.rw_lock(lock).write());
    let faster = tokio::spawn(async move {
        drop(read.acquire().await.unwrap());
        let writing = write.try_acquire().await.expect("nobody reads yet");
        sleep(SEC).await;
        writing.release().await.unwrap();
    });
    tokio::task::yield_now().await;
    let others: Vec<_> = (0..4)
        .map(|_| tokio::spawn(client.rw_lock(lock).read().acquire()))
        .collect();
    sleep(MS).await;
    let asked = Instant::now();
    writing.release().await.unwrap();
    for reader in others {
        reader.await.unwrap().unwrap().release().await.unwrap();
    }
    faster.await.unwrap();
    assert!(asked.elapsed() >= SEC, "{:?}", asked.elapsed());
    let requests = watched.seen().acquires.load(SeqCst);
    assert!(requests < 20, "{requests} requests");
}

/// Another client has the write lock, of which its holder does not learn: the store does not answer.
#[tokio::test(start_paused = true)]
async fn read_inside_of_a_write_lock_that_is_gone_waits_no_longer_than_it_may() {
    let (_, watched, a, b) = setting().await;
    let write = a.rw_lock("k").write().acquire().await.unwrap();
    assert!(b.force_release("k").await.unwrap());
    let _other = b.rw_lock("k").write().acquire().await.unwrap();
    watched.seen().hang_renewals.store(true, SeqCst);
    let begun = Instant::now();
    let read = a.rw_lock("k").read().wait(SEC).acquire();
    let error = write.scope(read).await.unwrap_err();
    assert!(error.is_busy(), "{error}");
    assert_eq!(begun.elapsed(), SEC);

    let read = write.scope(a.rw_lock("k").read().acquire());
    let (read, _) = tokio::join!(read, a.shutdown(SEC));
    read.unwrap_err();
    assert!(begun.elapsed() < 5 * SEC, "{:?}", begun.elapsed());
}
