//! The waiters for fair locks in memory: a queue for each lock, in which a position is kept for waiters that keep
//! asking.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::LockKey;
use crate::base::broken;
use crate::base::chance::HashMap;
use crate::store::{AcquireRequest, GrantId};

/// How long a position is kept for a waiter that does not ask again.
const KEPT_FOR: Duration = Duration::from_secs(5);

/// The distance between the positions of two newcomers, and of returning waiters.
const GAP: i128 = 1 << 40;
const STEP: i128 = 1 << 20;

#[derive(Debug, Clone, Default)]
pub(super) struct Queues(HashMap<LockKey, Queue>);

/// The waiters of a lock in order. Lookups never scan the queue.
#[derive(Debug, Clone, Default)]
struct Queue {
    entries: BTreeMap<i128, Entry>,
    positions: BTreeMap<GrantId, i128>,
}

#[derive(Debug, Clone)]
struct Entry {
    grant: GrantId,
    /// From this time on, once it is in front, it counts as gone.
    until: Instant,
}

impl Queue {
    fn first(&self) -> Option<&Entry> {
        if broken!(NewestServedFirst) {
            return self.entries.values().next_back();
        }
        self.entries.values().next()
    }

    fn put(&mut self, position: i128, entry: Entry) {
        self.positions.insert(entry.grant, position);
        self.entries.insert(position, entry);
    }

    /// Removes a waiter; returns whether it was in front.
    fn remove(&mut self, grant: GrantId) -> bool {
        let Some(position) = self.positions.remove(&grant) else {
            return false;
        };
        let was_first = self.entries.keys().next() == Some(&position);
        self.entries.remove(&position);
        was_first
    }

    fn at_end(&self) -> i128 {
        self.entries.keys().next_back().map_or(0, |last| last + GAP)
    }

    /// The position of a waiter that was silent for too long: before all later ones. Earlier waiters have left too,
    /// unless they are back: those of its own client are known.
    fn taken_back(&mut self, grant: GrantId) -> i128 {
        let earlier = self.positions.range(..grant).next_back();
        let earlier = earlier.filter(|(earlier, _)| grant.came_after(**earlier));
        let Some((&earlier, &after)) = earlier else {
            return self.entries.keys().next().map_or(0, |first| first - GAP);
        };
        let next = self.entries.range(after + 1..).next();
        match next.map_or(GAP, |(next, _)| next - after) {
            1 => {
                self.space_out();
                self.positions[&earlier] + GAP / 2
            }
            room => after + STEP.min(room / 2),
        }
    }

    /// Spreads the positions again.
    fn space_out(&mut self) {
        let entries = std::mem::take(&mut self.entries);
        for (position, entry) in (0..).step_by(GAP as usize).zip(entries.into_values()) {
            self.put(position, entry);
        }
    }
}

impl Queues {
    /// Returns the waiter in front, after the waiters that count as gone have been removed, and until when it keeps its
    /// position. The asking waiter is not gone.
    pub(super) fn front(
        &mut self,
        key: &LockKey,
        now: Instant,
        asks: Option<GrantId>,
    ) -> Option<(GrantId, Instant)> {
        let queue = self.0.get_mut(key)?;
        while let Some(entry) = queue.first() {
            let grant = entry.grant;
            if entry.until > now || Some(grant) == asks || broken!(FairPositionKeptByDeadWaiter) {
                return Some((grant, entry.until));
            }
            queue.remove(grant);
        }
        self.0.remove(key);
        None
    }

    /// Takes a position at the end, or keeps the present one. A waiter that was silent for too long gets its position
    /// back, before all later ones.
    pub(super) fn wait(&mut self, request: &AcquireRequest, now: Instant) {
        let AcquireRequest { key, grant, .. } = request;
        let queue = self.0.entry(key.clone()).or_default();
        let position = match (queue.positions.get(grant), request.last_asked) {
            (Some(position), _) => *position,
            (None, None) => queue.at_end(),
            (None, Some(_)) => queue.taken_back(*grant),
        };
        let entry = Entry {
            grant: *grant,
            until: now + KEPT_FOR,
        };
        queue.put(position, entry);
    }

