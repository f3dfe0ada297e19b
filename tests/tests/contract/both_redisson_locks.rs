//! The behaviours of Redisson's own tests of its locks, of every kind of lock on every store: see
//! `tests/interop/PORTED.md`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dlock::{Error, Lock, LockClient, LockKey, LockKind, Loss};
use dlock_tests::faults::{PATIENCE, SLACK, SOON, in_rounds, within};
use dlock_tests::{Store, on_every_store, settle};
use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
/// Those that one holder has alone, and all.
const ALONE: [LockKind; 4] = [LockKind::Mutex, LockKind::Fair, LockKind::Fenced, LockKind::Write];
const ALL: [LockKind; 5] = [
    LockKind::Mutex,
    LockKind::Fair,
    LockKind::Fenced,
    LockKind::Write,
    LockKind::Read,
];

/// A name for each kind, so that they are not in each other's way.
fn of(client: &LockClient, kind: LockKind) -> Lock {
    client.lock(format!("the-{kind}")).kind(kind)
}

/// What keeps everybody else out of that.
fn against(client: &LockClient, kind: LockKind) -> Lock {
    match kind {
        LockKind::Read => client.lock("the-read").kind(LockKind::Write),
        _ => of(client, kind),
    }
}

async fn is_busy(client: &LockClient, kind: LockKind) -> bool {
    match against(client, kind).try_acquire().await {
        Ok(_) => false,
        Err(error) => {
            assert!(error.is_busy(), "{kind}: {error}");
            true
        }
    }
}

/// What is left of the lease of who holds it.
async fn left(client: &LockClient, kind: LockKind) -> Option<Duration> {
    let holder = client.inspect(format!("the-{kind}")).await.unwrap()?;
    Some(holder.remaining.expect("every lock of ours ends"))
}

/// Counts in two halves, so that a task that is not alone counts wrong.
async fn count(counter: &AtomicU64) {
    let before = counter.load(Ordering::SeqCst);
    tokio::task::yield_now().await;
    counter.store(before + 1, Ordering::SeqCst);
}

async fn clients(store: &Store, number: usize) -> Vec<LockClient> {
    join_all((0..number).map(|_| store.client())).await
}

/// A client whose locks end soon when they are not renewed.
async fn hasty(store: &Store) -> LockClient {
    store.client_with(|builder| builder.lease(900 * MS)).await
}

/// Takes one of each kind in a process that ends then: its runtime ends, and nothing is released.
fn die_with_all(store: &Store) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let client = hasty(store).await;
                for kind in ALL {
                    std::mem::forget(of(&client, kind).acquire().await.unwrap());
                }
                std::mem::forget(client);
            });
        });
    });
}

