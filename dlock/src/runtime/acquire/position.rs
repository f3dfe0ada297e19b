//! The position of one waiter in the queue of a fair lock at the store, and its request;
//! [`engine::position`](crate::engine::position) decides whether it is given up.

use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use parking_lot::Mutex;

use super::AcquireCall;
use crate::Error;
use crate::base::broken;
use crate::base::lock_id::LockId;
use crate::base::moment::Moment;
use crate::engine::position::{PositionReply, PositionState};
use crate::runtime::attempt::AcquireAttempt;
use crate::runtime::hold::Hold;
use crate::runtime::release::{PendingAcquire, RunToCompletion};
use crate::runtime::waiters::{Abandon, QueueEntry};
use crate::store::{AcquireReply, Busy, GrantId, Granted, Outcome, Reason, StoreError};

/// The maximum number of waiters to which the lock is handed off after one request.
const MANY: u32 = 256;

/// A position in the store's queue, from the first request on. If it may exist, dropping it gives it up, together with
/// the grant of its last request.
pub(super) struct QueuePosition {
    call: AcquireCall,
    pub(super) id: GrantId,
    state: PositionState,
}

impl Drop for QueuePosition {
    fn drop(&mut self) {
        let unfinished = &self.call.handle.shared().unfinished;
        // A shutdown may have given it up before.
        if self.state.may_exist() && unfinished.remove(self.id.number()) {
            drop(self.give_up());
        }
    }
}

impl QueuePosition {
    pub(super) fn new(call: &AcquireCall) -> QueuePosition {
        QueuePosition {
            call: call.clone(),
            id: call.handle.shared().next_position(),
            state: PositionState::default(),
        }
    }

    /// Asks the store. The request is queued before this returns, and runs to completion even if it is dropped; a grant
    /// is then released.
    pub(super) fn ask(mut self) -> RunToCompletion<FairOutcome> {
        let mut attempt = AcquireAttempt::with_id(self.id, &self.call, 0);
        attempt.request.tokens = self.tokens();
        attempt.request.queue = true;
        attempt.request.last_asked = self.state.asks(Moment::now());
        if attempt.request.last_asked.is_none() {
            attempt.unfinished(false);
        }
        let position = self;
        RunToCompletion::acquire(FairRequest { position, attempt })
    }

    /// Requests one fencing token for itself, and one for each waiter to which the lock may be handed off.
    fn tokens(&self) -> u32 {
        let AcquireCall {
            handle, key, options, ..
        } = &self.call;
        let of = LockId::new(options.kind, key);
        let behind = handle.shared().waiters.of(&of).behind(&of);
        let behind = behind.try_into().unwrap_or(u32::MAX);
        1 + self.call.handoffs().min(behind).min(MANY)
    }

    fn give_up(&self) -> RunToCompletion<Result<(), Error>> {
        AcquireAttempt::with_id(self.id, &self.call, 0).undo()
    }

    /// Records a reply. Returns false if the position no longer exists because a shutdown has given it up, and the lock
    /// with it.
    fn replied(&mut self, reply: PositionReply) -> bool {
        self.state.replied(reply);
        self.state.may_exist() || self.call.handle.shared().unfinished.remove(self.id.number())
    }

    /// Records that the lock is granted under its id. Fails if a shutdown has released it.
    fn is_granted(&mut self) -> Result<(), StoreError> {
        if self.replied(PositionReply::Granted) {
            return Ok(());
        }
        drop(self.give_up());
        Err(StoreError::not_done(
            Reason::Closed,
            "the reply arrived after the client was shut down",
        ))
    }
}

/// A request for the lock under the id of a position.
struct FairRequest {
    position: QueuePosition,
    attempt: AcquireAttempt,
}

impl PendingAcquire for FairRequest {
    type Brought = FairOutcome;

    fn attempt(&self) -> &AcquireAttempt {
        &self.attempt
    }

    fn replied(self, reply: Result<AcquireReply, StoreError>) -> FairOutcome {
        let FairRequest {
            mut position,
            attempt,
        } = self;
        match reply {
            Ok(AcquireReply::Acquired(granted)) => {
                if let Err(error) = position.is_granted() {
                    return FairOutcome::Failed(error, None);
                }
                FairOutcome::granted(attempt, granted)
            }
            Ok(AcquireReply::Busy(busy)) => {
                position.replied(PositionReply::Kept);
                FairOutcome::Busy(position, busy)
            }
            Ok(AcquireReply::TooFewPermits) => {
                position.replied(PositionReply::Kept);
                FairOutcome::Busy(position, Busy::default())
            }
            Err(error) => {
                position.replied(match error.outcome {
                    Outcome::NotDone => PositionReply::Unchanged,
                    Outcome::Unknown if broken!(UnknownAcquireNotUndone) => PositionReply::Granted,
                    Outcome::Unknown => PositionReply::Unknown,
                });
                let kept = (error.outcome == Outcome::NotDone).then_some(position);
                FairOutcome::Failed(error, kept)
            }
        }
    }

    fn undo(&self) -> RunToCompletion<Result<(), Error>> {
        self.position.give_up()
    }

    fn forget(mut self) {
        // The store has removed it from the queue.
        self.position.replied(PositionReply::Granted);
    }
}

/// The outcome of a request.
pub(super) enum FairOutcome {
    /// With the waiters that are next in the queue.
    Acquired(Hold, Vec<GrantId>),
    Busy(QueuePosition, Busy),
    /// With the position, unless it may have been lost.
    Failed(StoreError, Option<QueuePosition>),
}

impl FairOutcome {
    fn granted(attempt: AcquireAttempt, granted: Granted) -> FairOutcome {
        match attempt.granted(&granted) {
            Ok(guard) => FairOutcome::Acquired(guard, granted.behind),
            Err(error) => FairOutcome::Failed(error, None),
        }
    }
}

