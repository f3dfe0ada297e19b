//! The store's replies about a key that a call waits for, and what the call reports when its wait ends: the one place
//! that decides between "held by another caller" and "the store did not answer".
//!
//! A call reports that the lock is held only if the store replied "busy" during that call, or during the time of the
//! queue head that the call waited behind, or while this process let others go first, as the store replied to its release
//! that others wait. A missing reply never counts as "busy".

use std::time::Duration;

use crate::base::broken;
use crate::base::moment::Moment;
use crate::engine::timing::FIRST_PAUSE;
use crate::store::{Outcome, Reason, StoreError};

/// When a request is unanswered for this long, and for several times as long as earlier ones took, the current answer
/// of the store is unknown.
const SILENCE: Duration = Duration::from_millis(250);

/// How much sooner than that before the end of a wait the store is asked for the last time.
const A_MOMENT: Duration = Duration::from_millis(100);

/// The longest pause between two requests while the store does not answer, before jitter.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What is known about a key. Each call has its own; the queue of the key has that of its head.
#[derive(Debug, Clone, Default)]
pub(crate) struct Evidence {
    busy: Option<Busy>,
    /// The failures in a row since then: when the first failed request was sent, and the last failure.
    failing: Option<Box<Failing>>,
    /// When the unanswered request was sent.
    asked: Option<Moment>,
    /// The longest time that a reply took.
    slowest: Duration,
    /// Whether a request of this call had no reply, and none since had one: it may have been carried out.
    in_doubt: bool,
}

/// Boxed, because few calls need it: each call has room for its evidence.
#[derive(Debug, Clone)]
struct Failing {
    since: Moment,
    error: StoreError,
}

#[derive(Debug, Clone, Copy)]
struct Busy {
    /// The end of the holder's lease, if known.
    until: Option<Moment>,
    /// Valid for calls that waited at this moment; `None` as long as the waiter that received it is the head.
    last: Option<Moment>,
}

/// Why a call ends without the lock.
#[derive(Debug, Clone)]
pub(crate) enum Verdict {
    /// Another client holds the lock, for this remaining lease if known.
    NotAcquired { remaining: Option<Duration> },
    /// The store failed, or did not answer.
    Failed(StoreError),
}

impl Evidence {
    /// Records that a request is sent.
    pub(crate) fn asks(&mut self, now: Moment) {
        self.asked.get_or_insert(now);
    }

    /// Records that the store replied to the request, with any reply.
    pub(crate) fn replied(&mut self) {
        (self.asked, self.in_doubt) = (None, false);
    }

    /// Records the reply that another client holds the lock, whose lease ends then.
    pub(crate) fn is_busy(&mut self, until: Option<Moment>, now: Moment) {
        if let Some(asked) = self.asked.take() {
            self.slowest = self.slowest.max(now.since(asked));
        }
        self.busy = Some(Busy { until, last: None });
        (self.failing, self.in_doubt) = (None, false);
    }

    /// Records that the request sent at `sent` failed. Returns the pause before the next one, without jitter, or the
    /// failure if repeating the request is useless.
    pub(crate) fn failed(
        &mut self,
        asked: Moment,
        mut error: StoreError,
        patience: Duration,
        now: Moment,
    ) -> Result<Duration, StoreError> {
        self.asked = None;
        let is_passing = error.is_passing();
        self.in_doubt |= error.outcome == Outcome::Unknown;
        error.outcome = self.outcome(false);
        // Counted from the first failed request.
        let since = self.failing.as_ref().map_or(asked, |failing| failing.since);
        let failing_for = now.since(since);
        if !is_passing || failing_for >= patience || broken!(GivesUpAtTheFirstFailure) {
            return Err(error);
        }
        self.failing = Some(Box::new(Failing { since, error }));
        // The pause grows with the time since the first failure.
        Ok((FIRST_PAUSE + failing_for / 4).min(LONGEST_PAUSE))
    }

    /// What the requests of this call have done, of which one may be in flight: whatever is known about the last, an earlier
    /// one may have been carried out.
    fn outcome(&self, sent: bool) -> Outcome {
        match self.in_doubt || sent {
            true => Outcome::Unknown,
            false => Outcome::NotDone,
        }
    }

    /// When `retry_for` ends.
    pub(crate) fn patience_ends(&self, patience: Duration) -> Option<Moment> {
        self.failing.as_ref().map(|failing| failing.since + patience)
    }

    /// Whether anything is known with which later replies must be compared.
    pub(crate) fn is_empty(&self) -> bool {
        self.busy.is_none() && self.failing.is_none()
    }

