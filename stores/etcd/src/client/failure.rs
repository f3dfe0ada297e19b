//! Classifies failures of the network and of the server by what they mean for a request.

use std::error::Error;
use std::io::{self, ErrorKind};

use dlock::store::{Outcome, Reason, StoreError};
use tonic::{Code, Status};

/// A request that failed.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    /// The request was certainly not carried out and this connection is unusable; another server may carry it out.
    Elsewhere(StoreError),
    /// The server has too much to do, and certainly did not carry the request out; it may do so a moment later.
    Busy(StoreError),
    /// The server replied with a refusal.
    Answered(Refusal, StoreError),
    /// The connection is unusable, and it is unknown whether the request was carried out.
    Broken(StoreError),
}

/// Why a server refused a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The lease does not exist, so nothing was done.
    NoLease,
    /// The server's space is used up. The request that exceeds the quota may itself have been carried out.
    Full,
    /// The request has more operations or bytes than the server accepts.
    TooLarge,
    /// The user lacks rights, so nothing was done.
    Denied,
    Other,
}

impl Failure {
    pub(crate) fn error(self) -> StoreError {
        match self {
            Failure::Elsewhere(error)
            | Failure::Busy(error)
            | Failure::Answered(_, error)
            | Failure::Broken(error) => error,
        }
    }

    /// Whether the server refused for this reason.
    pub(crate) fn is(&self, refusal: Refusal) -> bool {
        matches!(self, Failure::Answered(why, _) if *why == refusal)
    }

    /// Whether the server replied that it does not carry the request out, now or later.
    pub(crate) fn is_refused(&self) -> bool {
        matches!(self, Failure::Answered(_, error) if error.reason == Reason::Refused)
    }

    /// Whether a late copy of the request may still be carried out: it was sent, and has no reply.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self, Failure::Broken(error) if error.outcome == Outcome::Unknown)
    }
}

/// Whether a server refuses for this reason what it allows after a login: the token expired, or rights were changed. Or
/// there was no authentication yet when a client with a login connected.
pub(crate) fn wants_login(reason: &str, has_login: bool) -> bool {
    let has = |part: &str| reason.contains(part);
    has("invalid auth token")
        || has("revision of auth store is old")
        || has("auth: revision in header is old")
        || has_login && has("user name is empty")
}

/// Classifies the failure of a request that a client, with a login or without, has sent to `address`.
pub(crate) fn of(status: Status, address: &str, has_login: bool) -> Failure {
    let text = status.message().to_owned();
    let said = |advice: &str| format!("etcd at {address} said: {text}{advice}");
    let not_done =
        |reason, advice: &str| StoreError::not_done(reason, said(advice)).caused_by(status.clone());
    let other = |error| Failure::Answered(Refusal::Other, error);
    let has = |part: &str| text.contains(part);
    if status.source().is_some() {
        // The network or the gRPC library failed.
        let message = format!("{address}: {}", describe(&status));
        return Failure::Broken(StoreError::unknown(message).caused_by(status));
    }
    if has("requested lease not found") {
        return Failure::Answered(Refusal::NoLease, not_done(Reason::Unreachable, ""));
    }
    if has("database space exceeded") {
        let advice = ": compact and defragment it, then disarm its alarm";
        let mut error = not_done(Reason::RefusedForNow, advice);
        error.outcome = Outcome::Unknown;
        return Failure::Answered(Refusal::Full, error);
    }
    let too_large = |option: &str| {
        let advice = format!(": its option {option} is the limit");
        Failure::Answered(Refusal::TooLarge, not_done(Reason::Refused, &advice))
    };
    if has("too many operations") {
        return too_large("--max-txn-ops");
    }
    // The second is gRPC's, for a message that the server does not read. Of a reply that it does not send, gRPC says "trying
    // to send message larger than max".
    if has("request is too large") || has("received message larger than max") {
        return too_large("--max-request-bytes");
    }
    if wants_login(&text, has_login) {
        return Failure::Elsewhere(not_done(Reason::Unreachable, ""));
    }
    // Reported before the request is proposed to the other members.
    if has("too many requests") {
        return Failure::Busy(not_done(Reason::Unreachable, ""));
    }
    if has("no leader") || has("not capable") || has("not supported for learner") {
        return Failure::Elsewhere(not_done(Reason::Unreachable, ""));
    }
    match status.code() {
        Code::PermissionDenied => {
            let advice = ": the user needs readwrite on the prefix of the locks";
            Failure::Answered(Refusal::Denied, not_done(Reason::Refused, advice))
        }
        Code::Unauthenticated => other(not_done(Reason::Refused, "")),
        Code::InvalidArgument if has("user name is empty") => {
            other(not_done(Reason::Refused, ": it wants a user and a password"))
        }
        Code::InvalidArgument | Code::FailedPrecondition => other(not_done(Reason::Refused, "")),
        Code::Unimplemented => other(not_done(Reason::Refused, ": is that an etcd 3.4 or newer?")),
        // The proposal timed out, or the server was stopping: the other members may have a copy. Or the reply was too long.
        _ => Failure::Broken(StoreError::unknown(said("")).caused_by(status)),
    }
}

