//! A lock per request.

use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use dlock::{Error, LockClient, LockKey, LockKind, LockOptions, MultiLock};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tower_layer::Layer;
use tower_service::Service;

use super::bound::{Bound, Reservation};
use super::error::TaskError;
use super::work::{take_ready, work};

/// Runs each request of any Tower service while it holds a lock, whose key is taken from the request.
///
/// For workers, consumers and RPC: the request is any type. For HTTP, whose clients need an answer, there is
/// [`LockLayer`](crate::LockLayer). **By default it does not wait**: a request whose lock is held by another holder is
/// [`TaskError::Busy`] at once, and a worker requeues it rather than park on it. [`wait`](Self::wait) waits.
///
/// | | default |
/// |---|---|
/// | [`kind`](Self::kind) | [`LockKind::Mutex`] |
/// | [`wait`](Self::wait) | none |
/// | [`lease`](Self::lease) | the client's, 30 s, renewed while the request runs |
/// | [`max_hold`](Self::max_hold), [`max_waiters`](Self::max_waiters), [`at_most_here`](Self::at_most_here) | no bound |
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock_tower::task::TaskLockLayer;
/// use tower::{Layer, ServiceExt, service_fn};
///
/// struct Job { account: u64, amount: i64 }
///
/// let client = dlock::LockClient::memory();
/// let layer = TaskLockLayer::new(client.clone(), |job: &Job| format!("account:{}", job.account).into());
/// let worker = layer.layer(service_fn(|job: Job| async move {
///     // the fencing token goes along with each write
///     let token = dlock::current().expect("the layer's lock").fencing_token();
///     Ok::<_, std::io::Error>((job.amount, token))
/// }));
///
/// assert_eq!(worker.clone().oneshot(Job { account: 7, amount: 5 }).await?.0, 5);
///
/// let _elsewhere = client.lock("account:7").acquire().await?;
/// let busy = worker.oneshot(Job { account: 7, amount: 5 }).await.unwrap_err();
/// assert!(busy.is_busy() && busy.is_not_started());
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// See [`TaskError`].
///
/// # Cancel safety
///
/// A response future that is dropped leaves nothing behind: no waiter, and no lock. The work in it is dropped first.
#[must_use = "a layer does nothing until it is put around a service"]
pub struct TaskLockLayer<Req, K> {
    client: LockClient,
    key: Arc<K>,
    settings: Settings,
    bound: Bound,
    request: PhantomData<fn(&Req)>,
}

#[derive(Debug, Clone)]
struct Settings {
    /// The place in the code of the holders and waiters.
    by: &'static Location<'static>,
    kind: LockKind,
    prefer_writers: bool,
    options: LockOptions,
}

impl Settings {
    fn lock(&self, client: &LockClient, key: LockKey) -> MultiLock {
        let lock = client.multi([key]).kind(self.kind).options(self.options.clone());
        match self.prefer_writers {
            true => lock.prefer_writers(),
            false => lock,
        }
    }

    fn check(&self, client: &LockClient) -> Result<(), Error> {
        self.lock(client, "check".into()).check()
    }
}

impl<Req, K> TaskLockLayer<Req, K>
where
    K: Fn(&Req) -> LockKey,
{
    /// A layer that takes the keys of its requests by this closure. Reports and the console show the place of this call as
    /// that of the holders and waiters.
    #[track_caller]
    pub fn new(client: LockClient, key: K) -> TaskLockLayer<Req, K> {
        TaskLockLayer {
            client,
            key: Arc::new(key),
            settings: Settings {
                by: Location::caller(),
                kind: LockKind::default(),
                prefer_writers: false,
                options: LockOptions::new(),
            },
            bound: Bound::default(),
            request: PhantomData,
        }
    }
}

impl<Req, K> TaskLockLayer<Req, K> {
    /// The kind of lock that requests take, [`LockKind::Mutex`] by default.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] when the client's store does not have this kind.
    pub fn kind(mut self, kind: LockKind) -> Result<Self, Error> {
        self.client.capabilities().require(kind)?;
        self.settings.kind = kind;
        Ok(self)
    }

    /// Has readers stand back while a writer waits, see [`Lock::prefer_writers`](dlock::Lock::prefer_writers).
    pub fn prefer_writers(mut self) -> Self {
        self.settings.prefer_writers = true;
        self
    }

    /// Takes all options of the lock from these, instead of those that were set before. Without a
    /// [`wait`](LockOptions::wait) among them a request does not wait.
    pub fn options(self, options: LockOptions) -> Self {
        self.set(|_| options)
    }

    super::options::methods!("lock");

