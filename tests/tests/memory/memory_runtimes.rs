//! Calls and steps on several runtimes, and on none: a step may outlive the runtime that polled it first, a store belongs to the
//! runtime that the builder was told, and any executor may poll a call.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::mpsc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use dlock::operations::{Intervention, LossReason};
use dlock::store::counter::{CounterReply, CounterRequest, Counters};
use dlock::store::operations::Operations;
use dlock::store::queue::{Connect, Link, Next, Step, StepQueue};
use dlock::store::{
    AcquireReply, AcquireRequest, Capabilities, Holder, Kind, OpenRequest, ReleaseReply, ReleaseRequest,
    RenewRequest, Renewal, Scheme, Store, StoreError, StoreFuture,
};
use dlock::stores::memory::MemoryStore;
use dlock::{Error, LockClient, LockGuard, LockKey, Loss, OnFailure, OnceError, OnceReply, SlotReply};
use futures_util::FutureExt;
use futures_util::future::try_join_all;
use tokio::runtime::{self, Runtime};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};
use tracing::Event;
use tracing::subscriber::set_default;
use tracing_subscriber::layer::{Context as LogContext, SubscriberExt};
use tracing_subscriber::{Layer, Registry, registry};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);

/// Something that the connection carries out.
struct Work {
    key: Arc<str>,
    acquires: bool,
    releases: bool,
    run: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work")
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}

impl Step for Work {
    type Answer = ();

    fn keys(&self) -> impl Iterator<Item = &Arc<str>> {
        std::iter::once(&self.key)
    }

    fn acquires(&self) -> bool {
        self.acquires
    }
}

/// A connection that takes its time for releases.
struct Toy {
    releases: AtomicU32,
}

impl Connect<Work> for Toy {
    type Session = ();

    async fn connect(&self) -> Result<(), StoreError> {
        Ok(())
    }

    async fn serve(&self, _session: (), link: &mut Link<Work>) -> Option<String> {
        link.is_ready();
        loop {
            match link.queue().next(Instant::now(), |_| true) {
                Next::Send(jobs) => {
                    for mut job in jobs {
                        if job.step.releases {
                            self.releases.fetch_add(1, SeqCst);
                            sleep(300 * MS).await;
                        }
                        (&mut job.step.run).await;
                        link.queue().answer(job, Ok(()));
                    }
                }
                Next::Wait(_) => link.queue().woken().await,
                Next::End => return None,
            }
        }
    }
}

/// A store on a queue of steps, as those of databases are; its connection belongs to the runtime that opened it.
struct Queued {
    memory: Arc<MemoryStore>,
    queue: Arc<StepQueue<Work>>,
    toy: Arc<Toy>,
}

impl Queued {
    /// Opens it in this runtime.
    fn open() -> Arc<Queued> {
        let toy = Arc::new(Toy {
            releases: AtomicU32::new(0),
        });
        let queue = Arc::new(StepQueue::new("toy", 2 * SEC));
        tokio::spawn(queue.serve(toy.clone(), None));
        Arc::new(Queued {
            memory: Arc::new(MemoryStore::new()),
            queue,
            toy,
        })
    }

    fn step<T, F>(
        &self,
        key: &str,
        run: impl FnOnce(Arc<MemoryStore>) -> F + Send + 'static,
    ) -> StoreFuture<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        self.work(key, (false, false), run)
    }

    fn work<T, F>(
        &self,
        key: &str,
        (acquires, releases): (bool, bool),
        run: impl FnOnce(Arc<MemoryStore>) -> F + Send + 'static,
    ) -> StoreFuture<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let (reply, result) = oneshot::channel();
        let memory = self.memory.clone();
        let answer = self.queue.ask(Work {
            key: key.into(),
            acquires,
            releases,
            run: Box::pin(async move { drop(reply.send(run(memory).await)) }),
        });
        Box::pin(async move {
            answer.await?;
            result.await.unwrap()
        })
    }
}

impl Store for Queued {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new([Kind::Mutex])
    }

    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        let key = request.key.clone();
        self.work(key.as_str(), (true, false), |memory| memory.acquire(request))
    }

    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        let key = request.key.clone();
        self.work(key.as_str(), (false, true), |memory| memory.release(request))
    }

    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        self.step("renewals", |memory| memory.renew(requests))
    }

    fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
        self.step("look", |memory| memory.inspect(key))
    }

    fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
        self.step("look", |memory| memory.list(prefix))
    }

    fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool> {
        self.step("force", |memory| memory.force_release(key))
    }

    fn operations(self: Arc<Self>) -> Option<Arc<dyn Operations>> {
        Some(self.memory.clone())
    }
}

