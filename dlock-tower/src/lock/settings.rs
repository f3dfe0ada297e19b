//! The options of a layer.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use dlock::{Kind, LockClient, LockKey, MultiLock};
use http::{Method, Response, StatusCode};

use super::lost::OnLost;
use crate::asker::{AnswerBody, Asker, Render};
use crate::{Reason, Rejection};

/// How long a request waits for its lock, unless said otherwise: 5 s.
pub const DEFAULT_WAIT: Duration = Duration::from_secs(5);

/// An option that makes no sense; see [`LockLayer::check`](crate::LockLayer::check).
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

/// What requests lock their keys as.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kinds {
    All(Kind),
    /// By their methods: those that only read share.
    ReadWrite,
}

#[derive(Clone)]
pub(super) struct Settings {
    pub(super) kinds: Kinds,
    pub(super) prefer_writers: bool,
    pub(super) lease: Option<Duration>,
    pub(super) renewed_lease: Option<Duration>,
    /// `None` asks once.
    pub(super) wait: Option<Duration>,
    pub(super) max_waiters: Option<usize>,
    pub(super) max_hold: Option<Duration>,
    pub(super) min_hold: Option<Duration>,
    /// As the kind has it, unless said otherwise.
    pub(super) skipped: Option<Arc<[Method]>>,
    pub(super) busy: StatusCode,
    pub(super) render: Option<Arc<Render>>,
    pub(super) fail_open: bool,
    pub(super) on_lost: OnLost,
    pub(super) until_body: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            kinds: Kinds::All(Kind::Lock),
            prefer_writers: false,
            lease: None,
            renewed_lease: None,
            wait: Some(DEFAULT_WAIT),
            max_waiters: None,
            max_hold: None,
            min_hold: None,
            skipped: None,
            busy: StatusCode::LOCKED,
            render: None,
            fail_open: false,
            on_lost: OnLost::Stop,
            until_body: false,
        }
    }
}

impl Settings {
    pub(super) fn skips(&self, method: &Method) -> bool {
        match (&self.skipped, self.kinds) {
            (Some(skipped), _) => skipped.contains(method),
            (None, Kinds::ReadWrite) => method == Method::OPTIONS,
            (None, Kinds::All(_)) => [Method::OPTIONS, Method::HEAD].contains(method),
        }
    }

    pub(super) fn waits(&self) -> bool {
        self.wait.is_some()
    }

    /// The locks of a request.
    pub(super) fn lock(&self, client: &LockClient, method: &Method, keys: Vec<LockKey>) -> MultiLock {
        let kind = match self.kinds {
            Kinds::All(kind) => kind,
            Kinds::ReadWrite if method.is_safe() => Kind::Read,
            Kinds::ReadWrite => Kind::Write,
        };
        let mut lock = client.multi(keys).kind(kind);
        if self.prefer_writers {
            lock = lock.prefer_writers();
        }
        if let Some(lease) = self.renewed_lease {
            lock = lock.renewed_lease(lease);
        }
        if let Some(lease) = self.lease {
            lock = lock.lease(lease);
        }
        if let Some(wait) = self.wait {
            lock = lock.wait(wait);
        }
        if let Some(max_waiters) = self.max_waiters {
            lock = lock.max_waiters(max_waiters);
        }
        if let Some(max_hold) = self.max_hold {
            lock = lock.max_hold(max_hold);
        }
        if let Some(min_hold) = self.min_hold {
            lock = lock.min_hold(min_hold);
        }
        lock
    }

    /// See [`LockLayer::check`](crate::LockLayer::check).
    pub(super) fn check(&self, client: &LockClient) -> Result<(), InvalidOptions> {
        let lock = self.lock(client, &Method::GET, vec!["check".into()]);
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
        let remaining = match &error {
            dlock::Error::NotAcquired { remaining, .. } => *remaining,
            _ => None,
        };
        let rejection = Rejection::from(error);
        match remaining {
            // A renewed lock may come free at any time, a fixed one (and the holder's is like ours) only
            // runs out.
            Some(left) if self.lease.is_some() => rejection.with_retry_after(left),
            _ => rejection,
        }
    }

    /// The layer's own response.
    pub(super) fn respond(&self, rejection: Rejection, asker: &Asker) -> Response<AnswerBody> {
        rejection.log();
        let rejection = match rejection.reason() {
            Reason::Busy => rejection.with_status(self.busy),
            _ => rejection,
        };
        asker.answer(rejection, self.render.as_deref())
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("kinds", &self.kinds)
            .field("prefer_writers", &self.prefer_writers)
            .field("lease", &self.lease)
            .field("renewed_lease", &self.renewed_lease)
            .field("wait", &self.wait)
            .field("max_waiters", &self.max_waiters)
            .field("max_hold", &self.max_hold)
            .field("min_hold", &self.min_hold)
            .field("skipped", &self.skipped)
            .field("busy", &self.busy)
            .field("fail_open", &self.fail_open)
            .field("on_lost", &self.on_lost)
            .field("until_body", &self.until_body)
            .finish_non_exhaustive()
    }
}
