//! Asks the store for a lock as the queue head, on behalf of all waiters of this process;
//! [`engine::acquire`](crate::engine::acquire) decides.

use std::future::{Future, poll_fn};
use std::ops::ControlFlow;
use std::pin::pin;
use std::task::{Poll, ready};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::Instant;

use super::{AcquireCall, Wait, sleep_until};
use crate::Error;
use crate::base::broken;
use crate::base::chance;
use crate::base::clock;
use crate::base::moment::Moment;
use crate::base::reused::Reused;
use crate::engine::acquire::{Acquire, Event, Next, Report, Step};
use crate::engine::evidence::Evidence;
use crate::engine::fairness::{PendingYield, Yielded};
use crate::engine::timing::POSITION_ENDS_WITHIN;
use crate::runtime::attempt::{AcquireTarget, AttemptOutcome};
use crate::runtime::emit;
use crate::runtime::emit::trace::Path;
use crate::runtime::hold::Hold;
use crate::runtime::unfinished::Part;
use crate::runtime::waiters::{Delivered, QueueEntry, QueueHead};
use crate::store::{Announce, GrantId, Notification, ReleaseRequest, StoreError, Watch, changed};

/// How the role of the queue head ended.
pub(super) enum HeadOutcome<T> {
    Got(T),
    /// The lock was handed off and is already lost, or the role of the head is.
    Lost,
    /// The semaphore has fewer permits in all than requested.
    TooFewPermits,
}

impl<T> HeadOutcome<T> {
    pub(super) fn of(got: Option<T>) -> HeadOutcome<T> {
        got.map_or(HeadOutcome::Lost, HeadOutcome::Got)
    }
}

/// What ends a pause of the head.
enum Met<T> {
    Event(Event),
    /// This process releases the lock to the store; perhaps after the store has refused it to this waiter.
    Released(Option<Event>),
    /// The store has granted the lock.
    Granted(T),
    /// The lock was handed off; `None` if this waiter missed its poll deadline.
    HandedOff(Option<Hold>),
}

/// The machine of a head, and the id of its queue position at the store.
struct AtStore<'a, 'e> {
    call: &'a AcquireCall,
    waiter: GrantId,
    acquire: Acquire<'e>,
}

impl AtStore<'_, '_> {
    /// From now on a shutdown gives up the position, too.
    fn begins_to_ask(&self) {
        if self.call.has_position() {
            self.call.handle.shared().unfinished.add(Part {
                request: self.release(),
                lease: POSITION_ENDS_WITHIN,
                is_held: false,
            });
        }
    }

