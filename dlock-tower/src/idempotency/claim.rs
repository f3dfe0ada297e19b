//! A granted claim, and what its handler has declared and done.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use dlock::__claim::{now, surely_lasts};
use dlock::record::OwnerReply;
use futures_util::future::BoxFuture;
use tokio::time::timeout;

use super::lease::ClaimLease;
use super::policy::{Class, Ending, RecordAction, StatedOutcome, Verdict};
use super::settlement::Settlement;
use super::shared::Core;
use super::stored::Stored;
use super::transaction::Transaction;
use crate::lock::RequestLocks;
use crate::not_started::{Beginning, OuterClaim};
use crate::problem::Problem;

/// How long a response waits for the store to accept it, before it is sent all the same and storing continues in the
/// background.
const SETTLE_WAIT: Duration = Duration::from_secs(3);

/// The progress of the work under a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// The inner service is not ready yet: nothing was begun.
    Waiting,
    /// The handler runs.
    Working,
    /// The handler has answered, or the inner service has failed before it was asked.
    Answered,
}

/// A granted claim.
pub(super) struct Claim {
    pub(super) core: Core,
    pub(super) lease: Arc<ClaimLease>,
    /// As the client sent it.
    pub(super) key: String,
    pub(super) stated_outcome: StatedOutcome,
    pub(super) transaction: Transaction,
    /// Whether the answer says that this request was not begun.
    not_begun: AtomicBool,
    /// Tracks whether a stopped request was begun.
    pub(super) beginning: Arc<Beginning>,
    /// The locks of the outer lock layers.
    pub(super) locks: RequestLocks,
    phase: AtomicU8,
    is_detached: AtomicBool,
}

impl Claim {
    pub(super) fn new(core: Core, lease: Arc<ClaimLease>, key: String, locks: RequestLocks) -> Claim {
        Claim {
            core,
            lease,
            key,
            stated_outcome: StatedOutcome::default(),
            transaction: Transaction::default(),
            not_begun: AtomicBool::new(false),
            beginning: Arc::default(),
            locks,
            phase: AtomicU8::new(Phase::Waiting as u8),
            is_detached: AtomicBool::new(false),
        }
    }

    pub(super) fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::Waiting,
            1 => Phase::Working,
            _ => Phase::Answered,
        }
    }

    pub(super) fn enter(&self, phase: Phase) {
        if phase == Phase::Working {
            self.lease.begin();
        }
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    pub(super) fn was_not_begun(&self) -> bool {
        self.not_begun.load(Ordering::Relaxed)
    }

    pub(super) fn set_not_begun(&self) {
        self.core.shared.counters.not_started();
        self.not_begun.store(true, Ordering::Relaxed);
    }

    /// Counts the request, once, whose handler or body continues without its client.
    pub(super) fn set_detached(&self) {
        if !self.is_detached.swap(true, Ordering::Relaxed) {
            self.core.shared.counters.detached();
        }
    }

    /// Whether nothing was declared about the key, nor put into a transaction.
    pub(super) fn is_untouched(&self) -> bool {
        self.stated_outcome.said().is_none() && !self.transaction.has_response()
    }

    /// Decides the key of a request with this ending, unless its handler declared something else.
    ///
    /// `rolled_back`: all effects of the handler were in a transaction that was not committed.
    pub(super) fn judge(&self, ending: &Ending<'_>, rolled_back: bool) -> RecordAction {
        if let Some(outcome) = self.stated_outcome.said() {
            return outcome.into();
        }
        let class = ending.class();
        if rolled_back && class == Class::Ambiguous {
            return RecordAction::Forget;
        }
        match (self.core.settings.judge(ending), class) {
            (Verdict::Keep, _) => RecordAction::Keep,
            (Verdict::KeepFor(retention), _) => {
                self.lease.keep_for(self.core.settings.bounded(retention));
                RecordAction::Keep
            }
            (Verdict::Release, Class::Ambiguous) => RecordAction::Abandon,
            (Verdict::Release, Class::Result | Class::NothingDone) => RecordAction::Forget,
        }
    }

    /// Returns the settlement after an end without a response.
    pub(super) fn verdict_on_failure(&self, ending: &Ending<'_>, rolled_back: bool) -> Settlement {
        let action = self.judge(ending, rolled_back);
        Settlement::releasing(action).unwrap_or_else(|| Stored::Failed.into())
    }

    /// Spawns work that continues without its client.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.core.shared.tasks.spawn_on(work, &self.lease.runtime);
    }

    /// Asks the store for a claim whose lease may be over, since this process stood still or was cut off: another copy of
    /// the request may be at work. The error is the answer to a request that must not begin.
    pub(super) async fn confirm(&self) -> Result<(), Problem> {
        let lease = &self.lease;
        while !lease.is_held() {
            if lease.is_lost() {
                return Err(Problem::InProgress);
            }
            let records = &self.core.shared.records;
            let sent = now();
            let step = records.extend(&lease.record, &lease.token, lease.length, lease.retention());
            match timeout(self.settle_wait(), step).await {
                Ok(Ok(OwnerReply::Done)) => lease.hold_until(sent + surely_lasts(lease.length)),
                Ok(Ok(OwnerReply::NotOwner)) => lease.lose(),
                Ok(Ok(_)) => return Err(Problem::InProgress),
                Ok(Err(error)) => {
                    tracing::warn!(record = lease.record.as_str(), %error, "a claim was not confirmed");
                    return Err(Problem::Unavailable);
                }
                Err(_) => {
                    tracing::warn!(
                        record = lease.record.as_str(),
                        "a claim was not confirmed in time"
                    );
                    return Err(Problem::Unavailable);
                }
            }
        }
        Ok(())
    }

    /// A claim must not expire in the meantime.
    pub(super) fn settle_wait(&self) -> Duration {
        SETTLE_WAIT.min(self.core.settings.lease / 3)
    }
}

impl OuterClaim for Claim {
    fn is_held(&self) -> bool {
        self.lease.is_held()
    }

    fn confirmed(self: Arc<Self>) -> BoxFuture<'static, Result<(), Problem>> {
        Box::pin(async move { self.confirm().await })
    }
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claim")
            .field("record", &self.lease.record)
            .field("attempt", &self.lease.attempt)
            .finish_non_exhaustive()
    }
}
