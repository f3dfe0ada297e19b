//! Why a request of a task layer has no response.

use std::fmt;
use std::time::Duration;

use dlock::{Error, LockKey, Loss};

/// When to try again what is likely to succeed then.
pub(super) const SOON: Duration = Duration::from_secs(1);
/// When to try again where the key holds other data.
const LATER: Duration = Duration::from_secs(10);

/// Why a request under a [`TaskLockLayer`](super::TaskLockLayer) or a [`LimitLayer`](super::LimitLayer) has no response.
///
/// ```
/// use dlock_tower::task::TaskError;
///
/// /// What a worker does with a job.
/// fn verdict(result: Result<(), TaskError<String>>) -> &'static str {
///     match result {
///         Ok(()) => "acknowledge",
///         // Its key is invalid, for example: it would never run.
///         Err(error) if error.is_permanent() => "put aside",
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
    /// many waiters, the client is shut down. The inner service was not called. Whether it ever will be:
    /// [`is_permanent`](Self::is_permanent).
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

    /// Whether the inner service was not called: this was no attempt. Try the request again after
    /// [`retry_after`](Self::retry_after), unless the error [is permanent](Self::is_permanent).
    #[must_use]
    pub fn is_not_started(&self) -> bool {
        matches!(self, TaskError::Busy { .. } | TaskError::Store(_))
    }

    /// Returns whether the inner service was not called, and trying again cannot help: the key is invalid
    /// ([`Error::InvalidKey`]), an option is invalid or unsupported ([`Error::InvalidOption`], [`Error::Unsupported`]), or the
    /// lock waits for the caller itself ([`Error::WouldDeadlock`]). Put the request aside.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// use dlock_tower::task::TaskLockLayer;
    /// use tower::{Layer, ServiceExt, service_fn};
    ///
    /// let layer = TaskLockLayer::new(dlock::LockClient::memory(), |file: &String| file.as_str().into());
    /// let worker = layer.layer(service_fn(|file: String| async move { Ok::<_, std::io::Error>(file.len()) }));
    /// let error = worker.oneshot(String::new()).await.unwrap_err(); // no name of a lock
    /// assert!(error.is_not_started() && error.is_permanent());
    /// # }
    /// ```
    #[must_use]
    pub fn is_permanent(&self) -> bool {
        matches!(self, TaskError::Store(error) if retry_after(error).is_none())
    }

    /// When to try again, if that makes sense without asking what became of the work: after a second, or after 10 where the key
    /// holds other data ([`Error::KeyTaken`]). `None` after a loss, for the inner service's error, and where it [cannot
    /// help](Self::is_permanent).
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            TaskError::Busy { error, .. } | TaskError::Store(error) => retry_after(error),
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

/// When to acquire again after this error, or `None` if that cannot help.
pub(super) fn retry_after(error: &Error) -> Option<Duration> {
    match error {
        // A hold further out was lost, and the next attempt is not inside of it.
        Error::Lost { .. } => Some(SOON),
        // Another kind of lock, which ends, or a record of a newer version, which a newer process reads.
        Error::KeyTaken { .. } => Some(LATER),
        error => error.retry_after(),
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
