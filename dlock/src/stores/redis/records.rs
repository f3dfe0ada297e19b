//! Records on a Redis or Valkey server, over the connections of its locks and in the same calls.
//!
//! `lua/records.lua` describes the format of a record, and each step. All times are of the server's clock. Steps sent
//! over a connection that broke are resent; no copy of a claim takes effect after the deadline of the first one, and a
//! release is repeated until none can.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::store::records::{
    ClaimReply, ClaimRequest, ClaimToken, ForgetReply, OwnerReply, RecordKey, RecordLook, RecordStore,
    SlotOutcome, SlotReply, SlotRequest,
};
use crate::store::{StoreError, Watch};
use crate::stores::redis::{Answer, Done, RedisStore, Response, Verb, strange};

/// The records beside the locks of one server.
pub(crate) struct RedisRecords(pub(crate) Arc<RedisStore>);

impl RedisRecords {
    /// A step that only the owner may run.
    fn change(
        &self,
        key: &RecordKey,
        verb: Verb,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + use<> {
        let step = self.0.record_step(key, verb);
        async move {
            match step.await?.answer {
                Answer::Done { .. } => Ok(OwnerReply::Done),
                Answer::NotOwner => Ok(OwnerReply::NotOwner),
                other => Err(strange(&other)),
            }
        }
    }
}

fn claimed(answer: Answer) -> Result<ClaimReply, StoreError> {
    Ok(match answer {
        Answer::Claimed { attempt, fence } => ClaimReply::Claimed { attempt, fence },
        Answer::Completed(Response(response)) => ClaimReply::Completed { response },
        Answer::Running { remaining, attempt } => ClaimReply::InProgress { remaining, attempt },
        Answer::Mismatch => ClaimReply::Mismatch,
        Answer::Orphan { attempt } => ClaimReply::Orphan { attempt },
        other => return Err(strange(&other)),
    })
}

impl RecordStore for RedisRecords {
    fn claim(
        self: Arc<Self>,
        request: ClaimRequest,
    ) -> impl Future<Output = Result<ClaimReply, StoreError>> + Send + 'static {
        let key = request.key.clone();
        let step = self.0.record_step(&key, Verb::Claim(Box::new(request)));
        async move {
            let Done { answer, .. } = step.await?;
            claimed(answer)
        }
    }

    fn claim_slot(
        self: Arc<Self>,
        request: ClaimRequest,
        slot: SlotRequest,
    ) -> impl Future<Output = Result<SlotReply, StoreError>> + Send + 'static {
        let key = request.key.clone();
        let step = self.0.record_step(&key, Verb::ClaimSlot(Box::new(request), slot));
        async move {
            match step.await?.answer {
                Answer::Slot {
                    now,
                    slot,
                    last,
                    answer,
                } => {
                    let outcome = match *answer {
                        Answer::Missed => SlotOutcome::Missed,
                        Answer::ClockWentBack => SlotOutcome::ClockWentBack,
                        Answer::TooFarAhead => SlotOutcome::TooFarAhead,
                        other => SlotOutcome::Claim(claimed(other)?),
                    };
                    Ok(SlotReply::of_micros(now, slot, last, outcome))
                }
                other => Err(strange(&other)),
            }
        }
    }

    fn inspect(
        self: Arc<Self>,
        key: RecordKey,
        response: bool,
    ) -> impl Future<Output = Result<RecordLook, StoreError>> + Send + 'static {
        let step = self.0.record_step(&key, Verb::LookAtRecord { response });
        async move {
            match step.await?.answer {
                Answer::Look(look) => Ok(*look),
                other => Err(strange(&other)),
            }
        }
    }

    fn forget(
        self: Arc<Self>,
        key: RecordKey,
    ) -> impl Future<Output = Result<ForgetReply, StoreError>> + Send + 'static {
        let step = self.0.record_step(&key, Verb::ForgetRecord);
        async move {
            match step.await?.answer {
                Answer::Forget(reply) => Ok(reply),
                other => Err(strange(&other)),
            }
        }
    }

    fn extend(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
        lease: Duration,
        retention: Duration,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
        self.change(
            &key,
            Verb::Extend {
                token,
                lease,
                retention,
            },
        )
    }

    fn complete(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
        response: Vec<u8>,
        retention: Duration,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
        self.change(
            &key,
            Verb::Complete {
                token,
                response: Response(response),
                retention,
            },
        )
    }

    fn release(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
        self.change(&key, Verb::GiveBack { token, forget: true })
    }

    fn abandon(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
        self.change(&key, Verb::GiveBack { token, forget: false })
    }

    fn watch(self: Arc<Self>, key: &RecordKey) -> Watch {
        self.0.watch_record(key)
    }
}
