use std::fmt;
use std::future::{Future, poll_fn};
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use dlock::__chance as chance;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body::Body;
use tokio::time::{Instant, sleep, timeout};
use tower_service::Service;

use super::body::ResponseBody;
use super::error::SendError;
use super::retry_after::retry_after;
use super::retry_error::RetryError;
use super::sent::Sent;
use super::settings::Settings;
use crate::body::BoxError;
use crate::idempotency::REPLAYED;
use crate::problem::Problem;

/// How much of a 409 is read to see whether it tells of a request in progress.
const PROBLEM_LIMIT: usize = 64 * 1024;

/// How long that may take. A timeout inside of the layer may end with the head.
const PROBLEM_TIME: Duration = Duration::from_secs(5);

/// A client that sends requests again under one idempotency key; made by [`RetryLayer`](super::RetryLayer).
///
/// ```
/// use dlock_tower::retry::{AnyError, RetryLayer, RetryService};
/// use tower::Layer;
///
/// /// A client of the shop's API, which sends its orders once.
/// struct Shop<C> {
///     http: RetryService<C, AnyError>,
/// }
///
/// impl<C> Shop<C> {
///     fn new(client: C) -> Shop<C> {
///         Shop { http: RetryLayer::new().layer(client) }
///     }
/// }
/// # let _ = Shop::new(()).http;
/// ```
#[derive(Debug, Clone)]
pub struct RetryService<S, E> {
    inner: S,
    settings: Arc<Settings>,
    retry_error: E,
}

impl<S, E> RetryService<S, E> {
    pub(super) fn new(inner: S, settings: Arc<Settings>, retry_error: E) -> Self {
        RetryService {
            inner,
            settings,
            retry_error,
        }
    }

    /// The client inside.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The client inside.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

/// The course of a request and its retries. Dropped, no further try is made.
///
/// A service around it names it, and needs no boxed future:
///
/// ```
/// use bytes::Bytes;
/// use dlock_tower::retry::{ResponseBody, ResponseFuture, RetryError, RetryService, SendError};
/// use http::{Request, Response};
/// use http_body_util::Full;
/// use std::task::{Context, Poll};
/// use tower::Service;
///
/// struct Shop<S, E>(RetryService<S, E>);
///
/// impl<S, E> Service<Request<Full<Bytes>>> for Shop<S, E>
/// where
///     S: Service<Request<Full<Bytes>>, Response = Response<Full<Bytes>>, Future: Send> + Clone + Send + 'static,
///     S::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
///     E: RetryError<S::Error>,
/// {
///     type Response = Response<ResponseBody<Full<Bytes>>>;
///     type Error = SendError;
///     type Future = ResponseFuture<Full<Bytes>>;
///
///     fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
///         self.0.poll_ready(cx)
///     }
///
///     fn call(&mut self, request: Request<Full<Bytes>>) -> Self::Future {
///         self.0.call(request)
///     }
/// }
/// ```
#[must_use = "futures do nothing unless polled"]
pub struct ResponseFuture<R: Body> {
    tries: Pin<Box<dyn Future<Output = Outcome<R>> + Send>>,
}

type Outcome<R> = Result<Response<ResponseBody<R>>, SendError>;

impl<R: Body> Future for ResponseFuture<R> {
    type Output = Outcome<R>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.tries.as_mut().poll(cx)
    }
}

impl<R: Body> fmt::Debug for ResponseFuture<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

impl<S, E, B, R> Service<Request<B>> for RetryService<S, E>
where
    S: Service<Request<B>, Response = Response<R>, Future: Send> + Clone + Send + 'static,
    S::Error: Into<BoxError> + Send + 'static,
    E: RetryError<S::Error>,
    B: Clone + Send + 'static,
    R: Body<Data = Bytes, Error: Send> + Unpin + Send + 'static,
{
    type Response = Response<ResponseBody<R>>;
    type Error = SendError;
    type Future = ResponseFuture<R>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        let ready = self.inner.poll_ready(cx);
        ready.map_err(|error| SendError::new(error, None))
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        // The service that was driven ready goes with this request.
        let clone = self.inner.clone();
        let mut inner = mem::replace(&mut self.inner, clone);
        if !self.settings.methods.contains(request.method()) {
            let answer = inner.call(request);
            return ResponseFuture {
                tries: Box::pin(async move {
                    match answer.await {
                        Ok(response) => Ok(response.map(ResponseBody::untouched)),
                        Err(error) => Err(SendError::new(error, None)),
                    }
                }),
            };
        }
        let key = request
            .headers_mut()
            .entry(&self.settings.header)
            .or_insert_with(new_key)
            .clone();
        let tries = Tries {
            settings: self.settings.clone(),
            retry_error: self.retry_error.clone(),
            begun: Instant::now(),
            sent: Sent { key, attempts: 0 },
            used: 0,
        };
        ResponseFuture {
            tries: Box::pin(tries.run(inner, request)),
        }
    }
}

/// A unique key, as a structured-field string.
fn new_key() -> HeaderValue {
    let key = format!("\"{}\"", chance::uuid());
    HeaderValue::try_from(key).unwrap_or_else(|_| unreachable!("it is plain text"))
}

