//! What replies mean.

use super::*;
use crate::store::{GivenLease, Reason};

#[test]
fn reply_confirms_ends_or_is_tried_again() {
    let key_taken = || {
        let reason = Reason::KeyTaken("a list".to_owned());
        Err(StoreError::not_done(reason, "taken"))
    };
    // replied after: actions, state, next look
    for (result, after, actions, state, next) in [
        // counts from the request
        (
            Ok(Renewal::Renewed),
            12_000,
            vec!["wake"],
            HoldState::Held,
            Some(at(20_000)),
        ),
        // an eighth of what is left, and not less than 20 ms
        (
            no_answer(),
            21_700,
            vec!["failed 1: no answer", "suspect 1: no answer", "wake"],
            HoldState::Suspect,
            Some(at(22_700)),
        ),
        (
            no_answer(),
            29_600,
            vec!["failed 1: no answer", "suspect 1: no answer", "wake"],
            HoldState::Suspect,
            Some(at(29_620)),
        ),
        // the next renewal is due after a third of the lease that was given
        (
            Ok(Renewal::RenewedFor(GivenLease::new(s(12)))),
            12_000,
            vec!["wake"],
            HoldState::Held,
            Some(at(14_000)),
        ),
        // of which some was over; longer than asked is as asked
        (
            Ok(Renewal::RenewedFor(GivenLease::new(s(45)).elapsed(s(6)))),
            12_000,
            vec!["wake"],
            HoldState::Held,
            Some(at(14_000)),
        ),
        // the deadline stays at 29.7 s
        (
            Ok(Renewal::Held),
            21_700,
            vec!["wake"],
            HoldState::Held,
            Some(at(22_700)),
        ),
        (
            Ok(Renewal::Held),
            29_700,
            vec!["end 1: Expired", "empty"],
            HoldState::Lost(Loss::Expired),
            None,
        ),
        (
            Ok(Renewal::Gone),
            12_000,
            vec!["end 1: Gone", "empty"],
            HoldState::Held,
            None,
        ),
        (
            key_taken(),
            12_000,
            vec!["end 1: Gone", "empty"],
            HoldState::Held,
            None,
        ),
        // what was lost before the reply came stays lost
        (
            Ok(Renewal::Renewed),
            29_700,
            vec!["end 1: Expired", "empty"],
            HoldState::Lost(Loss::Expired),
            None,
        ),
        (
            Ok(Renewal::Gone),
            29_700,
            vec!["end 1: Expired", "empty"],
            HoldState::Lost(Loss::Expired),
            None,
        ),
        (
            no_answer(),
            29_700,
            vec!["end 1: Expired", "empty"],
            HoldState::Lost(Loss::Expired),
            None,
        ),
    ] {
        let row = format!("{result:?} {after}");
        let grant = grant(1);
        let mut table = table_of(std::slice::from_ref(&grant));
        table.look(at(10_000));
        assert_eq!(requests(&mut table, at(10_000)), [[1]]);
        table.next_deadline(at(10_000));
        assert_eq!(reply(&mut table, at(after), at(10_000), result), actions, "{row}");
        assert_eq!(grant.judge(at(after)).0, state, "{row}");
        assert_eq!(table.schedule.first(), next, "{row}");
        assert_eq!(table.has(1), next.is_some(), "{row}");
    }
}

#[test]
fn given_lease_moves_the_deadline_from_when_it_counts() {
    // what the store says at 10 s: until when the grant is held then, less the safety margin of 300 ms
    for (result, until) in [
        (Renewal::Renewed, at(39_700)),
        (
            Renewal::RenewedFor(GivenLease::new(LEASE).elapsed(s(8))),
            at(31_700),
        ),
        // never earlier than what was confirmed before
        (Renewal::RenewedFor(GivenLease::new(s(15))), at(29_700)),
        (Renewal::Held, at(29_700)),
    ] {
        let grant = grant(1);
        let mut table = table_of(std::slice::from_ref(&grant));
        reply(&mut table, at(12_000), at(10_000), Ok(result));
        assert_eq!(grant.judge(at(12_000)).1, until, "{result:?}");
    }
}

/// A fixed lease asks for its rest, of which an earlier beginning takes nothing.
#[test]
fn confirmation_by_a_lease_that_began_earlier_shortens_no_fixed_lease() {
    // what the store says at 20 s, when 10 s are left: until when the grant is held then
    for (given, until) in [
        (GivenLease::new(LEASE), at(29_700)),
        (GivenLease::new(LEASE).elapsed(s(8)), at(29_700)),
        (GivenLease::new(s(60)).elapsed(s(25)), at(29_700)),
    ] {
        let grant = grant_of(1, Kind::Read, FIXED);
        let mut table = table_of(std::slice::from_ref(&grant));
        let reply = Reply {
            number: 1,
            lease: s(10),
            result: Ok(Renewal::RenewedFor(given)),
        };
        table.replies(at(20_100), at(20_000), std::iter::once(reply), || 0.5);
        assert_eq!(grant.judge(at(20_100)).1, until, "{given:?}");
    }
}

