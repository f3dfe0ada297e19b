//! The way of a fair acquire: everybody who waits stands in the store's own queue and asks for themselves.
//!
//! A place in that queue is kept for those who are heard of, so who waits asks now and then. Of those who wait in
//! this process the one that is the [queue head](crate::waiters) listens for the wake-up that the store sends to the head of
//! its queue. The others are not in front of the queue before those ahead of them here are done: they listen only
//! when that takes long. When this process gives the lock back, the request of the next one here is queued right
//! behind the release, so that both travel together.
//!
//! With the lock the store says who of this process are next in its queue, up to the first of somebody else. To those
//! the lock is [handed off](crate::handoff) without the store, in that order; each of them gives up its place when it has it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::{AcquireCall, Wait, changed, sleep_until};
use crate::Error;
use crate::base::broken;
use crate::base::clock;
use crate::base::lock_id::LockId;
use crate::base::moment::Moment;
use crate::engine::evidence::Evidence;
use crate::engine::timing::{ASK_EVERY, POLL_DEADLINE, QUIET, until_next_fair_request};
use crate::runtime::attempt::{AcquireAttempt, AcquireTarget};
use crate::runtime::hold::Hold;
use crate::runtime::options::LONGEST;
use crate::runtime::release::{Asked, RunToCompletion};
use crate::runtime::waiters::{Abandon, Called, JoinAt, QueueEntry};
use crate::store::{AcquireReply, GrantId, Granted, Outcome, Reason, StoreError, Watch};

/// To how many the lock is handed off after one request at the most.
const MANY: u32 = 256;

/// A place in the store's queue, from the first request on. Dropped, it is given up; so is what its last request
/// brought, where nobody knows.
struct Place {
    call: AcquireCall,
    id: GrantId,
    /// When it was asked for last.
    asked: Option<Instant>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let unfinished = &self.call.handle.shared().unfinished;
        if self.asked.is_some() && unfinished.remove(self.id.number()) {
            drop(self.give_up());
        }
    }
}

impl Place {
    fn new(call: &AcquireCall) -> Place {
        Place {
            call: call.clone(),
            id: call.handle.shared().next_grant(),
            asked: None,
        }
    }

    /// Asks the store. The request takes its place in line now; it is finished even if this is dropped, and what
    /// it brings is then given back.
    fn ask(mut self) -> RunToCompletion<Seen> {
        let mut attempt = AcquireAttempt::with_id(self.id, &self.call, 0);
        attempt.request.tokens = self.tokens();
        let now = clock::now();
        attempt.request.queue = true;
        attempt.request.last_asked = self.asked.map(|asked| now.saturating_duration_since(asked));
        if self.asked.replace(now).is_none() {
            attempt.unfinished(false);
        }
        let step = attempt.store().acquire(attempt.request.clone());
        let handle = attempt.handle.clone();
        handle.ask(step, Stands { place: self, attempt })
    }

    /// One for itself, and one for each who could be handed the lock.
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

    /// The store has taken it out of the queue.
    fn has_gone(mut self) {
        self.is_nowhere();
    }

    /// The store has no such entry in the queue: the next request is a first one.
    /// Answers `false` where a shutdown has given it back meanwhile, and the lock with it.
    fn is_nowhere(&mut self) -> bool {
        self.asked = None;
        self.call.handle.shared().unfinished.remove(self.id.number())
    }

    /// The lock is granted under its id. The failure where a shutdown has released that.
    fn is_granted(&mut self) -> Result<(), StoreError> {
        if self.is_nowhere() {
            return Ok(());
        }
        drop(self.give_up());
        Err(StoreError::not_done(
            Reason::Closed,
            "the reply came only after the client was shut down",
        ))
    }

    /// The wake-ups of who waits here.
    fn listen(&self) -> Watch {
        let AcquireCall {
            handle, key, options, ..
        } = &self.call;
        let store = handle.shared().store.clone();
        store.watch(options.kind, key, self.id)
    }
}

/// One that has a place and asks for the lock.
struct Stands {
    place: Place,
    attempt: AcquireAttempt,
}

impl Asked for Stands {
    type Brings = Seen;

