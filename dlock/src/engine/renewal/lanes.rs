//! The grants to renew in each lane, and its requests in flight.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::store::Lane;

/// Grants in one request.
pub(super) const CHUNK: usize = 256;
/// The maximum number of requests of one lane in flight: two at the server, and the next two.
const AT_ONCE: usize = 4;
/// A request without a reply after this time makes room for another one: over a long round trip the server is idle in
/// the meantime, and a request may hang for longer than other grants have left.
pub(crate) const SLOW: Duration = Duration::from_millis(20);
/// The maximum number of requests of one lane in flight, including slow ones.
const AT_MOST: usize = 16;

/// The lanes with something to do.
#[derive(Debug, Default)]
pub(super) struct Lanes(BTreeMap<Lane, Queue>);

#[derive(Debug, Default)]
struct Queue {
    /// The numbers of grants whose renewal is due.
    due: VecDeque<u64>,
    in_flight: usize,
    /// How many of those are slow.
    slow: usize,
}

impl Queue {
    fn has_room(&self) -> bool {
        self.in_flight - self.slow < AT_ONCE && self.in_flight < AT_MOST
    }
}

impl Lanes {
    pub(super) fn push(&mut self, lane: Lane, number: u64) {
        self.0.entry(lane).or_default().due.push_back(number);
    }

    /// Takes the numbers of the next request, which is in flight from now on. `None` if nothing is due in a lane with
    /// room.
    pub(super) fn take(&mut self) -> Option<(Lane, impl Iterator<Item = u64>)> {
        let mut ready = self.0.iter_mut().filter(|(_, queue)| queue.has_room());
        let (lane, queue) = ready.find(|(_, queue)| !queue.due.is_empty())?;
        queue.in_flight += 1;
        let some = queue.due.len().min(CHUNK);
        Some((*lane, queue.due.drain(..some)))
    }

    /// Marks a request as slow.
    pub(super) fn slow(&mut self, lane: Lane) {
        if let Some(queue) = self.0.get_mut(&lane) {
            queue.slow += 1;
        }
    }

    /// Records that a request is no longer in flight.
    pub(super) fn done(&mut self, lane: Lane, was_slow: bool) {
        let Some(queue) = self.0.get_mut(&lane) else {
            return;
        };
        queue.in_flight -= 1;
        queue.slow -= usize::from(was_slow);
        if queue.in_flight == 0 && queue.due.is_empty() {
            self.0.remove(&lane);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LANE: Lane = Lane(0);

    fn lanes(due: usize) -> Lanes {
        let mut lanes = Lanes::default();
        for number in 0..due as u64 {
            lanes.push(LANE, number);
        }
        lanes
    }

    fn take(lanes: &mut Lanes) -> Option<(Lane, Vec<u64>)> {
        lanes.take().map(|(lane, numbers)| (lane, numbers.collect()))
    }

    fn take_all(lanes: &mut Lanes) -> Vec<usize> {
        std::iter::from_fn(|| take(lanes))
            .map(|(_, numbers)| numbers.len())
            .collect()
    }

    #[test]
    fn request_is_a_chunk_in_the_order_of_the_due_times() {
        let mut lanes = lanes(CHUNK + 7);
        let first = take(&mut lanes).unwrap();
        assert_eq!(first, (LANE, (0..CHUNK as u64).collect()));
        assert_eq!(take_all(&mut lanes), [7]);
    }

    #[test]
    fn slow_requests_make_room_up_to_a_limit() {
        let mut lanes = lanes(100 * CHUNK);
        assert_eq!(take_all(&mut lanes).len(), AT_ONCE);
        let mut in_flight = AT_ONCE;
        while in_flight < AT_MOST {
            lanes.slow(LANE);
            assert_eq!(take_all(&mut lanes).len(), 1, "{in_flight}");
            in_flight += 1;
        }
        lanes.slow(LANE);
        assert_eq!(take(&mut lanes), None);
        lanes.done(LANE, true);
        assert_eq!(take_all(&mut lanes).len(), 1);
        lanes.done(LANE, false);
        assert_eq!(take_all(&mut lanes).len(), 1);
    }

    #[test]
    fn full_lane_delays_no_other() {
        let mut lanes = lanes(100 * CHUNK);
        take_all(&mut lanes);
        lanes.push(Lane(1), 1);
        assert_eq!(take(&mut lanes), Some((Lane(1), vec![1])));
    }

    #[test]
    fn idle_lane_leaves_nothing_behind() {
        let mut lanes = lanes(1);
        take_all(&mut lanes);
        assert_eq!(lanes.0.len(), 1);
        lanes.slow(LANE);
        lanes.done(LANE, true);
        assert!(lanes.0.is_empty());
    }
}
