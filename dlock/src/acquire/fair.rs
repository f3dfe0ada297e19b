//! The way of a fair acquire: everybody who waits stands in the store's own queue and asks for themselves.
//!
//! A place in that queue is kept for those who are heard of, so who waits asks now and then. Of those who wait in
//! this process the one with the [turn](crate::waiters) listens for the wake-up that the store sends to the head of
//! its queue. The others are not in front of the queue before those ahead of them here are done: they listen only
//! when that takes long. When this process gives the lock back, the question of the next one here is queued right
//! behind the release, so that both travel together.
//!
//! With the lock the store says who of this process are next in its queue, up to the first of somebody else. To those
//! the lock is [handed on](crate::handover) without the store, in that order; each of them gives up its place when it has it.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::{Attempt, Wait, changed, sleep_until};
use crate::backend::{AcquireReply, BackendError, GrantId, Outcome, Watch};
use crate::evidence::Evidence;
use crate::guard::LockGuard;
use crate::lock::LONGEST;
use crate::name::Name;
use crate::question::{Goal, Question};
use crate::release::{Asked, Carry};
use crate::waiters::Called;
use crate::{Error, clock};

/// How often one who waits asks at the least. Stores keep a place for several times as long.
const ASK_EVERY: Duration = Duration::from_millis(1500);
/// For how long one who has others of this process ahead listens for nothing.
const QUIET: Duration = Duration::from_millis(100);
/// To how many the lock is handed on after one question at the most.
const MANY: u32 = 256;
/// How late somebody may be who is polled.
const LATE: Duration = Duration::from_secs(1);

/// A place in the store's queue, from the first question on. Dropped, it is given up; so is what its last question
/// brought, where nobody knows.
struct Place {
    attempt: Attempt,
    id: GrantId,
    /// When it was asked for last.
    asked: Option<Instant>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let unfinished = &self.attempt.handle.shared().unfinished;
        if self.asked.is_some() && unfinished.remove(self.id.number()) {
            drop(self.give_up());
        }
    }
}

impl Place {
    fn new(attempt: &Attempt) -> Place {
        Place {
            attempt: attempt.clone(),
            id: attempt.handle.shared().next_grant(),
            asked: None,
        }
    }

    /// Asks the store. The question takes its place in line now; it is finished even if this is dropped, and what
    /// it brings is then given back.
    fn ask(mut self) -> Carry<Seen> {
        let mut question = Question::under(self.id, &self.attempt, 0);
        question.request.tokens = self.tokens();
        let now = clock::now();
        question.request.queue = true;
        question.request.last_asked = self.asked.map(|asked| now.saturating_duration_since(asked));
        if self.asked.replace(now).is_none() {
            question.unfinished(false);
        }
        let step = question.backend().acquire(question.request.clone());
        let handle = question.handle.clone();
        handle.ask(step, Stands { place: self, question })
    }

    /// One for itself, and one for each who could be handed the lock.
    fn tokens(&self) -> u32 {
        let Attempt {
            handle, key, options, ..
        } = &self.attempt;
        let behind = handle.shared().waiters.behind(&Name::new(options.kind, key));
        let behind = behind.try_into().unwrap_or(u32::MAX);
        1 + self.attempt.handovers().min(behind).min(MANY)
    }

    fn give_up(&self) -> Carry<Result<(), Error>> {
        Question::under(self.id, &self.attempt, 0).undo()
    }

    /// The store has taken it out of the queue.
    fn has_gone(mut self) {
        self.asked = None;
        self.attempt.handle.shared().unfinished.remove(self.id.number());
    }

    /// The wake-ups of who waits here.
    fn listen(&self) -> Watch {
        let Attempt {
            handle, key, options, ..
        } = &self.attempt;
        let backend = handle.shared().backend.clone();
        backend.watch(options.kind, key, self.id)
    }
}

/// One that has a place and asks for the lock.
struct Stands {
    place: Place,
    question: Question,
}

