//! Steps on plain locks for tests, of one client.

use std::sync::Arc;
use std::time::Duration;

use super::Step;
use crate::base::clock;
use crate::store::GrantId;
use crate::stores::redis::script::{Call, Verb};

pub(super) fn grant(number: u64) -> GrantId {
    GrantId::from_parts(7, number)
}

pub(super) fn step(key: &str, verb: Verb) -> Step {
    let call = Call {
        key: Arc::from(key),
        slot: None,
        verb,
        vote_after: None,
    };
    let deadline = clock::now() + Duration::from_secs(1);
    Step::unanswered(call, deadline)
}

pub(super) fn acquire(key: &str, number: u64, tokens: u32) -> Step {
    let (grant, lease) = (grant(number), Duration::from_secs(30));
    step(key, Verb::Acquire { grant, lease, tokens })
}

pub(super) fn release(key: &str, number: u64) -> Step {
    releasing(key, number, false)
}

/// A release that undoes an acquire.
pub(super) fn undo(key: &str, number: u64) -> Step {
    releasing(key, number, true)
}

fn releasing(key: &str, number: u64, undoes_acquire: bool) -> Step {
    let grant = grant(number);
    step(
        key,
        Verb::Release {
            grant,
            keep_until: None,
            undoes_acquire,
        },
    )
}
