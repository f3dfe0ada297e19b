//! A claim, from its being granted until its outcome is in the store.

use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use dlock::__chance as chance;
use dlock::backend::{BackendError, Outcome, Reason};
use dlock::record::{ClaimToken, OwnerReply, RecordKey};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout};

use super::policy::{Class, Ending, Fate, Verdict, Word};
use super::settings::Core;
use super::stored::Stored;
use super::transaction::Transaction;
use crate::lock::RequestLocks;
use crate::not_started::Beginning;

/// How long a response waits for the store to take it, before it goes out all the same and the store is
/// asked again behind its back.
const SETTLE_WAIT: Duration = Duration::from_secs(3);

/// How far the work under a claim has got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// The inner service is not ready yet: nothing has begun.
    Waiting,
    /// The handler runs.
    Working,
    /// The handler has answered.
    Answered,
}

/// A claim that was granted.
pub(super) struct Claim {
    pub(super) core: Core,
    pub(super) runtime: Handle,
    /// A number of its own in this process.
    pub(super) id: u64,
    /// As the client gave it.
    pub(super) key: String,
    pub(super) record: RecordKey,
    pub(super) token: ClaimToken,
    pub(super) attempt: u32,
    pub(super) fence: u64,
    /// Before the claim was sent.
    pub(super) since: Instant,
    pub(super) word: Word,
    pub(super) transaction: Transaction,
    /// The answer says that this request was not begun.
    not_begun: AtomicBool,
    /// The same of a request that is stopped.
    pub(super) beginning: Arc<Beginning>,
    /// Until then nobody can take the claim over.
    held_until: Mutex<Instant>,
    /// Of the lock layers further out.
    pub(super) locks: RequestLocks,
    phase: AtomicU8,
    lost: AtomicBool,
    settled: AtomicBool,
}

/// What is to be done with a claim at its end.
#[derive(Debug, Clone)]
pub(super) enum Settlement {
    Keep(Arc<Stored>),
    /// The next request with this key is the next attempt.
    Abandon,
    /// The next request with this key is the first one.
    Release,
}

impl From<Stored> for Settlement {
    fn from(stored: Stored) -> Settlement {
        Settlement::Keep(Arc::new(stored))
    }
}

/// A granted claim, as the store told of it.
pub(super) struct Grant {
    pub(super) key: String,
    pub(super) record: RecordKey,
    pub(super) token: ClaimToken,
    pub(super) attempt: u32,
    pub(super) fence: u64,
    pub(super) since: Instant,
    pub(super) locks: RequestLocks,
}

impl Claim {
    /// Takes charge of a claim that was granted: from now on it is renewed.
    pub(super) fn take(core: Core, grant: Grant) -> Owned {
        core.shared.counters.claimed();
        if grant.attempt > 1 {
            core.shared.counters.taken_over();
        }
        let id = core.shared.claims.fetch_add(1, Ordering::Relaxed);
        let held_until = Mutex::new(grant.since + core.settings.lease);
        let claim = Arc::new(Claim {
            core,
            runtime: Handle::current(),
            id,
            key: grant.key,
            record: grant.record,
            token: grant.token,
            attempt: grant.attempt,
            fence: grant.fence,
            since: grant.since,
            word: Word::default(),
            transaction: Transaction::default(),
            not_begun: AtomicBool::new(false),
            beginning: Arc::default(),
            held_until,
            locks: grant.locks,
            phase: AtomicU8::new(Phase::Waiting as u8),
            lost: AtomicBool::new(false),
            settled: AtomicBool::new(false),
        });
        claim.core.shared.renewals.register(&claim);
        Owned(claim)
    }

