use super::*;
use crate::store::{Announce, Reason};

const START: Moment = Moment::from_nanos(1_000_000_000_000);

const PLAIN: Rules = Rules {
    fair: false,
    has_position: false,
    permits: false,
    patience: Duration::from_secs(3),
    started: START,
    until: None,
};
const FAIR: Rules = Rules { fair: true, ..PLAIN };
const WRITE: Rules = Rules {
    has_position: true,
    ..PLAIN
};

const MAY_ASK: Event = Event::MayAsk { listens: false };
const CAME_FREE: Event = Event::CameFree { notifications: 7 };
const GRANTED: Event = Event::Granted { ends_position: true };

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn busy(left: impl Into<Option<u64>>) -> Event {
    Event::Busy {
        left: left.into().map(ms),
        again: None,
        listeners: None,
        pause: Duration::ZERO,
    }
}

/// As [`busy`], where so many processes listen.
fn crowd(listeners: u64) -> Event {
    Event::Busy {
        left: Some(ms(3000)),
        again: None,
        listeners: Some(listeners),
        pause: Duration::ZERO,
    }
}

/// As [`busy`], where the store has a position and expects the next request in time.
fn queued(again: u64) -> Event {
    Event::Busy {
        left: None,
        again: Some(ms(again)),
        listeners: None,
        pause: Duration::ZERO,
    }
}

fn fails(error: StoreError) -> Event {
    Event::Failed {
        error,
        loses_position: false,
        fraction: || 0.5,
    }
}

fn unreachable() -> Event {
    fails(StoreError::not_done(Reason::Unreachable, "connection refused"))
}

fn in_doubt() -> Event {
    fails(StoreError::unknown("connection lost"))
}

fn refused() -> Event {
    fails(StoreError::not_done(Reason::Refused, "no permission"))
}

/// A step in words, with times in milliseconds from the start.
fn said(step: &Step) -> String {
    let after = |moment: Moment| moment.since(START).as_millis();
    let mut said = Vec::new();
    for (does, what) in [
        (step.head_waits, "head waits"),
        (step.shares_evidence, "share"),
        (step.warns, "warn"),
        (step.new_position, "new position"),
        (step.listens, "listen"),
    ] {
        said.extend(does.then(|| what.to_owned()));
    }
    said.push(match &step.next {
        Next::Send {
            announce: Announce::Nothing,
            poll_by,
        } => format!(
            "send{}",
            poll_by.map_or(String::new(), |by| format!(" (poll by {})", after(by)))
        ),
        Next::Send { announce, .. } => format!("send, announcing {announce:?}"),
        Next::Continue => "continue".into(),
        Next::Wait(wait) => {
            let mut said = format!("wait until {}", after(wait.until));
            for (name, at) in [("listen at", wait.listen_at), ("poll by", wait.poll_by)] {
                said += &at.map_or(String::new(), |at| format!(" ({name} {})", after(at)));
            }
            said + if wait.sends_as_head { " (send as head)" } else { "" }
        }
        Next::Draw { among } => format!("draw among {among}"),
        Next::LetGo { patience } => format!("let one go for {}", patience.as_millis()),
        Next::LeaveToOthers { until } => format!("leave until {}", after(*until)),
        Next::Report(Report::GaveUp(Verdict::NotAcquired { remaining })) => format!("busy for {remaining:?}"),
        Next::Report(Report::GaveUp(Verdict::Failed(error))) => match error.outcome {
            Outcome::Unknown => "failed in doubt".into(),
            Outcome::NotDone => "failed".into(),
        },
        Next::Report(report) => format!("{report:?}"),
    });
    said.join(", ")
}

/// Runs rows of (milliseconds from the start, event, step) through a machine.
#[track_caller]
fn run(rules: Rules, is_head: bool, rows: Vec<(u64, Event, &str)>) {
    let mut evidence = Evidence::default();
    let mut acquire = Acquire::new(rules, is_head, &mut evidence);
    for (row, (now, event, follows)) in rows.into_iter().enumerate() {
        let state = acquire.state;
        let step = acquire.handle(event.clone(), START + ms(now));
        assert_eq!(said(&step), follows, "row {row}: {state:?}, {event:?}");
    }
}

