//! One holder at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use dlock::store::Kind;

use crate::case::Case;
use crate::promise::Promise;
use crate::verbs::{Held, Reply};

const ONE_HOLDER: Promise = Promise("A lock has one holder at a time");

pub async fn free_lock_is_granted(case: Case) {
    let (peer, key) = (case.peer().await, case.key("k"));
    let reply = peer.asks(Kind::Mutex, &key, case.long()).await;
    Promise("acquire: Grants the lock, or tells which holder is in the way").holds(reply.is_granted(), reply);
}

pub async fn held_lock_is_busy_for_other_clients(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Mutex, &key, case.long()).await;
    for peer in [&a, &b] {
        let reply = peer.asks(Kind::Mutex, &key, case.long()).await;
        ONE_HOLDER.holds(reply.is_busy(), reply);
    }
    assert!(a.gives(&held).await);
}

pub async fn busy_reply_names_remaining_lease(case: Case) {
    let promise = Promise("Busy gives the remaining lease of the holder, or None if it does not expire");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    a.takes(Kind::Mutex, &key, case.long()).await;
    let reply = b.asks(Kind::Mutex, &key, case.long()).await;
    let Reply::Busy(remaining) = reply else {
        panic!("{ONE_HOLDER:?}: {reply:?}");
    };
    // A store whose leases have steps gives up to one step more.
    let most = case.long() + case.tick();
    promise.holds(
        remaining.is_none_or(|left| !left.is_zero() && left <= most),
        remaining,
    );
}

pub async fn busy_reply_changes_nothing(case: Case) {
    let promise = Promise("An acquire that finds the lock busy changes nothing for its holder");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Mutex, &key, case.long()).await;
    for _ in 0..3 {
        assert!(b.asks(Kind::Mutex, &key, case.long()).await.is_busy());
    }
    promise.holds(a.renews(&held, case.long()).await, "the grant is gone");
    promise.holds(a.gives(&held).await, "the grant is gone");
}

pub async fn locks_of_different_keys_are_independent(case: Case) {
    let promise = Promise("Locks of different keys are independent");
    let (a, b) = case.peers().await;
    let first = a.takes(Kind::Mutex, &case.key("a"), case.long()).await;
    let second = b.takes(Kind::Mutex, &case.key("b"), case.long()).await;
    promise.holds(a.gives(&first).await, "the other key's grant ended it");
    promise.holds(
        b.renews(&second, case.long()).await,
        "the other key's release ended it",
    );
}

pub async fn released_lock_is_granted_again(case: Case) {
    let promise = Promise("release: Ends a grant");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    for peer in [&a, &b, &b, &a] {
        let held = peer.takes(Kind::Mutex, &key, case.long()).await;
        promise.holds(peer.gives(&held).await, "NotHeld for a grant that was held");
    }
}

pub async fn storm_of_clients_never_shares_a_lock(case: Case) {
    let grow = Promise("A fencing token is greater than every token of the key before");
    let key = case.key("k");
    let inside = Arc::new(AtomicBool::new(false));
    let last = Arc::new(AtomicU64::new(0));
    let until = Instant::now() + 15 * case.tick();
    let mut tasks = Vec::new();
    for _ in 0..6 {
        let (case, peer, key) = (case.clone(), case.peer().await, key.clone());
        let (inside, last) = (inside.clone(), last.clone());
        tasks.push(tokio::spawn(async move {
            let mut taken = 0;
            while Instant::now() < until {
                let request = peer.request(Kind::Mutex, &key, case.long());
                let held = Held::asked_by(&request);
                let Ok(Reply::Granted(tokens)) = peer.acquire(request).await else {
                    tokio::time::sleep(case.tick() / 50).await;
                    continue;
                };
                ONE_HOLDER.holds(!inside.swap(true, Ordering::SeqCst), "two clients hold the lock");
                let before = last.swap(tokens.last, Ordering::SeqCst);
                grow.holds(tokens.first > before, (before, &tokens));
                tokio::task::yield_now().await;
                taken += 1;
                inside.store(false, Ordering::SeqCst);
                ONE_HOLDER.holds(peer.gives(&held).await, "the grant ended while it was held");
            }
            taken
        }));
    }
    let mut taken = 0;
    for task in tasks {
        taken += task
            .await
            .unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
    }
    Promise("A free lock is granted to one of its callers").holds(taken > 0, taken);
}
