//! The nearest known name to a mistyped one.

/// Words that other lock libraries use for an option of `#[distributed_lock]`.
pub(crate) const LOCKS_ELSEWHERE: &[(&str, &str)] = &[
    ("name", "key"),
    ("client", "lock"),
    ("timeout", "wait"),
    ("wait_timeout", "wait"),
    ("ttl", "lease"),
    ("expire", "lease"),
    ("lease_time", "lease"),
    ("type", "kind"),
    ("error", "on_error"),
    ("busy", "on_busy"),
];

/// Words that other libraries, and `#[distributed_lock]`, use for an option of `#[once]`.
pub(crate) const ONCE_ELSEWHERE: &[(&str, &str)] = &[
    ("name", "key"),
    ("lock", "client"),
    ("ttl", "keep"),
    ("expire", "keep"),
    ("expires", "keep"),
    ("retention", "keep"),
    ("lease_time", "lease"),
    ("timeout", "wait"),
    ("wait_timeout", "wait"),
    ("retries", "attempts"),
    ("max_attempts", "attempts"),
];

/// Words that other lock libraries use for the values of options.
const VALUES_ELSEWHERE: &[(&str, &str)] = &[
    ("plain", "lock"),
    ("mutex", "lock"),
    ("exclusive", "lock"),
    ("queue", "fair"),
    ("fifo", "fair"),
    ("shared", "read"),
    ("reader", "read"),
    ("writer", "write"),
    ("fencing", "fenced"),
    ("abort", "cancel"),
    ("drop", "cancel"),
];

/// The value of an option that was probably meant.
pub(crate) fn nearest_value<'a>(wrong: &str, known: &[&'a str]) -> Option<&'a str> {
    nearest(wrong, known, VALUES_ELSEWHERE)
}

/// The name out of `known` that was probably meant, if one is similar enough. `elsewhere` has other words for them.
pub(crate) fn nearest<'a>(wrong: &str, known: &[&'a str], elsewhere: &[(&str, &str)]) -> Option<&'a str> {
    if let Some((_, here)) = elsewhere.iter().find(|(there, _)| *there == wrong) {
        return known.iter().copied().find(|name| name == here);
    }
    let allowed = (wrong.chars().count() / 3).clamp(1, 3);
    known
        .iter()
        .map(|name| (distance(wrong, name), *name))
        .filter(|(far, _)| *far <= allowed)
        .min_by_key(|(far, _)| *far)
        .map(|(_, name)| name)
}

/// How many letters must be inserted, deleted, changed or swapped with their neighbour.
fn distance(from: &str, to: &str) -> usize {
    let from: Vec<char> = from.chars().collect();
    let to: Vec<char> = to.chars().collect();
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=to.len()).collect();
    for (row, a) in from.iter().enumerate() {
        let mut next = vec![row + 1];
        for (column, b) in to.iter().enumerate() {
            let mut cost = (last[column] + usize::from(a != b))
                .min(last[column + 1] + 1)
                .min(next[column] + 1);
            if row > 0 && column > 0 && *a == to[column - 1] && from[row - 1] == *b {
                cost = cost.min(before[column - 1] + 1);
            }
            next.push(cost);
        }
        before = std::mem::replace(&mut last, next);
    }
    last[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: &[&str] = &["key", "lock", "lease", "wait", "max_hold", "on_error", "on_lost"];

    fn option(wrong: &str) -> Option<&'static str> {
        nearest(wrong, KNOWN, LOCKS_ELSEWHERE)
    }

    #[test]
    fn a_slip_of_the_finger_finds_its_name() {
        assert_eq!(option("laese"), Some("lease"));
        assert_eq!(option("leese"), Some("lease"));
        assert_eq!(option("onerror"), Some("on_error"));
        assert_eq!(option("kye"), Some("key"));
    }

    #[test]
    fn the_words_of_other_libraries_are_known() {
        assert_eq!(option("ttl"), Some("lease"));
        assert_eq!(option("timeout"), Some("wait"));
    }

    #[test]
    fn a_word_means_what_it_stands_for() {
        let kinds = ["lock", "fair", "read", "write", "fenced"];
        assert_eq!(nearest_value("shared", &kinds), Some("read"));
        assert_eq!(nearest_value("fiar", &kinds), Some("fair"));
        // There is no option of that name, and it certainly does not mean the client.
        assert_eq!(option("plain"), None);
    }

    #[test]
    fn something_else_entirely_is_no_slip() {
        assert_eq!(option("colour"), None);
    }
}
