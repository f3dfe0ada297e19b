//! Locks as keys that are attached to leases.

mod acquire;
mod answers;
mod background;
mod batches;
mod builder;
mod counters;
mod doctor;
mod fair;
mod grants;
mod inner;
mod look;
mod names;
mod permits;
mod pool;
mod positions;
mod queues;
mod release;
mod renew;
mod scheme;
mod seen;
mod session;
mod transaction;
mod unowned;
mod waiters;

use std::fmt;
use std::future::ready;
use std::sync::Arc;

use dlock::store::counter::{CounterReply, CounterRequest, Counters};
use dlock::store::doctor::Diagnose;
use dlock::store::queue::Moment;
use dlock::store::{
    AcquireAllReply, AcquireReply, AcquireRequest, Capabilities, Doubts, GrantId, Holder, Kind,
    Notifications, ReleaseReply, ReleaseRequest, RenewRequest, Renewal, Store, StoreError, StoreFuture,
    Watch,
};
use dlock::{Error, LockKey};

use self::acquire::Ask;
pub use self::builder::EtcdLocksBuilder;
use self::inner::{Abandoned, Inner};
use self::names::Name;
pub use self::scheme::scheme;
use self::session::SHORTEST;
pub use self::transaction::{Committed, FencedTransaction, Proof, TransactionError};
use self::waiters::Changes;

/// The supported kinds.
const KINDS: [Kind; 8] = [
    Kind::Mutex,
    Kind::Fair,
    Kind::Fenced,
    Kind::Read,
    Kind::Write,
    Kind::Permit,
    Kind::Unowned,
    Kind::Latch,
];
/// The most locks in one acquire: a transaction has up to 128 conditions and operations.
const LARGEST_SET: usize = 100;

/// Locks in etcd. Cheap to clone; the connection closes when the last clone, and every
/// [`LockClient`](dlock::LockClient) made of one, is gone.
///
/// ```no_run
/// use dlock::LockClient;
/// use dlock_etcd::EtcdLocks;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let store = EtcdLocks::connect(["a.internal:2379", "b.internal:2379", "c.internal:2379"]).await?;
/// let client = LockClient::builder().store(store.clone()).build().await?;
/// let guard = client.lock("order:42").acquire().await?;
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct EtcdLocks(Arc<Inner>);

impl EtcdLocks {
    /// Connects to one of these servers, each `host:port`, with all options at their defaults.
    ///
    /// The runtime in which this is called serves the connection from then on.
    ///
    /// # Errors
    ///
    /// When no server can be reached, or a server refuses, for example because it is older than 3.4.31 or 3.5.13.
    pub async fn connect(servers: impl IntoIterator<Item = impl Into<String>>) -> Result<EtcdLocks, Error> {
        EtcdLocks::builder(servers).connect().await
    }

    /// Returns options for these servers, each `host:port`; all are members of one cluster.
    pub fn builder(servers: impl IntoIterator<Item = impl Into<String>>) -> EtcdLocksBuilder {
        EtcdLocksBuilder::new(servers.into_iter().map(Into::into).collect())
    }

    fn acquires<T: Send + 'static, F>(
        &self,
        asks: Result<Vec<Ask>, StoreError>,
        work: impl FnOnce(Arc<Inner>, Vec<Ask>, tokio::time::Instant) -> F + Send + 'static,
    ) -> StoreFuture<T>
    where
        F: Future<Output = Result<T, StoreError>> + Send,
    {
        let asks = match asks {
            Ok(asks) => asks,
            Err(error) => return Box::pin(ready(Err(error))),
        };
        let names: Vec<Name> = asks.iter().map(|ask| ask.name.clone()).collect();
        (self.0).step(names, Abandoned::Ends, move |inner, deadline| {
            work(inner, asks, deadline)
        })
    }

    /// Queues an operation on one lock that runs even if its caller is dropped.
    fn goes<T: Send + 'static, F>(
        &self,
        key: &LockKey,
        work: impl FnOnce(Arc<Inner>, Name, tokio::time::Instant) -> F + Send + 'static,
    ) -> StoreFuture<T>
    where
        F: Future<Output = Result<T, StoreError>> + Send,
    {
        let name = match self.0.names.lock(key) {
            Ok(name) => name,
            Err(error) => return Box::pin(ready(Err(error))),
        };
        (self.0).step([name.clone()], Abandoned::Goes, move |inner, deadline| {
            work(inner, name, deadline)
        })
    }
}

