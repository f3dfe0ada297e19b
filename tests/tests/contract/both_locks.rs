//! What a plain lock does, on memory and on a server: the rules of ownership, re-entry, release, waiting
//! and fencing, seen through the public API.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use dlock::{Error, HoldState, Loss, scope};
use dlock_tests::faults::{PATIENCE, SLACK, SOON, in_rounds, is_confirmed, within};
use dlock_tests::{eventually, on_every_store, on_quorums, settle};
use futures_util::poll;
use futures_util::stream::{self, StreamExt};

const MS: Duration = Duration::from_millis(1);

/// Counts the holders at the same time.
#[derive(Default, Clone)]
struct Room(Arc<(AtomicUsize, AtomicUsize)>);

/// Leaves the room however the visit ends.
struct Leaves<'a>(&'a Room);

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.0.0.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Room {
    async fn visit(&self) {
        let inside = self.0.0.fetch_add(1, Ordering::SeqCst) + 1;
        self.0.1.fetch_max(inside, Ordering::SeqCst);
        let _leaves = Leaves(self);
        tokio::time::sleep(3 * MS).await;
    }

    fn most(&self) -> usize {
        self.0.1.load(Ordering::SeqCst)
    }
}

on_every_store! {
    async fn one_holder_at_a_time_in_one_process_and_across(store: &Store) {
        let clients = [store.client().await, store.client().await];
        let room = Room::default();
        let tasks: Vec<_> = (0..24)
            .map(|i| {
                let (lock, room) = (clients[i % 2].lock("k").wait(PATIENCE), room.clone());
                tokio::spawn(async move {
                    let guard = lock.acquire().await.unwrap();
                    room.visit().await;
                    guard.release().await.unwrap();
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(room.most(), 1);
        store.assert_clean(&[&clients[0], &clients[1]]).await;
    }

    async fn try_acquire_asks_once_and_says_what_is_left_of_the_lease(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let guard = a.lock("k").fixed_lease(Duration::from_secs(60)).acquire().await.unwrap();
        let asking = b.lock("k").try_acquire();
        let Err(Error::NotAcquired { key, waited, remaining, .. }) = within(MS, "asking once", asking).await else {
            panic!("the lock is held")
        };
        assert_eq!((key.as_str(), waited), ("k", Duration::ZERO));
        let left = remaining.unwrap();
        assert!(left > Duration::from_secs(60) - SLACK && left <= Duration::from_secs(60), "{left:?}");
        guard.release().await.unwrap();
        b.lock("k").try_acquire().await.unwrap().release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    async fn a_wait_ends_when_it_is_over_and_leaves_nothing(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let guard = a.lock("k").acquire().await.unwrap();
        let before = Instant::now();
        let error = b.lock("k").wait(100 * MS).acquire().await.unwrap_err();
        let Error::NotAcquired { waited, .. } = error else { panic!("{error}") };
        assert!(waited >= 100 * MS && before.elapsed() < SLACK, "{waited:?}");
        assert_eq!(b.waited_for(), 0);
        guard.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    async fn a_release_wakes_a_waiter_in_another_process(store: &Store) {
        let long = async || store.client_with(|builder| builder.lease(Duration::from_secs(90))).await;
        let (a, b) = (long().await, long().await);
        for _ in 0..5 {
            let guard = a.lock("k").acquire().await.unwrap();
            let waiter = tokio::spawn(b.lock("k").acquire());
            settle().await;
            guard.release().await.unwrap();
            // By a message, and not by a look at a lease of 90 s or at its renewal.
            let guard = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
            guard.release().await.unwrap();
        }
        store.assert_clean(&[&a, &b]).await;
    }

    async fn dropped_lock_is_free_on_the_next_line(store: &Store) {
        let client = store.client().await;
        for _ in 0..50 {
            let guard = client.lock("k").try_acquire().await.unwrap();
            drop(guard);
        }
        store.assert_clean(&[&client]).await;
    }

    async fn guards_are_released_outside_a_runtime_and_in_a_panic(store: &Store) {
        let client = store.client().await;
        let guard = client.lock("k").acquire().await.unwrap();
        std::thread::spawn(move || drop(guard)).join().unwrap();
        let guard = client.lock("k").try_acquire().await.unwrap();
        let panicking = tokio::spawn(async move {
            let _guard = guard;
            panic!("on purpose");
        });
        assert!(panicking.await.unwrap_err().is_panic());
        let lock = client.lock("k");
        let task = tokio::spawn(async move { lock.run(|_| std::future::pending::<()>()).await });
        eventually("the closure runs", || async { client.held() == 1 }).await;
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
        drop(client.lock("k").try_acquire().await.unwrap());
        store.assert_clean(&[&client]).await;
    }

    async fn nested_calls_re_enter(store: &Store) {
        let (client, other) = (store.client().await, store.client().await);
        let lock = client.lock("k");
        let inner = lock.clone();
        let tokens = lock
            .run(move |held| async move {
                let second = inner.acquire().await.unwrap();
                let third = second.run(async { inner.try_acquire().await.unwrap() }).await.unwrap();
                assert_eq!(dlock::current().unwrap().fencing_token(), held.fencing_token());
                let tokens = [held.fencing_token(), second.fencing_token(), third.fencing_token()];
                third.release().await.unwrap();
                second.release().await.unwrap();
                assert!(held.is_held());
                assert!(other.lock("k").try_acquire().await.unwrap_err().is_busy());
                tokens
            })
            .await
            .unwrap();
        assert_eq!(tokens[0], tokens[1]);
        assert_eq!(tokens[1], tokens[2]);
        assert!(dlock::current().is_none());
        store.assert_clean(&[&client]).await;
    }

    async fn siblings_exclude_each_other_in_a_frame(store: &Store) {
        let client = store.client().await;
        let lock = client.lock("k").wait(PATIENCE);
        let (room, inner) = (Room::default(), lock.clone());
        let visits = room.clone();
        lock.run(move |_| async move {
            let visit = || async {
                let guard = inner.acquire().await.unwrap();
                // Nested once more inside the branch.
                guard.run(async { inner.run(|_| visits.visit()).await.unwrap() }).await.unwrap();
                guard.release().await.unwrap();
            };
            tokio::join!(visit(), visit(), visit());
            stream::iter(0..6).map(|_| visit()).buffered(6).collect::<Vec<()>>().await;
            // The branch that loses a select is dropped while it waits or holds; the lock goes on.
            for _ in 0..3 {
                tokio::select! { () = visit() => {}, () = visit() => {}, () = tokio::time::sleep(MS) => {} }
            }
            visit().await;
        })
        .await
        .unwrap();
        assert_eq!(room.most(), 1);
        store.assert_clean(&[&client]).await;
    }

    async fn siblings_exclude_each_other_outside_any_frame(store: &Store) {
        let client = store.client().await;
        let room = Room::default();
        let visit = || async {
            client.lock("k").wait(PATIENCE).run(|_| room.visit()).await.unwrap();
        };
        tokio::join!(visit(), visit(), visit(), visit());
        assert_eq!(room.most(), 1);
        store.assert_clean(&[&client]).await;
    }

    async fn bare_guard_encloses_no_code(store: &Store) {
        let client = store.client().await;
        let guard = client.lock("k").acquire().await.unwrap();
        assert!(client.lock("k").try_acquire().await.unwrap_err().is_busy());
        let again = guard.reenter().unwrap();
        assert_eq!(again.fencing_token(), guard.fencing_token());
        drop(guard);
        assert!(again.is_held());
        assert!(client.lock("k").try_acquire().await.unwrap_err().is_busy());
        let scoped = again.scope(async { client.lock("k").try_acquire().await }).await.unwrap();
        drop(again);
        assert!(scoped.is_held());
        scoped.release().await.unwrap();
        store.assert_clean(&[&client]).await;
    }

    async fn spawned_task_inherits_frames_only_on_purpose(store: &Store) {
        let client = store.client().await;
        let lock = client.lock("k");
        let inner = lock.clone();
        lock.run(move |_| async move {
            let child = inner.clone();
            let spawned = tokio::spawn(async move { child.try_acquire().await.map(drop) });
            assert!(spawned.await.unwrap().unwrap_err().is_busy());
            let child = inner.clone();
            let wrapped = scope::current().wrap(async move { child.try_acquire().await.map(drop) });
            tokio::spawn(wrapped).await.unwrap().unwrap();
            let local = tokio::task::LocalSet::new();
            let child = inner.clone();
            let spawned = local.spawn_local(async move { child.try_acquire().await.map(drop) });
            local.await;
            assert!(spawned.await.unwrap().unwrap_err().is_busy());
        })
        .await
        .unwrap();
        store.assert_clean(&[&client]).await;
    }

    async fn lost_frame_gives_an_error_and_never_the_lock_afresh(store: &Store) {
        let client = store.client().await;
        let guard = client.lock("k").fixed_lease(150 * MS).acquire().await.unwrap();
        let again = client.lock("k");
        let error = guard
            .scope(async {
                tokio::time::sleep(200 * MS).await;
                again.acquire().await.unwrap_err()
            })
            .await;
        assert!(matches!(error, Error::Lost { loss: Loss::Expired, .. }), "{error}");
        drop(guard);
        store.assert_clean(&[&client]).await;
    }

    async fn fixed_lease_ends_by_itself_and_affects_no_other(store: &Store) {
        in_rounds("it is held before its lease is over", async || {
            let (a, b) = (store.client().await, store.client().await);
            let guard = a.lock("k").fixed_lease(200 * MS).acquire().await.unwrap();
            let held = guard.is_held();
            assert!(!guard.is_renewed());
            let next = b.lock("k").wait(PATIENCE).acquire().await.unwrap();
            // The holder is told before another client has it.
            assert_eq!(guard.state(), HoldState::Lost(Loss::Expired));
            assert_eq!(guard.remaining(), Duration::ZERO);
            assert!(guard.lost().await == Loss::Expired && next.fencing_token() > guard.fencing_token());
            assert!(matches!(guard.release().await, Err(Error::Lost { loss: Loss::Expired, .. })));
            assert!(next.is_held() && next.is_renewed());
            assert!(next.remaining() > Duration::from_secs(10));
            next.release().await.unwrap();
            store.assert_clean(&[&a, &b]).await;
            if held { Ok(()) } else { Err("it was over at once") }
        })
        .await;
    }

    async fn max_hold_ends_a_stuck_holder(store: &Store) {
        in_rounds("it is renewed until then", async || {
            let client = store.client().await;
            let guard = client.lock("k").lease(300 * MS).max_hold(700 * MS).acquire().await.unwrap();
            tokio::time::sleep(500 * MS).await;
            let held = guard.is_held();
            let loss = guard.lost().await;
            drop(guard);
            store.assert_clean(&[&client]).await;
            if held && loss == Loss::MaxHold { Ok(()) } else { Err((held, loss)) }
        })
        .await;
    }

    async fn min_hold_keeps_the_lock_taken(store: &Store) {
        in_rounds("it is asked for before the minimum is over", async || {
            let (a, b) = (store.client().await, store.client().await);
            let started = Instant::now();
            a.lock("k").min_hold(400 * MS).acquire().await.unwrap().release().await.unwrap();
            assert_eq!(a.held(), 0);
            let asked = b.lock("k").try_acquire().await;
            let at = started.elapsed();
            match asked {
                Err(error) => assert!(error.is_busy(), "{error}"),
                Ok(_) if at >= 399 * MS => return Err(at),
                Ok(_) => panic!("it was free after {at:?}"),
            }
            b.lock("k").wait(PATIENCE).acquire().await.unwrap().release().await.unwrap();
            assert!(started.elapsed() >= 399 * MS, "{:?}", started.elapsed());
            assert!(started.elapsed() < SLACK);
            store.assert_clean(&[&a, &b]).await;
            Ok(())
        })
        .await;
    }

    async fn forced_release_is_noticed_at_the_next_check(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let guard = a.lock("k").acquire().await.unwrap();
        assert!(b.force_release("k").await.unwrap());
        assert!(!b.force_release("k").await.unwrap());
        let next = b.lock("k").try_acquire().await.unwrap();
        assert!(matches!(guard.ensure(Duration::from_secs(30)).await, Err(Error::Lost { loss: Loss::Gone, .. })));
        assert!(!guard.is_held());
        // Its release touches no other lock.
        assert!(guard.release().await.unwrap_err().is_lost());
        is_confirmed(&next).await;
        next.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    async fn run_drops_the_work_when_the_lock_is_lost(store: &Store) {
        let client = store.client().await;
        let error = client
            .lock("k")
            .fixed_lease(150 * MS)
            .run(|_| std::future::pending::<()>())
            .await
            .unwrap_err();
        assert!(matches!(error, Error::Lost { loss: Loss::Expired, .. }), "{error}");
        store.assert_clean(&[&client]).await;
    }

    async fn release_reports_the_loss_after_a_forced_one(store: &Store) {
        let client = store.client().await;
        let guard = client.lock("k").acquire().await.unwrap();
        client.force_release("k").await.unwrap();
        assert!(matches!(guard.release().await, Err(Error::Lost { loss: Loss::Gone, .. })));
        store.assert_clean(&[&client]).await;
    }

    async fn shutdown_ends_everything_in_good_order(store: &Store) {
        in_rounds("a lock is given back before the deadline", async || {
            let (a, b) = (store.client().await, store.client().await);
            let stays = a.lock("stays").acquire().await.unwrap();
            let goes = a.lock("goes").acquire().await.unwrap();
            let waits = tokio::spawn(a.lock("stays").acquire());
            eventually("somebody waits", || async { a.waited_for() == 1 }).await;
            let closing = tokio::spawn({
                let a = a.clone();
                async move { a.shutdown(300 * MS).await }
            });
            assert!(matches!(waits.await.unwrap(), Err(Error::ClientClosed)));
            assert!(matches!(a.lock("x").acquire().await, Err(Error::ClientClosed)));
            let given = goes.release().await;
            let report = closing.await.unwrap();
            assert_eq!(stays.state(), HoldState::Lost(Loss::Shutdown));
            b.lock("stays").try_acquire().await.unwrap().release().await.unwrap();
            drop(stays);
            store.assert_clean(&[&b]).await;
            if given.is_err() {
                return Err(given);
            }
            assert_eq!((report.lost, report.unconfirmed), (1, 0));
            Ok(())
        })
        .await;
    }

    async fn guard_keeps_its_client_alive(store: &Store) {
        in_rounds("renewal goes on", async || {
            let (a, b) = (store.client().await, store.client().await);
            let guard = a.lock("k").lease(300 * MS).acquire().await.unwrap();
            drop(a);
            tokio::time::sleep(900 * MS).await;
            let state = guard.state();
            drop(guard);
            b.lock("k").wait(PATIENCE).acquire().await.unwrap().release().await.unwrap();
            store.assert_clean(&[&b]).await;
            if state == HoldState::Held { Ok(()) } else { Err(state) }
        })
        .await;
    }

    async fn futures_are_send_static_and_borrow_nothing(store: &Store) {
        fn movable<T: Send + 'static>(value: T) -> T { value }
        let client = store.client().await;
        let work = movable(client.lock("k").run(|held| async move { held.fencing_token() }));
        assert!(tokio::spawn(work).await.unwrap().unwrap() > 0);
        let guard = movable(movable(client.lock("k").acquire()).await.unwrap());
        let lost = movable(guard.lost());
        movable(guard.release()).await.unwrap();
        assert_eq!(lost.await, Loss::Released);
        store.assert_clean(&[&client]).await;
    }

    async fn waiters_of_a_process_are_served_in_arrival_order(store: &Store) {
        let client = store.client().await;
        let guard = client.lock("k").acquire().await.unwrap();
        let order = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let mut waiters = Vec::new();
        for i in 0..5 {
            let (lock, order) = (client.lock("k"), order.clone());
            let mut waiter = Box::pin(async move {
                let guard = lock.acquire().await.unwrap();
                order.lock().push(i);
                guard.release().await.unwrap();
            });
            // From its first poll on it stands in line.
            assert!(poll!(&mut waiter).is_pending());
            waiters.push(tokio::spawn(waiter));
        }
        guard.release().await.unwrap();
        for waiter in waiters {
            waiter.await.unwrap();
        }
        assert_eq!(*order.lock(), [0, 1, 2, 3, 4]);
        store.assert_clean(&[&client]).await;
    }

    async fn excess_waiter_is_refused_at_once(store: &Store) {
        let client = store.client().await;
        let guard = client.lock("k").acquire().await.unwrap();
        let lock = client.lock("k").max_waiters(2);
        let (mut first, mut second) = (Box::pin(lock.acquire()), Box::pin(lock.acquire()));
        assert!(poll!(&mut first).is_pending() && poll!(&mut second).is_pending());
        let waiters = [tokio::spawn(first), tokio::spawn(second)];
        let refused = lock.acquire().await.unwrap_err();
        assert!(matches!(refused, Error::TooManyWaiters { limit: 2, .. }), "{refused}");
        assert!(matches!(
            client.lock("k").max_waiters(0).acquire().await,
            Err(Error::TooManyWaiters { .. })
        ));
        drop(guard);
        for waiter in waiters {
            waiter.await.unwrap().unwrap().release().await.unwrap();
        }
        // With five callers at once and no waiter yet, two wait and two are refused.
        let won = AtomicU32::new(0);
        let one = || async {
            if let Ok(guard) = lock.acquire().await {
                won.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(30 * MS).await;
                guard.release().await.unwrap();
            }
        };
        tokio::join!(one(), one(), one(), one(), one());
        assert_eq!(won.load(Ordering::SeqCst), 3);
        store.assert_clean(&[&client]).await;
    }

    async fn a_waiter_in_front_that_gives_up_leaves_its_place_to_the_next(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let guard = a.lock("k").acquire().await.unwrap();
        let (mut first, mut second) = (Box::pin(b.lock("k").acquire()), Box::pin(b.lock("k").acquire()));
        assert!(poll!(&mut first).is_pending() && poll!(&mut second).is_pending());
        let (first, second) = (tokio::spawn(first), tokio::spawn(second));
        settle().await;
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        guard.release().await.unwrap();
        let second = within(SOON, "the wake-up", second).await.unwrap().unwrap();
        second.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    async fn people_can_look_at_locks(store: &Store) {
        let client = store.client().await;
        let guard = client.lock("shop:order:1").acquire().await.unwrap();
        let _other = client.lock("other").acquire().await.unwrap();
        let holder = client.inspect("shop:order:1").await.unwrap().unwrap();
        assert_eq!(holder.holds, 1);
        assert!(holder.remaining.unwrap() > Duration::from_secs(10));
        let found = client.list("shop:").await.unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].0.as_str(), &found[0].1.id), ("shop:order:1", &holder.id));
        assert!(client.list("sh*p").await.unwrap().is_empty());
        guard.release().await.unwrap();
        assert_eq!(client.inspect("shop:order:1").await.unwrap(), None);
    }

    async fn ten_thousand_cycles_leave_nothing(store: &Store) {
        let client = store.client().await;
        let workers: Vec<_> = (0..8)
            .map(|worker| {
                let client = client.clone();
                tokio::spawn(async move {
                    for i in 0..1250 {
                        let guard = client.lock(format!("key:{}", (worker + i) % 40)).acquire().await.unwrap();
                        if i % 2 == 0 { drop(guard) } else { guard.release().await.unwrap() }
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.await.unwrap();
        }
        store.assert_clean(&[&client]).await;
    }
}

on_quorums! {
    one_holder_at_a_time_in_one_process_and_across,
    try_acquire_asks_once_and_says_what_is_left_of_the_lease,
    a_wait_ends_when_it_is_over_and_leaves_nothing,
    a_release_wakes_a_waiter_in_another_process,
    dropped_lock_is_free_on_the_next_line,
    guards_are_released_outside_a_runtime_and_in_a_panic,
    nested_calls_re_enter,
    siblings_exclude_each_other_in_a_frame,
    siblings_exclude_each_other_outside_any_frame,
    bare_guard_encloses_no_code,
    spawned_task_inherits_frames_only_on_purpose,
    lost_frame_gives_an_error_and_never_the_lock_afresh,
    fixed_lease_ends_by_itself_and_affects_no_other,
    max_hold_ends_a_stuck_holder,
    min_hold_keeps_the_lock_taken,
    forced_release_is_noticed_at_the_next_check,
    run_drops_the_work_when_the_lock_is_lost,
    release_reports_the_loss_after_a_forced_one,
    shutdown_ends_everything_in_good_order,
    guard_keeps_its_client_alive,
    futures_are_send_static_and_borrow_nothing,
    waiters_of_a_process_are_served_in_arrival_order,
    excess_waiter_is_refused_at_once,
    a_waiter_in_front_that_gives_up_leaves_its_place_to_the_next,
    people_can_look_at_locks,
    ten_thousand_cycles_leave_nothing,
}
