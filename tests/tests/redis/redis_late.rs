//! A command that is held back past its client's timeout and let go later finds a world that has moved on:
//! it leaves no ghost hold, touches no successor and prolongs nothing.

use std::time::Duration;

use dlock::Error;
use dlock_tests::Held;
use dlock_tests::faults::{TIMEOUT, in_rounds, is_back, is_confirmed, is_free_soon, setting, step, within};

const MS: Duration = Duration::from_millis(1);

/// What a round says in which a step that fails was not even sent in its time.
const TOO_LATE: &str = "its time was over before the step was sent";

fn is_unknown<T>(outcome: &Result<T, Error>) -> bool {
    matches!(outcome, Err(Error::OutcomeUnknown { .. }))
}

/// Lets the command go on and waits until the server has dealt with it.
async fn let_go(held: Held) {
    held.release();
    held.answered().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquire_that_the_server_takes_for_timely_is_still_undone() {
    in_rounds(
        "the answer of the server's clock is slow, and in time",
        async || {
            let (store, proxy, a, b) = setting().await;
            // The one answer that the client has of the server's clock was long under way, so it believes that the
            // server is ahead, and allows the acquire more time than it has itself.
            let slow = proxy.hold(1, step("inspect"));
            let look = tokio::spawn({
                let a = a.clone();
                async move { a.inspect("another").await }
            });
            slow.caught().await;
            tokio::time::sleep(TIMEOUT - 60 * MS).await;
            slow.release();
            if look.await.unwrap().is_err() {
                return Err("the answer was too late");
            }

            let held = proxy.hold(1, step("acquire"));
            let once = a.lock("k").try_acquire().await;
            if !held.fired() {
                return Err(TOO_LATE);
            }
            assert!(is_unknown(&once), "{once:?}");
            tokio::time::sleep(100 * MS).await;
            let_go(held).await;
            is_free_soon(&b, "k").await;
            is_back(&a).await;
            store.assert_clean(&[&a, &b]).await;
            Ok(())
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_forced_release_ends_no_later_hold() {
    in_rounds("the forced release is sent", async || {
        let (store, proxy, a, b) = setting().await;
        let first = b.lock("k").acquire().await.unwrap();
        let held = proxy.hold(1, step("force"));
        let forced = within(TIMEOUT, "force_release", a.force_release("k")).await;
        if !held.fired() {
            return Err(TOO_LATE);
        }
        assert!(is_unknown(&forced), "{forced:?}");
        // What is known of the server's clock is as exact as a round trip, and that may have been a long one.
        tokio::time::sleep(TIMEOUT).await;
        first.release().await.unwrap();
        let next = b.lock("k").try_acquire().await.unwrap();
        let_go(held).await;
        is_confirmed(&next).await;
        next.release().await.unwrap();
        is_back(&a).await;
        store.assert_clean(&[&a, &b]).await;
        Ok(())
    })
    .await;
}