/// Whether a TLS handshake ended as with a server that does not speak TLS: it closed the connection, or its answer is not
/// TLS. A certificate that is refused is neither.
pub(crate) fn is_failed_handshake(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
        if let Some(ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) = kind {
            return true;
        }
        if error.to_string().contains("corrupt message") {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Describes an error and its causes in one line.
pub(crate) fn describe(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let more = inner.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(code: Code, message: &str) -> Failure {
        of(Status::new(code, message), "a:2379", false)
    }

    #[test]
    fn only_what_was_certainly_not_done_is_told_so() {
        let outcome = |failure: Failure| failure.error().outcome;
        let unknown = [
            failed(Code::Unavailable, "etcdserver: request timed out"),
            failed(Code::Unavailable, "etcdserver: leader changed"),
            failed(Code::Unknown, "etcdserver: server stopped"),
            failed(
                Code::ResourceExhausted,
                "etcdserver: mvcc: database space exceeded",
            ),
            failed(Code::Internal, "what is this?"),
            failed(Code::OutOfRange, "Error, decoded message length too large"),
            failed(
                Code::ResourceExhausted,
                "grpc: trying to send message larger than max (9 vs. 8)",
            ),
        ];
        for failure in unknown {
            assert_eq!(outcome(failure.clone()), Outcome::Unknown, "{failure:?}");
        }
        let not_done = [
            failed(Code::NotFound, "etcdserver: requested lease not found"),
            failed(Code::Unavailable, "etcdserver: no leader"),
            failed(Code::PermissionDenied, "etcdserver: permission denied"),
            failed(Code::InvalidArgument, "etcdserver: user name is empty"),
            failed(Code::Unauthenticated, "etcdserver: invalid auth token"),
            failed(
                Code::ResourceExhausted,
                "grpc: received message larger than max (9 vs. 8)",
            ),
            failed(
                Code::FailedPrecondition,
                "etcdserver: rpc not supported for learner",
            ),
        ];
        for failure in not_done {
            assert_eq!(outcome(failure.clone()), Outcome::NotDone, "{failure:?}");
        }
    }

    #[test]
    fn request_that_is_too_large_is_told_with_the_limit() {
        for (message, option) in [
            (
                "grpc: received message larger than max (9 vs. 8)",
                "--max-request-bytes",
            ),
            ("etcdserver: request is too large", "--max-request-bytes"),
            ("etcdserver: too many operations in txn request", "--max-txn-ops"),
        ] {
            let failure = failed(Code::ResourceExhausted, message);
            assert!(failure.is(Refusal::TooLarge), "{failure:?}");
            let error = failure.error();
            assert!(error.message.contains(option), "{error}");
        }
    }

    /// It connected before there was authentication.
    #[test]
    fn client_with_a_login_logs_in_anew_where_the_server_knows_no_user() {
        let unknown = |has_login| {
            let message = "etcdserver: user name is empty";
            of(Status::new(Code::InvalidArgument, message), "a:2379", has_login)
        };
        assert!(matches!(unknown(true), Failure::Elsewhere(_)));
        assert!(unknown(false).is(Refusal::Other));
    }

    #[test]
    fn learner_is_left_for_another_server_and_a_busy_one_is_not() {
        let learner = failed(
            Code::FailedPrecondition,
            "etcdserver: rpc not supported for learner",
        );
        assert!(matches!(learner, Failure::Elsewhere(_)), "{learner:?}");
        let busy = failed(Code::ResourceExhausted, "etcdserver: too many requests");
        assert!(matches!(busy, Failure::Busy(_)), "{busy:?}");
    }

    #[test]
    fn answered_request_has_no_late_copy() {
        assert!(
            !failed(
                Code::ResourceExhausted,
                "etcdserver: mvcc: database space exceeded"
            )
            .is_open()
        );
        assert!(failed(Code::Unavailable, "etcdserver: request timed out").is_open());
    }
}
