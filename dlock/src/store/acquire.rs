//! Requests for locks, and their replies.

use std::time::Duration;

use super::{Announce, GivenLease, GrantId, Kind, ReleaseRequest, StoreError};
use crate::LockKey;

/// A request for a lock.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::store::StoreError> {
/// use dlock::store::{AcquireReply, AcquireRequest, GrantId, Kind, Store};
/// use dlock::stores::memory::MemoryStore;
/// use std::{sync::Arc, time::Duration};
///
/// let store = Arc::new(MemoryStore::new());
/// let grant = GrantId::from_parts(0x0192_f3a4, 1);
/// let mut request = AcquireRequest::new(Kind::Mutex, "order:42".into(), grant, Duration::from_secs(30));
/// request.tokens = 3; // one for this caller, two for waiters of the same process
/// let reply = Store::acquire(store, request).await?;
/// assert!(matches!(reply, AcquireReply::Acquired(granted) if granted.last_token == granted.first_token + 2));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AcquireRequest {
    /// The kind of the lock.
    pub kind: Kind,
    /// The name of the lock.
    pub key: LockKey,
    /// The id under which it is granted.
    pub grant: GrantId,
    /// How long the store keeps the grant unless it is renewed.
    pub lease: Duration,
    /// How many fencing tokens to reserve; at least 1. The tokens after the first are for other waiters of the same
    /// process.
    pub tokens: u32,
    /// Fair locks: take a position in the queue when the lock is busy, or keep the position of this id. A
    /// [`release`](super::Store::release) of the same id gives it up.
    pub queue: bool,
    /// Fair locks: time since the last request of this id; `None` for its first. A waiter that has asked before and
    /// finds its position gone was silent for too long, and gets it back if the store
    /// [can do that](super::Capabilities::restores_positions).
    pub last_asked: Option<Duration>,
    /// Read locks: the write grant of the same key that the read is nested in, which does not block it. If there is no such grant,
    /// the reply is busy.
    pub nested_in: Option<GrantId>,
    /// Permits: the total, if none was set before.
    pub permits: Option<u32>,
    /// Permits: the maximum number of held permits after this grant, including its own. The store compares it inside
    /// the acquire with the holders, and does not store it: another request may have another limit. If a total is set,
    /// that applies too; if none is, the limit suffices. See [`Capabilities::limits`](super::Capabilities::limits).
    pub limit: Option<u32>,
    /// Permits: how many to take, all or none; at least 1, and 1 for every other kind.
    pub amount: u32,
    /// Permits, and write locks to which readers yield: the id of the waiter, the same in all its requests. A
    /// [`release`](super::Store::release) of this id gives up its position among waiters for different amounts or ahead
    /// of the readers. `None` if the caller does not wait or takes no position.
    pub waiter: Option<GrantId>,
    /// Plain locks: what to tell the other waiting processes about the outcome.
    pub announce: Announce,
}

impl AcquireRequest {
    /// Creates a request for a lock with one fencing token, without options of single kinds.
    #[must_use]
    pub fn new(kind: Kind, key: LockKey, grant: GrantId, lease: Duration) -> AcquireRequest {
        AcquireRequest {
            kind,
            key,
            grant,
            lease,
            tokens: 1,
            queue: false,
            last_asked: None,
            nested_in: None,
            permits: None,
            limit: None,
            amount: 1,
            waiter: None,
            announce: Announce::Nothing,
        }
    }

    /// Returns the request that releases it.
    pub(crate) fn undone(&self) -> ReleaseRequest {
        ReleaseRequest {
            amount: self.amount,
            undoes_acquire: true,
            ..ReleaseRequest::new(self.kind, self.key.clone(), self.grant)
        }
    }
}

/// The reply to an [`AcquireRequest`].
///
/// ```
/// use dlock::store::AcquireReply;
/// use std::time::Duration;
///
/// fn reply(row: Option<Duration>, next_token: u64) -> AcquireReply {
///     match row {
///         None => AcquireReply::acquired(next_token),
///         Some(left) => AcquireReply::busy(Some(left)),
///     }
/// }
/// # assert!(matches!(reply(None, 7), AcquireReply::Acquired(granted) if granted.first_token == 7));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum AcquireReply {
    /// The lock is granted.
    Acquired(Granted),
    /// Another client holds it.
    Busy(Busy),
    /// Permits: the total is smaller than the request, so that only a change of the total can help. A waiter for that
    /// many blocks no other.
    TooFewPermits,
}

impl AcquireReply {
    /// Creates the reply that the lock is granted, with one fencing token.
    #[must_use]
    pub fn acquired(token: u64) -> AcquireReply {
        AcquireReply::Acquired(Granted::new(token))
    }

    /// Creates the reply that another client holds the lock, whose lease ends in `remaining`; `None` if it does not
    /// end.
    #[must_use]
    pub fn busy(remaining: Option<Duration>) -> AcquireReply {
        AcquireReply::Busy(Busy::new(remaining))
    }

    /// Returns the remaining lease of the current holder, if known and if the lock was not granted.
    pub(crate) fn busy_for(&self) -> Option<Duration> {
        match self {
            AcquireReply::Busy(busy) => busy.remaining,
            AcquireReply::Acquired(_) | AcquireReply::TooFewPermits => None,
        }
    }
}

