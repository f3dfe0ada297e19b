//! The core under attack: other people's wakers, subscribers and stores, other runtimes, and the edges of options.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use dlock::operations::LossReason;
use dlock::store::Kind;
use dlock::store::{
    AcquireReply, AcquireRequest, Capabilities, GrantId, Holder, Hub, ReleaseReply, ReleaseRequest,
    RenewRequest, Renewal, Store, StoreError, StoreFuture, Watch,
};
use dlock::stores::memory::MemoryStore;
use dlock::testing::{Fault, Step, TestStore};
use dlock::{DEFAULT_RETRY_FOR, Error, HoldState, LockClient, LockKey, Loss};
use dlock_tests::{Log, eventually, watched};
use futures_util::FutureExt;
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::runtime::{self, Runtime};
use tokio::time::sleep;
use tracing::span;

const MS: Duration = Duration::from_millis(1);

/// Fails a test that is stuck in a mutex, which no timer of its runtime can.
fn in_time(test: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(test);
    for _ in 0..1000 {
        if thread.is_finished() {
            return thread.join().unwrap();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("stuck");
}

fn paused() -> Runtime {
    runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap()
}

/// Calls back when it is woken.
struct Woken(Box<dyn Fn() + Send + Sync>);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        (self.0)();
    }
}

fn on_wake(then: impl Fn() + Send + Sync + 'static) -> Waker {
    Arc::new(Woken(Box::new(then))).into()
}

/// What a waker owns, as that of an executor owns a task: calls back when it is dropped.
struct OnDrop(Box<dyn Fn() + Send + Sync>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        (self.0)();
    }
}

type Boxed = Pin<Box<dyn Future<Output = ()> + Send>>;
type Parked = Arc<Mutex<Option<Boxed>>>;

/// Polls a future once, with a waker that drops it: what an executor does that was closed meanwhile.
fn dropped_when_woken(future: impl Future<Output = ()> + Send + 'static) -> Parked {
    let slot: Parked = Arc::default();
    let behind = slot.clone();
    let waker = on_wake(move || {
        let future = behind.lock().take();
        drop(future);
    });
    let mut future: Boxed = Box::pin(future);
    assert!(
        future
            .as_mut()
            .poll(&mut Context::from_waker(&waker))
            .is_pending()
    );
    *slot.lock() = Some(future);
    slot
}

#[test]
fn a_waker_may_drop_the_guard_whose_loss_wakes_it() {
    for gone in [false, true] {
        in_time(move || {
            paused().block_on(async move {
                let store = TestStore::new();
                let client = store.client();
                let lock = if gone {
                    client.lock("k")
                } else {
                    client.lock("k").fixed_lease(100 * MS)
                };
                let guard = lock.acquire().await.unwrap();
                let slot = dropped_when_woken(async move {
                    guard.lost().await;
                });
                if gone {
                    store.lose("k");
                }
                sleep(Duration::from_secs(1)).await;
                assert!(slot.lock().is_none());
                assert_eq!(client.held(), 0);
            });
        });
    }
}

#[test]
fn a_waker_that_blocks_takes_nothing_from_min_hold() {
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let store = TestStore::new();
        let begun = Instant::now();
        let lock = store.client().lock("k").min_hold(600 * MS);
        let guard = lock.acquire().await.unwrap();
        let mut lost = Box::pin(guard.lost());
        let waker = on_wake(|| std::thread::sleep(300 * MS));
        assert!(lost.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        // The release is repeated, and asks for what is left then.
        store.fail_next(Step::Release, Fault::Unreachable);
        drop(guard);
        let _next = store.client().lock("k").acquire().await.unwrap();
        let kept = begun.elapsed();
        assert!(kept >= 600 * MS, "{kept:?}");
    });
}

/// Polls a future once, with a waker that panics.
fn panics_when_woken(future: &mut Boxed) {
    let waker = on_wake(|| panic!("a waker that panics"));
    assert!(
        future
            .as_mut()
            .poll(&mut Context::from_waker(&waker))
            .is_pending()
    );
}

#[test]
fn a_waker_that_panics_at_a_loss_takes_no_other_hold_along() {
    in_time(|| {
        paused().block_on(async {
            let client = LockClient::memory();
            let other = client.lock("other").acquire().await.unwrap();
            let fixed = client.lock("k").fixed_lease(100 * MS);
            let guard = fixed.acquire().await.unwrap();
            let mut lost: Boxed = Box::pin(guard.lost().map(drop));
            panics_when_woken(&mut lost);
            sleep(Duration::from_secs(1)).await;
            assert_eq!(guard.state(), HoldState::Lost(Loss::Expired));
            assert!(other.is_held(), "{:?}", other.state());
        });
    });
}

