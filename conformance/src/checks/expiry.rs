//! Leases that end.

use std::time::Instant;

use dlock::store::Kind;

use crate::case::Case;
use crate::promise::Promise;

pub async fn lease_runs_out(case: Case) {
    let promise = Promise("lease: How long the store keeps the grant unless it is renewed");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Mutex, &key, case.short()).await;
    case.comes_free(&b, Kind::Mutex, &key, promise).await;
    promise.holds(!a.gives(&held).await, "the grant is there still");
}

pub async fn lease_lasts(case: Case) {
    let promise = Promise("A lease does not end before its time");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let lease = 3 * case.short();
    let called = Instant::now();
    a.takes(Kind::Mutex, &key, lease).await;
    // A store counts from when it granted the lock, which was after the call.
    loop {
        let reply = b.asks(Kind::Mutex, &key, case.short()).await;
        if called.elapsed() >= lease {
            return;
        }
        promise.holds(reply.is_busy(), (called.elapsed(), reply));
        tokio::time::sleep(case.tick() / 2).await;
    }
}
