//! How many calls are in flight at a time, and in how many parts their answers are delivered.
//!
//! A step that arrives while the maximum number of calls is in flight waits until one of them is answered. Near a
//! server this takes a moment, in which other steps arrive that are sent along. On several threads, few steps also wait
//! while many are in flight: otherwise each would be a call of its own, as callers ask one by one. A distant server is idle most of the
//! time, and waiting for a call to end takes as long as waiting for its answer; so there as many calls are in flight as
//! are needed for the next one to end soon.
//!
//! A server that was slow to wake answers all that it finds at once. If all those callers asked again at once, it would sleep
//! until they have, and they until it has answered, by turns. So near a server the answers are delivered in parts: callers of
//! one part ask again while those of the next still wait, and the server works on their steps in the meantime. A caller with
//! much to do on its thread may keep the next part waiting; then the next deliveries are not made in parts.
//!
//! On a runtime with several threads the first of several callers wakes the sending task, which then runs before the
//! others have arrived. So it lets them come first while callers that were answered have not asked again.
//!
//! Steps in the queue of one fair lock cost the server little in company and much alone. Near a server they wait for the call
//! on the same lock that is in flight.

use std::time::Duration;

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::time::Instant;

use crate::base::clock;

/// A server that answers this fast is near.
pub(super) const NEAR: Duration = Duration::from_millis(1);

/// The maximum number of calls in flight if each waits for those before it: with acknowledgements by replicas, and for
/// one slot of a Cluster.
pub(super) const CALLS: usize = 2;
/// The maximum number of calls in flight near a server: enough to keep it busy while callers on several threads arrive
/// one by one. More brought nothing (docs/performance.md).
const NEAR_CALLS: usize = 8;
/// The maximum number of calls in flight to a very distant server.
const MOST_CALLS: usize = 32;
/// How soon the next call in flight should end, and so how often a call may be sent.
const SOON: Duration = Duration::from_micros(250);

/// Callers that ran for longer than this before the next part keep other callers waiting.
pub(super) const LATE: Duration = Duration::from_millis(1);
/// How many deliveries are made as a whole then.
const WHOLE_DELIVERIES: u32 = 20;

/// Whether the runtime that polls this has several threads.
pub(super) fn has_threads() -> bool {
    Handle::current().runtime_flavor() != RuntimeFlavor::CurrentThread
}

/// The size of a part, with this many steps that wait, are in flight or were answered (measured: docs/performance.md).
fn part_size(steps: usize, has_threads: bool) -> usize {
    match (steps, has_threads) {
        // One by one: a caller that is answered alone runs next on the same thread.
        (0..=5, true) => 1,
        (_, true) => steps.div_ceil(3),
        // Parts do not help: the server wakes only when all have asked.
        (0..=6, false) => steps,
        (_, false) => steps.div_ceil(5),
    }
}

/// Parts of the answers, until all are delivered.
#[derive(Clone, Copy)]
struct Parts {
    /// Of how many steps; if there are more, their size is chosen anew.
    of: usize,
    size: usize,
    /// When the last one was delivered.
    delivered: Instant,
}

pub(super) struct FlowControl {
    /// Answers that were delivered on a runtime with several threads, and whose callers have not asked again.
    owed: usize,
    /// The duration of the fastest call: the network, without the time of a busy server.
    fastest: Duration,
    /// The parts in which answers are being delivered.
    parts: Option<Parts>,
    /// How many deliveries are still made as a whole.
    whole_left: u32,
    has_threads: bool,
    in_parts: bool,
}

impl FlowControl {
    /// `in_parts` says whether answers of a near server are delivered in parts.
    pub(super) fn new(has_threads: bool, in_parts: bool) -> FlowControl {
        FlowControl {
            owed: 0,
            fastest: Duration::MAX,
            parts: None,
            whole_left: 0,
            has_threads,
            in_parts,
        }
    }

    pub(super) fn answered_call(&mut self, round_trip: Duration) {
        self.fastest = self.fastest.min(round_trip);
    }

