//! The grants of this process, and when they end.
//!
//! A *grant* is what the store knows. The *holds* on it are the callers in this process: re-entry adds one, and the
//! grant is released with the last of them.

mod renewable;
mod room;
mod span;

use std::panic::Location;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::task_tracker::TaskTrackerToken;
use uuid::Uuid;

pub(crate) use self::room::{Blocker, EntryMode, EntryRequest, OuterHolds};
use self::room::{Inside, Room, Wakeups};
use self::span::HoldSpan;
use crate::base::broken;
use crate::base::chance::unique_id;
use crate::base::clock;
use crate::base::moment::{Moment, nanos};
use crate::base::report::{Intervention, LossReason};
use crate::base::reused::Reused;
use crate::base::waking::cancel;
use crate::engine::grant::{GrantState, Terms};
use crate::engine::handoff::{HandoffBudget, HandoffTerms};
use crate::runtime::client::Shared;
use crate::runtime::emit::Event;
use crate::runtime::emit::events::{Listeners, Of};
use crate::runtime::emit::meter::{Ended, Series};
use crate::runtime::emit::trace::{self, ObservedSpan};
use crate::runtime::group::Group;
use crate::runtime::nested_read::NestedRead;
use crate::runtime::pending::Pending;
use crate::runtime::waiters::{Caller, QueueHead};
use crate::store::{BoundGrant, GrantId, Kind, Reason, ReleaseRequest, RenewRequest, StoreError};
use crate::{Error, HoldState, LockKey, Loss};

/// The client of a grant. A weak reference, as in the grant, so the client can be dropped first.
/// There is one for each thread: each grant counts references to one.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Issuer {
    pub(crate) uuid: Uuid,
    pub(crate) client: Weak<Shared>,
    /// The listeners to the events of its locks.
    pub(crate) listeners: Arc<Listeners>,
}

/// Signals of the end, created on demand.
#[derive(Debug, Default)]
struct Signals {
    /// Cancelled when the grant has ended, by loss or by release.
    over: CancellationToken,
    /// Cancelled when the holder is asked to stop; created once something waits for that.
    revoked: OnceLock<CancellationToken>,
    intervention: OnceLock<Intervention>,
    /// The last failure of a renewal, or of the release, and its time.
    failure: Mutex<Option<(Moment, StoreError)>>,
    /// Why it was lost, as far as this process knows.
    reason: OnceLock<LossReason>,
    /// Waiters for the end of this grant or of another.
    also: Mutex<Also>,
}

#[derive(Debug, Default)]
struct Also {
    ends: Vec<Weak<FirstEnd>>,
    /// How many entries there may be before entries without a waiter are removed.
    room: usize,
}

impl Also {
    fn push(&mut self, end: &Arc<FirstEnd>) {
        if self.ends.len() >= self.room {
            self.ends.retain(|other| other.strong_count() > 0);
            self.room = 2 * self.ends.len().max(8);
        }
        self.ends.push(Arc::downgrade(end));
    }
}

/// Signals the first end among several grants.
#[derive(Debug, Default)]
pub(crate) struct FirstEnd(CancellationToken);

impl FirstEnd {
    pub(crate) fn of<'a>(grants: impl Iterator<Item = &'a Grant>) -> Arc<FirstEnd> {
        let first: Arc<FirstEnd> = Arc::default();
        for grant in grants {
            let (signals, _) = grant.signals();
            signals.also.lock().push(&first);
            // Checked only now, so that an end in between is not missed.
            if grant.signals().1 {
                cancel(&first.0);
            }
        }
        first
    }

    pub(crate) fn token(&self) -> CancellationToken {
        self.0.clone()
    }
}

impl Drop for FirstEnd {
    // Nothing holds or reads these any more, except a waiter that has a token.
    fn drop(&mut self) {
        cancel(&self.0);
    }
}

