//! Waits while other processes go first; [`engine::fairness`](crate::engine::fairness) decides when and for how long.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::base::clock;
use crate::base::int_hash::BuildIntHasher;
use crate::base::lock_id::LockId;
use crate::base::moment::Moment;
use crate::engine::evidence::Evidence;
use crate::engine::fairness::{
    PendingYield, ReleaseInLine, YieldEvent, YieldHistory, YieldRound, YieldStep, Yielded, Yielding,
};
use crate::runtime::waiters::QueueHead;
use crate::store::{Watch, changed};

/// A release that was sent to the store while others wait here.
#[derive(Debug)]
pub(crate) struct After {
    release: ReleaseInLine,
    /// How many clients received the notification.
    receivers: oneshot::Receiver<Option<u64>>,
}

impl After {
    /// `notifications` counts those that this process has received, if it had a subscription; `others_here` says
    /// whether other waiters of this process share it.
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

    /// Returns when the release was sent.
    pub(crate) fn sent(&self) -> Moment {
        self.release.sent
    }

    /// Waits for the reply of the store, at most `at_most`.
    async fn reply(&mut self, at_most: Duration) -> YieldEvent {
        match tokio::time::timeout(at_most, &mut self.receivers).await {
            Ok(Ok(receivers)) => YieldEvent::Released { receivers },
            Ok(Err(_)) | Err(_) => YieldEvent::NoReply,
        }
    }
}

/// What is known of the processes that wait elsewhere, by lock.
#[derive(Debug, Default)]
pub(crate) struct Fairness {
    /// Whether there was ever something to know.
    any: AtomicBool,
    history: Mutex<YieldHistory<LockId, BuildIntHasher>>,
}

impl Fairness {
    /// Records the release of a lock without further callers in this process, by a request sent at `sent`; `others`
    /// other clients received the notification.
    pub(crate) fn released(&self, of: &LockId, sent: Moment, others: u64) {
        self.change(|history| history.released(of, of.kind, sent, others, Moment::now()));
    }

    /// Whether [`take`](Self::take) returns a yield.
    pub(crate) fn is_pending(&self, of: &LockId) -> bool {
        self.any.load(Ordering::Relaxed) && self.history.lock().is_pending(of)
    }

    /// Takes the pending yield, if other processes go first.
    pub(crate) fn take(&self, of: &LockId) -> Option<PendingYield> {
        if !self.any.load(Ordering::Relaxed) {
            return None;
        }
        self.history.lock().take(of)
    }

    /// Lets other processes go first, after a release that went to the store or for a pending yield. Returns the
    /// outcome, if there was one.
    pub(crate) async fn yields(
        &self,
        of: &LockId,
        (mut after, pending): (Option<After>, Option<PendingYield>),
        head: &mut QueueHead,
        listen: impl FnOnce() -> Watch,
        end: Option<Instant>,
        evidence: &mut Evidence,
    ) -> Option<Yielded> {
        let begin = (after.as_ref().map(|after| after.release), pending);
        let mut yielding = Yielding::new(end.map(Moment::of), evidence);
        let mut step = yielding.begin(begin, &mut self.history.lock(), of, Moment::now());
        let mut listen = Some(listen);
        loop {
            let event = match step {
                YieldStep::AwaitReply { at_most } => match &mut after {
                    Some(after) => after.reply(at_most).await,
                    None => YieldEvent::NoReply,
                },
                YieldStep::Listen => {
                    // The history will have an entry.
                    self.any.store(true, Ordering::Relaxed);
                    head.knows(yielding.evidence());
                    head.watch = head.watch.take().or_else(|| listen.take().map(|listen| listen()));
                    YieldEvent::Listens {
                        notifications: head.watch.as_ref().map_or(0, Watch::count),
                    }
                }
                YieldStep::AwaitNotification { until } => tokio::select! {
                    biased;
                    notifications = changed(&mut head.watch) => YieldEvent::Notified { notifications },
                    () = clock::sleep_until(until.instant()) => YieldEvent::NoneCame,
                },
                YieldStep::End(yielded) => return yielded,
            };
            step = yielding.handle(event, &mut self.history.lock(), of, Moment::now());
        }
    }

    /// Records that this process has the lock, after other processes could go first.
    pub(crate) fn acquired(&self, of: &LockId, round: Option<YieldRound>) {
        if round.is_some() {
            self.change(|history| history.acquired(of, round, Moment::now()));
        }
    }

    /// Records that another client has the lock: the processes that wait elsewhere do come.
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
