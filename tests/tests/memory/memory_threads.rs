//! Locks in several threads and runtimes at once, where nearly everything goes wrong that can: callers that go away at any
//! poll, leases that run out, renewals that hang, answers that are slow, releases that are not polled on, and a
//! store that forgets. The simulation has all of that, but one thread.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Poll};
use std::time::Duration;

use dlock::store::{
    AcquireReply, AcquireRequest, Capabilities, GrantId, Kind, ReleaseReply, ReleaseRequest, RenewRequest,
    Renewal, Store, StoreError, StoreFuture, Watch,
};
use dlock::stores::memory::MemoryStore;
use dlock::{Error, Held, Lock, LockClient, LockGuard, LockKey};
use dlock_tests::Watched;
use fastrand::Rng;
use parking_lot::Mutex;
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);
const KEYS: usize = 2;

/// What is allowed to happen.
#[derive(Clone, Copy, PartialEq)]
enum Weather {
    /// All options, leases that run out: still one holder at a time by any holder's own clock, and tokens
    /// that grow.
    Rough,
    /// The store forgets and takes locks away too, and a client is shut down: no task waits for ever, nothing
    /// is left, and no token is used twice.
    Wild,
}

/// What a lock protects.
#[derive(Default)]
struct Register {
    inside: Vec<Held>,
    tokens: Vec<u64>,
}

struct World {
    weather: Weather,
    watched: [Watched; 2],
    clients: [LockClient; 2],
    registers: [Mutex<Register>; KEYS],
}

/// A future that is given up after so many polls.
struct Patience<F> {
    future: Option<Pin<Box<F>>>,
    polls: u32,
}

fn patience<F: Future>(future: F, polls: u32) -> Patience<F> {
    Patience {
        future: Some(Box::pin(future)),
        polls,
    }
}

impl<F: Future> Future for Patience<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(future) = &mut self.future else {
            return Poll::Ready(None);
        };
        if let Poll::Ready(output) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(output));
        }
        self.polls = self.polls.saturating_sub(1);
        if self.polls == 0 {
            self.future = None;
            return Poll::Ready(None);
        }
        Poll::Pending
    }
}

impl World {
    async fn new(weather: Weather) -> World {
        let store = MemoryStore::new();
        let watched = [Watched::new(store.clone()), Watched::new(store)];
        let client = |watched: &Watched| {
            LockClient::builder()
                .store(watched.clone())
                .lease(150 * MS)
                .build()
        };
        let clients = [
            client(&watched[0]).await.unwrap(),
            client(&watched[1]).await.unwrap(),
        ];
        World {
            weather,
            watched,
            clients,
            registers: Default::default(),
        }
    }

    fn lock(&self, process: usize, key: usize, rng: &mut Rng) -> Lock {
        let mut lock = self.clients[process].lock(format!("{key}"));
        if rng.u32(..4) == 0 {
            lock = lock.local_handoffs(rng.u32(..4));
        }
        if rng.u32(..6) == 0 {
            lock = lock.lease(66 * MS);
        }
        if rng.u32(..8) == 0 {
            lock = lock.fixed_lease(rng.u32(30..66) * MS);
        }
        if rng.u32(..6) == 0 {
            lock = lock.max_hold(rng.u32(20..250) * MS);
        } else if rng.u32(..8) == 0 {
            lock = lock.min_hold(rng.u32(1..25) * MS);
        }
        if rng.u32(..6) == 0 {
            lock = lock.wait(rng.u32(1..40) * MS);
        }
        if rng.u32(..8) == 0 {
            lock = lock.max_waiters(rng.usize(..6));
        }
        lock
    }