/// One grant of this process. A service may hold hundreds of thousands: rare fields are stored separately, and times
/// and the data that all grants of a client share take a word each.
pub(crate) struct Grant {
    pub(crate) kind: Kind,
    /// Whether the watchdog renews it.
    pub(crate) renewed: bool,
    /// Of the renewal table: whether a renewal is due or in flight.
    is_asked: Flag,
    pub(crate) group: Group,
    /// How many permits it has; 1 for all other kinds.
    amount: u32,
    pub(crate) series: Series,
    pub(crate) key: LockKey,
    /// The first fencing token.
    pub(crate) token: u64,
    /// Its id in the renewal table.
    pub(crate) number: u64,
    issuer: Arc<Issuer>,
    /// In nanoseconds.
    lease: u64,
    /// The time since which the holder has it, and its task.
    pub(crate) since: Moment,
    pub(crate) task: Option<task::Id>,
    special: Option<Box<Special>>,
    state: Mutex<State>,
}

/// Read and changed under the lock of the renewal table.
#[derive(Debug, Default)]
struct Flag(AtomicBool);

impl Flag {
    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self, value: bool) {
        self.0.store(value, Ordering::Relaxed);
    }
}

/// The fields that few grants need.
struct Special {
    /// The latest end of renewal.
    max_end: Option<Moment>,
    /// Until when the key stays held even if the holder is done.
    min_until: Option<Moment>,
    /// The enclosing write grant of this read.
    nested_read: Option<Arc<NestedRead>>,
}

impl Special {
    /// Returns `None` if none of the fields is needed.
    fn of(
        max_end: Option<Moment>,
        min_until: Option<Moment>,
        nested_read: Option<Arc<NestedRead>>,
    ) -> Option<Box<Special>> {
        let any = max_end.is_some() || min_until.is_some() || nested_read.is_some();
        any.then(|| {
            Box::new(Special {
                max_end,
                min_until,
                nested_read,
            })
        })
    }
}

struct State {
    grant: GrantState,
    room: Room,
    /// The queue head's role, while the waiters of this process wait for this grant.
    head: Option<Reused<QueueHead>>,
}

impl State {
    fn new(grant: GrantState, hold: Inside) -> State {
        State {
            grant,
            room: Room::of(hold),
            head: None,
        }
    }
}

/// What the last hold leaves behind.
pub(crate) struct Left {
    /// The earlier loss of the grant.
    pub(crate) loss: Option<Loss>,
    /// The queue head's role, if the waiters of this process waited for this grant.
    pub(crate) head: Option<Reused<QueueHead>>,
    pub(crate) leaving: Leaving,
    pub(crate) may_be_handed_off: bool,
    pub(crate) end: EndSignal,
}

/// A loss that the holder knows of, and that is not in the log yet.
pub(crate) struct UnreportedLoss {
    reason: LossReason,
    span: Option<ObservedSpan>,
    held: Duration,
}

/// A grant that its last hold has left, and that may have to be released.
pub(crate) struct Leaving {
    /// When the grant is lost.
    pub(crate) deadline: Moment,
    /// A shutdown waits for it, from before the end of the grant on: it ends no grant that was left.
    pub(crate) counted: TaskTrackerToken,
}

/// Signals the end of a grant when it is dropped.
pub(crate) struct EndSignal(Option<Arc<Signals>>);

impl Drop for EndSignal {
    fn drop(&mut self) {
        tell(self.0.take());
    }
}

/// Why a caller could not re-enter a grant.
pub(crate) enum Refused {
    /// A hold that is not around the caller is inside, or goes first.
    Sibling(Blocker),
    /// The grant has ended.
    Lost(Loss),
}

/// A grant of the store, by a request sent at `sent`, for `lease` from then on.
pub(crate) struct Granted {
    pub(crate) group: Group,
    pub(crate) series: Series,
    pub(crate) kind: Kind,
    pub(crate) amount: u32,
    pub(crate) key: LockKey,
    pub(crate) number: u64,
    /// The first fencing token.
    pub(crate) token: u64,
    pub(crate) sent: Moment,
    pub(crate) lease: Duration,
    pub(crate) budget: HandoffBudget,
    pub(crate) nested_read: Option<Arc<NestedRead>>,
}

