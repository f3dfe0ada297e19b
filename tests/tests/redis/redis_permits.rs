//! Semaphores and latches on a real server: the data and the messages on the wire, replies that are swallowed, copies
//! that come late, subscriptions that break, and acquires that are dropped at any poll.

use std::time::Duration;

use dlock::{Error, LockClient, LockKey, Semaphore};
use dlock_tests::faults::{PATIENCE, SOON, TIMEOUT, ordinary, patient, setting, step, within};
use dlock_tests::{Flavor, Server, Store, Swallow, eventually, is_of_a_step, settle};
use futures_util::StreamExt;
const SECOND: Duration = Duration::from_secs(1);
const SWALLOWS: [Swallow; 2] = [Swallow::Hang, Swallow::Cut];

/// What is on the server but the fence and what remembers steps.
async fn data(server: &Server) -> Vec<String> {
    let mut keys = server.keys().await;
    keys.retain(|key| key != "dlock:fence" && !is_of_a_step(key));
    keys.sort();
    keys
}

async fn has(semaphore: &Semaphore, available: i64) {
    eventually("the permits are back", || async {
        semaphore.available().await.is_ok_and(|free| free == available)
    })
    .await;
}

async fn forget(store: &Store, clients: &[&LockClient]) {
    let client = ordinary(&store.as_server().url()).await;
    assert!(client.semaphore("k").delete().await.unwrap());
    store.assert_clean(clients).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_semaphore_is_a_number_and_a_set_of_holders_as_redisson_has_them() {
    let server = Server::start(Flavor::from_env()).await;
    let client = ordinary(&server.url()).await;
    for (name, holders) in [("k", "{k}:timeout"), ("{tag}:k", "{tag}:k:timeout")] {
        let semaphore = client.semaphore(LockKey::raw(name)).permits(5);
        let permit = semaphore
            .clone()
            .fixed_lease(20 * SECOND)
            .acquire_many(3)
            .await
            .unwrap();
        assert_eq!(data(&server).await, [name, holders]);
        assert_eq!(server.query::<String>(&["GET", name]).await, "2");
        assert_eq!(server.ttl(name).await, None);
        let now = server.time_us().await / 1000;
        let held: Vec<(Vec<u8>, f64)> = server.query(&["ZRANGE", holders, "0", "-1", "WITHSCORES"]).await;
        assert_eq!(held.len(), 3);
        for (id, until) in &held {
            assert_eq!(id.len(), 16);
            let left = *until - now as f64;
            assert!(
                left > 10_000.0 && left <= 20_000.0 && until.fract() == 0.0,
                "{left}"
            );
        }
        // Another acquisition has other ids, of the same client.
        let next = semaphore.acquire().await.unwrap();
        let all: Vec<Vec<u8>> = server.query(&["ZRANGE", holders, "0", "-1"]).await;
        assert_eq!(all.len(), 4);
        assert!(all.iter().all(|id| id[..4] == all[0][..4]));
        permit.release().await.unwrap();
        next.release().await.unwrap();
        assert_eq!(data(&server).await, [name]);
        assert_eq!(server.query::<String>(&["GET", name]).await, "5");
        // An expiry that was set on the number holds for the holders too.
        server.command(&["PEXPIRE", name, "50000"]).await;
        let permit = semaphore.acquire().await.unwrap();
        let left = server.ttl(holders).await.expect("as long as the number");
        assert!(left > 20 * SECOND && left <= 50 * SECOND, "{left:?}");
        permit.release().await.unwrap();
        assert!(semaphore.delete().await.unwrap());
        assert!(data(&server).await.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_are_those_of_redisson() {
    let server = Server::start(Flavor::from_env()).await;
    let client = ordinary(&server.url()).await;
    let channels = ["redisson_sc:{k}", "redisson_countdownlatch__channel__{l}"];
    let mut pubsub = server.client().unwrap().get_async_pubsub().await.unwrap();
    for channel in channels {
        pubsub.subscribe(channel).await.unwrap();
    }
    let mut messages = pubsub.on_message();
    let mut heard = async |channel: &str| {
        let message = within(SOON, "the message", messages.next()).await.unwrap();
        assert_eq!(message.get_channel_name(), channel);
        message.get_payload::<String>().unwrap()
    };
    let semaphore = client.semaphore("k");
    semaphore.set_permits(4).await.unwrap();
    assert_eq!(heard(channels[0]).await, "4");
    let (one, two) = (
        semaphore.acquire().await.unwrap(),
        semaphore.acquire_many(2).await.unwrap(),
    );
    one.release().await.unwrap();
    assert_eq!(heard(channels[0]).await, "2");
    two.release().await.unwrap();
    assert_eq!(heard(channels[0]).await, "4");
    semaphore.add_permits(3).await.unwrap();
    assert_eq!(heard(channels[0]).await, "7");
    // Fewer, and what comes back to no more than none, is nothing to tell.
    let all = semaphore.acquire_many(7).await.unwrap();
    semaphore.remove_permits(7).await.unwrap();
    all.release().await.unwrap();
    semaphore.add_permits(1).await.unwrap();
    assert_eq!(heard(channels[0]).await, "1");
    // A greater total is told though none is free: Redisson wakes no waiter for it.
    let one = semaphore.acquire().await.unwrap();
    semaphore.remove_permits(1).await.unwrap();
    semaphore.set_permits(1).await.unwrap();
    assert_eq!(heard(channels[0]).await, "0");
    one.release().await.unwrap();
    assert_eq!(heard(channels[0]).await, "1");

    let latch = client.latch("l");
    latch.try_set_count(2).await.unwrap();
    assert_eq!(heard(channels[1]).await, "1");
    latch.count_down().await.unwrap();
    assert_eq!(server.query::<String>(&["GET", "l"]).await, "1");
    latch.count_down().await.unwrap();
    assert_eq!(heard(channels[1]).await, "0");
    assert_eq!(data(&server).await, ["k"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_data_is_left_alone() {
    let server = Server::start(Flavor::from_env()).await;
    let client = ordinary(&server.url()).await;
    server.command(&["SET", "text", "hello"]).await;
    server.command(&["SET", "fraction", "1.5"]).await;
    server.command(&["RPUSH", "list", "a"]).await;
    server.command(&["HSET", "hash", "a", "b"]).await;
    server.command(&["SET", "number", "3"]).await;
    server.command(&["SET", "{number}:timeout", "not a set"]).await;
    server.command(&["SET", "queue", "0"]).await;
    server
        .command(&["SET", "{queue}:dlock:queue", "not a hash"])
        .await;
    let before = async |name: &str| server.query::<redis::Value>(&["DUMP", name]).await;
    for name in ["text", "fraction", "list", "hash", "number", "queue"] {
        let seen = before(name).await;
        let semaphore = client.semaphore(name).permits(2);
        let mut outcomes = vec![
            semaphore.try_acquire().await.map(drop),
            semaphore.try_acquire_many(2).await.map(drop),
        ];
        if name != "queue" {
            outcomes.push(semaphore.add_permits(1).await.map(drop));
            outcomes.push(semaphore.status().await.map(drop));
            outcomes.push(semaphore.delete().await.map(drop));
        }
        if !["number", "queue"].contains(&name) {
            outcomes.push(client.unowned_semaphore(name).permits(2).try_acquire().await);
            outcomes.push(client.latch(name).count_down().await.map(drop));
            outcomes.push(client.latch(name).try_set_count(3).await.map(drop));
            outcomes.push(client.latch(name).delete().await.map(drop));
        }
        for outcome in outcomes {
            assert!(
                matches!(outcome, Err(Error::KeyTaken { .. })),
                "{name}: {outcome:?}"
            );
        }
        assert_eq!(before(name).await, seen, "{name}");
    }
    settle().await;
    assert_eq!((client.held(), client.waited_for()), (0, 0));
}

/// Nobody may ask for it ever again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holders_under_a_limit_leave_nothing_behind_for_ever() {
    let server = Server::start(Flavor::from_env()).await;
    let client = ordinary(&server.url()).await;
    let semaphore = client.semaphore("k").limit(3);
    let lives = async |at_most| {
        let ttl = server
            .ttl("{k}:timeout")
            .await
            .expect("it goes with the last lease");
        assert!(ttl <= at_most, "{ttl:?}");
    };
    let long = semaphore
        .clone()
        .fixed_lease(60 * SECOND)
        .acquire()
        .await
        .unwrap();
    let short = semaphore.clone().fixed_lease(SECOND).acquire().await.unwrap();
    lives(66 * SECOND).await;
    assert!(server.ttl("{k}:timeout").await.unwrap() > 30 * SECOND);
    long.release().await.unwrap();
    drop(short);
    let kept = semaphore.clone().min_hold(SECOND).acquire().await.unwrap();
    kept.release().await.unwrap();
    lives(7 * SECOND).await;
    eventually("nothing is left", async || data(&server).await.is_empty()).await;
    // A total stays, and what is held of it comes back to it.
    let permit = semaphore.acquire().await.unwrap();
    assert!(client.semaphore("k").try_set_permits(5).await.unwrap());
    let ttl = server.ttl("{k}:timeout").await;
    assert!(ttl.is_none_or(|ttl| ttl > 1_000_000 * SECOND), "{ttl:?}");
    permit.release().await.unwrap();
    assert!(client.semaphore("k").delete().await.unwrap());
    // Also where others set it, who know nothing of that.
    let permit = semaphore.clone().lease(3 * SECOND).acquire().await.unwrap();
    lives(9 * SECOND).await;
    server.command(&["SET", "k", "5"]).await;
    eventually("a renewal keeps it", async || {
        let ttl = server.ttl("{k}:timeout").await;
        ttl.is_none_or(|ttl| ttl > 1_000_000 * SECOND)
    })
    .await;
    permit.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_steps_in_one_call_harm_each_other_as_little_as_alone() {
    let server = Server::start(Flavor::from_env()).await;
    let client = ordinary(&server.url()).await;
    server.command(&["SET", "text", "hello"]).await;
    for _ in 0..5 {
        let (semaphore, unowned) = (
            client.semaphore("k").permits(3),
            client.unowned_semaphore("u").permits(1),
        );
        let (text, latch) = (client.semaphore("text").permits(1), client.latch("l"));
        let lock = client.lock("lock");
        let (two, wrong, one, guard, taken, set, none) = tokio::join!(
            semaphore.try_acquire_many(2),
            text.try_acquire(),
            semaphore.try_acquire(),
            lock.try_acquire(),
            unowned.try_acquire(),
            latch.try_set_count(1),
            semaphore.try_acquire(),
        );
        assert!(matches!(wrong, Err(Error::KeyTaken { .. })) && none.unwrap_err().is_busy());
        assert!(set.unwrap() && taken.is_ok());
        let (two, one, guard) = (two.unwrap(), one.unwrap(), guard.unwrap());
        assert!(one.fencing_token() > 0 && two.fencing_token() != one.fencing_token());
        let (down, given, two, one, guard) = tokio::join!(
            latch.count_down(),
            unowned.release(),
            two.release(),
            one.release(),
            guard.release()
        );
        assert_eq!(down.unwrap(), 0);
        given.unwrap();
        two.and(one).and(guard).unwrap();
        has(&semaphore, 3).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_step_of_a_counter_whose_reply_is_lost_is_carried_out_once_and_answered() {
    for then in SWALLOWS {
        let (store, proxy, a, b) = setting().await;
        let (semaphore, latch) = (a.semaphore("k"), a.latch("l"));
        let lost = |name| proxy.swallow(1, then, step(name));

        let fault = lost("set");
        assert!(
            within(SOON, "set", semaphore.try_set_permits(4)).await.unwrap(),
            "{then:?}"
        );
        assert!(fault.fired());
        let fault = lost("add");
        assert_eq!(
            within(SOON, "add", semaphore.add_permits(3)).await.unwrap().total,
            7
        );
        assert!(fault.fired());
        let fault = lost("add");
        assert_eq!(
            within(SOON, "remove", semaphore.remove_permits(2))
                .await
                .unwrap()
                .total,
            5
        );
        assert!(fault.fired());
        let fault = lost("permits");
        assert_eq!(within(SOON, "look", semaphore.available()).await.unwrap(), 5);
        assert!(fault.fired());
        assert_eq!(b.semaphore("k").available().await.unwrap(), 5);
        let fault = lost("delete");
        assert!(within(SOON, "delete", semaphore.delete()).await.unwrap());
        assert!(fault.fired());

        let fault = lost("set_count");
        assert!(within(SOON, "set_count", latch.try_set_count(3)).await.unwrap());
        assert!(fault.fired());
        for left in [2, 1, 0] {
            let fault = lost("count_down");
            assert_eq!(
                within(SOON, "count_down", latch.count_down()).await.unwrap(),
                left
            );
            assert!(fault.fired());
        }
        let fault = lost("count_down");
        let below = within(SOON, "below zero", latch.count_down()).await;
        assert!(
            fault.fired() && matches!(below, Err(Error::LatchOpen { .. })),
            "{below:?}"
        );
        assert!(b.latch("l").try_set_count(1).await.unwrap());
        let fault = lost("delete_latch");
        assert!(within(SOON, "delete", latch.delete()).await.unwrap());
        assert!(fault.fired());
        store.assert_clean(&[&a, &b]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_comes_late_changes_nothing_any_more() {
    let (store, proxy, a, b) = setting().await;
    let latch = a.latch("l");
    b.latch("l").try_set_count(9).await.unwrap();
    // Held back on its way for longer than its client waits, and let go when it has been repeated.
    let late = proxy.hold(1, step("count_down"));
    assert_eq!(within(SOON, "count_down", latch.count_down()).await.unwrap(), 8);
    late.release();
    settle().await;
    assert_eq!(b.latch("l").count().await.unwrap(), 8);
    assert!(b.latch("l").delete().await.unwrap());

    let unowned = a.unowned_semaphore("k");
    b.unowned_semaphore("k").try_set_permits(3).await.unwrap();
    let late = proxy.hold(1, step("unowned"));
    let once = within(TIMEOUT, "try_acquire", unowned.try_acquire_many(2)).await;
    assert!(once.is_err());
    late.release();
    eventually("no caller took any", || async {
        b.unowned_semaphore("k").available().await.unwrap() == 3
    })
    .await;
    settle().await;
    assert_eq!(b.unowned_semaphore("k").available().await.unwrap(), 3);
    forget(&store, &[&b]).await;
}

/// It asked before the server's clock was set back by an hour.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_waiter_whose_time_is_far_ahead_has_no_position() {
    let store = Store::server().await;
    let server = store.as_server();
    let client = store.client().await;
    let semaphore = client.semaphore("k");
    semaphore.set_permits(2).await.unwrap();
    let (seconds, _): (u64, u64) = server.query(&["TIME"]).await;
    let waiter = format!("1 2 {}", (seconds + 3600) * 1000);
    server
        .command(&["HSET", "{k}:dlock:queue", "dead", &waiter])
        .await;
    let both = semaphore.try_acquire_many(2).await.unwrap();
    both.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_position_is_kept_by_looks_and_the_queue_is_gone_with_its_waiters() {
    let store = Store::server().await;
    let server = store.as_server();
    let (a, b) = (patient(&server.url()).await, patient(&server.url()).await);
    let semaphore = a.semaphore("k");
    semaphore.set_permits(2).await.unwrap();
    let held = semaphore.acquire().await.unwrap();
    let waiter = tokio::spawn(b.semaphore("k").wait(PATIENCE).acquire_many(2));
    eventually("it stands in line", || async {
        data(server).await == ["k", "{k}:dlock:queue", "{k}:timeout"]
    })
    .await;
    assert!(server.ttl("{k}:dlock:queue").await.is_some());
    // For longer than the position of a silent waiter is kept.
    tokio::time::sleep(6 * SECOND).await;
    assert!(semaphore.try_acquire().await.unwrap_err().is_busy());
    held.release().await.unwrap();
    let two = within(SOON, "both", waiter).await.unwrap().unwrap();
    assert_eq!(data(server).await, ["k", "{k}:timeout"]);
    two.release().await.unwrap();
    forget(&store, &[&a, &b]).await;
}

/// The holders of `x` and `{x}` are under one name on the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn semaphore_whose_name_is_in_braces_is_listed_and_forced_by_that_name() {
    let server = Server::start(Flavor::from_env()).await;
    let client = ordinary(&server.url()).await;
    let listed = async |prefix: &str| {
        let mut keys: Vec<_> = client.list(prefix).await.unwrap();
        keys.dedup_by(|a, b| a.0 == b.0);
        keys.into_iter()
            .map(|(key, _)| key.to_string())
            .collect::<Vec<_>>()
    };
    for (name, other) in [("{jobs}", "jobs"), ("tasks", "{tasks}")] {
        let semaphore = client.semaphore(LockKey::raw(name)).permits(2);
        let permits = semaphore.clone().acquire_many(2).await.unwrap();
        assert_eq!(listed("").await, [name]);
        assert_eq!(listed(&name[..1]).await, [name]);
        assert!(listed(&other[..1]).await.is_empty());
        assert!(!client.force_release(LockKey::raw(other)).await.unwrap());
        assert!(!client.semaphore(LockKey::raw(other)).delete().await.unwrap());
        assert_eq!(semaphore.available().await.unwrap(), 0);
        assert!(client.force_release(LockKey::raw(name)).await.unwrap());
        assert_eq!(semaphore.available().await.unwrap(), 2);
        drop(permits);
        assert!(semaphore.delete().await.unwrap());
    }
    // Without a number it is either of them, once.
    let limited = client.semaphore(LockKey::raw("{k}")).limit(1);
    let permit = limited.acquire().await.unwrap();
    assert_eq!(listed("").await, ["k"]);
    drop(permit);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_without_a_holder_is_served_when_a_lease_ends() {
    let server = Server::start(Flavor::from_env()).await;
    let client = ordinary(&server.url()).await;
    let semaphore = client.semaphore("k").permits(1).fixed_lease(2 * SECOND);
    let permit = semaphore.acquire().await.unwrap();
    let unowned = client.unowned_semaphore("k").wait(PATIENCE);
    // Without the lease it would ask again after half a minute.
    let taken = within(20 * SECOND, "the permit", unowned.acquire()).await;
    taken.unwrap();
    drop(permit);
}
