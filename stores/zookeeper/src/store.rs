//! The store: queues each call as an operation of the driver.

use std::fmt;
use std::future::ready;
use std::sync::Arc;

use dlock::LockKey;
use dlock::store::counter::{CounterReply, CounterRequest, Counters};
use dlock::store::doctor::Diagnose;
use dlock::store::{
    AcquireReply, AcquireRequest, Capabilities, DoubtSender, Doubts, GrantId, Holder, Kind, Notifications,
    Reason, ReleaseReply, ReleaseRequest, RenewRequest, Renewal, Store, StoreError, StoreFuture, Watch,
};
use futures_util::future::join_all;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use crate::core::{Core, role};
use crate::drive::Driver;
use crate::fair::position_topic;
use crate::inspect::lock_key;
use crate::layout::queue_of;
use crate::names::node_of_key;
use crate::queues::{Inbox, Renew, Start, Step, Work};
use crate::session::{self, Config};
use crate::watches::topic;

/// The supported kinds.
const KINDS: [Kind; 7] = [
    Kind::Mutex,
    Kind::Fair,
    Kind::Fenced,
    Kind::Read,
    Kind::Write,
    Kind::Permit,
    Kind::Latch,
];

/// Locks in ZooKeeper, in the layout of Apache Curator. Cheap to clone; the session ends when the last clone, and every
/// [`LockClient`](dlock::LockClient) made of one, is gone.
///
/// ```no_run
/// use dlock::LockClient;
/// use dlock_zookeeper::ZookeeperLocks;
///
/// # async fn example() -> Result<(), dlock::Error> {
/// let store = ZookeeperLocks::connect("zk1:2181,zk2:2181,zk3:2181", "/shop/locks").await?;
/// let client = LockClient::builder().store(store.clone()).build().await?;
/// let guard = client.lock("order:42").acquire().await?; // new InterProcessMutex(curator, "/shop/locks/order:42")
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct ZookeeperLocks(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) core: Arc<Core>,
    inbox: Arc<Inbox>,
    doubts: DoubtSender,
    prefix: String,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.inbox.close();
    }
}

impl ZookeeperLocks {
    /// Returns the path of a lock, as Curator's `InterProcessMutex` and `InterProcessReadWriteLock` expect it.
    ///
    /// It is the root, a slash, and the key. `%`, `/` and characters that ZooKeeper does not allow in a name are
    /// encoded as `%XX`, byte by byte.
    #[must_use]
    pub fn path(&self, key: &LockKey) -> String {
        self.0.core.path(&self.name(key))
    }

    pub(crate) async fn open(
        config: Config,
        root: String,
        prefix: String,
    ) -> Result<ZookeeperLocks, StoreError> {
        let (sender, events) = mpsc::unbounded_channel();
        let session = session::open(config, sender).await?;
        let core = Arc::new(Core::new(session, root));
        let (inbox, doubts) = (Arc::<Inbox>::default(), DoubtSender::new());
        let driver = Driver::new(core.clone(), inbox.clone(), doubts.clone(), events);
        tokio::spawn(driver.run());
        let store = ZookeeperLocks(Arc::new(Inner {
            core,
            inbox,
            doubts,
            prefix,
        }));
        store.0.core.make_root().await?;
        Ok(store)
    }

    /// The name of the node of a lock.
    pub(crate) fn name(&self, key: &LockKey) -> Arc<str> {
        node_of_key(&[self.0.prefix.as_str(), key.as_str()].concat()).into()
    }

    /// The queue of the operations on a key.
    fn queue_name(&self, kind: Kind, key: &LockKey) -> Arc<str> {
        let name = self.name(key);
        match kind {
            Kind::Permit | Kind::Latch => queue_of(&name),
            _ => name,
        }
    }

    /// Queues an operation at once. The future only returns the reply.
    fn step<T, F>(
        &self,
        lock: Option<Arc<str>>,
        work: impl FnOnce(Arc<Core>) -> F + Send + 'static,
    ) -> StoreFuture<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        self.queue(lock, Step::Work, None, work)
    }

    /// Queues an acquire at once. It is not begun if its turn comes after half of its time, which would leave none to what is
    /// behind it, nor if its caller is gone, whose release follows.
    fn acquires<F>(
        &self,
        lock: Arc<str>,
        grant: GrantId,
        work: impl FnOnce(Arc<Core>) -> F + Send + 'static,
    ) -> StoreFuture<AcquireReply>
    where
        F: Future<Output = Result<AcquireReply, StoreError>> + Send + 'static,
    {
        let begins_by = Instant::now() + self.0.core.session.config().timeout / 2;
        self.queue(Some(lock), |start| Step::Of(grant, start), Some(begins_by), work)
    }

    fn queue<T, F>(
        &self,
        lock: Option<Arc<str>>,
        step: impl FnOnce(Start) -> Step,
        begins_by: Option<Instant>,
        work: impl FnOnce(Arc<Core>) -> F + Send + 'static,
    ) -> StoreFuture<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let core = self.0.core.clone();
        let work = move || -> Work {
            Box::pin(async move {
                let answer = match begins_by {
                    Some(_) if reply.is_closed() => return,
                    Some(by) if Instant::now() > by => Err(StoreError::not_done(
                        Reason::Unreachable,
                        "the operations on this key before it took too long",
                    )),
                    _ => work(core).await,
                };
                // The caller may have been dropped.
                let _ = reply.send(answer);
            })
        };
        self.0.inbox.push(lock, step(Box::new(work)));
        Box::pin(async move { answer.await.unwrap_or_else(|_| Err(ended())) })
    }
}

