use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dlock::{Error, LockClient, LockKind, LockOptions};
use http::{Method, Response, StatusCode};
use http_body::Body;
use http_body_util::BodyExt;
use tower_layer::Layer;

use super::admission::Locks;
use super::ahead::{ReadAhead, Streaming};
use super::lost::OnLost;
use super::service::LockService;
use super::settings::{DEFAULT_WAIT, InvalidOptions, Kinds, Settings};
use crate::Rejection;
use crate::body::BoxError;

/// Runs each request while it holds a lock, whose key comes from the request.
///
/// The request's body is read before the lock is acquired ([`body_limit`](Self::body_limit),
/// [`body_timeout`](Self::body_timeout)), or left to the handler ([`streaming`](Self::streaming)).
///
/// See the [crate's documentation](crate) for what happens when, and [`key`](crate::key) for keys. The
/// options belong to this layer. Time options are checked by [`check`](Self::check).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock_tower::{LockLayer, key};
/// use std::time::Duration;
///
/// let client = dlock::LockClient::memory();
/// let account = key::header("x-account").parsed::<u64>().prefix("account:");
/// let layer = LockLayer::new(client, account)
///     .wait(Duration::from_secs(1))
///     .max_waiters(100);
/// layer.check()?;
/// # Ok(()) }
/// ```
#[must_use = "a layer does nothing until it is put around a service"]
pub struct LockLayer<K, P = ReadAhead> {
    client: LockClient,
    key: Arc<K>,
    settings: Settings,
    body: P,
}

impl<K> LockLayer<K> {
    /// Creates a layer that takes the keys of its requests from `key`: one of the functions of [`key`](crate::key), or
    /// a closure over `&http::request::Parts`. Reports and the
    /// console show the place of this call as that of the holders and waiters.
    #[track_caller]
    pub fn new(client: LockClient, key: K) -> LockLayer<K> {
        LockLayer {
            client,
            key: Arc::new(key),
            settings: Settings::new(Location::caller()),
            body: ReadAhead::default(),
        }
    }

    /// Limits the bytes of a request's body; [`DEFAULT_BODY_LIMIT`](super::DEFAULT_BODY_LIMIT) by default. A longer one
    /// is answered with 413, before anything is locked.
    ///
    /// A body stays in memory while its request waits for the lock. The total is this limit times the number of waiting
    /// requests, which [`max_waiters`](Self::max_waiters) limits for each key.
    pub fn body_limit(mut self, bytes: usize) -> Self {
        self.body.limit = bytes;
        self
    }

    /// Limits how long a client may take to send its body; [`DEFAULT_BODY_TIMEOUT`](super::DEFAULT_BODY_TIMEOUT) by
    /// default. A slower one is answered with 408, before anything is locked.
    pub fn body_timeout(mut self, timeout: Duration) -> Self {
        self.body.timeout = timeout;
        self
    }

    /// Leaves the request's body to the handler, which reads it **under the lock**: for uploads that are larger
    /// than memory, for gRPC methods whose client streams, and for bodies that are not
    /// [`FromBuffered`](crate::body::FromBuffered).
    ///
    /// By default the body is read before the lock is acquired, because a client that sends slowly, or not at all,
    /// would hold the lock for as long as it likes. Limit that in another way, with [`max_hold`](Self::max_hold) or a
    /// timeout inside this layer.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// # let client = dlock::LockClient::memory();
    /// use std::time::Duration;
    /// use dlock_tower::{LockLayer, key};
    ///
    /// let uploads = LockLayer::new(client, key::path().prefix("upload:"))
    ///     .streaming()
    ///     .max_hold(Duration::from_secs(60));
    /// # let _ = uploads; }
    /// ```
    pub fn streaming(self) -> LockLayer<K, Streaming> {
        LockLayer {
            client: self.client,
            key: self.key,
            settings: self.settings,
            body: Streaming,
        }
    }
}

impl<K, P> LockLayer<K, P> {
    /// Sets the kind of lock, [`LockKind::Mutex`] by default. Keys that are locked [together](crate::key::each_of)
    /// cannot be fair locks: such a request is answered with 500.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] when the client's store does not have this kind.
    pub fn kind(mut self, kind: LockKind) -> Result<Self, Error> {
        self.client.capabilities().require(kind)?;
        self.settings.kinds = Kinds::All(kind);
        Ok(self)
    }

