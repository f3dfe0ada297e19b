//! What breaks in other libraries where a server is in between: messages that pass without a subscriber, for
//! every kind of lock, and the deadlines of a fair queue.

use std::time::Duration;

use dlock::store::Kind;
use dlock::{Error, LockClient, LockKind};
use dlock_tests::faults::{PATIENCE, SOON, patient, setting, within};
use dlock_tests::{ConnectionInfo, Proxy, Server, Store, eventually, settle};
use futures_util::future::join_all;
use tokio::task::JoinHandle;

const MS: Duration = Duration::from_millis(1);
const ALL: [Kind; 7] = [
    Kind::Mutex,
    Kind::Fenced,
    Kind::Read,
    Kind::Write,
    Kind::Permit,
    Kind::Unowned,
    Kind::Latch,
];

/// Closes everything that is waited for, and gives what opens it again.
async fn close(client: &LockClient) -> Vec<dlock::LockGuard> {
    let mut held = Vec::new();
    for kind in [LockKind::Mutex, LockKind::Fenced, LockKind::Read, LockKind::Write] {
        let other = if kind == LockKind::Read {
            LockKind::Write
        } else {
            kind
        };
        let lock = client.lock(format!("the-{kind}")).kind(other);
        held.push(lock.acquire().await.unwrap());
    }
    held
}

/// A waiter for that.
fn wait(client: &LockClient, kind: Kind) -> JoinHandle<Result<(), Error>> {
    let name = format!("the-{kind}");
    let client = client.clone();
    tokio::spawn(async move {
        match kind {
            Kind::Permit => client.semaphore(name).acquire().await.map(drop),
            Kind::Unowned => client.unowned_semaphore(name).acquire().await,
            Kind::Latch => client.latch(name).wait().await,
            _ => {
                let lock = client.lock(name).kind(kind.lock_kind().unwrap());
                lock.acquire().await.map(drop)
            }
        }
    })
}

/// Whether all waiters are subscribed.
async fn all_are_subscribed(server: &Server) {
    eventually("all are subscribed", || async {
        server.pubsub_channels().await.len() == ALL.len()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_that_pass_while_the_subscription_is_cut_are_made_up_for_whatever_is_waited_for() {
    let (store, proxy, behind, beside) = setting().await;
    for _ in 0..2 {
        let held = close(&beside).await;
        let permit = beside.semaphore("the-permit").permits(1).acquire().await.unwrap();
        beside
            .unowned_semaphore("the-unowned")
            .try_set_permits(0)
            .await
            .unwrap();
        assert!(beside.latch("the-latch").try_set_count(1).await.unwrap());
        let waiters: Vec<_> = ALL.into_iter().map(|kind| wait(&behind, kind)).collect();
        all_are_subscribed(store.as_server()).await;
        settle().await;
        let cut = proxy
            .connections()
            .into_iter()
            .find(|connection| connection.subscriber)
            .expect("there is a listener")
            .id;
        proxy.refuse();
        proxy.cut_connection(cut);
        for guard in held {
            guard.release().await.unwrap();
        }
        permit.release().await.unwrap();
        beside
            .unowned_semaphore("the-unowned")
            .add_permits(1)
            .await
            .unwrap();
        beside.latch("the-latch").count_down().await.unwrap();
        settle().await;
        proxy.accept();
        // Far less than a lease, which is what it costs elsewhere.
        for (outcome, kind) in within(SOON, "the wake-ups", join_all(waiters))
            .await
            .into_iter()
            .zip(ALL)
        {
            outcome.unwrap().unwrap_or_else(|error| panic!("{kind}: {error}"));
        }
        assert!(beside.semaphore("the-permit").delete().await.unwrap());
        assert!(beside.unowned_semaphore("the-unowned").delete().await.unwrap());
    }
    store.assert_clean(&[&behind, &beside]).await;
}

/// The server, or a provider of credentials, is slow to let a new connection in, while requests are answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_look_while_the_subscription_is_being_made_anew_for_long() {
    let store = Store::server().await;
    let server = store.as_server();
    let proxy = Proxy::start(server.addr());
    let (behind, beside) = (patient(&proxy.url()).await, patient(&server.url()).await);
    let guard = beside.lock("k").acquire().await.unwrap();
    let waiter = tokio::spawn(behind.lock("k").wait(PATIENCE).acquire());
    eventually("it is subscribed", || async {
        !server.pubsub_channels().await.is_empty()
    })
    .await;
    settle().await;
    let listens = |connection: &ConnectionInfo| connection.subscriber;
    let cut = proxy
        .connections()
        .into_iter()
        .find(listens)
        .expect("there is a listener")
        .id;
    let late = proxy.hold(1, |command| command.is("HELLO"));
    proxy.cut_connection(cut);
    late.caught().await;
    settle().await;
    guard.release().await.unwrap();
    let guard = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
    // A waiter that comes now has no subscription either.
    let held = beside.lock("other").acquire().await.unwrap();
    let waiter = tokio::spawn(behind.lock("other").wait(PATIENCE).acquire());
    settle().await;
    held.release().await.unwrap();
    drop(within(SOON, "the wake-up", waiter).await.unwrap().unwrap());
    late.release();
    guard.release().await.unwrap();
    store.assert_clean(&[&behind, &beside]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deadlines_of_a_fair_queue_do_not_drift_where_waits_end_again_and_again() {
    let store = Store::server().await;
    let server = store.as_server();
    let clients = [store.client().await, store.client().await, store.client().await];
    let held = clients[0]
        .fair_lock("k")
        .fixed_lease(Duration::from_secs(600))
        .acquire()
        .await
        .unwrap();
    for _ in 0..15 {
        let waits = clients
            .iter()
            .map(|client| client.fair_lock("k").wait(300 * MS).acquire());
        for outcome in join_all(waits).await {
            let error = outcome.unwrap_err();
            assert!(error.is_busy(), "{error:?}");
        }
    }
    let last = tokio::spawn(clients[1].fair_lock("k").acquire());
    eventually("it stands in the queue", || async {
        server.query::<usize>(&["LLEN", "redisson_lock_queue:{k}"]).await == 1
    })
    .await;
    let deadlines: Vec<(String, f64)> = server
        .query(&["ZRANGE", "redisson_lock_timeout:{k}", "0", "-1", "WITHSCORES"])
        .await;
    let now = server.time_us().await as f64 / 1000.0;
    assert_eq!(deadlines.len(), 1, "{deadlines:?}");
    // Its own place, and not what forty before it had.
    let drift = deadlines[0].1 - now;
    assert!(drift < 6000.0, "{drift} ms");
    held.release().await.unwrap();
    let guard = within(SOON, "the wake-up", last).await.unwrap().unwrap();
    guard.release().await.unwrap();
    store.assert_clean(&[&clients[0], &clients[1], &clients[2]]).await;
}
