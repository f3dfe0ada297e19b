//! Waits while other processes go first; [`engine::fairness`](crate::engine::fairness) decides when and for how long.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::base::clock;
use crate::base::int_hash::BuildIntHasher;
use crate::base::lock_id::LockId;
use crate::base::moment::Moment;
use crate::engine::evidence::Evidence;
use crate::engine::fairness::{
    NextRequest, Notified, PendingYield, YieldEvent, YieldHistory, YieldRound, YieldStep, Yielded, Yielding,
};
use crate::runtime::waiters::{AllWaiters, PrecedingRelease, QueueHead};
use crate::store::{Watch, changed};

/// What is known of the processes that wait elsewhere, by lock.
#[derive(Debug, Default)]
pub(crate) struct Fairness {
    /// Whether there was ever something to know.
    any: AtomicBool,
    history: Mutex<YieldHistory<LockId, BuildIntHasher>>,
}

impl Fairness {
    /// Records the release of a lock without further callers in this process, by a request sent at `sent`.
    pub(crate) fn released(&self, of: &LockId, sent: Moment, notified: Notified) {
        self.change(|history| history.released(of, of.kind, sent, notified, Moment::now()));
    }

    /// Decides when the waiter behind a release of this process asks; `others_here` says whether other waiters of this
    /// process share its subscription.
    pub(crate) fn next_request(&self, of: &LockId, others_here: bool) -> NextRequest {
        self.history.lock().next_request(of, others_here, Moment::now())
    }

    /// Records how many clients received the notification of a release that was followed at once, `None` if unknown. Returns
    /// whether it has certainly reached no other process.
    pub(crate) fn record_receivers(&self, of: &LockId, receivers: Option<u64>) -> bool {
        self.history.lock().record_receivers(of, receivers, Moment::now())
    }

    /// Whether [`take`](Self::take) returns a yield.
    pub(crate) fn is_pending(&self, of: &LockId) -> bool {
        self.any.load(Ordering::Relaxed) && self.history.lock().is_pending(of)
    }

    /// Takes the pending yield, if others go first.
    pub(crate) fn take(&self, of: &LockId, waiters: &AllWaiters) -> Option<PendingYield> {
        if !self.any.load(Ordering::Relaxed) {
            return None;
        }
        let pending = self.history.lock().take(of);
        pending.filter(|pending| !pending.is_for_other_side() || waiters.of(of).any_on_other_side(of))
    }

    /// Lets other processes go first, after the release before the next request of the head or for a pending yield. Returns
    /// the outcome, if there was one. Cancel safe: the release stays with the head until then.
    pub(crate) async fn yields(
        &self,
        of: &LockId,
        pending: Option<PendingYield>,
        head: &mut QueueHead,
        listen: impl FnOnce() -> Watch,
        end: Option<Instant>,
        evidence: &mut Evidence,
    ) -> Option<Yielded> {
        let begin = (head.released.as_deref().map(PrecedingRelease::release), pending);
        let mut yielding = Yielding::new(end.map(Moment::of), evidence);
        let mut step = yielding.begin(begin, &mut self.history.lock(), of, Moment::now());
        let mut listen = Some(listen);
        loop {
            let event = match step {
                YieldStep::AwaitReply { at_most } => match &mut head.released {
                    Some(released) => released.replied(at_most).await,
                    None => YieldEvent::NoReply,
                },
                YieldStep::Listen => {
                    // The history will have an entry.
                    self.any.store(true, Ordering::Relaxed);
                    head.knows(yielding.evidence());
                    if let Some(listen) = listen.take() {
                        head.listen(listen);
                    }
                    YieldEvent::Listens {
                        notifications: head.watch.as_ref().map_or(0, Watch::count),
                    }
                }
                YieldStep::AwaitNotification { until } => tokio::select! {
                    biased;
                    notifications = changed(&mut head.watch) => YieldEvent::Notified { notifications },
                    () = clock::sleep_until(until.instant()) => YieldEvent::NoneCame,
                },
                YieldStep::End(yielded) => {
                    head.released = None;
                    return yielded;
                }
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
