//! What the suites on ZooKeeper have in common: a root, sessions of a length, and a network.

use std::sync::Arc;
use std::time::Duration;

use dlock::LockClient;
use dlock::store::{AcquireRequest, GrantId, Kind, ReleaseRequest};
use dlock_tests::faults::{PATIENCE, answered};
use dlock_tests::zookeeper::{ZkProxy, Zookeeper};
use dlock_zookeeper::ZookeeperLocks;

/// What one step of a hasty store may take.
pub(super) const TIMEOUT: Duration = Duration::from_millis(600);
/// No test waits for its end.
pub(super) const LEASE: Duration = Duration::from_secs(300);

pub(super) fn fresh_root() -> String {
    format!("/faults-{:016x}", fastrand::u64(..))
}

/// A store that is never late, with a session of its own.
pub(super) async fn patient(servers: impl ToString, root: &str, session: Duration) -> ZookeeperLocks {
    store(servers, root, session, PATIENCE).await
}

pub(super) async fn store(
    servers: impl ToString,
    root: &str,
    session: Duration,
    timeout: Duration,
) -> ZookeeperLocks {
    let servers = servers.to_string();
    let builder = || {
        let builder = ZookeeperLocks::builder(&servers).root(root);
        builder.session(session).timeout(timeout)
    };
    answered(|| builder().connect())
        .await
        .expect("the server is there")
}

pub(super) async fn client(store: &ZookeeperLocks) -> LockClient {
    let builder = LockClient::builder().store(store.clone()).retry_for(PATIENCE);
    builder.build().await.expect("a client on the store")
}

/// A server that others use too, a network before it, and a root that is unused.
pub(super) async fn setting() -> (Arc<Zookeeper>, ZkProxy, String) {
    let server = Zookeeper::shared().await;
    let proxy = ZkProxy::start(server.addr());
    (server, proxy, fresh_root())
}

pub(super) fn request(key: &str, number: u64) -> AcquireRequest {
    AcquireRequest::new(Kind::Mutex, key.into(), GrantId::from_parts(7, number), LEASE)
}

pub(super) fn release(key: &str, number: u64) -> ReleaseRequest {
    ReleaseRequest::new(Kind::Mutex, key.into(), GrantId::from_parts(7, number))
}

pub(super) const LONG: Duration = Duration::from_secs(30);
