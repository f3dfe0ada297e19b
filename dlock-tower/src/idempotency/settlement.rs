//! How a claim is settled.

use std::sync::Arc;

use dlock::store::{Reason, StoreError};

use super::policy::RecordAction;
use super::stored::Stored;

/// What to do with a claim at its end.
#[derive(Debug, Clone)]
pub(super) enum Settlement {
    Keep(Arc<Stored>),
    /// The next request with this key is the next attempt.
    Abandon,
    /// The next request with this key is the first one.
    Release,
}

impl From<Stored> for Settlement {
    fn from(stored: Stored) -> Settlement {
        Settlement::Keep(Arc::new(stored))
    }
}

impl Settlement {
    /// Returns the settlement of an action that releases the key; `None` if the outcome is kept.
    pub(super) fn releasing(action: RecordAction) -> Option<Settlement> {
        match action {
            RecordAction::Keep => None,
            RecordAction::Abandon => Some(Settlement::Abandon),
            RecordAction::Forget => Some(Settlement::Release),
        }
    }
}

/// Whether sending the settlement again cannot help.
pub(super) fn is_final(error: &StoreError) -> bool {
    matches!(
        error.reason,
        Reason::KeyTaken(_) | Reason::Closed | Reason::Unsupported
    )
}
