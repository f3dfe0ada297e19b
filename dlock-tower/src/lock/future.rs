use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use dlock::scope::InScope;
use futures_util::future::BoxFuture;
use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{Request, Response, Version};
use http_body::Body;
use pin_project_lite::pin_project;
use tower::util::Oneshot;
use tower_service::Service;

use super::admission::Admitted;
use super::body::ResponseBody;
use super::kept::{Hold, release_hold};
use super::lost::LockLost;
use super::settings::Settings;
use crate::asker::Asker;
use crate::not_started::Entry;
use crate::{Rejection, grpc};

type Admission<B> = BoxFuture<'static, Result<Admitted<B>, Rejection>>;

pin_project! {
    /// The course of one request: acquire the lock, run the handler inside, release the lock.
    ///
    /// Dropped at any point, as when the client goes away, it leaves nothing behind: no waiter, and no lock except for
    /// work that [keeps](super::RequestLocks) it.
    ///
    /// A service around it can name it, and needs no boxed future:
    ///
    /// ```
    /// use bytes::Bytes;
    /// use dlock_tower::LockService;
    /// use dlock_tower::key::ExtractKey;
    /// use dlock_tower::lock::{ResponseBody, ResponseFuture};
    /// use http::{Request, Response};
    /// use http_body_util::Full;
    /// use std::task::{Context, Poll};
    /// use tower::Service;
    ///
    /// struct Accounts<S, K>(LockService<S, K>);
    ///
    /// impl<S, K> Service<Request<Full<Bytes>>> for Accounts<S, K>
    /// where
    ///     S: Service<Request<Full<Bytes>>, Response = Response<Full<Bytes>>> + Clone,
    ///     K: ExtractKey<Full<Bytes>>,
    /// {
    ///     type Response = Response<ResponseBody<Full<Bytes>>>;
    ///     type Error = S::Error;
    ///     type Future = ResponseFuture<S, Full<Bytes>>;
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
    pub struct ResponseFuture<S, B>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        state: State<S, B>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, B>
    where
        S: Service<Request<B>>,
    {
        /// The key is looked for and the lock waited for.
        Admitting {
            admission: Admission<B>,
            after: Option<AfterAdmission<S>>,
        },
        /// The handler runs without a lock.
        Bare {
            #[pin]
            call: Oneshot<S, Request<B>>,
            // Of a request for which no route was matched.
            unrouted: Option<Answers>,
        },
        /// The handler runs in the lock's frame. It comes first: its destructors run under the lock.
        Locked {
            #[pin]
            call: InScope<Oneshot<S, Request<B>>>,
            // Set once the handler waits, if that stops when the lock is lost.
            lost: Option<BoxFuture<'static, LockLost>>,
            hold: Option<Arc<Hold>>,
            answers: Answers,
        },
        /// The handler has answered, the lock is being released.
        Releasing {
            release: BoxFuture<'static, ()>,
            outcome: Option<Result<S::Response, S::Error>>,
        },
        Done,
    }
}

/// What a request needs once its lock is held, or refused.
struct AfterAdmission<S> {
    inner: S,
    answers: Answers,
    entry: Option<Entry>,
}

/// How to answer a request.
pub(super) struct Answers {
    settings: Arc<Settings>,
    asker: Asker,
    version: Version,
    /// Whether a lock was left out because no route was matched for the request.
    is_unrouted: bool,
}

impl Answers {
    pub(super) fn of<B>(settings: Arc<Settings>, request: &Request<B>) -> Answers {
        Answers {
            settings,
            asker: Asker::of(request),
            version: request.version(),
            is_unrouted: false,
        }
    }

    fn note<R, E>(&self, outcome: &Result<Response<R>, E>) {
        if let (true, Ok(response)) = (self.is_unrouted, outcome) {
            self.settings.note_unrouted(response.status());
        }
    }

    /// Whether the lock is held until the body of this response is sent.
    fn hold_until_sent<R: Body>(&self, response: &Response<R>) -> bool {
        self.settings.until_body.is_some()
            && !response.body().is_end_stream()
            && self.announced(response) != Some(0)
    }

    /// How many bytes the server announces, if it asks for nothing after them: those of HTTP/1 do not.
    fn announced<R: Body>(&self, response: &Response<R>) -> Option<u64> {
        let headers = response.headers();
        if self.version > Version::HTTP_11 || headers.contains_key(TRANSFER_ENCODING) {
            return None;
        }
        let length = headers.get(CONTENT_LENGTH);
        let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
        length.or_else(|| response.body().size_hint().exact())
    }

    fn respond<R>(&self, rejection: Rejection) -> Response<ResponseBody<R>> {
        self.settings
            .respond(rejection, &self.asker)
            .map(ResponseBody::answer)
    }
}

