//! The entry of one waiter in the queue of a key, as the waiter sees it.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use super::head::QueueHead;
use super::preceding::PrecedingRelease;
use super::too_many;
use super::waiter::{OnHead, POLLED, Waiter, Waiting};
use crate::Error;
use crate::base::lock_id::LockId;
use crate::base::moment::Moment;
use crate::base::reused::Reused;
use crate::engine::evidence::Evidence;
use crate::runtime::hold::Hold;
use crate::runtime::release::RunToCompletion;
use crate::store::GrantId;

/// A request in flight for a waiter, which is given up if the waiter is not polled.
pub(crate) trait Abandon: Send + Sync {
    /// Gives it up: a grant that it obtains is released.
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

/// A request in flight for a waiter. Never completes if it was given up, which the [`QueueEntry`] reports.
pub(crate) struct Shared<T: Send + 'static> {
    slot: Arc<Slot<T>>,
    is_over: bool,
}

impl<T: Send + 'static> Future for Shared<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let mut slot = self.slot.lock();
        let Some(request) = &mut *slot else {
            return Poll::Pending;
        };
        let outcome = std::task::ready!(Pin::new(request).poll(cx));
        let request = slot.take();
        drop(slot);
        drop(request);
        self.is_over = true;
        Poll::Ready(outcome)
    }
}

impl<T: Send + 'static> Drop for Shared<T> {
    fn drop(&mut self) {
        if !self.is_over {
            self.slot.abandon();
        }
    }
}

/// The entry of a waiter in the queue of a key.
#[derive(Debug)]
pub(crate) struct QueueEntry {
    waiter: Arc<Waiter>,
    /// Whether other waiters were there before it.
    has_waited: bool,
}

/// What is delivered to a waiter.
pub(crate) enum Delivered {
    /// The role of the queue head.
    Head(Reused<QueueHead>),
    /// The lock, from another caller of this process. A waiter that was the head puts its role into the grant.
    Guard(Hold),
    /// It missed its poll deadline, and has lost what it had.
    Withdrawn,
}

impl QueueEntry {
    pub(super) fn new(waiter: Arc<Waiter>, has_waited: bool) -> QueueEntry {
        QueueEntry { waiter, has_waited }
    }

    /// Returns the lock that it waits for.
    pub(crate) fn lock_id(&self) -> &LockId {
        &self.waiter.of
    }

    /// Polls a future for this waiter; everything that the waiter awaits must be inside. Cancel safe.
    pub(crate) async fn attended<F: Future>(&self, mut future: Pin<&mut F>) -> F::Output {
        let waker = Waker::from(self.waiter.clone());
        std::future::poll_fn(|cx| {
            // A swap, not a store: the poll finds what a thread delivered that woke the waiter before the swap, and a thread
            // that wakes the waiter after it has the waiter polled again.
            self.waiter.attention.swap(POLLED, Ordering::AcqRel);
            let poll = future.as_mut().poll(&mut Context::from_waker(&waker));
            if poll.is_pending() {
                self.waiter.waker.register(cx.waker());
                // Woken before the waker was registered.
                if self.waiter.attention.load(Ordering::Acquire) != POLLED {
                    cx.waker().wake_by_ref();
                }
            }
            poll
        })
        .await
    }

    /// Waits to become the head or for the lock, whichever comes first; within [`attended`](Self::attended). Cancel
    /// safe.
    pub(crate) async fn delivered(&self) -> Result<Delivered, Error> {
        std::future::poll_fn(|_| self.poll().map_or(Poll::Pending, Poll::Ready)).await
    }

    /// Waits until this process releases the lock to the store. Cancel safe.
    pub(crate) async fn released(&self) -> Box<PrecedingRelease> {
        std::future::poll_fn(|_| self.released_before().map_or(Poll::Pending, Poll::Ready)).await
    }

    /// Returns the release that [`released`](Self::released) would return now.
    pub(crate) fn released_before(&self) -> Option<Box<PrecedingRelease>> {
        let waiter = &self.waiter;
        waiter
            .has_delivery()
            .then(|| waiter.with_delivery(|delivery| delivery.released.take()))
            .flatten()
    }

    /// Returns a delivery that is already there.
    pub(crate) fn delivered_before(&self) -> Result<Option<Delivered>, Error> {
        self.poll().transpose()
    }

