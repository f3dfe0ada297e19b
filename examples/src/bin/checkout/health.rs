//! Liveness and readiness, for an orchestrator.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use axum::{Json, Router};
use dlock::LockClient;
use serde_json::{Value, json};

/// Whether this copy is about to end.
#[derive(Clone)]
pub(crate) struct Health {
    locks: LockClient,
    leaves: Arc<AtomicBool>,
}

impl Health {
    pub(crate) fn new(locks: LockClient) -> Health {
        Health {
            locks,
            leaves: Arc::default(),
        }
    }

    /// Reports "not ready" from now on, so that load balancers send requests elsewhere.
    pub(crate) fn leaves(&self) {
        self.leaves.store(true, Ordering::Relaxed);
    }

    pub(crate) fn router(&self) -> Router {
        Router::new()
            .route("/live", get(live))
            .route("/ready", get(ready))
            .with_state(self.clone())
    }
}

/// A copy is alive if it answers. What the answer says about the locks is for people.
async fn live(State(health): State<Health>) -> Json<Value> {
    let locks = health.locks.health();
    let millis = |time: std::time::Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    Json(json!({
        "draining": locks.is_draining,
        "last_reply_ms": locks.last_reply.map(millis),
        "held": locks.held,
        "suspect": locks.suspect,
        "least_lease_left_ms": locks.least_lease_left.map(millis),
        "reconnects": locks.reconnects,
    }))
}

/// A copy is ready if it takes requests. Nothing else counts, neither waiting for a lock nor the store of the locks.
async fn ready(State(health): State<Health>) -> (StatusCode, &'static str) {
    match health.leaves.load(Ordering::Relaxed) {
        true => (StatusCode::SERVICE_UNAVAILABLE, "leaving\n"),
        false => (StatusCode::OK, "ready\n"),
    }
}
