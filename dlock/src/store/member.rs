//! The interface of a member of a [quorum](crate::stores::quorum::Quorum).

use std::sync::Arc;
use std::time::Duration;

use super::{AcquireReply, AcquireRequest, GrantId, Kind, Store, StoreFuture};
use crate::LockKey;

/// A store that can be one of several independent stores that grant a lock together, see [`Store::quorum_member`].
///
/// A member gives the requested lease; a vote with [another lease](super::GivenLease) is not counted.
///
/// ```
/// use dlock::LockKey;
/// use dlock::store::member::{QuorumMember, Vote};
/// use dlock::store::{AcquireRequest, GrantId, Kind, Store, StoreFuture};
/// use std::collections::HashMap;
/// use std::future::ready;
/// use std::sync::{Arc, Mutex};
/// use std::time::{Duration, Instant};
///
/// struct MyStore {
///     data_since: Instant,
///     rows: Mutex<Rows>,
/// }
///
/// struct Rows {
///     grants: HashMap<LockKey, GrantId>,
///     last_token: u64,
/// }
///
/// impl QuorumMember for MyStore {
///     fn vote(self: Arc<Self>, request: AcquireRequest, vote_after: Option<Duration>) -> StoreFuture<Vote> {
///         let up_for = self.data_since.elapsed();
///         if let Some(votes_in) = vote_after.and_then(|after| after.checked_sub(up_for)) {
///             return Box::pin(ready(Ok(Vote::Abstained { votes_in })));
///         }
///         let reply = self.acquire(request);
///         Box::pin(async { reply.await.map(Vote::Cast) })
///     }
///
///     fn raise_fence(
///         self: Arc<Self>,
///         _kind: Kind,
///         key: LockKey,
///         grant: GrantId,
///         at_least: u64,
///     ) -> StoreFuture<bool> {
///         let mut rows = self.rows.lock().unwrap();
///         let is_known = rows.grants.get(&key) == Some(&grant);
///         if is_known {
///             rows.last_token = rows.last_token.max(at_least);
///         }
///         Box::pin(ready(Ok(is_known)))
///     }
/// }
/// # use dlock::store::{
/// #     AcquireReply, Capabilities, ReleaseReply, ReleaseRequest, RenewRequest, Renewal, StoreError,
/// # };
/// # impl Store for MyStore {
/// #     fn capabilities(&self) -> Capabilities { Capabilities::new([Kind::Mutex]) }
/// #     fn acquire(self: Arc<Self>, _: AcquireRequest) -> StoreFuture<AcquireReply> { unimplemented!() }
/// #     fn release(self: Arc<Self>, _: ReleaseRequest) -> StoreFuture<ReleaseReply> { unimplemented!() }
/// #     fn renew(self: Arc<Self>, _: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
/// #         unimplemented!()
/// #     }
/// # }
/// ```
pub trait QuorumMember: Store {
    /// Takes part in an acquire of the quorum.
    ///
    /// A member that may have lost its data grants nothing until every lease is over that it may have forgotten: it
    /// votes only after it has been up with its data for `vote_after`, judged by a mark that it stores with the data.
    /// `None` lets it vote at once. A store that cannot tell fails with
    /// [`Reason::Unsupported`](super::Reason::Unsupported).
    fn vote(self: Arc<Self>, request: AcquireRequest, vote_after: Option<Duration>) -> StoreFuture<Vote>;

    /// Makes every future fencing token of the store greater than `at_least`, if the store still has the grant; returns
    /// whether it has. So all members agree on the token that the quorum gives.
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
    /// The member votes.
    Cast(AcquireReply),
    /// It has not yet been up with its data for long enough.
    Abstained {
        /// Time until it votes.
        votes_in: Duration,
    },
}
