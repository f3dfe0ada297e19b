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
use crate::base::moment::Moment;
use crate::base::name::Name;
use crate::engine::crowd::Crowd;
use crate::engine::evidence::{Evidence, Verdict};
use crate::engine::fairness::YieldRound;
use crate::engine::handoff::{DEFAULT_HANDOFFS, HandoffTerms};
use crate::engine::timing::{
    self, ASK_FOR_PERMITS_EVERY, LONGEST_SLEEP, POSITION_ENDS_WITHIN, until_next_request,
};
use crate::runtime::capable;
use crate::runtime::client::Handle;
use crate::runtime::fairness::let_go_first;
use crate::runtime::hold::Hold;
use crate::runtime::options::{LONGEST, Lease, LockOptions, Options};
use crate::runtime::question::{Goal, Look, Question};
use crate::runtime::release::Carry;
use crate::runtime::scope::{self, Scope};
use crate::runtime::telemetry;
use crate::runtime::unfinished::Part;
use crate::runtime::waiters::{Called, Line, Ticket, Turn};
use crate::store::counter::{CounterReply, CounterRequest, CounterStep};
use crate::store::{Announce, GrantId, Kind, Outcome, ReleaseRequest, StoreError, Watch};
use crate::{Error, LockKey};

/// One call of acquire, or what a call for several keys says of one of them.
#[derive(Clone)]
pub(crate) struct Attempt {
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
    match &outcome {
        Ok(_) => telemetry::acquired(clock::now().saturating_duration_since(started)),
        Err(error) => {
            telemetry::not_acquired(error);
            tracing::debug!(lock = ?what, %error, "a lock was not acquired");
        }
    }
    outcome
}

impl Goal for Attempt {
    type Got = Hold;

    fn wanted(&self) -> Option<HandoffTerms> {
        let LockOptions {
            max_hold, min_hold, ..
        } = self.options.lock;
        let fixed = self.options.lock.fixed();
        let lease = self.lease();
        // What has to be set up at the store, the store is asked for.
        let plain = fixed.is_none() && min_hold.is_none() && max_hold.is_none_or(|most| most >= lease);
        let handovers = self.handovers();
        (plain && handovers > 0).then_some(HandoffTerms {
            lease,
            max_hold,
            handoffs: handovers,
        })
    }

    fn look(
        &self,
        handed: u32,
        waiter: Option<GrantId>,
        announce: Announce,
    ) -> Carry<Result<Look<Hold>, StoreError>> {
        let mut question = Question::new(self, handed, waiter);
        question.request.announce = announce;
        Attempt::ask(question)
    }

    fn handed_over(&self, guard: Hold) -> Hold {
        guard
    }

    fn guard<'g>(&self, got: &'g Hold) -> Option<&'g Hold> {
        Some(got)
    }

    fn is_held(_got: &Hold) -> bool {
        // It came with the answer to this question.
        true
    }
}

impl Attempt {
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
            attempt: self,
            goal: self,
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
                .look(0, None, Announce::Nothing)
                .await
                .map_err(|error| self.failed(error))?
            {
                Look::Got(guard) => Ok(guard),
                Look::Busy { left, .. } => Err(wait.not_acquired(left)),
                Look::TooFew => Err(wait.not_acquired(None)),
            };
        }
        if self.options.kind.waits_in_store() {
            return wait.in_store_queue().await;
        }
        let mut heard = Evidence::default();
        if let Some(guard) = wait.unless_somebody_waits(&mut heard).await? {
            return Ok(guard);
        }
        wait.in_turn(&mut heard).await
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

    pub(crate) fn handovers(&self) -> u32 {
        // Each holder in a row of handoffs has a fencing token of its own.
        match self.options.kind.is_handed_on() && self.handle.shared().capabilities.token_blocks {
            true => self.options.lock.local_handovers.unwrap_or(DEFAULT_HANDOFFS),
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
    fn ask(question: Question) -> Carry<Result<Look<Hold>, StoreError>> {
        let (store, handle) = (question.store(), question.handle.clone());
        handle.ask(store.acquire(question.request.clone()), question)
    }
}

/// What ended the time in a queue.
enum Came<T> {
    /// The turn, or the lock from another caller of this process.
    Asked(Asked<T>),
    /// The turn of one that may ask along with others.
    Opened(Turn),
}

/// A call that may wait.
pub(crate) struct Wait<'a, G> {
    /// The key that is waited for.
    pub(crate) attempt: &'a Attempt,
    /// What the store is asked for.
    pub(crate) goal: &'a G,
    pub(crate) started: Instant,
    pub(crate) until: Option<Instant>,
}

