//! A service that does nothing under a lock of the account in the path. Arguments: which lock, and the URL of a server.
//!
//! | lock | the request runs |
//! |---|---|
//! | `none` | without a lock |
//! | `dlock` | behind a `LockLayer` |
//! | `rslock` | between `lock` and `unlock` of rslock, and the release is awaited |
//! | `scripts` | between the two scripts of a Redisson-style lock, sent over the connection of the `redis` crate |
//!
//! Each has one client, and the worker threads of the machine. Prints its address.

use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::routing::post;
use dlock::LockClient;
use dlock_tower::{LockLayer, key};
use redis::aio::MultiplexedConnection;
use redis::{RedisResult, Script};
use rslock::LockManager;
use tokio::net::TcpListener;

const TTL: Duration = Duration::from_secs(30);
const HOLDER: &str = "8d2f6c1e-9b5a-4f0e-9a53-4f0f8a6b7c1d:1";

#[tokio::main]
async fn main() {
    let mut args = std::env::args().skip(1);
    let (lock, url) = (args.next().expect("a lock"), args.next().expect("a URL"));
    let route = match lock.as_str() {
        "none" => post(charge),
        "dlock" => {
            let client = LockClient::builder().url(&url).build().await.expect("a server");
            post(charge).layer(LockLayer::new(client, key::path_param("id").prefix("account:")))
        }
        "rslock" => post(with_rslock).with_state(LockManager::new(vec![url.as_str()])),
        "scripts" => post(with_scripts).with_state(Scripts::connect(&url).await),
        other => panic!("{other} is none of none, dlock, rslock and scripts"),
    };
    let app = Router::new().route("/accounts/{id}/charge", route);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    println!(
        "listening on http://{}",
        listener.local_addr().expect("an address")
    );
    axum::serve(listener, app).await.expect("a server");
}

async fn charge(Path(id): Path<String>, _: Bytes) -> String {
    id
}

async fn with_rslock(State(manager): State<LockManager>, path: Path<String>, body: Bytes) -> String {
    let lock = manager
        .lock(format!("account:{}", path.0).as_str(), TTL)
        .await
        .expect("a lock");
    let response = charge(path, body).await;
    manager.unlock(&lock).await;
    response
}

async fn with_scripts(State(mut scripts): State<Scripts>, path: Path<String>, body: Bytes) -> String {
    let key = format!("account:{}", path.0);
    scripts.acquire(&key).await;
    let response = charge(path, body).await;
    scripts.release(&key).await;
    response
}

/// The two scripts of a lock, and nothing else.
#[derive(Clone)]
struct Scripts {
    connection: MultiplexedConnection,
    acquire: Script,
    release: Script,
}

impl Scripts {
    async fn connect(url: &str) -> Scripts {
        let client = redis::Client::open(url).expect("a URL");
        let connection = client.get_multiplexed_async_connection().await;
        Scripts {
            connection: connection.expect("a server"),
            acquire: Script::new(include_str!("acquire.lua")),
            release: Script::new(include_str!("release.lua")),
        }
    }

    async fn acquire(&mut self, key: &str) {
        let mut call = self.acquire.key(key);
        call.arg(TTL.as_millis() as u64).arg(HOLDER);
        let acquired: RedisResult<Option<i64>> = call.invoke_async(&mut self.connection).await;
        assert_eq!(
            acquired.expect("a reply"),
            None,
            "every request has an account of its own"
        );
    }

    async fn release(&mut self, key: &str) {
        let mut call = self.release.key(key);
        call.key(format!("redisson_lock__channel:{{{key}}}")).arg(HOLDER);
        let released: RedisResult<Option<i64>> = call.invoke_async(&mut self.connection).await;
        assert_eq!(released.expect("a reply"), Some(1));
    }
}
