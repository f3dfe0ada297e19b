//! Keys that stay taken after their release.

use std::time::Instant;

use dlock::store::Kind;

use crate::case::Case;
use crate::promise::{HOLDERS, Promise};
use crate::verbs::{Reply, is_released};

const KEPT: Promise = Promise("keep_for: Keep the key taken for this long");

pub async fn released_lock_stays_taken_for_min_hold(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Mutex, &key, case.long()).await;
    let mut release = held.release();
    release.keep_for = case.short();
    let called = Instant::now();
    let reply = a.release(release).await;
    KEPT.holds(matches!(reply, Ok(reply) if is_released(reply)), reply);
    // On a slow machine the first question may come when the time is over, and get the lock.
    let reply = b.asks(Kind::Mutex, &key, case.long()).await;
    if reply.is_busy() {
        case.comes_free(&b, Kind::Mutex, &key, KEPT).await;
    }
    KEPT.holds(called.elapsed() >= case.short(), called.elapsed());
}

pub async fn min_hold_does_not_prolong_lease(case: Case) {
    let promise = Promise("A lock that is kept after its release is kept no longer than its lease");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Mutex, &key, case.short()).await;
    let mut release = held.release();
    release.keep_for = 100 * case.long();
    // If the lease was over before the release arrived, there is nothing to keep.
    let _ = a.release(release).await;
    let reply = b.asks(Kind::Mutex, &key, case.long()).await;
    let left = match &reply {
        Reply::Busy(left) => *left,
        _ => Some(case.tick()),
    };
    promise.holds(left.is_some_and(|left| left <= case.short() + case.tick()), reply);
}

/// Of each kind: neither a renewal after the release nor another copy of the release extends it.
pub async fn nothing_prolongs_a_min_hold(case: Case) {
    let promise =
        Promise("renew: Gone where the grant was released and keeps the key for a while; nothing is changed");
    let (peer, keep) = (case.peer().await, case.long() / 2);
    for kind in [
        Kind::Mutex,
        Kind::Fair,
        Kind::Fenced,
        Kind::Read,
        Kind::Write,
        Kind::Permit,
    ] {
        if !case.has(kind) {
            continue;
        }
        let key = case.key(&kind.to_string());
        let mut request = peer.request(kind, &key, case.long());
        if kind == Kind::Permit {
            (request.permits, request.amount) = (Some(3), 2);
        }
        let held = peer.takes_as(request).await;
        let mut release = held.release();
        release.keep_for = keep;
        assert!(peer.release(release.clone()).await.is_ok_and(is_released));
        promise.holds(!peer.renews(&held, case.long()).await, (kind, "Renewed"));
        release.keep_for = case.long();
        let again = peer.release(release).await;
        assert!(again.is_ok(), "{again:?}");
        if case.can().inspection {
            let holders = peer.inspect(&key).await.expect("the store inspects");
            HOLDERS.same(holders.len(), held.amount as usize);
            let ends = |left| left <= keep + case.tick();
            // A store may keep permits under ids without an owner, and then cannot report them as released.
            let is_kept = |holds| holds == 0 || kind == Kind::Permit;
            let right =
                (holders.iter()).all(|holder| is_kept(holder.holds) && holder.remaining.is_some_and(ends));
            KEPT.holds(right, (kind, keep, &holders));
        }
    }
}
