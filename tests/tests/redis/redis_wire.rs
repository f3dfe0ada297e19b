//! What is on the server and on the wire: the data of Redisson's lock and nothing else, whatever the locks
//! are called and whatever else is there.

use std::time::{Duration, Instant};

use dlock::store::Kind;
use dlock::store::{AcquireReply, AcquireRequest, Announce, GrantId};
use dlock::{LockClient, LockKey, LockKind};
use dlock_tests::faults::{PATIENCE, SLACK, in_rounds, ordinary};
use dlock_tests::{Flavor, Server};
use futures_util::StreamExt;
use redis::Value;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

async fn server() -> Server {
    Server::start(Flavor::from_env()).await
}

async fn client(server: &Server) -> LockClient {
    ordinary(&server.url()).await
}

async fn prefixed(server: &Server) -> LockClient {
    LockClient::builder()
        .url(server.url())
        .timeout(PATIENCE)
        .prefix("shop:")
        .build()
        .await
        .unwrap()
}

/// The one field of the lock's hash, its value and the time it has left.
async fn hash(server: &Server, name: &str) -> (String, String, Duration) {
    let fields: Vec<String> = server.query(&["HGETALL", name]).await;
    let [holder, holds] = &fields[..] else {
        panic!("{name}: {fields:?}")
    };
    (
        holder.clone(),
        holds.clone(),
        server.ttl(name).await.expect("a lock ends by itself"),
    )
}

