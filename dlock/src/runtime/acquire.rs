//! The way of an acquire: re-entry first, then this process's queue, then the store.

mod crowd;
mod fair;
mod reenter;

use std::fmt::Debug;
use std::panic::Location;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::time::Instant;

use self::crowd::asks_next;
use crate::base::broken;
use crate::base::chance;
use crate::base::clock;
use crate::base::lock_id::LockId;
use crate::base::moment::Moment;
use crate::engine::crowd::Crowd;
use crate::engine::evidence::{Evidence, Verdict};
use crate::engine::fairness::YieldRound;
use crate::engine::handoff::{DEFAULT_HANDOFFS, HandoffTerms};
use crate::engine::timing::{
    self, ASK_FOR_PERMITS_EVERY, LONGEST_SLEEP, POSITION_ENDS_WITHIN, until_next_request,
};
use crate::runtime::attempt::{AcquireAttempt, AcquireTarget, AttemptOutcome};
use crate::runtime::capable;
use crate::runtime::client::Handle;
use crate::runtime::emit::Event;
use crate::runtime::fairness::let_go_first;
use crate::runtime::hold::Hold;
use crate::runtime::options::{LONGEST, Lease, LockOptions, Options};
use crate::runtime::release::RunToCompletion;
use crate::runtime::scope::{self, Scope};
use crate::runtime::unfinished::Part;
use crate::runtime::waiters::{Called, JoinAt, QueueEntry, QueueHead};
use crate::store::counter::{CounterReply, CounterRequest, CounterStep};
use crate::store::{Announce, GrantId, Kind, Outcome, ReleaseRequest, StoreError, Watch};
use crate::{Error, LockKey};

/// One call of acquire, or what a call for several keys says of one of them.
#[derive(Clone)]
pub(crate) struct AcquireCall {
    pub(crate) handle: Arc<Handle>,
    pub(crate) key: LockKey,
    pub(crate) options: Options,
    /// Ask once, wait for nobody.
    pub(crate) once: bool,
    pub(crate) by: &'static Location<'static>,
}

/// The beginning of every acquire: when it was, and which frame asks.
pub(crate) async fn begin() -> (Instant, Scope) {
    let started = clock::now();
    // The asking frame is the one at the first poll.
    let scope = scope::current();
    // On memory nothing else here ever yields.
    tokio::task::consume_budget().await;
    (started, scope)
}

/// The end of every acquire: what came of it, counted.
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

impl AcquireTarget for AcquireCall {
    type Got = Hold;

    fn handoff_terms(&self) -> Option<HandoffTerms> {
        let LockOptions {
            max_hold, min_hold, ..
        } = self.options.lock;
        let fixed = self.options.lock.fixed();
        let lease = self.lease();
        // What has to be set up at the store, the store is asked for.
        let plain = fixed.is_none() && min_hold.is_none() && max_hold.is_none_or(|most| most >= lease);
        let handoffs = self.handoffs();
        (plain && handoffs > 0).then_some(HandoffTerms {
            lease,
            max_hold,
            handoffs,
        })
    }

    fn attempt(
        &self,
        handed: u32,
        waiter: Option<GrantId>,
        announce: Announce,
    ) -> RunToCompletion<Result<AttemptOutcome<Hold>, StoreError>> {
        let mut attempt = AcquireAttempt::new(self, handed, waiter);
        attempt.request.announce = announce;
        AcquireCall::ask(attempt)
    }

    fn handed_off(&self, guard: Hold) -> Hold {
        guard
    }

