//! Who is asking: the frames that make nested calls re-enter and concurrent branches exclude each other.
//!
//! A *frame* is the dynamic extent of a future that runs inside a hold: the body of a
//! `#[distributed_lock]` function, the call under the lock layer, the closure of
//! [`Lock::run`](crate::Lock::run), or a future wrapped by [`LockGuard::scope`](crate::LockGuard::scope).
//! It travels with the future, wherever that is polled, and frames nest. A spawned task is not part of its
//! parent's frame; [`current`] and [`Scope::wrap`] take it in on purpose.

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;
use tokio::task::Id;

use crate::LockKey;
use crate::backend::Kind;
use crate::client::Shared;
use crate::grants::Grant;
use crate::held::{Held, Members};

/// A hold as its frame remembers it.
#[derive(Clone)]
pub(crate) struct HoldRef {
    pub(crate) id: u64,
    pub(crate) grant: Arc<Grant>,
}

/// A hold around a piece of code, and those that were taken together with it.
#[derive(Clone)]
struct Frame {
    hold: HoldRef,
    all: Option<Arc<Members>>,
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
    chain: Chain,
}

impl Scope {
    /// Runs a future in these frames, whichever task polls it. The frames stay valid for as long as their
    /// holders hold: a hold that has been given back is not there any more.
    pub fn wrap<F: Future>(&self, future: F) -> InScope<F> {
        InScope {
            future: Some(future),
            chain: self.chain.clone(),
        }
    }

    /// The same frames with one hold more inside them; holds that are over are left out.
    pub(crate) fn with(&self, hold: HoldRef) -> Scope {
        self.with_all(&[hold], None)
    }

    /// The same with several holds that were taken together.
    pub(crate) fn with_all(&self, holds: &[HoldRef], all: Option<&Arc<Members>>) -> Scope {
        let is_new = |outer: &HoldRef| holds.iter().any(|hold| hold.id == outer.id);
        let alive = self
            .chain
            .iter()
            .filter(|Frame { hold, .. }| !is_new(hold) && hold.grant.has(hold.id));
        let new = holds.iter().map(|hold| Frame {
            hold: hold.clone(),
            all: all.cloned(),
        });
        Scope {
            chain: alive.cloned().chain(new).collect(),
        }
    }

    /// The nearest live hold of `key` around the asker.
    pub(crate) fn nearest(&self, client: &Arc<Shared>, kind: Kind, key: &LockKey) -> Option<&HoldRef> {
        self.chain.iter().rev().map(|frame| &frame.hold).find(|hold| {
            let grant = &hold.grant;
            std::ptr::eq(grant.client().as_ptr(), &**client)
                && grant.kind == kind
                && grant.key == *key
                && grant.has(hold.id)
        })
    }

    /// Whether the hold with this id is around the asker.
    pub(crate) fn contains(&self, hold: u64) -> bool {
        self.chain.iter().any(|outer| outer.hold.id == hold)
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.chain.iter().map(|frame| &frame.hold.grant.key))
            .finish()
    }
}

/// The frames that the calling code runs in; empty outside of every frame.
#[must_use]
pub fn current() -> Scope {
    let active = ACTIVE.try_with(|slot| match &*slot.borrow() {
        Some(active) if active.task == tokio::task::try_id() => Scope {
            chain: active.chain.clone(),
        },
        _ => Scope::default(),
    });
    // A thread that is ending has no frames any more.
    active.unwrap_or_default()
}

/// The innermost hold whose frame the calling code runs in, and that has not been given back.
///
/// For code deep inside a locked function that wants the fencing token, or to know whether the lock is
/// still held, without having it passed down.
pub(crate) fn innermost() -> Option<Held> {
    let scope = current();
    scope
        .chain
        .iter()
        .rev()
        .find(|Frame { hold, .. }| hold.grant.has(hold.id))
        .map(|Frame { hold, all }| match all {
            Some(all) => Held::of_all(all.clone()),
            None => Held::new(hold.grant.clone()),
        })
}

pin_project! {
    /// A future that runs in frames; made by [`Scope::wrap`].
    #[must_use = "futures do nothing unless polled"]
    pub struct InScope<F> {
        #[pin]
        future: Option<F>,
        chain: Chain,
    }

    impl<F> PinnedDrop for InScope<F> {
        // What a future does when it is dropped, it does in its frame too.
        fn drop(this: Pin<&mut Self>) {
            let mut this = this.project();
            if this.future.is_some() {
                let _entered = enter(this.chain);
                this.future.set(None);
            }
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
        let _entered = enter(this.chain);
        let Some(future) = this.future.as_mut().as_pin_mut() else {
            panic!("`InScope` polled after it was done");
        };
        let output = std::task::ready!(future.poll(cx));
        this.future.set(None);
        Poll::Ready(output)
    }
}

/// Makes `chain` the active frames of this thread until the value is dropped, also by a panic.
fn enter(chain: &Chain) -> Entered {
    let active = Active {
        chain: chain.clone(),
        task: tokio::task::try_id(),
    };
    Entered(
        ACTIVE
            .try_with(|slot| slot.replace(Some(active)))
            .unwrap_or_default(),
    )
}

struct Entered(Option<Active>);

impl Drop for Entered {
    fn drop(&mut self) {
        let outer = self.0.take();
        // Swapped out first: dropping a chain can run code that asks for the active frames.
        drop(ACTIVE.try_with(|slot| slot.replace(outer)));
    }
}
