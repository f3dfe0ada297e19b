//! The outcomes of earlier yields: for which keys other processes wait, and whether they come.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};
use std::time::Duration;

use super::following::Following;
use super::{NextRequest, PendingYield, ReleaseInLine, YieldRound};
use crate::base::kind::Kind;
use crate::base::moment::Moment;

/// How long the history of a key is remembered.
const MEMORY: Duration = Duration::from_secs(1);
/// How many times in a row no process may come before yields are skipped.
const TRIES: u32 = 2;
/// At most all but one of this many yields are skipped, as a power of two.
const RAREST: u32 = 6;
/// How many keys are remembered before old ones are removed.
const LEAST_ROOM: usize = 64;

/// The clients or waiters that received the notification of a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Notified {
    /// So many other clients.
    Clients(u64),
    /// Only waiters of this process, for the other side of a read-write lock.
    OtherSide,
}

/// How often no process came.
#[derive(Debug, Default, Clone, Copy)]
struct Tries {
    /// How many times in a row no process came.
    unanswered: u32,
    /// How many more yields are skipped.
    skip: u32,
}

impl Tries {
    /// Whether this yield is skipped.
    fn skips(&mut self) -> bool {
        let skips = self.skip > 0;
        self.skip = self.skip.saturating_sub(1);
        skips
    }

    fn enter(&mut self, came: bool) {
        self.unanswered = match came {
            true => 0,
            false => self.unanswered.saturating_add(1),
        };
        self.skip = (1 << self.unanswered.saturating_sub(TRIES).min(RAREST)) - 1;
    }
}

/// What is known about the other processes that wait for a key.
#[derive(Debug)]
struct KeyHistory {
    following: Following,
    pending: Option<PendingYield>,
    /// Whether a process comes after a release of this one.
    first: Tries,
    /// Whether the other processes that received the notification come.
    rest: Tries,
    forgotten: Moment,
}

/// The histories of all keys for which other processes wait.
#[derive(Debug)]
pub(crate) struct YieldHistory<K, S> {
    known: HashMap<K, KeyHistory, S>,
    /// The number of keys at which old ones are removed.
    room: usize,
}

impl<K, S: Default> Default for YieldHistory<K, S> {
    fn default() -> YieldHistory<K, S> {
        YieldHistory {
            known: HashMap::default(),
            room: 0,
        }
    }
}

impl<K: Clone + Eq + Hash, S: BuildHasher> YieldHistory<K, S> {
    /// Records the release of a lock without further callers in this process, by a request sent at `sent`. Other clients
    /// received the notification, or only the waiters of this process for the other side of a read-write lock.
    pub(crate) fn released(&mut self, key: &K, kind: Kind, sent: Moment, notified: Notified, now: Moment) {
        let others = match notified {
            Notified::Clients(others) => others,
            Notified::OtherSide => 1,
        };
        let release = ReleaseInLine {
            sent,
            notifications: None,
            may_be_subscribed: false,
            // Readers enter together.
            others_here: kind.is_shared(),
            head_waited: false,
            next: NextRequest::AfterReply,
        };
        let history = self.of(key, now);
        if !history.first.skips() {
            history.pending = PendingYield::after(release, Some(others), now).map(|pending| PendingYield {
                is_due: true,
                for_other_side: notified == Notified::OtherSide,
                ..pending
            });
        }
    }

    /// Decides when the waiter behind a release of this process asks; `others_here` says whether other waiters of this
    /// process share its subscription.
    pub(crate) fn next_request(&mut self, key: &K, others_here: bool, now: Moment) -> NextRequest {
        let next = self.of(key, now).following.next_request();
        match others_here {
            true => NextRequest::AfterReply,
            false => next,
        }
    }

    /// Records whether the waiter that asks right behind a release is subscribed.
    pub(super) fn set_subscribed(&mut self, key: &K, is_subscribed: bool, now: Moment) {
        self.of(key, now).following.set_subscribed(is_subscribed);
    }

    /// Records how many clients have received the notification of a release that was followed at once, `None` if unknown.
    /// Returns whether it has certainly reached no other process.
    pub(crate) fn record_receivers(&mut self, key: &K, receivers: Option<u64>, now: Moment) -> bool {
        let following = &mut self.of(key, now).following;
        following.record_receivers(receivers);
        following.is_alone()
    }

    /// Records whether a release has certainly reached no other process.
    pub(super) fn record_alone(&mut self, key: &K, is_alone: bool, now: Moment) {
        self.of(key, now).following.record_alone(is_alone);
    }

    /// Whether [`take`](Self::take) has a yield.
    pub(crate) fn is_pending(&self, key: &K) -> bool {
        self.known
            .get(key)
            .is_some_and(|history| history.pending.is_some())
    }

    /// Takes the pending yield, if other processes go first.
    pub(crate) fn take(&mut self, key: &K) -> Option<PendingYield> {
        self.known.get_mut(key)?.pending.take()
    }

    /// Whether this process yields now: not if others never come, or if there is no time for it before `end`.
    pub(crate) fn yields(
        &mut self,
        key: &K,
        pending: &PendingYield,
        end: Option<Moment>,
        now: Moment,
    ) -> bool {
        if pending.until <= now || end.is_some_and(|end| end <= pending.until) {
            return false;
        }
        pending.is_due || !self.of(key, now).first.skips()
    }

    /// Records a yield, and whether another holder came. Returns which processes go first after that, if the first one
    /// has come and gone by the notification of that number.
    pub(crate) fn yielded(
        &mut self,
        key: &K,
        pending: &PendingYield,
        came: bool,
        first: Option<u64>,
        now: Moment,
    ) -> Option<YieldRound> {
        let history = self.of(key, now);
        history.first.enter(came);
        let goes_on = pending.others > 1 && !history.rest.skips();
        let first = first.filter(|_| goes_on)?;
        Some(YieldRound {
            all: first + (pending.others - 1),
            patience: pending.patience,
            came: None,
        })
    }

