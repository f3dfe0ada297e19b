//! The fallback for a call that never finds all of its keys available at once: it acquires them one after the other, in
//! the order of their names, and keeps what it has for a while.
//!
//! Such calls cannot deadlock with each other: all of them take their keys in the same order. They could deadlock with
//! callers that take single locks in another order. So a call that holds some of its keys waits for the next one for a
//! limited time only; then it releases all, tries all at once again, and comes back here with a longer limit.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::Instant;

use super::acquire::MultiCall;
use super::attempt::{At, Round, Sent, Step, Taken, take};
use crate::Error;
use crate::base::clock;
use crate::engine::evidence::Evidence;
use crate::engine::handoff::HandoffTerms;
use crate::engine::timing::ASK_IN_SET_EVERY;
use crate::runtime::acquire::{Begun, Wait};
use crate::runtime::attempt::{AcquireTarget, AttemptOutcome};
use crate::runtime::hold::Hold;
use crate::runtime::release::RunToCompletion;
use crate::runtime::waits::Waiting;
use crate::store::{Announce, Busy, GrantId, StoreError};

/// How many attempts in a row may find one of the keys available and another one busy.
const LOOKS: u32 = 8;
/// How long a call that holds other keys waits for the next: initially, and at most.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Counts the failed rounds, and derives the time limit.
pub(super) struct FailedRounds {
    looks: u32,
    patience: Duration,
}

impl FailedRounds {
    pub(super) fn new() -> FailedRounds {
        FailedRounds {
            looks: 0,
            patience: PATIENCE.0,
        }
    }

    /// Counts a failed round. Returns how long the call may now wait for a key while it holds others; `None` if it may
    /// not yet.
    pub(super) fn again(&mut self) -> Option<Duration> {
        self.looks += 1;
        if self.looks < LOOKS {
            return None;
        }
        self.looks = 0;
        let patience = self.patience;
        self.patience = (patience * 2).min(PATIENCE.1);
        Some(patience)
    }
}

impl MultiCall {
    /// Acquires these keys one after the other. `None` if one of them was not acquired in time, or was lost in between:
    /// then nothing is kept.
    pub(super) async fn in_order(
        &self,
        rest: &[usize],
        (begun, until): (&Begun, Option<Instant>),
        patience: Duration,
        evidence: &mut Evidence,
    ) -> Result<Option<Vec<At<Hold>>>, Error> {
        let mut taken = Taken::default();
        for at in rest {
            let one = self.one(*at);
            // The wait for the first key is unlimited, as no other key is held.
            let limit = (!taken.is_empty()).then(|| clock::now() + patience);
            let wait = Wait {
                call: &one,
                target: &Next { call: self, at: *at },
                started: begun.started,
                until: until.into_iter().chain(limit).min(),
                waiting: Waiting::of(&begun.trace),
            };
            let next = tokio::select! {
                biased;
                next = wait.in_local_queue(evidence) => next,
                () = taken.keep() => return Ok(None),
            };
            match next {
                Ok(Round::All(next)) => taken.add(next),
                Ok(Round::Failed((_, error))) => return Err(one.failed(error)),
                Ok(Round::Busy(_)) => return Ok(None),
                Err(error) => {
                    let now = clock::now();
                    let ended = |end: Option<Instant>| end.is_some_and(|end| end <= now);
                    // The limit for this key is over, but not the wait: the call may ask for all again.
                    let is_late = matches!(
                        error,
                        Error::NotAcquired { .. } | Error::Unreachable { .. } | Error::OutcomeUnknown { .. }
                    );
                    return match is_late && ended(limit) && !ended(until) {
                        true => Ok(None),
                        false => Err(error),
                    };
                }
            }
        }
        // In one operation for all of them, so that they end together and each is certainly held.
        let guards = match taken.begin_now(true).await {
            Ok(()) => taken.guards(),
            Err(error) => Err(error),
        };
        match guards {
            Ok(guards) => Ok(Some(guards)),
            Err(error) if error.is_passing() => Ok(None),
            Err(error) => Err(self.first.failed(error)),
        }
    }
}

/// The next key only.
struct Next<'a> {
    call: &'a MultiCall,
    at: usize,
}

impl AcquireTarget for Next<'_> {
    type Got = Round<Taken>;

    /// No handoff: a handed-off lock already has a guard, and these leases begin with the last key.
    fn handoff_terms(&self) -> Option<HandoffTerms> {
        None
    }

    fn attempt(
        &self,
        handed: u32,
        waiter: Option<GrantId>,
        _announce: Announce,
    ) -> RunToCompletion<Result<AttemptOutcome<Round<Taken>>, StoreError>> {
        let waiter = waiter.map(|id| (self.at, id));
        let one = self.call.one(self.at);
        let again = one.has_position().then_some(ASK_IN_SET_EVERY);
        let handle = one.handle.clone();
        let counted = handle.shared().pending.token();
        // Takes its position in the order of operations now; it is finished and undone if this is dropped.
        let sent = Arc::<Sent>::default();
        let step = Step::new(vec![(self.at, one)], handed, waiter, &sent);
        let round = take(step, std::iter::empty(), handed, waiter, sent.clone()).map(move |round| {
            Ok(match round? {
                Round::Busy((_, busy)) => AttemptOutcome::Busy {
                    left: busy.remaining,
                    again,
                    listeners: None,
                    pause: busy.pause,
                },
                round => AttemptOutcome::Got(round),
            })
        });
        handle.run_counted(counted, round).or_undo(move || sent.undo())
    }

    fn handed_off(&self, guard: Hold) -> Round<Taken> {
        // Never offered, because it is not wanted.
        drop(guard);
        Round::Busy((self.at, Busy::default()))
    }

    fn guard<'g>(&self, _got: &'g Round<Taken>) -> Option<&'g Hold> {
        None
    }

    fn is_held(_got: &Round<Taken>) -> bool {
        true
    }
}
