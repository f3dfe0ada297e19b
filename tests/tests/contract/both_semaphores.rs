//! What semaphores do, on memory and on a server: permits with an owner, and those without, seen through the public
//! API.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use dlock::store::{GrantId, Kind};
use dlock::{Error, LockClient, Permit, Semaphore};
use dlock_tests::faults::{PATIENCE, SOON, within};
use dlock_tests::{Store, eventually, on_every_store, settle};
use futures_util::FutureExt;
use futures_util::future::join_all;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// Counts permits that are out at the same time.
#[derive(Default, Clone)]
struct Room(Arc<(AtomicUsize, AtomicUsize)>);

impl Room {
    async fn visit(&self, permits: usize) {
        let inside = self.0.0.fetch_add(permits, Ordering::SeqCst) + permits;
        self.0.1.fetch_max(inside, Ordering::SeqCst);
        tokio::time::sleep(3 * MS).await;
        self.0.0.fetch_sub(permits, Ordering::SeqCst);
    }

    fn most(&self) -> usize {
        self.0.1.load(Ordering::SeqCst)
    }
}

/// Waits until there are so many permits in all, and so many of them free.
async fn has(semaphore: &Semaphore, total: i64, available: i64) {
    eventually("the permits are back", || async {
        let status = semaphore.status().await.unwrap().expect("it was set");
        assert_eq!(status.total, total, "{status:?}");
        assert_eq!(
            status.total,
            status.available + i64::try_from(status.held).unwrap()
        );
        status.available == available
    })
    .await;
}

/// A lease that no test waits out, so that a waiter for one permit that is not told asks after 30 s. (One for several asks
/// every other second, and one for more than there are still more often.)
async fn long(store: &Store) -> LockClient {
    store.client_with(|builder| builder.lease(90 * SECOND)).await
}

async fn forget(store: &Store, semaphore: &Semaphore, clients: &[&LockClient]) {
    assert!(semaphore.delete().await.unwrap());
    assert!(!semaphore.delete().await.unwrap());
    assert_eq!(semaphore.status().await.unwrap(), None);
    store.assert_clean(clients).await;
}

fn is_busy(outcome: &Result<Permit, Error>) -> bool {
    matches!(
        outcome,
        Err(Error::NotAcquired {
            kind: Kind::Permit,
            ..
        })
    )
}

