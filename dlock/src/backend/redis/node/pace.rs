//! How many of the steps that wait go out together.
//!
//! Where a crowd of callers comes and goes, all of them in one call would have the server and this process wait for
//! each other by turns. So two calls share them: one is carried out while the answers to the other are dealt with here.

use std::time::Duration;

use super::line::BATCH;

/// From so many steps on two calls share them.
const CROWD: usize = 16;
/// Only a server that answers as soon as this is worth it; a distant one is given all at once.
const NEAR: Duration = Duration::from_millis(1);

pub(super) struct Pace {
    /// Steps of the call that was answered last, until those are taken in that its answers lead to.
    pub(super) answered: usize,
    /// How long that call took.
    round_trip: Duration,
}

impl Pace {
    pub(super) fn new() -> Pace {
        Pace {
            answered: 0,
            round_trip: Duration::MAX,
        }
    }

    pub(super) fn landed(&mut self, steps: usize, round_trip: Duration) {
        self.answered = steps;
        self.round_trip = round_trip;
    }

    /// How many steps the next call takes, where so many are waiting or under way: half of those that come and go, if
    /// it pays to share them.
    pub(super) fn half(&self, here: usize) -> Option<usize> {
        let all = self.answered + here;
        let pays = self.round_trip < NEAR && (CROWD..BATCH).contains(&all);
        pays.then(|| all.div_ceil(2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(answered: usize, round_trip: Duration) -> Pace {
        let mut pace = Pace::new();
        pace.landed(answered, round_trip);
        pace
    }

    #[test]
    fn a_crowd_is_shared_by_two_calls() {
        let near = after(32, Duration::from_micros(200));
        assert_eq!(near.half(32), Some(32));
        assert_eq!(after(0, Duration::from_micros(200)).half(63), Some(32));
    }

    #[test]
    fn few_go_together_and_so_do_all_for_a_distant_server() {
        assert_eq!(after(5, Duration::from_micros(200)).half(10), None);
        assert_eq!(after(32, Duration::from_millis(2)).half(32), None);
        assert_eq!(Pace::new().half(64), None);
    }

    #[test]
    fn more_than_a_call_carries_are_shared_anyway() {
        assert_eq!(after(256, Duration::from_micros(200)).half(256), None);
    }
}
