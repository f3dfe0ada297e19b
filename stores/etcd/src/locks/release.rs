//! Ending grants: by their holders, by their time, and those that may never have been.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::{GrantId, ReleaseReply, ReleaseRequest, StoreError};
use tokio::time::Instant;

use super::grants::{Fate, Grant};
use super::inner::Inner;
use super::names::{Name, State};
use super::pool::seconds;
use super::session::not_done;
use crate::client::Failure;
use crate::client::proto::{Compare, DeleteRangeRequest, LeaseGrantRequest, RequestOp, TxnRequest};
use crate::clock::Moment;

/// The pause after which it is tried again to end a grant whose time is over.
const AGAIN: Duration = Duration::from_millis(500);

/// Releases a grant, or keeps its lock taken for a while.
pub(crate) async fn release(
    inner: Arc<Inner>,
    name: Name,
    request: ReleaseRequest,
    deadline: Instant,
) -> Result<ReleaseReply, StoreError> {
    let key = inner.names.grant(&name, request.kind, request.grant);
    let existed = match inner.grants.get(request.grant) {
        // Released before, or a lock of another kind.
        Some(grant) if grant.fate == Fate::Kept || grant.key != key => false,
        Some(grant) if !request.keep_for.is_zero() && matches!(grant.fate, Fate::Held(_)) => {
            let rest = request.keep_for.min(Moment::now().until(grant.ends));
            match rest.is_zero() {
                true => end(&inner, request.grant, &grant, deadline).await,
                false => keep(&inner, request.grant, &grant, rest, deadline).await,
            }
            .map_err(Failure::error)?
        }
        Some(grant) => end(&inner, request.grant, &grant, deadline)
            .await
            .map_err(Failure::error)?,
        None => delete(&inner, key, deadline).await.map_err(Failure::error)?,
    };
    Ok(match existed {
        true => ReleaseReply::Released { receivers: None },
        false => ReleaseReply::NotHeld { repeated: false },
    })
}

/// Ends a grant whose time is over, unless it was renewed meanwhile.
pub(crate) async fn expire(inner: Arc<Inner>, id: GrantId, deadline: Instant) -> Result<(), StoreError> {
    let Some(grant) = inner.grants.get(id) else {
        return Ok(());
    };
    let left = Moment::now().until(grant.ends);
    if !left.is_zero() {
        inner.grants.look_again(id, left);
        return Ok(());
    }
    match end(&inner, id, &grant, deadline).await {
        Ok(_) => Ok(()),
        Err(failure) => {
            inner.grants.look_again(id, AGAIN);
            Err(failure.error())
        }
    }
}

/// Whether it existed.
async fn end(inner: &Inner, id: GrantId, grant: &Grant, deadline: Instant) -> Result<bool, Failure> {
    let key = grant.key.clone();
    let existed = match grant.fate {
        Fate::Open => grant.session.undo(&inner.links, key, deadline).await?,
        Fate::Answered | Fate::Held(_) | Fate::Kept => delete(inner, key, deadline).await?,
    };
    inner.grants.remove(id);
    Ok(existed)
}

async fn delete(inner: &Inner, key: Vec<u8>, deadline: Instant) -> Result<bool, Failure> {
    let range_end = Vec::new();
    let reply = inner
        .links
        .call(DeleteRangeRequest { key, range_end }, deadline)
        .await?;
    Ok(reply.deleted > 0)
}

/// Puts the key on a lease of its own, which ends if this process does not live to end it.
async fn keep(
    inner: &Inner,
    id: GrantId,
    grant: &Grant,
    rest: Duration,
    deadline: Instant,
) -> Result<bool, Failure> {
    let ttl = i64::try_from(seconds(rest)).unwrap_or(i64::MAX);
    let lease = inner.links.call(LeaseGrantRequest { ttl }, deadline).await;
    let lease = lease.map_err(|failure| Failure::Elsewhere(not_done(failure.error())))?;
    let key = grant.key.clone();
    let txn = TxnRequest {
        compare: vec![Compare::exists(&key)],
        success: vec![RequestOp::put(key, State::Kept(rest).write(), lease.id)],
        failure: Vec::new(),
    };
    let reply = inner.links.call(txn, deadline).await?;
    if reply.succeeded {
        inner.grants.is(id, Fate::Kept, Moment::now() + rest);
    } else {
        inner.grants.remove(id);
    }
    Ok(reply.succeeded)
}
