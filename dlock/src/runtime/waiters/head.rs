//! The role of the queue head: it passes from waiter to waiter, or is kept in the grant while the lock is held here.

use std::sync::Arc;

use parking_lot::MutexGuard;

use super::preceding::PrecedingRelease;
use super::subscribed::EndingSubscription;
use super::waiter::Waiter;
use super::{Queue, Waiters, too_many};
use crate::Error;
use crate::base::broken;
use crate::base::lock_id::{ByLockId, LockId};
use crate::base::moment::Moment;
use crate::base::reused::{Boxes, Reused};
use crate::engine::evidence::Evidence;
use crate::engine::handoff::HandoffTerms;
use crate::engine::wait_queue::NextHead;
use crate::runtime::hold::Hold;
use crate::store::Watch;

/// The right to talk to the store for all waiters of the key in this process.
#[derive(Debug)]
pub(crate) struct QueueHead {
    /// `None` once its queue was told of its end.
    waiters: Option<Arc<Waiters>>,
    of: LockId,
    /// Valid while it equals that of the queue.
    number: u64,
    /// The subscription, once a request needed it.
    pub(crate) watch: Option<Watch>,
    /// The release before the next request, perhaps for others.
    pub(crate) released: Option<Box<PrecedingRelease>>,
    /// How many times the lock was handed off since it last came from the store.
    pub(crate) handed: u32,
    /// When a reader that waited here was last granted the lock, as a number: all readers that came before may read, too.
    pub(crate) opened: Option<u64>,
    /// The waiters of this process that are next in the store's queue, by the numbers of their positions; the last of
    /// them is next.
    pub(crate) behind: Vec<u64>,
    /// Whether it was taken from a waiter that was not polled: nothing is requested for the next waiter before it is
    /// polled.
    pub(super) quietly: bool,
}

impl Waiters {
    pub(super) fn new_head(self: &Arc<Self>, of: LockId, number: u64, quietly: bool) -> Reused<QueueHead> {
        Reused::new(
            &SPARES,
            QueueHead {
                waiters: Some(self.clone()),
                of,
                number,
                watch: None,
                released: None,
                handed: 0,
                opened: None,
                behind: Vec::new(),
                quietly,
            },
        )
    }
}

