//! One waiter that asks the store for a lock: when it sends a request, how long it waits for a notification, whether
//! its queue position at the store is given up, and what its call reports.
//!
//! Plain locks and fair locks use the same machine. For a plain lock the queue head asks, on behalf of all waiters of
//! its process; for a fair lock each waiter asks for itself. [`Rules`] has all the differences.

use std::time::Duration;

use crate::base::broken;
use crate::base::moment::Moment;
use crate::engine::crowd::Crowd;
use crate::engine::evidence::{Evidence, Verdict};
use crate::engine::fairness::YieldRound;
use crate::engine::position::{PositionReply, PositionState};
use crate::engine::timing::{
    ASK_EVERY, POLL_DEADLINE, QUIET, finite, jittered, until_next_fair_request, until_next_request,
};
use crate::store::{Outcome, StoreError};

mod step;
#[cfg(test)]
mod tests;

pub(crate) use self::step::{Event, Next, Report, Rules, Step, Wait};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Other processes go first.
    Yields,
    /// A request is in flight.
    Asks,
    /// Waits to send the next request at this time, or earlier if the lock becomes available.
    Waits { until: Moment },
    /// Waits likewise, while other processes may take the available lock.
    Leaves { until: Moment },
    /// The lock has become available, and a process goes first that waited when this one released it. The next request
    /// is sent at this time at the latest, if one was planned.
    LetsGo { until: Option<Moment> },
}

/// One waiter, from its first request until its report.
#[derive(Debug)]
pub(crate) struct Acquire<'e> {
    rules: Rules,
    state: State,
    /// The store's replies; owned by the call before and after.
    pub(crate) evidence: &'e mut Evidence,
    /// When the last request was sent.
    sent: Moment,
    is_head: bool,
    /// It became the head while its request was in flight, so the reply may be older than that.
    became_head: bool,
    listens: bool,
    /// The store wants no request before.
    not_before: Moment,
    /// The longest remaining lease of a holder.
    longest: Duration,
    crowd: Crowd,
    /// The processes that go first whenever the lock becomes available.
    round: Option<YieldRound>,
    warned: bool,
    position: PositionState,
    /// A request that may have been carried out has failed: it can still reach the store, and take the position again.
    in_doubt: bool,
    rejoins: bool,
}

