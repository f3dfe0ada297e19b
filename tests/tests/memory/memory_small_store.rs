//! A store that can do little: plain locks, a lease that is that of a whole session, no notifications, one fencing token
//! at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dlock::store::{
    AcquireReply, AcquireRequest, Capabilities, GivenLease, Granted, Kind, Lane, ReleaseReply,
    ReleaseRequest, RenewRequest, Renewal, Store, StoreError, StoreFuture,
};
use dlock::stores::memory::MemoryStore;
use dlock::{Error, HoldState, LockClient, LockKey};
use tokio::time::{Instant, sleep};

const SEC: Duration = Duration::from_secs(1);
/// The session's lease, and how long ago it was extended when a lock is acquired.
const SESSION: Duration = Duration::from_secs(12);
const ELAPSED: Duration = Duration::from_secs(3);
/// Keys for whose lanes the store panics begin with this.
const LANELESS: &str = "laneless";

#[derive(Clone)]
struct Small {
    memory: Arc<MemoryStore>,
    renewals: Arc<AtomicUsize>,
    most_tokens: Arc<AtomicUsize>,
    given: GivenLease,
}

impl Small {
    fn new() -> Small {
        Small {
            memory: Arc::default(),
            renewals: Arc::default(),
            most_tokens: Arc::default(),
            given: GivenLease::new(SESSION).elapsed(ELAPSED),
        }
    }

    async fn client(&self) -> LockClient {
        let builder = LockClient::builder().store(self.clone());
        builder.build().await.unwrap()
    }
}

impl Store for Small {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new([Kind::Mutex])
    }

    fn acquire(self: Arc<Self>, mut request: AcquireRequest) -> StoreFuture<AcquireReply> {
        self.most_tokens
            .fetch_max(request.tokens as usize, Ordering::Relaxed);
        request.lease = self.given.left();
        let step = self.memory.clone().acquire(request);
        Box::pin(async move {
            Ok(match step.await? {
                AcquireReply::Acquired(granted) => {
                    AcquireReply::Acquired(Granted::new(granted.first_token).lease(self.given))
                }
                other => other,
            })
        })
    }

    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        self.memory.clone().release(request)
    }

    fn renew(
        self: Arc<Self>,
        mut requests: Vec<RenewRequest>,
    ) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        self.renewals.fetch_add(requests.len(), Ordering::Relaxed);
        for request in &mut requests {
            request.lease = self.given.left();
        }
        let step = self.memory.clone().renew(requests);
        Box::pin(async move {
            let given = |reply| match reply {
                Ok(Renewal::Renewed) => Ok(Renewal::RenewedFor(self.given)),
                other => other,
            };
            Ok(step.await?.into_iter().map(given).collect())
        })
    }

    fn lane(&self, key: &LockKey) -> Lane {
        assert!(!key.as_str().starts_with(LANELESS), "a store that panics");
        Lane::default()
    }
}

