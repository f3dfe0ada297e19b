//! The replies to a claim: its owner, the replies to others, and the order of the checks.

use super::*;

/// One caller claims the record; the others are told so, and for how long.
pub async fn the_first_to_ask_has_the_claim(a: &Records, b: &Records) {
    let key = fresh_key();
    claimed(a, ask(&key), 1).await;
    is_running(a, &key, 1).await;
    is_running(b, &key, 1).await;
    claimed(b, ask(&fresh_key()), 1).await;
}

/// Every caller gets the same result, however often it asks.
pub async fn result_is_given_to_every_request(a: &Records, b: &Records) {
    let key = fresh_key();
    let (token, _) = claimed(a, ask(&key), 1).await;
    assert_eq!(
        a.complete(&key, &token, b"done".to_vec(), DAY).await.unwrap(),
        Done
    );
    for records in [a, b, a, b] {
        is_completed(records, &key, b"done").await;
    }
    // The owner's own claim, sent once more.
    is_completed(a, &key, b"done").await;
    assert_eq!(
        reply(a, by(&token, ask(&key))).await,
        ClaimReply::Completed {
            response: b"done".to_vec()
        }
    );
}

/// Whatever bytes a result has, they come back: none, all there are, what looks like the store's own, text
/// that is not UTF-8, and megabytes.
pub async fn a_result_comes_back_byte_for_byte(a: &Records, b: &Records) {
    let all: Vec<u8> = (0..=255).cycle().take(1000).collect();
    let big: Vec<u8> = (0..4 * 1024 * 1024_u32).map(|i| (i ^ (i >> 8)) as u8).collect();
    let own = b"dlock1 c 0000000000000000 1 1 token \0\r\n$-1\r\n*2\r\n".to_vec();
    for response in [Vec::new(), vec![0], all, own, b"\xff\xfe\xc3(".to_vec(), big] {
        let key = fresh_key();
        let (token, _) = claimed(a, ask(&key), 1).await;
        assert_eq!(
            a.complete(&key, &token, response.clone(), DAY).await.unwrap(),
            Done
        );
        is_completed(b, &key, &response).await;
        // The times can still be told from what was asked, whatever the bytes are.
        assert_eq!(reply(b, ask_other(&key)).await, ClaimReply::Mismatch);
        assert_eq!(a.complete(&key, &token, response, DAY).await.unwrap(), Done);
    }
}

/// Mismatch comes first: before a result, a live claim and an orphan, and for the owner itself.
pub async fn another_fingerprint_is_a_mismatch_in_every_state(a: &Records, b: &Records) {
    let key = fresh_key();
    let (token, _) = claimed(a, ask(&key), 1).await;
    assert_eq!(reply(b, ask_other(&key)).await, ClaimReply::Mismatch);
    assert_eq!(reply(a, by(&token, ask_other(&key))).await, ClaimReply::Mismatch);
    is_running(b, &key, 1).await;
    a.complete(&key, &token, b"x".to_vec(), DAY).await.unwrap();
    assert_eq!(reply(b, ask_other(&key)).await, ClaimReply::Mismatch);
    is_completed(b, &key, b"x").await;

    let key = fresh_key();
    orphan(a, &key).await;
    let other = ask_other(&key);
    assert_eq!(reply(b, other.clone()).await, ClaimReply::Mismatch);
    assert_eq!(reply(b, leaving(other)).await, ClaimReply::Mismatch);
    claimed(b, ask(&key), 2).await;
    // One byte is enough, wherever it is.
    for at in [0, 15, 31] {
        let mut request = ask(&key);
        request.fingerprint[at] ^= 1;
        assert_eq!(reply(b, request).await, ClaimReply::Mismatch);
    }
}

/// A result is a result also when the lease under which it was made is over.
pub async fn a_result_comes_before_an_orphan(a: &Records, b: &Records) {
    let key = fresh_key();
    let (token, _) = claimed(a, ask_for(&key, MS, DAY), 1).await;
    assert_eq!(a.complete(&key, &token, b"x".to_vec(), DAY).await.unwrap(), Done);
    sleep(20 * MS).await;
    is_completed(b, &key, b"x").await;
    assert_eq!(
        reply(b, leaving(ask(&key))).await,
        ClaimReply::Completed {
            response: b"x".to_vec()
        }
    );
}

/// The same claim sent again has the same answer, and its lease from then on.
pub async fn the_same_token_gets_the_same_answer(a: &Records, b: &Records) {
    let key = fresh_key();
    let request = ask_for(&key, 20 * MS, DAY);
    let (token, fence) = claimed(a, request, 1).await;
    for records in [a, b] {
        let again = claimed(records, by(&token, ask(&key)), 1).await;
        assert_eq!(again.1, fence);
    }
    sleep(50 * MS).await;
    is_running(b, &key, 1).await;
    // A shorter one takes nothing away.
    claimed(a, by(&token, ask_for(&key, MS, MS)), 1).await;
    sleep(20 * MS).await;
    is_running(b, &key, 1).await;
}

/// Keys are compared exactly, up to the longest one.
pub async fn keys_are_told_apart(a: &Records, b: &Records) {
    let base = fresh_key();
    let longest = format!("{:x<128}", base.as_str());
    let names = [
        base.as_str().to_owned(),
        base.as_str().to_uppercase(),
        format!("{}-", base.as_str()),
        format!("{}_", base.as_str()),
        longest[..127].to_owned(),
        longest,
    ];
    for name in &names {
        claimed(a, ask(&RecordKey::new(name).unwrap()), 1).await;
    }
    for name in &names {
        is_running(b, &RecordKey::new(name).unwrap(), 1).await;
    }
}
