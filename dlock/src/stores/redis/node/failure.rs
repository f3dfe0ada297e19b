//! What a failure means for the connection, and for the steps in flight.

use redis::{ErrorKind, RedisError, ServerError, ServerErrorKind};

use super::super::hint::hint;
use crate::store::{Reason, StoreError};
use crate::stores::redis::script::{DOWN, NOT_LOCAL};

pub(super) fn broke() -> StoreError {
    StoreError::unknown("the connection broke before the answer came")
}

pub(super) fn no_answer() -> StoreError {
    StoreError::unknown("the server did not answer in time")
}

/// Whether the connection is unusable.
pub(super) fn is_broken(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::Io | ErrorKind::Parse) || error.code() == Some("NOAUTH")
}

/// The meaning of an error reply to a whole call: after most errors the call was not executed.
pub(in super::super) fn classify(error: &RedisError) -> StoreError {
    use ServerErrorKind as S;
    let refused = |error: &RedisError, hint: &str| {
        StoreError::not_done(Reason::Refused, format!("{error}{hint}")).caused_by(error.clone())
    };
    let explained = |error: &RedisError| refused(error, hint(&error.to_string()));
    match error.kind() {
        ErrorKind::Server(S::NoPerm) | ErrorKind::AuthenticationFailed => explained(error),
        ErrorKind::Server(S::Moved) => refused(
            error,
            " (this is a server of a cluster: give redis+cluster:// and some of its servers)",
        ),
        ErrorKind::Server(
            S::BusyLoading | S::NoScript | S::Ask | S::TryAgain | S::ClusterDown | S::MasterDown,
        ) => StoreError::not_done(Reason::Unreachable, error.to_string()).caused_by(error.clone()),
        _ => match error.code() {
            Some("WRONGPASS" | "NOAUTH") => explained(error),
            Some("BUSY") => {
                StoreError::not_done(Reason::Unreachable, error.to_string()).caused_by(error.clone())
            }
            Some(code) if passes(code) => {
                let message = format!("{error}{}", hint(code));
                StoreError::not_done(Reason::RefusedForNow, message).caused_by(error.clone())
            }
            _ => StoreError::unknown(error.to_string()).caused_by(error.clone()),
        },
    }
}

/// Whether the server will refuse this command again: the user may not use it, or the server does not know it.
pub(super) fn lasts(error: &ServerError) -> bool {
    matches!(
        error.kind(),
        Some(ServerErrorKind::NoPerm | ServerErrorKind::ResponseError)
    )
}

/// The error of a command that failed inside a script, before anything was changed.
pub(in super::super) fn refused(message: &str) -> StoreError {
    // The missing key is on another server of the Cluster, while its slot moves there.
    if message.contains(NOT_LOCAL) || message.contains(DOWN) {
        return StoreError::not_done(Reason::Unreachable, message);
    }
    // The code is at the front, or after the name of a key; old servers write it as on the wire.
    let codes = message.split(": ").map(|part| part.trim_start_matches('-'));
    let mut codes = codes.filter_map(|part| part.split_whitespace().next());
    match codes.find(|code| passes(code)) {
        Some(code) => StoreError::not_done(Reason::RefusedForNow, format!("{message}{}", hint(code))),
        None => StoreError::not_done(Reason::Refused, format!("{message}{}", hint(message))),
    }
}

/// Whether this is the code of a transient refusal.
fn passes(code: &str) -> bool {
    matches!(code, "OOM" | "MISCONF" | "NOREPLICAS" | "READONLY")
}
