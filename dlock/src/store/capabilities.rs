//! What a store can do.

use std::time::Duration;

use super::Kind;
use crate::Error;

/// How reliably waiters are notified of a release.
///
/// ```
/// use dlock::store::{Capabilities, Kind, Notifications};
///
/// // A store without a way to notify: waiters ask now and then.
/// let capabilities = Capabilities::new([Kind::Mutex]).notifications(Notifications::None);
/// assert_eq!(capabilities.notifications, Notifications::None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Notifications {
    /// Each release is notified, or the waiter learns that it may have missed one.
    Certain,
    /// A notification may be lost.
    Lossy,
    /// There are no notifications: waiters poll, see [`Watch::polling`](super::Watch::polling).
    None,
}

/// The features of a store; options that need more are refused before the store is asked.
///
/// ```
/// use dlock::store::{Capabilities, Kind, Notifications};
/// use std::time::Duration;
///
/// let capabilities = Capabilities::new([Kind::Mutex])
///     .shortest_lease(Duration::from_secs(2))
///     .min_hold(true)
///     .notifications(Notifications::Certain);
/// assert!(capabilities.has(Kind::Mutex) && !capabilities.has(Kind::Fair));
/// assert!(capabilities.min_hold);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The name of the store in errors.
    pub name: String,
    /// The kinds of locks that the store has.
    pub kinds: Vec<Kind>,
    /// Whether an acquire can reserve several fencing tokens. Without this a lock is not handed off inside a process.
    pub token_blocks: bool,
    /// The shortest lease; zero where any is long enough.
    pub shortest_lease: Duration,
    /// The longest lease, if there is one.
    pub longest_lease: Option<Duration>,
    /// Whether a grant can end at a fixed time while its client lives on.
    pub fixed_lease: bool,
    /// Whether the store itself keeps a key held for a while after its release.
    pub min_hold: bool,
    /// Whether readers can yield to a waiting writer.
    pub prefer_writers: bool,
    /// Fair locks: whether a waiter that lost its position because it sent no request for too long gets it back when it
    /// asks again. Without this it joins at the end.
    pub restores_positions: bool,
    /// Whether an acquire of permits can have a maximum of held permits,
    /// [`AcquireRequest::limit`](super::AcquireRequest::limit).
    pub limits: bool,
    /// How reliable notifications of releases are.
    pub notifications: Notifications,
    /// How many locks the store can grant in one operation, all or none. Larger sets are acquired lock by lock.
    pub largest_set: usize,
    /// Whether holders can be inspected and listed, and locks released by force.
    pub inspection: bool,
}

impl Capabilities {
    /// Creates the capabilities of a store with locks of these kinds and nothing else: one fencing token for each
    /// acquire, leases of any length, one lock at a time, no notifications, no inspection.
    #[must_use]
    pub fn new(kinds: impl IntoIterator<Item = Kind>) -> Capabilities {
        Capabilities {
            name: "this store".to_owned(),
            kinds: kinds.into_iter().collect(),
            token_blocks: false,
            shortest_lease: Duration::ZERO,
            longest_lease: None,
            fixed_lease: true,
            min_hold: false,
            prefer_writers: false,
            restores_positions: false,
            limits: false,
            notifications: Notifications::None,
            largest_set: 1,
            inspection: false,
        }
    }

