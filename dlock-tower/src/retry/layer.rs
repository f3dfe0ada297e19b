use std::sync::Arc;
use std::time::Duration;

use http::header::HeaderName;
use http::{Method, StatusCode};
use tower_layer::Layer;

use super::retry_error::{AnyError, SomeErrors};
use super::service::RetryService;
use super::settings::Settings;

/// Gives outgoing requests an idempotency key and sends them again under it. For HTTP, not for gRPC. See the
/// [module](super).
///
/// ```
/// use dlock_tower::retry::RetryLayer;
/// use std::time::Duration;
///
/// let layer = RetryLayer::new()
///     .attempts(5)
///     .total_time(Duration::from_secs(30));
/// # let _ = layer;
/// ```
#[must_use = "a layer does nothing until it is put around a service"]
#[derive(Debug, Clone)]
pub struct RetryLayer<E = AnyError> {
    settings: Arc<Settings>,
    retry_error: E,
}

impl Default for RetryLayer {
    fn default() -> Self {
        RetryLayer::new()
    }
}

impl RetryLayer {
    /// Creates a layer with the default options.
    pub fn new() -> RetryLayer {
        RetryLayer {
            settings: Arc::default(),
            retry_error: AnyError,
        }
    }
}

impl<E> RetryLayer<E> {
    fn set(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(Arc::make_mut(&mut self.settings));
        self
    }

    /// Limits the attempts of a request, including the first one; 5 by default. Answers that an equal request is in
    /// progress are not counted: [`total_time`](Self::total_time) limits them.
    pub fn attempts(self, attempts: u32) -> Self {
        self.set(|settings| settings.attempts = attempts)
    }

    /// Limits when the last attempt may begin, counted from the first one; 30 s by default. A client that does not become ready
    /// for the next one until then is a [`SendError`](super::SendError).
    pub fn total_time(self, total_time: Duration) -> Self {
        self.set(|settings| settings.total_time = total_time)
    }

    /// Sets the pause before the second attempt if the server suggests none, and the longest pause, between which it
    /// doubles from attempt to attempt; 100 ms and 5 s by default. Each is random between half of that and the whole.
    pub fn pauses(self, first: Duration, longest: Duration) -> Self {
        self.set(|settings| (settings.pause, settings.longest_pause) = (first, longest))
    }

    /// Sets the statuses that are retried, instead of the default 429, 502, 503 and 504.
    pub fn retry_statuses(self, statuses: impl IntoIterator<Item = StatusCode>) -> Self {
        self.set(|settings| settings.statuses = statuses.into_iter().collect())
    }

    /// Sets the methods to which the layer applies, instead of the default `POST` and `PATCH`. All others pass
    /// unchanged.
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.set(|settings| settings.methods = methods.into_iter().collect())
    }

    /// Sets the header for the key; `Idempotency-Key` by default.
    pub fn header(self, name: HeaderName) -> Self {
        self.set(|settings| settings.header = name)
    }

    /// Sets which failures of the client are retried; all by default.
    pub fn retry_error<T, F>(self, is_worth_it: F) -> RetryLayer<SomeErrors<T, F>>
    where
        F: Fn(&T) -> bool + Clone + Send + Sync + 'static,
    {
        RetryLayer {
            settings: self.settings,
            retry_error: SomeErrors::new(is_worth_it),
        }
    }
}

impl<S, E: Clone> Layer<S> for RetryLayer<E> {
    type Service = RetryService<S, E>;

    fn layer(&self, inner: S) -> Self::Service {
        RetryService::new(inner, self.settings.clone(), self.retry_error.clone())
    }
}
