//! The grants of this process, and when they end.
//!
//! A *grant* is what the store knows. The *holds* on it are the callers in this process: re-entry adds one, and the
//! grant is released with the last of them.

mod end;
mod renewable;
mod room;
mod span;

use std::panic::Location;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task;
use tokio::time::Instant;
use tokio_util::task::task_tracker::TaskTrackerToken;
use uuid::Uuid;

use self::end::EndSignal;
pub(crate) use self::end::{FirstEnd, UnreportedLoss};
pub(crate) use self::room::{Blocker, EntryMode, EntryRequest, OuterHolds};
use self::room::{Inside, Room, Wakeups};
use self::span::HoldSpan;
use crate::base::broken;
use crate::base::chance::unique_id;
use crate::base::clock;
use crate::base::moment::{Moment, nanos};
use crate::base::report::LossReason;
use crate::base::reused::Reused;
use crate::engine::grant::{GrantState, Terms};
use crate::engine::handoff::{HandoffBudget, HandoffTerms};
use crate::runtime::client::Shared;
use crate::runtime::emit::Event;
use crate::runtime::emit::events::{Listeners, Of};
use crate::runtime::emit::meter::{Ended, Series};
use crate::runtime::group::Group;
use crate::runtime::nested_read::NestedRead;
use crate::runtime::pending::Pending;
use crate::runtime::waiters::{Caller, QueueHead};
use crate::store::{BoundGrant, GrantId, Kind, ReleaseRequest, RenewRequest, StoreError};
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

/// A grant that its last hold has left, and that may have to be released.
pub(crate) struct Leaving {
    /// When the grant is lost.
    pub(crate) deadline: Moment,
    /// A shutdown waits for it, from before the end of the grant on: it ends no grant that was left.
    pub(crate) counted: TaskTrackerToken,
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

    /// Reports that the hold has ended.
    pub(crate) fn tell_held(&self, ended: Ended) {
        self.tell_held_for(Moment::now().since(self.since), ended);
    }

    /// Reports that the holder left at this moment, and that the next one in this process gets the grant.
    pub(crate) fn tell_passed_on(&self, left: Moment) {
        self.tell_held_for(left.since(self.since), Ended::Handoff);
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
        // A log may be slow.
        let held = Moment::now().since(self.since);
        let event = self.loss(reason);
        self.in_span(|| event.emit());
        self.tell_held_for(held, Ended::Lost);
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
