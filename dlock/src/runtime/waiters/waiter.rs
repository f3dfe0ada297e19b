//! One waiter: what it receives, and whether it is polled.

use std::ops::Deref;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::Wake;

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::task;

use super::Waiters;
use super::entry::Abandon;
use super::head::QueueHead;
use super::preceding::PrecedingRelease;
use crate::base::broken;
use crate::base::lock_id::LockId;
use crate::base::moment::Moment;
use crate::base::reused::{self, Reused, Spares};
use crate::base::waking::waking;
use crate::engine::handoff::HandoffTerms;
use crate::engine::wait_queue::QueuedWaiter;
use crate::runtime::group::Group;
use crate::runtime::hold::Hold;

/// The position number of a waiter without a position in the store's queue.
const NOWHERE: u64 = u64::MAX;

/// Attention of a waiter: polled since it was last woken, woken, woken some time ago. In this order.
pub(super) const POLLED: u8 = 0;
const WOKEN: u8 = 1;
pub(super) const LATE: u8 = 2;

/// The call that waits: what a grant that is handed off to it tells of its holder.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller {
    pub(crate) by: &'static Location<'static>,
    /// The task that waits.
    pub(crate) task: Option<task::Id>,
    pub(crate) group: Group,
}

impl Caller {
    /// The call of the current task.
    pub(crate) fn new(by: &'static Location<'static>, group: Group) -> Caller {
        let task = task::try_id();
        Caller { by, task, group }
    }
}

/// A task that waits for a lock in this process; without any, memory for the next.
pub(crate) struct Waiter(Option<Waiting>);

/// What it waits for, and what it receives.
pub(crate) struct Waiting {
    pub(super) waiters: Arc<Waiters>,
    /// What it waits for.
    pub(super) of: LockId,
    pub(super) limit: Option<usize>,
    /// When it joined for the first time, as a number.
    pub(super) arrival: u64,
    /// The grants that it accepts from other holders in this process.
    pub(crate) handoff_terms: Option<HandoffTerms>,
    pub(crate) caller: Caller,
    /// The number of its position in the store's queue, if it has one.
    position: AtomicU64,
    /// The latest time of its next poll; `None` if unlimited.
    polled_by: Mutex<Option<Moment>>,
    /// Whether it is queued behind the head, and whether it has left the queue. Under the mutex of the queues.
    pub(super) in_line: AtomicBool,
    pub(super) left: AtomicBool,
    delivery: Mutex<Delivery>,
    /// Whether anything was delivered, which is asked without the mutex.
    has_delivery: AtomicBool,
    /// Whether it was polled since it was woken.
    pub(super) attention: AtomicU8,
    pub(super) waker: AtomicWaker,
}

/// See [`QueueEntry::on_head`].
pub(super) type OnHead = Box<dyn FnOnce() + Send>;

/// What a waiter receives, and what is done for it.
#[derive(Default)]
pub(super) struct Delivery {
    pub(super) head: Option<Reused<QueueHead>>,
    pub(super) guard: Option<Hold>,
    /// As the head, it was told of this release.
    pub(super) released: Option<Box<PrecedingRelease>>,
    pub(super) turned_away: bool,
    /// It missed its poll deadline, and lost what it had.
    pub(super) withdrawn: bool,
    /// It has left, or lost what it had.
    pub(super) closed: bool,
    /// Run for it the moment it becomes the head, before it is polled.
    pub(super) on_head: Option<OnHead>,
    /// Its request to the store, which may be over.
    pub(super) in_flight: Option<Arc<dyn Abandon>>,
}

impl Delivery {
    fn is_there(&self) -> bool {
        self.head.is_some()
            || self.guard.is_some()
            || self.released.is_some()
            || self.turned_away
            || self.withdrawn
    }
}

impl Waiter {
    /// Creates a waiter; `head` is its role if it is the first of its queue.
    pub(super) fn new(
        waiters: &Arc<Waiters>,
        of: LockId,
        (limit, arrival): (Option<usize>, u64),
        handoff_terms: Option<HandoffTerms>,
        caller: Caller,
        head: Option<Reused<QueueHead>>,
    ) -> Arc<Waiter> {
        let waiting = Waiting {
            waiters: waiters.clone(),
            of,
            limit,
            arrival,
            handoff_terms,
            caller,
            position: AtomicU64::new(NOWHERE),
            polled_by: Mutex::default(),
            in_line: AtomicBool::new(false),
            left: AtomicBool::new(false),
            has_delivery: AtomicBool::new(head.is_some()),
            delivery: Mutex::new(Delivery {
                head,
                ..Delivery::default()
            }),
            attention: AtomicU8::new(POLLED),
            waker: AtomicWaker::new(),
        };
        let mut memory = reused::take(&SPARES).unwrap_or_else(|| Arc::new(Waiter(None)));
        match Arc::get_mut(&mut memory) {
            Some(spare) => spare.0 = Some(waiting),
            None => memory = Arc::new(Waiter(Some(waiting))),
        }
        memory
    }

