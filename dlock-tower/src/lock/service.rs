use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use dlock::Held;
use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use super::admission::{Locks, admit};
use super::ahead::{PrepareBody, ReadAhead};
use super::body::ResponseBody;
use super::future::{Answers, ResponseFuture};
use crate::body::BoxError;
use crate::key::ExtractKey;
use crate::not_started::Entry;

/// A service that runs each request while it holds a lock; created by [`LockLayer`](super::LockLayer).
///
/// It is always ready, whatever the inner service is: a request that waits for its lock must not occupy the inner
/// service's buffer or concurrency limit. Once it has the lock, a clone of the inner service is driven to readiness and
/// called.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use bytes::Bytes;
/// use dlock_tower::{LockLayer, LockService, key};
/// use http::{Request, Response};
/// use http_body_util::Full;
/// use tower::{Layer, ServiceExt, service_fn};
///
/// let handler = service_fn(|request: Request<Full<Bytes>>| async move {
///     let held = request.extensions().get::<dlock::Held>().expect("the layer put it there");
///     let body = format!("token {}", held.fencing_token());
///     Ok::<_, std::convert::Infallible>(Response::new(Full::<Bytes>::from(body)))
/// });
/// let client = dlock::LockClient::memory();
/// let service: LockService<_, _> = LockLayer::new(client, key::header("x-account")).layer(handler);
///
/// let request = Request::post("/withdraw").header("x-account", "7").body(Full::default())?;
/// assert_eq!(service.oneshot(request).await?.status(), 200);
/// # Ok(()) }
/// ```
pub struct LockService<S, K, P = ReadAhead> {
    inner: S,
    locks: Arc<Locks<K>>,
    body: P,
}

impl<S, K, P> LockService<S, K, P> {
    pub(super) fn new(inner: S, locks: Locks<K>, body: P) -> Self {
        LockService {
            inner,
            locks: Arc::new(locks),
            body,
        }
    }

    /// The inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The inner service.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// The inner service.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, K, P, B, R> Service<Request<B>> for LockService<S, K, P>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    K: ExtractKey<B>,
    P: PrepareBody<B>,
    B: Send + 'static,
    R: Body<Data = Bytes, Error: Into<BoxError>>,
{
    type Response = Response<ResponseBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, B>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        // Never driven to readiness here, so the clone has no reservation to use up.
        let inner = self.inner.clone();
        let settings = &self.locks.settings;
        if settings.skips(request.method()) {
            request.extensions_mut().remove::<Held>();
            return ResponseFuture::bare(inner, request);
        }
        let answers = Answers::of(settings.clone(), &request);
        let entry = Entry::of(request.extensions());
        let admission = admit(self.locks.clone(), self.body.clone(), request);
        ResponseFuture::locked(inner, Box::pin(admission), entry, answers)
    }
}

impl<S: Clone, K, P: Clone> Clone for LockService<S, K, P> {
    fn clone(&self) -> Self {
        LockService {
            inner: self.inner.clone(),
            locks: self.locks.clone(),
            body: self.body.clone(),
        }
    }
}

impl<S: fmt::Debug, K, P: fmt::Debug> fmt::Debug for LockService<S, K, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockService")
            .field("inner", &self.inner)
            .field("client", &self.locks.client)
            .field("settings", &self.locks.settings)
            .field("body", &self.body)
            .finish_non_exhaustive()
    }
}
