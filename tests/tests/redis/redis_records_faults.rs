//! Records while the network and the server fail: each step with its reply swallowed, and with its command
//! held back past the timeout and let go later, one by one. Each time the outcome is that without the fault,
//! or one clear error, and no claim stays without an owner.

use std::time::{Duration, Instant};

use dlock::record::{ClaimReply, ClaimRequest, ClaimToken, OwnerReply, RecordKey, Records};
use dlock::store::{Outcome, StoreError};
use dlock_tests::faults::{
    PATIENCE, SLACK, SOON, TIMEOUT, built, hasty_builder, in_rounds, is_back, patient, setting, step, within,
};
use dlock_tests::records::{ask, ask_for, by, claimed, fresh_key, leaving};
use dlock_tests::{Command, Direction, Proxy, Server, Store, eventually};
use futures_util::future::join_all;
use tokio::time::sleep;

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 3600);

fn name(key: &RecordKey) -> String {
    format!("dlock:record:{}", key.as_str())
}

/// Asks until there is an answer, and what that is. Whether it was asked more than once.
async fn insist<T, F>(asking: impl Fn() -> F) -> (T, bool)
where
    F: Future<Output = Result<T, StoreError>>,
{
    let begun = Instant::now();
    let mut again = false;
    while begun.elapsed() < PATIENCE {
        match within(TIMEOUT, "a step", asking()).await {
            Ok(answer) => return (answer, again),
            Err(error) if error.reason == dlock::store::Reason::Unreachable => sleep(20 * MS).await,
            Err(error) => panic!("{error:?}"),
        }
        again = true;
    }
    panic!("no answer, however often")
}

/// Waits until this record has no owner.
async fn is_given_back(store: &Store, key: &RecordKey, case: &str) {
    eventually(&format!("no claim stays without an owner: {case}"), || async {
        !store.as_server().keys().await.contains(&name(key))
    })
    .await;
}

/// The keys of one life, and their owners.
struct Life {
    done: RecordKey,
    done_by: ClaimToken,
    released: RecordKey,
    taken_over: RecordKey,
}

/// Every step once, each until it is answered; with faults or without the answers are the same.
async fn live(records: &Records) -> Life {
    let life = Life {
        done: fresh_key(),
        done_by: ClaimToken::new(),
        released: fresh_key(),
        taken_over: fresh_key(),
    };
    let claim = |request: ClaimRequest| async move { insist(|| records.claim(request.clone())).await.0 };
    let first = |reply| {
        assert!(
            matches!(reply, ClaimReply::Claimed { attempt: 1, .. }),
            "{reply:?}"
        )
    };

    let token = &life.done_by;
    first(claim(by(token, ask(&life.done))).await);
    let (reply, _) = insist(|| records.extend(&life.done, token, DAY, DAY)).await;
    assert_eq!(reply, OwnerReply::Done);
    let (reply, _) = insist(|| records.complete(&life.done, token, b"result".to_vec(), DAY)).await;
    assert_eq!(reply, OwnerReply::Done);
    let completed = ClaimReply::Completed {
        response: b"result".to_vec(),
    };
    assert_eq!(claim(ask(&life.done)).await, completed);

    first(claim(by(token, ask(&life.released))).await);
    let (reply, _) = insist(|| records.release(&life.released, token)).await;
    assert_eq!(reply, OwnerReply::Done);

    first(claim(ask_for(&life.taken_over, MS, DAY)).await);
    sleep(5 * MS).await;
    let reply = claim(by(token, ask(&life.taken_over))).await;
    assert!(
        matches!(reply, ClaimReply::Claimed { attempt: 2, .. }),
        "{reply:?}"
    );
    let (reply, _) = insist(|| records.release(&life.taken_over, token)).await;
    assert_eq!(reply, OwnerReply::Done);
    life
}

