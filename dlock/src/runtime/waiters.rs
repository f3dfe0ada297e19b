//! Who waits in this process, in arrival order.
//!
//! Of all who wait for a key here only the first talks to the store. It has the *turn*, and with it the
//! subscription to the key's releases. When it has the lock or goes away the turn passes on: to the next,
//! who looks at the store at once, so that a wake-up that the one before had consumed is not lost; or into
//! the grant, where others wait, so that they sleep until the lock is handed on to them or goes back to the
//! store (see [`handover`](crate::handover)).
//!
//! **A waiter has to be polled when it was woken.** One that is woken and not polled for a while ([`POLL_DEADLINE`])
//! loses what it has: the turn, a lock that was handed to it, the reply to its request. Otherwise a future that is kept
//! and not polled would block all others. When it is polled again it waits on, in front of those that came later. A task
//! of the client looks once in a while, so a hand-over costs no timer; see [`attend`].
//!
//! Those who wait for a fair lock each ask the store for themselves (see [`acquire::fair`](crate::acquire)).
//! Here the turn says who of them listens, and who asks the moment a release of this process is in line; and while it
//! rests in a grant, who of them are next in the store's queue.

use std::collections::hash_map::Entry;
use std::panic::{AssertUnwindSafe, Location};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::base::broken;
use crate::base::chance::next_id;
use crate::base::clock;
use crate::base::moment::Moment;
use crate::base::name::{ByName, Name};
use crate::engine::evidence::Evidence;
use crate::engine::handoff::HandoffTerms;
use crate::engine::timing::{HURRIED_POLL_DEADLINE, POLL_DEADLINE};
use crate::engine::wait_queue::{Place, TooMany, WaitQueue, Waiter};
use crate::runtime::fairness::After;
use crate::runtime::hold::Hold;
use crate::runtime::release::Carry;
use crate::store::{GrantId, Kind, Watch};
use crate::{Error, LockKey};

/// The place of one who has none in the store's queue.
const NOWHERE: u64 = u64::MAX;

/// The queues of a client, one for each key that somebody waits for.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    queues: Mutex<ByName<Queue>>,
    alarm: Arc<Alarm>,
}

/// Tells the task that looks for waiters which are not polled that one was woken.
#[derive(Debug, Default)]
struct Alarm {
    armed: AtomicBool,
    rings: Notify,
}

impl Alarm {
    fn arm(&self) {
        if !self.armed.load(Ordering::Relaxed) && !self.armed.swap(true, Ordering::AcqRel) {
            self.rings.notify_one();
        }
    }
}

/// Looks after the waiters of a client, for as long as that lives: takes away what those have that are not polled.
pub(crate) async fn attend(waiters: Arc<Waiters>) {
    loop {
        waiters.alarm.rings.notified().await;
        loop {
            tokio::time::sleep(POLL_DEADLINE).await;
            // What is woken from now on rings again.
            waiters.alarm.armed.store(false, Ordering::Release);
            let (mut late, some_woken) = waiters.overdue();
            // The queues of all others are looked at in between.
            let end = Instant::now() + 4 * POLL_DEADLINE;
            while !late.is_empty() && Instant::now() < end {
                let queues: Vec<_> = late.iter().map(|(of, _)| of.clone()).collect();
                for (of, seat) in late {
                    let withdraws = AssertUnwindSafe(|| waiters.withdraw(&of, &seat));
                    if std::panic::catch_unwind(withdraws).is_err() {
                        tracing::error!("a step of the lock store panicked");
                    }
                }
                waiters.mark_woken(&queues);
                tokio::time::sleep(HURRIED_POLL_DEADLINE).await;
                late = waiters.late_in(&queues);
            }
            if !some_woken && late.is_empty() {
                break;
            }
        }
    }
}

/// What becomes of the place of one that begins to wait.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Line {
    /// Behind all others, unless so many wait already.
    End(Option<usize>),
    /// It had a place before: in front of those that came later.
    Front,
}

