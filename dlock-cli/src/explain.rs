//! `dlock explain`: the cause and the remedy of an error.

use std::process::ExitCode;

/// A page of the documentation, and what it has.
macro_rules! page {
    ($name:literal, $has:literal) => {
        concat!(env!("CARGO_PKG_REPOSITORY"), "/blob/main/docs/", $name, $has)
    };
}

/// An error of the library: code, meaning, cause, remedy.
type Explained = (&'static str, &'static str, &'static str, &'static str);

const ERRORS: [Explained; 22] = [
    (
        "E0001",
        "The lock is held by another caller, or not enough permits are free (NotAcquired).",
        "It did not become available within the wait time. A live holder renews its lease, so the remaining lease is no promise.",
        "`dlock show KEY` shows the holder and whether it is alive, `dlock why KEY` what the holder waits for. Wait longer, \
         or try again later.",
    ),
    (
        "E0002",
        "A lock that was held is lost (Lost).",
        "Its lease could not be renewed in time (server unreachable, process stopped, runtime blocked), the store lost its \
         data, or an operator broke it: the audit log (XRANGE PREFIXdlock:audit - +, with the prefix of the client) \
         names the operator and the reason.",
        "Stop the work. Have what it writes check the fencing token. Keep the runtime free of blocking calls, and the \
         lease longer than a fail-over.",
    ),
    (
        "E0003",
        "Waiting would never end (WouldDeadlock).",
        "The call would wait for the lock that it is inside of: as a reader that wants to write, or as a lock of another \
         kind.",
        "Take the stronger lock first, or all locks together with LockClient::multi; ask for one name as one kind.",
    ),
    (
        "E0004",
        "Too many callers wait for the lock in this process (TooManyWaiters).",
        "max_waiters is reached: more work arrives than the lock lets through.",
        "Answer \"try later\" (429 or 503), shorten the work under the lock, or use narrower keys.",
    ),
    (
        "E0005",
        "The store could not be reached, and nothing was changed (Unreachable).",
        "The server is down or slow, the network is cut, a name does not resolve, or the timeout is too short.",
        "Check that the URL is right and the server answers. `retry_for` bridges a fail-over.",
    ),
    (
        "E0006",
        "It is unknown whether the request took effect (OutcomeUnknown).",
        "It was sent and no reply came. After an acquire the lock is not held by the caller: whatever the server did is \
         undone. After a release the lease ends the lock.",
        "Try again later. Do not assume either outcome.",
    ),
    (
        "E0007",
        "The store refused the request (Refused).",
        "A wrong password, a missing permission, a read-only replica, or memory that is used up. Of `dlock break`: a Java \
         holder that was named has other holders beside it by now.",
        page!(
            "permissions.md",
            " lists the permissions for each feature. For \"OOM\" see the server's maxmemory."
        ),
    ),
    (
        "E0008",
        "Too few replicas have it (NotReplicated).",
        "Fewer replicas than min_replicas acknowledged the lock in time: a fail-over might lose it.",
        "Check that the replicas are linked and not far behind.",
    ),
    (
        "E0009",
        "The lock is not held by this caller (NotHeld).",
        "No call of this version returns it: a release of a lock that is not held any more is Lost (E0002).",
        "See E0002.",
    ),
    (
        "E0010",
        "Several locks were not released properly (NotReleased).",
        "Each of the listed errors has its own cause.",
        "See the code of each. Those that are not listed were released.",
    ),
    (
        "E0011",
        "The lock client is shut down (ClientClosed).",
        "shutdown was called, or the runtime of the client's background work has ended.",
        "Shut the client down last. In tests, build a client for each runtime.",
    ),
    (
        "E0012",
        "More permits were to be removed than there are (TooFewPermits).",
        "The total of the semaphore is smaller.",
        "Look at SemaphoreStatus first, or set the total.",
    ),
    (
        "E0013",
        "The semaphore has no permits yet (NoPermitsSet).",
        "No process has set their number.",
        "Set it (set_permits, or permits on the semaphore) before the first use.",
    ),
    (
        "E0014",
        "The latch is open already (LatchOpen).",
        "Its count is zero, or it was never set.",
        "Set the count before others count down.",
    ),
    (
        "E0015",
        "The name of the lock breaks a rule (InvalidKey).",
        "It is empty, too long, has control characters, braces where they do not belong, or begins with `dlock:`, as \
         dlock's own keys do.",
        "Put a prefix before it, or see the documentation of LockKey.",
    ),
    (
        "E0016",
        "An option is invalid (InvalidOption).",
        "The message names the option and the rule.",
        "Change that option.",
    ),
    (
        "E0017",
        "The URL of the store cannot be used (InvalidUrl).",
        "The message says which part. The URL is not repeated, since it may have a password.",
        page!("urls.md", " has all forms and options."),
    ),
    (
        "E0018",
        "The key holds data of another kind (KeyTaken).",
        "Something else uses the same name: another kind of lock, or another program.",
        "Choose another name or prefix, or use one kind of lock for this name. Nothing was changed. Remove the data only \
         if no program uses it: it may be a lock that is held.",
    ),
    (
        "E0019",
        "This store or this version cannot do it (Unsupported).",
        "Not every store has every kind of lock and every ability. `dlock break` and `revoke` refuse the permits of a \
         semaphore on every store.",
        "LockClient::capabilities says what the store can do. A permit comes back at the end of its lease; `dlock \
         force-unlock` frees all permits of the semaphore.",
    ),
    (
        "E0020",
        "No default client was set (NoDefaultClient).",
        "An attribute without `lock = ...` ran before dlock::set_default.",
        "Call dlock::set_default at start-up, in a test dlock::set_runtime_default.",
    ),
    (
        "E0021",
        "The default client is set already (DefaultClientSet).",
        "dlock::set_default was called twice.",
        "Call it once for each process; in tests use dlock::set_runtime_default.",
    ),
    (
        "E0022",
        "The process drains (Draining).",
        "LockClient::drain was called before a shutdown: only nested acquires pass.",
        "Send the request to another process.",
    ),
];

