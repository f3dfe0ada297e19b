//! Records of work that may be requested again: see [`crate::record`].

use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::base::observed::log;
pub use crate::store::record_view::{ForgetReply, RecordLook, RecordState, RecordView};
pub use crate::store::slots::{SlotOutcome, SlotReply, SlotRequest, slot_of_fingerprint};
use crate::store::{POLLED_EVERY, Reason, StoreError, StoreFuture, Watch};

/// The key of a record: a name without readable origin, such as a hash.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::record::RecordKey;
///
/// let key = RecordKey::new("payment-7f3a")?;
/// assert_eq!(key.as_str(), "payment-7f3a");
/// assert!(RecordKey::new("with space").is_err());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordKey(Arc<str>);

impl RecordKey {
    /// Creates a key. It becomes part of names on the store: 1 to 128 letters, digits, `-` and `_`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`](crate::Error::InvalidKey) for anything else.
    pub fn new(key: impl AsRef<str>) -> Result<RecordKey, crate::Error> {
        let key = key.as_ref();
        let plain = |c: u8| c.is_ascii_alphanumeric() || c == b'-' || c == b'_';
        if key.is_empty() || key.len() > 128 || !key.bytes().all(plain) {
            return Err(crate::Error::InvalidKey {
                key: crate::LockKey::from(key).to_string(),
                reason: "a record's key has 1 to 128 letters, digits, - and _ (hash what has more)"
                    .to_owned(),
            });
        }
        Ok(RecordKey(key.into()))
    }

    /// Returns the key as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub(crate) fn shared(&self) -> Arc<str> {
        self.0.clone()
    }
}

/// Identifies a claim of a record: new for every request, never used again.
///
/// ```
/// use dlock::record::ClaimToken;
///
/// assert_ne!(ClaimToken::new(), ClaimToken::new());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ClaimToken(Arc<str>);

impl ClaimToken {
    /// Creates a random token.
    #[must_use]
    #[allow(
        clippy::new_without_default,
        reason = "no two are equal, so none is the default"
    )]
    pub fn new() -> ClaimToken {
        ClaimToken(crate::base::chance::uuid().to_string().into())
    }

    /// Returns the token as it is stored.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A digest of the request, so that a different request under the same key is detected.
pub type Fingerprint = [u8; 32];

/// What happens to a claim whose owner is gone without a result.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock::record::{ClaimReply, ClaimRequest, ClaimToken, OnOrphan, RecordKey};
/// use std::time::Duration;
///
/// let records = dlock::LockClient::memory().records()?;
/// let (key, token) = (RecordKey::new("payment-7")?, ClaimToken::new());
/// let (lease, retention) = (Duration::from_secs(10), Duration::from_secs(24 * 60 * 60));
/// let mut request = ClaimRequest::new(key.clone(), token.clone(), [0; 32], lease, retention);
/// request.on_orphan = OnOrphan::Leave; // a person looks into it
/// # assert!(matches!(records.claim(request).await?, ClaimReply::Claimed { .. }));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum OnOrphan {
    /// The next claim takes it over and does the work again, as the next attempt. The default.
    #[default]
    TakeOver,
    /// It is not taken over: [`ClaimReply::Orphan`] until the retention is over.
    Leave,
}

/// A claim of a record.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock::record::{ClaimReply, ClaimRequest, ClaimToken, RecordKey};
/// use std::time::Duration;
///
/// let records = dlock::LockClient::memory().records()?;
/// let (key, token) = (RecordKey::new("payment-7")?, ClaimToken::new());
/// let (lease, retention) = (Duration::from_secs(10), Duration::from_secs(24 * 60 * 60));
/// let request = ClaimRequest::new(key.clone(), token.clone(), [0; 32], lease, retention);
/// assert!(matches!(records.claim(request).await?, ClaimReply::Claimed { attempt: 1, .. }));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ClaimRequest {
    /// The key of the record.
    pub key: RecordKey,
    /// Identifies the claim.
    pub token: ClaimToken,
    /// The digest of the request.
    pub fingerprint: Fingerprint,
    /// How long the claim lasts unless it is extended.
    pub lease: Duration,
    /// How long the record is kept from now on.
    pub retention: Duration,
    /// What happens to an orphan.
    pub on_orphan: OnOrphan,
}

