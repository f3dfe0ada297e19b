//! Asks the store for a lock as the queue head, on behalf of all waiters of this process;
//! [`engine::acquire`](crate::engine::acquire) decides.

use std::task::Poll;
use std::time::Duration;

use super::{AcquireCall, Wait, changed, sleep_until};
use crate::Error;
use crate::base::broken;
use crate::base::chance;
use crate::base::clock;
use crate::base::moment::Moment;
use crate::engine::acquire::{Acquire, Event, Next, Report, Wait as Pause};
use crate::engine::evidence::Evidence;
use crate::engine::fairness::YieldRound;
use crate::engine::timing::POSITION_ENDS_WITHIN;
use crate::runtime::attempt::{AcquireTarget, AttemptOutcome};
use crate::runtime::emit;
use crate::runtime::fairness::let_go_first;
use crate::runtime::hold::Hold;
use crate::runtime::unfinished::Part;
use crate::runtime::waiters::{Delivered, QueueEntry, QueueHead};
use crate::store::{GrantId, Kind, Notification, ReleaseRequest, StoreError, Watch};

/// What came of being the queue head.
pub(super) enum HeadOutcome<T> {
    Got(T),
    /// The lock was handed off and is lost already, or the role of the head is.
    Lost,
    /// There are fewer permits in all than are wanted.
    TooFewPermits,
}

impl<T> HeadOutcome<T> {
    pub(super) fn of(got: Option<T>) -> HeadOutcome<T> {
        got.map_or(HeadOutcome::Lost, HeadOutcome::Got)
    }
}

/// The machine of a head, and the id of its queue position at the store.
struct AtStore<'a, 'e> {
    call: &'a AcquireCall,
    waiter: GrantId,
    acquire: Acquire<'e>,
}

impl<'a, 'e> AtStore<'a, 'e> {
    fn new(call: &'a AcquireCall, waiter: GrantId, acquire: Acquire<'e>) -> AtStore<'a, 'e> {
        let at_store = AtStore {
            call,
            waiter,
            acquire,
        };
        if call.has_position() {
            call.handle.shared().unfinished.add(Part {
                request: at_store.release(),
                lease: POSITION_ENDS_WITHIN,
                is_held: false,
            });
        }
        at_store
    }

    /// The request that gives up the position.
    fn release(&self) -> ReleaseRequest {
        ReleaseRequest {
            kind: self.call.options.kind,
            key: self.call.key.clone(),
            grant: self.waiter,
            keep_for: Duration::ZERO,
            amount: self.call.amount(),
        }
    }
}

impl Drop for AtStore<'_, '_> {
    fn drop(&mut self) {
        let handle = &self.call.handle;
        // A shutdown may have given it up before.
        let is_ours = self.call.has_position() && handle.shared().unfinished.remove(self.waiter.number());
        if is_ours && self.acquire.gives_up_position() {
            // Without a reply the store forgets it soon anyway.
            drop(handle.undo(self.release(), POSITION_ENDS_WITHIN));
        }
    }
}