    /// How many of these answers are delivered now, with this many other steps waiting or in flight. The rest must be asked
    /// for again when the callers of this part have run.
    pub(super) fn part(&mut self, answers: usize, others: usize) -> usize {
        let steps = answers + others;
        let before = self.parts.take();
        if before.is_some_and(|parts| clock::now().saturating_duration_since(parts.delivered) > LATE) {
            self.callers_ran_for_long();
        }
        let (of, size) = match before {
            Some(parts) if parts.of >= steps => (parts.of, parts.size),
            _ => (steps, part_size(steps, self.has_threads)),
        };
        if answers <= size || !self.in_parts || self.fastest >= NEAR {
            return answers;
        }
        if self.whole_left > 0 {
            self.whole_left -= 1;
            return answers;
        }
        let delivered = clock::now();
        self.parts = Some(Parts { of, size, delivered });
        size
    }

    /// Makes the next deliveries whole: answers must not wait behind callers with much to do.
    pub(super) fn callers_ran_for_long(&mut self) {
        self.whole_left = WHOLE_DELIVERIES;
    }

    /// Whether the callers of several answers run before the next call is sent, or more answers are delivered.
    pub(super) fn lets_callers_run(&self) -> bool {
        !self.has_threads || self.in_parts && self.fastest < NEAR
    }

    /// Counts answers that were delivered.
    pub(super) fn delivered(&mut self, answers: usize) {
        self.owed += answers;
    }

    /// Counts requests that came in. Where none did, the callers have something else to do.
    pub(super) fn came(&mut self, requests: usize) {
        self.owed = match requests {
            0 => 0,
            _ => self.owed.saturating_sub(requests),
        };
    }

    /// Whether more steps are likely to arrive right after this one. A single caller is not waited for.
    pub(super) fn expects_more(&self) -> bool {
        self.has_threads && self.owed > 1
    }

    /// Whether the steps that wait are too few for a call of their own, next to those in flight: callers on several threads
    /// ask again one by one, and a call for each costs the server more than the time until the next answer.
    pub(super) fn waits_for_more(&self, waiting: usize, in_flight: usize) -> bool {
        let is_near = self.has_threads && self.in_parts && self.fastest < NEAR;
        is_near && in_flight > 0 && waiting < part_size(waiting + in_flight, true)
    }

    /// The duration of the fastest call, if one was answered.
    pub(super) fn fastest(&self) -> Option<Duration> {
        (self.fastest < Duration::MAX).then_some(self.fastest)
    }

    /// How many calls may be in flight.
    pub(super) fn calls(&self) -> usize {
        // Nothing is known yet.
        if self.fastest == Duration::MAX {
            return NEAR_CALLS;
        }
        let in_one = self.fastest.as_micros() / SOON.as_micros();
        usize::try_from(in_one).map_or(MOST_CALLS, |calls| calls.clamp(NEAR_CALLS, MOST_CALLS))
    }

