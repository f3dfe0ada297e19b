//! What a service learns about a replay.

use std::time::Duration;

use dlock::record::RecordKey;
use http::StatusCode;
use http::request::Parts;

use super::stored::{Kept, Stamp};

/// A stored response that is about to be replayed, for
/// [`IdempotencyLayer::on_replay`](super::IdempotencyLayer::on_replay).
///
/// ```
/// use dlock_tower::idempotency::Replay;
///
/// fn is_slow_retry(replay: &Replay<'_>) -> bool {
///     replay.age.is_some_and(|age| age.as_secs() > 3600)
/// }
/// # let _ = is_slow_retry;
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Replay<'a> {
    /// The key, as the client sent it.
    pub key: &'a str,
    /// The record.
    pub record: &'a RecordKey,
    /// The head of the request that gets it.
    pub request: &'a Parts,
    /// Its status.
    pub status: StatusCode,
    /// How long ago it was stored; `None` if an earlier version of this crate stored it.
    pub age: Option<Duration>,
    /// How long it is kept from now on.
    pub expires_in: Option<Duration>,
}

impl<'a> Replay<'a> {
    pub(super) fn new(kept: &Kept, key: &'a str, record: &'a RecordKey, request: &'a Parts) -> Replay<'a> {
        Replay {
            key,
            record,
            request,
            status: kept.status,
            age: kept.stamp.map(Stamp::age),
            expires_in: kept.stamp.map(Stamp::expires_in),
        }
    }
}