/// A grant of a store.
///
/// ```
/// use dlock::store::Granted;
///
/// // The store has counted its tokens up by three.
/// let granted = Granted::with_tokens(8, 10);
/// assert_eq!(granted.last_token - granted.first_token + 1, 3);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Granted {
    /// The first of the reserved fencing tokens; greater than every token of this key before.
    pub first_token: u64,
    /// The last of them; equal to the first if there is only one.
    pub last_token: u64,
    /// The lease that the store gave, if it differs from the requested one.
    pub lease: Option<GivenLease>,
    /// Fair locks: the waiters of the same client that directly follow in the queue, in its order, up to the first of
    /// another client, and no more than there are tokens for. They keep their positions.
    pub behind: Vec<GrantId>,
}

impl Granted {
    /// Creates a grant with one fencing token and the requested lease.
    #[must_use]
    pub fn new(token: u64) -> Granted {
        Granted::with_tokens(token, token)
    }

    /// Creates a grant with a block of fencing tokens, from the first to the last.
    #[must_use]
    pub fn with_tokens(first_token: u64, last_token: u64) -> Granted {
        Granted {
            first_token,
            last_token,
            lease: None,
            behind: Vec::new(),
        }
    }

    /// Sets the lease that the store gave.
    ///
    /// ```
    /// use dlock::store::{GivenLease, Granted};
    /// use std::time::Duration;
    ///
    /// // A session of 15 s, last kept alive 4 s before this acquire was called.
    /// let lease = GivenLease::new(Duration::from_secs(15)).elapsed(Duration::from_secs(4));
    /// assert_eq!(lease.left(), Duration::from_secs(11));
    /// let granted = Granted::new(1763856000000000).lease(lease);
    /// # assert_eq!(granted.lease, Some(lease));
    /// ```
    #[must_use]
    pub fn lease(mut self, lease: GivenLease) -> Granted {
        self.lease = Some(lease);
        self
    }

    /// Sets the waiters of the same client that are next in the queue of a fair lock.
    #[must_use]
    pub fn behind(mut self, behind: Vec<GrantId>) -> Granted {
        self.behind = behind;
        self
    }
}

/// Why a lock was not granted: another client holds it.
///
/// ```
/// use dlock::store::Busy;
/// use std::time::Duration;
///
/// // The holder's lease ends in 12 s; a waiter asks again within 1.5 s to keep its position.
/// let busy = Busy::new(Some(Duration::from_secs(12))).again(Duration::from_millis(1500));
/// assert_eq!(busy.remaining, Some(Duration::from_secs(12)));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Busy {
    /// Remaining lease of the current holder, or `None` if it does not expire.
    pub remaining: Option<Duration>,
    /// A waiter must ask again within this time, even without a notification: to keep its position, or to detect that
    /// others have lost theirs.
    pub again: Option<Duration>,
    /// How many processes listen for the release of a plain lock; `None` if the store cannot tell.
    pub listeners: Option<u64>,
    /// For how long a waiter sends no further request, even if it is notified.
    pub(crate) pause: Duration,
}

impl Busy {
    /// Creates it for a holder whose lease ends in `remaining`; `None` if it does not end.
    #[must_use]
    pub fn new(remaining: Option<Duration>) -> Busy {
        Busy {
            remaining,
            ..Busy::default()
        }
    }

    /// Sets the time within which a waiter must ask again.
    #[must_use]
    pub fn again(mut self, again: Duration) -> Busy {
        self.again = Some(again);
        self
    }

    /// Sets how many processes listen for the release.
    #[must_use]
    pub fn listeners(mut self, listeners: u64) -> Busy {
        self.listeners = Some(listeners);
        self
    }
}

/// The reply to a request for several locks at once.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::store::StoreError> {
/// use dlock::store::{AcquireAllReply, AcquireRequest, GrantId, Kind, Store};
/// use dlock::stores::memory::MemoryStore;
/// use std::{sync::Arc, time::Duration};
///
/// let store = Arc::new(MemoryStore::new());
/// let request = |key: &str, number| {
///     let grant = GrantId::from_parts(0x0192_f3a4, number);
///     AcquireRequest::new(Kind::Mutex, key.into(), grant, Duration::from_secs(30))
/// };
/// let reply = Store::acquire_all(store, vec![request("a", 1), request("b", 2)]).await?;
/// assert!(matches!(reply, AcquireAllReply::Acquired { grants } if grants.len() == 2));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum AcquireAllReply {
    /// All of them are granted.
    Acquired {
        /// The grant for each of the requests, in their order.
        grants: Vec<Granted>,
    },
    /// Another client holds one of them, so none is granted.
    Busy {
        /// The first such request.
        at: usize,
        /// Remaining lease of that holder, or `None` if it does not expire.
        remaining: Option<Duration>,
    },
    /// One of them cannot be locked, so none is granted.
    Failed {
        /// The request.
        at: usize,
        /// The reason; the operation as a whole was not done.
        error: StoreError,
    },
}
