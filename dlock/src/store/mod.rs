#![doc = include_str!("seam.md")]

mod acquire;
mod announce;
mod anywhere;
mod bind;
mod capabilities;
pub mod counter;
pub(crate) mod credentials;
pub mod doctor;
mod doubts;
mod failure;
mod grant_id;
mod hub;
mod lease;
pub mod member;
pub mod operations;
pub(crate) mod options;
pub mod queue;
pub(crate) mod record_view;
pub(crate) mod records;
mod release;
mod renewal;
mod requests;
mod scheme;
pub(crate) mod slots;
mod told;
pub(crate) mod url;
mod watch;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

pub use self::acquire::{AcquireAllReply, AcquireReply, AcquireRequest, Busy, Granted};
pub use self::announce::Announce;
pub(crate) use self::anywhere::sleep_anywhere;
pub use self::anywhere::timeout_anywhere;
pub(crate) use self::bind::Renewable;
pub use self::bind::{Bind, BoundGrant};
pub use self::capabilities::{Capabilities, Notifications};
use self::counter::Counters;
pub use self::doubts::{Doubt, DoubtSender, Doubts};
pub use self::failure::{Outcome, Reason, StoreError};
pub use self::grant_id::GrantId;
pub use self::hub::Hub;
pub use self::lease::GivenLease;
use self::member::QuorumMember;
use self::operations::Operations;
pub use self::release::ReleaseReply;
pub use self::renewal::{Lane, Renewal};
pub use self::requests::{ReleaseRequest, RenewRequest};
pub use self::scheme::{OpenRequest, Scheme};
pub use self::watch::Watch;
pub(crate) use self::watch::{Notification, TAKEN, changed};
use crate::LockKey;
#[doc(hidden)]
pub use crate::base::cause::describe;
pub use crate::base::holder::Holder;
pub use crate::base::kind::Kind;
use crate::store::doctor::Diagnose;
use crate::store::records::Records;

/// How often a waiter polls a store without notifications.
pub(crate) const POLLED_EVERY: Duration = Duration::from_millis(200);

/// The reply to an operation in flight. Dropping it does not cancel the operation.
pub type StoreFuture<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'static>>;