/// Attention of a waiter: polled since it was woken last, woken, woken some time ago.
const POLLED: u8 = 0;
const WOKEN: u8 = 1;
const LATE: u8 = 2;

/// A request on its way for a waiter, which is given up when the waiter is not polled.
pub(crate) trait Abandon: Send + Sync {
    /// Gives it up: what it brings is given back.
    fn abandon(&self);
}

/// See [`Ticket::shares`].
type Slot<T> = Mutex<Option<Carry<T>>>;

impl<T: Send + 'static> Abandon for Slot<T> {
    fn abandon(&self) {
        let request = self.lock().take();
        drop(request);
    }
}

/// A request on its way for a waiter. It never ends where it was given up, which the [`Ticket`] tells.
pub(crate) struct Shared<T: Send + 'static> {
    slot: Arc<Slot<T>>,
    seat: Arc<Seat>,
}

impl<T: Send + 'static> Future for Shared<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        match &mut *self.slot.lock() {
            Some(request) => Pin::new(request).poll(cx),
            None => Poll::Pending,
        }
    }
}

impl<T: Send + 'static> Drop for Shared<T> {
    fn drop(&mut self) {
        let shared = self.seat.in_flight.lock().take();
        drop(shared);
        self.slot.abandon();
    }
}

/// The queue of a key: it is there for as long as its turn is.
#[derive(Debug)]
struct Queue {
    waiters: WaitQueue<Arc<Seat>>,
    /// What the one in front was told by the store.
    evidence: Evidence,
}

/// One who waits.
pub(crate) struct Seat {
    limit: Option<usize>,
    /// What it would take over from others in this process, and who it is.
    pub(crate) wanted: Option<HandoffTerms>,
    pub(crate) by: &'static Location<'static>,
    /// The number of its place in the store's queue, if it has one.
    place: AtomicU64,
    /// When it looks again at the latest, if it is looked after; always, where that is not said.
    polled_by: Mutex<Option<Instant>>,
    /// Whether it stands in line behind others, and whether it has left from there. Under the lock of the
    /// queues.
    in_line: AtomicBool,
    left: AtomicBool,
    call: Mutex<Call>,
    /// What is done for it the moment it has the turn, before it knows.
    at_turn: Mutex<Option<AtTurn>>,
    /// What it has asked the store for.
    in_flight: Mutex<Option<Arc<dyn Abandon>>>,
    /// Whether it is polled when it was woken.
    attention: AtomicU8,
    alarm: Arc<Alarm>,
    waker: AtomicWaker,
}

/// See [`Ticket::at_turn`].
type AtTurn = Box<dyn FnOnce() + Send>;

/// What one who waits is told.
#[derive(Debug, Default)]
struct Call {
    turn: Option<Turn>,
    guard: Option<Hold>,
    turned_away: bool,
    /// It was not polled in time, and lost what it had.
    withdrawn: bool,
    /// Nobody listens any more.
    closed: bool,
}

impl Seat {
    /// Whether the lock can be given to it: somebody listens, and has not been given it already.
    fn takes_a_guard(&self) -> bool {
        let call = self.call.lock();
        !call.closed && call.guard.is_none()
    }

    /// Whether it was not polled when that was due.
    fn is_overdue(&self) -> bool {
        let is_overdue = self.polled_by.lock().is_some_and(|by| clock::now() > by);
        is_overdue && !broken!(HandoffToUnpolledWaiter)
    }

    fn tell(&self, tell: impl FnOnce(&mut Call)) -> bool {
        let mut call = self.call.lock();
        if call.closed {
            return false;
        }
        tell(&mut call);
        drop(call);
        self.rouse();
        true
    }

    /// Whether it was woken and has not been polled since. From now on it counts as late.
    fn is_late(&self) -> bool {
        let (order, relaxed) = (Ordering::AcqRel, Ordering::Relaxed);
        let before = self.attention.compare_exchange(WOKEN, LATE, order, relaxed);
        before.unwrap_or_else(|before| before) != POLLED
    }

