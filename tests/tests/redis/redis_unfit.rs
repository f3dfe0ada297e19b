//! Servers that cannot be used, or not in this way: the error says why, at once, in the words of the server where it has
//! any.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Instant;

use dlock::{Error, LockClient, LockKind};
use dlock_tests::faults::{PATIENCE, SOON, hasty_builder, patient};
use dlock_tests::{Command, Flavor, Proxy, Server, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// All kinds of locks, which have different keys.
const KINDS: [LockKind; 5] = [
    LockKind::Mutex,
    LockKind::Fair,
    LockKind::Fenced,
    LockKind::Read,
    LockKind::Write,
];

async fn refusal(url: &str) -> Error {
    let started = Instant::now();
    let refused = LockClient::connect(url).await.map(drop);
    let error = refused.expect_err("the server is of no use");
    assert!(started.elapsed() < PATIENCE, "it took {:?}", started.elapsed());
    error
}

/// A replica that takes writes would grant locks beside its master.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replica_that_takes_writes_is_refused() {
    let master = Server::start(Flavor::from_env()).await;
    let replica = Server::builder(Flavor::from_env())
        .config("replica-read-only", "no")
        .replica_of(master.addr())
        .start()
        .await;
    let error = refusal(&replica.url()).await;
    assert!(
        error.to_string().contains("a replica that takes writes"),
        "{error}"
    );
    // It may become the master.
    replica.command(&["REPLICAOF", "NO", "ONE"]).await;
    let client = patient(&replica.url()).await;
    client.lock("k").acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_with_too_many_clients_is_told_by_its_own_words() {
    let server = Server::start(Flavor::from_env()).await;
    // The one of the test.
    server.command(&["CONFIG", "SET", "maxclients", "1"]).await;
    for _ in 0..20 {
        let error = refusal(&server.url()).await;
        assert!(
            error.to_string().contains("max number of clients reached"),
            "{error}"
        );
        assert!(!error.to_string().contains("rediss"), "{error}");
        assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
    }
}

/// Another address of this machine than that of itself, if it has any.
fn outer_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    // Sends nothing.
    socket.connect("192.0.2.1:9").ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_in_protected_mode_is_told_by_its_own_words() {
    let (flavor, Some(address)) = (Flavor::from_env(), outer_address()) else {
        eprintln!("this machine has no address but that of itself: not tested");
        return;
    };
    if flavor == Flavor::Redis62 {
        // It is never in protected mode where its configuration has an address.
        return;
    }
    let server = Server::builder(flavor).config("bind", "0.0.0.0");
    let server = server.config("protected-mode", "yes").start().await;
    let error = refusal(&format!("redis://{address}:{}", server.port())).await;
    let text = error.to_string();
    assert!(
        text.contains("in protected mode") && !text.contains("rediss"),
        "{text}"
    );
}

/// What stands before a server and answers these commands by itself.
async fn in_front_of(
    server: SocketAddr,
    commands: &'static [&'static str],
    answer: &'static str,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (client, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = TcpStream::connect(server).await.unwrap().into_split();
                let (mut asked, mut answered) = (vec![0; 64 * 1024], vec![0; 64 * 1024]);
                loop {
                    tokio::select! {
                        Ok(count @ 1..) = from_client.read(&mut asked) => {
                            let text = String::from_utf8_lossy(&asked[..count]).into_owned();
                            let sent = match commands.iter().any(|name| text.contains(&format!("\r\n{name}\r\n"))) {
                                true => to_client.write_all(answer.as_bytes()).await,
                                false => to_server.write_all(&asked[..count]).await,
                            };
                            sent.unwrap();
                        }
                        Ok(count @ 1..) = from_server.read(&mut answered) => {
                            to_client.write_all(&answered[..count]).await.unwrap();
                        }
                        else => return,
                    }
                }
            });
        }
    });
    address
}

