//! What can go wrong, told so that a caller can act on it.

use std::sync::Arc;
use std::time::Duration;

use crate::base::cause::Cause;
use crate::base::hold_state::Loss;
use crate::base::kind::Kind;
use crate::{LockKey, Problem};

/// Why a lock was not had, not kept or not given back.
///
/// Messages name the lock and say what to do. Passwords never appear in them.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::{Error, LockClient};
///
/// async fn bill(client: &LockClient) -> Result<&'static str, Error> {
///     match client.lock("bill:7").try_acquire().await {
///         Ok(_guard) => Ok("sent"),
///         Err(error) if error.is_busy() => Ok("another process sends it"),
///         // Whether the store took the lock is unknown. It is undone in the background: try again later.
///         Err(Error::OutcomeUnknown { .. }) => Ok("later"),
///         Err(error) => Err(error),
///     }
/// }
///
/// let client = LockClient::memory();
/// assert_eq!(bill(&client).await?, "sent");
/// let _guard = client.lock("bill:7").acquire().await?;
/// assert_eq!(bill(&client).await?, "another process sends it");
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The lock (or the requested permits) did not become available within the wait time: the store said that others
    /// hold it.
    ///
    /// It said so during this call, or to a call of this process that this one waited behind. A store that did not reply
    /// in time is [`Unreachable`](Error::Unreachable) or [`OutcomeUnknown`](Error::OutcomeUnknown) instead: then the lock
    /// may be free.
    #[error(
        "{}{}{}{}",
        held(*kind, key), after(*waited), lease_left(*remaining), said(votes.as_deref())
    )]
    #[non_exhaustive]
    NotAcquired {
        /// What it was asked for as.
        kind: Kind,
        /// The lock that was asked for.
        key: LockKey,
        /// How long this call waited; zero for `try_acquire`.
        waited: Duration,
        /// What was left of the holder's lease when it was last looked at, where that is known. A holder
        /// that is alive renews it, so this is no promise of when the lock comes free.
        remaining: Option<Duration>,
        /// What each server of a quorum said when it was last asked; `None` on every other store.
        votes: Option<Arc<str>>,
    },

    /// The lock was held and is not any more. Whoever holds this error must not go on with the work.
    #[error("lock \"{key}\" was lost: {loss}")]
    #[non_exhaustive]
    Lost {
        /// The lock that was lost.
        key: LockKey,
        /// What ended the hold.
        loss: Loss,
    },

    /// Waiting would never end: what blocks this call waits for this call.
    #[error("waiting for lock \"{key}\" would never end: {reason}")]
    #[non_exhaustive]
    WouldDeadlock {
        /// The lock that was asked for.
        key: LockKey,
        /// What stands in the way.
        reason: String,
    },

    /// As many callers wait for the lock in this process as `max_waiters` allows.
    #[error("lock \"{key}\" already has {limit} waiters in this process, the most that max_waiters allows")]
    #[non_exhaustive]
    TooManyWaiters {
        /// The lock that was asked for.
        key: LockKey,
        /// The limit that was set.
        limit: usize,
    },

    /// The store did not answer, and nothing was changed on it.
    #[error("the lock store could not be reached for {what}: {message}")]
    #[non_exhaustive]
    Unreachable {
        /// What was to be done.
        what: String,
        /// What happened instead.
        message: String,
        /// The cause.
        #[source]
        source: Option<Cause>,
    },

    /// The request was sent and no answer came: it may or may not have been carried out.
    ///
    /// After an acquire the lock is not held by the caller, and whatever the server did is undone in the
    /// background. After a release the lock ends with its lease at the latest.
    #[error("it is unknown whether {what} took effect: {message}")]
    #[non_exhaustive]
    OutcomeUnknown {
        /// What was to be done.
        what: String,
        /// What happened instead.
        message: String,
        /// The cause.
        #[source]
        source: Option<Cause>,
    },

    /// The store answered that it will not do this: a wrong password, a missing permission, a read-only
    /// replica, memory used up.
    #[error("the lock store refused {what}: {message}")]
    #[non_exhaustive]
    Refused {
        /// What was to be done.
        what: String,
        /// What the store said.
        message: String,
        /// The cause.
        #[source]
        source: Option<Cause>,
    },

    /// Too few replicas of the server had it in time, as [`min_replicas`](crate::LockClientBuilder::min_replicas)
    /// wants it: a fail-over might lose it.
    ///
    /// After an acquire the lock is not held by the caller: what the server granted is given back. After a renewal
    /// it is still held, for as long as [`remaining`](crate::LockGuard::remaining) says.
    #[error(
        "{what} was acknowledged by {acknowledged} of the {wanted} replicas that min_replicas wants, within {within:?}"
    )]
    #[non_exhaustive]
    NotReplicated {
        /// What was to be done.
        what: String,
        /// How many replicas acknowledged it in time.
        acknowledged: u32,
        /// How many were to.
        wanted: u32,
        /// The time that they had.
        within: Duration,
    },

    /// The lock is not held by this caller.
    #[error("lock \"{key}\" is not held here")]
    #[non_exhaustive]
    NotHeld {
        /// The lock.
        key: LockKey,
    },

    /// Several locks that were held together were given back, and this is what failed of it: each error names
    /// its lock. Those that are not named were given back.
    #[error("{} locks were not given back in good order: {}", failures.len(), listed(failures))]
    #[non_exhaustive]
    NotReleased {
        /// One for each lock of which it failed; at least two.
        failures: Vec<Error>,
    },

    /// The client was shut down, or the runtime that its background work ran on has ended.
    #[error("the lock client is shut down")]
    ClientClosed,

    /// There are not so many permits that this many could be taken away. Nothing was changed.
    #[error("semaphore \"{key}\" has {total} permits in all: no more can be taken away")]
    #[non_exhaustive]
    TooFewPermits {
        /// The semaphore.
        key: LockKey,
        /// How many there are, free or held.
        total: u64,
    },

    /// Nobody has said how many permits the semaphore has, so none can have been taken and come back.
    #[error("semaphore \"{key}\" has no permits yet: set their number first")]
    #[non_exhaustive]
    NoPermitsSet {
        /// The semaphore.
        key: LockKey,
    },

    /// The latch is open: its count is zero, or it was never set, and cannot go below. Nothing was changed.
    #[error("latch \"{key}\" is open already: its count is zero")]
    #[non_exhaustive]
    LatchOpen {
        /// The latch.
        key: LockKey,
    },

    /// The name of the lock breaks a rule; see [`LockKey`].
    #[error("\"{key}\" cannot be the name of a lock: {reason}")]
    #[non_exhaustive]
    InvalidKey {
        /// The name, shortened.
        key: String,
        /// The rule that it breaks.
        reason: String,
    },

    /// An option of a lock or a client makes no sense.
    #[error("invalid option {option}: {reason}")]
    #[non_exhaustive]
    InvalidOption {
        /// The option.
        option: &'static str,
        /// What is wrong with it.
        reason: String,
    },

    /// The URL of a store cannot be used. The URL itself is not repeated, for it may hold a password.
    #[error("invalid lock store URL: {reason}")]
    #[non_exhaustive]
    InvalidUrl {
        /// What is wrong with it.
        reason: String,
    },

    /// The key of this name holds data that is not this kind of lock. Nothing was changed.
    #[error("key \"{key}\" holds {found}, not a lock of this kind: choose another name or remove that data")]
    #[non_exhaustive]
    KeyTaken {
        /// The lock that was asked for.
        key: LockKey,
        /// What the key holds.
        found: String,
    },

    /// This store or this version cannot do it.
    #[error("{what} is not supported: {reason}")]
    #[non_exhaustive]
    Unsupported {
        /// What was asked for.
        what: String,
        /// Why not.
        reason: String,
    },

    /// No default client has been set.
    #[error(
        "no default lock client: call dlock::set_default(client) once at start-up, in a test dlock::set_runtime_default(client), or name the client with `lock = ...`"
    )]
    NoDefaultClient,

    /// The process-wide default client was set before, and still works.
    #[error(
        "the default lock client is already set: call dlock::set_default once per process, and dlock::set_runtime_default in tests"
    )]
    DefaultClientSet,
}

