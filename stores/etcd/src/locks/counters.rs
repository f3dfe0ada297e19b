//! Changes of numbers: the total of a semaphore, and the count of a latch.
//!
//! An operation looks at the number, and changes it in a transaction which requires that it is still the same. The same
//! transaction creates a key with the reply, by the id of the operation: if that key exists, the operation was carried out.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::counter::{CounterReply, CounterRequest, CounterStep};
use dlock::store::{GrantId, Reason, StoreError};
use tokio::time::Instant;

use super::inner::Inner;
use super::names::Name;
use super::seen::{Seen, look};
use super::session::not_done;
use crate::client::proto::{Compare, RequestOp, TxnRequest};
use crate::client::{Failure, Refusal};

/// The maximum total.
const MOST: i64 = i32::MAX as i64;

/// What an operation changes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Nothing,
    SetTotal(i64),
    DeleteSemaphore,
    SetCount(u64),
    DeleteLatch,
}

/// Carries out an operation, or returns the reply to it if it was carried out before.
pub(crate) async fn count(
    inner: Arc<Inner>,
    name: Name,
    request: CounterRequest,
    deadline: Instant,
) -> Result<CounterReply, StoreError> {
    let CounterRequest {
        id,
        repeated_for,
        step,
        ..
    } = request;
    loop {
        let seen = look(&inner, &name, Some(id), deadline).await?;
        if let Some(reply) = seen.operation.as_deref().and_then(read) {
            return Ok(reply);
        }
        seen.is_for(&name, step.kind())?;
        let (change, reply) = change(step, &seen);
        if step.is_look() {
            return Ok(reply);
        }
        let written = Written {
            id,
            value: write(reply),
            kept_for: repeated_for,
        };
        if carry_out(&inner, &name, &seen, change, written, deadline)
            .await?
            .is_some()
        {
            return Ok(reply);
        }
        if Instant::now() >= deadline {
            return Err(others_were_faster());
        }
    }
}

/// The error of an operation that found another number each time until its deadline.
pub(crate) fn others_were_faster() -> StoreError {
    StoreError::not_done(
        Reason::RefusedForNow,
        "other clients changed the number again and again",
    )
}

/// The key that tells that an operation was carried out.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) id: GrantId,
    pub(crate) value: String,
    pub(crate) kept_for: Duration,
}

/// Changes what was seen, at the returned revision. Returns `None` if nothing was done because it has changed since.
pub(crate) async fn carry_out(
    inner: &Inner,
    name: &Name,
    seen: &Seen,
    change: Change,
    written: Written,
    deadline: Instant,
) -> Result<Option<i64>, StoreError> {
    let lease = inner.answers.lease(written.kept_for, deadline).await?;
    let key = inner.names.operation(written.id);
    // What an earlier copy of the same operation has written is no reason for another one.
    let compare = match &seen.operation {
        None => vec![Compare::created(&key, 0)],
        Some(value) => Compare::begins(&key, value.split(' ').next().unwrap_or_default()).into(),
    };
    let mut success = change.operations(inner, name);
    success.push(RequestOp::put(key, written.value.into_bytes(), lease));
    let txn = TxnRequest {
        compare: compare.into_iter().chain(seen.still(inner, name)).collect(),
        success,
        failure: Vec::new(),
    };
    match inner.acquires.call(name, txn, deadline).await {
        Ok(reply) => Ok(reply.succeeded.then(|| reply.revision())),
        Err(failure) if failure.is(Refusal::NoLease) => {
            inner.answers.is_gone(lease).await;
            Ok(None)
        }
        Err(failure) => Err(Failure::error(failure)),
    }
}

/// Sets the total, unless the semaphore has changed since. Another copy of the request does no harm.
pub(crate) async fn set_total(
    inner: &Inner,
    name: &Name,
    seen: &Seen,
    total: u32,
    deadline: Instant,
) -> Result<(), StoreError> {
    let key = inner.names.total(name);
    let txn = TxnRequest {
        compare: seen.still(inner, name).into(),
        success: vec![RequestOp::put(key, total.to_string().into_bytes(), 0)],
        failure: Vec::new(),
    };
    let set = inner.acquires.call(name, txn, deadline).await;
    set.map(drop).map_err(|failure| not_done(failure.error()))
}

impl Change {
    fn operations(self, inner: &Inner, name: &Name) -> Vec<RequestOp> {
        let names = &inner.names;
        let put = |key, number: String| vec![RequestOp::put(key, number.into_bytes(), 0)];
        match self {
            Change::Nothing => Vec::new(),
            Change::SetTotal(total) => put(names.total(name), total.to_string()),
            Change::DeleteSemaphore => vec![
                RequestOp::delete(names.total(name)),
                RequestOp::delete_all(names.all_permits(name)),
            ],
            Change::SetCount(count) => put(names.count(name), count.to_string()),
            Change::DeleteLatch => vec![RequestOp::delete(names.count(name))],
        }
    }
}

