//! The methods that guards and views of holds have in common: defined once, so that all of them mean the same.

/// Defines methods of a [`View`](crate::api::held::View): the named ones, each with additions to its documentation.
macro_rules! hold_methods {
    ($($(#[$more:meta])* $method:ident),* $(,)?) => {
        $(hold_methods!(@$method $(#[$more])*);)*
    };
    (@key $(#[$more:meta])*) => {
        /// Returns the name of the lock.
        ///
        $(#[$more])*
        #[must_use]
        pub fn key(&self) -> &crate::LockKey {
            &crate::api::held::View::first(self).key
        }
    };
    (@keys $(#[$more:meta])*) => {
        /// Returns all names that are held, in their order: several for a [`MultiLock`](crate::MultiLock).
        ///
        $(#[$more])*
        pub fn keys(&self) -> impl Iterator<Item = &crate::LockKey> {
            crate::api::held::View::grants(self).iter().map(|grant| &grant.key)
        }
    };
    (@id $(#[$more:meta])*) => {
        /// Returns the id of this hold, `<client uuid>:<number>`: the text of
        /// [`LockEvent::grant`](crate::operations::LockEvent::grant), of
        /// [`HoldReport::grant`](crate::operations::HoldReport::grant) and of the log, and that of
        /// [`Holder::id`](crate::store::Holder::id), by which `dlock show` names it and
        /// [`LockClient::revoke`](crate::LockClient::revoke) finds it. Sends nothing. A lock that is handed off inside the
        /// process keeps its id.
        ///
        $(#[$more])*
        #[must_use]
        pub fn id(&self) -> String {
            crate::api::held::View::first(self).id().to_string()
        }
    };
    (@ids $(#[$more:meta])*) => {
        /// Returns all names with the id of each hold. See [`LockGuard::id`](crate::LockGuard::id).
        ///
        $(#[$more])*
        pub fn ids(&self) -> impl Iterator<Item = (&crate::LockKey, String)> {
            let grants = crate::api::held::View::grants(self).iter();
            grants.map(|grant| (&grant.key, grant.id().to_string()))
        }
    };
    (@fencing_token $(#[$more:meta])*) => {
        /// Returns the fencing token of this acquisition: greater than the token of every earlier acquisition of this
        /// name ([with rare exceptions](crate#what-is-promised)).
        ///
        /// Send it along with each write, and have the resource refuse a write whose token is smaller than one that it
        /// has seen. A token that the resource does not check protects nothing.
        ///
        $(#[$more])*
        #[must_use]
        pub fn fencing_token(&self) -> u64 {
            crate::api::held::View::first(self).token
        }
    };
    (@fencing_token_of $(#[$more:meta])*) => {
        /// Returns the fencing token of one of several locks; `None` for a name that is not among them. See
        /// [`LockGuard::fencing_token`](crate::LockGuard::fencing_token).
        ///
        $(#[$more])*
        #[must_use]
        pub fn fencing_token_of(&self, key: impl Into<crate::LockKey>) -> Option<u64> {
            let key = key.into();
            let mut grants = crate::api::held::View::grants(self).iter();
            grants.find(|grant| grant.key == key).map(|grant| grant.token)
        }
    };
    (@fencing_tokens $(#[$more:meta])*) => {
        /// Returns all names with the fencing token of each: a write to what a name protects carries the token of that
        /// name.
        ///
        $(#[$more])*
        pub fn fencing_tokens(&self) -> impl Iterator<Item = (&crate::LockKey, u64)> {
            let grants = crate::api::held::View::grants(self).iter();
            grants.map(|grant| (&grant.key, grant.token))
        }
    };
    (@is_held $(#[$more:meta])*) => {
        /// Returns whether it is still held, by the clock as of this call; with several locks, whether all of them are.
        ///
        $(#[$more])*
        #[must_use]
        pub fn is_held(&self) -> bool {
            !matches!(self.state(), crate::HoldState::Lost(_))
        }
    };
    (@state $(#[$more:meta])*) => {
        /// Returns the state, by the clock as of this call: held, suspect or lost. Of several locks it is the worst:
        /// lost when one of them is.
        ///
        $(#[$more])*
        #[must_use]
        pub fn state(&self) -> crate::HoldState {
            crate::api::held::state(crate::api::held::View::grants(self))
        }
    };
    (@remaining $(#[$more:meta])*) => {
        /// Returns how long it is certain to be held, by the clock as of this call; zero when it is lost. Each renewal,
        /// every third of the lease, starts the lease anew. Of several locks it is the shortest.
        ///
        $(#[$more])*
        #[must_use]
        pub fn remaining(&self) -> std::time::Duration {
            crate::api::held::remaining(crate::api::held::View::grants(self))
        }
    };
    (@is_renewed $(#[$more:meta])*) => {
        /// Returns whether the watchdog renews the lease; false for a [fixed](crate::LockOptions::fixed_lease) lease.
        ///
        $(#[$more])*
        #[must_use]
        pub fn is_renewed(&self) -> bool {
            crate::api::held::View::grants(self).iter().all(|grant| grant.renewed)
        }
    };
    (@check $(#[$more:meta])*) => {
        /// Returns `Ok` while it is held, by the clock as of this call.
        ///
        $(#[$more])*
        ///
        /// # Errors
        ///
        /// [`Error::Lost`](crate::Error::Lost), with the reason and the lock.
        pub fn check(&self) -> Result<(), crate::Error> {
            crate::api::held::check(crate::api::held::View::grants(self))
        }
    };
    (@lost $(#[$more:meta])*) => {
        /// Waits until it is lost and returns why; at once if it is already lost. The future keeps nothing alive: after
        /// the release of the last guard it completes with [`Loss::Released`](crate::Loss::Released).
        ///
        $(#[$more])*
        ///
        /// # Cancel safety
        ///
        /// Cancel safe.
        pub fn lost(&self) -> crate::Lost {
            crate::Lost::new(crate::api::held::View::view(self))
        }
    };
    (@ensure $(#[$more:meta])*) => {
        /// Makes sure that it is held for at least `at_least` from now on: renews the lease if less remains. Call it
        /// before a step that must not be interrupted.
        ///
        $(#[$more])*
        ///
        /// # Errors
        ///
        /// [`Error::Lost`](crate::Error::Lost) when it is lost, [`Error::InvalidOption`](crate::Error::InvalidOption)
        /// when a fixed or shorter lease or `max_hold` does not allow that much, and the store's failure when it does
        /// not answer; it is then still held for [`remaining`](Self::remaining). Of several locks, the error of the
        /// first that fails; the others may have been renewed.
        ///
        /// # Cancel safety
        ///
        /// Cancel safe.
        pub async fn ensure(&self, at_least: std::time::Duration) -> Result<(), crate::Error> {
            crate::api::held::ensure(crate::api::held::View::grants(self), at_least).await
        }
    };
    (@note $(#[$more:meta])*) => {
        /// Sets the note on what it is held for, for the person on call, see [`Lock::note`](crate::Lock::note). It
        /// replaces the earlier note.
        ///
        $(#[$more])*
        pub fn note(&self, note: impl AsRef<str>) {
            let note: std::sync::Arc<str> = crate::base::report::shortened(note.as_ref()).into();
            for grant in crate::api::held::View::grants(self) {
                grant.set_note(Some(note.clone()));
            }
        }
    };
    (@revoked $(#[$more:meta])*) => {
        /// Waits until the holder is asked to stop, by [`LockClient::revoke`](crate::LockClient::revoke), and returns
        /// by whom and why; `None` once it is not held any more, or not all of it. The lock stays held: finish soon, and release it.
        ///
        $(#[$more])*
        ///
        /// # Cancel safety
        ///
        /// Cancel safe.
        pub fn revoked(
            &self,
        ) -> impl Future<Output = Option<crate::operations::Intervention>> + Send + 'static {
            crate::api::held::revoked(crate::api::held::View::grants(self).to_vec())
        }
    };
    (@why_lost $(#[$more:meta])*) => {
        /// Returns why it was lost, as far as this process and the store know: for a broken hold also by whom and for
        /// which reason. `None` while it is held. If the store no longer has the hold, this asks the store, for at most
        /// the client's timeout.
        ///
        $(#[$more])*
        ///
        /// # Cancel safety
        ///
        /// Cancel safe.
        pub fn why_lost(
            &self,
        ) -> impl Future<Output = Option<crate::operations::LossReason>> + Send + 'static {
            crate::api::held::why_lost(crate::api::held::View::grants(self).to_vec())
        }
    };
    (@held $(#[$more:meta])*) => {
        /// Returns a view of this hold: cloneable, without keeping anything alive.
        ///
        $(#[$more])*
        #[must_use]
        pub fn held(&self) -> crate::Held {
            crate::api::held::View::view(self)
        }
    };
    (@scope $(#[$more:meta])*) => {
        /// Runs a future in the frame of this guard: inside, an acquire of the same lock re-enters. Branches of a
        /// `join!` inside still exclude each other.
        ///
        /// Only the frame of this guard is added to those in which the future is polled. So a future that runs in
        /// another task is in the frame of this guard alone, wherever this was called.
        ///
        /// The future borrows nothing from the guard. If the guard is released while the future runs, the frame is void
        /// and an acquire inside is an ordinary one.
        ///
        $(#[$more])*
        pub fn scope<F: Future>(&self, future: F) -> crate::scope::InScope<F> {
            crate::scope::InScope::new(future, crate::api::run::Framed::frames(self))
        }
    };
    (@frame $(#[$more:meta])*) => {
        /// Returns the frame of this guard alone, as a handle: for types that are polled but are not futures, such as a
        /// body or a stream.
        ///
        $(#[$more])*
        #[must_use]
        pub fn frame(&self) -> crate::scope::Scope {
            crate::api::run::Framed::frames(self).handle()
        }
    };
    (@run $(#[$more:meta])*) => {
        /// Runs a future in the frame of this guard, and drops it when the hold is lost.
        ///
        $(#[$more])*
        ///
        /// # Errors
        ///
        /// [`Error::Lost`](crate::Error::Lost) when it was lost before the future was done.
        pub fn run<F: Future>(
            &self,
            future: F,
        ) -> impl Future<Output = Result<F::Output, crate::Error>> + use<F> {
            crate::api::run::Guarding::in_frame_of(self, future)
        }
    };
    (@release $(#[$more:meta])*) => {
        /// Releases what is held, and waits for the outcome.
        ///
        $(#[$more])*
        ///
        /// # Errors
        ///
        /// - [`Error::Lost`](crate::Error::Lost) when it was lost before. The release is sent all the same; it never
        ///   touches the hold of another client.
        /// - [`Error::OutcomeUnknown`](crate::Error::OutcomeUnknown) or another failure of the store: the release is
        ///   repeated in the background, unless the store refused it for good, as for want of a permission. The lease is the
        ///   last resort.
        ///
        /// # Panics
        ///
        /// When it has to wait in a tokio runtime without timers (`enable_time`), which is not that of the client.
        ///
        /// # Cancel safety
        ///
        /// Cancel safe: once polled, the release continues if the future is dropped. Kept without being polled, it is not repeated
        /// after a failure, and a shutdown waits for it.
        pub fn release(self) -> impl Future<Output = Result<(), crate::Error>> + Send + 'static {
            crate::api::guard::Holding::release_hold(self)
        }
    };
}

pub(crate) use hold_methods;
