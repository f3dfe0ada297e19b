//! The queue that releases locks in the background.
//!
//! An operation that was begun is finished, whether or not its caller stays: a future that is dropped before it is done
//! moves to a worker of the client and runs to its end there; then its result is dropped, which releases it.

mod sent;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread::LocalKey;
use std::time::Duration;

use futures_util::future::CatchUnwind;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::task_tracker::TaskTrackerToken;

use self::sent::SentRelease;
pub(crate) use self::sent::pauses;
use crate::base::broken;
use crate::base::moment::Moment;
use crate::base::reused::{self, Boxes};
use crate::engine::fairness::ReleaseReplied;
use crate::engine::release::Release;
use crate::runtime::attempt::AcquireAttempt;
use crate::runtime::calls::{Patience, StoreCall};
use crate::runtime::client::{Handle, Shared};
use crate::runtime::emit::Event;
use crate::runtime::emit::meter::Ended;
use crate::runtime::grants::{Grant, Leaving};
use crate::runtime::waiters::KeptSubscription;
use crate::store::{AcquireReply, Kind, Outcome, ReleaseRequest, StoreError};
use crate::{Error, LockKey};

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
            asked,
        };
        let mut memory = A::spares().and_then(reused::take).unwrap_or_default();
        *memory = Some(acquire);
        RunToCompletion {
            future: Some(Running::Acquire(memory)),
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
        match (&poll, future) {
            (Poll::Pending, future) => self.future = Some(future),
            (Poll::Ready(_), Running::Acquire(acquire)) => acquire.end(),
            (Poll::Ready(_), Running::Future(_)) => {}
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

    /// Called after its reply: its memory is used again.
    fn end(self: Box<Self>);
}

/// An acquire in flight, and how its reply is handled.
pub(crate) trait PendingAcquire: Send + Unpin + Sized + 'static {
    type Brought: Send + 'static;

    /// The attempt.
    fn attempt(&self) -> &AcquireAttempt;

    /// Converts the reply for the caller.
    fn replied(self, reply: Result<AcquireReply, StoreError>) -> Self::Brought;

    /// Queues an operation that releases whatever the acquire obtains, and returns its outcome.
    fn undo(&self) -> RunToCompletion<Result<(), Error>>;

    /// Called when nothing needs to be released any more.
    fn forget(self);

    /// The memory that this thread keeps for those that are frequent.
    fn spares() -> Option<&'static LocalKey<AcquireMemory<Self>>> {
        None
    }
}

pub(crate) type AcquireMemory<A> = Boxes<Acquiring<A>>;

/// An acquire in flight; its memory has none after the reply.
pub(crate) struct Acquiring<A> {
    step: StoreCall<AcquireReply>,
    asked: A,
    /// `shutdown` waits for it.
    token: TaskTrackerToken,
}

