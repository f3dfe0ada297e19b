//! The store for the tests of others, `dlock::testing`: what it fails, and what it keeps busy.

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use dlock::testing::{Fault, Step, TestStore};
use dlock::{Error, LockKind, OnceError, OnceReply};
use dlock_tests::{eventually, paused};

#[test]
fn work_that_is_done_once_meets_the_faults_of_its_steps() {
    paused(async {
        let store = TestStore::new();
        let mail = store.client().once("mail-7");
        let send = || mail.run(|_| async { Ok::<_, Infallible>("sent".to_owned()) });

        store.fail_next(Step::Claim, Fault::Refused);
        assert!(matches!(
            send().await,
            Err(OnceError::Store(Error::Refused { .. }))
        ));
        store.set_down(true);
        let down = send().await;
        assert!(
            matches!(&down, Err(OnceError::Store(error)) if error.is_unavailable()),
            "{down:?}"
        );
        store.set_down(false);

        // The result is stored, and its reply is lost: it is sent again, and the work is done.
        store.fail_next(Step::Settle, Fault::AnswerLost);
        assert!(matches!(send().await, Ok(OnceReply::Ran(_))));
        assert!(matches!(send().await, Ok(OnceReply::Earlier(_))));
    });
}

#[test]
fn what_a_lost_reply_did_stays_unknown_whatever_fails_after_it() {
    paused(async {
        let store = TestStore::new();
        let client = store.client();
        for step in [Step::Acquire, Step::Claim] {
            store.fail_next(step, Fault::AnswerLost);
            for _ in 0..1000 {
                store.fail_next(step, Fault::Unreachable);
            }
        }
        let unknown = |error: Error| assert!(matches!(error, Error::OutcomeUnknown { .. }), "{error:?}");
        unknown(client.lock("k").acquire().await.unwrap_err());
        let mail = client
            .once("mail-7")
            .run(|_| async { Ok::<_, Infallible>(()) })
            .await;
        match mail {
            Err(OnceError::Store(error)) => unknown(error),
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn a_claim_that_cannot_be_renewed_is_lost() {
    paused(async {
        let store = TestStore::new();
        let mail = store.client().once("mail-7").lease(Duration::from_secs(3));
        for _ in 0..100 {
            store.fail_next(Step::Extend, Fault::Unreachable);
        }
        let reply = mail
            .run(|_| async {
                tokio::time::sleep(Duration::from_secs(10)).await;
                Ok::<_, Infallible>(())
            })
            .await;
        assert!(matches!(reply, Err(OnceError::Lost { .. })), "{reply:?}");
    });
}

#[test]
fn nothing_can_be_seen_or_done_while_the_store_is_down() {
    paused(async {
        let store = TestStore::new();
        let client = store.client();
        let guard = client.lock("k").acquire().await.unwrap();
        store.set_down(true);
        assert!(client.inspect("k").await.unwrap_err().is_unavailable());
        assert!(client.force_release("k").await.unwrap_err().is_unavailable());
        store.set_down(false);
        assert!(guard.is_held());
        assert!(client.inspect("k").await.unwrap().is_some());
        assert!(client.force_release("k").await.unwrap());
    });
}

/// A waiter that asks while the store is down fails here.
#[test]
fn waiters_are_notified_of_what_came_free_when_the_store_is_up_again() {
    paused(async {
        let store = TestStore::new();
        let client = store.client_with(|client| client.retry_for(Duration::from_millis(1)));
        let client = client.await.unwrap();
        for is_lost in [false, true] {
            let (busy, lock) = (store.busy("k"), client.lock("k"));
            let waiter = tokio::spawn(async move { lock.acquire().await.map(|guard| guard.is_held()) });
            tokio::time::sleep(Duration::from_secs(1)).await;
            store.set_down(true);
            let busy = match is_lost {
                true => {
                    assert!(store.lose("k"));
                    Some(busy)
                }
                false => {
                    drop(busy);
                    None
                }
            };
            assert_eq!(store.held(), 0);
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert!(!waiter.is_finished(), "{is_lost}: {:?}", waiter.await);
            store.set_down(false);
            let up = tokio::time::Instant::now();
            assert!(waiter.await.unwrap().unwrap());
            assert!(
                up.elapsed() < Duration::from_secs(1),
                "{is_lost}: nothing told it"
            );
            drop(busy);
        }
    });
}

#[test]
fn read_write_locks_are_busy_by_a_reader_or_a_writer() {
    paused(async {
        let store = TestStore::new();
        let catalog = store.client().rw_lock("catalog");
        let reader = store.busy_as(LockKind::Read, "catalog");
        drop(catalog.read().try_acquire().await.unwrap());
        assert!(catalog.write().try_acquire().await.unwrap_err().is_busy());
        drop(reader);
        let writer = store.busy_as(LockKind::Write, "catalog");
        assert!(catalog.read().try_acquire().await.unwrap_err().is_busy());
        drop(writer);
        drop(catalog.write().try_acquire().await.unwrap());
    });
}

/// Its holders lose nothing where that is refused, and readers do not lose theirs to a reader.
#[test]
fn a_lock_is_taken_from_its_holder_only_where_that_makes_it_busy() {
    paused(async {
        let store = TestStore::new();
        let client = store.client();
        let catalog = client.rw_lock("catalog");
        let mine = catalog.read().acquire().await.unwrap();
        let (one, other) = (
            store.busy_as(LockKind::Read, "catalog"),
            store.busy_as(LockKind::Read, "catalog"),
        );
        assert!(mine.is_held());
        assert_eq!(client.holders("catalog").await.unwrap().len(), 3);
        drop((one, other));
        let unfit = catch_unwind(AssertUnwindSafe(|| store.busy("catalog")));
        assert!(unfit.is_err());
        assert!(mine.is_held());
        drop(store.busy_as(LockKind::Write, "catalog"));
        assert!(!mine.is_held());

        let mine = catalog.read().acquire().await.unwrap();
        let waits = store.client().rw_lock("catalog").prefer_writers();
        let writer = tokio::spawn(async move { waits.write().acquire().await.unwrap().is_held() });
        tokio::time::sleep(Duration::from_secs(1)).await;
        let kept_out = catch_unwind(AssertUnwindSafe(|| store.busy_as(LockKind::Read, "catalog")));
        assert!(kept_out.is_err());
        assert!(mine.is_held());
        drop(mine);
        assert!(writer.await.unwrap());

        let fair = client.fair_lock("queue");
        let (mine, waits) = (fair.acquire().await.unwrap(), store.client());
        let waiter = tokio::spawn(async move { waits.fair_lock("queue").acquire().await.unwrap().is_held() });
        tokio::time::sleep(Duration::from_secs(1)).await;
        let busy = store.busy_as(LockKind::Fair, "queue");
        assert!(!mine.is_held());
        assert!(!waiter.is_finished());
        drop(busy);
        assert!(waiter.await.unwrap());
    });
}

#[test]
fn a_lock_is_taken_from_waiters_on_other_threads_too() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let store = TestStore::new();
        let done = Arc::new(AtomicBool::new(false));
        let tasks: Vec<_> = (0..8)
            .map(|_| {
                let (lock, done) = (store.client().lock("hot"), done.clone());
                tokio::spawn(async move {
                    while !done.load(Ordering::Relaxed) {
                        let guard = lock.acquire().await.unwrap();
                        tokio::task::yield_now().await;
                        _ = guard.release().await;
                    }
                })
            })
            .collect();
        for _ in 0..300 {
            drop(store.busy("hot"));
            tokio::task::yield_now().await;
        }
        done.store(true, Ordering::Relaxed);
        for task in tasks {
            task.await.unwrap();
        }
    });
}

/// A holder may release the lock while it is being taken, and then the waiter that gets it meanwhile has lost it. No renewal
/// is due during the test.
#[test]
fn a_holder_that_comes_while_the_lock_is_taken_has_lost_it_too() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(4)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let store = TestStore::new();
        let (done, inside) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let tasks: Vec<_> = (0..8)
            .map(|_| {
                let lock = store.client().lock("hot").lease(Duration::from_secs(3600));
                let (done, inside) = (done.clone(), inside.clone());
                tokio::spawn(async move {
                    while !done.load(Ordering::Relaxed) {
                        let guard = lock.acquire().await.unwrap();
                        inside.fetch_add(1, Ordering::SeqCst);
                        let stays = fastrand::u32(..8) == 0;
                        while stays && guard.is_held() && !done.load(Ordering::Relaxed) {
                            tokio::task::yield_now().await;
                        }
                        _ = guard.release().await;
                        inside.fetch_sub(1, Ordering::SeqCst);
                    }
                })
            })
            .collect();
        for _ in 0..1000 {
            for _ in 0..fastrand::u32(..30) {
                tokio::task::yield_now().await;
            }
            let busy = store.busy("hot");
            let empty = async || inside.load(Ordering::SeqCst) == 0;
            eventually("all that had the lock have lost it", empty).await;
            drop(busy);
        }
        done.store(true, Ordering::Relaxed);
        for task in tasks {
            task.await.unwrap();
        }
    });
}

#[test]
#[should_panic(expected = "\"room\" cannot be made busy as a lock of this kind (Mutex)")]
fn a_semaphore_is_not_made_busy_as_a_lock() {
    paused(async {
        let store = TestStore::new();
        let room = store.client().semaphore("room").permits(1);
        let _permit = room.try_acquire().await.unwrap();
        let _busy = store.busy("room");
    });
}