    pub(super) fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::Waiting,
            1 => Phase::Working,
            _ => Phase::Answered,
        }
    }

    pub(super) fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    pub(super) fn is_settled(&self) -> bool {
        self.settled.load(Ordering::Relaxed)
    }

    pub(super) fn was_not_begun(&self) -> bool {
        self.not_begun.load(Ordering::Relaxed)
    }

    pub(super) fn set_not_begun(&self, not_begun: bool) {
        self.not_begun.store(not_begun, Ordering::Relaxed);
    }

    /// Nothing was said of the key, nor put into a transaction.
    pub(super) fn is_untouched(&self) -> bool {
        self.word.said().is_none() && !self.transaction.has_response()
    }

    /// The store has extended the claim.
    pub(super) fn hold_until(&self, until: Instant) {
        *self.held_until.lock() = until;
    }

    /// Whether another owner may have taken the claim over by now.
    fn may_have_run_out(&self) -> bool {
        *self.held_until.lock() <= Instant::now()
    }

    /// The store says that the claim is not ours, or not any more.
    pub(super) fn lose(&self) {
        if !self.lost.swap(true, Ordering::Relaxed) {
            self.core.shared.counters.lost();
            tracing::warn!(
                record = self.record.as_str(),
                attempt = self.attempt,
                "the claim of a request was lost: it may have run twice, and its result is not kept"
            );
        }
    }

    /// What becomes of the key of a request that ended so, unless its handler said something else.
    ///
    /// `rolled_back`: all effects of the handler were in a transaction that was not committed.
    pub(super) fn judge(&self, ending: &Ending<'_>, rolled_back: bool) -> Fate {
        if let Some(outcome) = self.word.said() {
            return outcome.into();
        }
        let class = ending.class();
        if rolled_back && class == Class::Ambiguous {
            return Fate::Forget;
        }
        match (self.core.settings.judge(ending), class) {
            (Verdict::Keep, _) => Fate::Keep,
            (Verdict::Release, Class::Ambiguous) => Fate::Abandon,
            (Verdict::Release, Class::Result | Class::NothingDone) => Fate::Forget,
        }
    }

    /// What is to be done after an end without a response.
    pub(super) fn verdict_on_failure(&self, ending: &Ending<'_>, rolled_back: bool) -> Settlement {
        match self.judge(ending, rolled_back) {
            Fate::Keep => Stored::Failed.into(),
            Fate::Abandon => Settlement::Abandon,
            Fate::Forget => Settlement::Release,
        }
    }

    /// Has work done that nobody awaits.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.core.shared.tasks.spawn_on(work, &self.runtime);
    }

    /// A claim must not run out meanwhile.
    pub(super) fn settle_wait(&self) -> Duration {
        SETTLE_WAIT.min(self.core.settings.lease / 3)
    }

    async fn send(&self, settlement: &Settlement) -> Result<OwnerReply, BackendError> {
        let records = &self.core.shared.records;
        let step = async {
            match settlement {
                Settlement::Keep(stored) => self.store(stored).await,
                Settlement::Abandon => records.abandon(&self.record, &self.token).await,
                Settlement::Release => records.release(&self.record, &self.token).await,
            }
        };
        timeout(self.settle_wait(), step)
            .await
            .unwrap_or_else(|_| Err(BackendError::unknown("the store does not answer")))
    }
}

impl Claim {
    /// Stores the result; or, where the store refuses a response, as one that is full does, only that there was one:
    /// work that was done must not be done again.
    async fn store(&self, stored: &Stored) -> Result<OwnerReply, BackendError> {
        let Core { shared, settings } = &self.core;
        let complete = |stored: &Stored| {
            let response = stored.encode();
            shared
                .records
                .complete(&self.record, &self.token, response, settings.retention)
        };
        let error = match complete(stored).await {
            Err(error) if matches!(stored, Stored::Response(_)) && is_refused(&error) => error,
            reply => return reply,
        };
        let reply = complete(&Stored::Unavailable).await;
        match reply {
            Ok(OwnerReply::Done) => {
                shared.counters.tombstones();
                tracing::warn!(
                    record = self.record.as_str(),
                    %error,
                    "the store did not take a response, it keeps only that there was one"
                );
                reply
            }
            Ok(reply) => Ok(reply),
            Err(_) => Err(error),
        }
    }
}

/// Whether the store has answered that it will not.
fn is_refused(error: &BackendError) -> bool {
    error.outcome == Outcome::NotDone && matches!(error.reason, Reason::Refused | Reason::RefusedForNow)
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claim")
            .field("record", &self.record)
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}

/// A claim in the hands of whoever has to settle it. Dropped unsettled (the runtime ends), it is left to
/// its lease; it is not renewed any more.
#[derive(Debug)]
pub(super) struct Owned(Arc<Claim>);

