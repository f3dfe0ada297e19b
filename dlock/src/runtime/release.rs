//! The queue that releases locks in the background.
//!
//! An operation that was begun is finished, whether or not its caller stays: a future that is dropped before it is done
//! moves to a worker of the client and runs to its end there; then its result is dropped, which releases it.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::CatchUnwind;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::base::broken;
use crate::base::clock;
use crate::base::lock_id::LockId;
use crate::base::moment::Moment;
use crate::base::report::LossReason;
use crate::engine::fairness::{Notified, ReleaseReplied};
use crate::engine::release::{self, Release, ReleaseAction, ReleaseReport};
use crate::runtime::attempt::AcquireAttempt;
use crate::runtime::calls::{Patience, StoreCall, called, panicked};
use crate::runtime::client::{Handle, Shared};
use crate::runtime::emit::Event;
use crate::runtime::emit::meter::{ClientSeries, Ended, Meter, Operation};
use crate::runtime::grants::{Grant, Leaving};
use crate::runtime::outside::is_outside;
use crate::runtime::waiters::KeptSubscription;
use crate::store::{AcquireReply, Outcome, ReleaseReply, ReleaseRequest, StoreError, StoreFuture};
use crate::{Error, LockKey, Loss};

/// What the worker runs.
pub(crate) type Job = Pin<Box<dyn Future<Output = ()> + Send + 'static>>;

/// Who learns how many clients a release has notified.
pub(crate) enum Told {
    /// The next waiter of this process, which waits for it.
    Awaited {
        by: oneshot::Sender<ReleaseReplied>,
        /// The subscription of those that the lock was handed off to, if no other waits.
        kept: Option<Arc<KeptSubscription>>,
    },
    /// The waiters after the next one, which asks right behind the release.
    Followed,
}

impl Told {
    /// The subscription that is kept until the store has replied.
    pub(crate) fn kept(&self) -> Option<Arc<KeptSubscription>> {
        match self {
            Told::Awaited { kept, .. } => kept.clone(),
            Told::Followed => None,
        }
    }
}

/// A future that the worker runs to its end if it is dropped before.
pub(crate) struct RunToCompletion<T: Send + 'static> {
    future: Option<Running<T>>,
    /// Called if it is dropped before its end.
    undo: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl<T: Send + 'static> RunToCompletion<T> {
    /// Asks the store for a lock, and runs the acquire to its end. Dropped before, it is undone: the release is queued at once.
    pub(crate) fn acquire<A>(asked: A) -> RunToCompletion<T>
    where
        A: PendingAcquire<Brought = T>,
    {
        let AcquireAttempt { handle, request, .. } = asked.attempt();
        let shared = handle.shared();
        let token = shared.pending.token();
        let acquire = Acquiring {
            step: StoreCall::new(shared.call_acquire(request)),
            token,
            asked: Some(asked),
        };
        RunToCompletion {
            future: Some(Running::Acquire(Box::new(acquire))),
            undo: None,
        }
    }

    /// Leaves the future to the worker, which calls `then` with the result.
    pub(crate) fn finish(self, then: impl FnOnce(T) + Send + 'static) {
        let worker = self.future.as_ref().and_then(Running::worker);
        if let Some(worker) = worker.cloned() {
            let _ = worker.send(Box::pin(async move { then(self.await) }));
        }
    }

    /// Calls `undo` if the future is dropped before its end.
    pub(crate) fn or_undo(mut self, undo: impl FnOnce() + Send + Sync + 'static) -> RunToCompletion<T> {
        self.undo = Some(Box::new(undo));
        self
    }
}

/// A future that `shutdown` waits for.
struct Tracked<T> {
    future: Pin<Box<dyn Future<Output = T> + Send + 'static>>,
    handle: Arc<Handle>,
    token: TaskTrackerToken,
}

enum Running<T> {
    Future(Tracked<T>),
    Acquire(Box<dyn Undoing<T>>),
}

impl<T> Running<T> {
    fn worker(&self) -> Option<&mpsc::UnboundedSender<Job>> {
        match self {
            Running::Future(tracked) => Some(tracked.handle.worker()),
            Running::Acquire(acquire) => acquire.worker(),
        }
    }
}

