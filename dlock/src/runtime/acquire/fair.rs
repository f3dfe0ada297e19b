//! Acquires a fair lock: each waiter has a position in the store's queue and asks for itself;
//! [`engine::acquire`](crate::engine::acquire) decides.
//!
//! The store keeps a position only while its waiter asks now and then. Of the waiters of one process the [queue
//! head](crate::runtime::waiters) listens for the store's notification. The others cannot come first in the store's
//! queue before those ahead of them here, so they listen only when that takes long. When this process releases the
//! lock, the request of its next waiter is queued right behind the release, so that both are sent together.
//!
//! With the lock the store says which waiters of this process are next in its queue, up to the first of another
//! process. The lock is [handed off](crate::runtime::handoff) to them in that order, without the store; each gives up
//! its position when it has the lock.

use std::sync::Arc;

use super::position::{FairOutcome, FairSlot, FairState, QueuePosition};
use super::{AcquireCall, Wait, sleep_until};
use crate::Error;
use crate::base::broken;
use crate::base::chance;
use crate::base::clock;
use crate::base::moment::Moment;
use crate::engine::acquire::{Acquire, Event, Next, Report};
use crate::engine::evidence::Evidence;
use crate::runtime::attempt::AcquireTarget;
use crate::runtime::emit::trace::Path;
use crate::runtime::hold::Hold;
use crate::runtime::waiters::{Delivered, JoinAt, QueueEntry, QueueHead};
use crate::store::{Watch, changed};

/// The machine of a waiter, and its position. Dropped before the next waiter here becomes the queue head, which sends
/// that waiter's request.
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
    /// Asks until the lock is acquired, or the wait time is over.
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
            // The process may have been stopped since the handoff.
            if let Some(guard) = guard.filter(Hold::is_held) {
                return Ok(guard);
            }
            // It was next before.
            at = JoinAt::Front;
        }
    }

    /// Waits until the waiter has a lock, which may be lost since; `None` if it missed its poll deadline.
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
        // Dropped before the values above.
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
                watch = id.map(|id| shared.call_watch(options.kind, key, id));
            }
            match step.next {
                Next::Send { poll_by, .. } => {
                    let position = match slot.take() {
                        // Sent when it became the queue head: later events are not in its reply.
                        FairState::InFlight(request) => Err(request),
                        FairState::Idle(position) => Ok(position),
                        FairState::Nothing => Ok(QueuePosition::new(self.call)),
                    };
                    let request = position.map(|position| {
                        // The reply covers events before the request.
                        watch.iter_mut().for_each(Watch::seen);
                        entry.stands_at(position.id);
                        entry.polled_by(poll_by);
                        position.ask()
                    });
                    slot.put(FairState::InFlight(request.unwrap_or_else(|request| request)));
                    awaits = Awaits::Reply;
                }
                Next::Wait(wait) => {
                    self.begins_to_wait();
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
                Next::Report(Report::HandedOff | Report::Rejoins) => {
                    self.waiting.comes_by(Path::Handoff);
                    return Ok(handed_off);
                }
                Next::Report(_) => return Err(self.reported(step)),
                // Only a plain lock yields; a fair one has an order.
                Next::Continue | Next::Draw { .. } | Next::LetGo { .. } | Next::LeaveToOthers { .. } => {}
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
                                // Later waiters queue behind it, and ask when it is released.
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
                        () = self.call.ending().cancelled() => Event::Closed,
                    }
                }
                Awaits::Notification { until, listen_at } => {
                    let event = tokio::select! {
                        biased;
                        () = self.call.ending().cancelled() => Event::Closed,
                        delivered = entry.delivered() => delivered_event(delivered?, &mut head, &mut handed_off),
                        notifications = changed(&mut watch) => Event::CameFree { notifications },
                        () = clock::sleep_until(until.instant()) => Event::Due,
                        () = sleep_until(listen_at.map(Moment::instant)) => Event::QuietOver,
                        () = self.over() => Event::WaitOver,
                    };
                    match event {
                        Event::CameFree { .. } => self.waiting.comes_by(Path::Notified),
                        Event::Due => self.waiting.comes_by(Path::Polled),
                        _ => {}
                    }
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

/// Converts a delivery to a waiter to an event of the machine.
fn delivered_event(
    delivered: Delivered,
    head: &mut Option<Box<QueueHead>>,
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
