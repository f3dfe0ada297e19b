//! One yield: what the queue head waits for before it asks the store, so that other processes go first.

use std::hash::{BuildHasher, Hash};
use std::time::Duration;

use super::{
    FirstOther, NextRequest, PendingYield, REPLY_DEADLINE, ReleaseInLine, ReleaseReplied, YieldHistory,
    YieldRound,
};
use crate::base::broken;
use crate::base::moment::Moment;
use crate::engine::evidence::Evidence;

/// An event.
#[derive(Debug, Clone, Copy)]
pub(crate) enum YieldEvent {
    /// The store has replied to the release that this process has sent, perhaps before the waiter was polled.
    Released(ReleaseReplied),
    /// It has not replied in time.
    NoReply,
    /// This process listens, and has received this many notifications.
    Listens { notifications: u64 },
    /// The number of notifications after another one.
    Notified { notifications: u64 },
    /// The time within which the first of the others could have come is over.
    NoneCame,
}

/// What to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum YieldStep {
    /// The reply to the release, for at most this time.
    AwaitReply { at_most: Duration },
    /// Listen, if this process does not.
    Listen,
    /// The next notification, before this time.
    AwaitNotification { until: Moment },
    /// Nothing more; `None` if no other process goes first.
    End(Option<Yielded>),
}

/// The outcome of a yield.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Yielded {
    /// The first of the others came.
    pub(crate) came: bool,
    /// The processes that go first after that.
    pub(crate) round: Option<YieldRound>,
}

/// A yield, from the release or a pending yield until the process may ask the store.
#[derive(Debug)]
pub(crate) struct Yielding<'e> {
    state: State,
    end: Option<Moment>,
    /// The store's replies; owned by the call before and after.
    evidence: &'e mut Evidence,
}

#[derive(Debug)]
enum State {
    AwaitsReply(ReleaseInLine),
    /// Another process goes first.
    LetsGo {
        pending: PendingYield,
        first: FirstOther,
    },
    Ended,
}

impl<'e> Yielding<'e> {
    /// Sets the end of the call's wait time.
    pub(crate) fn new(end: Option<Moment>, evidence: &'e mut Evidence) -> Yielding<'e> {
        Yielding {
            state: State::Ended,
            end,
            evidence,
        }
    }

    /// What callers behind the head may report meanwhile.
    pub(crate) fn evidence(&self) -> &Evidence {
        self.evidence
    }

    /// The first step: after a release of this process whose reply may not have arrived yet, or with a pending yield.
    pub(crate) fn begin<K: Clone + Eq + Hash, S: BuildHasher>(
        &mut self,
        (release, pending): (Option<ReleaseInLine>, Option<PendingYield>),
        history: &mut YieldHistory<K, S>,
        key: &K,
        now: Moment,
    ) -> YieldStep {
        match release {
            Some(release) if release.next == NextRequest::AtOnce => {
                history.set_subscribed(key, release.notifications.is_some(), now);
                YieldStep::End(None)
            }
            Some(release) => {
                // It counts as a request: if the store does not reply, it is unknown whether another client has the lock.
                self.evidence.asks(release.sent);
                self.state = State::AwaitsReply(release);
                YieldStep::AwaitReply {
                    at_most: REPLY_DEADLINE,
                }
            }
            None => self.decides(pending, history, key, now),
        }
    }

    pub(crate) fn handle<K: Clone + Eq + Hash, S: BuildHasher>(
        &mut self,
        event: YieldEvent,
        history: &mut YieldHistory<K, S>,
        key: &K,
        now: Moment,
    ) -> YieldStep {
        match (std::mem::replace(&mut self.state, State::Ended), event) {
            (State::AwaitsReply(release), YieldEvent::Released(reply)) => {
                self.evidence.replied();
                let pending = PendingYield::after(release, reply.receivers, reply.at);
                let is_alone = reply.was_held && release.reached_no_other(reply.receivers);
                history.record_alone(key, is_alone, now);
                self.decides(pending, history, key, now)
            }
            (
                State::LetsGo { pending, mut first },
                YieldEvent::Listens { notifications } | YieldEvent::Notified { notifications },
            ) => {
                if let YieldEvent::Notified { .. } = event {
                    first.notified(notifications);
                }
                if first.has_come(notifications) {
                    return ends(&pending, first, true, history, key, now);
                }
                self.state = State::LetsGo { pending, first };
                YieldStep::AwaitNotification { until: pending.until }
            }
            (State::LetsGo { pending, first }, YieldEvent::NoneCame) => {
                ends(&pending, first, false, history, key, now)
            }
            _ => YieldStep::End(None),
        }
    }

    fn decides<K: Clone + Eq + Hash, S: BuildHasher>(
        &mut self,
        pending: Option<PendingYield>,
        history: &mut YieldHistory<K, S>,
        key: &K,
        now: Moment,
    ) -> YieldStep {
        match pending.filter(|pending| history.yields(key, pending, self.end, now)) {
            Some(pending) if !broken!(YieldNeverMade) => {
                self.evidence.others_first(pending.until);
                self.state = State::LetsGo {
                    pending,
                    first: pending.first(),
                };
                YieldStep::Listen
            }
            _ => YieldStep::End(None),
        }
    }
}

fn ends<K: Clone + Eq + Hash, S: BuildHasher>(
    pending: &PendingYield,
    first: FirstOther,
    came: bool,
    history: &mut YieldHistory<K, S>,
    key: &K,
    now: Moment,
) -> YieldStep {
    let round = history.yielded(key, pending, came, first.notifications(), now);
    YieldStep::End(Some(Yielded { came, round }))
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasherDefault, DefaultHasher};

