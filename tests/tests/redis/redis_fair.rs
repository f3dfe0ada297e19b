//! Fair and fenced locks on the server: the data of Redisson's, and its arithmetic with them, which must cost none of
//! ours its place. Redisson's waiters are played here, so that each moment can be hit; interop_fair.rs has the real ones.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::{Error, LockClient, LockKey};
use dlock_tests::faults::{PATIENCE, SOON, in_rounds, ordinary, step, within};
use dlock_tests::{Command, Flavor, Proxy, Server, Store, eventually, settle};
use futures_util::StreamExt;
use parking_lot::Mutex;
use redis::Value;
use tokio::task::JoinHandle;

use crate::redis_wire::script;

const SECOND: Duration = Duration::from_secs(1);
/// What Redisson gives each of its waiters.
const PATIENT: i64 = 300_000;
/// What one of ours has.
const PLACE: i64 = 5_000;
/// What is left of a position that was taken a moment ago.
const YOUNG: i64 = PLACE - 100;
/// A little more than the time between two requests of a waiter.
const NEXT_QUESTION: Duration = Duration::from_millis(1700);

const QUEUE: &str = "redisson_lock_queue:{k}";
const TIMES: &str = "redisson_lock_timeout:{k}";

/// A waiter of Redisson's, by its thread.
fn java(thread: u32) -> String {
    format!("11111111-2222-4333-8444-555555555555:{thread}")
}

async fn now(server: &Server) -> i64 {
    let (seconds, micros): (i64, i64) = server.query(&["TIME"]).await;
    seconds * 1000 + micros / 1000
}

async fn queue(server: &Server) -> Vec<String> {
    server.query(&["LRANGE", QUEUE, "0", "-1"]).await
}

/// A step of this waiter, as the script takes it.
fn step_of(step: &str, number: u32, rest: &[&str]) -> Vec<String> {
    let grant = format!("00000000-0000-8000-8000-000000000000:{number}");
    let words = [step.to_owned(), (1 + rest.len()).to_string(), grant];
    let rest = rest.iter().map(|word| (*word).to_owned());
    words.into_iter().chain(rest).collect()
}

/// Steps of a fair lock, as the script takes them: waiters come, ask again, hold it for a while yet or release it, and
/// give up.
fn random_steps() -> Vec<Vec<String>> {
    let (mut waiters, mut first) = (1, 1);
    let mut step = |_| {
        let chosen = fastrand::u32(..12);
        let (step, rest): (_, &[&str]) = match chosen {
            0..=2 => ("fair", &["30000", "1", "1", "-1"]),
            3 => ("fair", &["30000", "3", "1", "1000"]),
            4 => ("fair", &["30000", "1", "0", "-1"]),
            5 => ("release_fair", &["60000"]),
            _ => ("release_fair", &["0"]),
        };
        let number = match rest {
            [.., "-1"] => waiters,
            // Perhaps in the order in which they came, as those that are served leave.
            _ if chosen > 7 => {
                first += 1;
                first - 1
            }
            _ => fastrand::u32(1..=waiters),
        };
        waiters = waiters.max(number + 1);
        step_of(step, number, rest)
    };
    (0..fastrand::usize(2..40)).map(&mut step).collect()
}

/// Performs steps on a fair lock in one call, and says what each was answered, without times and tokens.
async fn in_one_call(server: &Server, script: &str, key: &str, steps: &[Vec<String>]) -> Vec<String> {
    let acquires = steps.iter().filter(|step| step[0] == "fair").count().to_string();
    let keys = (1 + steps.len()).to_string();
    let mut call = vec!["EVAL", script, &keys, "dlock:fence"];
    call.extend(steps.iter().map(|_| key));
    call.extend(["9000000000000000", &acquires, &acquires, "0"]);
    call.extend(steps.iter().flatten().map(String::as_str));
    told(&server.query::<Vec<Value>>(&call).await)
}

/// What a call was answered, without times and tokens.
fn told(replies: &[Value]) -> Vec<String> {
    let told = |reply: &Value| match reply {
        Value::Array(words) => {
            // What names are behind it in the queue.
            let behind = words.get(3..).unwrap_or_default();
            format!("{:?} {behind:?}", words[0])
        }
        Value::Int(left) if *left < 0 => "waits".to_owned(),
        other => format!("{other:?}"),
    };
    replies[1..].iter().map(told).collect()
}

/// The same in one short call, which such steps may share: waiters that join and releases; or one acquire alone.
async fn in_a_short_call(server: &Server, script: &str, key: &str, steps: &[Vec<String>]) -> Vec<String> {
    let terms = match steps.iter().find(|step| step[0] == "fair") {
        Some(acquire) => acquire[3..].iter().map(String::as_str).collect(),
        None => vec!["0", "1", "1", "-1"],
    };
    let [queue, times] = queue_of(key);
    let channel = format!("redisson_lock__channel:{{{key}}}");
    let mut call = vec!["EVAL", script, "4", "dlock:fence", key, &queue, &times];
    call.extend([
        "queue",
        "9000000000000000",
        "00000000-0000-8000-8000-000000000000:",
    ]);
    call.extend(terms);
    call.push(&channel);
    for step in steps {
        let (_, number) = step[2].rsplit_once(':').unwrap();
        call.extend([step[0].as_str(), number]);
    }
    told(&server.query::<Vec<Value>>(&call).await)
}

/// The steps as they may share short calls.
fn for_short_calls(steps: &[Vec<String>]) -> impl Iterator<Item = &[Vec<String>]> {
    let shares = |step: &Vec<String>| match &*step[0] {
        "fair" => step[5..] == ["1", "-1"],
        _ => true,
    };
    steps.chunk_by(move |step, next| shares(step) && shares(next))
}

/// The queue of a lock, and the times of its waiters.
fn queue_of(key: &str) -> [String; 2] {
    ["queue", "timeout"].map(|what| format!("redisson_lock_{what}:{{{key}}}"))
}

