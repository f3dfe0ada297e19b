use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use dlock::scope::Scope;
use futures_util::future::BoxFuture;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::kept::{Hold, release_hold};
use super::lost::LockLost;
use crate::body::{BoxError, add_frames};
use crate::own_answer::AnswerBody;
use crate::{Rejection, grpc};

pin_project! {
    /// The body of a response behind a [`LockLayer`](crate::LockLayer): the handler's, or that of the layer's own
    /// answer.
    ///
    /// Its error is boxed, whatever error the handler's body has, because a body that is sent under a lock ends in
    /// [`LockLost`] when the lock is lost. An end without an error would look like a complete response.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use dlock_tower::lock::{LockLost, ResponseBody};
    /// use http_body_util::{BodyExt, Full};
    ///
    /// /// The whole body; `None` if its lock was lost before it was complete.
    /// async fn whole(body: ResponseBody<Full<Bytes>>) -> Result<Option<Bytes>, Box<dyn std::error::Error + Send + Sync>> {
    ///     match body.collect().await {
    ///         Ok(body) => Ok(Some(body.to_bytes())),
    ///         Err(error) if error.is::<LockLost>() => Ok(None),
    ///         Err(error) => Err(error),
    ///     }
    /// }
    /// ```
    pub struct ResponseBody<B> {
        #[pin]
        inner: Inner<B>,
    }
}

