//! Each request once.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use dlock::record::{OnOrphan, Records};
use dlock::{Error, LockClient, LockKey, OnFailure, Once, OnceClaim, OnceError, OnceReply};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tower_layer::Layer;
use tower_service::Service;

use super::bound::{Bound, Reservation};
use super::error::{SOON, retry_after};
use super::work::take_ready;

/// The shortest pause before a message is delivered again: a lease that ends now is about to be renewed, or taken over.
const SHORTEST: Duration = Duration::from_millis(100);

/// The response of a request that runs once: of this attempt, or of an earlier one. Acknowledge its message.
///
/// ```
/// use dlock_tower::task::Done;
///
/// let done = Done::Earlier(42);
/// assert!(!done.ran_here());
/// assert_eq!(done.into_inner(), 42);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Done<T> {
    /// The inner service ran here, and its response is kept.
    Ran(T),
    /// The inner service ran before, here or elsewhere: this is the response that was kept.
    Earlier(T),
    /// The inner service ran here, and the store did not confirm the response in time. It goes on being sent in the
    /// background, unless the store refuses it for good. A message that is acknowledged now is not repeated; one that is delivered again may run again, when the
    /// lease is over.
    Unrecorded(T, Error),
}

impl<T> Done<T> {
    /// The response.
    #[must_use]
    pub fn into_inner(self) -> T {
        match self {
            Done::Ran(value) | Done::Earlier(value) | Done::Unrecorded(value, _) => value,
        }
    }

    /// Whether the inner service was called for this request.
    #[must_use]
    pub fn ran_here(&self) -> bool {
        !matches!(self, Done::Earlier(_))
    }
}

/// Why a request under a [`TaskOnceLayer`] has no response.
///
/// | | do | |
/// |---|---|---|
/// | `Store` of an invalid key or option, for example | put the message aside: it would never run | [`is_permanent`](Self::is_permanent) |
/// | `Elsewhere`, any other `Store`, `Lost` before the work | requeue the message; this was no attempt | [`is_not_started`](Self::is_not_started), [`retry_after`](Self::retry_after) |
/// | `Inner`, any other `Lost` | requeue the message; an attempt was made | |
/// | `ResultUnavailable`, `Unreadable` | acknowledge the message: it was done before | [`is_done`](Self::is_done) |
/// | `Failed`, `Orphaned` | put the message aside: no attempt follows | [`is_given_up`](Self::is_given_up) |
///
/// **A message that is acknowledged on `Elsewhere` is lost** if the other attempt fails.
///
/// ```
/// use dlock_tower::task::{Done, TaskOnceError};
///
/// fn verdict(result: Result<Done<u64>, TaskOnceError<String>>) -> &'static str {
///     match result {
///         Ok(_) => "acknowledge",
///         Err(error) if error.is_done() => "acknowledge",
///         Err(error) if error.is_given_up() || error.is_permanent() => "put aside",
///         Err(_) => "requeue",
///     }
/// }
/// assert_eq!(verdict(Ok(Done::Earlier(1))), "acknowledge");
/// assert_eq!(verdict(Err(TaskOnceError::Inner("no such file".to_owned()))), "requeue");
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum TaskOnceError<E> {
    /// Another process works on the key now, or this one does in another task, and has no result within the wait time.
    #[non_exhaustive]
    Elsewhere {
        /// The key.
        key: LockKey,
        /// The number of that attempt.
        attempt: u32,
        /// What its lease has left unless it is renewed.
        remaining: Duration,
    },
    /// The claim was lost: its lease was over before the inner service was called, the work was dropped, or its response came
    /// too late. Another process may run it.
    #[non_exhaustive]
    Lost {
        /// The key.
        key: LockKey,
        /// The number of this attempt.
        attempt: u32,
        /// Whether the inner service was called. If not, the store does not count the attempt.
        started: bool,
    },
    /// Earlier attempts failed, and [`OnFailure`] says that there are no more.
    #[non_exhaustive]
    Failed {
        /// The key.
        key: LockKey,
        /// How many there were.
        attempts: u32,
    },
    /// An earlier attempt ended without a result, and by [`OnOrphan::Leave`] it is not repeated.
    #[non_exhaustive]
    Orphaned {
        /// The key.
        key: LockKey,
        /// The number of that attempt.
        attempt: u32,
    },
    /// It was done before, and the response was not kept: it was too large (1 MiB), or the store refused it.
    #[non_exhaustive]
    ResultUnavailable {
        /// The key.
        key: LockKey,
    },
    /// It was done before, and the response cannot be read: it is of another type, or of a newer version.
    #[non_exhaustive]
    Unreadable {
        /// The key.
        key: LockKey,
        /// Why.
        why: String,
    },
    /// The store did not answer or refused, an option or the key is invalid, or the client is shut down. The inner service was
    /// not called. Whether it ever will be: [`is_permanent`](Self::is_permanent).
    Store(Error),
    /// The error of the inner service. The layer's [`OnFailure`] says what the next attempt does.
    Inner(E),
}