impl Deref for Owned {
    type Target = Arc<Claim>;

    fn deref(&self) -> &Arc<Claim> {
        &self.0
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.core.shared.renewals.stop(&self.0);
    }
}

impl Owned {
    /// Takes the claim into one's hands, if its outcome is not decided yet.
    pub(super) fn unsettled(claim: &Arc<Claim>) -> Option<Owned> {
        (!claim.is_settled()).then(|| Owned(claim.clone()))
    }

    /// The outcome is in the store already.
    pub(super) fn settle_by_transaction(&self) {
        self.settled.store(true, Ordering::Relaxed);
    }

    /// Stores or releases. Answers when the store has it, or after a failure, in which case the claim is
    /// kept and the store asked again until it has it.
    pub(super) async fn settle(self, settlement: impl Into<Settlement>) {
        let settlement = settlement.into();
        if self.settled.swap(true, Ordering::Relaxed) {
            return;
        }
        self.core.shared.renewals.stop(&self.0);
        if self.is_lost() {
            return;
        }
        let ran_out = self.may_have_run_out();
        match self.send(&settlement).await {
            Ok(OwnerReply::NotOwner) => self.refused(&settlement, ran_out),
            Ok(_) => {}
            Err(error) => {
                self.core.shared.counters.settle_failures();
                tracing::warn!(
                    record = self.record.as_str(),
                    %error,
                    "the outcome of a request did not reach the store, it is sent again until it does"
                );
                let claim = self.0.clone();
                claim.spawn(self.repeat(settlement, ran_out));
            }
        }
    }

    /// The claim is another owner's. A release that may have arrived before, and whose answer was lost, finds the claim
    /// of the next request: that is a loss only where the lease had `ran_out` before the release was sent first.
    fn refused(&self, settlement: &Settlement, ran_out: bool) {
        match settlement {
            Settlement::Abandon | Settlement::Release if !ran_out => tracing::debug!(
                record = self.record.as_str(),
                "a repeated release found the claim of the next request"
            ),
            _ => self.lose(),
        }
    }

    /// Keeps the claim and asks again, until the store has it or this process ends.
    async fn repeat(self, settlement: Settlement, ran_out: bool) {
        const LONGEST: Duration = Duration::from_secs(5);
        let shared = &self.core.shared;
        shared.renewals.start(&self.0);
        let mut pause = Duration::from_millis(50);
        loop {
            sleep(pause.mul_f64(0.5 + chance::fraction())).await;
            pause = (pause * 2).min(LONGEST);
            // One at the end of whose wait the store is back must not find all others at it at once.
            let turn = shared.repeats.acquire().await;
            let answer = self.send(&settlement).await;
            drop(turn);
            match answer {
                Ok(OwnerReply::NotOwner) => return self.refused(&settlement, ran_out),
                Ok(_) => {
                    tracing::info!(
                        record = self.record.as_str(),
                        "the outcome of a request is in the store now"
                    );
                    return;
                }
                Err(error) => {
                    shared.counters.settle_failures();
                    if matches!(
                        error.reason,
                        Reason::KeyTaken(_) | Reason::Closed | Reason::Unsupported
                    ) {
                        shared.counters.abandoned();
                        tracing::error!(
                            record = self.record.as_str(),
                            %error,
                            "the outcome of a request cannot be stored"
                        );
                        return;
                    }
                }
            }
        }
    }
}

/// Takes back a claim of which nobody knows whether it stands, in the background; whatever cannot be taken
/// back is left to its lease.
pub(super) fn undo(core: &Core, runtime: &Handle, record: RecordKey, token: ClaimToken) {
    let Ok(place) = core.shared.undos.clone().try_acquire_owned() else {
        core.shared.counters.abandoned();
        return;
    };
    let (records, lease) = (core.shared.records.clone(), core.settings.lease);
    // Takes its place in line behind the claim now.
    let first = records.release(&record, &token);
    let work = async move {
        let _place = place;
        let until = Instant::now() + lease;
        let mut answer = first.await;
        let mut pause = Duration::from_millis(50);
        while answer.is_err() && Instant::now() < until {
            sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(1));
            answer = records.release(&record, &token).await;
        }
    };
    core.shared.tasks.spawn_on(work, runtime);
}
