//! Locks in a Cluster: steps find the server that has them, waiters are woken wherever they listen.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use dlock::{Error, HoldState, LockClient, LockKey, LockKind};
use dlock_tests::faults::{LEASE, PATIENCE, SOON, answered, hasty, is_confirmed, is_free_soon, within};
use dlock_tests::{Cluster, Flavor, Store, eventually, settle, slot_of};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn name_whose_braces_are_no_tag_is_refused_where_a_lock_has_several_keys() {
    let store = Store::cluster().await;
    let client = store.client().await;
    for name in ["none:{}", "back:}x", "a{b"] {
        let key = || LockKey::raw(name);
        client
            .lock(key())
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        let locks = [
            client.fair_lock(key()),
            client.fenced_lock(key()),
            client.rw_lock(key()).read(),
            client.rw_lock(key()).write(),
        ];
        let mut refused = Vec::new();
        for lock in locks {
            refused.push(lock.try_acquire().await.err());
        }
        refused.push(client.semaphore(key()).permits(1).try_acquire().await.err());
        refused.push(client.semaphore(key()).limit(1).try_acquire().await.err());
        refused.push(
            client
                .unowned_semaphore(key())
                .permits(1)
                .try_acquire()
                .await
                .err(),
        );
        refused.push(client.semaphore(key()).set_permits(1).await.err());
        refused.push(client.latch(key()).try_set_count(1).await.err());
        refused.push(
            client
                .multi([key()])
                .kind(LockKind::Write)
                .try_acquire()
                .await
                .err(),
        );
        for error in refused {
            let error = error.expect("it is refused");
            assert!(matches!(error, Error::Unsupported { .. }), "{error}");
            assert!(error.to_string().contains("braces are no tag"), "{error}");
        }
        // With a tag it is like any other.
        let tagged = LockKey::raw(format!("{{t}}{name}"));
        let guard = client.rw_lock(tagged).write().acquire().await.unwrap();
        guard.release().await.unwrap();
    }
    store.assert_clean(&[&client]).await;
}

const MS: Duration = Duration::from_millis(1);

/// A Cluster of its own, a client that is patient with the whole and quick to call a step failed, and another one.
async fn cluster() -> (Cluster, LockClient, LockClient) {
    let builder = Cluster::builder(Flavor::from_env()).persistence(true);
    let cluster = builder.start().await;
    let (a, b) = (hasty(&cluster.url()).await, hasty(&cluster.url()).await);
    (cluster, a, b)
}

/// Takes the lock and counts, again and again until told to stop; the holders at a time are recorded.
fn count(
    client: &LockClient,
    key: &str,
    inside: &Arc<AtomicU32>,
    over: &CancellationToken,
) -> JoinHandle<u32> {
    let (lock, inside, over) = (client.lock(key).wait(PATIENCE), inside.clone(), over.clone());
    tokio::spawn(async move {
        let mut rounds = 0;
        while !over.is_cancelled() {
            let guard = answered(|| lock.acquire()).await.unwrap();
            let before = inside.fetch_add(1, Ordering::SeqCst);
            assert!(before == 0 || !guard.is_held(), "two are inside");
            tokio::time::sleep(3 * MS).await;
            inside.fetch_sub(1, Ordering::SeqCst);
            drop(guard);
            rounds += 1;
        }
        rounds
    })
}

