//! The connection of notifications: how often it is made anew, and what is said of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dlock::{Credentials, LockClient};
use dlock_tests::faults::{PATIENCE, SOON, patient, within};
use dlock_tests::{Flavor, Log, Proxy, Server, eventually};

const WATCHED: Duration = Duration::from_secs(8);
const NO_SUBSCRIPTION: &str = "no subscription to releases";

/// A client of a proxy, and how often it asked for its credentials. A waiter of it listens; its other connection stays.
struct Waiting {
    server: Server,
    proxy: Proxy,
    asked: Arc<AtomicUsize>,
    waiter: tokio::task::JoinHandle<Result<dlock::LockGuard, dlock::Error>>,
    holds: dlock::LockGuard,
    _client: LockClient,
}

impl Waiting {
    async fn start() -> Waiting {
        let server = Server::builder(Flavor::from_env()).acl("svc on >pw ~* &* +@all");
        let server = server.start().await;
        let proxy = Proxy::start(server.addr());
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = asked.clone();
        let client = LockClient::builder().url(proxy.url()).credentials(move || {
            counted.fetch_add(1, Ordering::SeqCst);
            async { Ok::<_, std::io::Error>(Credentials::new("svc", "pw")) }
        });
        let client = client.build().await.unwrap();
        let holds = patient(&server.url()).await.lock("k").acquire().await.unwrap();
        let waiter = tokio::spawn(client.lock("k").wait(PATIENCE).acquire());
        eventually("the waiter listens", || async {
            !server.pubsub_channels().await.is_empty()
        })
        .await;
        Waiting {
            server,
            proxy,
            asked,
            waiter,
            holds,
            _client: client,
        }
    }

    fn cut_the_subscription(&self) {
        for connection in self.proxy.connections() {
            if connection.subscriber {
                self.proxy.cut_connection(connection.id);
            }
        }
    }

    /// How often the credentials are asked for in a while.
    async fn attempts(&self) -> usize {
        let before = self.asked.load(Ordering::SeqCst);
        tokio::time::sleep(WATCHED).await;
        self.asked.load(Ordering::SeqCst) - before
    }

    /// A waiter without notifications is served all the same.
    async fn end(self) {
        self.holds.release().await.unwrap();
        drop(within(SOON, "the waiter", self.waiter).await.unwrap().unwrap());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscription_that_cannot_be_connected_is_tried_in_growing_pauses() {
    let waiting = Waiting::start().await;
    waiting.proxy.refuse();
    waiting.cut_the_subscription();
    let attempts = waiting.attempts().await;
    assert!((3..=22).contains(&attempts), "{attempts} attempts in {WATCHED:?}");
    waiting.proxy.accept();
    eventually("the waiter listens again", || async {
        !waiting.server.pubsub_channels().await.is_empty()
    })
    .await;
    waiting.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscription_whose_login_is_refused_is_tried_seldom() {
    let waiting = Waiting::start().await;
    let rule = ["ACL", "SETUSER", "svc", "resetpass", ">other"];
    waiting.server.command(&rule).await;
    waiting.cut_the_subscription();
    let attempts = waiting.attempts().await;
    assert!((1..=7).contains(&attempts), "{attempts} attempts in {WATCHED:?}");
    waiting.end().await;
}

/// Nobody waits when an idle connection of notifications ends: there is nothing to warn of.
#[tokio::test]
async fn idle_subscription_that_is_closed_is_no_trouble() {
    let log = Log::default();
    let _listening = log.listen();
    let server = Server::start(Flavor::from_env()).await;
    let proxy = Proxy::start(server.addr());
    let (client, other) = (patient(&proxy.url()).await, patient(&server.url()).await);
    let cut = || {
        let connections = proxy.connections();
        let open: Vec<_> = connections
            .iter()
            .filter(|connection| connection.subscriber)
            .collect();
        for connection in &open {
            proxy.cut_connection(connection.id);
        }
        !open.is_empty()
    };
    for _ in 0..2 {
        let holds = other.lock("k").acquire().await.unwrap();
        let waiter = tokio::spawn(client.lock("k").wait(PATIENCE).acquire());
        eventually("the waiter listens", || async {
            !server.pubsub_channels().await.is_empty()
        })
        .await;
        holds.release().await.unwrap();
        let guard = within(SOON, "the waiter", waiter).await.unwrap().unwrap();
        guard.release().await.unwrap();
        eventually("nobody listens", || async {
            server.pubsub_channels().await.is_empty()
        })
        .await;
        assert!(cut(), "there is a connection of notifications");
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(log.count(NO_SUBSCRIPTION), 0, "nobody waits");
    }
    let _holds = other.lock("k").acquire().await.unwrap();
    let _waiter = tokio::spawn(client.lock("k").wait(PATIENCE).acquire());
    eventually("the waiter listens", || async {
        !server.pubsub_channels().await.is_empty()
    })
    .await;
    proxy.refuse();
    cut();
    eventually("it is said of a waiter", || async {
        log.count(NO_SUBSCRIPTION) == 1
    })
    .await;
}
