//! How long claims and records last.

use std::time::Instant;

use super::*;
use crate::faults::in_rounds;

/// From the claim on the record is kept for the retention, after a crash too, and no longer.
pub async fn the_retention_counts_from_the_claim(a: &Records, b: &Records) {
    in_rounds("it is asked for while it is kept", async || {
        let key = fresh_key();
        let claimed_at = Instant::now();
        claimed(a, ask_for(&key, MS, 2 * LATER), 1).await;
        sleep(SHORT).await;
        let kept = reply(b, ask_other(&key)).await;
        if kept != ClaimReply::Mismatch {
            assert!(claimed_at.elapsed() >= 2 * LATER, "{kept:?}");
            return Err(kept);
        }
        sleep(2 * LATER).await;
        claimed(b, ask_other(&key), 1).await;
        Ok(())
    })
    .await;
}

/// The retention restarts at the completion.
pub async fn the_retention_counts_anew_from_the_completion(a: &Records, b: &Records) {
    in_rounds("it is completed while it is kept", async || {
        let (long, short) = (fresh_key(), fresh_key());
        let (token, _) = claimed(a, ask_for(&long, SHORT, SHORT), 1).await;
        let completed = a.complete(&long, &token, b"x".to_vec(), DAY).await.unwrap();
        if completed != Done {
            return Err(completed);
        }
        let (token, _) = claimed(a, ask(&short), 1).await;
        a.complete(&short, &token, b"x".to_vec(), SHORT).await.unwrap();
        sleep(LATER).await;
        is_completed(b, &long, b"x").await;
        claimed(b, ask(&short), 1).await;
        Ok(())
    })
    .await;
}

/// The lease is never longer than the record.
pub async fn a_record_outlives_its_lease(a: &Records, b: &Records) {
    in_rounds("it is extended while it is kept", async || {
        let (at_claim, at_extend) = (fresh_key(), fresh_key());
        claimed(a, ask_for(&at_claim, HOUR, MS), 1).await;
        let (token, _) = claimed(a, ask_for(&at_extend, SHORT, MS), 1).await;
        let extended = a.extend(&at_extend, &token, HOUR, MS).await.unwrap();
        if extended != Done {
            return Err(extended);
        }
        sleep(LATER).await;
        is_running(b, &at_claim, 1).await;
        is_running(b, &at_extend, 1).await;
        Ok(())
    })
    .await;
}

/// An extension sets the lease anew, and keeps the record as long as it was to be kept before.
pub async fn an_extension_keeps_both_times(a: &Records, b: &Records) {
    let (lease, retention, less) = in_rounds("they are extended while they are kept", async || {
        let (lease, retention, less) = (fresh_key(), fresh_key(), fresh_key());
        for (key, by, keep) in [(&lease, HOUR, SHORT), (&retention, SHORT, DAY)] {
            let (token, _) = claimed(a, ask_for(key, SHORT, SHORT), 1).await;
            let extended = a.extend(key, &token, by, keep).await.unwrap();
            if extended != Done {
                return Err(extended);
            }
        }
        Ok((lease, retention, less))
    })
    .await;
    let (token, _) = claimed(a, ask(&less), 1).await;
    a.extend(&less, &token, SHORT, MS).await.unwrap();
    sleep(LATER).await;
    is_running(b, &lease, 1).await;
    assert_eq!(reply(b, ask_other(&retention)).await, ClaimReply::Mismatch);
    claimed(b, ask(&retention), 2).await;
    assert_eq!(reply(b, ask_other(&less)).await, ClaimReply::Mismatch);
    claimed(b, ask(&less), 2).await;
    // A takeover with less retention shortens nothing either.
    let key = fresh_key();
    orphan(a, &key).await;
    claimed(b, ask_for(&key, MS, MS), 2).await;
    sleep(SHORT).await;
    assert_eq!(reply(a, ask_other(&key)).await, ClaimReply::Mismatch);
}

/// Times far in the future are times like others.
pub async fn times_may_be_as_long_as_they_like(a: &Records, b: &Records) {
    let key = fresh_key();
    let (token, _) = claimed(a, ask_for(&key, Duration::MAX, Duration::MAX), 1).await;
    assert!(matches!(reply(b, ask(&key)).await, ClaimReply::InProgress { .. }));
    assert_eq!(
        a.extend(&key, &token, Duration::MAX, Duration::MAX)
            .await
            .unwrap(),
        Done
    );
    assert_eq!(
        a.complete(&key, &token, b"x".to_vec(), Duration::MAX)
            .await
            .unwrap(),
        Done
    );
    is_completed(b, &key, b"x").await;
}
