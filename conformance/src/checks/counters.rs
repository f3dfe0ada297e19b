//! Steps on the number of permits.

use dlock::store::Kind;
use dlock::store::counter::{CounterReply, CounterStep};

use crate::case::Case;
use crate::promise::Promise;

fn permits(free: i64, held: u64) -> CounterReply {
    CounterReply::Permits {
        free: Some(free),
        held,
    }
}

pub async fn permits_can_be_set_once_and_changed(case: Case) {
    let promise = Promise("CounterStep: how many permits exist");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let nothing = CounterReply::Permits { free: None, held: 0 };
    promise.same(a.count(&key, CounterStep::Permits).await.ok(), Some(nothing));
    let set = |total, only_unset| CounterStep::SetPermits { total, only_unset };
    promise.same(
        a.count(&key, set(5, true)).await.ok(),
        Some(CounterReply::Done(true)),
    );
    promise.same(
        b.count(&key, set(7, true)).await.ok(),
        Some(CounterReply::Done(false)),
    );
    promise.same(
        b.count(&key, CounterStep::Permits).await.ok(),
        Some(permits(5, 0)),
    );
    let mut request = a.request(Kind::Permit, &key, case.long());
    request.amount = 2;
    let held = a.takes_as(request).await;
    promise.same(
        b.count(&key, CounterStep::Permits).await.ok(),
        Some(permits(3, 2)),
    );
    let add = |by| CounterStep::AddPermits { by, unowned: false };
    promise.same(b.count(&key, add(1)).await.ok(), Some(permits(4, 2)));
    promise.same(
        b.count(&key, add(-7)).await.ok(),
        Some(CounterReply::TooFew { is: 6 }),
    );
    promise.same(
        b.count(&key, set(1, false)).await.ok(),
        Some(CounterReply::Done(true)),
    );
    // More permits are held than exist, and become available again.
    promise.same(
        b.count(&key, CounterStep::Permits).await.ok(),
        Some(permits(-1, 2)),
    );
    assert!(a.gives(&held).await);
    promise.same(
        b.count(&key, CounterStep::Permits).await.ok(),
        Some(permits(1, 0)),
    );
    promise.same(
        b.count(&key, CounterStep::DeletePermits).await.ok(),
        Some(CounterReply::Done(true)),
    );
    promise.same(
        b.count(&key, CounterStep::DeletePermits).await.ok(),
        Some(CounterReply::Done(false)),
    );
    promise.same(a.count(&key, CounterStep::Permits).await.ok(), Some(nothing));
}

pub async fn repeated_counter_step_is_carried_out_once(case: Case) {
    let promise =
        Promise("A repeated step with the same id gets the first reply again, and is carried out once");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let set = CounterStep::SetPermits {
        total: 2,
        only_unset: false,
    };
    a.count(&key, set).await.expect("the store counts");
    let (id, add) = (
        a.grant(),
        CounterStep::AddPermits {
            by: 3,
            unowned: false,
        },
    );
    for peer in [&a, &a, &b] {
        promise.same(peer.count_as(&key, id, add).await.ok(), Some(permits(5, 0)));
    }
    promise.same(
        b.count(&key, CounterStep::Permits).await.ok(),
        Some(permits(5, 0)),
    );
}

pub async fn drained_permits_are_gone(case: Case) {
    let promise = Promise("Drain: Takes all free permits");
    let (peer, key) = (case.peer().await, case.key("k"));
    let set = CounterStep::SetPermits {
        total: 4,
        only_unset: false,
    };
    peer.count(&key, set).await.expect("the store counts");
    promise.same(
        peer.count(&key, CounterStep::Drain).await.ok(),
        Some(CounterReply::Number(4)),
    );
    promise.same(
        peer.count(&key, CounterStep::Drain).await.ok(),
        Some(CounterReply::Number(0)),
    );
    promise.same(
        peer.count(&key, CounterStep::Permits).await.ok(),
        Some(permits(0, 0)),
    );
}
