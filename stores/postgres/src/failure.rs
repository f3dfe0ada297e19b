//! Classifies failures of the client library and of the server by what they mean for an operation.

use std::io;

use tokio_postgres::Error;
use tokio_postgres::error::{DbError, Severity, SqlState};

use dlock::store::{Outcome, Reason, StoreError, describe};

/// The failure of an operation.
pub(crate) enum Failure {
    /// The server replied, with a refusal or with an unusable row; the connection is usable.
    Answered(StoreError),
    /// The connection is unusable.
    Broken(StoreError),
}

/// Classifies the failure of a statement that was sent.
pub(crate) fn of_step(error: Error) -> Failure {
    let Some(told) = error.as_db_error() else {
        // Invalid values, or a reply that cannot be decoded; everything else is the network.
        let message = describe(&error);
        return Failure::Broken(StoreError::unknown(message).caused_by(error));
    };
    let (outcome, reason) = (outcome(told), reason(told));
    let moved = *told.code() == SqlState::READ_ONLY_SQL_TRANSACTION;
    let mut failed = StoreError::not_done(reason, text(told)).caused_by(error);
    failed.outcome = outcome;
    match outcome {
        // Another server is or becomes the primary.
        Outcome::NotDone if moved => Failure::Broken(failed),
        Outcome::NotDone => Failure::Answered(failed),
        Outcome::Unknown => Failure::Broken(failed),
    }
}

/// Classifies the failure of a connection attempt: no operation was sent.
pub(crate) fn of_connecting(error: Error, address: &str) -> StoreError {
    let (reason, message) = match error.as_db_error() {
        Some(told) => (reason(told), text(told)),
        None if is_read_only(&error) => (
            Reason::Unreachable,
            "the server only reads: dlock needs the primary, and a role without default_transaction_read_only".to_owned(),
        ),
        None if describe(&error).contains("server does not support TLS") => (
            Reason::Unreachable,
            "the server does not speak TLS: use sslmode=disable, or configure its TLS".to_owned(),
        ),
        None if error.to_string().contains("password") => (Reason::Refused, describe(&error)),
        None => (Reason::Unreachable, describe(&error)),
    };
    StoreError::not_done(reason, format!("{address}: {message}")).caused_by(error)
}

/// Whether the operation timed out: the server cancelled the statement, or did not reply.
pub(crate) fn took_too_long(error: &StoreError) -> bool {
    let source = error.source.as_deref();
    let told = source.and_then(|source| source.downcast_ref::<Error>());
    let given_up = told.and_then(Error::code) == Some(&SqlState::QUERY_CANCELED);
    given_up || error.outcome == Outcome::Unknown
}

/// Whether the operation was rolled back because of a concurrent transaction.
pub(crate) fn is_conflict(error: &StoreError) -> bool {
    matches!(code(error), Some("40001" | "40P01")) || stayed_locked(error)
}

/// Whether the statement waited for another transaction until `statement_timeout` or `lock_timeout`.
pub(crate) fn waited_too_long(error: &StoreError) -> bool {
    matches!(code(error), Some("57014")) || stayed_locked(error)
}

/// Whether a row stayed locked for `lock_timeout`.
pub(crate) fn stayed_locked(error: &StoreError) -> bool {
    code(error) == Some("55P03")
}

/// Whether the cause may be a value that was sent, or the row that it names: a trigger refuses with any code, and row-level
/// security with that of a missing privilege.
pub(crate) fn may_be_of_row(error: &StoreError) -> bool {
    error.outcome == Outcome::NotDone && error.reason == Reason::Refused && !is_missing_table(error)
}

/// Whether there may be no room for a notification in the queue of the server, so that the transaction was rolled back.
pub(crate) fn may_be_of_notification(error: &StoreError) -> bool {
    // program limit exceeded
    error.outcome == Outcome::NotDone && code(error) == Some("54000")
}

fn code(error: &StoreError) -> Option<&str> {
    let source = error.source.as_deref();
    let told = source.and_then(|source| source.downcast_ref::<Error>());
    told.and_then(Error::code).map(SqlState::code)
}

/// Whether the table does not exist, or was created by an earlier version with fewer objects.
pub(crate) fn is_missing_table(error: &StoreError) -> bool {
    let source = error.source.as_deref();
    let told = source.and_then(|source| source.downcast_ref::<Error>());
    let code = told.and_then(Error::code);
    code.is_some_and(is_of_schema)
}

/// Whether an object that the schema creates is missing.
fn is_of_schema(code: &SqlState) -> bool {
    [
        SqlState::UNDEFINED_TABLE,
        SqlState::INVALID_SCHEMA_NAME,
        SqlState::UNDEFINED_COLUMN,
        SqlState::UNDEFINED_FUNCTION,
    ]
    .contains(code)
}

/// Whether `tokio-postgres` reports a server that accepts no writes.
fn is_read_only(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<io::Error>());
    source.is_some_and(|source| {
        source.kind() == io::ErrorKind::PermissionDenied && source.raw_os_error().is_none()
    })
}

/// Determines the outcome of a statement with an error. The statement is rolled back, unless the server ended the
/// connection during it: then it may have been committed.
fn outcome(told: &DbError) -> Outcome {
    let over = matches!(
        told.parsed_severity(),
        Some(Severity::Fatal | Severity::Panic) | None
    );
    if over || *told.code() == SqlState::T_R_STATEMENT_COMPLETION_UNKNOWN {
        Outcome::Unknown
    } else {
        Outcome::NotDone
    }
}

/// Distinguishes, by the class of the SQLSTATE, failures that end by themselves from those that need an operator.
fn reason(told: &DbError) -> Reason {
    let code = told.code();
    let passing = matches!(
        code.code().get(..2),
        // connection, transaction rollback, operator intervention, system error
        Some("08" | "40" | "57" | "58")
    ) || [
        SqlState::TOO_MANY_CONNECTIONS,
        SqlState::LOCK_NOT_AVAILABLE,
        SqlState::OBJECT_IN_USE,
        SqlState::READ_ONLY_SQL_TRANSACTION,
    ]
    .contains(code);
    if passing {
        Reason::Unreachable
    } else if code.code().starts_with("53") {
        // insufficient resources, for example a full disk
        Reason::RefusedForNow
    } else {
        Reason::Refused
    }
}

/// Describes the server's error in one line, without the values of the statement.
fn text(told: &DbError) -> String {
    let code = told.code().code();
    let advice = match *told.code() {
        ref code if is_of_schema(code) => {
            ": create the table first, or what a new version adds to it, by create_table() or a migration with schema()"
        }
        SqlState::READ_ONLY_SQL_TRANSACTION => ": dlock needs the primary",
        SqlState::INSUFFICIENT_PRIVILEGE => concat!(
            ": grant the role what ",
            env!("CARGO_PKG_REPOSITORY"),
            "/blob/main/docs/postgres.md lists under Permissions"
        ),
        _ => "",
    };
    format!("the server said {code}, {}{advice}", told.message())
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> StoreError {
        match failure {
            Failure::Answered(error) | Failure::Broken(error) => error,
        }
    }
}
