//! How many of the waiting steps are sent together, and how many calls are in flight at a time.
//!
//! If one call carried all steps of a crowd of callers, the server and this process would wait for each other by turns.
//! So two calls share them: one is carried out while the answers to the other are handled here.
//!
//! A step that arrives while the maximum number of calls is in flight waits until one of them is answered. Near a
//! server that takes a moment, in which other steps arrive that are sent along. A distant server is idle most of the
//! time, and waiting for a call to end takes as long as waiting for its answer; so there as many calls are in flight as
//! are needed for the next one to end soon.
//!
//! On a runtime with several threads the first of several callers wakes the sending task, which then runs before the
//! others have arrived. So it lets them come first while callers that were answered have not asked again.
//!
//! Steps in the queue of one fair lock cost the server little in company and much alone. Near a server they wait for the call
//! on the same lock that is in flight, and are not shared by two calls.

use std::time::Duration;

use tokio::runtime::{Handle, RuntimeFlavor};

use super::send_queue::BATCH;

/// From this many steps on two calls share them.
const CROWD: usize = 16;
/// Only for a server that answers this fast; a distant one is sent all at once.
const NEAR: Duration = Duration::from_millis(1);

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

/// Whether the runtime that polls this has several threads.
pub(super) fn has_threads() -> bool {
    Handle::current().runtime_flavor() != RuntimeFlavor::CurrentThread
}

pub(super) struct FlowControl {
    /// Steps of the last answered call, until the steps that follow its answers have arrived.
    pub(super) answered: usize,
    /// Answers that were delivered on a runtime with several threads, and whose callers have not asked again.
    owed: usize,
    /// The duration of that call.
    round_trip: Duration,
    /// The duration of the fastest call: the network, without the time of a busy server.
    fastest: Duration,
    has_threads: bool,
}

impl FlowControl {
    pub(super) fn new(has_threads: bool) -> FlowControl {
        FlowControl {
            answered: 0,
            owed: 0,
            round_trip: Duration::MAX,
            fastest: Duration::MAX,
            has_threads,
        }
    }

    pub(super) fn answered_call(&mut self, steps: usize, round_trip: Duration) {
        self.answered = steps;
        self.round_trip = round_trip;
        self.fastest = self.fastest.min(round_trip);
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

    /// Whether the callers that have just been answered come before the next call.
    pub(super) fn answered_come_first(&self) -> bool {
        !self.has_threads && self.answered > 1
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

    /// How many steps the next call takes, with this many waiting or in flight: half of them, if it pays to share them.
    pub(super) fn half(&self, here: usize) -> Option<usize> {
        let all = self.answered + here;
        let pays = self.round_trip < NEAR && (CROWD..=BATCH).contains(&all);
        pays.then(|| all.div_ceil(2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(answered: usize, round_trip: Duration) -> FlowControl {
        let mut pace = FlowControl::new(false);
        pace.answered_call(answered, round_trip);
        pace
    }

    #[test]
    fn a_crowd_is_shared_by_two_calls() {
        let near = after(32, Duration::from_micros(200));
        assert_eq!(near.half(32), Some(32));
        assert_eq!(after(0, Duration::from_micros(200)).half(63), Some(32));
        assert_eq!(after(0, Duration::from_micros(200)).half(BATCH), Some(BATCH / 2));
    }

    #[test]
    fn few_go_together_and_so_do_all_for_a_distant_server() {
        assert_eq!(after(5, Duration::from_micros(200)).half(10), None);
        assert_eq!(after(32, Duration::from_millis(2)).half(32), None);
        assert_eq!(FlowControl::new(false).half(64), None);
    }

    #[test]
    fn the_more_distant_the_server_the_more_calls_are_under_way() {
        let calls = |micros| after(1, Duration::from_micros(micros)).calls();
        assert_eq!(FlowControl::new(false).calls(), 8);
        assert_eq!([0, 80, 500, 1000].map(calls), [8; 4]);
        assert_eq!([2000, 5000, 100_000].map(calls), [8, 20, 32]);
    }

    #[test]
    fn steps_gather_near_a_server_once_that_is_known() {
        assert!(!FlowControl::new(false).gathers());
        assert!(after(1, Duration::from_micros(80)).gathers());
        assert!(!after(1, Duration::from_millis(5)).gathers());
    }

    #[test]
    fn a_server_that_has_much_to_do_is_not_distant() {
        let mut pace = after(1, Duration::from_micros(80));
        pace.answered_call(256, Duration::from_millis(20));
        assert_eq!(pace.calls(), 8);
        assert!(pace.gathers());
    }

    #[test]
    fn others_are_let_come_first_where_they_run_on_other_threads() {
        let expects = |has_threads, answers, requests: &[usize]| {
            let mut pace = FlowControl::new(has_threads);
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

    #[test]
    fn answered_callers_come_first_where_they_are_on_the_same_thread() {
        let come_first = |has_threads, steps| {
            let near = after(steps, Duration::from_micros(80));
            FlowControl { has_threads, ..near }.answered_come_first()
        };
        assert_eq!(
            [0, 1, 2, 8].map(|steps| come_first(false, steps)),
            [false, false, true, true]
        );
        assert!(!come_first(true, 8));
    }

    #[test]
    fn more_than_a_call_carries_are_shared_anyway() {
        assert_eq!(after(256, Duration::from_micros(200)).half(256), None);
    }
}