impl QueueHead {
    /// Returns the queue, if this is still its head.
    fn queue<'q>(&self, queues: &'q mut ByLockId<Queue>) -> Option<&'q mut Queue> {
        queues
            .get_mut(&self.of)
            .filter(|queue| queue.waiters.number() == self.number)
    }

    /// Reads or changes the queue, if this is still its head.
    fn with_queue<T>(&self, with: impl FnOnce(&mut Queue) -> T) -> Option<T> {
        self.queue(&mut self.waiters.as_ref()?.queues.lock()).map(with)
    }

    /// Records that the head has to wait and counts from now on: excess waiters behind it are refused. Fails if no
    /// caller may wait.
    pub(crate) fn waits(&self, limit: Option<usize>, evidence: &Evidence) -> Result<(), Error> {
        if limit == Some(0) {
            return Err(too_many(&self.of.key, 0));
        }
        let turned_away = self.with_queue(|queue| {
            queue.evidence = evidence.clone();
            queue.waiters.head_waits()
        });
        // This wakes them, which must not happen under the mutex.
        for waiter in turned_away.into_iter().flatten() {
            waiter.tell(|delivery| delivery.turned_away = true);
        }
        Ok(())
    }

    /// Shares the store's replies to the head with the waiters behind it.
    pub(crate) fn knows(&self, evidence: &Evidence) {
        self.with_queue(|queue| queue.evidence = evidence.clone());
    }

    /// Makes no waiter the head; returns false if the role was taken away before.
    pub(crate) fn leave_head(&self) -> bool {
        let left = self.with_queue(|queue| {
            queue.waiters.head_rests();
            queue.evidence.is_held_here();
        });
        left.is_some()
    }

    /// Takes the next waiter out of the queue, if it accepts what is offered. If the store has a queue, the next one in
    /// that.
    pub(crate) fn successor(&mut self, fits: impl FnOnce(&HandoffTerms) -> bool) -> Option<Arc<Waiter>> {
        let mut behind = std::mem::take(&mut self.behind);
        let takes = |waiter: &Arc<Waiter>| waiter.handoff_terms.as_ref().is_some_and(fits);
        let successor = self.with_queue(|queue| match self.of.kind.waits_in_store() {
            true => queue.waiters.offer_in_store_order(&mut behind, takes),
            false => queue.waiters.offer_to_next(takes),
        });
        self.behind = behind;
        successor.flatten()
    }

    /// Puts back a waiter that was to take over and could not.
    pub(crate) fn put_back(&self, waiter: Arc<Waiter>) {
        self.with_queue(|queue| queue.waiters.put_back(waiter));
    }

    /// Subscribes, unless it is subscribed.
    pub(crate) fn listen(&mut self, listen: impl FnOnce() -> Watch) {
        if self.watch.is_some() {
            return;
        }
        self.with_queue(|queue| queue.listens = Some(Moment::now()));
        self.watch = Some(listen());
    }

    /// Tells the queue of its end.
    fn end(
        &mut self,
        of_client: &Arc<Waiters>,
        mut queues: MutexGuard<'_, ByLockId<Queue>>,
    ) -> Option<EndingSubscription> {
        let (mut watch, mut released) = (self.watch.take(), self.released.take());
        let mut next = None;
        let mut ending = None;
        if let Some(queue) = self.queue(&mut queues) {
            let waiters = &mut queue.waiters;
            if broken!(WaiterForgottenWhenHeadCancelled) && waiters.has_head() && waiters.waiting() > 0 {
                waiters.head_rests();
                return None;
            }
            // Told, and not taken.
            let told = waiters
                .head()
                .and_then(|head| head.with_delivery(|delivery| delivery.released.take()));
            released = told.or(released);
            next = waiters.head_ends(self.quietly);
            if next.is_none() {
                let watch = watch.take();
                ending = watch.map(|watch| EndingSubscription::new(of_client, &self.of, watch));
                queues.remove(&self.of);
            } else {
                let sent = released.as_deref().and_then(PrecedingRelease::unanswered_since);
                queue.evidence.head_ends(Moment::now(), sent);
            }
        }
        // Before the rest: ending a subscription calls into the store, and a role that its waiter does not take comes
        // back here, to pass on to the next.
        drop(queues);
        if let Some(NextHead { waiter: next, sends }) = next {
            let deed = next.with_delivery(|delivery| delivery.on_head.take());
            if let Some(deed) = deed.filter(|_| sends) {
                deed();
            }
            if broken!(SubscriptionDroppedWithHead) {
                watch.iter_mut().for_each(Watch::end);
            }
            let mut head = Some(Reused::new(
                &SPARES,
                QueueHead {
                    waiters: Some(of_client.clone()),
                    of: self.of.clone(),
                    number: self.number,
                    watch,
                    released,
                    handed: self.handed,
                    opened: self.opened,
                    behind: Vec::new(),
                    quietly: false,
                },
            ));
            next.tell(|delivery| delivery.head = head.take());
        }
        ending
    }
}

impl Reused<QueueHead> {
    /// Called when the head has the lock: if others wait and it can be handed off to them, the grant keeps its role.
    pub(crate) fn rests(mut self, guard: &Hold) {
        let Some(waiters) = self.waiters.take() else {
            return;
        };
        let mut queues = waiters.queues.lock();
        if broken!(WaiterForgottenWhenHeadCancelled)
            && let Some(queue) = self.queue(&mut queues)
        {
            // It has the lock, so it is not cancelled.
            queue.waiters.head_rests();
        }
        let others_wait = self
            .queue(&mut queues)
            .is_some_and(|queue| queue.waiters.waiting() > 0);
        if !others_wait {
            drop(self.end(&waiters, queues));
            self.spare(&SPARES);
            return;
        }
        drop(queues);
        self.waiters = Some(waiters);
        if guard.can_be_handed_off() {
            guard.rest(self);
        }
    }

    /// Passes the role on to the next waiter, or ends the queue and returns its subscription.
    pub(crate) fn ends(mut self) -> Option<EndingSubscription> {
        let waiters = self.waiters.take()?;
        self.end(&waiters, waiters.queues.lock())
    }
}

thread_local! {
    static SPARES: Boxes<QueueHead> = const { Boxes::new() };
}

impl Drop for QueueHead {
    fn drop(&mut self) {
        if let Some(waiters) = self.waiters.take() {
            drop(self.end(&waiters, waiters.queues.lock()));
        }
    }
}
