//! The watchdog where many are held, where the store is far away, and where what is due has to wait.

use std::sync::atomic::Ordering::SeqCst;
use std::task::Poll;
use std::time::Duration;

use dlock::stores::memory::MemoryStore;
use dlock::testing::{Fault, Step, TestStore};
use dlock::{LockClient, LockClientBuilder, LockGuard, Loss};
use dlock_tests::{Watched, margin, paused};
use futures_util::future::join_all;
use tokio::time::{Instant, sleep, sleep_until};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);

async fn watched() -> (Watched, LockClient) {
    let watched = Watched::new(MemoryStore::new());
    let builder = LockClient::builder().store(watched.clone());
    (watched, builder.build().await.unwrap())
}

/// Many that are fixed for long, and need nothing.
async fn many_others(client: &LockClient) -> Vec<LockGuard> {
    let mut others = Vec::new();
    for i in 0..250 {
        others.push(
            client
                .lock(format!("other{i}"))
                .fixed_lease(3600 * SEC)
                .acquire()
                .await
                .unwrap(),
        );
    }
    others
}

/// So many with short leases that their renewals are forty steps.
async fn many_short(client: &LockClient) -> Vec<LockGuard> {
    let lock = |i| client.lock(format!("k{i}")).lease(3 * SEC).acquire();
    let all = join_all((0..8000).map(lock)).await;
    all.into_iter().collect::<Result<_, _>>().unwrap()
}

#[test]
fn losses_are_signalled_within_half_the_safety_margin_with_many_holds() {
    paused(async {
        let (watched, client) = watched().await;
        let _others = many_others(&client).await;
        watched.seen().hang_renewals.store(true, SeqCst);
        let lease = SEC;
        // Enough that a renewal of some is under way at the end, wherever that is in the grain of the clock.
        let holders = (0..200).map(|i| {
            let lock = client.lock(format!("{i}")).lease(lease);
            tokio::spawn(async move {
                sleep(i * MS).await;
                let guard = lock.acquire().await.unwrap();
                let until = Instant::now() + lease - margin(lease);
                guard.lost().await;
                let late = Instant::now() - until;
                assert!(late <= margin(lease) / 2 + MS, "{late:?} late");
            })
        });
        for holder in join_all(holders).await {
            holder.unwrap();
        }
    });
}

/// Goes behind all tasks that are ready now.
async fn behind_the_others() {
    let mut went = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut went, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

#[test]
fn waiting_renewal_extends_no_max_hold() {
    paused(async {
        let client = LockClient::memory();
        // The renewal is due after ten seconds; it is sent before the clock goes on, or later.
        for behind in 0..6 {
            let lock = client.lock("k").max_hold(12 * SEC);
            let holder = tokio::spawn(async move {
                let guard = lock.acquire().await.unwrap();
                let taken = Instant::now();
                sleep_until(taken + 10 * SEC).await;
                for _ in 0..behind {
                    behind_the_others().await;
                }
                tokio::time::advance(SEC).await;
                assert_eq!(guard.lost().await, Loss::MaxHold);
                let held = Instant::now() - taken;
                assert!(held <= 12 * SEC, "{behind}: {held:?}");
                guard.release().await.unwrap_err();
            });
            holder.await.unwrap();
        }
    });
}

#[test]
fn many_holds_survive_a_distant_store() {
    paused(async {
        let (watched, client) = watched().await;
        let guards = many_short(&client).await;
        // Two seconds for all of them.
        watched.seen().slow_answers.store(200, SeqCst);
        sleep(10 * SEC).await;
        let lost = guards.iter().filter(|guard| !guard.is_held()).count();
        assert_eq!((guards.len(), lost), (8000, 0));
    });
}

#[test]
fn released_grant_is_not_renewed() {
    paused(async {
        let (watched, client) = watched().await;
        let guards = many_short(&client).await;
        watched.seen().hang_renewals.store(true, SeqCst);
        sleep(SEC).await;
        drop(guards);
        let calls = watched.seen().renew_calls.load(SeqCst);
        sleep(10 * SEC).await;
        let sent = watched.seen().renew_calls.load(SeqCst);
        assert_eq!((client.held(), sent), (0, calls));
        assert!((16..40).contains(&calls), "some waited for room: {calls}");
    });
}

/// A release that fails is repeated until the last renewal that was sent has run out: it may have reached the store though
/// its reply was lost.
#[test]
fn release_is_repeated_until_the_last_renewal_has_run_out() {
    paused(async {
        let store = TestStore::new();
        let lease = |builder: LockClientBuilder| builder.lease(3 * SEC);
        let client = store.client_with(lease).await.unwrap();
        let other = store.client_with(lease).await.unwrap();
        let guard = client.lock("k").acquire().await.unwrap();
        for _ in 0..100 {
            store.fail_next(Step::Renew, Fault::AnswerLost);
        }
        sleep(2500 * MS).await;
        assert!(guard.is_held());
        store.set_down(true);
        drop(guard);
        // The lease has run out as far as the client knows, and not at the store.
        sleep(1000 * MS).await;
        store.set_down(false);
        sleep(1100 * MS).await;
        drop(other.lock("k").try_acquire().await.unwrap());
    });
}
