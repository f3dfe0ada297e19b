//! An acquire: re-entry first, then this process's queue, then the store.

mod call;
mod fair;
mod head;
mod permits;
mod position;
mod reenter;

use std::fmt::Debug;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::time::Instant;

pub(crate) use self::call::AcquireCall;
use self::head::HeadOutcome;
use crate::base::chance;
use crate::base::clock;
use crate::base::lock_id::LockId;
use crate::base::moment::Moment;
use crate::base::reused::Reused;
use crate::engine::acquire::{Next, Report, Rules, Step};
use crate::engine::evidence::{Evidence, Verdict};
use crate::engine::timing;
use crate::runtime::attempt::{AcquireTarget, AttemptOutcome};
use crate::runtime::client::Shared;
use crate::runtime::emit::events::Of;
use crate::runtime::emit::meter::Series;
use crate::runtime::emit::trace::{AcquireTrace, Acquired, Path};
use crate::runtime::emit::{AcquireEnd, Event};
use crate::runtime::grants::Issuer;
use crate::runtime::hold::Hold;
use crate::runtime::outside::WithTimers;
use crate::runtime::scope::{self, Scope};
use crate::runtime::waiters::{Caller, Delivered, JoinAt, QueueEntry, QueueHead};
use crate::runtime::waits::{Waiting, WaitingCall};
use crate::store::{Announce, Kind, StoreError};
use crate::{Error, LockKey};

/// An acquire that has begun. Dropped before its outcome is [told](Self::told), it was cancelled.
pub(crate) struct Begun {
    pub(crate) started: Instant,
    series: Series,
    pub(crate) trace: AcquireTrace,
    /// The subject of its events, if there are listeners.
    heard: Option<Box<Heard>>,
    is_told: bool,
}

struct Heard {
    issuer: Arc<Issuer>,
    kind: Kind,
    keys: Vec<LockKey>,
}

impl Heard {
    fn of(&self) -> Vec<Of<'_>> {
        let of = |key| Of {
            listeners: &self.issuer.listeners,
            key,
            kind: self.kind,
            grant: None,
        };
        self.keys.iter().map(of).collect()
    }
}

/// Begins every acquire, at its first poll: returns the frame of the caller.
pub(crate) async fn begin() -> Scope {
    // The frames around the caller are those at the first poll.
    let scope = scope::current();
    // With the memory store nothing else here ever yields.
    tokio::task::consume_budget().await;
    scope
}

impl Begun {
    /// Begins an acquire.
    pub(crate) fn new(call: &AcquireCall, keys: &[LockKey]) -> Begun {
        Begun::of(call.handle.shared(), call.series.clone(), call.options.kind, keys)
    }

    /// Begins an acquire of locks of this kind.
    pub(crate) fn of(shared: &Shared, series: Series, kind: Kind, keys: &[LockKey]) -> Begun {
        let started = clock::now();
        Event::AcquireBegins { series: &series }.emit();
        let issuer = shared.issuer();
        let heard = issuer.listeners.is_heard().then(|| {
            Box::new(Heard {
                issuer: issuer.clone(),
                kind,
                keys: keys.to_vec(),
            })
        });
        Begun {
            started,
            series,
            trace: AcquireTrace::default(),
            heard,
            is_told: false,
        }
    }

    /// Ends every acquire: reports its outcome.
    pub(crate) fn told<T: Acquired>(
        mut self,
        outcome: Result<T, Error>,
        what: &impl Debug,
    ) -> Result<T, Error> {
        self.is_told = true;
        let of = self.subjects();
        let end = self.end(&of);
        let event = match &outcome {
            Ok(got) => Event::Acquired { end, got },
            Err(error) => Event::NotAcquired {
                end,
                lock: what,
                error,
            },
        };
        event.emit();
        outcome
    }

    fn subjects(&self) -> Vec<Of<'_>> {
        self.heard.as_deref().map_or_else(Vec::new, Heard::of)
    }

    fn end<'a>(&'a self, of: &'a [Of<'a>]) -> AcquireEnd<'a> {
        AcquireEnd {
            series: &self.series,
            trace: &self.trace,
            of,
            waited: clock::now().saturating_duration_since(self.started),
        }
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        if !self.is_told {
            Event::AcquireDropped(self.end(&self.subjects())).emit();
        }
    }
}

impl AcquireCall {
    pub(crate) fn run(self) -> impl Future<Output = Result<Hold, Error>> + Send + use<> {
        let mut this = self;
        WithTimers::new(this.handle.clone(), async move { this.acquires().await })
    }

