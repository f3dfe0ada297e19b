//! Acquires a fair lock: each waiter has a position in the store's queue and asks for itself;
//! [`engine::acquire`](crate::engine::acquire) decides.
//!
//! The store keeps a position only while it is asked for now and then. Of the waiters of one process the
//! [queue head](crate::runtime::waiters) listens for the notification of the store. The others cannot come first in the
//! store's queue before those ahead of them here, so they listen only when that takes long. When this process releases the
//! lock, the request of its next waiter is queued right behind the release, so that both travel together.
//!
//! With the lock the store says which waiters of this process are next in its queue, up to the first of another process.
//! The lock is [handed off](crate::runtime::handoff) to them in that order, without the store; each gives up its position
//! when it has the lock.

use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;

use super::{AcquireCall, Wait, changed, sleep_until};
use crate::Error;
use crate::base::broken;
use crate::base::chance;
use crate::base::clock;
use crate::base::lock_id::LockId;
use crate::base::moment::Moment;
use crate::engine::acquire::{Acquire, Event, Next, Report};
use crate::engine::evidence::Evidence;
use crate::engine::position::{PositionReply, PositionState};
use crate::runtime::attempt::{AcquireAttempt, AcquireTarget};
use crate::runtime::hold::Hold;
use crate::runtime::release::{PendingAcquire, RunToCompletion};
use crate::runtime::waiters::{Abandon, Delivered, JoinAt, QueueEntry, QueueHead};
use crate::store::{AcquireReply, GrantId, Granted, Outcome, Reason, StoreError, Watch};

/// The most waiters that the lock is handed off to after one request.
const MANY: u32 = 256;

/// A position in the store's queue, from the first request on. Its drop gives it up, with what its last request brought,
/// where it may exist.
struct QueuePosition {
    call: AcquireCall,
    id: GrantId,
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
    fn new(call: &AcquireCall) -> QueuePosition {
        QueuePosition {
            call: call.clone(),
            id: call.handle.shared().next_grant(),
            state: PositionState::default(),
        }
    }

    /// Asks the store. The request is queued before this returns, and runs to its completion even if it is dropped; what
    /// it brings is then given back.
    fn ask(mut self) -> RunToCompletion<FairOutcome> {
        let mut attempt = AcquireAttempt::with_id(self.id, &self.call, 0);
        attempt.request.tokens = self.tokens();
        attempt.request.queue = true;
        attempt.request.last_asked = self.state.asks(Moment::now());
        if attempt.request.last_asked.is_none() {
            attempt.unfinished(false);
        }
        let step = attempt.store().acquire(attempt.request.clone());
        let handle = attempt.handle.clone();
        let position = self;
        handle.ask(step, FairRequest { position, attempt })
    }

    /// One fencing token for itself, and one for each waiter that the lock may be handed off to.
    fn tokens(&self) -> u32 {
        let AcquireCall {
            handle, key, options, ..
        } = &self.call;
        let behind = handle.shared().waiters.behind(&LockId::new(options.kind, key));
        let behind = behind.try_into().unwrap_or(u32::MAX);
        1 + self.call.handoffs().min(behind).min(MANY)
    }

    fn give_up(&self) -> RunToCompletion<Result<(), Error>> {
        AcquireAttempt::with_id(self.id, &self.call, 0).undo()
    }

    /// A reply has come. `false` where the position does not exist any more and a shutdown has given it up meanwhile,
    /// and the lock with it.
    fn replied(&mut self, reply: PositionReply) -> bool {
        self.state.replied(reply);
        self.state.may_exist() || self.call.handle.shared().unfinished.remove(self.id.number())
    }

    /// The lock is granted under its id. The failure where a shutdown has released it.
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
                FairOutcome::Busy(position, busy.remaining)
            }
            Ok(AcquireReply::TooFewPermits) => {
                position.replied(PositionReply::Kept);
                FairOutcome::Busy(position, None)
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
        // The store has taken it out of the queue.
        self.position.replied(PositionReply::Granted);
    }
}

/// What a request brought.
enum FairOutcome {
    /// With the waiters that are next in the queue.
    Acquired(Hold, Vec<GrantId>),
    Busy(QueuePosition, Option<Duration>),
    /// With the position, unless that is in doubt.
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

/// What a waiter has between its polls.
#[derive(Default)]
enum FairState {
    #[default]
    Nothing,
    Idle(QueuePosition),
    InFlight(RunToCompletion<FairOutcome>),
}

/// The same, shared with the thread that makes the waiter the queue head.
#[derive(Clone, Default)]
struct FairSlot(Arc<Mutex<FairState>>);

impl FairSlot {
    fn take(&self) -> FairState {
        std::mem::take(&mut *self.0.lock())
    }

