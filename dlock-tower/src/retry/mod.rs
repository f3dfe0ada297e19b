//! The client's side of idempotent endpoints: a key for each operation, kept over its retries.
//!
//! [`RetryLayer`] goes around an HTTP client that is a Tower service over [`http::Request`], such as
//! hyper-util's. It gives each request that needs one an `Idempotency-Key`, sends the request again under
//! the same key when that is of use, and honours `Retry-After`.
//!
//! It is for answers of HTTP. It does not read `grpc-status`, and the status of a gRPC answer is always 200: for gRPC use the
//! retries of the gRPC client, and send the key as metadata.
//!
//! ```
//! use dlock_tower::retry::RetryLayer;
//! use tower::{Layer, ServiceExt};
//! # use bytes::Bytes;
//! # use http_body_util::Full;
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_tower::retry::SendError> {
//! # let sent = std::sync::Mutex::new(Vec::new());
//! # let sent: &'static std::sync::Mutex<Vec<http::HeaderValue>> = Box::leak(Box::new(sent));
//! # let http_client = tower::service_fn(move |request: http::Request<Full<Bytes>>| async move {
//! #     let mut sent = sent.lock().unwrap();
//! #     sent.push(request.headers()["idempotency-key"].clone());
//! #     let status = if sent.len() == 1 { 503 } else { 201 };
//! #     Ok::<_, std::convert::Infallible>(
//! #         http::Response::builder().status(status).body(Full::<Bytes>::default()).unwrap(),
//! #     )
//! # });
//! let client = RetryLayer::new().attempts(3).layer(http_client);
//!
//! let request = http::Request::post("https://shop.example/pay").body(Full::from("5")).unwrap();
//! let response = client.oneshot(request).await?; // 503 the first time, sent again
//! assert_eq!(response.status(), 201);
//! # let sent = sent.lock().unwrap();
//! # assert!(sent.len() == 2 && sent[0] == sent[1]);
//! # Ok(()) }
//! ```
//!
//! A request that has a key already keeps it: **where the operation may be tried again by a later run of your program,
//! make the key there and store it with the operation**. A key that the layer draws lives as long as the call, and is
//! lost when a timeout outside of the layer drops the call.
//!
//! # What is sent again
//!
//! | outcome | sent again |
//! |---|---|
//! | the client fails (no connection, no answer) | yes, unless [`retry_error`](RetryLayer::retry_error) says no |
//! | 429, 502, 503, 504 ([`retry_statuses`](RetryLayer::retry_statuses)) | yes |
//! | 409 with the type `urn:dlock:problem:idempotency-in-progress` | yes: the first one is still at work |
//! | 409 with `Retry-After` and a problem that is still compressed | yes, as for a request in progress |
//! | anything with `Idempotent-Replayed: true` | no: it will not change any more |
//! | all else | no |
//!
//! The pause is what `Retry-After` says, otherwise it grows from try to try; it is drawn at random, so that
//! clients that failed together do not come back together. After [`attempts`](RetryLayer::attempts) tries,
//! or when the next one would begin after [`total_time`](RetryLayer::total_time), the caller gets the last
//! outcome as it is; if the service fails to become ready for the next try, or does not become ready within `total_time`,
//! the caller gets an error that says so instead. An answer "in progress" is no failed attempt: only the total time bounds
//! how often the layer asks for the result. No try is cut short: put a timeout inside of this layer, and it counts as a
//! failure. Only for the body of a 409 that tells a problem does the layer itself wait, for at most 5 s.
//!
//! Put a layer that decompresses responses inside of this one, so that it can read what problem a 409 tells.
//!
//! [`Sent`], in the extensions of the response, tells the key and how many tries it took. Where there is no response,
//! [`SendError`] tells both, and its source is the client's own error; a caller that sends the request again by
//! itself does so under [`SendError::key`].
//!
//! # reqwest
//!
//! A function over `reqwest::Client` makes it a service over [`http::Request`]:
//!
//! ```text
//! tower::service_fn(move |request: http::Request<Bytes>| {
//!     let client = client.clone();
//!     async move {
//!         let response = client.execute(request.try_into()?).await?;
//!         Ok::<_, reqwest::Error>(http::Response::<reqwest::Body>::from(response))
//!     }
//! })
//! ```

mod body;
mod error;
mod layer;
mod retry_after;
mod retry_error;
mod sent;
mod service;
mod settings;

pub use body::ResponseBody;
pub use error::SendError;
pub use layer::RetryLayer;
pub use retry_error::{AnyError, RetryError, SomeErrors};
pub use sent::Sent;
pub use service::{ResponseFuture, RetryService};
pub use settings::{DEFAULT_ATTEMPTS, DEFAULT_TOTAL_TIME};
