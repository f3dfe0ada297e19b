//! One call: request the claim, do the work, settle the claim.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::runtime;

use super::claim::{self, Asking, Claim, OnceClaim, Settled, Settlement, Target};
use super::{OnFailure, Once, OnceError, Source, record_of, stored};
use crate::Error;
use crate::api::builder::DEFAULT_RETRY_FOR;
use crate::base::{broken, clock};
use crate::runtime::emit::Event;
use crate::runtime::outside::with_timers_of;
use crate::runtime::scope;
use crate::store::records::{ClaimReply, ClaimRequest, ClaimToken, OnOrphan, SlotReply, SlotRequest};
use crate::store::{StoreError, Watch};

/// The shortest interval at which a waiter retries without a notification.
const SHORTEST_LOOK: Duration = Duration::from_millis(10);

/// What a call is admitted to do.
pub(super) enum Admitted {
    Claimed(Claim),
    /// The work was done before, and this was stored.
    Done(Vec<u8>),
    Elsewhere {
        attempt: u32,
        remaining: Duration,
    },
    Orphaned {
        attempt: u32,
    },
    /// The slot decides: the reply to the claim says why.
    NotNow,
}

/// The outcome of the work.
pub(super) enum Carried<T> {
    Ran(T),
    /// Its result did not reach the store in time.
    Unrecorded(T, Error),
}

/// The error for a reply that does not fit the request.
pub(super) fn strange() -> StoreError {
    StoreError::unknown("the store's reply does not fit the request")
}

impl Once {
    /// The runtime that renews and settles claims, and whose timers a call uses outside tokio.
    pub(super) fn runtime(&self) -> runtime::Handle {
        match &self.source {
            Source::Records(_) => runtime::Handle::current(),
            Source::Client(handle) => handle.shared().runtime.clone(),
        }
    }

    /// Whether that runtime may have ended: while it lives, only the shutdown ends what the client runs there.
    pub(super) fn may_have_no_runtime(&self) -> bool {
        match &self.source {
            Source::Records(_) => false,
            Source::Client(handle) => claim::may_have_no_runtime(handle.shared()),
        }
    }

    pub(super) fn target(&self) -> Result<Target, Error> {
        let mut nested = false;
        let (retry_for, client) = match &self.source {
            Source::Records(_) => (DEFAULT_RETRY_FOR, None),
            Source::Client(handle) => {
                let shared = handle.shared();
                nested = scope::current().is_inside(shared);
                if claim::ending(shared, nested).is_given() {
                    return Err(shared.refusal());
                }
                (shared.settings.retry_for, Some(shared.clone()))
            }
        };
        Ok(Target {
            name: self.key.clone(),
            records: self.records()?,
            record: record_of(&self.key)?,
            lease: self.lease_or_default(),
            keep: self.keep_or_default(),
            on_orphan: self.on_orphan,
            retry_for,
            runtime: self.runtime(),
            client,
            nested,
        })
    }

    /// Asks until the work may begin, or its outcome is known without it; for work with slots, returns the last claim
    /// reply too.
    pub(super) async fn admitted(
        &self,
        target: &Arc<Target>,
        slot: Option<SlotRequest>,
    ) -> Result<(Admitted, Option<SlotReply>), Error> {
        let asking = Box::pin(self.asks(target, slot));
        with_timers_of(&target.runtime, asking).await
    }

    async fn asks(
        &self,
        target: &Arc<Target>,
        slot: Option<SlotRequest>,
    ) -> Result<(Admitted, Option<SlotReply>), Error> {
        let until = self.wait.map(|wait| clock::now() + wait);
        let mut request = ClaimRequest::new(
            target.record.clone(),
            ClaimToken::new(),
            [0; 32],
            target.lease,
            self.keep_or_default(),
        );
        request.on_orphan = self.on_orphan;
        let mut asking = Asking::new(target.clone(), request, slot);
        let mut watch: Option<Watch> = None;
        loop {
            let (reply, of_slot) = tokio::select! {
                biased;
                refusal = target.refused() => return Err(refusal),
                reply = asking.ask() => reply.map_err(|error| self.told(error))?,
            };
            let admitted = match reply {
                None => Admitted::NotNow,
                Some(ClaimReply::Claimed { attempt, fence }) => {
                    Admitted::Claimed(asking.granted(attempt, fence, of_slot.as_ref())?)
                }
                Some(ClaimReply::Completed { response }) => Admitted::Done(response),
                Some(ClaimReply::Orphan { attempt }) => Admitted::Orphaned { attempt },
                Some(ClaimReply::InProgress { attempt, remaining }) => {
                    let left = until.map_or(Duration::ZERO, |until| {
                        until.saturating_duration_since(clock::now())
                    });
                    if left.is_zero() {
                        return Ok((Admitted::Elsewhere { attempt, remaining }, of_slot));
                    }
                    if let Some(reply) = &of_slot {
                        // It waits for this slot, however long that takes.
                        asking.stay_with(reply.slot);
                    }
                    // A notification may be lost, and a process that crashed sends none.
                    let look = remaining.min(target.lease / 3).max(SHORTEST_LOOK).min(left);
                    let watch = watch.get_or_insert_with(|| target.records.watch(&target.record));
                    tokio::select! {
                        biased;
                        refusal = target.refused() => return Err(refusal),
                        () = watch.changed() => {}
                        () = claim::sleep(look) => {}
                    }
                    continue;
                }
                Some(ClaimReply::Mismatch) => {
                    return Err(Error::KeyTaken {
                        key: self.key.clone(),
                        found: match slot {
                            Some(_) => "a record of work without slots of time".to_owned(),
                            None => "a record of something else".to_owned(),
                        },
                    });
                }
            };
            return Ok((admitted, of_slot));
        }
    }

