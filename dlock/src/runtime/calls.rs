//! Calls of the store's methods. One that panics has failed with an unknown outcome, and one that stays without a reply
//! is reported; both go to the log, since a third-party store may do either.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep, sleep};

use crate::LockKey;
use crate::base::clock;
use crate::base::moment::Moment;
use crate::base::own_line::OwnLine;
use crate::base::per_thread::PerThread;
use crate::base::waking::waking;
use crate::engine::unanswered::Unanswered;
use crate::runtime::client::Shared;
use crate::runtime::emit::Event;
use crate::runtime::emit::meter::{ClientSeries, Operation};
use crate::store::counter::{CounterReply, CounterRequest, Counters};
use crate::store::records::RecordListener;
use crate::store::{
    self, AcquireAllReply, AcquireReply, AcquireRequest, GrantId, Kind, Lane, Reason, Store, StoreError,
    StoreFuture, Watch,
};

impl Shared {
    /// Fails once the client is shut down: then nothing waits for an operation. Called when it is counted as
    /// [pending](Shared::pending).
    pub(crate) fn check_open(&self) -> Result<(), StoreError> {
        match self.closing.is_given() {
            true => Err(StoreError::not_done(
                Reason::Closed,
                "the lock client is shut down",
            )),
            false => Ok(()),
        }
    }

    /// Asks the store for a lock, in an operation that is counted as [pending](Shared::pending): a shutdown that does not see
    /// it there is seen here.
    pub(crate) fn call_acquire(&self, request: &AcquireRequest) -> StoreFuture<AcquireReply> {
        if let Err(closed) = self.check_open() {
            return Box::pin(std::future::ready(Err(closed)));
        }
        let store = self.store.clone();
        called(&request.key, || store.acquire(request.clone()))
    }

    /// Asks the store for several locks in one operation, counted as for [one](Self::call_acquire).
    pub(crate) fn call_acquire_all(
        &self,
        first: &LockKey,
        requests: Vec<AcquireRequest>,
    ) -> StoreFuture<AcquireAllReply> {
        if let Err(closed) = self.check_open() {
            return Box::pin(std::future::ready(Err(closed)));
        }
        let store = self.store.clone();
        called(first, || store.acquire_all(requests))
    }

    /// Asks a counter, and returns the store's reply. A step that panics has failed.
    pub(crate) async fn counted(
        &self,
        counters: &Arc<dyn Counters>,
        request: &CounterRequest,
    ) -> Result<CounterReply, StoreError> {
        let step = called(&request.key, || counters.clone().count(request.clone()));
        self.noting(reply_of(step, &request.key)).await
    }

    /// Runs an operation, and notes that the store has replied.
    pub(crate) async fn noting<T>(
        &self,
        operation: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let reply = operation.await;
        self.calls.ended(&reply);
        reply
    }

    /// Subscribes to the releases of a key. If the store panics, there are no notifications, and the waiter polls.
    pub(crate) fn call_watch(&self, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        let store = self.store.clone();
        told(key, || store.watch(kind, key, grant)).unwrap_or_else(|| Watch::polling(store::POLLED_EVERY))
    }
}

/// What the store tells without a step, unless it panics.
fn told<T>(key: &LockKey, call: impl FnOnce() -> T) -> Option<T> {
    let told = catch_unwind(AssertUnwindSafe(call)).ok();
    if told.is_none() {
        Event::StorePanicked { key: Some(key) }.emit();
    }
    told
}

/// Returns the lane of a key; the usual one, if the store panics.
pub(crate) fn lane_of(store: &dyn Store, key: &LockKey) -> Lane {
    told(key, || store.lane(key)).unwrap_or_default()
}

/// Returns the number of the keys that one operation can acquire together with this one; `None`, too, if the store panics.
pub(crate) fn together_with(store: &dyn Store, kind: Kind, key: &LockKey) -> Option<u32> {
    told(key, || store.together(kind, key)).flatten()
}

/// Whether the store has certainly sent nothing since then; it may have, if it panics.
pub(crate) fn was_unreachable_since(store: &dyn Store, key: &LockKey, since: Instant) -> bool {
    told(key, || store.was_unreachable_since(since)).unwrap_or_default()
}

/// Returns what the store says of a lock that it did not grant; nothing, if it panics.
pub(crate) fn explained(store: &dyn Store, kind: Kind, key: &LockKey) -> Option<Arc<str>> {
    told(key, || store.explain(kind, key)).flatten()
}