impl ClaimRequest {
    /// Creates a claim that takes over orphans.
    #[must_use]
    pub fn new(
        key: RecordKey,
        token: ClaimToken,
        fingerprint: Fingerprint,
        lease: Duration,
        retention: Duration,
    ) -> ClaimRequest {
        ClaimRequest {
            key,
            token,
            fingerprint,
            lease,
            retention,
            on_orphan: OnOrphan::default(),
        }
    }
}

/// The reply to a [`ClaimRequest`]. Checked in this order: a record that cannot be read is an error, then mismatch (of
/// orphans too), result, live claim, orphan.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock::record::{ClaimReply, ClaimRequest, ClaimToken, RecordKey};
/// use std::time::Duration;
///
/// let records = dlock::LockClient::memory().records()?;
/// let (key, token) = (RecordKey::new("payment-7")?, ClaimToken::new());
/// let (lease, retention) = (Duration::from_secs(10), Duration::from_secs(24 * 60 * 60));
/// let request = ClaimRequest::new(key.clone(), token.clone(), [0; 32], lease, retention);
/// match records.claim(request).await? {
///     ClaimReply::Claimed { attempt, fence } => println!("attempt {attempt}, with fencing token {fence}"),
///     ClaimReply::Completed { response } => println!("done before: {response:?}"),
///     ClaimReply::InProgress { remaining, .. } => println!("try again in {remaining:?}"),
///     ClaimReply::Mismatch => println!("the key was used for another request"),
///     _ => println!("an attempt began, and its owner is gone"),
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClaimReply {
    /// The caller does the work.
    Claimed {
        /// 1 for the first attempt, and one more for each take-over.
        attempt: u32,
        /// A fencing token: greater than that of every earlier claim of this record.
        fence: u64,
    },
    /// The work was done, with this result.
    Completed {
        /// The stored result, byte for byte.
        response: Vec<u8>,
    },
    /// Another claim is in progress.
    InProgress {
        /// The remaining lease of that claim.
        remaining: Duration,
        /// The number of that attempt.
        attempt: u32,
    },
    /// The key was used for something else: another fingerprint.
    Mismatch,
    /// An attempt began, and its owner is gone. Only with [`OnOrphan::Leave`].
    Orphan {
        /// The number of that attempt.
        attempt: u32,
    },
}

/// The reply to a change that only the owner of the claim may make.
///
/// ```
/// use dlock::record::{ClaimToken, OwnerReply, RecordKey, Records};
/// use dlock::store::StoreError;
/// use std::time::Duration;
///
/// const RETENTION: Duration = Duration::from_secs(24 * 60 * 60);
///
/// /// Whether later requests get this receipt.
/// async fn keep(
///     records: &Records,
///     key: &RecordKey,
///     token: &ClaimToken,
///     receipt: &str,
/// ) -> Result<bool, StoreError> {
///     let reply = records.complete(key, token, receipt.into(), RETENTION).await?;
///     Ok(reply == OwnerReply::Done) // otherwise the lease ended, and another attempt took over
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let records = dlock::LockClient::memory().records()?;
/// # assert!(!keep(&records, &RecordKey::new("payment-7")?, &ClaimToken::new(), "paid").await?);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OwnerReply {
    /// Done; or it was done before, by the same token.
    Done,
    /// The claim does not belong to the caller, or no longer does. Nothing was changed.
    NotOwner,
    /// To an extension: a transaction of the owner has the record. Nobody takes the claim over before that ends, but it was not
    /// extended: after a rollback its lease may be over.
    Held,
}

/// The state of a claim: the reply to [`RecordStore::read`].
///
/// ```
/// use dlock::record::{ClaimState, ClaimToken, RecordKey, Records};
/// use dlock::store::StoreError;
///
/// /// After a commit whose reply was lost: whether the transaction took effect.
/// async fn is_committed(records: &Records, key: &RecordKey, token: &ClaimToken) -> Result<bool, StoreError> {
///     match records.read(key, token).await? {
///         ClaimState::Completed { .. } => Ok(true),
///         ClaimState::Open => Ok(false), // rolled back: the work may be done again under this claim
///         _ => Ok(false),                // the claim was lost: another attempt may do the work
///     }
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClaimState {
    /// It has no result, and no transaction is about to store one: if there was one, it was rolled back.
    Open,
    /// It has this result.
    Completed {
        /// The stored result, byte for byte.
        response: Vec<u8>,
    },
    /// It was released, taken over or forgotten. Nothing was stored under it, and nothing will be.
    Lost,
}