impl<A: PendingAcquire> Undoing<A::Brought> for Option<Acquiring<A>> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<A::Brought> {
        let Some(Acquiring { step, asked, .. }) = self else {
            return Poll::Pending;
        };
        let attempt = asked.attempt();
        let reply = std::task::ready!(step.poll(cx, attempt.counted_by(), &attempt.request.key));
        match self.take() {
            Some(Acquiring { step, asked, token }) => {
                let brought = asked.replied(reply);
                drop(step);
                drop(token);
                Poll::Ready(brought)
            }
            None => Poll::Pending,
        }
    }

    fn worker(&self) -> Option<&mpsc::UnboundedSender<Job>> {
        let Acquiring { asked, .. } = self.as_ref()?;
        Some(asked.attempt().handle.worker())
    }

    fn undo(self: Box<Self>) -> Job {
        let Some(Acquiring { step, asked, token }) = *self else {
            return Box::pin(std::future::ready(()));
        };
        if broken!(LateAcquireKeepsGrant) {
            return Box::pin(async move {
                let attempt = asked.attempt();
                drop(step.reply(attempt.counted_by(), &attempt.request.key).await);
                asked.forget();
                drop(token);
            });
        }
        let undo = asked.undo();
        Box::pin(async move {
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
            drop(token);
        })
    }

    fn end(self: Box<Self>) {
        if let Some(spares) = A::spares().filter(|_| self.is_none()) {
            reused::give(spares, self);
        }
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
        now: Moment,
        Leaving { deadline, counted }: Leaving,
        ended: Option<Ended>,
    ) -> Releasing {
        let shared = self.shared().clone();
        shared.watchdog.remove(grant.number);
        let request = grant.release_request(now);
        let release = Release::of_grant(now, request.keep_for, deadline, grant.lease(), grant.renewed);
        let is_awaited = matches!(told, Some(Told::Awaited { .. })) && !shared.has_lost_its_runtime();
        let held = ended.map(|ended| (grant.clone(), ended));
        let sent = SentRelease::send(shared, request, release, told, held);
        let going_on = match is_awaited {
            // A caller that does not poll its release must not delay the waiter.
            true => {
                let (kind, key) = (grant.kind, grant.key.clone());
                let ended = move || Err(unknown(kind, &key, RUNTIME_ENDED.to_owned()));
                GoingOn::AtWorker(self.leave_to_worker(self.run_counted(counted, sent), ended))
            }
            false => GoingOn::Here(Some((sent, counted))),
        };
        Releasing {
            handle: self.clone(),
            reply: AwaitedReply {
                going_on,
                grant,
                began: now,
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
        self.run_to_completion(SentRelease::send(
            self.shared().clone(),
            request,
            release,
            None,
            None,
        ))
    }
}

/// A release whose caller waits for the reply of the store. Dropped early, the release goes on.
pub(crate) struct Releasing {
    handle: Arc<Handle>,
    reply: AwaitedReply,
}

/// Where a release is polled.
enum GoingOn {
    /// By its caller, in place; if that drops it, by the worker. `None` once it is over.
    Here(Option<(SentRelease, TaskTrackerToken)>),
    AtWorker(RunToCompletion<Result<(), Error>>),
}

impl GoingOn {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        match self {
            GoingOn::AtWorker(release) => release.poll_unpin(cx),
            GoingOn::Here(release) => {
                let mut polled = Polled {
                    release,
                    is_over: true,
                };
                let Some((sent, _)) = polled.release else {
                    return Poll::Pending;
                };
                let poll = sent.poll_unpin(cx);
                polled.is_over = poll.is_ready();
                poll
            }
        }
    }

    /// The job that finishes it without its caller, unless that is done or there already.
    fn rest(&mut self) -> Option<Job> {
        let GoingOn::Here(release) = self else { return None };
        let (sent, token) = release.take()?;
        Some(Box::pin(async move {
            drop(sent.await);
            drop(token);
        }))
    }
}

/// Ends a release that is over, or that panicked: it is not polled again.
struct Polled<'a> {
    release: &'a mut Option<(SentRelease, TaskTrackerToken)>,
    is_over: bool,
}

impl Drop for Polled<'_> {
    fn drop(&mut self) {
        if self.is_over {
            *self.release = None;
        }
    }
}

struct AwaitedReply {
    going_on: GoingOn,
    grant: Arc<Grant>,
    began: Moment,
    /// Begins once the reply is waited for.
    patience: Option<Patience>,
}

impl AwaitedReply {
    fn poll(&mut self, cx: &mut Context<'_>, shared: &Shared) -> Poll<Result<(), Error>> {
        if let Poll::Ready(outcome) = self.going_on.poll(cx) {
            return Poll::Ready(outcome);
        }
        let begin = || Patience::begin(shared, cx.waker());
        let patience = self.patience.get_or_insert_with(begin);
        let is_over = patience.poll(cx).is_ready();
        let Grant { kind, key, .. } = &*self.grant;
        // Only now: a caller that waits by then is woken.
        if shared.has_lost_its_runtime() {
            return Poll::Ready(Err(unknown(*kind, key, RUNTIME_ENDED.to_owned())));
        }
        if !is_over {
            return Poll::Pending;
        }
        let patience = shared.settings.retry_for;
        Poll::Ready(Err(match self.grant.release_failure(self.began) {
            Some(error) => error.into_error(&format!("the release of {}", kind.noun()), key),
            None => unknown(*kind, key, format!("the store has not answered for {patience:?}")),
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
        if let Some(rest) = self.reply.going_on.rest() {
            // No worker means no runtime: the operation stays as far as the store has taken it.
            let _ = self.handle.worker().send(rest);
        }
    }
}

const RUNTIME_ENDED: &str = "the client's runtime has ended";

fn unknown(kind: Kind, key: &LockKey, message: String) -> Error {
    Error::OutcomeUnknown {
        what: format!("the release of {} \"{key}\"", kind.noun()),
        message,
        source: None,
    }
}
