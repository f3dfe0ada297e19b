//! Letting other processes go first.
//!
//! A process that releases a lock and asks for it again always has an advantage over a process that waits elsewhere:
//! its next acquire is in flight while the other one only receives the notification. So if the store replies that other
//! clients received it, the process yields: it asks again when another holder was seen, or after a short time in which
//! another client could have acquired the lock. If several clients received it, all of them go first, one after the
//! other: the longest waiter may be the last to receive it, and would otherwise never be served. If yields are useless
//! (the clients are stopped, slow, or gone without notice) the process yields less and less often.

mod following;
mod history;
mod yielding;

use std::time::Duration;

pub(crate) use self::following::NextRequest;
pub(crate) use self::history::{Notified, YieldHistory};
pub(crate) use self::yielding::{YieldEvent, YieldStep, Yielded, Yielding};
use crate::base::moment::Moment;
use crate::engine::timing;

/// How long to wait for the reply to a release.
pub(crate) const REPLY_DEADLINE: Duration = Duration::from_secs(1);

/// A release that was sent to the store while others of this process wait for the key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReleaseInLine {
    pub(crate) sent: Moment,
    /// How many notifications there had been, if this process had a subscription.
    pub(crate) notifications: Option<u64>,
    /// Whether the store may count one that has just begun or ended.
    pub(crate) may_be_subscribed: bool,
    /// Whether other waiters of this process share the subscription.
    pub(crate) others_here: bool,
    /// Whether the queue head waited before the release. If the store does not count the receivers, it lets no other client go first.
    pub(crate) head_waited: bool,
    /// When that head asks.
    pub(crate) next: NextRequest,
}

impl ReleaseInLine {
    /// Whether the notification has certainly reached no other process.
    fn reached_no_other(&self, receivers: Option<u64>) -> bool {
        let own = self.notifications.is_some() && !self.others_here;
        receivers.is_some_and(|receivers| receivers <= u64::from(own))
    }
}

/// The reply of the store to a release.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReleaseReplied {
    /// Whether the lock was held until then.
    pub(crate) was_held: bool,
    /// How many clients received the notification, `None` if the store does not know.
    pub(crate) receivers: Option<u64>,
    /// When the store replied.
    pub(crate) at: Moment,
}

/// A yield to other processes that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PendingYield {
    until: Moment,
    /// The number of notifications when another holder has come and gone.
    notifications: Option<u64>,
    /// How many other processes received the notification of the release.
    others: u64,
    /// How long to wait for each of them, except the first.
    patience: Duration,
    /// Whether it is known not to be skipped.
    is_due: bool,
    /// See [`is_for_other_side`](Self::is_for_other_side).
    for_other_side: bool,
}

impl PendingYield {
    /// What follows from a release with this many receivers, `None` if the store does not know.
    pub(crate) fn after(release: ReleaseInLine, receivers: Option<u64>, now: Moment) -> Option<PendingYield> {
        let ReleaseInLine {
            sent,
            notifications,
            may_be_subscribed,
            others_here,
            head_waited,
            ..
        } = release;
        if receivers.is_none() && head_waited {
            return None;
        }
        let own = u64::from((notifications.is_some() || may_be_subscribed) && !others_here);
        if receivers.is_some_and(|receivers| receivers <= own) {
            return None;
        }
        let round_trip = now.since(sent);
        Some(PendingYield {
            until: now + timing::yield_to_first(round_trip),
            // The first is our own release, the second one of another process.
            notifications: notifications.map(|count| count + 2),
            others: match others_here {
                true => 1,
                false => receivers.map_or(1, |receivers| receivers - own),
            },
            patience: timing::yield_to_next(round_trip),
            is_due: false,
            for_other_side: false,
        })
    }

    /// Whether only waiters of this process go first, those for the other side of a read-write lock. Once these waiters are gone,
    /// the process need not yield.
    pub(crate) fn is_for_other_side(self) -> bool {
        self.for_other_side
    }

    /// The first of the others.
    pub(crate) fn first(&self) -> FirstOther {
        FirstOther {
            notifications: self.notifications,
        }
    }
}

/// The first of the processes that go first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FirstOther {
    /// The number of notifications when it has come and gone; `None` before the first notification of a new
    /// subscription.
    notifications: Option<u64>,
}

impl FirstOther {
    /// Whether it has come and gone, given the number of notifications.
    pub(crate) fn has_come(&self, notifications: u64) -> bool {
        self.notifications.is_some_and(|all| notifications >= all)
    }

    /// Counts a notification. The first of a new subscription is "subscribed", and arrives at once if another waiter of
    /// this process already had it.
    pub(crate) fn notified(&mut self, notifications: u64) {
        self.notifications.get_or_insert(notifications + 1);
    }

    /// Returns the number of notifications when it has come and gone, if known.
    pub(crate) fn notifications(&self) -> Option<u64> {
        self.notifications
    }
}

