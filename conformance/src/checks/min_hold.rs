//! Keys that stay taken after their release.

use std::time::Instant;

use dlock::store::Kind;

use crate::case::Case;
use crate::promise::Promise;
use crate::verbs::{Reply, is_released};

const KEPT: Promise = Promise("keep_for: Keep the key taken for this long yet");

pub async fn released_lock_stays_taken_for_min_hold(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Lock, &key, case.long()).await;
    let mut release = held.release();
    release.keep_for = case.short();
    let called = Instant::now();
    let reply = a.release(release).await;
    KEPT.holds(matches!(reply, Ok(reply) if is_released(reply)), reply);
    let reply = b.asks(Kind::Lock, &key, case.long()).await;
    KEPT.holds(reply.is_busy() || called.elapsed() >= case.short(), reply);
    case.comes_free(&b, Kind::Lock, &key, KEPT).await;
    KEPT.holds(called.elapsed() >= case.short(), called.elapsed());
}

pub async fn min_hold_does_not_prolong_lease(case: Case) {
    let promise = Promise("A lock that is kept after its release is kept no longer than its lease");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Lock, &key, case.short()).await;
    let mut release = held.release();
    release.keep_for = 100 * case.long();
    // Where the lease was over before this came there is nothing to be kept.
    let _ = a.release(release).await;
    let reply = b.asks(Kind::Lock, &key, case.long()).await;
    let left = match &reply {
        Reply::Busy(left) => *left,
        _ => Some(case.tick()),
    };
    promise.holds(left.is_some_and(|left| left <= case.short() + case.tick()), reply);
}

pub async fn renewal_of_lock_kept_by_min_hold_says_gone(case: Case) {
    let promise =
        Promise("renew: Gone where the grant was released and keeps the key for a while; nothing is changed");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Lock, &key, case.long()).await;
    let mut release = held.release();
    release.keep_for = case.short();
    assert!(a.release(release).await.is_ok_and(is_released));
    promise.holds(!a.renews(&held, case.long()).await, "Renewed");
    case.comes_free(&b, Kind::Lock, &key, promise).await;
}
