//! How users await what they have asked for.

use std::future::Future;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use futures_util::future::{Either, select};

use super::sleep;
use crate::plan::Habit;
use crate::world::with;

/// Polls a future as a user with this habit does; `None` where it was dropped.
pub(super) async fn with_habit<F: Future>(make: impl Fn() -> F, habit: Option<Habit>) -> Option<F::Output> {
    let future = make();
    match habit {
        None => Some(future.await),
        Some(Habit::DropsAfter(after)) => tokio::time::timeout(Duration::from_millis(after), future)
            .await
            .ok(),
        Some(Habit::Races) => {
            let (one, other) = (pin!(future), pin!(make()));
            with(|world| {
                world
                    .counts
                    .sometimes("two acquires of which the first was taken")
            });
            match select(one, other).await {
                Either::Left((outcome, _)) | Either::Right((outcome, _)) => Some(outcome),
            }
        }
        Some(Habit::DropsAfterPolls(most)) => {
            let mut future = pin!(future);
            let mut polls = 0;
            std::future::poll_fn(|cx| {
                if let Poll::Ready(outcome) = future.as_mut().poll(cx) {
                    return Poll::Ready(Some(outcome));
                }
                polls += 1;
                if polls >= most {
                    Poll::Ready(None)
                } else {
                    Poll::Pending
                }
            })
            .await
        }
        Some(Habit::PollsNot { after, lasts }) => {
            let mut future = pin!(future);
            let mut polls = 0;
            let early = std::future::poll_fn(|cx| {
                if polls >= after {
                    return Poll::Ready(None);
                }
                polls += 1;
                future.as_mut().poll(cx).map(Some)
            })
            .await;
            if early.is_some() {
                return early;
            }
            with(|world| world.counts.sometimes("an acquire that was kept unpolled"));
            sleep(lasts).await;
            Some(future.await)
        }
    }
}