/// The processes that waited when this process released the lock, and that have not all had it since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct YieldRound {
    /// The number of notifications when all of them have come and gone.
    all: u64,
    patience: Duration,
    /// Whether a process came when this one last yielded.
    came: Option<bool>,
}

impl YieldRound {
    /// How long to wait for the next process; `None` if all have come, given the number of notifications.
    pub(crate) fn waits(&self, notifications: u64) -> Option<Duration> {
        (notifications < self.all).then_some(self.patience)
    }

    /// Records whether the process that went first came.
    pub(crate) fn enter(&mut self, came: bool) {
        self.came = Some(came);
    }
}

#[cfg(test)]
impl YieldRound {
    /// Creates a round that ends with this notification.
    pub(crate) fn until(all: u64, patience: Duration) -> YieldRound {
        YieldRound {
            all,
            patience,
            came: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Moment = Moment::from_nanos(1_000_000_000_000);

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn process_yields_where_others_were_notified_of_its_release() {
        // notifications so far, others here, heard: how many others there are
        for (notifications, others_here, receivers, others) in [
            (None, false, Some(0), None),
            (None, false, Some(2), Some(2)),
            (None, false, None, Some(1)),
            // Its own subscription is one of them, ...
            (Some(7), false, Some(1), None),
            (Some(7), false, Some(3), Some(2)),
            (Some(7), false, None, Some(1)),
            // ... unless other waiters here have it too: these count as one.
            (Some(7), true, Some(1), Some(1)),
            (Some(7), true, Some(3), Some(1)),
            (Some(7), true, Some(0), None),
        ] {
            let release = ReleaseInLine {
                sent: START,
                notifications,
                may_be_subscribed: false,
                others_here,
                head_waited: false,
                next: NextRequest::AfterReply,
            };
            let pending = PendingYield::after(release, receivers, START + ms(4));
            let row = (notifications, others_here, receivers);
            assert_eq!(pending.map(|pending| pending.others), others, "{row:?}");
            let Some(pending) = pending else { continue };
            assert_eq!(
                pending.first().notifications(),
                notifications.map(|count| count + 2)
            );
            // Four round trips of 4 ms.
            assert_eq!((pending.until, pending.patience), (START + ms(20), ms(16)));
        }
    }

    #[test]
    fn subscription_that_has_just_begun_or_ended_is_no_other_process() {
        for (others_here, receivers, others) in [
            (false, 0, None),
            (false, 1, None),
            (false, 2, Some(1)),
            (true, 1, Some(1)),
        ] {
            let release = ReleaseInLine {
                sent: START,
                notifications: None,
                may_be_subscribed: true,
                others_here,
                head_waited: true,
                next: NextRequest::AfterReply,
            };
            let pending = PendingYield::after(release, Some(receivers), START);
            let row = (others_here, receivers);
            assert_eq!(pending.map(|pending| pending.others), others, "{row:?}");
        }
    }

    #[test]
    fn head_that_waited_competes_where_the_store_does_not_count() {
        for (head_waited, receivers, others) in [
            (true, None, None),
            (false, None, Some(1)),
            (true, Some(2), Some(2)),
        ] {
            let release = ReleaseInLine {
                sent: START,
                notifications: None,
                may_be_subscribed: false,
                others_here: false,
                head_waited,
                next: NextRequest::AfterReply,
            };
            let pending = PendingYield::after(release, receivers, START);
            assert_eq!(
                pending.map(|pending| pending.others),
                others,
                "{head_waited} {receivers:?}"
            );
        }
    }

    #[test]
    fn shortest_yield_is_longer_for_the_first_process() {
        let release = ReleaseInLine {
            sent: START,
            notifications: None,
            may_be_subscribed: false,
            others_here: false,
            head_waited: false,
            next: NextRequest::AfterReply,
        };
        let pending = PendingYield::after(release, Some(3), START).unwrap();
        assert_eq!((pending.until, pending.patience), (START + ms(10), ms(2)));
    }

    #[test]
    fn first_process_has_come_with_the_second_notification() {
        // notifications before the release, those after it: whether the first of the others has come and gone
        for (before, after, come) in [
            (Some(5), vec![6], false),
            (Some(5), vec![6, 7], true),
            (Some(5), vec![7], true),
            // The first one of a new subscription is none of a release.
            (None, vec![], false),
            (None, vec![3], false),
            (None, vec![3, 4], true),
        ] {
            let mut first = FirstOther {
                notifications: before.map(|count| count + 2),
            };
            let mut last = before.unwrap_or(0);
            for count in &after {
                first.notified(*count);
                last = *count;
            }
            assert_eq!(first.has_come(last), come, "{before:?} {after:?}");
        }
    }

    #[test]
    fn round_ends_when_all_have_come_and_gone() {
        let round = YieldRound {
            all: 9,
            patience: ms(2),
            came: None,
        };
        for (notifications, waits) in [(7, Some(ms(2))), (8, Some(ms(2))), (9, None), (12, None)] {
            assert_eq!(round.waits(notifications), waits, "{notifications}");
        }
    }
}