impl<E> TaskOnceError<E> {
    fn of(key: LockKey, error: OnceError<E>) -> TaskOnceError<E> {
        match error {
            OnceError::Work(error) => TaskOnceError::Inner(error),
            OnceError::Failed { attempts, .. } => TaskOnceError::Failed { key, attempts },
            OnceError::Orphaned { attempt, .. } => TaskOnceError::Orphaned { key, attempt },
            OnceError::Lost { attempt, started, .. } => TaskOnceError::Lost {
                key,
                attempt,
                started,
            },
            OnceError::ResultUnavailable => TaskOnceError::ResultUnavailable { key },
            OnceError::Unreadable { why, .. } => TaskOnceError::Unreadable { key, why },
            OnceError::Store(error) => TaskOnceError::Store(error),
            // Of a newer dlock, whatever it is: not a success.
            _ => TaskOnceError::Store(Error::invalid_option("dlock", "it is newer than dlock-tower")),
        }
    }

    /// Whether the inner service was not called: this was no attempt. Deliver the message again after
    /// [`retry_after`](Self::retry_after), unless the error [is permanent](Self::is_permanent).
    #[must_use]
    pub fn is_not_started(&self) -> bool {
        use TaskOnceError::{Elsewhere, Lost, Store};
        matches!(self, Elsewhere { .. } | Store(_) | Lost { started: false, .. })
    }

    /// Returns whether the inner service was not called, and trying again cannot help: the key is invalid
    /// ([`Error::InvalidKey`]), or an option is invalid or unsupported ([`Error::InvalidOption`], [`Error::Unsupported`]). Put
    /// the message aside.
    #[must_use]
    pub fn is_permanent(&self) -> bool {
        matches!(self, TaskOnceError::Store(error) if retry_after(error).is_none())
    }

    /// Returns when to deliver the message again after an error [before the work](Self::is_not_started): after a second, or
    /// when the lease of the attempt elsewhere ends, if that is sooner, but not before 100 ms; after 10 s where the key holds other data, such as a record
    /// of a newer version ([`Error::KeyTaken`]). `None` for all other errors, and where it [cannot
    /// help](Self::is_permanent).
    ///
    /// ```
    /// use dlock::Error;
    /// use dlock_tower::task::TaskOnceError;
    /// use std::time::Duration;
    ///
    /// let draining = TaskOnceError::<String>::Store(Error::Draining);
    /// assert_eq!(draining.retry_after(), Some(Duration::from_secs(1)));
    ///
    /// let invalid = TaskOnceError::<String>::Store(Error::invalid_option("lease", "it is zero"));
    /// assert!(invalid.retry_after().is_none() && invalid.is_permanent());
    /// ```
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            TaskOnceError::Elsewhere { remaining, .. } => Some((*remaining).clamp(SHORTEST, SOON)),
            TaskOnceError::Lost { started: false, .. } => Some(SOON),
            TaskOnceError::Store(error) => retry_after(error),
            _ => None,
        }
    }

    /// Whether the work was done before, and only its response is not available: acknowledge the message.
    #[must_use]
    pub fn is_done(&self) -> bool {
        use TaskOnceError::{ResultUnavailable, Unreadable};
        matches!(self, ResultUnavailable { .. } | Unreadable { .. })
    }

    /// Whether no attempt follows, by the layer's [`OnFailure`] or [`OnOrphan`]: put the message aside.
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        matches!(
            self,
            TaskOnceError::Failed { .. } | TaskOnceError::Orphaned { .. }
        )
    }

    /// The error of the inner service, if it is one.
    #[must_use]
    pub fn into_inner(self) -> Option<E> {
        match self {
            TaskOnceError::Inner(error) => Some(error),
            _ => None,
        }
    }
}

