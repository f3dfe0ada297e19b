//! Idempotent endpoints: a request that is sent more than once runs once.
//!
//! A client that got no answer cannot know whether its request was carried out. It sends the request again, under the
//! same `Idempotency-Key`; [`IdempotencyLayer`] makes sure that the handler runs once and that both get the same
//! answer, at the same time or hours apart, in one process or in many. It follows
//! draft-ietf-httpapi-idempotency-key-header-07. Like Stripe it keeps answers with status 500; unlike Stripe it also keeps
//! the refusals of extractors (see [`release_on`](IdempotencyLayer::release_on)), and a key belongs to its path.
//!
#![cfg_attr(feature = "axum", doc = "```")]
#![cfg_attr(not(feature = "axum"), doc = "```ignore")]
//! use axum::{Extension, Router, routing::post};
//! use dlock_tower::{Idempotency, IdempotencyLayer, idempotency::caller};
//! use std::time::Duration;
//!
//! #[derive(Clone)]
//! struct User { id: u64 } // your authentication leaves it in the request
//!
//! async fn charge(claim: Idempotency) -> String {
//!     // Runs once for each key. The name of the record goes along to the bank, as our own key.
//!     format!("charged under {}", claim.record_key().as_str())
//! }
//!
//! # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let client = dlock::LockClient::connect("memory://").await?; // or redis://localhost
//! let layer = IdempotencyLayer::new(client.records()?, caller::extension(|user: &User| user.id))
//!     .required()
//!     .wait(Duration::from_secs(5));
//! layer.check()?;
//! let app = Router::new()
//!     .route("/accounts/{id}/charge", post(charge))
//!     .layer(layer.clone())
//!     .layer(Extension(User { id: 1 }));
//! # use tower::ServiceExt;
//! # let ask = || http::Request::post("/accounts/7/charge").header("idempotency-key", "\"a-1\"").body(axum::body::Body::empty());
//! # let first = app.clone().oneshot(ask()?).await?;
//! # assert_eq!(first.status(), 200);
//! # let again = app.clone().oneshot(ask()?).await?;
//! # assert_eq!(again.headers()["idempotent-replayed"], "true");
//!
//! // ... serve it; and when the server has ended:
//! layer.handle().shutdown(Duration::from_secs(10)).await;
//! client.shutdown(Duration::from_secs(5)).await;
//! # Ok(()) }
//! ```
//!
//! # What happens when
//!
//! 1. **Requests that do not apply pass untouched**: other methods than `POST` and `PATCH`
//!    ([`methods`](IdempotencyLayer::methods)), those without a key (unless one is
//!    [`required`](IdempotencyLayer::required)), and gRPC calls (unless
//!    [`grpc_unary`](IdempotencyLayer::grpc_unary)).
//! 2. **The key** is a structured-field string (`Idempotency-Key: "abc"`) or bare (`abc`), which are the same
//!    key, of 1 to 255 bytes. An empty, repeated or malformed one is refused before anything is touched.
//!    Parameters of the string are passed over.
//! 3. **The record** is that of the caller ([`caller`]), the method, the path as it was sent and the key: equal keys of
//!    two users, or on two paths, have nothing to do with each other, and no change of the router changes a key.
//!    [`route`](IdempotencyLayer::route) takes something else for the path, and
//!    [`per_host`](IdempotencyLayer::per_host) adds the host.
//! 4. **The body is read**, up to [`body_limit`](IdempotencyLayer::body_limit), and a fingerprint made of
//!    method, path, query, content type and encoding, preconditions and ranges (`If-Match`, `Range` and their kin)
//!    and the body's bytes. A body shorter than its `Content-Length` is refused, and so is one that takes longer than
//!    [`body_timeout`](IdempotencyLayer::body_timeout).
//! 5. **The key is claimed**: one step on the store, which also tells what was done before. A result is sent
//!    again; another fingerprint is refused; an equal request that is in progress is told so, or waited for
//!    ([`wait`](IdempotencyLayer::wait)).
//! 6. **The handler runs**, with an [`Idempotency`] in the extensions of its request. Its claim is renewed
//!    for as long as it takes. **When the client goes away it runs on**, in a task, with its locks, lock frames, its
//!    tracing span and the client of [`dlock::with_default`] around it, but no other task-local: that is the very case
//!    that the key is there for. What is started by the handler and reads the connection ends as ever. Limits further
//!    out count no such handler, so the layer has one of its own ([`max_detached`](IdempotencyLayer::max_detached)).
//! 7. **What came of it is stored**, in one step, before the first byte of the answer goes out; or the key is
//!    released. A body that is not there at once goes out as it comes, and is stored with its end; if the
//!    client does not wait for that, a task does, for a while ([`read_on`](IdempotencyLayer::read_on)): a body
//!    without an end ends soon after its client. A client that neither reads nor closes its connection delays that.
//!
//! # What is a result
//!
//! | the handler's answer | the key |
//! |---|---|
//! | anything with [`NotStarted`](crate::NotStarted) for this request | is released: a retry runs |
//! | 2xx, 3xx, 4xx (a 401, 409 or 423 of the handler too) | is kept: a retry gets the same |
//! | 5xx, 408, 425, 429, a 4xx with `Retry-After`, an error of the service, a panic | is ambiguous: kept ([`KeepAmbiguous`], the default), or left to the next attempt ([`RetryAmbiguous`]) |
//! | an ambiguous one, after all effects were [in a transaction](#in-the-handlers-own-transaction) that was rolled back | is released |
//!
//! **No status releases a key by itself.** A handler may refuse after its effect, and an inner timeout answers 408 after
//! the handler began. What does is the word that this request was not begun:
//!
//! - A [`LockLayer`](crate::LockLayer) inside that does not get its lock says so, also one that is stopped while it waits;
//!   and so does a layer of this kind that finds an equal request in progress. A lock layer that has its lock, and waits for the
//!   service inside, has not let the request in: if the lock is lost or that service fails meanwhile, the key is released. Where a layer in between sends the request
//!   more than once, that does not count once the lock layer has let one of them in.
//! - So does the [`dlock::Error`] of a `#[distributed_lock]` *on the handler* that is answered as it is (feature `axum`
//!   of `dlock`): its body did not begin. Once a locked body has begun, errors of other locks say nothing any more, nor
//!   do those of functions that cannot be a handler (with a reference, a number or `self` among their arguments). A
//!   handler without a lock that calls a locked function *after an effect* must not answer with its error as it is:
//!   put [`Outcome::Final`] beside it.
//! - A handler or layer of your own puts a [`NotStarted`](crate::NotStarted) into its response, or
//!   [`Outcome::Retry`]. One that passes on the answer of another router removes that answer's [`Outcome`] first. A bare
//!   503 of an inner load-shed or a 429 of an inner rate limit is ambiguous without a mark.
//!
//! In gRPC `CANCELLED`, `UNKNOWN`, `DEADLINE_EXCEEDED`, `RESOURCE_EXHAUSTED`, `ABORTED`, `UNIMPLEMENTED`, `INTERNAL`,
//! `UNAVAILABLE` and `DATA_LOSS` are ambiguous. A handler decides otherwise by an [`Outcome`] in its response, or by
//! [`Idempotency::keep`] and [`forget`](Idempotency::forget); [`release_on`](IdempotencyLayer::release_on) names statuses
//! that release; and the whole is a [`Policy`] that can be replaced.
//!
//! # What a retry gets
//!
//! The same status, the same bytes, the same trailers, and those of the headers that are in [`KEPT_HEADERS`]
//! or added by [`keep_header`](IdempotencyLayer::keep_header) or [`keep_all_headers`](IdempotencyLayer::keep_all_headers),
//! and `Retry-After` of a 2xx or 3xx; with `Idempotent-Replayed: true`, its age and for how long
//! it is kept (`Idempotent-Replayed-Age`, `Idempotent-Replayed-Expires-In`, in seconds), and `Cache-Control: no-store`. Never `Set-Cookie`, `Date`, `Content-Length`, hop-by-hop, CORS or request-id
//! headers of the first exchange. A response larger than
//! [`response_limit`](IdempotencyLayer::response_limit), an event stream or an upgrade reaches the first
//! caller whole; of it is kept only that there was one, stored before the first byte past the limit goes
//! out (before the head of event streams and upgrades), and so it is of a stream that breaks.
//!
//! What no server sends is not kept, nor sent to the first caller: a body of a 1xx, 204 or 304, of which nothing is read,
//! and the bytes of a body that come after its announced `Content-Length`.
//!
//! # What clients are told
//!
//! The layer's own answers are `application/problem+json` (RFC 9457) with a stable `type` and a member
//! `retryable`. They never tell what differed, nor anything of another caller.
//!
//! | `type` `urn:dlock:problem:…` | status | gRPC | it means | a client should |
//! |---|---|---|---|---|
//! | `idempotency-key-missing` | 400 | `INVALID_ARGUMENT` | the endpoint takes requests with a key only | draw a key for the operation and send it along |
//! | `idempotency-key-invalid` | 400 | `INVALID_ARGUMENT` | the key is empty, longer than 255 bytes, malformed or given twice | correct it; a UUID will do |
//! | `idempotency-no-caller` | 401 | `UNAUTHENTICATED` | the caller of the request is not known | authenticate |
//! | `content-too-large` | 413 | `RESOURCE_EXHAUSTED` | the body is over the limit; nothing was claimed | send less |
//! | `body-timeout` | 408 | `DEADLINE_EXCEEDED` | the body did not arrive in time ([`body_timeout`](IdempotencyLayer::body_timeout)); nothing was claimed | try again |
//! | `body-incomplete` | 400 | `INVALID_ARGUMENT` | the body ended before its announced end, or its chunks are malformed; nothing was claimed | try again |
//! | `idempotency-mismatch` | 422 | `INVALID_ARGUMENT` | the key was used for another request | use a new key for a new operation; send a retry exactly as the first time |
//! | `idempotency-in-progress` | 409 | `ABORTED` | an equal request is at work | **try again** after `Retry-After`, with the same key |
//! | `idempotency-outcome-unknown` | 409 | `FAILED_PRECONDITION` | an equal request was begun and its end is not known ([`on_orphan`](IdempotencyLayer::on_orphan)) | look up what became of the operation; not send it under another key before that |
//! | `idempotency-result-unavailable` | 409 | `FAILED_PRECONDITION` | it was carried out; the response was too large to be kept, a stream, or broke off, or the store had no room for it | look up the result elsewhere |
//! | `idempotency-failed` | 500 | `UNKNOWN` | it was begun and failed without a response; it may have had effects | look up what became of it |
//! | `idempotency-unavailable` | 503 | `UNAVAILABLE` | the store does not answer; nothing was done for this request | **try again** after `Retry-After`, with the same key and growing pauses |
//! | `idempotency-overloaded` | 503 | `UNAVAILABLE` | too many handlers run on whose clients went away ([`max_detached`](IdempotencyLayer::max_detached)); nothing was done for this request | **try again** after `Retry-After`, with the same key and growing pauses |
//! | `idempotency-unreadable` | 503 | `UNAVAILABLE` | the record was written by a newer version of the service, or is damaged; nothing was done for this request | **try again** later with the same key; report it if that does not help |
//! | `internal` | 500 | `INTERNAL` | the layer is set up wrongly; the log says how | report it |
//!
//! [`retry`](crate::retry) has a layer that does what is in bold for answers of HTTP; a client of gRPC does it by the code.
//! Answers that were made before any work began
//! carry the extension [`NotStarted`](crate::NotStarted); those that tell of an equal request do not.
//!
//! # When things fail
//!
//! - **The store is down at the claim**: it is asked again for a second
//!   ([`retry_for`](IdempotencyLayer::retry_for)), then the answer is 503. The handler runs unprotected only
//!   by [`fail_open`](IdempotencyLayer::fail_open), and then takes `Option<Idempotency>`.
//! - **It is down at the end**: the caller gets the true response (after 3 s at most, 6 s with a response in a transaction), the claim is kept, and
//!   the result is sent again, at most 16 at a time, until it is stored or the process ends.
//! - **The claim is lost** (the process was stopped, or cut off from the store, for longer than the lease,
//!   and a retry took over): the caller gets the true response, nothing is stored, and it is
//!   [counted](IdempotencyStats::lost). Both attempts may have had effects: the resource that is written to
//!   has to check the [fence](Idempotency::fence).
//! - **The claim may be lost before the handler begins** (the reply to the claim came after the lease, or the process stood
//!   still while the request waited for the inner service, or for the lock of a [`LockLayer`](crate::LockLayer) inside):
//!   the store is asked first. If another attempt has the claim, the answer is 409 `idempotency-in-progress`, and a retry
//!   gets the other's result. A handler that waits itself asks [`Idempotency::is_held`] before an effect.
//! - **The process crashes while the handler runs**: after the lease the next retry takes over, and the
//!   handler sees [`Idempotency::attempt`] 2; or no retry takes over
//!   ([`on_orphan`](IdempotencyLayer::on_orphan)).
//!
//! # In the handler's own transaction
//!
//! Where the effect is in a database that keeps records too (Postgres), both can be committed together, and
//! whatever dies in between, the work is done once. The handler asks [`Idempotency::in_transaction`] what to
//! store of its response and makes that the last statement of its transaction; the layer then sends exactly
//! that response, if the transaction was committed. If it was not, nothing has happened: a conflict with another
//! transaction (SQLSTATE 40001, 40P01) that the handler answers with a 5xx releases the key. A handler that says
//! [`transactional`](Idempotency::transactional) first has that for conflicts in its first statements too.
//!
//! # What it does not give
//!
//! - **Exactly once.** If the process dies between the handler's effect and the record of it, it is unknown
//!   whether the effect happened: the next attempt runs again, or never. Where that must not be, the effect
//!   has to be made once by its key where it is made: send [`Idempotency::record_key`] along to the payment
//!   service as *its* idempotency key, or keep the record in the transaction of the effect (above).
//! - **Anything when the store loses its data.** A key whose record is gone is a new one. On Redis that takes
//!   persistence (`appendonly yes`; with `appendfsync everysec` the last second can be lost), no eviction
//!   (`maxmemory-policy noeviction`), and a replica that missed the last writes must not become the primary.
//!   `memory://` forgets with the process.
//! - **Anything past the retention** (24 h, [`retention`](IdempotencyLayer::retention), or as
//!   [`retention_of`](IdempotencyLayer::retention_of) and [`Verdict::KeepFor`] say): a retry that comes
//!   later runs again.
//! - **Order.** Two requests with different keys run side by side: that takes a [lock](crate::LockLayer).
//!
//! # Where the layer stands
//!
//! From outside to inside: trace → CORS → rate limit → compression → authentication → **idempotency** →
//! lock → handler. Authentication stands outside, so that a caller that lost access gets no replay;
//! compression too, so that what is kept is sent to every client as it can read it. The lock stands inside:
//! a replay needs none, and a busy one releases the key. In axum, put the layer on the `Router` (`layer`,
//! `route_layer`) or a route. Where it stands makes no difference to the keys.
//!
//! A timeout further out drops the request like a client that goes away: the handler runs on.