    use super::*;
    use crate::engine::evidence::Verdict;

    const START: Moment = Moment::from_nanos(1_000_000_000_000);

    type History = YieldHistory<u32, BuildHasherDefault<DefaultHasher>>;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn released(at: u64, receivers: u64) -> YieldEvent {
        YieldEvent::Released(ReleaseReplied {
            was_held: true,
            receivers: Some(receivers),
            at: START + ms(at),
        })
    }

    fn listens(notifications: u64) -> YieldEvent {
        YieldEvent::Listens { notifications }
    }

    fn notified(notifications: u64) -> YieldEvent {
        YieldEvent::Notified { notifications }
    }

    fn release(notifications: Option<u64>) -> Option<ReleaseInLine> {
        Some(ReleaseInLine {
            sent: START,
            notifications,
            may_be_subscribed: false,
            others_here: false,
            head_waited: false,
            next: NextRequest::AfterReply,
        })
    }

    fn said(step: YieldStep) -> String {
        match step {
            YieldStep::AwaitReply { at_most } => format!("reply within {}", at_most.as_millis()),
            YieldStep::Listen => "listen".into(),
            YieldStep::AwaitNotification { until } => {
                format!("notification before {}", until.since(START).as_millis())
            }
            YieldStep::End(None) => "ask".into(),
            YieldStep::End(Some(yielded)) => {
                let others = yielded.round.map_or("", |_| ", others are next");
                format!("came: {}{others}", yielded.came)
            }
        }
    }

    /// Runs rows of (milliseconds from the start, event, step) after the first step. Returns whether the reply to the
    /// release is still missing.
    #[track_caller]
    fn run(
        history: &mut History,
        (begin, end): ((Option<ReleaseInLine>, Option<PendingYield>), Option<u64>),
        first: &str,
        rows: &[(u64, YieldEvent, &str)],
    ) -> bool {
        let mut evidence = Evidence::default();
        evidence.is_busy(None, START);
        evidence.asks(START);
        let mut yielding = Yielding::new(end.map(|end| START + ms(end)), &mut evidence);
        let step = yielding.begin(begin, history, &1, START);
        assert_eq!(said(step), first);
        for (row, (now, event, follows)) in rows.iter().enumerate() {
            let step = yielding.handle(*event, history, &1, START + ms(*now));
            assert_eq!(said(step), *follows, "row {row}: {event:?}");
        }
        let later = START + ms(10_000);
        matches!(evidence.verdict(START, later, false), Verdict::Failed(_))
    }

    #[test]
    fn process_asks_at_once_where_nothing_is_pending() {
        let history = &mut History::default();
        run(history, ((None, None), None), "ask", &[]);
    }

    #[test]
    fn head_asks_where_the_release_before_it_reached_no_other_process() {
        let history = &mut History::default();
        let begin = ((release(Some(7)), None), None);
        let is_missing = run(history, begin, "reply within 1000", &[(4, released(4, 1), "ask")]);
        assert!(!is_missing);
        let begin = ((release(Some(7)), None), None);
        let rows = [(1000, YieldEvent::NoReply, "ask")];
        assert!(run(history, begin, "reply within 1000", &rows));
    }

    /// It asks at once, and the next waiter after the reply.
    #[test]
    fn process_that_may_be_the_receiver_itself_is_not_sure_to_be_alone() {
        let history = &mut History::default();
        let unsure = release(None).map(|release| ReleaseInLine {
            may_be_subscribed: true,
            ..release
        });
        let rows = [(4, released(4, 1), "ask")];
        run(history, ((unsure, None), None), "reply within 1000", &rows);
        assert_eq!(history.next_request(&1, false, START), NextRequest::AfterReply);
    }