impl<E: fmt::Display> fmt::Display for TaskOnceError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TaskOnceError::Elsewhere {
                key,
                attempt,
                remaining,
            } => write!(
                f,
                "\"{key}\" is being done by another process, in attempt {attempt}; its lease ends in {remaining:.1?}"
            ),
            TaskOnceError::Lost {
                key,
                attempt,
                started,
            } => {
                let when = if *started { "" } else { " before it began" };
                write!(f, "attempt {attempt} of \"{key}\" lost its claim{when}")
            }
            TaskOnceError::Failed { key, attempts } => {
                write!(
                    f,
                    "\"{key}\" has failed in {attempts} attempts and is not tried again"
                )
            }
            TaskOnceError::Orphaned { key, attempt } => write!(
                f,
                "attempt {attempt} of \"{key}\" ended without a result and is not repeated"
            ),
            TaskOnceError::ResultUnavailable { key } => {
                write!(f, "\"{key}\" was done before, and its result was not kept")
            }
            TaskOnceError::Unreadable { key, why } => {
                write!(
                    f,
                    "\"{key}\" was done before, and its result cannot be read: {why}"
                )
            }
            TaskOnceError::Store(error) => error.fmt(f),
            TaskOnceError::Inner(error) => error.fmt(f),
        }
    }
}

/// For any error that can be displayed, `BoxError` included, which is no `std::error::Error` itself. The causes of an inner
/// error are found by [`into_inner`](TaskOnceError::into_inner).
impl<E: fmt::Debug + fmt::Display> std::error::Error for TaskOnceError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // Displayed as they are, so theirs is the next.
            TaskOnceError::Store(error) => error.source(),
            _ => None,
        }
    }
}

/// Runs the inner service once per key, however often and in however many processes a request of that key arrives: the key
/// names what is to be done, as the id of a message.
///
/// The first request claims the key, runs, and its response is kept; later ones get that response ([`Done::Earlier`]) in one
/// round trip. What a crashed attempt leaves, the next one repeats: an effect happens **at least once**, and never in two
/// attempts at a time; with [`OnOrphan::Leave`] and [`OnFailure::Keep`] at most once. For exactly once, the effect has to be one that a repetition does
/// not double, or goes into one transaction with the record. [`Once`] has the promises. A response is kept as JSON: [`Once::run`]
/// says what that changes.
///
/// | | default |
/// |---|---|
/// | [`keep`](Self::keep) | 1 day |
/// | [`lease`](Self::lease) | the client's, 30 s, renewed while the request runs |
/// | [`wait`](Self::wait) | none: work that another process does is [`TaskOnceError::Elsewhere`] at once |
/// | [`on_failure`](Self::on_failure), [`on_orphan`](Self::on_orphan) | the next attempt runs it again |
///
/// It needs the feature `once`, and a store with records.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock_tower::task::{Done, TaskOnceLayer};
/// use tower::{Layer, ServiceExt, service_fn};
///
/// #[derive(Clone)]
/// struct Message { id: &'static str }
///
/// let layer = TaskOnceLayer::new(dlock::LockClient::memory(), |message: &Message| format!("mail:{}", message.id).into())?;
/// let consumer = layer.layer(service_fn(|message: Message| async move {
///     Ok::<_, std::io::Error>(format!("sent {}", message.id))
/// }));
///
/// let message = Message { id: "1-0" };
/// assert!(matches!(consumer.clone().oneshot(message.clone()).await?, Done::Ran(_)));
/// // delivered again
/// assert!(matches!(consumer.oneshot(message).await?, Done::Earlier(sent) if sent == "sent 1-0"));
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// See [`TaskOnceError`].
///
/// # Cancel safety
///
/// Dropped in the middle of the work, the response future drops the work and gives up the claim at once; dropped when the work
/// is done, the response is kept all the same.
#[must_use = "a layer does nothing until it is put around a service"]
pub struct TaskOnceLayer<Req, K> {
    key: Arc<K>,
    settings: Settings<Req>,
    bound: Bound,
}

