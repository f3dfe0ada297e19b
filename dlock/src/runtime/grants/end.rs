//! How the end of a grant is signalled, and why it has ended.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use super::Grant;
use super::room::Wakeups;
use super::span::{self, HoldSpan};
use crate::Loss;
use crate::base::moment::Moment;
use crate::base::report::{Intervention, LossReason};
use crate::base::waking::cancel;
use crate::runtime::emit::meter::Ended;
use crate::runtime::emit::trace::{self, ObservedSpan};
use crate::store::{Reason, StoreError};

/// Signals of the end, created on demand.
#[derive(Debug, Default)]
pub(super) struct Signals {
    /// Cancelled when the grant has ended, by loss or by release.
    over: CancellationToken,
    /// Cancelled when the holder is asked to stop; created once something waits for that.
    revoked: OnceLock<CancellationToken>,
    intervention: OnceLock<Intervention>,
    /// The last failure of a renewal, or of the release, and its time.
    failure: Mutex<Option<(Moment, StoreError)>>,
    /// Why it was lost, as far as this process knows.
    reason: OnceLock<LossReason>,
    /// Waiters for the end of this grant or of another.
    also: Mutex<Also>,
}

#[derive(Debug, Default)]
struct Also {
    ends: Vec<Weak<FirstEnd>>,
    /// How many entries there may be before entries without a waiter are removed.
    room: usize,
}

impl Also {
    fn push(&mut self, end: &Arc<FirstEnd>) {
        if self.ends.len() >= self.room {
            self.ends.retain(|other| other.strong_count() > 0);
            self.room = 2 * self.ends.len().max(8);
        }
        self.ends.push(Arc::downgrade(end));
    }
}

/// Signals the first end among several grants.
#[derive(Debug, Default)]
pub(crate) struct FirstEnd(CancellationToken);

impl FirstEnd {
    pub(crate) fn of<'a>(grants: impl Iterator<Item = &'a Grant>) -> Arc<FirstEnd> {
        let first: Arc<FirstEnd> = Arc::default();
        for grant in grants {
            let (signals, _) = grant.signals();
            signals.also.lock().push(&first);
            // Checked only now, so that an end in between is not missed.
            if grant.signals().1 {
                cancel(&first.0);
            }
        }
        first
    }

    pub(crate) fn token(&self) -> CancellationToken {
        self.0.clone()
    }
}

impl Drop for FirstEnd {
    // Nothing holds or reads these any more, except a waiter that has a token.
    fn drop(&mut self) {
        cancel(&self.0);
    }
}

/// A loss that the holder knows of, and that is not in the log yet.
pub(crate) struct UnreportedLoss {
    reason: LossReason,
    span: Option<ObservedSpan>,
    held: Duration,
}

/// Signals the end of a grant when it is dropped.
pub(crate) struct EndSignal(pub(super) Option<Arc<Signals>>);

impl Drop for EndSignal {
    fn drop(&mut self) {
        tell(self.0.take());
    }
}

impl Grant {
    /// Ends the grant, unless it has ended already, and reports the loss.
    pub(crate) fn lose(&self, loss: Loss) {
        if let Some(unreported) = self.signal_loss(loss) {
            self.report_loss(unreported);
        }
    }

    /// Ends the grant, unless it has ended already, and tells its holder. The loss must be reported then: later, as a log may be
    /// slow, and other holders must learn of theirs.
    pub(crate) fn signal_loss(&self, loss: Loss) -> Option<UnreportedLoss> {
        let mut state = self.state.lock();
        if !state.grant.end(loss) {
            return None;
        }
        #[cfg(dlock_sim)]
        if loss != Loss::Shutdown {
            crate::base::sim::grant_lost((self.issuer.uuid.as_u128(), self.number));
        }
        self.tell_end(state.grant.is_suspect());
        let (signals, head) = (state.room.make_signals(), state.head.take());
        let (deadline, was_suspect) = (state.grant.deadline(), state.grant.is_suspect());
        // The holder may be gone by the time of the report, and its span with it.
        let (span, held) = (state.room.take_span(), Moment::now().since(self.since));
        let mut wakeups = Wakeups::default();
        state.room.close(&mut wakeups);
        drop(state);
        let reason = match loss {
            Loss::Expired if self.renewed => self.why_expired(&signals, deadline, was_suspect),
            _ => LossReason::of(loss),
        };
        let reason = signals.reason.get_or_init(|| reason).clone();
        wakeups.wake();
        tell(Some(signals));
        // The waiters here ask the store now.
        drop(head);
        let span = span.and_then(HoldSpan::of_holder);
        Some(UnreportedLoss { reason, span, held })
    }

