//! Acquiring several locks: re-entry first, then one request to the store for all of them. When one key is busy, the
//! call joins the queue of that key, and the head of that queue asks for all again.

use std::sync::Arc;

use futures_util::FutureExt;

use super::attempt::{At, Guards, Round, Sent, Step, acquire_groups, groups};
use super::in_order::FailedRounds;
use super::{Keys, MultiGuard};
use crate::api::guard::LockGuard;
use crate::api::held::View;
use crate::engine::evidence::Evidence;
use crate::engine::handoff::HandoffTerms;
use crate::engine::timing::ASK_IN_SET_EVERY;
use crate::runtime::acquire::{self, Begun, Wait};
use crate::runtime::attempt::{AcquireTarget, AttemptOutcome};
use crate::runtime::hold::Hold;
use crate::runtime::options::check_at_once;
use crate::runtime::outside::WithTimers;
use crate::runtime::release::RunToCompletion;
use crate::runtime::scope::Scope;
use crate::runtime::waits::Waiting;
use crate::store::{Announce, Busy, GrantId, StoreError};
use crate::{Error, LockKey};

/// One call of acquire.
pub(super) struct MultiCall {
    /// In the order of their names, each once.
    pub(super) keys: Keys,
    /// The same call for the first key alone.
    pub(super) first: acquire::AcquireCall,
}

impl MultiCall {
    pub(super) fn check(&self) -> Result<(), Error> {
        if self.keys.is_empty() {
            return Err(Error::invalid_option(
                "keys",
                "there is none: name at least one lock",
            ));
        }
        let remedy = "take fewer, or one lock that stands for many";
        check_at_once("keys", self.keys.len(), remedy)?;
        self.keys.iter().try_for_each(LockKey::check)?;
        let options = &self.first.options;
        if options.kind.waits_in_store() && self.keys.len() > 1 {
            return Err(Error::invalid_option(
                "kind",
                "fair locks cannot be acquired together; acquire them one at a time",
            ));
        }
        options.check()?;
        self.first.check_store()
    }

    pub(super) fn run(self) -> impl Future<Output = Result<MultiGuard, Error>> + Send + use<> {
        let mut this = self;
        WithTimers::new(this.first.handle.clone(), async move { this.acquires().await })
    }

    async fn acquires(&mut self) -> Result<MultiGuard, Error> {
        if self.keys.len() == 1 {
            let only = self.first.acquires().await?;
            return Ok(MultiGuard::new(only.into(), std::iter::empty()));
        }
        let begun = Begun::new(&self.first, &self.keys);
        let scope = acquire::begin().await;
        self.first.nested = scope.is_inside(self.first.handle.shared());
        // Boxed, since the future of a single lock, as each request of a lock layer has it, would be as large.
        let outcome = Box::pin(self.go(&begun, &scope)).await;
        if let (Ok(guard), Some(_)) = (&outcome, &self.first.options.note) {
            for grant in View::grants(guard) {
                grant.note_of_acquisition(&self.first.options.note);
            }
        }
        begun.told(outcome, &self.keys)
    }

    async fn go(&self, begun: &Begun, scope: &Scope) -> Result<MultiGuard, Error> {
        self.check()?;
        let started = begun.started;
        let until = self.first.until(started);
        let mut at = 0;
        let mut failed_rounds = FailedRounds::new();
        let mut evidence = Evidence::default();
        loop {
            let (outer, rest) = self.by_frames(scope);
            for outer in &outer {
                let one = self.one(*outer);
                let wait = Wait {
                    call: &one,
                    target: &one,
                    started,
                    until,
                    waiting: Waiting::default(),
                };
                // Entered only once all others are acquired: until then no other caller may wait for this call.
                drop(wait.reenter(scope).await?);
            }
            let mut guards = Vec::new();
            if let Some(first) = rest.first() {
                if self.first.ending().is_given() {
                    return Err(self.first.ended());
                }
                if !rest.contains(&at) {
                    at = *first;
                }
                let one = self.one(at);
                let all = AllOf {
                    call: self,
                    at,
                    rest: &rest,
                };
                let wait = Wait {
                    call: &one,
                    target: &all,
                    started,
                    until,
                    waiting: Waiting::of(&begun.trace),
                };
                let round = match self.first.once {
                    true => all
                        .asks(0, None, |round| round)
                        .await
                        .map_err(|error| one.failed(error))?,
                    false => wait.in_local_queue(&mut evidence).await?,
                };
                match round {
                    Round::All(all) => guards = all,
                    Round::Busy((busy, reply)) if self.first.once => {
                        return Err(self.one(busy).not_acquired(started, reply.remaining, None));
                    }
                    Round::Busy((busy, reply)) => {
                        at = busy;
                        wait.is_busy(reply.remaining, &mut evidence);
                        let Some(patience) = failed_rounds.again() else {
                            continue;
                        };
                        match self
                            .in_order(&rest, (begun, until), patience, &mut evidence)
                            .await?
                        {
                            Some(all) => guards = all,
                            None => continue,
                        }
                    }
                    Round::Failed((failed, error)) => return Err(self.one(failed).failed(error)),
                }
            }
            if self.enter(scope, &outer, &mut guards).await {
                guards.sort_by_key(|(at, _)| *at);
                let mut guards = guards.into_iter().map(|(_, guard)| LockGuard::from(guard));
                if let Some(first) = guards.next() {
                    return Ok(MultiGuard::new(first, guards));
                }
            }
        }
    }

