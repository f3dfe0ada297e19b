//! At most so many requests at a time, over all processes.

use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use dlock::{Error, LockClient, LockKey, LockOptions, Semaphore};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tower_layer::Layer;
use tower_service::Service;

use super::bound::{Bound, Reservation};
use super::error::TaskError;
use super::work::{take_ready, work};

/// At most so many requests of a tenant at a time, over all processes: each runs while it holds a leased permit.
///
/// Key and limit are taken from the request. **The limit is judged inside the acquire and kept nowhere**, see
/// [`Semaphore::limit`]: a limit that is configured anew is in force with the next request, and there is no stored number that
/// could differ from it. While processes use different limits, at most as many requests run as the largest says, and a process
/// with a smaller one begins none while as many run as its own says; a smaller limit stops no request that runs.
///
/// **By default it does not wait**: beyond the limit a request is [`TaskError::Busy`] at once, and a worker requeues it.
/// [`wait`](Self::wait) waits; the requests of a tenant in one process are then served in the order in which they came, also
/// behind one with a smaller limit, and each keeps the limit that it came with.
///
/// | | default |
/// |---|---|
/// | [`wait`](Self::wait) | none |
/// | [`lease`](Self::lease) | the client's, 30 s, renewed while the request runs |
/// | [`max_hold`](Self::max_hold), [`max_waiters`](Self::max_waiters), [`at_most_here`](Self::at_most_here) | no bound |
///
/// The names are those of semaphores: give no other semaphore the name of a limit. It needs a store with limits: memory, etcd,
/// PostgreSQL, ZooKeeper, or one Redis or Valkey server, Sentinel, Cluster. [`new`](Self::new) refuses all others.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock_tower::task::LimitLayer;
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU32, Ordering};
/// use tower::{Layer, ServiceExt, service_fn};
///
/// struct Job { tenant: u64 }
///
/// let client = dlock::LockClient::memory();
/// let configured = Arc::new(AtomicU32::new(3));
/// let limit = configured.clone();
/// let layer = LimitLayer::new(
///     client,
///     |job: &Job| format!("tenant:{}", job.tenant).into(),
///     move |_: &Job| limit.load(Ordering::Relaxed),
/// )?;
/// let worker = layer.layer(service_fn(|job: Job| async move { Ok::<_, std::io::Error>(job.tenant) }));
/// assert_eq!(worker.clone().oneshot(Job { tenant: 7 }).await?, 7);
///
/// configured.store(0, Ordering::Relaxed); // the tenants are paused
/// assert!(worker.oneshot(Job { tenant: 7 }).await.is_err_and(|error| error.is_busy()));
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// See [`TaskError`].
///
/// # Cancel safety
///
/// A response future that is dropped leaves nothing behind: no waiter, and no permit. The work in it is dropped first.
#[must_use = "a layer does nothing until it is put around a service"]
pub struct LimitLayer<Req, K, L> {
    client: LockClient,
    key: Arc<K>,
    limit: Arc<L>,
    settings: Settings,
    bound: Bound,
    request: PhantomData<fn(&Req)>,
}

#[derive(Debug, Clone)]
struct Settings {
    /// The place in the code of the holders and waiters.
    by: &'static Location<'static>,
    options: LockOptions,
}

impl Settings {
    fn semaphore(&self, client: &LockClient, key: LockKey, limit: u32) -> Semaphore {
        client.semaphore(key).limit(limit).options(self.options.clone())
    }

    fn check(&self, client: &LockClient) -> Result<(), Error> {
        self.semaphore(client, "check".into(), 1).check()
    }
}

impl<Req, K, L> LimitLayer<Req, K, L>
where
    K: Fn(&Req) -> LockKey,
    L: Fn(&Req) -> u32,
{
    /// A layer that takes from each request, by these closures, its key (the tenant) and how many requests of that key may run
    /// at a time. Reports and the console show the place of this call as that of the holders and waiters.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] when the client's store has no limits.
    #[track_caller]
    pub fn new(client: LockClient, key: K, limit: L) -> Result<LimitLayer<Req, K, L>, Error> {
        let settings = Settings {
            by: Location::caller(),
            options: LockOptions::new(),
        };
        settings.check(&client)?;
        Ok(LimitLayer {
            client,
            key: Arc::new(key),
            limit: Arc::new(limit),
            settings,
            bound: Bound::default(),
            request: PhantomData,
        })
    }
}