    fn put(&self, state: FairState) {
        *self.0.lock() = state;
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

    /// What the request brings. It never ends where that was taken away.
    async fn outcome(&self) -> FairOutcome {
        std::future::poll_fn(|cx| {
            // Not under the lock: what a request brings may be dropped, and that asks for others.
            let FairState::InFlight(mut request) = self.take() else {
                return Poll::Pending;
            };
            let poll = Pin::new(&mut request).poll(cx);
            if poll.is_pending() {
                self.put(FairState::InFlight(request));
            }
            poll
        })
        .await
    }

    /// Sends the request in the thread that makes this waiter the queue head: right behind the release that it has queued.
    fn ask(&self) {
        let mut state = self.0.lock();
        match std::mem::take(&mut *state) {
            FairState::Idle(position) if !position.call.handle.shared().closing.is_cancelled() => {
                *state = FairState::InFlight(position.ask());
            }
            other => *state = other,
        }
    }
}

impl Abandon for FairSlot {
    /// The position is kept, where the store keeps it; what the request brings besides is given back.
    fn abandon(&self) {
        let mut state = self.0.lock();
        match std::mem::take(&mut *state) {
            FairState::InFlight(request) => {
                drop(state);
                let slot = self.clone();
                request.finish(move |outcome| {
                    if let FairOutcome::Busy(position, _) | FairOutcome::Failed(_, Some(position)) = outcome {
                        slot.keep(position);
                    }
                });
            }
            other => *state = other,
        }
    }
}

/// The machine of a waiter, and its position. Dropped before the next waiter here becomes the queue head, which asks for
/// that one.
struct FairWaiter<'a, 'e> {
    acquire: Acquire<'e>,
    slot: &'a FairSlot,
}

impl Drop for FairWaiter<'_, '_> {
    fn drop(&mut self) {
        if self.acquire.gives_up_position() {
            drop(self.slot.take());
        }
    }
}

/// What a waiter waits for.
#[derive(Clone, Copy)]
enum Awaits {
    Reply,
    Notification {
        until: Moment,
        listen_at: Option<Moment>,
    },
}

impl Wait<'_, AcquireCall> {
    /// Asks until the lock is acquired, or the wait is over.
    pub(super) async fn in_store_queue(&self) -> Result<Hold, Error> {
        let slot = FairSlot::default();
        let mut evidence = Evidence::default();
        let mut at = JoinAt::End(self.call.options.lock.max_waiters);
        loop {
            let AcquireCall {
                handle,
                key,
                options,
                by,
                ..
            } = self.call;
            let handoff_terms = self.call.handoff_terms();
            let waiters = &handle.shared().waiters;
            let entry = waiters.join(options.kind, key, at, handoff_terms, by)?;
            entry.asks(Arc::new(slot.clone()));
            let waits = std::pin::pin!(self.as_waiter(&entry, &slot, &mut evidence));
            let guard = entry.attended(waits).await?;
            // The process may have been stopped since it was handed off.
            if let Some(guard) = guard.filter(Hold::is_held) {
                return Ok(guard);
            }
            // It was the next one before.
            at = JoinAt::Front;
        }
    }

