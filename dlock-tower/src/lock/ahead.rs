//! Handling of a request's body before its lock is acquired.

use std::fmt;
use std::future::{Future, ready};
use std::time::Duration;

use http::{Method, Request};
use http_body::Body;

use crate::Rejection;
use crate::body::read::DEFAULT_BODY_TIMEOUT;
use crate::body::{BoxError, Buffered, FromBuffered};

/// How many bytes of a request's body are read before its lock is acquired by default: 2 MiB, the limit of axum's own
/// extractors.
pub const DEFAULT_BODY_LIMIT: usize = 2 * 1024 * 1024;

/// What a [`LockLayer`](crate::LockLayer) does with the body of a request before it acquires the lock: [`ReadAhead`] by
/// default, or [`Streaming`].
///
/// The bound of code that is generic over it:
///
/// ```
/// use bytes::Bytes;
/// use dlock_tower::LockLayer;
/// use dlock_tower::key::ExtractKey;
/// use dlock_tower::lock::{PrepareBody, ResponseBody};
/// use http::{Request, Response};
/// use http_body_util::Full;
/// use std::convert::Infallible;
/// use tower::util::BoxCloneService;
/// use tower::{Layer, service_fn};
///
/// async fn withdraw(_: Request<Full<Bytes>>) -> Result<Response<Full<Bytes>>, Infallible> {
///     Ok(Response::new(Full::default()))
/// }
///
/// /// The endpoint under any lock layer, with `streaming` or without.
/// fn endpoint<K, P>(
///     layer: &LockLayer<K, P>,
/// ) -> BoxCloneService<Request<Full<Bytes>>, Response<ResponseBody<Full<Bytes>>>, Infallible>
/// where
///     K: ExtractKey<Full<Bytes>>,
///     P: PrepareBody<Full<Bytes>>,
/// {
///     BoxCloneService::new(layer.layer(service_fn(withdraw)))
/// }
/// # let layer = |client| LockLayer::new(client, dlock_tower::key::path());
/// # let _ = |client| (endpoint(&layer(client)), ());
/// ```
pub trait PrepareBody<B>: fmt::Debug + Clone + Send + Sync + 'static {
    /// The request as its handler gets it.
    fn prepare(&self, request: Request<B>) -> impl Future<Output = Result<Request<B>, Rejection>> + Send;
}

/// Reads the whole body first, so that no client can hold a lock by sending slowly.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock_tower::lock::ReadAhead;
/// use dlock_tower::{LockLayer, key};
///
/// let client = dlock::LockClient::memory();
/// // The default: the body is here before the lock is taken.
/// let layer: LockLayer<_, ReadAhead> = LockLayer::new(client, key::path()).body_limit(64 * 1024);
/// # let _ = layer;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct ReadAhead {
    pub(super) limit: usize,
    pub(super) timeout: Duration,
}

impl Default for ReadAhead {
    fn default() -> ReadAhead {
        ReadAhead {
            limit: DEFAULT_BODY_LIMIT,
            timeout: DEFAULT_BODY_TIMEOUT,
        }
    }
}

impl<B> PrepareBody<B> for ReadAhead
where
    B: FromBuffered + Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
{
    async fn prepare(&self, request: Request<B>) -> Result<Request<B>, Rejection> {
        // The data of a tunnel has no end before the handler answers.
        if request.body().is_end_stream() || request.method() == Method::CONNECT {
            return Ok(request);
        }
        let (parts, body) = request.into_parts();
        let body = Buffered::read_within(body, self.limit, self.timeout).await?;
        Ok(Request::from_parts(parts, B::from_buffered(body)))
    }
}

/// Leaves the body to the handler, which reads it under the lock; see
/// [`LockLayer::streaming`](crate::LockLayer::streaming).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock_tower::lock::Streaming;
/// use dlock_tower::{LockLayer, key};
///
/// let client = dlock::LockClient::memory();
/// let layer: LockLayer<_, Streaming> = LockLayer::new(client, key::path()).streaming();
/// # let _ = layer;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Streaming;

impl<B: Send> PrepareBody<B> for Streaming {
    fn prepare(&self, request: Request<B>) -> impl Future<Output = Result<Request<B>, Rejection>> + Send {
        ready(Ok(request))
    }
}
