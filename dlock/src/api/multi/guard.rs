//! What holding several locks gives.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio_util::sync::CancellationToken;

use crate::HoldState;
use crate::api::guard::{Holding, LockGuard};
use crate::api::held::Held;
use crate::api::run::{Framed, Guarding};
use crate::runtime::members::Members;
use crate::runtime::scope::{Frames, InScope, Scope};
use crate::{Error, LockKey, Loss};

/// In the order of their names; never none. One who asks for what may be several has mostly one.
pub(super) type Guards = SmallVec<[LockGuard; 1]>;

/// Several locks that are held, until the guard is released or dropped.
///
/// It is a [`LockGuard`] of each, and **when one of them is lost, the whole is**: [`is_held`](Self::is_held)
/// says no, [`lost`](Self::lost) tells which it was, [`run`](Self::run) drops what it runs. The others stay
/// taken until the guard is gone, so that nobody else begins while this caller still finds out.
///
/// Dropping the guard gives all of them back in the background, as for a [`LockGuard`].
#[must_use = "the locks are given back when the guard is dropped"]
pub struct MultiGuard {
    guards: Guards,
    held: Held,
}

impl MultiGuard {
    /// One guard for each key, of which `first` has the first.
    pub(super) fn new(first: LockGuard, others: impl Iterator<Item = LockGuard>) -> MultiGuard {
        let (alone, grant) = (first.held(), first.grant().clone());
        let mut guards = Guards::from_buf([first]);
        guards.extend(others);
        let held = match guards.get(1..) {
            None | Some([]) => alone,
            Some(others) => {
                let others = others.iter().map(|guard| guard.grant().clone());
                Held::of_all(Arc::new(Members::new(grant, others)))
            }
        };
        MultiGuard { guards, held }
    }

    /// The names of the locks, in their order.
    pub fn keys(&self) -> impl Iterator<Item = &LockKey> {
        self.guards.iter().map(LockGuard::key)
    }

    /// The fencing token of one of the locks; `None` for a name that is not among them. See
    /// [`LockGuard::fencing_token`].
    #[must_use]
    pub fn fencing_token(&self, key: impl Into<LockKey>) -> Option<u64> {
        self.held.fencing_token_of(key)
    }

    /// All names with the fencing token of each: a write to what is locked by a name goes along with the
    /// token of that name.
    pub fn fencing_tokens(&self) -> impl Iterator<Item = (&LockKey, u64)> {
        let each = self.guards.iter();
        each.map(|guard| (guard.key(), guard.fencing_token()))
    }

    /// Whether all of them are still held, by the clock as of this call.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held.is_held()
    }

    /// The same with the doubts: lost when one of them is, suspect when one of them is.
    #[must_use]
    pub fn state(&self) -> HoldState {
        self.held.state()
    }

    /// How long all of them are held for sure: the shortest of their times. See [`LockGuard::remaining`].
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.held.remaining()
    }

    /// Whether the watchdog renews all of them; not so where one has a fixed lease.
    #[must_use]
    pub fn is_renewed(&self) -> bool {
        self.held.is_renewed()
    }

    /// Waits until the first of them is lost, and tells which and why; immediately when one is. The future
    /// keeps nothing alive: after the guard was released it ends with [`Loss::Released`].
    ///
    /// Cancel safe.
    pub fn lost(&self) -> impl Future<Output = (LockKey, Loss)> + Send + use<> {
        self.held.first_lost()
    }

    /// A token that is cancelled when one of them is lost or released.
    #[must_use]
    pub fn cancellation_token(&self) -> CancellationToken {
        self.held.cancellation_token()
    }

    /// Makes sure that all of them are held for `at_least` this long from now on. See [`LockGuard::ensure`].
    ///
    /// # Errors
    ///
    /// As for [`LockGuard::ensure`], for the first of them of which it fails; the others may have been
    /// renewed.
    ///
    /// Cancel safe.
    pub async fn ensure(&self, at_least: Duration) -> Result<(), Error> {
        self.held.ensure(at_least).await
    }

    /// A view of all of them: cloneable, and keeping nothing alive.
    #[must_use]
    pub fn held(&self) -> Held {
        self.held.clone()
    }

    /// Runs a future in the frames of all of them: an acquire of any of them inside re-enters. See
    /// [`LockGuard::scope`].
    pub fn scope<F: Future>(&self, future: F) -> InScope<F> {
        InScope::new(future, self.frames())
    }

    /// The frames of all of them, and no others, as a handle. See [`LockGuard::frame`].
    #[must_use]
    pub fn frame(&self) -> Scope {
        self.frames().handle()
    }

    /// Runs a future in the frames of all of them, and drops it when one is lost.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`], which names it, when one of them was lost before the future was done.
    pub fn run<F: Future>(&self, future: F) -> impl Future<Output = Result<F::Output, Error>> + use<F> {
        Guarding::new(self.scope(future), self.held())
    }

    /// Gives all of them back and waits for the outcome. None is left out because another one fails or was
    /// lost.
    ///
    /// # Errors
    ///
    /// That of the one of which it fails, as for [`LockGuard::release`], and [`Error::NotReleased`] with all
    /// of them when it fails for several.
    ///
    /// Cancel safe: once polled, the releases go on when the future is dropped.
    pub fn release(self) -> impl Future<Output = Result<(), Error>> + Send + 'static {
        let mut this = self;
        async move {
            // All are on their way before the first answer is waited for. The last goes first: those who wait
            // for several wait for the first, and find the others free then.
            let releases: Vec<_> = this
                .guards
                .iter_mut()
                .rev()
                .map(|guard| guard.hold_mut().leave())
                .collect();
            let answers = releases.into_iter().rev().map(async |release| match release {
                Some(outcome) => outcome?.await,
                None => Ok(()),
            });
            let answers = join_all(answers).await;
            let mut failures: Vec<_> = answers.into_iter().filter_map(Result::err).collect();
            match (failures.pop(), failures.is_empty()) {
                (None, _) => Ok(()),
                (Some(only), true) => Err(only),
                (Some(last), false) => {
                    failures.push(last);
                    Err(Error::NotReleased { failures })
                }
            }
        }
    }
}

impl Framed for MultiGuard {
    fn frames(&self) -> Frames {
        let holds = self.guards.iter().map(|guard| guard.hold().hold_ref().clone());
        Frames::of(holds, self.held.members())
    }
}

impl Holding for MultiGuard {
    fn view(&self) -> Held {
        self.held()
    }

    fn give_back(self) -> impl Future<Output = Result<(), Error>> + Send {
        self.release()
    }
}

impl Drop for MultiGuard {
    // The last first, as for a release.
    fn drop(&mut self) {
        while let Some(guard) = self.guards.pop() {
            drop(guard);
        }
    }
}

impl fmt::Debug for MultiGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MultiGuard")
            .field("fencing_tokens", &self.fencing_tokens().collect::<Vec<_>>())
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}
