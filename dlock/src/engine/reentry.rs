//! Re-entry: what a caller does about the holds of its frames on the key. It enters one of them, waits for another
//! branch that is inside, or asks the store for a read lock under its own write lock.

use std::time::Duration;

use crate::base::broken;
use crate::base::hold_state::{HoldState, Loss};
use crate::base::kind::Kind;
use crate::base::moment::Moment;
use crate::engine::evidence::{Evidence, Verdict};
use crate::engine::timing::{FIRST_PAUSE, LOOK_AT_FRAME_EVERY, finite, jittered};
use crate::store::StoreError;

#[cfg(test)]
mod tests;

/// What the frames of a caller allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reentry<H> {
    /// Nothing: it asks for the lock like any other caller.
    None,
    /// Another hold on the grant of this hold.
    Enter(H),
    /// A read lock nested in this hold of the write lock.
    NestedRead(H),
    /// The lock around the caller is lost.
    Lost(Loss),
    /// The caller would wait for itself: it is inside a read lock, which keeps writers out, or inside a lock of the same name
    /// and another kind.
    WouldDeadlock,
}

/// What a caller that asks for this kind may do, by the nearest holds of each kind around it.
pub(crate) fn reentry<H>(
    kind: Kind,
    nearest: impl Fn(Kind) -> Option<H>,
    state: impl FnOnce(H) -> HoldState,
) -> Reentry<H> {
    // A plain, a fair and a fenced lock of one name are one lock, which a read-write lock of that name cannot be beside.
    const PLAIN: [Kind; 3] = [Kind::Mutex, Kind::Fair, Kind::Fenced];
    let in_the_way = match (kind, nearest(kind)) {
        (_, Some(hold)) => return Reentry::Enter(hold),
        (Kind::Read, None) => match nearest(Kind::Write) {
            Some(write) => return Reentry::NestedRead(write),
            None => PLAIN.into_iter().find_map(nearest),
        },
        (Kind::Write, None) => [Kind::Read].into_iter().chain(PLAIN).find_map(nearest),
        (Kind::Mutex | Kind::Fair | Kind::Fenced, None) => {
            let others = PLAIN.into_iter().chain([Kind::Read, Kind::Write]);
            others.filter(|other| *other != kind).find_map(nearest)
        }
        (Kind::Permit | Kind::Unowned | Kind::Latch, None) => None,
    };
    match in_the_way.map(state) {
        // Just released, it is not around any code.
        None | Some(HoldState::Lost(Loss::Released)) => Reentry::None,
        Some(HoldState::Lost(loss)) => Reentry::Lost(loss),
        Some(HoldState::Held | HoldState::Suspect) => Reentry::WouldDeadlock,
    }
}

/// How a caller re-enters.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    /// It asks once, without waiting.
    pub(crate) once: bool,
    /// It replaces a write lock whose guard it has by a read lock: there is no other way than this one.
    pub(crate) instead: bool,
    /// How long requests are repeated while the store fails.
    pub(crate) patience: Duration,
    /// When the call began.
    pub(crate) started: Moment,
}

/// An event.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// No frame of the caller holds the lock.
    Outside,
    /// See [`Reentry::WouldDeadlock`].
    WouldDeadlock,
    /// See [`Reentry::Lost`].
    Lost(Loss),
    /// The caller is inside.
    Entered,
    /// The caller may read under its write lock, if the store grants that.
    Admitted,
    /// The hold that was found has ended since.
    Ended(Loss),
    /// Another branch is inside, or goes first and is passed over at `until`; the lease of the hold has `remaining`
    /// left.
    KeptOut {
        passed_over: Option<Moment>,
        remaining: Duration,
    },
    /// The branch that kept it out has left.
    Called,
    /// The awaited time has come.
    Due,
    /// The store granted the nested read.
    Granted,
    /// The store did not grant it: another client holds the lock, for this time. The write lock is in this state, as
    /// far as this process knows.
    Busy {
        left: Option<Duration>,
        write: HoldState,
    },
    /// The store was asked for the write lock, which is in this state. A number from 0 up to 1 jitters the pause after
    /// it.
    Confirmed { write: HoldState, fraction: fn() -> f64 },
    /// The semaphore has too few permits in all.
    TooFewPermits,
    /// The request failed; a number from 0 up to 1 jitters the pause after it.
    Failed {
        error: StoreError,
        fraction: fn() -> f64,
    },
    /// The wait time of the call is over. The lease of the awaited hold has `remaining` left.
    WaitOver { remaining: Option<Duration> },
    /// `retry_for` is over.
    PatienceOver,
    /// The client is shut down.
    Closed,
}

/// The actions of the caller.
#[derive(Debug)]
pub(crate) enum Next {
    /// Check the frames.
    Look,
    /// Check the frames, after a warning: this call waits for a branch of its own frame, maybe for ever.
    WarnAndLook,
    /// Wait until the blocking branch has left, at most until this time.
    Wait { until: Moment },
    /// Ask the store for the nested read; without a limit, or until the wait time or `retry_for` is over.
    Ask {
        is_limited: bool,
        patience_ends: Option<Moment>,
    },
    /// Ask the store whether it knows the write lock.
    Confirm,
    /// Wait this long, then continue.
    Pause(Duration),
    /// The end.
    Report(Report),
}