    /// Ends the role of the head that received the replies. A release that goes to the store then counts as a request,
    /// too.
    pub(crate) fn head_ends(&mut self, now: Moment, released: Option<Moment>) {
        if let Some(busy) = &mut self.busy {
            busy.last.get_or_insert(now);
        }
        self.asked = released.or(self.asked);
    }

    /// Records that a caller in this process holds the lock, so other callers may report it as held.
    pub(crate) fn is_held_here(&mut self) {
        *self = Evidence {
            busy: Some(Busy {
                until: None,
                last: None,
            }),
            slowest: self.slowest,
            in_doubt: self.in_doubt,
            ..Evidence::default()
        };
    }

    /// Records that this process lets others go first until then: it does not ask whether the lock is held.
    pub(crate) fn others_first(&mut self, until: Moment) {
        let last = match self.busy {
            Some(Busy { last: None, .. }) => return,
            Some(Busy { last: Some(last), .. }) => last.max(until),
            None => until,
        };
        self.busy = Some(Busy {
            until: None,
            last: Some(last),
        });
    }

    /// Adds what the head of the queue knows, for a call that began to wait then.
    pub(crate) fn learn(&mut self, head: Evidence, started: Moment) {
        if let Some(busy) = head
            .busy
            .filter(|busy| busy.last.is_none_or(|last| last >= started))
        {
            self.busy = Some(busy);
            self.failing = None;
        }
        if let Some(failing) = head.failing {
            let Failing { since, error } = *failing;
            // The request of another call says nothing of what its own have done.
            let outcome = self.outcome(false);
            let error = StoreError { outcome, ..error };
            let earlier = self.failing.take();
            let since = earlier.map_or(since.max(started), |earlier| earlier.since);
            self.failing = Some(Box::new(Failing { since, error }));
        }
        self.asked = head.asked.or(self.asked);
        self.slowest = self.slowest.max(head.slowest);
    }

    /// How long a request may stay without a reply before the store counts as silent.
    pub(crate) fn patience(&self) -> Duration {
        SILENCE.max(self.slowest * 4)
    }

    /// Shortens a sleep that begins then, and after which the wait would be over without another look.
    pub(crate) fn with_last_look(&self, sleep: Duration, begins: Moment, until: Option<Moment>) -> Duration {
        match until.map(|until| self.last_look(until)) {
            Some(last_look) if begins < last_look => sleep.min(last_look.since(begins)),
            _ => sleep,
        }
    }

    /// When a waiter asks for the last time, if its wait is over then: a notification may have been lost.
    pub(crate) fn last_look(&self, until: Moment) -> Moment {
        until.earlier_by(self.patience() + A_MOMENT)
    }