    /// The request that gives up the position.
    fn release(&self) -> ReleaseRequest {
        let AcquireCall { key, options, .. } = self.call;
        ReleaseRequest {
            amount: self.call.amount(),
            ..ReleaseRequest::new(options.kind, key.clone(), self.waiter)
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
        mut head: Reused<QueueHead>,
        evidence: &mut Evidence,
    ) -> Result<HeadOutcome<G::Got>, Error> {
        let shared = self.call.handle.shared();
        let waiter = shared.next_grant();
        if entry.has_waited() {
            evidence.learn(entry.evidence(), Moment::of(self.started));
        }
        let mut at_store = AtStore {
            call: self.call,
            waiter,
            acquire: Acquire::new(self.rules(), true, evidence),
        };
        let acquire = &mut at_store.acquire;
        let pending = shared.fairness.take(entry.lock_id(), &shared.waiters);
        let mut step = if head.released.is_none() && pending.is_none() {
            let listens = head.watch.is_some();
            acquire.handle(Event::MayAsk { listens }, Moment::now())
        } else {
            // Boxed, because few calls need it: each call is moved with room for it.
            let yields = self.yields(entry, &mut head, pending, waiter, acquire);
            match Box::pin(yields).await? {
                ControlFlow::Continue(step) => step,
                ControlFlow::Break(guard) => return Ok(self.took(guard, head, acquire)),
            }
        };
        at_store.begins_to_ask();
        // Unless this process turns out to be the holder.
        let mut other_holds = false;
        let mut pause = Pause {
            until: Moment::now(),
            what: Awaited::Release,
        };
        loop {
            let acquire = &mut at_store.acquire;
            self.performs(&step, &mut head, waiter, acquire)?;
            let sent = Moment::now();
            let met = match step.next {
                Next::Send { announce, .. } => {
                    if std::mem::take(&mut other_holds) {
                        shared.fairness.other_holder(entry.lock_id());
                    }
                    self.asks(entry, &mut head, waiter, announce, acquire.patience_ends())
                        .await?
                }
                Next::Draw { among } => Met::Event(Event::Drawn(chance::below(among))),
                Next::Report(Report::TooFewPermits) => return Ok(HeadOutcome::TooFewPermits),
                Next::Report(_) => return Err(self.reported(step)),
                Next::Continue | Next::Wait(_) | Next::LetGo { .. } | Next::LeaveToOthers { .. } => {
                    pause = pause.next(&step.next);
                    Box::pin(self.sleeps(entry, &mut head, pause)).await?
                }
            };
            let event = match met {
                Met::Event(event) => {
                    other_holds |= matches!(event, Event::Busy { .. });
                    event
                }
                Met::Released(refusal) => {
                    other_holds = false;
                    if let Some(refusal) = refusal {
                        let refused = acquire.handle(refusal, Moment::now());
                        if refused.head_waits {
                            self.begins_to_wait();
                            head.waits(self.call.options.lock.max_waiters, acquire.evidence)?;
                        }
                    }
                    let yields = self.yields(entry, &mut head, None, waiter, acquire);
                    match Box::pin(yields).await? {
                        ControlFlow::Continue(first) => step = first,
                        ControlFlow::Break(guard) => return Ok(self.took(guard, head, acquire)),
                    }
                    continue;
                }
                Met::Granted(got) => {
                    let head = self.granted(entry, head, &got, sent, acquire);
                    // A position is given up before the next head asks.
                    drop(at_store);
                    drop(head);
                    return Ok(HeadOutcome::Got(got));
                }
                Met::HandedOff(guard) => return Ok(self.took(guard, head, acquire)),
            };
            let acquire = &mut at_store.acquire;
            acquire.ends_with(&event, |asked| self.call.was_not_sent(asked));
            step = acquire.handle(event, Moment::now());
        }
    }

    /// Returns the first step, after other processes went first if it is their turn. Breaks with a lock that was handed
    /// off in that time.
    async fn yields(
        &self,
        entry: &QueueEntry,
        head: &mut QueueHead,
        pending: Option<PendingYield>,
        waiter: GrantId,
        acquire: &mut Acquire<'_>,
    ) -> Result<ControlFlow<Option<Hold>, Step>, Error> {
        let shared = self.call.handle.shared();
        if let Some(released) = &mut head.released {
            released.set_head(head.watch.as_ref(), self.call.has_position());
        }
        let others_first = async {
            let listen = || self.listens(waiter);
            let of = entry.lock_id();
            let yielded = (shared.fairness)
                .yields(of, pending, head, listen, self.until, acquire.evidence)
                .await;
            let listens = head.watch.is_some();
            let event = match yielded {
                None => Event::MayAsk { listens },
                Some(Yielded { came, round }) => Event::Yielded {
                    came,
                    round,
                    notifications: head.watch.as_ref().map_or(0, Watch::count),
                    listens,
                },
            };
            let mut step = acquire.handle(event, Moment::now());
            while let Next::LetGo { patience } = step.next {
                head.knows(acquire.evidence);
                let event = other_comes(&mut head.watch, patience).await;
                step = acquire.handle(event, Moment::now());
            }
            step
        };
        tokio::select! {
            biased;
            () = self.is_to_end() => Err(self.call.ended()),
            guard = handed_off(entry) => Ok(ControlFlow::Break(guard?)),
            step = others_first => Ok(ControlFlow::Continue(step)),
            () = self.over() => Err(self.reported(acquire.handle(Event::WaitOver, Moment::now()))),
        }
    }

    /// Subscribes this waiter.
    fn listens(&self, waiter: GrantId) -> Watch {
        let AcquireCall {
            handle, key, options, ..
        } = self.call;
        handle.shared().call_watch(options.kind, key, waiter)
    }

    /// Performs the actions of a step, except the next one.
    fn performs(
        &self,
        step: &Step,
        head: &mut QueueHead,
        waiter: GrantId,
        acquire: &Acquire<'_>,
    ) -> Result<(), Error> {
        let AcquireCall { key, options, .. } = self.call;
        if step.head_waits || step.listens {
            self.begins_to_wait();
        }
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
            head.listen(|| self.listens(waiter));
        }
        Ok(())
    }