on_every_store! {
    async fn whether_it_is_locked_is_seen_by_all(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        for kind in ALL {
            for _ in 0..2 {
                let guard = of(&a, kind).acquire().await.unwrap();
                assert!(guard.is_held());
                for client in [&a, &b] {
                    let holder = left(client, kind).await;
                    assert!(holder.is_some() && is_busy(client, kind).await, "{kind}");
                }
                guard.release().await.unwrap();
                for client in [&a, &b] {
                    assert_eq!(left(client, kind).await, None, "{kind}");
                }
            }
        }
        store.assert_clean(&[&a, &b]).await;
    }

    async fn what_is_left_of_a_lease_is_seen_by_all(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        for kind in ALL {
            let guard = of(&a, kind).fixed_lease(HOUR).acquire().await.unwrap();
            let seen = left(&b, kind).await.unwrap();
            assert!(seen <= HOUR && seen > HOUR - SLACK, "{kind}: {seen:?}");
            guard.release().await.unwrap();
            assert_eq!(left(&b, kind).await, None);
            // The lease that was given to one call is not that of the next.
            let guard = of(&a, kind).acquire().await.unwrap();
            let seen = left(&b, kind).await.unwrap();
            assert!(guard.is_renewed() && seen <= a.lease(), "{kind}: {seen:?}");
            guard.release().await.unwrap();
        }
        store.assert_clean(&[&a, &b]).await;
    }

    async fn it_is_held_until_as_many_guards_are_gone_as_there_were(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        for kind in ALL {
            let first = of(&a, kind).acquire().await.unwrap();
            let second = first.scope(of(&a, kind).acquire()).await.unwrap();
            let third = first.reenter().unwrap();
            // To the store it is one hold.
            assert_eq!(b.inspect(format!("the-{kind}")).await.unwrap().unwrap().holds, 1);
            for guard in [second, first, third] {
                assert!(guard.is_held() && is_busy(&b, kind).await, "{kind}");
                guard.release().await.unwrap();
            }
            assert!(!is_busy(&b, kind).await, "{kind}");
        }
        store.assert_clean(&[&a, &b]).await;
    }

    async fn who_only_knows_the_name_does_not_hold_it_nor_give_it_back(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        for kind in ALONE {
            let guard = of(&a, kind).acquire().await.unwrap();
            // Another task of the same process is another owner, as is another process.
            for client in [&a, &b] {
                let asking = of(client, kind).try_acquire();
                assert!(tokio::spawn(asking).await.unwrap().unwrap_err().is_busy(), "{kind}");
            }
            drop(of(&b, kind));
            assert!(guard.ensure(SECOND).await.is_ok() && is_busy(&b, kind).await, "{kind}");
            guard.release().await.unwrap();
        }
        store.assert_clean(&[&a, &b]).await;
    }

    async fn a_process_that_is_gone_leaves_every_kind_to_its_lease(store: &Store) {
        die_with_all(store);
        let client = store.client().await;
        for kind in ALL {
            let begun = Instant::now();
            let guard = against(&client, kind).wait(PATIENCE).acquire().await.unwrap();
            assert!(begun.elapsed() < SLACK, "{kind}: {:?}", begun.elapsed());
            guard.release().await.unwrap();
        }
        store.assert_clean(&[&client]).await;
    }

    async fn a_counter_stays_right_that_only_exclusion_keeps_so(store: &Store) {
        let clients = clients(store, 4).await;
        let counter = Arc::new(AtomicU64::new(0));
        for (at, kind) in ALONE.into_iter().enumerate() {
            let tasks = (0..8).map(|task| {
                let (lock, counter) = (of(&clients[task % 4], kind).wait(PATIENCE), counter.clone());
                tokio::spawn(async move {
                    for _ in 0..5 {
                        let guard = lock.acquire().await.unwrap();
                        count(&counter).await;
                        guard.release().await.unwrap();
                    }
                })
            });
            for task in join_all(tasks).await {
                task.unwrap();
            }
            assert_eq!(counter.load(Ordering::SeqCst), 40 * (at as u64 + 1), "{kind}");
        }
        store.assert_clean(&clients.iter().collect::<Vec<_>>()).await;
    }

    async fn many_tasks_on_few_locks_end_without_an_error_and_leave_no_subscription(store: &Store) {
        let clients = clients(store, 2).await;
        let tasks = (0..120).map(|task: usize| {
            let lock = clients[task % 2].lock(format!("lock-{}", task % 5)).wait(PATIENCE);
            tokio::spawn(async move {
                let guard = lock.acquire().await.unwrap();
                sleep(Duration::from_millis(task as u64 % 7)).await;
                guard.release().await.unwrap();
            })
        });
        for task in join_all(tasks).await {
            task.unwrap();
        }
        store.assert_clean(&clients.iter().collect::<Vec<_>>()).await;
    }

    async fn names_with_a_tag_are_names_of_every_kind(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        for kind in ALL {
            let name = LockKey::raw(format!("{{test}}:abc:{kind}"));
            let guard = a.lock(name.clone()).kind(kind).acquire().await.unwrap();
            let other = if kind == LockKind::Read { LockKind::Write } else { kind };
            let waiter = tokio::spawn(b.lock(name.clone()).kind(other).acquire());
            settle().await;
            assert!(!waiter.is_finished(), "{kind}");
            guard.release().await.unwrap();
            let next = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
            next.release().await.unwrap();
        }
        store.assert_clean(&[&a, &b]).await;
    }

    async fn a_nested_lease_shortens_nothing(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        for kind in ALL {
            let outer = of(&a, kind).fixed_lease(60 * SECOND).acquire().await.unwrap();
            let inner = outer.scope(of(&a, kind).fixed_lease(100 * MS).acquire()).await.unwrap();
            assert!(inner.remaining() > 60 * SECOND - SLACK, "{kind}: {:?}", inner.remaining());
            let seen = left(&b, kind).await.unwrap();
            assert!(seen > 60 * SECOND - SLACK, "{kind}: {seen:?}");
            inner.release().await.unwrap();
            assert!(outer.ensure(SECOND).await.is_ok() && is_busy(&b, kind).await, "{kind}");
            outer.release().await.unwrap();
        }
        store.assert_clean(&[&a, &b]).await;
    }

    async fn what_was_re_entered_before_is_renewed_like_any_other(store: &Store) {
        in_rounds("it is renewed in time", async || {
            let (a, b) = (hasty(store).await, hasty(store).await);
            let mut held = Vec::new();
            for kind in ALL {
                let outer = of(&a, kind).acquire().await.unwrap();
                let inner = outer.scope(of(&a, kind).acquire()).await.unwrap();
                inner.release().await.unwrap();
                outer.release().await.unwrap();
                held.push((kind, of(&a, kind).acquire().await.unwrap()));
            }
            // Twice as long as a lease.
            sleep(1800 * MS).await;
            let mut late = Vec::new();
            for (kind, guard) in held {
                let busy = is_busy(&b, kind).await;
                if !guard.is_held() {
                    late.push(kind);
                } else {
                    assert!(busy, "{kind}");
                }
                drop(guard);
            }
            store.assert_clean(&[&a, &b]).await;
            if late.is_empty() { Ok(()) } else { Err(late) }
        })
        .await;
    }

    async fn after_a_loss_of_data_the_holder_is_told_and_the_next_one_is_renewed(store: &Store) {
        in_rounds("it is renewed in time", async || {
            let (a, b) = (hasty(store).await, hasty(store).await);
            let mut held = Vec::new();
            for kind in ALL {
                held.push(of(&a, kind).lease(HOUR).acquire().await.unwrap());
            }
            store.flush().await;
            for guard in held {
                let told = guard.ensure(HOUR).await;
                assert!(matches!(told, Err(Error::Lost { loss: Loss::Gone, .. })), "{told:?}");
                assert!(guard.release().await.unwrap_err().is_lost());
            }
            let mut next = Vec::new();
            for kind in ALL {
                next.push(of(&a, kind).acquire().await.unwrap());
            }
            sleep(1800 * MS).await;
            let held = next.iter().all(|guard| guard.is_held());
            for (guard, kind) in next.into_iter().zip(ALL) {
                assert!(!held || is_busy(&b, kind).await, "{kind}");
                drop(guard);
            }
            store.assert_clean(&[&a, &b]).await;
            if held { Ok(()) } else { Err("a renewal was late") }
        })
        .await;
    }

    async fn acquires_that_are_dropped_in_a_storm_leave_no_lock_that_is_renewed(store: &Store) {
        let clients = [hasty(store).await, hasty(store).await];
        for kind in ALL {
            let storms = (0..4_usize).map(|task| {
                let lock = of(&clients[task % 2], kind);
                tokio::spawn(async move {
                    for round in 0..30 {
                        let patience = Duration::from_micros(fastrand::u64(0..2500));
                        match timeout(patience, lock.acquire()).await {
                            Ok(Ok(guard)) if round % 2 == 0 => guard.release().await.unwrap(),
                            Ok(Ok(guard)) => drop(guard),
                            Ok(Err(error)) => panic!("{error}"),
                            Err(_) => {}
                        }
                    }
                })
            });
            for storm in join_all(storms).await {
                storm.unwrap();
            }
        }
        let late = store.client().await;
        for kind in ALL {
            let guard = against(&late, kind).wait(SOON + SLACK).acquire().await;
            guard.unwrap_or_else(|error| panic!("{kind}: {error}")).release().await.unwrap();
        }
        store.assert_clean(&[&clients[0], &clients[1], &late]).await;
    }

    async fn those_in_line_for_a_fair_lock_are_served_in_order_as_leases_end(store: &Store) {
        let client = store.client().await;
        let first = client.fair_lock("k").fixed_lease(500 * MS).acquire().await.unwrap();
        let mut waiters = Vec::new();
        for _ in 0..5 {
            waiters.push(tokio::spawn(client.fair_lock("k").fixed_lease(150 * MS).acquire()));
            settle().await;
        }
        // Nothing is released.
        let mut tokens = vec![first.fencing_token()];
        let mut held = vec![first];
        for waiter in waiters {
            let guard = within(SOON, "the end of a lease", waiter).await.unwrap().unwrap();
            tokens.push(guard.fencing_token());
            assert!(held.iter().all(|before| !before.is_held()));
            held.push(guard);
        }
        assert!(tokens.windows(2).all(|pair| pair[0] < pair[1]), "{tokens:?}");
        drop(held);
        store.assert_clean(&[&client]).await;
    }

    async fn waits_for_a_fair_lock_that_end_again_and_again_delay_nobody_later(store: &Store) {
        let clients = clients(store, 3).await;
        let held = clients[0].fair_lock("k").fixed_lease(HOUR).acquire().await.unwrap();
        for _ in 0..8 {
            let waits = clients.iter().map(|client| client.fair_lock("k").wait(200 * MS).acquire());
            for outcome in join_all(waits).await {
                assert!(outcome.unwrap_err().is_busy());
            }
        }
        // They give up their places behind the answer.
        settle().await;
        held.release().await.unwrap();
        // Not even a caller that does not wait at all.
        for client in &clients {
            client.fair_lock("k").try_acquire().await.unwrap().release().await.unwrap();
        }
        store.assert_clean(&clients.iter().collect::<Vec<_>>()).await;
    }

    async fn of_many_who_ask_at_once_for_the_same_set_one_has_it(store: &Store) {
        let clients = clients(store, 3).await;
        for _ in 0..5 {
            let asking = (0..10).map(|i| {
                let set = clients[i % 3].multi(["lock1", "lock2", "lock3"]).fixed_lease(10 * SECOND);
                tokio::spawn(async move { set.try_acquire().await })
            });
            let outcomes: Vec<_> = join_all(asking).await.into_iter().map(Result::unwrap).collect();
            let had: Vec<_> = outcomes.iter().flatten().collect();
            // Where no step takes them all, callers that came at the same time may have blocked each other.
            let least = usize::from(matches!(store, Store::Memory(_) | Store::Server(_)));
            assert!((least..=1).contains(&had.len()), "{had:?}");
            assert!(had.iter().all(|guard| guard.is_held()));
            for refused in outcomes.iter().filter_map(|outcome| outcome.as_ref().err()) {
                assert!(refused.is_busy(), "{refused}");
            }
            for guard in outcomes.into_iter().flatten() {
                guard.release().await.unwrap();
            }
        }
        store.assert_clean(&clients.iter().collect::<Vec<_>>()).await;
    }
}
