//! The work of a request, that outlives the client.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use dlock::scope::{self, Scope};
use tracing::{Instrument, Span};

use super::claim::{Claim, Owned, Phase, Settlement};
use super::policy::Ending;

pub(super) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Where a piece of work was begun, to be gone on with elsewhere: in the same lock frames, under the same
/// span.
#[derive(Clone)]
pub(super) struct Place {
    scope: Scope,
    span: Span,
}

impl Place {
    pub(super) fn here() -> Place {
        Place {
            scope: scope::current(),
            span: Span::current(),
        }
    }

    /// Has the work done in a task that nobody awaits.
    pub(super) fn go_on<F>(&self, claim: &Arc<Claim>, work: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        claim.spawn(self.scope.wrap(work).instrument(self.span.clone()));
    }
}

/// The course of a request from its claim on to its response. It is polled in place, and dropped unfinished
/// when the client goes away: then it moves to a task. One that panicked is never polled again.
pub(super) struct Work<T: 'static> {
    /// Holds the claim.
    future: Option<BoxFuture<T>>,
    claim: Arc<Claim>,
    place: Place,
    polling: bool,
    detached: bool,
}

impl<T> Work<T> {
    pub(super) fn new(claim: Arc<Claim>, future: impl Future<Output = T> + Send + 'static) -> Work<T> {
        Work {
            future: Some(Box::pin(future)),
            claim,
            place: Place::here(),
            polling: false,
            detached: false,
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
        Poll::Ready(output)
    }
}

impl<T> Drop for Work<T> {
    fn drop(&mut self) {
        let Some(future) = self.future.take() else {
            return;
        };
        let claim = self.claim.clone();
        if self.polling {
            if let Some(owned) = Owned::unsettled(&claim) {
                let settlement = claim.verdict_on_failure(&Ending::Panic);
                claim.spawn(owned.settle_after_failure(settlement));
            }
            drop(future);
            return;
        }
        if self.detached {
            // The runtime ends.
            return;
        }
        let cancel = claim.core.settings.cancel_on_disconnect;
        let settlement = match claim.phase() {
            Phase::Waiting => Settlement::Release,
            Phase::Working if cancel => claim.verdict_on_failure(&Ending::Cancelled),
            _ => {
                claim.core.shared.counters.detached();
                tracing::debug!(
                    record = claim.record.as_str(),
                    "the client of a request went away, its handler runs on"
                );
                let rest: Work<T> = Work {
                    future: Some(future),
                    claim: claim.clone(),
                    place: self.place.clone(),
                    polling: false,
                    detached: true,
                };
                self.place.go_on(&claim, async move { drop(rest.await) });
                return;
            }
        };
        let owned = Owned::unsettled(&claim);
        // First the handler goes, then the claim.
        drop(future);
        if let Some(owned) = owned {
            claim.spawn(owned.settle_after_failure(settlement));
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