impl<T: Send + 'static> Future for RunToCompletion<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        // Taken out while it is polled: a future that panicked is not polled again.
        let Some(mut future) = self.future.take() else {
            return Poll::Pending;
        };
        let poll = match &mut future {
            Running::Future(tracked) => tracked.future.as_mut().poll(cx),
            Running::Acquire(acquire) => acquire.poll(cx),
        };
        if poll.is_pending() {
            self.future = Some(future);
        }
        poll
    }
}

impl<T: Send + 'static> Drop for RunToCompletion<T> {
    fn drop(&mut self) {
        let Some(running) = self.future.take() else { return };
        let worker = running.worker().cloned();
        let job: Job = match running {
            Running::Future(Tracked { future, token, .. }) => Box::pin(async move {
                drop(future.await);
                drop(token);
            }),
            Running::Acquire(acquire) => acquire.undo(),
        };
        if let Some(undo) = self.undo.take() {
            undo();
        }
        // No worker means no runtime: the operation stays as far as the store has taken it.
        if let Some(worker) = worker {
            let _ = worker.send(job);
        }
    }
}

/// An acquire in flight that can be given up before its reply arrives.
trait Undoing<T>: Send {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<T>;

    /// The worker that gets the job of [`undo`](Self::undo), unless the reply has arrived.
    fn worker(&self) -> Option<&mpsc::UnboundedSender<Job>>;

    /// Queues the release right behind the acquire, before this returns: the next acquire of this process must not find
    /// the lock busy. The job ensures that the release was not carried out first.
    fn undo(self: Box<Self>) -> Job;
}

/// An acquire in flight, and how its reply is handled.
pub(crate) trait PendingAcquire: Send + Unpin + 'static {
    type Brought: Send + 'static;

    /// The attempt.
    fn attempt(&self) -> &AcquireAttempt;

    /// Converts the reply for the caller.
    fn replied(self, reply: Result<AcquireReply, StoreError>) -> Self::Brought;

    /// Queues an operation that releases whatever the acquire obtains, and returns its outcome.
    fn undo(&self) -> RunToCompletion<Result<(), Error>>;

    /// Called when nothing needs to be released any more.
    fn forget(self);
}

struct Acquiring<A> {
    step: StoreCall<AcquireReply>,
    asked: Option<A>,
    /// `shutdown` waits for it.
    token: TaskTrackerToken,
}

impl<A: PendingAcquire> Undoing<A::Brought> for Acquiring<A> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<A::Brought> {
        let Some(asked) = &self.asked else {
            return Poll::Pending;
        };
        let attempt = asked.attempt();
        let reply = std::task::ready!(self.step.poll(cx, attempt.counted_by(), &attempt.request.key));
        match self.asked.take() {
            Some(asked) => Poll::Ready(asked.replied(reply)),
            None => Poll::Pending,
        }
    }

    fn worker(&self) -> Option<&mpsc::UnboundedSender<Job>> {
        let asked = self.asked.as_ref()?;
        Some(asked.attempt().handle.worker())
    }

    fn undo(self: Box<Self>) -> Job {
        let Acquiring { step, asked, token } = *self;
        if broken!(LateAcquireKeepsGrant) {
            return Box::pin(async move {
                if let Some(asked) = asked {
                    let attempt = asked.attempt();
                    drop(step.reply(attempt.counted_by(), &attempt.request.key).await);
                    asked.forget();
                }
                drop(token);
            });
        }
        let undo = asked.as_ref().map(PendingAcquire::undo);
        Box::pin(async move {
            if let (Some(asked), Some(undo)) = (asked, undo) {
                let attempt = asked.attempt();
                let reply = step.reply(attempt.counted_by(), &attempt.request.key);
                let (reply, undone) = futures_util::join!(reply, undo);
                let may_be_left = match reply {
                    Ok(AcquireReply::Acquired(_)) => true,
                    Ok(_) => false,
                    Err(error) => error.outcome == Outcome::Unknown,
                };
                // The acquire may have been resent, and so behind its release.
                if may_be_left && undone.is_err() {
                    drop(asked.undo());
                }
                asked.forget();
            }
            drop(token);
        })
    }
}