impl Asked for Stands {
    type Brings = Seen;

    fn answered(self, reply: Result<AcquireReply, BackendError>) -> Seen {
        let Stands { place, question } = self;
        match reply {
            Ok(AcquireReply::Acquired {
                first_token,
                last_token,
            }) => {
                place.has_gone();
                Seen::granted(question, (first_token, last_token), Vec::new())
            }
            Ok(AcquireReply::AcquiredInLine {
                first_token,
                last_token,
                behind,
            }) => {
                place.has_gone();
                Seen::granted(question, (first_token, last_token), behind)
            }
            Ok(AcquireReply::Busy { remaining, .. }) => Seen::Busy(place, remaining),
            Ok(AcquireReply::TooFewPermits) => Seen::Busy(place, None),
            Ok(AcquireReply::Abstained { votes_in }) => Seen::Busy(place, Some(votes_in)),
            Err(error) => {
                let kept = (error.outcome == Outcome::NotDone).then_some(place);
                Seen::Failed(error, kept)
            }
        }
    }

    fn undo(&self) -> Carry<Result<(), Error>> {
        self.place.give_up()
    }

    fn is_undone(self) {
        self.place.has_gone();
    }
}

/// What a question brought.
enum Seen {
    /// With those who are next in the queue.
    Acquired(LockGuard, Vec<GrantId>),
    Busy(Place, Option<Duration>),
    /// With the place, unless that is in doubt.
    Failed(BackendError, Option<Place>),
}

impl Seen {
    fn granted(question: Question, tokens: (u64, u64), behind: Vec<GrantId>) -> Seen {
        match question.granted(tokens) {
            Ok(guard) => Seen::Acquired(guard, behind),
            Err(error) => Seen::Failed(error, None),
        }
    }
}

/// What one who waits has between its polls; shared with what is done for it when it has the turn.
#[derive(Default)]
enum State {
    #[default]
    Nothing,
    Waits(Place),
    Asks(Carry<Seen>),
}

#[derive(Clone, Default)]
struct Mine(Arc<Mutex<State>>);

impl Mine {
    fn take(&self) -> State {
        std::mem::take(&mut *self.0.lock())
    }

    /// Asks the moment the turn comes: where that is because a release was queued, the question stands right
    /// behind it.
    fn ask(&self) {
        let mut state = self.0.lock();
        match std::mem::take(&mut *state) {
            State::Waits(place) if !place.attempt.handle.shared().closing.is_cancelled() => {
                *state = State::Asks(place.ask());
            }
            other => *state = other,
        }
    }
}

/// One who waits; the place is given up before the turn passes on, which asks for the next one here.
struct Leaves<'a>(Option<&'a Mine>);

impl Leaves<'_> {
    /// What was handed over is taken, and the place with it, unless that is over already: then it goes on waiting there.
    fn takes(mut self, guard: LockGuard, asks: Option<Carry<Seen>>) -> LockGuard {
        if !guard.is_held()
            && let Some(mine) = self.0.take()
            && let Some(question) = asks
        {
            *mine.0.lock() = State::Asks(question);
        }
        guard
    }
}

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        drop(self.0.map(Mine::take));
    }
}