/// A store that can keep records. See the [module](crate::record) for the rules.
///
/// Failures are reported as by a [`Store`](crate::store::Store). A record that cannot be read, or whose format is
/// newer, is an error with [`Reason::KeyTaken`], never a miss.
///
/// A wrapper around another store:
///
/// ```
/// use dlock::record::{ClaimReply, ClaimRequest, ClaimToken, OwnerReply, RecordKey, RecordStore, Records};
/// use dlock::store::{StoreError, Watch};
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// /// Logs each claim.
/// struct Logged<S>(Arc<S>);
///
/// impl<S: RecordStore> RecordStore for Logged<S> {
///     fn claim(
///         self: Arc<Self>,
///         request: ClaimRequest,
///     ) -> impl Future<Output = Result<ClaimReply, StoreError>> + Send + 'static {
///         println!("claims {}", request.key.as_str());
///         self.0.clone().claim(request) // called now, not at the first poll
///     }
///     // and so on
/// #     fn extend(
/// #         self: Arc<Self>,
/// #         key: RecordKey,
/// #         token: ClaimToken,
/// #         lease: Duration,
/// #         retention: Duration,
/// #     ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
/// #         self.0.clone().extend(key, token, lease, retention)
/// #     }
/// #     fn complete(
/// #         self: Arc<Self>,
/// #         key: RecordKey,
/// #         token: ClaimToken,
/// #         response: Vec<u8>,
/// #         retention: Duration,
/// #     ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
/// #         self.0.clone().complete(key, token, response, retention)
/// #     }
/// #     fn release(
/// #         self: Arc<Self>,
/// #         key: RecordKey,
/// #         token: ClaimToken,
/// #     ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
/// #         self.0.clone().release(key, token)
/// #     }
/// #     fn abandon(
/// #         self: Arc<Self>,
/// #         key: RecordKey,
/// #         token: ClaimToken,
/// #     ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
/// #         self.0.clone().abandon(key, token)
/// #     }
/// #     fn watch(self: Arc<Self>, key: &RecordKey) -> Watch { self.0.clone().watch(key) }
/// }
///
/// fn logged(store: impl RecordStore) -> Records {
///     Records::new(Logged(Arc::new(store)))
/// }
/// ```
pub trait RecordStore: Send + Sync + 'static {
    /// Claims the record, or reports what blocks it: one operation, one round trip.
    ///
    /// A token that claims the same record again gets the same attempt and fence, and the lease from now on: also when
    /// its lease has expired, as long as the claim was not taken over.
    fn claim(
        self: Arc<Self>,
        request: ClaimRequest,
    ) -> impl Future<Output = Result<ClaimReply, StoreError>> + Send + 'static;

    /// Extends the claim to `lease` from now on, and the record to at least `retention`; also when the lease has
    /// expired, as long as the claim was not taken over. If the same token has completed the record, nothing changes,
    /// and the reply is [`OwnerReply::Done`]: the claim was not lost. A store that cannot extend it now, since a transaction of
    /// its owner has the record, and that nobody can take it over before that ends, replies [`OwnerReply::Held`].
    fn extend(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
        lease: Duration,
        retention: Duration,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static;

    /// Stores the result, keeps it for `retention` from now on, and notifies its waiters. The first result stays:
    /// repeating this with the same token changes nothing.
    fn complete(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
        response: Vec<u8>,
        retention: Duration,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static;

    /// Forgets the record, so that the work may be requested again, and notifies its waiters.
    ///
    /// A claim that was taken over becomes an orphan at once instead, and the record stays: the effects of the former
    /// owner are unknown, and the next attempt must not count as the first. The released one does not count: the next has its
    /// number.
    ///
    /// If there is no record the reply is [`OwnerReply::Done`], so that a release may be repeated. A repeated release
    /// that meets the claim of another request returns [`OwnerReply::NotOwner`]. A result is never released.
    fn release(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static;

    /// Gives the claim up after work with an unknown outcome: the record stays as an orphan at once, with its
    /// fingerprint and its attempts, and its waiters are notified. The next claim that [takes over](OnOrphan::TakeOver)
    /// is the next attempt; a different request is still a [`Mismatch`](ClaimReply::Mismatch).
    ///
    /// Otherwise as [`release`](Self::release).
    fn abandon(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static;

    /// Returns the state of a claim that may have been completed without [`complete`](Self::complete), in its owner's
    /// own transaction: a commit whose reply was lost looks like a failure. Waits, within bounds, for a transaction
    /// that is about to complete it.
    ///
    /// The default fails with [`Reason::Unsupported`], since there is no other way to complete a record.
    fn read(
        self: Arc<Self>,
        _key: RecordKey,
        _token: ClaimToken,
    ) -> impl Future<Output = Result<ClaimState, StoreError>> + Send + 'static {
        std::future::ready(Err(StoreError::not_done(
            Reason::Unsupported,
            "this store completes records in no other way than by its own step",
        )))
    }

    /// Claims the record for a slot of time, which the record stores as its fingerprint (that of the request is not
    /// used): one operation, one round trip, by the store's clock.
    ///
    /// A record has one slot, the last claimed one. A later slot is claimed as the first attempt, unless the work of an
    /// earlier one is in progress; for the same slot it works like any [claim](Self::claim). [Releasing](Self::release)
    /// the claim of a slot keeps the record, so that no earlier slot is done again.
    ///
    /// The default fails with [`Reason::Unsupported`].
    fn claim_slot(
        self: Arc<Self>,
        _request: ClaimRequest,
        _slot: SlotRequest,
    ) -> impl Future<Output = Result<SlotReply, StoreError>> + Send + 'static {
        std::future::ready(Err(StoreError::not_done(
            Reason::Unsupported,
            "the records of this store have no slots of time",
        )))
    }

    /// Returns the record, with its result if `response` is set, and the store's clock. It changes nothing.
    ///
    /// The default fails with [`Reason::Unsupported`].
    fn inspect(
        self: Arc<Self>,
        _key: RecordKey,
        _response: bool,
    ) -> impl Future<Output = Result<RecordLook, StoreError>> + Send + 'static {
        std::future::ready(Err(StoreError::not_done(
            Reason::Unsupported,
            "this store shows no records",
        )))
    }

    /// Removes the record, including its result, and notifies its waiters; not while an attempt is in progress. For
    /// operators: the next claim does the work again.
    ///
    /// The default fails with [`Reason::Unsupported`].
    fn forget(
        self: Arc<Self>,
        _key: RecordKey,
    ) -> impl Future<Output = Result<ForgetReply, StoreError>> + Send + 'static {
        std::future::ready(Err(StoreError::not_done(
            Reason::Unsupported,
            "this store forgets no records before their time",
        )))
    }

    /// Subscribes to the completion or release of a record.
    fn watch(self: Arc<Self>, key: &RecordKey) -> Watch;
}

