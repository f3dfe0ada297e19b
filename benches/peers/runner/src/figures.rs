//! How figures are written in the page and its charts.

/// `12,345`, `1.5`.
pub(crate) fn count(value: f64) -> String {
    if value > 0.0 && value < 10.0 && value.fract() != 0.0 {
        return format!("{value:.1}");
    }
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Of microseconds: `3.2 µs`, `120 µs`, `1.5 ms`, `2.1 s`.
pub(crate) fn time(micros: f64) -> String {
    let (value, unit) = match micros {
        micros if micros < 1_000.0 => (micros, "µs"),
        micros if micros < 1_000_000.0 => (micros / 1e3, "ms"),
        micros => (micros / 1e6, "s"),
    };
    match value {
        value if value < 10.0 => format!("{value:.1} {unit}"),
        value => format!("{value:.0} {unit}"),
    }
}

pub(crate) fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

pub(crate) fn percent_fine(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}

pub(crate) fn memory(mb: f64) -> String {
    format!("{mb:.0} MB")
}

/// `0.04 ×`, `1.3 ×`, `160 ×`.
pub(crate) fn times(ratio: f64) -> String {
    match ratio {
        ratio if ratio < 0.1 => format!("{ratio:.3} ×"),
        ratio if ratio < 10.0 => format!("{ratio:.2} ×"),
        ratio => format!("{ratio:.0} ×"),
    }
}

pub(crate) fn ratio_of_shares(ratio: f64) -> String {
    match ratio {
        ratio if !ratio.is_finite() => "some got none".to_owned(),
        ratio if ratio < 10.0 => format!("{ratio:.2}"),
        ratio => format!("{ratio:.0}"),
    }
}

/// How a runtime is called.
pub(crate) fn runtime(threads: usize) -> String {
    match threads {
        1 => "one thread".to_owned(),
        threads => format!("{threads} threads"),
    }
}
