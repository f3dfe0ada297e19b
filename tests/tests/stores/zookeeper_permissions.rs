//! The rights in docs/permissions.md are enough, and each of them is needed: without one, the error names it.

use std::sync::Arc;

use dlock::store::{
    AcquireReply, AcquireRequest, GrantId, Kind, Outcome, Reason, ReleaseRequest, RenewRequest, Renewal,
    Store,
};
use dlock::{Error, LockClient, LockKind};
use dlock_tests::eventually;
use dlock_tests::faults::{LEASE, PATIENCE};
use dlock_tests::permissions::of_zookeeper;
use dlock_tests::zookeeper::Zookeeper;
use dlock_zookeeper::ZookeeperLocks;

/// The node of the lock that others create.
const PREMADE: &str = "order";
/// One that has no node yet.
const NEW: &str = "new";

/// Carries out the lines of the page on a path of its own, with other rights in the line that ends with these, and perhaps
/// one line more; the root.
async fn granted(server: &Zookeeper, (from, to): (&str, &str), more: &str) -> String {
    let path = format!("/permissions-{:016x}", fastrand::u64(..));
    let lines = of_zookeeper().into_iter().chain([more]).map(|line| {
        let line = line.replace("/shop", &path);
        match line.strip_suffix(from) {
            Some(begin) => format!("{begin}{to}"),
            None => line,
        }
    });
    let lines: Vec<String> = lines.collect();
    let creates = lines.iter().filter(|line| line.starts_with("create ")).count();
    let told = server.told(&lines).await;
    assert_eq!(told.matches("Created ").count(), creates, "{told}");
    format!("{path}/locks")
}

async fn store(server: &Zookeeper, root: &str) -> ZookeeperLocks {
    let builder = ZookeeperLocks::builder(&server.addr().to_string()).root(root);
    let builder = builder.credentials("svc", "password").timeout(PATIENCE);
    builder.connect().await.expect("the server is there")
}

async fn client(store: &ZookeeperLocks) -> LockClient {
    let builder = LockClient::builder().store(store.clone()).lease(LEASE);
    builder.build().await.expect("a client on the store")
}

