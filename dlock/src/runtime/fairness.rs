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
    /// How many clients heard of it.
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

/// The lock has come free: lets the processes go first whose turn it is, until one does not come.
pub(crate) async fn let_go_first(round: &mut YieldRound, watch: &mut Watch) {
    while let Some(patience) = round.waits(watch.count()) {
        let came = tokio::time::timeout(patience, watch.changed()).await.is_ok();
        round.enter(came);
        if !came {
            return;
        }
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
    /// A lock that no other caller of this process waits for was given back by a release sent then, and so many other
    /// clients heard of it.
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
    /// there is no time for it before `end`. Returns which processes are to go first after that.
    pub(crate) async fn yields(
        &self,
        of: &LockId,
        pending: PendingYield,
        watch: &mut Option<Watch>,
        listen: impl FnOnce() -> Watch,
        end: Option<Instant>,
    ) -> Option<YieldRound> {
        let (now, end) = (Moment::now(), end.map(Moment::of));
        // Nothing is remembered by this, so later acquires need not look.
        let yields = self.history.lock().yields(of, &pending, end, now);
        if !yields || broken!(YieldNeverMade) {
            return None;
        }
        let watch = watch.get_or_insert_with(listen);
        let mut notifications = pending.notifications();
        let other = async {
            let enough = match notifications {
                Some(notifications) => notifications,
                None => {
                    // The first notification of a new subscription is "subscribed", at once where another one of this
                    // process was there already.
                    watch.changed().await;
                    *notifications.insert(watch.count() + 1)
                }
            };
            while watch.count() < enough {
                watch.changed().await;
            }
        };
        let came = tokio::time::timeout(pending.left(now), other).await.is_ok();
        let yielded = |history: &mut YieldHistory<_, _>| {
            history.yielded(of, &pending, came, notifications, Moment::now())
        };
        let mut round = self.change(yielded)?;
        if came {
            let_go_first(&mut round, watch).await;
        }
        Some(round)
    }

    /// This process has the lock, after other ones were to go first.
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
