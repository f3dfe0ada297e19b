//! Operations on counters without a grant: the permits of a semaphore, and the count of a latch.
//!
//! [`Counters`] has one method for all of them. An operation that changes something is carried out once, however often
//! it arrives: repeated with the same id, it gets the first reply. So the core repeats an operation whose reply was
//! lost.

use std::sync::Arc;
use std::time::Duration;

use super::{GrantId, Kind, StoreFuture};
use crate::LockKey;

/// The ability to count, of stores with semaphores or latches, see [`Store::counters`](super::Store::counters).
///
/// ```
/// use dlock::store::counter::Counters;
/// use dlock::store::Store;
/// use dlock::stores::memory::MemoryStore;
/// use std::sync::Arc;
///
/// let counters: Option<Arc<dyn Counters>> = Store::counters(Arc::new(MemoryStore::new()));
/// assert!(counters.is_some());
/// ```
pub trait Counters: Send + Sync + 'static {
    /// Runs an operation on a counter: on the permits of a semaphore, or on a latch.
    fn count(self: Arc<Self>, request: CounterRequest) -> StoreFuture<CounterReply>;
}

/// An operation on a counter.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::store::StoreError> {
/// use dlock::store::counter::{CounterReply, CounterRequest, CounterStep, Counters};
/// use dlock::store::GrantId;
/// use dlock::stores::memory::MemoryStore;
/// use std::sync::Arc;
///
/// let store = Arc::new(MemoryStore::new());
/// let step = CounterStep::SetCount { count: 2 };
/// let request = CounterRequest::new("import".into(), GrantId::from_parts(0x0192_f3a4, 1), step);
/// let reply = Counters::count(store.clone(), request.clone()).await?;
/// assert_eq!(reply, CounterReply::Done(true));
/// // The same step again, as after a lost reply: it is carried out once.
/// assert_eq!(Counters::count(store, request).await?, CounterReply::Done(true));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CounterRequest {
    /// The name of the semaphore or latch.
    pub key: LockKey,
    /// The id of this operation, random like that of a grant and never used again. The same operation may arrive
    /// several times, and is carried out the first time only.
    pub id: GrantId,
    /// How long after the first time it may arrive again.
    pub repeated_for: Duration,
    /// The operation.
    pub step: CounterStep,
}

impl CounterRequest {
    /// Creates an operation that may be repeated for a minute.
    #[must_use]
    pub fn new(key: LockKey, id: GrantId, step: CounterStep) -> CounterRequest {
        CounterRequest {
            key,
            id,
            repeated_for: Duration::from_secs(60),
            step,
        }
    }
}

/// What to do with a counter.
///
/// ```
/// use dlock::store::Kind;
/// use dlock::store::counter::CounterStep;
///
/// assert_eq!(CounterStep::CountDown.kind(), Kind::Latch);
/// assert_eq!(CounterStep::Drain.kind(), Kind::Permit);
/// assert!(CounterStep::Permits.is_look());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CounterStep {
    /// Returns the permits: [`CounterReply::Permits`].
    Permits,
    /// Sets the total: [`CounterReply::Done`], whether something was changed.
    SetPermits {
        /// The total.
        total: u32,
        /// Only if it was not set before.
        only_unset: bool,
    },
    /// Changes the total: [`CounterReply::Permits`] as they are then, or [`CounterReply::TooFew`]. An unset total
    /// counts as zero.
    AddPermits {
        /// The difference.
        by: i64,
        /// Whether the permits have no known holders, so that any number of them may be held.
        unowned: bool,
    },
    /// Releases permits without a known holder: [`CounterReply::Permits`], or [`CounterReply::TooFew`] if there is no
    /// semaphore.
    Give {
        /// How many.
        amount: u32,
    },
    /// Takes all available permits: [`CounterReply::Number`] of them.
    Drain,
    /// Deletes the semaphore and the holders of its permits: [`CounterReply::Done`], whether there was one.
    DeletePermits,
    /// Returns the count of a latch, 0 if there is none: [`CounterReply::Number`].
    Count,
    /// Creates a latch if there is none: [`CounterReply::Done`], whether there was none.
    SetCount {
        /// The count.
        count: u64,
    },
    /// Counts down by one: [`CounterReply::Number`] is the rest, or [`CounterReply::TooFew`] at zero.
    CountDown,
    /// Deletes a latch, whatever its count is, and lets its waiters continue: [`CounterReply::Done`], whether there was
    /// one.
    DeleteLatch,
}

impl CounterStep {
    /// Returns the kind of counter.
    #[must_use]
    pub fn kind(self) -> Kind {
        match self {
            CounterStep::Count
            | CounterStep::SetCount { .. }
            | CounterStep::CountDown
            | CounterStep::DeleteLatch => Kind::Latch,
            _ => Kind::Permit,
        }
    }

    /// Returns whether it only reads.
    #[must_use]
    pub fn is_look(self) -> bool {
        matches!(self, CounterStep::Permits | CounterStep::Count)
    }
}

/// The reply to a [`CounterRequest`].
///
/// ```
/// use dlock::store::counter::CounterReply;
///
/// fn count_down(count: u64) -> CounterReply {
///     match count.checked_sub(1) {
///         Some(left) => CounterReply::Number(left),
///         None => CounterReply::TooFew { is: 0 },
///     }
/// }
/// # assert_eq!(count_down(0), CounterReply::TooFew { is: 0 });
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CounterReply {
    /// Permits as they are now.
    Permits {
        /// How many are available: below zero while more are held than the total. `None` while the total is not set.
        free: Option<i64>,
        /// How many are held by known holders.
        held: u64,
    },
    /// Whether something was changed.
    Done(bool),
    /// A number.
    Number(u64),
    /// Nothing was changed: the number would be below zero.
    TooFew {
        /// What it is.
        is: u64,
    },
    /// Nothing was changed: the number would be more than a store can count.
    TooMany,
}
