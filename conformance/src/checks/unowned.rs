//! Permits without recorded holders.

use dlock::store::Kind;
use dlock::store::counter::{CounterReply, CounterStep};

use crate::case::Case;
use crate::promise::Promise;

pub async fn permits_without_owner_are_a_number(case: Case) {
    let promise = Promise("Unowned: permits of a semaphore that does not record its holders");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let mut request = a.request(Kind::Unowned, &key, case.long());
    (request.permits, request.amount) = (Some(2), 2);
    a.takes_as(request).await;
    let reply = b.asks(Kind::Unowned, &key, case.long()).await;
    promise.holds(reply.is_busy(), reply);
    // Another client releases one of them.
    let give = CounterStep::Give { amount: 1 };
    let is = CounterReply::Permits {
        free: Some(1),
        held: 0,
    };
    promise.same(b.count(&key, give).await.ok(), Some(is));
    let reply = b.asks(Kind::Unowned, &key, case.long()).await;
    promise.holds(reply.is_granted(), reply);
}

pub async fn released_acquire_of_permits_without_owner_is_undone(case: Case) {
    let promise = Promise("A release of an acquire of unknown outcome undoes it");
    let (peer, key) = (case.peer().await, case.key("k"));
    let mut request = peer.request(Kind::Unowned, &key, case.long());
    (request.permits, request.amount) = (Some(3), 2);
    let held = peer.takes_as(request).await;
    promise.holds(peer.gives(&held).await, "NotHeld");
    promise.holds(!peer.gives(&held).await, "undone twice");
    let is = CounterReply::Permits {
        free: Some(3),
        held: 0,
    };
    promise.same(peer.count(&key, CounterStep::Permits).await.ok(), Some(is));
}

pub async fn released_acquire_adds_nothing_to_a_semaphore_made_anew(case: Case) {
    let promise = Promise("A release of an acquire whose semaphore was deleted since returns no permit");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let mut request = a.request(Kind::Unowned, &key, case.long());
    (request.permits, request.amount) = (Some(3), 2);
    let held = a.takes_as(request).await;
    let steps = [
        CounterStep::DeletePermits,
        CounterStep::SetPermits {
            total: 3,
            only_unset: true,
        },
    ];
    for step in steps {
        promise.same(b.count(&key, step).await.ok(), Some(CounterReply::Done(true)));
    }
    promise.holds(!a.gives(&held).await, "released");
    let is = |free| {
        Some(CounterReply::Permits {
            free: Some(free),
            held: 0,
        })
    };
    promise.same(a.count(&key, CounterStep::Permits).await.ok(), is(3));
    // Later acquires are undone as ever.
    let mut request = a.request(Kind::Unowned, &key, case.long());
    request.amount = 2;
    let held = a.takes_as(request).await;
    promise.same(b.count(&key, CounterStep::Permits).await.ok(), is(1));
    promise.holds(a.gives(&held).await, "NotHeld");
    promise.same(b.count(&key, CounterStep::Permits).await.ok(), is(3));
}

pub async fn expired_permits_are_free_for_acquires_without_owner(case: Case) {
    let promise = Promise("An ended lease is ended for every verb");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    if !case.has(Kind::Permit) {
        return case.leave_out("the store has no permits with owners");
    }
    a.takes(Kind::Permit, &key, case.short()).await;
    case.comes_free(&b, Kind::Unowned, &key, promise).await;
}

pub async fn total_that_an_acquire_sets_wakes_watch(case: Case) {
    super::permits::wakes_by_a_total(case, Kind::Unowned).await;
}
