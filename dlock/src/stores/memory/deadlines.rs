//! Grants and their ends: the first and the last end are known without a search.

use std::collections::BTreeSet;

use tokio::time::Instant;

use crate::base::chance::HashMap;
use crate::store::GrantId;

#[derive(Debug, Clone, Default)]
pub(super) struct Deadlines {
    ends: HashMap<GrantId, Instant>,
    in_order: BTreeSet<(Instant, GrantId)>,
}

impl Deadlines {
    /// Adds a grant, or moves its end.
    pub(super) fn set(&mut self, grant: GrantId, end: Instant) {
        if let Some(before) = self.ends.insert(grant, end) {
            self.in_order.remove(&(before, grant));
        }
        self.in_order.insert((end, grant));
    }

    /// Removes a grant; returns whether it existed.
    pub(super) fn remove(&mut self, grant: GrantId) -> bool {
        let end = self.ends.remove(&grant);
        end.is_some_and(|end| self.in_order.remove(&(end, grant)))
    }

    /// Removes one grant that has ended by now; `None` if there is none.
    pub(super) fn pop_ended(&mut self, now: Instant) -> Option<GrantId> {
        let (end, grant) = *self.in_order.first()?;
        (end <= now && self.remove(grant)).then_some(grant)
    }

    pub(super) fn get(&self, grant: GrantId) -> Option<Instant> {
        self.ends.get(&grant).copied()
    }

    pub(super) fn first(&self) -> Option<Instant> {
        self.in_order.first().map(|(end, _)| *end)
    }

    pub(super) fn last(&self) -> Option<Instant> {
        self.in_order.last().map(|(end, _)| *end)
    }

    /// Returns them in the order of their ends.
    pub(super) fn iter(&self) -> impl Iterator<Item = (GrantId, Instant)> {
        self.in_order.iter().map(|(end, grant)| (*grant, *end))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }
}
