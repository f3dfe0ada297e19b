//! Acquires one lock, or several in one transaction.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::queue::Moment;
use dlock::store::{
    AcquireAllReply, AcquireReply, AcquireRequest, Busy, GrantId, Granted, Kind, Outcome, Reason, StoreError,
};
use tokio::time::Instant;

use super::grants::{Grant, GrantState};
use super::inner::Inner;
use super::names::{Name, State, other_lock};
use super::session::Session;
use crate::client::proto::{Compare, KeyValue, RequestOp, TxnRequest, TxnResponse};
use crate::client::{Failure, Refusal};

/// A fencing token is the revision that created the grant, followed by a counter of this many bits.
pub(crate) const TOKEN_BITS: u32 = 16;

/// A request for a lock.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    pub(crate) name: Name,
    pub(crate) kind: Kind,
    pub(crate) grant: GrantId,
    pub(crate) lease: Duration,
    pub(crate) tokens: u32,
    /// For a fair lock, whether to take or keep a position.
    pub(crate) queue: bool,
    /// For permits, how many.
    pub(crate) amount: u32,
    /// For permits, the total if none is set, and the most that may be held.
    pub(crate) permits: Option<u32>,
    pub(crate) limit: Option<u32>,
    /// For permits, the id of the waiter.
    pub(crate) waiter: Option<GrantId>,
    /// For a nested read, the write grant that contains it.
    nested_in: Option<GrantId>,
    /// The key that the transaction creates.
    grant_key: Vec<u8>,
}

