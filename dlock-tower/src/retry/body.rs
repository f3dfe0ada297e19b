use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use pin_project_lite::pin_project;

/// How many frames are read ahead at most: empty ones do not count as bytes.
const FRAMES_LIMIT: usize = 1024;

pin_project! {
    /// The body of a response behind a [`RetryLayer`](super::RetryLayer): that of the client, of which a
    /// part may have been read ahead to see what problem it tells.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use dlock_tower::retry::ResponseBody;
    /// use http::Response;
    /// use http_body_util::{BodyExt, Full};
    ///
    /// async fn receipt(response: Response<ResponseBody<Full<Bytes>>>) -> Bytes {
    ///     let Ok(body) = response.into_body().collect().await; // fails as the client's body does: here never
    ///     body.to_bytes()
    /// }
    /// ```
    pub struct ResponseBody<R: Body> {
        ahead: VecDeque<Result<Frame<R::Data>, R::Error>>,
        #[pin]
        rest: Option<R>,
    }
}

impl<R: Body> ResponseBody<R> {
    pub(super) fn untouched(body: R) -> Self {
        ResponseBody {
            ahead: VecDeque::new(),
            rest: Some(body),
        }
    }
}

impl<R: Body<Data = Bytes> + Unpin> ResponseBody<R> {
    /// Reads ahead up to `limit` bytes; answers what it has read if that is all. Dropped, it has lost nothing.
    pub(super) async fn read(&mut self, limit: usize) -> Option<Vec<u8>> {
        let mut text = Vec::new();
        while let Some(body) = &mut self.rest {
            let Some(frame) = body.frame().await else {
                self.rest = None;
                break;
            };
            let failed = frame.is_err();
            if let Some(data) = frame.as_ref().ok().and_then(Frame::data_ref) {
                text.extend_from_slice(data);
            }
            self.ahead.push_back(frame);
            if failed || text.len() > limit || self.ahead.len() >= FRAMES_LIMIT {
                return None;
            }
        }
        Some(text)
    }
}

impl<R: Body<Data = Bytes>> Body for ResponseBody<R> {
    type Data = Bytes;
    type Error = R::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, R::Error>>> {
        let mut this = self.project();
        if let Some(frame) = this.ahead.pop_front() {
            return Poll::Ready(Some(frame));
        }
        match this.rest.as_mut().as_pin_mut() {
            Some(body) => body.poll_frame(cx),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ahead.is_empty() && self.rest.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        if self.ahead.is_empty() {
            return self
                .rest
                .as_ref()
                .map_or_else(|| SizeHint::with_exact(0), Body::size_hint);
        }
        SizeHint::default()
    }
}

impl<R: Body> fmt::Debug for ResponseBody<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseBody").finish_non_exhaustive()
    }
}
