//! What is asked of the server, and what came of it.

use std::sync::Arc;

use dlock::LockKey;
use dlock::store::{
    AcquireAllReply, AcquireReply, AcquireRequest, GrantId, Holder, Kind, Reason, ReleaseReply,
    ReleaseRequest, RenewRequest, Renewal, StoreError,
};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::micros::micros;
use crate::send_state::SendState;

/// A request for one lock.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    pub(crate) key: Arc<str>,
    pub(crate) grant: GrantId,
    pub(crate) kind: Kind,
    pub(crate) lease: i64,
    pub(crate) tokens: i32,
}

/// What is asked of the server.
#[derive(Debug)]
pub(crate) enum Step {
    Acquire(Ask),
    /// All of them or none.
    AcquireAll(Vec<Ask>),
    /// The grant, and how long to keep its key taken yet.
    Release(Arc<str>, GrantId, i64),
    /// The grant, and its lease from now on.
    Renew(Arc<str>, GrantId, i64),
    Inspect(Arc<str>),
    List(String),
    Force(Arc<str>),
    /// Makes the row of a lock, for a transaction that is to lock it.
    Make(Arc<str>),
}

/// What came of it.
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

/// A step on its way.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) step: Step,
    /// Its caller has its answer by then, whatever happens.
    pub(crate) deadline: Instant,
    /// It is sent no earlier.
    pub(crate) not_before: Option<Instant>,
    /// How often it looked at a row that was just changing.
    pub(crate) looks: u32,
    /// It is sent in a statement of its own: it may be why the one of many failed.
    pub(crate) alone: bool,
    pub(crate) send_state: Arc<SendState>,
    pub(crate) reply: oneshot::Sender<Result<Answer, StoreError>>,
}

impl Ask {
    /// The request as it is sent.
    ///
    /// # Errors
    ///
    /// Where this store cannot carry it out.
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
        })
    }
}

impl Step {
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

    /// The keys whose other steps must be done before, or come after.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &Arc<str>> {
        let (one, all) = match self {
            Step::Acquire(ask) => (Some(&ask.key), &[][..]),
            Step::AcquireAll(asks) => (None, &asks[..]),
            Step::Release(key, ..)
            | Step::Renew(key, ..)
            | Step::Inspect(key)
            | Step::Force(key)
            | Step::Make(key) => (Some(key), &[][..]),
            Step::List(_) => (None, &[][..]),
        };
        one.into_iter().chain(all.iter().map(|ask| &ask.key))
    }

    /// The grants that it may make.
    pub(crate) fn grants(&self) -> &[Ask] {
        match self {
            Step::Acquire(ask) => std::slice::from_ref(ask),
            Step::AcquireAll(asks) => asks,
            _ => &[],
        }
    }
}

impl Job {
    /// Answers the caller, if it is still there.
    pub(crate) fn answer(self, answer: Result<Answer, StoreError>) {
        let _ = self.reply.send(answer);
    }

    /// Whether it is to be sent yet. A request for a lock that nobody waits for any more is not: its caller releases
    /// what it may have been granted, and that finds nothing. Everything else is carried out without its caller.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        let abandoned = !self.step.grants().is_empty() && self.reply.is_closed();
        self.deadline > now && !abandoned
    }
}

/// PostgreSQL's texts have no zero byte, and its indices no entry of more than a third of a page.
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

/// The kind of a row.
pub(crate) fn kind_of(name: &str) -> Option<Kind> {
    super::KINDS.into_iter().find(|kind| kind.to_string() == name)
}

/// The name of a lock as users know it.
pub(crate) fn lock_key(name: &str) -> LockKey {
    LockKey::raw(name)
}
