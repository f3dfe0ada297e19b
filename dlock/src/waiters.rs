//! Who waits in this process, in arrival order.
//!
//! Of all who wait for a key here only the first talks to the store. It has the *turn*, and with it the
//! subscription to the key's releases. When it has the lock or goes away the turn passes on: to the next,
//! who looks at the store at once, so that a wake-up that the one before had consumed is not lost; or into
//! the grant, where others wait, so that they sleep until the lock is handed on to them or goes back to the
//! store (see [`handover`](crate::handover)).
//!
//! Those who wait for a fair lock each ask the store for themselves (see [`acquire::fair`](crate::acquire)).
//! Here the turn says who of them listens, and who asks the moment a release of this process is in line; and while it
//! rests in a grant, who of them are next in the store's queue.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::backend::{GrantId, Kind, Watch};
use crate::courtesy::After;
use crate::evidence::Evidence;
use crate::guard::LockGuard;
use crate::handover::Wanted;
use crate::name::{ByName, Name};
use crate::{Error, LockKey, clock};

/// The place of one who has none in the store's queue.
const NOWHERE: u64 = u64::MAX;

/// The queues of a client, one for each key that somebody waits for.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    queues: Mutex<ByName<Queue>>,
}

/// The queue of a key: it is there for as long as its turn is.
#[derive(Debug, Default)]
struct Queue {
    /// Who has the turn; nobody while it rests in a grant.
    front: Option<Arc<Seat>>,
    /// The one in front knows that it has to wait.
    front_waits: bool,
    behind: VecDeque<Arc<Seat>>,
    /// How many of those behind have left.
    left: usize,
    /// What the one in front was told by the store.
    evidence: Evidence,
}

impl Queue {
    fn waiting(&self) -> usize {
        self.behind.len() - self.left
    }

    fn next(&mut self) -> Option<Arc<Seat>> {
        loop {
            let seat = self.behind.pop_front()?;
            seat.stands(false);
            if !seat.has_left() {
                return Some(seat);
            }
            self.left -= 1;
        }
    }

    /// The first of those who are at one of these places, from the last of these on; mostly it is the next here, too.
    fn next_of(&mut self, places: &mut Vec<u64>) -> Option<Arc<Seat>> {
        while let Some(place) = places.pop() {
            let is_there = |seat: &Arc<Seat>| seat.place.load(Ordering::Relaxed) == place && !seat.has_left();
            if let Some(at) = self.behind.iter().position(is_there) {
                let seat = self.behind.remove(at)?;
                seat.stands(false);
                return Some(seat);
            }
        }
        None
    }

    fn put_back(&mut self, seat: Arc<Seat>) {
        seat.stands(true);
        self.behind.push_front(seat);
    }

    /// Who leaves the middle of a long queue costs nothing; the queue is swept when half of it has left.
    fn leaves(&mut self) {
        self.left += 1;
        if self.left > 16 && self.left > self.behind.len() / 2 {
            self.behind.retain(|seat| !seat.has_left());
            self.left = 0;
        }
    }
}

/// One who waits.
pub(crate) struct Seat {
    limit: Option<usize>,
    /// What it would take over from others in this process, and who it is.
    pub(crate) wanted: Option<Wanted>,
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
    waker: AtomicWaker,
}

/// See [`Ticket::at_turn`].
type AtTurn = Box<dyn FnOnce() + Send>;

/// What one who waits is told.
#[derive(Debug, Default)]
struct Call {
    turn: Option<Turn>,
    guard: Option<LockGuard>,
    turned_away: bool,
    /// Nobody listens any more.
    closed: bool,
}

impl Seat {
    fn stands(&self, in_line: bool) {
        self.in_line.store(in_line, Ordering::Relaxed);
    }

    fn has_left(&self) -> bool {
        self.left.load(Ordering::Relaxed)
    }

    /// Whether the lock can be given to it: somebody listens, and has not been given it already.
    fn takes_a_guard(&self) -> bool {
        let call = self.call.lock();
        !call.closed && call.guard.is_none()
    }

