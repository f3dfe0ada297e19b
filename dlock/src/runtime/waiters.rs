//! Who waits in this process, in arrival order.
//!
//! Of all who wait for a key here only the first talks to the store. It is the *queue head*, and has the
//! subscription to the key's releases. When it has the lock or goes away its role passes on: to the next,
//! who looks at the store at once, so that a wake-up that the one before had consumed is not lost; or into
//! the grant, where others wait, so that they sleep until the lock is handed off to them or goes back to the
//! store (see [`handoff`](crate::handoff)).
//!
//! **A waiter has to be polled when it was woken.** One that is woken and not polled for a while ([`POLL_DEADLINE`])
//! loses what it has: the role of the head, a lock that was handed to it, the reply to its request. Otherwise a future that is kept
//! and not polled would block all others. When it is polled again it waits on, in front of those that came later. A task
//! of the client looks once in a while, so a handoff costs no timer; see [`attend`].
//!
//! Those who wait for a fair lock each ask the store for themselves (see [`acquire::fair`](crate::acquire)).
//! Here the queue head is the one that listens, and that asks the moment a release of this process is in line; and while its role
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
use crate::base::lock_id::{ByLockId, LockId};
use crate::base::moment::Moment;
use crate::engine::evidence::Evidence;
use crate::engine::handoff::HandoffTerms;
use crate::engine::timing::{HURRIED_POLL_DEADLINE, POLL_DEADLINE};
use crate::engine::wait_queue::{InsertAt, QueuedWaiter, TooMany, WaitQueue};
use crate::runtime::emit::Event;
use crate::runtime::fairness::After;
use crate::runtime::hold::Hold;
use crate::runtime::release::RunToCompletion;
use crate::store::{GrantId, Kind, Watch};
use crate::{Error, LockKey};

/// The place of one who has none in the store's queue.
const NOWHERE: u64 = u64::MAX;

/// The queues of a client, one for each key that somebody waits for.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    queues: Mutex<ByLockId<Queue>>,
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
                for (of, waiter) in late {
                    let withdraws = AssertUnwindSafe(|| waiters.withdraw(&of, &waiter));
                    if std::panic::catch_unwind(withdraws).is_err() {
                        Event::StorePanicked.emit();
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
pub(crate) enum JoinAt {
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

/// See [`QueueEntry::shares`].
type Slot<T> = Mutex<Option<RunToCompletion<T>>>;

impl<T: Send + 'static> Abandon for Slot<T> {
    fn abandon(&self) {
        let request = self.lock().take();
        drop(request);
    }
}

/// A request on its way for a waiter. It never ends where it was given up, which the [`QueueEntry`] tells.
pub(crate) struct Shared<T: Send + 'static> {
    slot: Arc<Slot<T>>,
    waiter: Arc<Waiter>,
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
        let shared = self.waiter.in_flight.lock().take();
        drop(shared);
        self.slot.abandon();
    }
}

/// The queue of a key: it is there for as long as its head is, or its head's role.
#[derive(Debug)]
struct Queue {
    waiters: WaitQueue<Arc<Waiter>>,
    /// What the one in front was told by the store.
    evidence: Evidence,
}

/// One who waits.
pub(crate) struct Waiter {
    limit: Option<usize>,
    /// What it would take over from others in this process, and who it is.
    pub(crate) handoff_terms: Option<HandoffTerms>,
    pub(crate) by: &'static Location<'static>,
    /// The number of its place in the store's queue, if it has one.
    place: AtomicU64,
    /// When it looks again at the latest, if it is looked after; always, where that is not said.
    polled_by: Mutex<Option<Moment>>,
    /// Whether it stands in line behind others, and whether it has left from there. Under the lock of the
    /// queues.
    in_line: AtomicBool,
    left: AtomicBool,
    delivery: Mutex<Delivery>,
    /// What is done for it the moment it becomes the head, before it knows.
    on_head: Mutex<Option<OnHead>>,
    /// What it has asked the store for.
    in_flight: Mutex<Option<Arc<dyn Abandon>>>,
    /// Whether it is polled when it was woken.
    attention: AtomicU8,
    alarm: Arc<Alarm>,
    waker: AtomicWaker,
}