struct Tries<E> {
    settings: Arc<Settings>,
    retry_error: E,
    begun: Instant,
    sent: Sent,
    /// How many tries count against the bound.
    used: u32,
}

/// What an outcome says of another try.
enum Advice {
    /// It would be of no use.
    GiveUp,
    /// The request is carried out at this moment: asking for its result is no attempt at the work.
    AskAgain(Duration),
    /// The request failed, and may succeed.
    TryAgain(Duration),
}

impl<E> Tries<E> {
    async fn run<S, B, R>(mut self, mut inner: S, request: Request<B>) -> Outcome<R>
    where
        S: Service<Request<B>, Response = Response<R>, Error: Into<BoxError>>,
        E: RetryError<S::Error>,
        B: Clone,
        R: Body<Data = Bytes> + Unpin,
    {
        loop {
            self.sent.attempts += 1;
            self.used += 1;
            let outcome = inner.call(request.clone()).await;
            let outcome = outcome.map(|response| response.map(ResponseBody::untouched));
            let (outcome, advice) = match outcome {
                Err(error) => {
                    let advice = match self.retry_error.is_worth_it(&error) {
                        true => Advice::TryAgain(self.own_pause()),
                        false => Advice::GiveUp,
                    };
                    (Err(SendError::new(error, Some(self.sent.clone()))), advice)
                }
                Ok(mut response) => {
                    let advice = self.advice(&mut response).await;
                    response.extensions_mut().insert(self.sent.clone());
                    (Ok(response), advice)
                }
            };
            let pause = match advice {
                Advice::AskAgain(pause) => {
                    self.used -= 1;
                    pause
                }
                Advice::TryAgain(pause) if self.used < self.settings.attempts => pause,
                _ => return outcome,
            };
            if self.begun.elapsed().saturating_add(pause) > self.settings.total_time {
                return outcome;
            }
            tracing::debug!(attempt = self.sent.attempts, ?pause, "a request is sent again");
            // Gives its connection back before the pause.
            drop(outcome);
            sleep(pause).await;
            let ready = timeout(self.time_left(), poll_fn(|cx| inner.poll_ready(cx))).await;
            let failed = match ready {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => error.into(),
                Err(_) => BoxError::from("the client was not ready for another try within the total time"),
            };
            return Err(SendError::new(failed, Some(self.sent.clone())));
        }
    }

    /// How long the next try may still begin.
    fn time_left(&self) -> Duration {
        self.settings.total_time.saturating_sub(self.begun.elapsed())
    }

    /// Whether the same request may be answered differently later.
    async fn advice<R>(&self, response: &mut Response<ResponseBody<R>>) -> Advice
    where
        R: Body<Data = Bytes> + Unpin,
    {
        if response.headers().contains_key(REPLAYED) {
            return Advice::GiveUp;
        }
        if response.status() == StatusCode::CONFLICT && is_problem(response.headers()) {
            // A layer outside of this one decodes it. Of the conflicts of the layers, that of a request in progress names a time, and
            // that of a busy lock where 409 stands for it: both may be over then.
            if is_encoded(response.headers()) && response.headers().contains_key(RETRY_AFTER) {
                return Advice::AskAgain(self.pause(response.headers()));
            }
            let limit = self.time_left().min(PROBLEM_TIME);
            let read = timeout(limit, response.body_mut().read(PROBLEM_LIMIT)).await;
            // A body that stalls tells nothing, as one that is too long. What was read stays for the caller.
            let text = read.ok().flatten().unwrap_or_default();
            let problem = serde_json::from_slice::<serde_json::Value>(&text).unwrap_or_default();
            if problem["type"] == Problem::InProgress.kind() {
                return Advice::AskAgain(self.pause(response.headers()));
            }
            if problem["retryable"] == false {
                return Advice::GiveUp;
            }
        }
        match self.settings.statuses.contains(&response.status()) {
            true => Advice::TryAgain(self.pause(response.headers())),
            false => Advice::GiveUp,
        }
    }

    /// The pause that the server asks for, or one of our own; drawn at random, and never shorter than what
    /// was asked for.
    fn pause(&self, headers: &HeaderMap) -> Duration {
        match retry_after(headers, SystemTime::now()) {
            Some(asked) => asked.saturating_add(self.settings.pause.mul_f64(chance::fraction())),
            None => self.own_pause(),
        }
    }

    fn own_pause(&self) -> Duration {
        let Settings {
            pause, longest_pause, ..
        } = &*self.settings;
        let grown = pause.saturating_mul(1 << self.sent.attempts.saturating_sub(1).min(20));
        chance::shortened(grown.min(*longest_pause))
    }
}

fn is_problem(headers: &HeaderMap) -> bool {
    const PROBLEM: &[u8] = b"application/problem+json";
    headers.get(CONTENT_TYPE).is_some_and(|value| {
        let start = value.as_bytes().get(..PROBLEM.len());
        start.is_some_and(|start| start.eq_ignore_ascii_case(PROBLEM))
    })
}

fn is_encoded(headers: &HeaderMap) -> bool {
    let encoding = headers.get(CONTENT_ENCODING);
    encoding.is_some_and(|value| !value.as_bytes().eq_ignore_ascii_case(b"identity"))
}