/// The watchdog tells of the loss, and must go on.
#[test]
fn a_listener_whose_waker_panics_takes_no_hold_along() {
    in_time(|| {
        paused().block_on(async {
            let client = LockClient::memory();
            let other = client.lock("other").acquire().await.unwrap();
            let guard = client.lock("k").fixed_lease(100 * MS).acquire().await.unwrap();
            let mut events = client.events();
            let mut next: Boxed = Box::pin(async move { drop(events.next().await) });
            panics_when_woken(&mut next);
            sleep(Duration::from_secs(1)).await;
            assert_eq!(guard.state(), HoldState::Lost(Loss::Expired));
            assert!(other.is_held(), "{:?}", other.state());
            other.release().await.unwrap();
        });
    });
}

/// It is dropped, or runs, where the client's listeners are looked at.
#[test]
fn a_filter_may_hold_a_guard_and_ask_for_other_events() {
    in_time(|| {
        paused().block_on(async {
            let store = TestStore::new();
            let client = store.client();
            let guard = client.lock("k").acquire().await.unwrap();
            let listens = client.clone();
            drop(client.events_where(move |_, _| guard.is_held()));
            let _events = client.events_where(move |_, _| listens.events().dropped() == 0);
            sleep(MS).await;
            assert_eq!(store.held(), 0);
            client.lock("k").acquire().await.unwrap().release().await.unwrap();
        });
    });
}

#[test]
fn a_waker_that_panics_keeps_no_lock_from_its_release() {
    in_time(|| {
        paused().block_on(async {
            let store = TestStore::new();
            let client = store.client();
            for waits in [false, true] {
                let guard = client.lock("k").acquire().await.unwrap();
                let mut woken: Boxed = match waits {
                    true => Box::pin(client.lock("k").acquire().map(drop)),
                    false => Box::pin(guard.lost().map(drop)),
                };
                panics_when_woken(&mut woken);
                drop(guard);
                drop(woken);
                sleep(MS).await;
                assert_eq!((store.held(), client.held()), (0, 0), "{waits}");
            }
        });
    });
}

