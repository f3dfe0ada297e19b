//! Ends grants: released ones, expired ones, and those that may never have existed.

use std::sync::Arc;

use dlock::store::queue::Moment;
use dlock::store::{GrantId, Kind, ReleaseReply, ReleaseRequest, StoreError};
use tokio::time::Instant;

use super::grants::{Grant, GrantState};
use super::inner::Inner;
use super::look;
use super::names::{Name, State, is_same};
use super::pool::seconds;
use super::positions::PositionState;
use super::session::not_done;
use super::unowned;
use crate::client::proto::{Compare, LeaseGrantRequest, RequestOp, TxnRequest};
use crate::client::{Failure, Refusal};

/// Releases a grant, or keeps its lock unavailable for a while.
pub(crate) async fn release(
    inner: Arc<Inner>,
    name: Name,
    request: ReleaseRequest,
    keep_until: Option<Moment>,
    deadline: Instant,
) -> Result<ReleaseReply, StoreError> {
    if request.kind == Kind::Unowned {
        return Ok(replied(
            unowned::undo(&inner, &name, request.grant, deadline).await?,
        ));
    }
    let existed = match inner.grants.get(request.grant) {
        // Already released, or a different lock.
        Some(grant) if grant.state == GrantState::Kept || grant.name != name => Ok(false),
        Some(grant) if !is_same(grant.kind, request.kind) => Ok(false),
        Some(grant) => match keep_until.map(|until| until.min(grant.ends)) {
            Some(until) if grant.state == GrantState::Held && until > Moment::now() => {
                keep(&inner, request.grant, &grant, until, deadline).await
            }
            _ => end(&inner, request.grant, &grant, deadline).await,
        },
        None if inner.positions.get(request.grant).is_some() => {
            leave_queue(&inner, &name, request.grant, deadline)
                .await
                .map(|()| false)
        }
        None => end_of_another(&inner, &name, &request, deadline).await,
    };
    Ok(replied(existed.map_err(Failure::error)?))
}

fn replied(existed: bool) -> ReleaseReply {
    match existed {
        true => ReleaseReply::Released { receivers: None },
        false => ReleaseReply::NotHeld { repeated: false },
    }
}

/// Ends an expired grant, unless it was renewed meanwhile.
pub(crate) async fn expire(inner: Arc<Inner>, id: GrantId, deadline: Instant) -> Result<(), StoreError> {
    let Some(grant) = inner.grants.get(id) else {
        return Ok(());
    };
    let left = grant.ends.since(Moment::now());
    if !left.is_zero() {
        inner.grants.look_again(id, left);
        return Ok(());
    }
    match end(&inner, id, &grant, deadline).await {
        Ok(_) => Ok(()),
        // Its key went with the lease of its session.
        Err(failure) if failure.is_refused() && grant.session.ended() => {
            inner.positions.remove(id);
            inner.grants.remove(id);
            Ok(())
        }
        Err(failure) => {
            if failure.is_refused() {
                grant.session.retire();
            }
            Err(failure.error())
        }
    }
}

/// Ends the position of a waiter that has sent no request for too long, or what a request may have left whose reply was
/// lost.
pub(crate) async fn end_silent(
    inner: Arc<Inner>,
    name: Name,
    id: GrantId,
    deadline: Instant,
) -> Result<(), StoreError> {
    match inner.grants.get(id) {
        _ if !inner.positions.is_silent(id) => Ok(()),
        Some(grant) => end(&inner, id, &grant, deadline).await.map(drop),
        None => delete_position(&inner, &name, id, deadline).await,
    }
    .map_err(Failure::error)
}

/// Ends the position of a waiter that leaves.
pub(crate) async fn leave_queue(
    inner: &Inner,
    name: &Name,
    id: GrantId,
    deadline: Instant,
) -> Result<(), Failure> {
    delete_position(inner, name, id, deadline).await?;
    inner.positions.remove(id);
    Ok(())
}

