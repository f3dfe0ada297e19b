//! Reading a request's body to its end, within limits.

use std::error::Error;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::HeaderMap;
use http_body::Body;
use http_body_util::{BodyExt, LengthLimitError};
use tokio::time::timeout;

use super::buffered::{BoxError, Buffered};
use crate::Rejection;

/// How long a client may take to send its body by default: 30 s.
pub const DEFAULT_BODY_TIMEOUT: Duration = Duration::from_secs(30);

impl Buffered {
    /// Reads a body to its end, or gives up once it has more than `limit` bytes or takes longer than `time`.
    pub(crate) async fn read_within<B>(body: B, limit: usize, time: Duration) -> Result<Buffered, Rejection>
    where
        B: Body<Error: Into<BoxError>>,
    {
        let mut read = pin!(Buffered::read(body, limit));
        // A body that is here needs no timer.
        if let Poll::Ready(read) = futures_util::poll!(&mut read) {
            return read;
        }
        match timeout(time, read).await {
            Ok(read) => read,
            Err(_) => Err(Rejection::body_timeout(time)),
        }
    }

    /// Reads a body to its end, or gives up once it has more than `limit` bytes.
    pub(crate) async fn read<B>(body: B, limit: usize) -> Result<Buffered, Rejection>
    where
        B: Body<Error: Into<BoxError>>,
    {
        if body.size_hint().lower() > limit as u64 {
            return Err(Rejection::too_large(Some(limit)));
        }
        let mut body = pin!(body);
        let (mut first, mut more) = (Bytes::new(), BytesMut::new());
        let mut trailers = None::<HeaderMap>;
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| unreadable(error.into()))?;
            match frame.into_data() {
                Ok(mut data) => {
                    if data.remaining() > limit - first.len().max(more.len()) {
                        return Err(Rejection::too_large(Some(limit)));
                    }
                    if more.is_empty() && first.is_empty() {
                        // Most bodies have one piece: not copied if it is `Bytes` already.
                        first = data.copy_to_bytes(data.remaining());
                    } else {
                        if more.is_empty() {
                            more.put_slice(&first);
                        }
                        more.put(data);
                    }
                }
                Err(frame) => {
                    if let Ok(found) = frame.into_trailers() {
                        trailers.get_or_insert_default().extend(found);
                    }
                }
            }
        }
        let data = if more.is_empty() { first } else { more.freeze() };
        Ok(Buffered { data, trailers })
    }

    /// Refuses a body with fewer bytes than its `Content-Length`: it was cut off in transit.
    pub(crate) fn check_length(&self, headers: &HeaderMap) -> Result<(), Rejection> {
        let announced = headers.get(http::header::CONTENT_LENGTH);
        let announced: Option<usize> = announced.and_then(|length| length.to_str().ok()?.parse().ok());
        match announced {
            Some(announced) if self.data.len() < announced => Err(Rejection::body_incomplete()),
            _ => Ok(()),
        }
    }
}

fn unreadable(error: BoxError) -> Rejection {
    let mut cause: Option<&(dyn Error + 'static)> = Some(&*error);
    while let Some(error) = cause {
        // Its limit is below ours, and is not known here.
        if error.is::<LengthLimitError>() {
            return Rejection::too_large(None);
        }
        cause = error.source();
    }
    tracing::debug!(%error, "the body of a request could not be read");
    Rejection::body_incomplete()
}