    /// Returns what a call reports when its wait time or `retry_for` is over. `sent` says whether one of its own
    /// requests is in flight.
    pub(crate) fn verdict(self, started: Moment, now: Moment, sent: bool) -> Verdict {
        if broken!(NoAnswerIsBusy) {
            return Verdict::NotAcquired { remaining: None };
        }
        let outcome = self.outcome(sent);
        if let Some(failing) = self.failing {
            let error = failing.error;
            return Verdict::Failed(StoreError { outcome, ..error });
        }
        let patience = self.patience();
        let is_silent = |asked: Moment| now.since(asked) > patience;
        match self.busy {
            Some(busy) if !self.asked.is_some_and(is_silent) => {
                let remaining = busy.until.map(|until| until.since(now));
                Verdict::NotAcquired {
                    remaining: remaining.filter(|left| !left.is_zero()),
                }
            }
            _ => {
                let waited = now.since(started);
                let what = match self.asked {
                    Some(_) => "did not answer",
                    // Other callers of this process went first.
                    None => "was not asked",
                };
                let message = format!("the store {what} within the {waited:.1?} of waiting");
                let error = StoreError::not_done(Reason::Unreachable, message);
                Verdict::Failed(StoreError { outcome, ..error })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Moment = Moment::from_nanos(1_000_000_000_000);
    const PATIENCE: Duration = Duration::from_secs(3);

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn at(after: u64) -> Moment {
        START + ms(after)
    }

    /// What a call reports, in short.
    #[derive(Debug, PartialEq)]
    enum Said {
        Busy(Option<Duration>),
        NotDone,
        Unknown,
    }

    fn said(evidence: &Evidence, now: u64, sent: bool) -> Said {
        match evidence.clone().verdict(START, at(now), sent) {
            Verdict::NotAcquired { remaining } => Said::Busy(remaining),
            Verdict::Failed(error) if error.outcome == Outcome::Unknown => Said::Unknown,
            Verdict::Failed(_) => Said::NotDone,
        }
    }

    fn unreachable() -> StoreError {
        StoreError::not_done(Reason::Unreachable, "connection refused")
    }

    enum Event {
        Asks,
        Busy(Option<u64>),
        Replied,
        Fails(StoreError),
        HeldHere,
        OthersFirst(u64),
    }
    use Event::{Asks, Busy, Fails, HeldHere, OthersFirst, Replied};

    fn after(events: Vec<(u64, Event)>) -> Evidence {
        let mut evidence = Evidence::default();
        for (now, event) in events {
            match event {
                Asks => evidence.asks(at(now)),
                Busy(until) => evidence.is_busy(until.map(at), at(now)),
                Replied => evidence.replied(),
                Fails(error) => drop(evidence.failed(at(now), error, PATIENCE, at(now))),
                HeldHere => evidence.is_held_here(),
                OthersFirst(until) => evidence.others_first(at(until)),
            }
        }
        evidence
    }

    #[test]
    fn only_a_reply_that_is_still_valid_counts_as_busy() {
        let busy_at = |now, until| vec![(0, Asks), (now, Busy(until))];
        let with = |mut events: Vec<_>, more: Vec<_>| {
            events.extend(more);
            events
        };
        // what happened; when the wait ends, with a request on its way or not; what the call reports
        for (row, (events, now, sent, report)) in [
            (vec![], 900, false, Said::NotDone),
            (vec![(0, Asks)], 900, true, Said::Unknown),
            (vec![(0, Asks), (5, Replied)], 900, false, Said::NotDone),
            (busy_at(5, Some(1000)), 900, false, Said::Busy(Some(ms(100)))),
            (busy_at(5, Some(1000)), 1000, false, Said::Busy(None)),
            (busy_at(5, None), 900, false, Said::Busy(None)),
            // A later request is unanswered: for 250 ms the earlier reply is believed, ...
            (
                with(busy_at(5, None), vec![(600, Asks)]),
                850,
                true,
                Said::Busy(None),
            ),
            (
                with(busy_at(5, None), vec![(600, Asks)]),
                851,
                true,
                Said::Unknown,
            ),
            // ... or four times as long as a reply took.
            (
                with(busy_at(100, None), vec![(600, Asks)]),
                1000,
                true,
                Said::Busy(None),
            ),
            (
                with(busy_at(100, None), vec![(600, Asks)]),
                1001,
                true,
                Said::Unknown,
            ),
            // A failure after it replaces it, and a reply replaces the failure.
            (
                with(busy_at(5, None), vec![(9, Fails(unreachable()))]),
                10,
                false,
                Said::NotDone,
            ),
            (
                with(busy_at(5, None), vec![(9, Fails(StoreError::unknown("cut off")))]),
                10,
                false,
                Said::Unknown,
            ),
            // What a request did whose reply was lost stays unknown, until a later one has a reply.
            (
                vec![
                    (0, Fails(StoreError::unknown("cut off"))),
                    (9, Fails(unreachable())),
                ],
                900,
                false,
                Said::Unknown,
            ),
            (
                vec![(0, Fails(unreachable())), (50, Asks)],
                900,
                true,
                Said::Unknown,
            ),
            (
                vec![
                    (0, Fails(StoreError::unknown("cut off"))),
                    (5, Busy(None)),
                    (9, Fails(unreachable())),
                ],
                900,
                false,
                Said::NotDone,
            ),
            (
                vec![(0, Fails(unreachable())), (9, Busy(None))],
                900,
                false,
                Said::Busy(None),
            ),
            (
                vec![(0, Fails(unreachable())), (9, HeldHere)],
                900,
                false,
                Said::Busy(None),
            ),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(said(&after(events), now, sent), report, "row {row}");
        }
    }

    #[test]
    fn failure_says_whether_the_store_was_asked() {
        for (events, says) in [
            (
                vec![(0, Asks)],
                "the store did not answer within the 4.0ms of waiting",
            ),
            (vec![], "the store was not asked within the 4.0ms of waiting"),
        ] {
            match after(events).verdict(START, at(4), false) {
                Verdict::Failed(error) => assert_eq!(error.message, says),
                Verdict::NotAcquired { .. } => panic!("nothing said that it is held"),
            }
        }
    }

    #[test]
    fn request_is_repeated_after_ever_longer_pauses_until_patience_ends() {
        let refused = || StoreError::not_done(Reason::Refused, "no permission");
        let mut evidence = Evidence::default();
        // sent, failed with, failed at: the pause
        for (asked, error, now, pause) in [
            (0, unreachable(), 0, Some(ms(50))),
            (50, unreachable(), 400, Some(ms(150))),
            (500, refused(), 500, None),
            (550, unreachable(), 2999, Some(ms(50) + ms(2999) / 4)),
            (2999, unreachable(), 3000, None),
        ] {
            let next = evidence.failed(at(asked), error, PATIENCE, at(now));
            assert_eq!(next.ok(), pause, "{asked} {now}");
        }
        assert_eq!(evidence.patience_ends(PATIENCE), Some(at(3000)));
        evidence.is_busy(None, at(3100));
        assert_eq!(evidence.patience_ends(PATIENCE), None);
    }

    #[test]
    fn last_failure_leaves_unknown_what_an_earlier_request_did() {
        for (first, outcome) in [
            (StoreError::unknown("cut off"), Outcome::Unknown),
            (unreachable(), Outcome::NotDone),
        ] {
            let mut own = after(vec![(0, Fails(first))]);
            // Of another call, before and after it failed.
            own.learn(after(vec![(0, Busy(None))]), at(0));
            own.learn(after(vec![(1, Fails(unreachable()))]), at(0));
            let refused = StoreError::not_done(Reason::Refused, "no permission");
            let last = own.failed(at(9), refused, PATIENCE, at(9)).unwrap_err();
            assert_eq!((last.outcome, last.reason), (outcome, Reason::Refused));
        }
    }

    #[test]
    fn reply_to_an_earlier_head_is_valid_for_calls_that_waited_then() {
        // when the head's turn ended, when the call began: whether it may report "busy"
        for (ended, started, report) in [
            (None, 500, Said::Busy(None)),
            (Some(100), 100, Said::Busy(None)),
            (Some(100), 101, Said::NotDone),
        ] {
            let mut head = after(vec![(0, Asks), (5, Busy(None))]);
            if let Some(ended) = ended {
                head.head_ends(at(ended), None);
                head.head_ends(at(9000), None);
            }
            let mut evidence = Evidence::default();
            evidence.learn(head, at(started));
            assert_eq!(said(&evidence, 600, false), report, "{ended:?} {started}");
        }
    }

    #[test]
    fn call_does_not_ask_while_others_go_first() {
        // what the head has done; when the call began and ended: what it reports
        for (row, (events, started, now, report)) in [
            (vec![(0, OthersFirst(10))], 10, 12, Said::Busy(None)),
            (vec![(0, OthersFirst(10))], 11, 12, Said::NotDone),
            // The later end counts, ...
            (
                vec![(0, OthersFirst(10)), (10, OthersFirst(12))],
                12,
                13,
                Said::Busy(None),
            ),
            (
                vec![(0, OthersFirst(10)), (1, OthersFirst(2))],
                10,
                13,
                Said::Busy(None),
            ),
            // ... and what the store has said since.
            (vec![(0, OthersFirst(10)), (10, Asks)], 9, 260, Said::Busy(None)),
            (vec![(0, OthersFirst(10)), (10, Asks)], 9, 261, Said::NotDone),
            (
                vec![(0, OthersFirst(10)), (10, Fails(unreachable()))],
                9,
                12,
                Said::NotDone,
            ),
            (
                vec![(0, Busy(Some(20))), (1, OthersFirst(10))],
                15,
                16,
                Said::Busy(Some(ms(4))),
            ),
        ]
        .into_iter()
        .enumerate()
        {
            let mut evidence = Evidence::default();
            evidence.learn(after(events), at(started));
            assert_eq!(said(&evidence, now, false), report, "row {row}");
        }
    }

    #[test]
    fn unanswered_release_of_the_head_is_a_missing_reply() {
        let mut head = after(vec![(0, Asks), (5, Busy(None))]);
        head.head_ends(at(100), Some(at(100)));
        let mut evidence = Evidence::default();
        evidence.learn(head, START);
        assert_eq!(said(&evidence, 350, false), Said::Busy(None));
        assert_eq!(said(&evidence, 351, false), Said::NotDone);
    }

    #[test]
    fn failure_of_the_head_is_no_request_of_the_call_and_keeps_its_patience() {
        // the head failed first at, the call began at, its own first failure: its patience counts from
        for (of_head, started, own, from) in [
            (0, 400, None, 400),
            (700, 400, None, 700),
            (700, 400, Some(500), 500),
        ] {
            let head = after(vec![(of_head, Fails(StoreError::unknown("cut off")))]);
            let mut evidence = after(own.map(|own| (own, Fails(unreachable()))).into_iter().collect());
            evidence.learn(head, at(started));
            assert_eq!(evidence.patience_ends(PATIENCE), Some(at(from) + PATIENCE));
            assert_eq!(said(&evidence, 900, false), Said::NotDone);
        }
    }
}
