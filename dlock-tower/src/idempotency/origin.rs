//! Work that continues in its own task when its client is gone.

use std::future::Future;
use std::sync::Arc;

use dlock::LockClient;
use dlock::scope::{self, Scope};
use tracing::{Instrument, Span};

use super::claim::Claim;
use crate::lock::KeptLocks;

/// The lock frames, the span and the default client in which work was begun, and in which a task continues it.
#[derive(Clone)]
pub(super) struct Origin {
    scope: Scope,
    span: Span,
    /// That of `dlock::with_default` around the request, such as the client of its tenant.
    client: Option<LockClient>,
}

impl Origin {
    pub(super) fn here() -> Origin {
        Origin {
            scope: scope::current(),
            span: Span::current(),
            client: dlock::__default::around(),
        }
    }

    /// Spawns the work under the locks that it was begun under, and releases those at its end.
    pub(super) fn go_on<F>(&self, claim: &Arc<Claim>, locks: KeptLocks, work: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let counted = claim.core.shared.detached.enter();
        let work = async move {
            // The first capture is dropped first: work whose task is never polled ends before the locks are released.
            let _ = &work;
            let (locks, _counted) = (locks, counted);
            work.await;
            locks.release().await;
        };
        let work = self.scope.wrap(work).instrument(self.span.clone());
        claim.spawn(dlock::__default::under(self.client.clone(), work));
    }
}
