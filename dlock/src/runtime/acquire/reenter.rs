//! Re-entry: what the frames around an asker hold of the key, and what follows from that.

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
use crate::runtime::grants::{Around, Asker, Grant, InTheWay, Manner, Refused};
use crate::runtime::hold::Hold;
use crate::runtime::nested_read::{NestedRead, holds_around};
use crate::runtime::scope::{HoldRef, Scope};
use crate::store::Kind;
use crate::{Error, Loss};

/// The way in that an asker's frames give it.
enum Way<'s> {
    /// None: the lock is asked for like by anybody.
    Ask,
    /// One hold more on the grant of this one.
    Enter(&'s HoldRef),
    /// To read under this hold of the write lock.
    ReadUnder(&'s HoldRef),
}

impl Way<'_> {
    /// The grant that says who comes in.
    fn arbiter(&self) -> Option<&Arc<Grant>> {
        match self {
            Way::Ask => None,
            Way::Enter(hold) | Way::ReadUnder(hold) => Some(hold.grant.arbiter()),
        }
    }
}

/// What became of it.
enum Inside {
    Entered(Hold),
    /// The store is still to be asked.
    ReadsUnder(Arc<NestedRead>),
}

/// A place among those who wait to enter a grant, given up when this is dropped. One that has come in has none.
struct Place {
    grant: Arc<Grant>,
    asker: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.grant.vacate(self.asker);
    }
}

impl AcquireCall {
    fn way<'s>(&self, scope: &'s Scope) -> Result<Way<'s>, Error> {
        let nearest = |kind| scope.nearest(self.handle.shared(), kind, &self.key);
        let hold = nearest(self.options.kind);
        match (self.options.kind, hold) {
            (_, Some(hold)) => Ok(Way::Enter(hold)),
            (Kind::Read, None) => Ok(nearest(Kind::Write).map_or(Way::Ask, Way::ReadUnder)),
            (Kind::Write, None) => match nearest(Kind::Read).map(|read| read.grant.status()) {
                // Given back just now, it is not around anybody.
                None | Some(HoldState::Lost(Loss::Released)) => Ok(Way::Ask),
                Some(HoldState::Lost(loss)) => Err(self.lost(loss)),
                Some(_) => Err(Error::WouldDeadlock {
                    key: self.key.clone(),
                    reason:
                        "who asks to write is inside a read lock of it, which keeps writers out (ask for \
                             the write lock first: a writer may read)"
                            .to_owned(),
                }),
            },
            _ => Ok(Way::Ask),
        }
    }

    fn lost(&self, loss: Loss) -> Error {
        Error::Lost {
            key: self.key.clone(),
            loss,
        }
    }

    /// Reads in the stead of a write lock whose guard is at hand. Others who write under it go on; a read inside this one
    /// waits for those of them who are not around the asker.
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
            let asker = self.asker(next_id(), Around::Everybody, Manner::HadItsTurn);
            let Ok(nested_read) = NestedRead::new(&write.grant, &asker, outer) else {
                let loss = match write.grant.status() {
                    HoldState::Lost(loss) => loss,
                    // Everybody is welcome, so nothing else was in the way.
                    _ => Loss::Released,
                };
                return Err(self.lost(loss));
            };
            if let Some(guard) = wait.read_under(nested_read, &mut evidence).await? {
                return Ok(guard);
            }
        }
    }

    fn asker<'a>(&self, id: u64, around: Around<'a>, manner: Manner) -> Asker<'a> {
        Asker {
            id,
            by: self.by,
            around,
            manner,
        }
    }

    /// Whether the asker's frames have a say in this.
    pub(crate) fn is_enclosed(&self, scope: &Scope) -> bool {
        !matches!(self.way(scope), Ok(Way::Ask))
    }

    /// Enters the hold that encloses the asker, where nobody else is inside: a branch that has waited for its turn does so
    /// before those who are next.
    pub(crate) async fn enter(self, scope: &Scope) -> Option<Hold> {
        let call = AcquireCall { once: true, ..self };
        let started = clock::now();
        let wait = Wait {
            call: &call,
            target: &call,
            started,
            until: Some(started),
        };
        wait.reenter_as(scope, Manner::HadItsTurn).await.ok()?
    }

    /// Enters now, if nothing is in the way.
    fn enter_now(
        &self,
        way: &Way<'_>,
        scope: &Scope,
        id: u64,
        manner: Manner,
    ) -> Result<Option<Inside>, Refused> {
        let asker = self.asker(id, Around::Frames(scope, &[]), manner);
        match way {
            Way::Ask => Ok(None),
            Way::Enter(hold) => {
                hold.grant.enter(&asker)?;
                let grant = hold.grant.clone();
                let guard = Hold::new(HoldRef { id, grant }, self.handle.clone());
                Ok(Some(Inside::Entered(guard)))
            }
            Way::ReadUnder(hold) => {
                let outer = holds_around(scope, &hold.grant);
                Ok(Some(Inside::ReadsUnder(NestedRead::new(
                    &hold.grant,
                    &asker,
                    outer,
                )?)))
            }
        }
    }
}