/// Runs dropped futures, until the last handle of the client is gone and nothing is left to do.
pub(crate) async fn work(mut queue: mpsc::UnboundedReceiver<Job>) {
    let mut jobs = FuturesUnordered::<CatchUnwind<AssertUnwindSafe<Job>>>::new();
    let mut open = true;
    while open || !jobs.is_empty() {
        tokio::select! {
            biased;
            // Jobs first: there are only as many as the queue delivered, so they cannot starve the queue; a queue that
            // is never empty could starve them.
            Some(done) = jobs.next(), if !jobs.is_empty() => {
                if done.is_err() {
                    Event::StorePanicked { key: None }.emit();
                }
            }
            job = queue.recv(), if open => match job {
                // If a store panics, the other jobs continue.
                Some(job) => jobs.push(AssertUnwindSafe(job).catch_unwind()),
                None => open = false,
            },
        }
    }
}

impl Handle {
    /// Runs a future to its end, even if the result is dropped. `shutdown` waits for it.
    pub(crate) fn run_to_completion<T: Send + 'static>(
        self: &Arc<Self>,
        future: impl Future<Output = T> + Send + 'static,
    ) -> RunToCompletion<T> {
        self.run_counted(self.shared().pending.token(), future)
    }

    /// The same for an operation that was counted before it began.
    pub(crate) fn run_counted<T: Send + 'static>(
        self: &Arc<Self>,
        token: TaskTrackerToken,
        future: impl Future<Output = T> + Send + 'static,
    ) -> RunToCompletion<T> {
        RunToCompletion {
            future: Some(Running::Future(Tracked {
                future: Box::pin(future),
                handle: self.clone(),
                token,
            })),
            undo: None,
        }
    }

    /// Leaves the future to the worker; returns its result, or `ended` if the worker is gone.
    fn leave_to_worker<T: Send + 'static>(
        self: &Arc<Self>,
        future: RunToCompletion<T>,
        ended: impl FnOnce() -> T + Send + 'static,
    ) -> RunToCompletion<T> {
        let (done, outcome) = oneshot::channel();
        future.finish(move |outcome| drop(done.send(outcome)));
        self.run_to_completion(async move { outcome.await.unwrap_or_else(|_| ended()) })
    }

    /// Releases a grant that its last hold has left. The operation takes its position in the store's queue before this
    /// returns; the result is its outcome.
    pub(crate) fn release(
        self: &Arc<Self>,
        grant: Arc<Grant>,
        told: Option<Told>,
        now: Instant,
        Leaving { deadline, counted }: Leaving,
        ended: Option<Ended>,
    ) -> Releasing {
        let shared = self.shared().clone();
        shared.watchdog.remove(grant.number);
        let request = grant.release_request(now);
        let renewed = grant.renewed.then(|| grant.lease());
        let release = Release::of_grant(Moment::of(now), request.keep_for, deadline, renewed);
        let is_awaited = matches!(told, Some(Told::Awaited { .. })) && !shared.has_lost_its_runtime();
        let held = ended.map(|ended| (grant.clone(), ended));
        let mut going_on = self.run_counted(counted, release_grant(shared, request, release, told, held));
        if is_awaited {
            // A caller that does not poll its release must not delay the waiter.
            let key = grant.key.clone();
            let ended = move || Err(unknown(&key, RUNTIME_ENDED.to_owned()));
            going_on = self.leave_to_worker(going_on, ended);
        }
        Releasing {
            handle: self.clone(),
            reply: AwaitedReply {
                going_on,
                grant,
                began: Moment::of(now),
                patience: None,
            },
        }
    }

    /// Makes sure that an acquire with an unknown outcome leaves nothing behind. The operation takes its position in
    /// the store's queue now; the result is its outcome, which may be dropped.
    pub(crate) fn undo(
        self: &Arc<Self>,
        request: ReleaseRequest,
        lease: Duration,
    ) -> RunToCompletion<Result<(), Error>> {
        let release = Release::of_acquire(Moment::now(), request.keep_for, lease);
        self.run_to_completion(release_grant(self.shared().clone(), request, release, None, None))
    }
}

/// A release whose caller waits for the reply of the store. Dropped early, the release goes on.
pub(crate) struct Releasing {
    handle: Arc<Handle>,
    reply: AwaitedReply,
}

