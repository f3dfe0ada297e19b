//! Waiting on a real server: no message that is lost costs a lease, and a waiter sends nothing but the looks
//! that it owes.

use std::time::{Duration, Instant};

use dlock::LockClient;
use dlock_tests::faults::{LEASE, SLACK, TIMEOUT, hasty, setting, step};
use dlock_tests::{Direction, Flavor, Proxy, Server, Store, eventually, settle};
use futures_util::future::join_all;

const MS: Duration = Duration::from_millis(1);

/// Waits for the lock in the background, and tells when it came.
fn wait_for(client: &LockClient, key: &str) -> tokio::task::JoinHandle<Instant> {
    let lock = client.lock(key);
    tokio::spawn(async move {
        let guard = lock.acquire().await.unwrap();
        let woken = Instant::now();
        guard.release().await.unwrap();
        woken
    })
}

/// Waits until the server knows of a subscription to the releases of the key.
async fn is_subscribed(server: &Server, key: &str) {
    eventually("somebody listens", || async {
        server
            .pubsub_channels()
            .await
            .iter()
            .any(|channel| channel.contains(key))
    })
    .await;
}

fn subscriber(proxy: &Proxy) -> u64 {
    let connections = proxy.connections();
    connections
        .iter()
        .find(|connection| connection.subscriber)
        .expect("it has subscribed")
        .id
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_23_a_lost_message_costs_no_lease() {
    let (store, proxy, a, b) = setting().await;
    proxy.lose_messages(true);
    let lock = b.lock("k").renewed_lease(3000 * MS);
    let guard = lock.acquire().await.unwrap();
    let waiter = wait_for(&a, "k");
    is_subscribed(store.as_server(), "k").await;
    settle().await;
    let released = Instant::now();
    guard.release().await.unwrap();
    let took = waiter.await.unwrap() - released;
    assert!(took < 1500 * MS + SLACK, "woken after {took:?}");
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_23_a_message_that_passes_while_the_subscription_is_cut_is_made_up_for() {
    let (store, proxy, a, b) = setting().await;
    for half_open in [false, true] {
        let guard = b.lock("k").acquire().await.unwrap();
        let waiter = wait_for(&a, "k");
        is_subscribed(store.as_server(), "k").await;
        settle().await;
        let id = subscriber(&proxy);
        // Half open it stays until the next ping, in 5 s at the most.
        let limit = if half_open {
            proxy.block_connection(id, Direction::ToClient);
            Duration::from_secs(5) + TIMEOUT
        } else {
            proxy.refuse();
            proxy.cut_connection(id);
            1000 * MS
        };
        let released = Instant::now();
        guard.release().await.unwrap();
        settle().await;
        proxy.accept();
        let took = waiter.await.unwrap() - released;
        assert!(
            took < limit + SLACK,
            "woken after {took:?}, half open: {half_open}"
        );
        store.assert_clean(&[&b]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_23_a_release_before_the_subscription_stands_is_seen_by_the_look_after_it() {
    let (store, proxy, a, b) = setting().await;
    for _ in 0..2 {
        let guard = b.lock("k").acquire().await.unwrap();
        let late = proxy.hold(1, |command| command.is("SUBSCRIBE"));
        let waiter = wait_for(&a, "k");
        late.caught().await;
        guard.release().await.unwrap();
        tokio::time::sleep(TIMEOUT / 2).await;
        assert!(!waiter.is_finished(), "nobody could tell it");
        let let_go = Instant::now();
        late.release();
        let took = waiter.await.unwrap() - let_go;
        assert!(took < SLACK, "woken after {took:?}");
        store.assert_clean(&[&a, &b]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_23_a_waiter_sends_nothing_but_the_looks_that_it_owes() {
    const HELD: Duration = Duration::from_millis(3000);
    let store = Store::server().await;
    let server = store.as_server();
    let (a, b) = (hasty(&server.url()).await, hasty(&server.url()).await);
    let guard = b.lock("k").renewed_lease(HELD).acquire().await.unwrap();
    let monitor = server.monitor().await;
    let waiter = wait_for(&a, "k");
    is_subscribed(server, "k").await;
    settle().await;
    let count = async |name| monitor.commands().await.into_iter().filter(step(name)).count();
    let all = async || monitor.commands().await.len();
    // One to learn that it has to wait, one when it is subscribed.
    assert!(count("acquire").await <= 3, "{}", count("acquire").await);
    monitor.forget();
    tokio::time::sleep(HELD + HELD / 2).await;
    let (looks, renewals) = (count("acquire").await, count("renew").await);
    assert!((2..=4).contains(&looks), "{looks} looks in one and a half leases");
    assert!(
        (4..=5).contains(&renewals),
        "{renewals} renewals in one and a half leases"
    );
    assert!(
        all().await <= looks + renewals + 1,
        "and a ping: {:?}",
        monitor.commands().await
    );
    let released = Instant::now();
    guard.release().await.unwrap();
    assert!(waiter.await.unwrap() - released < SLACK);
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_22_five_hundred_waiters_cost_one_connection_and_few_looks() {
    let (store, proxy, a, b) = setting().await;
    let patient = LockClient::builder()
        .url(proxy.url())
        .timeout(Duration::from_secs(10))
        .build()
        .await
        .unwrap();
    drop(a);
    eventually("one connection", || async { proxy.connections_open() == 1 }).await;
    let keys: Vec<_> = (0..500).map(|i| format!("k{i}")).collect();
    let guards = join_all(keys.iter().map(|key| b.lock(&**key).acquire())).await;
    let guards: Vec<_> = guards.into_iter().collect::<Result<_, _>>().unwrap();
    let waiters: Vec<_> = keys.iter().map(|key| wait_for(&patient, key)).collect();
    eventually("all are subscribed", || async {
        store.as_server().pubsub_channels().await.len() == 500
    })
    .await;
    settle().await;
    assert_eq!((patient.waited_for(), proxy.connections_open()), (500, 2));
    let asked = |name: &'static str| -> usize {
        let sent = proxy.commands();
        let steps = sent.iter().filter(|sent| sent.command.is_script());
        steps
            .map(|sent| {
                sent.command
                    .args()
                    .iter()
                    .filter(|arg| &arg[..] == name.as_bytes())
                    .count()
            })
            .sum()
    };
    assert!(asked("acquire") <= 1500, "{} looks", asked("acquire"));
    let subscribed = proxy.count(|command| command.is("SUBSCRIBE"));
    assert!(subscribed <= 20, "{subscribed} commands for 500 subscriptions");
    proxy.forget();
    let released = Instant::now();
    drop(guards);
    for waiter in waiters {
        assert!(waiter.await.unwrap() - released < Duration::from_secs(5));
    }
    store.assert_clean(&[&patient, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_subscriptions_are_forbidden_waiters_look_now_and_then() {
    let server = Server::builder(Flavor::from_env())
        .acl("mute on >pw ~* resetchannels +@all")
        .start()
        .await;
    let store = Store::Server(Box::new(server));
    let server = store.as_server();
    let proxy = Proxy::start(server.addr());
    let a = hasty(&proxy.url_as("mute", "pw")).await;
    let b = hasty(&server.url_as("mute", "pw")).await;
    let guard = b.lock("k").acquire().await.unwrap();
    let waiter = wait_for(&a, "k");
    tokio::time::sleep(1000 * MS).await;
    let (looks, connections) = (proxy.count(step("acquire")), proxy.connections_seen());
    assert!((3..=20).contains(&looks), "{looks} looks in a second");
    assert!(connections <= 10, "{connections} connections in a second");
    let released = Instant::now();
    // The holder may not tell either, and still gives the lock back.
    guard.release().await.unwrap();
    let took = waiter.await.unwrap() - released;
    assert!(took < 500 * MS + SLACK, "woken after {took:?}");
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_idle_leases_send_their_renewals_and_nothing_else() {
    const HELD: Duration = Duration::from_millis(1500);
    let (store, proxy, a, _b) = setting().await;
    let guards = [
        a.lock("k").renewed_lease(HELD).acquire().await.unwrap(),
        a.lock("l").renewed_lease(HELD).acquire().await.unwrap(),
    ];
    let monitor = store.as_server().monitor().await;
    proxy.forget();
    tokio::time::sleep(HELD * 2 + HELD / 6).await;
    let sent = monitor.commands().await;
    // Six periods of a third of the lease; two leases that are due together share a call.
    let renewals = sent.iter().filter(|command| step("renew")(command)).count();
    assert!((6..=12).contains(&renewals) && renewals == sent.len(), "{sent:?}");
    assert_eq!((proxy.connections_open(), proxy.connections_seen()), (1, 1));
    assert!(guards.iter().all(|guard| guard.remaining() > HELD / 2));
    drop(guards);
    store.assert_clean(&[&a]).await;
    monitor.commands().await;
    monitor.forget();
    tokio::time::sleep(HELD).await;
    assert!(
        monitor.commands().await.is_empty(),
        "nothing is left ticking: {:?}",
        monitor.commands().await
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_9_forty_cycles_multiply_no_renewal_and_none_comes_after_the_release() {
    const HELD: Duration = Duration::from_millis(1200);
    let store = Store::server().await;
    let server = store.as_server();
    let client = hasty(&server.url()).await;
    let lock = client.lock("k").renewed_lease(HELD);
    for i in 0..40 {
        let guard = lock.acquire().await.unwrap();
        if i % 2 == 0 {
            drop(guard)
        } else {
            guard.release().await.unwrap()
        }
    }
    let guard = lock.acquire().await.unwrap();
    let monitor = server.monitor().await;
    tokio::time::sleep(HELD * 2 + HELD / 6).await;
    let renewals = monitor.commands().await.into_iter().filter(step("renew")).count();
    assert!((5..=7).contains(&renewals), "{renewals} renewals in six periods");
    guard.release().await.unwrap();
    monitor.commands().await;
    monitor.forget();
    tokio::time::sleep(HELD).await;
    let sent = monitor.commands().await;
    assert!(sent.is_empty(), "{sent:?}");
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_9_of_fifty_locks_one_that_goes_wrong_delays_no_other() {
    const HELD: Duration = Duration::from_millis(1500);
    let builder = Server::builder(Flavor::from_env()).acl("svc on >pw ~* &* +@all");
    let store = Store::Server(Box::new(builder.start().await));
    let server = store.as_server();
    let client = hasty(&server.url_as("svc", "pw")).await;
    let locks = (0..50).map(|i| client.lock(format!("k:{i}")).renewed_lease(HELD).acquire());
    let guards: Vec<_> = join_all(locks)
        .await
        .into_iter()
        .collect::<Result<_, _>>()
        .unwrap();
    let outsider = client.lock("x:0").renewed_lease(HELD).acquire().await.unwrap();
    // One becomes a string, one is lost, and one may not be touched any more: its whole batch is refused.
    server.command(&["SET", "k:1", "a string"]).await;
    server.command(&["DEL", "k:2"]).await;
    server
        .command(&["ACL", "SETUSER", "svc", "resetkeys", "~k:*", "~dlock:*"])
        .await;
    tokio::time::sleep(HELD * 2).await;
    for (i, guard) in guards.iter().enumerate() {
        assert_eq!(guard.is_held(), i != 1 && i != 2, "k:{i} is {:?}", guard.state());
        assert!(
            i == 1 || i == 2 || guard.remaining() > HELD / 3,
            "k:{i}: {:?}",
            guard.remaining()
        );
    }
    assert!(!outsider.is_held());
    server.command(&["ACL", "SETUSER", "svc", "allkeys"]).await;
    drop(outsider);
    drop(guards);
    server.command(&["DEL", "k:1"]).await;
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_10_renewals_become_urgent_and_the_loss_comes_before_the_lease_ends() {
    const HELD: Duration = Duration::from_millis(2000);
    let (store, proxy, a, _b) = setting().await;
    let server = store.as_server();
    let guard = a.lock("k").renewed_lease(HELD).acquire().await.unwrap();
    let before = Instant::now();
    let ends = before + server.ttl("k").await.unwrap();
    // Renewals do not arrive any more, whatever the connection.
    proxy.block(Direction::ToServer);
    proxy.forget();
    eventually("it is in doubt", || async {
        guard.state() == dlock::HoldState::Suspect
    })
    .await;
    assert!(
        before.elapsed() < HELD * 2 / 3 + SLACK,
        "a third of the lease, and some patience"
    );
    let loss = guard.lost().await;
    assert!(
        loss == dlock::Loss::Expired && Instant::now() < ends,
        "{loss:?}, {:?} late",
        ends.elapsed()
    );
    proxy.unblock(Direction::ToServer);
    assert!(guard.release().await.unwrap_err().is_lost());
    // In doubt and back: held again, before and after.
    let guard = a.lock("k").renewed_lease(LEASE / 10).acquire().await.unwrap();
    proxy.block(Direction::Both);
    eventually("it is in doubt", || async {
        guard.state() == dlock::HoldState::Suspect
    })
    .await;
    proxy.unblock(Direction::Both);
    eventually("it is held again", || async {
        guard.state() == dlock::HoldState::Held
    })
    .await;
    guard.release().await.unwrap();
    store.assert_clean(&[&a]).await;
}