    fn guard<'g>(&self, got: &'g Hold) -> Option<&'g Hold> {
        Some(got)
    }

    fn is_held(_got: &Hold) -> bool {
        // It came with the answer to this request.
        true
    }
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
        if let Some(guard) = wait.unless_somebody_waits(&mut evidence).await? {
            return Ok(guard);
        }
        wait.in_local_queue(&mut evidence).await
    }

    /// When the wait is over.
    pub(crate) fn until(&self, started: Instant) -> Option<Instant> {
        match self.once {
            true => Some(started),
            false => self.options.lock.wait.map(|wait| started + wait),
        }
    }

    pub(crate) fn not_acquired(&self, started: Instant, remaining: Option<Duration>) -> Error {
        let waited = match self.once {
            true => Duration::ZERO,
            false => clock::now().saturating_duration_since(started),
        };
        Error::NotAcquired {
            kind: self.options.kind,
            key: self.key.clone(),
            waited,
            remaining,
            votes: (self.handle.shared().store).explain(self.options.kind, &self.key),
        }
    }

    /// Whether name and options make sense, and the store can do what they ask for.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.key.check()?;
        self.options.check()?;
        self.check_store()
    }

    /// Whether the store can do what the options ask for.
    pub(crate) fn check_store(&self) -> Result<(), Error> {
        capable::check(&self.options, self.lease(), &self.handle.shared().capabilities)
    }

    pub(crate) fn handoffs(&self) -> u32 {
        // Each holder in a row of handoffs has a fencing token of its own.
        match self.options.kind.is_handed_off() && self.handle.shared().capabilities.token_blocks {
            true => self.options.lock.local_handoffs.unwrap_or(DEFAULT_HANDOFFS),
            false => 0,
        }
    }

    /// Whether who waits may have a place at the store, under an id of its own.
    pub(crate) fn takes_place(&self) -> bool {
        match self.options.kind {
            Kind::Write => self.options.prefer_writers,
            kind => kind == Kind::Permit,
        }
    }

    /// How many permits are asked for; 1 for all other kinds.
    pub(crate) fn amount(&self) -> u32 {
        self.options.permits.map_or(1, |permits| permits.amount)
    }

    /// The lease that is asked for.
    pub(crate) fn lease(&self) -> Duration {
        let LockOptions { lease, max_hold, .. } = self.options.lock;
        match lease {
            // A fixed lease is never confirmed for longer than `max_hold`.
            Some(Lease::Fixed(fixed)) => fixed.min(max_hold.unwrap_or(Duration::MAX)),
            Some(Lease::Renewed(lease)) => lease,
            None => self.handle.shared().settings.lease,
        }
    }

    pub(crate) fn failed(&self, error: StoreError) -> Error {
        error.into_error(&format!("the acquire of {}", self.options.kind.noun()), &self.key)
    }

    /// Asks the store. The step is finished even if this is dropped, and undone by a release right behind it.
    fn ask(attempt: AcquireAttempt) -> RunToCompletion<Result<AttemptOutcome<Hold>, StoreError>> {
        let (store, handle) = (attempt.store(), attempt.handle.clone());
        handle.ask(store.acquire(attempt.request.clone()), attempt)
    }
}

/// What ended the time in a queue.
enum Came<T> {
    /// The role of the queue head, or the lock from another caller of this process.
    Asked(Asked<T>),
    /// The role of the queue head, for a waiter that may ask along with others.
    Opened(QueueHead),
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

    /// The end of the wait.
    async fn over(&self) {
        match self.until {
            Some(until) => clock::sleep_until(until).await,
            None => std::future::pending().await,
        }
    }

