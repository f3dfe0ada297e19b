//! Many callers at once, waiters, and callers that went away.

use super::*;

/// A watcher of a record looks at the beginning, and when it is completed or released.
pub async fn a_watch_wakes_on_completion_and_release(a: &Records, b: &Records) {
    const SOON: Duration = Duration::from_secs(60);
    for complete in [true, false] {
        let key = fresh_key();
        let (token, _) = claimed(a, ask(&key), 1).await;
        let mut watches = [a.watch(&key), b.watch(&key), b.watch(&key)];
        for watch in &mut watches {
            timeout(SOON, watch.changed())
                .await
                .expect("a watch begins with a look");
        }
        is_running(b, &key, 1).await;
        if complete {
            a.complete(&key, &token, b"x".to_vec(), DAY).await.unwrap();
        } else {
            a.release(&key, &token).await.unwrap();
        }
        for watch in &mut watches {
            let woken = async {
                loop {
                    watch.changed().await;
                    // It may wake for nothing; a woken waiter looks again.
                    match reply(b, leaving(ask(&key))).await {
                        ClaimReply::InProgress { .. } => {}
                        other => break other,
                    }
                }
            };
            let found = timeout(SOON, woken).await.expect("it is told of the end");
            match found {
                ClaimReply::Completed { .. } => assert!(complete),
                // The first to look has it, and the next is told when that one releases it.
                ClaimReply::Claimed { .. } => {
                    assert!(!complete);
                    break;
                }
                other => panic!("woken, and found {other:?}"),
            }
        }
    }
}

/// However many ask at once, one has it; when it is done, all have its result.
pub async fn of_a_thousand_at_once_one_has_the_claim(a: &Records, b: &Records) {
    let key = fresh_key();
    let ask_all = || join_all((0..1000).map(|i| if i % 2 == 0 { a } else { b }.claim(ask(&key))));
    let mut begun = 0;
    for reply in ask_all().await {
        match reply.unwrap() {
            ClaimReply::Claimed { attempt: 1, .. } => begun += 1,
            ClaimReply::InProgress { attempt: 1, .. } => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(begun, 1);

    // The same of an orphan.
    let key = fresh_key();
    let (first, _) = orphan(a, &key).await;
    let requests: Vec<_> = (0..1000).map(|_| ask(&key)).collect();
    let claims = requests.iter().enumerate();
    let replies =
        join_all(claims.map(|(i, request)| if i % 2 == 0 { a } else { b }.claim(request.clone()))).await;
    let mut owner = None;
    for (request, reply) in requests.into_iter().zip(replies) {
        match reply.unwrap() {
            ClaimReply::Claimed { attempt: 2, .. } => assert!(owner.replace(request.token).is_none(), "two"),
            ClaimReply::InProgress { attempt: 2, .. } => {}
            other => panic!("{other:?}"),
        }
    }
    let owner = owner.expect("another claim took it over");
    assert_eq!(
        a.complete(&key, &first, b"first".to_vec(), DAY).await.unwrap(),
        NotOwner
    );
    let result: Vec<u8> = (0..100_000_u32).map(|i| i as u8).collect();
    assert_eq!(b.complete(&key, &owner, result.clone(), DAY).await.unwrap(), Done);
    for reply in join_all((0..1000).map(|i| if i % 2 == 0 { a } else { b }.claim(ask(&key)))).await {
        assert!(matches!(reply.unwrap(), ClaimReply::Completed { response } if response == result));
    }
}

/// An owner that comes late and one that takes over: one of them wins, and both know which.
pub async fn a_late_completion_and_a_takeover_exclude_each_other(a: &Records, b: &Records) {
    for _ in 0..50 {
        let key = fresh_key();
        let (token, _) = claimed(a, ask_for(&key, MS, DAY), 1).await;
        sleep(3 * MS).await;
        let (completed, taken) = tokio::join!(
            a.complete(&key, &token, b"late".to_vec(), DAY),
            b.claim(ask(&key))
        );
        match (completed.unwrap(), taken.unwrap()) {
            (Done, ClaimReply::Completed { response }) => assert_eq!(response, b"late"),
            // A server may answer so while the completion is being committed.
            (Done, ClaimReply::InProgress { .. }) => {
                eventually("its result is known", async || {
                    matches!(b.claim(ask(&key)).await.unwrap(), ClaimReply::Completed { response } if response == b"late")
                })
                .await;
            }
            (NotOwner, ClaimReply::Claimed { attempt: 2, .. }) => is_running(a, &key, 2).await,
            both => panic!("{both:?}"),
        }
    }
}

/// A release counts from when it was called, awaited or not.
pub async fn release_that_is_not_awaited_is_done(a: &Records, b: &Records) {
    let key = fresh_key();
    for _ in 0..20 {
        let (token, _) = claimed(a, ask(&key), 1).await;
        drop(a.release(&key, &token));
        let (token, _) = claimed(a, ask(&key), 1).await;
        a.release(&key, &token).await.unwrap();
    }
    claimed(b, ask(&key), 1).await;
}

/// A claim whose caller went away before the answer came is ended by its release.
pub async fn a_claim_that_was_given_up_is_ended_by_its_release(a: &Records, b: &Records) {
    for _ in 0..20 {
        let key = fresh_key();
        let request = ask(&key);
        let token = request.token.clone();
        // Polled once: asked, and not answered.
        let _ = timeout(Duration::ZERO, a.claim(request)).await;
        drop(a.release(&key, &token));
        eventually("the record is free again", || async {
            match reply(b, leaving(ask(&key))).await {
                ClaimReply::Claimed { attempt: 1, .. } => true,
                ClaimReply::InProgress { attempt: 1, .. } => false,
                other => panic!("{other:?}"),
            }
        })
        .await;
    }
}
