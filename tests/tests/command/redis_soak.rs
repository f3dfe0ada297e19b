//! After a while of everything at once nothing is left: see [`dlock_tests::soak`], which does the same for longer.

use std::time::Duration;

use dlock_tests::faults::in_rounds;
use dlock_tests::soak::Soak;

#[tokio::test(flavor = "multi_thread")]
async fn after_a_while_of_everything_at_once_nothing_is_left() {
    let soak = Soak::start(48).await;
    let first = in_rounds("something waits, on a connection of its own", async || {
        let round = soak.round(Duration::from_secs(2)).await;
        match round.connections {
            ..2 => Err(round.to_string()),
            _ => Ok(round),
        }
    })
    .await;
    let last = soak.round(Duration::from_secs(4)).await;
    assert_eq!((first.errors, last.errors), (0, 0), "{last}");
    assert_eq!((last.subscriptions, last.keys.len()), (0, 0), "{last}");
    assert_eq!(first.connections, last.connections, "{first}\n{last}");
    assert!(last.operations > first.operations && last.acquired > 0, "{last}");
}
