//! The call takes the position in the order of steps, not the first poll.

use dlock::store::{Kind, StoreError};
use futures_util::future::join_all;

use crate::case::Case;
use crate::promise::Promise;
use crate::verbs::{Held, Reply, is_gone, is_not_done, is_released, is_renewed};

const IN_ORDER: Promise =
    Promise("Steps of one key take effect in the order of the method calls, even if they are never polled");

pub async fn unpolled_release_comes_before_later_acquire(case: Case) {
    let (peer, key) = (case.peer().await, case.key("k"));
    for _ in 0..20 {
        let held = peer.takes(Kind::Mutex, &key, case.long()).await;
        let release = peer.release(held.release());
        let next = peer.request(Kind::Mutex, &key, case.long());
        let after = Held::asked_by(&next);
        let reply = peer.acquire(next).await;
        drop(release);
        IN_ORDER.holds(matches!(reply, Ok(Reply::Granted(_))), reply);
        assert!(peer.gives(&after).await);
    }
}

pub async fn steps_take_effect_in_the_order_of_calls(case: Case) {
    let (peer, key) = (case.peer().await, case.key("k"));
    let mut acquires = Vec::new();
    let mut releases = Vec::new();
    for _ in 0..20 {
        let request = peer.request(Kind::Mutex, &key, case.long());
        let held = Held::asked_by(&request);
        acquires.push(peer.acquire(request));
        releases.push(peer.release(held.release()));
    }
    // Awaited in another order than called.
    let releases = join_all(releases.into_iter().rev()).await;
    let acquires = join_all(acquires).await;
    // A grant that takes two rounds may be released in between, and is suspect. None of them found the lock held.
    let in_order = |reply: &Result<Reply, StoreError>| match reply {
        Ok(reply) => reply.is_granted(),
        Err(error) => !is_not_done(error),
    };
    IN_ORDER.holds(acquires.iter().all(in_order), &acquires);
    IN_ORDER.holds(releases.iter().all(Result::is_ok), &releases);
    let last = peer.takes(Kind::Mutex, &key, case.long()).await;
    IN_ORDER.holds(peer.gives(&last).await, "the last grant is gone");
}

pub async fn renewal_takes_effect_in_the_order_of_calls(case: Case) {
    let (peer, key) = (case.peer().await, case.key("k"));
    for _ in 0..10 {
        let held = peer.takes(Kind::Mutex, &key, case.long()).await;
        let before = peer.renew(vec![held.renewal(case.long())]);
        let release = peer.release(held.release());
        let after = peer.renew(vec![held.renewal(case.long())]);
        let next = peer.request(Kind::Mutex, &key, case.long());
        let last = Held::asked_by(&next);
        let next = peer.acquire(next);
        let (after, next) = (after.await, next.await);
        let (before, release) = (before.await, release.await);
        IN_ORDER.holds(
            matches!(before.as_deref(), Ok([reply]) if is_renewed(reply)),
            before,
        );
        IN_ORDER.holds(matches!(release, Ok(reply) if is_released(reply)), release);
        IN_ORDER.holds(matches!(after.as_deref(), Ok([reply]) if is_gone(reply)), after);
        IN_ORDER.holds(matches!(next, Ok(Reply::Granted(_))), next);
        assert!(peer.gives(&last).await);
    }
}

pub async fn verbs_can_be_called_outside_of_a_runtime(case: Case) {
    let promise =
        Promise("Outside a runtime the methods may be called too: they do not spawn and do not block");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Mutex, &key, case.long()).await;
    let outside = {
        let (case, key, held) = (case.clone(), key.clone(), held.clone());
        std::thread::spawn(move || {
            let renewal = a.renew(vec![held.renewal(case.long())]);
            let release = a.release(held.release());
            let next = a.request(Kind::Mutex, &key, case.long());
            let after = Held::asked_by(&next);
            let next = a.acquire(next);
            let other = case.key("other");
            let watch = a.watch(Kind::Mutex, &other, a.grant());
            drop(watch);
            (a, renewal, release, next, after)
        })
    };
    let called = tokio::task::spawn_blocking(move || outside.join())
        .await
        .expect("a thread");
    promise.holds(called.is_ok(), "a panic");
    let Ok((a, renewal, release, next, after)) = called else {
        return;
    };
    let (renewal, release, next) = (renewal.await, release.await, next.await);
    promise.holds(
        matches!(renewal.as_deref(), Ok([reply]) if is_renewed(reply)),
        renewal,
    );
    promise.holds(matches!(release, Ok(reply) if is_released(reply)), release);
    promise.holds(matches!(next, Ok(Reply::Granted(_))), next);
    assert!(b.asks(Kind::Mutex, &key, case.long()).await.is_busy());
    assert!(a.gives(&after).await);
}
