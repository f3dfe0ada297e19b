//! What holds of every kind of lock on every store, as in the tests of Redisson: see
//! `tests/interop/PORTED.md`.

use std::time::Duration;

use dlock::{Error, Lock, LockClient, LockKey, LockKind, Loss};
use dlock_tests::faults::{PATIENCE, SLACK, SOON, in_rounds, within};
use dlock_tests::{Store, on_every_store, settle};
use tokio::time::{Instant, sleep};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
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

    async fn names_with_a_tag_are_names_of_every_kind(store: &Store) {
        let long = async || store.client_with(|builder| builder.lease(90 * SECOND)).await;
        let (a, b) = (long().await, long().await);
        for kind in ALL {
            in_rounds("the waiter is told in time", async || {
                let name = LockKey::raw(format!("{{test}}:abc:{kind}"));
                let guard = a.lock(name.clone()).kind(kind).acquire().await.unwrap();
                let other = if kind == LockKind::Read { LockKind::Write } else { kind };
                let begun = Instant::now();
                let waiter = tokio::spawn(b.lock(name.clone()).kind(other).acquire());
                settle().await;
                assert!(!waiter.is_finished(), "{kind}");
                guard.release().await.unwrap();
                let next = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
                let took = begun.elapsed();
                next.release().await.unwrap();
                // Untold, a waiter for a fair lock asks after 1.5 s, any other one after 30 s.
                match kind == LockKind::Fair && took > 1200 * MS {
                    true => Err(took),
                    false => Ok(()),
                }
            })
            .await;
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

    async fn after_a_loss_of_data_the_holder_is_told_and_the_next_one_is_renewed(store: &Store) {
        in_rounds("it is renewed in time", async || {
            let (a, b) = (hasty(store).await, hasty(store).await);
            let mut held = Vec::new();
            for kind in ALL {
                held.push(of(&a, kind).lease(HOUR).acquire().await.unwrap());
            }
            store.flush().await;
            for (guard, kind) in held.into_iter().zip(ALL) {
                let told = guard.ensure(HOUR).await;
                assert!(matches!(told, Err(Error::Lost { kind: of, loss: Loss::Gone, .. }) if of == kind), "{told:?}");
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
}
