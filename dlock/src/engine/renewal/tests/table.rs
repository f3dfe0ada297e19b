//! What enters, leaves and is handed off.

use super::*;
use crate::engine::renewal::entries::Entry;

#[test]
fn entry_is_two_words() {
    assert_eq!(size_of::<Entry<Rc<Grant>>>(), 16);
}

#[test]
fn watchdog_is_woken_for_what_is_due_before_it_looks() {
    let mut table = Table::default();
    // lease: woken, next look
    for (number, lease, woken, next) in [
        (1, s(30), true, s(10)),
        (2, s(60), false, s(10)),
        (3, s(30), false, s(10)),
        (4, s(3), true, s(1)),
    ] {
        let grant = grant_of(number, Kind::Mutex, Terms { lease, ..RENEWED });
        let actions = said(table.add(&grant, START, START));
        assert_eq!(actions, vec!["wake"; usize::from(woken)], "{lease:?}");
        assert_eq!(table.next_deadline(START), Some(START + next), "{lease:?}");
    }
}

#[test]
fn locks_that_are_held_for_a_moment_do_not_wake_the_watchdog_each_time() {
    let mut table = Table::default();
    // after, woken, when it looks next with nothing held
    for (number, after, woken, next) in [
        (1, 0, true, Some(at(10_000))),
        (2, 5, false, Some(at(10_000))),
        (3, 9_999, false, Some(at(10_000))),
        (4, 9_999, false, None),
        (5, 10_001, true, Some(at(20_001))),
    ] {
        let sent = at(after);
        assert_eq!(
            said(table.add(&grant(number), sent, sent)),
            vec!["wake"; usize::from(woken)],
            "{number}"
        );
        assert_eq!(said(table.remove(number)), ["empty"]);
        let looks = if number == 4 { at(10_000) } else { sent };
        assert_eq!(table.next_deadline(looks), next, "{number}");
    }
}

#[test]
fn grant_from_before_a_doubt_begins_suspect() {
    let mut table = Table::default();
    table.doubt(None, at(5));
    for (number, sent, actions, next) in [
        (1, at(5), vec!["wake"], at(10_005)),
        (2, at(4), vec!["suspect 2", "wake"], at(6)),
    ] {
        let grant = grant(number);
        assert_eq!(said(table.add(&grant, sent, at(6))), actions);
        assert_eq!(table.next_deadline(at(6)), Some(next));
    }
}

#[test]
fn closed_table_ends_what_it_has_and_what_comes() {
    let mut table = table_of(&[grant(1), grant(2)]);
    assert_eq!(table.close(Loss::Shutdown).len(), 2);
    assert!(table.close(Loss::RuntimeEnded).is_empty());
    let late = said(table.add(&grant(3), START, START));
    assert_eq!(late, ["end 3: Shutdown"], "the first reason stays");
    assert_eq!((table.len(), table.next_deadline(at(10_000))), (0, None));
}

#[test]
fn end_is_that_of_the_grants_that_are_meant() {
    let mut table = table_of(&[grant(1), grant(2)]);
    let mut end = |number| said(table.end(Loss::Gone, |grant| grant.number == number));
    assert_eq!(end(1), ["end 1: Gone"]);
    assert!(end(1).is_empty());
    assert_eq!(end(2), ["end 2: Gone", "empty"]);
}

#[test]
fn suspect_grant_between_two_holders_is_not_handed_off() {
    for failed in [false, true] {
        let grant = grant(1);
        let mut table = table_of(std::slice::from_ref(&grant));
        grant.state.borrow_mut().end(Loss::Released);
        let next = successor(&grant);
        if failed {
            reply(&mut table, at(2), START, no_answer());
        } else {
            table.doubt(None, at(2));
        }
        assert!(!table.replace(&next));
        assert!(!grant.state.borrow().may_be_handed_off(&RENEWED, at(2)));
    }
}

#[test]
fn reply_to_a_request_for_the_predecessor_is_the_successors() {
    let grant = grant(1);
    let mut table = table_of(std::slice::from_ref(&grant));
    table.look(at(10_000));
    assert_eq!(requests(&mut table, at(10_000)), [[1]]);
    let next = successor(&grant);
    assert!(table.replace(&next));
    // The one request is enough.
    table.doubt(None, at(11_000));
    table.look(at(11_000));
    assert!(requests(&mut table, at(11_000)).is_empty());
    // Its reply is the successor's. It was sent before the doubt, which it does not end.
    reply(&mut table, at(12_000), at(10_000), Ok(Renewal::Renewed));
    assert!(next.is_suspect());
    table.look(at(12_000));
    assert_eq!(requests(&mut table, at(12_000)), [[1]]);
    reply(&mut table, at(13_000), at(12_000), Ok(Renewal::Renewed));
    assert!(!next.is_suspect() && !grant.is_suspect());
    assert_eq!(table.len(), 1);
    table.remove(1);
    assert!(!table.replace(&next), "nothing is there to succeed");
}
