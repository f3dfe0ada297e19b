//! The errors of locks, arranged so that a caller can act on them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::base::cause::{Cause, untold};
use crate::base::hold_state::Loss;
use crate::base::holder::Holder;
use crate::base::kind::Kind;
use crate::{LockKey, Problem};

/// Why a lock was not acquired, not kept or not released.
///
/// Messages name the lock and say what to do. Passwords never appear in them.
/// [docs/errors.md](https://github.com/dlock-rs/dlock/blob/main/docs/errors.md) says for each error whether the work ran, and
/// what is safe to retry.
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
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Error {
    /// The lock (or the requested permits) did not become available within the wait time: the store replied that other
    /// callers hold it, of this client or another one.
    ///
    /// The reply came to this call, or to a call of this process that this one waited behind. A store that did not
    /// reply in time is [`Unreachable`](Error::Unreachable) or [`OutcomeUnknown`](Error::OutcomeUnknown) instead: then
    /// the lock may be available.
    #[non_exhaustive]
    NotAcquired {
        /// The requested kind.
        kind: Kind,
        /// The requested lock.
        key: LockKey,
        /// How long this call waited; zero for `try_acquire`.
        waited: Duration,
        /// The remaining lease of the holder when it was last checked, if known. A live holder renews it, so this does
        /// not tell when the lock becomes available.
        remaining: Option<Duration>,
        /// Details of the last reply, if the store has any: what each server of a quorum replied, or which open
        /// transaction has the lock on PostgreSQL.
        votes: Option<Arc<str>>,
        /// The holder, if it was looked up, see [`holder`](Error::holder).
        holder: Option<Arc<Holder>>,
    },

    /// The lock was held and is lost. A caller with this error must not continue the work.
    #[non_exhaustive]
    Lost {
        /// The kind of the hold.
        kind: Kind,
        /// The lock that was lost.
        key: LockKey,
        /// Why the hold ended.
        loss: Loss,
    },

    /// Waiting would never end: what blocks this call waits for this call itself.
    #[non_exhaustive]
    WouldDeadlock {
        /// The requested lock.
        key: LockKey,
        /// What this call would wait for.
        reason: String,
    },

    /// The lock has as many waiters in this process as `max_waiters` allows.
    #[non_exhaustive]
    TooManyWaiters {
        /// The requested lock.
        key: LockKey,
        /// The limit that was set.
        limit: usize,
    },

    /// The store did not answer, and nothing was changed on it. An acquire that its caller gave up while it still waited to be sent
    /// may yet be sent, with its release right behind it.
    #[non_exhaustive]
    Unreachable {
        /// The operation that failed.
        what: String,
        /// The failure.
        message: String,
        /// The cause, as the store's own client library reported it. A chain of errors leaves it out where the message
        /// has its text.
        source: Option<Cause>,
    },

    /// The request was sent and no reply came: it may or may not have been carried out. Also if it was sent again, and
    /// the store refused a later copy.
    ///
    /// After an acquire the caller does not hold the lock, and whatever the server did is undone in the background.
    /// After a release the lock ends with its lease at the latest.
    #[non_exhaustive]
    OutcomeUnknown {
        /// The operation that failed.
        what: String,
        /// The failure.
        message: String,
        /// The cause, as the store's own client library reported it. A chain of errors leaves it out where the message
        /// has its text.
        source: Option<Cause>,
    },

    /// The store refused the request: a wrong password, a missing permission, a read-only replica, or no memory left.
    #[non_exhaustive]
    Refused {
        /// The operation that failed.
        what: String,
        /// The store's reply.
        message: String,
        /// The cause, as the store's own client library reported it. A chain of errors leaves it out where the message
        /// has its text.
        source: Option<Cause>,
    },

    /// Too few replicas of the server acknowledged the operation in time, see
    /// [`min_replicas`](crate::LockClientBuilder::min_replicas): a fail-over might lose it.
    ///
    /// After an acquire the caller does not hold the lock: what the server granted is released. After a renewal the
    /// lock is still held, for as long as [`remaining`](crate::LockGuard::remaining) says.
    #[non_exhaustive]
    NotReplicated {
        /// The operation that failed.
        what: String,
        /// How many replicas acknowledged it in time.
        acknowledged: u32,
        /// How many were required.
        wanted: u32,
        /// The time within which they had to acknowledge it.
        within: Duration,
    },

    /// The lock is not held by this caller.
    #[non_exhaustive]
    NotHeld {
        /// The lock.
        key: LockKey,
    },

    /// Several locks were held together, and some releases failed: each error names its lock. The other locks were
    /// released.
    #[non_exhaustive]
    NotReleased {
        /// One error for each lock that was not released; at least two.
        failures: Vec<Error>,
    },

    /// The client was shut down, or the runtime of its background work has ended.
    ClientClosed,

    /// The client drains, see [`LockClient::drain`](crate::LockClient::drain), and this was an outermost acquire. Nothing
    /// was acquired; another process may serve the request.
    Draining,

    /// More permits were to be removed than there are. Nothing was changed.
    #[non_exhaustive]
    TooFewPermits {
        /// The semaphore.
        key: LockKey,
        /// The total.
        total: u64,
    },

    /// The total of the semaphore is not set, so no permit can have been taken and released.
    #[non_exhaustive]
    NoPermitsSet {
        /// The semaphore.
        key: LockKey,
    },

    /// The latch is open: its count is zero, or it was never set, and cannot go lower. Nothing was changed.
    #[non_exhaustive]
    LatchOpen {
        /// The latch.
        key: LockKey,
    },

    /// The name of the lock breaks a rule; see [`LockKey`].
    #[non_exhaustive]
    InvalidKey {
        /// The name, shortened.
        key: String,
        /// The rule that it breaks.
        reason: String,
    },

    /// An option of a lock or a client is invalid.
    #[non_exhaustive]
    InvalidOption {
        /// The option.
        option: &'static str,
        /// What is wrong with it.
        reason: String,
    },

    /// The URL of a store cannot be used. The URL itself is not repeated, because it may contain a password.
    #[non_exhaustive]
    InvalidUrl {
        /// What is wrong with it.
        reason: String,
    },

    /// The key of this name holds data of another kind. Nothing was changed.
    #[non_exhaustive]
    KeyTaken {
        /// The requested lock.
        key: LockKey,
        /// What the key holds.
        found: String,
    },

    /// This store, or this version of it, does not support the request.
    #[non_exhaustive]
    Unsupported {
        /// The request.
        what: String,
        /// The reason.
        reason: String,
    },

    /// No default client has been set.
    NoDefaultClient,

    /// The process-wide default client was set before; that client stays.
    DefaultClientSet,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NotAcquired {
                kind,
                key,
                waited,
                remaining,
                votes,
                ..
            } => write!(
                f,
                "{}{}{}{}",
                held(*kind, key),
                after(*kind, *waited),
                lease_left(*remaining),
                said(votes.as_deref())
            ),
            Error::Lost { kind, key, loss } => write!(f, "{} was lost: {loss}", hold_of(*kind, key)),
            Error::WouldDeadlock { key, reason } => {
                write!(f, "waiting for lock \"{key}\" would never end: {reason}")
            }
            Error::TooManyWaiters { key, limit } => write!(
                f,
                "lock \"{key}\" already has {limit} waiters in this process, the most that max_waiters allows"
            ),
            Error::Unreachable { what, message, .. } => {
                write!(f, "the lock store could not be reached for {what}: {message}")
            }
            Error::OutcomeUnknown { what, message, .. } => {
                write!(f, "it is unknown whether {what} took effect: {message}")
            }
            Error::Refused { what, message, .. } => write!(f, "the lock store refused {what}: {message}"),
            Error::NotReplicated {
                what,
                acknowledged,
                wanted,
                within,
            } => write!(
                f,
                "{what} was acknowledged by {acknowledged} of the {wanted} replicas that min_replicas wants, within {within:?}"
            ),
            Error::NotHeld { key } => write!(f, "lock \"{key}\" is not held here"),
            Error::NotReleased { failures } => write!(
                f,
                "{} locks were not released properly: {}",
                failures.len(),
                listed(failures)
            ),
            Error::ClientClosed => write!(
                f,
                "the lock client is shut down, or the runtime that built it has ended"
            ),
            Error::Draining => write!(
                f,
                "the lock client is draining: this process begins nothing new, try another one"
            ),
            Error::TooFewPermits { key, total } => write!(
                f,
                "semaphore \"{key}\" has {total} permits in all: no more can be taken away"
            ),
            Error::NoPermitsSet { key } => write!(
                f,
                "semaphore \"{key}\" has no permits yet: set their number first"
            ),
            Error::LatchOpen { key } => write!(f, "latch \"{key}\" is open already: its count is zero"),
            Error::InvalidKey { key, reason } => {
                write!(f, "\"{key}\" cannot be the name of a lock: {reason}")
            }
            Error::InvalidOption { option, reason } => write!(f, "invalid option {option}: {reason}"),
            Error::InvalidUrl { reason } => write!(f, "invalid lock store URL: {reason}"),
            Error::KeyTaken { key, found } => write!(
                f,
                "key \"{key}\" holds {found}, not a lock of this kind: choose another name, or use one kind for this name"
            ),
            Error::Unsupported { what, reason } => write!(f, "{what} is not supported: {reason}"),
            Error::NoDefaultClient => write!(
                f,
                "no default lock client: call dlock::set_default(client) once at start-up, in a test dlock::set_runtime_default(client), or name the client with `lock = ...`"
            ),
            Error::DefaultClientSet => write!(
                f,
                "the default lock client is already set: call dlock::set_default once per process, and dlock::set_runtime_default in tests"
            ),
        }
    }
}