/// The request state of a waiter between its polls.
#[derive(Default)]
pub(super) enum FairState {
    #[default]
    Nothing,
    Idle(QueuePosition),
    InFlight(InFlight),
}

/// A request without a reply.
pub(super) struct InFlight {
    /// Of the position.
    id: GrantId,
    /// When the request was made.
    asked: Moment,
    request: RunToCompletion<FairOutcome>,
}

impl InFlight {
    /// Asks under this position.
    fn under(position: QueuePosition) -> InFlight {
        InFlight {
            id: position.id,
            asked: Moment::now(),
            request: position.ask(),
        }
    }
}

/// The state, shared with the thread that makes the waiter the queue head.
#[derive(Clone, Default)]
pub(super) struct FairSlot(Arc<Mutex<FairState>>);

impl FairSlot {
    pub(super) fn take(&self) -> FairState {
        std::mem::take(&mut *self.0.lock())
    }

    pub(super) fn put(&self, state: FairState) {
        let before = std::mem::replace(&mut *self.0.lock(), state);
        // Not under the mutex: it may give up a position.
        drop(before);
    }

    /// Takes the request in flight, if there is one.
    fn take_request(&self) -> Option<InFlight> {
        let mut state = self.0.lock();
        match std::mem::take(&mut *state) {
            FairState::InFlight(in_flight) => Some(in_flight),
            other => {
                *state = other;
                None
            }
        }
    }

    /// Puts a position back, unless there is another one by now.
    fn keep(&self, position: QueuePosition) {
        let mut state = self.0.lock();
        let before = match &*state {
            FairState::Nothing => std::mem::replace(&mut *state, FairState::Idle(position)),
            _ => FairState::Idle(position),
        };
        drop(state);
        drop(before);
    }

    /// Returns the outcome of the request. Never completes if the request was taken away.
    pub(super) async fn outcome(&self) -> FairOutcome {
        std::future::poll_fn(|cx| {
            // Not under the lock: dropping an outcome may start other requests.
            let Some(mut in_flight) = self.take_request() else {
                return Poll::Pending;
            };
            let poll = Pin::new(&mut in_flight.request).poll(cx);
            if poll.is_pending() {
                self.put(FairState::InFlight(in_flight));
            }
            poll
        })
        .await
    }

    /// When the request in flight was made, if there is one.
    pub(super) fn asked(&self) -> Option<Moment> {
        match &*self.0.lock() {
            FairState::InFlight(in_flight) => Some(in_flight.asked),
            _ => None,
        }
    }

    /// Sends a request under the position of this waiter, a new one if it has none, unless one is in flight.
    pub(super) fn ask_as(&self, call: &AcquireCall, entry: &QueueEntry) {
        let position = match self.take() {
            FairState::InFlight(in_flight) => {
                // The entry may be a new one: it has rejoined.
                entry.stands_at(in_flight.id);
                return self.put(FairState::InFlight(in_flight));
            }
            FairState::Idle(position) => position,
            FairState::Nothing => QueuePosition::new(call),
        };
        entry.stands_at(position.id);
        self.put(FairState::InFlight(InFlight::under(position)));
    }

    /// Sends the request in the thread that makes this waiter the queue head: right behind the release that it has
    /// queued.
    pub(super) fn ask(&self) {
        let mut state = self.0.lock();
        match std::mem::take(&mut *state) {
            FairState::Idle(position) if !position.call.ending().is_given() => {
                *state = FairState::InFlight(InFlight::under(position));
            }
            other => *state = other,
        }
    }
}

impl Abandon for FairSlot {
    /// Keeps the position, if the store keeps it; releases everything else that the request obtains.
    fn abandon(&self) {
        let Some(InFlight { request, .. }) = self.take_request() else {
            return;
        };
        let slot = self.clone();
        request.finish(move |outcome| {
            if let FairOutcome::Busy(position, _) | FairOutcome::Failed(_, Some(position)) = outcome {
                slot.keep(position);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::panic::Location;

    use super::*;
    use crate::runtime::acquire::AcquireTarget;
    use crate::runtime::group::Group;
    use crate::runtime::options::Options;
    use crate::runtime::waiters::{Caller, JoinAt};
    use crate::store::Kind;
    use crate::{LockClient, LockKey};

    /// The store names it among the waiters that are next, and the lock can be handed off to it.
    #[tokio::test]
    async fn waiter_that_rejoins_with_its_request_in_flight_keeps_its_position_here() {
        let client = LockClient::memory();
        let (key, by) = (LockKey::raw("k"), Location::caller());
        let options = Options {
            kind: Kind::Fair,
            ..Options::default()
        };
        let call = AcquireCall::new(client.handle(), &key, options, false, by);
        let of = LockId::new(Kind::Fair, &key);
        let waiters = client.shared().waiters.of(&of);
        let joins = |at| {
            let caller = Caller::new(by, Group::NONE);
            waiters
                .join(of.clone(), at, call.handoff_terms(), caller)
                .unwrap()
        };
        let other = joins(JoinAt::End(None));
        let slot = FairSlot::default();
        let entry = joins(JoinAt::End(None));
        let arrival = entry.arrival();
        slot.ask_as(&call, &entry);
        drop(entry);
        let entry = joins(JoinAt::Again(arrival));
        let asked = slot.asked();
        slot.ask_as(&call, &entry);
        assert_eq!(slot.asked(), asked);
        let FairState::InFlight(InFlight { id, .. }) = slot.take() else {
            panic!("no request is in flight");
        };
        let mut head = other.head().unwrap();
        head.behind = vec![id.number()];
        assert!(head.successor(|_| true).is_some());
    }
}
