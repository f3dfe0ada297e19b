//! A quorum of real servers: which of them may be away, what happens to those that return, and what a lost reply
//! leaves behind.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::{LockClient, LockClientBuilder};
use dlock_tests::faults::{PATIENCE, SOON, TIMEOUT, answered, is_free, is_free_soon, step, within};
use dlock_tests::{Fault, Flavor, Inside, Proxy, Server, Swallow, eventually};
use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;

const MS: Duration = Duration::from_millis(1);

/// Servers that know nothing of each other, each behind a proxy.
struct Quorum {
    servers: Vec<Server>,
    proxies: Vec<Proxy>,
}

impl Quorum {
    async fn start(count: usize) -> Quorum {
        let flavor = Flavor::from_env();
        let starting = (0..count).map(|_| Server::builder(flavor).persistence(true).start());
        let servers = join_all(starting).await;
        let proxies = servers.iter().map(|server| Proxy::start(server.addr())).collect();
        Quorum { servers, proxies }
    }

    fn url(&self) -> String {
        let hosts: Vec<_> = self
            .proxies
            .iter()
            .map(|proxy| proxy.addr().to_string())
            .collect();
        format!("quorum+redis://{}", hosts.join(","))
    }

    /// Quick to call a member failed, and patient with the whole.
    fn builder(&self) -> LockClientBuilder {
        let builder = LockClient::builder().url(self.url());
        builder.timeout(TIMEOUT).retry_for(PATIENCE)
    }

    /// The servers are trusted from the beginning.
    async fn client(&self) -> LockClient {
        answered(|| self.builder().trust_fresh_servers(true).build())
            .await
            .unwrap()
    }

