//! What `#[distributed_lock]` promises while a function runs, and when it ends.

use std::future::pending;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use dlock::{Error, LockClient, distributed_lock};
use futures_util::FutureExt;
use tokio::time::{sleep, timeout};

/// Whether the lock has no holder, as seen from outside.
async fn is_free(client: &LockClient, key: &str) -> bool {
    client.lock(key).try_acquire().await.is_ok()
}

/// Counts the holders, and remembers when there were two.
#[derive(Default)]
struct Room {
    inside: AtomicUsize,
    crowded: AtomicBool,
    visits: AtomicUsize,
}

impl Room {
    async fn visit(&self) {
        if self.inside.fetch_add(1, Ordering::SeqCst) > 0 {
            self.crowded.store(true, Ordering::SeqCst);
        }
        sleep(Duration::from_millis(10)).await;
        self.inside.fetch_sub(1, Ordering::SeqCst);
        self.visits.fetch_add(1, Ordering::SeqCst);
    }
}

mod frames {
    use super::*;

    #[distributed_lock(key = "order:{id}", lock = client)]
    async fn outer(client: &LockClient, id: u64, room: &Room) -> Result<(), Error> {
        inner(client, id, room).await?;
        inner(client, id, room).await
    }

    #[distributed_lock(key = "order:{id}", lock = client, wait = try)]
    async fn inner(client: &LockClient, id: u64, room: &Room) -> Result<(), Error> {
        room.visit().await;
        Ok(())
    }

    #[tokio::test(start_paused = true)]
    async fn a_nested_call_enters_the_lock_that_its_caller_holds() {
        let (client, room) = (LockClient::memory(), Room::default());
        timeout(Duration::from_secs(60), outer(&client, 1, &room))
            .await
            .expect("it waits for itself")
            .unwrap();
        assert_eq!(room.visits.load(Ordering::SeqCst), 2);
        assert!(is_free(&client, "order:1").await);
    }
}

mod body {
    use super::*;

    #[distributed_lock(key = "{key}", lock = client, wait = try)]
    async fn run(client: &LockClient, key: &str, ran: &AtomicBool) -> Result<(), Error> {
        ran.store(true, Ordering::SeqCst);
        Ok(())
    }

    #[tokio::test]
    async fn does_not_run_when_the_lock_is_busy() {
        let (client, ran) = (LockClient::memory(), AtomicBool::new(false));
        let held = client.lock("k").acquire().await.unwrap();
        let error = run(&client, "k", &ran).await.unwrap_err();
        assert!(error.is_busy(), "{error}");
        assert!(!ran.load(Ordering::SeqCst));
        drop(held);
        run(&client, "k", &ran).await.unwrap();
        assert!(ran.load(Ordering::SeqCst));
    }

    #[tokio::test]
    async fn does_not_run_under_a_key_that_is_none() {
        let (client, ran) = (LockClient::memory(), AtomicBool::new(false));
        for key in ["", "a{b", "a}b", "a\nb", &"x".repeat(513)] {
            let error = run(&client, key, &ran).await.unwrap_err();
            assert!(matches!(error, Error::InvalidKey { .. }), "{key:?}: {error}");
        }
        assert!(!ran.load(Ordering::SeqCst));
    }

    #[tokio::test(start_paused = true)]
    async fn waits_as_long_as_it_may_and_no_longer() {
        #[distributed_lock(key = "k", lock = client, wait = "3s")]
        async fn wait(client: &LockClient) -> Result<(), Error> {
            Ok(())
        }
        let client = LockClient::memory();
        let _held = client.lock("k").acquire().await.unwrap();
        let began = tokio::time::Instant::now();
        assert!(wait(&client).await.unwrap_err().is_busy());
        let waited = began.elapsed();
        assert!(
            waited >= Duration::from_secs(3) && waited < Duration::from_secs(4),
            "{waited:?}"
        );
    }

    #[tokio::test]
    async fn runs_inside_the_hold() {
        #[distributed_lock(key = "k", lock = client)]
        async fn look(client: &LockClient) -> Result<bool, Error> {
            Ok(dlock::current().is_some_and(|held| held.is_held()))
        }
        let client = LockClient::memory();
        assert!(look(&client).await.unwrap());
        assert!(dlock::current().is_none());
    }
}

mod release {
    use super::*;

    #[derive(Clone, Copy)]
    enum Way {
        End,
        Return,
        Question,
        Panic,
        Never,
    }

    #[distributed_lock(key = "k", lock = client)]
    async fn leave(client: &LockClient, way: Way) -> Result<u32, anyhow::Error> {
        sleep(Duration::from_millis(1)).await;
        match way {
            Way::End => {}
            Way::Return => return Ok(2),
            Way::Question => {
                "x".parse::<u32>()?;
            }
            Way::Panic => panic!("on purpose"),
            Way::Never => pending().await,
        }
        Ok(1)
    }

