//! `Retry-After`: seconds, or a date.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::HeaderMap;
use http::header::RETRY_AFTER;

/// How long the server asks to wait.
pub(super) fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if value.bytes().all(|byte| byte.is_ascii_digit()) {
        return value.parse().ok().map(Duration::from_secs);
    }
    let since_epoch = now.duration_since(UNIX_EPOCH).ok()?;
    date(value).map(|at| Duration::from_secs(at).saturating_sub(since_epoch))
}

/// The seconds since 1970 of a date as servers write it today: `Sun, 06 Nov 1994 08:49:37 GMT`.
fn date(text: &str) -> Option<u64> {
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let (_, text) = text.split_once(", ")?;
    let mut parts = text.split(' ');
    let day: u64 = parts.next()?.parse().ok()?;
    let month = parts.next()?;
    let month = MONTHS.iter().position(|name| *name == month)?;
    let year: u64 = parts.next()?.parse().ok()?;
    let time: Vec<u64> = parts
        .next()?
        .split(':')
        .map(|part| part.parse().ok())
        .collect::<Option<_>>()?;
    let ([hour, minute, second], Some("GMT"), None) = (time.as_slice(), parts.next(), parts.next()) else {
        return None;
    };
    if !(1970..10_000).contains(&year)
        || !(1..=31).contains(&day)
        || *hour > 23
        || *minute > 59
        || *second > 60
    {
        return None;
    }
    // Years begin in March here, so that the leap day is the last one.
    let (year, month) = match month as u64 {
        month @ 0..=1 => (year - 1, month + 10),
        month => (year, month - 2),
    };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    const DAYS_TO_1970: u64 = 719_468;
    Some((days - DAYS_TO_1970) * 86_400 + hour * 3600 + minute * 60 + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_read() {
        assert_eq!(date("Sun, 06 Nov 1994 08:49:37 GMT"), Some(784_111_777));
        assert_eq!(date("Thu, 01 Jan 1970 00:00:00 GMT"), Some(0));
        assert_eq!(date("Thu, 29 Feb 2024 23:59:59 GMT"), Some(1_709_251_199));
        assert_eq!(date("Fri, 01 Mar 2024 00:00:00 GMT"), Some(1_709_251_200));
        for wrong in [
            "",
            "soon",
            "Sun, 06 Nov 1994",
            "Sun, 06 Nov 1994 08:49 GMT",
            "Sun, 06 Nov 0001 08:49:37 GMT",
        ] {
            assert_eq!(date(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn seconds_and_dates_give_a_pause() {
        let now = UNIX_EPOCH + Duration::from_secs(784_111_700);
        let of = |value: &str| {
            retry_after(
                &HeaderMap::from_iter([(RETRY_AFTER, value.parse().unwrap())]),
                now,
            )
        };
        assert_eq!(of("7"), Some(Duration::from_secs(7)));
        assert_eq!(of("Sun, 06 Nov 1994 08:49:37 GMT"), Some(Duration::from_secs(77)));
        assert_eq!(of("Thu, 01 Jan 1970 00:00:00 GMT"), Some(Duration::ZERO));
        assert_eq!(of("-1"), None);
        assert_eq!(of("99999999999999999999999"), None);
    }
}
