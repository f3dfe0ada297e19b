//! Classifies failures of the driver and of the server by what they mean for an operation.

use dlock::store::{Outcome, Reason, StoreError, describe};
use mysql_async::{DriverError, Error, ServerError, UrlError};

/// The failure of an operation.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) error: StoreError,
    /// The connection is unusable.
    pub(crate) broken: bool,
    /// The statement was rolled back because of a concurrent transaction.
    pub(crate) conflict: bool,
}

/// Classifies the failure of a statement that was sent.
pub(crate) fn of_step(error: Error) -> Failure {
    let Error::Server(told) = &error else {
        return Failure {
            error: StoreError::unknown(describe(&error)).caused_by(error),
            broken: true,
            conflict: false,
        };
    };
    let conflict = CONFLICTS.contains(&told.code);
    let unknown = UNKNOWN.contains(&told.code);
    let broken = unknown || READS_ONLY.contains(&told.code);
    let mut failed = StoreError::not_done(reason(told.code), text(told)).caused_by(error);
    if unknown {
        failed.outcome = Outcome::Unknown;
    }
    Failure {
        error: failed,
        broken,
        conflict,
    }
}

/// Classifies the failure of a connection attempt: no operation was sent.
pub(crate) fn of_connecting(error: Error, address: &str) -> StoreError {
    let (reason, message) = match &error {
        Error::Server(told) => (reason(told.code), text(told)),
        Error::Driver(DriverError::UnknownAuthPlugin { .. } | DriverError::MysqlOldPasswordDisabled) => {
            (Reason::Refused, describe(&error))
        }
        Error::Driver(DriverError::NoClientSslFlagFromServer) => (
            Reason::Refused,
            "the server does not speak TLS: leave out require_ssl, or configure its TLS".to_owned(),
        ),
        _ => (Reason::Unreachable, describe(&error)),
    };
    StoreError::not_done(reason, format!("{address}: {message}")).caused_by(error)
}

/// Describes what is wrong with a URL, without repeating it.
pub(crate) fn of_url(error: &UrlError) -> String {
    match error {
        UrlError::FeatureRequired { feature, param } => {
            format!("its option {param} needs the feature tls of dlock-mysql ({feature} of the driver)")
        }
        // All others of the driver's that are taken are texts.
        UrlError::InvalidParamValue { param, .. } => format!("its option {param} must be true or false"),
        UrlError::UnknownParameter { param } => format!("the driver has no option {param}"),
        _ => "it has to be like mysql://user@host/database".to_owned(),
    }
}

/// Whether a statement may have been refused because of one of its rows, for example by a trigger. Others would be refused
/// for each row.
pub(crate) fn may_be_of_row(error: &StoreError) -> bool {
    let is_of_row = told(error).is_some_and(|told| {
        // data exception, constraint violation, raised by a trigger
        matches!(told.state.get(..2), Some("22" | "23" | "45")) || OF_ROWS.contains(&told.code)
    });
    error.outcome == Outcome::NotDone && error.reason == Reason::Refused && is_of_row
}

/// Whether the error says that the table does not exist.
pub(crate) fn is_missing_table(error: &StoreError) -> bool {
    matches!(code(error), Some(NO_TABLE))
}

fn code(error: &StoreError) -> Option<u16> {
    told(error).map(|told| told.code)
}

fn told(error: &StoreError) -> Option<&ServerError> {
    let source = error.source.as_deref()?;
    match source.downcast_ref::<Error>()? {
        Error::Server(told) => Some(told),
        _ => None,
    }
}

