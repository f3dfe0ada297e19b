use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dlock::record::{OnOrphan, Records};
use http::header::HeaderName;
use http::request::Parts;
use http::{Method, Response, StatusCode};
use http_body::Body;
use http_body_util::BodyExt;
use tower_layer::Layer;

use super::caller::FindCaller;
use super::handle::IdempotencyHandle;
use super::policy::{Policy, RetryAmbiguous};
use super::replay::Replay;
use super::service::IdempotencyService;
use super::settings::Settings;
use super::shared::{Core, Shared};
use super::stats::IdempotencyStats;
use crate::Rejection;
use crate::body::BoxError;
use crate::lock::InvalidOptions;

/// Runs a request once, even if it is sent more than once, and sends all of its clients the same answer.
///
/// The [module](super) describes what happens when, and [`caller`](super::caller) whose keys they are. The layer
/// applies to requests of its [`methods`](Self::methods) that have a key; all others pass unchanged.
///
/// A layer counts its work, and some of that outlives a request: keep a [`handle`](Self::handle), and [shut it
/// down](IdempotencyHandle::shutdown) before the program ends. Clones of the layer share all that.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock_tower::IdempotencyLayer;
/// use dlock_tower::idempotency::caller;
/// use std::time::Duration;
///
/// let client = dlock::LockClient::memory();
/// let layer = IdempotencyLayer::new(client.records()?, caller::public())
///     .required()
///     .retention(Duration::from_secs(24 * 60 * 60));
/// layer.check()?;
/// # Ok(()) }
/// ```
#[must_use = "a layer does nothing until it is put around a service"]
pub struct IdempotencyLayer<C> {
    shared: Arc<Shared>,
    settings: Arc<Settings>,
    caller: Arc<C>,
}

impl<C: FindCaller> IdempotencyLayer<C> {
    /// Creates a layer that keeps its records in `records` ([`LockClient::records`](dlock::LockClient::records)), for
    /// the callers that `caller` finds: one of the functions of [`caller`](super::caller), or a closure over
    /// `&http::request::Parts`.
    ///
    /// There is no default: two callers may choose the same key, and one must not get the answer to the other. If all
    /// callers are one, declare that with [`caller::public`](super::caller::public).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// use dlock_tower::{IdempotencyLayer, idempotency::caller};
    ///
    /// #[derive(Clone)]
    /// struct User { id: u64 } // left in the request's extensions by the authentication
    ///
    /// # let client = dlock::LockClient::memory();
    /// let layer = IdempotencyLayer::new(client.records()?, caller::extension(|user: &User| user.id));
    /// # let _ = layer; Ok(()) }
    /// ```
    ///
    /// ```compile_fail
    /// # fn layer(records: dlock::record::Records) {
    /// let layer = dlock_tower::IdempotencyLayer::new(records); // whose keys?
    /// # }
    /// ```
    pub fn new(records: Records, caller: C) -> IdempotencyLayer<C> {
        IdempotencyLayer {
            shared: Arc::new(Shared::new(records)),
            settings: Arc::default(),
            caller: Arc::new(caller),
        }
    }
}

impl<C> IdempotencyLayer<C> {
    fn set(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(Arc::make_mut(&mut self.settings));
        self
    }

    /// Refuses requests without a key with 400. By default they pass, and run each time they are sent. gRPC calls pass with and
    /// without a key, unless [`grpc_unary`](Self::grpc_unary) is set: their content type is all that tells them apart, so an
    /// endpoint that is not gRPC should accept no such type.
    pub fn required(self) -> Self {
        self.set(|settings| settings.required = true)
    }

