//! Until when the store may count this process among the subscribers of a lock for which nobody waits here any more.

use std::time::Duration;

use crate::base::lock_id::{ByLockId, LockId};
use crate::base::moment::Moment;

/// For so long the end of a subscription may be on its way to the store.
const LINGERS: Duration = Duration::from_millis(1);
/// How long an end is remembered: until the releases before it have been answered.
const MEMORY: Duration = Duration::from_secs(1);
/// How many ends are remembered before old ones are removed.
const LEAST_ROOM: usize = 64;

/// The ends of the subscriptions of one lock.
#[derive(Debug, Clone, Copy)]
struct Ends {
    /// How many are ending.
    ending: u32,
    /// Until when one that has ended may be counted.
    until: Moment,
}

#[derive(Debug, Default)]
pub(super) struct EndedSubscriptions {
    known: ByLockId<Ends>,
    /// The number of locks at which old ones are removed.
    room: usize,
}

impl EndedSubscriptions {
    /// Records that a subscription is about to end.
    pub(super) fn begin(&mut self, of: &LockId, now: Moment) {
        // Cleaned up when it has doubled, so that the cost per key is constant.
        if self.known.len() >= self.room {
            let remembers = |ends: &Ends| ends.ending > 0 || now < ends.until + MEMORY;
            self.known.retain(|_, ends| remembers(ends));
            self.room = (self.known.len() * 2).max(LEAST_ROOM);
            self.known.shrink_to(self.room);
        }
        let new = || Ends {
            ending: 0,
            until: now,
        };
        self.known.entry(of.clone()).or_insert_with(new).ending += 1;
    }

    /// Records that a subscription that was about to end has ended; `at_once` says that the store does not count it any more.
    pub(super) fn end(&mut self, of: &LockId, at_once: bool, now: Moment) {
        let Some(ends) = self.known.get_mut(of) else {
            return;
        };
        ends.ending = ends.ending.saturating_sub(1);
        let until = match at_once {
            true => now,
            false => now + LINGERS,
        };
        ends.until = ends.until.max(until);
    }

    /// Whether the store may have counted one of them for a release that was sent at that moment. The next release is answered
    /// later, so it counts none of those that have ended.
    pub(super) fn was_counted(&mut self, of: &LockId, sent: Moment) -> bool {
        let Some(ends) = self.known.get_mut(of) else {
            return false;
        };
        let was_counted = ends.ending > 0 || ends.until >= sent;
        if was_counted {
            ends.until = Moment::from_nanos(0);
        }
        was_counted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LockKey;
    use crate::store::Kind;

    const START: Moment = Moment::from_nanos(1_000_000_000_000);

    fn of(key: &str) -> LockId {
        LockId::new(Kind::Mutex, &LockKey::raw(key))
    }

    #[test]
    fn release_before_the_end_may_count_it() {
        let us = Duration::from_micros(1);
        for (at_once, until) in [(true, START), (false, START + LINGERS)] {
            let mut ended = EndedSubscriptions::default();
            ended.begin(&of("k"), START);
            for sent in [START, START + MEMORY] {
                assert!(ended.was_counted(&of("k"), sent), "not ended yet");
            }
            ended.end(&of("k"), at_once, START);
            assert!(!ended.was_counted(&of("k"), until + us));
            assert!(!ended.was_counted(&of("other"), START));
            assert!(ended.was_counted(&of("k"), until));
            assert!(!ended.was_counted(&of("k"), until), "only once");
        }
    }

    #[test]
    fn ends_of_long_ago_are_forgotten() {
        let mut ended = EndedSubscriptions::default();
        for number in 0..10_000_u32 {
            let (of, now) = (
                of(&number.to_string()),
                START + number * Duration::from_millis(100),
            );
            ended.begin(&of, now);
            ended.end(&of, false, now);
        }
        assert!(ended.known.len() <= LEAST_ROOM, "{}", ended.known.len());
    }
}