#[tokio::test]
async fn reports_of_its_clients_are_refused_by_the_option_that_asks_for_them() {
    let builder = || LockClient::builder().store(Small::new());
    for (builder, option) in [
        (builder().presence(true), "presence"),
        (builder().control(true), "control"),
    ] {
        let error = builder.build().await.unwrap_err().to_string();
        assert!(error.contains(option) && error.contains("no reports"), "{error}");
    }
    builder().presence(false).control(false).build().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn hold_ends_with_the_lease_that_was_given_and_is_renewed_in_time() {
    let store = Small::new();
    let client = store.client().await;
    let guard = client.lock("k").acquire().await.unwrap();
    // 1 % of the lease is the safety margin.
    let most = store.given.left() - SESSION / 100;
    assert!(guard.remaining() <= most, "{:?}", guard.remaining());
    for _ in 0..30 {
        sleep(SEC).await;
        assert_eq!(guard.state(), HoldState::Held);
        assert!(guard.remaining() <= most);
    }
    let renewals = store.renewals.load(Ordering::Relaxed);
    assert!((8..60).contains(&renewals), "{renewals} renewals");
    // Forgotten by the store, and never renewed again.
    store.memory.clear();
    sleep(2 * SESSION).await;
    assert!(!guard.is_held());
}

#[tokio::test(start_paused = true)]
async fn lease_that_was_over_before_it_was_given_is_no_lock() {
    for elapsed in [SESSION, Duration::MAX] {
        let mut store = Small::new();
        store.given = GivenLease::new(SESSION).elapsed(elapsed);
        let error = store.client().await.lock("k").try_acquire().await.unwrap_err();
        assert!(error.is_unavailable(), "{elapsed:?}: {error}");
    }
}

#[tokio::test(start_paused = true)]
async fn waiters_look_now_and_then_where_the_store_tells_nothing() {
    let store = Small::new();
    let (a, b) = (store.client().await, store.client().await);
    let guard = a.lock("k").acquire().await.unwrap();
    let waiter = tokio::spawn(async move { b.lock("k").wait(10 * SEC).acquire().await });
    sleep(3 * SEC).await;
    let released = Instant::now();
    guard.release().await.unwrap();
    drop(waiter.await.unwrap().unwrap());
    assert!(released.elapsed() < SEC, "{:?}", released.elapsed());
}

#[tokio::test(start_paused = true)]
async fn each_acquire_has_a_fencing_token_of_its_own_without_blocks() {
    let store = Small::new();
    let client = store.client().await;
    let mut last = 0;
    let tasks: Vec<_> = (0..5)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move {
                let guard = client.lock("k").acquire().await.unwrap();
                let token = guard.fencing_token();
                sleep(SEC / 100).await;
                guard.release().await.unwrap();
                token
            })
        })
        .collect();
    let mut tokens = Vec::new();
    for task in tasks {
        tokens.push(task.await.unwrap());
    }
    tokens.sort_unstable();
    for token in tokens {
        assert!(token > last);
        last = token;
    }
    assert_eq!(store.most_tokens.load(Ordering::Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn what_the_store_lacks_is_refused_before_it_is_asked() {
    let client = Small::new().client().await;
    let told = |error: Error| error.to_string();
    let fair = told(client.fair_lock("k").acquire().await.unwrap_err());
    assert!(fair.contains("this store has lock"), "{fair}");
    let read = client.rw_lock("k").read().acquire().await.unwrap_err();
    assert!(matches!(read, Error::Unsupported { .. }), "{read}");
    let kept = told(client.lock("k").min_hold(SEC).acquire().await.unwrap_err());
    assert!(kept.contains("min_hold"), "{kept}");
    assert!(client.lock("k").min_hold(SEC).check().is_err());
    let permit = told(client.semaphore("s").permits(3).acquire().await.unwrap_err());
    assert!(permit.contains("semaphore"), "{permit}");
    let latch = told(client.latch("l").count().await.unwrap_err());
    assert!(latch.contains("latch"), "{latch}");
    let inspected = client.inspect("k").await.unwrap_err();
    assert!(matches!(inspected, Error::Unsupported { .. }), "{inspected}");
}

#[tokio::test(start_paused = true)]
async fn sets_are_acquired_lock_by_lock() {
    let store = Small::new();
    let (a, b) = (store.client().await, store.client().await);
    let guard = a.multi(["x", "y"]).acquire().await.unwrap();
    assert!(guard.is_held());
    let wait = Duration::from_millis(300);
    assert!(
        b.multi(["y", "z"])
            .wait(wait)
            .acquire()
            .await
            .unwrap_err()
            .is_busy()
    );
    guard.release().await.unwrap();
    drop(b.multi(["y", "z"]).acquire().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn hold_outlives_a_panic_in_the_lane_of_another() {
    let store = Small::new();
    let client = store.client().await;
    let guards = [LANELESS, "k"].map(|name| client.lock(name).acquire());
    let guards = futures_util::future::try_join_all(guards).await.unwrap();
    sleep(5 * SESSION).await;
    assert!(guards.iter().all(|guard| guard.is_held()));
    drop(
        client
            .multi([LANELESS.to_owned() + "2", "l".to_owned()])
            .acquire()
            .await
            .unwrap(),
    );
}
