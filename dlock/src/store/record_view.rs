//! Records as operators see them.

use std::time::{Duration, SystemTime};

use crate::store::records::Fingerprint;
use crate::store::slots::slot_of_fingerprint;

/// A snapshot of a record: the store's current time, and the record if there is one; see
/// [`RecordStore::inspect`](crate::record::RecordStore::inspect).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock::record::RecordKey;
///
/// let records = dlock::LockClient::memory().records()?;
/// let look = records.inspect(&RecordKey::new("payment-7")?, false).await?;
/// assert!(look.record.is_none());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordLook {
    /// The store's current time.
    pub now: SystemTime,
    /// The record, if it is kept.
    pub record: Option<RecordView>,
}

impl RecordLook {
    /// Creates a snapshot.
    #[must_use]
    pub fn new(now: SystemTime, record: Option<RecordView>) -> RecordLook {
        RecordLook { now, record }
    }
}

/// A record that is kept.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock::record::{ClaimRequest, ClaimToken, RecordKey, RecordState};
/// use std::time::Duration;
///
/// let records = dlock::LockClient::memory().records()?;
/// let (key, day) = (RecordKey::new("payment-7")?, Duration::from_secs(24 * 60 * 60));
/// records.claim(ClaimRequest::new(key.clone(), ClaimToken::new(), [0; 32], day / 24, day)).await?;
/// let record = records.inspect(&key, false).await?.record.expect("it was claimed");
/// assert!(matches!(record.state, RecordState::Claimed { .. }) && record.attempt == 1);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordView {
    /// The state of the work.
    pub state: RecordState,
    /// The number of the last attempt.
    pub attempt: u32,
    /// Its fencing token.
    pub fence: u64,
    /// The time after which the record is forgotten, unless it changes.
    pub expires_in: Duration,
    /// The digest of the request.
    pub fingerprint: Fingerprint,
}

impl RecordView {
    /// Creates a view.
    #[must_use]
    pub fn new(
        state: RecordState,
        attempt: u32,
        fence: u64,
        expires_in: Duration,
        fingerprint: Fingerprint,
    ) -> RecordView {
        RecordView {
            state,
            attempt,
            fence,
            expires_in,
            fingerprint,
        }
    }

    /// Returns the last claimed slot, for work with slots.
    #[must_use]
    pub fn slot(&self) -> Option<SystemTime> {
        slot_of_fingerprint(&self.fingerprint)
    }
}

/// The state of the work of a record.
///
/// ```
/// use dlock::record::RecordState;
///
/// fn in_words(state: &RecordState) -> String {
///     match state {
///         RecordState::Claimed { remaining, .. } => format!("in progress, renewed within {remaining:?}"),
///         RecordState::Completed { size, .. } => format!("done, {size} bytes of result"),
///         _ => "to be done by the next claim".to_owned(),
///     }
/// }
/// assert_eq!(in_words(&RecordState::Orphaned), "to be done by the next claim");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordState {
    /// An attempt is in progress.
    #[non_exhaustive]
    Claimed {
        /// The remaining lease of its claim.
        remaining: Duration,
    },
    /// The last attempt ended without a result, or its lease did.
    Orphaned,
    /// Nothing was done in the slot: its claim was released. Only for work with slots.
    Released,
    /// It has a result.
    #[non_exhaustive]
    Completed {
        /// The length of the result in bytes.
        size: u64,
        /// The result, if it was requested.
        response: Option<Vec<u8>>,
    },
}

impl RecordState {
    /// Creates the state of a claim whose lease ends after this time.
    #[must_use]
    pub fn claimed(remaining: Duration) -> RecordState {
        match remaining {
            Duration::ZERO => RecordState::Orphaned,
            remaining => RecordState::Claimed { remaining },
        }
    }

    /// Creates the state with a result of this length.
    #[must_use]
    pub fn completed(size: u64, response: Option<Vec<u8>>) -> RecordState {
        RecordState::Completed { size, response }
    }

    /// Returns its name: `claimed`, `orphaned`, `released` or `completed`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            RecordState::Claimed { .. } => "claimed",
            RecordState::Orphaned => "orphaned",
            RecordState::Released => "released",
            RecordState::Completed { .. } => "completed",
        }
    }
}

/// The reply to [`RecordStore::forget`](crate::record::RecordStore::forget).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock::record::{ForgetReply, RecordKey};
///
/// let records = dlock::LockClient::memory().records()?;
/// match records.forget(&RecordKey::new("payment-7")?).await? {
///     ForgetReply::Forgotten => println!("the next request does the work again"),
///     ForgetReply::Missing => println!("there was no such record"),
///     ForgetReply::Claimed { fence, .. } => println!("an attempt with fencing token {fence} is at it"),
///     _ => {}
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForgetReply {
    /// It was removed.
    Forgotten,
    /// There was none.
    Missing,
    /// An attempt is in progress, so the record stays: otherwise the work could run twice at the same time.
    Claimed {
        /// The remaining lease of the claim.
        remaining: Duration,
        /// The number of the attempt.
        attempt: u32,
        /// Its fencing token.
        fence: u64,
    },
}
