//! The operations on the server, and their results.

use std::sync::Arc;

use dlock::LockKey;
use dlock::store::counter::{CounterReply, CounterRequest, CounterStep};
use dlock::store::queue::{self, Moment};
use dlock::store::{
    AcquireAllReply, AcquireReply, AcquireRequest, GrantId, Holder, Kind, Reason, ReleaseReply,
    ReleaseRequest, RenewRequest, Renewal, StoreError,
};

use super::table::Sql;
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
    /// How many permits; 1 for other kinds.
    pub(crate) amount: i32,
    /// The total of a semaphore that has none.
    pub(crate) total: Option<i64>,
    /// The maximum number of held permits.
    pub(crate) limit: Option<i64>,
    /// The id of a waiter for permits.
    pub(crate) waiter: Option<GrantId>,
}

/// An operation on a semaphore or latch, in the words of the statement.
#[derive(Debug)]
pub(crate) struct Counting {
    pub(crate) key: Arc<str>,
    pub(crate) kind: Kind,
    pub(crate) step: &'static str,
    /// Empty if it is carried out each time.
    pub(crate) id: String,
    pub(crate) amount: i64,
    pub(crate) flag: bool,
    /// How long it may arrive again, in µs.
    pub(crate) repeated_for: i64,
}

/// An operation.
#[derive(Debug)]
pub(crate) enum Step {
    Acquire(Ask),
    /// Acquires all of the locks, or none.
    AcquireAll(Vec<Ask>),
    /// The key, the grant, and until when to keep the key unavailable, if at all.
    Release(Arc<str>, GrantId, Option<Moment>),
    /// The key, the grant, and its lease from now on, in µs.
    Renew(Arc<str>, GrantId, i64),
    /// The release of a reader, with the same fields.
    Leave(Arc<str>, GrantId, Option<Moment>),
    /// The renewal of a reader, with the same fields.
    Extend(Arc<str>, GrantId, i64),
    /// The release of a fair lock, or of a waiter's position, with the same fields as a release.
    FairRelease(Arc<str>, GrantId, Option<Moment>),
    /// The release of permits, or of a waiter's position, with the same fields as a release.
    PermitRelease(Arc<str>, GrantId, Option<Moment>),
    /// The renewal of permits of one semaphore: the grants, and their leases from now on, in µs.
    PermitRenew(Arc<str>, Vec<(GrantId, i64)>),
    Count(Counting),
    Inspect(Arc<str>),
    /// A page of the locks with a prefix, with the last key of the page before, or "".
    List(String, String),
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
    RenewedAll(Vec<Renewal>),
    Counted(CounterReply),
    Holders(Vec<(String, Holder)>),
    Page(Page),
    Forced(bool),
    Made,
}

/// A part of a list.
#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) holders: Vec<(String, Holder)>,
    /// The last key that was looked at, held or not, if there may be more after it.
    pub(crate) last: Option<String>,
}

impl Ask {
    /// Converts a request.
    ///
    /// # Errors
    ///
    /// If this store does not support the request.
    pub(crate) fn new(key: Arc<str>, request: &AcquireRequest) -> Result<Ask, StoreError> {
        if !super::KINDS.contains(&request.kind) || request.kind == Kind::Latch {
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
            amount: i32::try_from(request.amount.max(1)).unwrap_or(i32::MAX),
            total: request.permits.map(i64::from),
            limit: request.limit.map(i64::from),
            waiter: request.waiter,
        })
    }
}

impl Counting {
    /// Converts a request.
    ///
    /// # Errors
    ///
    /// If this store cannot count that far.
    pub(crate) fn new(key: Arc<str>, request: &CounterRequest) -> Result<Counting, StoreError> {
        let (step, amount, flag) = match request.step {
            CounterStep::Permits => ("permits", 0, false),
            CounterStep::SetPermits { total, only_unset } => ("set_permits", total.into(), only_unset),
            CounterStep::AddPermits { by, unowned } => ("add_permits", by, unowned),
            CounterStep::Give { amount } => ("give", amount.into(), false),
            CounterStep::Drain => ("drain", 0, false),
            CounterStep::DeletePermits => ("delete_permits", 0, false),
            CounterStep::Count => ("count", 0, false),
            CounterStep::SetCount { count } => match i64::try_from(count) {
                Ok(count) => ("set_count", count, false),
                Err(_) => return Err(too_much(count)),
            },
            CounterStep::CountDown => ("count_down", 0, false),
            CounterStep::DeleteLatch => ("delete_latch", 0, false),
            other => {
                let message = format!("dlock-postgres has no operation {other:?}");
                return Err(StoreError::not_done(Reason::Unsupported, message));
            }
        };
        Ok(Counting {
            key: sendable(key)?,
            kind: request.step.kind(),
            step,
            id: request.id.to_string(),
            amount,
            flag,
            repeated_for: micros(request.repeated_for),
        })
    }