/// See [`QueueEntry::on_head`].
type OnHead = Box<dyn FnOnce() + Send>;

/// What one who waits is told.
#[derive(Debug, Default)]
struct Delivery {
    head: Option<QueueHead>,
    guard: Option<Hold>,
    turned_away: bool,
    /// It was not polled in time, and lost what it had.
    withdrawn: bool,
    /// Nobody listens any more.
    closed: bool,
}

impl Waiter {
    /// Whether the lock can be given to it: somebody listens, and has not been given it already.
    fn takes_a_guard(&self) -> bool {
        let delivery = self.delivery.lock();
        !delivery.closed && delivery.guard.is_none()
    }

    /// Whether it was not polled when that was due.
    fn is_overdue(&self) -> bool {
        let is_overdue = self.polled_by.lock().is_some_and(|by| Moment::now() > by);
        is_overdue && !broken!(HandoffToUnpolledWaiter)
    }

    fn tell(&self, tell: impl FnOnce(&mut Delivery)) -> bool {
        let mut delivery = self.delivery.lock();
        if delivery.closed {
            return false;
        }
        tell(&mut delivery);
        drop(delivery);
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
        self.tell(|delivery| {
            if delivery.guard.is_none() {
                delivery.guard = guard.take();
            }
        });
        guard.map_or(Ok(()), Err)
    }
}

impl QueuedWaiter for Arc<Waiter> {
    fn is(&self, other: &Arc<Waiter>) -> bool {
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
impl Wake for Waiter {
    fn wake(self: Arc<Self>) {
        self.rouse();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rouse();
    }
}

impl std::fmt::Debug for Waiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiter")
            .field("by", &self.by)
            .finish_non_exhaustive()
    }
}

/// A place in the queue of a key.
#[derive(Debug)]
pub(crate) struct QueueEntry {
    waiters: Arc<Waiters>,
    of: LockId,
    waiter: Arc<Waiter>,
    /// Others were there before it.
    has_waited: bool,
}

/// What one who waits has got.
pub(crate) enum Called {
    /// The role of the queue head.
    Head(QueueHead),
    /// The lock, from somebody in this process. A waiter that was the head puts its role into the grant.
    Guard(Hold),
    /// It was not polled when that was due, and has lost its place.
    Withdrawn,
}