    async fn take(&self, process: usize, key: usize, rng: &mut Rng) -> Option<LockGuard> {
        let lock = self.lock(process, key, rng);
        let once = rng.u32(..8) == 0;
        let got = if once {
            Some(lock.try_acquire().await)
        } else if rng.u32(..3) == 0 {
            patience(lock.acquire(), rng.u32(1..6)).await
        } else if rng.u32(..4) == 0 {
            // Not polled for a while, with the lock in its hands perhaps.
            let mut acquire = Box::pin(lock.acquire());
            match futures_util::poll!(acquire.as_mut()) {
                Poll::Ready(got) => Some(got),
                Poll::Pending => {
                    sleep(rng.u32(..13) * MS).await;
                    patience(acquire, rng.u32(1..12)).await
                }
            }
        } else if rng.u32(..4) == 0 {
            timeout(rng.u32(..12) * MS, lock.acquire()).await.ok()
        } else {
            Some(lock.acquire().await)
        };
        match got {
            Some(Ok(guard)) => {
                self.enter(key, &guard);
                Some(guard)
            }
            Some(Err(
                Error::NotAcquired { .. } | Error::TooManyWaiters { .. } | Error::InvalidOption { .. },
            ))
            | None => None,
            Some(Err(Error::ClientClosed)) if self.weather == Weather::Wild => None,
            // It was polled so late that the lease had run out, or the wait ended before the store replied.
            Some(Err(Error::Unreachable { .. } | Error::OutcomeUnknown { .. })) => None,
            Some(Err(error)) => panic!("{error}"),
        }
    }

    fn enter(&self, key: usize, guard: &LockGuard) {
        let mut register = self.registers[key].lock();
        let token = guard.fencing_token();
        if !guard.is_held() {
            // So long ago that another client may have held it.
            return;
        }
        match self.weather {
            Weather::Wild => assert!(!register.tokens.contains(&token), "a token was used twice"),
            _ => {
                assert!(
                    !register.inside.iter().any(Held::is_held),
                    "two hold the lock by their own clocks"
                );
                assert!(
                    register.tokens.last().is_none_or(|last| *last < token),
                    "a token does not grow"
                );
            }
        }
        register.tokens.push(token);
        register.inside.retain(Held::is_held);
        register.inside.push(guard.held());
    }

    async fn release(&self, guard: LockGuard, rng: &mut Rng) {
        let view = guard.held();
        match rng.u32(..7) {
            0 => drop(guard),
            6 => std::thread::spawn(move || drop(guard)).join().unwrap(),
            1 => {
                let _ = patience(guard.release(), rng.u32(1..3)).await;
            }
            2 => {
                // Begun, and then forgotten for a while.
                let mut release = Box::pin(guard.release());
                let _ = futures_util::poll!(release.as_mut());
                sleep(rng.u32(..13) * MS).await;
                drop(release);
            }
            3 => {
                if let Ok(second) = guard.reenter() {
                    drop(guard);
                    yield_now().await;
                    drop(second);
                }
            }
            4 => {
                if rng.bool() {
                    let _ = timeout(5 * MS, view.ensure(rng.u32(1..200) * MS)).await;
                }
                drop(guard);
            }
            _ => {
                let _ = guard.release().await;
            }
        }
        assert!(!view.is_held());
    }

    async fn comes_and_goes(&self, process: usize, mut rng: Rng) {
        for _ in 0..25 {
            let key = if rng.u32(..4) == 0 { 1 } else { 0 };
            let Some(guard) = self.take(process, key, &mut rng).await else {
                if rng.bool() {
                    sleep(rng.u32(..6) * MS).await;
                }
                continue;
            };
            match rng.u32(..8) {
                0 => sleep(rng.u32(1..9) * MS).await,
                1 => yield_now().await,
                2 if rng.u32(..4) == 0 => {
                    sleep(rng.u32(1..416) * MS).await;
                }
                _ => {}
            }
            self.release(guard, &mut rng).await;
        }
    }

    async fn trouble(&self, mut rng: Rng) {
        loop {
            sleep(rng.u32(1..120) * MS).await;
            let one = rng.usize(..2);
            let seen = self.watched[one].seen();
            match rng.u32(..6) {
                0 => seen.slow_answers.store(rng.usize(..4), SeqCst),
                1 => seen.doubts.tell(Default::default()),
                2 => {
                    seen.hang_renewals.store(true, SeqCst);
                    sleep(rng.u32(..250) * MS).await;
                    seen.hang_renewals.store(false, SeqCst);
                }
                3 if self.weather == Weather::Wild => self.watched[0].memory().clear(),
                4 if self.weather == Weather::Wild => {
                    let key = rng.usize(..KEYS).to_string();
                    let forced = self.clients[one].force_release(key).await;
                    assert!(matches!(forced, Ok(_) | Err(Error::ClientClosed)), "{forced:?}");
                }
                _ => {}
            }
        }
    }
}

