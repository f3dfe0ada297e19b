use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::headers::has_no_body;
use super::stream::Stream;
use crate::body::BoxError;
use crate::own_answer::AnswerBody;

pin_project! {
    /// The body of a response behind an [`IdempotencyLayer`](crate::IdempotencyLayer): the handler's, a stored one, or
    /// that of the layer's own answer.
    ///
    /// A middleware between the layer and its server names it, or boxes it:
    ///
    /// ```
    /// use bytes::Bytes;
    /// use dlock_tower::idempotency::ResponseBody;
    /// use http::Response;
    /// use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
    ///
    /// type BoxError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// fn boxed(response: Response<ResponseBody<Full<Bytes>>>) -> Response<UnsyncBoxBody<Bytes, BoxError>> {
    ///     response.map(BodyExt::boxed_unsync)
    /// }
    /// ```
    pub struct ResponseBody<R> {
        #[pin]
        inner: Inner<R>,
    }
}

pin_project! {
    #[project = InnerProj]
    enum Inner<R> {
        Bare { #[pin] body: R },
        None,
        Whole { pieces: VecDeque<Bytes>, trailers: Option<HeaderMap> },
        Stream { stream: Box<dyn DynStream> },
        Answer { #[pin] body: AnswerBody },
    }
}

/// [`Stream`] without its bounds, which a response body that only passes through need not meet.
trait DynStream: Send {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>>;
    fn is_end_stream(&self) -> bool;
    fn size_hint(&self) -> SizeHint;
}

impl<R> DynStream for Stream<R>
where
    R: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Stream::poll_frame(self, cx)
    }
    fn is_end_stream(&self) -> bool {
        Stream::is_end_stream(self)
    }
    fn size_hint(&self) -> SizeHint {
        Stream::size_hint(self)
    }
}

/// The default body: layers further out answer with it.
impl<R: Default> Default for ResponseBody<R> {
    fn default() -> Self {
        ResponseBody::bare(R::default())
    }
}

impl<R> ResponseBody<R> {
    pub(super) fn bare(body: R) -> Self {
        ResponseBody {
            inner: Inner::Bare { body },
        }
    }

    /// No body. Of a length that is known: layers around this one compress what may be long.
    pub(super) fn none() -> Self {
        ResponseBody { inner: Inner::None }
    }

    /// The complete body of a response with this status, of one that was stored.
    pub(super) fn stored(status: StatusCode, pieces: Vec<Bytes>, trailers: Option<HeaderMap>) -> Self {
        match has_no_body(status) {
            true => ResponseBody::none(),
            false => ResponseBody::whole(pieces, trailers),
        }
    }

    /// A complete body.
    pub(super) fn whole(pieces: Vec<Bytes>, trailers: Option<HeaderMap>) -> Self {
        ResponseBody {
            inner: Inner::Whole {
                pieces: pieces.into(),
                trailers,
            },
        }
    }

    pub(super) fn stream(stream: Stream<R>) -> Self
    where
        R: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        ResponseBody {
            inner: Inner::Stream {
                stream: Box::new(stream),
            },
        }
    }

    pub(super) fn answer(body: AnswerBody) -> Self {
        ResponseBody {
            inner: Inner::Answer { body },
        }
    }
}

impl<R> Body for ResponseBody<R>
where
    R: Body<Data = Bytes, Error: Into<BoxError>>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.project().inner.project() {
            InnerProj::Bare { body } => body.poll_frame(cx).map_err(Into::into),
            InnerProj::None => Poll::Ready(None),
            InnerProj::Whole { pieces, trailers } => {
                let next = pieces.pop_front().map(Frame::data);
                Poll::Ready(next.or_else(|| trailers.take().map(Frame::trailers)).map(Ok))
            }
            InnerProj::Stream { stream } => stream.poll_frame(cx),
            InnerProj::Answer { body } => body.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            Inner::Bare { body } => body.is_end_stream(),
            Inner::None => true,
            Inner::Whole { pieces, trailers } => pieces.is_empty() && trailers.is_none(),
            Inner::Stream { stream } => stream.is_end_stream(),
            Inner::Answer { body } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Inner::Bare { body } => body.size_hint(),
            Inner::None => SizeHint::with_exact(0),
            Inner::Whole { pieces, trailers } => {
                let len = pieces.iter().map(|piece| piece.len() as u64).sum();
                let mut hint = SizeHint::new();
                hint.set_lower(len);
                // HTTP/1 cannot send trailers after a body of known length.
                if trailers.is_none() {
                    hint.set_upper(len);
                }
                hint
            }
            Inner::Stream { stream } => stream.size_hint(),
            Inner::Answer { body } => body.size_hint(),
        }
    }
}

impl<R> fmt::Debug for ResponseBody<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match &self.inner {
            Inner::Bare { .. } => "Bare",
            Inner::None => "None",
            Inner::Whole { .. } => "Whole",
            Inner::Stream { .. } => "Stream",
            Inner::Answer { .. } => "Answer",
        };
        f.debug_struct("ResponseBody")
            .field("inner", &what)
            .finish_non_exhaustive()
    }
}
