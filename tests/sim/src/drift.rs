//! What clocks show that run too fast or too slow by so many millionths. Asked for at every step, so the usual numbers are
//! not divided in 128 bits.

use std::time::Duration;

use crate::plan::Millis;

const MILLION: u64 = 1_000_000;

/// Ticks of such a clock in a million of the world's.
fn rate(drift: i64) -> u64 {
    MILLION.saturating_add_signed(drift).max(1)
}

/// How far such a clock goes in this time.
pub(crate) fn shows(time: Millis, drift: i64) -> Millis {
    if drift == 0 {
        return time;
    }
    match time.checked_mul(rate(drift)) {
        Some(product) => product / MILLION,
        None => time,
    }
}

/// How long it takes until such a clock has gone so far.
pub(crate) fn lasts(shown: Millis, drift: i64) -> Millis {
    if drift == 0 {
        return shown;
    }
    match shown.checked_mul(MILLION) {
        Some(product) => product.div_ceil(rate(drift)),
        None => shown,
    }
}

pub(crate) fn whole_millis(time: Duration) -> Millis {
    time.as_secs().saturating_mul(1_000) + u64::from(time.subsec_millis())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_that_is_fast_shows_more_and_needs_less() {
        assert_eq!((shows(1_000, 8_000), lasts(1_008, 8_000)), (1_008, 1_000));
        assert_eq!((shows(1_000, -8_000), lasts(992, -8_000)), (992, 1_000));
        assert_eq!((shows(7, 0), lasts(7, 0)), (7, 7));
        assert_eq!(lasts(1_009, 8_000), 1_001);
    }
}
