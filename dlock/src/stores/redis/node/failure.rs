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
    // Servers before version 7 end it as on the wire.
    let message = message.replace("\r\n", "");
    let message = message.as_str();
    // The missing key is on another server of the Cluster, while its slot moves there.
    if message.contains(NOT_LOCAL) || message.contains(DOWN) {
        return StoreError::not_done(Reason::Unreachable, message);
    }
    let code = code_of(message);
    match passes(code) {
        true => StoreError::not_done(Reason::RefusedForNow, format!("{message}{}", hint(code))),
        false => StoreError::not_done(Reason::Refused, format!("{message}{}", hint(message))),
    }
}

/// Whether a server refused this because it is a read-only replica.
pub(super) fn is_read_only(error: &StoreError) -> bool {
    // The `redis` crate writes the code of an error reply in its own way.
    error.reason == Reason::RefusedForNow && matches!(code_of(&error.message), "READONLY" | "ReadOnly")
}

/// The code at the front of an error. Servers before version 7 write the line of the script before it, and the code as on
/// the wire.
fn code_of(message: &str) -> &str {
    let error = match message.strip_prefix("@user_script: ") {
        Some(rest) => rest.split_once(": ").map_or(rest, |(_, error)| error),
        None => message,
    };
    let end = error.find([' ', ':']).unwrap_or(error.len());
    error[..end].trim_start_matches('-')
}

/// Whether this is the code of a transient refusal.
fn passes(code: &str) -> bool {
    matches!(code, "OOM" | "MISCONF" | "NOREPLICAS" | "READONLY")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_at_the_front_tells_what_a_refusal_means_whatever_names_follow() {
        for (message, reason, read_only) in [
            (
                "OOM command not allowed (redisson_lock_queue:{READONLY})",
                Reason::RefusedForNow,
                false,
            ),
            (
                "OOM no memory (READONLY read only replica)",
                Reason::RefusedForNow,
                false,
            ),
            ("WRONGTYPE other data (a: OOM)", Reason::Refused, false),
            (
                "READONLY You can't write (redisson_lock_queue:{k})",
                Reason::RefusedForNow,
                true,
            ),
            (
                "@user_script: 12: -READONLY You can't write\r\n",
                Reason::RefusedForNow,
                true,
            ),
            ("-OOM command not allowed", Reason::RefusedForNow, false),
            (
                "NOREPLICAS Not enough good replicas",
                Reason::RefusedForNow,
                false,
            ),
        ] {
            let error = refused(message);
            assert_eq!(
                (&error.reason, is_read_only(&error)),
                (&reason, read_only),
                "{message}"
            );
        }
    }

    #[test]
    fn refused_call_tells_whether_the_server_is_a_replica() {
        for (reply, read_only) in [
            ("-READONLY You can't write against a read only replica.", true),
            ("-MISCONF READONLY", false),
        ] {
            let reply = redis::parse_redis_value(format!("{reply}\r\n").as_bytes()).unwrap();
            let error = reply.extract_error().unwrap_err();
            assert_eq!(is_read_only(&classify(&error)), read_only, "{error}");
        }
    }
}
