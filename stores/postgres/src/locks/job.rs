//! The operations on the server, and their results.

use std::sync::Arc;

use dlock::LockKey;
use dlock::store::queue;
use dlock::store::{
    AcquireAllReply, AcquireReply, AcquireRequest, GrantId, Holder, Kind, Reason, ReleaseReply,
    ReleaseRequest, RenewRequest, Renewal, StoreError,
};

use crate::micros::micros;

/// The queue that all connections share.
pub(crate) type Queue = queue::StepQueue<Step>;
/// A queued operation.
pub(crate) type Job = queue::Job<Step>;

/// A request for one lock.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    pub(crate) key: Arc<str>,
    pub(crate) grant: GrantId,
    pub(crate) kind: Kind,
    pub(crate) lease: i64,
    pub(crate) tokens: i32,
    /// For a nested read, the write grant that contains it.
    pub(crate) nested_in: Option<GrantId>,
    /// For a fair lock, whether the request takes a position in the queue.
    pub(crate) waits: bool,
    /// For a fair lock, whether the waiter has asked before.
    pub(crate) asked: bool,
}

/// An operation.
#[derive(Debug)]
pub(crate) enum Step {
    Acquire(Ask),
    /// Acquires all of the locks, or none.
    AcquireAll(Vec<Ask>),
    /// The key, the grant, and how long to keep the key unavailable, in µs.
    Release(Arc<str>, GrantId, i64),
    /// The key, the grant, and its lease from now on, in µs.
    Renew(Arc<str>, GrantId, i64),
    /// The release of a reader, with the same fields.
    Leave(Arc<str>, GrantId, i64),
    /// The renewal of a reader, with the same fields.
    Extend(Arc<str>, GrantId, i64),
    /// The release of a fair lock, or of a waiter's position, with the same fields as a release.
    FairRelease(Arc<str>, GrantId, i64),
    Inspect(Arc<str>),
    List(String),
    Force(Arc<str>),
    /// Creates the row of a lock, for a transaction that will lock the row.
    Make(Arc<str>),
}

/// The result of an operation.
#[derive(Debug)]
pub(crate) enum Answer {
    Acquired(AcquireReply),
    AcquiredAll(AcquireAllReply),
    Released(ReleaseReply),
    Renewed(Renewal),
    Holders(Vec<(String, Holder)>),
    Forced(bool),
    Made,
}

impl Ask {
    /// Converts a request.
    ///
    /// # Errors
    ///
    /// If this store does not support the request.
    pub(crate) fn new(key: Arc<str>, request: &AcquireRequest) -> Result<Ask, StoreError> {
        if !super::KINDS.contains(&request.kind) {
            return Err(no_kind(request.kind));
        }
        Ok(Ask {
            key: sendable(key)?,
            grant: request.grant,
            kind: request.kind,
            lease: micros(request.lease).max(1),
            tokens: i32::try_from(request.tokens.clamp(1, super::MOST_TOKENS)).unwrap_or(1),
            nested_in: request.nested_in.filter(|_| request.kind == Kind::Read),
            waits: request.queue,
            asked: request.last_asked.is_some(),
        })
    }
}

impl Step {
    pub(crate) fn release(key: Arc<str>, request: &ReleaseRequest) -> Result<Step, StoreError> {
        let step = match request.kind {
            Kind::Read => Step::Leave,
            Kind::Fair => Step::FairRelease,
            _ => Step::Release,
        };
        Ok(step(sendable(key)?, request.grant, micros(request.keep_for)))
    }

    pub(crate) fn renew(key: Arc<str>, request: &RenewRequest) -> Result<Step, StoreError> {
        let step = match request.kind {
            Kind::Read => Step::Extend,
            _ => Step::Renew,
        };
        Ok(step(sendable(key)?, request.grant, micros(request.lease).max(1)))
    }

    /// Whether this is an operation of a reader. Other readers may lock the row of the lock for a moment each.
    pub(crate) fn is_shared(&self) -> bool {
        match self {
            Step::Leave(..) | Step::Extend(..) => true,
            _ => self.grants().iter().any(|ask| ask.kind == Kind::Read),
        }
    }

    /// Whether this acquires or releases a fair lock.
    pub(crate) fn is_fair(&self) -> bool {
        match self {
            Step::Acquire(ask) => ask.kind == Kind::Fair,
            _ => matches!(self, Step::FairRelease(..)),
        }
    }

    /// The grants that the operation may create.
    pub(crate) fn grants(&self) -> &[Ask] {
        match self {
            Step::Acquire(ask) => std::slice::from_ref(ask),
            Step::AcquireAll(asks) => asks,
            _ => &[],
        }
    }
}

impl queue::Step for Step {
    type Answer = Answer;

    fn keys(&self) -> impl Iterator<Item = &Arc<str>> {
        let (one, all) = match self {
            Step::Acquire(ask) => (Some(&ask.key), &[][..]),
            Step::AcquireAll(asks) => (None, &asks[..]),
            Step::Release(key, ..)
            | Step::Renew(key, ..)
            | Step::Leave(key, ..)
            | Step::Extend(key, ..)
            | Step::FairRelease(key, ..)
            | Step::Inspect(key)
            | Step::Force(key)
            | Step::Make(key) => (Some(key), &[][..]),
            Step::List(_) => (None, &[][..]),
        };
        one.into_iter().chain(all.iter().map(|ask| &ask.key))
    }

    fn acquires(&self) -> bool {
        !self.grants().is_empty()
    }
}

/// Checks a key: PostgreSQL's text has no zero byte, and an index entry takes at most a third of a page.
pub(crate) fn sendable(key: Arc<str>) -> Result<Arc<str>, StoreError> {
    const MOST: usize = 2048;
    if key.len() > MOST || key.contains('\0') {
        let message = format!("a key has up to {MOST} bytes with its prefix, and no zero byte");
        return Err(StoreError::not_done(Reason::Refused, message));
    }
    Ok(key)
}

pub(crate) fn no_kind(kind: Kind) -> StoreError {
    let message = format!("dlock-postgres has no locks of kind {kind}");
    StoreError::not_done(Reason::Unsupported, message)
}

/// Describes what the key holds if the requested kind is a different lock; `None` if both kinds are one lock.
pub(crate) fn other_lock(asked: Kind, held: &str) -> Option<&'static str> {
    let is_read_write = |kind: Kind| matches!(kind, Kind::Read | Kind::Write);
    let held = is_read_write(kind_of(held)?);
    match (held, is_read_write(asked)) {
        (true, false) => Some("a read-write lock"),
        (false, true) => Some("a plain lock"),
        _ => None,
    }
}

/// Parses the kind in a row.
pub(crate) fn kind_of(name: &str) -> Option<Kind> {
    super::KINDS.into_iter().find(|kind| kind.to_string() == name)
}

/// Creates a key from a name, which may contain braces.
pub(crate) fn lock_key(name: &str) -> LockKey {
    LockKey::raw(name)
}
