//! Slots of time, and what operators see and forget.

use std::time::SystemTime;

use dlock::record::{ForgetReply, RecordState, RecordView, SlotOutcome, SlotReply, SlotRequest};

use super::*;

const SEC: Duration = Duration::from_secs(1);

async fn now(records: &Records) -> SystemTime {
    let look = records.inspect(&fresh_key(), false).await.unwrap();
    assert_eq!(look.record, None);
    look.now
}

async fn slot(records: &Records, request: ClaimRequest, slot: SlotRequest) -> SlotReply {
    records
        .claim_slot(request, slot)
        .await
        .expect("the store is there")
}

/// Claims this slot, and sees that it got it as this attempt: the token, and the fence.
async fn has(records: &Records, request: ClaimRequest, time: SystemTime, attempt: u32) -> (ClaimToken, u64) {
    let token = request.token.clone();
    let reply = slot(records, request, SlotRequest::at(time)).await;
    assert_eq!(reply.slot, time, "{reply:?}");
    match reply.outcome {
        SlotOutcome::Claim(ClaimReply::Claimed { attempt: is, fence }) if is == attempt => (token, fence),
        other => panic!("expected attempt {attempt}, got {other:?}"),
    }
}

async fn outcome(records: &Records, key: &RecordKey, time: SystemTime) -> SlotOutcome {
    slot(records, ask(key), SlotRequest::at(time)).await.outcome
}

fn done(response: &[u8]) -> SlotOutcome {
    SlotOutcome::Claim(ClaimReply::Completed {
        response: response.to_vec(),
    })
}

async fn seen(records: &Records, key: &RecordKey) -> RecordView {
    let look = records.inspect(key, true).await.unwrap();
    look.record.expect("it is kept")
}

/// A slot has one result, the next one another; of one that has passed nothing is done.
pub async fn slot_is_claimed_once_and_the_next_one_anew(a: &Records, b: &Records) {
    let key = fresh_key();
    let first = now(a).await - 3 * SEC;
    let (token, fence) = has(a, ask(&key), first, 1).await;
    assert_eq!(a.complete(&key, &token, b"1".to_vec(), DAY).await.unwrap(), Done);
    for records in [a, b] {
        assert_eq!(outcome(records, &key, first).await, done(b"1"));
        assert_eq!(outcome(records, &key, first - MS).await, SlotOutcome::Missed);
    }
    let reply = slot(b, ask(&key), SlotRequest::at(first)).await;
    assert_eq!(reply.last, Some(first));
    assert!(reply.now > first + 2 * SEC, "{reply:?}");
    let (next_token, next_fence) = has(b, ask(&key), first + SEC, 1).await;
    assert!(next_fence > fence);
    // The former owner changes nothing any more, and its claim does not stand up again.
    assert_eq!(
        a.complete(&key, &token, b"x".to_vec(), DAY).await.unwrap(),
        NotOwner
    );
    assert_eq!(
        b.complete(&key, &next_token, b"2".to_vec(), DAY).await.unwrap(),
        Done
    );
    let late = slot(b, by(&next_token, ask(&key)), SlotRequest::at(first + 2 * SEC)).await;
    assert_eq!(
        late.outcome,
        SlotOutcome::Missed,
        "a copy of a claim that was settled"
    );
    assert_eq!(outcome(a, &key, first).await, SlotOutcome::Missed);
    assert_eq!(outcome(a, &key, first + SEC).await, done(b"2"));
    assert_eq!(seen(a, &key).await.slot(), Some(first + SEC));
}

/// The nearest slot, and the claim that is made again keeps its slot.
pub async fn nearest_slot_is_by_the_clock_of_the_store(a: &Records, b: &Records) {
    let key = fresh_key();
    let hours = 6 * HOUR;
    let request = ask(&key);
    let reply = slot(a, request.clone(), SlotRequest::nearest(hours)).await;
    let since = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_micros();
    assert_eq!(since(reply.slot) % hours.as_micros(), 0);
    let off = since(reply.slot).abs_diff(since(reply.now));
    assert!(off <= hours.as_micros() / 2, "{reply:?}");
    let again = slot(a, request, SlotRequest::at(reply.now)).await;
    assert_eq!((again.slot, &again.outcome), (reply.slot, &reply.outcome));
    let other = slot(b, ask(&key), SlotRequest::nearest(hours)).await;
    assert!(
        matches!(
            other.outcome,
            SlotOutcome::Claim(ClaimReply::InProgress { attempt: 1, .. })
        ),
        "{other:?}"
    );
}

