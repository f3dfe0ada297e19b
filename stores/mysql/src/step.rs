//! What is asked of the server, and what came of it.

use std::sync::Arc;
use std::time::Duration;

use dlock::LockKey;
use dlock::store::queue;
use dlock::store::{
    AcquireReply, AcquireRequest, GrantId, Holder, Kind, Reason, ReleaseReply, ReleaseRequest, RenewRequest,
    Renewal, StoreError,
};

/// The kinds that this store has.
pub(crate) const KINDS: [Kind; 2] = [Kind::Mutex, Kind::Fenced];
/// The most fencing tokens of one grant.
const MOST_TOKENS: u32 = 1 << 16;
/// The most bytes of a key with its prefix: the width of the column.
pub(crate) const LONGEST_KEY: usize = 1024;

/// The queue of all connections.
pub(crate) type Queue = queue::StepQueue<Step>;
/// A step on its way.
pub(crate) type Job = queue::Job<Step>;

/// What is asked of the server.
#[derive(Debug)]
pub(crate) enum Step {
    Acquire(Ask),
    /// The grant, and how long to keep its key taken yet, in µs.
    Release(Arc<str>, GrantId, i64),
    /// The grant, and its lease from now on, in µs.
    Renew(Arc<str>, GrantId, i64),
    Inspect(Arc<str>),
    List(String),
    Force(Arc<str>),
}

/// A request for one lock.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) key: Arc<str>,
    pub(crate) grant: GrantId,
    pub(crate) kind: Kind,
    /// In µs.
    pub(crate) lease: i64,
    pub(crate) tokens: u32,
}

/// What came of it.
#[derive(Debug)]
pub(crate) enum Answer {
    Acquired(AcquireReply),
    Released(ReleaseReply),
    Renewed(Renewal),
    Holders(Vec<(LockKey, Holder)>),
    Forced(bool),
}

impl Step {
    pub(crate) fn acquire(key: Arc<str>, request: &AcquireRequest) -> Result<Step, StoreError> {
        if !KINDS.contains(&request.kind) {
            let message = format!("dlock-mysql has no locks of kind {}", request.kind);
            return Err(StoreError::not_done(Reason::Unsupported, message));
        }
        Ok(Step::Acquire(Ask {
            key: sendable(key)?,
            grant: request.grant,
            kind: request.kind,
            lease: micros(request.lease).max(1),
            tokens: request.tokens.clamp(1, MOST_TOKENS),
        }))
    }

    pub(crate) fn release(key: Arc<str>, request: &ReleaseRequest) -> Result<Step, StoreError> {
        Ok(Step::Release(
            sendable(key)?,
            request.grant,
            micros(request.keep_for),
        ))
    }

    pub(crate) fn renew(key: Arc<str>, request: &RenewRequest) -> Result<Step, StoreError> {
        Ok(Step::Renew(
            sendable(key)?,
            request.grant,
            micros(request.lease).max(1),
        ))
    }
}

impl queue::Step for Step {
    type Answer = Answer;

    fn keys(&self) -> impl Iterator<Item = &Arc<str>> {
        match self {
            Step::Acquire(ask) => Some(&ask.key),
            Step::Release(key, ..) | Step::Renew(key, ..) | Step::Inspect(key) | Step::Force(key) => {
                Some(key)
            }
            Step::List(_) => None,
        }
        .into_iter()
    }

    fn acquires(&self) -> bool {
        matches!(self, Step::Acquire(_))
    }
}

/// A key that fits into its column: longer ones would be cut off, and be other keys.
pub(crate) fn sendable(key: Arc<str>) -> Result<Arc<str>, StoreError> {
    if key.len() > LONGEST_KEY {
        let message = format!("a key has up to {LONGEST_KEY} bytes with its prefix");
        return Err(StoreError::not_done(Reason::Refused, message));
    }
    Ok(key)
}

/// Whole microseconds; a hundred years at most.
pub(crate) fn micros(duration: Duration) -> i64 {
    const MOST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    i64::try_from(duration.min(MOST).as_micros()).unwrap_or(i64::MAX)
}

/// A time of the server, of which the past counts as now.
pub(crate) fn duration(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}
