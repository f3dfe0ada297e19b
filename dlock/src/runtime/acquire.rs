//! An acquire: re-entry first, then this process's queue, then the store.

mod call;
mod fair;
mod head;
mod permits;
mod position;
mod reenter;

use std::fmt::Debug;
use std::time::Duration;

use tokio::time::Instant;

pub(crate) use self::call::AcquireCall;
use self::head::HeadOutcome;
use crate::Error;
use crate::base::chance;
use crate::base::clock;
use crate::base::lock_id::LockId;
use crate::base::moment::Moment;
use crate::engine::acquire::{Next, Report, Rules, Step};
use crate::engine::evidence::{Evidence, Verdict};
use crate::engine::timing;
use crate::runtime::attempt::{AcquireTarget, AttemptOutcome};
use crate::runtime::emit::Event;
use crate::runtime::hold::Hold;
use crate::runtime::scope::{self, Scope};
use crate::runtime::waiters::{Delivered, JoinAt, QueueHead};
use crate::store::{Announce, Kind, StoreError, Watch};

/// Begins every acquire: returns the moment, and the frame of the caller.
pub(crate) async fn begin() -> (Instant, Scope) {
    let started = clock::now();
    // The asking frame is the one at the first poll.
    let scope = scope::current();
    // On memory nothing else here ever yields.
    tokio::task::consume_budget().await;
    (started, scope)
}

/// Ends every acquire: reports its outcome.
pub(crate) fn told<T>(outcome: Result<T, Error>, started: Instant, what: &impl Debug) -> Result<T, Error> {
    let event = match &outcome {
        Ok(_) => Event::Acquired {
            waited: clock::now().saturating_duration_since(started),
        },
        Err(error) => Event::NotAcquired { lock: what, error },
    };
    event.emit();
    outcome
}

impl AcquireCall {
    pub(crate) fn run(self) -> impl Future<Output = Result<Hold, Error>> + Send + use<> {
        let handle = self.handle.clone();
        handle.with_timers(async move {
            let (started, scope) = begin().await;
            told(self.go(started, &scope).await, started, &self.key)
        })
    }

    async fn go(&self, started: Instant, scope: &Scope) -> Result<Hold, Error> {
        self.check()?;
        let wait = Wait {
            call: self,
            target: self,
            started,
            until: self.until(started),
        };
        // Two permits are two, also in one frame.
        if !self.options.kind.is_permits()
            && let Some(guard) = wait.reenter(scope).await?
        {
            return Ok(guard);
        }
        if self.handle.shared().closing.is_cancelled() {
            return Err(Error::ClientClosed);
        }
        if self.once {
            return match self
                .attempt(0, None, Announce::Nothing)
                .await
                .map_err(|error| self.failed(error))?
            {
                AttemptOutcome::Got(guard) => Ok(guard),
                AttemptOutcome::Busy { left, .. } => Err(wait.not_acquired(left)),
                AttemptOutcome::TooFew => Err(wait.not_acquired(None)),
            };
        }
        if self.options.kind.waits_in_store() {
            return wait.in_store_queue().await;
        }
        let mut evidence = Evidence::default();
        if let Some(guard) = wait.read_at_once(&mut evidence).await? {
            return Ok(guard);
        }
        wait.in_local_queue(&mut evidence).await
    }
}

/// What ended the time in a queue.
enum Queued<T> {
    /// The lock, from the store or from another caller of this process, or the loss of what the waiter had.
    Ended(HeadOutcome<T>),
    /// The role of the queue head, for a reader that may ask along with others.
    ReadersEnter(QueueHead),
}

/// A call that may wait.
pub(crate) struct Wait<'a, G> {
    /// The key that is waited for.
    pub(crate) call: &'a AcquireCall,
    /// What the store is asked for.
    pub(crate) target: &'a G,
    pub(crate) started: Instant,
    pub(crate) until: Option<Instant>,
}