impl std::error::Error for Error {
    /// The first cause that says more than the message.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Unreachable { message, source, .. }
            | Error::OutcomeUnknown { message, source, .. }
            | Error::Refused { message, source, .. } => untold(source.as_ref()?, message),
            _ => None,
        }
    }
}

impl Error {
    /// Creates an [`Error::InvalidOption`], for a store of another crate.
    ///
    /// ```
    /// let error = dlock::Error::invalid_option("table", "it has a space in its name");
    /// assert_eq!(error.to_string(), "invalid option table: it has a space in its name");
    /// ```
    #[must_use]
    pub fn invalid_option(option: &'static str, reason: &str) -> Error {
        Error::InvalidOption {
            option,
            reason: reason.to_owned(),
        }
    }

    /// Returns the code of the error, such as `E0001`, the same in all versions: `dlock explain E0001` explains its
    /// cause and its remedy.
    ///
    /// ```
    /// assert_eq!(dlock::Error::ClientClosed.code(), "E0011");
    /// ```
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Error::NotAcquired { .. } => "E0001",
            Error::Lost { .. } => "E0002",
            Error::WouldDeadlock { .. } => "E0003",
            Error::TooManyWaiters { .. } => "E0004",
            Error::Unreachable { .. } => "E0005",
            Error::OutcomeUnknown { .. } => "E0006",
            Error::Refused { .. } => "E0007",
            Error::NotReplicated { .. } => "E0008",
            Error::NotHeld { .. } => "E0009",
            Error::NotReleased { .. } => "E0010",
            Error::ClientClosed => "E0011",
            Error::TooFewPermits { .. } => "E0012",
            Error::NoPermitsSet { .. } => "E0013",
            Error::LatchOpen { .. } => "E0014",
            Error::InvalidKey { .. } => "E0015",
            Error::InvalidOption { .. } => "E0016",
            Error::InvalidUrl { .. } => "E0017",
            Error::KeyTaken { .. } => "E0018",
            Error::Unsupported { .. } => "E0019",
            Error::NoDefaultClient => "E0020",
            Error::DefaultClientSet => "E0021",
            Error::Draining => "E0022",
        }
    }

    /// Returns whether another caller holds the lock, of this client or another one: trying again later may succeed.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        matches!(self, Error::NotAcquired { .. })
    }

    /// Returns whether a held lock was lost.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        match self {
            Error::Lost { .. } => true,
            Error::NotReleased { failures } => failures.iter().any(Error::is_lost),
            _ => false,
        }
    }

    /// Returns whether the store failed: it could not be reached, did not answer or refused, or too few of its replicas
    /// answered; also while this client drains or is shut down ([`Draining`](Error::Draining),
    /// [`ClientClosed`](Error::ClientClosed)), when the store is well. Exclude these two before you go on without a
    /// lock.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        match self {
            Error::Unreachable { .. }
            | Error::OutcomeUnknown { .. }
            | Error::Refused { .. }
            | Error::NotReplicated { .. }
            | Error::Draining
            | Error::ClientClosed => true,
            Error::NotReleased { failures } => failures.iter().any(Error::is_unavailable),
            _ => false,
        }
    }

    /// Returns the holder that blocked an acquire, if this client looked it up. A client with
    /// [presence](crate::LockClientBuilder::presence) does so for a wait of more than a second, at most once a second,
    /// and never for `try_acquire`. Without presence this is `None`, so always on PostgreSQL, MySQL, etcd and ZooKeeper:
    /// there [`LockClient::inspect`](crate::LockClient::inspect) returns the holders.
    ///
    /// The holder is for logs and for the person on call, and not part of the message, which strangers may see.
    ///
    /// ```
    /// # fn log(error: &dlock::Error) {
    /// if let Some(client) = error.holder().and_then(|holder| holder.client.as_ref()) {
    ///     eprintln!("{error}: {} on {}", client.service, client.host);
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn holder(&self) -> Option<&Holder> {
        match self {
            Error::NotAcquired { holder, .. } => holder.as_deref(),
            _ => None,
        }
    }

    /// Returns when to try again, if that makes sense: after a second. `None` after a loss: the work may have had
    /// effects.
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
            | Error::Draining
            | Error::ClientClosed => Some(SOON),
            _ => None,
        }
    }

    /// Returns the error as an HTTP problem document (RFC 9457).
    #[must_use]
    pub fn problem(&self) -> Problem {
        Problem::from(self)
    }
}

