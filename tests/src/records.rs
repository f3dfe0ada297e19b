//! The rules of records, for every store: what `dlock::record` states, said by tests.
//!
//! Each rule is given two handles on one store, as two processes have them, and makes keys of its own, so
//! that all may run on one store at a time. [`record_suite!`](crate::record_suite) makes a test of each:
//!
//! ```text
//! /// What has to live as long as the test, and the records as two processes see them.
//! async fn on_my_store() -> (MyServer, Records, Records) { … }
//! dlock_tests::record_suite!(on_my_store);
//! ```
//!
//! [`a_store_that_lost_its_data`] and [`a_record_that_cannot_be_read`] need access to the store's data besides.

use std::time::Duration;

use dlock::record::{ClaimReply, ClaimRequest, ClaimToken, OnOrphan, OwnerReply, RecordKey, Records};
use dlock::store::{Outcome, Reason, StoreError};
use futures_util::future::join_all;
use tokio::time::{sleep, timeout};

use OwnerReply::{Done, NotOwner};

use crate::eventually;

mod answers;
mod crowds;
mod owners;
mod slots;
mod times;

pub use answers::*;
pub use crowds::*;
pub use owners::*;
pub use slots::*;
pub use times::*;

const MS: Duration = Duration::from_millis(1);
const HOUR: Duration = Duration::from_secs(60 * 60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// A time that is soon over, and one after it.
const SHORT: Duration = Duration::from_millis(100);
const LATER: Duration = Duration::from_millis(250);

/// An unused key.
pub fn fresh_key() -> RecordKey {
    RecordKey::new(format!("rule-{:032x}", fastrand::u128(..))).expect("letters, digits and a dash")
}

/// A claim of this record by a new owner: for an hour, and a day of retention.
pub fn ask(key: &RecordKey) -> ClaimRequest {
    ClaimRequest::new(key.clone(), ClaimToken::new(), [7; 32], HOUR, DAY)
}

/// The same, with these times.
pub fn ask_for(key: &RecordKey, lease: Duration, retention: Duration) -> ClaimRequest {
    let mut request = ask(key);
    (request.lease, request.retention) = (lease, retention);
    request
}

/// The same, for something else.
pub fn ask_other(key: &RecordKey) -> ClaimRequest {
    let mut request = ask(key);
    request.fingerprint = [8; 32];
    request
}

/// The same claim, by this owner.
pub fn by(token: &ClaimToken, mut request: ClaimRequest) -> ClaimRequest {
    request.token = token.clone();
    request
}

/// The same claim, that takes no orphan over.
pub fn leaving(mut request: ClaimRequest) -> ClaimRequest {
    request.on_orphan = OnOrphan::Leave;
    request
}

/// Claims, and sees that it got it as this attempt: the token, and the fence.
///
/// # Panics
/// When it did not.
pub async fn claimed(records: &Records, request: ClaimRequest, attempt: u32) -> (ClaimToken, u64) {
    let token = request.token.clone();
    match records.claim(request).await.expect("the store is there") {
        ClaimReply::Claimed { attempt: is, fence } if is == attempt => (token, fence),
        other => panic!("expected attempt {attempt}, got {other:?}"),
    }
}

/// A claim whose owner is gone.
async fn orphan(records: &Records, key: &RecordKey) -> (ClaimToken, u64) {
    let first = claimed(records, ask_for(key, MS, DAY), 1).await;
    sleep(20 * MS).await;
    first
}

async fn reply(records: &Records, request: ClaimRequest) -> ClaimReply {
    records.claim(request).await.expect("the store is there")
}

async fn is_running(records: &Records, key: &RecordKey, is: u32) {
    match reply(records, ask(key)).await {
        ClaimReply::InProgress { remaining, attempt } if attempt == is => {
            assert!(
                remaining <= HOUR && remaining > HOUR - Duration::from_secs(60),
                "{remaining:?}"
            );
        }
        other => panic!("expected attempt {is} in progress, got {other:?}"),
    }
}

async fn is_completed(records: &Records, key: &RecordKey, with: &[u8]) {
    // Not compared by assert_eq!, which would print megabytes.
    match reply(records, ask(key)).await {
        ClaimReply::Completed { response } => assert!(response == with, "another response came back"),
        other => panic!("expected a result, got {other:?}"),
    }
}

/// Every change under this token, and what each has to answer.
async fn changes(
    records: &Records,
    key: &RecordKey,
    token: &ClaimToken,
    [extend, complete, release]: [OwnerReply; 3],
) {
    assert_eq!(
        records.extend(key, token, DAY, DAY).await.unwrap(),
        extend,
        "extend"
    );
    assert_eq!(
        records.complete(key, token, b"stale".to_vec(), MS).await.unwrap(),
        complete,
        "complete"
    );
    assert_eq!(records.release(key, token).await.unwrap(), release, "release");
}

/// A store that lost its data has no records, and its fences go on growing.
pub async fn a_store_that_lost_its_data(a: &Records, b: &Records, lose: impl AsyncFnOnce()) {
    let (running, done) = (fresh_key(), fresh_key());
    let (token, _) = claimed(a, ask(&running), 1).await;
    let (done_by, fence) = claimed(a, ask(&done), 1).await;
    a.complete(&done, &done_by, b"x".to_vec(), DAY).await.unwrap();
    lose().await;
    changes(a, &running, &token, [NotOwner, NotOwner, Done]).await;
    changes(a, &done, &done_by, [NotOwner, NotOwner, Done]).await;
    for key in [running, done] {
        let (_, next) = claimed(b, ask(&key), 1).await;
        assert!(next > fence, "fence {next} after {fence}");
    }
}

/// What cannot be read is an error of every step, never a miss: `spoil` has put something else, or a record
/// of a newer format, where the store keeps the record of this key and token.
pub async fn a_record_that_cannot_be_read(records: &Records, key: &RecordKey, token: &ClaimToken) {
    fn taken<T: std::fmt::Debug>(step: &str, outcome: Result<T, StoreError>) {
        let error = outcome.expect_err(step);
        assert!(matches!(error.reason, Reason::KeyTaken(_)), "{step}: {error:?}");
        assert_eq!(error.outcome, Outcome::NotDone, "{step}: {error:?}");
    }
    taken("claim", records.claim(ask(key)).await);
    taken("claim of something else", records.claim(ask_other(key)).await);
    taken("claim by the owner", records.claim(by(token, ask(key))).await);
    taken("extend", records.extend(key, token, HOUR, DAY).await);
    taken("complete", records.complete(key, token, b"x".to_vec(), DAY).await);
    taken("release", records.release(key, token).await);
}

/// Makes a test of each rule. Takes an `async fn() -> (impl Sized, Records, Records)`.
#[macro_export]
macro_rules! record_suite {
    ($setup:path) => {
        $crate::record_suite! { $setup:
            the_first_to_ask_has_the_claim
            result_is_given_to_every_request
            a_result_comes_back_byte_for_byte
            another_fingerprint_is_a_mismatch_in_every_state
            a_result_comes_before_an_orphan
            only_the_owner_changes_a_record
            an_orphan_is_taken_over_and_its_owner_is_out
            an_orphan_can_be_left
            the_owner_of_an_orphan_may_go_on
            the_same_token_gets_the_same_answer
            steps_may_be_repeated
            a_released_record_is_forgotten
            a_released_takeover_is_an_orphan_again
            abandoned_claim_keeps_its_fingerprint_and_its_attempts
            the_retention_counts_from_the_claim
            the_retention_counts_anew_from_the_completion
            a_record_outlives_its_lease
            an_extension_keeps_both_times
            times_may_be_as_long_as_they_like
            a_watch_wakes_on_completion_and_release
            of_a_thousand_at_once_one_has_the_claim
            a_late_completion_and_a_takeover_exclude_each_other
            release_that_is_not_awaited_is_done
            a_claim_that_was_given_up_is_ended_by_its_release
            keys_are_told_apart
            slot_is_claimed_once_and_the_next_one_anew
            nearest_slot_is_by_the_clock_of_the_store
            work_of_an_earlier_slot_is_not_overtaken
            orphan_of_a_slot_is_taken_over_or_left
            released_slot_is_free_and_stays_known
            slot_ahead_of_the_clock_is_refused
            slots_and_other_work_of_one_name_do_not_mix
            of_many_at_once_one_has_the_slot
            record_is_seen_and_forgotten
        }
    };
    ($setup:path: $($rule:ident)*) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $rule() {
            let (_alive, a, b) = $setup().await;
            $crate::records::$rule(&a, &b).await;
        })*
    };
}
