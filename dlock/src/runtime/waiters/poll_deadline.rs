//! Takes away what waiters have that miss their poll deadline, so that they do not block others.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::waiter::{LATE, POLLED, Waiter};
use super::{AllWaiters, Waiters};
use crate::base::broken;
use crate::base::lock_id::{ByLockId, LockId};
use crate::engine::timing::{HURRIED_POLL_DEADLINE, POLL_DEADLINE};
use crate::runtime::emit::Event;

/// Tells the task that checks poll deadlines that a waiter was woken.
#[derive(Debug, Default)]
pub(super) struct Alarm {
    armed: AtomicBool,
    rings: Notify,
}

impl Alarm {
    /// After the waiter was marked as woken. Ordered with that, and with the check that follows when it is reset: either that
    /// sees the waiter, or this the reset.
    pub(super) fn arm(&self) {
        if !self.armed.load(Ordering::SeqCst) && !self.armed.swap(true, Ordering::AcqRel) {
            self.rings.notify_one();
        }
    }
}

/// Checks the waiters of a client, for as long as the client lives: takes away what unpolled waiters have.
pub(crate) async fn attend(all: Arc<AllWaiters>) {
    // Also across wake-ups: a waiter that was woken just after a check is late at the next one.
    let mut next_check = Instant::now();
    loop {
        all.alarm.rings.notified().await;
        if next_check <= Instant::now() {
            next_check = Instant::now() + POLL_DEADLINE;
        }
        // The queues of waiters that were not polled, whose next ones are in a hurry.
        let (mut queues, mut hurried_check) = (ByLockId::default(), next_check);
        let mut some_woken = true;
        while some_woken || !queues.is_empty() {
            let check = match queues.is_empty() {
                true => next_check,
                false => next_check.min(hurried_check),
            };
            sleep_until(check).await;
            let checked = match check == hurried_check {
                true => std::mem::take(&mut queues),
                false => ByLockId::default(),
            };
            let late_in = |of: &LockId| all.of(of).late_in(of);
            let mut late: Vec<Late> = checked.keys().filter_map(late_in).collect();
            if check == next_check {
                next_check = Instant::now() + POLL_DEADLINE;
                let (overdue, woken) = all.overdue();
                let is_new = |(of, _): &Late| !queues.contains_key(of) && !checked.contains_key(of);
                late.extend(overdue.into_iter().filter(is_new));
                some_woken = woken;
            }
            if late.is_empty() {
                continue;
            }
            hurried_check = Instant::now() + HURRIED_POLL_DEADLINE;
            for (of, waiter) in &late {
                let withdraws = AssertUnwindSafe(|| all.of(of).withdraw(of, waiter));
                if std::panic::catch_unwind(withdraws).is_err() {
                    Event::StorePanicked { key: Some(&of.key) }.emit();
                }
            }
            for (of, _) in late {
                all.of(&of).mark_woken(&of);
                queues.insert(of, ());
            }
        }
    }
}

/// A waiter that missed its poll deadline, and what it waits for.
type Late = (LockId, Arc<Waiter>);

impl AllWaiters {
    /// Returns the waiters of all queues that are [overdue](Waiters::overdue), and whether others were woken. Later wake-ups
    /// set the alarm again.
    fn overdue(&self) -> (Vec<Late>, bool) {
        self.alarm.armed.store(false, Ordering::SeqCst);
        let (mut all, mut some_woken) = (Vec::new(), false);
        for waiters in self.parts() {
            let (overdue, woken) = waiters.overdue();
            all.extend(overdue);
            some_woken |= woken;
        }
        (all, some_woken)
    }
}

impl Waiters {
    /// Returns the waiters that were woken, have not been polled since, and were already late at the last check. And
    /// whether others were woken, which count as late from now on.
    pub(super) fn overdue(&self) -> (Vec<Late>, bool) {
        if broken!(UnpolledWaiterBlocks) {
            return (Vec::new(), false);
        }
        let (mut overdue, mut some_woken) = (Vec::new(), false);
        for (of, queue) in &*self.queues.lock() {
            for waiter in queue.waiters.served() {
                match waiter.attention.load(Ordering::SeqCst) {
                    POLLED => {}
                    LATE => overdue.push((of.clone(), waiter.clone())),
                    _ => some_woken |= waiter.is_late(),
                }
            }
        }
        (overdue, some_woken)
    }

    /// Marks the waiters of a queue as late that were woken and are not polled.
    fn mark_woken(&self, of: &LockId) {
        let queues = self.queues.lock();
        for waiter in queues
            .get(of)
            .into_iter()
            .flat_map(|queue| queue.waiters.served())
        {
            let _ = waiter.is_late();
        }
    }

    /// Returns the late head of a queue.
    fn late_in(&self, of: &LockId) -> Option<Late> {
        let queues = self.queues.lock();
        let is_late = |waiter: &&Arc<Waiter>| waiter.attention.load(Ordering::Acquire) == LATE;
        let waiter = queues.get(of)?.waiters.served().find(is_late)?;
        Some((of.clone(), waiter.clone()))
    }

    /// Takes away what an unpolled waiter has. Wakes it, so that it continues to wait if it is polled after all.
    fn withdraw(self: &Arc<Self>, of: &LockId, waiter: &Arc<Waiter>) {
        let taken = waiter.with_delivery(|delivery| {
            if waiter.attention.load(Ordering::Acquire) != LATE {
                return None;
            }
            let (guard, mut head) = (delivery.guard.take(), delivery.head.take());
            head.iter_mut().for_each(|head| head.quietly = true);
            let is_there = !std::mem::replace(&mut delivery.closed, true);
            delivery.withdrawn = true;
            Some((guard, head, delivery.in_flight.take(), is_there))
        });
        let Some((guard, head, in_flight, is_there)) = taken else {
            return;
        };
        // Before the next waiter is the head: the release of what the request obtains must precede the next request.
        if let Some(in_flight) = in_flight {
            in_flight.abandon();
        }
        let mut queues = self.queues.lock();
        let mut stolen = None;
        if let Some(queue) = queues.get_mut(of)
            && queue
                .waiters
                .withdraw(waiter, head.is_some(), || self.next_number())
        {
            stolen = Some(self.new_head(of.clone(), queue.waiters.number(), true));
        }
        drop(queues);
        if is_there {
            Event::PollDeadlineMissed {
                key: &of.key,
                by: waiter.caller.by,
            }
            .emit();
        }
        drop((head, stolen));
        // Last, so that it can go to the current head.
        drop(guard);
        // It may be polled just now, and have looked before it was told.
        waiter.rouse();
    }
}
