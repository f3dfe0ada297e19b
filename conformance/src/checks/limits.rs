//! Permits below a limit that each acquire names, and the store does not keep.

use dlock::LockKey;
use dlock::store::counter::{CounterReply, CounterStep};
use dlock::store::{AcquireRequest, Kind};

use crate::case::Case;
use crate::promise::Promise;
use crate::verbs::{Peer, Reply};

const LIMIT: Promise = Promise("limit: the most that may be held when this is granted");

fn ask(case: &Case, peer: &Peer, key: &LockKey, limit: u32, amount: u32) -> AcquireRequest {
    let mut request = peer.request(Kind::Permit, key, case.long());
    (request.permits, request.limit) = (None, Some(limit));
    request.amount = amount;
    request
}

async fn is_busy(case: &Case, peer: &Peer, key: &LockKey, limit: u32, amount: u32) {
    let reply = peer.acquire(ask(case, peer, key, limit, amount)).await;
    LIMIT.holds(reply.as_ref().is_ok_and(Reply::is_busy), reply);
}

pub async fn limit_is_judged_in_each_acquire_and_not_stored(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    is_busy(&case, &a, &key, 0, 1).await;
    let one = a.takes_as(ask(&case, &a, &key, 2, 1)).await;
    let two = b.takes_as(ask(&case, &b, &key, 2, 1)).await;
    for peer in [&a, &b] {
        is_busy(&case, peer, &key, 2, 1).await;
        is_busy(&case, peer, &key, 1, 1).await;
        is_busy(&case, peer, &key, 4, 3).await;
        is_busy(&case, peer, &key, 4, 5).await;
    }
    // Each by its own limit, whatever the last one was.
    let more = b.takes_as(ask(&case, &b, &key, 4, 2)).await;
    is_busy(&case, &a, &key, 4, 1).await;
    assert!(b.gives(&more).await && a.gives(&one).await);
    is_busy(&case, &a, &key, 1, 1).await;
    let status = |held| CounterReply::Permits { free: None, held };
    LIMIT.same(a.count(&key, CounterStep::Permits).await.ok(), Some(status(1)));
    assert!(b.renews(&two, case.long()).await, "it is held by another grant");
    assert!(b.gives(&two).await);
    LIMIT.same(a.count(&key, CounterStep::Permits).await.ok(), Some(status(0)));
    // The permit of a crashed holder becomes available with the end of its lease.
    let mut short = ask(&case, &a, &key, 1, 1);
    short.lease = case.short();
    a.takes_as(short).await;
    let begun = std::time::Instant::now();
    loop {
        let reply = b.acquire(ask(&case, &b, &key, 1, 1)).await;
        if reply.as_ref().is_ok_and(Reply::is_granted) {
            break;
        }
        LIMIT.holds(begun.elapsed() < case.long(), reply);
        tokio::time::sleep(case.short() / 8).await;
    }
}

pub async fn limit_and_total_of_a_name_both_bind(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let set = CounterStep::SetPermits {
        total: 2,
        only_unset: false,
    };
    assert!(a.count(&key, set).await.is_ok());
    is_busy(&case, &a, &key, 9, 3).await;
    let two = a.takes_as(ask(&case, &a, &key, 9, 2)).await;
    is_busy(&case, &b, &key, 9, 1).await;
    assert!(a.gives(&two).await);
    b.takes_as(ask(&case, &b, &key, 1, 1)).await;
    is_busy(&case, &a, &key, 1, 1).await;
    let free = CounterReply::Permits {
        free: Some(1),
        held: 1,
    };
    LIMIT.same(a.count(&key, CounterStep::Permits).await.ok(), Some(free));
}

/// More permits than a store may end in one step.
pub async fn deletion_without_a_total_ends_all_permits(case: Case) {
    let promise = Promise("DeletePermits: ends all permits, and returns whether there were any");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let many = a.takes_as(ask(&case, &a, &key, 2000, 1000)).await;
    let more = b.takes_as(ask(&case, &b, &key, 2000, 1000)).await;
    for was_there in [true, false] {
        let reply = b.count(&key, CounterStep::DeletePermits).await;
        promise.same(reply.ok(), Some(CounterReply::Done(was_there)));
    }
    let none = CounterReply::Permits { free: None, held: 0 };
    promise.same(a.count(&key, CounterStep::Permits).await.ok(), Some(none));
    promise.holds(!a.gives(&many).await && !b.gives(&more).await, "they are held");
}

pub async fn release_below_a_limit_wakes_watch(case: Case) {
    let promise = Promise("release: wakes the waiters of the key");
    if !case.can().notifications {
        return case.leave_out("the store has no notifications");
    }
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes_as(ask(&case, &a, &key, 1, 1)).await;
    let mut watch = case
        .watches(b.watch(Kind::Permit, &key, b.grant()), promise)
        .await;
    assert!(a.gives(&held).await);
    case.hears(&mut watch, promise).await;
}