    /// Lets reads share a key: requests with a safe method (`GET`, `HEAD`) acquire the key's read lock, which they
    /// share, and all others its write lock, which excludes all other requests. By default requests of a key run one at
    /// a time, whatever their method.
    ///
    /// `HEAD` is then no longer [skipped](Self::skip_methods) by default. Reading and writing requests of a key must go
    /// through layers with this option, in every service. **A plain lock of the same name cannot be beside it**: while one
    /// of them is held, the other is refused with [`Error::KeyTaken`], without waiting, and its request is answered with 500. Inside
    /// this layer, `#[distributed_lock]` of the same name needs `kind = read` or `kind = write`; a plain one fails with
    /// [`Error::WouldDeadlock`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// # let client = dlock::LockClient::memory();
    /// use dlock_tower::{LockLayer, key};
    ///
    /// let layer = LockLayer::new(client, key::header("x-document").prefix("document:")).read_write()?;
    /// # let _ = layer; Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] when the client's store has no read-write locks.
    pub fn read_write(mut self) -> Result<Self, Error> {
        for kind in [LockKind::Read, LockKind::Write] {
            self.client.capabilities().require(kind)?;
        }
        self.settings.kinds = Kinds::ReadWrite;
        Ok(self)
    }

    /// Makes reads yield while a write waits for the key, with [`read_write`](Self::read_write) or a
    /// [`kind`](Self::kind) of `Write`: so that writes are served where reads overlap without end.
    /// [`RwLock::prefer_writers`](dlock::RwLock::prefer_writers) describes which holders they still wait for. By
    /// default reads are admitted as long as others read.
    pub fn prefer_writers(mut self) -> Self {
        self.settings.prefer_writers = true;
        self
    }

    /// Replaces all options of the lock, and [`try_once`](Self::try_once). Without a [`wait`](LockOptions::wait) among them a
    /// request waits for [`DEFAULT_WAIT`](super::DEFAULT_WAIT). The bound of [`until_body`](Self::until_body) stays.
    pub fn options(mut self, options: LockOptions) -> Self {
        self.settings.once = false;
        let wait = options.wait.unwrap_or(DEFAULT_WAIT);
        self.set(|_| options.wait(wait))
    }

    /// Sets the lease, which is renewed; the client's by default (30 s). After a crash of this process the lock becomes
    /// available when the lease expires.
    pub fn lease(self, lease: Duration) -> Self {
        self.set(|options| options.lease(lease))
    }

    /// Sets a lease that is not renewed: the lock ends after this time. By default it is renewed for as long as the
    /// request takes.
    pub fn fixed_lease(self, lease: Duration) -> Self {
        self.set(|options| options.fixed_lease(lease))
    }

