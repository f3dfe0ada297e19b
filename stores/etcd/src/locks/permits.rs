//! Acquires permits of a semaphore.
//!
//! A request looks at all grants of the semaphore, and creates its own if they leave enough permits. The transaction that
//! creates it requires that no other grant has come since that look, and that the total is the same. A request that finds
//! too few permits changes nothing, except that a waiter takes a position once one of the waiters asks for several permits:
//! later waiters leave the permits for it.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::queue::Moment;
use dlock::store::{AcquireReply, Busy, GrantId, Outcome, StoreError};
use tokio::time::Instant;

use super::acquire::{Ask, failed, granted, is_epoch, record};
use super::counters::set_total;
use super::inner::Inner;
use super::names::State;
use super::positions::KEPT_FOR;
use super::release::leave_queue;
use super::seen::{Seen, Waiting, look, ranges, read};
use super::session::{Session, not_done};
use crate::client::Refusal;
use crate::client::proto::{Compare, RequestOp, TxnRequest};

/// A waiter with a position asks again within this time.
const AGAIN: Duration = Duration::from_secs(2);

/// A request that others have overtaken all the time is to be repeated within this time.
const AGAIN_IF_LATE: Duration = Duration::from_millis(100);

/// The outcome of an attempt.
enum Step {
    Replied(AcquireReply),
    /// Others were faster: the attempt must be repeated, with what was found then, or with another look.
    Again(Option<Seen>),
}

/// What a look at the semaphore means for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Judgment {
    Fits,
    /// The total must be set first.
    SetTotal(u32),
    Busy(Place),
    /// The total is smaller than the request.
    TooFew,
}

/// The position of a waiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Takes,
    Keeps,
    None,
}

/// Acquires permits, or takes a position among the waiters.
pub(crate) async fn acquire(
    inner: Arc<Inner>,
    ask: Ask,
    called: Moment,
    deadline: Instant,
) -> Result<AcquireReply, StoreError> {
    if let Some(waiter) = ask.waiter {
        inner.positions.asks(waiter);
    }
    let mut found = None;
    loop {
        let seen = match found {
            Some(seen) => seen,
            None => look(&inner, &ask.name, None, deadline).await?,
        };
        match attempt(&inner, &ask, &seen, called, deadline).await? {
            Step::Replied(reply) => return Ok(reply),
            Step::Again(_) if Instant::now() >= deadline => {
                return Ok(AcquireReply::Busy(Busy::new(None).again(AGAIN_IF_LATE)));
            }
            Step::Again(seen) => found = seen,
        }
    }
}

/// Does what follows from a look.
async fn attempt(
    inner: &Inner,
    ask: &Ask,
    seen: &Seen,
    called: Moment,
    deadline: Instant,
) -> Result<Step, StoreError> {
    seen.is_for(&ask.name, ask.kind)?;
    let mine = ask.waiter.and_then(|waiter| own(seen, waiter));
    let judgment = judge(seen, ask, mine);
    match (judgment, ask.waiter) {
        (Judgment::Fits, waiter) => {
            if let (None, Some(waiter)) = (mine, waiter) {
                leave_unseen(inner, ask, waiter, deadline).await?;
            }
            return grant(inner, ask, seen, mine, called, deadline).await;
        }
        (Judgment::SetTotal(total), _) => {
            set_total(inner, &ask.name, seen, total, deadline).await?;
            return Ok(Step::Again(None));
        }
        (Judgment::Busy(Place::Takes), Some(waiter)) => {
            if !take_position(inner, ask, waiter, deadline).await? {
                return Ok(Step::Again(None));
            }
        }
        (Judgment::Busy(Place::Keeps), Some(waiter)) => inner.positions.is_there(waiter),
        (Judgment::Busy(_) | Judgment::TooFew, Some(waiter)) if mine.is_some() => {
            let left = leave_queue(inner, &ask.name, waiter, deadline).await;
            left.map_err(|failure| not_done(failure.error()))?;
        }
        (Judgment::Busy(_) | Judgment::TooFew, _) => {}
    }
    if judgment == Judgment::TooFew {
        return Ok(Step::Replied(AcquireReply::TooFewPermits));
    }
    let mut busy = Busy::new(seen.first_end);
    // A limit may admit nothing: no release will tell.
    let waits_for_limit = ask.limit.is_some() && seen.first_end.is_none();
    if waits_for_limit || judgment != Judgment::Busy(Place::None) {
        busy = busy.again(AGAIN);
    }
    Ok(Step::Replied(AcquireReply::Busy(busy)))
}

fn own(seen: &Seen, waiter: GrantId) -> Option<&Waiting> {
    seen.waiting.iter().find(|waiting| waiting.is_of(waiter))
}

/// Decides whether there are enough permits.
fn judge(seen: &Seen, ask: &Ask, mine: Option<&Waiting>) -> Judgment {
    if let (None, Some(total)) = (seen.total, ask.permits) {
        return Judgment::SetTotal(total);
    }
    let limit = ask.limit.map(i64::from);
    let Some(most) = seen.total.into_iter().chain(limit).min() else {
        return Judgment::Busy(Place::None);
    };
    let amount = i64::from(ask.amount);
    // If all wait for one permit, there is no order.
    let has_order = seen.waiting.iter().any(|waiting| waiting.amount > 1);
    let is_mine = |waiting: &&Waiting| mine.is_some_and(|mine| mine.key == waiting.key);
    let before = seen.waiting.iter().take_while(|waiting| !is_mine(waiting));
    // A waiter for more permits than the total blocks no other one.
    let reserved: i64 = before
        .filter(|waiting| has_order && waiting.amount <= most)
        .map(|waiting| waiting.amount)
        .sum();
    if seen.held + reserved + amount <= most {
        return Judgment::Fits;
    }
    if amount > most {
        return match ask.limit {
            None => Judgment::TooFew,
            Some(_) => Judgment::Busy(Place::None),
        };
    }
    Judgment::Busy(match ask.waiter {
        Some(_) if mine.is_some() => Place::Keeps,
        Some(_) if has_order || amount > 1 => Place::Takes,
        _ => Place::None,
    })
}

