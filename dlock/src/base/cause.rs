//! What is behind an error.

use std::sync::Arc;

/// The cause behind an error, as the store's own client reported it.
pub(crate) type Cause = Arc<dyn std::error::Error + Send + Sync + 'static>;