/// A slot that begins while the work of an earlier slot continues must wait for its end.
pub async fn work_of_an_earlier_slot_is_not_overtaken(a: &Records, b: &Records) {
    let key = fresh_key();
    let first = now(a).await - 3 * SEC;
    let (token, fence) = has(a, ask(&key), first, 1).await;
    let running = outcome(b, &key, first + SEC).await;
    assert!(
        matches!(
            running,
            SlotOutcome::Claim(ClaimReply::InProgress { attempt: 1, .. })
        ),
        "{running:?}"
    );
    match b.forget(&key).await.unwrap() {
        ForgetReply::Claimed {
            attempt: 1,
            fence: of,
            ..
        } => assert_eq!(of, fence),
        other => panic!("{other:?}"),
    }
    assert_eq!(a.abandon(&key, &token).await.unwrap(), Done);
    // The state of the earlier slot does not affect the next one.
    let next = leaving(ask(&key));
    has(b, next, first + SEC, 1).await;
}

/// An attempt that crashed is taken over within its slot, or left.
pub async fn orphan_of_a_slot_is_taken_over_or_left(a: &Records, b: &Records) {
    let key = fresh_key();
    let first = now(a).await - 3 * SEC;
    has(a, ask_for(&key, MS, DAY), first, 1).await;
    sleep(20 * MS).await;
    let left = slot(b, leaving(ask(&key)), SlotRequest::at(first)).await.outcome;
    assert_eq!(left, SlotOutcome::Claim(ClaimReply::Orphan { attempt: 1 }));
    let (token, _) = has(b, ask(&key), first, 2).await;
    assert_eq!(b.release(&key, &token).await.unwrap(), Done);
    has(a, ask(&key), first, 2).await;
}

/// A slot that was released may be claimed again, and no earlier one.
pub async fn released_slot_is_free_and_stays_known(a: &Records, b: &Records) {
    let key = fresh_key();
    let first = now(a).await - 3 * SEC;
    let (token, _) = has(a, ask(&key), first, 1).await;
    assert_eq!(a.release(&key, &token).await.unwrap(), Done);
    assert_eq!(a.release(&key, &token).await.unwrap(), Done);
    assert_eq!(
        a.complete(&key, &token, b"x".to_vec(), DAY).await.unwrap(),
        NotOwner
    );
    assert_eq!(a.extend(&key, &token, HOUR, DAY).await.unwrap(), NotOwner);
    let view = seen(b, &key).await;
    assert_eq!(
        (view.state.clone(), view.slot()),
        (RecordState::Released, Some(first))
    );
    assert!(view.expires_in > DAY / 2, "{view:?}");
    assert_eq!(outcome(b, &key, first - SEC).await, SlotOutcome::Missed);
    let late = slot(a, by(&token, ask(&key)), SlotRequest::at(first)).await;
    assert_eq!(
        late.outcome,
        SlotOutcome::Missed,
        "a copy of a claim that was released"
    );
    has(b, leaving(ask(&key)), first, 1).await;
}

/// A slot too far ahead is refused; a record that has one is not believed.
pub async fn slot_ahead_of_the_clock_is_refused(a: &Records, b: &Records) {
    let key = fresh_key();
    let ahead = now(a).await + 2 * HOUR;
    assert_eq!(outcome(a, &key, ahead).await, SlotOutcome::TooFarAhead);
    assert!(a.inspect(&key, false).await.unwrap().record.is_none());
    // With a long period it makes sense: the nearest slot may be half a period ago.
    let reply = slot(a, ask(&key), SlotRequest::at(ahead).with_period(5 * HOUR)).await;
    assert!(
        matches!(reply.outcome, SlotOutcome::Claim(ClaimReply::Claimed { .. })),
        "{reply:?}"
    );
    let reply = slot(b, ask(&key), SlotRequest::nearest(SEC)).await;
    assert_eq!(reply.outcome, SlotOutcome::ClockWentBack);
    assert_eq!(reply.last, Some(ahead));
    // It is kept as long as one that has begun, from its beginning on.
    let early = ask_for(&fresh_key(), 30 * SEC, 24 * HOUR);
    let reply = slot(a, early.clone(), SlotRequest::at(ahead).with_period(5 * HOUR)).await;
    assert!(matches!(reply.outcome, SlotOutcome::Claim(_)), "{reply:?}");
    let kept = a
        .inspect(&early.key, false)
        .await
        .unwrap()
        .record
        .expect("a record");
    assert!(kept.expires_in > 25 * HOUR, "{:?}", kept.expires_in);
    // One that is older than what is kept.
    let old = ask_for(&fresh_key(), SEC, HOUR);
    let reply = slot(b, old.clone(), SlotRequest::at(reply.now - 2 * HOUR)).await;
    assert_eq!(reply.outcome, SlotOutcome::Missed);
    assert!(b.inspect(&old.key, false).await.unwrap().record.is_none());
}

