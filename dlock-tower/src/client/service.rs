use std::fmt;
use std::future::{Future, poll_fn};
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body::Body;
use tokio::time::{Instant, sleep};
use tower_service::Service;
use uuid::Uuid;

use super::ResponseBody;
use super::layer::{RetryError, Settings};
use super::retry_after::retry_after;
use crate::idempotency::{Problem, REPLAYED};

/// How much of a 409 is read to see whether it tells of a request in progress.
const PROBLEM_LIMIT: usize = 64 * 1024;

/// A client that sends requests again under one idempotency key; made by [`RetryLayer`](super::RetryLayer).
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

/// What it took to get a response; in its extensions.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sent {
    /// The value of the header with the key.
    pub key: HeaderValue,
    /// How often the request was sent.
    pub attempts: u32,
}

/// The course of a request and its retries. Dropped, no further try is made.
#[must_use = "futures do nothing unless polled"]
pub struct ResponseFuture<R: Body, E> {
    tries: Pin<Box<dyn Future<Output = Outcome<R, E>> + Send>>,
}

type Outcome<R, E> = Result<Response<ResponseBody<R>>, E>;

impl<R: Body, E> Future for ResponseFuture<R, E> {
    type Output = Outcome<R, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.tries.as_mut().poll(cx)
    }
}

impl<R: Body, E> fmt::Debug for ResponseFuture<R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

impl<S, E, B, R> Service<Request<B>> for RetryService<S, E>
where
    S: Service<Request<B>, Response = Response<R>, Future: Send> + Clone + Send + 'static,
    S::Error: Send + 'static,
    E: RetryError<S::Error>,
    B: Clone + Send + 'static,
    R: Body<Data = Bytes, Error: Send> + Unpin + Send + 'static,
{
    type Response = Response<ResponseBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<R, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        // The one that was driven ready goes with this request.
        let clone = self.inner.clone();
        let mut inner = mem::replace(&mut self.inner, clone);
        if !self.settings.methods.contains(request.method()) {
            let answer = inner.call(request);
            return ResponseFuture {
                tries: Box::pin(async move { Ok(answer.await?.map(ResponseBody::untouched)) }),
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
            attempts: 0,
        };
        ResponseFuture {
            tries: Box::pin(tries.run(inner, request, key)),
        }
    }
}

/// A key that nobody else has, as a structured-field string.
fn new_key() -> HeaderValue {
    let key = format!("\"{}\"", Uuid::new_v4());
    HeaderValue::try_from(key).unwrap_or_else(|_| unreachable!("it is plain text"))
}

struct Tries<E> {
    settings: Arc<Settings>,
    retry_error: E,
    begun: Instant,
    attempts: u32,
}

impl<E> Tries<E> {
    async fn run<S, B, R>(
        mut self,
        mut inner: S,
        request: Request<B>,
        key: HeaderValue,
    ) -> Outcome<R, S::Error>
    where
        S: Service<Request<B>, Response = Response<R>>,
        E: RetryError<S::Error>,
        B: Clone,
        R: Body<Data = Bytes> + Unpin,
    {
        loop {
            self.attempts += 1;
            let outcome = inner.call(request.clone()).await;
            let outcome = outcome.map(|response| response.map(ResponseBody::untouched));
            let (outcome, pause) = match outcome {
                Err(error) => {
                    let pause = self.retry_error.is_worth_it(&error).then(|| self.own_pause());
                    (Err(error), pause)
                }
                Ok(mut response) => {
                    let pause = if self.is_worth_it(&mut response).await {
                        Some(self.pause(response.headers()))
                    } else {
                        None
                    };
                    let (key, attempts) = (key.clone(), self.attempts);
                    response.extensions_mut().insert(Sent { key, attempts });
                    (Ok(response), pause)
                }
            };
            match pause {
                Some(pause) if self.has_time_for(pause) => {
                    tracing::debug!(attempt = self.attempts, ?pause, "a request is sent again");
                    // Gives its connection back before the pause.
                    drop(outcome);
                    sleep(pause).await;
                }
                _ => return outcome,
            }
            poll_fn(|cx| inner.poll_ready(cx)).await?;
        }
    }

    fn has_time_for(&self, pause: Duration) -> bool {
        let Settings {
            attempts, total_time, ..
        } = &*self.settings;
        self.attempts < *attempts && self.begun.elapsed().saturating_add(pause) <= *total_time
    }

    /// Whether the same request may be answered differently later.
    async fn is_worth_it<R>(&self, response: &mut Response<ResponseBody<R>>) -> bool
    where
        R: Body<Data = Bytes> + Unpin,
    {
        if response.headers().contains_key(REPLAYED) {
            return false;
        }
        if response.status() == StatusCode::CONFLICT && is_problem(response.headers()) {
            let text = response.body_mut().read(PROBLEM_LIMIT).await.unwrap_or_default();
            let problem = serde_json::from_slice::<serde_json::Value>(&text).unwrap_or_default();
            return problem["type"] == Problem::InProgress.kind();
        }
        self.settings.statuses.contains(&response.status())
    }

    /// The pause that the server asks for, or one of our own; drawn at random, and never shorter than what
    /// was asked for.
    fn pause(&self, headers: &HeaderMap) -> Duration {
        match retry_after(headers, SystemTime::now()) {
            Some(asked) => asked.saturating_add(self.settings.pause.mul_f64(fastrand::f64())),
            None => self.own_pause(),
        }
    }

    fn own_pause(&self) -> Duration {
        let Settings {
            pause, longest_pause, ..
        } = &*self.settings;
        let grown = pause.saturating_mul(1 << (self.attempts - 1).min(20));
        grown.min(*longest_pause).mul_f64(0.5 + fastrand::f64() / 2.0)
    }
}

fn is_problem(headers: &HeaderMap) -> bool {
    const PROBLEM: &[u8] = b"application/problem+json";
    headers.get(http::header::CONTENT_TYPE).is_some_and(|value| {
        let start = value.as_bytes().get(..PROBLEM.len());
        start.is_some_and(|start| start.eq_ignore_ascii_case(PROBLEM))
    })
}
