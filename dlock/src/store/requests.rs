//! Requests for existing grants.

use std::time::Duration;

use super::{GrantId, Kind};
use crate::LockKey;

/// Releases a lock.
///
/// ```
/// use dlock::store::{GrantId, Kind, ReleaseRequest};
/// use std::time::Duration;
///
/// let grant = GrantId::from_parts(0x0192_f3a4, 1);
/// let mut request = ReleaseRequest::new(Kind::Mutex, "order:42".into(), grant);
/// request.keep_for = Duration::from_secs(2); // the rest of a `min_hold`
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ReleaseRequest {
    /// The kind of the lock.
    pub kind: Kind,
    /// The name of the lock.
    pub key: LockKey,
    /// The grant to end; no other is touched.
    pub grant: GrantId,
    /// How long to keep the key held after the release (a `min_hold`); zero ends it now.
    pub keep_for: Duration,
    /// Permits: how many were taken by this grant; 1 for every other kind.
    pub amount: u32,
    /// Whether it undoes an acquire that the store may have refused.
    #[cfg_attr(
        not(feature = "redis"),
        allow(dead_code, reason = "only Redis treats it differently")
    )]
    pub(crate) undoes_acquire: bool,
}

impl ReleaseRequest {
    /// Creates a request that ends a grant at once; for permits, of one permit.
    #[must_use]
    pub fn new(kind: Kind, key: LockKey, grant: GrantId) -> ReleaseRequest {
        ReleaseRequest {
            kind,
            key,
            grant,
            keep_for: Duration::ZERO,
            amount: 1,
            undoes_acquire: false,
        }
    }
}

/// Extends the lease of a grant that the store still has.
///
/// ```
/// use dlock::store::{GrantId, Kind, RenewRequest};
/// use std::time::Duration;
///
/// let grant = GrantId::from_parts(0x0192_f3a4, 1);
/// let request = RenewRequest::new(Kind::Mutex, "order:42".into(), grant, Duration::from_secs(30));
/// # assert_eq!(request.amount, 1);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RenewRequest {
    /// The kind of the lock.
    pub kind: Kind,
    /// The name of the lock.
    pub key: LockKey,
    /// The grant.
    pub grant: GrantId,
    /// The lease it gets, counted from now.
    pub lease: Duration,
    /// Permits: how many were taken by this grant; 1 for every other kind.
    pub amount: u32,
}

impl RenewRequest {
    /// Creates a request that extends a grant; for permits, of one permit.
    #[must_use]
    pub fn new(kind: Kind, key: LockKey, grant: GrantId, lease: Duration) -> RenewRequest {
        RenewRequest {
            kind,
            key,
            grant,
            lease,
            amount: 1,
        }
    }
}
