//! A client on the store.

use std::time::{Duration, Instant};

use dlock::LockClient;
use dlock::store::Kind;

use crate::case::Case;
use crate::fixture::Fault;
use crate::promise::Promise;

async fn client(case: &Case, lease: Duration) -> LockClient {
    let builder = LockClient::builder()
        .shared_store(case.peer().await.store)
        .lease(lease);
    builder.build().await.expect("a client on the store")
}

pub async fn waiting_client_gets_released_lock(case: Case) {
    let promise = Promise("A waiting client is granted the lock when its holder releases it");
    let (a, b) = (client(&case, case.long()).await, client(&case, case.long()).await);
    let key = case.key("k");
    let mut last = 0;
    for round in 0..5 {
        let (holder, waiter) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
        let guard = holder.lock(&key).acquire().await.expect("a free lock");
        let lock = waiter.lock(&key).wait(case.patience());
        let waiting = tokio::spawn(async move { lock.acquire().await });
        tokio::time::sleep(case.tick()).await;
        let before = guard.fencing_token();
        guard.release().await.expect("a release");
        let guard = waiting.await.expect("the waiter runs");
        promise.holds(guard.is_ok(), guard.as_ref().err());
        let guard = guard.expect("it was granted");
        let token = guard.fencing_token();
        Promise("A fencing token is greater than every token of the key before")
            .holds(before > last && token > before, (last, before, token));
        last = token;
        guard.release().await.expect("a release");
    }
    a.shutdown(case.patience()).await;
    b.shutdown(case.patience()).await;
}

pub async fn downgrade_of_a_lost_write_lock_says_lost(case: Case) {
    let promise = Promise("downgrade: Lost when the write lock is lost");
    let has_kinds = case.has(Kind::Read) && case.has(Kind::Write);
    if !has_kinds || !case.can().inspection {
        return case.leave_out("the store has no read-write locks, or none is forced open");
    }
    let (client, peer, key) = (client(&case, case.long()).await, case.peer().await, case.key("k"));
    let guard = client.rw_lock(&key).write().acquire().await.expect("a free lock");
    assert!(peer.force_release(&key).await.is_ok_and(|forced| forced));
    let writer = peer.takes(Kind::Write, &key, case.long()).await;
    assert!(peer.gives(&writer).await);
    let reading = guard.downgrade().await;
    promise.holds(reading.as_ref().is_err_and(dlock::Error::is_lost), reading);
    let reply = peer.asks(Kind::Write, &key, case.long()).await;
    promise.holds(reply.is_granted(), reply);
    client.shutdown(case.patience()).await;
}

pub async fn held_lock_outlives_its_lease(case: Case) {
    let promise = Promise("A lock is renewed while it is held");
    let (lease, key) = (6 * case.short(), case.key("k"));
    let client = client(&case, lease).await;
    let guard = client.lock(&key).acquire().await.expect("a free lock");
    let peer = case.peer().await;
    let (until, mut seen, mut longest) = (Instant::now() + 2 * lease, Instant::now(), Duration::ZERO);
    while Instant::now() < until {
        let reply = peer.asks(Kind::Mutex, &key, case.short()).await;
        longest = longest.max(seen.elapsed());
        seen = Instant::now();
        if !guard.is_held() {
            break;
        }
        promise.holds(reply.is_busy(), reply);
        tokio::time::sleep(case.tick()).await;
    }
    if !guard.is_held() && longest > lease / 3 {
        return case.leave_out("the machine was too slow to renew in time");
    }
    promise.holds(guard.release().await.is_ok(), "the lock is lost");
    client.shutdown(case.patience()).await;
}

pub async fn shutdown_leaves_nothing(case: Case) {
    let promise = Promise("A client releases its locks when it shuts down");
    let client = client(&case, case.long()).await;
    let peer = case.peer().await;
    let mut guards = Vec::new();
    for number in 0..5 {
        let key = case.key(&number.to_string());
        let guard = client.lock(&key).acquire().await.expect("a free lock");
        guards.push((key, guard));
    }
    client.shutdown(Duration::ZERO).await;
    for (key, _guard) in &guards {
        case.comes_free(&peer, Kind::Mutex, key, promise).await;
    }
}

pub async fn holder_learns_of_lost_data(case: Case) {
    let promise = Promise("Where the store lost a grant, its holder is told at its next renewal");
    let lease = 6 * case.short();
    let client = client(&case, lease).await;
    let guard = client.lock(case.key("k")).acquire().await.expect("a free lock");
    if !case.fault(Fault::Forget).await {
        return;
    }
    let lost = tokio::time::timeout(lease + case.patience(), guard.lost()).await;
    promise.holds(lost.is_ok(), "the holder was not told");
    promise.holds(!guard.is_held(), "is_held");
    client.shutdown(case.patience()).await;
}