/// Deletes the key of a position, which its waiter may get back.
async fn delete_position(inner: &Inner, name: &Name, id: GrantId, deadline: Instant) -> Result<(), Failure> {
    if let Some(position) = inner.positions.get(id) {
        match position.state {
            PositionState::Lost => {}
            PositionState::Stands => drop(delete(inner, name, &position.key, id, deadline).await?),
            PositionState::InFlight => {
                let deletion = deletion(&position.key, id).into();
                (position.session)
                    .undo(&inner.links, vec![deletion], deadline)
                    .await?;
            }
        }
    }
    inner.positions.is_lost(id);
    Ok(())
}

/// Ends a grant of another process. Returns whether it existed.
async fn end_of_another(
    inner: &Inner,
    name: &Name,
    request: &ReleaseRequest,
    deadline: Instant,
) -> Result<bool, Failure> {
    let key = match request.kind {
        Kind::Read | Kind::Permit => {
            let grant = request.grant.to_string();
            let all = look::grants_of(inner, name, deadline).await?;
            let found = all.into_iter().find(|found| State::read(&found.value).0 == grant);
            found.map(|found| found.key)
        }
        kind => Some(inner.names.exclusive(name, kind)),
    };
    match key {
        Some(key) => delete(inner, name, &key, request.grant, deadline).await,
        None => Ok(false),
    }
}

/// Ends a grant of this process, and its position. Returns whether the grant existed.
async fn end(inner: &Inner, id: GrantId, grant: &Grant, deadline: Instant) -> Result<bool, Failure> {
    let position = inner.positions.get(id).map(|position| position.key);
    let reply = match (grant.state, position) {
        (GrantState::InFlight, position) => {
            let keys = [Some(grant.key.clone()), position];
            let deletions = keys.into_iter().flatten().map(|key| deletion(&key, id).into());
            let undo = grant.session.undo(&inner.links, deletions.collect(), deadline);
            undo.await?.take_inner(0).unwrap_or_default()
        }
        (GrantState::Unknown | GrantState::Held | GrantState::Kept, position) => {
            if let Some(position) = position {
                delete(inner, &grant.name, &position, id, deadline).await?;
            }
            let txn = deletion(&grant.key, id);
            inner.releases.call(&grant.name, txn, deadline).await?
        }
    };
    inner.positions.remove(id);
    inner.grants.remove(id);
    Ok(reply.deleted(0) > 0)
}

async fn delete(
    inner: &Inner,
    name: &Name,
    key: &[u8],
    grant: GrantId,
    deadline: Instant,
) -> Result<bool, Failure> {
    let txn = deletion(key, grant);
    let reply = inner.releases.call(name, txn, deadline).await?;
    Ok(reply.deleted(0) > 0)
}

/// Returns a transaction that deletes the key if it belongs to the grant.
fn deletion(key: &[u8], grant: GrantId) -> TxnRequest {
    TxnRequest {
        compare: Compare::begins(key, &grant.to_string()).into(),
        success: vec![RequestOp::delete(key.to_vec())],
        failure: Vec::new(),
    }
}

/// Moves the key to its own lease, which expires if this process dies before it ends the grant.
async fn keep(
    inner: &Inner,
    id: GrantId,
    grant: &Grant,
    until: Moment,
    deadline: Instant,
) -> Result<bool, Failure> {
    let ttl = i64::try_from(seconds(until.since(Moment::now()))).unwrap_or(i64::MAX);
    let lease = inner.links.call(LeaseGrantRequest { ttl }, deadline).await;
    let is_kept = match lease {
        Ok(lease) => {
            let key = grant.key.clone();
            let rest = until.since(Moment::now());
            let txn = TxnRequest {
                compare: Compare::begins(&key, &id.to_string()).into(),
                success: vec![RequestOp::put(key, State::Kept(rest).write(id), lease.id)],
                failure: Vec::new(),
            };
            inner.links.call(txn, deadline).await?.succeeded
        }
        // Without space for another lease it stays on that of its session: this process deletes it in time, or the session ends
        // with it.
        Err(failure) if failure.is(Refusal::Full) => {
            look::key_of(inner, &grant.key, id, deadline).await?.is_some()
        }
        Err(failure) => return Err(Failure::Elsewhere(not_done(failure.error()))),
    };
    if is_kept {
        inner.grants.is(id, GrantState::Kept, until);
    } else {
        inner.grants.remove(id);
    }
    Ok(is_kept)
}
