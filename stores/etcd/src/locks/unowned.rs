//! Permits that have no holder: the total of the semaphore is less by them.
//!
//! The key that remembers the request tells its later release how many permits to return.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::{AcquireReply, Busy, GrantId, Granted, StoreError};
use tokio::time::Instant;

use super::acquire::{Ask, TOKEN_BITS};
use super::counters::{Change, Written, carry_out, others_were_faster, set_total};
use super::inner::Inner;
use super::names::Name;
use super::seen::{Seen, look};

/// How long a request that was undone is remembered: a late copy of it does nothing.
const UNDONE_FOR: Duration = Duration::from_secs(60);

/// Takes permits from the total.
pub(crate) async fn acquire(
    inner: Arc<Inner>,
    ask: Ask,
    deadline: Instant,
) -> Result<AcquireReply, StoreError> {
    let inner = &*inner;
    while Instant::now() < deadline {
        let seen = look(inner, &ask.name, Some(ask.grant), deadline).await?;
        seen.is_for(&ask.name, ask.kind)?;
        let total = match (seen.total, ask.permits) {
            (None, Some(total)) => {
                set_total(inner, &ask.name, &seen, total, deadline).await?;
                continue;
            }
            (Some(total), _) if seen.operation.is_none() => total,
            _ => return Ok(AcquireReply::Busy(Busy::new(None))),
        };
        let most = ask.limit.map_or(total, |limit| total.min(i64::from(limit)));
        if most - seen.held < i64::from(ask.amount) {
            return Ok(AcquireReply::Busy(Busy::new(None)));
        }
        let written = Written {
            id: ask.grant,
            value: format!("taken {}", ask.amount),
            kept_for: ask.lease,
        };
        let change = Change::SetTotal(total - i64::from(ask.amount));
        if let Some(revision) = carry_out(inner, &ask.name, &seen, change, written, deadline).await? {
            let token = revision.unsigned_abs() << TOKEN_BITS;
            return Ok(AcquireReply::Acquired(Granted::new(token)));
        }
    }
    Err(others_were_faster())
}

/// Returns the permits of an acquire whose caller did not get them. Returns whether it took something.
pub(crate) async fn undo(
    inner: &Inner,
    name: &Name,
    grant: GrantId,
    deadline: Instant,
) -> Result<bool, StoreError> {
    while Instant::now() < deadline {
        let seen = look(inner, name, Some(grant), deadline).await?;
        let taken = match &seen.operation {
            None => None,
            Some(value) => match value.strip_prefix("taken ").and_then(|taken| taken.parse().ok()) {
                // They were deleted with their semaphore otherwise.
                Some(taken) => Some(taken).filter(|_| seen.total_is_older),
                None => return Ok(false),
            },
        };
        let written = Written {
            id: grant,
            value: "undone ".to_owned(),
            kept_for: UNDONE_FOR,
        };
        let change = gives_back(&seen, taken.unwrap_or(0));
        if carry_out(inner, name, &seen, change, written, deadline)
            .await?
            .is_some()
        {
            return Ok(taken.is_some());
        }
    }
    Err(others_were_faster())
}

fn gives_back(seen: &Seen, taken: i64) -> Change {
    match seen.total {
        Some(total) if taken > 0 => Change::SetTotal(total + taken),
        _ => Change::Nothing,
    }
}
