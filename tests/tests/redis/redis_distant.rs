//! A server that is far away: no caller waits for the round trip of another.

use std::time::Duration;

use dlock_tests::faults::{is_free, patient, setting, step};
use dlock_tests::{Direction, eventually};

const MS: Duration = Duration::from_millis(1);

#[tokio::test]
async fn a_step_waits_for_no_round_trip_of_others() {
    let (store, proxy, _, near) = setting().await;
    proxy.delay(Direction::ToServer, 10 * MS, Duration::ZERO);
    let far = patient(&proxy.url()).await;
    // It knows how far that is by its first round trip.
    is_free(&far, "first").await;
    proxy.forget();
    proxy.block(Direction::ToClient);
    let mut waiting = Vec::new();
    for number in 0..8 {
        let lock = far.lock(format!("{number}"));
        waiting.push(tokio::spawn(async move { lock.acquire().await }));
        let seen = || proxy.count(step("acquire")) == number + 1;
        eventually("each goes out though none before it is answered", async || seen()).await;
    }
    proxy.unblock(Direction::ToClient);
    for waits in waiting {
        waits.await.unwrap().unwrap().release().await.unwrap();
    }
    store.assert_clean(&[&far, &near]).await;
}
