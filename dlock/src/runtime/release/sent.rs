//! A release that was sent to the store, until it is over.

use std::future::{Future, pending};
use std::ops::ControlFlow;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::Instant;

use super::{RUNTIME_ENDED, Told, unknown};
use crate::base::clock;
use crate::base::lock_id::LockId;
use crate::base::moment::Moment;
use crate::base::observed::observed;
use crate::base::report::LossReason;
use crate::base::waking::waking;
use crate::engine::fairness::{Notified, ReleaseReplied};
use crate::engine::release::{self, Release, ReleaseAction, ReleaseReport};
use crate::runtime::calls::{called, poll_step};
use crate::runtime::client::Shared;
use crate::runtime::emit::Event;
use crate::runtime::emit::meter::{Ended, Meter, Operation};
use crate::runtime::grants::Grant;
use crate::runtime::outside::is_outside;
use crate::store::{ReleaseReply, ReleaseRequest, StoreError, StoreFuture, sleep_anywhere};
use crate::{Error, LockKey, Loss};

/// Completes with the outcome; sends the release again where that helps.
pub(super) struct SentRelease {
    shared: Arc<Shared>,
    request: ReleaseRequest,
    release: Release,
    told: Option<Told>,
    /// The grant whose last hold has left, and how.
    held: Option<(Arc<Grant>, Ended)>,
    reply: StoreFuture<ReleaseReply>,
    sent: Instant,
    /// The pause before it is sent again.
    pause: Option<Pause>,
    /// Whether its outcome was returned.
    is_over: bool,
}

type Pause = Pin<Box<dyn Future<Output = bool> + Send>>;

impl SentRelease {
    /// Sends a release: it takes its position in the store's queue now.
    pub(super) fn send(
        shared: Arc<Shared>,
        request: ReleaseRequest,
        release: Release,
        told: Option<Told>,
        held: Option<(Arc<Grant>, Ended)>,
    ) -> SentRelease {
        let reply = call_release(&shared, &request.key, request.clone());
        SentRelease {
            shared,
            request,
            release,
            told,
            held,
            reply,
            sent: clock::now(),
            pause: None,
            is_over: false,
        }
    }

    fn send_again(&mut self) {
        let keep_for = self.release.sends(Moment::now());
        let again = ReleaseRequest {
            keep_for,
            ..self.request.clone()
        };
        self.reply = call_release(&self.shared, &self.request.key, again);
        self.sent = clock::now();
    }

    /// Handles a reply: returns the outcome, or the pause before it is sent again.
    fn replied(
        &mut self,
        reply: Result<ReleaseReply, StoreError>,
    ) -> ControlFlow<Result<(), Error>, Option<Duration>> {
        let SentRelease {
            shared,
            request,
            release,
            told,
            held,
            sent,
            ..
        } = self;
        shared.calls.ended(&reply);
        match held {
            Some((grant, _)) => {
                (grant.series.client()).request_ended(Operation::Release, &reply, *sent);
            }
            None => observed(|| (shared.meter.client()).request_ended(Operation::Release, &reply, *sent)),
        }
        let told = told.take();
        let kept = told.as_ref().and_then(Told::kept);
        if !tells_receivers(shared, request, told, &reply) {
            let receivers = release::listeners(&reply).unwrap_or(0);
            lets_others_go_first(shared, request, receivers, release.sent());
        }
        if let Some(kept) = kept {
            kept.answered();
        }
        let now = Moment::now();
        match release.handle(reply, now) {
            ReleaseAction::Report(report) => {
                if matches!(report, ReleaseReport::Failed(_)) {
                    let held_until = release.store_has_it_until(now, shared.settings.timeout);
                    shared.given_up.add(held_until, now);
                }
                if let Some((grant, ended)) = held {
                    match report {
                        ReleaseReport::Released | ReleaseReport::ReleasedBefore => grant.tell_held(*ended),
                        ReleaseReport::Gone => grant.tell_lost(&LossReason::Gone),
                        ReleaseReport::Expired => grant.tell_lost(&grant.why_released_late()),
                        ReleaseReport::RanOut | ReleaseReport::Failed(_) => grant.tell_held(Ended::Lost),
                    }
                }
                let late = held
                    .as_ref()
                    .map_or(Loss::Expired, |(grant, _)| grant.loss_by_late_release());
                ControlFlow::Break(reported(&shared.meter, report, request, late))
            }
            ReleaseAction::Repeat { pause, failure } => {
                Event::ReleaseRepeated {
                    key: &request.key,
                    grant: request.grant,
                    error: &failure,
                }
                .emit();
                if let Some((grant, _)) = held {
                    grant.release_failed(failure);
                }
                ControlFlow::Continue(pause)
            }
        }
    }
}

