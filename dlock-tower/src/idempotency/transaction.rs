//! Handlers that store their result in a transaction of their own, together with its effect.
//!
//! What counts then is not how the handler ended but what became of the transaction: a lost reply to
//! its COMMIT looks like a failure. So the record is read before anything is decided.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use dlock::backend::{BackendError, Reason};
use dlock::record::ClaimState;
use http::{HeaderMap, Response};
use parking_lot::Mutex;
use tokio::time::{sleep, timeout};

use super::body::ResponseBody;
use super::claim::{Claim, Owned, Settlement};
use super::policy::Ending;
use super::replay;
use super::stored::{Kept, Stored};

/// A handler's transaction.
#[derive(Debug, Default)]
pub(super) struct Transaction {
    /// The handler has said that all of its effects are in it.
    declared: AtomicBool,
    /// The response that was put into it.
    response: Mutex<Option<Arc<Response<Bytes>>>>,
}

impl Transaction {
    pub(super) fn declare(&self) {
        self.declared.store(true, Ordering::Relaxed);
    }

    fn is_declared(&self) -> bool {
        self.declared.load(Ordering::Relaxed)
    }

    fn response(&self) -> Option<Arc<Response<Bytes>>> {
        self.response.lock().clone()
    }
}

impl Claim {
    /// What is to be stored of the response; from now on it depends on the record what becomes of the claim.
    pub(super) fn put_in_transaction(&self, response: Response<Bytes>) -> Vec<u8> {
        let headers: HeaderMap = replay::kept(response.headers(), &self.core.settings.kept_headers);
        let stored = if response.body().len() > self.core.settings.response_limit {
            Stored::Unavailable
        } else {
            Stored::Response(Box::new(Kept {
                status: response.status(),
                headers,
                body: vec![response.body().clone()],
                trailers: None,
            }))
        };
        *self.transaction.response.lock() = Some(Arc::new(response));
        // The transaction holds the record now.
        self.core.shared.renewals.stop(self);
        stored.encode()
    }

    async fn read(&self) -> Result<ClaimState, BackendError> {
        let step = self.core.shared.records.read(&self.record, &self.token);
        timeout(self.settle_wait(), step)
            .await
            .unwrap_or_else(|_| Err(BackendError::unknown("the store does not answer")))
    }
}

/// What became of the transaction of a handler that has answered.
#[allow(clippy::large_enum_variant, reason = "it is taken apart at once")]
pub(super) enum Ended<R> {
    /// It was committed: this is the response.
    Committed(Response<ResponseBody<R>>),
    /// It was not, or there was none: the handler's answer counts.
    Open {
        claim: Owned,
        /// There was one, and nothing of it happened.
        rolled_back: bool,
    },
    /// Nobody knows yet.
    Unknown(Owned),
}

impl Owned {
    /// Asks the record, if there was a transaction.
    pub(super) async fn end_transaction<R>(self) -> Ended<R> {
        let open = |claim: Owned, rolled_back| Ended::Open { claim, rolled_back };
        let Some(response) = self.transaction.response() else {
            let rolled_back = self.transaction.is_declared();
            return open(self, rolled_back);
        };
        match self.read().await {
            Ok(ClaimState::Completed { .. }) => {
                self.settle_by_transaction();
                let response = Response::clone(&response);
                Ended::Committed(response.map(|body| ResponseBody::whole(vec![body], None)))
            }
            Ok(ClaimState::Lost) => {
                self.lose();
                open(self, false)
            }
            Ok(ClaimState::Open) => open(self, true),
            Err(error) if !matches!(error.reason, Reason::Unsupported) => {
                self.core.shared.counters.settle_failures();
                Ended::Unknown(self)
            }
            Err(error) => {
                tracing::error!(%error, "a handler has put its response into a transaction of another store");
                open(self, false)
            }
            Ok(_) => open(self, false),
        }
    }

    /// Asks the record until it is known what became of the transaction. If that was not committed, `rolled_back` is
    /// done instead, and `otherwise` if the record cannot tell.
    pub(super) async fn settle_by_record(self, otherwise: Settlement, rolled_back: Settlement) {
        const LONGEST: Duration = Duration::from_secs(5);
        let mut pause = Duration::from_millis(50);
        self.core.shared.renewals.start(&self);
        loop {
            let turn = self.core.shared.repeats.acquire().await;
            let state = self.read().await;
            drop(turn);
            match state {
                Ok(ClaimState::Completed { .. }) => return self.settle_by_transaction(),
                Ok(ClaimState::Lost) => return self.lose(),
                Ok(ClaimState::Open) => return self.settle(rolled_back).await,
                Err(error) if !matches!(error.reason, Reason::Unsupported | Reason::Closed) => {
                    self.core.shared.counters.settle_failures();
                }
                _ => return self.settle(otherwise).await,
            }
            sleep(pause.mul_f64(0.5 + fastrand::f64())).await;
            pause = (pause * 2).min(LONGEST);
        }
    }

    /// Settles in the background, by the record first if there was a transaction.
    pub(super) async fn settle_after_failure(self, ending: Ending<'static>) {
        let otherwise = self.verdict_on_failure(&ending, false);
        let rolled_back = self.verdict_on_failure(&ending, true);
        if self.transaction.response().is_some() {
            self.settle_by_record(otherwise, rolled_back).await;
        } else if self.transaction.is_declared() {
            self.settle(rolled_back).await;
        } else {
            self.settle(otherwise).await;
        }
    }
}
