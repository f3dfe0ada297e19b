//! The signal of a loss.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tokio_util::sync::WaitForCancellationFutureOwned;

use crate::api::held::{View, state};
use crate::{Held, HoldState, Loss};

pin_project! {
    /// Waits until a hold is lost, and returns why: the future of [`LockGuard::lost`](crate::LockGuard::lost) and
    /// similar methods.
    ///
    /// It completes at once when the hold is already lost, and with [`Loss::Released`] after a release. It keeps
    /// nothing alive, and can be passed to code that knows nothing of locks.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// # let client = dlock::LockClient::memory();
    /// let guard = client.lock("report").acquire().await?;
    /// let lost = guard.lost();
    /// tokio::spawn(async move { println!("stop working: {}", lost.await) });
    /// guard.release().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    #[derive(Debug)]
    #[must_use = "futures do nothing unless polled"]
    pub struct Lost {
        held: Held,
        #[pin]
        over: Option<WaitForCancellationFutureOwned>,
    }
}

impl Lost {
    pub(crate) fn new(held: Held) -> Lost {
        Lost { held, over: None }
    }
}

impl Future for Lost {
    type Output = Loss;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Loss> {
        let mut this = self.project();
        loop {
            if let HoldState::Lost(loss) = state(this.held.grants()) {
                return Poll::Ready(loss);
            }
            match this.over.as_mut().as_pin_mut() {
                Some(over) => {
                    ready!(over.poll(cx));
                    this.over.set(None);
                }
                None => this.over.set(Some(this.held.over().cancelled_owned())),
            }
        }
    }
}