    /// The same, until the waiter has a lock, which may be lost since; `None` where it was not polled in time.
    async fn as_waiter(
        &self,
        entry: &QueueEntry,
        slot: &FairSlot,
        evidence: &mut Evidence,
    ) -> Result<Option<Hold>, Error> {
        let AcquireCall {
            handle, key, options, ..
        } = self.call;
        let shared = handle.shared();
        let mut head = entry.head();
        let mut watch: Option<Watch> = None;
        let mut handed_off = None;
        let acquire = Acquire::new(self.rules(), head.is_some(), evidence);
        // Dropped before those above.
        let mut waiter = FairWaiter { acquire, slot };
        let mut step = (waiter.acquire).handle(Event::MayAsk { listens: false }, Moment::now());
        let mut awaits = Awaits::Reply;
        let mut id = None;
        loop {
            let acquire = &mut waiter.acquire;
            if step.head_waits
                && let Some(head) = &head
            {
                head.waits(options.lock.max_waiters, acquire.evidence)?;
            }
            if step.new_position {
                watch = None;
                let position = QueuePosition::new(self.call);
                id = Some(position.id);
                slot.put(FairState::Idle(position));
            }
            if step.listens {
                watch = id.map(|id| shared.store.clone().watch(options.kind, key, id));
            }
            match step.next {
                Next::Send { poll_by, .. } => {
                    let position = match slot.take() {
                        // Sent when it became the queue head: what has happened since is not in its reply.
                        FairState::InFlight(request) => Err(request),
                        FairState::Idle(position) => Ok(position),
                        FairState::Nothing => Ok(QueuePosition::new(self.call)),
                    };
                    let request = position.map(|position| {
                        // What happened before the request is in the reply.
                        watch.iter_mut().for_each(Watch::seen);
                        entry.stands_at(position.id);
                        entry.polled_by(poll_by);
                        position.ask()
                    });
                    slot.put(FairState::InFlight(request.unwrap_or_else(|request| request)));
                    awaits = Awaits::Reply;
                }
                Next::Wait(wait) => {
                    entry.polled_by(wait.poll_by);
                    if wait.sends_as_head {
                        let slot = slot.clone();
                        entry.on_head(Some(Box::new(move || slot.ask())));
                    }
                    if broken!(NotificationLostBeforeSleep) {
                        watch.iter_mut().for_each(Watch::seen);
                    }
                    awaits = Awaits::Notification {
                        until: wait.until,
                        listen_at: wait.listen_at,
                    };
                }
                Next::Report(Report::HandedOff | Report::Rejoins) => return Ok(handed_off),
                Next::Report(_) => return Err(self.reported(step)),
                // A plain lock has crowds, and a fair one an order.
                Next::Continue | Next::Draw { .. } | Next::LeaveToOthers { .. } => {}
            }
            if step.listens
                && let Awaits::Notification { listen_at, .. } = &mut awaits
            {
                *listen_at = None;
            }
            let event = match awaits {
                Awaits::Reply => {
                    let patience_ends = acquire.patience_ends();
                    tokio::select! {
                        biased;
                        outcome = slot.outcome() => match outcome {
                            FairOutcome::Acquired(guard, behind) => {
                                // Those that come from now on wait behind it, and ask when it is released.
                                if let Some(mut head) = head.or_else(|| entry.head()) {
                                    head.behind = behind.iter().rev().map(|id| id.number()).collect();
                                    guard.rest(head);
                                }
                                return Ok(Some(guard));
                            }
                            FairOutcome::Busy(position, left) => {
                                id = Some(position.id);
                                slot.put(FairState::Idle(position));
                                Event::Busy { left, again: None, listeners: None }
                            }
                            FairOutcome::Failed(error, kept) => {
                                id = kept.as_ref().map(|position| position.id);
                                slot.put(kept.map_or(FairState::Nothing, FairState::Idle));
                                Event::Failed { error, fraction: chance::fraction }
                            }
                        },
                        delivered = entry.delivered() => delivered_event(delivered?, &mut head, &mut handed_off),
                        () = self.over() => Event::WaitOver,
                        () = sleep_until(patience_ends.map(Moment::instant)) => Event::PatienceOver,
                        () = shared.closing.cancelled() => Event::Closed,
                    }
                }
                Awaits::Notification { until, listen_at } => {
                    let event = tokio::select! {
                        biased;
                        () = shared.closing.cancelled() => Event::Closed,
                        delivered = entry.delivered() => delivered_event(delivered?, &mut head, &mut handed_off),
                        () = changed(&mut watch) => Event::CameFree,
                        () = clock::sleep_until(until.instant()) => Event::Due,
                        () = sleep_until(listen_at.map(Moment::instant)) => Event::QuietOver,
                        () = self.over() => Event::WaitOver,
                    };
                    if !matches!(event, Event::QuietOver) {
                        entry.on_head(None);
                    }
                    event
                }
            };
            step = acquire.handle(event, Moment::now());
        }
    }
}

/// What a waiter was told, as the machine has it.
fn delivered_event(
    delivered: Delivered,
    head: &mut Option<QueueHead>,
    handed_off: &mut Option<Hold>,
) -> Event {
    match delivered {
        Delivered::Head(its) => {
            *head = Some(its);
            Event::BecameHead
        }
        Delivered::Guard(guard) => {
            let is_held = guard.is_held();
            *handed_off = Some(guard);
            Event::HandedOff { is_held }
        }
        Delivered::Withdrawn => Event::Withdrawn,
    }
}