const NO_TABLE: u16 = 1146;
/// `ER_SIGNAL_EXCEPTION`, and violated constraints, also those of MariaDB and values out of range, whatever their SQLSTATE.
const OF_ROWS: [u16; 14] = [
    1644, 1048, 1062, 1264, 1265, 1292, 1366, 1369, 1406, 1451, 1452, 1690, 3819, 4025,
];
/// `ER_CHECKREAD`, `ER_LOCK_WAIT_TIMEOUT`, `ER_LOCK_DEADLOCK`, `ER_LOCK_NOWAIT`,
/// `ER_TRANSACTION_ROLLBACK_DURING_COMMIT`: rolled back.
const CONFLICTS: [u16; 5] = [1020, 1205, 1213, 3572, 3101];
/// The statement may have been committed: the server is shutting down, the connection or the statement was killed, the
/// commit failed, or the proxy lost its connection to the server.
const UNKNOWN: [u16; 9] = [1053, 1180, 1317, 1927, 1026, 1105, 2006, 2013, 4031];
/// `--read-only`, `--super-read-only`, `innodb_read_only`, or a read-only transaction; a node that has left its cluster
/// (Galera: 1047; Group Replication: 3032, 3100, 3168). Another server is the primary.
const READS_ONLY: [u16; 8] = [1290, 1792, 1836, 3906, 1047, 3032, 3100, 3168];
/// The server or the user has too many connections.
const CROWDED: [u16; 4] = [1040, 1129, 1203, 1226];
/// The disk or the tablespace is full, or memory or locks are exhausted.
const FULL: [u16; 7] = [1021, 1037, 1041, 1114, 1206, 3019, 1135];

/// Distinguishes failures that end by themselves from those that need an operator.
fn reason(code: u16) -> Reason {
    let passing = [&CONFLICTS[..], &UNKNOWN, &READS_ONLY, &CROWDED, &[1969, 3024]];
    if passing.iter().any(|codes| codes.contains(&code)) {
        Reason::Unreachable
    } else if FULL.contains(&code) {
        Reason::RefusedForNow
    } else {
        Reason::Refused
    }
}

/// Describes the server's error in one line.
fn text(told: &ServerError) -> String {
    let advice = match told.code {
        NO_TABLE => ": create the table first, by create_table() or a migration with schema()",
        code if READS_ONLY.contains(&code) => ": dlock needs the primary",
        1044 | 1142 | 1143 => concat!(
            ": grant the user what ",
            env!("CARGO_PKG_REPOSITORY"),
            "/blob/main/docs/mysql.md lists under Permissions"
        ),
        1665 => ": dlock needs binlog_format=ROW or MIXED",
        _ => "",
    };
    format!("the server said {}, {}{advice}", told.code, told.message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(code: u16) -> Failure {
        of_step(Error::Server(ServerError {
            code,
            message: "no".to_owned(),
            state: "HY000".to_owned(),
        }))
    }

    #[test]
    fn conflicts_are_certainly_not_done_and_leave_the_connection_alone() {
        for code in CONFLICTS {
            let failure = told(code);
            assert!(failure.conflict && !failure.broken, "{code}");
            assert_eq!(failure.error.outcome, Outcome::NotDone, "{code}");
            assert_eq!(failure.error.reason, Reason::Unreachable, "{code}");
        }
    }

    #[test]
    fn statement_that_was_killed_may_have_been_committed() {
        for code in UNKNOWN {
            let failure = told(code);
            assert!(
                failure.broken && failure.error.outcome == Outcome::Unknown,
                "{code}"
            );
        }
    }

    #[test]
    fn server_that_only_reads_is_left_for_another_one() {
        for code in READS_ONLY {
            let failure = told(code);
            assert!(
                failure.broken && failure.error.outcome == Outcome::NotDone,
                "{code}"
            );
            assert!(
                failure.error.message.ends_with("dlock needs the primary"),
                "{code}"
            );
        }
    }

    #[test]
    fn full_disk_passes_and_a_missing_right_does_not() {
        assert_eq!(told(1114).error.reason, Reason::RefusedForNow);
        assert_eq!(told(1142).error.reason, Reason::Refused);
        assert!(is_missing_table(&told(NO_TABLE).error));
    }

    #[test]
    fn row_may_be_why_a_trigger_or_constraint_refuses_and_not_why_a_right_is_missing() {
        let in_state = |state: &str| {
            let (code, message, state) = (30_001, "no".to_owned(), state.to_owned());
            of_step(Error::Server(ServerError { code, message, state })).error
        };
        for code in OF_ROWS {
            assert!(may_be_of_row(&told(code).error), "{code}");
        }
        assert!(may_be_of_row(&in_state("45000")));
        for code in [NO_TABLE, 1044, 1142, 1143, 1054, 1064, 1370, 1665, 1213, 1114] {
            assert!(!may_be_of_row(&told(code).error), "{code}");
        }
        assert!(!may_be_of_row(&in_state("42000")));
    }
}
