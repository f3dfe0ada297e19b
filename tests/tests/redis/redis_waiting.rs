//! Waiting on a real server: no message that is lost costs a lease, and a waiter sends nothing but the looks
//! that it owes.

use std::time::{Duration, Instant};

use dlock::LockClient;
use dlock_tests::faults::{PATIENCE, SOON, TIMEOUT, hasty, in_rounds, patient, setting, step, within};
use dlock_tests::{Direction, Flavor, Proxy, Server, Store, Swallow, eventually, settle};
use futures_util::future::join_all;

const MS: Duration = Duration::from_millis(1);

/// Waits for the lock in the background, and releases it when it came.
fn wait_for(client: &LockClient, key: &str) -> tokio::task::JoinHandle<()> {
    let lock = client.lock(key);
    tokio::spawn(async move {
        let guard = lock.acquire().await.unwrap();
        guard.release().await.unwrap();
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
async fn lost_message_delays_a_waiter_by_no_lease() {
    let (store, proxy, a, b) = setting().await;
    proxy.lose_messages(true);
    // The waiter looks again when the holder's lease is over, or a renewal is due.
    let lock = b.lock("k").lease(3000 * MS);
    let guard = lock.acquire().await.unwrap();
    let waiter = wait_for(&a, "k");
    is_subscribed(store.as_server(), "k").await;
    settle().await;
    // On a machine that stood still it was lost, which is released just as well.
    let _ = guard.release().await;
    within(1500 * MS, "the look", waiter).await.unwrap();
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_catches_up_on_messages_missed_while_the_subscription_is_cut() {
    let (store, proxy, a, b) = setting().await;
    for half_open in [false, true] {
        let guard = b.lock("k").acquire().await.unwrap();
        let waiter = wait_for(&a, "k");
        is_subscribed(store.as_server(), "k").await;
        settle().await;
        let id = subscriber(&proxy);
        // Half open it stays until the next ping, in 5 s at most.
        let limit = if half_open {
            proxy.block_connection(id, Direction::ToClient);
            Duration::from_secs(5) + TIMEOUT
        } else {
            proxy.refuse();
            proxy.cut_connection(id);
            1000 * MS
        };
        guard.release().await.unwrap();
        settle().await;
        proxy.accept();
        within(limit, format!("the wake-up, half open: {half_open}"), waiter)
            .await
            .unwrap();
        store.assert_clean(&[&b]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_sees_a_release_from_before_its_subscription() {
    for _ in 0..2 {
        in_rounds("the release is before the subscription", async || {
            let (store, proxy, a, b) = setting().await;
            let guard = b.lock("k").acquire().await.unwrap();
            let late = proxy.hold(1, |command| command.is("SUBSCRIBE"));
            let waiter = wait_for(&a, "k");
            late.caught().await;
            guard.release().await.unwrap();
            tokio::time::sleep(TIMEOUT / 2).await;
            // It gets no notification, unless the client has subscribed once more.
            let early = waiter.is_finished();
            late.release();
            within(SOON, "the look", waiter).await.unwrap();
            store.assert_clean(&[&a, &b]).await;
            if early {
                Err("another subscription")
            } else {
                Ok(())
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_sends_nothing_but_its_due_requests() {
    const HELD: Duration = Duration::from_millis(3000);
    // A machine that stands still brings forth other numbers, but not always.
    in_rounds("few looks in one and a half leases", async || {
        let store = Store::server().await;
        let server = store.as_server();
        let (a, b) = (patient(&server.url()).await, patient(&server.url()).await);
        let guard = b.lock("k").lease(HELD).acquire().await.unwrap();
        let monitor = server.monitor().await;
        let waiter = wait_for(&a, "k");
        is_subscribed(server, "k").await;
        settle().await;
        let count = async |name| monitor.commands().await.into_iter().filter(step(name)).count();
        // One to learn that it has to wait, one when it is subscribed.
        let first = count("acquire").await;
        monitor.forget();
        tokio::time::sleep(HELD + HELD / 2).await;
        let all = monitor.commands().await;
        let of = |name| all.iter().filter(|command| step(name)(command)).count();
        let (looks, renewals) = (of("acquire"), of("renew"));
        let as_owed = first <= 3
            && (2..=4).contains(&looks)
            && (4..=5).contains(&renewals)
            // And a ping.
            && all.len() <= looks + renewals + 1;
        let released = guard.release().await;
        within(SOON, "the wake-up", waiter).await.unwrap();
        store.assert_clean(&[&a, &b]).await;
        if as_owed && released.is_ok() {
            Ok(())
        } else {
            Err((first, all, released))
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_hundred_waiters_cost_one_connection_and_few_requests() {
    let (store, proxy, a, b) = setting().await;
    let patient = patient(&proxy.url()).await;
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
    assert_eq!(subscribed, 500, "each of them is asked for once");
    proxy.forget();
    drop(guards);
    for outcome in within(SOON, "five hundred wake-ups", join_all(waiters)).await {
        outcome.unwrap();
    }
    store.assert_clean(&[&patient, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_subscriptions_are_forbidden_waiters_look_now_and_then() {
    in_rounds("some looks in a second", async || {
        let server = Server::builder(Flavor::from_env())
            .acl("mute on >pw ~* resetchannels +@all")
            .start()
            .await;
        let store = Store::Server(Box::new(server));
        let server = store.as_server();
        let proxy = Proxy::start(server.addr());
        let a = hasty(&proxy.url_as("mute", "pw")).await;
        let b = patient(&server.url_as("mute", "pw")).await;
        let guard = b.lock("k").acquire().await.unwrap();
        let waiter = wait_for(&a, "k");
        let began = Instant::now();
        tokio::time::sleep(1000 * MS).await;
        let seen = (proxy.count(step("acquire")), proxy.connections_seen());
        let took = began.elapsed();
        // The holder may not tell either, and still releases the lock.
        guard.release().await.unwrap();
        within(SOON, "a look", waiter).await.unwrap();
        store.assert_clean(&[&a, &b]).await;
        if (3..=20).contains(&seen.0) && seen.1 <= 10 {
            Ok(())
        } else {
            Err(format!("{seen:?} looks and connections in {took:?}"))
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_idle_leases_send_their_renewals_and_nothing_else() {
    const HELD: Duration = Duration::from_millis(1500);
    in_rounds("the renewals of two leases", async || {
        let store = Store::server().await;
        let proxy = Proxy::start(store.as_server().addr());
        let a = patient(&proxy.url()).await;
        let guards = [
            a.lock("k").lease(HELD).acquire().await.unwrap(),
            a.lock("l").lease(HELD).acquire().await.unwrap(),
        ];
        let monitor = store.as_server().monitor().await;
        tokio::time::sleep(HELD * 2 + HELD / 6).await;
        let sent = monitor.commands().await;
        // Six periods of a third of the lease; two leases that are due together share a call.
        let renewals = sent.iter().filter(|command| step("renew")(command)).count();
        let fresh = guards.iter().all(|guard| guard.remaining() > HELD / 2);
        if !(6..=12).contains(&renewals) || renewals != sent.len() || !fresh {
            return Err(format!("fresh: {fresh}, {sent:?}"));
        }
        assert_eq!((proxy.connections_open(), proxy.connections_seen()), (1, 1));
        drop(guards);
        store.assert_clean(&[&a]).await;
        monitor.commands().await;
        monitor.forget();
        tokio::time::sleep(HELD).await;
        let sent = monitor.commands().await;
        assert!(sent.is_empty(), "something is left ticking: {sent:?}");
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewals_do_not_multiply_over_forty_cycles_and_end_with_the_release() {
    const HELD: Duration = Duration::from_millis(1200);
    in_rounds("the renewals of one lease", async || {
        let store = Store::server().await;
        let server = store.as_server();
        let client = patient(&server.url()).await;
        let lock = client.lock("k").lease(HELD);
        for i in 0..40 {
            let guard = lock.acquire().await.unwrap();
            if i % 2 == 0 {
                drop(guard)
            } else if let Err(error) = guard.release().await {
                return Err(error.to_string());
            }
        }
        let guard = lock.acquire().await.unwrap();
        let monitor = server.monitor().await;
        tokio::time::sleep(HELD * 2 + HELD / 6).await;
        let renewals = monitor.commands().await.into_iter().filter(step("renew")).count();
        let released = guard.release().await;
        if !(5..=7).contains(&renewals) || released.is_err() {
            return Err(format!("{renewals} renewals in six periods, then {released:?}"));
        }
        monitor.commands().await;
        monitor.forget();
        tokio::time::sleep(HELD).await;
        let sent = monitor.commands().await;
        assert!(sent.is_empty(), "{sent:?}");
        store.assert_clean(&[&client]).await;
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failing_lock_delays_none_of_fifty_others() {
    const HELD: Duration = Duration::from_millis(1500);
    in_rounds("the others are renewed in time", async || {
        let builder = Server::builder(Flavor::from_env()).acl("svc on >pw ~* &* +@all");
        let store = Store::Server(Box::new(builder.start().await));
        let server = store.as_server();
        let client = patient(&server.url_as("svc", "pw")).await;
        let locks = (0..50).map(|i| client.lock(format!("k:{i}")).lease(HELD).acquire());
        let guards: Vec<_> = join_all(locks)
            .await
            .into_iter()
            .collect::<Result<_, _>>()
            .unwrap();
        let outsider = client.lock("x:0").lease(HELD).acquire().await.unwrap();
        // One becomes a string, one is lost, and one may not be touched any more: its whole batch is refused.
        server.command(&["SET", "k:1", "a string"]).await;
        server.command(&["DEL", "k:2"]).await;
        server
            .command(&["ACL", "SETUSER", "svc", "resetkeys", "~k:*", "~dlock:*"])
            .await;
        tokio::time::sleep(HELD * 2).await;
        assert!(!outsider.is_held());
        let mut late = Vec::new();
        for (i, guard) in guards.iter().enumerate() {
            if i == 1 || i == 2 {
                assert!(!guard.is_held(), "k:{i} is {:?}", guard.state());
            } else if guard.remaining() <= HELD / 3 {
                late.push((i, guard.state(), guard.remaining()));
            }
        }
        server.command(&["ACL", "SETUSER", "svc", "allkeys"]).await;
        drop(outsider);
        drop(guards);
        server.command(&["DEL", "k:1"]).await;
        store.assert_clean(&[&client]).await;
        if late.is_empty() { Ok(()) } else { Err(late) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_gives_up_while_a_subscription_fails_leaves_none_behind() {
    let server = Server::start(Flavor::from_env()).await;
    let proxy = Proxy::start(server.addr());
    let (a, b) = (hasty(&server.url()).await, hasty(&proxy.url()).await);
    let mut held = Vec::new();
    for key in ["k0", "k1", "k2"] {
        held.push(a.lock(key).acquire().await.unwrap());
    }
    let wait = |key: &str| tokio::spawn(b.lock(key).wait(PATIENCE).acquire());
    let is_subscribed = async |key: &str| server.pubsub_channels().await.iter().any(|it| it.contains(key));
    let gives_up = wait("k0");
    eventually("k0 is waited for", async || is_subscribed("k0").await).await;
    // The next subscription is slow, and fails after that; in between waiters come and go.
    let slow = proxy.hold(1, |command| command.is("SUBSCRIBE"));
    let first = wait("k1");
    slow.caught().await;
    let lost = proxy.swallow(1, Swallow::Cut, |command| command.is("SUBSCRIBE"));
    let second = wait("k2");
    eventually("both wait", async || b.waited_for() == 3).await;
    settle().await;
    gives_up.abort();
    settle().await;
    slow.release();
    lost.caught().await;
    eventually("k2 is waited for", async || is_subscribed("k2").await).await;
    eventually("nobody waits for k0", async || !is_subscribed("k0").await).await;
    first.abort();
    second.abort();
    for guard in held {
        guard.release().await.unwrap();
    }
}

/// How many scripts the server has run.
async fn scripts(server: &Server) -> u64 {
    let stats: String = server.query(&["INFO", "commandstats"]).await;
    let calls = |line: &str| {
        line.split_once("calls=")?
            .1
            .split(',')
            .next()?
            .parse::<u64>()
            .ok()
    };
    (stats.lines())
        .filter(|line| line.starts_with("cmdstat_eval"))
        .filter_map(calls)
        .sum()
}

/// Of many processes that hear of a release a few ask for the lock, and those learn from a message that it is taken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crowd_of_processes_asks_a_few_times_for_each_handoff() {
    const PROCESSES: usize = 40;
    const HANDOFFS: usize = 40;
    in_rounds("the machine keeps up", async || {
        let server = Server::start(Flavor::from_env()).await;
        let url = server.url();
        let clients = join_all((0..PROCESSES).map(|_| patient(&url))).await;
        let holder = clients[0].lock("k").acquire().await.unwrap();
        let waiting = join_all(clients[1..].iter().map(|client| async {
            let guard = client.lock("k").acquire().await.unwrap();
            tokio::time::sleep(5 * MS).await;
            guard.release().await.unwrap();
        }));
        let measured = async {
            eventually("all of them listen", || async {
                let listeners: (String, usize) = server
                    .query(&["PUBSUB", "NUMSUB", "redisson_lock__channel:{k}"])
                    .await;
                listeners.1 == PROCESSES - 1
            })
            .await;
            settle().await;
            let before = scripts(&server).await;
            holder.release().await.unwrap();
            before
        };
        let (before, _) = tokio::join!(measured, waiting);
        let asked = scripts(&server).await - before;
        // A release for each of them besides. When all ask, it is a half of all processes on average.
        let most = HANDOFFS * 14;
        match usize::try_from(asked).unwrap() {
            asked if asked < most => {
                println!("{asked} requests for {HANDOFFS} handoffs");
                Ok(())
            }
            asked => Err(format!("{asked} requests for {HANDOFFS} handoffs")),
        }
    })
    .await;
}

/// It measures time to the millisecond.
mod alone {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn failing_renewals_become_urgent_and_the_loss_precedes_the_lease_end() {
        const HELD: Duration = Duration::from_millis(2000);
        in_rounds("its renewals do not arrive any more", async || {
            let (store, proxy, a, _b) = setting().await;
            let server = store.as_server();
            let guard = a.lock("k").lease(HELD).acquire().await.unwrap();
            // Renewals do not arrive any more, whatever the connection.
            proxy.block(Direction::ToServer);
            settle().await;
            let before = Instant::now();
            let Some(ttl) = server.ttl("k").await else {
                return Err("it ended before the question");
            };
            let ends = before + ttl;
            let mut doubted = false;
            let loss = loop {
                let now = Instant::now();
                match guard.state() {
                    dlock::HoldState::Lost(loss) => break loss,
                    state => {
                        assert!(now < ends, "{:?} late", now - ends);
                        doubted |= state == dlock::HoldState::Suspect;
                    }
                }
                tokio::time::sleep(MS).await;
            };
            assert_eq!(loss, dlock::Loss::Expired);
            proxy.unblock(Direction::ToServer);
            assert!(guard.release().await.unwrap_err().is_lost());
            store.assert_clean(&[&a]).await;
            if doubted {
                Ok(())
            } else {
                Err("nobody saw it in doubt")
            }
        })
        .await;
        // In doubt and back: held again, before and after.
        let (store, proxy, a, _b) = setting().await;
        let guard = a
            .lock("k")
            .lease(Duration::from_secs(12))
            .acquire()
            .await
            .unwrap();
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
}