#[test]
fn a_release_is_sent_before_its_holder_is_woken() {
    paused().block_on(async {
        let (watched, client) = watched().await;
        let guard = client.lock("k").acquire().await.unwrap();
        let releases = Arc::new(AtomicUsize::new(0));
        let seen = releases.clone();
        let waker = on_wake(move || {
            let so_far = watched.seen().releases.load(Ordering::SeqCst);
            seen.store(so_far, Ordering::SeqCst);
        });
        let mut lost = Box::pin(guard.lost());
        assert!(lost.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        drop(guard);
        assert_eq!(releases.load(Ordering::SeqCst), 1);
    });
}

#[test]
fn a_waker_may_drop_the_acquire_that_a_release_wakes() {
    in_time(|| {
        paused().block_on(async {
            let client = LockClient::memory();
            let guard = client.lock("k").acquire().await.unwrap();
            let waits = client.lock("k").acquire();
            let slot = dropped_when_woken(async move {
                drop(waits.await);
            });
            drop(guard);
            assert!(slot.lock().is_none());
            sleep(MS).await;
            drop(client.lock("k").try_acquire().await.unwrap());
            assert_eq!(client.waited_for(), 0);
        });
    });
}

#[test]
fn a_waker_may_ask_the_client_when_its_acquire_is_dropped() {
    in_time(|| {
        paused().block_on(async {
            let client = LockClient::memory();
            let guard = client.lock("k").acquire().await.unwrap();
            let first = tokio::spawn(client.lock("k").acquire());
            sleep(MS).await;
            let asked = Arc::new(AtomicUsize::new(0));
            let (asks, seen) = (client.clone(), asked.clone());
            let owned = OnDrop(Box::new(move || {
                seen.fetch_add(1 + asks.waited_for(), Ordering::SeqCst);
            }));
            let waker = on_wake(move || _ = &owned);
            let mut second = Box::pin(client.lock("k").acquire());
            assert!(
                second
                    .as_mut()
                    .poll(&mut Context::from_waker(&waker))
                    .is_pending()
            );
            // The queue has the last one.
            drop(waker);
            assert_eq!(asked.load(Ordering::SeqCst), 0);
            drop(second);
            assert_eq!(asked.load(Ordering::SeqCst), 2);
            drop(guard);
            drop(first.await.unwrap().unwrap());
        });
    });
}

/// A subscriber that asks the client at every event.
struct Asks(Arc<Mutex<Option<LockClient>>>, Arc<AtomicUsize>);

impl tracing::Subscriber for Asks {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().starts_with("dlock")
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        let client = self.0.lock().clone();
        if let Some(client) = client {
            let asked = client.held() + client.waited_for();
            self.1.fetch_add(1 + asked, Ordering::Relaxed);
        }
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[test]
fn a_frame_may_end_with_its_thread() {
    thread_local! {
        static KEPT: RefCell<Option<Boxed>> = const { RefCell::new(None) };
    }
    std::thread::spawn(|| {
        // Known to the thread before the frames are, so gone after them.
        KEPT.set(None);
        let mut never: Boxed = Box::pin(dlock::scope::current().wrap(std::future::pending()));
        assert!(
            never
                .as_mut()
                .poll(&mut Context::from_waker(Waker::noop()))
                .is_pending()
        );
        KEPT.set(Some(never));
    })
    .join()
    .unwrap();
}

#[test]
fn a_release_goes_on_when_the_runtime_that_awaited_it_ends() {
    let home = runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let store = TestStore::new();
    let client = home.block_on(async { store.client() });
    let (first, second) = home.block_on(async {
        (
            client.lock("1").acquire().await.unwrap(),
            client.lock("2").acquire().await.unwrap(),
        )
    });
    store.set_down(true);
    let guest = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    guest.block_on(async {
        let released = tokio::time::timeout(20 * MS, first.release()).await;
        assert!(released.is_err());
        // Once more, by a task that ends with its runtime.
        tokio::spawn(second.release());
        sleep(10 * MS).await;
    });
    drop(guest);
    store.set_down(false);
    home.block_on(async {
        eventually("both are released", async || store.held() == 0).await;
        // And the next caller.
        drop(client.lock("3").acquire().await.unwrap());
        eventually("the next one is released", async || store.held() == 0).await;
    });
}

#[test]
fn work_that_blocks_past_the_lease_is_told_of_the_loss() {
    runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(async {
            let client = LockClient::memory();
            let done = client
                .lock("k")
                .fixed_lease(50 * MS)
                .run(|_| async { std::thread::sleep(100 * MS) })
                .await;
            assert!(done.is_err_and(|error| error.is_lost()));
        });
}

#[tokio::test(start_paused = true)]
async fn the_closure_of_run_is_inside_the_frame_before_its_future_is() {
    let client = LockClient::memory();
    let lock = client.lock("k");
    let inner = lock.clone().wait(Duration::from_secs(5));
    let entered = lock
        .run(|held| {
            assert_eq!(
                dlock::current().map(|held| held.fencing_token()),
                Some(held.fencing_token())
            );
            tokio::spawn(dlock::scope::current().wrap(async move { inner.acquire().await.map(drop) }))
        })
        .await
        .unwrap();
    entered.unwrap().unwrap();
}

/// How a [`Strange`] store behaves.
#[derive(Default)]
struct Manners {
    acquire_takes: Option<Duration>,
    /// The first renewal takes this long, the others no time.
    first_renewal_takes: Option<Duration>,
    endless: bool,
    panics_in: Option<Step>,
    /// The first acquire panics in the call, and not in its future.
    acquire_call_panics: bool,
    /// Acquires have no reply.
    is_silent: bool,
    /// Releases have no reply.
    is_silent_at_releases: bool,
    /// Releases take this long.
    release_takes: Duration,
    /// Whatever only looks at locks panics, and so does the release by force.
    looks_panic: bool,
    watch_panics: bool,
    /// Renewals have a reply for all grants but the last.
    renewals_fall_short: bool,
    /// The first release panics in the call, and not in its future.
    release_call_panics: bool,
    always_notifies: bool,
    renewals: AtomicUsize,
    panics: AtomicUsize,
}

/// A third-party store.
struct Strange(Arc<MemoryStore>, Arc<Manners>);

impl Strange {
    fn panics(&self, step: Step) {
        if self.1.panics_in == Some(step) && self.1.panics.fetch_add(1, Ordering::Relaxed) == 0 {
            panic!("the store's own");
        }
    }
}

impl Store for Strange {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }
    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        if self.1.acquire_call_panics && self.1.panics.fetch_add(1, Ordering::Relaxed) == 0 {
            panic!("the store's own");
        }
        if self.1.is_silent {
            return Box::pin(std::future::pending());
        }
        Box::pin(async move {
            self.panics(Step::Acquire);
            let reply = Store::acquire(self.0.clone(), request).await;
            if let Some(time) = self.1.acquire_takes {
                sleep(time).await;
            }
            match reply {
                Ok(AcquireReply::Busy(_)) if self.1.endless => Ok(AcquireReply::busy(Some(Duration::MAX))),
                other => other,
            }
        })
    }
    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        if self.1.release_call_panics && self.1.panics.fetch_add(1, Ordering::Relaxed) == 0 {
            panic!("the store's own");
        }
        if self.1.is_silent_at_releases {
            return Box::pin(std::future::pending());
        }
        Box::pin(async move {
            self.panics(Step::Release);
            if !self.1.release_takes.is_zero() {
                sleep(self.1.release_takes).await;
            }
            Store::release(self.0.clone(), request).await
        })
    }
    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        Box::pin(async move {
            self.panics(Step::Renew);
            let first = self.1.renewals.fetch_add(1, Ordering::Relaxed) == 0;
            let mut answer = Store::renew(self.0.clone(), requests).await;
            if let (true, Ok(answers)) = (self.1.renewals_fall_short, &mut answer) {
                answers.pop();
            }
            if let Some(time) = self.1.first_renewal_takes.filter(|_| first) {
                sleep(time).await;
            }
            answer
        })
    }
    fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
        assert!(!self.1.looks_panic, "the store's own");
        Box::pin(async move { Store::inspect(self.0.clone(), key).await })
    }
    fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
        Box::pin(async move {
            assert!(!self.1.looks_panic, "the store's own");
            Store::list(self.0.clone(), prefix).await
        })
    }
    fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool> {
        assert!(!self.1.looks_panic, "the store's own");
        Box::pin(async move { Store::force_release(self.0.clone(), key).await })
    }
    fn explain(&self, _kind: Kind, _key: &LockKey) -> Option<Arc<str>> {
        assert!(!self.1.looks_panic, "the store's own");
        None
    }
    fn together(&self, _kind: Kind, _key: &LockKey) -> Option<u32> {
        assert!(!self.1.looks_panic, "the store's own");
        None
    }
    fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        if self.1.watch_panics {
            panic!("the store's own");
        }
        if !self.1.always_notifies {
            return Store::watch(self.0.clone(), kind, key, grant);
        }
        let hub = Arc::new(Hub::default());
        let tells = hub.clone();
        let task = tokio::spawn(async move {
            loop {
                tells.tell("key");
                tokio::task::yield_now().await;
            }
        });
        hub.listen("key".into(), |_| true, move |_| task.abort())
    }
}

