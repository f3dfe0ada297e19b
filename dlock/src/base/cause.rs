//! The cause of an error.

use std::sync::Arc;

/// The cause of an error, as the store's own client library reported it.
pub(crate) type Cause = Arc<dyn std::error::Error + Send + Sync + 'static>;