/// The right to talk to the store for everybody who waits for the key in this process.
#[derive(Debug)]
pub(crate) struct QueueHead {
    waiters: Arc<Waiters>,
    of: LockId,
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
        line: JoinAt,
        handoff_terms: Option<HandoffTerms>,
        by: &'static Location<'static>,
    ) -> Result<QueueEntry, Error> {
        let of = LockId::new(kind, key);
        let limit = match line {
            JoinAt::End(limit) => limit,
            JoinAt::Front => None,
        };
        let waiter = Arc::new(Waiter {
            limit,
            handoff_terms,
            by,
            place: AtomicU64::new(NOWHERE),
            polled_by: Mutex::default(),
            in_line: AtomicBool::new(false),
            left: AtomicBool::new(false),
            delivery: Mutex::default(),
            on_head: Mutex::default(),
            in_flight: Mutex::default(),
            attention: AtomicU8::new(POLLED),
            alarm: self.alarm.clone(),
            waker: AtomicWaker::new(),
        });
        let has_waited = match self.queues.lock().entry(of.clone()) {
            Entry::Vacant(vacant) => {
                let number = next_id();
                vacant.insert(Queue {
                    waiters: WaitQueue::new(waiter.clone(), number),
                    evidence: Evidence::default(),
                });
                waiter.delivery.lock().head = Some(self.new_head(of.clone(), number, false));
                false
            }
            Entry::Occupied(mut occupied) => {
                let at = match line {
                    JoinAt::End(_) => InsertAt::End,
                    JoinAt::Front => InsertAt::Front,
                };
                let joined = occupied.get_mut().waiters.join(&waiter, at);
                joined.map_err(|TooMany { limit }| too_many(key, limit))?;
                true
            }
        };
        Ok(QueueEntry {
            waiters: self.clone(),
            of,
            waiter,
            has_waited,
        })
    }

    fn new_head(self: &Arc<Self>, of: LockId, number: u64, quietly: bool) -> QueueHead {
        QueueHead {
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
    pub(crate) fn behind(&self, of: &LockId) -> usize {
        let queues = self.queues.lock();
        queues.get(of).map_or(0, |queue| queue.waiters.waiting())
    }

    /// Whether a key is waited for.
    pub(crate) fn any(&self, of: &LockId) -> bool {
        self.queues.lock().contains_key(of)
    }

    /// How many keys are waited for.
    pub(crate) fn len(&self) -> usize {
        let waited_for = |queue: &&Queue| queue.waiters.is_waited_in();
        self.queues.lock().values().filter(waited_for).count()
    }

    /// The queue head of a key, if the lock can be given to it.
    pub(crate) fn offer_to_head(&self, kind: Kind, key: &LockKey) -> Option<Arc<Waiter>> {
        let mut queues = self.queues.lock();
        let queue = queues.get_mut(&LockId::new(kind, key))?;
        queue.waiters.offer_to_head(|waiter| waiter.takes_a_guard())
    }

    /// Those that were woken, have not been polled since, and were found so before. And whether others were woken, which
    /// are found so now.
    fn overdue(&self) -> (Vec<(LockId, Arc<Waiter>)>, bool) {
        if broken!(UnpolledWaiterBlocks) {
            return (Vec::new(), false);
        }
        let (mut overdue, mut some_woken) = (Vec::new(), false);
        for (of, queue) in &*self.queues.lock() {
            for waiter in queue.waiters.served() {
                match waiter.attention.load(Ordering::Acquire) {
                    POLLED => {}
                    LATE => overdue.push((of.clone(), waiter.clone())),
                    _ => some_woken |= waiter.is_late(),
                }
            }
        }
        (overdue, some_woken)
    }

    /// From now on those at the head of these queues are late that were woken and are not polled.
    fn mark_woken(&self, queues: &[LockId]) {
        let all = self.queues.lock();
        for waiter in queues
            .iter()
            .filter_map(|of| all.get(of))
            .flat_map(|queue| queue.waiters.served())
        {
            let _ = waiter.is_late();
        }
    }

    /// Those at the head of these queues that are late.
    fn late_in(&self, queues: &[LockId]) -> Vec<(LockId, Arc<Waiter>)> {
        let all = self.queues.lock();
        let late = queues.iter().filter_map(|of| {
            let is_late = |waiter: &&Arc<Waiter>| waiter.attention.load(Ordering::Acquire) == LATE;
            let waiter = all.get(of)?.waiters.served().find(is_late)?;
            Some((of.clone(), waiter.clone()))
        });
        late.collect()
    }

    /// Takes away what one has that is not polled. It is woken, so that it waits on if it is polled after all.
    fn withdraw(self: &Arc<Self>, of: &LockId, waiter: &Arc<Waiter>) {
        let mut delivery = waiter.delivery.lock();
        if waiter.attention.load(Ordering::Acquire) != LATE {
            return;
        }
        let (guard, mut head) = (delivery.guard.take(), delivery.head.take());
        head.iter_mut().for_each(|head| head.quietly = true);
        let is_there = !std::mem::replace(&mut delivery.closed, true);
        delivery.withdrawn = true;
        drop(delivery);
        // Before the next waiter is the head: the release of what the request brings stands before the next request.
        let in_flight = waiter.in_flight.lock().take();
        if let Some(in_flight) = in_flight {
            in_flight.abandon();
        }
        let mut queues = self.queues.lock();
        let mut stolen = None;
        if let Some(queue) = queues.get_mut(of)
            && queue.waiters.withdraw(waiter, head.is_some(), next_id)
        {
            stolen = Some(self.new_head(of.clone(), queue.waiters.number(), true));
        }
        drop(queues);
        if is_there {
            Event::PollDeadlineMissed {
                key: &of.key,
                by: waiter.by,
            }
            .emit();
        }
        drop((head, stolen));
        // Last, so that it can go to the one that is the head now.
        drop(guard);
        waiter.waker.wake();
    }
}

fn too_many(key: &LockKey, limit: usize) -> Error {
    Error::TooManyWaiters {
        key: key.clone(),
        limit,
    }
}

impl QueueEntry {
    /// What it is a place for.
    pub(crate) fn lock_id(&self) -> &LockId {
        &self.of
    }

    /// Polls a future for this waiter; all that the waiter awaits has to be in there. Cancel safe.
    pub(crate) async fn attended<F: Future>(&self, mut future: Pin<&mut F>) -> F::Output {
        let mut waker = None;
        std::future::poll_fn(|cx| {
            self.waiter.attention.store(POLLED, Ordering::Release);
            if waker.is_none() && !self.has_waited {
                // Most need no waker: the lock is free, and the store is at hand.
                let poll = future.as_mut().poll(cx);
                if poll.is_ready() {
                    return poll;
                }
            }
            let waker = waker.get_or_insert_with(|| Waker::from(self.waiter.clone()));
            let poll = future.as_mut().poll(&mut Context::from_waker(waker));
            if poll.is_pending() {
                self.waiter.waker.register(cx.waker());
                // Woken before the waker stood there.
                if self.waiter.attention.load(Ordering::Acquire) != POLLED {
                    cx.waker().wake_by_ref();
                }
            }
            poll
        })
        .await
    }

    /// Waits to be the head or for the lock, whichever comes first; within [`attended`](Self::attended). Cancel safe.
    pub(crate) async fn called(&self) -> Result<Called, Error> {
        std::future::poll_fn(|_| self.poll().map_or(Poll::Pending, Poll::Ready)).await
    }

    /// Awaits a request to the store, which is given up where this waiter is not polled.
    pub(crate) fn shares<T: Send + 'static>(&self, request: RunToCompletion<T>) -> Shared<T> {
        let slot = Arc::new(Mutex::new(Some(request)));
        self.asks(slot.clone());
        Shared {
            slot,
            waiter: self.waiter.clone(),
        }
    }

    /// What is to be given up where this waiter is not polled.
    pub(crate) fn asks(&self, request: Arc<dyn Abandon>) {
        let before = self.waiter.in_flight.lock().replace(request);
        drop(before);
    }

    fn poll(&self) -> Option<Result<Called, Error>> {
        let mut delivery = self.waiter.delivery.lock();
        if delivery.withdrawn {
            return Some(Ok(Called::Withdrawn));
        }
        if let Some(guard) = delivery.guard.take() {
            let head = delivery.head.take();
            drop(delivery);
            if let Some(head) = head {
                guard.rest(head);
            }
            return Some(Ok(Called::Guard(guard)));
        }
        if let Some(head) = delivery.head.take() {
            return Some(Ok(Called::Head(head)));
        }
        delivery
            .turned_away
            .then(|| Err(too_many(&self.of.key, self.waiter.limit.unwrap_or_default())))
    }

    /// Its place in the store's queue.
    pub(crate) fn stands_at(&self, place: GrantId) {
        self.waiter.place.store(place.number(), Ordering::Relaxed);
    }

    /// From then on nothing is asked for it when it becomes the head, and the lock is not handed to it, unless this is called
    /// again: it would not take what it gets.
    pub(crate) fn looks_by(&self, at: Option<Moment>) {
        *self.waiter.polled_by.lock() = at;
    }

    /// The role of the head, if this has it already.
    pub(crate) fn head(&self) -> Option<QueueHead> {
        self.waiter.delivery.lock().head.take()
    }

    /// Has something done the moment this becomes the head, before this is polled; `None` takes that back.
    pub(crate) fn on_head(&self, deed: Option<OnHead>) {
        let before = std::mem::replace(&mut *self.waiter.on_head.lock(), deed);
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

impl Drop for QueueEntry {
    fn drop(&mut self) {
        let mut queues = self.waiters.queues.lock();
        if self.waiter.in_line.load(Ordering::Relaxed) {
            self.waiter.left.store(true, Ordering::Relaxed);
            if let Some(queue) = queues.get_mut(&self.of) {
                queue.waiters.leaves();
            }
        }
        // Before the rest: what was called and not heard passes on, which wakes whoever is next.
        drop(queues);
        self.on_head(None);
        let in_flight = self.waiter.in_flight.lock().take();
        drop(in_flight);
        let mut delivery = self.waiter.delivery.lock();
        delivery.closed = true;
        let undelivered = (delivery.guard.take(), delivery.head.take());
        drop(delivery);
        // The place in line may be swept only later, and then under the lock of the queues.
        drop(self.waiter.waker.take());
        drop(undelivered);
    }
}

impl QueueHead {
    /// The queue, where this is still its head.
    fn queue<'q>(&self, queues: &'q mut ByLockId<Queue>) -> Option<&'q mut Queue> {
        queues
            .get_mut(&self.of)
            .filter(|queue| queue.waiters.number() == self.number)
    }

    /// The one in front has to wait and counts from now on: whoever is behind and too many goes. It goes
    /// itself where nobody may wait.
    pub(crate) fn waits(&self, limit: Option<usize>, evidence: &Evidence) -> Result<(), Error> {
        if limit == Some(0) {
            return Err(too_many(&self.of.key, 0));
        }
        let mut queues = self.waiters.queues.lock();
        let Some(queue) = self.queue(&mut queues) else {
            return Ok(());
        };
        queue.evidence = evidence.clone();
        let turned_away = queue.waiters.head_waits();
        // They are woken by this, which must not be under the lock.
        drop(queues);
        for waiter in turned_away {
            waiter.tell(|delivery| delivery.turned_away = true);
        }
        Ok(())
    }

    /// Tells those behind what the one in front was told by the store.
    pub(crate) fn knows(&self, evidence: &Evidence) {
        if let Some(queue) = self.queue(&mut self.waiters.queues.lock()) {
            queue.evidence = evidence.clone();
        }
    }

    /// The head has the lock: where others wait and it can be handed off to them, its role
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
        if others_wait && guard.can_be_handed_off() {
            guard.rest(self);
        }
    }

    /// From now on no waiter is the head; `false` where it was taken away before.
    pub(crate) fn leave_head(&self) -> bool {
        let mut queues = self.waiters.queues.lock();
        let Some(queue) = self.queue(&mut queues) else {
            return false;
        };
        queue.waiters.head_rests();
        queue.evidence.is_held_here();
        true
    }

    /// The next in line, out of it, if it takes over what is offered. Where the store has a queue it is the next in that.
    pub(crate) fn successor(&mut self, fits: impl FnOnce(&HandoffTerms) -> bool) -> Option<Arc<Waiter>> {
        let mut behind = std::mem::take(&mut self.behind);
        let mut queues = self.waiters.queues.lock();
        let waiters = &mut self.queue(&mut queues)?.waiters;
        let takes =
            |waiter: &Arc<Waiter>| !waiter.is_overdue() && waiter.handoff_terms.as_ref().is_some_and(fits);
        let successor = match self.of.kind.waits_in_store() {
            true => waiters.offer_in_store_order(&mut behind, takes),
            false => waiters.offer_to_next(takes),
        };
        drop(queues);
        self.behind = behind;
        successor
    }

    /// Puts one back in line who was to take over and could not.
    pub(crate) fn put_back(&self, waiter: Arc<Waiter>) {
        if let Some(queue) = self.queue(&mut self.waiters.queues.lock()) {
            queue.waiters.put_back(waiter);
        }
    }
}

impl Drop for QueueHead {
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
                queue.evidence.head_ends(Moment::now(), released);
            }
        }
        // Before the rest: ending a subscription calls into the store, and a role that no waiter takes
        // comes back here to go on to the one after.
        drop(queues);
        if let Some(next) = next {
            let deed = next.on_head.lock().take();
            if let Some(deed) = deed.filter(|_| !self.quietly && !next.is_overdue()) {
                deed();
            }
            if broken!(SubscriptionDroppedWithHead) {
                watch.iter_mut().for_each(Watch::end);
            }
            let mut head = Some(QueueHead {
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
            next.tell(|delivery| delivery.head = head.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A head that was handed the lock: it has a whole poll deadline from when it was woken.
    #[test]
    fn waiter_that_was_woken_just_now_is_not_overdue() {
        let waiters: Arc<Waiters> = Arc::default();
        let (kind, key) = (Kind::Mutex, LockKey::raw("k"));
        let head = waiters.join(kind, &key, JoinAt::End(None), None, Location::caller());
        let offered = waiters.offer_to_head(kind, &key).expect("the one in front");
        offered.rouse();
        assert_eq!(waiters.overdue().0.len(), 0);
        assert_eq!(waiters.overdue().0.len(), 1);
        drop(head);
    }
}
