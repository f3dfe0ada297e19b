//! Renews grants.

use std::sync::Arc;

use dlock::store::queue::Moment;
use dlock::store::{RenewRequest, Renewal, StoreError};
use tokio::time::{Instant, timeout_at};

use super::grants::{Grant, GrantState};
use super::inner::Inner;
use super::look;
use super::names::State;
use super::session::{Found, Session};
use crate::client::Failure;
use crate::client::proto::{Compare, RequestOp, TxnRequest};

/// Renews a grant by a round of its session, or moves it to a session with a longer lease.
pub(crate) async fn renew(
    inner: Arc<Inner>,
    request: RenewRequest,
    called: Moment,
    deadline: Instant,
) -> Result<Renewal, StoreError> {
    let grant = match inner.grants.get(request.grant) {
        Some(grant) if grant.state != GrantState::Kept => grant,
        _ => return Ok(Renewal::Gone),
    };
    let ends = called + request.lease;
    if request.lease > grant.session.ttl {
        let session = inner.pool.get(request.lease, 1, deadline).await?;
        let moved = place(&inner, &grant, &session, &request, deadline).await;
        if !matches!(moved, Ok(true)) {
            session.leave(1);
        }
        if moved.map_err(Failure::error)? {
            let lease = session.lease(called);
            inner.grants.is_moved(request.grant, session, ends);
            return Ok(Renewal::RenewedFor(lease));
        }
        inner.grants.remove(request.grant);
        return Ok(Renewal::Gone);
    }
    let round = timeout_at(deadline, grant.session.round(grant.placed))
        .await
        .map_err(|_| StoreError::unknown(inner.links.silence()))?;
    let is_there = match &round.found {
        Ok(Found::Over) => false,
        Ok(Found::Keys(keys)) if keys.contains(&grant.key) && inner.grants.is_alone(&grant.key) => true,
        // The key may belong to another grant, and the leader that replies may not have applied what another server has
        // done.
        Ok(Found::Keys(_)) => has_its_key(&inner, &grant, &request, deadline)
            .await
            .map_err(Failure::error)?,
        Err(error) => return Err(error.clone()),
    };
    if is_there {
        inner.grants.is_renewed(request.grant, ends);
        Ok(Renewal::RenewedFor(grant.session.lease(called)))
    } else {
        inner.grants.remove(request.grant);
        Ok(Renewal::Gone)
    }
}

/// Whether the grant still has its key. Moves the key back to the grant's session if necessary.
async fn has_its_key(
    inner: &Inner,
    grant: &Grant,
    request: &RenewRequest,
    deadline: Instant,
) -> Result<bool, Failure> {
    match look::key_of(inner, &grant.key, request.grant, deadline).await? {
        None => Ok(false),
        Some(found) if found.lease == grant.session.id => Ok(true),
        // A request whose reply was lost has moved it.
        Some(_) => place(inner, grant, &grant.session, request, deadline).await,
    }
}

/// Attaches the key to this session if it belongs to the grant.
async fn place(
    inner: &Inner,
    grant: &Grant,
    session: &Session,
    request: &RenewRequest,
    deadline: Instant,
) -> Result<bool, Failure> {
    let value = State::Held(request.lease).write(request.grant);
    let txn = TxnRequest {
        compare: Compare::begins(&grant.key, &request.grant.to_string()).into(),
        success: vec![RequestOp::put(grant.key.clone(), value, session.id)],
        failure: Vec::new(),
    };
    Ok(inner.links.call(txn, deadline).await?.succeeded)
}