    /// Nothing is left on any server.
    async fn assert_clean(&self, clients: &[&LockClient]) {
        eventually("no hold and no waiter is left in the clients", || async {
            clients
                .iter()
                .all(|client| client.held() == 0 && client.waited_for() == 0)
        })
        .await;
        eventually(
            "no key but fence and vote, and no subscription, is left",
            || async {
                for server in &self.servers {
                    let stays = |key: &String| key == "dlock:fence" || key == "dlock:voter";
                    if !server.keys().await.iter().all(stays) || !server.pubsub_channels().await.is_empty() {
                        return false;
                    }
                }
                true
            },
        )
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_comes_back_gets_no_acquire_behind_its_release() {
    const LEASE: Duration = Duration::from_secs(50);
    let q = Quorum::start(3).await;
    let a = answered(|| q.builder().trust_fresh_servers(true).lease(LEASE).build())
        .await
        .unwrap();
    for _ in 0..5 {
        is_free(&a, "k").await;
        // Both wait for the connection, while the others have decided long ago.
        q.proxies[0].refuse();
        q.proxies[0].cut();
        let guard = answered(|| a.lock("k").acquire()).await.unwrap();
        guard.release().await.unwrap();
        q.proxies[0].accept();
        let begun = Instant::now();
        eventually("all members are there again", || async {
            q.proxies[0].connections_open() > 0 && a.inspect("k").await.is_ok()
        })
        .await;
        q.assert_clean(&[&a]).await;
        assert!(begun.elapsed() < LEASE / 2, "only the end of the lease freed it");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_holder_at_a_time_over_several_clients_while_servers_go_and_come() {
    let q = Quorum::start(3).await;
    let clients = join_all((0..3).map(|_| q.client())).await;
    let (inside, over) = (Arc::new(Inside::default()), CancellationToken::new());
    let tasks = clients.iter().cycle().take(9).map(|client| {
        let (lock, inside, over) = (client.lock("k").wait(PATIENCE), inside.clone(), over.clone());
        tokio::spawn(async move {
            while !over.is_cancelled() {
                let guard = lock.acquire().await.unwrap();
                inside.write(guard.fencing_token());
                tokio::time::sleep(3 * MS).await;
                inside.written();
                drop(guard);
            }
        })
    });
    let tasks: Vec<_> = tasks.collect();
    // One turn may have begun before.
    let go_on = async |what: &str| {
        let before = inside.turns();
        eventually(what, || async { inside.turns() > before + 2 }).await;
    };
    go_on("all are there").await;
    // One at a time: killed and back with its data, stopped for a while, cut off.
    q.servers[0].kill();
    tokio::time::sleep(200 * MS).await;
    go_on("the first is gone").await;
    q.servers[0].restart().await;
    q.servers[1].stop();
    tokio::time::sleep(2 * TIMEOUT).await;
    go_on("the second stands still").await;
    q.servers[1].cont();
    q.proxies[2].refuse();
    q.proxies[2].cut();
    tokio::time::sleep(2 * TIMEOUT).await;
    go_on("the third is cut off").await;
    q.proxies[2].accept();
    go_on("all are back").await;
    over.cancel();
    for task in tasks {
        within(PATIENCE, "all of them", task).await.unwrap();
    }
    q.assert_clean(&clients.iter().collect::<Vec<_>>()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reply_of_a_member_without_a_vote_may_be_lost() {
    for then in [Swallow::Hang, Swallow::Cut] {
        let q = Quorum::start(3).await;
        let max_lease = Duration::from_secs(4);
        let builder = || q.builder().lease(max_lease).max_lease(max_lease);
        let a = answered(|| builder().build()).await.unwrap();
        let faults = q.proxies.iter().map(|proxy| proxy.swallow(1, then, step("vote")));
        let faults: Vec<_> = faults.collect();
        let begun = Instant::now();
        let lock = a.lock("k").wait(PATIENCE);
        let guard = answered(|| lock.acquire()).await.unwrap();
        // It counts from the request whose reply was lost, and no member votes before.
        assert!(begun.elapsed() >= max_lease, "{:?}", begun.elapsed());
        assert!(faults.iter().all(Fault::fired));
        guard.release().await.unwrap();
        is_free_soon(&a, "k").await;
        q.assert_clean(&[&a]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_minority_may_be_away_from_the_beginning_and_comes_in_later() {
    let q = Quorum::start(3).await;
    q.proxies[1].refuse();
    let a = q.client().await;
    let guard = a.lock("k").lease(Duration::from_secs(3)).acquire().await.unwrap();
    assert!(!q.servers[1].keys().await.contains(&"k".to_owned()));
    q.proxies[1].accept();
    // A renewal asks the member without the grant for it.
    eventually("the lock is on the third, too", || async {
        q.servers[1].keys().await.contains(&"k".to_owned())
    })
    .await;
    assert!(guard.is_held());
    guard.release().await.unwrap();
    q.assert_clean(&[&a]).await;
    q.proxies[0].refuse();
    q.proxies[2].refuse();
    let error = q.builder().build().await.unwrap_err().to_string();
    assert!(
        error.contains("2 of the 3 servers") && error.contains(&q.proxies[2].addr().to_string()),
        "{error}"
    );
}

/// The clock of its machine was ahead and was put right.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mark_of_the_future_keeps_no_member_from_voting() {
    let q = Quorum::start(3).await;
    for server in &q.servers {
        let info: String = server.query(&["INFO", "server"]).await;
        let run = info
            .lines()
            .find_map(|line| line.strip_prefix("run_id:"))
            .unwrap();
        let since = (server.time_us().await + 7_200_000_000).to_string();
        server
            .command(&["HSET", "dlock:voter", "run", run, "since", &since])
            .await;
    }
    let max_lease = Duration::from_secs(4);
    let builder = || q.builder().lease(max_lease).max_lease(max_lease);
    let a = answered(|| builder().build()).await.unwrap();
    let lock = a.lock("k").wait(PATIENCE);
    let guard = answered(|| lock.acquire()).await.unwrap();
    guard.release().await.unwrap();
    q.assert_clean(&[&a]).await;
}

/// Its waiters are not notified by it, and hear of each release from the others. In five seconds they would ask twenty times.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_that_is_away_has_waiters_ask_the_others_seldom() {
    let q = Quorum::start(3).await;
    let (a, b) = (q.client().await, q.client().await);
    let guard = answered(|| a.lock("k").acquire()).await.unwrap();
    let waiter = tokio::spawn(b.lock("k").wait(PATIENCE).acquire());
    eventually("it waits", || async {
        !q.servers[1].pubsub_channels().await.is_empty()
    })
    .await;
    q.servers[0].kill();
    tokio::time::sleep(SOON / 5).await;
    q.servers[1].forget_commands().await;
    tokio::time::sleep(SOON).await;
    let asked = async || {
        let ran = q.servers[1].commands().await;
        let calls = ["eval", "evalsha", "fcall"].map(|name| ran.get(name).copied().unwrap_or(0));
        calls.iter().sum::<u64>()
    };
    let seldom = asked().await;
    assert!(seldom <= 8, "{seldom}");
    eventually("it asks all the same", async || asked().await > 0).await;
    guard.release().await.unwrap();
    let next = within(SOON, "the waiter", waiter).await.unwrap().unwrap();
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_fit_together_is_told_before_anything_is_sent() {
    let url = "quorum+redis://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3";
    let longer = LockClient::builder().url(url).lease(61 * 1000 * MS).build().await;
    assert!(longer.unwrap_err().to_string().contains("max_lease"));
    let single = LockClient::builder()
        .url("redis://127.0.0.1:1")
        .max_lease(SOON)
        .build()
        .await;
    assert!(single.unwrap_err().to_string().contains("quorum"));
}