/// Tells a request its claim.
type Tells<Req> = dyn Fn(&mut Req, &OnceClaim) + Send + Sync;

struct Settings<Req> {
    source: Source,
    lease: Option<Duration>,
    keep: Option<Duration>,
    wait: Option<Duration>,
    on_failure: OnFailure,
    on_orphan: OnOrphan,
    tells: Option<Arc<Tells<Req>>>,
    request: PhantomData<fn(&Req)>,
}

#[derive(Clone)]
enum Source {
    Client(LockClient),
    Records(Records),
}

impl<Req> Settings<Req> {
    fn once(&self, key: LockKey) -> Once {
        let mut once = match &self.source {
            Source::Client(client) => client.once(key),
            Source::Records(records) => records.once(key),
        };
        once = once.on_failure(self.on_failure).on_orphan(self.on_orphan);
        if let Some(lease) = self.lease {
            once = once.lease(lease);
        }
        if let Some(keep) = self.keep {
            once = once.keep(keep);
        }
        match self.wait {
            Some(wait) => once.wait(wait),
            None => once,
        }
    }

    fn check(&self) -> Result<(), Error> {
        self.once("check".into()).check()
    }
}

impl<Req, K> TaskOnceLayer<Req, K>
where
    K: Fn(&Req) -> LockKey,
{
    /// A layer that takes the keys of its requests by this closure, and keeps their responses on the client's store.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] when that store keeps no records.
    pub fn new(client: LockClient, key: K) -> Result<TaskOnceLayer<Req, K>, Error> {
        client.records()?;
        Ok(TaskOnceLayer::on(Source::Client(client), key))
    }

    /// The same on records that do not belong to a client, as those of `dlock-postgres`.
    pub fn on_records(records: Records, key: K) -> TaskOnceLayer<Req, K> {
        TaskOnceLayer::on(Source::Records(records), key)
    }

    fn on(source: Source, key: K) -> TaskOnceLayer<Req, K> {
        TaskOnceLayer {
            key: Arc::new(key),
            settings: Settings {
                source,
                lease: None,
                keep: None,
                wait: None,
                on_failure: OnFailure::default(),
                on_orphan: OnOrphan::default(),
                tells: None,
                request: PhantomData,
            },
            bound: Bound::default(),
        }
    }
}

