//! Work under a lock, from the acquire to the release. The caller's future is stored once and polled in place, so that
//! the sizes of nested locked futures add up and do not multiply.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use parking_lot::Mutex;
use pin_project_lite::pin_project;
use tokio_util::sync::WaitForCancellationFutureOwned;

use crate::api::guard::{Holding, LockGuard, finish};
use crate::api::held::View;
use crate::runtime::scope::{Frames, InScope};
use crate::{Error, Held, MultiGuard};

/// Guards with a frame of their own.
pub(crate) trait Framed: Holding {
    /// The frame of everything that the guard holds.
    fn frames(&self) -> Frames;
}

pin_project! {
    /// A future in the frame of a hold; it is dropped when the hold is lost.
    pub(crate) struct Guarding<F> {
        #[pin]
        future: InScope<F>,
        #[pin]
        over: Option<WaitForCancellationFutureOwned>,
        // The hold to check, if any.
        held: Option<Held>,
    }
}

impl<F> Guarding<F> {
    pub(crate) fn new(future: InScope<F>, held: Held) -> Guarding<F> {
        Guarding {
            future,
            over: None,
            held: Some(held),
        }
    }

    /// Wraps a future to run in the frame of a guard, as long as the guard is held.
    pub(crate) fn in_frame_of(guard: &impl Framed, future: F) -> Guarding<F>
    where
        F: Future,
    {
        Guarding::new(InScope::new(future, guard.frames()), guard.view())
    }

    /// Wraps a future that enters its frame later.
    fn outside(future: F) -> Guarding<F> {
        Guarding {
            future: InScope::new(future, Frames::default()),
            over: None,
            held: None,
        }
    }

    /// Enters these frames, and ties the future to this hold, if any.
    fn enter(self: Pin<&mut Self>, frames: Frames, held: Option<Held>) {
        let this = self.project();
        this.future.enter(frames);
        *this.held = held;
    }

    /// Drops the future, in its frame.
    fn end(self: Pin<&mut Self>) {
        self.project().future.end();
    }
}

impl<F: Future> Future for Guarding<F> {
    type Output = Result<F::Output, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if let Some(held) = this.held {
            let is_first = this.over.is_none();
            if is_first {
                this.over.set(Some(held.over().cancelled_owned()));
            }
            let over = this.over.as_mut().as_pin_mut();
            let is_over = over.is_some_and(|over| over.poll(cx).is_ready());
            // Checked at first too: the hold may have expired unnoticed. Never twice in one poll: the work makes progress
            // even if the hold contradicts its signal.
            if (is_first || is_over)
                && let Err(lost) = held.check()
            {
                this.future.end();
                return Poll::Ready(Err(lost));
            }
        }
        let output = ready!(this.future.poll(cx));
        // Asked once more when the future is done: a stalled runtime may deliver the notification late.
        let checked = this.held.as_ref().map_or(Ok(()), Held::check);
        Poll::Ready(checked.map(|()| output))
    }
}

/// The frame of a `#[distributed_lock]` function, around a block that acquires and then enters.
#[derive(Debug)]
pub struct Frame {
    entrance: Entrance,
    dropped_on_loss: bool,
}

/// A handle by which the block inside enters the frame.
#[derive(Debug, Clone, Default)]
pub struct Entrance(Arc<Mutex<Option<Result<Guard, Error>>>>);

/// A guard of one lock, or of several.
#[derive(Debug)]
pub enum Guard {
    /// Of `key = …`.
    One(LockGuard),
    /// Of `keys = […]`.
    Several(MultiGuard),
}

impl Frame {
    /// `dropped_on_loss`: the block is dropped when the lock is lost.
    #[must_use]
    pub fn new(dropped_on_loss: bool) -> Frame {
        Frame {
            entrance: Entrance::default(),
            dropped_on_loss,
        }
    }

    /// Returns the handle by which the block enters.
    #[must_use]
    pub fn entrance(&self) -> Entrance {
        self.entrance.clone()
    }

    /// Runs the block, and releases the lock when the block is done.
    pub fn run<F: Future>(self, block: F) -> impl Future<Output = Result<F::Output, Error>> + use<F> {
        Locked {
            step: LockedStep::Runs {
                block: Guarding::outside(block),
                guard: None,
                frame: self,
            },
        }
    }
}

impl Entrance {
    /// Enters the frame of the acquired guard. A block that acquired nothing does not continue: it is dropped.
    pub async fn enter<G: Into<Guard>>(self, acquired: Result<G, Error>) {
        *self.0.lock() = Some(acquired.map(Into::into));
        let mut is_inside = false;
        // The frame is polled again at once.
        std::future::poll_fn(|_| match std::mem::replace(&mut is_inside, true) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
    }

    fn take(&self) -> Option<Result<Guard, Error>> {
        self.0.lock().take()
    }
}

impl From<LockGuard> for Guard {
    fn from(guard: LockGuard) -> Guard {
        Guard::One(guard)
    }
}

impl From<MultiGuard> for Guard {
    fn from(guard: MultiGuard) -> Guard {
        Guard::Several(guard)
    }
}

impl Guard {
    fn view(&self) -> Held {
        match self {
            Guard::One(guard) => guard.view(),
            Guard::Several(guards) => guards.view(),
        }
    }