    #[test]
    fn head_asks_behind_a_release_as_soon_as_one_has_reached_no_other_process() {
        // notifications, was held, receivers: when the next waiter asks
        for (notifications, was_held, receivers, next) in [
            (Some(7), true, Some(1), NextRequest::AtOnce),
            (Some(7), true, Some(2), NextRequest::AfterReply),
            (None, true, Some(0), NextRequest::AtOnce),
            (None, true, Some(1), NextRequest::AfterReply),
            (None, true, None, NextRequest::AfterReply),
            // Lost, so another process may have it.
            (None, false, Some(0), NextRequest::AfterReply),
        ] {
            let history = &mut History::default();
            assert_eq!(history.next_request(&1, false, START), NextRequest::AfterReply);
            let mut evidence = Evidence::default();
            let mut yielding = Yielding::new(None, &mut evidence);
            yielding.begin((release(notifications), None), history, &1, START);
            let replied = YieldEvent::Released(ReleaseReplied {
                was_held,
                receivers,
                at: START + ms(4),
            });
            yielding.handle(replied, history, &1, START + ms(4));
            assert_eq!(history.next_request(&1, true, START), NextRequest::AfterReply);
            assert_eq!(
                history.next_request(&1, false, START),
                next,
                "{notifications:?} {was_held} {receivers:?}"
            );
        }
        let history = &mut History::default();
        let followed = release(Some(7)).map(|release| ReleaseInLine {
            next: NextRequest::AtOnce,
            ..release
        });
        run(history, ((followed, None), None), "ask", &[]);
    }

    #[test]
    fn call_that_ends_before_the_reply_to_the_release_does_not_report_the_lock_as_held() {
        // when the wait ends: whether the lock counts as held
        for (end, is_held) in [(250, true), (251, false)] {
            let history = &mut History::default();
            let mut evidence = Evidence::default();
            evidence.is_busy(None, START);
            let mut yielding = Yielding::new(None, &mut evidence);
            yielding.begin((release(Some(7)), None), history, &1, START);
            let verdict = yielding.evidence().clone().verdict(START, START + ms(end), false);
            assert_eq!(matches!(verdict, Verdict::NotAcquired { .. }), is_held, "{end}");
        }
    }

    #[test]
    fn head_lets_a_process_come_and_go_that_was_notified_of_the_release() {
        let history = &mut History::default();
        let begin = ((release(Some(7)), None), None);
        run(
            history,
            begin,
            "reply within 1000",
            &[
                // Four round trips of 4 ms.
                (4, released(4, 2), "listen"),
                (4, listens(8), "notification before 20"),
                (9, notified(9), "came: true"),
            ],
        );
    }

    #[test]
    fn call_that_ends_while_others_go_first_reports_the_lock_as_held() {
        // how many clients heard of the release: whether the lock counts as held
        for (receivers, is_held) in [(2, true), (1, false)] {
            let history = &mut History::default();
            let mut evidence = Evidence::default();
            let mut yielding = Yielding::new(None, &mut evidence);
            yielding.begin((release(Some(7)), None), history, &1, START);
            yielding.handle(released(4, receivers), history, &1, START + ms(4));
            let verdict = yielding.evidence().clone().verdict(START, START + ms(5), false);
            assert_eq!(matches!(verdict, Verdict::NotAcquired { .. }), is_held);
        }
    }

    #[test]
    fn process_that_came_and_went_before_the_reply_is_not_waited_for() {
        let history = &mut History::default();
        let begin = ((release(Some(7)), None), None);
        run(
            history,
            begin,
            "reply within 1000",
            &[(4, released(4, 2), "listen"), (4, listens(9), "came: true")],
        );
    }

    #[test]
    fn head_that_takes_the_reply_late_does_not_wait_longer_for_it() {
        let history = &mut History::default();
        for (now, then) in [(19, "listen"), (20, "ask")] {
            let begin = ((release(Some(7)), None), None);
            run(
                history,
                begin,
                "reply within 1000",
                &[(now, released(4, 2), then)],
            );
        }
    }

    #[test]
    fn several_processes_are_let_go_one_after_the_other() {
        let history = &mut History::default();
        let begin = ((release(None), None), None);
        run(
            history,
            begin,
            "reply within 1000",
            &[
                (4, released(4, 3), "listen"),
                (4, listens(0), "notification before 20"),
                // "Subscribed", and the first of the others.
                (5, notified(1), "notification before 20"),
                (9, notified(2), "came: true, others are next"),
            ],
        );
    }

    #[test]
    fn process_that_does_not_come_is_waited_for_ever_more_rarely() {
        let history = &mut History::default();
        for _ in 0..3 {
            let begin = ((release(Some(7)), None), None);
            let rows = [
                (0, released(0, 2), "listen"),
                (0, listens(8), "notification before 10"),
                (10, YieldEvent::NoneCame, "came: false"),
            ];
            run(history, begin, "reply within 1000", &rows);
        }
        let begin = ((release(Some(7)), None), None);
        run(history, begin, "reply within 1000", &[(0, released(0, 2), "ask")]);
    }

    #[test]
    fn pending_yield_is_made_where_the_wait_leaves_time_for_it() {
        for (end, first) in [(None, "listen"), (Some(11), "listen"), (Some(10), "ask")] {
            let history = &mut History::default();
            let pending = PendingYield::after(release(None).unwrap(), Some(1), START);
            run(history, ((None, pending), end), first, &[]);
        }
    }
}
