//! What etcd refuses: for lack of a login or of rights, because it is too large, because the server is busy or a learner.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::{GrantId, Kind, Outcome, Store, Watch};
use dlock::{Error, LockClient};
use dlock_etcd::{EtcdLocks, TransactionError};
use dlock_tests::Certificates;
use dlock_tests::etcd::{Etcd, EtcdProxy, Reply, ScriptedEtcd, builder_at, fresh_namespace};
use dlock_tests::eventually;
use dlock_tests::faults::{PATIENCE, in_rounds, is_confirmed, within};
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;

use crate::etcd_support::{LEASE, SEC, ask, client, connected, connected_in_time, granted, renewal, setting};

const NAMESPACE: &str = "shop/";
const PASSWORD: &str = "p@ss/word";

/// A server without authentication, whose user `shop` may use the locks.
async fn server_with_users() -> Etcd {
    let server = Etcd::start().await;
    server.add_user("root", "secret", None).await;
    server.add_user("shop", PASSWORD, Some(NAMESPACE)).await;
    server
}

/// A store of the user `shop`.
async fn shop(server: &Etcd) -> Arc<EtcdLocks> {
    connected(server.builder(NAMESPACE).timeout(PATIENCE).user("shop", PASSWORD)).await
}

#[tokio::test]
async fn client_with_a_login_logs_in_when_authentication_is_enabled() {
    let server = server_with_users().await;
    let client = client(&shop(&server).await).await;
    let guard = client.lock("before").acquire().await.unwrap();
    server.enable_authentication("secret").await;
    let after = within(PATIENCE, "a lock", client.lock("after").acquire())
        .await
        .unwrap();
    after.release().await.unwrap();
    is_confirmed(&guard).await;
    guard.release().await.unwrap();
}

/// Waiters are told of releases by a stream that the server checks on its own.
#[tokio::test]
async fn waiter_with_a_login_is_told_of_releases_when_authentication_is_enabled() {
    let server = server_with_users().await;
    let (a, b) = (
        client(&shop(&server).await).await,
        client(&shop(&server).await).await,
    );
    server.enable_authentication("secret").await;
    let guard = a.lock("k").acquire().await.unwrap();
    let waiting = tokio::spawn(async move { b.lock("k").acquire().await });
    sleep(SEC).await;
    guard.release().await.unwrap();
    let next = within(SEC, "the waiter", waiting).await.unwrap().unwrap();
    next.release().await.unwrap();
}

/// The shortest lease of a lock is over after two seconds, and the lease of its key two to four seconds later.
#[tokio::test]
async fn lock_whose_user_may_not_delete_it_any_more_ends_with_its_lease() {
    let server = server_with_users().await;
    server.enable_authentication("secret").await;
    let client = client(&shop(&server).await).await;
    let guard = client.lock("k").lease(2 * SEC).acquire().await.unwrap();
    server.grant_rights("shop", NAMESPACE, "READ").await;
    let refused = guard.release().await.unwrap_err();
    assert!(matches!(refused, Error::Refused { .. }), "{refused:?}");
    assert_eq!(server.keys("shop/q/").await.len(), 1);
    let no_lock = async || server.keys("shop/q/").await.is_empty();
    within(10 * SEC, "the lease ends", eventually("no lock is left", no_lock)).await;
    server.grant_rights("shop", NAMESPACE, "READWRITE").await;
    let again = client.lock("k").lease(2 * SEC).acquire().await.unwrap();
    again.release().await.unwrap();
}

/// It shares its lease with one that cannot be deleted.
#[tokio::test]
async fn lock_that_is_renewed_is_kept_beside_one_that_cannot_be_deleted() {
    let server = server_with_users().await;
    server.enable_authentication("secret").await;
    let client = client(&shop(&server).await).await;
    let (gone, kept) = (
        client.lock("gone").lease(2 * SEC),
        client.lock("kept").lease(2 * SEC),
    );
    let (gone, kept) = (gone.acquire().await.unwrap(), kept.acquire().await.unwrap());
    server.grant_rights("shop", NAMESPACE, "READ").await;
    gone.release().await.unwrap_err();
    sleep(5 * SEC).await;
    assert!(kept.is_held());
    is_confirmed(&kept).await;
    server.grant_rights("shop", NAMESPACE, "READWRITE").await;
    kept.release().await.unwrap();
    eventually("no lock is left", async || {
        server.keys("shop/q/").await.is_empty()
    })
    .await;
}

