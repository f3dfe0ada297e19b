//! How long the members take to answer, and so for how long an answer is waited for that is not needed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::SHORT;
use crate::base::moment::nanos;

const UNKNOWN: u64 = 0;
const FAILED: u64 = u64::MAX;

/// What each member needed for its last answer.
#[derive(Debug)]
pub(super) struct AnswerTimes(Box<[AtomicU64]>);

impl AnswerTimes {
    pub(super) fn of(members: usize) -> AnswerTimes {
        AnswerTimes((0..members).map(|_| AtomicU64::new(UNKNOWN)).collect())
    }

    /// Records what a member needed to answer; `None` if it failed.
    pub(super) fn record(&self, at: usize, took: Option<Duration>) {
        let time = took.map_or(FAILED, |took| nanos(took).clamp(UNKNOWN + 1, FAILED - 1));
        self.0[at].store(time, Ordering::Relaxed);
    }

    /// How long members that answer may take, twice what the slowest of them took. `None` before each was heard of: it may be slow.
    pub(super) fn patience(&self) -> Option<Duration> {
        let mut slowest = 0;
        for time in &self.0 {
            match time.load(Ordering::Relaxed) {
                UNKNOWN => return None,
                FAILED => {}
                time => slowest = slowest.max(time),
            }
        }
        Some(2 * Duration::from_nanos(slowest) + SHORT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_is_that_for_the_slowest_member_that_answers() {
        let ms = Duration::from_millis;
        let times = AnswerTimes::of(3);
        times.record(0, Some(ms(1)));
        times.record(1, Some(ms(40)));
        assert_eq!(times.patience(), None);
        times.record(2, None);
        assert_eq!(times.patience(), Some(ms(80) + SHORT));
        times.record(1, Some(ms(2)));
        times.record(2, Some(Duration::ZERO));
        assert_eq!(times.patience(), Some(ms(4) + SHORT));
    }
}
