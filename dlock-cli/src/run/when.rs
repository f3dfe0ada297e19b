//! Moments on the command line.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Parses a moment: RFC 3339, in UTC or with an offset, or `@` and seconds since 1970.
pub(super) fn parse(text: &str) -> Result<SystemTime, String> {
    let moment = match text.strip_prefix('@') {
        Some(seconds) => seconds
            .parse()
            .ok()
            .and_then(|seconds| UNIX_EPOCH.checked_add(Duration::from_secs(seconds))),
        None => of_rfc3339(text),
    };
    // An earlier moment cannot be a slot.
    moment.filter(|moment| *moment > UNIX_EPOCH).ok_or_else(|| {
        "it is not a moment, as 2026-11-22T03:00:00Z, 2026-11-22T04:00:00+01:00 or @1763780400".to_owned()
    })
}

fn of_rfc3339(text: &str) -> Option<SystemTime> {
    if let Ok(moment) = humantime::parse_rfc3339(text) {
        return Some(moment);
    }
    let (local, offset) = text.split_at_checked(text.len().checked_sub("+00:00".len())?)?;
    let (sign, offset) = offset.split_at_checked(1)?;
    if !local.ends_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    let (hours, minutes) = offset.split_once(':')?;
    let digits = |text: &str, below: u64| {
        let is_plain = text.len() == 2 && text.bytes().all(|c| c.is_ascii_digit());
        text.parse()
            .ok()
            .filter(|number: &u64| is_plain && *number < below)
    };
    let offset = Duration::from_secs((digits(hours, 24)? * 60 + digits(minutes, 60)?) * 60);
    let local = humantime::parse_rfc3339(&format!("{local}Z")).ok()?;
    match sign {
        "+" => local.checked_sub(offset),
        "-" => local.checked_add(offset),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_have_an_offset_or_are_seconds() {
        let at = |seconds| Ok(UNIX_EPOCH + Duration::from_secs(seconds));
        for text in [
            "2025-11-22T03:00:00Z",
            "2025-11-22T04:00:00+01:00",
            "2025-11-21T20:00:00-07:00",
            "2025-11-22T08:45:00+05:45",
            "@1763780400",
        ] {
            assert_eq!(parse(text), at(1_763_780_400), "{text}");
        }
        for text in [
            "",
            "now",
            "@",
            "@-1",
            "@0",
            "2025-11-22",
            "2025-11-22T03:00:00",
            "2025-11-22T03:00:00+1:00",
            "2025-11-22T03:00:00+24:00",
            "2025-11-22T03:00:00 01:00",
            "2025-11-22T03:00:00Z+01:00",
            "1970-01-01T00:00:00+01:00",
            "2025-11-22T03:00:00+0ä:00",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