/// The outcome.
#[derive(Debug)]
pub(crate) enum Report {
    /// The caller is not inside a hold: it asks for the lock like any other.
    Outside,
    /// It is inside.
    Entered,
    Lost(Loss),
    WouldDeadlock,
    GaveUp(Verdict),
    Closed,
}

impl From<Report> for Next {
    fn from(report: Report) -> Next {
        Next::Report(report)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Looks,
    /// Another branch blocks the caller; it is `inside`, or was called and may be passed over.
    Waits {
        inside: bool,
    },
    Asks {
        sent: Moment,
    },
    /// The store is asked for the write lock, after it reported this remaining lease of another client.
    Confirms {
        left: Option<Duration>,
    },
    Pauses,
}

/// A caller inside frames that hold its key, or may do so.
#[derive(Debug)]
pub(crate) struct Reenter {
    rules: Rules,
    state: State,
    evidence: Evidence,
    warned: bool,
}

impl Reenter {
    pub(crate) fn new(rules: Rules) -> Reenter {
        Reenter {
            rules,
            state: State::Looks,
            evidence: Evidence::default(),
            warned: false,
        }
    }

    pub(crate) fn handle(&mut self, event: Event, now: Moment) -> Next {
        match event {
            Event::Outside => Report::Outside.into(),
            Event::WouldDeadlock => Report::WouldDeadlock.into(),
            Event::Entered | Event::Granted => Report::Entered.into(),
            Event::Lost(loss) => Report::Lost(loss).into(),
            Event::Ended(loss) => self.ended(loss),
            Event::Admitted => {
                self.state = State::Asks { sent: now };
                self.evidence.asks(now);
                Next::Ask {
                    is_limited: !self.rules.once,
                    patience_ends: self.evidence.patience_ends(self.rules.patience),
                }
            }
            Event::KeptOut {
                passed_over,
                remaining,
            } => self.is_kept_out(passed_over, remaining, now),
            Event::Called => self.looks(),
            Event::Due => match self.state {
                State::Waits { inside: true } if !std::mem::replace(&mut self.warned, true) => {
                    self.state = State::Looks;
                    Next::WarnAndLook
                }
                _ => self.looks(),
            },
            Event::Busy { left, write } => {
                self.evidence.is_busy(finite(left).map(|left| now + left), now);
                self.state = State::Confirms { left };
                match write {
                    HoldState::Lost(loss) => self.write_lost(loss),
                    // The store does not know the write lock: its holder is told.
                    HoldState::Held | HoldState::Suspect => Next::Confirm,
                }
            }
            Event::Confirmed { write, fraction } => match (write, self.state) {
                (HoldState::Lost(loss), _) => self.write_lost(loss),
                (_, State::Confirms { left }) if self.rules.once => not_acquired(left),
                _ => self.pauses(jittered(FIRST_PAUSE, fraction())),
            },
            // Permits have no frames.
            Event::TooFewPermits => self.gives_up(false, now),
            Event::Failed { error, fraction } => self.failed(error, fraction, now),
            Event::WaitOver { remaining } => match self.state {
                State::Waits { .. } => not_acquired(remaining),
                state => self.gives_up(matches!(state, State::Asks { .. }), now),
            },
            Event::PatienceOver => self.gives_up(true, now),
            Event::Closed => Report::Closed.into(),
        }
    }

    fn looks(&mut self) -> Next {
        self.state = State::Looks;
        Next::Look
    }

    fn pauses(&mut self, pause: Duration) -> Next {
        self.state = State::Pauses;
        Next::Pause(pause)
    }

    fn ended(&mut self, loss: Loss) -> Next {
        match loss {
            // Just released, it is not around any code: the frames have another way.
            Loss::Released if !self.rules.instead && !broken!(ReleasedFrameIsLost) => self.looks(),
            loss => Report::Lost(loss).into(),
        }
    }

    fn write_lost(&mut self, loss: Loss) -> Next {
        match loss {
            Loss::Released => self.looks(),
            loss => Report::Lost(loss).into(),
        }
    }

    fn is_kept_out(&mut self, passed_over: Option<Moment>, remaining: Duration, now: Moment) -> Next {
        if self.rules.once {
            return not_acquired(Some(remaining));
        }
        self.state = State::Waits {
            inside: passed_over.is_none(),
        };
        let looks_at = now + LOOK_AT_FRAME_EVERY;
        Next::Wait {
            until: passed_over.map_or(looks_at, |moment| moment.min(looks_at)),
        }
    }

    fn failed(&mut self, error: StoreError, fraction: fn() -> f64, now: Moment) -> Next {
        let State::Asks { sent } = self.state else {
            return self.looks();
        };
        if self.rules.once {
            return Report::GaveUp(Verdict::Failed(error)).into();
        }
        match self.evidence.failed(sent, error, self.rules.patience, now) {
            Ok(pause) => self.pauses(jittered(pause, fraction())),
            Err(error) => Report::GaveUp(Verdict::Failed(error)).into(),
        }
    }

    fn gives_up(&mut self, sent: bool, now: Moment) -> Next {
        let evidence = std::mem::take(&mut self.evidence);
        Report::GaveUp(evidence.verdict(self.rules.started, now, sent)).into()
    }
}

fn not_acquired(remaining: Option<Duration>) -> Next {
    Report::GaveUp(Verdict::NotAcquired { remaining }).into()
}
