//! Re-entry: what the frames around a caller hold of the key, and what follows from that.

use std::sync::Arc;

use super::{AcquireCall, Wait, jittered};
use crate::HoldState;
use crate::base::broken;
use crate::base::chance::next_id;
use crate::base::clock;
use crate::base::moment::Moment;
use crate::engine::evidence::Evidence;
use crate::engine::timing::{FIRST_PAUSE, LOOK_AT_FRAME_EVERY};
use crate::runtime::attempt::{AcquireAttempt, AcquireTarget, AttemptOutcome};
use crate::runtime::emit::Event;
use crate::runtime::grants::{Blocker, EntryMode, EntryRequest, Grant, OuterHolds, Refused};
use crate::runtime::hold::Hold;
use crate::runtime::nested_read::{NestedRead, holds_around};
use crate::runtime::scope::{HoldRef, Scope};
use crate::store::Kind;
use crate::{Error, Loss};

/// What the frames of a caller allow it.
enum Reentry<'s> {
    /// Nothing: it asks for the lock like any other caller.
    None,
    /// Another hold on the grant of this one.
    Enter(&'s HoldRef),
    /// A read lock nested in this hold of the write lock.
    NestedRead(&'s HoldRef),
}

impl Reentry<'_> {
    /// The grant that decides which caller enters.
    fn arbiter(&self) -> Option<&Arc<Grant>> {
        match self {
            Reentry::None => None,
            Reentry::Enter(hold) | Reentry::NestedRead(hold) => Some(hold.grant.arbiter()),
        }
    }
}

/// What came of it.
enum Reentered {
    Held(Hold),
    /// The store is still to be asked.
    NestedRead(Arc<NestedRead>),
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

impl AcquireCall {
    fn reentry<'s>(&self, scope: &'s Scope) -> Result<Reentry<'s>, Error> {
        let nearest = |kind| scope.nearest(self.handle.shared(), kind, &self.key);
        let hold = nearest(self.options.kind);
        match (self.options.kind, hold) {
            (_, Some(hold)) => Ok(Reentry::Enter(hold)),
            (Kind::Read, None) => Ok(nearest(Kind::Write).map_or(Reentry::None, Reentry::NestedRead)),
            (Kind::Write, None) => match nearest(Kind::Read).map(|read| read.grant.status()) {
                // Released just now, it is not around any code.
                None | Some(HoldState::Lost(Loss::Released)) => Ok(Reentry::None),
                Some(HoldState::Lost(loss)) => Err(self.lost(loss)),
                Some(_) => Err(Error::WouldDeadlock {
                    key: self.key.clone(),
                    reason:
                        "the caller is inside a read lock of it, which keeps writers out (acquire the write lock \
                             first: a writer may read)"
                            .to_owned(),
                }),
            },
            (Kind::Mutex | Kind::Fair | Kind::Fenced, None) => Ok(Reentry::None),
            (Kind::Permit | Kind::Unowned | Kind::Latch, None) => Ok(Reentry::None),
        }
    }

    fn lost(&self, loss: Loss) -> Error {
        Error::Lost {
            key: self.key.clone(),
            loss,
        }
    }

    /// Reads in the stead of a write lock whose guard is at hand. Other holders of that write lock go on; a read inside this
    /// one waits for those that are not around the caller.
    pub(crate) async fn read_instead(&self, write: &HoldRef, scope: &Scope) -> Result<Hold, Error> {
        let wait = Wait {
            call: self,
            target: self,
            started: clock::now(),
            until: None,
        };
        let mut evidence = Evidence::default();
        loop {
            let mut outer = holds_around(scope, &write.grant);
            outer.push(write.id);
            let request = self.request(next_id(), OuterHolds::All, EntryMode::TryFirst);
            let Ok(nested_read) = NestedRead::new(&write.grant, &request, outer) else {
                let loss = match write.grant.status() {
                    HoldState::Lost(loss) => loss,
                    // Any caller may enter, so nothing else was in the way.
                    _ => Loss::Released,
                };
                return Err(self.lost(loss));
            };
            if let Some(guard) = wait.read_nested(nested_read, &mut evidence).await? {
                return Ok(guard);
            }
        }
    }

    fn request<'a>(&self, id: u64, around: OuterHolds<'a>, mode: EntryMode) -> EntryRequest<'a> {
        EntryRequest {
            id,
            by: self.by,
            around,
            mode,
        }
    }

    /// Whether the frames of the caller hold the lock, or keep it out.
    pub(crate) fn is_enclosed(&self, scope: &Scope) -> bool {
        !matches!(self.reentry(scope), Ok(Reentry::None))
    }

    /// Enters the hold that encloses the caller, where no other caller is inside: a branch that has waited does so before
    /// those that are next.
    pub(crate) async fn enter(self, scope: &Scope) -> Option<Hold> {
        let call = AcquireCall { once: true, ..self };
        let started = clock::now();
        let wait = Wait {
            call: &call,
            target: &call,
            started,
            until: Some(started),
        };
        wait.reenter_as(scope, EntryMode::TryFirst).await.ok()?
    }

    /// Enters now, if no other caller is in the way.
    fn enter_now(
        &self,
        reentry: &Reentry<'_>,
        scope: &Scope,
        id: u64,
        mode: EntryMode,
    ) -> Result<Option<Reentered>, Refused> {
        let request = self.request(id, OuterHolds::Frames(scope, &[]), mode);
        match reentry {
            Reentry::None => Ok(None),
            Reentry::Enter(hold) => {
                hold.grant.enter(&request)?;
                let grant = hold.grant.clone();
                let guard = Hold::new(HoldRef { id, grant }, self.handle.clone());
                Ok(Some(Reentered::Held(guard)))
            }
            Reentry::NestedRead(hold) => {
                let outer = holds_around(scope, &hold.grant);
                Ok(Some(Reentered::NestedRead(NestedRead::new(
                    &hold.grant,
                    &request,
                    outer,
                )?)))
            }
        }
    }
}

