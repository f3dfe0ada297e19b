//! What unfinished calls have at the store: locks of an incomplete set, and queue positions. They have no guard, so the
//! renewal table does not contain them, and a shutdown releases them from here.

use std::time::Duration;

use parking_lot::Mutex;

use crate::base::broken;
use crate::base::chance::HashMap;
use crate::base::int_hash::BuildIntHasher;
use crate::store::ReleaseRequest;

/// A lock or a queue position of an unfinished call.
pub(crate) struct Part {
    /// The request that releases it.
    pub(crate) request: ReleaseRequest,
    /// How long the release is worth the effort.
    pub(crate) lease: Duration,
    /// Whether it is a lock, not only a queue position.
    pub(crate) is_held: bool,
}

/// All parts of a client, by the numbers of their ids.
#[derive(Default)]
pub(crate) struct Unfinished {
    parts: Mutex<HashMap<u64, Part, BuildIntHasher>>,
}

impl Unfinished {
    pub(crate) fn add(&self, part: Part) {
        if broken!(ShutdownIgnoresPartialSet) {
            return;
        }
        self.parts.lock().insert(part.request.grant.number(), part);
    }

    /// Removes a part that the call no longer needs, or releases itself. Returns false if a shutdown has released it.
    pub(crate) fn remove(&self, number: u64) -> bool {
        self.parts.lock().remove(&number).is_some() || broken!(ShutdownIgnoresPartialSet)
    }

    /// Takes all of them, for a shutdown to release.
    pub(crate) fn take(&self) -> Vec<Part> {
        let mut parts = self.parts.lock();
        let all = parts.drain().map(|(_, part)| part);
        all.filter(|part| !part.is_held || !broken!(ShutdownForgetsPartialSet))
            .collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.parts.lock().is_empty()
    }

    #[cfg(dlock_sim)]
    pub(crate) fn has(&self, number: u64) -> bool {
        self.parts.lock().contains_key(&number)
    }

    #[cfg(dlock_sim)]
    pub(crate) fn len(&self) -> usize {
        self.parts.lock().len()
    }

    /// How many of them are locks.
    pub(crate) fn held(&self) -> usize {
        self.parts.lock().values().filter(|part| part.is_held).count()
    }
}