fn a_runtime() -> Runtime {
    runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
}

/// A future on this thread, by an executor that is not tokio's.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(thread::current())).into();
    let mut context = Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        thread::park();
    }
}

/// Polls a future once, in a task of a runtime that ends right after that.
fn polled_once_on_another_runtime<F>(future: F)
where
    F: Future + Send + 'static,
{
    let guest = a_runtime();
    let (polled, is_polled) = mpsc::channel();
    guest.spawn(async move {
        let mut future = Box::pin(future);
        assert!(future.as_mut().now_or_never().is_none());
        polled.send(()).unwrap();
        std::future::pending::<()>().await;
        drop(future);
    });
    is_polled.recv().unwrap();
    drop(guest);
}

/// A client on a queued store, both of this runtime.
fn queued_client(home: &Runtime) -> (Arc<Queued>, LockClient) {
    home.block_on(async {
        let store = Queued::open();
        let client = LockClient::builder().shared_store(store.clone()).build();
        (store, client.await.unwrap())
    })
}

#[test]
fn release_goes_on_when_the_runtime_ends_that_polled_it() {
    let home = a_runtime();
    let (store, client) = queued_client(&home);
    let guard = home.block_on(client.lock("k").acquire()).unwrap();
    polled_once_on_another_runtime(guard.release());
    let report = home.block_on(client.shutdown(5 * SEC));
    assert_eq!((report.lost, report.unconfirmed), (0, 0));
    // A step that panicked would be repeated.
    assert_eq!(store.toy.releases.load(SeqCst), 1);
}

#[test]
fn release_that_nothing_finishes_is_unconfirmed() {
    for guard_goes_first in [true, false] {
        let home = a_runtime();
        let (_store, client) = queued_client(&home);
        let guard = home.block_on(client.lock("k").acquire()).unwrap();
        match guard_goes_first {
            true => drop((guard, home)),
            false => drop((home, guard)),
        }
        let report = block_on(client.shutdown(SEC));
        assert_eq!((report.lost, report.unconfirmed), (0, 1), "{guard_goes_first}");
    }
}

/// A store whose first operation on a counter panics when it is polled again.
struct Panics {
    memory: Arc<MemoryStore>,
    counts: AtomicU32,
}

impl Store for Panics {
    fn capabilities(&self) -> Capabilities {
        self.memory.capabilities()
    }

    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        self.memory.clone().acquire(request)
    }

    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        self.memory.clone().release(request)
    }

    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        self.memory.clone().renew(requests)
    }

    fn counters(self: Arc<Self>) -> Option<Arc<dyn Counters>> {
        Some(self)
    }
}

impl Counters for Panics {
    fn count(self: Arc<Self>, request: CounterRequest) -> StoreFuture<CounterReply> {
        let before = self.counts.fetch_add(1, SeqCst);
        assert!(before != 0, "the first call");
        let step = self.memory.clone().counters().unwrap().count(request);
        Box::pin(async move {
            let reply = step.await;
            assert!(before != 1, "the second call, which was carried out");
            reply
        })
    }
}

#[tokio::test(start_paused = true)]
async fn counter_step_that_panics_is_sent_again_and_counts_once() {
    let store = Panics {
        memory: Arc::new(MemoryStore::new()),
        counts: AtomicU32::new(2),
    };
    let store = Arc::new(store);
    let client = LockClient::builder().shared_store(store.clone()).build();
    let latch = client.await.unwrap().latch("l");
    assert!(latch.try_set_count(5).await.unwrap());
    store.counts.store(0, SeqCst);
    assert_eq!(latch.count_down().await.unwrap(), 4);
    assert_eq!(latch.count().await.unwrap(), 4);
}

#[tokio::test(start_paused = true)]
async fn waiter_for_more_permits_counts_them_again_where_the_step_panics() {
    let memory = Arc::new(MemoryStore::new());
    let other = LockClient::builder().shared_store(memory.clone()).build();
    let other = other.await.unwrap().semaphore("s");
    assert!(other.try_set_permits(3).await.unwrap());
    let store = Panics {
        memory,
        counts: AtomicU32::new(0),
    };
    let store = Arc::new(store);
    let client = LockClient::builder().shared_store(store.clone()).build();
    let waits = tokio::spawn(client.await.unwrap().semaphore("s").acquire_many(5));
    sleep(60 * SEC).await;
    assert!(store.counts.load(SeqCst) > 2 && !waits.is_finished());
    other.add_permits(2).await.unwrap();
    drop(waits.await.unwrap().unwrap());
}

