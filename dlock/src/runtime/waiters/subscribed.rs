//! The subscriptions of this process that end, and until when the store may count them among the receivers of a notification.

use std::sync::Arc;
use std::time::Duration;

use super::Waiters;
use crate::base::lock_id::{ByLockId, LockId};
use crate::base::moment::Moment;
use crate::store::Watch;

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
    /// Whether the store is in this process, see [`Watch`](crate::store::Watch).
    in_process: bool,
}

/// What a store counts as one subscriber.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Counted {
    Watch,
    Process,
}

#[derive(Debug, Default)]
pub(super) struct EndedSubscriptions {
    known: ByLockId<Ends>,
    /// The number of locks at which old ones are removed.
    room: usize,
}

impl EndedSubscriptions {
    /// Records that a subscription is about to end; `in_process` says whether the store is in this process.
    fn begin(&mut self, of: &LockId, in_process: bool, now: Moment) {
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
            in_process,
        };
        self.known.entry(of.clone()).or_insert_with(new).ending += 1;
    }

    /// Records that a subscription that was about to end has ended.
    fn end(&mut self, of: &LockId, now: Moment) {
        let Some(ends) = self.known.get_mut(of) else {
            return;
        };
        ends.ending = ends.ending.saturating_sub(1);
        let until = match ends.in_process {
            true => now,
            false => now + LINGERS,
        };
        ends.until = ends.until.max(until);
    }

    /// Returns what the store may have counted for a release that was sent at that moment. A lock with one holder has one release
    /// after the other, and the next one counts none of those that have ended: for it they are forgotten.
    pub(super) fn take(&mut self, of: &LockId, sent: Moment) -> Option<Counted> {
        let ends = self.known.get_mut(of)?;
        // Both may have the same moment, if they share a reading of the clock.
        if ends.ending == 0 && ends.until < sent {
            return None;
        }
        if of.kind.is_exclusive() {
            ends.until = Moment::from_nanos(0);
        }
        Some(match ends.in_process {
            true => Counted::Watch,
            false => Counted::Process,
        })
    }
}

/// The subscription of a queue that has ended; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct EndingSubscription {
    // Dropped first, and the record even if that panics.
    _watch: Watch,
    _record: EndRecord,
}

#[derive(Debug)]
struct EndRecord {
    waiters: Arc<Waiters>,
    of: LockId,
}

impl EndingSubscription {
    /// Records that it is about to end.
    pub(super) fn new(waiters: &Arc<Waiters>, of: &LockId, watch: Watch) -> EndingSubscription {
        let mut subscribed = waiters.subscribed.lock();
        subscribed.begin(of, watch.is_in_process(), Moment::now());
        EndingSubscription {
            _watch: watch,
            _record: EndRecord {
                waiters: waiters.clone(),
                of: of.clone(),
            },
        }
    }
}

impl Drop for EndRecord {
    fn drop(&mut self) {
        self.waiters.subscribed.lock().end(&self.of, Moment::now());
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
        for (in_process, until, counted) in [
            (true, START, Counted::Watch),
            (false, START + LINGERS, Counted::Process),
        ] {
            let mut ended = EndedSubscriptions::default();
            ended.begin(&of("k"), in_process, START);
            for sent in [START, START + MEMORY] {
                assert_eq!(ended.take(&of("k"), sent), Some(counted), "not ended yet");
            }
            ended.end(&of("k"), START);
            assert_eq!(ended.take(&of("k"), until + us), None);
            assert_eq!(ended.take(&of("other"), START), None);
            assert_eq!(ended.take(&of("k"), until), Some(counted));
            assert_eq!(ended.take(&of("k"), until), None, "the next release");
        }
    }

    /// Their releases are answered side by side.
    #[test]
    fn releases_of_several_holders_may_count_it_all() {
        let mut ended = EndedSubscriptions::default();
        let permits = LockId::new(Kind::Permit, &LockKey::raw("k"));
        ended.begin(&permits, false, START);
        ended.end(&permits, START);
        for _ in 0..3 {
            assert_eq!(ended.take(&permits, START), Some(Counted::Process));
        }
    }

    #[test]
    fn ends_of_long_ago_are_forgotten() {
        let mut ended = EndedSubscriptions::default();
        ended.begin(&of("open"), false, START);
        for number in 0..10_000_u32 {
            let (of, now) = (
                of(&number.to_string()),
                START + number * Duration::from_millis(100),
            );
            ended.begin(&of, false, now);
            ended.end(&of, now);
        }
        assert!(ended.known.len() <= LEAST_ROOM, "{}", ended.known.len());
        assert_eq!(ended.take(&of("open"), START), Some(Counted::Process));
    }
}