pin_project! {
    #[project = InnerProj]
    enum Inner<B> {
        Bare { #[pin] body: B },
        Held { #[pin] held: HeldBody<B> },
        Answer { #[pin] body: AnswerBody },
    }
}

impl<B> ResponseBody<B> {
    pub(super) fn bare(body: B) -> Self {
        ResponseBody {
            inner: Inner::Bare { body },
        }
    }

    pub(super) fn held(
        body: B,
        hold: Arc<Hold>,
        lost: Option<BoxFuture<'static, LockLost>>,
        announced: Option<u64>,
        grpc: bool,
    ) -> Self {
        // The frame to enter at every poll of the body.
        let scope = hold.guard().frame();
        let held = HeldBody {
            body: Some(body),
            scope,
            lock: Lock::Held { hold, lost },
            unsent: announced,
            grpc,
        };
        ResponseBody {
            inner: Inner::Held { held },
        }
    }

    pub(super) fn answer(body: AnswerBody) -> Self {
        ResponseBody {
            inner: Inner::Answer { body },
        }
    }
}

/// The default body, without a lock: layers further out answer with it.
impl<B: Default> Default for ResponseBody<B> {
    fn default() -> Self {
        ResponseBody::bare(B::default())
    }
}

impl<B> Body for ResponseBody<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.project().inner.project() {
            InnerProj::Bare { body } => body.poll_frame(cx).map_err(Into::into),
            InnerProj::Held { held } => held.poll_frame(cx),
            InnerProj::Answer { body } => body.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            Inner::Bare { body } => body.is_end_stream(),
            Inner::Held { held } => {
                matches!(held.lock, Lock::Gone) && held.body.as_ref().is_none_or(Body::is_end_stream)
            }
            Inner::Answer { body } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Inner::Bare { body } => body.size_hint(),
            Inner::Held { held } => held.size_hint(),
            Inner::Answer { body } => body.size_hint(),
        }
    }
}

pin_project! {
    /// A body that is sent under a lock.
    struct HeldBody<B> {
        #[pin]
        body: Option<B>,
        scope: Scope,
        lock: Lock,
        // How many of the announced bytes are left, if a server asks for nothing after them.
        unsent: Option<u64>,
        grpc: bool,
    }

    impl<B> PinnedDrop for HeldBody<B> {
        // The body is dropped in the frame and under the lock.
        fn drop(this: Pin<&mut Self>) {
            let this = this.project();
            drop_in(this.scope, this.body);
        }
    }
}

enum Lock {
    Held {
        hold: Arc<Hold>,
        lost: Option<BoxFuture<'static, LockLost>>,
    },
    Releasing {
        release: BoxFuture<'static, ()>,
        last: Option<Frame<Bytes>>,
    },
    Gone,
}

fn drop_in<B>(scope: &Scope, mut body: Pin<&mut Option<B>>) {
    if body.is_some() {
        let dropped = pin!(scope.wrap(poll_fn(|_| {
            body.set(None);
            Poll::Ready(())
        })));
        let _ = dropped.poll(&mut Context::from_waker(Waker::noop()));
    }
}

impl<B: Body> HeldBody<B> {
    fn size_hint(&self) -> SizeHint {
        let mut hint = match &self.body {
            Some(body) => body.size_hint(),
            None => SizeHint::with_exact(0),
        };
        if let Lock::Releasing { last, .. } = &self.lock {
            add_frames(&mut hint, last.iter());
        }
        hint
    }
}

impl<B> HeldBody<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>>,
{
    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let mut this = self.project();
        loop {
            match this.lock {
                Lock::Held { lost, .. } => {
                    if let Some(Poll::Ready(LockLost { key, loss })) =
                        lost.as_mut().map(|lost| lost.as_mut().poll(cx))
                    {
                        let rejection = Rejection::lost(&key, loss);
                        let error = LockLost { key, loss };
                        tracing::warn!(%error, "a response is cut short");
                        drop_in(this.scope, this.body);
                        *this.lock = Lock::Gone;
                        if *this.grpc {
                            // A gRPC client learns how a call ended only from this.
                            return Poll::Ready(Some(Ok(Frame::trailers(grpc::status(&rejection)))));
                        }
                        return Poll::Ready(Some(Err(error.into())));
                    }
                }
                Lock::Releasing { release, last } => {
                    ready!(release.as_mut().poll(cx));
                    let last = last.take();
                    *this.lock = Lock::Gone;
                    return Poll::Ready(last.map(Ok));
                }
                Lock::Gone => {
                    return match this.body.as_mut().as_pin_mut() {
                        Some(body) => body.poll_frame(cx).map_err(Into::into),
                        None => Poll::Ready(None),
                    };
                }
            }
            let frame = match this.body.as_mut().as_pin_mut() {
                Some(mut body) => {
                    let next = pin!(this.scope.wrap(poll_fn(|cx| body.as_mut().poll_frame(cx))));
                    ready!(next.poll(cx))
                }
                None => None,
            };
            let last = match frame.transpose() {
                Ok(last) => last,
                Err(error) => {
                    drop_in(this.scope, this.body);
                    *this.lock = Lock::Gone;
                    return Poll::Ready(Some(Err(error.into())));
                }
            };
            let body = this.body.as_ref().as_pin_ref();
            let has_ended =
                last.as_ref().is_none_or(Frame::is_trailers) || body.is_none_or(|body| body.is_end_stream());
            let sent = last.as_ref().and_then(Frame::data_ref).map_or(0, Bytes::len);
            *this.unsent = this.unsent.map(|unsent| unsent.saturating_sub(sent as u64));
            if !has_ended && *this.unsent != Some(0) {
                return Poll::Ready(last.map(Ok));
            }
            // The lock is released before the last frame: servers ask for nothing after trailers, nor after all bytes that
            // they have announced.
            if has_ended {
                drop_in(this.scope, this.body.as_mut());
            }
            if let Lock::Held { hold, .. } = std::mem::replace(this.lock, Lock::Gone) {
                *this.lock = Lock::Releasing {
                    release: Box::pin(release_hold(Some(hold))),
                    last,
                };
            }
        }
    }
}

impl<B> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match &self.inner {
            Inner::Bare { .. } => "Bare",
            Inner::Held { .. } => "Held",
            Inner::Answer { .. } => "Answer",
        };
        f.debug_struct("ResponseBody")
            .field("inner", &what)
            .finish_non_exhaustive()
    }
}
