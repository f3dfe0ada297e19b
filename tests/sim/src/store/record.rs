//! The records of a store.

use std::sync::Arc;
use std::time::Duration;

use dlock::record::{ClaimReply, ClaimRequest, ClaimToken, OwnerReply, RecordKey};
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
    Owner(OwnerReply),
}

impl Request {
    /// Whether a store that is full refuses it.
    pub(super) fn grows(&self) -> bool {
        match self {
            Request::Claim(_) => true,
            Request::Complete { response, .. } => response.len() > LARGE,
            _ => false,
        }
    }

    /// As a trace has it.
    pub(crate) fn verb(&self) -> String {
        match self {
            Request::Claim(_) => "claims".to_owned(),
            Request::Extend { .. } => "extends".to_owned(),
            Request::Complete { response, .. } => format!("completes, with {} bytes,", response.len()),
            Request::Release { .. } => "releases".to_owned(),
            Request::Abandon { .. } => "abandons".to_owned(),
        }
    }

    /// The record and the claim.
    pub(crate) fn about(&self, checks: &Checks) -> String {
        let (key, token) = match self {
            Request::Claim(request) => (&request.key, &request.token),
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
            Reply::Owner(OwnerReply::Done) => "done".to_owned(),
            Reply::Owner(_) => "the claim is not its owner's any more".to_owned(),
        }
    }
}
