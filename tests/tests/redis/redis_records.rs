//! Records on a real server: what they look like there, what they cost, and what the server may do to them.

use std::time::Duration;

use dlock::record::{ClaimReply, ClaimToken, OwnerReply, RecordKey, Records};
use dlock::store::Reason;
use dlock::{Error, LockKey};
use dlock_tests::faults::{PATIENCE, hasty_builder, patient, setting};
use dlock_tests::permissions::give;
use dlock_tests::records::{a_record_that_cannot_be_read, ask, ask_for, claimed, fresh_key, leaving};
use dlock_tests::{Command, Server, Store, eventually};
use futures_util::future::join_all;
use redis::Value;
use tokio::time::timeout;
const SEC: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 3600);

async fn records(store: &Store) -> Records {
    store.client().await.records().unwrap()
}

fn name(key: &RecordKey) -> String {
    format!("dlock:record:{}", key.as_str())
}

/// The record as the server has it.
async fn raw(server: &Server, key: &str) -> Vec<u8> {
    server.query(&["GET", key]).await
}

/// Puts a value of any bytes at the key.
async fn plant(server: &Server, key: &str, value: &[u8]) {
    let mut conn = server.conn().await;
    let () = redis::cmd("SET")
        .arg(key)
        .arg(value)
        .query_async(&mut conn)
        .await
        .unwrap();
}

#[tokio::test]
async fn a_record_has_the_written_form_and_the_servers_time() {
    let store = Store::server().await;
    let (server, records, key) = (store.as_server(), records(&store).await, fresh_key());
    let before = server.time_us().await;
    let (token, fence) = claimed(&records, ask_for(&key, 15 * SEC, DAY), 1).await;
    let after = server.time_us().await;

    let record = raw(server, &name(&key)).await;
    let (head, fingerprint) = record.split_at(record.len() - 32);
    assert_eq!(fingerprint, [7; 32]);
    let head = String::from_utf8(head.to_vec()).unwrap();
    let fields: Vec<_> = head.split(' ').collect();
    let lease: u64 = fields[2].parse().unwrap();
    assert_eq!(
        head,
        format!("dlock1 c {lease:016} 1 {fence} {} ", token.as_str())
    );
    assert!((before + 15_000_000..=after + 15_000_000).contains(&lease));
    let kept = server.ttl(&name(&key)).await.unwrap();
    assert!(kept <= DAY && kept > DAY - 10 * SEC, "{kept:?}");
    assert_eq!(server.keys().await, ["dlock:fence", &name(&key)]);

    // A clock that was set back, by an hour, takes no fence back.
    let ahead = fence + 3_600_000_000;
    server.command(&["SET", "dlock:fence", &ahead.to_string()]).await;
    assert_eq!(claimed(&records, ask(&fresh_key()), 1).await.1, ahead + 1);

    // The lease is counted by the time inside, whatever the key's own end is.
    records.extend(&key, &token, 2 * DAY, SEC).await.unwrap();
    assert!(server.ttl(&name(&key)).await.unwrap() > DAY);
    server
        .command(&["SETRANGE", &name(&key), "9", "0000000000000001"])
        .await;
    let reply = records.claim(leaving(ask(&key))).await.unwrap();
    assert_eq!(reply, ClaimReply::Orphan { attempt: 1 });

    records
        .complete(&key, &token, b"\0result".to_vec(), 2 * SEC)
        .await
        .unwrap();
    let record = raw(server, &name(&key)).await;
    assert!(record.starts_with(b"dlock1 d ") && record.ends_with(b"\x07\x07\0result"));
    assert!(server.ttl(&name(&key)).await.unwrap() <= 2 * SEC);
}