/// A name has slots or not.
pub async fn slots_and_other_work_of_one_name_do_not_mix(a: &Records, b: &Records) {
    let (with, without) = (fresh_key(), fresh_key());
    let first = now(a).await;
    has(a, ask(&with), first, 1).await;
    claimed(a, ask(&without), 1).await;
    assert_eq!(reply(b, ask(&with)).await, ClaimReply::Mismatch);
    // Whatever the slot.
    for time in [first, first + 1000 * DAY] {
        let mixed = outcome(b, &without, time).await;
        assert_eq!(mixed, SlotOutcome::Claim(ClaimReply::Mismatch));
    }
    // The record of a slot stays when its claim is released, and so does that it is one of slots.
    let released = fresh_key();
    let request = ask(&released);
    has(a, request.clone(), first, 1).await;
    assert_eq!(a.release(&released, &request.token).await.unwrap(), Done);
    assert_eq!(reply(b, ask(&released)).await, ClaimReply::Mismatch);
    has(b, ask(&released), first, 1).await;
}

/// If many callers claim a slot at once, one gets it.
pub async fn of_many_at_once_one_has_the_slot(a: &Records, b: &Records) {
    let key = fresh_key();
    let first = now(a).await - 20 * SEC;
    for n in 0..10 {
        let time = first + n * SEC;
        let claims = (0..20).map(|i| {
            let (records, request) = (if i % 2 == 0 { a } else { b }, ask(&key));
            async move {
                (
                    request.token.clone(),
                    slot(records, request, SlotRequest::at(time)).await.outcome,
                )
            }
        });
        let replies = join_all(claims).await;
        let mut winners = replies
            .iter()
            .filter(|(_, outcome)| matches!(outcome, SlotOutcome::Claim(ClaimReply::Claimed { .. })));
        let (token, _) = winners.next().expect("one of them");
        assert_eq!(winners.next(), None);
        assert_eq!(a.complete(&key, token, vec![n as u8], DAY).await.unwrap(), Done);
    }
    assert_eq!(outcome(b, &key, first + 9 * SEC).await, done(&[9]));
}

/// An operator sees what became of a record, and forgets it.
pub async fn record_is_seen_and_forgotten(a: &Records, b: &Records) {
    let key = fresh_key();
    assert_eq!(a.forget(&key).await.unwrap(), ForgetReply::Missing);
    let (token, fence) = claimed(a, ask(&key), 1).await;
    let view = seen(b, &key).await;
    assert!(
        matches!(view.state, RecordState::Claimed { remaining, .. } if remaining <= HOUR && remaining > HOUR / 2),
        "{view:?}"
    );
    assert_eq!((view.attempt, view.fence, view.slot()), (1, fence, None));
    assert_eq!(view.fingerprint, [7; 32]);
    assert!(view.expires_in <= DAY && view.expires_in > DAY / 2, "{view:?}");
    let kept = b.forget(&key).await.unwrap();
    assert!(
        matches!(kept, ForgetReply::Claimed { fence: of, .. } if of == fence),
        "{kept:?}"
    );
    assert_eq!(
        a.complete(&key, &token, b"wrong".to_vec(), HOUR).await.unwrap(),
        Done
    );
    let look = b.inspect(&key, false).await.unwrap().record.unwrap();
    assert_eq!(look.state, RecordState::completed(5, None));
    assert!(look.expires_in <= HOUR, "{look:?}");
    assert_eq!(
        seen(b, &key).await.state,
        RecordState::completed(5, Some(b"wrong".to_vec()))
    );
    assert_eq!(b.forget(&key).await.unwrap(), ForgetReply::Forgotten);
    assert_eq!(
        a.complete(&key, &token, b"wrong".to_vec(), HOUR).await.unwrap(),
        NotOwner
    );
    let (_, next) = claimed(a, ask(&key), 1).await;
    assert!(next > fence);

    let crashed = fresh_key();
    orphan(a, &crashed).await;
    assert_eq!(seen(b, &crashed).await.state, RecordState::Orphaned);
    assert_eq!(b.forget(&crashed).await.unwrap(), ForgetReply::Forgotten);
    claimed(a, ask(&crashed), 1).await;
}
