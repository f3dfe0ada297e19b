//! What is wrong gives one clear error, in bounded time and without a password in it: names, options, data
//! that is no lock, URLs, and servers that are not there, not Redis, or not willing.

use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use dlock::{Error, LockClient, LockKey, MAX_KEY_BYTES};
use dlock_tests::faults::ordinary;
use dlock_tests::records::{ask, claimed, fresh_key};
use dlock_tests::{Flavor, Server, Store, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

const SECOND: Duration = Duration::from_secs(1);
/// The time that a failing call may take: the timeout of a step is 1 s, and machines stand still now and then.
const BOUND: Duration = Duration::from_secs(20);

fn server() -> dlock_tests::ServerBuilder {
    Server::builder(Flavor::from_env())
}

/// The error of a call that must fail within the bound.
async fn fails<T: fmt::Debug>(what: &str, call: impl Future<Output = Result<T, Error>>) -> Error {
    let before = Instant::now();
    let error = tokio::time::timeout(3 * BOUND, call)
        .await
        .expect(what)
        .expect_err(what);
    let took = before.elapsed();
    println!("{what}: {error} ({took:.0?})");
    assert!(took < BOUND, "{what} took {took:?}: {error}");
    let shown = format!("{error} {error:?}");
    assert!(!shown.contains("hunter2"), "{what} tells the password: {shown}");
    assert!(
        error.to_string().len() < 400 && !error.to_string().contains('\n'),
        "{error}"
    );
    error
}

async fn connect_fails(what: &str, url: &str) -> Error {
    fails(what, LockClient::connect(url)).await
}

fn assert_says(error: &Error, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "no \"{word}\" in: {text}");
    }
}

fn assert_unreachable(error: &Error, words: &[&str]) {
    assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
    assert_says(error, words);
}

fn assert_refused(error: &Error, words: &[&str]) {
    assert!(matches!(error, Error::Refused { .. }), "{error:?}");
    assert_says(error, words);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_that_break_a_rule_are_refused_before_anything_is_sent() {
    let store = Store::server().await;
    let client = store.client().await;
    let monitor = store.as_server().monitor().await;
    let huge = "k".repeat(10_000);
    let cases: [(LockKey, &str); 9] = [
        ("".into(), "empty"),
        (LockKey::raw(""), "empty"),
        (huge.into(), "10000 bytes"),
        ("k".repeat(MAX_KEY_BYTES + 1).into(), "513 bytes"),
        ("a\r\nDEL b".into(), "control character at byte 1"),
        ("nul\0".into(), "control character"),
        ("order:{42}".into(), "brace at byte 6"),
        (LockKey::raw("{a}\u{7f}"), "control character"),
        ("dlock:record:once-x".into(), "begins with `dlock:`"),
    ];
    for (key, says) in cases {
        let lock = client.lock(key.clone());
        let errors = [
            fails("acquire", lock.acquire()).await,
            fails("try_acquire", lock.try_acquire()).await,
            fails("run", lock.run(|_| async {})).await,
            fails("inspect", client.inspect(key.clone())).await,
            fails("force_release", client.force_release(key)).await,
            lock.check().unwrap_err(),
        ];
        for error in errors {
            assert!(matches!(error, Error::InvalidKey { .. }), "{error:?}");
            assert_says(&error, &[says]);
        }
    }
    assert!(monitor.commands().await.is_empty());
    store.assert_clean(&[&client]).await;
}

/// An invalid value in place of the last fencing token stops no client: tokens go on with the server's clock, which is
/// ahead of all that were given.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fence_without_a_token_is_begun_anew_and_stops_no_caller() {
    let store = Store::server().await;
    let (server, client) = (store.as_server(), store.client().await);
    let records = client.records().unwrap();
    let mut last = 0;
    let two_to_the_53rd = (1_u64 << 53).to_string();
    for spoilt in [
        "abc",
        "",
        "1e400",
        "-5",
        "1.5",
        "nan",
        "17",
        "99999999999999999999",
        "1795354604934212x",
        &two_to_the_53rd,
    ] {
        server.command(&["SET", "dlock:fence", spoilt]).await;
        let now = server.time_us().await;
        let guards = [
            client.lock("a").acquire().await.unwrap(),
            client.rw_lock("b").read().acquire().await.unwrap(),
        ];
        for token in guards.iter().map(dlock::LockGuard::fencing_token) {
            assert!(
                token > last && token >= now && token < now + 60_000_000,
                "{spoilt}: {token} at {now}"
            );
            last = token;
        }
        server.command(&["SET", "dlock:fence", spoilt]).await;
        let (_, fence) = claimed(&records, ask(&fresh_key()), 1).await;
        assert!(fence > last, "{spoilt}: {fence} after {last}");
        last = fence;
        for guard in guards {
            guard.release().await.unwrap();
        }
        let fence: u64 = server.query(&["GET", "dlock:fence"]).await;
        assert_eq!(fence, last, "{spoilt}");
    }
}