#[test]
fn head_asks_listens_waits_and_asks_again_until_it_is_granted_the_lock() {
    run(
        PLAIN,
        true,
        vec![
            (0, MAY_ASK, "send"),
            (5, busy(3000), "head waits, listen, wait until 1505"),
            (1505, Event::Due, "share, send"),
            (1510, busy(2500), "head waits, wait until 2760"),
            (2000, CAME_FREE, "share, send"),
            (2005, busy(None), "head waits, wait until 32005"),
            (2010, CAME_FREE, "share, send"),
            (2015, GRANTED, "Granted"),
        ],
    );
}

#[test]
fn head_that_is_to_pause_asks_after_that_whatever_it_is_told() {
    let pauses = |left: u64| Event::Busy {
        left: Some(ms(left)),
        again: None,
        listeners: None,
        pause: ms(40),
    };
    run(
        PLAIN,
        true,
        vec![
            (0, MAY_ASK, "send"),
            (5, pauses(3000), "head waits, listen, wait until 1505"),
            (10, CAME_FREE, "wait until 45"),
            (20, CAME_FREE, "wait until 45"),
            (45, Event::Due, "share, send"),
            (50, pauses(3000), "head waits, wait until 1550"),
            (90, CAME_FREE, "share, send"),
            (95, pauses(0), "head waits, wait until 135"),
            (100, Event::WaitOver, "busy for None"),
        ],
    );
}

#[test]
fn head_that_has_the_subscription_of_the_one_before_does_not_subscribe_anew() {
    let may_ask = Event::MayAsk { listens: true };
    run(
        PLAIN,
        true,
        vec![(0, may_ask, "send"), (5, busy(300), "head waits, wait until 155")],
    );
}

#[test]
fn lease_without_a_believable_end_has_none() {
    let year = 366 * 24 * 60 * 60 * 1000;
    run(
        PLAIN,
        true,
        vec![
            (0, MAY_ASK, "send"),
            (0, busy(year + 1), "head waits, listen, wait until 30000"),
            (100, Event::WaitOver, "busy for None"),
        ],
    );
}

#[test]
fn each_report_follows_from_its_event_while_asking_and_while_waiting() {
    let failing = "failed in doubt";
    // the event; the report while a request is on its way, and after the reply "busy"
    for (event, asking, waiting) in [
        (Event::HandedOff { is_held: true }, "HandedOff", "HandedOff"),
        (Event::HandedOff { is_held: false }, "Rejoins", "Rejoins"),
        (Event::Withdrawn, "Rejoins", "Rejoins"),
        (Event::WaitOver, failing, "busy for Some(2.999s)"),
        (Event::PatienceOver, failing, "busy for Some(2.999s)"),
        (Event::Closed, "Closed", "Closed"),
    ] {
        for rules in [PLAIN, FAIR] {
            let sends = if rules.fair { "send (poll by 2500)" } else { "send" };
            let waits = match rules.fair {
                true => "head waits, listen, wait until 1500 (poll by 2500)",
                false => "head waits, listen, wait until 1500",
            };
            run(rules, true, vec![(0, MAY_ASK, sends), (1, event.clone(), asking)]);
            run(
                rules,
                true,
                vec![
                    (0, MAY_ASK, sends),
                    (0, busy(3000), waits),
                    (1, event.clone(), waiting),
                ],
            );
        }
    }
    run(
        PLAIN,
        true,
        vec![
            (0, MAY_ASK, "send"),
            (1, Event::TooFewPermits, "head waits, TooFewPermits"),
        ],
    );
}

#[test]
fn failed_request_is_repeated_after_a_pause_until_the_patience_ends() {
    run(
        PLAIN,
        true,
        vec![
            (0, MAY_ASK, "send"),
            (400, unreachable(), "share, wait until 550"),
            (550, Event::Due, "share, send"),
            (551, refused(), "failed"),
        ],
    );
    // The head behind one whose patience has ended does not begin anew; one that was granted the lock did not fail.
    run(
        PLAIN,
        true,
        vec![
            (0, MAY_ASK, "send"),
            (2900, in_doubt(), "share, wait until 3000"),
            (3000, Event::Due, "failed in doubt"),
        ],
    );
    run(
        FAIR,
        false,
        vec![
            (0, MAY_ASK, "send (poll by 2500)"),
            (
                2900,
                unreachable(),
                "wait until 3000 (listen at 3000) (poll by 4000) (send as head)",
            ),
            (3000, Event::Due, "send (poll by 5500)"),
            (3000, Event::PatienceOver, "failed in doubt"),
        ],
    );
}