    /// Sets how long a request waits for its lock before it is answered as busy; [`DEFAULT_WAIT`](super::DEFAULT_WAIT)
    /// by default. The wait also ends when the client goes away. There is no unlimited wait: it takes a service down.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.settings.once = false;
        self.set(|options| options.wait(wait))
    }

    /// Disables waiting: a request whose lock is held by another caller is answered as busy at once.
    pub fn try_once(mut self) -> Self {
        self.settings.once = true;
        self
    }

    /// Limits how many requests may wait for one key in this process; one more is answered with 503 at once. No limit
    /// by default, so set one if many requests may ask for a single key.
    pub fn max_waiters(self, max_waiters: usize) -> Self {
        self.set(|options| options.max_waiters(max_waiters))
    }

    /// Limits how long the lock is held; then it is lost, even if the handler is alive. No limit by default.
    pub fn max_hold(self, max_hold: Duration) -> Self {
        self.set(|options| options.max_hold(max_hold))
    }

    /// Keeps the lock held for at least this long, even if the handler answers sooner. No minimum by default.
    pub fn min_hold(self, min_hold: Duration) -> Self {
        self.set(|options| options.min_hold(min_hold))
    }

    /// Sets the group by which metrics distinguish locks: the kind of work, never a key. By default it is the path that
    /// axum has matched, as `/orders/{id}`, and without axum none; see [`LockOptions::group`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// # let client = dlock::LockClient::memory();
    /// use dlock_tower::{LockLayer, key};
    ///
    /// let layer = LockLayer::new(client, key::header("x-account")).group("accounts");
    /// # let _ = layer; }
    /// ```
    pub fn group(self, group: &'static str) -> Self {
        self.set(|options| options.group(group))
    }

    fn set(mut self, change: impl FnOnce(LockOptions) -> LockOptions) -> Self {
        self.settings.options = change(self.settings.options);
        self
    }

    /// Holds the lock until the last bytes of the response's body are handed to the server, or it ended in an error, or was
    /// dropped; by default until the handler has answered. The body also runs in the frame of the lock.
    ///
    /// A client that reads slowly, or not at all, prolongs the lock, therefore `max_hold` is required. Where
    /// [`max_hold`](Self::max_hold) is set as well, the shorter of both applies. When the lock is
    /// lost (also by `max_hold`) the body ends early with the error [`LockLost`](super::LockLost), which the server
    /// shows to the client as a broken response; with [`OnLost::RunOn`] it is sent to its end.
    ///
    /// The lock is released just before the last frame, if the body says that it has ended with it; over HTTP/1 also if that
    /// frame completes the announced length, because such a server asks for nothing after it. Otherwise it is released before
    /// the end or the trailers. What a body does after its last announced byte is not under the lock.
    pub fn until_body(mut self, max_hold: Duration) -> Self {
        self.settings.until_body = Some(max_hold);
        self
    }

    /// Sets what happens to a handler whose lock is lost; [`OnLost::Stop`] by default.
    pub fn on_lost(mut self, on_lost: OnLost) -> Self {
        self.settings.on_lost = on_lost;
        self
    }

    /// Sets the methods whose requests pass without a lock, instead of the default: `OPTIONS` and `HEAD`, and only
    /// `OPTIONS` with [`read_write`](Self::read_write). Their handlers see no [`Held`](dlock::Held), also not that of a lock
    /// layer further out.
    pub fn skip_methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.settings.skipped = Some(methods.into_iter().collect());
        self
    }

    /// Sets the status of the answer when another client holds the lock; 423 Locked by default.
    pub fn busy_status(mut self, status: StatusCode) -> Self {
        self.settings.busy = status;
        self
    }

    /// Answers 409 Conflict when another client holds the lock.
    pub fn conflict(self) -> Self {
        self.busy_status(StatusCode::CONFLICT)
    }

    /// Answers 429 Too Many Requests when another client holds the lock.
    pub fn too_many_requests(self) -> Self {
        self.busy_status(StatusCode::TOO_MANY_REQUESTS)
    }

    /// Answers 503 Service Unavailable when another client holds the lock.
    pub fn service_unavailable(self) -> Self {
        self.busy_status(StatusCode::SERVICE_UNAVAILABLE)
    }

    /// Runs requests **without a lock** when the store cannot be reached, with a warning in the log each time; by
    /// default they are answered with 503. Only if running twice at once does little harm.
    ///
    /// Such a request has no [`Held`](dlock::Held) in its extensions, nor has one that this layer lets pass: that of a lock
    /// layer further out is removed, since its token is not that of this layer's lock.
    /// [`RequestLocks`](super::RequestLocks) still has it.
    pub fn fail_open(mut self) -> Self {
        self.settings.fail_open = true;
        self
    }

    /// Renders the layer's own answers, instead of [`Rejection::response`]. The layer still marks them with
    /// [`NotStarted`](crate::NotStarted) if the work was not started; everything else is up to the closure, including
    /// `Retry-After` and gRPC.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// # let client = dlock::LockClient::memory();
    /// use dlock_tower::{LockLayer, Reason, key};
    ///
    /// let layer = LockLayer::new(client, key::header("x-account")).render(|rejection| {
    ///     let mut response = rejection.response();
    ///     if rejection.reason() == Reason::Busy {
    ///         response.headers_mut().insert("x-busy", http::HeaderValue::from_static("yes"));
    ///     }
    ///     response
    /// });
    /// # let _ = layer; }
    /// ```
    pub fn render<F, B>(mut self, render: F) -> Self
    where
        F: Fn(&Rejection) -> Response<B> + Send + Sync + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        self.settings.render = Some(Arc::new(move |rejection: &Rejection| {
            render(rejection).map(|body| body.map_err(Into::into).boxed_unsync())
        }));
        self
    }

    /// Checks the options. Call it when the service starts: otherwise a mistake is logged when the layer is put around
    /// a service, and every request is answered with 500. The key is not an option: what is wrong with it, such as the name of a
    /// header that no request can have, is logged with each request, which is answered with 500.
    ///
    /// # Errors
    ///
    /// The first option that is invalid, or that the store does not support.
    pub fn check(&self) -> Result<(), InvalidOptions> {
        self.settings.check(&self.client)
    }
}

impl<S, K, P: Clone> Layer<S> for LockLayer<K, P> {
    type Service = LockService<S, K, P>;

    fn layer(&self, inner: S) -> Self::Service {
        let invalid = self.check().err();
        if let Some(error) = &invalid {
            tracing::error!(%error, "a lock layer is set up wrongly, no request will pass it");
        }
        let locks = Locks {
            client: self.client.clone(),
            key: self.key.clone(),
            settings: Arc::new(self.settings.clone()),
            invalid,
        };
        LockService::new(inner, locks, self.body.clone())
    }
}

impl<K, P: Clone> Clone for LockLayer<K, P> {
    fn clone(&self) -> Self {
        LockLayer {
            client: self.client.clone(),
            key: self.key.clone(),
            settings: self.settings.clone(),
            body: self.body.clone(),
        }
    }
}

impl<K, P: fmt::Debug> fmt::Debug for LockLayer<K, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockLayer")
            .field("client", &self.client)
            .field("settings", &self.settings)
            .field("body", &self.body)
            .finish_non_exhaustive()
    }
}