    /// Takes all permits from their holders.
    pub(crate) fn force(key: Arc<str>) -> Counting {
        Counting {
            key,
            kind: Kind::Permit,
            step: "force",
            id: String::new(),
            amount: 0,
            flag: false,
            repeated_for: 0,
        }
    }
}

fn too_much(count: u64) -> StoreError {
    let message = format!("PostgreSQL counts up to {}, not to {count}", i64::MAX);
    StoreError::not_done(Reason::Refused, message)
}

impl Step {
    pub(crate) fn release(key: Arc<str>, request: &ReleaseRequest) -> Result<Step, StoreError> {
        let step = match request.kind {
            Kind::Read => Step::Leave,
            Kind::Fair => Step::FairRelease,
            Kind::Permit | Kind::Unowned => Step::PermitRelease,
            _ => Step::Release,
        };
        // A moment: the step may wait for a connection, and be tried again.
        let keep_until = (!request.keep_for.is_zero()).then(|| Moment::now() + request.keep_for);
        Ok(step(sendable(key)?, request.grant, keep_until))
    }

    pub(crate) fn renew(key: Arc<str>, request: &RenewRequest) -> Result<Step, StoreError> {
        let step = match request.kind {
            Kind::Read => Step::Extend,
            _ => Step::Renew,
        };
        Ok(step(sendable(key)?, request.grant, micros(request.lease).max(1)))
    }

    /// Whether this is an operation of a reader, or on permits. Others may lock the row of the lock for a moment each.
    pub(crate) fn is_of_many(&self) -> bool {
        match self {
            Step::Leave(..) | Step::Extend(..) => true,
            Step::PermitRelease(..) | Step::PermitRenew(..) | Step::Count(_) => true,
            _ => (self.grants().iter()).any(|ask| ask.kind == Kind::Read || is_permit(ask.kind)),
        }
    }

    /// The statement that carries out several such operations at once, if there is one.
    pub(crate) fn shared(&self) -> Option<Sql> {
        Some(match self {
            Step::Acquire(ask) => match ask.kind {
                Kind::Read => Sql::Acquire,
                Kind::Fair => Sql::Fair,
                Kind::Permit | Kind::Unowned => Sql::Permit,
                _ => Sql::Plain,
            },
            Step::Release(..) => Sql::Release,
            Step::Leave(..) => Sql::Leave,
            Step::FairRelease(..) => Sql::FairRelease,
            Step::PermitRelease(..) => Sql::PermitRelease,
            Step::Renew(..) => Sql::Renew,
            Step::Extend(..) => Sql::Extend,
            Step::PermitRenew(..) => Sql::PermitRenew,
            Step::AcquireAll(_)
            | Step::Count(_)
            | Step::Inspect(_)
            | Step::List(..)
            | Step::Force(_)
            | Step::Make(_) => return None,
        })
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
            | Step::PermitRelease(key, ..)
            | Step::PermitRenew(key, _)
            | Step::Count(Counting { key, .. })
            | Step::Inspect(key)
            | Step::Force(key)
            | Step::Make(key) => (Some(key), &[][..]),
            Step::List(..) => (None, &[][..]),
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
    let held = family(kind_of(held)?);
    (held != family(asked)).then_some(held)
}

fn family(kind: Kind) -> &'static str {
    match kind {
        Kind::Read | Kind::Write => "a read-write lock",
        Kind::Permit | Kind::Unowned => "a semaphore",
        Kind::Latch => "a latch",
        _ => "a plain lock",
    }
}

pub(crate) fn is_permit(kind: Kind) -> bool {
    matches!(kind, Kind::Permit | Kind::Unowned)
}

/// Parses the kind in a row.
pub(crate) fn kind_of(name: &str) -> Option<Kind> {
    super::KINDS.into_iter().find(|kind| kind.to_string() == name)
}

/// Creates a key from a name, which may contain braces.
pub(crate) fn lock_key(name: &str) -> LockKey {
    LockKey::raw(name)
}
