//! Records where another server takes over, or a slot moves, in the midst: a claim stays its owner's, a result stays
//! the result, and what a fail-over lost is told.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use dlock::record::{ClaimReply, ClaimToken, OwnerReply, RecordKey, Records};
use dlock_tests::faults::{PATIENCE, answered, hasty, within};
use dlock_tests::records::{ask, by, fresh_key};
use dlock_tests::{Cluster, Flavor, Replicas, Server, eventually, slot_of};
use futures_util::future::join_all;
use parking_lot::Mutex;

const MS: Duration = Duration::from_millis(1);
const HOUR: Duration = Duration::from_secs(3600);

fn name(key: &RecordKey) -> String {
    format!("dlock:record:{}", key.as_str())
}

/// The records as two processes see them.
async fn two(url: &str) -> [Records; 2] {
    let (a, b) = (hasty(url).await, hasty(url).await);
    [a.records().unwrap(), b.records().unwrap()]
}

async fn cluster() -> Cluster {
    let builder = Cluster::builder(Flavor::from_env()).persistence(true);
    builder.start().await
}

/// Keys of records that this server of the Cluster has.
async fn keys_on(cluster: &Cluster, server: &Server) -> [RecordKey; 3] {
    let key = async || {
        let prefix = name(&fresh_key());
        let found = cluster.key_on(server, &prefix).await;
        RecordKey::new(found.trim_start_matches("dlock:record:")).unwrap()
    };
    [key().await, key().await, key().await]
}

/// Claims it for the first time; returns the owner and the fence.
async fn claimed(records: &Records, key: &RecordKey) -> (ClaimToken, u64) {
    let token = ClaimToken::new();
    let claim = || records.claim(by(&token, ask(key)));
    match answered(claim).await.unwrap() {
        ClaimReply::Claimed { attempt: 1, fence } => (token, fence),
        other => panic!("no owner has it: {other:?}"),
    }
}

async fn is_running(records: &Records, key: &RecordKey) {
    let reply = answered(|| records.claim(ask(key))).await.unwrap();
    assert!(
        matches!(reply, ClaimReply::InProgress { attempt: 1, .. }),
        "{reply:?}"
    );
}

async fn is_completed(records: &Records, key: &RecordKey, with: &[u8]) {
    let reply = answered(|| records.claim(ask(key))).await.unwrap();
    assert!(
        matches!(&reply, ClaimReply::Completed { response } if response == with),
        "{reply:?}"
    );
}

/// Completes it, and tells whether it was still the owner's.
async fn complete(records: &Records, key: &RecordKey, by: &ClaimToken, with: &[u8]) -> OwnerReply {
    answered(|| records.complete(key, by, with.to_vec(), HOUR))
        .await
        .unwrap()
}