fn assert_is_holder(text: &str) {
    let (uuid, number) = text.split_once(':').expect(text);
    assert_eq!(uuid.len(), 36, "{text}");
    let groups: Vec<usize> = uuid.split('-').map(str::len).collect();
    assert_eq!(groups, [8, 4, 4, 4, 12], "{text}");
    assert!(uuid.chars().all(|c| c == '-' || c.is_ascii_hexdigit()), "{text}");
    assert!(number.parse::<u64>().is_ok(), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_is_a_hash_with_one_field_and_a_lease() {
    let server = server().await;
    let client = client(&server).await;
    let guard = client.lock("k").fixed_lease(20 * SECOND).acquire().await.unwrap();
    let (holder, holds, left) = hash(&server, "k").await;
    assert_is_holder(&holder);
    assert_eq!(holds, "1");
    assert!(left > 18 * SECOND && left <= 20 * SECOND, "{left:?}");
    assert_eq!(server.keys().await, ["dlock:fence", "k"]);
    // The last of those that were reserved for holders in this process.
    let fence: u64 = server.query(&["GET", "dlock:fence"]).await;
    assert!((guard.fencing_token()..).contains(&fence), "{fence}");
    assert_eq!(server.ttl("dlock:fence").await, None);
    // Re-entry is counted here and not there.
    let again = guard.reenter().unwrap();
    assert_eq!(hash(&server, "k").await.1, "1");
    drop(guard);
    again.release().await.unwrap();
    assert_eq!(server.keys().await, ["dlock:fence"]);
    // The next acquisition has another id of the same client.
    let guard = client.lock("k").acquire().await.unwrap();
    let (next, _, left) = hash(&server, "k").await;
    assert!(next != holder && next[..36] == holder[..36], "{next}, {holder}");
    assert!(left > 10 * SECOND && left <= 30 * SECOND, "{left:?}");
    guard.release().await.unwrap();
    assert_eq!(server.keys().await, ["dlock:fence"]);
}

/// Redisson's reactive API draws the number of a holder at random: half of them are below zero. Such a holder keeps all
/// others out, as any other does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_with_a_negative_number_is_waited_for_as_any_other() {
    const JAVA: &str = "11111111-2222-4333-8444-555555555555:-5";
    let server = server().await;
    let client = client(&server).await;
    let raw = |name: &str| LockKey::raw(name);
    let hold = async |name: &str, fields: &[&str]| {
        let words = [&["HSET", name][..], fields].concat();
        server.command(&words).await;
        server.command(&["PEXPIRE", name, "60000"]).await;
    };
    hold("plain", &[JAVA, "2"]).await;
    for kind in [LockKind::Mutex, LockKind::Fair, LockKind::Fenced] {
        let busy = client.lock("plain").kind(kind).try_acquire().await.unwrap_err();
        assert!(busy.is_busy(), "{kind}: {busy}");
    }
    let busy = client.multi(["free", "plain"]).try_acquire().await.unwrap_err();
    assert!(busy.is_busy(), "{busy}");
    let holder = client.inspect("plain").await.unwrap().unwrap();
    assert_eq!((holder.id.as_str(), holder.holds), (JAVA, 2));

    // A reader of ours leaves, and the other one is still there.
    let ours = client.rw_lock("read").read().acquire().await.unwrap();
    hold("read", &[JAVA, "1"]).await;
    let timeout = format!("{{read}}:{JAVA}:rwlock_timeout:1");
    server.command(&["SET", &timeout, "1", "PX", "60000"]).await;
    ours.release().await.unwrap();
    let busy = client.rw_lock("read").write().try_acquire().await.unwrap_err();
    assert!(busy.is_busy(), "{busy}");
    assert_eq!(client.inspect("read").await.unwrap().unwrap().id, JAVA);

    // A writer excludes readers, and readers under it go on after its release.
    hold("write", &["mode", "write", &format!("{JAVA}:write"), "1"]).await;
    let busy = client.rw_lock("write").read().try_acquire().await.unwrap_err();
    assert!(busy.is_busy(), "{busy}");
    assert_eq!(client.inspect("write").await.unwrap().unwrap().id, JAVA);

    let listed = client.list("").await.unwrap();
    let mut names: Vec<_> = listed.iter().map(|(key, _)| key.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["plain", "read", "write"]);
    for name in ["plain", "read", "write"] {
        assert!(client.force_release(raw(name)).await.unwrap(), "{name}");
    }
    assert_eq!(server.keys().await, ["dlock:fence"]);
}

/// A field of unknown form in the hash of a read-write lock may be a reader of another client: a holder that leaves
/// does not open the lock for a writer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaving_reader_removes_no_unknown_holder() {
    let server = server().await;
    let client = client(&server).await;
    let ours = client
        .rw_lock("k")
        .read()
        .fixed_lease(60 * SECOND)
        .acquire()
        .await
        .unwrap();
    server.command(&["HSET", "k", "somebody", "1"]).await;
    ours.release().await.unwrap();
    let busy = client.rw_lock("k").write().try_acquire().await.unwrap_err();
    assert!(busy.is_busy(), "{busy}");
    assert!(server.ttl("k").await.is_some_and(|left| left > 50 * SECOND));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_sets_the_lease_anew_and_nothing_else() {
    in_rounds("it is renewed in time", async || {
        let server = server().await;
        let client = client(&server).await;
        let guard = client.lock("k").lease(900 * MS).acquire().await.unwrap();
        if server.keys().await.len() < 2 {
            return Err("it ended before the first look");
        }
        let before = hash(&server, "k").await;
        let monitor = server.monitor().await;
        tokio::time::sleep(1500 * MS).await;
        let after = match guard.is_held() {
            true => hash(&server, "k").await,
            false => return Err("it ended before the second look"),
        };
        assert_eq!((before.0, before.1), (after.0, after.1));
        assert!(after.2 <= 900 * MS, "{:?}", after.2);
        let reads = ["HEXISTS", "HGET", "HGETALL", "HLEN", "PTTL", "TIME", "TYPE"];
        let mut writes: Vec<String> = monitor
            .all()
            .await
            .into_iter()
            .filter(|seen| seen.by_script())
            .map(|seen| seen.command.arg(0).to_uppercase())
            .filter(|command| !reads.contains(&command.as_str()))
            .collect();
        writes.dedup();
        assert_eq!(writes, ["PEXPIRE"]);
        drop(guard);
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_release_is_told_by_a_0_on_the_channel_of_the_lock() {
    let server = server().await;
    let client = client(&server).await;
    let prefixed = prefixed(&server).await;
    let mut pubsub = server.client().unwrap().get_async_pubsub().await.unwrap();
    pubsub.psubscribe("*").await.unwrap();
    let mut messages = pubsub.on_message();
    let steps = [
        (&client, "order:42", "redisson_lock__channel:{order:42}"),
        (&client, "order:{42}", "redisson_lock__channel:order:{42}"),
        (&client, "{", "redisson_lock__channel:{"),
        (&client, "a}", "redisson_lock__channel:{a}}"),
        (&prefixed, "order:42", "redisson_lock__channel:{shop:order:42}"),
        (&prefixed, "{a}:b", "redisson_lock__channel:shop:{a}:b"),
    ];
    for (client, name, channel) in steps {
        for forced in [false, true] {
            let guard = client.lock(LockKey::raw(name)).acquire().await.unwrap();
            if forced {
                assert!(client.force_release(LockKey::raw(name)).await.unwrap());
            }
            // A release that finds nothing tells too: an earlier copy may have released the lock without telling.
            assert_eq!(guard.release().await.is_err(), forced);
            for _ in 0..1 + u8::from(forced) {
                let message = tokio::time::timeout(60 * SECOND, messages.next())
                    .await
                    .unwrap()
                    .unwrap();
                let payload: String = message.get_payload().unwrap();
                assert_eq!(
                    (message.get_channel_name(), payload.as_str()),
                    (channel, "0"),
                    "{name}"
                );
            }
        }
    }
    // A release that leaves the lock taken tells too, for then the time is another one.
    client
        .lock("k")
        .min_hold(60 * SECOND)
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let message = tokio::time::timeout(60 * SECOND, messages.next())
        .await
        .unwrap()
        .unwrap();
    assert_eq!(message.get_channel_name(), "redisson_lock__channel:{k}");
    let left = hash(&server, "k").await.2;
    assert!(left > 30 * SECOND && left <= 60 * SECOND, "{left:?}");
    // And nothing else was told.
    assert!(tokio::time::timeout(100 * MS, messages.next()).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefix_stands_before_every_name_and_shows_nowhere_else() {
    let server = server().await;
    let url = format!("{}?prefix=shop%5B1%5D*%3A", server.url());
    let (shop, all) = (ordinary(&url).await, client(&server).await);
    let guard = shop.lock("k").acquire().await.unwrap();
    let other = all.lock("k").try_acquire().await.expect("it is another lock");
    let fences = ["dlock:fence", "shop[1]*:dlock:fence"];
    assert_eq!(server.keys().await, [fences[0], "k", fences[1], "shop[1]*:k"]);
    assert_eq!(guard.key().as_str(), "k");
    let names = |found: Vec<(LockKey, _)>| -> Vec<String> {
        found
            .into_iter()
            .map(|(key, _): (LockKey, dlock::store::Holder)| key.as_str().to_owned())
            .collect()
    };
    assert_eq!(names(shop.list("").await.unwrap()), ["k"]);
    assert_eq!(names(all.list("").await.unwrap()), ["k", "shop[1]*:k"]);
    assert_eq!(names(all.list("shop").await.unwrap()), ["shop[1]*:k"]);
    let (short, long) = (
        shop.inspect("k").await.unwrap(),
        all.inspect("shop[1]*:k").await.unwrap(),
    );
    assert_eq!(short.unwrap().id, long.unwrap().id);
    assert!(all.force_release("shop[1]*:k").await.unwrap());
    assert!(guard.release().await.unwrap_err().is_lost());
    other.release().await.unwrap();
}

/// Fills the server with what is not ours, and puts locks of Redisson's form among it.
const FOREIGN: &str = r"
for i = 1, 3000 do
  redis.call('SET', 'text:' .. i, 'x')
  redis.call('HSET', 'user:' .. i, 'name', 'x', 'age', '7')
  redis.call('HSET', 'one:' .. i, 'field', 'x')
end
redis.call('HSET', 'like:name', 'user:42', 'Bob')
redis.call('HSET', 'like:count', 'user:42', '7')
redis.call('HSET', 'like:number', ':42', '1')
redis.call('HSET', 'like:empty', '', '')
redis.call('HSET', 'like:big', '11111111-2222-3333-4444-555555555555:1', '99999999999999999999999999')
redis.call('HSET', 'bytes:\255\254', '11111111-2222-3333-4444-555555555555:\255', '1')
redis.call('HSET', '\255\254', '11111111-2222-3333-4444-555555555555:1', '1')
redis.call('HSET', 'line\nbreak', '11111111-2222-3333-4444-555555555555:2', '1')
redis.call('RPUSH', 'list', 'x')
redis.call('ZADD', 'zset', 1, 'x')
redis.call('XADD', 'stream', '*', 'a', 'b')
redis.call('HSET', 'never ends', '11111111-2222-3333-4444-555555555555:3', '2')
return 1";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_finds_the_locks_among_thousands_of_other_keys() {
    let server = server().await;
    let client = client(&server).await;
    let _: Value = server.command(&["EVAL", FOREIGN, "0"]).await;
    let names = [
        "a*b",
        "a[1]",
        "a?c",
        "a\\d",
        "a^e",
        "größe:🔒",
        "a*",
        "aXb",
        "x y",
        "a-z",
    ];
    let mut guards = Vec::new();
    for name in names {
        guards.push(client.lock(name).acquire().await.unwrap());
    }
    let long = format!("long:{}", "ü".repeat(253));
    guards.push(client.lock(&long).acquire().await.unwrap());

    let before = Instant::now();
    let found = client.list("").await.unwrap();
    println!("a list among 9,000 other keys took {:?}", before.elapsed());
    assert!(before.elapsed() < SLACK, "{:?}", before.elapsed());
    let mut expected: Vec<&str> = names
        .into_iter()
        .chain([&*long, "line\nbreak", "never ends"])
        .collect();
    expected.sort_unstable();
    let found_names: Vec<&str> = found.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(found_names, expected);
    let (_, endless) = found
        .iter()
        .find(|(key, _)| key.as_str() == "never ends")
        .unwrap();
    assert_eq!((endless.holds, endless.remaining), (2, None));

    let starting = async |prefix: &str| -> Vec<String> {
        let found = client.list(prefix).await.unwrap();
        found
            .into_iter()
            .map(|(key, _)| key.as_str().to_owned())
            .collect()
    };
    assert_eq!(starting("a*").await, ["a*", "a*b"]);
    assert_eq!(starting("a[").await, ["a[1]"]);
    assert_eq!(starting("a?").await, ["a?c"]);
    assert_eq!(starting("a\\").await, ["a\\d"]);
    assert_eq!(starting("a^").await, ["a^e"]);
    assert_eq!(starting("grö").await, ["größe:🔒"]);
    assert!(starting("[").await.is_empty() && starting("user:").await.is_empty());
    for guard in guards {
        guard.release().await.unwrap();
    }
}

/// A replica that takes over knows an older last token: what was given since is safe once more time has passed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reserved_tokens_reach_back_by_five_milliseconds_at_the_most() {
    let server = server().await;
    let builder = LockClient::builder().url(server.url());
    let store = builder.build_store().await.unwrap();
    let _: String = server.query(&["SET", "dlock:fence", "1000000000000001"]).await;
    let before = server.time_us().await;
    let mut request = AcquireRequest::new(
        Kind::Mutex,
        LockKey::new("k").unwrap(),
        GrantId::from_parts(1, 1),
        SECOND,
    );
    request.tokens = 1_000_000;
    let answer = store.clone().acquire(request).await.unwrap();
    let AcquireReply::Acquired(granted) = answer else {
        panic!("{answer:?}")
    };
    assert_eq!(granted.last_token - granted.first_token + 1, 5000);
    assert!(granted.first_token + 5000 > before, "{granted:?} at {before}");
}

/// Services that share a server under different prefixes have nothing to do with each other's tokens: what one of them
/// spoils costs the others nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_prefix_has_fencing_tokens_of_its_own() {
    let server = server().await;
    let of = async |prefix: &str| {
        let builder = LockClient::builder().url(server.url()).timeout(PATIENCE);
        builder.prefix(prefix).build().await.unwrap()
    };
    let (shop, mill) = (of("shop:").await, of("mill:").await);
    let token = async |client: &LockClient| {
        let guard = client.lock("k").acquire().await.unwrap();
        let token = guard.fencing_token();
        guard.release().await.unwrap();
        token
    };
    let first = token(&mill).await;
    // An hour ahead of the clock: tokens go on from there, for this prefix.
    let ahead = server.time_us().await + 3_600_000_000;
    server
        .command(&["SET", "shop:dlock:fence", &ahead.to_string()])
        .await;
    assert_eq!(token(&shop).await, ahead + 1);
    let second = token(&mill).await;
    assert!(first < second && second < ahead, "{first}, {second}, {ahead}");
    server.command(&["DEL", "shop:dlock:fence"]).await;
    server.command(&["RPUSH", "shop:dlock:fence", "x"]).await;
    let error = shop.lock("k").try_acquire().await.unwrap_err().to_string();
    assert!(
        error.contains("\"k\"") && error.contains("shop:dlock:fence"),
        "{error}"
    );
    assert!(token(&mill).await > second);
    assert_eq!(server.keys().await, ["mill:dlock:fence", "shop:dlock:fence"]);
    assert!(
        shop.semaphore(LockKey::raw("dlock:fence"))
            .permits(3)
            .try_acquire()
            .await
            .is_err()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_fence_is_no_lock() {
    let server = server().await;
    let client = client(&server).await;
    let token = client
        .lock("k")
        .run(|held| async move { held.fencing_token() })
        .await
        .unwrap();
    let taken = |error: dlock::Error| assert!(matches!(error, dlock::Error::KeyTaken { .. }), "{error:?}");
    // Without `raw` no such name gets to the server.
    let fence = || LockKey::raw("dlock:fence");
    taken(client.lock(fence()).try_acquire().await.unwrap_err());
    taken(client.force_release(fence()).await.unwrap_err());
    let semaphore = client.semaphore(fence()).permits(3);
    taken(semaphore.try_acquire().await.unwrap_err());
    taken(client.latch(fence()).count_down().await.unwrap_err());
    let fence: u64 = server.query(&["GET", "dlock:fence"]).await;
    assert!(fence >= token);
}

/// rslock, redsync, node-redlock, redis-py and DistributedLock keep strings: docs/migrating.md, "While both run".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn string_of_another_library_is_refused_without_a_wait_and_a_prefix_keeps_apart() {
    let server = server().await;
    let client = client(&server).await;
    let theirs = ["SET", "order:42", "token", "NX", "PX", "600000"];
    assert_eq!(
        server.query::<Option<String>>(&theirs).await.as_deref(),
        Some("OK")
    );
    let patient = client.lock("order:42").wait(3600 * SECOND);
    let error = patient.acquire().await.unwrap_err();
    assert!(matches!(error, dlock::Error::KeyTaken { .. }), "{error}");

    let prefixed = prefixed(&server).await;
    let _ours = prefixed.lock("order:42").try_acquire().await.unwrap();

    let _held = client.lock("order:43").acquire().await.unwrap();
    let theirs = ["SET", "order:43", "token", "NX", "PX", "600000"];
    assert_eq!(server.query::<Option<String>>(&theirs).await, None);
}

/// The script of all steps, in the order in which script.rs names its files and the lines between them.
pub(crate) fn script() -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../dlock/src/stores/redis/");
    let read = |file: &str| std::fs::read_to_string(format!("{folder}{file}")).unwrap();
    let source = read("script.rs");
    let parts = source.split_once("concat!(").unwrap().1;
    let parts = parts.split_once("\n);").unwrap().0;
    let text = |part: &str| match part.strip_prefix("include_str!(\"") {
        Some(file) => read(file.trim_end_matches("\")")),
        None => part.trim_matches('"').replace("\\n", "\n"),
    };
    parts
        .lines()
        .map(|line| line.trim().trim_end_matches(','))
        .map(text)
        .collect()
}

/// Reserved tokens reach back in time. Where the last one is gone, a flush may have come just after it was given.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_flush_no_reservation_reaches_back() {
    let script = script();
    let server = server().await;
    let acquire = async |key: &str| {
        let step = [
            "acquire",
            "00000000-0000-0000-0000-000000000000:1",
            "30000",
            "4000",
        ];
        let call = [
            "EVAL",
            &script,
            "2",
            "dlock:fence",
            key,
            "9000000000000000",
            "1",
            "4000",
            "0",
        ];
        let (now, token, count): (u64, u64, u64) = server.query(&[&call[..], &step[..]].concat()).await;
        (now, token, count)
    };
    let mut last = 0;
    for _ in 0..3 {
        let (now, token, count) = acquire("a").await;
        assert!(token >= now && count == 1, "{token} {count} at {now}");
        assert!(token > last);
        tokio::time::sleep(5 * MS).await;
        let (now, token, count) = acquire("b").await;
        assert!(
            count > 1000 && token + count - 1 == now,
            "{token} {count} at {now}"
        );
        last = token + count - 1;
        server.flush().await;
    }
}

/// A lone step of a plain lock has a call of its own form, which says and does what the long one does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_call_does_what_the_long_one_does() {
    const GRANT: &str = "00000000-0000-8000-8000-000000000000:1";
    const IN_TIME: &str = "9000000000000000";
    let (script, server) = (script(), server().await);
    let channel = "redisson_lock__channel:{k}";
    // What the lock and the fence are before, when an acquire is too late, and whether there are slots.
    let locks: [&[&str]; 4] = [
        &["DEL", "k"],
        &["HSET", "k", GRANT, "1"],
        &["HSET", "k", "11111111-2222-4333-8444-555555555555:7", "1"],
        &["SET", "k", "text"],
    ];
    let fences: [&[&str]; 4] = [
        &["SET", "dlock:fence", "1000000000000001"],
        &["DEL", "dlock:fence"],
        &["SET", "dlock:fence", "8000000000000000"],
        &["HSET", "dlock:fence", "no", "number"],
    ];
    let cases = locks
        .into_iter()
        .flat_map(|lock| fences.map(|fence| (lock, fence)));
    let cases = cases.flat_map(|case| [IN_TIME, "1"].map(|late| (case, late)));
    for (((lock, fence), late), in_cluster) in cases.flat_map(|case| ["0", "1"].map(|slots| (case, slots))) {
        // Without what the clock has to say: the answer, and what is there then.
        let outcome = async |call: &[&str]| {
            server.flush().await;
            server.command(lock).await;
            server.command(fence).await;
            let call = [&["EVAL", &script], call].concat();
            let reply: Value = server.query(&call).await;
            let answer = match reply {
                Value::Int(answer) if answer < 1_000_000_000 => format!("{answer}"),
                Value::Int(_) => "acquired 1".to_owned(),
                Value::Array(parts) => match &parts[1..] {
                    [Value::Int(token), Value::Int(count)] if *token > 0 => format!("acquired {count}"),
                    [Value::Int(answer)] => format!("{answer}"),
                    [other] => format!("{other:?}"),
                    others => panic!("{others:?}"),
                },
                other => panic!("{other:?}"),
            };
            let kind: String = server.query(&["TYPE", "k"]).await;
            let fields: Vec<String> = match &*kind {
                "hash" => server.query(&["HGETALL", "k"]).await,
                _ => Vec::new(),
            };
            let has_lease: i64 = server.query(&["TTL", "k"]).await;
            let fence: String = server.query(&["TYPE", "dlock:fence"]).await;
            (answer, kind, fields, has_lease > 0, fence)
        };
        let mut short = vec!["2", "dlock:fence", "k", "acquire", late, GRANT, "30000", "1"];
        if in_cluster == "1" {
            short.push("1");
        }
        let step = ["acquire", GRANT, "30000", "1"];
        let long = [&["2", "dlock:fence", "k", late, "1", "1", in_cluster], &step[..]].concat();
        let told = format!("acquire, {lock:?}, {fence:?}, {late}, {in_cluster}");
        assert_eq!(outcome(&short).await, outcome(&long).await, "{told}");
        let short = ["1", "k", "release", GRANT, channel];
        let step = ["release", GRANT, channel];
        let long = [&["2", "k", "k", "0", "0", "0", "0"], &step[..]].concat();
        assert_eq!(outcome(&short).await, outcome(&long).await, "release, {lock:?}");
    }
}

/// Of the rare steps a call makes those that it needs: what comes behind finds all that it would find alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rare_step_finds_the_others_whole_behind_any_step() {
    const GRANT: &str = "00000000-0000-8000-8000-000000000000:1";
    const IN_TIME: &str = "9000000000000000";
    let (script, server) = (script(), server().await);
    let store = LockClient::builder()
        .url(server.url())
        .build_store()
        .await
        .unwrap();
    let openers: [&[&str]; 3] = [
        &["keep", "3", GRANT, "1", "channel"],
        &["release_fair", "2", GRANT, "1"],
        &["forget", "1", "token"],
    ];
    let steps: [&[&str]; 3] = [
        &["inspect", "0"],
        &["force", "2", "channel", IN_TIME],
        &["look_at_record", "1", "0"],
    ];
    for (kind, step) in [Kind::Mutex, Kind::Read, Kind::Write]
        .into_iter()
        .flat_map(|kind| steps.map(|step| (kind, step)))
    {
        let outcome = async |opener: Option<&[&str]>| {
            server.flush().await;
            let key = LockKey::new("k").unwrap();
            let request = AcquireRequest::new(kind, key, GrantId::from_parts(7, 1), 30 * SECOND);
            store.clone().acquire(request).await.unwrap();
            let count = if opener.is_some() { "3" } else { "2" };
            let mut call = vec!["EVAL", &script, count, "dlock:fence"];
            call.extend(opener.map(|_| "opened"));
            call.extend(["k", IN_TIME, "0", "0", "0"]);
            call.extend(opener.into_iter().flatten());
            call.extend(step);
            let reply: Vec<Value> = server.query(&call).await;
            let there: i64 = server.query(&["EXISTS", "k"]).await;
            (without_times(reply.last().unwrap()), there)
        };
        let alone = outcome(None).await;
        for opener in openers {
            assert_eq!(
                outcome(Some(opener)).await,
                alone,
                "{kind:?}: {step:?} behind {opener:?}"
            );
        }
    }
}

