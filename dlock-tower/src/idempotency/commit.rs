//! Handlers that store their result in their own transaction, together with its effect.
//!
//! Then the state of the transaction counts, not how the handler ended: a lost reply to its COMMIT looks like a
//! failure. So the record is read before anything is decided.

use std::time::Duration;

use bytes::Bytes;
use dlock::__chance as chance;
use dlock::record::ClaimState;
use dlock::store::{Reason, StoreError};
use http::Response;
use tokio::time::{sleep, timeout};

use super::body::ResponseBody;
use super::capture::announced;
use super::claim::Claim;
use super::headers::has_no_body;
use super::owned::Owned;
use super::policy::Ending;
use super::settlement::Settlement;
use super::stored::{Kept, Stamp, Stored};
use super::transaction::Put;
use crate::own_answer::AnswerContext;
use crate::problem::Problem;

impl Claim {
    /// Returns what to store of the response; from now on the record decides the claim.
    pub(super) fn put_in_transaction(&self, response: Response<Bytes>) -> Vec<u8> {
        let response = as_sent(response);
        let stored = self.to_store(&response);
        self.transaction.put(response);
        // The transaction now holds the record.
        self.core.shared.renewals.stop(&self.lease);
        stored.encode(Stamp::now(self.lease.retention()))
    }

    fn to_store(&self, response: &Response<Bytes>) -> Stored {
        if response.body().len() > self.core.settings.response_limit {
            return Stored::Unavailable;
        }
        let kept = &self.core.settings.kept_headers;
        Stored::Response(Box::new(Kept {
            status: response.status(),
            headers: kept.of(response.status(), response.headers()),
            body: vec![response.body().clone()],
            trailers: None,
            stamp: None,
        }))
    }

    /// Returns the response of the committed transaction. A handler that did not learn of its COMMIT may have put
    /// another response into a second transaction, which then found the record completed: the stored one counts.
    fn committed<R>(
        &self,
        put: Put,
        stored: Vec<u8>,
        answer_context: &AnswerContext,
    ) -> Response<ResponseBody<R>> {
        let last = self.to_store(&put.response);
        let stored = Stored::decode(stored);
        // All responses that are too long are stored in the same way.
        let is_last = matches!(&stored, Ok(stored) if stored.is_of(&last))
            && !(put.again && last == Stored::Unavailable);
        if is_last {
            let response = Response::clone(&put.response);
            let status = response.status();
            return response.map(|body| ResponseBody::stored(status, vec![body], None));
        }
        let problem = match stored {
            Ok(Stored::Response(kept)) => {
                let Kept {
                    status,
                    headers,
                    body,
                    trailers,
                    stamp: _,
                } = *kept;
                let mut response = Response::new(ResponseBody::stored(status, body, trailers));
                *response.status_mut() = status;
                *response.headers_mut() = headers;
                return response;
            }
            Ok(Stored::Unavailable) => Problem::ResultUnavailable.rejection(),
            Ok(Stored::Failed) => Problem::Failed.rejection(),
            Err(why) => {
                let log = format!("record {} cannot be read: {why}", self.lease.record.as_str());
                Problem::ResultUnavailable.rejection().with_log(log)
            }
        };
        let answer = self.core.settings.respond(problem, answer_context);
        answer.map(ResponseBody::answer)
    }

    async fn read(&self) -> Result<ClaimState, StoreError> {
        let step = self
            .core
            .shared
            .records
            .read(&self.lease.record, &self.lease.token);
        timeout(self.settle_wait(), step)
            .await
            .unwrap_or_else(|_| Err(StoreError::unknown("the store does not answer")))
    }
}

/// Returns the response without bytes that no server sends: of a status without a body, or more than are announced.
fn as_sent(mut response: Response<Bytes>) -> Response<Bytes> {
    let sent = match has_no_body(response.status()) {
        true => Some(0),
        false => announced(response.headers()),
    };
    if let Some(sent) = sent {
        response.body_mut().truncate(sent);
    }
    response
}

/// The outcome of the transaction of a handler that has answered.
#[allow(clippy::large_enum_variant, reason = "it is taken apart at once")]
pub(super) enum Ended<R> {
    /// It was committed with this response.
    Committed(Response<ResponseBody<R>>),
    /// It was not committed, or there was none: the handler's answer counts.
    Open {
        claim: Owned,
        /// Whether there was one, without any effect.
        rolled_back: bool,
    },
    /// Not known yet.
    Unknown(Owned),
}

impl Owned {
    /// Reads the record, if there was a transaction.
    pub(super) async fn end_transaction<R>(self, answer_context: &AnswerContext) -> Ended<R> {
        let open = |claim: Owned, rolled_back| Ended::Open { claim, rolled_back };
        let Some(put) = self.transaction.response() else {
            let rolled_back = self.transaction.is_declared();
            return open(self, rolled_back);
        };
        match self.read().await {
            Ok(ClaimState::Completed { response }) => {
                self.settle_by_transaction(&response);
                Ended::Committed(self.committed(put, response, answer_context))
            }
            Ok(ClaimState::Lost) => {
                self.lease.lose();
                open(self, false)
            }
            Ok(ClaimState::Open) => {
                self.renew_again();
                open(self, true)
            }
            Err(error) if !matches!(error.reason, Reason::Unsupported) => {
                self.core.shared.counters.settle_failures();
                Ended::Unknown(self)
            }
            Err(error) => {
                tracing::error!(%error, "a handler has put its response into a transaction of another store");
                self.renew_again();
                open(self, false)
            }
            Ok(_) => {
                self.renew_again();
                open(self, false)
            }
        }
    }

    /// Renews the claim from now on: no transaction has it any more, and the body of the response may take long.
    fn renew_again(&self) {
        self.core.shared.renewals.start(&self.lease);
    }

    /// Reads the record until the outcome of the transaction is known. If it was not committed, does `rolled_back`
    /// instead, and `otherwise` if the record cannot tell.
    pub(super) async fn settle_by_record(self, otherwise: Settlement, rolled_back: Settlement) {
        const LONGEST: Duration = Duration::from_secs(5);
        let mut pause = Duration::from_millis(50);
        self.renew_again();
        loop {
            let turn = self.core.shared.repeats.acquire().await;
            let state = self.read().await;
            drop(turn);
            match state {
                Ok(ClaimState::Completed { response }) => return self.settle_by_transaction(&response),
                Ok(ClaimState::Lost) => return self.lease.lose(),
                Ok(ClaimState::Open) => return self.settle(rolled_back).await,
                Err(error) if !matches!(error.reason, Reason::Unsupported | Reason::Closed) => {
                    self.core.shared.counters.settle_failures();
                }
                _ => return self.settle(otherwise).await,
            }
            sleep(chance::jittered(pause)).await;
            pause = (pause * 2).min(LONGEST);
        }
    }

    /// Settles in the background, by the record first if there was a transaction.
    pub(super) async fn settle_after_failure(self, ending: Ending<'static>) {
        let otherwise = self.verdict_on_failure(&ending, false);
        let rolled_back = self.verdict_on_failure(&ending, true);
        if self.transaction.has_response() {
            self.settle_by_record(otherwise, rolled_back).await;
        } else if self.transaction.is_declared() {
            self.settle(rolled_back).await;
        } else {
            self.settle(otherwise).await;
        }
    }
}