impl Grant {
    pub(crate) fn new(what: Granted, issuer: &Arc<Issuer>, terms: Terms, hold: Inside) -> Grant {
        let Granted {
            group,
            series,
            kind,
            amount,
            key,
            number,
            token,
            sent,
            lease,
            budget,
            nested_read,
        } = what;
        let state = GrantState::granted(sent, lease, budget);
        let grant = Grant {
            kind,
            renewed: terms.renewed,
            is_asked: Flag::default(),
            group,
            amount,
            series,
            key,
            token,
            number,
            issuer: issuer.clone(),
            lease: nanos(terms.lease),
            since: sent,
            task: task::try_id(),
            special: Special::of(terms.max_end, terms.min_until, nested_read),
            state: Mutex::new(State::new(state, hold)),
        };
        grant.tell_begin(false);
        grant
    }

    /// Returns the grant for the next holder in this process, with its hold. To the store, and in the renewal table, it
    /// is the same grant.
    pub(crate) fn successor(
        &self,
        terms: &HandoffTerms,
        now: Moment,
        caller: Caller,
        series: Series,
    ) -> (Grant, u64) {
        let Caller { by, task, group } = caller;
        let hold = unique_id();
        let state = self.state.lock();
        let mut next = State::new(state.grant.successor(terms), (hold, by));
        if let Some(HoldSpan::Own(span, _)) = state.room.span() {
            next.room.set_span(HoldSpan::Before(span.clone()));
        }
        let max_end = terms.max_hold.map(|d| Moment::now() + d);
        let grant = Grant {
            kind: self.kind,
            renewed: self.renewed,
            is_asked: Flag::default(),
            group,
            amount: self.amount,
            series,
            key: self.key.clone(),
            // The next reserved token.
            token: self
                .token
                .saturating_add(u64::from(!broken!(TokenReusedAfterHandoff))),
            number: self.number,
            issuer: self.issuer.clone(),
            lease: self.lease,
            since: now,
            task,
            special: Special::of(max_end, None, None),
            state: Mutex::new(next),
        };
        (grant, hold)
    }

    /// The source lines of its holds, the first one first.
    pub(crate) fn lines(&self) -> Vec<&'static Location<'static>> {
        self.state.lock().room.lines()
    }

    /// Returns the note of the holder.
    pub(crate) fn note(&self) -> Option<Arc<str>> {
        self.state.lock().room.note()
    }

    pub(crate) fn set_note(&self, note: Option<Arc<str>>) {
        self.state.lock().room.set_note(note);
    }

    /// Sets the note of an acquisition, unless it has entered an enclosing hold, whose note stays.
    pub(crate) fn note_of_acquisition(&self, note: &Option<Arc<str>>) {
        let mut state = self.state.lock();
        if note.is_some() && state.room.holds().count() == 1 {
            state.room.set_note(note.clone());
        }
    }

    /// Returns the requested lease.
    pub(crate) fn lease(&self) -> Duration {
        Duration::from_nanos(self.lease)
    }

    /// The id of the grant on the store.
    pub(crate) fn id(&self) -> GrantId {
        GrantId::new(self.issuer.uuid, self.number)
    }

    /// Returns the error for a caller that finds it lost.
    pub(crate) fn lost(&self, loss: Loss) -> Error {
        Error::Lost {
            kind: self.kind,
            key: self.key.clone(),
            loss,
        }
    }

    /// Returns the client to which it was granted.
    pub(crate) fn client(&self) -> &Weak<Shared> {
        &self.issuer.client
    }

    fn terms(&self) -> Terms {
        Terms {
            lease: self.lease(),
            renewed: self.renewed,
            max_end: self.special.as_ref().and_then(|special| special.max_end),
            min_until: self.special.as_ref().and_then(|special| special.min_until),
        }
    }

    fn nested_read(&self) -> Option<&Arc<NestedRead>> {
        self.special.as_ref()?.nested_read.as_ref()
    }

    /// Whether the grant can ever be handed off, if it is left in time.
    pub(crate) fn can_be_handed_off(&self) -> bool {
        self.renewed && self.state.lock().grant.budget().is_open(Moment::now())
    }