impl<G: AcquireTarget> Wait<'_, G> {
    /// Enters the hold that encloses the caller, if there is one. While another caller is inside that the frames do not
    /// contain (another branch of a `join!`), it waits among the branches; it never waits for the lock behind them.
    pub(crate) async fn reenter(&self, scope: &Scope) -> Result<Option<Hold>, Error> {
        let mode = match self.call.once {
            true => EntryMode::Try,
            false => EntryMode::Wait,
        };
        self.reenter_as(scope, mode).await
    }

    async fn reenter_as(&self, scope: &Scope, mode: EntryMode) -> Result<Option<Hold>, Error> {
        let AcquireCall { handle, key, by, .. } = self.call;
        let mut entry: Option<FrameEntry> = None;
        let mut warned = false;
        let mut evidence = Evidence::default();
        loop {
            let reentry = self.call.reentry(scope)?;
            let Some(grant) = reentry.arbiter() else {
                return Ok(None);
            };
            entry = entry.filter(|entry| Arc::ptr_eq(&entry.grant, grant));
            let hold = entry.as_ref().map_or_else(next_id, |entry| entry.hold);
            // Another thread may release the hold between the two looks at it.
            #[cfg(dlock_sim)]
            crate::base::sim::preempt();
            let Blocker { line, until } = match self.call.enter_now(&reentry, scope, hold, mode) {
                Ok(None) => return Ok(None),
                Ok(Some(Reentered::Held(guard))) => return Ok(Some(guard)),
                Ok(Some(Reentered::NestedRead(nested_read))) => {
                    entry = None;
                    match self.read_nested(nested_read, &mut evidence).await? {
                        Some(guard) => return Ok(Some(guard)),
                        None => continue,
                    }
                }
                // Released just now, it is not around any code: the frames have another way.
                Err(Refused::Lost(Loss::Released)) if !broken!(ReleasedFrameIsLost) => continue,
                Err(Refused::Lost(loss)) => return Err(self.call.lost(loss)),
                Err(Refused::Sibling(blocker)) => blocker,
            };
            if mode != EntryMode::Wait {
                return Err(self.not_acquired(Some(grant.remaining())));
            }
            let entry = entry.get_or_insert_with(|| FrameEntry {
                grant: grant.clone(),
                hold,
            });
            let looks_at = clock::now() + LOOK_AT_FRAME_EVERY;
            tokio::select! {
                biased;
                () = entry.grant.called(hold) => {}
                () = self.over() => return Err(self.not_acquired(Some(grant.remaining()))),
                () = handle.shared().closing.cancelled() => return Err(Error::ClientClosed),
                () = clock::sleep_until(until.map_or(looks_at, |until| until.min(looks_at))) => {
                    if until.is_none() && !std::mem::replace(&mut warned, true) {
                        let inside = &line;
                        Event::WaitsInOwnFrame { key, waiting: by, inside }.emit();
                    }
                }
            }
        }
    }

    /// Asks the store for a read nested in the write lock of the caller, which is available at once. `None` where the frames
    /// have to be looked at again, after a pause if need be.
    async fn read_nested(
        &self,
        nested_read: Arc<NestedRead>,
        evidence: &mut Evidence,
    ) -> Result<Option<Hold>, Error> {
        let call = self.call;
        let shared = call.handle.shared();
        if shared.closing.is_cancelled() {
            return Err(Error::ClientClosed);
        }
        let write = nested_read.write.clone();
        let asked = clock::now();
        evidence.asks(Moment::of(asked));
        let outcome = AcquireCall::ask(AcquireAttempt::new(call, 0, None).nested_in(nested_read));
        let outcome = if call.once {
            outcome.await
        } else {
            tokio::select! {
                biased;
                outcome = outcome => outcome,
                () = self.over() => return Err(self.gave_up(evidence, true)),
                () = self.patience_ends(evidence) => return Err(self.gave_up(evidence, true)),
                () = shared.closing.cancelled() => return Err(Error::ClientClosed),
            }
        };
        let pause = match outcome {
            Ok(AttemptOutcome::Got(guard)) => return Ok(Some(guard)),
            // Permits have no frames.
            Ok(AttemptOutcome::TooFew) => return Err(self.gave_up(evidence, false)),
            Ok(AttemptOutcome::Busy { left, .. }) => {
                self.is_busy(left, evidence);
                // The store does not know the write lock: its holder is told, unless it released the lock.
                if !matches!(write.status(), HoldState::Lost(_)) {
                    let _ = shared.renew_one(&write).await;
                }
                match write.status() {
                    HoldState::Lost(Loss::Released) => return Ok(None),
                    HoldState::Lost(loss) => return Err(call.lost(loss)),
                    _ if call.once => return Err(self.not_acquired(left)),
                    _ => jittered(FIRST_PAUSE),
                }
            }
            Err(error) if call.once => return Err(call.failed(error)),
            Err(error) => self.failed(asked, error, evidence)?,
        };
        tokio::select! {
            biased;
            () = shared.closing.cancelled() => Err(Error::ClientClosed),
            () = tokio::time::sleep(pause) => Ok(None),
            () = self.over() => Err(self.gave_up(evidence, false)),
        }
    }
}
