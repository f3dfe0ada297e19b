//! The subscriptions of this process that end, and until when the store may count them among the receivers of a notification.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::Waiters;
use crate::base::lock_id::{ByLockId, LockId};
use crate::base::moment::Moment;
use crate::store::{Kind, Watch};

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
    /// Until when one that has ended may be counted; 0 if there is none.
    until: Moment,
    /// Whether the store is in this process.
    in_process: bool,
}

/// What a store may have counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Counted {
    /// So many watches, as a store in this process does.
    Watches(u64),
    /// This process.
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
            until: Moment::from_nanos(0),
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

    /// Returns what the store may have counted for a release of this kind that was sent at that moment. With one holder at a
    /// time there is one release after the other, and the next one counts none of those that have ended: for it they are
    /// forgotten.
    pub(super) fn take(&mut self, of: &LockId, kind: Kind, sent: Moment) -> Option<Counted> {
        let ends = self.known.get_mut(of)?;
        // Both may have the same moment, if they share a reading of the clock.
        let has_ended = ends.until >= sent;
        if ends.ending == 0 && !has_ended {
            return None;
        }
        if kind.is_exclusive() {
            ends.until = Moment::from_nanos(0);
        }
        Some(match ends.in_process {
            true => Counted::Watches(u64::from(ends.ending) + u64::from(has_ended)),
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

/// Keeps the subscription of a queue that has ended until a release has been answered, so that the store counts it for certain.
#[derive(Debug, Default)]
pub(crate) struct KeptSubscription(Mutex<Kept>);

#[derive(Debug)]
enum Kept {
    UntilReply(Option<EndingSubscription>),
    Answered,
}

impl Default for Kept {
    fn default() -> Kept {
        Kept::UntilReply(None)
    }
}

impl KeptSubscription {
    /// Keeps it, unless the release has been answered.
    pub(crate) fn keep(&self, subscription: Option<EndingSubscription>) {
        if let Kept::UntilReply(kept) = &mut *self.0.lock() {
            *kept = subscription;
        }
    }

    /// The release has been answered.
    pub(crate) fn answered(&self) {
        let kept = std::mem::replace(&mut *self.0.lock(), Kept::Answered);
        // Not under the mutex: this calls the store.
        drop(kept);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LockKey;

    const START: Moment = Moment::from_nanos(1_000_000_000_000);

    fn of(key: &str) -> LockId {
        LockId::new(Kind::Mutex, &LockKey::raw(key))
    }

    #[test]
    fn release_before_the_end_may_count_it() {
        let us = Duration::from_micros(1);
        for (in_process, until, counted) in [
            (true, START, Counted::Watches(1)),
            (false, START + LINGERS, Counted::Process),
        ] {
            let mut ended = EndedSubscriptions::default();
            ended.begin(&of("k"), in_process, START);
            for sent in [START, START + MEMORY] {
                let taken = ended.take(&of("k"), Kind::Mutex, sent);
                assert_eq!(taken, Some(counted), "not ended yet");
            }
            ended.end(&of("k"), START);
            let mut take = |key, sent| ended.take(&of(key), Kind::Mutex, sent);
            assert_eq!(take("k", until + us), None);
            assert_eq!(take("other", START), None);
            assert_eq!(take("k", until), Some(counted));
            assert_eq!(take("k", until), None, "the next release");
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
            assert_eq!(ended.take(&permits, Kind::Permit, START), Some(Counted::Process));
        }
    }

    #[test]
    fn store_in_this_process_counts_each() {
        let mut ended = EndedSubscriptions::default();
        for _ in 0..3 {
            ended.begin(&of("k"), true, START);
        }
        ended.end(&of("k"), START);
        let taken = ended.take(&of("k"), Kind::Mutex, START);
        assert_eq!(taken, Some(Counted::Watches(3)));
    }

    #[test]
    fn subscription_is_kept_until_the_reply() {
        let waiters: Arc<Waiters> = Arc::default();
        let watch = || Watch::polling(Duration::from_secs(1));
        let ending = || Some(EndingSubscription::new(&waiters, &of("k"), watch()));
        let ends = || waiters.subscribed.lock().known[&of("k")].ending;
        let kept = KeptSubscription::default();
        kept.keep(ending());
        assert_eq!(ends(), 1);
        kept.answered();
        assert_eq!(ends(), 0);
        kept.keep(ending());
        assert_eq!(ends(), 0, "the reply was earlier");
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
        let taken = ended.take(&of("open"), Kind::Mutex, START);
        assert_eq!(taken, Some(Counted::Process));
    }
}
