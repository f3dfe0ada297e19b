//! Waiting until a semaphore has as many permits in all as a call needs: all other waiters pass in that time.

use std::time::Duration;

use crate::base::moment::Moment;
use crate::engine::evidence::{Evidence, Verdict};
use crate::engine::timing::{ASK_FOR_PERMITS_EVERY, LONGEST_SLEEP, jittered};
use crate::store::{Outcome, StoreError};

/// How a call waits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    /// How many permits it needs.
    pub(crate) wants: u32,
    /// How long requests are repeated while the store fails.
    pub(crate) patience: Duration,
    /// When the call began.
    pub(crate) started: Moment,
    /// When its wait is over.
    pub(crate) until: Option<Moment>,
}

/// An event.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// The number of permits has changed, or the time to ask has come.
    Due,
    /// The store's numbers of available and held permits; `None` if the total is not set.
    Counted { free: Option<i64>, held: u64 },
    /// The request failed; a number from 0 up to 1 jitters the pause after it.
    Failed {
        error: StoreError,
        fraction: fn() -> f64,
    },
    /// The wait time of the call is over.
    WaitOver,
    /// The client is shut down.
    Closed,
}

/// The actions of the call.
#[derive(Debug)]
pub(crate) enum Next {
    /// Ask for the number of permits after this pause, once it has changed, and at most this long after the pause.
    /// `anew` says that no reply covers a change during the pause: subscribe again.
    Wait {
        pause: Duration,
        at_most: Duration,
        anew: bool,
    },
    Ask,
    /// The end.
    Report(Report),
}

/// The outcome.
#[derive(Debug)]
pub(crate) enum Report {
    /// There may be enough permits: the call asks for them.
    Enough,
    GaveUp(Verdict),
    Closed,
}

/// A call that needs more permits than the total.
#[derive(Debug)]
pub(crate) struct MorePermits<'e> {
    rules: Rules,
    evidence: &'e mut Evidence,
    /// When the request in flight was sent.
    sent: Option<Moment>,
}

