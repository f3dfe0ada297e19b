//! What semaphores do, on memory and on a server: permits with an owner, and those without, seen through the public
//! API.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dlock::store::Kind;
use dlock::{Error, HoldState, Loss, Permit, Semaphore};
use dlock_tests::faults::{PATIENCE, SOON, in_rounds, within};
use dlock_tests::{Store, eventually, on_every_store, settle};
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

async fn forget(store: &Store, semaphore: &Semaphore, clients: &[&dlock::LockClient]) {
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

    async fn permits_are_all_had_or_none(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let semaphore = a.semaphore("k").permits(5);
        let three = semaphore.try_acquire_many(3).await.unwrap();
        let other = b.semaphore("k");
        assert!(is_busy(&other.try_acquire_many(3).await));
        has(&other, 5, 2).await;
        let two = other.try_acquire_many(2).await.unwrap();
        assert!(is_busy(&other.try_acquire().await));
        assert!(two.fencing_token() > three.fencing_token());
        three.release().await.unwrap();
        has(&other, 5, 3).await;
        drop(two);
        has(&other, 5, 5).await;
        let five = semaphore.try_acquire_many(5).await.unwrap();
        five.release().await.unwrap();
        has(&semaphore, 5, 5).await;
        forget(store, &semaphore, &[&a, &b]).await;
    }

    async fn two_permits_of_one_frame_are_two_permits(store: &Store) {
        let client = store.client().await;
        let semaphore = client.semaphore("k").permits(2);
        let inner = semaphore.clone();
        semaphore
            .run(|held| async move {
                assert!(held.is_held());
                let second = inner.try_acquire().await.unwrap();
                assert_ne!(second.fencing_token(), held.fencing_token());
                assert!(is_busy(&inner.try_acquire().await));
                has(&inner, 2, 0).await;
            })
            .await
            .unwrap();
        has(&semaphore, 2, 2).await;
        forget(store, &semaphore, &[&client]).await;
    }

    async fn a_release_wakes_who_waits_in_another_process(store: &Store) {
        let long = async || store.client_with(|builder| builder.lease(90 * SECOND)).await;
        let (a, b) = (long().await, long().await);
        let semaphore = b.semaphore("k");
        for _ in 0..5 {
            let permit = a.semaphore("k").permits(1).acquire().await.unwrap();
            let waiter = tokio::spawn(semaphore.acquire());
            settle().await;
            permit.release().await.unwrap();
            // By a message, and not by a look at a lease of 90 s or at its renewal.
            let permit = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
            permit.release().await.unwrap();
        }
        forget(store, &semaphore, &[&a, &b]).await;
    }

    async fn one_release_of_many_wakes_all_who_can_go_on(store: &Store) {
        let long = async || store.client_with(|builder| builder.lease(90 * SECOND)).await;
        let clients = [long().await, long().await, long().await];
        let semaphore = clients[0].semaphore("k").permits(6);
        let all = semaphore.acquire_many(6).await.unwrap();
        let waiters: Vec<_> = (0..6)
            .map(|i| tokio::spawn(clients[i % 3].semaphore("k").acquire()))
            .collect();
        settle().await;
        all.release().await.unwrap();
        let permits = within(SOON, "the wake-ups", join_all(waiters)).await;
        let permits: Vec<_> = permits.into_iter().map(|permit| permit.unwrap().unwrap()).collect();
        has(&semaphore, 6, 0).await;
        drop(permits);
        has(&semaphore, 6, 6).await;
        forget(store, &semaphore, &[&clients[0], &clients[1], &clients[2]]).await;
    }

    async fn who_gives_up_passes_the_wake_up_on(store: &Store) {
        let long = async || store.client_with(|builder| builder.lease(90 * SECOND)).await;
        let (a, b) = (long().await, long().await);
        let semaphore = a.semaphore("k").permits(1);
        for pause in [0, 1, 2, 3, 5] {
            let permit = semaphore.acquire().await.unwrap();
            let first = tokio::spawn(b.semaphore("k").acquire());
            settle().await;
            let second = tokio::spawn(b.semaphore("k").acquire());
            settle().await;
            permit.release().await.unwrap();
            tokio::time::sleep(pause * MS).await;
            first.abort();
            let gone = first.await;
            drop(gone);
            let permit = within(SOON, "the wake-up", second).await.unwrap().unwrap();
            permit.release().await.unwrap();
        }
        has(&semaphore, 1, 1).await;
        forget(store, &semaphore, &[&a, &b]).await;
    }

    async fn in_one_process_they_are_served_in_the_order_in_which_they_came(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let semaphore = a.semaphore("k").permits(3);
        let held = semaphore.acquire_many(2).await.unwrap();
        let order = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let mut waiters = Vec::new();
        // One is free, and yet the caller of three is served before the callers of one.
        for (name, permits) in [(1, 3), (2, 1), (3, 2), (4, 1)] {
            let (semaphore, order) = (b.semaphore("k").wait(PATIENCE), order.clone());
            waiters.push(tokio::spawn(async move {
                let permit = semaphore.acquire_many(permits).await.unwrap();
                order.lock().push(name);
                tokio::time::sleep(5 * MS).await;
                permit.release().await.unwrap();
            }));
            settle().await;
        }
        assert!(order.lock().is_empty());
        held.release().await.unwrap();
        for waiter in waiters {
            waiter.await.unwrap();
        }
        let order = order.lock().clone();
        assert_eq!(order[..2], [1, 2], "{order:?}");
        forget(store, &semaphore, &[&a, &b]).await;
    }

    async fn who_asks_for_many_is_not_passed_over_by_those_who_ask_for_few(store: &Store) {
        let clients = [store.client().await, store.client().await, store.client().await];
        let semaphore = clients[0].semaphore("k");
        semaphore.set_permits(3).await.unwrap();
        let held = [semaphore.acquire().await.unwrap(), semaphore.acquire().await.unwrap()];
        let many = tokio::spawn(clients[1].semaphore("k").acquire_many(3));
        settle().await;
        // One is free, and kept for the first waiter.
        let few = [0, 2].map(|i| tokio::spawn(clients[i].semaphore("k").wait(PATIENCE).acquire()));
        for permit in held {
            settle().await;
            assert!(is_busy(&semaphore.try_acquire().await));
            assert!(!many.is_finished() && few.iter().all(|few| !few.is_finished()));
            permit.release().await.unwrap();
        }
        let many = within(SOON, "all three", many).await.unwrap().unwrap();
        settle().await;
        assert!(few.iter().all(|few| !few.is_finished()));
        many.release().await.unwrap();
        for permit in within(SOON, "one for each", join_all(few)).await {
            permit.unwrap().unwrap().release().await.unwrap();
        }
        has(&semaphore, 3, 3).await;
        forget(store, &semaphore, &[&clients[0], &clients[1], &clients[2]]).await;
    }

    async fn who_asks_for_few_is_not_kept_out_by_those_who_ask_for_many(store: &Store) {
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

    async fn who_asks_for_more_than_there_are_keeps_nobody_waiting(store: &Store) {
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
    async fn in_one_process_who_asks_for_more_than_there_are_keeps_nobody_waiting(store: &Store) {
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
    /// had, renewed and released, and more is refused before anything is sent.
    async fn as_many_as_are_allowed_are_had_at_once_and_more_are_refused(store: &Store) {
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

    async fn a_place_in_the_queue_is_given_up_with_the_wait(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let semaphore = a.semaphore("k").permits(2);
        let held = semaphore.acquire().await.unwrap();
        let over = b.semaphore("k").wait(50 * MS).acquire_many(2).await;
        assert!(is_busy(&over));
        let dropped = tokio::spawn(b.semaphore("k").acquire_many(2));
        settle().await;
        assert!(is_busy(&semaphore.try_acquire().await), "it is kept for who waits for two");
        let waiter = tokio::spawn(a.semaphore("k").acquire());
        settle().await;
        dropped.abort();
        drop(dropped.await);
        // The waiter behind is told, and does not wait until the place is found empty.
        let one = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
        one.release().await.unwrap();
        held.release().await.unwrap();
        has(&semaphore, 2, 2).await;
        forget(store, &semaphore, &[&a, &b]).await;
    }

    async fn a_fixed_lease_ends_by_itself_and_the_permits_come_back(store: &Store) {
        in_rounds("it is held before its lease is over", async || {
            let (a, b) = (store.client().await, store.client().await);
            let semaphore = a.semaphore("k").permits(2);
            let permit = semaphore.clone().fixed_lease(300 * MS).acquire_many(2).await.unwrap();
            let held = permit.is_held();
            assert!(!permit.is_renewed());
            let next = within(SOON, "the end of the lease", b.semaphore("k").acquire()).await.unwrap();
            assert_eq!(permit.state(), HoldState::Lost(Loss::Expired));
            assert!(next.fencing_token() > permit.fencing_token());
            has(&semaphore, 2, 1).await;
            // Released too late: nothing comes back a second time.
            assert!(matches!(permit.release().await, Err(Error::Lost { loss: Loss::Expired, .. })));
            has(&semaphore, 2, 1).await;
            next.release().await.unwrap();
            forget(store, &semaphore, &[&a, &b]).await;
            if held { Ok(()) } else { Err("too late") }
        })
        .await;
    }

    async fn nobody_is_forced_out_whose_permits_came_back_before(store: &Store) {
        let client = store.client().await;
        let semaphore = client.semaphore("k").permits(2);
        let held = semaphore.clone().fixed_lease(60 * MS).acquire_many(2).await.unwrap();
        assert_eq!(held.lost().await, Loss::Expired);
        // The store forgets them a little later than their holder.
        tokio::time::sleep(20 * MS).await;
        assert!(!client.force_release("k").await.unwrap());
        has(&semaphore, 2, 2).await;
        assert!(held.release().await.unwrap_err().is_lost());
        forget(store, &semaphore, &[&client]).await;
    }

    async fn permits_are_renewed_while_they_are_held(store: &Store) {
        in_rounds("they are renewed in time", async || {
            let (a, b) = (store.client().await, store.client().await);
            let semaphore = a.semaphore("k").permits(3).lease(600 * MS);
            let held = semaphore.acquire_many(3).await.unwrap();
            tokio::time::sleep(1500 * MS).await;
            let still = held.is_held() && is_busy(&b.semaphore("k").try_acquire().await);
            let released = held.release().await;
            has(&semaphore, 3, 3).await;
            forget(store, &semaphore, &[&a, &b]).await;
            match (still, released) {
                (true, Ok(())) => Ok(()),
                (_, released) => Err(format!("lost: {released:?}")),
            }
        })
        .await;
    }

    async fn permits_stay_taken_for_their_minimum(store: &Store) {
        let client = store.client().await;
        let semaphore = client.semaphore("k").permits(2);
        let begun = tokio::time::Instant::now();
        let kept = semaphore.clone().min_hold(400 * MS).acquire_many(2).await.unwrap();
        let waiter = tokio::spawn(semaphore.acquire());
        settle().await;
        kept.release().await.unwrap();
        // A present waiter learns the time, too.
        let next = within(SOON, "the minimum", waiter).await.unwrap().unwrap();
        assert!(begun.elapsed() >= 400 * MS, "{:?}", begun.elapsed());
        next.release().await.unwrap();
        has(&semaphore, 2, 2).await;
        forget(store, &semaphore, &[&client]).await;
    }

    async fn permits_are_added_and_taken_away_at_run_time(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let semaphore = a.semaphore("k");
        assert_eq!(semaphore.status().await.unwrap(), None);
        assert_eq!(semaphore.available().await.unwrap(), 0);
        assert!(semaphore.try_set_permits(3).await.unwrap());
        assert!(!semaphore.try_set_permits(5).await.unwrap());
        assert!(!semaphore.set_permits(3).await.unwrap());
        let held = semaphore.acquire_many(3).await.unwrap();

        // A waiter is told when there are more.
        let waiter = tokio::spawn(b.semaphore("k").acquire_many(2));
        settle().await;
        let status = semaphore.add_permits(2).await.unwrap();
        assert_eq!((status.total, status.held), (5, 3));
        let two = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
        has(&semaphore, 5, 0).await;

        // Fewer than are held: what comes back fills the gap first.
        assert!(semaphore.set_permits(4).await.unwrap());
        has(&semaphore, 4, -1).await;
        let status = semaphore.remove_permits(1).await.unwrap();
        assert_eq!((status.total, status.available), (3, -2));
        two.release().await.unwrap();
        has(&semaphore, 3, 0).await;
        assert!(is_busy(&semaphore.try_acquire().await));
        assert!(held.is_held());
        held.release().await.unwrap();
        has(&semaphore, 3, 3).await;

        let waiter = tokio::spawn(b.semaphore("k").acquire_many(4));
        settle().await;
        assert!(semaphore.set_permits(4).await.unwrap());
        drop(within(SOON, "the wake-up", waiter).await.unwrap().unwrap());
        has(&semaphore, 4, 4).await;
        forget(store, &semaphore, &[&a, &b]).await;
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

    async fn a_name_that_is_taken_by_something_else_is_a_clear_error(store: &Store) {
        let client = store.client().await;
        let guard = client.lock("lock").acquire().await.unwrap();
        let semaphore = client.semaphore("lock").permits(2);
        for outcome in [
            semaphore.try_acquire().await.map(drop),
            semaphore.acquire().await.map(drop),
            semaphore.set_permits(3).await.map(drop),
            semaphore.status().await.map(drop),
            semaphore.delete().await.map(drop),
            client.unowned_semaphore("lock").permits(2).try_acquire().await,
            client.unowned_semaphore("lock").release().await,
            client.latch("lock").count_down().await.map(drop),
            client.latch("lock").wait().await,
        ] {
            assert!(matches!(outcome, Err(Error::KeyTaken { .. })), "{outcome:?}");
        }
        assert!(guard.is_held());
        guard.release().await.unwrap();
        let semaphore = client.semaphore("permits");
        semaphore.set_permits(2).await.unwrap();
        let lock = client.lock("permits").try_acquire().await;
        assert!(matches!(lock, Err(Error::KeyTaken { .. })), "{lock:?}");
        has(&semaphore, 2, 2).await;
        forget(store, &semaphore, &[&client]).await;
    }

    async fn who_holds_permits_is_seen_and_can_be_forced_out(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let semaphore = a.semaphore("shop:k").permits(3);
        assert!(a.holders("shop:k").await.unwrap().is_empty());
        let two = semaphore.clone().fixed_lease(30 * SECOND).acquire_many(2).await.unwrap();
        let one = b.semaphore("shop:k").fixed_lease(60 * SECOND).acquire().await.unwrap();
        let holders = a.holders("shop:k").await.unwrap();
        assert_eq!(holders.len(), 3);
        for holder in &holders {
            assert_eq!((holder.kind, holder.holds, holder.id.len()), (Kind::Permit, 1, 32));
            assert!(holder.remaining.unwrap() <= 60 * SECOND);
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

    async fn a_semaphore_that_is_forgotten_is_lost_to_who_holds_it(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let semaphore = a.semaphore("k").permits(1);
        let held = semaphore.acquire().await.unwrap();
        let waiter = tokio::spawn(b.semaphore("k").permits(2).acquire_many(2));
        settle().await;
        assert!(semaphore.delete().await.unwrap());
        // A waiter is told, and sets the number.
        let two = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
        let told = held.ensure(PATIENCE).await;
        assert!(matches!(told, Err(Error::Lost { loss: Loss::Gone, .. })), "{told:?}");
        assert!(held.release().await.unwrap_err().is_lost());
        has(&semaphore, 2, 0).await;
        two.release().await.unwrap();
        has(&semaphore, 2, 2).await;
        forget(store, &semaphore, &[&a, &b]).await;
    }

    async fn data_that_was_lost_is_told_and_nothing_comes_back_twice(store: &Store) {
        let client = store.client().await;
        let semaphore = client.semaphore("k").permits(2);
        let held = semaphore.acquire_many(2).await.unwrap();
        store.flush().await;
        let next = semaphore.try_acquire().await.unwrap();
        assert!(held.ensure(PATIENCE).await.unwrap_err().is_lost());
        assert!(held.release().await.unwrap_err().is_lost());
        has(&semaphore, 2, 1).await;
        next.release().await.unwrap();
        has(&semaphore, 2, 2).await;
        forget(store, &semaphore, &[&client]).await;
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

    async fn a_dropped_acquire_leaves_permits_without_an_owner_where_they_were(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let semaphore = a.unowned_semaphore("k").permits(1);
        semaphore.acquire().await.unwrap();
        for pause in [0, 1, 2, 3, 5, 8] {
            let waiter = tokio::spawn(b.unowned_semaphore("k").acquire());
            settle().await;
            semaphore.release().await.unwrap();
            tokio::time::sleep(pause * MS).await;
            waiter.abort();
            // It was taken by the one or is taken by the other.
            if !matches!(waiter.await, Ok(Ok(()))) {
                within(SOON, "it is free", semaphore.acquire()).await.unwrap();
            }
            assert_eq!(semaphore.available().await.unwrap(), 0);
        }
        semaphore.delete().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }
}
