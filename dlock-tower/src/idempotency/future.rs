use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tower::util::Oneshot;
use tower_service::Service;

use super::admission::{Admitted, Refused};
use super::body::ResponseBody;
use super::replayed_response;
use super::run::run;
use super::shared::Core;
use super::task::Work;
use crate::Rejection;
use crate::body::BoxError;
use crate::own_answer::AnswerContext;

type Admission<B> = BoxFuture<'static, Result<Admitted<B>, Refused>>;
type Answer<R, E> = Result<Response<ResponseBody<R>>, E>;

pin_project! {
    /// The course of one request: claim its key and run the handler, or answer without it.
    ///
    /// Dropped before the handler runs, as when the client goes away, it leaves no claim. Dropped afterwards, the
    /// handler continues in a task, unless [`cancel_on_disconnect`](crate::IdempotencyLayer::cancel_on_disconnect) is
    /// set.
    ///
    /// A service around it can name it, and needs no boxed future:
    ///
    /// ```
    /// use bytes::Bytes;
    /// use dlock_tower::IdempotencyService;
    /// use dlock_tower::idempotency::caller::FindCaller;
    /// use dlock_tower::idempotency::{ResponseBody, ResponseFuture};
    /// use http::{Request, Response};
    /// use http_body_util::Full;
    /// use std::task::{Context, Poll};
    /// use tower::Service;
    ///
    /// struct Payments<S, C>(IdempotencyService<S, C>);
    ///
    /// impl<S, C> Service<Request<Full<Bytes>>> for Payments<S, C>
    /// where
    ///     S: Service<Request<Full<Bytes>>, Response = Response<Full<Bytes>>, Error: Send, Future: Send>
    ///         + Clone
    ///         + Send
    ///         + 'static,
    ///     C: FindCaller,
    /// {
    ///     type Response = Response<ResponseBody<Full<Bytes>>>;
    ///     type Error = S::Error;
    ///     type Future = ResponseFuture<S, Full<Bytes>, Full<Bytes>>;
    ///
    ///     fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
    ///         self.0.poll_ready(cx)
    ///     }
    ///
    ///     fn call(&mut self, request: Request<Full<Bytes>>) -> Self::Future {
    ///         self.0.call(request)
    ///     }
    /// }
    /// ```
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<S, B, R>
    where
        S: Service<Request<B>>,
        S: 'static,
        S::Error: 'static,
        R: 'static,
    {
        #[pin]
        state: State<S, B, R>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, B, R>
    where
        S: Service<Request<B>>,
        S: 'static,
        S::Error: 'static,
        R: 'static,
    {
        /// The layer does not apply to the request.
        Bare {
            #[pin]
            call: Oneshot<S, Request<B>>,
        },
        /// It is refused without a request to the store.
        Refused {
            rejection: Option<Rejection>,
            core: Core,
            answer_context: AnswerContext,
        },
        /// Its body is read and its key claimed.
        Admitting {
            admission: Admission<B>,
            inner: Option<S>,
            core: Core,
            answer_context: AnswerContext,
        },
        /// The handler runs under a claim.
        Running {
            work: Work<Answer<R, S::Error>>,
        },
        Done,
    }
}

impl<S, B, R> ResponseFuture<S, B, R>
where
    S: Service<Request<B>>,
{
    pub(super) fn bare(inner: S, request: Request<B>) -> Self {
        ResponseFuture {
            state: State::Bare {
                call: Oneshot::new(inner, request),
            },
        }
    }

    pub(super) fn refused(rejection: Rejection, core: Core, answer_context: AnswerContext) -> Self {
        ResponseFuture {
            state: State::Refused {
                rejection: Some(rejection),
                core,
                answer_context,
            },
        }
    }

    pub(super) fn admitting(
        inner: S,
        admission: Admission<B>,
        core: Core,
        answer_context: AnswerContext,
    ) -> Self {
        ResponseFuture {
            state: State::Admitting {
                admission,
                inner: Some(inner),
                core,
                answer_context,
            },
        }
    }
}

impl<S, B, R> Future for ResponseFuture<S, B, R>
where
    S: Service<Request<B>, Response = Response<R>, Future: Send> + Send + 'static,
    S::Error: Send,
    B: Send + 'static,
    R: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Output = Answer<R, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProj::Bare { call } => {
                    let answer = ready!(call.poll(cx));
                    state.set(State::Done);
                    return Poll::Ready(answer.map(|response| response.map(ResponseBody::bare)));
                }
                StateProj::Refused {
                    rejection,
                    core,
                    answer_context,
                } => {
                    let answer = rejection.take().map(|rejection| {
                        core.settings
                            .respond(rejection, answer_context)
                            .map(ResponseBody::answer)
                    });
                    state.set(State::Done);
                    match answer {
                        Some(answer) => return Poll::Ready(Ok(answer)),
                        None => continue,
                    }
                }
                StateProj::Admitting {
                    admission,
                    inner,
                    core,
                    answer_context,
                } => match (ready!(admission.as_mut().poll(cx)), inner.take()) {
                    (Ok(Admitted::Claimed(request, claim)), Some(inner)) => {
                        let shared = (*claim).clone();
                        State::Running {
                            work: Work::new(shared, run(inner, request, claim)),
                        }
                    }
                    (Ok(Admitted::Open(request)), Some(inner)) => State::Bare {
                        call: Oneshot::new(inner, request),
                    },
                    (Ok(_), None) => State::Done,
                    (Err(Refused::Rejected(rejection)), _) => State::Refused {
                        rejection: Some(rejection),
                        core: core.clone(),
                        answer_context: answer_context.clone(),
                    },
                    (Err(Refused::Replay(kept, version)), _) => {
                        state.set(State::Done);
                        return Poll::Ready(Ok(replayed_response::response(*kept, version)));
                    }
                },
                StateProj::Running { work } => {
                    let answer = ready!(Pin::new(work).poll(cx));
                    state.set(State::Done);
                    return Poll::Ready(answer);
                }
                StateProj::Done => panic!("`ResponseFuture` polled after it was done"),
            };
            state.set(next);
        }
    }
}

impl<S, B, R> fmt::Debug for ResponseFuture<S, B, R>
where
    S: Service<Request<B>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Bare { .. } => "Bare",
            State::Refused { .. } => "Refused",
            State::Admitting { .. } => "Admitting",
            State::Running { .. } => "Running",
            State::Done => "Done",
        };
        f.debug_struct("ResponseFuture")
            .field("state", &state)
            .finish_non_exhaustive()
    }
}
