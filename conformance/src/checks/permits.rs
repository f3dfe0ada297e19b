//! Permits of a semaphore, each with a lease.

use dlock::LockKey;
use dlock::store::{AcquireRequest, Kind, ReleaseRequest};

use crate::case::Case;
use crate::promise::Promise;
use crate::verbs::{Held, Peer, Reply};

const NUMBER: Promise = Promise("permits: how many exist in all, unless the semaphore has a number already");
const ALL_OR_NONE: Promise = Promise("amount: how many to take, all or none");

fn ask(case: &Case, peer: &Peer, key: &LockKey, total: u32, amount: u32) -> AcquireRequest {
    let mut request = peer.request(Kind::Permit, key, case.long());
    request.permits = Some(total);
    request.amount = amount;
    request
}

async fn reply(peer: &Peer, request: AcquireRequest) -> Reply {
    let reply = peer.acquire(request).await;
    reply.unwrap_or_else(|error| panic!("the store failed to acquire permits: {error:?}"))
}

pub async fn permits_are_granted_up_to_their_number(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let first = a.takes_as(ask(&case, &a, &key, 2, 1)).await;
    b.takes_as(ask(&case, &b, &key, 2, 1)).await;
    for peer in [&a, &b] {
        let reply = reply(peer, ask(&case, peer, &key, 2, 1)).await;
        NUMBER.holds(reply.is_busy(), reply);
    }
    assert!(a.gives(&first).await);
    b.takes_as(ask(&case, &b, &key, 2, 1)).await;
    let reply = reply(&a, ask(&case, &a, &key, 2, 1)).await;
    NUMBER.holds(reply.is_busy(), reply);
}

pub async fn several_permits_are_granted_together_or_not_at_all(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes_as(ask(&case, &a, &key, 5, 3)).await;
    let refused = reply(&b, ask(&case, &b, &key, 5, 3)).await;
    ALL_OR_NONE.holds(refused.is_busy(), refused);
    let both = b.takes_as(ask(&case, &b, &key, 5, 2)).await;
    ALL_OR_NONE.holds(a.renews(&held, case.long()).await, "the first grant is gone");
    assert!(a.gives(&held).await);
    let again = a.takes_as(ask(&case, &a, &key, 5, 3)).await;
    assert!(b.gives(&both).await && a.gives(&again).await);
    b.takes_as(ask(&case, &b, &key, 5, 5)).await;
}

pub async fn first_number_of_permits_stays(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let mut unsaid = a.request(Kind::Permit, &key, case.long());
    unsaid.permits = None;
    let refused = reply(&a, unsaid).await;
    Promise("A semaphore without a number of permits grants none").holds(refused.is_busy(), refused);
    a.takes_as(ask(&case, &a, &key, 1, 1)).await;
    let refused = reply(&b, ask(&case, &b, &key, 10, 1)).await;
    NUMBER.holds(refused.is_busy(), refused);
}

pub async fn permits_return_with_release_and_expiry(case: Case) {
    let promise = Promise("Permits become available when the lease of a lost holder ends");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let mut short = ask(&case, &a, &key, 3, 3);
    short.lease = case.short();
    let short = a.takes_as(short).await;
    let begun = std::time::Instant::now();
    let all = loop {
        let request = ask(&case, &b, &key, 3, 3);
        let asked = Held::asked_by(&request);
        if reply(&b, request).await.is_granted() {
            break asked;
        }
        promise.holds(begun.elapsed() < case.patience(), begun.elapsed());
        tokio::time::sleep(case.tick() / 2).await;
    };
    promise.holds(!a.renews(&short, case.long()).await, "the old grant was renewed");
    promise.holds(!a.gives(&short).await, "the old grant was released");
    promise.holds(b.gives(&all).await, "the new grant is gone");
    a.takes_as(ask(&case, &a, &key, 3, 3)).await;
}

pub async fn more_permits_than_there_are_is_its_own_reply(case: Case) {
    let promise =
        Promise("TooFewPermits: fewer permits exist than were requested; such a waiter blocks no other");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes_as(ask(&case, &a, &key, 2, 1)).await;
    let mut many = ask(&case, &b, &key, 2, 3);
    many.waiter = Some(b.grant());
    promise.same(reply(&b, many.clone()).await, Reply::TooFewPermits);
    a.takes_as(ask(&case, &a, &key, 2, 1)).await;
    assert!(a.gives(&held).await);
    promise.same(reply(&b, many).await, Reply::TooFewPermits);
    a.takes_as(ask(&case, &a, &key, 2, 1)).await;
}

pub async fn waiter_for_many_permits_is_not_overtaken(case: Case) {
    let promise = Promise("waiter: Its position among waiters for different amounts");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes_as(ask(&case, &a, &key, 2, 1)).await;
    let mut many = ask(&case, &b, &key, 2, 2);
    let waiter = b.grant();
    many.waiter = Some(waiter);
    let busy = reply(&b, many.clone()).await;
    assert!(busy.is_busy(), "{busy:?}");
    let few = reply(&a, ask(&case, &a, &key, 2, 1)).await;
    promise.holds(few.is_busy(), few);
    // The waiter gives up, and tries again.
    let mut gives_up = ReleaseRequest::new(Kind::Permit, key.clone(), waiter);
    gives_up.amount = 2;
    let gone = b.release(gives_up).await;
    assert!(gone.is_ok(), "{gone:?}");
    let few = a.takes_as(ask(&case, &a, &key, 2, 1)).await;
    assert!(a.gives(&few).await);
    many.grant = b.grant();
    many.waiter = Some(b.grant());
    let busy = reply(&b, many.clone()).await;
    assert!(busy.is_busy(), "{busy:?}");
    assert!(a.gives(&held).await);
    let few = reply(&a, ask(&case, &a, &key, 2, 1)).await;
    promise.holds(few.is_busy(), few);
    many.grant = b.grant();
    let served = reply(&b, many).await;
    promise.holds(served.is_granted(), served);
}

pub async fn release_of_permits_wakes_watch(case: Case) {
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

pub async fn total_that_an_acquire_sets_wakes_watch(case: Case) {
    wakes_by_a_total(case, Kind::Permit).await;
}

/// Whether an acquire with a total wakes a caller that named none.
pub(super) async fn wakes_by_a_total(case: Case, kind: Kind) {
    let promise = Promise("permits: an acquire that sets the total wakes the waiters without one");
    if !case.can().notifications {
        return case.leave_out("the store has no notifications");
    }
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let mut watch = case.watches(b.watch(kind, &key, b.grant()), promise).await;
    let mut request = a.request(kind, &key, case.long());
    request.permits = Some(2);
    a.takes_as(request).await;
    case.hears(&mut watch, promise).await;
}
