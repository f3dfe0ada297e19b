//! Semaphores on ZooKeeper where an acquire, a drain or a deletion comes between the steps of another one, and what stays
//! of them.

use std::sync::Arc;

use dlock::store::counter::{CounterReply, CounterRequest, CounterStep, Counters};
use dlock::store::{AcquireReply, AcquireRequest, GrantId, Kind, Outcome, ReleaseRequest, Store};
use dlock::{LockClient, MAX_KEY_BYTES};
use dlock_tests::eventually;
use dlock_tests::faults::{PATIENCE, within};
use dlock_tests::zookeeper::{ZkProxy, ZkRequest, Zookeeper};
use dlock_zookeeper::ZookeeperLocks;
use futures_util::future::join_all;

use crate::losses::Loss;
use crate::scenes::SEC;
use crate::zookeeper_support::{LEASE, LONG, TIMEOUT, client, fresh_root, patient, store};

/// A server, a store behind a network, and one beside it.
struct Setting {
    server: Zookeeper,
    proxy: ZkProxy,
    root: String,
    behind: Arc<ZookeeperLocks>,
    beside: Arc<ZookeeperLocks>,
}

impl Setting {
    async fn new() -> Setting {
        let (server, root) = (Zookeeper::start().await, fresh_root());
        let proxy = ZkProxy::start(server.addr());
        Setting {
            behind: Arc::new(patient(proxy.addr(), &root, LONG).await),
            beside: Arc::new(patient(server.addr(), &root, LONG).await),
            server,
            proxy,
            root,
        }
    }

    async fn client(&self) -> LockClient {
        client(&self.beside).await
    }

    /// Deletes a node, as the server does with an empty container.
    async fn removes(&self, node: &str) {
        let said = self.server.told(&[format!("delete {}/{node}", self.root)]).await;
        assert!(
            !said.contains("Node not empty") && !said.contains("does not exist"),
            "{said}"
        );
    }

    /// The names of the nodes below that of a key.
    async fn nodes(&self, key: &str) -> String {
        self.server.told(&[format!("ls -R {}/{key}", self.root)]).await
    }

    /// Carries a step out, with an interlude after it was decided and before it is carried out.
    async fn with_interlude(&self, step: CounterStep, interlude: impl Future<Output = ()>) -> CounterReply {
        let late = self.proxy.hold(1, ZkRequest::is_multi);
        let counted = tokio::spawn(self.behind.clone().count(counter(step)));
        late.caught().await;
        interlude.await;
        late.release();
        within(PATIENCE, "the step", counted).await.unwrap().unwrap()
    }
}

fn counter(step: CounterStep) -> CounterRequest {
    CounterRequest::new("k".into(), GrantId::from_parts(9, fastrand::u64(..)), step)
}

async fn count(store: &Arc<ZookeeperLocks>, step: CounterStep) -> CounterReply {
    store.clone().count(counter(step)).await.unwrap()
}

async fn takes(store: &Arc<ZookeeperLocks>, number: u64, amount: u32) {
    let mut request = AcquireRequest::new(Kind::Permit, "k".into(), GrantId::from_parts(7, number), LEASE);
    request.amount = amount;
    let reply = store.clone().acquire(request).await.unwrap();
    assert!(matches!(reply, AcquireReply::Acquired(_)), "{reply:?}");
}

async fn gives(store: &Arc<ZookeeperLocks>, number: u64) {
    let request = ReleaseRequest::new(Kind::Permit, "k".into(), GrantId::from_parts(7, number));
    store.clone().release(request).await.unwrap();
}

const fn sets(total: u32) -> CounterStep {
    CounterStep::SetPermits {
        total,
        only_unset: false,
    }
}

/// The servers never remove a container that never had a child, and the key would belong to a semaphore for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_acquire_leaves_no_node_that_stays() {
    let setting = Setting::new().await;
    let busy = setting.client().await.semaphore("k").try_acquire().await;
    assert!(busy.unwrap_err().is_busy());
    let nodes = setting.nodes("k").await;
    assert!(
        nodes.contains("/k/locks") && !nodes.contains("/k/leases"),
        "{nodes}"
    );
}

/// A process may have been killed when it had created a part of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deletion_removes_nodes_that_nobody_has_used() {
    let setting = Setting::new().await;
    let client = setting.client().await;
    let create = ["", "/locks", "/leases"].map(|node| format!("create -c {}/k{node}", setting.root));
    setting.server.told(&create).await;
    let taken = client.lock("k").try_acquire().await.unwrap_err();
    assert!(taken.to_string().contains("a semaphore"), "{taken}");
    assert!(!client.semaphore("k").delete().await.unwrap());
    client
        .lock("k")
        .try_acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

