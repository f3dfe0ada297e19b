//! The harness itself: servers that come, go and freeze as told, and a proxy whose faults do what they say.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use dlock_tests::{Command, Direction, Flavor, Proxy, Server, Swallow, child, eventually};
use futures_util::StreamExt;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, RedisResult, Value};

const SHORT: Duration = Duration::from_millis(300);

async fn server() -> Server {
    Server::start(Flavor::from_env()).await
}

async fn pair() -> (Server, Proxy) {
    let server = server().await;
    let proxy = Proxy::start(server.addr());
    (server, proxy)
}

async fn open(url: &str, reply_within: Duration) -> RedisResult<MultiplexedConnection> {
    // It may take long to connect, on a machine that stands still meanwhile.
    let info = redis::Client::open(url)?;
    for _ in 0..10 {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(Duration::from_secs(60)))
            .set_response_timeout(Some(reply_within));
        match info.get_multiplexed_async_connection_with_config(&config).await {
            Err(error) if error.is_timeout() => {}
            outcome => return outcome,
        }
    }
    panic!("no connection in ten tries")
}

async fn connect(url: &str) -> MultiplexedConnection {
    open(url, Duration::from_secs(60)).await.expect("a connection")
}

/// A connection that gives up on a reply after [`SHORT`].
async fn impatient(url: &str) -> MultiplexedConnection {
    open(url, SHORT).await.expect("a connection")
}

async fn incr(conn: &mut MultiplexedConnection, key: &str) -> RedisResult<i64> {
    redis::cmd("INCR").arg(key).query_async(conn).await
}

async fn incr_is_answered(mut conn: MultiplexedConnection, key: &str) -> bool {
    incr(&mut conn, key).await.is_ok()
}

fn is_incr(command: &Command) -> bool {
    command.is("INCR")
}