/// The result of one transaction.
#[derive(Debug)]
enum Attempt {
    Granted(Vec<Granted>),
    /// The lock at this index is held; its remaining lease, if known.
    Busy(usize, Option<Duration>),
    Taken(usize, &'static str),
    /// Nothing was done, and the request must be repeated: the epoch changed, or the session ended.
    Again,
}

impl Ask {
    pub(crate) fn new(inner: &Inner, request: &AcquireRequest) -> Result<Ask, StoreError> {
        if !super::KINDS.contains(&request.kind) || request.kind == Kind::Latch {
            let message = format!("dlock-etcd has no locks of kind {}", request.kind);
            return Err(StoreError::not_done(Reason::Unsupported, message));
        }
        if request.tokens > 1 << TOKEN_BITS {
            let message = "dlock-etcd reserves up to 65536 fencing tokens at a time";
            return Err(StoreError::not_done(Reason::Refused, message));
        }
        let name = inner.names.lock(&request.key)?;
        Ok(Ask {
            kind: request.kind,
            grant: request.grant,
            lease: request.lease,
            tokens: request.tokens.max(1),
            queue: request.queue,
            amount: request.amount.max(1),
            permits: request.permits,
            limit: request.limit,
            waiter: request.waiter,
            nested_in: request.nested_in.filter(|_| request.kind == Kind::Read),
            grant_key: Vec::new(),
            name,
        })
    }
}

/// Acquires one lock.
pub(crate) async fn one(
    inner: Arc<Inner>,
    ask: Ask,
    called: Moment,
    deadline: Instant,
) -> Result<AcquireReply, StoreError> {
    let mut asks = [ask];
    match acquire(&inner, &mut asks, called, deadline).await? {
        Attempt::Granted(mut grants) => Ok(AcquireReply::Acquired(grants.swap_remove(0))),
        Attempt::Busy(_, remaining) => Ok(AcquireReply::Busy(Busy::new(remaining))),
        Attempt::Taken(_, what) => Err(taken(&asks[0].name, what)),
        Attempt::Again => Err(StoreError::not_done(Reason::Unreachable, inner.links.silence())),
    }
}

/// Acquires all of these locks, or none.
pub(crate) async fn all(
    inner: Arc<Inner>,
    mut asks: Vec<Ask>,
    called: Moment,
    deadline: Instant,
) -> Result<AcquireAllReply, StoreError> {
    match acquire(&inner, &mut asks, called, deadline).await? {
        Attempt::Granted(grants) => Ok(AcquireAllReply::Acquired { grants }),
        Attempt::Busy(at, remaining) => Ok(AcquireAllReply::Busy { at, remaining }),
        Attempt::Taken(at, what) => {
            let error = taken(&asks[at].name, what);
            Ok(AcquireAllReply::Failed { at, error })
        }
        Attempt::Again => Err(StoreError::not_done(Reason::Unreachable, inner.links.silence())),
    }
}

pub(crate) fn taken(name: &str, what: &str) -> StoreError {
    let message = format!("key \"{name}\" holds {what}");
    StoreError::not_done(Reason::KeyTaken(what.to_owned()), message)
}

/// Repeats the transaction until the server has decided about the locks themselves.
async fn acquire(
    inner: &Inner,
    asks: &mut [Ask],
    called: Moment,
    deadline: Instant,
) -> Result<Attempt, StoreError> {
    loop {
        let lease = asks.iter().map(|ask| ask.lease).max().unwrap_or_default();
        let session = inner.pool.get(lease, asks.len(), deadline).await?;
        let attempt = attempt(inner, &session, asks, called, deadline).await;
        match attempt {
            Ok(Attempt::Again) if Instant::now() < deadline => {}
            // The session ended before the transaction was sent.
            Err(error)
                if session.ended() && error.outcome == Outcome::NotDone && Instant::now() < deadline => {}
            ended => return ended,
        }
    }
}

async fn attempt(
    inner: &Inner,
    session: &Arc<Session>,
    asks: &mut [Ask],
    called: Moment,
    deadline: Instant,
) -> Result<Attempt, StoreError> {
    let epoch = match session.epoch(&inner.links, deadline).await {
        Ok(epoch) => epoch,
        Err(error) => {
            session.leave(asks.len());
            return Err(error);
        }
    };
    for ask in &mut *asks {
        ask.grant_key = key(inner, session, ask);
        record(inner, session, ask, &ask.grant_key);
    }
    let txn = transaction(inner, session, epoch, asks);
    let forget = || asks.iter().for_each(|ask| inner.grants.remove(ask.grant));
    let reply = match &*asks {
        [ask] => inner.acquires.call(&ask.name, txn, deadline).await,
        _ => inner.links.call(txn, deadline).await,
    };
    match reply {
        Ok(reply) if reply.succeeded => {
            let grants = asks
                .iter()
                .map(|ask| granted(inner, session, ask, &reply, called));
            Ok(Attempt::Granted(grants.collect()))
        }
        Ok(reply) => {
            forget();
            Ok(judge(inner, session, epoch, asks, &reply))
        }
        Err(failure) if failure.is(Refusal::NoLease) => {
            forget();
            session.end();
            Ok(Attempt::Again)
        }
        Err(failure) => Err(failed(inner, asks, failure)),
    }
}

/// Records a request before it is sent: the release of an acquire without a reply needs the key.
pub(crate) fn record(inner: &Inner, session: &Arc<Session>, ask: &Ask, key: &[u8]) {
    let grant = Grant {
        name: ask.name.clone(),
        kind: ask.kind,
        key: key.to_vec(),
        state: GrantState::InFlight,
        session: session.clone(),
        placed: Moment::now(),
        ends: Moment::now() + ask.lease,
    };
    inner.grants.insert(ask.grant, grant);
}

/// Records that the server has carried a request out.
pub(crate) fn granted(
    inner: &Inner,
    session: &Session,
    ask: &Ask,
    reply: &TxnResponse,
    called: Moment,
) -> Granted {
    // Must not end before the client's lease, which counts from the call at the latest.
    inner
        .grants
        .is(ask.grant, GrantState::Held, Moment::now() + ask.lease);
    let first = reply.revision().unsigned_abs() << TOKEN_BITS;
    Granted::with_tokens(first, first + u64::from(ask.tokens - 1)).lease(session.lease(called))
}

/// Records that a request has failed.
pub(crate) fn failed(inner: &Inner, asks: &[Ask], failure: Failure) -> StoreError {
    let is_open = failure.is_open();
    let error = failure.error();
    for ask in asks {
        match error.outcome {
            Outcome::NotDone => inner.grants.remove(ask.grant),
            Outcome::Unknown if !is_open => {
                let ends = Moment::now() + ask.lease;
                inner.grants.is(ask.grant, GrantState::Unknown, ends);
            }
            Outcome::Unknown => {}
        }
    }
    error
}

/// Whether this key of a session's epoch has not changed; otherwise the next acquire writes it.
pub(crate) fn is_epoch(session: &Session, epoch: i64, found: &[KeyValue]) -> bool {
    let is_same = found.first().is_some_and(|found| found.mod_revision == epoch);
    if !is_same {
        session.epoch_is_not(epoch);
    }
    is_same
}

/// Chooses the key that the grant creates.
fn key(inner: &Inner, session: &Session, ask: &Ask) -> Vec<u8> {
    let reader = |number| inner.names.reader(&ask.name, session.id, number);
    match ask.kind {
        Kind::Read => {
            let free = (0..).map(reader).find(|key| inner.grants.is_free(key));
            free.expect("fewer readers than numbers")
        }
        kind => inner.names.exclusive(&ask.name, kind),
    }
}

fn transaction(inner: &Inner, session: &Session, epoch: i64, asks: &[Ask]) -> TxnRequest {
    let mut txn = TxnRequest::default();
    for ask in asks {
        let (start, end) = inner.names.in_the_way(&ask.name, ask.kind);
        txn.failure.push(RequestOp::range(start.clone(), end.clone(), 1));
        match ask.nested_in {
            Some(write) => {
                let key = inner.names.exclusive(&ask.name, Kind::Write);
                txn.compare.extend(Compare::begins(&key, &write.to_string()));
            }
            None => txn.compare.push(Compare::none(start, end)),
        }
        let value = State::Held(ask.lease).write(ask.grant);
        let put = RequestOp::put(ask.grant_key.clone(), value, session.id);
        txn.success.push(put);
    }
    let key = session.epoch_key();
    txn.compare.push(Compare::changed(key, epoch));
    txn.failure.push(RequestOp::range(key.to_vec(), Vec::new(), 1));
    txn
}

/// Determines why the transaction did nothing.
fn judge(inner: &Inner, session: &Session, epoch: i64, asks: &[Ask], reply: &TxnResponse) -> Attempt {
    if !is_epoch(session, epoch, reply.found(asks.len())) {
        return Attempt::Again;
    }
    for (at, ask) in asks.iter().enumerate() {
        let Some(found) = reply.found(at).first() else {
            if ask.nested_in.is_some() {
                // No grant conflicts, but the write grant that contains the read is gone.
                return Attempt::Busy(at, Some(Duration::ZERO));
            }
            continue;
        };
        let (grant, state) = State::read(&found.value);
        if ask.nested_in.is_some_and(|write| grant == write.to_string()) {
            continue;
        }
        let held = inner.names.kind(&found.key).unwrap_or(ask.kind);
        if let Some(what) = other_lock(ask.kind, held) {
            return Attempt::Taken(at, what);
        }
        let lasts = state.lasts();
        return Attempt::Busy(at, Some(lasts).filter(|lasts| *lasts < Duration::MAX));
    }
    Attempt::Again
}
