//! Steps on numbers without a grant: the permits of a semaphore, and the count of a latch.
//!
//! They are the one verb of [`Counters`]. A step that changes something is carried out once, however often it arrives:
//! repeated with the same id, it gets the first reply. So the core repeats a step whose reply was lost.

use std::sync::Arc;
use std::time::Duration;

use super::{GrantId, Kind, StoreFuture};
use crate::LockKey;

/// The ability to count: a store with semaphores or latches has it, see [`Store::counters`](super::Store::counters).
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
    /// Takes a step of a counter: of the permits of a semaphore, or of a latch.
    fn count(self: Arc<Self>, request: CounterRequest) -> StoreFuture<CounterReply>;
}

/// One step on a counter.
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
    /// The id of this step, drawn like that of a grant and never used again. The same step may come several
    /// times, and is carried out the first time only.
    pub id: GrantId,
    /// For how long after the first time it may come again.
    pub repeated_for: Duration,
    /// The step.
    pub step: CounterStep,
}

impl CounterRequest {
    /// A step that may be repeated for a minute.
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
    /// How many permits there are: [`CounterReply::Permits`].
    Permits,
    /// There are so many permits in all from now on: [`CounterReply::Done`], whether something was changed.
    SetPermits {
        /// How many.
        total: u32,
        /// Only if it was not set before.
        only_unset: bool,
    },
    /// So many permits more, or fewer: [`CounterReply::Permits`] as there are then, or [`CounterReply::TooFew`]. An
    /// unset total counts as zero.
    AddPermits {
        /// The difference.
        by: i64,
        /// Whether the holders of permits are not known, so that any number of permits may be out.
        unowned: bool,
    },
    /// Releases permits without a known holder: [`CounterReply::Permits`], or [`CounterReply::TooFew`] where there is
    /// no semaphore.
    Give {
        /// How many.
        amount: u32,
    },
    /// Takes all that are free: [`CounterReply::Number`] of them.
    Drain,
    /// Forgets the semaphore and the holders of its permits: [`CounterReply::Done`], whether there was one.
    DeletePermits,
    /// The count of a latch, 0 where there is none: [`CounterReply::Number`].
    Count,
    /// Begins a latch where there is none: [`CounterReply::Done`], whether there was none.
    SetCount {
        /// The count.
        count: u64,
    },
    /// One less: [`CounterReply::Number`] of what is left, or [`CounterReply::TooFew`] at zero.
    CountDown,
    /// Ends a latch, whatever its count is, and lets its waiters go on: [`CounterReply::Done`], whether there was one.
    DeleteLatch,
}

impl CounterStep {
    /// What it is a step of.
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

    /// Whether it only reads.
    #[must_use]
    pub fn is_look(self) -> bool {
        matches!(self, CounterStep::Permits | CounterStep::Count)
    }
}

/// The answer to a [`CounterRequest`].
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
        /// How many are free: below zero while more are held than there are. `None` while the total is not set.
        free: Option<i64>,
        /// How many are held by known holders.
        held: u64,
    },
    /// Whether it was done.
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