impl Wait<'_, Attempt> {
    /// Asks until the lock is had, or the wait is over.
    pub(super) async fn in_store_queue(&self) -> Result<LockGuard, Error> {
        let mine = Mine::default();
        let mut heard = Evidence::default();
        let mut limit = self.attempt.options.max_waiters;
        loop {
            let guard = self.in_line(&mine, limit, &mut heard).await?;
            // Handed over before, and taken only now, after the process was stopped perhaps.
            if guard.is_held() {
                return Ok(guard);
            }
            // It was let in before.
            limit = None;
        }
    }

    /// The same, until something is had that may be lost again.
    async fn in_line(
        &self,
        mine: &Mine,
        limit: Option<usize>,
        heard: &mut Evidence,
    ) -> Result<LockGuard, Error> {
        let attempt = self.attempt;
        let Attempt {
            handle,
            key,
            options,
            by,
            ..
        } = attempt;
        let shared = handle.shared();
        let ticket = shared
            .waiters
            .join(options.kind, key, limit, attempt.wanted(), by)?;
        let mut turn = ticket.turn();
        let mut watch: Option<Watch> = None;
        // Dropped before those above.
        let leaves = Leaves(Some(mine));
        loop {
            let asked = clock::now();
            let mut ask = |place: Place| {
                // What happened before the question is in the answer.
                watch.iter_mut().for_each(Watch::seen);
                ticket.stands_at(place.id);
                ticket.looks_by(asked + ASK_EVERY + LATE);
                place.ask()
            };
            let mut question = match mine.take() {
                // Put when the turn came: what has happened since is not in its answer.
                State::Asks(question) => question,
                State::Waits(place) => ask(place),
                State::Nothing => ask(Place::new(attempt)),
            };
            heard.asks(asked);
            let mut came = false;
            let seen = loop {
                tokio::select! {
                    biased;
                    seen = &mut question => break seen,
                    called = ticket.called(), if turn.is_none() => match called? {
                        Called::Turn(its) => (turn, came) = (Some(its), true),
                        Called::Guard(guard) => return Ok(leaves.takes(guard, Some(question))),
                    },
                    () = self.over() => return Err(self.gave_up(heard, true)),
                    () = self.patience_ends(heard) => return Err(self.gave_up(heard, true)),
                    () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                }
            };
            let (place, sleep) = match seen {
                Seen::Acquired(guard, behind) => {
                    // Those who come from now on wait behind it, and ask when it is given back.
                    if let Some(mut turn) = turn.or_else(|| ticket.turn()) {
                        turn.behind = behind.iter().rev().map(|place| place.number()).collect();
                        guard.rest(turn);
                    }
                    return Ok(guard);
                }
                Seen::Busy(place, left) => {
                    self.is_busy(left, heard);
                    let left = left.filter(|left| *left <= LONGEST);
                    if let Some(turn) = &turn {
                        turn.waits(options.max_waiters, heard)?;
                        watch.get_or_insert_with(|| place.listen());
                    }
                    // A lease that is about to end is over a moment after its whole milliseconds.
                    let end = left.map_or(ASK_EVERY, |left| left + Duration::from_millis(1));
                    (place, end.min(ASK_EVERY))
                }
                Seen::Failed(error, kept) => {
                    let pause = self.failed(asked, error, heard)?;
                    let place = kept.unwrap_or_else(|| {
                        // Under another id, which wakes another listener.
                        watch = None;
                        Place::new(attempt)
                    });
                    (place, pause)
                }
            };
            let id = place.id;
            let ask_at = clock::now() + sleep;
            ticket.looks_by(ask_at + LATE);
            *mine.0.lock() = State::Waits(place);
            if came {
                continue;
            }
            if turn.is_none() {
                let mine = mine.clone();
                ticket.at_turn(Some(Box::new(move || mine.ask())));
            }
            let quiet_until = clock::now() + QUIET;
            loop {
                let quiet = (watch.is_none() && turn.is_none()).then_some(quiet_until);
                tokio::select! {
                    biased;
                    () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                    called = ticket.called(), if turn.is_none() => match called? {
                        Called::Turn(its) => turn = Some(its),
                        Called::Guard(guard) => return Ok(leaves.takes(guard, None)),
                    },
                    () = changed(&mut watch) => {}
                    () = clock::sleep_until(ask_at) => {}
                    () = sleep_until(quiet) => {
                        watch = Some(shared.backend.clone().watch(options.kind, key, id));
                        continue;
                    }
                    () = self.over() => return Err(self.gave_up(heard, false)),
                }
                break;
            }
            ticket.at_turn(None);
        }
    }
}