    fn rouse(&self) {
        // One that was woken before and not polled since stays as late as it is.
        let _ = self
            .attention
            .compare_exchange(POLLED, WOKEN, Ordering::AcqRel, Ordering::Relaxed);
        self.alarm.arm();
        self.waker.wake();
    }

    /// Hands over the lock; gives it back when nobody listens, or when one that was handed over before was
    /// not looked at yet. That one is lost, or will be: it is not for us to drop it, under a lock, since
    /// what is dropped passes on and comes back here.
    pub(crate) fn give(&self, guard: Hold) -> Result<(), Hold> {
        let mut guard = Some(guard);
        self.tell(|call| {
            if call.guard.is_none() {
                call.guard = guard.take();
            }
        });
        guard.map_or(Ok(()), Err)
    }
}

impl Waiter for Arc<Seat> {
    fn is(&self, other: &Arc<Seat>) -> bool {
        Arc::ptr_eq(self, other)
    }

    fn limit(&self) -> Option<usize> {
        self.limit
    }

    fn position(&self) -> Option<u64> {
        let place = self.place.load(Ordering::Relaxed);
        (place != NOWHERE).then_some(place)
    }

    fn set_in_line(&self, in_line: bool) {
        self.in_line.store(in_line, Ordering::Relaxed);
    }

    fn has_left(&self) -> bool {
        self.left.load(Ordering::Relaxed)
    }
}

/// The waker that a waiter polls with, so that it is known when it was woken.
impl Wake for Seat {
    fn wake(self: Arc<Self>) {
        self.rouse();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rouse();
    }
}

impl std::fmt::Debug for Seat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seat")
            .field("by", &self.by)
            .finish_non_exhaustive()
    }
}

/// A place in the queue of a key.
#[derive(Debug)]
pub(crate) struct Ticket {
    waiters: Arc<Waiters>,
    of: Name,
    seat: Arc<Seat>,
    /// Others were there before it.
    has_waited: bool,
}

/// What one who waits has got.
pub(crate) enum Called {
    /// The turn.
    Turn(Turn),
    /// The lock, from somebody in this process. One who had the turn puts it into the grant.
    Guard(Hold),
    /// It was not polled when that was due, and has lost its place.
    Withdrawn,
}

/// The right to talk to the store for everybody who waits for the key in this process.
#[derive(Debug)]
pub(crate) struct Turn {
    waiters: Arc<Waiters>,
    of: Name,
    /// As long as it is the queue's, it is valid.
    number: u64,
    /// The subscription, once somebody needed it.
    pub(crate) watch: Option<Watch>,
    /// The lock was given back to the store just now, perhaps for others.
    pub(crate) after: Option<After>,
    /// How many times the lock was handed over since it last came from the store.
    pub(crate) handed: u32,
    /// One who waited here has just come in to read, so that all others may.
    pub(crate) opened: bool,
    /// Those in this process who are next in the store's queue, by the numbers of their places; the last of them is
    /// the first to come.
    pub(crate) behind: Vec<u64>,
    /// It was taken from one that was not polled: nothing is asked for the next before that is.
    quietly: bool,
}