impl<'e> Acquire<'e> {
    pub(crate) fn new(rules: Rules, is_head: bool, evidence: &'e mut Evidence) -> Acquire<'e> {
        Acquire {
            rules,
            state: State::Yields,
            evidence,
            sent: rules.started,
            is_head,
            became_head: false,
            listens: false,
            not_before: rules.started,
            longest: Duration::ZERO,
            crowd: Crowd::default(),
            round: None,
            warned: false,
            position: PositionState::default(),
            in_doubt: false,
            rejoins: false,
        }
    }

    /// Whether the waiter's position at the store is given up if it leaves now, with a report or without.
    pub(crate) fn gives_up_position(&self) -> bool {
        match self.rules.fair {
            // A waiter that waits again keeps its position.
            true => !self.rejoins,
            false => self.position.may_exist(),
        }
    }

    /// The processes that go first, and the outcome so far.
    pub(crate) fn round(&self) -> Option<YieldRound> {
        self.round
    }

    /// Before an event that ends the wait: if the request without a reply was certainly not sent, its outcome is known.
    pub(crate) fn ends_with(&mut self, event: &Event, was_not_sent: impl FnOnce(Moment) -> bool) {
        let gives_up = matches!(event, Event::WaitOver | Event::PatienceOver);
        if gives_up && self.state == State::Asks && was_not_sent(self.sent) {
            self.state = State::Waits { until: self.sent };
        }
    }

    /// When `retry_for` is over.
    pub(crate) fn patience_ends(&self) -> Option<Moment> {
        self.evidence.patience_ends(self.rules.patience)
    }

    pub(crate) fn handle(&mut self, event: Event, now: Moment) -> Step {
        match event {
            Event::MayAsk { listens } => {
                self.listens = listens;
                self.asks(now)
            }
            Event::Granted { ends_position } => {
                self.evidence.replied();
                self.replied(match ends_position && !self.in_doubt {
                    true => PositionReply::Granted,
                    false => PositionReply::Unchanged,
                });
                Report::Granted.into()
            }
            Event::Busy {
                left,
                again,
                listeners,
                pause,
            } => {
                self.not_before = now + pause;
                self.is_busy(left, again, listeners, now)
            }
            Event::TooFewPermits => {
                self.evidence.is_busy(None, now);
                Step {
                    head_waits: true,
                    ..Report::TooFewPermits.into()
                }
            }
            Event::Failed {
                error,
                loses_position,
                fraction,
            } => self.failed(error, loses_position, fraction, now),
            Event::BecameHead => {
                self.is_head = true;
                self.became_head = self.state == State::Asks;
                match self.state {
                    State::Asks => Next::Continue.into(),
                    _ => self.asks(now),
                }
            }
            Event::HandedOff { is_held: true } => Report::HandedOff.into(),
            Event::HandedOff { is_held: false } | Event::Withdrawn => {
                self.rejoins = true;
                Report::Rejoins.into()
            }
            Event::CameFree { notifications } => match self.state {
                // Covered by the request after the pause.
                State::Waits { .. } if now < self.not_before => self.waits(now, self.not_before),
                State::Waits { until } => self.lets_go(notifications, Some(until), now),
                _ => self.came_free(now),
            },
            Event::Yielded {
                came,
                round,
                notifications,
                listens,
            } => {
                (self.round, self.listens) = (round, listens);
                match came {
                    true => self.lets_go(notifications, None, now),
                    false => self.asks(now),
                }
            }
            Event::OtherCame { notifications } => match self.went_first(true) {
                Some(until) => self.lets_go(notifications, until, now),
                None => Next::Continue.into(),
            },
            Event::NoneCame => match self.went_first(false) {
                Some(until) => self.goes_next(until, now),
                None => Next::Continue.into(),
            },
            Event::Drawn(rank) => self.ranks(rank, now),
            Event::Taken => match self.state {
                State::Leaves { until } => self.waits(now, until),
                _ => Next::Continue.into(),
            },
            Event::Due => {
                if let State::Leaves { .. } = self.state {
                    self.crowd.was_left();
                }
                self.asks(now)
            }
            Event::QuietOver => {
                self.listens = true;
                Step {
                    listens: true,
                    ..Next::Continue.into()
                }
            }
            Event::WaitOver | Event::PatienceOver => self.gives_up(now),
            Event::Closed => Report::Closed.into(),
        }
    }

    /// Handles an available lock: another process goes first if it is its turn.
    fn lets_go(&mut self, notifications: u64, until: Option<Moment>, now: Moment) -> Step {
        match self.round.and_then(|round| round.waits(notifications)) {
            Some(patience) => {
                self.state = State::LetsGo { until };
                self.evidence.others_first(now + patience);
                Step {
                    shares_evidence: true,
                    ..Next::LetGo { patience }.into()
                }
            }
            None => self.goes_next(until, now),
        }
    }

    /// Records whether the process that goes first came. Returns how long this one may wait; `None` if it yields to no
    /// further process.
    fn went_first(&mut self, came: bool) -> Option<Option<Moment>> {
        let State::LetsGo { until } = self.state else {
            return None;
        };
        self.round.iter_mut().for_each(|round| round.enter(came));
        Some(until)
    }

    /// It is the turn of this process.
    fn goes_next(&mut self, until: Option<Moment>, now: Moment) -> Step {
        match until {
            Some(until) => {
                self.state = State::Waits { until };
                self.came_free(now)
            }
            None => self.asks(now),
        }
    }

    fn came_free(&mut self, now: Moment) -> Step {
        match self.crowd.came_free() {
            Some(among) if !self.rules.fair => Next::Draw { among }.into(),
            _ => self.asks(now),
        }
    }

    fn asks(&mut self, now: Moment) -> Step {
        // When the head's `retry_for` is over, the waiters behind it do not each start again.
        if !self.rules.fair && self.patience_ends().is_some_and(|end| end <= now) {
            return self.gives_up(now);
        }
        (self.state, self.sent, self.became_head) = (State::Asks, now, false);
        self.evidence.asks(now);
        if self.rules.has_position {
            self.position.asks(now);
        }
        Step {
            shares_evidence: !self.rules.fair && !self.evidence.is_empty(),
            ..Next::Send {
                announce: self.crowd.announce(),
                poll_by: self.rules.fair.then(|| now + ASK_EVERY + POLL_DEADLINE),
            }
            .into()
        }
    }

    fn replied(&mut self, reply: PositionReply) {
        if self.rules.has_position {
            self.position.replied(reply);
        }
    }

    fn is_busy(
        &mut self,
        left: Option<Duration>,
        again: Option<Duration>,
        listeners: Option<u64>,
        now: Moment,
    ) -> Step {
        self.replied(match again {
            Some(_) => PositionReply::Kept,
            None => PositionReply::Unchanged,
        });
        let warns =
            self.rules.permits && left.or(again).is_none() && !std::mem::replace(&mut self.warned, true);
        let left = finite(left);
        self.evidence.is_busy(left.map(|left| now + left), now);
        self.crowd.is_busy(listeners, self.sent, now);
        // This reply is older than the role of the head, and a request follows at once: its reply decides whether to listen.
        let listens = self.is_head && !self.listens && !self.became_head;
        if listens {
            self.listens = true;
            self.crowd.listens();
        }
        self.longest = self.longest.max(left.unwrap_or_default());
        let sleep = match self.rules.fair {
            true => until_next_fair_request(left, again),
            false => until_next_request(left, self.longest, again),
        };
        let sleep = self.evidence.with_last_look(sleep, now, self.rules.until);
        Step {
            head_waits: self.is_head,
            warns,
            listens,
            ..self.pauses(sleep, now)
        }
    }

    fn failed(
        &mut self,
        error: StoreError,
        loses_position: bool,
        fraction: fn() -> f64,
        now: Moment,
    ) -> Step {
        let outcome = error.outcome;
        self.in_doubt |= outcome == Outcome::Unknown;
        self.replied(match outcome {
            Outcome::Unknown => PositionReply::Unknown,
            Outcome::NotDone => PositionReply::Unchanged,
        });
        let pause = match (self.evidence).failed(self.sent, error, self.rules.patience, now) {
            Ok(pause) => jittered(pause, fraction()),
            Err(error) => return Report::GaveUp(Verdict::Failed(error)).into(),
        };
        // Nothing is asked after the end of `retry_for`, so nothing is waited for either.
        let pause = self
            .patience_ends()
            .map_or(pause, |end| pause.min(end.since(now)));
        let new_position = self.rules.fair && (outcome == Outcome::Unknown || loses_position);
        if new_position {
            // The subscription belongs to the position.
            self.listens = false;
        }
        Step {
            new_position,
            shares_evidence: !self.rules.fair,
            ..self.pauses(pause, now)
        }
    }

    /// The pause before the next request, unless the reply is older than the role of the head.
    fn pauses(&mut self, pause: Duration, now: Moment) -> Step {
        if self.became_head {
            return self.asks(now);
        }
        let until = match !self.rules.fair && broken!(WaiterAsksAgainAtOnce) {
            true => now + Duration::from_millis(1),
            false => self.not_before.max(now + pause),
        };
        self.waits(now, until)
    }

    fn waits(&mut self, now: Moment, until: Moment) -> Step {
        self.state = State::Waits { until };
        self.crowd.waits();
        let waits_behind = self.rules.fair && !self.is_head;
        Next::Wait(Wait {
            until,
            listen_at: (waits_behind && !self.listens).then(|| now + QUIET),
            poll_by: self.rules.fair.then(|| until + POLL_DEADLINE),
            sends_as_head: waits_behind,
        })
        .into()
    }

    fn ranks(&mut self, rank: u64, now: Moment) -> Step {
        let (State::Waits { until } | State::Leaves { until }) = self.state else {
            return Next::Continue.into();
        };
        let Some(leaves) = self.crowd.ranks(rank) else {
            return self.asks(now);
        };
        self.state = State::Leaves { until };
        Next::LeaveToOthers {
            until: until.min(now + leaves),
        }
        .into()
    }

    fn gives_up(&mut self, now: Moment) -> Step {
        let sent = self.state == State::Asks;
        let evidence = std::mem::take(self.evidence);
        Report::GaveUp(evidence.verdict(self.rules.started, now, sent)).into()
    }
}
