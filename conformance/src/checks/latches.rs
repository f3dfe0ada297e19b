//! Counters that callers wait for until they reach zero.

use dlock::store::Kind;
use dlock::store::counter::{CounterReply, CounterStep};

use crate::case::Case;
use crate::promise::Promise;

pub async fn latch_counts_down_to_zero(case: Case) {
    let promise = Promise("CountDown: One less; replies the remaining Number, or TooFew at zero");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let too_few = CounterReply::TooFew { is: 0 };
    promise.same(
        a.count(&key, CounterStep::Count).await.ok(),
        Some(CounterReply::Number(0)),
    );
    promise.same(a.count(&key, CounterStep::CountDown).await.ok(), Some(too_few));
    a.count(&key, CounterStep::SetCount { count: 3 })
        .await
        .expect("the store counts");
    for (peer, left) in [(&a, 2), (&b, 1), (&a, 0)] {
        promise.same(
            peer.count(&key, CounterStep::CountDown).await.ok(),
            Some(CounterReply::Number(left)),
        );
        promise.same(
            b.count(&key, CounterStep::Count).await.ok(),
            Some(CounterReply::Number(left)),
        );
    }
    promise.same(b.count(&key, CounterStep::CountDown).await.ok(), Some(too_few));
}

pub async fn latch_is_set_once(case: Case) {
    let promise = Promise("SetCount: Begins a latch if none exists");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let set = |count| CounterStep::SetCount { count };
    promise.same(a.count(&key, set(2)).await.ok(), Some(CounterReply::Done(true)));
    promise.same(b.count(&key, set(5)).await.ok(), Some(CounterReply::Done(false)));
    promise.same(
        b.count(&key, CounterStep::Count).await.ok(),
        Some(CounterReply::Number(2)),
    );
    promise.same(
        b.count(&key, CounterStep::DeleteLatch).await.ok(),
        Some(CounterReply::Done(true)),
    );
    promise.same(
        b.count(&key, CounterStep::DeleteLatch).await.ok(),
        Some(CounterReply::Done(false)),
    );
    promise.same(b.count(&key, set(5)).await.ok(), Some(CounterReply::Done(true)));
}

pub async fn repeated_count_down_counts_once(case: Case) {
    let promise =
        Promise("A repeated step with the same id gets the first reply again, and is carried out once");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    a.count(&key, CounterStep::SetCount { count: 2 })
        .await
        .expect("the store counts");
    for last in [1, 0] {
        let id = a.grant();
        for peer in [&a, &b] {
            let reply = peer.count_as(&key, id, CounterStep::CountDown).await.ok();
            promise.same(reply, Some(CounterReply::Number(last)));
        }
    }
}

pub async fn latch_wakes_waiters_at_zero(case: Case) {
    let promise = Promise("A latch wakes its waiters when its count is zero, or it is deleted");
    if !case.can().notifications {
        return case.leave_out("the store has no notifications");
    }
    let ((a, b), key) = (case.peers().await, case.key("k"));
    for end in [CounterStep::CountDown, CounterStep::DeleteLatch] {
        a.count(&key, CounterStep::SetCount { count: 1 })
            .await
            .expect("the store counts");
        let mut watch = case.watches(b.watch(Kind::Latch, &key, b.grant()), promise).await;
        a.count(&key, end).await.expect("the store counts");
        case.hears(&mut watch, promise).await;
    }
}
