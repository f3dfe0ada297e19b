//! Formatting for output. Values from the store may come from any client: they must not affect the terminal.

use std::fmt::Write;
use std::time::Duration;

use dlock::__text::is_wild;
use serde_json::Value;

/// Escapes what can affect a terminal, or disguise a text.
pub(crate) fn clean(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for c in text.chars() {
        match is_wild(c) {
            true => clean.extend(c.escape_default()),
            false => clean.push(c),
        }
    }
    clean
}

/// A JSON value as one line; also escapes such characters that JSON permits.
pub(crate) fn json_line(value: &Value) -> String {
    let mut line = String::new();
    for c in value.to_string().chars() {
        if is_wild(c) {
            let mut units = [0; 2];
            for unit in c.encode_utf16(&mut units) {
                let _ = write!(line, "\\u{unit:04x}");
            }
        } else {
            line.push(c);
        }
    }
    line
}

/// A time for people: two units at most.
pub(crate) fn time(duration: Duration) -> String {
    let (seconds, millis) = (duration.as_secs(), duration.subsec_millis());
    match seconds {
        0 => format!("{millis}ms"),
        1..=9 => format!("{seconds}.{}s", millis / 100),
        10..=59 => format!("{seconds}s"),
        60..=3599 => format!("{}m {}s", seconds / 60, seconds % 60),
        3600..=86_399 => format!("{}h {}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d {}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

/// A time in JSON, in milliseconds.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Whether a name matches a pattern in which `*` matches anything; a pattern without `*` is a prefix.
pub(crate) fn fits(pattern: &str, name: &str) -> bool {
    let Some((begin, mut rest)) = pattern.split_once('*') else {
        return name.starts_with(pattern);
    };
    let Some(mut name) = name.strip_prefix(begin) else {
        return false;
    };
    while let Some((part, after)) = rest.split_once('*') {
        let Some(at) = name.find(part) else { return false };
        name = &name[at + part.len()..];
        rest = after;
    }
    name.ends_with(rest)
}

/// The common prefix of the names that match a pattern.
pub(crate) fn begin_of(pattern: &str) -> &str {
    pattern.split('*').next().unwrap_or_default()
}

/// An error of the library, with its code.
pub(crate) fn told(error: &dlock::Error) -> String {
    format!("{} [{}]", clean(&error.to_string()), error.code())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_from_the_store_reaches_the_terminal_raw() {
        let evil = "a\u{1b}[2J\u{7f}\u{9b}\u{202e}b\n\u{feff}ä";
        assert_eq!(clean(evil), "a\\u{1b}[2J\\u{7f}\\u{9b}\\u{202e}b\\n\\u{feff}ä");
        let line = json_line(&Value::String(evil.to_owned()));
        assert!(!line.chars().any(is_wild), "{line}");
        assert_eq!(serde_json::from_str::<String>(&line).unwrap(), evil);
        let hidden = "\u{ad}\u{61c}\u{115f}\u{180e}\u{2066}\u{3164}\u{ffa0}\u{fff9}\u{e0041}";
        for c in hidden.chars() {
            assert_eq!(clean(&c.to_string()), c.escape_default().to_string());
        }
        for plain in ["Größe 東京", "שלום", "❤\u{fe0f}"] {
            assert_eq!(clean(plain), plain);
        }
    }

    #[test]
    fn pattern_is_a_beginning_or_has_stars() {
        for (pattern, name, is_fit) in [
            ("", "order:7", true),
            ("order", "order:7", true),
            ("rder", "order:7", false),
            ("*7", "order:7", true),
            ("order:*", "order:7", true),
            ("o*r:*", "order:7", true),
            ("o*:8", "order:7", false),
            ("order:*7", "order:", false),
        ] {
            assert_eq!(fits(pattern, name), is_fit, "{pattern} {name}");
        }
    }

    #[test]
    fn times_are_for_people() {
        let of = |millis| time(Duration::from_millis(millis));
        assert_eq!(
            [
                of(7),
                of(1250),
                of(41_000),
                of(61_000),
                of(7_260_000),
                of(90_000_000)
            ],
            ["7ms", "1.2s", "41s", "1m 1s", "2h 1m", "1d 1h"]
        );
    }
}
