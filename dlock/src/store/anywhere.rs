//! Timers of futures that move from one runtime to another.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use tokio::task::unconstrained;
use tokio::time::{Instant, sleep_until};

/// Waits for a future until this time; `None` if it is not ready by then.
///
/// Unlike [`tokio::time::timeout_at`], it may be polled by one runtime after another. The futures that a store returns need that:
/// a step that its caller drops is finished by the client, on the client's runtime, and that of the caller may have ended by
/// then. A timer of a runtime that has ended panics.
///
/// ```
/// use dlock::store::{Reason, StoreError, StoreFuture, timeout_anywhere};
/// use std::time::Duration;
/// use tokio::sync::oneshot;
/// use tokio::time::Instant;
///
/// /// The reply of a connection's task, in bounded time.
/// fn reply(answer: oneshot::Receiver<u64>) -> StoreFuture<u64> {
///     let deadline = Instant::now() + Duration::from_secs(1);
///     Box::pin(async move {
///         match timeout_anywhere(deadline, answer).await {
///             Some(Ok(answer)) => Ok(answer),
///             Some(Err(_)) => Err(StoreError::not_done(Reason::Closed, "the connection has ended")),
///             None => Err(StoreError::unknown("no answer within a second")),
///         }
///     })
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// # let (sender, answer) = oneshot::channel();
/// # sender.send(7).unwrap();
/// # assert_eq!(reply(answer).await.unwrap(), 7);
/// # }
/// ```
///
/// # Panics
///
/// Polled outside of a tokio runtime, unless the future is ready.
pub async fn timeout_anywhere<F: Future>(deadline: Instant, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut over = pin!(sleep_anywhere(deadline));
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => over.as_mut().poll(cx).map(|()| None),
    })
    .await
}

/// Sleeps on whichever runtime polls: each poll makes a timer there.
pub(crate) async fn sleep_anywhere(until: Instant) {
    let mut timer = None;
    poll_fn(|cx| {
        // A future that has used up its turn must not keep the time from being over.
        let fresh = timer.insert(Box::pin(unconstrained(sleep_until(until))));
        fresh.as_mut().poll(cx)
    })
    .await;
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::time::Duration;

    use futures_util::FutureExt;
    use tokio::runtime::{Builder, Runtime};
    use tokio::sync::oneshot;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn a_runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn future_is_awaited_until_the_deadline_and_no_longer() {
        let begun = Instant::now();
        let (reply, answer) = oneshot::channel();
        tokio::spawn(async move {
            sleep_until(begun + 5 * MS).await;
            reply.send(7).unwrap();
        });
        assert_eq!(timeout_anywhere(begun + 9 * MS, answer).await, Some(Ok(7)));
        assert_eq!(begun.elapsed(), 5 * MS);
        assert_eq!(timeout_anywhere(begun + 9 * MS, pending::<()>()).await, None);
        assert_eq!(begun.elapsed(), 9 * MS);
        // What is ready is never late.
        assert_eq!(timeout_anywhere(begun, async { 8 }).await, Some(8));
    }

    #[test]
    fn wait_goes_on_when_its_runtime_ends() {
        let (first, second) = (a_runtime(), a_runtime());
        let (reply, answer) = oneshot::channel();
        let soon = Instant::now() + 50 * MS;
        let mut answered = Box::pin(timeout_anywhere(soon + 600_000 * MS, answer));
        let mut late = Box::pin(timeout_anywhere(soon, pending::<()>()));
        first.block_on(async {
            assert!(answered.as_mut().now_or_never().is_none());
            assert!(late.as_mut().now_or_never().is_none());
        });
        drop(first);
        second.block_on(async {
            assert_eq!(late.await, None);
            reply.send(7).unwrap();
            assert_eq!(answered.await, Some(Ok(7)));
        });
    }

    /// A future that is woken for ever, and never ready.
    #[tokio::test]
    async fn time_is_over_although_the_future_uses_up_its_turn() {
        let busy = async {
            loop {
                tokio::task::consume_budget().await;
            }
        };
        assert_eq!(timeout_anywhere(Instant::now() + MS, busy).await, None);
    }
}