    fn answered(self, reply: Result<AcquireReply, StoreError>) -> Seen {
        let Stands { mut place, attempt } = self;
        match reply {
            Ok(AcquireReply::Acquired(granted)) => {
                if let Err(error) = place.is_granted() {
                    return Seen::Failed(error, None);
                }
                Seen::granted(attempt, granted)
            }
            Ok(AcquireReply::Busy(busy)) => Seen::Busy(place, busy.remaining),
            Ok(AcquireReply::TooFewPermits) => Seen::Busy(place, None),
            Err(error) => {
                if error.outcome == Outcome::NotDone && attempt.request.last_asked.is_none() {
                    place.is_nowhere();
                }
                if broken!(UnknownAcquireNotUndone) && error.outcome == Outcome::Unknown {
                    place.is_nowhere();
                }
                let kept = (error.outcome == Outcome::NotDone).then_some(place);
                Seen::Failed(error, kept)
            }
        }
    }

    fn undo(&self) -> RunToCompletion<Result<(), Error>> {
        self.place.give_up()
    }

    fn forget(self) {
        self.place.has_gone();
    }
}

/// What a request brought.
enum Seen {
    /// With those who are next in the queue.
    Acquired(Hold, Vec<GrantId>),
    Busy(Place, Option<Duration>),
    /// With the place, unless that is in doubt.
    Failed(StoreError, Option<Place>),
}

impl Seen {
    fn granted(attempt: AcquireAttempt, granted: Granted) -> Seen {
        match attempt.granted(&granted) {
            Ok(guard) => Seen::Acquired(guard, granted.behind),
            Err(error) => Seen::Failed(error, None),
        }
    }
}

/// What one who waits has between its polls; shared with what is done for it when it becomes the queue head.
#[derive(Default)]
enum State {
    #[default]
    Nothing,
    Waits(Place),
    Asks(RunToCompletion<Seen>),
}

#[derive(Clone, Default)]
struct Mine(Arc<Mutex<State>>);

impl Mine {
    /// Back to this place, unless there is another one by now.
    fn keep(&self, place: Place) {
        let mut state = self.0.lock();
        let place = match &*state {
            State::Nothing => std::mem::replace(&mut *state, State::Waits(place)),
            _ => State::Waits(place),
        };
        drop(state);
        drop(place);
    }

    /// What the request brings. It never ends where that was taken away.
    async fn seen(&self) -> Seen {
        std::future::poll_fn(|cx| {
            // Not under the lock: what a request brings may be dropped, and that asks for others.
            let State::Asks(mut attempt) = self.take() else {
                return Poll::Pending;
            };
            let poll = Pin::new(&mut attempt).poll(cx);
            if poll.is_pending() {
                *self.0.lock() = State::Asks(attempt);
            }
            poll
        })
        .await
    }

    fn take(&self) -> State {
        std::mem::take(&mut *self.0.lock())
    }

    /// Asks the moment this is the queue head: where that is because a release was queued, the request stands right
    /// behind it.
    fn ask(&self) {
        let mut state = self.0.lock();
        match std::mem::take(&mut *state) {
            State::Waits(place) if !place.call.handle.shared().closing.is_cancelled() => {
                *state = State::Asks(place.ask());
            }
            other => *state = other,
        }
    }
}

impl Abandon for Mine {
    /// The place is kept, where the store keeps it; what the request brings besides is given back.
    fn abandon(&self) {
        let mut state = self.0.lock();
        match std::mem::take(&mut *state) {
            State::Asks(attempt) => {
                drop(state);
                let mine = self.clone();
                attempt.finish(move |seen| {
                    if let Seen::Busy(place, _) | Seen::Failed(_, Some(place)) = seen {
                        mine.keep(place);
                    }
                });
            }
            other => *state = other,
        }
    }
}

/// A waiter; its position is given up before the next one here becomes the queue head, which asks for that one.
struct Leaves<'a>(Option<&'a Mine>);

impl Leaves<'_> {
    /// What was handed over is taken, and the place with it, unless that is over already: then it goes on waiting there.
    fn takes(&mut self, guard: Hold) -> Hold {
        if !guard.is_held() {
            self.0 = None;
        }
        guard
    }

    /// It goes on waiting at its place.
    fn stays(&mut self) -> Option<Hold> {
        self.0 = None;
        None
    }
}

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        drop(self.0.map(Mine::take));
    }
}

