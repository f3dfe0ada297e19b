//! The operations on the server, and their results.

use std::sync::Arc;
use std::time::Duration;

use dlock::LockKey;
use dlock::store::queue::{self, Moment};
use dlock::store::{
    AcquireReply, AcquireRequest, GrantId, Holder, Kind, Reason, ReleaseReply, ReleaseRequest, RenewRequest,
    Renewal, StoreError,
};

/// The supported kinds.
pub(crate) const KINDS: [Kind; 2] = [Kind::Mutex, Kind::Fenced];
/// The most fencing tokens that one grant reserves.
const MOST_TOKENS: u32 = 1 << 16;
/// The most bytes of a key, including its prefix: the width of the column.
pub(crate) const LONGEST_KEY: usize = 1024;

/// The queue that all connections share.
pub(crate) type Queue = queue::StepQueue<Step>;
/// A queued operation.
pub(crate) type Job = queue::Job<Step>;

/// An operation.
#[derive(Debug)]
pub(crate) enum Step {
    Acquire(Ask),
    /// The key, the grant, and until when to keep the key unavailable, if at all.
    Release(Arc<str>, GrantId, Option<Moment>),
    /// The key, the grant, and its lease from now on, in µs.
    Renew(Arc<str>, GrantId, i64),
    Inspect(Arc<str>),
    /// A page of the locks with a prefix, with the last key of the page before, which is empty for the first one.
    List(String, Vec<u8>),
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

/// The result of an operation.
#[derive(Debug)]
pub(crate) enum Answer {
    Acquired(AcquireReply),
    Released(ReleaseReply),
    Renewed(Renewal),
    Holders(Vec<(LockKey, Holder)>),
    Page(Page),
    Forced(bool),
}

/// A part of a list.
#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) holders: Vec<(LockKey, Holder)>,
    /// The last key that was looked at, held or not, if there may be more after it.
    pub(crate) last: Option<Vec<u8>>,
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
        // A moment: the step may wait for a connection, and be tried again.
        let keep_until = (!request.keep_for.is_zero()).then(|| Moment::now() + request.keep_for);
        Ok(Step::Release(sendable(key)?, request.grant, keep_until))
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
            Step::List(..) => None,
        }
        .into_iter()
    }

    fn acquires(&self) -> bool {
        matches!(self, Step::Acquire(_))
    }
}

/// Checks that a key fits into its column: a longer key would be truncated, and become a different key.
pub(crate) fn sendable(key: Arc<str>) -> Result<Arc<str>, StoreError> {
    if key.len() > LONGEST_KEY {
        let message = format!("a key has up to {LONGEST_KEY} bytes with its prefix");
        return Err(StoreError::not_done(Reason::Refused, message));
    }
    Ok(key)
}

/// Converts to whole microseconds, up to a hundred years.
pub(crate) fn micros(duration: Duration) -> i64 {
    const MOST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    i64::try_from(duration.min(MOST).as_micros()).unwrap_or(i64::MAX)
}

/// Converts a difference of server times; negative differences become zero.
pub(crate) fn duration(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}
