//! After a while of everything at once nothing is left: see [`dlock_tests::soak`], which does the same for longer.

use std::time::Duration;

use dlock_tests::soak::Soak;

#[tokio::test(flavor = "multi_thread")]
async fn after_a_while_of_everything_at_once_nothing_is_left() {
    let soak = Soak::start(48).await;
    let first = soak.round(Duration::from_secs(2)).await;
    let last = soak.round(Duration::from_secs(4)).await;
    assert_eq!((first.errors, last.errors), (0, 0), "{last}");
    assert_eq!((last.subscriptions, last.keys.len()), (0, 0), "{last}");
    // For steps, and for notifications once something waited.
    assert!(last.connections <= 2, "{first}\n{last}");
    assert!(last.operations > first.operations && last.acquired > 0, "{last}");
}