impl Future for SentRelease {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        loop {
            if let Some(pause) = &mut this.pause {
                if !ready!(pause.as_mut().poll(cx)) {
                    return Poll::Ready(Err(unknown(
                        this.request.kind,
                        &this.request.key,
                        RUNTIME_ENDED.to_owned(),
                    )));
                }
                this.pause = None;
                this.send_again();
            }
            let reply = ready!(poll_step(&mut this.reply, cx, &this.request.key));
            // What the store keeps for it, the next request may need.
            this.reply = Box::pin(pending());
            match this.replied(reply) {
                ControlFlow::Break(outcome) => {
                    this.is_over = true;
                    return Poll::Ready(outcome);
                }
                ControlFlow::Continue(None) => this.send_again(),
                ControlFlow::Continue(Some(pause)) => {
                    this.pause = Some(Box::pin(pauses(this.shared.clone(), pause)));
                }
            }
        }
    }
}

impl Drop for SentRelease {
    /// Nothing finishes it any more: the client's runtime has ended. The store may have released the lock, but has not said so.
    fn drop(&mut self) {
        if !self.is_over {
            let (shared, now) = (&self.shared, Moment::now());
            let held_until = self.release.store_has_it_until(now, shared.settings.timeout);
            shared.given_up.add(held_until, now);
        }
    }
}

/// Tells the next waiter how many clients the release has notified. Returns whether that settles which client goes first.
fn tells_receivers(
    shared: &Shared,
    ReleaseRequest { kind, key, .. }: &ReleaseRequest,
    told: Option<Told>,
    reply: &Result<ReleaseReply, StoreError>,
) -> bool {
    let receivers = release::listeners(reply);
    // If it is lost, another process may have it.
    let was_held = matches!(reply, Ok(ReleaseReply::Released { .. }));
    match told {
        Some(Told::Followed) => {
            let known = receivers.filter(|_| was_held);
            (shared.fairness).record_receivers(&LockId::new(*kind, key), known)
        }
        Some(Told::Awaited { by, .. }) if reply.is_ok() => {
            let at = Moment::now();
            let reply = ReleaseReplied {
                was_held,
                receivers,
                at,
            };
            let mut is_told = false;
            waking(|| is_told = by.send(reply).is_ok());
            is_told
        }
        _ => false,
    }
}

/// Lets those go first that the release has notified, if no caller of this process waits.
fn lets_others_go_first(
    shared: &Shared,
    ReleaseRequest { kind, key, .. }: &ReleaseRequest,
    receivers: u64,
    sent: Moment,
) {
    // A queue of the store cannot be jumped.
    if receivers == 0 || kind.waits_in_store() {
        return;
    }
    let of = LockId::new(*kind, key);
    // Waiters of this process were notified too, and compete with the others from now on.
    let waiters = shared.waiters.of(&of);
    if waiters.any(&of) {
        return;
    }
    match receivers.saturating_sub(waiters.take_own_receivers(&of, sent)) {
        0 if waiters.any_on_other_side(&of) => shared.fairness.released(&of, sent, Notified::OtherSide),
        0 => {}
        others => shared.fairness.released(&of, sent, Notified::Clients(others)),
    }
}

/// Calls the store, at this time.
fn call_release(shared: &Shared, key: &LockKey, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
    let store = shared.store.clone();
    called(key, || store.release(request))
}

/// The result for the caller of a release, counted. `late` is the loss if it came after the end of the lease.
fn reported(meter: &Meter, report: ReleaseReport, request: &ReleaseRequest, late: Loss) -> Result<(), Error> {
    let ReleaseRequest { kind, key, grant, .. } = request;
    let lost = |loss| Error::Lost {
        kind: *kind,
        key: key.clone(),
        loss,
    };
    match report {
        ReleaseReport::Released | ReleaseReport::ReleasedBefore => Ok(()),
        ReleaseReport::Gone => Err(lost(Loss::Gone)),
        ReleaseReport::Expired => Err(lost(late)),
        ReleaseReport::RanOut => Err(unknown(
            *kind,
            key,
            "its lease expired in the meantime".to_owned(),
        )),
        ReleaseReport::Failed(error) => {
            Event::ReleaseFailed {
                meter,
                key,
                grant: *grant,
                error: &error,
            }
            .emit();
            Err(error.into_error(&format!("the release of {}", kind.noun()), key))
        }
    }
}

/// Pauses before an operation is sent again. Returns false if the client's runtime has ended, or the client itself, and this is
/// polled outside of any other: there are no timers.
pub(crate) async fn pauses(shared: Arc<Shared>, pause: Duration) -> bool {
    let mut over = pin!(sleep_anywhere(Instant::now() + pause));
    std::future::poll_fn(|cx| {
        if shared.has_lost_its_runtime() || shared.finished.is_cancelled() && is_outside() {
            return Poll::Ready(false);
        }
        over.as_mut().poll(cx).map(|()| true)
    })
    .await
}