impl Waiters {
    /// Takes a place in the queue of a key.
    ///
    /// With [`Line::End`], at most so many callers wait. One that has not yet been told to wait does not count; if it is, and
    /// they are too many by then, the last to come are turned away.
    pub(crate) fn join(
        self: &Arc<Self>,
        kind: Kind,
        key: &LockKey,
        line: Line,
        wanted: Option<HandoffTerms>,
        by: &'static Location<'static>,
    ) -> Result<Ticket, Error> {
        let of = Name::new(kind, key);
        let limit = match line {
            Line::End(limit) => limit,
            Line::Front => None,
        };
        let seat = Arc::new(Seat {
            limit,
            wanted,
            by,
            place: AtomicU64::new(NOWHERE),
            polled_by: Mutex::default(),
            in_line: AtomicBool::new(false),
            left: AtomicBool::new(false),
            call: Mutex::default(),
            at_turn: Mutex::default(),
            in_flight: Mutex::default(),
            attention: AtomicU8::new(POLLED),
            alarm: self.alarm.clone(),
            waker: AtomicWaker::new(),
        });
        let has_waited = match self.queues.lock().entry(of.clone()) {
            Entry::Vacant(vacant) => {
                let number = next_id();
                vacant.insert(Queue {
                    waiters: WaitQueue::new(seat.clone(), number),
                    evidence: Evidence::default(),
                });
                seat.call.lock().turn = Some(self.new_turn(of.clone(), number, false));
                false
            }
            Entry::Occupied(mut occupied) => {
                let place = match line {
                    Line::End(_) => Place::End,
                    Line::Front => Place::Front,
                };
                let joined = occupied.get_mut().waiters.join(&seat, place);
                joined.map_err(|TooMany { limit }| too_many(key, limit))?;
                true
            }
        };
        Ok(Ticket {
            waiters: self.clone(),
            of,
            seat,
            has_waited,
        })
    }

    fn new_turn(self: &Arc<Self>, of: Name, number: u64, quietly: bool) -> Turn {
        Turn {
            waiters: self.clone(),
            of,
            number,
            watch: None,
            after: None,
            handed: 0,
            opened: false,
            behind: Vec::new(),
            quietly,
        }
    }

    /// How many wait for a key behind others.
    pub(crate) fn behind(&self, of: &Name) -> usize {
        let queues = self.queues.lock();
        queues.get(of).map_or(0, |queue| queue.waiters.waiting())
    }

    /// Whether a key is waited for.
    pub(crate) fn any(&self, of: &Name) -> bool {
        self.queues.lock().contains_key(of)
    }

    /// How many keys are waited for.
    pub(crate) fn len(&self) -> usize {
        let waited_for = |queue: &&Queue| queue.waiters.is_waited_in();
        self.queues.lock().values().filter(waited_for).count()
    }

    /// Who has the turn of a key, if the lock can be given to it.
    pub(crate) fn front(&self, kind: Kind, key: &LockKey) -> Option<Arc<Seat>> {
        let mut queues = self.queues.lock();
        let queue = queues.get_mut(&Name::new(kind, key))?;
        queue.waiters.offer_to_head(|seat| seat.takes_a_guard())
    }

    /// Those that were woken, have not been polled since, and were found so before. And whether others were woken, which
    /// are found so now.
    fn overdue(&self) -> (Vec<(Name, Arc<Seat>)>, bool) {
        if broken!(Defect15UnpolledWaiterBlocks) {
            return (Vec::new(), false);
        }
        let (mut overdue, mut some_woken) = (Vec::new(), false);
        for (of, queue) in &*self.queues.lock() {
            for seat in queue.waiters.served() {
                match seat.attention.load(Ordering::Acquire) {
                    POLLED => {}
                    LATE => overdue.push((of.clone(), seat.clone())),
                    _ => some_woken |= seat.is_late(),
                }
            }
        }
        (overdue, some_woken)
    }

    /// From now on those at the head of these queues are late that were woken and are not polled.
    fn mark_woken(&self, queues: &[Name]) {
        let all = self.queues.lock();
        for seat in queues
            .iter()
            .filter_map(|of| all.get(of))
            .flat_map(|queue| queue.waiters.served())
        {
            let _ = seat.is_late();
        }
    }

    /// Those at the head of these queues that are late.
    fn late_in(&self, queues: &[Name]) -> Vec<(Name, Arc<Seat>)> {
        let all = self.queues.lock();
        let late = queues.iter().filter_map(|of| {
            let is_late = |seat: &&Arc<Seat>| seat.attention.load(Ordering::Acquire) == LATE;
            let seat = all.get(of)?.waiters.served().find(is_late)?;
            Some((of.clone(), seat.clone()))
        });
        late.collect()
    }

