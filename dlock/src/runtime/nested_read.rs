//! Reading under a write lock: a writer may read, and keeps reading when it releases the write lock.
//!
//! The read has a separate grant, with its own id, lease and fencing token; the store is only told the enclosing write
//! grant, which does not block it. Here the write grant knows the reads under it: a branch that wants to write waits
//! until the readers that are not around it have left, and vice versa.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::runtime::grants::{EntryRequest, Grant, OuterHolds, Refused};
use crate::runtime::scope::Scope;

/// A read under a write grant, created before the request to the store.
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
    /// Creates the read of a caller inside the write grant; every writer inside must be around it. `outer` are the
    /// holds of the grant that are around the caller.
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

    /// Adds a hold to the read. Its frames are inside those in which the read was requested.
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
            // It keeps reading without the writer.
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
