//! Inspection: the holders of locks, for people and tools.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use dlock::store::{GrantId, Holder, Kind, StoreError};
use dlock::{LockKey, MAX_AT_ONCE};
use futures_util::future::try_join_all;
use tokio::time::Instant;

use super::inner::Inner;
use super::names::{Name, State, amount};
use crate::client::Failure;
use crate::client::proto::{DeleteRangeRequest, KeyValue, LeaseTimeToLiveRequest, RangeRequest};

/// How many grants one request reads.
const PAGE: i64 = 500;

/// Returns the holders of a lock.
pub(crate) async fn inspect(
    inner: Arc<Inner>,
    name: Name,
    deadline: Instant,
) -> Result<Vec<Holder>, StoreError> {
    let found = grants_of(&inner, &name, deadline).await.map_err(Failure::error)?;
    let holders = holders(&inner, &found, deadline).await?;
    Ok(holders.into_iter().map(|(_, holder)| holder).collect())
}

/// Returns the holders of all locks whose names begin with `prefix`.
pub(crate) async fn list(inner: Arc<Inner>, prefix: String) -> Result<Vec<(LockKey, Holder)>, StoreError> {
    let (mut start, end) = inner.names.with_prefix(&prefix);
    let mut all = Vec::new();
    loop {
        let deadline = Instant::now() + inner.links.config.timeout;
        let request = RangeRequest {
            key: start,
            range_end: end.clone(),
            limit: PAGE,
            ..RangeRequest::default()
        };
        let page = inner
            .links
            .call(request, deadline)
            .await
            .map_err(Failure::error)?;
        all.extend(holders(&inner, &page.kvs, deadline).await?);
        match page.kvs.last() {
            Some(last) if page.more => {
                start = last.key.clone();
                start.push(0);
            }
            _ => return Ok(all),
        }
    }
}

/// Returns the key of a grant, if the grant still has it.
pub(crate) async fn key_of(
    inner: &Inner,
    key: &[u8],
    grant: GrantId,
    deadline: Instant,
) -> Result<Option<KeyValue>, Failure> {
    let range = RangeRequest {
        key: key.to_vec(),
        ..RangeRequest::default()
    };
    let reply = inner.links.call(range, deadline).await?;
    let (found, grant) = (reply.kvs.into_iter().next(), grant.to_string());
    Ok(found.filter(|found| State::read(&found.value).0 == grant))
}

/// Ends all grants of a lock. Returns whether there were any.
pub(crate) async fn force(inner: Arc<Inner>, name: Name, deadline: Instant) -> Result<bool, StoreError> {
    let (key, range_end) = inner.names.holders(&name);
    let reply = inner
        .links
        .call(DeleteRangeRequest { key, range_end }, deadline)
        .await;
    Ok(reply.map_err(Failure::error)?.deleted > 0)
}

/// Reads all grants of a lock.
pub(crate) async fn grants_of(
    inner: &Inner,
    name: &Name,
    deadline: Instant,
) -> Result<Vec<KeyValue>, Failure> {
    let (key, range_end) = inner.names.holders(name);
    let range = RangeRequest {
        key,
        range_end,
        ..RangeRequest::default()
    };
    Ok(inner.links.call(range, deadline).await?.kvs)
}

/// Returns the holders for these keys, with their remaining leases.
async fn holders(
    inner: &Inner,
    found: &[KeyValue],
    deadline: Instant,
) -> Result<Vec<(LockKey, Holder)>, StoreError> {
    // The others are positions of waiters, and numbers.
    let found: Vec<&KeyValue> = (found.iter())
        .filter(|found| inner.names.read(&found.key).is_some())
        .collect();
    let mut leases: Vec<i64> = found.iter().map(|found| found.lease).collect();
    leases.sort_unstable();
    leases.dedup();
    let left = leases.into_iter().map(|id| async move {
        let request = LeaseTimeToLiveRequest { id, keys: false };
        let reply = inner
            .links
            .call(request, deadline)
            .await
            .map_err(Failure::error)?;
        Ok::<_, StoreError>((id, Duration::from_secs(reply.ttl.max(0).unsigned_abs())))
    });
    let left: HashMap<i64, Duration> = try_join_all(left).await?.into_iter().collect();
    let holder = |found: &KeyValue| {
        let (name, kind) = inner.names.read(&found.key)?;
        let amount = match kind {
            // Another program may have written the key.
            Kind::Permit => (amount(&found.key) as usize).min(MAX_AT_ONCE),
            _ => 1,
        };
        let (grant, state) = State::read(&found.value);
        let holds = match state {
            State::Held(_) => 1,
            State::Kept(_) => 0,
        };
        let lasts = left.get(&found.lease).map_or(Duration::ZERO, |left| *left);
        let remaining = Some(lasts.min(state.lasts()));
        let holder = Holder::new(kind, grant.to_owned(), holds, remaining);
        // One for each permit.
        Some(vec![(LockKey::raw(name), holder); amount])
    };
    Ok(found.into_iter().filter_map(holder).flatten().collect())
}
