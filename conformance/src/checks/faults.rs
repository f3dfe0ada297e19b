//! Stores with faults that the fixture injects.

use std::time::Instant;

use dlock::store::{Kind, ReleaseRequest};

use crate::case::Case;
use crate::fixture::Fault;
use crate::promise::Promise;
use crate::verbs::{Reply, is_not_done};

const BOUNDED: Promise = Promise("Every step ends in bounded time, with an error if need be");
const NOT_DONE: Promise = Promise("NotDone: the step was not carried out, and will not be");

pub async fn acquire_with_lost_reply_is_undone_by_release(case: Case) {
    let promise = Promise(
        "An acquire of unknown outcome is never resent; its release replies once the acquire can no longer take effect",
    );
    let ((a, b), key) = (case.peers().await, case.key("k"));
    // It is connected.
    a.asks(Kind::Mutex, &case.key("other"), case.long()).await;
    for _ in 0..3 {
        if !case.fault(Fault::LoseNextReply).await {
            return;
        }
        let request = a.request(Kind::Mutex, &key, case.long());
        let grant = request.grant;
        let reply = a.acquire(request).await;
        promise.holds(matches!(&reply, Err(error) if !is_not_done(error)), &reply);
        case.heal().await;
        let begun = Instant::now();
        while let Err(error) = a
            .release(ReleaseRequest::new(Kind::Mutex, key.clone(), grant))
            .await
        {
            promise.holds(begun.elapsed() < case.patience(), error);
            tokio::time::sleep(case.tick()).await;
        }
        let next = b.request(Kind::Mutex, &key, case.long());
        let back = ReleaseRequest::new(Kind::Mutex, key.clone(), next.grant);
        let next = b.acquire(next).await;
        promise.holds(matches!(next, Ok(Reply::Granted(_))), next);
        assert!(b.release(back).await.is_ok());
    }
}

pub async fn unreachable_store_fails_in_bounded_time(case: Case) {
    fails(&case, Fault::Cut).await;
}

pub async fn frozen_store_fails_in_bounded_time(case: Case) {
    fails(&case, Fault::Freeze).await;
}

async fn fails(case: &Case, fault: Fault) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Mutex, &case.key("held"), case.long()).await;
    if !case.fault(fault).await {
        return;
    }
    let request = a.request(Kind::Mutex, &key, case.long());
    let grant = request.grant;
    // A step that does not end panics.
    let acquire = a.acquire(request).await;
    BOUNDED.holds(acquire.is_err(), &acquire);
    let renewal = a.renew(vec![held.renewal(case.long())]).await;
    let renewed = renewal.iter().flatten().any(Result::is_ok);
    BOUNDED.holds(!renewed, renewal);
    let looked = a.inspect(&key).await;
    BOUNDED.holds(looked.is_err(), looked);
    let release = a
        .release(ReleaseRequest::new(Kind::Mutex, key.clone(), grant))
        .await;
    // What was certainly not granted is released without the store.
    let was_sent = !acquire.as_ref().is_err_and(is_not_done);
    BOUNDED.holds(release.is_err() || !was_sent, release);
    case.heal().await;
    let begun = Instant::now();
    if acquire.as_ref().is_err_and(is_not_done) {
        // Requests in flight arrive now.
        tokio::time::sleep(case.tick()).await;
        loop {
            match b.tries(Kind::Mutex, &key, case.long()).await {
                Ok(reply) => return NOT_DONE.holds(matches!(reply, Reply::Granted(_)), reply),
                Err(error) => BOUNDED.holds(begun.elapsed() < case.patience(), error),
            }
            tokio::time::sleep(case.tick()).await;
        }
    }
    while let Err(error) = a
        .release(ReleaseRequest::new(Kind::Mutex, key.clone(), grant))
        .await
    {
        BOUNDED.holds(begun.elapsed() < case.patience(), error);
        tokio::time::sleep(case.tick()).await;
    }
    let free = case.comes_free(&b, Kind::Mutex, &key, BOUNDED).await;
    assert!(b.gives(&free).await);
}

pub async fn restarted_store_serves_again(case: Case) {
    let promise = Promise("A restarted store serves its former clients");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    a.takes(Kind::Mutex, &key, case.short()).await;
    let mut watch = b.watch(Kind::Mutex, &key, b.grant());
    if case.can().notifications {
        case.hears(&mut watch, promise).await;
        case.settles(&mut watch).await;
    }
    if !case.fault(Fault::Restart).await {
        return;
    }
    let held = case.comes_free(&b, Kind::Mutex, &key, promise).await;
    if case.can().notifications {
        // The watch may have missed notifications: it is told to look, and then receives notifications of releases
        // again.
        case.hears(&mut watch, promise).await;
        case.settles(&mut watch).await;
    }
    assert!(b.gives(&held).await);
    if case.can().notifications {
        case.hears(&mut watch, promise).await;
    }
    case.comes_free(&a, Kind::Mutex, &key, promise).await;
}

pub async fn tokens_grow_though_clock_goes_back(case: Case) {
    super::tokens::grow_over(&case, Fault::ClockBack(10 * case.short())).await;
}
