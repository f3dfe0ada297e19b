//! The arguments of the steps in `lua/permits.lua` and `lua/counters.lua`, and the answers of the latter.

use super::command::Command;
use super::script::{Answer, id, left, millis};
use crate::store::counter::{CounterReply, CounterRequest, CounterStep};
use crate::store::{AcquireRequest, GrantId, Kind, ReleaseRequest, RenewRequest};

/// Bytes of a permit's id.
const ID: usize = 16;

/// How many bytes the permits of a grant add to a call.
pub(super) fn weight(kind: Kind, amount: u32) -> usize {
    match kind {
        Kind::Permit => ID * amount as usize,
        _ => 0,
    }
}

pub(super) fn acquire(request: &AcquireRequest, cmd: &mut Command) {
    let mut buffer = [0; 57];
    match request.kind {
        Kind::Permit => {
            let arguments = 5 + usize::from(request.limit.is_some());
            cmd.arg(arguments).arg(ids(request.grant, request.amount));
            cmd.arg(millis(request.lease)).arg(request.tokens.max(1));
        }
        _ => {
            cmd.arg(4).arg(request.amount.max(1));
            cmd.arg(id(request.grant, &mut buffer)).arg(millis(request.lease));
        }
    }
    match request.permits {
        Some(total) => cmd.arg(total),
        None => cmd.arg(""),
    };
    if request.kind == Kind::Permit {
        match request.waiter {
            Some(waiter) => cmd.arg(id(waiter, &mut buffer)),
            None => cmd.arg(""),
        };
        if let Some(limit) = request.limit {
            cmd.arg(limit);
        }
    }
}

pub(super) fn release(request: &ReleaseRequest, keep_until: Option<tokio::time::Instant>, cmd: &mut Command) {
    let mut buffer = [0; 57];
    match request.kind {
        Kind::Permit => {
            cmd.arg(3).arg(ids(request.grant, request.amount));
            cmd.arg(id(request.grant, &mut buffer));
            cmd.arg(millis(left(keep_until)));
        }
        _ => {
            cmd.arg(1).arg(id(request.grant, &mut buffer));
        }
    }
}

pub(super) fn renew(request: &RenewRequest, cmd: &mut Command) {
    cmd.arg(2);
    match request.kind {
        Kind::Permit => cmd.arg(ids(request.grant, request.amount)),
        _ => cmd.arg(id(request.grant, &mut [0; 57])),
    };
    cmd.arg(millis(request.lease));
}

fn ids(grant: GrantId, amount: u32) -> Vec<u8> {
    grant.permits(amount.max(1))
}

/// A counter step: its name, the number of its arguments, and the arguments.
pub(super) fn count(request: &CounterRequest, refuse_after: u64, cmd: &mut Command) {
    let (name, arguments) = words(request.step);
    cmd.arg("count").arg(4 + arguments.len()).arg(name);
    match request.step.is_look() {
        true => cmd.arg(""),
        false => cmd.arg(id(request.id, &mut [0; 57])),
    };
    cmd.arg(millis(request.repeated_for)).arg(refuse_after);
    for argument in arguments {
        cmd.arg(argument);
    }
}

fn words(step: CounterStep) -> (&'static str, Vec<i64>) {
    match step {
        CounterStep::Permits => ("permits", vec![]),
        CounterStep::SetPermits { total, only_unset } => {
            ("set", vec![i64::from(total), i64::from(only_unset)])
        }
        CounterStep::AddPermits { by, unowned } => ("add", vec![by, i64::from(unowned)]),
        CounterStep::Give { amount } => ("give", vec![i64::from(amount)]),
        CounterStep::Drain => ("drain", vec![]),
        CounterStep::DeletePermits => ("delete", vec![]),
        CounterStep::Count => ("count", vec![]),
        CounterStep::SetCount { count } => ("set_count", vec![i64::try_from(count).unwrap_or(i64::MAX)]),
        CounterStep::CountDown => ("count_down", vec![]),
        CounterStep::DeleteLatch => ("delete_latch", vec![]),
    }
}

/// The answer of this name, with its numbers.
pub(super) fn read(name: &str, number: impl Fn(usize) -> Option<i64>) -> Option<Answer> {
    let count = |at| u64::try_from(number(at)?).ok();
    let reply = match name {
        "permits" => CounterReply::Permits {
            free: Some(number(1)?),
            held: count(2)?,
        },
        "unset" => CounterReply::Permits {
            free: None,
            held: count(1)?,
        },
        "changed" => CounterReply::Done(number(1)? == 1),
        "number" => CounterReply::Number(count(1)?),
        "too-few" => CounterReply::TooFew { is: count(1)? },
        "too-many" => CounterReply::TooMany,
        _ => return None,
    };
    Some(Answer::Counted(reply))
}