    /// Acquires the lock. By reference: a future that takes its arguments by value has room for them twice.
    pub(crate) async fn acquires(&mut self) -> Result<Hold, Error> {
        let begun = Begun::new(self, std::slice::from_ref(&self.key));
        let scope = begin().await;
        self.nested = scope.is_inside(self.handle.shared());
        let outcome = self.go(&begun, &scope).await;
        if let (Ok(hold), Some(_)) = (&outcome, &self.options.note) {
            hold.grant().note_of_acquisition(&self.options.note);
        }
        begun.told(outcome, &self.key)
    }

    async fn go(&self, begun: &Begun, scope: &Scope) -> Result<Hold, Error> {
        self.check()?;
        let wait = Wait {
            call: self,
            target: self,
            started: begun.started,
            until: self.until(begun.started),
            waiting: Waiting::of(&begun.trace),
        };
        // Two permits are separate, even in one frame.
        if !self.options.kind.is_permits()
            && let Some(guard) = wait.reenter(scope).await?
        {
            return Ok(guard);
        }
        if self.ending().is_given() {
            return Err(self.ended());
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
            return Box::pin(wait.in_store_queue()).await;
        }
        let mut evidence = Evidence::default();
        if let Some(guard) = wait.read_at_once(&mut evidence).await? {
            return Ok(guard);
        }
        wait.in_local_queue(&mut evidence).await
    }
}

/// How the wait in a queue ended.
enum Queued<T> {
    /// The lock, from the store or from another caller of this process, or the loss of what the waiter had.
    Ended(HeadOutcome<T>),
    /// The role of the queue head, for a reader that may ask concurrently with others.
    ReadersEnter(Reused<QueueHead>),
}

/// A call that may wait.
pub(crate) struct Wait<'a, G> {
    /// The key that the call waits for.
    pub(crate) call: &'a AcquireCall,
    /// What to ask the store for.
    pub(crate) target: &'a G,
    pub(crate) started: Instant,
    pub(crate) until: Option<Instant>,
    /// Set once it really waits.
    pub(crate) waiting: Waiting<'a>,
}

