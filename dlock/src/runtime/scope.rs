//! The caller's scope: frames that make nested calls re-enter and concurrent branches exclude each other.
//!
//! A *frame* is the dynamic extent of a future that runs inside a hold: the body of a `#[distributed_lock]` function,
//! the call under the lock layer, the closure of [`Lock::run`](crate::Lock::run), or a future wrapped by
//! [`LockGuard::scope`](crate::LockGuard::scope). It travels with the future, wherever that is polled, and frames nest.
//! A spawned task is not part of its parent's frame unless [`Scope::wrap`] takes the [`current`] scope along.
//!
//! A wrapper adds its frames to those in which the future is polled, and carries nothing else: a future that is created
//! inside one frame and polled inside another is in the second, and in those that it was given.

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;
use smallvec::SmallVec;
use tokio::task::Id;

use crate::LockKey;
use crate::base::broken;
use crate::runtime::client::Shared;
use crate::runtime::grants::Grant;
use crate::runtime::members::{Holds, Members};
use crate::store::Kind;

/// A hold as its frame records it.
#[derive(Clone)]
pub(crate) struct HoldRef {
    pub(crate) id: u64,
    pub(crate) grant: Arc<Grant>,
}

/// A hold around a piece of code, and those that were acquired together with it.
#[derive(Clone)]
struct Frame {
    hold: HoldRef,
    all: Option<Arc<Members>>,
}

impl Frame {
    /// Whether its hold is not released yet.
    fn is_alive(&self) -> bool {
        self.hold.grant.has(self.hold.id)
    }
}

/// The holds around a piece of code, outermost first. Flat: a link to the parent frame would keep every
/// frame ever entered alive.
type Chain = Arc<[Frame]>;

struct Active {
    chain: Chain,
    /// The task that polls the frame. Another task polled from within (a `LocalSet`, a nested runtime) is
    /// not part of the frame.
    task: Option<Id>,
}

impl Active {
    /// Returns the frames, if the same task asks.
    fn chain(&self) -> Option<&Chain> {
        let is_same = self.task == tokio::task::try_id() || broken!(FrameCarriedIntoSpawnedTask);
        is_same.then_some(&self.chain)
    }
}

thread_local! {
    static ACTIVE: RefCell<Option<Active>> = const { RefCell::new(None) };
}

/// The frames that a piece of code runs in; a handle to carry them into a spawned task.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// let lock = client.lock("report");
/// let again = lock.clone();
/// lock.run(move |_held| async move {
///     // A spawned task does not inherit the frame, unless it is told to.
///     let inner = dlock::scope::current().wrap(async move { again.acquire().await.map(drop) });
///     tokio::spawn(inner).await.unwrap()
/// }).await??;
/// # Ok(()) }
/// ```
#[derive(Clone, Default)]
pub struct Scope {
    chain: Option<Chain>,
}

impl Scope {
    /// Runs a future in these frames too, whichever task polls it: they are added, as the inner ones, to those in which
    /// the future is polled. A frame ends when its hold is released.
    pub fn wrap<F: Future>(&self, future: F) -> InScope<F> {
        InScope {
            future: Some(future),
            frames: Frames::adding(self.chain.clone()),
        }
    }

    fn frames(&self) -> &[Frame] {
        self.chain.as_deref().unwrap_or_default()
    }

    /// The nearest live hold of `key` around the caller.
    pub(crate) fn nearest(&self, client: &Arc<Shared>, kind: Kind, key: &LockKey) -> Option<&HoldRef> {
        self.frames().iter().rev().map(|frame| &frame.hold).find(|hold| {
            let grant = &hold.grant;
            std::ptr::eq(grant.client().as_ptr(), &**client)
                && grant.kind == kind
                && grant.key == *key
                && grant.has(hold.id)
        })
    }

    /// Whether a hold of this client is around the caller.
    pub(crate) fn is_inside(&self, client: &Arc<Shared>) -> bool {
        let is_of_client = |frame: &Frame| std::ptr::eq(frame.hold.grant.client().as_ptr(), &**client);
        (self.frames().iter()).any(|frame| is_of_client(frame) && frame.is_alive())
    }

    /// Whether the hold with this id is around the caller.
    pub(crate) fn contains(&self, hold: u64) -> bool {
        self.frames().iter().any(|outer| outer.hold.id == hold)
    }

    /// The grants around the caller that are held.
    pub(crate) fn grants(&self) -> impl Iterator<Item = &Arc<Grant>> {
        let alive = self.frames().iter().filter(|frame| frame.is_alive());
        alive.map(|frame| &frame.hold.grant)
    }

    /// The ids of the holds around the caller, each once.
    pub(crate) fn holds(&self) -> impl Iterator<Item = u64> {
        self.frames().iter().map(|outer| outer.hold.id)
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.frames().iter().map(|frame| &frame.hold.grant.key))
            .finish()
    }
}

/// Returns the frames that the calling code runs in; empty outside of every frame.
#[must_use]
pub fn current() -> Scope {
    let chain = ACTIVE.try_with(|slot| slot.borrow().as_ref().and_then(Active::chain).cloned());
    // A thread that is ending has no frames any more.
    Scope {
        chain: chain.unwrap_or_default(),
    }
}

/// Returns the innermost unreleased hold whose frame the calling code runs in.
///
/// For code deep inside a locked function that needs the fencing token, or whether the lock is still held, without
/// having it passed down.
pub(crate) fn innermost() -> Option<Holds> {
    let scope = current();
    let mut alive = scope.frames().iter().rev().filter(|frame| frame.is_alive());
    alive.next().map(|Frame { hold, all }| match all {
        Some(all) => Holds::All(all.clone()),
        None => Holds::One(hold.grant.clone()),
    })
}

