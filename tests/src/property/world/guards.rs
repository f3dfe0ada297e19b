//! What is done with a guard.

use dlock::store::Kind;
use tokio::time::Instant;

use super::{Done, Guard, OVER, RENEWED, Real, STEP, World, lock_kind, wrong};
use crate::property::model::{Answer, Grant, Span, Wanted, Within};
use crate::property::ops::Op;

impl World<'_> {
    pub(super) async fn with_guard(&mut self, op: &Op, at: usize, began: Instant) -> Done {
        match *op {
            Op::Reenter { .. } => self.reenter(at, began),
            Op::Ensure { .. } => self.ensure(at, began).await,
            Op::TakeWithin { key, kind, .. } => self.take_within(at, key, kind, began).await,
            Op::Downgrade { .. } => {
                // What is no write lock is dropped.
                self.knows_if_it_is_waited_for(at, began).await?;
                self.downgrade(at, began).await
            }
            Op::Release { .. } => {
                self.knows_if_it_is_waited_for(at, began).await?;
                let guard = self.guards.remove(at);
                let expected = self.leaves(&guard.of);
                let outcome = match guard.real {
                    Real::Lock(guard) => guard.release().await,
                    Real::Several(guard) => guard.release().await,
                    Real::Permit(guard) => guard.release().await,
                };
                self.answered(expected, outcome, |()| Answer::Nothing, began)
            }
            _ => {
                self.knows_if_it_is_waited_for(at, began).await?;
                let guard = self.guards.remove(at);
                self.leaves(&guard.of);
                Ok(())
            }
        }
    }

    /// A lock that was forced open goes on to its waiter in the same process all the same, for a few milliseconds after
    /// its acquisition, unless its holder has asked.
    async fn knows_if_it_is_waited_for(&mut self, at: usize, began: Instant) -> Done {
        let gone = self.guards[at].of.iter().any(|(grant, _)| {
            let Grant {
                wanted,
                stored,
                known,
                ..
            } = &self.model.grants[*grant];
            let waits = self.waiters[wanted.key].as_ref();
            !stored && known.is_none() && waits.is_some_and(|waiter| waiter.wanted.owner == wanted.owner)
        });
        if gone {
            self.ensure(at, began).await
        } else {
            Ok(())
        }
    }

    /// What the release of a guard answers.
    pub(super) fn leaves(&mut self, of: &[(usize, u64)]) -> Answer {
        let losses = of.iter().map(|(grant, hold)| self.model.leave(*grant, *hold));
        let losses: Vec<_> = losses.collect::<Vec<_>>().into_iter().flatten().collect();
        match losses[..] {
            [] => Answer::Nothing,
            [loss] => Answer::Lost(loss),
            _ => Answer::LostSeveral,
        }
    }

    pub(super) async fn take_within(&mut self, at: usize, key: usize, kind: Kind, began: Instant) -> Done {
        let Guard { owner, real, of } = &self.guards[at];
        let (Real::Lock(guard), [(grant, hold)], owner) = (real, &of[..], *owner) else {
            return Ok(());
        };
        let (grant, hold) = (*grant, *hold);
        let asking = self.clients[owner]
            .lock(self.name(key))
            .kind(lock_kind(kind))
            .try_acquire();
        let outer = guard.fencing_token();
        let outcome = guard.scope(asking).await;
        let wanted = Wanted {
            owner,
            key,
            kind,
            amount: 1,
            fixed: false,
        };
        match (self.model.within(grant, hold, kind, key), outcome) {
            (None, outcome) => self.took(wanted, RENEWED, outcome, began),
            (Some(Within::Enter), Ok(inner)) => {
                if inner.fencing_token() != outer {
                    return wrong(outer, inner);
                }
                let hold = self.model.enter(grant);
                self.hold(owner, Real::Lock(inner), vec![(grant, hold)]);
                Ok(())
            }
            (Some(Within::Under), Ok(inner)) => {
                let span = Span::new(began, Instant::now());
                let of = self.granted(wanted, inner.fencing_token(), span, (RENEWED, RENEWED))?;
                let from = self.model.grants[grant].holds.clone();
                self.model.grants[of.0].under = Some((grant, from));
                self.hold(owner, Real::Lock(inner), vec![of]);
                Ok(())
            }
            (Some(within), outcome) => {
                let expected = match within {
                    Within::Answer(expected) => expected,
                    _ => Answer::Granted,
                };
                self.answered(expected, outcome, |_| Answer::Granted, began)
            }
        }
    }

    pub(super) fn reenter(&mut self, at: usize, began: Instant) -> Done {
        let Guard { owner, real, of } = &self.guards[at];
        let (Real::Lock(guard), [(grant, _)], owner) = (real, &of[..], *owner) else {
            return Ok(());
        };
        let grant = *grant;
        match (self.model.grants[grant].known, guard.reenter()) {
            (None, Ok(again)) => {
                if again.fencing_token() != guard.fencing_token() {
                    return wrong(guard.fencing_token(), again);
                }
                let hold = self.model.enter(grant);
                self.hold(owner, Real::Lock(again), vec![(grant, hold)]);
                Ok(())
            }
            (known, outcome) => {
                let expected = known.map_or(Answer::Granted, Answer::Lost);
                self.answered(expected, outcome, |_| Answer::Granted, began)
            }
        }
    }

    pub(super) async fn ensure(&mut self, at: usize, began: Instant) -> Done {
        let Guard { real, of, .. } = &self.guards[at];
        let longest = 2 * RENEWED;
        let (outcome, several) = match real {
            Real::Lock(guard) => (guard.ensure(longest).await, false),
            Real::Permit(permit) => (permit.ensure(longest).await, false),
            Real::Several(guard) => (guard.ensure(longest).await, of.len() > 1),
        };
        let now = Instant::now();
        let of: Vec<_> = of.iter().map(|(grant, _)| *grant).collect();
        let mut loss = None;
        for grant in of {
            loss = loss.or(self.model.asked(grant));
            let grant = &mut self.model.grants[grant];
            if grant.known.is_some() {
                continue;
            }
            if grant.wanted.fixed {
                // What is left went over the wire in whole milliseconds, and took its time.
                grant.ends.min -= OVER;
                grant.ends.max += now - began;
            } else {
                grant.renewed(Span::new(began, now), RENEWED);
            }
        }
        let expected = match loss {
            Some(_) if several => Answer::LostOne,
            Some(loss) => Answer::Lost(loss),
            None => Answer::Invalid,
        };
        self.answered(expected, outcome, |()| Answer::Nothing, began)
    }

    pub(super) async fn downgrade(&mut self, at: usize, began: Instant) -> Done {
        if !matches!(self.guards[at].real, Real::Lock(_)) {
            return Ok(());
        }
        let Guard { owner, real, of } = self.guards.remove(at);
        let (Real::Lock(guard), [(at, hold)]) = (real, &of[..]) else {
            return wrong("one lock", of);
        };
        let (at, hold) = (*at, *hold);
        let write = self.model.grants[at].clone();
        if write.wanted.kind != Kind::Write {
            self.model.leave(at, hold);
            return self.answered(
                Answer::Invalid,
                guard.downgrade().await,
                |_| Answer::Granted,
                began,
            );
        }
        if write.known.is_none() && write.wanted.fixed && write.deadline.min < began + STEP {
            // Hardly anything would be left to read in.
            self.leaves(&of);
            return Ok(());
        }
        let outcome = guard.downgrade().await;
        let now = Instant::now();
        match (self.model.asked_to_read(at), outcome) {
            (None, Ok(read)) => {
                let lease = match write.wanted.fixed {
                    true => (write.deadline.min - now, write.deadline.max - began),
                    false => (RENEWED, RENEWED),
                };
                let wanted = Wanted {
                    kind: Kind::Read,
                    ..write.wanted
                };
                let of = self.granted(wanted, read.fencing_token(), Span::new(began, now), lease)?;
                // Other writers under the same lock do not enclose the new reader.
                self.model.grants[of.0].under = Some((at, vec![hold]));
                self.model.leave(at, hold);
                self.hold(owner, Real::Lock(read), vec![of]);
                Ok(())
            }
            (refused, outcome) => {
                self.model.leave(at, hold);
                let expected = refused.unwrap_or(Answer::Granted);
                self.answered(expected, outcome, |_| Answer::Granted, began)
            }
        }
    }
}