impl<Req, K> TaskOnceLayer<Req, K> {
    /// How long the next attempt waits after this process crashed in the middle of one, see [`Once::lease`]; the client's by
    /// default (30 s).
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.lease = Some(lease);
        self
    }

    /// How long a response is kept, see [`Once::keep`]: longer than the broker may deliver the message again. 1 day by default;
    /// at least two leases, at most a year.
    pub fn keep(mut self, keep: Duration) -> Self {
        self.settings.keep = Some(keep);
        self
    }

    /// Waits at most this long for the response of work that another process does, see [`Once::wait`]; by default not at all.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.settings.wait = Some(wait);
        self
    }

    /// What the next attempt does after the inner service's error; by default it runs it again.
    pub fn on_failure(mut self, on_failure: OnFailure) -> Self {
        self.settings.on_failure = on_failure;
        self
    }

    /// What the next attempt does after one that crashed or was dropped; by default it runs it again.
    pub fn on_orphan(mut self, on_orphan: OnOrphan) -> Self {
        self.settings.on_orphan = on_orphan;
        self
    }

    /// Tells each request its claim before the inner service is called: the number of the attempt, and the fencing token for
    /// its writes.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// use dlock_tower::task::TaskOnceLayer;
    ///
    /// struct Message { id: u64, token: u64 }
    ///
    /// let layer = TaskOnceLayer::new(dlock::LockClient::memory(), |message: &Message| message.id.to_string().into())?
    ///     .tell_claim(|message, claim| message.token = claim.fencing_token());
    /// # let _ = layer; Ok(()) }
    /// ```
    pub fn tell_claim(mut self, tells: impl Fn(&mut Req, &OnceClaim) + Send + Sync + 'static) -> Self {
        self.settings.tells = Some(Arc::new(tells));
        self
    }

    super::options::at_most_here!();

    /// Whether the options make sense. Call it when the consumer starts: otherwise a mistake is logged when the layer is put
    /// around a service, and every request is [`TaskOnceError::Store`].
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOption`], for the first option that does not.
    pub fn check(&self) -> Result<(), Error> {
        self.bound.check()?;
        self.settings.check()
    }
}

impl<S, Req, K> Layer<S> for TaskOnceLayer<Req, K> {
    type Service = TaskOnceService<S, Req, K>;

    fn layer(&self, inner: S) -> Self::Service {
        if let Err(error) = self.check() {
            tracing::error!(%error, "a once layer is set up wrongly, no request will pass it");
        }
        TaskOnceService {
            inner,
            key: self.key.clone(),
            settings: Arc::new(self.settings.clone()),
            reservation: self.bound.reservation(),
        }
    }
}

/// A service that runs each request once; made by [`TaskOnceLayer`]. Its readiness is that of
/// [`TaskLockService`](super::TaskLockService).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock::{LockClient, LockKey};
/// use dlock_tower::task::{TaskOnceLayer, TaskOnceService};
/// use tower::{Layer, ServiceExt, service_fn};
///
/// let layer = TaskOnceLayer::new(LockClient::memory(), |id: &u64| LockKey::from(id.to_string()))?;
/// let consumer: TaskOnceService<_, u64, _> =
///     layer.layer(service_fn(|id: u64| async move { Ok::<_, std::io::Error>(id * 2) }));
/// assert_eq!(consumer.oneshot(7).await?.into_inner(), 14);
/// # Ok(()) }
/// ```
pub struct TaskOnceService<S, Req, K> {
    inner: S,
    key: Arc<K>,
    settings: Arc<Settings<Req>>,
    reservation: Reservation,
}

impl<S, Req, K> TaskOnceService<S, Req, K> {
    /// The inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The inner service.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, Req, K> Service<Req> for TaskOnceService<S, Req, K>
where
    S: Service<Req, Error: Send, Future: Send> + Clone + Send + 'static,
    S::Response: Serialize + DeserializeOwned + Send,
    K: Fn(&Req) -> LockKey,
    Req: Send + 'static,
{
    type Response = Done<S::Response>;
    type Error = TaskOnceError<S::Error>;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        ready!(self.reservation.poll_reserve(cx));
        self.inner.poll_ready(cx).map_err(TaskOnceError::Inner)
    }