#[tokio::test]
async fn transaction_without_rights_names_its_keys() {
    let server = server_with_users().await;
    server.enable_authentication("secret").await;
    let locks = shop(&server).await;
    let client = client(&locks).await;
    let guard = client.lock("k").acquire().await.unwrap();
    let transaction = locks.transaction(&guard).unwrap();
    let denied = transaction
        .put("config/version", "7")
        .delete("config/draft")
        .when_unchanged("config/base", 0)
        .commit()
        .await
        .unwrap_err();
    let TransactionError::Failed(error) = denied else {
        panic!("{denied:?}")
    };
    for key in ["config/version", "config/draft", "config/base"] {
        assert!(error.message.contains(&format!("\"{key}\"")), "{error}");
    }
    assert!(!error.message.contains("shop/"), "{error}");
    guard.release().await.unwrap();
}

#[tokio::test]
async fn transaction_that_is_too_large_is_told_and_costs_no_connection() {
    let server = Etcd::shared().await;
    let proxy = EtcdProxy::start(server.addr());
    let locks = connected(builder_at(proxy.addr(), &fresh_namespace()).timeout(PATIENCE)).await;
    let client = client(&locks).await;
    let guard = client.lock("k").acquire().await.unwrap();
    let connects = proxy.count(|call| call.is("Status"));
    // The server refuses the first one, and gRPC the others.
    for megabytes in [1_800_000, 3_000_000, 9_000_000] {
        let transaction = locks.transaction(&guard).unwrap();
        let refused = transaction.put("large", vec![7; megabytes]).commit().await;
        let Err(TransactionError::Failed(error)) = refused else {
            panic!("{megabytes}: {refused:?}")
        };
        assert_eq!(error.outcome, Outcome::NotDone, "{error}");
        assert!(error.message.contains("--max-request-bytes"), "{error}");
    }
    guard.release().await.unwrap();
    assert_eq!(proxy.count(|call| call.is("Status")), connects);
}

/// The steps of fair locks with long names are larger than a server reads, if many of them share a request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_of_fair_locks_with_long_names_share_requests_that_the_server_takes() {
    let setting = setting().await;
    let prefix = "p".repeat(1500);
    let builder = builder_at(setting.proxy.addr(), &setting.namespace).prefix(prefix);
    let client = client(&connected(builder.timeout(PATIENCE)).await).await;
    let connects = setting.proxy.count(|call| call.is("Status"));
    let acquires = (0..300).map(|number| {
        let lock = client.fair_lock(format!("{number}{}", "n".repeat(500)));
        async move {
            let guard = lock.acquire().await.unwrap();
            guard.release().await.unwrap();
        }
    });
    join_all(acquires).await;
    assert_eq!(setting.proxy.count(|call| call.is("Status")), connects);
}

#[tokio::test]
async fn learner_is_left_for_a_member_and_named_where_there_is_no_other() {
    let server = Etcd::start().await;
    let learner = server.start_learner().await;
    let addresses = [&learner, &server].map(|server| server.addr().to_string());
    for _ in 0..6 {
        let builder = EtcdLocks::builder(addresses.clone()).allow_old_server(true);
        let client = client(&connected(builder.timeout(PATIENCE)).await).await;
        let guard = client.lock("k").acquire().await.unwrap();
        guard.release().await.unwrap();
    }
    let alone = learner.builder(NAMESPACE).timeout(SEC).connect();
    let error = alone.await.unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
    assert!(error.to_string().contains("learner"), "{error}");
}

/// A script in which the first requests for leases are refused.
fn refuses_leases(
    times: usize,
    code: u16,
    text: &'static str,
) -> impl Fn(&str) -> Reply + Clone + Send + Sync {
    let left = Arc::new(Mutex::new(times));
    move |method| {
        let mut left = left.lock();
        if method == "LeaseGrant" && *left > 0 {
            *left -= 1;
            return Reply::Refusal(code, text);
        }
        Reply::usual(method)
    }
}

#[tokio::test]
async fn busy_server_is_asked_again_on_the_same_connection() {
    let server = ScriptedEtcd::start(refuses_leases(5, 8, "etcdserver: too many requests")).await;
    let locks = connected(builder_at(server.addr(), NAMESPACE).timeout(PATIENCE)).await;
    granted(locks.clone().acquire(ask("k", 1, LEASE)).await);
    assert_eq!((server.connections(), server.count("LeaseGrant")), (1, 6));
}