    /// Takes away what one has that is not polled. It is woken, so that it waits on if it is polled after all.
    fn withdraw(self: &Arc<Self>, of: &Name, seat: &Arc<Seat>) {
        let mut call = seat.call.lock();
        if seat.attention.load(Ordering::Acquire) != LATE {
            return;
        }
        let (guard, mut turn) = (call.guard.take(), call.turn.take());
        turn.iter_mut().for_each(|turn| turn.quietly = true);
        let is_there = !std::mem::replace(&mut call.closed, true);
        call.withdrawn = true;
        drop(call);
        // Before the turn passes on: the release of what the request brings stands before the next request.
        let in_flight = seat.in_flight.lock().take();
        if let Some(in_flight) = in_flight {
            in_flight.abandon();
        }
        let mut queues = self.queues.lock();
        let mut stolen = None;
        if let Some(queue) = queues.get_mut(of)
            && queue.waiters.withdraw(seat, turn.is_some(), next_id)
        {
            stolen = Some(self.new_turn(of.clone(), queue.waiters.number(), true));
        }
        drop(queues);
        if is_there {
            tracing::debug!(key = %of.key, by = %seat.by, "a waiter was woken and not polled: others go first");
        }
        drop((turn, stolen));
        // Last, so that it can go to the one that has the turn now.
        drop(guard);
        seat.waker.wake();
    }
}

fn too_many(key: &LockKey, limit: usize) -> Error {
    Error::TooManyWaiters {
        key: key.clone(),
        limit,
    }
}

impl Ticket {
    /// What it is a place for.
    pub(crate) fn name(&self) -> &Name {
        &self.of
    }

    /// Polls a future for this waiter; all that the waiter awaits has to be in there. Cancel safe.
    pub(crate) async fn attended<F: Future>(&self, mut future: Pin<&mut F>) -> F::Output {
        let mut waker = None;
        std::future::poll_fn(|cx| {
            self.seat.attention.store(POLLED, Ordering::Release);
            if waker.is_none() && !self.has_waited {
                // Most need no waker: the lock is free, and the store is at hand.
                let poll = future.as_mut().poll(cx);
                if poll.is_ready() {
                    return poll;
                }
            }
            let waker = waker.get_or_insert_with(|| Waker::from(self.seat.clone()));
            let poll = future.as_mut().poll(&mut Context::from_waker(waker));
            if poll.is_pending() {
                self.seat.waker.register(cx.waker());
                // Woken before the waker stood there.
                if self.seat.attention.load(Ordering::Acquire) != POLLED {
                    cx.waker().wake_by_ref();
                }
            }
            poll
        })
        .await
    }

    /// Waits for the turn or the lock, whichever comes first; within [`attended`](Self::attended). Cancel safe.
    pub(crate) async fn called(&self) -> Result<Called, Error> {
        std::future::poll_fn(|_| self.poll().map_or(Poll::Pending, Poll::Ready)).await
    }