    /// Sets the name of the store in errors; "this store" by default.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Capabilities {
        self.name = name.into();
        self
    }

    /// Sets whether an acquire can reserve several fencing tokens. Without this a lock is not handed off inside a
    /// process.
    #[must_use]
    pub fn token_blocks(mut self, can: bool) -> Capabilities {
        self.token_blocks = can;
        self
    }

    /// Sets the shortest lease; none by default.
    #[must_use]
    pub fn shortest_lease(mut self, lease: Duration) -> Capabilities {
        self.shortest_lease = lease;
        self
    }

    /// Sets the longest lease; none by default.
    #[must_use]
    pub fn longest_lease(mut self, lease: Duration) -> Capabilities {
        self.longest_lease = Some(lease);
        self
    }

    /// Sets whether a grant can end at a fixed time while its client lives on; `true` by default, and `false` if the
    /// lease is that of a whole session.
    #[must_use]
    pub fn fixed_lease(mut self, can: bool) -> Capabilities {
        self.fixed_lease = can;
        self
    }

    /// Sets whether the store itself keeps a key held for a while after its release.
    #[must_use]
    pub fn min_hold(mut self, can: bool) -> Capabilities {
        self.min_hold = can;
        self
    }

    /// Sets whether readers can yield to a waiting writer.
    #[must_use]
    pub fn prefer_writers(mut self, can: bool) -> Capabilities {
        self.prefer_writers = can;
        self
    }

    /// Sets whether a waiter for a fair lock that lost its position because it sent no request for too long gets it back;
    /// `false` by default.
    #[must_use]
    pub fn restores_positions(mut self, can: bool) -> Capabilities {
        self.restores_positions = can;
        self
    }

    /// Sets whether an acquire of permits can have a maximum of held permits; `false` by default.
    #[must_use]
    pub fn limits(mut self, can: bool) -> Capabilities {
        self.limits = can;
        self
    }

    /// Sets how reliable notifications of releases are.
    #[must_use]
    pub fn notifications(mut self, notifications: Notifications) -> Capabilities {
        self.notifications = notifications;
        self
    }

    /// Sets how many locks the store can grant in one operation, all or none; 1 by default. Larger sets are acquired
    /// lock by lock.
    #[must_use]
    pub fn largest_set(mut self, locks: usize) -> Capabilities {
        self.largest_set = locks.max(1);
        self
    }

    /// Sets whether holders can be inspected and listed, and locks released by force.
    #[must_use]
    pub fn inspection(mut self, can: bool) -> Capabilities {
        self.inspection = can;
        self
    }

    /// Returns whether the store has locks of a kind.
    #[must_use]
    pub fn has(&self, kind: Kind) -> bool {
        self.kinds.contains(&kind)
    }

    /// Refuses a kind that the store does not have: for code that knows its kinds before it acquires, such as a service
    /// that should not start on the wrong store. [`LockClientBuilder::require`](crate::LockClientBuilder::require) does
    /// this for a whole client.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// use dlock::LockKind;
    /// use dlock::store::{Capabilities, Kind};
    ///
    /// let client = dlock::LockClient::memory();
    /// client.capabilities().require(LockKind::Fair)?;
    ///
    /// let plain = Capabilities::new([Kind::Mutex]).name("the archive");
    /// let error = plain.require(LockKind::Fair).unwrap_err().to_string();
    /// assert!(error.contains("fair is not supported: the archive has lock"));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`], which names the store, its kinds, and what to use instead.
    pub fn require(&self, kind: impl Into<Kind>) -> Result<(), Error> {
        let kind = kind.into();
        match self.has(kind) {
            true => Ok(()),
            false => Err(self.lacks(kind)),
        }
    }

    /// Returns the error for a kind that the store does not have.
    pub(crate) fn lacks(&self, kind: Kind) -> Error {
        let kinds: Vec<_> = self.kinds.iter().map(Kind::to_string).collect();
        Error::Unsupported {
            what: format!("a {} of kind {kind}", kind.noun()),
            reason: format!(
                "{} has {}; {}",
                self.name,
                kinds.join(", "),
                self.instead_of(kind)
            ),
        }
    }

    /// Says what to use instead of a kind that the store does not have.
    fn instead_of(&self, kind: Kind) -> String {
        let (plain, stores) = match kind {
            Kind::Mutex => (None, "a store with plain locks"),
            Kind::Fair => (
                Some("whose waiters have no order between processes"),
                "a store with fair locks: Redis, Valkey, PostgreSQL, etcd or ZooKeeper",
            ),
            Kind::Read | Kind::Write => (
                Some("which readers do not share"),
                "a store with read-write locks: Redis, Valkey, PostgreSQL, etcd or ZooKeeper",
            ),
            Kind::Fenced => (
                Some("whose fencing tokens grow too"),
                "a store with fenced locks: Redis, Valkey, PostgreSQL, etcd, ZooKeeper or MySQL",
            ),
            Kind::Permit => (
                None,
                "a store with semaphores: Redis, Valkey, PostgreSQL, etcd or ZooKeeper",
            ),
            Kind::Unowned => (
                None,
                "a store with permits without owners: Redis, Valkey, PostgreSQL or etcd",
            ),
            Kind::Latch => (
                None,
                "a store with latches: Redis, Valkey, PostgreSQL, etcd or ZooKeeper",
            ),
        };
        match plain.filter(|_| self.has(Kind::Mutex)) {
            Some(plain) => format!("use a plain lock, {plain}, or {stores}"),
            None => format!("use {stores}"),
        }
    }
}
