//! Advice on refusals of the server.

/// The page with the permissions that a user needs.
macro_rules! permissions_page {
    () => {
        concat!(env!("CARGO_PKG_REPOSITORY"), "/blob/main/docs/permissions.md")
    };
}

pub(super) const PERMISSIONS: &str = permissions_page!();

const LACKS_PERMISSION: &str = concat!(
    " (the ACL SETUSER lines for each kind of lock, for lists, records and the doctor: ",
    permissions_page!(),
    ")"
);

/// Returns what to do about a refusal, as a continuation of the server's message; empty if that says it all.
pub(super) fn hint(message: &str) -> &'static str {
    let says = |words: &[&str]| words.iter().any(|word| message.contains(word));
    if says(&["READONLY", "ReadOnly", "read only replica"]) {
        " (this server is a read-only replica: give the master's address)"
    // A name may contain the three letters.
    } else if message.split_whitespace().any(|word| word == "OOM") {
        " (its memory is used up)"
    } else if says(&[
        "NOPERM",
        "NoPerm",
        "o permissions to",
        "can't run this command",
        "can't access",
    ]) {
        LACKS_PERMISSION
    } else {
        ""
    }
}

/// Returns a message without the hint on permissions.
pub(super) fn without_permissions(message: &str) -> &str {
    message.strip_suffix(LACKS_PERMISSION).unwrap_or(message)
}