fn ended() -> StoreError {
    StoreError::unknown("the runtime that served the connection has ended")
}

impl Store for ZookeeperLocks {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(KINDS)
            .name("ZooKeeper")
            .fixed_lease(false)
            .limits(true)
            .notifications(Notifications::Certain)
            .inspection(true)
    }

    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        let (grant, called) = (request.grant, Instant::now());
        if request.kind == Kind::Permit {
            let queue = self.queue_name(request.kind, &request.key);
            return self.acquires(queue.clone(), grant, move |core| async move {
                core.acquire_permits(queue, request, called).await
            });
        }
        if let Err(error) = role(request.kind) {
            return Box::pin(ready(Err(error)));
        }
        let lock = self.name(&request.key);
        self.acquires(lock.clone(), grant, move |core| async move {
            core.acquire(lock, request, called).await
        })
    }

    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        let grant = request.grant;
        let lock = self.queue_name(request.kind, &request.key);
        self.queue(
            Some(lock),
            |start| Step::Of(grant, start),
            None,
            move |core| async move { core.release(grant, Some(request.kind)).await },
        )
    }

    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        let called = Instant::now();
        let mut answers = Vec::with_capacity(requests.len());
        let steps = requests.into_iter().map(|request| {
            let (reply, answer) = oneshot::channel();
            answers.push(answer);
            let renew = Renew {
                grant: request.grant,
                called,
                lease: request.lease,
                reply,
            };
            (
                Some(self.queue_name(request.kind, &request.key)),
                Step::Renew(renew),
            )
        });
        self.0.inbox.push_all(steps);
        Box::pin(async move {
            let answers = join_all(answers).await.into_iter();
            Ok(answers
                .map(|answer| answer.unwrap_or_else(|_| Err(ended())))
                .collect())
        })
    }

    fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
        let lock = self.name(&key);
        self.step(Some(lock.clone()), move |core| async move {
            core.inspect(&lock).await
        })
    }

    fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
        let own = self.0.prefix.clone();
        self.step(None, move |core| async move {
            let found = core.list(&[own.as_str(), &prefix].concat()).await?;
            let key = |name: String| lock_key(name.strip_prefix(&own).unwrap_or(&name));
            Ok(found
                .into_iter()
                .map(|(name, holder)| (key(name), holder))
                .collect())
        })
    }

    fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool> {
        let lock = self.name(&key);
        self.step(
            Some(lock.clone()),
            move |core| async move { core.force(&lock).await },
        )
    }

    fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        let lock = self.name(key);
        if kind == Kind::Fair {
            // Its requests set the watch.
            let topic = position_topic(&lock, grant).into();
            return self.0.core.hub.listen(topic, |_| true, |_| {});
        }
        let first = |topic: &Arc<str>| {
            let (core, lock, topic) = (self.0.core.clone(), lock.clone(), topic.clone());
            let work = move || -> Work { Box::pin(async move { core.watch(lock, &topic).await }) };
            self.0.inbox.push(None, Step::Work(Box::new(work)));
            false
        };
        let topic = topic(kind, &lock).into();
        if !matches!(kind, Kind::Permit | Kind::Latch) {
            // Its release ends the watch.
            return self.0.core.hub.listen(topic, first, |_| {});
        }
        let (core, inbox) = (self.0.core.clone(), self.0.inbox.clone());
        let last_lock = lock.clone();
        let last = move |topic: Arc<str>| {
            let work = move || -> Work { Box::pin(async move { core.unwatch(&last_lock, &topic).await }) };
            inbox.push(None, Step::Work(Box::new(work)));
        };
        self.0.core.hub.listen(topic, first, last)
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

impl Counters for ZookeeperLocks {
    fn count(self: Arc<Self>, request: CounterRequest) -> StoreFuture<CounterReply> {
        let queue = self.queue_name(request.step.kind(), &request.key);
        self.step(Some(queue.clone()), move |core| async move {
            core.count(queue, request).await
        })
    }
}

impl fmt::Debug for ZookeeperLocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZookeeperLocks")
            .field("root", &self.0.core.root)
            .finish_non_exhaustive()
    }
}
