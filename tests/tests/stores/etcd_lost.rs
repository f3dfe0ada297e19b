//! Locks on etcd where a single request or reply is lost: each request that dlock sends, in each way in which it can be.

use std::sync::Arc;

use dlock::{Lock, LockClient};
use dlock_tests::etcd::{Call, Etcd};
use dlock_tests::faults::{PATIENCE, in_rounds, is_confirmed, within};
use dlock_tests::{NetFault, eventually};

use crate::etcd_conformance::Namespace;
use crate::etcd_support::{LEASE, SEC, Setting, acquires, client, setting, setting_on};
use crate::losses::LOSSES;
use crate::scenes::in_scenes;

/// Whether it is the request that is lost.
type Matches = fn(&Call) -> bool;

/// Acquires a lock for this time while one of the requests is lost, renews it and releases it. Returns whether it was lost.
async fn is_held_once(
    setting: &Setting,
    fault: NetFault,
    what: &str,
    lock: &Lock,
    there: &LockClient,
) -> bool {
    let guard = within(PATIENCE, what, lock.acquire()).await.unwrap();
    let token = guard.fencing_token();
    let busy = there.lock("k").try_acquire().await.unwrap_err();
    assert!(busy.is_busy(), "{what}: {busy}");
    is_confirmed(&guard).await;
    assert_eq!(setting.held().await.len(), 1, "{what}");
    within(PATIENCE, what, guard.release()).await.unwrap();
    let next = within(PATIENCE, what, there.lock("k").acquire()).await.unwrap();
    assert!(next.fencing_token() > token, "{what}");
    next.release().await.unwrap();
    assert_eq!(setting.held().await, [], "{what}");
    fault.fired()
}

#[tokio::test]
async fn lost_requests_and_replies_leave_nothing_wrong() {
    let setting = setting().await;
    let (here, there) = (client(&setting.hasty).await, client(&setting.patient).await);
    let requests: [(&str, Matches); 6] = [
        ("the lease of a session", |call| call.is("LeaseGrant")),
        ("its epoch", |call| call.is("Put")),
        ("an acquire", acquires),
        ("a keep-alive", |call| call.is("LeaseKeepAlive")),
        ("a look at a lease", |call| call.is("LeaseTimeToLive")),
        ("a release", |call| call.is("Txn") && !call.has("held ")),
    ];
    let mut lease = LEASE;
    for (request, is) in requests {
        for loss in LOSSES {
            let what = format!("{request}, {loss:?}");
            // No session has this lease yet.
            lease += SEC;
            let lock = here.lock("k").lease(lease);
            let fault = loss.of(&setting.proxy, is);
            assert!(
                is_held_once(&setting, fault, &what, &lock, &there).await,
                "{what}: no such request"
            );
        }
    }
}

/// It takes the time for which the lock is kept, thrice.
#[tokio::test]
async fn lost_request_or_reply_of_a_release_that_keeps_the_lock_leaves_nothing_wrong() {
    let setting = setting().await;
    let (here, there) = (client(&setting.hasty).await, client(&setting.patient).await);
    let lock = here.lock("k").min_hold(2 * SEC);
    for loss in LOSSES {
        in_rounds("it is released before its time", async || {
            let fault = loss.of(&setting.proxy, |call| call.is("Txn") && call.has("kept "));
            let what = format!("{loss:?}");
            let lost = is_held_once(&setting, fault, &what, &lock, &there).await;
            setting.proxy.heal();
            if lost { Ok(()) } else { Err(what) }
        })
        .await;
    }
}

in_scenes! { Namespace:
    fn lost_request_or_reply_of_a_forced_release_ends_the_lock_or_is_told() = lost_request_or_reply_of_a_forced_release_ends_the_lock_or_is_told(Etcd::shared());
}

/// The shortest session is idle after two seconds, and its lease is over two seconds later.
#[tokio::test]
async fn lost_end_of_an_idle_session_leaves_no_lease_behind() {
    let loses = LOSSES.map(async |loss| {
        let setting = setting_on(Arc::new(Etcd::start().await)).await;
        let here = client(&setting.hasty).await;
        let fault = loss.of(&setting.proxy, |call| call.is("LeaseRevoke"));
        let lock = here.lock("k").lease(2 * SEC);
        let guard = lock.acquire().await.unwrap();
        let token = guard.fencing_token();
        guard.release().await.unwrap();
        fault.caught().await;
        let again = within(PATIENCE, "it goes on", lock.acquire()).await.unwrap();
        assert!(again.fencing_token() > token, "{loss:?}");
        again.release().await.unwrap();
        eventually("no lease is left", async || {
            setting.server.leases().await.is_empty()
        })
        .await;
        assert_eq!(setting.server.keys(&setting.namespace).await, [], "{loss:?}");
    });
    futures_util::future::join_all(loses).await;
}
