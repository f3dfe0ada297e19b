//! Releasing locks.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll};

use dlock::store::{AcquireRequest, Kind, ReleaseRequest};
use futures_util::task::noop_waker;

use crate::case::Case;
use crate::promise::Promise;
use crate::verbs::{Peer, is_released};

const ONLY_ITS_GRANT: Promise = Promise("release: The grant to end; no other is touched");
const NOT_HELD: Promise = Promise("release: NotHeld where the store knows no such grant");
const UNDONE: Promise = Promise(
    "For the id of an acquire of unknown outcome, release returns Ok only when that acquire can no longer take effect",
);

pub async fn second_release_says_not_held(case: Case) {
    let (peer, key) = (case.peer().await, case.key("k"));
    let held = peer.takes(Kind::Mutex, &key, case.long()).await;
    Promise("release: Released where the grant was there").holds(peer.gives(&held).await, "NotHeld");
    NOT_HELD.holds(!peer.gives(&held).await, "Released twice");
}

pub async fn release_of_unknown_grant_says_not_held(case: Case) {
    let (peer, key) = (case.peer().await, case.key("k"));
    let reply = peer
        .release(ReleaseRequest::new(Kind::Mutex, key, peer.grant()))
        .await;
    NOT_HELD.holds(matches!(reply, Ok(reply) if !is_released(reply)), reply);
}

pub async fn release_of_foreign_grant_changes_nothing(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Mutex, &key, case.long()).await;
    for peer in [&a, &b] {
        let request = ReleaseRequest::new(Kind::Mutex, key.clone(), peer.grant());
        let reply = peer.release(request).await;
        ONLY_ITS_GRANT.holds(matches!(reply, Ok(reply) if !is_released(reply)), reply);
    }
    let mut kept = ReleaseRequest::new(Kind::Mutex, key.clone(), b.grant());
    kept.keep_for = case.tick();
    if case.can().min_hold {
        let reply = b.release(kept).await;
        ONLY_ITS_GRANT.holds(matches!(reply, Ok(reply) if !is_released(reply)), reply);
    }
    let reply = b.asks(Kind::Mutex, &key, case.long()).await;
    ONLY_ITS_GRANT.holds(reply.is_busy(), reply);
    ONLY_ITS_GRANT.holds(a.gives(&held).await, "the holder's grant is gone");
}

pub async fn release_of_expired_grant_leaves_next_holder_alone(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let before = a.takes(Kind::Mutex, &key, case.short()).await;
    let after = case
        .comes_free(
            &b,
            Kind::Mutex,
            &key,
            Promise("A lease that is not renewed expires"),
        )
        .await;
    ONLY_ITS_GRANT.holds(!a.gives(&before).await, "Released, of a lease that was over");
    ONLY_ITS_GRANT.holds(b.gives(&after).await, "the next holder's grant is gone");
}

/// A caller may go away at any moment: the client releases what the acquire may have been granted.
pub async fn release_undoes_acquire_dropped_at_any_poll(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    for polls in 0..12 {
        let request = a.request(Kind::Mutex, &key, case.long());
        let release = released(&request);
        {
            let mut acquire = pin!(a.acquire(request));
            for _ in 0..polls {
                if poll(acquire.as_mut()).is_ready() {
                    break;
                }
                tokio::task::yield_now().await;
            }
        }
        is_undone(&case, &a, &b, &key, release).await;
    }
}

pub async fn released_acquire_can_no_longer_take_effect(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    for _ in 0..20 {
        let request = a.request(Kind::Mutex, &key, case.long());
        let release = released(&request);
        let acquire = a.acquire(request);
        is_undone(&case, &a, &b, &key, release).await;
        drop(acquire);
    }
}

fn poll(acquire: std::pin::Pin<&mut impl Future>) -> Poll<()> {
    acquire.poll(&mut Context::from_waker(&noop_waker())).map(drop)
}

fn released(request: &AcquireRequest) -> ReleaseRequest {
    ReleaseRequest::new(request.kind, request.key.clone(), request.grant)
}

async fn is_undone(case: &Case, a: &Peer, b: &Peer, key: &dlock::LockKey, release: ReleaseRequest) {
    let reply = a.release(release).await;
    UNDONE.holds(reply.is_ok(), reply);
    let next = b.request(Kind::Mutex, key, case.long());
    let back = released(&next);
    let reply = b.acquire(next).await;
    UNDONE.holds(reply.as_ref().is_ok_and(crate::verbs::Reply::is_granted), &reply);
    let reply = b.release(back).await;
    ONLY_ITS_GRANT.holds(matches!(reply, Ok(reply) if is_released(reply)), reply);
}
