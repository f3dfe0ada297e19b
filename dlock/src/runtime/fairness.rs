//! Waits while other processes go first; [`engine::fairness`](crate::engine::fairness) decides when and for how long.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::base::broken;
use crate::base::int_hash::BuildIntHasher;
use crate::base::lock_id::LockId;
use crate::base::moment::Moment;
use crate::engine::fairness::{PendingYield, REPLY_DEADLINE, ReleaseInLine, YieldHistory, YieldRound};
use crate::store::Watch;

/// A release that went to the store while others wait here.
#[derive(Debug)]
pub(crate) struct After {
    release: ReleaseInLine,
    /// How many clients received the notification.
    receivers: oneshot::Receiver<Option<u64>>,
}

impl After {
    /// `notifications` counts those that this process has received, where it had a subscription; `others_here` says that
    /// other waiters of this process have the same one.
    pub(crate) fn new(
        notifications: Option<u64>,
        others_here: bool,
        receivers: oneshot::Receiver<Option<u64>>,
    ) -> After {
        let release = ReleaseInLine {
            sent: Moment::now(),
            notifications,
            others_here,
        };
        After { release, receivers }
    }

    /// When the release was sent.
    pub(crate) fn sent(&self) -> Moment {
        self.release.sent
    }

    /// Whether other processes are to go first, once the store has replied; the outer `None` where it does not.
    pub(crate) async fn pending(self) -> Option<Option<PendingYield>> {
        let receivers = tokio::time::timeout(REPLY_DEADLINE, self.receivers)
            .await
            .ok()?
            .ok()?;
        Some(PendingYield::after(self.release, receivers, Moment::now()))
    }
}

/// What is known of the processes that wait elsewhere, by the names that they wait for.
#[derive(Debug, Default)]
pub(crate) struct Fairness {
    /// There was ever something to know.
    any: AtomicBool,
    history: Mutex<YieldHistory<LockId, BuildIntHasher>>,
}

impl Fairness {
    /// A lock without further callers in this process was released by a request sent then, and so many other clients
    /// received the notification.
    pub(crate) fn released(&self, of: &LockId, sent: Moment, others: u64) {
        self.change(|history| history.released(of, of.kind, sent, others, Moment::now()));
    }

    /// Whether [`take`](Self::take) has a yield.
    pub(crate) fn is_pending(&self, of: &LockId) -> bool {
        self.any.load(Ordering::Relaxed) && self.history.lock().is_pending(of)
    }

    /// Whether other processes are to go first.
    pub(crate) fn take(&self, of: &LockId) -> Option<PendingYield> {
        if !self.any.load(Ordering::Relaxed) {
            return None;
        }
        self.history.lock().take(of)
    }

    /// Yields until another holder was seen, or could have come; not at all where other processes never come, or where
    /// there is no time for it before `end`. Returns whether one came, and which processes are to go first after that.
    pub(crate) async fn yields(
        &self,
        of: &LockId,
        pending: PendingYield,
        watch: &mut Option<Watch>,
        listen: impl FnOnce() -> Watch,
        end: Option<Instant>,
    ) -> Option<(bool, Option<YieldRound>)> {
        let (now, end) = (Moment::now(), end.map(Moment::of));
        // Nothing is remembered by this, so later acquires need not look.
        let yields = self.history.lock().yields(of, &pending, end, now);
        if !yields || broken!(YieldNeverMade) {
            return None;
        }
        let watch = watch.get_or_insert_with(listen);
        let mut first = pending.first();
        let comes = async {
            while !first.has_come(watch.count()) {
                watch.changed().await;
                first.notified(watch.count());
            }
        };
        let came = tokio::time::timeout(pending.left(now), comes).await.is_ok();
        let round =
            self.change(|history| history.yielded(of, &pending, came, first.notifications(), Moment::now()));
        Some((came, round))
    }

    /// This process has the lock, after other processes were to go first.
    pub(crate) fn acquired(&self, of: &LockId, round: Option<YieldRound>) {
        if round.is_some() {
            self.change(|history| history.acquired(of, round, Moment::now()));
        }
    }

    /// Another client has the lock: the processes that wait elsewhere do come.
    pub(crate) fn other_holder(&self, of: &LockId) {
        if self.any.load(Ordering::Relaxed) {
            self.history.lock().other_holder(of);
        }
    }

    fn change<T>(&self, change: impl FnOnce(&mut YieldHistory<LockId, BuildIntHasher>) -> T) -> T {
        let mut history = self.history.lock();
        self.any.store(true, Ordering::Relaxed);
        change(&mut history)
    }
}
