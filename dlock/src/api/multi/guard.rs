//! A guard of several locks.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use futures_util::future::join_all;
use smallvec::SmallVec;

use crate::Error;
use crate::api::guard::{Holding, LockGuard};
use crate::api::held::{Held, View};
use crate::api::methods::hold_methods;
use crate::api::run::Framed;
use crate::runtime::emit::trace::Acquired;
use crate::runtime::grants::Grant;
use crate::runtime::members::Members;
use crate::runtime::scope::Frames;

/// In the order of their names; never empty. Usually it has one element.
pub(super) type Guards = SmallVec<[LockGuard; 1]>;

/// Several held locks, until the guard is released or dropped.
///
/// It is a [`LockGuard`] of each, and **when one of them is lost, the whole is lost**: [`is_held`](Self::is_held)
/// returns false, [`lost`](Self::lost) completes, [`check`](Self::check) says which one it was, [`run`](Self::run)
/// drops its future. The others stay held until the guard is gone, so that no other holder begins before this caller
/// knows.
///
/// Dropping the guard releases all of them in the background, as for a [`LockGuard`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// let guard = client.multi(["account:7", "account:3"]).acquire().await?;
///
/// let debit = guard.fencing_token_of("account:7"); // goes along with the write to account 7
/// let credit = guard.fencing_token_of("account:3");
/// assert!(debit.is_some() && credit.is_some());
/// guard.check()?; // both are still held
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[must_use = "the locks are released when the guard is dropped"]
pub struct MultiGuard {
    guards: Guards,
    held: Held,
}

impl Acquired for MultiGuard {
    fn each_grant(&self, with: &mut dyn FnMut(&Grant)) {
        self.guards.iter().for_each(|guard| with(guard.grant()));
    }
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

    hold_methods! {
        keys,
        /// ```
        /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
        /// let client = dlock::LockClient::memory();
        /// let guard = client.multi(["account:7", "account:3"]).acquire().await?;
        /// for (key, id) in guard.ids() {
        ///     println!("{key} is held as {id}");
        /// }
        /// # Ok(()) }
        /// ```
        ids,
        fencing_token_of,
        fencing_tokens,
        is_held,
        state,
        remaining,
        is_renewed,
        check,
        /// It completes when the first of them is lost; [`check`](Self::check) says which.
        lost,
        ensure,
        /// Each of them gets it.
        note,
        /// The first of them whose holder is asked to stop.
        revoked,
        /// The first of them that was lost; [`check`](Self::check) says which.
        why_lost,
        held,
        scope,
        frame,
        run,
        /// Each is released, even if another one fails or was lost. If several fail,
        /// [`Error::NotReleased`](crate::Error::NotReleased) has all failures.
        release,
    }
}

impl Framed for MultiGuard {
    fn frames(&self) -> Frames {
        let holds = self.guards.iter().map(|guard| guard.hold().hold_ref().clone());
        Frames::of(holds, self.held.members())
    }
}

impl View for MultiGuard {
    fn grants(&self) -> &[Arc<Grant>] {
        self.held.grants()
    }

    fn first(&self) -> &Arc<Grant> {
        self.held.first()
    }

    fn view(&self) -> Held {
        self.held.clone()
    }
}

impl Holding for MultiGuard {
    fn release_hold(self) -> impl Future<Output = Result<(), Error>> + Send + 'static {
        let mut this = self;
        async move {
            if let [only] = &mut *this.guards {
                return only.hold_mut().release_now().await;
            }
            // All are sent before the first reply is awaited. The last key goes first: a waiter for several keys waits
            // for the first key, and then finds the others available.
            let releases = this.guards.iter_mut().rev();
            let releases = releases.map(|guard| guard.hold_mut().release_now());
            let releases: Vec<_> = releases.collect();
            // Boxed, so that the release of a single lock is small.
            let answers = Box::pin(join_all(releases.into_iter().rev())).await;
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

impl Drop for MultiGuard {
    // In reverse order, as for a release.
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
