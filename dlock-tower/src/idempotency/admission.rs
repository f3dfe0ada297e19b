//! From a request with a key to its claim, or to the answer without running the handler.

use std::time::Duration;

use dlock::__chance as chance;
use dlock::__claim::now;
use dlock::record::{ClaimReply, ClaimRequest, ClaimToken, OwnerReply, RecordKey};
use dlock::store::{Outcome, Reason, StoreError, Watch};
use http::{Extensions, Request, Version};
use http_body::Body;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

use super::active::Active;
use super::extract::{FailedOpen, Idempotency};
use super::fingerprint::fingerprint;
use super::key::MAX_KEY_BYTES;
use super::lease::Grant;
use super::owned::Owned;
use super::replay::Replay;
use super::shared::Core;
use super::stored::{Kept, Stored};
use super::undo::undo;
use crate::Rejection;
use crate::body::{BoxError, Buffered, FromBuffered};
use crate::lock::RequestLocks;
use crate::problem::Problem;

/// A request to look up.
pub(super) struct AdmissionRequest<B> {
    pub(super) core: Core,
    /// As the client sent it.
    pub(super) key: String,
    pub(super) record: RecordKey,
    pub(super) request: Request<B>,
}

/// A request that may run.
pub(super) enum Admitted<B> {
    Claimed(Request<B>, Owned),
    /// Without a claim: a layer further out has it, or the store is unavailable and the layer is open.
    Open(Request<B>),
}

/// How a request that does not run is answered.
pub(super) enum Refused {
    Rejected(Rejection),
    Replay(Box<Kept>, Version),
}

impl From<Rejection> for Refused {
    fn from(rejection: Rejection) -> Refused {
        Refused::Rejected(rejection)
    }
}

impl From<Problem> for Refused {
    fn from(problem: Problem) -> Refused {
        Refused::Rejected(problem.rejection())
    }
}

pub(super) async fn admit<B>(request: AdmissionRequest<B>) -> Result<Admitted<B>, Refused>
where
    B: FromBuffered + Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
{
    let AdmissionRequest {
        core,
        key,
        record,
        request,
    } = request;
    if is_claimed_further_out(&core, &record, request.extensions()).await {
        return Ok(Admitted::Open(request));
    }
    let (parts, body) = request.into_parts();
    let body = Buffered::read_within(body, core.settings.body_limit, core.settings.body_timeout).await?;
    body.check_length(&parts.headers)?;
    let retention = core.settings.retention_of(&parts);
    let mut claim = ClaimRequest::new(
        record,
        ClaimToken::new(),
        fingerprint(&core.settings, &parts, body.data()),
        core.settings.lease,
        retention,
    );
    claim.on_orphan = core.settings.on_orphan;
    let mut asking = Asking::new(core.clone(), claim);
    let (attempt, fence) = match asking.decide().await {
        Ok(Decision::Claimed { attempt, fence }) => (attempt, fence),
        Ok(Decision::Replay(kept)) => {
            core.shared.counters.replayed();
            let replay = || Replay::new(&kept, &key, &asking.claim.key, &parts);
            core.settings.tell_replay(replay);
            return Err(Refused::Replay(kept, parts.version));
        }
        Ok(Decision::Refuse(problem)) => return Err(problem.into()),
        Ok(Decision::Open) => {
            let mut request = Request::from_parts(parts, B::from_buffered(body));
            request.extensions_mut().insert(FailedOpen);
            return Ok(Admitted::Open(request));
        }
        Err(rejection) => return Err(rejection.into()),
    };
    // Until the claim has its owner: the body is built by the user's code, which may panic.
    asking.in_doubt = true;
    // At 0 no handler may be detached, so there is none to limit.
    let most = core.settings.max_detached;
    if most > 0 && core.shared.detached.get() >= most {
        core.shared.counters.overloaded();
        asking.take_back().await;
        return Err(Problem::Overloaded.into());
    }
    debug_assert!(key.len() <= MAX_KEY_BYTES, "longer keys were refused");
    let grant = Grant {
        record: asking.claim.key.clone(),
        token: asking.claim.token.clone(),
        attempt,
        fence,
        since: asking.sent,
        retention,
    };
    let locks = parts.extensions.get::<RequestLocks>().cloned();
    let request = Request::from_parts(parts, B::from_buffered(body));
    let claim = Owned::take(core, key, grant, locks.unwrap_or_default());
    asking.in_doubt = false;
    Ok(Admitted::Claimed(request, claim))
}

/// Whether a layer further out has claimed this very record for this request: it must not find itself in progress. A
/// renewal of that claim tells, since another store does not have it.
async fn is_claimed_further_out(core: &Core, record: &RecordKey, request: &Extensions) -> bool {
    let outer = request.get::<Idempotency>().map(|outer| &outer.claim.lease);
    let Some(outer) = outer.filter(|outer| outer.record == *record) else {
        return false;
    };
    let records = &core.shared.records;
    let renewed = records.extend(record, &outer.token, outer.length, outer.retention());
    matches!(renewed.await, Ok(OwnerReply::Done | OwnerReply::Held))
}

enum Decision {
    Claimed { attempt: u32, fence: u64 },
    Replay(Box<Kept>),
    Refuse(Problem),
    Open,
}

/// A request for a claim. Dropped while the outcome is unknown, it is undone.
struct Asking {
    core: Core,
    claim: ClaimRequest,
    /// Taken before the claim was last sent.
    sent: Instant,
    in_doubt: bool,
    /// It may be dropped outside of a runtime.
    runtime: Option<Handle>,
}