/// Until when a waiter keeps its position, in ms from now; `None` without a position.
async fn left(server: &Server, id: &str) -> Option<i64> {
    let time: Option<i64> = server.query(&["ZSCORE", TIMES, id]).await;
    Some(time? - now(server).await)
}

/// One of Redisson's comes, whose patience ends so many ms from now.
async fn java_waits(server: &Server, thread: u32, until: i64) {
    server.command(&["RPUSH", QUEUE, &java(thread)]).await;
    let until = (now(server).await + until).to_string();
    server.command(&["ZADD", TIMES, &until, &java(thread)]).await;
}

/// The first of the queue, one of Redisson's with so much patience, takes the lock.
async fn java_takes(server: &Server, thread: u32, patience: i64) {
    server.command(&["LREM", QUEUE, "0", &java(thread)]).await;
    server.command(&["ZREM", TIMES, &java(thread)]).await;
    let waiting: Vec<String> = server.query(&["ZRANGE", TIMES, "0", "-1"]).await;
    for id in waiting {
        let less = (-patience).to_string();
        server.command(&["ZINCRBY", TIMES, &less, &id]).await;
    }
    server.command(&["HSET", "k", &java(thread), "1"]).await;
    server.command(&["PEXPIRE", "k", "30000"]).await;
}

/// It releases the lock: waiters past their time go, the first that stays is told.
async fn java_leaves(server: &Server) {
    for id in queue(server).await {
        if left(server, &id).await.is_none_or(|left| left > 0) {
            break;
        }
        server.command(&["LREM", QUEUE, "0", &id]).await;
        server.command(&["ZREM", TIMES, &id]).await;
    }
    server.command(&["DEL", "k"]).await;
    if let Some(first) = queue(server).await.first() {
        let channel = format!("redisson_lock__channel:{{k}}:{first}");
        server.command(&["PUBLISH", &channel, "0"]).await;
    }
}

/// The waiters in the order in which they were served.
type Order = Arc<Mutex<Vec<u32>>>;

/// One of ours waits: its id, and the task that releases the lock when it was served.
async fn waits(server: &Server, client: &LockClient, name: u32, order: &Order) -> (String, JoinHandle<()>) {
    let before = queue(server).await.len();
    let (lock, order) = (client.fair_lock("k").wait(PATIENCE), order.clone());
    let task = tokio::spawn(async move {
        let guard = lock.acquire().await.unwrap();
        order.lock().push(name);
        guard.release().await.unwrap();
    });
    eventually("it stands in the queue", || async {
        queue(server).await.len() == before + 1
    })
    .await;
    let id = queue(server).await.pop().unwrap();
    (id, task)
}

async fn setting() -> (Store, LockClient, LockClient) {
    let store = Store::server().await;
    let url = store.as_server().url();
    (store, ordinary(&url).await, ordinary(&url).await)
}

/// In a call with many steps on one lock the later ones rely on what the earlier ones have found.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_in_one_call_do_what_they_do_one_by_one() {
    let (script, store) = (script(), Store::server().await);
    let server = store.as_server();
    let data = async |key: &str| {
        let [queue, times] = queue_of(key);
        let waiting: Vec<String> = server.query(&["LRANGE", &queue, "0", "-1"]).await;
        let mut kept: Vec<String> = server.query(&["ZRANGE", &times, "0", "-1"]).await;
        kept.sort_unstable();
        let holder: Vec<String> = server.query(&["HGETALL", key]).await;
        let mut ends = Vec::new();
        for key in [&queue, &times] {
            let left: i64 = server.query(&["PTTL", key]).await;
            // To the nearest minute: a busy machine takes seconds for the steps.
            ends.push((left + 30_000) / 60_000);
        }
        (waiting, kept, holder, ends)
    };
    for _ in 0..100 {
        server.flush().await;
        server.command(&["SET", "dlock:fence", "1000000000000001"]).await;
        // One of Redisson's may wait before them, perhaps for a lock that is held.
        let (waits, is_held) = (fastrand::usize(..3), fastrand::bool());
        for key in ["a", "b"] {
            if let Some(until) = [-500, PATIENT].get(waits) {
                let until = (now(server).await + until).to_string();
                let [queue, times] = queue_of(key);
                server.command(&["RPUSH", &queue, &java(1)]).await;
                server.command(&["ZADD", &times, &until, &java(1)]).await;
            }
            if is_held {
                server.command(&["HSET", key, &java(2), "1"]).await;
            }
        }
        let steps = random_steps();
        let together = in_one_call(server, &script, "a", &steps).await;
        let mut apart = Vec::new();
        for step in &steps {
            apart.extend(in_one_call(server, &script, "b", std::slice::from_ref(step)).await);
        }
        assert_eq!(together, apart, "{steps:?}");
        assert_eq!(data("a").await, data("b").await, "{steps:?}");
    }
}

