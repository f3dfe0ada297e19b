//! Locks that go to waiters in order of arrival.

use std::time::Duration;

use dlock::LockKey;
use dlock::store::{AcquireRequest, GrantId, Kind, ReleaseRequest};

use crate::case::Case;
use crate::promise::Promise;
use crate::verbs::{Held, Peer, Reply, Tokens};

const IN_ORDER: Promise = Promise("Fair locks: the lock goes to the waiter in front of the queue");
const GIVEN_UP: Promise = Promise("queue: A release of the same id gives up the position");
/// How long a position is kept for a waiter that sends no requests.
const KEPT: Duration = Duration::from_secs(5);

/// A waiter in the queue.
struct Waiter<'a> {
    peer: &'a Peer,
    request: AcquireRequest,
}

impl<'a> Waiter<'a> {
    /// Requests a held lock for the first time.
    async fn joins(case: &Case, peer: &'a Peer, key: &LockKey) -> Waiter<'a> {
        let mut request = peer.request(Kind::Fair, key, case.long());
        request.queue = true;
        let mut waiter = Waiter { peer, request };
        let reply = waiter.asks().await;
        assert!(reply.is_busy(), "a fair lock that is held: {reply:?}");
        waiter
    }

    async fn asks(&mut self) -> Reply {
        let reply = self.peer.acquire(self.request.clone()).await;
        self.request.last_asked = Some(Duration::from_millis(1));
        reply.unwrap_or_else(|error| panic!("the store failed to acquire a fair lock: {error:?}"))
    }

    /// Asks until the lock is granted: a store whose waiters are notified of changes may know of the last one a moment later.
    async fn is_served(&mut self, case: &Case, promise: Promise) -> Tokens {
        let begun = std::time::Instant::now();
        loop {
            match self.asks().await {
                Reply::Granted(tokens) => return tokens,
                reply => promise.holds(begun.elapsed() < case.patience(), reply),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn grant(&self) -> GrantId {
        self.request.grant
    }

    fn release(&self) -> ReleaseRequest {
        ReleaseRequest::new(Kind::Fair, self.request.key.clone(), self.request.grant)
    }

    async fn leaves(&self) {
        let reply = self.peer.release(self.release()).await;
        assert!(reply.is_ok(), "{reply:?}");
    }
}

pub async fn waiters_are_served_in_their_order(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Fair, &key, case.long()).await;
    let mut queue = Vec::new();
    for peer in [&b, &a, &b] {
        queue.push(Waiter::joins(&case, peer, &key).await);
    }
    assert!(a.gives(&held).await);
    while !queue.is_empty() {
        for later in queue.iter_mut().skip(1).rev() {
            let reply = later.asks().await;
            IN_ORDER.holds(reply.is_busy(), reply);
        }
        let mut first = queue.remove(0);
        first.is_served(&case, IN_ORDER).await;
        for later in &mut queue {
            let reply = later.asks().await;
            IN_ORDER.holds(reply.is_busy(), reply);
        }
        first.leaves().await;
    }
}

pub async fn acquire_without_queue_position_overtakes_no_waiter(case: Case) {
    let promise = Promise("queue: an acquire that takes no position overtakes no waiter that has one");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Fair, &key, case.long()).await;
    assert!(b.asks(Kind::Fair, &key, case.long()).await.is_busy());
    let mut waiter = Waiter::joins(&case, &a, &key).await;
    assert!(a.gives(&held).await);
    let reply = b.asks(Kind::Fair, &key, case.long()).await;
    promise.holds(reply.is_busy(), reply);
    let promise = Promise("queue: no waiter waits for an acquire that takes no position");
    waiter.is_served(&case, promise).await;
}

pub async fn released_queue_position_is_given_up(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Fair, &key, case.long()).await;
    let first = Waiter::joins(&case, &b, &key).await;
    let middle = Waiter::joins(&case, &b, &key).await;
    let mut last = Waiter::joins(&case, &a, &key).await;
    middle.leaves().await;
    assert!(a.gives(&held).await);
    first.leaves().await;
    last.is_served(&case, GIVEN_UP).await;
    last.leaves().await;
    let reply = b.asks(Kind::Fair, &key, case.long()).await;
    GIVEN_UP.holds(reply.is_granted(), reply);
}

pub async fn silent_waiter_loses_its_position(case: Case) {
    let promise = Promise("A waiter that did not ask for 5 s counts as gone once it is in front");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Fair, &key, case.long()).await;
    let _silent = Waiter::joins(&case, &a, &key).await;
    let mut waiter = Waiter::joins(&case, &b, &key).await;
    assert!(a.gives(&held).await);
    let begun = std::time::Instant::now();
    while !waiter.asks().await.is_granted() {
        promise.holds(begun.elapsed() < KEPT + case.patience(), begun.elapsed());
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

pub async fn returning_waiter_comes_before_later_ones(case: Case) {
    let promise =
        Promise("last_asked: A waiter that has asked before and finds its position lost gets it back");
    if !case.can().restores_positions {
        return case.leave_out("the store restores no positions");
    }
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Fair, &key, case.long()).await;
    let mut early = Waiter::joins(&case, &a, &key).await;
    let mut late = Waiter::joins(&case, &b, &key).await;
    // It keeps its own position, and treats the other waiter as gone.
    assert!(a.gives(&held).await);
    let begun = std::time::Instant::now();
    while !late.asks().await.is_granted() {
        promise.holds(begun.elapsed() < KEPT + case.patience(), begun.elapsed());
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    let mut newcomer = Waiter::joins(&case, &b, &key).await;
    early.request.last_asked = Some(begun.elapsed());
    let reply = early.asks().await;
    assert!(reply.is_busy(), "{reply:?}");
    late.leaves().await;
    let reply = newcomer.asks().await;
    promise.holds(reply.is_busy(), reply);
    early.is_served(&case, promise).await;
}

/// A store that gives no blocks of tokens names no waiters either.
pub async fn next_waiters_of_the_client_are_named(case: Case) {
    let promise = Promise(
        "behind: The waiters of the same client that come right behind in the queue, up to the first of another",
    );
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Fair, &key, case.long()).await;
    let mut first = Waiter::joins(&case, &b, &key).await;
    let mut behind = Vec::new();
    for peer in [&b, &b, &a, &b] {
        behind.push(Waiter::joins(&case, peer, &key).await);
    }
    assert!(a.gives(&held).await);
    first.request.tokens = 4;
    let tokens = first.is_served(&case, IN_ORDER).await;
    if tokens.first == tokens.last {
        return promise.holds(tokens.behind.is_empty(), tokens);
    }
    // As many as there are tokens for.
    let most = usize::try_from(tokens.last - tokens.first).unwrap_or(usize::MAX);
    let next = [behind[0].grant(), behind[1].grant()].into_iter();
    promise.same(tokens.behind, next.take(most).collect::<Vec<_>>());
    // They keep their positions.
    first.leaves().await;
    let reply = behind[2].asks().await;
    IN_ORDER.holds(reply.is_busy(), reply);
    behind[0].is_served(&case, IN_ORDER).await;
}

pub async fn release_wakes_first_waiter(case: Case) {
    let promise = Promise("release: wakes the waiter in front of the queue");
    if !case.can().notifications {
        return case.leave_out("the store has no notifications");
    }
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held: Held = a.takes(Kind::Fair, &key, case.long()).await;
    let mut first = Waiter::joins(&case, &b, &key).await;
    let mut watch = case
        .watches(b.watch(Kind::Fair, &key, first.grant()), promise)
        .await;
    let mut second = Waiter::joins(&case, &a, &key).await;
    let mut watch_second = case
        .watches(a.watch(Kind::Fair, &key, second.grant()), promise)
        .await;
    assert!(a.gives(&held).await);
    case.hears(&mut watch, promise).await;
    assert!(first.asks().await.is_granted());
    first.leaves().await;
    case.hears(&mut watch_second, promise).await;
    assert!(second.asks().await.is_granted());
}