    /// Records that this process has the lock, after other processes could go first.
    pub(crate) fn acquired(&mut self, key: &K, round: Option<YieldRound>, now: Moment) {
        if let Some(came) = round.and_then(|round| round.came) {
            self.of(key, now).rest.enter(came);
        }
    }

    /// Records that another client has the lock: the processes that wait elsewhere do come.
    pub(crate) fn other_holder(&mut self, key: &K) {
        if let Some(history) = self.known.get_mut(key) {
            (history.first, history.rest) = (Tries::default(), Tries::default());
        }
    }

    fn of(&mut self, key: &K, now: Moment) -> &mut KeyHistory {
        // Cleaned up when it has doubled, so that the cost per key is constant.
        if self.known.len() >= self.room {
            self.known.retain(|_, history| now < history.forgotten);
            self.room = (self.known.len() * 2).max(LEAST_ROOM);
            self.known.shrink_to(self.room);
        }
        let new = || KeyHistory {
            following: Following::default(),
            pending: None,
            first: Tries::default(),
            rest: Tries::default(),
            forgotten: now,
        };
        let history = self.known.entry(key.clone()).or_insert_with(new);
        if history.forgotten <= now {
            *history = new();
        }
        history.forgotten = now + MEMORY;
        history
    }
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasherDefault, DefaultHasher};

    use super::*;

    const START: Moment = Moment::from_nanos(1_000_000_000_000);

    type History = YieldHistory<u32, BuildHasherDefault<DefaultHasher>>;

    fn at(ms: u64) -> Moment {
        START + Duration::from_millis(ms)
    }

    fn pending(others: u64) -> PendingYield {
        PendingYield {
            until: at(10),
            notifications: None,
            others,
            patience: Duration::from_millis(2),
            is_due: false,
            for_other_side: false,
        }
    }

    #[test]
    fn yields_are_skipped_ever_more_often_while_no_process_comes() {
        let mut tries = Tries::default();
        // yields that are skipped before the next one, which fails again
        for skipped in [0, 0, 0, 1, 3, 7, 15, 31, 63, 63] {
            assert_eq!((0..).take_while(|_| tries.skips()).count(), skipped);
            tries.enter(false);
        }
        tries.enter(true);
        assert!(!tries.skips());
    }

    #[test]
    fn process_yields_while_there_is_time_for_it() {
        // end of the wait, now: whether it yields
        for (end, now, yields) in [
            (None, 9, true),
            (None, 10, false),
            (Some(11), 9, true),
            (Some(10), 9, false),
        ] {
            let mut history = History::default();
            assert_eq!(
                history.yields(&1, &pending(1), end.map(at), at(now)),
                yields,
                "{end:?} {now}"
            );
        }
    }

    #[test]
    fn processes_that_never_come_are_not_yielded_to_until_another_client_has_the_lock() {
        let mut history = History::default();
        for _ in 0..3 {
            assert!(history.yields(&1, &pending(1), None, START));
            history.yielded(&1, &pending(1), false, None, START);
        }
        assert!(!history.yields(&1, &pending(1), None, START));
        assert!(history.yields(&2, &pending(1), None, START), "another key");
        history.yielded(&1, &pending(1), false, None, START);
        history.other_holder(&1);
        assert!(history.yields(&1, &pending(1), None, START));
    }

    #[test]
    fn history_is_forgotten_after_a_second() {
        for (later, yields) in [(999, false), (1000, true)] {
            let mut history = History::default();
            for _ in 0..3 {
                history.yielded(&1, &pending(1), false, None, START);
            }
            let pending = PendingYield {
                until: at(5000),
                ..pending(1)
            };
            assert_eq!(history.yields(&1, &pending, None, at(later)), yields, "{later}");
        }
    }

    #[test]
    fn several_listeners_all_go_first() {
        // others, the first one's notification: how many notifications there are when all have come and gone
        for (others, first, all) in [(1, Some(9), None), (3, Some(9), Some(11)), (3, None, None)] {
            let mut history = History::default();
            let round = history.yielded(&1, &pending(others), true, first, START);
            assert_eq!(round.map(|round| round.all), all, "{others} {first:?}");
        }
        let mut history = History::default();
        for _ in 0..3 {
            let mut round = history.yielded(&1, &pending(3), true, Some(9), START).unwrap();
            round.enter(false);
            history.acquired(&1, Some(round), START);
        }
        let round = history.yielded(&1, &pending(3), true, Some(9), START);
        assert_eq!(round, None, "none of them came");
    }

    #[test]
    fn notified_release_is_taken_into_account_once() {
        for (kind, others, counted) in [(Kind::Mutex, 3, 3), (Kind::Read, 3, 1)] {
            let mut history = History::default();
            assert!(!history.is_pending(&1));
            history.released(&1, kind, START, Notified::Clients(others), START);
            assert!(history.is_pending(&1));
            let due = history.take(&1).unwrap();
            assert_eq!((due.others, due.is_due), (counted, true), "{kind:?}");
            assert_eq!(history.take(&1), None);
        }
    }

    #[test]
    fn keys_that_can_be_forgotten_leave_no_memory() {
        let mut history = History::default();
        for key in 0..10_000 {
            history.released(&key, Kind::Mutex, START, Notified::Clients(1), at(u64::from(key)));
        }
        assert!(
            history.known.len() <= 2 * 1000 + LEAST_ROOM,
            "{}",
            history.known.len()
        );
    }
}