impl<G: AcquireTarget> Wait<'_, G> {
    /// Enters the hold that encloses the asker, if there is one. When somebody else is inside whom the
    /// asker's frames do not contain (another branch of a `join!`), it waits for its turn among the branches; it never
    /// queues up for the lock behind them.
    pub(crate) async fn reenter(&self, scope: &Scope) -> Result<Option<Hold>, Error> {
        let manner = match self.call.once {
            true => Manner::GoesAway,
            false => Manner::Waits,
        };
        self.reenter_as(scope, manner).await
    }

    async fn reenter_as(&self, scope: &Scope, manner: Manner) -> Result<Option<Hold>, Error> {
        let AcquireCall { handle, key, by, .. } = self.call;
        let mut place: Option<Place> = None;
        let mut warned = false;
        let mut evidence = Evidence::default();
        loop {
            let way = self.call.way(scope)?;
            let Some(grant) = way.arbiter() else {
                return Ok(None);
            };
            place = place.filter(|place| Arc::ptr_eq(&place.grant, grant));
            let asker = place.as_ref().map_or_else(next_id, |place| place.asker);
            // Another thread may give the hold back between the two looks at it.
            #[cfg(dlock_sim)]
            crate::base::sim::preempt();
            let InTheWay { line, until } = match self.call.enter_now(&way, scope, asker, manner) {
                Ok(None) => return Ok(None),
                Ok(Some(Inside::Entered(guard))) => return Ok(Some(guard)),
                Ok(Some(Inside::ReadsUnder(nested_read))) => {
                    place = None;
                    match self.read_under(nested_read, &mut evidence).await? {
                        Some(guard) => return Ok(Some(guard)),
                        None => continue,
                    }
                }
                // Given back just now, it is not around anybody: the frames have another way.
                Err(Refused::Lost(Loss::Released)) if !broken!(ReleasedFrameIsLost) => continue,
                Err(Refused::Lost(loss)) => return Err(self.call.lost(loss)),
                Err(Refused::Sibling(in_the_way)) => in_the_way,
            };
            if manner != Manner::Waits {
                return Err(self.not_acquired(Some(grant.remaining())));
            }
            let place = place.get_or_insert_with(|| Place {
                grant: grant.clone(),
                asker,
            });
            let looks_at = clock::now() + LOOK_AT_FRAME_EVERY;
            tokio::select! {
                biased;
                () = place.grant.called(asker) => {}
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

    /// Asks the store for a read under the own write lock, which is there at once. `None` where the frames
    /// have to be looked at again, after a pause if need be.
    async fn read_under(
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
        let outcome = AcquireCall::ask(AcquireAttempt::new(call, 0, None).reading_under(nested_read));
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
            // Nothing that has frames has permits.
            Ok(AttemptOutcome::TooFew) => return Err(self.gave_up(evidence, false)),
            Ok(AttemptOutcome::Busy { left, .. }) => {
                self.is_busy(left, evidence);
                // The store does not know the write lock: its holder is told, unless it gave that back.
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