impl<G: AcquireTarget> Wait<'_, G> {
    /// Asks the store until it grants the lock, or another caller of this process hands it off.
    pub(super) async fn as_head(
        &self,
        entry: &QueueEntry,
        mut head: QueueHead,
        evidence: &mut Evidence,
    ) -> Result<HeadOutcome<G::Got>, Error> {
        let AcquireCall {
            handle, key, options, ..
        } = self.call;
        let shared = handle.shared();
        let waiter = shared.next_grant();
        let listen = || shared.store.clone().watch(options.kind, key, waiter);
        if entry.has_waited() {
            evidence.learn(entry.evidence(), Moment::of(self.started));
        }
        let after = head.after.take();
        let pending = shared.fairness.take(entry.lock_id());
        let mut acquire = Acquire::new(self.rules(), true, evidence);
        let mut round = None;
        if after.is_some() || pending.is_some() {
            let others_first = async {
                let pending = match after {
                    Some(after) => {
                        let pending = after.pending().await;
                        pending.inspect(|_| acquire.evidence.replied()).flatten()
                    }
                    None => pending,
                };
                (shared.fairness)
                    .yields(entry.lock_id(), pending?, &mut head.watch, listen, self.until)
                    .await
            };
            tokio::select! {
                biased;
                () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                guard = handed_off(entry) => return Ok(self.took(guard?, head, &mut acquire)),
                first = others_first => round = first,
                () = self.over() => return Err(self.reported(acquire.handle(Event::WaitOver, Moment::now()))),
            }
        }
        let mut at_store = AtStore::new(self.call, waiter, acquire);
        let mut now = Moment::now();
        let listens = head.watch.is_some();
        let mut step = at_store.acquire.handle(Event::MayAsk { listens }, now);
        let (mut until, mut leaves) = (now, false);
        loop {
            let acquire = &mut at_store.acquire;
            if step.head_waits {
                head.waits(options.lock.max_waiters, acquire.evidence)?;
            }
            if step.shares_evidence {
                head.knows(acquire.evidence);
            }
            if step.warns {
                emit::Event::NoPermitEnds { semaphore: key }.emit();
            }
            if step.listens {
                head.watch.get_or_insert_with(listen);
            }
            let event = match step.next {
                Next::Send { announce, .. } => {
                    // What happened before the request is in the reply.
                    head.watch.iter_mut().for_each(Watch::seen);
                    let mut outcome = self.target.attempt(head.handed, Some(waiter), announce);
                    let patience_ends = acquire.patience_ends();
                    let outcome = match futures_util::poll!(&mut outcome) {
                        Poll::Ready(outcome) => Ok(outcome),
                        Poll::Pending => tokio::select! {
                            biased;
                            guard = handed_off(entry) => return Ok(self.took(guard?, head, acquire)),
                            outcome = entry.shares(outcome) => Ok(outcome),
                            () = self.over() => Err(Event::WaitOver),
                            () = sleep_until(patience_ends.map(Moment::instant)) => Err(Event::PatienceOver),
                            () = shared.closing.cancelled() => Err(Event::Closed),
                        },
                    };
                    match outcome {
                        Ok(Ok(AttemptOutcome::Got(got))) => {
                            // Where one may read, all may.
                            (head.handed, head.opened) = (0, options.kind == Kind::Read);
                            shared.fairness.acquired(entry.lock_id(), round);
                            let guard = self.target.guard(&got);
                            let ends_position = guard.is_some();
                            // Not later than the request, as far as the machine has to know.
                            acquire.handle(Event::Granted { ends_position }, now);
                            if let Some(guard) = guard {
                                head.rests(guard);
                            }
                            return Ok(HeadOutcome::Got(got));
                        }
                        Ok(outcome) => self.refused(entry, outcome),
                        Err(event) => event,
                    }
                }
                Next::Draw { among } => Event::Drawn(chance::below(among)),
                Next::Report(Report::TooFewPermits) => return Ok(HeadOutcome::TooFewPermits),
                Next::Report(_) => return Err(self.reported(step)),
                Next::Continue | Next::Wait(_) | Next::LeaveToOthers { .. } => {
                    match step.next {
                        Next::Wait(Pause { until: end, .. }) => (until, leaves) = (end, false),
                        Next::LeaveToOthers { until: end } => (until, leaves) = (end, true),
                        _ => {}
                    }
                    if broken!(NotificationLostBeforeSleep) {
                        head.watch.iter_mut().for_each(Watch::seen);
                    }
                    tokio::select! {
                        biased;
                        () = shared.closing.cancelled() => Event::Closed,
                        guard = handed_off(entry) => return Ok(self.took(guard?, head, acquire)),
                        event = notified(&mut head.watch, &mut round, leaves) => event,
                        () = clock::sleep_until(until.instant()) => Event::Due,
                        () = self.over() => Event::WaitOver,
                    }
                }
            };
            now = Moment::now();
            step = at_store.acquire.handle(event, now);
        }
    }

    /// What a reply is for the machine that does not grant the lock.
    fn refused(&self, entry: &QueueEntry, outcome: Result<AttemptOutcome<G::Got>, StoreError>) -> Event {
        match outcome {
            Ok(AttemptOutcome::Busy {
                left,
                again,
                listeners,
            }) => {
                (self.call.handle.shared().fairness).other_holder(entry.lock_id());
                Event::Busy {
                    left,
                    again,
                    listeners,
                }
            }
            Err(error) => Event::Failed {
                error,
                fraction: chance::fraction,
            },
            Ok(_) => {
                (self.call.handle.shared().fairness).other_holder(entry.lock_id());
                Event::TooFewPermits
            }
        }
    }

    /// The lock was handed off, and the role of the queue head rests in it; or this waiter was not polled in time, and is
    /// the head no longer.
    fn took(&self, guard: Option<Hold>, head: QueueHead, acquire: &mut Acquire<'_>) -> HeadOutcome<G::Got> {
        let event = match &guard {
            Some(guard) => {
                guard.rest(head);
                // The process may have been stopped since.
                Event::HandedOff {
                    is_held: guard.is_held(),
                }
            }
            None => Event::Withdrawn,
        };
        match (acquire.handle(event, Moment::now()).next, guard) {
            (Next::Report(Report::HandedOff), Some(guard)) => HeadOutcome::Got(self.target.handed_off(guard)),
            _ => HeadOutcome::Lost,
        }
    }
}

/// The lock, from another caller of this process; `None` where this waiter was not polled in time.
async fn handed_off(entry: &QueueEntry) -> Result<Option<Hold>, Error> {
    loop {
        match entry.delivered().await? {
            Delivered::Guard(guard) => return Ok(Some(guard)),
            Delivered::Withdrawn => return Ok(None),
            // A queue has one head, and that is this waiter.
            Delivered::Head(_) => {}
        }
    }
}

/// The next notification; where the lock has come free, once the processes have gone first whose turn it is. A process that
/// leaves the lock to others goes by each notification.
async fn notified(watch: &mut Option<Watch>, round: &mut Option<YieldRound>, leaves: bool) -> Event {
    match watch {
        Some(watch) if leaves => match watch.notification().await {
            Notification::Changed => Event::CameFree,
            Notification::Taken => Event::Taken,
        },
        _ => {
            changed(watch).await;
            if let (Some(watch), Some(round)) = (watch, round) {
                let_go_first(round, watch).await;
            }
            Event::CameFree
        }
    }
}
