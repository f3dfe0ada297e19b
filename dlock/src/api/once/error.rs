//! Why work was not done, or why its outcome is unknown.

use std::convert::Infallible;
use std::time::{Duration, SystemTime};

use crate::Error;

/// Why [`Once::run`](crate::Once::run) has no result.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use dlock::{LockClient, OnceError};
///
/// let client = LockClient::memory();
/// let failed = client.once("import").run(async |_| Err::<u64, _>("no such file")).await;
/// match failed {
///     Err(OnceError::Work(error)) => assert_eq!(error, "no such file"), // the next call tries again
///     other => panic!("{other:?}"),
/// }
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OnceError<E> {
    /// The work ran here and failed. [`OnFailure`](crate::OnFailure) says what later calls do. The causes of its error
    /// are not among the sources: take the error by [`work`](OnceError::work) or [`into_work`](OnceError::into_work).
    #[error("the work failed: {0}")]
    Work(E),

    /// The work failed in earlier attempts, and [`OnFailure`](crate::OnFailure) says that it is not tried again.
    #[error("the work has failed in {attempts} attempt{} and is not tried again", if *attempts == 1 { "" } else { "s" })]
    #[non_exhaustive]
    Failed {
        /// How many attempts there were.
        attempts: u32,
    },

    /// The process of an earlier attempt crashed, was cut off or dropped the work: whether the work was done is
    /// unknown, and by [`OnOrphan::Leave`](crate::record::OnOrphan::Leave) it is not done again.
    #[error("attempt {attempt} of the work ended without a result and is not repeated")]
    #[non_exhaustive]
    Orphaned {
        /// The number of that attempt.
        attempt: u32,
    },

    /// The claim was lost: its lease was over before the work began here, the work was dropped, or its result came too
    /// late. Another process may do it again.
    #[error("attempt {attempt} of the work lost its claim")]
    #[non_exhaustive]
    Lost {
        /// The number of this attempt.
        attempt: u32,
    },

    /// The work was done, but its result was too large to keep, or the store refused it.
    #[error("the work was done before, and its result was not kept")]
    ResultUnavailable,

    /// There is a result that cannot be read: of another type, or of a newer version. The work is not done again.
    #[error("the result of the work cannot be read: {why}")]
    #[non_exhaustive]
    Unreadable {
        /// Why.
        why: String,
    },

    /// The last slot of the work is more than one ahead of the store's clock: that clock was set back, or the work had
    /// a longer [period](crate::Once::every) before. Nothing runs until the clock has caught up, unless an operator
    /// [forgets](crate::record::Records::forget) the record.
    #[error(
        "the last slot of the work is {} ahead of the store's clock: the clock was set back, or the work had a longer period before",
        ahead(*.stored, *.now)
    )]
    #[non_exhaustive]
    ClockWentBack {
        /// The last slot.
        stored: SystemTime,
        /// The store's clock.
        now: SystemTime,
    },

    /// The slot that was [named](crate::Once::slot) is too far ahead: more than one period ahead of the slot nearest to the
    /// store's clock, or more than five minutes ahead of that clock if there is no period.
    #[error("the slot of the work is {} ahead of the store's clock", ahead(*.slot, *.now))]
    #[non_exhaustive]
    SlotTooFarAhead {
        /// The slot.
        slot: SystemTime,
        /// The store's clock.
        now: SystemTime,
    },

    /// An option is invalid, or the store failed before the work began.
    #[error(transparent)]
    Store(#[from] Error),
}

impl<E> OnceError<E> {
    /// Returns the error of the work, if it ran here and failed: it keeps its own causes, which the chain of sources of
    /// an `OnceError` does not have.
    ///
    /// ```
    /// # use dlock::OnceError;
    /// let failed = OnceError::Work("no such file");
    /// assert_eq!(failed.work(), Some(&"no such file"));
    /// assert_eq!(OnceError::<&str>::ResultUnavailable.work(), None);
    /// ```
    #[must_use]
    pub fn work(&self) -> Option<&E> {
        match self {
            OnceError::Work(error) => Some(error),
            _ => None,
        }
    }

    /// Returns the error of the work itself, if it ran here and failed; see [`work`](Self::work).
    ///
    /// ```
    /// # use dlock::OnceError;
    /// assert_eq!(OnceError::Work("no such file").into_work(), Some("no such file"));
    /// ```
    #[must_use]
    pub fn into_work(self) -> Option<E> {
        match self {
            OnceError::Work(error) => Some(error),
            _ => None,
        }
    }
}

fn ahead(time: SystemTime, now: SystemTime) -> String {
    format!("{:.1?}", time.duration_since(now).unwrap_or_default())
}

/// Why a function under `#[once]` has no result, of its own or of an earlier call.
///
/// ```
/// use dlock::NotRun;
///
/// #[derive(Debug)]
/// enum Failure {
///     Later,
///     Once(NotRun),
/// }
///
/// impl From<NotRun> for Failure {
///     fn from(why: NotRun) -> Failure {
///         match why {
///             NotRun::Elsewhere { .. } => Failure::Later,
///             why => Failure::Once(why),
///         }
///     }
/// }
/// # let _ = (Failure::Later, Failure::Once(NotRun::from(dlock::Error::ClientClosed)));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotRun {
    /// Another process does the work now, or another task of this one.
    #[error(
        "the work is being done by another process, in attempt {attempt}; its lease ends in {remaining:.1?}"
    )]
    #[non_exhaustive]
    Elsewhere {
        /// The number of that attempt.
        attempt: u32,
        /// The rest of its lease, unless it is renewed.
        remaining: Duration,
    },
    /// Every other case: see [`OnceError`].
    #[error(transparent)]
    Failed(OnceError<Infallible>),
}

impl NotRun {
    /// Converts the error of a call that did not run the work here, or has no result of it.
    pub(crate) fn of<E>(error: OnceError<E>) -> NotRun {
        NotRun::Failed(match error {
            OnceError::Work(_) => OnceError::Store(Error::invalid_option("work", "it failed by itself")),
            OnceError::Failed { attempts } => OnceError::Failed { attempts },
            OnceError::Orphaned { attempt } => OnceError::Orphaned { attempt },
            OnceError::Lost { attempt } => OnceError::Lost { attempt },
            OnceError::ResultUnavailable => OnceError::ResultUnavailable,
            OnceError::Unreadable { why } => OnceError::Unreadable { why },
            OnceError::ClockWentBack { stored, now } => OnceError::ClockWentBack { stored, now },
            OnceError::SlotTooFarAhead { slot, now } => OnceError::SlotTooFarAhead { slot, now },
            OnceError::Store(error) => OnceError::Store(error),
        })
    }
}

impl From<Error> for NotRun {
    fn from(error: Error) -> NotRun {
        NotRun::Failed(OnceError::Store(error))
    }
}
