//! A complete body in memory, and the bodies that can be built from it.

use std::convert::Infallible;
use std::error::Error;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use http_body_util::combinators::{BoxBody, UnsyncBoxBody};
use http_body_util::{BodyExt, Empty, Full};

pub(crate) type BoxError = Box<dyn Error + Send + Sync>;

/// A body that has been read to its end: the same bytes in one piece, and the trailers.
///
/// ```
/// use dlock_tower::body::Buffered;
///
/// let body = Buffered::default();
/// assert!(body.data().is_empty() && body.trailers().is_none());
/// ```
#[derive(Debug, Clone, Default)]
pub struct Buffered {
    pub(super) data: Bytes,
    pub(super) trailers: Option<HeaderMap>,
}

impl Buffered {
    /// Returns all of the data.
    #[must_use]
    pub fn data(&self) -> &Bytes {
        &self.data
    }

    /// Returns the trailers, if there were any.
    #[must_use]
    pub fn trailers(&self) -> Option<&HeaderMap> {
        self.trailers.as_ref()
    }
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

/// Bodies that can be rebuilt from their buffered contents, so that a layer may read the body and the handler still
/// gets it, byte for byte.
///
/// ```
/// use bytes::Bytes;
/// use dlock_tower::body::{Buffered, FromBuffered};
/// use http_body::{Body, Frame};
/// use std::convert::Infallible;
/// use std::pin::Pin;
/// use std::task::{Context, Poll};
///
/// /// A body of the service's own.
/// struct Upload(Buffered);
///
/// impl FromBuffered for Upload {
///     fn from_buffered(buffered: Buffered) -> Self {
///         Upload(buffered)
///     }
/// }
///
/// impl Body for Upload {
///     type Data = Bytes;
///     type Error = Infallible;
///
///     fn poll_frame(
///         mut self: Pin<&mut Self>,
///         cx: &mut Context<'_>,
///     ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
///         Pin::new(&mut self.0).poll_frame(cx)
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "the request body `{Self}` cannot be read ahead of the handler",
    label = "what is read before the handler needs `FromBuffered` here",
    note = "it is there for `axum::body::Body` (feature `axum` of dlock-tower), `Full<Bytes>`, `Empty<Bytes>`, `BoxBody` and `UnsyncBoxBody`, and for tonic's body (feature `tonic`)",
    note = "box the body further out, with a `map_request` layer that calls `BodyExt::boxed_unsync`, or implement the trait for a body of your own",
    note = "or leave it to the handler, which reads it under the lock then: `LockLayer::streaming`, best with `max_hold`"
)]
pub trait FromBuffered: Body + Sized {
    /// Builds a body with these contents.
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
