//! The two halves of a call: the service becomes ready, then it is called. In between the request has not begun.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use dlock::scope::InScope;
use futures_util::future::Either;
use http::Request;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::kept::Hold;

/// A future in the frame of its locks, if there are any.
pub(super) type Framed<F> = Either<InScope<F>, F>;

pub(super) fn framed<F>(hold: Option<&Hold>, future: F) -> Framed<F>
where
    F: Future,
{
    match hold {
        Some(hold) => Either::Left(hold.guard().scope(future)),
        None => Either::Right(future),
    }
}

/// Drives a service to readiness for a request, and returns both.
pub(super) struct Readying<S, B>(Option<(S, Request<B>)>);

// Neither is pinned before the call.
impl<S, B> Unpin for Readying<S, B> {}

impl<S, B> Readying<S, B> {
    pub(super) fn new(service: S, request: Request<B>) -> Readying<S, B> {
        Readying(Some((service, request)))
    }
}

impl<S, B> Future for Readying<S, B>
where
    S: Service<Request<B>>,
{
    type Output = Result<(S, Request<B>), S::Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some((service, _)) = &mut self.0 {
            ready!(service.poll_ready(cx))?;
        }
        match self.0.take() {
            Some(ready) => Poll::Ready(Ok(ready)),
            None => panic!("`Readying` polled after it was done"),
        }
    }
}

pin_project! {
    /// Calls a service that is ready.
    #[project = CallingProj]
    pub(super) enum Calling<S, B>
    where
        S: Service<Request<B>>,
    {
        Ready {
            call: Option<(S, Request<B>)>,
        },
        Called {
            #[pin]
            response: S::Future,
        },
    }
}

impl<S, B> Calling<S, B>
where
    S: Service<Request<B>>,
{
    pub(super) fn new(service: S, request: Request<B>) -> Calling<S, B> {
        Calling::Ready {
            call: Some((service, request)),
        }
    }
}

impl<S, B> Future for Calling<S, B>
where
    S: Service<Request<B>>,
{
    type Output = Result<S::Response, S::Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            match self.as_mut().project() {
                CallingProj::Ready { call } => {
                    let Some((mut service, request)) = call.take() else {
                        panic!("`Calling` polled after it panicked");
                    };
                    let response = service.call(request);
                    self.set(Calling::Called { response });
                }
                CallingProj::Called { response } => return response.poll(cx),
            }
        }
    }
}