/// The notification of the release may be lost.
#[test]
fn waiter_looks_once_more_before_its_wait_is_over() {
    let rules = Rules {
        until: Some(START + ms(8000)),
        ..PLAIN
    };
    run(
        rules,
        true,
        vec![
            (0, MAY_ASK, "send"),
            (0, busy(29_000), "head waits, listen, wait until 7650"),
            (7650, Event::Due, "share, send"),
            (7650, busy(22_000), "head waits, wait until 18650"),
            (8000, Event::WaitOver, "busy for Some(21.65s)"),
        ],
    );
    // A slow store gets four times as long as its slowest reply took.
    let rows = vec![
        (0, MAY_ASK, "send"),
        (500, busy(29_000), "head waits, listen, wait until 5900"),
    ];
    run(rules, true, rows);
    let rows = vec![
        (0, MAY_ASK, "send (poll by 2500)"),
        (
            0,
            busy(29_000),
            "head waits, listen, wait until 1500 (poll by 2500)",
        ),
    ];
    run(Rules { fair: true, ..rules }, true, rows);
    // Of a short wait nothing is left for another look.
    let rules = Rules {
        until: Some(START + ms(300)),
        ..PLAIN
    };
    let rows = vec![
        (0, MAY_ASK, "send"),
        (0, busy(29_000), "head waits, listen, wait until 14500"),
    ];
    run(rules, true, rows);
}

#[test]
fn request_that_was_not_sent_leaves_no_doubt() {
    for (was_not_sent, expected) in [(false, "failed in doubt"), (true, "failed")] {
        let mut evidence = Evidence::default();
        let mut acquire = Acquire::new(PLAIN, true, &mut evidence);
        acquire.handle(MAY_ASK, START);
        acquire.handle(unreachable(), START + ms(10));
        acquire.handle(Event::Due, START + ms(60));
        acquire.ends_with(&Event::PatienceOver, |asked| {
            assert_eq!(asked, START + ms(60));
            was_not_sent
        });
        assert_eq!(
            said(&acquire.handle(Event::PatienceOver, START + ms(3000))),
            expected
        );
    }
    // What is known of the last request says nothing of an earlier one.
    let mut evidence = Evidence::default();
    let mut acquire = Acquire::new(PLAIN, true, &mut evidence);
    acquire.handle(MAY_ASK, START);
    acquire.handle(in_doubt(), START + ms(10));
    acquire.handle(Event::Due, START + ms(60));
    acquire.ends_with(&Event::WaitOver, |_| true);
    assert_eq!(
        said(&acquire.handle(Event::WaitOver, START + ms(3000))),
        "failed in doubt"
    );
}

#[test]
fn operator_is_warned_once_where_no_permit_comes_back() {
    let rules = Rules {
        permits: true,
        has_position: true,
        ..PLAIN
    };
    run(
        rules,
        true,
        vec![
            (0, MAY_ASK, "send"),
            (0, queued(500), "head waits, listen, wait until 500"),
            (500, Event::Due, "share, send"),
            (500, busy(None), "head waits, warn, wait until 30500"),
            (900, CAME_FREE, "share, send"),
            (900, busy(None), "head waits, wait until 30900"),
        ],
    );
}