fn raw(proxy: &Proxy) -> TcpStream {
    let stream = TcpStream::connect(proxy.addr()).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

fn expect(stream: &mut TcpStream, bytes: &[u8]) {
    let mut got = vec![0; bytes.len()];
    stream.read_exact(&mut got).expect("a reply");
    assert_eq!(got.escape_ascii().to_string(), bytes.escape_ascii().to_string());
}

fn expect_closed(stream: &mut TcpStream) {
    assert!(
        matches!(stream.read(&mut [0; 64]), Ok(0)),
        "the connection is closed"
    );
}

mod servers {
    use super::*;

    #[tokio::test]
    async fn both_flavours_start_and_know_their_names() {
        for flavor in [Flavor::Redis, Flavor::Valkey] {
            let server = Server::start(flavor).await;
            let info: String = server.query(&["INFO", "server"]).await;
            assert_eq!(info.contains("valkey_version"), flavor == Flavor::Valkey);
            assert_eq!(server.keys().await, Vec::<String>::new());
        }
    }

    #[tokio::test]
    async fn a_program_of_the_other_flavour_is_refused() {
        // else a link by the wrong name would make both runs of a suite test the same server
        let builder = Server::builder(Flavor::Redis).binary(Flavor::Valkey.binary().unwrap());
        let error = builder.try_start().await.expect_err("it is Valkey").to_string();
        assert!(
            error.contains("is Valkey") && error.contains("DLOCK_REDIS_SERVER"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn each_server_has_its_own_port_and_data() {
        let (one, other) = (server().await, server().await);
        assert_ne!(one.port(), other.port());
        one.command(&["SET", "a", "1"]).await;
        assert_eq!(one.keys().await, ["a"]);
        assert!(other.keys().await.is_empty());
    }

    #[tokio::test]
    async fn a_configuration_that_the_server_refuses_is_an_error_with_its_words() {
        let error = Server::builder(Flavor::from_env())
            .config("no-such-setting", "1")
            .try_start()
            .await
            .expect_err("the setting does not exist");
        assert!(format!("{error:#}").contains("no-such-setting"), "{error:#}");
    }

    #[tokio::test]
    async fn a_frozen_server_takes_connections_and_answers_nothing_until_it_goes_on() {
        let server = server().await;
        let mut conn = impatient(&server.url()).await;
        server.stop();
        assert!(incr(&mut conn, "n").await.unwrap_err().is_timeout());
        TcpStream::connect(server.addr()).expect("the kernel accepts for it");
        server.cont();
        // what was sent meanwhile is executed late
        eventually("the late INCR", async || {
            server.query::<Option<i64>>(&["GET", "n"]).await == Some(1)
        })
        .await;
    }

    #[tokio::test]
    async fn a_killed_server_comes_back_empty_on_its_port() {
        let server = server().await;
        server.command(&["SET", "a", "1"]).await;
        let (url, pid) = (server.url(), server.pid());
        server.kill();
        assert!(open(&url, SHORT).await.is_err());
        assert_eq!(server.pid(), None);
        server.restart().await;
        assert_eq!(server.url(), url);
        assert_ne!(server.pid(), pid);
        assert!(server.keys().await.is_empty());
    }

    #[tokio::test]
    async fn a_persistent_server_keeps_every_write_unless_its_disk_is_lost() {
        let server = Server::builder(Flavor::from_env())
            .persistence(true)
            .start()
            .await;
        server.command(&["SET", "a", "1"]).await;
        server.kill();
        server.restart().await;
        assert_eq!(server.keys().await, ["a"]);
        server.shutdown().await;
        server.restart().await;
        assert_eq!(server.keys().await, ["a"]);
        server.restart_empty().await;
        assert!(server.keys().await.is_empty());
    }

    #[tokio::test]
    async fn a_frozen_server_can_be_killed_and_dropped() {
        let server = server().await;
        let pid = server.pid().unwrap();
        server.stop();
        drop(server);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }

    #[tokio::test]
    async fn users_and_passwords_are_as_configured() {
        let server = Server::builder(Flavor::from_env())
            .password("hunter2")
            .acl("svc on >secret ~dlock:* &* -@all +get +set")
            .start()
            .await;
        let mut nobody = connect(&format!("redis://{}", server.addr())).await;
        assert!(incr(&mut nobody, "n").await.is_err(), "it wants a password");
        incr(&mut connect(&server.url()).await, "n").await.unwrap();
        let mut svc = connect(&server.url_as("svc", "secret")).await;
        let set: RedisResult<Value> = redis::cmd("SET")
            .arg("dlock:a")
            .arg(1)
            .query_async(&mut svc)
            .await;
        assert!(set.is_ok());
        let set: RedisResult<Value> = redis::cmd("SET").arg("other").arg(1).query_async(&mut svc).await;
        assert!(set.is_err(), "not one of its keys");
        // the harness sees everything all the same
        assert_eq!(server.keys().await, ["dlock:a", "n"]);
        server.restart().await;
        incr(&mut connect(&server.url()).await, "n").await.unwrap();
    }

    #[tokio::test]
    async fn a_unix_socket_leads_to_the_same_server() {
        let server = Server::builder(Flavor::from_env())
            .unix_socket(true)
            .password("pw")
            .start()
            .await;
        let mut conn = connect(&server.unix_url()).await;
        incr(&mut conn, "n").await.unwrap();
        assert_eq!(server.keys().await, ["n"]);
    }

    #[tokio::test]
    async fn a_replica_gets_the_masters_data_and_takes_no_writes() {
        let master = server().await;
        master.command(&["SET", "a", "1"]).await;
        let replica = Server::builder(Flavor::from_env())
            .replica_of(master.addr())
            .start()
            .await;
        eventually("the replica has the key", async || replica.keys().await == ["a"]).await;
        let error = replica.try_query::<Value>(&["SET", "b", "1"]).await.unwrap_err();
        assert!(error.to_string().to_lowercase().contains("read"), "{error}");
    }

    #[tokio::test]
    async fn settings_reach_the_server() {
        let server = Server::builder(Flavor::from_env())
            .maxmemory_policy("allkeys-lru")
            .config("client-output-buffer-limit", "normal 1mb 0 0")
            .start()
            .await;
        let policy: Vec<String> = server.query(&["CONFIG", "GET", "maxmemory-policy"]).await;
        assert_eq!(policy, ["maxmemory-policy", "allkeys-lru"]);
    }

    #[tokio::test]
    async fn the_monitor_shows_what_clients_and_their_scripts_did_and_not_the_harness() {
        let server = server().await;
        let mut conn = connect(&server.url()).await;
        let monitor = server.monitor().await;
        server.command(&["GET", "of the harness"]).await;
        let script = "return redis.call('SET', KEYS[1], ARGV[1])";
        let _: Value = redis::cmd("EVAL")
            .arg(script)
            .arg(1)
            .arg("k\n")
            .arg(b"\x00\xff")
            .query_async(&mut conn)
            .await
            .unwrap();
        let commands = monitor.commands().await;
        assert_eq!(commands.len(), 1, "{commands:?}");
        assert_eq!(commands[0].script_keys(), ["k\n"]);
        assert_eq!(&commands[0].args()[4][..], b"\x00\xff");
        let all = monitor.all().await;
        assert!(
            all.iter().any(|seen| seen.by_script() && seen.command.is("SET")),
            "{all:?}"
        );
        monitor.forget();
        assert!(monitor.all().await.is_empty());
    }

    #[tokio::test]
    async fn clients_and_channels_are_listed() {
        let server = server().await;
        assert!(server.client_list().await.is_empty());
        let client = redis::Client::open(server.url()).unwrap();
        let mut pubsub = client.get_async_pubsub().await.unwrap();
        pubsub.subscribe("notifications").await.unwrap();
        assert_eq!(server.pubsub_channels().await, ["notifications"]);
        let clients = server.client_list().await;
        assert_eq!(clients.len(), 1, "{clients:?}");
        assert_eq!(clients[0]["sub"], "1");
        drop(pubsub);
        eventually("the subscription is gone", async || {
            server.pubsub_channels().await.is_empty()
        })
        .await;
    }

    #[tokio::test]
    async fn flushing_scripts_and_data_works() {
        let server = server().await;
        let sha: String = server.query(&["SCRIPT", "LOAD", "return 1"]).await;
        server.command(&["EVALSHA", &sha, "0"]).await;
        server.script_flush().await;
        let error = server
            .try_query::<Value>(&["EVALSHA", &sha, "0"])
            .await
            .unwrap_err();
        assert!(error.to_string().contains("script"), "{error}");
        server.command(&["SET", "a", "1"]).await;
        assert_eq!(server.ttl("a").await, None);
        server.command(&["PEXPIRE", "a", "5000"]).await;
        assert!(server.ttl("a").await.unwrap() <= Duration::from_secs(5));
        assert!(server.time_us().await > 1_600_000_000_000_000);
        server.flush().await;
        assert!(server.keys().await.is_empty());
    }

    #[test]
    fn a_server_outlives_the_thread_and_the_runtime_that_started_it() {
        fn run<T>(future: impl Future<Output = T>) -> T {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap()
                .block_on(future)
        }
        let server = thread::spawn(|| {
            run(async {
                let server = server().await;
                server.command(&["SET", "a", "1"]).await;
                server
            })
        })
        .join()
        .unwrap();
        thread::sleep(Duration::from_millis(200));
        assert_eq!(run(async { server.keys().await }), ["a"]);
    }

    /// Not a test by itself: the next one runs it in a process that it kills.
    #[tokio::test]
    #[ignore = "run by a_server_dies_with_the_test_process"]
    async fn process_with_a_server() {
        let server = server().await;
        println!("\npid {}", server.pid().unwrap());
        std::future::pending::<()>().await;
    }

    #[tokio::test]
    async fn a_server_dies_with_the_test_process() {
        let mut command = child::command(std::env::current_exe().unwrap());
        command.args([
            "--exact",
            "harness::servers::process_with_a_server",
            "--ignored",
            "--nocapture",
        ]);
        // killed, it cannot remove its server's directory
        let dir = tempfile::tempdir().unwrap();
        command.env("TMPDIR", dir.path());
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = child::spawn(command).unwrap();
        let mut stdout = process.stdout.take().unwrap();
        let pid = tokio::task::spawn_blocking(move || {
            let mut text = String::new();
            let mut byte = [0];
            loop {
                stdout
                    .read_exact(&mut byte)
                    .expect("the process says its server's pid");
                text.push(char::from(byte[0]));
                if let Some((pid, _)) = text
                    .split_once("pid ")
                    .and_then(|(_, rest)| rest.split_once('\n'))
                {
                    return pid.to_owned();
                }
            }
        })
        .await
        .unwrap();
        // its command line is empty as soon as it is dead, reaped or not
        let alive = || std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty());
        assert!(alive());
        process.kill().unwrap();
        process.wait().unwrap();
        eventually("the server is dead", async || !alive()).await;
    }
}

mod proxies {
    use super::*;

    #[tokio::test]
    async fn everything_passes_unchanged() {
        let (server, proxy) = pair().await;
        let mut conn = connect(&proxy.url()).await;
        let big = vec![b'\r'; 3_000_000];
        let _: Value = redis::cmd("SET")
            .arg("big")
            .arg(&big)
            .query_async(&mut conn)
            .await
            .unwrap();
        let back: Vec<u8> = redis::cmd("GET").arg("big").query_async(&mut conn).await.unwrap();
        assert!(back == big);
        let mut pipe = redis::pipe();
        for _ in 0..500 {
            pipe.incr("n", 1);
        }
        let all: Vec<i64> = pipe.query_async(&mut conn).await.unwrap();
        assert_eq!(all, (1..=500).collect::<Vec<_>>());
        let nested: (i64, Vec<String>) = redis::cmd("EVAL")
            .arg("return {1, {'a', 'b'}}")
            .arg(0)
            .query_async(&mut conn)
            .await
            .unwrap();
        assert_eq!(nested, (1, vec!["a".into(), "b".into()]));
        assert_eq!(server.keys().await, ["big", "n"]);
        assert!(proxy.malformed().is_empty());
    }

    #[tokio::test]
    async fn commands_and_connections_are_counted() {
        let (_server, proxy) = pair().await;
        assert_eq!((proxy.connections_seen(), proxy.connections_open()), (0, 0));
        let mut conn = connect(&proxy.url()).await;
        let before = proxy.commands_seen();
        incr(&mut conn, "a").await.unwrap();
        let _: Value = redis::cmd("CLIENT")
            .arg("SETNAME")
            .arg("me")
            .query_async(&mut conn)
            .await
            .unwrap();
        assert_eq!(proxy.commands_seen(), before + 2);
        assert_eq!(proxy.count(is_incr), 1);
        let sent = proxy.commands();
        assert_eq!(sent[sent.len() - 2].command, Command::new(["INCR", "a"]));
        assert_eq!(sent[0].connection, 1);
        let connections = proxy.connections();
        assert_eq!(connections[0].name.as_deref(), Some("me"));
        assert!(!connections[0].subscriber);
        proxy.forget();
        assert!(proxy.commands().is_empty());
        drop(conn);
        eventually("the connection is closed", async || proxy.connections_open() == 0).await;
        assert_eq!(proxy.connections_seen(), 1);
    }

    #[tokio::test]
    async fn delays_add_up_over_both_directions_and_keep_the_order() {
        let (_server, proxy) = pair().await;
        let mut conn = connect(&proxy.url()).await;
        let step = Duration::from_millis(150);
        for (direction, steps) in [
            (Direction::ToServer, 1),
            (Direction::ToClient, 1),
            (Direction::Both, 2),
        ] {
            proxy.delay(direction, step, Duration::ZERO);
            let begin = Instant::now();
            incr(&mut conn, "a").await.unwrap();
            assert!(
                begin.elapsed() >= step * steps,
                "{direction:?}: {:?}",
                begin.elapsed()
            );
            proxy.delay(Direction::Both, Duration::ZERO, Duration::ZERO);
            let mut quick = false;
            for _ in 0..20 {
                let begin = Instant::now();
                incr(&mut conn, "a").await.unwrap();
                quick |= begin.elapsed() < step;
            }
            assert!(quick, "the delay is over");
        }
        proxy.delay(
            Direction::Both,
            Duration::from_millis(1),
            Duration::from_millis(50),
        );
        let mut pipe = redis::pipe();
        for _ in 0..50 {
            pipe.incr("n", 1);
        }
        let all: Vec<i64> = pipe.query_async(&mut conn).await.unwrap();
        assert_eq!(all, (1..=50).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn a_cut_closes_all_connections_and_new_ones_may_come() {
        let (server, proxy) = pair().await;
        let mut conn = connect(&proxy.url()).await;
        let mut stream = raw(&proxy);
        stream.write_all(b"PING\r\n").unwrap();
        expect(&mut stream, b"+PONG\r\n");
        assert_eq!(proxy.cut(), 2);
        assert_eq!(proxy.connections_open(), 0);
        expect_closed(&mut stream);
        assert!(incr(&mut conn, "a").await.is_err());
        eventually("the server's side is closed too", async || {
            server.client_list().await.is_empty()
        })
        .await;
        incr(&mut connect(&proxy.url()).await, "a").await.unwrap();
    }

    #[tokio::test]
    async fn a_reset_is_seen_as_one() {
        let (_server, proxy) = pair().await;
        let mut stream = raw(&proxy);
        stream.write_all(b"PING\r\n").unwrap();
        expect(&mut stream, b"+PONG\r\n");
        proxy.reset();
        let error = stream.read(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    }

    #[tokio::test]
    async fn one_connection_can_be_cut_or_blocked_alone() {
        let (_server, proxy) = pair().await;
        let mut one = impatient(&proxy.url()).await;
        let mut other = connect(&proxy.url()).await;
        let ids: Vec<u64> = proxy.connections().iter().map(|conn| conn.id).collect();
        proxy.block_connection(ids[0], Direction::ToClient);
        assert!(incr(&mut one, "a").await.unwrap_err().is_timeout());
        incr(&mut other, "a").await.unwrap();
        proxy.unblock_connection(ids[0], Direction::ToClient);
        dlock_tests::eventually("it goes on", || incr_is_answered(one.clone(), "a")).await;
        proxy.cut_connection(ids[0]);
        assert!(incr(&mut one, "a").await.is_err());
        incr(&mut other, "a").await.unwrap();
    }

    #[tokio::test]
    async fn refused_connections_are_refused_and_open_ones_go_on() {
        let (_server, proxy) = pair().await;
        let mut conn = connect(&proxy.url()).await;
        for _ in 0..3 {
            proxy.refuse();
            let error = TcpStream::connect(proxy.addr()).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
            incr(&mut conn, "a").await.unwrap();
            proxy.accept();
            incr(&mut connect(&proxy.url()).await, "a").await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_mute_host_accepts_and_never_answers() {
        let (_server, proxy) = pair().await;
        let mut before = connect(&proxy.url()).await;
        proxy.mute_new();
        let mut stream = raw(&proxy);
        stream.set_read_timeout(Some(SHORT)).unwrap();
        stream.write_all(b"PING\r\n").unwrap();
        let error = loop {
            let error = stream.read(&mut [0; 8]).unwrap_err();
            // As it is when the process was stopped meanwhile.
            if error.kind() != std::io::ErrorKind::Interrupted {
                break error;
            }
        };
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "silence");
        incr(&mut before, "a").await.unwrap();
        proxy.accept();
        assert!(stream.read(&mut [0; 8]).is_err(), "it stays mute");
        incr(&mut connect(&proxy.url()).await, "a").await.unwrap();
        drop(stream);
        eventually("the mute one is gone", async || proxy.connections_open() == 1).await;
    }

    #[tokio::test]
    async fn blocking_one_direction_keeps_what_goes_there_and_nothing_else() {
        let (server, proxy) = pair().await;
        let mut conn = impatient(&proxy.url()).await;

        proxy.block(Direction::ToServer);
        assert!(incr(&mut conn, "a").await.unwrap_err().is_timeout());
        assert!(server.keys().await.is_empty(), "it did not arrive");
        proxy.unblock(Direction::ToServer);
        eventually("it arrives", async || server.keys().await == ["a"]).await;

        proxy.block(Direction::ToClient);
        assert!(incr(&mut conn, "b").await.unwrap_err().is_timeout());
        assert_eq!(server.keys().await, ["a", "b"], "it was executed");
        proxy.unblock(Direction::ToClient);
        let mut next = 2;
        while let Err(late) = incr(&mut conn, "b").await.map(|is| {
            assert_eq!(is, next, "replies still belong to their commands");
        }) {
            assert!(late.is_timeout() && next < 100, "{late}");
            next += 1;
        }
    }

    #[tokio::test]
    async fn a_close_does_not_overtake_what_is_blocked() {
        let (server, proxy) = pair().await;
        let mut conn = impatient(&proxy.url()).await;
        proxy.block(Direction::ToServer);
        assert!(incr(&mut conn, "a").await.is_err());
        drop(conn);
        eventually("the client is gone", async || proxy.connections_open() == 0).await;
        assert_eq!(
            server.client_list().await.len(),
            1,
            "the server does not know yet"
        );
        proxy.unblock(Direction::ToServer);
        eventually("both arrive", async || {
            server.keys().await == ["a"] && server.client_list().await.is_empty()
        })
        .await;
    }

    #[tokio::test]
    async fn bytes_can_come_one_by_one() {
        let (_server, proxy) = pair().await;
        let mut conn = connect(&proxy.url()).await;
        proxy.trickle(Direction::Both, Some(Duration::from_millis(2)));
        let begin = Instant::now();
        assert_eq!(incr(&mut conn, "a").await.unwrap(), 1);
        // 24 bytes there, 4 back
        assert!(
            begin.elapsed() >= Duration::from_millis(40),
            "{:?}",
            begin.elapsed()
        );
        proxy.trickle(Direction::Both, None);
        assert_eq!(incr(&mut conn, "a").await.unwrap(), 2);
    }

    #[tokio::test]
    async fn a_swallowed_reply_hangs_its_connection_and_shifts_no_other_reply() {
        let (server, proxy) = pair().await;
        // The first is sent by another one, which is not in a hurry.
        let (mut conn, mut first) = (impatient(&proxy.url()).await, connect(&proxy.url()).await);
        let fault = proxy.swallow(2, Swallow::Hang, is_incr);
        assert_eq!(incr(&mut first, "a").await.unwrap(), 1);
        drop(first);
        assert!(!fault.fired());
        assert!(incr(&mut conn, "a").await.unwrap_err().is_timeout());
        assert_eq!(fault.caught().await.command, Command::new(["INCR", "a"]));
        assert_eq!(&fault.swallowed().await[..], b":2\r\n");
        assert!(
            incr(&mut conn, "a").await.unwrap_err().is_timeout(),
            "nothing more comes back"
        );
        assert_eq!(server.query::<i64>(&["GET", "a"]).await, 3, "but all is executed");
        let mut other = connect(&proxy.url()).await;
        assert_eq!(incr(&mut other, "a").await.unwrap(), 4, "other connections go on");
        drop(conn);
        eventually("the hung connection ends with its client", async || {
            server.client_list().await.len() == 1
        })
        .await;
    }

    #[tokio::test]
    async fn a_reply_swallowed_by_a_cut_comes_after_those_before_it() {
        let (server, proxy) = pair().await;
        let fault = proxy.swallow(3, Swallow::Cut, is_incr);
        let mut stream = raw(&proxy);
        stream.write_all(&b"INCR a\r\n".repeat(5)).unwrap();
        expect(&mut stream, b":1\r\n:2\r\n");
        assert!(
            !matches!(stream.read(&mut [0; 8]), Ok(1..)),
            "nothing comes after the cut"
        );
        assert_eq!(&fault.swallowed().await[..], b":3\r\n");
        assert!(server.query::<i64>(&["GET", "a"]).await >= 3);
    }

    #[tokio::test]
    async fn every_moment_of_a_run_can_be_visited_in_turn() {
        let (server, proxy) = pair().await;
        let mut visited = 0;
        for k in 1.. {
            server.flush().await;
            let fault = proxy.swallow(k, Swallow::Cut, is_incr);
            let mut conn = connect(&proxy.url()).await;
            let mut done = 0;
            while done < 3 && incr(&mut conn, "a").await.is_ok() {
                done += 1;
            }
            if !fault.fired() {
                assert_eq!(done, 3);
                break;
            }
            visited += 1;
            assert_eq!(done, k - 1);
            assert_eq!(
                server.query::<u64>(&["GET", "a"]).await,
                k,
                "executed, but not confirmed"
            );
        }
        assert_eq!(visited, 3);
    }

    #[tokio::test]
    async fn a_lost_command_never_arrives_and_cuts_its_connection() {
        let (server, proxy) = pair().await;
        let fault = proxy.lose(2, is_incr);
        let mut stream = raw(&proxy);
        stream.write_all(&b"INCR a\r\n".repeat(4)).unwrap();
        fault.caught().await;
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.is_empty() || rest == b":1\r\n");
        eventually("the first arrived", async || {
            server.query::<Option<i64>>(&["GET", "a"]).await.is_some()
        })
        .await;
        assert_eq!(server.query::<i64>(&["GET", "a"]).await, 1);
    }

    #[tokio::test]
    async fn a_held_command_waits_with_all_that_follows_on_its_connection() {
        let (server, proxy) = pair().await;
        let held = proxy.hold(2, is_incr);
        let mut stream = raw(&proxy);
        stream.write_all(b"INCR a\r\nINCR a\r\nSET b 1\r\n").unwrap();
        expect(&mut stream, b":1\r\n");
        assert_eq!(held.caught().await.command, Command::new(["INCR", "a"]));
        let mut other = connect(&proxy.url()).await;
        assert_eq!(
            incr(&mut other, "a").await.unwrap(),
            2,
            "another connection overtakes it"
        );
        assert_eq!(server.keys().await, ["a"], "SET waits behind it");
        held.release();
        expect(&mut stream, b":3\r\n+OK\r\n");
        assert_eq!(&held.answered().await[..], b":3\r\n");
    }

    #[tokio::test]
    async fn a_held_command_still_arrives_when_its_client_has_gone() {
        let (server, proxy) = pair().await;
        for cut in [false, true] {
            server.flush().await;
            let held = proxy.hold(1, is_incr);
            let mut stream = raw(&proxy);
            stream.write_all(b"INCR a\r\nSET b 1\r\n").unwrap();
            held.caught().await;
            eventually("SET came in", async || {
                proxy.commands().last().unwrap().command.is("SET")
            })
            .await;
            if cut {
                assert_eq!(proxy.cut(), 1);
            }
            drop(stream);
            eventually("the client is gone", async || proxy.connections_open() == 0).await;
            assert!(server.keys().await.is_empty());
            assert_eq!(
                server.client_list().await.len(),
                1,
                "the same connection, as the server sees it"
            );
            held.release();
            assert_eq!(&held.answered().await[..], b":1\r\n");
            eventually("what stood behind it arrives too", async || {
                server.keys().await == ["a", "b"]
            })
            .await;
            eventually("then the close arrives", async || {
                server.client_list().await.is_empty()
            })
            .await;
        }
    }

    #[tokio::test]
    async fn a_discarded_command_takes_its_connection_with_it() {
        let (server, proxy) = pair().await;
        let held = proxy.hold(1, is_incr);
        let mut stream = raw(&proxy);
        stream.write_all(b"INCR a\r\nSET b 1\r\n").unwrap();
        held.caught().await;
        drop(held);
        assert!(!matches!(stream.read(&mut [0; 8]), Ok(1..)));
        eventually("the server's side is closed", async || {
            server.client_list().await.is_empty()
        })
        .await;
        assert!(server.keys().await.is_empty());

        let unused = proxy.hold(1, is_incr);
        drop(unused);
        assert_eq!(
            incr(&mut connect(&proxy.url()).await, "a").await.unwrap(),
            1,
            "disarmed when dropped"
        );
    }

    #[tokio::test]
    async fn a_command_can_be_held_and_its_reply_swallowed() {
        let (server, proxy) = pair().await;
        let held = proxy.hold(1, is_incr);
        let fault = proxy.swallow(1, Swallow::Cut, is_incr);
        let mut stream = raw(&proxy);
        stream.write_all(b"INCR a\r\n").unwrap();
        held.caught().await;
        assert!(server.keys().await.is_empty());
        held.release();
        fault.swallowed().await;
        expect_closed(&mut stream);
        assert_eq!(server.keys().await, ["a"]);
    }

    #[tokio::test]
    async fn messages_can_be_lost_while_subscriptions_are_confirmed() {
        let (server, proxy) = pair().await;
        let client = redis::Client::open(proxy.url()).unwrap();
        let (mut sink, mut messages) = client.get_async_pubsub().await.unwrap().split();
        sink.subscribe(&["a", "b"]).await.unwrap();
        assert!(proxy.connections()[0].subscriber);
        proxy.lose_messages(true);
        server.command(&["PUBLISH", "a", "lost"]).await;
        sink.unsubscribe("b").await.unwrap();
        sink.psubscribe("c*").await.unwrap();
        proxy.lose_messages(false);
        server.command(&["PUBLISH", "a", "kept"]).await;
        server.command(&["PUBLISH", "cc", "kept too"]).await;
        let first: String = messages.next().await.unwrap().get_payload().unwrap();
        let second: String = messages.next().await.unwrap().get_payload().unwrap();
        assert_eq!((first.as_str(), second.as_str()), ("kept", "kept too"));
    }

    #[tokio::test]
    async fn replies_are_told_from_messages_on_shared_connections() {
        let (server, proxy) = pair().await;
        for (hello, message) in [
            ("", &b"*3\r\n$7\r\nmessage\r\n$1\r\na\r\n$1\r\nx\r\n"[..]),
            ("HELLO 3\r\n", b">3\r\n$7\r\nmessage\r\n$1\r\na\r\n$1\r\nx\r\n"),
        ] {
            let fault = proxy.swallow(1, Swallow::Cut, |command| command.is("PING"));
            let mut stream = raw(&proxy);
            stream.write_all(hello.as_bytes()).unwrap();
            stream.write_all(b"SUBSCRIBE a b\r\nUNSUBSCRIBE b\r\n").unwrap();
            eventually("the subscription", async || {
                server.pubsub_channels().await == ["a"]
            })
            .await;
            server.command(&["PUBLISH", "a", "x"]).await;
            let mut got = Vec::new();
            while !got.ends_with(message) {
                let mut byte = [0];
                stream.read_exact(&mut byte).expect("the message arrives");
                got.push(byte[0]);
            }
            stream.write_all(b"PING\r\n").unwrap();
            let reply = fault.swallowed().await;
            assert!(
                reply.windows(4).any(|part| part.eq_ignore_ascii_case(b"pong")),
                "{reply:?}"
            );
            expect_closed(&mut stream);
            eventually("the subscription is gone", async || {
                server.pubsub_channels().await.is_empty()
            })
            .await;
        }
        assert!(proxy.malformed().is_empty());
    }

    #[tokio::test]
    async fn a_stream_that_is_not_the_protocol_is_cut_and_reported() {
        let (_server, proxy) = pair().await;
        let mut stream = raw(&proxy);
        stream.write_all(b"*1\r\n+x\r\n").unwrap();
        assert!(!matches!(stream.read(&mut [0; 8]), Ok(1..)));
        assert_eq!(proxy.malformed().len(), 1);
    }

    #[tokio::test]
    async fn connections_end_with_the_server_and_with_the_proxy() {
        let (server, proxy) = pair().await;
        let mut stream = raw(&proxy);
        stream.write_all(b"PING\r\n").unwrap();
        expect(&mut stream, b"+PONG\r\n");
        server.kill();
        expect_closed(&mut stream);
        expect_closed(&mut raw(&proxy));
        server.restart().await;
        let mut stream = raw(&proxy);
        stream.write_all(b"PING\r\n").unwrap();
        expect(&mut stream, b"+PONG\r\n");
        let addr = proxy.addr();
        drop(proxy);
        expect_closed(&mut stream);
        assert!(TcpStream::connect(addr).is_err());
    }

    #[tokio::test]
    async fn new_connections_can_be_sent_to_another_server() {
        let (first, proxy) = pair().await;
        let second = server().await;
        incr(&mut connect(&proxy.url()).await, "a").await.unwrap();
        proxy.retarget(second.addr());
        incr(&mut connect(&proxy.url()).await, "b").await.unwrap();
        assert_eq!(
            (first.keys().await, second.keys().await),
            (vec!["a".into()], vec!["b".into()])
        );
    }

    #[tokio::test]
    async fn healing_ends_every_fault() {
        let (_server, proxy) = pair().await;
        let mut conn = connect(&proxy.url()).await;
        proxy.block(Direction::Both);
        proxy.block_connection(1, Direction::Both);
        proxy.delay(Direction::Both, Duration::from_secs(60), Duration::ZERO);
        let fault = proxy.lose(1, is_incr);
        proxy.refuse();
        proxy.heal();
        incr(&mut conn, "a").await.unwrap();
        incr(&mut connect(&proxy.url()).await, "a").await.unwrap();
        assert!(!fault.fired());
    }
}
