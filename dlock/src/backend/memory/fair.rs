//! Who waits for fair locks in memory: a queue for each of them, in which a place is kept for those who are
//! heard of.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use crate::LockKey;
use crate::backend::{AcquireRequest, GrantId};

/// For how long a place is kept for one who does not ask again.
const PLACE: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(super) struct Queues(HashMap<LockKey, VecDeque<Place>>);

#[derive(Debug)]
struct Place {
    grant: GrantId,
    /// From then on, once it is in front, it counts as gone.
    until: Instant,
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
        while let Some(place) = queue.front() {
            if place.until > now || Some(place.grant) == asks {
                return Some((place.grant, place.until));
            }
            queue.pop_front();
        }
        self.0.remove(key);
        None
    }

    /// Takes a place at the end, or keeps the one that there is. One that was not heard of for too long gets it
    /// back, before all who came after it.
    pub(super) fn wait(&mut self, request: &AcquireRequest, now: Instant) {
        let AcquireRequest { key, grant, .. } = request;
        let queue = self.0.entry(key.clone()).or_default();
        let until = now + PLACE;
        if let Some(place) = queue.iter_mut().find(|place| place.grant == *grant) {
            place.until = until;
            return;
        }
        let at = match request.last_asked {
            None => queue.len(),
            // Those before it have left as it has, unless they are back: of its own client, those who came
            // before it are known.
            Some(_) => queue
                .iter()
                .rposition(|place| grant.came_after(place.grant))
                .map_or(0, |earlier| earlier + 1),
        };
        queue.insert(at, Place { grant: *grant, until });
    }

    /// Those of the same client who are in front, up to the first of another one, and no more than so many.
    pub(super) fn own_front(&self, key: &LockKey, of: GrantId, most: usize) -> Vec<GrantId> {
        let queue = self.0.get(key).into_iter().flatten();
        let grants = queue.map(|place| place.grant);
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
        let at = queue.iter().position(|place| place.grant == grant);
        if let Some(at) = at {
            queue.remove(at);
        }
        if queue.is_empty() {
            self.0.remove(key);
        }
        at == Some(0)
    }

    pub(super) fn len(&self) -> usize {
        self.0.values().map(VecDeque::len).sum()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}