/// [`RecordStore`] without type parameters.
trait DynRecordStore: Send + Sync + 'static {
    fn claim(self: Arc<Self>, request: ClaimRequest) -> StoreFuture<ClaimReply>;
    fn extend(self: Arc<Self>, key: RecordKey, token: ClaimToken, times: Times) -> StoreFuture<OwnerReply>;
    fn complete(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
        response: Vec<u8>,
        retention: Duration,
    ) -> StoreFuture<OwnerReply>;
    fn release(self: Arc<Self>, key: RecordKey, token: ClaimToken) -> StoreFuture<OwnerReply>;
    fn abandon(self: Arc<Self>, key: RecordKey, token: ClaimToken) -> StoreFuture<OwnerReply>;
    fn read(self: Arc<Self>, key: RecordKey, token: ClaimToken) -> StoreFuture<ClaimState>;
    fn claim_slot(self: Arc<Self>, request: ClaimRequest, slot: SlotRequest) -> StoreFuture<SlotReply>;
    fn inspect(self: Arc<Self>, key: RecordKey, response: bool) -> StoreFuture<RecordLook>;
    fn forget(self: Arc<Self>, key: RecordKey) -> StoreFuture<ForgetReply>;
    fn watch(self: Arc<Self>, key: &RecordKey) -> Watch;
}

/// A lease and a retention.
type Times = (Duration, Duration);

