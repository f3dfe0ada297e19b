//! Re-entry: checks the frames around a caller, and enters a hold of them;
//! [`engine::reentry`](crate::engine::reentry) decides.

use std::panic::Location;
use std::sync::Arc;

use super::{AcquireCall, Wait, sleep_until};
use crate::base::chance::{self, next_id};
use crate::base::clock;
use crate::base::moment::Moment;
use crate::engine::reentry::{self, Event, Next, Reenter, Reentry, Report, Rules};
use crate::runtime::attempt::{AcquireAttempt, AcquireTarget, AttemptOutcome};
use crate::runtime::emit;
use crate::runtime::grants::{Blocker, EntryMode, EntryRequest, Grant, OuterHolds, Refused};
use crate::runtime::hold::Hold;
use crate::runtime::nested_read::{NestedRead, holds_around};
use crate::runtime::scope::{HoldRef, Scope};
use crate::runtime::waits::Waiting;
use crate::store::Kind;
use crate::{Error, HoldState, Loss};

/// Where a caller looks for a hold that it may enter.
#[derive(Clone, Copy)]
enum Way<'s> {
    /// The frames around it.
    Frames(&'s Scope, EntryMode),
    /// A write lock whose guard the caller has.
    Instead(&'s HoldRef, &'s Scope),
}

/// A caller that waits to enter a grant, until this is dropped.
struct FrameEntry {
    grant: Arc<Grant>,
    hold: u64,
}

impl Drop for FrameEntry {
    fn drop(&mut self) {
        self.grant.vacate(self.hold);
    }
}

/// The result of the last checks.
#[derive(Default)]
struct Found {
    /// The caller's entry in the line of this grant.
    entry: Option<FrameEntry>,
    /// The caller is inside a read lock.
    reads: bool,
    /// Where the hold that keeps the caller out was acquired.
    inside: Option<&'static Location<'static>>,
    nested_read: Option<Arc<NestedRead>>,
    /// The write grant around the nested read.
    write: Option<Arc<Grant>>,
    /// The hold of the caller, once it is inside.
    hold: Option<Hold>,
}

impl Found {
    fn admitted(&mut self, nested_read: Arc<NestedRead>) -> Event {
        self.entry = None;
        self.write = Some(nested_read.write.clone());
        self.nested_read = Some(nested_read);
        Event::Admitted
    }

    fn write_state(&self) -> HoldState {
        let write = self.write.as_ref();
        write.map_or(HoldState::Lost(Loss::Released), |write| write.status())
    }

    fn got(&mut self, hold: Hold, event: Event) -> Event {
        self.hold = Some(hold);
        event
    }
}