    fn set(mut self, change: impl FnOnce(LockOptions) -> LockOptions) -> Self {
        self.settings.options = change(self.settings.options);
        self
    }

    /// Whether the options make sense. Call it when the worker starts: otherwise a mistake is logged when the layer is put
    /// around a service, and every request is [`TaskError::Store`].
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOption`], for the first option that does not; [`Error::Unsupported`] for one that the store does not have.
    pub fn check(&self) -> Result<(), Error> {
        self.bound.check()?;
        self.settings.check(&self.client)
    }
}

impl<S, Req, K> Layer<S> for TaskLockLayer<Req, K> {
    type Service = TaskLockService<S, Req, K>;

    fn layer(&self, inner: S) -> Self::Service {
        if let Err(error) = self.check() {
            tracing::error!(%error, "a task lock layer is set up wrongly, no request will pass it");
        }
        TaskLockService {
            inner,
            client: self.client.clone(),
            key: self.key.clone(),
            settings: Arc::new(self.settings.clone()),
            reservation: self.bound.reservation(),
            request: PhantomData,
        }
    }
}

/// A service that runs each request while it holds a lock; made by [`TaskLockLayer`].
///
/// It is ready while there is a place below [`at_most_here`](TaskLockLayer::at_most_here) and the inner service is ready: so a
/// worker fetches no job that nothing could run. The inner service that became ready is called once the lock is held; a request
/// that waits for its lock therefore keeps its place in an inner buffer or concurrency limit.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock::{LockClient, LockKey};
/// use dlock_tower::task::{TaskLockLayer, TaskLockService};
/// use tower::{Layer, Service, ServiceExt, service_fn};
///
/// let layer = TaskLockLayer::new(LockClient::memory(), |file: &String| LockKey::from(file.as_str())).at_most_here(4);
/// let mut worker: TaskLockService<_, String, _> =
///     layer.layer(service_fn(|file: String| async move { Ok::<_, std::io::Error>(file.len()) }));
/// // It fetches a job when there is a place for one.
/// let worker = worker.ready().await?;
/// assert_eq!(worker.call("report".to_owned()).await?, 6);
/// # Ok(()) }
/// ```
pub struct TaskLockService<S, Req, K> {
    inner: S,
    client: LockClient,
    key: Arc<K>,
    settings: Arc<Settings>,
    reservation: Reservation,
    request: PhantomData<fn(&Req)>,
}

impl<S, Req, K> TaskLockService<S, Req, K> {
    /// The inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The inner service.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, Req, K> Service<Req> for TaskLockService<S, Req, K>
where
    S: Service<Req, Response: Send, Error: Send, Future: Send> + Clone + Send + 'static,
    K: Fn(&Req) -> LockKey,
    Req: Send + 'static,
{
    type Response = S::Response;
    type Error = TaskError<S::Error>;
    type Future = BoxFuture<'static, Result<S::Response, TaskError<S::Error>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        ready!(self.reservation.poll_reserve(cx));
        self.inner.poll_ready(cx).map_err(TaskError::Inner)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let running = match self.reservation.take() {
            Ok(running) => running,
            Err(error) => return std::future::ready(Err(TaskError::Store(error))).boxed(),
        };
        let lock = self.settings.lock(&self.client, (self.key)(&request));
        let acquire = lock.__acquire_at(self.settings.options.wait.is_none(), self.settings.by);
        let inner = take_ready(&mut self.inner);
        Box::pin(work(running, acquire, inner, request))
    }
}

impl<Req, K> Clone for TaskLockLayer<Req, K> {
    fn clone(&self) -> Self {
        TaskLockLayer {
            client: self.client.clone(),
            key: self.key.clone(),
            settings: self.settings.clone(),
            bound: self.bound.clone(),
            request: PhantomData,
        }
    }
}

impl<S: Clone, Req, K> Clone for TaskLockService<S, Req, K> {
    fn clone(&self) -> Self {
        TaskLockService {
            inner: self.inner.clone(),
            client: self.client.clone(),
            key: self.key.clone(),
            settings: self.settings.clone(),
            reservation: self.reservation.clone(),
            request: PhantomData,
        }
    }
}

impl<Req, K> fmt::Debug for TaskLockLayer<Req, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TaskLockLayer")
            .field("client", &self.client)
            .field("settings", &self.settings)
            .field("bound", &self.bound)
            .finish_non_exhaustive()
    }
}

impl<S: fmt::Debug, Req, K> fmt::Debug for TaskLockService<S, Req, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TaskLockService")
            .field("inner", &self.inner)
            .field("client", &self.client)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
