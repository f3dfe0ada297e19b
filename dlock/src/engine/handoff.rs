//! Handoffs of a lock inside the process: how far a grant may be handed off before it goes back to the store.

use std::time::Duration;

use crate::base::broken;
use crate::base::kind::Kind;
use crate::base::moment::Moment;
use crate::engine::timing::time_slice;

/// How many times a lock is handed off, unless said otherwise: more than fit into a time slice.
pub(crate) const DEFAULT_HANDOFFS: u32 = 4096;
/// Tokens that an acquire reserves for handoffs at least.
const FEWEST_TOKENS: u32 = 16;

/// What a waiter takes over: a renewed grant of this lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HandoffTerms {
    pub(crate) lease: Duration,
    pub(crate) max_hold: Option<Duration>,
    /// How many times it hands the lock off.
    pub(crate) handoffs: u32,
}

/// How far a grant may be handed off. Packed into 12 bytes: with 16 bytes each grant would take 16 bytes more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(Rust, packed(4))]
pub(crate) struct HandoffBudget {
    /// Handoffs that are left: there is a reserved token for each, one after the other.
    left: u32,
    /// The end of the time slice.
    until: Moment,
}

impl HandoffBudget {
    /// The budget of a grant that came from the store `now`, by a request sent at `sent`, with these tokens.
    pub(crate) fn new(
        kind: Kind,
        handoffs: u32,
        (first, last): (u64, u64),
        sent: Moment,
        now: Moment,
    ) -> HandoffBudget {
        let tokens = u32::try_from(last.saturating_sub(first)).unwrap_or(u32::MAX);
        HandoffBudget {
            left: match kind.is_handed_off() {
                true => handoffs.min(tokens),
                false => 0,
            },
            until: now + time_slice(now.since(sent)),
        }
    }

    /// Whether the grant can be handed off at all.
    pub(crate) fn is_open(self, now: Moment) -> bool {
        let until = self.until;
        self.left > 0 && (now < until || broken!(SliceNeverEnds))
    }

    /// Ends it: the next token has to come from the store.
    pub(crate) fn close(&mut self) {
        self.left = 0;
    }

    /// The budget of the successor, which hands off at most so many times.
    pub(crate) fn step(self, most: u32) -> HandoffBudget {
        HandoffBudget {
            left: match broken!(HandoffsNotCounted) {
                true => self.left.min(most),
                false => self.left.saturating_sub(1).min(most),
            },
            ..self
        }
    }
}

/// How many fencing tokens an acquire reserves, where the lock was handed off `before` times after the last one. Unused
/// tokens are a waste only while the store counts them faster than its clock does.
pub(crate) fn tokens(handoffs: u32, before: u32) -> u32 {
    1 + handoffs.min(FEWEST_TOKENS.max(before.saturating_mul(2)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    const START: Moment = Moment::from_nanos(1_000_000_000);

    #[test]
    fn budget_ends_with_its_time_slice_its_tokens_and_its_handoffs() {
        let [in_time, late] = [|slice| slice - ms(1), |slice| slice];
        // round trip, handoffs, last token, asked when of the time slice: open?
        for (round_trip, handoffs, last, when, open) in [
            (ms(0), 8, 9, in_time as fn(Duration) -> Duration, true),
            (ms(0), 8, 9, late, false),
            (ms(10), 8, 9, in_time, true),
            (ms(10), 8, 9, late, false),
            (ms(0), 0, 9, in_time, false),
            (ms(0), 8, 1, in_time, false),
        ] {
            let now = START + round_trip;
            let budget = HandoffBudget::new(Kind::Mutex, handoffs, (1, last), START, now);
            let after = when(time_slice(round_trip));
            let row = (round_trip, handoffs, last, after);
            assert_eq!(budget.is_open(now + after), open, "{row:?}");
        }
        let fenced = HandoffBudget::new(Kind::Fenced, 8, (1, 9), START, START);
        assert!(!fenced.is_open(START), "its tokens are counted by the store");
    }

    #[test]
    fn each_successor_has_one_handoff_less_and_no_more_than_it_asks_for() {
        let budget = HandoffBudget::new(Kind::Mutex, 8, (1, 4), START, START);
        let opens = |budget: HandoffBudget| budget.is_open(START);
        assert!(opens(budget.step(8)) && opens(budget.step(8).step(8)));
        assert!(!opens(budget.step(8).step(8).step(8)));
        assert!(!opens(budget.step(0)));
        let mut closed = budget;
        closed.close();
        assert!(!opens(closed));
    }

    #[test]
    fn tokens_are_reserved_for_twice_as_many_handoffs_as_before() {
        for (handoffs, before, reserved) in [
            (0, 0, 1),
            (4096, 0, 17),
            (4, 0, 5),
            (4096, 100, 201),
            (50, 100, 51),
        ] {
            assert_eq!(tokens(handoffs, before), reserved, "{handoffs} {before}");
        }
    }
}
