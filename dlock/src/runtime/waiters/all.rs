//! All waiters of a client, in parts by their names, so that callers of different locks rarely share one.

use std::sync::Arc;

use super::Waiters;
use super::poll_deadline::Alarm;
use crate::base::lock_id::LockId;

/// A power of two.
const PARTS: usize = 64;

#[derive(Debug)]
pub(crate) struct AllWaiters {
    parts: Box<[Arc<Waiters>]>,
    pub(super) alarm: Arc<Alarm>,
}

impl Default for AllWaiters {
    fn default() -> AllWaiters {
        let alarm: Arc<Alarm> = Arc::default();
        let part = |_| Arc::new(Waiters::new(alarm.clone()));
        AllWaiters {
            parts: (0..PARTS).map(part).collect(),
            alarm,
        }
    }
}

impl AllWaiters {
    /// Returns the waiters among which those for this lock are, and those for the other side of a read-write lock.
    pub(crate) fn of(&self, of: &LockId) -> &Arc<Waiters> {
        &self.parts[of.part(PARTS)]
    }

    pub(super) fn parts(&self) -> impl Iterator<Item = &Arc<Waiters>> {
        self.parts.iter()
    }

    /// Has all waiters polled.
    pub(crate) fn rouse_all(&self) {
        for part in self.parts() {
            part.rouse_all();
        }
    }

    /// How many keys have waiters.
    pub(crate) fn len(&self) -> usize {
        self.parts().map(|part| part.len()).sum()
    }
}
