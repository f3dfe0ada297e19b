//! The records of a store.

use std::sync::Arc;
use std::time::Duration;

use dlock::record::{
    ClaimReply, ClaimRequest, ClaimToken, OwnerReply, RecordKey, RecordLook, SlotOutcome, SlotReply,
    SlotRequest,
};
use dlock::store::{Store, StoreError};
use dlock::stores::memory::MemoryStore;
use futures_util::FutureExt;

use crate::check::Checks;
use crate::words;

/// A store that is full takes no response that is longer, in bytes.
const LARGE: usize = 300;

#[derive(Debug, Clone)]
pub(crate) enum Request {
    Claim(ClaimRequest),
    ClaimSlot(ClaimRequest, SlotRequest),
    Look(RecordKey),
    Extend {
        key: RecordKey,
        token: ClaimToken,
        lease: Duration,
        retention: Duration,
    },
    Complete {
        key: RecordKey,
        token: ClaimToken,
        response: Vec<u8>,
        retention: Duration,
    },
    Release {
        key: RecordKey,
        token: ClaimToken,
    },
    Abandon {
        key: RecordKey,
        token: ClaimToken,
    },
}

#[derive(Debug)]
pub(crate) enum Reply {
    Claim(ClaimReply),
    Slot(SlotReply),
    Look(RecordLook),
    Owner(OwnerReply),
}

impl Request {
    /// Whether a store that is full refuses it.
    pub(super) fn grows(&self) -> bool {
        match self {
            Request::Claim(_) | Request::ClaimSlot(..) => true,
            Request::Complete { response, .. } => response.len() > LARGE,
            _ => false,
        }
    }

    /// As a trace has it.
    pub(crate) fn verb(&self) -> String {
        match self {
            Request::Claim(_) => "claims".to_owned(),
            Request::ClaimSlot(_, slot) => match slot.time() {
                Some(_) => "claims a slot of".to_owned(),
                None => "claims the nearest slot of".to_owned(),
            },
            Request::Look(_) => "looks at".to_owned(),
            Request::Extend { .. } => "extends".to_owned(),
            Request::Complete { response, .. } => format!("completes, with {} bytes,", response.len()),
            Request::Release { .. } => "releases".to_owned(),
            Request::Abandon { .. } => "abandons".to_owned(),
        }
    }

    /// The record and the claim.
    pub(crate) fn about(&self, checks: &Checks) -> String {
        let (key, token) = match self {
            Request::Claim(request) | Request::ClaimSlot(request, _) => (&request.key, &request.token),
            Request::Look(key) => return format!("record {}", checks.records.name_of(key)),
            Request::Extend { key, token, .. }
            | Request::Complete { key, token, .. }
            | Request::Release { key, token }
            | Request::Abandon { key, token } => (key, token),
        };
        let (key, claim) = (checks.records.name_of(key), checks.records.claim_name(token));
        format!("record {key} ({claim})")
    }
}

pub(super) fn step(memory: Arc<MemoryStore>, request: Request) -> Result<Reply, StoreError> {
    fn now<T>(step: impl Future<Output = T>) -> T {
        step.now_or_never().expect("the memory store answers at once")
    }
    let records = Store::records(memory).expect("the memory store keeps records");
    let reply = match request {
        Request::Claim(request) => return Ok(Reply::Claim(now(records.claim(request))?)),
        Request::ClaimSlot(request, slot) => return Ok(Reply::Slot(now(records.claim_slot(request, slot))?)),
        Request::Look(key) => return Ok(Reply::Look(now(records.inspect(&key, false))?)),
        Request::Extend {
            key,
            token,
            lease,
            retention,
        } => now(records.extend(&key, &token, lease, retention)),
        Request::Complete {
            key,
            token,
            response,
            retention,
        } => now(records.complete(&key, &token, response, retention)),
        Request::Release { key, token } => now(records.release(&key, &token)),
        Request::Abandon { key, token } => now(records.abandon(&key, &token)),
    };
    reply.map(Reply::Owner)
}

impl Reply {
    /// As a trace has it.
    pub(crate) fn told(&self) -> String {
        match self {
            Reply::Claim(ClaimReply::Claimed { attempt, fence }) => {
                format!("claimed, attempt {attempt}, fence {}", words::token(*fence))
            }
            Reply::Claim(ClaimReply::Completed { response }) => {
                format!("it was done, with {} bytes", response.len())
            }
            Reply::Claim(ClaimReply::InProgress { remaining, .. }) => {
                format!("in progress for another {}", words::time(*remaining))
            }
            Reply::Claim(ClaimReply::Mismatch) => "it was used for something else".to_owned(),
            Reply::Claim(ClaimReply::Orphan { .. }) => "it was begun, and nobody knows its end".to_owned(),
            Reply::Claim(other) => format!("{other:?}"),
            Reply::Slot(reply) => match &reply.outcome {
                SlotOutcome::Claim(claim) => Reply::Claim(claim.clone()).told(),
                SlotOutcome::Missed => "a later slot was claimed".to_owned(),
                SlotOutcome::ClockWentBack => "the clock went back".to_owned(),
                _ => "too far ahead".to_owned(),
            },
            Reply::Look(_) => "its state and the time".to_owned(),
            Reply::Owner(OwnerReply::Done) => "done".to_owned(),
            Reply::Owner(_) => "the claim is not its owner's any more".to_owned(),
        }
    }
}