#[test]
fn of_a_crowd_a_process_asks_by_its_rank() {
    let waiting = |rows: Vec<(u64, Event, &'static str)>| {
        let mut all = vec![
            (0, MAY_ASK, "send"),
            (5, crowd(100), "head waits, listen, wait until 1505"),
            // It has only just begun to listen.
            (6, CAME_FREE, "share, send"),
            (11, crowd(100), "head waits, wait until 1511"),
            (100, CAME_FREE, "draw among 100"),
        ];
        all.extend(rows);
        run(PLAIN, true, all);
    };
    waiting(vec![(100, Event::Drawn(3), "share, send, announcing Grant")]);
    waiting(vec![
        (100, Event::Drawn(4), "leave until 120"),
        (120, Event::Due, "share, send, announcing Taken"),
        (125, crowd(100), "head waits, wait until 1625"),
        (1625, Event::Due, "share, send"),
    ]);
    waiting(vec![
        (100, Event::Drawn(4), "leave until 120"),
        (110, Event::Taken, "wait until 1511"),
        (111, CAME_FREE, "draw among 100"),
        (111, Event::Drawn(99), "leave until 591"),
        (200, CAME_FREE, "draw among 100"),
        (200, Event::Drawn(0), "share, send, announcing Grant"),
    ]);
    // Not longer than it would have waited anyway.
    waiting(vec![
        (100, Event::Drawn(4), "leave until 120"),
        (110, Event::Taken, "wait until 1511"),
        (1500, CAME_FREE, "draw among 100"),
        (1500, Event::Drawn(99), "leave until 1511"),
    ]);
}

#[test]
fn waiter_of_a_fair_lock_asks_often_and_listens_as_the_head_or_when_it_takes_long() {
    let behind = "wait until 1505 (listen at 105) (poll by 2505) (send as head)";
    run(
        FAIR,
        false,
        vec![
            (0, MAY_ASK, "send (poll by 2500)"),
            (5, busy(9000), behind),
            (105, Event::QuietOver, "listen, continue"),
            (1505, Event::Due, "send (poll by 4005)"),
            (1510, busy(100), "wait until 1611 (poll by 2611) (send as head)"),
            (1550, CAME_FREE, "send (poll by 4050)"),
            (1555, GRANTED, "Granted"),
        ],
    );
    run(
        FAIR,
        false,
        vec![
            (0, MAY_ASK, "send (poll by 2500)"),
            (5, busy(9000), behind),
            (50, Event::BecameHead, "send (poll by 2550)"),
            (
                55,
                busy(9000),
                "head waits, listen, wait until 1555 (poll by 2555)",
            ),
        ],
    );
}

#[test]
fn reply_that_is_older_than_the_role_of_the_head_is_asked_for_again_at_once() {
    for (reply, follows) in [
        (busy(9000), "head waits, send (poll by 2505)"),
        (unreachable(), "send (poll by 2505)"),
        (in_doubt(), "new position, send (poll by 2505)"),
        (GRANTED, "Granted"),
    ] {
        run(
            FAIR,
            false,
            vec![
                (0, MAY_ASK, "send (poll by 2500)"),
                (3, Event::BecameHead, "continue"),
                (5, reply, follows),
            ],
        );
    }
    // Only the reply to its request as the head says whether it has to wait.
    run(
        FAIR,
        false,
        vec![
            (0, MAY_ASK, "send (poll by 2500)"),
            (3, Event::BecameHead, "continue"),
            (5, busy(9000), "head waits, send (poll by 2505)"),
            (
                7,
                busy(9000),
                "head waits, listen, wait until 1507 (poll by 2507)",
            ),
        ],
    );
}

#[test]
fn position_in_doubt_is_left_for_another_one_with_a_subscription_of_its_own() {
    run(
        FAIR,
        false,
        vec![
            (0, MAY_ASK, "send (poll by 2500)"),
            (
                0,
                busy(9000),
                "wait until 1500 (listen at 100) (poll by 2500) (send as head)",
            ),
            (100, Event::QuietOver, "listen, continue"),
            (1500, Event::Due, "send (poll by 4000)"),
            (
                1500,
                in_doubt(),
                "new position, wait until 1550 (listen at 1600) (poll by 2550) (send as head)",
            ),
        ],
    );
}