impl<G: AcquireTarget> Wait<'_, G> {
    pub(crate) fn not_acquired(&self, remaining: Option<Duration>) -> Error {
        self.call.not_acquired(self.started, remaining)
    }

    /// When the wait is over.
    async fn over(&self) {
        match self.until {
            Some(until) => clock::sleep_until(until).await,
            None => std::future::pending().await,
        }
    }

    /// Asks for a read lock at once where no caller of this process waits for it, and no other process is to go first:
    /// readers do not keep each other out. `None` for all other kinds, and where the reader has to wait.
    async fn read_at_once(&self, evidence: &mut Evidence) -> Result<Option<G::Got>, Error> {
        let AcquireCall {
            handle, key, options, ..
        } = self.call;
        let shared = handle.shared();
        if !options.kind.is_shared() {
            return Ok(None);
        }
        let of = LockId::new(options.kind, key);
        if shared.waiters.any(&of) || shared.fairness.is_pending(&of) {
            return Ok(None);
        }
        self.now(self.target.attempt(0, None, Announce::Nothing), evidence)
            .await
    }

    /// What the store grants at once. A call that is refused, or not answered, waits to be the queue head.
    async fn now(
        &self,
        outcome: impl Future<Output = Result<AttemptOutcome<G::Got>, StoreError>>,
        evidence: &mut Evidence,
    ) -> Result<Option<G::Got>, Error> {
        let asked = clock::now();
        evidence.asks(Moment::of(asked));
        let outcome = tokio::select! {
            biased;
            outcome = outcome => outcome,
            () = self.over() => return Err(self.gave_up(evidence, true)),
            () = self.call.handle.shared().closing.cancelled() => return Err(Error::ClientClosed),
        };
        match outcome {
            Ok(AttemptOutcome::Got(got)) => return Ok(Some(got)),
            Ok(AttemptOutcome::Busy { left, .. }) => self.is_busy(left, evidence),
            Ok(AttemptOutcome::TooFew) => self.is_busy(None, evidence),
            Err(error) => drop(self.failed(asked, error, evidence)?),
        }
        Ok(None)
    }

    /// The store replied that another client holds the lock, with so much left of its lease.
    pub(crate) fn is_busy(&self, left: Option<Duration>, evidence: &mut Evidence) {
        let now = Moment::now();
        evidence.is_busy(timing::finite(left).map(|left| now + left), now);
    }

    /// The request that was sent then has failed; the pause before the next one.
    fn failed(&self, asked: Instant, error: StoreError, evidence: &mut Evidence) -> Result<Duration, Error> {
        evidence
            .failed(Moment::of(asked), error, self.patience(), Moment::now())
            .map(jittered)
            .map_err(|error| self.call.failed(error))
    }

    fn patience(&self) -> Duration {
        self.call.handle.shared().settings.retry_for
    }

    /// When the patience with a failing store is over.
    async fn patience_ends(&self, evidence: &Evidence) {
        sleep_until(evidence.patience_ends(self.patience()).map(Moment::instant)).await;
    }

    /// Waits to be the queue head of this process, then at the store, or until the lock is handed off here.
    pub(crate) async fn in_local_queue(&self, evidence: &mut Evidence) -> Result<G::Got, Error> {
        let AcquireCall {
            handle,
            key,
            options,
            by,
            ..
        } = self.call;
        let shared = handle.shared();
        let mut at = JoinAt::End(options.lock.max_waiters);
        loop {
            let handoff_terms = self.target.handoff_terms();
            let entry = shared.waiters.join(options.kind, key, at, handoff_terms, by)?;
            let queued = {
                let waits = std::pin::pin!(async {
                    let delivered = tokio::select! {
                        biased;
                        () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                        delivered = entry.delivered() => delivered?,
                        () = self.over() => {
                            evidence.learn(entry.evidence(), Moment::of(self.started));
                            return Err(self.gave_up(evidence, false));
                        }
                    };
                    match delivered {
                        Delivered::Head(head) if head.opened => Ok(Queued::ReadersEnter(head)),
                        Delivered::Head(head) => {
                            self.as_head(&entry, head, evidence).await.map(Queued::Ended)
                        }
                        Delivered::Guard(guard) => Ok(Queued::Ended(HeadOutcome::of(self.takes(guard)))),
                        Delivered::Withdrawn => Ok(Queued::Ended(HeadOutcome::Lost)),
                    }
                });
                entry.attended(waits).await?
            };
            let got = match queued {
                Queued::Ended(HeadOutcome::Got(got)) => {
                    at = JoinAt::Front;
                    Some(got)
                }
                Queued::Ended(HeadOutcome::Lost) => {
                    // A waiter never loses its position in the queue to those that came later.
                    at = JoinAt::Front;
                    None
                }
                Queued::Ended(HeadOutcome::TooFewPermits) => {
                    drop(entry);
                    at = JoinAt::End(None);
                    self.until_there_are_more(evidence).await?;
                    None
                }
                Queued::ReadersEnter(head) => {
                    let outcome = self.target.attempt(0, None, Announce::Nothing);
                    // The request of the next waiter here goes along with this one.
                    drop((head, entry));
                    at = JoinAt::End(None);
                    self.now(outcome, evidence).await?
                }
            };
            if let Some(got) = got.filter(G::is_held) {
                return Ok(got);
            }
        }
    }

    /// How the store is asked.
    fn rules(&self) -> Rules {
        let kind = self.call.options.kind;
        let fair = kind.waits_in_store();
        Rules {
            fair,
            has_position: !fair && self.call.has_position(),
            permits: kind == Kind::Permit,
            patience: self.patience(),
            started: Moment::of(self.started),
        }
    }

    /// What was handed off, where it is still held: the process may have been stopped since.
    fn takes(&self, guard: Hold) -> Option<G::Got> {
        guard.is_held().then(|| self.target.handed_off(guard))
    }

    /// The error of a step that ends the call without the lock.
    fn reported(&self, step: Step) -> Error {
        match step.next {
            Next::Report(Report::GaveUp(verdict)) => self.verdict(verdict),
            _ => Error::ClientClosed,
        }
    }

    /// The wait, or the patience with the store, is over; `sent` says whether a request is on its way.
    pub(crate) fn gave_up(&self, evidence: &mut Evidence, sent: bool) -> Error {
        let evidence = std::mem::take(evidence);
        self.verdict(evidence.verdict(Moment::of(self.started), Moment::now(), sent))
    }

    fn verdict(&self, verdict: Verdict) -> Error {
        match verdict {
            Verdict::NotAcquired { remaining } => self.not_acquired(remaining),
            Verdict::Failed(error) => self.call.failed(error),
        }
    }
}

/// The next notification; returns how many there have been.
async fn changed(watch: &mut Option<Watch>) -> u64 {
    match watch {
        Some(watch) => {
            watch.changed().await;
            watch.count()
        }
        None => std::future::pending().await,
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => clock::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

fn jittered(pause: Duration) -> Duration {
    timing::jittered(pause, chance::fraction())
}