impl<S: RecordStore> DynRecordStore for S {
    fn claim(self: Arc<Self>, request: ClaimRequest) -> StoreFuture<ClaimReply> {
        Box::pin(RecordStore::claim(self, request))
    }
    fn extend(self: Arc<Self>, key: RecordKey, token: ClaimToken, times: Times) -> StoreFuture<OwnerReply> {
        Box::pin(RecordStore::extend(self, key, token, times.0, times.1))
    }
    fn complete(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
        response: Vec<u8>,
        retention: Duration,
    ) -> StoreFuture<OwnerReply> {
        Box::pin(RecordStore::complete(self, key, token, response, retention))
    }
    fn release(self: Arc<Self>, key: RecordKey, token: ClaimToken) -> StoreFuture<OwnerReply> {
        Box::pin(RecordStore::release(self, key, token))
    }
    fn abandon(self: Arc<Self>, key: RecordKey, token: ClaimToken) -> StoreFuture<OwnerReply> {
        Box::pin(RecordStore::abandon(self, key, token))
    }
    fn read(self: Arc<Self>, key: RecordKey, token: ClaimToken) -> StoreFuture<ClaimState> {
        Box::pin(RecordStore::read(self, key, token))
    }
    fn claim_slot(self: Arc<Self>, request: ClaimRequest, slot: SlotRequest) -> StoreFuture<SlotReply> {
        Box::pin(RecordStore::claim_slot(self, request, slot))
    }
    fn inspect(self: Arc<Self>, key: RecordKey, response: bool) -> StoreFuture<RecordLook> {
        Box::pin(RecordStore::inspect(self, key, response))
    }
    fn forget(self: Arc<Self>, key: RecordKey) -> StoreFuture<ForgetReply> {
        Box::pin(RecordStore::forget(self, key))
    }
    fn watch(self: Arc<Self>, key: &RecordKey) -> Watch {
        RecordStore::watch(self, key)
    }
}

/// Learns of each reply of the record store.
pub(crate) trait RecordListener: Send + Sync {
    fn ended(&self, failure: Option<&StoreError>);
}

/// An operation. One that panics has failed with an unknown outcome: a panic would end the task that renews a claim, and
/// in a destructor that a panic runs it would end the process.
struct Operation<T> {
    key: RecordKey,
    /// `None` if the call has panicked.
    step: Option<StoreFuture<T>>,
    listener: Option<Arc<dyn RecordListener>>,
}

impl<T> Future for Operation<T> {
    type Output = Result<T, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T, StoreError>> {
        let step = self.step.as_mut();
        let polled = step.and_then(|step| catch_unwind(AssertUnwindSafe(|| step.as_mut().poll(cx))).ok());
        let polled = polled.unwrap_or_else(|| {
            panicked(&self.key);
            Poll::Ready(Err(StoreError::unknown("the step panicked")))
        });
        if let (Poll::Ready(reply), Some(listener)) = (&polled, &self.listener) {
            listener.ended(reply.as_ref().err());
        }
        polled
    }
}

fn panicked(key: &RecordKey) {
    log!(
        error,
        record = key.as_str(),
        "an operation of the record store panicked"
    );
}

/// The records of a store: those of [`LockClient::records`](crate::LockClient::records), or of a store of your own.
/// Cheap to clone. An operation whose store panics has failed, with an unknown outcome.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock::record::{ClaimReply, ClaimRequest, ClaimToken, RecordKey};
/// use std::time::Duration;
///
/// let records = dlock::LockClient::memory().records()?;
/// let (key, token) = (RecordKey::new("payment-7")?, ClaimToken::new());
/// let (lease, retention) = (Duration::from_secs(10), Duration::from_secs(24 * 60 * 60));
/// let request = ClaimRequest::new(key.clone(), token.clone(), [0; 32], lease, retention);
/// if let ClaimReply::Claimed { .. } = records.claim(request.clone()).await? {
///     // ... the work ...
///     records.complete(&key, &token, b"paid".to_vec(), retention).await?;
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Records {
    store: Arc<dyn DynRecordStore>,
    listener: Option<Arc<dyn RecordListener>>,
}

impl Records {
    /// Creates the records of a store.
    pub fn new(store: impl RecordStore) -> Records {
        Records {
            store: Arc::new(store),
            listener: None,
        }
    }

    /// Tells a client of the replies.
    pub(crate) fn told_to(mut self, listener: Arc<dyn RecordListener>) -> Records {
        self.listener = Some(listener);
        self
    }