/// The frames that a future adds to those in which it is polled.
#[derive(Default)]
pub(crate) struct Frames {
    adds: Option<Chain>,
    /// The surrounding frames of the last poll, and the joined frames.
    seen: Option<(Option<Chain>, Chain)>,
}

impl Frames {
    fn adding(chain: Option<Chain>) -> Frames {
        Frames {
            adds: chain.filter(|chain| !chain.is_empty()),
            seen: None,
        }
    }

    /// The frame of holds that were acquired together.
    pub(crate) fn of(holds: impl Iterator<Item = HoldRef>, all: Option<&Arc<Members>>) -> Frames {
        let frames = holds.map(|hold| Frame {
            hold,
            all: all.cloned(),
        });
        let own: Chain = frames.collect();
        if broken!(ScopeCarriesAllFrames)
            && let Some(outer) = current().chain
        {
            return Frames::adding(Some(join(&outer, &own)));
        }
        Frames::adding(Some(own))
    }

    /// Returns a handle to them.
    pub(crate) fn handle(&self) -> Scope {
        Scope {
            chain: self.adds.clone(),
        }
    }

    /// Returns the joined frames, rebuilt only if the surrounding ones have changed.
    fn around(&mut self, outer: Option<&Chain>) -> Option<Chain> {
        let adds = self.adds.as_ref()?;
        let same = |seen: &Option<Chain>| seen.as_ref().map(Arc::as_ptr) == outer.map(Arc::as_ptr);
        if let Some((_, both)) = self.seen.as_ref().filter(|(seen, _)| same(seen)) {
            return Some(both.clone());
        }
        let both = match outer {
            Some(outer) if !Arc::ptr_eq(outer, adds) => join(outer, adds),
            _ => adds.clone(),
        };
        self.seen = Some((outer.cloned(), both.clone()));
        Some(both)
    }

    /// Makes these frames, and those around them, the active ones of this thread until the value is dropped, also by a
    /// panic.
    pub(crate) fn enter(&mut self) -> Entered {
        let outer = ACTIVE.try_with(RefCell::take).unwrap_or_default();
        let surrounding = outer.as_ref().and_then(Active::chain);
        let chain = self.around(surrounding).or_else(|| surrounding.cloned());
        let active = chain.map(|chain| Active {
            chain,
            task: tokio::task::try_id(),
        });
        let _ = ACTIVE.try_with(|slot| slot.replace(active));
        Entered(outer)
    }
}

/// Appends the inner frames to the outer ones; ended holds are left out.
fn join(outer: &Chain, inner: &Chain) -> Chain {
    let mut new: SmallVec<[u64; 4]> = inner.iter().map(|frame| frame.hold.id).collect();
    new.sort_unstable();
    let stays = |frame: &&Frame| new.binary_search(&frame.hold.id).is_err() && frame.is_alive();
    outer.iter().filter(stays).chain(inner.iter()).cloned().collect()
}

pub(crate) struct Entered(Option<Active>);

impl Drop for Entered {
    fn drop(&mut self) {
        let outer = self.0.take();
        if broken!(FrameCarriedIntoSpawnedTask) {
            return;
        }
        // Swapped out first: dropping a chain can run code that reads the active frames.
        drop(ACTIVE.try_with(|slot| slot.replace(outer)));
    }
}

pin_project! {
    /// A future that runs in frames; created by [`Scope::wrap`] and [`LockGuard::scope`](crate::LockGuard::scope).
    ///
    /// Futures that are polled later, each in the frames of the code that added it:
    ///
    /// ```
    /// use dlock::scope::{self, InScope};
    /// use futures_util::stream::FuturesUnordered;
    ///
    /// struct Writes<F> {
    ///     running: FuturesUnordered<InScope<F>>,
    /// }
    ///
    /// impl<F: Future> Writes<F> {
    ///     fn add(&self, write: F) {
    ///         self.running.push(scope::current().wrap(write));
    ///     }
    /// }
    /// ```
    #[must_use = "futures do nothing unless polled"]
    pub struct InScope<F> {
        #[pin]
        future: Option<F>,
        frames: Frames,
    }

    impl<F> PinnedDrop for InScope<F> {
        fn drop(this: Pin<&mut Self>) {
            this.end();
        }
    }
}

impl<F> InScope<F> {
    pub(crate) fn new(future: F, frames: Frames) -> InScope<F> {
        InScope {
            future: Some(future),
            frames,
        }
    }

    /// Replaces its frames by these.
    pub(crate) fn enter(self: Pin<&mut Self>, frames: Frames) {
        *self.project().frames = frames;
    }

    /// Drops the future in its frame, so that its destructors run there.
    pub(crate) fn end(self: Pin<&mut Self>) {
        let mut this = self.project();
        if this.future.is_some() {
            let _entered = this.frames.enter();
            this.future.set(None);
        }
    }
}

impl<F> fmt::Debug for InScope<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InScope").finish_non_exhaustive()
    }
}

impl<F: Future> Future for InScope<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let mut this = self.project();
        let _entered = this.frames.enter();
        let Some(future) = this.future.as_mut().as_pin_mut() else {
            panic!("`InScope` polled after it was done");
        };
        let output = std::task::ready!(future.poll(cx));
        this.future.set(None);
        Poll::Ready(output)
    }
}