    fn frames(&self) -> Frames {
        match self {
            Guard::One(guard) => guard.frames(),
            Guard::Several(guards) => guards.frames(),
        }
    }

    fn finish(self) -> Release {
        match self {
            Guard::One(guard) => Box::pin(finish(guard)),
            Guard::Several(guards) => Box::pin(finish(guards)),
        }
    }
}

pin_project! {
    struct Locked<F: Future> {
        #[pin]
        step: LockedStep<F>,
    }
}

pin_project! {
    #[project = LockedNow]
    enum LockedStep<F: Future> {
        // Dropped in this order.
        Runs { #[pin] block: Guarding<F>, guard: Option<Guard>, frame: Frame },
        GivesBack { release: Release, output: Option<Result<F::Output, Error>> },
    }
}

impl<F: Future> Future for Locked<F> {
    type Output = Result<F::Output, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut step = self.project().step;
        loop {
            match step.as_mut().project() {
                LockedNow::Runs {
                    mut block,
                    guard,
                    frame,
                } => match block.as_mut().poll(cx) {
                    Poll::Ready(output) => {
                        let Some(guard) = guard.take() else {
                            return Poll::Ready(output);
                        };
                        step.set(LockedStep::GivesBack {
                            release: guard.finish(),
                            output: Some(output),
                        });
                    }
                    Poll::Pending => match frame.entrance.take() {
                        None => return Poll::Pending,
                        Some(Ok(entered)) => {
                            let held = frame.dropped_on_loss.then(|| entered.view());
                            block.enter(entered.frames(), held);
                            *guard = Some(entered);
                        }
                        Some(Err(error)) => {
                            block.end();
                            return Poll::Ready(Err(error));
                        }
                    },
                },
                LockedNow::GivesBack { release, output } => {
                    ready!(release.as_mut().poll(cx));
                    let Some(output) = output.take() else {
                        panic!("a locked function polled after it was done");
                    };
                    return Poll::Ready(output);
                }
            }
        }
    }
}

type Acquire<G> = Pin<Box<dyn Future<Output = Result<G, Error>> + Send>>;
type Release = Pin<Box<dyn Future<Output = ()> + Send>>;

pin_project! {
    /// Acquires a lock, runs the future of a closure in its frame, and releases the lock.
    #[must_use = "futures do nothing unless polled"]
    pub(crate) struct Run<G, W, F: Future> {
        #[pin]
        step: Step<G, W, F>,
    }
}

pin_project! {
    #[project = StepNow]
    enum Step<G, W, F: Future> {
        Acquires { acquire: Acquire<G>, work: Option<W> },
        // Dropped in this order: the future's destructors run under the lock.
        Works { #[pin] future: Guarding<F>, guard: Option<G> },
        GivesBack { release: Release, output: Option<Result<F::Output, Error>> },
    }
}

impl<G, W, F> Run<G, W, F>
where
    G: Framed + Send + 'static,
    W: FnOnce(Held) -> F,
    F: Future,
{
    /// The acquire is larger than most work, so it is on the heap.
    pub(crate) fn new(
        acquire: impl Future<Output = Result<G, Error>> + Send + 'static,
        work: W,
    ) -> Run<G, W, F> {
        Run {
            step: Step::Acquires {
                acquire: Box::pin(acquire),
                work: Some(work),
            },
        }
    }
}

/// Continues after the acquire. Not part of `poll`, whose stack is below all of the work.
#[inline(never)]
fn begin<G, W, F>(mut step: Pin<&mut Step<G, W, F>>, guard: G)
where
    G: Framed + Send + 'static,
    W: FnOnce(Held) -> F,
    F: Future,
{
    let StepNow::Acquires { work, .. } = step.as_mut().project() else {
        return;
    };
    let Some(work) = work.take() else { return };
    let held = guard.view();
    if let Err(lost) = held.check() {
        drop(work);
        return step.set(Step::GivesBack {
            release: Box::pin(finish(guard)),
            output: Some(Err(lost)),
        });
    }
    let mut frames = guard.frames();
    // The closure too runs in the frame.
    let entered = frames.enter();
    let future = work(held.clone());
    drop(entered);
    step.set(Step::Works {
        future: Guarding::new(InScope::new(future, frames), held),
        guard: Some(guard),
    });
}

impl<G, W, F> Future for Run<G, W, F>
where
    G: Framed + Send + 'static,
    W: FnOnce(Held) -> F,
    F: Future,
{
    type Output = Result<F::Output, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut step = self.project().step;
        loop {
            match step.as_mut().project() {
                StepNow::Acquires { acquire, .. } => match ready!(acquire.as_mut().poll(cx)) {
                    Ok(guard) => begin(step.as_mut(), guard),
                    Err(error) => return Poll::Ready(Err(error)),
                },
                StepNow::Works { future, guard } => {
                    let output = Some(ready!(future.poll(cx)));
                    let Some(guard) = guard.take() else {
                        panic!("`Run` polled after it was done");
                    };
                    step.set(Step::GivesBack {
                        release: Box::pin(finish(guard)),
                        output,
                    });
                }
                StepNow::GivesBack { release, output } => {
                    ready!(release.as_mut().poll(cx));
                    let Some(output) = output.take() else {
                        panic!("`Run` polled after it was done");
                    };
                    return Poll::Ready(output);
                }
            }
        }
    }
}