impl AcquireCall {
    fn reentry<'s>(&self, scope: &'s Scope) -> Reentry<&'s HoldRef> {
        reentry::reentry(
            self.options.kind,
            |kind| scope.nearest(self.handle.shared(), kind, &self.key),
            |hold| hold.grant.status(),
        )
    }

    /// Acquires a read lock that replaces a write lock whose guard the caller has. Other holders of that write lock are
    /// not affected; a read inside this one waits for those that are not around the caller.
    pub(crate) async fn read_instead(&self, write: &HoldRef, scope: &Scope) -> Result<Hold, Error> {
        let wait = Wait {
            call: self,
            target: self,
            started: clock::now(),
            until: None,
            waiting: Waiting::default(),
        };
        let hold = wait.reenter_by(Way::Instead(write, scope)).await?;
        hold.ok_or_else(|| self.lost(Loss::Released))
    }

    /// Whether the frames of the caller hold the lock, or keep the caller out.
    pub(crate) fn is_enclosed(&self, scope: &Scope) -> bool {
        !matches!(self.reentry(scope), Reentry::None)
    }

    /// Enters the hold that encloses the caller, if no other caller is inside: a branch that has waited enters before
    /// those that are next.
    pub(crate) async fn enter(self, scope: &Scope) -> Option<Hold> {
        let call = AcquireCall { once: true, ..self };
        let started = clock::now();
        let wait = Wait {
            call: &call,
            target: &call,
            started,
            until: Some(started),
            waiting: Waiting::default(),
        };
        let way = Way::Frames(scope, EntryMode::TryFirst);
        wait.reenter_by(way).await.ok()?
    }

    fn request<'a>(&self, id: u64, around: OuterHolds<'a>, mode: EntryMode) -> EntryRequest<'a> {
        EntryRequest {
            id,
            by: self.by,
            around,
            mode,
        }
    }

    /// Looks for a hold to enter, and enters it if no other caller blocks it.
    fn look(&self, way: Way<'_>, found: &mut Found) -> Event {
        match way {
            Way::Frames(scope, mode) => match self.reentry(scope) {
                Reentry::None => Event::Outside,
                Reentry::Lost(loss) => Event::Lost(loss),
                Reentry::WouldDeadlock => {
                    let shared = self.handle.shared();
                    found.reads = scope.nearest(shared, Kind::Read, &self.key).is_some();
                    Event::WouldDeadlock
                }
                Reentry::Enter(hold) => self.enter_now(hold, scope, mode, found, |request, found| {
                    hold.grant.enter(&request)?;
                    let grant = hold.grant.clone();
                    let hold = HoldRef {
                        id: request.id,
                        grant,
                    };
                    Ok(found.got(Hold::new(hold, self.handle.clone()), Event::Entered))
                }),
                Reentry::NestedRead(hold) => self.enter_now(hold, scope, mode, found, |request, found| {
                    let outer = holds_around(scope, &hold.grant);
                    Ok(found.admitted(NestedRead::new(&hold.grant, &request, outer)?))
                }),
            },
            Way::Instead(write, scope) => {
                let mut outer = holds_around(scope, &write.grant);
                outer.push(write.id);
                let request = self.request(next_id(), OuterHolds::All, EntryMode::TryFirst);
                match NestedRead::new(&write.grant, &request, outer) {
                    Ok(nested_read) => found.admitted(nested_read),
                    Err(_) => Event::Ended(match write.grant.status() {
                        HoldState::Lost(loss) => loss,
                        // Any caller may enter, so nothing else blocked it.
                        HoldState::Held | HoldState::Suspect => Loss::Released,
                    }),
                }
            }
        }
    }

    /// Enters a hold of the frames, under the id of the caller's entry in the line.
    fn enter_now(
        &self,
        hold: &HoldRef,
        scope: &Scope,
        mode: EntryMode,
        found: &mut Found,
        enter: impl FnOnce(EntryRequest<'_>, &mut Found) -> Result<Event, Refused>,
    ) -> Event {
        let arbiter = hold.grant.arbiter();
        found.entry.take_if(|entry| !Arc::ptr_eq(&entry.grant, arbiter));
        let id = found.entry.as_ref().map_or_else(next_id, |entry| entry.hold);
        // Another thread may release the hold between the two checks.
        #[cfg(dlock_sim)]
        crate::base::sim::preempt();
        let request = self.request(id, OuterHolds::Frames(scope, &[]), mode);
        match enter(request, found) {
            Ok(event) => event,
            Err(Refused::Lost(loss)) => Event::Ended(loss),
            Err(Refused::Sibling(Blocker { line, until })) => {
                found.inside = Some(line);
                if mode == EntryMode::Wait {
                    let grant = arbiter.clone();
                    // Created only if missing: a dropped entry leaves the line.
                    found.entry.get_or_insert_with(|| FrameEntry { grant, hold: id });
                }
                Event::KeptOut {
                    passed_over: until.map(Moment::of),
                    remaining: arbiter.remaining(),
                }
            }
        }
    }

    fn lost(&self, loss: Loss) -> Error {
        Error::Lost {
            kind: self.options.kind,
            key: self.key.clone(),
            loss,
        }
    }
}

