//! The server versions that keep the guarantees.

/// Checks that a server of this version never ends a renewed lease; if it may, returns the reason.
pub(crate) fn check(version: &str) -> Result<(), String> {
    let mut numbers = version
        .split(['.', '-', '+'])
        .map(|number| number.parse::<u32>().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    let (major, minor, patch) = (next(), next(), next());
    let is_new = match (major, minor) {
        (3, 4) => patch >= 31,
        (3, 5) => patch >= 13,
        _ => (major, minor) >= (3, 6),
    };
    if is_new {
        return Ok(());
    }
    Err(format!(
        "etcd {version} is too old: before 3.4.31 and 3.5.13 a leader that was stuck can end leases that its successor has \
         renewed (etcd-io/etcd#15247), and two clients hold one lock"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_with_the_defect_are_refused() {
        for old in [
            "3.4.23",
            "3.4.30",
            "3.5.0",
            "3.5.12",
            "3.3.99",
            "2.3.8",
            "",
            "3.4.30-rc.1",
        ] {
            let reason = check(old).unwrap_err();
            assert!(reason.contains("#15247"), "{reason}");
        }
        for new in [
            "3.4.31",
            "3.4.40",
            "3.5.13",
            "3.5.21+git",
            "3.6.0",
            "3.6.0-rc.1",
            "3.7.1",
            "4.0.0",
        ] {
            assert_eq!(check(new), Ok(()), "{new}");
        }
    }
}
