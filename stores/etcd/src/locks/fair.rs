//! Acquires fair locks. A waiter has a position: a key whose create revision is its place in the order.
//!
//! The grant is the key of a plain lock. The transaction that creates it deletes the position, and requires that there is
//! neither a grant nor an earlier position; otherwise it creates the position, or finds the one before it.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::queue::Moment;
use dlock::store::{AcquireReply, Busy, GrantId, Kind, Outcome, Reason, StoreError};
use tokio::time::Instant;

use super::acquire::{Ask, failed, granted, is_epoch, record, taken};
use super::inner::Inner;
use super::names::{Name, State, other_lock};
use super::positions::{KEPT_FOR, Position, PositionState, Standing};
use super::session::Session;
use super::waiters::position_topic;
use crate::client::Refusal;
use crate::client::proto::{
    Compare, KeyRange, KeyValue, RangeRequest, RequestOp, SortOrder, SortTarget, TxnRequest, TxnResponse,
};

/// The order of a waiter that has no position: after all others.
const LAST: i64 = i64::MAX;

/// Acquires a fair lock, or takes a position in its queue.
pub(crate) async fn acquire(
    inner: Arc<Inner>,
    ask: Ask,
    called: Moment,
    deadline: Instant,
) -> Result<AcquireReply, StoreError> {
    if let Some(busy) = inner.positions.asks(ask.grant) {
        return Ok(AcquireReply::Busy(busy));
    }
    loop {
        let session = inner.pool.get(ask.lease, 1, deadline).await?;
        match attempt(&inner, &session, &ask, called, deadline).await {
            Ok(Some(reply)) => return Ok(reply),
            Ok(None) if Instant::now() < deadline => {}
            Ok(None) => {
                return Err(StoreError::not_done(Reason::Unreachable, inner.links.silence()));
            }
            // The session ended before the transaction was sent.
            Err(error)
                if session.ended() && error.outcome == Outcome::NotDone && Instant::now() < deadline => {}
            Err(error) => return Err(error),
        }
    }
}

/// Sends the transaction once. Returns `None` if nothing was done, and the request must be repeated.
async fn attempt(
    inner: &Inner,
    session: &Arc<Session>,
    ask: &Ask,
    called: Moment,
    deadline: Instant,
) -> Result<Option<AcquireReply>, StoreError> {
    let prepared = async {
        let epoch = session.epoch(&inner.links, deadline).await?;
        Ok((epoch, position(inner, ask, deadline).await?))
    };
    let (epoch, position) = match prepared.await {
        Ok(prepared) => prepared,
        Err(error) => {
            session.leave(1);
            return Err(error);
        }
    };
    record(inner, session, ask, &inner.names.exclusive(&ask.name, Kind::Fair));
    let txn = transaction(inner, session, epoch, ask, position.as_ref());
    let reply = match inner.acquires.call(&ask.name, txn, deadline).await {
        Ok(reply) => reply,
        Err(failure) => {
            let has_lost_lease = failure.is(Refusal::NoLease);
            let error = failed(inner, std::slice::from_ref(ask), failure);
            let is_new = |position: &Position| position.state == PositionState::InFlight;
            if error.outcome == Outcome::NotDone && position.as_ref().is_some_and(is_new) {
                inner.positions.is_lost(ask.grant);
            }
            if !has_lost_lease {
                return Err(error);
            }
            // One of them has ended.
            let _ = session.keep_alive(&inner.links).await;
            if let Some(position) = position {
                let _ = position.session.keep_alive(&inner.links).await;
            }
            return Ok(None);
        }
    };
    if reply.succeeded {
        let behind = behind(inner, ask, &reply);
        inner.positions.remove(ask.grant);
        let granted = granted(inner, session, ask, &reply, called).behind(behind);
        return Ok(Some(AcquireReply::Acquired(granted)));
    }
    inner.grants.remove(ask.grant);
    busy(inner, session, epoch, ask, position, reply)
}

/// Returns the waiter's position, or a new one; `None` if it takes none.
async fn position(inner: &Inner, ask: &Ask, deadline: Instant) -> Result<Option<Position>, StoreError> {
    if !ask.queue {
        return Ok(None);
    }
    match inner.positions.get(ask.grant) {
        Some(position) if position.state == PositionState::Stands => Ok(Some(position)),
        _ => {
            let session = inner.pool.get(KEPT_FOR, 1, deadline).await?;
            let id = session.id;
            let key = |order, number| inner.names.position(&ask.name, order, id, number);
            Ok(Some(inner.positions.joins(ask.grant, &ask.name, session, key)))
        }
    }
}

