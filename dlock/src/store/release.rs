//! The reply of a store to a release.

/// The reply to a [`ReleaseRequest`](super::ReleaseRequest).
///
/// ```
/// use dlock::store::ReleaseReply;
///
/// fn reply(rows_deleted: u64) -> ReleaseReply {
///     match rows_deleted {
///         0 => ReleaseReply::NotHeld { repeated: false },
///         _ => ReleaseReply::Released { receivers: None }, // this store counts no subscribers
///     }
/// }
/// # assert!(matches!(reply(1), ReleaseReply::Released { .. }));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseReply {
    /// The grant existed and has ended, or keeps the key for as long as requested.
    Released {
        /// How many subscriptions to the key's releases were notified, one for each client that waits for the key,
        /// including the caller's own; `None` if the store cannot tell. A process that hands a lock off among its own
        /// callers yields to other processes from time to time, if there are any.
        receivers: Option<u64>,
    },
    /// The store has no such grant.
    NotHeld {
        /// Whether this operation was sent more than once, so that an earlier copy may have ended the grant.
        repeated: bool,
    },
}
