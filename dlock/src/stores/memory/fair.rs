//! Who waits for fair locks in memory: a queue for each of them, in which a place is kept for those who are
//! heard of.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::LockKey;
use crate::base::broken;
use crate::base::chance::HashMap;
use crate::store::{AcquireRequest, GrantId};

/// For how long a place is kept for one who does not ask again.
const PLACE: Duration = Duration::from_secs(5);

/// How far the positions of two newcomers are apart, and those of waiters that come back behind each other.
const GAP: i128 = 1 << 40;
const STEP: i128 = 1 << 20;

#[derive(Debug, Clone, Default)]
pub(super) struct Queues(HashMap<LockKey, Queue>);

/// The waiters of a lock in their order. None is looked for along the queue.
#[derive(Debug, Clone, Default)]
struct Queue {
    places: BTreeMap<i128, Place>,
    positions: BTreeMap<GrantId, i128>,
}

#[derive(Debug, Clone)]
struct Place {
    grant: GrantId,
    /// From then on, once it is in front, it counts as gone.
    until: Instant,
}

impl Queue {
    fn first(&self) -> Option<&Place> {
        if broken!(NewestServedFirst) {
            return self.places.values().next_back();
        }
        self.places.values().next()
    }

    fn put(&mut self, position: i128, place: Place) {
        self.positions.insert(place.grant, position);
        self.places.insert(position, place);
    }

    /// Removes a waiter; whether it was in front.
    fn remove(&mut self, grant: GrantId) -> bool {
        let Some(position) = self.positions.remove(&grant) else {
            return false;
        };
        let was_first = self.places.keys().next() == Some(&position);
        self.places.remove(&position);
        was_first
    }

    fn at_end(&self) -> i128 {
        self.places.keys().next_back().map_or(0, |last| last + GAP)
    }

    /// The position of one that was not heard of for too long: before all who came after it. Those before it have left
    /// as it has, unless they are back: of its own client, those who came before it are known.
    fn taken_back(&mut self, grant: GrantId) -> i128 {
        let earlier = self.positions.range(..grant).next_back();
        let earlier = earlier.filter(|(earlier, _)| grant.came_after(**earlier));
        let Some((&earlier, &after)) = earlier else {
            return self.places.keys().next().map_or(0, |first| first - GAP);
        };
        let next = self.places.range(after + 1..).next();
        match next.map_or(GAP, |(next, _)| next - after) {
            1 => {
                self.space_out();
                self.positions[&earlier] + GAP / 2
            }
            room => after + STEP.min(room / 2),
        }
    }

    /// Makes room between all.
    fn space_out(&mut self) {
        let places = std::mem::take(&mut self.places);
        for (position, place) in (0..).step_by(GAP as usize).zip(places.into_values()) {
            self.put(position, place);
        }
    }
}

impl Queues {
    /// Who is in front, after those have left who count as gone, and until when it keeps its place. Who asks
    /// is there.
    pub(super) fn front(
        &mut self,
        key: &LockKey,
        now: Instant,
        asks: Option<GrantId>,
    ) -> Option<(GrantId, Instant)> {
        let queue = self.0.get_mut(key)?;
        while let Some(place) = queue.first() {
            let grant = place.grant;
            if place.until > now || Some(grant) == asks || broken!(FairPositionKeptByDeadWaiter) {
                return Some((grant, place.until));
            }
            queue.remove(grant);
        }
        self.0.remove(key);
        None
    }

    /// Takes a place at the end, or keeps the one that there is. One that was not heard of for too long gets it
    /// back, before all who came after it.
    pub(super) fn wait(&mut self, request: &AcquireRequest, now: Instant) {
        let AcquireRequest { key, grant, .. } = request;
        let queue = self.0.entry(key.clone()).or_default();
        let position = match (queue.positions.get(grant), request.last_asked) {
            (Some(position), _) => *position,
            (None, None) => queue.at_end(),
            (None, Some(_)) => queue.taken_back(*grant),
        };
        let place = Place {
            grant: *grant,
            until: now + PLACE,
        };
        queue.put(position, place);
    }

    /// Those of the same client who are in front, up to the first of another one, and no more than so many.
    pub(super) fn own_front(&self, key: &LockKey, of: GrantId, most: usize) -> Vec<GrantId> {
        let queue = self.0.get(key).into_iter();
        let grants = queue.flat_map(|queue| queue.places.values().map(|place| place.grant));
        grants
            .take_while(|grant| grant.is_of_client_of(of))
            .take(most)
            .collect()
    }

    /// Gives up a place; whether it was in front.
    pub(super) fn leave(&mut self, key: &LockKey, grant: GrantId) -> bool {
        let Some(queue) = self.0.get_mut(key) else {
            return false;
        };
        let was_first = queue.remove(grant);
        if queue.places.is_empty() {
            self.0.remove(key);
        }
        was_first
    }

    pub(super) fn len(&self) -> usize {
        self.0.values().map(|queue| queue.places.len()).sum()
    }

    /// How many keep their places yet.
    #[cfg(dlock_sim)]
    pub(super) fn kept(&self, now: Instant) -> usize {
        let places = self.0.values().flat_map(|queue| queue.places.values());
        places.filter(|place| place.until > now).count()
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
        let mut request = AcquireRequest::new(Kind::Fair, key(), grant, PLACE);
        request.last_asked = again.then_some(PLACE);
        queues.wait(&request, now);
    }

    fn key() -> LockKey {
        LockKey::raw("k")
    }

    fn numbers(queues: &Queues) -> Vec<(bool, u64)> {
        let places = queues.0[&key()].places.values();
        let ids = places.map(|place| {
            (
                place.grant.is_of_client_of(GrantId::from_parts(2, 0)),
                place.grant.number(),
            )
        });
        ids.collect()
    }

    /// Protects "Those who wait are served in the order in which they came": waiters that were taken for gone are back in
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
        let place = |number| Place {
            grant: GrantId::from_parts(1, number),
            until: now,
        };
        queue.put(0, place(0));
        queue.put(1, place(9));
        for number in 1..9 {
            let grant = GrantId::from_parts(1, number);
            let position = queue.taken_back(grant);
            queue.put(position, place(number));
        }
        let numbers: Vec<_> = queue.places.values().map(|place| place.grant.number()).collect();
        assert_eq!(numbers, (0..10).collect::<Vec<_>>());
    }
}