/// What is there before the steps on a fair lock: nothing much, or something rare.
fn random_scene(now: i64) -> Vec<Vec<String>> {
    let ours = |number| format!("00000000-0000-8000-8000-000000000000:{number}");
    let other = "00000000-0000-8000-8000-000000000001:1".to_owned();
    let waits = |id: String, until: String| {
        [
            format!("RPUSH {QUEUE} {id}"),
            format!("ZADD {TIMES} {until} {id}"),
        ]
    };
    let waits_for = |id: String, ms: i64| waits(id, (now + ms).to_string());
    let locks = [
        format!("HSET k {} 1", ours(1)),
        format!("HSET k {} 1", ours(1)),
        format!("HSET k {} 0", ours(1)),
        format!("HSET k {} 0", ours(99)),
        format!("HSET k {} 1", java(2)),
        format!("HSET k {} 2", java(2)),
        format!("HSET k {} 1 mode read", java(2)),
        "HSET k nobody 1".to_owned(),
        "SET k text".to_owned(),
    ];
    let fences = [
        "SET dlock:fence 8000000000000000",
        "HSET dlock:fence no number",
        "DEL k",
    ];
    let queues = [
        vec![],
        vec![],
        waits_for(other.clone(), YOUNG).to_vec(),
        waits_for(other.clone(), -1000).to_vec(),
        waits_for(java(1), PATIENT).to_vec(),
        waits_for(java(1), -1000).to_vec(),
        [waits_for(ours(1), YOUNG), waits_for(other.clone(), YOUNG)].concat(),
        waits(other, format!("{}.5", now + YOUNG)).to_vec(),
        [
            waits_for(ours(1), YOUNG),
            waits(ours(2), format!("{}.5", now + YOUNG)),
        ]
        .concat(),
        [
            waits_for(ours(1), YOUNG),
            waits_for(java(1), PATIENT),
            [QUEUE, TIMES].map(|key| format!("PEXPIRE {key} 3600000")),
        ]
        .concat(),
        vec![format!("SET {QUEUE} text")],
        vec![format!("SET {TIMES} text")],
    ];
    let rare = fastrand::choice(fences).filter(|_| fastrand::u8(..8) == 0);
    let mut scene = vec![rare.unwrap_or("SET dlock:fence 1").to_owned()];
    scene.extend(fastrand::choice(queues).unwrap());
    scene.extend(fastrand::choice(locks).filter(|_| fastrand::bool()));
    let words = |command: String| command.split(' ').map(str::to_owned).collect();
    scene.into_iter().map(words).collect()
}

/// Steps on one fair lock have a call of their own form, which says and does what the long one does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_calls_do_what_long_ones_do() {
    let (script, store) = (script(), Store::server().await);
    let server = store.as_server();
    let mut messages = server.client().unwrap().get_async_pubsub().await.unwrap();
    messages.psubscribe("*").await.unwrap();
    let mut messages = messages.into_on_message();
    let data = async |key: &str| {
        let kind: String = server.query(&["TYPE", key]).await;
        let mut fields: Vec<String> = match &*kind {
            "list" => server.query(&["LRANGE", key, "0", "-1"]).await,
            "hash" => server.query(&["HGETALL", key]).await,
            _ => Vec::new(),
        };
        // In minutes, and none is near the end of one: a busy machine takes seconds for the steps.
        let minutes = |left: i64| (left + 20_000) / 60_000;
        if kind == "zset" {
            let waiters: Vec<(String, f64)> = server.query(&["ZRANGE", key, "0", "-1", "WITHSCORES"]).await;
            let now = now(server).await;
            let left = |(id, until): (String, f64)| format!("{id} {}", minutes(until as i64 - now));
            fields.extend(waiters.into_iter().map(left));
            fields.sort_unstable();
        }
        let left: i64 = server.query(&["PTTL", key]).await;
        (kind, fields, minutes(left))
    };
    let mut compared = 0;
    for _ in 0..300 {
        let begun = Instant::now();
        let scene = random_scene(now(server).await);
        // Perhaps the first waiter asks again, or gives up.
        let first = [
            step_of("fair", 1, &["30000", "3", "1", "1000"]),
            step_of("release_fair", 1, &["0"]),
        ];
        let first = fastrand::choice(first).filter(|_| fastrand::bool());
        let mut steps: Vec<_> = first.into_iter().chain(random_steps()).collect();
        steps.truncate(fastrand::usize(1..=steps.len()));
        let mut outcomes = Vec::new();
        for is_short in [true, false] {
            server.flush().await;
            for command in &scene {
                server
                    .command(&command.iter().map(String::as_str).collect::<Vec<_>>())
                    .await;
            }
            let mut replies = Vec::new();
            for run in for_short_calls(&steps) {
                let keeps = run.iter().any(|step| step[0] == "release_fair" && step[3] != "0");
                replies.extend(match is_short && !keeps {
                    true => in_a_short_call(server, &script, "k", run).await,
                    false => in_one_call(server, &script, "k", run).await,
                });
            }
            let mut channels = Vec::new();
            server.command(&["PUBLISH", "end", "0"]).await;
            loop {
                match messages.next().await.unwrap().get_channel_name() {
                    "end" => break,
                    channel => channels.push(channel.to_owned()),
                }
            }
            let there = [data("k").await, data(QUEUE).await, data(TIMES).await];
            outcomes.push((replies, channels, there));
        }
        // On a slow machine positions may have ended between the two.
        if begun.elapsed() < Duration::from_millis(YOUNG as u64) - SECOND {
            assert_eq!(outcomes[0], outcomes[1], "{scene:?} {steps:?}");
            compared += 1;
        }
    }
    assert!(compared > 0, "the machine is too slow");
}

/// It asked before the server's clock was set back by an hour.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_head_whose_time_is_far_ahead_is_gone_after_five_seconds() {
    let store = Store::server().await;
    let server = store.as_server();
    let client = store.client().await;
    let dead = "00000000-0000-8000-8000-000000000000:1";
    server.command(&["RPUSH", QUEUE, dead]).await;
    let until = (now(server).await + 3_600_000).to_string();
    server.command(&["ZADD", TIMES, &until, dead]).await;
    let waits = client.fair_lock("k").wait(PATIENCE).acquire();
    let guard = within(12 * SECOND, "the lock", waits).await.unwrap();
    guard.release().await.unwrap();
}

/// A client sends short calls: for an acquire, for a waiter that joins, and for a release, unless the next waiter's request is
/// right behind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_sends_short_calls_for_a_fair_lock() {
    let (store, client, _) = setting().await;
    let server = store.as_server();
    let monitor = server.monitor().await;
    let guard = client.fair_lock("k").acquire().await.unwrap();
    let (_, waiter) = waits(server, &client, 1, &Order::default()).await;
    guard.release().await.unwrap();
    waiter.await.unwrap();
    let calls = monitor.commands().await;
    let has = |call: &Command, name: &str| call.args().iter().any(|arg| arg == name);
    let [mut acquires, mut releases] = [0; 2];
    for call in calls.iter().filter(|call| call.is_script()) {
        match (has(call, "fair"), has(call, "release_fair")) {
            (true, false) => acquires += 1,
            (false, true) => releases += 1,
            _ => continue,
        }
        assert_eq!(call.arg(7), "queue", "{call}");
    }
    assert!(acquires >= 2 && releases >= 1, "{calls:?}");
}