/// That it was refused, with what it was about.
fn refused<T: std::fmt::Debug>(result: Result<T, Error>, what: &str) {
    let error = result.expect_err(what);
    assert!(matches!(error, Error::Refused { .. }), "{error:?}");
    let said = error.to_string();
    assert!(said.contains(what) && said.contains("NoAuth"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_with_what_the_page_lists_can_do_everything() {
    let server = Zookeeper::shared().await;
    let root = granted(&server, ("", ""), "").await;
    let (here, there) = (store(&server, &root).await, store(&server, &root).await);
    let (one, other) = (client(&here).await, client(&there).await);
    let kinds = [LockKind::Mutex, LockKind::Fair];
    for (key, kind) in [PREMADE, NEW]
        .into_iter()
        .flat_map(|key| kinds.map(|kind| (key, kind)))
    {
        let guard = one.lock(key).kind(kind).acquire().await.unwrap();
        let waiter = other.lock(key).kind(kind).wait(PATIENCE);
        let waiting = tokio::spawn(async move { waiter.acquire().await });
        assert!(one.inspect(key).await.unwrap().is_some());
        let listed = other.list("").await.unwrap();
        assert!(
            listed.iter().any(|(listed, _)| listed.as_str() == key),
            "{listed:?}"
        );
        guard.release().await.unwrap();
        drop(waiting.await.unwrap().unwrap());
        let free = async || one.inspect(key).await.unwrap().is_none();
        eventually("the lock is free", free).await;
        let reader = one.rw_lock(key).read().wait(PATIENCE).acquire().await.unwrap();
        drop(other.rw_lock(key).read().acquire().await.unwrap());
        reader.release().await.unwrap();
        let (here, grant) = (Arc::new(here.clone()), GrantId::from_parts(7, 1));
        let acquire = AcquireRequest::new(Kind::Write, key.into(), grant, LEASE);
        loop {
            let reply = here.clone().acquire(acquire.clone()).await.unwrap();
            if let AcquireReply::Acquired(_) = reply {
                break;
            }
        }
        let renewal = RenewRequest::new(Kind::Write, key.into(), grant, LEASE);
        let renewed = here.clone().renew(vec![renewal]).await.unwrap();
        assert!(
            matches!(renewed[0], Ok(Renewal::Renewed | Renewal::RenewedFor(_))),
            "{renewed:?}"
        );
        assert!(other.force_release(key).await.unwrap());
        let release = ReleaseRequest::new(Kind::Write, key.into(), grant);
        here.release(release).await.unwrap();
        let semaphore = one.semaphore(key).permits(1).wait(PATIENCE);
        let permit = semaphore.acquire().await.unwrap();
        let waiter = other.semaphore(key).wait(PATIENCE);
        let waiting = tokio::spawn(async move { waiter.acquire().await });
        semaphore.add_permits(1).await.unwrap();
        drop(waiting.await.unwrap().unwrap());
        permit.release().await.unwrap();
        assert!(other.semaphore(key).delete().await.unwrap());
        let latch = one.latch(key);
        assert!(latch.try_set_count(1).await.unwrap());
        assert_eq!(other.latch(key).count_down().await.unwrap(), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_that_a_user_may_not_read_is_left_out_of_the_list() {
    let server = Zookeeper::shared().await;
    let root = format!("/permissions-{:016x}", fastrand::u64(..));
    let as_user = async |user: &str| {
        let builder = ZookeeperLocks::builder(&server.addr().to_string()).root(&root);
        let builder = builder.credentials(user, "password").timeout(PATIENCE);
        client(&builder.connect().await.unwrap()).await
    };
    let all = ZookeeperLocks::builder(&server.addr().to_string()).root(&root);
    let all = client(&all.timeout(PATIENCE).connect().await.unwrap()).await;
    let _open = all.lock("open").acquire().await.unwrap();
    let (one, other) = (as_user("one").await, as_user("other").await);
    let _hidden = one.lock("hidden").acquire().await.unwrap();
    let listed = async |client: &LockClient| {
        let listed = client.list("").await.unwrap();
        let mut keys: Vec<_> = listed.iter().map(|(key, _)| key.as_str().to_owned()).collect();
        keys.sort();
        keys
    };
    assert_eq!(listed(&one).await, ["hidden", "open"]);
    assert_eq!(listed(&other).await, ["open"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn right_that_is_missing_is_told_and_nothing_stays() {
    let server = Zookeeper::shared().await;
    let no_new = granted(&server, ("auth::cr", "auth::cra"), "setAcl /shop/locks auth::r").await;
    let locks = client(&store(&server, &no_new).await).await;
    refused(
        locks.lock(NEW).try_acquire().await,
        "to create the node of the lock",
    );
    drop(locks.lock(PREMADE).try_acquire().await.unwrap());

    let no_list = granted(&server, ("auth::cr", "auth::c"), "").await;
    let locks = client(&store(&server, &no_list).await).await;
    let guard = locks.lock(NEW).try_acquire().await.unwrap();
    refused(locks.list("").await, "to list the locks");
    guard.release().await.unwrap();

    for (rights, what) in [
        ("auth::dr", "to create a node"),
        ("auth::cd", "to list the nodes"),
    ] {
        let root = granted(&server, ("auth::cdr", rights), "").await;
        let locks = client(&store(&server, &root).await).await;
        refused(locks.lock(PREMADE).try_acquire().await, what);
        let stat = [format!("stat {root}/{PREMADE}")];
        eventually("nothing is left", async || {
            server.told(&stat).await.contains("numChildren = 0")
        })
        .await;
    }

    let no_delete = granted(&server, ("auth::cdr", "auth::cr"), "").await;
    let held = client(&store(&server, &no_delete).await).await;
    let guard = held.lock(PREMADE).try_acquire().await.unwrap();
    refused(guard.release().await, "to delete the node of a lock");
    let beside = client(&store(&server, &no_delete).await).await;
    let busy = beside.lock(PREMADE).try_acquire().await.expect_err("it is held");
    // Its node stays, which may have the lock in the end.
    assert!(matches!(busy, Error::OutcomeUnknown { .. }), "{busy:?}");
    assert!(busy.to_string().contains("to delete a node: NoAuth"), "{busy}");
}

/// Renewals share a write. More of them are refused than a write is repeated without one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_that_may_not_be_read_costs_no_other_lock() {
    let server = Zookeeper::shared().await;
    let root = format!("/permissions-{:016x}", fastrand::u64(..));
    let builder = ZookeeperLocks::builder(&server.addr().to_string()).root(&root);
    let store = Arc::new(builder.timeout(PATIENCE).connect().await.unwrap());
    let keys: Vec<String> = (0..12).map(|n| format!("k{n:02}")).collect();
    let grants = keys
        .iter()
        .zip(1..)
        .map(|(key, n)| (key.as_str(), GrantId::from_parts(7, n)));
    let grants: Vec<(&str, GrantId)> = grants.collect();
    for (key, grant) in &grants {
        let acquire = AcquireRequest::new(Kind::Mutex, (*key).into(), *grant, LEASE);
        let reply = store.clone().acquire(acquire).await.unwrap();
        assert!(matches!(reply, AcquireReply::Acquired(_)), "{reply:?}");
    }
    let is_bad = |key: &str| ["k00", "k03", "k04", "k05", "k08", "k11"].contains(&key);
    let nodes = server.told(&[format!("ls -R {root}")]).await;
    let bad = nodes.lines().filter(|line| {
        let names: Vec<&str> = line.rsplit('/').collect();
        line.starts_with(&root) && names.len() > 2 && is_bad(names[1])
    });
    let hide: Vec<String> = bad.map(|node| format!("setAcl {node} world:anyone:dw")).collect();
    assert_eq!(hide.len(), 6, "{nodes}");
    server.told(&hide).await;
    let renewals = grants
        .iter()
        .map(|(key, grant)| RenewRequest::new(Kind::Mutex, (*key).into(), *grant, LEASE));
    let replies = store.clone().renew(renewals.collect()).await.unwrap();
    for ((key, _), reply) in grants.iter().zip(&replies) {
        match reply {
            Err(error) if is_bad(key) => assert_eq!(
                (error.outcome, &error.reason),
                (Outcome::NotDone, &Reason::Refused),
                "{key}: {error}"
            ),
            Ok(Renewal::Renewed | Renewal::RenewedFor(_)) if !is_bad(key) => {}
            other => panic!("{key}: {other:?}"),
        }
    }
}

/// The node that has the number of permits may be of another program.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn semaphore_without_a_readable_total_is_refused_and_no_node_stays() {
    let server = Zookeeper::shared().await;
    let root = format!("/permissions-{:016x}", fastrand::u64(..));
    let builder = ZookeeperLocks::builder(&server.addr().to_string()).root(&root);
    let locks = client(&builder.timeout(PATIENCE).connect().await.unwrap()).await;
    drop(locks.semaphore("k").permits(2).acquire().await.unwrap());
    server.told(&[format!("set {root}/k/permits x")]).await;
    let refused = locks.semaphore("k").try_acquire().await.expect_err("no number");
    assert!(matches!(refused, Error::Refused { .. }), "{refused:?}");
    assert!(refused.to_string().contains("SharedCount"), "{refused}");
    let nodes = [format!("ls -R {root}/k")];
    eventually("nothing is left", async || {
        !server.told(&nodes).await.contains("lock-")
    })
    .await;
}
