//! Request bodies that are read ahead of the handler and then given to it all the same.

use std::convert::Infallible;
use std::error::Error;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use http_body_util::combinators::{BoxBody, UnsyncBoxBody};
use http_body_util::{BodyExt, Empty, Full, LengthLimitError};
use tokio::time::timeout;

use crate::Rejection;

pub(crate) type BoxError = Box<dyn Error + Send + Sync>;

/// A body that has been read to its end: the same bytes in one piece, and the trailers.
#[derive(Debug, Clone, Default)]
pub struct Buffered {
    data: Bytes,
    trailers: Option<HeaderMap>,
}

impl Buffered {
    /// All of the data.
    #[must_use]
    pub fn data(&self) -> &Bytes {
        &self.data
    }

    /// The trailers, if there were any.
    #[must_use]
    pub fn trailers(&self) -> Option<&HeaderMap> {
        self.trailers.as_ref()
    }

    /// Reads a body to its end, or gives up once it has more than `limit` bytes or takes longer than `time`.
    pub(crate) async fn read_within<B>(body: B, limit: usize, time: Duration) -> Result<Buffered, Rejection>
    where
        B: Body<Error: Into<BoxError>>,
    {
        match timeout(time, Buffered::read(body, limit)).await {
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
            return Err(Rejection::too_large(limit));
        }
        let mut body = pin!(body);
        let (mut first, mut more) = (Bytes::new(), BytesMut::new());
        let mut trailers = None::<HeaderMap>;
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| unreadable(error.into(), limit))?;
            match frame.into_data() {
                Ok(mut data) => {
                    if data.remaining() > limit - first.len().max(more.len()) {
                        return Err(Rejection::too_large(limit));
                    }
                    if more.is_empty() && first.is_empty() {
                        // The only piece of most bodies: not copied if it is `Bytes` already.
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
}

impl Buffered {
    /// Refuses a body that has fewer bytes than its `Content-Length`: it was cut off on its way.
    pub(crate) fn check_length(&self, headers: &HeaderMap) -> Result<(), Rejection> {
        let announced = headers.get(http::header::CONTENT_LENGTH);
        let announced: Option<usize> = announced.and_then(|length| length.to_str().ok()?.parse().ok());
        match announced {
            Some(announced) if self.data.len() < announced => Err(incomplete()),
            _ => Ok(()),
        }
    }
}

fn incomplete() -> Rejection {
    Rejection::new(
        http::StatusCode::BAD_REQUEST,
        "the body could not be read to its end",
    )
}

fn unreadable(error: BoxError, limit: usize) -> Rejection {
    let mut cause: Option<&(dyn Error + 'static)> = Some(&*error);
    while let Some(error) = cause {
        // A limit further out stands below ours.
        if error.is::<LengthLimitError>() {
            return Rejection::too_large(limit);
        }
        cause = error.source();
    }
    tracing::debug!(%error, "the body of a request could not be read");
    incomplete()
}

impl Body for Buffered {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = if self.data.is_empty() {
            self.trailers.take().map(Frame::trailers)
        } else {
            Some(Frame::data(std::mem::take(&mut self.data)))
        };
        Poll::Ready(next.map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        self.data.is_empty() && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.data.len() as u64)
    }
}

/// Bodies that can be made anew from what was read of them, so that a layer may look at the body and the
/// handler still gets it, byte for byte.
#[diagnostic::on_unimplemented(
    message = "the request body `{Self}` cannot be read ahead of the handler",
    label = "what is read before the handler needs `FromBuffered` here",
    note = "it is there for `axum::body::Body` (feature `axum` of dlock-tower), `Full<Bytes>`, `Empty<Bytes>`, `BoxBody` and `UnsyncBoxBody`, and for tonic's body (feature `tonic`)",
    note = "box the body further out, with a `map_request` layer that calls `BodyExt::boxed_unsync`, or implement the trait for a body of your own",
    note = "or leave it to the handler, which reads it under the lock then: `LockLayer::streaming`, best with `max_hold`"
)]
pub trait FromBuffered: Body + Sized {
    /// A body that yields this again.
    fn from_buffered(buffered: Buffered) -> Self;
}

impl FromBuffered for Buffered {
    fn from_buffered(buffered: Buffered) -> Self {
        buffered
    }
}

/// This body has no trailers, so none can have been read.
impl FromBuffered for Full<Bytes> {
    fn from_buffered(buffered: Buffered) -> Self {
        Full::new(buffered.data)
    }
}

/// This body has nothing, so nothing can have been read.
impl FromBuffered for Empty<Bytes> {
    fn from_buffered(_: Buffered) -> Self {
        Empty::new()
    }
}

impl<E: 'static> FromBuffered for BoxBody<Bytes, E> {
    fn from_buffered(buffered: Buffered) -> Self {
        buffered.map_err(|never| match never {}).boxed()
    }
}

impl<E: 'static> FromBuffered for UnsyncBoxBody<Bytes, E> {
    fn from_buffered(buffered: Buffered) -> Self {
        buffered.map_err(|never| match never {}).boxed_unsync()
    }
}

#[cfg(feature = "axum")]
impl FromBuffered for axum::body::Body {
    fn from_buffered(buffered: Buffered) -> Self {
        axum::body::Body::new(buffered)
    }
}