fn held(kind: Kind, key: &LockKey) -> String {
    match kind.is_permits() {
        true => format!("semaphore \"{key}\" has not enough free permits"),
        false => format!("lock \"{key}\" is held by another caller"),
    }
}

fn hold_of(kind: Kind, key: &LockKey) -> String {
    let noun = kind.noun();
    match kind.is_permits() {
        true => format!("permit of {noun} \"{key}\""),
        false => format!("{noun} \"{key}\""),
    }
}

fn listed(failures: &[Error]) -> String {
    let texts: Vec<_> = failures.iter().map(Error::to_string).collect();
    texts.join("; ")
}

fn after(kind: Kind, waited: Duration) -> String {
    let all_along = if kind.is_permits() { "had not" } else { "was" };
    match waited.is_zero() {
        true => String::new(),
        false => format!(", and {all_along} for the {waited:.1?} of waiting"),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_says_what_was_in_the_way_all_along() {
        for (kind, waited, says) in [
            (Kind::Write, 0, "lock \"k\" is held by another caller"),
            (
                Kind::Mutex,
                20,
                "lock \"k\" is held by another caller, and was for the 20.0ms of waiting",
            ),
            (
                Kind::Permit,
                20,
                "semaphore \"k\" has not enough free permits, and had not for the 20.0ms of waiting",
            ),
        ] {
            let error = Error::NotAcquired {
                kind,
                key: "k".into(),
                waited: Duration::from_millis(waited),
                remaining: None,
                votes: None,
                holder: None,
            };
            assert_eq!(error.to_string(), says);
        }
    }
}