on_every_store! {
    async fn no_more_permits_are_held_than_there_are(store: &Store) {
        let clients = [store.client().await, store.client().await];
        let room = Room::default();
        let tasks = (0..24).map(|i| {
            let semaphore = clients[i % 2].semaphore("k").permits(4).wait(PATIENCE);
            let room = room.clone();
            tokio::spawn(async move {
                let permits = 1 + i % 3;
                let permit = semaphore.acquire_many(permits as u32).await.unwrap();
                assert_eq!((permit.permits() as usize, permit.key().as_str()), (permits, "k"));
                room.visit(permits).await;
                permit.release().await.unwrap();
            })
        });
        for task in join_all(tasks).await {
            task.unwrap();
        }
        assert!((2..=4).contains(&room.most()), "{}", room.most());
        let semaphore = clients[0].semaphore("k");
        has(&semaphore, 4, 4).await;
        forget(store, &semaphore, &[&clients[0], &clients[1]]).await;
    }

    async fn waiter_for_few_is_not_kept_out_by_waiters_for_many(store: &Store) {
        let clients = [store.client().await, store.client().await, store.client().await];
        let semaphore = clients[0].semaphore("k");
        semaphore.set_permits(3).await.unwrap();
        let stop = Arc::new(AtomicUsize::new(0));
        let many: Vec<_> = (0..6)
            .map(|i| {
                let (semaphore, stop) = (clients[i % 2].semaphore("k").wait(PATIENCE), stop.clone());
                tokio::spawn(async move {
                    while stop.load(Ordering::SeqCst) == 0 {
                        let permit = semaphore.acquire_many(3).await.unwrap();
                        tokio::time::sleep(10 * MS).await;
                        permit.release().await.unwrap();
                    }
                })
            })
            .collect();
        settle().await;
        for _ in 0..3 {
            let one = within(SOON, "one", clients[2].semaphore("k").acquire()).await.unwrap();
            one.release().await.unwrap();
        }
        stop.store(1, Ordering::SeqCst);
        for task in many {
            task.await.unwrap();
        }
        has(&semaphore, 3, 3).await;
        forget(store, &semaphore, &[&clients[0], &clients[1], &clients[2]]).await;
    }

    async fn waiter_for_more_permits_than_there_are_blocks_no_waiter(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let semaphore = a.semaphore("k").permits(2);
        let held = semaphore.acquire().await.unwrap();
        let greedy = tokio::spawn(b.semaphore("k").acquire_many(5));
        settle().await;
        let one = within(SOON, "one", semaphore.acquire()).await.unwrap();
        one.release().await.unwrap();
        // Until there are as many.
        assert_eq!(semaphore.add_permits(4).await.unwrap().total, 6);
        let five = within(SOON, "the five", greedy).await.unwrap().unwrap();
        assert!(is_busy(&semaphore.try_acquire().await));
        drop((five, held));
        has(&semaphore, 6, 6).await;
        forget(store, &semaphore, &[&a, &b]).await;
    }

    /// A caller that can have nothing keeps no permit from the others of its process, and is served when it can be.
    async fn in_one_process_waiter_for_more_permits_than_there_are_blocks_no_waiter(store: &Store) {
        let a = store.client().await;
        let semaphore = a.semaphore("k").permits(2);
        let held = semaphore.acquire().await.unwrap();
        let greedy = tokio::spawn(semaphore.acquire_many(5));
        let hopeless = tokio::spawn(semaphore.clone().wait(300 * MS).acquire_many(6));
        settle().await;
        for _ in 0..3 {
            let one = within(SOON, "one", semaphore.acquire()).await.unwrap();
            one.release().await.unwrap();
        }
        // Nor when it has to be waited for.
        let waiter = tokio::spawn(semaphore.acquire_many(2));
        settle().await;
        held.release().await.unwrap();
        let two = within(SOON, "two", waiter).await.unwrap().unwrap();
        assert!(is_busy(&hopeless.await.unwrap()));
        assert!(!greedy.is_finished());
        assert_eq!(semaphore.add_permits(4).await.unwrap().total, 6);
        two.release().await.unwrap();
        let five = within(SOON, "the five", greedy).await.unwrap().unwrap();
        five.release().await.unwrap();
        has(&semaphore, 6, 6).await;
        forget(store, &semaphore, &[&a]).await;
    }

    /// What one acquisition may take is bounded, so that the store does not do one thing for too long: that much is
    /// acquired, renewed and released, and more is refused before anything is sent.
    async fn allowed_number_is_acquired_at_once_and_more_are_refused(store: &Store) {
        let a = store.client().await;
        let semaphore = a.semaphore("k").permits(3000);
        let most = dlock::MAX_AT_ONCE as u32;
        let all = semaphore.acquire_many(most).await.unwrap();
        let Err(Error::InvalidOption { .. }) = all.ensure(Duration::from_secs(365 * 24 * 3600)).await else {
            panic!("the store does not confirm them");
        };
        assert!(all.is_held());
        all.release().await.unwrap();
        for outcome in [semaphore.acquire_many(most + 1).await, semaphore.try_acquire_many(200_000).await] {
            let error = outcome.unwrap_err();
            assert!(matches!(error, Error::InvalidOption { .. }), "{error}");
            assert!(error.to_string().contains("1000") && error.to_string().contains("stand for more"), "{error}");
        }
        forget(store, &semaphore, &[&a]).await;
    }

    async fn permits_are_added_and_taken_away_at_run_time(store: &Store) {
        let (a, b) = (long(store).await, long(store).await);
        let semaphore = a.semaphore("k");
        assert_eq!(semaphore.status().await.unwrap(), None);
        assert_eq!(semaphore.available().await.unwrap(), 0);
        assert!(semaphore.try_set_permits(3).await.unwrap());
        assert!(!semaphore.try_set_permits(5).await.unwrap());
        assert!(!semaphore.set_permits(3).await.unwrap());
        let held = semaphore.acquire_many(3).await.unwrap();

        // A waiter is told when there are more.
        let waiter = tokio::spawn(b.semaphore("k").acquire());
        settle().await;
        let status = semaphore.add_permits(2).await.unwrap();
        assert_eq!((status.total, status.held), (5, 3));
        let one = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
        has(&semaphore, 5, 1).await;

        // Fewer than are held: what comes back fills the gap first.
        assert!(semaphore.set_permits(4).await.unwrap());
        has(&semaphore, 4, 0).await;
        let status = semaphore.remove_permits(1).await.unwrap();
        assert_eq!((status.total, status.available), (3, -1));
        one.release().await.unwrap();
        has(&semaphore, 3, 0).await;
        assert!(is_busy(&semaphore.try_acquire().await));
        assert!(held.is_held());

        let waiter = tokio::spawn(b.semaphore("k").acquire());
        settle().await;
        assert!(semaphore.set_permits(4).await.unwrap());
        drop(within(SOON, "the wake-up", waiter).await.unwrap().unwrap());
        has(&semaphore, 4, 1).await;
        held.release().await.unwrap();
        has(&semaphore, 4, 4).await;

        let waiter = tokio::spawn(b.semaphore("k").acquire_many(5));
        settle().await;
        assert!(semaphore.set_permits(5).await.unwrap());
        drop(within(SOON, "there are as many", waiter).await.unwrap().unwrap());
        has(&semaphore, 5, 5).await;
        forget(store, &semaphore, &[&a, &b]).await;
    }

    /// A waiter for more than there were joins the queue then, before those that come later.
    async fn greater_total_is_told_though_none_of_it_is_available(store: &Store) {
        let a = store.client().await;
        let semaphore = a.semaphore("k").permits(3);
        let held = semaphore.acquire_many(3).await.unwrap();
        assert!(semaphore.set_permits(1).await.unwrap());
        let beside = store.store().await;
        let mut watch = beside.clone().watch(Kind::Permit, &"k".into(), GrantId::from_parts(1, 1));
        within(PATIENCE, "the watch", watch.changed()).await;
        settle().await;
        while watch.changed().now_or_never().is_some() {}
        assert!(semaphore.set_permits(2).await.unwrap());
        within(PATIENCE, "the greater total", watch.changed()).await;
        settle().await;
        while watch.changed().now_or_never().is_some() {}
        assert_eq!(semaphore.add_permits(1).await.unwrap().available, 0);
        within(PATIENCE, "the permit that was added", watch.changed()).await;
        drop((watch, beside));
        held.release().await.unwrap();
        has(&semaphore, 3, 3).await;
        forget(store, &semaphore, &[&a]).await;
    }

    async fn bad_use_of_permits_is_told_and_changes_nothing(store: &Store) {
        let client = store.client().await;
        let semaphore = client.semaphore("k");
        let none = semaphore.remove_permits(1).await;
        assert!(matches!(none, Err(Error::TooFewPermits { total: 0, .. })), "{none:?}");
        assert_eq!(semaphore.status().await.unwrap(), None);
        semaphore.set_permits(4).await.unwrap();
        let held = semaphore.acquire_many(3).await.unwrap();
        let negative = semaphore.remove_permits(5).await;
        assert!(matches!(negative, Err(Error::TooFewPermits { total: 4, .. })), "{negative:?}");
        let most = i32::MAX as u32;
        let invalid = [
            semaphore.try_acquire_many(0).await.map(drop),
            semaphore.acquire_many(most + 1).await.map(drop),
            semaphore.clone().permits(most + 1).try_acquire().await.map(drop),
            semaphore.set_permits(most + 1).await.map(drop),
            semaphore.add_permits(0).await.map(drop),
            semaphore.remove_permits(0).await.map(drop),
            // 4 and so many would be more than there may be.
            semaphore.add_permits(most - 3).await.map(drop),
        ];
        for outcome in invalid {
            assert!(matches!(outcome, Err(Error::InvalidOption { .. })), "{outcome:?}");
        }
        let key = client.semaphore("a{b").available().await;
        assert!(matches!(key, Err(Error::InvalidKey { .. })), "{key:?}");
        has(&semaphore, 4, 1).await;
        held.release().await.unwrap();
        has(&semaphore, 4, 4).await;
        forget(store, &semaphore, &[&client]).await;
    }

    async fn holders_of_permits_are_shown_and_can_be_forced_out(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let semaphore = a.semaphore("shop:k").permits(3);
        assert!(a.holders("shop:k").await.unwrap().is_empty());
        let two = semaphore.clone().fixed_lease(90 * SECOND).acquire_many(2).await.unwrap();
        let one = b.semaphore("shop:k").fixed_lease(120 * SECOND).acquire().await.unwrap();
        let holders = a.holders("shop:k").await.unwrap();
        assert_eq!(holders.len(), 3);
        for holder in &holders {
            assert_eq!((holder.kind, holder.holds, holder.id.len()), (Kind::Permit, 1, 32));
            assert!(holder.remaining.unwrap() <= 120 * SECOND);
        }
        // Each by its client.
        let mut clients: Vec<_> = holders.iter().map(|holder| &holder.id[..8]).collect();
        clients.sort_unstable();
        clients.dedup();
        assert_eq!(clients.len(), 2);
        let lock = a.lock("shop:lock").acquire().await.unwrap();
        let listed = b.list("shop:").await.unwrap();
        assert_eq!(listed.iter().filter(|(key, _)| key.as_str() == "shop:k").count(), 3, "{listed:?}");
        assert_eq!(listed.len(), 4);
        assert!(b.list("other").await.unwrap().is_empty());

        let waiter = tokio::spawn(b.semaphore("shop:k").acquire());
        settle().await;
        assert!(a.force_release("shop:k").await.unwrap());
        drop(within(SOON, "the wake-up", waiter).await.unwrap().unwrap());
        has(&semaphore, 3, 3).await;
        assert!(!a.force_release("shop:k").await.unwrap());
        for permit in [two, one] {
            assert!(permit.release().await.unwrap_err().is_lost());
        }
        has(&semaphore, 3, 3).await;
        lock.release().await.unwrap();
        forget(store, &semaphore, &[&a, &b]).await;
    }

    async fn permits_without_an_owner_are_a_number(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let (semaphore, other) = (a.unowned_semaphore("k").permits(3), b.unowned_semaphore("k"));
        assert!(matches!(other.release().await, Err(Error::NoPermitsSet { .. })));
        semaphore.acquire_many(2).await.unwrap();
        assert!(other.try_acquire_many(2).await.unwrap_err().is_busy());
        // Any caller may release them.
        other.release().await.unwrap();
        other.try_acquire_many(2).await.unwrap();
        let waiter = tokio::spawn(other.acquire_many(3));
        settle().await;
        semaphore.release_many(3).await.unwrap();
        within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
        assert_eq!(other.available().await.unwrap(), 0);
        assert_eq!(semaphore.add_permits(4).await.unwrap().available, 4);
        assert_eq!(semaphore.drain().await.unwrap(), 4);
        assert_eq!(semaphore.drain().await.unwrap(), 0);
        assert_eq!(other.remove_permits(2).await.unwrap().available, -2);
        assert!(!other.try_set_permits(7).await.unwrap());
        semaphore.release_many(3).await.unwrap();
        assert_eq!(other.available().await.unwrap(), 1);
        assert!(other.delete().await.unwrap() && !other.delete().await.unwrap());
        assert!(other.try_set_permits(7).await.unwrap());
        assert!(other.delete().await.unwrap());
        store.assert_clean(&[&a, &b]).await;
    }

    async fn bad_use_of_permits_without_an_owner_is_told_and_changes_nothing(store: &Store) {
        let client = store.client().await;
        let semaphore = client.unowned_semaphore("k");
        let most = i32::MAX as u32;
        assert!(matches!(semaphore.remove_permits(1).await, Err(Error::TooFewPermits { total: 0, .. })));
        assert!(semaphore.delete().await.is_ok_and(|was| !was));
        semaphore.try_set_permits(1).await.unwrap();
        for outcome in [
            semaphore.try_acquire_many(0).await,
            semaphore.release_many(0).await,
            semaphore.release_many(most).await,
            semaphore.release_many(most + 1).await,
            semaphore.acquire_many(most + 1).await,
            semaphore.add_permits(most).await.map(drop),
        ] {
            assert!(matches!(outcome, Err(Error::InvalidOption { .. })), "{outcome:?}");
        }
        assert_eq!(semaphore.available().await.unwrap(), 1);
        semaphore.delete().await.unwrap();
        store.assert_clean(&[&client]).await;
    }

    async fn all_permits_that_there_can_be_or_one(store: &Store) {
        const MOST: u32 = i32::MAX as u32;
        let clients = join_all((0..4).map(|_| store.client())).await;
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
        store.assert_clean(&clients.iter().collect::<Vec<_>>()).await;
    }
}
