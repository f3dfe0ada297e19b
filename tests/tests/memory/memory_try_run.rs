//! Work that is skipped where the lock, or a permit, is held elsewhere.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use dlock::{Error, LockClient, Loss};
use dlock_tests::{paused, watched};
use tokio::time::{Instant, sleep};

const SEC: Duration = Duration::from_secs(1);

#[test]
fn work_runs_if_the_lock_is_free_and_its_closure_is_not_called_otherwise() {
    paused(async {
        let client = LockClient::memory();
        let (lock, set) = (client.lock("a"), client.multi(["a", "b"]));
        let semaphore = client.semaphore("s").limit(1);
        assert_eq!(lock.try_run(async |held| held.key().clone()).await.unwrap(), "a");
        assert_eq!(set.try_run(async |held| held.keys().count()).await.unwrap(), 2);
        assert_eq!(semaphore.try_run(async |_| 3).await.unwrap(), 3);
        assert_eq!(client.held(), 0, "all is released");

        let _elsewhere = (lock.acquire().await.unwrap(), semaphore.acquire().await.unwrap());
        let begun = Instant::now();
        // The wait of the lock is for calls that wait.
        let patient = lock.clone().wait(60 * SEC);
        let refused = [
            patient.try_run(|_| async { unreachable!() }).await,
            set.try_run(|_| async { unreachable!() }).await,
            semaphore.try_run(|_| async { unreachable!() }).await,
        ];
        for refused in refused {
            let refused: Result<(), Error> = refused;
            assert!(matches!(refused, Err(Error::NotAcquired { .. })), "{refused:?}");
        }
        assert_eq!(begun.elapsed(), Duration::ZERO);
    });
}

#[test]
fn store_is_asked_once() {
    paused(async {
        let (watched, client) = watched().await;
        let guard = client.lock("k").acquire().await.unwrap();
        let before = watched.seen().acquires.load(SeqCst);
        assert!(client.lock("k").try_run(async |_| ()).await.is_err());
        assert_eq!(watched.seen().acquires.load(SeqCst), before + 1);
        drop(guard);
    });
}

#[test]
fn work_runs_in_the_frame_and_is_dropped_at_a_loss() {
    paused(async {
        let client = LockClient::memory();
        let lock = client.lock("k").fixed_lease(10 * SEC);
        let inner = lock.clone();
        let nested = lock.try_run(|held| async move {
            let nested = inner.try_run(async |held| held.fencing_token()).await;
            assert_eq!(nested.unwrap(), held.fencing_token());
        });
        nested.await.unwrap();
        let begun = Instant::now();
        let lost = lock.try_run(|_| sleep(60 * SEC)).await;
        assert!(
            matches!(
                lost,
                Err(Error::Lost {
                    loss: Loss::Expired,
                    ..
                })
            ),
            "{lost:?}"
        );
        assert!(begun.elapsed() <= 10 * SEC, "{:?}", begun.elapsed());
    });
}
