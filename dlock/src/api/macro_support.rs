//! What the expansion of `#[distributed_lock]` calls. Not for use by hand: it changes without notice.
//!
//! Kept small on purpose. Code that can be a function here is not repeated in every locked function.

use std::pin::Pin;

pub use crate::api::run::{Entrance, Frame};
use crate::{Error, Lock, LockClient, LockKey, MultiLock};

/// The client for functions that name none.
///
/// # Errors
///
/// [`Error::NoDefaultClient`], which says what to call.
pub fn default_client() -> Result<LockClient, Error> {
    crate::default_client()
}

/// The client that `lock = …` names, through whatever reference or smart pointer holds it.
#[must_use]
pub fn client(client: &LockClient) -> LockClient {
    client.clone()
}

/// The lock that a function takes; the options follow.
pub fn lock(client: LockClient, key: LockKey) -> Lock {
    client.lock(key)
}

/// The locks that a function takes together; the options follow.
pub fn multi(client: LockClient, keys: impl IntoIterator<Item = LockKey>) -> MultiLock {
    client.multi(keys)
}

/// The names of the locks, where one expression has them all.
pub fn keys<K: IntoKeys>(keys: K) -> Vec<LockKey> {
    keys.into_keys()
}

/// The name of the lock. A name that breaks the rules is an error of the acquire.
pub fn key<K: IntoKey>(key: K) -> LockKey {
    key.into_key()
}

/// Tells the layer around the request, if there is one, whether the body begins.
///
/// # Errors
///
/// That of the acquire.
pub fn acquired<T>(acquired: Result<T, Error>, may_be_handler: bool) -> Result<T, Error> {
    crate::base::request::note(&acquired, may_be_handler);
    acquired
}

/// No value of the type, ever: code behind it is dead, but tells the compiler the type of a block.
#[must_use]
pub const fn never<T>() -> Option<T> {
    None
}

/// A future that is larger than most, on the heap.
pub fn boxed<F>(future: F) -> Pin<Box<F>> {
    Box::pin(future)
}

/// Values that can be the `key` of `#[distributed_lock]`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the key of a lock",
    label = "not a key",
    note = "a key is a `LockKey` or converts into one, as strings do",
    note = "to make a key of something that can be printed, write `key(\"order:{{}}\", value)`"
)]
pub trait IntoKey {
    /// The key.
    fn into_key(self) -> LockKey;
}

#[diagnostic::do_not_recommend]
impl<K: Into<LockKey>> IntoKey for K {
    fn into_key(self) -> LockKey {
        self.into()
    }
}

/// Values that can be the `keys` of `#[distributed_lock]`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the keys of several locks",
    label = "not several keys",
    note = "keys are what can be iterated over and gives `LockKey`s or what converts into one, such as a `Vec<String>`",
    note = "or a list, in which each is a key: `keys = [\"account:{{from}}\", \"account:{{to}}\"]`"
)]
pub trait IntoKeys {
    /// The keys.
    fn into_keys(self) -> Vec<LockKey>;
}

#[diagnostic::do_not_recommend]
impl<K: IntoIterator<Item: Into<LockKey>>> IntoKeys for K {
    fn into_keys(self) -> Vec<LockKey> {
        self.into_iter().map(Into::into).collect()
    }
}

/// Return types that can express that the lock was not acquired.
#[diagnostic::on_unimplemented(
    message = "a function with `#[distributed_lock]` cannot tell the failure of its lock by returning `{Self}`",
    label = "has no place for a `dlock::Error`",
    note = "return a `Result` whose error type has `From<dlock::Error>`",
    note = "or say what to return instead: `on_error = path::to::function`, a `fn(dlock::Error)` that gives the return type"
)]
pub trait FromLockError {
    /// Returns the value that expresses the failure.
    fn from_lock_error(error: Error) -> Self;
}

impl<T, E: HoldsLockError> FromLockError for Result<T, E> {
    fn from_lock_error(error: Error) -> Self {
        Err(E::hold(error))
    }
}

/// Error types that can hold the failure of a lock: those with `From<dlock::Error>`.
#[diagnostic::on_unimplemented(
    message = "the error type `{Self}` of a function with `#[distributed_lock]` cannot hold a `dlock::Error`",
    label = "`{Self}` has no `From<dlock::Error>`",
    note = "implement `From<dlock::Error>` for `{Self}`; if that is a type parameter, make it a bound",
    note = "or say what to return instead: `on_error = path::to::function`, a `fn(dlock::Error)` that gives the return type"
)]
pub trait HoldsLockError {
    /// The error as this type.
    fn hold(error: Error) -> Self;
}

#[diagnostic::do_not_recommend]
impl<E: From<Error>> HoldsLockError for E {
    fn hold(error: Error) -> Self {
        error.into()
    }
}

/// What `#[once]` calls.
#[cfg(feature = "once")]
mod once {
    use crate::{LockClient, LockKey, NotRun, OnFailure, Once, OnceError, OnceReply};

    /// The work that a function does once; the options follow.
    pub fn once(client: LockClient, key: LockKey) -> Once {
        client.once(key)
    }

    /// Allows that many attempts. Zero, or more than the maximum, is an error of the call.
    #[must_use]
    pub fn attempts(count: usize) -> OnFailure {
        OnFailure::AtMost(u32::try_from(count).unwrap_or(u32::MAX))
    }

    /// Return types of functions that run once.
    #[diagnostic::on_unimplemented(
        message = "a function with `#[once]` cannot return `{Self}`",
        label = "has no place for a `dlock::NotRun`",
        note = "return a `Result` whose error type has `From<dlock::NotRun>`, which says why there is no result"
    )]
    pub trait OnceOutput {
        /// The value of the function.
        type Value;
        /// Its error.
        type Error;
        /// Converts the outcome of the call to the return value.
        fn of_once(ran: Result<OnceReply<Self::Value>, OnceError<Self::Error>>) -> Self;
    }

    impl<T, E: HoldsNotRun> OnceOutput for Result<T, E> {
        type Value = T;
        type Error = E;
        fn of_once(ran: Result<OnceReply<T>, OnceError<E>>) -> Self {
            match ran {
                Ok(OnceReply::Ran(value) | OnceReply::Earlier(value) | OnceReply::Unrecorded(value, _)) => {
                    Ok(value)
                }
                Ok(OnceReply::Elsewhere { attempt, remaining }) => {
                    Err(E::hold(NotRun::Elsewhere { attempt, remaining }))
                }
                Err(OnceError::Work(error)) => Err(error),
                Err(error) => Err(E::hold(NotRun::of(error))),
            }
        }
    }

    /// Error types that can express that a function did not run: those with `From<dlock::NotRun>`.
    #[diagnostic::on_unimplemented(
        message = "the error type `{Self}` of a function with `#[once]` cannot hold a `dlock::NotRun`",
        label = "`{Self}` has no `From<dlock::NotRun>`",
        note = "return `dlock::NotRun`, or an error type of your own that has `From<dlock::NotRun>`; if `{Self}` is a type parameter, make it a bound"
    )]
    pub trait HoldsNotRun {
        /// The error as this type.
        fn hold(error: NotRun) -> Self;
    }

    #[diagnostic::do_not_recommend]
    impl<E: From<NotRun>> HoldsNotRun for E {
        fn hold(error: NotRun) -> Self {
            error.into()
        }
    }
}

#[cfg(feature = "once")]
pub use self::once::{HoldsNotRun, OnceOutput, attempts, once};