    fn begin<T>(
        &self,
        key: &RecordKey,
        call: impl FnOnce(Arc<dyn DynRecordStore>) -> StoreFuture<T>,
    ) -> Operation<T> {
        Operation {
            key: key.clone(),
            step: catch_unwind(AssertUnwindSafe(|| call(self.store.clone()))).ok(),
            listener: self.listener.clone(),
        }
    }

    /// See [`RecordStore::claim`].
    ///
    /// # Errors
    ///
    /// A failure of the store. Cancel safe: a claim whose answer was not awaited may stand, until its lease
    /// ends or [`release`](Self::release) is called with its token.
    pub async fn claim(&self, request: ClaimRequest) -> Result<ClaimReply, StoreError> {
        let key = request.key.clone();
        self.begin(&key, |store| store.claim(request)).await
    }

    /// See [`RecordStore::extend`].
    ///
    /// # Errors
    ///
    /// A failure of the store.
    pub async fn extend(
        &self,
        key: &RecordKey,
        token: &ClaimToken,
        lease: Duration,
        retention: Duration,
    ) -> Result<OwnerReply, StoreError> {
        let times = (lease, retention);
        self.begin(key, |store| store.extend(key.clone(), token.clone(), times))
            .await
    }

    /// See [`RecordStore::complete`].
    ///
    /// # Errors
    ///
    /// A failure of the store; the result may or may not have been stored, and storing it again is safe.
    pub async fn complete(
        &self,
        key: &RecordKey,
        token: &ClaimToken,
        response: Vec<u8>,
        retention: Duration,
    ) -> Result<OwnerReply, StoreError> {
        self.begin(key, |store| {
            store.complete(key.clone(), token.clone(), response, retention)
        })
        .await
    }

    /// See [`RecordStore::release`]. The operation takes its position in the order of operations when this is called.
    ///
    /// # Errors
    ///
    /// A failure of the store.
    pub fn release(
        &self,
        key: &RecordKey,
        token: &ClaimToken,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + use<> {
        self.begin(key, |store| store.release(key.clone(), token.clone()))
    }

    /// See [`RecordStore::abandon`].
    ///
    /// # Errors
    ///
    /// A failure of the store; the claim may or may not have been given up, and doing so again is safe.
    pub async fn abandon(&self, key: &RecordKey, token: &ClaimToken) -> Result<OwnerReply, StoreError> {
        self.begin(key, |store| store.abandon(key.clone(), token.clone()))
            .await
    }

    /// See [`RecordStore::read`].
    ///
    /// # Errors
    ///
    /// A failure of the store, or that it has no such operation. Cancel safe: it changes nothing.
    pub async fn read(&self, key: &RecordKey, token: &ClaimToken) -> Result<ClaimState, StoreError> {
        self.begin(key, |store| store.read(key.clone(), token.clone()))
            .await
    }

    /// See [`RecordStore::claim_slot`].
    ///
    /// # Errors
    ///
    /// A failure of the store, or that it has no slots. Cancel safe as [`claim`](Self::claim) is.
    pub async fn claim_slot(
        &self,
        request: ClaimRequest,
        slot: SlotRequest,
    ) -> Result<SlotReply, StoreError> {
        let key = request.key.clone();
        self.begin(&key, |store| store.claim_slot(request, slot)).await
    }

    /// See [`RecordStore::inspect`].
    ///
    /// # Errors
    ///
    /// A failure of the store, or that it shows no records. Cancel safe: it changes nothing.
    pub async fn inspect(&self, key: &RecordKey, response: bool) -> Result<RecordLook, StoreError> {
        self.begin(key, |store| store.inspect(key.clone(), response))
            .await
    }

    /// See [`RecordStore::forget`].
    ///
    /// # Errors
    ///
    /// A failure of the store, or that it forgets no records; the record may or may not have been removed.
    pub async fn forget(&self, key: &RecordKey) -> Result<ForgetReply, StoreError> {
        self.begin(key, |store| store.forget(key.clone())).await
    }

    /// See [`RecordStore::watch`]. Where the store panics, the waiter asks from time to time.
    pub fn watch(&self, key: &RecordKey) -> Watch {
        catch_unwind(AssertUnwindSafe(|| self.store.clone().watch(key))).unwrap_or_else(|_| {
            panicked(key);
            Watch::polling(POLLED_EVERY)
        })
    }
}

impl fmt::Debug for Records {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Records").finish_non_exhaustive()
    }
}