impl<G: AcquireTarget> Wait<'_, G> {
    /// Enters the hold that encloses the caller, if there is one. While another caller is inside that the frames do not
    /// contain (another branch of a `join!`), it waits among the branches; it never waits for the lock behind them.
    pub(crate) async fn reenter(&self, scope: &Scope) -> Result<Option<Hold>, Error> {
        // Nearly all calls.
        if !self.call.is_enclosed(scope) {
            return Ok(None);
        }
        let mode = match self.call.once {
            true => EntryMode::Try,
            false => EntryMode::Wait,
        };
        self.reenter_by(Way::Frames(scope, mode)).await
    }

    async fn reenter_by(&self, way: Way<'_>) -> Result<Option<Hold>, Error> {
        let AcquireCall { handle, key, by, .. } = self.call;
        let mut found = Found::default();
        let mut reenter = Reenter::new(Rules {
            once: self.call.once,
            instead: matches!(way, Way::Instead(..)),
            patience: self.patience(),
            started: Moment::of(self.started),
        });
        let mut next = Next::Look;
        loop {
            let event = match next {
                Next::Look => self.call.look(way, &mut found),
                Next::WarnAndLook => {
                    if let Some(inside) = &found.inside {
                        emit::Event::WaitsInOwnFrame {
                            key,
                            waiting: by,
                            inside,
                        }
                        .emit();
                    }
                    self.call.look(way, &mut found)
                }
                Next::Wait { until } => self.waits_in_line(&found, until).await,
                Next::Ask {
                    is_limited,
                    patience_ends,
                } => self.asks_for_read(&mut found, is_limited, patience_ends).await,
                Next::Confirm => self.confirms(&found).await,
                Next::Pause(pause) => tokio::select! {
                    biased;
                    () = handle.shared().closing.given() => Event::Closed,
                    () = tokio::time::sleep(pause) => Event::Due,
                    () = self.over() => Event::WaitOver { remaining: None },
                },
                Next::Report(report) => return self.reports(report, found),
            };
            next = reenter.handle(event, Moment::now());
        }
    }

    /// Asks the store for the write lock of the caller.
    async fn confirms(&self, found: &Found) -> Event {
        let shared = self.call.handle.shared();
        if let Some(write) = &found.write {
            tokio::select! {
                biased;
                _ = shared.renew_one(write) => {}
                () = shared.closing.given() => return Event::Closed,
                () = self.over(), if !self.call.once => return Event::WaitOver { remaining: None },
            }
        }
        Event::Confirmed {
            write: found.write_state(),
            fraction: chance::fraction,
        }
    }

    /// Waits until the blocking branch has left.
    async fn waits_in_line(&self, found: &Found, until: Moment) -> Event {
        let Some(FrameEntry { grant, hold }) = &found.entry else {
            return Event::Called;
        };
        tokio::select! {
            biased;
            () = grant.called(*hold) => Event::Called,
            // Before the timers: those of a runtime that has ended panic.
            () = self.call.handle.shared().closing.given() => Event::Closed,
            () = self.over() => Event::WaitOver { remaining: Some(grant.remaining()) },
            () = clock::sleep_until(until.instant()) => Event::Due,
        }
    }

    /// Asks the store for a read nested in the write lock of the caller.
    async fn asks_for_read(
        &self,
        found: &mut Found,
        is_limited: bool,
        patience_ends: Option<Moment>,
    ) -> Event {
        let call = self.call;
        let closing = &call.handle.shared().closing;
        let Some(nested_read) = found.nested_read.take().filter(|_| !closing.is_given()) else {
            return Event::Closed;
        };
        let outcome = AcquireCall::ask(AcquireAttempt::new(call, 0, None).nested_in(nested_read));
        let outcome = match is_limited {
            false => outcome.await,
            true => tokio::select! {
                biased;
                outcome = outcome => outcome,
                // Before the timers, which are those of a runtime that may have ended.
                () = closing.given() => return Event::Closed,
                () = self.over() => return Event::WaitOver { remaining: None },
                () = sleep_until(patience_ends.map(Moment::instant)) => return Event::PatienceOver,
            },
        };
        match outcome {
            Ok(AttemptOutcome::Got(hold)) => found.got(hold, Event::Granted),
            Ok(AttemptOutcome::TooFew) => Event::TooFewPermits,
            Ok(AttemptOutcome::Busy { left, .. }) => Event::Busy {
                left,
                write: found.write_state(),
            },
            Err(error) => Event::Failed {
                error,
                fraction: chance::fraction,
            },
        }
    }

    /// Returns the result of a re-entry; `None` if the caller asks for the lock like any other.
    fn reports(&self, report: Report, found: Found) -> Result<Option<Hold>, Error> {
        match report {
            Report::Outside => Ok(None),
            Report::Entered => Ok(found.hold),
            Report::Lost(loss) => Err(self.call.lost(loss)),
            Report::WouldDeadlock => Err(Error::WouldDeadlock {
                key: self.call.key.clone(),
                reason: match self.call.options.kind {
                    Kind::Write if found.reads => {
                        "the caller is inside a read lock of it, which keeps writers out (acquire the write lock first: a \
                         writer may read)"
                    }
                    _ => {
                        "the caller has it already, as a lock of another kind (ask for it as one kind, to re-enter it)"
                    }
                }
                .to_owned(),
            }),
            Report::GaveUp(verdict) => Err(self.verdict(verdict)),
            Report::Closed => Err(Error::ClientClosed),
        }
    }
}