/// Times are different each time.
fn without_times(reply: &Value) -> String {
    match reply {
        Value::Int(1000..) => "a time".to_owned(),
        Value::Array(parts) => parts.iter().map(|part| without_times(part) + " ").collect(),
        other => format!("{other:?}"),
    }
}

/// One of many processes that wait takes no lock whose lease has less than a millisecond left, and none without a token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquire_in_a_crowd_takes_a_free_lock_only_and_leaves_nothing_without_a_token() {
    let server = server().await;
    let builder = LockClient::builder().url(server.url());
    let store = builder.build_store().await.unwrap();
    let key = LockKey::new("k").unwrap();
    let acquire = async |number: u64| {
        let grant = GrantId::from_parts(7, number);
        let mut request = AcquireRequest::new(Kind::Mutex, key.clone(), grant, 30 * SECOND);
        request.announce = Announce::Grant;
        store.clone().acquire(request).await
    };
    let other = "11111111-1111-4111-8111-111111111111:1";
    let mut conn = server.conn().await;
    for number in 1..300 {
        let mut pipe = redis::pipe();
        pipe.cmd("DEL").arg("k").cmd("HSET").arg("k").arg(other).arg("1");
        pipe.cmd("PEXPIRE").arg("k").arg(1);
        let (_, reply) = tokio::join!(
            async { pipe.query_async::<()>(&mut conn).await.unwrap() },
            acquire(number)
        );
        reply.unwrap();
        let holders: Vec<String> = server.query(&["HKEYS", "k"]).await;
        assert!(holders.len() < 2, "{holders:?}");
    }
    server.command(&["DEL", "k", "dlock:fence"]).await;
    server.command(&["RPUSH", "dlock:fence", "x"]).await;
    acquire(1000).await.unwrap_err();
    assert_eq!(server.keys().await, ["dlock:fence"], "no lock without a token");
}