/// A number that Lua cannot count on from would be given again and again. Nor is what is no string overwritten, whose data
/// it may be.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fence_at_the_end_of_all_numbers_or_of_another_type_is_told() {
    let store = Store::server().await;
    let (server, client) = (store.as_server(), store.client().await);
    let last = (1_u64 << 53) - 1;
    server
        .command(&["SET", "dlock:fence", &(last - 2).to_string()])
        .await;
    for token in [last - 1, last] {
        let guard = client.lock("k").acquire().await.unwrap();
        assert_eq!(guard.fencing_token(), token);
        guard.release().await.unwrap();
    }
    for _ in 0..3 {
        let error = fails("acquire", client.lock("k").wait(10 * SECOND).acquire()).await;
        assert_refused(&error, &["\"k\"", "dlock:fence", "remove this key"]);
        let error = fails("acquire", client.rw_lock("k").write().try_acquire()).await;
        assert_refused(&error, &["\"k\"", "dlock:fence", "remove this key"]);
    }
    assert!(client.records().unwrap().claim(ask(&fresh_key())).await.is_err());
    assert_eq!(server.keys().await, ["dlock:fence"]);
    assert_eq!(server.query::<u64>(&["GET", "dlock:fence"]).await, last);

    server.command(&["DEL", "dlock:fence"]).await;
    server.command(&["RPUSH", "dlock:fence", "x"]).await;
    let error = fails("acquire", client.lock("k").wait(10 * SECOND).acquire()).await;
    assert_refused(&error, &["\"k\"", "dlock:fence", "other data"]);
    assert_eq!(server.keys().await, ["dlock:fence"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passwords_that_are_wrong_or_missing_are_told() {
    let server = server()
        .password("hunter2")
        .acl("off off >hunter2 ~* &* +@all")
        .acl("svc on >other ~* &* +@all")
        .start()
        .await;
    let addr = server.addr();
    let error = connect_fails("a wrong password", &format!("redis://:hunter2x@{addr}")).await;
    assert_refused(&error, &[&addr.to_string(), "password"]);
    let error = connect_fails("a wrong user", &format!("redis://nobody:hunter2@{addr}")).await;
    assert_refused(&error, &[&addr.to_string(), "password"]);
    let error = connect_fails(
        "a user that is switched off",
        &format!("redis://off:hunter2@{addr}"),
    )
    .await;
    assert_refused(&error, &[&addr.to_string(), "disabled"]);
    let error = connect_fails("no password", &format!("redis://{addr}")).await;
    assert_refused(&error, &[&addr.to_string(), "give the password"]);
    let error = connect_fails(
        "a password in place of the user",
        &format!("redis://hunter2@{addr}"),
    )
    .await;
    assert_refused(&error, &[&addr.to_string(), "password"]);
    let error = connect_fails("no such database", &format!("redis://:hunter2@{addr}/99")).await;
    assert_refused(&error, &[&addr.to_string(), "index"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_without_password_is_that_user() {
    let server = server().acl("guest on nopass ~guest:* &* +@all").start().await;
    let url = format!("redis://guest@{}", server.addr());
    let _client = ordinary(&url).await;
    let users: Vec<_> = server.client_list().await;
    assert!(users.iter().any(|client| client["user"] == "guest"), "{users:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn urls_with_a_mistake_are_explained() {
    for (url, says) in [
        ("reids://:hunter2@localhost", "did you mean \"redis\""),
        ("redis:/:hunter2@localhost", "no scheme"),
        ("redis//localhost", "no scheme"),
        ("http://:hunter2@localhost", "not known"),
        ("redis://:hunter2@localhost:6379x", "port"),
        ("redis://:hunter2@localhost:637999", "port"),
        ("redis://:hunter2@:6379", "no host"),
        ("redis://:hunter2/@localhost", "%2F"),
        ("redis://localhost/one", "database number"),
        ("redis://localhost?prefx=a", "did you mean \"prefix\""),
        ("redis://localhost?lease=10", "unit"),
        ("redis+unix://run/redis.sock", "whole path"),
        (" redis://localhost", "spaces"),
        ("", "no scheme"),
    ] {
        let error = connect_fails(url, url).await;
        assert!(matches!(error, Error::InvalidUrl { .. }), "{error:?}");
        assert_says(&error, &["lock store URL", says]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefix_that_leads_to_the_keys_of_others_is_refused() {
    for prefix in ["dlock:", "dlock:record:"] {
        let error = connect_fails(prefix, &format!("redis://localhost?prefix={prefix}")).await;
        assert!(
            matches!(error, Error::InvalidOption { option: "prefix", .. }),
            "{error:?}"
        );
        assert_says(&error, &["begins with `dlock:`"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_not_there_is_named() {
    let closed = TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap();
    let error = connect_fails("a closed port", &format!("redis://:hunter2@{closed}")).await;
    assert_unreachable(&error, &[&closed.to_string(), "refused"]);
    let error = connect_fails("no such host", "redis://:hunter2@no-such-host.invalid").await;
    assert_unreachable(&error, &["no-such-host.invalid:6379"]);
    let error = connect_fails("no such socket", "redis+unix:///no/such/socket?password=hunter2").await;
    assert_unreachable(&error, &["/no/such/socket", "No such file"]);
    // A timeout of one's own is kept to.
    let silent = impostor(b"", true).await;
    let before = Instant::now();
    let error = connect_fails("a short timeout", &format!("redis://{silent}?timeout=200ms")).await;
    assert_unreachable(&error, &[&silent.to_string(), "200ms"]);
    assert!(before.elapsed() < BOUND, "{:?}", before.elapsed());
}

/// A server that is not Redis: says this to every client and every request, and then stays or
/// goes.
async fn impostor(says: &'static [u8], stays: bool) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut buffer = [0; 1024];
                while stays && matches!(stream.read(&mut buffer).await, Ok(1..)) {
                    if stream.write_all(says).await.is_err() {
                        return;
                    }
                }
                let _ = stream.write_all(says).await;
            });
        }
    });
    addr
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_not_redis_is_told_in_bounded_time() {
    let http = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
    let strange = "does not answer like a Redis";
    let cases: [(&str, &'static [u8], bool, &str); 9] = [
        ("HTTP", http, true, strange),
        ("HTTP that closes", http, false, strange),
        ("SSH", b"SSH-2.0-OpenSSH_9.2p1\r\n", true, strange),
        ("garbage", b"\x00\xff\xfe\x80 \r\n\r\n$$$", true, strange),
        (
            "an endless reply",
            b"*2147483647\r\n",
            true,
            "did not answer within 1s",
        ),
        (
            "a long text that never comes",
            b"$536870912\r\n",
            true,
            "did not answer within 1s",
        ),
        (
            "yes to everything",
            b"+OK\r\n+OK\r\n+OK\r\n+OK\r\n",
            true,
            strange,
        ),
        ("silence", b"", true, "did not answer within 1s"),
        ("a closed door", b"", false, ""),
    ];
    for (what, answers, stays, says) in cases {
        let addr = impostor(answers, stays).await;
        let error = connect_fails(what, &format!("redis://:hunter2@{addr}")).await;
        assert_unreachable(&error, &[&addr.to_string(), says]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_only_replica_is_told() {
    let master = server().start().await;
    let replica = server().replica_of(master.addr()).start().await;
    linked(&replica).await;
    let client = ordinary(&replica.url()).await;
    for lock in [client.lock("k"), client.lock("k").wait(10 * SECOND)] {
        let error = fails("acquire on a replica", lock.acquire()).await;
        assert_refused(&error, &["\"k\"", "read-only replica", "master"]);
    }
    // What only reads works there.
    let on_master = ordinary(&master.url()).await;
    let guard = on_master.lock("k").acquire().await.unwrap();
    eventually("the replica has the lock", || async {
        replica.keys().await.contains(&"k".to_owned())
    })
    .await;
    assert!(client.inspect("k").await.unwrap().is_some());
    assert!(client.lock("k").try_acquire().await.unwrap_err().is_busy());
    let error = fails("force_release on a replica", client.force_release("k")).await;
    assert_refused(&error, &["read-only replica"]);
    guard.release().await.unwrap();

    // Its master is gone, and it is told to answer all the same, and then not to.
    master.kill();
    eventually("the link is down", || async { !is_linked(&replica).await }).await;
    let error = fails("acquire with the master gone", client.lock("j").acquire()).await;
    assert_refused(&error, &["read-only replica"]);
    replica
        .command(&["CONFIG", "SET", "replica-serve-stale-data", "no"])
        .await;
    let url = format!("{}?retry_for=500ms", replica.url());
    let client = ordinary(&url).await;
    // Of a request that is under way when `retry_for` ends, nothing is known.
    let mut error = fails("acquire on a stale replica", client.lock("j").acquire()).await;
    for _ in 0..3 {
        if matches!(error, Error::OutcomeUnknown { .. }) {
            error = fails("acquire on a stale replica", client.lock("j").acquire()).await;
        }
    }
    assert_unreachable(&error, &["\"j\"", "MASTER is down"]);
}

async fn is_linked(replica: &Server) -> bool {
    let info: String = replica.query(&["INFO", "replication"]).await;
    info.contains("master_link_status:up")
}

async fn linked(replica: &Server) {
    eventually("the replica is linked", || is_linked(replica)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_lacks_replicas_is_told() {
    let server = server().config("min-replicas-to-write", "1").start().await;
    let client = ordinary(&server.url()).await;
    let error = fails("acquire without replicas", client.lock("k").acquire()).await;
    assert_refused(&error, &["\"k\"", "replicas"]);
    assert!(server.keys().await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_still_loads_is_told_and_waited_for() {
    let server = server()
        .config("key-load-delay", "10000")
        .config("loading-process-events-interval-bytes", "1024")
        .config("rdbcompression", "no")
        .start()
        .await;
    let fill = "for i = 1, 300 do redis.call('SET', 'k' .. i, string.rep('x', 2000)) end";
    server.command(&["EVAL", fill, "0"]).await;
    server.command(&["SAVE"]).await;
    let probe = redis::Client::open(server.url()).unwrap();
    let probing = async {
        eventually("the server loads", || async {
            let Ok(mut conn) = probe.get_multiplexed_async_connection().await else {
                return false;
            };
            let pong: redis::RedisResult<String> = redis::cmd("PING").query_async(&mut conn).await;
            pong.is_err_and(|error| {
                error.to_string().contains("LOADING") || error.to_string().contains("loading")
            })
        })
        .await;
        let url = format!("{}?retry_for=300ms", server.url());
        let (client, error) = match LockClient::connect(&url).await {
            Ok(client) => {
                let error = fails("acquire while it loads", client.lock("lock").acquire()).await;
                (Some(client), error)
            }
            Err(error) => (None, error),
        };
        assert!(error.is_unavailable(), "{error:?}");
        assert_says(&error, &["loading"]);
        // With more patience the same client gets its lock once the data are there.
        let patient = LockClient::connect(&format!("{}?retry_for=20s", server.url()))
            .await
            .unwrap();
        patient
            .lock("lock")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        drop(client);
    };
    tokio::join!(server.restart(), probing);
}

/// The default client is one for the whole process.
mod alone {
    use super::*;

    #[tokio::test]
    async fn the_default_client_is_set_once() {
        let error = dlock::default_client().unwrap_err();
        assert!(matches!(error, Error::NoDefaultClient), "{error:?}");
        assert_says(&error, &["set_default"]);
        dlock::set_default(LockClient::memory()).unwrap();
        let error = dlock::set_default(LockClient::memory()).unwrap_err();
        assert!(matches!(error, Error::DefaultClientSet), "{error:?}");
        assert_says(&error, &["already set", "once per process"]);
        assert!(dlock::default_client().is_ok());
    }
}
