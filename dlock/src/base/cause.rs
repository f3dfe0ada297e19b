//! The cause of an error.

use std::error::Error;
use std::sync::Arc;

/// The cause of an error, as the store's own client library reported it.
pub(crate) type Cause = Arc<dyn Error + Send + Sync + 'static>;

/// Returns the first of a cause and its own causes whose text the message does not have: whoever prints an error with
/// all its causes would read that text twice.
pub(crate) fn untold<'a>(cause: &'a Cause, message: &str) -> Option<&'a (dyn Error + 'static)> {
    let first: &(dyn Error + 'static) = &**cause;
    std::iter::successors(Some(first), |&cause| cause.source())
        .find(|cause| !message.contains(&cause.to_string()))
}