mod active;
mod admission;
mod body;
pub mod caller;
mod capture;
mod claim;
mod commit;
mod extract;
mod fingerprint;
mod future;
mod handle;
mod headers;
mod kept_answer;
mod key;
mod keyed;
mod layer;
mod lease;
mod origin;
mod owned;
mod parted;
mod policy;
mod renewal;
mod replay;
mod replayed_response;
mod run;
mod service;
mod settings;
mod settlement;
mod shared;
mod stats;
mod stored;
mod stream;
mod task;
mod transaction;
mod undo;

pub use crate::problem::Problem;
pub use body::ResponseBody;
pub use caller::Caller;
pub use extract::Idempotency;
pub use future::ResponseFuture;
pub use handle::IdempotencyHandle;
pub use headers::{KEPT_HEADERS, REPLAYED, REPLAYED_AGE, REPLAYED_EXPIRES_IN};
pub use kept_answer::KeptAnswer;
pub use key::MAX_KEY_BYTES;
pub use keyed::KeyedRequest;
pub use layer::IdempotencyLayer;
pub use policy::{Class, Ending, KeepAmbiguous, Outcome, Policy, RetryAmbiguous, Verdict};
pub use replay::Replay;
pub use service::IdempotencyService;
pub use settings::{
    DEFAULT_LEASE, DEFAULT_LIMIT, DEFAULT_MAX_DETACHED, DEFAULT_MAX_WAITERS, DEFAULT_READ_ON,
    DEFAULT_RETENTION, DEFAULT_RETRY_FOR,
};
pub use stats::IdempotencyStats;
