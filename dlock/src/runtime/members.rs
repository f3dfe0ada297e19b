//! One hold, or several that were acquired together.

use std::sync::{Arc, OnceLock};

use tokio_util::sync::CancellationToken;

use crate::runtime::grants::{FirstEnd, Grant};

/// The holds of a view.
#[derive(Clone)]
pub(crate) enum Holds {
    One(Arc<Grant>),
    All(Arc<Members>),
}

/// Several locks that are held together.
pub(crate) struct Members {
    pub(crate) first: Arc<Grant>,
    /// All of them, including the first.
    pub(crate) all: Box<[Arc<Grant>]>,
    /// Created on demand.
    end: OnceLock<Arc<FirstEnd>>,
}

impl Members {
    pub(crate) fn new(first: Arc<Grant>, others: impl Iterator<Item = Arc<Grant>>) -> Members {
        Members {
            all: [first.clone()].into_iter().chain(others).collect(),
            first,
            end: OnceLock::new(),
        }
    }

    /// Cancelled when the first of them has ended.
    pub(crate) fn over(&self) -> CancellationToken {
        let grants = || self.all.iter().map(|grant| &**grant);
        self.end.get_or_init(|| FirstEnd::of(grants())).token()
    }
}
