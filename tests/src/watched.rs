//! A third-party store: memory with a counter on every verb, and switches that stop it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use dlock::store::Kind;
use dlock::store::counter::{CounterReply, CounterRequest, Counters};
use dlock::store::{
    AcquireAllReply, AcquireReply, AcquireRequest, Capabilities, DoubtSender, Doubts, GrantId, Holder, Lane,
    Reason, ReleaseReply, ReleaseRequest, RenewRequest, Renewal, Store, StoreError, StoreFuture, Watch,
};
use dlock::stores::memory::MemoryStore;
use dlock::{LockClient, LockKey};

/// A client with a store that is watched.
///
/// # Panics
/// When the client cannot be built.
pub async fn watched() -> (Watched, LockClient) {
    let watched = Watched::new(MemoryStore::new());
    let client = LockClient::builder().store(watched.clone()).build().await;
    (watched, client.expect("a client of memory"))
}

/// Counts the steps of a client, and can keep renewals from being answered.
#[derive(Debug, Clone)]
pub struct Watched {
    memory: MemoryStore,
    seen: Arc<Seen>,
}

/// What came by.
#[derive(Debug)]
pub struct Seen {
    /// Acquire steps.
    pub acquires: AtomicUsize,
    /// Several locks can be acquired in one step, which is one acquire step.
    pub together: AtomicBool,
    /// Release steps.
    pub releases: AtomicUsize,
    /// Renewals of single grants.
    pub renewals: AtomicUsize,
    /// Calls that carried them.
    pub renew_calls: AtomicUsize,
    /// Acquires and steps on counters are not answered and not done.
    pub hang_acquires: AtomicBool,
    /// Acquires and steps on counters fail at once, and are not done.
    pub fail_acquires: AtomicBool,
    /// Renewals are not answered and not done.
    pub hang_renewals: AtomicBool,
    /// Renewals fail, and are not done.
    pub fail_renewals: AtomicBool,
    /// Renewals in this lane hang.
    pub hang_lane: AtomicUsize,
    /// For so many milliseconds the answers to acquires, releases and renewals are on their way.
    pub slow_answers: AtomicUsize,
    /// How long after its call a release is carried out, in milliseconds.
    pub late_releases: AtomicUsize,
    /// Tells of suspect lanes.
    pub doubts: DoubtSender,
}

impl Watched {
    /// A store on a store, with counters of its own.
    pub fn new(memory: MemoryStore) -> Watched {
        let seen = Seen {
            acquires: AtomicUsize::new(0),
            together: AtomicBool::new(false),
            releases: AtomicUsize::new(0),
            renewals: AtomicUsize::new(0),
            renew_calls: AtomicUsize::new(0),
            hang_acquires: AtomicBool::new(false),
            fail_acquires: AtomicBool::new(false),
            hang_renewals: AtomicBool::new(false),
            fail_renewals: AtomicBool::new(false),
            hang_lane: AtomicUsize::new(usize::MAX),
            slow_answers: AtomicUsize::new(0),
            late_releases: AtomicUsize::new(0),
            doubts: DoubtSender::new(),
        };
        Watched {
            memory,
            seen: Arc::new(seen),
        }
    }

    /// The store.
    pub fn memory(&self) -> &MemoryStore {
        &self.memory
    }

    /// The counters.
    pub fn seen(&self) -> &Seen {
        &self.seen
    }

    fn inner(&self) -> Arc<MemoryStore> {
        Arc::new(self.memory.clone())
    }

    /// The step is done when it is called, unless the store hangs or fails.
    fn asked<T, F: Future<Output = Result<T, StoreError>>, S: FnOnce() -> F>(
        &self,
        step: S,
    ) -> impl Future<Output = Result<T, StoreError>> + use<T, F, S> {
        let hangs = self.seen.hang_acquires.load(Ordering::SeqCst);
        let fails = self.seen.fail_acquires.load(Ordering::SeqCst);
        let step = (!hangs && !fails).then(|| self.on_its_way(step()));
        async move {
            match step {
                Some(step) => step.await,
                None if hangs => std::future::pending().await,
                None => Err(StoreError::not_done(Reason::Unreachable, "it is not there")),
            }
        }
    }

    /// The step was done when it was called; its answer takes a while.
    fn on_its_way<F: Future>(&self, step: F) -> impl Future<Output = F::Output> + use<F> {
        let slow = self.seen.slow_answers.load(Ordering::SeqCst) as u64;
        async move {
            if slow > 0 {
                tokio::time::sleep(Duration::from_millis(slow)).await;
            }
            step.await
        }
    }
}

/// The lane of a key that begins with a digit is that digit.
fn lane(key: &LockKey) -> u32 {
    key.as_str()
        .chars()
        .next()
        .and_then(|c| c.to_digit(10))
        .unwrap_or(0)
}

impl Store for Watched {
    fn capabilities(&self) -> Capabilities {
        self.inner().capabilities()
    }

    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        self.seen.acquires.fetch_add(1, Ordering::SeqCst);
        let inner = self.inner();
        Box::pin(self.asked(move || Store::acquire(inner, request)))
    }

    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        self.seen.releases.fetch_add(1, Ordering::SeqCst);
        let late = self.seen.late_releases.load(Ordering::SeqCst) as u64;
        if late == 0 {
            return Box::pin(self.on_its_way(Store::release(self.inner(), request)));
        }
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(late)).await;
            Store::release(self.inner(), request).await
        })
    }

    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        Box::pin(async move {
            self.seen.renew_calls.fetch_add(1, Ordering::SeqCst);
            self.seen.renewals.fetch_add(requests.len(), Ordering::SeqCst);
            let slow = requests
                .iter()
                .any(|request| lane(&request.key) as usize == self.seen.hang_lane.load(Ordering::SeqCst));
            if slow || self.seen.hang_renewals.load(Ordering::SeqCst) {
                std::future::pending::<()>().await;
            }
            if self.seen.fail_renewals.load(Ordering::SeqCst) {
                let failed = Err(StoreError::not_done(Reason::Unreachable, "it is not there"));
                return self.on_its_way(std::future::ready(failed)).await;
            }
            self.on_its_way(Store::renew(self.inner(), requests)).await
        })
    }

    fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
        Store::inspect(self.inner(), key)
    }

    fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
        Store::list(self.inner(), prefix)
    }

    fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool> {
        Store::force_release(self.inner(), key)
    }

    fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        Store::watch(self.inner(), kind, key, grant)
    }

    fn counters(self: Arc<Self>) -> Option<Arc<dyn Counters>> {
        Some(self)
    }

    fn lane(&self, key: &LockKey) -> Lane {
        Lane(lane(key))
    }

    fn together(&self, kind: Kind, key: &LockKey) -> Option<u32> {
        let together = self.seen.together.load(Ordering::SeqCst);
        together.then(|| Store::together(&self.memory, kind, key))?
    }

    fn acquire_all(self: Arc<Self>, requests: Vec<AcquireRequest>) -> StoreFuture<AcquireAllReply> {
        self.seen.acquires.fetch_add(1, Ordering::SeqCst);
        let inner = self.inner();
        Box::pin(self.asked(move || Store::acquire_all(inner, requests)))
    }

    fn doubts(&self) -> Doubts {
        self.seen.doubts.subscribe()
    }
}

impl Counters for Watched {
    fn count(self: Arc<Self>, request: CounterRequest) -> StoreFuture<CounterReply> {
        let inner = self.inner();
        Box::pin(self.asked(move || Counters::count(inner, request)))
    }
}
