//! The work of a request, which outlives the client.

use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::future::BoxFuture;

use super::claim::{Claim, Phase};
use super::origin::Origin;
use super::owned::Owned;
use super::policy::Ending;
use super::settlement::Settlement;
use crate::lock::{KeptLocks, LockLost};

/// The course of a request from its claim to its response. It is polled in place, and dropped unfinished when the
/// client goes away: then it moves to a task. After a panic it is never polled again.
pub(super) struct Work<T: 'static> {
    /// Holds the claim.
    future: Option<BoxFuture<'static, T>>,
    claim: Arc<Claim>,
    origin: Origin,
    /// Kept even if a layer in between continues when the lock layer is gone.
    locks: KeptLocks,
    polling: bool,
    detached: bool,
}

impl<T> Work<T> {
    pub(super) fn new(claim: Arc<Claim>, future: impl Future<Output = T> + Send + 'static) -> Work<T> {
        Work {
            future: Some(Box::pin(future)),
            locks: claim.locks.keep_rest(),
            claim,
            origin: Origin::here(),
            polling: false,
            detached: false,
        }
    }

    /// Drops the work and has its claim settled; `None` if the handler was not begun. First the handler is dropped,
    /// then the claim; if dropping it panics, of which the panic hook tells, the claim is settled all the same.
    fn end(&mut self, ending: Option<Ending<'static>>) {
        let owned = Owned::unsettled(&self.claim);
        let not_begun = self.claim.beginning.stop(|| {
            let future = self.future.take();
            let _ = catch_unwind(AssertUnwindSafe(|| drop(future)));
        });
        let ending = match ending {
            // An inner layer was still waiting, for a lock; unless something was declared or stored before.
            Some(Ending::Cancelled) if not_begun && self.claim.is_untouched() => None,
            ending => ending,
        };
        match (owned, ending) {
            (Some(owned), Some(ending)) => self.claim.spawn(owned.settle_after_failure(ending)),
            (Some(owned), None) => self.claim.spawn(owned.settle(Settlement::Release)),
            (None, _) => {}
        }
    }

    /// Finishes without the client. A handler whose lock is lost is dropped, as with the client; an answer that exists
    /// is stored all the same.
    async fn go_on(mut self, lost: impl Future<Output = LockLost>) {
        let lost = tokio::select! {
            biased;
            lost = lost => lost,
            _ = &mut self => return,
        };
        match self.claim.phase() {
            Phase::Working => {
                let record = self.claim.lease.record.as_str();
                tracing::warn!(record, error = %lost, "a handler that ran on without its client was stopped");
                self.end(Some(Ending::Cancelled));
            }
            _ => drop(self.await),
        }
    }
}

impl<T> Future for Work<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let this = &mut *self;
        let Some(future) = &mut this.future else {
            panic!("polled after it was done");
        };
        // Still set when it is dropped: it panicked.
        this.polling = true;
        let polled = future.as_mut().poll(cx);
        this.polling = false;
        let output = ready!(polled);
        this.future = None;
        // The lock layer waits for its release.
        this.locks = KeptLocks::default();
        Poll::Ready(output)
    }
}

impl<T> Drop for Work<T> {
    fn drop(&mut self) {
        if self.future.is_none() {
            return;
        }
        let claim = self.claim.clone();
        if self.polling {
            // A service that is asked whether it is ready may panic, and so may the user's `render`.
            let was_begun =
                claim.phase() != Phase::Waiting && !(claim.was_not_begun() && claim.is_untouched());
            return self.end(was_begun.then_some(Ending::Panic));
        }
        if self.detached {
            // The runtime is ending.
            return;
        }
        let stops = claim.core.settings.cancel_on_disconnect || self.locks.is_lost();
        match claim.phase() {
            Phase::Waiting => self.end(None),
            Phase::Working if stops => self.end(Some(Ending::Cancelled)),
            _ => {
                claim.set_detached();
                tracing::debug!(
                    record = claim.lease.record.as_str(),
                    "the client of a request went away; its handler continues"
                );
                let locks = std::mem::take(&mut self.locks);
                let lost = locks.lost();
                let rest: Work<T> = Work {
                    future: self.future.take(),
                    claim: claim.clone(),
                    origin: self.origin.clone(),
                    locks: KeptLocks::default(),
                    polling: false,
                    detached: true,
                };
                self.origin.go_on(&claim, locks, rest.go_on(lost));
            }
        }
    }
}

impl<T> fmt::Debug for Work<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work")
            .field("claim", &self.claim)
            .finish_non_exhaustive()
    }
}
