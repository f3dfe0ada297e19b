//! How a client gets to its server: the spellings of URLs, databases, sockets, the names of connections and
//! how they send, and no password anywhere.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Once};
use std::time::{Duration, Instant};

use dlock::LockClient;
use dlock_tests::faults::{SOON, ordinary, within};
use dlock_tests::{Flavor, Server, eventually, settle};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// Everything that this process logged, at every level.
static LOG: LazyLock<Arc<Mutex<Vec<u8>>>> = LazyLock::new(Arc::default);

struct ToLog;

impl Write for ToLog {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LOG.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn log_everything() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let everything = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_ansi(false)
            .with_writer(|| ToLog)
            .finish();
        tracing::subscriber::set_global_default(everything).unwrap();
    });
}

fn logged() -> String {
    String::from_utf8_lossy(&LOG.lock()).into_owned()
}

async fn server() -> Server {
    log_everything();
    Server::start(Flavor::from_env()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_connections_are_named_after_the_service() {
    let server = server().await;
    let holder = ordinary(&server.url()).await;
    let guard = holder.lock("k").acquire().await.unwrap();
    let before = server.client_list().await.len();
    let client = LockClient::builder()
        .url(server.url())
        .service_name("web shop")
        .build()
        .await
        .unwrap();
    let lock = client.lock("k");
    let waiter = tokio::spawn(async move { lock.acquire().await });
    eventually("the waiter is subscribed", || async {
        !server.pubsub_channels().await.is_empty()
    })
    .await;
    let list = server.client_list().await;
    assert_eq!(list.len(), before + 2, "{list:#?}");
    let ours: Vec<_> = list
        .iter()
        .filter(|c| c["name"].starts_with("dlock:web-shop:"))
        .collect();
    assert_eq!(ours.len(), 2, "{list:#?}");
    assert_eq!(ours[0]["name"], ours[1]["name"]);
    assert_eq!(ours.iter().filter(|c| c["sub"] == "1").count(), 1, "{ours:#?}");
    guard.release().await.unwrap();
    let guard = waiter.await.unwrap().unwrap();
    // So that a holder can be traced to its process and host.
    let holder = client.inspect("k").await.unwrap().unwrap();
    let uuid = holder.id.split(':').next().unwrap();
    assert_eq!(ours[0]["name"], format!("dlock:web-shop:{uuid}"));
    guard.release().await.unwrap();
}

/// Holds and waits through one client, so that both of its connections are used.
async fn lock_and_wait(url: &str) -> LockClient {
    let client = ordinary(url).await;
    let builder = LockClient::builder()
        .url(url)
        .lease(90 * SECOND)
        .timeout(60 * SECOND);
    let other = builder.build().await.unwrap();
    let guard = other.lock("k").acquire().await.unwrap();
    let lock = client.lock("k").wait(60 * SECOND);
    let waiter = tokio::spawn(async move { lock.acquire().await });
    eventually("it waits", || async { client.waited_for() == 1 }).await;
    settle().await;
    guard.release().await.unwrap();
    let next = within(SOON, "the wake-up by the message", waiter).await;
    next.unwrap().unwrap().release().await.unwrap();
    client
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_database_of_the_url_is_used() {
    let server = server().await;
    let client = lock_and_wait(&format!("{}/3", server.url())).await;
    let guard = client.lock("k").acquire().await.unwrap();
    assert!(server.keys().await.is_empty());
    let mut conn = server.conn().await;
    let () = redis::cmd("SELECT").arg(3).query_async(&mut conn).await.unwrap();
    let keys: BTreeSet<String> = redis::cmd("KEYS").arg("*").query_async(&mut conn).await.unwrap();
    assert_eq!(keys, ["dlock:fence", "k"].map(str::to_owned).into());
    // The same name in another database is another lock.
    let elsewhere = ordinary(&server.url()).await;
    elsewhere
        .lock("k")
        .try_acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn urls_say_the_same_in_several_spellings() {
    log_everything();
    let server = Server::builder(Flavor::from_env())
        .unix_socket(true)
        .start()
        .await;
    let (addr, socket) = (server.addr(), server.socket());
    for url in [
        format!("valkey://{addr}"),
        format!("REDIS://localhost:{}/", addr.port()),
        format!("redis+unix://{}", socket.display()),
        format!("valkey+unix://{}?db=2&lease=5s", socket.display()),
        format!(
            "redis+unix://{}",
            socket.display().to_string().replace("socket", "%73ocket")
        ),
    ] {
        let client = lock_and_wait(&url).await;
        client.shutdown(SECOND).await;
    }
}

const PASSWORD: &str = "hunter2@:/?#%+&=é";
const ENCODED: &str = "hunter2%40%3A%2F%3F%23%25%2B%26%3D%C3%A9";

fn assert_tells_no_password(what: &str, text: &str) {
    for secret in ["hunter2", ENCODED] {
        assert!(!text.contains(secret), "{what} tells the password: {text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passwords_are_decoded_and_never_shown() {
    log_everything();
    let server = Server::builder(Flavor::from_env())
        .password(PASSWORD)
        .acl(&format!("svc on >{PASSWORD} ~* &* +@all"))
        .unix_socket(true)
        .start()
        .await;
    let (addr, socket) = (server.addr(), server.socket());
    for url in [
        format!("redis://:{ENCODED}@{addr}"),
        format!("valkey://default:{ENCODED}@{addr}/1"),
        format!("redis://svc:{ENCODED}@{addr}"),
        format!("redis+unix://{}?password={ENCODED}", socket.display()),
        format!("redis+unix://{}?user=svc&password={ENCODED}", socket.display()),
    ] {
        let builder = LockClient::builder().url(&url);
        assert_tells_no_password("the builder", &format!("{builder:?}"));
        let client = lock_and_wait(&url).await;
        assert_tells_no_password("the client", &format!("{client:?} {client:#?}"));
        let lock = client.lock("k");
        let guard = lock.acquire().await.unwrap();
        let error = client.lock("k").try_acquire().await.unwrap_err();
        assert_tells_no_password("what it makes", &format!("{lock:?} {:?} {error:?}", guard.held()));
        guard.release().await.unwrap();
    }
    for url in [
        format!("redis://:wrong-{ENCODED}@{addr}"),
        format!("redis://nobody:{ENCODED}@{addr}"),
        format!("redis://{addr}?name={ENCODED}"),
        format!("redis://:{ENCODED}@127.0.0.1:1"),
        format!("redis://:{ENCODED}@{addr}/x"),
        format!("redis://:{ENCODED}@{addr}?lease=x"),
        format!("redis://:{ENCODED}@{addr}?pasword={ENCODED}"),
        format!("redis://:{PASSWORD}@{addr}"),
        format!("rediss://:{ENCODED}@{addr}"),
        format!("redis+cluster://:{ENCODED}@{addr}"),
        format!("redis+unix://:{ENCODED}@/nowhere/socket"),
        format!("redis+unix:///nowhere/socket?password={ENCODED}"),
    ] {
        let error = LockClient::connect(&url).await.unwrap_err();
        assert_tells_no_password("an error", &format!("{error} {error:?} {error:#?}"));
        let mut cause = std::error::Error::source(&error);
        while let Some(inner) = cause {
            assert_tells_no_password("a cause", &format!("{inner} {inner:?}"));
            cause = inner.source();
        }
    }
    // A lost connection that cannot be opened again, and one that can: that is logged too.
    let client = LockClient::builder()
        .url(format!("redis://:{ENCODED}@{addr}"))
        .retry_for(300 * MS)
        .build()
        .await
        .unwrap();
    let guard = client.lock("k").acquire().await.unwrap();
    server.kill();
    assert!(client.lock("j").acquire().await.unwrap_err().is_unavailable());
    server.restart().await;
    eventually("it is back", || async { client.inspect("j").await.is_ok() }).await;
    client
        .lock("j")
        .wait(60 * SECOND)
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    drop(guard);
    server.command(&["CONFIG", "SET", "requirepass", "another"]).await;
    server
        .command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"])
        .await;
    let error = client.lock("j").acquire().await.unwrap_err();
    assert_tells_no_password("an error", &format!("{error} {error:?}"));
    let logged = logged();
    assert!(
        logged.contains("the connection to the lock store is lost"),
        "the log is empty: {logged}"
    );
    assert_tells_no_password("the log", &logged);
}

/// Hands bytes through, keeps replies back while told to, and notes when each piece of a request came.
struct Relay {
    addr: SocketAddr,
    hold: Arc<AtomicBool>,
    arrivals: Arc<Mutex<Vec<Instant>>>,
}

impl Relay {
    async fn start(server: SocketAddr) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (hold, arrivals) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let relay = Relay {
            addr,
            hold: hold.clone(),
            arrivals: arrivals.clone(),
        };
        tokio::spawn(async move {
            let (client, _) = listener.accept().await.unwrap();
            let server = TcpStream::connect(server).await.unwrap();
            server.set_nodelay(true).unwrap();
            let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
                (client.into_split(), server.into_split());
            let requests = async {
                let mut buffer = [0; 65536];
                while let Ok(n @ 1..) = from_client.read(&mut buffer).await {
                    arrivals.lock().push(Instant::now());
                    to_server.write_all(&buffer[..n]).await.unwrap();
                }
            };
            let replies = async {
                let mut buffer = [0; 65536];
                while let Ok(n @ 1..) = from_server.read(&mut buffer).await {
                    while hold.load(Ordering::SeqCst) {
                        tokio::time::sleep(MS).await;
                    }
                    let _ = to_client.write_all(&buffer[..n]).await;
                }
            };
            tokio::join!(requests, replies);
        });
        relay
    }

    /// The time between the arrivals of two requests of which the second is sent 2 ms after the first,
    /// before that is answered. Small pieces sent without TCP_NODELAY wait for the peer's delayed
    /// acknowledgement, 40 ms; the least of several tries.
    async fn gap<F: Future>(&self, request: impl Fn() -> F) -> Duration {
        let mut least = Duration::MAX;
        for _ in 0..8 {
            for _ in 0..3 {
                request().await;
            }
            self.hold.store(true, Ordering::SeqCst);
            self.arrivals.lock().clear();
            let second = async {
                tokio::time::sleep(2 * MS).await;
                request().await
            };
            let let_go = async {
                tokio::time::sleep(150 * MS).await;
                self.hold.store(false, Ordering::SeqCst);
            };
            tokio::join!(request(), second, let_go);
            let arrivals = self.arrivals.lock().clone();
            // On a busy machine both may have been read at once, which says nothing.
            if let [first, second, ..] = arrivals[..] {
                least = least.min(second - first);
            }
        }
        least
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_requests_do_not_wait_for_acknowledgements() {
    let server = server().await;
    let relay = Relay::start(server.addr()).await;
    let client = ordinary(&format!("redis://{}", relay.addr)).await;
    let ours = relay.gap(|| client.inspect("k")).await;

    // A connection that lacks the option, to see that it is seen.
    let relay = Relay::start(server.addr()).await;
    let stream = TcpStream::connect(relay.addr).await.unwrap();
    stream.set_nodelay(false).unwrap();
    let (read, write) = stream.into_split();
    let (read, write) = (tokio::sync::Mutex::new(read), tokio::sync::Mutex::new(write));
    let without = relay
        .gap(|| async {
            write.lock().await.write_all(b"PING\r\n").await.unwrap();
            read.lock().await.read_exact(&mut [0; 7]).await.unwrap();
        })
        .await;
    println!("between two requests 2 ms apart: {ours:?}, without TCP_NODELAY {without:?}");
    assert!(ours < 20 * MS, "{ours:?}");
}