impl<Req, K, L> LimitLayer<Req, K, L> {
    /// Takes all options of the permit from these, instead of those that were set before. Without a
    /// [`wait`](LockOptions::wait) among them a request does not wait.
    pub fn options(self, options: LockOptions) -> Self {
        self.set(|_| options)
    }

    super::options::methods!("permit");

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

impl<S, Req, K, L> Layer<S> for LimitLayer<Req, K, L> {
    type Service = LimitService<S, Req, K, L>;

    fn layer(&self, inner: S) -> Self::Service {
        if let Err(error) = self.check() {
            tracing::error!(%error, "a limit layer is set up wrongly, no request will pass it");
        }
        LimitService {
            inner,
            client: self.client.clone(),
            key: self.key.clone(),
            limit: self.limit.clone(),
            settings: Arc::new(self.settings.clone()),
            reservation: self.bound.reservation(),
            request: PhantomData,
        }
    }
}

/// A service that runs each request while it holds a permit; made by [`LimitLayer`]. Its readiness is that of
/// [`TaskLockService`](super::TaskLockService).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock::{LockClient, LockKey};
/// use dlock_tower::task::{LimitLayer, LimitService};
/// use tower::{Layer, ServiceExt, service_fn};
///
/// let layer = LimitLayer::new(LockClient::memory(), |tenant: &u64| LockKey::from(tenant.to_string()), |_: &u64| 3)?;
/// let worker: LimitService<_, u64, _, _> =
///     layer.layer(service_fn(|tenant: u64| async move { Ok::<_, std::io::Error>(tenant) }));
/// assert_eq!(worker.oneshot(7).await?, 7);
/// # Ok(()) }
/// ```
pub struct LimitService<S, Req, K, L> {
    inner: S,
    client: LockClient,
    key: Arc<K>,
    limit: Arc<L>,
    settings: Arc<Settings>,
    reservation: Reservation,
    request: PhantomData<fn(&Req)>,
}

impl<S, Req, K, L> LimitService<S, Req, K, L> {
    /// The inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The inner service.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, Req, K, L> Service<Req> for LimitService<S, Req, K, L>
where
    S: Service<Req, Response: Send, Error: Send, Future: Send> + Clone + Send + 'static,
    K: Fn(&Req) -> LockKey,
    L: Fn(&Req) -> u32,
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
        let (key, limit) = ((self.key)(&request), (self.limit)(&request));
        let permits = self.settings.semaphore(&self.client, key, limit);
        let acquire = permits.__acquire_at(self.settings.options.wait.is_none(), self.settings.by);
        let inner = take_ready(&mut self.inner);
        Box::pin(work(running, acquire, inner, request))
    }
}

impl<Req, K, L> Clone for LimitLayer<Req, K, L> {
    fn clone(&self) -> Self {
        LimitLayer {
            client: self.client.clone(),
            key: self.key.clone(),
            limit: self.limit.clone(),
            settings: self.settings.clone(),
            bound: self.bound.clone(),
            request: PhantomData,
        }
    }
}

impl<S: Clone, Req, K, L> Clone for LimitService<S, Req, K, L> {
    fn clone(&self) -> Self {
        LimitService {
            inner: self.inner.clone(),
            client: self.client.clone(),
            key: self.key.clone(),
            limit: self.limit.clone(),
            settings: self.settings.clone(),
            reservation: self.reservation.clone(),
            request: PhantomData,
        }
    }
}

impl<Req, K, L> fmt::Debug for LimitLayer<Req, K, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimitLayer")
            .field("client", &self.client)
            .field("settings", &self.settings)
            .field("bound", &self.bound)
            .finish_non_exhaustive()
    }
}

impl<S: fmt::Debug, Req, K, L> fmt::Debug for LimitService<S, Req, K, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimitService")
            .field("inner", &self.inner)
            .field("client", &self.client)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
