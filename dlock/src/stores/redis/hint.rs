//! Advice on refusals of the server.

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
        " (a lock needs its own key, the key of the fencing tokens (dlock:fence), their channels and some commands: \
         docs/permissions.md has the ACL SETUSER lines for each kind)"
    } else {
        ""
    }
}