    pub(crate) fn report_loss(&self, UnreportedLoss { reason, span, held }: UnreportedLoss) {
        let event = self.loss(&reason);
        span::inside(span.as_ref(), || event.emit());
        self.tell_held_for(held, Ended::Lost);
        if let Some(span) = span {
            trace::hold_ended(&span, Ended::Lost, held);
        }
    }

    /// Cancelled when the grant has ended, by loss or by release.
    pub(crate) fn over(&self) -> CancellationToken {
        let (signals, ended) = self.signals();
        if ended {
            cancel(&signals.over);
        }
        signals.over.clone()
    }

    /// Records that the holder is asked to stop: the lock is not handed off any more. Returns false if it was asked
    /// before, or the grant has ended.
    pub(crate) fn revoke(&self, intervention: Intervention) -> bool {
        let (signals, ended) = self.signals();
        if ended || signals.intervention.set(intervention).is_err() {
            return false;
        }
        self.state.lock().grant.end_handoffs();
        cancel(signals.revoked.get_or_init(CancellationToken::new));
        true
    }

    /// Waits until the holder is asked to stop; `None` once the grant has ended. Cancel safe.
    pub(crate) async fn revoked(&self) -> Option<Intervention> {
        let over = self.over();
        let (signals, _) = self.signals();
        let revoked = signals.revoked.get_or_init(CancellationToken::new);
        tokio::select! {
            biased;
            () = revoked.cancelled() => signals.intervention.get().cloned(),
            () = over.cancelled() => None,
        }
    }

    pub(super) fn signals(&self) -> (Arc<Signals>, bool) {
        let mut state = self.state.lock();
        let signals = state.room.make_signals();
        (signals, state.grant.ended().is_some())
    }

    /// Records a failed renewal, which counts if the lease ends before another one succeeds.
    pub(crate) fn renewal_failed(&self, error: &StoreError) {
        let (now, mut state) = (Moment::now(), self.state.lock());
        // A failure after the end is not its reason.
        if now <= state.grant.deadline() {
            let signals = state.room.make_signals();
            drop(state);
            *signals.failure.lock() = Some((now, error.clone()));
        }
    }

    /// Records a failed release, which is sent again.
    pub(crate) fn release_failed(&self, error: StoreError) {
        let (signals, _) = self.signals();
        *signals.failure.lock() = Some((Moment::now(), error));
    }

    /// Returns the last failure of its release, which began then, if there was one.
    pub(crate) fn release_failure(&self, began: Moment) -> Option<StoreError> {
        let (signals, _) = self.signals();
        let failure = signals.failure.lock().take();
        // An earlier one is that of a renewal.
        failure.filter(|(at, _)| *at >= began).map(|(_, error)| error)
    }

    /// Why the lease expired although it is renewed.
    fn why_expired(&self, signals: &Signals, deadline: Moment, was_suspect: bool) -> LossReason {
        // Failures before the last successful renewal are not the reason.
        let renewed = deadline.earlier_by(self.lease());
        let failure = signals.failure.lock().take();
        match failure.filter(|(at, _)| *at > renewed) {
            Some((_, error)) => because_of(&error),
            None if was_suspect => LossReason::Unanswered("no answer".to_owned()),
            None => LossReason::Stalled,
        }
    }

    /// How it was lost if the lease was over before the store released it.
    pub(crate) fn loss_by_late_release(&self) -> Loss {
        self.state.lock().grant.loss_at_deadline(&self.terms())
    }

    /// Why the lease was over before the store released it.
    pub(crate) fn why_released_late(&self) -> LossReason {
        let loss = self.loss_by_late_release();
        if loss != Loss::Expired || !self.renewed {
            return LossReason::of(loss);
        }
        // Failures before the last successful renewal are not the reason.
        let renewed = Moment::of(self.deadline()).earlier_by(self.lease());
        let (signals, _) = self.signals();
        let failure = signals.failure.lock();
        match failure.as_ref().filter(|(at, _)| *at > renewed) {
            Some((_, error)) => because_of(error),
            None => LossReason::Stalled,
        }
    }

    /// Why it was lost, as far as this process knows.
    pub(crate) fn why_lost(&self, loss: Loss) -> LossReason {
        let (signals, _) = self.signals();
        let known = signals.reason.get().cloned();
        known.unwrap_or_else(|| LossReason::of(loss))
    }
}

/// Why a lease ended of which the store did not hear in time.
fn because_of(error: &StoreError) -> LossReason {
    match error.reason {
        Reason::Unreachable | Reason::Closed => LossReason::Unanswered(error.to_string()),
        _ => LossReason::Refused(error.to_string()),
    }
}

/// Signals that the grant has ended. For callers that hold no mutex.
fn tell(signals: Option<Arc<Signals>>) {
    let Some(signals) = signals else { return };
    cancel(&signals.over);
    let also = std::mem::take(&mut signals.also.lock().ends);
    for first in also.iter().filter_map(Weak::upgrade) {
        cancel(&first.0);
    }
}
