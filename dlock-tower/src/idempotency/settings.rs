//! The options of a layer.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dlock::record::OnOrphan;
use http::header::HeaderName;
use http::request::Parts;
use http::{Method, Response, StatusCode};

use super::headers::{KeptHeaders, refusal};
use super::policy::{Ending, KeepAmbiguous, Policy, Verdict};
use super::replay::Replay;
use crate::Rejection;
use crate::body::read::DEFAULT_BODY_TIMEOUT;
use crate::own_answer::{AnswerBody, AnswerContext, Render};

/// The default lease of a claim: 10 s.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(10);

/// How long results are kept by default: 24 h.
pub const DEFAULT_RETENTION: Duration = Duration::from_secs(24 * 3600);

/// The default limit of request and response bodies: 1 MiB.
pub const DEFAULT_LIMIT: usize = 1024 * 1024;

/// How many requests may wait for an equal one by default: 256.
pub const DEFAULT_MAX_WAITERS: usize = 256;

/// How many handlers and bodies may continue without their clients by default, before no more requests are accepted:
/// 256.
pub const DEFAULT_MAX_DETACHED: usize = 256;

/// How long the body of a response is read on by default after its client went away: 10 s.
pub const DEFAULT_READ_ON: Duration = Duration::from_secs(10);

/// How long a claim is retried by default when the store cannot be reached: 1 s.
pub const DEFAULT_RETRY_FOR: Duration = Duration::from_secs(1);

/// The longest time of any option.
const YEAR: Duration = Duration::from_secs(366 * 24 * 3600);

pub(super) type Route = dyn Fn(&Parts) -> String + Send + Sync;
pub(super) type RetentionOf = dyn Fn(&Parts) -> Duration + Send + Sync;
pub(super) type FingerprintOf = dyn Fn(&Parts, &Bytes) -> Vec<u8> + Send + Sync;
pub(super) type OnReplay = dyn Fn(&Replay<'_>) + Send + Sync;

#[derive(Clone)]
pub(super) struct Settings {
    pub(super) header: HeaderName,
    pub(super) required: bool,
    pub(super) methods: Vec<Method>,
    pub(super) namespace: String,
    pub(super) per_host: bool,
    pub(super) route: Option<Arc<Route>>,
    pub(super) lease: Duration,
    pub(super) retention: Duration,
    /// By the head of the request.
    pub(super) retention_of: Option<Arc<RetentionOf>>,
    pub(super) fingerprint_of: Option<Arc<FingerprintOf>>,
    pub(super) on_replay: Option<Arc<OnReplay>>,
    pub(super) body_limit: usize,
    pub(super) body_timeout: Duration,
    pub(super) response_limit: usize,
    pub(super) wait: Option<Duration>,
    pub(super) max_waiters: usize,
    pub(super) max_detached: usize,
    pub(super) read_on: Duration,
    pub(super) retry_for: Duration,
    pub(super) on_orphan: OnOrphan,
    pub(super) released_on: Vec<StatusCode>,
    pub(super) policy: Arc<dyn Policy>,
    pub(super) kept_headers: KeptHeaders,
    pub(super) cancel_on_disconnect: bool,
    pub(super) fail_open: bool,
    pub(super) grpc_unary: bool,
    pub(super) render: Option<Arc<Render>>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            header: HeaderName::from_static("idempotency-key"),
            required: false,
            methods: vec![Method::POST, Method::PATCH],
            namespace: String::new(),
            per_host: false,
            route: None,
            lease: DEFAULT_LEASE,
            retention: DEFAULT_RETENTION,
            retention_of: None,
            fingerprint_of: None,
            on_replay: None,
            body_limit: DEFAULT_LIMIT,
            body_timeout: DEFAULT_BODY_TIMEOUT,
            response_limit: DEFAULT_LIMIT,
            wait: None,
            max_waiters: DEFAULT_MAX_WAITERS,
            max_detached: DEFAULT_MAX_DETACHED,
            read_on: DEFAULT_READ_ON,
            retry_for: DEFAULT_RETRY_FOR,
            on_orphan: OnOrphan::TakeOver,
            released_on: Vec::new(),
            policy: Arc::new(KeepAmbiguous),
            kept_headers: KeptHeaders::default(),
            cancel_on_disconnect: false,
            fail_open: false,
            grpc_unary: false,
            render: None,
        }
    }
}