    /// Readers do not keep each other out, so they need no turn to come in: nobody who waits here for the same is
    /// passed by, and there is nobody to be let in first. `None` for all others, and for those who have to wait.
    async fn unless_somebody_waits(&self, evidence: &mut Evidence) -> Result<Option<G::Got>, Error> {
        let AcquireCall {
            handle, key, options, ..
        } = self.call;
        let shared = handle.shared();
        if options.kind != Kind::Read {
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
        // A store's word for "no end" may be more than a clock can take.
        let left = left.filter(|left| *left <= LONGEST);
        evidence.is_busy(left.map(|left| now + left), now);
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

    /// The end of the patience with a store that fails.
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
        let mut line = JoinAt::End(options.lock.max_waiters);
        loop {
            let handoff_terms = self.target.handoff_terms();
            let entry = shared.waiters.join(options.kind, key, line, handoff_terms, by)?;
            let came = {
                let waits = std::pin::pin!(async {
                    let called = tokio::select! {
                        biased;
                        () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                        called = entry.called() => called?,
                        () = self.over() => {
                            evidence.learn(entry.evidence(), Moment::of(self.started));
                            return Err(self.gave_up(evidence, false));
                        }
                    };
                    match called {
                        Called::Head(head) if head.opened => Ok(Came::Opened(head)),
                        Called::Head(head) => self.at_store(&entry, head, evidence).await.map(Came::Asked),
                        Called::Guard(guard) => Ok(Came::Asked(Asked::of(self.takes(guard)))),
                        Called::Withdrawn => Ok(Came::Asked(Asked::Lost)),
                    }
                });
                entry.attended(waits).await?
            };
            let got = match came {
                Came::Asked(Asked::Got(got)) => {
                    line = JoinAt::Front;
                    Some(got)
                }
                Came::Asked(Asked::Lost) => {
                    // Nobody loses a place that was had.
                    line = JoinAt::Front;
                    None
                }
                Came::Asked(Asked::TooFew) => {
                    drop(entry);
                    line = JoinAt::End(None);
                    self.until_there_are_more(evidence).await?;
                    None
                }
                Came::Opened(head) => {
                    let outcome = self.target.attempt(0, None, Announce::Nothing);
                    // The request of the next one here goes along with this one.
                    drop((head, entry));
                    line = JoinAt::End(None);
                    self.now(outcome, evidence).await?
                }
            };
            if let Some(got) = got.filter(G::is_held) {
                return Ok(got);
            }
        }
    }

    /// Lets all others pass until the number of permits was changed, so that there may be as many as are wanted.
    async fn until_there_are_more(&self, evidence: &mut Evidence) -> Result<(), Error> {
        let AcquireCall {
            handle, key, options, ..
        } = self.call;
        let shared = handle.shared();
        let store = &shared.store;
        let counters = (shared.counters(options.kind)).map_err(|error| self.call.failed(error))?;
        let mut watch = Some(store.clone().watch(options.kind, key, shared.next_grant()));
        let mut pause = Duration::ZERO;
        Event::TooFewPermits {
            semaphore: key,
            wanted: self.call.amount(),
        }
        .emit();
        loop {
            let notifications = async {
                tokio::time::sleep(pause).await;
                let _ = tokio::time::timeout(LONGEST_SLEEP, changed(&mut watch)).await;
            };
            tokio::select! {
                biased;
                () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                () = self.over() => return Err(self.gave_up(evidence, false)),
                () = notifications => {}
            }
            let request = CounterRequest::new(key.clone(), shared.next_grant(), CounterStep::Permits);
            let asked = clock::now();
            evidence.asks(Moment::of(asked));
            let reply = tokio::select! {
                biased;
                () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                reply = counters.clone().count(request) => reply,
                () = self.over() => return Err(self.gave_up(evidence, true)),
            };
            pause = match reply {
                Ok(CounterReply::Permits {
                    free: Some(free),
                    held,
                }) if free.saturating_add_unsigned(held) < i64::from(self.call.amount()) => {
                    self.is_busy(None, evidence);
                    ASK_FOR_PERMITS_EVERY
                }
                Ok(_) => {
                    evidence.replied();
                    return Ok(());
                }
                Err(error) => {
                    // What was told meanwhile is not waited for a second time.
                    watch = Some(store.clone().watch(options.kind, key, shared.next_grant()));
                    self.failed(asked, error, evidence)?
                }
            };
        }
    }

    /// Is the queue head: asks the store until it grants the lock.
    async fn at_store(
        &self,
        entry: &QueueEntry,
        mut head: QueueHead,
        evidence: &mut Evidence,
    ) -> Result<Asked<G::Got>, Error> {
        let AcquireCall {
            handle, key, options, ..
        } = self.call;
        let shared = handle.shared();
        let waiter = shared.next_grant();
        let listen = || shared.store.clone().watch(options.kind, key, waiter);
        let of = entry.lock_id();
        let fairness = &shared.fairness;
        if entry.has_waited() {
            evidence.learn(entry.evidence(), Moment::of(self.started));
        }
        let after = head.after.take();
        let pending = fairness.take(of);
        let mut round = None;
        let mut is_over = false;
        if after.is_some() || pending.is_some() {
            let others_first = async {
                let pending = match after {
                    Some(after) => after.pending().await.inspect(|_| evidence.replied()).flatten(),
                    None => pending,
                };
                fairness
                    .yields(of, pending?, &mut head.watch, listen, self.until)
                    .await
            };
            tokio::select! {
                biased;
                () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                guard = handed_off(entry) => return Ok(Asked::of(self.took(guard?, head))),
                first = others_first => round = first,
                () = self.over() => is_over = true,
            }
        }
        if is_over {
            return Err(self.gave_up(evidence, false));
        }
        let mut place = Place::new(self.call, waiter);
        let mut longest = Duration::ZERO;
        let mut crowd = Crowd::default();
        let mut warned = false;
        loop {
            let asked = clock::now();
            // Waiters behind a head whose patience is over do not each begin anew.
            if evidence
                .patience_ends(self.patience())
                .is_some_and(|end| end <= Moment::of(asked))
            {
                return Err(self.gave_up(evidence, false));
            }
            evidence.asks(Moment::of(asked));
            if !evidence.is_empty() {
                head.knows(evidence);
            }
            // What happened before the request is in the answer.
            head.watch.iter_mut().for_each(Watch::seen);
            // Whoever goes away before the answer does not know whether it has one.
            let had = std::mem::replace(&mut place.taken, self.call.takes_place());
            let mut outcome = self.target.attempt(head.handed, Some(waiter), crowd.announce());
            let outcome = match futures_util::poll!(&mut outcome) {
                Poll::Ready(outcome) => outcome,
                Poll::Pending => tokio::select! {
                    biased;
                    guard = handed_off(entry) => return Ok(Asked::of(self.took(guard?, head))),
                    outcome = entry.shares(outcome) => outcome,
                    () = self.over() => return Err(self.gave_up(evidence, true)),
                    () = self.patience_ends(evidence) => return Err(self.gave_up(evidence, true)),
                    () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                },
            };
            let sleep = match outcome {
                Ok(AttemptOutcome::Got(got)) => {
                    evidence.replied();
                    head.handed = 0;
                    // Where one may read, all may.
                    head.opened = options.kind == Kind::Read;
                    fairness.acquired(of, round);
                    place.taken = had;
                    if let Some(guard) = self.target.guard(&got) {
                        place.taken = false;
                        head.rests(guard);
                    }
                    return Ok(Asked::Got(got));
                }
                Ok(AttemptOutcome::TooFew) => {
                    fairness.other_holder(of);
                    self.is_busy(None, evidence);
                    head.waits(options.lock.max_waiters, evidence)?;
                    return Ok(Asked::TooFew);
                }
                Ok(AttemptOutcome::Busy {
                    left,
                    again,
                    listeners,
                }) => {
                    place.taken = had || again.is_some() && self.call.takes_place();
                    fairness.other_holder(of);
                    self.is_busy(left, evidence);
                    head.waits(options.lock.max_waiters, evidence)?;
                    if options.kind == Kind::Permit && left.or(again).is_none() && !warned {
                        warned = true;
                        Event::NoPermitEnds { semaphore: key }.emit();
                    }
                    crowd.is_busy(listeners, Moment::of(asked), Moment::now());
                    if head.watch.is_none() {
                        head.watch = Some(listen());
                        crowd.listens();
                    }
                    let left = left.filter(|left| *left <= LONGEST);
                    longest = longest.max(left.unwrap_or_default());
                    until_next_request(left, longest, again)
                }
                Err(error) => {
                    place.taken &= had || error.outcome == Outcome::Unknown;
                    let pause = self.failed(asked, error, evidence)?;
                    head.knows(evidence);
                    pause
                }
            };
            let sleep = match broken!(WaiterAsksAgainAtOnce) {
                true => Duration::from_millis(1),
                false => sleep,
            };
            if broken!(NotificationLostBeforeSleep) {
                head.watch.iter_mut().for_each(Watch::seen);
            }
            tokio::select! {
                biased;
                () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                guard = handed_off(entry) => return Ok(Asked::of(self.took(guard?, head))),
                () = asks_next(&mut crowd, &mut head.watch, &mut round, sleep) => {}
                () = self.over() => return Err(self.gave_up(evidence, false)),
            }
        }
    }

    /// What was handed over, where it is still held: it is taken only now, after the process was stopped perhaps.
    fn takes(&self, guard: Hold) -> Option<G::Got> {
        guard.is_held().then(|| self.target.handed_off(guard))
    }

    /// The same; the role of the queue head rests in it.
    fn took(&self, guard: Option<Hold>, head: QueueHead) -> Option<G::Got> {
        let guard = guard?;
        guard.rest(head);
        self.takes(guard)
    }

    /// The wait, or the patience with the store, is over; `sent` says whether a request is on its way.
    pub(crate) fn gave_up(&self, evidence: &mut Evidence, sent: bool) -> Error {
        let evidence = std::mem::take(evidence);
        match evidence.verdict(Moment::of(self.started), Moment::now(), sent) {
            Verdict::NotAcquired { remaining } => self.not_acquired(remaining),
            Verdict::Failed(error) => self.call.failed(error),
        }
    }
}

/// What came of being the queue head.
enum Asked<T> {
    Got(T),
    /// It was handed over here and is lost already, or the place in the queue is.
    Lost,
    /// There are fewer permits in all than are wanted.
    TooFew,
}

impl<T> Asked<T> {
    fn of(got: Option<T>) -> Asked<T> {
        got.map_or(Asked::Lost, Asked::Got)
    }
}

/// A place among those who wait at the store, given up when this is dropped before the lock is had.
struct Place<'a> {
    call: &'a AcquireCall,
    waiter: GrantId,
    taken: bool,
}

