//! Asking for locks.

use std::time::Duration;

use super::{Announce, GivenLease, GrantId, Kind, ReleaseRequest, StoreError};
use crate::LockKey;

/// Asks for a lock.
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
    /// How many fencing tokens to reserve; at least 1. Those beyond the first are for other waiters of the same
    /// process.
    pub tokens: u32,
    /// Fair locks: take a position in the queue when the lock is busy, or keep the position that this id has. A
    /// [`release`](super::Store::release) of the same id gives it up.
    pub queue: bool,
    /// Fair locks: for how long this id has not asked; `None` where it asks for the first time. A waiter that has asked
    /// before and finds its position given away was silent for too long, and gets it back.
    pub last_asked: Option<Duration>,
    /// Read locks: the write grant of the same key that the read is nested in, which does not block it.
    pub nested_in: Option<GrantId>,
    /// Permits: the total, if none was set before.
    pub permits: Option<u32>,
    /// Permits: the most that may be held when this is granted, those of this request included. It is judged inside the
    /// acquire, against the holders, and not stored: another request may name another limit. Where a total is set, that
    /// binds as well; where none is, this suffices. See [`Capabilities::limits`](super::Capabilities::limits).
    pub limit: Option<u32>,
    /// Permits: how many to take, all or none; at least 1, which is what every other kind asks for.
    pub amount: u32,
    /// Permits, and write locks that readers shall stand back for: the id of the waiter, the same over all its
    /// requests. Its position, among waiters for different amounts or in front of the readers, is given up by a
    /// [`release`](super::Store::release) of this id. `None` if the caller does not wait or takes no position.
    pub waiter: Option<GrantId>,
    /// Plain locks: what the other processes that wait for the key are told about the outcome.
    pub announce: Announce,
}

impl AcquireRequest {
    /// A request for a lock with one fencing token, without options of single kinds.
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

    /// The request that releases it.
    pub(crate) fn undone(&self) -> ReleaseRequest {
        ReleaseRequest {
            kind: self.kind,
            key: self.key.clone(),
            grant: self.grant,
            keep_for: Duration::ZERO,
            amount: self.amount,
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
    /// Permits: there are fewer in all than were asked for, so that only a change of their number can help. A waiter for so
    /// many keeps no other waiting.
    TooFewPermits,
}

impl AcquireReply {
    /// The lock is granted, with one fencing token.
    #[must_use]
    pub fn acquired(token: u64) -> AcquireReply {
        AcquireReply::Acquired(Granted::new(token))
    }

    /// Another client holds the lock, whose lease ends in `remaining`; `None` if it does not end.
    #[must_use]
    pub fn busy(remaining: Option<Duration>) -> AcquireReply {
        AcquireReply::Busy(Busy::new(remaining))
    }

    /// Remaining lease of the holder that is in the way, if known and if the lock was not granted.
    pub(crate) fn busy_for(&self) -> Option<Duration> {
        match self {
            AcquireReply::Busy(busy) => busy.remaining,
            AcquireReply::Acquired(_) | AcquireReply::TooFewPermits => None,
        }
    }
}

/// What a store granted.
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
    /// The last of them; the first where there is only one.
    pub last_token: u64,
    /// The lease that was given, if it differs from the requested one.
    pub lease: Option<GivenLease>,
    /// Fair locks: the waiters of the same client that come right behind in the queue, in its order, up to the first of
    /// another client, and no more than there are tokens for. They keep their positions.
    pub behind: Vec<GrantId>,
}

impl Granted {
    /// A grant with one fencing token and the lease that was asked for.
    #[must_use]
    pub fn new(token: u64) -> Granted {
        Granted::with_tokens(token, token)
    }

    /// A grant with a block of fencing tokens, from the first to the last.
    #[must_use]
    pub fn with_tokens(first_token: u64, last_token: u64) -> Granted {
        Granted {
            first_token,
            last_token,
            lease: None,
            behind: Vec::new(),
        }
    }

    /// Sets the lease that was given.
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
    /// A waiter must ask again within this time, even without a notification: to keep a position that is only kept for
    /// waiters that ask, or to see whether others have lost theirs.
    pub again: Option<Duration>,
    /// How many processes listen for the release of a plain lock; `None` where the store cannot tell.
    pub listeners: Option<u64>,
}

impl Busy {
    /// Another client holds the lock, whose lease ends in `remaining`; `None` if it does not end.
    #[must_use]
    pub fn new(remaining: Option<Duration>) -> Busy {
        Busy {
            remaining,
            ..Busy::default()
        }
    }

    /// Sets within which time a waiter must ask again.
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
        /// What was granted for each of the requests, in their order.
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
        /// The reason; the step as a whole was not done.
        error: StoreError,
    },
}
