//! What handlers can learn about their claim.

use std::fmt;
use std::sync::Arc;

use dlock::record::{ClaimToken, RecordKey};

use super::claim::Claim;
use super::policy::Outcome;

/// The claim of a running handler, in the extensions of its request; also an extractor in axum.
///
/// ```
/// use dlock_tower::idempotency::Idempotency;
///
/// async fn charge(idempotency: Idempotency) -> String {
///     if idempotency.attempt() > 1 {
///         // An earlier attempt was begun and did not end: ask the bank by this key what became of it.
///     }
///     format!("charged {} under fence {}", idempotency.key(), idempotency.fence())
/// }
/// # let _ = charge;
/// ```
///
/// If the handler runs without a claim, the extractor answers with 500 and an error in the log. Take an
/// `Option<Idempotency>` if keys are optional, or if the layer is set to
/// [`fail_open`](super::IdempotencyLayer::fail_open): while the store is down there is no claim.
#[derive(Clone)]
pub struct Idempotency {
    pub(super) claim: Arc<Claim>,
}

/// In the extensions of a request that runs without a claim because the store is down.
#[derive(Debug, Clone, Copy)]
pub(super) struct FailedOpen;

impl Idempotency {
    /// Returns the key, as the client sent it. It is unique for this caller, method and path only: see
    /// [`record_key`](Self::record_key).
    #[must_use]
    pub fn key(&self) -> &str {
        &self.claim.key
    }

    /// Returns the name of the record: a hash of namespace, host (if [keys are of one](super::IdempotencyLayer::per_host)), caller, method, path or route, and
    /// key. It can be sent to other services as
    /// *their* idempotency key.
    #[must_use]
    pub fn record_key(&self) -> &RecordKey {
        &self.claim.lease.record
    }

    /// Returns the id of the claim in the store; a new one in each attempt.
    #[must_use]
    pub fn claim_token(&self) -> &ClaimToken {
        &self.claim.lease.token
    }

    /// Returns the fencing token: greater than that of every earlier attempt. Send it along with each write, and have
    /// the resource refuse smaller tokens.
    #[must_use]
    pub fn fence(&self) -> u64 {
        self.claim.lease.fence
    }

    /// Returns the number of the attempt: 1 for the first. More after an attempt whose outcome is unknown: its process
    /// crashed or was cut off from the store for longer than the lease, or it ended in an ambiguous way (a 502, a
    /// panic) and the policy retries that.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.claim.lease.attempt
    }

    /// Returns how long the result is kept, unless the policy decides otherwise at its end.
    #[must_use]
    pub fn retention(&self) -> std::time::Duration {
        self.claim.lease.retention()
    }

    /// Declares that all effects of the handler are in one transaction, which ends with the value of
    /// [`in_transaction`](Self::in_transaction), or that there are none. Call it before anything else.
    ///
    /// Then a conflict with another transaction (SQLSTATE 40001, 40P01), a lost connection, or a panic before the
    /// commit releases the key: nothing has happened. An answer that is a result, such as a 409, is kept all the same.
    /// [`in_transaction`](Self::in_transaction) implies this declaration.
    pub fn transactional(&self) {
        self.claim.transaction.declare();
    }

    /// Returns what to store of this response, as the last statement of the handler's own transaction, together with
    /// its effect, so that both exist or neither does (on Postgres with `PostgresClaim::complete_in`).
    ///
    /// From here on the claim is not renewed, and the layer reads the record before it decides anything: a lost reply
    /// to the COMMIT looks like a failure. If the transaction was committed, the layer sends exactly this response (without
    /// [what no server sends](super#what-a-retry-gets)), whatever the handler answers. Otherwise nothing has happened: the key is released if the handler's answer is
    /// [ambiguous](super::Class::Ambiguous) (a 5xx, a panic), and a result (a 409) is kept, unless the store does not answer at that moment. So have no effect outside
    /// the transaction.
    #[must_use = "the layer expects it in the record"]
    pub fn in_transaction(&self, response: http::Response<bytes::Bytes>) -> Vec<u8> {
        self.claim.put_in_transaction(response)
    }

    /// Returns whether it is certain that no other attempt has begun. Ask where the handler has waited, for a lock or another
    /// service, before an effect that must not happen twice: the process may have stood still meanwhile, or have been cut
    /// off from the store, for longer than the lease.
    ///
    /// After [`in_transaction`](Self::in_transaction) the claim is not renewed, and this turns false when its lease is over,
    /// although no other attempt takes it over from the transaction.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.claim.lease.is_held()
    }

    /// Returns whether the claim is known to be lost: another attempt may do the same work. This handler's answer goes
    /// to its caller, and is not kept.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.claim.lease.is_lost()
    }

    /// Declares that the handler's answer, or any other end, is final: it is kept. The last declaration counts; an
    /// [`Outcome`] in the response overrides it.
    pub fn keep(&self) {
        self.claim.stated_outcome.say(Outcome::Final);
    }

    /// Declares that a retry would do nothing twice, however the handler ends: then the key is released.
    pub fn forget(&self) {
        self.claim.stated_outcome.say(Outcome::Retry);
    }
}

impl fmt::Debug for Idempotency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency")
            .field("key", &self.key())
            .field("attempt", &self.attempt())
            .field("fence", &self.fence())
            .finish_non_exhaustive()
    }
}

#[cfg(feature = "axum")]
mod axum_extractor {
    use axum::extract::{FromRequestParts, OptionalFromRequestParts};
    use axum::response::{IntoResponse, Response};
    use http::request::Parts;

    use super::{FailedOpen, Idempotency};
    use crate::Rejection;

    const NO_CLAIM: &str = "a handler takes `Idempotency`, and its request has claimed no key: put an \
                            IdempotencyLayer around it that requires one, or take `Option<Idempotency>`";
    const FAILED_OPEN: &str = "a handler takes `Idempotency`, and its request runs without a claim, because the store is \
                               down and the layer is set to fail_open: take `Option<Idempotency>`";

    impl<S: Send + Sync> FromRequestParts<S> for Idempotency {
        type Rejection = Response;

        async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Idempotency, Response> {
            parts.extensions.get().cloned().ok_or_else(|| {
                let reason = match parts.extensions.get::<FailedOpen>() {
                    Some(FailedOpen) => FAILED_OPEN,
                    None => NO_CLAIM,
                };
                let rejection = Rejection::internal(reason);
                rejection.log();
                rejection.response().map(axum::body::Body::new).into_response()
            })
        }
    }

    impl<S: Send + Sync> OptionalFromRequestParts<S> for Idempotency {
        type Rejection = std::convert::Infallible;

        async fn from_request_parts(
            parts: &mut Parts,
            _: &S,
        ) -> Result<Option<Idempotency>, Self::Rejection> {
            Ok(parts.extensions.get().cloned())
        }
    }
}
