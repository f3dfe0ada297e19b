//! Locks on etcd where requests and replies get lost, and what went wrong with locks on it elsewhere.

use std::sync::Arc;
use std::time::Instant;

use dlock::store::{
    AcquireReply, AcquireRequest, Granted, Kind, Outcome, Reason, ReleaseReply, ReleaseRequest, Renewal,
    Store, StoreError,
};
use dlock::{Error, HoldState, LockClient, Loss};
use dlock_etcd::{EtcdLocks, EtcdLocksBuilder, TransactionError};
use dlock_tests::etcd::{Etcd, builder_at, fresh_namespace};
use dlock_tests::faults::{PATIENCE, answered, are_few, some_at_a_time};
use dlock_tests::{Certificates, eventually};
use futures_util::future::join_all;
use serde_json::json;
use tokio::time::sleep;

use crate::etcd_support::{
    LEASE, MS, SEC, acquires, ask, client, connected, granted, release, renewal, setting,
};

/// Beside everything else the reason: an operator has to decide.
#[tokio::test]
async fn old_server_is_refused_with_the_reason_unless_it_is_allowed() {
    let server = Etcd::shared().await;
    let status = server
        .ask("maintenance/status", &json!({}))
        .await
        .expect("a status");
    let version = status["version"].as_str().expect("a version").to_owned();
    let numbers: Vec<u32> = version
        .split('.')
        .map(|number| number.parse().unwrap_or(0))
        .collect();
    let is_old = numbers < vec![3, 4, 31] || numbers[..2] == [3, 5] && numbers[2] < 13;
    let open = |url: String| {
        LockClient::builder()
            .scheme(dlock_etcd::scheme())
            .url(url)
            .timeout(PATIENCE)
            .build()
    };
    let opened = open(format!("etcd://{}", server.addr())).await;
    if is_old {
        let error = opened.expect_err("it is old");
        assert!(matches!(error, Error::Refused { .. }), "{error:?}");
        for part in [&*version, "#15247", "allow_old_server=true", "3.5.13"] {
            assert!(error.to_string().contains(part), "{part}: {error}");
        }
    } else {
        opened.expect("it is new enough");
    }
    let allowed = open(server.url(&fresh_namespace())).await.expect("it is allowed");
    allowed
        .lock("k")
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

#[tokio::test]
async fn wrong_url_is_told() {
    let told = |url: &'static str| async move {
        let builder = LockClient::builder().scheme(dlock_etcd::scheme()).url(url);
        builder.build().await.map(|_| ()).unwrap_err()
    };
    for (url, says) in [
        ("etcd://", "no servers"),
        ("etcd://a:b", "no servers"),
        ("etcd://a,,b", "no servers"),
        ("etcd://h/locks", "namespace"),
        ("etcd://user@h", "password"),
        ("etcd://h?nmspace=x", "\"nmspace\""),
        ("etcd://h?allow_old_server=yes", "allow_old_server"),
        ("etcd://h?namespace=", "namespace"),
        ("etcd://h?ca=/a.pem", "etcds://"),
        ("etcds://h?cert=/a.pem", "go together"),
        ("etcds://h?ca=/there/is/none.pem", "cannot be read"),
    ] {
        let error = told(url).await;
        assert!(matches!(error, Error::InvalidUrl { .. }), "{url}: {error:?}");
        assert!(error.to_string().contains(says), "{url}: {error}");
    }
    let unregistered = LockClient::connect("etcd://h").await.map(|_| ()).unwrap_err();
    assert!(unregistered.to_string().contains("dlock-etcd"), "{unregistered}");
}

/// In other libraries: a name that is cut short in a message makes one lock of two.
#[tokio::test]
async fn long_names_with_one_beginning_are_different_locks() {
    let setting = setting().await;
    let (a, b) = (format!("{}a", "x".repeat(200)), format!("{}b", "x".repeat(200)));
    granted(setting.patient.clone().acquire(ask(&a, 1, LEASE)).await);
    granted(setting.patient.clone().acquire(ask(&b, 2, LEASE)).await);
}

