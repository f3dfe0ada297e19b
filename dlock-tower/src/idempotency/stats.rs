//! The counters: in total by [`IdempotencyStats`], and through the `metrics` facade with the feature of that name.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident: $metric:literal $(, $label:literal = $value:literal)*;)+) => {
        #[derive(Debug, Default)]
        pub(super) struct Counters {
            $($name: AtomicU64,)+
        }

        impl Counters {
            $(pub(super) fn $name(&self) {
                self.$name.fetch_add(1, Ordering::Relaxed);
                #[cfg(feature = "metrics")]
                crate::observed::observed(|| metrics::counter!($metric $(, $label => $value)*).increment(1));
            })+

            pub(super) fn snapshot(&self) -> IdempotencyStats {
                IdempotencyStats { $($name: self.$name.load(Ordering::Relaxed),)+ }
            }
        }

        /// Counters since the layer was created; all its clones count together.
        ///
        /// ```
        /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
        /// use dlock_tower::IdempotencyLayer;
        /// use dlock_tower::idempotency::caller;
        ///
        /// let client = dlock::LockClient::memory();
        /// let layer = IdempotencyLayer::new(client.records()?, caller::public());
        /// assert_eq!(layer.stats().replayed, 0);
        /// # Ok(()) }
        /// ```
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct IdempotencyStats {
            $(
                $(#[$doc])*
                #[doc = concat!("\n\n`", $metric, "`" $(, "`{", $label, "=\"", $value, "\"}`")*, " in metrics.")]
                pub $name: u64,
            )+
        }
    };
}

counters! {
    /// Requests that claimed their key and ran.
    claimed: "dlock_http_requests_total", "layer" = "idempotency", "outcome" = "ran";
    /// Of those, requests that took over what an earlier attempt had begun.
    taken_over: "dlock_idempotency_taken_over_total";
    /// Of those, requests whose answer said that nothing was started ([`NotStarted`](crate::NotStarted)).
    not_started: "dlock_idempotency_not_started_total";
    /// Requests that were answered by a stored response.
    replayed: "dlock_http_requests_total", "layer" = "idempotency", "outcome" = "replayed";
    /// Requests that were answered by 409 because an equal one was in progress.
    in_progress: "dlock_http_requests_total", "layer" = "idempotency", "outcome" = "conflict";
    /// Requests that were answered by 503 because too many handlers run on without their clients.
    overloaded: "dlock_http_requests_total", "layer" = "idempotency", "outcome" = "rejected";
    /// Requests that used the key of another one.
    mismatched: "dlock_http_requests_total", "layer" = "idempotency", "outcome" = "mismatch";
    /// Requests that were refused, or ran unprotected, because the store could not be reached.
    unavailable: "dlock_http_requests_total", "layer" = "idempotency", "outcome" = "unavailable";
    /// Requests whose record could not be read.
    unreadable: "dlock_http_requests_total", "layer" = "idempotency", "outcome" = "error";
    /// Requests whose client went away, and whose handler or body went on.
    detached: "dlock_idempotency_detached_total";
    /// Owners that found their claim lost: another attempt may have run as well, and nothing was stored.
    lost: "dlock_idempotency_claim_lost_total";
    /// Renewals that failed; each is repeated.
    renewal_failures: "dlock_idempotency_store_failed_total", "step" = "extend";
    /// Results and releases that did not reach the store at once; each is repeated until it does.
    settle_failures: "dlock_idempotency_store_failed_total", "step" = "settle";
    /// Results and releases that were given up: what is stored there cannot be read, the store is closed, too many
    /// releases waited, or the store was away until the lease of a claim without a handler was over.
    abandoned: "dlock_idempotency_abandoned_total";
    /// Results that are not kept, only their existence: too large, streams, broken off, or refused by the store.
    tombstones: "dlock_idempotency_tombstones_total";
}
