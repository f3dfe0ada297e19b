//! Reading under the own write lock: a writer may read, and goes on reading when it gives the write lock back.
//!
//! The read has a grant of its own, with an id, a lease and a fencing token of its own; only the store is told
//! under which write grant it is asked for, which is not in its way. Here the write grant knows who reads under
//! it: a branch that wants to write waits until readers have left who are not around it, and the other way round.

use std::panic::Location;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::Loss;
use crate::grants::{Entry, Grant, next_id};

/// Why nobody may read under a write grant now.
pub(crate) enum Refused {
    /// A writer who is not around the asker is inside, since this line.
    Sibling(&'static Location<'static>),
    /// The write grant has ended.
    Lost(Loss),
}

/// A read under a write grant, from before the store is asked for it.
#[derive(Debug)]
pub(crate) struct Under {
    pub(crate) write: Arc<Grant>,
    /// The first hold of the read.
    pub(crate) hold: u64,
    /// The holds of the write grant that were around who asked.
    outer: SmallVec<[u64; 1]>,
}

impl Under {
    /// For an asker who is inside the write grant; no writer may be inside who is not around it.
    pub(crate) fn new(
        write: &Arc<Grant>,
        around: impl Fn(u64) -> bool,
        by: &'static Location<'static>,
    ) -> Result<Arc<Under>, Refused> {
        let (hold, outer) = write.admit(around, by)?;
        Ok(Arc::new(Under {
            write: write.clone(),
            hold,
            outer,
        }))
    }

    /// One hold more on the read. Its frames are inside those that the read was asked for in.
    pub(crate) fn enter(&self, around: impl Fn(u64) -> bool, by: &'static Location<'static>) -> Entry {
        match self.write.admit(|id| around(id) || self.outer.contains(&id), by) {
            Ok((id, _)) => Entry::Entered(id),
            // It reads on without the writer.
            Err(Refused::Lost(_)) => Entry::Entered(next_id()),
            Err(Refused::Sibling(line)) => Entry::Sibling(line),
        }
    }
}

impl Drop for Under {
    fn drop(&mut self) {
        self.write.dismiss(self.hold);
    }
}
