//! Many tasks of several processes at once, on the stores that are separate crates: a writer is alone, a set of locks is held
//! as a whole or not at all, no wake-up is missed, and no lock is left.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use dlock::LockClient;
use dlock_tests::etcd::Etcd;
use dlock_tests::faults::{PATIENCE, within};
use dlock_tests::mysql::Mysql;
use dlock_tests::postgres::Postgres;
use dlock_tests::zookeeper::Zookeeper;
use dlock_tests::{Inside, eventually};
use futures_util::future::join_all;
use tokio::time::{sleep, timeout};

use crate::backend::Backend;
use crate::scenes::{LEASE, MS, SEC};
use crate::{etcd_conformance, mysql_conformance, postgres_conformance, zookeeper_conformance};

async fn clients<B: Backend>(backend: &B, count: usize, lease: Duration) -> Vec<LockClient> {
    let client = async || {
        let store = backend.store(None, PATIENCE).await;
        let builder = LockClient::builder().shared_store(store).lease(lease);
        let built = builder.retry_for(PATIENCE).build().await;
        built.expect("the server is there")
    };
    join_all((0..count).map(|_| client())).await
}

/// What a caller gives up after: one in three does at any moment of its acquire.
fn patience() -> Duration {
    match fastrand::u32(0..3) {
        0 => fastrand::u32(0..15) * MS,
        _ => PATIENCE,
    }
}

async fn nothing_is_left(client: &LockClient) {
    eventually("no lock is left", async || {
        client.list("").await.is_ok_and(|held| held.is_empty())
    })
    .await;
}

async fn readers_and_writers_that_race_never_overlap<B: Backend>(server: Arc<B::Server>) {
    let backend = B::on(server).await;
    let clients = clients(&backend, 4, LEASE).await;
    let inside = Arc::new(Inside::default());
    let tasks = (0..16_usize).map(|task| {
        let (lock, inside) = (clients[task % 4].rw_lock("k"), inside.clone());
        tokio::spawn(async move {
            for round in 0..25_usize {
                let writes = (task + round) % 5 == 0;
                let side = if writes { lock.write() } else { lock.read() };
                let Ok(guard) = timeout(patience(), side.acquire()).await else {
                    continue;
                };
                let guard = guard.unwrap();
                match writes {
                    true => inside.write(guard.fencing_token()),
                    false => inside.read(guard.fencing_token()),
                }
                sleep(fastrand::u32(0..3) * MS).await;
                match writes {
                    true => inside.written(),
                    false => inside.was_read(),
                }
                match fastrand::bool() {
                    true => guard.release().await.unwrap(),
                    false => drop(guard),
                }
            }
        })
    });
    for done in join_all(tasks).await {
        done.unwrap();
    }
    assert!(inside.together() > 1, "readers share");
    assert!(inside.turns() > 100, "{inside:?}");
    nothing_is_left(&clients[0]).await;
}

async fn several_locks_are_held_all_or_none<B: Backend>(server: Arc<B::Server>) {
    const KEYS: [&str; 4] = ["a", "b", "c", "d"];
    let backend = B::on(server).await;
    let clients = clients(&backend, 3, 3 * SEC).await;
    let (here, there) = (&clients[0], &clients[1]);
    let guard = here.multi(["a", "b", "c"]).acquire().await.unwrap();
    for key in ["a", "b", "c"] {
        assert!(there.lock(key).try_acquire().await.unwrap_err().is_busy());
    }
    let waiting = tokio::spawn(there.multi(["c", "d"]).acquire());
    // It holds no lock while it waits.
    let other = within(PATIENCE, "it waits", clients[2].lock("d").acquire()).await;
    other.unwrap().release().await.unwrap();
    guard.release().await.unwrap();
    let guard = within(PATIENCE, "both are free", waiting).await.unwrap().unwrap();
    // The loss of one is that of all.
    assert!(here.force_release("d").await.unwrap());
    within(PATIENCE, "it is told", guard.lost()).await;
    drop(guard);
    let next = within(PATIENCE, "the other is free", here.lock("c").acquire()).await;
    next.unwrap().release().await.unwrap();

    let inside: Arc<HashMap<&str, Inside>> = Arc::new(KEYS.map(|key| (key, Inside::default())).into());
    let tasks = (0..9_usize).map(|task| {
        let (client, inside) = (clients[task % 3].clone(), inside.clone());
        tokio::spawn(async move {
            for _ in 0..8 {
                let mut keys = KEYS;
                fastrand::shuffle(&mut keys);
                let keys = &keys[..fastrand::usize(2..4)];
                let set = client.multi(keys.iter().copied());
                let Ok(guard) = timeout(patience(), set.acquire()).await else {
                    continue;
                };
                let guard = guard.unwrap();
                keys.iter().for_each(|key| inside[key].write(0));
                sleep(fastrand::u32(0..3) * MS).await;
                keys.iter().for_each(|key| inside[key].written());
                guard.release().await.unwrap();
            }
        })
    });
    for done in join_all(tasks).await {
        done.unwrap();
    }
    assert!(inside.values().all(|inside| inside.turns() > 0));
    nothing_is_left(here).await;
}

/// Each waiter has its lock sooner than it asks by itself, which is after 30 s here.
async fn handovers_miss_no_wake_up<B: Backend>(server: Arc<B::Server>) {
    let backend = B::on(server).await;
    let clients = clients(&backend, 2, LEASE).await;
    let hands_over = async |key: usize| {
        let lock = |at: usize| clients[at % 2].lock(format!("k{key}"));
        let mut guard = lock(0).acquire().await.unwrap();
        for round in 1..=250 {
            let next = tokio::spawn(lock(round).acquire());
            sleep(Duration::from_micros(fastrand::u64(0..3000))).await;
            let token = guard.fencing_token();
            guard.release().await.unwrap();
            let next = timeout(20 * SEC, next).await;
            let next =
                next.unwrap_or_else(|_| panic!("the waiter of handover {round} of {key} was not woken"));
            guard = next.unwrap().unwrap();
            assert!(guard.fencing_token() > token);
        }
        guard.release().await.unwrap();
    };
    join_all((0..4).map(hands_over)).await;
    nothing_is_left(&clients[0]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_and_writers_that_race_on_zookeeper_never_overlap() {
    let server = Zookeeper::shared().await;
    readers_and_writers_that_race_never_overlap::<zookeeper_conformance::Root>(server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_locks_on_zookeeper_are_held_all_or_none() {
    let server = Zookeeper::shared().await;
    several_locks_are_held_all_or_none::<zookeeper_conformance::Root>(server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_locks_on_mysql_are_held_all_or_none() {
    let server = Mysql::shared().await;
    several_locks_are_held_all_or_none::<mysql_conformance::Table>(server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_locks_on_postgres_are_held_all_or_none() {
    let server = Postgres::shared().await;
    several_locks_are_held_all_or_none::<postgres_conformance::Table>(server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handovers_on_postgres_miss_no_wake_up() {
    handovers_miss_no_wake_up::<postgres_conformance::Table>(Postgres::shared().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handovers_on_zookeeper_miss_no_wake_up() {
    handovers_miss_no_wake_up::<zookeeper_conformance::Root>(Zookeeper::shared().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_and_writers_that_race_on_etcd_never_overlap() {
    let server = Etcd::shared().await;
    readers_and_writers_that_race_never_overlap::<etcd_conformance::Namespace>(server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_locks_on_etcd_are_held_all_or_none() {
    let server = Etcd::shared().await;
    several_locks_are_held_all_or_none::<etcd_conformance::Namespace>(server).await;
}