impl Wait<'_, AcquireCall> {
    /// Asks until the lock is had, or the wait is over.
    pub(super) async fn in_store_queue(&self) -> Result<Hold, Error> {
        let mine = Mine::default();
        let mut evidence = Evidence::default();
        let mut line = JoinAt::End(self.call.options.lock.max_waiters);
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
            let entry = waiters.join(options.kind, key, line, handoff_terms, by)?;
            entry.asks(Arc::new(mine.clone()));
            let waits = std::pin::pin!(self.in_line(&entry, &mine, &mut evidence));
            let guard = entry.attended(waits).await?;
            // Handed over before, and taken only now, after the process was stopped perhaps.
            if let Some(guard) = guard.filter(Hold::is_held) {
                return Ok(guard);
            }
            // It was let in before.
            line = JoinAt::Front;
        }
    }

    /// The same, until something is had that may be lost again; `None` where this was not polled in time.
    async fn in_line(
        &self,
        entry: &QueueEntry,
        mine: &Mine,
        evidence: &mut Evidence,
    ) -> Result<Option<Hold>, Error> {
        let call = self.call;
        let AcquireCall {
            handle, key, options, ..
        } = call;
        let shared = handle.shared();
        let mut head = entry.head();
        let mut watch: Option<Watch> = None;
        // Dropped before those above.
        let mut leaves = Leaves(Some(mine));
        loop {
            let asked = clock::now();
            let mut ask = |place: Place| {
                // What happened before the request is in the answer.
                watch.iter_mut().for_each(Watch::seen);
                entry.stands_at(place.id);
                entry.looks_by(asked + ASK_EVERY + POLL_DEADLINE);
                place.ask()
            };
            let attempt = match mine.take() {
                // Sent when it became the queue head: what has happened since is not in its answer.
                State::Asks(attempt) => attempt,
                State::Waits(place) => ask(place),
                State::Nothing => ask(Place::new(call)),
            };
            *mine.0.lock() = State::Asks(attempt);
            evidence.asks(Moment::of(asked));
            let mut came = false;
            let seen = loop {
                tokio::select! {
                    biased;
                    seen = mine.seen() => break seen,
                    called = entry.called() => match called? {
                        Called::Head(its) => (head, came) = (Some(its), true),
                        Called::Guard(guard) => return Ok(Some(leaves.takes(guard))),
                        Called::Withdrawn => return Ok(leaves.stays()),
                    },
                    () = self.over() => return Err(self.gave_up(evidence, true)),
                    () = self.patience_ends(evidence) => return Err(self.gave_up(evidence, true)),
                    () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                }
            };
            let (place, sleep) = match seen {
                Seen::Acquired(guard, behind) => {
                    // Those who come from now on wait behind it, and ask when it is given back.
                    if let Some(mut head) = head.or_else(|| entry.head()) {
                        head.behind = behind.iter().rev().map(|place| place.number()).collect();
                        guard.rest(head);
                    }
                    return Ok(Some(guard));
                }
                Seen::Busy(place, left) => {
                    self.is_busy(left, evidence);
                    let left = left.filter(|left| *left <= LONGEST);
                    if let Some(head) = &head {
                        head.waits(options.lock.max_waiters, evidence)?;
                        watch.get_or_insert_with(|| place.listen());
                    }
                    (place, until_next_fair_request(left))
                }
                Seen::Failed(error, kept) => {
                    let pause = self.failed(asked, error, evidence)?;
                    let place = kept.unwrap_or_else(|| {
                        // Under another id, which wakes another listener.
                        watch = None;
                        Place::new(call)
                    });
                    (place, pause)
                }
            };
            let id = place.id;
            let ask_at = clock::now() + sleep;
            entry.looks_by(ask_at + POLL_DEADLINE);
            *mine.0.lock() = State::Waits(place);
            if came {
                continue;
            }
            if head.is_none() {
                let mine = mine.clone();
                entry.on_head(Some(Box::new(move || mine.ask())));
            }
            if broken!(NotificationLostBeforeSleep) {
                watch.iter_mut().for_each(Watch::seen);
            }
            let quiet_until = clock::now() + QUIET;
            loop {
                let quiet = (watch.is_none() && head.is_none()).then_some(quiet_until);
                tokio::select! {
                    biased;
                    () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                    called = entry.called() => match called? {
                        Called::Head(its) => head = Some(its),
                        Called::Guard(guard) => return Ok(Some(leaves.takes(guard))),
                        Called::Withdrawn => return Ok(leaves.stays()),
                    },
                    () = changed(&mut watch) => {}
                    () = clock::sleep_until(ask_at) => {}
                    () = sleep_until(quiet) => {
                        watch = Some(shared.store.clone().watch(options.kind, key, id));
                        continue;
                    }
                    () = self.over() => return Err(self.gave_up(evidence, false)),
                }
                break;
            }
            entry.on_head(None);
        }
    }
}
