//! The waiters of this process, in arrival order; [`engine::wait_queue`](crate::engine::wait_queue) decides the order.
//!
//! Of all waiters for a key only the first talks to the store. It is the *queue head*, and has the subscription to the
//! key's releases. When it has the lock or leaves, its role passes on: to the next waiter, which asks the store at
//! once, so that a notification that the previous head consumed is not lost; or into the grant, if others wait, so that
//! they sleep until the lock is handed off to them or goes back to the store (see
//! [`handoff`](crate::runtime::handoff)).
//!
//! **A woken waiter must be polled.** A woken waiter that is not polled within its poll deadline loses what it has: the
//! role of the head, a lock that was handed off to it, the reply to its request. Otherwise a future that is kept and
//! not polled would block all others. When it is polled again it continues to wait, ahead of later waiters. A task of
//! the client checks now and then, so a handoff costs no timer; see [`attend`].
//!
//! Each waiter for a fair lock asks the store itself (see [`acquire::fair`](crate::runtime::acquire)). Here the queue
//! head is the waiter that listens, and that asks the moment a release of this process is queued. While its role is
//! kept in a grant, it knows which waiters are next in the store's queue.

mod all;
mod entry;
mod head;
mod poll_deadline;
mod preceding;
mod subscribed;
mod waiter;

use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

pub(crate) use self::all::AllWaiters;
pub(crate) use self::entry::{Abandon, Delivered, QueueEntry};
pub(crate) use self::head::QueueHead;
use self::poll_deadline::Alarm;
pub(crate) use self::poll_deadline::attend;
pub(crate) use self::preceding::PrecedingRelease;
pub(crate) use self::subscribed::KeptSubscription;
use self::subscribed::{Counted, EndedSubscriptions};
pub(crate) use self::waiter::{Caller, Waiter};
use crate::base::lock_id::{ByLockId, LockId};
use crate::base::moment::Moment;
use crate::engine::evidence::Evidence;
use crate::engine::handoff::HandoffTerms;
use crate::engine::wait_queue::{InsertAt, TooMany, WaitQueue};

use crate::{Error, LockKey};

/// The queues of some keys of a client, one for each key that has waiters. In cache lines of their own: each acquire counts
/// references to them.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Waiters {
    queues: Mutex<ByLockId<Queue>>,
    /// The number of the last waiter; changed under the mutex of the queues.
    last: AtomicU64,
    /// Those of the queues that have ended.
    subscribed: Mutex<EndedSubscriptions>,
    /// Held while a waiter joins a queue here and the store's, so that both have one order.
    pub(crate) store_order: Mutex<()>,
    alarm: Arc<Alarm>,
}

/// Where a waiting call joins the queue.
#[derive(Debug, Clone, Copy)]
pub(crate) enum JoinAt {
    /// Behind all waiters, unless there are this many already.
    End(Option<usize>),
    /// In front of the waiters that arrived later: it has waited before, since this [arrival](QueueEntry::arrival).
    Again(u64),
}

/// The queue of a key. It exists for as long as its head does, or the head's role.
#[derive(Debug)]
struct Queue {
    waiters: WaitQueue<Arc<Waiter>>,
    /// Since when its head, or the role of it, is subscribed.
    listens: Option<Moment>,
    /// The store's replies to the head.
    evidence: Evidence,
}

impl Waiters {
    fn new(alarm: Arc<Alarm>) -> Waiters {
        Waiters {
            alarm,
            ..Waiters::default()
        }
    }

    /// Returns a number greater than those of all waiters and heads here; called under the mutex of the queues.
    fn next_number(&self) -> u64 {
        let last = self.last.load(Ordering::Relaxed);
        self.last.store(last + 1, Ordering::Relaxed);
        last + 1
    }

    /// Returns a number that is greater than those of all waiters that have joined, and not than those that join later.
    pub(crate) fn number_after_all(&self) -> u64 {
        let _queues = self.queues.lock();
        self.last.load(Ordering::Relaxed) + 1
    }

    /// Joins the queue of a lock.
    ///
    /// With [`JoinAt::End`], the number of waiting callers is limited. A head that does not yet have to wait does not
    /// count; once it has to, and there are too many by then, the last to come are refused.
    pub(crate) fn join(
        self: &Arc<Self>,
        of: LockId,
        at: JoinAt,
        handoff_terms: Option<HandoffTerms>,
        caller: Caller,
    ) -> Result<QueueEntry, Error> {
        let (at, limit, arrived) = match at {
            JoinAt::End(limit) => (InsertAt::End, limit, None),
            JoinAt::Again(arrival) => (InsertAt::Again, None, Some(arrival)),
        };
        // The numbers of the waiters are drawn under it, in their order.
        let mut queues = self.queues.lock();
        let number = self.next_number();
        let arrival = arrived.unwrap_or(number);
        let (waiter, has_waited) = match queues.entry(of.clone()) {
            Entry::Vacant(vacant) => {
                let head = self.new_head(of.clone(), number, false);
                let waiter = Waiter::new(self, of, (limit, arrival), handoff_terms, caller, Some(head));
                vacant.insert(Queue {
                    waiters: WaitQueue::new(waiter.clone(), number),
                    listens: None,
                    evidence: Evidence::default(),
                });
                (waiter, false)
            }
            Entry::Occupied(mut occupied) => {
                let waiter = Waiter::new(self, of, (limit, arrival), handoff_terms, caller, None);
                let joined = occupied.get_mut().waiters.join(&waiter, at);
                joined.map_err(|TooMany { limit }| too_many(&waiter.of.key, limit))?;
                (waiter, true)
            }
        };
        drop(queues);
        Ok(QueueEntry::new(waiter, has_waited))
    }

