//! Several locks at once, on memory and on a server: all or none, no caller waits while it holds one, and the
//! loss of one is the loss of the whole.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use dlock::{Error, HoldState, LockClient, LockKey, LockKind, Loss};
use dlock_tests::faults::{LEASE, PATIENCE, SOON, is_confirmed, is_free, is_free_soon, within};
use dlock_tests::{Store, eventually, on_every_store, on_quorums, settle};
use futures_util::FutureExt;

const MS: Duration = Duration::from_millis(1);

/// Clients with leases longer than the test: what comes sooner comes by a notification.
async fn two(store: &Store) -> (LockClient, LockClient) {
    let long = async || store.client_with(|builder| builder.lease(LEASE)).await;
    (long().await, long().await)
}

/// Money that is taken from one and given to the other in two steps, so that only locks keep the sum right.
struct Bank {
    accounts: Vec<AtomicI64>,
    inside: Vec<AtomicUsize>,
}

impl Bank {
    fn new(accounts: usize) -> Arc<Bank> {
        Arc::new(Bank {
            accounts: (0..accounts).map(|_| AtomicI64::new(1000)).collect(),
            inside: (0..accounts).map(|_| AtomicUsize::new(0)).collect(),
        })
    }

    /// Moves one from each to the next, under the locks of all.
    async fn around(&self, these: &[usize]) {
        for at in these {
            assert_eq!(
                self.inside[*at].fetch_add(1, Ordering::SeqCst),
                0,
                "two are at {at}"
            );
        }
        let before: Vec<_> = these
            .iter()
            .map(|at| self.accounts[*at].load(Ordering::SeqCst))
            .collect();
        tokio::time::sleep(MS).await;
        let last = these.len() - 1;
        for (i, at) in these.iter().enumerate() {
            let gain = i64::from(i == last) * last as i64 - i64::from(i != last);
            self.accounts[*at].store(before[i] + gain, Ordering::SeqCst);
        }
        for at in these {
            self.inside[*at].fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn sum(&self) -> i64 {
        self.accounts.iter().map(|a| a.load(Ordering::SeqCst)).sum()
    }
}

fn name(at: usize) -> String {
    format!("account:{at}")
}

/// The sets of a storm: two or three of six, in no order.
fn some_set() -> Vec<usize> {
    let mut all: Vec<usize> = (0..6).collect();
    fastrand::shuffle(&mut all);
    all.truncate(fastrand::usize(2..=3));
    all
}

on_every_store! {
    /// A set is bounded, so that the store does not do one thing for too long: so many locks are had, and more are
    /// refused before anything is sent.
    async fn as_many_as_are_allowed_are_had_at_once_and_more_are_refused(store: &Store) {
        let client = store.client_with(|builder| builder.lease(Duration::from_secs(300))).await;
        let names = |count: usize| (0..count).map(|n| format!("k{n}"));
        let all = client.multi(names(dlock::MAX_AT_ONCE)).acquire().await.unwrap();
        let mut tokens: Vec<_> = all.fencing_tokens().map(|(_, token)| token).collect();
        tokens.sort_unstable();
        tokens.dedup();
        assert!(!tokens.is_empty() && tokens[0] > 0);
        all.release().await.unwrap();
        for count in [dlock::MAX_AT_ONCE + 1, 10_000] {
            let set = client.multi(names(count));
            assert!(matches!(set.check(), Err(Error::InvalidOption { .. })));
            let error = set.try_acquire().await.unwrap_err();
            assert!(error.to_string().contains("1000") && error.to_string().contains("take fewer"), "{error}");
        }
    }

    async fn sets_in_any_order_never_dead_lock_and_keep_the_sums_right(store: &Store) {
        let clients = [store.client().await, store.client().await];
        let bank = Bank::new(6);
        let tasks: Vec<_> = (0..20)
            .map(|i| {
                let (client, bank) = (clients[i % 2].clone(), bank.clone());
                tokio::spawn(async move {
                    for _ in 0..10 {
                        // One in five takes a single lock, like clients without sets.
                        if i % 5 == 0 {
                            let at = [fastrand::usize(0..6)];
                            client.lock(name(at[0])).wait(PATIENCE).run(|_| bank.around(&at)).await.unwrap();
                            continue;
                        }
                        let set = some_set();
                        let lock = client.multi(set.iter().copied().map(name)).wait(PATIENCE);
                        let guard = lock.acquire().await.unwrap();
                        bank.around(&set).await;
                        guard.release().await.unwrap();
                    }
                })
            })
            .collect();
        for task in tasks {
            within(PATIENCE, "a storm of transfers", task).await.unwrap();
        }
        assert_eq!(bank.sum(), 6000);
        store.assert_clean(&[&clients[0], &clients[1]]).await;
    }

    async fn two_sets_in_opposite_order_take_turns(store: &Store) {
        let (a, b) = two(store).await;
        let bank = Bank::new(2);
        let there = async |client: &LockClient, set: [usize; 2]| {
            for _ in 0..100 {
                let lock = client.multi(set.map(name)).wait(PATIENCE);
                lock.run(|_| bank.around(&set)).await.unwrap();
            }
        };
        within(PATIENCE, "two that cross", async { tokio::join!(there(&a, [0, 1]), there(&b, [1, 0])) }).await;
        assert_eq!(bank.sum(), 2000);
        store.assert_clean(&[&a, &b]).await;
    }

    async fn when_one_is_busy_none_is_taken(store: &Store) {
        let (a, b) = two(store).await;
        let busy = a.lock("b").acquire().await.unwrap();
        let Err(Error::NotAcquired { key, waited, remaining, .. }) = b.multi(["c", "b", "a"]).try_acquire().await else {
            panic!("one is held")
        };
        assert_eq!((key.as_str(), waited), ("b", Duration::ZERO));
        assert!(remaining.unwrap() <= LEASE);
        assert_eq!(b.held(), 0);
        // Where each of them is asked for apart, the others are released behind the answer.
        is_free_soon(&a, "a").await;
        is_free_soon(&a, "c").await;

        // Nor while it is waited for.
        let waiter = tokio::spawn(b.multi(["a", "b", "c"]).acquire());
        eventually("it waits", || async { b.waited_for() == 1 }).await;
        settle().await;
        for free in ["a", "c"] {
            is_free(&a, free).await;
        }
        assert!(!waiter.is_finished());
        busy.release().await.unwrap();
        let guard = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
        assert_eq!(guard.keys().map(LockKey::as_str).collect::<Vec<_>>(), ["a", "b", "c"]);
        for held in ["a", "b", "c"] {
            assert!(a.lock(held).try_acquire().await.unwrap_err().is_busy());
        }
        guard.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    async fn whichever_is_busy_next_is_waited_for_with_empty_hands(store: &Store) {
        let (a, b) = two(store).await;
        let first = a.lock("a").acquire().await.unwrap();
        let second = a.lock("b").acquire().await.unwrap();
        let waiter = tokio::spawn(b.multi(["a", "b"]).acquire());
        eventually("it waits", || async { b.waited_for() == 1 }).await;
        first.release().await.unwrap();
        settle().await;
        // It has come to the other one, and has left this one.
        eventually("it waits for the other", || async { b.waited_for() == 1 && b.held() == 0 }).await;
        is_free_soon(&a, "a").await;
        assert!(!waiter.is_finished());
        second.release().await.unwrap();
        within(SOON, "the wake-up", waiter).await.unwrap().unwrap().release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    async fn a_set_whose_keys_are_each_busy_all_the_time_is_had_in_the_end(store: &Store) {
        let mut busy = Vec::new();
        for (key, time) in [("a", 71), ("b", 113), ("c", 131)] {
            let client = store.client().await;
            // A task always waits for it.
            for _ in 0..2 {
                let lock = client.lock(key);
                busy.push(tokio::spawn(async move {
                    loop {
                        let guard = lock.acquire().await.unwrap();
                        tokio::time::sleep(Duration::from_millis(time)).await;
                        guard.release().await.unwrap();
                    }
                }));
            }
        }
        let client = store.client().await;
        for _ in 0..2 {
            let guard = client.multi(["c", "a", "b"]).wait(PATIENCE).acquire().await.unwrap();
            assert!(guard.is_held());
            guard.release().await.unwrap();
        }
        for task in busy {
            task.abort();
            let _ = task.await;
        }
        store.assert_clean(&[&client]).await;
    }

    async fn a_key_that_is_named_twice_counts_once(store: &Store) {
        let (a, b) = two(store).await;
        let lock = a.multi(["b", "a", "b"]);
        assert_eq!(lock.keys(), [LockKey::from("a"), LockKey::from("b")]);
        let guard = lock.acquire().await.unwrap();
        assert_eq!((guard.keys().count(), a.held()), (2, 2));
        guard.release().await.unwrap();
        let guard = a.multi(["b", "b"]).acquire().await.unwrap();
        assert_eq!((guard.keys().count(), a.held()), (1, 1));
        assert!(b.lock("b").try_acquire().await.unwrap_err().is_busy());
        drop(guard);
        store.assert_clean(&[&a, &b]).await;
    }

    async fn what_makes_no_sense_is_refused_before_anything_is_sent(store: &Store) {
        let client = store.client().await;
        let none = client.multi(Vec::<String>::new());
        for error in [none.acquire().await.unwrap_err(), none.try_acquire().await.unwrap_err(), none.check().unwrap_err()] {
            assert!(matches!(error, Error::InvalidOption { option: "keys", .. }), "{error}");
        }
        let error = client.multi(["a", ""]).acquire().await.unwrap_err();
        assert!(matches!(error, Error::InvalidKey { .. }), "{error}");
        let error = client.multi(["a", "b"]).kind(LockKind::Fair).acquire().await.unwrap_err();
        assert!(matches!(error, Error::InvalidOption { option: "kind", .. }), "{error}");
        let error = client.multi(["a", "b"]).wait(Duration::ZERO).acquire().await.unwrap_err();
        assert!(matches!(error, Error::InvalidOption { option: "wait", .. }), "{error}");
        store.assert_clean(&[&client]).await;
    }

    async fn the_wait_is_for_all_of_them_together(store: &Store) {
        let (a, b) = two(store).await;
        let busy = a.lock("b").acquire().await.unwrap();
        let error = b.multi(["a", "b"]).wait(100 * MS).acquire().await.unwrap_err();
        let Error::NotAcquired { key, waited, .. } = error else { panic!("{error}") };
        assert_eq!(key.as_str(), "b");
        assert!(waited >= 100 * MS);
        assert_eq!((b.held(), b.waited_for()), (0, 0));
        busy.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    async fn excess_waiter_is_refused_at_once(store: &Store) {
        let (a, b) = two(store).await;
        let busy = a.lock("b").acquire().await.unwrap();
        let waiter = tokio::spawn(b.multi(["a", "b"]).acquire());
        eventually("it waits", || async { b.waited_for() == 1 }).await;
        settle().await;
        let error = within(SOON, "a refusal", b.multi(["b", "c"]).max_waiters(1).acquire()).await.unwrap_err();
        let Error::TooManyWaiters { key, limit: 1, .. } = error else { panic!("{error}") };
        assert_eq!(key.as_str(), "b");
        busy.release().await.unwrap();
        waiter.await.unwrap().unwrap().release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    async fn each_lock_of_a_set_has_a_growing_token_of_its_own(store: &Store) {
        let (a, b) = two(store).await;
        let mut last = [0, 0];
        for i in 0..20 {
            let client = if i % 2 == 0 { &a } else { &b };
            let guard = client.multi(["x", "y"]).acquire().await.unwrap();
            let now = ["x", "y"].map(|key| guard.fencing_token_of(key).unwrap());
            assert!(now[0] > last[0] && now[1] > last[1], "{now:?} after {last:?}");
            assert_eq!(guard.fencing_token_of("z"), None);
            let all: Vec<_> = guard.fencing_tokens().map(|(key, token)| (key.as_str(), token)).collect();
            assert_eq!(all, [("x", now[0]), ("y", now[1])]);
            last = now;
            if i % 7 == 6 {
                store.flush().await;
            }
            drop(guard);
            // And of one of them alone.
            let alone = client.lock("y").acquire().await.unwrap();
            assert!(alone.fencing_token() > last[1]);
            last[1] = alone.fencing_token();
            alone.release().await.ok();
        }
        store.assert_clean(&[&a, &b]).await;
    }

    async fn the_loss_of_one_is_the_loss_of_the_whole(store: &Store) {
        let (a, b) = two(store).await;
        let guard = a.multi(["a", "b", "c"]).acquire().await.unwrap();
        let (held, also) = (guard.held(), guard.lost());
        assert!(guard.is_held() && guard.is_renewed() && guard.check().is_ok());
        assert_eq!(guard.state(), HoldState::Held);
        let lost = tokio::spawn(guard.lost());
        assert!(b.force_release("b").await.unwrap());
        let error = guard.ensure(LEASE).await.unwrap_err();
        let Error::Lost { key, loss: Loss::Gone, .. } = error else { panic!("{error}") };
        assert_eq!(key.as_str(), "b");
        assert_eq!(guard.state(), HoldState::Lost(Loss::Gone));
        assert_eq!(held.state(), HoldState::Lost(Loss::Gone));
        assert_eq!((guard.remaining(), held.remaining()), (Duration::ZERO, Duration::ZERO));
        assert!(!guard.is_held() && also.now_or_never() == Some(Loss::Gone));
        assert_eq!(lost.await.unwrap(), Loss::Gone);
        assert_eq!(held.lost().await, Loss::Gone);
        // The others stay taken until the guard is gone.
        for other in ["a", "c"] {
            assert!(b.lock(other).try_acquire().await.unwrap_err().is_busy());
        }
        let error = guard.release().await.unwrap_err();
        assert!(matches!(&error, Error::Lost { key, .. } if key.as_str() == "b"), "{error}");
        for each in ["a", "b", "c"] {
            is_free(&b, each).await;
        }
        store.assert_clean(&[&a, &b]).await;
    }

    async fn a_release_goes_on_through_failures_and_tells_them_all(store: &Store) {
        let (a, b) = two(store).await;
        let guard = a.multi(["a", "b", "c", "d"]).acquire().await.unwrap();
        for lost in ["a", "c"] {
            assert!(b.force_release(lost).await.unwrap());
        }
        let next = b.lock("a").try_acquire().await.unwrap();
        let error = guard.release().await.unwrap_err();
        assert!(error.is_lost() && !error.is_unavailable(), "{error}");
        let Error::NotReleased { failures, .. } = error else { panic!("{error}") };
        let keys: Vec<_> = failures
            .iter()
            .map(|failure| match failure {
                Error::Lost { key, .. } => key.as_str(),
                other => panic!("{other}"),
            })
            .collect();
        assert_eq!(keys, ["a", "c"]);
        for free in ["b", "c", "d"] {
            is_free(&b, free).await;
        }
        // The present holder keeps it.
        is_confirmed(&next).await;
        next.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    async fn dropped_guards_give_all_back_also_in_a_panic_and_outside_a_runtime(store: &Store) {
        let (a, b) = two(store).await;
        let panicking = a.clone();
        let panicked = tokio::spawn(async move {
            let _guard = panicking.multi(["a", "b"]).acquire().await.unwrap();
            panic!("on purpose");
        });
        assert!(panicked.await.unwrap_err().is_panic());
        // Dropped, it is free for the same process at once.
        let guard = a.multi(["b", "a"]).try_acquire().await.unwrap();
        std::thread::spawn(move || drop(guard)).join().unwrap();
        for each in ["a", "b"] {
            drop(a.lock(each).try_acquire().await.unwrap());
        }
        drop(a.multi(["a", "b"]).try_acquire().await.unwrap());
        store.assert_clean(&[&a, &b]).await;
    }

    async fn set_re_enters_the_locks_of_its_frame_and_is_re_entered(store: &Store) {
        let (a, b) = two(store).await;
        let client = a.clone();
        let work = a.lock("a").run(move |outer| async move {
            // Of this set the frame holds one, the other is taken.
            let guard = client.multi(["a", "b"]).try_acquire().await.unwrap();
            assert_eq!(guard.fencing_token_of("a"), Some(outer.fencing_token()));
            assert_eq!(client.held(), 2);
            let inner = client.clone();
            guard
                .run(async move {
                    for each in ["a", "b"] {
                        drop(inner.lock(each).try_acquire().await.unwrap());
                    }
                    drop(inner.multi(["b", "a"]).try_acquire().await.unwrap());
                    let nested = inner.multi(["b", "c"]).try_acquire().await.unwrap();
                    assert_eq!(inner.held(), 3);
                    nested.release().await.unwrap();
                    assert_eq!(inner.held(), 2);
                })
                .await
                .unwrap();
            guard.release().await.unwrap();
            assert_eq!(client.held(), 1);
            outer.is_held()
        });
        assert!(work.await.unwrap());
        store.assert_clean(&[&a, &b]).await;
    }

    async fn siblings_exclude_each_other_and_keep_nothing_while_they_wait(store: &Store) {
        let (a, b) = two(store).await;
        let client = a.clone();
        let bank = Bank::new(2);
        let work = a.lock(name(0)).run(|_| async {
            let set = async || {
                for _ in 0..10 {
                    let lock = client.multi([0, 1].map(name)).wait(PATIENCE);
                    lock.run(|_| bank.around(&[0, 1])).await.unwrap();
                }
            };
            // One that has the other key and then wants the frame's: it would wait for ever if a set that waits
            // for the other key stayed inside the frame's.
            let nested = async || {
                for _ in 0..10 {
                    let other = client.lock(name(1)).wait(PATIENCE).acquire().await.unwrap();
                    tokio::task::yield_now().await;
                    let own = client.lock(name(0)).wait(PATIENCE).acquire().await.unwrap();
                    bank.around(&[1, 0]).await;
                    drop((other, own));
                }
            };
            within(PATIENCE, "branches side by side", async { tokio::join!(set(), nested(), set()) }).await;
        });
        work.await.unwrap();
        assert_eq!(bank.sum(), 2000);
        store.assert_clean(&[&a, &b]).await;
    }

    async fn the_current_hold_in_a_set_is_all_of_it(store: &Store) {
        let (a, b) = two(store).await;
        let client = b.clone();
        let work = a.multi(["a", "b"]).run(|given| async move {
            let current = dlock::current().unwrap();
            let names = |held: &dlock::Held| held.keys().map(ToString::to_string).collect::<Vec<_>>();
            assert_eq!(names(&current), ["a", "b"]);
            assert_eq!(names(&given), ["a", "b"]);
            assert_eq!(current.key().as_str(), "a");
            assert_eq!(current.fencing_token_of("b"), given.fencing_token_of("b"));
            assert!(current.is_held());
            client.force_release("b").await.unwrap();
            let error = current.ensure(LEASE).await.unwrap_err();
            assert!(matches!(&error, Error::Lost { key, .. } if key.as_str() == "b"), "{error}");
            // The first is held as ever, and the whole is lost.
            assert!(!current.is_held() && !given.is_held());
            std::future::pending::<()>().await;
        });
        let error = within(SOON, "the end of the work", work).await.unwrap_err();
        assert!(matches!(&error, Error::Lost { key, loss: Loss::Gone, .. } if key.as_str() == "b"), "{error}");
        store.assert_clean(&[&a, &b]).await;
    }

    async fn a_lost_member_fails_its_re_entry_and_no_other(store: &Store) {
        let (a, b) = two(store).await;
        let guard = a.multi(["a", "b"]).acquire().await.unwrap();
        b.force_release("b").await.unwrap();
        assert!(guard.ensure(LEASE).await.unwrap_err().is_lost());
        let client = a.clone();
        guard
            .scope(async move {
                let error = client.multi(["b", "c"]).try_acquire().await.unwrap_err();
                assert!(matches!(&error, Error::Lost { key, .. } if key.as_str() == "b"), "{error}");
                drop(client.lock("a").try_acquire().await.unwrap());
            })
            .await;
        assert!(guard.release().await.unwrap_err().is_lost());
        store.assert_clean(&[&a, &b]).await;
    }

    async fn sets_of_readers_share_and_keep_writers_out(store: &Store) {
        let (a, b) = two(store).await;
        let read = |client: &LockClient, keys: [&str; 2]| client.multi(keys).kind(LockKind::Read);
        let write = |client: &LockClient, keys: [&str; 2]| client.multi(keys).kind(LockKind::Write);
        let one = read(&a, ["a", "b"]).try_acquire().await.unwrap();
        let other = read(&b, ["b", "c"]).try_acquire().await.unwrap();
        // It had the first of them, and gave it back.
        let error = write(&b, ["Z", "a"]).try_acquire().await.unwrap_err();
        assert!(matches!(&error, Error::NotAcquired { key, .. } if key.as_str() == "a"), "{error}");
        drop(write(&a, ["Y", "Z"]).try_acquire().await.unwrap());
        let writer = tokio::spawn(write(&b, ["a", "c"]).acquire());
        eventually("it waits", || async { b.waited_for() == 1 }).await;
        other.release().await.unwrap();
        settle().await;
        assert!(!writer.is_finished());
        one.release().await.unwrap();
        let writer = within(SOON, "the wake-up", writer).await.unwrap().unwrap();
        // And likewise an excluded reader releases what it had.
        let error = read(&a, ["b", "c"]).try_acquire().await.unwrap_err();
        assert!(matches!(&error, Error::NotAcquired { key, .. } if key.as_str() == "c"), "{error}");
        drop(write(&b, ["Z", "b"]).try_acquire().await.unwrap());
        let reader = tokio::spawn(read(&a, ["b", "c"]).acquire());
        eventually("it waits", || async { a.waited_for() == 1 }).await;
        writer.release().await.unwrap();
        within(SOON, "the wake-up", reader).await.unwrap().unwrap().release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    async fn shutdown_ends_waiters_and_holders(store: &Store) {
        let (a, b) = two(store).await;
        let guard = a.multi(["a", "b"]).acquire().await.unwrap();
        let waiter = tokio::spawn(a.multi(["b", "c"]).acquire());
        eventually("it waits", || async { a.waited_for() == 1 }).await;
        a.shutdown(10 * MS).await;
        assert!(matches!(waiter.await.unwrap(), Err(Error::ClientClosed)));
        assert_eq!(guard.state(), HoldState::Lost(Loss::Shutdown));
        assert!(matches!(a.multi(["x", "y"]).acquire().await, Err(Error::ClientClosed)));
        b.multi(["a", "b", "c"]).wait(PATIENCE).acquire().await.unwrap().release().await.unwrap();
        drop(guard);
        store.assert_clean(&[&b]).await;
    }

    async fn futures_are_send_static_and_borrow_nothing(store: &Store) {
        fn movable<T: Send + 'static>(value: T) -> T { value }
        let client = store.client().await;
        let work = movable(client.multi(["a", "b"]).run(|held| async move { held.fencing_token() }));
        assert!(tokio::spawn(work).await.unwrap().unwrap() > 0);
        let guard = movable(movable(client.multi(["a", "b"]).acquire()).await.unwrap());
        let lost = movable(guard.lost());
        movable(guard.release()).await.unwrap();
        assert_eq!(lost.await, Loss::Released);
        store.assert_clean(&[&client]).await;
    }
}

on_quorums! {
    sets_in_any_order_never_dead_lock_and_keep_the_sums_right,
    two_sets_in_opposite_order_take_turns,
    when_one_is_busy_none_is_taken,
    whichever_is_busy_next_is_waited_for_with_empty_hands,
    a_key_that_is_named_twice_counts_once,
    what_makes_no_sense_is_refused_before_anything_is_sent,
    the_wait_is_for_all_of_them_together,
    excess_waiter_is_refused_at_once,
    each_lock_of_a_set_has_a_growing_token_of_its_own,
    the_loss_of_one_is_the_loss_of_the_whole,
    a_release_goes_on_through_failures_and_tells_them_all,
    dropped_guards_give_all_back_also_in_a_panic_and_outside_a_runtime,
    set_re_enters_the_locks_of_its_frame_and_is_re_entered,
    siblings_exclude_each_other_and_keep_nothing_while_they_wait,
    the_current_hold_in_a_set_is_all_of_it,
    a_lost_member_fails_its_re_entry_and_no_other,
    sets_of_readers_share_and_keep_writers_out,
    shutdown_ends_waiters_and_holders,
    futures_are_send_static_and_borrow_nothing,
}