/// The results of the transaction, in the order of its operations.
///
/// | | granted | otherwise |
/// |---|---|---|
/// | 0 | the grant | the grant in the way |
/// | 1 | the position is deleted | the epoch of the session |
/// | 2 | the returned waiters behind | the position, or the one before it |
/// | 3 | the other waiters behind | |
fn transaction(
    inner: &Inner,
    session: &Session,
    epoch: i64,
    ask: &Ask,
    position: Option<&Position>,
) -> TxnRequest {
    let (names, name, grant) = (&inner.names, &ask.name, ask.grant.to_string());
    let order = position.and_then(|position| position.order).unwrap_or(LAST);
    let is_epoch = Compare::changed(session.epoch_key(), epoch);
    let (held_from, held_to) = names.grants(name);
    let mut txn = TxnRequest {
        compare: vec![
            is_epoch.clone(),
            Compare::none(held_from.clone(), held_to.clone()),
        ],
        success: vec![RequestOp::put(
            names.exclusive(name, Kind::Fair),
            State::Held(ask.lease).write(ask.grant),
            session.id,
        )],
        failure: vec![
            RequestOp::range(held_from, held_to, 1),
            RequestOp::range(session.epoch_key().to_vec(), Vec::new(), 1),
        ],
    };
    let (waiting_from, waiting_to) = names.waiting(name);
    let none_waits = Compare::none(waiting_from, waiting_to);
    let Some(position) = position else {
        txn.compare.push(none_waits);
        return txn;
    };
    let (returned, others) = names.waiting_before(name, order);
    let stands = Compare::begins(&position.key, &grant);
    let last = RangeRequest {
        max_create_revision: order - 1,
        ..ordered(names.positions(name), SortTarget::Create, SortOrder::Descend, 1)
    };
    let before = [
        ordered(returned.clone(), SortTarget::Key, SortOrder::Descend, 1).into(),
        last.into(),
    ];
    let standing = if position.state == PositionState::Stands {
        txn.compare.extend(stands.clone());
        txn.compare.push(Compare::none(returned.0, returned.1));
        // Its own position is one of them.
        txn.compare.push(Compare::created_after(others, order - 1));
        txn.success.push(RequestOp::delete(position.key.clone()));
        if ask.tokens > 1 {
            let most = i64::from(ask.tokens - 1);
            let (returned, others) = (names.waiting_before(name, LAST).0, names.positions(name));
            txn.success.extend([
                ordered(returned, SortTarget::Key, SortOrder::Ascend, most).into(),
                ordered(others, SortTarget::Create, SortOrder::Ascend, most).into(),
            ]);
        }
        TxnRequest {
            compare: stands.into(),
            success: before.into(),
            failure: Vec::new(),
        }
    } else {
        txn.compare.push(none_waits);
        let put = RequestOp::put(
            position.key.clone(),
            format!("{grant} waits").into_bytes(),
            position.session.id,
        );
        TxnRequest {
            compare: (names
                .not_plain(name)
                .map(|(from, to)| Compare::none(from, to))
                .into_iter())
            .chain([is_epoch])
            .collect(),
            success: before.into_iter().chain([put]).collect(),
            failure: Vec::new(),
        }
    };
    txn.failure.push(standing.into());
    txn
}

fn ordered((key, range_end): KeyRange, by: SortTarget, order: SortOrder, limit: i64) -> RangeRequest {
    RangeRequest {
        key,
        range_end,
        limit,
        sort_order: order.into(),
        sort_target: by.into(),
        ..RangeRequest::default()
    }
}

/// Determines why the lock was not granted, and whether there is a position.
fn busy(
    inner: &Inner,
    session: &Session,
    epoch: i64,
    ask: &Ask,
    position: Option<Position>,
    mut reply: TxnResponse,
) -> Result<Option<AcquireReply>, StoreError> {
    let standing = reply.take_inner(2).filter(|standing| standing.succeeded);
    if position.is_some() && standing.is_none() {
        inner.positions.is_lost(ask.grant);
    }
    if !is_epoch(session, epoch, reply.found(1)) {
        return Ok(None);
    }
    let holder = reply.found(0).first();
    if let Some(holder) = holder
        && let Some(held) = inner.names.kind(&holder.key)
        && let Some(what) = other_lock(ask.kind, held)
    {
        return Err(taken(&ask.name, what));
    }
    let remaining = holder.map(|holder| State::read(&holder.value).1.lasts());
    let busy = Busy::new(remaining.filter(|lasts| *lasts < Duration::MAX));
    match (position, standing) {
        (None, _) => {}
        (Some(_), None) => return Ok(None),
        (Some(position), Some(standing)) => {
            let before = last_of(inner, &position, &standing);
            // It was not first before it had its position.
            let is_next = holder.is_none() && before.is_none();
            let standing = Standing {
                revision: standing.revision(),
                order: position.order.unwrap_or_else(|| standing.revision()),
                before,
                busy,
            };
            let looks_again = inner.positions.stands(ask.grant, standing);
            if is_next {
                return Ok(None);
            }
            if looks_again {
                inner.waiters.tell(&position_topic(&ask.name, ask.grant));
            }
        }
    }
    Ok(Some(AcquireReply::Busy(busy)))
}

/// Returns the last of the positions that were found before this one.
fn last_of(inner: &Inner, position: &Position, found: &TxnResponse) -> Option<Vec<u8>> {
    let all = found.found(0).iter().chain(found.found(1));
    let last = all.max_by_key(|found| place(inner, &position.name, found))?;
    Some(last.key.clone())
}

/// Returns the waiters of the same client that are next in the queue, up to the first of another client.
fn behind(inner: &Inner, ask: &Ask, reply: &TxnResponse) -> Vec<GrantId> {
    let mut all: Vec<_> = reply.found(2).iter().chain(reply.found(3)).collect();
    all.sort_by_key(|found| place(inner, &ask.name, found));
    let client = ask.grant.to_string();
    let client = client.rsplit_once(':').map_or("", |(client, _)| client);
    let is_own = |found: &&KeyValue| {
        let (waiter, _) = State::read(&found.value);
        waiter.rsplit_once(':').is_some_and(|(of, _)| of == client)
    };
    all.into_iter()
        .take_while(is_own)
        .map_while(|found| inner.positions.waiter(&found.key))
        .take(ask.tokens as usize - 1)
        .collect()
}

/// Returns the revision that orders a position.
fn place(inner: &Inner, name: &Name, found: &KeyValue) -> i64 {
    inner
        .names
        .returned(name, &found.key)
        .unwrap_or(found.create_revision)
}
