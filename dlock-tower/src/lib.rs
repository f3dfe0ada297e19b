//! Tower layers of [dlock](dlock): **a lock per request**, and **requests that run once** however often they
//! are sent, for axum, tonic, hyper and any other Tower service over [`http::Request`].
//!
//! | | for |
//! |---|---|
//! | [`LockLayer`] | handlers that must not run at the same time for one account, order, seat; this page |
//! | [`IdempotencyLayer`] | clients that send a request again because they got no answer; see [`idempotency`] |
//! | [`task::TaskLockLayer`] | workers, consumers and RPC, whose requests are no HTTP requests; see [`task`] |
//! | [`retry::RetryLayer`] | those clients: a key for each operation, kept over its retries; see [`retry`] |
//!
//! # A lock per request
//!
//! With a [`LockLayer`] around it a handler runs once at a time *per key* across all processes of a service: two
//! withdrawals from one account wait for each other, those from two accounts do not. The lock is released when the
//! handler has answered, failed or panicked, and when the client goes away; after a crash it soon becomes available.
//!
#![cfg_attr(feature = "axum", doc = "```")]
#![cfg_attr(not(feature = "axum"), doc = "```ignore")]
//! use axum::{Router, routing::post};
//! use dlock_tower::{HeldLock, LockLayer, key::path_param};
//!
//! async fn withdraw(HeldLock(held): HeldLock) -> String {
//!     format!("done under fencing token {}", held.fencing_token())
//! }
//!
//! # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # async fn ctrl_c() {}
//! let client = dlock::LockClient::connect("memory://").await?; // or redis://localhost
//! let app = Router::new()
//!     .route("/accounts/{id}/withdraw", post(withdraw))
//!     .layer(LockLayer::new(client.clone(), path_param("id").parsed::<u64>().prefix("account:")));
//! # use tower::ServiceExt;
//! # let request = http::Request::post("/accounts/7/withdraw").body(axum::body::Body::empty())?;
//! # assert_eq!(app.clone().oneshot(request).await?.status(), 200);
//!
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
//! axum::serve(listener, app).with_graceful_shutdown(ctrl_c()).await?;
//! client.shutdown(std::time::Duration::from_secs(5)).await;
//! # Ok(()) }
//! ```
//!
//! # Which key
//!
//! [`key`] has the ways to name what a request locks: a path parameter, a header, a query parameter, a field of the
//! JSON body, method and path, an [extension](key::extension()) such as the user of an authentication, several
//! together, or a closure over the request's head. Prefix the key with what it names, and give it the
//! [type](key::Key::parsed) that the handler reads: otherwise `7` and `007` are two locks and one account. A request
//! that is about several things locks [each of them](key::each_of), all or nothing: a transfer from one account to
//! another. A request without a key is answered with 400, or passes without a lock, as you say; one whose key no lock
//! can have is answered with 400.
//!
//! # Shared locks
//!
//! By default the requests of a key run one at a time, whatever they do. With
//! [`read_write`](LockLayer::read_write) those that only read (`GET`, `HEAD`) run side by side, and those that
//! write run alone:
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
//! # let client = dlock::LockClient::memory();
//! use dlock_tower::{LockLayer, key};
//!
//! let documents = LockLayer::new(client, key::header("x-document").prefix("document:")).read_write()?;
//! # let _ = documents; Ok(()) }
//! ```
//!
//! [`kind`](LockLayer::kind) has the other kinds of locks. Both refuse a kind that the client's store does not have, so a
//! service with such a layer does not start.
//!
//! # What happens when
//!
//! 1. Methods that are [skipped](LockLayer::skip_methods) (`OPTIONS` and, unless it shares, `HEAD`) pass without
//!    a lock.
//! 2. The key is taken from the request. For [`json_field`](key::json_field) this reads the body, before
//!    anything is locked.
//! 3. The request's body is read to its end, at most [2 MiB](LockLayer::body_limit) within
//!    [30 s](LockLayer::body_timeout), so that a client that sends slowly holds no lock. The handler gets it again
//!    byte for byte, with its trailers. A request without a body costs nothing. With
//!    [`streaming`](LockLayer::streaming) the handler reads the body under the lock: gRPC methods whose client
//!    streams, and uploads larger than memory, need that. The body of a `CONNECT` request is never read.
//! 4. The lock is acquired. The request waits for it up to 5 s ([`wait`](LockLayer::wait)), or not at all
//!    ([`try_once`](LockLayer::try_once)); when the client goes away, the wait ends. A waiting request keeps
//!    no place in the services inside: the layer is always ready, and those are asked only once the lock is
//!    held.
//! 5. The handler runs. It finds a [`Held`](dlock::Held) in the request's extensions (in axum: `HeldLock`),
//!    with the fencing token to send along with its writes. It runs in the frame of the lock, so
//!    `#[distributed_lock]` and other layers of the same key and kind further in re-enter instead of waiting. One of another
//!    kind fails with [`WouldDeadlock`](dlock::Error::WouldDeadlock), except a read lock inside the write lock.
//! 6. **The handler has answered**: the lock is released, then the answer goes out. That costs a round trip
//!    to the store, and the receiver of the answer finds the lock free, in every process. When the store does
//!    not answer, the response waits for it for the client's `retry_for` (3 s) and goes out all the same;
//!    the lease ends the lock. With [`until_body`](LockLayer::until_body) the lock is released just before
//!    the last bytes of the body are sent.
//! 7. **The handler fails or panics, or the client goes away**: what is left of the handler is dropped
//!    first, and then the lock is released. Work that goes on without the client keeps the lock: a handler
//!    under an [idempotency key](idempotency), whichever of the two layers stands outside, and what a
//!    handler spawns with [`RequestLocks`](lock::RequestLocks). A closure of `spawn_blocking` cannot be dropped: without
//!    [`RequestLocks::keep`](lock::RequestLocks::keep) it runs on without the lock.
//! 8. **The lock is lost while the handler runs**, because the store was cut off for the length of the
//!    lease, or because a fixed lease or `max_hold` is over: the handler is dropped and the answer is 503,
//!    *without* [`NotStarted`]. With [`OnLost::RunOn`] it runs to its end, and sees the loss. Both hold for a
//!    handler whose client is gone, too.
//!
//! # What clients are told
//!
//! The layer's own answers are `application/problem+json` (RFC 9457) with a stable `type`.
//!
//! | `type` | status | gRPC | it means | a client should |
//! |---|---|---|---|---|
//! | `urn:dlock:problem:busy` | 423, or [as chosen](LockLayer::busy_status) | `ABORTED` | another holder kept the lock for longer than the wait | try again after `Retry-After`: 1 s, or the remaining time of a fixed lease |
//! | `urn:dlock:problem:too-many-waiters` | 503 | `UNAVAILABLE` | [`max_waiters`](LockLayer::max_waiters) others wait for it already | try again after `Retry-After`, with growing pauses |
//! | `urn:dlock:problem:draining` | 503 | `UNAVAILABLE` | the process is about to end and begins nothing new | the same, at another process |
//! | `urn:dlock:problem:unavailable` | 503 | `UNAVAILABLE` | the lock store does not answer, or the service shuts down | the same |
//! | `urn:dlock:problem:lost` | 503 | `UNKNOWN` | the lock was lost while the handler ran; the request may have had effects | find out what happened before trying again, or use an idempotency key |
//! | `urn:dlock:problem:invalid-key` | 400 | `INVALID_ARGUMENT` | the request names nothing that can be locked | correct the request |
//! | `urn:dlock:problem:content-too-large` | 413 | `RESOURCE_EXHAUSTED` | the body is larger than what is read before the handler | send less |
//! | `urn:dlock:problem:body-timeout` | 408 | `DEADLINE_EXCEEDED` | the body did not arrive in time | try again |
//! | `urn:dlock:problem:body-incomplete` | 400 | `INVALID_ARGUMENT` | the body ended before its announced end, or its chunks are malformed | try again |
//! | `urn:dlock:problem:would-deadlock` | 500 | `INTERNAL` | the request is inside a read lock and asked to write, or inside a lock of the same name and another kind: it would wait for itself | report it |
//! | `urn:dlock:problem:internal` | 500 | `INTERNAL` | the layer is set up wrongly; the log says how | report it |
//!
//! (A lock that was lost before the handler began, this layer's or one of the same key further out, is a
//! `…:lost` as well, but with `Retry-After` and [`NotStarted`], and `UNAVAILABLE` for gRPC.)
//!
//! Every answer that was made before the handler ran carries the extension [`NotStarted`], for layers
//! further out. Requests with a content type of gRPC or gRPC-Web get HTTP 200 and a trailers-only
//! response. All of it can be [rendered](LockLayer::render) differently. `Service::Error` is the inner
//! service's own: a service that cannot fail stays so.
//!
//! # Where the layer stands
//!
//! From outside to inside: trace → CORS → rate limit → compression → authentication → idempotency →
//! **lock** → transaction → handler. Unauthenticated requests should not lock anything, and a stored answer that is
//! replayed needs no lock. In axum, put it on the `Router` (`layer`, `route_layer`) or a route, not around
//! the router: path parameters are known only inside.
//!
//! A layer that commits a transaction for each request stands inside the lock layer, so in axum it is added before. Outside, it
//! commits after the lock was released, and the next request reads the data from before the commit. If the locks are in the same
//! PostgreSQL database, [`hold_in`](https://github.com/dlock-rs/dlock/blob/main/docs/postgres.md#the-effect-and-the-lock-commit-together) keeps the
//! lock until the commit.
//!
//! Mind the outer timeouts: a request may take the body's time, the wait and the handler's time together.
//!
//! Layers further out that change the type of the request's body (decompression, a timeout of the body) need
//! a `map_request_body` behind them that boxes it, or [`streaming`](LockLayer::streaming).
//!
//! # When not
//!
//! - **To run a request once** when clients send it again: that takes an [idempotency key](idempotency). A
//!   lock keeps two from running *at a time*, and lets the second one run after the first.
//! - **Where the database can do it**: a unique constraint or `SELECT … FOR UPDATE` needs no second store.
//! - **For many readers** of what never changes: also a lock that [they share](LockLayer::read_write) costs each
//!   of them two round trips to the store. [Skip](LockLayer::skip_methods) `GET` where it may read what is just
//!   being changed.
//! - **As the only protection of what must never happen twice**: a lock can be lost while the handler is
//!   about to write. Send the [fencing token](dlock::Held::fencing_token) along and have the resource
//!   check it.
//! - **Around long streams and web sockets**: by default the lock ends with the answer's head; held
//!   [until the body's end](LockLayer::until_body) it is at the mercy of a client that reads slowly, up to
//!   `max_hold`.
//!
//! # Features
//!
//! `axum`, for axum 0.8: path parameters ([`key::path_param`](key)), `HeldLock`, and the original URI under
//! nested routers; `Idempotency` as an extractor. Without it, keys that are made of the path see only what
//! axum's `nest` left of it.
//!
//! `console`: the locks of all processes for the person on call, to mount in an axum app; see `console`.
//!
//! `tonic`, for tonic 0.14: the layers around a tonic server, whose body can be read ahead then.
//!
//! `once`: `TaskOnceLayer`, for messages that are delivered more than once.
//!
//! `metrics`: what the lock layer and the idempotency layer count, through the facade `metrics` 0.24. It also enables the
//! feature `metrics` of `dlock`.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod body;
#[cfg(feature = "console")]
pub mod console;
mod grpc;
#[cfg(feature = "axum")]
mod held;
pub mod idempotency;
pub mod key;
pub mod lock;
mod not_started;
#[cfg(feature = "metrics")]
mod observed;
mod own_answer;
mod problem;
mod reason;
mod rejection;
mod response;
pub mod retry;
pub mod task;

#[cfg(feature = "axum")]
pub use held::HeldLock;
pub use idempotency::{Idempotency, IdempotencyLayer, IdempotencyService};
pub use lock::{LockLayer, LockService, OnLost};
pub use not_started::NotStarted;
pub use reason::Reason;
pub use rejection::Rejection;
pub use task::{LimitLayer, TaskError, TaskLockLayer};