    /// Awaits a request to the store, which is given up where this waiter is not polled.
    pub(crate) fn shares<T: Send + 'static>(&self, request: Carry<T>) -> Shared<T> {
        let slot = Arc::new(Mutex::new(Some(request)));
        self.asks(slot.clone());
        Shared {
            slot,
            seat: self.seat.clone(),
        }
    }

    /// What is to be given up where this waiter is not polled.
    pub(crate) fn asks(&self, request: Arc<dyn Abandon>) {
        let before = self.seat.in_flight.lock().replace(request);
        drop(before);
    }

    fn poll(&self) -> Option<Result<Called, Error>> {
        let mut call = self.seat.call.lock();
        if call.withdrawn {
            return Some(Ok(Called::Withdrawn));
        }
        if let Some(guard) = call.guard.take() {
            let turn = call.turn.take();
            drop(call);
            if let Some(turn) = turn {
                guard.rest(turn);
            }
            return Some(Ok(Called::Guard(guard)));
        }
        if let Some(turn) = call.turn.take() {
            return Some(Ok(Called::Turn(turn)));
        }
        call.turned_away
            .then(|| Err(too_many(&self.of.key, self.seat.limit.unwrap_or_default())))
    }

    /// Its place in the store's queue.
    pub(crate) fn stands_at(&self, place: GrantId) {
        self.seat.place.store(place.number(), Ordering::Relaxed);
    }

    /// From then on nothing is asked for it when the turn comes, and the lock is not handed to it, unless this is called
    /// again: it would not take what it gets.
    pub(crate) fn looks_by(&self, at: Instant) {
        *self.seat.polled_by.lock() = Some(at);
    }

    /// The turn, if it has come already.
    pub(crate) fn turn(&self) -> Option<Turn> {
        self.seat.call.lock().turn.take()
    }

    /// Has something done the moment the turn comes, before this is polled; `None` takes that back.
    pub(crate) fn at_turn(&self, deed: Option<AtTurn>) {
        let before = std::mem::replace(&mut *self.seat.at_turn.lock(), deed);
        // Not under the lock: what is dropped may end a step of the store.
        drop(before);
    }

    /// Whether others were there before it.
    pub(crate) fn has_waited(&self) -> bool {
        self.has_waited
    }

    /// What the head of the queue was told by the store.
    pub(crate) fn evidence(&self) -> Evidence {
        let queues = self.waiters.queues.lock();
        queues
            .get(&self.of)
            .map_or_else(Evidence::default, |queue| queue.evidence.clone())
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut queues = self.waiters.queues.lock();
        if self.seat.in_line.load(Ordering::Relaxed) {
            self.seat.left.store(true, Ordering::Relaxed);
            if let Some(queue) = queues.get_mut(&self.of) {
                queue.waiters.leaves();
            }
        }
        // Before the rest: what was called and not heard passes on, which wakes whoever is next.
        drop(queues);
        self.at_turn(None);
        let in_flight = self.seat.in_flight.lock().take();
        drop(in_flight);
        let mut call = self.seat.call.lock();
        call.closed = true;
        let unheard = (call.guard.take(), call.turn.take());
        drop(call);
        // The place in line may be swept only later, and then under the lock of the queues.
        drop(self.seat.waker.take());
        drop(unheard);
    }
}

