//! The writers of read-write locks in memory to which readers yield: each keeps its position as long as it asks.

use std::time::Duration;

use tokio::time::Instant;

use super::deadlines::Deadlines;
use crate::LockKey;
use crate::base::chance::HashMap;
use crate::store::GrantId;

/// How long a writer counts that does not ask again.
const KEPT: Duration = Duration::from_secs(5);
/// The time within which a waiter asks again.
pub(super) const HEARD_WITHIN: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Default)]
pub(super) struct Writers {
    /// Until when each of them counts.
    waiting: HashMap<LockKey, Deadlines>,
    /// When undetected writers that are gone are next removed.
    sweep_at: Option<Instant>,
}

impl Writers {
    /// Adds a waiting writer, which is ahead of the readers from now on.
    pub(super) fn wait(&mut self, key: &LockKey, waiter: GrantId, now: Instant) {
        if self.sweep_at.is_none_or(|at| at <= now) {
            self.sweep_at = Some(now + KEPT);
            self.waiting.retain(|_, of_key| {
                while of_key.pop_ended(now).is_some() {}
                !of_key.is_empty()
            });
        }
        let of_key = self.waiting.entry(key.clone()).or_default();
        of_key.set(waiter, now + KEPT);
    }

    /// Returns until when the last of the waiting writers counts; `None` if there is none.
    pub(super) fn until(&self, key: &LockKey, now: Instant) -> Option<Instant> {
        let last = self.waiting.get(key)?.last();
        last.filter(|until| *until > now)
    }

    /// Removes a waiting writer. Returns whether it waited and was the last, so that readers continue.
    pub(super) fn leave(&mut self, key: &LockKey, waiter: GrantId, now: Instant) -> bool {
        let Some(of_key) = self.waiting.get_mut(key) else {
            return false;
        };
        let waited = of_key.remove(waiter);
        if of_key.is_empty() {
            self.waiting.remove(key);
        }
        waited && self.until(key, now).is_none()
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.values().map(Deadlines::len).sum()
    }

    /// Returns how many still count.
    #[cfg(dlock_sim)]
    pub(super) fn kept(&self, now: Instant) -> usize {
        let positions = self.waiting.values().flat_map(Deadlines::iter);
        positions.filter(|(_, until)| *until > now).count()
    }

    pub(super) fn clear(&mut self) {
        self.waiting.clear();
    }
}