    /// Does the work under its claim, and settles the claim.
    pub(super) async fn carried_out<T, E, W, Fut>(
        &self,
        target: &Arc<Target>,
        claim: Claim,
        work: W,
    ) -> Result<Carried<T>, OnceError<E>>
    where
        T: Serialize,
        W: FnOnce(OnceClaim) -> Fut,
        Fut: Future<Output = Result<T, E>>,
    {
        let attempt = claim.attempt();
        if let OnFailure::AtMost(most) = self.on_failure
            && attempt > most
        {
            // Earlier attempts have crashed, or their failures did not reach the store.
            self.settled(target, claim, Settlement::Keep(stored::failed(most)))
                .await;
            return Err(OnceError::Failed { attempts: most });
        }
        let view = claim.view();
        if !view.is_held() && !broken!(OnceGoesOnWithoutClaim) {
            // Its reply came too late. No work was started under it.
            self.settled(target, claim, Settlement::Release).await;
            return Err(self.lost(attempt, false));
        }
        let output = tokio::select! {
            biased;
            // The work itself is polled in the runtime of the caller, if there is one.
            () = with_timers_of(&target.runtime, claim.lost()), if !broken!(OnceGoesOnWithoutClaim) => return Err(self.lost(attempt, true)),
            output = claim::under(view, work) => output,
        };
        let value = match output {
            Ok(value) => value,
            Err(error) => {
                let settlement = match claim.is_not_started() {
                    true => Settlement::Release,
                    false => self.after_failure(attempt),
                };
                self.settled(target, claim, settlement).await;
                return Err(OnceError::Work(error));
            }
        };
        let result = stored::result(&value).unwrap_or_else(|why| {
            let (name, why) = (&self.key, why.as_str());
            Event::ResultNotKept { name, why }.emit();
            stored::unavailable()
        });
        match self.settled(target, claim, Settlement::Keep(result)).await {
            Settled::Done => Ok(Carried::Ran(value)),
            Settled::NotOwner => Err(self.lost(attempt, true)),
            Settled::Failed(error) => Ok(Carried::Unrecorded(value, self.told(error))),
        }
    }

    fn after_failure(&self, attempt: u32) -> Settlement {
        match (self.on_failure, self.on_orphan) {
            (OnFailure::Keep, _) => Settlement::Keep(stored::failed(attempt)),
            (OnFailure::AtMost(most), _) if attempt >= most => Settlement::Keep(stored::failed(attempt)),
            // An attempt that reported its failure is not an orphan.
            (OnFailure::RunAgain, OnOrphan::Leave) => Settlement::Release,
            (OnFailure::RunAgain | OnFailure::AtMost(_), _) => Settlement::Abandon,
        }
    }

    /// Settles the claim, and waits for that as long as the lease would have lasted; then it continues in the
    /// background.
    async fn settled(&self, target: &Target, claim: Claim, settlement: Settlement) -> Settled {
        let mut settling = claim.settle(settlement);
        let waited_too_long = || StoreError::unknown("the store did not confirm it in time");
        tokio::select! {
            biased;
            settled = &mut settling => {
                settled.unwrap_or_else(|_| Settled::Failed(StoreError::unknown("the runtime has ended")))
            }
            () = with_timers_of(&target.runtime, claim::sleep(target.lease)) => Settled::Failed(waited_too_long()),
        }
    }

    fn lost<E>(&self, attempt: u32, started: bool) -> OnceError<E> {
        let name = &self.key;
        Event::ClaimLost { name, attempt }.emit();
        OnceError::Lost { attempt, started }
    }

    pub(super) fn told(&self, error: StoreError) -> Error {
        error.into_error("the work", &self.key)
    }
}
