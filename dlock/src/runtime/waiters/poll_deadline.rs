//! Takes away what waiters have that miss their poll deadline, so that they do not block others.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;
use tokio::time::Instant;

use super::waiter::{LATE, POLLED, Waiter};
use super::{AllWaiters, Waiters};
use crate::base::broken;
use crate::base::lock_id::LockId;
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
    loop {
        all.alarm.rings.notified().await;
        loop {
            tokio::time::sleep(POLL_DEADLINE).await;
            // Later wake-ups set the alarm again.
            all.alarm.armed.store(false, Ordering::SeqCst);
            let (mut late, mut some_woken) = (Vec::new(), false);
            for waiters in all.parts() {
                let (overdue, woken) = waiters.overdue();
                late.extend(overdue);
                some_woken |= woken;
            }
            let mut next_check = Instant::now() + POLL_DEADLINE;
            while !late.is_empty() {
                let queues: Vec<_> = late.iter().map(|(of, _)| of.clone()).collect();
                for (of, waiter) in late {
                    let withdraws = AssertUnwindSafe(|| all.of(&of).withdraw(&of, &waiter));
                    if std::panic::catch_unwind(withdraws).is_err() {
                        Event::StorePanicked { key: Some(&of.key) }.emit();
                    }
                }
                for of in &queues {
                    all.of(of).mark_woken(of);
                }
                tokio::time::sleep(HURRIED_POLL_DEADLINE).await;
                let late_in = |of| all.of(of).late_in(of);
                late = queues.iter().filter_map(late_in).collect();
                // The queues of all others are checked in between.
                if Instant::now() >= next_check {
                    next_check = Instant::now() + POLL_DEADLINE;
                    all.alarm.armed.store(false, Ordering::SeqCst);
                    for waiters in all.parts() {
                        let (overdue, woken) = waiters.overdue();
                        late.extend(overdue.into_iter().filter(|(of, _)| !queues.contains(of)));
                        some_woken |= woken;
                    }
                }
            }
            if !some_woken {
                break;
            }
        }
    }
}

impl Waiters {
    /// Returns the waiters that were woken, have not been polled since, and were already late at the last check. And
    /// whether others were woken, which count as late from now on.
    pub(super) fn overdue(&self) -> (Vec<(LockId, Arc<Waiter>)>, bool) {
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
    fn late_in(&self, of: &LockId) -> Option<(LockId, Arc<Waiter>)> {
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