#[tokio::test]
async fn server_that_is_always_busy_is_told_and_not_asked_all_the_time() {
    let server = ScriptedEtcd::start(refuses_leases(usize::MAX, 8, "etcdserver: too many requests")).await;
    let locks = connected_in_time(|| builder_at(server.addr(), NAMESPACE).timeout(2 * SEC)).await;
    let before = server.connections();
    let error = locks.clone().acquire(ask("k", 1, LEASE)).await.unwrap_err();
    assert!(error.message.contains("too many requests"), "{error}");
    assert_eq!((error.outcome, server.connections()), (Outcome::NotDone, before));
    assert!(server.count("LeaseGrant") < 20, "{}", server.count("LeaseGrant"));
}

/// A server that accepts connections and no requests, with callers that come one after the other.
#[tokio::test]
async fn connection_after_connection_that_serves_no_request_takes_longer_and_longer() {
    let server = ScriptedEtcd::start(refuses_leases(usize::MAX, 14, "etcdserver: no leader")).await;
    let locks = connected_in_time(|| builder_at(server.addr(), NAMESPACE).timeout(SEC / 2)).await;
    for number in 0..6 {
        let error = locks.clone().acquire(ask("k", number, LEASE)).await.unwrap_err();
        assert_eq!(error.outcome, Outcome::NotDone, "{error}");
    }
    assert!(server.connections() < 40, "{}", server.connections());
}

/// A member of a cluster that does not answer all requests. For leases, it is the leader that answers.
struct Member {
    server: ScriptedEtcd,
    silent: Arc<Mutex<&'static [&'static str]>>,
}

/// The lease that a member grants.
const GRANTED: Duration = Duration::from_secs(30);

/// What a member carries out itself.
const CARRIED_OUT: &[&str] = &["Txn", "Range", "Put", "LeaseGrant"];

impl Member {
    async fn start() -> Member {
        let silent = Arc::<Mutex<&'static [&'static str]>>::default();
        let own = silent.clone();
        let script = move |method: &str| match method {
            method if own.lock().contains(&method) => Reply::Silence,
            "LeaseTimeToLive" => Reply::Message(lease_with(&format!("{NAMESPACE}q/renewed\0L"))),
            method => Reply::usual(method),
        };
        let server = ScriptedEtcd::start(script).await;
        Member { server, silent }
    }

    fn count(&self, method: &str) -> usize {
        self.server.count(method)
    }
}

/// A lease of 30 s with this key.
fn lease_with(key: &str) -> Vec<u8> {
    let length = u8::try_from(key.len()).unwrap();
    [&[0x10, 1, 0x18, 30, 0x20, 30, 0x2a, length], key.as_bytes()].concat()
}

/// A client of two members, of which it uses the first that is returned, and renews a lock all the time.
async fn client_of_two() -> (Arc<EtcdLocks>, Member, Member, AbortOnDropHandle<()>) {
    let [one, other] = [Member::start().await, Member::start().await];
    let addrs = [&one, &other].map(|member| member.server.addr().to_string());
    let builder = || EtcdLocks::builder(addrs.clone()).namespace(NAMESPACE);
    let locks = connected_in_time(|| builder().timeout(2 * SEC)).await;
    granted(locks.clone().acquire(ask("renewed", 1, GRANTED)).await);
    let renewing = locks.clone();
    let renewing = tokio::spawn(async move {
        loop {
            let _ = renewing.clone().renew(vec![renewal("renewed", 1, GRANTED)]).await;
            sleep(SEC / 20).await;
        }
    });
    let (used, beside) = match one.count("Txn") {
        0 => (other, one),
        _ => (one, other),
    };
    (locks, used, beside, AbortOnDropHandle::new(renewing))
}

#[tokio::test]
async fn member_that_answers_for_leases_alone_is_left_for_one_that_carries_requests_out() {
    let (locks, used, beside, _renewing) = client_of_two().await;
    *used.silent.lock() = CARRIED_OUT;
    let serves = async {
        let mut number = 2;
        while locks
            .clone()
            .acquire(ask("other", number, GRANTED))
            .await
            .is_err()
        {
            number += 1;
        }
    };
    within(PATIENCE, "another member serves it", serves).await;
    assert!(beside.count("Txn") > 0);
}

