//! Only the owner may change a record, until another client takes over.

use super::*;

/// A record of another owner, or of none, cannot be changed.
pub async fn only_the_owner_changes_a_record(a: &Records, b: &Records) {
    let stranger = ClaimToken::new();
    let key = fresh_key();
    changes(b, &key, &stranger, [NotOwner, NotOwner, Done]).await;
    let (token, fence) = claimed(a, ask(&key), 1).await;
    changes(b, &key, &stranger, [NotOwner; 3]).await;
    is_running(b, &key, 1).await;
    assert_eq!(claimed(a, by(&token, ask(&key)), 1).await.1, fence);
    a.complete(&key, &token, b"x".to_vec(), DAY).await.unwrap();
    changes(b, &key, &stranger, [NotOwner; 3]).await;
    is_completed(b, &key, b"x").await;

    let key = fresh_key();
    orphan(a, &key).await;
    changes(b, &key, &stranger, [NotOwner; 3]).await;
    assert_eq!(
        reply(b, leaving(ask(&key))).await,
        ClaimReply::Orphan { attempt: 1 }
    );
}

/// After the lease the next one takes over, as the next attempt with a greater fence, and the owner before
/// can do nothing any more.
pub async fn an_orphan_is_taken_over_and_its_owner_is_out(a: &Records, b: &Records) {
    let key = fresh_key();
    let (mut before, mut fence) = orphan(a, &key).await;
    for attempt in 2..6 {
        let (token, next) = claimed(b, ask_for(&key, 50 * MS, DAY), attempt).await;
        assert!(next > fence, "fence {next} after {fence}");
        changes(a, &key, &before, [NotOwner; 3]).await;
        (before, fence) = (token, next);
        sleep(80 * MS).await;
    }
    let (token, _) = claimed(a, ask(&key), 6).await;
    changes(b, &key, &before, [NotOwner; 3]).await;
    is_running(b, &key, 6).await;
    // Its repeated claim belongs to another owner now.
    assert!(matches!(
        reply(b, by(&before, ask(&key))).await,
        ClaimReply::InProgress { attempt: 6, .. }
    ));
    assert_eq!(
        a.complete(&key, &token, b"six".to_vec(), DAY).await.unwrap(),
        Done
    );
    is_completed(b, &key, b"six").await;
}

/// With `Leave` no claim takes over, and every caller is told which attempt it was.
pub async fn an_orphan_can_be_left(a: &Records, b: &Records) {
    let key = fresh_key();
    let (token, _) = orphan(a, &key).await;
    for records in [a, b] {
        assert_eq!(
            reply(records, leaving(ask(&key))).await,
            ClaimReply::Orphan { attempt: 1 }
        );
    }
    // Its owner is not dead after all.
    assert_eq!(
        a.complete(&key, &token, b"late".to_vec(), DAY).await.unwrap(),
        Done
    );
    is_completed(b, &key, b"late").await;
}

/// As long as no other owner took over, the claim is its owner's, lease or no lease.
pub async fn the_owner_of_an_orphan_may_go_on(a: &Records, b: &Records) {
    let key = fresh_key();
    let (token, fence) = orphan(a, &key).await;
    assert_eq!(a.extend(&key, &token, HOUR, DAY).await.unwrap(), Done);
    is_running(b, &key, 1).await;

    let key = fresh_key();
    let (token2, fence2) = orphan(a, &key).await;
    assert!(fence2 > fence && token2 != token);
    let again = claimed(a, by(&token2, leaving(ask(&key))), 1).await;
    assert_eq!(again.1, fence2);
    is_running(b, &key, 1).await;
}

