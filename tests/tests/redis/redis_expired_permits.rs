//! Many permits of a process that is gone: they are free at once, and removed in parts that do not hold up the server.

use dlock::LockClient;
use dlock_tests::faults::patient;
use dlock_tests::{Flavor, Server};

/// More than a call removes.
const GONE: i64 = 4000;
const HELD: &str = "{s}:timeout";

/// So many permits, whose leases have ended.
async fn leave_behind(server: &Server, count: i64) {
    let script = "for i = 1, ARGV[1] do redis.call('ZADD', KEYS[1], 1, string.format('%016d', i)) end";
    server
        .command(&["EVAL", script, "1", HELD, &count.to_string()])
        .await;
}

async fn setting() -> (Server, LockClient) {
    let server = Server::start(Flavor::from_env()).await;
    let client = patient(&server.url()).await;
    (server, client)
}

/// How many of them there are yet.
async fn left_over(server: &Server) -> i64 {
    server.query(&["ZCOUNT", HELD, "-inf", "1"]).await
}

/// Looks until all are gone, and sees the same each time.
async fn look_until_they_are_gone(server: &Server, mut look: impl AsyncFnMut()) {
    let mut before = left_over(server).await;
    while before > 0 {
        look().await;
        let after = left_over(server).await;
        assert!(after < before, "{after} after {before}");
        assert!(before - after <= 256, "{after} after {before}");
        before = after;
    }
    look().await;
}

async fn number(server: &Server) -> i64 {
    server.query(&["GET", "s"]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_permits_whose_leases_have_ended_are_free_and_removed_in_parts() {
    let (server, client) = setting().await;
    let semaphore = client.semaphore("s");
    semaphore.set_permits(1001).await.unwrap();
    leave_behind(&server, GONE).await;
    server.command(&["DECRBY", "s", &GONE.to_string()]).await;
    // All are free for the first who asks.
    let permits = semaphore.try_acquire_many(1000).await.unwrap();
    let status = semaphore.status().await.unwrap();
    assert!(left_over(&server).await > 0, "some are left");
    assert_eq!(number(&server).await, 1 - left_over(&server).await);
    assert_eq!(semaphore.available().await.unwrap(), 1, "{status:?}");
    let refused = semaphore.try_acquire_many(2).await.map(drop);
    assert!(refused.unwrap_err().is_busy());
    let last = semaphore.try_acquire().await.unwrap();
    assert!(semaphore.try_acquire().await.map(drop).unwrap_err().is_busy());
    last.release().await.unwrap();
    semaphore.add_permits(10).await.unwrap();
    semaphore.remove_permits(5).await.unwrap();
    look_until_they_are_gone(&server, async || {
        assert_eq!(semaphore.available().await.unwrap(), 6);
    })
    .await;
    assert_eq!(number(&server).await, 6);
    permits.release().await.unwrap();
    assert_eq!(number(&server).await, 1006);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holders_beside_many_permits_whose_leases_have_ended_are_shown_and_forced_out() {
    let (server, client) = setting().await;
    let semaphore = client.semaphore("s");
    semaphore.set_permits(2000).await.unwrap();
    let permits = semaphore.acquire_many(3).await.unwrap();
    leave_behind(&server, GONE).await;
    server.command(&["DECRBY", "s", &GONE.to_string()]).await;
    let holders = client.holders("s").await.unwrap();
    assert_eq!(holders.len(), 3, "{holders:?}");
    assert!(left_over(&server).await > 0, "some are left");
    assert!(client.force_release("s").await.unwrap());
    assert_eq!(number(&server).await, 2000);
    assert!(permits.release().await.unwrap_err().is_lost());
    assert_eq!(number(&server).await, 2000);
}

/// Where the callers say how many may be held there is no number until one is set.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn total_that_is_set_beside_many_permits_whose_leases_have_ended_counts_them_once() {
    let (server, client) = setting().await;
    let limited = client.semaphore("s").limit(3);
    let one = limited.acquire().await.unwrap();
    leave_behind(&server, GONE).await;
    let two = limited.try_acquire_many(2).await.unwrap();
    assert!(limited.try_acquire().await.map(drop).unwrap_err().is_busy());
    assert!(left_over(&server).await > 0, "some are left");
    let semaphore = client.semaphore("s");
    assert!(semaphore.try_set_permits(5).await.unwrap());
    look_until_they_are_gone(&server, async || {
        assert_eq!(semaphore.available().await.unwrap(), 2);
    })
    .await;
    two.release().await.unwrap();
    one.release().await.unwrap();
    assert_eq!(number(&server).await, 5);
}
