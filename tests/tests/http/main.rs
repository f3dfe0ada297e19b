//! What stands before handlers: the layers of dlock-tower, and where they keep the records of requests.

mod console_http;
mod idempotency_bodies;
mod idempotency_client;
mod idempotency_gone;
mod idempotency_grpc;
mod idempotency_http;
mod idempotency_keys;
mod idempotency_limits;
mod idempotency_operators;
mod idempotency_outcomes;
mod idempotency_progress;
mod idempotency_released;
mod idempotency_store;
mod idempotency_support;
mod idempotency_transaction;
mod tower_axum;
mod tower_body;
mod tower_detached;
mod tower_http_layers;
mod tower_keys;
mod tower_kinds;
mod tower_lock;
mod tower_support;
mod tower_task;