impl<G: Goal> Wait<'_, G> {
    pub(crate) fn not_acquired(&self, remaining: Option<Duration>) -> Error {
        self.attempt.not_acquired(self.started, remaining)
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
    async fn unless_somebody_waits(&self, heard: &mut Evidence) -> Result<Option<G::Got>, Error> {
        let Attempt {
            handle, key, options, ..
        } = self.attempt;
        let shared = handle.shared();
        if options.kind != Kind::Read {
            return Ok(None);
        }
        let of = Name::new(options.kind, key);
        if shared.waiters.any(&of) || shared.fairness.is_pending(&of) {
            return Ok(None);
        }
        self.now(self.goal.look(0, None, Announce::Nothing), heard).await
    }

    /// What the store grants at once. Who is refused, or not answered, waits for the turn.
    async fn now(
        &self,
        look: impl Future<Output = Result<Look<G::Got>, StoreError>>,
        heard: &mut Evidence,
    ) -> Result<Option<G::Got>, Error> {
        let asked = clock::now();
        heard.asks(Moment::of(asked));
        let look = tokio::select! {
            biased;
            look = look => look,
            () = self.over() => return Err(self.gave_up(heard, true)),
            () = self.attempt.handle.shared().closing.cancelled() => return Err(Error::ClientClosed),
        };
        match look {
            Ok(Look::Got(got)) => return Ok(Some(got)),
            Ok(Look::Busy { left, .. }) => self.is_busy(left, heard),
            Ok(Look::TooFew) => self.is_busy(None, heard),
            Err(error) => drop(self.failed(asked, error, heard)?),
        }
        Ok(None)
    }

    /// The store replied that another client holds the lock, with so much left of its lease.
    pub(crate) fn is_busy(&self, left: Option<Duration>, heard: &mut Evidence) {
        let now = Moment::now();
        // A store's word for "no end" may be more than a clock can take.
        let left = left.filter(|left| *left <= LONGEST);
        heard.is_busy(left.map(|left| now + left), now);
    }

    /// The request that was sent then has failed; the pause before the next one.
    fn failed(&self, asked: Instant, error: StoreError, heard: &mut Evidence) -> Result<Duration, Error> {
        heard
            .failed(Moment::of(asked), error, self.patience(), Moment::now())
            .map(jittered)
            .map_err(|error| self.attempt.failed(error))
    }

    fn patience(&self) -> Duration {
        self.attempt.handle.shared().settings.retry_for
    }

    /// The end of the patience with a store that fails.
    async fn patience_ends(&self, heard: &Evidence) {
        sleep_until(heard.patience_ends(self.patience()).map(Moment::instant)).await;
    }

    /// Waits for the turn in this process, then at the store, or until somebody here hands the lock over.
    pub(crate) async fn in_turn(&self, heard: &mut Evidence) -> Result<G::Got, Error> {
        let Attempt {
            handle,
            key,
            options,
            by,
            ..
        } = self.attempt;
        let shared = handle.shared();
        let mut line = Line::End(options.lock.max_waiters);
        loop {
            let wanted = self.goal.wanted();
            let ticket = shared.waiters.join(options.kind, key, line, wanted, by)?;
            let came = {
                let waits = std::pin::pin!(async {
                    let called = tokio::select! {
                        biased;
                        () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                        called = ticket.called() => called?,
                        () = self.over() => {
                            heard.learn(ticket.evidence(), Moment::of(self.started));
                            return Err(self.gave_up(heard, false));
                        }
                    };
                    match called {
                        Called::Turn(turn) if turn.opened => Ok(Came::Opened(turn)),
                        Called::Turn(turn) => self.at_store(&ticket, turn, heard).await.map(Came::Asked),
                        Called::Guard(guard) => Ok(Came::Asked(Asked::of(self.takes(guard)))),
                        Called::Withdrawn => Ok(Came::Asked(Asked::Lost)),
                    }
                });
                ticket.attended(waits).await?
            };
            let got = match came {
                Came::Asked(Asked::Got(got)) => {
                    line = Line::Front;
                    Some(got)
                }
                Came::Asked(Asked::Lost) => {
                    // Nobody loses a place that was had.
                    line = Line::Front;
                    None
                }
                Came::Asked(Asked::TooFew) => {
                    drop(ticket);
                    line = Line::End(None);
                    self.until_there_are_more(heard).await?;
                    None
                }
                Came::Opened(turn) => {
                    let look = self.goal.look(0, None, Announce::Nothing);
                    // The question of the next one here goes along with this one.
                    drop((turn, ticket));
                    line = Line::End(None);
                    self.now(look, heard).await?
                }
            };
            if let Some(got) = got.filter(G::is_held) {
                return Ok(got);
            }
        }
    }

    /// Lets all others pass until the number of permits was changed, so that there may be as many as are wanted.
    async fn until_there_are_more(&self, heard: &mut Evidence) -> Result<(), Error> {
        let Attempt {
            handle, key, options, ..
        } = self.attempt;
        let shared = handle.shared();
        let store = &shared.store;
        let counters = (shared.counters(options.kind)).map_err(|error| self.attempt.failed(error))?;
        let mut watch = Some(store.clone().watch(options.kind, key, shared.next_grant()));
        let mut pause = Duration::ZERO;
        tracing::warn!(
            semaphore = %key, wanted = self.attempt.amount(),
            "a semaphore has fewer permits in all than are wanted: waiting until some are added"
        );
        loop {
            let news = async {
                tokio::time::sleep(pause).await;
                let _ = tokio::time::timeout(LONGEST_SLEEP, changed(&mut watch)).await;
            };
            tokio::select! {
                biased;
                () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                () = self.over() => return Err(self.gave_up(heard, false)),
                () = news => {}
            }
            let request = CounterRequest::new(key.clone(), shared.next_grant(), CounterStep::Permits);
            let asked = clock::now();
            heard.asks(Moment::of(asked));
            let reply = tokio::select! {
                biased;
                () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                reply = counters.clone().count(request) => reply,
                () = self.over() => return Err(self.gave_up(heard, true)),
            };
            pause = match reply {
                Ok(CounterReply::Permits {
                    free: Some(free),
                    held,
                }) if free.saturating_add_unsigned(held) < i64::from(self.attempt.amount()) => {
                    self.is_busy(None, heard);
                    ASK_FOR_PERMITS_EVERY
                }
                Ok(_) => {
                    heard.replied();
                    return Ok(());
                }
                Err(error) => {
                    // What was told meanwhile is not waited for a second time.
                    watch = Some(store.clone().watch(options.kind, key, shared.next_grant()));
                    self.failed(asked, error, heard)?
                }
            };
        }
    }

    /// Has the turn: asks the store until it grants the lock.
    async fn at_store(
        &self,
        ticket: &Ticket,
        mut turn: Turn,
        heard: &mut Evidence,
    ) -> Result<Asked<G::Got>, Error> {
        let Attempt {
            handle, key, options, ..
        } = self.attempt;
        let shared = handle.shared();
        let waiter = shared.next_grant();
        let listen = || shared.store.clone().watch(options.kind, key, waiter);
        let of = ticket.name();
        let fairness = &shared.fairness;
        if ticket.has_waited() {
            heard.learn(ticket.evidence(), Moment::of(self.started));
        }
        let after = turn.after.take();
        let pending = fairness.take(of);
        let mut round = None;
        let mut is_over = false;
        if after.is_some() || pending.is_some() {
            let others_first = async {
                let pending = match after {
                    Some(after) => after.pending().await.inspect(|_| heard.replied()).flatten(),
                    None => pending,
                };
                fairness
                    .yields(of, pending?, &mut turn.watch, listen, self.until)
                    .await
            };
            tokio::select! {
                biased;
                () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                guard = handed_over(ticket) => return Ok(Asked::of(self.took(guard?, turn))),
                first = others_first => round = first,
                () = self.over() => is_over = true,
            }
        }
        if is_over {
            return Err(self.gave_up(heard, false));
        }
        let mut place = Place::new(self.attempt, waiter);
        let mut longest = Duration::ZERO;
        let mut crowd = Crowd::default();
        let mut warned = false;
        loop {
            let asked = clock::now();
            // Waiters behind a head whose patience is over do not each begin anew.
            if heard
                .patience_ends(self.patience())
                .is_some_and(|end| end <= Moment::of(asked))
            {
                return Err(self.gave_up(heard, false));
            }
            heard.asks(Moment::of(asked));
            if !heard.is_empty() {
                turn.knows(heard);
            }
            // What happened before the question is in the answer.
            turn.watch.iter_mut().for_each(Watch::seen);
            // Whoever goes away before the answer does not know whether it has one.
            let had = std::mem::replace(&mut place.taken, self.attempt.takes_place());
            let mut look = self.goal.look(turn.handed, Some(waiter), crowd.announce());
            let look = match futures_util::poll!(&mut look) {
                Poll::Ready(look) => look,
                Poll::Pending => tokio::select! {
                    biased;
                    guard = handed_over(ticket) => return Ok(Asked::of(self.took(guard?, turn))),
                    look = ticket.shares(look) => look,
                    () = self.over() => return Err(self.gave_up(heard, true)),
                    () = self.patience_ends(heard) => return Err(self.gave_up(heard, true)),
                    () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                },
            };
            let sleep = match look {
                Ok(Look::Got(got)) => {
                    heard.replied();
                    turn.handed = 0;
                    // Where one may read, all may.
                    turn.opened = options.kind == Kind::Read;
                    fairness.acquired(of, round);
                    place.taken = had;
                    if let Some(guard) = self.goal.guard(&got) {
                        place.taken = false;
                        turn.rests(guard);
                    }
                    return Ok(Asked::Got(got));
                }
                Ok(Look::TooFew) => {
                    fairness.other_holder(of);
                    self.is_busy(None, heard);
                    turn.waits(options.lock.max_waiters, heard)?;
                    return Ok(Asked::TooFew);
                }
                Ok(Look::Busy {
                    left,
                    again,
                    listeners,
                }) => {
                    place.taken = had || again.is_some() && self.attempt.takes_place();
                    fairness.other_holder(of);
                    self.is_busy(left, heard);
                    turn.waits(options.lock.max_waiters, heard)?;
                    if options.kind == Kind::Permit && left.or(again).is_none() && !warned {
                        warned = true;
                        tracing::warn!(
                            semaphore = %key,
                            "no permit is free and no lease of one ends: waiting until permits are set or given back"
                        );
                    }
                    crowd.is_busy(listeners, Moment::of(asked), Moment::now());
                    if turn.watch.is_none() {
                        turn.watch = Some(listen());
                        crowd.listens();
                    }
                    let left = left.filter(|left| *left <= LONGEST);
                    longest = longest.max(left.unwrap_or_default());
                    until_next_request(left, longest, again)
                }
                Err(error) => {
                    place.taken &= had || error.outcome == Outcome::Unknown;
                    let pause = self.failed(asked, error, heard)?;
                    turn.knows(heard);
                    pause
                }
            };
            let sleep = match broken!(WaiterAsksAgainAtOnce) {
                true => Duration::from_millis(1),
                false => sleep,
            };
            if broken!(NotificationLostBeforeSleep) {
                turn.watch.iter_mut().for_each(Watch::seen);
            }
            tokio::select! {
                biased;
                () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                guard = handed_over(ticket) => return Ok(Asked::of(self.took(guard?, turn))),
                () = asks_next(&mut crowd, &mut turn.watch, &mut round, sleep) => {}
                () = self.over() => return Err(self.gave_up(heard, false)),
            }
        }
    }

    /// What was handed over, where it is still held: it is taken only now, after the process was stopped perhaps.
    fn takes(&self, guard: Hold) -> Option<G::Got> {
        guard.is_held().then(|| self.goal.handed_over(guard))
    }

    /// The same; the turn rests in it.
    fn took(&self, guard: Option<Hold>, turn: Turn) -> Option<G::Got> {
        let guard = guard?;
        guard.rest(turn);
        self.takes(guard)
    }

    /// The wait, or the patience with the store, is over; `sent` says whether a request is on its way.
    pub(crate) fn gave_up(&self, heard: &mut Evidence, sent: bool) -> Error {
        let heard = std::mem::take(heard);
        match heard.verdict(Moment::of(self.started), Moment::now(), sent) {
            Verdict::NotAcquired { remaining } => self.not_acquired(remaining),
            Verdict::Failed(error) => self.attempt.failed(error),
        }
    }
}

