//! A master that sentinels name: holds, waiters and new locks go on when another one takes its place.

use std::time::Duration;

use dlock::HoldState;
use dlock_tests::faults::{PATIENCE, SOON, answered, hasty, is_confirmed, is_free_soon, within};
use dlock_tests::{Flavor, Replicas, eventually, settle};

const MS: Duration = Duration::from_millis(1);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holds_and_waiters_go_on_where_sentinels_change_the_master_in_good_order() {
    let replicas = Replicas::start(Flavor::from_env()).await;
    let (a, b) = (hasty(&replicas.url()).await, hasty(&replicas.url()).await);
    let guard = a.lock("k").acquire().await.unwrap();
    let waiter = tokio::spawn(b.lock("k").wait(PATIENCE).acquire());
    settle().await;
    let before = replicas.master().await.port();
    for replica in replicas.servers().iter().filter(|server| server.port() != before) {
        eventually("the replicas have it", || async {
            replica.keys().await.contains(&"k".to_owned())
        })
        .await;
    }
    replicas.fail_over().await;
    assert_ne!(replicas.master().await.port(), before);
    is_confirmed(&guard).await;
    assert!(
        answered(|| b.lock("k").try_acquire())
            .await
            .unwrap_err()
            .is_busy()
    );
    drop(guard);
    drop(within(PATIENCE, "the waiter", waiter).await.unwrap().unwrap());
    is_free_soon(&b, "k").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_is_killed_or_stopped_is_replaced_and_its_holders_are_told_the_truth() {
    for stopped in [false, true] {
        let replicas = Replicas::start(Flavor::from_env()).await;
        let (a, b) = (hasty(&replicas.url()).await, hasty(&replicas.url()).await);
        let guard = a.lock("k").acquire().await.unwrap();
        let master = replicas.master().await;
        let before = master.port();
        if stopped {
            master.stop()
        } else {
            master.kill()
        }
        eventually("another one is the master", || async {
            replicas.master().await.port() != before
        })
        .await;
        // It comes back as a master for a moment, and is none.
        if stopped {
            master.cont();
        }
        let free = answered(|| b.lock("j").wait(PATIENCE).acquire()).await.unwrap();
        let state = within(PATIENCE, "the word of the new master", async {
            loop {
                match guard.state() {
                    HoldState::Suspect => tokio::time::sleep(5 * MS).await,
                    state => break state,
                }
            }
        })
        .await;
        println!("stopped: {stopped}, the holder is told {state:?}");
        let known = replicas.master().await.keys().await.contains(&"k".to_owned());
        assert_eq!(known, state == HoldState::Held);
        if stopped {
            // A release on the old master, while it still acts as master, reaches no other client.
            eventually("the clients have left the old one", || async {
                let clients = master.client_list().await;
                !clients.iter().any(|client| client["name"].starts_with("dlock:"))
            })
            .await;
        }
        drop((guard, free));
        is_free_soon(&b, "k").await;
        is_free_soon(&b, "j").await;
    }
}

/// It reports the former master, with the new epoch, until all replicas follow the new one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sentinel_that_leads_a_fail_over_sends_clients_to_the_new_master_before_it_ends() {
    // A replica that stands still is not taken for dead, and keeps the fail-over from its end for ten seconds.
    let replicas = Replicas::builder(Flavor::from_env())
        .keeps_its_master()
        .start()
        .await;
    replicas.is_settled().await;
    let before = replicas.master().await.port();
    let leader = &replicas.sentinels()[0];
    let mut others = replicas.servers().iter().filter(|server| server.port() != before);
    let (next, frozen) = (others.next().unwrap(), others.next().unwrap());
    let url = format!("redis+sentinel://{}/main", leader.addr());
    let a = hasty(&url).await;
    drop(answered(|| a.lock("before").try_acquire()).await.unwrap());
    let set = ["SENTINEL", "SET", "main", "failover-timeout", "60000"];
    let _: String = leader.query(&set).await;
    frozen.stop();
    // Only now a sentinel does not choose it any more: six times its period of `PING`.
    tokio::time::sleep(6500 * MS).await;
    let _: String = leader.query(&["SENTINEL", "FAILOVER", "main"]).await;
    eventually("another sentinel names the new master", || async {
        let named: (String, u16) = replicas.sentinels()[1]
            .query(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main"])
            .await;
        named.1 == next.port()
    })
    .await;
    let mut n = 0;
    let moved = within(SOON, "a lock on the new master", async {
        loop {
            let key = format!("after-{n}");
            let guard = answered(|| a.lock(&*key).try_acquire()).await.unwrap();
            if next.keys().await.contains(&key) {
                break guard;
            }
            n += 1;
            tokio::time::sleep(50 * MS).await;
        }
    })
    .await;
    frozen.cont();
    moved.release().await.unwrap();
}
