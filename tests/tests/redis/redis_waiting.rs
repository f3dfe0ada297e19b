//! Waiting on a real server: no message that is lost costs a lease, and a waiter sends nothing but the looks
//! that it owes.

use std::time::{Duration, Instant};

use dlock::{LockClient, LockKind};
use dlock_tests::faults::{PATIENCE, SOON, hasty, in_rounds, patient, setting, within};
use dlock_tests::{Direction, Flavor, Proxy, Server, Swallow, eventually, settle};
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
    eventually("a waiter listens", || async {
        server
            .pubsub_channels()
            .await
            .iter()
            .any(|channel| channel.contains(key))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_message_delays_a_waiter_by_no_lease() {
    let (store, proxy, a, b) = setting().await;
    proxy.lose_messages(true);
    in_rounds("it looks when half of the lease is over", async || {
        let begun = Instant::now();
        let guard = b.lock("k").lease(3000 * MS).acquire().await.unwrap();
        let waiter = wait_for(&a, "k");
        is_subscribed(store.as_server(), "k").await;
        settle().await;
        // On a machine that stood still it was lost, which is released just as well.
        let _ = guard.release().await;
        within(SOON, "the look", waiter).await.unwrap();
        let took = begun.elapsed();
        store.assert_clean(&[&a, &b]).await;
        // One that was told comes sooner, and one that trusts in messages when the lease would have ended.
        match (1000 * MS..2500 * MS).contains(&took) {
            true => Ok(()),
            false => Err(took),
        }
    })
    .await;
}

/// With half of the lease it would look too late.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_message_costs_no_waiter_its_whole_wait() {
    let (store, proxy, a, b) = setting().await;
    proxy.lose_messages(true);
    for kind in [LockKind::Mutex, LockKind::Fenced, LockKind::Write] {
        let waits = |client: &LockClient| {
            let lock = match kind {
                LockKind::Mutex => client.lock("k"),
                LockKind::Fenced => client.fenced_lock("k"),
                _ => client.rw_lock("k").write(),
            };
            lock.lease(60_000 * MS).wait(10_000 * MS).acquire()
        };
        let guard = waits(&b).await.unwrap();
        let waiter = tokio::spawn(waits(&a));
        is_subscribed(store.as_server(), "k").await;
        settle().await;
        guard.release().await.unwrap();
        let guard = within(PATIENCE, "the look", waiter).await.unwrap().unwrap();
        guard.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }
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
async fn waiter_that_gives_up_while_a_subscription_fails_leaves_none_behind() {
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
    eventually("no client waits for k0", async || !is_subscribed("k0").await).await;
    first.abort();
    second.abort();
    for guard in held {
        guard.release().await.unwrap();
    }
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
                Err("the hold was never suspect")
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

/// A process that lets others go first listens for them. Where no other process waits, only callers that find the lock held listen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_does_not_yield_to_its_own_subscriptions() {
    const ROUNDS: u64 = 50;
    let (store, _proxy, a, _) = setting().await;
    let server = store.as_server();
    let kinds = [
        (LockKind::Mutex, LockKind::Mutex),
        (LockKind::Fenced, LockKind::Fenced),
        (LockKind::Read, LockKind::Write),
        (LockKind::Write, LockKind::Read),
    ];
    for (of_holder, of_waiter) in kinds {
        let key = format!("{of_holder}");
        let (holder, waiter) = (a.lock(&*key).kind(of_holder), a.lock(&*key).kind(of_waiter));
        server.forget_commands().await;
        for _ in 0..ROUNDS {
            let guard = holder.acquire().await.unwrap();
            let waits = tokio::spawn({
                let waiter = waiter.clone();
                async move { waiter.acquire().await.unwrap().release().await.unwrap() }
            });
            is_subscribed(server, &key).await;
            guard.release().await.unwrap();
            waits.await.unwrap();
            for next in [&holder, &waiter] {
                next.acquire().await.unwrap().release().await.unwrap();
            }
        }
        let stats: String = server.query(&["INFO", "commandstats"]).await;
        let calls = stats
            .lines()
            .find_map(|line| line.strip_prefix("cmdstat_subscribe:calls="));
        let calls = calls
            .and_then(|rest| rest.split(',').next())
            .expect("one for each waiter");
        let calls: u64 = calls.parse().unwrap();
        assert!(
            calls <= ROUNDS * 3 / 2,
            "{calls} subscriptions for {ROUNDS} waiters of {of_holder}"
        );
    }
}
