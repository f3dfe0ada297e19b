//! Settling a claim: the outcome is sent until the store has it.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dlock::__chance as chance;
use dlock::record::OwnerReply;
use dlock::store::{Outcome, Reason, StoreError};
use tokio::time::{sleep, timeout};

use super::claim::Claim;
use super::lease::{ClaimLease, Grant};
use super::settlement::{Settlement, is_final};
use super::shared::Core;
use super::stored::{Stamp, Stored};
use crate::lock::RequestLocks;

/// A claim together with the duty to settle it. Dropped unsettled (the runtime ends), it is no longer renewed and ends
/// with its lease.
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
        self.core.shared.renewals.stop(&self.lease);
    }
}

impl Owned {
    /// Takes ownership of a granted claim, which is renewed from now on.
    pub(super) fn take(core: Core, key: String, grant: Grant, locks: RequestLocks) -> Owned {
        let Core { shared, settings } = &core;
        shared.counters.claimed();
        if grant.attempt > 1 {
            shared.counters.taken_over();
        }
        let id = shared.claims.fetch_add(1, Ordering::Relaxed);
        let lease = ClaimLease::new(id, grant, settings, shared.counters.clone());
        let lease = Arc::new(lease);
        shared.renewals.register(&lease);
        Owned(Arc::new(Claim::new(core, lease, key, locks)))
    }

    /// Takes the duty to settle a claim whose outcome is not decided yet.
    pub(super) fn unsettled(claim: &Arc<Claim>) -> Option<Owned> {
        (!claim.lease.is_settled()).then(|| Owned(claim.clone()))
    }

    /// Records that the outcome is in the store already: this, in its stored form.
    pub(super) fn settle_by_transaction(&self, stored: &[u8]) {
        if Stored::is_tombstone(stored) {
            self.core.shared.counters.tombstones();
        }
        self.lease.settle();
    }

    /// Stores or releases. Returns when the store has it, or after a failure; then the claim is renewed and the outcome
    /// resent until the store has it.
    pub(super) async fn settle(self, settlement: impl Into<Settlement>) {
        let settlement = settlement.into();
        if self.lease.settle() {
            return;
        }
        self.core.shared.renewals.stop(&self.lease);
        if self.lease.is_lost() {
            return;
        }
        let ran_out = self.lease.may_have_run_out();
        match self.send(&settlement).await {
            Ok(OwnerReply::NotOwner) => self.refused(&settlement, ran_out),
            Ok(_) => {}
            Err(error) => {
                self.core.shared.counters.settle_failures();
                tracing::warn!(
                    record = self.lease.record.as_str(),
                    %error,
                    "the outcome of a request did not reach the store, it is sent again until it does"
                );
                let claim = self.0.clone();
                claim.spawn(self.repeat(settlement, ran_out));
            }
        }
    }

    /// Handles a claim that belongs to another owner. An earlier release whose reply was lost may find the claim of the
    /// next request: that is a loss only if the lease had `ran_out` before the first release was sent.
    fn refused(&self, settlement: &Settlement, ran_out: bool) {
        match settlement {
            Settlement::Abandon | Settlement::Release if !ran_out => tracing::debug!(
                record = self.lease.record.as_str(),
                "a repeated release found the claim of the next request"
            ),
            _ => self.lease.lose(),
        }
    }

    /// Keeps the claim and retries, until the store has the outcome or this process ends.
    async fn repeat(self, settlement: Settlement, ran_out: bool) {
        const LONGEST: Duration = Duration::from_secs(5);
        let shared = &self.core.shared;
        shared.renewals.start(&self.lease);
        let mut pause = Duration::from_millis(50);
        loop {
            sleep(chance::jittered(pause)).await;
            pause = (pause * 2).min(LONGEST);
            // A request whose wait ends when the store is back must not find all others asking at once.
            let turn = shared.repeats.acquire().await;
            let answer = self.send(&settlement).await;
            drop(turn);
            match answer {
                Ok(OwnerReply::NotOwner) => return self.refused(&settlement, ran_out),
                Ok(_) => {
                    tracing::info!(
                        record = self.lease.record.as_str(),
                        "the outcome of a request is in the store now"
                    );
                    return;
                }
                Err(error) => {
                    shared.counters.settle_failures();
                    if is_final(&error) {
                        shared.counters.abandoned();
                        tracing::error!(
                            record = self.lease.record.as_str(),
                            %error,
                            "the outcome of a request cannot be stored"
                        );
                        return;
                    }
                }
            }
        }
    }

    async fn send(&self, settlement: &Settlement) -> Result<OwnerReply, StoreError> {
        let records = &self.core.shared.records;
        let step = async {
            match settlement {
                Settlement::Keep(stored) => self.store(stored).await,
                Settlement::Abandon => records.abandon(&self.lease.record, &self.lease.token).await,
                Settlement::Release => records.release(&self.lease.record, &self.lease.token).await,
            }
        };
        timeout(self.settle_wait(), step)
            .await
            .unwrap_or_else(|_| Err(StoreError::unknown("the store does not answer")))
    }

    /// Stores the result; or, if the store refuses the response, as a full store does, only its existence: finished
    /// work must not be done again.
    async fn store(&self, stored: &Stored) -> Result<OwnerReply, StoreError> {
        let error = match self.complete(stored).await {
            Err(error) if matches!(stored, Stored::Response(_)) && is_refused(&error) => error,
            reply => return reply,
        };
        let reply = self.complete(&Stored::Unavailable).await;
        match reply {
            Ok(OwnerReply::Done) => {
                tracing::warn!(
                    record = self.lease.record.as_str(),
                    %error,
                    "the store did not take a response, it keeps only that there was one"
                );
                reply
            }
            Ok(reply) => Ok(reply),
            Err(_) => Err(error),
        }
    }

    async fn complete(&self, stored: &Stored) -> Result<OwnerReply, StoreError> {
        let Core { shared, .. } = &self.core;
        let retention = self.lease.retention();
        let response = stored.encode(Stamp::now(retention));
        let step = shared
            .records
            .complete(&self.lease.record, &self.lease.token, response, retention);
        let reply = step.await?;
        if reply == OwnerReply::Done && *stored == Stored::Unavailable {
            shared.counters.tombstones();
        }
        Ok(reply)
    }
}

/// Whether the store has refused the operation.
fn is_refused(error: &StoreError) -> bool {
    error.outcome == Outcome::NotDone && matches!(error.reason, Reason::Refused | Reason::RefusedForNow)
}