/// Calls a method of the store. A panic may drop a guard, and a second panic there would end the process.
pub(crate) fn called<T: Send + 'static>(
    key: &LockKey,
    call: impl FnOnce() -> StoreFuture<T>,
) -> StoreFuture<T> {
    catch_unwind(AssertUnwindSafe(call))
        .unwrap_or_else(|_| Box::pin(std::future::ready(Err(panicked(Some(key))))))
}

/// The failure of an operation that panicked.
fn panicked(key: Option<&LockKey>) -> StoreError {
    Event::StorePanicked { key }.emit();
    StoreError::unknown("the step panicked")
}

/// Polls an operation. One that panics has failed, and must not be polled again.
pub(crate) fn poll_step<T>(
    step: &mut StoreFuture<T>,
    cx: &mut Context<'_>,
    key: &LockKey,
) -> Poll<Result<T, StoreError>> {
    catch_unwind(AssertUnwindSafe(|| step.as_mut().poll(cx)))
        .unwrap_or_else(|_| Poll::Ready(Err(panicked(Some(key)))))
}

/// Runs an operation to its end. One that panics has failed.
pub(crate) async fn reply_of<T>(mut step: StoreFuture<T>, key: &LockKey) -> Result<T, StoreError> {
    std::future::poll_fn(|cx| poll_step(&mut step, cx, key)).await
}

/// Runs operations, of which none is called before the first poll. If one panics, all have failed.
pub(crate) async fn caught<T>(
    key: Option<&LockKey>,
    operations: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    let caught = AssertUnwindSafe(operations).catch_unwind().await;
    caught.unwrap_or_else(|_| Err(panicked(key)))
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
        (shared, client): (&Shared, &ClientSeries),
        key: &LockKey,
    ) -> Poll<Result<T, StoreError>> {
        match poll_step(&mut self.step, cx, key) {
            Poll::Ready(reply) => {
                shared.calls.ended(&reply);
                client.request_ended(Operation::Acquire, &reply, self.sent);
                self.noted = None;
                Poll::Ready(reply)
            }
            Poll::Pending => {
                self.noted.get_or_insert_with(|| Noted::new(&shared.calls, key));
                Poll::Pending
            }
        }
    }

    pub(crate) async fn reply(
        mut self,
        of: (&Shared, &ClientSeries),
        key: &LockKey,
    ) -> Result<T, StoreError> {
        std::future::poll_fn(|cx| self.poll(cx, of, key)).await
    }
}

/// What a client waits for, and when that takes too long. One timer for all of it that began in a shard.
#[derive(Debug)]
struct Overdue<K>(PerThread<Arc<Shard<K>>>);

/// In cache lines of its own, with the count of the references to it.
#[derive(Debug)]
#[repr(align(128))]
struct Shard<K> {
    waiting: Mutex<Unanswered<K>>,
    begins: Notify,
}

/// A wait, with its number in its shard.
#[derive(Debug)]
pub(crate) struct OngoingWait<K> {
    shard: Arc<Shard<K>>,
    number: u64,
}

impl<K> Overdue<K> {
    fn new(after: Duration) -> Overdue<K> {
        Overdue(PerThread::new(|_| {
            Arc::new(Shard {
                waiting: Mutex::new(Unanswered::new(after)),
                begins: Notify::new(),
            })
        }))
    }

    /// Records the begin of a wait.
    fn begin(&self, what: K, now: Moment) -> OngoingWait<K> {
        let shard = self.0.here().clone();
        let (number, is_first) = shard.waiting.lock().sent(what, now);
        if is_first {
            shard.begins.notify_one();
        }
        OngoingWait { shard, number }
    }

    /// Tells of waits that take too long, each once.
    async fn attend(&self, tell: impl Fn(K, Duration)) {
        join_all(self.0.iter().map(|shard| shard.attend(&tell))).await;
    }

    /// Forgets all waits; returns what they were for.
    fn take(&self) -> Vec<K> {
        self.0
            .iter()
            .flat_map(|shard| shard.waiting.lock().take())
            .collect()
    }
}

impl<K> OngoingWait<K> {
    /// Records the end of the wait.
    fn end(&self) {
        let what = self.shard.waiting.lock().answered(self.number);
        drop(what);
    }
}

impl<K> Shard<K> {
    async fn attend(&self, tell: impl Fn(K, Duration)) {
        loop {
            self.begins.notified().await;
            while let Some(due) = self.next_due() {
                clock::sleep_until(due.instant()).await;
                let overdue = self.waiting.lock().overdue(Moment::now());
                for (what, since) in overdue {
                    tell(what, since);
                }
            }
        }
    }

