//! Why a request of a task layer has no response.

use std::fmt;
use std::time::Duration;

use dlock::{Error, LockKey, Loss};

/// Why a request under a [`TaskLockLayer`](super::TaskLockLayer) or a [`LimitLayer`](super::LimitLayer) has no response.
///
/// ```
/// use dlock_tower::task::TaskError;
///
/// /// What a worker does with a job.
/// fn verdict(result: Result<(), TaskError<String>>) -> &'static str {
///     match result {
///         Ok(()) => "acknowledge",
///         // It has not run: this is no attempt.
///         Err(error) if error.is_not_started() => "requeue",
///         // The job failed, or it was stopped in the middle.
///         Err(_) => "count an attempt and requeue",
///     }
/// }
/// assert_eq!(verdict(Err(TaskError::Inner("no such file".to_owned()))), "count an attempt and requeue");
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum TaskError<E> {
    /// Other holders have the lock, or all permits of the limit, and it did not become available within the wait time. The
    /// inner service was not called.
    #[non_exhaustive]
    Busy {
        /// The name of the lock or limit.
        key: LockKey,
        /// Remaining lease of the holder when it was last looked at, if known; of a limit, the lease that ends first. A live
        /// holder renews it, so this is no promise of when the lock becomes available.
        remaining: Option<Duration>,
        /// The error of the acquire.
        error: Error,
    },
    /// The lock or permit was lost while the inner service worked. The work was dropped; its effects are unknown.
    #[non_exhaustive]
    Lost {
        /// The name of the lock or limit.
        key: LockKey,
        /// What ended the hold.
        loss: Loss,
    },
    /// The lock was not acquired for another reason: the store did not answer or refused, an option or the key is invalid, too
    /// many waiters, the client is shut down. The inner service was not called.
    Store(Error),
    /// The error of the inner service.
    Inner(E),
}

impl<E> TaskError<E> {
    /// Of an acquire, so before the work.
    pub(super) fn of_acquire(error: Error) -> TaskError<E> {
        match &error {
            Error::NotAcquired { key, remaining, .. } => TaskError::Busy {
                key: key.clone(),
                remaining: *remaining,
                error,
            },
            _ => TaskError::Store(error),
        }
    }

    /// Of a hold, so while the work ran.
    pub(super) fn of_hold(error: Error) -> TaskError<E> {
        match error {
            Error::Lost { key, loss, .. } => TaskError::Lost { key, loss },
            error => TaskError::Store(error),
        }
    }

    /// Whether other holders kept the lock or the limit.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        matches!(self, TaskError::Busy { .. })
    }

    /// Whether the inner service was not called: the request can be tried again, and this was no attempt.
    #[must_use]
    pub fn is_not_started(&self) -> bool {
        matches!(self, TaskError::Busy { .. } | TaskError::Store(_))
    }

    /// When to try again, if that makes sense without asking what became of the work: after a second. `None` after a loss, for
    /// the inner service's error, and where the set-up is wrong.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            TaskError::Busy { error, .. } | TaskError::Store(error) => error.retry_after(),
            TaskError::Lost { .. } | TaskError::Inner(_) => None,
        }
    }

    /// The error of the inner service, if it is one.
    #[must_use]
    pub fn into_inner(self) -> Option<E> {
        match self {
            TaskError::Inner(error) => Some(error),
            _ => None,
        }
    }
}

impl<E: fmt::Display> fmt::Display for TaskError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TaskError::Busy { error, .. } | TaskError::Store(error) => error.fmt(f),
            TaskError::Lost { key, loss } => {
                write!(f, "\"{key}\" was lost while work went on under it: {loss}")
            }
            TaskError::Inner(error) => error.fmt(f),
        }
    }
}

/// For any error that can be displayed, `BoxError` included, which is no `std::error::Error` itself. The causes of an inner
/// error are found by [`into_inner`](TaskError::into_inner).
impl<E: fmt::Debug + fmt::Display> std::error::Error for TaskError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // Displayed as they are, so theirs is the next.
            TaskError::Busy { error, .. } | TaskError::Store(error) => error.source(),
            TaskError::Inner(_) | TaskError::Lost { .. } => None,
        }
    }
}