impl Error {
    /// Whether somebody else simply has the lock: trying again later may succeed.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        matches!(self, Error::NotAcquired { .. })
    }

    /// Whether a lock that was held was lost.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        match self {
            Error::Lost { .. } => true,
            Error::NotReleased { failures } => failures.iter().any(Error::is_lost),
            _ => false,
        }
    }

    /// Whether the store is at fault: it could not be reached, did not answer or refused, or too
    /// few of its replicas answered.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        match self {
            Error::Unreachable { .. }
            | Error::OutcomeUnknown { .. }
            | Error::Refused { .. }
            | Error::NotReplicated { .. }
            | Error::ClientClosed => true,
            Error::NotReleased { failures } => failures.iter().any(Error::is_unavailable),
            _ => false,
        }
    }

    /// When to try again, where trying again makes sense: after a second. Not after a loss: the work may
    /// have had effects.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        const SOON: Duration = Duration::from_secs(1);
        match self {
            Error::NotAcquired { .. }
            | Error::TooManyWaiters { .. }
            | Error::Unreachable { .. }
            | Error::OutcomeUnknown { .. }
            | Error::Refused { .. }
            | Error::NotReplicated { .. }
            | Error::ClientClosed => Some(SOON),
            _ => None,
        }
    }

    /// The error as an HTTP problem document (RFC 9457) would tell it.
    #[must_use]
    pub fn problem(&self) -> Problem {
        Problem::from(self)
    }
}

fn held(kind: Kind, key: &LockKey) -> String {
    match kind {
        Kind::Permit | Kind::Unowned => format!("semaphore \"{key}\" has not enough free permits"),
        _ => format!("lock \"{key}\" is held by somebody else"),
    }
}

fn listed(failures: &[Error]) -> String {
    let texts: Vec<_> = failures.iter().map(Error::to_string).collect();
    texts.join("; ")
}

fn after(waited: Duration) -> String {
    if waited.is_zero() {
        String::new()
    } else {
        format!(", and was for the {waited:.1?} of waiting")
    }
}

fn said(votes: Option<&str>) -> String {
    votes.map(|votes| format!("; {votes}")).unwrap_or_default()
}

fn lease_left(remaining: Option<Duration>) -> String {
    remaining
        .map(|left| format!(" (the holder's lease has {left:.1?} left)"))
        .unwrap_or_default()
}