    #[tokio::test(start_paused = true)]
    async fn comes_however_the_body_ends() {
        let client = LockClient::memory();
        for (way, ends) in [(Way::End, Some(1)), (Way::Return, Some(2)), (Way::Question, None)] {
            match (leave(&client, way).await, ends) {
                (Ok(value), Some(ends)) => assert_eq!(value, ends),
                (Err(error), None) => assert!(error.is::<std::num::ParseIntError>(), "{error}"),
                (outcome, _) => panic!("{outcome:?}"),
            }
            assert!(is_free(&client, "k").await);
        }
        let call = std::panic::AssertUnwindSafe(leave(&client, Way::Panic));
        assert!(call.catch_unwind().await.is_err());
        assert!(is_free(&client, "k").await);
        let cut = timeout(Duration::from_secs(5), leave(&client, Way::Never)).await;
        assert!(cut.is_err());
        assert!(is_free(&client, "k").await);
    }
}

mod loss {
    use super::*;

    #[distributed_lock(key = "k", lock = client)]
    async fn dropped(client: &LockClient, went_on: &AtomicBool) -> Result<u32, Error> {
        client.force_release("k").await?;
        sleep(Duration::from_secs(120)).await;
        went_on.store(true, Ordering::SeqCst);
        Ok(1)
    }

    #[distributed_lock(key = "k", lock = client, on_lost = ignore)]
    async fn goes_on(client: &LockClient, went_on: &AtomicBool) -> Result<bool, Error> {
        client.force_release("k").await?;
        sleep(Duration::from_secs(120)).await;
        went_on.store(true, Ordering::SeqCst);
        Ok(dlock::current().is_some_and(|held| held.is_held()))
    }

    #[tokio::test(start_paused = true)]
    async fn drops_the_body_and_tells_the_caller() {
        let (client, went_on) = (LockClient::memory(), AtomicBool::new(false));
        let error = dropped(&client, &went_on).await.unwrap_err();
        assert!(error.is_lost(), "{error}");
        assert!(!went_on.load(Ordering::SeqCst));
        assert!(is_free(&client, "k").await);
    }

    #[tokio::test(start_paused = true)]
    async fn leaves_the_body_alone_if_it_is_told_to() {
        let (client, went_on) = (LockClient::memory(), AtomicBool::new(false));
        let still_held = goes_on(&client, &went_on).await.unwrap();
        assert!(went_on.load(Ordering::SeqCst));
        assert!(!still_held, "the body can ask, and is told");
    }
}

mod errors {
    use super::*;

    #[derive(Debug, PartialEq)]
    enum Outcome {
        Done,
        Busy,
        Failed(String),
    }

    fn failed(error: Error) -> Outcome {
        Outcome::Failed(error.to_string())
    }

    fn busy(error: Error) -> Outcome {
        assert!(error.is_busy());
        Outcome::Busy
    }

    #[distributed_lock(key = "{key}", lock = client, wait = try, on_error = failed)]
    async fn without_result(client: &LockClient, key: &str) -> Outcome {
        Outcome::Done
    }

    #[distributed_lock(key = "{key}", lock = client, wait = try, on_error = failed, on_busy = self::busy)]
    async fn skipping(client: &LockClient, key: &str) -> Outcome {
        Outcome::Done
    }

    fn skipped<T: Default>(_: Error) -> Result<T, anyhow::Error> {
        Ok(T::default())
    }

    #[distributed_lock(key = "{key}", lock = client, wait = try, on_busy = skipped)]
    async fn skipping_only(client: &LockClient, key: &str) -> Result<u32, anyhow::Error> {
        Ok(7)
    }

    #[tokio::test]
    async fn on_error_turns_every_failure_into_a_value() {
        let client = LockClient::memory();
        assert_eq!(without_result(&client, "k").await, Outcome::Done);
        let _held = client.lock("k").acquire().await.unwrap();
        assert!(matches!(without_result(&client, "k").await, Outcome::Failed(_)));
        assert!(matches!(without_result(&client, "").await, Outcome::Failed(_)));
    }

    #[tokio::test]
    async fn on_busy_comes_before_on_error() {
        let client = LockClient::memory();
        assert_eq!(skipping(&client, "k").await, Outcome::Done);
        let _held = client.lock("k").acquire().await.unwrap();
        assert_eq!(skipping(&client, "k").await, Outcome::Busy);
        assert!(matches!(skipping(&client, "").await, Outcome::Failed(_)));
    }

    #[tokio::test]
    async fn on_busy_alone_leaves_the_other_errors_to_from() {
        let client = LockClient::memory();
        assert_eq!(skipping_only(&client, "k").await.unwrap(), 7);
        let _held = client.lock("k").acquire().await.unwrap();
        assert_eq!(skipping_only(&client, "k").await.unwrap(), 0);
        let error = skipping_only(&client, "").await.unwrap_err();
        assert!(
            matches!(error.downcast_ref(), Some(Error::InvalidKey { .. })),
            "{error}"
        );
    }

    #[tokio::test]
    async fn boxed_errors_and_anyhow_hold_the_lock_s_error() {
        #[distributed_lock(key = "{key}", lock = client, on_lost = cancel, kind = lock)]
        async fn boxed(
            client: &LockClient,
            key: &str,
        ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
            Ok(())
        }
        #[distributed_lock(key = "{key}", lock = client)]
        async fn anyhowed(client: &LockClient, key: &str) -> anyhow::Result<()> {
            Ok(())
        }
        let client = LockClient::memory();
        assert!(boxed(&client, "").await.unwrap_err().is::<Error>());
        assert!(anyhowed(&client, "").await.unwrap_err().is::<Error>());
    }
}
