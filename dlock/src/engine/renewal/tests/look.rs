//! What is due, and what is asked of the store.

use super::*;

#[test]
fn look_renews_confirms_and_ends_what_is_due() {
    let max_hold = Terms {
        max_end: Some(START + LEASE),
        ..RENEWED
    };
    let ends_at = Some(at(29_700));
    // looked at after: requests, actions, next look
    for (kind, terms, is_suspect, after, requested, actions, next) in [
        (Kind::Mutex, RENEWED, false, 9_499, 0, vec![], Some(at(10_000))),
        // early, to travel with others
        (Kind::Mutex, RENEWED, false, 9_500, 1, vec![], ends_at),
        (Kind::Mutex, RENEWED, false, 10_000, 1, vec![], ends_at),
        (
            Kind::Mutex,
            RENEWED,
            false,
            29_700,
            0,
            vec!["end 1: Expired", "empty"],
            None,
        ),
        (
            Kind::Mutex,
            max_hold,
            false,
            29_700,
            0,
            vec!["end 1: MaxHold", "empty"],
            None,
        ),
        // a fixed lease is renewed by nothing, and its end does not come early
        (Kind::Mutex, FIXED, false, 29_699, 0, vec![], ends_at),
        (
            Kind::Mutex,
            FIXED,
            false,
            29_700,
            0,
            vec!["end 1: Expired", "empty"],
            None,
        ),
        // but where it is suspect, or a reader's, it is confirmed
        (Kind::Mutex, FIXED, true, 1_000, 1, vec![], ends_at),
        (Kind::Read, FIXED, false, 9_999, 0, vec![], Some(at(10_000))),
        (Kind::Read, FIXED, false, 10_000, 1, vec![], ends_at),
    ] {
        let row = format!("{kind} {terms:?} {is_suspect} {after}");
        let mut table = table_of(&[grant_of(1, kind, terms)]);
        if is_suspect {
            table.doubt(None, at(after));
        }
        assert_eq!(said(table.look(at(after))), actions, "{row}");
        assert_eq!(requests(&mut table, at(after)).len(), requested, "{row}");
        assert_eq!(table.next_deadline(at(after)), next, "{row}");
        // One request is enough.
        assert!(table.look(at(after)).is_empty(), "{row}");
        assert!(requests(&mut table, at(after)).is_empty(), "{row}");
    }
}

#[test]
fn request_asks_for_what_is_still_held_and_worth_it() {
    let max_hold = Terms {
        max_end: Some(at(10_005)),
        ..RENEWED
    };
    // all in one lane
    let grants = [
        grant(1),
        grant(3),
        grant_of(5, Kind::Mutex, max_hold),
        grant_of(
            7,
            Kind::Mutex,
            Terms {
                lease: s(24),
                ..RENEWED
            },
        ),
    ];
    let mut table = table_of(&grants);
    table.look(at(10_000));
    table.remove(3);
    let request = table.next_request(at(10_000)).unwrap();
    let asked: Vec<_> = request
        .grants
        .iter()
        .map(|(g, lease)| (g.number, *lease))
        .collect();
    assert_eq!(asked, [(7, s(24)), (1, s(30))]);
    // A sixth of what the first of them has left.
    assert_eq!(request.patience, (ms(23_760) - s(10)) / 6);
    assert!(!grants[2].is_asked(), "it ends in a moment");
    assert!(table.next_request(at(10_000)).is_none());
}

#[test]
fn request_of_released_grants_takes_no_room() {
    let mut table = Table::default();
    for number in 0..20 {
        table.add(&grant(2 * number), START, START);
        table.look(at(10_000));
        table.remove(2 * number);
        assert!(table.next_request(at(10_000)).is_none());
    }
    table.add(&grant(2), START, START);
    table.look(at(10_000));
    assert_eq!(requests(&mut table, at(10_000)), [[2]]);
}

#[test]
fn many_grants_are_spread_once_and_stay_together() {
    let grants: Vec<_> = (0..20_000).map(grant).collect();
    let mut table = table_of(&grants);
    // Acquired at once, they are renewed over half of the period.
    let mut looks = Vec::new();
    while let Some(next) = table.next_deadline(at(20_000)).filter(|next| *next < at(20_000)) {
        table.look(next);
        for number in 0..2 {
            while let Some(request) = table.next_request(next) {
                table.request_done(request.lane, false);
                let replies = request.grants.iter().map(|(grant, lease)| Reply {
                    number: grant.number,
                    lease: *lease,
                    result: Ok(Renewal::Renewed),
                });
                let mut draws = 0;
                let draw = || {
                    draws += 1;
                    f64::from(number) / 2.0
                };
                assert!(table.replies(next, next, replies, draw).is_empty());
                assert_eq!(draws, 1, "one plan for a request");
            }
        }
        looks.push(next);
    }
    assert!(looks.len() > 10, "{looks:?}");
    assert!(looks[0] >= at(5_000) && looks[0] < at(6_000), "{looks:?}");
    for grant in &grants {
        assert_eq!(grant.judge(at(20_000)).0, HoldState::Held);
    }
}

#[test]
fn many_losses_are_signalled_together_within_half_the_safety_margin() {
    let lease = |number| LEASE + Duration::from_micros(1 + number);
    let grants: Vec<_> = (0..300)
        .map(|number| {
            let terms = Terms {
                lease: lease(number),
                ..RENEWED
            };
            grant_of(number, Kind::Mutex, terms)
        })
        .collect();
    let mut table = table_of(&grants);
    table.look(at(10_001));
    assert_eq!(table.next_deadline(at(10_001)), Some(at(29_710)));
    let said = said(table.look(at(29_710)));
    assert_eq!((said.len(), table.len()), (301, 0));
}

/// A store sends a statement or a call for each request.
#[test]
fn ten_thousand_grants_are_renewed_by_at_most_sixty_requests_in_a_third_of_their_lease() {
    // All in one lane.
    let grants: Vec<_> = (0..10_000).map(|number| grant(2 * number)).collect();
    let mut table = table_of(&grants);
    let (mut sent, mut drawn) = (Vec::new(), 0_u32);
    while let Some(next) = table.next_deadline(START).filter(|next| *next < at(200_000)) {
        table.look(next);
        while let Some(request) = table.next_request(next) {
            table.request_done(request.lane, false);
            sent.push(next);
            let replies = request.grants.iter().map(|(grant, lease)| Reply {
                number: grant.number,
                lease: *lease,
                result: Ok(Renewal::Renewed),
            });
            let draw = || {
                drawn += 1;
                (f64::from(drawn) * 0.618).fract()
            };
            assert!(table.replies(next, next, replies, draw).is_empty());
        }
    }
    for from in (0..190_000).step_by(1_000) {
        let third = at(from)..at(from + 10_000);
        let count = sent.iter().filter(|moment| third.contains(moment)).count();
        assert!((40..=60).contains(&count), "{count} from {from}");
    }
}