#[tokio::test]
async fn the_prefix_is_part_of_the_name_and_of_the_channel() {
    let store = Store::server().await;
    let client = store.client_with(|builder| builder.prefix("shop:")).await;
    let (server, prefixed, key) = (store.as_server(), client.records().unwrap(), fresh_key());
    let mut watch = prefixed.watch(&key);
    watch.changed().await;
    let full = format!("shop:{}", name(&key));
    assert_eq!(server.pubsub_channels().await, std::slice::from_ref(&full));
    let (token, _) = claimed(&prefixed, ask(&key), 1).await;
    assert_eq!(server.keys().await, ["shop:dlock:fence", &full]);
    let (a, b) = tokio::join!(prefixed.release(&key, &token), timeout(10 * SEC, watch.changed()));
    assert_eq!((a.unwrap(), b), (OwnerReply::Done, Ok(())));
    drop(watch);
    claimed(&records(&store).await, ask(&key), 1).await;
    claimed(&prefixed, ask(&key), 1).await;
    // Records are no locks.
    assert!(client.list("").await.unwrap().is_empty());
    eventually("the subscription is ended", || async {
        server.pubsub_channels().await.is_empty()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_step_is_one_round_trip_and_many_share_one() {
    let (_store, proxy, _, _) = setting().await;
    let client = patient(&proxy.url()).await;
    let records = client.records().unwrap();
    let (key, count) = (fresh_key(), |n: usize, what: &str| {
        let seen = proxy.count(Command::is_script);
        assert_eq!(seen, n, "{what}");
        let call = proxy
            .commands()
            .into_iter()
            .rfind(|sent| sent.command.is_script());
        call.unwrap().command
    });
    proxy.forget();
    let (token, _) = claimed(&records, ask(&key), 1).await;
    assert_eq!(count(1, "a claim").script_keys(), ["dlock:fence", &name(&key)]);
    records.extend(&key, &token, SEC, DAY).await.unwrap();
    count(2, "an extension");
    records.complete(&key, &token, b"x".to_vec(), DAY).await.unwrap();
    count(3, "a completion");
    records.claim(ask(&key)).await.unwrap();
    count(4, "a replay");
    records.release(&key, &token).await.unwrap();
    assert!(count(5, "a release").is("EVALSHA"));

    proxy.forget();
    let keys: Vec<_> = (0..1000).map(|_| fresh_key()).collect();
    join_all(keys.iter().map(|key| claimed(&records, ask(key), 1))).await;
    let calls = proxy.count(Command::is_script);
    assert!(calls <= 20, "{calls} calls for a thousand claims");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_results_travel_in_calls_of_bounded_size() {
    const RESULT: usize = 1024 * 1024;
    let store = Store::server().await;
    let proxy = dlock_tests::Proxy::start(store.as_server().addr());
    let client = hasty_builder(&proxy.url())
        .timeout(PATIENCE)
        .build()
        .await
        .unwrap();
    let records = client.records().unwrap();
    let keys: Vec<_> = (0..16).map(|_| fresh_key()).collect();
    let owners = join_all(keys.iter().map(|key| claimed(&records, ask(key), 1))).await;
    proxy.forget();
    let done = join_all(
        keys.iter()
            .zip(&owners)
            .map(|(key, (token, _))| records.complete(key, token, vec![b'r'; RESULT], DAY)),
    );
    // A lock between them is not refused and does not wait for them all.
    let guard = client.lock("small");
    let (done, guard) = tokio::join!(done, guard.acquire());
    assert!(done.into_iter().all(|reply| reply.unwrap() == OwnerReply::Done));
    guard.unwrap().release().await.unwrap();
    for sent in proxy.commands() {
        let size: usize = sent.command.args().iter().map(|arg| arg.len()).sum();
        assert!(size < 2 * RESULT, "a call of {size} bytes");
    }
    proxy.forget();
    let replies = join_all((0..64).map(|i| records.claim(ask(&keys[i % 16])))).await;
    for reply in replies {
        assert!(
            matches!(reply.unwrap(), ClaimReply::Completed { response } if response == vec![b'r'; RESULT])
        );
    }
    // Four of them fit into an answer.
    let calls = proxy.count(Command::is_script);
    assert!((16..=40).contains(&calls), "{calls} calls for 64 MiB");
}

#[tokio::test]
async fn a_record_that_cannot_be_read_is_an_error_and_stays_as_it_is() {
    let store = Store::server().await;
    let (server, records) = (store.as_server(), records(&store).await);
    let (key, token) = (fresh_key(), ClaimToken::new());
    let name = name(&key);
    let newer = format!("dlock2 c 9999999999999999 1 1 {} ", token.as_str());
    let newer = [newer.as_bytes(), &[7; 32]].concat();
    let truncated = format!("dlock1 c 9999999999999999 1 1 {} 0123456789", token.as_str());
    let lease = format!("dlock1 c 99 1 1 {} {}", token.as_str(), "x".repeat(32));
    let state = format!(
        "dlock1 x 9999999999999999 1 1 {} {}",
        token.as_str(),
        "x".repeat(32)
    );
    let long = [b"dlock1 ".as_slice(), &[b'c'; 100_000]].concat();
    let strings = [
        newer.as_slice(),
        truncated.as_bytes(),
        lease.as_bytes(),
        state.as_bytes(),
        b"hello",
        b"",
        b"dlock1",
        b"\0\xff",
        &long,
    ];
    for value in strings {
        plant(server, &name, value).await;
        a_record_that_cannot_be_read(&records, &key, &token).await;
        assert_eq!(raw(server, &name).await, value);
        assert_eq!(server.query::<i64>(&["PTTL", &name]).await, -1);
    }
    let others: [&[&str]; 5] = [
        &["HSET", &name, "a", "b"],
        &["RPUSH", &name, "a"],
        &["SADD", &name, "a"],
        &["ZADD", &name, "1", "a"],
        &["XADD", &name, "*", "a", "b"],
    ];
    for other in others {
        server.command(&["DEL", &name]).await;
        server.command(other).await;
        let before: Value = server.command(&["DUMP", &name]).await;
        a_record_that_cannot_be_read(&records, &key, &token).await;
        assert_eq!(server.command(&["DUMP", &name]).await, before);
    }
    // The error says which.
    plant(server, &name, &newer).await;
    let error = records.claim(ask(&key)).await.unwrap_err();
    assert!(error.message.contains("format 2"), "{error}");
    let Reason::KeyTaken(found) = error.reason else {
        panic!("{error:?}")
    };
    assert!(found.contains("format 2"), "{found}");
}

#[tokio::test]
async fn locks_and_records_of_one_name_do_not_mix() {
    let store = Store::server().await;
    let client = store.client().await;
    let (records, held, claimed_key) = (client.records().unwrap(), fresh_key(), fresh_key());
    let guard = client.lock(LockKey::raw(name(&held))).acquire().await.unwrap();
    a_record_that_cannot_be_read(&records, &held, &ClaimToken::new()).await;
    assert!(guard.is_held());
    guard.release().await.unwrap();
    claimed(&records, ask(&held), 1).await;

    claimed(&records, ask(&claimed_key), 1).await;
    let error = client
        .lock(LockKey::raw(name(&claimed_key)))
        .try_acquire()
        .await
        .unwrap_err();
    assert!(matches!(error, Error::KeyTaken { .. }), "{error}");
    assert!(matches!(
        client.force_release(LockKey::raw(name(&claimed_key))).await,
        Err(Error::KeyTaken { .. })
    ));
    let reply = records.claim(ask(&claimed_key)).await.unwrap();
    assert!(matches!(reply, ClaimReply::InProgress { .. }));
}

/// In one thread, so that all of them are asked for before the first is sent.
#[tokio::test]
async fn one_bad_record_harms_no_other_step_in_the_same_call() {
    let (store, proxy, _, _) = setting().await;
    let client = patient(&proxy.url()).await;
    let (server, records) = (store.as_server(), client.records().unwrap());
    let keys: Vec<_> = (0..100).map(|_| fresh_key()).collect();
    for (i, key) in keys.iter().enumerate() {
        match i % 5 {
            0 => drop(server.command(&["RPUSH", &name(key), "a"]).await),
            1 => plant(server, &name(key), b"dlock7 c 0").await,
            _ => {}
        }
    }
    let guard = client.lock("k").acquire().await.unwrap();
    proxy.forget();
    let (replies, reentry) = tokio::join!(
        join_all(keys.iter().map(|key| records.claim(ask(key)))),
        client.lock("m").acquire()
    );
    for (i, reply) in replies.into_iter().enumerate() {
        match (i % 5, reply) {
            (0 | 1, Err(error)) => assert!(matches!(error.reason, Reason::KeyTaken(_)), "{error:?}"),
            (2.., Ok(ClaimReply::Claimed { attempt: 1, .. })) => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(proxy.count(Command::is_script) <= 4);
    reentry.unwrap().release().await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_channel_that_is_forbidden_fails_no_completion() {
    let store = Store::server().await;
    give(store.as_server(), "svc", &["Locks", "Records"]).await;
    store
        .as_server()
        .command(&["ACL", "SETUSER", "svc", "-publish"])
        .await;
    let records = patient(&store.as_server().url_as("svc", "password"))
        .await
        .records()
        .unwrap();
    let (done, released) = (fresh_key(), fresh_key());
    let (token, _) = claimed(&records, ask(&done), 1).await;
    let reply = records.complete(&done, &token, b"x".to_vec(), DAY).await;
    assert_eq!(reply.unwrap(), OwnerReply::Done);
    let (token, _) = claimed(&records, ask(&released), 1).await;
    assert_eq!(
        records.release(&released, &token).await.unwrap(),
        OwnerReply::Done
    );
    assert_eq!(store.as_server().keys().await, ["dlock:fence", &name(&done)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_that_were_flushed_are_no_trouble() {
    let store = Store::server().await;
    let records = records(&store).await;
    for _ in 0..20 {
        let keys: Vec<_> = (0..50).map(|_| fresh_key()).collect();
        let work = join_all(keys.iter().map(|key| async {
            let (token, _) = claimed(&records, ask(key), 1).await;
            records.release(key, &token).await.unwrap();
            claimed(&records, ask(key), 1).await;
        }));
        tokio::join!(work, store.as_server().script_flush());
    }
}