    /// Ends a waiter that has left, if nothing else refers to it; its memory is used again. The caller drops its reference then.
    pub(super) fn end(waiter: &mut Arc<Waiter>) {
        if let Some(ended) = Arc::get_mut(waiter) {
            ended.0 = None;
            reused::give(&SPARES, waiter.clone());
        }
    }

    /// Reads or changes what is delivered, under its mutex.
    pub(super) fn with_delivery<T>(&self, with: impl FnOnce(&mut Delivery) -> T) -> T {
        let mut delivery = self.delivery.lock();
        let outcome = with(&mut delivery);
        self.has_delivery.store(delivery.is_there(), Ordering::Release);
        outcome
    }

    /// Whether anything was delivered. The thread that changes it wakes the waiter afterwards.
    pub(super) fn has_delivery(&self) -> bool {
        self.has_delivery.load(Ordering::Acquire)
    }

    /// Its position in the store's queue.
    pub(super) fn set_position(&self, number: u64) {
        self.position.store(number, Ordering::Relaxed);
    }

    pub(super) fn set_polled_by(&self, at: Option<Moment>) {
        *self.polled_by.lock() = at;
    }

    /// Whether the lock can be given to it: it is present, and has not been given the lock already.
    pub(super) fn takes_a_guard(&self) -> bool {
        let delivery = self.delivery.lock();
        !delivery.closed && delivery.guard.is_none()
    }

    pub(super) fn tell(&self, tell: impl FnOnce(&mut Delivery)) -> bool {
        let is_told = self.with_delivery(|delivery| {
            let is_there = !delivery.closed;
            if is_there {
                tell(delivery);
            }
            is_there
        });
        if is_told {
            self.rouse();
        }
        is_told
    }

    /// Whether it was woken and has not been polled since. From now on it counts as late.
    pub(super) fn is_late(&self) -> bool {
        let (order, relaxed) = (Ordering::AcqRel, Ordering::Relaxed);
        let before = self.attention.compare_exchange(WOKEN, LATE, order, relaxed);
        before.unwrap_or_else(|before| before) != POLLED
    }

    /// Wakes it, behind what it is to find.
    pub(crate) fn rouse(&self) {
        // A waiter that was woken before and not polled since stays late. It is written in any case, so that the next poll sees
        // what came before.
        self.attention.fetch_max(WOKEN, Ordering::SeqCst);
        self.waiters.alarm.arm();
        waking(|| self.waker.wake());
    }

    /// Hands off the lock; returns it if the waiter has left, or has not yet taken one that was handed off before. That
    /// one is lost, or will be, but must not be dropped here under a mutex: its drop passes it on, and comes back here.
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

thread_local! {
    static SPARES: Spares<Arc<Waiter>> = const { Spares::new() };
}

impl Deref for Waiter {
    type Target = Waiting;

    fn deref(&self) -> &Waiting {
        self.0.as_ref().expect("it is there until nothing refers to it")
    }
}

impl QueuedWaiter for Arc<Waiter> {
    fn is(&self, other: &Arc<Waiter>) -> bool {
        Arc::ptr_eq(self, other)
    }

    fn limit(&self) -> Option<usize> {
        self.limit
    }

    fn arrival(&self) -> u64 {
        self.arrival
    }

    fn position(&self) -> Option<u64> {
        let position = self.position.load(Ordering::Relaxed);
        (position != NOWHERE).then_some(position)
    }

    fn set_in_line(&self, in_line: bool) {
        self.in_line.store(in_line, Ordering::Relaxed);
    }

    fn has_left(&self) -> bool {
        self.left.load(Ordering::Relaxed)
    }

    fn is_overdue(&self) -> bool {
        let is_overdue = self.polled_by.lock().is_some_and(|by| Moment::now() > by);
        is_overdue && !broken!(HandoffToUnpolledWaiter)
    }
}

/// The waker that a waiter polls with; it records that the waiter was woken.
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
            .field("by", &self.caller.by)
            .finish_non_exhaustive()
    }
}
