//! What the suites about faults have in common: a client behind a proxy, and operations with a time limit.

use std::fmt::Display;
use std::time::{Duration, Instant};

use dlock::{LockClient, LockClientBuilder};

use crate::{Command, Proxy, Store, eventually};

/// What one step of the clients of [`setting`] may take.
pub const TIMEOUT: Duration = Duration::from_millis(300);
/// How long an acquire or a release of the clients of [`setting`] goes on through failures.
pub const RETRY_FOR: Duration = Duration::from_millis(1500);
/// The lease of the clients of [`setting`]; no test waits for its end.
pub const LEASE: Duration = Duration::from_secs(30);
/// What a busy machine may add to a time limit.
pub const SLACK: Duration = Duration::from_millis(500);

/// A client that is quick to give up.
///
/// # Panics
/// When it cannot connect.
pub async fn hasty(url: &str) -> LockClient {
    hasty_builder(url).build().await.expect("the server is there")
}

/// The same, to be built.
pub fn hasty_builder(url: &str) -> LockClientBuilder {
    let builder = LockClient::builder().url(url).lease(LEASE);
    builder.timeout(TIMEOUT).retry_for(RETRY_FOR)
}

/// A server, a client behind a proxy, and one beside it.
pub async fn setting() -> (Store, Proxy, LockClient, LockClient) {
    let store = Store::server().await;
    let proxy = Proxy::start(store.as_server().addr());
    let (behind, beside) = (hasty(&proxy.url()).await, hasty(&store.as_server().url()).await);
    (store, proxy, behind, beside)
}

/// Matches the calls that carry a step of this name.
pub fn step(name: &'static str) -> impl Fn(&Command) -> bool + Send + 'static {
    move |command| command.is_script() && command.args().iter().any(|arg| &arg[..] == name.as_bytes())
}

/// Runs it and sees that it kept its time.
///
/// # Panics
/// When it did not.
pub async fn within<T>(limit: Duration, what: impl Display, work: impl Future<Output = T>) -> T {
    let started = Instant::now();
    let output = work.await;
    let took = started.elapsed();
    assert!(
        took < limit + SLACK,
        "{what} took {took:?}, at most {limit:?} were stated"
    );
    output
}

/// Takes the lock, asking once, and gives it back.
///
/// # Panics
/// When it is not free.
pub async fn is_free(client: &LockClient, key: &str) {
    let guard = client.lock(key).try_acquire().await;
    let guard = guard.unwrap_or_else(|error| panic!("\"{key}\" should be free: {error}"));
    guard.release().await.expect("the server is there");
}

/// Waits until a client that was kept from its server has it again, on another connection if need be.
pub async fn is_back(client: &LockClient) {
    eventually("the client is back", || async {
        client.inspect("nothing").await.is_ok()
    })
    .await;
}
