//! Why a hold was lost, as its holder, the log and the metrics have it.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use dlock::operations::{LockEventKind, LossReason};
use dlock::stores::memory::MemoryStore;
use dlock::{Error, LockClient, Loss};
use dlock_tests::{Log, Watched, paused};
use metrics_exporter_prometheus::PrometheusBuilder;
use tokio::time::{advance, sleep};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_secs(30);

async fn client(store: MemoryStore) -> (Watched, LockClient) {
    let watched = Watched::new(store);
    let client = LockClient::builder().store(watched.clone()).build().await;
    (watched, client.unwrap())
}

#[test]
fn lease_that_ran_out_says_whether_store_process_or_work_was_late() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let shown = recorder.handle();
    metrics::with_local_recorder(&recorder, || {
        paused(async {
            let log = Log::default();
            let _listening = log.listen();
            let (watched, client) = client(MemoryStore::new()).await;
            let lock = client.lock("k").lease(LEASE);
            let counted = |reason: &str| {
                let series = format!("dlock_lost_total{{group=\"none\",reason=\"{reason}\"}} 1\n");
                assert!(shown.render().contains(&series), "{reason}:\n{}", shown.render());
            };

            let guard = lock.acquire().await.unwrap();
            sleep(MS).await;
            assert_eq!(guard.why_lost().await, None);
            // The whole process stands still: nothing runs that could renew.
            advance(LEASE + SEC).await;
            assert_eq!(guard.lost().await, Loss::Expired);
            assert_eq!(guard.why_lost().await, Some(LossReason::Stalled));
            counted("stalled");
            assert_eq!(log.count("the process or its runtime stood still"), 1);
            drop(guard);

            let guard = lock.acquire().await.unwrap();
            watched.seen().hang_renewals.store(true, SeqCst);
            assert_eq!(guard.lost().await, Loss::Expired);
            let reason = guard.why_lost().await;
            assert!(matches!(reason, Some(LossReason::Unanswered(_))), "{reason:?}");
            assert_eq!(guard.held().why_lost().await, reason);
            counted("unanswered");
            watched.seen().hang_renewals.store(false, SeqCst);
            drop(guard);

            // What failed before a renewal that succeeded is not the reason.
            let guard = lock.acquire().await.unwrap();
            watched.seen().hang_renewals.store(true, SeqCst);
            sleep(LEASE / 2).await;
            watched.seen().hang_renewals.store(false, SeqCst);
            sleep(LEASE).await;
            advance(LEASE + SEC).await;
            assert_eq!(guard.lost().await, Loss::Expired);
            assert_eq!(guard.why_lost().await, Some(LossReason::Stalled));
            drop(guard);

            let guard = lock.clone().fixed_lease(SEC).acquire().await.unwrap();
            assert_eq!(guard.lost().await, Loss::Expired);
            assert_eq!(guard.why_lost().await, Some(LossReason::Expired));
            counted("expired");
            drop(guard);

            for lock in [lock.clone(), lock.clone().fixed_lease(2 * SEC)] {
                let guard = lock.max_hold(SEC).acquire().await.unwrap();
                assert_eq!(guard.lost().await, Loss::MaxHold);
                assert_eq!(guard.why_lost().await, Some(LossReason::MaxHold));
            }
            let view = lock.acquire().await.unwrap().held();
            sleep(MS).await;
            assert_eq!(view.why_lost().await, Some(LossReason::Released));
        });
    });
}

#[test]
fn release_that_comes_too_late_and_its_event_name_the_same_loss() {
    paused(async {
        let (watched, client) = client(MemoryStore::new()).await;
        watched.seen().late_releases.store(3000, SeqCst);
        let mut events = client.events();
        let lock = client.lock("k").lease(LEASE);
        for (lock, loss, reason) in [
            (lock.clone().max_hold(5 * SEC), Loss::MaxHold, LossReason::MaxHold),
            (lock.fixed_lease(5 * SEC), Loss::Expired, LossReason::Expired),
        ] {
            let guard = lock.acquire().await.unwrap();
            sleep(4 * SEC).await;
            let late = guard.release().await;
            assert!(
                matches!(late, Err(Error::Lost { loss: told, .. }) if told == loss),
                "{late:?}"
            );
            let told = loop {
                if let LockEventKind::Lost { reason, .. } = events.next().await.unwrap().what {
                    break reason;
                }
            };
            assert_eq!(told, reason);
        }
    });
}

#[test]
fn hold_that_the_store_lost_names_who_has_the_lock_now() {
    paused(async {
        let store = MemoryStore::new();
        let (_, a) = client(store.clone()).await;
        let (_, b) = client(store).await;
        let guard = a.lock("k").acquire().await.unwrap();
        let reader = a.rw_lock("r").read().acquire().await.unwrap();
        assert!(b.force_release("k").await.unwrap() && b.force_release("r").await.unwrap());
        assert!(guard.ensure(LEASE).await.unwrap_err().is_lost());
        assert_eq!(guard.why_lost().await, Some(LossReason::Gone));
        let next = b.lock("k").acquire().await.unwrap();
        let holder = b.inspect("k").await.unwrap().unwrap().id;
        let reason = guard.why_lost().await.unwrap();
        assert!(reason.to_string().contains(&holder), "{reason}");
        assert_eq!(reason, LossReason::Taken { holder });
        // Another reader has not taken it.
        let other = b.rw_lock("r").read().acquire().await.unwrap();
        assert!(reader.ensure(LEASE).await.unwrap_err().is_lost());
        assert_eq!(reader.why_lost().await, Some(LossReason::Gone));
        drop((next, other));
    });
}