impl<S, B> ResponseFuture<S, B>
where
    S: Service<Request<B>>,
{
    pub(super) fn bare(inner: S, request: Request<B>) -> Self {
        ResponseFuture {
            state: State::Bare {
                call: Oneshot::new(inner, request),
                unrouted: None,
            },
        }
    }

    pub(super) fn locked(inner: S, admission: Admission<B>, entry: Option<Entry>, answers: Answers) -> Self {
        ResponseFuture {
            state: State::Admitting {
                admission,
                after: Some(AfterAdmission {
                    inner,
                    answers,
                    entry,
                }),
            },
        }
    }
}

impl<S, B, R> Future for ResponseFuture<S, B>
where
    S: Service<Request<B>, Response = Response<R>>,
    R: Body,
{
    type Output = Result<Response<ResponseBody<R>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProj::Admitting { admission, after } => {
                    let admitted = ready!(admission.as_mut().poll(cx));
                    match (admitted, after.take()) {
                        (Ok(mut admitted), Some(after)) => {
                            if let Some(entry) = after.entry {
                                entry.admit(admitted.request.extensions_mut());
                            }
                            enter(after.inner, admitted, after.answers)
                        }
                        (Err(rejection), Some(after)) => {
                            let response = after.answers.respond(rejection);
                            state.set(State::Done);
                            return Poll::Ready(Ok(response));
                        }
                        (_, None) => State::Done,
                    }
                }
                StateProj::Bare { call, unrouted } => {
                    let outcome = ready!(call.poll(cx));
                    if let Some(answers) = unrouted {
                        answers.note(&outcome);
                    }
                    state.set(State::Done);
                    return Poll::Ready(outcome.map(|response| response.map(ResponseBody::bare)));
                }
                StateProj::Locked {
                    call,
                    lost,
                    hold,
                    answers,
                } => {
                    let outcome = match hold {
                        Some(hold) => ready!(hold.poll_handler(lost, cx, |cx| call.poll(cx))),
                        None => Ok(ready!(call.poll(cx))),
                    };
                    if let Ok(outcome) = &outcome {
                        answers.note(outcome);
                    }
                    match (outcome, hold.take()) {
                        (Err(LockLost { key, loss }), hold) => {
                            let response = answers.respond(Rejection::lost(&key, loss));
                            // First the handler is dropped, then the lock.
                            state.set(State::Done);
                            drop(hold);
                            return Poll::Ready(Ok(response));
                        }
                        (Ok(Ok(response)), Some(hold)) if answers.hold_until_sent(&response) => {
                            let lost = lost.take().or_else(|| hold.lost());
                            let announced = answers.announced(&response);
                            let grpc = grpc::has_trailers(response.headers());
                            state.set(State::Done);
                            return Poll::Ready(Ok(
                                response.map(|body| ResponseBody::held(body, hold, lost, announced, grpc))
                            ));
                        }
                        (Ok(outcome), hold) => State::Releasing {
                            release: Box::pin(release_hold(hold)),
                            outcome: Some(outcome),
                        },
                    }
                }
                StateProj::Releasing { release, outcome } => {
                    ready!(release.as_mut().poll(cx));
                    let outcome = outcome.take();
                    state.set(State::Done);
                    match outcome {
                        Some(outcome) => {
                            return Poll::Ready(outcome.map(|response| response.map(ResponseBody::bare)));
                        }
                        None => continue,
                    }
                }
                StateProj::Done => panic!("`ResponseFuture` polled after it was done"),
            };
            state.set(next);
        }
    }
}

/// Runs the handler, with its lock if it has one.
fn enter<S, B>(inner: S, admitted: Admitted<B>, mut answers: Answers) -> State<S, B>
where
    S: Service<Request<B>>,
{
    let call = Oneshot::new(inner, admitted.request);
    answers.is_unrouted = admitted.is_unrouted;
    match admitted.hold {
        None => State::Bare {
            call,
            unrouted: answers.is_unrouted.then_some(answers),
        },
        Some(hold) => {
            let call = hold.guard().scope(call);
            State::Locked {
                call,
                lost: None,
                hold: Some(hold),
                answers,
            }
        }
    }
}

impl<S, B> fmt::Debug for ResponseFuture<S, B>
where
    S: Service<Request<B>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Admitting { .. } => "Admitting",
            State::Bare { .. } => "Bare",
            State::Locked { .. } => "Locked",
            State::Releasing { .. } => "Releasing",
            State::Done => "Done",
        };
        f.debug_struct("ResponseFuture")
            .field("state", &state)
            .finish_non_exhaustive()
    }
}