#[test]
fn session_that_was_extended_long_ago_is_not_asked_again_and_again() {
    let grant = grant(1);
    let mut table = table_of(std::slice::from_ref(&grant));
    let given = GivenLease::new(LEASE).elapsed(s(12));
    reply(&mut table, at(10_100), at(10_000), Ok(Renewal::RenewedFor(given)));
    // An eighth of what is left.
    let deadline = at(29_700);
    assert_eq!(
        table.next_deadline(at(10_100)),
        Some(at(10_100) + deadline.since(at(10_100)) / 8)
    );
}

#[test]
fn held_ends_no_suspicion() {
    let grant = grant(1);
    let mut table = table_of(std::slice::from_ref(&grant));
    reply(&mut table, at(11_000), at(10_000), no_answer());
    reply(&mut table, at(13_000), at(12_000), Ok(Renewal::Held));
    assert_eq!(grant.judge(at(13_000)).0, HoldState::Suspect);
}

#[test]
fn suspect_grant_is_told_of_once_and_tried_again_until_it_is_confirmed() {
    let grant = grant(1);
    let mut table = table_of(std::slice::from_ref(&grant));
    let failed = || "failed 1: no answer".to_owned();
    let first = reply(&mut table, at(11_000), at(10_000), no_answer());
    assert_eq!(first[..2], [failed(), "suspect 1: no answer".to_owned()]);
    let second = reply(&mut table, at(14_000), at(13_000), no_answer());
    assert_eq!(second[0], failed());
    assert!(!second.iter().any(|action| action.starts_with("suspect")));
    reply(&mut table, at(15_000), at(14_000), Ok(Renewal::Renewed));
    assert_eq!(grant.judge(at(15_000)).0, HoldState::Held);
}

#[test]
fn reply_to_a_released_grant_says_nothing() {
    let mut table = table_of(&[grant(1), grant(3)]);
    assert!(table.remove(1).is_empty());
    for result in [Ok(Renewal::Gone), Ok(Renewal::Renewed), no_answer()] {
        assert!(reply(&mut table, at(2), START, result).is_empty());
    }
    assert_eq!(said(table.remove(3)), ["empty"]);
    assert!(table.remove(3).is_empty());
}

#[test]
fn lane_in_doubt_is_confirmed_at_once_by_newer_requests() {
    let (one, two) = (grant(1), grant(2));
    let mut table = table_of(&[one.clone(), two.clone()]);
    let doubt = at(1_000);
    assert_eq!(said(table.doubt(Some(one.lane), doubt)), ["suspect 1"]);
    assert!(table.doubt(Some(one.lane), doubt).is_empty(), "told before");
    assert!(one.is_suspect() && !two.is_suspect());
    assert_eq!(table.next_deadline(doubt), Some(doubt));
    table.look(doubt);
    assert_eq!(requests(&mut table, doubt), [[1]]);
    // A reply to a request from before the doubt ends nothing, and is followed by another one.
    for (sent, state, next) in [
        (at(999), HoldState::Suspect, at(1_002)),
        (doubt, HoldState::Held, at(10_000)),
    ] {
        reply(&mut table, at(1_002), sent, Ok(Renewal::Renewed));
        assert_eq!(one.judge(at(1_002)).0, state, "{sent:?}");
        assert_eq!(table.next_deadline(at(1_002)), Some(next), "{sent:?}");
    }
}

#[test]
fn grant_that_enters_after_its_doubt_is_confirmed_at_once() {
    let (held, earlier, later) = (grant(1), grant(2), grant(3));
    let mut table = table_of(std::slice::from_ref(&held));
    let doubt = at(1_000);
    table.doubt_entering(doubt);
    assert!(!held.is_suspect());
    assert_eq!(
        said(table.add(&earlier, at(999), at(1_001))),
        ["suspect 2", "wake"]
    );
    assert!(said(table.add(&later, doubt, at(1_001))).is_empty());
    assert!(earlier.is_suspect() && !later.is_suspect());
    table.look(at(1_001));
    assert_eq!(requests(&mut table, at(1_001)), [[2]]);
}

#[test]
fn many_confirmed_grants_are_renewed_earlier_by_what_was_drawn() {
    // grants, drawn: next look
    for (grants, drawn, next) in [
        (2, 0.5, at(20_000)),
        (300, 0.0, at(20_000)),
        (300, 0.5, at(19_000)),
        (300, 0.99, at(18_000)),
    ] {
        let grants: Vec<_> = (0..grants).map(grant).collect();
        let mut table = table_of(&grants);
        let replies = grants.iter().map(|grant| Reply {
            number: grant.number,
            lease: LEASE,
            result: Ok(Renewal::Renewed),
        });
        table.replies(at(10_100), at(10_000), replies, || drawn);
        assert_eq!(
            table.next_deadline(at(10_100)),
            Some(next),
            "{} grants, {drawn}",
            grants.len()
        );
    }
}
