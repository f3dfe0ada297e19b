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

use std::ops::ControlFlow;
use std::sync::Arc;

use super::position::{FairOutcome, FairSlot, FairState, QueuePosition};
use super::{AcquireCall, Wait, sleep_until};
use crate::Error;
use crate::base::broken;
use crate::base::chance;
use crate::base::clock;
use crate::base::lock_id::LockId;
use crate::base::moment::Moment;
use crate::base::reused::Reused;
use crate::engine;
use crate::engine::acquire::{Acquire, Event, Next, Report, Step};
use crate::engine::evidence::Evidence;
use crate::runtime::emit::trace::Path;
use crate::runtime::hold::Hold;
use crate::runtime::waiters::{Delivered, JoinAt, QueueEntry, QueueHead};
use crate::store::{GrantId, Watch, changed};

/// A waiter in the store's queue: its machine, its position, and what it has. Dropped before the next waiter here becomes the
/// queue head, which sends that waiter's request.
struct FairWaiter<'a, 'e> {
    wait: &'a Wait<'a, AcquireCall>,
    entry: &'a QueueEntry,
    acquire: Acquire<'e>,
    slot: &'a FairSlot,
    /// Of its position, while it has one.
    id: Option<GrantId>,
    /// The lock that another caller of this process handed to it.
    handed_off: Option<Hold>,
    watch: Option<Watch>,
    head: Option<Reused<QueueHead>>,
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
            let entry = self.joins_both_queues(&slot, at)?;
            let waits = std::pin::pin!(FairWaiter::new(self, &entry, &slot, &mut evidence).waits());
            let guard = entry.attended(waits).await?;
            // The process may have been stopped since the handoff.
            if let Some(guard) = guard.filter(Hold::is_held) {
                return Ok(guard);
            }
            // It was next before.
            at = JoinAt::Again(entry.arrival());
        }
    }

    /// Joins the queue here and, with a request, the store's. Both have the same order: of the waiters here only the head
    /// listens, so another one that is first in the store's queue would not notice it.
    fn joins_both_queues(&self, slot: &FairSlot, at: JoinAt) -> Result<QueueEntry, Error> {
        let AcquireCall {
            handle, key, options, ..
        } = self.call;
        let waiters = handle.shared().waiters.of(&LockId::new(options.kind, key));
        let _in_order = waiters.store_order.lock();
        let entry = self.joins(at)?;
        entry.asks(Arc::new(slot.clone()));
        slot.ask_as(self.call, &entry);
        Ok(entry)
    }
}

impl<'a, 'e> FairWaiter<'a, 'e> {
    fn new(
        wait: &'a Wait<'a, AcquireCall>,
        entry: &'a QueueEntry,
        slot: &'a FairSlot,
        evidence: &'e mut Evidence,
    ) -> FairWaiter<'a, 'e> {
        let head = entry.head();
        FairWaiter {
            wait,
            entry,
            acquire: Acquire::new(wait.rules(), head.is_some(), evidence),
            slot,
            id: None,
            handed_off: None,
            watch: None,
            head,
        }
    }

    /// Waits until the waiter has a lock, which may be lost since; `None` if it missed its poll deadline.
    async fn waits(mut self) -> Result<Option<Hold>, Error> {
        let mut step = (self.acquire).handle(Event::MayAsk { listens: false }, Moment::now());
        let mut awaits = Awaits::Reply;
        loop {
            self.performs(&step)?;
            match step.next {
                Next::Send { poll_by, .. } => {
                    self.asks(poll_by);
                    awaits = Awaits::Reply;
                }
                Next::Wait(wait) => {
                    self.begins_to_wait(&wait);
                    awaits = Awaits::Notification {
                        until: wait.until,
                        listen_at: wait.listen_at,
                    };
                }
                Next::Report(Report::HandedOff | Report::Rejoins) => {
                    self.wait.waiting.comes_by(Path::Handoff);
                    return Ok(self.handed_off.take());
                }
                Next::Report(_) => return Err(self.wait.reported(step)),
                // Only a plain lock yields; a fair one has an order.
                Next::Continue | Next::Draw { .. } | Next::LetGo { .. } | Next::LeaveToOthers { .. } => {}
            }
            if step.listens
                && let Awaits::Notification { listen_at, .. } = &mut awaits
            {
                *listen_at = None;
            }
            let event = match awaits {
                Awaits::Reply => match self.reply().await? {
                    ControlFlow::Continue(event) => event,
                    ControlFlow::Break(guard) => return Ok(Some(guard)),
                },
                Awaits::Notification { until, listen_at } => self.notified(until, listen_at).await?,
            };
            (self.acquire).ends_with(&event, |asked| {
                // Another thread may have made the request before.
                let asked = self.slot.asked().unwrap_or(asked);
                self.wait.call.was_not_sent(asked)
            });
            step = self.acquire.handle(event, Moment::now());
        }
    }