/// What must be there after such a life, now and when everything has arrived.
async fn check(beside: &Records, life: &Life) {
    let completed = ClaimReply::Completed {
        response: b"result".to_vec(),
    };
    assert_eq!(beside.claim(ask(&life.done)).await.unwrap(), completed);
    let orphan = beside.claim(leaving(ask(&life.taken_over))).await.unwrap();
    assert_eq!(orphan, ClaimReply::Orphan { attempt: 1 });
    let (token, _) = claimed(beside, ask(&life.released), 1).await;
    assert_eq!(
        beside.release(&life.released, &token).await.unwrap(),
        OwnerReply::Done
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_that_arrives_late_changes_nothing_whichever_it_is() {
    let mut k = 1;
    loop {
        let (store, proxy, client, beside) = setting().await;
        let (records, beside) = (client.records().unwrap(), beside.records().unwrap());
        let held = proxy.hold(k, Command::is_script);
        let life = live(&records).await;
        check(&beside, &life).await;
        if !held.fired() {
            break;
        }
        // Another client has the key that was released.
        let (other, _) = claimed(&beside, ask(&life.released), 1).await;
        held.release();
        held.answered().await;
        let reply = beside.claim(ask(&life.released)).await.unwrap();
        assert!(
            matches!(reply, ClaimReply::InProgress { attempt: 1, .. }),
            "{k}: {reply:?}"
        );
        let reply = beside.release(&life.released, &other).await.unwrap();
        assert_eq!(reply, OwnerReply::Done, "{k}");
        sleep(50 * MS).await;
        is_given_back(&store, &life.released, &k.to_string()).await;
        check(&beside, &life).await;
        k += 1;
    }
    assert!(k > 9, "only {k} calls");
}

/// A claim of which two copies are on their way: the first is kept back, its connection broke, and the
/// second was carried out. `given_up`: its caller does not even wait for the answer.
async fn a_copy_that_arrives_after_the_release(given_up: bool) {
    const LONG: Duration = Duration::from_secs(3);
    in_rounds(
        "the first copy arrives after the release and in time",
        async || {
            let store = Store::server().await;
            let proxy = Proxy::start(store.as_server().addr());
            let client = built(|| hasty_builder(&proxy.url()).timeout(LONG)).await;
            let (server, records, key) = (store.as_server(), client.records().unwrap(), fresh_key());
            let held = proxy.hold(1, step("claim"));
            let request = ask(&key);
            let token = request.token.clone();
            let begun = Instant::now();
            let claim = tokio::spawn({
                let records = records.clone();
                async move { records.claim(request).await }
            });
            held.caught().await;
            proxy.cut();
            // Else the release might go the way of the first copy, and end it there.
            is_back(&client).await;
            if given_up {
                claim.abort();
                let _ = claim.await;
            } else {
                match claim.await.unwrap() {
                    Ok(ClaimReply::Claimed { attempt: 1, .. }) => {}
                    Err(_) if begun.elapsed() >= LONG => return Err("the time of the claim was over"),
                    reply => panic!("{reply:?}"),
                }
            }
            // The release does not wait for what may yet arrive.
            let reply = within(SEC, "the release", records.release(&key, &token)).await;
            if begun.elapsed() >= LONG {
                return Err("the time of the claim was over before the release");
            }
            assert_eq!(reply.unwrap(), OwnerReply::Done);
            assert!(!server.keys().await.contains(&name(&key)));
            held.release();
            held.answered().await;
            if !server.keys().await.contains(&name(&key)) {
                return Err("the copy came too late to be a ghost");
            }
            eventually("the ghost is gone", || async {
                !server.keys().await.contains(&name(&key))
            })
            .await;
            assert!(begun.elapsed() < LONG + SLACK, "{:?}", begun.elapsed());
            Ok(())
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_copy_of_a_released_claim_is_no_ghost_for_long() {
    a_copy_that_arrives_after_the_release(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_copy_of_a_claim_that_was_given_up_is_no_ghost_for_long() {
    a_copy_that_arrives_after_the_release(true).await;
}

/// The claim took an orphan over and gave it back, which leaves an orphan: the copy is not one attempt more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_copy_of_a_released_claim_does_not_take_over_what_it_left() {
    let store = Store::server().await;
    let proxy = Proxy::start(store.as_server().addr());
    // Until then the copies are in time.
    let client = hasty_builder(&proxy.url()).timeout(20 * SEC).build();
    let client = client.await.unwrap();
    let (records, key) = (client.records().unwrap(), fresh_key());
    let beside = dlock_tests::faults::hasty(&store.as_server().url()).await;
    let beside = beside.records().unwrap();
    let first = beside.claim(ask_for(&key, MS, DAY)).await.unwrap();
    assert!(matches!(first, ClaimReply::Claimed { attempt: 1, .. }));
    sleep(5 * MS).await;

    let held = proxy.hold(1, step("claim"));
    let request = ask(&key);
    let token = request.token.clone();
    let (reply, ()) = tokio::join!(records.claim(request), async {
        held.caught().await;
        proxy.cut();
    });
    assert!(matches!(reply, Ok(ClaimReply::Claimed { attempt: 2, .. })));
    let reply = records.release(&key, &token).await.unwrap();
    assert_eq!(reply, OwnerReply::Done);
    held.release();
    let answer = held.answered().await;
    assert!(
        answer.windows(4).any(|part| part == b"late"),
        "{}",
        answer.escape_ascii()
    );
    let orphan = beside.claim(leaving(ask(&key))).await.unwrap();
    assert_eq!(orphan, ClaimReply::Orphan { attempt: 1 });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_copy_of_a_completed_claim_finds_the_result() {
    let store = Store::server().await;
    let proxy = Proxy::start(store.as_server().addr());
    let client = patient(&proxy.url()).await;
    let (records, key) = (client.records().unwrap(), fresh_key());
    let held = proxy.hold(1, step("claim"));
    let request = ask(&key);
    let token = request.token.clone();
    let (reply, _) = tokio::join!(records.claim(request), async {
        held.caught().await;
        proxy.cut();
    });
    assert!(matches!(reply, Ok(ClaimReply::Claimed { attempt: 1, .. })));
    let reply = records.complete(&key, &token, b"x".to_vec(), DAY).await.unwrap();
    assert_eq!(reply, OwnerReply::Done);
    held.release();
    held.answered().await;
    let completed = ClaimReply::Completed {
        response: b"x".to_vec(),
    };
    assert_eq!(records.claim(ask(&key)).await.unwrap(), completed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_that_stood_still_takes_no_claim_of_callers_that_went_away() {
    let (store, _proxy, client, beside) = setting().await;
    let (server, records) = (store.as_server(), client.records().unwrap());
    let keys: Vec<_> = (0..50).map(|_| fresh_key()).collect();
    server.stop();
    let failed = join_all(keys.iter().map(|key| async {
        let request = ask(key);
        let token = request.token.clone();
        let error = within(TIMEOUT, "the claim", records.claim(request))
            .await
            .unwrap_err();
        // As a layer does whose caller got its 503.
        drop(records.release(key, &token));
        error
    }));
    for error in failed.await {
        assert_eq!(error.reason, dlock::store::Reason::Unreachable, "{error:?}");
    }
    sleep(TIMEOUT).await;
    server.cont();
    is_back(&client).await;
    is_back(&beside).await;
    sleep(2 * TIMEOUT).await;
    eventually("no claim is left", || async {
        server.keys().await.iter().all(|key| key == "dlock:fence")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_learns_of_changes_that_it_was_not_notified_of() {
    let (_store, proxy, client, beside) = setting().await;
    let (records, beside) = (client.records().unwrap(), beside.records().unwrap());
    let key = fresh_key();
    let (token, _) = claimed(&beside, ask(&key), 1).await;
    let mut watch = records.watch(&key);
    watch.changed().await;
    proxy.block(Direction::Both);
    proxy.cut();
    beside.complete(&key, &token, b"x".to_vec(), DAY).await.unwrap();
    proxy.unblock(Direction::Both);
    let found = async {
        loop {
            watch.changed().await;
            if let Ok(ClaimReply::Completed { .. }) = records.claim(ask(&key)).await {
                break;
            }
        }
    };
    within(SOON, "the look", found).await;
}

/// A replica answers reads and refuses changes: an error that says so.
#[tokio::test]
async fn a_replica_refuses() {
    let flavor = dlock_tests::Flavor::from_env();
    let master = Server::start(flavor).await;
    let replica = Server::builder(flavor).replica_of(master.addr()).start().await;
    let records = patient(&replica.url()).await.records().unwrap();
    let error = records.claim(ask(&fresh_key())).await.unwrap_err();
    assert!(error.message.contains("replica"), "{error:?}");
    assert_eq!(error.outcome, Outcome::NotDone);
}
