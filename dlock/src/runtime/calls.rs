//! Calls of the store's methods. One that panics has failed with an unknown outcome, and one that stays without a reply
//! is reported; both go to the log, since a third-party store may do either.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::LockKey;
use crate::base::clock;
use crate::base::moment::Moment;
use crate::engine::unanswered::Unanswered;
use crate::runtime::client::Shared;
use crate::runtime::emit::Event;
use crate::runtime::emit::meter::Operation;
use crate::store::{
    self, AcquireAllReply, AcquireReply, AcquireRequest, GrantId, Kind, Reason, StoreError, StoreFuture,
    Watch,
};

impl Shared {
    /// Asks the store for a lock.
    pub(crate) fn call_acquire(&self, request: &AcquireRequest) -> StoreFuture<AcquireReply> {
        let store = self.store.clone();
        called(&request.key, || store.acquire(request.clone()))
    }

    /// Asks the store for several locks in one operation.
    pub(crate) fn call_acquire_all(
        &self,
        first: &LockKey,
        requests: Vec<AcquireRequest>,
    ) -> StoreFuture<AcquireAllReply> {
        let store = self.store.clone();
        called(first, || store.acquire_all(requests))
    }

    /// Subscribes to the releases of a key. If the store panics, there are no notifications, and the waiter polls.
    pub(crate) fn call_watch(&self, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        let store = self.store.clone();
        catch_unwind(AssertUnwindSafe(|| store.watch(kind, key, grant))).unwrap_or_else(|_| {
            Event::StorePanicked { key: Some(key) }.emit();
            Watch::polling(store::POLLED_EVERY)
        })
    }
}

/// Calls a method of the store. A panic may drop a guard, and a second panic there would end the process.
pub(crate) fn called<T: Send + 'static>(
    key: &LockKey,
    call: impl FnOnce() -> StoreFuture<T>,
) -> StoreFuture<T> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Box::pin(std::future::ready(Err(panicked(key)))))
}

/// The failure of an operation that panicked.
pub(crate) fn panicked(key: &LockKey) -> StoreError {
    Event::StorePanicked { key: Some(key) }.emit();
    StoreError::unknown("the step panicked")
}

/// An operation in flight, for a caller that knows its key.
pub(crate) struct StoreCall<T> {
    step: StoreFuture<T>,
    sent: Instant,
    /// Set once it was found without a reply: an immediate reply costs nothing here.
    noted: Option<Noted>,
}

impl<T> StoreCall<T> {
    pub(crate) fn new(step: StoreFuture<T>) -> StoreCall<T> {
        StoreCall {
            step,
            sent: clock::now(),
            noted: None,
        }
    }

    /// Polls the operation; not to be polled again after its reply.
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        shared: &Shared,
        key: &LockKey,
    ) -> Poll<Result<T, StoreError>> {
        match catch_unwind(AssertUnwindSafe(|| self.step.as_mut().poll(cx))) {
            Ok(Poll::Ready(reply)) => {
                shared.calls.ended(&reply);
                (shared.meter).request_ended(Operation::Acquire, &reply, self.sent);
                self.noted = None;
                Poll::Ready(reply)
            }
            Ok(Poll::Pending) => {
                self.noted.get_or_insert_with(|| Noted::new(&shared.calls, key));
                Poll::Pending
            }
            Err(_) => Poll::Ready(Err(panicked(key))),
        }
    }

    pub(crate) async fn reply(mut self, shared: &Shared, key: &LockKey) -> Result<T, StoreError> {
        std::future::poll_fn(|cx| self.poll(cx, shared, key)).await
    }
}

/// The calls of a client that have no reply yet.
#[derive(Debug)]
pub(crate) struct Calls {
    unanswered: Mutex<Unanswered<LockKey>>,
    begins: Notify,
    /// The moment of the last reply, in nanoseconds; zero before the first.
    replied: AtomicU64,
}

impl Calls {
    pub(crate) fn new(told_after: Duration) -> Calls {
        Calls {
            unanswered: Mutex::new(Unanswered::new(told_after)),
            begins: Notify::new(),
            replied: AtomicU64::new(0),
        }
    }

    /// Records the end of an operation.
    pub(crate) fn ended<T>(&self, outcome: &Result<T, StoreError>) {
        let is_reply = match outcome {
            Ok(_) => true,
            Err(error) => !matches!(error.reason, Reason::Unreachable | Reason::Closed),
        };
        if is_reply {
            self.replied.store(Moment::now().as_nanos(), Ordering::Relaxed);
        }
    }

    /// Time since the last reply of the store.
    pub(crate) fn since_reply(&self) -> Option<Duration> {
        match self.replied.load(Ordering::Relaxed) {
            0 => None,
            replied => Some(Moment::now().since(Moment::from_nanos(replied))),
        }
    }

    /// Reports calls that stay without a reply. One timer for all calls of a client.
    pub(crate) async fn attend(self: Arc<Calls>) {
        loop {
            self.begins.notified().await;
            while let Some(due) = self.next_due() {
                clock::sleep_until(due.instant()).await;
                let overdue = self.unanswered.lock().overdue(Moment::now());
                for (key, since) in overdue {
                    Event::StoreSilent { key: &key, since }.emit();
                }
            }
        }
    }

    fn next_due(&self) -> Option<Moment> {
        self.unanswered.lock().next_due()
    }
}

/// A call that has no reply yet.
struct Noted {
    calls: Arc<Calls>,
    number: u64,
}

impl Noted {
    fn new(calls: &Arc<Calls>, key: &LockKey) -> Noted {
        let (number, begins) = calls.unanswered.lock().sent(key.clone(), Moment::now());
        if begins {
            calls.begins.notify_one();
        }
        Noted {
            calls: calls.clone(),
            number,
        }
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        self.calls.unanswered.lock().answered(self.number);
    }
}