async fn course(weather: Weather, seed: u64) {
    let mut rng = Rng::with_seed(seed);
    let world = Arc::new(World::new(weather).await);
    let trouble = {
        let (world, rng) = (world.clone(), rng.fork());
        tokio::spawn(async move { world.trouble(rng).await })
    };
    let tasks: Vec<_> = (0..rng.usize(2..16))
        .map(|i| {
            let (world, mut rng) = (world.clone(), rng.fork());
            if i % 4 == 0 {
                // On a runtime of its own, which ends in the middle.
                return tokio::task::spawn_blocking(move || {
                    let runtime = tokio::runtime::Builder::new_current_thread()
                        .enable_all()
                        .build()
                        .unwrap();
                    let visitors = [(); 4].map(|()| {
                        let (world, rng) = (world.clone(), rng.fork());
                        runtime.spawn(async move { world.comes_and_goes(i % 3 % 2, rng).await })
                    });
                    runtime.block_on(sleep(rng.u32(1..60) * MS));
                    // What they saw wrong is in those that ended.
                    for visitor in visitors.into_iter().filter(|visitor| visitor.is_finished()) {
                        runtime.block_on(visitor).unwrap();
                    }
                });
            }
            tokio::spawn(async move { world.comes_and_goes(i % 3 % 2, rng).await })
        })
        .collect();
    if weather == Weather::Wild && rng.u32(..3) == 0 {
        sleep(rng.u32(..200) * MS).await;
        world.clients[0].shutdown(rng.u32(..50) * MS).await;
    }
    for task in tasks {
        timeout(60 * SEC, task)
            .await
            .expect("a task waits for ever")
            .unwrap();
    }
    trouble.abort();
    let ended = trouble.await.unwrap_err();
    assert!(ended.is_cancelled(), "the trouble ended: {ended}");
    for watched in &world.watched {
        watched.seen().slow_answers.store(0, SeqCst);
        watched.seen().hang_renewals.store(false, SeqCst);
    }
    // Leases of grants that no client could release, and what `min_hold` keeps.
    let store = world.watched[0].memory();
    for _ in 0..100 {
        sleep(100 * MS).await;
        if store.is_empty() && world.clients.iter().all(|client| client.held() == 0) {
            break;
        }
    }
    for client in &world.clients {
        assert_eq!((client.held(), client.waited_for()), (0, 0));
    }
    assert!(store.is_empty(), "something is held");
    assert_eq!(store.watched(), 0, "something is listened for");
}

async fn courses(weather: Weather) {
    for seed in 0..4 {
        println!("seed {seed}");
        course(weather, seed).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn in_rough_weather() {
    courses(Weather::Rough).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn in_wild_weather() {
    courses(Weather::Wild).await;
}

/// A store in memory to which the second request of all gets late: its thread is stopped for a while on the way.
#[derive(Debug)]
struct SecondIsLate {
    memory: Arc<MemoryStore>,
    acquires: AtomicUsize,
}

impl Store for SecondIsLate {
    fn capabilities(&self) -> Capabilities {
        self.memory.capabilities()
    }

    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        if self.acquires.fetch_add(1, SeqCst) == 1 {
            std::thread::sleep(200 * MS);
        }
        Store::acquire(self.memory.clone(), request)
    }

    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        Store::release(self.memory.clone(), request)
    }

    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        Store::renew(self.memory.clone(), requests)
    }

    fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        Store::watch(self.memory.clone(), kind, key, grant)
    }
}

/// Only the first waiter of a process listens. If another one of it could be first at the store, the lock would stay
/// available until that one asks again.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn waiters_of_two_threads_have_one_order_here_and_at_the_store() {
    let store = Arc::new(SecondIsLate {
        memory: Arc::new(MemoryStore::new()),
        acquires: AtomicUsize::new(0),
    });
    let client = LockClient::builder()
        .shared_store(store.clone())
        .build()
        .await
        .unwrap();
    let held = client.fair_lock("k").acquire().await.unwrap();
    let served: Arc<Mutex<Vec<usize>>> = Arc::default();
    let mut tasks = Vec::new();
    for name in 1..=2 {
        let (lock, served) = (client.fair_lock("k"), served.clone());
        tasks.push(tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            served.lock().push(name);
            guard.release().await.unwrap();
        }));
        while store.acquires.load(SeqCst) <= name {
            sleep(MS).await;
        }
    }
    held.release().await.unwrap();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(*served.lock(), [1, 2]);
}
