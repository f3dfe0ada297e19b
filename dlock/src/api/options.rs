//! The methods that set options: defined once, for everything that is acquired with
//! [`LockOptions`](crate::LockOptions).

/// Defines the named methods of a type that sets its options by `fn with(self, change: impl FnOnce(LockOptions) ->
/// LockOptions) -> Self`, each with additions to its documentation.
macro_rules! option_methods {
    ($($(#[$more:meta])* $method:ident),* $(,)?) => {
        $(option_methods!(@$method $(#[$more])*);)*
    };
    (@options $(#[$more:meta])*) => {
        /// Replaces all options.
        ///
        $(#[$more])*
        pub fn options(self, options: crate::LockOptions) -> Self {
            self.with(|_| options)
        }
    };
    (@lease $(#[$more:meta])*) => {
        /// Sets the lease that the watchdog renews, every third of it, for as long as the guard lives; the client's
        /// ([`LockClientBuilder::lease`](crate::LockClientBuilder::lease), 30 s) by default. After its holder crashes,
        /// a lock becomes available when the lease expires.
        ///
        $(#[$more])*
        pub fn lease(self, lease: std::time::Duration) -> Self {
            self.with(|options| options.lease(lease))
        }
    };
    (@fixed_lease $(#[$more:meta])*) => {
        /// Sets a lease that is not renewed: the hold is lost after this time. By default the lease is
        /// [renewed](Self::lease) for as long as the guard lives.
        ///
        $(#[$more])*
        pub fn fixed_lease(self, lease: std::time::Duration) -> Self {
            self.with(|options| options.fixed_lease(lease))
        }
    };
    (@wait $(#[$more:meta])*) => {
        /// Sets how long `acquire` and similar methods wait; without limit by default. The store's reply must arrive
        /// within that time, too.
        ///
        $(#[$more])*
        pub fn wait(self, wait: std::time::Duration) -> Self {
            self.with(|options| options.wait(wait))
        }
    };
    (@max_hold $(#[$more:meta])*) => {
        /// Limits how long a hold lasts: then renewal stops and the hold is lost, even if the holder is alive. No limit
        /// by default.
        ///
        $(#[$more])*
        pub fn max_hold(self, max_hold: std::time::Duration) -> Self {
            self.with(|options| options.max_hold(max_hold))
        }
    };
    (@min_hold $(#[$more:meta])*) => {
        /// Keeps the lock taken for at least this long from its acquisition on, even if it is released before. No
        /// minimum by default.
        ///
        $(#[$more])*
        pub fn min_hold(self, min_hold: std::time::Duration) -> Self {
            self.with(|options| options.min_hold(min_hold))
        }
    };
    (@max_waiters $(#[$more:meta])*) => {
        /// Limits how many callers may wait in this process at the same time; further callers are refused at once with
        /// [`Error::TooManyWaiters`](crate::Error::TooManyWaiters). No limit by default; an unbounded queue turns
        /// overload into an outage, so set a limit where requests come from outside. Waiting readers of a read-write
        /// lock are counted apart from its waiting writers.
        ///
        $(#[$more])*
        pub fn max_waiters(self, max_waiters: usize) -> Self {
            self.with(|options| options.max_waiters(max_waiters))
        }
    };
    (@group $(#[$more:meta])*) => {
        /// Sets the group by which metrics distinguish locks, as in `order:{order_id}`: the kind of work, never the
        /// name of a lock. See [`LockOptions::group`](crate::LockOptions::group).
        ///
        $(#[$more])*
        pub fn group(self, group: &'static str) -> Self {
            self.with(|options| options.group(group))
        }
    };
    (@local_handoffs $(#[$more:meta])*) => {
        /// Limits how many times this process hands a lock off among its own callers before it releases it to the
        /// store; 4096 by default, and 0 sends every release to the store.
        ///
        $(#[$more])*
        pub fn local_handoffs(self, local_handoffs: u32) -> Self {
            self.with(|options| options.local_handoffs(local_handoffs))
        }
    };
}

pub(crate) use option_methods;