impl Store for EtcdLocks {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(KINDS)
            .name("etcd")
            .token_blocks(true)
            .shortest_lease(SHORTEST)
            .min_hold(true)
            .restores_positions(true)
            .limits(true)
            .notifications(Notifications::Certain)
            .largest_set(LARGEST_SET)
            .inspection(true)
    }

    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        let called = Moment::now();
        let ask = Ask::new(&self.0, &request).map(|ask| vec![ask]);
        self.acquires(ask, move |inner, mut asks, deadline| async move {
            let ask = asks.swap_remove(0);
            match ask.kind {
                Kind::Fair => fair::acquire(inner, ask, called, deadline).await,
                Kind::Unowned => unowned::acquire(inner, ask, deadline).await,
                Kind::Permit => permits::acquire(inner, ask, called, deadline).await,
                _ => acquire::one(inner, ask, called, deadline).await,
            }
        })
    }

    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        let key = request.key.clone();
        let keep_until = (!request.keep_for.is_zero()).then(|| Moment::now() + request.keep_for);
        self.0.positions.gives_up(request.grant);
        self.goes(&key, move |inner, name, deadline| {
            release::release(inner, name, request, keep_until, deadline)
        })
    }

    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        let called = Moment::now();
        let steps: Vec<StoreFuture<Renewal>> = requests
            .into_iter()
            .map(|request| {
                let key = request.key.clone();
                self.goes(&key, move |inner, _, deadline| {
                    renew::renew(inner, request, called, deadline)
                })
            })
            .collect();
        Box::pin(async move { Ok(futures_util::future::join_all(steps).await) })
    }

    fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
        self.goes(&key, look::inspect)
    }

    fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
        let work = move |inner, _| look::list(inner, prefix);
        self.0.step([], Abandoned::Ends, work)
    }

    fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool> {
        self.goes(&key, look::force)
    }

    fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        match self.0.names.lock(key) {
            Ok(name) if kind == Kind::Fair => {
                let topic = waiters::position_topic(&name, grant);
                self.0.waiters.watch(name, topic, Changes::Deletions)
            }
            Ok(name) => {
                let changes = match kind {
                    Kind::Permit | Kind::Unowned => Changes::All,
                    _ => Changes::Deletions,
                };
                self.0.waiters.watch(name.clone(), name, changes)
            }
            // The acquire reports the error.
            Err(_) => Watch::polling(std::time::Duration::from_secs(1)),
        }
    }

    fn together(&self, kind: Kind, _key: &LockKey) -> Option<u32> {
        // A set takes no positions.
        let is_single = matches!(kind, Kind::Fair | Kind::Permit | Kind::Unowned | Kind::Latch);
        (!is_single).then_some(0)
    }

    fn acquire_all(self: Arc<Self>, requests: Vec<AcquireRequest>) -> StoreFuture<AcquireAllReply> {
        let called = Moment::now();
        let asks = requests
            .iter()
            .map(|request| Ask::new(&self.0, request))
            .collect();
        self.acquires(asks, move |inner, asks, deadline| {
            acquire::all(inner, asks, called, deadline)
        })
    }

    fn counters(self: Arc<Self>) -> Option<Arc<dyn Counters>> {
        Some(self)
    }

    fn diagnose(self: Arc<Self>) -> Option<Arc<dyn Diagnose>> {
        Some(self)
    }

    fn doubts(&self) -> Doubts {
        self.0.doubts.subscribe()
    }
}

impl Counters for EtcdLocks {
    fn count(self: Arc<Self>, request: CounterRequest) -> StoreFuture<CounterReply> {
        let key = request.key.clone();
        self.goes(&key, move |inner, name, deadline| {
            counters::count(inner, name, request, deadline)
        })
    }
}

impl fmt::Debug for EtcdLocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdLocks")
            .field("servers", &self.0.links.config.servers)
            .field("namespace", &self.0.names.namespace)
            .finish_non_exhaustive()
    }
}
