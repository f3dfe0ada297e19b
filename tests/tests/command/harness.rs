//! The harness itself: servers that come, go and freeze as told, and a proxy whose faults do what they say.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Stdio;
use std::time::Duration;

use dlock_tests::{Command, Direction, Flavor, Proxy, Server, Swallow, child, eventually};
use futures_util::StreamExt;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, RedisResult};

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
    async fn a_configuration_that_the_server_refuses_is_an_error_with_its_words() {
        let error = Server::builder(Flavor::from_env())
            .config("no-such-setting", "1")
            .try_start()
            .await
            .expect_err("the setting does not exist");
        assert!(format!("{error:#}").contains("no-such-setting"), "{error:#}");
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
}