/// Decides what an operation does.
fn change(step: CounterStep, seen: &Seen) -> (Change, CounterReply) {
    match step {
        CounterStep::Count
        | CounterStep::SetCount { .. }
        | CounterStep::CountDown
        | CounterStep::DeleteLatch => of_latch(step, seen.count),
        _ => of_semaphore(step, seen),
    }
}

fn of_semaphore(step: CounterStep, seen: &Seen) -> (Change, CounterReply) {
    let Seen { total, held, .. } = *seen;
    let permits = |total: Option<i64>| CounterReply::Permits {
        free: total.map(|total| total - held),
        held: held.unsigned_abs(),
    };
    let nothing = |reply| (Change::Nothing, reply);
    let sets = |total: i64, reply| (Change::SetTotal(total), reply);
    let number = |number: i64| u64::try_from(number).unwrap_or(0);
    match step {
        CounterStep::SetPermits {
            total: wanted,
            only_unset,
        } => {
            let wanted = i64::from(wanted);
            match total {
                Some(total) if only_unset || total == wanted => nothing(CounterReply::Done(false)),
                _ => sets(wanted, CounterReply::Done(true)),
            }
        }
        CounterStep::AddPermits { by, unowned } => {
            let before = total.unwrap_or(0);
            let after = before.saturating_add(by);
            if by < 0 && (total.is_none() || (!unowned && after < 0)) {
                return nothing(CounterReply::TooFew { is: number(before) });
            }
            if after > MOST || after - held < -MOST {
                return nothing(CounterReply::TooMany);
            }
            sets(after, permits(Some(after)))
        }
        CounterStep::Give { amount } => match total.map(|total| total + i64::from(amount)) {
            None => nothing(CounterReply::TooFew { is: 0 }),
            Some(after) if after > MOST => nothing(CounterReply::TooMany),
            Some(after) => sets(after, permits(Some(after))),
        },
        CounterStep::Drain => match total.map(|total| (total, total - held)) {
            Some((total, free)) if free > 0 => sets(total - free, CounterReply::Number(number(free))),
            _ => nothing(CounterReply::Number(0)),
        },
        CounterStep::DeletePermits => match total.is_some() || held > 0 {
            true => (Change::DeleteSemaphore, CounterReply::Done(true)),
            false => nothing(CounterReply::Done(false)),
        },
        _ => nothing(permits(total)),
    }
}

fn of_latch(step: CounterStep, count: Option<u64>) -> (Change, CounterReply) {
    match (step, count) {
        (CounterStep::SetCount { count }, None) => (Change::SetCount(count), CounterReply::Done(true)),
        (CounterStep::SetCount { .. }, Some(_)) | (CounterStep::DeleteLatch, None) => {
            (Change::Nothing, CounterReply::Done(false))
        }
        (CounterStep::DeleteLatch, Some(_)) => (Change::DeleteLatch, CounterReply::Done(true)),
        (CounterStep::CountDown, None) => (Change::Nothing, CounterReply::TooFew { is: 0 }),
        (CounterStep::CountDown, Some(count)) if count > 1 => {
            (Change::SetCount(count - 1), CounterReply::Number(count - 1))
        }
        (CounterStep::CountDown, Some(_)) => (Change::DeleteLatch, CounterReply::Number(0)),
        (_, count) => (Change::Nothing, CounterReply::Number(count.unwrap_or(0))),
    }
}

/// Returns the value of the key that remembers a reply.
fn write(reply: CounterReply) -> String {
    match reply {
        CounterReply::Permits { free: None, held } => format!("unset {held}"),
        CounterReply::Permits {
            free: Some(free),
            held,
        } => format!("permits {free} {held}"),
        CounterReply::Done(done) => format!("done {done}"),
        CounterReply::Number(number) => format!("number {number}"),
        CounterReply::TooFew { is } => format!("few {is}"),
        // TooMany is the last one.
        _ => "many ".to_owned(),
    }
}

fn read(value: &str) -> Option<CounterReply> {
    let (word, rest) = value.split_once(' ')?;
    Some(match word {
        "unset" => CounterReply::Permits {
            free: None,
            held: rest.parse().ok()?,
        },
        "permits" => {
            let (free, held) = rest.split_once(' ')?;
            CounterReply::Permits {
                free: Some(free.parse().ok()?),
                held: held.parse().ok()?,
            }
        }
        "done" => CounterReply::Done(rest.parse().ok()?),
        "number" => CounterReply::Number(rest.parse().ok()?),
        "few" => CounterReply::TooFew {
            is: rest.parse().ok()?,
        },
        "many" => CounterReply::TooMany,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_is_read_as_it_was_written() {
        let permits = |free| CounterReply::Permits { free, held: 3 };
        for reply in [
            permits(None),
            permits(Some(-2)),
            CounterReply::Done(true),
            CounterReply::Done(false),
            CounterReply::Number(u64::MAX),
            CounterReply::TooFew { is: 7 },
            CounterReply::TooMany,
        ] {
            assert_eq!(read(&write(reply)), Some(reply));
        }
        assert_eq!(read("taken 2"), None);
    }
}
