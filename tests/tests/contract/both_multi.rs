//! Several locks at once, on memory and on a server: all or none, no caller waits while it holds one, and the
//! loss of one is the loss of the whole.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use dlock::{Error, HoldState, LockClient, LockKey, LockKind, Loss};
use dlock_tests::faults::{LEASE, PATIENCE, SOON, is_free, is_free_soon, within};
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
    /// A set is bounded, so that the store does not do one thing for too long: so many locks are acquired, and more are
    /// refused before anything is sent.
    async fn allowed_number_is_acquired_at_once_and_more_are_refused(store: &Store) {
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

    async fn set_of_always_busy_keys_is_acquired_in_the_end(store: &Store) {
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
}

on_quorums! {
    sets_in_any_order_never_dead_lock_and_keep_the_sums_right,
    when_one_is_busy_none_is_taken,
    a_key_that_is_named_twice_counts_once,
    what_makes_no_sense_is_refused_before_anything_is_sent,
    the_loss_of_one_is_the_loss_of_the_whole,
    set_re_enters_the_locks_of_its_frame_and_is_re_entered,
    a_lost_member_fails_its_re_entry_and_no_other,
}