/// Another member would be no better.
#[tokio::test]
async fn member_is_not_left_for_a_slow_request_nor_for_another_one_that_is_as_slow() {
    in_rounds("the members answer for leases in time", async || {
        let (locks, used, beside, renewing) = client_of_two().await;
        let is_late = async |number| locks.clone().acquire(ask("slow", number, GRANTED)).await.is_err();
        *used.silent.lock() = &["Txn"];
        assert!(is_late(2).await);
        eventually("it is asked for something else", async || used.count("Range") > 0).await;
        sleep(3 * SEC).await;
        let asked = beside.count("Range");
        for member in [&used, &beside] {
            *member.silent.lock() = CARRIED_OUT;
        }
        assert!(is_late(3).await);
        eventually("the other one is asked, too", async || beside.count("Range") > 0).await;
        sleep(3 * SEC).await;
        drop(renewing);
        match (asked, used.server.connections(), beside.count("LeaseKeepAlive")) {
            (0, 1, 0) => Ok(()),
            instead => Err(instead),
        }
    })
    .await;
}

fn watch(locks: &Arc<EtcdLocks>) -> Watch {
    let grant = GrantId::from_parts(1, 1);
    locks.clone().watch(Kind::Mutex, &"k".into(), grant)
}

/// The server does not say which watch it refuses.
#[tokio::test]
async fn watch_that_is_refused_for_its_login_is_asked_for_by_a_new_connection() {
    let mut refusal = vec![0x10];
    refusal.extend([0xff; 9]);
    refusal.extend([1, 0x18, 1, 0x20, 1, 0x32, 30]);
    refusal.extend(b"etcdserver: invalid auth token");
    let left = Arc::new(Mutex::new(1));
    let script = move |method: &str| {
        let mut left = left.lock();
        if method == "Watch" && *left > 0 {
            *left -= 1;
            return Reply::Stream(refusal.clone());
        }
        Reply::usual(method)
    };
    let server = ScriptedEtcd::start(script).await;
    let locks = connected(builder_at(server.addr(), NAMESPACE).timeout(PATIENCE)).await;
    let _watch = watch(&locks);
    eventually("it watches anew", async || server.count("Watch") == 2).await;
    sleep(SEC).await;
    assert_eq!((server.connections(), server.count("Watch")), (2, 2));
}

#[tokio::test]
async fn watch_that_is_refused_for_lack_of_rights_is_asked_for_after_a_pause() {
    let server = server_with_users().await;
    server.enable_authentication("secret").await;
    let builder = server.builder("bank/").user("shop", PASSWORD).timeout(PATIENCE);
    let locks = connected(builder).await;
    let before = server.requests().await;
    let _watch = watch(&locks);
    sleep(2 * SEC).await;
    let requests = server.requests().await - before;
    assert!((2..40).contains(&requests), "{requests}");
}

#[tokio::test]
async fn file_that_is_not_pem_is_told_with_its_option() {
    let certificates = Certificates::new();
    let file = |name: &str| certificates.file(name).display().to_string();
    let (certificate, key, none) = (file("server.pem"), file("server.key"), file("none.pem"));
    std::fs::write(&none, "-----BEGIN NOTHING-----\n").unwrap();
    for (options, option, named, reason) in [
        (format!("ca={none}"), "ca", &none, "no certificate"),
        (format!("ca={key}"), "ca", &key, "no certificate"),
        (format!("cert={none}&key={key}"), "cert", &none, "no certificate"),
        (
            format!("cert={certificate}&key={certificate}"),
            "key",
            &certificate,
            "no private key",
        ),
    ] {
        let url = format!("etcds://localhost?{options}");
        let builder = LockClient::builder().scheme(dlock_etcd::scheme()).url(&url);
        let error = builder.build().await.map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::InvalidUrl { .. }), "{url}: {error:?}");
        let text = error.to_string();
        for part in [&*format!("option {option} "), named, reason] {
            assert!(text.contains(part), "{url}: {text}");
        }
    }
    let builder = || EtcdLocks::builder(["localhost:1"]).timeout(SEC);
    let (certificate, key) = certificates.client.clone();
    for (wrong, option) in [
        (builder().ca_certificate("none"), "ca_certificate"),
        (builder().client_certificate("none", key), "client_certificate"),
        (
            builder().client_certificate(certificate, "none"),
            "client_certificate",
        ),
    ] {
        let error = wrong.connect().await.unwrap_err();
        assert!(
            matches!(&error, Error::InvalidOption { option: named, .. } if *named == option),
            "{error:?}"
        );
    }
}
