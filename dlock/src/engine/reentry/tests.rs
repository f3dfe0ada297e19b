use super::*;
use crate::store::{Outcome, Reason};

const START: Moment = Moment::from_nanos(1_000_000_000_000);

const WAITS: Rules = Rules {
    once: false,
    instead: false,
    patience: Duration::from_secs(3),
    started: START,
};
const ONCE: Rules = Rules { once: true, ..WAITS };
const INSTEAD: Rules = Rules {
    instead: true,
    ..WAITS
};

const RELEASED: HoldState = HoldState::Lost(Loss::Released);
const EXPIRED: HoldState = HoldState::Lost(Loss::Expired);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A branch is inside.
const INSIDE: Event = Event::KeptOut {
    passed_over: None,
    remaining: Duration::from_secs(9),
};

/// A branch was called, and is passed over then.
fn called(passed_over: u64) -> Event {
    Event::KeptOut {
        passed_over: Some(START + ms(passed_over)),
        remaining: Duration::from_secs(9),
    }
}

fn busy(write: HoldState) -> Event {
    Event::Busy {
        left: Some(ms(700)),
        write,
    }
}

fn confirmed(write: HoldState) -> Event {
    Event::Confirmed {
        write,
        fraction: || 0.5,
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

fn wait_over(remaining: impl Into<Option<u64>>) -> Event {
    Event::WaitOver {
        remaining: remaining.into().map(ms),
    }
}

/// A step in words, with times in milliseconds from the start.
fn said(next: &Next) -> String {
    let after = |moment: &Moment| moment.since(START).as_millis();
    match next {
        Next::Look => "look".into(),
        Next::WarnAndLook => "warn, look".into(),
        Next::Wait { until } => format!("wait until {}", after(until)),
        Next::Ask {
            is_limited: false, ..
        } => "ask to the end".into(),
        Next::Ask { patience_ends, .. } => match patience_ends {
            Some(end) => format!("ask until {}", after(end)),
            None => "ask".into(),
        },
        Next::Confirm => "confirm".into(),
        Next::Pause(pause) => format!("pause {}", pause.as_millis()),
        Next::Report(Report::GaveUp(Verdict::NotAcquired { remaining })) => format!("busy for {remaining:?}"),
        Next::Report(Report::GaveUp(Verdict::Failed(error))) => match error.outcome {
            Outcome::Unknown => "failed in doubt".into(),
            Outcome::NotDone => "failed".into(),
        },
        Next::Report(report) => format!("{report:?}"),
    }
}

/// Runs rows of (milliseconds from the start, event, step) through a machine.
#[track_caller]
fn run(rules: Rules, rows: Vec<(u64, Event, &str)>) {
    let mut reenter = Reenter::new(rules);
    for (row, (now, event, follows)) in rows.into_iter().enumerate() {
        let state = reenter.state;
        let next = reenter.handle(event.clone(), START + ms(now));
        assert_eq!(said(&next), follows, "row {row}: {state:?}, {event:?}");
    }
}

#[test]
fn caller_enters_a_hold_of_its_own_kind_and_reads_under_its_write_lock() {
    use Kind::{Fair, Fenced, Latch, Mutex, Permit, Read, Unowned, Write};
    // asked for, held around the caller: what is allowed
    for (kind, around, allowed) in [
        (Mutex, &[][..], Reentry::None),
        (Mutex, &[Mutex][..], Reentry::Enter(Mutex)),
        (Mutex, &[Write][..], Reentry::WouldDeadlock),
        (Fair, &[Read][..], Reentry::WouldDeadlock),
        (Mutex, &[Permit][..], Reentry::None),
        (Mutex, &[Fair, Write][..], Reentry::WouldDeadlock),
        (Fair, &[Mutex][..], Reentry::WouldDeadlock),
        (Fair, &[Fair][..], Reentry::Enter(Fair)),
        (Fenced, &[Fenced][..], Reentry::Enter(Fenced)),
        (Fenced, &[Mutex][..], Reentry::WouldDeadlock),
        (Read, &[][..], Reentry::None),
        (Read, &[Write][..], Reentry::NestedRead(Write)),
        (Read, &[Write, Read][..], Reentry::Enter(Read)),
        (Read, &[Mutex][..], Reentry::WouldDeadlock),
        (Write, &[][..], Reentry::None),
        (Write, &[Read][..], Reentry::WouldDeadlock),
        (Write, &[Read, Write][..], Reentry::Enter(Write)),
        (Write, &[Fenced][..], Reentry::WouldDeadlock),
        (Permit, &[][..], Reentry::None),
        (Unowned, &[][..], Reentry::None),
        (Latch, &[][..], Reentry::None),
    ] {
        let nearest = |kind| around.iter().copied().find(|other| *other == kind);
        let found = reentry(kind, nearest, |_| HoldState::Held);
        assert_eq!(found, allowed, "{kind:?} in {around:?}");
    }
}

#[test]
fn writer_inside_a_read_lock_is_told_whether_that_is_lost() {
    for (read, allowed) in [
        (HoldState::Held, Reentry::WouldDeadlock),
        (HoldState::Suspect, Reentry::WouldDeadlock),
        (EXPIRED, Reentry::Lost(Loss::Expired)),
        (RELEASED, Reentry::None),
    ] {
        let nearest = |kind| (kind == Kind::Read).then_some(());
        assert_eq!(reentry(Kind::Write, nearest, |()| read), allowed, "{read:?}");
    }
}

#[test]
fn look_decides_where_nothing_is_in_the_way() {
    for (event, follows) in [
        (Event::Outside, "Outside"),
        (Event::Entered, "Entered"),
        (Event::Lost(Loss::Gone), "Lost(Gone)"),
        (Event::WouldDeadlock, "WouldDeadlock"),
        (Event::Closed, "Closed"),
    ] {
        for rules in [WAITS, ONCE] {
            run(rules, vec![(0, event.clone(), follows)]);
        }
    }
}

#[test]
fn hold_that_ends_between_two_looks_is_lost_unless_it_was_released() {
    run(
        WAITS,
        vec![
            (0, Event::Ended(Loss::Released), "look"),
            (0, Event::Outside, "Outside"),
        ],
    );
    run(WAITS, vec![(0, Event::Ended(Loss::Expired), "Lost(Expired)")]);
    // A guard at hand is the only way.
    run(INSTEAD, vec![(0, Event::Ended(Loss::Released), "Lost(Released)")]);
}

#[test]
fn branch_waits_until_it_is_called_or_the_one_before_it_is_passed_over() {
    run(
        WAITS,
        vec![
            (0, INSIDE, "wait until 1000"),
            (300, Event::Called, "look"),
            (300, called(400), "wait until 400"),
            (400, Event::Due, "look"),
            (400, called(9000), "wait until 1400"),
            (900, Event::Called, "look"),
            (900, Event::Entered, "Entered"),
        ],
    );
}

#[test]
fn branch_that_waits_for_its_own_frame_is_warned_of_once() {
    run(
        WAITS,
        vec![
            (0, called(1000), "wait until 1000"),
            // Another branch was called, and may be inside soon.
            (1000, Event::Due, "look"),
            (1000, INSIDE, "wait until 2000"),
            (2000, Event::Due, "warn, look"),
            (2000, INSIDE, "wait until 3000"),
            (3000, Event::Due, "look"),
        ],
    );
}

#[test]
fn call_that_does_not_wait_is_told_how_long_the_hold_of_its_frame_lasts() {
    run(ONCE, vec![(0, INSIDE, "busy for Some(9s)")]);
    run(
        WAITS,
        vec![
            (0, INSIDE, "wait until 1000"),
            (500, wait_over(8500), "busy for Some(8.5s)"),
        ],
    );
}

#[test]
fn nested_read_is_asked_for_until_the_store_grants_it() {
    run(
        WAITS,
        vec![
            (0, Event::Admitted, "ask"),
            (2, unreachable(), "pause 50"),
            (52, Event::Due, "look"),
            (52, Event::Admitted, "ask until 3000"),
            (54, busy(HoldState::Held), "confirm"),
            (56, confirmed(HoldState::Suspect), "pause 50"),
            (106, Event::Due, "look"),
            (106, Event::Admitted, "ask"),
            (108, Event::Granted, "Entered"),
        ],
    );
}

#[test]
fn busy_nested_read_ends_with_the_write_lock() {
    let admitted = (0, Event::Admitted, "ask");
    for (write, follows) in [
        (EXPIRED, "Lost(Expired)"),
        // The frames have another way.
        (RELEASED, "look"),
    ] {
        run(WAITS, vec![admitted.clone(), (2, busy(write), follows)]);
        run(
            WAITS,
            vec![
                admitted.clone(),
                (2, busy(HoldState::Held), "confirm"),
                (4, confirmed(write), follows),
            ],
        );
    }
}

#[test]
fn call_that_asks_once_reports_the_first_reply() {
    let admitted = (0, Event::Admitted, "ask to the end");
    run(
        ONCE,
        vec![
            admitted.clone(),
            (2, busy(HoldState::Held), "confirm"),
            (4, confirmed(HoldState::Held), "busy for Some(700ms)"),
        ],
    );
    run(ONCE, vec![admitted.clone(), (2, unreachable(), "failed")]);
    let unknown = fails(StoreError::unknown("connection lost"));
    run(ONCE, vec![admitted.clone(), (2, unknown, "failed in doubt")]);
    run(ONCE, vec![admitted, (2, Event::Granted, "Entered")]);
}

#[test]
fn call_that_gives_up_says_what_the_store_has_said() {
    let admitted = (0, Event::Admitted, "ask");
    // A request is on its way.
    run(
        WAITS,
        vec![admitted.clone(), (500, wait_over(None), "failed in doubt")],
    );
    run(
        WAITS,
        vec![
            admitted.clone(),
            (2, busy(HoldState::Held), "confirm"),
            (4, confirmed(HoldState::Held), "pause 50"),
            (20, wait_over(None), "busy for Some(682ms)"),
        ],
    );
    run(
        WAITS,
        vec![
            admitted.clone(),
            (2, unreachable(), "pause 50"),
            (52, Event::Due, "look"),
            (52, Event::Admitted, "ask until 3000"),
            (3000, Event::PatienceOver, "failed in doubt"),
        ],
    );
    let refused = fails(StoreError::not_done(Reason::Refused, "no permission"));
    run(WAITS, vec![admitted.clone(), (2, refused, "failed")]);
    run(WAITS, vec![admitted.clone(), (2, Event::Closed, "Closed")]);
    run(WAITS, vec![admitted, (2, Event::TooFewPermits, "failed")]);
}