    /// Awaits a request to the store, which is given up if this waiter is not polled.
    pub(crate) fn shares<T: Send + 'static>(&self, request: RunToCompletion<T>) -> Shared<T> {
        let slot = Arc::new(Mutex::new(Some(request)));
        self.asks(slot.clone());
        Shared { slot, is_over: false }
    }

    /// Sets the request to give up if this waiter is not polled.
    pub(crate) fn asks(&self, request: Arc<dyn Abandon>) {
        let before = self
            .waiter
            .with_delivery(|delivery| delivery.in_flight.replace(request));
        drop(before);
    }

    fn poll(&self) -> Option<Result<Delivered, Error>> {
        if !self.waiter.has_delivery() {
            return None;
        }
        let waiter = &self.waiter;
        let (delivered, head) = waiter.with_delivery(|delivery| {
            if delivery.withdrawn {
                return (Some(Ok(Delivered::Withdrawn)), None);
            }
            let head = delivery.head.take();
            if let Some(guard) = delivery.guard.take() {
                return (Some(Ok(Delivered::Guard(guard))), head);
            }
            if let Some(head) = head {
                return (Some(Ok(Delivered::Head(head))), None);
            }
            let turned_away = || Err(too_many(&waiter.of.key, waiter.limit.unwrap_or_default()));
            (delivery.turned_away.then(turned_away), None)
        });
        if let (Some(Ok(Delivered::Guard(guard))), Some(head)) = (&delivered, head) {
            guard.rest(head);
        }
        delivered
    }

    /// When it joined for the first time, as a number.
    pub(crate) fn arrival(&self) -> u64 {
        self.waiter.arrival
    }

    /// Sets its position in the store's queue.
    pub(crate) fn stands_at(&self, position: GrantId) {
        self.waiter.set_position(position.number());
    }

    /// Sets the time of the next poll. After it, nothing is requested for this waiter when it becomes the head, and the
    /// lock is not handed off to it, until this is called again: it would not take what it gets.
    pub(crate) fn polled_by(&self, at: Option<Moment>) {
        self.waiter.set_polled_by(at);
    }

    /// Returns the role of the head, if it has it already.
    pub(crate) fn head(&self) -> Option<Reused<QueueHead>> {
        self.waiter.with_delivery(|delivery| delivery.head.take())
    }

    /// Sets a function to run the moment this becomes the head, before it is polled; `None` unsets it.
    pub(crate) fn on_head(&self, deed: Option<OnHead>) {
        let before = self
            .waiter
            .with_delivery(|delivery| std::mem::replace(&mut delivery.on_head, deed));
        // Not under the mutex: a dropped value may end a store operation.
        drop(before);
    }

    /// Whether other waiters were there before it.
    pub(crate) fn has_waited(&self) -> bool {
        self.has_waited
    }

    /// Returns the store's replies to the head of the queue.
    pub(crate) fn evidence(&self) -> Evidence {
        let Waiting { waiters, of, .. } = &**self.waiter;
        let queues = waiters.queues.lock();
        queues
            .get(of)
            .map_or_else(Evidence::default, |queue| queue.evidence.clone())
    }
}

impl Drop for QueueEntry {
    fn drop(&mut self) {
        let waiter = &*self.waiter;
        // The first of a queue never stands behind others.
        if self.has_waited {
            let mut queues = waiter.waiters.queues.lock();
            if waiter.in_line.load(Ordering::Relaxed) {
                waiter.left.store(true, Ordering::Relaxed);
                if let Some(queue) = queues.get_mut(&waiter.of) {
                    queue.waiters.leaves();
                }
            }
        }
        let (done_for_it, undelivered) = waiter.with_delivery(|delivery| {
            delivery.closed = true;
            let done_for_it = (delivery.on_head.take(), delivery.in_flight.take());
            (done_for_it, (delivery.guard.take(), delivery.head.take()))
        });
        drop(done_for_it);
        // The waiter may be removed from the queue only later, and then under the mutex of the queues.
        drop(waiter.waker.take());
        // Not under a mutex: what was delivered and not taken passes on, which wakes the next waiter.
        drop(undelivered);
        Waiter::end(&mut self.waiter);
    }
}