struct AwaitedReply {
    going_on: RunToCompletion<Result<(), Error>>,
    grant: Arc<Grant>,
    began: Moment,
    /// Begins once the reply is waited for.
    patience: Option<Patience>,
}

impl AwaitedReply {
    fn poll(&mut self, cx: &mut Context<'_>, shared: &Shared) -> Poll<Result<(), Error>> {
        if let Poll::Ready(outcome) = self.going_on.poll_unpin(cx) {
            return Poll::Ready(outcome);
        }
        let begin = || Patience::begin(shared, cx.waker());
        let patience = self.patience.get_or_insert_with(begin);
        let is_over = patience.poll(cx).is_ready();
        let key = &self.grant.key;
        // Only now: a caller that waits by then is woken.
        if shared.has_lost_its_runtime() {
            return Poll::Ready(Err(unknown(key, RUNTIME_ENDED.to_owned())));
        }
        if !is_over {
            return Poll::Pending;
        }
        let patience = shared.settings.retry_for;
        Poll::Ready(Err(match self.grant.release_failure(self.began) {
            Some(error) => error.into_error("the release of lock", key),
            None => unknown(key, format!("the store has not answered for {patience:?}")),
        }))
    }
}

impl Future for Releasing {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Releasing { handle, reply } = &mut *self;
        handle.poll_with_timers(|| reply.poll(cx, handle.shared()))
    }
}

impl Drop for Releasing {
    fn drop(&mut self) {
        if let Some(patience) = self.reply.patience.take() {
            patience.end();
        }
    }
}

const RUNTIME_ENDED: &str = "the client's runtime has ended";

/// Sends the release until it is over.
fn release_grant(
    shared: Arc<Shared>,
    request: ReleaseRequest,
    mut release: Release,
    mut told: Option<Told>,
    held: Option<(Arc<Grant>, Ended)>,
) -> impl Future<Output = Result<(), Error>> + Send + 'static {
    // Called here and not when polled: the request takes its position in the store's queue now.
    let mut step = call_release(&shared, &request.key, request.clone());
    async move {
        let key = &request.key;
        loop {
            let (answer, sent) = step;
            let reply = released(&shared, key, answer).await;
            let count = |client: &ClientSeries| client.request_ended(Operation::Release, &reply, sent);
            match &held {
                Some((grant, _)) => count(grant.series.client()),
                None => count(&shared.meter.client()),
            }
            let told = told.take();
            let kept = told.as_ref().and_then(Told::kept);
            if !tells_receivers(&shared, &request, told, &reply) {
                let receivers = release::listeners(&reply).unwrap_or(0);
                lets_others_go_first(&shared, &request, receivers, release.sent());
            }
            if let Some(kept) = kept {
                kept.answered();
            }
            match release.handle(reply, Moment::now()) {
                ReleaseAction::Report(report) => {
                    if matches!(report, ReleaseReport::Failed(_)) {
                        shared.given_up.fetch_add(1, Ordering::Relaxed);
                    }
                    if let Some((grant, ended)) = &held {
                        match report {
                            ReleaseReport::Released | ReleaseReport::ReleasedBefore => {
                                grant.tell_held(*ended)
                            }
                            ReleaseReport::Gone => grant.tell_lost(&LossReason::Gone),
                            ReleaseReport::Expired => grant.tell_lost(&grant.why_released_late()),
                            ReleaseReport::RanOut | ReleaseReport::Failed(_) => grant.tell_held(Ended::Lost),
                        }
                    }
                    return reported(&shared.meter, report, &request);
                }
                ReleaseAction::Repeat { pause, failure } => {
                    Event::ReleaseRepeated {
                        key,
                        grant: request.grant,
                        error: &failure,
                    }
                    .emit();
                    if let Some((grant, _)) = &held {
                        grant.release_failed(failure);
                    }
                    if let Some(pause) = pause
                        && !sleep_anywhere(&shared, pause).await
                    {
                        return Err(unknown(key, RUNTIME_ENDED.to_owned()));
                    }
                }
            }
            let keep_for = release.sends(Moment::now());
            let again = ReleaseRequest {
                keep_for,
                ..request.clone()
            };
            step = call_release(&shared, key, again);
        }
    }
}