    /// Performs what a step says, but for what comes next.
    fn performs(&mut self, step: &Step) -> Result<(), Error> {
        let AcquireCall {
            handle, key, options, ..
        } = self.wait.call;
        if step.head_waits
            && let Some(head) = &self.head
        {
            head.waits(options.lock.max_waiters, self.acquire.evidence)?;
        }
        if step.new_position {
            self.watch = None;
            let position = QueuePosition::new(self.wait.call);
            self.id = Some(position.id);
            self.slot.put(FairState::Idle(position));
        }
        if step.listens {
            self.watch = (self.id).map(|id| handle.shared().call_watch(options.kind, key, id));
        }
        Ok(())
    }

    /// Sends a request under its position, unless that was done when it joined or became the queue head.
    fn asks(&mut self, poll_by: Option<Moment>) {
        self.entry.polled_by(poll_by);
        if self.slot.asked().is_some() {
            return;
        }
        // The reply covers events before the request.
        self.watch.iter_mut().for_each(Watch::seen);
        self.slot.ask_as(self.wait.call, self.entry);
    }

    fn begins_to_wait(&mut self, wait: &engine::acquire::Wait) {
        self.wait.begins_to_wait();
        self.entry.polled_by(wait.poll_by);
        if wait.sends_as_head {
            let slot = self.slot.clone();
            self.entry.on_head(Some(Box::new(move || slot.ask())));
        }
        if broken!(NotificationLostBeforeSleep) {
            self.watch.iter_mut().for_each(Watch::seen);
        }
    }

    /// The reply to its request, or what comes before that; breaks with the lock.
    async fn reply(&mut self) -> Result<ControlFlow<Hold, Event>, Error> {
        let patience_ends = self.acquire.patience_ends();
        let outcome = tokio::select! {
            biased;
            outcome = self.slot.outcome() => outcome,
            delivered = self.entry.delivered() => return Ok(ControlFlow::Continue(self.delivered(delivered?))),
            // Before the timers, which are those of a runtime that may have ended.
            () = self.wait.is_to_end() => return Ok(ControlFlow::Continue(Event::Closed)),
            () = self.wait.over() => return Ok(ControlFlow::Continue(Event::WaitOver)),
            () = sleep_until(patience_ends.map(Moment::instant)) => {
                return Ok(ControlFlow::Continue(Event::PatienceOver));
            }
        };
        Ok(ControlFlow::Continue(match outcome {
            FairOutcome::Acquired(guard, behind) => {
                // Later waiters queue behind it, and ask when it is released.
                if let Some(mut head) = self.head.take().or_else(|| self.entry.head()) {
                    head.behind = behind.iter().rev().map(|id| id.number()).collect();
                    guard.rest(head);
                }
                return Ok(ControlFlow::Break(guard));
            }
            FairOutcome::Busy(position, busy) => {
                self.id = Some(position.id);
                self.slot.put(FairState::Idle(position));
                Event::Busy {
                    left: busy.remaining,
                    again: busy.again,
                    listeners: None,
                    pause: busy.pause,
                }
            }
            FairOutcome::Failed(error, kept) => {
                self.id = kept.as_ref().map(|position| position.id);
                let loses_position = kept.is_none();
                self.slot.put(kept.map_or(FairState::Nothing, FairState::Idle));
                Event::Failed {
                    error,
                    loses_position,
                    fraction: chance::fraction,
                }
            }
        }))
    }

    /// What comes between two requests.
    async fn notified(&mut self, until: Moment, listen_at: Option<Moment>) -> Result<Event, Error> {
        let event = tokio::select! {
            biased;
            () = self.wait.is_to_end() => Event::Closed,
            delivered = self.entry.delivered() => self.delivered(delivered?),
            notifications = changed(&mut self.watch) => Event::CameFree { notifications },
            () = clock::sleep_until(until.instant()) => Event::Due,
            () = sleep_until(listen_at.map(Moment::instant)) => Event::QuietOver,
            () = self.wait.over() => Event::WaitOver,
        };
        match event {
            Event::CameFree { .. } => self.wait.waiting.comes_by(Path::Notified),
            Event::Due => self.wait.waiting.comes_by(Path::Polled),
            _ => {}
        }
        if !matches!(event, Event::QuietOver) {
            self.entry.on_head(None);
        }
        Ok(event)
    }

    /// Converts a delivery to the waiter to an event of the machine.
    fn delivered(&mut self, delivered: Delivered) -> Event {
        match delivered {
            Delivered::Head(head) => {
                self.head = Some(head);
                Event::BecameHead
            }
            Delivered::Guard(guard) => {
                let is_held = guard.is_held();
                self.handed_off = Some(guard);
                Event::HandedOff { is_held }
            }
            Delivered::Withdrawn => Event::Withdrawn,
        }
    }
}
