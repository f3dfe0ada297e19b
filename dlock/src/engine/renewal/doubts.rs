//! When lanes became suspect.

use std::collections::BTreeMap;

use crate::base::moment::Moment;
use crate::store::Lane;

/// When lanes last became suspect. A reply to an earlier request may come from a server that is gone, and arrive only
/// now: it confirms nothing.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    last: Option<Moment>,
    /// By lane; `None` means all lanes.
    lanes: BTreeMap<Option<Lane>, Moment>,
}

impl Doubts {
    pub(super) fn put(&mut self, lane: Option<Lane>, now: Moment) {
        self.last = Some(now);
        self.lanes.insert(lane, now);
    }

    /// Whether a lane has become suspect since a request was sent.
    pub(super) fn came_after(&self, sent: Moment, lane: impl FnOnce() -> Lane) -> bool {
        // Nearly always no lane has.
        if self.last.is_none_or(|last| last <= sent) {
            return false;
        }
        let came_after = |lane| self.lanes.get(&lane).is_some_and(|at| *at > sent);
        came_after(None) || came_after(Some(lane()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubt_is_that_of_its_lane_or_of_all_and_older_than_later_requests() {
        let at = Moment::from_nanos;
        let mut doubts = Doubts::default();
        assert!(!doubts.came_after(at(0), || unreachable!("no lane is in doubt")));
        doubts.put(None, at(5));
        doubts.put(Some(Lane(1)), at(10));
        doubts.put(Some(Lane(2)), at(20));
        for (sent, lane, came_after) in [
            (4, 0, true),
            (5, 0, false),
            (9, 1, true),
            (10, 1, false),
            (19, 2, true),
            (20, 2, false),
        ] {
            let doubted = doubts.came_after(at(sent), || Lane(lane));
            assert_eq!(doubted, came_after, "sent {sent}, lane {lane}");
        }
    }
}