#[tokio::test]
async fn token_is_the_revision_that_created_the_key() {
    let setting = setting().await;
    let mut last = 0;
    for number in 1..4 {
        let mut request = ask("k", number, LEASE);
        request.tokens = 3;
        let grant = granted(setting.patient.clone().acquire(request).await);
        assert_eq!(grant.last_token, grant.first_token + 2);
        assert_eq!(grant.first_token & 0xffff, 0);
        assert!(grant.first_token > last);
        last = grant.last_token;
        setting
            .patient
            .clone()
            .release(release("k", number))
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn leases_are_shared_and_locks_end_one_by_one() {
    let setting = setting().await;
    let before = setting.server.leases().await.len();
    for number in 0..50 {
        let key = format!("k{number}");
        granted(setting.patient.clone().acquire(ask(&key, number, LEASE)).await);
    }
    // Other tests make leases, too: not fifty.
    assert!(setting.server.leases().await.len() < before + 40);
    let short = ask("short", 100, 2 * SEC);
    granted(setting.patient.clone().acquire(short).await);
    let other = ask("other", 101, 2 * SEC);
    granted(setting.patient.clone().acquire(other).await);
    // Their session is kept alive for the one that is renewed.
    for _ in 0..12 {
        sleep(SEC / 4).await;
        let renewed = setting
            .patient
            .clone()
            .renew(vec![renewal("other", 101, 2 * SEC)])
            .await;
        assert!(matches!(renewed.unwrap()[..], [Ok(Renewal::RenewedFor(_))]));
    }
    eventually("the lease of the other lock is over", async || {
        let held = setting.held().await;
        held.iter().all(|(key, _)| !key.contains("short"))
    })
    .await;
    assert!(setting.held().await.iter().any(|(key, _)| key.contains("other")));
}

/// A server deletes the keys of a lease that ends one by one, and does nothing else meanwhile. Beside the locks a lease has
/// the key of its session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_lease_has_more_than_a_thousand_locks() {
    const LOCKS: u64 = 2500;
    let setting = setting().await;
    let acquires = (0..LOCKS).map(|n| setting.patient.clone().acquire(ask(&format!("k{n}"), n, LEASE)));
    for reply in join_all(acquires).await {
        granted(reply);
    }
    let leases = setting.sessions().await;
    let locks = leases
        .iter()
        .map(async |lease| setting.server.keys_on(*lease).await - 1);
    let locks = join_all(locks).await;
    assert!(locks.iter().all(|locks| *locks <= 1000), "{locks:?}");
    assert_eq!(locks.iter().sum::<u64>(), LOCKS, "{locks:?}");
    assert!(leases.len() <= 4, "they are shared: {locks:?}");
}

/// A lock that joins a session has no more than what is left of the session's lease.
#[tokio::test]
async fn lease_counts_from_the_last_keep_alive_of_its_session() {
    let setting = setting().await;
    let first = granted(setting.patient.clone().acquire(ask("a", 1, 60 * SEC)).await);
    let all = first.lease.expect("a lease").left();
    sleep(2 * SEC).await;
    let second = granted(setting.patient.clone().acquire(ask("b", 2, 60 * SEC)).await);
    let left = second.lease.expect("a lease").left();
    assert!(left <= all - 1900 * MS && left > 40 * SEC, "{all:?} {left:?}");
    let renewed = setting
        .patient
        .clone()
        .renew(vec![renewal("b", 2, 60 * SEC)])
        .await
        .unwrap();
    let Ok(Renewal::RenewedFor(lease)) = &renewed[0] else {
        panic!("{renewed:?}");
    };
    assert!(lease.left() >= 60 * SEC, "{lease:?}");
}

#[tokio::test]
async fn late_copy_of_an_acquire_that_was_undone_takes_nothing() {
    let setting = setting().await;
    // With its session made before.
    granted(setting.hasty.clone().acquire(ask("warm", 1, LEASE)).await);
    let late = setting.proxy.hold(1, acquires);
    let error = setting
        .hasty
        .clone()
        .acquire(ask("k", 2, LEASE))
        .await
        .unwrap_err();
    assert_eq!(error.outcome, Outcome::Unknown, "{error}");
    late.caught().await;
    let undone = answered(|| setting.hasty.clone().release(release("k", 2))).await;
    assert_eq!(undone.unwrap(), ReleaseReply::NotHeld { repeated: false });
    late.release();
    late.swallowed().await;
    let held = setting.held().await;
    assert!(held.iter().all(|(key, _)| !key.contains("q/k")), "{held:?}");
    // Others of the session are as they were, and it goes on.
    let renewed = answered(|| setting.hasty.clone().renew(vec![renewal("warm", 1, LEASE)])).await;
    assert!(matches!(renewed.unwrap()[..], [Ok(Renewal::RenewedFor(_))]));
    answered(|| async {
        let reply = setting
            .hasty
            .clone()
            .acquire(ask("k", fastrand::u64(10..), LEASE))
            .await?;
        assert!(matches!(reply, AcquireReply::Acquired(_)), "{reply:?}");
        Ok::<_, StoreError>(())
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn cut_connections_cost_nothing_that_is_held() {
    let setting = setting().await;
    let client = client(&setting.hasty).await;
    let guard = client.lock("k").acquire().await.unwrap();
    let waiting = tokio::spawn({
        let other = setting.beside().await;
        async move { other.lock("k").acquire().await.map(|guard| (other, guard)) }
    });
    for _ in 0..5 {
        setting.proxy.cut();
        sleep(100 * MS).await;
        assert!(guard.is_held());
    }
    guard.release().await.unwrap();
    let (_other, next) = waiting.await.unwrap().unwrap();
    next.release().await.unwrap();
}

/// In other libraries: a session that is gone, and a holder that is not told.
#[tokio::test]
async fn holder_learns_that_its_session_is_gone_and_the_next_goes_on() {
    let setting = setting().await;
    let (a, b) = (client(&setting.hasty).await, client(&setting.patient).await);
    let mine = 4321 * SEC;
    let guard = a.lock("k").lease(mine).acquire().await.unwrap();
    let lease = setting.sessions().await[0];
    let waiting = tokio::spawn(async move { b.lock("k").acquire().await.map(|guard| (b, guard)) });
    sleep(100 * MS).await;
    assert!(!waiting.is_finished());
    assert!(setting.server.revoke(lease).await);
    // The end of a lease is notified as well.
    let (_b, next) = waiting.await.unwrap().unwrap();
    assert!(next.fencing_token() > guard.fencing_token());
    // A new connection has every holder asked.
    setting.proxy.cut();
    let again = a.lock("other").acquire().await.unwrap();
    guard.lost().await;
    again.release().await.unwrap();
    next.release().await.unwrap();
}

/// In other libraries: a keep-alive that answers though the key is gone.
#[tokio::test]
async fn forced_release_is_seen_by_the_next_renewal() {
    let setting = setting().await;
    let (store, other) = (&setting.patient, setting.patient_beside().await);
    granted(store.clone().acquire(ask("k", 1, LEASE)).await);
    granted(store.clone().acquire(ask("beside", 2, LEASE)).await);
    assert!(other.force_release("k".into()).await.unwrap());
    let renewed = store
        .clone()
        .renew(vec![renewal("k", 1, LEASE), renewal("beside", 2, LEASE)])
        .await
        .unwrap();
    assert!(
        matches!(renewed[..], [Ok(Renewal::Gone), Ok(Renewal::RenewedFor(_))]),
        "{renewed:?}"
    );
}

/// In other libraries: two locks of one session that do not exclude each other, and an unlock by name that ends a newer one.
#[tokio::test]
async fn locks_of_one_session_exclude_each_other_and_end_only_themselves() {
    let setting = setting().await;
    let store = &setting.patient;
    granted(store.clone().acquire(ask("k", 1, LEASE)).await);
    let busy = store.clone().acquire(ask("k", 2, LEASE)).await.unwrap();
    assert!(matches!(busy, AcquireReply::Busy(_)), "{busy:?}");
    store.clone().release(release("k", 1)).await.unwrap();
    granted(store.clone().acquire(ask("k", 3, LEASE)).await);
    for number in [1, 2] {
        let reply = store.clone().release(release("k", number)).await.unwrap();
        assert_eq!(reply, ReleaseReply::NotHeld { repeated: false });
    }
    let busy = store.clone().acquire(ask("k", 4, LEASE)).await.unwrap();
    assert!(matches!(busy, AcquireReply::Busy(_)), "{busy:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_locks_are_renewed_by_few_requests() {
    let server = Arc::new(Etcd::start().await);
    let store = connected(server.builder("many/").timeout(PATIENCE)).await;
    let acquires = (1..=10_000).map(|n| store.clone().acquire(ask(&format!("k{n}"), n, LEASE)));
    for reply in some_at_a_time(acquires).await {
        granted(reply);
    }
    // As a client does it: some hundreds at a time.
    let renew = async |chunk: u64| {
        let requests = (1..=200).map(|n| renewal(&format!("k{}", chunk * 200 + n), chunk * 200 + n, LEASE));
        for reply in store.clone().renew(requests.collect()).await.unwrap() {
            assert!(matches!(reply, Ok(Renewal::RenewedFor(_))), "{reply:?}");
        }
    };
    let (before, begun) = (server.requests().await, Instant::now());
    join_all((0..50).map(&renew)).await;
    let at_once = server.requests().await - before;
    are_few(at_once, begun);
    let begun = Instant::now();
    for chunk in 0..50 {
        renew(chunk).await;
    }
    let one_by_one = server.requests().await - before - at_once;
    are_few(one_by_one, begun);
}

/// The last look at their session cannot have seen them, and each would be looked for by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_that_are_acquired_after_a_renewal_are_renewed_by_few_requests() {
    const BATCH: u64 = 500;
    let (server, lease) = (Etcd::start().await, 30 * SEC);
    let store = connected(server.builder("late/").timeout(PATIENCE)).await;
    let (mut sent, begun) = (0, Instant::now());
    for batch in 0..20 {
        let numbers = || batch * BATCH + 1..=(batch + 1) * BATCH;
        let acquires = numbers().map(|n| store.clone().acquire(ask(&format!("k{n}"), n, lease)));
        for reply in some_at_a_time(acquires).await {
            granted(reply);
        }
        let before = server.requests().await;
        let requests = numbers().map(|n| renewal(&format!("k{n}"), n, lease));
        for reply in store.clone().renew(requests.collect()).await.unwrap() {
            assert!(matches!(reply, Ok(Renewal::RenewedFor(_))), "{reply:?}");
        }
        sent += server.requests().await - before;
    }
    are_few(sent, begun);
}

#[tokio::test]
async fn many_renewals_share_a_look_at_their_session_until_the_connection_breaks() {
    let setting = setting().await;
    let behind = builder_at(setting.proxy.addr(), &setting.namespace);
    let store = connected(behind.timeout(PATIENCE)).await;
    for number in 1..=60 {
        granted(
            store
                .clone()
                .acquire(ask(&format!("k{number}"), number, LEASE))
                .await,
        );
    }
    let renew = async || {
        let requests = (1..=60).map(|number| renewal(&format!("k{number}"), number, LEASE));
        let replies = store.clone().renew(requests.collect()).await.unwrap();
        replies
            .into_iter()
            .all(|reply| matches!(reply, Ok(Renewal::RenewedFor(_))))
    };
    let looks = || setting.proxy.count(|call| call.is("LeaseTimeToLive"));
    assert!(renew().await);
    let once = looks();
    assert!(renew().await);
    // As they come where the locks were acquired one after the other.
    for number in 1..=60 {
        let request = renewal(&format!("k{number}"), number, LEASE);
        let reply = store.clone().renew(vec![request]).await.unwrap();
        assert!(matches!(reply[..], [Ok(Renewal::RenewedFor(_))]), "{reply:?}");
    }
    assert_eq!(looks(), once);
    setting.proxy.cut();
    eventually("there is a new connection", async || {
        store.clone().inspect("k1".into()).await.is_ok()
    })
    .await;
    assert!(renew().await);
    assert!(looks() > once);
}

/// Many locks that are asked for at once, each by its own step.
async fn acquire_many(
    store: &Arc<EtcdLocks>,
    keys: impl Iterator<Item = String>,
) -> Vec<Result<Granted, StoreError>> {
    let asked = keys.zip(1..).map(|(key, number)| {
        let acquiring = store.clone().acquire(ask(&key, number, LEASE));
        async move { acquiring.await.map(|reply| granted(Ok(reply))) }
    });
    join_all(asked).await
}

#[tokio::test]
async fn steps_of_many_locks_share_requests() {
    let server = Arc::new(Etcd::start().await);
    let store = connected(server.builder("shared/").timeout(PATIENCE)).await;
    let before = server.requests().await;
    let keys = || (1..=64).map(|n| format!("k{n}"));
    for reply in acquire_many(&store, keys()).await {
        reply.unwrap();
    }
    let releases = keys()
        .zip(1..)
        .map(|(key, number)| store.clone().release(release(&key, number)));
    for reply in join_all(releases).await {
        assert_eq!(reply.unwrap(), ReleaseReply::Released { receivers: None });
    }
    let sent = server.requests().await - before;
    assert!(sent <= 24, "{sent} requests for 64 locks");
}

#[tokio::test]
async fn server_that_takes_few_operations_at_once_serves_many_locks() {
    let server = Arc::new(Etcd::start_with(&["--max-txn-ops=8"]).await);
    let store = connected(server.builder("few/").timeout(PATIENCE)).await;
    for reply in acquire_many(&store, (1..=64).map(|n| format!("k{n}"))).await {
        reply.unwrap();
    }
}

#[tokio::test]
async fn session_that_is_gone_costs_no_step_that_shares_its_request() {
    let server = Arc::new(Etcd::start().await);
    let store = connected(server.builder("gone/").timeout(PATIENCE)).await;
    granted(store.clone().acquire(ask("first", 1, LEASE)).await);
    for lease in server.leases().await {
        assert!(server.revoke(lease).await);
    }
    for reply in acquire_many(&store, (1..=32).map(|n| format!("k{n}"))).await {
        reply.unwrap();
    }
}

#[tokio::test]
async fn lock_takes_its_key_again() {
    let setting = setting().await;
    let client = client(&setting.patient).await;
    let mut keys = Vec::new();
    for _ in 0..2 {
        let guard = client.lock("k").acquire().await.unwrap();
        keys.extend(setting.patient.proofs(&guard).unwrap());
        guard.release().await.unwrap();
        let lock = client.rw_lock("rw");
        let readers = [
            lock.read().acquire().await.unwrap(),
            lock.read().acquire().await.unwrap(),
        ];
        for reader in readers {
            keys.extend(setting.patient.proofs(&reader).unwrap());
            reader.release().await.unwrap();
        }
    }
    let (first, second) = keys.split_at(3);
    for (first, second) in first.iter().zip(second) {
        assert_eq!(first.key, second.key);
        assert!(
            first.create_revision < second.create_revision,
            "{first:?} {second:?}"
        );
    }
    assert_ne!(first[1].key, first[2].key);
}

#[tokio::test]
async fn grant_that_another_one_followed_is_not_renewed_by_it() {
    let setting = setting().await;
    let store = setting.patient.clone();
    granted(store.clone().acquire(ask("k", 1, LEASE)).await);
    let other = setting.patient_beside().await;
    assert!(other.force_release("k".into()).await.unwrap());
    granted(store.clone().acquire(ask("k", 2, LEASE)).await);
    let both = vec![renewal("k", 1, LEASE), renewal("k", 2, LEASE)];
    let renewed = store.clone().renew(both).await.unwrap();
    assert!(
        matches!(renewed[..], [Ok(Renewal::Gone), Ok(Renewal::RenewedFor(_))]),
        "{renewed:?}"
    );
    let reply = store.clone().release(release("k", 1)).await.unwrap();
    assert_eq!(reply, ReleaseReply::NotHeld { repeated: false });
    assert_eq!(setting.held().await.len(), 1);
}

#[tokio::test]
async fn reader_of_another_process_is_released_by_its_id() {
    let setting = setting().await;
    let reader = |number| {
        let grant = ask("k", number, LEASE).grant;
        AcquireRequest::new(Kind::Read, "k".into(), grant, LEASE)
    };
    for number in [1, 2] {
        granted(setting.patient.clone().acquire(reader(number)).await);
    }
    let request = |number| ReleaseRequest::new(Kind::Read, "k".into(), reader(number).grant);
    let other = setting.patient_beside().await;
    let reply = other.clone().release(request(2)).await.unwrap();
    assert_eq!(reply, ReleaseReply::Released { receivers: None });
    let reply = other.release(request(3)).await.unwrap();
    assert_eq!(reply, ReleaseReply::NotHeld { repeated: false });
    let left = setting.patient.clone().inspect("k".into()).await.unwrap();
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].id, reader(1).grant.to_string());
}

#[tokio::test]
async fn min_hold_outlives_the_process_and_ends() {
    let setting = setting().await;
    let gone = connected(setting.server.builder(&setting.namespace).timeout(PATIENCE)).await;
    granted(gone.clone().acquire(ask("k", 1, LEASE)).await);
    let mut kept = release("k", 1);
    kept.keep_for = 2 * SEC;
    let reply = gone.clone().release(kept).await.unwrap();
    assert_eq!(reply, ReleaseReply::Released { receivers: None });
    drop(gone);
    let busy = setting.patient.clone().acquire(ask("k", 2, LEASE)).await.unwrap();
    assert!(matches!(busy, AcquireReply::Busy(_)), "{busy:?}");
    eventually("the lock is free", async || setting.held().await.is_empty()).await;
}

#[tokio::test]
async fn several_locks_are_one_transaction() {
    let setting = setting().await;
    let client = setting.beside().await;
    let before = setting.proxy.count(acquires);
    let guard = client.multi(["a", "b", "c"]).acquire().await.unwrap();
    assert_eq!(setting.proxy.count(acquires), before + 1);
    assert_eq!(setting.held().await.len(), 3);
    guard.release().await.unwrap();
}

#[tokio::test]
async fn transaction_of_the_holder_is_carried_out_and_that_of_a_former_one_is_not() {
    let setting = setting().await;
    let (locks, other) = (&setting.patient, client(&setting.hasty).await);
    let client = client(locks).await;
    let written = format!("{}written", setting.namespace);
    let guard = client.lock("k").acquire().await.unwrap();
    let proofs = locks.proofs(&guard).unwrap();
    assert_eq!(
        proofs[0].create_revision.unsigned_abs(),
        guard.fencing_token() >> 16
    );
    assert_eq!(setting.held().await[0].0.as_bytes(), proofs[0].key);
    let committed = locks
        .transaction(&guard)
        .unwrap()
        .put(&*written, "1")
        .commit()
        .await
        .unwrap();
    // A condition of the user's own.
    let changed = locks
        .transaction(&guard)
        .unwrap()
        .when_unchanged(&written, committed.revision - 1);
    let refused = changed.put(&*written, "2").commit().await.unwrap_err();
    assert!(matches!(refused, TransactionError::Condition), "{refused:?}");
    let unchanged = locks
        .transaction(&guard)
        .unwrap()
        .when_unchanged(&written, committed.revision);
    unchanged.put(&*written, "3").commit().await.unwrap();
    // Prepared while the lock was held, and carried out after another process has it.
    let late = locks.transaction(&guard).unwrap().put(&*written, "late");
    // Renewals of a lease with so many locks share a look, which does not know of what comes.
    let beside: Vec<_> = (0..60)
        .map(|n| client.lock(format!("beside {n}")).acquire())
        .collect();
    let beside = join_all(beside).await;
    let one = beside[0].as_ref().unwrap();
    sleep(SEC).await;
    // Renewed again.
    one.ensure(29 * SEC).await.unwrap();
    assert!(other.force_release("k").await.unwrap());
    let next = other.lock("k").acquire().await.unwrap();
    let lost = late.commit().await.unwrap_err();
    assert!(
        matches!(&lost, TransactionError::Lost { key, .. } if key.as_str() == "k"),
        "{lost:?}"
    );
    assert_eq!(guard.state(), HoldState::Lost(Loss::Gone), "and the guard");
    let value = setting.server.keys(&written).await;
    assert_eq!(value, [(written.clone(), "3".to_owned())]);
    next.release().await.unwrap();
}

#[tokio::test]
async fn transaction_of_several_locks_needs_all_of_them() {
    let setting = setting().await;
    let (locks, written) = (&setting.patient, format!("{}written", setting.namespace));
    let client = client(locks).await;
    let guard = client.multi(["a", "b"]).acquire().await.unwrap();
    let transaction = || locks.transaction(&guard).unwrap().put(&*written, "x");
    transaction().commit().await.unwrap();
    let prepared = transaction();
    assert!(client.force_release("b").await.unwrap());
    let lost = prepared.commit().await.unwrap_err();
    assert!(
        matches!(&lost, TransactionError::Lost { key, .. } if key.as_str() == "b"),
        "{lost:?}"
    );
}

#[tokio::test]
async fn user_with_a_wrong_password_or_without_rights_is_told() {
    let server = Etcd::start().await;
    let namespace = "shop/";
    server.add_user("root", "secret", None).await;
    server.add_user("shop", "p@ss/word", Some(namespace)).await;
    server.enable_authentication("secret").await;
    let open = |login: &str, namespace: &str| {
        let url = server
            .url(namespace)
            .replace("etcd://", &format!("etcd://{login}"));
        let builder = LockClient::builder().scheme(dlock_etcd::scheme()).url(url);
        builder.timeout(PATIENCE).build()
    };
    let client = open("shop:p%40ss%2Fword@", namespace)
        .await
        .expect("the login is right");
    let guard = client.lock("k").acquire().await.unwrap();
    guard.release().await.unwrap();
    let wrong = open("shop:other@", namespace).await.map(|_| ()).unwrap_err();
    assert!(matches!(wrong, Error::Refused { .. }), "{wrong:?}");
    assert!(!wrong.to_string().contains("other"), "{wrong}");
    let elsewhere = open("shop:p%40ss%2Fword@", "bank/")
        .await
        .expect("the login is right");
    let denied = elsewhere.lock("k").acquire().await.unwrap_err();
    assert!(denied.to_string().contains("permission denied"), "{denied}");
    let denied = match open("", namespace).await {
        // Before 3.6 a client without a login connects, and is refused at its first lock.
        Ok(anonymous) => anonymous.lock("k").acquire().await.unwrap_err(),
        Err(error) => error,
    };
    assert!(denied.to_string().contains("user"), "{denied}");
}

#[tokio::test]
async fn encrypted_connection_needs_the_authority_and_shows_its_certificate() {
    let certificates = Certificates::new();
    let server = Etcd::start_encrypted(&certificates).await;
    let builder = || {
        let address = format!("localhost:{}", server.port());
        EtcdLocks::builder([address])
            .allow_old_server(true)
            .timeout(PATIENCE)
    };
    // The server accepts the certificate of these, so that only the client can refuse.
    let shown = || {
        let (certificate, key) = certificates.client.clone();
        builder().client_certificate(certificate, key)
    };
    let trusted = shown().ca_certificate(certificates.root.clone());
    let locks = trusted.connect().await.expect("it is trusted");
    let client = client(&Arc::new(locks)).await;
    client.lock("k").acquire().await.unwrap().release().await.unwrap();
    let strangers = Certificates::new();
    is_refused("UnknownIssuer", &shown).await;
    is_refused("BadSignature", || shown().ca_certificate(strangers.root.clone())).await;
    for refused in [
        builder().ca_certificate(certificates.root.clone()),
        builder().tls(true),
        builder(),
    ] {
        let error = refused.timeout(2 * SEC).connect().await.unwrap_err();
        assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
    }
}

/// It never connects, and in the end says so in these words: on a slow machine the time may be over before the reason is
/// known.
async fn is_refused(words: &str, builder: impl Fn() -> EtcdLocksBuilder) {
    eventually(words, || async {
        let error = builder().timeout(2 * SEC).connect().await.unwrap_err();
        assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
        error.to_string().contains(words)
    })
    .await;
}

#[tokio::test]
async fn server_whose_certificate_has_another_name_is_refused() {
    let certificates = Certificates::naming(&["localhost"]);
    let server = Etcd::start_encrypted(&certificates).await;
    let builder = |host: &str| {
        let (certificate, key) = certificates.client.clone();
        EtcdLocks::builder([format!("{host}:{}", server.port())])
            .allow_old_server(true)
            .ca_certificate(certificates.root.clone())
            .client_certificate(certificate, key)
    };
    let named = builder("localhost").timeout(PATIENCE).connect().await;
    named.expect("it is the name");
    is_refused("not valid for name", || builder("127.0.0.1")).await;
}

#[tokio::test]
async fn key_that_cannot_be_a_key_is_refused() {
    let setting = setting().await;
    let request = AcquireRequest::new(
        Kind::Mutex,
        dlock::LockKey::raw("a\0b"),
        ask("k", 1, LEASE).grant,
        LEASE,
    );
    let error = setting.patient.clone().acquire(request).await.unwrap_err();
    assert_eq!((error.outcome, error.reason), (Outcome::NotDone, Reason::Refused));
}
