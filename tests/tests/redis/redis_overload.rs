//! More requests than a server takes: those that cannot wait are turned away at once and told why, releases
//! and renewals are not, and all is well again when the server is.

use std::time::{Duration, Instant};

use dlock::Error;
use dlock_tests::faults::{hasty_builder, is_back, is_confirmed, is_free};
use dlock_tests::{Store, eventually};
use futures_util::future::join_all;

const SECOND: Duration = Duration::from_secs(1);
/// What one step may take: long enough for the room to be full before the first has waited too long.
const STEP: Duration = Duration::from_secs(3);
const SEATS: usize = 5_000;
const CALLERS: usize = 100_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stands_still_has_only_so_many_waiting_for_it() {
    let store = Store::server().await;
    let server = store.as_server();
    let client = hasty_builder(&server.url())
        .max_queued(SEATS)
        .timeout(STEP)
        .retry_for(60 * SECOND)
        .build()
        .await
        .unwrap();
    let guard = client.lock("held").acquire().await.unwrap();
    let released = client.lock("released").acquire().await.unwrap();
    server.stop();
    let asked = (0..CALLERS).map(|n| tokio::spawn(client.lock(format!("k{n}")).try_acquire()));
    let asked: Vec<_> = asked.collect();
    // It is in line before the room is empty again.
    let release = tokio::spawn(released.release());
    let begun = Instant::now();
    let (mut turned_away, mut others) = (0, 0);
    for outcome in join_all(asked).await {
        match outcome.unwrap() {
            Err(Error::Unreachable { message, .. }) if message.contains("waiting for the server already") => {
                turned_away += 1;
            }
            Err(Error::Unreachable { .. } | Error::OutcomeUnknown { .. }) => others += 1,
            other => panic!("{other:?}"),
        }
    }
    println!(
        "{turned_away} turned away, {others} waited, {:?} in all",
        begun.elapsed()
    );
    // The room is empty again after each step: nine times in half a minute.
    assert!(
        others < CALLERS / 2,
        "{others} waited, {turned_away} were turned away"
    );
    // A caller that has patience is among them again and again, and gets in.
    let patient = tokio::spawn(client.lock("patient").acquire());
    tokio::time::sleep(SECOND).await;
    assert!(!release.is_finished() && !patient.is_finished());
    server.cont();
    release.await.unwrap().expect("no release is turned away");
    patient.await.unwrap().unwrap().release().await.unwrap();
    is_back(&client).await;
    is_confirmed(&guard).await;
    guard.release().await.unwrap();
    // No ghosts: not now and not when all that was under way has arrived.
    eventually("nothing is held", || async {
        server.keys().await == ["dlock:fence"]
    })
    .await;
    tokio::time::sleep(STEP).await;
    assert_eq!(server.keys().await, ["dlock:fence"]);
    is_free(&client, "k1").await;
    store.assert_clean(&[&client]).await;
}

#[tokio::test]
async fn option_that_admits_no_request_is_refused() {
    let store = Store::server().await;
    let error = hasty_builder(&store.as_server().url())
        .max_queued(0)
        .build()
        .await
        .unwrap_err();
    assert!(error.to_string().contains("max_queued"), "{error}");
}

/// On one thread, so that nothing is sent while the list queues what it asks.
#[tokio::test]
async fn list_takes_no_more_room_than_there_is() {
    const LOCKS: usize = 100;
    let store = Store::server().await;
    let url = store.as_server().url();
    let holder = hasty_builder(&url).build().await.unwrap();
    let locks = (0..LOCKS).map(|n| holder.lock(format!("k{n}")).acquire());
    let guards = join_all(locks).await;
    for most in [1, 8] {
        let client = hasty_builder(&url).max_queued(most).build().await.unwrap();
        assert_eq!(client.list("k").await.unwrap().len(), LOCKS);
    }
    drop(guards);
}