impl Turn {
    /// The queue, where this is still its turn.
    fn queue<'q>(&self, queues: &'q mut ByName<Queue>) -> Option<&'q mut Queue> {
        queues
            .get_mut(&self.of)
            .filter(|queue| queue.waiters.number() == self.number)
    }

    /// The one in front has to wait and counts from now on: whoever is behind and too many goes. It goes
    /// itself where nobody may wait.
    pub(crate) fn waits(&self, limit: Option<usize>, heard: &Evidence) -> Result<(), Error> {
        if limit == Some(0) {
            return Err(too_many(&self.of.key, 0));
        }
        let mut queues = self.waiters.queues.lock();
        let Some(queue) = self.queue(&mut queues) else {
            return Ok(());
        };
        queue.evidence = heard.clone();
        let turned_away = queue.waiters.head_waits();
        // They are woken by this, which must not be under the lock.
        drop(queues);
        for seat in turned_away {
            seat.tell(|call| call.turned_away = true);
        }
        Ok(())
    }

    /// Tells those behind what the one in front was told by the store.
    pub(crate) fn knows(&self, heard: &Evidence) {
        if let Some(queue) = self.queue(&mut self.waiters.queues.lock()) {
            queue.evidence = heard.clone();
        }
    }

    /// The one who had the turn has the lock: where others wait and it can be handed on to them, the turn
    /// goes to rest in the grant.
    pub(crate) fn rests(self, guard: &Hold) {
        let mut queues = self.waiters.queues.lock();
        if broken!(WaiterForgottenWhenHeadCancelled)
            && let Some(queue) = self.queue(&mut queues)
        {
            // It has the lock, so it is not cancelled.
            queue.waiters.head_rests();
        }
        let others_wait = self
            .queue(&mut queues)
            .is_some_and(|queue| queue.waiters.waiting() > 0);
        drop(queues);
        if others_wait && guard.can_be_handed_on() {
            guard.rest(self);
        }
    }

    /// From now on nobody in particular has the turn; `false` where it was taken away before.
    pub(crate) fn leave_front(&self) -> bool {
        let mut queues = self.waiters.queues.lock();
        let Some(queue) = self.queue(&mut queues) else {
            return false;
        };
        queue.waiters.head_rests();
        queue.evidence.is_held_here();
        true
    }

    /// The next in line, out of it, if it takes over what is offered. Where the store has a queue it is the next in that.
    pub(crate) fn heir(&mut self, fits: impl FnOnce(&HandoffTerms) -> bool) -> Option<Arc<Seat>> {
        let mut behind = std::mem::take(&mut self.behind);
        let mut queues = self.waiters.queues.lock();
        let waiters = &mut self.queue(&mut queues)?.waiters;
        let takes = |seat: &Arc<Seat>| !seat.is_overdue() && seat.wanted.as_ref().is_some_and(fits);
        let heir = match self.of.kind.waits_in_store() {
            true => waiters.offer_in_store_order(&mut behind, takes),
            false => waiters.offer_to_next(takes),
        };
        drop(queues);
        self.behind = behind;
        heir
    }

    /// Puts one back in line who was to take over and could not.
    pub(crate) fn back_in_line(&self, seat: Arc<Seat>) {
        if let Some(queue) = self.queue(&mut self.waiters.queues.lock()) {
            queue.waiters.put_back(seat);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (mut watch, after) = (self.watch.take(), self.after.take());
        let mut queues = self.waiters.queues.lock();
        let mut next = None;
        if let Some(queue) = self.queue(&mut queues) {
            let waiters = &mut queue.waiters;
            if broken!(WaiterForgottenWhenHeadCancelled) && waiters.has_head() && waiters.waiting() > 0 {
                waiters.head_rests();
                return;
            }
            next = waiters.head_ends();
            if next.is_none() {
                queues.remove(&self.of);
            } else {
                let released = after.as_ref().map(After::sent);
                queue.evidence.turn_ends(Moment::now(), released);
            }
        }
        // Before the rest: ending a subscription calls into the store, and a turn that nobody takes
        // comes back here to go on to the one after.
        drop(queues);
        if let Some(next) = next {
            let deed = next.at_turn.lock().take();
            if let Some(deed) = deed.filter(|_| !self.quietly && !next.is_overdue()) {
                deed();
            }
            if broken!(SubscriptionDroppedWithHead) {
                watch.iter_mut().for_each(Watch::end);
            }
            let mut turn = Some(Turn {
                waiters: self.waiters.clone(),
                of: self.of.clone(),
                number: self.number,
                watch,
                after,
                handed: self.handed,
                opened: self.opened,
                behind: Vec::new(),
                quietly: false,
            });
            next.tell(|call| call.turn = turn.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One that has the turn and was handed the lock: it has a whole poll deadline from when it was woken.
    #[test]
    fn waiter_that_was_woken_just_now_is_not_overdue() {
        let waiters: Arc<Waiters> = Arc::default();
        let (kind, key) = (Kind::Lock, LockKey::raw("k"));
        let head = waiters.join(kind, &key, Line::End(None), None, Location::caller());
        let offered = waiters.front(kind, &key).expect("the one in front");
        offered.rouse();
        assert_eq!(waiters.overdue().0.len(), 0);
        assert_eq!(waiters.overdue().0.len(), 1);
        drop(head);
    }
}