/// What came of the turn.
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
    attempt: &'a Attempt,
    waiter: GrantId,
    taken: bool,
}

impl<'a> Place<'a> {
    fn new(attempt: &'a Attempt, waiter: GrantId) -> Place<'a> {
        let place = Place {
            attempt,
            waiter,
            taken: false,
        };
        if attempt.takes_place() {
            attempt.handle.shared().unfinished.add(Part {
                request: place.request(),
                lease: POSITION_ENDS_WITHIN,
                is_held: false,
            });
        }
        place
    }

    fn request(&self) -> ReleaseRequest {
        ReleaseRequest {
            kind: self.attempt.options.kind,
            key: self.attempt.key.clone(),
            grant: self.waiter,
            keep_for: Duration::ZERO,
            amount: self.attempt.amount(),
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let handle = &self.attempt.handle;
        let is_ours = self.attempt.takes_place() && handle.shared().unfinished.remove(self.waiter.number());
        if self.taken && is_ours {
            // Who is not heard of loses it soon anyway.
            drop(handle.undo(self.request(), POSITION_ENDS_WITHIN));
        }
    }
}

/// The lock, from somebody in this process; `None` where this waiter was not polled in time, and has lost its turn.
async fn handed_over(ticket: &Ticket) -> Result<Option<Hold>, Error> {
    loop {
        match ticket.called().await? {
            Called::Guard(guard) => return Ok(Some(guard)),
            Called::Withdrawn => return Ok(None),
            // There is one turn, and it is in our hands.
            Called::Turn(_) => {}
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