impl Settings {
    /// Decides the key of a request with this ending.
    pub(super) fn judge(&self, ending: &Ending<'_>) -> Verdict {
        match ending {
            Ending::Response { status, .. } if self.released_on.contains(status) => Verdict::Release,
            // Finished work is not done again because of a fault in the policy.
            ending => unless_it_panics(|| self.policy.judge(ending)).unwrap_or_else(|| {
                tracing::error!("the policy of a request panicked; the default policy decides");
                KeepAmbiguous.judge(ending)
            }),
        }
    }

    /// Calls the replay listener.
    pub(super) fn tell_replay<'a>(&self, replay: impl FnOnce() -> Replay<'a>) {
        let Some(on_replay) = &self.on_replay else {
            return;
        };
        let replay = replay();
        // The answer exists, and is sent whether or not this panics.
        if unless_it_panics(|| on_replay(&replay)).is_none() {
            tracing::error!("the on_replay callback panicked");
        }
    }

    /// Returns how long the result of this request is kept, unless its end decides otherwise.
    pub(super) fn retention_of(&self, parts: &Parts) -> Duration {
        let retention = self.retention_of.as_ref().map(|retention| retention(parts));
        self.bounded(retention.unwrap_or(self.retention))
    }

    /// Limits a retention to what a store can keep, and to no less than the lease.
    pub(super) fn bounded(&self, retention: Duration) -> Duration {
        retention.max(self.lease).min(YEAR)
    }

    pub(super) fn check(&self) -> Result<(), String> {
        const SHORTEST: Duration = Duration::from_millis(100);
        if self.lease < SHORTEST {
            return Err(format!(
                "invalid option lease: {:?} is shorter than {SHORTEST:?}",
                self.lease
            ));
        }
        if self.retention < self.lease || self.retention > YEAR {
            return Err(format!(
                "invalid option retention: {:?} is not between the lease ({:?}) and a year",
                self.retention, self.lease
            ));
        }
        if self.max_detached == 0 && !self.cancel_on_disconnect {
            return Err(
                "invalid option max_detached: no request could run, use cancel_on_disconnect".to_owned(),
            );
        }
        for (option, time) in [
            ("body_timeout", Some(self.body_timeout)),
            ("wait", self.wait),
            ("retry_for", Some(self.retry_for)),
            ("read_on", Some(self.read_on)),
        ] {
            if time.is_some_and(|time| time > YEAR) {
                return Err(format!("invalid option {option}: it is longer than a year"));
            }
        }
        for (option, limit) in [
            ("body_limit", self.body_limit),
            ("response_limit", self.response_limit),
        ] {
            if u32::try_from(limit).is_err() {
                return Err(format!("invalid option {option}: {limit} bytes are too many"));
            }
        }
        let mut more = self.kept_headers.more.iter();
        match more.find_map(|name| Some((name, refusal(name)?))) {
            Some((name, reason)) => Err(format!("invalid option keep_header: {name} {reason}")),
            None => Ok(()),
        }
    }

    /// Renders the layer's own response.
    pub(super) fn respond(
        &self,
        rejection: Rejection,
        answer_context: &AnswerContext,
    ) -> Response<AnswerBody> {
        rejection.log();
        answer_context.answer(rejection, self.render.as_deref())
    }
}

/// Returns the result of the user's code, or `None` if it panics.
fn unless_it_panics<T>(call: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(call)).ok()
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("header", &self.header)
            .field("required", &self.required)
            .field("methods", &self.methods)
            .field("namespace", &self.namespace)
            .field("per_host", &self.per_host)
            .field("lease", &self.lease)
            .field("retention", &self.retention)
            .field("body_limit", &self.body_limit)
            .field("body_timeout", &self.body_timeout)
            .field("response_limit", &self.response_limit)
            .field("wait", &self.wait)
            .field("max_waiters", &self.max_waiters)
            .field("max_detached", &self.max_detached)
            .field("read_on", &self.read_on)
            .field("on_orphan", &self.on_orphan)
            .field("released_on", &self.released_on)
            .field("kept_headers", &self.kept_headers)
            .field("cancel_on_disconnect", &self.cancel_on_disconnect)
            .field("fail_open", &self.fail_open)
            .field("grpc_unary", &self.grpc_unary)
            .finish_non_exhaustive()
    }
}
