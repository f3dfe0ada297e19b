//! What the suites on etcd have in common: a namespace, a network, and a store that is never late.

use std::sync::Arc;
use std::time::Duration;

use dlock::LockClient;
use dlock::store::{
    AcquireReply, AcquireRequest, GrantId, Granted, Kind, ReleaseRequest, RenewRequest, StoreError,
};
use dlock_etcd::{EtcdLocks, EtcdLocksBuilder};
use dlock_tests::etcd::{Call, Etcd, EtcdProxy, builder_at, fresh_namespace};
use dlock_tests::faults::{PATIENCE, answered};

pub(super) const MS: Duration = Duration::from_millis(1);
pub(super) const SEC: Duration = Duration::from_secs(1);
/// No test waits for its end.
pub(super) const LEASE: Duration = Duration::from_secs(300);
/// What one step of a hasty store may take.
pub(super) const TIMEOUT: Duration = Duration::from_millis(600);

pub(super) fn acquires(call: &Call) -> bool {
    call.is("Txn") && call.has("held ")
}

pub(super) fn ask(key: &str, number: u64, lease: Duration) -> AcquireRequest {
    let grant = GrantId::from_parts(0x0192_f3a4_0000_7000_8000_0000_0000_0001, number);
    AcquireRequest::new(Kind::Mutex, key.into(), grant, lease)
}

pub(super) fn release(key: &str, number: u64) -> ReleaseRequest {
    let grant = ask(key, number, LEASE).grant;
    ReleaseRequest::new(Kind::Mutex, key.into(), grant)
}

pub(super) fn renewal(key: &str, number: u64, lease: Duration) -> RenewRequest {
    let grant = ask(key, number, lease).grant;
    RenewRequest::new(Kind::Mutex, key.into(), grant, lease)
}

pub(super) fn granted(reply: Result<AcquireReply, StoreError>) -> Granted {
    match reply {
        Ok(AcquireReply::Acquired(granted)) => granted,
        other => panic!("it is not granted: {other:?}"),
    }
}

/// How many keys of semaphores begin with this letter.
pub(super) async fn keys_of_permits(server: &Etcd, namespace: &str, letter: char) -> usize {
    let keys = server.keys(&format!("{namespace}q/")).await;
    let is = |(key, _): &&(String, String)| {
        key.split_once('\0')
            .is_some_and(|(_, key)| key.starts_with(letter))
    };
    keys.iter().filter(is).count()
}

pub(super) async fn connected(builder: EtcdLocksBuilder) -> Arc<EtcdLocks> {
    Arc::new(builder.connect().await.expect("the server is there"))
}

/// As [`connected`], for a store that waits for a short time only.
pub(super) async fn connected_in_time(builder: impl Fn() -> EtcdLocksBuilder) -> Arc<EtcdLocks> {
    Arc::new(
        answered(|| builder().connect())
            .await
            .expect("the server is there"),
    )
}

pub(super) async fn client(store: &Arc<EtcdLocks>) -> LockClient {
    let built = LockClient::builder().store((**store).clone()).retry_for(PATIENCE);
    built.build().await.expect("the server is there")
}

/// A namespace, a hasty store behind a network, and a patient one beside it.
pub(super) struct Setting {
    pub(super) server: Arc<Etcd>,
    pub(super) namespace: String,
    pub(super) proxy: EtcdProxy,
    pub(super) hasty: Arc<EtcdLocks>,
    pub(super) patient: Arc<EtcdLocks>,
}

pub(super) async fn setting() -> Setting {
    setting_on(Etcd::shared().await).await
}

pub(super) async fn setting_on(server: Arc<Etcd>) -> Setting {
    let namespace = fresh_namespace();
    let patient = connected(server.builder(&namespace).timeout(PATIENCE)).await;
    let proxy = EtcdProxy::start(server.addr());
    let hasty = answered(|| builder_at(proxy.addr(), &namespace).timeout(TIMEOUT).connect()).await;
    Setting {
        hasty: Arc::new(hasty.expect("the server is there")),
        server,
        namespace,
        proxy,
        patient,
    }
}

impl Setting {
    /// The keys of grants.
    pub(super) async fn held(&self) -> Vec<(String, String)> {
        self.server.keys(&format!("{}q/", self.namespace)).await
    }

    /// The leases that have a session.
    pub(super) async fn sessions(&self) -> Vec<i64> {
        let prefix = format!("{}c/", self.namespace);
        let keys = self.server.keys(&prefix).await;
        let id = |(key, _): &(String, String)| i64::from_str_radix(&key[prefix.len()..], 16).expect("an id");
        keys.iter().map(id).collect()
    }

    /// The store of another process that is never late.
    pub(super) async fn patient_beside(&self) -> Arc<EtcdLocks> {
        connected(self.server.builder(&self.namespace).timeout(PATIENCE)).await
    }

    /// Another process behind the same network.
    pub(super) async fn beside(&self) -> LockClient {
        let builder = || builder_at(self.proxy.addr(), &self.namespace).timeout(TIMEOUT);
        let store = answered(|| builder().connect()).await;
        client(&Arc::new(store.expect("the server is there"))).await
    }
}