/// A store that carries out no first release.
struct FailsOnce {
    memory: Arc<MemoryStore>,
    releases: AtomicU32,
}

impl Store for FailsOnce {
    fn capabilities(&self) -> Capabilities {
        self.memory.capabilities()
    }

    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        self.memory.clone().acquire(request)
    }

    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        match self.releases.fetch_add(1, SeqCst) {
            0 => Box::pin(std::future::ready(Err(StoreError::unknown("it was lost")))),
            _ => self.memory.clone().release(request),
        }
    }

    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        self.memory.clone().renew(requests)
    }
}

/// A log that does this at entries with a text.
struct At<F>(&'static str, F);

impl<F: Fn() + Send + Sync + 'static> Layer<Registry> for At<F> {
    fn on_event(&self, event: &Event<'_>, _: LogContext<'_, Registry>) {
        let mut text = String::new();
        event.record(&mut |_: &tracing::field::Field, value: &dyn std::fmt::Debug| {
            text.push_str(&format!("{value:?}"));
        });
        if text.contains(self.0) {
            (self.1)();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn log_that_panics_keeps_no_release_from_being_repeated() {
    let store = Arc::new(FailsOnce {
        memory: Arc::new(MemoryStore::new()),
        releases: AtomicU32::new(0),
    });
    let client = LockClient::builder().shared_store(store.clone()).build();
    let client = client.await.unwrap();
    let guard = client.lock("k").acquire().await.unwrap();
    let log = At("a release failed and is repeated", || panic!("the log panics"));
    let logged = set_default(registry().with(log));
    guard.release().await.unwrap();
    drop(logged);
    assert_eq!(store.releases.load(SeqCst), 2);
}

/// A store, and a client of it with ten locks that it renews.
async fn ten_holds() -> (MemoryStore, LockClient, Vec<LockGuard>) {
    let store = MemoryStore::new();
    let client = LockClient::builder()
        .store(store.clone())
        .lease(SEC)
        .build()
        .await
        .unwrap();
    let locks = (0..10).map(|n| client.lock(format!("k{n}")));
    let guards = try_join_all(locks.map(|lock| async move { lock.acquire().await }))
        .await
        .unwrap();
    (store, client, guards)
}

#[tokio::test(start_paused = true)]
async fn log_that_panics_at_a_loss_keeps_no_holder_from_learning_of_its_own_and_the_client_at_work() {
    let (store, client, guards) = ten_holds().await;
    let logged = set_default(registry().with(At("a lock was lost", || panic!("the log panics"))));
    store.clear();
    for guard in &guards {
        assert_eq!(timeout(SEC, guard.lost()).await, Ok(Loss::Gone));
    }
    let guard = client.lock("k").acquire().await.unwrap();
    sleep(10 * SEC).await;
    assert!(guard.is_held());
    drop(logged);
}

/// A log may be slow.
#[tokio::test(start_paused = true)]
async fn all_holders_learn_of_their_losses_before_the_first_is_logged() {
    let (store, _client, guards) = ten_holds().await;
    let count = Arc::new(Count::default());
    let waker = Waker::from(count.clone());
    let mut losses: Vec<_> = guards.iter().map(|guard| Box::pin(guard.lost())).collect();
    for loss in &mut losses {
        assert!(loss.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    }
    let (told, known) = mpsc::channel();
    let log = At("a lock was lost", move || {
        told.send(count.0.load(SeqCst)).unwrap()
    });
    let logged = set_default(registry().with(log));
    store.clear();
    sleep(SEC).await;
    drop(logged);
    assert_eq!(known.try_iter().collect::<Vec<_>>(), [10; 10]);
}

/// Counts how often it is called.
#[derive(Default)]
struct Count(AtomicU32);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

#[test]
fn store_of_a_scheme_belongs_to_the_runtime_of_the_client() {
    async fn open(_request: OpenRequest) -> Result<Arc<dyn Store>, StoreError> {
        Ok(Queued::open())
    }
    let (home, guest) = (a_runtime(), a_runtime());
    let builder = LockClient::builder().scheme(Scheme::new(["toy"], open));
    let building = builder.url("toy://").runtime(home.handle().clone()).build();
    let client = guest.block_on(building).unwrap();
    drop(guest);
    let guard = home.block_on(client.lock("k").try_acquire()).unwrap();
    home.block_on(guard.release()).unwrap();
}

#[test]
fn scheme_is_opened_outside_of_a_runtime_and_for_no_runtime_that_has_ended() {
    async fn open(_request: OpenRequest) -> Result<Arc<dyn Store>, StoreError> {
        sleep(MS).await;
        Ok(Queued::open())
    }
    let home = a_runtime();
    let build = || {
        let builder = LockClient::builder().scheme(Scheme::new(["toy"], open));
        builder.url("toy://").runtime(home.handle().clone()).build_store()
    };
    let (opened, late) = (block_on(build()), build());
    assert!(opened.is_ok());
    drop(home);
    assert!(matches!(block_on(late), Err(Error::ClientClosed)));
}

#[tokio::test]
#[should_panic = "the scheme panics"]
async fn panic_of_a_scheme_is_that_of_the_call() {
    async fn open(_request: OpenRequest) -> Result<Arc<dyn Store>, StoreError> {
        panic!("the scheme panics")
    }
    let builder = LockClient::builder().scheme(Scheme::new(["toy"], open));
    let _ = builder.url("toy://").build().await;
}

#[test]
fn steps_of_a_store_whose_runtime_has_ended_fail_at_once() {
    let (of_store, home) = (a_runtime(), a_runtime());
    let store = of_store.block_on(async { Queued::open() });
    let client = home.block_on(LockClient::builder().shared_store(store).build());
    let client = client.unwrap();
    home.block_on(async {
        let guard = client.lock("k").try_acquire().await.unwrap();
        guard.release().await.unwrap();
    });
    drop(of_store);
    let begun = Instant::now();
    let refused = home.block_on(client.lock("k").try_acquire());
    assert!(matches!(refused, Err(Error::ClientClosed)), "{refused:?}");
    assert!(begun.elapsed() < SEC, "{:?}", begun.elapsed());
}

#[test]
fn inspection_needs_no_runtime_of_its_caller() {
    let home = a_runtime();
    let (_store, client) = queued_client(&home);
    let guard = block_on(client.lock("k").acquire()).unwrap();
    assert_eq!(block_on(client.holders("k")).unwrap().len(), 1);
    assert!(block_on(client.inspect("k")).unwrap().is_some());
    assert_eq!(block_on(client.list("")).unwrap().len(), 1);
    assert_eq!(block_on(client.survey("", true)).locks.len(), 1);
    assert!(block_on(client.force_release("k")).unwrap());
    assert!(!block_on(client.force_release("k")).unwrap());
    drop(guard);
}

#[test]
fn work_outside_of_any_runtime_is_dropped_when_that_of_its_client_ends() {
    for is_shut_down in [false, true] {
        let home = a_runtime();
        let client = home.block_on(async { LockClient::memory() });
        let (begun, has_begun) = mpsc::channel();
        let working = std::thread::spawn({
            let client = client.clone();
            move || {
                let work = client.once("work").run(async |_| {
                    begun.send(()).unwrap();
                    std::future::pending::<Result<u32, String>>().await
                });
                block_on(work)
            }
        });
        has_begun.recv().unwrap();
        if is_shut_down {
            let report = home.block_on(client.shutdown(10 * MS));
            assert_eq!(report.unfinished, 1);
        }
        drop(home);
        let ended = working.join().expect("it does not panic");
        assert!(matches!(ended, Err(OnceError::Lost { .. })), "{ended:?}");
    }
}

#[test]
fn work_is_done_once_without_a_runtime_of_its_caller() {
    let home = a_runtime();
    let (client, other) = home.block_on(async {
        let store = MemoryStore::new();
        let build = || LockClient::builder().store(store.clone()).build();
        (build().await.unwrap(), build().await.unwrap())
    });
    let work = |name: &str| client.once(name).on_failure(OnFailure::AtMost(1));
    let run = || work("work").run(async |_| Ok::<_, String>(runtime::Handle::try_current().is_err()));
    assert!(
        matches!(block_on(run()), Ok(OnceReply::Ran(true))),
        "in no runtime"
    );
    assert!(matches!(block_on(run()), Ok(OnceReply::Earlier(true))));

    // It waits for work that is done elsewhere, and does the work that was given up there.
    let (begun, has_begun) = mpsc::channel();
    let elsewhere = home.spawn(async move {
        let done = other.once("wait").run(async |_| {
            begun.send(()).unwrap();
            std::future::pending::<Result<u32, String>>().await
        });
        done.await.unwrap()
    });
    has_begun.recv().unwrap();
    let waiting = client
        .once("wait")
        .wait(20 * MS)
        .run(async |_| Ok::<_, String>(1));
    assert!(matches!(block_on(waiting), Ok(OnceReply::Elsewhere { .. })));
    elsewhere.abort();
    let waiting = client
        .once("wait")
        .wait(60 * SEC)
        .run(async |_| Ok::<_, String>(2));
    assert!(matches!(block_on(waiting), Ok(OnceReply::Ran(2))));

    // Work that is not dropped asks for the loss of its claim.
    let asks = client
        .once("asks")
        .run(async |claim| Ok::<_, String>(claim.lost().now_or_never().is_none()));
    assert!(matches!(block_on(asks), Ok(OnceReply::Ran(true))));

    let every = client.once("every").every(3600 * SEC);
    let ran = block_on(every.run(async |_| Ok::<_, String>(3)));
    assert!(matches!(ran, Ok(SlotReply::Ran(3))), "{ran:?}");
    let mut slots = client.once("slots").every(50 * MS).slots();
    for _ in 0..2 {
        let next = block_on(slots.next(async |_| Ok::<_, String>(4)));
        assert!(matches!(next, Ok(SlotReply::Ran(4))), "{next:?}");
    }
    // Given up in the work, without a runtime.
    let dropped = work("dropped").run(async |_| std::future::pending::<Result<u32, String>>().await);
    assert!(dropped.now_or_never().is_none());
}

#[test]
fn guard_is_confirmed_without_a_runtime_of_its_caller() {
    let home = a_runtime();
    let (_store, client) = queued_client(&home);
    let guard = block_on(client.lock("k").acquire()).unwrap();
    block_on(guard.ensure(3600 * SEC)).unwrap_err();
    block_on(guard.ensure(SEC)).unwrap();
    block_on(guard.release()).unwrap();
}

#[test]
fn reason_of_a_loss_is_told_without_a_runtime_of_the_caller() {
    let home = a_runtime();
    let (_store, client) = queued_client(&home);
    let guard = block_on(client.lock("k").acquire()).unwrap();
    assert!(block_on(client.force_release("k")).unwrap());
    assert!(block_on(guard.ensure(3600 * SEC)).unwrap_err().is_lost());
    let next = block_on(client.lock("k").acquire()).unwrap();
    let taken = block_on(guard.why_lost());
    assert!(matches!(taken, Some(LossReason::Taken { .. })), "{taken:?}");
    drop((next, home));
    // Nothing is asked any more.
    assert_eq!(block_on(guard.why_lost()), Some(LossReason::Gone));
}

#[test]
fn clients_are_asked_without_a_runtime_of_the_caller() {
    let home = a_runtime();
    let (one, other) = home.block_on(async {
        let store = MemoryStore::new();
        let one = LockClient::builder().store(store.clone()).build();
        let other = LockClient::builder().store(store).control(true).build();
        (one.await.unwrap(), other.await.unwrap())
    });
    let said = block_on(one.ask(&other.id())).unwrap().unwrap();
    assert_eq!(said.client, other.id());
    // It does not answer, and that takes a timer.
    assert!(block_on(other.ask(&one.id())).unwrap().is_none());
    assert!(block_on(one.clients()).is_ok());
    drop(home);
    assert!(matches!(block_on(one.ask(&other.id())), Err(Error::ClientClosed)));
}

#[test]
fn holds_are_broken_and_revoked_without_a_runtime_of_the_caller() {
    let home = a_runtime();
    for store in [None, Some(home.block_on(async { Queued::open() }))] {
        let builder = LockClient::builder();
        let builder = match store {
            Some(store) => builder.shared_store(store),
            None => builder.store(MemoryStore::new()),
        };
        let client = home.block_on(builder.build()).unwrap();
        let guard = block_on(client.lock("k").acquire()).unwrap();
        let holder = block_on(client.inspect("k")).unwrap().unwrap().id;
        let why = || Intervention::new("a test").by("me");
        assert!(block_on(client.revoke("k", &holder, why())).unwrap());
        assert!(block_on(client.break_hold("k", &holder, why())).unwrap());
        assert!(!block_on(client.break_hold("k", &holder, why())).unwrap());
        drop(guard);
    }
}