    /// How many waiters of a key are behind its head.
    pub(crate) fn behind(&self, of: &LockId) -> usize {
        let queues = self.queues.lock();
        queues.get(of).map_or(0, |queue| queue.waiters.waiting())
    }

    /// Whether a key has a queue head.
    pub(crate) fn has_head(&self, of: &LockId) -> bool {
        let queues = self.queues.lock();
        queues.get(of).is_some_and(|queue| queue.waiters.has_head())
    }

    /// Tells the queue head of a key, if there is one, that this process releases the lock to the store.
    pub(crate) fn tell_head(&self, of: &LockId, released: Box<PrecedingRelease>) {
        let queues = self.queues.lock();
        let Some(head) = queues.get(of).and_then(|queue| queue.waiters.head().cloned()) else {
            return;
        };
        // Under the mutex of the queues: the head that leaves passes it on.
        let before = head.with_delivery(|delivery| delivery.released.replace(released));
        // Not under it: this wakes the head.
        drop(queues);
        drop(before);
        head.rouse();
    }

    fn rouse_all(&self) {
        let queues = self.queues.lock();
        let all: Vec<_> = queues
            .values()
            .flat_map(|queue| queue.waiters.all().cloned())
            .collect();
        // Not under it: this wakes them.
        drop(queues);
        for waiter in all {
            waiter.rouse();
        }
    }

    /// Whether a key has waiters.
    pub(crate) fn any(&self, of: &LockId) -> bool {
        self.queues.lock().contains_key(of)
    }

    /// Whether the other side of a read-write lock has waiters, which share the channel.
    pub(crate) fn any_on_other_side(&self, of: &LockId) -> bool {
        of.other_side().is_some_and(|other| self.any(&other))
    }

    /// Whether the store may count a subscription of this process beside that of the queue head, for a release that is sent now.
    pub(crate) fn take_ended(&self, of: &LockId) -> bool {
        self.take_own_receivers(of, Moment::now()) > 0
    }

    /// Returns how many of the receivers of a release that was sent at that moment are this process, if no caller waits for
    /// this side of the lock any more.
    pub(crate) fn take_own_receivers(&self, of: &LockId, sent: Moment) -> u64 {
        let other = of.other_side();
        let listens = |other: &LockId| self.queues.lock().get(other).and_then(|queue| queue.listens);
        let listens = other.as_ref().and_then(listens);
        let listens = listens.is_some_and(|since| since <= sent);
        let mut subscribed = self.subscribed.lock();
        let here = subscribed.take(of, of.kind, sent);
        let there = other.and_then(|other| subscribed.take(&other, of.kind, sent));
        let [mut watches, mut process] = [u64::from(listens), 0];
        for counted in [here, there].into_iter().flatten() {
            match counted {
                Counted::Watches(more) => watches += more,
                Counted::Process => process = 1,
            }
        }
        match process {
            0 => watches,
            _ => 1,
        }
    }

    fn len(&self) -> usize {
        let waited_for = |queue: &&Queue| queue.waiters.is_waited_in();
        self.queues.lock().values().filter(waited_for).count()
    }

    /// Returns the queue head of a key, if the lock can be given to it.
    pub(crate) fn offer_to_head(&self, of: &LockId) -> Option<Arc<Waiter>> {
        let mut queues = self.queues.lock();
        let queue = queues.get_mut(of)?;
        queue.waiters.offer_to_head(|waiter| waiter.takes_a_guard())
    }
}

fn too_many(key: &LockKey, limit: usize) -> Error {
    Error::TooManyWaiters {
        key: key.clone(),
        limit,
    }
}

#[cfg(test)]
mod tests {
    use std::panic::Location;

    use super::*;
    use crate::runtime::group::Group;
    use crate::store::Kind;

    /// A head that was handed the lock: it has a whole poll deadline from when it was woken.
    #[test]
    fn waiter_that_was_woken_just_now_is_not_overdue() {
        let waiters: Arc<Waiters> = Arc::default();
        let (kind, key) = (Kind::Mutex, LockKey::raw("k"));
        let caller = Caller::new(Location::caller(), Group::NONE);
        let of = LockId::new(kind, &key);
        let head = waiters.join(of.clone(), JoinAt::End(None), None, caller);
        let offered = waiters.offer_to_head(&of).expect("the head");
        offered.rouse();
        assert_eq!(waiters.overdue().0.len(), 0);
        assert_eq!(waiters.overdue().0.len(), 1);
        drop(head);
    }
}