    /// Returns the grant as the store knows it, and prevents further handoffs; or how it was lost.
    pub(crate) fn bind(self: &Arc<Grant>) -> Result<BoundGrant, Loss> {
        let mut state = self.state.lock();
        // Under the lock under which the last hold leaves: a grant that is being handed off has ended.
        if let HoldState::Lost(loss) = state.grant.judge(&self.terms(), Moment::now()) {
            return Err(loss);
        }
        state.grant.end_handoffs();
        Ok(BoundGrant {
            kind: self.kind,
            key: self.key.clone(),
            grant: self.id(),
            token: self.token,
            renewable: self.clone(),
        })
    }

    /// Keeps the queue head's role until the grant ends; passes it on if it has ended.
    pub(crate) fn put_head(&self, head: Reused<QueueHead>) {
        let mut state = self.state.lock();
        if state.grant.ended().is_none() {
            state.head = Some(head);
            return;
        }
        drop(state);
        drop(head);
    }

    /// Whether this hold still exists.
    pub(crate) fn has(&self, hold: u64) -> bool {
        self.state.lock().room.has(hold)
    }

    /// Adds a hold with the request's id, if all holds inside are around the caller. Readers do not exclude each other.
    pub(crate) fn enter(&self, request: &EntryRequest<'_>) -> Result<(), Refused> {
        if let HoldState::Lost(loss) = self.status() {
            return Err(Refused::Lost(loss));
        }
        if let Some(nested_read) = self.nested_read() {
            nested_read.enter(request)?;
        }
        let mut wakeups = Wakeups::default();
        let mut state = self.state.lock();
        let entered = match state.grant.ended() {
            Some(loss) => Err(Refused::Lost(loss)),
            None if self.kind.is_shared() => {
                state.room.add((request.id, request.by));
                Ok(())
            }
            None => state
                .room
                .enter(request, false, &mut wakeups)
                .map_err(Refused::Sibling),
        };
        drop(state);
        wakeups.wake();
        if entered.is_err() {
            self.left_from_under(request.id);
        }
        entered
    }

    /// Enters a read under this write grant, if every writer inside is around the caller.
    pub(crate) fn admit(&self, request: &EntryRequest<'_>) -> Result<(), Refused> {
        if let HoldState::Lost(loss) = self.status() {
            return Err(Refused::Lost(loss));
        }
        let mut wakeups = Wakeups::default();
        let mut state = self.state.lock();
        let admitted = match state.grant.ended() {
            Some(loss) => Err(Refused::Lost(loss)),
            None => state
                .room
                .enter(request, true, &mut wakeups)
                .map_err(Refused::Sibling),
        };
        if admitted.is_ok() {
            // The read gets a separate token, greater than all that were reserved for handoffs.
            state.grant.end_handoffs();
        }
        drop(state);
        wakeups.wake();
        admitted
    }

    /// Removes a read under this write grant.
    pub(crate) fn dismiss(&self, reader: u64) {
        let mut wakeups = Wakeups::default();
        self.state.lock().room.remove_reader(reader, &mut wakeups);
        wakeups.wake();
    }

    fn left_from_under(&self, hold: u64) {
        if let Some(nested_read) = self.nested_read() {
            nested_read.write.dismiss(hold);
        }
    }

    /// Returns the grant at which a caller that may not enter yet waits: this one, or the write grant that it reads
    /// under.
    pub(crate) fn arbiter(self: &Arc<Grant>) -> &Arc<Grant> {
        self.nested_read().map_or(self, |nested_read| &nested_read.write)
    }