/// Creates the grant, and deletes the position.
async fn grant(
    inner: &Inner,
    ask: &Ask,
    seen: &Seen,
    mine: Option<&Waiting>,
    called: Moment,
    deadline: Instant,
) -> Result<Step, StoreError> {
    let session = inner.pool.get(ask.lease, 1, deadline).await?;
    let epoch = match session.epoch(&inner.links, deadline).await {
        Ok(epoch) => epoch,
        Err(error) => {
            session.leave(1);
            // The session ended before the transaction was sent.
            let is_over = session.ended() && error.outcome == Outcome::NotDone;
            return if is_over {
                Ok(Step::Again(None))
            } else {
                Err(error)
            };
        }
    };
    let numbers = (0..).map(|number| inner.names.permits(&ask.name, session.id, number, ask.amount));
    let key = numbers.into_iter().find(|key| inner.grants.is_free(key));
    let key = key.expect("fewer grants than numbers");
    record(inner, &session, ask, &key);
    let epoch_key = session.epoch_key();
    let put = RequestOp::put(key, State::Held(ask.lease).write(ask.grant), session.id);
    let leaves = mine.map(|mine| RequestOp::delete(mine.key.clone()));
    let txn = TxnRequest {
        compare: (seen.still(inner, &ask.name).into_iter())
            .chain([Compare::changed(epoch_key, epoch)])
            .collect(),
        success: [put].into_iter().chain(leaves).collect(),
        failure: (ranges(inner, &ask.name).into_iter())
            .chain([RequestOp::range(epoch_key.to_vec(), Vec::new(), 1)])
            .collect(),
    };
    match inner.acquires.call(&ask.name, txn, deadline).await {
        Ok(reply) if reply.succeeded => {
            if let Some(waiter) = ask.waiter {
                inner.positions.remove(waiter);
            }
            let granted = granted(inner, &session, ask, &reply, called);
            Ok(Step::Replied(AcquireReply::Acquired(granted)))
        }
        Ok(reply) => {
            inner.grants.remove(ask.grant);
            is_epoch(&session, epoch, reply.found(2));
            Ok(Step::Again(Some(read(inner, &ask.name, &reply))))
        }
        Err(failure) if failure.is(Refusal::NoLease) => {
            inner.grants.remove(ask.grant);
            session.end();
            Ok(Step::Again(None))
        }
        Err(failure) => Err(failed(inner, std::slice::from_ref(ask), failure)),
    }
}

/// Gives up the position that a look did not find, if any: its key is gone, or its request has no reply and may still
/// arrive.
async fn leave_unseen(
    inner: &Inner,
    ask: &Ask,
    waiter: GrantId,
    deadline: Instant,
) -> Result<(), StoreError> {
    if inner.positions.get(waiter).is_none() {
        return Ok(());
    }
    let left = leave_queue(inner, &ask.name, waiter, deadline).await;
    left.map_err(|failure| not_done(failure.error()))
}

/// Creates the position of a waiter. Returns `false` if the request must be repeated.
async fn take_position(
    inner: &Inner,
    ask: &Ask,
    waiter: GrantId,
    deadline: Instant,
) -> Result<bool, StoreError> {
    leave_unseen(inner, ask, waiter, deadline).await?;
    let session = inner.pool.get(KEPT_FOR, 1, deadline).await?;
    let epoch = match session.epoch(&inner.links, deadline).await {
        Ok(epoch) => epoch,
        Err(error) => {
            session.leave(1);
            return Err(error);
        }
    };
    let key = |_, number| (inner.names).permits_position(&ask.name, session.id, number, ask.amount);
    let position = inner.positions.joins(waiter, &ask.name, session.clone(), key);
    let txn = join(&session, epoch, position.key, waiter);
    match inner.acquires.call(&ask.name, txn, deadline).await {
        Ok(reply) if reply.succeeded => {
            inner.positions.is_there(waiter);
            Ok(true)
        }
        Ok(reply) => {
            inner.positions.is_lost(waiter);
            is_epoch(&session, epoch, reply.found(0));
            Ok(false)
        }
        Err(failure) if failure.is(Refusal::NoLease) => {
            inner.positions.is_lost(waiter);
            session.end();
            Ok(false)
        }
        Err(failure) => {
            let error = failure.error();
            // Of unknown outcome is also the acquire: its caller then gives up the position that there may be.
            if error.outcome == Outcome::NotDone {
                inner.positions.is_lost(waiter);
            }
            Err(error)
        }
    }
}

fn join(session: &Session, epoch: i64, key: Vec<u8>, waiter: GrantId) -> TxnRequest {
    let epoch_key = session.epoch_key();
    let value = format!("{waiter} waits").into_bytes();
    TxnRequest {
        compare: vec![Compare::changed(epoch_key, epoch)],
        success: vec![RequestOp::put(key, value, session.id)],
        failure: vec![RequestOp::range(epoch_key.to_vec(), Vec::new(), 1)],
    }
}