/// Those that are served by handoffs leave the queue and come again, many of them in one call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_waiters_come_and_go_at_the_cost_of_one() {
    let (script, store) = (script(), Store::server().await);
    let server = store.as_server();
    let step = |step: &str, number: u32, rest: &[&str]| -> Vec<String> {
        let grant = format!("00000000-0000-8000-8000-000000000000:{number}");
        let words = [step.to_owned(), (1 + rest.len()).to_string(), grant];
        let rest = rest.iter().map(|word| (*word).to_owned());
        words.into_iter().chain(rest).collect()
    };
    let comes = |number| step("fair", number, &["30000", "1", "1", "-1"]);
    let goes = |number| step("release_fair", number, &["0"]);
    server.command(&["SET", "dlock:fence", "1000000000000001"]).await;
    in_one_call(server, &script, "k", &[comes(1)]).await;
    let mut costs = Vec::new();
    for many in [1, 100] {
        let waiters = 1000 * many..1001 * many;
        let come: Vec<_> = waiters.clone().map(comes).collect();
        in_one_call(server, &script, "k", &come).await;
        let come_and_go = waiters
            .clone()
            .flat_map(|number| [goes(number), comes(number + many)]);
        server.forget_commands().await;
        let replies = in_one_call(server, &script, "k", &come_and_go.collect::<Vec<_>>()).await;
        costs.push(server.commands().await);
        assert_eq!(replies.len() as u32, 2 * many);
        let go: Vec<_> = waiters.map(|number| goes(number + many)).collect();
        assert_eq!(
            queue(server).await,
            go.iter().map(|step| &*step[2]).collect::<Vec<_>>()
        );
        in_one_call(server, &script, "k", &go).await;
        assert_eq!(server.keys().await, ["dlock:fence", "k"]);
    }
    assert_eq!(costs[0], costs[1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_stands_in_a_list_and_has_a_time_in_a_sorted_set() {
    in_rounds("the places are looked at in time", async || {
        let (store, a, b) = setting().await;
        let server = store.as_server();
        let order = Order::default();
        let guard = a.fair_lock("k").acquire().await.unwrap();
        assert_eq!(server.keys().await, ["dlock:fence", "k"]);
        let (first, task) = waits(server, &b, 1, &order).await;
        assert_eq!(server.keys().await, ["dlock:fence", "k", QUEUE, TIMES]);
        // Of the version by which grants of ours are known.
        assert_eq!(&first[14..15], "8", "{first}");
        let (second, other) = waits(server, &a, 2, &order).await;
        assert_eq!(queue(server).await, [&*first, &*second]);
        settle().await;
        // The head of its process's queue listens, on a channel of its own.
        let channel = format!("redisson_lock__channel:{{k}}:{first}");
        assert!(server.pubsub_channels().await.contains(&channel));
        for key in [QUEUE, TIMES] {
            let left = server
                .ttl(key)
                .await
                .expect("they end if no waiter of ours is heard of");
            assert!(left > 3500 * SECOND && left <= 3600 * SECOND, "{key}: {left:?}");
        }
        for _ in 0..3 {
            for id in [&first, &second] {
                let left = left(server, id).await.unwrap();
                if left < PLACE - 2500 {
                    return Err(left);
                }
                // No waiter's time drifts away.
                assert!(left <= PLACE, "{id}: {left}");
            }
            tokio::time::sleep(NEXT_QUESTION).await;
        }
        guard.release().await.unwrap();
        task.await.unwrap();
        other.await.unwrap();
        assert_eq!(*order.lock(), [1, 2]);
        store.assert_clean(&[&a, &b]).await;
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_is_told_to_the_one_in_front_and_otherwise_on_the_channel_of_the_lock() {
    let (store, a, b) = setting().await;
    let server = store.as_server();
    let mut pubsub = server.client().unwrap().get_async_pubsub().await.unwrap();
    pubsub.psubscribe("*").await.unwrap();
    let mut messages = pubsub.on_message();
    let mut told = async || {
        let message = tokio::time::timeout(60 * SECOND, messages.next());
        let message = message.await.unwrap().unwrap();
        let payload: String = message.get_payload().unwrap();
        (message.get_channel_name().to_owned(), payload)
    };
    let names = [
        ("k", "redisson_lock__channel:{k}", "redisson_lock_queue:{k}"),
        (
            "{t}:k",
            "redisson_lock__channel:{t}:k",
            "redisson_lock_queue:{t}:k",
        ),
    ];
    for (name, channel, queue) in names {
        let lock = |client: &LockClient| client.fair_lock(LockKey::raw(name));
        lock(&a).acquire().await.unwrap().release().await.unwrap();
        assert_eq!(told().await, (channel.to_owned(), "0".to_owned()));
        for forced in [false, true] {
            let guard = lock(&a).acquire().await.unwrap();
            let waiter = tokio::spawn(lock(&b).acquire());
            eventually("it stands in the queue", || async {
                server.query::<usize>(&["LLEN", queue]).await == 1
            })
            .await;
            let waiting: Vec<String> = server.query(&["LRANGE", queue, "0", "-1"]).await;
            match forced {
                true => assert!(b.force_release(LockKey::raw(name)).await.unwrap()),
                false => guard.release().await.unwrap(),
            }
            assert_eq!(
                told().await,
                (format!("{channel}:{}", waiting[0]), "0".to_owned())
            );
            if forced {
                assert_eq!(told().await, (channel.to_owned(), "0".to_owned()));
            }
            waiter.await.unwrap().unwrap().release().await.unwrap();
            assert_eq!(told().await, (channel.to_owned(), "0".to_owned()));
        }
    }
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ours_survives_when_one_of_redissons_takes_the_lock_after_a_long_wait() {
    in_rounds("the moments are hit", async || {
        let (store, a, b) = setting().await;
        let server = store.as_server();
        let order = Order::default();
        let guard = a.fair_lock("k").acquire().await.unwrap();
        // It came when the lease had nothing left any more: all it has is its patience.
        java_waits(server, 1, PATIENT).await;
        let (id, task) = waits(server, &b, 2, &order).await;
        // What ours has on top does not melt away while both wait.
        for _ in 0..3 {
            tokio::time::sleep(NEXT_QUESTION).await;
            let left = left(server, &id).await.unwrap();
            assert!(left <= PATIENT + PLACE + 1000, "{left}");
            if left < PATIENT + PLACE - 2500 {
                return Err(left);
            }
        }
        guard.release().await.unwrap();
        java_takes(server, 1, PATIENT).await;
        let after = left(server, &id).await.unwrap();
        if after <= 0 {
            return Err(after);
        }
        // And releases it at once, so that no client could ask in between.
        java_leaves(server).await;
        within(SOON, "it is served", task).await.unwrap();
        store.assert_clean(&[&a, &b]).await;
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redisson_waiters_behind_ours_keep_their_distance() {
    let (store, a, b) = setting().await;
    let server = store.as_server();
    let order = Order::default();
    let guard = a.fair_lock("k").acquire().await.unwrap();
    let (first, one) = waits(server, &a, 1, &order).await;
    let (second, other) = waits(server, &b, 2, &order).await;
    // As Redisson's scripts have it: the time of the last one, and the patience.
    let behind = async |id: &str, thread: u32| {
        let before: i64 = server.query(&["ZSCORE", TIMES, id]).await;
        let after: i64 = server.query(&["ZSCORE", TIMES, &java(thread)]).await;
        after - before
    };
    let last = left(server, &second).await.unwrap();
    java_waits(server, 3, last + PATIENT).await;
    java_waits(server, 4, last + 2 * PATIENT).await;
    let third: i64 = server.query(&["ZSCORE", TIMES, &java(3)]).await;
    eventually("all are moved along", || async {
        server.query::<i64>(&["ZSCORE", TIMES, &java(3)]).await > third + 2500
    })
    .await;
    // Between two commands of this test one of ours may ask.
    let near = |distance: i64, of: i64| (distance - of).abs() <= 2000;
    assert!(near(behind(&second, 3).await, PATIENT));
    assert!(near(behind(&second, 4).await, 2 * PATIENT));
    // When the waiter before them gives up, they move up.
    other.abort();
    assert!(other.await.unwrap_err().is_cancelled());
    eventually("it has left the queue", || async {
        queue(server).await == [first.clone(), java(3), java(4)]
    })
    .await;
    assert!(near(behind(&first, 3).await, PATIENT));
    guard.release().await.unwrap();
    one.await.unwrap();
    // No dlock waiter is left: the queue of the others does not expire.
    eventually("the queue has no end", || async {
        server.ttl(QUEUE).await.is_none() && server.ttl(TIMES).await.is_none()
    })
    .await;
    assert_eq!(queue(server).await, [java(3), java(4)]);
    // Nor do they stand behind what was left of its time.
    assert!(near(left(server, &java(3)).await.unwrap(), PATIENT));
    assert!(near(left(server, &java(4)).await.unwrap(), 2 * PATIENT));
    server.command(&["DEL", QUEUE, TIMES]).await;
    store.assert_clean(&[&a, &b]).await;
}

/// Otherwise a waiter of Redisson's that dies keeps its place, and the lock from all others, for as long as has piled up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn places_in_a_queue_of_both_that_is_never_empty_do_not_grow() {
    let (store, a, b) = setting().await;
    let server = store.as_server();
    let order = Order::default();
    java_takes(server, 1, PATIENT).await;
    let (mut last, mut next) = waits(server, &a, 1, &order).await;
    let joins = async |thread: u32, behind: &str| {
        let until = left(server, behind).await.unwrap() + PATIENT;
        java_waits(server, thread, until).await;
    };
    joins(2, &last).await;
    for thread in 2..8 {
        let (id, later) = waits(server, if thread % 2 == 0 { &b } else { &a }, thread, &order).await;
        last = id;
        joins(thread + 1, &last).await;
        java_leaves(server).await;
        next.await.unwrap();
        next = later;
        java_takes(server, thread, PATIENT).await;
        let longest = left(server, &java(thread + 1)).await.unwrap();
        assert!(longest < PATIENT + 12_000, "round {thread}: {longest}");
    }
    java_leaves(server).await;
    next.await.unwrap();
    assert_eq!(*order.lock(), Vec::from_iter(1..8));
    server.command(&["DEL", QUEUE, TIMES]).await;
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_whose_time_is_over_or_missing_hold_no_waiter_up() {
    let (store, a, b) = setting().await;
    let server = store.as_server();
    for thread in [1, 2] {
        java_waits(server, thread, -10).await;
    }
    server.command(&["RPUSH", QUEUE, &java(3)]).await;
    // Also for a caller that only tries.
    let guard = a.fair_lock("k").try_acquire().await.unwrap();
    guard.release().await.unwrap();
    store.assert_clean(&[&a, &b]).await;
    java_waits(server, 1, 700).await;
    assert!(a.fair_lock("k").try_acquire().await.unwrap_err().is_busy());
    let acquire = a.fair_lock("k").wait(PATIENCE).acquire();
    let guard = within(SOON, "it is over", acquire).await.unwrap();
    guard.release().await.unwrap();
    store.assert_clean(&[&a, &b]).await;
}

/// Waiters of another process of ours come, so many: until when they keep their places, in ms from now.
async fn crowd_waits(server: &Server, client: u32, many: usize, until: i64) {
    let until = (now(server).await + until).to_string();
    let ids: Vec<_> = (0..many).map(|number| stranger(client, number)).collect();
    for ids in ids.chunks(500) {
        let ids = ids.iter().map(String::as_str);
        let push: Vec<_> = ["RPUSH", QUEUE].into_iter().chain(ids.clone()).collect();
        server.command(&push).await;
        let times = ids.flat_map(|id| [&until, id]);
        let add: Vec<_> = ["ZADD", TIMES].into_iter().chain(times).collect();
        server.command(&add).await;
    }
}

fn stranger(client: u32, number: usize) -> String {
    format!("{client:08x}-0000-8000-8000-000000000000:{number}")
}

/// Protects "No step on a fair lock scans the whole queue": the same commands in a long queue, and none that walks
/// along it, also behind a waiter of Redisson's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn question_of_a_waiter_costs_the_same_in_a_long_queue() {
    for java in [false, true] {
        in_rounds("only questions are counted", async || {
            let mut costs = Vec::new();
            for many in [10, 3000] {
                let (store, a, b) = setting().await;
                let server = store.as_server();
                let guard = a
                    .fair_lock("k")
                    .fixed_lease(600 * SECOND)
                    .acquire()
                    .await
                    .unwrap();
                if java {
                    java_waits(server, 1, PATIENT).await;
                }
                let patience = if java { PATIENT } else { 0 };
                crowd_waits(server, 1, many, patience + PLACE).await;
                let order = Order::default();
                server.forget_commands().await;
                let (id, task) = waits(server, &b, 1, &order).await;
                // Those of the test among them.
                let coming = server.commands().await;
                assert!(
                    !coming.contains_key("lpos") && !coming.contains_key("zscan"),
                    "{coming:?}"
                );
                settle().await;
                server.forget_commands().await;
                tokio::time::sleep(2 * NEXT_QUESTION).await;
                let commands = server.commands().await;
                for walking in ["lpos", "lrem", "lrange", "linsert"] {
                    assert!(!commands.contains_key(walking), "{commands:?}");
                }
                let left = left(server, &id).await.unwrap();
                assert!(left > patience && left <= patience + 2 * PLACE, "{left}");
                let asked = commands.get("evalsha").copied().unwrap_or(0);
                if asked == 0 {
                    return Err(costs);
                }
                costs.push(commands.values().sum::<u64>() / asked);
                task.abort();
                eventually("it has left", || async {
                    queue(server).await.len() == many + usize::from(java)
                })
                .await;
                guard.release().await.unwrap();
            }
            if costs[1] <= costs[0] + 2 {
                Ok(())
            } else {
                Err(costs)
            }
        })
        .await;
    }
}

/// Protects "The work of one step is bounded": a killed process with many waiters leaves the queue in parts, at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_of_a_killed_process_leave_the_queue_in_parts() {
    const MANY: usize = 5000;
    let (store, a, b) = setting().await;
    let server = store.as_server();
    crowd_waits(server, 1, MANY, -1).await;
    server.forget_commands().await;
    let acquire = a.fair_lock("k").wait(PATIENCE).acquire();
    let guard = within(SOON, "it does not wait for the dead", acquire)
        .await
        .unwrap();
    let commands = server.commands().await;
    assert!(!commands.contains_key("lrem"), "{commands:?}");
    let (asked, parts) = (commands["evalsha"], commands["ltrim"]);
    assert!(asked >= 15 && parts >= 15 && parts <= asked + 1, "{commands:?}");
    // Each question looks at two entries and at one part.
    assert!(commands["zscore"] <= 5 * asked, "{commands:?}");
    guard.release().await.unwrap();
    store.assert_clean(&[&a, &b]).await;
}

/// Protects "A waiter that gives up moves no other waiter back" where it is amid a long queue, out of which nothing can be
/// taken at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_that_gives_up_amid_a_long_queue_is_passed_by() {
    let (store, a, b) = setting().await;
    let server = store.as_server();
    let order = Order::default();
    let guard = a
        .fair_lock("k")
        .fixed_lease(600 * SECOND)
        .acquire()
        .await
        .unwrap();
    crowd_waits(server, 1, 400, 600_000).await;
    let (id, task) = waits(server, &b, 1, &order).await;
    crowd_waits(server, 2, 400, 600_000).await;
    let (next, other) = waits(server, &b, 2, &order).await;
    server.forget_commands().await;
    task.abort();
    let score = async || -> Option<f64> { server.query(&["ZSCORE", TIMES, &id]).await };
    eventually("it is marked", || async {
        score().await.is_some_and(|score| score.fract() == 0.5)
    })
    .await;
    let commands = server.commands().await;
    assert!(!commands.contains_key("lrem"), "{commands:?}");
    assert_eq!(queue(server).await.len(), 802);
    // The crowds have gone, and it is in front.
    for client in [1, 2] {
        let ids: Vec<_> = (0..400).map(|number| stranger(client, number)).collect();
        let remove: Vec<_> = ["ZADD", TIMES]
            .into_iter()
            .chain(ids.iter().flat_map(|id| ["1", id]))
            .collect();
        server.command(&remove).await;
    }
    guard.release().await.unwrap();
    within(SOON, "the next one is served", other).await.unwrap();
    assert_eq!(*order.lock(), [2], "{next}");
    store.assert_clean(&[&a, &b]).await;
}

/// Protects "A waiter that gives up amid a long queue is skipped, and its entry there expires".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_in_which_all_have_given_up_has_an_end() {
    let (store, a, b) = setting().await;
    let server = store.as_server();
    let guard = a
        .fair_lock("k")
        .fixed_lease(600 * SECOND)
        .acquire()
        .await
        .unwrap();
    // As those whom no step could take out so far.
    crowd_waits(server, 1, 1200, 1).await;
    let task = tokio::spawn(b.fair_lock("k").acquire());
    let last = async || {
        queue(server)
            .await
            .pop()
            .filter(|id| !id.starts_with("00000001-"))
    };
    eventually("it waits", async || last().await.is_some()).await;
    let id = last().await.unwrap();
    crowd_waits(server, 2, 1, 1).await;
    task.abort();
    eventually("it has left", || async { left(server, &id).await.is_none() }).await;
    eventually("the rest goes soon", || async {
        server.ttl(QUEUE).await.is_none_or(|left| left <= 10 * SECOND)
    })
    .await;
    guard.release().await.unwrap();
    store.assert_clean(&[&a, &b]).await;
}

/// Protects "Waiters are served in order of arrival" where many were taken for gone: they are back in
/// front of all later waiters, in their order.
// One thread, so that waiters ask in the order of their numbers.
#[tokio::test]
async fn many_that_were_taken_for_gone_are_back_in_their_order() {
    const MANY: usize = 700;
    let (store, a, b) = setting().await;
    let server = store.as_server();
    let guard = a
        .fair_lock("k")
        .fixed_lease(600 * SECOND)
        .acquire()
        .await
        .unwrap();
    let waiters: Vec<_> = (0..MANY)
        .map(|_| tokio::spawn(b.fair_lock("k").wait(PATIENCE).acquire()))
        .collect();
    eventually("all wait", || async { queue(server).await.len() == MANY }).await;
    let numbers = async || -> Vec<u64> {
        let ids = queue(server).await.into_iter();
        let ours = ids.filter(|id| !id.starts_with("00000001-"));
        ours.map(|id| id.rsplit(':').next().unwrap().parse().unwrap())
            .collect()
    };
    assert!(numbers().await.is_sorted());
    crowd_waits(server, 1, 300, 600_000).await;
    // The step of another client takes all of them for gone.
    server.command(&["LTRIM", QUEUE, &MANY.to_string(), "-1"]).await;
    server
        .command(&[
            "ZREMRANGEBYSCORE",
            TIMES,
            "-inf",
            &(now(server).await + 2 * PLACE).to_string(),
        ])
        .await;
    eventually("all are back", || async {
        queue(server).await.len() == MANY + 300
    })
    .await;
    let back = queue(server).await;
    assert!(back[..MANY].iter().all(|id| !id.starts_with("00000001-")));
    let sorted = numbers().await;
    assert!(sorted.is_sorted(), "{sorted:?}");
    for waiter in &waiters {
        waiter.abort();
    }
    guard.release().await.unwrap();
    server.command(&["DEL", QUEUE, TIMES]).await;
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_data_in_place_of_a_queue_is_named_and_stays_and_fails_no_release() {
    let (store, a, b) = setting().await;
    let server = store.as_server();
    for key in [QUEUE, TIMES] {
        server.command(&["SET", key, "text"]).await;
        // The times are read when a client waits.
        let held = (key == TIMES).then(|| a.fair_lock("k").try_acquire());
        let held = match held {
            Some(held) => Some(held.await.unwrap()),
            None => None,
        };
        let error = b.fair_lock("k").acquire().await.unwrap_err();
        assert!(matches!(&error, Error::Refused { .. }), "{error}");
        assert!(error.to_string().contains(key), "{error}");
        assert_eq!(server.query::<String>(&["GET", key]).await, "text");
        if let Some(held) = held {
            held.release().await.unwrap();
        }
        let guard = a.lock("k").acquire().await.unwrap();
        assert!(a.force_release("k").await.unwrap());
        drop(guard);
        server.command(&["DEL", QUEUE, TIMES]).await;
        store.assert_clean(&[&a, &b]).await;
    }
    server.command(&["SET", "k", "text"]).await;
    let error = b.fair_lock("k").acquire().await.unwrap_err();
    assert!(matches!(&error, Error::KeyTaken { .. }), "{error}");
    assert_eq!(server.keys().await, ["dlock:fence", "k"]);
    server.command(&["DEL", "k"]).await;
    store.assert_clean(&[&a, &b]).await;
}

// One thread, so that what is asked for in one go is sent in one call.
#[tokio::test]
async fn next_waiter_of_one_process_gets_it_without_a_round_trip_and_passes_no_other_by() {
    in_rounds("all are polled within a slice", async || {
        let store = Store::server().await;
        let proxy = Proxy::start(store.as_server().addr());
        let (client, other) = (ordinary(&proxy.url()).await, store.client().await);
        let served: Arc<Mutex<Vec<(&str, u64)>>> = Arc::default();
        let guard = client.fair_lock("k").acquire().await.unwrap();
        let mut waiters = Vec::new();
        for who in ["a", "b", "c", "elsewhere", "d", "e"] {
            let from = if who == "elsewhere" { &other } else { &client };
            let lock = from.fair_lock("k").wait(PATIENCE);
            let served = served.clone();
            waiters.push(tokio::spawn(async move {
                let guard = lock.acquire().await.unwrap();
                served.lock().push((who, guard.fencing_token()));
                guard.release().await.unwrap();
            }));
            let standing = waiters.len();
            eventually("it stands in the queue", || async {
                queue(store.as_server()).await.len() == standing
            })
            .await;
        }
        proxy.forget();
        guard.release().await.unwrap();
        for waiter in waiters {
            waiter.await.unwrap();
        }
        let served = served.lock().clone();
        let order: Vec<_> = served.iter().map(|(who, _)| *who).collect();
        assert_eq!(order, ["a", "b", "c", "elsewhere", "d", "e"]);
        assert!(served.is_sorted_by_key(|(_, token)| *token), "{served:?}");
        // Waiters that did not ask the store leave nothing in its queue.
        store.assert_clean(&[&client, &other]).await;
        let asked = proxy.count(step("fair"));
        // "a" behind the release, "d" behind that of "c" and when it is its turn; no other.
        if asked == 3 { Ok(()) } else { Err(asked) }
    })
    .await;
}

// One thread, so that what is asked for in one go is sent in one call.
#[tokio::test]
async fn in_one_process_the_request_of_the_next_travels_with_the_release() {
    const MANY: usize = 8;
    in_rounds("everybody is polled when it should be", async || {
        let store = Store::server().await;
        let proxy = Proxy::start(store.as_server().addr());
        let client = ordinary(&proxy.url()).await;
        let guard = client.fair_lock("k").acquire().await.unwrap();
        let waiters: Vec<_> = (0..MANY)
            .map(|_| {
                let lock = client.fair_lock("k").wait(PATIENCE).local_handoffs(0);
                tokio::spawn(async move { lock.acquire().await.unwrap().release().await.unwrap() })
            })
            .collect();
        eventually("all stand in the queue", || async {
            queue(store.as_server()).await.len() == MANY
        })
        .await;
        proxy.forget();
        guard.release().await.unwrap();
        for waiter in waiters {
            waiter.await.unwrap();
        }
        let (releases, asks) = (step("release_fair"), step("fair"));
        let together = proxy.count(move |command| releases(command) && asks(command));
        store.assert_clean(&[&client]).await;
        // The last one has no waiter behind it.
        if together == MANY { Ok(()) } else { Err(together) }
    })
    .await;
}

/// Those that come while a call on their lock is in flight follow it in one call, also where they come one by one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_that_come_while_a_call_is_in_flight_share_the_next() {
    const MANY: usize = 7;
    in_rounds("all have come while the server paused", async || {
        let store = Store::server().await;
        let server = store.as_server();
        let client = ordinary(&server.url()).await;
        let lock = client.fair_lock("k");
        for _ in 0..20 {
            lock.acquire().await.unwrap().release().await.unwrap();
        }
        let guard = lock.acquire().await.unwrap();
        server.forget_commands().await;
        server.command(&["CLIENT", "PAUSE", "300", "WRITE"]).await;
        let waiters: Vec<_> = (0..MANY)
            .map(|_| {
                let lock = lock.clone().wait(PATIENCE);
                tokio::spawn(async move { lock.acquire().await.unwrap().release().await.unwrap() })
            })
            .collect();
        eventually("all stand in the queue", || async {
            queue(server).await.len() == MANY
        })
        .await;
        let ran = server.commands().await;
        let calls = ["eval", "evalsha", "fcall"].map(|name| ran.get(name).copied().unwrap_or(0));
        let made: u64 = calls.iter().sum();
        guard.release().await.unwrap();
        for waiter in waiters {
            waiter.await.unwrap();
        }
        store.assert_clean(&[&client]).await;
        if made == 2 { Ok(()) } else { Err(made) }
    })
    .await;
}

const COUNTER: &str = "redisson_lock_token:{k}";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_counter_that_is_not_there_begins_with_the_servers_clock_and_goes_on_by_one() {
    let server = Server::start(Flavor::from_env()).await;
    let client = ordinary(&server.url()).await;
    let before = now(&server).await * 1000;
    let guard = client.fenced_lock("k").acquire().await.unwrap();
    let after = (now(&server).await + 1) * 1000;
    let token = i64::try_from(guard.fencing_token()).unwrap();
    assert!((before..=after).contains(&token), "{before} {token} {after}");
    assert_eq!(server.query::<i64>(&["GET", COUNTER]).await, token);
    assert_eq!(server.ttl(COUNTER).await, None);
    guard.release().await.unwrap();
    assert_eq!(server.keys().await, [COUNTER]);
    // One that others have counted with is gone on with, and made to stay.
    server.command(&["SET", COUNTER, "41", "PX", "60000"]).await;
    let guard = client.fenced_lock("k").acquire().await.unwrap();
    assert_eq!(guard.fencing_token(), 42);
    assert_eq!(server.query::<String>(&["GET", COUNTER]).await, "42");
    assert_eq!(server.ttl(COUNTER).await, None);
    guard.release().await.unwrap();
    // Asking without success counts nothing.
    let guard = client.lock("k").acquire().await.unwrap();
    assert!(client.fenced_lock("k").try_acquire().await.unwrap_err().is_busy());
    guard.release().await.unwrap();
    assert_eq!(server.query::<String>(&["GET", COUNTER]).await, "42");
    // As its name is, with tags and prefixes.
    client
        .fenced_lock(LockKey::raw("{t}:k"))
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let shop = ordinary(&format!("{}?prefix=shop%3A", server.url())).await;
    shop.fenced_lock("k")
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let mut keys = server.keys().await;
    keys.retain(|key| key != "dlock:fence");
    assert_eq!(
        keys,
        [
            "redisson_lock_token:{k}",
            "redisson_lock_token:{shop:k}",
            "redisson_lock_token:{t}:k"
        ]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_counter_is_named_and_stays_and_no_lock_is_taken() {
    let server = Server::start(Flavor::from_env()).await;
    let client = ordinary(&server.url()).await;
    for wrong in [
        &["SET", COUNTER, "text"][..],
        &["SET", COUNTER, "-5"],
        &["SET", COUNTER, "1.5"],
        &["SET", COUNTER, "9223372036854775807"],
        &["RPUSH", COUNTER, "1"],
    ] {
        server.command(&["DEL", COUNTER]).await;
        server.command(wrong).await;
        let error = client.fenced_lock("k").acquire().await.unwrap_err();
        assert!(matches!(&error, Error::Refused { .. }), "{wrong:?}: {error}");
        assert!(error.to_string().contains(COUNTER), "{wrong:?}: {error}");
        assert_eq!(server.keys().await, [COUNTER], "{wrong:?}");
        assert_eq!(client.held(), 0);
    }
    server.command(&["DEL", COUNTER]).await;
    client
        .fenced_lock("k")
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

/// Taken for a replica, the server would be left, and what was carried out along with the refused step sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_server_is_not_taken_for_a_replica_by_the_name_of_a_lock() {
    const NAME: &str = "READONLY";
    let server = Server::builder(Flavor::from_env()).maxmemory_policy("noeviction");
    let store = Store::Server(Box::new(server.start().await));
    let server = store.as_server();
    let client = ordinary(&server.url()).await;
    let guard = client.fair_lock(NAME).acquire().await.unwrap();
    let other = ordinary(&server.url()).await;
    server.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let waiter = other.fair_lock(NAME).wait(PATIENCE).acquire();
    let error = within(SOON, "the server refuses", waiter).await.unwrap_err();
    assert!(
        matches!(error, Error::Refused { .. }) && error.to_string().contains("OOM"),
        "{error:?}"
    );
    server.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    guard.release().await.unwrap();
    store.assert_clean(&[&client, &other]).await;
}
