//! What the store has said of a key that a call waits for, and what the call may report when its wait ends: the one
//! place that decides between "held by another client" and "the store did not answer".
//!
//! A call reports [`Error::NotAcquired`] only if the store said "busy" during that call, or during the turn of the queue
//! head that the call waited behind. A reply that is missing is never "busy".

use std::time::Duration;

use tokio::time::Instant;

use crate::Error;
use crate::base::broken;
use crate::base::clock;
use crate::runtime::acquire::{Attempt, jittered};
use crate::store::{BackendError, Outcome, Reason};

/// A request that is unanswered for this long, and for several times as long as earlier ones took, leaves open what the
/// store would say now.
const SILENCE: Duration = Duration::from_millis(250);

/// What is known of a key. Each call has its own; the queue of the key has that of its head.
#[derive(Debug, Clone, Default)]
pub(crate) struct Evidence {
    busy: Option<Busy>,
    /// The failures in a row since then: the request that failed first, and the last failure.
    failing: Option<(Instant, BackendError)>,
    /// The request whose reply is missing.
    asked: Option<Instant>,
    /// The longest time that a reply took.
    slowest: Duration,
}

#[derive(Debug, Clone, Copy)]
struct Busy {
    /// The end of the holder's lease, where it is known.
    until: Option<Instant>,
    /// Valid for calls that waited at this moment; `None` as long as the head that heard it has its turn.
    last: Option<Instant>,
}

impl Evidence {
    /// A request is sent.
    pub(crate) fn asks(&mut self, now: Instant) {
        self.asked.get_or_insert(now);
    }

    /// The store replied to the request, whatever it said.
    pub(crate) fn replied(&mut self) {
        self.asked = None;
    }

    /// The store replied that another client holds the lock, whose lease ends then.
    pub(crate) fn is_busy(&mut self, until: Option<Instant>, now: Instant) {
        if let Some(asked) = self.asked.take() {
            self.slowest = self.slowest.max(now.saturating_duration_since(asked));
        }
        self.busy = Some(Busy { until, last: None });
        self.failing = None;
    }

    /// The request that was sent then has failed. Returns the pause before the next one, or the failure where repeating
    /// the request makes no sense.
    pub(crate) fn failed(
        &mut self,
        asked: Instant,
        error: BackendError,
        patience: Duration,
    ) -> Result<Duration, BackendError> {
        self.asked = None;
        // Counted from the request that failed first.
        let since = self.failing.as_ref().map_or(asked, |(since, _)| *since);
        let failing_for = clock::now().saturating_duration_since(since);
        if !error.is_passing() || failing_for >= patience {
            return Err(error);
        }
        self.failing = Some((since, error));
        Ok(jittered(Duration::from_millis(50) + failing_for / 4))
    }

    /// When the patience with a failing store ends.
    pub(crate) fn patience_ends(&self, patience: Duration) -> Option<Instant> {
        self.failing.as_ref().map(|(since, _)| *since + patience)
    }

    /// Whether anything is known that later replies have to be compared with.
    pub(crate) fn is_empty(&self) -> bool {
        self.busy.is_none() && self.failing.is_none()
    }

    /// The turn of the head that heard this ends. A release that goes to the store then is a request, too.
    pub(crate) fn turn_ends(&mut self, now: Instant, released: Option<Instant>) {
        if let Some(busy) = &mut self.busy {
            busy.last.get_or_insert(now);
        }
        self.asked = released.or(self.asked);
    }

    /// A caller in this process holds the lock, so others may be told that it is busy.
    pub(crate) fn is_held_here(&mut self) {
        *self = Evidence {
            busy: Some(Busy {
                until: None,
                last: None,
            }),
            slowest: self.slowest,
            ..Evidence::default()
        };
    }

    /// Adds what the head of the queue knows, for a call that began to wait then.
    pub(crate) fn learn(&mut self, head: Evidence, started: Instant) {
        if let Some(busy) = head
            .busy
            .filter(|busy| busy.last.is_none_or(|last| last >= started))
        {
            self.busy = Some(busy);
            self.failing = None;
        }
        if let Some((since, error)) = head.failing {
            // Another call's request: of its own none was sent.
            let error = BackendError {
                outcome: Outcome::NotDone,
                ..error
            };
            let earlier = self.failing.take();
            let since = earlier.map_or(since.max(started), |(earlier, _)| earlier);
            self.failing = Some((since, error));
        }
        self.asked = head.asked.or(self.asked);
        self.slowest = self.slowest.max(head.slowest);
    }

    /// The error of a call whose wait, or whose patience with the store, has ended. `sent` says whether a request of its
    /// own is on its way.
    pub(crate) fn verdict(self, attempt: &Attempt, started: Instant, sent: bool) -> Error {
        if broken!(Defect1NoAnswerIsBusy) {
            return attempt.not_acquired(started, None);
        }
        if let Some((_, error)) = self.failing {
            return attempt.failed(error);
        }
        let now = clock::now();
        let patience = SILENCE.max(self.slowest * 4);
        let is_silent = |asked: Instant| now.saturating_duration_since(asked) > patience;
        match self.busy {
            Some(busy) if !self.asked.is_some_and(is_silent) => {
                let left = busy.until.map(|until| until.saturating_duration_since(now));
                attempt.not_acquired(started, left.filter(|left| !left.is_zero()))
            }
            _ => {
                let waited = now.saturating_duration_since(started);
                let message = format!("the store did not answer within the {waited:.1?} of waiting");
                attempt.failed(match sent {
                    true => BackendError::unknown(message),
                    false => BackendError::not_done(Reason::Unreachable, message),
                })
            }
        }
    }
}
