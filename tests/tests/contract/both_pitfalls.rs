//! What breaks in other libraries, on every store: bodies that run without their lock, owners that are threads, tokens
//! and names that leave something behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dlock::{LockClient, LockKind};
use dlock_tests::faults::{SOON, is_confirmed, within};
use dlock_tests::{on_every_store, settle};
use futures_util::future::join_all;

const MS: Duration = Duration::from_millis(1);
const ALL: [LockKind; 5] = [
    LockKind::Mutex,
    LockKind::Fair,
    LockKind::Fenced,
    LockKind::Read,
    LockKind::Write,
];

/// Everything that others know as the name, so that nobody gets anything by it.
async fn others_have_all(other: &LockClient) -> Vec<dlock::LockGuard> {
    let mut held = Vec::new();
    for kind in ALL {
        let kind_of_theirs = if kind == LockKind::Read {
            LockKind::Write
        } else {
            kind
        };
        let lock = other.lock(format!("the-{kind}")).kind(kind_of_theirs);
        held.push(lock.acquire().await.unwrap());
    }
    held
}

on_every_store! {
    async fn work_never_runs_without_its_lock(store: &Store) {
        let (client, other) = (store.client().await, store.client().await);
        let held = others_have_all(&other).await;
        let permit = other.semaphore("permits").permits(1).acquire().await.unwrap();
        let ran = AtomicUsize::new(0);
        let work = async || {
            ran.fetch_add(1, Ordering::SeqCst);
        };
        for kind in ALL {
            let lock = client.lock(format!("the-{kind}")).kind(kind).wait(200 * MS);
            assert!(lock.run(|_| work()).await.unwrap_err().is_busy(), "{kind}");
        }
        let set = client.multi(["free", "the-lock"]).wait(200 * MS);
        assert!(set.run(|_| work()).await.unwrap_err().is_busy());
        let semaphore = client.semaphore("permits").wait(200 * MS);
        assert!(semaphore.run(|_| work()).await.unwrap_err().is_busy());
        client.shutdown(Duration::ZERO).await;
        assert!(client.lock("free").run(|_| work()).await.is_err());
        assert_eq!(ran.load(Ordering::SeqCst), 0);
        // And everybody else still has what he had.
        for guard in held {
            is_confirmed(&guard).await;
            guard.release().await.unwrap();
        }
        permit.release().await.unwrap();
        assert!(other.semaphore("permits").delete().await.unwrap());
        store.assert_clean(&[&other]).await;
    }

    async fn a_hold_moves_between_tasks_and_threads_and_stays_one(store: &Store) {
        let (client, other) = (store.client().await, store.client().await);
        for kind in ALL {
            let name = format!("the-{kind}");
            let against = if kind == LockKind::Read { LockKind::Write } else { kind };
            let lock = client.lock(&*name).kind(kind);
            let taken = std::thread::scope(|scope| {
                let runtime = tokio::runtime::Handle::current();
                let take = scope.spawn(move || runtime.block_on(lock.acquire()));
                tokio::task::block_in_place(|| take.join().unwrap().unwrap())
            });
            // A task that has it re-enters on whatever thread it goes on, and no other task does.
            let lock = client.lock(&*name).kind(kind);
            let guard = tokio::spawn(async move {
                let inner = taken.scope(async {
                    for _ in 0..5 {
                        tokio::task::yield_now().await;
                    }
                    lock.try_acquire().await.unwrap()
                });
                let inner = inner.await;
                assert_eq!(inner.fencing_token(), taken.fencing_token());
                inner.release().await.unwrap();
                taken
            })
            .await
            .unwrap();
            for stranger in [&client, &other] {
                let asking = stranger.lock(&*name).kind(against).try_acquire();
                assert!(asking.await.unwrap_err().is_busy(), "{kind}");
            }
            let released = std::thread::spawn(move || drop(guard));
            tokio::task::block_in_place(|| released.join().unwrap());
            client.lock(&*name).kind(against).try_acquire().await.unwrap().release().await.unwrap();
        }
        store.assert_clean(&[&client, &other]).await;
    }

    async fn tokens_grow_and_leave_nothing_behind_however_many_names_there_are(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let names: Vec<_> = (0..60).map(|i| format!("order:{i}")).collect();
        let mut last = vec![0; names.len()];
        for round in 0..3 {
            let client = if round % 2 == 0 { &a } else { &b };
            let guards = join_all(names.iter().map(|name| client.lock(&**name).acquire())).await;
            for (guard, last) in guards.into_iter().zip(&mut last) {
                let guard = guard.unwrap();
                assert!(guard.fencing_token() > *last);
                *last = guard.fencing_token();
                guard.release().await.unwrap();
            }
        }
        store.assert_clean(&[&a, &b]).await;
    }

    async fn the_token_of_a_fenced_lock_outlives_a_set_with_a_lease(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let mut last = a.fenced_lock("x").acquire().await.unwrap().fencing_token();
        for _ in 0..2 {
            let set = a.multi(["x", "y"]).kind(LockKind::Fenced).fixed_lease(150 * MS).wait(SOON).acquire().await.unwrap();
            assert!(set.fencing_token_of("x").unwrap() > last);
            last = set.fencing_token_of("x").unwrap();
            // It ends by itself, and the counter does not end with it.
            let next = within(SOON, "the end of the lease", b.fenced_lock("x").acquire()).await.unwrap();
            assert!(next.fencing_token() > last, "{} after {last}", next.fencing_token());
            last = next.fencing_token();
            assert!(set.release().await.unwrap_err().is_lost());
            next.release().await.unwrap();
        }
        store.assert_clean(&[&a, &b]).await;
    }

    async fn who_downgrades_wakes_every_reader_that_waits(store: &Store) {
        let long = async || store.client_with(|builder| builder.lease(Duration::from_secs(90))).await;
        let (a, b) = (long().await, long().await);
        let writer = a.rw_lock("k").write().acquire().await.unwrap();
        let inside = Arc::new(AtomicUsize::new(0));
        let readers: Vec<_> = (0..6)
            .map(|i| {
                let (lock, inside) = (if i % 2 == 0 { &a } else { &b }.rw_lock("k").read(), inside.clone());
                tokio::spawn(async move {
                    let guard = lock.acquire().await.unwrap();
                    inside.fetch_add(1, Ordering::SeqCst);
                    guard
                })
            })
            .collect();
        settle().await;
        assert_eq!(inside.load(Ordering::SeqCst), 0);
        let reading = writer.downgrade().await.unwrap();
        let readers = within(SOON, "the wake-ups", join_all(readers)).await;
        assert_eq!(a.holders("k").await.unwrap().len(), 7);
        drop((readers, reading));
        store.assert_clean(&[&a, &b]).await;
    }
}
