use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use super::admission::{AdmissionRequest, admit};
use super::body::ResponseBody;
use super::caller::FindCaller;
use super::fingerprint::record_key;
use super::future::ResponseFuture;
use super::key;
use super::shared::Core;
use crate::Rejection;
use crate::body::{BoxError, FromBuffered};
use crate::own_answer::AnswerContext;
use crate::problem::Problem;

/// A service that runs each request with an idempotency key once; created by
/// [`IdempotencyLayer`](super::IdempotencyLayer).
///
/// It is always ready, whatever the inner service is: a replay must not wait for it. Once a request has claimed its
/// key, a clone of the inner service is driven to readiness and called.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use bytes::Bytes;
/// use dlock_tower::idempotency::caller;
/// use dlock_tower::{IdempotencyLayer, IdempotencyService};
/// use http::{Request, Response};
/// use http_body_util::Full;
/// use tower::{Layer, ServiceExt, service_fn};
///
/// let pay = service_fn(|_: Request<Full<Bytes>>| async {
///     Ok::<_, std::convert::Infallible>(Response::new(Full::<Bytes>::from("paid")))
/// });
/// let records = dlock::LockClient::memory().records()?;
/// let service: IdempotencyService<_, _> = IdempotencyLayer::new(records, caller::public()).layer(pay);
///
/// let request = || Request::post("/pay").header("idempotency-key", "\"7f3a\"").body(Full::default());
/// let first = service.clone().oneshot(request()?).await?;
/// let again = service.oneshot(request()?).await?; // answered from the record: it is paid once
/// assert!(!first.headers().contains_key("idempotent-replayed"));
/// assert_eq!(again.headers()["idempotent-replayed"], "true");
/// # Ok(()) }
/// ```
pub struct IdempotencyService<S, C> {
    inner: S,
    core: Core,
    caller: Arc<C>,
    /// The first invalid option.
    invalid: Option<Arc<str>>,
}

impl<S, C> IdempotencyService<S, C> {
    pub(super) fn new(inner: S, core: Core, caller: Arc<C>, invalid: Option<Arc<str>>) -> Self {
        IdempotencyService {
            inner,
            core,
            caller,
            invalid,
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

impl<S, C, B, R> Service<Request<B>> for IdempotencyService<S, C>
where
    S: Service<Request<B>, Response = Response<R>, Future: Send> + Clone + Send + 'static,
    S::Error: Send + 'static,
    C: FindCaller,
    B: FromBuffered + Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
    R: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<ResponseBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, B, R>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // Never driven to readiness here, so the clone has no reservation to use up.
        let inner = self.inner.clone();
        let settings = &self.core.settings;
        if !settings.methods.contains(request.method()) {
            return ResponseFuture::bare(inner, request);
        }
        let answer_context = AnswerContext::of(&request);
        if answer_context.is_grpc() && !settings.grpc_unary {
            return ResponseFuture::bare(inner, request);
        }
        let refuse =
            |rejection, answer_context| ResponseFuture::refused(rejection, self.core.clone(), answer_context);
        let key = match key::find(request.headers(), &settings.header) {
            Ok(Some(key)) => key,
            Ok(None) if settings.required => {
                let name = &settings.header;
                let detail = format!("header {name} is missing: send one that is new for each operation");
                return refuse(Problem::KeyMissing.with_detail(detail), answer_context);
            }
            Ok(None) => return ResponseFuture::bare(inner, request),
            Err(reason) => return refuse(Problem::KeyInvalid.with_detail(reason), answer_context),
        };
        if let Some(invalid) = &self.invalid {
            return refuse(Rejection::internal(invalid.to_string()), answer_context);
        }
        let (parts, body) = request.into_parts();
        let route = settings.route.as_ref().map(|route| route(&parts));
        let record = self
            .caller
            .find(&parts)
            .and_then(|caller| record_key(settings, &caller, &parts, route.as_deref(), &key));
        let record = match record {
            Ok(record) => record,
            Err(rejection) => return refuse(rejection, answer_context),
        };
        let request = AdmissionRequest {
            core: self.core.clone(),
            key,
            record,
            request: Request::from_parts(parts, body),
        };
        ResponseFuture::admitting(inner, Box::pin(admit(request)), self.core.clone(), answer_context)
    }
}

impl<S: Clone, C> Clone for IdempotencyService<S, C> {
    fn clone(&self) -> Self {
        IdempotencyService {
            inner: self.inner.clone(),
            core: self.core.clone(),
            caller: self.caller.clone(),
            invalid: self.invalid.clone(),
        }
    }
}

impl<S: fmt::Debug, C> fmt::Debug for IdempotencyService<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyService")
            .field("inner", &self.inner)
            .field("settings", &self.core.settings)
            .finish_non_exhaustive()
    }
}
