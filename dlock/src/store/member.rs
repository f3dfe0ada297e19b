//! What a store must be able to do to be a member of a [quorum](crate::stores::quorum::Quorum).

use std::sync::Arc;
use std::time::Duration;

use super::{AcquireReply, AcquireRequest, GrantId, Kind, Store, StoreFuture};
use crate::LockKey;

/// The ability to be one of several independent stores that grant a lock together, see
/// [`Store::quorum_member`].
///
/// A member gives the lease that is asked for: one that gives [another](super::GivenLease) is not counted.
pub trait QuorumMember: Store {
    /// Takes part in an acquire of the quorum.
    ///
    /// A member that may have lost its data grants nothing until every lease is over that it may have forgotten: it votes
    /// only when it has been up with its data for `vote_after`, by a mark that it keeps beside them. `None` lets it vote at
    /// once. A store that cannot tell fails with [`Reason::Unsupported`](super::Reason::Unsupported).
    fn vote(self: Arc<Self>, request: AcquireRequest, vote_after: Option<Duration>) -> StoreFuture<Vote>;

    /// Makes every fencing token that the store gives from now on greater than `at_least`, if it still knows the grant;
    /// returns whether it does. So that the quorum gives one token for all of its members.
    fn raise_fence(
        self: Arc<Self>,
        kind: Kind,
        key: LockKey,
        grant: GrantId,
        at_least: u64,
    ) -> StoreFuture<bool>;
}

/// The reply of a member of a quorum to an acquire.
///
/// ```
/// use dlock::store::AcquireReply;
/// use dlock::store::member::Vote;
/// use std::time::Duration;
///
/// fn vote(up_for: Duration, vote_after: Duration, reply: AcquireReply) -> Vote {
///     match vote_after.checked_sub(up_for) {
///         Some(votes_in) if !votes_in.is_zero() => Vote::Abstained { votes_in },
///         _ => Vote::Cast(reply),
///     }
/// }
/// # let _ = vote(Duration::ZERO, Duration::from_secs(1), AcquireReply::acquired(1));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Vote {
    /// The member has its say.
    Cast(AcquireReply),
    /// It has not been up with its data for long enough.
    Abstained {
        /// When it will have been.
        votes_in: Duration,
    },
}
