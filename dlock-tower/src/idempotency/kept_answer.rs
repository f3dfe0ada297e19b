//! The stored answer to a request, for operators.

use bytes::Bytes;
use http::Response;

use super::stored::{Kept, Stored};

/// The stored outcome of a request that was carried out.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock::record::RecordState;
/// use dlock_tower::idempotency::{KeptAnswer, KeyedRequest};
/// use http::Method;
///
/// # let client = dlock::LockClient::memory();
/// let record = KeyedRequest::new(&Method::POST, "/orders", "cart-42").record_key()?;
/// let look = client.records()?.inspect(&record, true).await?;
/// if let Some(RecordState::Completed { response: Some(bytes), .. }) = look.record.map(|record| record.state)
///     && let Ok(KeptAnswer::Response(response)) = KeptAnswer::read(bytes)
/// {
///     println!("{}, {} bytes", response.status(), response.body().len());
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum KeptAnswer {
    /// A response: status, replayed headers, and body.
    Response(Response<Bytes>),
    /// There was a response, but it was too large to keep, a stream, or broke off.
    Unavailable,
    /// There was no response: the handler panicked, or its service failed.
    Failed,
}

impl KeptAnswer {
    /// Parses the response of a record.
    ///
    /// # Errors
    ///
    /// Why it cannot be read: it is something else, or of a newer version.
    pub fn read(response: Vec<u8>) -> Result<KeptAnswer, String> {
        let kept = match Stored::decode(response).map_err(|why| why.to_string())? {
            Stored::Response(kept) => kept,
            Stored::Unavailable => return Ok(KeptAnswer::Unavailable),
            Stored::Failed => return Ok(KeptAnswer::Failed),
        };
        let Kept {
            status,
            headers,
            body,
            ..
        } = *kept;
        let mut response = Response::new(Bytes::from(body.concat()));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        Ok(KeptAnswer::Response(response))
    }
}