/// Several shards behind one address, as Redis Enterprise has them: the server says that it is no Cluster, and refuses
/// keys of different slots.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_on_several_shards_behind_one_address_need_a_prefix_with_a_tag() {
    let server = Server::start(Flavor::from_env()).await;
    let cross_slot = "-CROSSSLOT Keys in request don't hash to the same slot\r\n";
    let address = in_front_of(server.addr(), &["EVALSHA", "EVAL"], cross_slot).await;
    let client = patient(&format!("redis://{address}")).await;
    let error = client
        .lock("k")
        .kind(LockKind::Fair)
        .try_acquire()
        .await
        .unwrap_err();
    assert!(matches!(error, Error::InvalidUrl { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("?prefix={shop}:"), "{text}");
    assert!(!text.contains("use redis+cluster://"), "{text}");
}

/// With such a prefix all keys of all kinds are in one slot. A node of a Cluster that has all slots refuses everything
/// else, and its user may not ask what it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefix_with_a_tag_has_all_keys_in_one_slot() {
    let node = Server::builder(Flavor::from_env()).config("cluster-enabled", "yes");
    let node = node.acl("svc on >pw ~* &* +@all -info").start().await;
    let slots: Vec<_> = (0..16384).map(|slot| slot.to_string()).collect();
    let words = ["CLUSTER", "ADDSLOTS"].into_iter();
    let words: Vec<_> = words.chain(slots.iter().map(String::as_str)).collect();
    node.command(&words).await;
    eventually("the node serves", || async {
        let info: String = node.query(&["CLUSTER", "INFO"]).await;
        info.contains("cluster_state:ok")
    })
    .await;
    let client = patient(&format!("{}?prefix={{shop}}:", node.url_as("svc", "pw"))).await;
    // Twice: the second time, the last token is known.
    for _ in 0..2 {
        for kind in KINDS {
            let lock = client.lock(format!("k:{kind}")).kind(kind);
            let guard = lock
                .acquire()
                .await
                .unwrap_or_else(|error| panic!("{kind}: {error}"));
            let waiting = tokio::spawn(lock.clone().local_handoffs(0).wait(PATIENCE).acquire());
            tokio::task::yield_now().await;
            guard
                .release()
                .await
                .unwrap_or_else(|error| panic!("{kind}: {error}"));
            drop(
                waiting
                    .await
                    .unwrap()
                    .unwrap_or_else(|error| panic!("{kind}: {error}")),
            );
        }
    }
    let semaphore = client.semaphore("s").permits(4);
    let permits = semaphore.acquire_many(2).await.unwrap();
    let set = client.multi(["a", "b"]).acquire().await.unwrap();
    let _read = client.lock("rw").kind(LockKind::Read).acquire().await.unwrap();
    let keys = node.keys().await;
    assert!(keys.len() > 6, "{keys:?}");
    let mut found = Vec::new();
    for key in &keys {
        found.push(node.query::<u16>(&["CLUSTER", "KEYSLOT", key]).await);
    }
    assert!(found.iter().all(|slot| *slot == found[0]), "{keys:?} {found:?}");
    drop((permits, set));
}

/// Servers and proxies without a command say so, which is known to have done nothing and to be so again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_without_scripts_refuses_at_once() {
    let server = Server::builder(Flavor::from_env()).config("rename-command", "EVALSHA \"\"");
    let server = server.start().await;
    let proxy = Proxy::start(server.addr());
    let client = hasty_builder(&proxy.url()).build().await.unwrap();
    for kind in KINDS {
        proxy.forget();
        let started = Instant::now();
        let error = client
            .lock("k")
            .kind(kind)
            .wait(PATIENCE)
            .acquire()
            .await
            .unwrap_err();
        assert!(
            started.elapsed() < SOON,
            "{kind}: it took {:?}",
            started.elapsed()
        );
        assert!(matches!(error, Error::Refused { .. }), "{kind}: {error:?}");
        assert!(error.to_string().contains("unknown command"), "{kind}: {error}");
        let asked = proxy.count(Command::is_script);
        assert!(asked <= 3, "{kind}: {asked} requests");
    }
}
