//! What handlers are told of the claim that they work under.

use std::fmt;
use std::sync::Arc;

use dlock::record::{ClaimToken, RecordKey};

use super::Outcome;
use super::claim::Claim;

/// The claim that a handler works under, in the extensions of its request; in axum an extractor too.
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
/// As an extractor it is answered with 500 and an error in the log where the handler runs without a claim;
/// take an `Option<Idempotency>` where keys are optional.
#[derive(Clone)]
pub struct Idempotency {
    pub(super) claim: Arc<Claim>,
}

impl Idempotency {
    /// The key, as the client gave it. It is unique for this caller, method and route only: see
    /// [`record_key`](Self::record_key).
    #[must_use]
    pub fn key(&self) -> &str {
        &self.claim.key
    }

    /// The name of the record: a hash of caller, method, route and key. Fit to be sent along to other
    /// services as *their* idempotency key.
    #[must_use]
    pub fn record_key(&self) -> &RecordKey {
        &self.claim.record
    }

    /// What the claim is known by in the store; another one in each attempt.
    #[must_use]
    pub fn claim_token(&self) -> &ClaimToken {
        &self.claim.token
    }

    /// A fencing token: greater than that of every earlier attempt. Send it along with what is written, and
    /// have the resource refuse lesser ones.
    #[must_use]
    pub fn fence(&self) -> u64 {
        self.claim.fence
    }

    /// 1 for the first time. More after an attempt that was begun and whose end nobody knows: its process
    /// crashed, or was cut off from the store for longer than the lease.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.claim.attempt
    }

    /// How long the result is to be kept.
    #[must_use]
    pub fn retention(&self) -> std::time::Duration {
        self.claim.core.settings.retention
    }

    /// For a handler that stores its result in a transaction of its own, together with its effect, so that
    /// both are there or neither is (on Postgres by `PostgresClaim::complete_in`): what is to be stored of
    /// this response, as the last statement of the transaction.
    ///
    /// From here on the claim is not renewed, and the layer reads the record before it decides anything: a
    /// lost reply to the COMMIT looks like a failure. If the transaction was committed, the layer sends
    /// exactly this response, whatever the handler answers; otherwise the handler's answer counts.
    #[must_use = "the layer expects it in the record"]
    pub fn in_transaction(&self, response: http::Response<bytes::Bytes>) -> Vec<u8> {
        self.claim.put_in_transaction(response)
    }

    /// Whether the claim is known to be lost: somebody else may be at the same work. What this handler
    /// answers goes to its caller, and is not kept.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.claim.is_lost()
    }

    /// Says that what the handler answers, or however it ends, is final: it is kept. The last word said
    /// counts; an [`Outcome`] in the response goes before it.
    pub fn keep(&self) {
        self.claim.word.say(Outcome::Final);
    }

    /// Says that it is worth a retry, however the handler ends: the key is released then.
    pub fn forget(&self) {
        self.claim.word.say(Outcome::Retry);
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

    use super::Idempotency;
    use crate::Rejection;

    impl<S: Send + Sync> FromRequestParts<S> for Idempotency {
        type Rejection = Response;

        async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Idempotency, Response> {
            parts.extensions.get().cloned().ok_or_else(|| {
                let rejection = Rejection::internal(
                    "a handler takes `Idempotency`, and its request has claimed no key: put an \
                     IdempotencyLayer around it that requires one, or take `Option<Idempotency>`",
                );
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