/// The server removes the empty container of the leases, and with it what tells a drain of acquires.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drain_counts_no_permit_of_a_container_that_was_created_anew() {
    let setting = Setting::new().await;
    let Setting { behind, beside, .. } = &setting;
    for held in [0, 1] {
        count(beside, sets(3)).await;
        takes(beside, 1, 1).await;
        if held == 0 {
            gives(beside, 1).await;
        }
        let drained = setting
            .with_interlude(CounterStep::Drain, async {
                gives(beside, 1).await;
                setting.removes("k/leases").await;
                takes(beside, 2, 2).await;
            })
            .await;
        assert_eq!(drained, CounterReply::Number(1), "{held}");
        let left = count(behind, CounterStep::Permits).await;
        let (free, held) = (Some(0), 2);
        assert_eq!(left, CounterReply::Permits { free, held });
        count(beside, CounterStep::DeletePermits).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deletion_ends_permits_that_are_acquired_meanwhile() {
    let setting = Setting::new().await;
    let beside = &setting.beside;
    for held in [0, 1] {
        count(beside, sets(3)).await;
        if held == 1 {
            takes(beside, 1, 1).await;
        }
        let deleted = setting
            .with_interlude(CounterStep::DeletePermits, takes(beside, 2, 1))
            .await;
        assert_eq!(deleted, CounterReply::Done(true));
        assert_eq!(setting.client().await.inspect("k").await.unwrap(), None, "{held}");
    }
}

/// Their paths alone take more than a request may have.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn semaphore_with_a_long_name_and_many_holders_is_deleted() {
    let setting = Setting::new().await;
    let (client, key) = (setting.client().await, "/".repeat(MAX_KEY_BYTES));
    let semaphore = client.semaphore(key.as_str()).permits(700);
    let held = join_all((0..4).map(|_| semaphore.acquire_many(175))).await;
    assert!(held.iter().all(Result::is_ok));
    assert!(semaphore.delete().await.unwrap());
    assert_eq!(client.inspect(key.as_str()).await.unwrap(), None);
}

/// The server removes the empty node of the key between those requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_of_a_key_that_is_removed_while_a_semaphore_is_created_is_created_again() {
    let setting = Setting::new().await;
    let late = setting.proxy.hold(1, |request| {
        request.operation == 19 && request.path.ends_with("/locks")
    });
    let client = client(&setting.behind).await;
    let acquired = tokio::spawn(async move { client.semaphore("k").permits(1).try_acquire().await });
    late.caught().await;
    setting.removes("k").await;
    late.release();
    let permit = within(PATIENCE, "the permit", acquired).await.unwrap().unwrap();
    permit.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn step_without_a_reply_leaves_no_node_longer_than_it_may_be_repeated() {
    let setting = Setting::new().await;
    let hasty = Arc::new(store(setting.proxy.addr(), &setting.root, LONG, TIMEOUT).await);
    for is_repeated in [true, false] {
        let mut request = counter(sets(1 + u32::from(is_repeated)));
        request.repeated_for = 5 * SEC;
        let swallowed = Loss::Reply.of(&setting.proxy, ZkRequest::is_multi);
        let error = hasty.clone().count(request.clone()).await.unwrap_err();
        assert!(
            swallowed.fired() && error.outcome == Outcome::Unknown,
            "{error:?}"
        );
        if is_repeated {
            eventually("it is repeated", async || {
                let counted = hasty.clone().count(request.clone()).await;
                matches!(counted, Ok(CounterReply::Done(true)))
            })
            .await;
        }
        let left = async || setting.server.counted("zk_ephemerals_count").await;
        assert_eq!(left().await, 1);
        eventually("its node is gone", async || left().await == 0).await;
    }
}

/// An attempt to acquire a lock of the same name has a node for a moment, until it is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_attempt_of_another_kind_does_not_disturb_a_semaphore_or_latch() {
    let setting = Setting::new().await;
    let client = setting.client().await;
    client.semaphore("semaphore").set_permits(1).await.unwrap();
    client.latch("latch").try_set_count(2).await.unwrap();
    for key in ["semaphore", "latch"] {
        let late = setting.proxy.hold(1, ZkRequest::deletes);
        let request = AcquireRequest::new(Kind::Mutex, key.into(), GrantId::from_parts(7, 1), LEASE);
        let refused = tokio::spawn(setting.behind.clone().acquire(request));
        late.caught().await;
        match key {
            "latch" => assert_eq!(client.latch(key).count_down().await.unwrap(), 1),
            _ => {
                let permit = client.semaphore(key).try_acquire().await.unwrap();
                assert_eq!(client.semaphore(key).add_permits(1).await.unwrap().total, 2);
                permit.release().await.unwrap();
            }
        }
        late.release();
        let error = refused.await.unwrap().unwrap_err();
        assert!(error.to_string().contains(key), "{error}");
    }
}