    /// Whether it was not polled when that was due.
    fn is_overdue(&self) -> bool {
        self.polled_by.lock().is_some_and(|by| clock::now() > by)
    }

    fn tell(&self, tell: impl FnOnce(&mut Call)) -> bool {
        let mut call = self.call.lock();
        if call.closed {
            return false;
        }
        tell(&mut call);
        drop(call);
        self.waker.wake();
        true
    }

    /// Hands over the lock; gives it back when nobody listens, or when one that was handed over before was
    /// not looked at yet. That one is lost, or will be: it is not for us to drop it, under a lock, since
    /// what is dropped passes on and comes back here.
    pub(crate) fn give(&self, guard: LockGuard) -> Result<(), LockGuard> {
        let mut guard = Some(guard);
        self.tell(|call| {
            if call.guard.is_none() {
                call.guard = guard.take();
            }
        });
        guard.map_or(Ok(()), Err)
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
    Guard(LockGuard),
}

/// The right to talk to the store for everybody who waits for the key in this process.
#[derive(Debug)]
pub(crate) struct Turn {
    waiters: Arc<Waiters>,
    of: Name,
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
}

impl Waiters {
    /// Takes a place in the queue of a key.
    ///
    /// At most `limit` callers wait. One that has not yet been told to wait does not count; if it is, and
    /// they are too many by then, the last to come are turned away.
    pub(crate) fn join(
        self: &Arc<Self>,
        kind: Kind,
        key: &LockKey,
        limit: Option<usize>,
        wanted: Option<Wanted>,
        by: &'static Location<'static>,
    ) -> Result<Ticket, Error> {
        let of = Name::new(kind, key);
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
            waker: AtomicWaker::new(),
        });
        let has_waited = match self.queues.lock().entry(of.clone()) {
            Entry::Vacant(vacant) => {
                vacant.insert(Queue {
                    front: Some(seat.clone()),
                    ..Queue::default()
                });
                seat.call.lock().turn = Some(Turn {
                    waiters: self.clone(),
                    of: of.clone(),
                    watch: None,
                    after: None,
                    handed: 0,
                    opened: false,
                    behind: Vec::new(),
                });
                false
            }
            Entry::Occupied(mut occupied) => {
                let queue = occupied.get_mut();
                let waiting = queue.waiting() + usize::from(queue.front.is_some() && queue.front_waits);
                if let Some(limit) = limit.filter(|limit| waiting >= *limit) {
                    return Err(too_many(key, limit));
                }
                seat.stands(true);
                queue.behind.push_back(seat.clone());
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

    /// How many wait for a key behind others.
    pub(crate) fn behind(&self, of: &Name) -> usize {
        self.queues.lock().get(of).map_or(0, Queue::waiting)
    }

    /// Whether a key is waited for.
    pub(crate) fn any(&self, of: &Name) -> bool {
        self.queues.lock().contains_key(of)
    }

    /// How many keys are waited for.
    pub(crate) fn len(&self) -> usize {
        let waited_for = |queue: &&Queue| queue.front.is_some() || queue.waiting() > 0;
        self.queues.lock().values().filter(waited_for).count()
    }

    /// Who has the turn of a key, if the lock can be given to it.
    pub(crate) fn front(&self, kind: Kind, key: &LockKey) -> Option<Arc<Seat>> {
        let front = self.queues.lock().get(&Name::new(kind, key))?.front.clone();
        front.filter(|seat| seat.takes_a_guard())
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

    /// Waits for the turn or the lock, whichever comes first. Cancel safe.
    pub(crate) async fn called(&self) -> Result<Called, Error> {
        std::future::poll_fn(|cx| {
            if let Some(called) = self.poll() {
                return Poll::Ready(called);
            }
            self.seat.waker.register(cx.waker());
            self.poll().map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    fn poll(&self) -> Option<Result<Called, Error>> {
        let mut call = self.seat.call.lock();
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
                queue.leaves();
            }
        }
        // Before the rest: what was called and not heard passes on, which wakes whoever is next.
        drop(queues);
        self.at_turn(None);
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
    /// The one in front has to wait and counts from now on: whoever is behind and too many goes. It goes
    /// itself where nobody may wait.
    pub(crate) fn waits(&self, limit: Option<usize>, heard: &Evidence) -> Result<(), Error> {
        if limit == Some(0) {
            return Err(too_many(&self.of.key, 0));
        }
        let mut queues = self.waiters.queues.lock();
        let Some(queue) = queues.get_mut(&self.of) else {
            return Ok(());
        };
        queue.evidence = heard.clone();
        let mut turned_away = Vec::new();
        if !std::mem::replace(&mut queue.front_waits, true) {
            let mut ahead = 0;
            let all = std::mem::take(&mut queue.behind);
            queue.left = 0;
            for seat in all {
                if seat.has_left() {
                    continue;
                }
                ahead += 1;
                if seat.limit.is_none_or(|limit| ahead < limit) {
                    queue.behind.push_back(seat);
                } else {
                    ahead -= 1;
                    seat.stands(false);
                    turned_away.push(seat);
                }
            }
        }
        // They are woken by this, which must not be under the lock.
        drop(queues);
        for seat in turned_away {
            seat.tell(|call| call.turned_away = true);
        }
        Ok(())
    }

    /// Tells those behind what the one in front was told by the store.
    pub(crate) fn knows(&self, heard: &Evidence) {
        if let Some(queue) = self.waiters.queues.lock().get_mut(&self.of) {
            queue.evidence = heard.clone();
        }
    }

    /// The one who had the turn has the lock: where others wait and it can be handed on to them, the turn
    /// goes to rest in the grant.
    pub(crate) fn rests(self, guard: &LockGuard) {
        let queues = self.waiters.queues.lock();
        let others_wait = queues.get(&self.of).is_some_and(|queue| queue.waiting() > 0);
        drop(queues);
        if others_wait && guard.can_be_handed_on() {
            guard.rest(self);
        }
    }

    /// From now on nobody in particular has the turn.
    pub(crate) fn leave_front(&self) {
        if let Some(queue) = self.waiters.queues.lock().get_mut(&self.of) {
            queue.front = None;
            queue.front_waits = true;
            queue.evidence.is_held_here();
        }
    }

    /// The next in line, out of it, if it takes over what is offered. Where the store has a queue it is the next in that.
    pub(crate) fn heir(&mut self, fits: impl FnOnce(&Wanted) -> bool) -> Option<Arc<Seat>> {
        let mut queues = self.waiters.queues.lock();
        let queue = queues.get_mut(&self.of)?;
        let seat = match self.of.kind.waits_in_store() {
            true => queue.next_of(&mut self.behind)?,
            false => queue.next()?,
        };
        if !seat.is_overdue() && seat.wanted.as_ref().is_some_and(fits) {
            return Some(seat);
        }
        queue.put_back(seat);
        None
    }

    /// Puts one back in line who was to take over and could not.
    pub(crate) fn back_in_line(&self, seat: Arc<Seat>) {
        if let Some(queue) = self.waiters.queues.lock().get_mut(&self.of) {
            queue.put_back(seat);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (watch, after) = (self.watch.take(), self.after.take());
        let mut queues = self.waiters.queues.lock();
        let mut next = None;
        if let Some(queue) = queues.get_mut(&self.of) {
            next = queue.next();
            queue.front = next.clone();
            queue.front_waits = true;
            if next.is_none() {
                queues.remove(&self.of);
            } else {
                let released = after.as_ref().map(After::sent);
                queue.evidence.turn_ends(clock::now(), released);
            }
        }
        // Before the rest: ending a subscription calls into the backend, and a turn that nobody takes
        // comes back here to go on to the one after.
        drop(queues);
        if let Some(next) = next {
            let deed = next.at_turn.lock().take();
            if let Some(deed) = deed.filter(|_| !next.is_overdue()) {
                deed();
            }
            let mut turn = Some(Turn {
                waiters: self.waiters.clone(),
                of: self.of.clone(),
                watch,
                after,
                handed: self.handed,
                opened: self.opened,
                behind: Vec::new(),
            });
            next.tell(|call| call.turn = turn.take());
        }
    }
}