/// Returns the error's name in the library, which its meaning ends with.
fn name(error: &Explained) -> &'static str {
    let name = error.1.rsplit_once('(').map_or("", |(_, name)| name);
    name.trim_end_matches(").")
}

/// Returns the error of a code or a name, in any case, as in `E0001`, `dlock::E0001` or `Error::NotAcquired`.
fn find(error: &str) -> Option<&'static Explained> {
    let wanted = error.rsplit("::").next()?;
    let is_it = |error: &&Explained| {
        [error.0, name(error)]
            .iter()
            .any(|it| it.eq_ignore_ascii_case(wanted))
    };
    ERRORS.iter().find(is_it)
}

/// Prints the explanation of an error, by its code or its name, or of all errors without one.
pub(crate) fn explain(error: Option<&str>, json: bool) -> Result<ExitCode, String> {
    let found: Vec<_> = match error {
        None => ERRORS.iter().collect(),
        Some(error) => find(error).into_iter().collect(),
    };
    if let (Some(error), true) = (error, found.is_empty()) {
        let error = crate::look::clean(error);
        return Err(format!(
            "no error has the code or the name {error}: `dlock explain` lists all of them"
        ));
    }
    for (code, says, cause, remedy) in found {
        if json {
            let object = serde_json::json!({ "code": code, "says": says, "cause": cause, "remedy": remedy });
            say!("{object}");
        } else {
            say!("{code}: {says}\n  cause: {cause}\n  remedy: {remedy}");
        }
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use dlock::Error;

    use super::*;

    #[test]
    fn each_code_is_explained_once_in_their_order() {
        for (at, error) in ERRORS.iter().enumerate() {
            assert_eq!(error.0, format!("E{:04}", at + 1));
        }
        // The last of the library's codes.
        for error in [
            Error::ClientClosed,
            Error::NoDefaultClient,
            Error::DefaultClientSet,
            Error::Draining,
        ] {
            let explained = ERRORS.iter().find(|explained| explained.0 == error.code());
            assert_eq!(explained.map(name), Some(&*format!("{error:?}")));
        }
    }

    #[test]
    fn error_is_found_by_its_code_and_its_name() {
        for error in &ERRORS {
            let (code, name) = (error.0, name(error));
            assert!(name.starts_with(char::is_uppercase), "{code}: {name}");
            assert!(name.chars().all(char::is_alphabetic), "{code}: {name}");
            for wanted in [code, name] {
                let spellings = [
                    wanted.to_owned(),
                    wanted.to_lowercase(),
                    wanted.to_uppercase(),
                    format!("dlock::{wanted}"),
                    format!("dlock::Error::{wanted}"),
                ];
                for spelling in spellings {
                    assert_eq!(find(&spelling).map(|found| found.0), Some(code), "{spelling}");
                }
            }
        }
        for unknown in ["", "E9999", "E1", "dlock::", "NotAcquire", "NotAcquired)"] {
            assert!(find(unknown).is_none(), "{unknown:?}");
        }
    }
}