    fn call(&mut self, mut request: Req) -> Self::Future {
        let running = match self.reservation.take() {
            Ok(running) => running,
            Err(error) => return std::future::ready(Err(TaskOnceError::Store(error))).boxed(),
        };
        let key = (self.key)(&request);
        let once = self.settings.once(key.clone());
        let tells = self.settings.tells.clone();
        let mut inner = take_ready(&mut self.inner);
        Box::pin(async move {
            let _running = running.enter().await;
            let run = once.run(move |claim| {
                if let Some(tells) = tells {
                    tells(&mut request, &claim);
                }
                inner.call(request)
            });
            match run.await {
                Ok(OnceReply::Ran(value)) => Ok(Done::Ran(value)),
                Ok(OnceReply::Earlier(value)) => Ok(Done::Earlier(value)),
                Ok(OnceReply::Unrecorded(value, error)) => Ok(Done::Unrecorded(value, error)),
                Ok(OnceReply::Elsewhere {
                    attempt, remaining, ..
                }) => Err(TaskOnceError::Elsewhere {
                    key,
                    attempt,
                    remaining,
                }),
                // Of a newer dlock, whatever it is: not a success.
                Ok(_) => Err(TaskOnceError::Store(Error::invalid_option(
                    "dlock",
                    "it is newer than dlock-tower",
                ))),
                Err(error) => Err(TaskOnceError::of(key, error)),
            }
        })
    }
}

impl<Req> Clone for Settings<Req> {
    fn clone(&self) -> Self {
        Settings {
            source: self.source.clone(),
            lease: self.lease,
            keep: self.keep,
            wait: self.wait,
            on_failure: self.on_failure,
            on_orphan: self.on_orphan,
            tells: self.tells.clone(),
            request: PhantomData,
        }
    }
}

impl<Req, K> Clone for TaskOnceLayer<Req, K> {
    fn clone(&self) -> Self {
        TaskOnceLayer {
            key: self.key.clone(),
            settings: self.settings.clone(),
            bound: self.bound.clone(),
        }
    }
}

impl<S: Clone, Req, K> Clone for TaskOnceService<S, Req, K> {
    fn clone(&self) -> Self {
        TaskOnceService {
            inner: self.inner.clone(),
            key: self.key.clone(),
            settings: self.settings.clone(),
            reservation: self.reservation.clone(),
        }
    }
}

impl<Req> fmt::Debug for Settings<Req> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.once("of each request".into()).fmt(f)
    }
}

impl<Req, K> fmt::Debug for TaskOnceLayer<Req, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TaskOnceLayer")
            .field("settings", &self.settings)
            .field("bound", &self.bound)
            .finish_non_exhaustive()
    }
}

impl<S: fmt::Debug, Req, K> fmt::Debug for TaskOnceService<S, Req, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TaskOnceService")
            .field("inner", &self.inner)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_says_the_same_as_that_of_the_work() {
        for error in [
            OnceError::Work("no such file".to_owned()),
            OnceError::ResultUnavailable,
            OnceError::Store(Error::Draining),
            OnceError::Store(Error::invalid_option("keep", "it is zero")),
        ] {
            let of_layer = TaskOnceError::of("m".into(), error.clone());
            assert_eq!(
                [
                    of_layer.is_not_started(),
                    of_layer.is_permanent(),
                    of_layer.is_done(),
                    of_layer.is_given_up()
                ],
                [
                    error.is_not_started(),
                    error.is_permanent(),
                    error.is_done(),
                    error.is_given_up()
                ],
                "{error:?}"
            );
            assert_eq!(of_layer.retry_after(), error.retry_after(), "{error:?}");
        }
    }

    #[test]
    fn message_that_is_done_elsewhere_is_never_delivered_again_at_once() {
        for (remaining, after) in [(0, 100), (99, 100), (300, 300), (25_000, 1000)] {
            let elsewhere = TaskOnceError::<String>::Elsewhere {
                key: "m".into(),
                attempt: 1,
                remaining: Duration::from_millis(remaining),
            };
            assert_eq!(
                elsewhere.retry_after(),
                Some(Duration::from_millis(after)),
                "{remaining}"
            );
        }
    }
}
