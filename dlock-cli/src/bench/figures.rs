//! How figures are written in the report and its picture.

/// `12345.6` as `12,345.6`.
pub(super) fn grouped(number: f64, digits: usize) -> String {
    let text = format!("{number:.digits$}");
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let mut out = String::new();
    for (at, digit) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out + rest
}

/// Microseconds in the unit that suits them, to three digits.
pub(super) fn time_of(micros: f64) -> String {
    let (value, unit) = match micros {
        m if m < 1.0 => return format!("{:.0} ns", m * 1e3),
        m if m < 1e3 => (m, "µs"),
        m if m < 1e6 => (m / 1e3, "ms"),
        m => (m / 1e6, "s"),
    };
    let digits = match value {
        v if v < 10.0 => 2,
        v if v < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_by_thousands() {
        assert_eq!(grouped(0.0, 0), "0");
        assert_eq!(grouped(999.0, 0), "999");
        assert_eq!(grouped(1234567.89, 1), "1,234,567.9");
    }

    #[test]
    fn times_have_the_unit_that_suits_them() {
        assert_eq!(time_of(0.25), "250 ns");
        assert_eq!(time_of(12.34), "12.3 µs");
        assert_eq!(time_of(1500.0), "1.50 ms");
        assert_eq!(time_of(2_000_000.0), "2.00 s");
    }
}