    /// Sends a request and waits for its reply.
    async fn asks(
        &self,
        entry: &QueueEntry,
        head: &mut QueueHead,
        waiter: GrantId,
        announce: Announce,
        patience_ends: Option<Moment>,
    ) -> Result<Met<G::Got>, Error> {
        if takes_release(entry, head) {
            return Ok(Met::Released(None));
        }
        // The reply covers events before the request.
        head.watch.iter_mut().for_each(Watch::seen);
        let mut first = Some(self.target.attempt(head.handed, Some(waiter), announce));
        let mut shared = None;
        let (at, event) = self.gives_up_at(patience_ends);
        // One timer, and no `select!`: each call has room for this.
        let mut given_up = pin!(sleep_until(at));
        let replied = poll_fn(|cx| {
            let is_asked = shared.is_some();
            if let Some(mut request) = first.take() {
                match request.poll_unpin(cx) {
                    Poll::Ready(outcome) => return Poll::Ready(Ok(ControlFlow::Continue(outcome))),
                    Poll::Pending => shared = Some(entry.shares(request)),
                }
            }
            if let Poll::Ready(guard) = poll_handed_off(entry) {
                return Poll::Ready(guard.map(|guard| ControlFlow::Break(Met::HandedOff(guard))));
            }
            if is_asked
                && let Some(request) = &mut shared
                && let Poll::Ready(outcome) = request.poll_unpin(cx)
            {
                return Poll::Ready(Ok(ControlFlow::Continue(outcome)));
            }
            // Before the timer, which is that of a runtime that may have ended.
            let event = match self.call.ending().is_given() {
                true => Event::Closed,
                false => {
                    ready!(given_up.as_mut().poll(cx));
                    event()
                }
            };
            Poll::Ready(Ok(ControlFlow::Break(Met::Event(event))))
        });
        let outcome = match replied.await? {
            ControlFlow::Continue(outcome) => outcome,
            ControlFlow::Break(met) => return Ok(met),
        };
        Ok(match outcome {
            Ok(AttemptOutcome::Got(got)) => Met::Granted(got),
            Ok(AttemptOutcome::Busy { .. }) if takes_release(entry, head) => {
                Met::Released(Some(self.refused(entry, outcome)))
            }
            outcome => Met::Event(self.refused(entry, outcome)),
        })
    }

    /// When a call whose request is in flight gives up, and why.
    fn gives_up_at(&self, patience_ends: Option<Moment>) -> (Option<Instant>, fn() -> Event) {
        match (self.until, patience_ends.map(Moment::instant)) {
            (Some(until), Some(ends)) if ends < until => (Some(ends), || Event::PatienceOver),
            (None, ends) => (ends, || Event::PatienceOver),
            (until, _) => (until, || Event::WaitOver),
        }
    }

    /// Waits between two requests.
    async fn sleeps(
        &self,
        entry: &QueueEntry,
        head: &mut QueueHead,
        pause: Pause,
    ) -> Result<Met<G::Got>, Error> {
        if broken!(NotificationLostBeforeSleep) && !matches!(pause.what, Awaited::Other(_)) {
            head.watch.iter_mut().for_each(Watch::seen);
        }
        let event = tokio::select! {
            biased;
            () = self.is_to_end() => Event::Closed,
            guard = handed_off(entry) => return Ok(Met::HandedOff(guard?)),
            released = entry.released() => {
                head.released = Some(released);
                return Ok(Met::Released(None));
            }
            event = pause.notified(&mut head.watch) => event,
            () = clock::sleep_until(pause.until.instant()) => Event::Due,
            () = self.over() => Event::WaitOver,
        };
        self.waiting.comes_by(match event {
            Event::CameFree { .. } | Event::OtherCame { .. } => Path::Notified,
            _ => Path::Polled,
        });
        Ok(Met::Event(event))
    }

    /// Handles a grant of the store, by a request sent at `sent`. Returns the role of the head, unless the lock keeps
    /// it.
    fn granted(
        &self,
        entry: &QueueEntry,
        mut head: Reused<QueueHead>,
        got: &G::Got,
        sent: Moment,
        acquire: &mut Acquire<'_>,
    ) -> Option<Reused<QueueHead>> {
        let AcquireCall { handle, options, .. } = self.call;
        // If one reader may read, all may.
        let (waiters, fairness) = (&handle.shared().waiters, &handle.shared().fairness);
        let opened = || waiters.of(entry.lock_id()).number_after_all();
        (head.handed, head.opened) = (0, options.kind.is_shared().then(opened));
        fairness.acquired(entry.lock_id(), acquire.round());
        let guard = self.target.guard(got);
        let ends_position = guard.is_some();
        // For the machine, the request is late enough.
        acquire.handle(Event::Granted { ends_position }, sent);
        match guard {
            Some(guard) => {
                // They came before this grant.
                drop((entry.released_before(), head.released.take()));
                head.rests(guard);
                None
            }
            None => Some(head),
        }
    }