    /// The same call for one of the keys alone.
    pub(super) fn one(&self, at: usize) -> acquire::AcquireCall {
        self.first.for_key(&self.keys[at])
    }

    /// The keys that the frames of the caller hold, and the others.
    fn by_frames(&self, scope: &Scope) -> (Vec<usize>, Vec<usize>) {
        (0..self.keys.len()).partition(|at| self.one(*at).is_enclosed(scope))
    }

    /// Re-enters the holds that enclose the caller; returns false if they have changed since they were looked up.
    async fn enter(&self, scope: &Scope, outer: &[usize], guards: &mut Vec<At<Hold>>) -> bool {
        for at in outer {
            let Some(guard) = self.one(*at).enter(scope).await else {
                return false;
            };
            guards.push((*at, guard));
        }
        true
    }
}

/// What the queue head of a key asks the store for.
struct AllOf<'a> {
    call: &'a MultiCall,
    /// The key.
    at: usize,
    /// All that no frame holds.
    rest: &'a [usize],
}

impl AllOf<'_> {
    /// Asks for all of them; `read` interprets the reply.
    fn asks<T: Send + 'static>(
        &self,
        handed: u32,
        waiter: Option<GrantId>,
        read: impl FnOnce(Round<Guards>) -> T + Send + 'static,
    ) -> RunToCompletion<Result<T, StoreError>> {
        let waiter = waiter.map(|id| (self.at, id));
        let mut groups = groups(self.rest.iter().map(|at| (*at, self.call.one(*at))));
        // The waiter's key comes first, because the first busy key is the one reported: a caller that still waits for
        // the same key keeps its position. A caller that released other keys for another busy one counts a failed
        // round.
        groups.sort_by_key(|group| group.iter().all(|(of, _)| *of != self.at));
        if let Some(first) = groups.first_mut() {
            first.sort_by_key(|(of, _)| *of != self.at);
        }
        let mut groups = groups.into_iter();
        let handle = &self.call.first.handle;
        let counted = handle.shared().pending.token();
        // Takes its position in the order of operations now, not when polled.
        let sent = Arc::<Sent>::default();
        let first = Step::new(groups.next().unwrap_or_default(), handed, waiter, &sent);
        let round = acquire_groups(first, groups, handed, waiter, sent.clone()).map(|round| round.map(read));
        handle.run_counted(counted, round).or_undo(move || sent.undo())
    }
}

impl AcquireTarget for AllOf<'_> {
    type Got = Round<Guards>;

    /// No handoff: the other keys would be requested while this one is held.
    fn handoff_terms(&self) -> Option<HandoffTerms> {
        None
    }

    fn attempt(
        &self,
        handed: u32,
        waiter: Option<GrantId>,
        _announce: Announce,
    ) -> RunToCompletion<Result<AttemptOutcome<Round<Guards>>, StoreError>> {
        let at = self.at;
        let again = self.call.first.has_position().then_some(ASK_IN_SET_EVERY);
        self.asks(handed, waiter, move |round| match round {
            Round::Busy((busy, reply)) if busy == at => AttemptOutcome::Busy {
                left: reply.remaining,
                again,
                listeners: None,
                pause: reply.pause,
            },
            round => AttemptOutcome::Got(round),
        })
    }

    fn handed_off(&self, guard: Hold) -> Round<Guards> {
        // Never offered, because it is not wanted. Asking again is always correct.
        drop(guard);
        Round::Busy((self.at, Busy::default()))
    }

    fn guard<'g>(&self, got: &'g Round<Guards>) -> Option<&'g Hold> {
        let Round::All(guards) = got else { return None };
        let own = guards.iter().find(|(at, _)| *at == self.at);
        own.map(|(_, guard)| guard)
    }

    fn is_held(got: &Round<Guards>) -> bool {
        let Round::All(guards) = got else { return true };
        guards.iter().all(|(_, guard)| guard.is_held())
    }
}
