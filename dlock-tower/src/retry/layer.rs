use std::sync::Arc;
use std::time::Duration;

use http::header::HeaderName;
use http::{Method, StatusCode};
use tower_layer::Layer;

use super::retry_error::{AnyError, SomeErrors};
use super::service::RetryService;
use super::settings::Settings;

/// Gives outgoing requests an idempotency key and sends them again under it. See the [module](super).
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
    /// A layer with the default options.
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

    /// How many attempts a request has, the first one included; 5 by default. Answers that an equal request is in
    /// progress are not counted: [`total_time`](Self::total_time) bounds them.
    pub fn attempts(self, attempts: u32) -> Self {
        self.set(|settings| settings.attempts = attempts)
    }

    /// No try begins later than this after the first one; 30 s by default.
    pub fn total_time(self, total_time: Duration) -> Self {
        self.set(|settings| settings.total_time = total_time)
    }

    /// The pause before the second try where the server says nothing, and the longest one, between which it
    /// doubles from try to try; 100 ms and 5 s by default. Each is drawn at random between half of that and
    /// the whole.
    pub fn pauses(self, first: Duration, longest: Duration) -> Self {
        self.set(|settings| (settings.pause, settings.longest_pause) = (first, longest))
    }

    /// The statuses that are worth another try; 429, 502, 503 and 504 by default, which these replace.
    pub fn retry_statuses(self, statuses: impl IntoIterator<Item = StatusCode>) -> Self {
        self.set(|settings| settings.statuses = statuses.into_iter().collect())
    }

    /// The methods that the layer applies to; `POST` and `PATCH` by default, which these replace. All
    /// others pass untouched.
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.set(|settings| settings.methods = methods.into_iter().collect())
    }

    /// The header for the key; `Idempotency-Key` by default.
    pub fn header(self, name: HeaderName) -> Self {
        self.set(|settings| settings.header = name)
    }

    /// Which failures of the client are worth another try; all by default.
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