impl<'e> MorePermits<'e> {
    pub(crate) fn new(rules: Rules, evidence: &'e mut Evidence) -> MorePermits<'e> {
        MorePermits {
            rules,
            evidence,
            sent: None,
        }
    }

    /// The first step.
    pub(crate) fn begin(&self, now: Moment) -> Next {
        self.waits(Duration::ZERO, false, now)
    }

    pub(crate) fn handle(&mut self, event: Event, now: Moment) -> Next {
        let sent = self.sent.take();
        match event {
            Event::Due => {
                self.sent = Some(now);
                self.evidence.asks(now);
                Next::Ask
            }
            Event::Counted {
                free: Some(free),
                held,
            } if free.saturating_add_unsigned(held) < i64::from(self.rules.wants) => {
                self.evidence.is_busy(None, now);
                self.waits(ASK_FOR_PERMITS_EVERY, false, now)
            }
            Event::Counted { .. } => {
                self.evidence.replied();
                Next::Report(Report::Enough)
            }
            Event::Failed { mut error, fraction } => {
                // It has only looked.
                error.outcome = Outcome::NotDone;
                let failed = (self.evidence).failed(sent.unwrap_or(now), error, self.rules.patience, now);
                match failed {
                    Ok(pause) => self.waits(jittered(pause, fraction()), true, now),
                    Err(error) => Next::Report(Report::GaveUp(Verdict::Failed(error))),
                }
            }
            Event::WaitOver => {
                let evidence = std::mem::take(self.evidence);
                let verdict = evidence.verdict(self.rules.started, now, false);
                Next::Report(Report::GaveUp(verdict))
            }
            Event::Closed => Next::Report(Report::Closed),
        }
    }

    fn waits(&self, pause: Duration, anew: bool, now: Moment) -> Next {
        Next::Wait {
            pause,
            at_most: (self.evidence).with_last_look(LONGEST_SLEEP, now + pause, self.rules.until),
            anew,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Outcome, Reason};

    const START: Moment = Moment::from_nanos(1_000_000_000_000);

    fn counted(free: i64, held: u64) -> Event {
        Event::Counted {
            free: Some(free),
            held,
        }
    }

    fn fails(error: StoreError) -> Event {
        Event::Failed {
            error,
            fraction: || 0.5,
        }
    }

    fn unreachable() -> Event {
        fails(StoreError::not_done(Reason::Unreachable, "connection refused"))
    }

    fn said(next: &Next) -> String {
        match next {
            Next::Wait { pause, at_most, anew } => {
                assert_eq!(*at_most, LONGEST_SLEEP);
                let anew = if *anew { ", listening anew" } else { "" };
                format!("pause {}{anew}", pause.as_millis())
            }
            Next::Report(Report::GaveUp(Verdict::NotAcquired { remaining })) => {
                format!("busy for {remaining:?}")
            }
            Next::Report(Report::GaveUp(Verdict::Failed(error))) => match error.outcome {
                Outcome::Unknown => "failed in doubt".into(),
                Outcome::NotDone => "failed".into(),
            },
            Next::Ask => "ask".into(),
            Next::Report(report) => format!("{report:?}"),
        }
    }

    /// Runs rows of (milliseconds from the start, event, what follows) for a call that wants three permits.
    #[track_caller]
    fn run(rows: Vec<(u64, Event, &str)>) {
        let mut evidence = Evidence::default();
        let rules = Rules {
            wants: 3,
            patience: Duration::from_secs(3),
            started: START,
            until: None,
        };
        let mut machine = MorePermits::new(rules, &mut evidence);
        assert_eq!(said(&machine.begin(START)), "pause 0");
        for (row, (now, event, follows)) in rows.into_iter().enumerate() {
            let next = machine.handle(event.clone(), START + Duration::from_millis(now));
            assert_eq!(said(&next), follows, "row {row}: {event:?}");
        }
    }

    #[test]
    fn call_asks_after_each_change_until_there_are_enough_permits_in_all() {
        run(vec![
            (40, Event::Due, "ask"),
            (42, counted(2, 0), "pause 100"),
            (150, Event::Due, "ask"),
            // Held permits are permits.
            (152, counted(1, 2), "Enough"),
        ]);
    }

    #[test]
    fn permits_are_counted_where_more_are_held_than_there_are() {
        for (free, held, follows) in [
            (-2, 4, "pause 100"),
            (-1, 4, "Enough"),
            (0, 0, "pause 100"),
            (i64::MAX, u64::MAX, "Enough"),
        ] {
            run(vec![(0, Event::Due, "ask"), (1, counted(free, held), follows)]);
        }
    }

    #[test]
    fn call_looks_once_more_before_its_wait_is_over() {
        let ms = Duration::from_millis;
        let mut evidence = Evidence::default();
        let rules = Rules {
            wants: 3,
            patience: ms(3000),
            started: START,
            until: Some(START + ms(20_000)),
        };
        let mut machine = MorePermits::new(rules, &mut evidence);
        let mut asks = |at: u64| {
            let at = START + ms(at);
            machine.handle(Event::Due, at);
            match machine.handle(counted(2, 0), at) {
                Next::Wait { pause, at_most, .. } => at + pause + at_most,
                next => panic!("{next:?}"),
            }
        };
        let last_look = asks(0);
        assert!((START + ms(19_000)..START + ms(20_000)).contains(&last_look));
        // From then on the end of the wait comes first.
        assert!(asks(19_900) > START + ms(20_000));
    }

    #[test]
    fn semaphore_without_a_number_is_asked_for_permits() {
        let counted = Event::Counted { free: None, held: 0 };
        run(vec![(0, Event::Due, "ask"), (1, counted, "Enough")]);
    }

    #[test]
    fn failed_request_is_repeated_with_a_new_subscription_until_the_patience_is_over() {
        run(vec![
            (0, Event::Due, "ask"),
            (0, unreachable(), "pause 50, listening anew"),
            (400, Event::Due, "ask"),
            (400, unreachable(), "pause 150, listening anew"),
            (3000, Event::Due, "ask"),
            (3000, unreachable(), "failed"),
        ]);
        let refused = fails(StoreError::not_done(Reason::Refused, "no permission"));
        run(vec![(0, Event::Due, "ask"), (1, refused, "failed")]);
    }

    #[test]
    fn end_of_the_wait_is_busy_only_where_the_store_said_so() {
        run(vec![(5000, Event::WaitOver, "failed")]);
        run(vec![
            (0, Event::Due, "ask"),
            (2, counted(0, 2), "pause 100"),
            (90, Event::WaitOver, "busy for None"),
        ]);
        // The request in flight has only looked.
        run(vec![(0, Event::Due, "ask"), (5000, Event::WaitOver, "failed")]);
    }

    #[test]
    fn shutdown_ends_the_call() {
        run(vec![(0, Event::Closed, "Closed")]);
        run(vec![(0, Event::Due, "ask"), (1, Event::Closed, "Closed")]);
    }
}