    /// Sets the methods to which the layer applies, instead of the default `POST` and `PATCH`.
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.set(|settings| settings.methods = methods.into_iter().collect())
    }

    /// Sets the header with the key; `Idempotency-Key` by default.
    pub fn header(self, name: HeaderName) -> Self {
        self.set(|settings| settings.header = name)
    }

    /// Sets a namespace that separates the keys of this service from those of others on the same store; empty by
    /// default. A gateway that passes keys on to a backend needs another one than the backend, if both have such a layer
    /// on one store: otherwise the backend finds the key in progress, by the claim of the gateway, and answers 409. A gateway
    /// over a network also needs [`retry_ambiguous`](Self::retry_ambiguous): it would keep the backend's own 409 and 503, as of an
    /// attempt in progress, for the client's retries. The backend prevents a second effect. Within one process, the inner one of two layers with the same record lets the request pass.
    pub fn namespace(self, namespace: impl Into<String>) -> Self {
        self.set(|settings| settings.namespace = namespace.into())
    }

    /// Separates the keys of requests to different hosts, for a service that serves several under one app: equal keys
    /// of `a.example` and `b.example` are then different keys. The host is the authority of the URI, otherwise the
    /// `Host` header, with its port; clients choose it, so the edge must check it.
    pub fn per_host(self) -> Self {
        self.set(|settings| settings.per_host = true)
    }

    /// Sets how a request's route is found: equal keys on different routes are different keys. By default it is the
    /// path as it was sent. The router's pattern (`/orders/{id}`) is a poor choice: renaming a parameter in a rolling
    /// deploy changes every key.
    pub fn route<F>(self, route: F) -> Self
    where
        F: Fn(&Parts) -> String + Send + Sync + 'static,
    {
        self.set(|settings| settings.route = Some(Arc::new(route)))
    }

    /// Sets how long a claim lasts; 10 s by default. It is renewed while the handler runs. After a crash of this
    /// process a retry has to wait until the claim has expired.
    pub fn lease(self, lease: Duration) -> Self {
        self.set(|settings| settings.lease = lease)
    }

    /// Sets how long the result is kept, and the record of a request that was begun; 24 h by default. A later retry
    /// runs again.
    pub fn retention(self, retention: Duration) -> Self {
        self.set(|settings| settings.retention = retention)
    }

    /// Sets how long the result is kept by the head of the request: by its route, its tenant. Replaces
    /// [`retention`](Self::retention); at least as long as the [`lease`](Self::lease), at most a year.
    /// [`Verdict::KeepFor`](super::Verdict::KeepFor) sets it by the outcome.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// use dlock_tower::{IdempotencyLayer, idempotency::caller};
    /// use std::time::Duration;
    ///
    /// const HOUR: Duration = Duration::from_secs(3600);
    /// # let client = dlock::LockClient::memory();
    /// let layer = IdempotencyLayer::new(client.records()?, caller::public())
    ///     .retention_of(|parts| if parts.uri.path().starts_with("/payments") { 72 * HOUR } else { HOUR });
    /// # let _ = layer; Ok(()) }
    /// ```
    pub fn retention_of<F>(self, retention: F) -> Self
    where
        F: Fn(&Parts) -> Duration + Send + Sync + 'static,
    {
        self.set(|settings| settings.retention_of = Some(Arc::new(retention)))
    }

    /// Sets what is compared when a key is used again, in addition to method and path: by default the query, the
    /// headers that change the meaning, and the body's bytes. For clients whose retries differ in irrelevant parts,
    /// such as a timestamp. **What the closure leaves out is not compared**: a different request under the same key
    /// then gets the first answer.
    ///
    /// Requests that are in progress or kept while this is changed count as different (422).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// use dlock_tower::{IdempotencyLayer, idempotency::caller};
    /// use serde_json::Value;
    ///
    /// # let client = dlock::LockClient::memory();
    /// let layer = IdempotencyLayer::new(client.records()?, caller::public()).fingerprint(|_parts, body| {
    ///     let order: Value = serde_json::from_slice(body).unwrap_or_default();
    ///     format!("{} of {}", order["quantity"], order["item"]) // not `sent_at`
    /// });
    /// # let _ = layer; Ok(()) }
    /// ```
    pub fn fingerprint<F, D>(self, fingerprint: F) -> Self
    where
        F: Fn(&Parts, &Bytes) -> D + Send + Sync + 'static,
        D: AsRef<[u8]>,
    {
        self.set(|settings| {
            settings.fingerprint_of = Some(Arc::new(move |parts: &Parts, body: &Bytes| {
                fingerprint(parts, body).as_ref().to_vec()
            }));
        })
    }

    /// Calls this for each replay, before it is sent: to count by route, to log which clients retry. It must not block.
    /// If it panics, the replay is sent all the same.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// use dlock_tower::{IdempotencyLayer, idempotency::caller};
    ///
    /// # let client = dlock::LockClient::memory();
    /// let layer = IdempotencyLayer::new(client.records()?, caller::public()).on_replay(|replay| {
    ///     let (uri, age) = (&replay.request.uri, replay.age.unwrap_or_default());
    ///     println!("{uri}: {} was sent again, after {age:?}", replay.status);
    /// });
    /// # let _ = layer; Ok(()) }
    /// ```
    pub fn on_replay<F>(self, on_replay: F) -> Self
    where
        F: Fn(&Replay<'_>) + Send + Sync + 'static,
    {
        self.set(|settings| settings.on_replay = Some(Arc::new(on_replay)))
    }

    /// Limits the bytes of a request body; 1 MiB by default. The body is read before the key is claimed; a longer one is
    /// answered with 413.
    pub fn body_limit(self, bytes: usize) -> Self {
        self.set(|settings| settings.body_limit = bytes)
    }

    /// Limits how long a client may take to send its body; [`DEFAULT_BODY_TIMEOUT`](crate::lock::DEFAULT_BODY_TIMEOUT)
    /// (30 s) by default. A slower one is answered with 408, before its key is claimed.
    pub fn body_timeout(self, timeout: Duration) -> Self {
        self.set(|settings| settings.body_timeout = timeout)
    }

    /// Limits the bytes of a kept response body; 1 MiB by default. For a longer one only its existence is kept.
    pub fn response_limit(self, bytes: usize) -> Self {
        self.set(|settings| settings.response_limit = bytes)
    }

    /// Makes a request wait for an equal one that is in progress, up to this long, and answers it with the result. By
    /// default it is answered with 409 at once. The wait also ends when the client goes away.
    pub fn wait(self, wait: Duration) -> Self {
        self.set(|settings| settings.wait = Some(wait))
    }

    /// Limits how many requests may [wait](Self::wait) at the same time; 256 by default. Further ones are answered with
    /// 409 at once, as without a wait. Each waiting request keeps its body in memory.
    pub fn max_waiters(self, max_waiters: usize) -> Self {
        self.set(|settings| settings.max_waiters = max_waiters)
    }

    /// Limits how many handlers, and bodies of responses, may continue after their clients went away; 256 by default.
    /// Outer limits do not see them. At this number no request runs: it is answered with 503 and `Retry-After`, and its
    /// key is released; retries of finished requests are still answered from the store. A running handler is never
    /// stopped for this, so there can be more of them, by as many as run with their clients at that moment. 0 is
    /// allowed only with [`cancel_on_disconnect`](Self::cancel_on_disconnect), where no handler continues: every request
    /// runs.
    pub fn max_detached(self, max_detached: usize) -> Self {
        self.set(|settings| settings.max_detached = max_detached)
    }

    /// Sets how long the body of a response is read on after its client went away, to be kept; 10 s by default, and
    /// less while the layer is [shut down](IdempotencyHandle::shutdown). If a body takes longer, as an endless one
    /// does, only its existence is kept, and it is dropped.
    ///
    /// The layer learns from the server that a client is gone. A client that neither reads nor closes its connection keeps
    /// its key in progress for as long as the connection lasts, unless its answer was ready at once or fits into the
    /// buffers of the connection. So let the server end dead connections: by pings of HTTP/2 (`keep_alive_interval` of
    /// hyper, `http2_keepalive_interval` of tonic), by the socket option `TCP_USER_TIMEOUT`, or by a proxy that limits how
    /// long sending may take.
    pub fn read_on(self, read_on: Duration) -> Self {
        self.set(|settings| settings.read_on = read_on)
    }

    /// Sets how long a claim is retried when the store cannot be reached; 1 s by default.
    pub fn retry_for(self, retry_for: Duration) -> Self {
        self.set(|settings| settings.retry_for = retry_for)
    }

    /// Sets what happens to a request that was begun and whose end is unknown, because its process crashed or was cut
    /// off. By default ([`OnOrphan::TakeOver`]) the next retry runs, and can see that in
    /// [`Idempotency::attempt`](super::Idempotency::attempt); with [`OnOrphan::Leave`] it is answered with 409 (outcome
    /// unknown) until the retention is over.
    pub fn on_orphan(self, on_orphan: OnOrphan) -> Self {
        self.set(|settings| settings.on_orphan = on_orphan)
    }

    /// Sets the policy that decides what happens to the key when the handler is done;
    /// [`KeepAmbiguous`](super::KeepAmbiguous) by default.
    pub fn policy(self, policy: impl Policy) -> Self {
        self.set(|settings| settings.policy = Arc::new(policy))
    }

    /// Releases the key when the handler answers with one of these statuses, whatever the policy says; by default no
    /// status releases it. Only for statuses that the handler and every inner layer never return after an effect:
    /// `release_on([StatusCode::UNAUTHORIZED])` if extractors authenticate. After a status that is
    /// [ambiguous](super::Class::Ambiguous) by itself (a 5xx, 408, 429) the retry is the next attempt, and must be the
    /// same request.
    pub fn release_on(self, statuses: impl IntoIterator<Item = StatusCode>) -> Self {
        self.set(|settings| settings.released_on = statuses.into_iter().collect())
    }

    /// Makes a retry run again after an ambiguous end (a 5xx, a panic), as the next
    /// [attempt](super::Idempotency::attempt) and only with the same request; by default ambiguous ends are kept.
    /// Shorthand for the policy [`RetryAmbiguous`]. Under [`OnOrphan::Leave`] nothing with an unknown outcome runs
    /// again.
    pub fn retry_ambiguous(self) -> Self {
        self.policy(RetryAmbiguous)
    }

    /// Keeps one more header of the response and replays it, in addition to [`KEPT_HEADERS`](super::KEPT_HEADERS).
    ///
    /// [`check`](Self::check) refuses headers of a single exchange (`Set-Cookie`, `Date`, `Content-Length`, hop-by-hop, CORS
    /// and request-id headers), and those that each replay has of its own: `Cache-Control`, which is `no-store`, and the
    /// headers that tell of the replay.
    pub fn keep_header(self, name: HeaderName) -> Self {
        self.set(|settings| settings.kept_headers.more.push(name))
    }

    /// Keeps all headers of the response and replays them, but for those that [`keep_header`](Self::keep_header) refuses,
    /// those that `Connection` names, and `Retry-After` of a failure; by default those of
    /// [`KEPT_HEADERS`](super::KEPT_HEADERS). Layers whose headers tell of the moment, such as the state of a rate limit,
    /// belong outside.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use dlock_tower::{IdempotencyLayer, idempotency::caller};
    ///
    /// # let client = dlock::LockClient::memory();
    /// let layer = IdempotencyLayer::new(client.records()?, caller::public()).keep_all_headers();
    /// layer.check()?;
    /// # Ok(()) }
    /// ```
    pub fn keep_all_headers(self) -> Self {
        self.set(|settings| settings.kept_headers.all = true)
    }

    /// Drops the handler when the client goes away; by default it continues, since the client will ask for its result
    /// again. The progress of a dropped handler is unknown: the [`policy`](Self::policy) decides about the key, and by
    /// default keeps it.
    pub fn cancel_on_disconnect(self) -> Self {
        self.set(|settings| settings.cancel_on_disconnect = true)
    }

    /// Runs requests **without protection** when the store cannot be reached, with a warning in the log each time; by
    /// default they are answered with 503. Only if running twice does little harm. A request that has [waited](Self::wait)
    /// for an equal one is answered with 409 then: the other may still be at work. One whose claim may have ended before its
    /// handler began is answered with 503 when the store cannot confirm it.
    ///
    /// Such a request has no claim: handlers take `Option<Idempotency>`, because the extractor
    /// [`Idempotency`](super::Idempotency) would answer with 500.
    pub fn fail_open(self) -> Self {
        self.set(|settings| settings.fail_open = true)
    }

    /// Also applies to gRPC requests (with the content type `application/grpc`, `application/grpc-web` or
    /// `application/grpc-web-text`, perhaps with a format as in `application/grpc+proto`), which otherwise pass unchanged. For
    /// unary calls only: request and response are read completely. The trailers are kept, and the outcome of the call is its
    /// `grpc-status`.
    ///
    /// A layer that translates gRPC-Web (`tonic_web`) belongs outside: it puts the trailers into the body, which this
    /// layer does not read, so that a call that failed behind it is kept as any answer with the status 200.
    pub fn grpc_unary(self) -> Self {
        self.set(|settings| settings.grpc_unary = true)
    }

    /// Renders the layer's own answers, instead of [`Rejection::response`]. It should add a `WWW-Authenticate` header to
    /// the 401 of a request without a caller ([`Problem::NoCaller`](super::Problem::NoCaller)): HTTP requires a challenge
    /// there, and the layer does not know how clients authenticate.
    pub fn render<F, B>(self, render: F) -> Self
    where
        F: Fn(&Rejection) -> Response<B> + Send + Sync + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        self.set(|settings| {
            settings.render = Some(Arc::new(move |rejection: &Rejection| {
                render(rejection).map(|body| body.map_err(Into::into).boxed_unsync())
            }));
        })
    }

    /// Checks the options. Call it when the service starts: otherwise a mistake is logged when the layer is put around
    /// a service, and every request with a key is answered with 500.
    ///
    /// # Errors
    ///
    /// The first invalid option.
    pub fn check(&self) -> Result<(), InvalidOptions> {
        self.settings.check().map_err(InvalidOptions::new)
    }

    /// Returns a handle to the work that is left when the server has ended.
    #[must_use]
    pub fn handle(&self) -> IdempotencyHandle {
        IdempotencyHandle::new(self.shared.clone())
    }

    /// Returns the counters of this layer.
    #[must_use]
    pub fn stats(&self) -> IdempotencyStats {
        self.shared.counters.snapshot()
    }
}

impl<S, C> Layer<S> for IdempotencyLayer<C> {
    type Service = IdempotencyService<S, C>;

    fn layer(&self, inner: S) -> Self::Service {
        let invalid = self.settings.check().err().map(|error| {
            tracing::error!(
                error,
                "an idempotency layer is set up wrongly, no request will pass it"
            );
            error.into()
        });
        let core = Core {
            shared: self.shared.clone(),
            settings: self.settings.clone(),
        };
        IdempotencyService::new(inner, core, self.caller.clone(), invalid)
    }
}

impl<C> Clone for IdempotencyLayer<C> {
    fn clone(&self) -> Self {
        IdempotencyLayer {
            shared: self.shared.clone(),
            settings: self.settings.clone(),
            caller: self.caller.clone(),
        }
    }
}

impl<C> fmt::Debug for IdempotencyLayer<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
