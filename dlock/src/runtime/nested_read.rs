//! Reading under the own write lock: a writer may read, and goes on reading when it releases the write lock.
//!
//! The read has a grant of its own, with an id, a lease and a fencing token of its own; only the store is told under
//! which write grant it is asked for, which is not in its way. Here the write grant knows the reads under it: a branch
//! that wants to write waits until the readers that are not around it have left, and the other way round.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::runtime::grants::{EntryRequest, Grant, OuterHolds, Refused};
use crate::runtime::scope::Scope;

/// A read under a write grant, from before the store is asked for it.
#[derive(Debug)]
pub(crate) struct NestedRead {
    pub(crate) write: Arc<Grant>,
    /// The first hold of the read.
    pub(crate) hold: u64,
    /// The holds of the write grant that were around the caller.
    outer: Holds,
}

/// Holds of a write grant.
pub(crate) type Holds = SmallVec<[u64; 1]>;

impl NestedRead {
    /// For a caller inside the write grant; every writer inside must be around it. `outer` are the holds of the grant
    /// that are around the caller.
    pub(crate) fn new(
        write: &Arc<Grant>,
        request: &EntryRequest<'_>,
        outer: Holds,
    ) -> Result<Arc<NestedRead>, Refused> {
        write.admit(request)?;
        Ok(Arc::new(NestedRead {
            write: write.clone(),
            hold: request.id,
            outer,
        }))
    }

    /// One hold more on the read. Its frames are inside those that the read was asked for in.
    pub(crate) fn enter(&self, request: &EntryRequest<'_>) -> Result<(), Refused> {
        let besides: Holds;
        let around = match request.around {
            OuterHolds::All => OuterHolds::All,
            OuterHolds::Frames(scope, more) => {
                besides = more.iter().chain(&self.outer).copied().collect();
                OuterHolds::Frames(scope, &besides)
            }
        };
        match self.write.admit(&EntryRequest { around, ..*request }) {
            // It reads on without the writer.
            Err(Refused::Lost(_)) => Ok(()),
            admitted => admitted,
        }
    }
}

/// The holds of a grant that are around a caller.
pub(crate) fn holds_around(scope: &Scope, grant: &Grant) -> Holds {
    scope.holds().filter(|id| grant.has(*id)).collect()
}

impl Drop for NestedRead {
    fn drop(&mut self) {
        self.write.dismiss(self.hold);
    }
}