impl<'a> Place<'a> {
    fn new(call: &'a AcquireCall, waiter: GrantId) -> Place<'a> {
        let place = Place {
            call,
            waiter,
            taken: false,
        };
        if call.takes_place() {
            call.handle.shared().unfinished.add(Part {
                request: place.request(),
                lease: POSITION_ENDS_WITHIN,
                is_held: false,
            });
        }
        place
    }

    fn request(&self) -> ReleaseRequest {
        ReleaseRequest {
            kind: self.call.options.kind,
            key: self.call.key.clone(),
            grant: self.waiter,
            keep_for: Duration::ZERO,
            amount: self.call.amount(),
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let handle = &self.call.handle;
        let is_ours = self.call.takes_place() && handle.shared().unfinished.remove(self.waiter.number());
        if self.taken && is_ours {
            // Who is not heard of loses it soon anyway.
            drop(handle.undo(self.request(), POSITION_ENDS_WITHIN));
        }
    }
}

/// The lock, from somebody in this process; `None` where this waiter was not polled in time, and is the queue head no longer.
async fn handed_off(entry: &QueueEntry) -> Result<Option<Hold>, Error> {
    loop {
        match entry.called().await? {
            Called::Guard(guard) => return Ok(Some(guard)),
            Called::Withdrawn => return Ok(None),
            // There is one turn, and it is in our hands.
            Called::Head(_) => {}
        }
    }
}

async fn changed(watch: &mut Option<Watch>) {
    match watch {
        Some(watch) => watch.changed().await,
        None => std::future::pending().await,
    }
}

/// The lock has come free, and no other process is to go first.
async fn came_free(watch: &mut Option<Watch>, round: &mut Option<YieldRound>) {
    changed(watch).await;
    if let (Some(watch), Some(round)) = (watch, round) {
        let_go_first(round, watch).await;
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