/// Tells how many clients the release has notified. Returns whether that settles who goes first.
fn tells_receivers(
    shared: &Shared,
    ReleaseRequest { kind, key, .. }: &ReleaseRequest,
    told: Option<Told>,
    reply: &Result<ReleaseReply, StoreError>,
) -> bool {
    let receivers = release::listeners(reply);
    // If it is lost, another process may have it.
    let was_held = matches!(reply, Ok(ReleaseReply::Released { .. }));
    match told {
        Some(Told::Followed) => {
            let known = receivers.filter(|_| was_held);
            (shared.fairness).record_receivers(&LockId::new(*kind, key), known)
        }
        Some(Told::Awaited { by, .. }) if reply.is_ok() => {
            let at = Moment::now();
            let reply = ReleaseReplied {
                was_held,
                receivers,
                at,
            };
            by.send(reply).is_ok()
        }
        _ => false,
    }
}

/// Lets those go first that the release has notified, if no caller of this process waits.
fn lets_others_go_first(
    shared: &Shared,
    ReleaseRequest { kind, key, .. }: &ReleaseRequest,
    receivers: u64,
    sent: Moment,
) {
    // A queue of the store cannot be jumped.
    if receivers == 0 || kind.waits_in_store() {
        return;
    }
    let of = LockId::new(*kind, key);
    // Waiters of this process were notified too, and compete with the others from now on.
    let waiters = shared.waiters.of(&of);
    if waiters.any(&of) {
        return;
    }
    match receivers.saturating_sub(waiters.take_own_receivers(&of, sent)) {
        0 if waiters.any_on_other_side(&of) => shared.fairness.released(&of, sent, Notified::OtherSide),
        0 => {}
        others => shared.fairness.released(&of, sent, Notified::Clients(others)),
    }
}

/// Calls the store, at this time.
fn call_release(
    shared: &Shared,
    key: &LockKey,
    request: ReleaseRequest,
) -> (StoreFuture<ReleaseReply>, Instant) {
    let store = shared.store.clone();
    (called(key, || store.release(request)), clock::now())
}

/// The reply of the store. A call that panics has failed, and is repeated.
async fn released(
    shared: &Shared,
    key: &LockKey,
    step: StoreFuture<ReleaseReply>,
) -> Result<ReleaseReply, StoreError> {
    let reply = AssertUnwindSafe(step).catch_unwind().await;
    let reply = reply.unwrap_or_else(|_| Err(panicked(key)));
    shared.calls.ended(&reply);
    reply
}

/// The result for the caller of a release, counted.
fn reported(meter: &Meter, report: ReleaseReport, request: &ReleaseRequest) -> Result<(), Error> {
    let ReleaseRequest { kind, key, grant, .. } = request;
    let lost = |loss| Error::Lost {
        kind: *kind,
        key: key.clone(),
        loss,
    };
    match report {
        ReleaseReport::Released | ReleaseReport::ReleasedBefore => Ok(()),
        ReleaseReport::Gone => Err(lost(Loss::Gone)),
        ReleaseReport::Expired => Err(lost(Loss::Expired)),
        ReleaseReport::RanOut => Err(unknown(key, "its lease expired in the meantime".to_owned())),
        ReleaseReport::Failed(error) => {
            Event::ReleaseFailed {
                meter,
                key,
                grant: *grant,
                error: &error,
            }
            .emit();
            Err(error.into_error("the release of lock", key))
        }
    }
}

/// Sleeps on whichever runtime polls: a waiting future may move to the worker's runtime when its own ends. Returns false
/// if the client's runtime has ended, or the client itself, and this is polled outside of any other: there are no timers.
pub(crate) async fn sleep_anywhere(shared: &Shared, pause: Duration) -> bool {
    let until = tokio::time::Instant::now() + pause;
    let mut timer = None;
    std::future::poll_fn(|cx| {
        if shared.has_lost_its_runtime() || shared.finished.is_cancelled() && is_outside() {
            return Poll::Ready(false);
        }
        timer
            .insert(Box::pin(tokio::time::sleep_until(until)))
            .as_mut()
            .poll(cx)
            .map(|()| true)
    })
    .await
}

fn unknown(key: &LockKey, message: String) -> Error {
    Error::OutcomeUnknown {
        what: format!("the release of lock \"{key}\""),
        message,
        source: None,
    }
}