    /// Returns the waiters of the same client in front, up to the first of another client, and at most this many.
    pub(super) fn own_front(&self, key: &LockKey, of: GrantId, most: usize) -> Vec<GrantId> {
        let queue = self.0.get(key).into_iter();
        let grants = queue.flat_map(|queue| queue.entries.values().map(|entry| entry.grant));
        grants
            .take_while(|grant| grant.is_of_client_of(of))
            .take(most)
            .collect()
    }

    /// Gives up a position; returns whether it was in front.
    pub(super) fn leave(&mut self, key: &LockKey, grant: GrantId) -> bool {
        let Some(queue) = self.0.get_mut(key) else {
            return false;
        };
        let was_first = queue.remove(grant);
        if queue.entries.is_empty() {
            self.0.remove(key);
        }
        was_first
    }

    pub(super) fn len(&self) -> usize {
        self.0.values().map(|queue| queue.entries.len()).sum()
    }

    /// Returns how many still keep their positions.
    #[cfg(dlock_sim)]
    pub(super) fn kept(&self, now: Instant) -> usize {
        let entries = self.0.values().flat_map(|queue| queue.entries.values());
        entries.filter(|entry| entry.until > now).count()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Kind;

    const MANY: u64 = 500;

    fn asks(queues: &mut Queues, client: u128, number: u64, again: bool, now: Instant) {
        let grant = GrantId::from_parts(client, number);
        let mut request = AcquireRequest::new(Kind::Fair, key(), grant, KEPT_FOR);
        request.last_asked = again.then_some(KEPT_FOR);
        queues.wait(&request, now);
    }

    fn key() -> LockKey {
        LockKey::raw("k")
    }

    fn numbers(queues: &Queues) -> Vec<(bool, u64)> {
        let entries = queues.0[&key()].entries.values();
        let ids = entries.map(|entry| {
            (
                entry.grant.is_of_client_of(GrantId::from_parts(2, 0)),
                entry.grant.number(),
            )
        });
        ids.collect()
    }

    /// Protects "Waiters are served in order of arrival": waiters that were taken for gone are back in
    /// front of those that came later, in their order, whatever the order in which they ask again.
    #[tokio::test(start_paused = true)]
    async fn returning_waiters_stand_in_their_order_in_front_of_later_ones() {
        let now = Instant::now();
        // In turn: from the first on, from the last on, and all over.
        for order in [|n| n, |n| MANY - 1 - n, |n| n * 7919 % MANY] {
            let mut queues = Queues::default();
            for number in 0..3 {
                asks(&mut queues, 2, number, false, now);
            }
            for number in 0..MANY {
                asks(&mut queues, 1, order(number), true, now);
            }
            let back = (0..MANY).map(|number| (false, number));
            let all: Vec<_> = back.chain((0..3).map(|number| (true, number))).collect();
            assert_eq!(numbers(&queues), all);
            assert_eq!(queues.len(), all.len());
        }
    }

    /// Protects the same where there is no room left between two positions.
    #[test]
    fn positions_are_spaced_out_where_there_is_no_room() {
        let mut queue = Queue::default();
        let now = Instant::now();
        let entry = |number| Entry {
            grant: GrantId::from_parts(1, number),
            until: now,
        };
        queue.put(0, entry(0));
        queue.put(1, entry(9));
        for number in 1..9 {
            let grant = GrantId::from_parts(1, number);
            let position = queue.taken_back(grant);
            queue.put(position, entry(number));
        }
        let numbers: Vec<_> = queue.entries.values().map(|entry| entry.grant.number()).collect();
        assert_eq!(numbers, (0..10).collect::<Vec<_>>());
    }
}
