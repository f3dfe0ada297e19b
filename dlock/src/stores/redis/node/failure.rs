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
        _ if is_not_offered(error) => refused(error, ""),
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

/// Whether a server or a proxy does not have this command at all, or does not take any more of them: nothing was done.
fn is_not_offered(error: &RedisError) -> bool {
    let Some(details) = error.detail().map(str::to_ascii_lowercase) else {
        return false;
    };
    // A script may have done something before one of its commands was refused.
    let is_of_a_script = details.contains("user_script");
    let begins = |words: &&str| details.starts_with(words);
    let contains = |words: &&str| details.contains(words);
    !is_of_a_script
        && (["unknown command", "unsupported command"].iter().any(begins)
            || ["not support", "request limit exceeded"].iter().any(contains))
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
    match code_of(message) {
        "MASTERDOWN" => StoreError::not_done(Reason::Unreachable, message),
        code if passes(code) => {
            StoreError::not_done(Reason::RefusedForNow, format!("{message}{}", hint(code)))
        }
        _ => StoreError::not_done(Reason::Refused, format!("{message}{}", hint(message))),
    }
}

/// Whether a server refused this because it is a read-only replica.
pub(super) fn is_read_only(error: &StoreError) -> bool {
    // The `redis` crate writes the code of an error reply in its own way.
    error.reason == Reason::RefusedForNow && matches!(code_of(&error.message), "READONLY" | "ReadOnly")
}

/// Whether a server refused this because it loads its data, or because it is a replica without a link to its master.
pub(super) fn serves_nothing(error: &StoreError) -> bool {
    error.reason == Reason::Unreachable
        && matches!(
            code_of(&error.message),
            "LOADING" | "BusyLoading" | "MASTERDOWN" | "MasterDown"
        )
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

    /// As the `redis` crate reads it.
    fn reply(text: &str) -> RedisError {
        let reply = redis::parse_redis_value(format!("{text}\r\n").as_bytes()).unwrap();
        reply.extract_error().unwrap_err()
    }

    #[test]
    fn refused_call_tells_whether_the_server_is_a_replica() {
        for (text, read_only, nothing) in [
            (
                "-READONLY You can't write against a read only replica.",
                true,
                false,
            ),
            ("-MISCONF READONLY", false, false),
            ("-LOADING Redis is loading the dataset in memory", false, true),
            ("-MASTERDOWN Link with MASTER is down", false, true),
            ("-BUSY LOADING MASTERDOWN", false, false),
        ] {
            let error = classify(&reply(text));
            assert_eq!(
                (is_read_only(&error), serves_nothing(&error)),
                (read_only, nothing),
                "{error}"
            );
        }
        // In a script.
        for text in [
            "MASTERDOWN Link with MASTER is down",
            "@user_script: 12: -MASTERDOWN Link with MASTER is down\r\n",
        ] {
            assert!(serves_nothing(&refused(text)), "{text}");
        }
        assert!(!serves_nothing(&refused("ERR LOADING")));
    }

    #[test]
    fn command_that_the_server_does_not_have_is_refused() {
        for (text, not_offered) in [
            (
                "-ERR unknown command 'EVALSHA', with args beginning with: 'x'",
                true,
            ),
            ("-ERR unknown command `EVALSHA`, with args beginning with: ", true),
            ("-ERR unsupported command 'evalsha'", true),
            ("-ERR EVALSHA is not supported by this proxy", true),
            ("-ERR command not support your key", true),
            ("-ERR max daily request limit exceeded. Limit: 10000", true),
            (
                "-ERR user_script:1: this is not supported script: f, on @user_script:1.",
                false,
            ),
            (
                "-ERR Error running script (call to f_1): @user_script:1: not supported",
                false,
            ),
            (
                "-ERR Unknown Redis command called from script script: f, on @user_script:1.",
                false,
            ),
            ("-ERR something else", false),
        ] {
            let error = classify(&reply(text));
            let refused = (
                error.outcome == crate::store::Outcome::NotDone,
                error.reason == Reason::Refused,
            );
            assert_eq!(refused, (not_offered, not_offered), "{text}: {error:?}");
        }
    }
}
