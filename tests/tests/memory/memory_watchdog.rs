//! The watchdog where many are held, where the store is far away, and where what is due has to wait.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use dlock::store::Lane;
use dlock::stores::memory::MemoryStore;
use dlock::{LockClient, LockGuard};
use dlock_tests::{Watched, margin, paused};
use futures_util::FutureExt;
use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

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
    for i in 0..300 {
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
    let all = join_all((0..10_240).map(lock)).await;
    all.into_iter().collect::<Result<_, _>>().unwrap()
}

#[test]
fn doubt_before_the_watchdog_runs_counts() {
    paused(async {
        let (watched, client) = watched().await;
        let guard = client.lock("k").acquire().now_or_never();
        let guard = guard.expect("no other task has run").unwrap();
        watched.seen().doubts.tell(Lane::default());
        sleep(MS).await;
        assert_eq!(watched.seen().renewals.load(SeqCst), 1);
        assert!(guard.is_held());
    });
}

/// Nothing is due for the second lock before the watchdog looks for the first: it enters the table of renewals only then.
#[test]
fn lock_that_is_due_after_the_next_look_is_renewed_doubted_handed_off_and_ended_like_any_other() {
    async fn second() -> (Watched, LockClient, LockGuard) {
        let (watched, client) = watched().await;
        let first = client.lock("first").acquire().await.unwrap();
        sleep(SEC).await;
        let second = client.lock("second").acquire().await.unwrap();
        first.release().await.unwrap();
        assert_eq!((client.held(), client.active().holds.len()), (1, 1));
        (watched, client, second)
    }
    paused(async {
        let (watched, _client, second) = second().await;
        sleep(11 * SEC).await;
        assert_eq!(watched.seen().renewals.load(SeqCst), 1);
        sleep(100 * SEC).await;
        assert!(second.is_held(), "renewed");
    });
    paused(async {
        let (watched, _client, second) = second().await;
        watched.seen().doubts.tell(Lane::default());
        sleep(MS).await;
        assert_eq!(watched.seen().renewals.load(SeqCst), 1, "confirmed at once");
        assert!(second.is_held());
    });
    paused(async {
        let (watched, client, second) = second().await;
        // A doubt that comes while a request is on its way.
        watched.seen().slow_answers.store(100, SeqCst);
        let doubted = async {
            sleep(50 * MS).await;
            watched.seen().doubts.tell(Lane::default());
        };
        let (third, ()) = tokio::join!(client.lock("third").acquire(), doubted);
        sleep(200 * MS).await;
        assert_eq!(watched.seen().renewals.load(SeqCst), 2, "both are confirmed");
        assert!(second.is_held() && third.unwrap().is_held());
    });
    paused(async {
        let (_, client, second) = second().await;
        let lock = client.lock("second");
        let (next, released) = tokio::join!(lock.acquire(), async {
            sleep(MS).await;
            second.release().await
        });
        released.unwrap();
        let next = next.unwrap();
        assert_eq!(client.held(), 1, "handed off");
        next.release().await.unwrap();
        assert_eq!(client.held(), 0);
    });
    paused(async {
        let (_, client, second) = second().await;
        let report = client.shutdown(SEC).await;
        assert_eq!((report.lost, report.unconfirmed), (1, 0));
        assert!(!second.is_held());
    });
    paused(async {
        let (_, client, second) = second().await;
        let started = Instant::now();
        let (report, ()) = tokio::join!(client.shutdown(60 * SEC), async {
            sleep(SEC).await;
            second.release().await.unwrap();
        });
        assert_eq!((report.lost, started.elapsed() < 2 * SEC), (0, true));
    });
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

#[test]
fn many_holds_survive_a_distant_store() {
    paused(async {
        let (watched, client) = watched().await;
        let guards = many_short(&client).await;
        // Two seconds for all of them.
        watched.seen().slow_answers.store(200, SeqCst);
        sleep(10 * SEC).await;
        let lost = guards.iter().filter(|guard| !guard.is_held()).count();
        assert_eq!((guards.len(), lost), (10_240, 0));
    });
}

#[test]
fn hold_survives_a_store_that_takes_longer_than_a_reply_is_waited_for() {
    paused(async {
        let (watched, client) = watched().await;
        // The first reply is waited for a sixth of what is left: 110 ms.
        watched.seen().slow_answers.store(150, SeqCst);
        let guard = client.lock("k").lease(SEC).acquire().await.unwrap();
        sleep(10 * SEC).await;
        assert!(guard.is_held(), "{:?}", guard.state());
        guard.release().await.unwrap();
    });
}