/// A step that is sent again is done, and does no more than once.
pub async fn steps_may_be_repeated(a: &Records, b: &Records) {
    let key = fresh_key();
    let (token, _) = claimed(a, ask(&key), 1).await;
    for _ in 0..3 {
        assert_eq!(a.extend(&key, &token, HOUR, DAY).await.unwrap(), Done);
    }
    assert_eq!(
        a.complete(&key, &token, b"first".to_vec(), DAY).await.unwrap(),
        Done
    );
    assert_eq!(
        a.complete(&key, &token, b"second".to_vec(), MS).await.unwrap(),
        Done
    );
    assert_eq!(a.extend(&key, &token, MS, MS).await.unwrap(), Done);
    // A result is not released.
    assert_eq!(a.release(&key, &token).await.unwrap(), NotOwner);
    sleep(20 * MS).await;
    is_completed(b, &key, b"first").await;

    let key = fresh_key();
    let (token, _) = claimed(a, ask(&key), 1).await;
    for _ in 0..3 {
        assert_eq!(a.release(&key, &token).await.unwrap(), Done);
    }
    changes(a, &key, &token, [NotOwner, NotOwner, Done]).await;
    claimed(b, ask(&key), 1).await;
    changes(a, &key, &token, [NotOwner; 3]).await;
    is_running(b, &key, 1).await;
}

/// A released record is as if it had never been claimed, except for the fence.
pub async fn a_released_record_is_forgotten(a: &Records, b: &Records) {
    let key = fresh_key();
    let (token, fence) = claimed(a, ask(&key), 1).await;
    assert_eq!(a.release(&key, &token).await.unwrap(), Done);
    let (token, next) = claimed(b, ask_other(&key), 1).await;
    assert!(next > fence);
    assert_eq!(b.release(&key, &token).await.unwrap(), Done);
}

/// What an owner releases that had taken over stays an orphan: the effect of the former owner is unknown.
pub async fn a_released_takeover_is_an_orphan_again(a: &Records, b: &Records) {
    let key = fresh_key();
    orphan(a, &key).await;
    let (token, fence) = claimed(b, ask(&key), 2).await;
    for _ in 0..2 {
        assert_eq!(b.release(&key, &token).await.unwrap(), Done);
    }
    assert_eq!(b.extend(&key, &token, HOUR, DAY).await.unwrap(), NotOwner);
    assert_eq!(
        b.complete(&key, &token, b"x".to_vec(), DAY).await.unwrap(),
        NotOwner
    );
    assert_eq!(
        reply(a, leaving(ask(&key))).await,
        ClaimReply::Orphan { attempt: 1 }
    );
    assert_eq!(reply(a, ask_other(&key)).await, ClaimReply::Mismatch);
    let (token, next) = claimed(a, ask(&key), 2).await;
    assert!(next > fence);
    assert_eq!(a.complete(&key, &token, b"x".to_vec(), DAY).await.unwrap(), Done);
    is_completed(b, &key, b"x").await;
}

/// A claim that its owner gave up with an unknown outcome leaves its fingerprint and its attempts to the next one.
pub async fn abandoned_claim_keeps_its_fingerprint_and_its_attempts(a: &Records, b: &Records) {
    let key = fresh_key();
    let (mut token, mut fence) = claimed(a, ask(&key), 1).await;
    for attempt in 2..5 {
        let mut watch = b.watch(&key);
        assert_eq!(a.abandon(&key, &ClaimToken::new()).await.unwrap(), NotOwner);
        for _ in 0..2 {
            assert_eq!(a.abandon(&key, &token).await.unwrap(), Done);
        }
        tokio::time::timeout(Duration::from_secs(60), watch.changed())
            .await
            .expect("the waiters are notified");
        changes(b, &key, &token, [NotOwner, NotOwner, Done]).await;
        assert_eq!(reply(b, ask_other(&key)).await, ClaimReply::Mismatch);
        let attempts = attempt - 1;
        assert_eq!(
            reply(b, leaving(ask(&key))).await,
            ClaimReply::Orphan { attempt: attempts }
        );
        let next = claimed(b, ask(&key), attempt).await;
        assert!(next.1 > fence);
        (token, fence) = next;
    }
    assert_eq!(a.complete(&key, &token, b"x".to_vec(), DAY).await.unwrap(), Done);
    assert_eq!(a.abandon(&key, &token).await.unwrap(), NotOwner);
    is_completed(b, &key, b"x").await;
}
