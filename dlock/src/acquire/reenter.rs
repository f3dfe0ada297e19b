//! Re-entry: what the frames around an asker hold of the key, and what follows from that.

use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use super::{Attempt, Wait, jittered, sleep_until};
use crate::backend::Kind;
use crate::evidence::Evidence;
use crate::grants::{Entry, Grant};
use crate::guard::{HoldState, LockGuard};
use crate::question::{Goal, Look, Question};
use crate::scope::{HoldRef, Scope};
use crate::under::{Refused, Under};
use crate::{Error, Loss, clock, telemetry};

/// The way in that an asker's frames give it.
enum Way<'s> {
    /// None: the lock is asked for like by anybody.
    Ask,
    /// One hold more on the grant of this one.
    Enter(&'s HoldRef),
    /// To read under this hold of the write lock.
    ReadUnder(&'s HoldRef),
}

/// What became of it.
enum Inside {
    Entered(LockGuard),
    /// The store is still to be asked.
    ReadsUnder(Arc<Under>),
    /// Somebody who is not around the asker is inside, since this line.
    Sibling(&'static Location<'static>),
    Lost(Loss),
}

impl Attempt {
    fn way<'s>(&self, scope: &'s Scope) -> Result<Way<'s>, Error> {
        let nearest = |kind| scope.nearest(self.handle.shared(), kind, &self.key);
        let hold = nearest(self.options.kind);
        match (self.options.kind, hold) {
            (_, Some(hold)) => Ok(Way::Enter(hold)),
            (Kind::Read, None) => Ok(nearest(Kind::Write).map_or(Way::Ask, Way::ReadUnder)),
            (Kind::Write, None) => match nearest(Kind::Read).map(|read| read.grant.status()) {
                None => Ok(Way::Ask),
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

    /// Reads under a write lock whose guard is at hand, so that everybody inside is around the asker.
    pub(crate) async fn read_under(self, write: &Arc<Grant>) -> Result<LockGuard, Error> {
        let wait = Wait {
            attempt: &self,
            goal: &self,
            started: clock::now(),
            until: None,
        };
        let mut heard = Evidence::default();
        let outcome = loop {
            let under = match Under::new(write, |_| true, self.by) {
                Ok(under) => under,
                Err(Refused::Lost(loss)) => break Err(self.lost(loss)),
                Err(Refused::Sibling(_)) => break Err(self.lost(Loss::Released)),
            };
            match wait.read_under(under, &mut heard).await {
                Ok(None) => {}
                Ok(Some(guard)) => break Ok(guard),
                Err(error) => break Err(error),
            }
        };
        match &outcome {
            Ok(_) => telemetry::acquired(clock::now().saturating_duration_since(wait.started)),
            Err(error) => telemetry::not_acquired(error),
        }
        outcome
    }

    /// Whether the asker's frames have a say in this.
    pub(crate) fn is_enclosed(&self, scope: &Scope) -> bool {
        !matches!(self.way(scope), Ok(Way::Ask))
    }

    /// Enters the hold that encloses the asker, if nothing is in the way now.
    pub(crate) async fn enter(self, scope: &Scope) -> Option<LockGuard> {
        let attempt = Attempt { once: true, ..self };
        let started = clock::now();
        let wait = Wait {
            attempt: &attempt,
            goal: &attempt,
            started,
            until: Some(started),
        };
        wait.reenter(scope).await.ok()?
    }

    /// Enters now, if nothing is in the way.
    fn enter_now(&self, scope: &Scope, hold: &HoldRef, reads_under: bool) -> Inside {
        let around = |id| scope.contains(id);
        if reads_under {
            return match Under::new(&hold.grant, around, self.by) {
                Ok(under) => Inside::ReadsUnder(under),
                Err(Refused::Sibling(line)) => Inside::Sibling(line),
                Err(Refused::Lost(loss)) => Inside::Lost(loss),
            };
        }
        match hold.grant.enter(around, self.by) {
            Entry::Entered(id) => {
                let hold = HoldRef {
                    id,
                    grant: hold.grant.clone(),
                };
                Inside::Entered(LockGuard::new(hold, self.handle.clone()))
            }
            Entry::Sibling(line) => Inside::Sibling(line),
            Entry::Lost(loss) => Inside::Lost(loss),
        }
    }
}

impl<G: Goal> Wait<'_, G> {
    /// Enters the hold that encloses the asker, if there is one. When somebody else is inside whom the
    /// asker's frames do not contain (another branch of a `join!`), it waits until a hold leaves and looks
    /// again; it never queues up for the lock behind them.
    pub(crate) async fn reenter(&self, scope: &Scope) -> Result<Option<LockGuard>, Error> {
        let Attempt {
            handle,
            key,
            once,
            by,
            ..
        } = self.attempt;
        let mut warn_at = Some(clock::now() + Duration::from_secs(1));
        let mut heard = Evidence::default();
        loop {
            let (hold, reads_under) = match self.attempt.way(scope)? {
                Way::Ask => return Ok(None),
                Way::Enter(hold) => (hold, false),
                Way::ReadUnder(hold) => (hold, true),
            };
            let grant = hold.grant.arbiter();
            let gate = grant.gate();
            let gate = gate.notified();
            tokio::pin!(gate);
            gate.as_mut().enable();
            let line = match self.attempt.enter_now(scope, hold, reads_under) {
                Inside::Entered(guard) => return Ok(Some(guard)),
                Inside::ReadsUnder(under) => match self.read_under(under, &mut heard).await? {
                    Some(guard) => return Ok(Some(guard)),
                    None => continue,
                },
                Inside::Sibling(line) => line,
                Inside::Lost(loss) => return Err(self.attempt.lost(loss)),
            };
            if *once {
                return Err(self.not_acquired(Some(grant.remaining())));
            }
            tokio::select! {
                biased;
                () = gate => {}
                () = self.over() => return Err(self.not_acquired(Some(grant.remaining()))),
                () = handle.shared().closing.cancelled() => return Err(Error::ClientClosed),
                () = sleep_until(warn_at) => {
                    warn_at = None;
                    tracing::warn!(
                        %key, waiting = %by, inside = %line,
                        "a lock is waited for from inside its own frame, while another guard of it is \
                         inside: if that one waits for this call, this never ends (pass the guard on, use \
                         guard.reenter(), or set a wait)"
                    );
                }
            }
        }
    }

    /// Asks the store for a read under the own write lock, which is there at once. `None` where the frames
    /// have to be looked at again, after a pause if need be.
    async fn read_under(&self, under: Arc<Under>, heard: &mut Evidence) -> Result<Option<LockGuard>, Error> {
        let attempt = self.attempt;
        let shared = attempt.handle.shared();
        if shared.closing.is_cancelled() {
            return Err(Error::ClientClosed);
        }
        let write = under.write.clone();
        let asked = clock::now();
        heard.asks(asked);
        let look = Attempt::ask(Question::new(attempt, 0, None).reading_under(under));
        let look = if attempt.once {
            look.await
        } else {
            tokio::select! {
                biased;
                look = look => look,
                () = self.over() => return Err(self.gave_up(heard, true)),
                () = self.patience_ends(heard) => return Err(self.gave_up(heard, true)),
                () = shared.closing.cancelled() => return Err(Error::ClientClosed),
            }
        };
        let pause = match look {
            Ok(Look::Got(guard)) => return Ok(Some(guard)),
            // Nothing that has frames has permits.
            Ok(Look::TooFew) => return Err(self.gave_up(heard, false)),
            Ok(Look::Busy { left, .. }) => {
                self.is_busy(left, heard);
                // The store does not know the write lock: its holder is told, unless it gave that back.
                if !matches!(write.status(), HoldState::Lost(_)) {
                    let _ = shared.renew_one(&write).await;
                }
                match write.status() {
                    HoldState::Lost(Loss::Released) => return Ok(None),
                    HoldState::Lost(loss) => return Err(attempt.lost(loss)),
                    _ if attempt.once => return Err(self.not_acquired(left)),
                    _ => jittered(Duration::from_millis(50)),
                }
            }
            Err(error) if attempt.once => return Err(attempt.failed(error)),
            Err(error) => self.failed(asked, error, heard)?,
        };
        tokio::select! {
            biased;
            () = shared.closing.cancelled() => Err(Error::ClientClosed),
            () = tokio::time::sleep(pause) => Ok(None),
            () = self.over() => Err(self.gave_up(heard, false)),
        }
    }
}
