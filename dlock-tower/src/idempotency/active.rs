//! Counts how many requests do something at the same time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts requests, each until its [`Active`] is dropped.
#[derive(Debug, Clone, Default)]
pub(super) struct ActiveCount(Arc<AtomicUsize>);

/// A counted request.
#[derive(Debug)]
pub(super) struct Active(ActiveCount);

impl ActiveCount {
    /// Counts a request without a limit.
    pub(super) fn enter(&self) -> Active {
        self.0.fetch_add(1, Ordering::Relaxed);
        Active(self.clone())
    }

    /// Counts a request, unless there are `most`.
    pub(super) fn try_enter(&self, most: usize) -> Option<Active> {
        let more = |active: usize| (active < most).then(|| active + 1);
        let entered = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        entered.is_ok().then(|| Active(self.clone()))
    }

    pub(super) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}