/// Runs tasks of both clients on a key meanwhile, and sees that they came on before, in between and after.
async fn under_load(clients: [&LockClient; 2], key: &str, work: impl Future<Output = ()>) {
    let (inside, over) = (Arc::new(AtomicU32::new(0)), CancellationToken::new());
    let tasks: Vec<_> = [clients[0], clients[0], clients[1], clients[1]]
        .map(|client| count(client, key, &inside, &over))
        .into();
    tokio::time::sleep(200 * MS).await;
    work.await;
    over.cancel();
    for task in tasks {
        let rounds = within(PATIENCE, "the last round", task).await.unwrap();
        assert!(rounds > 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holds_and_waiters_go_on_where_a_replica_takes_over_in_good_order() {
    let (cluster, a, b) = cluster().await;
    let key = cluster.key_on(cluster.server(0), "k").await;
    let guard = a.lock(&*key).acquire().await.unwrap();
    let waiter = tokio::spawn(b.lock(&*key).wait(PATIENCE).acquire());
    settle().await;
    cluster.fail_over(cluster.server(0)).await;
    is_confirmed(&guard).await;
    assert!(
        answered(|| b.lock(&*key).try_acquire())
            .await
            .unwrap_err()
            .is_busy()
    );
    drop(guard);
    let next = within(PATIENCE, "the waiter", waiter).await.unwrap().unwrap();
    drop(next);
    is_free_soon(&b, &key).await;
    let again = cluster.key_on(cluster.owner_of(&key).await, "j").await;
    under_load([&a, &b], &again, async {
        for _ in 0..2 {
            cluster.fail_over(cluster.owner_of(&again).await).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_is_killed_delays_no_other_shard_and_is_replaced() {
    let (cluster, a, b) = cluster().await;
    let keys = [
        cluster.key_on(cluster.server(0), "k").await,
        cluster.key_on(cluster.server(1), "k").await,
    ];
    let guard = a.lock(&*keys[0]).acquire().await.unwrap();
    let other = a.lock(&*keys[1]).acquire().await.unwrap();
    let replica = cluster.replica_of(cluster.server(0)).await;
    // So that it has heard of it.
    eventually("the replica has it", || async {
        replica.keys().await.contains(&keys[0])
    })
    .await;
    cluster.server(0).kill();
    is_confirmed(&other).await;
    is_free_soon(&b, &cluster.key_on(cluster.server(1), "another").await).await;
    // Held, or told.
    let outcome = within(PATIENCE, "the word of the new master", async {
        loop {
            match guard.state() {
                HoldState::Suspect => tokio::time::sleep(5 * MS).await,
                state => break state,
            }
        }
    })
    .await;
    println!("after the fail-over: {outcome:?}");
    drop(guard);
    is_free_soon(&b, &keys[0]).await;
    drop(other);
    is_free_soon(&b, &keys[1]).await;
}

/// No replica takes over: whatever waited for the shard would wait for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_that_stays_down_delays_no_lock_of_another_shard() {
    let builder = Cluster::builder(Flavor::from_env()).replicas(0);
    let cluster = builder.start().await;
    let (a, b) = (hasty(&cluster.url()).await, hasty(&cluster.url()).await);
    let down = cluster.key_on(cluster.server(0), "k").await;
    let held = a.lock(&*down).acquire().await.unwrap();
    let mut others = Vec::new();
    for at in [1, 2] {
        let key = cluster.key_on(cluster.server(at), "k").await;
        let guard = a.lock(&*key).acquire().await.unwrap();
        let waiter = tokio::spawn(b.lock(&*key).wait(PATIENCE).acquire());
        others.push((guard, waiter, cluster.key_on(cluster.server(at), "another").await));
    }
    settle().await;
    cluster.server(0).kill();
    // Beside these, calls to the shard go on.
    let waiter = tokio::spawn(b.lock(&*down).wait(PATIENCE).acquire());
    let asking = tokio::spawn(async move { answered(|| held.ensure(LEASE)).await });
    for (guard, waiter, another) in others {
        is_confirmed(&guard).await;
        is_free_soon(&a, &another).await;
        guard.release().await.unwrap();
        let next = within(SOON, "the waiter", waiter).await.unwrap().unwrap();
        next.release().await.unwrap();
        // By a client that never had this shard.
        let late = hasty(&cluster.url()).await;
        is_free_soon(&late, &another).await;
    }
    waiter.abort();
    asking.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_may_move_under_locks_that_are_held_and_waited_for() {
    let (cluster, a, b) = cluster().await;
    let key = cluster.key_on(cluster.server(0), "k").await;
    let slot = slot_of(&key);
    let guard = a.lock(&*key).acquire().await.unwrap();
    let waiter = tokio::spawn(b.lock(&*key).wait(PATIENCE).acquire());
    settle().await;
    cluster
        .move_slot(slot, cluster.server(0), cluster.server(1))
        .await;
    is_confirmed(&guard).await;
    assert!(
        answered(|| b.lock(&*key).try_acquire())
            .await
            .unwrap_err()
            .is_busy()
    );
    guard.release().await.unwrap();
    within(PATIENCE, "the waiter", waiter)
        .await
        .unwrap()
        .unwrap()
        .release()
        .await
        .unwrap();
    under_load([&a, &b], &key, async {
        for _ in 0..8 {
            // The owner that all agree on: they may take a while to hear of a move.
            let from = cluster.owner(slot).await;
            let others = [cluster.server(1), cluster.server(2)].into_iter();
            let to = others.rev().find(|server| !std::ptr::eq(*server, from)).unwrap();
            cluster.move_slot(slot, from, to).await;
            tokio::time::sleep(50 * MS).await;
        }
    })
    .await;
    is_free_soon(&a, &key).await;
}