    /// Waits until a refused caller, whose hold will have this id, may try again. Cancel safe.
    pub(crate) async fn called(&self, hold: u64) {
        std::future::poll_fn(|cx| {
            let waker = cx.waker().clone();
            let (called, unused) = self.state.lock().room.is_called(hold, waker);
            drop(unused);
            if called { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Removes a caller that no longer waits.
    pub(crate) fn vacate(&self, hold: u64) {
        let mut wakeups = Wakeups::default();
        self.state.lock().room.vacate(hold, &mut wakeups);
        wakeups.wake();
    }

    /// Removes a hold. `Some` for the last one, which signals the end when it is dropped, and is `pending` until then.
    pub(crate) fn leave(&self, hold: u64, now: Moment, pending: &Pending) -> Option<Left> {
        let terms = self.terms();
        let mut wakeups = Wakeups::default();
        let mut state = self.state.lock();
        if state.grant.ended().is_none()
            && let HoldState::Lost(loss) = state.grant.judge(&terms, now)
        {
            drop(state);
            self.lose(loss);
            state = self.state.lock();
        }
        let last = state.room.remove_hold(hold, &mut wakeups);
        let loss = state.grant.ended();
        let counted = last.then(|| pending.token());
        if last {
            if state.grant.end(Loss::Released) {
                self.tell_end(state.grant.is_suspect());
            }
            state.room.close(&mut wakeups);
        }
        // A loss was reported already, perhaps by a waker that runs the caller of this.
        let signals = state.room.signals().filter(|_| loss.is_none());
        let left = counted.map(|counted| Left {
            loss,
            end: EndSignal(signals),
            head: state.head.take(),
            leaving: Leaving {
                deadline: state.grant.deadline(),
                counted,
            },
            // Readers under it continue, and keep a writer out.
            may_be_handed_off: !state.room.has_readers() && state.grant.may_be_handed_off(&terms, now),
        });
        drop(state);
        wakeups.wake();
        self.left_from_under(hold);
        left
    }

    /// Whether the grant is held, by the clock as of this call. Once `Lost`, always `Lost`.
    pub(crate) fn status(&self) -> HoldState {
        self.status_at(Moment::now())
    }

    /// Whether the grant is held, as of `now`.
    pub(crate) fn status_at(&self, now: Moment) -> HoldState {
        let (status, _) = self.peek_at(now);
        if let HoldState::Lost(loss) = status {
            self.lose(loss);
        }
        status
    }

    /// The state without reporting a loss, for callers that hold a mutex: a woken task may call back. And the time at
    /// which the grant is lost unless it is renewed.
    pub(crate) fn peek_at(&self, now: Moment) -> (HoldState, Moment) {
        let state = self.state.lock();
        (state.grant.judge(&self.terms(), now), state.grant.deadline())
    }

    /// Ends the grant, unless it has ended already, and reports the loss.
    pub(crate) fn lose(&self, loss: Loss) {
        if let Some(unreported) = self.signal_loss(loss) {
            self.report_loss(unreported);
        }
    }

    /// Ends the grant, unless it has ended already, and tells its holder. The loss must be reported then: later, as a log may be
    /// slow, and other holders must learn of theirs.
    pub(crate) fn signal_loss(&self, loss: Loss) -> Option<UnreportedLoss> {
        let mut state = self.state.lock();
        if !state.grant.end(loss) {
            return None;
        }
        #[cfg(dlock_sim)]
        if loss != Loss::Shutdown {
            crate::base::sim::grant_lost((self.issuer.uuid.as_u128(), self.number));
        }
        self.tell_end(state.grant.is_suspect());
        let (signals, head) = (state.room.make_signals(), state.head.take());
        let (deadline, was_suspect) = (state.grant.deadline(), state.grant.is_suspect());
        // The holder may be gone by the time of the report, and its span with it.
        let (span, held) = (state.room.take_span(), Moment::now().since(self.since));
        let mut wakeups = Wakeups::default();
        state.room.close(&mut wakeups);
        drop(state);
        let reason = match loss {
            Loss::Expired if self.renewed => self.why_expired(&signals, deadline, was_suspect),
            _ => LossReason::of(loss),
        };
        let reason = signals.reason.get_or_init(|| reason).clone();
        wakeups.wake();
        tell(Some(signals));
        // The waiters here ask the store now.
        drop(head);
        let span = span.and_then(HoldSpan::of_holder);
        Some(UnreportedLoss { reason, span, held })
    }

    pub(crate) fn report_loss(&self, UnreportedLoss { reason, span, held }: UnreportedLoss) {
        self.tell_held_for(held, Ended::Lost);
        let event = self.loss(&reason);
        span::inside(span.as_ref(), || event.emit());
        if let Some(span) = span {
            trace::hold_ended(&span, Ended::Lost, held);
        }
    }

    /// Cancelled when the grant has ended, by loss or by release.
    pub(crate) fn over(&self) -> CancellationToken {
        let (signals, ended) = self.signals();
        if ended {
            cancel(&signals.over);
        }
        signals.over.clone()
    }

    /// Records that the holder is asked to stop: the lock is not handed off any more. Returns false if it was asked
    /// before, or the grant has ended.
    pub(crate) fn revoke(&self, intervention: Intervention) -> bool {
        let (signals, ended) = self.signals();
        if ended || signals.intervention.set(intervention).is_err() {
            return false;
        }
        self.state.lock().grant.end_handoffs();
        cancel(signals.revoked.get_or_init(CancellationToken::new));
        true
    }

    /// Waits until the holder is asked to stop; `None` once the grant has ended. Cancel safe.
    pub(crate) async fn revoked(&self) -> Option<Intervention> {
        let over = self.over();
        let (signals, _) = self.signals();
        let revoked = signals.revoked.get_or_init(CancellationToken::new);
        tokio::select! {
            biased;
            () = revoked.cancelled() => signals.intervention.get().cloned(),
            () = over.cancelled() => None,
        }
    }

    fn signals(&self) -> (Arc<Signals>, bool) {
        let mut state = self.state.lock();
        let signals = state.room.make_signals();
        (signals, state.grant.ended().is_some())
    }

    /// How long the grant is certain to be held from now on.
    pub(crate) fn remaining(&self) -> Duration {
        match self.status() {
            HoldState::Lost(_) => Duration::ZERO,
            _ => self.deadline().saturating_duration_since(clock::now()),
        }
    }

    /// The remaining time to `max_hold`, if there is one.
    pub(crate) fn max_hold_left(&self) -> Option<Duration> {
        self.terms().max_hold_left(Moment::now())
    }

    /// The request that releases the grant, as of `now`.
    pub(crate) fn release_request(&self, now: Moment) -> ReleaseRequest {
        ReleaseRequest {
            keep_for: self.terms().min_hold_left(now),
            amount: self.amount,
            ..ReleaseRequest::new(self.kind, self.key.clone(), self.id())
        }
    }

    /// When the grant is lost unless it is renewed.
    pub(crate) fn deadline(&self) -> Instant {
        self.state.lock().grant.deadline().instant()
    }

    /// The request that renews the grant with this lease.
    pub(crate) fn renew_request(&self, lease: Duration) -> RenewRequest {
        RenewRequest {
            kind: self.kind,
            key: self.key.clone(),
            grant: self.id(),
            lease,
            amount: self.amount,
        }
    }

    /// Reports the handoff to the next holder in this process, of a grant that was suspect before or was not: if it has
    /// become suspect since, that is reported already.
    pub(crate) fn tell_handed_off(&self, was_suspect: bool) {
        self.tell_begin(true);
        if was_suspect {
            let (series, of) = (&self.series, self.of());
            Event::BecameSuspect { series, of }.emit();
            self.issuer.listeners.tell_left();
        }
    }

    fn tell_begin(&self, handed_off: bool) {
        Event::HoldBegins {
            series: &self.series,
            of: self.of(),
            token: self.token,
            handed_off,
        }
        .emit();
    }

    /// The subject of the events of this hold.
    pub(crate) fn of(&self) -> Of<'_> {
        Of {
            listeners: &self.issuer.listeners,
            key: &self.key,
            kind: self.kind,
            grant: Some(self.id()),
        }
    }

    /// Reports that the holder no longer has it.
    fn tell_end(&self, was_suspect: bool) {
        let series = &self.series;
        Event::HoldEnds { series, was_suspect }.emit();
    }

    /// Reports that the hold has certainly ended.
    pub(crate) fn tell_held(&self, ended: Ended) {
        self.tell_held_for(Moment::now().since(self.since), ended);
    }

    fn tell_held_for(&self, held: Duration, ended: Ended) {
        Event::Held {
            series: &self.series,
            of: self.of(),
            ended,
            held,
        }
        .emit();
    }

    /// Reports the loss, which the watchdog has detected, or only the release.
    pub(crate) fn tell_lost(&self, reason: &LossReason) {
        self.tell_held(Ended::Lost);
        let event = self.loss(reason);
        self.in_span(|| event.emit());
    }

    fn loss<'a>(&'a self, reason: &'a LossReason) -> Event<'a> {
        Event::Lost {
            series: &self.series,
            of: self.of(),
            key: &self.key,
            grant: self.id(),
            reason,
        }
    }

    /// Records a failed renewal, which counts if the lease ends before another one succeeds.
    pub(crate) fn renewal_failed(&self, error: &StoreError) {
        let (now, mut state) = (Moment::now(), self.state.lock());
        // A failure after the end is not its reason.
        if now <= state.grant.deadline() {
            let signals = state.room.make_signals();
            drop(state);
            *signals.failure.lock() = Some((now, error.clone()));
        }
    }

    /// Records a failed release, which is sent again.
    pub(crate) fn release_failed(&self, error: StoreError) {
        let (signals, _) = self.signals();
        *signals.failure.lock() = Some((Moment::now(), error));
    }

    /// Returns the last failure of its release, which began then, if there was one.
    pub(crate) fn release_failure(&self, began: Moment) -> Option<StoreError> {
        let (signals, _) = self.signals();
        let failure = signals.failure.lock().take();
        // An earlier one is that of a renewal.
        failure.filter(|(at, _)| *at >= began).map(|(_, error)| error)
    }

    /// Why the lease expired although it is renewed.
    fn why_expired(&self, signals: &Signals, deadline: Moment, was_suspect: bool) -> LossReason {
        // Failures before the last successful renewal are not the reason.
        let renewed = deadline.earlier_by(self.lease());
        let failure = signals.failure.lock().take();
        match failure.filter(|(at, _)| *at > renewed) {
            Some((_, error)) => because_of(&error),
            None if was_suspect => LossReason::Unanswered("no answer".to_owned()),
            None => LossReason::Stalled,
        }
    }

    /// Why the lease was over before the store released it.
    pub(crate) fn why_released_late(&self) -> LossReason {
        if !self.renewed {
            return LossReason::Expired;
        }
        // Failures before the last successful renewal are not the reason.
        let renewed = Moment::of(self.deadline()).earlier_by(self.lease());
        let (signals, _) = self.signals();
        let failure = signals.failure.lock();
        match failure.as_ref().filter(|(at, _)| *at > renewed) {
            Some((_, error)) => because_of(error),
            None => LossReason::Stalled,
        }
    }

    /// Why it was lost, as far as this process knows.
    pub(crate) fn why_lost(&self, loss: Loss) -> LossReason {
        let (signals, _) = self.signals();
        let known = signals.reason.get().cloned();
        known.unwrap_or_else(|| LossReason::of(loss))
    }

    /// Reports that it has become suspect, for callers that hold no mutex.
    pub(crate) fn tell_suspect(&self, error: Option<&StoreError>) {
        let event = Event::Suspect {
            key: &self.key,
            grant: self.id(),
            error,
        };
        self.in_span(|| event.emit());
    }
}

/// Why a lease ended of which the store did not hear in time.
fn because_of(error: &StoreError) -> LossReason {
    match error.reason {
        Reason::Unreachable | Reason::Closed => LossReason::Unanswered(error.to_string()),
        _ => LossReason::Refused(error.to_string()),
    }
}

impl std::fmt::Debug for Grant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grant")
            .field("key", &self.key)
            .field("id", &self.id())
            .field("lease", &self.lease())
            .field("renewed", &self.renewed)
            .finish_non_exhaustive()
    }
}

/// Signals that the grant has ended. For callers that hold no mutex.
fn tell(signals: Option<Arc<Signals>>) {
    let Some(signals) = signals else { return };
    cancel(&signals.over);
    let also = std::mem::take(&mut signals.also.lock().ends);
    for first in also.iter().filter_map(Weak::upgrade) {
        cancel(&first.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With the counters of its references, and 8 bytes of the allocator, it takes 176: one word more would take 16.
    #[cfg(target_pointer_width = "64")]
    #[test]
    fn a_grant_takes_nineteen_words_at_most() {
        assert!(size_of::<Grant>() <= 19 * size_of::<usize>());
    }
}