/// One record is claimed and waited for, one has its result, and one is released, while this happens; then all go on.
async fn go_on_through(
    [a, b]: &[Records; 2],
    [running, done, free]: &[RecordKey; 3],
    change: impl AsyncFnOnce(),
) {
    let (token, fence) = claimed(a, running).await;
    let (done_by, _) = claimed(b, done).await;
    assert_eq!(complete(b, done, &done_by, b"before").await, OwnerReply::Done);
    let (free_by, before) = claimed(a, free).await;
    let waiter = tokio::spawn({
        let (b, running) = (b.clone(), running.clone());
        async move {
            let mut notifications = b.watch(&running);
            loop {
                if let ClaimReply::Completed { response } = answered(|| b.claim(ask(&running))).await.unwrap()
                {
                    return response;
                }
                // No look of its own: only news have it ask again.
                notifications.changed().await;
            }
        }
    });
    change().await;
    is_running(b, running).await;
    let again = answered(|| a.claim(by(&token, ask(running)))).await.unwrap();
    assert_eq!(again, ClaimReply::Claimed { attempt: 1, fence });
    let extended = answered(|| a.extend(running, &token, HOUR, HOUR)).await.unwrap();
    assert_eq!(extended, OwnerReply::Done);
    is_completed(a, done, b"before").await;
    let stranger = ClaimToken::new();
    assert_eq!(
        complete(b, running, &stranger, b"stolen").await,
        OwnerReply::NotOwner
    );
    assert_eq!(complete(a, running, &token, b"after").await, OwnerReply::Done);
    let heard = within(PATIENCE, "the notification of the result", waiter)
        .await
        .unwrap();
    assert_eq!(heard, b"after");
    let released = answered(|| a.release(free, &free_by)).await.unwrap();
    assert_eq!(released, OwnerReply::Done);
    let (_, after) = claimed(b, free).await;
    assert!(after > before, "fence {after} after {before}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_cluster_they_go_on_where_a_replica_takes_over_in_good_order() {
    let cluster = cluster().await;
    let records = two(&cluster.url()).await;
    let keys = keys_on(&cluster, cluster.server(0)).await;
    go_on_through(&records, &keys, async || {
        cluster.fail_over(cluster.server(0)).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_sentinels_they_go_on_where_these_change_the_master_in_good_order() {
    let replicas = Replicas::start(Flavor::from_env()).await;
    let records = two(&replicas.url()).await;
    let keys = [fresh_key(), fresh_key(), fresh_key()];
    go_on_through(&records, &keys, async || {
        let master = replicas.master().await;
        let (port, all) = (master.port(), master.keys().await);
        for replica in replicas.servers().iter().filter(|server| server.port() != port) {
            eventually("the replicas have all of it", || async {
                replica.keys().await == all
            })
            .await;
        }
        replicas.fail_over().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_may_move_under_records_that_are_claimed_and_waited_for() {
    let cluster = cluster().await;
    let records = two(&cluster.url()).await;
    let keys = keys_on(&cluster, cluster.server(0)).await;
    go_on_through(&records, &keys, async || {
        for key in &keys {
            let slot = slot_of(&name(key));
            cluster
                .move_slot(slot, cluster.server(0), cluster.server(1))
                .await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_has_gone_ahead_of_its_slot_is_found_there() {
    let cluster = cluster().await;
    let [a, b] = two(&cluster.url()).await;
    let [key, ..] = keys_on(&cluster, cluster.server(0)).await;
    let slot = slot_of(&name(&key));
    let (from, to) = (cluster.server(0), cluster.server(1));
    let (token, _) = claimed(&a, &key).await;
    cluster.begin_move(slot, from, to).await;
    cluster.move_key(&name(&key), from, to).await;
    // The fence of the slot has not, and what does not need it goes on.
    let extended = answered(|| a.extend(&key, &token, HOUR, HOUR)).await.unwrap();
    assert_eq!(extended, OwnerReply::Done);
    assert_eq!(complete(&a, &key, &token, b"ahead").await, OwnerReply::Done);
    // What needs both waits until they are together.
    let retry = tokio::spawn({
        let (b, key) = (b.clone(), key.clone());
        async move { is_completed(&b, &key, b"ahead").await }
    });
    tokio::time::sleep(200 * MS).await;
    assert!(!retry.is_finished(), "it was not asked for the fence");
    cluster.end_move(slot, from, to).await;
    within(PATIENCE, "the answer", retry).await.unwrap();
}

/// Has the replicas hear nothing more of their master.
async fn is_left_behind(master: &Server, replicas: &[&Server]) {
    replicas.iter().for_each(|replica| replica.stop());
    // What it sends on an open connection they would read later.
    master.command(&["CLIENT", "KILL", "TYPE", "replica"]).await;
}

/// The record of an earlier claim on the new master: it is the owner's still, or another client may begin anew.
async fn the_truth_is_told([a, b]: &[Records; 2], key: &RecordKey, by: &ClaimToken, fence: u64, heard: bool) {
    let outcome = complete(a, key, by, b"first").await;
    if heard {
        assert_eq!(outcome, OwnerReply::Done);
        is_completed(b, key, b"first").await;
        return;
    }
    assert_eq!(outcome, OwnerReply::NotOwner);
    let (second, next) = claimed(b, key).await;
    assert!(next > fence, "fence {next} after {fence}");
    assert_eq!(complete(a, key, by, b"first").await, OwnerReply::NotOwner);
    assert_eq!(complete(b, key, &second, b"second").await, OwnerReply::Done);
    is_completed(a, key, b"second").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_cluster_the_owner_is_told_whether_the_new_master_has_its_claim() {
    for heard in [true, false] {
        let cluster = cluster().await;
        let records = two(&cluster.url()).await;
        let [key, ..] = keys_on(&cluster, cluster.server(0)).await;
        let replica = cluster.replica_of(cluster.server(0)).await;
        if !heard {
            is_left_behind(cluster.server(0), &[replica]).await;
        }
        let (token, fence) = claimed(&records[0], &key).await;
        if heard {
            eventually("the replica has it", || async {
                replica.keys().await.contains(&name(&key))
            })
            .await;
        }
        cluster.server(0).kill();
        if !heard {
            replica.cont();
        }
        the_truth_is_told(&records, &key, &token, fence, heard).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_sentinels_the_owner_is_told_whether_the_new_master_has_its_claim() {
    for heard in [true, false] {
        let replicas = Replicas::start(Flavor::from_env()).await;
        let records = two(&replicas.url()).await;
        let key = fresh_key();
        let master = replicas.master().await;
        let port = master.port();
        let others: Vec<_> = replicas
            .servers()
            .iter()
            .filter(|server| server.port() != port)
            .collect();
        if !heard {
            is_left_behind(master, &others).await;
        }
        let (token, fence) = claimed(&records[0], &key).await;
        for replica in others.iter().filter(|_| heard) {
            eventually("the replicas have it", || async {
                replica.keys().await.contains(&name(&key))
            })
            .await;
        }
        master.kill();
        if !heard {
            others.iter().for_each(|replica| replica.cont());
        }
        the_truth_is_told(&records, &key, &token, fence, heard).await;
    }
}

/// Asks for the work behind a key, as a client that sends again does, until there is its result.
async fn order(records: Records, key: RecordKey, done: Arc<Mutex<HashMap<String, u32>>>) {
    let token = ClaimToken::new();
    loop {
        match answered(|| records.claim(by(&token, ask(&key)))).await.unwrap() {
            ClaimReply::Claimed { .. } => {
                *done.lock().entry(key.as_str().to_owned()).or_default() += 1;
                tokio::time::sleep(3 * MS).await;
                let outcome = complete(&records, &key, &token, key.as_str().as_bytes()).await;
                assert_eq!(outcome, OwnerReply::Done);
                return;
            }
            ClaimReply::InProgress { .. } => tokio::time::sleep(5 * MS).await,
            ClaimReply::Completed { response } => {
                assert_eq!(response, key.as_str().as_bytes());
                return;
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_is_done_once_while_replicas_take_over_and_slots_move() {
    let cluster = cluster().await;
    let records = two(&cluster.url()).await;
    let done = Arc::new(Mutex::new(HashMap::new()));
    // Each is asked for by both processes at a time.
    let both = async |key: &RecordKey| {
        join_all((records.iter()).map(|one| order(one.clone(), key.clone(), done.clone()))).await;
    };
    let over = AtomicBool::new(false);
    let everywhere = async || {
        while !over.load(SeqCst) {
            let keys: Vec<_> = (0..8).map(|_| fresh_key()).collect();
            join_all(keys.iter().map(both)).await;
        }
    };
    let changes = async {
        for slot in [0, 8192, 0] {
            cluster.fail_over(cluster.owner(slot).await).await;
        }
        let keys = keys_of_one_slot(12);
        let slot = slot_of(&name(&keys[0]));
        let (home, away) = (
            cluster.owner(slot).await,
            cluster.owner((slot + 5461) % 16384).await,
        );
        for (round, keys) in keys.chunks(3).enumerate() {
            let (from, to) = match round % 2 {
                0 => (home, away),
                _ => (away, home),
            };
            let moving = async {
                cluster.begin_move(slot, from, to).await;
                tokio::time::sleep(20 * MS).await;
                cluster.end_move(slot, from, to).await;
            };
            tokio::join!(moving, join_all(keys.iter().map(both)));
        }
        over.store(true, SeqCst);
    };
    within(2 * PATIENCE, "all of it", async {
        tokio::join!(everywhere(), changes)
    })
    .await;
    let done = done.lock();
    assert!(
        done.len() > 12 && done.values().all(|times| *times == 1),
        "{done:?}"
    );
}

/// So many keys whose records are in one slot.
fn keys_of_one_slot(count: usize) -> Vec<RecordKey> {
    let first = fresh_key();
    let slot = slot_of(&name(&first));
    let keys = (0..).map(|n| RecordKey::new(format!("{}-{n}", first.as_str())).unwrap());
    keys.filter(|key| slot_of(&name(key)) == slot)
        .take(count)
        .collect()
}
