//! Cancelled acquires on a real server behind a slow network: an acquire that is dropped at any poll leaves no lock, no
//! position in the queue and no subscription, and takes no other waiter's wake-up.

use std::time::Duration;

use dlock_tests::faults::{Pair, patient, setting};
use dlock_tests::{Direction, Store, eventually, settle};

const MS: Duration = Duration::from_millis(1);
/// One way through the network.
const DELAY: Duration = Duration::from_millis(5);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_that_gives_up_takes_its_subscription_and_position_along() {
    let (store, proxy, _a, b) = setting().await;
    let a = patient(&proxy.url()).await;
    proxy.delay(Direction::Both, DELAY, Duration::ZERO);
    for pair in Pair::ALL {
        let guard = pair.held(&b, "k").acquire().await.unwrap();
        for wait in [1, 10, 20, 30, 40, 60, 100] {
            let lock = pair.asked(&a, "k").wait(wait * MS);
            let error = lock.acquire().await.unwrap_err();
            // The shortest waits end before the server's reply is there.
            assert!(error.is_busy() || error.is_unavailable(), "{error}");
            assert_eq!(a.waited_for(), 0);
            eventually(
                "there is no listener any more, and the queue is empty",
                || async {
                    let server = store.as_server();
                    server.pubsub_channels().await.is_empty()
                        && server.query::<usize>(&["LLEN", "redisson_lock_queue:{k}"]).await == 0
                        && server.query::<usize>(&["ZCARD", "{k}:dlock:writers"]).await == 0
                },
            )
            .await;
        }
        guard.release().await.unwrap();
    }
    store.assert_clean(&[&a, &b]).await;
}

/// A dropped acquire stands before the next attempt of its process, as a dropped guard does: the attempt never finds the
/// lock busy because of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_acquire_is_undone_before_the_next_attempt() {
    let store = Store::server().await;
    let client = patient(&store.as_server().url()).await;
    for round in 0..50 {
        for pair in Pair::ALL {
            let lock = pair.asked(&client, "k");
            let mut acquire = Box::pin(lock.acquire());
            if futures_util::poll!(&mut acquire).is_ready() {
                continue;
            }
            drop(acquire);
            let next = lock.try_acquire().await;
            let guard = next.unwrap_or_else(|error| panic!("{pair}, {round}: {error}"));
            guard.release().await.unwrap();
        }
        let multi = client.multi(["k", "l", "m"]);
        let mut acquire = Box::pin(multi.acquire());
        // On a fast machine it is there already, and released.
        let _ = futures_util::poll!(&mut acquire);
        drop(acquire);
        let guards = multi.try_acquire().await;
        let guards = guards.unwrap_or_else(|error| panic!("several, {round}: {error}"));
        guards.release().await.unwrap();
    }
    settle().await;
    store.assert_clean(&[&client]).await;
}