/// A store that can hold locks. See the [module](crate::store) for the rules of every method.
///
/// A wrapper forwards the methods that it does not change, and declares the capabilities of what it forwards:
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::LockClient;
/// use dlock::store::{
///     AcquireReply, AcquireRequest, Capabilities, Kind, ReleaseReply, ReleaseRequest, RenewRequest, Renewal,
///     Store, StoreError, StoreFuture,
/// };
/// use dlock::stores::memory::MemoryStore;
/// use std::sync::Arc;
///
/// /// Logs each request for a lock.
/// struct Logged(Arc<dyn Store>);
///
/// impl Store for Logged {
///     fn capabilities(&self) -> Capabilities {
///         Capabilities::new([Kind::Mutex])
///     }
///     fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
///         println!("{} for {:?}", request.key, request.lease);
///         self.0.clone().acquire(request)
///     }
///     fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
///         self.0.clone().release(request)
///     }
///     fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
///         self.0.clone().renew(requests)
///     }
/// }
///
/// let store = Logged(Arc::new(MemoryStore::new()));
/// let client = LockClient::builder().store(store).build().await?;
/// client.lock("report").acquire().await?.release().await?;
/// # Ok(()) }
/// ```
pub trait Store: Send + Sync + 'static {
    /// Returns what the store can do. Called once per client.
    fn capabilities(&self) -> Capabilities;

    /// Grants the lock, or reports the current holder. Never waits for the holder, and replies in bounded time: a
    /// caller without a limit waits for the reply, and the log warns of that after a while.
    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply>;

    /// Ends a grant and wakes the waiters of the key.
    ///
    /// For the id of an acquire with an unknown outcome it returns `Ok` only when that acquire can no longer take
    /// effect.
    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply>;

    /// Renews grants of one lane; the replies are in the order of the requests.
    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>>;

    /// Returns the holders of the key: none, one, or several readers or permits.
    ///
    /// There is one [`Holder`] for each grant, but one for each permit of a grant of several. A grant that is kept by its
    /// `min_hold` is among them.
    ///
    /// The default fails with [`Reason::Unsupported`].
    fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
        let _ = key;
        unsupported("this store shows no holders")
    }

    /// Returns the locks whose names begin with `prefix`, in no order. It scans all keys: meant for people and tools,
    /// not for a running service.
    ///
    /// The default fails with [`Reason::Unsupported`].
    fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
        let _ = prefix;
        unsupported("this store shows no holders")
    }

    /// Ends every grant of the key and wakes the waiters; returns whether there was one.
    ///
    /// The default fails with [`Reason::Unsupported`].
    fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool> {
        let _ = key;
        unsupported("this store shows no holders")
    }

    /// Subscribes to the releases of a key. `grant` is the id of the waiter, for kinds whose waiters are woken one by
    /// one. A [`Hub`] creates watches; by default the waiter polls every 200 ms.
    fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        let _ = (kind, key, grant);
        Watch::polling(POLLED_EVERY)
    }

    /// Returns the operations on counters, which semaphores and latches need. `None` if the store has none.
    fn counters(self: Arc<Self>) -> Option<Arc<dyn Counters>> {
        None
    }

    /// Returns the store as a member of a [quorum](crate::stores::quorum::Quorum). `None` if it cannot be one.
    fn quorum_member(self: Arc<Self>) -> Option<Arc<dyn QuorumMember>> {
        None
    }

    /// Returns the lane of a key. Called often, and under a mutex: it must return at once and call no client.
    fn lane(&self, _key: &LockKey) -> Lane {
        Lane::default()
    }

    /// Returns which keys can be acquired in one call of [`acquire_all`](Self::acquire_all): those with the same
    /// number. By default none: a call for several keys acquires one after the other, and releases all when one of them
    /// is busy.
    fn together(&self, _kind: Kind, _key: &LockKey) -> Option<u32> {
        None
    }

    /// Grants all of these locks or none, in one operation; never waits. Only called for keys that are
    /// [`together`](Self::together). If the outcome is unknown, the core releases each of the grants.
    fn acquire_all(self: Arc<Self>, _requests: Vec<AcquireRequest>) -> StoreFuture<AcquireAllReply> {
        unsupported("this store takes one lock at a time")
    }

    /// Returns the records that this store keeps beside its locks, over the same connections. `None` if it keeps none.
    fn records(self: Arc<Self>) -> Option<Records> {
        None
    }

    /// Says why there are no [`records`](Self::records), and how to get some.
    fn no_records(&self) -> &'static str {
        "this store has locks only"
    }

    /// Returns the small entries beside the locks with which clients publish their presence and ask each other. `None`
    /// if the store keeps none.
    fn operations(self: Arc<Self>) -> Option<Arc<dyn Operations>> {
        None
    }

    /// Explains why the last acquire of a key was not granted, beyond its reply; `None` if there is nothing to add.
    fn explain(&self, _kind: Kind, _key: &LockKey) -> Option<Arc<str>> {
        None
    }

    /// Reports lanes whose grants became suspect: a server was reconnected after a broken connection, or another one
    /// took over. The client confirms each grant there at once.
    fn doubts(&self) -> Doubts {
        Doubts::never()
    }

    /// Whether the store certainly has sent nothing since then, as it had no connection. A call whose time is over then reports
    /// [`Unreachable`](crate::Error::Unreachable), and not [`OutcomeUnknown`](crate::Error::OutcomeUnknown), although its request
    /// still waits to be sent: it is undone along with it. By default it may have been sent. It must return at once.
    fn was_unreachable_since(&self, _since: tokio::time::Instant) -> bool {
        false
    }

    /// Returns the checks of this store, for [`LockClient::doctor`](crate::LockClient::doctor). `None` if it has none.
    fn diagnose(self: Arc<Self>) -> Option<Arc<dyn Diagnose>> {
        None
    }
}

fn unsupported<T: Send + 'static>(what: &str) -> StoreFuture<T> {
    Box::pin(std::future::ready(Err(StoreError::not_done(
        Reason::Unsupported,
        what,
    ))))
}