#[test]
fn waiter_that_leaves_gives_up_its_position_unless_it_waits_again_or_has_none() {
    let lost = || Event::HandedOff { is_held: false };
    // rules, what happened after the first request: whether the position is given up
    for (rules, events, gives_up) in [
        (FAIR, vec![], true),
        (FAIR, vec![busy(None)], true),
        (FAIR, vec![busy(None), Event::HandedOff { is_held: true }], true),
        (FAIR, vec![busy(None), lost()], false),
        (FAIR, vec![busy(None), Event::Withdrawn], false),
        (FAIR, vec![Event::WaitOver], true),
        (PLAIN, vec![busy(None)], false),
        (WRITE, vec![], true),
        (WRITE, vec![GRANTED], false),
        (WRITE, vec![Event::Granted { ends_position: false }], false),
        (WRITE, vec![busy(None)], false),
        (WRITE, vec![queued(500)], true),
        (WRITE, vec![queued(500), Event::Due, busy(None)], true),
        (WRITE, vec![queued(500), Event::Due, GRANTED], false),
        (WRITE, vec![queued(500), Event::Withdrawn], true),
        (WRITE, vec![Event::TooFewPermits], true),
        (WRITE, vec![unreachable()], false),
        (WRITE, vec![in_doubt()], true),
        // The first request may come to the store after the grant of the second, and take the position anew.
        (WRITE, vec![in_doubt(), Event::Due, GRANTED], true),
        (WRITE, vec![unreachable(), Event::Due, GRANTED], false),
    ] {
        let mut evidence = Evidence::default();
        let mut acquire = Acquire::new(rules, true, &mut evidence);
        acquire.handle(MAY_ASK, START);
        for event in &events {
            acquire.handle(event.clone(), START + ms(1));
        }
        assert_eq!(acquire.gives_up_position(), gives_up, "{rules:?} {events:?}");
    }
}

/// As other processes went first until the round ends with the notification of this number.
fn yielded(came: bool, all: Option<u64>, notifications: u64) -> Event {
    Event::Yielded {
        came,
        round: all.map(|all| YieldRound::until(all, ms(8))),
        notifications,
        listens: true,
    }
}

fn came(notifications: u64) -> Event {
    Event::OtherCame { notifications }
}

#[test]
fn processes_that_wait_elsewhere_go_first_before_the_first_request() {
    for rows in [
        vec![(0, yielded(true, None, 5), "send")],
        vec![(0, yielded(false, Some(9), 5), "send")],
        vec![(0, yielded(true, Some(5), 5), "send")],
        vec![
            (0, yielded(true, Some(7), 5), "share, let one go for 8"),
            (2, came(6), "share, let one go for 8"),
            (4, came(7), "share, send"),
        ],
        vec![
            (0, yielded(true, Some(9), 5), "share, let one go for 8"),
            (8, Event::NoneCame, "share, send"),
        ],
        vec![
            (0, yielded(true, Some(9), 5), "share, let one go for 8"),
            (1, Event::Closed, "Closed"),
        ],
    ] {
        run(PLAIN, true, rows);
    }
}

#[test]
fn they_go_first_again_whenever_the_lock_becomes_available_until_all_have_come() {
    let begins = || {
        vec![
            (0, yielded(false, Some(9), 5), "send"),
            (5, busy(3000), "head waits, wait until 1505"),
            (10, CAME_FREE, "share, let one go for 8"),
        ]
    };
    for rest in [
        vec![
            (12, came(8), "share, let one go for 8"),
            (14, came(9), "share, send"),
        ],
        vec![(18, Event::NoneCame, "share, send")],
        // The time to ask anyway has come.
        vec![(1505, Event::Due, "share, send")],
        vec![(12, Event::HandedOff { is_held: true }, "HandedOff")],
        vec![
            (18, Event::NoneCame, "share, send"),
            (20, busy(2500), "head waits, wait until 1270"),
            // Too late to count.
            (21, came(8), "continue"),
            (30, Event::CameFree { notifications: 9 }, "share, send"),
        ],
    ] {
        run(PLAIN, true, begins().into_iter().chain(rest).collect());
    }
}

#[test]
fn process_in_a_crowd_draws_its_rank_when_its_turn_has_come() {
    run(
        PLAIN,
        true,
        vec![
            (0, yielded(false, Some(9), 5), "send"),
            (5, crowd(30), "head waits, wait until 1505"),
            (10, CAME_FREE, "share, let one go for 8"),
            (18, Event::NoneCame, "draw among 30"),
            (18, Event::Drawn(0), "share, send, announcing Grant"),
        ],
    );
}