    /// Converts a reply that does not grant the lock to an event of the machine.
    fn refused(&self, entry: &QueueEntry, outcome: Result<AttemptOutcome<G::Got>, StoreError>) -> Event {
        match outcome {
            Ok(AttemptOutcome::Busy {
                left,
                again,
                listeners,
                pause,
            }) => Event::Busy {
                left,
                again,
                listeners,
                pause,
            },
            Err(error) => Event::Failed {
                error,
                loses_position: false,
                fraction: chance::fraction,
            },
            Ok(_) => {
                (self.call.handle.shared().fairness).other_holder(entry.lock_id());
                Event::TooFewPermits
            }
        }
    }

    /// Handles a handed-off lock, which keeps the role of the queue head; or this waiter missed its poll deadline, and
    /// is no longer the head.
    fn took(
        &self,
        guard: Option<Hold>,
        mut head: Reused<QueueHead>,
        acquire: &mut Acquire<'_>,
    ) -> HeadOutcome<G::Got> {
        let event = match &guard {
            Some(guard) => {
                head.released = None;
                guard.rest(head);
                // The process may have been stopped since.
                Event::HandedOff {
                    is_held: guard.is_held(),
                }
            }
            None => Event::Withdrawn,
        };
        match (acquire.handle(event, Moment::now()).next, guard) {
            (Next::Report(Report::HandedOff), Some(guard)) => {
                self.waiting.comes_by(Path::Handoff);
                HeadOutcome::Got(self.target.handed_off(guard))
            }
            _ => HeadOutcome::Lost,
        }
    }
}

/// Takes the release of this process that the head was told of, if there is one.
fn takes_release(entry: &QueueEntry, head: &mut QueueHead) -> bool {
    let released = entry.released_before();
    let is_there = released.is_some();
    head.released = released.or(head.released.take());
    is_there
}

/// Waits for the lock from another caller of this process; `None` if this waiter missed its poll deadline.
async fn handed_off(entry: &QueueEntry) -> Result<Option<Hold>, Error> {
    poll_fn(|_| poll_handed_off(entry)).await
}

fn poll_handed_off(entry: &QueueEntry) -> Poll<Result<Option<Hold>, Error>> {
    loop {
        match entry.delivered_before()? {
            Some(Delivered::Guard(guard)) => return Poll::Ready(Ok(Some(guard))),
            Some(Delivered::Withdrawn) => return Poll::Ready(Ok(None)),
            // A queue has one head: this waiter.
            Some(Delivered::Head(_)) => {}
            None => return Poll::Pending,
        }
    }
}

/// What the head waits for between two requests.
#[derive(Clone, Copy)]
struct Pause {
    until: Moment,
    what: Awaited,
}

#[derive(Clone, Copy)]
enum Awaited {
    /// The lock becomes available.
    Release,
    /// The lock becomes available, or another process takes it when it does.
    Others,
    /// The process that goes first takes the lock, within this time.
    Other(Duration),
}

impl Pause {
    /// Returns what the head waits for next.
    fn next(self, next: &Next) -> Pause {
        let (until, what) = match next {
            Next::Wait(wait) => (wait.until, Awaited::Release),
            Next::LeaveToOthers { until } => (*until, Awaited::Others),
            Next::LetGo { patience } => (self.until, Awaited::Other(*patience)),
            Next::Continue | Next::Send { .. } | Next::Draw { .. } | Next::Report(_) => return self,
        };
        Pause { until, what }
    }

    async fn notified(self, watch: &mut Option<Watch>) -> Event {
        match (self.what, watch) {
            (Awaited::Others, Some(watch)) => match watch.notification().await {
                Notification::Changed => Event::CameFree {
                    notifications: watch.count(),
                },
                Notification::Taken => Event::Taken,
            },
            (Awaited::Other(patience), watch) => other_comes(watch, patience).await,
            (_, watch) => Event::CameFree {
                notifications: changed(watch).await,
            },
        }
    }
}

/// Waits until another process has taken the lock, or its time is over.
async fn other_comes(watch: &mut Option<Watch>, patience: Duration) -> Event {
    match tokio::time::timeout(patience, changed(watch)).await {
        Ok(notifications) => Event::OtherCame { notifications },
        Err(_) => Event::NoneCame,
    }
}
