//! The options of a layer.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dlock::{Lease, LockClient, LockKey, LockKind, LockOptions, MultiLock};
use http::{Extensions, Method, Request, Response, StatusCode};
use smallvec::{SmallVec, smallvec};

use super::lost::OnLost;
use super::outcome::Outcomes;
use crate::own_answer::{AnswerBody, AnswerContext, Render};
use crate::{Reason, Rejection};

/// How long a request waits for its lock by default: 5 s.
pub const DEFAULT_WAIT: Duration = Duration::from_secs(5);

/// An invalid option; see [`LockLayer::check`](crate::LockLayer::check).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock_tower::{LockLayer, key};
/// use std::time::Duration;
///
/// let client = dlock::LockClient::memory();
/// let layer = LockLayer::new(client, key::path()).lease(Duration::ZERO);
/// let error = layer.check().unwrap_err();
/// assert!(error.to_string().contains("lease"));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidOptions(String);

impl InvalidOptions {
    pub(crate) fn new(reason: String) -> InvalidOptions {
        InvalidOptions(reason)
    }
}

impl fmt::Display for InvalidOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InvalidOptions {}

/// What a request locks, usually one lock.
pub(super) type Keys = SmallVec<[LockKey; 1]>;

/// The kinds of lock that requests acquire.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kinds {
    All(LockKind),
    /// By method: requests that only read share the lock.
    ReadWrite,
}

#[derive(Clone)]
pub(super) struct Settings {
    /// The place in the code of the holders and waiters.
    pub(super) by: &'static Location<'static>,
    pub(super) kinds: Kinds,
    pub(super) prefer_writers: bool,
    pub(super) options: LockOptions,
    /// Whether to ask once, without waiting.
    pub(super) once: bool,
    /// `None`: the default of the kind.
    pub(super) skipped: Option<Arc<[Method]>>,
    pub(super) busy: StatusCode,
    pub(super) render: Option<Arc<Render>>,
    pub(super) fail_open: bool,
    pub(super) on_lost: OnLost,
    /// How long the lock is held at most until the body is sent; `None`: until the handler has answered.
    pub(super) until_body: Option<Duration>,
    /// What was counted so far.
    pub(super) outcomes: Arc<Outcomes>,
    /// Whether a request without a route was reported.
    pub(super) has_told_unrouted: Arc<AtomicBool>,
}

impl Settings {
    /// The default options of a layer that was made at this place in the code.
    pub(super) fn new(by: &'static Location<'static>) -> Settings {
        Settings {
            by,
            kinds: Kinds::All(LockKind::Mutex),
            prefer_writers: false,
            options: LockOptions::new().wait(DEFAULT_WAIT),
            once: false,
            skipped: None,
            busy: StatusCode::LOCKED,
            render: None,
            fail_open: false,
            on_lost: OnLost::Stop,
            until_body: None,
            outcomes: Arc::default(),
            has_told_unrouted: Arc::default(),
        }
    }

    pub(super) fn skips(&self, method: &Method) -> bool {
        match (&self.skipped, self.kinds) {
            (Some(skipped), _) => skipped.contains(method),
            (None, Kinds::ReadWrite) => method == Method::OPTIONS,
            (None, Kinds::All(_)) => [Method::OPTIONS, Method::HEAD].contains(method),
        }
    }

    pub(super) fn waits(&self) -> bool {
        !self.once
    }

    /// The locks of a request.
    pub(super) fn lock<B>(&self, client: &LockClient, request: &Request<B>, keys: Keys) -> MultiLock {
        let method = request.method();
        let kind = match self.kinds {
            Kinds::All(kind) => kind,
            Kinds::ReadWrite if method.is_safe() => LockKind::Read,
            Kinds::ReadWrite => LockKind::Write,
        };
        let options = grouped(self.options.clone(), request.extensions());
        let mut lock = client.multi(keys).kind(kind).options(options);
        if let Some(bound) = self.until_body {
            lock = lock.max_hold(self.options.max_hold.map_or(bound, |own| own.min(bound)));
        }
        if self.prefer_writers {
            lock = lock.prefer_writers();
        }
        lock
    }

    /// See [`LockLayer::check`](crate::LockLayer::check).
    pub(super) fn check(&self, client: &LockClient) -> Result<(), InvalidOptions> {
        let lock = self.lock(client, &Request::new(()), smallvec!["check".into()]);
        lock.check().map_err(|error| InvalidOptions(error.to_string()))?;
        let busy = self.busy;
        if !(busy.is_client_error() || busy.is_server_error()) {
            return Err(InvalidOptions(format!(
                "invalid option busy_status: {busy} does not tell a failure"
            )));
        }
        Ok(())
    }

    /// The rejection of a request that did not acquire its lock.
    pub(super) fn refusal(&self, error: dlock::Error) -> Rejection {
        let retry_after = match &error {
            // A renewed lock may become available at any time; a fixed one (assuming the holder uses these options)
            // only expires.
            dlock::Error::NotAcquired { remaining, .. }
                if matches!(self.options.lease, Some(Lease::Fixed(_))) =>
            {
                *remaining
            }
            // Of a layer further out: it was lost before the handler began.
            dlock::Error::Lost { .. } => Some(Duration::from_secs(1)),
            _ => None,
        };
        let rejection = Rejection::from(error);
        match retry_after {
            Some(retry_after) => rejection.with_retry_after(retry_after),
            None => rejection,
        }
    }

    /// Logs, once, that something else than the absence of a route answered a request for which no route was matched.
    pub(super) fn note_unrouted(&self, status: StatusCode) {
        let is_absent = [StatusCode::NOT_FOUND, StatusCode::METHOD_NOT_ALLOWED].contains(&status);
        if !is_absent && !self.has_told_unrouted.swap(true, Ordering::Relaxed) {
            tracing::error!(
                %status,
                layer = %self.by,
                "a request ran without a lock, because the router of its lock layer matched no route: put the layer inside \
                 of `nest_service` and `fallback_service`, or say by `optional` or `or` what such requests lock"
            );
        }
    }

    /// The layer's own response.
    pub(super) fn respond(
        &self,
        rejection: Rejection,
        answer_context: &AnswerContext,
    ) -> Response<AnswerBody> {
        rejection.log();
        let rejection = match rejection.reason() {
            Reason::Busy => rejection.with_status(self.busy),
            _ => rejection,
        };
        answer_context.answer(rejection, self.render.as_deref())
    }
}

/// The options with the matched path as the group, if there is one.
fn grouped(options: LockOptions, extensions: &Extensions) -> LockOptions {
    #[cfg(feature = "axum")]
    if let Some(path) = extensions.get::<axum::extract::MatchedPath>() {
        return options.__group_if_none(path.as_str());
    }
    let _ = extensions;
    options
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("kinds", &self.kinds)
            .field("prefer_writers", &self.prefer_writers)
            .field("options", &self.options)
            .field("once", &self.once)
            .field("skipped", &self.skipped)
            .field("busy", &self.busy)
            .field("fail_open", &self.fail_open)
            .field("on_lost", &self.on_lost)
            .field("until_body", &self.until_body)
            .finish_non_exhaustive()
    }
}