    /// Whether steps that are cheaper in company wait for the answer to a call: with a distant server that takes too long.
    pub(super) fn gathers(&self) -> bool {
        self.fastest < NEAR
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Has an answer of a server at this distance, in microseconds.
    fn at(distance: u64, has_threads: bool) -> FlowControl {
        let mut pace = FlowControl::new(has_threads, true);
        pace.answered_call(Duration::from_micros(distance));
        pace
    }

    /// The parts of these answers, if none of the callers asks again.
    fn parts(mut pace: FlowControl, mut answers: usize, others: usize) -> Vec<usize> {
        let next = || {
            let part = pace.part(answers, others);
            answers -= part;
            (part > 0).then_some(part)
        };
        std::iter::from_fn(next).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn answers_are_delivered_in_parts_near_a_server() {
        let near = |has_threads| at(80, has_threads);
        assert_eq!(parts(near(true), 1, 0), [1]);
        assert_eq!(parts(near(true), 5, 0), [1; 5]);
        assert_eq!(parts(near(true), 6, 0), [2; 3]);
        assert_eq!(parts(near(true), 64, 0), [22, 22, 20]);
        assert_eq!(parts(near(false), 6, 0), [6]);
        assert_eq!(parts(near(false), 7, 0), [2, 2, 2, 1]);
        assert_eq!(parts(near(false), 64, 0), [13, 13, 13, 13, 12]);
        // Others are under way anyway.
        assert_eq!(parts(near(true), 16, 32), [16]);
        assert_eq!(parts(near(true), 20, 10), [10, 10]);
        assert_eq!(parts(near(false), 16, 64), [16]);
    }

    #[tokio::test(start_paused = true)]
    async fn answers_are_delivered_at_once_where_the_server_is_distant_or_unknown_or_calls_wait() {
        for has_threads in [true, false] {
            assert_eq!(parts(at(5000, has_threads), 64, 0), [64]);
            assert_eq!(parts(FlowControl::new(has_threads, true), 64, 0), [64]);
            let mut unparted = FlowControl::new(has_threads, false);
            unparted.answered_call(Duration::from_micros(80));
            assert_eq!(unparted.lets_callers_run(), !has_threads);
            assert_eq!(parts(unparted, 64, 0), [64]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn after_callers_that_ran_for_long_deliveries_are_whole() {
        let mut pace = at(80, true);
        assert_eq!(pace.part(12, 0), 4);
        tokio::time::advance(LATE / 2).await;
        assert_eq!(pace.part(8, 4), 4);
        tokio::time::advance(LATE * 2).await;
        assert_eq!(pace.part(4, 8), 4);
        for _ in 0..WHOLE_DELIVERIES {
            assert_eq!(pace.part(12, 0), 12);
        }
        assert_eq!(pace.part(12, 0), 4);
        pace.callers_ran_for_long();
        assert_eq!(pace.part(8, 4), 8);
    }

    #[test]
    fn callers_run_first_where_that_takes_less_time_than_a_call() {
        assert!(at(80, true).lets_callers_run() && at(80, false).lets_callers_run());
        assert!(!at(5000, true).lets_callers_run() && at(5000, false).lets_callers_run());
    }

    #[tokio::test(start_paused = true)]
    async fn parts_grow_with_the_crowd() {
        let mut pace = at(80, true);
        assert_eq!(pace.part(5, 0), 1);
        assert_eq!(pace.part(30, 30), 20);
        assert_eq!(pace.part(22, 0), 20);
    }

    #[test]
    fn the_more_distant_the_server_the_more_calls_are_under_way() {
        let calls = |micros| at(micros, false).calls();
        assert_eq!(FlowControl::new(false, true).calls(), 8);
        assert_eq!([0, 80, 500, 1000].map(calls), [8; 4]);
        assert_eq!([2000, 5000, 100_000].map(calls), [8, 20, 32]);
    }

    #[test]
    fn few_steps_wait_for_more_while_many_are_in_flight() {
        let near = at(80, true);
        let waits = |waiting, in_flight| near.waits_for_more(waiting, in_flight);
        assert!(waits(1, 5) && waits(4, 10) && waits(1, 100));
        assert!(!waits(1, 0) && !waits(1, 4) && !waits(2, 4) && !waits(5, 10) && !waits(50, 100));
        assert!(!at(80, false).waits_for_more(1, 100) && !at(5000, true).waits_for_more(1, 100));
        assert!(!FlowControl::new(true, true).waits_for_more(1, 100));
        let mut unparted = FlowControl::new(true, false);
        unparted.answered_call(Duration::from_micros(80));
        assert!(!unparted.waits_for_more(1, 100));
    }

    #[test]
    fn steps_gather_near_a_server_once_that_is_known() {
        assert!(!FlowControl::new(false, true).gathers());
        assert!(at(80, false).gathers());
        assert!(!at(5000, false).gathers());
    }

    #[test]
    fn a_server_that_has_much_to_do_is_not_distant() {
        let mut pace = at(80, false);
        pace.answered_call(Duration::from_millis(20));
        assert_eq!(pace.calls(), 8);
        assert!(pace.gathers());
    }

    #[test]
    fn others_are_let_come_first_where_they_run_on_other_threads() {
        let expects = |has_threads, answers, requests: &[usize]| {
            let mut pace = FlowControl::new(has_threads, true);
            pace.delivered(answers);
            requests.iter().for_each(|count| pace.came(*count));
            pace.expects_more()
        };
        assert!(expects(true, 3, &[1]) && expects(true, 8, &[2, 3]));
        assert!(!expects(true, 1, &[1]) && !expects(true, 2, &[1]) && !expects(true, 8, &[5, 3]));
        // Callers that did not ask again do something else.
        assert!(!expects(true, 8, &[1, 0]));
        assert!(!expects(false, 8, &[1]));
    }
}
