//! Why work was not done, or why what came of it is not known.

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
    /// The work ran here and failed. [`OnFailure`](crate::OnFailure) says what later calls do.
    #[error("the work failed: {0}")]
    Work(E),

    /// The work failed in earlier attempts, and [`OnFailure`](crate::OnFailure) says that it is not tried again.
    #[error("the work has failed in {attempts} attempts and is not tried again")]
    #[non_exhaustive]
    Failed {
        /// How many attempts there were.
        attempts: u32,
    },

    /// The process of an earlier attempt crashed, was cut off or dropped the work: whether that was done is not known,
    /// and by [`OnOrphan::Leave`](crate::record::OnOrphan::Leave) it is not done again.
    #[error("attempt {attempt} of the work ended without a result and is not repeated")]
    #[non_exhaustive]
    Orphaned {
        /// The number of that attempt.
        attempt: u32,
    },

    /// The claim was lost while the work ran here: the work was dropped, or its result came too late, and another
    /// process may do it again.
    #[error("attempt {attempt} of the work lost its claim")]
    #[non_exhaustive]
    Lost {
        /// The number of this attempt.
        attempt: u32,
    },

    /// The work was done, and its result was too large to be kept, or the store did not take it.
    #[error("the work was done before, and its result was not kept")]
    ResultUnavailable,

    /// There is a result which cannot be read: of another type, or of a newer version. The work is not done again.
    #[error("the result of the work cannot be read: {why}")]
    #[non_exhaustive]
    Unreadable {
        /// Why.
        why: String,
    },

    /// An option is invalid, or the store failed before the work began.
    #[error(transparent)]
    Store(#[from] Error),
}