async fn strange(manners: Manners) -> LockClient {
    let store = Strange(Arc::new(MemoryStore::new()), Arc::new(manners));
    LockClient::builder().store(store).build().await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_release_that_panics_takes_no_other_along() {
    let client = strange(Manners {
        panics_in: Some(Step::Release),
        ..Manners::default()
    })
    .await;
    drop(client.lock("1").acquire().await.unwrap());
    sleep(MS).await;
    drop(client.lock("2").acquire().await.unwrap());
    sleep(MS).await;
    assert!(client.inspect("2").await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn look_that_panics_has_failed_and_takes_no_call_along() {
    let memory = Arc::new(MemoryStore::new());
    let manners = Manners {
        looks_panic: true,
        ..Manners::default()
    };
    let store = Strange(memory.clone(), Arc::new(manners));
    let client = LockClient::builder().store(store).build().await.unwrap();
    let guards = client.multi(["k", "l"]).acquire().await.unwrap();
    assert!(client.lock("k").try_acquire().await.unwrap_err().is_busy());
    assert!(client.holders("k").await.is_err());
    assert!(client.list("").await.is_err());
    let forced = client.force_release("k").await;
    assert!(matches!(forced, Err(Error::OutcomeUnknown { .. })), "{forced:?}");
    Store::force_release(memory, "k".into()).await.unwrap();
    assert_eq!(guards.lost().await, Loss::Gone);
    assert_eq!(guards.why_lost().await, Some(LossReason::Gone));
}

/// It is woken in the middle of the release that it waits for.
#[test]
fn a_shutdown_whose_waker_panics_takes_no_release_along() {
    in_time(|| {
        paused().block_on(async {
            let client = strange(Manners {
                release_takes: 100 * MS,
                ..Manners::default()
            })
            .await;
            let guard = client.lock("k").acquire().await.unwrap();
            let mut release = Box::pin(guard.release());
            assert!(release.as_mut().now_or_never().is_none());
            let mut shutdown: Boxed = Box::pin(async move { _ = client.shutdown(MS).await });
            panics_when_woken(&mut shutdown);
            release.await.unwrap();
            shutdown.await;
        });
    });
}

#[tokio::test(start_paused = true)]
async fn a_release_that_panics_in_the_call_is_repeated() {
    let client = strange(Manners {
        release_call_panics: true,
        ..Manners::default()
    })
    .await;
    let guard = client.lock("k").acquire().await.unwrap();
    let work = tokio::spawn(async move {
        let _guard = guard;
        // A second panic while this one unwinds would end the process.
        panic!("the user's own");
    });
    assert!(work.await.unwrap_err().is_panic());
    sleep(Duration::from_secs(1)).await;
    assert!(client.inspect("k").await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_panics_is_a_failed_renewal() {
    let client = strange(Manners {
        panics_in: Some(Step::Renew),
        ..Manners::default()
    })
    .await;
    let guard = client.lock("k").acquire().await.unwrap();
    sleep(Duration::from_secs(100)).await;
    assert_eq!(guard.state(), HoldState::Held);
}

#[tokio::test(start_paused = true)]
async fn release_without_a_reply_is_not_told_as_a_renewal_that_failed() {
    let client = strange(Manners {
        panics_in: Some(Step::Renew),
        is_silent_at_releases: true,
        ..Manners::default()
    })
    .await;
    let guard = client.lock("k").acquire().await.unwrap();
    sleep(Duration::from_secs(15)).await;
    let error = guard.release().await.unwrap_err();
    assert!(matches!(error, Error::OutcomeUnknown { .. }), "{error:?}");
    assert!(error.to_string().contains("has not answered for"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn release_that_another_task_waits_for_ends_in_time_too() {
    let client = strange(Manners {
        is_silent_at_releases: true,
        ..Manners::default()
    })
    .await;
    let mut ends = Vec::new();
    let began = tokio::time::Instant::now();
    for key in ["a", "b"] {
        let guard = client.lock(key).acquire().await.unwrap();
        let mut release = Box::pin(guard.release());
        assert!(release.as_mut().now_or_never().is_none());
        sleep(Duration::from_millis(500)).await;
        let release = tokio::spawn(release);
        ends.push(async move { (release.await.unwrap(), began.elapsed()) });
    }
    let ended = tokio::time::timeout(Duration::from_secs(60), join_all(ends)).await;
    for ((outcome, after), begun) in ended.expect("in time").into_iter().zip([0, 500]) {
        assert!(
            matches!(outcome, Err(Error::OutcomeUnknown { .. })),
            "{outcome:?}"
        );
        let patience = after - Duration::from_millis(begun);
        assert!(
            (DEFAULT_RETRY_FOR..DEFAULT_RETRY_FOR + 10 * MS).contains(&patience),
            "{patience:?}"
        );
    }
}

#[test]
fn release_on_another_runtime_ends_though_that_of_the_client_stands_still() {
    in_time(|| {
        let build = || {
            runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap()
        };
        let (of_client, of_caller) = (build(), build());
        let manners = Manners {
            is_silent_at_releases: true,
            ..Manners::default()
        };
        let store = Strange(Arc::new(MemoryStore::new()), Arc::new(manners));
        let client = LockClient::builder().store(store).retry_for(100 * MS).build();
        let client = of_client.block_on(client).unwrap();
        let outcome = of_caller.block_on(async {
            let guard = client.lock("k").acquire().await.unwrap();
            guard.release().await
        });
        assert!(
            matches!(outcome, Err(Error::OutcomeUnknown { .. })),
            "{outcome:?}"
        );
    });
}

#[tokio::test(start_paused = true)]
async fn acquire_that_panics_has_failed_and_is_logged_with_its_key() {
    for panics_in_the_call in [true, false] {
        let log = Log::default();
        let _listening = log.listen();
        let client = strange(Manners {
            acquire_call_panics: panics_in_the_call,
            panics_in: (!panics_in_the_call).then_some(Step::Acquire),
            ..Manners::default()
        })
        .await;
        let outcome = client.lock("order:7").try_acquire().await;
        assert!(
            matches!(outcome, Err(Error::OutcomeUnknown { .. })),
            "{outcome:?}"
        );
        let entry = log.count("ERROR");
        assert_eq!((entry, log.count("key=order:7")), (1, 1), "{panics_in_the_call}");
        assert_eq!(log.count("an operation of the lock store panicked"), 1);
        drop(client.lock("order:7").acquire().await.unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn waiter_asks_again_though_the_subscription_panics_which_is_logged() {
    let log = Log::default();
    let _listening = log.listen();
    let client = strange(Manners {
        watch_panics: true,
        ..Manners::default()
    })
    .await;
    // No other waiter of this process can be handed the lock.
    let guard = client.lock("k").local_handoffs(0).acquire().await.unwrap();
    let waits = tokio::spawn(client.lock("k").local_handoffs(0).acquire());
    sleep(10 * MS).await;
    drop(guard);
    drop(waits.await.unwrap().unwrap());
    assert_eq!(log.count("an operation of the lock store panicked key=k"), 1);
}

#[tokio::test(start_paused = true)]
async fn store_that_does_not_answer_an_acquire_is_warned_of_once_and_waited_for() {
    let log = Log::default();
    let _listening = log.listen();
    let client = strange(Manners {
        is_silent: true,
        ..Manners::default()
    })
    .await;
    let trying = tokio::spawn(client.lock("a").try_acquire());
    let waiting = tokio::spawn(client.lock("b").acquire());
    let limited = client.lock("c").wait(Duration::from_secs(2)).acquire().await;
    assert!(
        matches!(limited, Err(Error::OutcomeUnknown { .. })),
        "{limited:?}"
    );
    sleep(Duration::from_millis(2990)).await;
    assert_eq!(log.count("has not answered an acquire"), 0);
    sleep(100 * MS).await;
    // The request of the call that gave up is waited for in the background.
    for (key, warnings) in [("key=a", 1), ("key=b", 1), ("key=c", 1)] {
        assert_eq!(log.count(key), warnings, "{key}");
    }
    sleep(Duration::from_secs(600)).await;
    assert_eq!(log.count("has not answered an acquire"), 3);
    assert!(!trying.is_finished() && !waiting.is_finished());
    trying.abort();
    waiting.abort();
}

#[tokio::test(start_paused = true)]
async fn store_that_answers_too_few_renewals_is_warned_of_once_before_the_loss() {
    let log = Log::default();
    let _listening = log.listen();
    let client = strange(Manners {
        renewals_fall_short: true,
        ..Manners::default()
    })
    .await;
    let guard = client.lock("k").acquire().await.unwrap();
    assert_eq!(guard.lost().await, Loss::Expired);
    assert_eq!(log.count("WARN"), 2, "suspect, and lost");
    let unconfirmed = log.count("a lock could not be confirmed; its lease has not ended");
    assert_eq!(unconfirmed, 1);
    // In both: it is the reason of the loss.
    assert_eq!(log.count("the store answered 0 of 1 renewals"), 2);
}

#[test]
fn news_without_end_do_not_outlast_the_wait() {
    in_time(|| {
        runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(async {
                let client = strange(Manners {
                    always_notifies: true,
                    ..Manners::default()
                })
                .await;
                let _guard = client.lock("k").acquire().await.unwrap();
                let refused = client.lock("k").wait(50 * MS).acquire().await;
                assert!(refused.is_err_and(|error| error.is_busy()));
            });
    });
}

/// A lease beyond all bounds is a year, as for any other holder.
#[tokio::test(start_paused = true)]
async fn test_store_is_busy_for_as_long_as_it_is_told() {
    let store = TestStore::new();
    let client = store.client();
    let busy = store.busy_for("k", Duration::MAX);
    assert!(client.lock("k").try_acquire().await.unwrap_err().is_busy());
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert!(client.lock("k").try_acquire().await.unwrap_err().is_busy());
    drop(busy);
    drop(client.lock("k").try_acquire().await.unwrap());
}

/// Locks are for any executor: outside of tokio their timers are those of the client's runtime.
#[test]
fn calls_outside_of_a_runtime_wait_and_release() {
    use futures_util::future::join;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap();
    let (one, two) = runtime.block_on(async {
        let store = TestStore::new();
        (store.client(), store.client())
    });
    let guard = block_on(one.lock("k").acquire()).unwrap();
    let busy = block_on(two.lock("k").wait(Duration::from_millis(20)).acquire());
    assert!(busy.unwrap_err().is_busy());
    let (next, released) = block_on(join(two.lock("k").acquire(), guard.release()));
    released.unwrap();
    let next = next.unwrap();
    assert_eq!(block_on(two.survey("k", false)).locks.len(), 1);
    block_on(two.shutdown(Duration::from_millis(20)));
    drop(runtime);
    // No request is answered any more, and nothing panics.
    let _ = block_on(next.release());
    let closed = block_on(one.lock("k").acquire());
    assert!(matches!(closed, Err(dlock::Error::ClientClosed)), "{closed:?}");
}

/// Nothing is repeated any more, as there are no timers.
#[test]
fn operations_outside_of_a_runtime_end_with_that_of_the_client() {
    in_time(|| {
        let runtime = runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let store = TestStore::new();
        let client = runtime.block_on(async { store.client() });
        let guard = block_on(client.lock("k").acquire()).unwrap();
        store.set_down(true);
        let mut release = Box::pin(guard.release());
        let latch = client.latch("l");
        let mut count = Box::pin(latch.try_set_count(1));
        let mut context = Context::from_waker(Waker::noop());
        assert!(release.as_mut().poll(&mut context).is_pending());
        assert!(count.as_mut().poll(&mut context).is_pending());
        drop(runtime);
        let released = block_on(release);
        assert!(
            matches!(released, Err(Error::OutcomeUnknown { .. })),
            "{released:?}"
        );
        for counted in [block_on(count), block_on(latch.try_set_count(1))] {
            assert!(counted.unwrap_err().is_unavailable());
        }
    });
}

/// A future on this thread, by an executor that is not tokio's.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        if let std::task::Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        std::thread::park();
    }
}

/// Without timers all holds would end: the client says so before there are any.
#[test]
#[should_panic = "timers are disabled"]
fn client_refuses_a_runtime_without_timers() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async { drop(dlock::LockClient::memory()) });
}

/// The same of a store of servers, where the connections need I/O as well.
#[test]
fn client_of_servers_refuses_a_runtime_without_timers_or_io() {
    for url in [
        "redis://127.0.0.1:1",
        "redis+cluster://127.0.0.1:1",
        "quorum+redis://127.0.0.1:1,127.0.0.2:1,127.0.0.3:1",
    ] {
        for (timers, says) in [(false, "timers are disabled"), (true, "IO is disabled")] {
            let mut builder = tokio::runtime::Builder::new_current_thread();
            let runtime = match timers {
                true => builder.enable_time(),
                false => builder.enable_io(),
            };
            let runtime = runtime.build().unwrap();
            let connect = || drop(runtime.block_on(dlock::LockClient::connect(url)));
            let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(connect)).unwrap_err();
            let text = panic.downcast_ref::<&str>().map(ToString::to_string);
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap();
            assert!(text.contains(says), "{url}: {text}");
        }
    }
}

/// What an event costs is kept for all threads, and one without a subscriber switches it off.
mod alone {
    use super::*;

    #[test]
    fn a_subscriber_may_ask_the_client_from_within_an_event() {
        in_time(|| {
            let (slot, events) = (Arc::new(Mutex::new(None)), Arc::new(AtomicUsize::new(0)));
            let _here = tracing::subscriber::set_default(Asks(slot.clone(), events.clone()));
            paused().block_on(async {
                let store = TestStore::new();
                let client = store.client();
                *slot.lock() = Some(client.clone());
                let fixed = client
                    .lock("fixed")
                    .fixed_lease(100 * MS)
                    .acquire()
                    .await
                    .unwrap();
                assert_eq!(fixed.lost().await, Loss::Expired);
                let renewed = client.lock("renewed").acquire().await.unwrap();
                store.fail_next(Step::Renew, Fault::Unreachable);
                sleep(Duration::from_secs(60)).await;
                assert!(renewed.is_held());
                store.lose("renewed");
                assert!(events.load(Ordering::Relaxed) > 3);
                *slot.lock() = None;
            });
        });
    }
}