    fn next_due(&self) -> Option<Moment> {
        self.waiting.lock().next_due()
    }
}

/// The calls of a client that have no reply yet.
#[derive(Debug)]
pub(crate) struct Calls {
    unanswered: Overdue<LockKey>,
    /// The callers that wait for their releases.
    releasing: Overdue<Waker>,
    /// The moment of the last reply, in nanoseconds, as far as a millisecond matters; zero before the first.
    replied: OwnLine<AtomicU64>,
}

impl Calls {
    /// A call is reported after `told_after`, and a caller waits `retry_for` long for a release.
    pub(crate) fn new(told_after: Duration, retry_for: Duration) -> Calls {
        Calls {
            unanswered: Overdue::new(told_after),
            releasing: Overdue::new(retry_for),
            replied: OwnLine::default(),
        }
    }

    /// Records the end of an operation.
    pub(crate) fn ended<T>(&self, outcome: &Result<T, StoreError>) {
        self.ended_with(outcome.as_ref().err());
    }

    fn ended_with(&self, failure: Option<&StoreError>) {
        // What a store does not support it refuses without its server.
        let is_reply = failure.is_none_or(|error| {
            !matches!(
                error.reason,
                Reason::Unreachable | Reason::Closed | Reason::Unsupported
            )
        });
        if is_reply {
            let now = Moment::now();
            // Written seldom, as all threads read it.
            let before = Moment::from_nanos(self.replied.load(Ordering::Relaxed));
            if now.since(before) >= Duration::from_millis(1) {
                self.replied.store(now.as_nanos(), Ordering::Relaxed);
            }
        }
    }

    /// Time since the last reply of the store.
    pub(crate) fn since_reply(&self) -> Option<Duration> {
        match self.replied.load(Ordering::Relaxed) {
            0 => None,
            replied => Some(Moment::now().since(Moment::from_nanos(replied))),
        }
    }

    /// Reports calls that stay without a reply, and wakes the callers of releases that take too long.
    pub(crate) async fn attend(self: Arc<Calls>) {
        let report = |key: LockKey, since| Event::StoreSilent { key: &key, since }.emit();
        tokio::join!(
            self.unanswered.attend(report),
            self.releasing.attend(|caller, _| waking(|| caller.wake()))
        );
    }

    /// Wakes the callers of all releases: nothing else will.
    pub(crate) fn rouse_releasing(&self) {
        for caller in self.releasing.take() {
            waking(|| caller.wake());
        }
    }
}

impl RecordListener for Calls {
    fn ended(&self, failure: Option<&StoreError>) {
        self.ended_with(failure);
    }
}

/// A call that has no reply yet.
struct Noted(OngoingWait<LockKey>);

impl Noted {
    fn new(calls: &Calls, key: &LockKey) -> Noted {
        Noted(calls.unanswered.begin(key.clone(), Moment::now()))
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// The patience of a caller that waits for a release; ended by [`end`](Self::end).
pub(crate) enum Patience {
    /// Under this wait. A timer for each caller would cost more than all else that it does to wait.
    OfClient(OngoingWait<Waker>),
    /// On another runtime, which may go on while that of the client stands still.
    OfCaller(Pin<Box<Sleep>>),
}

impl Patience {
    pub(crate) fn begin(shared: &Shared, caller: &Waker) -> Patience {
        let is_elsewhere = Handle::try_current().is_ok_and(|current| current.id() != shared.runtime.id());
        match is_elsewhere {
            true => Patience::OfCaller(Box::pin(sleep(shared.settings.retry_for))),
            false => Patience::OfClient(shared.calls.releasing.begin(caller.clone(), Moment::now())),
        }
    }

    /// Completes when it is over.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let OngoingWait { shard, number } = match self {
            Patience::OfClient(wait) => wait,
            Patience::OfCaller(timer) => return timer.as_mut().poll(cx),
        };
        let mut waiting = shard.waiting.lock();
        // The timer forgets a caller when it wakes it.
        let Some(caller) = waiting.get_mut(*number) else {
            return Poll::Ready(());
        };
        let before = (!caller.will_wake(cx.waker())).then(|| std::mem::replace(caller, cx.waker().clone()));
        drop(waiting);
        drop(before);
        Poll::Pending
    }

    pub(crate) fn end(self) {
        if let Patience::OfClient(wait) = self {
            wait.end();
        }
    }
}