impl Asking {
    fn new(core: Core, claim: ClaimRequest) -> Asking {
        Asking {
            core,
            claim,
            sent: now(),
            in_doubt: false,
            runtime: Handle::try_current().ok(),
        }
    }

    /// Asks until there is an answer, which may take as long as the layer waits.
    async fn decide(&mut self) -> Result<Decision, Rejection> {
        let wait = self.core.settings.wait;
        let deadline = Instant::now() + wait.unwrap_or_default();
        let mut watch: Option<(Watch, Active)> = None;
        loop {
            let remaining = match self.ask().await {
                Ok(ClaimReply::InProgress { remaining, .. }) => remaining,
                Ok(reply) => return self.decided(reply),
                Err(error) => return self.failed(&error, watch.is_some()),
            };
            let left = deadline.saturating_duration_since(Instant::now());
            let Core { shared, settings } = &self.core;
            if watch.is_none() && !left.is_zero() {
                let waiter = shared.waiting.try_enter(settings.max_waiters);
                watch = waiter.map(|waiter| (shared.records.watch(&self.claim.key), waiter));
            }
            let Some((watch, _)) = watch.as_mut().filter(|_| !left.is_zero()) else {
                shared.counters.in_progress();
                return Ok(Decision::Refuse(Problem::InProgress));
            };
            // Its notification may be lost, and an owner that crashed sends none.
            let look = remaining
                .min(self.core.settings.lease / 3)
                .max(Duration::from_millis(10));
            tokio::select! {
                biased;
                () = watch.changed() => {}
                () = sleep(look.min(left)) => {}
            }
        }
    }

    /// Releases a claim that was granted but is not needed, so that the key is free when the answer arrives. If that
    /// fails, it continues in the background.
    async fn take_back(mut self) {
        let release = self
            .core
            .shared
            .records
            .release(&self.claim.key, &self.claim.token);
        self.in_doubt = release.await.is_err();
    }

    fn decided(&self, reply: ClaimReply) -> Result<Decision, Rejection> {
        let counters = &self.core.shared.counters;
        Ok(match reply {
            ClaimReply::Claimed { attempt, fence } => Decision::Claimed { attempt, fence },
            ClaimReply::Completed { response } => match Stored::decode(response) {
                Ok(Stored::Response(kept)) => Decision::Replay(kept),
                Ok(Stored::Unavailable) => Decision::Refuse(Problem::ResultUnavailable),
                Ok(Stored::Failed) => Decision::Refuse(Problem::Failed),
                Err(why) => {
                    counters.unreadable();
                    return Err(self.unreadable(&why.to_string()));
                }
            },
            ClaimReply::Mismatch => {
                counters.mismatched();
                Decision::Refuse(Problem::Mismatch)
            }
            ClaimReply::Orphan { .. } => Decision::Refuse(Problem::OutcomeUnknown),
            _ => {
                return Err(Rejection::internal(
                    "the record store answered a claim by something this version does not know",
                ));
            }
        })
    }

    /// What to do when the claim failed; `waited` for an equal request, which was at work a moment ago.
    fn failed(&self, error: &StoreError, waited: bool) -> Result<Decision, Rejection> {
        let Core { shared, settings } = &self.core;
        match &error.reason {
            Reason::KeyTaken(found) => {
                shared.counters.unreadable();
                Err(self.unreadable(&format!("{error} ({found})")))
            }
            Reason::Unsupported => Err(Rejection::internal(format!("records cannot be kept: {error}"))),
            // This one would run beside it.
            reason if waited && settings.fail_open && *reason != Reason::Closed => {
                shared.counters.in_progress();
                Ok(Decision::Refuse(Problem::InProgress))
            }
            reason => {
                shared.counters.unavailable();
                let record = self.claim.key.as_str();
                if settings.fail_open && *reason != Reason::Closed {
                    tracing::warn!(record, %error, "the record store is down: a request runs unprotected");
                    return Ok(Decision::Open);
                }
                let log = format!("record {record} could not be claimed: {error}");
                Err(Problem::Unavailable.rejection().with_log(log))
            }
        }
    }

    fn unreadable(&self, why: &str) -> Rejection {
        let log = format!("record {} cannot be read: {why}", self.claim.key.as_str());
        Problem::Unreadable.rejection().with_log(log)
    }

    /// Asks once, and again if the store was not reached: the same token gets the same answer.
    async fn ask(&mut self) -> Result<ClaimReply, StoreError> {
        let begun = Instant::now();
        let mut pause = Duration::from_millis(20);
        loop {
            let in_doubt = std::mem::replace(&mut self.in_doubt, true);
            self.sent = now();
            let answer = self.core.shared.records.claim(self.claim.clone()).await;
            let error = match answer {
                Ok(reply) => {
                    // The attempt in progress may be that of an earlier request of this one.
                    self.in_doubt = in_doubt && matches!(reply, ClaimReply::InProgress { .. });
                    return Ok(reply);
                }
                Err(error) => error,
            };
            self.in_doubt = in_doubt || error.outcome == Outcome::Unknown;
            let passing = matches!(error.reason, Reason::Unreachable);
            if !passing || begun.elapsed() + pause > self.core.settings.retry_for {
                return Err(error);
            }
            sleep(chance::shortened(pause)).await;
            pause = (pause * 2).min(Duration::from_millis(200));
        }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if self.in_doubt
            && let Some(runtime) = &self.runtime
        {
            undo(&self.core, runtime, &self.claim);
        }
    }
}