impl<G: AcquireTarget> Wait<'_, G> {
    pub(crate) fn not_acquired(&self, remaining: Option<Duration>) -> Error {
        self.call
            .not_acquired(self.started, remaining, self.waiting.holder())
    }

    /// Registers the call as waiting.
    fn begins_to_wait(&self) {
        self.waiting.begin(|| {
            let AcquireCall {
                handle,
                key,
                options,
                by,
                ..
            } = self.call;
            let call = WaitingCall::new(
                options.kind,
                key,
                Moment::of(self.started),
                by,
                options.note.clone(),
            );
            (handle.shared().waits.clone(), call, options.lock.group)
        });
    }

    /// Completes when the wait time is over.
    async fn over(&self) {
        sleep_until(self.until).await;
    }

    /// Completes when the call has to end, while it is a waiter of this process: all of these are polled then.
    async fn is_to_end(&self) {
        let ending = self.call.ending();
        std::future::poll_fn(|_| match ending.is_given() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
    }

    /// Asks for a read lock at once if no caller of this process waits for it, and no other process goes first: readers
    /// do not exclude each other. `None` for all other kinds, and if the reader has to wait.
    async fn read_at_once(&self, evidence: &mut Evidence) -> Result<Option<G::Got>, Error> {
        let AcquireCall {
            handle, key, options, ..
        } = self.call;
        let shared = handle.shared();
        if !options.kind.is_shared() {
            return Ok(None);
        }
        let of = LockId::new(options.kind, key);
        if shared.waiters.of(&of).any(&of) || shared.fairness.is_pending(&of) {
            return Ok(None);
        }
        let asked = clock::now();
        self.now(asked, self.target.attempt(0, None, Announce::Nothing), evidence)
            .await
    }

    /// Returns what the store grants at once to a request that was made then. A call that is refused, or not answered, waits to
    /// become the queue head.
    async fn now(
        &self,
        asked: Instant,
        outcome: impl Future<Output = Result<AttemptOutcome<G::Got>, StoreError>>,
        evidence: &mut Evidence,
    ) -> Result<Option<G::Got>, Error> {
        evidence.asks(Moment::of(asked));
        let outcome = tokio::select! {
            biased;
            outcome = outcome => outcome,
            // Before the timer, which is that of a runtime that may have ended.
            () = self.call.ending().given() => return Err(self.call.ended()),
            () = self.over() => {
                let sent = !self.call.was_not_sent(Moment::of(asked));
                return Err(self.gave_up(evidence, sent));
            }
        };
        match outcome {
            Ok(AttemptOutcome::Got(got)) => return Ok(Some(got)),
            Ok(AttemptOutcome::Busy { left, .. }) => self.is_busy(left, evidence),
            Ok(AttemptOutcome::TooFew) => self.is_busy(None, evidence),
            Err(error) => drop(self.failed(asked, error, evidence)?),
        }
        Ok(None)
    }

    /// Records that another client holds the lock, with this remaining lease.
    pub(crate) fn is_busy(&self, left: Option<Duration>, evidence: &mut Evidence) {
        let now = Moment::now();
        evidence.is_busy(timing::finite(left).map(|left| now + left), now);
    }

    /// Records the failure of a request; returns the pause before the next one.
    fn failed(&self, asked: Instant, error: StoreError, evidence: &mut Evidence) -> Result<Duration, Error> {
        evidence
            .failed(Moment::of(asked), error, self.patience(), Moment::now())
            .map(chance::jittered)
            .map_err(|error| self.call.failed(error))
    }

    fn patience(&self) -> Duration {
        self.call.handle.shared().settings.retry_for
    }

    /// Joins the queue of the key in this process.
    fn joins(&self, at: JoinAt) -> Result<QueueEntry, Error> {
        let AcquireCall {
            handle,
            key,
            options,
            by,
            ..
        } = self.call;
        let of = LockId::new(options.kind, key);
        let waiters = handle.shared().waiters.of(&of);
        let caller = Caller::new(by, options.lock.group);
        waiters.join(of, at, self.target.handoff_terms(), caller)
    }

    /// Waits to become the queue head of this process, then at the store, or until the lock is handed off here.
    pub(crate) async fn in_local_queue(&self, evidence: &mut Evidence) -> Result<G::Got, Error> {
        let mut at = JoinAt::End(self.call.options.lock.max_waiters);
        loop {
            let entry = self.joins(at)?;
            if entry.has_waited() {
                self.begins_to_wait();
            }
            let queued = {
                let waits = std::pin::pin!(async {
                    let delivered = match entry.delivered_before()? {
                        Some(_) if self.call.ending().is_given() => return Err(self.call.ended()),
                        Some(delivered) => delivered,
                        None => tokio::select! {
                            biased;
                            () = self.is_to_end() => return Err(self.call.ended()),
                            delivered = entry.delivered() => delivered?,
                            () = self.over() => {
                                evidence.learn(entry.evidence(), Moment::of(self.started));
                                return Err(self.gave_up(evidence, false));
                            }
                        },
                    };
                    match delivered {
                        Delivered::Head(head) if head.opened.is_some_and(|at| entry.arrival() < at) => {
                            Ok(Queued::ReadersEnter(head))
                        }
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
                    at = JoinAt::Again(entry.arrival());
                    Some(got)
                }
                Queued::Ended(HeadOutcome::Lost) => {
                    // A waiter never loses its position in the queue to later waiters.
                    at = JoinAt::Again(entry.arrival());
                    None
                }
                Queued::Ended(HeadOutcome::TooFewPermits) => {
                    drop(entry);
                    at = JoinAt::End(None);
                    Box::pin(self.until_there_are_more(evidence)).await?;
                    None
                }
                Queued::ReadersEnter(head) => {
                    let asked = clock::now();
                    let outcome = self.target.attempt(0, None, Announce::Nothing);
                    // The request of the next waiter here is sent together with this one. Refused, this one joins again as
                    // one that has come since.
                    drop((head, entry));
                    at = JoinAt::End(None);
                    self.now(asked, outcome, evidence).await?
                }
            };
            if let Some(got) = got.filter(G::is_held) {
                return Ok(got);
            }
        }
    }

    /// The rules for asking the store.
    fn rules(&self) -> Rules {
        let kind = self.call.options.kind;
        let fair = kind.waits_in_store();
        Rules {
            fair,
            has_position: !fair && self.call.has_position(),
            permits: kind == Kind::Permit,
            patience: self.patience(),
            started: Moment::of(self.started),
            until: self.until.map(Moment::of),
        }
    }

    /// Accepts a handed-off lock if it is still held: the process may have been stopped since.
    fn takes(&self, guard: Hold) -> Option<G::Got> {
        guard.is_held().then(|| {
            self.waiting.comes_by(Path::Handoff);
            self.target.handed_off(guard)
        })
    }

    /// Returns the error of a step that ends the call without the lock.
    fn reported(&self, step: Step) -> Error {
        match step.next {
            Next::Report(Report::GaveUp(verdict)) => self.verdict(verdict),
            _ => self.call.ended(),
        }
    }

    /// Ends the call because the wait time or `retry_for` is over; `sent` says whether a request is in flight.
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

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => clock::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
