//! The options that layers with a lease have in common: written once, so that all of them mean the same.

/// The methods. `$what` is what a request acquires.
macro_rules! methods {
    ($what:literal) => {
        /// The lease that is kept up by renewal; the client's by default (30 s). After a crash of this process the
        #[doc = concat!($what, " becomes available when the lease expires.")]
        pub fn lease(self, lease: Duration) -> Self {
            self.set(|options| options.lease(lease))
        }

        #[doc = concat!("A lease that is not renewed: the ", $what, " is lost after this long. By default it is renewed")]
        /// for as long as the request takes.
        pub fn fixed_lease(self, lease: Duration) -> Self {
            self.set(|options| options.fixed_lease(lease))
        }

        #[doc = concat!("How long a request waits for its ", $what, " before it is [`TaskError::Busy`]; by default it does")]
        /// not wait. A request that waits occupies its worker, and its place below [`at_most_here`](Self::at_most_here).
        pub fn wait(self, wait: Duration) -> Self {
            self.set(|options| options.wait(wait))
        }

        /// How many requests may wait for one key in this process; one more is [`TaskError::Store`] with
        /// [`Error::TooManyWaiters`]. No limit by default.
        pub fn max_waiters(self, max_waiters: usize) -> Self {
            self.set(|options| options.max_waiters(max_waiters))
        }

        #[doc = concat!("The longest time that the ", $what, " is held; then it is lost and the work is dropped. No limit by")]
        /// default.
        pub fn max_hold(self, max_hold: Duration) -> Self {
            self.set(|options| options.max_hold(max_hold))
        }

        #[doc = concat!("Keeps the ", $what, " taken for at least this long, also when the work ends sooner. No minimum by")]
        /// default.
        pub fn min_hold(self, min_hold: Duration) -> Self {
            self.set(|options| options.min_hold(min_hold))
        }

        #[doc = concat!("The group by which metrics tell the ", $what, "s of this layer from others: the kind of work, never a key.")]
        /// None by default; see [`LockOptions::group`].
        pub fn group(self, group: &'static str) -> Self {
            self.set(|options| options.group(group))
        }

        $crate::task::options::at_most_here!();
    };
}

macro_rules! at_most_here {
    () => {
        /// At most so many requests at a time in this process, over all services that this layer or a clone of it makes:
        /// those that wait and those that run. The service is not ready while there are as many, so that a worker fetches
        /// no more jobs. At least 1; no bound by default.
        ///
        /// A service that was ready and is dropped returns its place; a clone of it has none and must become ready itself.
        pub fn at_most_here(mut self, most: usize) -> Self {
            self.bound = Bound::of(most);
            self
        }
    };
}

pub(super) use {at_most_here, methods};
